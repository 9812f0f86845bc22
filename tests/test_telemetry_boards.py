"""The list of metrics, the dashboard and alert rules that are made from it, and the bounds of labels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.runtime.epochs import EpochReport
from penstock.runtime.telemetry import Telemetry, boards, names
from penstock.sink import WriteResult
from penstock.source import ConnectorMetrics
from penstock.tables import TableState

ROOT = Path(__file__).parent.parent


@pytest.fixture
def busy() -> Telemetry:
    """One of which every metric has a value."""
    telemetry = Telemetry("busy", sources=["orders"], sinks=["lake"])
    telemetry.counters["source:orders"] = lambda: ConnectorMetrics(
        custom={**dict.fromkeys(names.CUSTOM, 1.0), "slot_reserved": 1.0, "tables_active": 2.0}
    )
    telemetry.phase(1, "stage")
    telemetry.epoch(
        EpochReport(
            number=1,
            rows_in={"orders": 10},
            rows_out={("lake", f"/t{number:04d}"): WriteResult(1, 10) for number in range(names.MOST_VALUES + 50)},
            letters={"/t0001": 3},
            codes={"PEN-3001": 2},
            oldest={"orders": 0.0},
            seconds=dict.fromkeys(names.PHASES, 0.1),
        )
    )
    tables = {f"public.t{number}": TableState("active") for number in range(names.MOST_VALUES + 50)}
    telemetry.tables("orders", {**tables, "public.z": TableState("failed", code="PEN-4001", error="no")})
    telemetry.tables("orders", {**tables, "public.z": TableState("seeding", rows=5, estimate=10)})
    telemetry.retry("source:orders", "away", 0.1)
    telemetry.lag("orders", 5)
    telemetry.exports = lambda: {"traces": {"sent": 5, "dropped": 1}}
    return telemetry


def scraped(telemetry: Telemetry) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in telemetry.metrics().decode().splitlines():
        if not line.startswith("#"):
            found.setdefault(re.split(r"[{ ]", line)[0], []).append(line)
    return found


def test_every_metric_of_the_list_is_scraped_and_no_other(busy: Telemetry) -> None:
    listed = {series for metric in names.METRICS for series in metric.series}
    found = {name for name in scraped(busy) if not name.endswith("_created")}
    assert found == listed


def test_a_metric_has_the_labels_of_the_list(busy: Telemetry) -> None:
    lines = scraped(busy)
    for metric in names.METRICS:
        for series in metric.series:
            labels = set(re.findall(r"(\w+)=\"", lines[series][0])) - {"le"}
            assert labels == set(metric.labels), series


def test_labels_are_bounded_and_nothing_is_left_out_of_the_sum(busy: Telemetry) -> None:
    rows = [line for line in scraped(busy)["penstock_rows_total"] if 'direction="out"' in line]
    assert len(rows) == names.MOST_VALUES + 1
    assert sum(float(line.rpartition(" ")[2]) for line in rows) == names.MOST_VALUES + 50
    assert any('topic="other"' in line for line in rows)
    assert len(scraped(busy)["penstock_table"]) == names.MOST_VALUES


def test_a_topic_keeps_its_line_so_that_no_counter_falls(busy: Telemetry) -> None:
    def lines() -> dict[str, float]:
        found = {}
        for line in scraped(busy)["penstock_rows_total"]:
            if 'direction="out"' in line:
                found[re.findall(r'topic="([^"]*)"', line)[0]] = float(line.rpartition(" ")[2])
        return found

    before = lines()
    first = {("lake", f"/a{number:04d}"): WriteResult(7, 10) for number in range(50)}
    busy.epoch(EpochReport(number=2, rows_in={"orders": 350}, rows_out=first))
    after = lines()
    assert set(after) == set(before)
    assert {topic: rows - before[topic] for topic, rows in after.items() if rows != before[topic]} == {"other": 350}


def test_a_pipeline_that_is_killed_and_a_first_letter_of_its_code_raise_an_alert() -> None:
    """What is not there any more, or was not there before, moves no rate: such rules compare with an earlier time."""
    rules = {alert.name: alert.expression for alert in boards.ALERTS}
    assert re.search(r"max_over_time\(penstock_info\[1h\]\)\) unless .* penstock_info$", rules["PenstockGone"])
    assert "penstock_dead_letters_total unless penstock_dead_letters_total offset 15m" in rules["PenstockDeadLetters"]


def test_letters_without_a_known_code_are_counted_too(busy: Telemetry) -> None:
    assert sorted(scraped(busy)["penstock_dead_letters_total"]) == [
        'penstock_dead_letters_total{code="PEN-3001"} 2.0',
        'penstock_dead_letters_total{code="unknown"} 1.0',
    ]


@pytest.mark.parametrize("expression", list(boards.expressions()))
def test_an_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    by_series = {series: metric for metric in names.METRICS for series in metric.series}
    used = re.findall(r"\bpenstock_\w+", expression)
    assert used
    assert set(used) <= set(by_series)
    for series, selector in re.findall(r"(penstock_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*=~?", selector)) - {"instance"}
        assert labels <= set(by_series[series].labels), expression
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert set(by.split(", ")) - {"le", "instance"} <= {
            label for series in used for label in by_series[series].labels
        }
    assert expression.count("(") == expression.count(")")


def test_every_metric_is_on_the_dashboard_or_in_a_rule_or_says_why_not() -> None:
    used = {name for expression in boards.expressions() for name in re.findall(r"\bpenstock_\w+", expression)}
    unused = {metric.name for metric in names.METRICS if not used & set(metric.series)}
    assert unused == {
        "penstock_last_commit_timestamp_seconds",  # an idle pipeline commits nothing
        "penstock_uptime_seconds",
        "penstock_table",  # one line per table: for a look, not for a graph
        "penstock_connector",  # each connector's own
        "penstock_journal_rows",  # its bytes are shown
        "penstock_journal_oldest_seconds",  # part of penstock_unacked_seconds
    }


def test_the_dashboard_is_json_with_a_place_for_each_panel() -> None:
    board = json.loads((ROOT / "docs/grafana/dashboard.json").read_text())
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(boards.PANELS) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])


def test_an_alert_says_what_to_do() -> None:
    for alert in boards.ALERTS:
        assert alert.summary
        assert len(alert.description) > 20
        assert alert.severity in ("warning", "critical")
