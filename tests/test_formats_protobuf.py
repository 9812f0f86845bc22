"""Protobuf against its own parser: random schemas, random messages, both ways, and payloads that are wrong."""

from __future__ import annotations

import base64
import itertools
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.formats import WireSchema, framing, varint
from penstock.formats.protobuf import Protobuf, ProtobufConfig, codec
from penstock.formats.protobuf.files import as_text, compiled, text_of_one_file

P = descriptor_pb2.FieldDescriptorProto
SLOW = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)

SHOP = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
import "lines.proto";
message Other { int32 x = 1; }
message Order {
  int64 id = 1;
  string name = 2;
  optional int32 maybe = 3;
  Colour colour = 4;
  enum Colour { RED = 0; BLUE = 1; }
  oneof payment { string card = 5; double cash = 6; }
  google.protobuf.Timestamp at = 7;
  google.protobuf.Duration took = 8;
  google.protobuf.StringValue note = 9;
  google.protobuf.Struct extra = 10;
  repeated Line lines = 11;
  map<string, Colour> shades = 12;
  uint32 small = 13;
  uint64 big = 14;
  repeated google.protobuf.Value any = 15;
  message Inner { bytes raw = 1; }
  Inner inner = 16;
}
"""
LINES = 'syntax = "proto3"; package shop; message Line { string sku = 1; int32 count = 2; }'
SCHEMA = WireSchema("protobuf", SHOP, references=(("lines.proto", WireSchema("protobuf", LINES)),))


def binary(payloads) -> pa.Array:
    return pa.array(payloads, pa.binary())


def classes(data: bytes, name: str):
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


@pytest.fixture(scope="module")
def order():
    return Protobuf(ProtobufConfig(message="shop.Order"), SCHEMA)


@pytest.fixture(scope="module")
def make():
    return classes(compiled(SCHEMA), "shop.Order")


def test_every_kind_of_field_becomes_a_column_of_its_own(order, make):
    full = make(id=1, name="é", maybe=0, colour=1, card="", small=2**32 - 1, big=2**64 - 1)
    full.at.FromJsonString("2024-01-02T03:04:05.000006Z")
    full.took.FromMilliseconds(1500)
    full.note.value = ""
    full.extra.update({"b": [1, None], "a": {"x": "é"}})
    full.lines.add(sku="s", count=2)
    full.shades["k"] = 1
    full.any.add(number_value=1.5)
    full.inner.raw = b"\xff"
    decoded = order.decode(binary([full.SerializeToString(), b"", None]))
    rows = decoded.rows.to_pylist()
    assert {k: str(v) for k, v in rows[0].items()} == {
        "id": "1", "name": "é", "maybe": "0", "colour": "BLUE", "card": "", "cash": "None",
        "at": "2024-01-02 03:04:05.000006+00:00", "took": "0:00:01.500000", "note": "",
        "extra": '{"a": {"x": "é"}, "b": [1.0, null]}', "lines": "[{'sku': 's', 'count': 2}]",
        "shades": "[('k', 'BLUE')]", "small": str(2**32 - 1), "big": str(2**64 - 1), "any": "['1.5']",
        "inner": "{'raw': b'\\xff'}",
    }  # fmt: skip
    unset = {k: v for k, v in rows[1].items() if v is not None}
    assert unset == {
        "id": 0, "name": "", "colour": "RED", "lines": [], "shades": [], "small": 0, "big": 0, "any": []
    }  # fmt: skip
    assert set(rows[2].values()) == {None}
    again = order.encode(decoded.rows.slice(0, 2))
    assert [make.FromString(each) for each in again.to_pylist()] == [full, make()]


def test_an_unknown_number_of_an_enum_is_its_digits_and_unknown_fields_are_passed_over(order):
    rows = order.decode(binary([b"\x20\x07", b"\xf8\x07\x01\x08\x05"])).rows
    assert rows.column("colour").to_pylist() == ["7", "RED"]
    assert rows.column("id").to_pylist() == [0, 5]
    with pytest.raises(DataError, match="colour"):
        order.encode(rows)


SCALARS = {
    P.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    P.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    P.TYPE_UINT32: st.integers(0, 2**32 - 1),
    P.TYPE_UINT64: st.integers(0, 2**64 - 1),
    P.TYPE_SINT64: st.integers(-(2**63), 2**63 - 1),
    P.TYPE_FIXED32: st.integers(0, 2**32 - 1),
    P.TYPE_SFIXED64: st.integers(-(2**63), 2**63 - 1),
    P.TYPE_BOOL: st.booleans(),
    P.TYPE_FLOAT: st.floats(width=32, allow_nan=False).map(lambda value: value + 0.0),  # -0.0 is written as 0.0
    P.TYPE_DOUBLE: st.floats(allow_nan=False).map(lambda value: value + 0.0),
    P.TYPE_STRING: st.text(max_size=6),
    P.TYPE_BYTES: st.binary(max_size=6),
}


@st.composite
def schemas(draw, syntax):
    file = descriptor_pb2.FileDescriptorProto(name="random.proto", package="r", syntax=syntax)
    enum = file.enum_type.add(name="E")
    for number in range(3):
        enum.value.add(name=f"E{number}", number=number)
    draw_message(draw, file.message_type.add(name="M"), 2, "r.M", syntax)
    return descriptor_pb2.FileDescriptorSet(file=[file])


def draw_message(draw, message, depth, name, syntax):
    for number in range(1, draw(st.integers(1, 4)) + 1):
        field = message.field.add(name=f"f{number}", number=number * draw(st.sampled_from([1, 20])) + number)
        shape = draw(st.sampled_from(["plain", "optional", "repeated", "oneof", "map"]))
        field.label = P.LABEL_REPEATED if shape in ("repeated", "map") else P.LABEL_OPTIONAL
        if shape == "map":
            entry = message.nested_type.add(name=f"F{number}Entry")
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, type=P.TYPE_STRING, label=P.LABEL_OPTIONAL)
            value = entry.field.add(name="value", number=2, label=P.LABEL_OPTIONAL)
            draw_type(draw, value, message, depth, name, number, syntax)
            field.type, field.type_name = P.TYPE_MESSAGE, f".{name}.F{number}Entry"
            continue
        draw_type(draw, field, message, depth, name, number, syntax)
        if shape == "oneof" or (shape == "optional" and syntax == "proto3"):
            group = "_shared" if shape == "oneof" and draw(st.booleans()) else f"_f{number}"
            field.proto3_optional = shape == "optional"
            declared = [each.name for each in message.oneof_decl]
            field.oneof_index = declared.index(group) if group in declared else len(declared)
            if group not in declared:
                message.oneof_decl.add(name=group)
    ends = [f for f in message.field if f.proto3_optional]
    for field in ends:  # synthetic oneofs come last
        decl = message.oneof_decl[field.oneof_index]
        assert decl.name == f"_{field.name}"
    order = sorted(
        range(len(message.oneof_decl)),
        key=lambda i: any(f.oneof_index == i and f.proto3_optional for f in message.field if f.HasField("oneof_index")),
    )
    names = [message.oneof_decl[i].name for i in order]
    for field in message.field:
        if field.HasField("oneof_index"):
            field.oneof_index = order.index(field.oneof_index)
    for decl, new in zip(message.oneof_decl, names, strict=True):
        decl.name = new


def draw_type(draw, field, message, depth, name, number, syntax):
    kind = draw(st.sampled_from([*SCALARS, P.TYPE_ENUM, *([P.TYPE_MESSAGE] * 3 if depth else [])]))
    field.type = kind
    if kind == P.TYPE_ENUM:
        field.type_name = ".r.E"
    if kind == P.TYPE_MESSAGE:
        inner = message.nested_type.add(name=f"N{number}")
        draw_message(draw, inner, depth - 1, f"{name}.N{number}", syntax)
        field.type_name = f".{name}.N{number}"


def fill(draw, message):
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            for key in draw(st.lists(st.text(max_size=2), max_size=2, unique=True)):
                if value.message_type is not None:
                    fill(draw, getattr(message, field.name)[key])
                else:
                    getattr(message, field.name)[key] = draw(scalar(value))
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                if field.message_type is not None:
                    fill(draw, getattr(message, field.name).add())
                else:
                    getattr(message, field.name).append(draw(scalar(field)))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(draw, getattr(message, field.name))
        else:
            setattr(message, field.name, draw(scalar(field)))


def scalar(field):
    return st.integers(0, 2) if field.enum_type is not None else SCALARS[field.type]


def row_of(message):
    """The message as pyarrow takes it for its columns."""
    row = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            row[field.name] = sorted((key, value_of(value[key], inner)) for key in value)
        elif field.is_repeated:
            row[field.name] = [value_of(each, field) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            row[field.name] = None
        else:
            row[field.name] = value_of(value, field)
    return row


def value_of(value, field):
    if field.message_type is not None:
        return row_of(value)
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value


def in_order(value):
    """Maps have no order."""
    if isinstance(value, dict):
        return {key: in_order(each) for key, each in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return sorted((key, repr(in_order(each))) for key, each in value)
    return [in_order(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
@SLOW
@given(data=st.data())
def test_random_messages_are_read_and_written_again(syntax, data):
    files = data.draw(schemas(syntax))
    encoded = files.SerializeToString()
    cls = classes(encoded, "r.M")
    messages = [cls() for _ in range(data.draw(st.integers(0, 4)))]
    for message in messages:
        fill(data.draw, message)
    protobuf = Protobuf(ProtobufConfig(), WireSchema("protobuf", base64.b64encode(encoded).decode()))
    decoded = protobuf.decode(binary([each.SerializeToString() for each in messages]))
    decoded.rows.validate(full=True)
    assert decoded.rows.schema == protobuf.columns()
    assert len(decoded.failures) == 0
    wanted = pa.array([row_of(each) for each in messages], pa.struct(list(protobuf.columns()))).to_pylist()
    assert in_order(decoded.rows.to_pylist()) == in_order(wanted)
    assert [cls.FromString(each) for each in protobuf.encode(decoded.rows).to_pylist()] == messages


@pytest.mark.parametrize("syntax", ["proto2", "proto3"])
@SLOW
@given(data=st.data())
def test_fields_that_occur_again_are_read_as_the_official_parser_reads_them(syntax, data):
    files = data.draw(schemas(syntax))
    encoded = files.SerializeToString()
    cls = classes(encoded, "r.M")
    payloads = []
    for _ in range(data.draw(st.integers(1, 3))):
        parts = [cls() for _ in range(data.draw(st.integers(2, 3)))]
        for part in parts:
            fill(data.draw, part)
        payloads.append(b"".join(each.SerializeToString() for each in parts))
    protobuf = Protobuf(ProtobufConfig(), WireSchema("protobuf", base64.b64encode(encoded).decode()))
    decoded = protobuf.decode(binary(payloads))
    decoded.rows.validate(full=True)
    assert len(decoded.failures) == 0
    wanted = [row_of(cls.FromString(each)) for each in payloads]
    rows = pa.array(wanted, pa.struct(list(protobuf.columns()))).to_pylist()
    assert in_order(decoded.rows.to_pylist()) == in_order(rows)


ONEOFS = """
syntax = "proto3";
message In { int32 a = 1; int32 b = 2; oneof way { int32 p = 3; string q = 4; } }
message M { oneof k { int32 n = 2; string s = 3; In m = 4; } In deep = 5; repeated In many = 6; map<string, In> by = 7; }
"""


def test_the_last_of_several_fields_of_a_oneof_counts_as_for_the_official_parser():
    schema = WireSchema("protobuf", ONEOFS)
    m = classes(compiled(schema), "M")
    parts = [m(n=1), m(s="x"), m(m={"a": 7}), m(m={"b": 7}), m(deep={"p": 1}), m(deep={"q": "y"})]
    entries = [m(by={"k": {"p": 1}}), m(by={"k": {"a": 2}}), m(by={"l": {}})]
    both = {"p": 1}, {"q": "z"}
    inner = [m(many=[each]).SerializeToString()[2:] for each in both]
    nested = bytes([0x32, sum(map(len, inner))]) + b"".join(inner)
    orders = [*itertools.permutations(parts, 3), *itertools.permutations(entries)]
    payloads = [nested, *(b"".join(part.SerializeToString() for part in some) for some in orders)]
    decoded = Protobuf(ProtobufConfig(message="M"), schema).decode(binary(payloads))
    assert in_order(decoded.rows.to_pylist()) == in_order([row_of(m.FromString(each)) for each in payloads])
    assert decoded.rows.slice(0, 1).to_pylist()[0]["many"] == [{"a": 0, "b": 0, "p": None, "q": "z"}]
    assert not any(None not in (row["n"], row["s"]) for row in decoded.rows.to_pylist())


def test_an_odd_payload_leaves_the_maps_of_others_as_they_came():
    schema = WireSchema("protobuf", ONEOFS)
    m = classes(compiled(schema), "M")
    order = b"".join(m(by={key: {"a": 1}}).SerializeToString() for key in "ba")
    without_value = m(by={"k": {}}).SerializeToString()[:2] + b"\x01k"
    without_value = bytes([without_value[0], 3]) + b"\x0a" + without_value[2:]
    made = Protobuf(ProtobufConfig(message="M"), schema)
    alone = made.decode(binary([order])).rows.to_pylist()[0]
    assert [key for key, _ in alone["by"]] == ["b", "a"]
    for odd in (without_value, b"\x1a\x01\xff", b"\x15\x01\x00\x00\x00"):
        assert made.decode(binary([order, odd, order])).rows.to_pylist()[0] == alone
    found = made.decode(binary([without_value, order])).rows.to_pylist()[0]["by"]
    assert found == [("k", {"a": 0, "b": 0, "p": None, "q": None})]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"n": 1, "s": "x"}, "several fields of the oneof k"),
        ({"many": [{"p": 1}, {"p": 1, "q": "x"}]}, "several fields of the oneof many.way"),
        ({"by": [("k", {"a": 1}), ("l", {}), ("k", {"a": 2})]}, "a key twice in the map by"),
    ],
)
def test_rows_that_fill_what_a_message_holds_once_are_refused(row, said):
    made = Protobuf(ProtobufConfig(message="M"), WireSchema("protobuf", ONEOFS))
    rows = pa.array([{}, {"many": [{"q": "x"}]}, row], pa.struct(list(made.columns())))
    good = made.encode(pa.RecordBatch.from_struct_array(rows.slice(0, 2)))
    assert len(made.decode(good).rows) == 2
    with pytest.raises(DataError, match=said):
        made.encode(pa.RecordBatch.from_struct_array(rows.slice(1)))


@SLOW
@given(st.data())
def test_random_and_damaged_bytes_fall_out_alone(order, make, data):
    payloads = data.draw(st.lists(st.binary(max_size=12), max_size=6))
    for _ in range(data.draw(st.integers(0, 4))):
        message = make(id=5, name="abc", card="x")
        message.inner.raw = b"12"
        message.lines.add(sku="y")
        damaged = bytearray(message.SerializeToString())
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
        payloads.append(bytes(damaged[: data.draw(st.integers(place, len(damaged)))]))
    decoded = order.decode(binary(payloads))
    decoded.rows.validate(full=True)
    assert sorted([*decoded.positions, *decoded.failures.positions]) == list(range(len(payloads)))
    together = dict(
        zip(
            decoded.positions.tolist(), (repr(each) for each in decoded.rows.to_struct_array().to_pylist()), strict=True
        )
    )
    for place, payload in enumerate(payloads):
        alone = order.decode(binary([payload]))
        assert len(alone.failures) == (place not in together)
        if place in together:
            assert repr(alone.rows.to_struct_array().to_pylist()[0]) == together[place]


BAD = [
    (b"\x12\x05a", "protobuf.wire"),
    (b"\xff", "protobuf.wire"),
    (b"\x13", "protobuf.wire"),
    (b"\x00\x01", "protobuf.wire"),
    (b"\x08" + b"\xff" * 11, "protobuf.wire"),
    (b"\x12\x02\xff\xff", "protobuf.content"),
    (b"\x5a\x02\x0a\x09", "protobuf.content"),
]


@pytest.mark.parametrize(("payload", "rule"), BAD)
def test_a_wrong_payload_falls_out_with_its_rule(order, payload, rule):
    decoded = order.decode(binary([b"\x08\x01", payload, None, payload, b"\x08\x02"]))
    assert decoded.rows.column("id").to_pylist() == [1, None, 2]
    assert decoded.failures.positions.tolist() == [1, 3]
    assert decoded.failures.rules == (rule, rule)


TIMES = """
syntax = "proto3"; import "google/protobuf/timestamp.proto"; import "google/protobuf/duration.proto";
message Times {
  int64 id = 1; google.protobuf.Timestamp at = 2; google.protobuf.Duration took = 3;
  repeated google.protobuf.Timestamp all = 4; map<string, google.protobuf.Duration> each = 5;
}
"""


@pytest.fixture(scope="module")
def times():
    return Protobuf(ProtobufConfig(), WireSchema("protobuf", TIMES))


def within(field: int, body: bytes) -> bytes:
    return bytes([field << 3 | 2, len(body)]) + body


def seconds_of(seconds: int) -> bytes:
    return b"\x08" + varint.write(np.array([seconds])).to_pylist()[0]


@pytest.mark.parametrize("seconds", [253_402_300_800, -62_135_596_801, 10**13, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("field", [2, 4])
def test_a_moment_that_no_calendar_has_falls_out_alone(times, seconds, field):
    last = within(2, seconds_of(253_402_300_799))
    decoded = times.decode(binary([b"\x08\x01" + last, within(field, seconds_of(seconds)), b"\x08\x02"]))
    assert decoded.rows.column("id").to_pylist() == [1, 2]
    assert decoded.rows.column("at")[0].as_py().year == 9999
    assert decoded.failures.rules == ("protobuf.range",)


@pytest.mark.parametrize("seconds", [315_576_000_001, -315_576_000_001, 2**63 - 1])
@pytest.mark.parametrize("is_in_map", [False, True])
def test_a_duration_beyond_ten_thousand_years_falls_out_alone(times, seconds, is_in_map):
    value = seconds_of(seconds)
    bad = within(5, within(1, b"k") + within(2, value)) if is_in_map else within(3, value)
    decoded = times.decode(binary([b"\x08\x01", bad, b"\x08\x02"]))
    assert decoded.rows.column("id").to_pylist() == [1, 2]
    assert decoded.failures.rules == ("protobuf.range",)


def test_a_group_that_the_end_of_another_closes_falls_out_alone(order):
    begin, end, other = b"\xa3\x06", b"\xa4\x06", b"\xac\x06"  # of the fields 100, 100 and 101
    within = b"\x82\x01\x04" + begin + other
    payloads = [
        begin + end,
        begin + other,
        b"\x08\x07",
        begin + b"\xab\x06" + end + other,
        within,
        begin + begin + end + end,
    ]
    found = order.decode(binary(payloads))
    assert found.rows["id"].to_pylist() == [0, 7, 0]
    assert found.failures.positions.tolist() == [1, 3, 4]
    assert set(found.failures.rules) == {"protobuf.wire"}


OLD = """
syntax = "proto2";
package old;
enum Colour { RED = 1; }
message Part {
  required int32 id = 1;
  optional group Size = 2 { optional int32 wide = 1; repeated group Hole = 2 { optional sint32 x = 1; } }
}
message Thing {
  optional group One = 1 { optional string name = 1; optional Part part = 2; }
  repeated group Many = 2 { optional Part part = 1; }
  oneof kind { int32 number = 3; group Own = 4 { optional bytes raw = 1; } }
  repeated Part parts = 5;
  map<string, Part> named = 6;
  optional Colour colour = 7;
}
"""


def test_groups_are_read_and_written_as_the_official_parser_has_them():
    protobuf = Protobuf(ProtobufConfig(message="old.Thing"), WireSchema("protobuf", OLD))
    thing = classes(compiled(WireSchema("protobuf", OLD)), "old.Thing")()
    thing.one.name = "a"
    thing.one.part.id = 1
    thing.one.part.size.wide = 2
    thing.one.part.size.hole.add(x=-3)
    thing.one.part.size.hole.add()
    thing.many.add().part.id = 4
    thing.many.add()
    thing.own.raw = b"\x14"
    thing.parts.add(id=5).size.wide = 6
    thing.named["k"].size.hole.add(x=7)
    body = thing.SerializePartialToString(deterministic=True)
    unknown = b"\xa3\x06" + body + b"\xa4\x06"  # all of it again, in a group that the message lacks
    bad_inside = b"\x0b\x0a\x01\xff\x0c"
    decoded = protobuf.decode(binary([body, unknown, bad_inside, body + body[: -len(body) // 2], body + unknown]))
    assert decoded.positions.tolist() == [0, 1, 4]
    assert set(decoded.failures.rules) <= {"protobuf.wire", "protobuf.content"}
    first, second, third = decoded.rows.to_pylist()
    assert first["one"] == {
        "name": "a",
        "part": {"id": 1, "size": {"wide": 2, "hole": [{"x": -3}, {"x": None}]}},
    }
    assert first["many"] == [{"part": {"id": 4, "size": None}}, {"part": None}]
    assert (first["number"], first["own"]) == (None, {"raw": b"\x14"})
    assert first["parts"] == [{"id": 5, "size": {"wide": 6, "hole": []}}]
    assert first["named"] == [("k", {"id": None, "size": {"wide": None, "hole": [{"x": 7}]}})]
    assert second["one"] is None
    assert second["many"] == []
    assert third == first
    again = type(thing).FromString(protobuf.encode(decoded.rows)[0].as_py())
    assert again == thing


def test_a_number_without_a_name_stays_when_a_payload_is_merged():
    protobuf = Protobuf(ProtobufConfig(message="old.Thing"), WireSchema("protobuf", OLD))
    twice = b"\x18\x01\x23\x0a\x01a\x24" + b"\x38\x09"
    assert protobuf.decode(binary([twice, b"\x38\x09"])).rows["colour"].to_pylist() == ["9", "9"]


def test_an_entry_of_a_map_may_lack_its_key_and_its_value(make):
    text = 'syntax = "proto3"; message M { map<int32, In> m = 1; message In { int32 a = 1; } int32 n = 2; }'
    protobuf = Protobuf(ProtobufConfig(message="M"), WireSchema("protobuf", text))
    decoded = protobuf.decode(binary([b"\x0a\x02\x08\x01", b"\x10\x01", b"\x0a\x00", b"\x0a\xff"]))
    assert decoded.rows["m"].to_pylist() == [[(1, {"a": 0})], [], [(0, {"a": 0})]]
    assert decoded.rows["n"].to_pylist() == [0, 1, 0]
    assert decoded.failures.positions.tolist() == [3]


def test_a_field_with_a_number_that_no_field_has_is_no_message(order):
    found = order.decode(binary([b"\x92\xd7\x99\xd3\x12\x01x", b"\xfa\xff\xff\xff\x0f\x01x"]))
    assert (found.failures.positions.tolist(), found.failures.rules) == ([0], ("protobuf.wire",))


def test_a_file_of_an_edition_is_refused_with_what_to_write():
    schema = WireSchema("protobuf", 'edition = "2023"; message M { int32 x = 1; }')
    with pytest.raises(SchemaError, match="of an edition"):
        Protobuf(ProtobufConfig(), schema)


def test_text_that_is_no_utf8_falls_out_of_proto2_as_well():
    schema = WireSchema("protobuf", 'syntax = "proto2"; message M { optional string s = 1; }')
    decoded = Protobuf(ProtobufConfig(), schema).decode(binary([b"\x0a\x01a", b"\x0a\x01\xff", b""]))
    assert decoded.rows.column("s").to_pylist() == ["a", None]
    assert decoded.failures.rules == ("protobuf.content",)


def test_a_parser_that_does_not_say_how_far_it_came_is_not_believed(order, monkeypatch):
    real = codec._suspects
    monkeypatch.setattr(codec, "_suspects", lambda shell, bodies: list(range(len(bodies))))
    payloads = binary([b"\x08\x01", b"\xff", b"\x12\x02\xff\xff", b"\x08\x02"])
    decoded = order.decode(payloads)
    assert (decoded.positions.tolist(), decoded.failures.rules) == ([0, 3], ("protobuf.wire", "protobuf.content"))
    monkeypatch.setattr(codec, "_suspects", lambda shell, bodies: [])
    assert order.decode(payloads).positions.tolist() == [0, 3]
    monkeypatch.setattr(codec, "_suspects", real)


def test_the_frame_names_the_message_and_other_messages_fall_out(make):
    other = WireSchema("protobuf", 'syntax = "proto3"; package shop; message Order { int64 id = 1; string name = 2; }')
    known = {7: other, 9: WireSchema("protobuf", "message {")}

    def resolve(id):
        if id == 10:
            raise framing.WrongSubject("the schema 10 is of another subject")
        if id not in known:
            raise DataError(f"the registry has no schema {id}", code="PEN-3001")
        return known[id]

    schema = WireSchema("protobuf", SHOP, id=3, references=SCHEMA.references)
    protobuf = Protobuf(ProtobufConfig(message="shop.Order", framing="confluent"), schema, resolve)
    own = protobuf.encode(pa.record_batch({"id": [1]}))
    assert own.to_pylist() == [b"\0\0\0\0\x03\x02\x02\x08\x01"]
    body = binary([b"\x08\x02"])
    payloads = [
        own[0].as_py(),
        framing.add_indexes(body, 7, (0,))[0].as_py(),  # there it is the first message
        framing.add_indexes(body, 3, (0,))[0].as_py(),  # here that is shop.Other
        framing.add_indexes(body, 8, (0,))[0].as_py(),
        framing.add_indexes(body, 9, (0,))[0].as_py(),
        framing.add_indexes(body, 3, (1, 0))[0].as_py(),
        b"\0\0\0\0\x03",
        None,
        b"\x08\x02",
        framing.add_indexes(body, 10, (0,))[0].as_py(),
    ]
    decoded = protobuf.decode(binary(payloads))
    assert decoded.rows.column("id").to_pylist() == [1, 2, None]
    assert decoded.positions.tolist() == [0, 1, 7]
    assert decoded.failures.rules == (
        "protobuf.message", "framing.unknown_id", "protobuf.incompatible", "protobuf.message", "framing.missing",
        "framing.missing", "framing.subject",
    )  # fmt: skip


def test_a_message_that_contains_itself_holds_its_bytes_there():
    schema = WireSchema("protobuf", 'syntax = "proto3"; message N { int32 x = 1; N next = 2; }')
    protobuf = Protobuf(ProtobufConfig(), schema)
    payload = b"\x08\x01\x12\x02\x08\x02"
    rows = protobuf.decode(binary([payload])).rows
    assert rows.to_pylist() == [{"x": 1, "next": b"\x08\x02"}]
    with pytest.raises(SchemaError, match="next"):
        protobuf.encode(rows)
    assert protobuf.encode(rows.select(["x"])).to_pylist() == [b"\x08\x01"]


def test_the_bytes_of_a_message_within_itself_keep_their_groups():
    schema = WireSchema(
        "protobuf",
        'syntax = "proto2"; message M { optional group G = 1 { optional int32 x = 1; } optional M next = 2; }',
    )
    m = classes(compiled(schema), "M")
    payload = m(g={"x": 1}, next={"g": {"x": 2}}).SerializeToString()
    row = Protobuf(ProtobufConfig(), schema).decode(binary([payload])).rows.to_pylist()[0]
    assert row == {"g": {"x": 1}, "next": m(g={"x": 2}).SerializeToString()}


def test_deep_payloads_neither_crash_nor_hang():
    schema = WireSchema("protobuf", 'syntax = "proto3"; message N { N next = 2; repeated N many = 3; }')
    deep = b""
    for _ in range(5000):
        deep = b"\x12" + length(len(deep)) + deep
    decoded = Protobuf(ProtobufConfig(), schema).decode(binary([deep, b"\x13" * 50_000, b""]))
    assert len(decoded.positions) + len(decoded.failures) == 3
    assert 2 in decoded.positions


def length(number):
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


GROWING = 'syntax = "proto3"; message M30 { int32 a = 1; }' + "".join(
    f"message M{n} {{ M{n + 1} a = 1; M{n + 1} b = 2; }}" for n in range(30)
)


@pytest.mark.parametrize(
    ("schema", "message", "said"),
    [
        ("message {", "", "cannot be compiled"),
        ('syntax = "proto3"; import "gone.proto"; message M {}', "", "gone.proto"),
        ('syntax = "proto3"; message M {}', "N", "no message N"),
        ('syntax = "proto3";', "", "no message"),
        ("AAAA", "", "descriptor set"),
        (GROWING, "M0", "more than 20,000 fields"),
    ],
    ids=lambda each: each[:20],
)
def test_a_schema_that_cannot_be_used_is_refused_with_its_reason(schema, message, said):
    with pytest.raises(SchemaError, match=said):
        Protobuf(ProtobufConfig(message=message), WireSchema("protobuf", schema))


def alone(data: bytes) -> str:
    """A descriptor as Confluent's clients for Python and Go register it: one file, in base64, without what it imports."""
    file = descriptor_pb2.FileDescriptorSet.FromString(data).file[-1]
    return base64.b64encode(file.SerializeToString()).decode()


