"""How a capture is: its slot, the transactions that hold it back, and the state of each table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from penstock.connectors.postgres_cdc.config import PostgresLogConfig
from penstock.connectors.postgres_cdc.log import slot as slots
from penstock.connectors.postgres_cdc.log import snapshots
from penstock.connectors.postgres_cdc.log.slot import Slot
from penstock.connectors.postgres_cdc.log.snapshots import BLAMED_SECS, OpenTransaction
from penstock.connectors.postgres_cdc.position import LeftOut, LogPosition
from penstock.connectors.postgres_cdc.tables import SHOWN, Captured, Failed, Following, TableProgress, Waiting
from penstock.source import HealthState, HealthStatus
from penstock.tables import TableState


def lag(connection: psycopg.Connection[Any], config: PostgresLogConfig) -> int | None:
    """Bytes of log that the slot has not acknowledged."""
    found = slots.slot(connection, config.slot)
    return None if found is None else max(0, slots.server(connection).flushed - found.confirmed)


def slot_counts(
    connection: psycopg.Connection[Any], config: PostgresLogConfig, position: LogPosition | None
) -> dict[str, float]:
    """The state of the slot and what it holds, as counters."""
    found = slots.slot(connection, config.slot)
    if found is None:
        return {"slot_missing" if _was_made(position) else "slot_not_made": 1.0}
    held = max(0, slots.server(connection).flushed - found.restart)
    safe = {} if found.safe_wal_size is None else {"slot_safe_bytes": float(found.safe_wal_size)}
    return {f"slot_{found.wal_status}": 1.0, "slot_held_bytes": float(held), **safe}


def health(
    connection: psycopg.Connection[Any],
    config: PostgresLogConfig,
    position: LogPosition | None,
    slot_waits_for: OpenTransaction | None = None,
) -> HealthStatus:
    """What is wrong now, the worst first; `position`: where the next range starts, None before the first."""
    found = slots.slot(connection, config.slot)
    if found is None:
        if slot_waits_for is not None:
            what = f"the replication slot {config.slot!r} cannot be made before {slot_waits_for} has ended"
            return HealthStatus.degraded(f"{what}: {slot_waits_for.ending}")
        if not _was_made(position):
            return HealthStatus(HealthState.HEALTHY, f"the replication slot {config.slot!r} is not made yet")
        return HealthStatus.degraded(f"the replication slot {config.slot!r} does not exist any more")
    words = _slot_words(connection, config, found)
    if found.wal_status == "lost":
        return HealthStatus.unhealthy(words)
    if found.wal_status != "reserved":
        return HealthStatus.degraded(words)
    if holder := _holder(connection, config, found):
        return HealthStatus.degraded(f"{words}; {holder}")
    if position is not None:
        if waits := _waits(connection, position):
            return HealthStatus.degraded(waits)
        if position.refused:
            reasons = "; ".join(f"{stream}: {why.what}" for stream, why in position.refused.items())
            return HealthStatus.degraded(f"left out: {reasons}")
    return HealthStatus(HealthState.HEALTHY, words)


def _was_made(position: LogPosition | None) -> bool:
    """Whether there has been a slot; before the first range of a new pipeline there is none, and nothing is wrong."""
    return position is not None and position.slots > 0


def _slot_words(connection: psycopg.Connection[Any], config: PostgresLogConfig, found: Slot) -> str:
    words = f"slot {config.slot}: {found.wal_status}"
    if found.safe_wal_size is not None:
        words += f", safe for {found.safe_wal_size} bytes"
    if found.active_pid:
        words += f", read by pid {found.active_pid}"
    if not slots.has_free_slot(connection):
        words += ", no free slot to read ahead with: raise max_replication_slots"
    return words


def _holder(connection: psycopg.Connection[Any], config: PostgresLogConfig, found: Slot) -> str:
    """The transaction that makes every epoch decode the same log again; empty if there is none."""
    again = slots.server(connection).flushed - found.restart
    if again <= config.max_wal_bytes:
        return ""
    writer = next((each for each in snapshots.open_writers(connection) if each.seconds >= BLAMED_SECS), None)
    return f"every epoch decodes {again} bytes again because of {writer}: {writer.ending}" if writer else ""


def _waits(connection: psycopg.Connection[Any], position: LogPosition) -> str:
    """The tables whose copies wait for an open transaction, and for which one; empty if none does."""
    oldest = snapshots.snapshot(connection).xmin
    waiting = {s: t.until_xid for s, t in position.tables.items() if isinstance(t, Waiting) and t.until_xid > oldest}
    writer = snapshots.blocking_writer(connection, max(waiting.values())) if waiting else None
    if writer is None or writer.seconds < BLAMED_SECS:
        return ""
    return f"{', '.join(sorted(waiting))}: the copy waits for {writer}: {writer.ending}"


# -- tables ----------------------------------------------------------------------------------------------------------

_HELD = {
    "": "the targets hold what they did before it failed",
    "part": "the targets hold part of its copy, and are cleared next",
    "clearing": "its copy is not complete; the targets are being cleared",
    "cleared": "its copy was not complete; the targets are cleared, and hold no rows",
    "kept": "the targets hold part of its copy: one of them refuses to be cleared",
}
"""What is in the targets of a table that is set aside."""


def table_states(position: LogPosition, *, copies: bool) -> Mapping[str, TableState]:
    """Every table that the position knows; `copies`: a complete copy is worth telling the sinks about."""
    states = {stream: _state(table, copies) for stream, table in position.tables.items()}
    for stream, why in position.refused.items():
        states.setdefault(stream, _left_out(why))
    return dict(sorted(states.items()))


def _state(table: TableProgress, copies: bool) -> TableState:
    failure = table.failure
    return TableState(
        SHOWN[table.state],
        copy=max(0, table.copies - isinstance(table, Waiting)),
        complete=isinstance(table, Following) and copies,
        cleared=isinstance(table, Failed) and table.remains in ("clearing", "cleared"),
        refreshes=isinstance(table, Captured) and table.refresh,
        rows=table.rows,
        estimate=table.estimate,
        **(failure.model_dump(exclude={"message"}) if failure else {}),
        error=failure.message if failure else "",
        note=_note(table),
    )


def _note(table: TableProgress) -> str:
    notes = []
    if isinstance(table, Failed) and (table.rows or table.remains or table.copies > 1):
        notes.append(_HELD[table.remains])
    if isinstance(table, Waiting) and table.until_xid:
        notes.append(f"waits until every transaction before {table.until_xid} has ended")
    if isinstance(table, Captured) and table.left_out:
        notes.append(f"left out, since generated: {', '.join(table.left_out)}")
    return "; ".join(notes)


def _left_out(why: LeftOut) -> TableState:
    return TableState("left_out", code="PEN-1016", error=why.what, hint=why.fix)
