"""
Files of JSON lines: rows to lines, and lines that were so written back to rows.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types

from penstock.errors import DataError
from penstock.formats.json_text import is_binary, is_list, objects, text_bytes

_SLICE_BYTES = 64 << 20
"""Rows are encoded in pieces of about this size: the text of a piece must stay below 2 GB, and memory flat."""


def encode(batch: pa.RecordBatch) -> Iterator[memoryview]:
    """The batch's rows as UTF-8 lines, in pieces that are ready to be written."""
    pieces = batch.nbytes // _SLICE_BYTES + 1
    step = max(1, -(-batch.num_rows // pieces))
    for start in range(0, batch.num_rows, step):
        piece = batch.slice(start, step)
        lines = objects(piece.schema.names, piece.columns, piece.num_rows, end="}\n")
        yield memoryview(text_bytes(lines))


def decode(data: bytes, schema: pa.Schema) -> pa.Table:
    """Lines that `encode` wrote, with the types they had; columns that a line lacks are null."""
    if all(_is_native(field.type) for field in schema):
        options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        read = pyarrow.json.ReadOptions(block_size=max(1 << 20, len(data) + 1))  # a line must not cross two blocks
        try:
            return pyarrow.json.read_json(pa.BufferReader(data), read, options) if data else schema.empty_table()
        except pa.ArrowInvalid:
            pass  # a NaN, or a broken line: the slow way tells them apart
    try:
        rows = [json.loads(line) for line in data.splitlines() if line]
        columns = [[_value(row.get(field.name), field.type) for row in rows] for field in schema]
    except (ValueError, AttributeError) as error:
        raise DataError(f"not a line of JSON as this sink writes it: {error}", code="PEN-3001") from error
    return pa.table([pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema)


def _value(value: Any, kind: pa.DataType) -> Any:
    """One decoded JSON value as pyarrow takes it for `kind`."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return _value(value, kind.storage_type)
    if types.is_dictionary(kind):
        return _value(value, kind.value_type)
    if types.is_floating(kind):
        return float(value)
    if types.is_decimal(kind):
        return decimal.Decimal(value)
    if is_binary(kind):
        return base64.b64decode(value)
    if types.is_timestamp(kind):
        return pc.cast(pa.scalar(value), kind).value
    if types.is_date(kind):
        return datetime.date.fromisoformat(value)
    if types.is_time(kind):
        return pc.cast(pa.scalar(f"1970-01-01T{value}"), pa.timestamp(kind.unit)).value
    if types.is_struct(kind):
        return {
            kind.field(i).name: _value(value.get(kind.field(i).name), kind.field(i).type)
            for i in range(kind.num_fields)
        }
    if types.is_map(kind):
        return [(_key(key, kind.key_type), _value(item, kind.item_type)) for key, item in value.items()]
    if is_list(kind):
        return [_value(item, kind.value_type) for item in value]
    return value


def _key(text: str, kind: pa.DataType) -> Any:
    return int(text) if types.is_integer(kind) else _value(text, kind)


def _is_native(kind: pa.DataType) -> bool:
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_float64(kind) or types.is_string(kind))
