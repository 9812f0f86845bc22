"""
Dead letters: records that could not be used, kept with all that is needed to try them again.

A letter is a row of the internal topic `/_dead_letters`, staged and committed in the epoch of the good rows by an ordinary
sink. There are four kinds. A *message* holds the payload as it came, and goes through routing and decoding again. A *row*
never was a message, or a query made it, and a sink refused it: it is kept as Arrow, and goes to that sink again. An *input*
is such a row that a query failed on, and goes through the query again. A *record* is one that a source could not read, such
as a line of a file: it is kept as it was found, and only the source could try it again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.formats import Failures
from penstock.pipeline.routing import DEAD_LETTERS, Route, Target
from penstock.sink import Epoch, Topic
from penstock.source import ENVELOPE_SCHEMA

TOPIC: Topic = DEAD_LETTERS
SINK = "_dead_letters"
"""Name of the sink that is used when the file names none."""

REPLAY = "_replay"
"""Name of the source that brings letters back."""

LETTERS = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("sink", pa.string()),
        pa.field("key", pa.binary()),
        pa.field("payload", pa.binary()),
        pa.field("attributes", pa.map_(pa.string(), pa.string())),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("offset", ENVELOPE_SCHEMA.field("offset").type),
        pa.field("code", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("incarnation", pa.string(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
    ]
)
"""The columns of a letter. `sink` names the one that refused the row; null: it was bad for all of them."""


@dataclass(frozen=True)
class Place:
    """Where records came from and where they were going."""

    source: str
    stream: str
    topic: Topic
    sink: str | None = None
    attempt: int = 1


def of_messages(
    envelopes: pa.RecordBatch, failures: Failures, place: Place, epoch: Epoch, code: str = "PEN-3001"
) -> pa.RecordBatch:
    """Letters for the envelopes at the failures' positions."""
    taken = envelopes.take(pa.array(failures.positions))
    columns = {name: taken.column(name) for name in taken.schema.names}
    return _letters(
        "message",
        place,
        epoch,
        [code] * len(failures),
        failures.rules,
        failures.reasons,
        **{name: columns.get(name) for name in ("key", "payload", "attributes", "timestamp", "offset")},
    )


def of_rows(
    rows: pa.RecordBatch, code: str, rule: str, reason: str, place: Place, epoch: Epoch, kind: str = "row"
) -> pa.RecordBatch:
    """Letters for rows that a sink refused, or as `input` those that a query failed on, each as an Arrow stream of its own."""
    count = rows.num_rows
    payloads = pa.array([to_ipc(rows.slice(at, 1)) for at in range(count)], pa.binary())
    return _letters(kind, place, epoch, [code] * count, [rule] * count, [reason] * count, payload=payloads)


def of_records(error: DataError, place: Place, epoch: Epoch) -> pa.RecordBatch:
    """Letters for records that a source could not read."""
    records, count = error.records, len(error.records)
    offsets = [{"partition": place.stream, "value": each.where} for each in records]
    return _letters(
        "record",
        place,
        epoch,
        [error.code] * count,
        ["source"] * count,
        [each.reason for each in records],
        payload=pa.array([each.data for each in records], pa.binary()),
        offset=pa.array(offsets, LETTERS.field("offset").type),
    )


def to_ipc(rows: pa.RecordBatch) -> bytes:
    """Rows as an Arrow stream."""
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, rows.schema) as writer:
        writer.write_batch(rows)
    return buffer.getvalue()


def rows_of(payload: bytes) -> pa.RecordBatch:
    """The row that a letter of that kind holds."""
    return pa.ipc.open_stream(payload).read_next_batch()


def envelopes_of(letters: pa.RecordBatch) -> pa.RecordBatch:
    """The messages as they came."""
    return pa.RecordBatch.from_arrays(
        [letters.column(field.name).cast(field.type) for field in ENVELOPE_SCHEMA], schema=ENVELOPE_SCHEMA
    )


