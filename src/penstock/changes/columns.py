"""The columns that describe a change, defined once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import pyarrow as pa

from penstock.errors import DataError


class Op(StrEnum):
    """What happened to a row."""

    SEEDED = "r"
    INSERT = "c"
    UPDATE = "u"
    DELETE = "d"
    TRUNCATE = "t"


CHANGE_FIELDS: tuple[pa.Field, ...] = (
    pa.field("_op", pa.string(), nullable=False),
    pa.field("_position", pa.string(), nullable=False),
    pa.field("_txid", pa.int64()),
    pa.field("_committed_at", pa.timestamp("us", tz="UTC")),
    pa.field("_unchanged", pa.list_(pa.string())),
    pa.field("_old_key", pa.string()),
)
"""Every topic of changes has these after its own columns. `_position` sorts as text in the order of the changes."""

_NAMES = {each.name for each in CHANGE_FIELDS}


def is_changelog(schema: pa.Schema) -> bool:
    """True for rows that say what happened; other rows are as they are now, in their order."""
    return "_op" in schema.names and "_position" in schema.names


def own_columns(schema: pa.Schema) -> list[str]:
    """The columns of a topic without those that describe the change."""
    return [name for name in schema.names if name not in _NAMES] if is_changelog(schema) else schema.names


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with nulls in every column, as a delete knows its key only; without metadata."""
    return pa.schema([each.with_nullable(True).remove_metadata() for each in schema])


def refuse_nulls(rows: pa.Table, key: Sequence[str]) -> None:
    """Refuse rows that have no value in a column of the key."""
    for name in key:
        if rows.column(name).null_count:
            raise DataError(f"a row has no value in the key column {name!r}", hint="set a `key` that every row has")
