"""
An upsert in two steps: a plan that knows which files may hold the changed keys, and work that rewrites them.

Say that an epoch changes 1,000 keys of a table with 100 files, and the statistics in the log rule out 90 of them. The plan
is one piece of work per 32 MB of the other ten, each of which rewrites its files without the changed rows, and one piece
that writes the 1,000 new rows. The pieces run in tasks. The commit then names their files, at the version after the one
that the plan saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from penstock import store
from penstock.changes import CHANGE_FIELDS
from penstock.changes.collapse import Collapsed
from penstock.changes.keys import Keys
from penstock.changes.streamed import collapse_parts, shares
from penstock.connectors.delta.columns import MARK, stored_columns
from penstock.connectors.delta.config import DeltaConfig
from penstock.connectors.delta.entries import Marked, wants_vectors
from penstock.connectors.delta.files import Log, TableFile
from penstock.connectors.delta.marking import Dead, Marking
from penstock.connectors.delta.rewrite import Rewrite, Rewriter, TableShape, keys_of, touched
from penstock.connectors.delta.table import Table
from penstock.connectors.lake.changed import StagedChanges, as_stored, changes_of
from penstock.connectors.lake.commit import Commit
from penstock.connectors.lake.index import Index, Wanted
from penstock.connectors.lake.staging import Stage, StagedFile
from penstock.connectors.upsert import gone_columns, one_key
from penstock.errors import RetryableError
from penstock.schema import key_of
from penstock.schema.codec import pack_schema, unpack_schema
from penstock.sink import Applied, Topic, Work
from penstock.store import Place

NO_TABLE = -1
"""The version of a table that does not exist yet."""

PIECE_BYTES = 32 << 20
"""About how much of the table one piece of work rewrites."""

PURGE_ROWS = 1_000_000
"""
Most rows of files that tasks of one epoch write again because of their deleted rows, so that it takes a second or two. A
larger file is written as several of this size.
"""

LATE = 2
"""
Tasks write a file again at so many times the share of deleted rows that is asked for: the driver, which does it a part at a
time after epochs, cannot keep up.
"""

PURGE_HERE_ROWS = 100_000
"""Up to this many of them are written again by the commit itself: a tenth of a second."""

SHARE_ROWS = 2_000_000
"""About how many changes one piece of work collapses and writes. Each reads the keys of all changes."""


class Upsert(BaseModel):
    """The changes of one epoch and the table that they go to; small, picklable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: Topic
    pipeline: str
    version: int
    """The version of the table that the plan saw."""
    changes: tuple[str, ...]
    """Staged files, in the order of the changes."""
    columns: str
    """The columns of the table, as `pack_schema` writes them."""
    required: tuple[str, ...] = ()
    """Columns that the table forbids nulls in."""
    gone: tuple[str, ...] = ()
    """Columns that the topic no longer has."""
    key: tuple[str, ...]
    soft_delete: bool = False
    index: str | None = None
    """The id of a table whose old rows are marked as deleted; None: files are rewritten."""
    purge_percent: float = 100
    """As in the sink's options."""


class DeltaWork(Work):
    upsert: Upsert
    files: tuple[TableFile, ...] = ()
    """Files of the table that may hold a key of the changes."""
    share: int | None = None
    """Write this share of the new rows; None: remove old rows from the files."""
    shares: int = 1
    purges: bool = False
    """Rewrite the files also where rows could be marked as deleted."""


class DeltaApplied(Applied):
    version: int
    clears: bool = False
    """The changes empty the table first: all files of the version go."""
    adds: tuple[StagedFile, ...] = ()
    removes: tuple[StagedFile, ...] = ()
    marked: tuple[Marked, ...] = ()
    listed: tuple[str, ...] = ()
    """The lists that name the new files, to be dropped after the commit."""

    def names(self) -> set[str]:
        """The names of all new files."""
        vectors = {each.vector.file for each in self.marked if each.vector.file is not None}
        return {path.rpartition("/")[2] for path in (*(file.path for file in self.adds), *vectors)}


