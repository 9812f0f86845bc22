"""
Kafka → Delta, and PostgreSQL → Kafka → PostgreSQL, on three brokers: pipelines and brokers are killed again and again.

Each part is a function in `PARTS`; `SOAK_PARTS=delta` runs some of them, and the figures of the others stay in the result file as
they were, each with its commit. `SOAK_KILLS` and `SOAK_CRASHES` make it shorter.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Producer
from deltalake import DeltaTable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import PAGE, RESULTS, commit, machine, page

from kafka_topics import QUIET, make_topic, records, transaction
from penstock.testing.kafka import KafkaCluster
from penstock.testing.postgres import PostgresServer

KILLS = int(os.environ.get("SOAK_KILLS", 50))
CRASHES = int(os.environ.get("SOAK_CRASHES", 10))
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))
RESULT = RESULTS / "soak-kafka.json"
STUCK_SECS = 600

POINTS = ("plan.after", "stage.middle", "stage.after", "prepare.after", "commit.before", "commit.after", "ack.after")
OF_SHARDS = ("plan_apply.after", "apply.after")
UNDER_SPARK = min(4, KILLS // 12)
"""So many of the kills of each part are of a run under Spark; the others of a run whose tasks are forked."""

FORKED = """
import signal, sys, threading
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
engine = ForkEngine(2, die_with_task=True, task_attempts=3, zygote=True)
supervisor.run(Pipeline.from_toml(sys.argv[1]), engine, stop=stop)
"""

TO_DELTA = """
connector_name = "soak-delta"
delivery = "exactly-once"
[processing]
epoch_interval_ms = 50
max_epoch_rows = 20000
max_retries = 50
max_backoff_ms = 2000
[source]
connector = "kafka"
bootstrap_servers = "{bootstrap}"
topics = ["events"]
group_id = "soak-delta"
[[schemas]]
topic = "/events"
schema_type = "json"
[[sinks]]
connector = "delta"
path = "lake/{{topic}}"
"""

TO_KAFKA = """
connector_name = "soak-in"
delivery = "exactly-once"
[processing]
epoch_interval_ms = 50
max_retries = 50
max_backoff_ms = 2000
[source]
connector = "postgres_cdc"
dsn = "{dsn}"
tables = ["public.orders"]
[[routes]]
from = "public.*"
to = "/{{1}}"
[[schemas]]
topic = "/orders"
schema_type = "debezium"
[[sinks]]
connector = "kafka"
bootstrap_servers = "{bootstrap}"
topic = "shop.{{topic}}"
mode = "changes"
partitions = 4
publish_in_tasks_bytes = {in_tasks}
"""

FROM_KAFKA = """
connector_name = "soak-out"
delivery = "exactly-once"
[processing]
epoch_interval_ms = 50
max_retries = 50
max_backoff_ms = 2000
[source]
connector = "kafka"
bootstrap_servers = "{bootstrap}"
topics = ["^shop\\\\..*"]
group_id = "soak-out"
[[routes]]
from = "shop.*"
to = "/{{1}}"
[[schemas]]
topic = "/orders"
schema_type = "debezium"
[[sinks]]
connector = "postgres"
dsn = "{dsn}"
table = "mirror.{{table}}"
mode = "upsert"
key = ["id"]
"""


class Run:
    """A pipeline in a directory of its own, started again after each kill."""

    def __init__(self, home: Path, text: str) -> None:
        home.mkdir()
        self.home, self.file = home, home / "pipeline.toml"
        self.file.write_text(text)
        self.process: subprocess.Popen[bytes] | None = None
        self.ended: Counter[int] = Counter()

    def start(self, point: str | None = None, spark: bool = False) -> None:
        env = {**os.environ, **({"PENSTOCK_FAILPOINT": point} if point else {})}
        forked = [sys.executable, "-c", FORKED, str(self.file)]
        real = [sys.executable, "-m", "penstock", "run", str(self.file), "--master", "local[2]"]
        with open(self.home / "run.log", "ab") as log:
            self.process = subprocess.Popen(real if spark else forked, stdout=log, stderr=log, env=env)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def epoch(self) -> int:
        return max((int(f.stem) for f in (self.home / "state" / "epochs").glob("[0-9]*.json")), default=0)

    def keep_alive(self) -> None:
        """Start it again if it ended by itself, as a service manager does."""
        if not self.alive:
            if self.process is not None:
                self.ended_by_itself()
            self.start()

    def ended_by_itself(self) -> None:
        assert self.process is not None
        self.ended[self.process.returncode] += 1
        said = (self.home / "run.log").read_text(errors="replace")[-1500:]
        print(f"  {self.home.name} ended with {self.process.returncode}:\n{said}", file=sys.stderr, flush=True)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.alive:
            assert self.process is not None
            self.process.terminate()
            self.process.wait(STUCK_SECS)


class Crashes:
    """Kills one broker after the other in a thread, and starts it again; the next one only when all replicas are back."""

    def __init__(self, cluster: KafkaCluster, chance: random.Random, count: int) -> None:
        self.done = 0
        self._cluster, self._chance, self._count = cluster, chance, count
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for _ in range(self._count):
                time.sleep(self._chance.uniform(2, 8))
                broker = self._chance.choice(self._cluster.servers)
                broker.kill()
                time.sleep(self._chance.uniform(0.5, 6))
                broker.start()
                self._cluster.wait_until_all()
                self.done += 1
                print(f"  crash {self.done} of a broker", file=sys.stderr, flush=True)
        except BaseException as error:  # noqa: BLE001 (raised again, where it is waited for)
            self._error = error


class Writer:
    """Writes numbered messages, plain ones and in transactions of which some are aborted, and notes what must arrive."""

    def __init__(self, address: str, topic: str, seed: int) -> None:
        self.sent: set[int] = set()
        self._address, self._topic = address, topic
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        self._stopped.set()
        self._thread.join(STUCK_SECS)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 (raised again, where it is waited for)
            self._error = error

    def _write(self) -> None:
        settings = {"bootstrap.servers": self._address, "enable.idempotence": True, "message.timeout.ms": 0, **QUIET}
        plain, number = Producer(settings), 0
        while not self._stopped.wait(self._chance.uniform(0.01, 0.1)):
            ids = range(number, number + self._chance.randint(1, 200))
            number = ids.stop
            kind = self._chance.random()
            if kind < 0.9:
                for id in ids:
                    plain.produce(self._topic, self._text(id), key=str(id % 100))
                while plain.flush(60):
                    pass
                self.sent |= set(ids)
            else:
                self._in_transaction(ids, kind < 0.95)

    def _in_transaction(self, ids: range, commit: bool) -> None:
        try:
            with transaction(self._address, commit) as producer:
                for id in ids:
                    producer.produce(self._topic, self._text(id), key=str(id % 100))
        except Exception:  # noqa: BLE001 (a broker crashed: whether it was committed, the topic itself says at the end)
            return
        if commit:
            self.sent |= set(ids)

    def _text(self, id: int) -> bytes:
        return json.dumps({"id": id, "text": "x" * (id % 50)}).encode()


def wait(reached: Callable[[], bool], what: str, *runs: Run) -> None:
    """Wait, and keep the pipelines running meanwhile."""
    until = time.monotonic() + STUCK_SECS
    while not reached():
        for run in runs:
            run.keep_alive()
        if time.monotonic() > until:
            logs = "\n".join((run.home / "run.log").read_text(errors="replace")[-3000:] for run in runs)
            raise RuntimeError(f"{what} did not come within {STUCK_SECS} s:\n{logs}")
        time.sleep(0.1)


def killed(
    runs: list[Run], chance: random.Random, kills: int, under_spark: int, points: tuple[str, ...] = POINTS
) -> Counter[str]:
    """Kill the pipelines at named steps and at random moments; none before it has committed something since the last time."""
    kinds: Counter[str] = Counter()
    for number in range(kills):
        run = runs[number % len(runs)]
        run.stop()
        spark = number % max(1, kills // max(1, under_spark)) == 0 and kinds["under Spark"] < under_spark
        point = chance.choice(points) if number // len(runs) % 2 else None
        before = run.epoch
        run.start(point and f"{point}=kill@{1 if 'stage' in point else chance.randrange(1, 12)}", spark)
        others = [each for each in runs if each is not run]
        if point:
            late = time.monotonic() + 30  # an idle pipeline may not come so far
            wait(lambda run=run, late=late: not run.alive or time.monotonic() > late, f"the kill at {point}", *others)
            if run.alive:
                run.kill()
                point = None
            elif run.process is not None and run.process.returncode != -signal.SIGKILL:
                run.ended_by_itself()
        else:
            wait(lambda run=run, before=before: run.epoch > before or not run.alive, "the next epoch", *others)
            time.sleep(chance.uniform(0, 2))
            if run.alive:
                run.kill()
        kinds["under Spark" if spark else "at a step" if point else "at random"] += 1
        run.start()
        print(f"  kill {number + 1}, epoch {run.epoch}", file=sys.stderr, flush=True)
    return kinds


def delta() -> dict[str, Any]:
    """What is in the topic at the end, each record once, in Delta."""
    chance = random.Random(SEED)
    with KafkaCluster() as cluster, tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        make_topic(cluster.bootstrap, "events", 4, replication=3)
        run = Run(Path(name, "delta"), TO_DELTA.format(bootstrap=cluster.bootstrap))
        writer = Writer(cluster.bootstrap, "events", SEED)
        crashes = Crashes(cluster, chance, CRASHES // 2)
        kinds = killed([run], chance, KILLS * 2 // 5, UNDER_SPARK)
        wait(lambda: crashes.over, "the last crash", run)
        writer.finish()
        there = {json.loads(each.value())["id"] for each in records(cluster.bootstrap, "events")}
        assert writer.sent <= there, "the brokers lost records that they had acknowledged"

        def stored() -> Counter[int]:
            path = Path(name, "delta", "lake", "events")
            return Counter(DeltaTable(str(path)).to_pyarrow_table()["id"].to_pylist()) if path.exists() else Counter()

        try:
            wait(lambda: stored().keys() == there, "the last row", run)
        except RuntimeError as error:
            print(error, file=sys.stderr)
        run.stop()
        found = stored()
        return {
            "kills": dict(kinds),
            "broker crashes": crashes.done,
            "messages": len(there),
            "epochs": run.epoch,
            "ended by itself": sum(run.ended.values()),
            "lost": len(there - found.keys()),
            "doubled": sum(count - 1 for count in found.values()) + len(found.keys() - there),
        }


ORDERS = """
    CREATE TABLE orders (id int8 PRIMARY KEY, version int8 NOT NULL DEFAULT 0, note text);
    ALTER TABLE orders REPLICA IDENTITY FULL;
    INSERT INTO orders SELECT i, 0, 'n' || i FROM generate_series(1, 2000) i;
