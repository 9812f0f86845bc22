"""Write topics to Delta tables, appended or applied by key, each epoch exactly once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError
from pyarrow import types
from pydantic import Field, NonNegativeInt

from penstock import durable
from penstock.changes import Op, check_changes, collapse_parts, is_changelog, own_columns
from penstock.config import Secret
from penstock.connectors.delta.columns import StatsPart, as_delta, delta_schema, has_empty_text
from penstock.connectors.delta.rewrite import StagedChanges, rewrite
from penstock.connectors.delta.table import Table, delta_errors, read_metadata, unknown_feature
from penstock.connectors.delta.upkeep import join_small_files, remove_dead_files
from penstock.connectors.lake import staging
from penstock.connectors.lake.staging import (
    HIDDEN,
    ParquetPart,
    StagedFiles,
    StagedTopic,
    StagingConfig,
    StagingSink,
    pack_schema,
    unpack_schema,
)
from penstock.errors import ConfigError, ConnectorError, DataError, FatalError, RetryableError, SchemaError, StagingLost
from penstock.schema import ChangeKind, SchemaChange, key_of, with_key
from penstock.schema.evolution import Policy, diff, follow, refusal, widens
from penstock.sink import CommittedEpoch, Epoch, Positions, SinkContext, Task, Topic, WriteResult, is_committed

logger = logging.getLogger("penstock.delta")

REWRITER = Task(99_999)
"""Whose files the driver's are, in their names."""

FIRST_JOIN = 5
"""Epochs of a run after which small files are first joined, and then every so often: a run may be short."""

TRIES = 20
"""Commits of other writers that one commit gives way to before it fails for a while."""

DELETED = pa.field("_deleted", pa.bool_())
"""Marks rows that are gone, for `soft_delete`; null in rows from before it was set, which are there."""

_MISREAD = re.compile(r"%[0-9A-Fa-f]{2}|\\")
_WITH_ROW = [Op.SEEDED.value, Op.INSERT.value, Op.UPDATE.value]


