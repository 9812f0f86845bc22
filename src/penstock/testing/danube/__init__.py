"""
A Danube broker for tests, in a process of its own on a free port of 127.0.0.1.

It speaks the protocol of the shipped stubs and does what the real broker does: windows of unacknowledged messages, late
acknowledgements, redelivery with back-off, poison policies, the four kinds of subscriptions, partitions, schemas. It can
be killed and started again on what it had written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.schema.registry.danube_client import api
from penstock.testing.danube.options import Options

__all__ = ["DanubeBroker", "Options"]


class DanubeBroker:
    """One broker; `with DanubeBroker() as broker:` starts it and ends it."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(**options)
        # Bound as long as this object lives, or else somebody may get the port while the broker is down.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = int(self._held.getsockname()[1])
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-danube-"))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DanubeBroker:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._held.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"{'https' if self.options.certificate else 'http'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process, while it runs."""
        assert self._process is not None
        return self._process.pid

    def start(self, **changes: Any) -> None:
        """Start it, or start it again, on the same port and directory."""
        self.options = replace(self.options, **changes)
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("__main__.py")),
                    str(self.port),
                    str(self.directory),
                    self.options.dump(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
                start_new_session=True,
            )
        self._answer()

    def kill(self) -> None:
        """SIGKILL: what was not written down is gone."""
        self._end(lambda process: process.kill())

    def freeze(self) -> None:
        """Its connections stay, and nothing is answered any more; `kill` still ends it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End it in an orderly way: cursors are written down."""
        self._end(lambda process: process.stdin.close() if process.stdin else None)

    def restart(self, **changes: Any) -> None:
        self.kill()
        self.start(**changes)

    def tell(self, do: str, **command: Any) -> Any:
        """A command of the test: `report`, `read`, `set`, `fail`, `break`, `create`, `forget`, `reset`."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def topic(self, name: str) -> dict[str, Any]:
        """What the broker knows of a topic."""
        return dict(self.tell("report")["topics"].get(name, {}))

    def subscription(self, topic: str, name: str) -> dict[str, Any]:
        return dict(self.topic(topic).get("subscriptions", {}).get(name, {}))

    def messages(self, topic: str) -> list[Any]:
        """Every message of a topic, in its order."""
        return [api.StreamMessage.FromString(bytes.fromhex(each)) for each in self.tell("read", topic=topic)]

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the broker ended:\n{(self.directory / 'log').read_text()[-2000:]}")
        return json.loads(line)

    def _end(self, how: Any) -> None:
        if self._process is None:
            return
        how(self._process)
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None
