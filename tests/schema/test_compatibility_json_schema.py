"""What is called compatible must not be refuted by any instance; jsonschema-rs is the judge."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from penstock.errors import SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, incompatibilities, parsed


def schema(value: Any, **more: Any) -> WireSchema:
    return WireSchema("json_schema", json.dumps(value), **more)


def found(reader: Any, writer: Any) -> list[tuple[str, str]]:
    rules = incompatibilities(Compatibility.BACKWARD, [schema(writer)], schema(reader))
    return [(each.path, each.rule.removeprefix("json_schema.")) for each in rules]


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


class TestRules:
    def test_a_new_optional_property_of_a_closed_object_is_compatible(self):
        assert found(closed(a=WHOLE, b=TEXT), closed(a=WHOLE)) == []

    def test_a_new_required_property_is_named(self):
        assert found(closed(("b",), a=WHOLE, b=TEXT), closed(a=WHOLE)) == [("b", "required")]

    def test_a_new_property_of_an_open_object_may_have_been_anything(self):
        def opened(**properties):
            return {"type": "object", "properties": properties}

        assert found(opened(a=WHOLE, b=TEXT), opened(a=WHOLE)) == [("b", "property_added_to_open")]
        assert found(opened(a=WHOLE), opened(a=WHOLE, b=TEXT)) == []
        assert found(opened(a=WHOLE, b={}), opened(a=WHOLE)) == []

    def test_a_property_that_a_closed_object_drops_is_named(self):
        assert found(closed(a=WHOLE), closed(a=WHOLE, b=TEXT)) == [("b", "property_removed_from_closed")]

    def test_a_closed_object_may_open_and_an_open_one_may_not_close(self):
        opened = {"type": "object", "properties": {"a": WHOLE}}
        assert found(opened, closed(a=WHOLE)) == []
        assert found(closed(a=WHOLE), opened) == [("", "additional_properties")]

    def test_a_type_may_widen(self):
        assert found(NUMBER, WHOLE) == []
        assert found({"type": ["string", "null"]}, TEXT) == []
        assert found(WHOLE, NUMBER) == [("", "type")]
        assert found(closed(a=TEXT), closed(a={"type": ["string", "null"]})) == [("a", "type")]

    def test_values_may_be_added(self):
        assert found({"enum": ["a", "b"]}, {"enum": ["a"]}) == []
        assert found({"enum": ["a"]}, {"enum": ["a", "b"]}) == [("", "values")]
        assert found(TEXT, {"enum": ["a", "b"]}) == []
        assert found({"type": "string", "maxLength": 1}, {"const": "ab"}) == [("", "values")]
        assert found({"enum": [True, 1]}, {"type": "boolean"}) == [("", "values")]

    @pytest.mark.parametrize(
        ("narrow", "wide", "rule"),
        [
            ({"minimum": 1}, {"minimum": 0}, "minimum"),
            ({"exclusiveMinimum": 0}, {"minimum": 0}, "exclusive_minimum"),
            ({"minimum": 1}, {"exclusiveMinimum": 0}, "minimum"),
            ({"maximum": 1}, {"maximum": 2}, "maximum"),
            ({"maximum": 1}, {}, "maximum"),
            ({"multipleOf": 4}, {"multipleOf": 2}, "multiple_of"),
        ],
    )
    def test_bounds_of_numbers_may_widen(self, narrow, wide, rule):
        assert found({**NUMBER, **wide}, {**NUMBER, **narrow}) == []
        assert found({**NUMBER, **narrow}, {**NUMBER, **wide}) == [("", rule)]

    @pytest.mark.parametrize(
        ("narrow", "rule"),
        [({"minLength": 2}, "min_length"), ({"maxLength": 2}, "max_length"), ({"pattern": "^a"}, "pattern")],
    )
    def test_bounds_of_text_may_widen(self, narrow, rule):
        assert found(TEXT, {**TEXT, **narrow}) == []
        assert found({**TEXT, **narrow}, {**TEXT, **narrow}) == []
        assert found({**TEXT, **narrow}, TEXT) == [("", rule)]

    def test_a_bound_of_another_type_does_not_matter(self):
        assert found({**TEXT, "minimum": 5}, TEXT) == []

    def test_items_are_compared(self):
        assert found({"type": "array", "items": NUMBER}, {"type": "array", "items": WHOLE}) == []
        assert found({"type": "array", "items": WHOLE}, {"type": "array", "items": NUMBER}) == [("[]", "type")]
        assert found({"prefixItems": [WHOLE]}, {"type": "array", "prefixItems": [NUMBER]}) == [("[0]", "type")]
        assert found({"type": "array", "uniqueItems": True}, {"type": "array"}) == [("", "unique_items")]
        assert found({"type": "array", "uniqueItems": True}, {"type": "array", "maxItems": 1}) == []

    def test_references_are_followed_and_may_be_circular(self):
        def tree(kind):
            node = closed(value=kind, next={"$ref": "#/$defs/node"})
            return {"$ref": "#/$defs/node", "$defs": {"node": node}}

        assert found(tree(NUMBER), tree(WHOLE)) == []
        assert found(tree(WHOLE), tree(NUMBER))[0] == ("value", "type")

    def test_what_several_places_refer_to_is_no_circle(self):
        def order(leaf, **more):
            kinds = {
                "address": closed(country={"$ref": "#/$defs/country"}, before={"$ref": "#/$defs/country"}),
                "country": closed(code=leaf, of=closed(code=leaf)),
                "person": closed(home={"$ref": "#/$defs/address"}, born={"$ref": "#/$defs/country"}),
                "node": closed(value=leaf, next={"$ref": "#/$defs/node"}, all={"items": {"$ref": "#/$defs/node"}}),
            }
            names = ("address", "person", "country", "node")
            return closed(**{name: {"$ref": f"#/$defs/{name}"} for name in names}, **more) | {"$defs": kinds}

        assert found(order(WHOLE, note=TEXT), order(WHOLE)) == []
        assert found(order(NUMBER), order(WHOLE)) == []
        assert {rule for _, rule in found(order(WHOLE), order(NUMBER))} == {"type"}

    def test_a_reference_to_itself_proves_nothing(self):
        circle = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, WHOLE]}}}
        assert found(circle, TEXT) != []

    def test_a_reference_to_another_subject_is_followed(self):
        def order(line):
            known = (("line.json", schema(line, subject="line", version=1)),)
            return schema({"type": "array", "items": {"$ref": "line.json"}}, references=known)

        assert incompatibilities(Compatibility.BACKWARD, [order(WHOLE)], order(NUMBER)) == []
        (only,) = incompatibilities(Compatibility.BACKWARD, [order(NUMBER)], order(WHOLE))
        assert (only.path, only.rule) == ("[]", "json_schema.type")

    def test_a_branch_may_be_added_and_not_taken_away(self):
        two, three = {"anyOf": [WHOLE, TEXT]}, {"anyOf": [WHOLE, TEXT, {"type": "null"}]}
        assert found(three, two) == []
        assert found(two, three) == [("", "any_of")]

    def test_one_of_needs_branches_that_exclude_each_other(self):
        assert found({"oneOf": [{"type": "null"}, TEXT]}, TEXT) == []
        assert found({"oneOf": [NUMBER, WHOLE]}, WHOLE) == [("", "one_of")]
        kinds = [closed(("kind",), kind={"const": each}, x=WHOLE) for each in ("a", "b", "c")]
        assert found({"oneOf": kinds}, {"oneOf": kinds[:2]}) == []
        assert found({"oneOf": kinds[:2]}, {"oneOf": kinds}) == [("", "one_of")]

    def test_other_properties_of_the_writer_say_nothing_of_those_that_fit_a_pattern(self):
        writer = {"type": "object", "patternProperties": {"^p": TEXT}, "additionalProperties": WHOLE}
        assert found({"type": "object", "properties": {"p": WHOLE}}, writer) == [("p", "property_added_to_open")]
        assert found({"type": "object", "additionalProperties": NUMBER}, writer) != []

    def test_what_cannot_be_proven_is_refused_unless_nothing_changed(self):
        given = {"type": "object", "patternProperties": {"^x": WHOLE}, "properties": {"a": {"$ref": "#/$defs/a"}},
                 "$defs": {"a": TEXT}}  # fmt: skip
        assert found(given, given) == []
        assert ("", "not_provable") in found({**given, "patternProperties": {"^x": NUMBER}}, given)

    def test_schemas_that_are_nested_too_deeply_to_compare_are_refused(self):
        def deep(inner):
            for _ in range(100):
                inner = {"type": "array", "items": inner}
            return inner

        assert [rule for _, rule in found(deep(NUMBER), deep(WHOLE))] == ["not_provable"]

    def test_another_draft_is_refused(self):
        old = {"$schema": "http://json-schema.org/draft-07/schema#", **TEXT}
        assert found(TEXT, old) == [("", "draft")]
        assert found({**old, "maxLength": 3}, {**old, "maxLength": 2}) == []

    def test_what_is_beside_a_reference_of_an_old_draft_does_not_count(self):
        old = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": NUMBER}}
        assert found({**old, **WHOLE}, {**old, "$ref": "#/definitions/a", **WHOLE}) == [("", "type")]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "3",
        '"x"',
        '{"not":' * 200 + "{}" + "}" * 200,
        '{"type": "nonsense"}',
        '{"minimum": "x"}',
        '{"properties": []}',
    ],
)
def test_a_text_that_is_no_schema_is_refused(text):
    with pytest.raises(SchemaError, match="PEN-4031"):
        parsed(WireSchema("json_schema", text))


# -- instances as the judge --------------------------------------------------------------------------------------------

SCALARS = [None, True, False, 0, 1, 2, 3, 1.5, -1, 2.0, "", "a", "ab", "abc", "b"]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
NAMES = ["p", "q", "r"]


class Drawn:
    """Schemas and instances by chance, small enough that they meet; one seed gives one pair."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def odds(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def some(self, choices: list[Any], least: int = 0, most: int = 3) -> list[Any]:
        return self.random.sample(choices, self.random.randint(least, min(most, len(choices))))

    def schema(self, depth: int = 2) -> Any:
        choice = self.random.randrange(12)
        if choice == 0:
            return self.odds(2)
        if depth and choice == 1:
            key = self.random.choice(["anyOf", "oneOf", "allOf"])
            return {**self.plain(0), key: [self.schema(depth - 1) for _ in range(self.random.randint(1, 3))]}
        if depth and choice == 2:
            return {**self.plain(0), "not": self.schema(depth - 1)}
        if choice == 3:
            return {"$ref": self.random.choice(["#/$defs/d", "#/$defs/e"]), **self.plain(0)}
        return self.plain(depth)

    def plain(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}

        def maybe(one_in: int, key: str, value: Callable[[], Any]) -> None:
            if self.odds(one_in):
                made[key] = value()

        def inner() -> Any:
            return self.schema(depth - 1)

        maybe(2, "type", lambda: self.random.choice(TYPES) if self.odds(2) else self.some(TYPES, 1, 7))
        maybe(9, "enum", lambda: self.some(SCALARS, 1))
        maybe(13, "const", lambda: self.random.choice(SCALARS))
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            maybe(9, key, lambda: self.random.choice([0, 1, 1.5, 2]))
        maybe(11, "multipleOf", lambda: self.random.choice([1, 2, 3, 0.5]))
        for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            maybe(9, key, lambda: self.random.randint(0, 3))
        maybe(11, "pattern", lambda: self.random.choice(["^a", "b$"]))
        maybe(9, "uniqueItems", lambda: self.odds(2))
        maybe(4, "required", lambda: self.some(NAMES))
        maybe(17, "patternProperties", lambda: {"^p": {"type": "integer"}})
        if depth:
            maybe(2, "properties", lambda: {name: inner() for name in self.some(NAMES)})
            maybe(3, "additionalProperties", inner)
            maybe(4, "items", inner)
            maybe(7, "prefixItems", lambda: [inner() for _ in range(self.random.randint(1, 2))])
            for key in ("contains", "if", "then"):
                maybe(21, key, inner)
        return made

    def document(self) -> dict[str, Any]:
        root = self.schema()
        return {**(root if isinstance(root, dict) else {}), "$defs": {"d": self.schema(1), "e": self.plain(1)}}

    def pair(self) -> tuple[Any, Any]:
        """A writer's schema, and a reader's that is often close to it: something taken away, added, or put in."""
        writer = self.document()
        if self.odds(5):
            return writer, self.document()
        reader = copy.deepcopy(writer)
        for _ in range(self.random.randint(1, 3)):
            place = self.random.choice([each for each in objects(reader) if each])
            key = self.random.choice(sorted(place))
            change = self.random.randrange(4)
            if change == 0 and key not in ("$defs", "d", "e", "properties", "patternProperties"):
                place.pop(key)
            elif change == 1 and "$defs" not in place and looks_like_a_schema(place):
                place.update(self.plain(1))
            elif change == 2 and isinstance(place[key], int) and not isinstance(place[key], bool):
                place[key] = max(place[key] + self.random.choice([-1, 1]), 1)
            elif key in ("items", "additionalProperties", "d", "e", *NAMES):
                place[key] = {self.random.choice(["anyOf", "oneOf"]): [place[key], self.schema(1)]}
        return writer, reader

    def value(self, depth: int = 2) -> Any:
        kind = self.random.randrange(3) if depth else 0
        if kind == 0:
            return self.random.choice(SCALARS)
        if kind == 1:
            return [self.value(depth - 1) for _ in range(self.random.randint(0, 3))]
        return {name: self.value(depth - 1) for name in self.some([*NAMES, "other"], 0, 4)}


