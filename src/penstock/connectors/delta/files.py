"""Files of a Delta table and of staged changes: what the log knows of them, which may hold given keys, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types
from pydantic import BaseModel, ConfigDict

from penstock import store
from penstock.changes.keys import Equality, Ints, Mask
from penstock.connectors.delta.table import Table
from penstock.connectors.delta.vectors import Vector, positions_of
from penstock.connectors.lake.changed import read_groups, runs
from penstock.connectors.lake.partitions import partition_text
from penstock.connectors.lake.staging import StagedFile
from penstock.errors import FatalError
from penstock.schema.evolution import widened
from penstock.store import Place

SMALL_FILE_ROWS = 1 << 17
"""Remaining rows of files up to this size go into one file with the new rows, or every epoch would leave another file."""

RANKED_ROWS = 1 << 19
"""Keys that are sorted at once, to be compared with the bounds of files."""

_PLAIN = "!$&'()+,/:;=@"
"""Characters that the client does not quote when it writes a path into the log, besides letters, digits and `_.-~`."""


class TableFile(BaseModel):
    """A file of the table, as the log describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    logged: str
    """The path as it is in the log."""
    bytes: int
    records: int | None
    partition: dict[str, str | None] = {}
    vector: Vector | None = None
    """Its deleted rows."""

    @property
    def path(self) -> str:
        return unquote(self.logged)

    @property
    def rows(self) -> int:
        """All rows, the deleted ones too."""
        return self.records if self.records is not None else SMALL_FILE_ROWS + 1

    @property
    def dead_rows(self) -> int:
        return self.vector.count if self.vector is not None else 0

    def removed(self) -> StagedFile:
        """The file as a commit names it that removes it."""
        if quote(self.path, safe=_PLAIN) != self.logged or "://" in self.path or self.path.startswith("/"):
            raise FatalError(
                f"a commit cannot remove the file {self.logged} of the Delta table: the client would write another path",
                code="PEN-5001",
                hint="compact the table with the engine that wrote the file",
            )
        return StagedFile(path=self.path, rows=self.rows, bytes=self.bytes, partition=self.partition)

    def read(
        self,
        table: Place,
        schema: pa.Schema,
        names: Sequence[str] | None = None,
        only: Sequence[int] | None = None,
        whole: bool = False,
    ) -> Iterator[pa.Table]:
        """
        The rows as the table has them, some row groups at a time; read twice, the pieces are the same.

        `names` restricts the columns, `only` the pieces. `whole` gives the deleted rows too.
        """
        dead = np.empty(0, np.int64) if whole else self.dead(table)
        for first, rows in self._pieces(table, schema, names, lambda place, *_: only is None or place in only):
            yield _without(dead, first, rows)

    def stream(self, table: Place, schema: pa.Schema, rows: int, dead: Ints) -> Iterator[tuple[int, pa.Table]]:
        """
        The rows without those at the positions `dead`, so many at a time, and how many they were with them.

        The file stays open in between, and a large group of rows is not read at once.
        """
        with pq.ParquetFile(store.source(table / self.path), coerce_int96_timestamp_unit="us") as parquet:
            there = [each.name for each in schema if each.name in parquet.schema_arrow.names]
            first = 0
            for batch in parquet.iter_batches(rows, columns=there):
                columns = [self._column(each, pa.Table.from_batches([batch]), batch.num_rows) for each in schema]
                yield batch.num_rows, _without(dead, first, pa.Table.from_arrays(columns, schema=schema))
                first += batch.num_rows

    def take(self, table: Place, schema: pa.Schema, names: Sequence[str] | None, positions: Ints) -> Iterator[pa.Table]:
        """The rows at some positions, in their order; pieces without one are not read."""

        def is_hit(_: int, first: int, end: int) -> bool:
            begin, after = np.searchsorted(positions, (first, end))
            return bool(begin < after)

        for first, rows in self._pieces(table, schema, names, is_hit):
            begin, after = np.searchsorted(positions, (first, first + rows.num_rows))
            yield rows.take(pa.array(positions[begin:after] - first))

    def dead(self, table: Place) -> Ints:
        """The positions of its deleted rows, in their order."""
        if self.vector is None:
            return np.empty(0, np.int64)
        return positions_of(self.vector.rows(lambda file: (table / file).read_bytes()))

    def _pieces(
        self, table: Place, schema: pa.Schema, names: Sequence[str] | None, is_wanted: Callable[[int, int, int], bool]
    ) -> Iterator[tuple[int, pa.Table]]:
        """All rows of some pieces, each with its first position; `is_wanted` is asked with their place, begin and end."""
        wanted = schema if names is None else pa.schema([schema.field(name) for name in names])
        with pq.ParquetFile(store.source(table / self.path), coerce_int96_timestamp_unit="us") as parquet:
            there = [each.name for each in wanted if each.name in parquet.schema_arrow.names]
            first = 0
            for place, groups in enumerate(runs(parquet.metadata)):
                count = sum(parquet.metadata.row_group(i).num_rows for i in groups)
                if is_wanted(place, first, first + count):
                    rows = read_groups(parquet, groups, there)
                    columns = [self._column(each, rows, count) for each in wanted]
                    yield first, pa.Table.from_arrays(columns, schema=wanted)
                first += count

    def _column(self, wanted: pa.Field, rows: pa.Table, count: int) -> pa.ChunkedArray | pa.Array:
        if self.partition.get(wanted.name) is not None:
            return pa.repeat(pc.cast(pa.scalar(self.partition[wanted.name]), wanted.type), count)
        if wanted.name in rows.column_names:
            return widened(rows.column(wanted.name), wanted.type)
        return pa.nulls(count, wanted.type)


