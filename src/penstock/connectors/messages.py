"""What sinks that send messages share: rows become payloads, keys, attributes and names, a batch at a time."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import ConfigError, ConnectorError, DataError, RetryableError, SchemaError
from penstock.formats.json import Json, JsonConfig
from penstock.formats.json_text import objects, text_of
from penstock.schema import SchemaRef, as_came, is_envelope, key_of, ref_of
from penstock.sink import Topic, TopicContext
from penstock.source import ENVELOPE_SCHEMA

ATTRIBUTES = ENVELOPE_SCHEMA.field("attributes").type

SUBJECT, VERSION, ID = "penstock.schema_subject", "penstock.schema_version", "penstock.schema_id"
"""Attributes that say which schema of the registry a message has, where no frame in its payload does."""


@dataclass(frozen=True)
class Messages:
    """The rows of a batch as messages, in their order."""

    payloads: pa.Array
    """Binary. Null: a tombstone, as it came."""
    keys: pa.Array
    """Binary; null where a message has none."""
    attributes: pa.Array
    """A map of texts for each message; null or empty where there are none."""

    def __len__(self) -> int:
        return len(self.payloads)

    @property
    def nbytes(self) -> int:
        """The bytes of all payloads."""
        return int(pc.sum(pc.binary_length(self.payloads)).as_py() or 0)

    def triples(self) -> Iterator[tuple[bytes | None, bytes | None, list[tuple[str, str]]]]:
        """Key, payload and attributes of one message after the other, for clients that take them one by one."""
        count = len(self)
        attributes = [[]] * count if _is_bare(self.attributes) else [each or [] for each in self.attributes.to_pylist()]
        return zip(self.keys.to_pylist(), self.payloads.to_pylist(), attributes, strict=True)


def encode(
    batch: pa.RecordBatch, context: TopicContext, key: Sequence[str] = (), attributes: Sequence[str] = ()
) -> Messages:
    """
    Rows as messages, by the topic's `[[schemas]]`; without an entry, as JSON.

    Rows that are messages already (a topic without an entry) go on as they came; there `key` and `attributes` may name
    `_stream`, `_timestamp` and `_offset`. `_key` and `_attributes`, which `metadata` of a source's entry brings, become the
    key and the attributes again. `key` names columns that make the key and stay in the payload; `attributes` names columns
    that leave it. Without `key` the topic's own key counts.

    The schema in the registry by which rows are written, or else were read, goes with them: in the payload's frame, or as
    attributes.
    """
    if context.encoder is None and is_envelope(batch.schema):
        return _forwarded(batch, key, attributes)
    own = key or ([] if "_key" in batch.schema.names else key_of(batch.schema))
    _require(batch.schema, [*own, *attributes])
    keys = _key(batch, own)
    came = _attributes_that_came(batch)
    taken = {"_key", *attributes, *(["_attributes"] if came is not None else [])}
    rows = batch.select([name for name in batch.schema.names if name not in taken])
    encoder = context.encoder or Json(JsonConfig())
    return Messages(encoder.encode(rows), keys, _attributes(batch, came, attributes, _ref(batch.schema, context)))


def _ref(schema: pa.Schema, context: TopicContext) -> SchemaRef | None:
    """The schema that the attributes of messages name."""
    if context.encoder is None:
        return ref_of(schema)
    if getattr(context.encoder.options, "framing", "none") != "none":
        return None
    wire = context.encoder.schema
    return SchemaRef(wire.subject, wire.version, wire.id) if wire is not None and wire.version else ref_of(schema)


def _forwarded(batch: pa.RecordBatch, key: Sequence[str], attributes: Sequence[str]) -> Messages:
    came = as_came(batch)
    if not key and not attributes:
        return Messages(came.column("payload"), came.column("key"), came.column("attributes"))
    kept = [name for name in came.schema.names if name not in ("payload", "attributes")]
    beside = came.select(kept).rename_columns([f"_{name}" for name in kept])  # as `metadata` would call them
    unknown = [name for name in (*key, *attributes) if name not in beside.schema.names]
    if unknown:
        raise SchemaError(
            f"the rows are messages as they came, which have no column {unknown[0]!r} to make a key or attributes of",
            code="PEN-4002",
            hint=f"they have {', '.join(beside.schema.names)}; give the topic a [[schemas]] entry for what its payloads hold",
        )
    carried = came.column("attributes").cast(ATTRIBUTES)
    return Messages(came.column("payload"), _key(beside, key), _attributes(beside, carried, attributes, None))


class Template:
    """A name with `{topic}` and `{column}` in it, such as `devices/{device}/state`."""

    def __init__(self, text: str, option: str = "topic") -> None:
        self.text, self._option = text, option
        self._parts = re.split(r"\{([^{}]*)\}", text)
        self.columns = [name for name in self._parts[1::2] if name != "topic"]
        if any(brace in part for part in self._parts[::2] for brace in "{}") or "" in self._parts[1::2]:
            raise ConfigError(
                f"`{option}` = {text!r} has a brace without its partner, or nothing between two",
                code="PEN-1003",
                hint="write {topic} or {column}",
            )

    def names(self, topic: Topic, batch: pa.RecordBatch) -> pa.Array:
        """The name for each row; `{topic}` is the topic without its first slash. A row without a value is a `DataError`."""
        if not self.columns:
            return pa.repeat(self.text.replace("{topic}", topic[1:]), batch.num_rows)
        _require(batch.schema, self.columns)
        parts: list[pa.Array | str] = list(self._parts)
        for at in range(1, len(parts), 2):
            parts[at] = topic[1:] if parts[at] == "topic" else text_column(batch.column(parts[at]), str(parts[at]))
        names = pc.binary_join_element_wise(*parts, "")
        if names.null_count:
            refuse_rows(names.is_null(), f"a row has no value for `{self._option}` = {self.text!r}")
        return names


def refuse_rows(bad: pa.Array, what: str, hint: str = "") -> None:
    """Raise a `DataError` that names the rows for which `bad` is true; before any row of the batch is sent."""
    rows = np.flatnonzero(pc.fill_null(bad, False).to_numpy(zero_copy_only=False)).tolist()
    if rows:
        error = DataError(what, hint=hint)
        error.rows, error.count = rows, len(rows)
        raise error


def text_column(column: pa.Array, name: str) -> pa.Array:
    """Each value as plain text: numbers and dates as JSON writes them, binary in base64; null stays null."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string(column.type) or types.is_large_string(column.type):
        return column.cast(pa.string())
    text = text_of(column, name).cast(pa.string())
    if not types.is_nested(column.type):
        text = pc.ascii_trim(text, '"')
    return pc.if_else(column.is_null(), pa.scalar(None, pa.string()), text)


