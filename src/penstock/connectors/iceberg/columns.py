"""Arrow's types and Iceberg's, the field ids that identify Iceberg's columns, and the statistics of a data file."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import types
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    pyarrow_to_schema,
    schema_to_pyarrow,
)
from pyiceberg.schema import Schema

from penstock import durable
from penstock.connectors.lake.staging import ParquetPart, StagedFile
from penstock.connectors.lake.types import COMMON, LakeTypes, has_all
from penstock.errors import SchemaError
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.schema.evolution import becomes_double
from penstock.sink import Topic
from penstock.store import Place

_ID = b"PARQUET:field_id"
_BOUNDS = ("lower_bounds", "upper_bounds")


@dataclass(frozen=True)
class Columns:
    """A table's columns with their field ids, and the last id that was ever given out in it."""

    schema: pa.Schema
    last_id: int = 0

    @classmethod
    def of(cls, topic: Topic, schema: Schema, last_id: int) -> Columns:
        """The columns of an Iceberg table."""
        stored = schema_to_pyarrow(schema)
        return cls(pa.schema([_same_ids(each, TYPES.type(topic, each.name, each.type)) for each in stored]), last_id)

    @classmethod
    def from_json(cls, text: str) -> Columns:
        stored = json.loads(text)
        return cls(unpack_schema(stored["columns"]), stored["last_id"])

    def to_json(self) -> str:
        return durable.canonical({"columns": pack_schema(self.schema), "last_id": self.last_id})

    def with_types(self, schema: pa.Schema) -> Columns:
        """
        These columns with the types of `schema`. Columns and fields that it adds or replaces get ids that follow the last one.

        The client gives the same ids to the columns of a new table, so that files fit it that were staged before it
        existed.
        """
        ids = itertools.count(self.last_id + 1)
        new = [each for each in schema if each.name not in self.schema.names]
        stored = {name: self.schema.field(name) for name in self.renewed(schema)}
        new += [each.with_nullable(stored[each.name].nullable) for each in schema if each.name in stored]
        fresh = {each.name: each for each in _with_fresh_ids(new, lambda: next(ids))}
        fields = [
            fresh.get(each.name) or _same_ids(self.schema.field(each.name), each.type, lambda: next(ids))
            for each in schema
        ]
        return Columns(pa.schema(fields), next(ids) - 1)

    def renewed(self, schema: pa.Schema) -> list[str]:
        """Columns that cannot be promoted to their new type: another column replaces each."""
        return [each.name for each in self.schema if each.name in schema.names and _is_renewed(each, schema)]

    def select(self, schema: pa.Schema) -> pa.Schema:
        """The schema with the ids that its columns have here."""
        return pa.schema([_same_ids(self.schema.field(each.name), each.type) for each in schema])

    def iceberg(self) -> Schema:
        return pyarrow_to_schema(self.schema)

    def required(self) -> list[str]:
        return [each.name for each in self.schema if not each.nullable]


class StatsPart(ParquetPart):
    """A Parquet file with field ids, and its statistics for the manifest."""

    def __init__(self, path: Place, schema: pa.Schema, compression: str) -> None:
        super().__init__(path, schema, compression, store_schema=False)
        self._schema = schema

    def close(self) -> str | None:
        super().close()
        try:
            found = self._statistics({})
        except (OverflowError, ValueError):  # Python cannot represent such a date or time, e.g. infinity
            found = self._statistics({"write.metadata.metrics.default": "counts"})
        found.update({name: {id: base64.b64encode(b).decode() for id, b in found[name].items()} for name in _BOUNDS})
        return durable.canonical({**found, "ids": dict(ids_of(self._schema))})

    def _statistics(self, properties: dict[str, str]) -> dict[str, Any]:
        schema = pyarrow_to_schema(self._schema)
        plan = compute_statistics_plan(schema, properties)
        found = data_file_statistics_from_parquet_metadata(self.metadata[0], plan, parquet_path_to_id_mapping(schema))
        return found.to_serialized_dict()


def read_stats(file: StagedFile) -> dict[str, Any]:
    """The statistics that `StatsPart` wrote, as the client takes them, and `ids`."""
    assert file.stats is not None
    stats: dict[str, Any] = json.loads(file.stats)
    for name, values in stats.items():
        if isinstance(values, dict) and name != "ids":
            stats[name] = {int(id): base64.b64decode(v) if name in _BOUNDS else v for id, v in values.items()}
    return stats


def ids_of(schema: pa.Schema | pa.DataType, above: str = "") -> Iterator[tuple[str, str]]:
    """The id of every column and every part of a column, by path; with the type if it is never promoted."""
    for field in _fields(schema):
        path, id = f"{above}{field.name}", field.metadata[_ID].decode()
        yield path, f"{id} {field.type}" if types.is_temporal(field.type) else id
        if types.is_nested(field.type):
            yield from ids_of(field.type, f"{path}\0")


