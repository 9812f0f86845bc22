"""Rows as Kafka records: key, value and headers, by the sink's mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import Op, is_changelog, own_columns
from penstock.changes.old_key import unpack_keys
from penstock.connectors.messages import Messages, encode, refuse_rows
from penstock.errors import SchemaError
from penstock.schema import is_envelope, key_of
from penstock.sink import TopicContext


@dataclass(frozen=True)
class Records:
    """Records of one topic, in order. A null value is a tombstone."""

    batch: pa.RecordBatch
    """`key`, `value` and `headers`; `partition` and `time` where they are given."""

    @classmethod
    def of(cls, messages: Messages) -> Records:
        columns = [messages.keys.cast(pa.binary()), messages.payloads.cast(pa.binary()), messages.attributes]
        return cls(pa.RecordBatch.from_arrays(columns, names=NAMES))

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    def sizes_over(self, most: int) -> pa.Array:
        """Which records are larger than so many bytes."""
        lengths = [pc.fill_null(pc.binary_length(self.batch.column(each)), 0) for each in ("key", "value")]
        return pc.greater(pc.add(*(each.cast(pa.int64()) for each in lengths)), most)

    def partitions_over(self, count: int) -> pa.Array:
        """Which records name a partition that is none of so many."""
        if "partition" not in self.batch.schema.names:
            return pa.nulls(0, pa.bool_())
        given = self.batch.column("partition")
        return pc.or_kleene(given.is_null(), pc.or_kleene(pc.less(given, 0), pc.greater_equal(given, count)))


NAMES = ["key", "value", "headers"]


def as_messages(batch: pa.RecordBatch, context: TopicContext, config: Any) -> Records:
    """The records of a batch; in a task."""
    more: dict[str, pa.Array] = {}
    if config.keep_timestamps:
        at = "timestamp" if context.encoder is None and is_envelope(batch.schema) else "_timestamp"
        if at not in batch.schema.names:
            raise _no_column(
                at, 'add `metadata = ["timestamp"]` to the [[schemas]] entry, or leave `keep_timestamps` out'
            )
        more["time"] = batch.column(at).cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        batch = batch if at == "timestamp" else batch.drop_columns([at])
    if config.partition_column:
        if config.partition_column not in batch.schema.names:
            raise _no_column(config.partition_column, "correct `partition_column`")
        more["partition"] = batch.column(config.partition_column).cast(pa.int32())
    records = _of_mode(batch, context, config)
    if not more:
        return records
    if records.batch.num_rows != batch.num_rows:
        raise SchemaError(
            "a row that gets another key is two records, and only one has a time or a partition",
            code="PEN-4002",
            hint='leave `keep_timestamps` and `partition_column` out, or use mode = "changes"',
        )
    columns = [*records.batch.columns, *more.values()]
    return Records(pa.RecordBatch.from_arrays(columns, names=[*NAMES, *more]))


def _no_column(name: str, hint: str) -> SchemaError:
    return SchemaError(f"the rows have no column {name!r}", code="PEN-4002", hint=hint)


def _of_mode(batch: pa.RecordBatch, context: TopicContext, config: Any) -> Records:
    if config.mode == "append":
        return Records.of(encode(batch, context, config.key))
    if config.mode == "changes":
        if not is_changelog(batch.schema):
            raise SchemaError(
                'the rows say no changes, and mode = "changes" writes changes',
                code="PEN-4002",
                hint='use mode = "append" or "upsert"',
            )
        return Records.of(encode(batch, context, config.key or key_of(batch.schema)))
    key = list(config.key) or key_of(batch.schema)
    if "_key" not in batch.schema.names and (not key or set(key) - set(batch.schema.names)):
        raise SchemaError(
            f"the rows have no key: {', '.join(key) or 'none is named'}",
            code="PEN-4002",
            hint="set `key` in the sink to columns of the topic",
        )
    return _upserts(batch, context, key) if is_changelog(batch.schema) else _keyed(encode(batch, context, config.key))


def _keyed(messages: Messages) -> Records:
    refuse_rows(messages.keys.is_null(), "a row has no key", "set `key` to columns that every row has")
    return Records.of(messages)


def _upserts(batch: pa.RecordBatch, context: TopicContext, key: Sequence[str]) -> Records:
    """Changes as rows and tombstones: of a delete, and of the key that a row had before."""
    _refuse_what_a_log_cannot_say(batch)
    own = batch.select(own_columns(batch.schema))
    rows = pa.RecordBatch.from_arrays(own.columns, schema=own.schema.with_metadata(batch.schema.metadata))
    messages = encode(rows, context, key)
    is_delete = pc.equal(batch.column("_op"), Op.DELETE.value)
    values = pc.if_else(is_delete, pa.scalar(None, pa.binary()), messages.payloads.cast(pa.binary()))
    kept = Records(pa.RecordBatch.from_arrays([messages.keys, values, messages.attributes], names=NAMES))
    at = batch.schema.get_field_index("_old_key")
    moved = np.flatnonzero(batch.column(at).is_valid() if at >= 0 else [])
    if not len(moved):
        return _keyed_records(kept)
    fields = pa.schema([batch.schema.field(name) for name in key])
    old = unpack_keys(batch.column(at).drop_null(), fields).combine_chunks().to_batches()[0]
    gone = encode(old, TopicContext(), key).keys
    tombstones = pa.RecordBatch.from_arrays(
        [gone, pa.nulls(len(gone), pa.binary()), pa.nulls(len(gone), kept.batch.column("headers").type)], names=NAMES
    )
    both = pa.Table.from_batches([kept.batch, tombstones]).combine_chunks().to_batches()[0]
    # The old key comes first, then the row that left it: another row may take it in a later change.
    places = np.concatenate([np.arange(batch.num_rows) + 0.5, np.asarray(moved, float)])
    return _keyed_records(Records(both.take(pa.array(np.argsort(places, kind="stable")))))


def _keyed_records(records: Records) -> Records:
    refuse_rows(records.batch.column("key").is_null(), "a change has no key", "set `key` to columns that every row has")
    return records


def _refuse_what_a_log_cannot_say(batch: pa.RecordBatch) -> None:
    refuse_rows(
        pc.equal(batch.column("_op"), Op.TRUNCATE.value),
        "a truncate cannot be written: a topic has no record that removes all keys",
        'use mode = "changes"',
    )
    if "_unchanged" in batch.schema.names:
        refuse_rows(
            pc.greater(pc.fill_null(pc.list_value_length(batch.column("_unchanged")), 0), 0),
            "a change does not carry all values of its row, and the topic cannot be asked for them",
            'ALTER TABLE … REPLICA IDENTITY FULL at the source, or mode = "changes"',
        )
