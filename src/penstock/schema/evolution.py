"""What a target makes of rows whose schema has changed: the columns it then has, and the rows as it takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.changes.columns import Op, is_changelog, own_columns
from penstock.changes.old_key import unpack_keys
from penstock.config import Config
from penstock.errors import DataError, SchemaError, reason_of
from penstock.schema import ChangeKind, SchemaChange, key_of

EXACT = 1 << 53
"""Up to here a double holds every whole number."""

Widens: TypeAlias = Callable[[pa.DataType, pa.DataType], bool]


class Policy(StrEnum):
    """What happens when rows come with columns or types that the target does not have."""

    EVOLVE = "evolve"
    FREEZE = "freeze"
    DISCARD_ROW = "discard_row"
    DISCARD_VALUE = "discard_value"

    @property
    def discards(self) -> bool:
        return self in (Policy.DISCARD_ROW, Policy.DISCARD_VALUE)


class EvolutionConfig(Config):
    """The option that every sink with a schema of its own has."""

    schema_evolution: Policy = Policy.EVOLVE
    """What happens to rows that the target has no place for: `evolve` adds their columns and widens its types, and stops
    at what cannot be followed; `freeze` stops at any new or retyped column; `discard_row` leaves such rows out and
    `discard_value` such values, counted and logged. A route's own `schema_evolution` takes precedence."""


def diff(old: pa.Schema, new: pa.Schema) -> list[SchemaChange]:
    """Columns added, dropped and retyped from `old` to `new`; the order of columns does not count."""
    before, after = ({field.name: field.type for field in schema} for schema in (old, new))
    return [
        *(SchemaChange(ChangeKind.DROPPED, name, before[name], None) for name in before if name not in after),
        *(
            SchemaChange(ChangeKind.RETYPED, name, before[name], after[name])
            for name in before
            if name in after and before[name] != after[name]
        ),
        *(SchemaChange(ChangeKind.ADDED, name, None, after[name]) for name in after if name not in before),
    ]


def widens(old: pa.DataType, new: pa.DataType) -> bool:
    """
    True when `new` is of the same kind as `old` and holds every value of it; also when both hold the same values.

    A struct may have more fields: they are null in values of the old one.
    """
    if old == new or types.is_null(old):
        return True
    if types.is_dictionary(old) or types.is_dictionary(new):
        return widens(*(each.value_type if types.is_dictionary(each) else each for each in (old, new)))
    if types.is_integer(old) and types.is_integer(new):
        (low, high), (lower, higher) = _range(old), _range(new)
        return lower <= low and high <= higher
    if types.is_floating(old) and types.is_floating(new):
        return bool(old.bit_width <= new.bit_width)
    if types.is_decimal(old) and types.is_decimal(new):
        return bool(old.scale <= new.scale and old.precision - old.scale <= new.precision - new.scale)
    if types.is_date(old):
        return types.is_date(new) or (types.is_timestamp(new) and new.tz is None and new.unit != "ns")
    if types.is_timestamp(old) and types.is_timestamp(new):
        return (old.tz is None) == (new.tz is None) and _UNITS.index(old.unit) <= _UNITS.index(new.unit) < 3
    if _is_list(old) and _is_list(new):
        return widens(old.value_type, new.value_type)
    if types.is_struct(old) and types.is_struct(new):
        after = {each.name: each.type for each in new}
        return all(each.name in after and widens(each.type, after[each.name]) for each in old)
    return (_is_text(old) and _is_text(new)) or ((_is_bytes(old) or types.is_fixed_size_binary(old)) and _is_bytes(new))


def becomes_double(old: pa.DataType, new: pa.DataType) -> bool:
    """True for a column of whole numbers that gets doubles: a wider type for values up to 2**53, and for those alone."""
    return bool(types.is_integer(old) and types.is_float64(new))


def is_doubling(change: SchemaChange) -> bool:
    """True for a change that turns whole numbers into doubles."""
    return change.kind is ChangeKind.RETYPED and becomes_double(change.old, change.new)


def widens_or_doubles(old: pa.DataType, new: pa.DataType) -> bool:
    """As `widens`, and whole numbers become doubles. Who says so looks at the stored values first."""
    return widens(old, new) or becomes_double(old, new)


def no_exact_double(topic: str, column: str) -> SchemaError:
    """The error for a column of whole numbers that gets a fraction and holds numbers which a double would round."""
    return SchemaError(
        f"the column {column!r} of {topic} holds whole numbers beyond 2^53 in the target, and rows come with doubles, "
        "which would round them",
        code="PEN-4001",
        hint="cast the column to int64, a decimal or text in the route's SQL, or write to a new target",
    )


