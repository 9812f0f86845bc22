"""Routes that keep state, in runs that are killed: windows, joins with streams and tables, and a class with its own state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.connectors.files.sink import read_published

ROWS, AN_EPOCH, KEYS = 240, 60, 3
BEGAN = 1_577_836_800

MODULE = '''
"""A source of rows with times, and queries over them."""

import pandas
import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.streaming import StatefulProcessor

from penstock.config import Config
from penstock.source import Position, RangeSource, SourceBatch

BEGAN = 1_577_836_800  # at second 0 a row would be as late as the first watermark
SCHEMA = pa.schema([("row", pa.int64()), ("key", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])


class TimedConfig(Config):
    rows: int


class Next(Position):
    row: int = 0


class Timed(RangeSource[TimedConfig, Next]):
    name = "timed"

    def schema(self):
        return {"rows": SCHEMA}

    def latest(self, start, limit):
        return limit.bounded(Next(row=min(self.config.rows, start.row + (limit.rows or self.config.rows))))

    def split(self, start, end):
        middle = (start.row + end.row) // 2
        return [(start.row, middle), (middle, end.row)]

    def read(self, split):
        rows = list(range(*split))
        columns = [pa.array(rows), pa.array([f"k{row % 3}" for row in rows]), pa.array([(BEGAN + row) * 10**6 for row in rows])]
        batch = pa.RecordBatch.from_arrays([each.cast(c.type) for each, c in zip(columns, SCHEMA)], schema=SCHEMA)
        yield SourceBatch(batch, stream="rows")


def windows(rows):
    timed = rows.withWatermark("at", "0 seconds")
    return timed.groupBy(f.window("at", "30 seconds").alias("w")).count().selectExpr("w.start AS start", "count AS n")


def pairs(rows):
    left = rows.where("row % 2 = 0").selectExpr("row AS l", "at AS lat").withWatermark("lat", "0 seconds")
    right = rows.where("row % 2 = 1").selectExpr("row AS r", "at AS rat").withWatermark("rat", "0 seconds")
    return left.join(right, f.expr("l + 1 = r AND rat >= lat AND rat <= lat + INTERVAL 70 SECONDS")).select("l", "r")


def named(rows):
    names = rows.sparkSession.createDataFrame([(f"k{n}", f"name {n}") for n in range(3)], "key string, name string")
    return rows.join(names, "key").select("row", "name")


class Sums(StatefulProcessor):
    def init(self, handle):
        self.total = handle.getValueState("total", "total long")

    def handleInputRows(self, key, rows, timers):
        before = self.total.get()[0] if self.total.exists() else 0
        total = before + sum(int(each["row"].sum()) for each in rows)
        self.total.update((total,))
        yield pandas.DataFrame({"key": [key[0]], "total": [total]})

    def close(self):
        pass


def sums(rows):
    return rows.groupBy("key").transformWithStateInPandas(
        Sums(), "key string, total long", outputMode="update", timeMode="None"
    )
'''

PIPELINE = """
connector_name = "stateful"
delivery = "exactly-once"

[processing]
max_epoch_rows = {an_epoch}
epoch_interval_ms = 0
max_retries = 0

[source]
connector = "timed_rows:Timed"
rows = {rows}

[[routes]]
to = "/windows"
transform = "timed_rows:windows"
streaming = true

[[routes]]
to = "/pairs"
transform = "timed_rows:pairs"
streaming = true

[[routes]]
to = "/named"
transform = "timed_rows:named"
streaming = true

[[routes]]
to = "/sums"
transform = "timed_rows:sums"
streaming = true
output_mode = "update"

[sink]
connector = "files"
path = "lake/{{topic}}"
"""

STEPS = ["plan.after", "stage.after", "prepare.after", "commit.before", "commit.after", "committed.after", "ack.after"]


def run(home: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    if failpoint:
        environment["PENSTOCK_FAILPOINT"] = failpoint
    command = [sys.executable, "-m", "penstock", "run", home / "pipeline.toml", "--drain", "--master", "local[2]"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=home)


def found(home: Path, topic: str, *columns: str) -> list[tuple[object, ...]]:
    table = read_published(home / "lake" / topic)
    return sorted(zip(*(table[column].to_pylist() for column in columns), strict=True))


def totals() -> list[tuple[object, ...]]:
    """Every total that an epoch hands on."""
    ends = range(AN_EPOCH, ROWS + 1, AN_EPOCH)
    return sorted((f"k{key}", sum(range(key, end, KEYS))) for key in range(KEYS) for end in ends)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [("stage.after", "commit.before"), STEPS], ids=["two steps", "every step"])
def test_a_driver_that_is_killed_at_any_step_loses_and_doubles_no_state(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / "timed_rows.py").write_text(MODULE)
    (tmp_path / "pipeline.toml").write_text(PIPELINE.format(rows=ROWS, an_epoch=AN_EPOCH))
    for step in steps:
        killed = run(tmp_path, f"{step}=kill@{2 if step == steps[0] else 1}")
        assert killed.returncode == -signal.SIGKILL, f"{step}: {killed.stderr[-3000:]}"
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    starts = [start.timestamp() - BEGAN for start, _ in found(tmp_path, "windows", "start", "n")]  # type: ignore[attr-defined]
    assert starts == [0, 30, 60, 90, 120, 150, 180], "the last window may still get rows"
    assert {n for _, n in found(tmp_path, "windows", "start", "n")} == {30}
    assert found(tmp_path, "pairs", "l", "r") == [(left, left + 1) for left in range(0, ROWS, 2)]
    assert found(tmp_path, "named", "row", "name") == [(row, f"name {row % KEYS}") for row in range(ROWS)]
    assert found(tmp_path, "sums", "key", "total") == totals()
