"""
Upserts into Delta (deletion vectors) and Iceberg (position deletes) in an S3 server, and every change into a Delta log.

The pipeline is killed at named steps and at random moments, the server is killed or frozen, and another program compacts all
three tables meanwhile. The first kills are of processes without a JVM, the last ones of Spark. At the end the tables must
hold exactly what the changes come to, and the log each change once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError
from engine import newest_epoch, victim
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from sqlalchemy.exc import DBAPIError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "modules"))
import lake_updates
from measure import PAGE, RESULTS, commit, machine, page

from penstock.config import Config
from penstock.runtime.epochs import State
from penstock.store import StorageOptions
from penstock.store.options import for_delta
from penstock.testing.s3 import KEY, SECRET, S3ProxyServer

KILLS = int(os.environ.get("SOAK_KILLS", 50))
SPARK_KILLS = int(os.environ.get("SOAK_SPARK_KILLS", KILLS // 8))
OUTAGES = int(os.environ.get("SOAK_OUTAGES", 10))
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))
STUCK_SECS = 900

PIPELINE = """
connector_name = "soak-lakes"
delivery = "exactly-once"
[processing]
state_dir = "state"
epoch_interval_ms = 100
retry_backoff_ms = 200
max_backoff_ms = 2000
[source]
connector = "lake_updates:Updates"
path = "limit"
[[sinks]]
name = "delta"
connector = "delta"
path = "{bucket}/delta/{{topic}}"
mode = "upsert"
apply = "vectors"
storage_options = {options}
[[sinks]]
name = "iceberg"
connector = "iceberg"
path = "{bucket}/iceberg/{{topic}}"
mode = "upsert"
catalog_uri = "sqlite:///{home}/catalog.db"
storage_options = {options}
[[sinks]]
name = "log"
connector = "delta"
path = "{bucket}/log/{{topic}}"
mode = "changes"
storage_options = {options}
"""

POINTS = (
    "plan.after", "stage.middle", "stage.task", "stage.after", "prepare.after", "plan_apply.after", "apply.task",
    "apply.after", "commit.before", "commit.sink", "commit.after", "committed.after",
)  # fmt: skip


class _Options(Config):
    storage_options: StorageOptions


class Tables:
    """The three tables as other programs see them."""

    def __init__(self, server: S3ProxyServer, bucket: str, home: Path) -> None:
        self.bucket, self.server, self.home = bucket, server, home
        self.options = for_delta(bucket, _Options(storage_options=server.options()).storage_options)

    def delta(self, name: str) -> DeltaTable:
        return DeltaTable(f"{self.bucket}/{name}/rows", storage_options=self.options)

    def iceberg(self):  # type: ignore[no-untyped-def]
        own = {"s3.endpoint": self.server.endpoint, "s3.access-key-id": KEY, "s3.secret-access-key": SECRET}
        catalog = SqlCatalog("default", uri=f"sqlite:///{self.home}/catalog.db", **own, **{"s3.region": "us-east-1"})
        return catalog.load_table("default.rows")

    def rows(self, name: str, *columns: str) -> pa.Table:
        if name == "iceberg":
            return self.iceberg().scan(selected_fields=columns).to_arrow()
        query = f"SELECT {', '.join(columns)} FROM t"
        return pa.table(QueryBuilder().register("t", self.delta(name)).execute(query).read_all())


@dataclass
class Compactor:
    """Another program that rewrites the tables, over and over, and gives way whenever somebody else was faster."""

    tables: Tables
    won: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        chance = random.Random(SEED)
        while not self.stop.wait(chance.uniform(1, 15)):
            for name in ("delta", "iceberg", "log"):
                self.once(name)

    def once(self, name: str) -> None:
        try:
            if name == "iceberg":
                table = self.tables.iceberg()
                if table.properties.get("commit.retry.num-retries") != "0":  # or the client would repeat an old rewrite
                    with table.transaction() as change:
                        change.set_properties({"commit.retry.num-retries": "0"})
                table.overwrite(table.scan().to_arrow())
            else:
                self.tables.delta(name).optimize.compact()
            self.won[name] += 1
        except (DeltaError, CommitFailedException, NoSuchTableError, DBAPIError, OSError, ValueError) as error:
            self.lost[f"{name}: {type(error).__name__}"] += 1


@dataclass
class Run:
    """The pipeline, started as often as it takes."""

    home: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self, spark: bool = False, failpoint: str = "", drain: bool = False) -> None:
        module = Path(lake_updates.__file__)
        command = [sys.executable, str(module), str(self.home / "pipeline.toml")]
        if spark:
            command = [sys.executable, "-m", "penstock", "run", command[2], "--master", "local[2]"]
        environment = {**os.environ, "PENSTOCK_FAILPOINT": failpoint}
        with open(self.home / "run.log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *(["--drain"] if drain else [])], stdout=log, stderr=log, env=environment
            )
        self.starts += 1

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait(self, seconds: float) -> bool:
        """True if it has ended by itself within that time."""
        assert self.process is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self, kind: str) -> bool:
        assert self.process is not None
        try:
            chosen = victim(kind, self.process) if self.alive else None
            if chosen is not None:
                chosen.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return False
        if kind == "driver":
            self.process.wait()
        return chosen is not None


def outage(server: S3ProxyServer, choice: random.Random, kinds: Counter[str]) -> None:
    kind = choice.choices(["killed", "frozen"], [7, 3])[0]
    if kind == "killed":
        server.stop()
        time.sleep(choice.uniform(0.5, 15))
        server.start()
    else:
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(choice.uniform(0.5, 20))
        os.kill(server.pid, signal.SIGCONT)
    kinds[kind] += 1


def fire(home: Path, server: S3ProxyServer, compactor: Compactor, choice: random.Random) -> tuple[Counter[str], ...]:
    """All kills and outages."""
    kills: Counter[str] = Counter()
    outages: Counter[str] = Counter()
    run = Run(home)
    dark = set(choice.sample(range(KILLS), min(OUTAGES, KILLS)))
    while kills.total() < KILLS:
        spark = kills.total() >= KILLS - SPARK_KILLS
        point = "" if spark or choice.random() < 0.5 else choice.choice(POINTS)
        if not run.alive:
            run.start(spark, point and f"{point}=kill@{choice.randint(1, 12)}")
        goal, limit = newest_epoch(home) + choice.randint(1, 4), time.time() + 90
        while newest_epoch(home) < goal and run.alive and time.time() < limit:
            time.sleep(0.02)
        if kills.total() in dark:
            dark.discard(kills.total())
            outage(server, choice, outages)
        if point:
            if run.wait(30):
                kills[point] += 1
                continue
        else:
            time.sleep(choice.uniform(0, 1.0))
        kind = choice.choices(["driver", "jvm", "worker"] if spark else ["driver", "worker"], [6, 2, 2][: 2 + spark])[0]
        kills[f"{'spark ' if spark else ''}{kind}"] += run.kill(kind)
        print(
            f"\rkills {kills.total()}/{KILLS} · outages {outages.total()} · epoch {newest_epoch(home)} · "
            f"compactions {compactor.won.total()}", end="", file=sys.stderr, flush=True,
        )  # fmt: skip
    for _ in dark:
        outage(server, choice, outages)
    compactor.stop.set()
    settle(home, run)
    return kills, outages, Counter(starts=run.starts)


def settle(home: Path, run: Run) -> None:
    """Let the source end a little later than it is now, and read all of it: a drain takes one epoch more at a time."""
    if run.alive:
        run.kill("driver")
    goal = reached(home) + 50
    (home / "limit").write_text(str(goal))
    until = time.monotonic() + STUCK_SECS
    while time.monotonic() < until:
        run.start(drain=True)
        assert run.process is not None
        if run.wait(STUCK_SECS) and run.process.returncode == 0 and reached(home) == goal:
            return
    raise AssertionError(f"the pipeline did not end:\n{(home / 'run.log').read_text()[-4000:]}")


def reached(home: Path) -> int:
    """The tick at which the newest epoch ends."""
    newest = State(home / "state", "soak-lakes").peek().newest
    return int(newest.ranges["updates"].end["tick"]) if newest is not None else 0


def compare(tables: Tables, ticks: int) -> dict[str, dict[str, int]]:
    """What each table lacks, and what it has too often."""
    values = lake_updates.expected(ticks)
    ids = np.flatnonzero(values >= 0)
    wanted = Counter(zip(ids.tolist(), values[ids].tolist(), strict=True))
    found = {}
    for name in ("delta", "iceberg"):
        rows = tables.rows(name, "id", "value")
        seen = Counter(zip(rows["id"].to_pylist(), rows["value"].to_pylist(), strict=True))
        found[name] = {"rows": rows.num_rows, "lost": (wanted - seen).total(), "doubled": (seen - wanted).total()}
    every = tables.rows("log", "value")["value"].to_numpy()
    seen_values, counts = np.unique(every, return_counts=True)
    expected = lake_updates.values(ticks)
    found["log"] = {
        "rows": len(every),
        "lost": len(np.setdiff1d(expected, seen_values)),
        "doubled": int((counts - 1).sum()) + len(np.setdiff1d(seen_values, expected)),
    }
    return found


def main() -> None:
    choice = random.Random(SEED)
    began = time.time()
    print(f"seed {SEED}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name, S3ProxyServer() as server:
        home = Path(name)
        options = ", ".join(f"{key} = {_toml(value)}" for key, value in server.options().items())
        bucket = server.bucket()
        (home / "pipeline.toml").write_text(PIPELINE.format(bucket=bucket, options=f"{{ {options} }}", home=home))
        (home / "lake_updates.py").write_text(Path(lake_updates.__file__).read_text())
        (home / "limit.began").write_text(str(time.time()))
        tables = Tables(server, bucket, home)
        compactor = Compactor(tables)
        thread = threading.Thread(target=compactor.run, daemon=True)
        thread.start()
        kills, outages, other = fire(home, server, compactor, choice)
        thread.join(120)
        ticks = int((home / "limit").read_text())
        compared = compare(tables, ticks)
        state = State(home / "state", "soak-lakes").peek()
        assert state.newest is not None
    lost = sum(each["lost"] for each in compared.values())
    doubled = sum(each["doubled"] for each in compared.values())
    result = {
        "soak": "lakes",
        "seed": SEED,
        "server": "S3Proxy",
        "kills": dict(kills),
        "outages": dict(outages),
        "starts": other["starts"],
        "foreign rewrites": {"committed": dict(compactor.won), "gave way": dict(compactor.lost)},
        "epochs": state.newest.number,
        "changes": len(lake_updates.values(ticks)),
        "tables": compared,
        "lost": lost,
        "doubled": doubled,
        "seconds": round(time.time() - began),
        "commit": commit(),
        "machine": machine(),
    }
    if KILLS >= 50:
        (RESULTS / "soak-lakes.json").write_text(json.dumps(result, indent=2) + "\n")
        PAGE.write_text(page())
    print("\r" + json.dumps(result, indent=2))
    print(f"lost {lost} · doubled {doubled}")
    sys.exit(1 if lost or doubled else 0)


def _toml(value: object) -> str:
    return f'{{ env = "{value["env"]}" }}' if isinstance(value, dict) else f'"{value}"'


if __name__ == "__main__":
    main()
