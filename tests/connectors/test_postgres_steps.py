"""A range of log read in steps is the range read at once, and holds nothing back when it ends badly."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from contextlib import closing

import psycopg
import pytest

from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig
from penstock.connectors.postgres_cdc.copy import Chunk
from penstock.connectors.postgres_cdc.log import read, slot
from penstock.connectors.postgres_cdc.log.read import Prefetch
from penstock.connectors.postgresql import connections
from penstock.errors import RetryableError
from penstock.source import Note, ReadLimit, SourceContext
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until

COPIES = "SELECT slot_name FROM pg_replication_slots WHERE temporary"


@pytest.fixture(scope="module")
def running(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    # Two slots: that of the pipeline, and its copy.
    settings = {"max_replication_slots": "2", "fsync": "off", "max_wal_size": "2GB"}
    with PostgresServer(18, settings=settings) as server:
        yield server


@pytest.fixture
def connection(running):
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int8 PRIMARY KEY, version int8 NOT NULL DEFAULT 0, note text)")
        yield connection
        wait_until(
            lambda: not connection.execute("SELECT FROM pg_replication_slots WHERE active").fetchall(), "free slots"
        )
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        connection.execute("DROP PUBLICATION IF EXISTS penstock")
        connection.execute("DROP TABLE orders")


def made(dsn):
    return PostgresCdc(PostgresCdcConfig(dsn=dsn, tables=["public.orders"], snapshot="never"))


@pytest.fixture
def opened(running, connection):
    with closing(made(running.dsn)) as source:
        source.open()
        source.initial()
        yield source


@pytest.fixture
def asked(monkeypatch):
    """How the log was asked for, in order."""
    calls = []

    def tell(name, really):
        def told(*arguments):
            calls.append(name)
            return really(*arguments)

        monkeypatch.setattr(read, name, told)

    for name in ("peek_small", "peek", "consume"):
        tell(name, getattr(read, name))
    return calls


def the_range(opened):
    start = opened.initial()
    (split,) = opened.split(start, opened.latest(start, ReadLimit()))
    return split


def rows(opened, split):
    return [row for item in opened.read(split) if not isinstance(item, Note) for row in item.records.to_pylist()]


def at_once(monkeypatch, opened, split):
    with monkeypatch.context() as patch:
        patch.setattr(read, "SMALL_RANGE_BYTES", -1)
        patch.setattr(read, "STEP_BYTES", 1 << 40)
        return rows(opened, split)


def write_at_random(connection, choose, transactions):
    """Transactions of one to some hundred changes, some of which stay open while others commit."""
    with psycopg.connect(connection.info.dsn) as slow:
        key = itertools.count(1)
        for _ in range(transactions):
            session = slow if choose.random() < 0.2 else connection
            first, count = next(key), choose.choice([1, 1, 3, 20, 400])
            session.execute(
                f"INSERT INTO orders SELECT {first} * 1000 + i, 0, repeat('x', {choose.randrange(300)}) "
                f"FROM generate_series(1, {count}) i"
            )
            if choose.random() < 0.3:
                session.execute(f"UPDATE orders SET version = 1, id = -id WHERE id = {first} * 1000 + 1")
            if choose.random() < 0.3:
                slow.commit()


@pytest.mark.parametrize("seed", range(4))
def test_steps_give_the_rows_of_one_peek_wherever_they_end(connection, opened, asked, monkeypatch, seed):
    choose = random.Random(seed)
    write_at_random(connection, choose, 60)
    split = the_range(opened)
    expected = at_once(monkeypatch, opened, split)
    assert asked == ["peek"]
    assert len({row["_position"] for row in expected}) == len(expected) > 500
    monkeypatch.setattr(read, "SMALL_RANGE_BYTES", -1)
    monkeypatch.setattr(read, "STEPS", 1 << 40)
    for _ in range(4):
        asked.clear()
        monkeypatch.setattr(read, "STEP_BYTES", int(10 ** choose.uniform(3, 4.6)))
        assert rows(opened, split) == expected
        assert asked.count("consume") > 1
        wait_until(lambda: not connection.execute(COPIES).fetchall(), "the copies to go")


def test_steps_leave_the_slot_where_it_was_until_it_is_acknowledged(connection, opened, asked, monkeypatch):
    write_at_random(connection, random.Random(9), 30)
    monkeypatch.setattr(read, "STEP_BYTES", 5000)
    monkeypatch.setattr(read, "SMALL_RANGE_BYTES", -1)
    start, split = opened.initial(), the_range(opened)
    expected = rows(opened, split)
    assert slot.slot(connection, "penstock").confirmed == start.lsn
    assert rows(opened, split) == expected
    opened.ack(start.model_copy(update={"lsn": split.end}))
    assert slot.slot(connection, "penstock").confirmed == split.end
    assert "consume" in asked


def test_a_little_log_comes_as_one_value_and_is_the_same(connection, opened, asked, monkeypatch):
    assert rows(opened, steps_range(opened, connection)) == []
    connection.execute("INSERT INTO orders SELECT i, 0, NULLIF('é' || i, 'é3') FROM generate_series(1, 50) i")
    connection.execute("DELETE FROM orders WHERE id = 7")
    split = the_range(opened)
    expected = at_once(monkeypatch, opened, split)
    asked.clear()
    assert rows(opened, split) == expected
    assert asked == ["peek_small"]
    assert len(expected) == 51


def test_a_large_transaction_that_ends_in_a_little_log_is_not_taken_as_one_value(
    connection, opened, asked, monkeypatch
):
    connection.execute("INSERT INTO orders SELECT i, 0, repeat('x', 100) FROM generate_series(1, 1000) i")
    split = the_range(opened)
    monkeypatch.setattr(read, "SMALL_ANSWER_BYTES", 50_000)
    assert len(rows(opened, split)) == 1000
    assert asked == ["peek_small", "peek"]


def test_without_room_for_a_copy_the_log_is_peeked_at_and_the_reason_is_told(
    connection, opened, asked, monkeypatch, caplog
):
    write_at_random(connection, random.Random(5), 30)
    split = the_range(opened)
    expected = at_once(monkeypatch, opened, split)
    connection.execute("SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
    asked.clear()
    monkeypatch.setattr(read, "STEP_BYTES", 5000)
    monkeypatch.setattr(read, "SMALL_RANGE_BYTES", -1)
    assert rows(opened, split) == expected
    assert asked == ["peek"]
    assert "raise max_replication_slots" in caplog.text
    assert "no free slot" in opened.health_check().reason


def test_a_reader_that_is_left_early_lets_go_of_its_copy(connection, opened, asked, monkeypatch):
    write_at_random(connection, random.Random(6), 60)
    split = the_range(opened)
    monkeypatch.setattr(read, "STEP_BYTES", 5000)
    monkeypatch.setattr(read, "SMALL_RANGE_BYTES", -1)
    reading = opened.read(split)
    next(reading)
    reading.close()
    assert "consume" in asked
    wait_until(lambda: not connection.execute(COPIES).fetchall(), "the copy to go")


READER = """
import pickle, sys
from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig
from penstock.connectors.postgres_cdc.log import read
read.STEP_BYTES, read.PREFETCH_BYTES, read.STEPS = 5000, 1, 1 << 40
source = PostgresCdc(PostgresCdcConfig(dsn=sys.argv[1], tables=["public.orders"], snapshot="never"))
source.open()
reading = source.read(pickle.loads(bytes.fromhex(sys.argv[2])))
next(reading)
print("reading", flush=True)
sys.stdin.readline()
"""


def test_the_copy_of_a_killed_reader_goes_and_the_next_reader_has_everything(running, connection, opened, monkeypatch):
    write_at_random(connection, random.Random(7), 60)
    split = the_range(opened)
    expected = at_once(monkeypatch, opened, split)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, running.dsn, pickle.dumps(split).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout.readline() == "reading\n"
    assert len(connection.execute(COPIES).fetchall()) == 1
    os.kill(reader.pid, signal.SIGKILL)
    reader.communicate()
    wait_until(lambda: not connection.execute(COPIES).fetchall(), "the copy to go")
    assert rows(opened, split) == expected


MEASURED = """
import pickle, resource, sys
from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig
from penstock.source import Note
source = PostgresCdc(PostgresCdcConfig(dsn=sys.argv[1], tables=["public.orders"], snapshot="never"))
source.open()
for split in sys.argv[2:]:
    reading = source.read(pickle.loads(bytes.fromhex(split)))
    rows = size = 0
    for item in reading:
        if not isinstance(item, Note):
            rows, size = rows + item.num_rows, size + item.records.nbytes
    print(rows, size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)
