"""
What the wire formats cost beside the libraries that a user would call: one core, CPU seconds, payloads as a shop sends them.

Every format is one function that makes a `Case`, listed in `CASES`. Ours and the peer take turns in one process, and the
best turn of each counts. `BENCH_ROWS` and `BENCH_TURNS` make a small run of it.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import fastavro
import jsonschema_rs
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from measure import Bench

from penstock.formats import Format, WireSchema, load
from penstock.formats.protobuf.files import compiled

ROWS = int(os.environ.get("BENCH_ROWS", 200_000))
TURNS = int(os.environ.get("BENCH_TURNS", 5))
BATCH_ROWS = 50_000

Batches = list[pa.Array]


@dataclass
class Case:
    """A format, payloads that it decodes, and what it is measured against."""

    format: Format[Any]
    payloads: list[bytes]
    spoiled: list[bytes]
    """The same with one bad payload in a hundred, of the kinds that happen."""
    peer: Callable[[pa.Array], object]
    """What decodes or checks a batch of payloads without us."""
    peer_name: str
    target: float
    """The least ratio of our rate to the peer's."""


def shop_row(at: int) -> dict[str, Any]:
    """A row of about two hundred bytes of JSON: numbers, text, a time, a struct, a list, nulls."""
    return {
        "id": at,
        "customer": f"customer-{at % 9973}",
        "amount": round(at * 0.37 % 1000, 2),
        "paid": at % 3 == 0,
        "created_at": f"2026-01-{at % 28 + 1:02d}T{at % 24:02d}:{at % 60:02d}:00Z",
        "address": {"city": "Zürich" if at % 5 else "Bern", "zip": 8000 + at % 100},
        "tags": ["new", "gift", "bulk"][: at % 4],
        "note": None if at % 7 else 'leave it "here"',
        "status": "open",
    }


def spoiled_json(payloads: list[bytes]) -> list[bytes]:
    """One payload in a hundred is cut short, no JSON at all, or has text for a number, in turns."""
    found = list(payloads)
    for turn, at in enumerate(range(50, len(payloads), 100)):
        whole = payloads[at]
        found[at] = (whole[: len(whole) // 2], b"not json", whole.replace(b'"id": ', b'"id": "x", "was": '))[turn % 3]
    return found


def json_case() -> Case:
    payloads = [json.dumps(shop_row(at), ensure_ascii=False).encode() for at in range(ROWS)]

    def read_json(batch: pa.Array) -> object:
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(batch)], pa.int32()), batch), b"\n")
        options = pyarrow.json.ReadOptions(use_threads=False, block_size=64 << 20)
        return pyarrow.json.read_json(pa.BufferReader(joined.buffers()[2]), options)

    format = made("json")
    return Case(format, payloads, spoiled_json(payloads), read_json, "`pyarrow.json.read_json` of the same lines", 0.7)


def json_schema_case() -> Case:
    payloads = [json.dumps(shop_row(at), ensure_ascii=False).encode() for at in range(ROWS)]
    text = {"type": "string"}
    address = {"type": "object", "properties": {"city": text, "zip": {"type": "integer"}}, "required": ["city"]}
    properties = {
        "id": {"type": "integer", "minimum": 0},
        "customer": text,
        "amount": {"type": "number"},
        "paid": {"type": "boolean"},
        "created_at": {"type": "string", "format": "date-time"},
        "address": address,
        "tags": {"type": "array", "items": text},
        "note": {"type": ["string", "null"]},
        "status": {"enum": ["open", "closed"]},
    }
    schema = {"type": "object", "properties": properties, "required": ["id", "customer"]}
    is_valid = jsonschema_rs.validator_for(schema, validate_formats=True).is_valid

    def parse_and_validate(batch: pa.Array) -> object:
        return [is_valid(orjson.loads(payload)) for payload in batch.to_pylist()]

    format = made("json_schema", WireSchema("json_schema", json.dumps(schema)))
    peer = "`orjson.loads` and `jsonschema_rs` `is_valid`, row by row"
    return Case(format, payloads, spoiled_json(payloads), parse_and_validate, peer, 0.6)


AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "paid", "type": "boolean"},
        {"name": "created_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {
            "name": "address",
            "type": {
                "type": "record",
                "name": "Address",
                "fields": [{"name": "city", "type": "string"}, {"name": "zip", "type": "int"}],
            },
        },
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "note", "type": ["null", "string"]},
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["open", "closed"]}},
    ],
}

