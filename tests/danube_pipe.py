"""
Whole pipelines in processes of their own, for tests that kill them: `Pipe` in a test, and the process that it starts.

gRPC does not outlive a fork: the driver and its tasks come from processes that never spoke to a broker.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import threading
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from penstock import failpoints
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.job import Job, TaskResult
from penstock.runtime.task import run_task
from penstock.sink import Task
from penstock.testing import ForkEngine, MemorySink, MemorySinkConfig
from penstock.testing.engine import Forked, Killed
from penstock.testing.processes import wait_until

QUICK = "epoch_interval_ms = 20\nlinger_ms = 1\nretry_backoff_ms = 20\nmax_backoff_ms = 200\nmax_retries = 500\n"


KILLED = "killed"


class FreshEngine(ForkEngine):
    """Tasks in processes forked from one that the driver forked before it spoke to anybody; a killed one takes it along."""

    def __init__(self, parallelism: int = 2) -> None:
        super().__init__(parallelism)
        ours, theirs = socket.socketpair()
        driver = os.getpid()
        if not os.fork():
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            ours.close()
            if os.getppid() == driver:
                _serve(theirs.makefile("rwb"))
            os._exit(0)
        theirs.close()
        self._tasks = ours.makefile("rwb")

    def run(self, job: Job) -> Sequence[TaskResult]:
        return [self._run(job, group, Task(number)) for number, group in enumerate(job.groups(self.parallelism))]

    def _run(self, job: Job, group: Sequence[Any], task: Task) -> TaskResult:
        pickle.dump((job, group, task), self._tasks)
        self._tasks.flush()
        result, error = pickle.load(self._tasks)
        if error == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if error is not None:
            raise error
        return result


def _serve(requests: Any) -> None:
    while True:
        job, group, task = pickle.load(requests)
        answer: tuple[Any, Any]
        try:
            answer = Forked(lambda: run_task(job, group, task)).result(), None  # noqa: B023 - run at once
        except Killed:
            answer = None, KILLED
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it
            answer = None, error
        pickle.dump(answer, requests)
        requests.flush()


class Pipe:
    """A pipeline file and its runs."""

    def __init__(self, directory: Path, text: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.file = directory / "pipeline.toml"
        section = "[processing]\n"  # a file that has one keeps what it says there
        if section not in text:
            text += f"\n{section}state_dir = 'state'\n"
        self.file.write_text(text.replace(section, section + QUICK))
        self.process: Any = None

    def start(self, failpoint: str = "") -> None:
        started = self.directory / "started"
        started.unlink(missing_ok=True)
        self.process = STARTER.Process(target=_drive, args=(self.directory, failpoint), daemon=False)
        self.process.start()
        wait_until(started.exists, "the process")  # from here on a signal is a wish to stop

    def killed(self, failpoint: str) -> None:
        """Run until the failpoint ends it."""
        self.start(failpoint)
        assert self.wait() == -signal.SIGKILL, self.log()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        assert self.wait() == 0, self.log()

    def wait(self) -> int:
        assert self.process is not None
        self.process.join(120)
        ended = self.process.exitcode
        if ended is None:
            os.kill(self.process.pid, signal.SIGUSR1)  # it writes down where its threads are
            self.process.join(2)
            pytest.fail(f"it did not end: {self.log(20_000)}")
        self.process = None
        return int(ended)

    def run_until(self, done: Any, what: str) -> None:
        """Run until the condition holds, and stop in an orderly way."""
        self.start()
        assert self.process is not None
        process = self.process
        wait_until(lambda: done() or not process.is_alive(), what)
        assert process.is_alive(), self.log()
        self.stop()

    def rows(self, topic: str, sink: str = "target") -> list[dict[str, Any]]:
        """What the memory sink at `target` shows."""
        return MemorySink(MemorySinkConfig(path=self.directory / sink)).visible(topic)

    def log(self, most: int = 4000) -> str:
        return (self.directory / "log").read_text()[-most:]


def _drive(directory: Path, failpoint: str) -> None:
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    (directory / "started").touch()
    failpoints.arm(failpoint or None)
    supervisor.run(Pipeline.from_toml(directory / "pipeline.toml"), engine=FreshEngine(), stop=stop)


STARTER = get_context("forkserver")
# By names that are found without the path of the tests: what is imported there need not be imported for each run.
STARTER.set_forkserver_preload(
    ["penstock.testing", "penstock.pipeline.file", "penstock.runtime.supervisor", "penstock.connectors.danube"]
)
