"""Mirror PostgreSQL tables: copy them in chunks, and follow the write-ahead log in ranges of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import psycopg

from penstock.connectors.postgres_cdc import chunks, health
from penstock.connectors.postgres_cdc.config import PostgresCdcConfig
from penstock.connectors.postgres_cdc.copy import Chunk, Clear, Pages, Unreadable, clear, first_rows, read_part
from penstock.connectors.postgres_cdc.findings import findings
from penstock.connectors.postgres_cdc.follow import LogRange, read_range, verify
from penstock.connectors.postgres_cdc.log import slot as slots
from penstock.connectors.postgres_cdc.log.read import verify_decoded
from penstock.connectors.postgres_cdc.plan import Planner
from penstock.connectors.postgres_cdc.position import LogPosition
from penstock.connectors.postgres_cdc.publications import publications
from penstock.connectors.postgres_cdc.session import Session
from penstock.connectors.postgresql import failures
from penstock.durable import Json
from penstock.errors import ConfigError, DataError, FatalError, RangeGone, RetryableError, SchemaError
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
from penstock.tables import Refused, TableSource, TableState

Split = LogRange | Chunk | Pages | Clear | Unreadable


class PostgresCdc(TableSource[PostgresCdcConfig, LogPosition]):
    """
    A range is a stretch of the log (one split, in commit order) or chunks of tables (one split each).

    Supports exactly-once: the slot keeps the log until it is acknowledged, and a change that a chunk contains is dropped.

    Each table has a state of its own: `penstock tables` pauses, resumes, skips and copies single tables again while the
    others stream. A table that fails (no permission, no replica identity, a value or a column that cannot be taken) is
    set aside with its error. It is copied again by itself after 10 s, then after twice as long each time, up to 10 min. If its
    copy was not complete, the next range clears the targets, so that none keeps half a table.
    A table that was removed from its publication for a while has lost changes, and so has one whose publication was altered
    or made again. Within 10 s, or at the next start, it is published and copied again.

    Some things cannot be captured; `penstock check` and `penstock tables show` list them. Unlogged tables are left out: the
    log does not hold their changes. Virtual generated columns are left out, and before PostgreSQL 18 stored ones: the server
    does not publish them. An array with two dimensions, or with subscripts that do not start at 1, sets its table aside
    unless its column is in `text_columns`. A DEFERRABLE primary key is no key: two rows may have it for a while, and the
    server takes none as a replica identity. To name its columns in the `key` of a sink is safe only if no statement gives a
    row the key of another that has not left it yet (`SET id = id + 1`).

    The slot is made at the first start, and the server does that only once every transaction that writes at that moment has
    ended. Until then the source is degraded and names the transaction; it goes on by itself.
    """

    name = "postgres_cdc"

    def __init__(self, config: PostgresCdcConfig) -> None:
        super().__init__(config)
        self.session = Session(config)
        self._planner = Planner(self.session, config, self.context)
        self._began: LogPosition | None = None
        self._planned: tuple[tuple[LogPosition, ReadLimit], LogPosition] | None = None
        self._at: LogPosition | None = None
        self._slot: dict[str, float] = {}
        self._all: tuple[LogPosition, int] | None = None
        """The last end that was asked for without a bound, and where the log ended then: a drain goes on to there."""

    def open(self, context: SourceContext = SourceContext()) -> None:
        """Connect, and verify that this server can be captured from; makes nothing. A task connects when it reads."""
        self.close()
        super().open(context)
        self.session = Session(self.config, in_task=context.in_task)
        said = self._planner.slot_waits_for
        self._planner = Planner(self.session, self.config, context)
        self._planner.slot_waits_for = said
        if context.in_task:
            return
        try:
            self.session.ask(partial(self.session.verify_server, begun=self._planner.made_here))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.session.close()
        self._began = self._planned = self._at = None

    def schema(self) -> Schemas:
        tables = self.session.look_since(self._planner.planned_at)
        # The columns of a table that is set aside need not be followed.
        planned = self._planned[1].tables if self._planned else {}
        aside = {s for s, progress in planned.items() if not progress.captured and progress.remains != "clearing"}
        return {s: table.schema(self.session.catalog) for s, table in tables.items() if s not in aside}

    def sample(self, rows: int) -> Iterator[SourceBatch]:
        """The first rows of each table; needs no slot and no publication, and makes none."""
        for table in self.session.look_since(self._planner.planned_at).values():
            yield from first_rows(self.session.arrow(), table, self.session.catalog, rows)

    def provide_schema(self) -> dict[str, Any]:
        return dict(self.schema())

    def is_authoritative(self) -> bool:
        return True

    def check(self) -> Sequence[Finding]:
        begun = self._planner.made_here and self.config.snapshot in ("initial", "never")
        return self.session.apart(lambda connection: list(findings(connection, self.config, begun)))

    lag_unit = "bytes"

    def lag(self) -> int | None:
        """Bytes of log that are not acknowledged."""
        return self.session.apart(lambda connection: health.lag(connection, self.config))

    def health_check(self) -> HealthStatus:
        return self.session.apart(self._health)

    def _health(self, connection: psycopg.Connection[Any]) -> HealthStatus:
        position = self._at or self._began
        self._slot = health.slot_counts(connection, self.config, position)
        return health.health(connection, self.config, position, self._planner.slot_waits_for)

    def metrics(self) -> ConnectorMetrics:
        counts: dict[str, float] = dict.fromkeys(
            (f"tables_{state}" for state in ("active", "seeding", "paused", "skipped", "failed", "gone", "left_out")),
            0.0,
        )
        for table in self.tables(self._at).values() if self._at else ():
            counts[f"tables_{table.state}"] += 1
        return ConnectorMetrics(custom={**counts, **self._slot})

    def tables(self, position: LogPosition) -> Mapping[str, TableState]:
        return health.table_states(position, copies=self.config.snapshot != "never")

    def initial(self) -> LogPosition:
        """The slot's own place, with nothing copied; publishes and makes the slot first if they do not exist."""
        if self._began is None:
            self._began = self.session.ask(self._planner.begin)
        return self._began

    def latest(self, start: LogPosition, limit: ReadLimit) -> LogPosition:
        self.session.release_snapshot()  # the epoch that read under it is over
        self._at = start
        asked = (start, limit)
        planned = self._planned[1] if self._planned is not None and self._planned[0] == asked else None
        end = self._planner.next_end(start, limit, planned)
        if limit.until is None:
            self._all = (end, self._planner.flushed)
        if end == start:
            return start
        # The range at which the drain began may have been one of copies, which holds no log.
        ended = self._all[1] if self._all is not None and self._all[0] == limit.until else 0
        end = _bounded(start, end, limit, ended)
        self._planned = (asked, end)
        return end

    def split(self, start: LogPosition, end: LogPosition) -> Sequence[Split]:
        if end.slots != start.slots:
            return []
        if end.lsn > start.lsn:
            tables = self.session.look_since(self._planner.planned_at)
            return [LogRange(start, end.lsn, tables, self.session.catalog)]
        return self._planner.copies.splits(start, end)

    def read(self, split: Split) -> Iterator[SourceBatch | Note]:
        if isinstance(split, Unreadable):
            yield Note(split.refused.note())
        elif isinstance(split, Clear):
            yield clear(split)
        elif isinstance(split, LogRange):
            try:
                yield from read_range(self.session, self.config, split)
            except FatalError as error:
                if self._is_gone(split, error):
                    raise RangeGone(error.message, hint=error.hint) from error
                raise
        else:
            yield from _read_part(self.session, split)

    def _is_gone(self, split: LogRange, error: FatalError) -> bool:
        """True for log that went with its slot or its publication, when everything is copied again anyway."""
        if self.config.snapshot == "never":
            return False
        try:
            if not isinstance(error, failures.PublicationLost | failures.SlotLost):
                names = publications(self.config)
                self.session.ask(lambda asked: verify_decoded(asked, self.config.slot, names, split.end))
                self.session.ask(partial(verify, self.session, split.start))
                return False
        except (failures.PublicationLost, failures.SlotLost) as found:
            error = found
        except (ConfigError, RetryableError):
            return False  # the server does not answer: the first error is the one to report
        return isinstance(error, failures.PublicationLost) or self._planner.may_begin_again

    def next_start(self, end: LogPosition, notes: Sequence[Json]) -> LogPosition:
        return end.after(notes, retried=self.config.snapshot != "never", whole=chunks.WHOLE_ROWS)

    def ack(self, end: LogPosition) -> None:
        self.session.ask(lambda connection: slots.acknowledge(connection, self.config.slot, end.lsn))


def _read_part(session: Session, part: Chunk | Pages) -> Iterator[SourceBatch | Note]:
    done = False
    try:
        yield from read_part(session.arrow(), part, apart=True)
        done = True
    except (DataError, SchemaError) as error:
        yield Note(Refused.because(part.stream, error).note())
    finally:
        if not done:
            session.drop_arrow()


def _bounded(start: LogPosition, end: LogPosition, limit: ReadLimit, ended: int) -> LogPosition:
    """
    The end, not past `limit.until` or where the log `ended` then. While tables are copied there is no bound; then the log is
    read as far as they need.

    `until` may be from a slot that was lost since, or from before there was one: `settled` is not, and no range ends before
    its start.
    """
    if not isinstance(limit.until, LogPosition) or end.copying:
        return end
    return end.model_copy(update={"lsn": min(end.lsn, max(limit.until.lsn, ended, end.settled, start.lsn))})
