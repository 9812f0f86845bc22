"""The messages of pgoutput (protocol 1, text) as numpy arrays: which bytes are which column of which row."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.connectors.postgresql.buffers import Bytes, Ints, gathered
from penstock.connectors.postgresql.types import Column
from penstock.errors import FatalError

PIECE_MESSAGES = 65536
"""Messages that are decoded at a time: enough to make numpy's calls cheap, few enough to stay in the cache."""
PIECE_BYTES = 256 << 20
"""Bytes that are decoded at a time; with one message of at most 1 GiB on top, 32-bit offsets suffice."""

Mask = npt.NDArray[np.bool_]

BEGIN, COMMIT, RELATION, INSERT, UPDATE, DELETE, TRUNCATE, TYPE = b"BCRIUDTY"
_KEY, _OLD, _NEW, _TEXT, _NULL, UNCHANGED = b"KONtnu"
_PAD = 8
_KNOWN = np.zeros(256, bool)
_KNOWN[list(b"BCRIUDTYOM")] = True


@dataclass(frozen=True)
class Relation:
    """A table as a RELATION message (or the catalog) describes it."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    """`d` default, `f` full, `i` index, `n` nothing."""
    columns: tuple[Column, ...]

    @property
    def stream(self) -> str:
        return f"{self.namespace}.{self.name}"

    def key(self, configured: Sequence[str] = ()) -> tuple[str, ...]:
        """
        The columns that tell rows apart: the replica identity's, as a delete knows no others.

        Where it names none, or all (full), they are `configured`, as far as the table has them.
        """
        named = tuple(column.name for column in self.columns if column.is_key)
        if named and self.replica_identity != "f":
            return named
        names = {column.name for column in self.columns}
        return tuple(configured) if names.issuperset(configured) else ()


@dataclass(frozen=True)
class Cells:
    """One column of many tuples: kind, start and stop of each value."""

    kind: Bytes
    start: Ints
    stop: Ints

    def at(self, rows: Ints) -> Cells:
        return Cells(self.kind[rows], self.start[rows], self.stop[rows])

    def where(self, mask: Mask, other: Cells) -> Cells:
        """These, but `other`'s where the mask says so."""
        return Cells(
            np.where(mask, other.kind, self.kind),
            np.where(mask, other.start, self.start),
            np.where(mask, other.stop, self.stop),
        )

    def put(self, rows: Ints, other: Cells) -> None:
        self.kind[rows], self.start[rows], self.stop[rows] = other.kind, other.start, other.stop


@dataclass(frozen=True)
class RowCells:
    """Per column the cells of each row; `old` are those of the tuples before the change, of the rows `moved`."""

    count: int
    rows: list[Cells]
    moved: Ints
    old: list[Cells]


