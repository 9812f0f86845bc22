"""
Columns that tasks side by side took, each for itself, and that a target cannot have together.

One task meets `v` and another `V`: each of them is a fine column of a new Delta table, and the commit could have only one.
A task that meets both makes letters of the rows that come second. So that it is the same between tasks, each says which
columns its sinks took; if a sink refuses them together, those of the later tasks are barred, and the range is staged again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import SchemaError

Path = tuple[str, ...]
"""A column or a field in it that holds values, by the names that lead to it; the items of a list are `[]`."""

ITEMS = "[]"


class Filled:
    """The columns and fields that had a value in some rows, in the order in which they first had one."""

    def __init__(self) -> None:
        self._found: dict[Path, None] = {}
        self._schema: pa.Schema | None = None
        self._empty: list[Path] = []

    @property
    def paths(self) -> list[Path]:
        return [*self._found]

    def note(self, rows: pa.RecordBatch) -> None:
        if self._schema is None or self._schema != rows.schema:
            self._schema = rows.schema
            self._empty = [path for path in leaves(rows.schema) if path not in self._found]
        new = [path for path in self._empty if _any(rows, path)]
        if new:
            self._found |= dict.fromkeys(new)
            self._empty = [path for path in self._empty if path not in self._found]


def leaves(schema: pa.Schema) -> list[Path]:
    """Every column, and of structs and lists of them every field, that holds values."""
    return [(each.name, *path) for each in schema for path in _leaves(each.type)]


def only(schema: pa.Schema, paths: Collection[Path]) -> pa.Schema:
    """The schema with these columns and fields alone, in its order."""
    kinds = [(each, _only(each.type, (each.name,), paths)) for each in schema]
    return pa.schema([each.with_type(kind) for each, kind in kinds if kind is not None], schema.metadata)


def having(rows: pa.RecordBatch, paths: Collection[Path]) -> npt.NDArray[np.bool_]:
    """Which rows have a value in one of these columns and fields."""
    found = np.zeros(rows.num_rows, bool)
    for name, *path in paths:
        if name in rows.schema.names:
            found |= _having(rows.column(name), path)
    return found


def clashing(
    check: Callable[[pa.Schema], None], schema: pa.Schema, tasks: Sequence[Sequence[Path]], always: Collection[str]
) -> list[Path]:
    """
    What a target cannot have of the columns that it took from tasks: each would fit alone, but not beside those before it.

    `check` raises a SchemaError for columns that it cannot have. `always`: columns without which it takes none.
    """
    own = [path for path in leaves(schema) if path[0] in always]

    def fits(paths: Sequence[Path]) -> bool:
        try:
            check(only(schema, {*own, *paths}))
        except SchemaError:
            return False
        return True

    taken: list[Path] = []
    barred: list[Path] = []

    def take(paths: Sequence[Path]) -> None:
        if fits([*taken, *paths]):
            taken.extend(paths)
        elif len(paths) > 1:
            take(paths[: len(paths) // 2])
            take(paths[len(paths) // 2 :])
        elif fits(paths):
            barred.extend(paths)

    for paths in tasks:
        seen = {*own, *taken, *barred}
        if new := [path for path in paths if path not in seen]:
            take(new)
    return barred


def _leaves(kind: pa.DataType) -> list[Path]:
    if types.is_struct(kind) and kind.num_fields:
        return [(each.name, *path) for each in kind for path in _leaves(each.type)]
    if types.is_list(kind):
        return [(ITEMS, *path) for path in _leaves(kind.value_type)]
    return [()]


def _only(kind: pa.DataType, above: Path, paths: Collection[Path]) -> pa.DataType | None:
    if types.is_struct(kind) and kind.num_fields:
        kinds = [(each, _only(each.type, (*above, each.name), paths)) for each in kind]
        kept = [each.with_type(found) for each, found in kinds if found is not None]
        return pa.struct(kept) if kept else None
    if types.is_list(kind):
        items = _only(kind.value_type, (*above, ITEMS), paths)
        return None if items is None else pa.list_(kind.value_field.with_type(items))
    return kind if above in paths else None


def _any(rows: pa.RecordBatch, path: Path) -> bool:
    column = rows.column(path[0])
    return _may_have(column, path[1:]) and (len(path) == 1 or bool(_having(column, path[1:]).any()))


def _may_have(values: pa.Array, path: Sequence[str]) -> bool:
    """False if there is no value, also none that lies beneath a null: of a wide and mostly empty struct, this is quick to say."""
    for name in path:
        values = values.field(values.type.get_field_index(name)) if types.is_struct(values.type) else values.values
    return bool(values.null_count < len(values))


def _having(values: pa.Array, path: Sequence[str]) -> npt.NDArray[np.bool_]:
    valid = np.asarray(values.is_valid().to_numpy(zero_copy_only=False))
    if types.is_struct(values.type) and path:  # a field may have values beneath a null
        at = values.type.get_field_index(path[0])
        return valid & _having(values.field(at), path[1:]) if at >= 0 else np.zeros(len(values), bool)
    if types.is_list(values.type) and path:
        found = np.zeros(len(values), bool)
        parents = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
        found[parents[_having(values.flatten(), path[1:])]] = True
        return found
    return valid
