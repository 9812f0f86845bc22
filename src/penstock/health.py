"""How a connector is, in its own words: health, counters, findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class HealthState(StrEnum):
    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True)
class HealthStatus:
    """A connector's own word about itself; everything but healthy carries a reason."""

    state: HealthState = HealthState.UNKNOWN
    reason: str = ""

    @classmethod
    def healthy(cls) -> HealthStatus:
        return cls(HealthState.HEALTHY)

    @classmethod
    def degraded(cls, reason: str) -> HealthStatus:
        return cls(HealthState.DEGRADED, reason)

    @classmethod
    def unhealthy(cls, reason: str) -> HealthStatus:
        return cls(HealthState.UNHEALTHY, reason)

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


@dataclass(frozen=True)
class ConnectorMetrics:
    """Counters a connector keeps itself; the runtime counts rows and bytes for everyone."""

    records_total: int = 0
    bytes_total: int = 0
    errors_total: int = 0
    lag: int | None = None
    custom: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One line of `penstock check`: `ok`, or what is wrong and the command or SQL that fixes it."""

    ok: bool
    what: str
    fix: str = ""
