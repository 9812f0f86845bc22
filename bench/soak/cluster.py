"""
A pipeline on a real cluster whose parts die: a master and two workers, which see nothing of the driver's but a shared lake.

The workers run as another user, with an environment that travels as an archive. A table of PostgreSQL is mirrored into Delta by
key, a journaled source goes to files as it is and through SQL. Every 20 seconds an executor is killed; once a worker is lost
and comes back, and once the driver is killed and started in another directory. At the end every row must be there, once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import psycopg
from deltalake import DeltaTable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "spark"))
from measure import PAGE, RESULTS, commit, machine, page
from standalone import Cluster

from penstock.connectors.files.sink import read_published
from penstock.pipeline import Pipeline
from penstock.spark.pack import pack
from penstock.testing.postgres import PostgresServer

SECONDS = int(os.environ.get("SOAK_SECONDS", 240))
EVERY = 20
"""Seconds between two killed executors."""
PATIENCE_SECS = 600
"""How long a driver may take to start or to end, on a busy machine."""
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))

NUMBERS = '''
"""Numbers as messages, of a source that is polled: ten every tenth of a second, up to the number that a file holds."""

from pathlib import Path

from penstock.config import Config
from penstock.source import PollingSource, SourceCheckpoint, SourceEnvelope, SourceRecord


class NumbersConfig(Config):
    limit: str
    """The file."""


class Numbers(PollingSource[NumbersConfig]):
    name = "numbers"
    at = 0

    def schema(self):
        return {}

    def poll_batch(self, max_records):
        numbers = range(self.at, min(self.at + 200, int(Path(self.config.limit).read_text())))
        self.at += len(numbers)
        return [SourceEnvelope(SourceRecord.from_json("n", {"id": n, "text": "x" * 50})) for n in numbers] or None

    def checkpoint(self):
        return SourceCheckpoint(offsets={"at": self.at})

    def restore(self, checkpoint):
        self.at = checkpoint.offsets["at"]
'''

PIPELINE = """
connector_name = "soak-cluster"
delivery = "exactly-once"

[processing]
state_dir = "state"
epoch_interval_ms = 500
max_retries = 50

[[sources]]
name = "shop"
connector = "postgres_cdc"
dsn = "{dsn}"
tables = ["public.orders"]
slot = "soak_cluster"

[[sources]]
name = "numbers"
connector = "soak_numbers:Numbers"
limit = "{limit}"

[[schemas]]
topic = "/numbers/#"
schema_type = "json"

[[routes]]
source = "shop"
to = "/orders"
sinks = ["lake"]

[[routes]]
source = "numbers"
to = "/numbers/plain"
sinks = ["files"]

[[routes]]
source = "numbers"
to = "/numbers/even"
sql = "SELECT id FROM input WHERE id % 2 = 0"
sinks = ["files"]

[[sinks]]
name = "lake"
connector = "delta"
path = "{lake}/{{topic}}"
mode = "upsert"

[[sinks]]
name = "files"
connector = "files"
path = "{lake}/{{topic}}"
"""


class Driver:
    """The process that runs the pipeline; one at a time, each in a directory that only it can see."""

    def __init__(self, cluster: Cluster, environment: Path, home: Path) -> None:
        self._cluster, self._environment, self._home = cluster, environment, home
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        submit = {
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.ui.enabled": "false",
        }
        settings = " ".join(f"--conf {key}={value}" for key, value in submit.items())
        own = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK") and key != "PYTHONPATH"}
        own |= {
            "PYSPARK_SUBMIT_ARGS": f"--archives {self._environment}#environment {settings} pyspark-shell",
            "PYSPARK_PYTHON": "./environment/bin/python",
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        command = [sys.executable, "-m", "penstock", "run", str(self._home / "pipeline.toml"), *more]
        with open(self._home / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--master", self._cluster.url],
                env=own,
                cwd=self._home,
                stdout=log,
                stderr=log,
                umask=0,  # what it makes in the lake, the executors write to as another user
            )
        return self._process

    def kill(self) -> None:
        """Its JVM ends some seconds later, by itself."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def move(self) -> None:
        """As if its volume were taken to another machine."""
        other = self._home.with_name(self._home.name + "-elsewhere")
        self._home.rename(other)
        self._home = other

    @property
    def log(self) -> str:
        return (self._home / "log").read_text()[-4000:]


def write(dsn: str, limit: Path, stop: threading.Event, choice: random.Random) -> None:
    """Change rows of the table and let more messages come, until stopped."""
    number = 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not stop.wait(0.2):
            number += 50
            connection.execute(
                "INSERT INTO orders SELECT i, 'new' FROM generate_series(%s::int, %s::int) AS i", (number - 49, number)
            )
            some = [choice.randint(1, number) for _ in range(10)]
            connection.execute("UPDATE orders SET name = name || '+' WHERE id = ANY(%s)", (some[:7],))
            connection.execute("DELETE FROM orders WHERE id = ANY(%s)", (some[7:],))
            told(limit, number)


