"""Write topics to Delta tables, appended or applied by key, each epoch exactly once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError
from pyarrow import types
from pydantic import Field

from penstock import durable
from penstock.change import Op, check_changes, collapse, is_changelog, own_columns
from penstock.config import Secret
from penstock.connectors import staging
from penstock.connectors.delta.columns import StatsPart, as_delta, delta_schema, has_empty_text
from penstock.connectors.delta.rewrite import rewrite
from penstock.connectors.delta.table import Table, delta_errors, read_metadata, unknown_feature
from penstock.connectors.staging import (
    HIDDEN,
    ParquetPart,
    Stage,
    StagedFiles,
    StagedTopic,
    StagingConfig,
    StagingSink,
    pack_schema,
    unpack_schema,
)
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.schema import ChangeKind, SchemaChange, key_of, with_key
from penstock.schema.evolution import diff, follow
from penstock.sink import CommittedEpoch, Epoch, Positions, Task, Topic, WriteResult, is_committed

REWRITER = Task(99_999)
"""Whose files the driver's are, in their names."""

TRIES = 20
"""Commits of other writers that one commit gives way to before it fails for a while."""

_WITH_ROW = [Op.SEEDED.value, Op.INSERT.value, Op.UPDATE.value]


class DeltaConfig(StagingConfig):
    identity = StagingConfig.identity | {"key"}

    mode: Literal["append", "upsert", "changes"] = "append"
    """How rows are applied: `append` adds them; `upsert` keeps one row per key, as the changes leave it; `changes` adds
    every change with the columns that describe it."""

    key: tuple[str, ...] = ()
    """Columns that make the key of a row, for `upsert`; by default those that the topic's schema names."""

    soft_delete: bool = False
    """Mark deleted rows instead of removing them; not yet."""

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
    every commit of the pipeline and names the sidecar (`_penstock/<pipeline>`) that holds the end. For `upsert` the
    tasks' files are changes, kept beside the sidecar; the driver writes those files of the table anew that hold a key
    of theirs, and commits new and old ones in one entry.

    Supports exactly-once: an entry is made only at the version after the one whose marker was looked at. Readers see
    whole epochs. Other writers may append to, compact and vacuum the table meanwhile. `changes` adds the capability
    changelog, and `upsert` upsert, changelog and idempotent.
    """

    name = "delta"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._required: dict[tuple[Topic, pa.Schema], list[str]] = {}
        self._keys: dict[Topic, list[str]] = {}
        self._tables: dict[Topic, Table] = {}
        self._committed: set[Topic] = set()
        self._upserts = self.config.mode == "upsert"
        if self.config.mode != "append":
            self.capabilities = self.capabilities.with_changelog()
        if self._upserts:
            self.capabilities = self.capabilities.with_upsert().with_idempotent()

    def open(self) -> None:
        if self.config.storage_options:
            raise ConfigError("`storage_options` are not supported yet", code="PEN-1009", hint="use a local directory")
        if self.config.soft_delete:
            raise ConfigError("`soft_delete` is not supported yet", code="PEN-1009", hint='use mode = "changes"')
        if self.config.key and not self._upserts:
            raise ConfigError(
                f'`key` has no meaning for mode = "{self.config.mode}"', code="PEN-1003", hint='use mode = "upsert"'
            )
        super().open()

    def close(self) -> None:
        super().close()
        self._tables.clear()

    # -- in tasks: no call into the client that needs its threads, which do not survive a fork ---------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._required.clear()
        self._keys.clear()
        if not self._upserts:
            super().begin_epoch(epoch, task)
            return
        self._stage = Stage(
            epoch,
            task,
            self._targets,
            suffix=self.suffix(),
            begin=lambda path, schema: ParquetPart(path, schema, "lz4", use_dictionary=False, write_statistics=False),
            place=lambda target, path: _changes(target, epoch.pipeline) / path,
            target_file_rows=self.config.target_file_rows,
            max_open_files=self.config.max_open_files,
        )

    def begin_file(self, path: Path, schema: pa.Schema) -> staging.Part:
        return StatsPart(path, schema, self.config.compression, store_schema=False)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None
        rows = self._as_changes(topic, batch) if self._upserts else as_delta(topic, batch)
        own = rows.select(own_columns(rows.schema)) if self._upserts else rows
        key = (topic, own.schema)
        if key not in self._required:
            self._required[key] = self._fit_before_writing(topic, own.schema)
        if self._upserts and is_changelog(rows.schema):
            own = own.filter(pc.is_in(rows.column("_op"), value_set=pa.array(_WITH_ROW)))
        for name in () if self._upserts and _says_unchanged(rows) else self._required[key]:
            if name not in own.schema.names or own.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        for name in self.config.partition_by:
            if name in own.schema.names and has_empty_text(own.column(name)):
                raise DataError(
                    f"the partition column {name!r} of {topic} holds an empty text, which Delta would read as null",
                    hint="give it another value in the route's SQL",
                )
        self._stage.write(topic, rows)
        return WriteResult(batch.num_rows, batch.nbytes)

    def pre_commit(self, epoch: Epoch) -> StagedFiles:
        receipt = super().pre_commit(epoch)
        if not self._upserts:
            return receipt
        staged = {
            topic: each.model_copy(
                update={"columns": pack_schema(with_key(unpack_schema(each.columns), self._keys[topic]))}
            )
            for topic, each in receipt.staged.items()
        }
        return StagedFiles(staged=staged)

    def _as_changes(self, topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch as it is staged for `upsert`, once it is known that it can be applied."""
        assert self._stage is not None
        key = list(self.config.key) or key_of(batch.schema)
        missing = [name for name in key if name not in batch.schema.names]
        if not key or missing or self._keys.setdefault(topic, key) != key:
            raise SchemaError(
                f"{topic} has no key that every row has: {', '.join(key) or 'none is named'}",
                code="PEN-4002",
                hint="set `key` in the sink to columns of the topic",
            )
        unused = [name for name in ("_txid", "_committed_at") if is_changelog(batch.schema)]
        batch = batch.drop_columns([name for name in unused if name in batch.schema.names])
        rows = as_delta(topic, self._with_known_types(topic, batch))
        check_changes(pa.Table.from_batches([rows]), key)
        if self._stage.last_schema(topic) not in (None, rows.schema):
            self._stage.end(topic)
        return rows

    def _with_known_types(self, topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Columns of nulls get the table's types: left out, they would be unchanged and not null."""
        nulls = [name for name in batch.schema.names if types.is_null(batch.schema.field(name).type)]
        metadata = read_metadata(self._targets.claim(topic) / "_delta_log") if nulls else None
        known = pa.schema(DeltaSchema.from_json(metadata["schemaString"]).to_arrow()) if metadata else pa.schema([])
        for name in nulls:
            if name in known.names:
                nothing = pa.nulls(batch.num_rows, known.field(name).type)
                batch = batch.set_column(batch.schema.get_field_index(name), name, nothing)
        return batch

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
        target = self._targets.claim(topic)
        conflict: Exception | None = None
        for _ in range(TRIES):
            table = self._table(topic)
            if self._is_done(epoch, topic, table):
                break
            lost = self._lost(epoch, target, parts)
            if lost is not None:
                if self._is_done(epoch, topic, self._table(topic)):
                    break  # a twin was faster, and its commit has dropped the changes
                raise StagingLost(f"{lost} of {epoch} is gone or has another size")
            schemas = [unpack_schema(part.columns) for part in parts]
            try:
                with durable.disk_errors():
                    if table is None:
                        self._create(topic, schemas)
                    elif self._widen(topic, table, schemas):
                        self._commit(epoch, topic, table, parts, end)
                        break
            except DeltaProtocolError as error:
                raise unknown_feature(target, error) from error
            except (DeltaError, FileNotFoundError) as error:
                conflict = error  # another writer was first, or the answer was lost: look again
                self._tables.pop(topic, None)
        else:
            raise RetryableError(
                f"the Delta table {target} refused {TRIES} commits of {epoch}: {conflict}", code="PEN-2005"
            ) from conflict
        self._committed.add(topic)
        if self._upserts:
            self._tidy(epoch, topic, parts)
        staging.drop_lists(self._targets.root, epoch.pipeline, parts)

    def _is_done(self, epoch: Epoch, topic: Topic, table: Table | None) -> bool:
        marker = table.marker(epoch.pipeline) if table else None
        if marker is None and topic in self._committed:
            raise FatalError(
                f"the Delta table {self._targets.claim(topic)} was dropped or replaced while the pipeline ran",
                code="PEN-5010",
                hint="put it back; or stop, and `penstock offsets reset FILE` to begin anew",
            )
        if not is_committed(marker, epoch):
            return False
        assert table is not None
        assert marker is not None
        table.sync(marker.version)  # who made the entry may have died before the sync
        return True

    def _lost(self, epoch: Epoch, target: Path, parts: Sequence[StagedTopic]) -> Path | None:
        """A file of the receipts that is not there as it was staged."""
        below = _changes(target, epoch.pipeline) if self._upserts else target
        places = ((below / file.path, file.bytes) for part in parts for file in part.files)
        return next((place for place, size in places if not staging.is_there(place, size)), None)

    def _commit(self, epoch: Epoch, topic: Topic, table: Table, parts: Sequence[StagedTopic], end: Positions) -> None:
        if not self._upserts:
            table.commit(epoch, end, [file for part in parts for file in part.files])
            return
        below, schema = _changes(table.path, epoch.pipeline), delta_schema(topic, table.columns())
        key = _one_key(topic, parts)
        changes = [pq.read_table(below / file.path, partitioning=None) for part in parts for file in part.files]
        files = rewrite(topic, table, schema, collapse(changes, key, schema), lambda: self._rewriting(epoch))
        table.commit(epoch, end, files.adds, files.removes)
        staging.drop_lists(self._targets.root, epoch.pipeline, files.staged)

    def _rewriting(self, epoch: Epoch) -> Stage:
        return Stage(
            epoch,
            REWRITER,
            self._targets,
            suffix=self.suffix(),
            begin=self.begin_file,
            place=self.place,
            partition_by=self.config.partition_by,
            target_file_rows=self.config.target_file_rows,
            max_open_files=self.config.max_open_files,
        )

    def _tidy(self, epoch: Epoch, topic: Topic, parts: Sequence[StagedTopic]) -> None:
        """Drop the changes that are applied, and files that a commit which failed or died has written for them."""
        below = _changes(self._targets.claim(topic), epoch.pipeline)
        for part in parts:
            for file in part.files:
                (below / file.path).unlink(missing_ok=True)
        self._sweep(epoch, set(), f"{epoch.stem()}-{REWRITER.partition:05d}-")

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        table = self._table(topic)
        marker = table.marker(pipeline) if table else None
        if marker is not None:
            self._committed.add(topic)
        return marker and CommittedEpoch(incarnation=marker.incarnation, number=marker.number, end=marker.end)

    def sweep(self, epoch: Epoch, keep: Sequence[StagedFiles]) -> None:
        self._sweep(epoch, staging.names(keep))

    def _sweep(self, epoch: Epoch, kept: set[str], lists: str = "") -> None:
        live: dict[Topic, set[str]] = {}

        def is_kept(topic: Topic, place: Path) -> bool:
            if topic not in live:  # whoever asks: a file of the table is never a leftover
                table = self._table(topic)
                live[topic] = {os.path.basename(uri) for uri in table.delta.file_uris()} if table else set()
            return place.name in kept or place.name in live[topic]

        staging.sweep(self._targets.root, epoch, is_kept, lists)

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
        return diff(*(delta_schema("the topic", self._own(schema)) for schema in (old, new)))

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
        table.refuse_what_cannot_be_kept(rewrites=self._upserts)
        self._tables[topic] = table
        return table

    def _create(self, topic: Topic, schemas: Sequence[pa.Schema]) -> None:
        path = self._targets.claim(topic)
        schema = self._own(schemas[0])
        for each in schemas[1:]:
            schema = follow(topic, schema, self._own(each))
        schema = self._fit(topic, schema, self.config.partition_by, schema)
        durable.make_directory(path)
        DeltaTable.create(str(path), schema, mode="ignore", partition_by=list(self.config.partition_by))
        durable.fsync(path / "_delta_log" / f"{0:020d}.json", path / "_delta_log")

    def _widen(self, topic: Topic, table: Table, schemas: Sequence[pa.Schema]) -> bool:
        """True when the table has every column; otherwise they are added, and the marker is to be looked at again."""
        columns = wider = table.columns()
        for each in schemas:
            wider = self._fit(topic, wider, table.partition_by(), self._own(each))
        added = [column for column in wider if column.name not in columns.names]
        if added:
            table.add_columns(pa.schema(added))
        return not added

    def _own(self, schema: pa.Schema) -> pa.Schema:
        """The columns that the table has of a topic's."""
        return pa.schema([schema.field(name) for name in own_columns(schema)]) if self._upserts else schema


def _changes(target: Path, pipeline: str) -> Path:
    """Where the changes of a pipeline stand until they are applied."""
    return target / HIDDEN / quote(pipeline, safe="") / "changes"


def _one_key(topic: Topic, parts: Sequence[StagedTopic]) -> list[str]:
    keys = [key_of(unpack_schema(part.columns)) for part in parts]
    if any(key != keys[0] for key in keys):
        raise SchemaError(
            f"the key of {topic} changes within an epoch: {keys}", code="PEN-4001", hint="set `key` in the sink"
        )
    return keys[0]


def _says_unchanged(rows: pa.RecordBatch) -> bool:
    named = "_unchanged" in rows.schema.names and is_changelog(rows.schema)
    return named and rows.column("_unchanged").null_count < rows.num_rows
