"""Change capture under fire: the pipeline killed at every step, the server restarted, sessions that hang."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from contextlib import closing

import psycopg
import pytest

from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig
from penstock.connectors.postgresql import connections
from penstock.errors import ConfigError, RetryableError
from penstock.source import Note, ReadLimit
from penstock.testing.engine import Killed
from penstock.testing.mirror import Mirror, replayed, versions_are_dense
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until
from thorough import THOROUGH

STEPS = (
    "plan.after",
    "stage.begin",
    "stage.middle",
    "stage.task",
    "stage.after",
    "prepare.after",
    "commit.after",
    "committed.after",
)
ROWS = 300


@pytest.fixture(scope="module")
def running(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18) as server:
        yield server


@pytest.fixture
def server(running):
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        connection.execute("DROP PUBLICATION IF EXISTS penstock")
        connection.execute("DROP TABLE IF EXISTS orders")
        connection.execute("CREATE TABLE orders (id int8 PRIMARY KEY, version int8 NOT NULL, note text)")
        connection.execute(f"INSERT INTO orders SELECT i, 0, 'n' || i FROM generate_series(1, {ROWS}) i")
    yield running
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")


def source_of(server, **options):
    return PostgresCdc(
        PostgresCdcConfig(dsn=server.dsn, tables=["public.orders"], **{"seed_chunk_rows": 30, **options})
    )


class Writer:
    """A session that writes at random until it is stopped; it outlives restarts of the server."""

    def __init__(self, server, seed=0):
        self.dsn, self.chance = server.dsn, random.Random(seed)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *exc):
        self.stopped.set()
        self.thread.join()

    def _run(self):
        while not self.stopped.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    while not self.stopped.wait(0.003):
                        connection.execute(self._statement())
            except psycopg.OperationalError:
                self.stopped.wait(0.05)

    def _statement(self):
        key = self.chance.randint(1, ROWS + 30)
        return self.chance.choice(
            [
                f"INSERT INTO orders VALUES ({key}, 0) ON CONFLICT DO NOTHING",
                f"UPDATE orders SET version = version + 1 WHERE id BETWEEN {key} AND {key + 5}",
                f"DELETE FROM orders WHERE id = {key}",
            ]
        )


def check(server, mirror):
    log = mirror.log("public.orders")
    with psycopg.connect(server.dsn) as connection:
        rows = connection.execute("SELECT id, version, note FROM orders").fetchall()
    assert sorted((r["id"], r["version"], r["note"]) for r in replayed(log, ["id"])) == sorted(rows)
    versions_are_dense(log, "id", "version")


def test_kills_at_every_step_of_copy_and_stream_lose_and_double_nothing(server, tmp_path):
    mirror = Mirror(tmp_path, source_of(server))
    chance = random.Random(1)
    with Writer(server):
        for step in (*STEPS, *STEPS) if THOROUGH else STEPS:
            # Every task counts its own passes: a later one may never come.
            count = 1 if step.startswith("stage") else chance.randint(1, 4)
            run = mirror.start(f"{step}=kill@{count}", until="killed")
            with pytest.raises(Killed):
                run.result()
        mirror.run(until="copied")
    mirror.run()
    check(server, mirror)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_restarts_in_mid_epoch_is_read_on_from(server, tmp_path, mode):
    mirror = Mirror(tmp_path, source_of(server))
    with Writer(server):
        run = mirror.start(until="killed")
        wait_until(lambda: len(mirror.log("public.orders")) > 40, "the copy to begin")
        server.restart(mode)
        seen = len(mirror.log("public.orders"))
        wait_until(lambda: len(mirror.log("public.orders")) > seen, "the copy to go on")
        run.kill()
    mirror.run()
    check(server, mirror)


def test_a_writer_that_stays_open_during_the_whole_copy_is_not_lost(server, tmp_path):
    mirror = Mirror(tmp_path, source_of(server))
    opened = source_of(server)
    opened.open()
    opened.initial()
    opened.close()
    with closing(psycopg.connect(server.dsn)) as long:
        run = mirror.start(until="copied")
        wait_until(lambda: len(mirror.log("public.orders")) > 40, "the copy to begin")
        long.execute("UPDATE orders SET version = version + 1 WHERE id % 3 = 0")
        long.execute("INSERT INTO orders VALUES (100000, 0)")
        run.result()
        long.commit()
    mirror.run()
    check(server, mirror)


def test_a_missing_synchronous_standby_is_named_and_nothing_is_lost(server, tmp_path):
    opened = source_of(server, visible_timeout_secs=0.3)
    opened.open()
    with psycopg.connect(server.dsn, autocommit=True) as connection, psycopg.connect(server.dsn) as stuck:
        position = opened.initial()
        position = opened.next_start(*_read(opened, position, opened.latest(position, ReadLimit(rows=30)))[:2])
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("SET synchronous_commit = off")
        wait_until(
            lambda: connection.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",), "the setting"
        )
        stuck.execute("UPDATE orders SET version = 1 WHERE id = 200")
        waiting = threading.Thread(target=stuck.commit)
        waiting.start()
        try:
            waits = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_until(lambda: connection.execute(waits).fetchall(), "the commit to wait")
            with pytest.raises(RetryableError, match=r"PEN-2003 .*synchronous standby is missing"):
                _read(opened, position, opened.latest(position, ReadLimit(rows=30)))
        finally:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
            waiting.join()
            opened.close()


def test_a_reader_that_was_killed_frees_the_slot(server):
    opened = source_of(server, snapshot="never")
    opened.open()
    start = opened.initial()
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO orders SELECT i, 0 FROM generate_series(1000, 60000) i")
        end = opened.latest(start, ReadLimit())
        (split,) = opened.split(start, end)
        reader = os.fork()
        if not reader:
            copy = source_of(server, snapshot="never")
            copy.open()
            for _ in copy.read(split):
                pass
            os._exit(0)
        active = "SELECT active_pid FROM pg_replication_slots WHERE active_pid IS NOT NULL"
        wait_until(lambda: connection.execute(active).fetchall(), "the reader to take the slot")
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)

        def rows():
            try:
                return sum(item.num_rows for item in opened.read(split) if not isinstance(item, Note))
            except RetryableError:
                return 0

        assert wait_until(rows, "the slot to be free") == 59001
    opened.close()


def test_a_server_of_another_authority_is_not_connected_to(need, tmp_path_factory):
    need(binaries(15), "PostgreSQL 15 is not installed, and the others here have no TLS")
    need(shutil.which("openssl"), "openssl is not installed")
    place = tmp_path_factory.mktemp("tls")
    for path in (place, *place.parents[:3]):
        if path.name.startswith(("pytest-", "popen-", "tls")):
            path.chmod(0o755)  # another pytest in between has closed them again to the user that the server runs as
    for name in ("right", "wrong"):
        made = ["-keyout", place / f"{name}.key", "-out", place / f"{name}.crt", "-subj", "/CN=localhost", "-days", "2"]
        alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *made, *alternative]
        subprocess.run(command, check=True, capture_output=True)
    settings = {"ssl": "on", "ssl_cert_file": str(place / "right.crt"), "ssl_key_file": str(place / "right.key")}
    server = PostgresServer(15, settings=settings)
    if server._user is not None:
        os.chown(place / "right.key", server._user.pw_uid, server._user.pw_gid)
    with server:
        for connect in (connections.connect, connections.connect_arrow):
            options = {"dsn": server.dsn, "tables": ["*"], "sslmode": "verify-full"}
            connect(PostgresCdcConfig(**options, sslrootcert=place / "right.crt")).close()
            with pytest.raises(ConfigError, match=r"PEN-1016 .*certificate"):
                connect(PostgresCdcConfig(**options, sslrootcert=place / "wrong.crt"))


def _read(opened, start, end):
    notes = [item.value for split in opened.split(start, end) for item in opened.read(split) if isinstance(item, Note)]
    return end, notes
