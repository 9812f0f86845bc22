"""Arrow's types and Delta's, and the statistics of a file in Delta's log."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from penstock import durable
from penstock.changes import own_columns
from penstock.connectors.delta.config import DeltaConfig
from penstock.connectors.lake.staging import ParquetPart
from penstock.connectors.lake.types import COMMON, LakeTypes, has_all
from penstock.connectors.upsert import DELETED, refuse_own_mark
from penstock.errors import SchemaError
from penstock.schema.evolution import Policy, becomes_double, follow, refusal, widens
from penstock.sink import Topic
from penstock.store import Place

STATS_COLUMNS = 32
"""Columns with statistics in the log; Delta's own default."""

MARK = pa.field(DELETED, pa.bool_())
"""Marks deleted rows, for `soft_delete`. Null, as in rows from before the option was set: not deleted."""

_BOUND_CHARS = 32
_LAST_CHAR = "\U0010ffff"

_DECIMAL = f"{uuid4().hex}:"  # no text in a column begins so
_LITERAL = re.compile(f'"{_DECIMAL}([^"]*)"')
"""Python's JSON has no decimals: they are written as texts and then replaced by the numbers that readers expect."""


class StatsPart(ParquetPart):
    """A Parquet file, and its statistics for Delta's log."""

    def __init__(self, path: Place, schema: pa.Schema, compression: str, **options: Any) -> None:
        super().__init__(path, schema, compression, **options)
        self._schema = schema
        self._with_nan: set[str] = set()

    def write(self, table: pa.Table) -> None:
        super().write(table)
        for column in table.schema:
            # To Delta's readers NaN is above all numbers; Parquet's bounds leave it out.
            if types.is_floating(column.type) and pc.any(pc.is_nan(table.column(column.name))).as_py():
                self._with_nan.add(column.name)

    def close(self) -> str | None:
        super().close()
        return _stats(self.metadata[0], self._schema, self._with_nan)


TYPES = LakeTypes(
    "Delta",
    (
        (types.is_signed_integer, None),
        (types.is_uint8, pa.int16()),
        (types.is_uint16, pa.int32()),
        (types.is_uint32, pa.int64()),
        (types.is_fixed_size_binary, pa.binary()),
        *COMMON,
    ),
)


def delta_schema(topic: Topic, schema: pa.Schema) -> pa.Schema:
    return TYPES.schema(topic, schema)


def without_twins(batch: pa.RecordBatch, stored: Callable[[], pa.Schema | None]) -> pa.RecordBatch:
    """
    The rows without columns and fields that the table lacks, that have no value in them, and whose name differs from another
    one's in case only.

    One message is enough to have such a column in all rows that follow; only those with a value in it are refused.
    """
    nested = [each.name for each in batch.schema if _nests_twins(each.type)]
    gone = [name for name in _twins(batch.schema.names) if batch.column(name).null_count == batch.num_rows]
    if not gone and not nested:
        return batch
    known = stored() or pa.schema([])
    for name in nested:
        place, like = batch.schema.get_field_index(name), known.field(name).type if name in known.names else pa.null()
        values = _without_nested_twins(batch.column(name), like)
        if types.is_null(values.type):  # no row has a value in what is left
            values = pa.nulls(batch.num_rows, like)
            gone.append(name)
        batch = batch.set_column(place, batch.schema.field(name).with_type(values.type), values)
    return batch.drop_columns([name for name in gone if name not in known.names])


def _without_nested_twins(values: pa.Array, known: pa.DataType) -> pa.Array:
    if types.is_list(values.type) or types.is_large_list(values.type):
        inner = _without_nested_twins(pc.list_flatten(values), known.value_type if types.is_list(known) else pa.null())
        if types.is_null(inner.type):
            return pa.nulls(len(values))
        ends = np.cumsum(pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False))
        return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), inner, mask=values.is_null())
    if not types.is_struct(values.type):
        return values
    names = [each.name for each in values.type]
    stored = {each.name: each.type for each in known} if types.is_struct(known) else {}
    fields = dict(zip(names, values.flatten(), strict=True))
    for name in _twins(names).difference(stored):
        if fields[name].null_count == len(values):
            del fields[name]
    fields = {name: _without_nested_twins(each, stored.get(name, pa.null())) for name, each in fields.items()}
    fields = {
        name: pa.nulls(len(values), stored[name]) if name in stored and types.is_null(each.type) else each
        for name, each in fields.items()
        if name in stored or not types.is_null(each.type)
    }
    if not fields:  # no file holds a struct without fields
        return pa.nulls(len(values))
    return pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=values.is_null())


