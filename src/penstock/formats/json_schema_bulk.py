"""
Which rows are certainly valid by a JSON Schema, seen from their columns.

Most schemas say little more than types, required members, choices and bounds, and most rows have all members: then the
columns show that a row is valid. What they do not show (was a member null, or missing?) is left to the validator.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.formats import WireSchema

Mask = npt.NDArray[np.bool_]

_SILENT = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly"}
)
_BOUNDS: dict[str, Callable[[pa.Array, Any], pa.Array]] = {
    "minimum": pc.greater_equal,
    "maximum": pc.less_equal,
    "exclusiveMinimum": pc.greater,
    "exclusiveMaximum": pc.less,
}
_WORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items"},
    "string": {"enum", "format"},
    "integer": set(_BOUNDS),
    "number": set(_BOUNDS),
    "boolean": set(),
}
_FORMS = {
    "date-time": r"^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):\d\d:\d\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$",
    "date": r"^\d{4}-\d\d-\d\d$",
}
_EXACT = 2**53
"""Whole numbers up to here are themselves as doubles."""


@dataclass(frozen=True)
class Check:
    """What the values of a column must be."""

    kind: str
    is_nullable: bool
    is_required: bool
    fields: dict[str, Check] = field(default_factory=dict)
    is_closed: bool = False
    items: Check | None = None
    bounds: tuple[tuple[str, int | float], ...] = ()
    choices: tuple[str, ...] | None = None
    form: str = ""


class _Beyond(Exception):
    """The schema says more than columns can show."""


@lru_cache
def check_of(schema: WireSchema) -> Check | None:
    """What rows of a schema must be; None if the columns cannot show it."""
    root = json.loads(schema.text)
    try:
        check = _check(root, root, False, frozenset())
    except _Beyond:
        return None
    closed = {each.is_closed for each in _objects(check)}
    return check if check.kind == "object" and len(closed) == 1 else None


def certain(rows: pa.RecordBatch, check: Check, is_written: bool = False) -> Mask:
    """
    The rows that are certainly valid.

    Rows that were read have times as text, and a null in them may be a missing member or a null. Rows that are to be
    written have times, and a null in them is left out unless the member is required.
    """
    found = np.full(rows.num_rows, is_written is False or _has_required(rows.schema.names, check))
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        found &= _certain(column, check.fields[name], is_written, True)
    return found


def _check(schema: Any, root: Any, is_required: bool, seen: frozenset[str]) -> Check:
    if not isinstance(schema, dict):
        raise _Beyond
    words = schema.keys() - _SILENT
    if words == {"$ref"}:
        return _referred(schema["$ref"], root, is_required, seen)
    kinds = schema.get("type", "string" if words == {"enum"} else None)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        raise _Beyond
    is_nullable = "null" in kinds
    kinds = [each for each in kinds if each != "null"]
    if len(kinds) != 1 or not words - {"type"} <= _WORDS.get(kinds[0], set()):
        raise _Beyond
    kind = kinds[0]
    check = Check(kind, is_nullable, is_required)
    if kind == "object":
        return _object(schema, root, check, seen)
    if kind == "array":
        return Check(kind, is_nullable, is_required, items=_check(schema.get("items"), root, False, seen))
    if kind == "string":
        return _string(schema, check)
    return Check(kind, is_nullable, is_required, bounds=tuple(_bounds(schema, kind)))


def _referred(reference: Any, root: Any, is_required: bool, seen: frozenset[str]) -> Check:
    if not isinstance(reference, str) or not reference.startswith("#/") or reference in seen or "~" in reference:
        raise _Beyond
    found = root
    for part in reference.split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return _check(found, root, is_required, seen | {reference})


def _object(schema: dict[str, Any], root: Any, check: Check, seen: frozenset[str]) -> Check:
    properties, required = schema.get("properties"), schema.get("required", [])
    more = schema.get("additionalProperties", True)
    if (
        not properties
        or not isinstance(more, bool)
        or not isinstance(required, list)
        or set(required) - set(properties)
    ):
        raise _Beyond
    fields = {name: _check(each, root, name in required, seen) for name, each in properties.items()}
    return Check(check.kind, check.is_nullable, check.is_required, fields, is_closed=not more)


def _string(schema: dict[str, Any], check: Check) -> Check:
    choices = schema.get("enum")
    form = schema.get("format", "")
    if (form and form not in _FORMS) or (form and choices is not None):
        raise _Beyond
    if choices is None:
        return Check(check.kind, check.is_nullable, check.is_required, form=form)
    texts = tuple(each for each in choices if isinstance(each, str))
    may_be_null = None in choices and (check.is_nullable or "type" not in schema)
    if len(texts) + (None in choices) < len(choices):
        raise _Beyond
    return Check(check.kind, may_be_null, check.is_required, choices=texts)


def _bounds(schema: dict[str, Any], kind: str) -> list[tuple[str, int | float]]:
    found = [(word, schema[word]) for word in _BOUNDS if word in schema]
    for _, bound in found:
        if isinstance(bound, bool) or not isinstance(bound, int if kind == "integer" else int | float):
            raise _Beyond
        if abs(bound) > _EXACT:
            raise _Beyond
    return found


def _objects(check: Check) -> list[Check]:
    inner = [*check.fields.values(), *([check.items] if check.items else [])]
    return [*([check] if check.kind == "object" else []), *(found for each in inner for found in _objects(each))]


def _has_required(names: list[str], check: Check) -> bool:
    return all(name in names for name, each in check.fields.items() if each.is_required)


def _certain(values: pa.Array, check: Check, is_written: bool, is_member: bool) -> Mask:
    found = np.ones(len(values), bool)
    if check.kind == "object":
        for name, child in zip((each.name for each in values.type), values.flatten(), strict=True):
            found &= _certain(child, check.fields[name], is_written, True)
    elif check.items is not None:
        bad = np.flatnonzero(~_certain(values.flatten(), check.items, is_written, False))
        found[pc.list_parent_indices(values).to_numpy()[bad]] = False
    else:
        found = _of_scalars(values, check)
    if values.null_count:
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        is_left_out = is_written and is_member and not check.is_required
        is_null_valid = check.is_nullable and (is_written or not check.is_required)
        found[is_null] = is_left_out or is_null_valid
    return found


def _of_scalars(values: pa.Array, check: Check) -> Mask:
    masks = [_BOUNDS[word](values, pa.scalar(bound, values.type)) for word, bound in check.bounds]
    if types.is_floating(values.type):  # pyarrow reads NaN, and rounds
        masks.append(pc.less_equal(pc.abs(values), float(_EXACT) if check.bounds else np.finfo(float).max))
    if check.choices is not None:
        masks.append(pc.is_in(values, value_set=pa.array(check.choices, pa.string())))
    if types.is_temporal(values.type):
        years = pc.year(values)
        masks += [pc.greater_equal(years, 1), pc.less_equal(years, 9999)]
    elif check.form:
        masks.append(pc.match_substring_regex(values, _FORMS[check.form]))
    found = np.ones(len(values), bool)
    for mask in masks:
        found &= pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return found