class DeltaConfig(StagingConfig):
    identity = StagingConfig.identity | {"key"}

    mode: Literal["append", "upsert", "changes"] = "append"
    """How rows are applied: `append` adds them; `upsert` keeps one row per key, as the changes leave it; `changes` adds
    every change with the columns that describe it."""

    key: tuple[str, ...] = ()
    """Columns that make the key of a row, for `upsert`; by default those that the topic's schema names."""

    soft_delete: bool = False
    """For `upsert`: keep deleted rows and mark them in the column `_deleted`; a row that comes again is unmarked. A
    truncate marks, and so writes, the whole table."""

    partition_by: tuple[str, ...] = ()
    """Partition columns of tables that are created; an existing table must have the same."""

    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    """Compression of the Parquet files."""

    optimize_every_epochs: NonNegativeInt = 50
    """After how many epochs of a topic small files of its table are joined, so that commits stay cheap; 0: never."""

    vacuum_every_secs: NonNegativeInt = 3600
    """How often files are removed that the table no longer holds, once they are older than its
    `delta.deletedFileRetentionDuration` (a week by default); 0: never."""

    storage_options: dict[str, str | Secret] = Field(default_factory=dict)
    """Options that the Delta client gets; only local directories can be written yet, also as `file://`."""


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

    Numbers get wider types, and dates become timestamps, without a rewrite: the metadata changes, and older files keep
    their types, which the Delta client, pyarrow, DuckDB and Spark 4 read as the wider ones. The client knows no table
    feature for it, so that none is declared. Partition columns and nested types keep theirs. With `upsert`, a table that is
    copied anew from a clear on takes any other type in the commit that clears it (not with `soft_delete`, and not where the
    table forbids nulls).
    """

    name = "delta"

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        self._stored: dict[Topic, tuple[pa.Schema, list[str]] | None] = {}
        self._keys: dict[Topic, list[str]] = {}
        self._tables: dict[Topic, Table] = {}
        self._committed: set[Topic] = set()
        self._due: dict[Topic, _Due] = defaultdict(_Due)
        self._upserts = self.config.mode == "upsert"
        if self.config.mode != "append":
            self.capabilities = self.capabilities.with_changelog()
        if self._upserts:
            self.capabilities = self.capabilities.with_upsert().with_idempotent()

    def open(self, context: SinkContext = SinkContext()) -> None:
        for option in () if self._upserts else ("key", "soft_delete"):
            if getattr(self.config, option):
                what = f'`{option}` has no meaning for mode = "{self.config.mode}"'
                raise ConfigError(what, code="PEN-1003", hint='use mode = "upsert"')
        super().open(context)
        if _MISREAD.search(str(self._targets.root)):
            what = f"the Delta client reads the %-code or backslash in `path` as another character: {self.config.path}"
            raise ConfigError(what, code="PEN-1003", hint="choose another path")

    def close(self) -> None:
        super().close()
        self._tables.clear()

    @property
    def _options(self) -> dict[str, str]:
        options = self.config.storage_options.items()
        return {name: value if isinstance(value, str) else value.reveal() for name, value in options}

    # -- in tasks: no call into the client that needs its threads, which do not survive a fork ---------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._stored.clear()
        self._keys.clear()
        super().begin_epoch(epoch, task)
        if self._upserts:
            self._stage = self.begin_stage(
                epoch,
                task,
                begin=lambda path, schema: ParquetPart(
                    path, schema, "lz4", use_dictionary=False, write_statistics=False
                ),
                place=lambda target, path: _changes(target, epoch.pipeline) / path,
            )

    def begin_file(self, path: Path, schema: pa.Schema) -> staging.Part:
        return StatsPart(path, schema, self.config.compression, store_schema=False)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None
        self._claim(topic)  # what is staged can only go forward
        rows, discarded = self._as_changes(topic, batch) if self._upserts else self._as_rows(topic, batch)
        if rows.num_rows:
            self._refuse_values(topic, rows)
            self._stage.write(topic, rows)
        return WriteResult(rows.num_rows, rows.nbytes if discarded else batch.nbytes, discarded)

    def _refuse_values(self, topic: Topic, rows: pa.RecordBatch) -> None:
        """Refuse values that the table would not take, since what is staged can only go forward."""
        own = rows.select(own_columns(rows.schema)) if self._upserts else rows
        if self._upserts and is_changelog(rows.schema):
            own = own.filter(pc.is_in(rows.column("_op"), value_set=pa.array(_WITH_ROW)))
        stored = self._stored.get(topic)
        for name in () if stored is None or (self._upserts and _says_unchanged(rows)) else stored[1]:
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

    def pre_commit(self, epoch: Epoch) -> StagedFiles:
        receipt = super().pre_commit(epoch)
        if not self._upserts:
            return receipt
        staged = {
            topic: each.model_copy(
                update={
                    "columns": pack_schema(with_key(unpack_schema(each.columns), self._keys[topic])),
                    "renews": self.context.topic(topic).refilled,
                }
            )
            for topic, each in receipt.staged.items()
        }
        return StagedFiles(staged=staged)

    def _as_rows(self, topic: Topic, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        return self.fit(topic, as_delta(topic, batch), key_of(batch.schema))

    def _as_changes(self, topic: Topic, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
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
        rows, discarded = self.fit(topic, as_delta(topic, self._with_known_types(topic, batch)), key)
        check_changes(pa.Table.from_batches([rows]), key)
        if self._stage.last_schema(topic) not in (None, rows.schema):
            self._stage.end(topic)
        return rows, discarded

    def _with_known_types(self, topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Columns of nulls get the table's types: left out, they would be unchanged and not null."""
        nulls = [name for name in batch.schema.names if types.is_null(batch.schema.field(name).type)]
        known = self.stored(topic) if nulls else None
        for name in nulls:
            if known is not None and name in known.names:
                nothing = pa.nulls(batch.num_rows, known.field(name).type)
                batch = batch.set_column(batch.schema.get_field_index(name), name, nothing)
        return batch

    def stored(self, topic: Topic) -> pa.Schema | None:
        if topic not in self._stored:
            self._stored[topic] = None
            metadata = read_metadata(self._targets.claim(topic) / "_delta_log")
            if metadata is not None:
                columns = pa.schema(DeltaSchema.from_json(metadata["schemaString"]).to_arrow())
                self._refuse_partitions(topic, metadata["partitionColumns"])
                required = [column.name for column in columns if not column.nullable]
                self._stored[topic] = (delta_schema(topic, columns), required)
        known = self._stored[topic]
        return known and known[0]

    def accept(self, topic: Topic, rows: pa.Schema, policy: Policy) -> pa.Schema:
        assert self._stage is not None
        stored = None if self.context.topic(topic).refilled else self.stored(topic)
        staged = self._stage.schema(topic)
        columns = stored or self._own(staged or rows)
        if stored is not None and staged is not None:
            columns = self._follow(topic, stored, self._own(staged))
        return self._follow(topic, columns, self._own(rows), policy)

    def _follow(self, topic: Topic, columns: pa.Schema, rows: pa.Schema, policy: Policy = Policy.EVOLVE) -> pa.Schema:
        """The table's columns and what the rows make of them."""
        if self.config.soft_delete and DELETED.name in rows.names:
            raise SchemaError(
                f"{topic} has a column {DELETED.name!r} of its own, and `soft_delete` needs the name",
                code="PEN-4002",
                hint="rename it in the route's SQL, or leave `soft_delete` out",
            )
        wider = follow(topic, columns, rows, policy, self.widens)
        for name in self.config.partition_by:
            if name in columns.names and wider.field(name).type != columns.field(name).type:
                # Its values stand in paths and in the log, as texts of the old type.
                raise refusal(topic, name, columns.field(name).type, wider.field(name).type, policy, is_wider=True)
        folded: dict[str, str] = {}
        for name in wider.names:
            if folded.setdefault(name.lower(), name) != name:
                raise SchemaError(
                    f"the columns {folded[name.lower()]!r} and {name!r} of {topic} differ in case only",
                    code="PEN-4001",
                    hint="Delta does not tell them apart: rename one in the route's SQL",
                )
        return wider

    def _refuse_partitions(self, topic: Topic, partition_by: Sequence[str]) -> None:
        if list(partition_by) != list(self.config.partition_by):
            raise SchemaError(
                f"the table of {topic} is partitioned by {list(partition_by)}, not by {list(self.config.partition_by)}",
                code="PEN-4002",
                hint=f"set partition_by = {json.dumps(list(partition_by))}",
            )

    def widens(self, old: pa.DataType, new: pa.DataType) -> bool:
        """True for what every reader of Parquet makes of a narrower file: numbers, and dates as midnights."""
        return widens(old, new) and (types.is_primitive(old) or types.is_decimal(old)) and not types.is_boolean(old)

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
                    elif self._renewed(topic, table, parts) is not None:
                        if table.may_hold(schemas):
                            self._commit(epoch, topic, table, parts, end)
                            break
                    elif self._evolve(topic, table, schemas):
                        self._commit(epoch, topic, table, parts, end)
                        break
            except DeltaProtocolError as error:
                raise unknown_feature(target, error) from error
            except (DeltaError, FileNotFoundError, FileExistsError) as error:
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
        self._keep_up(epoch, topic)

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
        renewed = self._renewed(topic, table, parts)
        below, schema = _changes(table.path, epoch.pipeline), renewed or delta_schema(topic, table.columns())
        marker = table.marker(epoch.pipeline)
        sent = {name for part in parts for name in self._own(unpack_schema(part.columns)).names}
        sent.update(marker.columns if marker else ())
        now = self.context.topic(topic).source_schema
        gone = sent.difference(sent if now is None else now.names)
        stored = partial(_as_stored, schema=schema, gone=gone)
        changes = [StagedChanges(below / file.path, stored) for part in parts for file in part.files]
        own = pa.schema([each for each in schema if not self.config.soft_delete or each.name != DELETED.name])
        collapsed = collapse_parts(changes, _one_key(topic, parts), own)
        begin = partial(self.begin_stage, epoch, REWRITER, partition_by=self.config.partition_by)
        if renewed and not collapsed.truncated:  # the part that clears has failed, and the source begins anew
            table.commit(epoch, end, [], columns=sorted(sent))
            return
        files = rewrite(topic, table, schema, collapsed, begin, DELETED.name if self.config.soft_delete else None)
        table.commit(epoch, end, files.adds, files.removes, columns=sorted(sent), schema=renewed)
        staging.drop_lists(self._targets.root, epoch.pipeline, files.staged)

    def _renewed(self, topic: Topic, table: Table, parts: Sequence[StagedTopic]) -> pa.Schema | None:
        """The columns of a table that is cleared if rows come with types that its own cannot follow; else None."""
        old = delta_schema(topic, table.columns())
        if not any(part.renews for part in parts):
            return None
        new = delta_schema(topic, self._own(unpack_schema(parts[0].columns)))
        for part in parts:
            new = self._follow(topic, new, delta_schema(topic, self._own(unpack_schema(part.columns))))
        if self.evaluate_evolution(diff(old, new)):
            return None
        kept = [new.field(each.name) if each.name in new.names else each for each in old]
        return pa.schema([*kept, *(each for each in new if each.name not in old.names)])

    def _renews(self, topic: Topic, changes: Sequence[SchemaChange]) -> bool:
        """True if a table that is cleared can change like this together with its rows, in their commit."""
        table = self._table(topic)
        fixed = [change for change in changes if change.column in self.config.partition_by]
        plain = table is not None and all(each.nullable for each in table.columns())
        return self._upserts and not self.config.soft_delete and plain and not fixed

    def _tidy(self, epoch: Epoch, topic: Topic, parts: Sequence[StagedTopic]) -> None:
        """Drop the changes that are applied, and files that a commit which failed or died has written for them."""
        below = _changes(self._targets.claim(topic), epoch.pipeline)
        for part in parts:
            for file in part.files:
                (below / file.path).unlink(missing_ok=True)
        self._sweep_rewritten(epoch, topic)

    def _keep_up(self, epoch: Epoch, topic: Topic) -> None:
        """Join small files and remove dead ones, when it is time; whatever goes wrong there, the epoch is committed."""
        joins, removes = self._due[topic].joins(self.config), self._due[topic].removes(self.config)
        if not joins and not removes:
            return
        try:
            table = self._table(topic)
            if joins and table is not None and table.may_join():
                self._join(epoch, topic, table)
            if removes and table is not None:
                remove_dead_files(table)
        except (DeltaError, ConnectorError, OSError, pa.ArrowException) as error:
            logger.warning("%s: upkeep of its table is put off: %s", topic, error)
            self._tables.pop(topic, None)

    def _join(self, epoch: Epoch, topic: Topic, table: Table) -> None:
        begin = partial(self.begin_stage, epoch, REWRITER, partition_by=self.config.partition_by)
        try:
            files = join_small_files(topic, table, delta_schema(topic, table.columns()), begin)
            if files.removes:
                table.replace(files.adds, files.removes)
        finally:  # of what was begun, all that the table has not taken goes
            self._sweep_rewritten(epoch, topic)

    def _sweep_rewritten(self, epoch: Epoch, topic: Topic) -> None:
        # Of no other topic: one that is not committed yet may be in the middle of it, in a process that is thought dead.
        self._sweep(epoch, set(), f"{epoch.stem()}-{REWRITER.partition:05d}-", only=topic)

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        table = self._table(topic)
        marker = table.marker(pipeline) if table else None
        if marker is not None:
            self._committed.add(topic)
        return marker and CommittedEpoch(incarnation=marker.incarnation, number=marker.number, end=marker.end)

    def sweep(self, epoch: Epoch, keep: Sequence[StagedFiles]) -> None:
        self._sweep(epoch, staging.names(keep))

    def _sweep(self, epoch: Epoch, kept: set[str], lists: str = "", only: Topic | None = None) -> None:
        live: dict[Topic, set[str]] = {}

        def is_kept(topic: Topic, place: Path) -> bool:
            if topic not in live:  # whoever asks: a file of the table is never a leftover
                table = self._table(topic)
                live[topic] = {os.path.basename(uri) for uri in table.delta.file_uris()} if table else set()
            return place.name in kept or place.name in live[topic]

        staging.sweep(self._targets.root, epoch, is_kept, lists, only)

    def is_seeded(self, topic: Topic) -> bool:
        try:
            seeded = json.loads((self._claim(topic) / HIDDEN / ".seeded").read_bytes())["table"]
        except FileNotFoundError:
            return False
        table = self._table(topic)
        return seeded is None or (table is not None and str(table.delta.metadata().id) == seeded)

    def mark_seeded(self, topic: Topic) -> None:
        table, now = self._table(topic), self.context.topic(topic).source_schema
        if table is None and now is not None:  # no rows came: readers find it empty, and not missing
            # If they have no place there, the first row will say so.
            with durable.disk_errors(), contextlib.suppress(DeltaError, SchemaError):
                self._create(topic, [delta_schema(topic, now)])
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

    def evaluate_evolution(self, changes: Sequence[SchemaChange], refilled: Topic | None = None) -> bool:
        if refilled is not None:
            return self._renews(refilled, changes)
        retyped = [change for change in changes if change.kind is ChangeKind.RETYPED]
        return all(widens(change.new, change.old) or self.widens(change.old, change.new) for change in retyped)

    def apply_evolution(self, topic: Topic, changes: Sequence[SchemaChange]) -> None:
        table = self._table(topic)
        new = pa.schema([(change.column, change.new) for change in changes if change.new is not None])
        # Another writer may be first: then the commit of the rows does it.
        with contextlib.suppress(CommitFailedError, FileExistsError):
            while table is not None and not self._evolve(topic, table, [delta_schema(topic, new)]):
                pass

    def _claim(self, topic: Topic) -> Path:
        """The topic's directory; refused when the client would look for another."""
        path = self._targets.claim(topic)
        if _MISREAD.search(str(path)):
            raise ConfigError(
                f"the Delta client reads the %-code or backslash in {path} as another character, and would not find the table",
                code="PEN-1010",
                hint="route to another name, or choose another path",
            )
        return path

    def _table(self, topic: Topic) -> Table | None:
        """The topic's table at its newest version, or None."""
        known = self._tables.get(topic)
        path = self._claim(topic)
        if known is not None and known.is_the_same():
            with delta_errors(path):
                known.refresh()
            return known
        self._tables.pop(topic, None)
        if not (path / "_delta_log").exists():
            return None
        try:
            with delta_errors(path):
                uri = path.as_uri() if self._options else str(path)
                table = Table(path, DeltaTable(uri, storage_options=self._options or None))
        except TableNotFoundError:
            return None
        table.refuse_what_cannot_be_kept(rewrites=self._upserts)
        self._tables[topic] = table
        return table

    def _create(self, topic: Topic, schemas: Sequence[pa.Schema]) -> None:
        path = self._targets.claim(topic)
        schema = self._own(schemas[0])
        for each in schemas:
            schema = self._follow(topic, schema, self._own(each))
        durable.make_directory(path)
        DeltaTable.create(
            path.as_uri() if self._options else str(path),
            schema.append(DELETED) if self.config.soft_delete else schema,
            mode="ignore",
            partition_by=list(self.config.partition_by),
            storage_options=self._options or None,
        )
        durable.fsync(path / "_delta_log" / f"{0:020d}.json", path / "_delta_log")

    def _evolve(self, topic: Topic, table: Table, schemas: Sequence[pa.Schema]) -> bool:
        """True when the table holds such rows as it is; otherwise it is changed, and the marker is to be looked at again."""
        self._refuse_partitions(topic, table.partition_by())
        columns = wider = delta_schema(topic, table.columns())
        for each in schemas:
            # Tasks have discarded what the table lacked then: what it lacks now is for a person to decide on.
            policy = Policy.FREEZE if self.policy(topic) is not Policy.EVOLVE else Policy.EVOLVE
            wider = self._follow(topic, wider, self._own(each), policy)
        if self.config.soft_delete:
            wider = follow(topic, wider, pa.schema([DELETED]))
        added = [each for each in wider if each.name not in columns.names]
        retyped = [each for each in wider if each.name in columns.names and each.type != columns.field(each.name).type]
        if added:
            table.add_columns(pa.schema(added))
        elif retyped:
            table.widen_columns(pa.schema(retyped))
        return not added and not retyped

    def _own(self, schema: pa.Schema) -> pa.Schema:
        """The columns that the table has of a topic's."""
        return pa.schema([schema.field(name) for name in own_columns(schema)]) if self._upserts else schema


