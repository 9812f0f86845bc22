"""Plan copies: which tables and keys the next range copies, and into which splits that is cut."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import psycopg

from penstock.connectors.postgres_cdc.catalog import Table
from penstock.connectors.postgres_cdc.config import PostgresCdcConfig
from penstock.connectors.postgres_cdc.copy import Chunk, Clear, Edge, Pages, Unreadable, edges, page_runs
from penstock.connectors.postgres_cdc.log import snapshots
from penstock.connectors.postgres_cdc.log.snapshots import BLAMED_SECS, ExportedSnapshot, OpenTransaction
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgres_cdc.session import Session
from penstock.connectors.postgres_cdc.table_errors import TableError, table_errors
from penstock.connectors.postgres_cdc.tables import Copying, Following, Key, TableProgress, Waiting
from penstock.source import ReadLimit
from penstock.tables import Refused

logger = logging.getLogger(__name__)

WHOLE_ROWS = 1_000_000
"""A clearing copy of at most this many rows is one epoch, so readers never see half a table. Larger tables are seen filling
up."""

CHUNK_ROWS, MOST_CHUNK_ROWS = 1_000_000, 4_000_000
"""Rows that one task copies in one epoch, unless `seed_chunk_rows` says how many."""

COPY_SECS = 5.0
"""Epochs of copies grow while they take less: between two of them both cores are idle for a tenth of a second."""

_ENDLESS = 1 << 62
_PAGE_RUNS = 8


class CopyPlanner:
    """Plans chunks; remembers how long the last epoch of copies took, and where its chunks end."""

    def __init__(self, session: Session, config: PostgresCdcConfig) -> None:
        self._session, self._config = session, config
        self._edges: dict[tuple[Any, ...], list[Edge]] = {}
        self._rows = CHUNK_ROWS
        self._since: float | None = None
        """When the last full epoch of copies was planned."""
        self._warned = 0

    def plan(self, connection: psycopg.Connection[Any], start: LogPosition, limit: ReadLimit) -> LogPosition:
        """The position after the next chunks: as many rows as the tasks of one epoch can copy at a time."""
        rows = self._chunk_rows()
        rows = rows if limit.rows is None else max(1, min(rows, limit.rows))
        room = rows * limit.parallelism if limit.rows is None else min(rows * limit.parallelism, limit.rows)
        oldest = snapshots.snapshot(connection).xmin
        end = start
        self._edges.clear()
        for stream, progress in start.tables.items():
            table = self._session.tables.captured.get(stream)
            if table is None or not isinstance(progress, Waiting | Copying) or not _may_begin(progress, start, oldest):
                continue
            if not table.chunked:
                if end.tables == start.tables:  # by itself: one snapshot for all of it, and one epoch
                    return end.with_table(stream, progress.copied_up_to(None))
                continue
            clears = isinstance(progress, Waiting) and progress.clears
            # After a failure in one epoch in any case: if it fails again, the targets stay as they are.
            whole = min(WHOLE_ROWS, WHOLE_ROWS if progress.failure else limit.rows or WHOLE_ROWS) if clears else 0
            frontier = progress.frontier if isinstance(progress, Copying) else None
            try:
                with table_errors(table):
                    most = max(room, whole)
                    catalog = self._session.catalog
                    found = list(edges(connection, table, catalog, frontier, None, rows, most, counted=clears))
            except TableError as error:
                refused = Refused.because(stream, error)
                end = end.with_table(stream, progress.failed(refused, retried=self._config.snapshot != "never"))
                continue
            room -= sum(edge.rows for edge in found)
            self._edges[stream, table.oid, frontier, found[-1].upto] = found
            end = end.with_table(stream, progress.copied_up_to(found[-1].upto))
            if room <= 0:
                break
        self._since = time.monotonic() if room <= 0 else None
        return end

    def blocked_by(self, connection: psycopg.Connection[Any], start: LogPosition) -> OpenTransaction | None:
        """The transaction that a copy has waited for longer than is usual; it is logged once."""
        waiting = [table.until_xid for table in start.tables.values() if isinstance(table, Waiting)]
        writer = snapshots.blocking_writer(connection, max(waiting)) if waiting else None
        if writer is None or writer.seconds < BLAMED_SECS:
            return None
        if writer.xid != self._warned:
            self._warned = writer.xid
            logger.warning("copies wait for %s: %s", writer, writer.ending)
        return writer

    def _chunk_rows(self) -> int:
        """Rows of a chunk: more than the last time if the last full epoch of copies was over soon."""
        if self._config.seed_chunk_rows is not None:
            return self._config.seed_chunk_rows
        took = time.monotonic() - self._since if self._since is not None else COPY_SECS
        if took < COPY_SECS / 2:
            self._rows = min(2 * self._rows, MOST_CHUNK_ROWS)
        elif took > COPY_SECS:
            self._rows = max(self._rows // 2, CHUNK_ROWS)
        self._since = None
        return self._rows

    def splits(self, start: LogPosition, end: LogPosition) -> Sequence[Chunk | Pages | Clear | Unreadable]:
        """The parts that a range copies or clears, with the tables as they are after its snapshot was taken."""
        if clearing := [stream for stream, table in end.tables.items() if table.remains == "clearing"]:
            return [self._clear(stream, end) for stream in clearing]
        moving = _moving(start.tables, end.tables)
        known = self._session.look_since(0.0)
        if not any(stream in known for stream in moving):  # dropped in the meantime; the next range notes it
            return []
        snapshot = self._session.export_snapshot([known[stream] for stream in moving if stream in known])
        # Every column that the snapshot shows must be copied: its earlier changes are dropped.
        now = self._session.look_since(time.monotonic())
        return [
            part
            for stream, (before, after) in moving.items()
            if stream in now
            for part in self._parts(now[stream], before, after, snapshot, start.lsn)
        ]

    def _clear(self, stream: str, end: LogPosition) -> Clear | Unreadable:
        table = self._session.look_since(0.0).get(stream)
        if table is None:
            return Unreadable(Refused.because(stream, TableError(f"{stream} is not in the database any more")))
        return Clear(table, self._session.catalog.needed_by(table.columns), end.lsn, end.tables[stream].copies)

    def _parts(
        self, table: Table, before: Waiting | Copying, after: Copying | Following, snapshot: ExportedSnapshot, lsn: int
    ) -> Sequence[Chunk | Pages | Unreadable]:
        catalog = self._session.catalog.needed_by(table.columns)
        frontier = before.frontier if isinstance(before, Copying) else None
        upto = after.frontier if isinstance(after, Copying) else None

        def plan(connection: psycopg.Connection[Any]) -> Sequence[Chunk | Pages]:
            with table_errors(table):
                if not table.chunked:
                    whole = Pages(table, catalog, 0, None, snapshot, lsn, after.copies)
                    return page_runs(connection, table, whole, _PAGE_RUNS)
                ends = [edge.upto for edge in self._ends(connection, table, frontier, upto)]
                return [
                    Chunk(table, catalog, a, b, snapshot, lsn, after.copies) for a, b in pairwise([frontier, *ends])
                ]

        try:
            parts = list(self._session.ask(plan))
        except TableError as error:
            return [Unreadable(Refused.because(table.stream, error))]
        if isinstance(before, Waiting) and before.clears:
            parts[0] = replace(parts[0], clears=True)
        return parts

    def _ends(
        self, connection: psycopg.Connection[Any], table: Table, after: Key | None, upto: Key | None
    ) -> Sequence[Edge]:
        """The ends of the chunks as they were planned; found again after a restart."""
        planned = self._edges.get((table.stream, table.oid, after, upto))
        rows = self._config.seed_chunk_rows or CHUNK_ROWS
        return planned or list(edges(connection, table, self._session.catalog, after, upto, rows, _ENDLESS))


def _may_begin(progress: Waiting | Copying, start: LogPosition, oldest: int) -> bool:
    """True unless a table waits for transactions to end, or for the log to be read."""
    if isinstance(progress, Waiting):
        return progress.until_xid <= oldest and progress.from_lsn <= start.lsn
    return True


def _moving(
    before: Mapping[str, TableProgress], after: Mapping[str, TableProgress]
) -> dict[str, tuple[Waiting | Copying, Copying | Following]]:
    """The tables of which rows are copied between two positions, with both states."""
    found: dict[str, tuple[Waiting | Copying, Copying | Following]] = {}
    for stream, now in after.items():
        was = before.get(stream)
        if not isinstance(now, Copying | Following):
            continue
        if was is None or was.copies != now.copies:
            was = now.become(Waiting) if was is not None or now.copies else None
        if isinstance(was, Waiting) or (isinstance(was, Copying) and _moved(was, now)):
            found[stream] = was, now
    return found


def _moved(was: Copying, now: Copying | Following) -> bool:
    return isinstance(now, Following) or was.frontier != now.frontier
