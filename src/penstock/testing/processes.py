"""Other processes: functions that run in a fresh one, waits with an end, what a process is doing."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from penstock.testing.engine import ZYGOTE, Forked

T = TypeVar("T")


PATIENCE_SECS = 60.0
"""Longest wait for another process; a wait that takes this long has failed."""


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fresh process: one that has nothing open and shares nothing with this one but the disk."""
    return submit(_in_fork, function, args)


def wait_until(condition: Callable[[], T | None], what: str) -> T:
    """The first true value of `condition`, asked every few milliseconds."""
    until = time.monotonic() + PATIENCE_SECS
    while not (found := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {PATIENCE_SECS:.0f} s for {what}")
        time.sleep(0.005)
    return found


@cache
def _elsewhere() -> ProcessPoolExecutor:
    # Spawned, not forked: the test's own process may have threads and clients that no fork survives.
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), initializer=_warm_up)


def submit(function: Callable[..., Any], *args: Any) -> Any:
    # Pickled here and not by the pool: the other process must know where to look before it unpickles a test's classes.
    work = pickle.dumps((function, args))
    return _elsewhere().submit(_work, sys.path, work).result(timeout=4 * PATIENCE_SECS)


def _work(path: list[str], work: bytes) -> Any:
    sys.path[:] = path
    function, args = pickle.loads(work)
    return function(*args)


def _warm_up() -> None:
    """Pay once for what every forked process would pay for again: Arrow's late imports, and copies of what is garbage."""
    pa.array([0])
    gc.collect()
    gc.freeze()


def _in_fork(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    return Forked(lambda: function(*args)).result()


def is_stopped(pid: int) -> bool:
    return process_state(pid) == "T"


def process_state(pid: int) -> str:
    """One letter, as `ps` shows it; nothing if the process is gone."""
    return _read(pid, "stat").rpartition(")")[2].strip()[:1]


def stopped_children(pid: int, count: int) -> list[int]:
    children = list(children_of(pid))
    return children if len(children) == count and all(is_stopped(child) for child in children) else []


def wake_tasks(pids: Sequence[int]) -> list[int]:
    """Let stopped processes go on; gives those that were still there."""
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            found.append(pid)
    return found


def children_of(pid: int) -> Iterator[int]:
    """The processes that one has forked, by itself or through its zygote."""
    for child in map(int, _read(pid, f"task/{pid}/children").split()):
        if _read(child, "comm").strip() == ZYGOTE:
            yield from children_of(child)
        else:
            yield child


def _read(pid: int, name: str) -> str:
    """A file of /proc, or nothing: a process may end before its file is opened, and also before it is read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
