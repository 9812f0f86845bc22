"""Change capture from a real PostgreSQL: ranges of its log, copies that race with writers, and what is refused."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import threading
from contextlib import closing

import psycopg
import pytest
from pydantic import ValidationError

from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig, seed, source, wal
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.schema import key_of
from penstock.source import Note, ReadLimit
from penstock.testing import SourceContract
from penstock.testing.mirror import Mirror, replayed, versions_are_dense
from penstock.testing.postgres import PostgresServer, binaries

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"max_replication_slots": "60", "fsync": "off"}) as running:
        yield running


class Database:
    """A database of its own, the options that capture it, and a connection that writes to it."""

    def __init__(self, server, name):
        self.name = name
        self.dsn = server.dsn.rpartition("/")[0] + f"/{name}"
        self.connection = psycopg.connect(self.dsn, autocommit=True)

    def run(self, *statements):
        for statement in statements:
            self.connection.execute(statement)

    def rows(self, query):
        return self.connection.execute(query).fetchall()

    def source(self, **options):
        options = {"dsn": self.dsn, "slot": self.name, "tables": ["public.*"], "snapshot": "initial", **options}
        return PostgresCdc(PostgresCdcConfig.model_validate(options))

    def table(self, name, key):
        """What the table holds, as `replayed` gives it."""
        with closing(self.connection.cursor(row_factory=psycopg.rows.dict_row)) as cursor:
            rows = cursor.execute(f"SELECT * FROM {name}").fetchall()
        return sorted(rows, key=lambda row: tuple(map(repr, (row[each] for each in key))))


@pytest.fixture
def database(server):
    name = f"shop_{next(_NUMBERS)}"
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    found = Database(server, name)
    yield found
    found.connection.close()
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active_pid IS NOT NULL AND database = %s",
            [name],
        )
        while connection.execute("SELECT FROM pg_replication_slots WHERE database = %s AND active", [name]).fetchall():
            pass
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", [name])
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def read(opened, start, end):
    """The rows of a range by stream, and its notes."""
    rows, notes = {}, []
    for split in opened.split(start, end):
        for item in opened.read(pickle.loads(pickle.dumps(split))):
            if isinstance(item, Note):
                notes.append(item.value)
            else:
                rows.setdefault(item.stream, []).extend(item.records.to_pylist())
    return rows, notes


ORDERS = "CREATE TABLE orders (id int8 PRIMARY KEY, version int8 NOT NULL DEFAULT 0, note text)"


class TestContract(SourceContract):
    """The laws of ranges, over the log alone."""

    @pytest.fixture
    def source(self, database):
        database.run(ORDERS, "CREATE TABLE people (name text PRIMARY KEY, age int4)")
        made = database.source(snapshot="never", max_wal_bytes=4096, heartbeat_secs=600)
        made.open()
        made.initial()
        made.close()
        for number in range(12):
            database.run(
                f"INSERT INTO orders SELECT i, 0, repeat('x', 100) FROM generate_series({number * 9}, {number * 9 + 8}) i",
                f"INSERT INTO people VALUES ('p{number}', {number})",
            )
        database.run("UPDATE orders SET version = 1 WHERE id % 7 = 0", "DELETE FROM orders WHERE id = 3")
        return made

    @pytest.fixture
    def more(self, database):
        return lambda: database.run("INSERT INTO orders VALUES (100000)", "UPDATE people SET age = 1 WHERE name = 'p1'")

    @pytest.fixture
    def wrong(self, database):
        return PostgresCdc(PostgresCdcConfig(dsn=database.dsn + "_nowhere", tables=["*"]))


class TestMirror:
    def test_a_copy_and_the_changes_behind_it_make_the_table(self, database, tmp_path):
        database.run(ORDERS, "INSERT INTO orders SELECT i, 0, 'n' || i FROM generate_series(1, 1000) i")
        mirror = Mirror(tmp_path, database.source(chunk_rows=100))
        mirror.run()
        log = mirror.log("public.orders")
        assert [row["_op"] for row in log] == ["r"] * 1000
        assert replayed(log, ["id"]) == database.table("orders", ["id"])
        database.run(
            "UPDATE orders SET version = version + 1 WHERE id <= 10",
            "DELETE FROM orders WHERE id = 1000",
            "INSERT INTO orders VALUES (2000)",
            "UPDATE orders SET id = 3000 WHERE id = 999",
        )
        mirror.run()
        log = mirror.log("public.orders")
        assert [row["_op"] for row in log[1000:]] == ["u"] * 10 + ["d", "c", "u"]
        assert replayed(log, ["id"]) == database.table("orders", ["id"])
