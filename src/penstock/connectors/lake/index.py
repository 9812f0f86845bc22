"""
Where each key of a table is: in which file, and in which row of it.

A part of the index belongs to one file of the table, which never changes. It has the keys as numbers, sorted, and the row of
each. A part is made from the file alone, so that it can always be made again; parts of large files are kept on disk. The
index does not know which rows are deleted: the table's deletion vectors say that.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from penstock import durable, store
from penstock.changes.hashing import Words, is_word
from penstock.changes.keys import Equality, Ints, bools, hashes_of, same_keys
from penstock.connectors.lake.targets import HIDDEN
from penstock.store import Place

STORED_ROWS = 100_000
"""Parts of files with this many rows are kept on disk. To make a smaller one again takes a few milliseconds."""

_HEAD_BYTES = 64

_NUMBER, _ROW, _OF = "\0number", "\0row", b"penstock.part"


class File(Protocol):
    """A file of the table, which never changes."""

    @property
    def path(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def rows(self) -> int:
        """All rows, the deleted ones too."""


@dataclass(frozen=True)
class Part:
    """The keys of one file: their numbers, sorted, the row of each, and the keys themselves if a number is only a hash."""

    rows: pa.Table

    def find(self, keys: pa.Table, numbers: Words) -> tuple[Ints, Ints]:
        """The rows of the file that have one of the keys, and the place of that key among them. Keys are canonical."""
        own = self.numbers
        first = np.searchsorted(own, numbers) if len(own) else np.empty(0, np.int64)
        hits = np.flatnonzero(own[np.minimum(first, len(own) - 1)] == numbers) if len(own) else first
        if not len(hits):
            return hits, hits
        first = first[hits]
        counts = np.searchsorted(own, numbers[hits], "right") - first
        places = np.repeat(hits, counts)
        at = np.repeat(first, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        names = [name for name in self.rows.column_names if name not in (_NUMBER, _ROW)]
        if names and len(at):
            same = same_keys(self.rows.select(names).take(pa.array(at)), keys.take(pa.array(places)))
            at, places = at[same], places[same]
        rows = self.places[at].astype(np.int64)
        order = np.argsort(rows)
        return rows[order], places[order]

    @cached_property
    def numbers(self) -> Words:
        """Of the keys, sorted."""
        found: Words = self._column(_NUMBER, np.empty(0, np.uint64))
        return found

    @cached_property
    def places(self) -> Ints:
        """The row of each."""
        found: Ints = self._column(_ROW, np.empty(0, np.int64))
        return found

    def _column(self, name: str, none: Any) -> Any:
        return self.rows.column(name).chunk(0).to_numpy() if self.rows.num_rows else none


@dataclass
class Index:
    """The index of one table by one key."""

    table: Place
    identity: str
    """The table's own id."""
    key: pa.Schema
    equality: Equality
    read: Callable[[Any, pa.Schema], Iterable[pa.Table]]
    """Gives the key columns of all rows of a file, in their order."""
    known: dict[str, Part] = field(default_factory=dict)
    _is_tidy: bool = False
    _names: dict[tuple[str, int], str] = field(default_factory=dict)

    def is_like(self, other: Index) -> bool:
        """True if both are of the same table and the same key."""
        return (self.table, self.identity, self.key, self.equality) == (
            other.table,
            other.identity,
            other.key,
            other.equality,
        )

    def has(self, file: File) -> bool:
        """True if the file's part need not be made."""
        name = self._name(file)
        return name in self.known or (file.rows >= STORED_ROWS and (self._directory / name).exists())

    def part(self, file: File) -> Part:
        name = self._name(file)
        if name not in self.known:
            self.known[name] = (self._stored(name) if file.rows >= STORED_ROWS else None) or self._made(name, file)
        return self.known[name]

    def keep_only(self, files: Iterable[File]) -> None:
        """Drop the parts of files that are not among these."""
        files = list(files)
        there = {(file.path, file.bytes) for file in files}
        self._names = {file: name for file, name in self._names.items() if file in there}
        wanted = {self._name(file) for file in files}
        gone = [self.known.pop(name) for name in self.known.keys() - wanted]
        if self._is_tidy and not any(part.rows.num_rows >= STORED_ROWS for part in gone):
            return
        self._is_tidy = True
        with contextlib.suppress(FileNotFoundError):
            store.delete(self._directory / name for name in store.names(self._directory) if name not in wanted)

    @property
    def _directory(self) -> Place:
        return self.table / HIDDEN / ".index"

    def _name(self, file: File) -> str:
        """Names all that a part depends on: a part of another table or another key is never taken for this one."""
        known = self._names.get((file.path, file.bytes))
        if known is not None:
            return known
        said = [
            self.identity,
            file.path,
            file.bytes,
            str(self.key.remove_metadata()),
            sorted(self.equality.texts.items()),
        ]
        name = hashlib.sha256(durable.canonical(said).encode()).hexdigest()[:32]
        self._names[file.path, file.bytes] = name
        return name

    def _stored(self, name: str) -> Part | None:
        try:
            data = _whole(_mapped(self._directory / name))
            rows = pa.ipc.open_file(data).read_all() if data is not None else None
        except (OSError, pa.ArrowInvalid):
            return None
        if rows is None:
            return None
        return Part(rows) if (rows.schema.metadata or {}).get(_OF) == name.encode() else None

    def _made(self, name: str, file: File) -> Part:
        pieces = list(self.read(file, self.key))
        keys = self.equality.canonical(pa.concat_tables([*pieces, self.key.empty_table()]))
        numbers = hashes_of(keys)
        order = np.argsort(numbers, kind="stable")
        if any(column.null_count for column in keys.columns):  # a null is no key, and has the number of one
            is_key = np.logical_and.reduce([bools(column.is_valid()) for column in keys.columns])
            order = order[is_key[order]]
        places = order.astype(np.uint32) if len(order) <= 1 << 32 else order  # a quarter fewer bytes
        columns = {_NUMBER: pa.array(numbers[order]), _ROW: pa.array(places)}
        if not is_exact(self.key):
            columns.update({each: keys.column(each).take(pa.array(order)) for each in keys.column_names})
        part = Part(pa.table(columns).combine_chunks())
        if file.rows < STORED_ROWS:
            return part
        self._store(name, part)
        return self._stored(name) or part

    def _store(self, name: str, part: Part) -> None:
        sink = pa.BufferOutputStream()
        rows = part.rows.replace_schema_metadata({_OF: name.encode()})
        with pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
        store.make_directory(self._directory)
        data = sink.getvalue()
        store.put(self._directory / name, _head(data) + data.to_pybytes())


