"""
An upsert in two steps: a plan that says which files may hold the changed keys, and work that finds and removes their rows.

Say that an epoch changes a million keys of a table with 100 files, of which two have many deleted rows. The plan is one
piece of work for each of the two, which writes it again without them; some pieces for the other files, each of which
writes one delete file; and one piece that writes the new rows. The pieces run in tasks. The commit then names their
files, on the very version of the table that the plan saw. An epoch that is small, on a table whose keys are known, has
no plan: the driver does it in the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from penstock import store
from penstock.changes import CHANGE_FIELDS
from penstock.changes.collapse import Collapsed
from penstock.changes.streamed import collapse_parts, shares
from penstock.connectors.iceberg.columns import Columns, iceberg_schema
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.table import Table
from penstock.connectors.iceberg.upsert import (
    Contents,
    DeleteFile,
    Known,
    TableFile,
    Upsert,
    index_of,
    key_columns,
    own_rows,
)
from penstock.connectors.iceberg.worn import group_of, joined, worst_first
from penstock.connectors.lake.changed import StagedChanges, as_stored, changes_of
from penstock.connectors.lake.commit import Commit
from penstock.connectors.lake.staging import Stage, StagedFile
from penstock.connectors.upsert import DELETED, gone_columns, one_key
from penstock.errors import RetryableError
from penstock.schema import key_of
from penstock.sink import Applied, Topic, Work

PIECE_BYTES = 32 << 20
"""About how much of the table one piece of work reads."""

PIECE_DEAD = 4_000_000
"""About how many deleted rows one piece of work names in a delete file."""

PURGE_ROWS = 1_000_000
"""Most rows of data files that one epoch writes again because of their deleted rows, but always one file."""

SHARE_ROWS = 2_000_000
"""About how many changes one piece of work collapses and writes. Each reads the keys of all changes."""


class Changes(BaseModel):
    """The changes of one epoch and the table that they go to; small, picklable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: Topic
    pipeline: str
    version: str
    """The metadata file of the table that the plan saw."""
    staged: tuple[str, ...]
    """Staged files, in the order of the changes."""
    columns: str
    """The columns of the table after the commit, as `Columns` writes them."""
    gone: tuple[str, ...]
    """Columns that the topic no longer has."""
    key: tuple[str, ...]


class IcebergWork(Work):
    changes: Changes
    files: tuple[str, ...] = ()
    """Data files of the table."""
    share: int | None = None
    """Write this share of the new rows; None: remove old rows from the files."""
    shares: int = 1
    purges: bool = False
    """Write the files again without their deleted rows, instead of naming these."""
    drops: tuple[str, ...] = ()
    """Delete files that go: what they say of these files is written again."""
    merges: bool = False
    """Name all deleted rows of the files, and not only the new ones."""


class IcebergApplied(Applied):
    version: str
    clears: bool = False
    """The changes empty the table first: all its files go."""
    adds: tuple[StagedFile, ...] = ()
    deletes: tuple[DeleteFile, ...] = ()
    dropped: tuple[str, ...] = ()
    """Files of the table that go."""
    listed: tuple[str, ...] = ()
    """The lists that name the new files, to be dropped after the commit."""

    def names(self) -> set[str]:
        """The names of all new files."""
        paths = [*(each.path for each in self.adds), *(each.path for each in self.deletes)]
        return {path.rpartition("/")[2] for path in paths}