def rows_in(letters: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows that letters hold, in their order, neighbours with the same columns together."""
    each = [rows_of(payload) for payload in letters.column("payload").to_pylist()]
    for _, alike in groupby(each, key=lambda rows: rows.schema.serialize().to_pybytes()):
        yield pa.Table.from_batches(list(alike)).combine_chunks().to_batches()[0]


def by_place(letters: pa.RecordBatch) -> Iterator[tuple[str, Place, pa.RecordBatch]]:
    """Letters by their kind and where they came from and were going, with the attempt that this is."""
    names = ("kind", "source", "stream", "topic", "sink", "attempt")
    places: dict[tuple[Any, ...], list[int]] = {}
    for at, place in enumerate(zip(*(letters.column(name).to_pylist() for name in names), strict=True)):
        places.setdefault(place, []).append(at)
    for (kind, source, stream, topic, sink, attempt), found in places.items():
        yield kind, Place(source, stream, topic, sink, attempt + 1), letters.take(pa.array(found))


def again(letters: pa.RecordBatch, rule: str, reason: str, code: str, epoch: Epoch) -> pa.RecordBatch:
    """The same letters once more, since their records could not be tried: with the next attempt, and why."""
    count = letters.num_rows
    new = {
        "code": [code] * count,
        "rule": [rule] * count,
        "reason": [reason] * count,
        "incarnation": [epoch.incarnation] * count,
        "epoch": [epoch.number] * count,
        "failed_at": [datetime.now(UTC)] * count,
        "attempt": pc.add(letters.column("attempt"), 1),
    }
    columns = [
        pa.array(new[field.name], field.type) if field.name in new else letters.column(field.name).cast(field.type)
        for field in LETTERS
    ]
    return pa.RecordBatch.from_arrays(columns, schema=LETTERS)


_NESTED = ("attributes", "offset")


def flat(letters: pa.RecordBatch) -> pa.RecordBatch:
    """Letters for a store that has no place for maps and structs: those are JSON text."""
    for name in _NESTED:
        at = letters.schema.get_field_index(name)
        values = [None if each is None else dict(each) for each in letters.column(at).to_pylist()]
        texts = [None if each is None else json.dumps(each, ensure_ascii=False) for each in values]
        letters = letters.set_column(at, pa.field(name, pa.string()), pa.array(texts, pa.string()))
    return letters


def stored(found: pa.Table) -> pa.Table:
    """Letters as a store gives them back: with the columns and types of letters."""
    columns = []
    for field in LETTERS:
        values = found.column(field.name)
        if field.name in _NESTED and pa.types.is_string(values.type):
            parsed = [None if each is None else json.loads(each) for each in values.to_pylist()]
            parsed = [
                None if each is None else list(each.items()) if field.name == "attributes" else each for each in parsed
            ]
            values = pa.chunked_array([pa.array(parsed, field.type)])
        columns.append(values.cast(field.type))
    return pa.Table.from_arrays(columns, schema=LETTERS)


def target(sink: str) -> Target:
    """Where letters go."""
    return Target(TOPIC, (sink,), Route())


def _letters(
    kind: str,
    place: Place,
    epoch: Epoch,
    codes: Sequence[str],
    rules: Sequence[str],
    reasons: Sequence[str],
    *,
    key: pa.Array | None = None,
    payload: pa.Array | None = None,
    attributes: pa.Array | None = None,
    timestamp: pa.Array | None = None,
    offset: pa.Array | None = None,
) -> pa.RecordBatch:
    count = len(codes)
    same = {
        "kind": kind,
        "source": place.source,
        "stream": place.stream,
        "topic": place.topic,
        "sink": place.sink,
        "incarnation": epoch.incarnation,
        "epoch": epoch.number,
        "failed_at": datetime.now(UTC),
        "attempt": place.attempt,
    }
    given = {
        "key": key,
        "payload": payload,
        "attributes": attributes,
        "timestamp": timestamp,
        "offset": offset,
        "code": pa.array(codes, pa.string()),
        "rule": pa.array(rules, pa.string()),
        "reason": pa.array(reasons, pa.string()),
    }
    columns = []
    for field in LETTERS:
        if field.name in same:
            columns.append(pa.repeat(pa.scalar(same[field.name], field.type), count))
        else:
            found = given[field.name]
            columns.append(pa.nulls(count, field.type) if found is None else found.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=LETTERS)
