"""Avro's schemas: what is read as what, by whom a payload was written, and which schemas are refused."""

from __future__ import annotations

import io
import json

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DataError, SchemaError
from penstock.formats import WireSchema, framing
from penstock.formats.avro import Avro, AvroConfig
from penstock.runtime.messages.codecs import Resolve
from penstock.schema.registry.embedded import Embedded, EmbeddedConfig


def format_of(schema, framing="none", resolve=None, id=0) -> Avro:
    return Avro(AvroConfig(framing=framing), WireSchema("avro", json.dumps(schema), id=id), resolve)


def written(schema, rows) -> list[bytes]:
    parsed = fastavro.parse_schema(schema)
    payloads = []
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        payloads.append(out.getvalue())
    return payloads


def binary(payloads) -> pa.Array:
    return pa.array(payloads, pa.binary())


def record(*fields, name="R", **more):
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields], **more}


def logical(kind, logical_type, **more):
    return {"type": kind, "logicalType": logical_type, **more}


RESOLVED = [
    # writer, reader, row as written, row as read
    (record(("a", "int")), record(("a", "long")), {"a": -5}, {"a": -5}),
    (record(("a", "int")), record(("a", "float")), {"a": 3}, {"a": 3.0}),
    (record(("a", "long")), record(("a", "double")), {"a": 1 << 40}, {"a": float(1 << 40)}),
    (record(("a", "float")), record(("a", "double")), {"a": 1.5}, {"a": 1.5}),
    (record(("a", "string")), record(("a", "bytes")), {"a": "é"}, {"a": "é".encode()}),
    (record(("a", "bytes")), record(("a", "string")), {"a": b"x"}, {"a": "x"}),
    (record(("a", "int"), ("b", "string")), record(("b", "string"), ("a", "int")), {"a": 1, "b": "x"}, {"b": "x", "a": 1}),
    (record(("a", "int"), ("b", {"type": "array", "items": "string"})), record(("a", "int")), {"a": 1, "b": ["x"]}, {"a": 1}),
    (record(("a", "int")), record(("a", ["null", "long"])), {"a": 1}, {"a": 1}),
    (record(("a", ["null", "int"])), record(("a", ["string", "null", "long"])), {"a": None}, {"a": None}),
    (record(("a", ["null", "int"])), record(("a", ["string", "null", "long"])), {"a": 7}, {"a": {"string": None, "long": 7}}),
    (record(("a", "string")), record(("a", ["int", "string"])), {"a": "x"}, {"a": {"int": None, "string": "x"}}),
    (record(("a", ["null", "string"])), record(("a", "string")), {"a": "x"}, {"a": "x"}),
    (
        record(("a", {"type": "array", "items": "int"})),
        record(("a", {"type": "array", "items": ["null", "double"]})),
        {"a": [1, 2]},
        {"a": [1.0, 2.0]},
    ),
    (
        record(("a", record(("x", "int"), name="old.In"))),
        record(("b", record(("x", "long"), name="New", aliases=["old.In"]))) | {"fields": []},
        {"a": {"x": 1}},
        {},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("writer", "reader", "row", "wanted"), RESOLVED)
def test_a_payload_is_read_as_the_reader_describes_it(writer, reader, row, wanted):
    avro = format_of(reader, "confluent", {1: WireSchema("avro", json.dumps(writer))}.__getitem__, id=2)
    decoded = avro.decode(framing.add(binary(written(writer, [row, row])), 1))
    assert len(decoded.failures) == 0
    assert decoded.rows.schema == avro.columns()
    assert decoded.rows.to_pylist() == [wanted] * 2


WIDER = {"int": ["int", "long", "float", "double"], "long": ["long", "double"], "float": ["float", "double"],
         "string": ["string", "bytes"], "bytes": ["bytes"]}  # fmt: skip
VALUES = {"int": st.integers(-(2**20), 2**20), "long": st.integers(-(2**50), 2**50), "bytes": st.binary(max_size=5),
          "float": st.floats(width=32, allow_nan=False), "string": st.text(max_size=5)}  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_reader_that_fastavro_allows_reads_the_same(data):
    kinds = data.draw(st.lists(st.sampled_from(sorted(WIDER)), min_size=1, max_size=5))
    writer = record(*((f"f{i}", ["null", kind] if data.draw(st.booleans()) else kind) for i, kind in enumerate(kinds)))
    fields = [
        {"name": "added", "type": ["null", "string"], "default": None},
        {"name": "n", "type": "int", "default": 7},
    ]
    for i, kind in enumerate(kinds):
        if not data.draw(st.booleans()):
            continue  # passed over
        wider = data.draw(st.sampled_from(WIDER[kind]))
        has_null = isinstance(writer["fields"][i]["type"], list)
        made = ["null", wider] if has_null or data.draw(st.booleans()) else wider
        alias = data.draw(st.booleans())
        fields.append({"name": f"new{i}" if alias else f"f{i}", "type": made, "aliases": [f"f{i}"] if alias else []})
    reader = record() | {"fields": data.draw(st.permutations(fields))}
    row = {f"f{i}": data.draw(VALUES[kind]) for i, kind in enumerate(kinds)}
    for field in writer["fields"]:
        if isinstance(field["type"], list) and data.draw(st.booleans()):
            row[field["name"]] = None
    payloads = written(writer, [row])
    wanted = fastavro.schemaless_reader(
        io.BytesIO(payloads[0]), fastavro.parse_schema(writer), fastavro.parse_schema(reader)
    )
    avro = format_of(reader, "confluent", {1: WireSchema("avro", json.dumps(writer))}.__getitem__, id=2)
    assert avro.decode(framing.add(binary(payloads), 1)).rows.to_pylist() == [wanted]


def test_defaults_aliases_and_symbols_are_the_readers():
    colour = {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE", "GREEN"]}
    writer = record(("old", "int"), ("colour", colour), ("inner", record(("x", "int"), name="s.In")), name="W")
    reader = {
        "type": "record",
        "name": "AnyName",
        "fields": [
            {"name": "new", "type": "long", "aliases": ["older", "old"]},
            {"name": "colour", "type": colour | {"symbols": ["OTHER", "RED"], "default": "OTHER"}},
            {"name": "inner", "type": record(("x", "int"), name="In2", aliases=["s.In"])},
            {"name": "text", "type": "string", "default": "none"},
            {"name": "raw", "type": "bytes", "default": "\u00ff"},
            {"name": "maybe", "type": ["null", "int"], "default": None},
            {"name": "list", "type": {"type": "array", "items": "int"}, "default": [1, 2]},
            {"name": "map", "type": {"type": "map", "values": "string"}, "default": {"k": "v"}},
            {"name": "deep", "type": record(("y", "double"), name="Deep"), "default": {"y": 1}},
            {"name": "price", "type": logical("bytes", "decimal", precision=4, scale=2), "default": "\u0001\u0000"},
            {"name": "at", "type": logical("long", "timestamp-millis"), "default": 1000},
            {"name": "either", "type": ["int", "string"], "default": 5},
        ],
    }
    avro = format_of(reader, "confluent", lambda id: WireSchema("avro", json.dumps(writer)), id=9)
    rows = [{"old": 1, "colour": "RED", "inner": {"x": 1}}, {"old": 2, "colour": "GREEN", "inner": {"x": 2}}]
    read = avro.decode(framing.add(binary(written(writer, rows)), 1)).rows.to_pylist()
    assert [(r["new"], r["colour"], r["inner"]) for r in read] == [(1, "RED", {"x": 1}), (2, "OTHER", {"x": 2})]
    assert {k: str(v) for k, v in read[0].items() if k not in ("new", "colour", "inner")} == {
        "text": "none", "raw": "b'\\xff'", "maybe": "None", "list": "[1, 2]", "map": "[('k', 'v')]", "deep": "{'y': 1.0}",
        "price": "2.56", "at": "1970-01-01 00:00:01+00:00", "either": "{'int': 5, 'string': None}",
    }  # fmt: skip


def test_a_null_is_no_symbol_that_the_reader_lacks():
    colour = {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}
    inner = record(("c", "Colour"), name="In")
    writer = record(("colour", ["null", colour]), ("inner", ["null", inner]))
    reader = json.loads(json.dumps(writer).replace('"RED", "BLUE"', '"BLUE", "GREEN"'))
    rows = [
        {"colour": None, "inner": None},
        {"colour": "BLUE", "inner": {"c": "BLUE"}},
        {"colour": "RED", "inner": None},
    ]
    avro = format_of(reader, "confluent", {1: WireSchema("avro", json.dumps(writer))}.__getitem__, id=2)
    decoded = avro.decode(framing.add(binary(written(writer, rows)), 1))
    assert decoded.rows.to_pylist() == rows[:2]
    assert decoded.failures.rules == ("avro.enum",)


def test_rows_of_several_writers_stay_in_order_and_only_unknown_or_unfit_ones_fail():
    one, two = record(("a", "int")), record(("b", "string"), ("a", "long"))
    unfit = record(("a", "string"))
    known = {1: one, 2: two, 3: unfit}

    def resolve(id):
        if id not in known:
            raise DataError(f"the registry has no schema {id}", code="PEN-3001")
        return WireSchema("avro", json.dumps(known[id]))

    avro = format_of(record(("a", "long")), "confluent", resolve, id=8)
    first = framing.add(binary(written(one, [{"a": 1}, {"a": 2}])), 1).to_pylist()
    second = framing.add(binary(written(two, [{"b": "x", "a": 3}])), 2).to_pylist()
    wrong = framing.add(binary(written(unfit, [{"a": "x"}])), 3).to_pylist()
    payloads = [
        first[0],
        second[0],
        b"\0\0\0\0\x09\x02",
        None,
        wrong[0],
        b"",
        b"\x01abcdef",
        first[1],
        second[0] + b"!",
    ]
    decoded = avro.decode(binary(payloads))
    assert decoded.rows.column("a").to_pylist() == [1, 3, None, 2]
    assert decoded.positions.tolist() == [0, 1, 3, 7]
    assert decoded.failures.positions.tolist() == [2, 4, 5, 6, 8]
    assert decoded.failures.rules == (
        "framing.unknown_id", "avro.incompatible", "framing.missing", "framing.missing", "avro.trailing"
    )  # fmt: skip


def test_a_schema_of_another_subject_than_the_expected_has_a_rule_of_its_own(tmp_path):
    schema = record(("a", "int"))
    registry = Embedded(EmbeddedConfig(), tmp_path)
    ours = registry.register_schema("ours", WireSchema("avro", json.dumps(schema)))
    theirs = registry.register_schema("theirs", WireSchema("avro", json.dumps(record(("a", "int"), ("b", "int")))))
    avro = format_of(schema, "confluent", Resolve(registry, "ours"), id=ours.id)
    payloads = [framing.add(binary(written(schema, [{"a": 1}])), id)[0].as_py() for id in (ours.id, theirs.id, 99)]
    failures = avro.decode(binary(payloads)).failures
    assert failures.positions.tolist() == [1, 2]
    assert failures.rules == ("framing.subject", "framing.unknown_id")
    assert failures.reasons[0] == f"the schema {theirs.id} is of theirs, not of ours"


def test_single_objects_are_read_by_their_fingerprint():
    schema = record(("a", "int"))
    avro = format_of(schema, "single_object")
    payloads = avro.encode(pa.record_batch({"a": pa.array([1, 2], pa.int32())}))
    assert payloads[0].as_py()[:2] == b"\xc3\x01"
    other = payloads[1].as_py()[:2] + b"12345678" + payloads[1].as_py()[10:]
    decoded = avro.decode(binary([payloads[0].as_py(), other, b"\xc3\x01"]))
    assert decoded.rows.to_pylist() == [{"a": 1}]
    assert decoded.failures.rules == ("framing.unknown_id", "framing.missing")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}, "contains itself"),
        (record(("a", "unknown")), "unknown type"),
        (record(("a", ["null", ["int"]])), "union"),
        (record(("a", "int"), ("a", "int")), "two fields"),
        ({"type": "fixed", "name": "F", "size": -1}, "size"),
        ({"type": "array"}, "items"),
        (record(("a", logical("bytes", "decimal", precision=90))), "90 digits"),
        (record(("x", {"type": "enum", "name": "E", "symbols": ["A"], "default": "B"})), "default"),
        (record(("a", "int"), aliases=5), "aliases of R"),
        (record(("a", "int")) | {"fields": [{"name": "a", "type": "int", "aliases": [1]}]}, "aliases of a"),
        (record(("a", "int"), namespace=5), "namespace of R"),
        (record(("a", {"type": "array", "items": []})), "union"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused_with_its_reason(schema, said):
    with pytest.raises(SchemaError, match=said):
        format_of(schema)


def test_a_schema_that_grows_beyond_bounds_when_written_out_is_refused():
    types = [record(("a", "int"), ("b", "int"), name="T0")]
    for i in range(1, 30):
        types.append(record(("a", types[-1]), ("b", f"T{i - 1}"), name=f"T{i}"))
    with pytest.raises(SchemaError, match="fields"):
        format_of(types[-1])


def test_names_come_from_references_and_namespaces():
    base = WireSchema("avro", json.dumps(record(("x", "int"), name="shop.Line")))
    schema = record(("line", "Line"), ("again", {"type": "array", "items": "shop.Line"}), namespace="shop")
    avro = Avro(AvroConfig(), WireSchema("avro", json.dumps(schema), references=(("shop.Line", base),)))
    assert avro.decode(binary([b"\x02\x02\x04\x00"])).rows.to_pylist() == [{"line": {"x": 1}, "again": [{"x": 2}]}]
