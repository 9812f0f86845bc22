"""Read the pieces of a split into Arrow, in a task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, TopicPartition

from penstock.connectors.kafka import bulk
from penstock.connectors.kafka.bulk import BulkConsumer, Run
from penstock.connectors.kafka.client import Cluster, Place, consumer, errors, failure, lost, reading
from penstock.connectors.kafka.position import SIZES, KafkaSplit, Piece
from penstock.errors import FatalError, RetryableError
from penstock.source import ENVELOPE_SCHEMA, Note, SourceBatch

BATCH_ROWS = 20_000
WAIT_SECS = 0.02
"""The client waits this long for a batch to fill, even after the end of a partition."""

NO_PROGRESS_SECS = 30.0
"""After this time without a record or an end the topic is looked at: reading a deleted one says nothing, for ever."""

SKIPPED_PER_SEC = 5000
"""Nothing comes of aborted transactions either: so many of their records the client passes over at the very least."""

PEEK_SECS = 2.0
"""How long a look at some records may take."""

PEEK_BYTES = 4 << 20
"""So much of one partition tells enough."""

_NOT_THERE = 0
_ATTRIBUTES = ENVELOPE_SCHEMA.field("attributes").type


class Reader:
    """Reads splits; one for each."""

    def __init__(self, config: Any, cluster: Cluster, columns: frozenset[str] | None = None) -> None:
        self._config = config
        self._cluster = cluster
        self._headers = config.headers and (columns is None or "attributes" in columns or "_attributes" in columns)

    def read(self, split: KafkaSplit) -> Iterator[SourceBatch | Note]:
        """
        The records of every piece, and a note about their sizes.

        A piece is read when a record with the last offset of it, or a later one, or the end of the partition after it was
        seen: the last offset of a transactional topic is never a record.
        """
        reader = self._reader()
        sizes: dict[str, list[int]] = {}
        for piece in split.pieces:
            sizes.setdefault(piece.topic, [0, 0])[0] += piece.size
        try:
            with errors("cannot read"):
                reader.assign({piece.place: piece.start for piece in split.pieces})
            for batch in self._batches(reader, {piece.place: piece for piece in split.pieces}):
                sizes[batch.stream][1] += batch.records.column("payload").nbytes + batch.records.column("key").nbytes
                yield batch
        finally:
            reader.close()
        self._require_same(split.pieces)
        yield Note({SIZES: sizes})

    def _reader(self) -> BulkConsumer | OneByOne:
        committed = self._config.isolation_level == "read_committed"
        if bulk.available():
            return BulkConsumer(reading(self._config, committed), self._headers)
        return OneByOne(self._config, committed, self._headers)

    def _batches(self, reader: BulkConsumer | OneByOne, left: dict[Place, Piece]) -> Iterator[SourceBatch]:
        came = looked = time.monotonic()
        while left:
            with errors("cannot read"):
                runs = reader.consume(BATCH_ROWS, WAIT_SECS)
            now = time.monotonic()
            if runs:
                came = looked = now
            elif now - looked > NO_PROGRESS_SECS:
                self._require_same(list(left.values()))
                looked = now
                if now - came > NO_PROGRESS_SECS + max(each.size for each in left.values()) / SKIPPED_PER_SEC:
                    waiting = ", ".join(map(str, left.values()))
                    raise RetryableError(f"nothing came of {waiting} for {now - came:.0f} s", code="PEN-2003")
            done = []
            for run in runs:
                if (piece := left.get(run.place)) is None:
                    continue
                if run.error is not None:
                    if run.error.code() != KafkaError._PARTITION_EOF:
                        raise self._failure(run.error, piece)
                    is_last = run.offsets[0] >= piece.end
                else:
                    if count := int(np.searchsorted(run.offsets, piece.end)):
                        yield SourceBatch(_envelopes(run, count), stream=piece.topic)
                    is_last = run.offsets[-1] >= piece.end - 1
                if is_last:
                    del left[run.place]
                    done.append(run.place)
            if done and left:
                reader.pause(done)

    def _failure(self, error: KafkaError, piece: Piece) -> Exception:
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._require_same([piece])
            if self._config.on_lost == "earliest":  # planned again, it begins at what is there
                return RetryableError(f"records of {piece} were removed before they were read")
            return lost(f"{piece} does not hold offset {piece.start} and those after it any more: retention")
        return failure(error, f"cannot read {piece}")

    def _require_same(self, pieces: Sequence[Piece]) -> None:
        """Refuse records of a topic that took the place of the planned one: its offsets mean something else."""
        found = self._cluster.describe(sorted({piece.topic for piece in pieces}))
        for piece in pieces:
            now = found.get(piece.topic)
            if now is None or now.id != piece.id:
                what = "is gone" if now is None else "was deleted and made again while it was read"
                if self._config.on_lost == "earliest":  # planned again, the range is without it
                    raise RetryableError(f"the topic {piece.topic!r} {what}")
                raise lost(f"the topic {piece.topic!r} {what}")


def peek(config: Any, committed: bool, starts: Mapping[Place, int], count: int) -> dict[Place, list[Any]]:
    """Up to so many of the next records of each partition; fewer if they are large, or do not come at once."""
    found: dict[Place, list[Any]] = {place: [] for place in starts}
    left, room = set(starts), dict.fromkeys(starts, PEEK_BYTES)
    reader = consumer(config, committed, queued_min_messages=count, queued_max_messages_kbytes=PEEK_BYTES >> 10)
    until = time.monotonic() + PEEK_SECS
    try:
        with errors("cannot read"):
            reader.assign([TopicPartition(*place, offset) for place, offset in starts.items()])
            while left and time.monotonic() < until:
                for message in reader.consume(count * len(left), WAIT_SECS):
                    place = message.topic(), message.partition()
                    if message.error() is None and place in left:
                        found[place].append(message)
                        room[place] -= len(message)
                    if message.error() is not None or len(found[place]) == count or room[place] <= 0:
                        left.discard(place)
    finally:
        reader.close()
    return found


class OneByOne:
    """A reader by way of a Python object for each record, where reading in bulk does not work."""

    def __init__(self, config: Any, committed: bool, headers: bool) -> None:
        self._consumer = consumer(config, committed)
        self._headers = headers

    def assign(self, starts: Mapping[Place, int]) -> None:
        self._consumer.assign([TopicPartition(*place, offset) for place, offset in starts.items()])

    def pause(self, places: Sequence[Place]) -> None:
        self._consumer.pause([TopicPartition(*place) for place in places])

    def close(self) -> None:
        self._consumer.close()

    def consume(self, count: int, timeout_secs: float) -> list[Run]:
        runs: list[Run] = []
        records: dict[Place, list[Any]] = {}
        for message in self._consumer.consume(count, timeout_secs):
            place = message.topic(), message.partition()
            if message.error() is None:
                records.setdefault(place, []).append(message)
                continue
            runs += [self._run(*each) for each in records.items()]
            records = {}
            none = pa.nulls(0, pa.binary())
            at = np.array([message.offset() or 0], np.int64)
            runs.append(Run(place, at, none, none, at[:0], error=message.error()))
        return runs + [self._run(*each) for each in records.items()]

    def _run(self, place: Place, messages: Sequence[Any]) -> Run:
        times = [max(stamp, 0) if kind != _NOT_THERE else 0 for kind, stamp in (m.timestamp() for m in messages)]
        attributes = [_attributes(_headers(m)) for m in messages] if self._headers else None
        return Run(
            place,
            np.array([m.offset() for m in messages], np.int64),
            pa.array([m.key() for m in messages], pa.binary()),
            pa.array([m.value() for m in messages], pa.binary()),
            np.array(times, np.int64),
            None if attributes is None else pa.array(attributes, _ATTRIBUTES),
        )


def _envelopes(run: Run, count: int) -> pa.RecordBatch:
    """The first so many records of one partition as messages."""
    topic, partition = run.place
    offset = pa.StructArray.from_arrays(
        [pa.repeat(str(partition), count), pa.array(run.offsets[:count]).cast(pa.string())],
        fields=list(ENVELOPE_SCHEMA.field("offset").type),
    )
    stamps = pa.array(run.times[:count]).cast(ENVELOPE_SCHEMA.field("timestamp").type)
    attributes = pa.nulls(count, _ATTRIBUTES) if run.attributes is None else run.attributes[:count]
    arrays = [pa.repeat(topic, count), run.keys[:count], run.payloads[:count], attributes, stamps, offset]
    return pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE_SCHEMA)


_ask_headers = methodcaller("headers")
"""The client may answer with an error and a broken list. So called Python sees the error; a plain call may not, and crash."""


def _headers(message: Any) -> Any:
    try:
        return _ask_headers(message)
    except SystemError:
        raise FatalError(
            f"the record {message.topic()}/{message.partition()}@{message.offset()} has a header whose name is no text, and "
            "this Kafka client cannot read it",
            hint="set `headers = false` in the source, or install confluent-kafka from its wheel, with which it is read",
        ) from None


def _attributes(headers: Sequence[tuple[str, bytes | None]] | None) -> list[tuple[str, str]]:
    """Of several headers of one name the last that has a value; bytes that are no text are shown as escapes."""
    found = {name: value for name, value in headers or () if value is not None}
    return [(name, bytes(value).decode("utf-8", "backslashreplace")) for name, value in found.items()]
