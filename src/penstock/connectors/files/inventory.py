"""
The list of all files that were planned: append-only, and on disk before a position counts on it.

A position is a number of records of one inventory, so the records up to a committed position are the same for ever,
whatever lands in the directory meanwhile and under whatever names and times. Only records that no epoch was committed
with are ever replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from penstock.durable import disk_errors, make_directory, write_atomic
from penstock.errors import FatalError
from penstock.schema.codec import pack_schema, unpack_schema

Record = dict[str, Any]
"""`{file, size, mtime_ns}`, of an object also `etag`, or `{schemas}`: the schemas in force from there on."""

_FORMAT = 1


@dataclass(frozen=True, order=True, slots=True)
class Found:
    """A file as it was when it was found complete. Sorts by age, so that ranges follow the order of arrival."""

    mtime_ns: int
    file: str
    size: int
    etag: str = ""
    """Of an object: changes with every write."""

    def record(self) -> Record:
        etag = {"etag": self.etag} if self.etag else {}
        return {"file": self.file, "size": self.size, "mtime_ns": self.mtime_ns, **etag}


class Inventory:
    """The records of one inventory in memory and, if it has a directory, in `inventory-<id>.jsonl` there."""

    def __init__(
        self, id: str, records: Iterable[Record] = (), path: Path | None = None, edges: Sequence[int] = ()
    ) -> None:
        """`edges`: where the header and each record end in the file; empty while there is none."""
        self.id = id
        self._entries: list[Found | None] = []
        self.known: dict[str, Found] = {}
        self._path = path
        self._edges = list(edges)
        self._schemas: list[tuple[int, dict[str, pa.Schema]]] = [(-1, {})]
        self._remember(records)

    @classmethod
    def fresh(cls, directory: Path) -> Inventory:
        """A new inventory; its file appears with its first records."""
        id = uuid4().hex[:12]
        return cls(id, (), _path(directory, id))

    @classmethod
    def load(cls, directory: Path, id: str) -> Inventory:
        """
        The inventory as it is on disk, up to the first record that is not whole.

        A record is torn only if the process died before it was synced, and then no position counts it.
        """
        path = _path(directory, id)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise FatalError(
                f"the inventory {path} is gone, so nobody knows which files were read",
                code="PEN-5011",
                hint="restore it from a backup, or start over with `penstock offsets reset FILE` (all files are read again)",
            ) from error
        except OSError as error:
            raise FatalError(f"cannot read the inventory {path}: {error.strerror}", code="PEN-5011") from error
        records: list[Record] = []
        edges: list[int] = []
        for line in data.splitlines(keepends=True):
            record = _parsed(line)
            if record is None:
                break
            records.append(record)
            edges.append(len(line) + (edges[-1] if edges else 0))
        header = records.pop(0) if records else {}
        if header.get("inventory") != id:
            raise FatalError(
                f"{path} is not an inventory", code="PEN-5011", hint="restore it from a backup, or start over"
            )
        if header["format"] > _FORMAT:
            raise FatalError(f"{path} has format {header['format']}", code="PEN-5006", hint="run the newer Penstock")
        return cls(id, records, path, edges)

    def append(self, records: Sequence[Record]) -> None:
        """Add records; on disk when this returns."""
        if self._path is not None:
            lines = [_line(record) for record in records]
            if not self._edges:
                make_directory(self._path.parent, private=True)
                lines.insert(0, _line({"format": _FORMAT, "inventory": self.id}))
                write_atomic(self._path, b"".join(lines), private=True)
            else:
                self._write(self._path, b"".join(lines))
            at = self._edges[-1] if self._edges else 0
            self._edges += accumulate(map(len, lines[1:]), initial=at + len(lines[0]))
        self._remember(records)

    def forget(self, end: int) -> None:
        """Drop the records after a position: no epoch was committed with them, and the next ones take their place."""
        for file in self.files(end):
            del self.known[file.file]
        del self._entries[end:]
        del self._edges[end + 1 :]
        self._schemas = [(at, schemas) for at, schemas in self._schemas if at < end]

    def __len__(self) -> int:
        return len(self._entries)

    def records(self, end: int) -> tuple[Record, ...]:
        """The first records, as they are stored."""
        schemas = dict(self._schemas)
        return tuple(
            {"schemas": {stream: pack_schema(schema) for stream, schema in schemas[at].items()}}
            if file is None
            else file.record()
            for at, file in enumerate(self._entries[:end])
        )

    def end_of(self, start: int, count: int) -> int:
        """The position after the `count`th file after `start`."""
        at = start
        while count:
            count -= self._entries[at] is not None
            at += 1
        return at

    def files(self, start: int, end: int | None = None) -> list[Found]:
        """The files between two positions, in the order of the range."""
        return [file for file in self._entries[start:end] if file is not None]

    def schemas(self, end: int | None = None) -> dict[str, pa.Schema]:
        """The schemas in force for a range that ends at `end`."""
        return next(s for at, s in reversed(self._schemas) if end is None or at < end)

    def _write(self, path: Path, data: bytes) -> None:
        with disk_errors(), open(path, "r+b") as file:
            file.truncate(self._edges[-1])  # what a dead process left half written, and what was forgotten
            file.seek(self._edges[-1])
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _remember(self, records: Iterable[Record]) -> None:
        for record in records:
            if "schemas" in record:
                self._schemas.append((len(self), {s: unpack_schema(text) for s, text in record["schemas"].items()}))
                self._entries.append(None)
            else:
                file = Found(record["mtime_ns"], record["file"], record["size"], record.get("etag", ""))
                self.known[file.file] = file
                self._entries.append(file)


def _path(directory: Path, id: str) -> Path:
    return directory / f"inventory-{id}.jsonl"


def _line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"  # ASCII: names need not be valid UTF-8


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
