"""Connections that are cut or stall in the middle, slots that change under a reader, and a log that nobody needs."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading

import psycopg
import pytest

from mirrored import database_on
from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig, follow
from penstock.connectors.postgresql import connections
from penstock.errors import FatalError, RetryableError
from penstock.source import ReadLimit
from penstock.testing.engine import Killed
from penstock.testing.mirror import Mirror, replayed
from penstock.testing.processes import wait_until

_NUMBERS = itertools.count()
ORDERS = "CREATE TABLE orders (id int8 PRIMARY KEY, version int8 NOT NULL DEFAULT 0, note text)"
ROWS = 2000


@pytest.fixture
def database(server):
    with database_on(server, f"cut_{next(_NUMBERS)}") as made:
        made.run(ORDERS, f"INSERT INTO orders SELECT i, 0, repeat('n', 100) FROM generate_series(1, {ROWS}) i")
        yield made


class Proxy:
    """Hands connections on to a server, and does to each what `fates` says once so many bytes of answers went by."""

    def __init__(self, port, fates=()):
        self._port = port
        self._fates = iter(fates)
        self.hit = []
        self.stalled = threading.Event()
        self.resume = threading.Event()
        self._open = []

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.resume.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._open:
            _cut(*pair)

    def dsn(self, database):
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database.name}"

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._open.append((client, server))
                fate = next(self._fates, None)
                threading.Thread(target=self._pump, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, fate), daemon=True).start()

    def _pump(self, source, target, fate):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if fate is not None and passed + len(data) > fate[1]:
                    target.sendall(data[: fate[1] - passed])
                    self.hit.append(fate)
                    if fate[0] == "cut":
                        break
                    self.stalled.set()
                    self.resume.wait()
                    data, fate = data[fate[1] - passed :], None
                target.sendall(data)
                passed += len(data)
        _cut(source, target)


def _cut(*sockets):
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # a close alone would wait for the forked processes


def through(proxy, database, **options):
    options = {"slot": database.name, "tables": ["public.orders"], "seed_chunk_rows": 300, **options}
    return PostgresCdc(PostgresCdcConfig(dsn=proxy.dsn(database), **options))


def check(database, mirror):
    log = mirror.log("public.orders")
    assert sorted(map(repr, replayed(log, ["id"]))) == sorted(map(repr, database.table("orders")))


def test_connections_that_are_cut_anywhere_lose_and_double_nothing(server, database, tmp_path):
    chance = random.Random(3)
    # Two sessions to begin with, then many that end early, in an answer or between two.
    fates = [
        None,
        None,
        *(("cut", chance.choice([900, 3000, 20_000, 60_000]) + chance.randrange(900)) for _ in range(16)),
    ]
    with Proxy(server.port, fates) as proxy:
        mirror = Mirror(tmp_path, through(proxy, database))
        run = mirror.start(until="copied")
        for number in range(20):
            database.run(f"UPDATE orders SET version = version + 1 WHERE id % 20 = {number}")

        def ended(result):
            # The Arrow driver ends its whole process if it is cut while it connects: a crash like any other.
            with contextlib.suppress(Killed, RetryableError):
                result()
                return True
            return False

        ended(run.result)
        wait_until(lambda: ended(mirror.run), "a run that nothing cuts off")
        assert len(proxy.hit) >= 5
    check(database, mirror)


@pytest.mark.parametrize("end", ["goes on", "is cut"])
def test_a_connection_that_stalls_in_an_answer_holds_nothing_up_for_good(server, database, tmp_path, end):
    Mirror(tmp_path, database.source(tables=["public.orders"])).run()
    database.run("UPDATE orders SET version = 1")
    with Proxy(server.port, [("stall", 120_000)] * 9) as proxy:
        mirror = Mirror(tmp_path, through(proxy, database))
        run = mirror.start(until="caught_up")
        wait_until(proxy.stalled.is_set, "the answer to stall")
        database.run("UPDATE orders SET version = 2 WHERE id < 10")  # the others are not in its way
        if end == "is cut":
            for pair in proxy._open:
                _cut(*pair)
        proxy.resume.set()
        run.result()
    check(database, mirror)


def test_a_peer_that_is_silently_gone_is_noticed_within_a_minute_or_as_the_dsn_says(server):
    for dsn, idle in ((server.dsn, 30), (server.dsn + "?keepalives_idle=7", 7)):
        with (
            contextlib.closing(connections.connect(PostgresCdcConfig(dsn=dsn, tables=["*"]))) as connection,
            socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as connected,
        ):
            assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_secs, every, count, unanswered = (
                connected.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            )
        assert idle_secs == idle
        assert idle_secs + every * count <= 60
        assert 0 < unanswered <= 60_000


def test_a_slot_that_is_made_again_between_the_look_and_the_read_is_noticed(database, monkeypatch):
    opened = database.source(snapshot="never", tables=["public.orders"])
    opened.open()
    try:
        start = opened.initial()
        database.run("UPDATE orders SET version = 1")
        end = opened.latest(start, ReadLimit())
        (split,) = opened.split(start, end)
        looked, looks = follow.verify, []

        def look_and_lose(*args):
            found = looked(*args)
            if not looks:
                looks.append(True)
                database.run(
                    f"SELECT pg_drop_replication_slot('{database.name}')",
                    f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
                )
            return found

        monkeypatch.setattr(follow, "verify", look_and_lose)
        with pytest.raises(FatalError, match=r"PEN-5011 .*made again"):
            list(opened.read(split))
    finally:
        opened.close()


def test_a_slot_that_is_made_again_while_the_pipeline_runs_stops_it(database, tmp_path):
    mirror = Mirror(tmp_path, database.source(tables=["public.orders"]))
    run = mirror.start(until="killed")
    wait_until(lambda: len(mirror.log("public.orders")) == ROWS, "the copy")

    def made_again():
        with contextlib.suppress(psycopg.errors.ObjectInUse):
            database.run(f"SELECT pg_drop_replication_slot('{database.name}')")
            return True
        return False

    wait_until(made_again, "the slot to be free")
    database.run(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')", "DELETE FROM orders")
    with pytest.raises(FatalError, match="PEN-5011"):
        run.result()


def test_an_idle_table_holds_back_no_more_log_than_comes_between_two_heartbeats(database):
    database.run("CREATE TABLE busy (id int8, filler text)")
    opened = database.source(snapshot="never", tables=["public.orders"], heartbeat_secs=0.05)
    opened.open()
    unread = held = 0
    try:
        position = opened.initial()
        ((first,),) = database.rows("SELECT pg_current_wal_lsn()::text")
        for _ in range(15):
            database.run("INSERT INTO busy SELECT i, repeat('x', 500) FROM generate_series(1, 2000) i")
            database.run("SELECT pg_log_standby_snapshot()")  # as the server does by itself every 15 s
            end = wait_until(lambda start=position: _moved(opened, start), "the heartbeat")
            assert [item.value for split in opened.split(position, end) for item in opened.read(split)] == [
                {"quiet": True}
            ]
            position = opened.next_start(end, [{"quiet": True}])
            opened.ack(position)
            ((now_unread, now_held),) = database.rows(
                "SELECT pg_current_wal_lsn() - confirmed_flush_lsn, pg_current_wal_lsn() - restart_lsn "
                f"FROM pg_replication_slots WHERE slot_name = '{database.name}'"
            )
            unread, held = max(unread, now_unread), max(held, now_held)
        ((written,),) = database.rows(f"SELECT pg_current_wal_lsn() - '{first}'")
    finally:
        opened.close()
    assert written > 15 << 20
    assert unread < 1 << 20
    assert held < 5 << 20


def _moved(opened, position):
    try:
        end = opened.latest(position, ReadLimit(rows=10))
    except RetryableError:
        return None
    return end if end != position else None
