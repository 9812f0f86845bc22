"""Commands for tables and a pipeline that is killed around them: none is lost, and none is done twice."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import psycopg
import pytest

from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig, chunks, plan
from penstock.errors import DataError
from penstock.runtime.epochs import State
from penstock.tables import Requests
from penstock.testing.memory import MemorySink, MemorySinkConfig
from penstock.testing.mirror import Mirror, replayed
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until
from thorough import few

STEPS = (
    "plan.before",
    "plan.after",
    "stage.begin",
    "stage.middle",
    "stage.task",
    "stage.after",
    "prepare.after",
    "commit.after",
    "committed.after",
    "ack.after",
)


@pytest.fixture(scope="module")
def running(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18) as server:
        yield server


@pytest.fixture
def mirror(running, tmp_path):
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        connection.execute("DROP PUBLICATION IF EXISTS penstock")
        for name in ("orders", "items"):
            connection.execute(f"DROP TABLE IF EXISTS {name}")
            connection.execute(f"CREATE TABLE {name} (id int8 PRIMARY KEY, note text)")
            connection.execute(f"INSERT INTO {name} SELECT i, 'n' || i FROM generate_series(1, 20) i")
    reader = PostgresCdc(PostgresCdcConfig(dsn=running.dsn, tables=["public.*"], seed_chunk_rows=7))
    yield Mirror(tmp_path, reader)
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        free = "SELECT FROM pg_replication_slots WHERE active"
        wait_until(lambda: not connection.execute(free).fetchall(), "the slot to be free")
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")


class Writer:
    """A session that writes at random until it is stopped."""

    def __init__(self, mirror):
        self.dsn, self.chance = mirror.source.config.dsn, random.Random(7)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *exc):
        self.stopped.set()
        self.thread.join()

    def _run(self):
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self.stopped.wait(0.002):
                key, other = self.chance.randint(1, 25), self.chance.randint(1, 25)
                free = f"NOT EXISTS (SELECT FROM orders WHERE id = {other})"
                connection.execute(
                    self.chance.choice(
                        [
                            f"INSERT INTO orders VALUES ({key}) ON CONFLICT DO NOTHING",
                            f"UPDATE orders SET note = md5(random()::text) WHERE id BETWEEN {key} AND {key + 3}",
                            f"UPDATE orders SET id = {other} WHERE id = {key} AND {free}",
                            f"DELETE FROM orders WHERE id = {key}",
                        ]
                    )
                )


def requests(mirror):
    return Requests(mirror.path / "state" / "sources" / "source")


def run(mirror, *statements):
    with psycopg.connect(mirror.source.config.dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def check(mirror):
    with psycopg.connect(mirror.source.config.dsn) as connection:
        for name in ("orders", "items"):
            rows = connection.execute(f"SELECT id, note FROM {name} ORDER BY id").fetchall()
            found = replayed(mirror.log(f"public.{name}"), ["id"])
            assert sorted((row["id"], row["note"]) for row in found) == rows


def progress(mirror):
    newest = State(mirror.path / "state", "mirror").peek().newest
    end = mirror.source.position_type.model_validate(newest.ranges["source"].end)
    return mirror.source.next_start(end, newest.notes.get("source", ())).tables["public.orders"]


def test_a_command_is_done_once_wherever_the_run_that_takes_it_up_is_killed(mirror):
    mirror.run()
    for number, step in enumerate(few(STEPS), 1):
        run(mirror, f"INSERT INTO items VALUES ({100 + number})")
        requests(mirror).add("resync", ["public.orders"])
        run(mirror, f"DELETE FROM orders WHERE id = {number}")
        assert mirror.killed(f"{step}=kill"), step
        mirror.run()
        assert progress(mirror).copies == 1 + number, step
        assert "".join(row["_op"] for row in mirror.log("public.orders")).count("t") == number
        check(mirror)
    mirror.run()
    assert requests(mirror).pending() == []


def test_a_command_that_waits_for_a_run_that_never_took_it_up_is_kept(mirror):
    mirror.run()
    paused = mirror.start("plan.before=stop")  # it has read the requests, and none of it is durable
    run(mirror, "INSERT INTO orders VALUES (100)")
    requests(mirror).add("pause", ["public.orders"])
    paused.kill()
    mirror.run()
    assert progress(mirror).state == "paused"
    requests(mirror).add("resume", ["public.orders"])
    mirror.run()
    check(mirror)


def test_a_table_that_is_paused_in_the_middle_of_its_copy_begins_anew_when_it_resumes(mirror, monkeypatch):
    monkeypatch.setattr(chunks, "WHOLE_ROWS", 1)
    assert mirror.killed("committed.after=kill")
    assert progress(mirror).state == "seeding"
    requests(mirror).add("pause", ["public.orders"])
    run(mirror, "DELETE FROM orders WHERE id < 4", "DELETE FROM items WHERE id < 4")
    mirror.run()
    assert progress(mirror).state == "paused"
    requests(mirror).add("resume", ["public.orders"])
    assert mirror.killed("committed.after=kill")
    run(mirror, "DELETE FROM orders WHERE id = 19", "UPDATE orders SET note = 'x' WHERE id = 5")
    mirror.run()
    check(mirror)


def test_writers_that_race_a_copy_over_the_rows_in_the_target_lose_nothing(mirror, monkeypatch):
    monkeypatch.setattr(plan, "LOOKED_SECS", 0.0)
    mirror.parallelism = 1
    mirror.run()
    with Writer(mirror):
        for number, step in enumerate(("commit.after", "stage.task", "committed.after")):
            run(mirror, f"ALTER TABLE orders ADD COLUMN more_{number} int DEFAULT {number}")
            assert mirror.killed(f"{step}=kill"), step
            mirror.run(until="copied")
    mirror.run()
    log = mirror.log("public.orders")
    assert "t" not in {row["_op"] for row in log}
    found = replayed(log, ["id"], refreshed=True)
    with psycopg.connect(mirror.source.config.dsn) as connection:
        rows = connection.execute("SELECT id, note, more_0, more_1, more_2 FROM orders").fetchall()
    assert sorted(tuple(row.get(n) for n in ("id", "note", "more_0", "more_1", "more_2")) for row in found) == sorted(
        rows
    )


def test_writers_that_race_a_table_that_is_paused_and_resumed_lose_and_double_nothing(mirror, monkeypatch):
    monkeypatch.setattr(chunks, "WHOLE_ROWS", 1)
    mirror.run()
    with Writer(mirror):
        for verb in ("pause", "resume", "resync", "pause", "resync"):
            requests(mirror).add(verb, ["public.orders"])
            assert mirror.killed("committed.after=kill")
            mirror.run(until="copied")
    mirror.run()
    check(mirror)


class Picky(MemorySink):
    """Refuses the row with the key 15."""

    def write_batch(self, topic, batch):
        if 15 in batch.column("id").to_pylist():
            raise DataError(f"{topic}: no place for 15")
        return super().write_batch(topic, batch)


@dataclass
class TwoSinks(Mirror):
    """The first one refuses a row that comes late in the copy."""

    def _sinks(self):
        config = MemorySinkConfig(path=self.path / "target")
        return {"picky": Picky(config), "other": MemorySink(MemorySinkConfig(path=self.path / "other"))}


@pytest.mark.parametrize("step", few(STEPS))
def test_half_a_table_stays_in_no_sink_wherever_the_run_that_clears_it_is_killed(mirror, step):
    two = TwoSinks(mirror.path, mirror.source, parallelism=1)
    run(two, "DELETE FROM items WHERE id = 15")
    for _ in range(20):  # first the epoch that sets it aside, then the one that clears it, is hit
        assert two.killed(f"{step}=kill"), "it came to its end before the table was refused"
        if State(two.path / "state", "mirror").peek().newest and progress(two).state == "failed":
            break
    two.killed(f"{step}=kill")
    two.run()
    assert (progress(two).state, progress(two).remains) == ("failed", "cleared")
    logs = [sorted(sink.visible("/public.orders"), key=lambda row: row["_position"]) for sink in two._sinks().values()]
    for log in logs:
        assert "".join(row["_op"] for row in log) == "r" * 14 + "t"
        assert replayed(log, ["id"]) == []
    run(two, "DELETE FROM orders WHERE id = 15")
    requests(two).add("resume", ["public.orders"])
    two.run()
    check(two)