"""


def mirror() -> dict[str, Any]:
    """A table that is changed all the time, by way of Kafka in another server: each version once in Kafka, equal at the end."""
    chance = random.Random(SEED + 1)
    stopped = threading.Event()
    changes: Counter[tuple[int, int]] = Counter()

    def work(dsn: str) -> None:
        own, next_id = random.Random(SEED + 2), 2001
        with psycopg.connect(dsn, autocommit=True) as session:
            while not stopped.wait(own.uniform(0.005, 0.03)):
                with session.transaction():
                    for _ in range(own.randint(1, 20)):
                        if own.random() < 0.3:
                            session.execute("INSERT INTO orders VALUES (%s, 0, 'new')", (next_id,))
                            changes[next_id, 0] += 1
                            next_id += 1
                        elif own.random() < 0.1:
                            session.execute("DELETE FROM orders WHERE id = %s", (own.randrange(1, next_id),))
                        else:
                            row = session.execute(
                                "UPDATE orders SET version = version + 1, note = md5(note) WHERE id = %s RETURNING id, version",
                                (own.randrange(1, next_id),),
                            ).fetchone()
                            if row:
                                changes[row[0], row[1]] += 1

    with (
        KafkaCluster() as cluster,
        PostgresServer() as source,
        PostgresServer() as target,
        tempfile.TemporaryDirectory(prefix="penstock-soak-") as name,
    ):
        with psycopg.connect(source.dsn, autocommit=True) as session:
            session.execute(ORDERS)
        with psycopg.connect(target.dsn, autocommit=True) as session:
            session.execute("CREATE SCHEMA mirror")
        into = {"dsn": source.dsn, "bootstrap": cluster.bootstrap}
        runs = [
            Run(Path(name, "in"), TO_KAFKA.format(**into, in_tasks=128 << 20)),
            Run(Path(name, "out"), FROM_KAFKA.format(dsn=target.dsn, bootstrap=cluster.bootstrap)),
        ]
        runs[0].start()
        wait(lambda: runs[0].epoch > 0, "the first epoch", runs[0])
        worker = threading.Thread(target=work, args=(source.dsn,), daemon=True)
        worker.start()
        crashes = Crashes(cluster, chance, CRASHES - CRASHES // 2)
        kills = KILLS - KILLS * 2 // 5
        kinds = killed(runs, chance, kills // 2, UNDER_SPARK // 2)
        runs[0].file.write_text(
            TO_KAFKA.format(**into, in_tasks=0)
        )  # from its next start on, each epoch in eight transactions
        kinds += killed(runs, chance, kills - kills // 2, UNDER_SPARK - UNDER_SPARK // 2, (*POINTS, *OF_SHARDS))
        wait(lambda: crashes.over, "the last crash", *runs)
        stopped.set()
        worker.join()
        expected = rows(source.dsn, "orders")
        try:
            wait(lambda: rows(target.dsn, "mirror.orders") == expected, "the mirror to be equal", *runs)
        except RuntimeError as error:
            print(error, file=sys.stderr)
        for run in runs:
            run.stop()
        found = rows(target.dsn, "mirror.orders")
        published: Counter[tuple[int, int]] = Counter()
        for each in records(cluster.bootstrap, "shop.orders"):
            change = json.loads(each.value())
            change = change.get("payload", change)
            if change["op"] in ("c", "u"):
                published[change["after"]["id"], change["after"]["version"]] += 1
        return {
            "kills": dict(kinds),
            "broker crashes": crashes.done,
            "messages": sum(changes.values()),
            "rows": len(expected),
            "epochs": [run.epoch for run in runs],
            "kills while epochs were published in shards": kills - kills // 2,
            "ended by itself": sum(sum(run.ended.values()) for run in runs),
            "lost": len(changes.keys() - published.keys()) + len(expected.keys() - found.keys()),
            "doubled": sum(max(0, published[key] - changes[key]) for key in changes)
            + sum(found[key] != expected[key] for key in expected.keys() & found.keys())
            + len(found.keys() - expected.keys()),
        }


def rows(dsn: str, table: str) -> dict[int, tuple[Any, ...]]:
    with psycopg.connect(dsn) as session:
        known = session.execute("SELECT to_regclass(%s)", (table,)).fetchone()
        if known is None or known[0] is None:
            return {}
        return {row[0]: row[1:] for row in session.execute(f"SELECT id, version, note FROM {table}")}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"delta": delta, "mirror": mirror}


def main() -> None:
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    parts: dict[str, Any] = before.get("parts", {})
    for name in os.environ.get("SOAK_PARTS", ",".join(PARTS)).split(","):
        print(name, file=sys.stderr, flush=True)
        load, began = os.getloadavg()[0], time.monotonic()
        parts[name] = {**PARTS[name](), "commit": commit(), "seed": SEED, "load": round(load, 1)}
        parts[name]["seconds"] = round(time.monotonic() - began)
        print(f"  {parts[name]}", file=sys.stderr, flush=True)
        result = {
            "soak": "kafka",
            "commit": commit(),
            "machine": machine(),
            "kills": {name: sum(part["kills"].values()) for name, part in parts.items()},
            **{
                each: sum(part[each] for part in parts.values())
                for each in ("broker crashes", "messages", "lost", "doubled")
            },
            "parts": parts,
        }
        RESULT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        PAGE.write_text(page())
    print(f"lost {result['lost']} · doubled {result['doubled']}")
    sys.exit(1 if result["lost"] or result["doubled"] else 0)


if __name__ == "__main__":
    main()
