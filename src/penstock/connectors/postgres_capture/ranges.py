"""Ranges of log for a capture: publish the tables, make the slot, and read the changes between two places."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import Op
from penstock.connectors.postgres_capture.config import PostgresCaptureConfig
from penstock.connectors.postgres_cdc.catalog import Table, as_text, excluded
from penstock.connectors.postgres_cdc.log import read, snapshots
from penstock.connectors.postgres_cdc.log import slot as slots
from penstock.connectors.postgres_cdc.log.decode import Decoder
from penstock.connectors.postgres_cdc.log.probe import Probe
from penstock.connectors.postgres_cdc.log.slot import Slot
from penstock.connectors.postgres_cdc.log.snapshots import OpenTransaction
from penstock.connectors.postgres_cdc.publications import publications, publish
from penstock.connectors.postgres_cdc.publishing import Publisher
from penstock.connectors.postgres_cdc.session import Session
from penstock.connectors.postgresql import failures
from penstock.durable import canonical, make_directory, write_atomic
from penstock.errors import NOT_READY, ConfigError, RetryableError

logger = logging.getLogger(__name__)

LOOKED_SECS = 10.0
"""How often the catalog is searched for new tables while changes are read."""


@dataclass(frozen=True)
class LogEnd:
    """A place in the log of one server; a range ends before it."""

    lsn: int
    system: str
    timeline: int


class SlotMark:
    """The furthest place that this pipeline ever moved the slot to, in a file: a slot that another reader moved is noticed."""

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / "slot.json" if directory else None

    def read(self) -> LogEnd | None:
        return LogEnd(**json.loads(self._path.read_bytes())) if self._path and self._path.exists() else None

    def write(self, place: LogEnd) -> None:
        if self._path is not None:
            make_directory(self._path.parent, private=True)
            write_atomic(self._path, canonical(asdict(place)).encode(), private=True)


def wait_for_writers(connection: psycopg.Connection[Any], most_secs: float) -> None:
    """Changes of a transaction that began before a table was published are in no log, so the copy must show them."""
    until = snapshots.snapshot(connection).xmax
    give_up = time.monotonic() + most_secs
    while snapshots.snapshot(connection).xmin < until:
        if time.monotonic() > give_up:
            writer = snapshots.blocking_writer(connection, until)
            raise RetryableError(
                f"the copy waits for {writer or 'a transaction'}, since it may have begun before the tables were published",
                code=NOT_READY,
                hint=writer.ending if writer else "end it; the copy then begins by itself",
            )
        time.sleep(0.01)


class LogReader:
    """Reads the log of one capture, range by range."""

    def __init__(self, config: PostgresCaptureConfig) -> None:
        self._config = config
        self.session = Session(config)
        self.slot_waits_for: OpenTransaction | None = None
        """While the slot cannot be made: the transaction that the server waits for."""
        self._publisher = Publisher(self.session)
        self._probe = Probe(config)
        self._quiet = False
        self._marks: dict[str, str] = {}
        """How each table was published at the last look."""

    @property
    def tables(self) -> Mapping[str, Table]:
        return self.session.tables.captured

    def open(self, *, begun: bool) -> None:
        """Connect, and verify that the server can be captured from; `begun`: the slot was made in an earlier run."""
        self.session.close()
        self.session.ask(partial(self.session.verify_server, begun=begun))

    def close(self) -> None:
        self.session.close()

    def look(self) -> None:
        """Look at the catalog again."""
        self.session.ask(self.session.look)

    def verify(self, at: LogEnd, connection: psycopg.Connection[Any]) -> Slot:
        """The slot, if it still holds the log from a place on."""
        here = slots.server(connection)
        return self.session.verify_range(connection, here, at.lsn, at.system, at.timeline)

    def begin(self) -> LogEnd:
        """The slot's own place; publishes the tables and makes the slot first if need be."""
        return self.session.ask(self._begin)

    def _begin(self, connection: psycopg.Connection[Any]) -> LogEnd:
        here = slots.server(connection)
        captured = self.session.look(connection, here, required=True).captured
        if not self._config.manage:
            publish(connection, self._config, list(captured.values()), here.version)
        self._publish(connection, captured)
        found = slots.slot(connection, self._config.slot)
        if found is None and self._config.manage:
            found = slots.make_slot(connection, self._config.slot)
            if found is None:
                raise self._waits(connection)
        self.slot_waits_for = None
        found = slots.verify_slot(found, self._config.slot, here)
        return LogEnd(found.confirmed, here.system, here.timeline)

    def _waits(self, connection: psycopg.Connection[Any]) -> RetryableError:
        self.slot_waits_for = next(iter(snapshots.open_writers(connection)), None)
        writer = self.slot_waits_for
        what = f"the replication slot {self._config.slot!r} cannot be made before {writer or 'a transaction'} has ended"
        return RetryableError(what, code=NOT_READY, hint=writer.ending if writer else "wait until it can be made")

    def _publish(self, connection: psycopg.Connection[Any], tables: Mapping[str, Table]) -> None:
        published, failed = self._publisher.publish(connection, tables, slots.server(connection))
        for error in failed.values():
            raise ConfigError(error.message, code="PEN-1016", hint=error.hint)
        self._marks.update((stream, table.published) for stream, table in published.items())

    def next_end(self, at: LogEnd) -> LogEnd:
        """The end of the next range; `at` itself while the log holds no changes and no heartbeat is due."""
        return self.session.ask(partial(self._next_end, at))

    def _next_end(self, at: LogEnd, connection: psycopg.Connection[Any]) -> LogEnd:
        here = slots.server(connection)
        found = self.session.verify_range(connection, here, at.lsn, at.system, at.timeline)
        if time.monotonic() - self.session.looked > LOOKED_SECS:
            self._look_for_tables(connection)
        self._probe.start(at.lsn)
        self._probe.flush_if_torn(connection, here, at.lsn)
        lsn = self._probe.range_end(connection, here, found, at.lsn, quiet=self._quiet, capped=True, forced=False)
        return LogEnd(lsn, at.system, at.timeline) if lsn > at.lsn else at

    def _look_for_tables(self, connection: psycopg.Connection[Any]) -> None:
        """Publish tables that are new, or whose publication was altered; changes of the latter may be missing."""
        captured = self.session.look(connection).captured
        changed = {stream: table for stream, table in captured.items() if self._marks.get(stream) != table.published}
        for stream in changed.keys() & self._marks.keys():
            logger.warning("%s was not fully published for a while; changes may be missing", stream)
        if changed:
            self._publish(connection, changed)

    def read(self, start: LogEnd, end: LogEnd) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The changes of a range by table, each table's in commit order."""
        found = self.session.ask(partial(self.verify, start))
        tables, config = self.tables, self._config
        decoder = Decoder(
            self.session.catalog,
            start.lsn,
            end.lsn,
            wanted=tables.__contains__,
            exclude=partial(excluded, config=config),
            as_text=partial(as_text, config=config) if config.text_columns else None,
            keys={stream: table.primary_key for stream, table in tables.items()},
            current_xid=self.session.ask(snapshots.current_xid),
        )
        asked = self.session.ask(lambda connection: connection)
        self._quiet = True
        with (
            failures.errors("cannot read the log"),
            read.changes(
                config, asked, publications(config), found, decoder, start.lsn, end.lsn, plain=True
            ) as changed,
        ):
            for item in changed:
                self._quiet = False
                table = tables[item.relation.stream]
                if item.relation.namespace == table.namespace:
                    yield table.stream, _inserts(item.batch) if table.insert_only else item.batch
        decoder.finish()
        # Once more: a slot that was lost and made again before it was read has no log of the range, and does not say so.
        self.session.ask(partial(self.verify, start))

    def acknowledge(self, lsn: int) -> None:
        """Let the server discard the log before a place."""
        self.session.ask(lambda connection: slots.acknowledge(connection, self._config.slot, lsn))


def _inserts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The inserts and truncates of a table in `insert_only`; it may still be in the other publication as well."""
    return batch.filter(pc.is_in(batch["_op"], value_set=pa.array([Op.INSERT, Op.TRUNCATE])))
