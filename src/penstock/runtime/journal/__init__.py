"""
Durable segments that make a source which cannot be read again into one that can.

A segment is two files. `*.arrow` holds blocks, each one Arrow IPC stream. `*.index` holds a line per commit: a checksum
and a JSON value that says which rows and blocks the commit added. `tail` holds the number of durable rows: what readers
in other processes may see.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate, chain, groupby, pairwise, zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pyarrow as pa
import pyarrow.compute as pc

from penstock import failpoints
from penstock.config import Config
from penstock.durable import InUse, Json, canonical, disk_errors, fsync, lock_file, make_directory, write_atomic
from penstock.errors import ConnectorError, DataError, FatalError, RetryableError
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.source import (
    ENVELOPE_SCHEMA,
    Position,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceConnector,
    SourceEnvelope,
)

FORMAT_VERSION = 1

BLOCK_BYTES = 8 << 20
"""About the largest block: what a task holds in memory at a time."""
SEGMENT_BYTES = 64 << 20
SEGMENT_COMMITS = 1024
"""Bounds what a task parses to find its first row."""
PENDING_BYTES = 64 << 20
"""How much may wait in memory for the disk."""
URGENT_BYTES = 1 << 20
"""So much is written without waiting for more."""
DEDUPE_KEYS = 100_000
KNOWN_STREAMS = 10_000
LEAST_SPLIT_ROWS = 1024

Item = SourceBatch | Sequence[SourceBatch] | Sequence[SourceEnvelope]
"""What is appended as one unit: durable as a whole or not at all."""


class Journal:
    """
    The one writer of a journal directory: its own thread writes and syncs, and one pair of fsyncs serves all that waited.

    With `durable=False` nothing is synced and the rows of an earlier run are thrown away.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = 1 << 30,
        linger_ms: int = 5,
        *,
        durable: bool = True,
        first_row: int = 0,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self.failure: ConnectorError | None = None
        """Why nothing can be appended any more; a failed fsync is never tried again."""
        self.checkpoint: Json = None
        """The last durable one."""
        self.commits = 0
        self._max_bytes = max_bytes
        self._segment_bytes = max(1, min(SEGMENT_BYTES, max_bytes // 8))
        self._linger = linger_ms / 1000 if durable else 0
        self._durable = durable
        self._on_commit = on_commit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._moved = threading.Condition(self._lock)
        self._pending: list[_Entry] = []
        self._pending_bytes = 0
        self._appended = self._settled = 0
        self._refusing = self._closed = self._hurry = False
        self._acked = 0
        self._held = 0
        self._segments: list[_Segment] = []
        self._streams: dict[str, str] = {}
        self._seen_keys: dict[str, None] = {}  # those of appended records, waiting or durable
        self._durable_keys: deque[str] = deque(maxlen=DEDUPE_KEYS)  # only these may be carried into a new segment
        self._data: FileIO | None = None
        self._index: FileIO | None = None
        make_directory(directory, private=True)
        self._lock_fd = _lock(directory)
        try:
            with disk_errors():
                if not durable:
                    first_row = max(first_row, _throw_away(directory))
                self._recover(first_row)
                self._tail_fd = os.open(directory / "tail", os.O_RDWR | os.O_CREAT, 0o600)
                self._publish()
        except BaseException:
            self._let_go()
            raise
        self._next_row = self.tail
        self._thread = threading.Thread(target=self._run, name=f"journal-{directory.name}", daemon=True)
        self._thread.start()
        _open_journals.add(self)

    @property
    def first(self) -> int:
        """The first row that is still here."""
        return self._segments[0].first

    @property
    def tail(self) -> int:
        """The number of durable rows that ever were; the next row gets this number."""
        return self._segments[-1].end

    @property
    def appended(self) -> int:
        """The tail as it will be once everything appended is durable."""
        return self._next_row

    @property
    def held_bytes(self) -> int:
        """Bytes that wait: in memory for the disk, on disk for the epoch that commits them."""
        return self._held + self._pending_bytes

    @property
    def full(self) -> bool:
        """True while an append would wait; for callers that must answer instead."""
        return self.held_bytes >= self._max_bytes

    def append(self, item: Item, checkpoint: Json = None, on_durable: Callable[[], None] | None = None) -> int:
        """
        Hand over rows, waiting while the journal is full; returns the number of the row that comes after them.

        `on_durable` runs in the journal's thread after the fsync, in order. Envelopes whose dedupe key is known are left out.
        """
        entry = _Entry(item, checkpoint, on_durable)
        with self._lock:
            self._moved.wait_for(lambda: self._refuses(entry) or self._has_room(entry.size))
            if self.failure:
                raise self.failure
            if self._refuses(entry):
                raise RetryableError(
                    "the source is stopping and takes no more rows", hint="send them again after the restart"
                )
            entry.envelopes = self._without_repeats(entry.envelopes)
            urgent = not self._pending or self._pending_bytes < URGENT_BYTES <= self._pending_bytes + entry.size
            self._pending.append(entry)
            self._pending_bytes += entry.size
            self._appended += 1
            self._next_row += entry.rows
            if urgent:
                self._work.notify()
            return self._next_row

    def flush(self) -> None:
        """Wait, without lingering, until all that was appended is durable and its callbacks have run."""
        with self._lock:
            goal = self._appended
            self._hurry = True
            self._work.notify()
            self._moved.wait_for(lambda: self.failure or self._settled >= goal)
            if self.failure:
                raise self.failure

    def refuse(self) -> None:
        """Take no more rows and wake whoever waits to append some; what was accepted still becomes durable."""
        with self._lock:
            self._refusing = True
            self._moved.notify_all()

    def close(self) -> None:
        """Write what was accepted and let go of the directory; may be called twice."""
        with self._lock:
            self._closed = self._refusing = True
            self._work.notify()
            self._moved.notify_all()
        self._thread.join()
        self._let_go()

    def require(self, row: int) -> None:
        """Refuse to go on when a manifest stands at a row that the journal does not have, or no longer has."""
        if row > self.tail:
            raise _corrupt(
                self.directory, f"it ends before row {self.tail}, but a manifest has planned rows up to {row}"
            )
        if row < self.first:
            raise _gone(self.directory, row)

    def retain(self, row: int) -> None:
        """Everything before `row` is committed: delete the segments that hold nothing else. May repeat."""
        with self._lock:
            if self._closed:  # it may be another process's by now
                return
            self._acked = max(self._acked, row)
            gone = [segment for segment in self._segments[:-1] if segment.end <= self._acked]
            self._segments = self._segments[len(gone) :]
            self._count_held()
            self._moved.notify_all()
        with disk_errors():
            for segment in gone:
                segment.index.unlink(missing_ok=True)
                if self._durable:
                    fsync(self.directory)  # a later index must not vanish before an earlier one
                segment.data.unlink(missing_ok=True)

    def schemas(self) -> dict[str, pa.Schema]:
        """The last schema of each stream seen so far."""
        with self._lock:
            streams = dict(self._streams)
        return {stream: _schema(text) for stream, text in streams.items()}

    def _refuses(self, entry: _Entry) -> bool:
        return self._closed or self.failure is not None or (self._refusing and entry.rows > 0)

    def _has_room(self, size: int) -> bool:
        if size == 0 or self.held_bytes == 0:
            return True
        in_memory = self._pending_bytes == 0 or self._pending_bytes + size <= PENDING_BYTES
        return in_memory and not self.full and size <= self._max_bytes

    def _without_repeats(self, envelopes: Sequence[SourceEnvelope]) -> Sequence[SourceEnvelope]:
        """Called under the lock. The callback of a repeat stays in the queue, behind the original it repeats."""
        if all(envelope.dedupe_key is None for envelope in envelopes):
            return envelopes
        kept = []
        for envelope in envelopes:
            if envelope.dedupe_key is not None:
                if envelope.dedupe_key in self._seen_keys:
                    continue
                self._seen_keys[envelope.dedupe_key] = None
                if len(self._seen_keys) > DEDUPE_KEYS:
                    del self._seen_keys[next(iter(self._seen_keys))]
            kept.append(envelope)
        return kept

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                if self._linger:
                    self._work.wait_for(
                        lambda: self._hurry or self._closed or self._pending_bytes >= URGENT_BYTES, self._linger
                    )
                group, self._pending, self._hurry = self._pending, [], False
            try:
                self._commit(group)
                self._on_commit()
                for entry in group:
                    if entry.on_durable is not None:
                        entry.on_durable()
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be appended behind it
                self._poison(error)
                return
            with self._lock:
                self._settled += len(group)
                self._moved.notify_all()

    def _poison(self, error: Exception) -> None:
        with self._lock:
            self.failure = (
                error
                if isinstance(error, ConnectorError)
                else FatalError(f"the journal {self.directory} stopped: {error!r}", code="PEN-5012")
            )
            self.failure.__cause__ = error.__cause__ if error is self.failure else error
            self._moved.notify_all()
        self._on_commit()  # wake whoever waits for rows, so that it finds the failure

    def _commit(self, group: list[_Entry]) -> None:
        blocks = list(_blocks(group))
        keys = [e.dedupe_key for entry in group for e in entry.envelopes if e.dedupe_key is not None]
        checkpoint = next((entry.checkpoint for entry in reversed(group) if entry.checkpoint is not None), None)
        size = sum(entry.size for entry in group)
        if not blocks and checkpoint is None:
            with self._lock:
                self._pending_bytes -= size
            return
        segment = self._segments[-1]
        if segment.bytes >= self._segment_bytes or segment.commits >= SEGMENT_COMMITS:
            segment = self._roll(segment)
        assert self._data is not None
        assert self._index is not None
        record: dict[str, Json] = {"row": segment.end, "at": segment.data_bytes, "blocks": [], "keys": keys}
        with disk_errors():
            for stream, batch in blocks:
                buffer = _serialise(batch)
                record["blocks"].append([stream, batch.num_rows, buffer.size, zlib.crc32(buffer)])
                _write(self._data, buffer)
            if blocks:
                self._sync(self._data)
                failpoints.hit("journal.data")
            streams = self._new_streams(blocks, group)
            if streams:
                record["streams"] = streams
            if checkpoint is not None:
                record["checkpoint"] = checkpoint
            line = _frame(record)
            _write(self._index, line)
            self._sync(self._index)
        failpoints.hit("journal.index")
        with self._lock:
            segment.add(record, len(line))
            self._remember(record)
            self._pending_bytes -= size
            self._count_held()
        self.commits += 1
        self._publish()

    def _sync(self, file: FileIO) -> None:
        if self._durable:
            os.fsync(file.fileno())

    def _publish(self) -> None:
        with disk_errors():
            os.pwrite(self._tail_fd, self.tail.to_bytes(8, "little"), 0)

    def _new_streams(self, blocks: list[tuple[str | None, pa.RecordBatch]], group: list[_Entry]) -> dict[str, str]:
        seen = {e.record.stream: "" for entry in group for e in entry.envelopes}
        seen |= {stream: pack_schema(batch.schema) for stream, batch in blocks if stream is not None}
        return {stream: text for stream, text in seen.items() if self._streams.get(stream) != text}

    def _remember(self, record: dict[str, Json]) -> None:
        self._durable_keys.extend(record.get("keys", ()))
        self._streams |= record.get("streams", {})
        while len(self._streams) > KNOWN_STREAMS:  # a broker may have a topic per device
            del self._streams[next(iter(self._streams))]
        self.checkpoint = record.get("checkpoint", self.checkpoint)

    def _count_held(self) -> None:
        self._held = sum(segment.bytes for segment in self._segments if segment.end > self._acked)

    def _roll(self, last: _Segment) -> _Segment:
        segment = self._create(last.number + 1, last.end)
        with self._lock:
            self._segments.append(segment)
        return segment

    def _create(self, number: int, row: int) -> _Segment:
        """
        Start a segment whose index opens with all that must outlive the earlier ones: checkpoint, keys, schemas.

        The index appears whole, after its data file: an index without data is never a crash.
        """
        segment = _Segment(self.directory, number, row)
        carried = {"keys": list(self._durable_keys), "streams": self._streams, "checkpoint": self.checkpoint}
        header = _frame({"format": "penstock journal", "version": FORMAT_VERSION, "row": row}) + _frame(carried)
        with disk_errors():
            segment.data.touch(0o600)
            write_atomic(segment.index, header, private=True)
        self._open_files(segment)
        return segment

    def _open_files(self, segment: _Segment) -> None:
        for file in (self._data, self._index):
            if file is not None:
                file.close()
        # Without buffers: a forked child must have nothing that it could write here when it ends.
        self._data, self._index = FileIO(segment.data, "ab"), FileIO(segment.index, "ab")

    def _recover(self, first_row: int) -> None:
        for temporary in self.directory.glob(".*.index.*"):
            temporary.unlink()
        self._segments = _segments(self.directory)
        self._sweep()
        if not self._segments:
            self._segments = [self._create(0, first_row)]
            return
        row = self._segments[0].first
        for segment in self._segments:
            if segment.first != row:
                raise _corrupt(segment.index, f"it begins at row {segment.first} where row {row} should come next")
            self._load(segment, is_last=segment is self._segments[-1])
            row = segment.end
        self._seen_keys = dict.fromkeys(self._durable_keys)
        self._open_files(self._segments[-1])
        self._count_held()

    def _sweep(self) -> None:
        """Delete data whose index is gone, if retention or a crash before the first row explains it."""
        known = {segment.data for segment in self._segments}
        first = self._segments[0].number if self._segments else 0
        for data in sorted(set(self.directory.glob("*.arrow")) - known):
            if int(data.name.partition("-")[0]) >= first and data.stat().st_size:
                raise _corrupt(data, f"its index {data.with_suffix('.index').name} is missing")
            data.unlink()

    def _load(self, segment: _Segment, is_last: bool) -> None:
        raw = segment.index.read_bytes()
        at = _header_length(segment, raw)
        if is_last:  # its header carries what the others knew
            self._remember(_unframe(raw[raw.index(b"\n") + 1 : at - 1]))
        while (stop := raw.find(b"\n", at)) >= 0 and (record := _unframe(raw[at:stop])) is not None:
            if record["row"] != segment.end or record["at"] != segment.data_bytes:
                raise _corrupt(segment.index, f"record {segment.commits} does not follow the one before it")
            segment.add(record, stop + 1 - at)
            if is_last:
                self._remember(record)
            at = stop + 1
        torn = raw[at:]
        if torn and (not is_last or _has_record(torn)):
            raise _corrupt(segment.index, f"record {segment.commits} is damaged, and it is not the last one")
        if not segment.data.exists():
            raise _corrupt(segment.data, "it is missing")
        size = segment.data.stat().st_size
        if size < segment.data_bytes or (size > segment.data_bytes and not is_last):
            raise _corrupt(segment.data, f"it has {size} bytes where its index says {segment.data_bytes}")
        if is_last:
            for _ in _read_blocks(segment, segment.first, segment.end, until=at):
                pass  # what was written last is what a crash may have damaged; the rest is checked when it is read
            if torn or size > segment.data_bytes:
                self._cut(segment, at)

    def _cut(self, segment: _Segment, index_bytes: int) -> None:
        os.truncate(segment.index, index_bytes)
        os.truncate(segment.data, segment.data_bytes)
        fsync(segment.index, segment.data)

    def _let_go(self) -> None:
        for file in (self._data, self._index):
            if file is not None:
                file.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            with contextlib.suppress(AttributeError):
                os.close(self._tail_fd)


class JournalConfig(Config):
    """Where a source's rows are."""

    directory: Path
    """The journal's directory; on a cluster it is shared storage."""

    direct: Path | None = None
    """The directory of rows that bypass the journal's promise; they may be gone after a crash."""

    parallelism: int = 1
    """How many splits a range has at most, until `latest` is told otherwise."""


class JournalPosition(Position):
    """The number of rows before it, in the journal and among those that bypass it."""

    row: int = 0
    direct: int = 0


@dataclass(frozen=True)
class JournalSplit:
    """Rows `start` to `end`, without `end`."""

    directory: Path
    start: int
    end: int
    lossy: bool = False


class JournalSource(RangeSource[JournalConfig, JournalPosition]):
    """
    A journal as ranges of row numbers; each split is a contiguous run of rows.

    Supports exactly-once: a row keeps its number, and goes only after an ack. `bind` makes the driver's copy: it
    knows the writers and speaks for the source that feeds them.
    """

    name = "journal"

    def __init__(self, config: JournalConfig) -> None:
        super().__init__(config)
        self._parallelism = config.parallelism
        self._bound: _Bound | None = None

    def bind(
        self,
        journal: Journal,
        direct: Journal | None = None,
        origin: SourceConnector[Any] | None = None,
        ready: threading.Event | None = None,
        on_ack: Callable[[JournalPosition], None] = lambda end: None,
    ) -> JournalSource:
        """Tie this copy to the writers in its process; copies made by pickling are readers only."""
        self._bound = _Bound(journal, direct, origin, ready, on_ack)
        return self

    def schema(self) -> Schemas:
        """The last schema of each stream seen so far."""
        if self._bound is not None:
            direct = self._bound.direct.schemas() if self._bound.direct else {}
            return {**direct, **self._bound.journal.schemas()}
        return {**_schemas(self.config.direct), **_schemas(self.config.directory)}

    def initial(self) -> JournalPosition:
        """The first row that is still there: after `offsets reset`, earlier ones may be gone."""
        return JournalPosition(row=_first(self.config.directory), direct=_first(self.config.direct))

    def latest(self, start: JournalPosition, limit: ReadLimit) -> JournalPosition:
        self._parallelism = limit.parallelism
        row, direct = self._tails()
        rows, direct_rows = max(0, row - start.row), max(0, direct - start.direct)
        if limit.rows is not None:
            # Each side gets half, and what the other leaves: neither may starve.
            direct_rows = min(direct_rows, max(limit.rows // 2, limit.rows - rows))
            rows = min(rows, limit.rows - direct_rows)
        return limit.bounded(JournalPosition(row=start.row + rows, direct=start.direct + direct_rows))

    def split(self, start: JournalPosition, end: JournalPosition) -> Sequence[JournalSplit]:
        splits = [JournalSplit(self.config.directory, a, b) for a, b in self._parts(start.row, end.row)]
        if self.config.direct is not None:
            splits += [JournalSplit(self.config.direct, a, b, True) for a, b in self._parts(start.direct, end.direct)]
        return splits

    def read(self, split: JournalSplit) -> Iterator[SourceBatch]:
        for stream, batch in _coalesced(_read(split)):
            if stream is None:
                yield from _by_stream(batch)
            else:
                yield SourceBatch(batch, stream=stream)

    def ack(self, end: JournalPosition) -> None:
        if self._bound is not None:
            self._bound.journal.retain(end.row)
            if self._bound.direct is not None:
                self._bound.direct.retain(end.direct)
            self._bound.on_ack(end)

    def data_ready_notify(self) -> threading.Event | None:
        return self._bound.ready if self._bound else None

    def checkpoint_requested(self) -> threading.Event | None:
        return self._bound.origin.checkpoint_requested() if self._bound and self._bound.origin else None

    def lag(self) -> int | None:
        return self._bound.origin.lag() if self._bound and self._bound.origin else None

    def _tails(self) -> tuple[int, int]:
        if self._bound is not None:
            return self._bound.journal.tail, self._bound.direct.tail if self._bound.direct else 0
        direct = self.config.direct
        return _tail(self.config.directory) or 0, (_tail(direct) or 0) if direct is not None else 0

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        parts = max(1, min(self._parallelism, (end - start) // LEAST_SPLIT_ROWS))
        edges = [start + (end - start) * n // parts for n in range(parts + 1)]
        return ((a, b) for a, b in pairwise(edges) if a < b)


@dataclass(frozen=True)
class _Bound:
    journal: Journal
    direct: Journal | None
    origin: SourceConnector[Any] | None
    ready: threading.Event | None
    on_ack: Callable[[JournalPosition], None]


class _Entry:
    """One append on its way to the disk."""

    __slots__ = ("batches", "checkpoint", "envelopes", "on_durable", "size")

    def __init__(self, item: Item, checkpoint: Json, on_durable: Callable[[], None] | None) -> None:
        self.batches: Sequence[SourceBatch] = ()
        self.envelopes: Sequence[SourceEnvelope] = ()
        if isinstance(item, SourceBatch):
            self.batches = (item,)
        elif item and isinstance(item[0], SourceBatch):
            self.batches = item  # type: ignore[assignment]
        else:
            self.envelopes = item  # type: ignore[assignment]
        # Everything that could fail later, in the journal's thread, fails here, in the caller's.
        self.size = sum(batch.records.nbytes for batch in self.batches) + sum(map(size_of, self.envelopes))
        self.checkpoint = None if checkpoint is None else json.loads(canonical(checkpoint))
        self.on_durable = on_durable

    @property
    def rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches) + len(self.envelopes)


class _Segment:
    """What is known of one segment: its files, its rows, its size."""

    def __init__(self, directory: Path, number: int, first: int) -> None:
        self.number = number
        self.first = self.end = first
        self.index = directory / f"{number:08d}-{first:020d}.index"
        self.data = self.index.with_suffix(".arrow")
        self.index_bytes = self.data_bytes = self.commits = 0

    @property
    def bytes(self) -> int:
        return self.index_bytes + self.data_bytes

    def add(self, record: dict[str, Json], index_bytes: int) -> None:
        self.end += sum(rows for _, rows, _, _ in record["blocks"])
        self.data_bytes += sum(length for _, _, length, _ in record["blocks"])
        self.index_bytes += index_bytes
        self.commits += 1


def encode(envelopes: Sequence[SourceEnvelope]) -> pa.RecordBatch:
    """The envelopes as rows of `ENVELOPE_SCHEMA`, column by column."""
    records = [envelope.record for envelope in envelopes]
    attributes = [record.attributes for record in records]
    columns = [
        pa.array([record.stream for record in records], pa.string()),
        pa.array([record.key for record in records], pa.binary()),
        pa.array([record.payload for record in records], pa.binary()),
        pa.MapArray.from_arrays(
            pa.array(accumulate(map(len, attributes), initial=0), pa.int32()),
            pa.array([name for pairs in attributes for name in pairs], pa.string()),
            pa.array([value for pairs in attributes for value in pairs.values()], pa.string()),
        ),
        pa.array([record.timestamp_ms for record in records], pa.int64()).cast(ENVELOPE_SCHEMA.field("timestamp").type),
        _offsets(envelopes),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA)


def _offsets(envelopes: Sequence[SourceEnvelope]) -> pa.Array:
    kind = ENVELOPE_SCHEMA.field("offset").type
    if all(envelope.offset is None for envelope in envelopes):
        return pa.nulls(len(envelopes), kind)
    offsets = [envelope.offset for envelope in envelopes]
    return pa.array([each and {"partition": each.partition, "value": str(each.value)} for each in offsets], kind)


def size_of(envelope: SourceEnvelope) -> int:
    """About the bytes of an envelope; a `DataError` for one that Arrow or JSON could not hold."""
    record = envelope.record
    try:
        size = (
            32 + len(record.stream.encode()) + (memoryview(record.payload).nbytes if record.payload is not None else 0)
        )
        if record.key is not None:
            size += memoryview(record.key).nbytes
        for name, value in record.attributes.items():
            size += 8 + len(name.encode()) + len(value.encode())
        if envelope.dedupe_key is not None:
            size += len(envelope.dedupe_key.encode())
        if size < 1 << 30 and -(1 << 63) <= record.timestamp_ms < 1 << 63:
            return size
    except (TypeError, AttributeError, UnicodeEncodeError) as error:
        raise DataError(f"a record of {record.stream!r} cannot be journaled: {error}", code="PEN-3001") from error
    raise DataError(f"a record of {record.stream!r} is over 1 GiB, or its timestamp out of range", code="PEN-3001")


def _blocks(group: list[_Entry]) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """The rows of a group in their order, small neighbours joined and large batches cut. A stream of None means envelopes."""
    for stream, batch in _coalesced(chain.from_iterable(map(_pieces, _joined(group)))):
        step = max(1, batch.num_rows * BLOCK_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, step):
            yield stream, batch.slice(start, step)


def _joined(group: list[_Entry]) -> Iterator[list[SourceEnvelope] | Sequence[SourceBatch]]:
    """Neighbouring envelopes as one list: they are encoded together."""
    for batches, entries in groupby(group, lambda entry: bool(entry.batches)):
        if batches:
            yield from (entry.batches for entry in entries)
        else:
            yield list(chain.from_iterable(entry.envelopes for entry in entries))


def _pieces(item: list[SourceEnvelope] | Sequence[SourceBatch]) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    if not item:
        return
    if isinstance(item[0], SourceBatch):
        yield from ((batch.stream, batch.records) for batch in item)  # type: ignore[union-attr]
        return
    envelopes: list[SourceEnvelope] = item  # type: ignore[assignment]
    start = size = 0
    for end, envelope in enumerate(envelopes):
        size += len(envelope.record.payload or b"")
        if size > PENDING_BYTES:  # an Arrow binary column ends at 2 GiB
            yield None, encode(envelopes[start : end + 1])
            start, size = end + 1, 0
    if start < len(envelopes):
        yield None, encode(envelopes[start:])


def _coalesced(pieces: Iterable[tuple[str | None, pa.RecordBatch]]) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Neighbours of one stream and schema joined up to about `BLOCK_BYTES`."""
    held: list[pa.RecordBatch] = []
    stream: str | None = None
    size = 0
    for name, batch in pieces:
        if held and (name != stream or size + batch.nbytes > BLOCK_BYTES or not _alike(batch, held[0])):
            yield stream, _concat(held)
            held, size = [], 0
        if batch.num_rows:
            stream = name
            held.append(batch)
            size += batch.nbytes
    if held:
        yield stream, _concat(held)


def _alike(a: pa.RecordBatch, b: pa.RecordBatch) -> bool:
    return bool(a.schema.equals(b.schema, check_metadata=True))  # the metadata names the key


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _serialise(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _write(file: FileIO, data: pa.Buffer | bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _by_stream(batch: pa.RecordBatch) -> Iterator[SourceBatch]:
    """Envelopes grouped by stream; within a stream they keep their order, since the sort is stable."""
    if "offset" not in batch.schema.names:  # of a journal that was written before messages had one
        offsets = pa.nulls(batch.num_rows, ENVELOPE_SCHEMA.field("offset").type)
        batch = pa.RecordBatch.from_arrays([*batch.columns, offsets], schema=ENVELOPE_SCHEMA)
    streams = batch.column("stream").dictionary_encode()
    if len(streams.dictionary) > 1:
        batch = batch.take(pc.sort_indices(streams.indices))
    counts = pc.value_counts(streams.indices).field("counts").to_pylist()  # indices are numbered as they appear
    start = 0
    for stream, count in zip(streams.dictionary.to_pylist(), counts, strict=True):
        yield SourceBatch(batch.slice(start, count), stream=stream)
        start += count


def _read(split: JournalSplit) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """The rows of a split, block by block."""
    _require_shared(split)
    row = split.start
    segments = _segments(split.directory)
    try:
        for segment, following in zip_longest(segments, segments[1:]):
            if segment.first >= split.end or (following is not None and following.first <= row):
                continue
            for stream, batch in _read_blocks(segment, row, split.end):
                row += batch.num_rows
                yield stream, batch
    except FileNotFoundError:
        segments = _segments(split.directory)
    if split.lossy or row == split.end:
        return
    if segments and segments[0].first > row:
        raise _gone(split.directory, row)
    raise _behind(split, row)


def _require_shared(split: JournalSplit) -> None:
    """Refuse to read where the driver's journal cannot be seen: rows that may be lost would be lost here without a word."""
    tail = _tail(split.directory)
    if tail is None:
        raise FatalError(
            f"there is no journal {split.directory} on {socket.gethostname()}, where a task was to read it",
            code="PEN-5016",
            hint="the driver and all executors must see the same `state_dir`: put it on storage that they share, "
            "or run with --master local[*]",
        )
    if tail < split.end:
        raise _behind(split, tail)


def _behind(split: JournalSplit, row: int) -> RetryableError:
    return RetryableError(
        f"the journal {split.directory} ends at row {row} as seen from {socket.gethostname()}, "
        f"and row {split.end - 1} was planned",
        hint="if this stays, the directory is not the shared storage that the driver writes to",
    )


def _read_blocks(
    segment: _Segment, start: int, end: int, until: int | None = None
) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """The rows of one segment from `start` up to `end`, each block checked against its index record."""
    with open(segment.index, "rb") as index, open(segment.data, "rb") as data:
        _check_header(segment, index.readline().rstrip(b"\n"))
        index.readline()  # what is carried over from earlier segments
        number = 0
        while (until is None or index.tell() < until) and (line := index.readline()).endswith(b"\n"):
            record = _unframe(line[:-1])
            if record is None:
                raise _corrupt(segment.index, f"record {number} is damaged")
            row, at = record["row"], record["at"]
            for stream, rows, length, checksum in record["blocks"]:
                if row < end and row + rows > start:
                    raw = os.pread(data.fileno(), length, at)
                    if zlib.crc32(raw) != checksum or len(raw) != length:
                        raise _corrupt(
                            segment.data, f"the rows of record {number}, {length} bytes at {at}, are damaged"
                        )
                    batch = pa.ipc.open_stream(raw).read_next_batch()
                    skipped = max(0, start - row)
                    yield stream, batch.slice(skipped, min(rows, end - row) - skipped)
                row, at = row + rows, at + length
            if row >= end and until is None:
                return
            number += 1


def _segments(directory: Path) -> list[_Segment]:
    names = sorted(path.stem.split("-") for path in directory.glob("[0-9]*.index"))
    return [_Segment(directory, int(number), int(row)) for number, row in names]


def _first(directory: Path | None) -> int:
    segments = _segments(directory) if directory is not None else []
    return segments[0].first if segments else 0


def _tail(directory: Path) -> int | None:
    """The number of rows that readers may see; None: there is no journal."""
    try:
        return int.from_bytes((directory / "tail").read_bytes(), "little")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _schemas(directory: Path | None) -> dict[str, pa.Schema]:
    """What the last segment knows, for readers that have no writer."""
    segments = _segments(directory) if directory is not None else []
    if not segments:
        return {}
    tail = _tail(segments[-1].index.parent) or 0
    found: dict[str, str] = {}
    for line in segments[-1].index.read_bytes().splitlines()[1:]:
        record = _unframe(line) or {}
        if record.get("row", 0) < max(tail, 1):
            found |= record.get("streams", {})
    return {stream: _schema(text) for stream, text in found.items()}


def _schema(text: str) -> pa.Schema:
    return unpack_schema(text) if text else ENVELOPE_SCHEMA


def _frame(value: Json) -> bytes:
    body = canonical(value).encode()
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _unframe(line: bytes) -> Any:
    """The value of a line, or None if it is damaged."""
    checksum, body = line[:8], line[9:]
    return json.loads(body) if checksum == b"%08x" % zlib.crc32(body) and line[8:9] == b" " else None


def _has_record(torn: bytes) -> bool:
    """True if a whole record stands behind the beginning of `torn`: then it is not the tail of a write cut short."""
    found = re.finditer(rb"(?=([0-9a-f]{8} \{[^\n]*))", torn)
    return any(match.start() > 0 and _unframe(match.group(1)) is not None for match in found)


def _header_length(segment: _Segment, raw: bytes) -> int:
    """The length of the two lines an index opens with; both appear whole or not at all."""
    first, _, rest = raw.partition(b"\n")
    carried, newline, _ = rest.partition(b"\n")
    _check_header(segment, first)
    if not newline or not isinstance(_unframe(carried), dict):
        raise _corrupt(segment.index, "its header is damaged")
    return len(first) + len(carried) + 2


def _check_header(segment: _Segment, line: bytes) -> None:
    with contextlib.suppress(ValueError, AttributeError):  # a newer version may frame its lines in another way
        version = json.loads(line[9:]).get("version", 0)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise FatalError(
                f"{segment.index} has format version {version}; this Penstock reads up to {FORMAT_VERSION}",
                code="PEN-5006",
                hint="run the Penstock that wrote it, or a newer one",
            )
    header = _unframe(line)
    if header is None or header.get("row") != segment.first:
        raise _corrupt(segment.index, "its header is damaged")


def _corrupt(path: Path, what: str) -> FatalError:
    return FatalError(
        f"the journal is corrupt: {path}: {what}",
        code="PEN-5005",
        hint="restore the journal's directory from a copy; or move it away and run `penstock offsets reset`, "
        "which gives up the rows that were journaled and not yet committed",
    )


def _gone(directory: Path, row: int) -> FatalError:
    return FatalError(
        f"row {row} is no longer in the journal {directory}",
        code="PEN-5011",
        hint="restore journal and manifests from the same moment; or `penstock offsets reset`, which goes on with what is there",
    )


def _lock(directory: Path) -> int:
    try:
        return lock_file(directory / "lock", f"process {os.getpid()}")
    except InUse as other:
        raise FatalError(
            f"the journal {directory} is written by {other.holder}",
            code="PEN-5002",
            hint="stop that process first; one process writes a journal",
        ) from None


def _throw_away(directory: Path) -> int:
    """Delete the rows of an earlier run; returns the number that the next row must have, since numbers never repeat."""
    rows = [segment.first for segment in _segments(directory)]
    for path in [*directory.glob("*.index"), *directory.glob("*.arrow")]:
        path.unlink()
    return max([_tail(directory) or 0, *rows])


_open_journals: WeakSet[Journal] = WeakSet()


def _after_fork() -> None:
    """A forked child must not keep the directory locked after its parent was killed."""
    for journal in _open_journals:
        if journal._lock_fd >= 0:
            os.close(journal._lock_fd)
            journal._lock_fd = -1


os.register_at_fork(after_in_child=_after_fork)
