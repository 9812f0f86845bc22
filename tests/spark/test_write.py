"""Queries of Spark's own that write to our sinks: once each row, wherever a process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

import penstock
from armed import ARMED
from penstock.connectors.files.sink import read_published
from penstock.testing.postgres import PostgresServer

BATCHES, ROWS = 3, 50

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _registered(spark: Any) -> Iterator[None]:
    penstock.register(spark)
    yield
    Path(os.environ[ARMED]).unlink(missing_ok=True)


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for number in range(BATCHES):
        ids = range(number * ROWS, number * ROWS + ROWS)
        table = pa.table({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    return tmp_path / "in"


def start(spark: Any, home: Path, options: dict[str, Any], output: str = "append", frame: Any = None) -> None:
    """Run the query over all files, one a batch, until it ends or fails."""
    if frame is None:
        frame = (
            spark.readStream.schema("id LONG, name STRING").option("maxFilesPerTrigger", 1).parquet(str(home / "in"))
        )
    writer = frame.writeStream.format("penstock").outputMode(output).options(**options)
    writer.option("checkpointLocation", str(home / "checkpoint")).trigger(availableNow=True).start().awaitTermination()


class Sink:
    """Options of one sink, and what a reader of its target sees."""

    def __init__(self, name: str, home: Path, server: PostgresServer | None) -> None:
        self.name, self.home, self.server = name, home, server
        self.options: dict[str, Any] = {"path": str(home / "lake" / "rows")}
        if server is not None:
            self.table = f"w{abs(hash(home))}"
            self.options = {"dsn": server.dsn, "table": f"public.{self.table}"}

    def ids(self) -> list[int]:
        if self.name == "files":
            return read_published(self.home / "lake" / "rows")["id"].to_pylist()
        if self.name == "delta":
            return DeltaTable(self.home / "lake" / "rows").to_pyarrow_table()["id"].to_pylist()
        if self.name == "iceberg":
            catalog = load_catalog("default", type="sql", uri=f"sqlite:///{self.home}/lake/catalog.db")
            return catalog.load_table("default.rows").scan().to_arrow()["id"].to_pylist()
        assert self.server is not None
        with psycopg.connect(self.server.dsn) as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM public.{self.table}")]


@pytest.fixture(params=["files", "delta", "iceberg", "postgres"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    server = request.getfixturevalue("server") if request.param == "postgres" else None
    return Sink(request.param, tmp_path, server)


@pytest.mark.every_spark
def test_an_upsert_keeps_one_row_per_key_and_a_repeated_batch_changes_nothing(
    spark: Any, incoming: Path, tmp_path: Path
) -> None:
    frame = spark.readStream.schema("id LONG, name STRING").option("maxFilesPerTrigger", 1).parquet(str(incoming))
    counts = frame.selectExpr("id % 10 AS bucket").groupBy("bucket").count()
    options = {"connector": "delta", "path": str(tmp_path / "counts"), "mode": "upsert", "key": '["bucket"]'}
    start(spark, tmp_path, options, "update", counts)
    found = DeltaTable(tmp_path / "counts").to_pyarrow_table().sort_by("bucket").to_pydict()
    assert found["bucket"] == list(range(10))
    assert found["count"] == [BATCHES * ROWS / 10] * 10
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    commits[-1].unlink()  # as if the driver had died after our commit and before Spark's own log
    version = DeltaTable(tmp_path / "counts").version()
    start(spark, tmp_path, options, "update", counts)
    assert DeltaTable(tmp_path / "counts").version() == version


@pytest.mark.every_spark
def test_a_write_under_a_name_and_a_number_is_done_once(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(100).selectExpr("id", "current_timestamp() AS at")
    for number in (1, 1, 2):
        write = frame.write.format("penstock").mode("append").option("connector", "files")
        write.options(pipeline="nightly", epoch=number).save(str(tmp_path / "lake"))
    table = read_published(tmp_path / "lake")
    assert sorted(table["id"].to_pylist()) == sorted([*range(100), *range(100)])
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"connector": "delta", "pth": "/x"}, "PEN-1002 delta has no option 'pth'"),
        ({"connector": "delta"}, "PEN-1004 delta needs option.'path'"),
        ({"connector": "console", "delivery": "exactly-once"}, "PEN-1008 console cannot tell a repeated batch"),
        ({"connector": "files", "path": "/x", "epoch": 3}, "PEN-1004 .*belong together"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(spark: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        spark.range(1).write.format("penstock").mode("append").options(**options).save()


def test_to_replace_a_whole_target_is_refused(spark: Any, tmp_path: Path) -> None:
    write = spark.range(1).write.format("penstock").mode("overwrite").option("connector", "files")
    with pytest.raises(Exception, match="PEN-1009 files does not replace a whole target"):
        write.save(str(tmp_path / "lake"))


STEPS = ["stage.middle", "stage.task", "stage.after", "commit.before", "commit.after"]
"""In an executor twice; between write and commit; where the rows become visible; before Spark's own log knows of it."""


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_is_killed_at_any_step_loses_and_doubles_nothing(
    spark: Any, incoming: Path, tmp_path: Path, sink: Sink, step: str
) -> None:
    options = {"connector": f"armed:{sink.name.capitalize()}", **sink.options}
    pq.write_table(pq.read_table(incoming / "2.parquet"), tmp_path / "later.parquet")
    (incoming / "2.parquet").unlink()
    start(spark, tmp_path, options)  # a target that is there already
    (tmp_path / "later.parquet").rename(incoming / "2.parquet")
    Path(os.environ[ARMED]).write_text(f"{step}=kill")
    with pytest.raises(Exception, match=r"crashed|EOF|exited|Connection reset|STREAM_FAILED"):
        start(spark, tmp_path, options)
    Path(os.environ[ARMED]).unlink()
    start(spark, tmp_path, options)
    start(spark, tmp_path, options)  # nothing new
    assert sorted(sink.ids()) == list(range(BATCHES * ROWS))
