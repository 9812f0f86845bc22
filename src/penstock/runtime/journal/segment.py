"""
The format of a segment, its checksums, and what counts as corrupt.

A segment is two files. `*.arrow` holds blocks, each one Arrow IPC stream. `*.index` holds a line per commit: a checksum
and a JSON value that says which rows and blocks the commit added; the blocks of a small commit follow their line there, so
that one fsync is enough. `tail` holds the number of durable rows: what readers in other processes may see.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from penstock.durable import Json, canonical
from penstock.errors import FatalError
from penstock.schema.codec import unpack_schema
from penstock.source import ENVELOPE_SCHEMA

FORMAT_VERSION = 2
"""Since 2, blocks of small commits may be in the index."""

INLINE_BYTES = 64 << 10
"""Up to so many bytes, the blocks of a commit are in the index."""

BLOCK_BYTES = 8 << 20
"""About the largest block: what a task holds in memory at a time."""

Block = tuple[str | None, pa.RecordBatch]
"""Rows of one stream; a stream of None means envelopes."""


class Segment:
    """What is known of one segment: its files, its rows, its size."""

    def __init__(self, directory: Path, number: int, first: int) -> None:
        self.number = number
        self.first = self.end = first
        self.index = directory / f"{number:08d}-{first:020d}.index"
        self.data = self.index.with_suffix(".arrow")
        self.index_bytes = self.data_bytes = self.commits = 0
        self.version = FORMAT_VERSION

    @property
    def bytes(self) -> int:
        return self.index_bytes + self.data_bytes

    def add(self, record: dict[str, Json], index_bytes: int) -> None:
        self.end += sum(rows for _, rows, _, _ in record["blocks"])
        if not record.get("inline"):
            self.data_bytes += sum(length for _, _, length, _ in record["blocks"])
        self.index_bytes += index_bytes
        self.commits += 1


def bytes_of(batch: pa.RecordBatch) -> int:
    """About the bytes of some rows; exact, and dearer, where they are many."""
    total = int(batch.get_total_buffer_size())
    return total if total <= _FEW_BYTES else int(batch.nbytes)


_FEW_BYTES = 32 << 10


def coalesced(pieces: Iterable[Block]) -> Iterator[Block]:
    """Neighbours of one stream and schema joined up to about `BLOCK_BYTES`."""
    held: list[pa.RecordBatch] = []
    stream: str | None = None
    size = 0
    for name, batch in pieces:
        more = bytes_of(batch)
        if held and (name != stream or size + more > BLOCK_BYTES or not _alike(batch, held[0])):
            yield stream, _concat(held)
            held, size = [], 0
        if batch.num_rows:
            stream = name
            held.append(batch)
            size += more
    if held:
        yield stream, _concat(held)


def _alike(a: pa.RecordBatch, b: pa.RecordBatch) -> bool:
    return bool(a.schema.equals(b.schema, check_metadata=True))  # the metadata names the key


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def serialise(batch: pa.RecordBatch) -> bytes:
    """Rows as an Arrow IPC stream."""
    if batch.schema.equals(ENVELOPE_SCHEMA, check_metadata=True):  # the same bytes, at half the price
        return b"".join((_MESSAGES_BEGIN, batch.serialize(), _STREAM_ENDS))
    return b"".join(parts_of(batch))


_MESSAGES_BEGIN = ENVELOPE_SCHEMA.serialize()
_STREAM_ENDS = b"\xff\xff\xff\xff\0\0\0\0"


def parts_of(batch: pa.RecordBatch) -> list[pa.Buffer | bytes]:
    """What `serialise` gives, in pieces: the columns of a large batch are not copied."""
    parts = _Parts()
    with pa.ipc.new_stream(parts, batch.schema) as writer:
        writer.write_batch(batch)
    return [
        each
        for few, pieces in groupby(parts.written, lambda part: len(part) < _FEW_BYTES)
        for each in ([b"".join(pieces)] if few else pieces)
    ]


class _Parts:
    """A file as Arrow writes to it: it hands over whole buffers, and gaps as bytes."""

    closed = False

    def __init__(self) -> None:
        self.written: list[pa.Buffer | bytes] = []

    def write(self, part: pa.Buffer | bytes) -> int:
        self.written.append(part)
        return len(part)

    def flush(self) -> None:
        """There is nothing to flush."""

    def close(self) -> None:
        """There is nothing to close."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def checksum(parts: Iterable[pa.Buffer | bytes]) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def read_blocks(segment: Segment, start: int, end: int, until: int | None = None) -> Iterator[Block]:
    """The rows of one segment from `start` up to `end`, each block checked against its index record."""
    with open(segment.index, "rb") as index, open(segment.data, "rb") as data:
        for number, (record, place) in enumerate(_records(segment, index, until)):
            row, at = record["row"], place if record.get("inline") else record["at"]
            file = index if record.get("inline") else data
            for stream, rows, length, checksum in record["blocks"]:
                if row < end and row + rows > start:
                    raw = os.pread(file.fileno(), length, at)
                    if zlib.crc32(raw) != checksum or len(raw) != length:
                        raise corrupt(
                            Path(file.name), f"the rows of record {number}, {length} bytes at {at}, are damaged"
                        )
                    batch = pa.ipc.open_stream(raw).read_next_batch()
                    skipped = max(0, start - row)
                    yield stream, batch.slice(skipped, min(rows, end - row) - skipped)
                row, at = row + rows, at + length
            if row >= end and until is None:
                return


