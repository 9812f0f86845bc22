"""
The one event loop on which a process speaks to brokers.

gRPC has one queue of answers for all loops of a process. An answer for a loop that was closed stops the delivery of those after
it, until something else arrives. So no loop is ever closed: sources and sinks come and go, and share this one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run it on the loop; the future is for other threads."""
    return asyncio.run_coroutine_threadsafe(work, shared())


def shared() -> asyncio.AbstractEventLoop:
    """The loop, which runs in a thread of its own; a forked process has another one."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="danube", daemon=True).start()
            _running = (os.getpid(), loop)
        return _running[1]


def _unlocked() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_unlocked)
