"""Read a range of log: what the server is asked, and how it decodes the next step while this one is worked on."""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

import numpy as np
import psycopg
import pyarrow as pa
from adbc_driver_manager import dbapi as adbc_dbapi

from penstock.connectors.postgres_cdc.log.decode import Decoder, Rows
from penstock.connectors.postgres_cdc.log.lsn import lsn_text
from penstock.connectors.postgres_cdc.log.slot import Slot, advance_copy, copy_slot, verify_confirmed
from penstock.connectors.postgresql import connections
from penstock.connectors.postgresql.connections import literal

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.config import PostgresLogConfig

T = TypeVar("T")

SMALL_RANGE_BYTES = 1 << 20
SMALL_ANSWER_BYTES = 16 << 20
"""A range of at most this much log, with at most this much in the answer, comes as one value: to make an Arrow connection
would take longer."""

STEP_BYTES = 24 << 20
"""Least log that is worth a step of its own; a range that is only a little longer is read in one step."""

STEPS = 4
"""Most steps of a range. The server starts each one where the slot's oldest transaction begins, so there are few."""

READERS = 2
"""Server processes that decode at the same time, each with a copy of the slot. Skipping the log before its step costs one a
fifth of decoding it."""

PLAIN_BYTES = 4 << 20
"""Messages that come as one batch over a plain connection."""

PREFETCH_BYTES = 24 << 20
"""Most bytes that wait between two stages. Twice as much is no faster; there are four such stages."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def changes(
    config: PostgresLogConfig,
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    found: Slot,
    decoder: Decoder,
    start: int,
    end: int,
    *,
    plain: bool = False,
) -> Iterator[Iterator[Rows]]:
    """The decoded changes of a range in the order of the log; the slot itself stays where it is. `plain`: see `peek_plain`."""

    def decoded(sent: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
        for batch in sent:
            yield from decoder.feed(batch)

    with (
        messages(config, connection, publications, found, start, end, plain) as sent,
        Prefetch(decoded(sent), lambda item: item.batch.nbytes) as rows,
    ):
        yield rows


@contextlib.contextmanager
def messages(
    config: PostgresLogConfig,
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    found: Slot,
    start: int,
    end: int,
    plain: bool = False,
) -> Iterator[Iterator[pa.RecordBatch]]:
    """The slot's messages up to `end`, beginning at `start` or before it; the slot itself stays where it is."""
    if end - start <= SMALL_RANGE_BYTES and end - found.restart <= STEP_BYTES:
        few = peek_small(connection, config.slot, publications, end, SMALL_ANSWER_BYTES)
        if few is not None:
            yield iter([few])
            return
    if plain:
        with contextlib.closing(connections.connect(config)) as own:
            own.execute(f"SET logical_decoding_work_mem = '{_memory(config)}'")
            peeked = peek_plain(own, config.slot, publications, end)
            with Prefetch(peeked, _size, interrupt=own.cancel) as ahead:
                yield ahead
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
            readers = [stack.enter_context(Prefetch(iter(turn), _size, interrupt=turn.cancel)) for turn in turns]
            yield _in_turn(readers, len(edges) - 1)
        else:
            peeked = peek(reader, config.slot, publications, end)
            yield stack.enter_context(Prefetch(peeked, _size, interrupt=reader.adbc_cancel))


def _connected(config: PostgresLogConfig) -> Any:
    return connections.connect_arrow(config, logical_decoding_work_mem=_memory(config))


def _memory(config: PostgresLogConfig) -> str:
    return f"{config.decoding_memory_bytes // 1024}kB"


@dataclass(frozen=True)
class _End:
    """Follows the answers of a step; `rest`: everything that is left of the range comes next."""

    rest: bool = False


@dataclass(frozen=True)
class _Turns:
    """One of several readers: it moves its copy of the slot to each of its steps, and consumes the log there."""

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
                advance_copy(connection, copy, first)
            answered = 0
            for batch in consume(connection, copy, self.publications, last):
                answered += batch.nbytes
                yield batch
            if answered < self.step // 8 and last < self.edges[-1]:
                # A transaction that is still open, or changes of other tables: each step would only repeat that work.
                yield _End(rest=True)
                yield from consume(connection, copy, self.publications, self.edges[-1])
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
        confirmed = copy_slot(connection, slot, name)
    except adbc_dbapi.Error as error:
        if error.sqlstate != "53400":  # configuration limit exceeded
            raise
        _log.warning(
            "the log is read more slowly than it could be: there is no free replication slot for a temporary copy of %r; "
            "raise max_replication_slots",
            slot,
        )
        return None
    verify_confirmed(confirmed, slot, start)
    return name


