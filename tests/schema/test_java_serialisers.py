"""Rows from Java's own client and serialisers through a broker and a registry to us, and ours to them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from test_other_clients import JSON, JSON_BY_JAVA, PLAIN, PROTO, PROTO_BY_CONFLUENT, ROWS, SCHEMA

from java_programs import program
from kafka_topics import batches, fresh, make_topic
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.formats import Decoded, WireSchema, load
from penstock.schema.registry.confluent import Confluent, ConfluentConfig
from penstock.sink import SinkContext, Task, TopicContext
from penstock.source import ReadLimit
from penstock.testing import apicurio
from penstock.testing.kafka import KafkaServer
from penstock.testing.sinks.steps import END, TOPIC, epoch_of, opened_sink
from penstock.testing.sources.steps import opened_source

pytestmark = pytest.mark.soak  # fetches the serialisers once, and compiles

NEEDED = [
    f"io.apicurio:apicurio-registry-serdes-avro-serde:{apicurio.VERSION}",
    f"io.apicurio:apicurio-registry-serdes-jsonschema-serde:{apicurio.VERSION}",
    "com.google.protobuf:protobuf-java:3.25.8",
]
AVRO_LINES = [
    {**row, "name": row["name"] and {"string": row["name"]}, "amount": amount, "at": 1_700_000_000_123 + n}
    for n, (row, amount) in enumerate(zip(ROWS, ["\x19", "}", "\0á"], strict=True))
]
"""As Avro writes JSON: a branch of a union by its name, bytes as characters."""
PROTO_TEXTS = [
    'id: 1 name: "Grün 0" place { ok: true }',
    'id: 2 price: 1.5 tags: "a" tags: "b1" place { x: 1 } counts { key: "k" value: 1 }',
    'id: -1099511627776 name: "Grün 2" price: 3.0 tags: "a" tags: "b2" place { x: 2 ok: true } counts { key: "k" value: 2 }',
]

Java = Callable[..., list[str]]


@pytest.fixture(scope="module")
def server(java: None, need: Callable[[object, str], None]) -> Iterator[apicurio.ApicurioServer]:
    need(apicurio.is_installed(), "Apicurio is not installed: make servers")
    with apicurio.ApicurioServer() as running:
        yield running


@pytest.fixture(scope="module")
def run_java(need: Callable[[object, str], None], tmp_path_factory: pytest.TempPathFactory) -> Java:
    """Run the program beside this file; gives the lines that it prints."""
    need(shutil.which("mvn") and shutil.which("javac"), "Maven or a Java compiler is missing")
    command = program(Path(__file__).parent / "Serialisers.java", NEEDED, tmp_path_factory.mktemp("compiled"))

    def run(*arguments: str) -> list[str]:
        done = subprocess.run([*command, *arguments], capture_output=True, encoding="utf-8", timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run


class Place:
    """A topic, its schema in the registry, and both again in files for Java."""

    def __init__(self, kafka: KafkaServer, server: apicurio.ApicurioServer, here: Path, kind: str, text: str) -> None:
        self.kafka, self.topic = kafka, make_topic(kafka.bootstrap, fresh(kind.replace("_", "-")))
        self.registry = Confluent(ConfluentConfig(url=server.url))
        self.schema = self.registry.register_schema(f"{self.topic}-value", WireSchema(kind, text))
        self.format_type, self.options = load(kind), {"framing": "confluent"}
        (here / "schema").write_text(text)
        native = server.url.replace("ccompat/v7", "registry/v2")
        self._java = [kafka.bootstrap, native, self.topic, str(here / "schema")]
        self.kind = kind

    def arguments(self, action: str, last: object) -> list[str]:
        return [self.kind, action, *self._java, str(last)]

    def ours(self) -> list[bytes]:
        """What is in the topic, as the source reads it."""
        source = Kafka(KafkaConfig(bootstrap_servers=self.kafka.bootstrap, topics=(self.topic,)))
        with opened_source(source) as opened:
            start = opened.initial()
            splits = opened.split(start, opened.latest(start, ReadLimit()))
            return [p for s in splits for b in batches(opened, s) for p in b.records.column("payload").to_pylist()]

    def decoded(self, payloads: list[bytes]) -> Decoded:
        options = self.format_type.options_type.model_validate(self.options)
        found = self.format_type(options, self.schema, self.registry.fetch_schema_by_id).decode(
            pa.array(payloads, pa.binary())
        )
        assert not len(found.failures)
        return found

    def written(self, rows: object) -> None:
        """Rows through the sink, in its transaction."""
        options = self.format_type.options_type.model_validate(self.options)
        context = SinkContext({TOPIC: TopicContext(encoder=self.format_type(options, self.schema))})
        sink = KafkaSink(KafkaSinkConfig(bootstrap_servers=self.kafka.bootstrap, topic=self.topic))
        with opened_sink(sink, context) as opened:
            opened.begin_epoch(epoch_of(1), Task(0))
            opened.write_batch(TOPIC, rows)
            opened.commit_epoch(epoch_of(1), [opened.pre_commit(epoch_of(1))], END)


CASES = {
    "avro": (SCHEMA, AVRO_LINES, ROWS),
    "json_schema": (
        JSON,
        [json.loads(each[5:]) for each in JSON_BY_JAVA],
        [{name: row[name] for name in PLAIN} for row in ROWS],
    ),
}


@pytest.mark.parametrize("kind", sorted(CASES))
def test_java_and_we_read_what_the_other_wrote(
    kafka: KafkaServer, server: apicurio.ApicurioServer, run_java: Java, tmp_path: Path, kind: str
) -> None:
    text, lines, rows = CASES[kind]
    theirs = Place(kafka, server, tmp_path, kind, text)
    (tmp_path / "rows").write_text("\n".join(json.dumps(each) for each in lines))
    run_java(*theirs.arguments("write", tmp_path / "rows"))
    decoded = theirs.decoded(theirs.ours())
    assert decoded.rows.to_pylist() == rows
    ours = Place(kafka, server, tmp_path, kind, text)
    ours.written(decoded.rows)
    assert [json.loads(each) for each in run_java(*ours.arguments("read", len(rows)))] == lines


def test_javas_protobuf_reads_what_we_wrote(
    kafka: KafkaServer, server: apicurio.ApicurioServer, run_java: Java, tmp_path: Path
) -> None:
    """By Java's library for Protobuf: a serialiser for it with this frame is not on Maven Central."""
    place = Place(kafka, server, tmp_path, "protobuf", PROTO)
    place.options["message"] = "shop.Order"
    id = int(place.schema.id or 0).to_bytes(4, "big")
    decoded = place.decoded([b"\0" + id + bytes.fromhex(each)[5:] for each in PROTO_BY_CONFLUENT])
    place.written(decoded.rows)
    assert [json.loads(each) for each in run_java(*place.arguments("read", 3))] == PROTO_TEXTS
