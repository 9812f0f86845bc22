"""Mirror PostgreSQL tables: copy them in chunks, and follow the write-ahead log in ranges of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from penstock.config import Config, Secret
from penstock.connectors.postgres_cdc import seed, setup, wal
from penstock.connectors.postgres_cdc.decode import Decoder, Rows
from penstock.connectors.postgres_cdc.seed import Chunk, Clear, Copied, Pages, Progress, Rule, Rules
from penstock.connectors.postgres_cdc.setup import Table, Tables
from penstock.connectors.postgres_cdc.types import TypeCatalog
from penstock.durable import Json
from penstock.errors import ConfigError
from penstock.source import (
    Finding,
    HealthStatus,
    Note,
    Position,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
)

T = TypeVar("T")

_ENDLESS = 1 << 62

PROBED_BYTES = 16 << 20
"""As long as the server decodes no more than this, a range is looked through for changes before it is made an epoch of."""

LOOKED_SECS = 10.0
"""How often the catalog is looked through for tables that are new."""

QUIET_FACTOR = 8
"""So much more log goes into a range behind one without changes: a huge transaction is not decoded again and again."""


class PostgresLogConfig(Config):
    """Whose log is read, and how: what every reader of it has to know."""

    identity: ClassVar[frozenset[str]] = frozenset({"tables", "slot"})

    dsn: str
    """Where the database is: `postgresql://user@host:port/database`, or libpq's `key=value` form; without a password."""

    password: Secret | None = None
    """The user's password."""

    tables: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tables to mirror, as `schema.table`; `*` stands for anything. Partitions come with their root."""

    exclude_tables: tuple[str, ...] = ()
    """Tables to leave out of those, by the same patterns."""

    exclude_columns: tuple[str, ...] = ()
    """Columns to leave out, as `schema.table.column` with `*`; not those of a key."""

    insert_only: tuple[str, ...] = ()
    """Tables of which only inserts are captured: the way to take in those without a replica identity."""

    slot: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")] = "penstock"
    """The replication slot; each pipeline needs one of its own."""

    publication: Annotated[str, Field(min_length=1, max_length=50)] = "penstock"
    """The publication that names the tables; with `insert_only` a second one, `…_inserts`, is used."""

    manage: bool = True
    """Make the slot and the publication, and add new tables to it; false: only verify that they are there."""

    max_wal_bytes: PositiveInt = 256 << 20
    """Most log that is read at a time; a transaction is never cut, however large it is."""

    heartbeat_secs: PositiveFloat = 10.0
    """After so long the log is acknowledged even if it held no changes, so that the server can let go of it."""

    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = None
    """How TLS is used; none: what the `dsn` says, else libpq's default."""

    sslrootcert: Path | None = None
    """The certificate authority that the server's certificate is checked against."""

    sslcert: Path | None = None
    """The client's certificate."""

    sslkey: Path | None = None
    """The key of the client's certificate."""

    connect_timeout_secs: PositiveInt = 10
    """How long to wait for a connection."""

    statement_timeout_secs: NonNegativeInt = 0
    """The server ends a statement after so long; 0: never."""

    visible_timeout_secs: PositiveFloat = 60.0
    """While tables are copied: how long a committed transaction may stay invisible (a synchronous standby is missing)."""

    decoding_memory_bytes: PositiveInt = 256 << 20
    """Memory in which the server puts transactions together (`logical_decoding_work_mem`) before it goes to disk."""

    @field_validator("dsn")
    @classmethod
    def _no_password(cls, dsn: str) -> str:
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError as error:
            raise ValueError(f"this is no connection string: {str(error).strip()}") from None
        if parts.get("password"):
            raise ValueError("leave the password out of the dsn, and give it as `password = { env = … }`")
        return dsn


class PostgresCdcConfig(PostgresLogConfig):
    snapshot: Literal["initial", "when_needed", "always", "never"] = "initial"
    """
    When tables are copied: once before their changes (`initial`), also after the slot was lost (`when_needed`), at every
    start (`always`), or not at all (`never`). A copy that is not the first clears the target's rows of the table.
    """

    seed_chunk_rows: PositiveInt = 250_000
    """Rows that one task copies at a time."""


