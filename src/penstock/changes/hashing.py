"""Columns as 64-bit numbers: one hash for the rows that a task gets, for sets of keys, and for generated values."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

Words: TypeAlias = npt.NDArray[np.uint64]


def mix(words: Words) -> Words:
    """A bijection that leaves no pattern of its input: the finaliser of splitmix64, in place but for the first step."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def is_word(kind: pa.DataType) -> bool:
    """True for types whose values fit into 64 bits: `words_of` gives the value itself."""
    return bool(types.is_primitive(kind)) and kind.bit_width <= 64


def words_of(values: pa.Array) -> Words:
    """A number per value: of numbers, times and truths the value, of others a hash; of nulls anything."""
    kind = values.type
    if not len(values):
        return np.empty(0, np.uint64)
    if types.is_boolean(kind):
        values, kind = values.cast(pa.uint8()), pa.uint8()
    if is_word(kind):
        code = "u" if types.is_unsigned_integer(kind) else "i"
        data = np.frombuffer(values.buffers()[1], f"{code}{kind.bit_width // 8}")
        data = data[values.offset : values.offset + len(values)]
        return data.astype(np.uint64 if code == "u" else np.int64).view(np.uint64)
    if not (types.is_large_string(kind) or types.is_large_binary(kind)):
        values = values.cast(pa.string()).cast(pa.binary()) if types.is_decimal(kind) else values.cast(pa.binary())
    return _text_words(values)


def _text_words(values: pa.Array) -> Words:
    """A hash of each text: eight bytes of every text at a time, until the longest has ended."""
    wide = types.is_large_binary(values.type) or types.is_large_string(values.type)
    edges = np.frombuffer(values.buffers()[1], np.int64 if wide else np.int32)
    edges = edges[values.offset : values.offset + len(values) + 1].astype(np.int64)
    text = bytes(memoryview(values.buffers()[2] or b"")[edges[0] : edges[-1]]) + bytes(8)
    eight: Words = np.ndarray(len(text) - 7, np.uint64, text, strides=(1,))  # the words that begin at each byte
    begin, length, left = edges[:-1] - edges[0], np.diff(edges), np.arange(len(values))
    hashes = length.astype(np.uint64)
    while len(left):
        used = np.minimum(length, 8).astype(np.uint64) * np.uint64(8)
        word = np.where(used == 64, eight[begin], eight[begin] & ((np.uint64(1) << used) - np.uint64(1)))
        hashes[left] = mix(hashes[left] ^ word)
        more = length > 8
        begin, length, left = begin[more] + 8, length[more] - 8, left[more]
    return hashes
