"""Pipeline files with Kafka and a registry: rows out in Avro and in again, and Debezium's Avro into a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from deltalake import DeltaTable

from kafka_topics import fresh, make_topic, records, send
from mirrored import database_on
from penstock.connectors.files.sink import read_published
from penstock.connectors.kafka.source import Kafka
from penstock.formats import WireSchema, load
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.schema.registry.confluent import Confluent, ConfluentConfig
from penstock.testing import ForkEngine
from penstock.testing.apicurio import ApicurioServer, is_installed
from penstock.testing.kafka import KafkaServer
from penstock.testing.postgres import PostgresServer

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"], "default": None}],
}
CHANGE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "shop.orders",
    "fields": [
        {"name": "before", "type": ["null", {**ORDER, "name": "Value", "namespace": "shop.orders"}], "default": None},
        {"name": "after", "type": ["null", "shop.orders.Value"], "default": None},
        {
            "name": "source",
            "type": {
                "type": "record",
                "name": "Source",
                "fields": [
                    {"name": "connector", "type": "string"},
                    {"name": "lsn", "type": ["null", "long"], "default": None},
                    {"name": "ts_ms", "type": "long"},
                ],
            },
        },
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
}
KEY = {"type": "record", "name": "Key", "namespace": "shop.orders", "fields": [{"name": "id", "type": "long"}]}


@pytest.fixture(scope="module")
def url(java: None, need: Callable[[object, str], None]) -> Iterator[str]:
    need(is_installed(), "Apicurio is not installed: make servers")
    with ApicurioServer() as server:
        yield server.url


def drained(path: Path, text: str) -> None:
    path.mkdir(exist_ok=True)
    (path / "order.avsc").write_text(json.dumps(ORDER))
    (path / "pipeline.toml").write_text(text)
    supervisor.run(Pipeline.from_toml(str(path / "pipeline.toml")), ForkEngine(1, zygote=True), drain=True)


def test_a_pipeline_file_writes_avro_by_a_registry_and_another_reads_it(
    kafka: KafkaServer, url: str, tmp_path: Path
) -> None:
    stem = fresh("orders")
    make_topic(kafka.bootstrap, stem)
    send(kafka.bootstrap, stem, [b'{"id": %d, "name": "n%d"}' % (n, n) for n in range(5)])
    common = f"""
        delivery = "exactly-once"
        [registry]
        type = "confluent"
        url = "{url}"
        [source]
        connector = "kafka"
        bootstrap_servers = "{kafka.bootstrap}"
    """
    drained(
        tmp_path / "out",
        f"""
        connector_name = "{stem}-out"
        {common}
        topics = ["{stem}"]
        [[routes]]
        from = "{stem}"
        to = "/orders"
        [[schemas]]
        topic = "/orders"
        for = "source"
        schema_type = "json"
        key = ["id"]
        [[schemas]]
        topic = "/orders"
        for = "sink"
        schema_type = "avro"
        schema_file = "order.avsc"
        subject = "{stem}.avro-value"
        framing = "confluent"
        [[sinks]]
        connector = "kafka"
        bootstrap_servers = "{kafka.bootstrap}"
        topic = "{stem}.avro"
        partitions = 1
        """,
    )
    written = Confluent(ConfluentConfig(url=url)).fetch_schema(f"{stem}.avro-value")
    frames = {each.value()[:5] for each in records(kafka.bootstrap, f"{stem}.avro")}
    assert frames == {b"\0" + int(written.id or 0).to_bytes(4, "big")}
    drained(
        tmp_path / "in",
        f"""
        connector_name = "{stem}-in"
        {common}
        topics = ["{stem}.avro"]
        [[routes]]
        from = "{stem}.avro"
        to = "/orders"
        [[schemas]]
        topic = "/orders"
        schema_type = "avro"
        subject = "{stem}.avro-value"
        framing = "confluent"
        [[sinks]]
        connector = "files"
        path = "lake"
        """,
    )
    found = read_published(tmp_path / "in" / "lake").to_pylist()
    assert sorted((row["id"], row["name"]) for row in found) == [(n, f"n{n}") for n in range(5)]


def test_changes_of_debezium_in_avro_become_a_table(kafka: KafkaServer, url: str, tmp_path: Path) -> None:
    stem = fresh("shop")
    make_topic(kafka.bootstrap, stem)
    registry = Confluent(ConfluentConfig(url=url))
    formats = {}
    for part, schema in (("value", CHANGE), ("key", KEY)):
        wire = registry.register_schema(f"{stem}-{part}", WireSchema("avro", json.dumps(schema)))
        format_type = load("avro")
        formats[part] = format_type(format_type.options_type.model_validate({"framing": "confluent"}), wire)

    def change(lsn: int, op: str, before: object, after: object) -> None:
        source = {"connector": "postgresql", "lsn": lsn, "ts_ms": 1_700_000_000_000 + lsn}
        row = {"before": before, "after": after, "source": source, "op": op, "ts_ms": 1_700_000_000_000}
        id = (after or before)["id"]  # type: ignore[index]
        value = formats["value"].encode(pa.RecordBatch.from_pylist([row], schema=formats["value"].columns()))
        key = formats["key"].encode(pa.RecordBatch.from_pylist([{"id": id}], schema=formats["key"].columns()))
        send(kafka.bootstrap, stem, [value[0].as_py()], key=key[0].as_py())

    change(1, "r", None, {"id": 1, "name": "copied"})
    change(2, "c", None, {"id": 2, "name": "new"})
    change(3, "u", {"id": 1, "name": "copied"}, {"id": 1, "name": "updated"})
    change(4, "d", {"id": 2, "name": "new"}, None)
    change(5, "c", None, {"id": 3, "name": None})
    text = (EXAMPLES / "debezium_avro.toml").read_text().replace("shop.public.orders", stem)
    drained(tmp_path / "table", text.replace("localhost:9092", kafka.bootstrap).replace("http://localhost:8081", url))
    table = DeltaTable(str(tmp_path / "run/debezium-avro/lake/lake/orders")).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["name"] for row in table} == {1: "updated", 3: None}


def test_a_drain_ends_at_the_offsets_of_its_beginning_though_more_records_come_all_the_time(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = make_topic(kafka.bootstrap, fresh("drained"), 2)
    for partition in (0, 1):
        send(kafka.bootstrap, stem, [b"first"] * 5, partition)
    split, epochs = Kafka.split, []

    def late(self: Kafka, *args: Any) -> Any:
        epochs.append(args)
        if len(epochs) < 20:  # else one that goes on would never end
            for partition in (0, 1):
                send(kafka.bootstrap, stem, [b"late"] * 5, partition)
        return split(self, *args)

    monkeypatch.setattr(Kafka, "split", late)
    drained(
        tmp_path,
        f"""
        connector_name = "{stem}"
        delivery = "exactly-once"
        [processing]
        max_epoch_rows = 4
        [source]
        connector = "kafka"
        bootstrap_servers = "{kafka.bootstrap}"
        topics = ["{stem}"]
        [[sinks]]
        connector = "files"
        path = "lake"
        """,
    )
    assert read_published(tmp_path / "lake").column("payload").to_pylist() == [b"first"] * 10
    assert 3 <= len(epochs) < 20


@pytest.mark.parametrize("start", ['"latest"', '{ group = "somebody" }'])
def test_a_first_run_that_finds_nothing_still_says_where_the_next_one_begins(
    kafka: KafkaServer, tmp_path: Path, start: str
) -> None:
    stem = make_topic(kafka.bootstrap, fresh("begun"), 2)
    send(kafka.bootstrap, stem, [b"before"] * 3)
    others = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "somebody"})
    others.commit(offsets=[TopicPartition(stem, 0, 3), TopicPartition(stem, 1, 0)], asynchronous=False)
    text = f"""
        connector_name = "{stem}"
        delivery = "exactly-once"
        [source]
        connector = "kafka"
        bootstrap_servers = "{kafka.bootstrap}"
        topics = ["{stem}"]
        start = {start}
        [[sinks]]
        connector = "files"
        path = "lake"
        """
    drained(tmp_path, text)
    for partition in (0, 1):
        send(kafka.bootstrap, stem, [b"after"] * 5, partition)
    others.commit(offsets=[TopicPartition(stem, 0, 8)], asynchronous=False)
    others.close()
    drained(tmp_path, text)
    assert read_published(tmp_path / "lake").column("payload").to_pylist() == [b"after"] * 10


def test_a_truncate_in_postgresql_empties_the_log_of_keys(
    kafka: KafkaServer, server: PostgresServer, tmp_path: Path
) -> None:
    stem = fresh("shop")
    with database_on(server, "kafka_truncate") as shop:
        text = f"""
        connector_name = "{stem}"
        delivery = "exactly-once"
        [source]
        connector = "postgres_cdc"
        dsn = "{shop.dsn}"
        tables = ["public.orders"]
        [[sinks]]
        connector = "kafka"
        bootstrap_servers = "{kafka.bootstrap}"
        topic = "{stem}.{{topic}}"
        mode = "upsert"
        partitions = 2
        """

        def keys() -> dict[bytes, str | None]:
            found = records(kafka.bootstrap, f"{stem}.public.orders")
            return {each.key(): each.value() and json.loads(each.value())["name"] for each in found}

        shop.run("CREATE TABLE orders (id int8 PRIMARY KEY, name text)")
        shop.run("INSERT INTO orders SELECT n, 'old' FROM generate_series(1, 5) n")
        drained(tmp_path, text)
        assert keys() == {b"%d" % n: "old" for n in range(1, 6)}
        shop.run("INSERT INTO orders VALUES (6, 'gone')")
        shop.run("TRUNCATE orders")
        shop.run("INSERT INTO orders VALUES (2, 'new'), (7, 'new')")
        drained(tmp_path, text)
        assert {key: name for key, name in keys().items() if name is not None} == {b"2": "new", b"7": "new"}
