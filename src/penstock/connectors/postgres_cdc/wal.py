"""The server's side of a WAL range: connections, the slot, peeking and acknowledging."""

from __future__ import annotations

import contextlib
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
from adbc_driver_manager import dbapi as adbc_dbapi

from penstock.connectors.postgres_cdc.decode import lsn_text
from penstock.connectors.postgresql.connections import literal, run
from penstock.connectors.postgresql.failures import LOST, SlotLost
from penstock.errors import ConfigError, FatalError, RetryableError

PLUGIN = "pgoutput"
OLDEST = 150000
"""`server_version_num` of the oldest server that is read from."""


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


# -- the server and its slot -----------------------------------------------------------------------------------------


def server(connection: psycopg.Connection[Any]) -> Server:
    """Who answers, and how far its log is flushed."""
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


def inserted(connection: psycopg.Connection[Any]) -> int:
    """A place in the log behind everything that is visible now; it is flushed soon, since something is written behind it."""
    row = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8").fetchone()
    mend(connection)
    assert row is not None
    return int(row[0])


def slot(connection: psycopg.Connection[Any], name: str) -> Slot | None:
    row = connection.execute(
        "SELECT coalesce(plugin, ''), coalesce(database, ''), active_pid, coalesce(restart_lsn - '0/0', 0)::int8, "
        "coalesce(confirmed_flush_lsn - '0/0', 0)::int8, coalesce(wal_status, 'lost'), safe_wal_size "
        "FROM pg_replication_slots WHERE slot_name = %s",
        [name],
    ).fetchone()
    return Slot(*row) if row else None


def has_free_slot(connection: psycopg.Connection[Any]) -> bool:
    """True if the server has room for a slot beside those that stay."""
    row = connection.execute(
        "SELECT count(*) < current_setting('max_replication_slots')::int FROM pg_replication_slots WHERE NOT temporary"
    ).fetchone()
    return bool(row and row[0])


def make_slot(connection: psycopg.Connection[Any], name: str) -> Slot:
    """Make the slot; waits until every transaction that writes now has ended."""
    connection.execute("SELECT pg_create_logical_replication_slot(%s, %s)", [name, PLUGIN])
    made = slot(connection, name)
    assert made is not None
    return made