class Prefetch(Generic[T]):
    """
    Pulls an iterator in a thread, up to `PREFETCH_BYTES` ahead of the consumer; the consumer gets what it raises.

    Leaving the context ends the thread: `interrupt` makes a pull that blocks fail.
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
        self._thread = threading.Thread(target=self._pull, name="prefetch", daemon=True)

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
                    self._changed.wait_for(lambda: self._stopped or self._held < PREFETCH_BYTES)
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


# -- what the server is asked ----------------------------------------------------------------------------------------


def _changes(slot_name: str, publications: Sequence[str], upto: int, changes: str = "NULL", how: str = "peek") -> str:
    names = ",".join(f'"{name}"' for name in publications)
    return (
        f"pg_logical_slot_{how}_binary_changes({literal(slot_name)}, '{lsn_text(upto)}', {changes}, "
        f"'proto_version', '1', 'publication_names', {literal(names)})"
    )


def has_changes(
    connection: psycopg.Connection[Any],
    slot_name: str,
    publications: Sequence[str],
    confirmed: int,
    start: int,
    end: int,
) -> bool:
    """True if a transaction in the range touches a published table."""
    # The first will do, unless there may be some before it that were read and are not yet acknowledged.
    changes = "1" if confirmed == start else "NULL"
    row = connection.execute(
        # A BEGIN says where its transaction commits.
        "SELECT EXISTS (SELECT FROM (SELECT ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::int8 AS at "
        f"FROM {_changes(slot_name, publications, end, changes)} WHERE substr(data, 1, 1) = 'B') AS begun "
        f"WHERE at >= {start} AND at < {end})"
    ).fetchone()
    return bool(row and row[0])


def truncates(
    connection: psycopg.Connection[Any], slot_name: str, publications: Sequence[str], start: int, end: int
) -> Counter[tuple[int, int]]:
    """How often each transaction that commits in the range has truncated a table, by their numbers."""
    sent = connection.execute(
        f"SELECT data FROM {_changes(slot_name, publications, end)} WHERE substr(data, 1, 1) IN ('B', 'T')", binary=True
    )
    found: Counter[tuple[int, int]] = Counter()
    lsn = xid = 0
    for (data,) in sent:
        if data[:1] == b"B":
            lsn, _, xid = struct.unpack_from(">QqI", data, 1)
        elif lsn >= start:
            (count,) = struct.unpack_from(">I", data, 1)
            found.update((xid, oid) for oid in struct.unpack_from(f">{count}I", data, 6))
    return found


def verify_decoded(connection: psycopg.Connection[Any], slot_name: str, publications: Sequence[str], end: int) -> None:
    """Decode a range and drop the answer: servers before 18 fail on changes from before the publication existed."""
    if connection.info.server_version < 180000:
        connection.execute(f"SELECT count(*) FROM {_changes(slot_name, publications, end)}")


def peek(connection: Any, slot_name: str, publications: Sequence[str], end: int) -> Iterator[pa.RecordBatch]:
    """The messages from the slot's own place to `end`, as the server sends them."""
    yield from batches(connection, f"SELECT data FROM {_changes(slot_name, publications, end)}")


def peek_small(
    connection: psycopg.Connection[Any], slot_name: str, publications: Sequence[str], end: int, most: int
) -> pa.RecordBatch | None:
    """The same over a plain connection, all in one value; None if that would have more than `most` bytes."""
    row = connection.execute(
        f"WITH sent AS MATERIALIZED (SELECT data FROM {_changes(slot_name, publications, end)}), "
        "size AS (SELECT coalesce(sum(length(data)), 0) AS bytes FROM sent) "
        "SELECT max(bytes), string_agg(int4send(length(data)), ''), string_agg(data, '') "
        f"FROM size LEFT JOIN sent ON bytes <= {most}",
        binary=True,
    ).fetchone()
    assert row is not None
    size, lengths, content = row
    if size > most:
        return None
    offsets = np.concatenate(([0], np.cumsum(np.frombuffer(lengths or b"", ">i4"), dtype=np.int64))).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content or b"")]
    return pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)], ["data"])


def peek_plain(
    connection: psycopg.Connection[Any], slot_name: str, publications: Sequence[str], end: int
) -> Iterator[pa.RecordBatch]:
    """
    As `peek`, over a plain connection: for the driver's own process. The Arrow driver ends its process if the server breaks
    off without a word while it is asked.
    """
    query = f"COPY (SELECT data FROM {_changes(slot_name, publications, end)}) TO STDOUT (FORMAT binary)"
    found: list[bytes] = []
    size = 0
    with connection.cursor() as cursor, cursor.copy(query) as copy:
        copy.set_types(["bytea"])
        for (data,) in copy.rows():
            found.append(data)
            size += len(data)
            if size >= PLAIN_BYTES:
                yield pa.RecordBatch.from_arrays([pa.array(found, pa.binary())], ["data"])
                found, size = [], 0
    yield pa.RecordBatch.from_arrays([pa.array(found, pa.binary())], ["data"])


def consume(connection: Any, slot_name: str, publications: Sequence[str], end: int) -> Iterator[pa.RecordBatch]:
    """The messages from the slot's own place to `end`; the slot moves there."""
    yield from batches(connection, f"SELECT data FROM {_changes(slot_name, publications, end, how='get')}")


def batches(connection: Any, query: str) -> Iterator[pa.RecordBatch]:
    """The answer of a query over an Arrow connection, as it comes."""
    with connection.cursor() as cursor:
        cursor.execute(query)
        yield from cursor._results.reader  # errors in the middle lose their state in `fetch_record_batch`
