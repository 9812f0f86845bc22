"""
Rows as JSON text, a column at a time.

JSON has fewer types than Arrow. Decimals are text (a JSON number would be rounded by most readers), binary values are
base64, dates, times and timestamps are ISO 8601 (with `Z` when the column has a time zone), durations are integers in
their unit, NaN and infinities are the texts `NaN`, `Infinity` and `-Infinity`, nulls are written as null.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import SchemaError

_SHORT = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r"}
_MUST_ESCAPE = np.array([code < 0x20 or code in _SHORT for code in range(256)])


def objects(names: list[str], columns: list[pa.Array], rows: int, end: str = "}") -> pa.Array:
    """One JSON object per row, with the columns as its members; `end` closes it."""
    return members(names, [text_of(column, name) for name, column in zip(names, columns, strict=True)], rows, end)


def members(names: list[str], texts: list[pa.Array], rows: int, end: str = "}", skip_nulls: bool = False) -> pa.Array:
    """One JSON object per row, of members whose texts are ready; with `skip_nulls`, null texts are left out."""
    keys = [json.dumps(name, ensure_ascii=False) + ":" for name in names]
    if not keys:
        return pa.array(["{" + end] * rows, pa.string())
    if skip_nulls:
        parts = [pc.fill_null(_join("," + key, text), "") for key, text in zip(keys, texts, strict=True)]
        return _join("{", pc.ascii_ltrim(_join(*parts), ","), end)
    flat: list[Any] = []
    for position, (key, text) in enumerate(zip(keys, texts, strict=True)):
        flat += [("," if position else "{") + key, text]
    return _join(*flat, end)


def _join(*parts: pa.Array | str) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


def text_of(column: pa.Array, name: str) -> pa.Array:
    """Each value's JSON text; no nulls."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return text_of(column.storage, name)
    if types.is_dictionary(kind):
        return text_of(column.dictionary_decode(), name)
    if types.is_null(kind):
        return pa.array(["null"] * len(column), pa.string())
    if types.is_boolean(kind) or types.is_integer(kind):
        text = pc.cast(column, pa.string())
    elif types.is_duration(kind):
        text = pc.cast(pc.cast(column, pa.int64()), pa.string())
    elif types.is_floating(kind):
        text = float_text(column)
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        text = _quoted(pc.cast(column, pa.string()))
    elif types.is_timestamp(kind):
        text = _timestamp_text(column)
    elif types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind):
        text = _join('"', pc.cast(column, pa.string()), '"')
    elif is_binary(kind):
        values = (None if value is None else base64.b64encode(value).decode() for value in column.to_pylist())
        text = _join('"', pa.array(values, pa.string()), '"')
    elif types.is_struct(kind):
        text = _struct_text(column)
    elif types.is_map(kind) or is_list(kind):
        text = _list_text(column, name)
    else:
        raise SchemaError(
            f"the column {name!r} is {kind}, which JSON cannot hold",
            code="PEN-4002",
            hint='cast it in the route\'s SQL, or use format = "parquet"',
        )
    return pc.fill_null(text, "null") if text.null_count else text


def float_text(column: pa.Array) -> pa.Array:
    """Numbers that a reader takes for floats; NaN and the infinities in quotes."""
    column = pc.cast(column, pa.float32()) if types.is_float16(column.type) else column
    text = pc.cast(column, pa.string())
    finite = pc.is_finite(column)
    if pc.any(pc.invert(finite)).as_py():
        names = pc.if_else(pc.is_nan(column), '"NaN"', pc.if_else(pc.less(column, 0), '"-Infinity"', '"Infinity"'))
        text = pc.if_else(finite, text, names)
    # 1.0 prints as 1: readers that infer types would see integers in one file and floats in the next.
    whole = pc.match_substring_regex(text, "^-?[0-9]+$")
    return pc.if_else(whole, _join(text, ".0"), text) if pc.any(whole).as_py() else text


def _timestamp_text(column: pa.Array) -> pa.Array:
    if column.type.tz is not None:
        column = pc.cast(column, pa.timestamp(column.type.unit, "UTC"))  # prints a Z
    return _join('"', pc.replace_substring(pc.cast(column, pa.string()), " ", "T"), '"')


def _quoted(text: pa.Array) -> pa.Array:
    found = np.flatnonzero(np.bincount(np.frombuffer(text_bytes(text), np.uint8), minlength=256)[:256] * _MUST_ESCAPE)
    for code in sorted(
        found.tolist(), key=lambda code: code != 0x5C
    ):  # the backslash first: the others bring some along
        text = pc.replace_substring(text, chr(code), _SHORT.get(code, f"\\u{code:04x}"))
    return _join('"', text, '"')


def _struct_text(column: pa.StructArray) -> pa.Array:
    names = [field.name for field in column.type]
    return with_nulls_of(column, objects(names, column.flatten(), len(column)))


def _list_text(column: pa.Array, name: str) -> pa.Array:
    if types.is_map(column.type):
        keys, values = entries(column)
        return map_text(column, keys, text_of(values, name))
    if not types.is_list(column.type):  # a cast to the same type breaks lists of structs of nulls
        column = pc.cast(column, pa.list_(column.type.value_type))
    return list_text(column, text_of(items_of(column), name))


def items_of(column: pa.Array) -> pa.Array:
    """The items of all lists, one after the other; pyarrow loses some of lists that hold nothing but nulls."""
    if types.is_null(column.type.value_type):
        return pa.nulls(pc.sum(pc.list_value_length(column)).as_py() or 0)
    return column.flatten()


def list_text(column: pa.Array, items: pa.Array, brackets: str = "[]") -> pa.Array:
    """Each list's JSON text, from the texts of the items of all lists."""
    counts = pc.fill_null(pc.list_value_length(column), 0)
    edges = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    text = _join(brackets[0], pc.binary_join(pa.ListArray.from_arrays(edges, items), ","), brackets[1])
    return with_nulls_of(column, text)


def map_text(column: pa.MapArray, keys: pa.Array, values: pa.Array) -> pa.Array:
    """Each map's JSON text, from the keys and the texts of the values of all maps."""
    return list_text(_as_lists(column), _join(_key_text(keys), ":", values), "{}")


def entries(column: pa.MapArray) -> tuple[pa.Array, pa.Array]:
    """The keys and the values of all maps."""
    keys, values = _as_lists(column).flatten().flatten()
    return keys, values


def with_nulls_of(column: pa.Array, text: pa.Array) -> pa.Array:
    """The texts, null where the column is."""
    return pc.if_else(column.is_valid(), text, pa.scalar(None, pa.string())) if column.null_count else text


def _as_lists(column: pa.MapArray) -> pa.ListArray:
    entry = pa.struct([pa.field("key", column.type.key_type, False), pa.field("value", column.type.item_type)])
    return pc.cast(column, pa.list_(entry))


def _key_text(keys: pa.Array) -> pa.Array:
    """JSON's keys are text: what is not is put in quotes."""
    text = text_of(keys, "key")
    bare = pc.invert(pc.starts_with(text, '"'))
    return pc.if_else(bare, _join('"', text, '"'), text)


def text_bytes(text: pa.Array) -> memoryview:
    """The bytes of all values of a string array, one after the other."""
    offsets = (
        np.frombuffer(text.buffers()[1], np.int32)[text.offset : text.offset + len(text) + 1] if len(text) else (0, 0)
    )
    data = text.buffers()[2]
    return memoryview(data)[int(offsets[0]) : int(offsets[-1])] if data is not None else memoryview(b"")


def is_binary(kind: pa.DataType) -> bool:
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
