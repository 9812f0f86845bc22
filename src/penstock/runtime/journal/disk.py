"""The files of a journal, as its one writer has them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from uuid import uuid4
from weakref import WeakSet

import pyarrow as pa

from penstock import failpoints
from penstock.durable import InUse, Json, disk_errors, fsync, lock_file, make_directory, write_atomic
from penstock.errors import FatalError
from penstock.runtime.journal import envelopes
from penstock.runtime.journal import segment as segments
from penstock.runtime.journal.segment import (
    FORMAT_VERSION,
    Block,
    Segment,
    bytes_of,
    checksum,
    corrupt,
    frame,
    has_record,
    header_length,
    identity_of,
    parts_of,
    read_blocks,
    record_at,
    segments_of,
    serialise,
    tail_of,
    unframe,
)
from penstock.schema.codec import pack_schema

SEGMENT_BYTES = 64 << 20
SEGMENT_COMMITS = 1024
"""Bounds what a task parses to find its first row."""
KNOWN_STREAMS = 10_000
RESERVE_BYTES = 16 << 20
"""So much of the disk is left to the epochs: without their manifests nothing would ever leave the journal."""

ROOM_ASKED_SECS = 0.1
"""How long an answer of the disk about its room is trusted; what it then refuses all the same is written later."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(Exception):
    """The disk has no room for a commit, of which nothing is left; the same commit may be tried again."""


@dataclass
class Fsyncs:
    """How often the disk was asked to make rows durable, and how long that took."""

    count: int = 0
    seconds: float = 0.0