def objects(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([value] if isinstance(value, dict) else []), *(each for part in inner for each in objects(part))]


def looks_like_a_schema(value: dict[str, Any]) -> bool:
    return not set(value) & {"d", "e", "^p", *NAMES}


def is_valid_schema(value: Any) -> bool:
    try:
        jsonschema_rs.meta.validate(value)
        jsonschema_rs.validator_for(value)
    except (ValueError, jsonschema_rs.ReferencingError):
        return False
    return True


FIXED = [*SCALARS, [], {}, *([each] for each in SCALARS), *({"p": each} for each in SCALARS)]
FIRST, COUNT = int(os.environ.get("PENSTOCK_FIRST_SEED", "0")), int(os.environ.get("PENSTOCK_SEEDS", "1500"))


def test_no_instance_refutes_what_is_called_compatible():
    told = 0
    for seed in range(FIRST, FIRST + COUNT):
        drawn = Drawn(seed)
        writer, reader = drawn.pair()
        if not is_valid_schema(writer) or not is_valid_schema(reader) or found(reader, writer):
            continue
        old, new = jsonschema_rs.validator_for(writer), jsonschema_rs.validator_for(reader)
        allowed = [each for each in [*FIXED, *(drawn.value() for _ in range(60))] if old.is_valid(each)]
        told += bool(allowed) and writer != reader
        assert [each for each in allowed if not new.is_valid(each)] == [], (seed, writer, reader)
    assert told > COUNT // 20, "too few pairs are called compatible to learn anything"


def test_a_schema_is_compatible_with_itself_and_with_one_that_allows_everything():
    for seed in range(300):
        document = Drawn(seed).document()
        if is_valid_schema(document):
            assert found(document, document) == []
            assert found({}, document) == []
