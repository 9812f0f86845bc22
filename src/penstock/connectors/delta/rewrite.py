"""Apply an epoch's changes to a Delta table: only files that hold one of their keys are written anew."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from penstock.changes import own_columns
from penstock.changes.collapse import Collapsed
from penstock.changes.keys import Ints, Keys, Mask
from penstock.connectors.delta.table import Table
from penstock.connectors.lake.partitions import partition_text
from penstock.connectors.lake.staging import ROW_GROUP_ROWS, Stage, StagedFile, StagedTopic
from penstock.connectors.lake.targets import HIDDEN
from penstock.errors import FatalError, SchemaError
from penstock.schema.evolution import widened
from penstock.sink import Topic

CHUNK_ROWS = 1 << 17
"""Rows of a file that are held at once, if its row groups are no larger."""

SMALL_FILE_ROWS = 1 << 17
"""What is left of files up to this size goes into one file with the new rows, or every epoch would leave another."""

RANKED_ROWS = 1 << 19
"""Keys that are put in order at once, to be held against the bounds of files."""

WRITERS = min(4, os.cpu_count() or 1)
"""Files that new rows are spread over and written at once, if there are many."""

_PLAIN = "!$&'()+,/:;=@"
"""What the client leaves as it is when it writes a path into the log, besides letters, digits and `_.-~`."""


@dataclass
class Rewrite:
    """What one commit adds and removes."""

    adds: list[StagedFile] = field(default_factory=list)
    removes: list[StagedFile] = field(default_factory=list)
    staged: list[StagedTopic] = field(default_factory=list)
    """The new files as they were listed before they were begun."""

    def take(self, finished: Mapping[Topic, StagedTopic], topic: Topic) -> None:
        if topic in finished:
            self.staged.append(finished[topic])
            self.adds += finished[topic].files


def rewrite(
    topic: Topic,
    table: Table,
    schema: pa.Schema,
    changes: Collapsed,
    begin: Callable[[], Stage],
    mark: str | None = None,
) -> Rewrite:
    """
    Write the files that make of the loaded version the next one; nothing of it is visible.

    Rows of a file that was written anew go where they were; what is left of small files joins the new rows. With the
    column `mark`, rows that are gone stay, and are marked in it.
    """
    result = Rewrite()
    actions = pa.table(table.delta.get_add_actions(flatten=True))
    if changes.truncated and mark is None:
        result.removes = [file_of(table, actions, row).removed() for row in range(actions.num_rows)]
        actions = actions.slice(0, 0)
    keys = changes.keys().cast(pa.schema([schema.field(name) for name in changes.key]))
    candidates = _candidates(actions, keys, table.partition_by())
    if changes.truncated:
        candidates = np.arange(actions.num_rows)
    found = Keys(keys, changes.equality) if len(candidates) else None
    kept = _Kept(changes, schema, table.path / HIDDEN)
    with contextlib.ExitStack() as abandoned:

        def another() -> Stage:
            stage = begin()
            abandoned.callback(stage.abandon)
            return stage

        joined = another()
        for row in candidates:
            assert found is not None
            file = file_of(table, actions, int(row))
            places = [found.find(rows) for rows in file.read(schema, keys.column_names)]
            if not changes.truncated and not any((place >= 0).any() for place in places):
                continue
            result.removes.append(file.removed())
            stage = joined if file.rows <= SMALL_FILE_ROWS else another()
            for rows, place in zip(file.read(schema), places, strict=True):
                kept.collect(rows, place >= 0)
                if mark is not None:  # rows to write come first among the keys, and behind them those that are gone
                    gone = np.full(len(place), True) if changes.truncated else place >= changes.upserts.num_rows
                    rows = _marked(rows, mark, gone)
                    place = np.where(place < changes.upserts.num_rows, place, -1)
                write(stage, topic, rows.filter(pa.array(place < 0)))
            if stage is not joined:
                result.take(stage.finish(), topic)
        found = None  # its room is wanted for the new rows
        rows_of = changes.rows(kept.rows())

        def add(stage: Stage, begin: int, end: int) -> None:
            for new in rows_of(begin, end):
                for first in range(0, new.num_rows, CHUNK_ROWS):
                    write(stage, topic, _as_table(topic, table, new.slice(first, CHUNK_ROWS), schema, mark))

        count = changes.upserts.num_rows
        stages = [joined, *(another() for _ in range(1, min(WRITERS, count // ROW_GROUP_ROWS)))]
        edges = [count * place // len(stages) for place in range(len(stages) + 1)]
        with ThreadPoolExecutor(len(stages)) as threads:
            list(threads.map(add, stages, edges, edges[1:]))
        for stage in stages:
            result.take(stage.finish(), topic)
    return result


@dataclass(frozen=True)
class StagedChanges:
    """A file of changes, in the pieces that it is read in; `stored` gives them the table's types."""

    path: Path
    stored: Callable[[pa.Table], pa.Table]

    @cached_property
    def schema(self) -> pa.Schema:
        return self.stored(self._metadata.schema.to_arrow_schema().empty_table()).schema

    @cached_property
    def sizes(self) -> Sequence[int]:
        return [sum(self._metadata.row_group(i).num_rows for i in groups) for groups in _runs(self._metadata)]

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        return pq.read_metadata(self.path)

    def read(self, columns: Sequence[str], pieces: Sequence[int] | None = None) -> Iterator[pa.Table]:
        with pq.ParquetFile(self.path, metadata=self._metadata) as parquet:
            there = [name for name in columns if name in parquet.schema_arrow.names]
            runs = list(_runs(self._metadata))
            for place in range(len(runs)) if pieces is None else pieces:
                yield self.stored(parquet.read_row_groups(runs[place], columns=there)).select(list(columns))


