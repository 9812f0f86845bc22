"""Arrow rows to Avro payloads, a field of all rows at a time; the parts of each row are joined in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import DataError, SchemaError
from penstock.formats import varint
from penstock.formats.avro.schema import DURATION, MISSING, Field, Type

_EMPTY = pa.scalar(b"", pa.binary())


def encode(rows: pa.RecordBatch, kind: Type) -> pa.Array:
    """One payload per row, always the same bytes for the same row. Fields that the rows lack are null, if they may be."""
    if kind.kind == "record":
        return _joined(_fields(rows.schema.names, rows.columns, kind, "", rows.num_rows), rows.num_rows)
    if rows.schema.names != ["value"]:
        raise SchemaError(
            f"a schema that is no record has a column `value`; the rows have {', '.join(rows.schema.names) or 'none'}",
            hint="select the one column as `value` in the route's SQL",
        )
    return _joined(_parts(rows.column(0), kind, "value"), rows.num_rows)


def _fields(names: Sequence[str], columns: Sequence[pa.Array], kind: Type, path: str, count: int) -> list[Any]:
    given = dict(zip(names, columns, strict=True))
    extra = [name for name in names if name not in {each.name for each in kind.fields}]
    if extra:
        raise SchemaError(
            f"the Avro record {kind.name} has no field {', '.join(path + name for name in extra)}",
            hint="add the field to the schema, or leave the column out in the route's SQL",
        )
    parts: list[Any] = []
    for field in kind.fields:
        column = given.get(field.name)
        if column is None:
            column = _missing(field, f"{path}{field.name}", count)
        parts += _parts(column, field.type, f"{path}{field.name}")
    return parts


def _missing(field: Field, path: str, count: int) -> pa.Array:
    if not field.type.is_nullable:
        has = "no default that rows could take" if field.default is MISSING else "a default for readers only"
        raise SchemaError(
            f"the rows have no column {path}, and the Avro field may not be null ({has})",
            hint="add the column in the route's SQL, or make the field's type [\"null\", …]",
        )
    return pa.nulls(count, field.type.arrow)


def _joined(parts: list[Any], count: int) -> pa.Array:
    if not parts:
        return pa.array([b""] * count, pa.binary())
    return pc.binary_join_element_wise(*parts, _EMPTY) if len(parts) > 1 or count == 0 else parts[0]


def _parts(column: pa.Array, kind: Type, path: str) -> list[Any]:
    """Binary arrays whose values, one after the other, are the encoded values."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind.kind == "union":
        return _union(column, kind, path)
    if kind.kind == "null":
        if column.null_count < len(column):
            raise _unfit(column.type, kind, path)
        return []
    if column.null_count:
        raise DataError(
            f"{column.null_count} null in {path}, which the Avro schema says is never null",
            hint="make the field's type [\"null\", …], or fill the nulls in the route's SQL",
        )
    return _values(column, kind, path)


def _union(column: pa.Array, kind: Type, path: str) -> list[Any]:
    order = [each.kind for each in kind.branches]
    if not kind.is_choice:
        if not kind.others:
            return [_number(np.zeros(len(column), np.int64)), *_parts(column, kind.branches[0], path)]
        place = kind.branches.index(kind.others[0])
        if column.null_count == 0:
            return [pa.scalar(_varint(place), pa.binary()), *_values(column, kind.others[0], path)]
        if "null" not in order:
            return _parts(column, kind.others[0], path)  # refuses the nulls
        return _optional(column, kind.others[0], path, place, order.index("null"))
    return _choice(column, kind, path)


def _optional(column: pa.Array, kind: Type, path: str, place: int, null: int) -> list[Any]:
    is_valid = column.is_valid()
    branch = np.where(is_valid.to_numpy(zero_copy_only=False), place, null)
    if column.null_count == len(column):
        return [_number(branch)]
    full = _joined(_values(column.drop_null(), kind, path), len(column) - column.null_count)
    return [_number(branch), _spread(full, is_valid.to_numpy(zero_copy_only=False))]


def _choice(column: pa.Array, kind: Type, path: str) -> list[Any]:
    """A struct with one column per branch: the one that is not null says which branch it is."""
    if not types.is_struct(column.type) or column.type.names != kind.branch_names:
        raise _unfit(column.type, kind, path)
    branches = column.flatten()
    filled = np.array([each.is_valid().to_numpy(zero_copy_only=False) for each in branches])
    counts = filled.sum(axis=0)
    if (counts > 1).any() or (not kind.is_nullable and (counts == 0).any()):
        raise DataError(
            f"a union in {path} with none or several of its branches filled", hint="fill one branch of each row"
        )
    null = next((i for i, each in enumerate(kind.branches) if each.kind == "null"), 0)
    number = np.full(len(column), null, np.int64)
    parts: list[Any] = []
    for array, is_here, each, name in zip(branches, filled, kind.others, kind.branch_names, strict=True):
        number[is_here] = kind.branches.index(each)
        if is_here.any():
            full = _joined(_values(array.drop_null(), each, f"{path}.{name}"), int(is_here.sum()))
            parts.append(_spread(full, is_here))
    return [_number(number), *parts]


