"""
Worn files of a table are written again a part at a time, after epochs, so that no epoch waits for a whole file.

Say that two rows of a file of six are deleted, and a third one while the living rows are on their way into a new file, which
nobody sees. Then one entry of the log replaces the file by the new one, with a deletion vector of its own:

    row of the old file               0   1   2   3   4   5
    deleted when it was begun             x           x
    row of the new file               0       1   2       3
    deleted meanwhile                             x
    deletion vector of the new file               2
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import pyarrow as pa

from penstock.changes.keys import Ints
from penstock.connectors.delta.apply import PURGE_ROWS, index_of, worn
from penstock.connectors.delta.columns import delta_schema
from penstock.connectors.delta.files import TableFile
from penstock.connectors.delta.rewrite import Rewrite, write
from penstock.connectors.delta.table import Table, replace_worn
from penstock.connectors.delta.vectors import Vector, file_of, rows_at
from penstock.connectors.lake import lists
from penstock.connectors.lake.staging import Stage, StagedFile
from penstock.errors import ConnectorError
from penstock.sink import Epoch, Task, Topic
from penstock.store import Place

if TYPE_CHECKING:
    from penstock.connectors.delta.commit import DeltaTarget

PART_ROWS = 500_000
"""Rows that are written again after one epoch, which takes about 0.4 s. Smaller parts would come after every other epoch."""

PART_BYTES = 16 << 20
"""Most bytes of them, as they are in the file: rows may be wide."""

FEWEST_PARTS = 10
"""Where few rows change, a part comes after this many epochs at the latest."""

TRIES = 5
"""How often the last step gives way to another writer before all of it is begun again."""

_PIECE_ROWS = 1 << 16
_BUFFER_BYTES = 16 << 20
_PURGER = Task(99_997)


@dataclass
class Purge:
    """Files on their way into new ones without their deleted rows."""

    topic: Topic
    path: Place
    schema: pa.Schema
    files: Sequence[TableFile]
    stage: Stage

    def __post_init__(self) -> None:
        self._dead = [file.dead(self.path) for file in self.files]
        self._pieces = self._read()

    def advance(self, rows: int) -> tuple[int, bool]:
        """Write about so many rows of the old files again; gives how many they were, and whether those were the last."""
        done = 0
        while done < rows:
            count, piece = next(self._pieces, (0, None))
            if piece is None:
                return done, True
            write(self.stage, self.topic, piece)
            done += count
        return done, False

    def finish(self, now: Mapping[str, TableFile]) -> tuple[list[StagedFile], dict[str, Vector]] | None:
        """
        The new files, durable, and their deletion vectors; `now` are the files of the newest version.

        None if they must not replace the old ones: somebody has brought deleted rows back, or rows are missing.
        """
        self.stage.end(self.topic)
        staged = self.stage.staged().get(self.topic)
        files = staged.files if staged is not None else []
        late = self._deleted_meanwhile(now)
        if late is None or sum(file.rows for file in files) != sum(self._living()):
            return None
        vectors = self._write_vectors(files, late)
        return Rewrite().take([self.stage]).adds, vectors

    def abandon(self) -> None:
        self._pieces.close()
        self.stage.abandon()

    def _read(self) -> Generator[tuple[int, pa.Table], None, None]:
        rows = max(1, min(_PIECE_ROWS, _part(self.files) // 4))  # few that are wide: they are held in memory
        for file, dead in zip(self.files, self._dead, strict=True):
            yield from file.stream(self.path, self.schema, rows, dead)

    def _living(self) -> list[int]:
        return [file.rows - len(dead) for file, dead in zip(self.files, self._dead, strict=True)]

    def _deleted_meanwhile(self, now: Mapping[str, TableFile]) -> Ints | None:
        """The rows of the new files, counted through, that were deleted since they were begun."""
        found, first = [np.empty(0, np.int64)], 0
        for file, dead, living in zip(self.files, self._dead, self._living(), strict=True):
            dead_now = now[file.path].dead(self.path)
            late = np.setdiff1d(dead_now, dead, assume_unique=True)
            if len(late) != len(dead_now) - len(dead):
                return None
            found.append(first + late - np.searchsorted(dead, late))
            first += living
        return np.concatenate(found)

    def _write_vectors(self, files: Sequence[StagedFile], late: Ints) -> dict[str, Vector]:
        edges = np.cumsum([0, *(file.rows for file in files)])
        marked = {
            file.path: rows_at(own - begin)
            for file, begin, end in zip(files, edges, edges[1:], strict=False)
            if len(own := late[np.searchsorted(late, begin) : np.searchsorted(late, end)])
        }
        if not marked:
            return {}
        data, vectors = file_of(uuid4(), list(marked.values()))
        assert vectors[0].file is not None
        self.stage.put(self.topic, vectors[0].file, data)
        return dict(zip(marked, vectors, strict=True))


@dataclass
class Purges:
    """The worn files of one topic's table, one after the other, on the driver."""

    target: DeltaTarget
    _now: Purge | None = None
    _next: list[TableFile] = field(default_factory=list)
    """Small files that are to become one, next."""
    _due_rows: float = 0
    """As many rows may be written again by now as changes have worn out."""
    _dead: int | None = None
    _odd: set[str] = field(default_factory=set)
    """Files that could not be replaced."""
    _is_swept: bool = False

    def run(self, epoch: Epoch, table: Table | None) -> None:
        """After an epoch: write the next part, if it is time. `table` is what the commit has left."""
        config = self.target.config
        if table is None or not config.upserts or index_of(config, table) is None:
            return
        is_read = table.delta.version() == table.version  # else the epoch has only added rows
        dead = table.entries.dead_rows() if is_read else self._dead
        # Where a sink is opened for each epoch, as by Spark's own streams, no file is begun that would not be ended.
        more = (dead or 0) - self._dead if self._dead is not None else 0
        self._dead = dead
        worn_out = max(more * 100 / config.purge_percent, PART_ROWS / FEWEST_PARTS)
        self._due_rows = min(self._due_rows + worn_out, 2 * PART_ROWS)
        if self._due_rows < PART_ROWS or not (self._now or (is_read and self._files_to_begin(table))):
            return
        found = self.target.load()
        if found is None or not _is_ours(found, epoch):
            return
        try:
            self._advance(epoch, found)
        except BaseException:
            self._stop(epoch)
            raise

    def join(self, files: Sequence[TableFile]) -> None:
        """Make these files one, once nothing else is in hand."""
        if self._now is None:
            self._next = list(files)

    def close(self) -> None:
        """Give up what is in hand; nobody has seen it."""
        now, self._now = self._now, None
        self.target.known.busy = set()
        if now is not None:
            now.abandon()
            with contextlib.suppress(ConnectorError, OSError):  # the next run removes it
                lists.sweep(self.target.root, now.stage.epoch, lambda *_: False, now.stage.stem, only=self.target.topic)

    def _files_to_begin(self, table: Table) -> list[TableFile]:
        files = self.target.known.log_of(table).files()
        if self._next and {file.path for file in self._next} <= {file.path for file in files}:
            return [file for file in files if file.path in {each.path for each in self._next}]
        self._next = []
        return [file for file in worn(files, self.target.config.purge_percent) if file.path not in self._odd][:1]

    def _advance(self, epoch: Epoch, table: Table) -> None:
        schema = delta_schema(self.target.topic, table.columns())
        there = {file.path: file for file in self.target.known.log_of(table).files()}
        if self._now is not None and not _still_fits(self._now, there, schema):
            self._stop(epoch)
        if self._now is None:
            if not self._is_swept:  # after a commit of ours, no earlier process can use what it has begun
                self._sweep(epoch)
                self._is_swept = True
            files = sorted(self._files_to_begin(table), key=lambda file: file.path)
            self._next = []
            if not files:
                return
            self._now = Purge(self.target.topic, self.target.path, schema, files, self._stage(epoch))
            self.target.known.busy = {file.path for file in files}
        done, is_last = self._now.advance(_part(self._now.files))
        self._due_rows -= done
        if is_last:
            self._replace(self._now, epoch)
            self._stop(epoch)

    def _replace(self, purge: Purge, epoch: Epoch) -> None:
        """Each try with the newest version: other writers may be as fast."""
        for tries_left in reversed(range(TRIES)):
            table = self.target.load()
            if table is None or not _is_ours(table, epoch):
                return
            there = {file.path: file for file in self.target.known.log_of(table).files()}
            if not _still_fits(purge, there, delta_schema(self.target.topic, table.columns())):
                return
            made = purge.finish(there)
            if made is None:
                self._odd.update(self.target.known.busy)
                return
            try:
                replace_worn(table, made[0], [file.path for file in purge.files], made[1])
            except FileExistsError:
                if not tries_left:
                    raise
            else:
                self._dead = table.entries.dead_rows()
                return

    def _stop(self, epoch: Epoch) -> None:
        """Put away what is in hand, and remove it but for what the table names by now."""
        now, self._now = self._now, None
        self.target.known.busy = set()
        if now is not None:
            now.abandon()
            self._sweep(epoch, now.stage.stem)  # nothing else: another process may have gone on

    def _sweep(self, epoch: Epoch, stem: str = "") -> None:
        live: set[str] | None = None

        def is_kept(_: Topic, place: Place) -> bool:
            nonlocal live
            live = self.target.live_files(epoch.pipeline) if live is None else live
            return place.name in live

        lists.sweep(self.target.root, _own(epoch), is_kept, stem, only=self.target.topic)

    def _stage(self, epoch: Epoch) -> Stage:
        sink = self.target.sink
        spec = sink.spec()
        spec = replace(spec, target_file_rows=min(spec.target_file_rows, PURGE_ROWS))
        return Stage(_own(epoch), _PURGER, sink.targets, spec, _BUFFER_BYTES)


def _own(epoch: Epoch) -> Epoch:
    """Names the files, whichever epochs they are written after: the next run finds what a crash has left."""
    return Epoch(epoch.pipeline, "", 0, "purge")


def _still_fits(purge: Purge, there: Mapping[str, TableFile], schema: pa.Schema) -> bool:
    """False if another writer has replaced a file, or the columns are no longer the same."""
    same = all((now := there.get(file.path)) is not None and now.bytes == file.bytes for file in purge.files)
    return same and schema == purge.schema


def _is_ours(table: Table, epoch: Epoch) -> bool:
    """False if another process of this pipeline has gone on, which removes what this one has left."""
    marker = table.marker(epoch.pipeline)
    return marker is not None and (marker.incarnation, marker.number) == (epoch.incarnation, epoch.number)


def _part(files: Sequence[TableFile]) -> int:
    rows, size = sum(file.rows for file in files), sum(file.bytes for file in files)
    return max(1, min(PART_ROWS, rows * PART_BYTES // max(size, 1)))
