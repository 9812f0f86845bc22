"""Arrow's columns as PostgreSQL takes them: the types that tables get, and how a value is staged and read back by SQL."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.connectors.postgres_cdc.types import ORIGIN
from penstock.errors import DataError, SchemaError
from penstock.sink import Topic

_TIME, _INTERVAL, _NUMERIC = "pg_catalog.time", "pg_catalog.interval", "pg_catalog.numeric"

_DECIMAL_DIGITS = 38

_ENDS = {pa.int32(): 2**31 - 1, pa.int64(): 2**63 - 1}
"""What stands for infinity in a column of dates or timestamps, and its negative for the other end."""


def plain(topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
    """
    The batch in the types that PostgreSQL's own columns are read as, without loss.

    Columns of type null are left out until they have a value: there is no telling what they will be.
    """
    fields, columns = [], []
    for field, values in zip(batch.schema, batch.columns, strict=True):
        if types.is_null(field.type):
            continue
        try:
            values, origin = _plain(topic, field.name, values)
        except pa.ArrowInvalid as error:
            raise DataError(f"a value of the column {field.name!r} of {topic} has no place: {error}") from error
        metadata = {ORIGIN: json.dumps([origin]).encode()} if origin else field.metadata
        fields.append(pa.field(field.name, values.type, metadata=metadata))
        columns.append(values)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


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


def counted(rows: pa.RecordBatch) -> list[str]:
    """Columns of dates and timestamps that hold an infinity: they are staged as the numbers they are."""
    return [
        field.name for field, values in zip(rows.schema, rows.columns, strict=True) if _has_infinity(field.type, values)
    ]


def _has_infinity(kind: pa.DataType, values: pa.Array) -> bool:
    if types.is_list(kind):
        return _has_infinity(kind.value_type, values.flatten())
    if not (types.is_date(kind) or types.is_timestamp(kind)):
        return False
    bounds = pc.min_max(values.view(_number(kind)))
    low, high, end = bounds["min"].as_py(), bounds["max"].as_py(), _ENDS[_number(kind)]
    return low is not None and (low <= -end or high >= end)


def _number(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if types.is_date(kind) else pa.int64()


def as_counted(values: pa.Array) -> pa.Array:
    """Dates or timestamps, or lists of them, as numbers."""
    if not types.is_list(values.type):
        return values.view(_number(values.type))
    number = _number(values.type.value_type)
    # Not `flatten`, which leaves out what stands below nulls and moves what comes behind them.
    return pa.ListArray.from_buffers(
        pa.list_(number), len(values), values.buffers()[:2], offset=values.offset, children=[values.values.view(number)]
    )


def staged_type(kind: pa.DataType, is_counted: bool) -> str:
    """The type of the column in a staging table."""
    if is_counted:
        return f"{_SQL[_number(kind.value_type)]}[]" if types.is_list(kind) else _SQL[_number(kind)]
    if types.is_list(kind):
        return f"{staged_type(kind.value_type, False)}[]"
    return "numeric" if types.is_decimal(kind) else _SQL[kind]


def value(name: str, kind: pa.DataType, is_counted: bool) -> str:
    """The SQL that makes of a staged column, or an expression, what was staged in it."""
    if not is_counted:
        return name
    if types.is_list(kind):
        each = f"SELECT {_moment('x', kind.value_type)} FROM unnest({name}) WITH ORDINALITY AS u(x, at) ORDER BY at"
        return f"CASE WHEN {name} IS NOT NULL THEN ARRAY({each}) END"
    return _moment(name, kind)


def _moment(name: str, kind: pa.DataType) -> str:
    end, sql = _ENDS[_number(kind)], _SQL[kind]
    if types.is_date(kind):
        finite = f"date '1970-01-01' + {name}"
    else:  # an interval of days and one of microseconds: a single one would be counted in floating point
        zone = "+00" if kind.tz else ""
        finite = (
            f"{sql} '1970-01-01 00:00:00{zone}' + ({name} / 86400000000) * interval '1 day' "
            f"+ ({name} % 86400000000) * interval '1 microsecond'"
        )
    return f"CASE {name} WHEN {end} THEN {sql} 'infinity' WHEN -{end} THEN {sql} '-infinity' ELSE {finite} END"


def longest(values: pa.Array) -> int:
    """The most characters that a text has."""
    if types.is_list(values.type):
        values = values.flatten()
    return int(pc.max(pc.utf8_length(values)).as_py() or 0)
