"""The status in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.durable import Json
from penstock.source import ConnectorMetrics

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

JOURNAL = {
    "journal_bytes": "Bytes in a source's journal that wait to be committed.",
    "journal_rows": "Rows in a source's journal that wait to be committed.",
    "journal_oldest_seconds": "Age of the oldest row in a source's journal that waits to be committed.",
    "journal_fsyncs_total": "Times that a source's journal was synced to disk.",
    "journal_fsync_seconds_total": "Time that syncing a source's journal to disk took.",
}
"""What an ingest counts of its journal, by its name among the custom counters of `ConnectorMetrics`."""


class Metrics:
    """
    Turns the status into metrics when they are scraped, so that there is one set of counters.

    `counted` gives what each connector counts itself, by component.
    """

    def __init__(self, status: Callable[[], Json], counted: Callable[[], Mapping[str, ConnectorMetrics]]) -> None:
        from prometheus_client import CollectorRegistry, Histogram

        self._status = status
        self._counted = counted
        self._registry = CollectorRegistry(auto_describe=False)
        self._seconds = Histogram(
            "penstock_epoch_seconds", "Time of an epoch by phase.", ["phase"], registry=self._registry, buckets=_BUCKETS
        )
        self._registry.register(self)

    def observe(self, seconds: Mapping[str, float]) -> None:
        """An epoch spent so much time in each phase."""
        for phase, value in seconds.items():
            self._seconds.labels(phase).observe(value)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Any]:
        """Asked for by the registry."""
        from prometheus_client.metrics_core import CounterMetricFamily as Count
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

        status = self._status()
        info = Gauge("penstock_info", "The pipeline and the version that runs it.", labels=["pipeline", "version"])
        info.add_metric([status["pipeline"], status["version"]], 1)
        yield info
        yield from _rows(status)
        yield from _health(status)
        lag = Gauge("penstock_lag", "How far a source is behind, in its own unit.", labels=["connector"])
        for name, source in status["sources"].items():
            if source["lag"] is not None:
                lag.add_metric([name], source["lag"])
        yield lag
        yield Count("penstock_epochs", "Committed epochs.", value=status["epochs"])
        yield Count("penstock_skipped", "Rows left out by policy.", value=status["skipped"])
        yield Count("penstock_dead_letters", "Records kept as dead letters.", value=status["dead_letters"])
        yield Gauge("penstock_uptime_seconds", "Time since the start.", value=status["uptime_secs"])
        yield Gauge(
            "penstock_last_commit_timestamp_seconds",
            "When the last epoch was committed; 0 before the first.",
            value=status["committed_at"],
        )
        yield from _own(self._counted())


def _rows(status: Json) -> Iterator[Any]:
    from prometheus_client.metrics_core import CounterMetricFamily as Count

    where = ["direction", "connector", "topic"]
    rows = Count("penstock_rows", "Rows of committed epochs.", labels=where)
    discarded = Count(
        "penstock_discarded",
        "Rows that `schema_evolution` left out or took a value from.",
        labels=["connector", "topic"],
    )
    size = Count("penstock_bytes", "Bytes of committed epochs, as the sinks count them.", labels=where)
    for name, source in status["sources"].items():
        rows.add_metric(["in", name, ""], source["rows"])
    for name, sink in status["sinks"].items():
        for topic, written in sink["topics"].items():
            rows.add_metric(["out", name, topic], written["rows"])
            size.add_metric(["out", name, topic], written["bytes"])
            discarded.add_metric([name, topic], written["discarded"])
    yield from (rows, size, discarded)


def _health(status: Json) -> Iterator[Any]:
    from prometheus_client.metrics_core import CounterMetricFamily as Count
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    retries = Count("penstock_retries", "Failures that were tried again.", labels=["component"])
    for component, count in status["retries"].items():
        retries.add_metric([component], count)
    errors = Count("penstock_errors", "Errors by code.", labels=["code"])
    for code, count in status["errors_by_code"].items():
        errors.add_metric([code], count)
    state = Gauge("penstock_state", "1 for the state a component is in.", labels=["component", "state"])
    state.add_metric(["pipeline", status["state"]], 1)
    for kind in ("source", "sink"):
        for name, part in status[f"{kind}s"].items():
            state.add_metric([f"{kind}:{name}", part["state"]], 1)
    tables = Gauge("penstock_table", "1 for the state a table is in.", labels=["connector", "table", "state"])
    for name, source in status["sources"].items():
        for table, its_state in source["tables"]["states"].items():
            tables.add_metric([name, table, its_state], 1)
    yield from (retries, errors, state, tables)


def _own(counted: Mapping[str, ConnectorMetrics]) -> Iterator[Any]:
    from prometheus_client.metrics_core import CounterMetricFamily as Count
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    journal = {
        name: (Count if name.endswith("_total") else Gauge)(
            f"penstock_{name.removesuffix('_total')}", text, labels=["connector"]
        )
        for name, text in JOURNAL.items()
    }
    own = Gauge("penstock_connector", "What a connector counts itself.", labels=["component", "name"])
    for component, metrics in counted.items():
        for name in JOURNAL.keys() & metrics.custom.keys():
            journal[name].add_metric([component.partition(":")[2]], metrics.custom[name])
        custom = {name: value for name, value in metrics.custom.items() if name not in JOURNAL}
        if metrics == ConnectorMetrics():  # it counts nothing: noughts would say that nothing came
            continue
        numbers = {
            "records_total": metrics.records_total,
            "bytes_total": metrics.bytes_total,
            "errors_total": metrics.errors_total,
            **({} if metrics.lag is None else {"lag": metrics.lag}),
            **custom,
        }
        for name, value in numbers.items():
            own.add_metric([component, name], value)
    yield from (*journal.values(), own)
