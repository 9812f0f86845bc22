"""Read a range of log in steps: the server decodes the next one while this one is worked on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

import psycopg
import pyarrow as pa
from adbc_driver_manager import dbapi as adbc_dbapi

from penstock.connectors.postgres_cdc import wal
from penstock.connectors.postgresql import connections

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.config import PostgresCdcConfig

T = TypeVar("T")

GLANCE_BYTES = 1 << 20
GLANCE_ANSWER_BYTES = 16 << 20
"""So little log, if what it holds is no more than that, comes as one value: a connection for Arrow takes longer to make."""

STEP_BYTES = 24 << 20
"""Least log that is worth a step of its own; a range of little more than that is read at once."""

STEPS = 4
"""Every step makes the server go through the log from where the slot's oldest transaction begins, so there are few."""

READERS = 2
"""Server processes that decode at once, each with a copy of the slot; what is before its step it passes over at a fifth of
the cost."""

AHEAD_BYTES = 24 << 20
"""What may wait for whoever works on it; twice as much is no faster, and four times that is held at once."""

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
    step = max(STEP_BYTES, (end - found.restart) // STEPS)
    edges = [*range(start, end - step // 2, step), end] if end - start > step + step // 2 else [start, end]
    with contextlib.ExitStack() as stack:
        copies: list[tuple[Any, str]] = []
        for _ in range(READERS if len(edges) > 2 else 1):
            reader = stack.enter_context(contextlib.closing(_connected(config)))
            copy = _copied(reader, config.slot, start) if len(edges) > 2 else None
            if copy is not None:
                copies.append((reader, copy))
        if copies:
            turns = [_Turns(copies, publications, edges, number, step) for number in range(len(copies))]
            ahead = [stack.enter_context(Ahead(iter(turn), _size, interrupt=turn.cancel)) for turn in turns]
            yield _in_turn(ahead, len(edges) - 1)
        else:
            peeked = wal.peek(reader, config.slot, publications, end)
            yield stack.enter_context(Ahead(peeked, _size, interrupt=reader.adbc_cancel))


def _connected(config: PostgresCdcConfig) -> Any:
    return connections.connect_arrow(config, logical_decoding_work_mem=f"{config.decoding_memory_bytes // 1024}kB")


@dataclass(frozen=True)
class _End:
    """Behind the answers of a step; `rest` if all that is left of the range follows it."""

    rest: bool = False


@dataclass(frozen=True)
class _Turns:
    """What one of several readers does: its copy of the slot is moved to each of its steps, and consumed there."""

    copies: Sequence[tuple[Any, str]]
    publications: Sequence[str]
    edges: Sequence[int]
    number: int
    step: int

    def __iter__(self) -> Iterator[pa.RecordBatch | _End]:
        connection, copy = self.copies[self.number]
        at = self.edges[0]
        for turn in range(self.number, len(self.edges) - 1, len(self.copies)):
            first, last = self.edges[turn], self.edges[turn + 1]
            if first > at:
                wal.advance(connection, copy, first)
            answered = 0
            for batch in wal.consume(connection, copy, self.publications, last):
                answered += batch.nbytes
                yield batch
            if answered < self.step // 8 and last < self.edges[-1]:
                # A transaction that is still open, or other tables': each step would only repeat it.
                yield _End(rest=True)
                yield from wal.consume(connection, copy, self.publications, self.edges[-1])
                return
            yield _End()
            at = last

    def cancel(self) -> None:
        self.copies[self.number][0].adbc_cancel()


def _in_turn(readers: Sequence[Iterator[pa.RecordBatch | _End]], steps: int) -> Iterator[pa.RecordBatch]:
    """The answers in the order of the log."""
    for turn in range(steps):
        rest = False
        for item in readers[turn % len(readers)]:
            if not isinstance(item, _End):
                yield item
            elif item.rest:
                rest = True
            else:
                break
        if rest:
            return


def _size(item: pa.RecordBatch | _End) -> int:
    return 0 if isinstance(item, _End) else item.nbytes


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