"""


@pytest.mark.soak
def test_a_huge_transaction_is_read_in_bounded_memory(running, connection, opened):
    start = opened.initial()
    connection.execute("INSERT INTO orders SELECT i, 0, 'n' FROM generate_series(1, 20000) i")
    middle = opened.latest(start, ReadLimit())
    connection.execute("INSERT INTO orders SELECT -i, 0, repeat('x', 1000) FROM generate_series(1, 500000) i")
    end = opened.latest(middle, ReadLimit())
    splits = [pickle.dumps(opened.split(*each)[0]).hex() for each in ((start, middle), (middle, end))]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, running.dsn, *splits], check=True, capture_output=True, text=True
    )
    (few, _, before), (many, size, after) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert (few, many) == (20_000, 500_000)
    assert size > 500_000_000
    assert after - before < size / 2


class TestPrefetch:
    def test_items_come_in_order_and_an_error_comes_behind_them(self):
        def items():
            yield from range(100)
            raise RetryableError("the network is down")

        seen = []
        with pytest.raises(RetryableError, match="the network is down"), Prefetch(items(), lambda _: 1) as ahead:
            seen.extend(ahead)
        assert seen == list(range(100))

    def test_no_more_is_pulled_than_may_wait(self, monkeypatch):
        monkeypatch.setattr(read, "PREFETCH_BYTES", 30)
        pulled = []

        def items():
            for number in range(20):
                pulled.append(number)
                yield number

        with Prefetch(items(), lambda _: 10) as ahead:
            for number in ahead:
                assert len(pulled) <= number + 5
        assert len(pulled) == 20

    def test_leaving_early_interrupts_a_pull_that_blocks(self):
        blocked, interrupted = threading.Event(), threading.Event()

        def items():
            yield 1
            blocked.set()
            assert interrupted.wait(60)
            yield 2

        with Prefetch(items(), lambda _: 1, interrupt=interrupted.set) as ahead:
            assert next(ahead) == 1
            assert blocked.wait(60)
        assert interrupted.is_set()
        assert threading.active_count() == len([t for t in threading.enumerate() if t.name != "ahead"])


def steps_range(opened, connection):
    """A range of log without a change of the table."""
    start = opened.initial()
    connection.execute("CREATE TABLE other (id int8)")
    connection.execute("DROP TABLE other")
    (split,) = opened.split(start, start.model_copy(update={"lsn": slot.server(connection).flushed}))
    return split


class TestConnectionsOfTasks:
    @pytest.fixture(autouse=True)
    def nothing_handed_on(self):
        yield
        for connection, *_ in [*connections._idle.values(), *connections._idle_arrows.values()]:
            connection.close()
        connections._idle.clear()
        connections._idle_arrows.clear()

    def backend(self, opened):
        """The server's process for the next task of this process."""
        task = pickle.loads(pickle.dumps(opened))
        task.open(SourceContext(in_task=True))
        pid = task.session.ask(lambda connection: connection.info.backend_pid)
        task.close()
        return pid

    def test_a_task_goes_on_with_the_connection_of_the_last_one_and_not_with_the_drivers(self, opened):
        pid = self.backend(opened)
        assert self.backend(opened) == pid
        assert opened.session.ask(lambda connection: connection.info.backend_pid) != pid

    def copying(self, opened):
        """The server's process that gives the next task of this process the rows of a table."""
        held = opened.session.export_snapshot(list(opened.session.tables.captured.values()))
        task = pickle.loads(pickle.dumps(opened))
        task.open(SourceContext(in_task=True))
        list(
            task.read(
                Chunk(
                    opened.session.tables.captured["public.orders"], opened.session.catalog, None, None, held, held.lsn
                )
            )
        )
        task.close()
        ((_, pid, _),) = connections._idle_arrows.values()
        return pid

    def test_rows_come_over_the_connection_of_the_last_task(self, connection, opened):
        pid = self.copying(opened)
        assert self.copying(opened) == pid
        connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
        assert self.copying(opened) != pid

    def test_the_one_for_rows_is_closed_when_nothing_was_copied_for_a_while(self, connection, opened, monkeypatch):
        pid = self.copying(opened)
        self.backend(opened)
        assert connections._idle_arrows
        monkeypatch.setattr(connections, "IDLE_SECS", 0.0)
        self.backend(opened)
        assert not connections._idle_arrows
        there = "SELECT FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: not connection.execute(there, [pid]).fetchall(), "the server's process to go")

    def test_one_that_the_server_ended_is_made_anew(self, connection, opened):
        pid = self.backend(opened)
        connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
        assert self.backend(opened) != pid

    def test_one_that_waited_for_long_is_made_anew(self, opened, monkeypatch):
        pid = self.backend(opened)
        monkeypatch.setattr(connections, "IDLE_SECS", 0.0)
        assert self.backend(opened) != pid

    def test_one_with_a_transaction_open_is_not_handed_on(self, opened):
        task = pickle.loads(pickle.dumps(opened))
        task.open(SourceContext(in_task=True))
        task.session.ask(lambda connection: connection.execute("BEGIN"))
        task.close()
        assert not connections._idle

    def test_a_forked_process_makes_its_own(self, opened):
        pid = self.backend(opened)
        child = os.fork()
        if not child:
            os._exit(int(self.backend(opened) == pid))
        assert os.waitpid(child, 0)[1] == 0
        assert self.backend(opened) == pid
