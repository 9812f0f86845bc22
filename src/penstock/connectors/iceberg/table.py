"""An Iceberg table in a SQL catalog: its markers, one commit at a time, what that leaves behind, and making it durable."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlparse
from uuid import uuid4

import pyarrow as pa
from pydantic import ValidationError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, ResolveError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import ArrowScan, _read_all_delete_files
from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    write_manifest,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, TableProperties, Transaction
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import update_mapping
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSortOrderUpdate,
    AssertCurrentSchemaId,
    AssertLastAssignedFieldId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetPropertiesUpdate,
)
from pyiceberg.table.update.snapshot import _FastAppendFiles, _ManifestMergeManager
from pyiceberg.typedef import EMPTY_DICT
from pyiceberg.types import NestedField
from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from penstock import durable, failpoints
from penstock.connectors.iceberg.columns import Columns
from penstock.errors import FatalError, RetryableError, SchemaError
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic

SEEDED = "penstock.seeded"

PROPERTIES = {
    "format-version": "2",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Of tables that are created: metadata files that no reader is likely to hold any more are removed by every commit."""

_FAN = 32
"""Manifests of about one size that are merged into one: planning reads few of them, and a commit rewrites few entries."""


class Catalog(SqlCatalog):
    """A SQL catalog whose commits survive a power cut."""

    def __init__(self, name: str, url: URL) -> None:
        super().__init__(name, uri=url.render_as_string(hide_password=False))
        self.engine.dispose()
        self.engine = _engine(url)
        self.written = ""
        """The metadata file that was written last, whether or not the catalog names it."""
        self._base = ""

    def _write_metadata(self, metadata: TableMetadata, io: FileIO, metadata_path: str) -> None:  # type: ignore[override]
        super()._write_metadata(metadata, io, metadata_path)
        self.written = metadata_path
        sync(metadata_path)  # before the catalog names it

    def commit_table(self, table: IcebergTable, *changes: Any) -> CommitTableResponse:
        self._base = table.metadata_location
        return super().commit_table(table, *changes)

    def _update_and_stage_table(self, current_table: IcebergTable | None, *given: Any) -> Any:
        # The requirements do not speak of all that was looked at: a tag on a snapshot that expires, another sort order.
        if current_table is None or current_table.metadata_location != self._base:
            raise CommitFailedException("somebody has changed the table meanwhile")
        return super()._update_and_stage_table(current_table, *given)

    def sync(self) -> None:
        """Who made the newest commit may have died before SQLite had synced it."""
        if self.engine.url.get_backend_name() == "sqlite" and self.engine.url.database:
            durable.fsync(self.engine.url.database)

    def table(self, topic: Topic, identifier: tuple[str, ...]) -> Table:
        """The table as it is now; `NoSuchTableError` when there is none."""
        return Table(topic, self.load_table(identifier), self)


