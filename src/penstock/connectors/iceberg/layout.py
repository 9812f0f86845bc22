"""How an Iceberg table's rows are laid out by partition transforms, in the tasks and in the catalog."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.typedef import Record

from penstock import durable
from penstock.connectors.lake.partitions import Split, partition_text, split
from penstock.errors import ConfigError, SchemaError
from penstock.sink import Topic

_TRANSFORMS = ("identity", "day")


@dataclass(frozen=True)
class Partition:
    """One entry of `partition_by`: a column, or `day(column)`."""

    column: str
    transform: str = "identity"

    @classmethod
    def parse(cls, text: str) -> Partition:
        found = re.fullmatch(r"(\w+)\((.+)\)", text)
        if found is None:
            return cls(text)
        if found[1] not in _TRANSFORMS:
            raise ConfigError(
                f"the partition transform in `{text}` is not supported yet", code="PEN-1009", hint="use day(column)"
            )
        return cls(found[2], found[1])

    @property
    def name(self) -> str:
        """The partition field, as other engines name it too."""
        return self.column if self.transform == "identity" else f"{self.column}_{self.transform}"

    def __str__(self) -> str:
        return self.column if self.transform == "identity" else f"{self.transform}({self.column})"

    def values(self, topic: Topic, column: pa.Array) -> pa.Array:
        """What the rows of a column are laid out by."""
        if self.transform == "identity":
            return column
        if not (types.is_timestamp(column.type) or types.is_date(column.type)):
            raise SchemaError(
                f"the column {self.column!r} of {topic} is {column.type}, and `{self}` wants a date or a timestamp",
                code="PEN-4002",
                hint="change `partition_by`, or cast the column in the route's SQL",
            )
        return pc.cast(pc.floor_temporal(column, unit="day"), pa.date32())

    def stored(self, text: str | None, kind: pa.DataType) -> Any:
        """A value as a manifest holds it: dates and times are numbers there."""
        if text is None:
            return None
        kind = pa.date32() if self.transform == "day" else kind
        value = pc.cast(pa.scalar(text), kind)
        if types.is_date(kind) or types.is_timestamp(kind):
            value = pc.cast(value, pa.int32() if types.is_date(kind) else pa.int64())
        return value.as_py()


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
                transform=DayTransform() if each.transform == "day" else IdentityTransform(),
                name=each.name,
            )
            for position, each in enumerate(self)
        ]
        return PartitionSpec(*fields)

    def refuse_another(self, topic: Topic, schema: Schema, spec: PartitionSpec) -> None:
        """The table must be laid out as `partition_by` says."""
        found = [Partition(schema.find_column_name(each.source_id) or "?", str(each.transform)) for each in spec.fields]
        if [str(each) for each in found] != [str(each) for each in self]:
            raise SchemaError(
                f"the table of {topic} is partitioned by {[str(e) for e in found]}, not by {[str(e) for e in self]}",
                code="PEN-4002",
                hint=f"set partition_by = {durable.canonical([str(each) for each in found])}",
            )

    def record(self, partition: Mapping[str, str | None], columns: pa.Schema) -> Record:
        """A file's partition as a manifest holds it."""
        return Record(*(each.stored(partition[each.name], columns.field(each.column).type) for each in self))
