"""Decode pgoutput messages (protocol 1, text) in bulk: Arrow in, Arrow out, no Python per row."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import pack_keys
from penstock.connectors.postgresql.types import (
    UNIX_EPOCH_US,
    Bytes,
    Column,
    Ints,
    TypeCatalog,
    gathered,
    parse_text,
    table_schema,
)
from penstock.errors import ConnectorError, DataError, FatalError, SchemaError

PIECE_MESSAGES = 65536
"""Messages that are decoded at a time: enough to make numpy's calls cheap, few enough to stay in the cache."""
PIECE_BYTES = 256 << 20
"""Bytes that are decoded at a time; with one message of at most 1 GiB on top, 32-bit offsets suffice."""

Mask = npt.NDArray[np.bool_]

_PAD = 8
_B, _C, _R, _I, _U, _D, _T, _Y = b"BCRIUDTY"
_K, _O, _N, _TEXT, _NULL, _UNCHANGED = b"KONtnu"
_KNOWN = np.zeros(256, bool)
_KNOWN[list(b"BCRIUDTYOM")] = True
_CHANGE_NAMES = {each.name for each in CHANGE_FIELDS}
_OPS = np.zeros(256, np.uint8)
_OPS[[_I, _U, _D, _T]] = [ord(op) for op in (Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE)]


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
class RelationChange:
    """A table was seen for the first time (`old` is None) or looks different; comes before the first rows that do."""

    old: Relation | None
    new: Relation
    position: str
    """`_position` of the first change that follows it."""


@dataclass(frozen=True)
class Rows:
    """Changes of one table in commit order: its columns, then `CHANGE_FIELDS`; a TRUNCATE is a row with `_op` `t`."""

    relation: Relation
    batch: pa.RecordBatch


Decoded = RelationChange | Rows


