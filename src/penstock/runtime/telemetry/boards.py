"""A Grafana dashboard and Prometheus alert rules, made from the list of metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.durable import Json
from penstock.runtime.telemetry import names
from penstock.runtime.telemetry.names import Metric


@dataclass(frozen=True)
class Panel:
    """One graph: a title, a unit that Grafana knows, and expressions with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    wide: bool = False


@dataclass(frozen=True)
class Alert:
    """One rule: when it fires, for how long it must have held, what is wrong and what to do."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str
    description: str


def _rate(metric: Metric, by: str = "", where: str = "") -> str:
    assert metric.kind == "counter"
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric.name}{{{_selector(where)}}}[$__rate_interval]))"


def _now(metric: Metric, where: str = "") -> str:
    return f"{metric.name}{{{_selector(where)}}}"


def _quantile(metric: Metric, share: float, by: str = "") -> str:
    assert metric.kind == "histogram"
    series = f"rate({metric.name}_bucket{{{_selector()}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({', '.join(['le', *([by] if by else [])])}) ({series}))"


def _selector(where: str = "") -> str:
    return ", ".join(filter(None, ['instance=~"$instance"', where]))


PANELS = (
    Panel("Rows in and out", "rowsps", ((_rate(names.ROWS, "direction"), "{{direction}}"),), wide=True),
    Panel("Rows by topic", "rowsps", ((_rate(names.ROWS, "topic", 'direction="out"'), "{{topic}}"),)),
    Panel("Bytes by sink", "Bps", ((_rate(names.BYTES, "connector"), "{{connector}}"),)),
    Panel("Lag", "short", ((_now(names.LAG), "{{connector}}, {{unit}}"),)),
    Panel(
        "Commit to visible, oldest row of each epoch",
        "s",
        ((_quantile(names.LATENCY, 0.5), "median"), (_quantile(names.LATENCY, 0.99), "99 %")),
    ),
    Panel("Time of an epoch by phase, median", "s", ((_quantile(names.EPOCH_SECONDS, 0.5, "phase"), "{{phase}}"),)),
    Panel("Epochs per second", "ops", ((_rate(names.EPOCHS), "epochs"),)),
    Panel("Oldest row that is not acknowledged", "s", ((_now(names.UNACKED), "{{connector}}"),)),
    Panel(
        "Journal",
        "bytes",
        ((_now(names.JOURNAL_BYTES), "{{connector}}"), (_now(names.JOURNAL_LIMIT), "{{connector}} limit")),
    ),
    Panel(
        "Time of an fsync of the journal",
        "s",
        (
            (
                f"{_rate(names.JOURNAL_FSYNC_SECONDS, 'connector')} / {_rate(names.JOURNAL_FSYNCS, 'connector')}",
                "{{connector}}",
            ),
        ),
    ),
    Panel("Dead letters by code", "ops", ((_rate(names.DEAD_LETTERS, "code"), "{{code}}"),)),
    Panel("Skipped and discarded", "ops", ((_rate(names.SKIPPED), "skipped"), (_rate(names.DISCARDED), "discarded"))),
    Panel("Retries", "ops", ((_rate(names.RETRIES, "component"), "{{component}}"),)),
    Panel("Errors by code", "ops", ((_rate(names.ERRORS, "code"), "{{code}}"),)),
    Panel("Tables by state", "short", ((_now(names.TABLES), "{{connector}} {{state}}"),)),
    Panel(
        "Copies of tables",
        "percentunit",
        ((f"{_now(names.COPIED)} / {_now(names.TO_COPY)}", "{{connector}}"),),
    ),
    Panel(
        "Log that replication slots hold",
        "bytes",
        ((_now(names.SLOT_HELD), "{{connector}}"), (_now(names.SLOT_SAFE), "{{connector}} until it may be lost")),
    ),
    Panel("States", "short", ((_now(names.STATE), "{{component}} {{state}}"),), wide=True),
)

ALERTS = (
    Alert(
        "PenstockGone",
        f"max by (instance, pipeline) (max_over_time({names.INFO.name}[1h])) unless on (instance, pipeline) {names.INFO.name}",
        5,
        "critical",
        "{{ $labels.pipeline }} on {{ $labels.instance }} does not answer any more",
        "It was killed, has failed or was stopped, and no other rule can see that: `penstock status FILE` says which.",
    ),
    Alert(
        "PenstockUnhealthy",
        f'{names.STATE.name}{{component="pipeline", state=~"unhealthy|failed"}} == 1',
        1,
        "critical",
        "The pipeline on {{ $labels.instance }} is {{ $labels.state }}",
        "Its reason is what `penstock status FILE` and /healthz say.",
    ),
    Alert(
        "PenstockDegraded",
        f'{names.STATE.name}{{component="pipeline", state="degraded"}} == 1',
        10,
        "warning",
        "The pipeline on {{ $labels.instance }} has been degraded for ten minutes",
        "`penstock status FILE` names the part that is, and why.",
    ),
    Alert(
        "PenstockStuck",
        f"{names.QUIET.name} > 300",
        1,
        "critical",
        "An epoch on {{ $labels.instance }} has made no progress for five minutes",
        "Look at `penstock status FILE` for its phase, and at spark.log in the state directory.",
    ),
    Alert(
        "PenstockLagGrows",
        f"deriv({names.LAG.name}[15m]) > 0 and {names.LAG.name} > 1e6",
        30,
        "warning",
        "{{ $labels.connector }} is falling further back",
        "Rows come faster than they are committed: see the phases of an epoch for what takes the time.",
    ),
    Alert(
        "PenstockJournalFills",
        f"{names.JOURNAL_BYTES.name} / {names.JOURNAL_LIMIT.name} > 0.9",
        5,
        "warning",
        "The journal of {{ $labels.connector }} is more than 90 % full",
        "At its limit the source is held back. See whether epochs are committed, and how long the sinks take.",
    ),
    Alert(
        "PenstockNotAcknowledged",
        f"{names.UNACKED.name} > 900",
        5,
        "warning",
        "{{ $labels.connector }} has rows that have waited for a quarter of an hour",
        "Until they are acknowledged the outside system keeps them: a database its log, a broker its queue.",
    ),
    Alert(
        "PenstockDeadLetters",
        # A code's first letter is no increase: before it there was nothing.
        f"increase({names.DEAD_LETTERS.name}[15m]) > 0 "
        f"or ({names.DEAD_LETTERS.name} unless {names.DEAD_LETTERS.name} offset 15m) > 0",
        0,
        "warning",
        "Records with {{ $labels.code }} were kept as dead letters",
        "`penstock dlq show FILE --sample 3` shows them; after a fix `penstock dlq replay FILE` sends them again.",
    ),
    Alert(
        "PenstockTableFailed",
        f'{names.TABLES.name}{{state="failed"}} > 0',
        15,
        "warning",
        "{{ $value }} tables of {{ $labels.connector }} are set aside",
        "`penstock tables show FILE` names them and says what to do.",
    ),
    Alert(
        "PenstockSlotAtRisk",
        f'{names.SLOT_STATE.name}{{state=~"unreserved|lost|missing"}} == 1',
        5,
        "critical",
        "The replication slot of {{ $labels.connector }} is {{ $labels.state }}",
        "Once it is lost every table is copied again. Start the pipeline, or raise max_slot_wal_keep_size.",
    ),
    Alert(
        "PenstockSlowVisible",
        f"histogram_quantile(0.99, sum by (le, connector) (rate({names.LATENCY.name}_bucket[10m]))) > 60",
        15,
        "warning",
        "Rows of {{ $labels.connector }} take more than a minute to become visible",
        "The time of an epoch by phase says where: stage is reading and writing, apply and commit are the sinks.",
    ),
    Alert(
        "PenstockExportDropped",
        f'increase({names.EXPORTED.name}{{outcome="dropped"}}[15m]) > 0',
        5,
        "warning",
        "{{ $labels.exporter }} does not get all that is sent to it",
        "Its collector is down or refuses what it gets; the log says why. Rows are not affected.",
    ),
)


def expressions() -> Iterator[str]:
    """Every expression of the dashboard and of the rules."""
    yield from (expression for panel in PANELS for expression, _ in panel.queries)
    yield from (alert.expression for alert in ALERTS)


def dashboard() -> str:
    """The dashboard as JSON that Grafana imports."""
    panels: list[Json] = []
    x = y = 0
    for number, panel in enumerate(PANELS, 1):
        width = 24 if panel.wide else 12
        if x + width > 24:
            x, y = 0, y + 8
        panels.append(_panel(number, panel, {"x": x, "y": y, "w": width, "h": 8}))
        x += width
    source = {"type": "prometheus", "uid": "${datasource}"}
    instances = {
        "name": "instance",
        "label": "instance",
        "type": "query",
        "datasource": source,
        "query": f"label_values({names.INFO.name}, instance)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    board = {
        "title": "Penstock",
        "uid": "penstock",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["penstock"],
        "templating": {
            "list": [
                {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
                instances,
            ]
        },
        "panels": panels,
    }
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def _panel(number: int, panel: Panel, place: Json) -> Json:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "title": panel.title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + place), "datasource": source, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def alert_rules() -> str:
    """The rules as a file for Prometheus' `rule_files`."""
    lines = ["# Written by `python -m penstock.reference docs`; edit runtime/telemetry/boards.py.", "groups:"]
    lines += ["  - name: penstock", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.minutes}m",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.description)}",
        ]
    return "\n".join(lines) + "\n"
