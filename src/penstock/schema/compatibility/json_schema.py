"""
JSON Schema: whether everything that a writer's schema allows is allowed by the reader's.

The answer "compatible" is a proof. What cannot be proven is refused: containment of JSON Schemas cannot be decided in
general. The writer's schema becomes a list of facts, all of which hold, and each constraint of the reader must follow
from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Incompatibility, invalid, load_json
from penstock.schema.compatibility.json_facts import (
    NOTHING,
    Document,
    State,
    Sub,
    equals,
    has_references,
    items_at,
    prefix_of,
    type_name,
    types_of,
)

_COMPLEX = (
    "if",
    "patternProperties",
    "propertyNames",
    "contains",
    "dependencies",
    "dependentSchemas",
    "dependentRequired",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
"""What is only compared as it is: the whole object that holds one must be the same on both sides."""

_MOST, _DEEPEST = 20_000, 60
"""Comparisons, and comparisons within each other, after which a pair of schemas counts as too large to decide."""


def parse(schema: WireSchema) -> Document:
    """The schema, valid by its own draft."""
    try:
        import jsonschema_rs
    except ImportError:
        raise ConfigError(
            "the schema type json_schema needs the package jsonschema-rs, which is not installed",
            code="PEN-1007",
            hint="pip install 'penstock[json-schema]'",
        ) from None
    root = load_json(schema)
    if not isinstance(root, dict | bool):
        raise invalid(schema, "a schema is an object, true or false")
    try:
        jsonschema_rs.meta.validate(root)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        reason = getattr(error, "message", str(error)).partition("\n")[0]
        raise invalid(schema, reason) from error
    return Document(root, {name: parse(each) for name, each in schema.references})


def reads(reader: Document, writer: Document) -> list[Incompatibility]:
    """Why data that the writer's schema allows may be refused by the reader's; empty: it never is."""
    if reader.draft != writer.draft:
        what = f"the draft changed from {writer.draft} to {reader.draft}"
        return [Incompatibility("", "json_schema.draft", what)]
    if reader.is_same(writer):
        return []
    return _Proof().compare(Sub(reader, reader.root), State.of(Sub(writer, writer.root)), "", 0)


class _Proof:
    def __init__(self) -> None:
        self._proven: dict[tuple[Any, ...], tuple[int, bool]] = {}
        """Pairs that are taken as proven: from which depth on, and whether that is still being shown."""
        self._left = _MOST
        self._level = 0

    def compare(self, reader: Sub, writer: State, path: str, depth: int) -> list[Incompatibility]:
        """
        What the reader refuses of what the writer allows.

        A pair that is met again deeper in the instance is taken as proven: an instance is finite. Met again at the same
        place while it is being shown, it is a circle that proves nothing; once it was shown, two places refer to one part.
        """
        if reader.value in (True, {}) or writer.is_empty:
            return []
        if reader.value is False:
            return [Incompatibility(path, "json_schema.false", "nothing is allowed here")]
        self._left -= 1
        if self._left < 0 or self._level >= _DEEPEST:
            return [_unproven(path, "the schemas are too large to compare")]
        key = (id(reader.value), writer.key)
        first, is_open = self._proven.get(key, (depth + 1, False))
        if first < depth or (first == depth and not is_open):
            return []
        if is_open:
            return [_unproven(path, "a reference leads back to itself")]
        before = dict(self._proven)
        self._proven[key] = depth, True
        self._level += 1
        found = self._check(reader, writer, path, depth)
        for place, (alternatives, exclusive) in enumerate(writer.choices if found else ()):
            found = self._split(reader, writer.without_choice(place), alternatives, exclusive, path, depth)
            if not found:
                break
        self._level -= 1
        if found:
            self._proven = before
        else:
            self._proven[key] = depth, False
        return found

    def _split(
        self, reader: Sub, writer: State, alternatives: Sequence[Sub], exclusive: bool, path: str, depth: int
    ) -> list[Incompatibility]:
        for each in alternatives:
            others = [other for other in alternatives if other is not each] if exclusive else []
            found = self.compare(reader, writer.also(each, others), path, depth)
            if found:
                return found
        return []

    def _check(self, reader: Sub, writer: State, path: str, depth: int) -> list[Incompatibility]:
        if any(equals(reader.value, fact.value) and not has_references(reader.value) for fact in writer.facts):
            return []
        found: list[Incompatibility] = []
        if "$ref" in reader.value:
            target = reader.document.resolve(reader.value["$ref"])
            if target is None:
                found.append(_unproven(path, f"the reference {reader.value['$ref']!r} is not followed"))
            else:
                found += self.compare(target, writer, path, depth)
            if reader.document.is_old:  # up to draft 7 what is beside a reference does not count
                return found
        found += self._combined(reader, writer, path, depth)
        complex_keys = [key for key in _COMPLEX if key in reader.value]
        if complex_keys:
            found.append(_unproven(path, f"{', '.join(map(repr, complex_keys))} changed, or what is beside it"))
        values = writer.finite
        if values is not None and all(not isinstance(each, dict | list) for each in values):
            refused = [each for each in values if not _admits(reader.value, each)]
            if refused:
                what = f"{len(refused)} of {len(values)} values are no longer allowed"
                found.append(Incompatibility(path, "json_schema.values", what))
            return found
        found += _scalars(reader.value, writer, path)
        if "object" in writer.types:
            found += self._object(reader, writer, path, depth)
        if "array" in writer.types:
            found += self._array(reader, writer, path, depth)
        return found

    def _combined(self, reader: Sub, writer: State, path: str, depth: int) -> Iterator[Incompatibility]:
        for each in reader.under("allOf"):
            yield from self.compare(each, writer, path, depth)
        any_of, one_of = reader.under("anyOf"), reader.under("oneOf")
        if any_of and not any(not self.compare(each, writer, path, depth) for each in any_of):
            yield Incompatibility(path, "json_schema.any_of", "no branch of `anyOf` takes all that was allowed")
        if one_of and not self._is_one_of(one_of, writer, path, depth):
            what = "not exactly one branch of `oneOf` takes all that was allowed"
            yield Incompatibility(path, "json_schema.one_of", what)
        if "not" in reader.value and not self._disjoint(Sub(reader.document, reader.value["not"]), writer, depth):
            yield Incompatibility(path, "json_schema.not", "`not` may refuse what was allowed")

    def _is_one_of(self, branches: Sequence[Sub], writer: State, path: str, depth: int) -> bool:
        for each in branches:
            if not self.compare(each, writer, path, depth):
                others = [other for other in branches if other is not each]
                return all(self._disjoint(other, writer, depth) for other in others)
        return False

    def _disjoint(self, sub: Sub, writer: State, depth: int) -> bool:
        """Whether no instance can be valid for both; False when that is not known."""
        self._left -= 1
        if self._left < 0 or self._level >= _DEEPEST:
            return False
        self._level += 1
        answer = self._are_disjoint(State.of(sub), writer, depth)
        self._level -= 1
        return answer

    def _are_disjoint(self, other: State, writer: State, depth: int) -> bool:
        if other.is_empty or not other.types & writer.types:
            return True
        if any(not self.compare(each, other, "", depth) for each in writer.excluded):
            return True
        if other.choices and all(self._disjoint(each, writer, depth) for each in other.choices[0][0]):
            return True
        mine, theirs = writer.finite, other.finite
        if mine is not None and theirs is not None:
            return not any(equals(one, two) for one in mine for two in theirs)
        if other.types & writer.types != {"object"}:
            return False
        for name in writer.required | other.required:
            here, there = writer.value_of(name), other.value_of(name)
            if here.is_empty or there.is_empty:
                return True
            if any(self._disjoint(each, here, depth + 1) for each in there.facts):
                return True
        return False

    def _object(self, reader: Sub, writer: State, path: str, depth: int) -> Iterator[Incompatibility]:
        for name in reader.value.get("required", ()):
            if name not in writer.required:
                what = "the property is required, and the writer may leave it out"
                yield Incompatibility(_join(path, name), "json_schema.required", what)
        yield from _bounds(reader.value, writer, path, "minProperties", "maxProperties")
        known = reader.value.get("properties", {})
        for name, schema in known.items():
            given = writer.value_of(name)
            if not given.facts and not given.choices and schema not in (True, {}):
                what = "the property is new, and the writer's open content may hold anything under its name"
                yield Incompatibility(_join(path, name), "json_schema.property_added_to_open", what)
            else:
                yield from self.compare(Sub(reader.document, schema), given, _join(path, name), depth + 1)
        rest = reader.value.get("additionalProperties", True)
        if rest in (True, {}):
            return
        rest_sub = Sub(reader.document, rest)
        for name in writer.property_names:
            if name not in known and self.compare(rest_sub, writer.value_of(name), _join(path, name), depth + 1):
                what = "the property is not in the schema, which allows no others like it"
                yield Incompatibility(_join(path, name), "json_schema.property_removed_from_closed", what)
        if self.compare(rest_sub, writer.other_properties, path, depth + 1):
            what = "`additionalProperties` allows less than before"
            yield Incompatibility(path, "json_schema.additional_properties", what)

    def _array(self, reader: Sub, writer: State, path: str, depth: int) -> Iterator[Incompatibility]:
        yield from _bounds(reader.value, writer, path, "minItems", "maxItems")
        most = writer.upper("maxItems")
        is_unique = (most is not None and most <= 1) or writer.has("uniqueItems", True)
        if reader.value.get("uniqueItems") and not is_unique:
            yield Incompatibility(path, "json_schema.unique_items", "items must be unique now")
        length = max([len(prefix_of(reader)), *(len(prefix_of(fact)) for fact in writer.facts)])
        for place in range(length + 1):  # the last one is the rest
            if most is None or place < most:
                where = f"{path}[{place}]" if place < length else f"{path}[]"
                yield from self.compare(items_at(reader, place), writer.items(place), where, depth + 1)


def _scalars(reader: dict[str, Any], writer: State, path: str) -> Iterator[Incompatibility]:
    """What follows from the types, and from single keywords of strings and numbers."""
    if "type" in reader:
        refused = writer.types - types_of(reader["type"])
        if refused:
            before, after = type_name(writer.types), type_name(types_of(reader["type"]))
            yield Incompatibility(path, "json_schema.type", f"{before} was allowed, and {after} is now")
    if "enum" in reader or "const" in reader:
        values = writer.finite
        if values is None or not all(_admits_value(reader, each) for each in values):
            yield Incompatibility(path, "json_schema.values", "values are no longer allowed")
    if writer.types & {"integer", "fraction"}:
        yield from _numbers(reader, writer, path)
    if "string" in writer.types:
        yield from _bounds(reader, writer, path, "minLength", "maxLength")
        for key in ("pattern", "format"):
            if key in reader and not writer.has(key, reader[key]):
                yield Incompatibility(path, f"json_schema.{key}", f"`{key}` is new or another than before")


def _numbers(reader: dict[str, Any], writer: State, path: str) -> Iterator[Incompatibility]:
    for loose, strict, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        for key in (loose, strict):
            limit = reader.get(key)
            if limit is None:
                continue
            if isinstance(limit, bool):  # draft 4
                is_known = writer.has(key, limit) and writer.has(loose, reader.get(loose))
            else:
                is_known = any(
                    sign * each > sign * limit or (each == limit and (key == loose or name == strict))
                    for name in (loose, strict)
                    for each in writer.numbers(name)
                )
            if not is_known:
                yield Incompatibility(path, f"json_schema.{_snake(key)}", f"`{key}` is {limit}, and was not so narrow")
    step = reader.get("multipleOf")
    steps = [*writer.numbers("multipleOf"), *([] if "fraction" in writer.types else [1])]
    if step is not None and not any(_divides(step, each) for each in steps):
        yield Incompatibility(path, "json_schema.multiple_of", f"`multipleOf` is {step}, and was not")


def _bounds(reader: dict[str, Any], writer: State, path: str, least: str, most: str) -> Iterator[Incompatibility]:
    low, high = reader.get(least, 0), reader.get(most)
    known = writer.lower(least)
    if least == "minProperties":
        known = max(known, len(writer.required))
    if low > known:
        yield Incompatibility(path, f"json_schema.{_snake(least)}", f"`{least}` is {low}, and was {known}")
    if high is not None:
        limit = writer.upper(most)
        if limit is None or limit > high:
            before = "was not limited" if limit is None else f"was {limit}"
            yield Incompatibility(path, f"json_schema.{_snake(most)}", f"`{most}` is {high}, and {before}")


def _admits(schema: dict[str, Any], value: Any) -> bool:
    """Whether the plain keywords of a schema allow one value that is neither an object nor an array."""
    if "type" in schema and not _atoms(value) <= types_of(schema["type"]):
        return False
    if not _admits_value(schema, value):
        return False
    if isinstance(value, str):
        known = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return known and "pattern" not in schema and "format" not in schema
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(schema.get("exclusiveMinimum"), bool) or isinstance(schema.get("exclusiveMaximum"), bool):
            return False
        above = schema.get("minimum", value) <= value and schema.get("exclusiveMinimum", value - 1) < value
        below = schema.get("maximum", value) >= value and schema.get("exclusiveMaximum", value + 1) > value
        return above and below and ("multipleOf" not in schema or _divides(schema["multipleOf"], value))
    return True


def _admits_value(schema: dict[str, Any], value: Any) -> bool:
    if "const" in schema and not equals(schema["const"], value):
        return False
    return "enum" not in schema or any(equals(each, value) for each in schema["enum"])


def _atoms(value: Any) -> frozenset[str]:
    return State.of(Sub(NOTHING, {"const": value})).types


def _divides(step: Any, number: Any) -> bool:
    whole = all(isinstance(each, int) or float(each).is_integer() for each in (step, number))
    return bool(step == number or (whole and int(number) % int(step) == 0))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _snake(key: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in key)


def _unproven(path: str, what: str) -> Incompatibility:
    return Incompatibility(path, "json_schema.not_provable", f"it cannot be shown that all data still fits: {what}")
