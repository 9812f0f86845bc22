"""
Columns of payloads that have no schema: what a value's kind is, how kinds widen, and what two tasks found, together.

A kind is one of `null < bool`, `null < int64 < double`, `null < string`, `null < list of a kind` and `null < struct of
named kinds`. Lists widen with their items and structs field by field, and a struct gains fields. Nothing else is wider
than anything: a number never becomes text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import SchemaError

Kind: TypeAlias = "str | list[Kind] | dict[str, Kind] | None"
"""None, a scalar's name, a list with the kind of its items, or the fields of a struct. Never changed in place."""

Fields: TypeAlias = "dict[str, Kind]"

_SCALARS = {"bool": pa.bool_(), "int64": pa.int64(), "double": pa.float64(), "string": pa.string()}
_RANKS = {"bool": 1, "int64": 2, "double": 2, "string": 3}
_INT64 = range(-(1 << 63), 1 << 63)
_MISSING: Any = object()


class Misfit(Exception):
    """A value that its column cannot take."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule, self.reason = rule, reason


def merge(schemas: Iterable[pa.Schema], known: pa.Schema | None = None) -> pa.Schema:
    """
    The columns that several tasks found: those of `known` first, in their order, then the new ones by name.

    Neither the order of the schemas nor their grouping counts. Where two tasks saw a new column with kinds that cannot
    meet, one of the kinds wins, always the same: struct over list over string over number over bool. `fit` refuses the
    rows of the other task; decoded again with the merged schema as `known`, they are failures one by one.
    """
    fields: Fields = fields_of(known) if known is not None else {}
    for schema in schemas:
        merged = _meet(fields, fields_of(schema), strict=False)
        assert isinstance(merged, dict)
        fields = merged
    return schema_of(fields, known)


def fit(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with the columns of a merged schema: cast to wider types, null where a column or field is missing."""
    arrays = []
    for field in schema:
        at = rows.schema.get_field_index(field.name)
        arrays.append(
            pa.nulls(rows.num_rows, field.type) if at < 0 else _fit(rows.column(at), field.type, f"/{field.name}")
        )
    if not arrays:
        return rows
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def widen(kind: Kind, value: Any, path: str = "", depth: int = 1, max_depth: int = 1 << 30) -> Kind:
    """The kind that also takes one value, as a JSON parser gives it; `Misfit` when there is none."""
    if value is None:
        return kind
    if depth > max_depth:
        raise Misfit("json.depth", f"it is nested more than {max_depth} levels deep")
    if isinstance(value, dict):
        return _widen_struct(kind, value, path, depth, max_depth)
    if isinstance(value, list):
        if kind is None:
            kind = [None]
        if not isinstance(kind, list):
            raise _changed(path, kind, "list")
        item = kind[0]
        for each in value:
            item = widen(item, each, f"{path}/[]", depth + 1, max_depth)
        return kind if item is kind[0] else [item]
    if isinstance(value, bool | str):
        own = "bool" if isinstance(value, bool) else "string"
        if kind is not None and kind != own:
            raise _changed(path, kind, own)
        return own
    return _widen_number(kind, value, path)


def combine(kind: Kind, other: Kind) -> Kind:
    """The kind that takes all values of both; `Misfit` when there is none."""
    return _meet(kind, other, strict=True)


def fields_of(schema: pa.Schema) -> Fields:
    """The kinds of a schema's columns; times, which pyarrow infers from text, are text."""
    return {field.name: kind_of(field.type, field.name) for field in schema}


def kind_of(kind: pa.DataType, name: str) -> Kind:
    """The kind of an Arrow type."""
    if types.is_null(kind):
        return None
    if types.is_struct(kind):
        return {field.name: kind_of(field.type, name) for field in kind}
    if types.is_list(kind):
        return [kind_of(kind.value_type, name)]
    found = "string" if types.is_timestamp(kind) else next((n for n, each in _SCALARS.items() if each == kind), None)
    if found is None:
        raise SchemaError(
            f"the column {name!r} is {kind}, which no inferred column is",
            hint="inferred columns are bool, int64, double, string, and lists and structs of them",
        )
    return found


def schema_of(fields: Fields, known: pa.Schema | None = None) -> pa.Schema:
    """The columns of these kinds, those of `known` first and the others by name."""
    ordered = _ordered(fields, () if known is None else known.names)
    return pa.schema([(name, type_of(fields[name], _known_type(known, name))) for name in ordered])


def type_of(kind: Kind, known: pa.DataType | None = None) -> pa.DataType:
    """The Arrow type of a kind; the fields of structs in the order of `known`, and then by name."""
    if kind is None:
        return pa.null()
    if isinstance(kind, str):
        return _SCALARS[kind]
    if isinstance(kind, list):
        inner = known.value_type if known is not None and types.is_list(known) else None
        return pa.list_(type_of(kind[0], inner))
    if known is not None and not types.is_struct(known):
        known = None
    ordered = _ordered(kind, () if known is None else [field.name for field in known])
    return pa.struct([(name, type_of(kind[name], _known_type(known, name))) for name in ordered])


def without(fields: Fields, scalars: frozenset[str | None]) -> Fields:
    """The columns and fields but for those whose kind is one of these, a list of these, or a struct of nothing else."""
    kept = {name: _without(kind, scalars) for name, kind in fields.items()}
    return {name: kind for name, kind in kept.items() if kind is not None}


