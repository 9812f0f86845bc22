"""The driver's side of a Delta table: create it, evolve it, commit to it, keep it cheap to commit to."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError

from penstock import durable
from penstock.connectors.delta.apply import NO_TABLE, Applying, DeltaWork, Upsert, changes_of
from penstock.connectors.delta.columns import MARK, delta_schema, follow_rows, refuse_partitions, stored_columns
from penstock.connectors.delta.files import Log
from penstock.connectors.delta.table import Table, claim, delta_errors, unknown_feature
from penstock.connectors.delta.upkeep import Due, join_small_files, remove_dead_files
from penstock.connectors.lake import lists
from penstock.connectors.lake.commit import Commit, LakeTarget
from penstock.connectors.lake.staging import Stage, StagedFile
from penstock.connectors.lake.targets import HIDDEN
from penstock.connectors.upsert import gone_columns, one_key
from penstock.errors import ConnectorError, PlanStale, SchemaError
from penstock.schema import SchemaChange, key_of
from penstock.schema.evolution import Policy, diff, follow
from penstock.sink import CommittedEpoch, Epoch, Task, Topic

if TYPE_CHECKING:
    from penstock.connectors.delta.sink import Delta

logger = logging.getLogger("penstock.delta")

REWRITER = Task(99_999)
"""Task number in the names of files that the driver writes."""


class DeltaTarget(LakeTarget[Table]):
    """One topic's table."""

    conflicts = (DeltaError, FileNotFoundError, FileExistsError)

    def __init__(self, sink: Delta, topic: Topic) -> None:
        super().__init__(topic, claim(sink.targets, topic), sink.targets.root)
        self.sink = sink
        self.config = sink.config
        self._table: Table | None = None
        self._due = Due()

    @property
    def name(self) -> str:
        return f"the Delta table {self.path}"

    # -- the commit ------------------------------------------------------------------------------------------------

    def load(self) -> Table | None:
        known, self._table = self._table, None
        if known is not None and known.is_the_same():
            with delta_errors(self.path):
                known.refresh()
            self._table = known
        elif (self.path / "_delta_log").exists():
            with contextlib.suppress(TableNotFoundError), delta_errors(self.path):
                table = Table(self.path, DeltaTable(self._uri, storage_options=self.config.client_options))
                table.refuse_unsupported(rewrites=self.config.upserts)
                self._table = table
        return self._table

    def forget(self) -> None:
        self._table = None

    def marker(self, loaded: Table, pipeline: str) -> CommittedEpoch | None:
        return loaded.marker(pipeline)

    def settle(self, loaded: Table, epoch: Epoch) -> None:
        marker = loaded.marker(epoch.pipeline)
        assert marker is not None
        loaded.sync(marker.version)

    def place(self, commit: Commit, file: StagedFile) -> Path:
        below = changes_of(self.path, commit.epoch.pipeline) if self.config.upserts else self.path
        return below / file.path

    def attempt(self, commit: Commit, loaded: Table | None) -> bool:
        try:
            if commit.applied:
                self._refuse_stale(commit, loaded)
            if loaded is None:
                self._create(commit.schemas())
                return False
            renewed = self._renewed(loaded, commit)
            is_ready = loaded.may_hold(commit.schemas()) if renewed else self._evolve(loaded, commit.schemas())
            if is_ready and commit.applied:
                self._commit_applied(commit, loaded)
            elif is_ready and self.config.upserts:
                self._upsert(commit, loaded, renewed)
            elif is_ready:
                loaded.commit(commit.epoch, commit.end, commit.files)
            return is_ready
        except DeltaProtocolError as error:
            raise unknown_feature(self.path, error) from error

    def tidy(self, commit: Commit) -> None:
        if self.config.upserts:  # the changes are applied
            for file in commit.files:
                self.place(commit, file).unlink(missing_ok=True)
            lists.drop(self.root, commit.epoch.pipeline, [name for each in commit.applied for name in each.listed])
            self._sweep_rewritten(commit.epoch)

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        self._keep_up(commit.epoch)

    # -- upserts ---------------------------------------------------------------------------------------------------

    def plan(self, commit: Commit) -> list[DeltaWork]:
        """
        The work that the commit of an epoch needs, from the table as it is now.

        None if there is little of it, if the table must be altered first, or if it gets other types: then the commit does
        it all.
        """
        table = self.load()
        if self.is_done(commit.epoch, table) or self.lost(commit) is not None or any(p.renews for p in commit.parts):
            return []
        if table is None:
            schema = self._joined(commit.schemas())
        elif any(self._evolution(table, commit.schemas())):
            return []
        else:
            schema = delta_schema(self.topic, table.columns())
        log = Log(table) if table is not None else None
        return self._applying(commit, table, schema).plan(log, self.sink.small_rows)

    def _applying(self, commit: Commit, table: Table | None, schema: pa.Schema) -> Applying:
        upsert = Upsert.of(
            schema,
            topic=self.topic,
            pipeline=commit.epoch.pipeline,
            version=table.delta.version() if table is not None else NO_TABLE,
            changes=[file.path for file in commit.files],
            required=[each.name for each in table.columns() if not each.nullable] if table is not None else (),
            gone=gone_columns(self._sent(commit, table), self.sink.context.topic(self.topic).source_schema),
            key=one_key(self.topic, [key_of(each) for each in commit.schemas()]),
            soft_delete=self.config.soft_delete,
        )
        return Applying(upsert, self.path)

    def _sent(self, commit: Commit, table: Table | None) -> list[str]:
        """Every column of the topic that ever came, this epoch's included."""
        marker = table.marker(commit.epoch.pipeline) if table is not None else None
        now = {name for each in commit.schemas() for name in stored_columns(self.config, each).names}
        return sorted(now.union(marker.columns if marker else ()))

    def _upsert(self, commit: Commit, table: Table, renewed: pa.Schema | None) -> None:
        """Do all the work here, and commit; `renewed` are the new columns of a cleared table."""
        applying = self._applying(commit, table, renewed or delta_schema(self.topic, table.columns()))
        changes, log, sent = applying.whole(), Log(table), self._sent(commit, table)
        if renewed and not changes.truncated:  # the part that clears has failed, and the source starts it again
            table.commit(commit.epoch, commit.end, [], columns=sent)
            return
        files = applying.all_at_once(changes, log, partial(self._begin, commit.epoch))
        table.commit(commit.epoch, commit.end, files.adds, files.removes, columns=sent, schema=renewed)
        lists.drop(self.root, commit.epoch.pipeline, files.listed)

    def _refuse_stale(self, commit: Commit, table: Table | None) -> None:
        """The applied files fit only the version that the plan saw; for a table that was missing then, an empty one."""
        planned, version = commit.applied[0].version, table.delta.version() if table is not None else NO_TABLE
        if planned == NO_TABLE and table is not None:
            is_stale = version > 0 or bool(table.delta.file_uris())
        else:
            is_stale = version != planned
        if is_stale or (table is not None and any(self._evolution(table, commit.schemas()))):
            raise PlanStale(f"{self.name} is at version {version}, and the work was planned for {planned}")

    def _commit_applied(self, commit: Commit, table: Table) -> None:
        adds = [file for each in commit.applied for file in each.adds]
        removes = [file for each in commit.applied for file in each.removes]
        if any(each.clears for each in commit.applied):
            removes = [file.removed() for file in Log(table).files()]
        table.commit(commit.epoch, commit.end, adds, removes, columns=self._sent(commit, table))

    def _begin(self, epoch: Epoch) -> Stage:
        """A stage for files that the driver writes itself."""
        return Stage(epoch, REWRITER, self.sink.targets, self.sink.spec())

    # -- columns ---------------------------------------------------------------------------------------------------

    def schema(self) -> pa.Schema | None:
        table = self.load()
        return table and table.columns()

    def can_replace_types(self, changes: Sequence[SchemaChange]) -> bool:
        """True if columns can get any other types in the commit that clears the table."""
        table = self.load()
        fixed = [change for change in changes if change.column in self.config.partition_by]
        plain = table is not None and all(each.nullable for each in table.columns())
        return self.config.upserts and not self.config.soft_delete and plain and not fixed

    def evolve_early(self, new: pa.Schema) -> None:
        """Add and widen columns before the rows come, so that tasks see them."""
        table = self.load()
        # If another writer is first, the commit of the rows evolves the table.
        with contextlib.suppress(CommitFailedError, FileExistsError):
            while table is not None and not self._evolve(table, [delta_schema(self.topic, new)]):
                pass

    def _renewed(self, table: Table, commit: Commit) -> pa.Schema | None:
        """The new columns of a table that is cleared and then filled with types that its own cannot follow; else None."""
        if not any(part.renews for part in commit.parts):
            return None
        rows = [delta_schema(self.topic, stored_columns(self.config, each)) for each in commit.schemas()]
        old, new = delta_schema(self.topic, table.columns()), rows[0]
        for each in rows:
            new = follow_rows(self.topic, self.config, new, each)
        if self.sink.evaluate_evolution(diff(old, new)):
            return None
        kept = [new.field(each.name) if each.name in new.names else each for each in old]
        return pa.schema([*kept, *(each for each in new if each.name not in old.names)])

    def _joined(self, schemas: Sequence[pa.Schema]) -> pa.Schema:
        """The columns of a table that is created for such rows."""
        schema = stored_columns(self.config, schemas[0])
        for each in schemas:
            schema = follow_rows(self.topic, self.config, schema, stored_columns(self.config, each))
        return schema.append(MARK) if self.config.soft_delete else schema

    def _create(self, schemas: Sequence[pa.Schema]) -> None:
        durable.make_directory(self.path)
        DeltaTable.create(
            self._uri,
            self._joined(schemas),
            mode="ignore",
            partition_by=list(self.config.partition_by),
            storage_options=self.config.client_options,
        )
        durable.fsync(self.path / "_delta_log" / f"{0:020d}.json", self.path / "_delta_log")

    def _evolution(self, table: Table, schemas: Sequence[pa.Schema]) -> tuple[list[pa.Field], list[pa.Field]]:
        """The columns that the table lacks for such rows, and those that need a wider type."""
        refuse_partitions(self.topic, self.config, table.partition_by())
        columns = wider = delta_schema(self.topic, table.columns())
        # Tasks have discarded what the table lacked then: what it lacks only now is for a person to decide.
        policy = Policy.FREEZE if self.sink.policy(self.topic) is not Policy.EVOLVE else Policy.EVOLVE
        for each in schemas:
            wider = follow_rows(self.topic, self.config, wider, stored_columns(self.config, each), policy)
        if self.config.soft_delete:
            wider = follow(self.topic, wider, pa.schema([MARK]))
        known = [each for each in wider if each.name in columns.names]
        added = [each for each in wider if each.name not in columns.names]
        return added, [each for each in known if each.type != columns.field(each.name).type]

    def _evolve(self, table: Table, schemas: Sequence[pa.Schema]) -> bool:
        """True if the table can hold such rows; False if it was altered, and its marker must be read again."""
        added, retyped = self._evolution(table, schemas)
        if added:
            table.add_columns(pa.schema(added))
        elif retyped:
            table.widen_columns(pa.schema(retyped))
        return not added and not retyped

    @property
    def _uri(self) -> str:
        return self.path.as_uri() if self.config.client_options else str(self.path)

    # -- seeding and upkeep ----------------------------------------------------------------------------------------

    def is_seeded(self) -> bool:
        try:
            seeded = json.loads((self.path / HIDDEN / ".seeded").read_bytes())["table"]
        except FileNotFoundError:
            return False
        table = self.load()
        return seeded is None or (table is not None and str(table.delta.metadata().id) == seeded)

    def mark_seeded(self, now: pa.Schema | None) -> None:
        table = self.load()
        if table is None and now is not None:  # no rows came: readers find an empty table, not a missing one
            # If the table cannot hold such columns, the first row will say so.
            with durable.disk_errors(), contextlib.suppress(DeltaError, SchemaError):
                self._create([delta_schema(self.topic, now)])
            table = self.load()
        durable.make_directory(self.path / HIDDEN)
        seeded = {"table": str(table.delta.metadata().id) if table else None}
        durable.write_atomic(self.path / HIDDEN / ".seeded", durable.canonical(seeded).encode())

    def live_files(self, pipeline: str) -> set[str]:
        table = self.load()
        return {os.path.basename(uri) for uri in table.delta.file_uris()} if table else set()

    def _keep_up(self, epoch: Epoch) -> None:
        """Join small files and remove dead ones, when it is time. Whatever goes wrong, the epoch is committed."""
        joins, removes = self._due.joins(self.config), self._due.removes(self.config)
        if not joins and not removes:
            return
        try:
            table = self.load()
            if joins and table is not None and table.may_join():
                self._join(epoch, table)
            if removes and table is not None:
                remove_dead_files(table)
        except (DeltaError, ConnectorError, OSError, pa.ArrowException) as error:
            logger.warning("%s: upkeep of its table is postponed: %s", self.topic, error)
            self.forget()

    def _join(self, epoch: Epoch, table: Table) -> None:
        try:
            schema = delta_schema(self.topic, table.columns())
            files = join_small_files(self.topic, table, schema, partial(self._begin, epoch))
            if files.removes:
                table.replace(files.adds, files.removes)
        finally:  # files that were begun and that the table has not taken
            self._sweep_rewritten(epoch)

    def _sweep_rewritten(self, epoch: Epoch) -> None:
        """Remove files that the driver has written for this topic and that the table does not name."""
        live: set[str] | None = None

        def is_kept(_: Topic, place: Path) -> bool:
            nonlocal live
            live = self.live_files(epoch.pipeline) if live is None else live
            return place.name in live

        lists.sweep(self.root, epoch, is_kept, f"{epoch.stem()}-{REWRITER.partition:05d}-", only=self.topic)
