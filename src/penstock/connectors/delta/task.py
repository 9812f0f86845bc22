"""
The rows of a task on their way into a Delta table: checked, in Delta's types, staged.

Nothing here calls the Delta client where the table is on a disk: its threads do not survive a fork.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Schema as DeltaSchema

from penstock.changes import Op, is_changelog, own_columns
from penstock.changes.checks import check_changes
from penstock.connectors.delta.columns import (
    TYPES,
    delta_schema,
    follow_rows,
    has_empty_text,
    refuse_partitions,
    stored_columns,
    without_twins,
)
from penstock.connectors.delta.hint import Hint
from penstock.connectors.delta.table import claim
from penstock.connectors.lake.staging import Stage, StagedFiles
from penstock.connectors.lake.task import LakeTask
from penstock.connectors.upsert import UNUSED, key_for, says_unchanged, with_equality, with_known_types
from penstock.errors import DataError, SchemaError
from penstock.schema import key_of, with_key
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.schema.evolution import Policy
from penstock.sink import Topic, WriteResult

if TYPE_CHECKING:
    from penstock.connectors.delta.sink import Delta

_WITH_ROW = [Op.SEEDED.value, Op.INSERT.value, Op.UPDATE.value]


class DeltaTask(LakeTask):
    """Rows for `append` and `changes` are files of the table; for `upsert` they are changes, applied at the commit."""

    sink: Delta

    def __init__(self, sink: Delta, stage: Stage) -> None:
        super().__init__(sink, stage)
        self._stored: dict[Topic, tuple[pa.Schema, list[str]] | None] = {}
        """Per topic: the columns of its table, and those that must not be null; None if there is no table."""
        self._keys: dict[Topic, list[str]] = {}

    def write(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        claim(self.sink.targets, topic)  # here already: staged rows can only go forward
        if self.sink.config.upserts:
            rows, discarded = self._as_changes(topic, batch)
        else:
            rows, discarded = self.fit(
                topic, TYPES.batch(topic, without_twins(batch, lambda: self.stored(topic))), key_of(batch.schema)
            )
        if rows.num_rows:
            self._refuse_values(topic, rows)
            self.stage.write(topic, rows)
        return WriteResult(rows.num_rows, rows.nbytes if discarded else batch.nbytes, discarded)

    def finish(self) -> StagedFiles:
        receipt = super().finish()
        if not self.sink.config.upserts:
            return receipt
        staged = {
            topic: each.model_copy(
                update={
                    "columns": pack_schema(with_key(unpack_schema(each.columns), self._keys[topic])),
                    "renews": self.sink.context.topic(topic).refilled,
                }
            )
            for topic, each in receipt.staged.items()
        }
        return StagedFiles(staged=staged)

    def accept(self, topic: Topic, rows: pa.Schema, policy: Policy) -> pa.Schema:
        config = self.sink.config
        stored = None if self.sink.context.topic(topic).refilled else self.stored(topic)
        staged = self.stage.schema(topic)
        columns = stored or stored_columns(config, staged or rows)
        if stored is not None and staged is not None:
            columns = follow_rows(topic, config, stored, stored_columns(config, staged))
        return follow_rows(topic, config, columns, stored_columns(config, rows), policy)

    def stored(self, topic: Topic) -> pa.Schema | None:
        if topic not in self._stored:
            self._stored[topic] = None
            metadata = Hint(self.sink.targets.claim(topic)).metadata()
            if metadata is not None:
                columns = pa.schema(DeltaSchema.from_json(metadata["schemaString"]).to_arrow())
                refuse_partitions(topic, self.sink.config, metadata["partitionColumns"])
                required = [column.name for column in columns if not column.nullable]
                self._stored[topic] = (delta_schema(topic, columns), required)
        known = self._stored[topic]
        return known and known[0]

    def _as_changes(self, topic: Topic, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """The batch as it is staged for `upsert`; refused if it could not be applied."""
        key = key_for(self.sink.config, topic, batch.schema, self._keys)
        unused = UNUSED if is_changelog(batch.schema) else ()
        known = self.stored(topic) if pa.null() in batch.schema.types else None
        if known is not None:
            batch = with_known_types(batch, {each.name: each.type for each in known})
        rows, discarded = self.fit(
            topic, TYPES.batch(topic, without_twins(batch, lambda: self.stored(topic)), without=unused), key
        )
        rows = with_equality(rows, batch.schema, key)
        check_changes(pa.Table.from_batches([rows]), key)
        if self.stage.last_schema(topic) not in (None, rows.schema):
            self.stage.end(topic)
        return rows, discarded

    def _refuse_values(self, topic: Topic, rows: pa.RecordBatch) -> None:
        """Refuse values that the table would not take: staged rows can only go forward."""
        upserts = self.sink.config.upserts
        own = rows.select(own_columns(rows.schema)) if upserts else rows
        if upserts and is_changelog(rows.schema):
            own = own.filter(pc.is_in(rows.column("_op"), value_set=pa.array(_WITH_ROW)))
        stored = self._stored.get(topic)
        for name in () if stored is None or (upserts and says_unchanged(rows)) else stored[1]:
            if name not in own.schema.names or own.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        for name in self.sink.config.partition_by:
            if name in own.schema.names and has_empty_text(own.column(name)):
                raise DataError(
                    f"the partition column {name!r} of {topic} holds an empty text, which Delta would read as null",
                    hint="give it another value in the route's SQL",
                )
