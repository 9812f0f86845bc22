"""Write topics to Iceberg tables of a catalog, appended or applied by key, each epoch exactly once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa
from pyiceberg.expressions import GreaterThan, LessThan, Or

from penstock.changes import is_changelog, own_columns
from penstock.connectors.iceberg.catalog import Catalogs, Names
from penstock.connectors.iceberg.columns import StatsPart, iceberg_schema, promotes, refuse_one_path, widens
from penstock.connectors.iceberg.commit import NO_COLUMNS, IcebergTarget, data_file
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.layout import Layout
from penstock.connectors.iceberg.second import SecondStageSink
from penstock.connectors.iceberg.table import Table, scan
from penstock.connectors.iceberg.task import IcebergTask
from penstock.connectors.iceberg.upsert import head
from penstock.connectors.iceberg.vended import TableTargets, VendedKeys, vends
from penstock.connectors.lake.changed import begin_changes, changes_of
from penstock.connectors.lake.partitions import Directories
from penstock.connectors.lake.staging import FileSpec, Part, Stage
from penstock.connectors.upsert import check_options
from penstock.schema import ChangeKind, SchemaChange
from penstock.schema.evolution import EXACT, diff, follow, is_doubling, no_exact_double
from penstock.sink import Epoch, SinkContext, Task, Topic
from penstock.store import Place


class Iceberg(VendedKeys, SecondStageSink):
    """
    Tasks write Parquet files with field ids into the table's directory; the driver commits them in one change of the
    table, together with columns that are new or wider and with the marker, which is a property of the table and also in
    the snapshot's summary. Commits drop old snapshots and metadata files and merge small manifests.
    Numbers get wider types without a rewrite. A date column that becomes a timestamp, and one of whole numbers that becomes
    double, is another column for Iceberg, so the driver rewrites the table's files in that commit, and the old ones go with
    the last snapshot that names them.

    For `upsert` the tasks' files are changes. Their new rows go to data files, and the old rows are named in position deletes,
    which cost the same however large the table is. An index of the keys of each file, in `_penstock`, says where they are; it
    can always be made again. Delete files are merged, and data files with many deleted rows are written again, a million rows
    an epoch at most. The driver does what is little, up to about a million rows, and tasks do the rest. Such columns stay what
    they are then.

    Supports exactly-once: the catalog refuses a commit unless it starts from the snapshot whose marker was read. Readers see
    whole epochs. Topics may be committed at the same time. Other writers may append to the table meanwhile. `changes`
    adds the capability changelog, and `upsert` upsert, changelog and idempotent.
    """

    name = "iceberg"
    needs_conditional_writes = False

    def __init__(self, config: IcebergConfig) -> None:
        super().__init__(config)
        self._uri = config.catalog_uri
        if config.catalog_uri.startswith("sqlite:///"):
            self._uri = "sqlite:///" + os.path.abspath(config.catalog_uri.removeprefix("sqlite:///"))
        self.needs_apply = config.upserts
        if config.mode != "append":
            self.capabilities = self.capabilities.with_changelog()
        if config.upserts:
            self.capabilities = self.capabilities.with_upsert().with_idempotent()

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.config.model_copy(update={"path": self._path, "catalog_uri": self._uri}),)

    def open(self, context: SinkContext = SinkContext()) -> None:
        check_options(self.config)
        self.names = Names(self.config)
        self.layout = Layout.parse(self.config.partition_by)
        super().open(context)
        self.is_vended = vends(self.config, self.targets.root)
        if self.is_vended:
            self.targets = TableTargets(self.targets.template, self.targets.options)
        self.catalogs = Catalogs(self.config, self._uri, self.targets.root)

    def close(self) -> None:
        super().close()
        if hasattr(self, "catalogs"):
            self.catalogs.close()

    def catalog_errors(self, topic: Topic) -> AbstractContextManager[None]:
        return self.catalogs.errors(f"the table of {topic}")

    def spec(self) -> FileSpec:
        return FileSpec(
            begin=self._begin_file,
            place=data_file,
            layout=self.layout,
            target_file_rows=self.config.target_file_rows,
            max_open_files=self.config.max_open_files,
            widens=self._widens,
        )

    def task(self, epoch: Epoch, task: Task) -> IcebergTask:
        spec = self.spec()
        if self.config.upserts:
            place = lambda target, path: changes_of(target, epoch.pipeline) / path  # noqa: E731
            spec = replace(spec, begin=begin_changes, place=place, layout=Directories())
        return IcebergTask(self, Stage(epoch, task, self.targets, spec))

    def make_target(self, topic: Topic) -> IcebergTarget:
        return IcebergTarget(self, topic)

    def _begin_file(self, path: Place, schema: pa.Schema) -> Part:
        return StatsPart(path, schema, self.config.compression)

    # -- schemas ---------------------------------------------------------------------------------------------------

    def check_columns(self, topic: Topic, columns: pa.Schema) -> None:
        new = iceberg_schema(topic, self._own(columns))
        self.layout.check(topic, new)
        follow(topic, self.schema(topic) or new, new, self.policy(topic), self._widens)
        refuse_one_path(topic, NO_COLUMNS.with_types(new))

    def diff_schemas(self, old: pa.Schema, new: pa.Schema) -> Sequence[SchemaChange]:
        return diff(*(iceberg_schema("the topic", self._own(schema)) for schema in (old, new)))

    def evaluate_evolution(self, changes: Sequence[SchemaChange], refilled: Topic | None = None) -> bool:
        return all(
            change.kind is not ChangeKind.RETYPED
            or self._widens(change.old, change.new)
            or self._widens(change.new, change.old)
            for change in changes
        )

    def apply_evolution(self, topic: Topic, changes: Sequence[SchemaChange]) -> None:
        """Columns change in the commit that brings their first rows; what that would round is refused now."""
        for change in changes:
            if is_doubling(change) and not self.can_be_double(topic, change.column):
                raise no_exact_double(topic, change.column)

    def read_topic(self, topic: Topic) -> pa.Table | None:
        table = self.target(topic).load()
        return None if table is None else scan(table).to_arrow()

    def first_rows(self, topic: Topic, rows: int) -> pa.Table | None:
        table = self.target(topic).load()
        return None if table is None else scan(table, limit=rows).to_arrow()

    def can_be_double(self, topic: Topic, column: str) -> bool:
        if self.config.upserts or column in [each.column for each in self.layout]:
            return False
        table = self.target(topic).load()
        return table is None or not _holds_beyond(table, column)

    def _widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """Position deletes name rows of files, so those stay as they are in `upsert`."""
        return promotes(old, new) if self.config.upserts else widens(old, new)

    def _own(self, schema: pa.Schema) -> pa.Schema:
        if not self.config.upserts or not is_changelog(schema):
            return schema
        return pa.schema([schema.field(name) for name in own_columns(schema)])


def _holds_beyond(table: Table, column: str) -> bool:
    """True if a live value of the column lies beyond what doubles can count to."""
    if column not in table.metadata.schema().column_names or head(table) is None:
        return False
    beyond = Or(GreaterThan(column, EXACT), LessThan(column, -EXACT))  # type: ignore[arg-type, call-arg]
    return bool(scan(table, row_filter=beyond, selected_fields=(column,), limit=1).to_arrow().num_rows)
