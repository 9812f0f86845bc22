"""
A table's log, read and written without the client: its calls neither give nor take deletion vectors.

Say that three rows of a file are deleted. One entry of the log removes the file with the vector that it had, none here, and
adds the same file with the new one:

    {"remove": {"path": "a.parquet", "dataChange": true, …}}
    {"add": {"path": "a.parquet", "deletionVector": {"cardinality": 3, …}, "stats": "…\"tightBounds\":false}", …}}
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pydantic import BaseModel, ConfigDict

from penstock import store
from penstock.connectors.delta.vectors import Vector
from penstock.connectors.lake.staging import StagedFile
from penstock.errors import FatalError
from penstock.store import Place

Action: TypeAlias = dict[str, Any]

_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_TIGHT = re.compile(r'"tightBounds"\s*:\s*true')

SHORT_SECS = 3600.0
"""A deletion vector that goes so soon after it came is as old as its file."""

MOST_NEW = 200_000
"""More vectors are not kept in mind from one checkpoint to the next."""

THIN = 1_000
"""Fewer vectors than this make no checkpoint large, and are not worth that it is written again."""

VECTORS = "deletionVectors"
"""The feature of tables with deletion vectors."""

_ENABLED = "delta.enableDeletionVectors"

_IMPLIED = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
"""Features that a table has by its writer version. From version 7 on they are named."""


class Marked(BaseModel):
    """A file of the table whose rows get another deletion vector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    rows: int
    """All rows of the file, the deleted ones too."""
    vector: Vector


