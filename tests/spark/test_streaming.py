"""Routes whose query keeps its state across epochs, wherever the run ends in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spark_connectors import Keyed, KeyedConfig

from penstock import failpoints
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.errors import ConfigError, FatalError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Route, Router
from penstock.sink import DeliveryGuarantee
from penstock.spark.tasks import Wanted

ROWS, KEYS = 120, 3
COUNTS = "SELECT key, count(*) AS n FROM input GROUP BY key"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Pipeline]]:
    def build(route: Route, rows: int = ROWS) -> Pipeline:
        return Pipeline(
            "streaming-test",
            sources={"source": Keyed(KeyedConfig(rows=rows, splits=2, keys=KEYS))},
            sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
            router=Router((route,), ("lake",)),
            delivery=DeliveryGuarantee.EXACTLY_ONCE,
            processing=Processing(state_dir=tmp_path / "state", max_retries=0, max_epoch_rows=60),
        )

    yield build
    failpoints.arm(None)


def updates(tmp_path: Path) -> list[tuple[str, int]]:
    """Every count that the query handed on, in order."""
    table = read_published(tmp_path / "lake" / "rows").to_pydict()
    return sorted(zip(table["key"], table["n"], strict=True))


EXPECTED = sorted((f"key-{key}", n) for key in range(KEYS) for n in (20, 40))


@pytest.mark.every_spark
def test_an_aggregate_goes_on_from_epoch_to_epoch_and_from_run_to_run(build: Any, spark: Any, tmp_path: Path) -> None:
    route = Route(sql=COUNTS, streaming=True, output_mode="update")
    assert build(route, rows=60).run(spark=spark, drain=True).epochs == 1
    assert build(route).run(spark=spark, drain=True).rows_in == 60
    assert updates(tmp_path) == EXPECTED
    kept = [file for file in (tmp_path / "state" / "streaming").rglob("*") if file.is_file()]
    assert kept
    assert {file.stat().st_mode & 0o777 for file in kept} == {0o600}


def test_only_the_columns_that_a_query_uses_are_handed_to_it(
    build: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def wanted(target: Any, schema: Any, *rest: Any) -> Wanted:
        asked.append(schema.names)
        return Wanted(target, schema, *rest)

    monkeypatch.setattr("penstock.spark.engine.Wanted", wanted)
    build(Route(sql=COUNTS, streaming=True, output_mode="update")).run(spark=spark, drain=True)
    assert asked[-1] == ["key"]
    assert updates(tmp_path) == EXPECTED


@pytest.mark.parametrize(
    "step",
    [
        "stage.after",
        "commit.after",
        *(pytest.param(step, marks=pytest.mark.soak) for step in ("prepare.after", "commit.before", "committed.after")),
    ],
)
def test_a_run_that_ends_at_any_step_neither_loses_nor_doubles_state(
    build: Any, spark: Any, tmp_path: Path, step: str
) -> None:
    route = Route(sql=COUNTS, streaming=True, output_mode="update")
    failpoints.arm(f"{step}=fatal@2")
    with pytest.raises(FatalError, match="failpoint"):
        build(route).run(spark=spark, drain=True)
    failpoints.arm(None)
    build(route).run(spark=spark, drain=True)
    assert updates(tmp_path) == EXPECTED


def test_a_changed_query_is_refused_with_the_choices(build: Any, spark: Any) -> None:
    build(Route(sql=COUNTS, streaming=True, output_mode="update"), rows=60).run(spark=spark, drain=True)
    changed = Route(sql=COUNTS + " HAVING count(*) > 1", streaming=True, output_mode="update")
    with pytest.raises(ConfigError, match=r"PEN-1052 the streaming query of /rows changed") as refused:
        build(changed).run(spark=spark, drain=True)
    assert "put the query back" in refused.value.hint


@pytest.mark.parametrize(
    ("route", "says"),
    [
        (Route(sql="SELECT row FROM input ORDER BY row", streaming=True), "cannot be a streaming query"),
        (Route(sql=COUNTS, streaming=True), "cannot be a streaming query"),
    ],
    ids=["a sort", "an aggregate that is never final"],
)
def test_what_cannot_be_a_streaming_query_is_refused_before_the_first_epoch(
    build: Any, spark: Any, tmp_path: Path, route: Route, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"PEN-1012 .*{says}"):
        build(route).run(spark=spark, drain=True)
    assert not list((tmp_path / "state" / "epochs").glob("*.json"))


def windows(rows: Any) -> Any:
    from pyspark.sql import functions as f

    timed = rows.withColumn("at", f.timestamp_seconds("row")).withWatermark("at", "0 seconds")
    return timed.groupBy(f.window("at", "30 seconds").alias("w")).count().selectExpr("w.start AS start", "count")


def test_windows_come_out_once_when_the_watermark_has_passed_them(build: Any, spark: Any, tmp_path: Path) -> None:
    build(Route(transform=f"{__name__}:windows", streaming=True)).run(spark=spark, drain=True)
    table = read_published(tmp_path / "lake" / "rows").to_pydict()
    assert table["count"] == [30, 30, 30], "the fourth window may still get rows"