def new_columns(old: pa.Schema, new: pa.Schema) -> pa.Schema:
    """
    What rows come with, but for new columns and fields whose name differs from another one's in case only.

    Nor structs in which nothing is left: a row brings them once it has a value that the table can have.
    """
    twins = _twins([*dict.fromkeys([*old.names, *new.names])]).difference(old.names)
    kept = [
        each.with_type(_new_fields(old.field(each.name).type if each.name in old.names else None, each.type))
        for each in new
        if each.name not in twins
    ]
    return pa.schema([each for each in kept if not _is_hollow(each.type)])


def _new_fields(old: pa.DataType | None, new: pa.DataType) -> pa.DataType:
    if types.is_list(new):
        return pa.list_(
            new.value_field.with_type(
                _new_fields(old.value_type if old and types.is_list(old) else None, new.value_type)
            )
        )
    if not types.is_struct(new):
        return new
    before = pa.schema(list(old) if old is not None and types.is_struct(old) else [])
    return pa.struct(list(new_columns(before, pa.schema(list(new)))))


def _is_hollow(kind: pa.DataType) -> bool:
    """True for a struct without fields, and for lists of it."""
    return (types.is_struct(kind) and not kind.num_fields) or (types.is_list(kind) and _is_hollow(kind.value_type))


def _nests_twins(kind: pa.DataType) -> bool:
    if types.is_struct(kind):
        return bool(_twins([each.name for each in kind])) or any(_nests_twins(each.type) for each in kind)
    return types.is_nested(kind) and any(_nests_twins(kind.field(place).type) for place in range(kind.num_fields))


def _twins(names: Sequence[str]) -> set[str]:
    counts = Counter(name.lower() for name in names)
    return {name for name in names if counts[name.lower()] > 1}


def can_widen(old: pa.DataType, new: pa.DataType) -> bool:
    """
    True for types that every reader of Parquet widens in a file: numbers, dates to midnights, and structs by fields.

    And for whole numbers that become doubles: no reader widens those, so the files are written again.
    """
    if types.is_nested(old):
        return has_all(old, new)
    if becomes_double(old, new):
        return True
    return widens(old, new) and (types.is_primitive(old) or types.is_decimal(old)) and not types.is_boolean(old)


def follow_rows(
    topic: Topic, config: DeltaConfig, columns: pa.Schema, rows: pa.Schema, policy: Policy = Policy.EVOLVE
) -> pa.Schema:
    """The table's columns once rows with the columns `rows` are in it; refuses rows that it could not follow."""
    refuse_own_mark(config, topic, rows.names)
    wider = follow(topic, columns, rows, policy, can_widen)
    for name in config.partition_by:
        if name in columns.names and wider.field(name).type != columns.field(name).type:
            # Its values are in paths and in the log, as texts of the old type.
            raise refusal(topic, name, columns.field(name).type, wider.field(name).type, policy, is_wider=True)
    refuse_twins(topic, list(wider))
    return wider


def refuse_twins(topic: Topic, fields: Sequence[pa.Field], above: str = "") -> None:
    """Refuse columns, and fields of structs at any depth, whose names differ in case only, or hold a NUL character."""
    folded: dict[str, str] = {}
    for each in fields:
        path = f"{above}{each.name}"
        if "\0" in each.name:
            raise SchemaError(
                f"the name of the column {path!r} of {topic} holds a NUL character, which is lost on the way to Delta",
                code="PEN-4001",
                hint="rename the column in the route's SQL",
            )
        if folded.setdefault(path.lower(), path) != path:
            raise SchemaError(
                f"the columns {folded[path.lower()]!r} and {path!r} of {topic} differ in case only",
                code="PEN-4001",
                hint="Delta does not tell them apart: rename one in the route's SQL",
            )
        if types.is_nested(each.type):
            inner = [each.type.field(place) for place in range(each.type.num_fields)]
            refuse_twins(topic, inner, f"{path}.")


def stored_columns(config: DeltaConfig, schema: pa.Schema) -> pa.Schema:
    """The columns of a topic that its table has: for `upsert` without those that describe the change."""
    if not config.upserts:
        return schema
    return pa.schema([schema.field(name).remove_metadata() for name in own_columns(schema)])


def refuse_partitions(topic: Topic, config: DeltaConfig, partition_by: Sequence[str]) -> None:
    """The table must be partitioned as the sink's options say."""
    if list(partition_by) != list(config.partition_by):
        raise SchemaError(
            f"the table of {topic} is partitioned by {list(partition_by)}, not by {list(config.partition_by)}",
            code="PEN-4002",
            hint=f"set partition_by = {json.dumps(list(partition_by))}",
        )


def has_empty_text(column: pa.Array) -> bool:
    return bool(types.is_string(column.type) and pc.any(pc.equal(column, "")).as_py())


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
            continue  # Python cannot represent such a time
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
