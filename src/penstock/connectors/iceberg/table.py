"""One version of an Iceberg table: its markers, the commit of the next version, and the removal of old snapshots."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pyarrow as pa
from pydantic import ValidationError
from pyiceberg.exceptions import CommitFailedException, ResolveError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, _read_all_delete_files
from pyiceberg.manifest import (
    DataFile,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import update_mapping
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSortOrderUpdate,
    AssertCurrentSchemaId,
    AssertDefaultSortOrderId,
    AssertDefaultSpecId,
    AssertLastAssignedFieldId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
)
from pyiceberg.types import ListType, NestedField, StructType

from penstock import durable, failpoints, store
from penstock.connectors.iceberg.catalog import AnyCatalog, Rest, local, sync
from penstock.connectors.iceberg.columns import Columns
from penstock.connectors.iceberg.snapshots import Append, Replace, SeenTransaction, Stem, Upserted
from penstock.connectors.iceberg.upsert import Changed, head
from penstock.errors import ConfigError, FatalError, SchemaError
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic
from penstock.store import ObjectPath, Place

SEEDED = "penstock.seeded"

PROPERTIES = {
    "format-version": "2",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Properties of tables that are created: every commit removes old metadata files."""


@dataclass
class Live:
    """What was read of the snapshots before: none of it ever changes."""

    lists: dict[str, dict[str, ManifestFile]] = field(default_factory=dict)
    """By the list of a snapshot its manifests."""
    files: dict[str, frozenset[str]] = field(default_factory=dict)
    """By manifest the names of its files."""


