"""Rows through Kafka with the frames of a real registry, both ways: what the sink writes, the source's topic decodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from kafka_topics import batches, fresh, records
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.formats import WireSchema, load
from penstock.schema import with_key
from penstock.schema.registry.confluent import Confluent, ConfluentConfig
from penstock.sink import SinkContext, Task, TopicContext
from penstock.source import ReadLimit
from penstock.testing.apicurio import ApicurioServer, is_installed
from penstock.testing.kafka import KafkaServer
from penstock.testing.sinks.steps import END, TOPIC, epoch_of, opened_sink
from penstock.testing.sources.steps import opened_source

AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"], "default": None}],
}
JSON = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string"}}, "required": ["id"]}
PROTO = 'syntax = "proto3";\nmessage Order {\n  int64 id = 1;\n  string name = 2;\n}\n'
SCHEMAS = {"avro": json.dumps(AVRO), "json_schema": json.dumps(JSON), "protobuf": PROTO}


@pytest.fixture(scope="module")
def registry(java: None, need: Callable[[object, str], None]) -> Iterator[Confluent]:
    need(is_installed(), "Apicurio is not installed: make servers")
    with ApicurioServer() as server:
        yield Confluent(ConfluentConfig(url=server.url))


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_rows_keep_their_values_over_kafka_and_a_registry(kafka: KafkaServer, registry: Confluent, kind: str) -> None:
    stem = fresh(kind)
    written = registry.register_schema(f"{stem}-value", WireSchema(kind, SCHEMAS[kind]))
    assert written.id
    format_type = load(kind)
    options = format_type.options_type.model_validate({"framing": "confluent"})
    schema = with_key(pa.schema([("id", pa.int64()), ("name", pa.string())]), ["id"])
    batch = pa.record_batch([[1, 2, 3], ["Ada", "Bö", ""]], schema=schema)
    sink = KafkaSink(KafkaSinkConfig(bootstrap_servers=kafka.bootstrap, topic=f"{stem}.{{topic}}", partitions=1))
    context = SinkContext({TOPIC: TopicContext(encoder=format_type(options, written))})
    with opened_sink(sink, context) as opened:
        opened.begin_epoch(epoch_of(1), Task(0))
        opened.write_batch(TOPIC, batch)
        opened.commit_epoch(epoch_of(1), [opened.pre_commit(epoch_of(1))], END)
    values = [each.value() for each in records(kafka.bootstrap, f"{stem}.lake.orders")]
    assert [value[:5] for value in values] == [b"\0" + written.id.to_bytes(4, "big")] * 3
    source = Kafka(KafkaConfig(bootstrap_servers=kafka.bootstrap, topics=(f"{stem}.lake.orders",)))
    with opened_source(source) as opened_:
        start = opened_.initial()
        splits = opened_.split(start, opened_.latest(start, ReadLimit()))
        (envelopes,) = [each.records for split in splits for each in batches(opened_, split)]
    # The reader knows only what the registry says about the id in each frame.
    reader = format_type(options, registry.fetch_schema(f"{stem}-value"), registry.fetch_schema_by_id)
    decoded = reader.decode(envelopes.column("payload"))
    assert not len(decoded.failures)
    assert decoded.rows.select(["id", "name"]).to_pylist() == batch.to_pylist()
    assert envelopes.column("key").to_pylist() == [b"1", b"2", b"3"]
