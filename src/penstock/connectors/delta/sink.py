"""Write topics to Delta tables, appended or applied by key, each epoch exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar

import pyarrow as pa
from deltalake.exceptions import DeltaError

from penstock.abilities import first_of
from penstock.connectors.delta.apply import PURGE_ROWS, Applying, DeltaApplied, DeltaWork
from penstock.connectors.delta.client import delta_errors
from penstock.connectors.delta.columns import (
    StatsPart,
    can_widen,
    delta_schema,
    follow_rows,
    new_columns,
    stored_columns,
)
from penstock.connectors.delta.commit import DeltaTarget
from penstock.connectors.delta.config import DeltaConfig
from penstock.connectors.delta.doubles import holds_beyond
from penstock.connectors.delta.files import Log
from penstock.connectors.delta.table import MISREAD, claim
from penstock.connectors.delta.task import DeltaTask
from penstock.connectors.lake.changed import begin_changes, changes_of
from penstock.connectors.lake.commit import Commit
from penstock.connectors.lake.partitions import Directories
from penstock.connectors.lake.sink import LakeSink
from penstock.connectors.lake.staging import FileSpec, Part, Stage, StagedFiles
from penstock.connectors.upsert import check_options
from penstock.errors import ConfigError
from penstock.schema import ChangeKind, SchemaChange
from penstock.schema.evolution import diff, widens_or_doubles
from penstock.sink import Applied, Epoch, Positions, SinkContext, Task, Topic, Work
from penstock.source import Finding
from penstock.store import Place


class Delta(LakeSink[DeltaConfig]):
    """
    Tasks write Parquet files into the table's directory; the driver commits them in one entry of the table's log,
    together with two application transactions: which epoch of this incarnation it is, and a number that grows with
    every commit of the pipeline and names the sidecar (`_penstock/<pipeline>`) that holds the end. For `upsert` the
    tasks' files are changes, kept next to the sidecar; files of the table that hold one of their keys are rewritten, and
    one entry of the log replaces the old files by the new ones. Up to a million rows are rewritten by the driver, more of
    them in tasks. One task alone writes the new rows of an epoch whose changes leave values out (unchanged TOAST values):
    it looks them up in the table.

    With `apply = "vectors"` or `"auto"` old rows are marked in deletion vectors instead, and an epoch costs the same however
    large the table is; `docs/upserts.md` says who reads such tables. The sink then writes the entries of the log itself.
    Files with many deleted rows are written again by the driver, a part after each of some epochs; in tasks if that is too slow.

    Supports exactly-once: an entry is made only at the version after the one whose marker was read. Readers see
    whole epochs. Topics may be committed at the same time. Other writers may append to, compact and vacuum the table
    meanwhile. `changes` adds the capability changelog, and `upsert` upsert, changelog and idempotent.

    Numbers get wider types, and dates become timestamps, without a rewrite: the metadata changes, and older files keep
    their types, which the Delta client, pyarrow, DuckDB and Spark 4 read as the wider ones. The client knows no table
    feature for it, so that none is declared. Partition columns and nested types keep theirs. With `upsert`, a table that is
    cleared and copied again takes any other type in the commit that clears it (not with `soft_delete`, and not where the
    table forbids nulls).
    """

    name = "delta"
    applied_type = DeltaApplied
    small_rows: ClassVar[int] = 1_000_000
    """Up to this many rows of changes, and of files that may hold their keys, an upsert is done on the driver: about a second."""

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__(config)
        self._applying: Applying | None = None
        self.needs_apply = config.upserts
        if self.config.mode != "append":
            self.capabilities = self.capabilities.with_changelog()
        if self.config.upserts:
            self.capabilities = self.capabilities.with_upsert().with_idempotent()

    def open(self, context: SinkContext = SinkContext()) -> None:
        check_options(self.config)
        super().open(context)
        if MISREAD.search(str(self.targets.root)):
            what = f"the Delta client reads the %-code or backslash in `path` as another character: {self.config.path}"
            raise ConfigError(what, code="PEN-1003", hint="choose another path")

    def close(self) -> None:
        for target in self._known.values():
            assert isinstance(target, DeltaTarget)
            target.upkeep.close()
        super().close()

    def check(self) -> Sequence[Finding]:
        found = super().check()
        if not self.config.makes_vectors:
            return found
        what = (
            "old rows are marked in deletion vectors: `DeltaTable.count()` counts them, `to_pyarrow_table()` refuses the "
            "table, and `vacuum(full=True)` of deltalake destroys it (docs/upserts.md)"
        )
        if self.config.partition_by:
            what += (
                "; polars 2.1 shows deleted rows too in partitions whose value has other characters than letters of ASCII, "
                "digits and `_.-`"
            )
        return (*found, Finding(True, what))

    def spec(self) -> FileSpec:
        return FileSpec(
            begin=self._begin_file,
            layout=Directories(self.config.partition_by),
            target_file_rows=self.config.target_file_rows,
            max_open_files=self.config.max_open_files,
            widens=can_widen,
        )

    def task(self, epoch: Epoch, task: Task) -> DeltaTask:
        spec = self.spec()
        if self.config.upserts:
            place = lambda target, path: changes_of(target, epoch.pipeline) / path  # noqa: E731
            spec = replace(spec, begin=begin_changes, place=place, layout=Directories())
        return DeltaTask(self, Stage(epoch, task, self.targets, spec))

    def make_target(self, topic: Topic) -> DeltaTarget:
        return DeltaTarget(self, topic)

    def _delta(self, topic: Topic) -> DeltaTarget:
        target = self.target(topic)
        assert isinstance(target, DeltaTarget)
        return target

    def _begin_file(self, path: Place, schema: pa.Schema) -> Part:
        return StatsPart(path, schema, self.config.compression, store_schema=False)

    # -- the second stage of upserts -------------------------------------------------------------------------------

    def plan_apply(self, epoch: Epoch, topic: Topic, receipts: Sequence[StagedFiles]) -> Sequence[Work]:
        if not self.config.upserts:
            return ()
        target, commit = self._delta(topic), Commit(epoch, [receipt.staged[topic] for receipt in receipts])
        try:
            return target.plan(commit)
        except DeltaError:  # somebody has cleaned the log up, and the client still reads entries of the loaded version
            target.forget()
        with delta_errors(target.path):
            return target.plan(commit)

    def apply(self, epoch: Epoch, work: Work, task: Task) -> DeltaApplied:
        assert isinstance(work, DeltaWork)
        applying = self._applying
        if applying is None or applying.upsert != work.upsert:  # else a piece of the same plan, which shares its keys
            applying = self._applying = Applying(work.upsert, claim(self.targets, work.topic))
        spec = self.spec()
        if work.purges:  # the next purges of these rows are small ones
            spec = replace(spec, target_file_rows=min(spec.target_file_rows, PURGE_ROWS))
        return applying.do(work, lambda: Stage(epoch, task, self.targets, spec))

    def commit_applied(
        self,
        epoch: Epoch,
        topic: Topic,
        receipts: Sequence[StagedFiles],
        end: Positions,
        applied: Sequence[Applied],
    ) -> None:
        self._applying = None
        self._delta(topic).commit(Commit(epoch, [receipt.staged[topic] for receipt in receipts], end, applied))

    # -- schemas ---------------------------------------------------------------------------------------------------

    def schema(self, topic: Topic) -> pa.Schema | None:
        return super().schema(topic) if self._task is None else self._task.known(topic)

    def check_columns(self, topic: Topic, columns: pa.Schema) -> None:
        new = delta_schema(topic, stored_columns(self.config, columns))
        follow_rows(topic, self.config, self.schema(topic) or new, new, self.policy(topic))

    def diff_schemas(self, old: pa.Schema, new: pa.Schema) -> Sequence[SchemaChange]:
        before, after = (delta_schema("the topic", stored_columns(self.config, schema)) for schema in (old, new))
        return diff(before, new_columns(before, after))

    def evaluate_evolution(self, changes: Sequence[SchemaChange], refilled: Topic | None = None) -> bool:
        if refilled is not None:
            target = self._delta(refilled)
            return target.evolution.can_replace_types(target.load(), changes)
        retyped = [change for change in changes if change.kind is ChangeKind.RETYPED]
        return all(widens_or_doubles(change.new, change.old) or can_widen(change.old, change.new) for change in retyped)

    def read_topic(self, topic: Topic) -> pa.Table | None:
        table = self._delta(topic).load()
        if table is None:
            return None
        schema = delta_schema(topic, table.columns())
        oldest_first = reversed(Log(table).files())  # the log names the newest first
        pieces = [rows for file in oldest_first for rows in file.read(table.path, schema)]
        return pa.concat_tables([schema.empty_table(), *pieces])

    def first_rows(self, topic: Topic, rows: int) -> pa.Table | None:
        table = self._delta(topic).load()
        if table is None:
            return None
        schema = delta_schema(topic, table.columns())
        oldest_first = reversed(Log(table).files())  # the log names the newest first
        pieces = (piece for file in oldest_first for piece in file.read(table.path, schema))
        return first_of(chain([schema.empty_table()], pieces), rows)

    def can_be_double(self, topic: Topic, column: str) -> bool:
        if column in (*self.config.partition_by, *(self.config.key or ())):
            return False
        table = self._delta(topic).load()
        known = delta_schema(topic, table.columns()) if table is not None else pa.schema([])
        return table is None or column not in known.names or not holds_beyond(table, known, column)

    def apply_evolution(self, topic: Topic, changes: Sequence[SchemaChange]) -> None:
        target = self._delta(topic)
        target.evolution.evolve_early(target.load(), changes)
