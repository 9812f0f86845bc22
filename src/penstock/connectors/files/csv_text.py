"""CSV as text: a quote that is never closed, and a row as a line again."""

from __future__ import annotations

import re

import pyarrow as pa

from penstock.connectors.files import splits
from penstock.connectors.files.splits import BadRows, FileSplit, opened, stream_of
from penstock.errors import DataError

MOST_BYTES = 256 << 20
"""A file with an odd number of quotes is looked at in memory, up to this size."""

_QUOTED = re.compile(rb'"(?:[^"]|"")*+"')


class Counted:
    """A stream that counts its quotes: once it has ended with an odd number of them, one may never have been closed."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._quotes = 0
        self._ended = self.closed = False

    def read(self, size: int) -> bytes:
        chunk: bytes = self._stream.read(size)
        self._quotes += chunk.count(b'"')
        self._ended = self._ended or not chunk
        return chunk

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    @property
    def is_open_ended(self) -> bool:
        return self._ended and self._quotes % 2 == 1


def closed(split: FileSplit, bad: BadRows) -> pa.NativeFile | None:
    """
    The text without lines that open a quote which nothing closes: it would swallow all lines after it, as one value.

    Such a line is a bad row of its own. None: there is none.
    """
    with opened(split) as file:
        counted = Counted(stream_of(split, file))
        while counted.read(splits.BLOCK_BYTES):
            pass
    if not counted.is_open_ended:
        return None
    with opened(split) as file:
        stream, lines = stream_of(split, file), 0
        text, rest = stream.read(MOST_BYTES), stream.read(1)
    if rest:
        raise DataError(
            f"{split.path} has an odd number of quotes, and is too large to look for the one that is never closed",
            code="PEN-3001",
            hint="close it, or cut the file into smaller ones",
        )
    while (found := _unclosed(text, split.separator.encode())) is not None:
        end = text.find(b"\n", found)
        end = len(text) if end < 0 else end + 1
        line = text.count(b"\n", 0, found) + lines + 1
        bad.add(f"line {line:,}", "a quote that is opened here is never closed", text[found:end].rstrip(b"\r\n"))
        text, lines = text[:found] + text[end:], lines + 1
    return pa.BufferReader(text)


def _unclosed(text: bytes, separator: bytes) -> int | None:
    """Where the record begins that has an unclosed quote; None: all are closed."""
    ends = re.compile(rb"[\n" + re.escape(separator) + rb"]")
    at = record = 0
    while at < len(text):
        if text[at] == 0x22:
            quoted = _QUOTED.match(text, at)
            if quoted is None:
                return record
            at = quoted.end()
        after = ends.search(text, at)
        if after is None:
            return None
        at = after.end()
        if after.group() == b"\n":
            record = at
    return None


def line_of(rows: pa.RecordBatch, at: int, separator: str) -> bytes:
    """A row of bytes as a line of CSV: the same values, in quotes where they need them."""
    texts = [column[at].as_py() or b"" for column in rows.columns]
    special = re.compile(rb'["\r\n' + re.escape(separator.encode()) + rb"]")
    quoted = [b'"' + each.replace(b'"', b'""') + b'"' if special.search(each) else each for each in texts]
    return separator.encode().join(quoted)
