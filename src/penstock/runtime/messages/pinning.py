"""
Columns that earlier epochs have fixed, for formats that infer them.

Rows with `{"v": 1}` are in the targets, and `{"v": 2.5}` comes. If every target can turn the column into doubles, it becomes
one. If not (a target cannot follow, or holds a number that a double would round), it stays what it is: a message with a
fraction is a failure, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.formats import Failures, Positions

EXACT = 2.0**53
"""Up to here a double holds every whole number; beyond, nobody can say which one was sent."""

FRACTION = (
    "column.fraction",
    "a column that holds whole numbers since an earlier epoch has a fraction here, and a target cannot follow",
)


def pinned(known: pa.DataType, found: pa.DataType) -> pa.DataType:
    """The type that was found, with whole numbers where they are known; what is new in it stays as it was found."""
    if types.is_integer(known) and types.is_floating(found):
        return known
    if types.is_struct(known) and types.is_struct(found):
        old = {each.name: each.type for each in known}
        return pa.struct([each.with_type(pinned(old.get(each.name, each.type), each.type)) for each in found])
    if types.is_list(known) and types.is_list(found):
        return pa.list_(pinned(known.value_type, found.value_type))
    return found


def has_doubling(known: pa.DataType, found: pa.DataType) -> bool:
    """True if whole numbers became doubles, in the type itself or within it."""
    return bool(pinned(known, found) != found)


def doubled(known: pa.Schema, found: pa.Schema) -> list[str]:
    """The known columns in which whole numbers became doubles."""
    return [each.name for each in known if has_doubling(each.type, found.field(each.name).type)]


def pin(columns: pa.Schema, known: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The columns, those of these names with the types that earlier epochs have fixed."""
    old = {each.name: each.type for each in known if each.name in names}
    return pa.schema(
        [each.with_type(pinned(old.get(each.name, each.type), each.type)) for each in columns], columns.metadata
    )


def fractions(rows: pa.RecordBatch, wanted: pa.Schema, largest: float = EXACT) -> npt.NDArray[np.bool_]:
    """
    Which rows hold a number that the wanted whole-number columns have no place for: with a fraction, or beyond `largest`.

    Beyond 2**53 a number that was read as a double may be another one, and still be in its place read by itself.
    """
    bad = np.zeros(rows.num_rows, bool)
    for at, field in enumerate(wanted):
        if rows.schema.field(at).type != field.type:
            bad |= _misfits(rows.column(at), field.type, largest)
    return bad


def rounded(failures: Failures) -> tuple[Positions, Failures]:
    """Where a record failed only since a double would round its number, and the other failures."""
    found = [*zip(failures.positions.tolist(), failures.rules, failures.reasons, strict=True)]
    others = {position: (rule, reason) for position, rule, reason in found if not rule.endswith(".exact")}
    return np.array([each[0] for each in found if each[0] not in others], np.int64), Failures.of(others)


def narrowed(rows: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Rows without fractions, in the wanted types."""
    arrays = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(rows.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _misfits(values: pa.Array, kind: pa.DataType, largest: float) -> npt.NDArray[np.bool_]:
    if types.is_integer(kind) and types.is_floating(values.type):
        numbers = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)
        return np.asarray((np.floor(numbers) != numbers) | (np.abs(numbers) > largest))
    if types.is_struct(kind):
        bad = np.zeros(len(values), bool)
        for at, child in enumerate(values.flatten()):  # with the nulls of the structs
            if child.type != kind.field(at).type:
                bad |= _misfits(child, kind.field(at).type, largest)
        return bad
    return _in_lists(values, lambda items: _misfits(items, kind.value_type, largest))


def _in_lists(values: pa.Array, misfits: Callable[[pa.Array], npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Which lists hold an item that does not fit."""
    bad = np.zeros(len(values), bool)
    parents = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
    bad[parents[misfits(values.flatten())]] = True
    return bad