@dataclass
class Entries:
    """What the log says about each file of the version that was followed to."""

    log: Place
    version: int = -1
    adds: dict[str, Action] = field(default_factory=dict)
    """Per path, decoded: the `add` of the file."""
    gone: dict[str, int] = field(default_factory=dict)
    """Per file of deletion vectors that an entry has removed: when, in milliseconds. Not if it came shortly before: then
    the age of the file says the same."""
    short_lived: set[str] = field(default_factory=set)
    """Deletion vectors that came and shortly after went since the last call of `thin`, while their data file stayed."""
    _new: dict[str, float] = field(default_factory=dict)
    """When the others of that time came."""

    def follow(self, version: int) -> None:
        """Read on, up to a version."""
        if version == self.version:
            return
        try:
            if not 0 <= self.version < version:
                raise FileNotFoundError
            self._read_entries(self.version + 1, version)
        except FileNotFoundError:  # the first time, or the log was cleaned up
            self._load(version)
        self.version = version

    def vector(self, path: str) -> Vector | None:
        return Vector.logged(self.adds[path].get("deletionVector"))

    def vector_files(self) -> set[str]:
        """The files that hold the vectors of the version."""
        vectors = (Vector.logged(add.get("deletionVector")) for add in self.adds.values())
        return {vector.file for vector in vectors if vector is not None and vector.file is not None}

    def dead_rows(self) -> int:
        """How many rows of the version's files are deleted."""
        return sum(add["deletionVector"]["cardinality"] for add in self.adds.values() if add.get("deletionVector"))

    def changes(
        self,
        files: Sequence[StagedFile],
        removed: Iterable[str],
        marked: Sequence[Marked],
        data_change: bool = True,
        vectors: Mapping[str, Vector] = MappingProxyType({}),
    ) -> Iterator[Action]:
        """
        The actions of an entry that adds files, removes others, and gives others another vector.

        `vectors` are those of files that are added, by path.
        """
        now = int(time.time() * 1000)
        yield from ({"remove": self._removed(path, now, data_change)} for path in removed)
        for each in marked:
            add = self.adds[each.path]
            rows = {"stats": _loose(add.get("stats"), each.rows), "deletionVector": each.vector.as_logged()}
            yield {"remove": self._removed(each.path, now, data_change)}
            yield {"add": {**add, **rows, "dataChange": data_change}}
        for file in files:
            yield {
                "add": {
                    "path": quoted(file.path),
                    "partitionValues": file.partition,
                    "size": file.bytes,
                    "modificationTime": now,
                    "dataChange": data_change,
                    "stats": file.stats or "",
                    **_marks(vectors.get(file.path), file),
                }
            }

    def publish(self, version: int, actions: Iterable[Action], info: Action) -> None:
        """Make the entry of a version, whole or not at all; raises `FileExistsError` if another writer was first."""
        said = {"commitInfo": {"timestamp": int(time.time() * 1000), "operationParameters": {}, **info}}
        actions = list(actions)
        # Not as ASCII: readers that are built on Arrow take the escape of U+10FFFF, a bound of long texts, for another character.
        texts = [json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in (said, *actions)]
        lines = "".join(f"{text}\n" for text in texts)
        path = self.log / f"{version:020d}.json"
        if not store.create(path, lines.encode()):
            raise FileExistsError(f"{path} is there: another writer was first")
        if self.version == version - 1:  # and so need not be read
            self._take(actions)
            self.version = version

    def _removed(self, path: str, now: int, data_change: bool) -> Action:
        add = self.adds[path]
        vector = {"deletionVector": add["deletionVector"]} if add.get("deletionVector") else {}
        return {
            "path": add["path"],
            "deletionTimestamp": now,
            "dataChange": data_change,
            "extendedFileMetadata": True,
            "partitionValues": add["partitionValues"],
            "size": add["size"],
            **vector,
        }

    def _load(self, version: int) -> None:
        self.adds, self.gone = {}, {}
        names = store.names(self.log)
        found: dict[int, list[str]] = {}
        for match in filter(None, map(_CHECKPOINT.fullmatch, sorted(names))):
            found.setdefault(int(match[1]), []).append(match[0])
        whole = {at: parts for at, parts in found.items() if at <= version and _is_whole(parts)}
        first = max(whole, default=-1)
        for name in whole.get(first, ()):
            self._take(_in_checkpoint(self.log / name))
        try:
            self._read_entries(first + 1, version)
            self.short_lived, self._new = set(), {}
        except FileNotFoundError as error:
            raise FatalError(
                f"the log of {self.log.parent} cannot be read up to version {version}: {error}",
                code="PEN-5001",
                hint="checkpoints of the kind v2 are not read; set delta.checkpointPolicy = 'classic' and make a checkpoint",
            ) from error

    def _read_entries(self, first: int, last: int) -> None:
        entries = [(self.log / f"{version:020d}.json").read_bytes() for version in range(first, last + 1)]
        for entry in entries:
            lines = [line for line in entry.splitlines() if b'"add"' in line[:16] or b'"remove"' in line[:16]]
            self._take([json.loads(line) for line in lines])

    def _take(self, actions: Sequence[Action]) -> None:
        """Removes first: an entry may remove a file with one vector and add it with another."""
        went: dict[str, str] = {}
        now = time.time()
        if max(len(self._new), len(self.short_lived)) > MOST_NEW:  # nobody makes checkpoints
            self._new, self.short_lived = {}, set()
        for action in actions:
            if (remove := action.get("remove")) is not None:
                path, vector = unquote(remove["path"]), Vector.logged(remove.get("deletionVector"))
                came = self._new.pop(named := _id(remove.get("deletionVector")), 0.0)
                if path in self.adds and self.vector(path) == vector:
                    del self.adds[path]
                    went[path] = named if now - came < SHORT_SECS else ""
                if vector is not None and vector.file is not None and now - came >= SHORT_SECS:
                    self.gone[vector.file] = remove.get("deletionTimestamp") or 0
        for action in actions:
            if (add := action.get("add")) is not None:
                path = unquote(add["path"])
                self.adds[path] = {name: value for name, value in add.items() if value is not None}
                if named := went.get(path, ""):
                    self.short_lived.add(named)
                if named := _id(add.get("deletionVector")):
                    self._new[named] = now

    def thin(self, version: int) -> None:
        """
        Take deletion vectors out of a checkpoint that came and went since the one before, while their data file stayed.

        An epoch replaces the vector of every file that it touches, and a checkpoint names all that was replaced within the
        table's retention, a week: after a day it would name millions. A vector that lasted longer is still named there, so
        that its file is kept for as long as the table says.
        """
        doomed, self.short_lived, self._new = self.short_lived, set(), {}
        path = self.log / f"{version:020d}.checkpoint.parquet"
        if len(doomed) < THIN or store.head(path) is None:
            return
        with pq.ParquetFile(store.source(path)) as parquet:
            rows = parquet.read()
        removed = rows.column("remove").combine_chunks()
        vector = removed.field("deletionVector")
        place, offset = vector.field("pathOrInlineDv"), pc.fill_null(vector.field("offset"), 0)
        named = pc.binary_join_element_wise(place, offset.cast(pa.string()), ":")
        is_there = pc.and_(removed.is_valid(), vector.is_valid())
        kept = rows.filter(pc.invert(pc.and_(is_there, pc.is_in(named, pa.array(sorted(doomed), pa.string())))))
        sink = pa.BufferOutputStream()
        pq.write_table(kept, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        store.put(path, data)
        self._describe(version, {"size": kept.num_rows, "sizeInBytes": len(data)})

    def _describe(self, version: int, said: Action) -> None:
        """Correct what the log says of its newest checkpoint."""
        path = self.log / "_last_checkpoint"
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            known = json.loads(path.read_bytes())
            if known["version"] == version:
                named = {name: value for name, value in known.items() if name != "checksum"}
                store.put(path, json.dumps({**named, **said}).encode())


def described(table: DeltaTable) -> Action:
    """The metadata of a table as an entry of the log has it."""
    metadata = table.metadata()
    return {
        "id": str(metadata.id),
        "name": metadata.name,
        "description": metadata.description,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": table.schema().to_json(),
        "partitionColumns": metadata.partition_columns,
        "createdTime": metadata.created_time,
        "configuration": metadata.configuration,
    }


def wants_vectors(table: DeltaTable) -> bool:
    """True if rows are to be marked as deleted: the table may have vectors, and its owner says so."""
    enabled = table.metadata().configuration.get(_ENABLED) == "true"
    return enabled and VECTORS in (table.protocol().writer_features or ())


def with_vectors(table: DeltaTable) -> tuple[Action, Action]:
    """The protocol and the metadata of a table that has deletion vectors from now on."""
    protocol, metadata = table.protocol(), described(table)
    writer = set(protocol.writer_features or ())
    reader = set(protocol.reader_features or ())
    if protocol.min_writer_version < 7:
        writer.update(name for at, names in _IMPLIED.items() if at <= protocol.min_writer_version for name in names)
    if protocol.min_reader_version == 2:
        reader.add("columnMapping")
    named = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted(reader | {VECTORS}),
        "writerFeatures": sorted(writer | {VECTORS}),
    }
    return named, {**metadata, "configuration": {**metadata["configuration"], _ENABLED: "true"}}