def keys_of(kind: Kind) -> Iterator[tuple[str, Kind]]:
    """Every column and field in a kind, however deep, by its own name."""
    if isinstance(kind, dict):
        for name, each in kind.items():
            yield name, each
            yield from keys_of(each)
    elif isinstance(kind, list):
        yield from keys_of(kind[0])


def depth_of(kind: Kind) -> int:
    """How deep a kind is nested; a struct of scalars is 1."""
    if isinstance(kind, dict):
        return 1 + max(map(depth_of, kind.values()), default=0)
    if isinstance(kind, list):
        return 1 + depth_of(kind[0])
    return 0


def size_of(kind: Kind) -> int:
    """How many columns and fields a struct has in all."""
    if isinstance(kind, dict):
        return len(kind) + sum(map(size_of, kind.values()))
    return size_of(kind[0]) if isinstance(kind, list) else 0


def _widen_struct(kind: Kind, value: Mapping[str, Any], path: str, depth: int, max_depth: int) -> Kind:
    if kind is None:
        kind = {}
    if not isinstance(kind, dict):
        raise _changed(path, kind, "struct")
    changed: Fields = {}
    for name, each in value.items():
        old = kind.get(name, _MISSING)
        new = widen(None if old is _MISSING else old, each, f"{path}/{name}", depth + 1, max_depth)
        if new is not old:
            changed[name] = new
    return {**kind, **changed} if changed else kind


def _widen_number(kind: Kind, value: int | float, path: str) -> Kind:
    if kind is not None and kind not in ("int64", "double"):
        raise _changed(path, kind, "number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Misfit("json.number", f"{path} is a number beyond the range of double")
        return "double"
    if value not in _INT64:
        if kind != "double":
            raise Misfit("json.number", f"{path} is a whole number of more than 64 bits")
        try:
            float(value)
        except OverflowError:
            raise Misfit("json.number", f"{path} is a number beyond the range of double") from None
    return kind or "int64"


def _meet(kind: Kind, other: Kind, strict: bool, path: str = "") -> Kind:
    if kind is None or other is None or kind == other:
        return other if kind is None else kind
    if isinstance(kind, dict) and isinstance(other, dict):
        return {
            name: _meet(kind.get(name), other.get(name), strict, f"{path}/{name}")
            for name in dict.fromkeys([*kind, *other])
        }
    if isinstance(kind, list) and isinstance(other, list):
        return [_meet(kind[0], other[0], strict, f"{path}/[]")]
    if _rank(kind) == _rank(other):
        return "double"
    if strict:
        raise _changed(path, kind, _name(other))
    return max(kind, other, key=_rank)


def _without(kind: Kind, scalars: frozenset[str | None]) -> Kind:
    if isinstance(kind, dict):
        return without(kind, scalars) or None
    if isinstance(kind, list):
        item = _without(kind[0], scalars)
        return None if item is None else [item]
    return None if kind in scalars else kind


def _rank(kind: Kind) -> int:
    if isinstance(kind, str):
        return _RANKS[kind]
    return 0 if kind is None else 4 if isinstance(kind, list) else 5


def _name(kind: Kind) -> str:
    if isinstance(kind, str):
        return kind
    return "null" if kind is None else "list" if isinstance(kind, list) else "struct"


def _changed(path: str, kind: Kind, other: str) -> Misfit:
    return Misfit("json.type", f"{path} is {_name(kind)} in other rows and {other} here")


def _ordered(names: Iterable[str], first: Iterable[str]) -> list[str]:
    every = set(names)
    known = [name for name in first if name in every]
    return [*known, *sorted(every.difference(known))]


def _known_type(known: pa.Schema | pa.StructType | None, name: str) -> pa.DataType | None:
    if known is None:
        return None
    at = known.get_field_index(name)
    return known.field(at).type if at >= 0 else None


def _fit(values: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    if values.type == kind:
        return values
    if types.is_null(values.type):
        return pa.nulls(len(values), kind)
    if types.is_struct(values.type) and types.is_struct(kind):
        own = {field.name: array for field, array in zip(values.type, _children(values), strict=True)}
        children = [
            _fit(own[field.name], field.type, f"{path}/{field.name}")
            if field.name in own
            else pa.nulls(len(values), field.type)
            for field in kind
        ]
        mask = values.is_null() if values.null_count else None
        if not children:
            return values
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if types.is_list(values.type) and types.is_list(kind):
        items = _fit(values.values, kind.value_type, f"{path}/[]")
        bitmap = values.buffers()[0]
        return pa.Array.from_buffers(
            kind, len(values), [bitmap, values.buffers()[1]], values.null_count, values.offset, [items]
        )
    if types.is_int64(values.type) and types.is_float64(kind):
        return pc.cast(values, kind, safe=False)
    raise SchemaError(
        f"the column {path} is {values.type} in these rows and {kind} in those of another task",
        hint="decode the payloads again with the merged columns as the known ones",
    )


def _children(values: pa.StructArray) -> list[pa.Array]:
    """The fields as they are, without the nulls of the struct itself, and cut to its rows."""
    return [values.field(i) for i in range(values.type.num_fields)]