class Disk:
    """
    The segments of one journal, and what their indexes carry. Only the journal's thread writes.

    What it remembers changes under `lock`, since other threads look at it. With `durable=False` nothing is synced.
    """

    def __init__(
        self, directory: Path, lock: threading.Lock, segment_bytes: int, *, durable: bool, first_row: int
    ) -> None:
        self.directory = directory
        self.segments: list[Segment] = []
        self.streams: dict[str, str] = {}
        self.keys: deque[str] = deque(maxlen=envelopes.DEDUPE_KEYS)
        """Dedupe keys of durable rows: only these may be carried into a new segment."""
        self.checkpoint: Json = None
        self.commits = 0
        self.fsyncs = Fsyncs()
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._durable = durable
        self._data: FileIO | None = None
        self._index: FileIO | None = None
        self._index_bytes = 0  # of the file, with its header
        self._room, self._room_asked = 0, -ROOM_ASKED_SECS
        self._checksums = ThreadPoolExecutor(1, f"checksums-{directory.name}")
        self._ages: deque[tuple[int, float]] = deque()  # the end and the time of commits, about one a second
        make_directory(directory, private=True)
        self._lock_fd = _lock_directory(directory)
        self._tail_fd = -1
        self.identity = ""
        try:
            self.identity = _identity(directory)
            with disk_errors():
                if not durable:
                    first_row = max(first_row, _throw_away(directory))
                self._recover(first_row)
                self._tail_fd = os.open(directory / "tail", os.O_RDWR | os.O_CREAT, 0o600)
                self._publish()
        except BaseException:
            self.close()
            raise
        _open_disks.add(self)

    @property
    def tail(self) -> int:
        return self.segments[-1].end

    def held(self, acked: int) -> int:
        """The bytes of segments that hold rows from `acked` on."""
        return sum(segment.bytes for segment in self.segments if segment.end > acked)

    def oldest(self) -> float | None:
        """When the oldest row that is not retained yet was written, in seconds since 1970."""
        with self._lock:
            return self._ages[0][1] if self._ages else None

    def commit(self, blocks: Sequence[Block], keys: Sequence[str], checkpoint: Json, streams: Iterable[str]) -> None:
        """
        Write and sync rows with what goes with them, and show them to readers. `streams`: those of the envelopes.

        Raises `NoRoom` if the disk is full. A failed fsync is fatal all the same.
        """
        size = sum(bytes_of(batch) for _, batch in blocks)
        self._require_room(size)
        with disk_errors(self.directory):
            self._commit(blocks, size, keys, checkpoint, streams)

    def _require_room(self, size: int) -> None:
        now = time.monotonic()
        if now - self._room_asked >= ROOM_ASKED_SECS or size > self._room:
            self._room, self._room_asked = free_bytes(self.directory) - RESERVE_BYTES, now
        if size > self._room:
            raise NoRoom(f"{self._room + RESERVE_BYTES:,} bytes are free in {self.directory}")
        self._room -= size

    def _commit(
        self, blocks: Sequence[Block], size: int, keys: Sequence[str], checkpoint: Json, streams: Iterable[str]
    ) -> None:
        segment = self.segments[-1]
        if segment.bytes >= self._segment_bytes or segment.commits >= SEGMENT_COMMITS:
            with _full_is_no_room():  # nothing of it counts before it is whole
                segment = self._create(segment.number + 1, segment.end)
            with self._lock:
                self.segments.append(segment)
        assert self._data is not None
        assert self._index is not None
        record: dict[str, Json] = {"row": segment.end, "at": segment.data_bytes, "keys": list(keys)}
        sizes = {self._data: segment.data_bytes, self._index: self._index_bytes}
        inline: list[bytes] = []
        if size <= segments.INLINE_BYTES and segment.version > 1:
            inline = [serialise(batch) for _, batch in blocks]
            written = [(len(block), zlib.crc32(block)) for block in inline]
        else:
            with _full_is_no_room(sizes):
                checked = [_write_block(self._data, batch, self._checksums) for _, batch in blocks]
            if blocks:
                self._sync(self._data)
            written = [(length, found.result()) for length, found in checked]
        record["blocks"] = [
            [stream, rows.num_rows, *each] for (stream, rows), each in zip(blocks, written, strict=True)
        ]
        if inline:
            record["inline"] = sum(map(len, inline))
        if blocks:
            failpoints.hit("journal.data")
        if new := self._new_streams(blocks, streams):
            record["streams"] = new
        if checkpoint is not None:
            record["checkpoint"] = checkpoint
        line = b"".join((frame(record), *inline))
        with _full_is_no_room(sizes):
            _write(self._index, line)
        self._sync(self._index)
        failpoints.hit("journal.index")
        self._index_bytes += len(line)
        with self._lock:
            segment.add(record, len(line))
            self._remember(record)
            if blocks:
                self._note_age(segment.end, time.time())
        self.commits += 1
        with disk_errors(self.directory):
            self._publish()

    def retain(self, row: int) -> None:
        """Delete the segments that hold nothing but rows before `row`. May repeat."""
        with self._lock:
            gone = [segment for segment in self.segments[:-1] if segment.end <= row]
            self.segments = self.segments[len(gone) :]
            while self._ages and self._ages[0][0] <= row:
                self._ages.popleft()
        with disk_errors():
            for segment in gone:
                segment.index.unlink(missing_ok=True)
                if self._durable:
                    fsync(self.directory)  # a later index must not vanish before an earlier one
                segment.data.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the directory; may be called twice."""
        self._checksums.shutdown(wait=False)
        for file in (self._data, self._index):
            if file is not None:
                file.close()
        self.unlock()
        if self._tail_fd >= 0:
            os.close(self._tail_fd)
            self._tail_fd = -1

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- writing -------------------------------------------------------------------------------------------------

    def _sync(self, file: FileIO) -> None:
        if self._durable:
            began = time.perf_counter()
            os.fsync(file.fileno())
            self.fsyncs = Fsyncs(self.fsyncs.count + 1, self.fsyncs.seconds + time.perf_counter() - began)

    def _publish(self) -> None:
        os.pwrite(self._tail_fd, self.tail.to_bytes(8, "little"), 0)

    def _new_streams(self, blocks: Sequence[Block], streams: Iterable[str]) -> dict[str, str]:
        seen = dict.fromkeys(streams, "")
        seen |= {stream: pack_schema(batch.schema) for stream, batch in blocks if stream is not None}
        return {stream: text for stream, text in seen.items() if self.streams.get(stream) != text}

    def _remember(self, record: dict[str, Json]) -> None:
        self.keys.extend(record.get("keys", ()))
        self.streams |= record.get("streams", {})
        while len(self.streams) > KNOWN_STREAMS:  # a broker may have a topic per device
            del self.streams[next(iter(self.streams))]
        self.checkpoint = record.get("checkpoint", self.checkpoint)

    def _note_age(self, end: int, now: float) -> None:
        if self._ages and now - self._ages[-1][1] < 1:
            self._ages[-1] = (end, self._ages[-1][1])
        else:
            self._ages.append((end, now))

    def _create(self, number: int, row: int) -> Segment:
        """
        Start a segment whose index opens with all that must outlive the earlier ones: checkpoint, keys, schemas.

        The index appears whole, after its data file: an index without data is never a crash.
        """
        segment = Segment(self.directory, number, row)
        carried = {"keys": list(self.keys), "streams": self.streams, "checkpoint": self.checkpoint}
        header = frame({"format": "penstock journal", "version": FORMAT_VERSION, "row": row}) + frame(carried)
        with disk_errors():
            segment.data.touch(0o600)
            write_atomic(segment.index, header, private=True)
        self._open_files(segment)
        return segment

    def _open_files(self, segment: Segment) -> None:
        for file in (self._data, self._index):
            if file is not None:
                file.close()
        # Without buffers: a forked child must have nothing that it could write here when it ends.
        self._data, self._index = FileIO(segment.data, "ab"), FileIO(segment.index, "ab")
        self._index_bytes = os.fstat(self._index.fileno()).st_size

    # -- recovery ------------------------------------------------------------------------------------------------

    def _recover(self, first_row: int) -> None:
        for temporary in self.directory.glob(".*.index.*"):
            temporary.unlink()
        self.segments = segments_of(self.directory)
        self._sweep()
        if not self.segments:
            self.segments = [self._create(0, first_row)]
            return
        row = self.segments[0].first
        for segment in self.segments:
            if segment.first != row:
                raise corrupt(segment.index, f"it begins at row {segment.first} where row {row} should come next")
            self._load(segment, is_last=segment is self.segments[-1])
            row = segment.end
            if segment.end > segment.first:
                self._ages.append((row, segment.index.stat().st_mtime))
        self._open_files(self.segments[-1])

    def _sweep(self) -> None:
        """Delete data whose index is gone, if retention or a crash before the first row explains it."""
        known = {segment.data for segment in self.segments}
        first = self.segments[0].number if self.segments else 0
        tail = tail_of(self.directory) or 0
        for data in sorted(set(self.directory.glob("*.arrow")) - known):
            number, row = map(int, data.stem.split("-"))
            if number >= first and (data.stat().st_size or tail > row):
                raise corrupt(data, f"its index {data.with_suffix('.index').name} is missing")
            data.unlink()

    def _load(self, segment: Segment, is_last: bool) -> None:
        raw = segment.index.read_bytes()
        at = header_length(segment, raw)
        if is_last:  # its header carries what the others knew
            self._remember(unframe(raw[raw.index(b"\n") + 1 : at - 1]))
        while (found := record_at(raw, at)) is not None:
            record, end = found
            if record["row"] != segment.end or record["at"] != segment.data_bytes:
                raise corrupt(segment.index, f"record {segment.commits} does not follow the one before it")
            segment.add(record, end - at)
            if is_last:
                self._remember(record)
            at = end
        torn = raw[at:]
        if torn and (not is_last or has_record(torn)):
            raise corrupt(segment.index, f"record {segment.commits} is damaged, and it is not the last one")
        if not segment.data.exists():
            raise corrupt(segment.data, "it is missing")
        size = segment.data.stat().st_size
        if size < segment.data_bytes or (size > segment.data_bytes and not is_last):
            raise corrupt(segment.data, f"it has {size} bytes where its index says {segment.data_bytes}")
        if is_last:
            for _ in read_blocks(segment, segment.first, segment.end, until=at):
                pass  # what was written last is what a crash may have damaged; the rest is checked when it is read
            if torn or size > segment.data_bytes:
                _cut(segment, at)


def free_bytes(directory: Path) -> int:
    """What this user may still write on the disk of a directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _cut(segment: Segment, index_bytes: int) -> None:
    os.truncate(segment.index, index_bytes)
    os.truncate(segment.data, segment.data_bytes)
    fsync(segment.index, segment.data)


