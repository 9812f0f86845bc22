"""What a running pipeline tells about itself: counters, states, and the status that every front shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.sink import Topic, WriteResult


@dataclass(frozen=True)
class EpochReport:
    """What one committed epoch did."""

    number: int
    rows_in: Mapping[str, int] = field(default_factory=dict)
    """Rows read, per source."""
    rows_out: Mapping[tuple[str, Topic], WriteResult] = field(default_factory=dict)
    """Rows written, per sink and topic."""
    skipped: int = 0
    """Rows left out by `on_error = "skip"` and `unrouted = "skip"`."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent in plan, stage, prepare, commit, finish (the committed manifest) and ack."""
    recovered: bool = False
