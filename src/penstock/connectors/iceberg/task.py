"""The rows of a task on their way into an Iceberg table: in its types, with its field ids, staged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.exceptions import TableAlreadyExistsError

from penstock.changes import is_changelog
from penstock.changes.checks import check_changes
from penstock.connectors.iceberg.columns import TYPES, Columns, iceberg_schema
from penstock.connectors.iceberg.commit import NO_COLUMNS, hint_of, wider_columns
from penstock.connectors.iceberg.upsert import own_rows
from penstock.connectors.lake.staging import Stage, StagedFiles
from penstock.connectors.lake.task import LakeTask
from penstock.connectors.upsert import UNUSED, key_for, with_equality, with_known_types
from penstock.errors import SchemaError
from penstock.schema import key_of, with_key
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.schema.evolution import Policy
from penstock.sink import Topic, WriteResult

if TYPE_CHECKING:
    from penstock.connectors.iceberg.sink import Iceberg


class IcebergTask(LakeTask):
    """Where the driver has left a note of the table's columns, the catalog is not asked."""

    sink: Iceberg

    def __init__(self, sink: Iceberg, stage: Stage) -> None:
        super().__init__(sink, stage)
        self._columns: dict[Topic, Columns] = {}
        self._keys: dict[Topic, list[str]] = {}
        self._required: set[Topic] = set()

    def write(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        if self.sink.config.upserts:
            return self._write_changes(topic, batch)
        rows, lost = self.fit(topic, TYPES.batch(topic, batch), key_of(batch.schema))
        columns = self._columns[topic]
        rows = rows.select([name for name in rows.schema.names if name in columns.schema.names])
        for name in columns.required():
            if name not in rows.schema.names or rows.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        rows = pa.RecordBatch.from_arrays(rows.columns, schema=columns.select(rows.schema))
        self._require_table(topic, rows.schema)
        self.stage.write(topic, rows)
        return WriteResult(rows.num_rows, batch.nbytes, lost)

    def _write_changes(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        """Stage the batch for `upsert`; refused if it could not be applied."""
        key = key_for(self.sink.config, topic, batch.schema, self._keys)
        unused = UNUSED if is_changelog(batch.schema) else ()
        known = self._stored_columns(topic) if pa.null() in batch.schema.types else NO_COLUMNS
        batch = with_known_types(batch, {each.name: each.type for each in known.schema})
        rows, lost = self.fit(topic, TYPES.batch(topic, batch, without=unused), key)
        rows = with_equality(rows, batch.schema, key)
        check_changes(pa.Table.from_batches([rows]), key)
        if self.stage.last_schema(topic) not in (None, rows.schema):
            self.stage.end(topic)
        self._require_table(topic, rows.schema)
        if rows.num_rows:
            self.stage.write(topic, rows)
        return WriteResult(rows.num_rows, batch.nbytes, lost)

    def _require_table(self, topic: Topic, rows: pa.Schema) -> None:
        """Make the table, unless it is there, if only with a table come the keys to write its files."""
        if not self.sink.is_vended or topic in self._required:
            return
        target = self.sink.iceberg(topic)
        if target.load() is None:
            with self.sink.catalog_errors(topic), contextlib.suppress(TableAlreadyExistsError):
                target.create([rows])
            target.load()
        self._required.add(topic)

    def finish(self) -> StagedFiles:
        receipt = super().finish()
        if not self.sink.config.upserts:
            return receipt
        keyed = {
            topic: with_key(unpack_schema(each.columns), self._keys[topic]) for topic, each in receipt.staged.items()
        }
        staged = {
            topic: each.model_copy(update={"columns": pack_schema(keyed[topic])})
            for topic, each in receipt.staged.items()
        }
        return StagedFiles(staged=staged)

    def accept(self, topic: Topic, rows: pa.Schema, policy: Policy) -> pa.Schema:
        known = self._columns.get(topic) or self._stored_columns(topic)
        own = own_rows(self.sink.config, topic, rows)
        self.sink.layout.check(topic, own)
        self._columns[topic] = wider_columns(topic, self.sink.layout, known, own, policy)
        return iceberg_schema(topic, self._columns[topic].schema)

    def known(self, topic: Topic) -> pa.Schema | None:
        columns = (self._columns.get(topic) or self._stored_columns(topic)).schema
        return iceberg_schema(topic, columns) if len(columns) else None

    def _stored_columns(self, topic: Topic) -> Columns:
        """The table's columns as the driver last saw them; the commit looks again."""
        if not self.sink.is_vended:
            with contextlib.suppress(FileNotFoundError):
                return Columns.from_json(hint_of(self.sink.targets.claim(topic)).read_text())
        table = self.sink.target(topic).load()
        return table.columns() if table else NO_COLUMNS
