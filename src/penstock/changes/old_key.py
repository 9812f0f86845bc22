"""
The text of `_old_key`: the key that a row had before a change moved it, as a JSON object by column name.

JSON has no decimals, dates, times or bytes: they are strings, as Arrow prints them, and bytes as hex digits. The largest
date or timestamp of a type, and its negative, are `infinity` and `-infinity`. Years below 0 (which is 1 BC) have a sign,
and years above 9999 all of their digits. NaN and infinite floats are strings too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.changes.columns import refuse_nulls
from penstock.durable import Json, canonical
from penstock.errors import DataError

_A_DAY = {"D": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_YEAR_0, _YEAR_10000 = -719_528, 2_932_897
"""Their first days; Arrow prints and reads the years between them."""

_HEX = np.frombuffer(bytes(range(256)).hex().upper().encode(), np.uint16)
"""The two hex digits of every byte."""


def pack_key(key: Mapping[str, Json]) -> str:
    """One key whose values are JSON already."""
    return canonical(dict(key))


def unpack_key(text: str) -> dict[str, Json]:
    """One key, its values as JSON has them."""
    found: dict[str, Json] = json.loads(text)
    return found


def pack_keys(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.Array:
    """The keys of many rows, all at once."""
    parts: list[Any] = ["{"]
    for number, (name, values) in enumerate(zip(names, columns, strict=True)):
        label = _strings(pa.array([name]))[0].as_py()
        parts += [f"{', ' if number else ''}{label}: ", _values(values)]
    return pc.binary_join_element_wise(*parts, "}", "")


def unpack_keys(texts: pa.ChunkedArray | pa.Array, schema: pa.Schema) -> pa.Table:
    """The key columns of many texts, in the types of `schema`; every column must have a value."""
    try:
        rows = [json.loads(text, parse_int=str, parse_float=str, parse_constant=str) for text in texts.to_pylist()]
        columns = [_typed([row[each.name] for row in rows], each.type) for each in schema]
    except (KeyError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        missing = f": it has no {error}" if isinstance(error, KeyError) else f" as {', '.join(map(str, schema.types))}"
        raise DataError(
            f"an `_old_key` cannot be read{missing}", hint="it must be a JSON object with a value for every key column"
        ) from error
    table = pa.Table.from_arrays(columns, names=schema.names)
    refuse_nulls(table, schema.names)
    return table


def _typed(values: list[Any], kind: pa.DataType) -> pa.Array:
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.array([bytes.fromhex(value.removeprefix("\\x")) for value in values], kind)
    if types.is_string(kind) or types.is_large_string(kind):
        return pa.array(values, kind)
    texts = pa.array([None if value is None else str(value) for value in values], pa.string())
    if types.is_date(kind) or types.is_timestamp(kind):
        return parse_moments(texts, kind)
    return pc.cast(texts, kind)


def _values(values: pa.Array) -> pa.Array:
    kind = values.type
    if types.is_boolean(kind) or types.is_integer(kind):
        texts = values.cast(pa.string())
    elif types.is_floating(kind):
        texts = values.cast(pa.string())
        texts = pc.if_else(pc.is_finite(values), texts, _strings(texts))
    elif types.is_binary(kind):
        texts = _strings(_hex(values))
    elif types.is_list(kind):
        texts = _lists(values)
    elif types.is_date(kind) or types.is_timestamp(kind):
        texts = _strings(moment_texts(values))
    else:
        texts = _strings(values.cast(pa.string()))
    return pc.fill_null(texts, "null")


def _lists(values: pa.Array) -> pa.Array:
    inner = _values(values.flatten())
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, inner), ", ")
    texts = pc.binary_join_element_wise("[", joined, "]", "")
    return pc.if_else(pc.is_valid(values), texts, pa.scalar(None, pa.string()))


def _strings(texts: pa.Array) -> pa.Array:
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
        texts = pc.replace_substring(texts, plain, escaped)
    if pc.any(pc.match_substring_regex(texts, "[\\x00-\\x1f]")).as_py():
        for code in range(32):
            texts = pc.replace_substring(texts, chr(code), f"\\u{code:04x}")
    return pc.binary_join_element_wise('"', texts, '"', "")


def _hex(values: pa.Array) -> pa.Array:
    """Bytes as hex digits."""
    values = values.take(pa.array(np.arange(len(values), dtype=np.int32)))  # its offsets begin at 0
    validity, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int32)[: len(values) + 1] * 2 if len(values) else np.zeros(1, np.int32)
    raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    digits = _HEX[raw[: bounds[-1] // 2]].view(np.uint8)
    return pa.Array.from_buffers(
        pa.string(), len(values), [validity, pa.py_buffer(bounds), pa.py_buffer(digits)], values.null_count
    )


def moment_texts(values: pa.Array) -> pa.Array:
    """Dates or timestamps as `_old_key` has them; Arrow prints no infinities, and not every year that it can hold."""
    texts = values.cast(pa.string())
    unit, storage = _moment(values.type)
    raw = pc.fill_null(values.view(storage), 0).to_numpy(zero_copy_only=False)
    days = raw // _A_DAY[unit]
    odd = np.flatnonzero((days < _YEAR_0) | (days >= _YEAR_10000))
    if not len(odd):
        return texts
    known = texts.to_pylist()
    end = np.iinfo(raw.dtype).max
    for row, far in zip(odd.tolist(), raw[odd].astype(np.int64).view(f"M8[{unit}]"), strict=True):
        if abs(int(raw[row])) == end:
            known[row] = "infinity" if raw[row] > 0 else "-infinity"
            continue
        text = str(far).replace("T", " ")
        sign, text = text[: text[0] == "-"], text.removeprefix("-")
        zone = "Z" if types.is_timestamp(values.type) and values.type.tz else ""
        known[row] = f"{sign}{text.partition('-')[0]:0>4}-{text.partition('-')[2]}{zone}"
    return pa.array(known, pa.string())


def parse_moments(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """What `moment_texts` printed, of a type with or without a time zone."""
    try:
        return pc.cast(texts, kind)
    except pa.ArrowInvalid:
        pass
    unit, storage = _moment(kind)
    end = int(np.iinfo(storage.to_pandas_dtype()).max)
    ends = {"infinity": end, "-infinity": -end, None: None}
    known = texts.to_pylist()
    plain = np.array(["0000-01-01" if text in ends else text.removesuffix("Z") for text in known], f"M8[{unit}]")
    found = [ends.get(text, number) for text, number in zip(known, plain.view(np.int64).tolist(), strict=True)]
    return pa.array(found, storage).view(kind)


def _moment(kind: pa.DataType) -> tuple[str, pa.DataType]:
    """numpy's unit of a date or timestamp, and the type of the number that holds it."""
    if types.is_timestamp(kind):
        return kind.unit, pa.int64()
    return ("D", pa.int32()) if types.is_date32(kind) else ("ms", pa.int64())
