"""
Changes applied by key: new rows in data files, old rows in position deletes.

Say that an epoch changes 1,000 rows of a table with ten million. One data file gets the new rows, and one delete file names
the old ones: the data file that holds each, and its position there. Only these two are written. When there are many delete
files, they become one; a data file with many deleted rows is written again without them.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, _read_deletes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.table.snapshots import Snapshot

from penstock.changes import own_columns
from penstock.changes.collapse import Collapsed
from penstock.changes.keys import Equality, Ints, Mask
from penstock.connectors.iceberg.columns import Columns, iceberg_schema
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.worn import Group, group_of, joined, worst_first
from penstock.connectors.lake.index import Index, Part, Wanted
from penstock.connectors.lake.staging import Stage
from penstock.connectors.upsert import DELETED, refuse_own_mark
from penstock.errors import SchemaError
from penstock.schema.evolution import widened
from penstock.sink import Topic

if TYPE_CHECKING:
    from penstock.connectors.iceberg.table import Table
    from penstock.store import Place

MERGED = 16
"""This many delete files become one: a reader opens all of them for every scan."""

_PATH, _POS = 2147483546, 2147483545
"""The ids that Iceberg gives to the columns of a delete file."""

_DELETES = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(_PATH)}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(_POS)}),
    ]
)
_NONE: Ints = np.empty(0, np.int64)


@dataclass(frozen=True)
class TableFile:
    """A data file of a snapshot."""

    data: DataFile
    dead: Ints = field(default_factory=lambda: _NONE)
    """The positions of its deleted rows, in their order."""

    @property
    def path(self) -> str:
        return str(self.data.file_path)

    @property
    def bytes(self) -> int:
        return int(self.data.file_size_in_bytes)

    @property
    def rows(self) -> int:
        return int(self.data.record_count)


@dataclass
class Known:
    """What the driver remembers of a table from epoch to epoch: files never change."""

    manifests: dict[str, list[DataFile]] = field(default_factory=dict)
    deletes: dict[str, dict[str, Ints]] = field(default_factory=dict)
    index: Index | None = None

    def keep_only(self, files: Sequence[TableFile]) -> None:
        """Forget the keys of other files."""
        if self.index is not None:
            self.index.keep_only(files)


class DeleteFile(BaseModel):
    """A delete file that was written, as a receipt holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Relative to the topic's target."""
    beside: str
    """A data file of the same partition."""
    rows: int
    bytes: int
    paths: tuple[str, str]
    """The first and the last data file that it names."""
    positions: tuple[int, int]
    """The lowest and the highest position."""

    def as_data(self, target: Place, beside: DataFile) -> DataFile:
        """As a manifest names it."""
        (first, last), (low, high) = self.paths, (struct.pack("<q", each) for each in self.positions)
        made = DataFile.from_args(
            content=DataFileContent.POSITION_DELETES,
            file_path=str(target / self.path),
            file_format=FileFormat.PARQUET,
            partition=beside.partition,
            record_count=self.rows,
            file_size_in_bytes=self.bytes,
            column_sizes={},
            value_counts={_PATH: self.rows, _POS: self.rows},
            null_value_counts={_PATH: 0, _POS: 0},
            nan_value_counts={},
            lower_bounds={_PATH: first.encode(), _POS: low},
            upper_bounds={_PATH: last.encode(), _POS: high},
            key_metadata=None,
            split_offsets=None,
            equality_ids=None,
            sort_order_id=None,
        )
        made.spec_id = beside.spec_id
        return made


