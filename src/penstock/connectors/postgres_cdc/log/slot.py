"""The server, and the replication slot that keeps its log until it is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.connectors.postgres_cdc.log.lsn import lsn_text
from penstock.connectors.postgresql.connections import literal, run
from penstock.connectors.postgresql.failures import LOST, SlotLost
from penstock.errors import NOT_READY, ConfigError, FatalError, RetryableError

PLUGIN = "pgoutput"
OLDEST = 150000
"""`server_version_num` of the oldest supported server."""

MAKE_SLOT_SECS = 2
"""Longest that making a slot waits for open transactions before planning reports them and tries again."""


@dataclass(frozen=True)
class Server:
    """Which server this is and how far its log is flushed; `flushed` and `timeline` are 0 on a standby."""

    system: str
    timeline: int
    version: int
    database: str
    wal_level: str
    flushed: int
    torn: bool = False
    """The flushed log ends inside a record: a session has written whole pages of it and not yet committed."""


@dataclass(frozen=True)
class Slot:
    """A replication slot as `pg_replication_slots` shows it."""

    plugin: str
    database: str
    active_pid: int | None
    restart: int
    confirmed: int
    wal_status: str
    safe_wal_size: int | None


def server(connection: psycopg.Connection[Any]) -> Server:
    """Which server answers, and how far its log is flushed."""
    row = connection.execute(
        "SELECT (SELECT system_identifier FROM pg_control_system())::text, pg_is_in_recovery(), "
        "current_setting('server_version_num')::int, current_database(), current_setting('wal_level')"
    ).fetchone()
    assert row is not None
    system, standby, version, database, wal_level = row
    if standby:
        return Server(system, 0, version, database, wal_level, 0)
    row = connection.execute(
        "SELECT ('x' || left(pg_walfile_name(pg_current_wal_flush_lsn()), 8))::bit(32)::int, "
        "(pg_current_wal_flush_lsn() - '0/0')::int8, (pg_current_wal_insert_lsn() - '0/0')::int8, "
        "current_setting('wal_block_size')::int"
    ).fetchone()
    assert row is not None
    timeline, flushed, inserted, page = row
    return Server(system, timeline, version, database, wal_level, flushed, flushed % page == 0 and flushed < inserted)


def require_capable(here: Server) -> None:
    """Refuse a server that cannot be captured from."""
    if here.version < OLDEST:
        raise ConfigError(
            f"PostgreSQL {here.version // 10000} is too old",
            code="PEN-1016",
            hint=f"the oldest supported version is {OLDEST // 10000}",
        )
    if not here.flushed:
        raise ConfigError("the server is a standby", code="PEN-1016", hint="point `dsn` at the primary")
    if here.wal_level != "logical":
        raise ConfigError(
            f"wal_level is {here.wal_level}: the log does not hold what change capture needs",
            code="PEN-1016",
            hint="ALTER SYSTEM SET wal_level = 'logical', and restart the server",
        )


def inserted(connection: psycopg.Connection[Any]) -> int:
    """A place in the log after everything that is visible now. It is flushed soon, since a record is written after it."""
    row = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8").fetchone()
    flush_wal(connection)
    assert row is not None
    return int(row[0])


def flush_wal(connection: psycopg.Connection[Any]) -> None:
    """
    Have a torn log flushed to the end of a record. A reader would wait there until somebody does: 15 s on a quiet server.

    An empty transaction with a number is enough: the WAL writer flushes its commit at once.
    """
    connection.execute("SELECT pg_current_xact_id()")


def slot(connection: psycopg.Connection[Any], name: str) -> Slot | None:
    """
    The slot as it is now; None if there is none of that name.

    The server lists a logical slot as reserved while it still waits for open transactions to make it. Nothing can be
    read of it before it has a position, and it is gone if its session ends first: such a one is not there yet.
    """
    row = connection.execute(
        "SELECT coalesce(plugin, ''), coalesce(database, ''), active_pid, coalesce(restart_lsn - '0/0', 0)::int8, "
        "coalesce(confirmed_flush_lsn - '0/0', 0)::int8, coalesce(wal_status, 'lost'), safe_wal_size "
        "FROM pg_replication_slots WHERE slot_name = %s AND (slot_type <> 'logical' OR confirmed_flush_lsn IS NOT NULL)",
        [name],
    ).fetchone()
    return Slot(*row) if row else None


def has_free_slot(connection: psycopg.Connection[Any]) -> bool:
    """True if the server has room for one more slot, not counting temporary ones."""
    row = connection.execute(
        "SELECT count(*) < current_setting('max_replication_slots')::int FROM pg_replication_slots WHERE NOT temporary"
    ).fetchone()
    return bool(row and row[0])


def creating(name: str) -> str:
    """The SQL that makes the slot."""
    return f"SELECT pg_create_logical_replication_slot({literal(name)}, '{PLUGIN}')"


def make_slot(connection: psycopg.Connection[Any], name: str, wait_secs: float = MAKE_SLOT_SECS) -> Slot | None:
    """
    Make the slot, for which the server waits until every transaction that writes now has ended.

    None if that takes longer than `wait_secs`; nothing is left on the server then.
    """
    before = connection.execute("SELECT current_setting('lock_timeout')").fetchone()
    assert before is not None
    connection.execute(f"SET lock_timeout = '{int(wait_secs * 1000)}ms'")
    try:
        connection.execute(creating(name))
    except psycopg.errors.LockNotAvailable:
        return None
    except psycopg.errors.DuplicateObject as error:
        raise RetryableError(
            f"another session makes the replication slot {name!r}, and waits for open transactions to end",
            code=NOT_READY,
            hint="the slot is looked for again; the session of a run that was killed ends by itself within seconds",
        ) from error
    finally:
        if not connection.closed:
            connection.execute(f"SET lock_timeout = {literal(before[0])}")
    made = slot(connection, name)
    assert made is not None
    return made


def drop_slot(connection: psycopg.Connection[Any], name: str) -> None:
    """Remove the slot, if it exists."""
    if slot(connection, name) is not None:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [name])


def verify_slot(found: Slot | None, name: str, here: Server) -> Slot:
    """The slot, if it is one that can be read here."""
    if found is None:
        raise SlotLost(f"the replication slot {name!r} does not exist any more", hint=LOST)
    if found.plugin != PLUGIN or found.database != here.database:
        raise ConfigError(
            f"the replication slot {name!r} decodes the database {found.database!r} with the plugin {found.plugin!r}, "
            f"not {here.database!r} with {PLUGIN!r}",
            code="PEN-1016",
            hint="name another `slot`; one that does not exist is made",
        )
    if found.wal_status == "lost":
        raise SlotLost(
            f"the replication slot {name!r} is invalidated: the server removed log that it still needed",
            hint=f"raise max_slot_wal_keep_size on the server; drop the slot; then {LOST}",
        )
    return found


def verify_range(found: Slot, name: str, here: Server, start: int, system: str, timeline: int) -> None:
    """Refuse a start that this server's log does not continue."""
    if here.system != system:
        raise FatalError(
            f"this is another server: its system identifier is {here.system}, the recorded position is from {system}",
            code="PEN-5011",
            hint=f"point `dsn` at the server that was read before; or {LOST}",
        )
    if here.timeline != timeline or start > here.flushed:
        raise SlotLost(
            f"the server is on timeline {here.timeline} at {lsn_text(here.flushed)}; "
            f"the recorded position is {lsn_text(start)} on timeline {timeline} (failover or restore)",
            hint=f"the server was failed over or restored from a backup; {LOST}",
        )
    verify_confirmed(found.confirmed, name, start)


