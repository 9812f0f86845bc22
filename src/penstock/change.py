"""The columns that describe a change, defined once."""

from __future__ import annotations

from enum import StrEnum

import pyarrow as pa


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
"""Every topic of changes carries these behind its own columns. `_position` sorts as text in the order of the changes."""
