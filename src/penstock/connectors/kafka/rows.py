"""Rows as Kafka records: key, value and headers, by the sink's mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.changes import Op, is_changelog, own_columns
from penstock.changes.old_key import unpack_keys
from penstock.connectors.messages import Messages, encode, refuse_rows
from penstock.errors import DataError, SchemaError
from penstock.formats import debezium
from penstock.formats.debezium import Debezium
from penstock.schema import is_envelope, key_of
from penstock.sink import TopicContext


@dataclass(frozen=True)
class Records:
    """Records of one topic, in order. A null value is a tombstone."""

    batch: pa.RecordBatch
    """`key`, `value` and `headers`; `partition` and `time` where they are given, `position` in a log of changes."""

    cleared: str = ""
    """The position of the last truncate among the changes; none: there was none."""

    @classmethod
    def of(cls, messages: Messages) -> Records:
        columns = [messages.keys.cast(pa.binary()), messages.payloads.cast(pa.binary()), messages.attributes]
        return cls(pa.RecordBatch.from_arrays(columns, names=NAMES))

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    def sizes_over(self, most: int) -> pa.Array:
        """Which records are larger than so many bytes."""
        return pc.greater(self._sizes(), most)

    def pieces(self, most: int) -> Iterator[pa.RecordBatch]:
        """The records in runs of about so many bytes, however their sizes differ."""
        part = np.cumsum(self._sizes().to_numpy(zero_copy_only=False)) // most
        edges = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), self.batch.num_rows]
        for first, end in pairwise(edges):
            if first < end:
                yield self.batch.slice(first, end - first)

    def _sizes(self) -> pa.Array:
        lengths = [pc.fill_null(pc.binary_length(self.batch.column(each)), 0) for each in ("key", "value")]
        return pc.add(pc.add(*(each.cast(pa.int64()) for each in lengths)), self._header_bytes())

    def _header_bytes(self) -> pa.Array:
        headers = self.batch.column("headers")
        if headers.null_count == len(headers):
            return pa.scalar(0, pa.int64())
        both = [pc.fill_null(pc.binary_length(each), 0) for each in (headers.keys, headers.items)]
        total = np.concatenate([[0], np.cumsum(pc.add(*both).to_numpy(zero_copy_only=False) + _HEADER_FRAME)])
        edges = headers.offsets.to_numpy(zero_copy_only=False)
        sizes = total[edges[1:]] - total[edges[:-1]]
        return pa.array(np.where(headers.is_valid().to_numpy(zero_copy_only=False), sizes, 0), pa.int64())

    def partitions_over(self, count: int) -> pa.Array:
        """Which records name a partition that is none of so many."""
        if "partition" not in self.batch.schema.names:
            return pa.nulls(0, pa.bool_())
        given = self.batch.column("partition")
        return pc.or_kleene(given.is_null(), pc.or_kleene(pc.less(given, 0), pc.greater_equal(given, count)))


NAMES = ["key", "value", "headers"]
POSITION = "position"
"""A column of staged changes: those before a truncate of their epoch are not sent."""
_BESIDE = ("_key", "_attributes")
_HEADER_FRAME = 10
"""Bytes that a header takes besides its name and value."""


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
        more["partition"] = _partitions(batch.column(config.partition_column), config.partition_column)
    records = _of_mode(batch, context, config)
    if not more:
        return records
    if records.cleared:
        is_change = pc.not_equal(batch.column("_op"), Op.TRUNCATE.value)
        more = {name: column.filter(is_change) for name, column in more.items()}
    if any(len(column) != records.batch.num_rows for column in more.values()):
        raise SchemaError(
            "a row that gets another key is two records, and only one has a time or a partition",
            code="PEN-4002",
            hint='leave `keep_timestamps` and `partition_column` out, or use mode = "changes"',
        )
    columns = [*records.batch.columns, *more.values()]
    return Records(pa.RecordBatch.from_arrays(columns, names=[*records.batch.schema.names, *more]), records.cleared)


def _partitions(column: pa.Array, name: str) -> pa.Array:
    """Numbers of partitions; one that cannot be any is -1, which no topic has."""
    if types.is_null(column.type):
        return column.cast(pa.int32())
    if not types.is_integer(column.type):
        raise SchemaError(
            f"the column {name!r} holds no whole numbers but {column.type}",
            code="PEN-4002",
            hint="correct `partition_column`, or cast the column in the route's SQL",
        )
    numbers = column.cast(pa.int64(), safe=False)
    fits = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, 1 << 31))
    return pc.if_else(fits, numbers, -1).cast(pa.int32())


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
        return _changes(batch, context, list(config.key) or key_of(batch.schema))
    if context.encoder is None and is_envelope(batch.schema):  # they go on under the keys that they came with
        return _keyed(encode(batch, context, config.key))
    key = list(config.key) or key_of(batch.schema)
    if "_key" not in batch.schema.names and (not key or set(key) - set(batch.schema.names)):
        raise SchemaError(
            f"the rows have no key: {', '.join(key) or 'none is named'}",
            code="PEN-4002",
            hint="set `key` in the sink to columns of the topic",
        )
    return _upserts(batch, context, key) if is_changelog(batch.schema) else _keyed(encode(batch, context, config.key))


def _changes(batch: pa.RecordBatch, context: TopicContext, key: Sequence[str]) -> Records:
    """Each change under its key. In Debezium's envelope it is under the key as Debezium writes it, and so is a row that moved."""
    if not isinstance(context.encoder, Debezium) or not key or set(key) - set(batch.schema.names):
        return Records.of(encode(batch, context, key))
    own = key_of(batch.schema) or key
    if set(key) <= set(own):  # else nothing says that the message's key is another one
        batch = debezium.without_moves(batch, own)
    messages = encode(batch, context, key)
    return Records.of(Messages(messages.payloads, debezium.keys_of(batch, key), messages.attributes))


