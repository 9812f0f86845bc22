"""What types files have, how they come together, and which values certainly do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from penstock.formats.exact import ROUNDED, rounds

_EMPTY = b"penstock.empty_lists"


def empty_lists(schema: pa.Schema | None) -> set[str]:
    """Columns whose lists had no items when their type was chosen: it is text, and the items of later files become text."""
    return set(json.loads((schema.metadata or {}).get(_EMPTY, b"[]"))) if schema is not None else set()


def _with_empty_lists(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    named = sorted(set(names).intersection(schema.names))
    return schema.with_metadata({_EMPTY: json.dumps(named).encode()} if named else None)


def merge(
    old: pa.Schema | None, new: pa.Schema | None, *, widen: Callable[[pa.DataType, pa.DataType], pa.DataType]
) -> pa.Schema:
    """The old columns, in their order, and after them the columns that only the new schema has."""
    fields = {field.name: field.type for field in old or ()}
    before, now = empty_lists(old), empty_lists(new)
    empty = set(before)
    for field in new or ():
        name = field.name
        if name not in fields:
            fields[name] = field.type
            empty |= {name} & now
        elif name in before and name not in now and widen in (widest, widest_text) and pa.types.is_list(field.type):
            fields[name] = field.type  # no row was read yet
            empty.discard(name)
        elif name in before or name not in now:
            fields[name] = widen(fields[name], field.type)
    return _with_empty_lists(pa.schema(list(fields.items())), empty)


def widest(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """A type that holds both, if there is one: for files that are seen together before any row was read."""
    try:
        pair = [pa.schema([("x", each)]) for each in (old, new)]
        return pa.unify_schemas(pair, promote_options="permissive").field("x").type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return old


def widest_text(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """The same for CSV, where everything can be read as text."""
    kind = widest(old, new)
    return kind if kind != old or old == new or widest(new, old) == old else pa.string()


def widened(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """The old type, or a wider one that holds the new numbers too; structs may gain fields. For the files to come."""
    if _is_number(old) and _is_number(new):
        return widest(old, new)
    return _inside(old, new, widened)


def fixed(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """The old type, which other rows of the epoch are read as; only structs may gain fields."""
    return _inside(old, new, fixed)


def _inside(
    old: pa.DataType, new: pa.DataType, widen: Callable[[pa.DataType, pa.DataType], pa.DataType]
) -> pa.DataType:
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        return pa.struct(list(merge(pa.schema(list(old)), pa.schema(list(new)), widen=widen)))
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(widen(old.value_type, new.value_type))
    return old


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def inferred_from_json(schema: pa.Schema) -> pa.Schema:
    """
    An inferred JSON schema with few guesses: text that looks like a time stays text, what was never filled is left out.

    Of a list that was always empty the items are taken for text: left out, its rows would hold a null instead of a list.
    """
    types = ((field.name, text_time(field.type)) for field in schema)
    empty = [field.name for field in schema if pa.types.is_list(field.type) and pa.types.is_null(field.type.value_type)]
    return _with_empty_lists(pa.schema([(name, kind) for name, kind in types if kind is not None]), empty)


def text_time(kind: pa.DataType) -> pa.DataType | None:
    """An inferred type without times, which are text in JSON; None if nothing shows what it is."""
    if pa.types.is_null(kind):
        return None
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(text_time(kind.value_type) or pa.string())
    if pa.types.is_struct(kind):
        inside = inferred_from_json(pa.schema(list(kind)))
        return pa.struct(list(inside)) if len(inside) else None
    return kind


def inferred_from_csv(kind: pa.DataType) -> pa.DataType:
    """What the first rows look like, wide enough for the others."""
    if pa.types.is_null(kind):
        return pa.string()
    return pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else kind


def flat(schema: pa.Schema) -> pa.Schema:
    """A file's schema as rows carry it: without dictionaries, which differ from file to file, and without metadata."""
    types = ((f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema)
    return pa.schema([(name, kind) for name, kind in types if not pa.types.is_null(kind)])


def fits(value: Any, kind: pa.DataType) -> bool:
    """False when Arrow certainly refuses to read a JSON value as `kind`."""
    t = pa.types
    if t.is_integer(kind):
        return type(value) is int
    if t.is_floating(kind):
        return type(value) is float or (type(value) is int and not rounds(value))
    if t.is_boolean(kind):
        return isinstance(value, bool)
    if t.is_string(kind) or t.is_binary(kind) or t.is_timestamp(kind) or t.is_date(kind) or t.is_time(kind):
        return isinstance(value, str)
    if t.is_list(kind):
        return isinstance(value, list)
    return isinstance(value, dict) if t.is_struct(kind) else True


def csv_misfits(rows: pa.RecordBatch, schema: pa.Schema) -> dict[int, str]:
    """Rows of CSV text that Arrow certainly refuses to convert, and why."""
    misfits: dict[int, str] = {}
    for field, column in zip(schema, rows.columns, strict=True):
        shape = next((text for test, text in _CSV_SHAPES if test(field.type)), None)
        if shape is not None:
            good = pc.or_(pc.match_substring_regex(column, shape), pc.is_in(column, _CSV_NULLS))
            for row in pc.indices_nonzero(pc.invert(good)).to_pylist():
                misfits.setdefault(row, f"column {field.name!r} is not {field.type}")
        if pa.types.is_floating(field.type):
            for row in _rounded(column):
                misfits.setdefault(row, f"column {field.name!r} holds {ROUNDED}")
    return misfits


def _rounded(texts: pa.Array) -> list[int]:
    """Where a text is a whole number that a double cannot hold exactly."""
    long = pc.indices_nonzero(pc.match_substring_regex(texts, r"^\s*[-+]?[0-9]{16,}\s*$")).to_pylist()
    return [row for row in long if rounds(int(texts[row].as_py()))]


_CSV_NULLS = pa.array([text.encode() for text in pyarrow.csv.ConvertOptions().null_values])
_CSV_SHAPES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_integer, r"^\s*-?(\d+|0[xX][0-9a-fA-F]+)\s*$"),
    (pa.types.is_floating, r"(?i)^\s*[-+]?(\d|\.\d|inf|nan)"),
    (pa.types.is_decimal, r"^\s*[-+]?[.\d]"),
    (pa.types.is_boolean, r"(?i)^\s*(0|1|true|false)\s*$"),
    (pa.types.is_date, r"^\s*\d{4}-\d\d-\d\d"),
    (pa.types.is_timestamp, r"^\s*\d{4}-\d\d-\d\d"),
)
"""What every convertible value looks like; some that look so are refused all the same."""
