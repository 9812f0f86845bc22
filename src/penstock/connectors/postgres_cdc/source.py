"""Mirror PostgreSQL tables: copy them in chunks, and follow the write-ahead log in ranges of it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeVar

import psycopg
import pyarrow as pa

from penstock import durable
from penstock.connectors.postgres_cdc import seed, setup, tree, wal
from penstock.connectors.postgres_cdc.config import PostgresCdcConfig
from penstock.connectors.postgres_cdc.decode import Decoder, Rows
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgres_cdc.seed import (
    Chunk,
    Edge,
    Pages,
    Progress,
    Rule,
    Rules,
    TableError,
    Unreadable,
)
from penstock.connectors.postgres_cdc.setup import Table, Tables
from penstock.connectors.postgres_cdc.steps import Ahead, messages
from penstock.connectors.postgres_cdc.tree import Log, Part, Seen, Tree
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import TypeCatalog
from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError, DataError, FatalError, RangeGone, RetryableError, SchemaError
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
from penstock.tables import Request, Requests, TableSource, TableState

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ENDLESS = 1 << 62

PROBED_BYTES = 16 << 20
"""As long as the server decodes no more than this, a range is looked through for changes before it is made an epoch of."""

LOOKED_SECS = 10.0
"""How often the catalog is looked through for tables that are new, and for partitions that came or went."""

WHOLE_ROWS = 1_000_000
"""Up to so many rows a copy that clears the target is one epoch, so that nobody sees half a table; a larger one is seen so."""

CHUNK_ROWS, MOST_CHUNK_ROWS = 1_000_000, 4_000_000
"""Rows that one task copies in one epoch, where nobody says how many."""

COPY_SECS = 5.0
"""Epochs of copies grow as long as they take less: between two of them both cores stand still for a tenth of a second."""

QUIET_FACTOR = 8
"""So much more log goes into a range behind one without changes: a huge transaction is not decoded again and again."""


@dataclass(frozen=True)
class LogRange:
    """The split of a range of log: it is decoded by one task."""

    start: LogPosition
    end: int


Why = Literal["", "changed", "resync"]
"""Why a table is copied: it changed without a trace in the log, or somebody asked for it."""

Split = LogRange | Chunk | Pages | Unreadable


class PostgresCdc(TableSource[PostgresCdcConfig, LogPosition]):
    """
    A range is a stretch of the log (one split, in commit order) or chunks of tables (one split each).

    Supports exactly-once: the slot holds the log until it is acknowledged, and a change that a chunk contains is dropped.

    Each table has a state of its own: `penstock tables` pauses, resumes, skips and copies single tables again while the
    others stream. A table that fails (no permission, no replica identity, a value or a column that cannot be taken) is
    set aside with its error, and copied again by itself after 10 s, then after twice as long each time, up to 10 min.
    One that was left out of its publication, or whose publication was altered or made again, has lost changes: within
    10 s, or at the next start, it is published and copied anew.
    """

    name = "postgres_cdc"

    def __init__(self, config: PostgresCdcConfig) -> None:
        super().__init__(config)
        self._connection: psycopg.Connection[Any] | None = None
        self._exporter: psycopg.Connection[Any] | None = None
        self._arrow: Any = None
        self._edges: dict[tuple[Any, ...], list[Edge]] = {}
        self._pace: tuple[int, float | None] = (CHUNK_ROWS, None)
        self._tables: Tables | None = None
        self._looked = 0.0
        self._names: dict[int, str] = {}
        self._published_truncates = False
        self._catalog: TypeCatalog | None = None
        self._planned: tuple[tuple[LogPosition, ReadLimit], LogPosition] | None = None
        self._since = (0, 0.0)
        self._probed = (0, 0)
        self._began: LogPosition | None = None
        self._run = ""
        self._at: LogPosition | None = None

    # -- open and close ------------------------------------------------------------------------------------------

    def open(self, context: SourceContext = SourceContext()) -> None:
        """Connect and see that this server can be captured from; makes nothing."""
        self.close()
        super().open(context)
        try:
            self._ask(self._verify_server)
        except BaseException:
            self.close()
            raise
        self._run = f"{time.time_ns():x}"

    def close(self) -> None:
        if self._connection is not None and self.context.in_task:
            connections.hand_on(self.config, self._connection, self._arrow)
            self._connection = self._arrow = None
        for connection in (self._connection, self._exporter, self._arrow):
            if connection is not None:
                connection.close()
        self.__dict__.update(type(self)(self.config).__dict__)

    def _verify_server(self, connection: psycopg.Connection[Any]) -> None:
        here = wal.server(connection)
        if here.version < wal.OLDEST:
            raise ConfigError(
                f"PostgreSQL {here.version // 10000} is too old",
                code="PEN-1016",
                hint=f"{wal.OLDEST // 10000} is the oldest that works",
            )
        if not here.flushed:
            hint = "point `dsn` at the primary"
            raise ConfigError("the server is a standby", code="PEN-1016", hint=hint)
        if here.wal_level != "logical":
            raise ConfigError(
                f"wal_level is {here.wal_level}, and the log does not hold what is needed",
                code="PEN-1016",
                hint="ALTER SYSTEM SET wal_level = 'logical', and restart the server",
            )
        found = wal.slot(connection, self.config.slot)
        if found is None and not self.config.manage:
            raise ConfigError(
                f"the replication slot {self.config.slot!r} is not there, and manage = false",
                code="PEN-1016",
                hint=f"SELECT pg_create_logical_replication_slot({connections.literal(self.config.slot)}, '{wal.PLUGIN}')",
            )
        if found is not None and found.wal_status != "lost":
            wal.verify_slot(found, self.config.slot, here)
        # Of a capture that has begun, every table may be gone for now.
        self._look(connection, here, required=found is None and not self._made_here)

    def _ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Put a question over the driver's connection, which is made again after it broke."""
        with failures.errors(failures.NO_ANSWER):
            if self._connection is None or self._connection.closed:
                self._connection = (
                    connections.take(self.config) if self.context.in_task else connections.connect(self.config)
                )
                # Nobody's lock on one table keeps the others waiting for long.
                self._connection.execute(f"SET lock_timeout = '{seed.LOCK_SECS}s'")
            return question(self._connection)

    def _apart(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Put a question over a connection of its own, since another thread asks."""
        with failures.errors(failures.NO_ANSWER), contextlib.closing(connections.connect(self.config)) as connection:
            return question(connection)

    # -- what is there -------------------------------------------------------------------------------------------

    def _look(self, connection: psycopg.Connection[Any], here: wal.Server, required: bool = False) -> Tables:
        self._tables = setup.find_tables(connection, self.config, here.version, required=required)
        self._catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
        self._looked = time.monotonic()
        return self._tables

    def _look_at_publications(self, connection: psycopg.Connection[Any]) -> Mapping[str, Table]:
        """The tables with the marks of how they are published now."""
        assert self._tables is not None
        held = setup.find_publications(connection, setup.publications(self.config))
        captured = {s: setup.marked(table, self.config, held) for s, table in self._tables.captured.items()}
        self._tables = replace(self._tables, captured=captured)
        return captured

    def _known(self) -> tuple[Mapping[str, Table], TypeCatalog]:
        if self._tables is None or self._catalog is None:
            self._ask(lambda connection: self._look(connection, wal.server(connection)))
        assert self._tables is not None
        assert self._catalog is not None
        return self._tables.captured, self._catalog

    def schema(self) -> Schemas:
        self._ask(lambda connection: self._look(connection, wal.server(connection)))
        tables, catalog = self._known()
        # Nobody need follow the columns of a table that is set aside.
        planned = self._planned[1].tables if self._planned else {}
        aside = {stream for stream, progress in planned.items() if not progress.captured}
        return {stream: table.schema(catalog) for stream, table in tables.items() if stream not in aside}

    def provide_schema(self) -> dict[str, Any]:
        return dict(self.schema())

    def is_authoritative(self) -> bool:
        return True

    def check(self) -> Sequence[Finding]:
        return self._ask(lambda connection: list(setup.findings(connection, self.config)))

    def lag(self) -> int | None:
        """Bytes of log that the slot has not let go of as read."""

        def behind(connection: psycopg.Connection[Any]) -> int | None:
            found = wal.slot(connection, self.config.slot)
            return None if found is None else max(0, wal.server(connection).flushed - found.confirmed)

        return self._apart(behind)

    def health_check(self) -> HealthStatus:
        return self._apart(self._health)

    def _health(self, connection: psycopg.Connection[Any]) -> HealthStatus:
        found = wal.slot(connection, self.config.slot)
        if found is None:
            return HealthStatus.degraded(f"the replication slot {self.config.slot!r} is not there")
        told = f"slot {self.config.slot}: {found.wal_status}" + (
            f", safe for {found.safe_wal_size} bytes" if found.safe_wal_size is not None else ""
        )
        told += f", read by pid {found.active_pid}" if found.active_pid else ""
        told += (
            "" if wal.has_free_slot(connection) else ", no free slot to read ahead with: raise max_replication_slots"
        )
        if found.wal_status == "lost":
            return HealthStatus.unhealthy(told)
        if found.wal_status != "reserved":
            return HealthStatus.degraded(told)
        holder = wal.oldest_writer(connection)
        held = wal.server(connection).flushed - found.restart
        if holder is not None and held > self.config.max_wal_bytes:
            pid, seconds = holder
            return HealthStatus.degraded(
                f"{told}; every epoch decodes {held} bytes again: pid {pid} has had a transaction open for {seconds} s"
            )
        known = self._at.tables if self._at else {}
        failed = [f"{s}: {p.failure.code} {p.failure.message}" for s, p in known.items() if p.failure]
        if failed:
            return HealthStatus.degraded(f"failed: {'; '.join(failed)}")
        refused = self._tables.refused if self._tables else {}
        if refused:
            return HealthStatus.degraded(f"left out: {'; '.join(f'{s}: {why}' for s, why in refused.items())}")
        return HealthStatus(HealthStatus.healthy().state, told)

    def metrics(self) -> ConnectorMetrics:
        counts: dict[str, float] = {f"tables_{state}": 0.0 for state in dict.fromkeys(_STATES.values())}
        for progress in self._at.tables.values() if self._at else ():
            counts[f"tables_{_STATES[progress.state]}"] += 1
        return ConnectorMetrics(custom=counts)

    def tables(self, position: LogPosition) -> Mapping[str, TableState]:
        return {
            stream: TableState(
                _STATES[progress.state],
                copy=max(0, progress.copies - (progress.state == "waiting")),
                complete=progress.state == "seeded" and self.config.snapshot != "never",
                refreshes=progress.refresh,
                rows=progress.rows,
                estimate=progress.estimate,
                **(progress.failure.model_dump(exclude={"message"}) if progress.failure else {}),
                error=progress.failure.message if progress.failure else "",
            )
            for stream, progress in sorted(position.tables.items())
        }

    # -- planning ------------------------------------------------------------------------------------------------

    def initial(self) -> LogPosition:
        """The slot's own place, with nothing copied; publishes and makes the slot first if they are not there."""
        if self._began is None:
            self._began = self._ask(self._begin)
        return self._began

    def _begin(self, connection: psycopg.Connection[Any]) -> LogPosition:
        here = wal.server(connection)
        tables = self._look(connection, here, required=True)
        if not self.config.manage:
            setup.publish(connection, self.config, tables, here.version)
        aside, published = self._published(connection, LogPosition(), tables.captured, here)
        if aside.tables and not published:
            failure = next(iter(aside.tables.values())).failure
            assert failure is not None
            raise ConfigError(f"no table can be published: {failure.message}", code="PEN-1016", hint=failure.hint)
        found, kept = wal.slot(connection, self.config.slot), not self._made_here
        if found is None and self.config.manage:
            self._remember_making()
            found, kept = wal.make_slot(connection, self.config.slot), False
        found = wal.verify_slot(found, self.config.slot, here)
        place = {"lsn": found.confirmed, "system": here.system, "timeline": here.timeline, "run": self._run}
        start = aside.model_copy(update=place)
        # A slot that is older than this state has kept every published change since the targets were filled.
        kept = kept and self.config.snapshot in ("initial", "when_needed")
        unbroken = {stream for stream, table in tables.captured.items() if kept and table.published}
        full = {
            stream
            for stream in published
            if stream in unbroken and (held := self.context.copies_of(stream)) and all(held)
        }
        start = self._following(start, {stream: published[stream] for stream in full})
        return self._copying(connection, start, {s: t for s, t in published.items() if s not in full})

    @property
    def _made_here(self) -> bool:
        return self.context.state_dir is not None and (self.context.state_dir / "slot").exists()

    def _remember_making(self) -> None:
        """Before a slot is made: it begins now, so whatever the targets hold is not what it leads on from."""
        if self.context.state_dir is not None:
            durable.make_directory(self.context.state_dir)
            durable.write_atomic(self.context.state_dir / "slot", self.config.slot.encode())

    def _following(self, start: LogPosition, tables: Mapping[str, Table]) -> LogPosition:
        """The position with these tables followed from here on, without a copy."""
        new = {
            stream: Progress(
                oid=table.oid,
                state="seeded",
                shape=table.shape,
                key=table.key,
                published=table.published,
                copies=start.tables[stream].copies if stream in start.tables else 0,
            )
            for stream, table in tables.items()
        }
        return start.model_copy(update={"tables": {**start.tables, **new}})

    def _copying(
        self, connection: psycopg.Connection[Any], start: LogPosition, tables: Mapping[str, Table], why: Why = ""
    ) -> LogPosition:
        """The position with these tables to be copied: after ALTER PUBLICATION, and after the slot was made."""
        if not tables:
            return start
        if self.config.snapshot == "never" and why != "resync":
            return self._following(start, tables)
        # Whoever writes now may have begun before the table was published: its changes come neither by the log
        # nor, until it has ended, by a copy.
        until, end_of_log = wal.snapshot(connection).xmax, wal.inserted(connection)
        trees = self._trees(connection, tables)
        new = {}
        behind = {each.stream for each in start.copied}
        for stream, table in tables.items():
            before = start.tables.get(stream)
            refresh = why == "changed" and before is not None and _unbroken(table, before, stream in behind)
            copies = max(before.copies, 1) + 1 if before else 1 + any(self.context.copies_of(stream))
            new[stream] = Progress(
                oid=table.oid,
                state="waiting",
                until_xid=until,
                shape=table.shape,
                key=table.key,
                published=table.published,
                copies=copies,
                refresh=refresh,
                from_lsn=end_of_log if refresh else 0,
                estimate=table.estimate,
                failure=before.failure if before else None,
                # Rows that stay in the target are those of the partitions of before.
                tree=before.tree if before and refresh else trees[stream].tree() if stream in trees else None,
            )
        copied = tuple(each for each in start.copied if each.stream not in new)
        return start.model_copy(update={"tables": {**start.tables, **new}, "copied": copied})

    def latest(self, start: LogPosition, limit: ReadLimit) -> LogPosition:
        self._let_go()  # the epoch that read under its snapshot is over
        self._at = start
        asked = (start, limit)
        planned = self._planned[1] if self._planned is not None and self._planned[0] == asked else None
        try:
            if planned is not None and self._is_readable(start, planned):
                return planned
            end = self._ask(lambda connection: self._next(connection, start, limit))
        except failures.PublicationLost:
            if self.config.snapshot == "never":
                raise
            end = self._ask(lambda connection: self._pass_over(connection, start))
        if end == start:
            return start
        end = self._bounded(end, limit)
        self._planned = (asked, end)
        return end

    def _is_readable(self, start: LogPosition, planned: LogPosition) -> bool:
        """Of a range that is asked for again, since its epoch was given up: True if the slot still holds it."""
        if planned.slots != start.slots or planned.lsn <= start.lsn:
            return True
        names = setup.publications(self.config)
        try:
            self._ask(lambda connection: wal.verify_decoded(connection, self.config.slot, names, planned.lsn))
            self._ask(lambda connection: self._verify(connection, wal.server(connection), start))
        except (failures.SlotLost, ConfigError):
            return False
        return True

    def _next(self, connection: psycopg.Connection[Any], start: LogPosition, limit: ReadLimit) -> LogPosition:
        here = wal.server(connection)
        try:
            found = self._verify(connection, here, start)
        except failures.SlotLost:
            if not self._may_begin_again:
                raise
            return self._begin_again(connection, start, here)
        if self._since[0] != start.lsn:
            self._since = (start.lsn, time.monotonic())
        looked = self._looked
        end = self._with_new_tables(connection, self._with_requests(connection, start, here), here)
        waits_for_log = any(each.state == "waiting" and each.from_lsn > start.lsn for each in end.tables.values())
        if here.torn and here.flushed > start.lsn and self._probed != (start.lsn, here.flushed):
            wal.mend(connection)
        if end.copying and (
            end.turn == "copy"
            or here.flushed <= start.lsn
            or not (
                waits_for_log
                or here.flushed - found.restart > PROBED_BYTES
                or self._has_news(connection, start, found, here.flushed)
            )
        ):
            planned = self._copy(connection, end, limit)
            if planned.tables != end.tables:
                return planned.model_copy(update={"turn": "log"})
        upto = self._log_end(connection, start, here, found, limit, waits_for_log)
        if upto > start.lsn or self._looked != looked:
            end = self._with_partitions(connection, start, end, here, upto)
        return end.model_copy(update={"lsn": upto, "turn": "copy"}) if upto > start.lsn or end != start else start

    def _verify(self, connection: psycopg.Connection[Any], here: wal.Server, start: LogPosition) -> wal.Slot:
        found = wal.verify_slot(wal.slot(connection, self.config.slot), self.config.slot, here)
        wal.verify_range(found, self.config.slot, here, start.lsn, start.system, start.timeline)
        return found

    @property
    def _may_begin_again(self) -> bool:
        return self.config.snapshot in ("when_needed", "always") and self.config.manage

    def _begin_again(self, connection: psycopg.Connection[Any], start: LogPosition, here: wal.Server) -> LogPosition:
        """The slot is lost: make it anew, and copy every table again."""
        if wal.slot(connection, self.config.slot) is not None:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [self.config.slot])
        start, published = self._published(
            connection, start, _not_left_out(start, self._look(connection, here).captured), here
        )
        made = wal.make_slot(connection, self.config.slot)
        fresh = start.model_copy(
            update={
                "lsn": made.confirmed,
                "timeline": here.timeline,
                "run": self._run,
                "copied": (),
                "turn": "copy",
                "settled": made.confirmed,
                "slots": start.slots + 1,
            }
        )
        return self._copying(connection, fresh, published)

    def _pass_over(self, connection: psycopg.Connection[Any], start: LogPosition) -> LogPosition:
        """The log holds changes from while a publication was not there, which servers before 18 do not decode: leave it."""
        here = wal.server(connection)
        known, looked = start.tables, self._look(connection, here).captured
        tables = {s: t for s, t in looked.items() if _is_new(t, known.get(s)) or known[s].captured}
        start, published = self._published(connection, start, tables, here)
        upto = wal.server(connection).flushed
        passed = {"lsn": upto, "copied": (), "turn": "copy", "settled": upto, "slots": start.slots + 1}
        if published:
            logger.warning(
                "log from while there was no publication cannot be read: %s: copied anew", ", ".join(published)
            )
        return self._copying(connection, start.model_copy(update=passed), published)

    def _with_requests(self, connection: psycopg.Connection[Any], start: LogPosition, here: wal.Server) -> LogPosition:
        """Apply what was asked for; a request's file goes once a durable position names it."""
        requests = Requests(self.context.state_dir)
        pending = requests.pending()
        requests.done(each.name for each in pending if each.name in start.applied)
        new = [each for each in pending if each.name not in start.applied]
        if not new:
            return start
        captured, end = self._look(connection, here).captured, start
        for request in new:
            end = self._apply(connection, end, request, captured, here)
        return end.model_copy(update={"applied": tuple(each.name for each in new)})

    def _apply(
        self,
        connection: psycopg.Connection[Any],
        start: LogPosition,
        request: Request,
        captured: Mapping[str, Table],
        here: wal.Server,
    ) -> LogPosition:
        tables = dict(start.tables)
        again = {}
        for stream in request.streams:
            progress = tables.get(stream)
            if progress is None:
                continue
            if request.verb == "pause" and progress.state not in ("skipped", "gone"):
                tables[stream] = progress.ended("paused")
            elif request.verb == "skip":
                tables[stream] = progress.ended("skipped")
            elif request.verb == "resync" or (request.verb == "resume" and progress.state in ("paused", "failed")):
                if stream in captured:
                    again[stream] = captured[stream]
                elif progress.state in ("paused", "skipped"):
                    tables[stream] = progress.ended("gone")
        copied = tuple(each for each in start.copied if tables[each.stream].captured)
        start = start.model_copy(update={"tables": tables, "copied": copied})
        return self._publishing(connection, start, again, here, "resync" if request.verb == "resync" else "")

    def _with_new_tables(
        self, connection: psycopg.Connection[Any], start: LogPosition, here: wal.Server
    ) -> LogPosition:
        if self.config.snapshot == "always" and start.run != self._run:
            known = _not_left_out(start, self._look(connection, here).captured)
            return self._publishing(connection, start, known, here).model_copy(
                update={"run": self._run, "turn": "copy"}
            )
        if self._tables is None or time.monotonic() - self._looked > LOOKED_SECS:
            self._look(connection, here)
        assert self._tables is not None
        captured, kept = self._tables.captured, dict(start.tables)
        busy = {each.stream for each in start.copied}
        for stream, progress in start.tables.items():
            table = captured.get(stream)
            if table is None and (progress.captured or progress.state == "failed"):
                kept[stream] = self._not_there(stream, progress)
            elif table is None or not progress.captured:
                continue
            elif progress.state == "seeded" and progress.failure and stream not in busy:
                kept[stream] = progress.model_copy(update={"failure": None})
            elif progress.shape and not table.differs(progress.shape):
                kept[stream] = progress.model_copy(update={"shape": table.shape_after(progress.shape)})
            if table is not None and not progress.published:  # its state is from before there were marks
                kept[stream] = kept[stream].model_copy(update={"published": table.published})
        copied = tuple(each for each in start.copied if kept[each.stream].captured)
        start = start if kept == start.tables else start.model_copy(update={"tables": kept, "copied": copied})
        new = {s: t for s, t in captured.items() if _is_new(t, kept.get(s))}
        for stream in [s for s in new if (before := kept.get(s)) and before.captured and _lost(new[s], before)]:
            what = f"{stream} was left out of its publication, or that was altered: changes may be missing"
            if self.config.snapshot == "never":
                hint = f"`penstock tables FILE resync {stream}` copies it, `resume` goes on without them"
                start = self._set_aside(start, new.pop(stream), TableError(what, hint=hint))
            else:
                logger.warning("%s: it is copied anew", what)
        return self._publishing(connection, start, new, here, "changed")

    def _trees(self, connection: psycopg.Connection[Any], tables: Mapping[str, Table]) -> dict[str, Seen]:
        """The partitions of those that have some."""
        roots = {stream: table.oid for stream, table in tables.items() if table.partitioned}
        seen = tree.look(connection, setup.truncates(self.config), list(roots.values())) if roots else {}
        self._names.update((part.oid, part.name) for each in seen.values() for part in each.parts)
        return {stream: seen[oid] for stream, oid in roots.items()}

    def _with_partitions(
        self, connection: psycopg.Connection[Any], start: LogPosition, end: LogPosition, here: wal.Server, upto: int
    ) -> LogPosition:
        """
        Copy roots whose partitions came, went or were emptied as a whole, which their log does not say.

        Called for every range that moves over the log, after the log's end was asked for: so the slot still holds every
        truncate that the tree of `start` does not show yet, and the one that this range passes shows by a file or a lock.
        """
        assert self._tables is not None
        roots = {
            stream: table
            for stream, table in self._tables.captured.items()
            if table.partitioned and (known := end.tables.get(stream)) and known.captured and known.oid == table.oid
        }
        if not self._published_truncates:  # they may be from before there was such a publication
            setup.publish_truncates(connection, self.config, Tables(roots))
            self._published_truncates = True
        # A range that is cut shows its own truncates; a file that it does not explain is asked about again with the next.
        cut = start.lsn < upto < here.flushed
        log = Log(
            connection,
            self.config.slot,
            setup.truncates(self.config),
            setup.publications(self.config),
            start.lsn,
            upto if cut else None,
        )
        for stream, seen in self._trees(connection, roots).items():
            progress = end.tables[stream]
            why, now = None, seen.tree(progress.tree, log=log)
            # Before its first rows, or those that clear the target, nothing counts.
            if progress.tree is not None and (progress.state != "waiting" or progress.refresh):
                why, now = self._lost(connection, roots[stream], progress.tree, seen, log)
            if why is not None:
                end = self._copying(connection, end, {stream: roots[stream]}, why)
            progress = end.tables[stream].model_copy(update={"tree": now})
            end = end.model_copy(update={"tables": {**end.tables, stream: progress}})
        return end

    def _lost(
        self, connection: psycopg.Connection[Any], root: Table, before: Tree, seen: Seen, log: Log
    ) -> tuple[Why | None, Tree]:
        """Why a root must be copied again, if it must, and its tree; what happened is told."""
        found = tree.difference(before, seen)
        known = 0 != before.published == seen.published
        # A truncate that is not visible yet has its lock; one of the transaction that made the partition keeps the file.
        emptied = log.truncated(root.oid, found.moved, seen.locked | found.new) if known else {*found.moved}
        unsure = {oid: file for oid, file in found.moved.items() if log.end is not None and oid not in emptied}
        removes = self.config.detached_rows == "remove"
        gone, back = (found.gone, [part.oid for part in found.back]) if removes else ([], [])
        came = found.attached if removes else [*found.attached, *found.back]
        filled = [part.oid for part in came if self._holds_rows(connection, root, part, seen)]
        happened = {
            "detached or dropped": gone,
            "detached and attached again": back,
            "truncated" if known else "truncated, or rewritten": emptied,
            "attached with rows": filled,
        }
        why: Why | None = "" if gone or back or emptied else "changed" if filled else None
        if why is not None:
            done = "the target stays as it is" if self.config.snapshot == "never" else "it is copied anew"
            if gone and self.config.snapshot != "never":
                done += ' (detached_rows = "keep" leaves such rows in the target)'
            told = [tree.named(map(self._name, oids), what) for what, oids in happened.items() if oids]
            logger.warning("%s: %s, which its log does not hold: %s", root.stream, "; ".join(told), done)
        return why, seen.tree(before, unsure, log)

    def _name(self, oid: int) -> str:
        return self._names.get(oid, f"with the oid {oid}")

    def _holds_rows(self, connection: psycopg.Connection[Any], root: Table, part: Part, seen: Seen) -> bool:
        """True also if nobody can tell: a copy says what is wrong, and waits for no lock while the others stand still."""
        if part.oid in seen.locked:
            return True
        with contextlib.suppress(TableError), seed.table_errors(root):
            row = connection.execute(f"SELECT EXISTS (SELECT FROM ONLY {part.name})").fetchone()
            return bool(row and row[0])
        return True

    def _not_there(self, stream: str, progress: Progress) -> Progress:
        """A table that is captured no more: it was dropped, or it cannot be and says why."""
        assert self._tables is not None
        why = self._tables.refused.get(stream)
        if why is None:
            return progress.ended("gone")
        if progress.state == "failed":
            return progress
        what, _, fix = why.partition(" (")
        error = ConfigError(f"{stream}: {what}", code="PEN-1016", hint=fix.removesuffix(")"))
        return progress.failed(seed.failed(stream, error)["failed"])

    def _publishing(
        self,
        connection: psycopg.Connection[Any],
        start: LogPosition,
        tables: Mapping[str, Table],
        here: wal.Server,
        why: Why = "",
    ) -> LogPosition:
        return self._copying(connection, *self._published(connection, start, tables, here), why)

    def _published(
        self, connection: psycopg.Connection[Any], start: LogPosition, tables: Mapping[str, Table], here: wal.Server
    ) -> tuple[LogPosition, dict[str, Table]]:
        """Publish tables; one that may not be published is set aside, and the others are given back as they are now."""
        lacking = {stream: table for stream, table in tables.items() if not table.published}
        setup.publish_truncates(connection, self.config, Tables({s: t for s, t in tables.items() if t.published}))
        now: Mapping[str, Table] = {}
        if len(lacking) > 1 and self.config.manage:  # all at once, if nothing is wrong with any of them
            with contextlib.suppress(ConfigError, TableError):
                self._publish(connection, lacking, here)
            now = self._look_at_publications(connection)
            lacking = {stream: table for stream, table in lacking.items() if not now[stream].published}
        failed: dict[str, ConnectorError] = {}
        for stream, table in lacking.items():
            try:
                self._publish(connection, {stream: table}, here)
            except (ConfigError, TableError) as error:
                failed[stream] = error
        now = self._look_at_publications(connection) if lacking else now
        published = {stream: now.get(stream, table) for stream, table in tables.items() if stream not in failed}
        for stream, table in published.items():
            if not table.published:
                failed[stream] = TableError(f"{stream} was taken out of its publication at once")
        for stream, why in failed.items():
            start = self._set_aside(start, tables[stream], why)
        return start, {stream: table for stream, table in published.items() if stream not in failed}

    def _publish(self, connection: psycopg.Connection[Any], tables: Mapping[str, Table], here: wal.Server) -> None:
        first = next(iter(tables.values()))
        with failures.errors(f"cannot publish {first.stream}"), seed.table_errors(first, "publish"):
            setup.publish(connection, self.config, Tables(tables), here.version)

    def _set_aside(self, start: LogPosition, table: Table, error: ConnectorError) -> LogPosition:
        progress = start.tables.get(table.stream) or Progress(oid=table.oid, state="waiting", copies=0)
        what = seed.failed(table.stream, error)["failed"]
        failed = progress.failed(what, retried=self.config.snapshot != "never")
        copied = tuple(each for each in start.copied if each.stream != table.stream)
        return start.model_copy(update={"tables": {**start.tables, table.stream: failed}, "copied": copied})

    def _log_end(
        self,
        connection: psycopg.Connection[Any],
        start: LogPosition,
        here: wal.Server,
        found: wal.Slot,
        limit: ReadLimit,
        forced: bool,
    ) -> int:
        """How far the next range of log goes; not at all while it holds no changes and none is due."""
        most = self.config.max_wal_bytes * (QUIET_FACTOR if start.quiet else 1)
        end = here.flushed if limit.rows is None else min(here.flushed, start.lsn + most)
        if end <= start.lsn:
            return start.lsn
        # Behind the last chunk, too: until the log has passed it, a table that is altered would be begun anew.
        forced = forced or (start.copying and start.turn == "log") or bool(start.copied) or end < here.flushed
        if forced or (end - found.restart > PROBED_BYTES and not start.quiet):
            return end
        return end if self._has_news(connection, start, found, end) else start.lsn

    def _has_news(self, connection: psycopg.Connection[Any], start: LogPosition, found: wal.Slot, end: int) -> bool:
        """True if the log up to `end` holds changes, or the slot has stood still for long enough."""
        if time.monotonic() - self._since[1] >= self.config.heartbeat_secs:
            return True
        if self._probed != (start.lsn, end):
            publications = setup.publications(self.config)
            if wal.has_changes(connection, self.config.slot, publications, found.confirmed, start.lsn, end):
                return True
            self._probed = (start.lsn, end)
        return False

    def _copy(self, connection: psycopg.Connection[Any], start: LogPosition, limit: ReadLimit) -> LogPosition:
        """The position behind the next chunks: as many rows as the tasks of one epoch can copy at a time."""
        known, catalog = self._known()
        rows = self._chunk_rows()
        rows = rows if limit.rows is None else max(1, min(rows, limit.rows))
        room = rows * limit.parallelism if limit.rows is None else min(rows * limit.parallelism, limit.rows)
        oldest = wal.snapshot(connection).xmin
        end = start
        self._edges.clear()
        for stream, progress in start.tables.items():
            table = known.get(stream)
            if progress.state not in ("waiting", "seeding") or table is None or progress.until_xid > oldest:
                continue
            if progress.state == "waiting" and progress.from_lsn > start.lsn:
                continue
            if not table.chunked:
                if end.tables == start.tables:  # by itself: one snapshot for all of it, and one epoch
                    done = progress.model_copy(update={"state": "seeded", "until_xid": 0})
                    return end.model_copy(update={"tables": {**end.tables, stream: done}})
                continue
            whole = min(WHOLE_ROWS, limit.rows or WHOLE_ROWS) if progress.clears else 0
            try:
                with seed.table_errors(table):
                    most = max(room, whole)
                    found = list(
                        seed.edges(
                            connection, table, catalog, progress.frontier, None, rows, most, counted=progress.clears
                        )
                    )
            except TableError as error:
                end = self._set_aside(end, table, error)
                continue
            room -= sum(edge.rows for edge in found)
            upto = found[-1].upto
            self._edges[stream, table.oid, progress.frontier, upto] = found
            moved = {"state": "seeding" if upto else "seeded", "until_xid": 0, "frontier": upto}
            end = end.model_copy(update={"tables": {**end.tables, stream: progress.model_copy(update=moved)}})
            if room <= 0:
                break
        self._pace = (self._pace[0], time.monotonic() if room <= 0 else None)
        return end

    def _chunk_rows(self) -> int:
        """Rows of a chunk: more than the last time if the epoch full of them that was planned then was over soon."""
        if self.config.seed_chunk_rows is not None:
            return self.config.seed_chunk_rows
        rows, since = self._pace
        took = time.monotonic() - since if since is not None else COPY_SECS
        if took < COPY_SECS / 2:
            rows = min(2 * rows, MOST_CHUNK_ROWS)
        elif took > COPY_SECS:
            rows = max(rows // 2, CHUNK_ROWS)
        self._pace = (rows, None)
        return rows

    def _bounded(self, end: LogPosition, limit: ReadLimit) -> LogPosition:
        """
        While tables are copied there is no end; afterwards the log is read at least as far as the copies reach into it.

        Never before where the range starts, nor before the slot, if `until` is of one that was lost: `settled` is not.
        """
        if not isinstance(limit.until, LogPosition) or end.copying:
            return end
        return end.model_copy(update={"lsn": min(end.lsn, max(limit.until.lsn, end.settled))})

    # -- reading -------------------------------------------------------------------------------------------------

    def split(self, start: LogPosition, end: LogPosition) -> Sequence[Split]:
        if end.slots != start.slots:
            return []
        if end.lsn > start.lsn:
            return [LogRange(start, end.lsn)]
        moving: dict[str, tuple[Progress, Progress]] = {}
        for stream, progress in end.tables.items():
            before = start.tables.get(stream) or Progress(oid=progress.oid, state="gone", copies=0)
            if before.copies != progress.copies:
                before = progress.model_copy(update={"state": "waiting", "frontier": None})
            moved = (before.state, before.frontier) != (progress.state, progress.frontier)
            if moved and before.state in ("waiting", "seeding") and progress.state in ("seeding", "seeded"):
                moving[stream] = before, progress
        if not moving:
            return []
        known, _ = self._known()  # without one that was dropped; the next range says so
        tables = {stream: known[stream] for stream in moving if stream in known}
        held = self._hold(list(tables.values()))
        return [
            part for stream, table in tables.items() for part in self._parts(table, *moving[stream], held, start.lsn)
        ]

    def _parts(self, table: Table, before: Progress, after: Progress, held: wal.Held, lsn: int) -> Sequence[Split]:
        _, catalog = self._known()
        stream = table.stream
        rows = self.config.seed_chunk_rows or CHUNK_ROWS

        def plan(connection: psycopg.Connection[Any]) -> Sequence[Chunk | Pages]:
            with seed.table_errors(table):
                if not table.chunked:
                    return seed.page_runs(connection, table, Pages(stream, 0, None, held, lsn, after.copies), 8)
                planned = self._edges.get((stream, table.oid, before.frontier, after.frontier))
                found = planned or seed.edges(
                    connection, table, catalog, before.frontier, after.frontier, rows, _ENDLESS
                )
                edges = [before.frontier, *(edge.upto for edge in found)]
                return [Chunk(stream, a, b, held, lsn, after.copies) for a, b in pairwise(edges)]

        try:
            parts = list(self._ask(plan))
        except TableError as error:
            return [Unreadable(seed.failed(stream, error))]
        if before.clears:
            parts[0] = replace(parts[0], clears=True)
        return parts

    def _hold(self, tables: Sequence[Table]) -> wal.Held:
        """The snapshot that an epoch copies under, held until the next one is planned."""
        self._let_go()
        with failures.errors(failures.NO_ANSWER):
            self._exporter = connections.connect(self.config)
            self._exporter.execute(f"SET lock_timeout = '{seed.LOCK_SECS}s'")
            return wal.hold(self._exporter, [table.oid for table in tables])

    def _let_go(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    def read(self, split: Split) -> Iterator[SourceBatch | Note]:
        if isinstance(split, LogRange):
            try:
                yield from self._read_log(split)
            except FatalError as error:
                if self._is_gone(split, error):
                    raise RangeGone(error.message, hint=error.hint) from error
                raise
            return
        if isinstance(split, Unreadable):
            yield Note(split.note)
            return
        known, catalog = self._known()
        table = known.get(split.stream)
        if table is None:
            return
        if self._arrow is None:
            self._arrow = self._ask(
                lambda asked: connections.take_arrow(self.config, asked, lock_timeout=f"{seed.LOCK_SECS}s")
            )
        done = False
        try:
            yield from seed.read_part(self._arrow, table, catalog, split, apart=True)
            done = True
        except (DataError, SchemaError) as error:
            yield Note(seed.failed(split.stream, error))
        finally:
            if not done and self._arrow is not None:  # its transaction is still open
                self._arrow.close()
                self._arrow = None

    def _read_log(self, split: LogRange) -> Iterator[SourceBatch | Note]:
        start = split.start
        found = self._ask(lambda connection: self._verify(connection, wal.server(connection), start))
        known, catalog = self._known()
        rules = Rules(
            {
                stream: Rule(
                    known[stream],
                    catalog,
                    progress,
                    [each for each in start.copied if each.stream == stream],
                    copies=self.config.snapshot != "never",
                )
                for stream, progress in start.tables.items()
                if stream in known and progress.captured
            },
            frozenset(s for s, progress in start.tables.items() if s not in known and progress.captured),
        )
        decoder = Decoder(
            catalog,
            start.lsn,
            split.end,
            wanted=rules.wants,
            exclude=lambda stream, column: setup.excluded(stream, column, self.config),
            as_text=partial(setup.as_text, config=self.config) if self.config.text_columns else None,
            keys={stream: known[stream].primary_key for stream in rules.by_stream},
            current_xid=self._ask(wal.current_xid),
            on_bad=rules.set_aside,
        )
        rows, given = 0, set()
        publications = setup.publications(self.config)
        asked = self._ask(lambda connection: connection)
        with (
            failures.errors("cannot read the log"),
            messages(self.config, asked, publications, found, start.lsn, split.end) as sent,
            Ahead(_changed(sent, decoder), lambda item: item.batch.nbytes) as changed,
        ):
            for item in changed:
                rows += item.batch.num_rows
                for batch in rules.rows(item):
                    given.add(batch.stream)
                    yield batch
        decoder.finish()
        # Once more: a slot that was lost and made again before it was read has nothing of the range, and says nothing.
        self._ask(lambda connection: self._verify(connection, wal.server(connection), start))
        if start.copying or start.copied or rules.told():  # it may have found that a table is to be copied again
            self._ask(lambda c: wal.wait_visible(c, decoder.xids, self.config.visible_timeout_secs))
        yield Note({"quiet": not rows, **rules.told(), **_unseen(decoder.parts, known, start, given)})
        for note in rules.bad.values():
            yield Note(note)

    def next_start(self, end: LogPosition, notes: Sequence[Json]) -> LogPosition:
        return end.after(notes, retried=self.config.snapshot != "never")

    def _is_gone(self, split: LogRange, error: FatalError) -> bool:
        """True for log that went with its slot or its publication, when everything is copied again anyway."""
        if self.config.snapshot == "never":
            return False
        if isinstance(error, failures.PublicationLost):
            return True
        if isinstance(error, failures.SlotLost):
            return self._may_begin_again
        try:
            names = setup.publications(self.config)
            self._ask(lambda connection: wal.verify_decoded(connection, self.config.slot, names, split.end))
            self._ask(lambda connection: self._verify(connection, wal.server(connection), split.start))
        except failures.PublicationLost:
            return True
        except failures.SlotLost:
            return self._may_begin_again
        except (ConfigError, RetryableError):
            return False  # the server does not answer: the error that is at hand is told
        return False

    def ack(self, end: LogPosition) -> None:
        self._ask(lambda connection: wal.acknowledge(connection, self.config.slot, end.lsn))


_STATES: Mapping[str, Literal["active", "seeding", "paused", "skipped", "failed", "gone"]] = {
    "waiting": "seeding",
    "seeding": "seeding",
    "seeded": "active",
    "paused": "paused",
    "skipped": "skipped",
    "failed": "failed",
    "gone": "gone",
}
"""What people call the state of a table."""


def _changed(sent: Iterator[pa.RecordBatch], decoder: Decoder) -> Iterator[Rows]:
    for batch in sent:
        yield from (item for item in decoder.feed(batch) if isinstance(item, Rows))


def _unseen(parts: Mapping[int, int], known: Mapping[str, Table], start: LogPosition, given: set[str]) -> Json:
    """For the note of a range: partitions that rows came from and that were not there when they were last looked at."""
    own = {table.oid: stream for stream, table in known.items()}
    found: dict[str, list[int]] = {}
    for part, root in parts.items():
        stream = own.get(root, "")
        if part not in own and stream in given and (tree := start.tables[stream].tree) and part not in tree.parts:
            found.setdefault(stream, []).append(part)
    return {"parts": found} if found else {}


def _is_new(table: Table, progress: Progress | None) -> bool:
    """True if a table must be copied: it was not there, it is another one, or it changed without a trace in the log."""
    if progress is None or progress.state == "gone":
        return True
    if progress.state == "failed":
        due = progress.failure.next_try if progress.failure else 0.0
        return due is not None and time.time() >= due
    return progress.captured and (
        progress.oid != table.oid
        or (bool(progress.key) and progress.key != table.key)
        or (bool(progress.shape) and table.differs(progress.shape))
        or _lost(table, progress)
    )


def _lost(table: Table, progress: Progress) -> bool:
    """True if changes of a table may be missing from the log."""
    return not table.published or progress.published != table.published


def _unbroken(table: Table, progress: Progress, behind: bool) -> bool:
    """
    True if every change of a table was followed up to now, so that its rows can be copied over those in the target.

    Not while the log is `behind` the first copy: of the changes up to there some are in it, and which would be forgotten.
    """
    followed = progress.refresh if behind else progress.state == "seeded" or progress.refresh
    followed = followed and (table.insert_only or not setup.was_insert_only(progress.shape))
    same = progress.oid == table.oid and progress.key == table.key and not _lost(table, progress)
    return table.chunked and same and progress.captured and followed


def _not_left_out(position: LogPosition, tables: Mapping[str, Table]) -> dict[str, Table]:
    """Those that nobody has paused or skipped."""
    left_out = {s for s, progress in position.tables.items() if progress.state in ("paused", "skipped")}
    return {stream: table for stream, table in tables.items() if stream not in left_out}
