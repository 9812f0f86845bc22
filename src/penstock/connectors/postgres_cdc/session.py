"""The connections of one capture in one process, and its last look at the server's catalog."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import psycopg

from penstock.connectors.postgres_cdc import table_errors
from penstock.connectors.postgres_cdc.catalog import Table, Tables, find_tables, with_publications
from penstock.connectors.postgres_cdc.config import PostgresLogConfig
from penstock.connectors.postgres_cdc.log import slot as slots
from penstock.connectors.postgres_cdc.log import snapshots
from penstock.connectors.postgres_cdc.log.slot import Server, Slot
from penstock.connectors.postgres_cdc.log.snapshots import ExportedSnapshot
from penstock.connectors.postgres_cdc.publications import find_publications, publications
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import TypeCatalog
from penstock.errors import ConfigError

T = TypeVar("T")


class Session:
    """Connections that are made when they are needed, and made again after they broke."""

    def __init__(self, config: PostgresLogConfig, *, in_task: bool = False) -> None:
        self.config = config
        self.tables = Tables()
        """The tables at the last look."""
        self.catalog = TypeCatalog()
        self.looked = -1.0
        """When the catalog was looked at last, by the monotonic clock; negative: never."""
        self._in_task = in_task
        self._connection: psycopg.Connection[Any] | None = None
        self._exporter: psycopg.Connection[Any] | None = None
        self._arrow: Any = None

    def close(self) -> None:
        """Close everything; a task leaves its connections to the next task of its process."""
        if self._connection is not None and self._in_task:
            connections.return_connection(self.config, self._connection, self._arrow)
            self._connection = self._arrow = None
        for connection in (self._connection, self._exporter, self._arrow):
            if connection is not None:
                connection.close()
        self._connection = self._exporter = self._arrow = None
        self.tables, self.catalog, self.looked = Tables(), TypeCatalog(), -1.0

    def ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Ask over the connection that this source or task keeps for questions."""
        with failures.errors(failures.NO_ANSWER):
            if self._connection is None or self._connection.closed:
                connect = connections.take if self._in_task else connections.connect
                self._connection = connect(self.config)
                # A lock on one table must not keep the others waiting for long.
                self._connection.execute(f"SET lock_timeout = '{table_errors.LOCK_SECS}s'")
            return question(self._connection)

    def apart(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Ask over a connection that is made for it, since another thread asks."""
        with failures.errors(failures.NO_ANSWER), contextlib.closing(connections.connect(self.config)) as connection:
            return question(connection)

    # -- the server and its catalog ------------------------------------------------------------------------------

    def verify_server(self, connection: psycopg.Connection[Any], *, begun: bool) -> None:
        """Refuse a server that cannot be captured from. `begun`: there may be no table now, since there were some."""
        here = slots.server(connection)
        slots.require_capable(here)
        found = slots.slot(connection, self.config.slot)
        if found is None and not self.config.manage:
            raise ConfigError(
                f"the replication slot {self.config.slot!r} does not exist, and manage = false",
                code="PEN-1016",
                hint=slots.creating(self.config.slot),
            )
        if found is not None and found.wal_status != "lost":
            slots.verify_slot(found, self.config.slot, here)
        self.look(connection, here, required=found is None and not begun)

    def verify_range(
        self, connection: psycopg.Connection[Any], here: Server, lsn: int, system: str, timeline: int
    ) -> Slot:
        """The slot, if it still holds the log from a position on."""
        found = slots.verify_slot(slots.slot(connection, self.config.slot), self.config.slot, here)
        slots.verify_range(found, self.config.slot, here, lsn, system, timeline)
        return found

    def look(
        self, connection: psycopg.Connection[Any], here: Server | None = None, *, required: bool = False
    ) -> Tables:
        """Look at the catalog: the tables and types as they are now."""
        version = (here or slots.server(connection)).version
        looked = time.monotonic()
        self.tables = find_tables(connection, self.config, version, required=required)
        self.catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
        self.looked = looked
        return self.tables

    def look_since(self, moment: float) -> Mapping[str, Table]:
        """The captured tables as they were at `moment` (monotonic clock) or later."""
        if self.looked < moment:
            self.ask(self.look)
        return self.tables.captured

    def look_at_publications(self, connection: psycopg.Connection[Any]) -> Mapping[str, Table]:
        """The captured tables with the marks of how they are published now."""
        held = find_publications(connection, publications(self.config))
        self.tables = with_publications(self.tables, self.config, held)
        return self.tables.captured

    # -- copies --------------------------------------------------------------------------------------------------

    def export_snapshot(self, tables: Sequence[Table]) -> ExportedSnapshot:
        """The snapshot that an epoch copies under, kept until the next one is planned."""
        self.release_snapshot()
        with failures.errors(failures.NO_ANSWER):
            self._exporter = connections.connect(self.config)
            self._exporter.execute(f"SET lock_timeout = '{table_errors.LOCK_SECS}s'")
            return snapshots.export(self._exporter, [table.oid for table in tables])

    def release_snapshot(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    def arrow(self) -> Any:
        """The connection that copies rows."""
        if self._arrow is None:
            lock_timeout = f"{table_errors.LOCK_SECS}s"
            self._arrow = self.ask(lambda asked: connections.take_arrow(self.config, asked, lock_timeout=lock_timeout))
        return self._arrow

    def drop_arrow(self) -> None:
        """Close the connection that copies rows: a transaction is still open there."""
        if self._arrow is not None:
            self._arrow.close()
            self._arrow = None
