"""The second stage of upserts into Iceberg tables: planned on the driver, done in tasks, committed at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from penstock.connectors.iceberg.apply import Applying, IcebergApplied, IcebergWork, sent_columns
from penstock.connectors.iceberg.columns import Columns
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.table import Table, fork
from penstock.connectors.iceberg.upsert import Contents, Known, Written
from penstock.connectors.lake import lists
from penstock.connectors.lake.commit import Commit
from penstock.connectors.lake.sink import LakeSink
from penstock.connectors.lake.staging import Stage, StagedFiles
from penstock.errors import PlanStale, RetryableError
from penstock.sink import Applied, Epoch, Positions, Task, Topic, Work

if TYPE_CHECKING:
    from penstock.connectors.iceberg.commit import IcebergTarget


class SecondStage:
    """Of one topic."""

    def __init__(self, target: IcebergTarget) -> None:
        self._target = target
        self._known = Known()
        self._doing: Applying | None = None

    def plan(self, commit: Commit) -> list[IcebergWork]:
        """
        The work that the commit of an epoch needs, from the table as it is now.

        None if there is little of it, or if the table gets other types: then the commit does it all, or says why not.
        """
        target = self._target
        table = target.load()
        if target.is_done(commit.epoch, table) or target.lost(commit) is not None:
            return []
        sink = target.sink
        with contextlib.suppress(*target.conflicts), sink.catalog_errors(target.topic):  # the commit looks again
            if table is None:
                target.create(commit.schemas())
            elif fork(table):
                table = None
        table = table or target.load()
        columns = target.columns_after(commit, table) if table is not None else None
        if table is None or columns is None or table.columns().renewed(columns.schema):
            return []
        with sink.catalog_errors(target.topic):
            return self.applying(commit, table, columns).plan(sink.small_rows)

    def applying(self, commit: Commit, table: Table, columns: Columns) -> Applying:
        sink = self._target.sink
        now: pa.Schema | None = sink.context.topic(self._target.topic).source_schema
        return Applying.of(sink.config, commit, table, columns, now, self._known)

    def apply(self, work: IcebergWork, stage: Callable[[], Stage]) -> IcebergApplied:
        """In a task: one piece of work, on the version of the table that the plan saw."""
        target, applying = self._target, self._doing
        if applying is None or applying.changes != work.changes:  # else a piece of the same plan, which shares its keys
            table = target.load()
            if table is None or table.iceberg.metadata_location != work.changes.version:
                raise RetryableError(f"{target.name} is another one than its work was planned for", code="PEN-2005")
            applying = self._doing = Applying(work.changes, target.sink.config, table)
        with target.sink.catalog_errors(target.topic):
            return applying.do(work, stage())

    def commit(self, commit: Commit, table: Table | None) -> None:
        """Name what the tasks have written; it fits only the version that the plan saw."""
        target, sink = self._target, self._target.sink
        self._doing = None
        if table is None or table.iceberg.metadata_location != commit.applied[0].version:
            raise PlanStale(f"{target.name} has changed since its work was planned")
        columns, contents = target.columns_after(commit, table), Contents(table, self._known)
        written = Written(
            [file for each in commit.applied for file in each.deletes],
            [path for each in commit.applied for path in each.dropped],
        )
        if any(each.clears for each in commit.applied):
            written = Written([], list(contents.by_path()))
        self._known.keep_only(contents.data)
        changed = contents.changed(target.path, written, sent_columns(commit, table, sink.config))
        files = [target.data_file(table, columns, file) for each in commit.applied for file in each.adds]
        table.commit(commit.epoch, commit.end, columns, files, sink.config.keep_snapshots, changed=changed)
        # Only now: if a twin has committed, the files of this try are left over.
        lists.drop(target.root, commit.epoch.pipeline, [name for each in commit.applied for name in each.listed])
        target.leave_note(table.columns())


class SecondStageSink(LakeSink[IcebergConfig]):
    """A sink whose upserts are planned, and done in tasks if there is much of them."""

    applied_type = IcebergApplied
    small_rows: ClassVar[int] = 1_000_000
    """Up to this many rows of changes, and of files that must be read for them, an upsert is done on the driver."""

    def plan_apply(self, epoch: Epoch, topic: Topic, receipts: Sequence[StagedFiles]) -> Sequence[Work]:
        parts = [receipt.staged[topic] for receipt in receipts]
        return self.iceberg(topic).second.plan(Commit(epoch, parts)) if self.config.upserts else ()

    def apply(self, epoch: Epoch, work: Work, task: Task) -> IcebergApplied:
        assert isinstance(work, IcebergWork)
        return self.iceberg(work.topic).second.apply(work, lambda: Stage(epoch, task, self.targets, self.spec()))

    def commit_applied(
        self,
        epoch: Epoch,
        topic: Topic,
        receipts: Sequence[StagedFiles],
        end: Positions,
        applied: Sequence[Applied],
    ) -> None:
        self.iceberg(topic).commit(Commit(epoch, [receipt.staged[topic] for receipt in receipts], end, applied))

    def iceberg(self, topic: Topic) -> IcebergTarget:
        found: IcebergTarget = self.target(topic)  # type: ignore[assignment]
        return found
