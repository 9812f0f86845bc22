"""Avro's schema resolution: what a reader can make of a writer's data, before any data is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.formats import WireSchema
from penstock.schema.compatibility import Incompatibility, invalid, load_json

PRIMITIVES = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
PROMOTIONS = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
_MISSING = object()


@dataclass(eq=False)
class Field:
    name: str
    type: Node
    aliases: tuple[str, ...] = ()
    default: Any = _MISSING


@dataclass(eq=False)
class Node:
    """One type of a schema, names resolved: a record that holds itself is a circle."""

    kind: str
    name: str = ""
    """Full name of a record, enum or fixed."""
    aliases: tuple[str, ...] = ()
    fields: list[Field] = field(default_factory=list)
    symbols: tuple[str, ...] = ()
    default: Any = _MISSING
    """Of an enum."""
    size: int = 0
    inner: list[Node] = field(default_factory=list)
    """Items of an array, values of a map, branches of a union."""
    logical: tuple[str, int, int] | None = None
    """Logical type, precision and scale."""

    @property
    def label(self) -> str:
        return self.name or self.kind


def parse(schema: WireSchema) -> Node:
    """The schema as a tree; its references' names are known in it."""
    names: dict[str, Node] = {}
    _read_references(schema, names)
    return _Parser(schema, names).node(load_json(schema), "")


def reads(reader: Node, writer: Node) -> list[Incompatibility]:
    """Why a reader cannot read a writer's data; empty: it can read all of it."""
    return list(_Resolution().compare(reader, writer, reader.name.rpartition(".")[2]))


def _read_references(schema: WireSchema, names: dict[str, Node]) -> None:
    for _, reference in schema.references:
        _read_references(reference, names)
        _Parser(reference, names).node(load_json(reference), "")


