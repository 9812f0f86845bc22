"""A few random kills through Spark itself; `make soak NAME=engine` does many more."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JError

from penstock.connectors.files.sink import read_published
from penstock.errors import FatalError
from penstock.spark.failures import driver_errors

KILLS = 3
ROWS = 5_000 * KILLS
"""A kill comes after at most four more epochs of a thousand."""

PIPELINE = """
connector_name = "killed"
delivery = "exactly-once"

[processing]
max_epoch_rows = 1000
epoch_interval_ms = 0

[source]
connector = "generator"
rows = {rows}
batch_rows = 500
columns = ["id", "name"]

[[routes]]
{route}

[sink]
connector = "files"
path = "lake/{{topic}}"
"""


def newest_epoch(home: Path) -> int:
    return max((int(file.stem) for file in (home / "state" / "epochs").glob("[0-9]*.json")), default=0)


def command_for(home: Path, route: str = 'to = "/{stream}"', rows: int = ROWS) -> list[str]:
    (home / "pipeline.toml").write_text(PIPELINE.format(rows=rows, route=route))
    return [
        *(sys.executable, "-m", "penstock", "run", str(home / "pipeline.toml")),
        *("--drain", "--master", "local[2]"),
    ]


def reach(home: Path, epoch: int, run: subprocess.Popen[str]) -> None:
    while newest_epoch(home) < epoch:
        assert run.poll() is None
        time.sleep(0.01)


def test_a_jvm_that_is_killed_ends_the_run_with_a_clear_word_and_a_killed_driver_is_followed_as_well(
    tmp_path: Path,
) -> None:
    command = command_for(tmp_path, rows=9000)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    reach(tmp_path, 2, run)
    (jvm,) = (child for child in psutil.Process(run.pid).children() if child.name() == "java")
    jvm.kill()
    _, told = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "PEN-5014 the JVM that runs Spark is gone" in told
    assert "Traceback" not in told
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    reach(tmp_path, newest_epoch(tmp_path) + 2, run)
    run.kill()
    run.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(read_published(tmp_path / "lake" / "rows")["id"].to_pylist()) == list(range(9000))


@pytest.mark.parametrize(
    "said",
    [
        "org.apache.spark.SparkException: Job 3 cancelled because SparkContext was shut down",
        "java.lang.IllegalStateException: SparkContext has been shutdown",
        "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.",
    ],
)
def test_a_jvm_that_was_told_to_end_is_known_by_what_it_says(said: str) -> None:
    with pytest.raises(FatalError, match="PEN-5014"), driver_errors():
        raise Py4JError(f"An error occurred while calling o1.collect. Trace:\n{said}")


@pytest.mark.parametrize("to_all", [False, True], ids=["its group", "all of its processes"])
def test_a_signal_to_the_whole_process_group_ends_the_run_like_any_stop(tmp_path: Path, to_all: bool) -> None:
    """Schedulers signal the group; systemd, unless it is told otherwise, signals Spark's JVM and its workers as well."""
    command = [word for word in command_for(tmp_path) if word != "--drain"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    reach(tmp_path, 2, run)
    if to_all:
        for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
    else:
        os.killpg(run.pid, signal.SIGTERM)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 0, told[-3000:]
    assert "PEN-" not in told
    ids = read_published(tmp_path / "lake" / "rows")["id"].to_pylist()
    assert sorted(ids) == list(range(len(ids)))


@pytest.mark.timeout(400)
@pytest.mark.soak
@pytest.mark.parametrize("sql", [False, True], ids=["passthrough", "sql"])
def test_random_kills_lose_nothing_and_double_nothing(tmp_path: Path, sql: bool) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    choice = random.Random(seed)
    route = 'sql = "SELECT id, upper(name) AS name FROM input"' if sql else 'to = "/{stream}"'
    command = command_for(tmp_path, route)
    for _ in range(KILLS):
        with open(tmp_path / "log", "ab") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log)
        goal = newest_epoch(tmp_path) + choice.randint(1, 4)
        while newest_epoch(tmp_path) < goal and run.poll() is None:
            time.sleep(0.005)
        assert run.poll() is None, (
            f"seed {seed}: it ended before it was killed\n{(tmp_path / 'log').read_text()[-3000:]}"
        )
        time.sleep(choice.uniform(0, 0.3))
        run.send_signal(signal.SIGKILL)
        run.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ids = read_published(tmp_path / "lake" / "rows")["id"].to_pylist()
    assert sorted(ids) == list(range(ROWS)), f"seed {seed}"
    plain = pq.read_table(sorted((tmp_path / "lake" / "rows").glob("*.parquet")))
    assert sorted(plain["id"].to_pylist()) == list(range(ROWS)), "a reader of the plain files sees the same"
