"""A capture that must wait: for a server that starts, or for transactions that block its slot or its first copies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import re
import socket
import struct
import threading
import time

import psycopg
import pytest

from mirrored import Database, Lake, database_on
from penstock.connectors.postgres_capture import PostgresCapture, PostgresCaptureConfig
from penstock.connectors.postgres_cdc.log import slot, snapshots
from penstock.connectors.postgresql import connections
from penstock.errors import NOT_READY, FatalError, RetryableError
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.source import ReadLimit
from penstock.testing.engine import ForkEngine
from penstock.testing.postgres import PostgresServer, binaries
from penstock.testing.processes import wait_until

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    settings = {"max_replication_slots": "60", "fsync": "off", "max_prepared_transactions": "10"}
    with PostgresServer(18, settings=settings) as running:
        yield running


@pytest.fixture
def database(server, monkeypatch):
    monkeypatch.setattr(slot.make_slot, "__defaults__", (0.1,))
    with database_on(server, f"waiting_{next(_NUMBERS)}", Database) as made:
        made.run("CREATE TABLE orders (id int PRIMARY KEY, note text)", "INSERT INTO orders VALUES (1, 'a'), (2, 'b')")
        made.run("CREATE TABLE other (id int)")
        yield made


@contextlib.contextmanager
def open_transaction(database):
    """A session that has written and does not end its transaction."""
    with psycopg.connect(database.dsn) as writer:
        writer.execute("INSERT INTO other VALUES (1)")
        yield writer


class TestSlots:
    """The server makes a logical slot once every transaction that writes has ended."""

    def test_an_open_transaction_is_named_waited_for_and_then_the_capture_goes_on_by_itself(
        self, database, tmp_path, caplog
    ):
        with (
            open_transaction(database) as writer,
            caplog.at_level(logging.WARNING, "penstock"),
            Lake(tmp_path, database.source(tables=["public.orders"])) as lake,
        ):
            for _ in range(3):
                assert lake.loop.step() is None, "no epoch, and no error either"
            health = lake.source.health_check()
            assert health.state == "degraded"
            pid = writer.info.backend_pid
            assert re.search(
                rf"slot '{database.name}' cannot be made before the transaction of pid {pid} ", health.reason
            )
            assert re.search(r"\(xid \d+\), \d+ s old, begun at 20\d\d-.*last query at \d\d:", health.reason)
            assert f"pg_terminate_backend({pid})" in health.reason
            assert len([text for text in caplog.messages if f"pid {pid}" in text]) == 1, "said once"
            writer.commit()
            lake.catch_up()
            assert lake.source.health_check().state == "healthy"
            assert lake.table("public.orders") == database.table("orders")

    def test_a_prepared_transaction_is_named_with_its_name_and_the_ways_to_end_it(self, database, tmp_path):
        database.run("BEGIN", "INSERT INTO other VALUES (1)", "PREPARE TRANSACTION 'left over'")
        with Lake(tmp_path, database.source(tables=["public.orders"])) as lake:
            assert lake.loop.step() is None
            reason = lake.source.health_check().reason
            assert "the prepared transaction 'left over' (xid " in reason
            assert "ROLLBACK PREPARED 'left over'" in reason
            database.run("ROLLBACK PREPARED 'left over'")
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")

    def test_a_slot_that_the_server_is_still_making_is_not_there_yet(self, database):
        with (
            contextlib.closing(database.source()) as opened,
            psycopg.connect(database.dsn, autocommit=True) as killed,
            psycopg.connect(database.dsn, autocommit=True) as watching,
            open_transaction(database) as writer,
        ):
            opened.open()
            made = threading.Thread(target=killed.execute, args=[slot.creating(database.name)], daemon=True)
            made.start()
            listed = "SELECT FROM pg_replication_slots WHERE slot_name = %s AND wal_status = 'reserved'"
            try:
                wait_until(
                    lambda: watching.execute(listed, [database.name]).fetchone() is not None, "the slot is listed"
                )
                assert opened.health_check().reason.endswith("is not made yet"), "it holds no log that could be read"
                assert opened.metrics().custom["slot_not_made"] == 1
                with pytest.raises(RetryableError, match="another session makes the replication slot") as raised:
                    opened.initial()
                assert raised.value.code == NOT_READY
            finally:
                writer.commit()
                made.join(60)
            assert opened.initial().slots == 1

    def test_a_drain_does_not_end_as_if_there_were_nothing_to_read(self, database):
        with open_transaction(database) as writer, contextlib.closing(database.source()) as opened:
            opened.open()
            start = opened.initial()
            assert start.slots == 0
            with pytest.raises(
                RetryableError, match=rf"PEN-2003 the replication slot .* pid {writer.info.backend_pid} "
            ):
                opened.latest(start, ReadLimit(until=start))
            writer.commit()
            assert opened.latest(start, ReadLimit(until=start)).slots == 1

    def test_a_drain_goes_on_though_the_transaction_ended_just_after_the_slot_was_given_up(self, database, monkeypatch):
        with contextlib.closing(database.source()) as opened:
            opened.open()
            with monkeypatch.context() as patched:
                patched.setattr(slot, "make_slot", lambda *args: None)
                start = opened.initial()
                with pytest.raises(RetryableError, match=r"PEN-2003 the replication slot .* waits for a transaction"):
                    opened.latest(start, ReadLimit(until=start))
            assert opened.latest(start, ReadLimit(until=start)).slots == 1

    def test_health_names_the_transaction_while_the_server_lists_the_slot_that_waits_for_it(self, database, tmp_path):
        with (
            Lake(tmp_path, database.source(tables=["public.orders"])) as lake,
            psycopg.connect(database.dsn, autocommit=True) as maker,
            open_transaction(database) as writer,
        ):
            assert lake.loop.step() is None
            made = threading.Thread(target=maker.execute, args=[slot.creating(database.name)], daemon=True)
            made.start()
            listed = f"SELECT FROM pg_replication_slots WHERE slot_name = '{database.name}'"
            wait_until(lambda: database.connection.execute(listed).fetchone() is not None, "the slot is listed")
            health = lake.source.health_check()
            writer.commit()
            made.join(60)
            assert (health.state, f"pid {writer.info.backend_pid} " in health.reason) == ("degraded", True)
            lake.catch_up()
            database.run(f"SELECT pg_drop_replication_slot('{database.name}')")
            assert lake.source.health_check().reason.endswith("does not exist any more")

    def test_a_lost_slot_is_made_again_once_the_transaction_has_ended(self, database, tmp_path):
        with Lake(tmp_path, database.source(tables=["public.orders"], snapshot="when_needed")) as lake:
            lake.catch_up()
            database.run(f"SELECT pg_drop_replication_slot('{database.name}')", "DELETE FROM orders WHERE id = 1")
            with open_transaction(database) as writer:
                assert lake.loop.step() is None
                assert f"pid {writer.info.backend_pid}" in lake.source.health_check().reason
            lake.catch_up()
            assert lake.table("public.orders") == database.table("orders")

    def test_a_capture_asks_to_be_called_again_without_counting_that_as_a_failure(self, database):
        options = {"dsn": database.dsn, "slot": database.name, "tables": ["public.orders"]}
        with contextlib.closing(PostgresCapture(PostgresCaptureConfig(**options))) as capture:
            capture.open()
            assert capture.health_check().state == "healthy", "a slot that is not made yet is no fault"
            with open_transaction(database) as writer:
                with pytest.raises(RetryableError, match=f"pid {writer.info.backend_pid} ") as raised:
                    next(capture.live())
                assert raised.value.code == NOT_READY
                assert capture.health_check().state == "degraded"
            assert next(capture.live()) is None
            assert capture.health_check().state == "healthy"


class TestCopies:
    def test_a_first_copy_that_waits_says_for_which_transaction(self, database, tmp_path, monkeypatch):
        monkeypatch.setattr("penstock.connectors.postgres_cdc.chunks.BLAMED_SECS", 0)
        monkeypatch.setattr("penstock.connectors.postgres_cdc.health.BLAMED_SECS", 0)
        monkeypatch.setattr("penstock.connectors.postgres_cdc.plan.LOOKED_SECS", 0.0)
        with Lake(tmp_path, database.source(tables=["public.orders", "public.late"])) as lake:
            lake.catch_up()
            with open_transaction(database) as writer:
                database.run("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
                wait_until(lambda: lake.loop.step() is None and "public.late" in lake.position.tables, "the table")
                health = lake.source.health_check()
                assert health.state == "degraded"
                assert (
                    f"public.late: the copy waits for the transaction of pid {writer.info.backend_pid} "
                    in health.reason
                )
                assert "waits until every transaction before" in lake.source.tables(lake.position)["public.late"].note
            lake.catch_up()
            assert lake.table("public.late") == [{"id": 1}]
            assert lake.source.health_check().state == "healthy"

    def test_a_transaction_that_has_just_begun_is_not_blamed(self, database):
        with contextlib.closing(database.source(tables=["public.orders"], max_wal_bytes=1)) as opened:
            opened.open()
            opened.initial()
            with open_transaction(database) as writer:
                database.run("INSERT INTO orders SELECT i FROM generate_series(10, 1000) i")
                assert opened.lag() > 1
                health = opened.health_check()
                assert health.state == "healthy"
                assert str(writer.info.backend_pid) not in health.reason

    def test_a_transaction_that_has_long_been_open_is_blamed_for_the_log_that_is_decoded_again(
        self, database, monkeypatch
    ):
        monkeypatch.setattr("penstock.connectors.postgres_cdc.health.BLAMED_SECS", 0)
        with contextlib.closing(database.source(tables=["public.orders"], max_wal_bytes=1)) as opened:
            opened.open()
            opened.initial()
            with open_transaction(database) as writer:
                database.run("INSERT INTO orders SELECT i FROM generate_series(10, 1000) i")
                reason = opened.health_check().reason
                assert re.search(rf"decodes \d+ bytes again because of .* pid {writer.info.backend_pid} ", reason)


def test_the_text_of_a_query_is_not_part_of_the_words_about_its_transaction(database):
    with psycopg.connect(database.dsn) as writer:
        writer.execute("INSERT INTO orders VALUES (77, 'a secret')")
        (found,) = [t for t in snapshots.open_writers(database.connection) if t.pid == writer.info.backend_pid]
        assert "secret" not in f"{found} {found.ending}"


class Starting:
    """
    A server that is starting up: it refuses the first connections with SQLSTATE 57P03, as PostgreSQL does.

    Then it hands every connection on to the real one. In a process of its own, since libpq's ping blocks the caller's.
    """

    def __init__(self, server, refusals):
        self._real = (server.port, "127.0.0.1")
        self._left = refusals
        self._refused = multiprocessing.Value("i", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._process = multiprocessing.get_context("fork").Process(target=self._serve, daemon=True)
        self._process.start()
        self._listener.close()

    @property
    def refused(self):
        return self._refused.value

    def close(self):
        self._process.kill()
        self._process.join()

    def _serve(self):
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client):
        with contextlib.suppress(OSError):
            size, code = struct.unpack(">II", _exactly(client, 8))
            while code in (80877103, 80877104):  # asks for TLS or GSS
                client.sendall(b"N")
                size, code = struct.unpack(">II", _exactly(client, 8))
            rest = _exactly(client, size - 8)
            with self._refused.get_lock():
                refuses = self._refused.value < self._left
                self._refused.value += refuses
            if refuses:
                fields = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"
                client.sendall(b"E" + struct.pack(">I", len(fields) + 4) + fields)
                client.close()
                return
            port, host = self._real
            upstream = socket.create_connection((host, port))
            upstream.sendall(struct.pack(">II", size, code) + rest)
            threading.Thread(target=_pump, args=(upstream, client), daemon=True).start()
            _pump(client, upstream)


def _exactly(client, size):
    data = b""
    while len(data) < size:
        more = client.recv(size - len(data))
        if not more:
            raise OSError("the client is gone")
        data += more
    return data


def _pump(one, other):
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


class TestStartingServers:
    """What the supervisor does when a server is still starting as the connectors open."""

    @pytest.fixture
    def pipeline(self, database, tmp_path):
        def make(port, retries=20, part="postgres_cdc"):
            dsn = re.sub(r":\d+/", f":{port}/", database.dsn)
            tls = '\nsslmode = "disable"'
            log = f'dsn = "{dsn}"{tls}\ntables = ["public.orders"]\nslot = "{database.name}"'
            sources = {
                "postgres_cdc": f'connector = "postgres_cdc"\n{log}',
                "postgres_capture": f'connector = "postgres_capture"\n{log}',
                "sql_poll": f'connector = "sql_poll"\ndsn = "{dsn}?sslmode=disable"\ntables = ["public.orders"]\n'
                'key = ["id"]\ncursor = "id"\nsettle_ms = 0',
            }
            sinks = {"postgres": f'connector = "postgres"\ndsn = "{dsn}"{tls}\ntable = "mirror.{{table}}"'}
            source = sources.get(part, 'connector = "generator"\nrows = 2')
            sink = sinks.get(part, f'connector = "files"\npath = "{tmp_path / "lake"}"')
            file = tmp_path / "pipeline.toml"
            file.write_text(f'''
connector_name = "late"
[processing]
state_dir = "{tmp_path / "state"}"
retry_backoff_ms = 1
max_backoff_ms = 20
max_retries = {retries}
[source]
{source}
[sink]
{sink}
''')
            return Pipeline.from_toml(file)

        return make

    @pytest.mark.parametrize("part", ["postgres_cdc", "postgres_capture", "sql_poll", "postgres"])
    @pytest.mark.parametrize("refusals", [6, 7])  # it may become ready between a failure and the question about it
    def test_it_is_waited_for_and_the_pipeline_runs(self, server, pipeline, refusals, part):
        with contextlib.closing(Starting(server, refusals)) as starting:
            summary = supervisor.run(pipeline(starting.port, part=part), ForkEngine(1), drain=True)
            assert starting.refused == refusals
        assert summary.rows_in == 2

    def test_it_is_not_waited_for_without_end(self, server, pipeline):
        with (
            contextlib.closing(Starting(server, 10_000)) as starting,
            pytest.raises(
                FatalError, match=r"PEN-5013 gave up after 3 retries.*does not accept connections yet.*starting up"
            ),
        ):
            supervisor.run(pipeline(starting.port, retries=3), ForkEngine(1), drain=True)

    def test_a_server_that_cannot_be_reached_still_ends_the_start_at_once(self, server, pipeline):
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(FatalError, match="PEN-5001"):
            supervisor.run(pipeline(port), ForkEngine(1), drain=True)
        assert time.monotonic() - began < 60

    def test_connections_for_rows_know_it_too(self, server, database):
        with contextlib.closing(Starting(server, 10_000)) as starting:
            dsn = re.sub(r":\d+/", f":{starting.port}/", database.dsn)
            with pytest.raises(RetryableError, match=f"{NOT_READY} PostgreSQL does not accept connections yet"):
                connections.connect_arrow(database.source(dsn=dsn, sslmode="disable").config)
