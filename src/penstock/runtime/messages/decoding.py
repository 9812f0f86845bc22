"""Decode the envelopes of a topic into typed rows, in tasks and in bulk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.changes import CHANGE_FIELDS, is_changelog, own_columns
from penstock.formats import Decoded, Failures, Format, Positions, Resolver, WireSchema
from penstock.formats.inference import fit, merge
from penstock.pipeline.options import Metadata
from penstock.pipeline.schemas import TopicSchema, TopicSchemas
from penstock.runtime.messages import pinning
from penstock.schema import as_came, is_envelope, key_of, with_key, with_ref
from penstock.sink import Topic
from penstock.source import ENVELOPE_SCHEMA


@dataclass(frozen=True)
class DecodedRows:
    """What became of a batch of envelopes."""

    rows: pa.RecordBatch
    positions: Positions
    """The place of each row's envelope in the batch."""
    failures: Failures
    columns: pa.Schema
    """The payload's columns: those that were known, and those that this batch brought."""


@dataclass(frozen=True)
class Decoder:
    """Turns the envelopes of one topic into rows."""

    format: Format[Any]
    metadata: Sequence[Metadata] = ()
    key: Sequence[str] = ()
    known: pa.Schema | None = None
    """The payload's columns as of this epoch, for a format that infers them; None: none are known yet."""
    pinned: frozenset[str] = frozenset()
    """Columns in which whole numbers stay so, since a target cannot follow."""

    def columns(self) -> pa.Schema | None:
        """The payload's columns; None: none are known yet."""
        found = self.format.columns() or self.known
        return None if found is None else _without(found, self.reserved)

    @property
    def reserved(self) -> frozenset[str]:
        """
        Names that no field of a payload can have, in any case: those of `metadata`, and `_op`, by which rows are changes.

        Only change formats bring changes.
        """
        return self._own if self.format.uses_keys else self._own | {"_op"}

    def schema(self) -> pa.Schema | None:
        """What rows of the topic look like as of this epoch; None: nothing is known of them yet."""
        columns = self.columns()
        return None if columns is None else self._whole(columns)

    def decode(self, envelopes: pa.RecordBatch, known: pa.Schema | None = None) -> DecodedRows:
        """Every envelope is a row or a failure, in order. `known`: the columns that a task has met so far, if more."""
        met = self.known if known is None else known
        envelopes = as_came(envelopes)
        decoded = self._read(envelopes, met)
        if self.format.columns() is None:
            decoded = self._pinned(envelopes, decoded, met)
        decoded = self._reserved(decoded)
        rows, positions, failures = decoded.rows, decoded.positions, decoded.failures
        if self.key and not self.format.uses_keys:  # such a format looks after the keys itself
            rows, positions, failures = self._keyed(decoded, envelopes)
        columns = rows.schema
        whole = self._whole(columns)
        if len(positions) and all(pa.types.is_null(each.type) for each in whole):  # no sink would hold such rows
            failures = _joined(failures, positions, _NO_COLUMNS)
            rows, positions = rows.slice(0, 0), positions[:0]
        kept = list(whole)[: len(columns)]
        arrays = [_settled(rows.column(each.name), each.type) for each in kept]
        if self.metadata:
            taken = envelopes if len(positions) == envelopes.num_rows else envelopes.take(pa.array(positions))
            arrays += [_metadata(taken, name) for name in self.metadata]
        return DecodedRows(pa.RecordBatch.from_arrays(arrays, schema=whole), positions, failures, columns)

    def _read(self, envelopes: pa.RecordBatch, known: pa.Schema | None) -> Decoded:
        return self.format.decode_with_keys(envelopes.column("payload"), envelopes.column("key"), known)

    def _pinned(self, envelopes: pa.RecordBatch, decoded: Decoded, met: pa.Schema | None) -> Decoded:
        """Keep whole-number columns of earlier epochs as they are; a message with a fraction in one is a failure."""
        if self.known is None or not self.pinned:
            return decoded
        wanted = pinning.pin(decoded.rows.schema, self.known, self.pinned)
        if wanted == decoded.rows.schema:
            return decoded
        bad = pinning.fractions(decoded.rows, wanted, largest=np.inf)
        # Read again without them: beside a fraction, whole numbers were read as doubles, which do not hold all of them.
        rounded, others = pinning.rounded(decoded.failures)
        failures = _joined(others, decoded.positions[bad], pinning.FRACTION)
        good = np.sort(np.concatenate([decoded.positions[~bad], rounded]))
        again = self._read(envelopes.take(pa.array(good)), met)
        wanted = pinning.pin(again.rows.schema, self.known, self.pinned)
        late = pinning.fractions(again.rows, wanted)  # such as 1e300, or a number over 2**53 beside 5.0
        rounded, others = pinning.rounded(again.failures)
        kept = pinning.narrowed(again.rows.filter(pa.array(~late)), wanted)
        first = Decoded(kept, good[again.positions[~late]], _moved(others, good, failures))
        doubtful = np.sort(good[np.concatenate([again.positions[late], rounded])])
        return self._apart(envelopes, first, doubtful, met) if len(doubtful) else first

    def _apart(self, envelopes: pa.RecordBatch, first: Decoded, doubtful: Positions, met: pa.Schema | None) -> Decoded:
        """With the payloads whose large numbers others had read as doubles: together by themselves, or each alone."""
        assert self.known is not None
        rows, places, failures = [first.rows], [first.positions], first.failures
        groups = [doubtful]
        while groups:
            group = groups.pop()
            found = self._read(envelopes.take(pa.array(group)), met)
            wanted = pinning.pin(found.rows.schema, self.known, self.pinned)
            bad = pinning.fractions(found.rows, wanted)
            if len(group) > 1 and (bad.any() or len(pinning.rounded(found.failures)[0])):
                groups += np.split(group, len(group))
                continue
            failures = _moved(found.failures, group, _joined(failures, group[found.positions[bad]], pinning.FRACTION))
            narrowed = pinning.narrowed(found.rows.filter(pa.array(~bad)), wanted)
            rows.append(conform(narrowed, first.rows.schema))
            places.append(group[found.positions[~bad]])
        every = np.concatenate(places)
        order = np.argsort(every, kind="stable")
        return Decoded(pa.concat_batches(rows).take(pa.array(order)), every[order], failures)

    def _reserved(self, decoded: Decoded) -> Decoded:
        """
        A payload with a value in a field of such a name is a failure.

        It would make the topic a log of changes, or its value would give way to what the message has.
        """
        rows, positions, failures = decoded.rows, decoded.positions, decoded.failures
        for name in [each for each in rows.schema.names if each.lower() in self.reserved]:
            used = rows.column(name).is_valid().to_numpy(zero_copy_only=False)
            own = name.lower() in self._own
            why = f"the message's own {name.lower()[1:]} has that name, by `metadata`" if own else _CHANGE
            failures = _joined(
                failures, positions[used], ("column.reserved", f"the payload has a field `{name}`: {why}")
            )
            rows, positions = rows.drop_columns([name]), positions[~used]
            rows = rows.filter(pa.array(~used)) if used.any() else rows
        return Decoded(rows, positions, failures)

    @property
    def _own(self) -> frozenset[str]:
        return frozenset(f"_{name}" for name in self.metadata)

    def _whole(self, columns: pa.Schema) -> pa.Schema:
        """With the columns that are not the payload's."""
        fields = [each.with_type(settled(each.type)) for each in columns]
        fields += [pa.field(f"_{name}", _METADATA[name]) for name in self.metadata]
        schema = pa.schema(fields, metadata=columns.metadata)
        if (wire := self.format.schema) is not None and wire.subject:
            schema = with_ref(schema, wire)
        return with_key(schema, self.key) if self.key else schema

    def _keyed(self, decoded: Decoded, envelopes: pa.RecordBatch) -> tuple[pa.RecordBatch, Positions, Failures]:
        """A row whose key has no value cannot be found again: it is a failure."""
        rows, positions = decoded.rows, decoded.positions
        missing = np.zeros(rows.num_rows, bool)
        for name in self.key:
            if name in self._own:
                values = _metadata(envelopes, name[1:]).take(pa.array(positions))
            elif name in rows.schema.names:
                values = rows.column(name)
            else:
                values = pa.nulls(rows.num_rows)
            missing |= values.is_null().to_numpy(zero_copy_only=False)
        why = ("key.missing", f"the key column {' or '.join(self.key)} has no value")
        failures = _joined(decoded.failures, positions[missing], why) if missing.any() else decoded.failures
        return rows.filter(pa.array(~missing)) if missing.any() else rows, positions[~missing], failures


