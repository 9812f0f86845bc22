"""Changes that tasks have staged, and that a commit applies by key: where they are, and their rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import store
from penstock.changes import own_columns
from penstock.connectors.lake.staging import ParquetPart, Part
from penstock.connectors.lake.targets import HIDDEN
from penstock.errors import StagingLost
from penstock.store import ObjectPath, Place

CHUNK_ROWS, CHUNK_BYTES = 1 << 17, 32 << 20
"""Rows of a file that are held at once, if its row groups are not larger."""

SMALL_BYTES, SMALL_FILES = 1 << 20, 16
"""Of a file in an object store that is read in one request, and how many such files are kept: plan and commit read each."""


ALONE_BYTES = 1 << 20
"""Up to so many bytes of a file are read without threads."""


def changes_of(target: Place, pipeline: str) -> Place:
    """Where the changes of a pipeline are until they are applied."""
    return target / HIDDEN / quote(pipeline, safe="") / "changes"


def begin_changes(path: Place, schema: pa.Schema) -> Part:
    """Begin a file of changes, which is read once."""
    return ParquetPart(path, schema, "lz4", use_dictionary=False, write_statistics=False)


@dataclass(frozen=True)
class StagedChanges:
    """A file of changes, in the pieces that it is read in; `stored` gives them the table's types."""

    path: Place
    stored: Callable[[pa.Table], pa.Table]
    only: Sequence[str] | None = None
    """The columns that are read; None: all."""

    @cached_property
    def schema(self) -> pa.Schema:
        whole = self._metadata.schema.to_arrow_schema().empty_table()
        return self.stored(whole.select(self._names(whole.column_names))).schema

    @cached_property
    def sizes(self) -> Sequence[int]:
        return [sum(self._metadata.row_group(i).num_rows for i in groups) for groups in runs(self._metadata)]

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        try:
            return pq.read_metadata(_opened(self.path))
        except FileNotFoundError as error:
            raise StagingLost(f"{self.path} is gone") from error

    def read(self, columns: Sequence[str], pieces: Sequence[int] | None = None) -> Iterator[pa.Table]:
        with pq.ParquetFile(_opened(self.path), metadata=self._metadata) as parquet:
            there = [name for name in columns if name in parquet.schema_arrow.names]
            groups = list(runs(self._metadata))
            for place in range(len(groups)) if pieces is None else pieces:
                yield self.stored(read_groups(parquet, groups[place], there)).select(list(columns))

    def _names(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.only is None or name in self.only]


def _opened(path: Place) -> Any:
    """What `pq.ParquetFile` takes. The name of a staged file never comes again."""
    if isinstance(path, Path):
        return path
    try:
        return pa.BufferReader(_small(path))
    except _Large as large:
        return large.reader


class _Large(Exception):
    """A file that is not read whole, with its reader, which has asked for its size already."""

    def __init__(self, reader: IO[bytes]) -> None:
        super().__init__()
        self.reader = reader


@lru_cache(SMALL_FILES)
def _small(path: ObjectPath) -> bytes:
    reader = store.reader(path)
    size = reader.seek(0, os.SEEK_END)
    reader.seek(0)
    if size > SMALL_BYTES:
        raise _Large(reader)
    return reader.read(size)


def as_stored(rows: pa.Table, schema: pa.Schema, gone: Iterable[str]) -> pa.Table:
    """Changes in the types of the table; a column that the topic no longer has is null, not unchanged."""
    own = set(own_columns(rows.schema))
    fields = [
        each.with_type(schema.field(each.name).type) if each.name in own and each.name in schema.names else each
        for each in rows.schema
    ]
    rows = rows.cast(pa.schema(fields))
    for name in gone:
        if name not in rows.column_names and name in schema.names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, schema.field(name).type))
    return rows


def read_groups(parquet: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """Some row groups of a file; little is read without threads, which take longer to wake than it takes to read."""
    size = sum(parquet.metadata.row_group(place).total_byte_size for place in groups)
    return parquet.read_row_groups(list(groups), columns=list(columns), use_threads=size > ALONE_BYTES)


def runs(metadata: pq.FileMetaData) -> Iterator[list[int]]:
    """Neighbouring row groups of at most `CHUNK_ROWS` and `CHUNK_BYTES` together."""
    run: list[int] = []
    rows = size = 0
    for place in range(metadata.num_row_groups):
        group = metadata.row_group(place)
        if run and (rows + group.num_rows > CHUNK_ROWS or size + group.total_byte_size > CHUNK_BYTES):
            yield run
            run, rows, size = [], 0, 0
        run.append(place)
        rows += group.num_rows
        size += group.total_byte_size
    if run:
        yield run