@contextlib.contextmanager
def _full_is_no_room(sizes: Mapping[FileIO, int] | None = None) -> Iterator[None]:
    """Writes that a full disk refuses: cut the files to the sizes that they had, and let the commit be tried again."""
    try:
        yield
    except (OSError, FatalError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        for file, size in (sizes or {}).items():
            os.ftruncate(file.fileno(), size)
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise NoRoom(str(cause.strerror)) from error
        raise


def _write_block(file: FileIO, batch: pa.RecordBatch, checksums: ThreadPoolExecutor) -> tuple[int, Future[int]]:
    """The bytes that a block took, and its checksum: another core finds it while the disk is busy."""
    parts = parts_of(batch)
    found = checksums.submit(checksum, parts)
    for part in parts:
        _write(file, part)
    return sum(map(len, parts)), found


def _write(file: FileIO, data: pa.Buffer | bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _lock_directory(directory: Path) -> int:
    try:
        return lock_file(directory / "lock", f"process {os.getpid()}")
    except InUse as other:
        raise FatalError(
            f"the journal {directory} is written by {other.holder}",
            code="PEN-5002",
            hint="stop that process first; one process writes a journal",
        ) from None


def _identity(directory: Path) -> str:
    """Made with the journal, and kept."""
    if not identity_of(directory):
        write_atomic(directory / "identity", uuid4().hex.encode(), private=True)
    return identity_of(directory)


def _throw_away(directory: Path) -> int:
    """Delete the rows of an earlier run; returns the number that the next row must have, since numbers never repeat."""
    rows = [segment.first for segment in segments_of(directory)]
    for path in [*directory.glob("*.index"), *directory.glob("*.arrow")]:
        path.unlink()
    return max([tail_of(directory) or 0, *rows])


_open_disks: WeakSet[Disk] = WeakSet()


def _after_fork() -> None:
    """A forked child must not keep the directory locked after its parent was killed."""
    for disk in _open_disks:
        with contextlib.suppress(OSError):
            disk.unlock()


os.register_at_fork(after_in_child=_after_fork)