@dataclass(frozen=True)
class Applying:
    """An upsert at the place where it is planned or done: on the driver or in a task."""

    changes: Changes
    config: IcebergConfig
    table: Table
    known: Known = field(default_factory=Known)
    """What this process remembers of the table."""

    @classmethod
    def of(
        cls, config: IcebergConfig, commit: Commit, table: Table, columns: Columns, now: pa.Schema | None, known: Known
    ) -> Applying:
        """The changes of a staged epoch, for the loaded table; the columns of the source are `now`."""
        sent = sent_columns(commit, table, config)
        changes = Changes(
            topic=table.topic,
            pipeline=commit.epoch.pipeline,
            version=table.iceberg.metadata_location,
            staged=tuple(file.path for file in commit.files),
            columns=columns.to_json(),
            gone=tuple(gone_columns(sent, now)),
            key=tuple(one_key(table.topic, [key_of(each) for each in commit.schemas()])),
        )
        return cls(changes, config, table, known)

    @cached_property
    def columns(self) -> Columns:
        return Columns.from_json(self.changes.columns)

    @cached_property
    def contents(self) -> Contents:
        return Contents(self.table, self.known)

    @cached_property
    def _own(self) -> pa.Schema:
        whole = iceberg_schema(self.changes.topic, self.columns.schema)
        return pa.schema([each for each in whole if not self.config.soft_delete or each.name != DELETED])

    def whole(self, share: int = 0, of: int = 1) -> Collapsed:
        """What the changes come to; of one share of the keys, or of all."""
        return collapse_parts(self._parts(), self.changes.key, self._own, (share, of))

    @cached_property
    def keys_only(self) -> Collapsed:
        """As `whole`, but `upserts` has no other columns than the key."""
        names = [*self.changes.key, *(each.name for each in CHANGE_FIELDS if each.name != "_unchanged")]
        own = pa.schema([self._own.field(name) for name in self.changes.key])
        return collapse_parts(self._parts(names), self.changes.key, own)

    def _parts(self, only: Sequence[str] | None = None) -> list[StagedChanges]:
        below = changes_of(self.table.target, self.changes.pipeline)
        stored = partial(as_stored, schema=self._own, gone=self.changes.gone)
        return [StagedChanges(below / file, stored, only) for file in self.changes.staged]

    def upsert(self, stage: Stage) -> Upsert:
        return Upsert(self.changes.topic, self.config, self.table, self.columns, self.known, stage, self.contents)

    # -- the plan --------------------------------------------------------------------------------------------------

    def plan(self, small_rows: int) -> list[IcebergWork]:
        """The pieces of work; none if there is so little to do that the driver does it in the commit."""
        parts, files = self._parts(), self.contents.data
        count = sum(sum(part.sizes) for part in parts)
        purged = self._purged()
        heavy = sum(file.rows for group in purged for file in group) + sum(len(file.dead) for file in self._merged())
        if heavy + count + sum(file.rows for file in files) <= small_rows:
            return []
        empties = self.keys_only.truncated and not self.config.soft_delete
        files, purged, heavy = ([], [], 0) if empties else (files, purged, heavy)
        ready = [] if self.config.soft_delete else self._indexed(files)
        known = {file.path for file in ready}
        pieces = shares(parts, self.changes.key, self._own, -(-count // SHARE_ROWS))
        if pieces and heavy + count + sum(file.rows for file in files if file.path not in known) <= small_rows:
            return []
        found = store.heads([part.path for part in parts])
        staged = sum(each.size for each in found if each is not None)
        new_rows = [
            self._work(
                staged // (pieces or 1),
                # Only if changes leave values out, the stored ones are looked up; then there is one share.
                files=() if pieces else tuple(file.path for file in files),
                share=share,
                shares=pieces or 1,
            )
            for share in range(pieces or 1)
        ]
        return [*(() if empties else self._removals(purged, ready)), *new_rows]

    def _work(self, size: int, **more: object) -> IcebergWork:
        return IcebergWork.model_validate({"topic": self.changes.topic, "bytes": size, "changes": self.changes, **more})

    def _removals(self, purged: Sequence[Sequence[TableFile]], ready: Sequence[TableFile]) -> list[IcebergWork]:
        """The work that removes old rows."""
        merging = self.contents.merging()
        due = {file.path for group in purged for file in group}
        rest = [file for file in self.contents.data if file.path not in due]
        merged = [file for file in rest if group_of(file.data) in merging]
        plain = [file for file in rest if group_of(file.data) not in merging]
        known = {file.path for file in ready}

        def read(file: TableFile) -> int:
            return 0 if file.path in known else file.bytes

        def size(file: TableFile) -> int:
            return max(read(file) * PIECE_DEAD // PIECE_BYTES, len(file.dead))

        work = [
            *(self._on(group, read, purges=True) for group in purged),
            *(self._on(group, read) for group in _groups(plain, read, PIECE_BYTES)),
        ]
        for place in sorted(merging, key=str):
            own = [file for file in merged if group_of(file.data) == place]
            work += [self._on(group, read, merges=True) for group in _groups(own, size, PIECE_DEAD)]
        drops = tuple(self.contents.deletes_of(merging))
        return [*work, *([self._work(0, drops=drops)] if drops else [])]

    def _on(self, files: Sequence[TableFile], read: Callable[[TableFile], int], **more: object) -> IcebergWork:
        size = sum(file.bytes if more.get("purges") else read(file) for file in files)
        return self._work(2 * size, files=tuple(file.path for file in files), **more)

    def _indexed(self, files: Sequence[TableFile]) -> list[TableFile]:
        """The files whose keys need not be read."""
        keys = key_columns(self.keys_only, self.columns, self.changes.topic)
        index = index_of(self.table, self.known, keys.schema, self.keys_only.equality)
        return [file for file in files if index.has(file)]

    def _purged(self) -> list[list[TableFile]]:
        """The data files that are written again, those of each piece of work."""
        data, percent = self.contents.data, self.config.purge_percent
        files = [(file, file.dead) for file in data]
        worst = worst_first(files, percent, PURGE_ROWS)
        worst = worst or worst_first(files, percent, max((file.rows for file in data), default=0))[:1]
        due = {file.path for file in worst}
        room = PURGE_ROWS - sum(file.rows for file in worst)
        small = joined([file for file in data if file.path not in due], room)
        return [*_groups(worst, lambda file: file.bytes, PIECE_BYTES), *small]

    def _merged(self) -> list[TableFile]:
        merging = self.contents.merging()
        return [file for file in self.contents.data if group_of(file.data) in merging]

    # -- the work --------------------------------------------------------------------------------------------------

    def do(self, work: IcebergWork, stage: Stage) -> IcebergApplied:
        """One piece of work."""
        try:
            return self._do(work, stage)
        except FileNotFoundError as error:
            raise RetryableError(
                f"a file of {self.table.name} was removed while an epoch was applied: {error}", code="PEN-2005"
            ) from error

    def _do(self, work: IcebergWork, stage: Stage) -> IcebergApplied:
        upsert, wanted = self.upsert(stage), set(work.files)
        files = [file for file in self.contents.data if file.path in wanted]
        clears = False
        if work.share is None and files:
            upsert.remove(self.keys_only, files)
            if work.purges:
                upsert.rewrite()
            else:
                upsert.write_deletes({group_of(file.data) for file in files} if work.merges else ())
        elif work.share is not None:
            changes = self.whole(work.share, work.shares)
            upsert.look_up(changes, files)
            upsert.add(changes)
            clears = changes.truncated and not self.config.soft_delete
        written = list(stage.finish().values())
        return IcebergApplied(
            topic=work.topic,
            version=work.changes.version,
            clears=clears,
            adds=tuple(file for part in written for file in part.files),
            deletes=tuple(upsert.written.deletes),
            dropped=(*upsert.written.dropped, *work.drops),
            listed=tuple(part.listed for part in written),
        )


def sent_columns(commit: Commit, table: Table, config: IcebergConfig) -> list[str]:
    """Every column of the topic that ever came, this epoch's included."""
    now = {name for each in commit.schemas() for name in own_rows(config, table.topic, each).names}
    return sorted(now.union(table.sent(commit.epoch.pipeline)))


def _groups(files: Iterable[TableFile], size: Callable[[TableFile], int], most: int) -> Iterator[list[TableFile]]:
    group: list[TableFile] = []
    for file in files:
        if group and sum(map(size, group)) + size(file) > most:
            yield group
            group = []
        group.append(file)
    if group:
        yield group
