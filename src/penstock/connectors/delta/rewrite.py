"""Apply changes to a Delta table: rewrite the files that hold one of their keys, and write the new rows."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.collapse import Collapsed
from penstock.changes.keys import Keys, Mask, bools
from penstock.connectors.delta import files as table_files
from penstock.connectors.delta.entries import Marked
from penstock.connectors.delta.files import TableFile
from penstock.connectors.delta.marking import Found, Marking
from penstock.connectors.lake import changed, staging
from penstock.connectors.lake.staging import ROW_GROUP_ROWS, Stage, StagedFile
from penstock.connectors.lake.targets import HIDDEN
from penstock.errors import SchemaError
from penstock.sink import Topic
from penstock.store import Place

TINY_BYTES = 1 << 16
"""A file of no more bytes is read once, and not first for its keys: to open it takes longer than to read it."""

WRITERS = min(4, os.cpu_count() or 1)
"""Files that many new rows are written to at the same time."""


@dataclass
class Rewrite:
    """What one commit adds and removes."""

    adds: list[StagedFile] = field(default_factory=list)
    removes: list[StagedFile] = field(default_factory=list)
    marked: list[Marked] = field(default_factory=list)
    """Files that stay, with other deletion vectors."""
    listed: list[str] = field(default_factory=list)
    """The lists that name the new files, to be dropped after the commit."""

    def take(self, stages: Sequence[Stage]) -> Rewrite:
        """Finish the stages and add their files."""
        for staged in staging.finish(stages):
            for each in staged.values():
                self.listed.append(each.listed)
                self.adds += each.files
        return self


@dataclass(frozen=True)
class TableShape:
    """What the rows of a table must look like."""

    topic: Topic
    path: Place
    schema: pa.Schema
    required: Sequence[str] = ()
    """Columns that must not be null."""
    mark: str | None = None
    """Column that marks deleted rows, which then stay."""


class Rewriter:
    """
    Writes the files that turn one version of the table into the next; nothing of it is visible.

    Rows of a rewritten file go into a file of their own; remaining rows of small files join the new rows.
    """

    def __init__(
        self,
        shape: TableShape,
        changes: Collapsed,
        begin: Callable[[], Stage],
        keys: Keys | None = None,
        marking: Marking | None = None,
    ) -> None:
        self._shape = shape
        self._changes = changes
        self._begin = begin
        self._keys = keys
        self._marking = marking
        self._kept = _Kept(changes, shape)
        self._result = Rewrite()
        self._stages: list[Stage] = []

    @contextlib.contextmanager
    def writing(self) -> Iterator[Rewrite]:
        """The result is complete and durable when the block ends; if it fails, files are closed."""
        try:
            yield self._result
            if self._marking is not None and self._marking.marks:
                self._result.marked += self._marking.write(self._shape.topic, self._stage(0))
            self._result.take(self._stages)
        except BaseException:
            for stage in self._stages:
                stage.abandon()
            raise

    def drop_rows(self, files: Iterable[TableFile]) -> None:
        """Remove the rows whose key the changes touch: mark them as deleted where that is possible, or rewrite their file."""
        marking = self._marking if not self._changes.truncated else None
        for file in files:
            if marking is None:
                self.rewrite(file, only_if_touched=not self._changes.truncated)
            elif len(found := marking.find(file)):
                if marking.may_mark(file) and len(found) < file.rows - file.dead_rows:
                    self._mark(marking, file, found)
                else:
                    self.rewrite(file)

    def rewrite(self, file: TableFile, only_if_touched: bool = False) -> None:
        """Write the rows of a file again, without those that the changes touch; with a mark, deleted rows stay, marked."""
        shape, changes = self._shape, self._changes
        small, large = self._stage(0), self._stage(1)
        key = list(changes.key)
        pieces = list(file.read(shape.path, shape.schema)) if file.bytes <= TINY_BYTES else None
        keys = file.read(shape.path, shape.schema, key) if pieces is None else (rows.select(key) for rows in pieces)
        places = [self._touched.find(rows) for rows in keys]
        if only_if_touched and not any((place >= 0).any() for place in places):
            return
        self._result.removes.append(file.removed())
        stage = small if file.rows <= table_files.SMALL_FILE_ROWS else large
        for rows, place in zip(file.read(shape.path, shape.schema) if pieces is None else pieces, places, strict=True):
            self._kept.collect(rows, place >= 0)
            if shape.mark is not None:  # among the keys, rows to write come first, then the deleted ones
                deleted = np.full(len(place), True) if changes.truncated else place >= changes.upserts.num_rows
                rows = _marked(rows, shape.mark, deleted)
                place = np.where(place < changes.upserts.num_rows, place, -1)
            write(stage, shape.topic, rows.filter(pa.array(place < 0)))
        if stage is large:
            stage.end(shape.topic)

    def _mark(self, marking: Marking, file: TableFile, found: Found) -> None:
        shape = self._shape
        marking.mark(file, found)
        if self._changes.kept:
            for rows in file.take(shape.path, shape.schema, self._kept.names, found.positions):
                self._kept.collect(rows, np.ones(rows.num_rows, bool))
        deleted = found.positions[found.places >= self._changes.upserts.num_rows]
        if shape.mark is not None and len(deleted):  # such a row stays, as a new row
            for rows in file.take(shape.path, shape.schema, None, deleted):
                write(self._stage(0), shape.topic, _marked(rows, shape.mark, np.ones(rows.num_rows, bool)))

    def look_up(self, files: Iterable[TableFile]) -> None:
        """Collect the stored values that changes leave as they are, without rewriting anything."""
        shape, changes = self._shape, self._changes
        names = list(changes.key)
        for file in files if changes.kept else ():
            if self._marking is not None:
                found = self._marking.find(file)
                for rows in file.take(shape.path, shape.schema, self._kept.names, found.positions):
                    self._kept.collect(rows, np.ones(rows.num_rows, bool))
                continue
            hits = [self._touched.find(rows) >= 0 for rows in file.read(shape.path, shape.schema, names)]
            pieces = [place for place, hit in enumerate(hits) if hit.any()]
            found_rows = file.read(shape.path, shape.schema, self._kept.names, pieces) if pieces else ()
            for place, rows in zip(pieces, found_rows, strict=True):
                self._kept.collect(rows, hits[place])

    def add_rows(self) -> None:
        """Write the new rows, with the values that were collected."""
        self._keys = None  # frees memory for the new rows
        rows_of = self._changes.rows(self._kept.rows())
        count = self._changes.upserts.num_rows

        def add(stage: Stage, begin: int, end: int) -> None:
            for new in rows_of(begin, end):
                for first in range(0, new.num_rows, changed.CHUNK_ROWS):
                    write(stage, self._shape.topic, self._as_table(new.slice(first, changed.CHUNK_ROWS)))

        places = range(max(1, min(WRITERS, count // ROW_GROUP_ROWS)))
        stages = [self._stage(0), *(self._stage(place + 1) for place in places[1:])]
        edges = [count * place // len(stages) for place in range(len(stages) + 1)]
        if len(stages) == 1:
            add(stages[0], 0, count)
            return
        with ThreadPoolExecutor(len(stages)) as threads:
            list(threads.map(add, stages, edges, edges[1:]))

    @property
    def _touched(self) -> Keys:
        """Every key that the changes touch; made when the first file is looked at."""
        if self._keys is None:
            self._keys = keys_of(self._shape, self._changes)
        return self._keys

    def _stage(self, place: int) -> Stage:
        while len(self._stages) <= place:
            self._stages.append(self._begin())
        return self._stages[place]

    def _as_table(self, new: pa.Table) -> pa.Table:
        shape = self._shape
        if shape.mark is not None:
            new = new.append_column(shape.mark, pa.repeat(False, new.num_rows))
        new = new.select(shape.schema.names).cast(shape.schema)
        for name in shape.required:
            if new.column(name).null_count:
                raise SchemaError(
                    f"the column {name!r} of {shape.topic} holds nulls, and the table forbids them", code="PEN-4001"
                )
        return new


def keys_of(shape: TableShape, changes: Collapsed) -> Keys:
    """Every key that the changes touch, in the table's types."""
    return Keys(touched(shape, changes), changes.equality)


