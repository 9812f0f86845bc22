"""The status in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.durable import Json
from penstock.runtime.telemetry import names
from penstock.runtime.telemetry.names import METRICS, MOST_VALUES, OTHER, SECONDS, Metric
from penstock.source import ConnectorMetrics

Sample = tuple[Metric, tuple[str, ...], float]
"""One number: its metric and the values of its labels."""


@dataclass(frozen=True)
class Distribution:
    """One line of a histogram: how many values are in each bucket, the last of which has no upper edge, and their sum."""

    metric: Metric
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    sum: float


class Metrics:
    """
    Turns the status into metrics when they are scraped, so that there is one set of counters.

    `counted` gives what each connector counts itself, by component.
    """

    def __init__(self, status: Callable[[], Json], counted: Callable[[], Mapping[str, ConnectorMetrics]]) -> None:
        from prometheus_client import CollectorRegistry, Histogram

        self._status = status
        self._counted = counted
        self._topics: dict[str, dict[str, None]] = {}
        """Per sink the topics that have a line of their own: they keep it, or `other` would fall and leap."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._epochs, self._latency = (
            Histogram(metric.name, metric.text, metric.labels, registry=self._registry, buckets=SECONDS)
            for metric in (names.EPOCH_SECONDS, names.LATENCY)
        )
        self._registry.register(self)

    def observe(self, seconds: Mapping[str, float], latency: Mapping[str, float] | None = None) -> None:
        """An epoch spent so much time in each phase, and its oldest row of each source was visible after this time."""
        for phase, value in seconds.items():
            self._epochs.labels(phase).observe(value)
        for source, value in (latency or {}).items():
            self._latency.labels(source).observe(value)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Any]:
        """Asked for by the registry."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        families = {
            metric: (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name.removesuffix("_total"), metric.text, labels=list(metric.labels)
            )
            for metric in METRICS
            if metric.kind != "histogram"
        }
        for metric, labels, value in self.samples():
            families[metric].add_metric(list(labels), value)
        yield from families.values()

    def histograms(self) -> Iterator[Distribution]:
        """Every histogram, a line per set of labels."""
        for metric, kept in ((names.EPOCH_SECONDS, self._epochs), (names.LATENCY, self._latency)):
            for family in kept.collect():
                lines: dict[tuple[str, ...], dict[str, Any]] = {}
                for sample in family.samples:
                    labels = tuple(sample.labels[label] for label in metric.labels)
                    line = lines.setdefault(labels, {"below": []})
                    if sample.name.endswith("_bucket"):
                        line["below"].append(int(sample.value))
                    elif sample.name.endswith("_sum"):
                        line["sum"] = sample.value
                for labels, line in lines.items():
                    counts = tuple(b - a for a, b in pairwise([0, *line["below"]]))
                    yield Distribution(metric, labels, counts, line["sum"])

    def samples(self) -> Iterator[Sample]:
        """Every number but those of histograms."""
        status, counted = self._status(), self._counted()
        yield names.INFO, (status["pipeline"], status["version"]), 1
        yield from _rows(status, self._topics)
        yield from _health(status)
        yield from _sources(status)
        for metric, key in ((names.EPOCHS, "epochs"), (names.SKIPPED, "skipped"), (names.UPTIME, "uptime_secs")):
            yield metric, (), status[key]
        yield names.COMMITTED_AT, (), status["committed_at"]
        waits = status["epoch"] or status["state"] == "starting"
        yield names.QUIET, (), status["quiet_secs"] if waits else 0
        for code, count in status["dead_letters_by_code"].items():
            yield names.DEAD_LETTERS, (code,), count
        for exporter, about in status["exports"].items():
            for what in ("sent", "dropped"):
                yield names.EXPORTED, (exporter, what), about[what]
        yield from _own(counted)


def bounded(values: Iterable[tuple[str, float]], named: Mapping[str, None]) -> list[tuple[str, float]]:
    """Those that have a line of their own, and the sum of the others."""
    listed = list(values)
    rest = [value for name, value in listed if name not in named]
    return [*((name, value) for name, value in listed if name in named), *([(OTHER, sum(rest))] if rest else [])]


def _rows(status: Json, lines: dict[str, dict[str, None]]) -> Iterator[Sample]:
    for name, source in status["sources"].items():
        yield names.ROWS, ("in", name, ""), source["rows"]
    for name, sink in status["sinks"].items():
        named = lines.setdefault(name, {})
        for topic in sink["topics"]:
            if len(named) < MOST_VALUES:
                named.setdefault(topic)
        for key, metric in (("rows", names.ROWS), ("bytes", names.BYTES)):
            for topic, value in bounded(((topic, each[key]) for topic, each in sink["topics"].items()), named):
                yield metric, ("out", name, topic), value
        for topic, value in bounded(((topic, each["discarded"]) for topic, each in sink["topics"].items()), named):
            yield names.DISCARDED, (name, topic), value


def _health(status: Json) -> Iterator[Sample]:
    for component, count in status["retries"].items():
        yield names.RETRIES, (component,), count
    for code, count in status["errors_by_code"].items():
        yield names.ERRORS, (code,), count
    yield names.STATE, ("pipeline", status["state"]), 1
    for kind in ("source", "sink"):
        for name, part in status[f"{kind}s"].items():
            yield names.STATE, (f"{kind}:{name}", part["state"]), 1


def _sources(status: Json) -> Iterator[Sample]:
    for name, source in status["sources"].items():
        if source["lag"] is not None:
            yield names.LAG, (name, source["lag_unit"]), source["lag"]
        yield names.UNACKED, (name,), source["unacked_secs"]
        states = source["tables"]["states"]
        for state in sorted(set(states.values())):
            yield names.TABLES, (name, state), sum(each == state for each in states.values())
        shown = sorted(states.items(), key=lambda item: (item[1] != "failed", item[0]))[:MOST_VALUES]
        for table, state in shown:
            yield names.TABLE, (name, table, state), 1
        copying = source["tables"]["copying"]
        if copying:
            yield names.COPIED, (name,), sum(each["rows"] for each in copying.values())
            yield names.TO_COPY, (name,), sum(each["estimate"] or each["rows"] for each in copying.values())


def _own(counted: Mapping[str, ConnectorMetrics]) -> Iterator[Sample]:
    for component, metrics in counted.items():
        if metrics == ConnectorMetrics():  # it counts nothing: noughts would say that nothing came
            continue
        connector = component.partition(":")[2]
        known = {f"slot_{state}": state for state in names.SLOT_STATES}
        numbers = {
            "records_total": metrics.records_total,
            "bytes_total": metrics.bytes_total,
            "errors_total": metrics.errors_total,
            **({} if metrics.lag is None else {"lag": metrics.lag}),
            **metrics.custom,
        }
        for name, value in numbers.items():
            if name in names.CUSTOM:
                yield names.CUSTOM[name], (connector,), value
            elif name in known:
                yield names.SLOT_STATE, (connector, known[name]), value
            else:
                yield names.OWN, (component, name), value
