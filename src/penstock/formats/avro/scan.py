"""
Where a decoder is in a batch: one cursor per record, moved over one field of all records at a time.

A record that breaks a rule is failed and its cursor put on the zeros after the data, where every type can be read:
nothing else has to know of it until the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.formats import varint
from penstock.formats.pieces import Reason
from penstock.formats.varint import Bytes, Ints

Mask = npt.NDArray[np.bool_]

MAX_EMPTY_ITEMS = 64
"""Items that take no bytes, such as nulls, in all arrays of a payload."""

FEW_RECORDS, SOME_ITEMS = 32, 16
"""Once fewer records than this go on after that many items of an array, they are read one by one: a pass has its price."""


class BadRow(Exception):
    """A record that is read by itself breaks a rule."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.reason = Reason(rule, text)


def truncated(path: str) -> Reason:
    return Reason("avro.truncated", f"the payload ends within {path}")


def bad_varint(path: str) -> Reason:
    return Reason("avro.varint", f"a number of more than 64 bits in {path}")


class Cursors:
    """Positions in the data: of records, or of items of their arrays."""

    __slots__ = ("at", "end", "row")

    def __init__(self, at: Ints, end: Ints, row: Ints) -> None:
        self.at, self.end, self.row = at, end, row

    def take(self, index: npt.NDArray[Any]) -> Cursors:
        return Cursors(self.at[index], self.end[index], self.row[index])

    def __len__(self) -> int:
        return len(self.at)


class Scan:
    """One batch: its bytes, and what is wrong with which record."""

    ALONE = Reason("", "read by itself")

    def __init__(self, data: Bytes, pad: int, rows: int) -> None:
        self.data, self.pad = data, pad
        self.words = varint.words(data)
        self.halves = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))
        self.why: Ints = np.full(rows, -1, np.int64)
        """Per record the number of its reason; -1: nothing is wrong."""
        self.reasons: list[Reason] = []
        self.empty_items: Ints = np.zeros(rows, np.int64)

    def fail(self, rows: Ints, reason: Reason) -> None:
        """The first reason of a record stays."""
        rows = rows[self.why[rows] < 0]
        if len(rows):
            if reason not in self.reasons:
                self.reasons.append(reason)
            self.why[rows] = self.reasons.index(reason)

    def refuse(self, cursors: Cursors, is_bad: Mask, reason: Reason, *values: npt.NDArray[Any]) -> None:
        """Fails the records at these cursors, and sets what was read there to 0."""
        if is_bad.any():
            self._refuse(cursors, np.flatnonzero(is_bad), reason, *values)

    def _refuse(self, cursors: Cursors, places: Ints, reason: Reason, *values: npt.NDArray[Any]) -> None:
        if len(places):
            self.fail(cursors.row[places], reason)
            cursors.at[places] = self.pad
            for each in values:
                each[places] = 0

    def long(self, cursors: Cursors, path: str) -> Ints:
        values, sizes = varint.read(self.data, cursors.at)
        cursors.at = cursors.at + sizes
        over = np.flatnonzero(cursors.at > cursors.end)
        if len(over):
            is_endless = cursors.at[over] - sizes[over] + varint.MAX_BYTES <= cursors.end[over]
            self._refuse(cursors, over[is_endless], bad_varint(path), values)
            self._refuse(cursors, over, truncated(path), values)
        return varint.unzigzag(values)

    def fixed(self, cursors: Cursors, size: int, path: str) -> Ints:
        """Where each value of `size` bytes begins."""
        starts = cursors.at
        cursors.at = starts + size
        over = np.flatnonzero(cursors.at > cursors.end)
        if len(over):
            self._refuse(cursors, over, truncated(path))
            starts[over] = self.pad
        return starts

    def sized(self, cursors: Cursors, path: str) -> tuple[Ints, Ints]:
        """Where each value begins that says its own size, and the size."""
        sizes = self.long(cursors, path)
        starts = cursors.at
        # As unsigned numbers, sizes below zero are too large as well.
        over = np.flatnonzero(sizes.view(np.uint64) > (cursors.end - starts).view(np.uint64))
        if len(over):
            self._refuse(cursors, over[sizes[over] < 0], Reason("avro.size", f"a size below zero in {path}"), sizes)
            over = over[starts[over] != self.pad]
            self._refuse(cursors, over, truncated(path), sizes)
        cursors.at = starts + sizes
        return starts, sizes

    def table(self, starts: Ints, size: int) -> Bytes:
        """`size` bytes from each start, as rows of a table."""
        found: Bytes = self.data[starts[:, None] + np.arange(size)]
        return found

    def gathered(self, starts: Ints, sizes: Ints) -> pa.Array:
        """The values as a binary array. Starts ascend but for empty values: every second value over the data is one."""
        count = len(starts)
        if not count:
            return pa.array([], pa.binary())
        ends = starts + sizes
        if (starts[1:] < ends[:-1]).any():
            is_empty = sizes == 0
            ends = np.maximum.accumulate(np.where(is_empty, 0, ends))
            starts = np.where(is_empty, ends, starts)
        edges = np.empty(2 * count + 1, np.int64)
        edges[0:-1:2], edges[1::2], edges[-1] = starts, ends, ends[-1]
        return varint.binary(self.data, edges).take(pa.array(np.arange(0, 2 * count, 2)))


class Reader:
    """One record that is read by itself, in plain Python: arrays of very many items, of few records."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.empty_items = data, 0, 0
        self.late: Reason | None = None
        """What is wrong with a value that could be passed over; what is wrong with the form counts before it, as in bulk."""

    def long(self, path: str) -> int:
        at = self.at
        if at < len(self.data) and (byte := self.data[at]) < 0x80:
            self.at = at + 1
            return byte >> 1 ^ -(byte & 1)
        value = shift = 0
        for byte in self.data[self.at : self.at + varint.MAX_BYTES]:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value >> 64:
                    raise BadRow(*bad_varint(path))
                self.at += shift // 7
                return value >> 1 ^ -(value & 1)
        raise BadRow(*(truncated(path) if shift < 7 * varint.MAX_BYTES else bad_varint(path)))

    def take(self, size: int, path: str) -> bytes:
        if size < 0:
            raise BadRow("avro.size", f"a size below zero in {path}")
        if size > len(self.data) - self.at:
            raise BadRow(*truncated(path))
        self.at += size
        return self.data[self.at - size : self.at]