class Decoder:
    """
    Decodes one WAL range, chunk by chunk; picklable between two chunks if its functions are.

    Transactions with `start_lsn <= commit_lsn < end_lsn` count, `commit_lsn` being BEGIN's final LSN; others are skipped.
    """

    def __init__(
        self,
        catalog: TypeCatalog,
        start_lsn: int,
        end_lsn: int,
        *,
        wanted: Callable[[str], bool] | None = None,
        exclude: Callable[[str, str], bool] | None = None,
        as_text: Callable[[str, str], bool] | None = None,
        keys: Mapping[str, Sequence[str]] | None = None,
        relations: Mapping[int, Relation] | None = None,
        current_xid: int | None = None,
        on_bad: Callable[[str, ConnectorError], None] | None = None,
    ) -> None:
        """
        `wanted(stream)` chooses tables, `exclude(stream, column)` leaves out columns that are not of the key,
        `as_text(stream, column)` names those whose values are held as the server prints them, `keys` are the keys of
        tables whose replica identity does not name one (full, nothing), `relations` is what an earlier range knew of the
        tables (for `RelationChange.old`), `current_xid` a `pg_current_xact_id()` that widens `_txid`, `on_bad(stream,
        error)` is told of rows that cannot be decoded instead of an error that ends everything.
        """
        self.last_commit_lsn: int | None = None
        """BEGIN's final LSN of the last transaction in the range."""
        self.past_end = False
        """A transaction at or behind `end_lsn` was seen: nothing that follows belongs to the range."""
        self.relations: dict[int, Relation] = dict(relations or {})
        """What the tables of the rows so far looked like, by oid: `relations` of the next range."""
        self.parts: dict[int, int] = {}
        """Relations that were described right behind another: so come those whose rows are shown as those of their root."""
        self._catalog, self._start, self._end = catalog, start_lsn, end_lsn
        self._wanted, self._exclude, self._keys = wanted, exclude, dict(keys or {})
        self._as_text = as_text
        self._current_xid = current_xid
        self._on_bad = on_bad
        self._wire: dict[int, Relation] = {}
        self._described = 0
        self._open: _Transaction | None = None
        self._seen_lsn = 0
        self._xids: list[Ints] = []

    @property
    def xids(self) -> Ints:
        """The transactions of the range, in commit order; 64-bit ones if `current_xid` was given."""
        return np.concatenate(self._xids) if self._xids else np.empty(0, np.int64)

    def feed(self, messages: pa.Table | pa.RecordBatch) -> Iterator[Decoded]:
        """Decode a chunk of `(lsn, xid, data)`; the iterator must be read to its end before the next chunk."""
        data = messages.column("data")
        for chunk in data.chunks if isinstance(data, pa.ChunkedArray) else [data]:
            for piece in _pieces(chunk):
                if self.past_end:
                    return
                yield from self._decode(piece)

    def finish(self) -> None:
        """Call it behind the last chunk: raises if the messages ended inside a transaction."""
        if self._open is not None and not self.past_end:
            raise _broken(f"they end inside the transaction that commits at {lsn_text(self._open.lsn)}")

    def _decode(self, piece: _Piece) -> Iterator[Decoded]:
        frame = self._transactions(piece)
        versions = self._versions(piece, frame)
        rows = np.flatnonzero(frame.changes & (piece.kind != _T) & frame.wanted)
        oids = piece.uint32(rows, 1)
        groups = _grouped(rows, oids)
        truncates: dict[int, list[int]] = {}
        for at in np.flatnonzero((piece.kind == _T) & frame.wanted).tolist():
            for oid in piece.truncated(at):
                truncates.setdefault(oid, []).append(at)
        for oid, places in truncates.items():
            others = groups.get(oid, np.empty(0, np.int64))
            groups[oid] = np.sort(np.concatenate([others, np.array(places, np.int64)]))
        for oid, members in sorted(groups.items(), key=lambda group: int(group[1][0])):
            known = versions.get(oid, [])
            before = [(-1, self._wire[oid])] if oid in self._wire else []
            timeline = [*before, *known]
            if not timeline or members[0] < timeline[0][0]:
                raise _broken(f"a change of the relation {oid}, which no message described")
            ends = [at for at, _ in timeline[1:]] + [len(piece.kind)]
            cuts = np.searchsorted(members, ends)
            first = 0
            for (_, relation), cut in zip(timeline, cuts.tolist(), strict=True):
                if cut > first:
                    try:
                        yield from self._rows(piece, frame, relation, members[first:cut])
                    except (DataError, SchemaError) as error:
                        if self._on_bad is None:
                            raise
                        self._on_bad(relation.stream, error)
                first = cut
        for oid, known in versions.items():
            self._wire[oid] = known[-1][1]

    def _transactions(self, piece: _Piece) -> _Frame:
        """Which transaction each message belongs to, and its number in there."""
        begins, commits = np.flatnonzero(piece.kind == _B), np.flatnonzero(piece.kind == _C)
        piece.expect(begins, 21, "BEGIN")
        piece.expect(commits, 26, "COMMIT")
        is_begin, is_commit = piece.kind == _B, piece.kind == _C
        depth = np.cumsum(is_begin, dtype=np.int64) - np.cumsum(is_commit, dtype=np.int64) + (self._open is not None)
        changes = _OPS[piece.kind] > 0
        if (depth > 1).any() or (depth < 0).any() or (depth[changes] != 1).any():
            raise _broken("BEGIN, changes and COMMIT do not follow each other")
        lsns, times = piece.int64(begins, 1), piece.int64(begins, 9)
        xids = piece.uint32(begins, 17)
        if (np.diff(lsns, prepend=self._seen_lsn) <= 0).any():
            raise _broken("a transaction comes a second time, or out of its order")
        if self._current_xid is not None:
            xids = self._current_xid - ((self._current_xid - xids) & 0xFFFFFFFF)
        inside = (lsns >= self._start) & (lsns < self._end)
        self._xids.append(xids[inside])
        if inside.any():
            self.last_commit_lsn = int(lsns[inside][-1])
        self.past_end = bool((lsns >= self._end).any())

        carried = self._open or _Transaction(0, 0, 0, 0)
        counted = np.cumsum(changes, dtype=np.int64)
        transaction = np.cumsum(is_begin, dtype=np.int64)
        start = np.concatenate(([-carried.changes], counted[begins]))
        lsns, times, xids = (
            np.concatenate(([first], rest))
            for first, rest in ((carried.lsn, lsns), (carried.time, times), (carried.xid, xids))
        )
        if len(begins):
            self._seen_lsn = int(lsns[-1])
        ends_open = bool(len(depth)) and depth[-1] == 1
        changed = int(counted[-1] - start[-1]) if len(counted) else 0
        self._open = _Transaction(int(lsns[-1]), int(times[-1]), int(xids[-1]), changed) if ends_open else None
        wanted = ((lsns >= self._start) & (lsns < self._end))[transaction]
        return _Frame(changes, wanted, counted - start[transaction] - 1, lsns, times, xids, transaction)

    def _versions(self, piece: _Piece, frame: _Frame) -> dict[int, list[tuple[int, Relation]]]:
        """The relations that the piece describes anew, and from which message on."""
        found: dict[int, list[tuple[int, Relation]]] = {}
        behind = 0
        for at in np.flatnonzero(piece.kind == _R).tolist():
            relation = piece.relation(at)
            if self._described and frame.wanted[at] and (piece.kind[behind:at] == _Y).all():
                self.parts[relation.oid] = self._described
            self._described, behind = relation.oid, at + 1
            known = found.get(relation.oid)
            if (known[-1][1] if known else self._wire.get(relation.oid)) != relation:
                found.setdefault(relation.oid, []).append((at, relation))
        if (piece.kind[behind:] != _Y).any():
            self._described = 0
        return found

    def _rows(self, piece: _Piece, frame: _Frame, relation: Relation, members: Ints) -> Iterator[Decoded]:
        if self._wanted is not None and not self._wanted(relation.stream):
            return
        old = self.relations.get(relation.oid)
        if old != relation:
            first = position_text(int(frame.lsns[frame.transaction[members[0]]]), int(frame.sequence[members[0]]))
            self.relations[relation.oid] = relation
            yield RelationChange(old, relation, first)
        if clash := sorted({column.name for column in relation.columns} & _CHANGE_NAMES):
            raise SchemaError(
                f"{relation.stream} has a column {clash[0]!r}, which is the name of a column that describes a change",
                hint="rename it, or leave the table out",
            )
        if (as_text := self._as_text) is not None:
            flagged = (replace(each, as_text=as_text(relation.stream, each.name)) for each in relation.columns)
            relation = replace(relation, columns=tuple(flagged))
        key = relation.key(self._keys.get(relation.stream, ()))
        exclude = self._exclude
        kept = [
            number
            for number, column in enumerate(relation.columns)
            if exclude is None or column.name in key or not exclude(relation.stream, column.name)
        ]
        is_truncate = piece.kind[members] == _T
        changes = piece.changes(members[~is_truncate], relation)
        columns = [self._column(changes.rows[number], piece, relation.columns[number]) for number in kept]
        change = [_unchanged(changes, relation, kept), self._old_keys(changes, piece, relation, key)]
        if is_truncate.any():  # rows of nulls among the others
            place = pa.array(np.cumsum(~is_truncate) - 1, mask=is_truncate)
            columns, change = ([each.take(place) for each in some] for some in (columns, change))
        transaction = frame.transaction[members]
        described: list[pa.Array] = [
            _letters(_OPS[piece.kind[members]]),
            _positions(frame.lsns[transaction], frame.sequence[members]),
            pa.array(frame.xids[transaction]),
            pa.array(frame.times[transaction] + UNIX_EPOCH_US).view(pa.timestamp("us", "UTC")),
            *change,
        ]
        own = table_schema([relation.columns[number] for number in kept], self._catalog, key)
        schema = pa.schema([*own, *CHANGE_FIELDS], own.metadata)
        yield Rows(relation, pa.RecordBatch.from_arrays([*columns, *described], schema=schema))

    def _column(self, cells: _Cells, piece: _Piece, column: Column) -> pa.Array:
        return parse_text(piece.texts(cells), *column.held, self._catalog, name=column.name)

    def _old_keys(self, changes: _Changes, piece: _Piece, relation: Relation, key: Sequence[str]) -> pa.Array:
        """For rows whose key changed, the old one; for rows of a table without a key, the old row."""
        if not len(changes.moved):
            return pa.nulls(changes.count, pa.string())
        numbers = [n for n, column in enumerate(relation.columns) if not key or column.name in key]
        differs = np.zeros(len(changes.moved), bool)
        for number in numbers:
            old, new = piece.texts(changes.old[number]), piece.texts(changes.rows[number].at(changes.moved))
            same = pc.or_(pc.fill_null(pc.equal(old, new), False), pc.and_(pc.is_null(old), pc.is_null(new)))
            differs |= ~same.to_numpy(zero_copy_only=False)
        if not differs.any():
            return pa.nulls(changes.count, pa.string())
        names = [relation.columns[number].name for number in numbers]
        values = [self._column(changes.old[n].at(np.flatnonzero(differs)), piece, relation.columns[n]) for n in numbers]
        place = np.full(changes.count, -1, np.int64)
        place[changes.moved[differs]] = np.arange(differs.sum())
        return pack_keys(names, values).take(pa.array(place, mask=place < 0))


