"""Pipelines that are pushed to, in processes that a test kills; and senders that note what was acknowledged."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_SECS = 120.0

_RUN = """
import signal, sys, threading
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
supervisor.run(Pipeline.from_toml(sys.argv[1]), ForkEngine(1), stop=stop)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Runner:
    """Runs a pipeline file in a process of its own; again after each kill."""

    def __init__(self, file: Path, port: int) -> None:
        self._file, self._port = file, port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, failpoint: str | None = None) -> None:
        """Start it, and wait until it listens or is dead."""
        until = time.monotonic() + PATIENCE_SECS
        while True:
            env = {**os.environ, **({"PENSTOCK_FAILPOINT": failpoint} if failpoint else {})}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN, str(self._file)], env=env, stderr=subprocess.PIPE
            )
            while self._process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                    return
                time.sleep(0.02)
            said = self._process.stderr.read().decode() if self._process.stderr else ""
            if self._process.returncode == -signal.SIGKILL:
                return
            # A task that was forked may hold the port for a moment after its parent was killed.
            assert "already" in said or "in use" in said, said
            assert time.monotonic() < until, said
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_for_kill(self) -> None:
        assert self._process is not None
        assert self._process.wait(PATIENCE_SECS) == -signal.SIGKILL, (
            self._process.stderr and self._process.stderr.read()
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it as a service manager does."""
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(PATIENCE_SECS) == 0, self._process.stderr and self._process.stderr.read()


class Senders:
    """Threads that POST numbered events until each is answered 200, and note every try."""

    def __init__(self, port: int, threads: int = 8, batch: int = 1) -> None:
        self.acknowledged: set[int] = set()
        self.unclear: set[int] = set()
        """Events of requests that got no answer: they may be stored, or not."""
        self._port, self._batch = port, batch
        self._next = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Senders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Send no new events, and wait until those on their way are acknowledged."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECS)
            assert not thread.is_alive(), "a sender was never answered"

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_SECS)
        while not self._stop.is_set():
            with self._lock:
                ids = list(range(self._next, self._next + self._batch))
                self._next += self._batch
            while not self._sent(connection, ids):
                time.sleep(0.02)
        connection.close()

    def _sent(self, connection: http.client.HTTPConnection, ids: list[int]) -> bool:
        headers = {"Content-Type": "application/x-ndjson", "X-Delivery": str(ids[0])}
        body = b"".join(b'{"id":%d}\n' % each for each in ids)
        try:
            connection.request("POST", "/events", body, headers)
            answer = connection.getresponse()
            said = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            connection.close()
            self.unclear.update(ids)
            return False
        if answer.status != 200:
            assert answer.status in (429, 503), said
            return False
        assert said == {"accepted": len(ids)}
        self.acknowledged.update(ids)
        return True


@contextlib.contextmanager
def running(file: Path, port: int) -> Iterator[Runner]:
    """A runner that is stopped when the block ends, whatever happens."""
    runner = Runner(file, port)
    try:
        yield runner
    finally:
        if runner.alive:
            runner.kill()
