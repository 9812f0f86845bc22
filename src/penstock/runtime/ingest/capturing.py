"""Captures: a first copy of each table, then its changes, as rows that describe them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock import failpoints
from penstock.capture import Ack, Change, ChangeCapture, Delete, SnapshotTable, Upsert
from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import pack_key
from penstock.durable import Json
from penstock.errors import DataError, RetryableError
from penstock.runtime.ingest.line import Feeder, Line, Stopping, once
from penstock.runtime.journal import Journal
from penstock.source import HealthStatus, SourceBatch, SourceCheckpoint

NotCopied = Callable[[], Sequence[SnapshotTable]]
"""Which tables some target has no copy of."""
Lacking = Callable[[str], Sequence[str]]
"""Which targets of a stream have no copy."""


class Capturing(Feeder[ChangeCapture[Any]]):
    """Copies the tables that a target lacks, and then follows their changes."""

    def __init__(self, line: Line, source: ChangeCapture[Any], unseeded: NotCopied, lacking: Lacking) -> None:
        super().__init__(line, source)
        self._unseeded = unseeded
        self._lacking = lacking
        self._copied: set[str] = set()  # tables whose snapshot was made by this process

    def restore(self) -> None:
        if self.line.journal.checkpoint is not None:
            known = noted(self.line.journal)
            once(self.line.name, lambda: self.source.restore(known.get("position"), known.get("copies", {})))

    def feed(self) -> None:
        line, processing = self.line, self.line.processing
        buffer = Changes(line.journal, self.source, processing.linger_ms / 1000, processing.max_batch_records)
        while not line.stop.is_set():
            began, rows = time.monotonic(), line.rows
            error: RetryableError | None = None
            why = "live() ended, though nobody asked it to stop"
            try:
                self._snapshot(buffer)
                self._live(buffer)
            except RetryableError as broken:
                error, why = broken, str(broken)
            if line.stop.is_set():
                return
            line.idle.clear()
            buffer.flush()
            line.journal.flush()  # confirmed before `live` looks for its resume point again
            line.rested(began, rows)
            line.back_off(why, error)

    def caught_up(self, since: float) -> bool:
        return self.source.caught_up(since) and super().caught_up(since)

    def seeded(self) -> Mapping[str, int]:
        return dict(noted(self.line.journal).get("seeded", {}))

    def seeded_for(self, stream: str) -> Sequence[str]:
        return list(noted(self.line.journal).get("seeded_for", {}).get(stream, ()))

    def _live(self, buffer: Changes) -> None:
        buffer.resume()
        quiet = 0  # there may be one None between two changes
        for change in self.source.live():
            if self.line.stop.is_set():
                break
            buffer.add(change)
            quiet = 0 if change is not None else quiet + 1
            if quiet == 0:
                self.line.idle.clear()
            elif quiet == 2:
                self.settle()
                self.line.idle.set()
                self.line.say(HealthStatus.healthy())
        buffer.flush()

    def _snapshot(self, buffer: Changes) -> None:
        """Copy the tables that no sink has, unless their copy is in the journal and only waits for its epoch."""
        waiting = {s for s, end in self.seeded().items() if self.line.is_new or end > self.line.committed.row}
        waiting = {s for s in waiting if set(self._lacking(s)) <= set(self.seeded_for(s))} | self._copied
        tables = [table for table in self._unseeded() if table.stream not in waiting]
        if tables:
            buffer.start_snapshot({table.stream: list(self._lacking(table.stream)) for table in tables})
            for change in self.source.snapshot(tables):
                if self.line.stop.is_set():
                    raise Stopping
                buffer.add(change, Op.SEEDED)
            buffer.finish_snapshot(tables)
            self._copied |= {table.stream for table in tables}


class Changes:
    """
    Gathers changes into batches per table.

    `_position` is the change's number, which goes on over restarts: it sorts as text in the order they were captured.
    """

    def __init__(self, journal: Journal, source: ChangeCapture[Any], linger_secs: float, most_rows: int) -> None:
        """What waits is journaled after `linger_secs`, or once it is `most_rows`."""
        known = noted(journal)
        self._journal = journal
        self._source = source
        self._linger_secs = linger_secs
        self._most_rows = most_rows
        self._number: int = known.get("number", 0)
        self._seeded: dict[str, int] = known.get("seeded", {})
        self._seeded_for: dict[str, list[str]] = known.get("seeded_for", {})
        self._copies: dict[str, Json] = known.get("copies", {})  # the position of a complete copy's last row
        self._copying: dict[str, Json] = {}
        self._copying_for: dict[str, list[str]] = {}
        self._known: set[str] = set()  # streams that had rows in the journal before the snapshot
        self._position: Json = known.get("position")
        self._at_position: int = known.get("at_position", 0)  # a transaction's changes may share its position
        self._repeats: tuple[Json, int] | None = None
        self._waiting: list[tuple[Op, Change, int]] = []
        self._first_at = 0.0

    def resume(self) -> None:
        """`live` begins again: up to the last position that was taken, its changes are repeats."""
        self._repeats = (self._position, self._at_position)

    def add(self, change: Change | None, op: Op | None = None) -> None:
        """Take a change; a repeat is confirmed again and left out."""
        if change is not None:
            if op is None and self._is_repeat(change.position):
                self._journal.append((), None, change.ack.confirm)
                return
            if op is Op.SEEDED:
                self._clear(change.event.table)
                self._copying[change.event.table.stream] = change.position
            if not self._waiting:
                self._first_at = time.monotonic()
            live = Op.UPDATE if isinstance(change.event, Upsert) else Op.DELETE
            self._waiting.append((op or live, change, self._number))
            self._number += 1
            if op is None:
                self._at_position = self._at_position + 1 if change.position == self._position else 1
                self._position = change.position
        lingered = time.monotonic() - self._first_at >= self._linger_secs
        if change is None or lingered or len(self._waiting) >= self._most_rows:
            self.flush()

    def _is_repeat(self, position: Json) -> bool:
        if self._repeats is None:
            return False
        last, count = self._repeats
        if _precedes(position, last):
            return True
        if _has_order(position) and position == last and count > 0:
            self._repeats = (last, count - 1)
            return True
        self._repeats = None
        return False

    def start_snapshot(self, targets: Mapping[str, list[str]]) -> None:
        """Of streams that the journal knows, a copy is not the first: it was cut short, or is made for another sink."""
        self.flush()
        self._journal.flush()
        self._known = set(self._journal.schemas())
        self._copying, self._copying_for = {}, dict(targets)

    def _clear(self, table: SnapshotTable) -> None:
        """Before the first row of another copy: what was copied before may hold rows that are gone from this one."""
        if table.stream in self._known:
            self._known.remove(table.stream)
            self.add(Change(Delete(table, {})), Op.TRUNCATE)

    def finish_snapshot(self, tables: Sequence[SnapshotTable]) -> None:
        """Note with the last rows where the snapshot ended: a restart need not make it again."""
        self.flush()
        self._journal.flush()
        end = self._journal.tail
        self._seeded = {**self._seeded, **{table.stream: end for table in tables}}
        self._seeded_for = {**self._seeded_for, **self._copying_for}
        kept = {stream: at for stream, at in self._copies.items() if stream not in {table.stream for table in tables}}
        self._copies = {**kept, **self._copying}
        self._journal.append((), self._checkpoint())
        self._journal.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        tables: dict[str, list[tuple[Op, Change, int]]] = {}
        for one in self._waiting:
            tables.setdefault(one[1].event.table.stream, []).append(one)
        schemas = self._source.schema()
        batches = [
            SourceBatch(as_rows(stream, schemas.get(stream), changes), stream=stream)
            for stream, changes in tables.items()
        ]
        acks = [change.ack for _, change, _ in self._waiting]
        self._waiting = []
        self._journal.append(batches, self._checkpoint(), lambda: _confirm(acks))

    def _checkpoint(self) -> Json:
        metadata = {
            "number": self._number,
            "position": self._position,
            "at_position": self._at_position,
            "seeded": self._seeded,
            "seeded_for": self._seeded_for,
            "copies": self._copies,
        }
        return SourceCheckpoint(metadata=metadata).model_dump()


def as_rows(stream: str, schema: pa.Schema | None, changes: list[tuple[Op, Change, int]]) -> pa.RecordBatch:
    """The changes of one table as rows, with the columns that describe a change."""
    rows = [c.event.row if isinstance(c.event, Upsert) else c.event.key for _, c, _ in changes]
    names = {name for row in rows for name in row}
    if schema is None or names - set(schema.names):
        raise DataError(
            f"{stream} has columns {sorted(names)}, its schema has {sorted(schema.names) if schema else 'none'}",
            code="PEN-3001",
            hint="schema() of a capture must name every column of every table that it captures",
        )
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        try:
            columns.append(pa.array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise DataError(
                f"a value of {stream}.{field.name} does not fit {field.type}",  # never the value itself
                code="PEN-3001",
                hint="schema() of a capture must give a type that holds every value of the column",
            ) from error
    fields = [field.with_nullable(True) for field in schema]  # a delete carries its key only
    columns += [
        pa.array([op.value for op, _, _ in changes], pa.string()),
        pa.array([f"{number:020d}" for _, _, number in changes], pa.string()),
        pa.nulls(len(changes), pa.int64()),
        pa.nulls(len(changes), pa.timestamp("us", tz="UTC")),
        pa.array([_missing(c, schema.names) for _, c, _ in changes], pa.list_(pa.string())),
        pa.array([_old_key(c) for _, c, _ in changes], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, *CHANGE_FIELDS], metadata=schema.metadata))


def noted(journal: Journal) -> dict[str, Any]:
    """What the last durable checkpoint of a capture says."""
    found: dict[str, Any] = (journal.checkpoint or {}).get("metadata", {})
    return found


def _confirm(acks: Sequence[Ack]) -> None:
    for ack in acks:
        ack.confirm()
    failpoints.hit("journal.told")


def _has_order(position: Json) -> bool:
    """
    True for numbers and lists of them.

    The order of text cannot be trusted (`0/9` and `0/10`): such changes are journaled again rather than lost.
    """
    return isinstance(position, int) or (isinstance(position, list) and all(isinstance(n, int) for n in position))


def _precedes(position: Json, last: Json) -> bool:
    return _has_order(position) and _has_order(last) and type(position) is type(last) and bool(position < last)


def _missing(change: Change, names: Sequence[str]) -> list[str] | None:
    if not isinstance(change.event, Upsert):
        return None
    row = change.event.row
    return [name for name in names if name not in row] or None


def _old_key(change: Change) -> str | None:
    old_key = change.event.old_key if isinstance(change.event, Upsert) else None
    return None if old_key is None else pack_key(old_key)