@dataclass(frozen=True)
class Decoders:
    """The decoders of a pipeline as of one epoch; picklable."""

    schemas: TopicSchemas = field(default_factory=TopicSchemas)
    wire: Mapping[str, WireSchema] = field(default_factory=dict)
    """The version that this epoch uses for each entry."""
    resolve: Mapping[str | None, Resolver] = field(default_factory=dict)
    """How schemas that frames name are found, by the subject that is expected."""
    columns: Mapping[Topic, pa.Schema] = field(default_factory=dict)
    """The columns of topics whose format infers them."""
    pinned: Mapping[Topic, Sequence[str]] = field(default_factory=dict)
    """Of these, columns in which whole numbers stay so, since a target cannot follow."""
    _made: dict[Topic, Decoder | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, topic: Topic) -> Decoder | None:
        """The decoder of a topic; None: its payloads stay as they are."""
        if topic not in self._made:
            found = self.schemas.of(topic, "source")
            self._made[topic] = None if found is None else self._decoder(found, topic)
        return self._made[topic]

    def encoder(self, topic: Topic) -> Format[Any] | None:
        """The format in which message sinks send the rows of a topic; None: they choose."""
        found = self.schemas.of(topic, "sink")
        return None if found is None else make_format(found, self.wire, None)

    def schema(self, topic: Topic, schema: pa.Schema) -> pa.Schema | None:
        """What rows of a topic look like whose stream has this schema; None: nothing is known of its payloads yet."""
        decoder = self.of(topic) if is_envelope(schema) else None
        return schema if decoder is None else decoder.schema()

    def _decoder(self, found: TopicSchema, topic: Topic) -> Decoder:
        entry = found.entry
        format = make_format(found, self.wire, self.resolve.get(entry.expected_subject))
        made = Decoder(format, entry.metadata, entry.key, pinned=frozenset(self.pinned.get(topic, ())))
        known = self.columns.get(topic)  # `metadata` may be newer than they are
        return made if known is None else replace(made, known=_without(known, made.reserved))


