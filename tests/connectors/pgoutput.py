"""A second, naive pgoutput: writes messages one by one and reads them one by one, to compare the decoder with."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pyarrow as pa

UNCHANGED = object()
"""A TOASTed value that an update did not touch."""

Value = object
"""None, text or `UNCHANGED`."""


@dataclass(frozen=True)
class Table:
    oid: int
    name: str
    columns: tuple[tuple[str, int, bool], ...]
    """Name, type and whether it belongs to the replica identity."""
    identity: str = "d"

    @property
    def stream(self) -> str:
        return f"public.{self.name}"


def begin(lsn: int, xid: int = 7, time: int = 0) -> bytes:
    return struct.pack(">cQqI", b"B", lsn, time, xid)


def commit(lsn: int, time: int = 0) -> bytes:
    return struct.pack(">cBQQq", b"C", 0, lsn, lsn + 8, time)


def relation(table: Table) -> bytes:
    head = b"R" + struct.pack(">I", table.oid) + b"public\0" + table.name.encode() + b"\0" + table.identity.encode()
    columns = [
        struct.pack(">B", is_key) + name.encode() + b"\0" + struct.pack(">Ii", oid, -1)
        for name, oid, is_key in table.columns
    ]
    return head + struct.pack(">H", len(columns)) + b"".join(columns)


def insert(table: Table, row: tuple[Value, ...]) -> bytes:
    return b"I" + struct.pack(">I", table.oid) + b"N" + _tuple(row)


def update(table: Table, row: tuple[Value, ...], old: tuple[Value, ...] | None = None, marker: bytes = b"K") -> bytes:
    before = marker + _tuple(old) if old is not None else b""
    return b"U" + struct.pack(">I", table.oid) + before + b"N" + _tuple(row)


def delete(table: Table, old: tuple[Value, ...], marker: bytes = b"K") -> bytes:
    return b"D" + struct.pack(">I", table.oid) + marker + _tuple(old)


def truncate(*tables: Table) -> bytes:
    return b"T" + struct.pack(">IB", len(tables), 0) + b"".join(struct.pack(">I", table.oid) for table in tables)


def batch(messages: list[bytes]) -> pa.RecordBatch:
    rows = len(messages)
    return pa.record_batch(
        {
            "lsn": pa.array([0] * rows, pa.int64()),
            "xid": pa.array([0] * rows, pa.int64()),
            "data": pa.array(messages, pa.binary()),
        }
    )


def _tuple(row: tuple[Value, ...]) -> bytes:
    return struct.pack(">H", len(row)) + b"".join(map(_value, row))


def _value(value: Value) -> bytes:
    if value is None:
        return b"n"
    if value is UNCHANGED:
        return b"u"
    text = str(value).encode()
    return b"t" + struct.pack(">I", len(text)) + text


class Naive:
    """Reads messages one by one; `rows` are dictionaries by stream, change columns included, values as text."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.tables: dict[int, Table] = {}
        self.rows: dict[str, list[dict[str, object]]] = {}

    def feed(self, message: bytes) -> None:
        kind, rest = message[:1], message[1:]
        if kind == b"B":
            self.lsn, self.time, self.xid = struct.unpack(">QqI", rest)
            self.sequence = -1
        elif kind == b"R":
            self._relation(rest)
        elif kind == b"T":
            self.sequence += 1
            (count,) = struct.unpack(">I", rest[:4])
            for oid in struct.unpack(f">{count}I", rest[5:]):
                self._add(self.tables[oid], "t", [None] * len(self.tables[oid].columns), None, None)
        elif kind in (b"I", b"U", b"D"):
            self.sequence += 1
            self._change(kind, rest)

    def _relation(self, rest: bytes) -> None:
        (oid,) = struct.unpack(">I", rest[:4])
        _, name, rest = rest[4:].split(b"\0", 2)
        identity, (count,) = rest[:1].decode(), struct.unpack(">H", rest[1:3])
        rest = rest[3:]
        columns = []
        for _ in range(count):
            is_key = bool(rest[0])
            column, rest = rest[1:].split(b"\0", 1)
            kind, _ = struct.unpack(">Ii", rest[:8])
            rest = rest[8:]
            columns.append((column.decode(), kind, is_key))
        self.tables[oid] = Table(oid, name.decode(), tuple(columns), identity)

    def _change(self, kind: bytes, rest: bytes) -> None:
        table = self.tables[struct.unpack(">I", rest[:4])[0]]
        rest = rest[4:]
        tuples: dict[bytes, list[object]] = {}
        while rest:
            marker, (count,) = rest[:1], struct.unpack(">H", rest[1:3])
            rest = rest[3:]
            values: list[object] = []
            for _ in range(count):
                form, rest = rest[:1], rest[1:]
                if form == b"t":
                    (size,) = struct.unpack(">I", rest[:4])
                    values.append(rest[4 : 4 + size].decode())
                    rest = rest[4 + size :]
                else:
                    values.append(UNCHANGED if form == b"u" else None)
            tuples[marker] = values
        old = tuples.get(b"K", tuples.get(b"O"))
        if kind == b"D":
            assert old is not None
            self._add(table, "d", old, None, None)
            return
        new = tuples[b"N"]
        if old is not None:
            for at, (_, _, is_key) in enumerate(table.columns):
                if new[at] is UNCHANGED and isinstance(old[at], str) and (is_key or b"O" in tuples):
                    new[at] = old[at]
        unchanged = [name for (name, _, _), value in zip(table.columns, new, strict=True) if value is UNCHANGED]
        keys = [at for at, (_, _, is_key) in enumerate(table.columns) if is_key and table.identity != "f"]
        keys = keys or list(range(len(table.columns)))
        moved = old is not None and any(old[at] != new[at] for at in keys)
        old_key = {table.columns[at][0]: old[at] for at in keys} if moved else None
        self._add(table, "c" if kind == b"I" else "u", new, unchanged or None, old_key)

    def _add(self, table: Table, op: str, values: list[object], unchanged: object, old_key: object) -> None:
        if not self.start <= self.lsn < self.end:
            return
        row = {
            name: None if value is UNCHANGED else value
            for (name, _, _), value in zip(table.columns, values, strict=True)
        }
        change = {
            "_op": op,
            "_position": f"{self.lsn:016X}.{self.sequence:010X}",
            "_txid": self.xid,
            "_unchanged": unchanged,
            "_old_key": old_key,
        }
        self.rows.setdefault(table.stream, []).append({**row, **change})