@dataclass
class Written:
    """What the changes of an epoch come to, besides data files."""

    deletes: list[DeleteFile] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Data files and delete files that the next snapshot lacks."""


@dataclass
class Changed:
    """What a commit adds and removes."""

    deletes: list[DataFile] = field(default_factory=list)
    dropped: list[DataFile] = field(default_factory=list)
    """Data files and delete files that the next snapshot lacks."""
    sent: list[str] = field(default_factory=list)
    """Every column of the topic that ever came."""


class Contents:
    """The files of the newest snapshot of a table."""

    def __init__(self, table: Table, known: Known) -> None:
        io, snapshot = table.iceberg.io, head(table)
        manifests = {each.manifest_path: each for each in (snapshot.manifests(io) if snapshot else [])}
        known.manifests = {
            path: known.manifests[path]
            if path in known.manifests  # an empty one too
            else [entry.data_file for entry in each.fetch_manifest_entry(io)]
            for path, each in manifests.items()
        }
        files = [file for each in known.manifests.values() for file in each]
        strange = {str(file.content) for file in files if file.content == DataFileContent.EQUALITY_DELETES}
        strange |= {str(file.file_format) for file in files if file.file_format != FileFormat.PARQUET}
        if strange:
            raise SchemaError(
                f"the Iceberg table {table.name} has files of a kind that upserts cannot read: {', '.join(strange)}",
                code="PEN-4002",
                hint="rewrite its files with the engine that wrote them, or write to another table",
            )
        self.deletes = [file for file in files if file.content == DataFileContent.POSITION_DELETES]
        known.deletes = {
            file.file_path: known.deletes.get(file.file_path) or _positions(table, file) for file in self.deletes
        }
        dead: dict[str, list[Ints]] = {}
        for found in known.deletes.values():
            for path, positions in found.items():
                dead.setdefault(path, []).append(positions)
        self.data = [
            TableFile(file, _in_order(dead[file.file_path]) if file.file_path in dead else _NONE)
            for file in files
            if file.content == DataFileContent.DATA
        ]

    def by_path(self) -> dict[str, DataFile]:
        return {file.file_path: file for file in (*(each.data for each in self.data), *self.deletes)}

    def merging(self) -> set[Group]:
        """The partitions that have so many delete files that they become one."""
        count = Counter(group_of(file) for file in self.deletes)
        return {group for group, files in count.items() if files >= MERGED}

    def deletes_of(self, groups: Collection[Group]) -> list[str]:
        return [file.file_path for file in self.deletes if group_of(file) in groups]

    def changed(self, target: Place, written: Written, sent: list[str]) -> Changed:
        """What was written, as the commit names it."""
        known = self.by_path()
        deletes = [each.as_data(target, known[each.beside]) for each in written.deletes]
        return Changed(deletes, [known[each] for each in written.dropped], sent)


@dataclass
class Upsert:
    """An epoch's changes on their way into a table, or a piece of them; nothing of it is visible before the commit."""

    topic: Topic
    config: IcebergConfig
    table: Table
    columns: Columns
    """Those of the table after the commit."""
    known: Known
    stage: Stage
    contents: Contents

    def __post_init__(self) -> None:
        self.written = Written()
        self._kept: list[pa.Table] = []
        self._doomed: list[tuple[TableFile, Ints]] = []
        """Files that stay, and all their deleted rows from now on."""

    def all_at_once(self, changes: Collapsed, purge_rows: int) -> None:
        """Stage what turns the table into the next version of it."""
        if changes.truncated and not self.config.soft_delete:
            self.written.dropped = list(self.contents.by_path())
        else:
            merging = self.contents.merging()
            self.remove(changes, self.contents.data)
            self.known.keep_only(self.contents.data)
            self._purge(purge_rows)
            self.written.dropped += self.contents.deletes_of(merging)
            self.write_deletes(merging)
        self.add(changes)

    def remove(self, changes: Collapsed, files: Sequence[TableFile]) -> None:
        """Find the rows of some files that go."""
        keys = key_columns(changes, self.columns, self.topic)
        wanted, index = (
            Wanted.of(keys, changes.equality),
            index_of(self.table, self.known, keys.schema, changes.equality),
        )
        for file in files:
            part: Part = index.part(file)
            positions, places = wanted.find(part)
            alive = ~_are_in(file.dead, positions)
            self._remove_from(file, positions[alive], places[alive], changes)

    def look_up(self, changes: Collapsed, files: Sequence[TableFile]) -> None:
        """Read the values that the changes leave as they are stored."""
        keys = key_columns(changes, self.columns, self.topic)
        wanted, index = (
            Wanted.of(keys, changes.equality),
            index_of(self.table, self.known, keys.schema, changes.equality),
        )
        for file in files if changes.kept else ():
            positions, _ = wanted.find(index.part(file))
            self._keep(file, positions[~_are_in(file.dead, positions)], changes)

    def _remove_from(self, file: TableFile, positions: Ints, places: Ints, changes: Collapsed) -> None:
        self._keep(file, positions, changes)
        if self.config.soft_delete:
            deleted = positions[places >= changes.upserts.num_rows]
            if changes.truncated:
                every = np.setdiff1d(np.arange(file.rows), file.dead)
                deleted = np.setdiff1d(every, positions[places < changes.upserts.num_rows])
                positions = every
            for rows in _take(self.table, file, None, None, deleted):
                place = rows.schema.get_field_index(DELETED)
                marks = pa.repeat(True, rows.num_rows)
                named = rows.set_column(place, DELETED, marks) if place >= 0 else rows.append_column(DELETED, marks)
                self._write(named)
        dead = _in_order([file.dead, positions])
        if len(dead) == file.rows and file.rows:
            self.written.dropped.append(file.path)
        else:
            self._doomed.append((file, dead))

    def _keep(self, file: TableFile, positions: Ints, changes: Collapsed) -> None:
        if changes.kept and len(positions):
            names = [*changes.key, *changes.kept]
            wanted = pa.schema([changes.upserts.schema.field(name) for name in names])
            if self.config.soft_delete:
                names, wanted = [*names, DELETED], wanted.append(pa.field(DELETED, pa.bool_()))
            self._kept += (_living(rows) for rows in _take(self.table, file, names, wanted, positions))

    def rewrite(self) -> None:
        """Write the files again that were looked at, without their deleted rows."""
        for file, dead in self._doomed:
            for rows in _take(self.table, file, None, None, np.setdiff1d(np.arange(file.rows), dead)):
                self._write(rows)
            self.written.dropped.append(file.path)
        self._doomed = []

    def _purge(self, most: int) -> None:
        """Write files again that are worn or small. Larger ones wait for an epoch that plans it."""
        worst = worst_first(self._doomed, self.config.purge_percent, most)
        due = {file.path for file in worst}
        others = [file for file, _ in self._doomed if file.path not in due]
        groups = joined(others, most - sum(file.rows for file in worst))
        due.update(file.path for group in groups for file in group)
        rest = [each for each in self._doomed if each[0].path not in due]
        self._doomed = [each for each in self._doomed if each[0].path in due]
        self.rewrite()
        self._doomed = rest

    def write_deletes(self, merging: Collection[Group] = ()) -> None:
        """One delete file per partition: with the new deletes alone, or with all that there are."""
        groups: dict[Group, list[tuple[TableFile, Ints]]] = {}
        for file, dead in self._doomed:
            group = group_of(file.data)
            positions = dead if group in merging else np.setdiff1d(dead, file.dead, assume_unique=True)
            if len(positions):
                groups.setdefault(group, []).append((file, positions))
        for number, found in enumerate(groups.values()):
            self.written.deletes.append(self._deletes(number, sorted(found, key=lambda each: each[0].path)))

    def _deletes(self, number: int, found: list[tuple[TableFile, Ints]]) -> DeleteFile:
        paths = np.repeat(np.array([file.path for file, _ in found], object), [len(each) for _, each in found])
        every = np.concatenate([positions for _, positions in found])
        sink = pa.BufferOutputStream()
        pq.write_table(
            pa.table([pa.array(paths, pa.string()), pa.array(every)], schema=_DELETES), sink, compression="zstd"
        )
        data = sink.getvalue().to_pybytes()
        name = f"data/{self.stage.stem}-deletes-{number:04d}.parquet"
        self.stage.put(self.topic, name, data)
        return DeleteFile(
            path=name,
            beside=found[0][0].path,
            rows=len(every),
            bytes=len(data),
            paths=(found[0][0].path, found[-1][0].path),
            positions=(int(every.min()), int(every.max())),
        )

    def add(self, changes: Collapsed) -> None:
        """Write the new rows."""
        kept = pa.concat_tables(self._kept, promote_options="default") if self._kept else None
        for rows in changes.rows(kept)(0, changes.upserts.num_rows):
            if self.config.soft_delete:
                rows = rows.append_column(DELETED, pa.repeat(False, rows.num_rows))
            for name in self.columns.required():
                if name not in rows.column_names or rows.column(name).null_count:
                    raise SchemaError(
                        f"the column {name!r} of {self.topic} holds nulls, and the table forbids them", code="PEN-4001"
                    )
            self._write(rows)

    def _write(self, rows: pa.Table) -> None:
        schema = pa.schema([self.columns.schema.field(name) for name in rows.column_names])
        plain = rows.cast(iceberg_schema(self.topic, schema)).combine_chunks()
        for batch in plain.to_batches():
            self.stage.write(self.topic, pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def index_of(table: Table, known: Known, key: pa.Schema, equality: Equality) -> Index:
    """Where each key of the table is; what is known of it from earlier epochs stays."""
    made = Index(
        table.target,
        str(table.metadata.table_uuid),
        key,
        equality,
        lambda file, wanted: _read(table, file, wanted.names, wanted),
    )
    if known.index is None or not known.index.is_like(made):
        known.index = made
    # Of the version that is loaded now, and with the keys that reach it now.
    known.index.read, known.index.table = made.read, made.table
    return known.index


def _take(
    table: Table, file: TableFile, names: Sequence[str] | None, wanted: pa.Schema | None, positions: Ints
) -> Iterator[pa.Table]:
    """The rows of a file at some positions, in their order."""
    first = 0
    for rows in _read(table, file, names, wanted) if len(positions) else ():
        begin, end = np.searchsorted(positions, (first, first + rows.num_rows))
        if begin < end:
            yield rows.take(pa.array(positions[begin:end] - first))
        first += rows.num_rows


def _read(table: Table, file: TableFile, names: Sequence[str] | None, wanted: pa.Schema | None) -> Iterator[pa.Table]:
    """All rows of a file, the deleted ones too, some at a time; columns that the table does not have yet are null."""
    stored = table.metadata.schema()
    there = [each.name for each in stored.fields if names is None or each.name in names]
    scan = ArrowScan(table.metadata, table.iceberg.io, stored.select(*there), AlwaysTrue())
    for batch in scan._record_batches_from_scan_tasks_and_deletes([FileScanTask(file.data)], {}):
        rows = pa.Table.from_batches([batch])
        if wanted is None:
            yield rows
            continue
        columns = [
            widened(rows.column(each.name), each.type) if each.name in there else pa.nulls(rows.num_rows, each.type)
            for each in wanted
        ]
        yield pa.table(columns, schema=pa.schema([pa.field(each.name, each.type) for each in wanted]))


def key_columns(changes: Collapsed, columns: Columns, topic: Topic) -> pa.Table:
    """Every key that the changes touch, in the types of the table."""
    whole = iceberg_schema(topic, columns.schema)
    return changes.keys().cast(pa.schema([whole.field(name) for name in changes.key]))


def head(table: Table) -> Snapshot | None:
    """The newest snapshot of the branch; of `main`, as long as there is no such branch."""
    found = table.metadata.snapshot_by_name(table.branch) if table.branch in table.metadata.refs else None
    return found or table.metadata.current_snapshot()


def _living(rows: pa.Table) -> pa.Table:
    """Rows that are not marked as deleted, without the mark: a row that moves to the key of such a one keeps its own values."""
    if DELETED not in rows.column_names:
        return rows
    return rows.filter(pc.invert(pc.fill_null(rows.column(DELETED), False))).drop_columns([DELETED])


def own_rows(config: IcebergConfig, topic: Topic, schema: pa.Schema) -> pa.Schema:
    """The columns of a topic that its table has: for `upsert` without those that describe the change."""
    if config.mode != "upsert":
        return schema
    refuse_own_mark(config, topic, schema.names)
    fields = [schema.field(name).remove_metadata() for name in own_columns(schema)]
    return pa.schema([*fields, *([pa.field(DELETED, pa.bool_())] if config.soft_delete else [])])


def _in_order(pieces: Sequence[Ints]) -> Ints:
    """All positions, each once. To sort them takes a fifth of the time of `np.unique`, which hashes them."""
    every = np.sort(np.concatenate(pieces))
    found: Ints = every[np.append(True, every[1:] != every[:-1])] if len(every) else every
    return found


def _are_in(dead: Ints, positions: Ints) -> Mask:
    """Which positions are among those in `dead`, which are in their order."""
    if not len(dead):
        return np.zeros(len(positions), bool)
    found: Mask = dead[np.minimum(np.searchsorted(dead, positions), len(dead) - 1)] == positions
    return found


def _positions(table: Table, file: DataFile) -> dict[str, Ints]:
    """Per data file the rows that a delete file names."""
    found: Any = _read_deletes(table.iceberg.io, file)
    return {path: np.unique(positions.to_numpy()) for path, positions in found.items()}
