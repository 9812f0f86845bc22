"""What Spark adds to the protocol: tasks, SQL, lanes by key, errors that come back as text, other people's sessions."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spark_connectors import Apart, AppliesElsewhere, Keyed, KeyedConfig, Picky, Wide

import penstock
from penstock.connectors.files import Files, FilesConfig
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.generator import Generator, GeneratorConfig
from penstock.errors import ConfigError, DataError, FatalError, RetryableError, SchemaError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Route, Router
from penstock.runtime.supervisor import Summary
from penstock.runtime.telemetry.ports import listening
from penstock.sink import DeliveryGuarantee
from penstock.spark import SparkEngine
from penstock.testing import MemorySinkConfig


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Pipeline]:
    def build(source: Any, *routes: Route, **processing: Any) -> Pipeline:
        settings = {"state_dir": tmp_path / "state", "max_retries": 0, **processing}
        return Pipeline(
            "spark-test",
            sources={"source": source},
            sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
            router=Router(routes, ("lake",)),
            delivery=DeliveryGuarantee.EXACTLY_ONCE,
            processing=Processing(**settings),
        )

    return build


@pytest.fixture
def drained(build: Callable[..., Pipeline], spark: Any) -> Callable[..., Summary]:
    return lambda *arguments, **options: build(*arguments, **options).run(spark=spark, drain=True)


def rows(tmp_path: Path, topic: str = "rows") -> pa.Table:
    return read_published(tmp_path / "lake" / topic)


def test_sparks_own_page_is_off_and_its_ports_are_of_this_machine(spark: Any) -> None:
    assert spark.sparkContext.uiWebUrl is None
    listens = listening(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    assert listens
    assert {each["address"] for each in listens} == {"127.0.0.1"}


@pytest.mark.every_spark
def test_every_row_arrives_once_over_many_epochs_and_streams(drained: Any, tmp_path: Path) -> None:
    summary = drained(Generator(GeneratorConfig(rows=5000, streams=("a", "b"), batch_rows=512)), max_epoch_rows=3000)
    assert summary.epochs == 4
    assert summary.rows_in == summary.rows_out == 10_000
    for stream in "ab":
        assert sorted(rows(tmp_path, stream)["id"].to_pylist()) == list(range(5000))


def test_a_second_run_goes_on_where_the_first_ended(drained: Any, tmp_path: Path) -> None:
    assert drained(Keyed(KeyedConfig(rows=100))).rows_out == 100
    assert drained(Keyed(KeyedConfig(rows=250))).rows_out == 150
    assert sorted(rows(tmp_path)["row"].to_pylist()) == list(range(250))


@pytest.mark.every_spark
def test_the_work_of_a_commit_is_done_in_tasks(build: Any, spark: Any, tmp_path: Path) -> None:
    sink = AppliesElsewhere(MemorySinkConfig(path=tmp_path / "target"))
    pipeline = build(Keyed(KeyedConfig(rows=400, splits=4)), max_epoch_rows=200)
    pipeline = replace(pipeline, sinks={"lake": sink})
    assert pipeline.run(spark=spark, drain=True).epochs == 2
    assert sorted(row["row"] for row in sink.visible("/rows")) == list(range(400))
    workers = {int(file.name.rpartition("-")[2]) for file in (tmp_path / "target").glob("applied-by-*")}
    assert workers, "no work was done"
    assert os.getpid() not in workers


def test_partitions_keep_the_order_of_each_key(drained: Any, tmp_path: Path) -> None:
    drained(Keyed(KeyedConfig(rows=2000, splits=5, keys=11)), Route(partitions=3), max_epoch_rows=1000)
    files = sorted((tmp_path / "lake" / "rows").glob("*.parquet"))
    assert len(files) == 6, "one file per lane and epoch"
    lanes: dict[str, set[int]] = defaultdict(set)
    seen: list[int] = []
    for file in files:
        number, lane = int(file.name.split("-")[0]), int(file.name.split("-")[2])
        table = pq.read_table(file).to_pydict()
        per_key: dict[str, list[int]] = defaultdict(list)
        for key, row in zip(table["key"], table["row"], strict=True):
            per_key[key].append(row)
            lanes[key].add(lane)
            assert (number - 1) * 1000 <= row < number * 1000
        assert all(found == sorted(found) for found in per_key.values())
        seen += table["row"]
    assert sorted(seen) == list(range(2000))
    assert all(len(found) == 1 for found in lanes.values()), "a key stays in its lane"


@pytest.mark.every_spark
def test_sql_filters_and_reshapes_a_topic(drained: Any, tmp_path: Path) -> None:
    summary = drained(
        Generator(GeneratorConfig(rows=1000)),
        Route(to="/even", sql="SELECT id, upper(name) AS name, at FROM input WHERE id % 2 = 0"),
        max_epoch_rows=400,
    )
    assert (summary.rows_in, summary.rows_out, summary.epochs) == (1000, 500, 3)
    table = rows(tmp_path, "even").sort_by("id")
    assert table["id"].to_pylist() == list(range(0, 1000, 2))
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert all(name == name.upper() for name in table["name"].to_pylist())


@pytest.mark.parametrize("unit", ["s", "ms", "ns"])
def test_sql_takes_times_of_every_unit(drained: Any, tmp_path: Path, unit: str) -> None:
    made = pa.array([1_700_000_000, None], pa.int64()).cast(pa.timestamp("s", "UTC")).cast(pa.timestamp(unit, "UTC"))
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": [1, 2], "at": made}), tmp_path / "in" / "times.parquet", version="2.6")
    source = Files(FilesConfig(path=f"{tmp_path}/in/*.parquet", format="parquet"))
    drained(source, Route(to="/times", sql="SELECT id, at + INTERVAL 1 HOUR AS at FROM input"))
    found = rows(tmp_path, "times").sort_by("id")["at"].to_pylist()
    assert found == [datetime.fromtimestamp(1_700_003_600, UTC), None]


def test_sql_and_passthrough_share_an_epoch_and_count_its_rows_once(drained: Any, tmp_path: Path) -> None:
    summary = drained(
        Keyed(KeyedConfig(rows=100)), Route(), Route(to="/few", sql="SELECT row FROM input WHERE row < 10")
    )
    assert (summary.rows_in, summary.rows_out) == (100, 110)
    assert sorted(rows(tmp_path, "few")["row"].to_pylist()) == list(range(10))


@pytest.mark.parametrize(
    "routes",
    [
        [Route()],
        [Route(partitions=2)],
        [Route(stream="good", partitions=2, to="/good"), Route(stream="bad")],
        [Route(sql="SELECT * FROM input")],
        [Route(sql="SELECT * FROM input"), Route(to="/copy/{stream}")],
        [Route(to="/copy/{stream}"), Route(sql="SELECT * FROM input")],
    ],
    ids=["plain", "lanes", "plain beside lanes", "SQL", "SQL before plain", "plain before SQL"],
)
def test_a_stream_that_a_sink_refuses_is_left_out_and_the_others_go_on(
    build: Any, spark: Any, tmp_path: Path, routes: list[Route]
) -> None:
    pipeline = build(Apart(KeyedConfig()), *routes)
    pipeline.sinks["lake"] = Picky(pipeline.sinks["lake"].config)
    pipeline.run(spark=spark, drain=True)
    for topic in {"good", *("copy/good" for route in routes if "copy" in route.to)}:
        assert sorted(rows(tmp_path, topic)["row"].to_pylist()) == list(range(20))
    assert not (tmp_path / "lake" / "bad").exists()


def test_a_stream_whose_rows_make_its_query_fail_is_left_out_and_the_others_go_on(drained: Any, tmp_path: Path) -> None:
    drained(
        Apart(KeyedConfig()),
        Route(stream="bad", to="/cast", sql="SELECT key, CAST(key AS INT) AS number, row FROM input"),
        Route(stream="good", to="/good", sql="SELECT * FROM input"),
    )
    assert sorted(rows(tmp_path, "good")["row"].to_pylist()) == list(range(20))
    assert not (tmp_path / "lake" / "cast").exists()


def double(frame: Any) -> Any:
    return frame.selectExpr("key", "row * 2 AS row")


def test_a_transform_is_a_function_of_data_frames(drained: Any, tmp_path: Path) -> None:
    drained(Keyed(KeyedConfig(rows=10)), Route(transform=f"{__name__}:double"))
    assert sorted(rows(tmp_path)["row"].to_pylist()) == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("sql", "code", "says"),
    [
        ("SELECT nope FROM input", "PEN-1012", "`nope`"),
        ("SELECT nope FROM input", "PEN-1012", "line 1 pos 7"),
        ("SELCT 1", "PEN-1012", "PARSE_SYNTAX_ERROR"),
        ("SELECT 1 AS one", "PEN-1012", "does not read `input`"),
        ("SELECT row, row FROM input", "PEN-1012", "two columns named row"),
        ("CREATE TABLE made AS SELECT 1 AS one", "PEN-1012", "a statement, not a query"),
        ("INSERT INTO made SELECT row FROM input", "PEN-1012", "a statement, not a query"),
        ("SET spark.sql.ansi.enabled = false", "PEN-1012", "a statement, not a query"),
        ("SELECT key, count(*) AS n FROM input GROUP BY key", "PEN-1017", "per_epoch"),
        ("SELECT DISTINCT key FROM input", "PEN-1017", "per_epoch"),
        ("SELECT a.key FROM input a JOIN input b ON a.key = b.key", "PEN-1017", "Join"),
        ("SELECT row, row_number() OVER (ORDER BY row) AS n FROM input", "PEN-1017", "Window"),
        ("SELECT row FROM input WHERE row > (SELECT avg(row) FROM input)", "PEN-1017", "Aggregate"),
    ],
)
def test_sql_that_cannot_work_is_refused_before_the_first_epoch(
    drained: Any, tmp_path: Path, sql: str, code: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        drained(Keyed(KeyedConfig(rows=10)), Route(sql=sql))
    assert refused.value.code == code
    assert says in str(refused.value)
    assert "'/rows'" in str(refused.value), "the route is named"
    assert not list((tmp_path / "state" / "epochs").glob("*.json"))


def test_sql_that_fails_on_a_row_is_told_with_its_route(drained: Any) -> None:
    with pytest.raises(
        DataError, match=r"PEN-3003 the SQL of the route from '#' to '/rows' failed on a row: \[CAST_INVALID"
    ):
        drained(Keyed(KeyedConfig(rows=10)), Route(sql="SELECT CAST(concat('x', key) AS INT) AS k FROM input"))


def raising(frame: Any) -> Any:
    raise KeyError("column")


def numbering(frame: Any) -> Any:
    return 5


@pytest.mark.parametrize(
    ("transform", "says"), [("raising", "raised KeyError: 'column'"), ("numbering", "gave back int")]
)
def test_a_transform_that_does_not_work_is_told_with_its_route(drained: Any, transform: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"PEN-1012 the transform of the route from '#' to '/rows': .*{says}"):
        drained(Keyed(KeyedConfig(rows=10)), Route(transform=f"{__name__}:{transform}"))


def test_per_epoch_allows_an_aggregate(drained: Any, tmp_path: Path) -> None:
    sql = "SELECT key, count(*) AS n FROM input GROUP BY key"
    drained(Keyed(KeyedConfig(rows=100, keys=5)), Route(sql=sql, per_epoch=True), max_epoch_rows=50)
    table = rows(tmp_path).to_pydict()
    assert sum(table["n"]) == 100
    assert len(table["key"]) == 10, "each of two epochs counts for itself"


@pytest.mark.parametrize(
    "route", [Route(), Route(partitions=2), Route(sql="SELECT * FROM input")], ids=["plain", "lanes", "sql"]
)
def test_an_error_in_a_task_keeps_its_class_code_and_hint(drained: Any, route: Route) -> None:
    with pytest.raises(SchemaError) as stopped:
        drained(Keyed(KeyedConfig(fail="schema")), route)
    assert stopped.value.message == "the rows changed their shape"
    assert stopped.value.hint == "look at them"


def test_a_bug_in_a_connector_stops_with_its_last_line(drained: Any) -> None:
    with pytest.raises(FatalError, match=r"PEN-5012.*ZeroDivisionError: a bug in a connector"):
        drained(Keyed(KeyedConfig(fail="bug")))


def test_skipped_records_are_counted_and_the_others_arrive(drained: Any, tmp_path: Path) -> None:
    summary = drained(Keyed(KeyedConfig(rows=100, splits=2, fail="data")), on_error="skip")
    assert (summary.skipped, summary.rows_out) == (3, 100)


def test_too_many_bad_records_stop_the_pipeline(drained: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="PEN-3002 3 of the last 2,003"):
        drained(Keyed(KeyedConfig(rows=2000, splits=2, fail="data")), on_error="skip", max_error_rate=0.001)
    assert not list((tmp_path / "lake").rglob("*.parquet")), "nothing of the epoch is visible"


@pytest.mark.every_spark
def test_a_worker_that_dies_is_retried_and_nothing_doubles(drained: Any, tmp_path: Path) -> None:
    once = tmp_path / "died"
    summary = drained(Keyed(KeyedConfig(rows=400, fail=str(once))), max_retries=3)
    assert once.exists()
    assert summary.rows_out == 400
    assert sorted(rows(tmp_path)["row"].to_pylist()) == list(range(400))


def test_a_worker_that_always_dies_is_given_up(drained: Any) -> None:
    with pytest.raises((FatalError, RetryableError), match="PEN-5013 gave up after 1 retries"):
        drained(Keyed(KeyedConfig(fail="die")), max_retries=1)


def test_the_callers_session_and_its_views_stay_as_they_were(drained: Any, spark: Any) -> None:
    spark.range(3).createOrReplaceTempView("input")
    spark.udf.register("plus_one", lambda n: n + 1, "long")
    drained(Keyed(KeyedConfig(rows=10)), Route(sql="SELECT plus_one(row) AS row FROM input"))
    assert spark.sql("SELECT count(*) FROM input").first()[0] == 3
    assert type(spark).getActiveSession() is spark
    spark.catalog.dropTempView("input")


class TestReaders:
    @pytest.fixture(autouse=True)
    def _registered(self, spark: Any) -> None:
        penstock.register(spark)

    @pytest.mark.every_spark
    def test_a_range_source_is_a_table(self, spark: Any) -> None:
        frame = spark.read.format("penstock").option("connector", "generator").option("rows", 1000).load()
        assert frame.agg({"id": "sum"}).first()[0] == sum(range(1000))
        assert dict(frame.dtypes)["amount"] == "decimal(12,2)"

    def test_options_that_are_not_text_are_json(self, spark: Any) -> None:
        reader = spark.read.format("penstock").option("connector", "generator").option("rows", 5)
        assert reader.option("columns", '["id", "name"]').load().columns == ["id", "name"]

    @pytest.mark.every_spark
    def test_a_range_source_is_a_stream_that_ends_with_what_is_there(self, spark: Any, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        for part in range(3):
            table = pa.table({"id": pa.array(range(part * 10, part * 10 + 10), pa.int64())})
            pq.write_table(table, tmp_path / "in" / f"{part}.parquet")

        def run() -> None:
            stream = spark.readStream.format("penstock").option("connector", "files").option("settle_ms", 0)
            query = (
                stream.option("path", str(tmp_path / "in"))
                .option("state_dir", str(tmp_path / "position"))
                .load()
                .writeStream.format("parquet")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start(str(tmp_path / "out"))
            )
            query.awaitTermination()

        run()
        pq.write_table(pa.table({"id": pa.array([30], pa.int64())}), tmp_path / "in" / "0-late.parquet")
        run()
        assert sorted(r.id for r in spark.read.parquet(str(tmp_path / "out")).collect()) == list(range(31))

    def test_a_polled_source_is_a_stream_through_a_journal_and_goes_on_after_a_restart(
        self, spark: Any, tmp_path: Path
    ) -> None:
        def run(rows: int) -> None:
            stream = (
                spark.readStream.format("penstock").option("connector", "spark_connectors:Ticks").option("rows", rows)
            )
            query = (
                stream.option("state_dir", str(tmp_path / "ticks"))
                .option("max_rows_per_batch", 40)
                .load()
                .writeStream.format("parquet")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start(str(tmp_path / "out"))
            )
            query.awaitTermination()

        run(100)
        assert len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) == 3, "no batch is over the limit"
        run(130)
        assert sorted(r.n for r in spark.read.parquet(str(tmp_path / "out")).collect()) == list(range(130))

    def test_an_unknown_connector_is_named(self, spark: Any) -> None:
        with pytest.raises(Exception, match="PEN-1006"):
            spark.read.format("penstock").option("connector", "generatr").load()


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("SELECT row FROM input WHERE key <> 'key-1'", ["row"]),
        ("SELECT * FROM input", ["key", "row", "heavy"]),
        ("SELECT * EXCEPT (heavy) FROM input", ["key", "row"]),
        ("SELECT 1 AS one FROM input", ["one"]),
        (
            "SELECT length(heavy) AS n, i.row FROM input i WHERE i.row IN (SELECT row FROM input WHERE key = 'key-0')",
            ["n", "row"],
        ),
    ],
)
def test_a_query_sees_the_columns_it_uses_and_answers_the_same(
    drained: Any, tmp_path: Path, sql: str, columns: list[str]
) -> None:
    drained(Wide(KeyedConfig(rows=70, keys=7)), Route(sql=sql, per_epoch=True))
    table = rows(tmp_path)
    assert table.column_names == columns
    assert table.num_rows == {"row": 60, "n": 10}.get(columns[0], 70)


def test_a_session_that_was_there_already_is_joined_and_left_running(build: Any, spark: Any, tmp_path: Path) -> None:
    assert build(Keyed(KeyedConfig(rows=10))).run(drain=True).rows_out == 10
    assert spark.range(3).count() == 3


def test_of_two_pipelines_in_one_session_of_our_own_the_last_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    session = SimpleNamespace(sparkContext=SimpleNamespace(master="local[2]"))
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("penstock.spark.engine.start_session", lambda *_: session)
    monkeypatch.setattr("penstock.spark.engine.end_session", ended.append)
    first, second = SparkEngine(), SparkEngine()
    first.start()
    second.start()
    first.stop()
    first.stop()
    assert ended == []
    second.stop()
    assert ended == [session]
