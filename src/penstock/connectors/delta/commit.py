"""The driver's side of a Delta table: create it, evolve it, commit to it, keep it cheap to commit to."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from penstock import durable, store
from penstock.connectors.delta.apply import NO_TABLE, Applying, DeltaWork, Known, sent_columns
from penstock.connectors.delta.client import client_options, delta_errors, store_errors
from penstock.connectors.delta.columns import delta_schema
from penstock.connectors.delta.config import DeltaConfig
from penstock.connectors.delta.entries import wants_vectors
from penstock.connectors.delta.evolve import Evolution
from penstock.connectors.delta.files import Log
from penstock.connectors.delta.hint import Hint
from penstock.connectors.delta.table import Table, claim, enable_vectors, is_read, refuse_unsupported
from penstock.connectors.delta.upkeep import Upkeep
from penstock.connectors.lake import lists
from penstock.connectors.lake.changed import changes_of
from penstock.connectors.lake.commit import Commit, LakeTarget
from penstock.connectors.lake.staging import StagedFile
from penstock.connectors.lake.targets import HIDDEN
from penstock.errors import PlanStale, SchemaError
from penstock.sink import CommittedEpoch, Epoch, Topic
from penstock.store import Place

if TYPE_CHECKING:
    from penstock.connectors.delta.sink import Delta


class DeltaTarget(LakeTarget[Table]):
    """One topic's table."""

    conflicts = (DeltaError, FileNotFoundError, FileExistsError)

    def __init__(self, sink: Delta, topic: Topic) -> None:
        super().__init__(topic, claim(sink.targets, topic), sink.targets.root)
        self.sink = sink
        self.config = sink.config
        self.evolution = Evolution(sink, topic, self.path)
        self.upkeep = Upkeep(self)
        self._table: Table | None = None
        self._options: dict[str, str] | None = None
        self.known = Known()
        self._planned: Applying | None = None
        self._hint = Hint(self.path)

    @property
    def name(self) -> str:
        return f"the Delta table {self.path}"

    # -- the commit ------------------------------------------------------------------------------------------------

    def load(self) -> Table | None:
        known, self._table = self._table, None
        options = client_options(
            self.path
        )  # the client of a loaded table would keep credentials that have been renewed
        is_same, self._options = options == self._options, options
        if known is not None and is_same and known.is_the_same():
            if not is_read(known):
                with delta_errors(self.path):
                    known.refresh()
            self._table = known
        elif not store.is_local(self.path) or (self.path / "_delta_log").exists():
            with contextlib.suppress(TableNotFoundError), delta_errors(self.path):
                table = Table(self.path, DeltaTable(self.evolution.uri, storage_options=options))
                refuse_unsupported(table, rewrites=self.config.upserts)
                self._table = table
        self._hint.leave(self._table and self._table.delta)
        return self._table

    def look(self, commit: Commit) -> Table | None:
        """While rows with the same columns are added and nobody else writes, the client need not read the log."""
        known = self._table
        if known is not None and _takes(self.config, known, commit) and known.is_newest():
            return known
        return self.load()

    def forget(self) -> None:
        self._table = None

    def marker(self, loaded: Table, pipeline: str) -> CommittedEpoch | None:
        return loaded.marker(pipeline)

    def settle(self, loaded: Table, epoch: Epoch) -> None:
        marker = loaded.marker(epoch.pipeline)
        assert marker is not None
        loaded.sync(marker.version)

    def place(self, commit: Commit, file: StagedFile) -> Place:
        below = changes_of(self.path, commit.epoch.pipeline) if self.config.upserts else self.path
        return below / file.path

    def attempt(self, commit: Commit, loaded: Table | None) -> bool:
        with store_errors(self.path):
            if commit.applied:
                self._refuse_stale(commit, loaded)
            if loaded is None:
                self.evolution.create(commit.schemas())
                return False
            if _takes(self.config, loaded, commit):
                _append(commit, loaded)
                return True
            renewed = self.evolution.renewed(loaded, commit)
            is_ready = loaded.may_hold(commit.schemas()) if renewed else self.evolution.evolve(loaded, commit.schemas())
            if is_ready and _lacks_vectors(self.config, loaded):
                enable_vectors(loaded)
                return False
            if is_ready and commit.applied:
                self._commit_applied(commit, loaded)
            elif is_ready and self.config.upserts:
                self._upsert(commit, loaded, renewed)
            elif is_ready:
                _append(commit, loaded)
            return is_ready

    def tidy(self, commit: Commit) -> None:
        if self.config.upserts:  # the changes are applied
            store.delete(self.place(commit, file) for file in commit.files)
            self.upkeep.sweep(commit.epoch)

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        self.upkeep.run(commit.epoch, self._table)

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
        if table is not None and _lacks_vectors(self.config, table):
            with contextlib.suppress(*self.conflicts):  # the commit looks again
                enable_vectors(table)
            table = self.load()
        if table is None:
            schema = self.evolution.joined(commit.schemas())
        elif any(self.evolution.lacking(table, commit.schemas())):
            return []
        else:
            schema = delta_schema(self.topic, table.columns())
        log = self.known.log_of(table) if table is not None else None
        applying = self._applying(commit, table, schema)
        work = applying.plan(log, self.sink.small_rows)
        self._planned = applying if not work else None
        return work

    def _applying(self, commit: Commit, table: Table | None, schema: pa.Schema) -> Applying:
        now = self.sink.context.topic(self.topic).source_schema
        return Applying.of(self.config, self.topic, self.path, commit, table, schema, now, self.known)

    def _upsert(self, commit: Commit, table: Table, renewed: pa.Schema | None) -> None:
        """Do all the work here, and commit; `renewed` are the new columns of a cleared table."""
        planned, self._planned = self._planned, None
        applying = planned if planned and renewed is None and _is_for(planned, commit, table) else None
        applying = applying or self._applying(commit, table, renewed or delta_schema(self.topic, table.columns()))
        changes, log, sent = applying.whole(), self.known.log_of(table), sent_columns(self.config, commit, table)
        if renewed and not changes.truncated:  # the part that clears has failed, and the source starts it again
            table.commit(commit.epoch, commit.end, [], columns=sent)
            return
        self.known.keep_only(log.files())
        files = applying.all_at_once(changes, log, partial(self.upkeep.begin, commit.epoch))
        table.commit(
            commit.epoch, commit.end, files.adds, files.removes, columns=sent, schema=renewed, marked=files.marked
        )
        lists.drop(self.root, commit.epoch.pipeline, files.listed)

    def _refuse_stale(self, commit: Commit, table: Table | None) -> None:
        """The applied files fit only the version that the plan saw; for a table that was missing then, an empty one."""
        planned, version = commit.applied[0].version, table.delta.version() if table is not None else NO_TABLE
        if planned == NO_TABLE and table is not None:
            is_stale = version > 0 or bool(table.delta.file_uris())
        else:
            is_stale = version != planned
        if is_stale or (table is not None and any(self.evolution.lacking(table, commit.schemas()))):
            raise PlanStale(f"{self.name} is at version {version}, and the work was planned for {planned}")

    def _commit_applied(self, commit: Commit, table: Table) -> None:
        adds = [file for each in commit.applied for file in each.adds]
        removes = [file for each in commit.applied for file in each.removes]
        marked = [each for part in commit.applied for each in part.marked]
        if any(each.clears for each in commit.applied):
            removes, marked = [file.removed() for file in Log(table).files()], []
        sent = sent_columns(self.config, commit, table)
        table.commit(commit.epoch, commit.end, adds, removes, columns=sent, marked=marked)
        # Only now: if a twin has committed, the files of this try are left over.
        lists.drop(self.root, commit.epoch.pipeline, [name for each in commit.applied for name in each.listed])

    def schema(self) -> pa.Schema | None:
        table = self.load()
        return table and table.columns()

    # -- what else the sink asks -----------------------------------------------------------------------------------

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
            with durable.disk_errors(), store_errors(self.path), contextlib.suppress(DeltaError, SchemaError):
                self.evolution.create([delta_schema(self.topic, now)])
            table = self.load()
        store.make_directory(self.path / HIDDEN)
        seeded = {"table": str(table.delta.metadata().id) if table else None}
        store.put(self.path / HIDDEN / ".seeded", durable.canonical(seeded).encode())

    def live_files(self, pipeline: str) -> set[str]:
        table = self.load()
        if table is None:
            return set()
        vectors = table.entries.vector_files() if self.config.upserts and table.has_vectors() else ()
        return {os.path.basename(name) for name in (*table.delta.file_uris(), *vectors)}


def _is_for(planned: Applying, commit: Commit, table: Table) -> bool:
    """True if the plan saw this very version of the table, and these changes."""
    files = tuple(file.path for file in commit.files)
    return (planned.upsert.version, planned.upsert.changes) == (table.delta.version(), files)


def _columns(commit: Commit) -> frozenset[str]:
    """The packed columns of the staged rows; empty if they have others than the table can follow."""
    return (
        frozenset() if any(part.renews for part in commit.parts) else frozenset(part.columns for part in commit.parts)
    )


def _takes(config: DeltaConfig, table: Table, commit: Commit) -> bool:
    """True if the last version added rows with the same columns, so that nothing must be altered for these."""
    return not config.upserts and bool(table.took) and table.took == _columns(commit)


def _append(commit: Commit, table: Table) -> None:
    version = table.version + 1
    table.commit(commit.epoch, commit.end, commit.files)
    table.took = _columns(commit) if table.version == version else None


def _lacks_vectors(config: DeltaConfig, table: Table) -> bool:
    """True if the table lacks deletion vectors and the options ask for them."""
    return config.upserts and config.apply == "vectors" and not wants_vectors(table.delta)