def as_stored(rows: pa.Table, schema: pa.Schema, gone: Iterable[str]) -> pa.Table:
    """Changes in the types of the table; a column that the topic no longer has is null, not unchanged."""
    own = set(own_columns(rows.schema))
    fields = [
        schema.field(each.name) if each.name in own and each.name in schema.names else each for each in rows.schema
    ]
    rows = rows.cast(pa.schema(fields))
    for name in gone:
        if name not in rows.column_names and name in schema.names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, schema.field(name).type))
    return rows


def write(stage: Stage, topic: Topic, rows: pa.Table) -> None:
    for batch in rows.to_batches():
        stage.write(topic, batch)


def _marked(rows: pa.Table, mark: str, gone: Mask) -> pa.Table:
    marks = pc.or_kleene(rows.column(mark), pa.array(gone)) if not gone.all() else pa.array(gone)
    return rows.set_column(rows.schema.get_field_index(mark), rows.schema.field(mark), marks)


def _as_table(topic: Topic, table: Table, new: pa.Table, schema: pa.Schema, mark: str | None) -> pa.Table:
    if mark is not None:
        new = new.append_column(mark, pa.repeat(False, new.num_rows))
    new = new.select(schema.names).cast(schema)
    _refuse_nulls(topic, new, table)
    return new


class _Kept:
    """Stored rows from which unchanged values are taken, written down as their files go by: they may be many."""

    def __init__(self, changes: Collapsed, schema: pa.Schema, directory: Path) -> None:
        self._names = [*changes.key, *changes.kept] if changes.kept else []
        if self._names:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - it is closed once all is collected
            self._writer = pa.ipc.new_file(self._file, pa.schema([schema.field(name) for name in self._names]))

    def collect(self, rows: pa.Table, hit: Mask) -> None:
        if self._names and hit.any():
            self._writer.write_table(rows.select(self._names).filter(pa.array(hit)))

    def rows(self) -> pa.Table | None:
        """What was collected, mapped into memory; the file has no name, and is gone when the table is."""
        if not self._names:
            return None
        self._writer.close()
        with self._file:
            self._file.flush()
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()