@dataclass
class Table:
    """One version of an Iceberg table; a commit that is not the next one after it fails."""

    topic: Topic
    iceberg: IcebergTable
    catalog: Catalog

    def __post_init__(self) -> None:
        if self.metadata.format_version > 2:
            raise SchemaError(
                f"the Iceberg table {self.name} has format version {self.metadata.format_version}, and 2 is written",
                code="PEN-4002",
                hint="write to another table",
            )
        if "://" in self.metadata.location and not self.metadata.location.startswith("file://"):
            raise SchemaError(
                f"the Iceberg table {self.name} is at {self.metadata.location}, and only local ones can be written yet",
                code="PEN-4002",
                hint="write to another table",
            )

    @property
    def metadata(self) -> TableMetadata:
        return self.iceberg.metadata

    @property
    def name(self) -> str:
        return ".".join(self.iceberg.name())

    def columns(self) -> Columns:
        return Columns.of(self.topic, self.metadata.schema(), self.metadata.last_column_id)

    def marker(self, pipeline: str) -> CommittedEpoch | None:
        text = self.metadata.properties.get(_key(pipeline))
        try:
            return CommittedEpoch.model_validate_json(text) if text is not None else None
        except ValidationError as error:
            raise FatalError(
                f"the property {_key(pipeline)} of the Iceberg table {self.name} is corrupt: {error}",
                code="PEN-5020",
                hint="restore the table's properties, or write to a new table",
            ) from error

    def is_seeded(self) -> bool:
        return self.metadata.properties.get(SEEDED) == "true"

    def mark_seeded(self) -> None:
        """Record it, or raise `CommitFailedException`."""
        self.iceberg._do_commit((SetPropertiesUpdate(updates={SEEDED: "true"}),), self._unchanged())

    def commit(
        self,
        epoch: Epoch,
        end: Positions,
        columns: Columns,
        files: Sequence[DataFile],
        keep_snapshots: int,
        anew: Sequence[DataFile] | None = None,
    ) -> None:
        """
        Make the version after this one: columns, files and marker at once; or raise `CommitFailedException`.

        `anew` holds the rows of all files that the table has, which it takes the place of.
        """
        marker = CommittedEpoch(incarnation=epoch.incarnation, number=epoch.number, end=dict(end))
        text = durable.canonical(marker.model_dump(mode="json"))
        transaction = _Transaction(self.iceberg)
        transaction._stage(self._widening(columns), self._unchanged())
        transaction._stage((SetPropertiesUpdate(updates={_key(epoch.pipeline): text}),))
        summary = {
            "penstock.pipeline": epoch.pipeline,
            "penstock.incarnation": epoch.incarnation,
            "penstock.epoch": str(epoch.number),
        }
        written: list[str] = []
        for producer, added in ((_Replace, anew), (_Append, files)):
            if added is not None:
                change = producer(producer.operation, transaction, self.iceberg.io, _Stem(epoch), summary)  # type: ignore[arg-type]
                for file in added:
                    change.append_data_file(file)
                transaction._stage(*change._commit())
                written += [*change._written_manifests, *change._written_manifest_lists]
        old = _expired(self.metadata, keep_snapshots)
        left = self._left_by(old) if old else []
        if old:
            transaction._stage(
                (RemoveSnapshotsUpdate.model_validate({"snapshot-ids": [each.snapshot_id for each in old]}),)
            )
        sync(*written)
        failpoints.hit("commit.before")
        self.catalog.written = ""
        try:
            self.iceberg._do_commit(transaction._updates, transaction._requirements)
        except CommitFailedException:
            _delete([*written, self.catalog.written])  # nobody will ever name them
            raise
        others = local(written[-1]).parent.glob(f"*{epoch.stem()}-*.avro")  # of tries that died
        _delete([*left, *map(str, {*others} - {local(each) for each in written})])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, batch by batch: `to_record_batches` would hold whole files."""
        scan = ArrowScan(self.metadata, self.iceberg.io, self.metadata.schema(), AlwaysTrue())
        try:
            for task in self.iceberg.scan().plan_files():
                deletes = _read_all_delete_files(self.iceberg.io, [task])
                yield from scan._record_batches_from_scan_tasks_and_deletes([task], deletes)
        except (ValueError, NotImplementedError, ResolveError) as error:  # deletes by value, files that are not Parquet
            raise FatalError(
                f"the Iceberg table {self.name} cannot be written anew for a column's wider type: {error}",
                code="PEN-5021",
                hint="rewrite its data files with the engine that wrote to it, and start again",
            ) from error

    def live_files(self) -> set[str]:
        """The names of all data files that a snapshot shows."""
        found = [m for each in self.metadata.snapshots for m in each.manifests(self.iceberg.io)]
        manifests = {manifest.manifest_path: manifest for manifest in found}
        entries = (each for m in manifests.values() for each in m.fetch_manifest_entry(self.iceberg.io))
        return {Path(entry.data_file.file_path).name for entry in entries}

    def _unchanged(self) -> tuple[Any, ...]:
        """What must still hold at the commit: its marker stands in this very snapshot."""
        main = self.metadata.refs.get(MAIN_BRANCH)
        return (
            AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": main.snapshot_id if main else None}),
            AssertTableUUID(uuid=self.metadata.table_uuid),
            AssertCurrentSchemaId.model_validate({"current-schema-id": self.metadata.current_schema_id}),
            AssertLastAssignedFieldId.model_validate({"last-assigned-field-id": self.metadata.last_column_id}),
        )

    def _widening(self, columns: Columns) -> tuple[Any, ...]:
        known = self.columns()
        if columns == known:
            return ()
        stored, wanted = self.metadata.schema(), {each.name: each for each in columns.iceberg().fields}
        is_same = {each.name: columns.schema.field(each.name).type == each.type for each in known.schema}
        fields = [each if is_same[each.name] else _retyped(each, wanted[each.name]) for each in stored.fields]
        ids = {each.field_id: wanted[each.name].field_id for each in stored.fields}
        wider = Schema(
            *fields,
            *(each for name, each in wanted.items() if name not in is_same),
            schema_id=max(each.schema_id for each in self.metadata.schemas) + 1,
            identifier_field_ids=[ids.get(each, each) for each in stored.identifier_field_ids],
        )
        added = [each for each in wider.fields if each.field_id not in ids]
        return AddSchemaUpdate(schema=wider), SetCurrentSchemaUpdate(), *self._sorting(ids), *self._mapping(added)

    def _mapping(self, added: list[NestedField]) -> tuple[Any, ...]:
        """What other engines know the columns of files without field ids by."""
        mapping = self.metadata.name_mapping()
        if mapping is None or not added:
            return ()
        text = update_mapping(mapping, {}, {-1: added}).model_dump_json()
        return (SetPropertiesUpdate(updates={TableProperties.DEFAULT_NAME_MAPPING: text}),)

    def _sorting(self, ids: Mapping[int, int]) -> tuple[Any, ...]:
        """What keeps the order of rows that the table asks for, if one of its columns has got another id."""
        order = self.metadata.sort_order_by_id(self.metadata.default_sort_order_id)
        fields = order.fields if order else []
        moved = [each.model_copy(update={"source_id": ids.get(each.source_id, each.source_id)}) for each in fields]
        if moved == fields:
            return ()
        order = SortOrder(*moved, order_id=max(each.order_id for each in self.metadata.sort_orders) + 1)
        return AddSortOrderUpdate.model_validate({"sort-order": order}), SetDefaultSortOrderUpdate()

    def _left_by(self, expired: Sequence[Snapshot]) -> list[str]:
        """
        The files that nobody needs once these snapshots are gone; data files only if Penstock wrote them anew.

        Along one line of appends, what a snapshot has dropped no later one takes up again. Where there are more lines,
        the files stay.
        """
        ids = {each.snapshot_id for each in expired}
        kept = [each for each in _line(self.metadata) if each.snapshot_id not in ids]
        if set(self.metadata.refs) != {MAIN_BRANCH} or len(kept) + len(ids) < len(self.metadata.snapshots):
            return []
        needed = {manifest.manifest_path for manifest in kept[-1].manifests(self.iceberg.io)}
        named = {m.manifest_path for each in expired for m in each.manifests(self.iceberg.io)}
        dropped = [file for each in (*expired, kept[-1]) if _is_replacement(each) for file in self._dropped_by(each)]
        return [*(named - needed), *(each.manifest_list for each in expired), *dropped]

    def _dropped_by(self, snapshot: Snapshot) -> list[str]:
        """The data files that are gone with the snapshot."""
        manifests = [
            each for each in snapshot.manifests(self.iceberg.io) if each.added_snapshot_id == snapshot.snapshot_id
        ]
        entries = (e for m in manifests for e in m.fetch_manifest_entry(self.iceberg.io, discard_deleted=False))
        return [each.data_file.file_path for each in entries if each.status == ManifestEntryStatus.DELETED]


class _Stem:
    """Names a commit's files after the try, in place of the client's plain UUID."""

    def __init__(self, epoch: Epoch) -> None:
        self._text = f"{epoch.stem()}-{uuid4().hex[:8]}"

    def __str__(self) -> str:
        return self._text


class _Transaction(Transaction):
    """The client's transaction, which otherwise copies all metadata each time that someone looks at it."""

    _seen: tuple[int, TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        if self._seen is None or self._seen[0] != len(self._updates):
            self._seen = (len(self._updates), super().table_metadata)
        return self._seen[1]


class _Replace(_FastAppendFiles):
    """The same rows in other files: readers of what is new pass over it."""

    operation = Operation.REPLACE

    def _existing_manifests(self) -> list[ManifestFile]:
        return []

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        if spec == self._transaction.table_metadata.spec():
            return super().new_manifest_writer(spec)
        return write_manifest(  # of files that are gone: the column that they were laid out by may be as well
            format_version=self._transaction.table_metadata.format_version,
            spec=spec,
            schema=self._transaction._table.metadata.schema(),
            output_file=self.new_manifest_output(),
            snapshot_id=self._snapshot_id,
            avro_compression=self._compression,
        )

    def _deleted_entries(self) -> list[ManifestEntry]:
        parent = self._transaction.table_metadata.snapshot_by_id(self._parent_snapshot_id or 0)
        manifests = parent.manifests(self._io) if parent else []
        found = []
        for manifest in manifests:
            entries = self.fetch_manifest_entry(manifest)
            for entry in entries:
                self.delete_data_file(entry.data_file)  # for the totals, those that name deleted rows among them
            found += entries if manifest.content == ManifestContent.DATA else []
        return [
            ManifestEntry.from_args(
                status=ManifestEntryStatus.DELETED,
                snapshot_id=self._snapshot_id,
                sequence_number=entry.sequence_number,
                file_sequence_number=entry.file_sequence_number,
                data_file=entry.data_file,
            )
            for entry in found
        ]

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        self._operation = Operation.OVERWRITE  # the client sums up no other
        return Summary(Operation.REPLACE, **super()._summary(snapshot_properties).additional_properties)


class _Append(_FastAppendFiles):
    """An append that keeps the number of manifests small."""

    operation = Operation.APPEND

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        merging: _ManifestMergeManager[Any] = _ManifestMergeManager(0, 0, True, self)
        spec = self._transaction.table_metadata.default_spec_id
        levels: dict[int, list[ManifestFile]] = {}
        done: list[ManifestFile] = []
        for each in manifests:
            is_new = each.added_snapshot_id == self._snapshot_id
            if is_new or each.content != ManifestContent.DATA or each.partition_spec_id != spec:
                done.append(each)
            else:
                levels.setdefault(_level(each), []).append(each)
        while levels:
            level = min(levels)
            group = levels.pop(level)
            if len(group) < _FAN:
                done += group
            else:
                merged = merging._create_manifest(spec, group)
                above = max(_level(merged), level + 1)
                levels.setdefault(above, []).append(merged)
        return done


def _retyped(stored: NestedField, wanted: NestedField) -> NestedField:
    """A column as it was, of the type that is wanted, and in place of it if that has another id."""
    return stored.model_copy(update={"field_id": wanted.field_id, "field_type": wanted.field_type})


def _is_replacement(snapshot: Snapshot) -> bool:
    summary = snapshot.summary
    if summary is None or summary["penstock.pipeline"] is None:  # `in` is always true
        return False
    return bool(summary.operation == Operation.REPLACE)


def _delete(locations: Sequence[str]) -> None:
    for each in filter(None, locations):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # others may have written data files
            local(each).unlink()


def sync(*locations: str) -> None:
    durable.fsync(*(local(each) for each in locations))


def local(location: str) -> Path:
    """A location as a path: other engines write it as an address."""
    return Path(urlparse(location).path) if location.startswith("file:") else Path(location)


@contextlib.contextmanager
def catalog_errors(topic: Topic) -> Iterator[None]:
    """A catalog that fails: whether it has done what it was told, the next look at it tells."""
    try:
        yield
    except DBAPIError as error:
        raise RetryableError(f"the catalog failed at the table of {topic}: {error.orig}", code="PEN-2001") from error


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True, pool_size=1)
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": 30})  # no connection survives a fork

    @event.listens_for(engine, "connect")
    def durable_commits(connection: Any, _: Any) -> None:
        # FULL, the default, does not sync the directory after the journal is dropped: a power cut would undo the commit.
        connection.execute("PRAGMA synchronous = EXTRA")

    return engine


def _expired(metadata: TableMetadata, keep: int) -> list[Snapshot]:
    """The snapshots that are to go with the next commit, oldest first."""
    if metadata.properties.get("gc.enabled", "true") != "true":
        return []
    named = {ref.snapshot_id for ref in metadata.refs.values()}
    old = _line(metadata)[max(keep - 1, 1) :]
    return [each for each in reversed(old) if each.snapshot_id not in named]


def _line(metadata: TableMetadata) -> list[Snapshot]:
    """The snapshots of the main branch, newest first."""
    by_id = {each.snapshot_id: each for each in metadata.snapshots}
    found = []
    each = metadata.current_snapshot()
    while each is not None:
        found.append(each)
        each = by_id.get(each.parent_snapshot_id) if each.parent_snapshot_id is not None else None
    return found


def _level(manifest: ManifestFile) -> int:
    files = (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)
    return int(math.log(max(files, 1), _FAN) + 1e-9)


def _key(pipeline: str) -> str:
    return f"penstock.epoch.{quote(pipeline, safe='')}"