def _mapped(place: Place) -> pa.Buffer:
    """A stored part, mapped: the keys of a large table need not fit into memory. One from a store goes through a local file."""
    if isinstance(place, Path):
        return pa.memory_map(str(place)).read_buffer()
    with tempfile.NamedTemporaryFile(prefix="penstock-index-") as file:
        file.write(place.read_bytes())
        file.flush()
        return pa.memory_map(file.name).read_buffer()


def _head(data: pa.Buffer) -> bytes:
    """Comes before the data, and says whether it is whole."""
    return f"penstock index {data.size} {zlib.crc32(data)}".encode().ljust(_HEAD_BYTES)


def _whole(file: pa.Buffer) -> pa.Buffer | None:
    """The data of a stored part; None if a byte of it is not what it was: a wrong row would be deleted."""
    data = file.slice(min(_HEAD_BYTES, file.size))
    return data if file.slice(0, min(_HEAD_BYTES, file.size)).to_pybytes() == _head(data) else None


def is_exact(key: pa.Schema) -> bool:
    """True if the number of a key is the key."""
    return len(key) == 1 and is_word(key.field(0).type)


@dataclass(frozen=True)
class Wanted:
    """Keys that are looked up in many files."""

    keys: pa.Table
    numbers: Words

    @classmethod
    def of(cls, keys: pa.Table, equality: Equality) -> Wanted:
        canonical = equality.canonical(keys)
        return cls(canonical, hashes_of(canonical))

    def find(self, part: Part) -> tuple[Ints, Ints]:
        """The rows of a file that have one of the keys, in their order, and the place of each one's key."""
        return part.find(self.keys, self.numbers)