class Piece:
    """The bytes of some messages, with room after them so that headers can be read without checking for the end."""

    def __init__(self, data: Bytes, offsets: Ints) -> None:
        room = pa.allocate_buffer(len(data) + _PAD)  # from Arrow's pool, which hands out warm pages
        self.data = np.frombuffer(room, np.uint8)
        self.data[: len(data)] = data
        self.data[len(data) :] = 0
        self.start, self.stop = offsets[:-1], offsets[1:]
        if (self.stop <= self.start).any():
            raise broken("an empty message")
        self.kind = self.data[self.start]
        if not _KNOWN[self.kind].all():
            odd = bytes([int(self.kind[~_KNOWN[self.kind]][0])])
            raise broken(f"a message of the unknown kind {odd!r}", hint="Penstock reads protocol version 1 of pgoutput")
        # Every byte as the start of an integer: one gather reads headers at any place.
        count = len(self.data) - _PAD + 1
        self._words = np.ndarray((count,), ">u8", self.data.data, strides=(1,))

    def expect(self, messages: Ints, size: int, what: str) -> None:
        if (self.stop[messages] - self.start[messages] != size).any():
            raise broken(f"a {what} message of another length")

    def int64(self, messages: Ints, offset: int) -> Ints:
        return self._words[self.start[messages] + offset].astype(np.uint64).view(np.int64)

    def uint32(self, messages: Ints, offset: int) -> Ints:
        at = self.start[messages] + offset
        if (at + 4 > self.stop[messages]).any():
            raise broken("a message is cut off")
        return (self._words[at].astype(np.uint64) >> np.uint64(32)).view(np.int64)

    def changes(self, messages: Ints, relation: Relation) -> RowCells:
        """The cells of inserts, updates and deletes of one relation."""
        count = len(relation.columns)
        stop = self.stop[messages]
        cursor = self.start[messages] + 5
        kind = self.kind[messages]
        marker = self._marker(cursor, stop)
        is_new = marker == _NEW
        is_old = (marker == _KEY) | (marker == _OLD)
        if not np.where(kind == INSERT, is_new, np.where(kind == DELETE, is_old, is_new | is_old)).all():
            raise broken(f"a change of {relation.stream} without its row")
        rows, cursor = self._tuples(cursor + 1, stop, count, relation)
        moved = np.flatnonzero((kind == UPDATE) & is_old)
        if not len(moved):
            self._at_end(cursor, stop, relation)
            return RowCells(len(messages), rows, moved, [])
        old = [cells.at(moved) for cells in rows]
        after_old, end = cursor[moved], stop[moved]
        if (self._marker(after_old, end) != _NEW).any():
            raise broken(f"an update of {relation.stream} without its new row")
        new, after_old = self._tuples(after_old + 1, end, count, relation)
        cursor[moved] = after_old
        self._at_end(cursor, stop, relation)
        whole = marker[moved] == _OLD
        for column, cells, before, after in zip(relation.columns, rows, old, new, strict=True):
            # What the old tuple knows is not unknown: all of it if it is the whole row, else the key.
            known = (after.kind == UNCHANGED) & (before.kind == _TEXT) & (whole | column.is_key)
            cells.put(moved, after.where(known, before) if known.any() else after)
        return RowCells(len(messages), rows, moved, old)

    def texts(self, cells: Cells) -> pa.Array:
        """The values of a column as bytes; null where there is none."""
        missing = cells.kind != _TEXT
        return gathered(self.data, cells.start, cells.stop, missing, pa.binary())

    def relation(self, at: int) -> Relation:
        reader = _Reader(self._message(at), "RELATION")
        oid = reader.number(">I")
        namespace, name = reader.text() or "pg_catalog", reader.text()
        identity = chr(reader.number(">B"))
        columns = []
        for _ in range(reader.number(">H")):
            is_key = bool(reader.number(">B") & 1)
            column = reader.text()
            columns.append(Column(column, reader.number(">I"), reader.number(">i"), is_key))
        reader.end()
        return Relation(oid, namespace, name, identity, tuple(columns))

    def truncated(self, at: int) -> list[int]:
        reader = _Reader(self._message(at), "TRUNCATE")
        count = reader.number(">I")
        reader.number(">B")
        oids = [reader.number(">I") for _ in range(count)]
        reader.end()
        return oids

    def _message(self, at: int) -> bytes:
        return self.data[self.start[at] : self.stop[at]].tobytes()

    def _marker(self, cursor: Ints, stop: Ints) -> Bytes:
        if (cursor + 3 > stop).any():
            raise broken("a message is cut off")
        return self.data[cursor]

    def _tuples(self, cursor: Ints, stop: Ints, count: int, relation: Relation) -> tuple[list[Cells], Ints]:
        """The cells of one tuple per message, column by column, and where each tuple ends."""
        widths = self._words[cursor].astype(np.uint64) >> np.uint64(48)
        if (widths != count).any():
            raise broken(f"a row of {relation.stream} with another number of columns than its relation has")
        cursor = cursor + 2
        cells = []
        for column in relation.columns:
            if (cursor >= stop).any():
                raise broken(f"a row of {relation.stream} is cut off")
            head = self._words[cursor].astype(np.uint64)
            kind = (head >> np.uint64(56)).astype(np.uint8)
            length = ((head >> np.uint64(24)) & np.uint64(0xFFFFFFFF)).view(np.int64)
            filled = kind == _TEXT
            if filled.all():
                start = cursor + 5
            else:
                if not (filled | (kind == _NULL) | (kind == UNCHANGED)).all():
                    raise broken(
                        f"the column {column.name!r} of {relation.stream} is in a format that Penstock does not read",
                        hint="pgoutput must send text: leave its option `binary` off",
                    )
                start = cursor + np.where(filled, 5, 1)
                length = np.where(filled, length, 0)
            cursor = start + length
            if (cursor > stop).any():
                raise broken(f"a row of {relation.stream} is cut off")
            cells.append(Cells(kind, start, cursor))
        return cells, cursor

    def _at_end(self, cursor: Ints, stop: Ints, relation: Relation) -> None:
        if (cursor != stop).any():
            raise broken(f"a row of {relation.stream} goes on after its last column")


class _Reader:
    """Reads the few messages that are not rows."""

    def __init__(self, message: bytes, what: str) -> None:
        self._message, self._at, self._what = message, 1, what

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        part = self._message[self._at : self._at + size]
        if len(part) < size:
            raise broken(f"a {self._what} message is cut off")
        self._at += size
        return int(struct.unpack(form, part)[0])

    def text(self) -> str:
        stop = self._message.find(b"\0", self._at)
        if stop < 0:
            raise broken(f"a {self._what} message is cut off")
        part, self._at = self._message[self._at : stop], stop + 1
        try:
            return part.decode()
        except UnicodeDecodeError as error:
            raise broken(f"a {self._what} message with a name that is not UTF-8", hint="set client_encoding") from error

    def end(self) -> None:
        if self._at != len(self._message):
            raise broken(f"a {self._what} message goes on after its end")


def pieces(data: pa.Array) -> Iterator[Piece]:
    if not len(data):
        return
    if data.null_count:
        raise broken("a message is null")
    if pa.types.is_binary_view(data.type):
        data = data.cast(pa.large_binary())
    width = np.int64 if pa.types.is_large_binary(data.type) else np.int32
    _, raw, content = data.buffers()
    offsets = np.frombuffer(raw, width)[data.offset : data.offset + len(data) + 1].astype(np.int64)
    whole = np.frombuffer(content, np.uint8) if content is not None else np.empty(0, np.uint8)
    first = 0
    while first < len(data):
        by_bytes = int(np.searchsorted(offsets, offsets[first] + PIECE_BYTES))
        last = min(max(by_bytes, first + 1), first + PIECE_MESSAGES, len(data))
        yield Piece(whole[offsets[first] : offsets[last]], offsets[first : last + 1] - offsets[first])
        first = last


def broken(what: str, hint: str = "") -> FatalError:
    return FatalError(f"PostgreSQL's change messages cannot be understood: {what}", code="PEN-5030", hint=hint)
