"""The same file on a cluster: executors in processes of their own, Penstock from a wheel, a connector of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from standalone import LIGHT_EXECUTORS

from penstock.connectors.files.sink import read_published

ROOT = Path(__file__).resolve().parent.parent.parent

CONNECTOR = '''
"""Squares, as a stranger would write a connector."""

import pyarrow as pa

from penstock.config import Config
from penstock.source import Position, RangeSource, SourceBatch


class SquaresConfig(Config):
    count: int
    """How many."""


class Next(Position):
    number: int = 0


class Squares(RangeSource[SquaresConfig, Next]):
    name = "squares"

    def schema(self):
        return {"squares": pa.schema([("n", pa.int64()), ("square", pa.int64()), ("where", pa.string())])}

    def latest(self, start, limit):
        return Next(number=self.config.count)

    def split(self, start, end):
        middle = (start.number + end.number) // 2
        return [(start.number, middle), (middle, end.number)]

    def read(self, split):
        import os
        import penstock

        n = list(range(*split))
        where = [f"{os.getppid()} {os.path.dirname(penstock.__file__)}"] * len(n)
        columns = [pa.array(n), pa.array([x * x for x in n]), pa.array(where)]
        yield SourceBatch(pa.record_batch(columns, schema=self.schema()["squares"]), stream="squares")
'''

PIPELINE = """
connector_name = "squares"
delivery = "exactly-once"

[source]
connector = "my_squares:Squares"
count = 100

[[routes]]
to = "/plain"

[[routes]]
to = "/sql"
sql = "SELECT n, square, where FROM input WHERE n < 50"

[sink]
connector = "files"
path = "lake/{topic}"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that has Penstock from its wheel, and everything else from this one."""
    home = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(home), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    venv.create(home / "venv", with_pip=False, symlinks=True)
    site = next((home / "venv" / "lib").glob("python3*/site-packages"))
    wheel = next(home.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    here = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    (site / "others.pth").write_text(f"{here}\n")
    return home / "venv" / "bin" / "python"


@pytest.mark.soak  # the next one runs the same on the same wheel, in a session; `test_kafka_executors.py` by the command
@pytest.mark.timeout(240)
def test_it_runs_on_executors_of_their_own_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my_squares.py").write_text(CONNECTOR)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SPARK_LOCAL_IP")}
    environment["PYSPARK_SUBMIT_ARGS"] = LIGHT_EXECUTORS
    done = subprocess.run(
        [
            installed,
            "-m",
            "penstock",
            "run",
            tmp_path / "pipeline.toml",
            "--drain",
            "--master",
            "local-cluster[2,1,1024]",
        ],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    log = tmp_path / "state" / "spark.log"
    assert done.returncode == 0, done.stderr[-3000:] + (log.read_text()[-3000:] if log.exists() else "")
    plain = read_published(tmp_path / "lake" / "plain").sort_by("n").to_pydict()
    assert plain["square"] == [n * n for n in range(100)]
    parents = {where.split()[0] for where in plain["where"]}
    assert len(parents) == 2, "two executors took part"
    assert sorted(read_published(tmp_path / "lake" / "sql")["n"].to_pylist()) == list(range(50))


TWICE = """
import gc, os, signal, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from penstock import Pipeline

spark = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false").getOrCreate()
for name in sys.argv[1:]:
    assert Pipeline.from_toml(name).run(spark=spark, drain=True).rows_in == 100
gc.collect()

def executor(_):
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(daemon.rpartition(")")[2].split()[1])

before = set(spark.sparkContext.parallelize(range(8), 8).map(executor).collect())
os.kill(min(before), signal.SIGKILL)
late = set()
for _ in range(200):
    late = set(spark.sparkContext.parallelize(range(8), 8).map(executor).collect()) - before
    if late:
        break
    time.sleep(0.1)
assert late, "no executor took the place of the one that was killed"
print("all tasks ran")
"""


@pytest.mark.timeout(240)
def test_two_runs_in_one_session_ship_once_and_an_executor_that_starts_later_works(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "my_squares.py").write_text(CONNECTOR)
    files = [tmp_path / "first.toml", tmp_path / "second.toml"]
    for file in files:
        name = file.stem
        text = PIPELINE.replace('"squares"', f'"{name}"').replace("lake/", f"{name}/")
        file.write_text(text + f'\n[processing]\nstate_dir = "{name}-state"\n')
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SPARK_LOCAL_IP")}
    environment["PYSPARK_SUBMIT_ARGS"] = LIGHT_EXECUTORS
    done = subprocess.run(
        [installed, "-c", TWICE, *files],
        capture_output=True,
        text=True,
        env=environment | {"PYSPARK_PYTHON": str(installed)},
        cwd=tmp_path,
    )
    assert done.stdout.endswith("all tasks ran\n"), done.stderr[-3000:]
    for name in ("first", "second"):
        plain = read_published(tmp_path / name / "plain").sort_by("n").to_pydict()
        assert plain["square"] == [n * n for n in range(100)]
        assert len({where.split()[0] for where in plain["where"]}) == 2, "two executors took part"
        assert sorted(read_published(tmp_path / name / "sql")["n"].to_pylist()) == list(range(50))