@dataclass(frozen=True)
class _Transaction:
    """The one that a chunk ended in; `changes` counts those that it had so far."""

    lsn: int
    time: int
    xid: int
    changes: int


@dataclass(frozen=True)
class _Frame:
    """Per message: whether it is a change, in the range, its number in its transaction, and that; per transaction: the rest."""

    changes: Mask
    wanted: Mask
    sequence: Ints
    lsns: Ints
    times: Ints
    xids: Ints
    transaction: Ints


@dataclass(frozen=True)
class _Cells:
    """One column of many tuples: kind, start and stop of each value."""

    kind: Bytes
    start: Ints
    stop: Ints

    def at(self, rows: Ints) -> _Cells:
        return _Cells(self.kind[rows], self.start[rows], self.stop[rows])

    def where(self, mask: Mask, other: _Cells) -> _Cells:
        """These, but `other`'s where the mask says so."""
        return _Cells(
            np.where(mask, other.kind, self.kind),
            np.where(mask, other.start, self.start),
            np.where(mask, other.stop, self.stop),
        )

    def put(self, rows: Ints, other: _Cells) -> None:
        self.kind[rows], self.start[rows], self.stop[rows] = other.kind, other.start, other.stop


@dataclass(frozen=True)
class _Changes:
    """Per column the cells of each row; `old` are those of the tuples before the change, of the rows `moved`."""

    count: int
    rows: list[_Cells]
    moved: Ints
    old: list[_Cells]


