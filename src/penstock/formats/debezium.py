"""Debezium's change envelopes, in JSON or Avro: to our change columns, and from them."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.changes import CHANGE_FIELDS, Op, is_changelog, own_columns
from penstock.changes.old_key import unpack_keys
from penstock.config import Config
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.formats import Decoded, Failed, Failures, Format, Positions, Resolver, WireSchema, framing
from penstock.formats.avro import Avro, AvroConfig
from penstock.formats.envelope import Envelopes, bare, can_meet
from penstock.formats.json import Json, JsonConfig
from penstock.formats.json_text import objects
from penstock.formats.pieces import record_batch
from penstock.schema import key_of, with_key

UNAVAILABLE = "__debezium_unavailable_value"
"""What replaces a large value that the change left as it was."""

_LOGICAL = {
    "io.debezium.time.Date": "date",
    "io.debezium.time.Time": "time-millis",
    "io.debezium.time.MicroTime": "time-micros",
    "io.debezium.time.Timestamp": "local-timestamp-millis",
    "io.debezium.time.MicroTimestamp": "local-timestamp-micros",
    "io.debezium.time.NanoTimestamp": "local-timestamp-nanos",
}


class DebeziumConfig(Config):
    encoding: Literal["json", "avro"] = "json"
    """How the envelope is written. JSON may have its schema beside it or not."""

    framing: Literal["none", "confluent"] = "none"
    """What comes before each payload and key: nothing, or Confluent's prefix. JSON has none."""

    key: tuple[str, ...] = ()
    """Columns of the key; empty: the fields of the messages' keys."""