def _keyed(messages: Messages) -> Records:
    refuse_rows(messages.keys.is_null(), "a row has no key", "set `key` to columns that every row has")
    return Records.of(messages)


def _upserts(batch: pa.RecordBatch, context: TopicContext, key: Sequence[str]) -> Records:
    """Changes as rows and tombstones: of a delete, and of the key that a row had before. Truncates are left to the commit."""
    _refuse_what_a_log_cannot_say(batch)
    truncates = pc.equal(batch.column("_op"), Op.TRUNCATE.value)
    messages = _rows_alone(batch, context, key)
    refuse_rows(
        pc.and_(messages.keys.is_null(), pc.invert(truncates)),
        "a change has no key",
        "set `key` to columns that every row has",
    )
    columns = [messages.keys, messages.payloads, messages.attributes, batch.column("_position")]
    kept = pa.RecordBatch.from_arrays(columns, names=[*NAMES, POSITION])
    cleared = pc.max(kept.column(POSITION).filter(truncates)).as_py() or ""
    if cleared:
        kept, batch = (each.filter(pc.invert(truncates)) for each in (kept, batch))
    at = batch.schema.get_field_index("_old_key")
    moved = np.flatnonzero(batch.column(at).is_valid() if at >= 0 else [])
    if not len(moved):
        return Records(kept, cleared)
    fields = pa.schema([batch.schema.field(name) for name in key])
    old = unpack_keys(batch.column(at).drop_null(), fields).combine_chunks().to_batches()[0]
    tombstones = pa.RecordBatch.from_arrays(
        [
            encode(old, TopicContext(), key).keys,
            *(pa.nulls(len(moved), kept.column(name).type) for name in NAMES[1:]),
            kept.column(POSITION).take(pa.array(moved)),
        ],
        names=kept.schema.names,
    )
    both = pa.Table.from_batches([kept, tombstones]).combine_chunks().to_batches()[0]
    # The old key comes first, then the row that left it: another row may take it in a later change.
    places = np.concatenate([np.arange(kept.num_rows) + 0.5, np.asarray(moved, float)])
    return Records(both.take(pa.array(np.argsort(places, kind="stable"))), cleared)


def _rows_alone(batch: pa.RecordBatch, context: TopicContext, key: Sequence[str]) -> Messages:
    """Changes as messages. A delete knows no more than its key, which no schema need take for a row: it gets no payload."""
    own = batch.select(own_columns(batch.schema))
    rows = pa.RecordBatch.from_arrays(own.columns, schema=own.schema.with_metadata(batch.schema.metadata))
    is_row = pc.invert(pc.is_in(batch.column("_op"), pa.array([Op.DELETE.value, Op.TRUNCATE.value])))
    places = np.flatnonzero(is_row)
    if len(places) == batch.num_rows:
        found = encode(rows, context, key)
        return Messages(found.payloads.cast(pa.binary()), found.keys, found.attributes)
    bare = encode(rows.select([name for name in rows.schema.names if name in (*key, *_BESIDE)]), TopicContext(), key)
    at = np.full(batch.num_rows, -1)
    at[places] = np.arange(len(places))
    try:
        payloads = encode(rows.filter(is_row), context, key).payloads.cast(pa.binary())
    except DataError as error:
        error.rows = [int(places[row]) for row in error.rows]
        raise
    return Messages(payloads.take(pa.array(at, mask=at < 0)), bare.keys, bare.attributes)


def _refuse_what_a_log_cannot_say(batch: pa.RecordBatch) -> None:
    if "_unchanged" in batch.schema.names:
        refuse_rows(
            pc.greater(pc.fill_null(pc.list_value_length(batch.column("_unchanged")), 0), 0),
            "a change does not carry all values of its row, and the topic cannot be asked for them",
            'ALTER TABLE … REPLICA IDENTITY FULL at the source, or mode = "changes"',
        )
