"""Arrow's types and Delta's, and the statistics that Delta's log holds of a file."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from penstock import durable
from penstock.connectors.lake.staging import ParquetPart
from penstock.errors import DataError, SchemaError
from penstock.sink import Topic

STATS_COLUMNS = 32
"""Columns with statistics in the log, as Delta's own default is."""

_BOUND_CHARS = 32
_LAST_CHAR = "\U0010ffff"

_DECIMAL = f"{uuid4().hex}:"  # what no text in a column begins with
_LITERAL = re.compile(f'"{_DECIMAL}([^"]*)"')
"""JSON of Python has no decimals: they are written as texts, and then made the numbers that readers want."""


class StatsPart(ParquetPart):
    """A Parquet file with the statistics that Delta's log holds of it."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str, **options: Any) -> None:
        super().__init__(path, schema, compression, **options)
        self._schema = schema
        self._with_nan: set[str] = set()

    def write(self, table: pa.Table) -> None:
        super().write(table)
        for column in table.schema:
            # NaN is above all numbers to Delta's readers and unknown to Parquet's bounds.
            if types.is_floating(column.type) and pc.any(pc.is_nan(table.column(column.name))).as_py():
                self._with_nan.add(column.name)

    def close(self) -> str | None:
        super().close()
        return _stats(self.metadata[0], self._schema, self._with_nan)


def has_empty_text(column: pa.Array) -> bool:
    return bool(types.is_string(column.type) and pc.any(pc.equal(column, "")).as_py())


def as_delta(topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch in types that Delta has, without loss; columns of type null are left out until they have a value."""
    nulls = [column.name for column in batch.schema if types.is_null(column.type)]
    batch = batch.drop_columns(nulls) if nulls else batch
    schema = delta_schema(topic, batch.schema)
    try:
        return batch.cast(schema) if batch.schema != schema else batch.replace_schema_metadata(None)
    except pa.ArrowInvalid as error:
        raise DataError(f"a value of {topic} does not fit its column in Delta: {error}") from error


def delta_schema(topic: Topic, schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(column.name, _delta_type(topic, column.name, column.type)) for column in schema])


def _delta_type(topic: Topic, name: str, kind: pa.DataType) -> pa.DataType:
    """The Delta type that holds every value of `kind`."""
    if isinstance(kind, pa.BaseExtensionType):
        return _delta_type(topic, name, kind.storage_type)
    if types.is_dictionary(kind):
        return _delta_type(topic, name, kind.value_type)
    if types.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if types.is_decimal(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", _delta_type(topic, name, kind.value_type)))
    if types.is_map(kind):
        return pa.map_(_delta_type(topic, name, kind.key_type), _delta_type(topic, name, kind.item_type))
    if types.is_struct(kind):
        inner = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([pa.field(each.name, _delta_type(topic, f"{name}.{each.name}", each.type)) for each in inner])
    for is_kind, stored in _STORED:
        if is_kind(kind):
            return stored or kind
    raise SchemaError(
        f"the column {name!r} of {topic} is {kind}, which Delta cannot hold without loss",
        code="PEN-4002",
        hint="cast it in the route's SQL",
    )


_STORED: list[tuple[Any, pa.DataType | None]] = [
    (types.is_boolean, None),
    (types.is_signed_integer, None),
    (types.is_uint8, pa.int16()),
    (types.is_uint16, pa.int32()),
    (types.is_uint32, pa.int64()),
    (types.is_float16, pa.float32()),
    (types.is_floating, None),
    (types.is_date, pa.date32()),
    (types.is_string, None),
    (types.is_large_string, pa.string()),
    (types.is_string_view, pa.string()),
    (types.is_binary, None),
    (types.is_large_binary, pa.binary()),
    (types.is_binary_view, pa.binary()),
    (types.is_fixed_size_binary, pa.binary()),
]
"""Delta's type for each simple type of Arrow; None: the same."""


def _stats(metadata: pq.FileMetaData, schema: pa.Schema, with_nan: set[str]) -> str:
    """Rows, nulls and bounds of the first columns, for readers that skip files."""
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    positions = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    for column in list(schema)[:STATS_COLUMNS]:
        position = positions.get(column.name)
        if position is None:
            continue  # nested
        found = [group.column(position).statistics for group in groups]
        if any(each is None or not each.has_null_count for each in found):
            continue
        nulls[column.name] = sum(each.null_count for each in found)
        filled = [each for each, group in zip(found, groups, strict=True) if each.null_count < group.num_rows]
        if not filled or column.name in with_nan or not all(each.has_min_max for each in filled):
            continue
        try:
            bounds = _bounds(min(each.min for each in filled), max(each.max for each in filled))
        except (OverflowError, ValueError):
            continue  # a time that Python has not
        if bounds is not None:
            lows[column.name], highs[column.name] = bounds
    stats = {"numRecords": metadata.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}
    return _LITERAL.sub(r"\1", durable.canonical(stats))


def _bounds(low: Any, high: Any) -> tuple[Any, Any] | None:
    """The two as JSON, rounded outwards; None for types without bounds in the log."""
    if isinstance(low, str):
        cut = high if len(high) <= _BOUND_CHARS else high[:_BOUND_CHARS] + _LAST_CHAR
        return low[:_BOUND_CHARS], cut if cut >= high else high
    if isinstance(low, Decimal):
        return f"{_DECIMAL}{low:f}", f"{_DECIMAL}{high:f}"
    if isinstance(low, datetime.datetime):
        up = datetime.timedelta(microseconds=-high.microsecond % 1000)
        zone = "Z" if low.tzinfo else ""
        low, high = (each.replace(tzinfo=None).isoformat("T", "milliseconds") + zone for each in (low, high + up))
        return low, high
    if isinstance(low, datetime.date):
        return low.isoformat(), high.isoformat()
    if isinstance(low, int | float) and abs(low) != float("inf") != abs(high):
        return low, high
    return None