def _without(dead: Ints, first: int, rows: pa.Table) -> pa.Table:
    """The rows of a file from position `first` on without those at the positions `dead`, which are sorted."""
    begin, end = np.searchsorted(dead, (first, first + rows.num_rows))
    if begin == end:
        return rows
    alive = np.ones(rows.num_rows, bool)
    alive[dead[begin:end] - first] = False
    return rows.filter(pa.array(alive))


class Log:
    """The files of the version of the table that is loaded now."""

    def __init__(self, table: Table) -> None:
        self._version = table, table.delta.version()
        self._actions = pa.table(table.delta.get_add_actions(flatten=True))
        self._partition_by = table.partition_by()
        self._entries = table.entries if table.has_vectors() else None

    def is_of(self, table: Table) -> bool:
        """True if the table is still at that version."""
        seen, version = self._version
        return seen is table and version == table.delta.version()

    def files(self) -> list[TableFile]:
        """All files."""
        return list(self._files)

    @cached_property
    def _files(self) -> list[TableFile]:
        actions, names = self._actions, self._partition_by
        partitions = [partition_text(name, actions.column(f"partition.{name}").combine_chunks()) for name in names]
        described = [actions.column(name).to_pylist() for name in ("path", "size_bytes", "num_records")]
        return [
            TableFile(
                logged=path,
                bytes=size,
                records=records,
                partition=dict(zip(names, each, strict=True)),
                vector=self._entries.vector(unquote(path)) if self._entries is not None else None,
            )
            for path, size, records, *each in zip(*described, *partitions, strict=True)
        ]

    def candidates(self, keys: pa.Table, equality: Equality) -> list[TableFile]:
        """The files whose statistics and partition do not rule out every one of the keys."""
        may_hold = np.full(self._actions.num_rows, bool(keys.num_rows))
        for name in keys.column_names:
            if name in equality.texts:
                continue  # other texts may be the same key
            if name in self._partition_by:
                low = high = self._actions.column(f"partition.{name}")
                may_hold &= low.is_valid().to_numpy()
            elif _has_exact_bounds(keys.schema.field(name).type) and f"min.{name}" in self._actions.column_names:
                low, high = self._actions.column(f"min.{name}"), self._actions.column(f"max.{name}")
            else:
                continue
            may_hold &= _overlaps(keys.column(name), low, high)
        return [self._files[row] for row in np.flatnonzero(may_hold)]

    def rows(self) -> int:
        """Rows of all files, as far as the log knows."""
        return int(pc.sum(self._actions.column("num_records")).as_py() or 0)


def _has_exact_bounds(kind: pa.DataType) -> bool:
    """
    False for types whose bounds in the log may miss values: decimals are rounded, and floats have two zeros and NaN.

    A boolean has only two values, so that bounds rule out nothing.
    """
    return not (types.is_decimal(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _overlaps(values: pa.ChunkedArray, low: pa.ChunkedArray, high: pa.ChunkedArray) -> Mask:
    """For each pair of bounds whether one of the values is between them; True where a bound is unknown."""
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
    ranks: Ints = pc.rank(every.combine_chunks(), tiebreaker="dense").to_numpy().astype(np.int64)
    of_values, of_low, of_high = np.sort(ranks[:count]), ranks[count : count + files], ranks[count + files :]
    next_value = np.searchsorted(of_values, of_low)
    return np.asarray(np.append(of_values, np.iinfo(np.int64).max)[next_value] <= of_high)
