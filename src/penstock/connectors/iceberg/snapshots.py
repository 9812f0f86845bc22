"""How the snapshots of a commit are put together: appends, upserts with position deletes, and rewrites of all files."""

from __future__ import annotations

import math
from typing import Any
from uuid import uuid4

from pyiceberg.manifest import (
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    ManifestWriterV2,
    write_manifest,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _FastAppendFiles, _ManifestMergeManager
from pyiceberg.typedef import EMPTY_DICT

from penstock.connectors.iceberg.upsert import Changed
from penstock.sink import Epoch

_FAN = 32
"""Manifests of about one size that are merged: readers plan with few of them, and a commit rewrites few entries."""


class Stem:
    """Names a commit's files after the try, in place of the client's plain UUID."""

    def __init__(self, epoch: Epoch) -> None:
        self._text = f"{epoch.stem()}-{uuid4().hex[:8]}"

    def __str__(self) -> str:
        return self._text


class SeenTransaction(Transaction):
    """The client's transaction, which otherwise copies all metadata at each access."""

    _seen: tuple[int, TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        if self._seen is None or self._seen[0] != len(self._updates):
            self._seen = (len(self._updates), super().table_metadata)
        return self._seen[1]


class Replace(_FastAppendFiles):
    """The same rows in other files: incremental readers skip it."""

    operation = Operation.REPLACE

    def _existing_manifests(self) -> list[ManifestFile]:
        return []

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        if spec == self._transaction.table_metadata.spec():
            return super().new_manifest_writer(spec)
        return write_manifest(  # of dropped files, whose partition column may be dropped too
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
                self.delete_data_file(entry.data_file)  # for the totals, delete files included
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


class Append(_FastAppendFiles):
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


class _DeleteManifest(ManifestWriterV2):
    """A manifest of delete files."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class Upserted(Append):
    """New rows, deletes of old ones, and files that go."""

    operation = Operation.OVERWRITE
    changed: Changed

    def _existing_manifests(self) -> list[ManifestFile]:
        """The manifests as they are; one that names a file that goes is written again."""
        dropped = {file.file_path for file in self.changed.dropped}
        kept = []
        for manifest in super()._existing_manifests():
            entries = self.fetch_manifest_entry(manifest) if dropped else []
            if not any(entry.data_file.file_path in dropped for entry in entries):
                kept.append(manifest)
                continue
            with self._writer(manifest.partition_spec_id, manifest.content) as writer:
                for entry in entries:
                    (writer.delete if entry.data_file.file_path in dropped else writer.existing)(entry)
            kept.append(writer.to_manifest_file())
        return kept

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        mine = []
        for spec_id in sorted({file.spec_id for file in self.changed.deletes}):
            with self._writer(spec_id, ManifestContent.DELETES) as writer:
                for file in self.changed.deletes:
                    if file.spec_id == spec_id:
                        entry = ManifestEntry.from_args(
                            status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=file
                        )
                        writer.add(entry)
            mine.append(writer.to_manifest_file())
        return [*super()._process_manifests(manifests), *mine]

    def _writer(self, spec_id: int, content: ManifestContent) -> ManifestWriter:
        if content == ManifestContent.DATA:
            return self.new_manifest_writer(self.spec(spec_id))
        return _DeleteManifest(
            self.spec(spec_id), self.schema(), self.new_manifest_output(), self._snapshot_id, self._compression
        )

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        self._added_data_files = [*self._added_data_files, *self.changed.deletes]  # the manifests are written
        self._deleted_data_files = set(self.changed.dropped)
        return super()._summary(snapshot_properties)


def _level(manifest: ManifestFile) -> int:
    files = (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)
    return int(math.log(max(files, 1), _FAN) + 1e-9)
