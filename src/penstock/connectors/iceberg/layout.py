"""How an Iceberg table's rows are laid out by partition transforms, in the tasks and in the catalog."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import Transform, parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampType,
)

from penstock import durable
from penstock.connectors.lake.partitions import Split, partition_text, split
from penstock.errors import ConfigError, SchemaError
from penstock.sink import Topic

_TEMPORAL = ("year", "month", "day", "hour")
_SIZED = ("bucket", "truncate")
_HINT = "use a column, year(c), month(c), day(c), hour(c), bucket(n, c) or truncate(n, c)"


@dataclass(frozen=True)
class Partition:
    """One entry of `partition_by`: a column, or a transform of one such as `day(ts)` or `bucket(16, id)`."""

    column: str
    transform: str = "identity"
    size: int = 0
    """Of `bucket` and `truncate`: how many buckets, or how wide a value may be."""

    @classmethod
    def parse(cls, text: str) -> Partition:
        found = re.fullmatch(r"(\w+)\((?:(\d+)\s*,\s*)?(.+)\)", text)
        if found is None:
            return cls(text)
        transform, size, column = found[1], int(found[2] or 0), found[3]
        if transform not in (*_TEMPORAL, *_SIZED) or (transform in _SIZED) != (size > 0):
            raise ConfigError(f"`{text}` is not a partition transform", code="PEN-1009", hint=_HINT)
        return cls(column, transform, size)

    @classmethod
    def of(cls, column: str, transform: Transform[Any, Any]) -> Partition:
        """As a table has it."""
        name, _, size = str(transform).removesuffix("]").partition("[")
        return cls(column, name, int(size or 0))

    @property
    def name(self) -> str:
        """The partition field, as other engines name it too."""
        if self.transform == "identity":
            return self.column
        return f"{self.column}_{'trunc' if self.transform == 'truncate' else self.transform}"

    def __str__(self) -> str:
        if self.transform == "identity":
            return self.column
        return f"{self.transform}({f'{self.size}, ' if self.size else ''}{self.column})"

    def iceberg(self) -> Transform[Any, Any]:
        return parse_transform(f"{self.transform}[{self.size}]" if self.size else self.transform)

    def values(self, topic: Topic, column: pa.Array) -> pa.Array:
        """What the rows of a column are laid out by."""
        kind = column.type
        if not self._takes(kind):
            wanted = "a timestamp" if self.transform == "hour" else "a date or a timestamp"
            wanted = "an integer or a text" if self.transform == "truncate" else wanted
            raise SchemaError(
                f"the column {self.column!r} of {topic} is {kind}, and `{self}` wants"
                f" {'a simple value' if self.transform == 'bucket' else wanted}",
                code="PEN-4002",
                hint="change `partition_by`, or cast the column in the route's SQL",
            )
        if self.transform == "bucket":
            return self._buckets(column)
        if self.transform == "truncate":
            return self._truncated(column)
        return column if self.transform == "identity" else self._moments(column)

    def _takes(self, kind: pa.DataType) -> bool:
        if self.transform in _TEMPORAL:
            return bool(types.is_timestamp(kind) or (types.is_date(kind) and self.transform != "hour"))
        if self.transform == "truncate":
            return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))
        return self.transform == "identity" or _bucketed(kind) is not None

    def _moments(self, column: pa.Array) -> pa.Array:
        if self.transform == "day":
            return pc.cast(pc.floor_temporal(column, unit="day"), pa.date32())
        if self.transform == "hour":
            hours = pc.cast(
                pc.cast(pc.floor_temporal(column, unit="hour"), pa.timestamp("s", column.type.tz)), pa.int64()
            )
            return pc.cast(pc.divide(hours, 3600), pa.int32())
        years = pc.subtract(pc.year(column), 1970)
        if self.transform == "year":
            return pc.cast(years, pa.int32())
        return pc.cast(pc.add(pc.multiply(years, 12), pc.subtract(pc.month(column), 1)), pa.int32())

    def _truncated(self, column: pa.Array) -> pa.Array:
        if not types.is_integer(column.type):
            return pc.utf8_slice_codeunits(column, 0, self.size)
        numbers = pc.cast(column, pa.int64())
        whole = pc.multiply(pc.divide(numbers, self.size), self.size)  # towards zero, where Iceberg goes down
        down = pc.if_else(pc.greater(whole, numbers), pc.subtract(whole, self.size), whole)
        return pc.cast(down, column.type)

    def _buckets(self, column: pa.Array) -> pa.Array:
        """Each different value is hashed once, by the client."""
        encoded = column.dictionary_encode()
        values, source = encoded.dictionary, _bucketed(column.type)
        if types.is_date(values.type):
            values = pc.cast(pc.cast(values, pa.date32()), pa.int32())
        elif types.is_timestamp(values.type):
            values = pc.cast(pc.cast(values, pa.timestamp("us", values.type.tz)), pa.int64())
        assert source is not None
        hashed = self.iceberg().transform(source)
        return pa.array([hashed(each) for each in values.to_pylist()], pa.int32()).take(encoded.indices)

    def stored(self, text: str | None, kind: pa.DataType) -> Any:
        """A value as a manifest holds it: dates and times are numbers there."""
        if text is None:
            return None
        if self.transform not in ("identity", "truncate"):
            kind = pa.date32() if self.transform == "day" else pa.int32()
        value = pc.cast(pa.scalar(text), kind)
        if types.is_date(kind) or types.is_timestamp(kind):
            value = pc.cast(value, pa.int32() if types.is_date(kind) else pa.int64())
        return value.as_py()


def _bucketed(kind: pa.DataType) -> PrimitiveType | None:
    """The type by which Iceberg hashes such values; None if it does not."""
    if types.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    known: list[tuple[Callable[[pa.DataType], bool], PrimitiveType]] = [
        (types.is_integer, LongType()),
        (types.is_string, StringType()),
        (types.is_large_string, StringType()),
        (types.is_binary, BinaryType()),
        (types.is_large_binary, BinaryType()),
        (types.is_date, DateType()),
        (types.is_timestamp, TimestampType()),
    ]
    return next((found for is_kind, found in known if is_kind(kind)), None)


class Layout(tuple[Partition, ...]):
    """
    The whole of `partition_by`. Files keep the columns that they are laid out by: Iceberg's readers look for them there.
    """

    @property
    def names(self) -> list[str]:
        return [each.name for each in self]

    def check(self, topic: Topic, schema: pa.Schema) -> None:
        for each in self:
            if each.column not in schema.names:
                raise SchemaError(
                    f"{topic} has the columns {', '.join(schema.names)}; `partition_by` needs {each}",
                    code="PEN-4002",
                    hint="change `partition_by`, or route this topic to another sink",
                )
            each.values(topic, pa.nulls(0, schema.field(each.column).type))
            if each.transform == "identity":
                partition_text(each.column, pa.nulls(0, schema.field(each.column).type))

    def split(self, topic: Topic, batch: pa.RecordBatch) -> Split:
        schema, names = batch.schema, [f"\0{position}" for position in range(len(self))]
        for name, each in zip(names, self, strict=True):
            batch = batch.append_column(name, each.values(topic, batch.column(each.column)))
        for values, rows in split(batch, names):
            yield values, pa.RecordBatch.from_arrays(rows.columns, schema=schema)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Layout:
        return cls(Partition.parse(each) for each in texts)

    def spec(self, schema: Schema) -> PartitionSpec:
        fields = [
            PartitionField(
                source_id=schema.find_field(each.column).field_id,
                field_id=PARTITION_FIELD_ID_START + position,
                transform=each.iceberg(),
                name=each.name,
            )
            for position, each in enumerate(self)
        ]
        return PartitionSpec(*fields)

    def refuse_another(self, topic: Topic, schema: Schema, spec: PartitionSpec) -> None:
        """The table must be laid out as `partition_by` says."""
        found = [Partition.of(schema.find_column_name(each.source_id) or "?", each.transform) for each in spec.fields]
        if [str(each) for each in found] != [str(each) for each in self]:
            raise SchemaError(
                f"the table of {topic} is partitioned by {[str(e) for e in found]}, not by {[str(e) for e in self]}",
                code="PEN-4002",
                hint=f"set partition_by = {durable.canonical([str(each) for each in found])}",
            )

    def record(self, partition: Mapping[str, str | None], columns: pa.Schema) -> Record:
        """A file's partition as a manifest holds it."""
        return Record(*(each.stored(partition[each.name], columns.field(each.column).type) for each in self))
