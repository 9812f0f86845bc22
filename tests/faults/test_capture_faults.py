"""Captures as whole pipelines, killed between the journal's fsync and the confirmation, in mid-copy and at random."""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
import subprocess
import sys
import threading

import psycopg
import pytest
from deltalake import DeltaTable

from penstock import failpoints
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.postgres_capture.source import PostgresCapture, PostgresCaptureConfig
from penstock.connectors.sql_poll import SqlPoll, SqlPollConfig
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Router
from penstock.runtime import supervisor
from penstock.sink import DeliveryGuarantee
from penstock.testing import ForkEngine, MemorySink, MemorySinkConfig
from penstock.testing.engine import Forked, Killed
from penstock.testing.mirror import versions_are_dense
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until

ROWS = 200
TABLE = "CREATE TABLE orders (id bigint PRIMARY KEY, version bigint, at bigint, gone boolean)"


class Postgres:
    """Every change of a row, from the log."""

    topic = "/public.orders"
    sees_all = True

    def __init__(self, server):
        self.dsn = server.dsn
        self.run("DROP PUBLICATION IF EXISTS penstock", "DROP TABLE IF EXISTS orders", TABLE)
        self.run(f"INSERT INTO orders SELECT i, 0, 0, false FROM generate_series(1, {ROWS}) i")

    def source(self):
        options = {"dsn": self.dsn, "tables": ["public.orders"], "poll_interval_ms": 5, "heartbeat_secs": 0.2}
        return PostgresCapture(PostgresCaptureConfig.model_validate(options))

    def connect(self):
        return psycopg.connect(self.dsn, autocommit=True)

    def run(self, *statements):
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def statement(self, key, what, at):
        return {
            "insert": f"INSERT INTO orders VALUES ({key}, 0, 0, false) ON CONFLICT DO NOTHING",
            "update": f"UPDATE orders SET version = version + 1 WHERE id BETWEEN {key} AND {key + 3}",
            "delete": f"DELETE FROM orders WHERE id = {key}",
        }[what]

    def rows(self):
        with self.connect() as connection:
            return dict(connection.execute("SELECT id, version FROM orders WHERE NOT gone").fetchall())


class Polled(Postgres):
    """The rows of the same server as they are at each look."""

    topic = "/orders"
    sees_all = False

    def source(self):
        options = {"dsn": self.dsn, "tables": ["orders"], "key": ["id"], "cursor": "at", "deleted": "gone"}
        quick = {"settle_ms": 0, "poll_interval_ms": 5, "batch_rows": 30}
        return SqlPoll(SqlPollConfig.model_validate({**options, **quick}))

    def statement(self, key, what, at):
        return {
            "insert": f"INSERT INTO orders VALUES ({key}, 0, {at}, false) ON CONFLICT DO NOTHING",
            "update": f"UPDATE orders SET version = version + 1, at = {at} WHERE id BETWEEN {key} AND {key + 3}",
            "delete": f"UPDATE orders SET gone = true, version = version + 1, at = {at} WHERE id = {key}",
        }[what]


class PolledFile(Polled):
    """The same over a file of SQLite."""

    def __init__(self, path):
        self.path, self.dsn = path, f"sqlite:{path}"
        self.run("PRAGMA journal_mode = wal", TABLE)
        self.run(*(f"INSERT INTO orders VALUES ({i}, 0, 0, false)" for i in range(1, ROWS + 1)))

    def connect(self):
        return sqlite3.connect(self.path, isolation_level=None, timeout=30)


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18) as running:
        yield running


@pytest.fixture(params=[Postgres, Polled, PolledFile])
def outside(request, tmp_path):
    if request.param is PolledFile:
        yield PolledFile(tmp_path / "shop.db")
        return
    made = request.param(request.getfixturevalue("server"))
    yield made
    made.run("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")


WRITING = threading.Lock()
"""No process is forked while SQLite writes: its locks would be held in the child for ever."""
os.register_at_fork(before=WRITING.acquire, after_in_parent=WRITING.release, after_in_child=WRITING.release)


