"""Capture the changes of PostgreSQL tables one by one; the replication slot is the resume point."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.capture import AckSink, Change, ChangeCapture, ChangeEvent, Delete, SnapshotTable, Upsert, pause
from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import unpack_key
from penstock.connectors.postgres_capture.config import PostgresCaptureConfig
from penstock.connectors.postgres_capture.ranges import LogEnd, LogReader, SlotMark, wait_for_writers
from penstock.connectors.postgres_cdc import health
from penstock.connectors.postgres_cdc.copy import Pages, first_rows, read_part
from penstock.connectors.postgres_cdc.findings import findings
from penstock.connectors.postgres_cdc.log import snapshots
from penstock.connectors.postgres_cdc.log.lsn import place_of
from penstock.connectors.postgres_cdc.log.snapshots import Snapshot
from penstock.connectors.postgres_cdc.position import LeftOut, LogPosition
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import table_schema
from penstock.durable import Json
from penstock.errors import DataError, RetryableError
from penstock.schema import key_of
from penstock.source import ConnectorMetrics, Finding, HealthStatus, Schemas, SourceBatch, SourceContext

_ABOUT = {each.name for each in CHANGE_FIELDS}


@dataclass(frozen=True)
class _Row:
    """A change that was read and not yet handed over."""

    position: str
    table: SnapshotTable
    schema: pa.Schema
    event: ChangeEvent


class PostgresCapture(ChangeCapture[PostgresCaptureConfig]):
    """
    Every change is an event with an ack, in commit order; the slot moves past transactions that are confirmed whole.

    Supports exactly-once: changes that the slot sends again after a crash are dropped by their place in the log, and so are
    changes that the copy of a table contains. This is the plain way, for thousands of changes a second. `postgres_cdc` is
    the fast one: it copies in parallel, resumes a copy, takes transactions of any size, copies a table again after a new
    default changed its rows without a trace in the log, and knows TRUNCATE, inserts from updates, transaction numbers and
    commit times. A change that cannot be decoded stops a capture; `postgres_cdc` sets its table aside instead.
    """

    name = "postgres_capture"

    def __init__(self, config: PostgresCaptureConfig) -> None:
        super().__init__(config)
        self._log = LogReader(config)
        self._schemas: dict[str, pa.Schema] = {}
        self._copies: dict[str, Json] = {}
        self._acks = AckSink(self._moved)
        self._confirmed = 0
        self._slot_at = 0
        self._server = LogEnd(0, "", 0)
        self._mark = SlotMark(None)
        self._begun = False
        self._skipped = 0

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        self._log, self._mark = LogReader(self.config), SlotMark(context.state_dir)
        try:
            self._log.open(begun=self._mark.read() is not None)
        except BaseException:
            self._log.close()
            raise
        self._look()

    def close(self) -> None:
        with contextlib.suppress(RetryableError):  # what is not acknowledged now is confirmed again after the restart
            self._acknowledge()
        self._log.close()

    def check(self) -> Sequence[Finding]:
        begun = self._mark.read() is not None
        return self._log.session.apart(lambda connection: list(findings(connection, self.config, begun)))

    def health_check(self) -> HealthStatus:
        refused = {s: LeftOut(what=f.what, fix=f.fix) for s, f in self._log.session.tables.refused.items()}
        position = LogPosition(refused=refused) if self._begun else None
        waits_for = self._log.slot_waits_for
        return self._log.session.apart(lambda asked: health.health(asked, self.config, position, waits_for))

    def metrics(self) -> ConnectorMetrics:
        return ConnectorMetrics(custom={"truncates_skipped": self._skipped})

    lag_unit = "bytes"

    def lag(self) -> int | None:
        """Bytes of log that are not confirmed, asked over a connection of its own."""
        return self._log.session.apart(lambda connection: health.lag(connection, self.config))

    def tables(self) -> Sequence[SnapshotTable]:
        return [SnapshotTable(table.namespace, table.name) for table in self._log.tables.values()]

    def schema(self) -> Schemas:
        """Of each table as the last change showed it, else as the catalog does."""
        return dict(self._schemas)

    def sample(self, rows: int) -> Iterator[SourceBatch]:
        """The first rows of each table; needs no slot and no publication, and makes none."""
        session = self._log.session
        for table in self._log.tables.values():
            yield from first_rows(session.arrow(), table, session.catalog, rows)

    def restore(self, position: Json, copies: Mapping[str, Json]) -> None:
        self._copies = dict(copies)

    # -- the copy ------------------------------------------------------------------------------------------------

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        """All tables as of one moment; `live` leaves out the changes that this moment already shows."""
        self._begin()
        copied: dict[str, Json] = {}
        with (
            failures.errors("cannot copy the tables"),
            contextlib.closing(connections.connect(self.config)) as exporter,
            contextlib.closing(connections.connect_arrow(self.config)) as reader,
        ):
            wait_for_writers(exporter, self.config.visible_timeout_secs)
            oids = [self._log.tables[t.stream].oid for t in tables if t.stream in self._log.tables]
            snapshot = snapshots.export(exporter, oids)
            self._look()  # a column that the snapshot shows must be copied
            for table in tables:
                known = self._log.tables.get(table.stream)
                part = known and Pages(known, self._log.session.catalog, 0, None, snapshot, snapshot.lsn)
                for item in read_part(reader, part) if part else ():
                    if isinstance(item, SourceBatch):
                        copied[table.stream] = {"snapshot": snapshot.snapshot, "lsn": snapshot.lsn}
                        for values in _rows(item.records):
                            yield Change(Upsert(table, _own(values)), position=copied[table.stream])
                    elif "again" in item.value:
                        raise RetryableError(f"{table.stream} was emptied or rewritten while it was copied")
        self._copies.update(copied)

    # -- the log -------------------------------------------------------------------------------------------------

    def live(self) -> Iterator[Change | None]:
        self._acknowledge()
        at = self._begin()
        self._acks = AckSink(self._moved)  # unconfirmed changes of an earlier call come again
        while True:
            end = self._log.next_end(at)
            if end == at:
                yield from pause(self.config.poll_interval_ms / 1000)
            else:
                yield from self._changes(at, end)
                at = end
            self._acknowledge()

    def _begin(self) -> LogEnd:
        """The slot's own place; publishes and makes the slot at the first start, and never again."""
        mark = self._mark.read()
        self._log.open(begun=mark is not None)
        if mark is not None:
            try:
                self._log.session.ask(partial(self._log.verify, mark))
            except failures.SlotLost as lost:
                hint = (
                    "changes may be missing: empty the targets, remove the pipeline's state directory, and start over"
                )
                raise failures.SlotLost(lost.message, hint=hint) from lost
        begun = self._log.begin()
        self._begun = True
        self._server = begun
        self._slot_at = begun.lsn
        self._look()
        if mark is None:
            self._mark.write(begun)
        return begun

    def _changes(self, start: LogEnd, end: LogEnd) -> Iterator[Change | None]:
        """The changes of a range in commit order, each with the place that the slot may move to after it."""
        batches: dict[str, list[pa.RecordBatch]] = {}
        for stream, batch in self._log.read(start, end):
            batches.setdefault(stream, []).append(_uncopied(start, self._copies.get(stream), batch))
        merged = heapq.merge(*(self._events(s, each) for s, each in batches.items()), key=lambda row: row.position)
        row = next(merged, None)
        if row is None:
            self._acks.ack(end.lsn).confirm()  # moves the slot once everything before it is confirmed
        while row is not None:
            following = next(merged, None)
            lsn, number = place_of(row.position)
            # The slot may be moved to the start of a commit record, and still holds that transaction.
            within = following is not None and place_of(following.position)[0] == lsn
            resume = end.lsn if following is None else lsn if within else lsn + 1
            stream = row.table.stream
            if not row.schema.equals(self._schemas.get(stream, pa.schema([])), check_metadata=True):
                yield None  # the rows before it had another shape
                self._schemas[stream] = row.schema
            yield Change(row.event, self._acks.ack(resume), [lsn, number])
            row = following

    def _events(self, stream: str, batches: Sequence[pa.RecordBatch]) -> Iterator[_Row]:
        known = self._log.tables.get(stream)
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
        """Called from the journal's thread. The thread that reads the slot moves it, since only one can use it."""
        self._confirmed = max(self._confirmed, lsn)

    def _acknowledge(self) -> None:
        """Move the slot to the confirmed place; noted first, so that a slot that another reader moved is noticed."""
        confirmed = self._confirmed
        if confirmed > self._slot_at:
            self._mark.write(replace(self._server, lsn=confirmed))
            self._log.acknowledge(confirmed)
            self._slot_at = confirmed

    def _look(self) -> None:
        self._log.look()
        self._schemas = {
            stream: table_schema(table.columns, self._log.session.catalog, table.key)
            for stream, table in self._log.tables.items()
        }


def _uncopied(start: LogEnd, copy: Json, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The changes that the copy of their table does not contain."""
    if copy is None or start.lsn > copy["lsn"]:
        return batch
    txids = batch["_txid"].to_numpy(zero_copy_only=False)
    return batch.filter(pa.array(~Snapshot.parse(copy["snapshot"]).sees(txids)))


def _own(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the table itself that the change has values for."""
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
