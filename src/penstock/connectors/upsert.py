"""What every sink that applies changes by key checks: in its tasks before anything is staged, and again at the commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import pyarrow as pa
from pyarrow import types

from penstock.changes import is_changelog
from penstock.changes.keys import EQUALITY
from penstock.errors import ConfigError, SchemaError
from penstock.schema import key_of
from penstock.sink import Topic

DELETED = "_deleted"
"""Column in which `soft_delete` marks deleted rows."""

UNUSED = ("_txid", "_committed_at")
"""Change columns that an upsert does not need."""


class UpsertOptions(Protocol):
    """The options that sinks with `mode = "upsert"` have in common."""

    @property
    def mode(self) -> str: ...

    @property
    def key(self) -> tuple[str, ...]: ...

    @property
    def soft_delete(self) -> bool: ...


def check_options(config: UpsertOptions) -> None:
    """Refuse options that only `upsert` has a use for; when the sink is opened."""
    known = getattr(type(config), "model_fields", {})
    for option in () if config.mode == "upsert" else ("key", "soft_delete", "apply", "purge_percent"):
        if option in known and getattr(config, option) != known[option].default:
            raise ConfigError(
                f'`{option}` has no meaning for mode = "{config.mode}"', code="PEN-1003", hint='use mode = "upsert"'
            )


def key_for(config: UpsertOptions, topic: Topic, schema: pa.Schema, seen: dict[Topic, list[str]]) -> list[str]:
    """
    The key of a topic's rows: the option `key`, else the key that the schema names. Task: for every batch.

    `seen` holds the key of each topic's first batch in this task; all later batches must have the same.
    """
    key = list(config.key) or key_of(schema)
    missing = [name for name in key if name not in schema.names]
    if not key or missing or seen.setdefault(topic, key) != key:
        raise SchemaError(
            f"{topic} has no key that every row has: {', '.join(key) or 'none is named'}",
            code="PEN-4002",
            hint="set `key` in the sink to columns of the topic",
        )
    return key


def one_key(topic: Topic, keys: Iterable[Sequence[str]]) -> list[str]:
    """The one key that all tasks saw. Driver: at the commit."""
    first, *others = [list(key) for key in keys]
    for other in others:
        if other != first:
            raise SchemaError(
                f"the key of {topic} changes within an epoch: {first}, {other}",
                code="PEN-4001",
                hint="set `key` in the sink",
            )
    return first


def without_unused(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The changes without the columns that an upsert does not need."""
    unused = [name for name in UNUSED if is_changelog(batch.schema) and name in batch.schema.names]
    return batch.drop_columns(unused) if unused else batch


def with_known_types(batch: pa.RecordBatch, known: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    """
    The batch, with the target's types for columns of Arrow's type null.

    Such a column holds nothing but nulls. Left out, it would be taken for one that did not change.
    """
    for place, each in enumerate(batch.schema):
        if types.is_null(each.type) and each.name in known:
            batch = batch.set_column(place, each.name, pa.nulls(batch.num_rows, known[each.name]))
    return batch


def refuse_own_mark(config: UpsertOptions, topic: Topic, names: Iterable[str]) -> None:
    """Refuse a topic that has a column of the name in which `soft_delete` marks rows."""
    if config.soft_delete and DELETED in names:
        raise SchemaError(
            f"{topic} has a column {DELETED!r} of its own, and `soft_delete` needs the name",
            code="PEN-4002",
            hint="rename it in the route's SQL, or leave `soft_delete` out",
        )


def gone_columns(sent: Iterable[str], now: pa.Schema | None) -> list[str]:
    """
    Columns that the topic once had and has no more. Their values become null.

    `sent` names every column that ever came. `now` is the source's schema of today, None if the source does not say.
    """
    return sorted(name for name in sent if now is not None and name not in now.names)


def with_equality(rows: pa.RecordBatch, given: pa.Schema, key: Sequence[str]) -> pa.RecordBatch:
    """The rows, whose key columns say again when two of their texts are the same key."""
    named = {name: (given.field(name).metadata or {}).get(EQUALITY) for name in key}
    if not any(named.values()):
        return rows
    fields = [
        each.with_metadata({EQUALITY: named[each.name]}) if named.get(each.name) else each for each in rows.schema
    ]
    return pa.RecordBatch.from_arrays(rows.columns, schema=pa.schema(fields, rows.schema.metadata))


def says_unchanged(rows: pa.RecordBatch) -> bool:
    """True if a change leaves values of its row as they are."""
    named = "_unchanged" in rows.schema.names and is_changelog(rows.schema)
    return named and rows.column("_unchanged").null_count < rows.num_rows