class _Piece:
    """The bytes of some messages, with room behind them so that headers can be read without a look at the end."""

    def __init__(self, data: Bytes, offsets: Ints) -> None:
        room = pa.allocate_buffer(len(data) + _PAD)  # from Arrow's pool, which hands out warm pages
        self.data = np.frombuffer(room, np.uint8)
        self.data[: len(data)] = data
        self.data[len(data) :] = 0
        self.start, self.stop = offsets[:-1], offsets[1:]
        if (self.stop <= self.start).any():
            raise _broken("an empty message")
        self.kind = self.data[self.start]
        if not _KNOWN[self.kind].all():
            odd = bytes([int(self.kind[~_KNOWN[self.kind]][0])])
            raise _broken(
                f"a message of the unknown kind {odd!r}", hint="Penstock reads protocol version 1 of pgoutput"
            )
        # Every byte as the start of an integer: one gather reads a header that stands anywhere.
        count = len(self.data) - _PAD + 1
        self._words = np.ndarray((count,), ">u8", self.data.data, strides=(1,))

    def expect(self, messages: Ints, size: int, what: str) -> None:
        if (self.stop[messages] - self.start[messages] != size).any():
            raise _broken(f"a {what} message of another length")

    def int64(self, messages: Ints, offset: int) -> Ints:
        return self._words[self.start[messages] + offset].astype(np.uint64).view(np.int64)

    def uint32(self, messages: Ints, offset: int) -> Ints:
        at = self.start[messages] + offset
        if (at + 4 > self.stop[messages]).any():
            raise _broken("a message is cut off")
        return (self._words[at].astype(np.uint64) >> np.uint64(32)).view(np.int64)

    def changes(self, messages: Ints, relation: Relation) -> _Changes:
        """The cells of inserts, updates and deletes of one relation."""
        count = len(relation.columns)
        stop = self.stop[messages]
        cursor = self.start[messages] + 5
        kind = self.kind[messages]
        marker = self._marker(cursor, stop)
        is_new = marker == _N
        is_old = (marker == _K) | (marker == _O)
        if not np.where(kind == _I, is_new, np.where(kind == _D, is_old, is_new | is_old)).all():
            raise _broken(f"a change of {relation.stream} without its row")
        rows, cursor = self._tuples(cursor + 1, stop, count, relation)
        moved = np.flatnonzero((kind == _U) & is_old)
        if not len(moved):
            self._at_end(cursor, stop, relation)
            return _Changes(len(messages), rows, moved, [])
        old = [cells.at(moved) for cells in rows]
        behind, end = cursor[moved], stop[moved]
        if (self._marker(behind, end) != _N).any():
            raise _broken(f"an update of {relation.stream} without its new row")
        new, behind = self._tuples(behind + 1, end, count, relation)
        cursor[moved] = behind
        self._at_end(cursor, stop, relation)
        whole = marker[moved] == _O
        for column, cells, before, after in zip(relation.columns, rows, old, new, strict=True):
            # What the old tuple knows is not unknown: all of it if it is the whole row, else the key.
            known = (after.kind == _UNCHANGED) & (before.kind == _TEXT) & (whole | column.is_key)
            cells.put(moved, after.where(known, before) if known.any() else after)
        return _Changes(len(messages), rows, moved, old)

    def texts(self, cells: _Cells) -> pa.Array:
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
            raise _broken("a message is cut off")
        return self.data[cursor]

    def _tuples(self, cursor: Ints, stop: Ints, count: int, relation: Relation) -> tuple[list[_Cells], Ints]:
        """The cells of one tuple per message, column by column, and where each tuple ends."""
        widths = self._words[cursor].astype(np.uint64) >> np.uint64(48)
        if (widths != count).any():
            raise _broken(f"a row of {relation.stream} with another number of columns than its relation has")
        cursor = cursor + 2
        cells = []
        for column in relation.columns:
            if (cursor >= stop).any():
                raise _broken(f"a row of {relation.stream} is cut off")
            head = self._words[cursor].astype(np.uint64)
            kind = (head >> np.uint64(56)).astype(np.uint8)
            length = ((head >> np.uint64(24)) & np.uint64(0xFFFFFFFF)).view(np.int64)
            filled = kind == _TEXT
            if filled.all():
                start = cursor + 5
            else:
                if not (filled | (kind == _NULL) | (kind == _UNCHANGED)).all():
                    raise _broken(
                        f"the column {column.name!r} of {relation.stream} is in a format that Penstock does not read",
                        hint="pgoutput must send text: leave its option `binary` off",
                    )
                start = cursor + np.where(filled, 5, 1)
                length = np.where(filled, length, 0)
            cursor = start + length
            if (cursor > stop).any():
                raise _broken(f"a row of {relation.stream} is cut off")
            cells.append(_Cells(kind, start, cursor))
        return cells, cursor

    def _at_end(self, cursor: Ints, stop: Ints, relation: Relation) -> None:
        if (cursor != stop).any():
            raise _broken(f"a row of {relation.stream} goes on behind its last column")