PROTO = """
syntax = "proto3"; package shop; import "google/protobuf/timestamp.proto";
message Order {
  int64 id = 1; string customer = 2; double amount = 3; bool paid = 4; google.protobuf.Timestamp created_at = 5;
  Address address = 6; repeated string tags = 7; optional string note = 8; Status status = 9;
  message Address { string city = 1; int32 zip = 2; }
  enum Status { open = 0; closed = 1; }
}
"""


def typed_row(at: int) -> dict[str, Any]:
    row = shop_row(at)
    return {**row, "created_at": datetime.fromisoformat(row["created_at"])}


def spoiled_bytes(payloads: list[bytes]) -> list[bytes]:
    """One payload in a hundred is cut short, garbage, or text, in turns."""
    found = list(payloads)
    for turn, at in enumerate(range(50, len(payloads), 100)):
        found[at] = (payloads[at][:-3], b"\xff\xff", b"not a message")[turn % 3]
    return found


def avro_case() -> Case:
    parsed = fastavro.parse_schema(AVRO)
    payloads = []
    for at in range(ROWS):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, typed_row(at))
        payloads.append(out.getvalue())
    format = made("avro", WireSchema("avro", json.dumps(AVRO)))
    columns = format.columns()

    def row_by_row(batch: pa.Array) -> object:
        rows = [fastavro.schemaless_reader(io.BytesIO(payload), parsed, None) for payload in batch.to_pylist()]
        return pa.RecordBatch.from_pylist(rows, schema=columns)

    return Case(format, payloads, spoiled_bytes(payloads), row_by_row, "`fastavro` row by row into Arrow", 10)


def protobuf_case() -> Case:
    schema = WireSchema("protobuf", PROTO)
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled(schema)).file:
        pool.Add(file)
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    payloads = [order(**typed_row(at)).SerializeToString() for at in range(ROWS)]
    format = made("protobuf", schema)
    columns = format.columns()

    def row_of(payload: bytes) -> dict[str, Any]:
        found = order.FromString(payload)
        return {
            "id": found.id,
            "customer": found.customer,
            "amount": found.amount,
            "paid": found.paid,
            "created_at": found.created_at.ToDatetime(UTC),
            "address": {"city": found.address.city, "zip": found.address.zip},
            "tags": list(found.tags),
            "note": found.note if found.HasField("note") else None,
            "status": "open" if found.status == 0 else "closed",
        }

    def one_at_a_time(batch: pa.Array) -> object:
        return pa.RecordBatch.from_pylist([row_of(payload) for payload in batch.to_pylist()], schema=columns)

    peer = "`protobuf`, one message at a time into Arrow"
    return Case(format, payloads, spoiled_bytes(payloads), one_at_a_time, peer, 8)


CSV = {
    "id": "int64",
    "customer": "string",
    "amount": "float64",
    "paid": "bool",
    "created_at": "timestamp[us, UTC]",
    "city": "string",
    "note": "string",
    "status": "string",
}


def csv_row(at: int) -> bytes:
    row = shop_row(at)
    values = row | row["address"]
    out = io.StringIO()
    texts = [str(values[name]).lower() if name == "paid" else values[name] for name in CSV]
    csv.writer(out, lineterminator="").writerow(["" if each is None else each for each in texts])
    return out.getvalue().encode()


def spoiled_csv(payloads: list[bytes]) -> list[bytes]:
    """One payload in a hundred is cut short, no text, or has a word for a number, in turns."""
    found = list(payloads)
    for turn, at in enumerate(range(50, len(payloads), 100)):
        found[at] = (payloads[at][:20], b"\xff\xff", b"x" + payloads[at])[turn % 3]
    return found


def csv_case() -> Case:
    payloads = [csv_row(at) for at in range(ROWS)]
    format = made("csv", columns=CSV)
    columns = format.columns()
    read: dict[str, Callable[[str], Any]] = {
        "id": int,
        "amount": float,
        "paid": "true".__eq__,
        "created_at": datetime.fromisoformat,
    }

    def row_of(payload: bytes) -> dict[str, Any]:
        (texts,) = csv.reader([payload.decode()])
        named = zip(CSV, texts, strict=True)
        return {name: read.get(name, str)(text) if text else None for name, text in named}

    def row_by_row(batch: pa.Array) -> object:
        return pa.RecordBatch.from_pylist([row_of(payload) for payload in batch.to_pylist()], schema=columns)

    return Case(format, payloads, spoiled_csv(payloads), row_by_row, "`csv`, row by row into Arrow", 1.5)


