"""The sources and sinks of a pipeline as the status shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.durable import Json
from penstock.errors import without_secrets
from penstock.runtime.telemetry.rates import Meters
from penstock.runtime.telemetry.totals import Totals
from penstock.source import HealthState, HealthStatus
from penstock.tables import TableState

_FAILED_NAMED = 3

MOST_FLOWS = 500
"""Ways from a source over a topic to a sink that a status names."""


@dataclass(frozen=True)
class Looks:
    """What is asked for when a status is made; each may be called from any thread."""

    positions: Callable[[], Mapping[str, str]] = dict
    """How far each source was read, in words."""
    schemas: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    """The columns of each topic, with their types."""
    flows: Callable[[], Sequence[tuple[str, str, str]]] = tuple
    """Source, topic and sink of every way that rows take."""
    streams: Callable[[], Mapping[tuple[str, str], Mapping[str, str]]] = dict
    """The columns of each stream of a source, with their types."""


@dataclass
class Parts:
    """What is known of each connector just now."""

    totals: Totals
    sinks: Sequence[str]
    health: dict[str, HealthStatus] = field(default_factory=dict)
    tables: dict[str, Mapping[str, TableState]] = field(default_factory=dict)
    copies: dict[tuple[str, str], tuple[int, float, int]] = field(default_factory=dict)
    """Per source and table that is being copied: which copy, and when it was first seen with how many rows."""
    lag: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    """The lag of each source, and its unit."""
    failing: dict[str, float] = field(default_factory=dict)
    """Since when components have not been reached, or have failed again and again."""
    unacked: dict[str, float] = field(default_factory=dict)
    """Since when sources have had rows that are not acknowledged."""
    meters: Meters = field(default_factory=Meters)

    def component(self, name: str, now: float) -> dict[str, Json]:
        """Its state, why, and for how long it has been failing."""
        health = self.health.get(name, HealthStatus())
        failing = round(now - self.failing[name], 3) if name in self.failing else 0.0
        found = {"state": str(health.state), "reason": health.reason, "failing_secs": failing}
        return {**found, "retries": self.totals.retries[name]}

    def failed(self, source: str) -> dict[str, Json]:
        """Its tables that are set aside, and why."""
        return {
            table: {
                "code": known.code,
                "error": without_secrets(known.error),
                "hint": without_secrets(known.hint),
                "next_try": known.next_try,
            }
            for table, known in sorted(self.tables.get(source, {}).items())
            if known.state == "failed"
        }

    def copying(self, source: str, tables: Mapping[str, TableState], now: float) -> None:
        """Remember when each copy began, so that its pace says when it will end."""
        for table, known in tables.items():
            began = self.copies.get((source, table))
            if known.state != "seeding":
                self.copies.pop((source, table), None)
            elif began is None or began[0] != known.copy:
                self.copies[source, table] = (known.copy, now, known.rows)
        self.tables[source] = tables

    def all_sources(self, now: float, positions: Mapping[str, str], own: Mapping[str, Json]) -> dict[str, Json]:
        """`own`: what each source counts itself of its journal and its slot."""
        found = {}
        for name, rows in self.totals.read.items():
            part = self.component(f"source:{name}", now)
            tables = self.tables.get(name, {})
            failed = self.failed(name)
            if failed and part["state"] != HealthState.UNHEALTHY:
                why = f"; {part['reason']}" if part["reason"] else ""
                part |= {"state": str(HealthState.DEGRADED), "reason": f"{_failures(failed)}{why}"}
            states = {table: known.state for table, known in tables.items()}
            lag, unit = self.lag.get(name, (None, ""))
            copying = {table: self._copy(name, table, known, now) for table, known in tables.items()}
            found[name] = {
                "rows": rows,
                "rows_per_sec": self.meters[name].rates(now)[0],
                "lag": lag,
                "lag_unit": unit,
                "unacked_secs": self._unacked(name, own.get(f"source:{name}", {}), now),
                "position": positions.get(name, ""),
                "own": own.get(f"source:{name}", {}),
                "tables": {
                    "states": states,
                    "failed": failed,
                    "copying": {table: copy for table, copy in copying.items() if copy},
                    "rows": {table: known.rows for table, known in tables.items()},
                    "notes": {table: known.note for table, known in tables.items() if known.note},
                },
                **part,
            }
        return found

    def _unacked(self, source: str, own: Mapping[str, float], now: float) -> float:
        """Age of the oldest row that is not acknowledged: in an epoch, or waiting in the journal."""
        since = self.unacked.get(source)
        return round(max(own.get("journal_oldest_seconds", 0.0), 0.0 if since is None else now - since), 3)

    def _copy(self, source: str, table: str, known: TableState, now: float) -> Json:
        if (source, table) not in self.copies or known.state != "seeding":
            return None
        _, since, rows = self.copies[source, table]
        pace = (known.rows - rows) / (now - since) if now > since else 0.0
        left = None if known.estimate is None else max(0, known.estimate - known.rows)
        eta = None if left is None or pace <= 0 else round(left / pace, 1)
        return {"rows": known.rows, "estimate": known.estimate, "rows_per_sec": round(pace, 1), "eta_secs": eta}

    def all_sinks(self, now: float) -> dict[str, Json]:
        sinks: dict[str, Json] = {
            name: {"rows": 0, "bytes": 0, **self.component(f"sink:{name}", now), "topics": {}}
            for name in dict.fromkeys([*self.sinks, *(sink for sink, _ in self.totals.written)])
        }
        for (sink, topic), written in sorted(self.totals.written.items()):
            sinks[sink]["rows"] += written.rows
            sinks[sink]["bytes"] += written.bytes
            rows_per_sec, bytes_per_sec = self.meters[sink, topic].rates(now)
            sinks[sink]["topics"][topic] = {
                "rows": written.rows,
                "bytes": written.bytes,
                "rows_per_sec": rows_per_sec,
                "bytes_per_sec": bytes_per_sec,
                "discarded": written.discarded,
                "last_epoch": written.last_epoch,
            }
        return sinks


def most_behind(status: Mapping[str, Json]) -> dict[str, Json]:
    """The largest lag of each unit: rows cannot be compared with bytes."""
    told = [source for source in status["sources"].values() if source["lag"] is not None]
    units = ("rows", "bytes")
    return {unit: max((each["lag"] for each in told if each.get("lag_unit") == unit), default=None) for unit in units}


def named(connectors: Mapping[str, Json] | Iterable[str]) -> dict[str, Json]:
    """Connectors by name; of names alone, nothing."""
    return dict(connectors) if isinstance(connectors, Mapping) else dict.fromkeys(connectors)


def _failures(failed: Mapping[str, Json]) -> str:
    many = f"{len(failed):,} tables" if len(failed) > 1 else "1 table"
    first = [f"{table} ({why['code']} {why['error']})" for table, why in list(failed.items())[:_FAILED_NAMED]]
    more = f", and {len(failed) - _FAILED_NAMED:,} more" if len(failed) > _FAILED_NAMED else ""
    return f"{many} failed: {', '.join(first)}{more}"
