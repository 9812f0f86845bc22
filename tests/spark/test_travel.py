"""A cluster whose executors cannot read the driver's state directory: rows of journals travel through Spark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from standalone import LIGHT_EXECUTORS

from penstock.connectors.files.sink import read_published

NUMBERS = '''
"""Numbers as messages, of a source that is polled."""

from penstock.config import Config
from penstock.source import PollingSource, SourceCheckpoint, SourceEnvelope, SourceRecord


class NumbersConfig(Config):
    count: int
    """How many."""


class Numbers(PollingSource[NumbersConfig]):
    name = "numbers"
    at = 0

    def schema(self):
        return {}

    def poll_batch(self, max_records):
        numbers = range(self.at, min(self.at + 500, self.config.count))
        self.at += len(numbers)
        return [SourceEnvelope(SourceRecord.from_json("n", {"id": n, "text": "x" * 100})) for n in numbers] or None

    def checkpoint(self):
        return SourceCheckpoint(offsets={"at": self.at})

    def restore(self, checkpoint):
        self.at = checkpoint.offsets["at"]
'''

PIPELINE = """
connector_name = "travel"
delivery = "exactly-once"

[processing]
max_epoch_bytes = 200_000

[[schemas]]
topic = "/#"
schema_type = "json"

[source]
connector = "my_numbers:Numbers"
count = 6000

[[routes]]
to = "/plain"

[[routes]]
to = "/sql"
sql = "SELECT id FROM input WHERE id % 2 = 0"

[sink]
connector = "files"
path = "lake/{topic}"
"""

RUN = """
import os, sys
from pathlib import Path
from pyspark.sql import SparkSession
from penstock import Pipeline

spark = SparkSession.builder.master("local-cluster[1,2,1024]").config("spark.ui.enabled", "false").getOrCreate()
state = Path(sys.argv[1]).parent / "state"


def sees(_):
    try:
        return bool(os.listdir(state))
    except PermissionError:
        return False


assert not any(spark.sparkContext.parallelize(range(4), 4).map(sees).collect()), "the executors see the state directory"
summary = Pipeline.from_toml(sys.argv[1]).run(spark=spark, drain=True)
print("rows", summary.rows_in, "epochs", summary.epochs)
"""


@pytest.mark.timeout(240)
def test_rows_of_a_journal_reach_executors_that_cannot_read_it(
    tmp_path: Path, need: Callable[[bool, str], None]
) -> None:
    need(os.getuid() == 0 and shutil.which("setpriv"), "only root can start workers that lack root's right to read all")
    (tmp_path / "my_numbers.py").write_text(NUMBERS)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 12345, 12345)
    (tmp_path / "state").chmod(0o700)
    worker = tmp_path / "python"
    without = "-dac_override,-dac_read_search"
    worker.write_text(f'#!/bin/sh\nexec setpriv --bounding-set={without} --inh-caps={without} {sys.executable} "$@"\n')
    worker.chmod(0o755)
    environment = {**os.environ, "PYSPARK_PYTHON": str(worker), "PYSPARK_DRIVER_PYTHON": sys.executable}
    environment["PYSPARK_SUBMIT_ARGS"] = LIGHT_EXECUTORS
    done = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "pipeline.toml"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert "rows 6000" in done.stdout, done.stdout + done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) > 2, "the rows of an epoch are bounded by their bytes"
    assert sorted(read_published(tmp_path / "lake" / "plain")["id"].to_pylist()) == list(range(6000))
    assert sorted(read_published(tmp_path / "lake" / "sql")["id"].to_pylist()) == list(range(0, 6000, 2))