def _records(segment: Segment, index: BinaryIO, until: int | None = None) -> Iterator[tuple[Any, int]]:
    """The records of an index that has its header, and where in it the blocks of each begin, if they are there."""
    head, carried = index.readline(), index.readline()
    _check_header(segment, head.rstrip(b"\n"))
    place, number = len(head) + len(carried), 0
    while (until is None or place < until) and (line := index.readline()).endswith(b"\n"):
        record = unframe(line[:-1])
        if record is None:
            raise corrupt(segment.index, f"record {number} is damaged")
        place += len(line)
        yield record, place
        if inline := record.get("inline", 0):
            place += inline
            index.seek(place)
        number += 1


def record_at(raw: bytes, at: int) -> tuple[Any, int] | None:
    """The whole record that begins there in an index, and where it ends; None: there is none."""
    stop = raw.find(b"\n", at) + 1
    record = unframe(raw[at : stop - 1]) if stop else None
    if record is None:
        return None
    end = stop + record.get("inline", 0)
    for _, _, length, checksum in record["blocks"] if end > stop else ():
        if zlib.crc32(raw[stop : stop + length]) != checksum:
            return None
        stop += length
    return record, end


def segments_of(directory: Path) -> list[Segment]:
    names = sorted(path.stem.split("-") for path in directory.glob("[0-9]*.index"))
    return [Segment(directory, int(number), int(row)) for number, row in names]


def first_row(directory: Path | None) -> int:
    segments = segments_of(directory) if directory is not None else []
    return segments[0].first if segments else 0


def tail_of(directory: Path) -> int | None:
    """The number of rows that readers may see; None: there is no journal."""
    try:
        return int.from_bytes((directory / "tail").read_bytes(), "little")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def identity_of(directory: Path) -> str:
    """What tells a journal from another one of the same name on another machine."""
    try:
        return (directory / "identity").read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""


def end_within(directory: Path, start: int, end: int, most_bytes: int) -> int:
    """How far one can read from `start`, block by block, without reading more than so many bytes; at least one block."""
    segments = segments_of(directory)
    read = 0
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        if segment.first >= end or (following is not None and following.first <= start):
            continue
        with open(segment.index, "rb") as index:
            for record, _ in _records(segment, index):
                row = int(record["row"])
                for _, rows, length, _ in record["blocks"]:
                    if row >= end:
                        return end
                    if row + rows > start:
                        read += length
                        if read > most_bytes and row > start:
                            return row
                    row += rows
                if row >= end:  # what comes after it may be half written
                    return end
    return end


def schemas_of(directory: Path | None) -> dict[str, pa.Schema]:
    """What the last segment knows, for readers that have no writer."""
    segments = segments_of(directory) if directory is not None else []
    if not segments:
        return {}
    tail = tail_of(segments[-1].index.parent) or 0
    with open(segments[-1].index, "rb") as index:
        index.readline()
        found: dict[str, str] = (unframe(index.readline()[:-1]) or {}).get("streams", {})
        index.seek(0)
        for record, _ in _records(segments[-1], index):
            if record["row"] >= max(tail, 1):
                break
            found |= record.get("streams", {})
    return {stream: schema_of(text) for stream, text in found.items()}


def schema_of(text: str) -> pa.Schema:
    return unpack_schema(text) if text else ENVELOPE_SCHEMA


def frame(value: Json) -> bytes:
    body = canonical(value).encode()
    return b"%08x %b\n" % (zlib.crc32(body), body)


def unframe(line: bytes) -> Any:
    """The value of a line, or None if it is damaged."""
    checksum, body = line[:8], line[9:]
    return json.loads(body) if checksum == b"%08x" % zlib.crc32(body) and line[8:9] == b" " else None


def has_record(torn: bytes) -> bool:
    """True if a whole record follows the beginning of `torn`: then it is not the tail of a write cut short."""
    line, _, rest = torn.partition(b"\n")
    if (record := unframe(line)) is not None:  # it is its blocks that are torn, and what they hold is no record
        return has_record(b"\0" + rest[record.get("inline", 0) :])
    found = re.finditer(rb"(?=([0-9a-f]{8} \{[^\n]*))", torn)
    return any(match.start() > 0 and unframe(match.group(1)) is not None for match in found)


def header_length(segment: Segment, raw: bytes) -> int:
    """The length of the two lines an index opens with; both appear whole or not at all."""
    first, _, rest = raw.partition(b"\n")
    carried, newline, _ = rest.partition(b"\n")
    segment.version = _check_header(segment, first)
    if not newline or not isinstance(unframe(carried), dict):
        raise corrupt(segment.index, "its header is damaged")
    return len(first) + len(carried) + 2


def _check_header(segment: Segment, line: bytes) -> int:
    with contextlib.suppress(ValueError, AttributeError):  # a newer version may frame its lines in another way
        version = json.loads(line[9:]).get("version", 0)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise FatalError(
                f"{segment.index} has format version {version}; this Penstock reads up to {FORMAT_VERSION}",
                code="PEN-5006",
                hint="run the Penstock that wrote it, or a newer one",
            )
    header = unframe(line)
    if header is None or header.get("row") != segment.first:
        raise corrupt(segment.index, "its header is damaged")
    return int(header.get("version", 0))


def corrupt(path: Path, what: str) -> FatalError:
    return FatalError(
        f"the journal is corrupt: {path}: {what}",
        code="PEN-5005",
        hint="restore the journal's directory from a copy; or move it away and run `penstock offsets reset`, "
        "which gives up the rows that were journaled and not yet committed",
    )


def gone(directory: Path, row: int) -> FatalError:
    return FatalError(
        f"row {row} is no longer in the journal {directory}",
        code="PEN-5011",
        hint="restore journal and manifests from the same moment; or `penstock offsets reset`, which goes on with the rows "
        "that are left",
    )