def verify_confirmed(confirmed: int, name: str, start: int) -> None:
    """Refuse a slot that has released log which is still to be read."""
    if confirmed > start:
        raise SlotLost(
            f"the replication slot {name!r} has been advanced to {lsn_text(confirmed)}, past the recorded position "
            f"{lsn_text(start)}: it was made again, or another reader moved it",
            hint=f"give each pipeline a `slot` of its own; {LOST}",
        )


def acknowledge(connection: psycopg.Connection[Any], slot_name: str, end: int) -> None:
    """Let the server discard the log before `end`; does nothing if it already has."""
    connection.execute(
        "SELECT CASE WHEN confirmed_flush_lsn < %(end)s::pg_lsn THEN pg_replication_slot_advance(slot_name, %(end)s) END "
        "FROM pg_replication_slots WHERE slot_name = %(slot)s AND wal_status IS DISTINCT FROM 'lost'",
        {"end": lsn_text(end), "slot": slot_name},
    )


def copy_slot(connection: Any, slot_name: str, copy: str) -> int:
    """Make a copy of the slot that lives as long as this Arrow connection; the place where it begins."""
    made = f"pg_copy_logical_replication_slot({literal(slot_name)}, {literal(copy)}, true)"
    return int(run(connection, f"SELECT (lsn - '0/0')::int8 AS lsn FROM {made}")["lsn"][0].as_py())


def advance_copy(connection: Any, slot_name: str, place: int) -> None:
    """Move a temporary slot of this Arrow connection to a place in the log, without an answer for what comes before it."""
    run(connection, f"SELECT pg_replication_slot_advance({literal(slot_name)}, '{lsn_text(place)}')::text AS moved")
