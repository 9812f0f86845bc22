"""
The metrics: every name, what it means, and which labels it has. The scrape, the page about operating, the Grafana dashboard
and the alert rules are all made from this list.

Labels are bounded. Connectors, sinks and phases come from the file and the code; of topics and tables at most
`MOST_VALUES` have a line of their own, and the others are added up as `other`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_VALUES = 200
"""Topics of one sink, or tables of one source, that have a line of their own in a scrape."""

OTHER = "other"
"""The label value of all the others together."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper edges of the buckets of times."""

PHASES = ("plan", "stage", "apply", "commit", "ack")
"""What an epoch goes through, in order."""


@dataclass(frozen=True)
class Metric:
    """One metric. Its name is as it is scraped: a counter's ends in `_total`."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, as expressions may use them."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.name,)


ROWS = Metric(
    "penstock_rows_total",
    "counter",
    "Rows of committed epochs: `in` per source, `out` per sink and topic.",
    ("direction", "connector", "topic"),
)
BYTES = Metric("penstock_bytes_total", "counter", "Bytes of committed epochs, as the sinks count them.", ROWS.labels)
EPOCHS = Metric("penstock_epochs_total", "counter", "Committed epochs.")
EPOCH_SECONDS = Metric(
    "penstock_epoch_seconds", "histogram", "Time of an epoch by phase: plan, stage, apply, commit, ack.", ("phase",)
)
LATENCY = Metric(
    "penstock_latency_seconds",
    "histogram",
    "From a row's commit in the source, or its arrival, to its being visible in the targets: the oldest row of each epoch.",
    ("connector",),
)
COMMITTED_AT = Metric(
    "penstock_last_commit_timestamp_seconds", "gauge", "When the last epoch was committed; 0 before the first."
)
QUIET = Metric("penstock_quiet_seconds", "gauge", "Time since the epoch in hand, or the start, made progress; else 0.")
LAG = Metric("penstock_lag", "gauge", "How far a source is behind, in rows or bytes.", ("connector", "unit"))
UNACKED = Metric(
    "penstock_unacked_seconds", "gauge", "Age of the oldest row of a source that is not acknowledged.", ("connector",)
)
SKIPPED = Metric("penstock_skipped_total", "counter", "Rows left out by `on_error` or `unrouted`.")
DEAD_LETTERS = Metric(
    "penstock_dead_letters_total", "counter", "Records kept as dead letters, by error code.", ("code",)
)
DISCARDED = Metric(
    "penstock_discarded_total",
    "counter",
    "Rows that `schema_evolution` left out of a sink, or took a value from.",
    ("connector", "topic"),
)
RETRIES = Metric("penstock_retries_total", "counter", "Failures that were tried again.", ("component",))
ERRORS = Metric("penstock_errors_total", "counter", "Errors by code.", ("code",))
STATE = Metric(
    "penstock_state", "gauge", "1 for the state that the pipeline, a source or a sink is in.", ("component", "state")
)
TABLE = Metric(
    "penstock_table", "gauge", "1 for the state that a captured table is in.", ("connector", "table", "state")
)
TABLES = Metric("penstock_tables", "gauge", "Captured tables by state.", ("connector", "state"))
COPIED = Metric("penstock_copied_rows", "gauge", "Rows that copies in hand have brought.", ("connector",))
TO_COPY = Metric("penstock_copy_estimate_rows", "gauge", "Rows that copies in hand will bring, about.", ("connector",))
JOURNAL_BYTES = Metric(
    "penstock_journal_bytes",
    "gauge",
    "Bytes in a source's journal: segments in which a row waits to be committed.",
    ("connector",),
)
JOURNAL_ROWS = Metric(
    "penstock_journal_rows", "gauge", "Rows in a source's journal that wait to be committed.", ("connector",)
)
JOURNAL_OLDEST = Metric("penstock_journal_oldest_seconds", "gauge", "Age of the oldest of these rows.", ("connector",))
JOURNAL_LIMIT = Metric(
    "penstock_journal_limit_bytes", "gauge", "Size at which the source is held back.", ("connector",)
)
JOURNAL_FSYNCS = Metric(
    "penstock_journal_fsyncs_total", "counter", "Times that the journal was synced to disk.", ("connector",)
)
JOURNAL_FSYNC_SECONDS = Metric(
    "penstock_journal_fsync_seconds_total", "counter", "Time that syncing the journal to disk took.", ("connector",)
)
SLOT_STATE = Metric(
    "penstock_slot_state",
    "gauge",
    "1 for the state that a source's replication slot is in: reserved, extended, unreserved, lost, missing or not_made.",
    ("connector", "state"),
)
SLOT_HELD = Metric(
    "penstock_slot_held_bytes", "gauge", "Bytes of log that the server keeps for the slot.", ("connector",)
)
SLOT_SAFE = Metric(
    "penstock_slot_safe_bytes", "gauge", "Bytes that can be written before the slot may be lost.", ("connector",)
)
EXPORTED = Metric(
    "penstock_exported_total",
    "counter",
    "Traces, metrics and events for collectors: `sent`, or `dropped` because one was down for too long.",
    ("exporter", "outcome"),
)
OWN = Metric("penstock_connector", "gauge", "What a connector counts itself.", ("component", "name"))
INFO = Metric("penstock_info", "gauge", "1.", ("pipeline", "version"))
UPTIME = Metric("penstock_uptime_seconds", "gauge", "Time since the start.")

METRICS: tuple[Metric, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
"""All of them, in the order of this file."""

CUSTOM = {
    metric.name.removeprefix("penstock_"): metric
    for metric in (
        *(JOURNAL_BYTES, JOURNAL_ROWS, JOURNAL_OLDEST, JOURNAL_LIMIT, JOURNAL_FSYNCS, JOURNAL_FSYNC_SECONDS),
        *(SLOT_HELD, SLOT_SAFE),
    )
}
"""Metrics of a source that come from its custom counters (`ConnectorMetrics.custom`), by the name that they have there."""

SLOT_STATES = ("reserved", "extended", "unreserved", "lost", "missing", "not_made")
"""States of a replication slot; a source counts `slot_<state>` as 1 for the one that it is in."""


def markdown() -> str:
    """The table of the page about operating."""
    lines = ["| metric | labels | meaning |", "|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        kind = "histogram: " if metric.kind == "histogram" else ""
        text = metric.text[0].lower() + metric.text[1:] if not metric.text.startswith("1") else metric.text
        lines.append(f"| `{metric.name}` | {labels} | {kind}{text.removesuffix('.')} |")
    return "\n".join(lines)
