"""Arrow's columns as PostgreSQL takes them: the types that tables get, and how a value is staged and read back by SQL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.connectors.postgresql.types import (
    BOOL,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    NUMERIC,
    ORIGIN,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNIX_EPOCH_DAYS,
    UNIX_EPOCH_US,
)
from penstock.errors import DataError, SchemaError, reason_of
from penstock.sink import Topic

_TIME, _INTERVAL, _NUMERIC = "pg_catalog.time", "pg_catalog.interval", "pg_catalog.numeric"

_DECIMAL_DIGITS = 38

_NAME_BYTES = 63
_SYSTEM_COLUMNS = frozenset({"ctid", "tableoid", "xmin", "cmin", "xmax", "cmax"})

Mask: TypeAlias = npt.NDArray[np.bool_]
Numbers: TypeAlias = npt.NDArray[Any]


def plain(topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
    """
    The batch in the types that PostgreSQL's own columns are read as, without loss.

    Columns of type null are left out until they have a value: there is no telling what they will be. So are columns
    without a value that no table can have, since one message is enough to have them in all rows that follow.
    """
    fields, columns = [], []
    for field, values in zip(batch.schema, batch.columns, strict=True):
        if types.is_null(field.type):
            continue
        if values.null_count == len(values) and not can_hold(topic, field):
            continue
        if not _is_name(field.name):
            raise _no_name(topic, field.name)
        try:
            values, origin = _plain(topic, field.name, values)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"a value of the column {field.name!r} of {topic} does not fit: it is {field.type}",
                hint="cast it in the route's SQL to a type that PostgreSQL has",
            ) from error
        _refuse_nul(topic, field.name, values)
        metadata = {ORIGIN: json.dumps([origin]).encode()} if origin else field.metadata
        fields.append(pa.field(field.name, values.type, metadata=metadata))
        columns.append(values)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


def refuse(topic: Topic, field: pa.Field) -> None:
    """Refuse a column that no table can have."""
    if not _is_name(field.name):
        raise _no_name(topic, field.name)
    _plain(topic, field.name, pa.nulls(0, field.type))


def _no_name(topic: Topic, name: str) -> SchemaError:
    return SchemaError(
        f"no column of PostgreSQL can have the name {name!r}, as one of {topic} has",
        code="PEN-4002",
        hint="rename it in the route's SQL; names have 1 to 63 bytes, and those of system columns are taken",
    )


def can_hold(topic: Topic, field: pa.Field) -> bool:
    """True if a table can have a column of this name and type."""
    try:
        refuse(topic, field)
    except SchemaError:
        return False
    return True


def _is_name(name: str) -> bool:
    return 0 < len(name.encode()) <= _NAME_BYTES and "\0" not in name and name not in _SYSTEM_COLUMNS


def _refuse_nul(topic: Topic, name: str, values: pa.Array) -> None:
    """Text of PostgreSQL holds any character but NUL; the server would only say so when the rows are no longer at hand."""
    is_list = types.is_list(values.type)
    texts = pc.list_flatten(values) if is_list else values
    if not types.is_string(texts.type):
        return
    found = pc.indices_nonzero(pc.fill_null(pc.match_substring(texts, "\0"), False))
    if len(found):
        error = DataError(
            f"a value of the column {name!r} of {topic} holds a NUL character, which PostgreSQL has no place for",
            hint="remove it in the route's SQL, for example by replace(…, char(0), '')",
        )
        at = pc.list_parent_indices(values).take(found) if is_list else found
        error.rows = sorted(set(at.to_pylist()))
        raise error


def _plain(topic: Topic, name: str, values: pa.Array) -> tuple[pa.Array, tuple[str, int] | None]:
    """The values, and the PostgreSQL type that they are of if their own does not tell."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(topic, name, values.storage)
    if types.is_dictionary(kind):
        return _plain(topic, name, values.dictionary_decode())
    if types.is_time(kind):
        return values.cast(pa.time64("us")).cast(pa.string()), (_TIME, -1)
    if types.is_duration(kind):
        count = values.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())
        return pc.binary_join_element_wise(count, "microseconds", " "), (_INTERVAL, -1)
    if types.is_decimal(kind) and kind.precision > _DECIMAL_DIGITS:
        return values.cast(pa.string()), (_NUMERIC, ((kind.precision << 16) | kind.scale) + 4)
    return values.cast(_plain_type(topic, name, kind)), None


def _plain_type(topic: Topic, name: str, kind: pa.DataType) -> pa.DataType:
    if types.is_decimal(kind) and kind.precision <= _DECIMAL_DIGITS:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if not types.is_nested(kind.value_type):
            return pa.list_(_plain_type(topic, name, kind.value_type))
    else:
        for is_kind, stored in _PLAIN:
            if is_kind(kind):
                return stored
    raise SchemaError(
        f"the column {name!r} of {topic} is {kind}, which a column of PostgreSQL cannot hold",
        code="PEN-4002",
        hint="make it text in the route's SQL, for example by to_json",
    )