class _Reader:
    """Reads the few messages that are not rows."""

    def __init__(self, message: bytes, what: str) -> None:
        self._message, self._at, self._what = message, 1, what

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        part = self._message[self._at : self._at + size]
        if len(part) < size:
            raise _broken(f"a {self._what} message is cut off")
        self._at += size
        return int(struct.unpack(form, part)[0])

    def text(self) -> str:
        stop = self._message.find(b"\0", self._at)
        if stop < 0:
            raise _broken(f"a {self._what} message is cut off")
        part, self._at = self._message[self._at : stop], stop + 1
        try:
            return part.decode()
        except UnicodeDecodeError as error:
            raise _broken(
                f"a {self._what} message with a name that is not UTF-8", hint="set client_encoding"
            ) from error

    def end(self) -> None:
        if self._at != len(self._message):
            raise _broken(f"a {self._what} message goes on behind its end")


def lsn_int(text: str) -> int:
    """`16/B374D848` as an integer."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def position_text(lsn: int, sequence: int) -> str:
    """`_position` of the change with that number in the transaction that commits at `lsn`; sorts as text."""
    return f"{lsn:016X}.{sequence:010X}"


def _digits(numbers: Ints, width: int) -> Bytes:
    """Each number as a row of that many hex digits."""
    octets = numbers.astype(">i8").view(np.uint8).reshape(-1, 8)[:, 8 - width // 2 :]
    return _PAIRS[octets].view(np.uint8)


_PAIRS = np.frombuffer(bytes(range(256)).hex().upper().encode(), np.uint16)
"""The two hex digits of every byte."""


def _positions(lsns: Ints, sequence: Ints) -> pa.Array:
    rows = len(lsns)
    text = np.empty((rows, 27), np.uint8)
    # Few transactions, many rows: the digits of an LSN are made once.
    distinct, which = np.unique(lsns, return_inverse=True)
    text[:, :16] = _digits(distinct, 16)[which]
    text[:, 16] = ord(".")
    text[:, 17:] = _digits(sequence, 10)
    return _fixed(text.ravel(), rows, 27)


def _letters(codes: Bytes) -> pa.Array:
    return _fixed(codes, len(codes), 1)


def _fixed(data: Bytes, rows: int, width: int) -> pa.Array:
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    )


def _unchanged(changes: _Changes, relation: Relation, kept: Sequence[int]) -> pa.Array:
    """Per row the names of the columns that the message says nothing about; null for none."""
    hit = [(number, mask) for number in kept if (mask := changes.rows[number].kind == _UNCHANGED).any()]
    if not hit:
        return pa.nulls(changes.count, pa.list_(pa.string()))
    table = np.stack([mask for _, mask in hit], axis=1)
    counts = table.sum(axis=1)
    names = pa.array([relation.columns[number].name for number, _ in hit]).take(pa.array(np.nonzero(table)[1]))
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(counts == 0, False)), names)


def _grouped(rows: Ints, oids: Ints) -> dict[int, Ints]:
    if len(oids) and (oids == oids[0]).all():
        return {int(oids[0]): rows}
    order = np.argsort(oids, kind="stable")
    found, first = np.unique(oids[order], return_index=True)
    return dict(zip(found.tolist(), np.split(rows[order], first[1:]), strict=True)) if len(found) else {}


def _pieces(data: pa.Array) -> Iterator[_Piece]:
    if not len(data):
        return
    if data.null_count:
        raise _broken("a message is null")
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
        yield _Piece(whole[offsets[first] : offsets[last]], offsets[first : last + 1] - offsets[first])
        first = last


def _broken(what: str, hint: str = "") -> FatalError:
    return FatalError(f"PostgreSQL's change messages cannot be understood: {what}", code="PEN-5030", hint=hint)
