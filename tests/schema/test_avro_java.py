"""
Avro messages that Java's own serialiser made, with the frame of a registry.

They were made once, with `AvroKafkaSerializer` of `io.apicurio:apicurio-registry-serdes-avro-serde:2.6.13.Final`
(`apicurio.registry.as-confluent = true`, headers off) against Apicurio 2.6.13. What our encoder writes for the same rows is the
same bytes, and `AvroKafkaDeserializer` read it there.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa

from penstock.formats import WireSchema, load

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


def test_messages_of_javas_serialiser_are_read_and_ours_are_the_same_bytes() -> None:
    asked: list[int] = []

    def by_id(id: int) -> WireSchema:
        asked.append(id)
        return WireSchema("avro", SCHEMA)

    format_type = load("avro")
    options = format_type.options_type.model_validate({"framing": "confluent"})
    messages = [bytes.fromhex(each) for each in BY_JAVA]
    decoded = format_type(options, WireSchema("avro", SCHEMA), by_id).decode(pa.array(messages, pa.binary()))
    assert not len(decoded.failures)
    assert decoded.rows.to_pylist() == ROWS
    assert set(asked) == {1}
    written = format_type(options, WireSchema("avro", SCHEMA, id=1)).encode(decoded.rows)
    assert written.to_pylist() == messages
