"""Run an epoch's tasks in forked processes: the whole protocol without a JVM, cheap enough to be killed at every step."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa

from penstock import failpoints
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.pipeline.routing import Route, Target, partition_of
from penstock.runtime.job import (
    ApplyJob,
    ApplyResult,
    Job,
    TaskResult,
    is_plain,
)
from penstock.runtime.messages import letters
from penstock.runtime.reading import Reading
from penstock.runtime.task import run_task, run_work
from penstock.runtime.writing import Writer
from penstock.sink import Task, Topic

T = TypeVar("T")

_LIBC = ctypes.CDLL(None)  # loaded before any fork: a child should do as little as it can
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

ZYGOTE = "zygote"
"""The name of the process that tasks are forked from; they have it too, until they run."""


class Killed(Exception):
    """A signal ended a forked process before it had a result."""

    def __init__(self, number: int) -> None:
        super().__init__(f"killed by {signal.Signals(number).name}" if number > 0 else "ended without a result")
        self.signal = number

    def __reduce__(self) -> tuple[type[Killed], tuple[int]]:
        return type(self), (self.signal,)


class Forked(Generic[T]):
    """A forked process that runs one function and sends back what it returned or raised."""

    def __init__(self, function: Callable[[], T], *, orphan: bool = False) -> None:
        """`orphan`: it may outlive this process, as a task on another machine does."""
        self._reader, writer = os.pipe()
        self._ended: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._reader)
            _run_and_exit(function, writer, None if orphan else parent)
        os.close(writer)

    def fileno(self) -> int:
        """Readable once there is a result, or none will come."""
        return self._reader

    def result(self) -> T:
        """Wait for its end and that of all it forked; raises what it raised, or `Killed`."""
        with open(self._reader, "rb", closefd=False) as pipe:
            answer = pipe.read()
        status = self.wait()
        with contextlib.suppress(OSError):
            os.close(self._reader)
        try:
            value, error, trace = pickle.loads(answer)
        except (EOFError, pickle.UnpicklingError):
            raise Killed(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0) from None
        if error is not None:
            error.add_note(f"in process {self.pid}:\n{trace}")
            raise error
        return value  # type: ignore[no-any-return]

    def wait(self) -> int:
        """Wait for the process alone; its wait status."""
        if self._ended is None:
            _, self._ended = os.waitpid(self.pid, 0)
        return self._ended

    def kill(self) -> None:
        """End it if it still runs."""
        if self._ended is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        with contextlib.suppress(OSError):
            os.close(self._reader)


class Zygote:
    """
    A process that is forked before any client is open, and from which tasks are forked later.

    Clients of object stores and of Delta have threads, which a fork leaves without their locks: a task that is forked from a
    driver with such a client would hang. So the driver sends each task here, pickled, with the failpoint that is armed.
    """

    def __init__(self, *, orphans: bool = False) -> None:
        """`orphans`: tasks may outlive the driver."""
        self._socket, other = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self._socket.close()
            _serve(other, parent, orphans)
        other.close()

    def start(self, function: Callable[[], T]) -> Born[T]:
        reader, writer = os.pipe()
        work = pickle.dumps((function, failpoints.armed()))
        socket.send_fds(self._socket, [struct.pack("!cQ", b"t", len(work))], [writer])
        os.close(writer)
        self._socket.sendall(work)
        return Born(self, reader, self._answer())

    def wait(self, pid: int) -> int:
        """The wait status of a task."""
        self._socket.sendall(struct.pack("!cQ", b"w", pid))
        return self._answer()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whatever else was forked from here still has a copy of it
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _answer(self) -> int:
        data = _received(self._socket, 8)
        if len(data) < 8:
            raise FatalError("the process that forks tasks is gone", code="PEN-5012")
        return int(struct.unpack("!Q", data)[0])


class Born(Forked[T]):
    """A task that a zygote forked."""

    def __init__(self, zygote: Zygote, reader: int, pid: int) -> None:
        self._zygote, self._reader, self.pid = zygote, reader, pid
        self._ended = None

    def wait(self) -> int:
        if self._ended is None:
            self._ended = self._zygote.wait(self.pid)
        return self._ended


def _serve(requests: socket.socket, parent: int, orphans: bool) -> None:
    """The life of a zygote; never returns."""
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _LIBC.prctl(_PR_SET_NAME, ZYGOTE.encode())
        while os.getppid() == parent:
            head, fds, _, _ = socket.recv_fds(requests, 9, 1)
            if len(head) < 9:
                break
            kind, number = struct.unpack("!cQ", head)
            if kind == b"w":
                requests.sendall(struct.pack("!Q", os.waitpid(number, 0)[1]))
                continue
            work, own = _received(requests, number), os.getpid()
            pid = os.fork()
            if not pid:
                requests.close()
                _run_and_exit(partial(_unpacked, work), fds[0], None if orphans else own)
            os.close(fds[0])
            requests.sendall(struct.pack("!Q", pid))
    finally:
        os._exit(0)


def _unpacked(work: bytes) -> Any:
    _LIBC.prctl(_PR_SET_NAME, b"task")
    function, armed = pickle.loads(work)
    failpoints.arm(armed)
    return function()


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


class ForkEngine:
    """
    An `Engine` of plain processes. A route with `partitions` gets one task per partition that reads everything.

    `die_with_task`: a task that is killed takes the driver with it, so that a failpoint in a task is a crash of the run.
    `task_attempts`: how often a task is tried when it fails with a retryable error, as Spark does.
    `orphans`: tasks outlive a killed driver, as executors do.
    `zygote`: tasks are forked from a process that is made now, for sinks whose clients do not survive a fork. Make the
    engine before any of them is open; or give one that was made before there were threads.
    """

    def __init__(
        self,
        parallelism: int = 2,
        *,
        die_with_task: bool = False,
        task_attempts: int = 1,
        orphans: bool = False,
        zygote: bool | Zygote = False,
    ) -> None:
        self.parallelism = parallelism
        self.version = "forked processes"
        self.is_local = True
        self.die_with_task = die_with_task
        self.task_attempts = task_attempts
        self.orphans = orphans
        made = zygote if isinstance(zygote, Zygote) else None
        self._zygote = made or (Zygote(orphans=orphans) if zygote else None)

    def check(self, routes: Sequence[tuple[Target, pa.Schema]], keyed: Collection[str] = ()) -> None:
        for target, _ in routes:
            _refuse_sql(target.route, target.topic)

    def start(self) -> None:
        """Forked processes need no start."""

    def hold(self, lock: Path) -> None:
        """A forked task has the driver's locks anyway."""

    def busy(self) -> bool:
        return False

    def stop(self) -> None:
        """Every task has ended when `run` returns."""
        if self._zygote is not None:
            self._zygote.stop()
            self._zygote = None

    def run(self, job: Job) -> Sequence[TaskResult]:
        for route in job.router.effective:
            _refuse_sql(route, route.to)
        return self._all(_tasks(job, self.parallelism))

    def apply(self, job: ApplyJob) -> Sequence[ApplyResult]:
        return self._all([partial(run_work, job, group) for group in job.groups(self.parallelism)])

    def _all(self, tasks: Sequence[Callable[..., T]]) -> list[T]:
        """What each task returns; one that fails with a retryable error is tried again."""
        waiting = [(number, 0) for number in range(len(tasks))]
        running: dict[Forked[T], tuple[int, int]] = {}
        results: dict[int, T] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.parallelism:
                    number, attempt = waiting.pop(0)
                    child = self._start(partial(tasks[number], task=Task(number, attempt)))
                    running[child] = (number, attempt)
                for child in select.select(list(running), [], [])[0]:
                    number, attempt = running.pop(child)
                    try:
                        results[number] = self._result(child)
                    except RetryableError:
                        if attempt + 1 >= self.task_attempts:
                            raise
                        waiting.append((number, attempt + 1))
        finally:
            for child in running:
                child.kill()
        return [results[number] for number in range(len(tasks))]

    def _start(self, function: Callable[[], T]) -> Forked[T]:
        return self._zygote.start(function) if self._zygote is not None else Forked(function, orphan=self.orphans)

    def _result(self, child: Forked[T]) -> T:
        try:
            return child.result()
        except Killed as killed:
            if self.die_with_task and killed.signal:
                os.kill(os.getpid(), killed.signal)
            raise RetryableError(
                f"task process {child.pid} was {killed}",
                code="PEN-2006",
                hint="look for what killed it: out of memory?",
            ) from None


