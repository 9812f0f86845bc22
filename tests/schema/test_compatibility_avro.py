"""What our Avro resolution says, and whether fastavro agrees on data."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import fastavro
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thorough
from penstock.errors import SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, incompatibilities, parsed


def avro(value: Any, **more: Any) -> WireSchema:
    return WireSchema("avro", json.dumps(value), **more)


def record(*fields: Any, name: str = "Order", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, type: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type, **more}


def found(reader: Any, writer: Any) -> list[tuple[str, str]]:
    return [(each.path, each.rule) for each in incompatibilities(Compatibility.BACKWARD, [avro(writer)], avro(reader))]


ID = field("id", "long")


class TestRules:
    def test_a_new_field_with_a_default_is_compatible(self):
        assert found(record(ID, field("note", "string", default="")), record(ID)) == []

    def test_a_new_field_without_a_default_is_named(self):
        assert found(record(ID, field("note", "string")), record(ID)) == [("Order.note", "avro.missing_default")]

    def test_a_field_that_is_gone_is_compatible(self):
        assert found(record(ID), record(ID, field("note", "string"))) == []

    def test_an_alias_stands_for_the_old_name(self):
        assert found(record(field("key", "long", aliases=["id"])), record(ID)) == []
        assert found(record(field("key", "long")), record(ID)) == [("Order.key", "avro.missing_default")]

    def test_an_alias_that_two_fields_claim_is_refused(self):
        both = record(ID, field("key", "long"))
        assert found(record(field("key", "long", aliases=["id"])), both) == [("Order.key", "avro.alias")]

    @pytest.mark.parametrize(("writer", "reader"), [("int", "double"), ("long", "float"), ("bytes", "string")])
    def test_a_type_may_be_promoted_and_not_demoted(self, writer, reader):
        assert found(record(field("x", reader)), record(field("x", writer))) == []
        if writer != "bytes":
            assert found(record(field("x", writer)), record(field("x", reader))) == [("Order.x", "avro.type")]

    def test_a_field_that_becomes_optional_is_compatible_and_the_other_way_is_not(self):
        optional = ["null", "string"]
        assert found(record(field("x", optional)), record(field("x", "string"))) == []
        assert found(record(field("x", "string")), record(field("x", optional))) == [("Order.x", "avro.type")]

    def test_a_branch_that_is_gone_is_named(self):
        before, after = ["null", "string", "long"], ["null", "long"]
        assert found(record(field("x", after)), record(field("x", before))) == [("Order.x", "avro.missing_branch")]

    def test_a_symbol_that_is_gone_needs_a_default(self):
        old = {"type": "enum", "name": "Size", "symbols": ["S", "M", "L"]}
        new = {"type": "enum", "name": "Size", "symbols": ["S", "M"]}
        assert found(new, old) == [("Size", "avro.missing_symbols")]
        assert found({**new, "default": "S"}, old) == []
        assert found(old, new) == []

    def test_the_size_of_a_fixed_type_stays(self):
        old, new = ({"type": "fixed", "name": "Hash", "size": size} for size in (16, 32))
        assert found(new, old) == [("Hash", "avro.fixed_size")]

    def test_a_record_may_not_be_renamed_without_an_alias(self):
        assert found(record(ID, name="Sale"), record(ID)) == [("Sale", "avro.name")]
        assert found(record(ID, name="Sale", aliases=["Order"]), record(ID)) == []
        assert found(record(ID, namespace="shop"), record(ID)) == []

    def test_paths_lead_into_lists_maps_and_records(self):
        def nested(kind):
            line = record(field("price", kind), name="Line")
            return record(field("lines", {"type": "array", "items": {"type": "map", "values": line}}))

        assert found(nested("int"), nested("long")) == [("Order.lines[]{}.price", "avro.type")]

    def test_a_record_that_holds_itself_is_compared_once(self):
        def tree(kind):
            return record(field("value", kind), field("next", ["null", "Node"]), name="Node")

        assert found(tree("long"), tree("int")) == []
        assert found(tree("int"), tree("long")) == [("Node.value", "avro.type")]

    def test_a_logical_type_that_gives_values_another_meaning_is_refused(self):
        def when(unit):
            return record(field("at", {"type": "long", "logicalType": f"timestamp-{unit}"}))

        def money(precision, scale):
            return record(
                field("x", {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale})
            )

        assert found(when("micros"), when("millis")) == [("Order.at", "avro.logical_type")]
        assert found(money(12, 2), money(10, 2)) == []
        assert found(money(10, 2), money(12, 2)) == [("Order.x", "avro.logical_type")]
        assert found(money(12, 3), money(12, 2)) == [("Order.x", "avro.logical_type")]

    def test_a_reference_is_followed(self):
        line = avro(record(field("price", "long"), name="Line"), subject="line", version=1)
        order = record(field("lines", {"type": "array", "items": "Line"}))
        narrow = avro(record(field("price", "int"), name="Line"), subject="line", version=2)
        before, after = avro(order, references=(("Line", line),)), avro(order, references=(("Line", narrow),))
        rules = incompatibilities(Compatibility.BACKWARD, [before], after)
        assert [(each.path, each.rule) for each in rules] == [("Order.lines[].price", "avro.type")]


class TestModes:
    V1, V2, V3 = (
        avro(record(ID)),
        avro(record(ID, field("note", "string", default=""))),
        avro(record(ID, field("note", "string"))),
    )

    def test_none_allows_everything_that_is_a_schema(self):
        assert incompatibilities(Compatibility.NONE, [self.V1], avro("string")) == []
        with pytest.raises(SchemaError, match="PEN-4031"):
            incompatibilities(Compatibility.NONE, [self.V1], avro("nonsense"))

    def test_only_transitive_modes_look_at_all_versions(self):
        assert incompatibilities(Compatibility.BACKWARD, [self.V1, self.V2], self.V3) == []
        assert incompatibilities(Compatibility.BACKWARD_TRANSITIVE, [self.V1, self.V2], self.V3)

    def test_forward_is_backward_the_other_way_round(self):
        assert incompatibilities(Compatibility.FORWARD, [self.V3], self.V1)
        assert incompatibilities(Compatibility.FORWARD, [self.V1], self.V3) == []

    def test_full_is_both(self):
        assert incompatibilities(Compatibility.FULL, [self.V1], self.V2) == []
        assert incompatibilities(Compatibility.FULL, [self.V1], self.V3)
        assert incompatibilities(Compatibility.FULL_TRANSITIVE, [self.V1, self.V2], self.V3)

    def test_another_type_of_schema_never_fits(self):
        (only,) = incompatibilities(Compatibility.BACKWARD, [self.V1], WireSchema("json_schema", "{}"))
        assert only.rule == "type"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '"nope"',
        "[[]]",
        '["null", "null"]',
        '{"type": "record", "name": "A"}',
        '{"type": "record", "fields": []}',
        '{"type": "record", "name": "A", "fields": [{"name": "x"}]}',
        '{"type": "record", "name": "A", "fields": [{"name": "x", "type": "int", "default": "no"}]}',
        '{"type": "record", "name": "A", "fields": [{"name": "x", "type": "int"}, {"name": "x", "type": "int"}]}',
        '{"type": "enum", "name": "E", "symbols": ["A", "A"]}',
        '{"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}',
        '{"type": "fixed", "name": "F"}',
        '{"type": "array"}',
        "[" * 5000,
        '{"type": "array", "items": ' * 400 + '"int"' + "}" * 400,
    ],
)
def test_a_text_that_is_no_schema_is_refused(text):
    with pytest.raises(SchemaError, match="PEN-4031"):
        parsed(WireSchema("avro", text))


# -- fastavro as the judge ---------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


@st.composite
def types(draw: Any, depth: int = 2, union: bool = True) -> Any:
    """A type whose named parts have few names, so that readers and writers meet. Names are made unique afterwards."""
    kinds = ["primitive", "primitive", "enum", "fixed"] + (["record", "array", "map"] if depth else [])
    kind = draw(st.sampled_from(kinds + (["union"] if union else [])))
    if kind == "primitive":
        return draw(st.sampled_from(PRIMITIVES))
    if kind == "enum":
        symbols = draw(st.lists(st.sampled_from(["X", "Y", "Z"]), min_size=1, unique=True))
        default = {"default": symbols[0]} if draw(st.booleans()) else {}
        return {"type": "enum", "name": "E", "symbols": symbols, **default}
    if kind == "fixed":
        return {"type": "fixed", "name": "F", "size": draw(st.integers(1, 2))}
    if kind == "array":
        return {"type": "array", "items": draw(types(depth - 1))}
    if kind == "map":
        return {"type": "map", "values": draw(types(depth - 1))}
    if kind == "union":
        branches = draw(st.lists(types(max(depth - 1, 0), union=False), min_size=1, max_size=3))
        labels = {each if isinstance(each, str) else each.get("name", each["type"]): each for each in branches}
        return list(labels.values())
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    return {"type": "record", "name": "R", "fields": [draw(fields(name, depth - 1)) for name in names]}


@st.composite
def fields(draw: Any, name: str, depth: int) -> Any:
    kind = draw(types(depth))
    made = {"name": name, "type": kind}
    if kind == "long" and draw(st.booleans()):
        made["default"] = 7
    if isinstance(kind, list) and kind[0] == "null" and draw(st.booleans()):
        made["default"] = None
    if draw(st.integers(0, 4)) == 0:
        made["aliases"] = [draw(st.sampled_from([each for each in NAMES if each != name]))]
    return made


def numbered(schema: Any, path: str = "") -> Any:
    """The schema with names that say where a type is: the same in reader and writer at the same place, and else unique."""
    if isinstance(schema, list):
        return [numbered(each, path) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if "name" in made:
        made["name"] += path
    if "fields" in made:
        made["fields"] = [{**each, "type": numbered(each["type"], f"{path}_{each['name']}")} for each in made["fields"]]
    for key in ("items", "values"):
        if key in made:
            made[key] = numbered(made[key], f"{path}_{key}")
    return made


PLAIN = {
    "null": b"",
    "boolean": b"\x01",
    "int": b"\x02",
    "long": b"\x04",
    "float": struct.pack("<f", 0.5),
    "double": struct.pack("<d", 0.25),
    "bytes": b"\x02x",
    "string": b"\x02y",
}


def examples(schema: Any) -> list[bytes]:
    """Encoded values of a type that between them use every branch, every symbol, and every part of it."""
    if isinstance(schema, list):
        return [bytes([2 * place]) + value for place, each in enumerate(schema) for value in examples(each)]
    if isinstance(schema, str):
        return [PLAIN[schema]]
    if schema["type"] == "enum":
        return [bytes([2 * place]) for place in range(len(schema["symbols"]))]
    if schema["type"] == "fixed":
        return [b"z" * schema["size"]]
    if schema["type"] == "array":
        return [b"\x02" + value + b"\x00" for value in examples(schema["items"])]
    if schema["type"] == "map":
        return [b"\x02\x02k" + value + b"\x00" for value in examples(schema["values"])]
    parts = [examples(each["type"]) for each in schema["fields"]]
    first = [each[0] for each in parts]
    rows = [[*first[:place], value, *first[place + 1 :]] for place, each in enumerate(parts) for value in each]
    return [b"".join(row) for row in rows] or [b""]


def reads(reader: Any, writer: Any, data: bytes) -> bool:
    try:
        fastavro.schemaless_reader(io.BytesIO(data), fastavro.parse_schema(writer), fastavro.parse_schema(reader))
    except (fastavro.read.SchemaResolutionError, ValueError, KeyError, EOFError):
        return False
    return True


@settings(max_examples=thorough.examples(600), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fastavro_reads_all_data_of_a_compatible_writer_and_not_all_of_another(data):
    writer = data.draw(types())
    reader = data.draw(st.one_of(types(), mutated(writer)))
    writer, reader = numbered(writer), numbered(reader)
    problems = incompatibilities(Compatibility.BACKWARD, [avro(writer)], avro(reader))
    outcomes = [reads(reader, writer, value) for value in examples(writer)]
    if all(each.rule == "avro.alias" for each in problems) and problems:
        return  # readers differ in what they make of two fields with one name
    assert all(outcomes) == (not problems), (problems, outcomes)


@st.composite
def mutated(draw: Any, schema: Any) -> Any:
    """The schema with one part of it changed."""
    if isinstance(schema, dict) and draw(st.booleans()):
        if schema["type"] == "record" and schema["fields"]:
            place = draw(st.integers(0, len(schema["fields"]) - 1))
            before = schema["fields"]
            if draw(st.booleans()):
                return {**schema, "fields": before[:place] + before[place + 1 :]}
            changed = {**before[place], "type": draw(mutated(before[place]["type"]))}
            changed.pop("default", None)
            return {**schema, "fields": [*before[:place], changed, *before[place + 1 :]]}
        for key in ("items", "values"):
            if key in schema:
                return {**schema, key: draw(mutated(schema[key]))}
    return draw(types(1))
