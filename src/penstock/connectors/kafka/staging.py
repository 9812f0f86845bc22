"""
What a task stages: rows of an epoch in records of a topic that only this sink reads.

Kafka itself holds them, so that tasks and driver share nothing but the cluster, and acknowledged by all replicas they are as
durable as the topics that they are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from pydantic import BaseModel, ConfigDict, Field

from penstock.connectors.kafka.client import ANSWER_SECS, Cluster, ClusterConfig, consumer, errors, failure
from penstock.connectors.kafka.rows import Records
from penstock.errors import RetryableError, StagingLost
from penstock.sink import Epoch, Receipt, Task, Topic

STAGING_PARTITIONS = 8
CHUNK_BYTES = 900_000
"""Rows are staged in records of about this size."""


class Chunk(BaseModel):
    """One record of the staging topic, and what is in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Its key: nothing else ever has it."""
    target: str
    """The Kafka topic that the rows are for."""
    partition: int
    offset: int
    rows: int


class KafkaReceipt(Receipt):
    staging: str = ""
    chunks: Mapping[Topic, Sequence[Chunk]] = Field(default_factory=dict)

    def topics(self) -> Iterable[Topic]:
        return self.chunks.keys()


class Stage:
    """What one task stages of one epoch; in order, in one partition."""

    def __init__(self, config: Any, topic: str, epoch: Epoch, task: Task) -> None:
        self._topic = topic
        self._partition = task.partition % STAGING_PARTITIONS
        self._stem = epoch.stem(task)
        self._held: dict[tuple[Topic, str], list[pa.RecordBatch]] = {}
        self._held_bytes = 0
        self._sent: list[tuple[Topic, str, str, int]] = []
        self._offsets: dict[str, int] = {}
        self._failure: KafkaError | None = None
        settings = {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,
            "message.max.bytes": 100 << 20,
            "compression.type": config.compression,
            "queue.buffering.max.kbytes": 256 << 10,
        }
        with errors("the producer cannot be made"):
            self._producer = Producer({**settings, **config.settings()})

    def write(self, topic: Topic, target: str, records: Records) -> None:
        rows = records.batch
        step = max(1, CHUNK_BYTES * rows.num_rows // max(1, rows.nbytes))
        for first in range(0, rows.num_rows, step):
            piece = rows.slice(first, step)
            self._held.setdefault((topic, target), []).append(piece)
            self._held_bytes += piece.nbytes
            if self._held_bytes >= CHUNK_BYTES:
                self._send()

    def finish(self) -> KafkaReceipt:
        """Everything staged, and on the disks of the brokers."""
        self._send()
        self._settle(lambda: self._producer.flush(ANSWER_SECS) == 0)
        chunks: dict[Topic, list[Chunk]] = {}
        for topic, target, name, rows in self._sent:
            chunk = Chunk(name=name, target=target, partition=self._partition, offset=self._offsets[name], rows=rows)
            chunks.setdefault(topic, []).append(chunk)
        return KafkaReceipt(staging=self._topic, chunks=chunks)

    def _send(self) -> None:
        for (topic, target), batches in self._held.items():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            name = f"{self._stem}-{len(self._sent):06d}"
            self._sent.append((topic, target, name, sum(batch.num_rows for batch in batches)))
            self._produce(name, sink.getvalue().to_pybytes())
        self._held, self._held_bytes = {}, 0

    def _produce(self, name: str, value: bytes) -> None:
        while True:
            try:
                with errors("cannot stage rows"):
                    self._producer.produce(
                        self._topic, value, key=name, partition=self._partition, on_delivery=self._delivered
                    )
                self._producer.poll(0)
                return
            except BufferError:
                self._settle(lambda: self._producer.poll(ANSWER_SECS) > 0)

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        self._failure = self._failure or error
        if error is None:
            self._offsets[message.key().decode()] = message.offset()

    def _settle(self, wait: Any) -> None:
        is_settled = wait()
        if self._failure is not None:
            raise failure(self._failure, "cannot stage rows")
        if not is_settled:
            raise RetryableError("the brokers do not answer while rows are staged", code="PEN-2003")


def staged(config: ClusterConfig, staging: str, chunks: Sequence[Chunk]) -> Iterator[pa.RecordBatch]:
    """The rows of chunks of one partition, in order; on the driver."""
    if not chunks:
        return
    reader = consumer(config, committed=False)
    try:
        left = list(reversed(chunks))
        with errors("cannot read staged rows"):
            reader.assign([TopicPartition(staging, chunks[0].partition, chunks[0].offset)])
        while left:
            with errors("cannot read staged rows"):
                message = reader.poll(ANSWER_SECS)
            if message is None:
                raise RetryableError("the brokers do not answer while staged rows are read", code="PEN-2003")
            if (error := message.error()) is not None:
                if error.code() in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, *_GONE):
                    raise lost(staging)
                raise failure(error, "cannot read staged rows")
            chunk = left[-1]
            if message.offset() < chunk.offset:
                continue
            if message.offset() > chunk.offset or message.key() != chunk.name.encode():
                raise lost(staging)
            left.pop()
            yield from pa.ipc.open_stream(message.value())
    finally:
        reader.close()


_GONE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC)


def lost(staging: str) -> StagingLost:
    return StagingLost(f"rows that were staged in the topic {staging!r} are gone")


def forget(cluster: Cluster, receipts: Sequence[KafkaReceipt]) -> None:
    """Remove what is published, and whatever dead tries left before it. A failure does no harm: retention removes it too."""
    ends: dict[tuple[str, int], int] = {}
    for receipt in receipts:
        for chunk in (each for chunks in receipt.chunks.values() for each in chunks):
            place = receipt.staging, chunk.partition
            ends[place] = max(ends.get(place, 0), chunk.offset + 1)
    if not ends:
        return
    for future in cluster.client.delete_records([TopicPartition(*place, end) for place, end in ends.items()]).values():
        try:
            future.result(ANSWER_SECS)
        except (KafkaException, TimeoutError):
            return