@dataclass
class Known:
    """The index of a table, its deletion vectors and its files, as far as they were read."""

    dead: Dead = field(default_factory=Dead)
    busy: set[str] = field(default_factory=set)
    """Files that are being written again, a part after each of some epochs."""
    _index: Index | None = None
    _log: Log | None = None

    def log_of(self, table: Table) -> Log:
        """Plan and commit mostly see the same version."""
        if self._log is None or not self._log.is_of(table):
            self._log = Log(table)
        return self._log

    def index(self, wanted: Index) -> Index:
        """The index of this table by this key; another one is forgotten."""
        if self._index is None or not self._index.is_like(wanted):
            self._index = wanted
        return self._index

    def keep_only(self, files: Sequence[TableFile]) -> None:
        """Forget what belongs to other files."""
        self.dead.keep_only({file.vector for file in files})
        if self._index is not None:
            self._index.keep_only(files)


@dataclass(frozen=True)
class Applying:
    """An upsert at the place where it is planned or done: on the driver or in a task."""

    upsert: Upsert
    path: Place
    """The topic's target."""
    known: Known = field(default_factory=lambda: Known())
    """What the driver remembers of the table from epoch to epoch."""

    @classmethod
    def of(
        cls,
        config: DeltaConfig,
        topic: Topic,
        path: Place,
        commit: Commit,
        table: Table | None,
        schema: pa.Schema,
        now: pa.Schema | None,
        known: Known,
    ) -> Applying:
        """The upsert of a staged epoch into the loaded table, which has the columns `schema`; the source's are `now`."""
        upsert = Upsert(
            topic=topic,
            pipeline=commit.epoch.pipeline,
            version=table.delta.version() if table is not None else NO_TABLE,
            changes=tuple(file.path for file in commit.files),
            columns=pack_schema(schema),
            required=tuple(each.name for each in table.columns() if not each.nullable) if table is not None else (),
            gone=tuple(gone_columns(sent_columns(config, commit, table), now)),
            key=tuple(one_key(topic, [key_of(each) for each in commit.schemas()])),
            soft_delete=config.soft_delete,
            index=index_of(config, table) if table is not None else None,
            purge_percent=config.purge_percent,
        )
        return cls(upsert, path, known)

    @cached_property
    def shape(self) -> TableShape:
        upsert = self.upsert
        mark = MARK.name if upsert.soft_delete else None
        return TableShape(upsert.topic, self.path, unpack_schema(upsert.columns), upsert.required, mark)

    def whole(self, share: int = 0, of: int = 1) -> Collapsed:
        """What the changes come to; of one share of the keys, or of all."""
        return collapse_parts(self.parts(), self.upsert.key, self._own, (share, of))

    @cached_property
    def keys_only(self) -> Collapsed:
        """As `whole`, but `upserts` has no other columns than the key."""
        narrow = self.parts([*self.upsert.key, *(each.name for each in CHANGE_FIELDS if each.name != "_unchanged")])
        return collapse_parts(narrow, self.upsert.key, pa.schema([self._own.field(name) for name in self.upsert.key]))

    @cached_property
    def keys(self) -> Keys:
        return keys_of(self.shape, self.keys_only)

    def parts(self, only: Sequence[str] | None = None) -> list[StagedChanges]:
        return self._parts_of(only) if only is not None else self._parts

    @cached_property
    def _parts(self) -> list[StagedChanges]:
        return self._parts_of(None)

    def _parts_of(self, only: Sequence[str] | None) -> list[StagedChanges]:
        below = changes_of(self.path, self.upsert.pipeline)
        stored = partial(as_stored, schema=self.shape.schema, gone=self.upsert.gone)
        return [StagedChanges(below / file, stored, only) for file in self.upsert.changes]

    @property
    def _own(self) -> pa.Schema:
        return pa.schema([each for each in self.shape.schema if each.name != self.shape.mark])

    def marking(self, changes: Collapsed) -> Marking | None:
        """What marks old rows as deleted; None if files are rewritten."""
        if self.upsert.index is None:
            return None
        keys = touched(self.shape, changes)
        path = self.path
        made = Index(
            path, self.upsert.index, keys.schema, changes.equality, lambda f, key: f.read(path, key, whole=True)
        )
        index = self.known.index(made)
        return Marking(index, Wanted.of(keys, changes.equality), self.known.dead)

    def all_at_once(self, changes: Collapsed, log: Log, begin: Callable[[], Stage]) -> Rewrite:
        """Do all of it here."""
        rewriter = Rewriter(self.shape, changes, begin, marking=self.marking(changes))
        with rewriter.writing() as result:
            if changes.truncated and self.shape.mark is None:
                result.removes = [file.removed() for file in log.files()]
            else:
                purged = self._purged(log)
                purged = purged if sum(file.rows for file in purged) <= PURGE_HERE_ROWS else []
                rewriter.drop_rows(file for file in self.candidates(log, changes) if file not in purged)
                for file in purged:
                    rewriter.rewrite(file)
            rewriter.add_rows()
        return result

    def _purged(self, log: Log | None, late: float = 1) -> list[TableFile]:
        """Files that are written again because of their deleted rows."""
        files = worn(log.files(), late * self.upsert.purge_percent) if log is not None and self.upsert.index else []
        return [file for file in files if file.path not in self.known.busy]

    def candidates(self, log: Log, changes: Collapsed) -> list[TableFile]:
        """The files that have to be looked at."""
        return log.files() if changes.truncated else log.candidates(touched(self.shape, changes), changes.equality)

    def _files_to_rewrite(self, log: Log) -> list[TableFile]:
        changes = self.keys_only
        return [] if changes.truncated and self.shape.mark is None else self.candidates(log, changes)

    def plan(self, log: Log | None, small_rows: int) -> list[DeltaWork]:
        """The pieces of work; none if there is so little to do that the driver does it in the commit."""
        parts = self.parts()
        count = sum(sum(part.sizes) for part in parts)
        purged = self._purged(log, LATE)
        if sum(file.rows for file in purged) <= PURGE_HERE_ROWS:
            purged = []  # the commit does it, or what else there is to do
        if not purged and count + (log.rows() if log else 0) <= small_rows:
            return []
        files = self._files_to_rewrite(log) if log is not None and log.rows() else []
        purged = purged if files or not self.keys_only.truncated else []
        if not purged and count + sum(file.rows for file in files) <= small_rows:
            return []
        pieces = shares(parts, self.upsert.key, self._own, -(-count // SHARE_ROWS))
        if not purged and pieces and count + self._rows_to_read(files) <= small_rows:
            return []
        staged = sum(found.size for found in store.heads([part.path for part in parts]) if found is not None)
        new_rows = [
            DeltaWork(
                topic=self.upsert.topic,
                bytes=staged // (pieces or 1),
                upsert=self.upsert,
                share=share,
                shares=pieces or 1,
                # Only if changes leave values out, the stored ones are looked up; then there is one share.
                files=() if pieces else tuple(files),
            )
            for share in range(pieces or 1)
        ]
        return [*self._removals(files, purged), *new_rows]

    def _removals(self, files: Sequence[TableFile], purged: Sequence[TableFile]) -> list[DeltaWork]:
        """The work that removes old rows."""

        def work(group: Sequence[TableFile], size: int, purges: bool = False) -> DeltaWork:
            return DeltaWork(topic=self.upsert.topic, bytes=size, upsert=self.upsert, files=tuple(group), purges=purges)

        marking = self.marking(self.keys_only) if not self.keys_only.truncated else None
        files = [file for file in files if file not in purged]
        ready = [file for file in files if marking.index.has(file)] if marking is not None else []
        rest = [file for file in files if file not in ready]
        return [
            *([work(ready, 0)] if ready else []),
            *(work(group, 2 * sum(file.bytes for file in group)) for group in _groups(rest)),
            *(work(group, 2 * sum(file.bytes for file in group), purges=True) for group in _groups(purged)),
        ]

    def _rows_to_read(self, files: Sequence[TableFile]) -> int:
        """Rows of the files that have to be read to remove some of them."""
        marking = self.marking(self.keys_only)
        if marking is None or self.shape.mark is not None or self.keys_only.truncated:
            return sum(file.rows for file in files)
        return sum(file.rows for file in files if not marking.index.has(file))

    def do(self, work: DeltaWork, begin: Callable[[], Stage]) -> DeltaApplied:
        """One piece of work."""
        try:
            return self._do(work, begin)
        except FileNotFoundError as error:
            raise RetryableError(
                f"a file of the Delta table {self.path} was removed while an epoch was applied: {error}",
                code="PEN-2005",
            ) from error

    def _do(self, work: DeltaWork, begin: Callable[[], Stage]) -> DeltaApplied:
        if work.share is None:
            changes = self.keys_only
            marking = None if work.purges else self.marking(changes)
            rewriter = Rewriter(self.shape, changes, begin, self.keys, marking)
            with rewriter.writing() as result:
                if work.purges:
                    for file in work.files:
                        rewriter.rewrite(file)
                else:
                    rewriter.drop_rows(work.files)
            clears = False
        else:
            changes = self.whole(work.share, work.shares)
            rewriter = Rewriter(self.shape, changes, begin, marking=self.marking(changes))
            with rewriter.writing() as result:
                rewriter.look_up(work.files)
                rewriter.add_rows()
            clears = changes.truncated and self.shape.mark is None
        return DeltaApplied(
            topic=work.topic,
            version=self.upsert.version,
            clears=clears,
            adds=tuple(result.adds),
            removes=tuple(result.removes),
            marked=tuple(result.marked),
            listed=tuple(result.listed),
        )


def sent_columns(config: DeltaConfig, commit: Commit, table: Table | None) -> list[str]:
    """Every column of the topic that ever came, this epoch's included."""
    marker = table.marker(commit.epoch.pipeline) if table is not None else None
    now = {name for each in commit.schemas() for name in stored_columns(config, each).names}
    return sorted(now.union(marker.columns if marker else ()))


def index_of(config: DeltaConfig, table: Table) -> str | None:
    """The id of a table whose old rows are marked as deleted; None: files are rewritten."""
    marks = config.apply != "rewrite" and wants_vectors(table.delta)
    return str(table.delta.metadata().id) if marks else None


def worn(files: Sequence[TableFile], percent: float) -> list[TableFile]:
    """
    Files with so many deleted rows that they are written again: the worst first, and not too many in one epoch.

    A file is, once that share of its rows is deleted; and the worst ones are, as long as half that share of the whole table
    is. So files of one age do not come due all at once, and vectors stay of one size from epoch to epoch.
    """
    rows, dead = sum(file.rows for file in files), sum(file.dead_rows for file in files)
    due: list[TableFile] = []
    room = PURGE_ROWS
    for file in sorted(files, key=lambda each: each.dead_rows / max(each.rows, 1), reverse=True):
        is_worn = file.dead_rows * 100 >= file.rows * percent or dead * 200 > rows * percent
        if not file.dead_rows or not is_worn or (due and file.rows > room):
            break
        due.append(file)
        room, rows, dead = room - file.rows, rows - file.dead_rows, dead - file.dead_rows
    return due


def _groups(files: Sequence[TableFile]) -> list[tuple[TableFile, ...]]:
    groups: list[list[TableFile]] = []
    size = PIECE_BYTES
    for file in files:
        if size + file.bytes > PIECE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.bytes
    return [tuple(group) for group in groups]
