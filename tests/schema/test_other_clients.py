"""
Messages with the frame of a registry that other clients made, and that are read here; ours are the same bytes.

They were made once, against Apicurio 2.6.13:
- Avro and JSON Schema by Java, with `AvroKafkaSerializer` and `JsonSchemaKafkaSerializer` of
  `io.apicurio:apicurio-registry-serdes-*-serde:2.6.13.Final` (`apicurio.registry.as-confluent = true`, headers off).
  `test_java_serialisers.py` runs them, in both directions.
- Protobuf by `ProtobufSerializer` of `confluent-kafka` 2.x for Python, whose deserialiser read ours. Java's from Apicurio has a
  frame of its own there, and Confluent's is not on Maven Central. The client registers the descriptor of one file, not its text.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa

from penstock.formats import Decoded, WireSchema, load

SCHEMA = """
{"type": "record", "name": "Order", "namespace": "shop", "fields": [
  {"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"], "default": null},
  {"name": "price", "type": "double"}, {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}},
  {"name": "tags", "type": {"type": "array", "items": "string"}},
  {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
  {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
  {"name": "place", "type": {"type": "record", "name": "Place", "fields": [
    {"name": "x", "type": "int"}, {"name": "ok", "type": "boolean"}]}}]}
"""
BY_JAVA = [
    "000000000102020e4772c3bc6e2030000000000000000000000219f6a1abfef9620001",
    "00000000010400000000000000f83f0204026104623100027df8a1abfef9620200",
    "0000000001ffffffffff3f020e4772c3bc6e2032000000000000084002040261046232000400e1faa1abfef9620401",
]
ROWS = [
    {
        "id": id,
        "name": name,
        "price": n * 1.5,
        "kind": "OLD" if n else "NEW",
        "tags": ["a", f"b{n}"] if n else [],
        "amount": Decimal(f"{n}.25"),
        "at": datetime(2023, 11, 14, 22, 13, 20, 123_000 + n * 1000, UTC),
        "place": {"x": n, "ok": n % 2 == 0},
    }
    for n, (id, name) in enumerate([(1, "Grün 0"), (2, None), (-1 << 40, "Grün 2")])
]
PLAIN = ["id", "name", "price", "tags", "place"]
"""What all three schemas have."""
JSON = """
{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {
  "id": {"type": "integer"}, "name": {"type": "string"}, "price": {"type": "number"},
  "tags": {"type": "array", "items": {"type": "string"}},
  "place": {"type": "object", "properties": {"x": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["x", "ok"]}},
  "required": ["id", "price", "tags", "place"]}
"""
JSON_BY_JAVA = [
    b'\0\0\0\0\1{"id":1,"name":"Gr\xc3\xbcn 0","price":0.0,"tags":[],"place":{"x":0,"ok":true}}',
    b'\0\0\0\0\1{"id":2,"price":1.5,"tags":["a","b1"],"place":{"x":1,"ok":false}}',
    b'\0\0\0\0\1{"id":-1099511627776,"name":"Gr\xc3\xbcn 2","price":3.0,"tags":["a","b2"],"place":{"x":2,"ok":true}}',
]
PROTO = (
    "CgtvcmRlci5wcm90bxIEc2hvcCIXCgdJZ25vcmVkEgwKBG5vdGUYASABKAki5gEKBU9yZGVyEgoKAmlkGAEgASgDEhEKBG5hbWUYAiABKAlIAI"
    "gBARINCgVwcmljZRgDIAEoARIMCgR0YWdzGAQgAygJEiAKBXBsYWNlGAUgASgLMhEuc2hvcC5PcmRlci5QbGFjZRInCgZjb3VudHMYBiADKAsy"
    "Fy5zaG9wLk9yZGVyLkNvdW50c0VudHJ5Gh4KBVBsYWNlEgkKAXgYASABKAUSCgoCb2sYAiABKAgaLQoLQ291bnRzRW50cnkSCwoDa2V5GAEgAS"
    "gJEg0KBXZhbHVlGAIgASgFOgI4AUIHCgVfbmFtZWIGcHJvdG8z"
)
PROTO_BY_CONFLUENT = [
    "00000000010202080112074772c3bc6e20302a021001",
    "00000000010202080219000000000000f83f220161220262312a02080132050a016b1001",
    "00000000010202088080808080e0ffffff0112074772c3bc6e2032190000000000000840220161220262322a040802100132050a016b1002",
]
NESTED_BY_CONFLUENT = "000000000104020008051001"
"""Of `Order.Place`, whose indexes are two."""


def read_and_written(kind: str, text: str, messages: list[bytes], **options: str) -> tuple[Decoded, list[bytes]]:
    """What a reader of the schema makes of messages with the id 1, and what a writer makes of those rows."""
    asked: list[int] = []

    def by_id(id: int) -> WireSchema:
        asked.append(id)
        return WireSchema(kind, text)

    format_type = load(kind)
    chosen = format_type.options_type.model_validate({"framing": "confluent", **options})
    decoded = format_type(chosen, WireSchema(kind, text), by_id).decode(pa.array(messages, pa.binary()))
    assert set(asked) == {1}
    written = format_type(chosen, WireSchema(kind, text, id=1)).encode(decoded.rows)
    return decoded, written.to_pylist()


def test_avro_of_javas_serialiser_is_read_and_ours_is_the_same_bytes() -> None:
    messages = [bytes.fromhex(each) for each in BY_JAVA]
    decoded, written = read_and_written("avro", SCHEMA, messages)
    assert not len(decoded.failures)
    assert decoded.rows.to_pylist() == ROWS
    assert written == messages


def test_json_schema_of_javas_serialiser_is_read_and_ours_says_the_same() -> None:
    decoded, written = read_and_written("json_schema", JSON, JSON_BY_JAVA)
    assert not len(decoded.failures)
    assert decoded.rows.to_pylist() == [{name: row[name] for name in PLAIN} for row in ROWS]
    assert [each[:5] for each in written] == [each[:5] for each in JSON_BY_JAVA]
    assert [json.loads(each[5:]) for each in written] == [json.loads(each[5:]) for each in JSON_BY_JAVA]


def test_protobuf_of_confluents_serialiser_is_read_and_ours_is_the_same_bytes() -> None:
    messages = [bytes.fromhex(each) for each in PROTO_BY_CONFLUENT]
    decoded, written = read_and_written("protobuf", PROTO, messages, message="shop.Order")
    assert not len(decoded.failures)
    assert decoded.rows.select(PLAIN).to_pylist() == [{name: row[name] for name in PLAIN} for row in ROWS]
    assert decoded.rows["counts"].to_pylist() == [[], [("k", 1)], [("k", 2)]]
    assert written == messages


def test_protobuf_of_a_message_inside_another_is_known_by_its_indexes() -> None:
    messages = [bytes.fromhex(NESTED_BY_CONFLUENT)]
    decoded, written = read_and_written("protobuf", PROTO, messages, message="shop.Order.Place")
    assert decoded.rows.to_pylist() == [{"x": 5, "ok": True}]
    assert written == messages