def make_format(found: TopicSchema, wire: Mapping[str, WireSchema], resolve: Resolver | None) -> Format[Any]:
    """The format of an entry, with the version of its schema that an epoch uses."""
    return found.format_type(found.options, wire.get(found.place, found.file), resolve)


def settled(kind: pa.DataType) -> pa.DataType:
    """
    The type without the parts that nothing is known of yet: fields that were always null, lists and structs of nothing else.

    They come with the first value that shows their type; until then no file or table has a place for them.
    """
    if pa.types.is_struct(kind):
        fields = [each.with_type(settled(each.type)) for each in kind]
        kept = [each for each in fields if not pa.types.is_null(each.type)]
        return kind if kept == list(kind) and kept else pa.struct(kept) if kept else pa.null()
    if pa.types.is_list(kind):
        items = kind.value_field.with_type(settled(kind.value_type))
        return pa.null() if pa.types.is_null(items.type) else kind if items == kind.value_field else pa.list_(items)
    return kind


def _without(schema: pa.Schema, names: frozenset[str]) -> pa.Schema:
    """The columns without these names, in any case."""
    kept = [each for each in schema if each.name.lower() not in names]
    return schema if len(kept) == len(schema) else pa.schema(kept, metadata=schema.metadata)


def _settled(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if values.type == kind:
        return values
    return pa.nulls(len(values)) if pa.types.is_null(kind) else values.cast(kind)


_CHANGE = "it says what became of a row, which only change formats bring"

NO_COLUMNS = "row.empty"
_NO_COLUMNS = (NO_COLUMNS, "no payload of the topic had a value so far, so there is no column that a row could have")


def _joined(failures: Failures, positions: Positions, why: tuple[str, str]) -> Failures:
    """These failures, and those of the rows at `positions`."""
    found = zip(failures.rules, failures.reasons, strict=True)
    every = dict(zip(failures.positions.tolist(), found, strict=True))
    return Failures.of(every | dict.fromkeys(positions.tolist(), why))


def _moved(failures: Failures, places: Positions, others: Failures) -> Failures:
    """Failures among some records, at the places that these have in the batch; and others of the batch."""
    for position, rule, reason in zip(failures.positions.tolist(), failures.rules, failures.reasons, strict=True):
        others = _joined(others, places[[position]], (rule, reason))
    return others


def merged(known: pa.Schema | None, found: Sequence[pa.Schema]) -> pa.Schema | None:
    """The columns of a topic after tasks have met some. Those that describe a change have fixed types, and come last."""
    if not found:
        return known
    every = [*found, *([known] if known is not None else [])]
    columns = merge(map(_own_schema, found), None if known is None else _own_schema(known))
    changes = [each for each in every if is_changelog(each)]
    described = [each.with_nullable(True) for each in CHANGE_FIELDS if any(each.name in s.names for s in changes)]
    names = {each.name for each in described}  # a payload may have one of the columns, and describe no change
    columns = pa.schema([each for each in columns if each.name not in names])
    key = next((key for schema in every if (key := key_of(schema))), [])
    whole = pa.schema([*columns, *described])
    return with_key(whole, key) if key else whole


def _own_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([schema.field(name) for name in own_columns(schema)])


def conform(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Decoded rows with exactly these columns."""
    return rows if rows.schema.equals(schema) else fit(rows, schema)


_METADATA = {
    "key": pa.binary(),
    "timestamp": pa.timestamp("ms", tz="UTC"),
    "attributes": pa.map_(pa.string(), pa.string()),
    "offset": ENVELOPE_SCHEMA.field("offset").type,
    "stream": pa.string(),
}


def _metadata(envelopes: pa.RecordBatch, name: str) -> pa.Array:
    at = envelopes.schema.get_field_index(name)
    return pa.nulls(envelopes.num_rows, _METADATA[name]) if at < 0 else envelopes.column(at)
