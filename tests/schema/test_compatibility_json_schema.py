"""What is called compatible must not be refuted by any instance; jsonschema-rs is the judge."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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

    def test_what_cannot_be_proven_is_refused_unless_nothing_changed(self):
        given = {"type": "object", "patternProperties": {"^x": WHOLE}, "properties": {"a": {"$ref": "#/$defs/a"}},
                 "$defs": {"a": TEXT}}  # fmt: skip
        assert found(given, given) == []
        assert ("", "not_provable") in found({**given, "patternProperties": {"^x": NUMBER}}, given)

    def test_another_draft_is_refused(self):
        old = {"$schema": "http://json-schema.org/draft-07/schema#", **TEXT}
        assert found(TEXT, old) == [("", "draft")]
        assert found({**old, "maxLength": 3}, {**old, "maxLength": 2}) == []

    def test_what_is_beside_a_reference_of_an_old_draft_does_not_count(self):
        old = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": NUMBER}}
        assert found({**old, **WHOLE}, {**old, "$ref": "#/definitions/a", **WHOLE}) == [("", "type")]


@pytest.mark.parametrize("text", ["{", "3", '"x"', '{"type": "nonsense"}', '{"minimum": "x"}', '{"properties": []}'])
def test_a_text_that_is_no_schema_is_refused(text):
    with pytest.raises(SchemaError, match="PEN-4031"):
        parsed(WireSchema("json_schema", text))


# -- instances as the judge --------------------------------------------------------------------------------------------

SCALARS = [None, True, False, 0, 1, 2, 3, 1.5, -1, 2.0, "", "a", "ab", "abc", "b"]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
NAMES = ["p", "q", "r"]


@st.composite
def schemas(draw: Any, depth: int = 2) -> Any:
    choice = draw(st.integers(0, 11))
    if choice == 0:
        return draw(st.booleans())
    if depth and choice == 1:
        key = draw(st.sampled_from(["anyOf", "oneOf", "allOf"]))
        return {**draw(plain(0)), key: draw(st.lists(schemas(depth - 1), min_size=1, max_size=3))}
    if depth and choice == 2:
        return {**draw(plain(0)), "not": draw(schemas(depth - 1))}
    if choice == 3:
        return {"$ref": draw(st.sampled_from(["#/$defs/d", "#/$defs/e"])), **draw(plain(0))}
    return draw(plain(depth))


@st.composite
def plain(draw: Any, depth: int) -> Any:
    made: dict[str, Any] = {}

    def maybe(key: str, values: Any, odds: int = 4) -> None:
        if draw(st.integers(0, odds)) == 0:
            made[key] = draw(values)

    small = st.integers(0, 3)
    maybe("type", st.one_of(st.sampled_from(TYPES), st.lists(st.sampled_from(TYPES), min_size=1, unique=True)), 1)
    maybe("enum", st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3), 8)
    maybe("const", st.sampled_from(SCALARS), 12)
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        maybe(key, st.sampled_from([0, 1, 1.5, 2]), 8)
    maybe("multipleOf", st.sampled_from([1, 2, 3, 0.5]), 10)
    for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        maybe(key, small, 8)
    maybe("pattern", st.sampled_from(["^a", "b$"]), 10)
    maybe("uniqueItems", st.booleans(), 8)
    maybe("required", st.lists(st.sampled_from(NAMES), unique=True), 3)
    maybe("patternProperties", st.just({"^p": {"type": "integer"}}), 16)
    if depth:
        inner = schemas(depth - 1)
        maybe("properties", st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), 1)
        maybe("additionalProperties", inner, 2)
        maybe("items", inner, 3)
        maybe("prefixItems", st.lists(inner, min_size=1, max_size=2), 6)
        maybe("contains", inner, 20)
        maybe("if", inner, 20)
        maybe("then", inner, 20)
    return made


@st.composite
def documents(draw: Any) -> Any:
    root = draw(schemas().filter(lambda each: isinstance(each, dict)))
    return {**root, "$defs": {"d": draw(schemas(1)), "e": draw(plain(1))}}


@st.composite
def pairs(draw: Any) -> Any:
    """A writer's schema and a reader's that is often close to it: something taken away, added, or put in."""
    writer = draw(documents())
    if draw(st.integers(0, 4)) == 0:
        return writer, draw(documents())
    reader = copy.deepcopy(writer)
    for _ in range(draw(st.integers(0, 3))):
        places = [each for each in objects(reader) if each]
        place = draw(st.sampled_from(places)) if places else reader
        key = draw(st.sampled_from(sorted(place))) if place else ""
        change = draw(st.integers(0, 3))
        if change == 0 and key not in ("$defs", "d", "e", "properties", "patternProperties"):
            place.pop(key, None)
        elif change == 1 and "$defs" not in place and looks_like_a_schema(place):
            place.update(draw(plain(1)))
        elif change == 2 and isinstance(place.get(key), int) and not isinstance(place[key], bool):
            place[key] = max(place[key] + draw(st.sampled_from([-1, 1])), 1)
        elif key in ("items", "additionalProperties", "d", "e", *NAMES):
            place[key] = {"anyOf": [place[key], draw(schemas(1))]}
    return writer, reader


def objects(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([value] if isinstance(value, dict) else []), *(each for part in inner for each in objects(part))]


def looks_like_a_schema(value: dict[str, Any]) -> bool:
    return not set(value) & {"d", "e", "^p", *NAMES}


def values(depth: int = 2) -> st.SearchStrategy[Any]:
    scalar = st.sampled_from(SCALARS)
    if not depth:
        return scalar
    inner = values(depth - 1)
    names = st.sampled_from([*NAMES, "other"])
    return st.one_of(scalar, st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4))


def is_valid_schema(value: Any) -> bool:
    try:
        jsonschema_rs.meta.validate(value)
        jsonschema_rs.validator_for(value)
    except (ValueError, jsonschema_rs.ReferencingError):
        return False
    return True


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs(), st.lists(values(), min_size=12, max_size=12))
def test_no_instance_refutes_what_is_called_compatible(pair, instances):
    writer, reader = pair
    if not is_valid_schema(writer) or not is_valid_schema(reader):
        return
    if found(reader, writer):
        return
    old, new = jsonschema_rs.validator_for(writer), jsonschema_rs.validator_for(reader)
    instances += [*SCALARS, [], {}, *([each] for each in SCALARS), *({"p": each} for each in SCALARS)]
    refuted = [each for each in instances if old.is_valid(each) and not new.is_valid(each)]
    assert refuted == []


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents())
def test_a_schema_is_compatible_with_itself_and_with_one_that_allows_everything(document):
    if is_valid_schema(document):
        assert found(document, document) == []
        assert found({}, document) == []
