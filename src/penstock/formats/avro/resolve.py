"""The writer's schema against the reader's: what reads one and gives the other, by the rules of the specification."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from penstock.errors import SchemaError
from penstock.formats import WireSchema
from penstock.formats.avro.leaves import Boolean, Enum, Fixed, Float, Node, Null, Number, Text, plain
from penstock.formats.avro.nested import Constant, Items, Optional, Pair, Record, Union, Wrapped
from penstock.formats.avro.schema import MISSING, Field, Type, parse

_WIDER = {
    "int": ("int", "long", "float", "double"),
    "long": ("long", "float", "double"),
    "float": ("float", "double"),
    "double": ("double",),
    "bytes": ("bytes", "string"),
    "string": ("string", "bytes"),
}


@lru_cache(maxsize=256)
def decoder(writer: WireSchema, reader: WireSchema) -> Node:
    """Reads what was written with one schema as another describes it. Raises `SchemaError` if that cannot be."""
    theirs, ours = parse(writer), parse(reader)
    if theirs.kind == ours.kind == "record":  # a record of any name: one's own schema need not know the writer's
        return _record(theirs, ours, "")
    return resolve(theirs, ours, "value")


def resolve(writer: Type, reader: Type, path: str) -> Node:
    if writer.kind == "union":
        return _writer_union(writer, reader, path)
    if reader.kind == "union":
        branch = _match(writer, reader)
        if branch is None:
            raise _differ(writer, reader, path)
        node = resolve(writer, branch, path)
        if reader.is_choice and branch.kind != "null":
            return Wrapped(writer, reader, path, node, reader.others.index(branch))
        return node if branch.kind != "null" else Constant(reader, None, path)
    if writer.logical and reader.logical and _meaning(writer) != _meaning(reader):
        raise _differ(writer, reader, path)
    if writer.kind in _WIDER and reader.kind in _WIDER[writer.kind]:
        if writer.kind in ("bytes", "string"):
            return Text(writer, reader, path)
        return Number(writer, reader, path) if writer.kind in ("int", "long") else Float(writer, reader, path)
    if writer.kind != reader.kind:
        raise _differ(writer, reader, path)
    if writer.name and not _same_name(writer, reader):
        raise _differ(writer, reader, path)
    return _same_kind(writer, reader, path)


def _same_kind(writer: Type, reader: Type, path: str) -> Node:
    if writer.kind == "record":
        return _record(writer, reader, path)
    if writer.kind in ("array", "map"):
        assert writer.items is not None
        assert reader.items is not None
        item = resolve(writer.items, reader.items, path)
        text = Type("string")
        pair = Pair(Text(text, text, f"a key of {path}"), item) if writer.kind == "map" else item
        return Items(writer, reader, path, pair)
    if writer.kind == "fixed" and writer.size != reader.size:
        raise _differ(writer, reader, path)
    kinds: dict[str, Callable[[Type, Type, str], Node]] = {
        "null": Null,
        "boolean": Boolean,
        "enum": Enum,
        "fixed": Fixed,
    }
    return kinds[writer.kind](writer, reader, path)


def _record(writer: Type, reader: Type, path: str) -> Record:
    nodes: list[Node] = []
    places: list[int | None] = []
    wanted = _wanted(writer, reader)
    for field in writer.fields:
        here = f"{path}.{field.name}" if path else field.name
        place = wanted.get(field.name)
        target = field.type if place is None else reader.fields[place].type
        nodes.append(resolve(field.type, target, here))
        places.append(place)
    for place, field in enumerate(reader.fields):
        if place not in wanted.values():
            nodes.append(_default(field, f"{path}.{field.name}" if path else field.name))
            places.append(place)
    return Record(writer, reader, path, nodes, places)


def _wanted(writer: Type, reader: Type) -> dict[str, int]:
    """The places of the reader's fields by the names that the writer has for them: their own, else an alias."""
    names = {field.name for field in writer.fields}
    wanted = {field.name: place for place, field in enumerate(reader.fields) if field.name in names}
    for place, field in enumerate(reader.fields):
        alias = next((each for each in field.aliases if each in names and each not in wanted), None)
        if field.name not in names and alias is not None:
            wanted[alias] = place
    return wanted


def _default(field: Field, path: str) -> Constant:
    if field.default is MISSING:
        raise SchemaError(
            f"the writer's schema has no field {path}, and the reader's gives it no default",
            hint=f"give {path} a default in the reader's schema",
        )
    try:
        return Constant(field.type, plain(field.default, field.type), path)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise SchemaError(
            f"the default of {path} is no {field.type}: {error}", hint="correct the default in the reader's schema"
        ) from error


def _writer_union(writer: Type, reader: Type, path: str) -> Node:
    nodes: list[tuple[Node, int] | str | None] = []
    for branch in writer.branches:
        target = _match(branch, reader) if reader.kind == "union" else reader
        try:
            if target is None:
                raise _differ(branch, reader, path)
            node = resolve(branch, target, path)
        except SchemaError as error:
            nodes.append(error.message)
            continue
        if target.kind == "null" and branch.kind == "null":
            nodes.append(None)
        else:
            nodes.append((node, reader.others.index(target) if reader.is_choice else 0))
    if all(isinstance(each, str) for each in nodes):
        raise _differ(writer, reader, path)
    if len(nodes) == 2 and not reader.is_choice and nodes.count(None) == 1:
        value = next(each for each in nodes if each is not None)
        if not isinstance(value, str):
            return Optional(writer, reader, path, value[0])
    return Union(writer, reader, path, nodes)


def _match(writer: Type, reader: Type) -> Type | None:
    """The reader's branch for a type: the very same if there is one, else the first that can take it."""
    same = (b for b in reader.branches if b.kind == writer.kind and b.name == writer.name)
    return next((b for b in (*same, *reader.branches) if _fits(writer, b)), None)


def _fits(writer: Type, reader: Type) -> bool:
    """Kind and name; what is within a record is looked at once it is chosen."""
    if writer.kind == "union" or reader.kind == "union":
        return any(_fits(w, r) for w in writer.branches or (writer,) for r in reader.branches or (reader,))
    if writer.logical and reader.logical and _meaning(writer) != _meaning(reader):
        return False
    if writer.kind != reader.kind:
        return reader.kind in _WIDER.get(writer.kind, ())
    if writer.items is not None and reader.items is not None:
        return _fits(writer.items, reader.items)
    return writer.size == reader.size and (not writer.name or _same_name(writer, reader))


def _same_name(writer: Type, reader: Type) -> bool:
    short = writer.name.rpartition(".")[2]
    return short == reader.name.rpartition(".")[2] or writer.name in reader.aliases


def _meaning(kind: Type) -> tuple[str, int, int]:
    return kind.logical, kind.precision, kind.scale


def _differ(writer: Type, reader: Type, path: str) -> SchemaError:
    where = f" in {path}" if path else ""
    return SchemaError(
        f"the writer's type {writer} cannot be read as the reader's {reader}{where}",
        hint="make the reader's type the writer's, or one that it widens to",
    )