@dataclass
class Table:
    """One version of an Iceberg table; a commit that is not the next one after it fails."""

    topic: Topic
    iceberg: IcebergTable
    catalog: AnyCatalog
    target: Place
    """The place of the topic's table; it is in the same store."""
    branch: str = MAIN_BRANCH

    def __post_init__(self) -> None:
        ref = self.metadata.refs.get(self.branch)
        if ref is not None and ref.snapshot_ref_type != SnapshotRefType.BRANCH:
            raise ConfigError(
                f"{self.branch!r} is a tag of the Iceberg table {self.name}, and rows go to branches",
                code="PEN-1003",
                hint="name another `branch`",
            )
        if self.metadata.format_version > 2:
            raise SchemaError(
                f"the Iceberg table {self.name} has format version {self.metadata.format_version}, and 2 is written",
                code="PEN-4002",
                hint="write to another table",
            )
        location = self.metadata.location
        own = self.target.store.url if isinstance(self.target, ObjectPath) else ""
        is_object = "://" in location and not location.startswith("file://")
        if is_object != bool(own) or (own and not location.startswith(f"{own}/")):
            raise SchemaError(
                f"the Iceberg table {self.name} is at {location}, and `path` is in another store: {self.target}",
                code="PEN-4002",
                hint="write to another table, or give the store of the table in `path`",
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
        text = self.metadata.properties.get(_key(pipeline, self.branch))
        try:
            return CommittedEpoch.model_validate_json(text) if text is not None else None
        except ValidationError as error:
            raise FatalError(
                f"the property {_key(pipeline, self.branch)} of the Iceberg table {self.name} is corrupt: {error}",
                code="PEN-5020",
                hint="restore the table's properties, or write to a new table",
            ) from error

    def sent(self, pipeline: str) -> list[str]:
        """Every column that a pipeline has sent by its upserts. Other columns belong to somebody else."""
        return list(json.loads(self.metadata.properties.get(_sent_key(pipeline, self.branch), "[]")))

    def is_seeded(self) -> bool:
        return self.metadata.properties.get(seeded_key(self.branch)) == "true"

    def mark_seeded(self) -> None:
        """Record it, or raise `CommitFailedException`."""
        self.iceberg._do_commit((SetPropertiesUpdate(updates={seeded_key(self.branch): "true"}),), self._unchanged())

    def commit(
        self,
        epoch: Epoch,
        end: Positions,
        columns: Columns,
        files: Sequence[DataFile],
        keep_snapshots: int,
        rewritten: Sequence[DataFile] | None = None,
        changed: Changed | None = None,
    ) -> None:
        """
        Make the version after this one: columns, files and marker at once; or raise `CommitFailedException`.

        `rewritten` holds the rows of all files that the table has, and replaces them. `changed` holds deletes of single rows,
        and names files that go.
        """
        marker = CommittedEpoch(incarnation=epoch.incarnation, number=epoch.number, end=dict(end))
        text = durable.canonical(marker.model_dump(mode="json"))
        transaction = SeenTransaction(self.iceberg)
        transaction._stage(self._widening(columns), self._unchanged())
        said = {_key(epoch.pipeline, self.branch): text}
        if changed is not None:
            said[_sent_key(epoch.pipeline, self.branch)] = durable.canonical(changed.sent)
        transaction._stage((SetPropertiesUpdate(updates=said),))
        summary = {
            "penstock.pipeline": epoch.pipeline,
            "penstock.incarnation": epoch.incarnation,
            "penstock.epoch": str(epoch.number),
        }
        written: list[str] = []
        for producer, added in ((Replace, rewritten), (Append if changed is None else Upserted, files)):
            if added is not None:
                change = producer(producer.operation, transaction, self.iceberg.io, Stem(epoch), summary, self.branch)  # type: ignore[arg-type]
                if isinstance(change, Upserted) and changed is not None:
                    change.changed = changed
                for file in added:
                    change.append_data_file(file)
                transaction._stage(*change._commit())
                written += [*change._written_manifests, *change._written_manifest_lists]
        # A service does not see whether a snapshot has got a tag meanwhile: there old ones go by themselves, afterwards.
        old = [] if isinstance(self.catalog, Rest) else _expired(self.metadata, keep_snapshots, self.branch)
        left = self._left_by(old) if old else []
        if old:
            transaction._stage(
                (RemoveSnapshotsUpdate.model_validate({"snapshot-ids": [each.snapshot_id for each in old]}),)
            )
        sync(*written)
        failpoints.hit("commit.before")
        self.catalog.last.written = ""
        try:
            self.iceberg._do_commit(transaction._updates, transaction._requirements)
        except CommitFailedException:
            if not self._is_named(written):
                self._delete([*written, self.catalog.last.written])  # no version will ever name them
            raise
        left += self._expire(keep_snapshots) if isinstance(self.catalog, Rest) else []
        kept = {self._place(each).name for each in written}
        metadata = self._place(written[-1]).parent
        others = [name for name in store.names(metadata) if f"{epoch.stem()}-" in name and name.endswith(".avro")]
        self._delete([*left, *(str(metadata / name) for name in others if name not in kept)])  # of tries that died

    def _expire(self, keep: int) -> list[str]:
        """Drop old snapshots in a commit of its own; gives the files that nobody needs any more."""
        old = _expired(self.metadata, keep + 1, self.branch)
        if not old:
            return []
        left = self._left_by(old)
        gone = RemoveSnapshotsUpdate.model_validate({"snapshot-ids": [each.snapshot_id for each in old]})
        try:
            self.iceberg._do_commit((gone,), self._unchanged())
        except CommitFailedException:
            return []  # another writer was first: they go next time
        return left

    def _is_named(self, written: Sequence[str]) -> bool:
        """True if a snapshot names one of the files after all: a refusal may be the answer to a repeated request."""
        now = self.catalog.load_table(self.iceberg.name()).metadata
        return bool({each.manifest_list for each in now.snapshots}.intersection(written))

    def _place(self, location: str) -> Place:
        return store.beside(self.target, location) if isinstance(self.target, ObjectPath) else local(location)

    def _delete(self, locations: Sequence[str]) -> None:
        places = [self._place(each) for each in filter(None, locations)]
        for group in [places] if isinstance(self.target, ObjectPath) else [[each] for each in places]:
            with contextlib.suppress(PermissionError):  # others may have written data files
                store.delete(group)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, batch by batch: `to_record_batches` would hold whole files."""
        reading = ArrowScan(self.metadata, self.iceberg.io, self.metadata.schema(), AlwaysTrue())
        try:
            for task in scan(self).plan_files():
                deletes = _read_all_delete_files(self.iceberg.io, [task])
                yield from reading._record_batches_from_scan_tasks_and_deletes([task], deletes)
        except (ValueError, NotImplementedError, ResolveError) as error:  # deletes by value, files that are not Parquet
            raise FatalError(
                f"the Iceberg table {self.name} cannot be rewritten for a column's wider type: {error}",
                code="PEN-5021",
                hint="rewrite its data files with the engine that wrote to it, and start again",
            ) from error

    def live_files(self, known: Live) -> set[str]:
        """The names of all data files that a snapshot shows."""
        io, snapshots = self.iceberg.io, self.metadata.snapshots
        known.lists = {
            each.manifest_list: known.lists.get(each.manifest_list) or {m.manifest_path: m for m in each.manifests(io)}
            for each in snapshots
        }
        manifests = {path: manifest for each in known.lists.values() for path, manifest in each.items()}
        known.files = {
            path: known.files[path]
            if path in known.files  # an empty one too
            else frozenset(Path(e.data_file.file_path).name for e in manifest.fetch_manifest_entry(io))
            for path, manifest in manifests.items()
        }
        return set().union(*known.files.values())

    def _unchanged(self) -> tuple[Any, ...]:
        """What must still hold at the commit: the marker was read in this very snapshot."""
        head = self.metadata.refs.get(self.branch)
        return (
            AssertRefSnapshotId.model_validate({"ref": self.branch, "snapshot-id": head.snapshot_id if head else None}),
            AssertTableUUID(uuid=self.metadata.table_uuid),
            AssertCurrentSchemaId.model_validate({"current-schema-id": self.metadata.current_schema_id}),
            AssertLastAssignedFieldId.model_validate({"last-assigned-field-id": self.metadata.last_column_id}),
            AssertDefaultSpecId.model_validate({"default-spec-id": self.metadata.default_spec_id}),
            AssertDefaultSortOrderId.model_validate({"default-sort-order-id": self.metadata.default_sort_order_id}),
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
        added = defaultdict(list)
        for parent, each in _added(wider.fields, stored.field_ids):
            added[parent].append(each)
        return (
            AddSchemaUpdate(schema=wider),
            SetCurrentSchemaUpdate(),
            *self._sorting(ids),
            *_mapping(self.metadata, added),
        )

    def _sorting(self, ids: Mapping[int, int]) -> tuple[Any, ...]:
        """The table's sort order, if one of its columns has got another id."""
        order = self.metadata.sort_order_by_id(self.metadata.default_sort_order_id)
        fields = order.fields if order else []
        moved = [each.model_copy(update={"source_id": ids.get(each.source_id, each.source_id)}) for each in fields]
        if moved == fields:
            return ()
        order = SortOrder(*moved, order_id=max(each.order_id for each in self.metadata.sort_orders) + 1)
        return AddSortOrderUpdate.model_validate({"sort-order": order}), SetDefaultSortOrderUpdate()

    def _left_by(self, expired: Sequence[Snapshot]) -> list[str]:
        """
        Files that no reader needs once these snapshots are gone; data files only if Penstock rewrote them.

        Along one line of appends, no later snapshot uses a file again that an earlier one dropped. Where there are branches
        or tags, the files stay.
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


def _added(
    fields: Iterable[NestedField], known: Collection[int], parent: int = -1
) -> Iterator[tuple[int, NestedField]]:
    """Fields whose id is not known, each with the id of the field that it is in; -1: of none."""
    for each in fields:
        if each.field_id not in known:
            yield parent, each
        elif isinstance(each.field_type, ListType):
            yield from _added([each.field_type.element_field], known, each.field_id)
        elif isinstance(each.field_type, StructType):
            yield from _added(each.field_type.fields, known, each.field_id)


def _mapping(metadata: TableMetadata, added: dict[int, list[NestedField]]) -> tuple[Any, ...]:
    """The name mapping, by which other engines find the columns of files without field ids."""
    mapping = metadata.name_mapping()
    if mapping is None or not added:
        return ()
    text = update_mapping(mapping, {}, added).model_dump_json()
    return (SetPropertiesUpdate(updates={TableProperties.DEFAULT_NAME_MAPPING: text}),)


def _retyped(stored: NestedField, wanted: NestedField) -> NestedField:
    """The stored column with the wanted type and id."""
    return stored.model_copy(update={"field_id": wanted.field_id, "field_type": wanted.field_type})


def _is_replacement(snapshot: Snapshot) -> bool:
    summary = snapshot.summary
    if summary is None or summary["penstock.pipeline"] is None:  # `in` is always true
        return False
    return summary.operation in (Operation.REPLACE, Operation.OVERWRITE)


def _expired(metadata: TableMetadata, keep: int, branch: str) -> list[Snapshot]:
    """The snapshots that are to go with the next commit, oldest first."""
    if metadata.properties.get("gc.enabled", "true") != "true" or branch != MAIN_BRANCH:
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


def refuse_without_deletes(table: Table) -> None:
    if table.metadata.format_version < 2:
        raise SchemaError(
            f"the Iceberg table {table.name} has format version 1, which has no deletes of single rows",
            code="PEN-4002",
            hint="set its property format-version to 2 with another engine, or write to another table",
        )


def scan(table: Table, **options: Any) -> Any:
    """All rows of the branch."""
    snapshot = head(table)
    return table.iceberg.scan(snapshot_id=snapshot.snapshot_id if snapshot else None, **options)


def fork(table: Table) -> bool:
    """
    Begin the branch at what `main` shows, or raise `CommitFailedException`; False if it is there.

    Where `main` shows nothing yet, it gets a snapshot without rows first: no other branch may have the first one.
    """
    if table.branch == MAIN_BRANCH or table.branch in table.metadata.refs:
        return False
    main = table.metadata.current_snapshot()
    if main is None:
        transaction = SeenTransaction(table.iceberg)
        empty = Append(Append.operation, transaction, table.iceberg.io, uuid4())
        transaction._stage(*empty._commit())
        sync(*empty._written_manifest_lists)
        table.iceberg._do_commit(transaction._updates, transaction._requirements)
        return True
    said = {"ref-name": table.branch, "type": "branch", "snapshot-id": main.snapshot_id}
    table.iceberg._do_commit((SetSnapshotRefUpdate.model_validate(said),), table._unchanged())
    return True


def seeded_key(branch: str) -> str:
    return SEEDED + _of(branch)


def _key(pipeline: str, branch: str) -> str:
    return f"penstock.epoch.{quote(pipeline, safe='')}{_of(branch)}"


def _sent_key(pipeline: str, branch: str) -> str:
    return f"penstock.columns.{quote(pipeline, safe='')}{_of(branch)}"


def _of(branch: str) -> str:
    """What the names of properties end with: those of `main` with nothing."""
    return "" if branch == MAIN_BRANCH else f"@{quote(branch, safe='')}"