def _tasks(job: Job, parallelism: int) -> list[Callable[..., TaskResult]]:
    tasks: list[Callable[..., TaskResult]] = [
        partial(run_task, job, group, wanted=_is_whole) for group in job.groups(parallelism)
    ]
    for lanes in sorted({route.partitions for route in job.router.effective if route.partitions > 1}):
        tasks += [partial(_run_lane, job, lane, lanes) for lane in range(lanes)]
    return tasks


def _is_whole(target: Target) -> bool:
    return target.route.partitions == 1


def _run_lane(job: Job, lane: int, lanes: int, task: Task) -> TaskResult:
    """Read everything and keep the rows whose key belongs to this lane: per-key order without a shuffle."""
    failpoints.hit("stage.begin")
    reading = Reading(job, job.parts, lambda target: target.route.partitions == lanes, failures=lane == 0)
    writer = Writer(job, task)
    try:
        for rows in reading:
            if rows.target.topic != letters.TOPIC:
                rows = rows.only(
                    partition_of(rows.batch, rows.target.route.key_columns(rows.batch.schema), lanes) == lane
                )
            writer.take(rows)
        return reading.finish(writer.finish())
    finally:
        writer.close()


def _refuse_sql(route: Route, topic: Topic) -> None:
    if not is_plain(route):
        raise ConfigError(
            f"the route to {topic} has SQL or a transform, and the forking engine has no SQL",
            code="PEN-1009",
            hint="test that route with SparkEngine, or without its `sql` and `transform`",
        )


def _run_and_exit(function: Callable[[], Any], writer: int, parent: int | None) -> None:
    """The life of a forked process; never returns, and runs nothing of what the parent has planned for its own exit."""
    try:
        gc.freeze()  # a collection would write to, and so copy, every page of the parent's objects
        if parent is None:
            os.setsid()  # as on another machine: no signal to the driver's group reaches it
        else:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            answer = pickle.dumps((function(), None, ""))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
            answer = pickle.dumps((None, _portable(error), traceback.format_exc()))
        with open(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """The error if it survives pickling, else one that tells of it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error's pickling may fail in any way
        return FatalError(f"{type(error).__name__}: {error}", code="PEN-5012")
    return error