def gone(files: Sequence[StagedFile], data_change: bool = True) -> Iterator[Action]:
    """Actions that remove files without deletion vectors; no `data_change`: their rows are in others now."""
    now = int(time.time() * 1000)
    for file in files:
        yield {
            "remove": {
                "path": quoted(file.path),
                "deletionTimestamp": now,
                "dataChange": data_change,
                "extendedFileMetadata": True,
                "partitionValues": file.partition,
                "size": file.bytes,
            }
        }


def quoted(path: str) -> str:
    """A path as it is written into the log."""
    return re.sub(
        r"[^\w.\-~!$&'()+,/:;=@]",
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()),
        path,
        flags=re.ASCII,
    )


def _loose(stats: str | None, rows: int) -> str:
    """The statistics of a file with deleted rows: the bounds hold, but their values may be gone."""
    if not stats:
        return json.dumps({"numRecords": rows, "tightBounds": False})
    if '"tightBounds"' in stats:
        return _TIGHT.sub('"tightBounds":false', stats)
    return f'{stats.rstrip()[:-1]},"tightBounds":false}}'


def _id(vector: Action | None) -> str:
    """Tells a vector in a file of vectors from all others of the table; empty for others."""
    return f"{vector['pathOrInlineDv']}:{vector.get('offset') or 0}" if vector and vector["storageType"] == "u" else ""


def _marks(vector: Vector | None, file: StagedFile) -> Action:
    """What the `add` of a new file says besides, if rows of it are deleted already."""
    return {"stats": _loose(file.stats, file.rows), "deletionVector": vector.as_logged()} if vector is not None else {}


def _is_whole(parts: Sequence[str]) -> bool:
    match = _CHECKPOINT.fullmatch(parts[-1])
    return match is not None and int(match[3] or 1) <= len(parts)


def _in_checkpoint(path: Place) -> list[Action]:
    """The actions of a checkpoint as entries have them: without nulls, and without columns that only checkpoints have."""
    with pq.ParquetFile(store.source(path)) as parquet:
        there = [name for name in ("add", "remove") if name in parquet.schema_arrow.names]
        found = parquet.read(columns=there).to_pylist()
    return [
        {
            name: {
                key: _plain(key, value)
                for key, value in action[name].items()
                if value is not None and key[-7:] != "_parsed"
            }
        }
        for action in found
        for name in there
        if action[name] is not None
    ]


def _plain(name: str, value: Any) -> Any:
    if name in ("partitionValues", "tags"):
        return dict(value)  # Arrow gives a map as pairs
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if each is not None}
    return value
