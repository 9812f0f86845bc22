"""Queries of Spark's own that write to our sinks: once each row, wherever a process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from armed import ARMED
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

import penstock
from kafka_topics import fresh, records
from penstock.connectors.files.sink import read_published

BATCHES, ROWS = 2, 50

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


def start(spark: Any, home: Path, options: dict[str, Any]) -> None:
    """Run the query over all files, one a batch, until it ends or fails."""
    frame = spark.readStream.schema("id LONG, name STRING").option("maxFilesPerTrigger", 1).parquet(str(home / "in"))
    writer = frame.writeStream.format("penstock").options(**options)
    writer.option("checkpointLocation", str(home / "checkpoint")).trigger(availableNow=True).start().awaitTermination()


class Sink:
    """Options of one sink, and what a reader of its target sees."""

    def __init__(self, name: str, home: Path, server: Any) -> None:
        self.name, self.home, self.server = name, home, server
        self.options: dict[str, Any] = {"path": str(home / "lake" / "{topic}")}
        if name == "postgres":
            self.table = f"w{uuid4().hex}"
            self.options = {"dsn": server.dsn, "table": f"public.{self.table}"}
        if name == "kafka":
            self.table = fresh("written")
            self.options = {"bootstrap_servers": server.bootstrap, "topic": self.table, "partitions": 1}

    def names(self) -> set[str]:
        """Of the rows of a lake."""
        if self.name == "delta":
            return set(DeltaTable(self.home / "lake" / "rows").to_pyarrow_table()["name"].to_pylist())
        catalog = load_catalog("default", type="sql", uri=f"sqlite:///{self.home}/lake/catalog.db")
        return set(catalog.load_table("default.rows").scan().to_arrow()["name"].to_pylist())

    def ids(self) -> list[int]:
        if self.name == "files":
            return read_published(self.home / "lake" / "rows")["id"].to_pylist()
        if self.name == "delta":
            return DeltaTable(self.home / "lake" / "rows").to_pyarrow_table()["id"].to_pylist()
        if self.name == "iceberg":
            catalog = load_catalog("default", type="sql", uri=f"sqlite:///{self.home}/lake/catalog.db")
            return catalog.load_table("default.rows").scan().to_arrow()["id"].to_pylist()
        if self.name == "kafka":
            return [json.loads(each.value())["id"] for each in records(self.server.bootstrap, self.table)]
        with psycopg.connect(self.server.dsn) as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM public.{self.table}")]


@pytest.fixture
def sink(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> Sink:
    servers = {"postgres": "server", "kafka": "kafka"}
    return Sink(name, tmp_path, request.getfixturevalue(servers[name]) if name in servers else None)


@pytest.mark.every_spark
def test_an_upsert_keeps_one_row_per_key_and_a_repeated_batch_changes_nothing(
    spark: Any, incoming: Path, tmp_path: Path
) -> None:
    frame = spark.readStream.schema("id LONG, name STRING").option("maxFilesPerTrigger", 1).parquet(str(incoming))
    counts = frame.selectExpr("id % 10 AS bucket").groupBy("bucket").count()
    sink = penstock.BatchSink("delta", path=tmp_path / "counts", mode="upsert", key=["bucket"])

    def run() -> None:
        writer = counts.writeStream.outputMode("update").foreachBatch(sink)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()

    run()
    found = DeltaTable(tmp_path / "counts").to_pyarrow_table().sort_by("bucket").to_pydict()
    assert found["bucket"] == list(range(10))
    assert found["count"] == [BATCHES * ROWS / 10] * 10
    for name in ("1", ".1.crc"):  # as if the driver had died after our commit and before Spark's own log
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    version = DeltaTable(tmp_path / "counts").version()
    run()
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


FEW = [("files", "stage.task"), ("files", "stage.after"), ("delta", "commit.after")]

SINKS = ("files", "delta", "iceberg", "postgres", "kafka")

DIED = r"crashed|EOF|exited|Connection reset|STREAM_FAILED"


def cases() -> Iterator[Any]:
    """What differs from sink to sink; `make soak NAME=tests` goes through all steps of all."""
    for name in SINKS:
        for step in STEPS:
            often = step == "commit.before" or (name, step) in FEW
            yield pytest.param(name, step, marks=() if often else pytest.mark.soak, id=f"{name}-{step}")


@pytest.mark.parametrize(("name", "step"), list(cases()))
def test_a_process_that_is_killed_at_any_step_loses_and_doubles_nothing(
    spark: Any, incoming: Path, tmp_path: Path, sink: Sink, step: str
) -> None:
    options: dict[str, Any] = {"connector": f"armed:{sink.name.capitalize()}", **sink.options}
    Path(os.environ[ARMED]).write_text(f"{step}=kill")
    with pytest.raises(Exception, match=DIED):
        start(spark, tmp_path, options)
    Path(os.environ[ARMED]).unlink()
    start(spark, tmp_path, options)
    assert sorted(sink.ids()) == list(range(BATCHES * ROWS))


def upsert_cases() -> Iterator[Any]:
    """Where the second stage of an upsert can die: before and after its plan, amid its work, before and after the commit."""
    for name in ("delta", "iceberg"):
        for step in ("plan_apply.before", "apply.middle", "apply.after", "commit.before", "commit.after"):
            often = name == "delta" and step == "commit.before"
            if name == "delta" or not step.startswith(("plan", "apply")):  # an Iceberg commit does its work by itself
                yield pytest.param(name, step, marks=() if often else pytest.mark.soak, id=f"{name}-{step}")


@pytest.mark.parametrize(("name", "step"), list(upsert_cases()))
def test_an_upsert_that_is_killed_at_any_step_loses_and_doubles_nothing(
    spark: Any, incoming: Path, tmp_path: Path, sink: Sink, step: str
) -> None:
    again = pq.read_table(incoming / "0.parquet").set_column(1, "name", pa.array(["again"] * ROWS))
    pq.write_table(again, incoming / "1.parquet")  # the same keys once more
    options = {"connector": f"armed:{sink.name.capitalize()}", **sink.options, "mode": "upsert", "key": '["id"]'}
    Path(os.environ[ARMED]).write_text(f"{step}=kill")
    if step in ("apply.middle", "apply.after"):  # a table that is empty has nothing to rewrite
        Path(os.environ[ARMED]).unlink()
        aside = (incoming / "1.parquet").rename(tmp_path / "1.parquet")
        start(spark, tmp_path, options)
        aside.rename(incoming / "1.parquet")
        Path(os.environ[ARMED]).write_text(f"{step}=kill")
    with pytest.raises(Exception, match=DIED):
        start(spark, tmp_path, options)
    Path(os.environ[ARMED]).unlink()
    start(spark, tmp_path, options)
    assert sorted(sink.ids()) == list(range(ROWS))
    assert sink.names() == {"again"}
    begun = [file for file in tmp_path.rglob("*") if ".begun" in file.parts and file.is_file()]
    assert not begun, "nothing is left of the killed try"


DRIVER = """
import json, sys
from pyspark.sql import SparkSession
import penstock
home, options = sys.argv[1], json.loads(sys.argv[2])
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
penstock.register(spark)
rows = spark.readStream.schema("id LONG, name STRING").option("maxFilesPerTrigger", 1).parquet(home + "/in")
query = rows.writeStream.format("penstock").options(**options)
query.option("checkpointLocation", home + "/checkpoint").trigger(availableNow=True).start().awaitTermination()
"""


DRIVEN = [pytest.param(name, marks=() if name == "delta" else pytest.mark.soak) for name in SINKS]


@pytest.mark.parametrize("name", DRIVEN)
def test_a_driver_that_dies_before_its_commit_is_followed_and_its_zombie_changes_nothing(
    spark: Any, incoming: Path, tmp_path: Path, sink: Sink
) -> None:
    options = {"connector": sink.name, **sink.options}
    environment = {**os.environ, "PENSTOCK_FAILPOINT": "commit.before=stop", "PYSPARK_PYTHON": sys.executable}
    with open(tmp_path / "log", "wb") as log:
        command = [sys.executable, "-c", DRIVER, tmp_path, json.dumps(options)]
        driver = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    stopped: list[psutil.Process] = []
    while not stopped:
        assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
        family = psutil.Process(driver.pid).children(recursive=True)
        stopped = [each for each in family if each.is_running() and each.status() == psutil.STATUS_STOPPED]
        time.sleep(0.1)
    (zombie,) = stopped
    for each in [psutil.Process(driver.pid), *(each for each in family if each != zombie)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    driver.wait()
    start(spark, tmp_path, options)
    before = sink.ids()
    with contextlib.suppress(psutil.NoSuchProcess):  # the system wakes a group whose parent is gone: it went on already
        zombie.resume()
        zombie.wait(60)
    assert sink.ids() == before
    assert sorted(before) == list(range(BATCHES * ROWS))