_PLAIN = [
    (types.is_boolean, pa.bool_()),
    (types.is_int8, pa.int16()),
    (types.is_uint8, pa.int16()),
    (types.is_int16, pa.int16()),
    (types.is_uint16, pa.int32()),
    (types.is_int32, pa.int32()),
    (types.is_uint32, pa.int64()),
    (types.is_int64, pa.int64()),
    (types.is_uint64, pa.decimal128(20, 0)),
    (types.is_float16, pa.float32()),
    (types.is_float32, pa.float32()),
    (types.is_float64, pa.float64()),
    (types.is_date, pa.date32()),
    (types.is_string, pa.string()),
    (types.is_large_string, pa.string()),
    (types.is_string_view, pa.string()),
    (types.is_binary, pa.binary()),
    (types.is_large_binary, pa.binary()),
    (types.is_binary_view, pa.binary()),
    (types.is_fixed_size_binary, pa.binary()),
]

_SQL = {
    pa.bool_(): "bool",
    pa.int16(): "int2",
    pa.int32(): "int4",
    pa.int64(): "int8",
    pa.float32(): "float4",
    pa.float64(): "float8",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", "UTC"): "timestamptz",
}


def sql_type(kind: pa.DataType) -> str:
    """The PostgreSQL type of a plain Arrow type."""
    if types.is_list(kind):
        return f"{sql_type(kind.value_type)}[]"
    return f"numeric({kind.precision}, {kind.scale})" if types.is_decimal(kind) else _SQL[kind]


def origin(field: pa.Field) -> list[tuple[str, int]]:
    """The PostgreSQL types that a field's values are of, by name and modifier: the first that is known serves."""
    return [(name, typmod) for name, typmod in json.loads((field.metadata or {}).get(ORIGIN, b"[]"))]


# -- staging ---------------------------------------------------------------------------------------------------------

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""What a binary COPY begins with."""
TRAILER = b"\xff\xff"


def staged_type(kind: pa.DataType) -> str:
    """The type of the column in a staging table."""
    if types.is_list(kind):
        return f"{staged_type(kind.value_type)}[]"
    return ("numeric" if _in_groups(kind) else "text") if types.is_decimal(kind) else _SQL[kind]


def copied(columns: Sequence[pa.Array], topic: Topic) -> memoryview:
    """
    Rows as a binary COPY takes them, between its header and its trailer; no step is per row in Python.

    Every value becomes its length and its bytes, in arrays of bytes that Arrow then joins row by row.
    """
    rows = len(columns[0])
    pieces = [_fixed(np.full((rows, 1), len(columns), ">i2"))]
    try:
        for values in columns:
            pieces += _pieces(values)
    except pa.ArrowInvalid as error:
        raise DataError(f"a value of {topic} does not fit into PostgreSQL's type: {reason_of(error)}") from error
    _, offsets, data = pc.binary_join_element_wise(*pieces, b"").buffers()
    return memoryview(data)[: np.frombuffer(offsets, np.int32)[rows]]


def _pieces(values: pa.Array) -> list[pa.Array]:
    """For each value its length, -1 for null, and its bytes."""
    kind = values.type
    if types.is_list(kind):
        return _list_pieces(values)
    if types.is_decimal(kind) and not _in_groups(kind):
        return _pieces(values.cast(pa.string()))
    missing = pc.is_null(values).to_numpy(zero_copy_only=False)
    if types.is_string(kind) or types.is_binary(kind):
        content = values.cast(pa.binary())
        lengths = pc.fill_null(pc.binary_length(content), -1).to_numpy(zero_copy_only=False)
        return [_fixed(lengths.astype(">i4")[:, None]), pc.fill_null(content, b"")]
    numbers = _numbers(values, missing)
    width = numbers.itemsize * numbers.shape[1]
    if not missing.any():
        whole = np.empty((len(values), 4 + width), np.uint8)
        whole[:, :4] = np.frombuffer(np.array(width, ">i4").tobytes(), np.uint8)
        whole[:, 4:] = numbers.view(np.uint8).reshape(len(values), width)
        return [_fixed(whole)]
    lengths = np.where(missing, -1, width)
    offsets = np.concatenate(([0], np.cumsum(np.where(missing, 0, width)))).astype(np.int32)
    content = pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(numbers[~missing]))]
    )
    return [_fixed(lengths.astype(">i4")[:, None]), content]


def _numbers(values: pa.Array, missing: Mask) -> Numbers:
    """Values of a fixed width as PostgreSQL writes them, one row each; nulls hold any value."""
    kind = values.type
    if types.is_decimal(kind):
        return _groups(values)
    if types.is_date(kind) or types.is_timestamp(kind):
        return _moments(values, missing)
    filled = pc.fill_null(values, False if types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False)
    return np.asarray(filled.astype(_NUMBERS[kind]))[:, None]


_NUMBERS = {
    pa.bool_(): "u1", pa.int16(): ">i2", pa.int32(): ">i4", pa.int64(): ">i8", pa.float32(): ">f4", pa.float64(): ">f8",
}  # fmt: skip


def _moments(values: pa.Array, missing: Mask) -> Numbers:
    """Days or microseconds since 2000; the far ends of Arrow's type are the infinities."""
    is_date = types.is_date(values.type)
    number, shift = (np.int32, UNIX_EPOCH_DAYS) if is_date else (np.int64, UNIX_EPOCH_US)
    raw = pc.fill_null(values.view(pa.int32() if is_date else pa.int64()), 0).to_numpy(zero_copy_only=False)
    ends = np.iinfo(number)
    above, below = raw == ends.max, raw <= -ends.max
    early = (raw < ends.min + shift) & ~below & ~missing
    if early.any():
        raise pa.ArrowInvalid("a time is earlier than the earliest of PostgreSQL")
    with np.errstate(over="ignore"):
        moved = raw - number(shift)
    moved = np.where(above, ends.max, np.where(below, ends.min, moved))
    return np.asarray(moved.astype(">i4" if is_date else ">i8"))[:, None]