def told(limit: Path, number: int) -> None:
    """The source reads the file whenever it likes: it must never see an empty one."""
    following = limit.with_suffix(".next")
    following.write_text(str(number))
    following.replace(limit)


def executors(worker: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        family = psutil.Process(worker.pid).children(recursive=True)
        return [each for each in family if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline())]
    except psutil.NoSuchProcess:
        return []


def soak(cluster: Cluster, driver: Driver, workers: list[Any], choice: random.Random) -> tuple[dict[str, int], int]:
    """Gives what was killed how often, and how the last driver ended when it was asked to."""
    counts = {"executor": 0, "worker": 0, "driver": 0}
    running = driver.start()
    give_up = time.monotonic() + PATIENCE_SECS
    while not any(executors(worker) for worker in workers):
        assert running.poll() is None, f"the driver ended by itself\n{driver.log}"
        assert time.monotonic() < give_up, f"no executor came\n{driver.log}\n{cluster.log}"
        time.sleep(0.2)
    began = time.monotonic()
    events = {SECONDS * 4 // 10: "worker", SECONDS * 7 // 10: "driver"}
    next_kill = EVERY
    while (at := time.monotonic() - began) < SECONDS:
        time.sleep(0.2)
        assert running.poll() is None, f"the driver ended by itself\n{driver.log}"
        if at >= next_kill:
            next_kill += EVERY
            alive = [each for worker in workers for each in executors(worker)]
            if alive:  # none while the driver starts
                choice.choice(alive).kill()
                counts["executor"] += 1
        for when in [when for when in events if at >= when]:
            if events.pop(when) == "worker":
                lost = choice.randrange(len(workers))
                family = executors(workers[lost])
                workers[lost].kill()
                for each in family:
                    each.kill()
                time.sleep(5)
                workers[lost] = cluster.start_worker(lost)
                counts["worker"] += 1
            else:
                driver.kill()
                driver.move()
                running = driver.start()
                counts["driver"] += 1
        print(f"\r{at:4.0f} s {counts}", end="", file=sys.stderr, flush=True)
    running.terminate()
    return counts, running.wait(PATIENCE_SECS)


def compare(dsn: str, lake: Path, limit: int) -> dict[str, int]:
    with psycopg.connect(dsn) as connection:
        expected = dict(connection.execute("SELECT id, name FROM orders").fetchall())
    table = DeltaTable(lake / "orders").to_pyarrow_table().to_pydict()
    found = list(zip(table["id"], table["name"], strict=True))
    plain = read_published(lake / "numbers" / "plain")["id"].to_pylist()
    even = read_published(lake / "numbers" / "even")["id"].to_pylist()
    return {
        "rows": len(expected),
        "messages": limit,
        "lost": len(set(expected.items()) - set(found))
        + len(set(range(limit)) - set(plain))
        + len(set(range(0, limit, 2)) - set(even)),
        "doubled": sum(len(rows) - len(set(rows)) for rows in ([id for id, _ in found], plain, even)),
        "others": len(set(found) - set(expected.items())),
    }


def main() -> None:
    choice = random.Random(SEED)
    home = Path(tempfile.mkdtemp(prefix="penstock-driver-"))  # for this user alone
    with PostgresServer(18, settings={"fsync": "off"}) as server, Cluster() as cluster:
        if cluster.other_user is None:
            print("the workers run as this user: they could see the driver's directories", file=sys.stderr)
        lake = cluster.home / "lake"
        lake.mkdir()
        lake.chmod(0o777)
        limit = home.with_name(f"{home.name}-limit")
        told(limit, 0)
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id int PRIMARY KEY, name text)")
        (home / "soak_numbers.py").write_text(NUMBERS)
        (home / "pipeline.toml").write_text(PIPELINE.format(dsn=server.dsn, limit=limit, lake=lake))
        environment = home.with_name(f"{home.name}-environment.tar.gz")
        pack(environment, Pipeline.from_toml(home / "pipeline.toml"))
        driver, stop = Driver(cluster, environment, home), threading.Event()
        writing = threading.Thread(target=write, args=(server.dsn, limit, stop, choice))
        writing.start()
        try:
            kills, ended = soak(cluster, driver, cluster.workers, choice)
            assert writing.is_alive(), "nobody has changed the table"
        finally:
            stop.set()
            writing.join()
            driver.kill()
        drained = driver.start("--drain")
        assert drained.wait(PATIENCE_SECS) == 0, driver.log
        compared = compare(server.dsn, lake, int(limit.read_text()))
        apart = cluster.other_user is not None
    result = {"soak": "cluster", "commit": commit(), "machine": machine(), "seed": SEED, "seconds": SECONDS}
    result |= {"kills": kills, "exit_code_after_sigterm": ended, "workers_are_another_user": apart, **compared}
    (RESULTS / "soak-cluster.json").write_text(json.dumps(result, indent=2) + "\n")
    PAGE.write_text(page())
    print("\r" + json.dumps(result, indent=2))
    for left in (limit, environment):
        left.unlink()
    shutil.rmtree(driver._home)
    sys.exit(bool(result["lost"] or result["doubled"] or result["others"] or ended))


if __name__ == "__main__":
    main()
