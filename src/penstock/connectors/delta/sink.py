"""Append topics to Delta tables, each epoch exactly once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError
from pydantic import Field

from penstock import durable
from penstock.config import Secret
from penstock.connectors import staging
from penstock.connectors.delta.columns import StatsPart, as_delta, delta_schema, has_empty_text
from penstock.connectors.delta.table import Table, delta_errors, read_metadata, unknown_feature
from penstock.connectors.staging import HIDDEN, StagedFiles, StagingConfig, StagingSink, unpack_schema
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.schema import ChangeKind, SchemaChange
from penstock.schema.evolution import diff, follow
from penstock.sink import CommittedEpoch, Epoch, Positions, Task, Topic, WriteResult, is_committed

TRIES = 20
"""Commits of other writers that one commit gives way to before it fails for a while."""


class DeltaConfig(StagingConfig):
    mode: str = "append"
    """How rows are applied; only `append` yet."""

    partition_by: tuple[str, ...] = ()
    """Partition columns of tables that are created; an existing table must have the same."""

    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    """Compression of the Parquet files."""

    storage_options: dict[str, str | Secret] = Field(default_factory=dict)
    """Options of an object store; not yet, since only local directories can be written."""


class Delta(StagingSink[DeltaConfig]):
    """
    Tasks write Parquet files into the table's directory; the driver commits them in one entry of the table's log,
    together with two application transactions: which epoch of this incarnation it is, and a number that grows with
    every commit of the pipeline and names the sidecar (`_penstock/<pipeline>`) that holds the end.

    Supports exactly-once: an entry is made only at the version after the one whose marker was looked at. Readers see
    whole epochs. Other writers may append to, compact and vacuum the table meanwhile.
    """

    name = "delta"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._required: dict[tuple[Topic, pa.Schema], list[str]] = {}
        self._tables: dict[Topic, Table] = {}
        self._committed: set[Topic] = set()

    def open(self) -> None:
        if self.config.mode != "append":
            raise ConfigError(
                f'mode = "{self.config.mode}" is not supported yet', code="PEN-1009", hint='use mode = "append"'
            )
        if self.config.storage_options:
            raise ConfigError("`storage_options` are not supported yet", code="PEN-1009", hint="use a local directory")
        super().open()

    def close(self) -> None:
        super().close()
        self._tables.clear()

    # -- in tasks: no call into the client that needs its threads, which do not survive a fork ---------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        super().begin_epoch(epoch, task)
        self._required.clear()

    def begin_file(self, path: Path, schema: pa.Schema) -> staging.Part:
        return StatsPart(path, schema, self.config.compression, store_schema=False)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None
        rows = as_delta(topic, batch)
        key = (topic, rows.schema)
        if key not in self._required:
            self._required[key] = self._fit_before_writing(topic, rows.schema)
        for name in self._required[key]:
            if name not in rows.schema.names or rows.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        for name in self.config.partition_by:
            if name in rows.schema.names and has_empty_text(rows.column(name)):
                raise DataError(
                    f"the partition column {name!r} of {topic} holds an empty text, which Delta would read as null",
                    hint="give it another value in the route's SQL",
                )
        self._stage.write(topic, rows)
        return WriteResult(batch.num_rows, batch.nbytes)

    def _fit_before_writing(self, topic: Topic, rows: pa.Schema) -> list[str]:
        """Refuse rows that could never be committed, before the first of them is staged; gives the columns without nulls."""
        metadata = read_metadata(self._targets.claim(topic) / "_delta_log")
        if metadata is None:
            return []
        columns = pa.schema(DeltaSchema.from_json(metadata["schemaString"]).to_arrow())
        self._fit(topic, columns, metadata["partitionColumns"], rows)
        return [column.name for column in columns if not column.nullable]

    def _fit(self, topic: Topic, columns: pa.Schema, partition_by: Sequence[str], rows: pa.Schema) -> pa.Schema:
        """The table's columns and those that the rows add to them."""
        if list(partition_by) != list(self.config.partition_by):
            raise SchemaError(
                f"the table of {topic} is partitioned by {list(partition_by)}, not by {list(self.config.partition_by)}",
                code="PEN-4002",
                hint=f"set partition_by = {json.dumps(list(partition_by))}",
            )
        wider = follow(topic, delta_schema(topic, columns), rows)
        folded: dict[str, str] = {}
        for name in wider.names:
            if folded.setdefault(name.lower(), name) != name:
                raise SchemaError(
                    f"the columns {folded[name.lower()]!r} and {name!r} of {topic} differ in case only",
                    code="PEN-4001",
                    hint="Delta does not tell them apart: rename one in the route's SQL",
                )
        return wider

    # -- on the driver ----------------------------------------------------------------------------------------------

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[StagedFiles], end: Positions) -> None:
        parts = [receipt.staged[topic] for receipt in receipts]
        files = [file for part in parts for file in part.files]
        target = self._targets.claim(topic)
        conflict: DeltaError | None = None
        for _ in range(TRIES):
            table = self._table(topic)
            marker = table.marker(epoch.pipeline) if table else None
            if marker is None and topic in self._committed:
                raise FatalError(
                    f"the Delta table {target} was dropped or replaced while the pipeline ran",
                    code="PEN-5010",
                    hint="put it back; or stop, and `penstock offsets reset FILE` to begin anew",
                )
            if is_committed(marker, epoch):
                assert table is not None
                assert marker is not None
                table.sync(marker.version)  # who made the entry may have died before the sync
                break
            for file in files:
                if not staging.is_there(target / file.path, file.bytes):
                    raise StagingLost(f"{target / file.path} of {epoch} is gone or has another size")
            try:
                with durable.disk_errors():
                    if table is None:
                        self._create(topic, [unpack_schema(part.columns) for part in parts])
                    elif self._widen(topic, table, [unpack_schema(part.columns) for part in parts]):
                        table.commit(epoch, end, files)
                        break
            except DeltaProtocolError as error:
                raise unknown_feature(target, error) from error
            except DeltaError as error:
                conflict = error  # another writer was first, or the answer was lost: look again
                self._tables.pop(topic, None)
        else:
            raise RetryableError(
                f"the Delta table {target} refused {TRIES} commits of {epoch}: {conflict}", code="PEN-2005"
            ) from conflict
        self._committed.add(topic)
        staging.drop_lists(self._targets.root, epoch.pipeline, parts)

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        table = self._table(topic)
        marker = table.marker(pipeline) if table else None
        if marker is not None:
            self._committed.add(topic)
        return marker and CommittedEpoch(incarnation=marker.incarnation, number=marker.number, end=marker.end)

    def sweep(self, epoch: Epoch, keep: Sequence[StagedFiles]) -> None:
        kept = staging.names(keep)
        live: dict[Topic, set[str]] = {}

        def is_kept(topic: Topic, place: Path) -> bool:
            if topic not in live:  # whoever asks: a file of the table is never a leftover
                table = self._table(topic)
                live[topic] = {os.path.basename(uri) for uri in table.delta.file_uris()} if table else set()
            return place.name in kept or place.name in live[topic]

        staging.sweep(self._targets.root, epoch, is_kept)

    def is_seeded(self, topic: Topic) -> bool:
        try:
            seeded = json.loads((self._targets.claim(topic) / HIDDEN / ".seeded").read_bytes())["table"]
        except FileNotFoundError:
            return False
        table = self._table(topic)
        return seeded is None or (table is not None and str(table.delta.metadata().id) == seeded)

    def mark_seeded(self, topic: Topic) -> None:
        table = self._table(topic)
        hidden = self._targets.claim(topic) / HIDDEN
        durable.make_directory(hidden)
        seeded = {"table": str(table.delta.metadata().id) if table else None}
        durable.write_atomic(hidden / ".seeded", durable.canonical(seeded).encode())

    def schema(self, topic: Topic) -> pa.Schema | None:
        """The columns of the table; more may come."""
        table = self._table(topic)
        return table and table.columns()

    def diff_schemas(self, old: pa.Schema, new: pa.Schema) -> Sequence[SchemaChange]:
        return diff(delta_schema("the topic", old), delta_schema("the topic", new))

    def evaluate_evolution(self, changes: Sequence[SchemaChange]) -> bool:
        return all(change.kind is not ChangeKind.RETYPED for change in changes)

    def apply_evolution(self, topic: Topic, changes: Sequence[SchemaChange]) -> None:
        table = self._table(topic)
        added = [pa.field(c.column, c.new) for c in changes if c.kind is ChangeKind.ADDED]
        if table is not None and added:
            with delta_errors(table.path):
                table.add_columns(delta_schema(topic, pa.schema(added)))

    def _table(self, topic: Topic) -> Table | None:
        """The topic's table at its newest version, or None."""
        known = self._tables.get(topic)
        path = self._targets.claim(topic)
        if re.search("%[0-9A-Fa-f]{2}", str(path)):
            raise ConfigError(
                f"the Delta client reads the %-code in {path} as another character, and would not find the table",
                code="PEN-1010",
                hint="route to another name, or choose another path",
            )
        if known is not None and known.is_the_same():
            with delta_errors(path):
                known.refresh()
            return known
        self._tables.pop(topic, None)
        if not (path / "_delta_log").exists():
            return None
        try:
            with delta_errors(path):
                table = Table(path, DeltaTable(str(path)))
        except TableNotFoundError:
            return None
        table.refuse_what_append_cannot_keep()
        self._tables[topic] = table
        return table

    def _create(self, topic: Topic, schemas: Sequence[pa.Schema]) -> None:
        path = self._targets.claim(topic)
        schema = schemas[0]
        for each in schemas[1:]:
            schema = follow(topic, schema, each)
        schema = self._fit(topic, schema, self.config.partition_by, schema)
        durable.make_directory(path)
        DeltaTable.create(str(path), schema, mode="ignore", partition_by=list(self.config.partition_by))
        durable.fsync(path / "_delta_log" / f"{0:020d}.json", path / "_delta_log")

    def _widen(self, topic: Topic, table: Table, schemas: Sequence[pa.Schema]) -> bool:
        """True when the table has every column; otherwise they are added, and the marker is to be looked at again."""
        columns = wider = table.columns()
        for each in schemas:
            wider = self._fit(topic, wider, table.partition_by(), each)
        added = [column for column in wider if column.name not in columns.names]
        if added:
            table.add_columns(pa.schema(added))
        return not added