def follow(
    topic: str, old: pa.Schema, new: pa.Schema, policy: Policy = Policy.EVOLVE, sink_widens: Widens = widens
) -> pa.Schema:
    """
    The target's columns once rows of the schema `new` are written to one that has `old`.

    A column that is no longer sent stays, and one that is sent with a narrower type keeps its own. `sink_widens` says
    which types of stored columns the target can widen.
    """
    columns = {each.name: each for each in old}
    for change in diff(old, new):
        if change.kind is ChangeKind.DROPPED or policy.discards:
            continue
        if change.kind is ChangeKind.ADDED:
            if policy is Policy.EVOLVE:
                columns[change.column] = pa.field(change.column, change.new)
            elif not types.is_null(change.new):
                raise refusal(topic, change.column, None, change.new, policy)
        elif not widens_or_doubles(change.new, change.old):
            if policy is not Policy.EVOLVE or not sink_widens(change.old, change.new):
                raise refusal(topic, change.column, change.old, change.new, policy, widens(change.old, change.new))
            columns[change.column] = columns[change.column].with_type(change.new)
    return pa.schema(list(columns.values()))


def fit(
    topic: str, batch: pa.RecordBatch, target: pa.Schema, policy: Policy, key: Sequence[str] | None = None
) -> tuple[pa.RecordBatch, int]:
    """
    The rows as a target with the columns `target` takes them, and how many of them lost something by the policy.

    Columns that the batch does not have are not added. Under `discard_row` a row is lost that has a value without a
    place, under `discard_value` that value; values of the key are never made null. A delete is never lost for its other
    columns, and neither is the leaving of an old key: only a key that the target cannot hold has nothing to delete.
    """
    key = key_of(batch.schema) if key is None else key
    names, columns = [], []
    without_place: list[tuple[str, pa.Array]] = []
    own = set(own_columns(batch.schema))
    if all(
        each.name not in own or (target.get_field_index(each.name) >= 0 and each.type == target.field(each.name).type)
        for each in batch.schema
    ):
        return batch, 0  # the usual case needs no new batch
    for field, values in zip(batch.schema, batch.columns, strict=True):
        if field.name in own and field.name not in target.names:
            if not types.is_null(field.type):
                if not policy.discards or field.name in key:
                    raise refusal(topic, field.name, None, field.type, policy)
                without_place.append((field.name, values.is_valid()))
            continue
        if field.name in own and field.type != target.field(field.name).type:
            kind = target.field(field.name).type
            # A whole number that a double would round is an error of its row, or discarded.
            if widens(field.type, kind) or (becomes_double(field.type, kind) and not policy.discards):
                values = _widened(topic, field.name, values, kind)
            elif not policy.discards or (field.name in key and not _is_testable(field.type, kind)):
                raise refusal(topic, field.name, kind, field.type, policy, widens(kind, field.type))
            else:
                values, lost = _narrowed(values, kind)
                without_place.append((field.name, lost))
            field = field.with_type(kind).with_nullable(True)
        names.append(field)
        columns.append(values)
    rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema(names, batch.schema.metadata))
    without_place = [(name, lost) for name, lost in without_place if lost.true_count]
    if not without_place:
        return rows, 0
    if policy is Policy.DISCARD_VALUE:
        for name, _ in without_place:
            if name in key:
                raise refusal(topic, name, target.field(name).type, batch.schema.field(name).type, policy)
        return rows, _any(without_place).true_count
    return _without(rows, without_place, key)


def slimmed(rows: pa.RecordBatch, known: pa.Schema | None) -> pa.RecordBatch:
    """
    The rows without what a target lacks and no row has a value in: columns, and fields of structs at any depth.

    One message is enough to have a column in all rows that follow it; a target that cannot follow refuses only those with
    a value there. `known`: the columns of the target; None: it has none yet.
    """
    own, fields, columns = set(own_columns(rows.schema)), [], []
    for field, values in zip(rows.schema, rows.columns, strict=True):
        there = known.field(field.name).type if known is not None and field.name in known.names else None
        if field.name in own and (there is not None or values.null_count < len(values)):
            values = _slim(values, there)
        elif field.name in own:
            continue
        fields.append(field.with_type(values.type))
        columns.append(values)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, rows.schema.metadata)) if fields else rows


def _slim(values: pa.Array, there: pa.DataType | None) -> pa.Array:
    kind = values.type
    if there is not None and values.null_count == len(values):
        return pa.nulls(len(values), there)
    if types.is_list(kind):
        inner = _slim(values.flatten(), there.value_type if there is not None and types.is_list(there) else None)
        return values if inner.type == kind.value_type else _relisted(values, inner)
    if not types.is_struct(kind):
        return values
    known = {each.name: each.type for each in there} if there is not None and types.is_struct(there) else {}
    parts = zip(kind, values.flatten(), strict=True)
    kept = [
        (f.name, _slim(part, known.get(f.name))) for f, part in parts if f.name in known or part.is_valid().true_count
    ]
    slim = pa.struct([(name, part.type) for name, part in kept])
    if not kept or slim == kind:
        return values
    return pa.StructArray.from_arrays([part for _, part in kept], fields=list(slim), mask=values.is_null())


