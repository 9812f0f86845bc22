"""Read the pieces of a split into Arrow, in a task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, TopicPartition

from penstock.connectors.kafka.client import Cluster, Place, consumer, errors, failure, lost
from penstock.connectors.kafka.position import KafkaSplit, Piece
from penstock.errors import RetryableError
from penstock.source import ENVELOPE_SCHEMA, SourceBatch

BATCH_ROWS = 20_000
WAIT_SECS = 0.02
"""The client waits this long for a batch to fill, even after the end of a partition."""

NO_PROGRESS_SECS = 30.0
"""After this time without a record or an end the topic is looked at: reading a deleted one says nothing, for ever."""

_NOT_THERE = 0


class Reader:
    """Reads splits; one for each."""

    def __init__(self, config: Any, cluster: Cluster, columns: frozenset[str] | None = None) -> None:
        self._config = config
        self._cluster = cluster
        self._headers = config.headers and (columns is None or "attributes" in columns or "_attributes" in columns)

    def read(self, split: KafkaSplit) -> Iterator[SourceBatch]:
        """
        The records of every piece.

        A piece is read when a record with the last offset of it, or a later one, or the end of the partition after it was
        seen: the last offset of a transactional topic is never a record.
        """
        reader = consumer(self._config, self._config.isolation_level == "read_committed")
        try:
            with errors("cannot read"):
                reader.assign([TopicPartition(*piece.place, piece.start) for piece in split.pieces])
            yield from self._batches(reader, {piece.place: piece for piece in split.pieces})
        finally:
            reader.close()
        self._require_same(split.pieces)

    def _batches(self, reader: Consumer, left: dict[Place, Piece]) -> Iterator[SourceBatch]:
        until = time.monotonic() + NO_PROGRESS_SECS
        while left:
            with errors("cannot read"):
                messages = reader.consume(BATCH_ROWS, WAIT_SECS)
            if messages:
                until = time.monotonic() + NO_PROGRESS_SECS
            elif time.monotonic() > until:
                self._require_same(list(left.values()))
                waiting = ", ".join(map(str, left.values()))
                raise RetryableError(f"nothing came of {waiting} for {NO_PROGRESS_SECS:g} s", code="PEN-2003")
            rows: dict[Place, list[Any]] = {}
            done: list[Place] = []
            for message in messages:
                place = message.topic(), message.partition()
                if (piece := left.get(place)) is None:
                    continue
                if (error := message.error()) is not None:
                    if error.code() != KafkaError._PARTITION_EOF:
                        raise self._failure(error, piece)
                    is_last = message.offset() >= piece.end
                else:
                    if message.offset() < piece.end:
                        rows.setdefault(place, []).append(message)
                    is_last = message.offset() >= piece.end - 1
                if is_last:
                    del left[place]
                    done.append(place)
            if done and left:
                reader.pause([TopicPartition(*place) for place in done])
            for place, found in rows.items():
                yield SourceBatch(self._envelopes(place, found), stream=place[0])

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
                raise lost(f"the topic {piece.topic!r} {what}")

    def _envelopes(self, place: Place, messages: Sequence[Any]) -> pa.RecordBatch:
        count = len(messages)
        offsets = pa.array([m.offset() for m in messages], pa.int64())
        stamps = [m.timestamp() for m in messages]
        times = [stamp if kind != _NOT_THERE else 0 for kind, stamp in stamps]
        attributes = [_attributes(m.headers()) for m in messages] if self._headers else None
        return envelopes(
            place,
            pa.array([m.key() for m in messages], pa.binary()),
            pa.array([m.value() for m in messages], pa.binary()),
            pa.nulls(count, _ATTRIBUTES) if attributes is None else pa.array(attributes, _ATTRIBUTES),
            pa.array(times, pa.int64()),
            offsets,
        )


_ATTRIBUTES = ENVELOPE_SCHEMA.field("attributes").type


def envelopes(
    place: Place, keys: pa.Array, payloads: pa.Array, attributes: pa.Array, times: pa.Array, offsets: pa.Array
) -> pa.RecordBatch:
    """Records of one partition as messages."""
    topic, partition = place
    count = len(offsets)
    offset = pa.StructArray.from_arrays(
        [pa.repeat(str(partition), count), offsets.cast(pa.string())], fields=list(ENVELOPE_SCHEMA.field("offset").type)
    )
    stamps = times.cast(ENVELOPE_SCHEMA.field("timestamp").type)
    arrays = [pa.repeat(topic, count), keys, payloads, attributes, stamps, offset]
    return pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE_SCHEMA)


def _attributes(headers: Sequence[tuple[str, bytes | None]] | None) -> list[tuple[str, str]]:
    """Of several headers of one name the last; bytes that are no text are shown as escapes."""
    found = {name: value for name, value in headers or () if value is not None}
    return [(name, bytes(value).decode("utf-8", "backslashreplace")) for name, value in found.items()]