TYPES = LakeTypes(
    "Iceberg",
    (
        (types.is_int64, None),
        (types.is_uint32, pa.int64()),
        (lambda kind: types.is_integer(kind) and not types.is_uint64(kind), pa.int32()),
        (lambda kind: types.is_time(kind) and kind.unit != "ns", pa.time64("us")),
        (types.is_fixed_size_binary, None),
        *COMMON,
    ),
)


def iceberg_schema(topic: Topic, schema: pa.Schema) -> pa.Schema:
    return TYPES.schema(topic, schema)


def widens(old: pa.DataType, new: pa.DataType) -> bool:
    """True when a column of type `old` can become one of `new`."""
    if types.is_decimal(old) and types.is_decimal(new):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    if types.is_nested(old):
        return has_all(old, new)
    return old == new or (old, new) in _WIDER or is_renewal(old, new)


def promotes(old: pa.DataType, new: pa.DataType) -> bool:
    """True when a column of type `old` can become one of `new` while its files stay as they are."""
    return widens(old, new) and not is_renewal(old, new)


def is_renewal(old: pa.DataType, new: pa.DataType) -> bool:
    """True for a wider type that the format has no promotion for: another column takes over, and files are written again."""
    return (old, new) == (pa.date32(), pa.timestamp("us")) or becomes_double(old, new)


_WIDER = ((pa.int32(), pa.int64()), (pa.float32(), pa.float64()))
"""Promotions of the format."""


def _is_renewed(column: pa.Field, schema: pa.Schema) -> bool:
    return is_renewal(column.type, schema.field(column.name).type)


def nests_structs(kind: pa.DataType, inside: bool = False) -> bool:
    """True if there are structs in lists or maps: the client reads null ones as empty ones."""
    if types.is_struct(kind) and inside:
        return True
    return any(nests_structs(each.type, inside or not types.is_struct(kind)) for each in _fields(kind))


def refuse_one_path(topic: Topic, columns: Columns) -> Columns:
    """The columns, unless a name with a dot reads like the path of another field: Iceberg finds fields by their paths."""
    if _has_dots(columns.schema):
        try:
            columns.iceberg()
        except ValueError as error:
            raise SchemaError(
                f"two fields of {topic} have one path in Iceberg, such as the column `a.b` and the field `b` of `a`: {error}",
                code="PEN-4001",
                hint="rename the column with the dot in the route's SQL",
            ) from error
    return columns


def _has_dots(kind: pa.Schema | pa.DataType) -> bool:
    return any("." in each.name or _has_dots(each.type) for each in _fields(kind))


def _fields(kind: pa.Schema | pa.DataType) -> list[pa.Field]:
    if isinstance(kind, pa.Schema):
        return list(kind)
    if types.is_map(kind):
        return [kind.key_field, kind.item_field]
    if types.is_struct(kind):
        return [kind.field(position) for position in range(kind.num_fields)]
    return [kind.value_field] if types.is_nested(kind) else []


def _with_fields(kind: pa.DataType, fields: list[pa.Field]) -> pa.DataType:
    if types.is_map(kind):
        return pa.map_(*fields)
    return pa.struct(fields) if types.is_struct(kind) else pa.list_(*fields)


def _with_fresh_ids(fields: list[pa.Field], next_id: Callable[[], int]) -> list[pa.Field]:
    ids = [next_id() for _ in fields]  # one level first, then the levels below it, as the client counts
    found = []
    for id, field in zip(ids, fields, strict=True):
        if types.is_nested(field.type):
            field = field.with_type(_with_fields(field.type, _with_fresh_ids(_fields(field.type), next_id)))
        found.append(field.with_metadata({_ID: str(id)}))
    return found


def _same_ids(known: pa.Field, kind: pa.DataType, next_id: Callable[[], int] | None = None) -> pa.Field:
    """A field of the type `kind` with the ids of `known`, which has the same parts, but for fields of structs that are new."""
    if types.is_nested(kind):
        stored = {each.name: each for each in _fields(known.type)} if types.is_struct(kind) else {}
        parts = [stored.get(each.name) for each in _fields(kind)] if stored else _fields(known.type)
        inner = []
        for part, field in zip(parts, _fields(kind), strict=True):
            if part is not None:
                inner.append(_same_ids(part, field.type, next_id))
            else:
                assert next_id is not None, f"{field.name} is new"
                inner += _with_fresh_ids([field], next_id)
        kind = _with_fields(kind, inner)
    return known.with_type(kind).with_metadata({_ID: known.metadata[_ID]})
