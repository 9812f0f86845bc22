"""
Changes applied by key: new rows in data files, old rows in position deletes.

Say that an epoch changes 1,000 rows of a table with ten million. One data file gets the new rows, and one delete file names
the old ones: the data file that holds each, and its position there. Only these two are written. When there are many delete
files, they become one; a data file with many deleted rows is written again without them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, _read_deletes
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import Record

from penstock.changes import own_columns
from penstock.changes.collapse import Collapsed
from penstock.changes.keys import Ints
from penstock.changes.streamed import collapse_parts
from penstock.connectors.iceberg.columns import Columns, iceberg_schema
from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.lake.changed import StagedChanges, as_stored
from penstock.connectors.lake.index import Index, Part, Wanted
from penstock.connectors.lake.staging import Stage
from penstock.connectors.upsert import DELETED, gone_columns, one_key, refuse_own_mark
from penstock.errors import SchemaError
from penstock.schema import key_of
from penstock.schema.evolution import widened
from penstock.sink import Topic

if TYPE_CHECKING:
    from penstock.connectors.iceberg.table import Table
    from penstock.store import Place

PURGE_ROWS = 1_000_000
"""Most rows of data files that one epoch writes again because of their deleted rows."""

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
            path: known.manifests.get(path) or [entry.data_file for entry in each.fetch_manifest_entry(io)]
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
            TableFile(file, np.unique(np.concatenate(dead[file.file_path])) if file.file_path in dead else _NONE)
            for file in files
            if file.content == DataFileContent.DATA
        ]


@dataclass
class Upsert:
    """One epoch's changes on their way into a table; nothing of it is visible before the commit."""

    topic: Topic
    config: IcebergConfig
    table: Table
    columns: Columns
    """Those of the table after the commit."""
    known: Known
    stage: Stage

    def __post_init__(self) -> None:
        self._contents = Contents(self.table, self.known)
        self._result = Changed()
        self._kept: list[pa.Table] = []
        self._doomed: list[tuple[TableFile, Ints]] = []
        """Files that stay, and all their deleted rows from now on."""

    def run(
        self, changed: Sequence[Place], schemas: Sequence[pa.Schema], sent: list[str], now: pa.Schema | None
    ) -> Changed:
        """Stage what turns the table into the next version of it."""
        whole = iceberg_schema(self.topic, self.columns.schema)
        own = pa.schema([each for each in whole if not self.config.soft_delete or each.name != DELETED])
        gone, key = gone_columns(sent, now), one_key(self.topic, [key_of(each) for each in schemas])
        parts = [StagedChanges(place, partial(as_stored, schema=own, gone=gone)) for place in changed]
        changes = collapse_parts(parts, key, own)
        self._result.sent = sent
        if changes.truncated and not self.config.soft_delete:
            self._result.dropped = [*(file.data for file in self._contents.data), *self._contents.deletes]
        else:
            self._remove(changes, own)
        self._add(changes)
        return self._result

    def _remove(self, changes: Collapsed, own: pa.Schema) -> None:
        keys = changes.keys().cast(pa.schema([own.field(name) for name in changes.key]))
        wanted, index = Wanted.of(keys, changes.equality), self._index(keys.schema, changes)
        for file in self._contents.data:
            part: Part = index.part(file)
            positions, places = wanted.find(part)
            alive = ~np.isin(positions, file.dead)
            self._remove_from(file, positions[alive], places[alive], changes)
        index.keep_only(self._contents.data)
        self._purge()
        self._write_deletes()

    def _index(self, key: pa.Schema, changes: Collapsed) -> Index:
        made = Index(
            self.stage.targets.claim(self.topic),
            str(self.table.metadata.table_uuid),
            key,
            changes.equality,
            lambda file, wanted: self._read(file, wanted.names, wanted),
        )
        if self.known.index is None or not self.known.index.is_like(made):
            self.known.index = made
        # Of the version that is loaded now, and with the keys that reach it now.
        self.known.index.read, self.known.index.table = made.read, made.table
        return self.known.index

    def _remove_from(self, file: TableFile, positions: Ints, places: Ints, changes: Collapsed) -> None:
        if changes.kept and len(positions):
            names = [*changes.key, *changes.kept]
            wanted = pa.schema([changes.upserts.schema.field(name) for name in names])
            if self.config.soft_delete:
                names, wanted = [*names, DELETED], wanted.append(pa.field(DELETED, pa.bool_()))
            self._kept += (_living(rows) for rows in self._take(file, names, wanted, positions))
        if self.config.soft_delete:
            deleted = positions[places >= changes.upserts.num_rows]
            if changes.truncated:
                every = np.setdiff1d(np.arange(file.rows), file.dead)
                deleted = np.setdiff1d(every, positions[places < changes.upserts.num_rows])
                positions = every
            for rows in self._take(file, None, None, deleted):
                place = rows.schema.get_field_index(DELETED)
                marks = pa.repeat(True, rows.num_rows)
                named = rows.set_column(place, DELETED, marks) if place >= 0 else rows.append_column(DELETED, marks)
                self._write(named)
        dead = np.union1d(file.dead, positions)
        if len(dead) == file.rows and file.rows:
            self._result.dropped.append(file.data)
        else:
            self._doomed.append((file, dead))

    def _purge(self) -> None:
        """Write files again that have many deleted rows: the worst first, and not too many in one epoch."""
        share = self.config.purge_percent / 100
        due = [(file, dead) for file, dead in self._doomed if len(dead) and len(dead) >= share * file.rows]
        due.sort(key=lambda each: len(each[1]) / each[0].rows, reverse=True)
        for (file, dead), size in zip(due, accumulate(file.rows for file, _ in due), strict=True):
            if size > max(PURGE_ROWS, due[0][0].rows):
                break
            for rows in self._take(file, None, None, np.setdiff1d(np.arange(file.rows), dead)):
                self._write(rows)
            self._result.dropped.append(file.data)
            self._doomed = [each for each in self._doomed if each[0] is not file]

    def _write_deletes(self) -> None:
        """One delete file per partition: with the new deletes alone, or with all that there are."""
        merges = len(self._contents.deletes) >= MERGED
        if merges:
            self._result.dropped += self._contents.deletes
        groups: dict[tuple[int, Record], list[tuple[str, Ints]]] = {}
        for file, dead in self._doomed:
            positions = dead if merges else np.setdiff1d(dead, file.dead)
            if len(positions):
                groups.setdefault((file.data.spec_id, file.data.partition), []).append((file.path, positions))
        for number, ((spec_id, partition), found) in enumerate(groups.items()):
            found.sort(key=lambda each: each[0])
            self._result.deletes.append(self._deletes(number, spec_id, partition, found))

    def _deletes(self, number: int, spec_id: int, partition: Record, found: list[tuple[str, Ints]]) -> DataFile:
        paths = np.repeat(np.array([path for path, _ in found], object), [len(positions) for _, positions in found])
        every = np.concatenate([positions for _, positions in found])
        sink = pa.BufferOutputStream()
        pq.write_table(
            pa.table([pa.array(paths, pa.string()), pa.array(every)], schema=_DELETES), sink, compression="zstd"
        )
        data = sink.getvalue().to_pybytes()
        name = f"data/{self.stage.stem}-deletes-{number:04d}.parquet"
        self.stage.put(self.topic, name, data)
        low, high = struct.pack("<q", int(every.min())), struct.pack("<q", int(every.max()))
        made = DataFile.from_args(
            content=DataFileContent.POSITION_DELETES,
            file_path=str(self.stage.targets.claim(self.topic) / name),
            file_format=FileFormat.PARQUET,
            partition=partition,
            record_count=len(every),
            file_size_in_bytes=len(data),
            column_sizes={},
            value_counts={_PATH: len(every), _POS: len(every)},
            null_value_counts={_PATH: 0, _POS: 0},
            nan_value_counts={},
            lower_bounds={_PATH: found[0][0].encode(), _POS: low},
            upper_bounds={_PATH: found[-1][0].encode(), _POS: high},
            key_metadata=None,
            split_offsets=None,
            equality_ids=None,
            sort_order_id=None,
        )
        made.spec_id = spec_id
        return made

    def _add(self, changes: Collapsed) -> None:
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

    def _take(
        self, file: TableFile, names: Sequence[str] | None, wanted: pa.Schema | None, positions: Ints
    ) -> Iterator[pa.Table]:
        """The rows of a file at some positions, in their order."""
        first = 0
        for rows in self._read(file, names, wanted) if len(positions) else ():
            begin, end = np.searchsorted(positions, (first, first + rows.num_rows))
            if begin < end:
                yield rows.take(pa.array(positions[begin:end] - first))
            first += rows.num_rows

    def _read(self, file: TableFile, names: Sequence[str] | None, wanted: pa.Schema | None) -> Iterator[pa.Table]:
        """All rows of a file, the deleted ones too, some at a time; columns that the table does not have yet are null."""
        stored = self.table.metadata.schema()
        there = [each.name for each in stored.fields if names is None or each.name in names]
        scan = ArrowScan(self.table.metadata, self.table.iceberg.io, stored.select(*there), AlwaysTrue())
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


def _positions(table: Table, file: DataFile) -> dict[str, Ints]:
    """Per data file the rows that a delete file names."""
    found: Any = _read_deletes(table.iceberg.io, file)
    return {path: np.unique(positions.to_numpy()) for path, positions in found.items()}
