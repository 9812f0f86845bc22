"""Decide how far the next range of log goes, without making the server decode the same log again and again for nothing."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from penstock.connectors.postgres_cdc.config import PostgresLogConfig
from penstock.connectors.postgres_cdc.log.read import has_changes
from penstock.connectors.postgres_cdc.log.slot import Server, Slot, flush_wal
from penstock.connectors.postgres_cdc.publications import publications

PROBED_BYTES = 16 << 20
"""A range of which the server decodes at most this much is searched for changes before it becomes an epoch."""

QUIET_FACTOR = 8
"""A range that follows one without changes may be this much longer: a huge transaction is not decoded again and again."""


class Probe:
    """Remembers since when the position has not moved, and which range was found to hold no changes."""

    def __init__(self, config: PostgresLogConfig) -> None:
        self._config = config
        self._since = (-1, 0.0)
        self._empty = (0, 0)
        """Start and end of the last range that was searched in vain."""

    def start(self, lsn: int) -> None:
        """The next range starts here; the heartbeat counts from the first time that this is said."""
        if self._since[0] != lsn:
            self._since = (lsn, time.monotonic())

    def flush_if_torn(self, connection: psycopg.Connection[Any], here: Server, lsn: int) -> None:
        """See `flush_wal`; not again for a log that was already searched."""
        if here.torn and here.flushed > lsn and self._empty != (lsn, here.flushed):
            flush_wal(connection)

    def range_end(
        self,
        connection: psycopg.Connection[Any],
        here: Server,
        found: Slot,
        lsn: int,
        *,
        quiet: bool,
        capped: bool,
        forced: bool,
    ) -> int:
        """
        The end of the next range; `lsn` itself while the log holds no changes and no heartbeat is due.

        `quiet`: the last range held no changes. `capped`: `max_wal_bytes` counts. `forced`: take it without a search.
        """
        most = self._config.max_wal_bytes * (QUIET_FACTOR if quiet else 1)
        end = min(here.flushed, lsn + most) if capped else here.flushed
        if end <= lsn:
            return lsn
        if forced or end < here.flushed or (end - found.restart > PROBED_BYTES and not quiet):
            return end
        return end if self.has_news(connection, found, lsn, end) else lsn

    def is_long(self, here: Server, found: Slot) -> bool:
        """True if a search of the log would cost too much."""
        return here.flushed - found.restart > PROBED_BYTES

    def has_news(self, connection: psycopg.Connection[Any], found: Slot, lsn: int, end: int) -> bool:
        """True if the log up to `end` holds changes, or if the slot has not moved for `heartbeat_secs`."""
        if time.monotonic() - self._since[1] >= self._config.heartbeat_secs:
            return True
        if self._empty != (lsn, end):
            names = publications(self._config)
            if has_changes(connection, self._config.slot, names, found.confirmed, lsn, end):
                return True
            self._empty = (lsn, end)
        return False