@dataclass(frozen=True)
class File:
    """A file of the table, and what the log knows of it."""

    table: Path
    logged: str
    bytes: int
    records: int | None
    partition: dict[str, pa.Scalar]

    @property
    def path(self) -> str:
        return unquote(self.logged)

    @property
    def rows(self) -> int:
        return self.records if self.records is not None else SMALL_FILE_ROWS + 1

    def removed(self) -> StagedFile:
        if quote(self.path, safe=_PLAIN) != self.logged or "://" in self.path or self.path.startswith("/"):
            raise FatalError(
                f"the file {self.logged} of the Delta table {self.table} has a path that cannot be named in a removal",
                code="PEN-5001",
                hint="compact the table with the engine that wrote the file",
            )
        texts = {name: partition_text(name, pa.array([value]))[0] for name, value in self.partition.items()}
        return StagedFile(path=self.path, rows=self.rows, bytes=self.bytes, partition=texts)

    def read(self, schema: pa.Schema, names: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows as the table has them, some row groups at a time; twice read, the parts are the same."""
        wanted = schema if names is None else pa.schema([schema.field(name) for name in names])
        with pq.ParquetFile(self.table / self.path, coerce_int96_timestamp_unit="us") as parquet:
            there = [each.name for each in wanted if each.name in parquet.schema_arrow.names]
            for groups in _runs(parquet.metadata):
                rows = parquet.read_row_groups(groups, columns=there)
                count = sum(parquet.metadata.row_group(i).num_rows for i in groups)
                columns = [self._column(each, rows, count) for each in wanted]
                yield pa.Table.from_arrays(columns, schema=wanted)

    def _column(self, wanted: pa.Field, rows: pa.Table, count: int) -> pa.ChunkedArray | pa.Array:
        if wanted.name in self.partition:
            return pa.repeat(self.partition[wanted.name], count).cast(wanted.type)
        if wanted.name in rows.column_names:
            return widened(rows.column(wanted.name), wanted.type)
        return pa.nulls(count, wanted.type)


def _runs(metadata: pq.FileMetaData) -> Iterator[list[int]]:
    """Neighbouring row groups of at most `CHUNK_ROWS` together."""
    run: list[int] = []
    rows = 0
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).num_rows
        if run and rows + size > CHUNK_ROWS:
            yield run
            run, rows = [], 0
        run.append(group)
        rows += size
    if run:
        yield run


def file_of(table: Table, actions: pa.Table, row: int) -> File:
    partition = {name: actions.column(f"partition.{name}")[row] for name in table.partition_by()}
    path, size, records = (actions.column(name)[row].as_py() for name in ("path", "size_bytes", "num_records"))
    return File(table.path, path, size, records, partition)


def _candidates(actions: pa.Table, keys: pa.Table, partition_by: Sequence[str]) -> Ints:
    """The files whose statistics and partition do not exclude every one of the keys."""
    may_hold = np.full(actions.num_rows, bool(keys.num_rows))
    for name in keys.column_names:
        if name in partition_by:
            low = high = actions.column(f"partition.{name}")
            may_hold &= low.is_valid().to_numpy()
        elif _has_exact_bounds(keys.schema.field(name).type) and f"min.{name}" in actions.column_names:
            low, high = actions.column(f"min.{name}"), actions.column(f"max.{name}")
        else:
            continue
        may_hold &= _overlaps(keys.column(name), low, high)
    return np.flatnonzero(may_hold)


def _has_exact_bounds(kind: pa.DataType) -> bool:
    """False where writers round what they log (decimals) or leave values out of it (NaN); of truths there are but two."""
    return not (types.is_decimal(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _overlaps(values: pa.ChunkedArray, low: pa.ChunkedArray, high: pa.ChunkedArray) -> Mask:
    """For each pair of bounds whether one of the values lies between them; True where a bound is unknown."""
    if low.type != values.type:
        return np.ones(len(low), bool)
    if types.is_timestamp(values.type):
        high = pc.add(high, pa.scalar(1000, pa.duration("us")))  # writers cut it to milliseconds
    found: Mask = low.is_null().to_numpy() | high.is_null().to_numpy()
    for first in range(0, len(values), RANKED_ROWS):
        open_ = np.flatnonzero(~found)
        if not len(open_):
            break
        bounds = (each.take(pa.array(open_)) for each in (low, high))
        found[open_] = _lie_between(values.slice(first, RANKED_ROWS), *bounds)
    return found


def _lie_between(values: pa.ChunkedArray, low: pa.ChunkedArray, high: pa.ChunkedArray) -> Mask:
    count, files = len(values), len(low)
    every = pa.chunked_array([*values.chunks, *low.chunks, *high.chunks], values.type)
    ranks = pc.rank(every.combine_chunks(), tiebreaker="dense").to_numpy().astype(np.int64)
    of_values, of_low, of_high = np.sort(ranks[:count]), ranks[count : count + files], ranks[count + files :]
    next_value = np.searchsorted(of_values, of_low)
    return np.asarray(np.append(of_values, np.iinfo(np.int64).max)[next_value] <= of_high)


def _refuse_nulls(topic: Topic, rows: pa.Table, table: Table) -> None:
    for column in table.columns():
        if not column.nullable and rows.column(column.name).null_count:
            raise SchemaError(
                f"the column {column.name!r} of {topic} holds nulls, and the table forbids them", code="PEN-4001"
            )