class LogPosition(Position):
    """How far the log was read, and how far each table is copied; `lsn` itself is not part of a range that ends there."""

    lsn: int = 0
    system: str = ""
    timeline: int = 0
    run: str = ""
    """With `snapshot = "always"`: the start that the copies are of."""
    tables: dict[str, Progress] = Field(default_factory=dict)
    copied: tuple[Copied, ...] = ()
    """Chunks whose snapshots the log has not passed."""
    turn: Literal["log", "copy"] = "copy"
    """While there is something to copy: what comes next."""
    quiet: bool = False
    """The last range of log held no changes."""
    settled: int = 0
    """The copies show nothing that is behind this place in the log; 0: there are none."""

    @property
    def copying(self) -> bool:
        return any(progress.state in ("waiting", "seeding") for progress in self.tables.values())


@dataclass(frozen=True)
class LogRange:
    """The split of a range of log: it is decoded by one task."""

    start: LogPosition
    end: int


Split = LogRange | Chunk | Pages | Clear


class PostgresCdc(RangeSource[PostgresCdcConfig, LogPosition]):
    """
    A range is a stretch of the log (one split, in commit order) or chunks of tables (one split each).

    Supports exactly-once: the slot holds the log until it is acknowledged, and a change that a chunk contains is dropped.
    """

    name = "postgres_cdc"

    def __init__(self, config: PostgresCdcConfig) -> None:
        super().__init__(config)
        self._connection: psycopg.Connection[Any] | None = None
        self._exporter: psycopg.Connection[Any] | None = None
        self._tables: Tables | None = None
        self._looked = 0.0
        self._catalog: TypeCatalog | None = None
        self._planned: tuple[tuple[LogPosition, ReadLimit], LogPosition] | None = None
        self._since = (0, 0.0)
        self._probed = (0, 0)
        self._began: LogPosition | None = None
        self._run = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**type(self)(self.config).__dict__, "routed": self.routed, "state_dir": self.state_dir}

    # -- open and close ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and see that this server can be captured from; makes nothing."""
        self.close()
        try:
            self._ask(self._verify_server)
        except BaseException:
            self.close()
            raise
        self._run = f"{time.time_ns():x}"

    def close(self) -> None:
        for connection in (self._connection, self._exporter):
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
                hint=f"SELECT pg_create_logical_replication_slot({wal.literal(self.config.slot)}, '{wal.PLUGIN}')",
            )
        if found is not None and found.wal_status != "lost":
            wal.verify_slot(found, self.config.slot, here)
        self._look(connection, here)

    def _ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Put a question over the driver's connection, which is made again after it broke."""
        with wal.errors("PostgreSQL does not answer"):
            if self._connection is None or self._connection.closed:
                self._connection = wal.connect(self.config)
            return question(self._connection)

    def _apart(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Put a question over a connection of its own, since another thread asks."""
        with wal.errors("PostgreSQL does not answer"), contextlib.closing(wal.connect(self.config)) as connection:
            return question(connection)

    # -- what is there -------------------------------------------------------------------------------------------

    def _look(self, connection: psycopg.Connection[Any], here: wal.Server) -> Tables:
        self._tables = setup.find_tables(connection, self.config, here.version)
        self._catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
        self._looked = time.monotonic()
        return self._tables

    def _known(self) -> tuple[Mapping[str, Table], TypeCatalog]:
        if self._tables is None or self._catalog is None:
            self._ask(lambda connection: self._look(connection, wal.server(connection)))
        assert self._tables is not None
        assert self._catalog is not None
        return self._tables.captured, self._catalog

    def schema(self) -> Schemas:
        self._ask(lambda connection: self._look(connection, wal.server(connection)))
        tables, catalog = self._known()
        return {stream: table.schema(catalog) for stream, table in tables.items()}

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
        refused = self._tables.refused if self._tables else {}
        if refused:
            return HealthStatus.degraded(f"left out: {'; '.join(f'{s}: {why}' for s, why in refused.items())}")
        return HealthStatus(HealthStatus.healthy().state, told)

    # -- planning ------------------------------------------------------------------------------------------------

    def initial(self) -> LogPosition:
        """The slot's own place, with nothing copied; publishes and makes the slot first if they are not there."""
        if self._began is None:
            self._began = self._ask(self._begin)
        return self._began

    def _begin(self, connection: psycopg.Connection[Any]) -> LogPosition:
        here = wal.server(connection)
        tables = self._look(connection, here)
        setup.publish(connection, self.config, tables, here.version)
        found = wal.slot(connection, self.config.slot)
        if found is None and self.config.manage:
            found = wal.make_slot(connection, self.config.slot)
        found = wal.verify_slot(found, self.config.slot, here)
        start = LogPosition(lsn=found.confirmed, system=here.system, timeline=here.timeline, run=self._run)
        return self._with_tables(connection, start, tables.captured)

    def _with_tables(
        self, connection: psycopg.Connection[Any], start: LogPosition, tables: Mapping[str, Table]
    ) -> LogPosition:
        """The position with these tables to be copied: after ALTER PUBLICATION, and after the slot was made."""
        state: Literal["waiting", "seeded"] = "seeded" if self.config.snapshot == "never" else "waiting"
        # Whoever writes now may have begun before the table was published: its changes come neither by the log
        # nor, until it has ended, by a copy.
        until = 0 if state == "seeded" else wal.snapshot(connection).xmax
        new = {
            stream: Progress(
                oid=table.oid,
                state=state,
                until_xid=until,
                shape=table.shape,
                copies=start.tables[stream].copies + (state == "waiting") if stream in start.tables else 1,
            )
            for stream, table in tables.items()
        }
        copied = tuple(each for each in start.copied if each.stream not in new)
        return start.model_copy(update={"tables": {**start.tables, **new}, "copied": copied})

    def latest(self, start: LogPosition, limit: ReadLimit) -> LogPosition:
        if self._exporter is not None:  # the epoch that read under its snapshot is over
            self._exporter.close()
            self._exporter = None
        asked = (start, limit)
        if self._planned is None or self._planned[0] != asked:
            end = self._ask(lambda connection: self._next(connection, start, limit))
            if end == start:
                return start
            self._planned = (asked, end)
        return self._planned[1]

    def _next(self, connection: psycopg.Connection[Any], start: LogPosition, limit: ReadLimit) -> LogPosition:
        here = wal.server(connection)
        try:
            found = self._verify(connection, here, start)
        except wal.SlotLost:
            if self.config.snapshot != "when_needed" or not self.config.manage:
                raise
            return self._begin_again(connection, start, here)
        if self._since[0] != start.lsn:
            self._since = (start.lsn, time.monotonic())
        end = self._with_new_tables(connection, start, here)
        if any(progress.copies > 1 and progress != start.tables.get(s) for s, progress in end.tables.items()):
            return end
        if end.copying and (end.turn == "copy" or here.flushed <= start.lsn):
            planned = self._copy(connection, end, limit)
            if planned.tables != end.tables:
                return planned.model_copy(update={"turn": "log"})
        upto = self._log_end(connection, start, here, found, limit)
        return end.model_copy(update={"lsn": upto, "turn": "copy"}) if upto > start.lsn or end != start else start

    def _verify(self, connection: psycopg.Connection[Any], here: wal.Server, start: LogPosition) -> wal.Slot:
        found = wal.verify_slot(wal.slot(connection, self.config.slot), self.config.slot, here)
        wal.verify_range(found, self.config.slot, here, start.lsn, start.system, start.timeline)
        return found

    def _begin_again(self, connection: psycopg.Connection[Any], start: LogPosition, here: wal.Server) -> LogPosition:
        """The slot is lost: make it anew, and copy every table again."""
        if wal.slot(connection, self.config.slot) is not None:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [self.config.slot])
        tables = self._look(connection, here)
        setup.publish(connection, self.config, tables, here.version)
        made = wal.make_slot(connection, self.config.slot)
        fresh = start.model_copy(
            update={"lsn": made.confirmed, "timeline": here.timeline, "copied": (), "turn": "copy", "settled": 0}
        )
        return self._with_tables(connection, fresh, tables.captured)

    def _with_new_tables(
        self, connection: psycopg.Connection[Any], start: LogPosition, here: wal.Server
    ) -> LogPosition:
        if self.config.snapshot == "always" and start.run != self._run:
            known = self._look(connection, here).captured
            setup.publish(connection, self.config, Tables(known), here.version)
            return self._with_tables(connection, start, known).model_copy(update={"run": self._run, "turn": "copy"})
        if self._tables is None or time.monotonic() - self._looked > LOOKED_SECS:
            self._look(connection, here)
        assert self._tables is not None
        captured, kept = self._tables.captured, dict(start.tables)
        for stream, progress in start.tables.items():
            table = captured.get(stream)
            if table is None:
                kept[stream] = progress.model_copy(update={"state": "gone", "frontier": None})
            elif progress.shape != table.shape and not table.differs(progress.shape):
                kept[stream] = progress.model_copy(update={"shape": table.shape})
        start = start if kept == start.tables else start.model_copy(update={"tables": kept})
        new = {stream: table for stream, table in captured.items() if _is_new(table, kept.get(stream))}
        if not new:
            return start
        setup.publish(connection, self.config, self._tables, here.version)
        return self._with_tables(connection, start, new)

    def _log_end(
        self,
        connection: psycopg.Connection[Any],
        start: LogPosition,
        here: wal.Server,
        found: wal.Slot,
        limit: ReadLimit,
    ) -> int:
        """How far the next range of log goes; not at all while it holds no changes and none is due."""
        most = self.config.max_wal_bytes * (QUIET_FACTOR if start.quiet else 1)
        end = here.flushed if limit.rows is None else min(here.flushed, start.lsn + most)
        if end <= start.lsn:
            return start.lsn
        if here.torn and end == here.flushed and self._probed != (start.lsn, end):
            wal.mend(connection)
        forced = start.copying and (start.turn == "log" or bool(start.copied))
        due = time.monotonic() - self._since[1] >= self.config.heartbeat_secs
        if forced or due or end < here.flushed or (end - found.restart > PROBED_BYTES and not start.quiet):
            return end
        if self._probed == (start.lsn, end):
            return start.lsn
        if wal.has_changes(
            connection, self.config.slot, setup.publications(self.config), found.confirmed, start.lsn, end
        ):
            return end
        self._probed = (start.lsn, end)
        return start.lsn

    def _copy(self, connection: psycopg.Connection[Any], start: LogPosition, limit: ReadLimit) -> LogPosition:
        """The position behind the next chunks: as many rows as the tasks of one epoch can copy at a time."""
        known, catalog = self._known()
        rows = (
            self.config.seed_chunk_rows if limit.rows is None else max(1, min(self.config.seed_chunk_rows, limit.rows))
        )
        room = rows * limit.parallelism if limit.rows is None else min(rows * limit.parallelism, limit.rows)
        oldest = wal.snapshot(connection).xmin
        tables = dict(start.tables)
        for stream, progress in start.tables.items():
            table = known.get(stream)
            if progress.state in ("seeded", "gone") or table is None or progress.until_xid > oldest:
                continue
            if not table.chunked:
                if tables == start.tables:  # by itself: one snapshot for all of it, and one epoch
                    tables[stream] = progress.model_copy(update={"state": "seeded", "until_xid": 0})
                    break
                continue
            for edge in seed.edges(connection, table, catalog, progress.frontier, None, rows, room):
                room -= edge.rows
                state = "seeding" if edge.upto else "seeded"
                tables[stream] = progress.model_copy(update={"state": state, "until_xid": 0, "frontier": edge.upto})
            if room <= 0:
                break
        return start.model_copy(update={"tables": tables})

    def earlier(self, a: LogPosition, b: LogPosition) -> LogPosition:
        """While tables are copied there is no end; afterwards the log is read at least as far as the copies reach into it."""
        if a.copying:
            return a
        return a.model_copy(update={"lsn": min(a.lsn, max(b.lsn, a.settled))})

    # -- reading -------------------------------------------------------------------------------------------------

    def split(self, start: LogPosition, end: LogPosition) -> Sequence[Split]:
        cleared = [
            Clear(stream, end.lsn, progress.copies)
            for stream, progress in end.tables.items()
            if stream in start.tables and progress.copies != start.tables[stream].copies
        ]
        if cleared:
            return cleared
        if end.lsn > start.lsn:
            return [LogRange(start, end.lsn)]
        parts: list[Split] = []
        for stream, progress in end.tables.items():
            before = start.tables.get(stream) or Progress(oid=progress.oid, state="waiting")
            if progress.state in ("seeding", "seeded") and (before.state, before.frontier) != (
                progress.state,
                progress.frontier,
            ):
                parts += self._parts(stream, before, progress, start.lsn)
        return parts

    def _parts(self, stream: str, before: Progress, after: Progress, lsn: int) -> Sequence[Split]:
        known, catalog = self._known()
        table = known.get(stream)
        if table is None:  # it was dropped; the next range says so
            return []
        if not table.chunked:
            return self._ask(lambda connection: self._pages(connection, table, lsn, after.copies))
        rows = self.config.seed_chunk_rows
        found = self._ask(
            lambda c: [e.upto for e in seed.edges(c, table, catalog, before.frontier, after.frontier, rows, _ENDLESS)]
        )
        return [Chunk(stream, a, b, lsn, after.copies) for a, b in pairwise([before.frontier, *found])]

    def _pages(self, connection: psycopg.Connection[Any], table: Table, lsn: int, copy: int) -> Sequence[Split]:
        if self._exporter is not None:
            self._exporter.close()
        self._exporter = wal.connect(self.config)
        self._exporter.execute("SET idle_in_transaction_session_timeout = 0")
        self._exporter.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = self._exporter.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        return seed.page_runs(connection, table, Pages(table.stream, 0, None, row[0], lsn, copy), 8)

    def read(self, split: Split) -> Iterator[SourceBatch | Note]:
        if isinstance(split, LogRange):
            yield from self._read_log(split)
            return
        known, catalog = self._known()
        table = known.get(split.stream)
        if table is None:
            return
        if isinstance(split, Clear):
            yield seed.clear(table, catalog, split)
        else:
            yield from seed.read_part(self.config, table, catalog, split)

    def _read_log(self, split: LogRange) -> Iterator[SourceBatch | Note]:
        start = split.start
        self._ask(lambda connection: self._verify(connection, wal.server(connection), start))
        known, catalog = self._known()
        rules = Rules(
            {
                stream: Rule(known[stream], catalog, progress, [each for each in start.copied if each.stream == stream])
                for stream, progress in start.tables.items()
                if stream in known
            }
        )
        decoder = Decoder(
            catalog,
            start.lsn,
            split.end,
            wanted=rules.by_stream.__contains__,
            exclude=lambda stream, column: setup.excluded(stream, column, self.config),
            keys={stream: known[stream].primary_key for stream in rules.by_stream},
            current_xid=self._ask(wal.current_xid),
        )
        rows = 0
        memory = f"{self.config.decoding_memory_bytes // 1024}kB"
        with (
            wal.errors("cannot read the log"),
            contextlib.closing(wal.connect_arrow(self.config, logical_decoding_work_mem=memory)) as connection,
        ):
            for messages in wal.peek(connection, self.config.slot, setup.publications(self.config), split.end):
                for item in decoder.feed(messages):
                    if isinstance(item, Rows):
                        rows += item.batch.num_rows
                        yield from rules.rows(item)
        decoder.finish()
        if start.copying:
            self._ask(lambda c: wal.wait_visible(c, decoder.xids, self.config.visible_timeout_secs))
        yield Note({"quiet": not rows, **({"reset": rules.reset} if rules.reset else {})})

    def advance(self, end: LogPosition, notes: Sequence[Json]) -> LogPosition:
        tables, copied, quiet = dict(end.tables), list(end.copied), end.quiet
        for note in notes:
            quiet = note.get("quiet", quiet)
            if "copied" in note:
                copied.append(Copied.model_validate(note["copied"]))
            for stream in note.get("reset", ()):
                tables[stream] = tables[stream].model_copy(update={"state": "seeding", "frontier": None})
                copied = [each for each in copied if each.stream != stream]
        settled = max((each.lsn for each in copied), default=0)
        settled = max(end.settled, settled)
        update = {
            "tables": tables,
            "copied": tuple(dict.fromkeys(each for each in copied if each.lsn > end.lsn)),
            "quiet": quiet,
            # Never behind the log: a drain must not be sent back.
            "settled": max(settled, end.lsn) if settled else 0,
        }
        return end.model_copy(update=update)

    def ack(self, end: LogPosition) -> None:
        self._ask(lambda connection: wal.acknowledge(connection, self.config.slot, end.lsn))


def _is_new(table: Table, progress: Progress | None) -> bool:
    """True if a table must be copied: it was not there, it is another one, or it changed without a trace in the log."""
    return (
        progress is None
        or progress.oid != table.oid
        or progress.state == "gone"
        or (bool(progress.shape) and table.differs(progress.shape))
    )