def _in_groups(kind: pa.DataType) -> bool:
    """True for decimals that are staged as such: four digits to a group, before and after the point, within 64 bits."""
    return bool(0 <= kind.scale <= kind.precision <= 16)


def _groups(values: pa.Array) -> Numbers:
    """Decimals as numeric's binary form: how many groups of four digits, the first one's weight, the sign, the scale."""
    kind = values.type
    low = np.frombuffer(values.buffers()[1], np.int64)[0::2][values.offset : values.offset + len(values)]
    whole, part = np.divmod(np.abs(low), 10**kind.scale)
    before, behind = -(-(kind.precision - kind.scale) // 4), -(-kind.scale // 4)
    part = part * 10 ** (behind * 4 - kind.scale)
    found = np.empty((len(values), 4 + before + behind), ">i2")
    found[:, 0], found[:, 1], found[:, 2], found[:, 3] = (
        before + behind,
        before - 1,
        np.where(low < 0, 0x4000, 0),
        kind.scale,
    )
    for group in range(before):
        found[:, 4 + group] = whole // 10 ** (4 * (before - 1 - group)) % 10_000
    for group in range(behind):
        found[:, 4 + before + group] = part // 10 ** (4 * (behind - 1 - group)) % 10_000
    return found


def _list_pieces(values: pa.Array) -> list[pa.Array]:
    """Arrays of one dimension: a header, and the elements as values of their own."""
    missing = pc.is_null(values).to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    elements = values.flatten()
    each = pc.binary_join_element_wise(*_pieces(elements), b"") if len(elements) else pa.array([], pa.binary())
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    body = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), each), b"")
    empty = lengths == 0
    heads = np.empty((len(values), 5), ">i4")
    heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3], heads[:, 4] = ~empty, 0, _oid(elements.type), lengths, 1
    kept = np.where(missing, 0, np.where(empty, 12, 20))
    mask = np.arange(20)[None, :] < kept[:, None]
    head_offsets = np.concatenate(([0], np.cumsum(kept))).astype(np.int32)
    head_bytes = np.ascontiguousarray(heads).view(np.uint8).reshape(len(values), 20)[mask]
    head = pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(head_offsets), pa.py_buffer(np.ascontiguousarray(head_bytes))]
    )
    total = np.where(missing, -1, kept + pc.binary_length(body).to_numpy(zero_copy_only=False))
    return [_fixed(total.astype(">i4")[:, None]), head, body]


def _oid(kind: pa.DataType) -> int:
    if types.is_decimal(kind):
        return NUMERIC if _in_groups(kind) else TEXT
    return _OIDS[kind]


_OIDS = {
    pa.bool_(): BOOL, pa.int16(): INT2, pa.int32(): INT4, pa.int64(): INT8, pa.float32(): FLOAT4, pa.float64(): FLOAT8,
    pa.string(): TEXT, pa.binary(): BYTEA, pa.date32(): DATE, pa.timestamp("us"): TIMESTAMP,
    pa.timestamp("us", "UTC"): TIMESTAMPTZ,
}  # fmt: skip


def _fixed(table: Numbers) -> pa.Array:
    """The rows of a table of numbers as an array of bytes."""
    width = table.itemsize * table.shape[1]
    offsets = np.arange(0, (len(table) + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(table), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(table))]
    )


def longest(values: pa.Array) -> int:
    """The most characters that a text has."""
    if types.is_list(values.type):
        values = values.flatten()
    return int(pc.max(pc.utf8_length(values)).as_py() or 0)


def picked(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """Some columns of a schema."""
    return pa.schema([schema.field(name) for name in names])
