"""Capture the changes of PostgreSQL tables one by one; the replication slot is the resume point."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psycopg
import pyarrow as pa
from pydantic import PositiveInt

from penstock.capture import AckSink, Change, ChangeCapture, ChangeEvent, Delete, SnapshotTable, Upsert, pause
from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import unpack_key
from penstock.connectors.postgres_cdc import seed, setup, wal
from penstock.connectors.postgres_cdc.config import PostgresCdcConfig, PostgresLogConfig
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgres_cdc.seed import Pages
from penstock.connectors.postgres_cdc.setup import Table
from penstock.connectors.postgres_cdc.source import PostgresCdc
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import TypeCatalog, table_schema
from penstock.durable import Json, canonical, make_directory, write_atomic
from penstock.errors import ConfigError, DataError, RetryableError
from penstock.schema import key_of
from penstock.source import (
    ConnectorMetrics,
    Finding,
    HealthStatus,
    Note,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceContext,
)

CAPPED = ReadLimit(rows=1)
"""Any number of rows will do: that there is one makes `max_wal_bytes` count."""

_ABOUT = {each.name for each in CHANGE_FIELDS}


class PostgresCaptureConfig(PostgresLogConfig):
    max_wal_bytes: PositiveInt = 32 << 20
    """Most log that is read at a time; a transaction is never cut, and its changes are put into order in memory."""

    truncate: Literal["stop", "skip"] = "stop"
    """What a TRUNCATE of a table does: it is no change of a row, so the pipeline stops, or goes on without it."""

    poll_interval_ms: PositiveInt = 100
    """Time between two looks at the log while it holds no changes."""


@dataclass(frozen=True)
class _Row:
    """A change that was read and is not yet handed over."""

    position: str
    table: SnapshotTable
    schema: pa.Schema
    event: ChangeEvent


class PostgresCapture(ChangeCapture[PostgresCaptureConfig]):
    """
    Every change is an event with an ack, in commit order; the slot moves behind transactions that are confirmed whole.

    Supports exactly-once: what a crash makes the slot send again is dropped by its place in the log, and so is what the
    copy of a table contains. This is the plain way, for thousands of changes a second. `postgres_cdc` is the fast one:
    it copies in parallel, resumes a copy, takes transactions of any size, re-copies what a column's default changed
    without a trace in the log, and knows TRUNCATE, inserts from updates, transaction numbers and commit times.
    """

    name = "postgres_capture"

    def __init__(self, config: PostgresCaptureConfig) -> None:
        super().__init__(config)
        shared = {name: getattr(config, name) for name in PostgresLogConfig.model_fields}
        self._log = PostgresCdc(PostgresCdcConfig(**shared, snapshot="never"))
        self._tables: Mapping[str, Table] = {}
        self._catalog = TypeCatalog()
        self._schemas: dict[str, pa.Schema] = {}
        self._copies: dict[str, Json] = {}
        self._acks = AckSink(self._moved)
        self._confirmed = 0
        self._told = 0
        self._server = ("", 0)
        self._skipped = 0

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        self._log.open()
        with self._connected() as connection:
            self._look(connection)

    def close(self) -> None:
        with contextlib.suppress(RetryableError):  # what cannot be told now is confirmed again after the restart
            self._tell()
        self._log.close()

    def check(self) -> Sequence[Finding]:
        return self._log.check()

    def health_check(self) -> HealthStatus:
        return self._log.health_check()

    def metrics(self) -> ConnectorMetrics:
        return ConnectorMetrics(custom={"truncates_skipped": self._skipped})

    def lag(self) -> int | None:
        """Bytes of log that are not confirmed, asked over a connection of its own."""
        return self._log.lag()

    def tables(self) -> Sequence[SnapshotTable]:
        return [SnapshotTable(table.namespace, table.name) for table in self._tables.values()]

    def schema(self) -> Schemas:
        """Of each table as the last change showed it, else as the catalog does."""
        return dict(self._schemas)

    def restore(self, position: Json, copies: Mapping[str, Json]) -> None:
        self._copies = dict(copies)

    # -- the copy ------------------------------------------------------------------------------------------------

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        """All tables as of one moment; what the log holds of that moment and before is left out by `live`."""
        self._begin()
        copied: dict[str, Json] = {}
        with (
            self._connected() as exporter,
            failures.errors("cannot copy the tables"),
            contextlib.closing(connections.connect_arrow(self._log.config)) as reader,
        ):
            self._look(exporter)
            self._wait_for_writers(exporter)
            held = wal.hold(exporter, [self._tables[t.stream].oid for t in tables if t.stream in self._tables])
            for table in tables:
                known = self._tables.get(table.stream)
                part = Pages(table.stream, 0, None, held, held.lsn)
                for item in seed.read_part(reader, known, self._catalog, part) if known else ():
                    if isinstance(item, SourceBatch):
                        copied[table.stream] = {"snapshot": held.snapshot, "lsn": held.lsn}
                        for values in _rows(item.records):
                            yield Change(Upsert(table, _own(values)), position=copied[table.stream])
                    elif "again" in item.value:
                        raise RetryableError(f"{table.stream} was emptied or rewritten while it was copied")
        self._copies.update(copied)

    def _wait_for_writers(self, connection: psycopg.Connection[Any]) -> None:
        """Whoever writes now may have begun before a table was published: such changes are in no log, so in the copy."""
        until = wal.snapshot(connection).xmax
        give_up = time.monotonic() + self.config.visible_timeout_secs
        while wal.snapshot(connection).xmin < until:
            if time.monotonic() > give_up:
                holder = wal.oldest_writer(connection)
                raise RetryableError(
                    f"a transaction that writes has been open for {self.config.visible_timeout_secs:g} s"
                    + (f": pid {holder[0]}" if holder else ""),
                    code="PEN-2003",
                    hint="end it; the copy begins once everything that wrote before the tables were published has ended",
                )
            time.sleep(0.01)

    # -- the log -------------------------------------------------------------------------------------------------

    def live(self) -> Iterator[Change | None]:
        self._tell()
        position = self._begin()
        self._acks = AckSink(self._moved)  # what an earlier one gave out and nobody confirmed comes again
        while True:
            end = self._log.latest(position, CAPPED)
            if end == position:
                yield from pause(self.config.poll_interval_ms / 1000)
            else:
                notes: list[Json] = []
                yield from self._changes(position, end, notes)
                position = self._log.next_start(end, notes)
            self._tell()

    def _begin(self) -> LogPosition:
        """The slot's own place; publishes and makes the slot at the first start, and never again."""
        self._log.open()
        mark = self._mark()
        if mark is not None:
            with self._connected() as connection:
                here = wal.server(connection)
                try:
                    found = wal.verify_slot(wal.slot(connection, self.config.slot), self.config.slot, here)
                    wal.verify_range(found, self.config.slot, here, mark.lsn, mark.system, mark.timeline)
                except failures.SlotLost as lost:
                    hint = (
                        "changes may be missing: empty the targets, remove the pipeline's state directory, start over"
                    )
                    raise failures.SlotLost(lost.message, hint=hint) from lost
        position = self._log.initial()
        for failure in (each.failure for each in position.tables.values() if each.failure):
            raise ConfigError(failure.message, code="PEN-1016", hint=failure.hint)
        self._server = (position.system, position.timeline)
        self._told = position.lsn
        if mark is None:
            self._set_mark(position.lsn)
        return position

    def _changes(self, start: LogPosition, end: LogPosition, notes: list[Json]) -> Iterator[Change | None]:
        """The changes of a range in commit order, each with the place that the slot may move to behind it."""
        batches: dict[str, list[pa.RecordBatch]] = {}
        for split in self._log.split(start, end):
            for item in self._log.read(split):
                if isinstance(item, Note):
                    notes.append(item.value)
                else:
                    batches.setdefault(item.stream, []).append(self._uncopied(start, item))
        merged = heapq.merge(*(self._events(s, each) for s, each in batches.items()), key=lambda row: row.position)
        row = next(merged, None)
        if row is None:
            self._acks.ack(end.lsn).confirm()  # moves the slot once everything before it is confirmed
        while row is not None:
            following = next(merged, None)
            lsn, number = _place(row.position)
            # The slot may be moved to the start of a commit record, and still holds that transaction.
            within = following is not None and _place(following.position)[0] == lsn
            resume = end.lsn if following is None else lsn if within else lsn + 1
            stream = row.table.stream
            if not row.schema.equals(self._schemas.get(stream, pa.schema([])), check_metadata=True):
                yield None  # the rows before it had another shape
                self._schemas[stream] = row.schema
            yield Change(row.event, self._acks.ack(resume), [lsn, number])
            row = following

    def _uncopied(self, start: LogPosition, item: SourceBatch) -> pa.RecordBatch:
        """The changes that the copy of their table does not contain."""
        copy = self._copies.get(item.stream)
        if copy is None or start.lsn > copy["lsn"]:
            return item.records
        txids = item.records["_txid"].to_numpy(zero_copy_only=False)
        return item.records.filter(pa.array(~wal.Snapshot.parse(copy["snapshot"]).sees(txids)))

    def _events(self, stream: str, batches: Sequence[pa.RecordBatch]) -> Iterator[_Row]:
        known = self._tables.get(stream)
        namespace, _, name = stream.partition(".")
        table = SnapshotTable(known.namespace, known.name) if known else SnapshotTable(namespace, name)
        for batch in batches:
            schema = pa.schema([each for each in batch.schema if each.name not in _ABOUT], batch.schema.metadata)
            key = key_of(schema) or schema.names
            for row in _rows(batch):
                if row["_op"] == Op.TRUNCATE:
                    self._truncated(stream, row["_position"])
                elif row["_op"] == Op.DELETE:
                    yield _Row(row["_position"], table, schema, Delete(table, {each: row[each] for each in key}))
                else:
                    old_key = unpack_key(row["_old_key"]) if row["_old_key"] else None
                    yield _Row(row["_position"], table, schema, Upsert(table, _own(row), old_key))

    def _truncated(self, stream: str, position: str) -> None:
        if self.config.truncate == "stop":
            raise DataError(
                f"{stream} was truncated at {position}, and a capture has no event for that",
                hint='empty the target yourself and set truncate = "skip"; or use postgres_cdc, which follows it',
            )
        self._skipped += 1

    # -- the slot ------------------------------------------------------------------------------------------------

    def _moved(self, lsn: Json) -> None:
        """Called from the journal's thread: the slot is moved by the thread that reads it, since only one can use it."""
        self._confirmed = max(self._confirmed, lsn)

    def _tell(self) -> None:
        """Move the slot to what is confirmed; noted first, so that a slot that somebody else moved is found out."""
        confirmed = self._confirmed
        if confirmed > self._told:
            self._set_mark(confirmed)
            self._log.ack(LogPosition(lsn=confirmed))
            self._told = confirmed

    def _mark(self) -> LogPosition | None:
        """The furthest place that the slot was ever moved to from here."""
        path = self._mark_file()
        return LogPosition.model_validate_json(path.read_bytes()) if path and path.exists() else None

    def _set_mark(self, lsn: int) -> None:
        path = self._mark_file()
        if path is not None:
            system, timeline = self._server
            make_directory(path.parent)
            write_atomic(path, canonical({"lsn": lsn, "system": system, "timeline": timeline}).encode())

    def _mark_file(self) -> Path | None:
        return self.context.state_dir / "slot.json" if self.context.state_dir else None

    # -- what is there -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        with (
            failures.errors(failures.NO_ANSWER),
            contextlib.closing(connections.connect(self._log.config)) as connection,
        ):
            yield connection

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        here = wal.server(connection)
        self._tables = setup.find_tables(connection, self._log.config, here.version).captured
        self._catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
        self._schemas = {
            stream: table_schema(table.columns, self._catalog, table.key) for stream, table in self._tables.items()
        }


def _place(position: str) -> tuple[int, int]:
    """`_position` as numbers: where the transaction commits, and which of its changes this is."""
    lsn, _, number = position.partition(".")
    return int(lsn, 16), int(number, 16)


def _own(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the table itself that the change says something about."""
    unchanged = row["_unchanged"] or ()
    return {name: value for name, value in row.items() if name not in _ABOUT and name not in unchanged}


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    for values in zip(*map(_values, batch.columns), strict=True):
        yield dict(zip(names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except OverflowError:  # Python's dates end with the year 9999, PostgreSQL's and Arrow's do not
        return [each if each.is_valid else None for each in column]