def _relisted(values: pa.Array, inner: pa.Array) -> pa.Array:
    """The lists with other values, as `flatten` gave them."""
    lengths = pc.fill_null(pc.list_value_length(values), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths.cast(pa.int32()))])
    kind = pa.list_(values.type.value_field.with_type(inner.type))
    return pa.ListArray.from_arrays(offsets, inner, type=kind, mask=values.is_null())


def refusal(
    topic: str,
    column: str,
    old: pa.DataType | None,
    new: pa.DataType | None,
    policy: Policy,
    is_wider: bool = False,
) -> SchemaError:
    """The error for a column that the target does not take."""
    what = "is not in the target" if old is None else f"is {old} in the target"
    hint = f"cast it to {old} in the route's SQL, change the column in the target, or write to a new one"
    if policy.discards:
        hint = f"{hint}: a value of the key is never discarded"
    elif old is None:
        hint = 'add the column to the target, leave it out in the route\'s SQL, or set schema_evolution = "evolve"'
    elif is_wider and policy is Policy.FREEZE:
        hint = f'widen the column in the target, {hint}, or set schema_evolution = "evolve"'
    elif is_wider:
        hint = f"the target cannot widen the column in place: {hint}"
    return SchemaError(
        f'the column {column!r} of {topic} {what}, and rows come with {new} (schema_evolution = "{policy}")',
        code="PEN-4001",
        hint=hint,
    )


def _without(
    rows: pa.RecordBatch, without_place: Sequence[tuple[str, pa.Array]], key: Sequence[str]
) -> tuple[pa.RecordBatch, int]:
    """Leave out what has no place: a delete only by its key, and of a row that was moved, its old key is deleted."""
    lost = _any(without_place)
    if not is_changelog(rows.schema):
        return rows.filter(pc.invert(lost)), lost.true_count
    is_gone = pc.is_in(rows.column("_op"), value_set=pa.array([Op.DELETE.value, Op.TRUNCATE.value]))
    by_key = [(name, each) for name, each in without_place if name in key]
    lost = pc.or_(pc.and_not(lost, is_gone), _any(by_key) if by_key else pa.repeat(False, rows.num_rows))
    count = lost.true_count
    if "_old_key" in rows.schema.names:
        moved = pc.and_(lost, pc.and_not(rows.column("_old_key").is_valid(), is_gone))
        if moved.true_count:
            rows, lost = _as_deletes(rows, moved, key), pc.and_not(lost, moved)
    return rows.filter(pc.invert(lost)), count


