"""How two schemas differ, and what a target that only adds columns makes of it."""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import SchemaError
from penstock.schema import ChangeKind, SchemaChange


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


def follow(topic: str, old: pa.Schema, new: pa.Schema) -> pa.Schema:
    """`old` and the columns that `new` adds; a column that is no longer sent stays, one of another type is refused."""
    changes = diff(old, new)
    for change in changes:
        if change.kind is ChangeKind.RETYPED:
            raise SchemaError(
                f"the column {change.column!r} of {topic} is {change.old} in the target, and rows come with {change.new}",
                code="PEN-4001",
                hint=f"cast it to {change.old} in the route's SQL, or write to a new target",
            )
    added = [pa.field(change.column, change.new) for change in changes if change.kind is ChangeKind.ADDED]
    return pa.schema([*old, *added])
