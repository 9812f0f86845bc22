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
        for number in range(6):
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

    def test_writers_that_race_the_copy_on_its_own_keys_lose_and_double_nothing(self, database, tmp_path):
        database.run(
            ORDERS,
            "CREATE TABLE items (region text COLLATE \"C\", number int4, version int8, PRIMARY KEY (region, number))",
            "INSERT INTO orders SELECT i, 0, 'n' || i FROM generate_series(1, 400) i",
            "INSERT INTO items SELECT chr(97 + i % 5), i, 0 FROM generate_series(1, 300) i",
        )
        mirror = Mirror(tmp_path, database.source(chunk_rows=40))
        with Writers(database, 2):
            mirror.run(until="copied")
        mirror.run()
        check(database, mirror)


class Writers:
    """Threads that insert, update, move and delete rows at random until they are stopped."""

    def __init__(self, database, count, seed=0):
        self.dsn = database.dsn
        self.stopped = threading.Event()
        self.failed = []
        self.threads = [threading.Thread(target=self._run, args=(seed * 100 + n,)) for n in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        assert not self.failed, self.failed

    def _run(self, seed):
        chance = random.Random(seed)
        try:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                while not self.stopped.is_set():
                    try:
                        with connection.transaction():
                            for _ in range(chance.randint(1, 4)):
                                self._write(connection, chance)
                            if chance.random() < 0.1:
                                raise psycopg.Rollback()
                    except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                        pass
                    self.stopped.wait(chance.random() * 0.01)
        except psycopg.Error as error:
            self.failed.append(error)

    def _write(self, connection, chance):
        key, other = chance.randint(1, 500), chance.randint(1, 500)
        region, number = chance.choice("abcdez"), chance.randint(1, 320)
        connection.execute(
            chance.choice(
                [
                    f"INSERT INTO orders VALUES ({key}) ON CONFLICT DO NOTHING",
                    f"UPDATE orders SET version = version + 1 WHERE id = {key}",
                    f"UPDATE orders SET version = version + 1 WHERE id BETWEEN {key} AND {key + 10}",
                    f"UPDATE orders SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT FROM orders WHERE id = {other})",
                    f"DELETE FROM orders WHERE id = {key}",
                    f"INSERT INTO items VALUES ('{region}', {number}, 0) ON CONFLICT DO NOTHING",
                    f"UPDATE items SET version = version + 1 WHERE number = {number}",
                    f"UPDATE items SET region = '{region}' WHERE number = {number}",
                    f"DELETE FROM items WHERE region = '{region}' AND number = {number}",
                ]
            )
        )


def check(database, mirror):
    """The log of every table is exact, and leads to what the table holds."""
    for name, key in (("orders", ["id"]), ("items", ["region", "number"])):
        assert replayed(mirror.log(f"public.{name}"), key) == database.table(name, key)
