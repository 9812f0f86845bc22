"""Read a range of log in steps: the server decodes the next one while this one is worked on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

import psycopg
import pyarrow as pa
from adbc_driver_manager import dbapi as adbc_dbapi

from penstock.connectors.postgres_cdc import wal

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.source import PostgresCdcConfig

T = TypeVar("T")

GLANCE_BYTES = 1 << 20
GLANCE_ANSWER_BYTES = 16 << 20
"""So little log, if what it holds is no more than that, comes as one value: a connection for Arrow takes longer to make."""

STEP_BYTES = 24 << 20
"""Least log that is worth a step of its own; a range of little more than that is read at once."""

STEPS = 4
"""Every step makes the server go through the log from where the slot's oldest transaction begins, so there are few."""

AHEAD_BYTES = 64 << 20
"""What may wait for whoever works on it: a step of log, so that the server is not kept from the next."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def messages(
    config: PostgresCdcConfig,
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    found: wal.Slot,
    start: int,
    end: int,
) -> Iterator[Iterator[pa.RecordBatch]]:
    """What the slot holds before `end`, from `start` or before it; the slot itself stays where it is."""
    if end - start <= GLANCE_BYTES and end - found.restart <= STEP_BYTES:
        few = wal.glance(connection, config.slot, publications, end, GLANCE_ANSWER_BYTES)
        if few is not None:
            yield iter([few])
            return
    memory = f"{config.decoding_memory_bytes // 1024}kB"
    with contextlib.closing(wal.connect_arrow(config, logical_decoding_work_mem=memory)) as reader:
        pulled = _stepped(reader, config.slot, publications, found, start, end)
        with Ahead(pulled, lambda batch: batch.nbytes, interrupt=reader.adbc_cancel) as sent:
            yield sent


def _stepped(
    connection: Any, slot: str, publications: Sequence[str], found: wal.Slot, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Peek at a short range; consume a temporary copy of the slot for a long one: it goes with its session, killed or not."""
    step = max(STEP_BYTES, (end - found.restart) // STEPS)
    copy = _copied(connection, slot, start) if end - start > step + step // 2 else None
    if copy is None:
        yield from wal.peek(connection, slot, publications, end)
        return
    at = start
    while at < end:
        at = end if end - at <= step + step // 2 else at + step
        answered = 0
        for batch in wal.consume(connection, copy, publications, at):
            answered += batch.nbytes
            yield batch
        if answered < step // 8:  # a transaction that is still open, or other tables': each step would only repeat it
            step = end


def _copied(connection: Any, slot: str, start: int) -> str | None:
    """The name of a copy of the slot; None if the server has no room for one."""
    name = f"{slot[:50]}_{uuid4().hex[:12]}"
    try:
        confirmed = wal.copy_slot(connection, slot, name)
    except adbc_dbapi.Error as error:
        if error.sqlstate != "53400":  # configuration limit exceeded
            raise
        _log.warning(
            "the log is read more slowly than it could be: there is no free replication slot for a temporary copy of %r; "
            "raise max_replication_slots",
            slot,
        )
        return None
    wal.verify_confirmed(confirmed, slot, start)
    return name


class Ahead(Generic[T]):
    """
    Has a thread pull an iterator, so many bytes ahead of whoever iterates over this; what it raises is raised there.

    Leaving it ends the thread: `interrupt` makes a pull that blocks fail.
    """

    def __init__(
        self, items: Iterator[T], size: Callable[[T], int], *, interrupt: Callable[[], object] = lambda: None
    ) -> None:
        self._items, self._size, self._interrupt = items, size, interrupt
        self._ready: deque[T] = deque()
        self._held = 0
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._pull, name="ahead", daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self._taken()

    def __exit__(self, *exc: Any) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self._thread.is_alive() and not self._ended:
                self._interrupt()

    def _pull(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._ready.append(item)
                    self._held += self._size(item)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stopped or self._held < AHEAD_BYTES)
                    if self._stopped:
                        break
        except BaseException as error:  # noqa: BLE001 - it is raised where the items are taken
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _taken(self) -> Iterator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._ready) or self._ended)
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._held -= self._size(item)
                self._changed.notify_all()
            yield item
        if self._error is not None:
            raise self._error