def touched(shape: TableShape, changes: Collapsed) -> pa.Table:
    return changes.keys().cast(pa.schema([shape.schema.field(name) for name in changes.key]))


def write(stage: Stage, topic: Topic, rows: pa.Table) -> None:
    for batch in rows.to_batches():
        stage.write(topic, batch)


def _marked(rows: pa.Table, mark: str, deleted: Mask) -> pa.Table:
    marks = pc.or_kleene(rows.column(mark), pa.array(deleted)) if not deleted.all() else pa.array(deleted)
    return rows.set_column(rows.schema.get_field_index(mark), rows.schema.field(mark), marks)


class _Kept:
    """Stored rows from which unchanged values are taken. They may be many, so they are collected in a file."""

    def __init__(self, changes: Collapsed, shape: TableShape) -> None:
        self._mark = shape.mark
        self._values = [*changes.key, *changes.kept] if changes.kept else []
        self.names = [*self._values, *([shape.mark] if shape.mark else [])] if changes.kept else []
        """The columns that `collect` needs."""
        if self.names:
            # It has no name, and is gone when the last reader is.
            below = shape.path / HIDDEN if isinstance(shape.path, Path) else None
            self._file = tempfile.TemporaryFile(dir=below)  # noqa: SIM115 - closed when all is collected
            schema = pa.schema([shape.schema.field(name) for name in self._values])
            self._writer = pa.ipc.new_file(self._file, schema)

    def collect(self, rows: pa.Table, hit: Mask) -> None:
        """Take these rows, but not those marked as deleted: a row that moves to such a key keeps its own values."""
        if self.names and self._mark is not None:
            hit = hit & ~bools(pc.fill_null(rows.column(self._mark), False))
        if self.names and hit.any():
            self._writer.write_table(rows.select(self._values).filter(pa.array(hit)))

    def rows(self) -> pa.Table | None:
        """The collected rows, mapped into memory."""
        if not self.names:
            return None
        self._writer.close()
        with self._file:
            self._file.flush()
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()
