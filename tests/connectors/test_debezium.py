"""What Debezium itself writes to Kafka becomes tables equal to those of its database: the examples, with real changes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg.conninfo
import pytest
from deltalake import DeltaTable

from java_programs import program
from kafka_topics import fresh, make_topic, records
from mirrored import database_on
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine, apicurio
from penstock.testing.kafka import KafkaServer
from penstock.testing.postgres import PostgresServer
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.soak  # fetches Debezium once, and compiles

NEEDED = [
    "io.debezium:debezium-embedded:3.6.1.Final",
    "io.debezium:debezium-connector-postgres:3.6.1.Final",
    f"io.apicurio:apicurio-registry-utils-converter:{apicurio.VERSION}",
]
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
COLUMNS = ("id", "name", "big", "good", "amount")


@pytest.fixture(scope="module")
def registry(java: None, need: Callable[[object, str], None]) -> Iterator[str]:
    need(apicurio.is_installed(), "Apicurio is not installed: make servers")
    with apicurio.ApicurioServer() as running:
        yield running.url


@pytest.fixture(scope="module")
def command(need: Callable[[object, str], None], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    need(shutil.which("mvn") and shutil.which("javac"), "Maven or a Java compiler is missing")
    return program(Path(__file__).parent / "Capture.java", NEEDED, tmp_path_factory.mktemp("compiled"))


@contextlib.contextmanager
def capturing(command: list[str], dsn: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    given = psycopg.conninfo.conninfo_to_dict(dsn)
    names = {"host": "hostname", "port": "port", "user": "user", "dbname": "dbname", "password": "password"}
    database = [f"database.{own}={given.get(name, '')}" for name, own in names.items()]
    more = [f"slot.name={arguments[-1].replace('-', '_')}", "table.include.list=public.orders"]
    process = subprocess.Popen([*command, *arguments, *database, *more], stdin=subprocess.PIPE, text=True)
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize("how", ["json", "json with schemas", "avro"])
def test_changes_by_debezium_itself_become_a_table(
    kafka: KafkaServer, server: PostgresServer, registry: str, command: list[str], tmp_path: Path, how: str
) -> None:
    stem = fresh("shop")
    topic = make_topic(kafka.bootstrap, f"{stem}.public.orders", 2)
    native = registry.replace("ccompat/v7", "registry/v2")
    with database_on(server, f"debezium_{how.replace(' ', '_')}") as shop:
        shop.run("CREATE TABLE orders (id int8 PRIMARY KEY, name text, big text, good bool, amount float8)")
        shop.run("ALTER TABLE orders ALTER big SET STORAGE EXTERNAL")
        shop.run(
            "INSERT INTO orders SELECT n, 'copied', repeat('b', 10000), true, n / 4.0 FROM generate_series(1, 20) n"
        )
        with capturing(command, shop.dsn, how, kafka.bootstrap, native, stem):
            wait_until(lambda: len(records(kafka.bootstrap, topic)) >= 20, "Debezium's first copy")
            wait_until(lambda: shop.rows("SELECT 1 FROM pg_replication_slots WHERE active"), "Debezium's slot")
            shop.run("INSERT INTO orders VALUES (100, 'Grün', NULL, NULL, 0.1), (101, '', '', false, -0.5)")
            shop.run("UPDATE orders SET name = 'changed' WHERE id BETWEEN 1 AND 5")  # says nothing of `big`
            shop.run("UPDATE orders SET big = 'small' WHERE id = 5")
            shop.run("DELETE FROM orders WHERE id IN (6, 7)")
            shop.run("INSERT INTO orders VALUES (7, 'again', 'x', true, 7)")
            shop.run("UPDATE orders SET id = 200 WHERE id = 5")
            shop.run("INSERT INTO orders VALUES (999, 'no more', NULL, true, 1)")
            wait_until(
                lambda: b"no more" in b"".join(each.value() or b"" for each in records(kafka.bootstrap, topic)), "it"
            )
        expected = {row[0]: row[1:] for row in shop.rows(f"SELECT {', '.join(COLUMNS)} FROM orders")}
    example = "debezium_avro" if how == "avro" else "debezium_kafka"
    text = (EXAMPLES / f"{example}.toml").read_text().replace("localhost:9092", kafka.bootstrap)
    text = text.replace("http://localhost:8081", registry).replace("shop.public", f"{stem}.public")
    file = tmp_path / "examples" / "pipeline.toml"
    file.parent.mkdir()
    file.write_text(text.replace("shop\\\\.public", f"{stem}\\\\.public"))
    supervisor.run(Pipeline.from_toml(str(file)), ForkEngine(1, zygote=True), drain=True)
    table = DeltaTable(str(tmp_path / "run" / example.replace("_", "-") / "lake/lake/orders")).to_pyarrow_table()
    found = {row["id"]: tuple(row[name] for name in COLUMNS[1:]) for row in table.to_pylist()}
    assert found == expected
