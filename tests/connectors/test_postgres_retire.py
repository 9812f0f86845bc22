"""What the page about operating says of the replication slot: how to limit the log that it keeps, and how to be rid of it."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from mirrored import Database, Lake, database_on
from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.testing.postgres import PostgresServer, binaries

PAGE = (Path(__file__).parents[2] / "docs/operating.md").read_text()


def statements(heading, block=1):
    """The SQL of a block under a heading, without its comments."""
    block = PAGE.partition(f"\n{heading}\n")[2].split("```sql\n")[block].partition("```")[0]
    assert block, heading
    return [each.strip() for each in re.sub(r"--.*", "", block).split(";") if each.strip()]


@pytest.fixture
def server(need):
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"fsync": "off"}) as running:
        yield running


def test_a_pipeline_that_is_retired_as_the_page_says_leaves_nothing_on_the_server(server, tmp_path):
    with database_on(server, "retired", Database) as database:
        database.run(
            "CREATE TABLE orders (id int PRIMARY KEY)",
            "CREATE TABLE keyless (id int)",
            "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        )
        with Lake(tmp_path, database.source(slot="penstock", insert_only=["public.keyless"])) as lake:
            lake.catch_up()
        made = "SELECT slot_name FROM pg_replication_slots UNION ALL SELECT pubname FROM pg_publication ORDER BY 1"
        names = [name for (name,) in database.rows(made)]
        assert names == ["penstock", "penstock", "penstock_inserts", "penstock_truncates"]
        database.run(*statements("## Retiring a pipeline"))
        assert database.rows(made) == []


def test_a_pipeline_that_is_retired_as_the_page_says_leaves_the_markers_of_others_in_a_target(server, tmp_path):
    with database_on(server, "shared", Database) as database:
        sink = Postgres(PostgresSinkConfig(dsn=database.dsn))
        sink.open()
        for name in ("orders-to-lake", "other"):
            database.run(
                f"INSERT INTO _penstock.epochs (pipeline, topic, target) VALUES ('{name}', '/{name}', 'public.{name[0]}')",
                f"INSERT INTO _penstock.seeded VALUES ('/{name}', 'public.{name[0]}', true)",
            )
        sink.close()
        database.run(*statements("## Retiring a pipeline", 2))
        assert database.rows("SELECT topic FROM _penstock.epochs") == [("/other",)]
        assert database.rows("SELECT topic FROM _penstock.seeded") == [("/other",)]


def test_the_limit_of_the_page_is_one_that_the_server_takes(server):
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for statement in statements("## The replication slot"):
            connection.execute(statement)
        query = "SELECT setting || unit FROM pg_settings WHERE name = 'max_slot_wal_keep_size'"
        with psycopg.connect(server.dsn) as later:
            assert later.execute(query).fetchone() == ("102400MB",)