class Writer:
    """Writes at random until it is stopped; nobody else writes, so the cursor grows as changes are committed."""

    def __init__(self, outside, seed=0):
        self.outside, self.chance, self.clock = outside, random.Random(seed), itertools.count(1)
        self.stopped = threading.Event()
        self.written = 0
        self.thread = threading.Thread(target=self._run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.stopped.set()
        self.thread.join()

    def _run(self):
        connection = None
        while not self.stopped.wait(0.003):
            try:
                key, what = self.chance.randint(1, ROWS + 30), self.chance.choice(["insert", "update", "delete"])
                with WRITING:
                    connection = connection or self.outside.connect()
                    connection.execute(self.outside.statement(key, what, next(self.clock)))
                self.written += 1
            except psycopg.OperationalError:
                connection = None
        if connection is not None:
            connection.close()


class Pipe:
    """A pipeline from a capture into a log of changes and a table by key, run in processes of its own."""

    def __init__(self, path, outside, sinks=("log", "table")):
        self.path, self.outside, self.names = path, outside, sinks

    def sink(self, name):
        mode = "upsert" if name == "table" else "append"
        return MemorySink(MemorySinkConfig(path=self.path / name, mode=mode))

    def start(self, failpoint=None, drain=False):
        return Forked(lambda: self._drive(failpoint, drain))

    def killed(self, failpoint):
        """Run until the failpoint ends it."""
        with pytest.raises(Killed):
            self.start(failpoint).result()

    def drain(self):
        """Run until all that is there now is committed."""
        self.start(drain=True).result()

    def _drive(self, failpoint, drain):
        processing = Processing(
            state_dir=self.path / "state",
            epoch_interval_ms=20,
            max_batch_records=40,
            linger_ms=1,
            retry_backoff_ms=20,
            max_backoff_ms=200,
            max_retries=500,
        )
        pipeline = Pipeline(
            "capture",
            {"source": self.outside.source()},
            {name: self.sink(name) for name in self.names},
            Router((), self.names),
            DeliveryGuarantee.EXACTLY_ONCE,
            processing,
        )
        failpoints.arm(failpoint)
        supervisor.run(pipeline, engine=ForkEngine(1, die_with_task=True), drain=drain)

    def log(self):
        """Every change in its order."""
        return sorted(self.shown("log"), key=lambda row: row["_position"])

    def shown(self, name):
        return self.sink(name).visible(self.outside.topic)

    def check(self):
        """Each change once and in order in the log, and the table as it is outside."""
        log, outside = self.log(), self.outside.rows()
        assert len({row["_position"] for row in log}) == len(log)
        if self.outside.sees_all:
            versions_are_dense(log, "id", "version")
        else:
            versions_grow(log)
        assert replayed(log) == outside
        assert {row["id"]: row["version"] for row in self.shown("table")} == outside


def versions_grow(log):
    """What is polled may miss values between two looks, but none may come twice or out of order."""
    last = {}
    for row in log:
        if row["_op"] == "t":
            last.clear()
        elif row["_op"] != "d":
            assert row["version"] > last.get(row["id"], -1), f"{row} comes after version {last[row['id']]}"
            last[row["id"]] = row["version"]


def replayed(log):
    table = {}
    for row in log:
        if row["_op"] == "t":
            table.clear()
        elif row["_op"] == "d":
            table.pop(row["id"], None)
        else:
            table[row["id"]] = row["version"]
    return table


@pytest.mark.parametrize("step", ["journal.data", "journal.index", "journal.told"])
def test_a_kill_around_the_confirmation_loses_and_doubles_nothing(outside, tmp_path, step):
    pipe = Pipe(tmp_path, outside)
    with Writer(outside):
        for count in (9, 2, 1, 4):
            pipe.killed(f"{step}=kill@{count}")
    pipe.drain()
    pipe.check()


def test_a_change_that_was_journaled_and_never_confirmed_comes_once(outside, tmp_path):
    pipe = Pipe(tmp_path, outside)
    pipe.drain()
    seen = len(pipe.log())
    outside.run(outside.statement(1, "update", 10), outside.statement(9, "update", 11))
    pipe.killed("journal.index=kill")
    pipe.drain()
    pipe.check()
    assert [(row["_op"], row["id"], row["version"]) for row in pipe.log()[seen:]] == [
        ("u", id, 1) for id in (1, 2, 3, 4, 9, 10, 11, 12)
    ]


def test_kills_at_the_steps_of_an_epoch_lose_and_double_nothing(outside, tmp_path):
    pipe = Pipe(tmp_path, outside)
    with Writer(outside):
        for step in ("stage.middle", "prepare.after", "commit.sink", "committed.after"):
            pipe.killed(f"{step}=kill")
    pipe.drain()
    pipe.check()


@pytest.mark.soak
def test_kills_at_random_lose_and_double_nothing(outside, tmp_path):
    pipe, chance = Pipe(tmp_path, outside), random.Random(7)
    with Writer(outside) as writer:
        for _ in range(5):
            run, goal = pipe.start(), writer.written + chance.randint(5, 60)
            wait_until(lambda goal=goal: writer.written >= goal, "the writer")
            run.kill()
    pipe.drain()
    pipe.check()


def test_a_copy_that_is_killed_in_its_middle_is_made_again_whole(outside, tmp_path):
    pipe = Pipe(tmp_path, outside)
    with Writer(outside):
        for count in (2, 3):
            pipe.killed(f"journal.index=kill@{count}")
    pipe.drain()
    pipe.check()


def test_a_sink_that_is_added_later_gets_a_copy_even_if_that_is_killed(outside, tmp_path):
    Pipe(tmp_path, outside, sinks=("log",)).drain()
    pipe = Pipe(tmp_path, outside)
    with Writer(outside) as writer:
        wait_until(lambda: writer.written > 20, "the writer")
        pipe.killed("journal.index=kill@3")
    pipe.drain()
    pipe.check()
    assert "t" in {row["_op"] for row in pipe.log()}


def test_a_server_that_restarts_is_read_on_from(server, tmp_path):
    outside = Postgres(server)
    pipe = Pipe(tmp_path, outside)
    with Writer(outside):
        run = pipe.start()
        wait_until(lambda: len(pipe.log()) > ROWS, "changes behind the copy")
        server.restart("immediate")
        seen = len(pipe.log())
        wait_until(lambda: len(pipe.log()) > seen + 10, "changes behind the restart")
        run.kill()
    pipe.drain()
    pipe.check()
    outside.run("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")


def test_delta_tables_by_key_and_as_a_log_hold_each_change_once():
    """In a process of its own: Delta's client does not survive the fork of one that has used it."""
    only = [f"{__file__}::into_delta", "-o", "python_functions=into_delta", "-p", "no:xdist"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *only], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def into_delta(server, tmp_path):
    class IntoDelta(Pipe):
        def sink(self, name):
            mode = "upsert" if name == "table" else "changes"
            return Delta(DeltaConfig(path=f"{self.path}/{name}/{{topic}}", mode=mode))

        def shown(self, name):
            return DeltaTable(self.path / name / self.outside.topic[1:]).to_pyarrow_table().to_pylist()

    pipe = IntoDelta(tmp_path, Postgres(server))
    with Writer(pipe.outside):
        for failpoint in ("journal.index=kill@3", "commit.sink=kill", "journal.index=kill@2"):
            pipe.killed(failpoint)
    pipe.drain()
    pipe.check()
    pipe.outside.run("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