@dataclass
class _Due:
    """When the table of a topic wants upkeep; also soon after a start, since runs may be short."""

    epochs: int = 0
    removed_at: float = field(default_factory=time.monotonic)

    def joins(self, config: DeltaConfig) -> bool:
        self.epochs += 1
        return bool(config.optimize_every_epochs) and self.epochs % config.optimize_every_epochs == min(
            FIRST_JOIN, config.optimize_every_epochs - 1
        )

    def removes(self, config: DeltaConfig) -> bool:
        due = bool(config.vacuum_every_secs) and time.monotonic() - self.removed_at >= config.vacuum_every_secs
        if due:
            self.removed_at = time.monotonic()
        return due


def _changes(target: Path, pipeline: str) -> Path:
    """Where the changes of a pipeline stand until they are applied."""
    return target / HIDDEN / quote(pipeline, safe="") / "changes"


def _as_stored(rows: pa.Table, schema: pa.Schema, gone: Iterable[str]) -> pa.Table:
    """Changes in the types of the table; a column that the topic no longer has is null, and not unchanged."""
    own = set(own_columns(rows.schema))
    fields = [
        schema.field(each.name) if each.name in own and each.name in schema.names else each for each in rows.schema
    ]
    rows = rows.cast(pa.schema(fields))
    for name in sorted(gone):
        if name not in rows.column_names and name in schema.names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, schema.field(name).type))
    return rows


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
