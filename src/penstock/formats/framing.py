"""
What comes before a payload and names its schema; read and written for a whole batch at once.

    confluent      00, the registry's id in 4 bytes, big-endian; Protobuf: then the message indexes
    single_object  C3 01, the CRC-64-AVRO of the writer's schema in 8 bytes, little-endian
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import DataError, SchemaError
from penstock.formats import varint
from penstock.formats.varint import Bytes, Ints

PREFIX = 5
"""Bytes of Confluent's prefix."""

SINGLE_OBJECT = 10
"""Bytes of the header of Avro's single-object encoding."""

MAX_INDEXES = 32
"""Messages of a `.proto` file nest less deep than this; a longer path is no frame."""

NO_FRAME, UNKNOWN_ID = "framing.missing", "framing.unknown_id"
"""Rules of failures: a payload that does not begin with a whole frame, and one whose id the registry does not have."""


class WrongSubject(DataError):
    """A schema that the registry has, but not under the subject that messages must be of."""


def rule_of(error: DataError) -> str:
    """The rule of the payloads for whose id no schema was given."""
    return "framing.subject" if isinstance(error, WrongSubject) else UNKNOWN_ID


_CRC_EMPTY = 0xC15D213AA4D7A795


@dataclass(frozen=True)
class Cells:
    """The values of a binary array as places in one run of bytes, which ends with `varint.PAD` zeros; nulls are empty."""

    data: Bytes
    starts: Ints
    ends: Ints
    is_valid: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Ints:
        return self.ends - self.starts


def cells(payloads: pa.Array, pad: int = varint.PAD) -> Cells:
    """Any binary or text array: sliced, with nulls, large, fixed-size or of views."""
    array = payloads.combine_chunks() if isinstance(payloads, pa.ChunkedArray) else payloads
    if types.is_null(array.type):
        array = pa.nulls(len(array), pa.binary())
    kind = array.type
    is_large = types.is_large_binary(kind) or types.is_large_string(kind)
    if not (is_large or types.is_binary(kind) or types.is_string(kind)):
        array = array.cast(pa.large_binary())
        is_large = True
    count = len(array)
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    width = np.int64 if is_large else np.int32
    _, edge_buffer, byte_buffer = array.buffers()
    if count == 0 or byte_buffer is None:
        return Cells(np.zeros(pad, np.uint8), np.zeros(count, np.int64), np.zeros(count, np.int64), is_valid)
    edges = np.frombuffer(edge_buffer, width, count + 1, array.offset * np.dtype(width).itemsize).astype(np.int64)
    first, last = int(edges[0]), int(edges[-1])
    data = np.zeros(last - first + pad, np.uint8)
    data[: last - first] = np.frombuffer(byte_buffer, np.uint8, last - first, first)
    edges -= first
    starts, ends = edges[:-1], edges[1:]
    if not is_valid.all():
        ends = np.where(is_valid, ends, starts)
    return Cells(data, starts, ends, is_valid)


def ids(found: Cells) -> Ints:
    """Confluent's id of each payload; -1 where there is no whole prefix."""
    at = found.starts
    head = found.data
    framed = (found.sizes >= PREFIX) & (head[at] == 0)
    number = varint.words(found.data)[at].byteswap() >> np.uint64(24) & np.uint64(0xFFFFFFFF)
    return np.where(framed, number.astype(np.int64), -1)


def strip(payloads: pa.Array) -> tuple[Ints, pa.Array]:
    """Confluent's id of each payload, -1 where there is no whole prefix, and the bytes after it: null where there is none."""
    number = ids(cells(payloads))
    return number, _without(payloads, PREFIX, number >= 0)


def add(payloads: pa.Array, id: int) -> pa.Array:
    """Each payload after Confluent's prefix; a null stays null."""
    return _prefixed(payloads, b"\0" + id.to_bytes(4, "big"))


def fingerprints(found: Cells) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """The fingerprint in each payload's single-object header, and where there is such a header."""
    words = varint.words(found.data)
    head = words[found.starts] & np.uint64(0xFFFF)
    framed = (found.sizes >= SINGLE_OBJECT) & (head == 0x01C3)
    return np.where(framed, words[np.where(framed, found.starts + 2, 0)], 0).astype(np.uint64), framed


def add_single_object(payloads: pa.Array, fingerprint: int) -> pa.Array:
    """Each payload after the header of Avro's single-object encoding; a null stays null."""
    return _prefixed(payloads, b"\xc3\x01" + fingerprint.to_bytes(8, "little"))