def _as_deletes(rows: pa.RecordBatch, moved: pa.Array, key: Sequence[str]) -> pa.RecordBatch:
    """The rows, with those that `moved` names turned into deletes of their old keys."""
    old = unpack_keys(rows.column("_old_key").filter(moved), pa.schema([rows.schema.field(name) for name in key]))
    columns = []
    for field, values in zip(rows.schema, rows.columns, strict=True):
        if field.name in key:
            values = pc.replace_with_mask(values, moved, old.column(field.name).combine_chunks().cast(field.type))
        elif field.name == "_op":
            values = pc.if_else(moved, pa.scalar(Op.DELETE.value, field.type), values)
        elif field.name not in ("_position", "_txid", "_committed_at"):
            values = _nulled(values, moved)
        columns.append(values)
    schema = pa.schema(
        [each if each.name in ("_op", "_position", *key) else each.with_nullable(True) for each in rows.schema],
        rows.schema.metadata,
    )
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def widened(values: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """The values in a type that `widens` allows; the far ends of dates, which are the infinities, stay at the far end."""
    if types.is_date32(values.type) and kind == pa.timestamp("us"):
        days = values.cast(pa.int32())
        ends = pc.is_in(days, value_set=pa.array([-_LAST_DAY, _LAST_DAY], pa.int32()))
        if pc.any(ends).as_py():
            far = pc.if_else(pc.greater(days, 0), _LAST_TIME, -_LAST_TIME).cast(kind)
            return pc.if_else(ends, far, _nulled(values, ends).cast(kind))
    return values.cast(kind)


def _widened(topic: str, name: str, values: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return widened(values, kind)
    except pa.ArrowInvalid as error:  # a date so far away that finer units cannot count to it, a number beyond 2**53
        raise DataError(f"a value of the column {name!r} of {topic} does not fit {kind}: {reason_of(error)}") from error


def _narrowed(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """The values that `kind` holds as such, null for the others and for such parts of structs and lists; and which those are."""
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    valid = values.is_valid()
    if not _is_testable(values.type, kind):
        return pa.nulls(len(values), kind), valid
    if types.is_struct(kind):
        return _narrowed_struct(values, kind)
    if _is_list(kind):
        return _narrowed_list(values, kind)
    if types.is_integer(kind) or types.is_decimal(kind) or types.is_integer(values.type):
        low, high = _bounds(kind, values.type)
        within = pc.and_(pc.greater_equal(values, low), pc.less_equal(values, high))
        values = _nulled(values, pc.invert(pc.fill_null(within, False)))
    cast = values.cast(kind, safe=False)
    same = pc.equal(cast.cast(values.type, safe=False), values)
    if types.is_floating(values.type):
        same = pc.or_(same, pc.is_nan(values))
    same = pc.fill_null(same, False)
    return _nulled(cast, pc.invert(same)), pc.and_not(valid, same)


def _narrowed_struct(values: pa.StructArray, kind: pa.StructType) -> tuple[pa.Array, pa.Array]:
    """Each field by itself; a field that only the values have is lost where it is not null."""
    given = dict(zip((each.name for each in values.type), values.flatten(), strict=True))
    lost = [("", pa.repeat(False, len(values)))]
    columns = []
    for each in kind:
        column, gone = _part(given.pop(each.name, pa.nulls(len(values), each.type)), each.type)
        columns.append(column)
        lost.append((each.name, gone))
    lost += [(name, column.is_valid()) for name, column in given.items()]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=values.is_null()), _any(lost)


def _narrowed_list(values: pa.ListArray, kind: pa.ListType) -> tuple[pa.Array, pa.Array]:
    """Each element by itself; a list that loses one, or a part of one, is among those that lost something."""
    elements, gone = _part(pc.list_flatten(values), kind.value_type)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(
        np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if types.is_large_list(kind) else pa.int32()
    )
    of = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
    lost = np.zeros(len(values), bool)
    lost[pc.list_parent_indices(values).filter(gone).to_numpy(zero_copy_only=False)] = True
    return of.from_arrays(offsets, elements, type=kind, mask=values.is_null()), pa.array(lost)


def _part(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    if widens(values.type, kind):
        return widened(values, kind), pa.repeat(False, len(values))
    return _narrowed(values, kind)


def _is_testable(old: pa.DataType, new: pa.DataType) -> bool:
    """True for types of one kind, of which some values may fit the other."""
    if types.is_dictionary(old):
        old = old.value_type
    for is_kind in (types.is_integer, types.is_floating, types.is_decimal):
        if is_kind(old) and is_kind(new):
            return True
    if becomes_double(old, new) or (types.is_struct(old) and types.is_struct(new)):
        return True
    if _is_list(old) and _is_list(new):
        return widens(old.value_type, new.value_type) or _is_testable(old.value_type, new.value_type)
    if types.is_timestamp(old) and types.is_timestamp(new):
        return (old.tz is None) == (new.tz is None)
    return bool(types.is_timestamp(old) and old.tz is None and types.is_date(new))


def _nulled(values: pa.Array, where: pa.Array) -> pa.Array:
    return pc.if_else(where, pa.scalar(None, values.type), values)


def _any(masks: Sequence[tuple[str, pa.Array]]) -> pa.Array:
    found = masks[0][1]
    for _, each in masks[1:]:
        found = pc.or_(found, each)
    return found


_UNITS = ["s", "ms", "us", "ns"]
_LAST_DAY, _LAST_TIME = (1 << 31) - 1, (1 << 63) - 1


def _range(kind: pa.DataType) -> tuple[int, int]:
    bits = kind.bit_width
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if types.is_signed_integer(kind) else (0, (1 << bits) - 1)


def _bounds(kind: pa.DataType, values: pa.DataType) -> tuple[pa.Scalar, pa.Scalar]:
    """The least and the greatest number of both types, in that of the values."""
    if types.is_integer(kind):
        (low, high), (lower, higher) = _range(kind), _range(values)
        return pa.scalar(max(low, lower), values), pa.scalar(min(high, higher), values)
    if types.is_floating(kind):
        low, high = _range(values)
        return pa.scalar(max(low, -EXACT), values), pa.scalar(min(high, EXACT), values)
    digits = min(kind.precision - kind.scale, values.precision - values.scale) + values.scale
    most = Decimal((0, (9,) * digits, -values.scale))
    return pa.scalar(most.copy_negate(), values), pa.scalar(most, values)


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind))
