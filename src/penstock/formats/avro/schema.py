"""Avro schemas: parsed, names resolved, and the Arrow type that each becomes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from penstock.errors import SchemaError
from penstock.formats import WireSchema

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")

MAX_DEPTH = 64
"""Levels of nesting in a schema."""

MAX_FIELDS = 20_000
"""Fields of a schema with every named type written out: a few lines can name each other to billions."""

MAX_FIXED = 1 << 20

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)

_TIMES: dict[tuple[str, str], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time64("us"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-nanos"): pa.timestamp("ns", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("us"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("long", "local-timestamp-nanos"): pa.timestamp("ns"),
}

_PLAIN: dict[str, pa.DataType] = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "fixed": pa.binary(),
    "enum": pa.string(),
}

DURATION = pa.struct([("months", pa.int64()), ("days", pa.int64()), ("millis", pa.int64())])

MISSING: Any = object()
"""The default of a field that has none: null is a default."""


@dataclass(frozen=True)
class Field:
    name: str
    type: Type
    default: Any = MISSING
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Type:
    """One type of a schema; what its kind does not have is empty."""

    kind: str
    name: str = ""
    """In full, of a record, enum or fixed."""
    aliases: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    symbols: tuple[str, ...] = ()
    default: str | None = None
    """Of an enum."""
    items: Type | None = None
    """Of an array; of a map, its values."""
    branches: tuple[Type, ...] = ()
    size: int = 0
    logical: str = ""
    precision: int = 0
    scale: int = 0

    @cached_property
    def arrow(self) -> pa.DataType:
        if self.logical == "decimal":
            kind = pa.decimal128 if self.precision <= 38 else pa.decimal256
            return kind(self.precision, self.scale)
        if self.logical == "uuid":
            return pa.string()
        if self.logical == "duration":
            return DURATION
        if self.logical:
            return _TIMES[self.kind, self.logical]
        if self.kind == "record":
            return pa.struct([pa.field(each.name, each.type.arrow) for each in self.fields])
        if self.kind in ("array", "map"):
            assert self.items is not None
            return pa.list_(self.items.arrow) if self.kind == "array" else pa.map_(pa.string(), self.items.arrow)
        if self.kind == "union":
            if len(self.others) < 2:
                return self.others[0].arrow if self.others else pa.null()
            return pa.struct([pa.field(n, t.arrow) for n, t in zip(self.branch_names, self.others, strict=True)])
        return _PLAIN[self.kind]

    @cached_property
    def others(self) -> tuple[Type, ...]:
        """The branches of a union but null; of any other type, the type itself."""
        return tuple(each for each in self.branches if each.kind != "null") if self.kind == "union" else (self,)

    @property
    def is_nullable(self) -> bool:
        return self.kind == "null" or any(each.kind == "null" for each in self.branches)

    @property
    def is_choice(self) -> bool:
        """True for a union that becomes a struct with one column per branch: of two types or more besides null."""
        return len(self.others) > 1

    @cached_property
    def branch_names(self) -> list[str]:
        """Of `others`, the names of their columns: the short name if there is one, else the type's."""
        short = [each.name.rpartition(".")[2] or each.kind for each in self.others]
        full = [each.name or each.kind for each in self.others]
        return [f if short.count(s) > 1 else s for s, f in zip(short, full, strict=True)]

    @cached_property
    def least(self) -> int:
        """The fewest bytes that a value can have."""
        if self.kind == "record":
            return sum(each.type.least for each in self.fields)
        if self.kind == "union":
            return 1 + min((each.least for each in self.branches), default=0)
        return {"null": 0, "float": 4, "double": 8, "fixed": self.size}.get(self.kind, 1)

    @cached_property
    def zeros(self) -> int:
        """The bytes of a value that is all zeros: what a cursor in the padding passes over."""
        if self.kind == "record":
            return sum(each.type.zeros for each in self.fields)
        if self.kind == "union":
            return 1 + max((each.zeros for each in self.branches), default=0)
        return max(self.least, 1)

    @cached_property
    def weight(self) -> int:
        """How many fields it has with all named types written out."""
        inner = [*(each.type for each in self.fields), *self.branches, *([self.items] if self.items else [])]
        return 1 + sum(each.weight for each in inner)

    def __str__(self) -> str:
        if self.kind == "union":
            return f"[{', '.join(map(str, self.branches))}]"
        return self.logical or self.name or self.kind


def parse(schema: WireSchema) -> Type:
    """The type that a schema describes. Raises `SchemaError` for what is no schema, and for a type that contains itself."""
    return _Parser().whole(schema)