def verify_slot(found: Slot | None, name: str, here: Server) -> Slot:
    """The slot, if it is one that can be read here."""
    if found is None:
        raise SlotLost(f"the replication slot {name!r} is gone", hint=LOST)
    if found.plugin != PLUGIN or found.database != here.database:
        raise ConfigError(
            f"the replication slot {name!r} decodes the database {found.database!r} by {found.plugin!r}, "
            f"not {here.database!r} by {PLUGIN!r}",
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
    """Refuse a start that this server's log does not lead on from."""
    if here.system != system:
        raise FatalError(
            f"this is another server: its system identifier is {here.system}, the recorded position is of {system}",
            code="PEN-5011",
            hint=f"point `dsn` at the server that was read before; or {LOST}",
        )
    if here.timeline != timeline or start > here.flushed:
        raise SlotLost(
            f"the server went another way: it is on timeline {here.timeline} at {lsn_text(here.flushed)}, "
            f"the recorded position is {lsn_text(start)} on timeline {timeline}",
            hint=f"it was failed over or put back from a copy; {LOST}",
        )
    verify_confirmed(found.confirmed, name, start)


def verify_confirmed(confirmed: int, name: str, start: int) -> None:
    """Refuse a slot that has let go of what comes next."""
    if confirmed > start:
        raise SlotLost(
            f"the replication slot {name!r} begins at {lsn_text(confirmed)}, behind the recorded position "
            f"{lsn_text(start)}: it was made again, or another reader moved it",
            hint=f"give each pipeline a `slot` of its own; {LOST}",
        )


# -- ranges ----------------------------------------------------------------------------------------------------------


def _changes(slot_name: str, publications: Sequence[str], upto: int, changes: str = "NULL", how: str = "peek") -> str:
    names = ",".join(f'"{name}"' for name in publications)
    return (
        f"pg_logical_slot_{how}_binary_changes({literal(slot_name)}, '{lsn_text(upto)}', {changes}, "
        f"'proto_version', '1', 'publication_names', {literal(names)})"
    )


def has_changes(
    connection: psycopg.Connection[Any],
    slot_name: str,
    publications: Sequence[str],
    confirmed: int,
    start: int,
    end: int,
) -> bool:
    """True if a transaction in the range touches a published table."""
    # The first will do, unless there may be some before it that were read and are not yet acknowledged.
    changes = "1" if confirmed == start else "NULL"
    row = connection.execute(
        # A BEGIN says where its transaction commits.
        "SELECT EXISTS (SELECT FROM (SELECT ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::int8 AS at "
        f"FROM {_changes(slot_name, publications, end, changes)} WHERE substr(data, 1, 1) = 'B') AS begun "
        f"WHERE at >= {start} AND at < {end})"
    ).fetchone()
    return bool(row and row[0])


def truncates(
    connection: psycopg.Connection[Any], slot_name: str, publications: Sequence[str], start: int, end: int
) -> Counter[tuple[int, int]]:
    """How often each transaction that commits in the range has truncated a table, by their numbers."""
    sent = connection.execute(
        f"SELECT data FROM {_changes(slot_name, publications, end)} WHERE substr(data, 1, 1) IN ('B', 'T')", binary=True
    )
    found: Counter[tuple[int, int]] = Counter()
    lsn = xid = 0
    for (data,) in sent:
        if data[:1] == b"B":
            lsn, _, xid = struct.unpack_from(">QqI", data, 1)
        elif lsn >= start:
            (count,) = struct.unpack_from(">I", data, 1)
            found.update((xid, oid) for oid in struct.unpack_from(f">{count}I", data, 6))
    return found


def verify_decoded(connection: psycopg.Connection[Any], slot_name: str, publications: Sequence[str], end: int) -> None:
    """Have a server that refuses changes from before there was a publication go through a range, and nothing more."""
    if connection.info.server_version < 180000:
        connection.execute(f"SELECT count(*) FROM {_changes(slot_name, publications, end)}")


def peek(connection: Any, slot_name: str, publications: Sequence[str], end: int) -> Iterator[pa.RecordBatch]:
    """The messages from the slot's own place to `end`, as the server sends them."""
    yield from batches(connection, f"SELECT data FROM {_changes(slot_name, publications, end)}")


def glance(
    connection: psycopg.Connection[Any], slot_name: str, publications: Sequence[str], end: int, most: int
) -> pa.RecordBatch | None:
    """The same over a connection for questions, all in one value; None if that has more bytes than `most`."""
    row = connection.execute(
        f"WITH sent AS MATERIALIZED (SELECT data FROM {_changes(slot_name, publications, end)}), "
        "size AS (SELECT coalesce(sum(length(data)), 0) AS bytes FROM sent) "
        "SELECT max(bytes), string_agg(int4send(length(data)), ''), string_agg(data, '') "
        f"FROM size LEFT JOIN sent ON bytes <= {most}",
        binary=True,
    ).fetchone()
    assert row is not None
    size, lengths, content = row
    if size > most:
        return None
    offsets = np.concatenate(([0], np.cumsum(np.frombuffer(lengths or b"", ">i4"), dtype=np.int64))).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content or b"")]
    return pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)], ["data"])


def consume(connection: Any, slot_name: str, publications: Sequence[str], end: int) -> Iterator[pa.RecordBatch]:
    """The messages from the slot's own place to `end`, which becomes its place."""
    yield from batches(connection, f"SELECT data FROM {_changes(slot_name, publications, end, how='get')}")


def batches(connection: Any, query: str) -> Iterator[pa.RecordBatch]:
    """What a query answers over an Arrow connection, as it comes."""
    with connection.cursor() as cursor:
        cursor.execute(query)
        yield from cursor._results.reader  # errors in the middle lose their state in `fetch_record_batch`


def advance(connection: Any, slot_name: str, place: int) -> None:
    """Move a temporary slot of this connection to a place in the log, without an answer for what is before it."""
    run(connection, f"SELECT pg_replication_slot_advance({literal(slot_name)}, '{lsn_text(place)}')::text AS moved")


def copy_slot(connection: Any, slot_name: str, copy: str) -> int:
    """Make a copy of the slot that goes with this connection; gives the place where it begins."""
    made = f"pg_copy_logical_replication_slot({literal(slot_name)}, {literal(copy)}, true)"
    return int(run(connection, f"SELECT (lsn - '0/0')::int8 AS lsn FROM {made}")["lsn"][0].as_py())


