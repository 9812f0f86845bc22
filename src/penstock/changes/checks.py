"""Which changes can be applied by key: tasks refuse the others, since a staged change can only go forward."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.changes.columns import Op, is_changelog, refuse_nulls
from penstock.changes.old_key import unpack_keys
from penstock.errors import DataError, SchemaError


def check_changes(rows: pa.Table, key: Sequence[str]) -> None:
    """Refuse changes that could not be applied; in tasks, for every batch."""
    for name in key:
        if types.is_nested(kind := rows.schema.field(name).type) or types.is_null(kind):
            raise SchemaError(
                f"the key column {name!r} is {kind}, which cannot tell rows apart",
                code="PEN-4002",
                hint="set `key` in the sink to other columns; or bring it as text: `text_columns` in the source, or SQL",
            )
    if not is_changelog(rows.schema):
        if "_op" in rows.column_names:
            raise SchemaError(
                "changes have no `_position`, and without one their order is unknown",
                code="PEN-4002",
                hint="keep `_op` and `_position` in the route's SQL",
            )
        refuse_nulls(rows, key)
        return
    ops = rows.column("_op")
    odd = pc.unique(ops.filter(pc.invert(pc.is_in(ops, value_set=pa.array([op.value for op in Op], ops.type)))))
    if len(odd):
        raise DataError(f"a change has the `_op` {odd[0]}", hint=f"one of {', '.join(op.value for op in Op)}")
    if rows.column("_position").null_count:
        raise DataError("a change has no `_position`, and without one its place among the others is unknown")
    refuse_nulls(rows.filter(pc.not_equal(ops, Op.TRUNCATE.value)), key)
    if "_old_key" in rows.column_names and rows.column("_old_key").null_count < rows.num_rows:
        unpack_keys(rows.column("_old_key").drop_null(), pa.schema([rows.schema.field(name) for name in key]))
