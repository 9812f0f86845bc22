"""Plan the next range: log or chunks, new tables, requests, a lost slot. Everything that is decided goes into the position."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import psycopg

from penstock import durable
from penstock.connectors.postgres_cdc.catalog import Table, Tables
from penstock.connectors.postgres_cdc.chunks import CopyPlanner
from penstock.connectors.postgres_cdc.config import PostgresCdcConfig
from penstock.connectors.postgres_cdc.follow import verify
from penstock.connectors.postgres_cdc.log import slot as slots
from penstock.connectors.postgres_cdc.log import snapshots
from penstock.connectors.postgres_cdc.log.probe import Probe
from penstock.connectors.postgres_cdc.log.read import verify_decoded
from penstock.connectors.postgres_cdc.log.slot import Server, Slot
from penstock.connectors.postgres_cdc.log.snapshots import OpenTransaction
from penstock.connectors.postgres_cdc.partition_watch import PartitionWatch, Why
from penstock.connectors.postgres_cdc.position import LeftOut, LogPosition
from penstock.connectors.postgres_cdc.publications import publications, publish
from penstock.connectors.postgres_cdc.publishing import Publisher
from penstock.connectors.postgres_cdc.session import Session
from penstock.connectors.postgres_cdc.table_errors import TableError
from penstock.connectors.postgres_cdc.tables import (
    Captured,
    Failed,
    Following,
    Gone,
    Paused,
    Skipped,
    TableProgress,
    Waiting,
)
from penstock.connectors.postgresql import failures
from penstock.errors import ConfigError, ConnectorError, RetryableError
from penstock.source import ReadLimit, SourceContext
from penstock.tables import Refused, Request, Requests

logger = logging.getLogger(__name__)

LOOKED_SECS = 10.0
"""How often the catalog is searched for new and changed tables, and for partitions that came or went."""


class Planner:
    """Plans ranges on the driver."""

    def __init__(self, session: Session, config: PostgresCdcConfig, context: SourceContext) -> None:
        self._session, self._config, self._context = session, config, context
        self._publisher = Publisher(session)
        self._partitions = PartitionWatch(session, config)
        self._probe = Probe(config)
        self.copies = CopyPlanner(session, config)
        self._run = f"{time.time_ns():x}"
        self.planned_at = 0.0
        """When the end of the log was asked for last; splits need tables that were looked at later."""
        self.flushed = 0
        """Where the log ended when a range was planned last."""
        self.slot_waits_for: OpenTransaction | None = None
        """While the slot cannot be made: the transaction that the server waits for."""

    # -- the first range -----------------------------------------------------------------------------------------

    @property
    def made_here(self) -> bool:
        """True if this state has made the slot, or was about to."""
        directory = self._context.state_dir
        return directory is not None and (directory / "slot").exists()

    def _remember_making(self) -> None:
        """Called before a slot is made: it begins now, so it does not continue from the rows that the targets hold."""
        directory = self._context.state_dir
        if directory is not None:
            durable.make_directory(directory, private=True)
            durable.write_atomic(directory / "slot", self._config.slot.encode(), private=True)

    def begin(self, connection: psycopg.Connection[Any]) -> LogPosition:
        """
        The slot's own place, with nothing copied; publishes the tables and makes the slot first if need be.

        While an open transaction keeps the server from making the slot, the position is one without a slot (`slots` = 0).
        """
        here = slots.server(connection)
        tables = self._session.look(connection, here, required=True)
        if not self._config.manage:
            publish(connection, self._config, list(tables.captured.values()), here.version)
        position, published = self._publish(connection, LogPosition(), tables.captured, here)
        if position.tables and not published:
            failure = next(iter(position.tables.values())).failure
            assert failure is not None
            raise ConfigError(f"no table can be published: {failure.message}", code="PEN-1016", hint=failure.hint)
        found, kept = slots.slot(connection, self._config.slot), not self.made_here
        if found is None and self._config.manage:
            self._remember_making()
            found, kept = self._make_slot(connection), False
            if found is None:
                return LogPosition(slots=0)
        found = slots.verify_slot(found, self._config.slot, here)
        self.slot_waits_for = None
        place = {"lsn": found.confirmed, "system": here.system, "timeline": here.timeline, "run": self._run}
        start = position.model_copy(update={**place, "refused": _left_out(self._session.tables)})
        # A slot that is older than this state has kept every published change since the targets were filled.
        kept = kept and self._config.snapshot in ("initial", "when_needed")
        copies_of = self._context.copies_of
        full = {
            stream: table
            for stream, table in published.items()
            if kept and tables.captured[stream].published and (held := copies_of(stream)) and all(held)
        }
        start = self._follow(start, full)
        return self._copy(connection, start, {s: t for s, t in published.items() if s not in full})

    def _make_slot(self, connection: psycopg.Connection[Any]) -> Slot | None:
        """Make the slot; None while a transaction keeps the server from it, which is logged and shown in the health."""
        made = slots.make_slot(connection, self._config.slot)
        writers = snapshots.open_writers(connection) if made is None else []
        before, self.slot_waits_for = self.slot_waits_for, writers[0] if writers else None
        if writers and (before is None or before.xid != writers[0].xid):
            what = "the replication slot %r cannot be made before %s has ended: %s"
            logger.warning(what, self._config.slot, writers[0], writers[0].ending)
        return made

    def _follow(self, start: LogPosition, tables: Mapping[str, Table]) -> LogPosition:
        """The position with these tables followed from here on, without a copy."""
        return start.with_tables(
            {
                stream: Following(
                    oid=table.oid,
                    shape=table.shape.stored(),
                    key=table.key,
                    published=table.published,
                    copies=start.tables[stream].copies if stream in start.tables else 0,
                    left_out=table.unpublished,
                )
                for stream, table in tables.items()
            }
        )

    def _copy(
        self, connection: psycopg.Connection[Any], start: LogPosition, tables: Mapping[str, Table], why: Why = ""
    ) -> LogPosition:
        """The position with these tables to be copied; after ALTER PUBLICATION, and after the slot was made."""
        if not tables:
            return start
        if self._config.snapshot == "never" and why != "resync":
            return self._follow(start, tables)
        # A transaction that writes now may have begun before the table was published: its changes come neither by the
        # log nor, until it has ended, by a copy.
        until, end_of_log = snapshots.snapshot(connection).xmax, slots.inserted(connection)
        trees = self._partitions.look(connection, tables)
        new: dict[str, TableProgress] = {}
        unpassed = {each.stream for each in start.copied}
        for stream, table in tables.items():
            before = start.tables.get(stream)
            refresh = why == "changed" and before is not None and _is_unbroken(table, before, stream in unpassed)
            copies = max(before.copies, 1) + 1 if before else 1 + any(self._context.copies_of(stream))
            # Rows that stay in the target came from the earlier partitions.
            tree = trees[stream].tree() if stream in trees else None
            new[stream] = Waiting(
                oid=table.oid,
                until_xid=until,
                shape=table.shape.stored(),
                key=table.key,
                published=table.published,
                copies=copies,
                refresh=refresh,
                from_lsn=end_of_log if refresh else 0,
                estimate=table.estimate,
                failure=before.failure if before else None,
                tree=before.tree if refresh and isinstance(before, Captured) else tree,
                remains=before.remains if before else "",
                left_out=table.unpublished,
            )
        return start.forget_copies(new).with_tables(new)

    # -- every range ---------------------------------------------------------------------------------------------

    def next_end(self, start: LogPosition, limit: ReadLimit, planned: LogPosition | None = None) -> LogPosition:
        """The end of the range that starts here; `start` itself if there is nothing to do. `planned`: the last answer."""
        if start.slots == 0:
            end = self._session.ask(self.begin)
            if end.slots == 0 and limit.until is not None:
                raise _waits(f"the replication slot {self._config.slot!r}", self.slot_waits_for)
            return end if end.slots else start
        try:
            if planned is not None and self._is_readable(start, planned):
                return planned
            end = self._session.ask(lambda connection: self._next(connection, start, limit))
        except failures.PublicationLost:
            if self._config.snapshot == "never":
                raise
            end = self._session.ask(lambda connection: self._pass_over(connection, start))
        if end == start and end.copying and limit.until is not None:
            writer = self._session.ask(lambda connection: self.copies.blocked_by(connection, start))
            if writer is not None:
                raise _waits("the first copy", writer)
        return end

    def _is_readable(self, start: LogPosition, planned: LogPosition) -> bool:
        """For a range that is asked for again, since its epoch was given up: True if the slot still holds it."""
        if planned.slots != start.slots or planned.lsn <= start.lsn:
            return True
        names = publications(self._config)
        try:
            self._session.ask(lambda connection: verify_decoded(connection, self._config.slot, names, planned.lsn))
            self._session.ask(lambda connection: verify(self._session, start, connection))
        except (failures.SlotLost, ConfigError):
            return False
        return True

    def _next(self, connection: psycopg.Connection[Any], start: LogPosition, limit: ReadLimit) -> LogPosition:
        here = slots.server(connection)
        self.planned_at, self.flushed = time.monotonic(), here.flushed
        try:
            found = self._session.verify_range(connection, here, start.lsn, start.system, start.timeline)
        except failures.SlotLost:
            if not self.may_begin_again:
                raise
            return self._begin_again(connection, start, here)
        self._probe.start(start.lsn)
        looked = self._session.looked
        end = self._with_new_tables(connection, self._with_requests(connection, start, here), here)
        if clearing := _clearing(end, self._session.tables):
            return end.with_tables(clearing)
        waits_for_log = any(isinstance(t, Waiting) and t.from_lsn > start.lsn for t in end.tables.values())
        self._probe.flush_if_torn(connection, here, start.lsn)
        if end.copying and self._copies_first(connection, start, end, here, found, waits_for_log):
            planned = self.copies.plan(connection, end, limit)
            if planned.tables != end.tables:
                return planned.model_copy(update={"turn": "log"})
            self.copies.blocked_by(connection, end)
        upto = self._probe.range_end(
            connection,
            here,
            found,
            start.lsn,
            quiet=start.quiet,
            capped=limit.rows is not None,
            # After the last chunk, too: until the log has passed it, a table that is altered would begin again.
            forced=waits_for_log or (start.copying and start.turn == "log") or bool(start.copied),
        )
        if upto > start.lsn or self._session.looked != looked:
            end, again = self._partitions.compare(connection, start, end, here, upto)
            for stream, (why, tree) in again.items():
                end = self._copy(connection, end, {stream: self._session.tables.captured[stream]}, why)
                end = end.with_table(stream, end.tables[stream].model_copy(update={"tree": tree}))
        return end.model_copy(update={"lsn": upto, "turn": "copy"}) if upto > start.lsn or end != start else start

    def _copies_first(
        self,
        connection: psycopg.Connection[Any],
        start: LogPosition,
        end: LogPosition,
        here: Server,
        found: Slot,
        waits_for_log: bool,
    ) -> bool:
        """True if chunks come before more log: it is their turn, or the log holds nothing."""
        if end.turn == "copy" or here.flushed <= start.lsn:
            return True
        if waits_for_log or self._probe.is_long(here, found):
            return False
        return not self._probe.has_news(connection, found, start.lsn, here.flushed)

    @property
    def may_begin_again(self) -> bool:
        """True if a lost slot is made again, and everything copied."""
        return self._config.snapshot in ("when_needed", "always") and self._config.manage

    def _begin_again(self, connection: psycopg.Connection[Any], start: LogPosition, here: Server) -> LogPosition:
        """The slot is lost: make it again, and copy every table again."""
        slots.drop_slot(connection, self._config.slot)
        tables = _not_left_out(start, self._session.look(connection, here).captured)
        position, published = self._publish(connection, start, tables, here)
        made = self._make_slot(connection)
        if made is None:
            return start
        fresh = {
            "lsn": made.confirmed,
            "timeline": here.timeline,
            "run": self._run,
            "copied": (),
            "turn": "copy",
            "settled": made.confirmed,
            "slots": start.slots + 1,
        }
        return self._copy(connection, position.model_copy(update=fresh), published)

    def _pass_over(self, connection: psycopg.Connection[Any], start: LogPosition) -> LogPosition:
        """The log holds changes from while a publication did not exist, which servers before 18 cannot decode: skip it."""
        here = slots.server(connection)
        known, looked = start.tables, self._session.look(connection, here).captured
        tables = {s: t for s, t in looked.items() if _must_copy(t, known.get(s)) or known[s].captured}
        start, published = self._publish(connection, start, tables, here)
        upto = slots.server(connection).flushed
        passed = {
            "lsn": upto,
            "copied": (),
            "turn": "copy",
            "settled": upto,
            "slots": start.slots + 1,
        }
        if published:
            what = "log from while there was no publication cannot be read; these tables are copied again: %s"
            logger.warning(what, ", ".join(published))
        return self._copy(connection, start.model_copy(update=passed), published)

    # -- single tables -------------------------------------------------------------------------------------------

    def _with_requests(self, connection: psycopg.Connection[Any], start: LogPosition, here: Server) -> LogPosition:
        """Obey requests; the file of a request is removed once a durable position names it."""
        requests = Requests(self._context.state_dir)
        pending = requests.pending()
        requests.done(each.name for each in pending if each.name in start.applied)
        new = [each for each in pending if each.name not in start.applied]
        if not new:
            return start
        captured, end = self._session.look(connection, here).captured, start
        for request in new:
            end = self._apply(connection, end, request, captured, here)
        return end.model_copy(update={"applied": tuple(each.name for each in new)})

    def _apply(
        self,
        connection: psycopg.Connection[Any],
        start: LogPosition,
        request: Request,
        captured: Mapping[str, Table],
        here: Server,
    ) -> LogPosition:
        tables: dict[str, TableProgress] = {}
        again = {}
        for stream in request.streams:
            progress = start.tables.get(stream)
            if progress is None:
                continue
            if request.verb == "pause" and not isinstance(progress, Skipped | Gone):
                tables[stream] = progress.paused()
            elif request.verb == "skip":
                tables[stream] = progress.skipped()
            elif request.verb == "resync" or (request.verb == "resume" and isinstance(progress, Paused | Failed)):
                if stream in captured:
                    again[stream] = captured[stream]
                elif isinstance(progress, Paused | Skipped):
                    tables[stream] = progress.gone()
        why: Why = "resync" if request.verb == "resync" else ""
        return self._copy(connection, *self._publish(connection, start.with_tables(tables), again, here), why)

    def _with_new_tables(self, connection: psycopg.Connection[Any], start: LogPosition, here: Server) -> LogPosition:
        """The position with tables that are new, gone, changed or due for another try."""
        if self._config.snapshot == "always" and start.run != self._run:
            known = _not_left_out(start, self._session.look(connection, here).captured)
            end = self._copy(connection, *self._publish(connection, start, known, here))
            return end.model_copy(update={"run": self._run, "turn": "copy"})
        if time.monotonic() - self._session.looked > LOOKED_SECS or self._session.looked < 0:
            self._session.look(connection, here)
        captured = self._session.tables.captured
        kept = {
            stream: self._as_it_is(start, stream, progress, captured.get(stream))
            for stream, progress in start.tables.items()
        }
        if kept != start.tables:
            start = start.with_tables(kept)
        if (refused := _left_out(self._session.tables)) != start.refused:
            start = start.model_copy(update={"refused": refused})
        new = {s: t for s, t in captured.items() if _must_copy(t, kept.get(s))}
        for stream in [s for s in new if _has_lost_changes(new[s], kept.get(s))]:
            what = f"{stream} was not fully published for a while; changes may be missing"
            if self._config.snapshot == "never":
                hint = f"`penstock tables resync FILE {stream}` copies it, `resume` goes on without them"
                start = self._set_aside(start, new.pop(stream), TableError(what, hint=hint))
            else:
                logger.warning("%s: it is copied again", what)
        return self._copy(connection, *self._publish(connection, start, new, here), "changed")

    def _as_it_is(self, start: LogPosition, stream: str, progress: TableProgress, table: Table | None) -> TableProgress:
        """The state of a table after a look at the catalog, unless it must be copied."""
        if table is None:
            return (
                _missing(self._session.tables, stream, progress)
                if progress.captured or isinstance(progress, Failed)
                else progress
            )
        if not isinstance(progress, Captured):
            return progress
        if isinstance(progress, Following) and progress.failure and all(c.stream != stream for c in start.copied):
            progress = progress.with_fields(failure=None)
        elif progress.shape and not table.shape.differs_from(progress.shape):
            progress = progress.with_fields(shape=table.shape.after(progress.shape))
        if not progress.published:  # a position from before there were marks
            progress = progress.with_fields(published=table.published)
        if progress.left_out != table.unpublished:
            progress = progress.with_fields(left_out=table.unpublished)
        return progress

    def _publish(
        self, connection: psycopg.Connection[Any], start: LogPosition, tables: Mapping[str, Table], here: Server
    ) -> tuple[LogPosition, dict[str, Table]]:
        """Publish tables; the ones that may not be published are set aside, the others come back as they are now."""
        published, failed = self._publisher.publish(connection, tables, here)
        for stream, error in failed.items():
            start = self._set_aside(start, tables[stream], error)
        return start, published

    def _set_aside(self, start: LogPosition, table: Table, error: ConnectorError) -> LogPosition:
        progress = start.tables.get(table.stream) or Waiting(oid=table.oid, copies=0)
        refused = Refused.because(table.stream, error)
        return start.with_table(table.stream, progress.failed(refused, retried=self._config.snapshot != "never"))


def _missing(tables: Tables, stream: str, progress: TableProgress) -> TableProgress:
    """A table that is not captured any more: it was dropped, or it cannot be captured and the position says why."""
    finding = tables.refused.get(stream)
    if finding is None:
        return progress.gone()
    if isinstance(progress, Failed):
        return progress
    error = ConfigError(f"{stream}: {finding.what}", code="PEN-1016", hint=finding.fix)
    return progress.failed(Refused.because(stream, error))


def _clearing(position: LogPosition, tables: Tables) -> dict[str, TableProgress]:
    """Tables that were set aside in the middle of a copy, as they are once the targets are cleared."""
    return {
        stream: progress.cleared()
        for stream, progress in position.tables.items()
        if isinstance(progress, Failed) and progress.remains == "part" and stream in tables.captured
    }


def _left_out(tables: Tables) -> dict[str, LeftOut]:
    return {stream: LeftOut(what=finding.what, fix=finding.fix) for stream, finding in tables.refused.items()}


def _waits(what: str, writer: OpenTransaction | None) -> RetryableError:
    hint = writer.ending if writer else "it has ended by now, and the next try goes on"
    return RetryableError(f"{what} waits for {writer or 'a transaction'}", code="PEN-2003", hint=hint)


def _must_copy(table: Table, progress: TableProgress | None) -> bool:
    """True if a table must be copied: it is new, it is another one, or it changed without a trace in the log."""
    if progress is None or isinstance(progress, Gone):
        return True
    if isinstance(progress, Failed):
        return progress.is_due(time.time())
    return isinstance(progress, Captured) and (
        progress.oid != table.oid
        or (bool(progress.key) and progress.key != table.key)
        or (progress.shape is not None and table.shape.differs_from(progress.shape) is not None)
        or _has_lost_changes(table, progress)
    )


def _has_lost_changes(table: Table, progress: TableProgress | None) -> bool:
    """True if changes of a followed table may be missing from the log."""
    return isinstance(progress, Captured) and (not table.published or progress.published != table.published)


def _is_unbroken(table: Table, progress: TableProgress, unpassed: bool) -> bool:
    """
    True if every change of a table was followed up to now, so that its rows can be copied over those in the target.

    Not while the log has not passed the chunks of its copy (`unpassed`): some of the changes up to there are in the chunks,
    and a second copy would forget which ones.
    """
    if not isinstance(progress, Captured) or not table.chunked:
        return False
    followed = progress.refresh if unpassed else isinstance(progress, Following) or progress.refresh
    followed = followed and (table.insert_only or not (progress.shape and progress.shape.insert_only))
    same = progress.oid == table.oid and progress.key == table.key and not _has_lost_changes(table, progress)
    rekeyed = progress.shape is not None and table.shape.rekeyed_since(progress.shape)
    return same and followed and not rekeyed


def _not_left_out(position: LogPosition, tables: Mapping[str, Table]) -> dict[str, Table]:
    """The tables that are neither paused nor skipped."""
    return {s: table for s, table in tables.items() if not isinstance(position.tables.get(s), Paused | Skipped)}