def mend(connection: psycopg.Connection[Any]) -> None:
    """
    Have a torn log flushed to the end of a record, for a reader waits there until somebody does: 15 s on a quiet server.

    An empty transaction with a number is enough; the log's writer flushes its commit at once.
    """
    connection.execute("SELECT pg_current_xact_id()")


def acknowledge(connection: psycopg.Connection[Any], slot_name: str, end: int) -> None:
    """Let the server forget what is before `end`; one that it has forgotten is a success."""
    connection.execute(
        "SELECT CASE WHEN confirmed_flush_lsn < %(end)s::pg_lsn THEN pg_replication_slot_advance(slot_name, %(end)s) END "
        "FROM pg_replication_slots WHERE slot_name = %(slot)s AND wal_status IS DISTINCT FROM 'lost'",
        {"end": lsn_text(end), "slot": slot_name},
    )


# -- transactions ----------------------------------------------------------------------------------------------------


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
    row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    return Snapshot.parse(row[0])


@dataclass(frozen=True)
class Held:
    """A snapshot that one connection holds, so that others can read under it."""

    name: str
    snapshot: str
    lsn: int
    """Every transaction that the snapshot shows committed before it."""
    files: Mapping[int, str]
    """Per table the files that its rows are in. A table that TRUNCATE or ALTER has given others looks empty from here."""

    def take(self, connection: Any) -> None:
        """Begin a transaction that reads under it."""
        run(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            run(connection, f"SET TRANSACTION SNAPSHOT {literal(self.name)}")
        except adbc_dbapi.Error as error:
            raise RetryableError(
                f"the snapshot {self.name} is gone: {str(error).strip().partition(chr(10))[0]}",
                code="PEN-2001",
                hint="the connection that held it was lost; the copy is tried again under a new one",
            ) from error


_FILES = """
    SELECT string_agg(pg_relation_filenode(relid)::text, ' ' ORDER BY relid::oid) AS files FROM (
        SELECT relid FROM pg_partition_tree({oid}::oid::regclass) UNION SELECT {oid}::oid::regclass) AS parts
"""


def files(connection: Any, oid: int) -> str:
    """The files that the rows of a table are in now, whatever the snapshot; asked over an Arrow connection."""
    return str(run(connection, _FILES.format(oid=oid)).column("files")[0].as_py())


def hold(connection: psycopg.Connection[Any], oids: Sequence[int]) -> Held:
    """A snapshot of now, held until the connection is closed; of tables whose files are looked up before."""
    files = {}
    for oid in oids:
        with contextlib.suppress(psycopg.errors.LockNotAvailable):  # whoever reads the table runs into it as well
            row = connection.execute(_FILES.format(oid=oid)).fetchone()
            files[oid] = str(row[0]) if row else ""
    connection.execute("SET idle_in_transaction_session_timeout = 0")
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    # The log's end is asked under the snapshot: it is behind every commit that the snapshot shows.
    row = connection.execute(
        "SELECT pg_export_snapshot(), pg_current_snapshot()::text, (pg_current_wal_insert_lsn() - '0/0')::int8"
    ).fetchone()
    assert row is not None
    name, snapshot, lsn = row
    return Held(name, snapshot, lsn, files)


def current_xid(connection: psycopg.Connection[Any]) -> int:
    """A 64-bit transaction number of now; none is used up."""
    return snapshot(connection).xmax


def wait_visible(connection: psycopg.Connection[Any], xids: npt.NDArray[np.int64], timeout_secs: float) -> None:
    """Wait until every one of these committed transactions is seen by whoever looks."""
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


def oldest_writer(connection: psycopg.Connection[Any]) -> tuple[int, int] | None:
    """The session whose open transaction makes every decoding begin far back, and for how many seconds it has been open."""
    row = connection.execute(
        "SELECT pid, extract(epoch FROM clock_timestamp() - xact_start)::int FROM pg_stat_activity "
        "WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY age(backend_xid) DESC LIMIT 1"
    ).fetchone()
    return (row[0], row[1]) if row else None


def _why_invisible(connection: psycopg.Connection[Any]) -> str:
    rows = connection.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' ORDER BY pid").fetchall()
    if not rows:
        return "its session has not ended it yet"
    pids = ", ".join(str(pid) for (pid,) in rows)
    return f"a synchronous standby is missing ({pids} wait for it)"
