from __future__ import annotations

import pytest

from penstock.errors import SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, incompatibilities, parsed

pytest.importorskip("penstock.formats.protobuf.files")


def proto(*lines: str, syntax: str = "proto3", message: str = "Order", before: str = "") -> WireSchema:
    body = "\n".join(f"  {line}" for line in lines)
    return WireSchema("protobuf", f'syntax = "{syntax}";\n{before}\nmessage {message} {{\n{body}\n}}\n')


def found(reader: WireSchema, writer: WireSchema, mode: str = "backward") -> list[tuple[str, str]]:
    rules = incompatibilities(Compatibility(mode), [writer], reader)
    return [(each.path, each.rule.removeprefix("protobuf.")) for each in rules]


A = "int64 a = 1;"


class TestFields:
    def test_a_field_may_be_added_and_removed(self):
        assert found(proto(A, "string b = 2;"), proto(A), "full") == []

    def test_a_field_may_be_renamed(self):
        assert found(proto("int64 b = 1;"), proto(A)) == []

    def test_a_field_keeps_its_number(self):
        assert found(proto("int64 a = 2;"), proto(A)) == [("Order.a", "number")]

    @pytest.mark.parametrize(
        ("old", "new"),
        [("int32", "uint64"), ("bool", "int64"), ("sint32", "sint64"), ("fixed32", "sfixed32"), ("string", "bytes")],
    )
    def test_types_that_are_written_alike_may_change_into_each_other(self, old, new):
        assert found(proto(f"{new} a = 1;"), proto(f"{old} a = 1;"), "full") == []

    @pytest.mark.parametrize(
        ("old", "new"), [("int32", "sint32"), ("int32", "string"), ("fixed32", "fixed64"), ("float", "double")]
    )
    def test_other_types_may_not(self, old, new):
        assert found(proto(f"{new} a = 1;"), proto(f"{old} a = 1;")) == [("Order.a", "type")]

    def test_an_enum_is_written_as_a_number(self):
        kind = "enum Size { SMALL = 0; LARGE = 1; }"
        assert found(proto(kind, "int32 a = 1;"), proto(kind, "Size a = 1;"), "full") == []

    def test_another_message_is_another_type(self):
        before = "message X { int64 a = 1; }\nmessage Y { int64 a = 1; }"
        assert found(proto("Y a = 1;", before=before), proto("X a = 1;", before=before)) == [("Order.a", "named_type")]

    def test_a_list_stays_a_list(self):
        one, many = proto("int64 a = 1;"), proto("repeated int64 a = 1;")
        assert found(many, one) == found(one, many) == [("Order.a", "label")]

    def test_a_text_may_become_a_list_and_not_the_other_way(self):
        one, many = proto("string a = 1;"), proto("repeated string a = 1;")
        assert found(many, one) == []
        assert found(one, many) == [("Order.a", "label")]

    def test_the_values_of_a_map_are_compared(self):
        def maps(kind):
            return proto(f"map<string, {kind}> a = 1;")

        assert found(maps("int64"), maps("int32")) == []
        assert found(maps("string"), maps("int32")) == [("Order.AEntry.value", "type")]

    def test_a_required_field_may_not_come_or_go(self):
        with_it = proto("required int64 a = 1;", syntax="proto2")
        without, optional = (proto(*line, syntax="proto2") for line in ((), ("optional int64 a = 1;",)))
        assert found(with_it, without) == found(with_it, optional) == [("Order.a", "required")]
        assert found(without, with_it) == []
        assert found(without, with_it, "forward") == [("Order.a", "required")]


class TestReserved:
    @pytest.mark.parametrize(
        ("reserved", "field"), [("reserved 2 to 4;", "int64 b = 3;"), ('reserved "b";', "int64 b = 5;")]
    )
    def test_what_was_reserved_stays_unused(self, reserved, field):
        assert found(proto(A, field), proto(A, reserved)) == [("Order.b", "reserved")]

    def test_a_field_may_be_removed_and_reserved(self):
        assert found(proto(A, "reserved 2;"), proto(A, "string b = 2;"), "full") == []


class TestOneOf:
    def test_one_field_may_move_into_a_new_oneof(self):
        assert found(proto("oneof x { int64 a = 1; string c = 3; }"), proto(A)) == []

    def test_two_fields_may_not(self):
        both = proto("oneof x { int64 a = 1; string b = 2; }")
        assert found(both, proto(A, "string b = 2;")) == [("Order.x", "oneof_moved")]

    def test_a_field_may_not_move_into_a_oneof_that_has_one(self):
        before = proto(A, "oneof x { string b = 2; }")
        assert found(proto("oneof x { int64 a = 1; string b = 2; }"), before) == [("Order.x", "oneof_moved")]

    def test_a_oneof_may_be_dissolved(self):
        assert found(proto(A, "string b = 2;"), proto("oneof x { int64 a = 1; string b = 2; }")) == []

    def test_a_field_may_not_leave_the_schema_while_its_oneof_stays(self):
        before = proto("oneof x { int64 a = 1; string b = 2; }")
        assert found(proto("oneof x { int64 a = 1; }"), before) == [("Order.b", "oneof_field_removed")]

    def test_an_optional_field_is_in_no_oneof(self):
        assert found(proto("optional int64 a = 1;", "optional string b = 2;"), proto(A, "string b = 2;"), "full") == []


class TestMessages:
    def test_a_message_may_be_added_and_not_removed(self):
        other = "message Other { int64 x = 1; }"
        assert found(proto(A, before=other), proto(A)) == []
        assert found(proto(A), proto(A, before=other)) == [("Other", "message_removed")]

    def test_nested_messages_are_compared(self):
        def nested(kind):
            return proto(f"message Line {{ {kind} price = 1; }}", "repeated Line lines = 1;")

        assert found(nested("string"), nested("int64")) == [("Order.Line.price", "type")]

    def test_the_package_may_change(self):
        inner = "message Line { int64 x = 1; }"
        one, two = (proto("Line a = 1;", before=f"package {name};\n{inner}") for name in ("shop", "store.v2"))
        assert found(two, one) == []

    def test_what_is_imported_is_compared(self):
        def order(kind):
            line = WireSchema("protobuf", f'syntax = "proto3";\nmessage Line {{ {kind} x = 1; }}\n', "line", 1)
            text = 'syntax = "proto3";\nimport "line.proto";\nmessage Order { Line a = 1; }\n'
            return WireSchema("protobuf", text, references=(("line.proto", line),))

        assert found(order("string"), order("int64")) == [("Line.x", "type")]


@pytest.mark.parametrize("text", ["nonsense", 'syntax = "proto3"; message A { Missing x = 1; }', "message A {"])
def test_a_text_that_is_no_schema_is_refused(text):
    with pytest.raises(SchemaError, match="PEN-4031"):
        parsed(WireSchema("protobuf", text))