@pytest.mark.parametrize("is_text", [False, True])
def test_the_descriptor_of_one_file_is_a_schema_with_its_references(order, make, is_text):
    lines = WireSchema("protobuf", LINES if is_text else alone(compiled(WireSchema("protobuf", LINES))))
    given = WireSchema("protobuf", alone(compiled(SCHEMA)), references=(("lines.proto", lines),))
    payloads = binary([make(id=7, lines=[{"sku": "a", "count": 2}]).SerializeToString()])
    read = Protobuf(ProtobufConfig(message="shop.Order"), given)
    assert read.columns() == order.columns()
    assert read.decode(payloads).rows == order.decode(payloads).rows


def test_a_set_of_several_files_is_not_a_text_for_a_registry_of_files():
    with pytest.raises(SchemaError, match="more than one file"):
        text_of_one_file(WireSchema("protobuf", as_text(compiled(SCHEMA))))


def test_an_import_cannot_leave_its_directory():
    schema = WireSchema("protobuf", 'syntax = "proto3"; message M {}', references=(("../x.proto", SCHEMA),))
    with pytest.raises(SchemaError, match="relative"):
        Protobuf(ProtobufConfig(), schema)


@pytest.mark.parametrize(
    ("column", "error", "said"),
    [
        ({"gone": [1]}, SchemaError, "gone"),
        ({"id": ["x"]}, SchemaError, "id"),
        ({"small": [-1]}, DataError, "small"),
        ({"extra": ["{"]}, DataError, "extra"),
        ({"colour": ["PINK"]}, DataError, "colour"),
        ({"card": ["x"], "cash": [1.0]}, DataError, "payment"),
        ({"lines": [[{"sku": "a", "price": 1}]]}, SchemaError, "lines.price"),
    ],
)
def test_rows_that_the_message_cannot_hold_are_refused(order, column, error, said):
    with pytest.raises(error, match=said):
        order.encode(pa.record_batch(column))