def envelope(at: int) -> bytes:
    """An insert, an update or a delete as Debezium writes it for PostgreSQL, without its schema part."""
    row, op = shop_row(at), "cud"[at % 3]
    times = {"ts_ms": 1_700_000_000_000 + at}
    place = {"version": "3.0", "connector": "postgresql", "name": "shop", "schema": "public", "table": "orders"}
    source = {**place, **times, "snapshot": "false", "txId": at // 10, "lsn": 1000 + at}
    images = {"before": row if op == "d" else None, "after": None if op == "d" else row}
    return json.dumps({**images, "source": source, "op": op, **times}, ensure_ascii=False).encode()


def debezium_case() -> Case:
    payloads = [envelope(at) for at in range(ROWS)]
    format = made("debezium", key=["id"])

    def row_of(payload: bytes) -> dict[str, Any]:
        found = json.loads(payload)
        source = found["source"]
        row = found["before"] if found["op"] == "d" else found["after"]
        return {**row, "_op": found["op"], "_position": f"{source['lsn']:020d}", "_txid": source["txId"]}

    def row_by_row(batch: pa.Array) -> object:
        return pa.RecordBatch.from_pylist([row_of(payload) for payload in batch.to_pylist()])

    return Case(format, payloads, spoiled_json(payloads), row_by_row, "`json`, row by row into Arrow", 1.5)


CASES: list[Callable[[], Case]] = [json_case, json_schema_case, avro_case, protobuf_case, csv_case, debezium_case]


def made(name: str, schema: WireSchema | None = None, **options: Any) -> Format[Any]:
    kind = load(name)
    return kind(kind.options_type(**options), schema)


def batches(payloads: list[bytes]) -> Batches:
    return [pa.array(payloads[at : at + BATCH_ROWS], pa.binary()) for at in range(0, len(payloads), BATCH_ROWS)]


def cpu_seconds(work: Callable[[pa.Array], object], data: list[Any]) -> float:
    began = time.process_time()
    for each in data:
        work(each)
    return time.process_time() - began


def measure(bench: Bench, case: Case) -> None:
    format, name = case.format, case.format.name
    clean, spoiled = batches(case.payloads), batches(case.spoiled)
    known = format.columns() or format.decode(clean[0]).rows.schema
    decoded = [format.decode(batch, known) for batch in clean]
    assert not any(len(each.failures) for each in decoded)
    failed = sum(len(format.decode(batch, known).failures) for batch in spoiled)
    assert failed == len(range(50, len(case.payloads), 100)), f"{failed} failures"
    rows = [each.rows for each in decoded]
    works: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
        "decode": (lambda batch: format.decode(batch, known), clean),
        "peer": (case.peer, clean),
        "spoiled": (lambda batch: format.decode(batch, known), spoiled),
        "encode": (format.encode, rows),
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(TURNS):
        for what, (work, data) in works.items():
            best[what] = min(best[what], cpu_seconds(work, data))
    rate = {what: len(case.payloads) / seconds for what, seconds in best.items()}
    size = sum(map(len, case.payloads)) / len(case.payloads)
    bench.row(f"{name}: decode", f"{rate['decode'] / 1e6:.2f} M/CPU s", f"{size:.0f} bytes a payload")
    bench.row(case.peer_name, f"{rate['peer'] / 1e6:.2f} M/CPU s", "the same payloads")
    bench.row(f"{name}: decode with 1 % bad", f"{rate['spoiled'] / 1e6:.2f} M/CPU s", f"{failed:,} failures")
    bench.row(f"{name}: encode", f"{rate['encode'] / 1e6:.2f} M/CPU s")
    bench.claim(f"{name}_decode_vs_peer", rate["decode"] / rate["peer"], ">=", case.target)
    bench.claim(f"{name}_1_percent_bad_vs_clean", rate["spoiled"] / rate["decode"], ">=", 0.6)
    bench.claim(f"{name}_encode_vs_decode", rate["encode"] / rate["decode"], ">=", 0.5)


def main() -> None:
    pa.set_cpu_count(1)
    bench = Bench("formats", "Wire formats, one core")
    for case in CASES:
        measure(bench, case())
    bench.finish()


if __name__ == "__main__":
    main()
