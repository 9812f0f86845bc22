"""Variable-length integers, many at a time: seven bits a byte, the lowest first, the high bit says that more follow."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

PAD = 16
"""Bytes that must follow the last position to be read: a varint takes ten, a word eight."""

MAX_BYTES = 10
"""Of a varint of 64 bits."""

ENDLESS = 1 << 40
"""The size of a varint that has more."""

_STOPS = np.uint64(0x8080808080808080)
_ONE, _EIGHT = np.uint64(1), np.uint64(8)


def words(data: Bytes) -> npt.NDArray[np.uint64]:
    """The eight bytes from each position on, as one little-endian number; no copy."""
    return np.ndarray((max(len(data) - 7, 0),), "<u8", data, 0, (1,))


def read(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """
    The unsigned varint at each position, and how many bytes it has: `ENDLESS` for one that has no end.

    Reads past the end of a value are harmless as long as `PAD` bytes follow; the caller compares with its end.
    """
    first = data[at]
    if not len(at) or first.max() < 0x80:
        return first.astype(np.int64), np.ones(len(at), np.int64)
    longer = np.flatnonzero(first >= 0x80)
    if 4 * len(longer) > len(at):
        return _read_words(data, at)
    values, sizes = first.astype(np.int64), np.ones(len(at), np.int64)
    values[longer], sizes[longer] = _read_words(data, at[longer])
    return values, sizes


def _read_words(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    word = words(data)[at]
    stops = ~word & _STOPS
    stop = stops & (~stops + _ONE)  # the lowest bit of those
    sizes = ((np.bitwise_count(stop - _ONE).astype(np.int64) + 1) >> 3).astype(np.int64)
    value = _squeezed(word & (stop - _ONE)).view(np.int64)
    long = np.flatnonzero(stops == 0)
    if len(long):
        rest = at[long] + 8
        ninth, tenth = data[rest].astype(np.uint64), data[rest + 1].astype(np.uint64)
        is_ten = ninth >= 0x80
        high = (ninth & np.uint64(0x7F)) << np.uint64(56) | np.where(is_ten, tenth, 0).astype(np.uint64) << np.uint64(
            63
        )
        value[long] = (_squeezed(word[long]) | high).view(np.int64)
        sizes[long] = np.where(is_ten, np.where(tenth > 1, ENDLESS, MAX_BYTES), 9)
    return value, sizes


def _squeezed(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Eight groups of seven bits, moved together."""
    word = (word >> _ONE & np.uint64(0x3F803F803F803F80)) | (word & np.uint64(0x007F007F007F007F))
    word = (word >> np.uint64(2) & np.uint64(0x0FFFC0000FFFC000)) | (word & np.uint64(0x00003FFF00003FFF))
    return (word >> np.uint64(4) & np.uint64(0x00FFFFFFF0000000)) | (word & np.uint64(0x000000000FFFFFFF))


def unzigzag(values: Ints) -> Ints:
    """Signed numbers from 0, -1, 1, -2, … numbered from 0."""
    return ((values.view(np.uint64) >> _ONE).view(np.int64)) ^ -(values & 1)


def zigzag(values: Ints) -> Ints:
    return (values << 1) ^ (values >> 63)


def write(values: Ints) -> pa.Array:
    """A binary array: each number, taken as unsigned, as a varint."""
    numbers = values.view(np.uint64)
    count = len(numbers)
    biggest = int(numbers.max()) if count else 0
    if biggest < 0x80:
        return binary(numbers.astype(np.uint8), np.arange(count + 1))
    width = -(-biggest.bit_length() // 7)
    table = np.empty((count, width), np.uint8)
    sizes = np.ones(count, np.int64)
    for place in range(width):
        table[:, place] = (numbers & np.uint64(0x7F)).astype(np.uint8) | np.uint8(0x80)
        numbers = numbers >> np.uint64(7)
        sizes += numbers != 0
    table[np.arange(count), sizes - 1] &= 0x7F
    is_used = np.arange(width) < sizes[:, None]
    return binary(table[is_used], np.concatenate([[0], np.cumsum(sizes)]))


def binary(data: npt.NDArray[Any], offsets: npt.NDArray[Any]) -> pa.Array:
    """A binary array over these bytes; no copy of them. A large one if 32 bits cannot count them."""
    is_large = len(offsets) and offsets[-1] >= 1 << 31
    kind, width = (pa.large_binary(), np.int64) if is_large else (pa.binary(), np.int32)
    edges = np.ascontiguousarray(offsets, width)
    return pa.Array.from_buffers(kind, len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)], 0)