def test_structs_are_json_both_ways(order, make):
    rows = pa.record_batch({"extra": ['{"a": [1, {"b": null}]}', None, "{}"], "any": [["1", '"x"'], None, []]})
    messages = [make.FromString(each) for each in order.encode(rows).to_pylist()]
    assert json_format.MessageToDict(messages[0]) == {"extra": {"a": [1.0, {"b": None}]}, "any": [1.0, "x"]}
    assert not messages[1].HasField("extra")
    assert messages[2].HasField("extra")
    again = order.decode(order.encode(rows)).rows
    assert [each and json.loads(each) for each in again.column("extra").to_pylist()] == [
        {"a": [1, {"b": None}]},
        None,
        {},
    ]


def test_free_form_values_that_are_no_json_fall_out_alone(order):
    nan = b"\x52\x10\x0a\x0e\x0a\x01a\x12\x09\x11" + b"\0\0\0\0\0\0\xf8\x7f"
    decoded = order.decode(binary([b"\x08\x01", b"\x52\x01\xff", b"\x52\x00", nan]))
    assert decoded.positions.tolist() == [0, 2]
    assert decoded.rows.column("extra").to_pylist() == [None, "{}"]
    assert decoded.failures.rules == ("protobuf.content",) * 2


def test_a_message_without_fields_still_has_rows():
    nothing = Protobuf(ProtobufConfig(), WireSchema("protobuf", 'syntax = "proto3"; message M {}'))
    decoded = nothing.decode(binary([b"", None, b"\x08\x01", b"\xff"]))
    assert (decoded.rows.num_rows, decoded.positions.tolist()) == (3, [0, 1, 2])
    assert nothing.encode(decoded.rows).to_pylist() == [b""] * 3


def test_a_format_travels_to_tasks_compiled(order):
    protobuf = pickle.loads(pickle.dumps(order))
    assert protobuf.schema.references == ()
    assert protobuf.decode(binary([b"\x08\x01"])).rows.column("id").to_pylist() == [1]


def test_a_schema_is_needed_and_a_registry_for_frames(order):
    with pytest.raises(ConfigError, match="schema"):
        Protobuf(ProtobufConfig())
    framed = Protobuf(ProtobufConfig(message="shop.Order", framing="confluent"), SCHEMA)
    with pytest.raises(ConfigError, match="registry"):
        framed.encode(pa.record_batch({"id": [1]}))


def test_slices_and_large_arrays_are_read_like_any_other(order):
    payloads = pa.array([None, b"\x08\x01", b"\x08\x02", None], pa.large_binary())
    assert order.decode(payloads.slice(1)).rows.column("id").to_pylist() == [1, 2, None]
    assert order.decode(payloads.slice(0, 0)).rows.num_rows == 0