class Debezium(Format[DebeziumConfig]):
    """
    The row before or after the change, and what the change was: `_op`, `_position`, `_txid`, `_committed_at`,
    `_unchanged`, `_old_key`.
    """

    name = "debezium"
    options_type = DebeziumConfig
    schema_use = "optional"
    uses_keys = True

    def __init__(
        self, options: DebeziumConfig, schema: WireSchema | None = None, resolve: Resolver | None = None
    ) -> None:
        super().__init__(options, schema, resolve)
        if options.encoding == "json" and (schema is not None or options.framing != "none"):
            raise ConfigError(
                "envelopes in JSON take neither a schema nor a frame",
                code="PEN-1016",
                hint='leave both out, or set encoding = "avro"',
            )
        self._inner: Format[Any] = Json(JsonConfig())
        if options.encoding == "avro":
            if schema is None:
                raise ConfigError(
                    "envelopes in Avro need a schema",
                    code="PEN-1004",
                    hint="set schema_file, or a subject of the registry",
                )
            resolver = None if resolve is None else _Dated(resolve)
            self._inner = Avro(AvroConfig(framing=options.framing), with_times(schema), resolver)

    def columns(self) -> pa.Schema | None:
        if isinstance(self._inner, Json):
            return None
        inner = self._inner.columns()
        assert inner is not None
        return self._keyed(pa.schema([*_row_fields(inner), *_CHANGE]), self.options.key)

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        return self.decode_with_keys(payloads, pa.nulls(len(payloads), pa.binary()), known)

    def decode_with_keys(self, payloads: pa.Array, keys: pa.Array, known: pa.Schema | None = None) -> Decoded:
        if isinstance(self._inner, Json):
            payloads = bare(payloads)
        found = self._envelopes(payloads, known)
        is_null = payloads.is_null().to_numpy(zero_copy_only=False)
        envelopes = Envelopes(found.rows, is_null[found.positions], None if known is None else _own_known(known))
        key = self._key_rows(keys.take(pa.array(found.positions)))
        names = self.options.key or self._names_of_key(known, key)
        rows, bad = envelopes.rows(key, names, same_keys=not self.options.key)
        is_good = np.ones(len(found.positions), bool)
        is_good[list(bad)] = False
        failed: Failed = {int(found.positions[at]): why for at, why in bad.items()}
        before = zip(found.failures.positions.tolist(), found.failures.rules, found.failures.reasons, strict=True)
        failed |= {at: (rule, reason) for at, rule, reason in before}
        if (
            bad
            and isinstance(self._inner, Json)
            and _brings_columns(rows.filter(pa.array(~is_good)), rows.filter(pa.array(is_good)), known)
        ):
            return self._without(found.positions[is_good], payloads, keys, known, failed)
        rows = rows.filter(pa.array(is_good)) if bad else rows
        schema = self._keyed(rows.schema, names)
        return Decoded(rows.replace_schema_metadata(schema.metadata), found.positions[is_good], Failures.of(failed))

    def _without(
        self, good: Positions, payloads: pa.Array, keys: pa.Array, known: pa.Schema | None, failed: Failed
    ) -> Decoded:
        """The payloads at these places, read as if there were no others: what is a failure brings no columns."""
        places = pa.array(good)
        again = self.decode_with_keys(payloads.take(places), keys.take(places), known)
        late = zip(again.failures.positions.tolist(), again.failures.rules, again.failures.reasons, strict=True)
        failed |= {int(good[at]): (rule, reason) for at, rule, reason in late}
        return Decoded(again.rows, good[again.positions], Failures.of(failed))

    def _envelopes(self, payloads: pa.Array, known: pa.Schema | None) -> Decoded:
        if not isinstance(self._inner, Json):
            return self._inner.decode(payloads)
        found = self._inner.decode(payloads, _inner_known(known))
        if can_meet(found.rows):
            return found
        # What is new before and after the change has two types: the row after it decides.
        return self._inner.decode(payloads, _inner_known(pa.schema(list(found.rows.schema.field("after").type))))

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        if not is_changelog(rows.schema):
            raise SchemaError(
                "the rows say no changes: they have no `_op` and `_position`",
                hint="write a topic of changes, or use another format",
            )
        own = own_columns(rows.schema)
        image = _with_placeholders(rows, own)
        ops = rows.column("_op")
        is_gone = pc.is_in(ops, pa.array([Op.DELETE, Op.TRUNCATE], pa.string()))
        times = pc.cast(rows.column("_committed_at"), pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        envelope = pa.record_batch(
            {
                "before": _befores(rows, own, image, self.options.key or key_of(rows.schema)),
                "after": _where(pc.invert(is_gone), image),
                "source": self._source(rows, times),
                "op": ops,
                "ts_ms": times,
            }
        )
        return self._inner.encode(self._known_to_schema(envelope))

    def _source(self, rows: pa.RecordBatch, times: pa.Array) -> pa.StructArray:
        count = rows.num_rows
        texts = {"version": "", "connector": "penstock", "name": "penstock", "db": "", "schema": "", "table": ""}
        fields = {name: pa.array([text] * count, pa.string()) for name, text in texts.items()}
        is_seeded = pc.equal(rows.column("_op"), Op.SEEDED)
        fields["snapshot"] = pc.if_else(is_seeded, "true", "false")
        fields |= {"ts_ms": pc.fill_null(times, 0), "txId": rows.column("_txid"), "position": rows.column("_position")}
        return pa.StructArray.from_arrays(list(fields.values()), list(fields))

    def _known_to_schema(self, envelope: pa.RecordBatch) -> pa.RecordBatch:
        """Of what we say of a change's source, the fields that the schema has."""
        inner = self._inner.columns()
        if inner is None:
            return envelope
        envelope = envelope.select([name for name in envelope.schema.names if name in inner.names])
        if "source" in inner.names:
            kept = {field.name for field in inner.field("source").type}
            source = envelope.column("source")
            fields = {f.name: array for f, array in zip(source.type, source.flatten(), strict=True) if f.name in kept}
            made = pa.StructArray.from_arrays(list(fields.values()), list(fields))
            envelope = envelope.set_column(envelope.schema.get_field_index("source"), "source", made)
        return envelope

    def _keyed(self, schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
        return with_key(schema, names) if names and set(names) <= set(schema.names) else schema

    def _names_of_key(self, known: pa.Schema | None, found: pa.RecordBatch) -> tuple[str, ...]:
        """The key of the epochs before; else the fields of the first key that can be read."""
        if known is not None and key_of(known):
            return tuple(key_of(known))
        for row in found.to_pylist() if len(found.schema.names) > 1 else ():
            named = tuple(name for name, value in row.items() if value is not None)
            if named:
                return named
        return tuple(found.schema.names)

    def _key_rows(self, keys: pa.Array) -> pa.RecordBatch:
        """The fields of the messages' keys, null for a key that is missing or cannot be read."""
        count = len(keys)
        if keys.null_count == count:
            return record_batch([], pa.schema([]), count)
        found = Json(JsonConfig()).decode(bare(keys)) if isinstance(self._inner, Json) else self._avro_keys(keys)
        index = np.full(count, -1, np.int64)
        index[found.positions] = np.arange(len(found.positions))
        place = pa.array(index, mask=index < 0)
        return record_batch([each.take(place) for each in found.rows.columns], found.rows.schema, count)

    def _avro_keys(self, keys: pa.Array) -> Decoded:
        """By the first schema that a key names and the registry has; without a frame nothing says what a key is."""
        ids = framing.ids(framing.cells(keys))
        if self.options.framing == "confluent" and self.resolve is not None:
            resolver = _Dated(self.resolve)
            for id in dict.fromkeys(ids[ids >= 0].tolist()):
                with contextlib.suppress(DataError, SchemaError):  # such a key is one that cannot be read
                    schema = replace(resolver(id), id=id)
                    if '"record"' in schema.text:  # the keys of rows are records; others are of no row
                        return Avro(AvroConfig(framing="confluent"), schema, resolver).decode(keys)
        return Decoded(record_batch([], pa.schema([]), 0), np.empty(0, np.int64))


def _brings_columns(bad: pa.RecordBatch, good: pa.RecordBatch, known: pa.Schema | None) -> bool:
    """True if only the bad rows have a value in some new column."""
    new = [name for name in own_columns(good.schema) if known is None or name not in known.names]
    return any(
        good.column(name).null_count == good.num_rows and bad.column(name).null_count < bad.num_rows for name in new
    )


class _Dated:
    """A resolver whose schemas have their times marked."""

    def __init__(self, resolve: Resolver) -> None:
        self.resolve = resolve

    def __call__(self, id: int) -> WireSchema:
        return with_times(self.resolve(id))


_CHANGE = [field.with_nullable(True) for field in CHANGE_FIELDS]


def with_times(schema: WireSchema) -> WireSchema:
    """An Avro schema in which Debezium's dates and times, plain numbers with a name of their own, are logical types."""
    try:
        text = json.dumps(_times(json.loads(schema.text)))
    except (ValueError, RecursionError):
        return schema  # the parser says what is wrong with it
    return replace(schema, text=text, references=tuple((name, with_times(each)) for name, each in schema.references))


def _times(found: Any) -> Any:
    if isinstance(found, list):
        return [_times(each) for each in found]
    if not isinstance(found, dict):
        return found
    made = {name: _times(each) for name, each in found.items()}
    logical = _LOGICAL.get(str(found.get("connect.name")))
    return made if logical is None or "logicalType" in made else {**made, "logicalType": logical}


def _row_fields(inner: pa.Schema) -> list[pa.Field]:
    kind = inner.field("after").type if "after" in inner.names else None
    if kind is None or not types.is_struct(kind) or "op" not in inner.names:
        raise SchemaError(
            "the schema is no change envelope: it has no `op` and `after`",
            hint="use the schema of the topic's values as Debezium registers it",
        )
    return list(kind)


def keys_of(rows: pa.RecordBatch, names: Sequence[str]) -> pa.Array:
    """The keys of messages as Debezium writes them: JSON objects, also of one column; null where a change has no key."""
    columns = [rows.column(name) for name in names]
    is_whole = pc.invert(functools.reduce(pc.or_, [each.is_null() for each in columns]))
    texts = objects(list(names), columns, rows.num_rows).cast(pa.binary())
    return pc.if_else(is_whole, texts, pa.scalar(None, pa.binary()))


def without_moves(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """
    A row that gets another key as Debezium writes it: a delete under the old key, then a row that is new.

    One message under the new key would be in another partition than what came before under the old one, and a reader that
    is late there would bring the old row back.
    """
    at = rows.schema.get_field_index("_old_key")
    moved = np.flatnonzero(rows.column(at).is_valid().to_numpy(zero_copy_only=False)) if at >= 0 else np.empty(0, int)
    if not len(moved):
        return rows
    _refuse_part_of_a_row(rows, moved)
    places, count = pa.array(moved), len(moved)
    old = unpack_keys(rows.column(at).take(places), pa.schema([rows.schema.field(name) for name in names]))
    deletes = {field.name: pa.nulls(count, field.type) for field in rows.schema}
    deletes |= {name: rows.column(name).take(places) for name in ("_position", "_txid", "_committed_at")}
    deletes |= {name: old.column(name).combine_chunks() for name in names}
    deletes["_op"] = pa.repeat(Op.DELETE.value, count)
    is_moved = np.zeros(rows.num_rows, bool)
    is_moved[moved] = True
    new = {name: rows.column(name) for name in rows.schema.names}
    new["_op"] = pc.if_else(pa.array(is_moved), Op.INSERT.value, rows.column("_op"))
    new["_old_key"] = pa.nulls(rows.num_rows, rows.schema.field(at).type)
    both = pa.Table.from_batches([pa.RecordBatch.from_pydict(each, schema=rows.schema) for each in (new, deletes)])
    order = np.argsort(np.concatenate([np.arange(rows.num_rows) + 0.5, moved]), kind="stable")
    (found,) = both.combine_chunks().to_batches()
    return found.take(pa.array(order))


def _refuse_part_of_a_row(rows: pa.RecordBatch, moved: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Who reads a delete and a new row has no old one any more to take the rest of the values from."""
    if "_unchanged" not in rows.schema.names:
        return
    lengths = pc.fill_null(pc.list_value_length(rows.column("_unchanged")), 0).to_numpy(zero_copy_only=False)
    if len(parts := moved[lengths[moved] > 0]):
        error = DataError(
            "a row got another key, and the change does not carry all its values",
            hint="ALTER TABLE … REPLICA IDENTITY FULL at the source",
        )
        error.rows, error.count = parts.tolist(), len(parts)
        raise error


def _own_known(known: pa.Schema) -> pa.Schema:
    return pa.schema([known.field(name) for name in own_columns(known)])


def _inner_known(known: pa.Schema | None) -> pa.Schema:
    """What is known of the envelope itself, and of the row from the epochs before."""
    row = pa.struct(list(_own_known(known)) if known is not None else [])
    source = pa.struct([("ts_ms", pa.int64())])
    return pa.schema([("op", pa.string()), ("before", row), ("after", row), ("source", source)])


def _where(is_here: pa.Array, image: pa.StructArray) -> pa.StructArray:
    return image.take(pc.if_else(is_here, pa.array(np.arange(len(image))), pa.scalar(None, pa.int64())))


def _with_placeholders(rows: pa.RecordBatch, own: Sequence[str]) -> pa.StructArray:
    """The rows' own columns, with Debezium's placeholder for values that a change left as they were."""
    columns = {name: rows.column(name) for name in own}
    lists = rows.column("_unchanged") if "_unchanged" in rows.schema.names else pa.nulls(rows.num_rows)
    if lists.null_count < rows.num_rows:
        parents, names = pc.list_parent_indices(lists), lists.flatten()
        for name in pc.unique(names).to_pylist():
            if name not in columns:
                continue
            kind = columns[name].type
            if not (types.is_string(kind) or types.is_binary(kind)):
                raise DataError(
                    f"the column {name} was left as it is, which Debezium can say of text and bytes alone; it is {kind}",
                    hint="set the source table's replica identity to FULL",
                )
            at = np.zeros(rows.num_rows, bool)
            at[parents.filter(pc.equal(names, name)).to_numpy()] = True
            columns[name] = pc.if_else(pa.array(at), pa.scalar(UNAVAILABLE).cast(kind), columns[name])
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def _befores(rows: pa.RecordBatch, own: Sequence[str], image: pa.StructArray, key: Sequence[str]) -> pa.StructArray:
    """The row that a delete removed; of a row that moved, its old key."""
    is_deleted = pc.equal(rows.column("_op"), Op.DELETE)
    before = _where(is_deleted, image)
    old = rows.column("_old_key") if "_old_key" in rows.schema.names else pa.nulls(rows.num_rows, pa.string())
    moved = np.flatnonzero(old.is_valid().to_numpy(zero_copy_only=False))
    if not len(moved) or not key:
        return before
    schema = pa.schema([rows.schema.field(name) for name in key])
    keys = unpack_keys(old.take(pa.array(moved)), schema).combine_chunks()
    made = [
        keys.column(name).chunk(0).cast(rows.schema.field(name).type)
        if name in key
        else pa.nulls(len(moved), rows.schema.field(name).type)
        for name in own
    ]
    index = np.arange(rows.num_rows)
    index[moved] = rows.num_rows + np.arange(len(moved))
    return pa.concat_arrays([before, pa.StructArray.from_arrays(made, list(own))]).take(pa.array(index))
