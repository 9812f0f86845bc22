"""The rows of a task on their way into an Iceberg table: in its types, with its field ids, staged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.connectors.iceberg.columns import TYPES, Columns, iceberg_schema
from penstock.connectors.iceberg.commit import NO_COLUMNS, hint_of, wider_columns
from penstock.connectors.lake.staging import Stage
from penstock.connectors.lake.task import LakeTask
from penstock.errors import SchemaError
from penstock.schema import key_of
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

    def write(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        rows, lost = self.fit(topic, TYPES.batch(topic, batch), key_of(batch.schema))
        columns = self._columns[topic]
        rows = rows.select([name for name in rows.schema.names if name in columns.schema.names])
        for name in columns.required():
            if name not in rows.schema.names or rows.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        self.stage.write(topic, pa.RecordBatch.from_arrays(rows.columns, schema=columns.select(rows.schema)))
        return WriteResult(rows.num_rows, batch.nbytes, lost)

    def accept(self, topic: Topic, rows: pa.Schema, policy: Policy) -> pa.Schema:
        known = self._columns.get(topic) or self._stored_columns(topic)
        self._columns[topic] = wider_columns(topic, self.sink.layout, known, rows, policy)
        return iceberg_schema(topic, self._columns[topic].schema)

    def _stored_columns(self, topic: Topic) -> Columns:
        """The table's columns as the driver last saw them; the commit looks again."""
        with contextlib.suppress(FileNotFoundError):
            return Columns.from_json(hint_of(self.sink.targets.claim(topic)).read_text())
        table = self.sink.target(topic).load()
        return table.columns() if table else NO_COLUMNS