class Window:
    """
    Messages that were sent and are not yet acknowledged: at most `most`; the first failure is raised where the next is sent.

    `enter` and `settle` are called by the task, `leave` from whatever thread hears the answer. `timeout_secs` without any
    answer is a `RetryableError`.
    """

    def __init__(self, most: int, timeout_secs: float) -> None:
        self._most = most
        self._timeout = timeout_secs
        self._changed = threading.Condition()
        self._waiting = 0
        self._answers = 0
        self._failure: ConnectorError | None = None
        self._end: ConnectorError | None = None

    def enter(self, count: int = 1) -> None:
        """
        One more message is sent; waits while the window is full.

        With `count` so many are handed over once there is room for one: who sends them keeps the window.
        """
        with self._changed:
            if self._waiting >= self._most or self._failure or self._end:
                self._wait(lambda: self._waiting < self._most and self._end is None)
            self._waiting += count

    def leave(self, error: ConnectorError | None = None) -> None:
        """A message was acknowledged, or failed."""
        with self._changed:
            self._waiting -= 1
            self._answers += 1
            self._failure = self._failure or error
            if self._waiting == 0 or self._waiting == self._most - 1 or error:
                self._changed.notify_all()

    def fail(self, error: ConnectorError) -> None:
        """Nothing more will be acknowledged, such as when the connection broke."""
        with self._changed:
            self._end = self._end or error
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until every message is acknowledged."""
        with self._changed:
            self._wait(lambda: self._waiting == 0)

    def _wait(self, done: Callable[[], bool]) -> None:
        answers = -1
        while not self._failure and not done():
            if self._end is not None:
                raise self._end
            if answers == self._answers:
                raise RetryableError(
                    f"no answer for {self._timeout:g} s, and {self._waiting} messages wait for one", code="PEN-2003"
                )
            answers = self._answers
            self._changed.wait_for(lambda: self._failure or self._end or done(), self._timeout)
        if self._failure:
            raise self._failure


def _key(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """One column as it is (text of anything but bytes), several as a JSON object."""
    if not columns:
        at = batch.schema.get_field_index("_key")
        return pa.nulls(batch.num_rows, pa.binary()) if at < 0 else _bytes(batch.column(at), "_key")
    if len(columns) == 1:
        return _bytes(batch.column(columns[0]), columns[0])
    return objects(list(columns), [batch.column(name) for name in columns], batch.num_rows).cast(pa.binary())


def _bytes(column: pa.Array, name: str) -> pa.Array:
    if types.is_binary(column.type) or types.is_large_binary(column.type):
        return column.cast(pa.binary())
    return text_column(column, name).cast(pa.binary())


def _attributes_that_came(batch: pa.RecordBatch) -> pa.Array | None:
    """Those that `metadata` brought; None: there are none. A payload may have a field of that name, which is no map."""
    at = batch.schema.get_field_index("_attributes")
    kind = batch.schema.field(at).type if at >= 0 else pa.null()
    if not types.is_map(kind) or not all(map(_is_text, (kind.key_type, kind.item_type))):
        return None
    return batch.column(at).cast(ATTRIBUTES)


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _attributes(
    batch: pa.RecordBatch, came: pa.Array | None, columns: Sequence[str], ref: SchemaRef | None
) -> pa.Array:
    came = pa.nulls(batch.num_rows, ATTRIBUTES) if came is None else came
    same = [] if ref is None else [(SUBJECT, ref.subject), (VERSION, str(ref.version)), (ID, str(ref.id))]
    if not columns and not same:
        return came
    if not columns and _is_bare(came):
        places = pa.array(np.tile(np.arange(len(same)), batch.num_rows))
        edges = pa.array(np.arange(batch.num_rows + 1) * len(same), pa.int32())
        return pa.MapArray.from_arrays(edges, *(pa.array(each).take(places) for each in zip(*same, strict=True)))
    texts = [text_column(batch.column(name), name).to_pylist() for name in columns]
    rows = zip(*texts, strict=True) if columns else ((),) * batch.num_rows
    pairs = (list(zip(columns, values, strict=True)) for values in rows)
    own = [[pair for pair in (*each, *same) if pair[1] is not None] for each in pairs]
    if not _is_bare(came):
        names = {*columns, *(name for name, _ in same)}
        kept = ([pair for pair in each or () if pair[0] not in names] for each in came.to_pylist())
        own = [[*before, *each] for before, each in zip(kept, own, strict=True)]
    return pa.array(own, ATTRIBUTES)


def _is_bare(attributes: pa.Array) -> bool:
    """True if no message has any; asked first, since most have none."""
    return attributes.null_count == len(attributes) or len(attributes.keys) == 0


def _require(schema: pa.Schema, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise SchemaError(
            f"the rows have no column {missing[0]!r}; they have {', '.join(schema.names) or 'none'}",
            code="PEN-4002",
            hint="correct the sink's `key`, `attributes` or template, or select the column in the route's SQL",
        )
