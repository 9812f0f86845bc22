"""Transactions beside the log: which of them a snapshot shows, and which ones keep a capture waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
from adbc_driver_manager import dbapi as adbc_dbapi

from penstock.connectors.postgresql.connections import literal, run
from penstock.errors import RetryableError


@dataclass(frozen=True)
class Snapshot:
    """A `pg_snapshot`: every transaction below `xmax` that is not in `running` is visible in it."""

    xmin: int
    xmax: int
    running: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(xid) for xid in running.split(",") if xid))

    def sees(self, xids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return (xids < self.xmax) & ~np.isin(xids, np.array(self.running, dtype=np.int64))


def snapshot(connection: psycopg.Connection[Any]) -> Snapshot:
    """The snapshot of now."""
    row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    return Snapshot.parse(row[0])


def current_xid(connection: psycopg.Connection[Any]) -> int:
    """A 64-bit transaction number of now; none is used up."""
    return snapshot(connection).xmax


@dataclass(frozen=True)
class ExportedSnapshot:
    """A snapshot that one connection keeps open, so that others can read under it."""

    name: str
    snapshot: str
    lsn: int
    """Every transaction that the snapshot shows committed before this place in the log."""
    files: Mapping[int, str]
    """The data files of each table. TRUNCATE and ALTER give a table new files, and it then looks empty from here."""

    def take(self, connection: Any) -> None:
        """Begin a transaction that reads under it, over an Arrow connection."""
        run(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            run(connection, f"SET TRANSACTION SNAPSHOT {literal(self.name)}")
        except adbc_dbapi.Error as error:
            raise RetryableError(
                f"the snapshot {self.name} is gone: {str(error).strip().partition(chr(10))[0]}",
                code="PEN-2001",
                hint="the connection that kept it was lost; the copy is tried again under a new one",
            ) from error


_FILES = """
    SELECT string_agg(pg_relation_filenode(relid)::text, ' ' ORDER BY relid::oid) AS files FROM (
        SELECT relid FROM pg_partition_tree({oid}::oid::regclass) UNION SELECT {oid}::oid::regclass) AS parts
"""


def files(connection: Any, oid: int) -> str:
    """The files of a table now, whatever the snapshot; asked over an Arrow connection."""
    return str(run(connection, _FILES.format(oid=oid)).column("files")[0].as_py())


def export(connection: psycopg.Connection[Any], oids: Sequence[int]) -> ExportedSnapshot:
    """A snapshot of now, kept until the connection is closed; the tables' files are looked up before it is taken."""
    files = {}
    for oid in oids:
        with contextlib.suppress(psycopg.errors.LockNotAvailable):  # the task that reads the table runs into it as well
            row = connection.execute(_FILES.format(oid=oid)).fetchone()
            files[oid] = str(row[0]) if row else ""
    connection.execute("SET idle_in_transaction_session_timeout = 0")
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    # The log's end is asked under the snapshot: it lies after every commit that the snapshot shows.
    row = connection.execute(
        "SELECT pg_export_snapshot(), pg_current_snapshot()::text, (pg_current_wal_insert_lsn() - '0/0')::int8"
    ).fetchone()
    assert row is not None
    name, snapshot, lsn = row
    return ExportedSnapshot(name, snapshot, lsn, files)


# -- waiting for transactions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction that has written and has not ended: of a session (`pid`), or prepared for two-phase commit."""

    xid: int
    pid: int | None
    prepared: str
    """Its name if it is prepared."""
    seconds: int
    """How long it has been open."""
    began: str
    asked: str
    """When its session began its last query; empty if it is prepared."""

    def __str__(self) -> str:
        if self.prepared:
            return f"the prepared transaction {self.prepared!r} (xid {self.xid}), {self.seconds} s old, of {self.began}"
        asked = f", last query at {self.asked}" if self.asked else ""
        return f"the transaction of pid {self.pid} (xid {self.xid}), {self.seconds} s old, begun at {self.began}{asked}"

    @property
    def ending(self) -> str:
        """The SQL that ends it."""
        if self.prepared:
            return f"COMMIT PREPARED {literal(self.prepared)}, or ROLLBACK PREPARED {literal(self.prepared)}"
        return f"commit it, or SELECT pg_terminate_backend({self.pid})"


# The text of a query may hold values of rows, so it is left out.
_WRITERS = """
    SELECT xid, pid, prepared, greatest(coalesce(extract(epoch FROM clock_timestamp() - since), 0), 0)::int,
           coalesce(to_char(since, 'YYYY-MM-DD HH24:MI:SS TZ'), '?'), coalesce(to_char(asked, 'HH24:MI:SS'), '')
      FROM (SELECT backend_xid::text::int8 AS xid, pid, '' AS prepared, xact_start AS since, query_start AS asked,
                   age(backend_xid) AS age
              FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
             UNION ALL
            SELECT transaction::text::int8, NULL, gid, prepared, NULL, age(transaction) FROM pg_prepared_xacts) AS writers
     ORDER BY age DESC"""


def open_writers(connection: psycopg.Connection[Any]) -> list[OpenTransaction]:
    """The transactions that have written and not ended, the oldest first; prepared ones as well."""
    return [OpenTransaction(*row) for row in connection.execute(_WRITERS).fetchall()]


BLAMED_SECS = 5
"""A transaction that has been open for less is not named as the cause of anything: it will end by itself."""


def blocking_writer(connection: psycopg.Connection[Any], until_xid: int) -> OpenTransaction | None:
    """The oldest open transaction, if it is one of those before `until_xid`."""
    oldest = snapshot(connection).xmin
    if oldest >= until_xid:
        return None
    return next((each for each in open_writers(connection) if each.xid == oldest & 0xFFFFFFFF), None)


def wait_visible(connection: psycopg.Connection[Any], xids: npt.NDArray[np.int64], timeout_secs: float) -> None:
    """Wait until every one of these committed transactions is visible to other sessions."""
    until, pause = time.monotonic() + timeout_secs, 0.001
    while len(xids := xids[~snapshot(connection).sees(xids)]):
        if time.monotonic() > until:
            raise RetryableError(
                f"transaction {xids[0]} is committed in the log and still not visible after {timeout_secs:g} s: "
                f"{_why_invisible(connection)}",
                code="PEN-2003",
                hint="bring the standby back, or take it out of synchronous_standby_names",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _why_invisible(connection: psycopg.Connection[Any]) -> str:
    rows = connection.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' ORDER BY pid").fetchall()
    if not rows:
        return "its session has not ended it yet"
    pids = ", ".join(str(pid) for (pid,) in rows)
    return f"a synchronous standby is missing ({pids} wait for it)"
