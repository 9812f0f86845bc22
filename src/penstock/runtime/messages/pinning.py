"""
Columns that earlier epochs have fixed, for formats that infer them.

No target follows a column from whole numbers to fractions: rows with `{"v": 1}` are there, and `{"v": 2.5}` comes. So the
column stays what it is. A message with a fraction is a failure, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

EXACT = 2.0**53
"""Up to here a double holds every whole number; beyond, nobody can say which one was sent."""

FRACTION = ("column.fraction", "a column that holds whole numbers since an earlier epoch has a fraction here")


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


def pin(columns: pa.Schema, known: pa.Schema) -> pa.Schema:
    """The columns with the types that earlier epochs have fixed."""
    old = {each.name: each.type for each in known}
    return pa.schema(
        [each.with_type(pinned(old.get(each.name, each.type), each.type)) for each in columns], columns.metadata
    )


def fractions(rows: pa.RecordBatch, wanted: pa.Schema) -> npt.NDArray[np.bool_]:
    """Which rows hold a number that the wanted whole-number columns have no place for."""
    bad = np.zeros(rows.num_rows, bool)
    for at, field in enumerate(wanted):
        if rows.schema.field(at).type != field.type:
            bad |= _misfits(rows.column(at), field.type)
    return bad


def narrowed(rows: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Rows without fractions, in the wanted types."""
    arrays = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(rows.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _misfits(values: pa.Array, kind: pa.DataType) -> npt.NDArray[np.bool_]:
    if types.is_integer(kind) and types.is_floating(values.type):
        numbers = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)
        return np.asarray((np.floor(numbers) != numbers) | (np.abs(numbers) > EXACT))
    if types.is_struct(kind):
        bad = np.zeros(len(values), bool)
        for at, child in enumerate(values.flatten()):  # with the nulls of the structs
            if child.type != kind.field(at).type:
                bad |= _misfits(child, kind.field(at).type)
        return bad
    return _in_lists(values, lambda items: _misfits(items, kind.value_type))


def _in_lists(values: pa.Array, misfits: Callable[[pa.Array], npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Which lists hold an item that does not fit."""
    bad = np.zeros(len(values), bool)
    parents = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
    bad[parents[misfits(values.flatten())]] = True
    return bad
