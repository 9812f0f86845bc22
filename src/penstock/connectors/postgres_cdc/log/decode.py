"""Decode pgoutput messages (protocol 1, text) in bulk: Arrow in, Arrow out, no Python per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import pack_keys
from penstock.connectors.postgres_cdc.log.lsn import fixed_texts, lsn_text, position_texts
from penstock.connectors.postgres_cdc.log.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    INSERT,
    RELATION,
    TRUNCATE,
    TYPE,
    UNCHANGED,
    UPDATE,
    Cells,
    Mask,
    Piece,
    Relation,
    RowCells,
    broken,
    pieces,
)
from penstock.connectors.postgresql.buffers import Bytes, Ints
from penstock.connectors.postgresql.types import UNIX_EPOCH_US, Column, TypeCatalog, parse_text, table_schema
from penstock.errors import ConnectorError, DataError, SchemaError

_CHANGE_NAMES = {each.name for each in CHANGE_FIELDS}
_OPS = np.zeros(256, np.uint8)
_OPS[[INSERT, UPDATE, DELETE, TRUNCATE]] = [ord(op) for op in (Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE)]


@dataclass(frozen=True)
class Rows:
    """Changes of one table in commit order: its columns, then `CHANGE_FIELDS`; a TRUNCATE is a row with `_op` `t`."""

    relation: Relation
    batch: pa.RecordBatch


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
        current_xid: int | None = None,
        on_bad: Callable[[str, ConnectorError], None] | None = None,
    ) -> None:
        """
        `wanted(stream)` chooses tables, `exclude(stream, column)` leaves out columns that are not of the key,
        `as_text(stream, column)` names the columns that are kept as the server prints them, `keys` are the keys of
        tables whose replica identity does not name one (full, nothing), `current_xid` a `pg_current_xact_id()` that widens
        `_txid`. With `on_bad(stream, error)` rows that cannot be decoded are reported there; without it their error is raised.
        """
        self.past_end = False
        """A transaction at or after `end_lsn` was seen: nothing that follows belongs to the range."""
        self.parts: dict[int, int] = {}
        """
        Partition → root. pgoutput announces the root's relation right before the partition's when
        `publish_via_partition_root` is on.
        """
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

    def feed(self, messages: pa.Table | pa.RecordBatch) -> Iterator[Rows]:
        """Decode a chunk of `(lsn, xid, data)`; the iterator must be read to its end before the next chunk."""
        data = messages.column("data")
        for chunk in data.chunks if isinstance(data, pa.ChunkedArray) else [data]:
            for piece in pieces(chunk):
                if self.past_end:
                    return
                yield from self._decode(piece)

    def finish(self) -> None:
        """Call it after the last chunk: raises if the messages ended inside a transaction."""
        if self._open is not None and not self.past_end:
            raise broken(f"they end inside the transaction that commits at {lsn_text(self._open.lsn)}")

    def _decode(self, piece: Piece) -> Iterator[Rows]:
        frame = self._transactions(piece)
        versions = self._versions(piece, frame)
        rows = np.flatnonzero(frame.changes & (piece.kind != TRUNCATE) & frame.wanted)
        oids = piece.uint32(rows, 1)
        groups = _grouped(rows, oids)
        truncates: dict[int, list[int]] = {}
        for at in np.flatnonzero((piece.kind == TRUNCATE) & frame.wanted).tolist():
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
                raise broken(f"a change of the relation {oid}, which no message described")
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

    def _transactions(self, piece: Piece) -> _Frame:
        """Which transaction each message belongs to, and its number in there."""
        begins, commits = np.flatnonzero(piece.kind == BEGIN), np.flatnonzero(piece.kind == COMMIT)
        piece.expect(begins, 21, "BEGIN")
        piece.expect(commits, 26, "COMMIT")
        is_begin, is_commit = piece.kind == BEGIN, piece.kind == COMMIT
        depth = np.cumsum(is_begin, dtype=np.int64) - np.cumsum(is_commit, dtype=np.int64) + (self._open is not None)
        changes = _OPS[piece.kind] > 0
        if (depth > 1).any() or (depth < 0).any() or (depth[changes] != 1).any():
            raise broken("BEGIN, changes and COMMIT do not follow each other")
        lsns, times = piece.int64(begins, 1), piece.int64(begins, 9)
        xids = piece.uint32(begins, 17)
        if (np.diff(lsns, prepend=self._seen_lsn) <= 0).any():
            raise broken("a transaction comes a second time, or out of its order")
        if self._current_xid is not None:
            xids = self._current_xid - ((self._current_xid - xids) & 0xFFFFFFFF)
        inside = (lsns >= self._start) & (lsns < self._end)
        self._xids.append(xids[inside])
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

    def _versions(self, piece: Piece, frame: _Frame) -> dict[int, list[tuple[int, Relation]]]:
        """The relations that the piece describes, and from which message on each description holds."""
        found: dict[int, list[tuple[int, Relation]]] = {}
        after = 0
        for at in np.flatnonzero(piece.kind == RELATION).tolist():
            relation = piece.relation(at)
            if self._described and frame.wanted[at] and (piece.kind[after:at] == TYPE).all():
                self.parts[relation.oid] = self._described
            self._described, after = relation.oid, at + 1
            known = found.get(relation.oid)
            if (known[-1][1] if known else self._wire.get(relation.oid)) != relation:
                found.setdefault(relation.oid, []).append((at, relation))
        if (piece.kind[after:] != TYPE).any():
            self._described = 0
        return found

    def _rows(self, piece: Piece, frame: _Frame, relation: Relation, members: Ints) -> Iterator[Rows]:
        if self._wanted is not None and not self._wanted(relation.stream):
            return
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
        is_truncate = piece.kind[members] == TRUNCATE
        changes = piece.changes(members[~is_truncate], relation)
        columns = [self._column(changes.rows[number], piece, relation.columns[number]) for number in kept]
        change = [_unchanged(changes, relation, kept), self._old_keys(changes, piece, relation, key)]
        if is_truncate.any():  # rows of nulls among the others
            place = pa.array(np.cumsum(~is_truncate) - 1, mask=is_truncate)
            columns, change = ([each.take(place) for each in some] for some in (columns, change))
        transaction = frame.transaction[members]
        described: list[pa.Array] = [
            _letters(_OPS[piece.kind[members]]),
            position_texts(frame.lsns[transaction], frame.sequence[members]),
            pa.array(frame.xids[transaction]),
            pa.array(frame.times[transaction] + UNIX_EPOCH_US).view(pa.timestamp("us", "UTC")),
            *change,
        ]
        own = table_schema([relation.columns[number] for number in kept], self._catalog, key)
        schema = pa.schema([*own, *CHANGE_FIELDS], own.metadata)
        yield Rows(relation, pa.RecordBatch.from_arrays([*columns, *described], schema=schema))

    def _column(self, cells: Cells, piece: Piece, column: Column) -> pa.Array:
        return parse_text(piece.texts(cells), *column.held, self._catalog, name=column.name)

    def _old_keys(self, changes: RowCells, piece: Piece, relation: Relation, key: Sequence[str]) -> pa.Array:
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
    """The transaction that a chunk ended in; `changes` counts its changes so far."""

    lsn: int
    time: int
    xid: int
    changes: int


@dataclass(frozen=True)
class _Frame:
    """`changes, wanted, sequence, transaction` have one entry per message; `lsns, times, xids` one per transaction."""

    changes: Mask
    wanted: Mask
    sequence: Ints
    lsns: Ints
    times: Ints
    xids: Ints
    transaction: Ints


def _letters(codes: Bytes) -> pa.Array:
    return fixed_texts(codes, len(codes), 1)


def _unchanged(changes: RowCells, relation: Relation, kept: Sequence[int]) -> pa.Array:
    """Per row the names of the columns that the message says nothing about; null for none."""
    hit = [(number, mask) for number in kept if (mask := changes.rows[number].kind == UNCHANGED).any()]
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
