"""Streams of Spark's own over every kind of source: bounded, acknowledged at once, and with their lag in the progress."""

from __future__ import annotations

import json
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from deltalake import DeltaTable

import penstock
from penstock.testing.postgres import PostgresServer
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _registered(spark: Any) -> Iterator[None]:
    penstock.register(spark)
    yield
    for query in spark.streams.active:
        query.stop()


def stream(spark: Any, connector: str, **options: Any) -> Any:
    return spark.readStream.format("penstock").option("connector", connector).options(**options).load()


def begin(rows: Any, home: Path, *, ends: bool = False) -> Any:
    """Write a stream to files, until it is stopped or, with `ends`, until it has what is there."""
    trigger = {"availableNow": True} if ends else {"processingTime": "0 seconds"}
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(home / "checkpoint"))
    return writer.trigger(**trigger).start(str(home / "out"))


def finish(rows: Any, home: Path) -> None:
    begin(rows, home, ends=True).awaitTermination()


def test_a_source_hears_of_the_last_batch_while_nothing_new_comes_and_its_lag_is_in_the_progress(
    spark: Any, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    rows = stream(spark, "spark_connectors:Heard", rows=100, told=str(told), max_rows_per_batch=40)
    query = begin(rows, tmp_path)
    query.processAllAvailable()
    wait_until(lambda: told.exists() and told.read_text() == "100", "the ack of the last batch")
    progress = [json.loads(each.json) for each in query.recentProgress if each.numInputRows]
    assert [each["numInputRows"] for each in progress] == [40, 40, 20], "no batch is over the limit"
    assert json.loads(json.dumps(progress[0]["sources"][0]["latestOffset"]))["lag"] == 60
    query.stop()
    assert spark.read.parquet(str(tmp_path / "out")).count() == 100


@pytest.mark.soak
def test_a_bounded_stream_ends_with_what_is_there_in_batches_of_the_limit(spark: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    finish(stream(spark, "spark_connectors:Heard", rows=100, told=str(told), max_rows_per_batch=40), tmp_path)
    assert len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) == 3
    finish(stream(spark, "spark_connectors:Heard", rows=130, told=str(told), max_rows_per_batch=40), tmp_path)
    assert sorted(row.row for row in spark.read.parquet(str(tmp_path / "out")).collect()) == list(range(130))


def test_a_table_of_postgres_is_a_stream_of_changes_that_an_upsert_applies(
    spark: Any, server: PostgresServer, tmp_path: Path
) -> None:
    name = f"r{uuid4().hex[:12]}"
    options = {
        "dsn": server.dsn,
        "tables": json.dumps([f"public.{name}"]),
        "slot": name,
        "publication": name,
        "state_dir": str(tmp_path / "state"),
    }

    def run() -> list[tuple[int, str]]:
        writer = stream(spark, "postgres_cdc", **options).writeStream.format("penstock")
        writer = writer.options(connector="delta", path=str(tmp_path / "lake"), mode="upsert", key='["id"]')
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        table = DeltaTable(tmp_path / "lake").to_pyarrow_table().sort_by("id").to_pydict()
        return list(zip(table["id"], table["name"], strict=True))

    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, name text)")
        connection.execute(f"INSERT INTO {name} SELECT i, 'copied' FROM generate_series(1, 50) AS i")
        assert run() == [(i, "copied") for i in range(1, 51)]
        with pytest.raises(Exception, match="PEN-1009 postgres_cdc has no end"):
            spark.read.format("penstock").option("connector", "postgres_cdc").options(**options).load().count()
        connection.execute(f"UPDATE {name} SET name = 'changed' WHERE id <= 2")
        connection.execute(f"DELETE FROM {name} WHERE id > 48")
        connection.execute(f"INSERT INTO {name} VALUES (99, 'new')")
        expected = [(1, "changed"), (2, "changed"), *((i, "copied") for i in range(3, 49)), (99, "new")]
        assert run() == expected
        connection.execute(f"SELECT pg_drop_replication_slot('{name}')")


def test_a_polled_database_is_a_stream_that_copies_once_and_then_follows(spark: Any, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT)")
    database.executemany("INSERT INTO orders VALUES (?, ?)", [(i, f"n{i}") for i in range(30)])
    options = {
        "dsn": f"sqlite:{tmp_path}/shop.db",
        "tables": '["orders"]',
        "key": '["id"]',
        "cursor": "id",
        "settle_ms": 0,
        "state_dir": str(tmp_path / "state"),
    }
    finish(stream(spark, "sql_poll", **options), tmp_path)
    database.executemany("INSERT INTO orders VALUES (?, ?)", [(i, f"n{i}") for i in range(30, 40)])
    finish(stream(spark, "sql_poll", **options), tmp_path)
    found = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted((row.id, row.name) for row in found) == [(i, f"n{i}") for i in range(40)]


def test_messages_are_rows_of_key_payload_and_where_they_came_from(spark: Any, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    url = f"tcp://127.0.0.1:{address[1]}"
    rows = stream(spark, "tcp", url=url, acknowledge="true", state_dir=str(tmp_path / "state"))
    assert rows.columns == ["stream", "key", "payload", "attributes", "timestamp", "offset"]
    query = begin(rows.selectExpr("stream", "CAST(payload AS STRING) AS line"), tmp_path)

    def connected() -> bool:
        try:
            with socket.create_connection(address, timeout=60) as line:
                line.sendall(b"one\ntwo\n")
                return line.recv(10) != b""  # they are on disk
        except ConnectionRefusedError:
            assert query.isActive, str(query.exception())
            return False

    wait_until(connected, "the source to listen")
    query.processAllAvailable()
    query.stop()
    found = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted((row.stream, row.line) for row in found) == [("lines", "one"), ("lines", "two")]