def indexes(found: Cells, skip: int = 0) -> tuple[Ints, list[tuple[int, ...]], Ints]:
    """
    Protobuf's message indexes, `skip` bytes after each payload's start.

    Gives for each payload the number of its path in the list that follows, -1 if it has no whole one, and the size of
    the indexes. Most batches have one path.
    """
    at, ends = found.starts + skip, found.ends
    paths: list[tuple[int, ...]] = [(0,)]
    which, sizes = np.full(len(at), -1, np.int64), np.zeros(len(at), np.int64)
    inside = np.flatnonzero(at < ends)
    short = inside[found.data[at[inside]] == 0]
    which[short], sizes[short] = 0, 1
    long = inside[found.data[at[inside]] != 0]
    if not len(long):
        return which, paths, sizes
    cursor = at[long]
    counts, used = varint.read(found.data, cursor)
    counts, cursor = varint.unzigzag(counts), cursor + used
    good = (used <= varint.MAX_BYTES) & (counts > 0) & (counts <= MAX_INDEXES) & (cursor <= ends[long])
    long, cursor, counts = long[good], cursor[good], counts[good]
    table = np.full((len(long), int(counts.max(initial=0))), -1, np.int64)
    is_whole = np.ones(len(long), bool)
    for step in range(table.shape[1]):
        rows = np.flatnonzero((counts > step) & is_whole)
        values, used = varint.read(found.data, cursor[rows])
        values = varint.unzigzag(values)
        cursor[rows] += used
        is_whole[rows] = (used <= varint.MAX_BYTES) & (values >= 0) & (cursor[rows] <= ends[long[rows]])
        table[rows, step] = np.where(is_whole[rows], values, 0)
    long, table, counts, cursor = long[is_whole], table[is_whole], counts[is_whole], cursor[is_whole]
    if len(long):
        unique, number = np.unique(table, axis=0, return_inverse=True)
        which[long] = number.reshape(-1) + len(paths)
        sizes[long] = cursor - at[long]
        paths += [tuple(int(step) for step in row if step >= 0) for row in unique]
    return which, paths, sizes


def index_bytes(path: Sequence[int]) -> bytes:
    """The message indexes of a path, in their short form for the first message of a file."""
    if tuple(path) == (0,):
        return b"\0"
    numbers = varint.write(varint.zigzag(np.array([len(path), *path], np.int64)))
    return b"".join(numbers.to_pylist())


def add_indexes(payloads: pa.Array, id: int, path: Sequence[int]) -> pa.Array:
    """Each payload after Confluent's prefix and the message indexes; a null stays null."""
    return _prefixed(payloads, b"\0" + id.to_bytes(4, "big") + index_bytes(path))


def _without(payloads: pa.Array, size: int, framed: npt.NDArray[np.bool_]) -> pa.Array:
    found = cells(payloads)
    starts = np.where(framed, found.starts + size, found.ends)
    return gathered(found.data, starts, found.ends, framed)


def gathered(data: Bytes, starts: Ints, ends: Ints, is_valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """The bytes from each start to its end. Starts ascend: every second value of an array over the data is one of them."""
    if not len(starts):
        return pa.array([], pa.binary())
    edges = np.empty(2 * len(starts) + 1, np.int64)
    edges[0:-1:2], edges[1::2], edges[-1] = starts, ends, ends[-1]
    chosen = varint.binary(data, edges).take(
        pa.array(np.arange(0, 2 * len(starts), 2), mask=None if is_valid is None else ~is_valid)
    )
    return chosen.cast(pa.binary()) if types.is_large_binary(chosen.type) and chosen.nbytes < 1 << 31 else chosen


def _prefixed(payloads: pa.Array, prefix: bytes) -> pa.Array:
    array = payloads.combine_chunks() if isinstance(payloads, pa.ChunkedArray) else payloads
    is_large = len(array) and array.nbytes + len(array) * len(prefix) >= 1 << 31
    kind = pa.large_binary() if is_large or types.is_large_binary(array.type) else pa.binary()
    return pc.binary_join_element_wise(pa.scalar(prefix, kind), array.cast(kind), pa.scalar(b"", kind))


@lru_cache(maxsize=256)
def fingerprint(schema_text: str) -> int:
    """CRC-64-AVRO of an Avro schema's canonical form."""
    value = _CRC_EMPTY
    table = _crc_table()
    for byte in canonical(schema_text).encode():
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    return value


def canonical(schema_text: str) -> str:
    """Avro's Parsing Canonical Form: full names, no attributes but those that change the bytes, in a fixed order."""
    try:
        return json.dumps(_canonical(json.loads(schema_text), ""), separators=(",", ":"), ensure_ascii=False)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SchemaError(f"not an Avro schema: {error}", hint="check the schema's JSON") from error


@lru_cache(maxsize=1)
def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CRC_EMPTY if value & 1 else 0)
        table.append(value)
    return tuple(table)


_PRIMITIVES = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
_ORDER = ("name", "type", "fields", "symbols", "items", "values", "size")


def _canonical(schema: Any, namespace: str) -> Any:
    if isinstance(schema, str):
        return schema if schema in _PRIMITIVES or "." in schema or not namespace else f"{namespace}.{schema}"
    if isinstance(schema, list):
        return [_canonical(each, namespace) for each in schema]
    kind = schema["type"]
    if not isinstance(kind, str):
        return _canonical(kind, namespace)
    if kind in _PRIMITIVES:
        return kind
    found: dict[str, Any] = {"type": "record" if kind == "error" else kind}
    if "name" in schema and kind in ("record", "error", "enum", "fixed"):
        name, space = schema["name"], schema.get("namespace", namespace) or ""
        found["name"] = name if "." in name or not space else f"{space}.{name}"
        namespace = found["name"].rpartition(".")[0]
    if "fields" in schema:
        fields = schema["fields"]
        found["fields"] = [{"name": each["name"], "type": _canonical(each["type"], namespace)} for each in fields]
    for name in ("items", "values"):
        if name in schema:
            found[name] = _canonical(schema[name], namespace)
    if "symbols" in schema:
        found["symbols"] = schema["symbols"]
    if "size" in schema:
        found["size"] = int(schema["size"])
    if len(found) == 1:
        return _canonical(kind, namespace)  # a name, with attributes around it
    return {name: found[name] for name in _ORDER if name in found}