class _Parser:
    def __init__(self, schema: WireSchema, names: dict[str, Node]) -> None:
        self._schema = schema
        self._names = names

    def node(self, given: Any, space: str) -> Node:
        if isinstance(given, str):
            return self._named(given, space)
        if isinstance(given, list):
            return self._union(given, space)
        if not isinstance(given, dict) or "type" not in given:
            raise self._invalid("a type is a name, a list, or an object with `type`")
        kind = given["type"]
        if not isinstance(kind, str):
            return self.node(kind, space)
        if kind in ("record", "error"):
            return self._record(given, space)
        if kind == "enum":
            return self._enum(given, space)
        if kind == "fixed":
            size = given.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self._invalid("a fixed type needs a `size`")
            return self._define(Node("fixed", size=size, logical=_logical(given)), given, space)[0]
        if kind in ("array", "map"):
            key = "items" if kind == "array" else "values"
            if key not in given:
                raise self._invalid(f"the type {kind} needs `{key}`")
            return Node(kind, inner=[self.node(given[key], space)])
        found = self._named(kind, space)
        logical = _logical(given)
        return Node(found.kind, logical=logical) if logical and found.kind in PRIMITIVES else found

    def _named(self, name: str, space: str) -> Node:
        if name in PRIMITIVES:
            return Node(name)
        full = name if "." in name or not space else f"{space}.{name}"
        found = self._names.get(full) or self._names.get(name)
        if found is None:
            raise self._invalid(f"the type {name!r} is not defined")
        return found

    def _union(self, given: list[Any], space: str) -> Node:
        branches = [self.node(each, space) for each in given]
        labels = [each.label for each in branches]
        if "union" in labels:
            raise self._invalid("a union holds a union")
        if len(set(labels)) < len(labels):
            raise self._invalid(f"a union holds {max(labels, key=labels.count)!r} twice")
        return Node("union", inner=branches)

    def _record(self, given: dict[str, Any], space: str) -> Node:
        node, space = self._define(Node("record"), given, space)
        fields = given.get("fields")
        if not isinstance(fields, list):
            raise self._invalid(f"the record {node.name!r} needs `fields`")
        for each in fields:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str) or "type" not in each:
                raise self._invalid(f"a field of {node.name!r} needs `name` and `type`")
            made = Field(each["name"], self.node(each["type"], space), self._aliases(each))
            if any(other.name == made.name for other in node.fields):
                raise self._invalid(f"{node.name!r} has the field {made.name!r} twice")
            made.default = each.get("default", _MISSING)
            if made.default is not _MISSING and not _fits(made.default, made.type):
                raise self._invalid(f"the default of {node.name}.{made.name} is not of its type")
            node.fields.append(made)
        return node

    def _enum(self, given: dict[str, Any], space: str) -> Node:
        symbols = given.get("symbols")
        if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
            raise self._invalid("an enum needs `symbols`")
        if len(set(symbols)) < len(symbols):
            raise self._invalid(f"an enum has the symbol {max(symbols, key=symbols.count)!r} twice")
        default = given.get("default", _MISSING)
        if default is not _MISSING and default not in symbols:
            raise self._invalid("the default of an enum is none of its symbols")
        return self._define(Node("enum", symbols=tuple(symbols), default=default), given, space)[0]

    def _define(self, node: Node, given: dict[str, Any], space: str) -> tuple[Node, str]:
        """Name the node; also the namespace of what it holds."""
        name = given.get("name")
        if not isinstance(name, str) or not name:
            raise self._invalid(f"the type {node.kind} needs a `name`")
        space = name.rpartition(".")[0] if "." in name else given.get("namespace", space) or ""
        node.name = name if "." in name or not space else f"{space}.{name}"
        node.aliases = tuple(a if "." in a or not space else f"{space}.{a}" for a in self._aliases(given))
        if node.name in self._names or node.name in PRIMITIVES:
            raise self._invalid(f"{node.name!r} is defined twice")
        self._names[node.name] = node
        return node, space

    def _aliases(self, given: dict[str, Any]) -> tuple[str, ...]:
        aliases = given.get("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
            raise self._invalid(f"the aliases of {given['name']!r} are no list of names")
        return tuple(aliases)

    def _invalid(self, reason: str) -> Exception:
        return invalid(self._schema, reason)


class _Resolution:
    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def compare(self, reader: Node, writer: Node, path: str) -> Iterator[Incompatibility]:
        if (id(reader), id(writer)) in self._seen:  # a circle: it is being compared further up
            return
        self._seen.add((id(reader), id(writer)))
        if writer.kind == "union":
            for branch in writer.inner:
                yield from self.compare(reader, branch, path)
        elif reader.kind == "union":
            chosen = _branch(reader, writer)
            if chosen is None:
                what = f"the union ({_labels(reader)}) has no branch for {writer.label}"
                yield Incompatibility(path, "avro.missing_branch", what)
            else:
                yield from self.compare(chosen, writer, path)
        elif not _matches(reader, writer):
            yield _mismatch(reader, writer, path)
        elif reader.kind == "record":
            yield from self._fields(reader, writer, path)
        elif reader.kind == "enum":
            missing = [each for each in writer.symbols if each not in reader.symbols]
            if missing and reader.default is _MISSING:
                what = f"the symbols {', '.join(missing)} are missing, and the enum has no default"
                yield Incompatibility(path, "avro.missing_symbols", what)
        elif reader.kind in ("array", "map"):
            yield from self.compare(reader.inner[0], writer.inner[0], path + ("[]" if reader.kind == "array" else "{}"))
        else:
            yield from _logical_change(reader, writer, path)

    def _fields(self, reader: Node, writer: Node, path: str) -> Iterator[Incompatibility]:
        known = {each.name: each for each in writer.fields}
        claims = Counter(name for each in reader.fields for name in {each.name, *each.aliases})
        for each in reader.fields:
            place = f"{path}.{each.name}" if path else each.name
            names = [name for name in dict.fromkeys((each.name, *each.aliases)) if name in known]
            if len(names) > 1 or any(claims[name] > 1 for name in names):
                what = f"name and aliases do not say which of the writer's fields it is ({', '.join(known)})"
                yield Incompatibility(place, "avro.alias", what)
            elif names:
                yield from self.compare(each.type, known[names[0]].type, place)
            elif each.default is _MISSING:
                what = "the field has no default, and the writer does not have it"
                yield Incompatibility(place, "avro.missing_default", what)


def _matches(reader: Node, writer: Node) -> bool:
    """Whether the types agree at this level: what is inside is compared afterwards."""
    if reader.kind != writer.kind:
        return reader.kind in PROMOTIONS.get(writer.kind, ())
    if not reader.name:
        return True
    short = writer.name.rpartition(".")[2]
    named = reader.name.rpartition(".")[2] == short or writer.name in reader.aliases or short in reader.aliases
    return named and reader.size == writer.size


def _branch(reader: Node, writer: Node) -> Node | None:
    """The branch of a union that reads a writer's type: one of the very same type if there is one, else the first."""
    fitting = [each for each in reader.inner if _matches(each, writer)]
    exact = [each for each in fitting if each.kind == writer.kind and each.name == writer.name]
    return next(iter(exact or fitting), None)


def _mismatch(reader: Node, writer: Node, path: str) -> Incompatibility:
    if reader.kind != writer.kind:
        return Incompatibility(path, "avro.type", f"{writer.label} cannot be read as {reader.label}")
    if reader.size != writer.size:
        what = f"{writer.name} has {writer.size} bytes, and the reader expects {reader.size}"
        return Incompatibility(path, "avro.fixed_size", what)
    what = f"the {reader.kind} {writer.name} cannot be read as {reader.name}, which has no such alias"
    return Incompatibility(path, "avro.name", what)


def _logical_change(reader: Node, writer: Node, path: str) -> Iterator[Incompatibility]:
    """Resolution itself ignores logical types: the reader would take microseconds for milliseconds, and cents for euros."""
    if reader.logical is None or writer.logical is None or reader.kind != writer.kind:
        return
    (name, precision, scale), (old, digits, places) = reader.logical, writer.logical
    if name != old or scale != places or precision < digits:
        before, after = (f"{n}({p}, {s})" if n == "decimal" else n for n, p, s in (writer.logical, reader.logical))
        yield Incompatibility(path, "avro.logical_type", f"values of {before} would be taken for {after}")


def _logical(given: dict[str, Any]) -> tuple[str, int, int] | None:
    name = given.get("logicalType")
    if not isinstance(name, str):
        return None
    precision, scale = (given.get(key, 0) if name == "decimal" else 0 for key in ("precision", "scale"))
    return (name, precision, scale) if isinstance(precision, int) and isinstance(scale, int) else None


def _labels(union: Node) -> str:
    return ", ".join(each.label for each in union.inner)


def _fits(default: Any, node: Node) -> bool:
    """Whether a default is of a type; that of a union, of its first branch or, as newer versions allow, of any."""
    if node.kind == "union":
        return any(_fits(default, branch) for branch in node.inner)
    if node.kind == "record":
        return isinstance(default, dict) and all(
            _fits(default[each.name], each.type) if each.name in default else each.default is not _MISSING
            for each in node.fields
        )
    if node.kind == "array":
        return isinstance(default, list) and all(_fits(each, node.inner[0]) for each in default)
    if node.kind == "map":
        return isinstance(default, dict) and all(_fits(each, node.inner[0]) for each in default.values())
    if node.kind == "enum":
        return default in node.symbols
    if node.kind in ("int", "long"):
        bits = 31 if node.kind == "int" else 63
        return isinstance(default, int) and not isinstance(default, bool) and -(1 << bits) <= default < 1 << bits
    if node.kind in ("float", "double"):
        return isinstance(default, int | float) and not isinstance(default, bool)
    if node.kind == "null":
        return default is None
    return isinstance(default, bool) if node.kind == "boolean" else isinstance(default, str)