def _spread(values: pa.Array, is_here: Any) -> pa.Array:
    """The values at the rows that have one, nothing elsewhere; no copy of the bytes."""
    offsets = np.zeros(len(is_here) + 1, np.int64)
    sizes = np.zeros(len(is_here), np.int64)
    edges = _edges(values)
    sizes[is_here] = np.diff(edges)
    np.cumsum(sizes, out=offsets[1:])
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)[edges[0] : edges[-1]]
    return varint.binary(data, offsets)


def _edges(values: pa.Array) -> Any:
    width = np.int64 if types.is_large_binary(values.type) else np.int32
    size = np.dtype(width).itemsize
    return np.frombuffer(values.buffers()[1], width, len(values) + 1, values.offset * size).astype(np.int64)


def _values(column: pa.Array, kind: Type, path: str) -> list[Any]:
    """As `_parts`, of values that are not null and no union."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind.kind == "null":
        return []
    if kind.kind == "record":
        if not types.is_struct(column.type):
            raise _unfit(column.type, kind, path)
        return _fields(column.type.names, column.flatten(), kind, f"{path}.", len(column)) or [
            pa.array([b""] * len(column), pa.binary())
        ]
    if kind.kind in ("array", "map"):
        return _items(column, kind, path)
    if kind.kind == "enum":
        return [_number(_symbols(column, kind, path))]
    if kind.logical == "decimal":
        return _decimal(column, kind, path)
    if kind.kind == "fixed":
        return [_fixed(column, kind, path)]
    column = _cast(column, _target(kind), kind, path)
    if kind.kind == "boolean":
        return [varint.binary(column.to_numpy(zero_copy_only=False).astype(np.uint8), np.arange(len(column) + 1))]
    if kind.kind in ("float", "double"):
        data = np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
        return [varint.binary(data.view(np.uint8), np.arange(len(data) + 1) * data.itemsize)]
    if kind.kind in ("bytes", "string"):
        sizes = pc.binary_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        return [_number(sizes), column if types.is_binary(column.type) else column.view(pa.binary())]
    return [_number(_ints(column, kind))]


def _target(kind: Type) -> pa.DataType:
    """The Arrow type whose numbers are the encoded ones."""
    if kind.logical == "time-millis":
        return pa.time32("ms")
    if kind.logical in ("timestamp-millis", "local-timestamp-millis"):
        return pa.timestamp("ms", kind.arrow.tz)
    return kind.arrow


def _ints(column: pa.Array, kind: Type) -> Any:
    width = pa.int32() if column.type.bit_width == 32 else pa.int64()
    return column.view(width).to_numpy(zero_copy_only=False).astype(np.int64)


def _symbols(column: pa.Array, kind: Type, path: str) -> Any:
    found = pc.index_in(_cast(column, pa.string(), kind, path), pa.array(kind.symbols, pa.string()))
    if found.null_count:
        raise DataError(f"{found.null_count} values in {path} are no symbol of {kind.name}", hint="map them in the SQL")
    return found.to_numpy(zero_copy_only=False).astype(np.int64)


def _items(column: pa.Array, kind: Type, path: str) -> list[Any]:
    assert kind.items is not None
    is_list = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    if not (types.is_map(column.type) if kind.kind == "map" else is_list):
        raise _unfit(column.type, kind, path)
    if kind.kind == "map":
        offsets = column.offsets.to_numpy()
        first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        counts = np.diff(offsets).astype(np.int64)
        keys, values = column.keys.slice(first, size), column.items.slice(first, size)
        parts = [*_values(keys, Type("string"), f"a key of {path}"), *_parts(values, kind.items, path)]
    else:
        counts = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = column.flatten()
        size = len(flat)
        parts = _parts(flat, kind.items, path)
    edges = np.concatenate([[0], np.cumsum(counts)])
    items = _joined(parts, size) if size else pa.array([], pa.binary())
    places = _edges(items) if len(items) else np.zeros(1, np.int64)
    buffer = items.buffers()[2] if len(items) else None
    # The items of a row stand one after the other already: only the edges between rows are new.
    whole = varint.binary(np.frombuffer(buffer or b"", np.uint8), places[edges])
    end = np.where(counts > 0, 0, -1)
    blocks = _spread(pa.array([b"\0"] * int((end == 0).sum()), pa.binary()), end == 0)
    return [_number(counts), whole, blocks]


def _decimal(column: pa.Array, kind: Type, path: str) -> list[Any]:
    if kind.kind == "bytes":
        table, sizes = _digits(_cast(column, kind.arrow, kind, path))
        is_used = np.arange(table.shape[1]) >= table.shape[1] - sizes[:, None]
        digits = varint.binary(table[is_used], np.concatenate([[0], np.cumsum(sizes)]))
        return [_number(sizes), digits]
    return [_fixed(column, kind, path)]


def _digits(column: pa.Array) -> tuple[Any, Any]:
    """Big-endian bytes of each number, right-justified, and how many are needed: the fewest."""
    width = column.type.bit_width // 8
    data = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
    table = np.ascontiguousarray(data.reshape(len(column), width)[:, ::-1])
    sign = np.where(table[:, :1] >= 0x80, 0xFF, 0).astype(np.uint8)
    is_sign = table == sign
    is_sign[:, -1] = False
    leading = is_sign.argmin(axis=1)
    first = table[np.arange(len(column)), leading]
    needs_more = (first ^ sign[:, 0]) >= 0x80  # its high bit would be taken for the sign
    return table, width - leading + (needs_more & (leading > 0))


def _fixed(column: pa.Array, kind: Type, path: str) -> pa.Array:
    size = kind.size
    if kind.logical == "decimal":
        table, sizes = _digits(_cast(column, kind.arrow, kind, path))
        if (sizes > size).any():
            raise DataError(f"a number in {path} that needs more than {size} bytes", hint="widen the fixed type")
        wide = np.repeat(np.where(table[:, :1] >= 0x80, 0xFF, 0).astype(np.uint8), max(size, 1), axis=1)[:, :size]
        used = min(size, table.shape[1])
        wide[:, size - used :] = table[:, table.shape[1] - used :]
        return varint.binary(np.ascontiguousarray(wide).reshape(-1), np.arange(len(column) + 1) * size)
    if kind.logical == "duration" and types.is_struct(column.type):
        parts = _cast(column, DURATION, kind, path).flatten()
        numbers = np.stack([each.to_numpy(zero_copy_only=False) for each in parts], axis=1)
        if ((numbers < 0) | (numbers >= 1 << 32)).any():
            raise DataError(f"a duration in {path} below zero or beyond 32 bits", hint="Avro's durations are unsigned")
        return varint.binary(numbers.astype("<u4").view(np.uint8).reshape(-1), np.arange(len(column) + 1) * 12)
    if kind.logical == "uuid" and types.is_string(column.type):
        hexes = pc.replace_substring(column, "-", "")
        if pc.any(pc.invert(pc.match_substring_regex(hexes, "^[0-9a-fA-F]{32}$"))).as_py():
            raise DataError(f"text in {path} that is no UUID", hint="write 32 hexadecimal digits")
        data = bytes.fromhex("".join(hexes.to_pylist()))
        return varint.binary(np.frombuffer(data, np.uint8), np.arange(len(column) + 1) * 16)
    column = _cast(column, pa.binary(), kind, path)
    if pc.any(pc.not_equal(pc.binary_length(column), size)).as_py():
        raise DataError(f"values in {path} that have not {size} bytes", hint=f"the Avro type {kind.name} has {size}")
    return column


def _cast(column: pa.Array, target: pa.DataType, kind: Type, path: str) -> pa.Array:
    if column.type == target:
        return column
    is_number = types.is_integer(column.type) or types.is_floating(column.type) or types.is_decimal(column.type)
    wants_text = types.is_string(target) and kind.kind in ("string", "enum")
    if (
        (wants_text and not _is_text(column.type))
        or (not wants_text and _is_text(column.type))
        or (
            types.is_timestamp(target)
            and not (types.is_timestamp(column.type) and bool(column.type.tz) == bool(target.tz))
        )
    ):
        raise _unfit(column.type, kind, path)
    if types.is_boolean(target) or (is_number and types.is_temporal(target)):
        raise _unfit(column.type, kind, path)
    try:
        # A moment loses what is below the millisecond if the schema says so; nothing else is rounded.
        return column.cast(target, safe=not types.is_temporal(target))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if isinstance(error, pa.ArrowNotImplementedError):
            raise _unfit(column.type, kind, path) from error
        raise DataError(
            f"values in {path} that are no {kind}", hint="widen the Avro type, or cast in the SQL"
        ) from error


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _unfit(column: pa.DataType, kind: Type, path: str) -> SchemaError:
    return SchemaError(
        f"the column {path} is {column}, which the Avro type {kind} cannot hold",
        hint="cast the column in the route's SQL, or change the schema",
    )


def _number(values: Any) -> pa.Array:
    return varint.write(varint.zigzag(values.astype(np.int64, copy=False)))


def _varint(value: int) -> bytes:
    found: bytes = _number(np.array([value]))[0].as_py()
    return found
