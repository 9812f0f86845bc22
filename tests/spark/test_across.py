"""From one PostgreSQL to another through Spark: plain and with SQL, while somebody writes to what is being copied."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from mirrored import Database, database_on
from penstock.pipeline import Pipeline
from penstock.testing.postgres import PostgresServer

ROWS = 300

PIPELINE = """
connector_name = "across"
delivery = "exactly-once"
[processing]
state_dir = "state"
[source]
connector = "postgres_cdc"
dsn = "{source}"
tables = ["public.*"]
seed_chunk_rows = 50
[sink]
connector = "postgres"
dsn = "{target}"
mode = "upsert"
[[routes]]
from = "public.*"
to = "/{{stream}}"
[[routes]]
from = "public.orders"
to = "/few.orders"
sql = "SELECT id, note, amount, _op, _position, _unchanged, _old_key FROM input WHERE amount > 50"
"""


@pytest.fixture
def databases(server: PostgresServer) -> Iterator[tuple[Database, Database]]:
    with database_on(server, "source") as source, database_on(server, "target") as target:
        source.run(
            "CREATE TABLE orders (id int8 PRIMARY KEY, note text, amount numeric(10, 2))",
            "CREATE TABLE items (region text, number int4, at timestamptz, PRIMARY KEY (region, number))",
            f"INSERT INTO orders SELECT i, 'n' || i, i % 100 FROM generate_series(1, {ROWS}) i",
            f"INSERT INTO items SELECT chr(97 + i % 5), i, now() FROM generate_series(1, {ROWS}) i",
        )
        yield source, target


def keep_writing(dsn: str, stopped: threading.Event) -> None:
    chance = random.Random(3)
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not stopped.wait(0.01):
            key, other = chance.randint(1, ROWS + 50), chance.randint(1, ROWS + 50)
            for statement in (
                f"UPDATE orders SET amount = {chance.randint(0, 100)} WHERE id BETWEEN {key} AND {key + 20}",
                f"INSERT INTO orders VALUES ({other}, 'new', 70) ON CONFLICT DO NOTHING",
                f"DELETE FROM items WHERE number = {key} AND number > 200",
                f"UPDATE orders SET id = {key} WHERE id = {other} AND NOT EXISTS (SELECT FROM orders WHERE id = {key})",
            ):
                connection.execute(statement)


def test_tables_are_mirrored_and_filtered_into_another_server_while_they_are_written_to(
    spark: Any, tmp_path: Path, databases: tuple[Database, Database]
) -> None:
    source, target = databases
    file = tmp_path / "pipeline.toml"
    file.write_text(PIPELINE.format(source=source.dsn, target=target.dsn))
    stopped = threading.Event()
    writer = threading.Thread(target=keep_writing, args=(source.dsn, stopped))
    writer.start()
    try:
        Pipeline.from_toml(file).run(spark=spark, drain=True)
    finally:
        stopped.set()
        writer.join()
    source.run(
        "ALTER TABLE items ADD COLUMN more text",
        "UPDATE items SET more = 'm' WHERE number % 3 = 0",
        "UPDATE orders SET amount = 60 WHERE id <= 60",
        "UPDATE orders SET amount = 40 WHERE id BETWEEN 61 AND 120",
    )
    Pipeline.from_toml(file).run(spark=spark, drain=True)
    for table in ("orders", "items"):
        assert target.table(f"public.{table}") == source.table(table)
    assert target.table("few.orders") == source.table("orders WHERE amount > 50")
    assert 0 < len(target.table("few.orders")) < len(target.table("public.orders"))
