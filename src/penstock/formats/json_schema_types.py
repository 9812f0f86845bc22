"""
From JSON Schema to Arrow types.

A node is an Arrow type of a scalar, `ANY` (whatever it is, kept as JSON text), a list with the node of its items, a
struct's fields by name, or a `Map`. All columns and fields are nullable: a member that is not required may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, TypeAlias
from urllib.parse import unquote, urldefrag

import pyarrow as pa

from penstock.errors import SchemaError
from penstock.formats import WireSchema

ANY = "any"
Node: TypeAlias = "pa.DataType | str | list[Node] | Struct | Map | None"
"""None: nothing is known but that it may be null."""

MAX_FIELDS = 20_000
"""Fields of a schema with every reference written out: a few lines can refer to each other to billions."""

_TIMES = {"date-time": pa.timestamp("us", "UTC"), "date": pa.date32()}
_SCALARS = {"boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "string": pa.string()}
_VALUES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


@dataclass(frozen=True)
class Map:
    """An object with any keys, whose values are all described by one schema."""

    values: Node


class Struct(dict[str, "Node"]):
    """The fields of an object, and those of them that it must have."""

    required: frozenset[str] = frozenset()


@lru_cache
def fields_of(schema: WireSchema) -> Struct:
    """The columns that a schema describes, which must be one of objects with properties."""
    mapping = _Mapping(schema)
    try:
        node = mapping.node(mapping.root, mapping.root, frozenset())
    except RecursionError:
        raise SchemaError(
            "the JSON Schema is nested too deeply to make columns of it", hint="describe fewer levels in it"
        ) from None
    if not isinstance(node, Struct):
        raise SchemaError(
            "the JSON Schema does not describe objects with properties, and columns are made of properties",
            hint='give it "type": "object" and "properties"',
        )
    return node


def type_of(node: Node) -> pa.DataType:
    """The Arrow type of a node."""
    if node is None:
        return pa.null()
    if isinstance(node, list):
        return pa.list_(type_of(node[0]))
    if isinstance(node, Struct):
        return pa.struct([(name, type_of(each)) for name, each in node.items()])
    if isinstance(node, Map):
        return pa.map_(pa.string(), type_of(node.values))
    return pa.string() if node == ANY else node


def is_plain(node: Node) -> bool:
    """True for what pyarrow can read from JSON by itself, but for times, which it takes as text."""
    if isinstance(node, list):
        return node[0] is not None and is_plain(node[0])
    if isinstance(node, Struct):
        return bool(node) and all(map(is_plain, node.values()))
    return not (isinstance(node, Map) or node is None or node == ANY)


def holds_any(node: Node) -> bool:
    """True if the node, or one within it, is kept as JSON text."""
    if isinstance(node, list):
        return holds_any(node[0])
    if isinstance(node, Struct):
        return any(map(holds_any, node.values()))
    return holds_any(node.values) if isinstance(node, Map) else node == ANY


class _Mapping:
    """Looks into one schema and what it refers to."""

    def __init__(self, schema: WireSchema) -> None:
        self.root = parsed(schema)
        self._named = dict(_references(schema))
        self._left = MAX_FIELDS

    def node(self, schema: Any, root: Any, seen: frozenset[str]) -> Node:
        """What a schema makes of a value; `seen` are the references on the way to it."""
        if not isinstance(schema, dict):
            return ANY
        self._left -= 1
        if self._left < 0:
            raise SchemaError(
                f"the JSON Schema has more than {MAX_FIELDS:,} fields with every reference written out",
                hint="leave open what you need no columns of: `true` in place of a `$ref` makes a column of JSON text",
            )
        found = [each(schema, root, seen) for each in (self._own, self._referred, self._combined)]
        known = [node for node in found if node is not _UNKNOWN]
        return _requiring(reduce(_both, known), schema.get("required")) if known else ANY

    def _own(self, schema: dict[str, Any], root: Any, seen: frozenset[str]) -> Any:
        """By `type`, or by what only makes sense for one type."""
        kinds = schema.get("type")
        if kinds is None:
            if "enum" in schema or "const" in schema:
                return _of_values(schema["enum"] if "enum" in schema else [schema["const"]])
            kinds = "object" if "properties" in schema else "array" if "items" in schema else []
        nodes = [self._of_type(kind, schema, root, seen) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        return reduce(_either, nodes) if nodes else _UNKNOWN

    def _of_type(self, kind: str, schema: dict[str, Any], root: Any, seen: frozenset[str]) -> Node:
        if kind == "null":
            return None
        if kind == "array":
            items = schema.get("items")
            return ANY if "prefixItems" in schema or isinstance(items, list) else [self.node(items, root, seen)]
        if kind == "object":
            return self._of_object(schema, root, seen)
        if kind == "string":
            return _TIMES.get(schema.get("format", ""), pa.string())
        return _SCALARS.get(kind, ANY)

    def _of_object(self, schema: dict[str, Any], root: Any, seen: frozenset[str]) -> Any:
        if schema.get("properties"):
            return Struct({name: self.node(each, root, seen) for name, each in schema["properties"].items()})
        values = schema.get("additionalProperties")
        if isinstance(values, dict) and values and "patternProperties" not in schema:
            return Map(self.node(values, root, seen))
        has_parts = any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf"))
        return _UNKNOWN if has_parts else ANY

    def _referred(self, schema: dict[str, Any], root: Any, seen: frozenset[str]) -> Any:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return _UNKNOWN
        if reference in seen:
            return ANY  # it holds itself, and Arrow's types cannot
        target, home = self._find(reference, root)
        return self.node(target, home, seen | {reference})

    def _combined(self, schema: dict[str, Any], root: Any, seen: frozenset[str]) -> Any:
        found: list[Node] = []
        rules: list[tuple[str, Callable[[Node, Node], Node]]] = [
            ("allOf", _both),
            ("anyOf", _either),
            ("oneOf", _either),
        ]
        for keyword, meet in rules:
            parts = schema.get(keyword)
            if isinstance(parts, list) and parts:
                nodes = [self.node(each, root, seen) for each in parts]
                if keyword == "allOf":
                    nodes = [each for each in nodes if each != ANY] or [ANY]
                found.append(reduce(meet, nodes))
        return reduce(_both, found) if found else _UNKNOWN

    def _find(self, reference: str, root: Any) -> tuple[Any, Any]:
        name, pointer = urldefrag(reference)
        if name:
            root = self._named.get(name)
        found = root
        try:
            for part in pointer.split("/")[1:]:
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError):
            found = None
        if found is None or (pointer and not pointer.startswith("/")):
            raise SchemaError(
                f"the JSON Schema refers to {reference!r}, which cannot be found",
                hint="refer to a part of the schema itself (#/$defs/name), or add the other schema as a reference",
            )
        return found, root


_UNKNOWN: Any = object()


def parsed(schema: WireSchema) -> Any:
    try:
        return json.loads(schema.text)
    except ValueError as error:
        raise SchemaError(f"the JSON Schema {schema.subject} is not JSON: {error}".replace("  ", " ")) from error


def _references(schema: WireSchema) -> Iterator[tuple[str, Any]]:
    for name, each in schema.references:
        yield name, parsed(each)
        yield from _references(each)


def _of_values(values: list[Any]) -> Node:
    nodes: list[Node] = [None if each is None else _VALUES.get(type(each), ANY) for each in values]
    return reduce(_either, nodes) if nodes else ANY


def _either(one: Node, other: Node) -> Node:
    """What holds values of one schema or of the other."""
    if one is None or other is None or one == other:
        return other if one is None else one
    if isinstance(one, Struct) and isinstance(other, Struct):
        found = Struct({**one, **other, **{name: _either(one[name], other[name]) for name in one if name in other}})
        found.required = one.required & other.required
        return found
    if isinstance(one, list) and isinstance(other, list):
        return [_either(one[0], other[0])]
    numbers = (pa.int64(), pa.float64())
    return pa.float64() if one in numbers and other in numbers else ANY


def _both(one: Node, other: Node) -> Node:
    """What holds values that two schemas describe at once: the one that says more."""
    if one == ANY or other == ANY:
        return other if one == ANY else one
    met = _either(one, other)
    if isinstance(one, Struct) and isinstance(other, Struct):
        met = _requiring(met, [*one.required, *other.required])
    return met


def _requiring(node: Node, names: Any) -> Node:
    """The node, an object's with these members among those that it must have."""
    if not isinstance(node, Struct) or not isinstance(names, list) or node.required.issuperset(names):
        return node
    made = Struct(node)
    made.required = node.required.union(names)
    return made
