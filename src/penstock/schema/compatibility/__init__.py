"""
Whether a new version of a schema fits the earlier ones.

    found = incompatibilities(Compatibility.BACKWARD, earlier=[first, second], new=third)
    for each in found:
        print(each)          # Order.amount: no default (required): earlier data does not have it

Everything here is a pure function of the schemas' texts. One file per schema type says what a reader can make of a
writer's data; which pairs are asked, and in which direction, is said here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType

from penstock.errors import SchemaError
from penstock.formats import WireSchema

TYPES = ("avro", "json_schema", "protobuf")
"""The schema types that a registry holds. Each has a module here, with `parse(schema)` and `reads(reader, writer)`."""


DEEPEST = 150
"""Levels of JSON in a schema."""


class Compatibility(StrEnum):
    """What a new version must keep: `backward` is "the new schema reads data of the last version"."""

    NONE = "none"
    BACKWARD = "backward"
    BACKWARD_TRANSITIVE = "backward_transitive"
    FORWARD = "forward"
    FORWARD_TRANSITIVE = "forward_transitive"
    FULL = "full"
    FULL_TRANSITIVE = "full_transitive"

    @property
    def is_backward(self) -> bool:
        """New readers read old data."""
        return self.startswith(("backward", "full"))

    @property
    def is_forward(self) -> bool:
        """Old readers read new data."""
        return self.startswith(("forward", "full"))

    @property
    def is_transitive(self) -> bool:
        """Against every earlier version, not only the last."""
        return self.endswith("transitive")


@dataclass(frozen=True)
class Incompatibility:
    """One reason why a reader cannot use a writer's data."""

    path: str
    """The field: `Order.lines[].price`; empty: the whole schema, or not known."""
    rule: str
    """What is broken, a stable name such as `avro.missing_default`."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message} ({self.rule})" if self.path else f"{self.message} ({self.rule})"


def incompatibilities(mode: Compatibility, earlier: Sequence[WireSchema], new: WireSchema) -> list[Incompatibility]:
    """Why `new` may not follow the `earlier` versions, oldest first; empty: it may."""
    if mode is Compatibility.NONE or not earlier:
        parsed(new)
        return []
    found: dict[Incompatibility, None] = {}
    for old in earlier if mode.is_transitive else earlier[-1:]:
        found |= dict.fromkeys(_between(mode, old, new))
    return list(found)


def parsed(schema: WireSchema) -> object:
    """The schema as its module has it; `SchemaError` for a text that is no schema of its type."""
    return _module(schema).parse(schema)


def same(one: WireSchema, other: WireSchema) -> bool:
    """True when both are one schema: only blanks differ."""
    return content(one) == content(other)


def content(schema: WireSchema) -> str:
    """What two texts of one schema have in common: without the blanks that carry no meaning."""
    if schema.type == "protobuf":
        lines = (" ".join(line.split()) for line in schema.text.splitlines())
        text = "\n".join(line for line in lines if line)
    else:
        # The order of keys is kept: that of properties is the order of columns.
        text = json.dumps(load_json(schema), separators=(",", ":"), ensure_ascii=False)
    references = [(name, content(each)) for name, each in schema.references]
    return json.dumps([schema.type, text, references], ensure_ascii=False)


def load_json(schema: WireSchema) -> object:
    """The JSON that an Avro schema or a JSON Schema is written in."""
    try:
        found = json.loads(schema.text)
    except (ValueError, RecursionError) as error:
        raise invalid(schema, f"it is not JSON: {error}") from error
    level = [found]
    for _ in range(DEEPEST):
        level = [part for each in level if isinstance(each, dict | list) for part in _parts(each)]
    if level:
        raise invalid(schema, f"it is nested in more than {DEEPEST} levels")
    return found


def invalid(schema: WireSchema, reason: str) -> SchemaError:
    """The error for a text that is no schema of its type."""
    name = f" of {schema.subject}" if schema.subject else ""
    return SchemaError(
        f"the {schema.type} schema{name} is not valid: {reason}", code="PEN-4031", hint="correct the schema file"
    )


def _parts(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


def _between(mode: Compatibility, old: WireSchema, new: WireSchema) -> list[Incompatibility]:
    if old.type != new.type:
        return [Incompatibility("", "type", f"the subject holds {old.type} schemas, and this one is {new.type}")]
    module = _module(new)
    before, after = parsed(old), parsed(new)
    found: list[Incompatibility] = []
    if mode.is_backward:
        found += module.reads(after, before)
    if mode.is_forward:
        found += module.reads(before, after)
    if hasattr(module, "reused"):
        found += module.reused(before, after)
    return found


def _module(schema: WireSchema) -> ModuleType:
    if schema.type not in TYPES:
        raise SchemaError(
            f"{schema.type!r} is no type of schema", code="PEN-4031", hint=f"the types are {', '.join(TYPES)}"
        )
    return importlib.import_module(f"{__name__}.{schema.type}")