class _Parser:
    def __init__(self) -> None:
        self.names: dict[str, Type | None] = {}
        """None: its definition is being read."""

    def whole(self, schema: WireSchema) -> Type:
        for _, reference in schema.references:
            self.whole(reference)
        try:
            found = json.loads(schema.text)
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"not an Avro schema: {error}", hint="an Avro schema is JSON") from error
        parsed = self.type(found, "", 0)
        if parsed.weight > MAX_FIELDS:
            raise SchemaError(
                f"the Avro schema has {parsed.weight:,} fields; at most {MAX_FIELDS:,} are read",
                hint="leave fields out of the reader's schema",
            )
        return parsed

    def type(self, found: Any, space: str, depth: int) -> Type:
        if depth > MAX_DEPTH:
            raise _wrong(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(found, str):
            return Type(found) if found in PRIMITIVES else self.named(found, space)
        if isinstance(found, list):
            return self.union(found, space, depth)
        if not isinstance(found, dict) or "type" not in found:
            raise _wrong(f"{json.dumps(found)[:60]} is no type")
        kind = found["type"]
        if not isinstance(kind, str):
            return self.type(kind, space, depth + 1)
        if kind in ("record", "error", "enum", "fixed"):
            return self.definition(found, kind, space, depth)
        if kind in ("array", "map"):
            key = "items" if kind == "array" else "values"
            if key not in found:
                raise _wrong(f"a type {kind!r} without {key!r}")
            return Type(kind, items=self.type(found[key], space, depth + 1))
        if kind in PRIMITIVES:
            return Type(kind, **_logical(found, kind, 0))
        return self.named(kind, space)

    def union(self, found: list[Any], space: str, depth: int) -> Type:
        branches = tuple(self.type(each, space, depth + 1) for each in found)
        names = [each.name or each.kind for each in branches]
        if not names or "union" in names or len(set(names)) < len(names):
            raise _wrong("a union holds some types, each unnamed one once, and no other union")
        return Type("union", branches=branches)

    def named(self, name: str, space: str) -> Type:
        for full in (f"{space}.{name}" if space and "." not in name else name, name):
            if full in self.names:
                parsed = self.names[full]
                if parsed is None:
                    raise SchemaError(
                        f"the Avro type {full} contains itself, which no column can hold",
                        hint="leave the field that refers back to it out of the reader's schema and of the writer's",
                    )
                return parsed
        raise _wrong(f"unknown type {name!r}")

    def definition(self, found: dict[str, Any], kind: str, space: str, depth: int) -> Type:
        name = found.get("name")
        if not isinstance(name, str) or not _NAME.match(name):
            raise _wrong(f"a type {kind!r} with the name {name!r}")
        space = name.rpartition(".")[0] if "." in name else found.get("namespace", space) or ""
        if not isinstance(space, str):
            raise _wrong(f"the namespace of {name} is no name")
        full = name if "." in name or not space else f"{space}.{name}"
        if full in self.names:
            raise _wrong(f"the type {full} is defined twice")
        aliases = tuple(a if "." in a or not space else f"{space}.{a}" for a in _aliases(found))
        self.names[full] = None
        if kind in ("record", "error"):
            fields = found.get("fields")
            if not isinstance(fields, list):
                raise _wrong(f"the record {full} has no list of fields")
            parsed = Type(
                "record", full, aliases, fields=tuple(self.field(each, full, space, depth) for each in fields)
            )
            names = [each.name for each in parsed.fields]
            if len(set(names)) < len(names):
                raise _wrong(f"the record {full} has two fields of one name")
        elif kind == "enum":
            symbols = found.get("symbols")
            if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
                raise _wrong(f"the enum {full} has no list of symbols")
            parsed = Type("enum", full, aliases, symbols=tuple(symbols), default=found.get("default"))
            if len(set(symbols)) < len(symbols) or (parsed.default is not None and parsed.default not in symbols):
                raise _wrong(f"the enum {full} has a symbol twice, or a default that is none of them")
        else:
            size = found.get("size")
            if not isinstance(size, int) or not 0 <= size <= MAX_FIXED:
                raise _wrong(f"the fixed {full} has the size {size!r}")
            parsed = Type("fixed", full, aliases, size=size, **_logical(found, "fixed", size))
        self.names[full] = parsed
        return parsed

    def field(self, found: Any, record: str, space: str, depth: int) -> Field:
        if not isinstance(found, dict) or not isinstance(found.get("name"), str) or "type" not in found:
            raise _wrong(f"a field of {record} without a name or a type")
        if not _NAME.match(found["name"]) or "." in found["name"]:
            raise _wrong(f"a field of {record} with the name {found['name']!r}")
        kind = self.type(found["type"], space, depth + 1)
        return Field(found["name"], kind, found.get("default", MISSING), _aliases(found))


def _aliases(found: dict[str, Any]) -> tuple[str, ...]:
    aliases = found.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise _wrong(f"the aliases of {found['name']} are no list of names")
    return tuple(aliases)


def _logical(found: dict[str, Any], kind: str, size: int) -> dict[str, Any]:
    """The logical type if it fits what it annotates; otherwise none, as the specification has it."""
    name = found.get("logicalType")
    if not isinstance(name, str):
        return {}
    if name == "decimal" and kind in ("bytes", "fixed"):
        precision, scale = found.get("precision"), found.get("scale", 0)
        if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or not precision:
            return {}
        if kind == "fixed" and precision > len(str(1 << max(8 * size - 1, 0))) - 1:
            return {}
        if precision > 76:
            raise SchemaError(
                f"a decimal of {precision} digits: at most 76 are read", hint="leave the field out, or read it as bytes"
            )
        return {"logical": name, "precision": precision, "scale": scale}
    if name == "uuid" and (kind == "string" or (kind == "fixed" and size == 16)):
        return {"logical": name}
    if name == "duration" and kind == "fixed" and size == 12:
        return {"logical": name}
    return {"logical": name} if (kind, name) in _TIMES else {}


def _wrong(what: str) -> SchemaError:
    return SchemaError(f"not an Avro schema: {what}", hint="the Avro specification says what a schema may hold")
