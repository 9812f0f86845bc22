"""Writers that race the copy on the very keys that it reads, in every order that chance finds."""

from __future__ import annotations

import contextlib
import json

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirrored import Reading, database_on
from penstock.connectors.postgres_cdc import table_errors, tables
from penstock.testing.mirror import replayed
from penstock.testing.postgres import PostgresServer, binaries

KEYS = 12
SESSIONS = 2

TABLE = """
    DROP TABLE IF EXISTS orders;
    CREATE TABLE orders (id int8, region text, version int8 NOT NULL DEFAULT 0, story text, PRIMARY KEY (region, id));
    ALTER TABLE orders ALTER COLUMN story SET STORAGE EXTERNAL;
"""
KEY = ["region", "id"]


@pytest.fixture(scope="module")
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"fsync": "off", "lock_timeout": "5ms"}) as running:
        yield running


@pytest.fixture(scope="module")
def database(server):
    with database_on(server, "races") as made:
        yield made


keys = st.integers(1, KEYS)
regions = st.sampled_from("ab")
statements = st.one_of(
    st.builds("INSERT INTO orders (region, id) VALUES ('{}', {}) ON CONFLICT DO NOTHING".format, regions, keys),
    st.builds("UPDATE orders SET version = version + 1 WHERE id = {}".format, keys),
    st.builds("UPDATE orders SET version = version + 1 WHERE region = '{}' AND id > {}".format, regions, keys),
    st.builds("UPDATE orders SET version = version + 1, region = '{}' WHERE id = {}".format, regions, keys),
    st.builds(
        "UPDATE orders SET version = version + 1, story = repeat('{}', 3000) WHERE id = {}".format, regions, keys
    ),
    st.builds("DELETE FROM orders WHERE region = '{}' AND id = {}".format, regions, keys),
)
sessions = st.integers(0, SESSIONS - 1)
moves = st.one_of(
    *[st.just(("step",))] * 4,
    *[st.tuples(st.just("run"), sessions, statements)] * 4,
    st.tuples(st.sampled_from(["BEGIN", "COMMIT", "COMMIT", "ROLLBACK"]), sessions),
    st.tuples(
        st.just("run"), sessions, st.sampled_from([*["UPDATE orders SET version = version + 1"] * 4, "TRUNCATE orders"])
    ),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=st.lists(moves, min_size=15, max_size=50), rows=st.integers(0, KEYS))
def test_any_order_of_writes_and_reads_gives_a_log_that_is_exact_and_leads_to_the_table(database, script, rows):
    database.run(
        TABLE, f"INSERT INTO orders SELECT i, chr(97 + i % 2), 0, repeat('s', 3000) FROM generate_series(1, {rows}) i"
    )
    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(tables, "RETRY_SECS", 0.0)  # a table whose lock somebody holds is set aside, and copied again
        patched.setattr(table_errors, "LOCK_SECS", 0.005)
        writers = [stack.enter_context(psycopg.connect(database.dsn, autocommit=True)) for _ in range(SESSIONS)]
        source = database.source(tables=["public.orders"], seed_chunk_rows=3)
        source.open()
        stack.callback(database.run, f"SELECT pg_drop_replication_slot('{database.name}')", "DROP PUBLICATION penstock")
        stack.callback(source.close)
        reading = Reading(source)
        for move, *rest in script:
            if move == "step":
                reading.step()
                continue
            writer = writers[rest[0]]
            try:
                writer.execute(rest[1] if move == "run" else move)  # outside a transaction COMMIT is only a warning
            except (psycopg.errors.LockNotAvailable, psycopg.errors.UniqueViolation):
                writer.execute("ROLLBACK")
        for writer in writers:
            writer.execute("COMMIT")
        reading.finish()
        log = sorted(reading.log, key=lambda row: row["_position"])
        rows_of = sorted(database.table("orders"), key=lambda row: tuple(map(repr, (row[name] for name in KEY))))
        assert replayed(log, KEY) == rows_of
        _versions_are_dense(log)


def _versions_are_dense(log):
    """Each update counts `version` up by one, wherever the row moves."""
    last = {}
    for row in log:
        place = (row["region"], row["id"])
        if row["_op"] == "t":
            last.clear()
            continue
        old = json.loads(row["_old_key"]) if row["_old_key"] else None
        before = last.pop((old["region"], old["id"]) if old else place, None)
        if row["_op"] == "u":
            assert row["version"] == before + 1
        if row["_op"] != "d":
            last[place] = row["version"]
