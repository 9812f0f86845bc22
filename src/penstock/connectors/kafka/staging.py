"""
What a task stages: rows of an epoch in a file, or in records of a topic that only this sink reads.

In the topic Kafka itself holds them, so that tasks and driver share nothing but the cluster, and acknowledged by all replicas
they are as durable as the topics that they are for. Files (see `files`) are cheaper, where both reach one directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from pydantic import BaseModel, ConfigDict, Field

from penstock import store
from penstock.connectors.kafka import files
from penstock.connectors.kafka.client import ANSWER_SECS, Cluster, ClusterConfig, consumer, errors, failure, is_of_group
from penstock.connectors.kafka.rows import Records
from penstock.errors import RetryableError, StagingLost
from penstock.sink import Epoch, Receipt, Task, Topic

SHARDS = 8
"""Into so many parts the rows of a large epoch are divided by their keys. Never change it: an epoch in hand would lose rows."""

STAGING_PARTITIONS = 8 * SHARDS
CHUNK_BYTES = 900_000
"""Rows are staged in records of about this size."""


MOST_BATCHES = 1000
"""So many small batches are made one: each takes much more room than a few rows do."""


class Chunk(BaseModel):
    """One record of the staging topic, or a part of a file, and what is in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Its key, which nothing else ever has; or the name of the file."""
    target: str
    """The Kafka topic that the rows are for."""
    partition: int
    offset: int
    rows: int
    bytes: int = 0
    shard: int | None = None
    """The part that all its rows are of; None: rows of all parts."""


OWN = "./"
"""Means the sink's own directory, wherever that is when it is read: a state directory may be moved."""


class Cleared(BaseModel):
    """A truncate: what the Kafka topic held before it goes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    position: str


class KafkaReceipt(Receipt):
    staging: str = ""
    """The topic, or the directory: only that has a slash in its name."""
    chunks: Mapping[Topic, Sequence[Chunk]] = Field(default_factory=dict)
    cleared: Mapping[Topic, Cleared] = Field(default_factory=dict)
    """The last truncate of each topic that has one."""
    message_bytes: int = 0
    """The smallest size that a topic of the sink takes, of a record and of a batch of them; 0: nothing was written."""

    def topics(self) -> Iterable[Topic]:
        return self.chunks.keys() | self.cleared.keys()


class Stage:
    """
    What one task stages of one epoch. Its first rows are kept in order; those of a large epoch are divided by shards, so that
    several tasks can publish them.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(self, config: Any, epoch: Epoch, task: Task) -> None:
        self._divide_after: int = config.publish_in_tasks_bytes // 16
        self._staged_bytes = 0
        self._stem = epoch.stem(task)
        self._held: dict[tuple[Topic, str], list[pa.RecordBatch]] = {}
        self._held_bytes = 0
        self._sent: list[tuple[Topic, Chunk]] = []
        self._cleared: dict[Topic, Cleared] = {}

    def write(self, topic: Topic, target: str, records: Records) -> None:
        if records.cleared and ((known := self._cleared.get(topic)) is None or known.position < records.cleared):
            self._cleared[topic] = Cleared(target=target, position=records.cleared)
        for piece in records.pieces(self.chunk_bytes):
            held = self._held.setdefault((topic, target), [])
            held.append(piece)
            self._held_bytes += piece.nbytes
            if len(held) >= MOST_BATCHES:
                held[:] = pa.Table.from_batches(held).combine_chunks().to_batches()
            if self._held_bytes >= (self.chunk_bytes if self._is_small else max(self.chunk_bytes, 4 * CHUNK_BYTES)):
                self._send()

    @property
    def _is_small(self) -> bool:
        return self._staged_bytes < self._divide_after

    def finish(self) -> KafkaReceipt:
        """Everything staged, and durable."""
        self._send()
        staging = self._settled()
        chunks: dict[Topic, list[Chunk]] = {}
        for topic, chunk in self._sent:
            chunks.setdefault(topic, []).append(chunk)
        return KafkaReceipt(staging=staging, chunks=chunks, cleared=self._cleared)

    def _send(self) -> None:
        for (topic, target), batches in self._held.items():
            parts: dict[int | None, list[pa.RecordBatch]] = {None: batches}
            if not self._is_small:
                parts = {shard: [part] for shard, part in divided(batches)}
            for shard, some in parts.items():
                self._sent.append((topic, self._put(target, shard, some)))
        self._staged_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0

    def _put(self, target: str, shard: int | None, batches: Sequence[pa.RecordBatch]) -> Chunk:
        raise NotImplementedError

    def _settled(self) -> str:
        """Make everything durable; gives the place for the receipt."""
        raise NotImplementedError


class TopicStage(Stage):
    """Rows staged in a topic. Each shard is in a partition of its own."""

    def __init__(self, config: Any, topic: str, partitions: int, epoch: Epoch, task: Task) -> None:
        super().__init__(config, epoch, task)
        self._topic = topic
        self._partitions = partitions
        self._first = task.partition * SHARDS
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

    def _put(self, target: str, shard: int | None, batches: Sequence[pa.RecordBatch]) -> Chunk:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        value = sink.getvalue()
        chunk = Chunk(
            name=f"{self._stem}-{len(self._sent):06d}",
            target=target,
            partition=(self._first + (shard or 0)) % self._partitions,
            offset=-1,
            rows=sum(batch.num_rows for batch in batches),
            bytes=value.size,
            shard=shard,
        )
        self._produce(chunk, value.to_pybytes())
        return chunk

    def _settled(self) -> str:
        self._settle(lambda: self._producer.flush(ANSWER_SECS) == 0)
        self._sent = [
            (topic, each.model_copy(update={"offset": self._offsets[each.name]})) for topic, each in self._sent
        ]
        return self._topic

    def _produce(self, chunk: Chunk, value: bytes) -> None:
        while True:
            try:
                with errors("cannot stage rows"):
                    self._producer.produce(
                        self._topic, value, key=chunk.name, partition=chunk.partition, on_delivery=self._delivered
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


def divided(batches: Sequence[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each shard that has any, in their order."""
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    shards = shard_of(whole.column("key"), whole.column("value"))
    order = np.argsort(shards, kind="stable")
    ends = np.searchsorted(shards[order], np.arange(SHARDS + 1))
    for shard, (start, end) in enumerate(pairwise(ends.tolist())):
        if start < end:
            yield shard, whole.take(pa.array(order[start:end]))


def shard_of(keys: pa.Array, values: pa.Array) -> npt.NDArray[np.int64]:
    """The shard of each row: by its key, so that one shard has all rows of a key; without one, by its value."""
    mixed = _mixed(keys)
    if keys.null_count:
        mixed = np.where(keys.is_null().to_numpy(zero_copy_only=False), _mixed(values), mixed)
    return (mixed % np.uint64(SHARDS)).astype(np.int64)


_LAST_BYTES = 64


def _mixed(column: pa.Array) -> npt.NDArray[np.uint64]:
    """A number for each value, made of its length and last bytes. The same for the same bytes, on every machine."""
    _, offsets, data = column.buffers()
    edges = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    base, size = int(edges[0]), int(edges[-1] - edges[0])
    edges -= base
    ends, lengths = edges[1:], np.diff(edges)
    held = np.zeros(size + 8, np.uint8)
    if size:
        held[:size] = np.frombuffer(data, np.uint8)[base : base + size]
    words = np.ndarray((len(held) - 7,), "<u8", held.data, strides=(1,))
    starts = np.maximum(edges[:-1], ends - _LAST_BYTES)
    found = lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for at in range(0, min(_LAST_BYTES, int(lengths.max(initial=0))), 8):
        rows = np.flatnonzero(starts + at < ends)
        rest = np.minimum(ends[rows] - starts[rows] - at, 8).astype(np.uint64)
        taken = words[starts[rows] + at] << ((np.uint64(8) - rest) * np.uint64(8))
        found[rows] = (found[rows] ^ taken) * np.uint64(0xD6E8FEB86659FD93)
        found[rows] ^= found[rows] >> np.uint64(32)
    found = (found ^ (found >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)  # so that the last bits depend on all
    return found ^ (found >> np.uint64(33))


def of_shard(chunks: Iterable[Chunk], shard: int) -> list[Chunk]:
    """The chunks that hold rows of a shard, in order."""
    return [chunk for chunk in chunks if chunk.shard is None or chunk.shard == shard]


def staged(
    config: Any, staging: str, chunks: Iterable[Chunk], shard: int | None = None
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Rows of chunks of one task with the topic that they are for, those of a key in order; `shard`: only its rows."""
    in_order = sorted(chunks, key=lambda chunk: -1 if chunk.shard is None else chunk.shard)
    read = files.read if is_directory(staging) else _read
    for _, run in groupby(in_order, key=lambda chunk: chunk.partition):
        for chunk, batch in read(config, staging, list(run)):
            if shard is not None and chunk.shard is None:
                batch = batch.filter(pa.array(shard_of(batch.column("key"), batch.column("value")) == shard))
            if batch.num_rows:
                yield chunk.target, batch


def _read(config: ClusterConfig, staging: str, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, pa.RecordBatch]]:
    """The rows of chunks of one partition, in order."""
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
                if is_of_group(error):
                    continue
                if error.code() in (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, *_GONE):
                    raise lost(staging)
                raise failure(error, "cannot read staged rows")
            chunk = left[-1]
            if message.offset() < chunk.offset:
                continue
            if message.offset() > chunk.offset or message.key() != chunk.name.encode():
                raise lost(staging)
            left.pop()
            for batch in pa.ipc.open_stream(message.value()):
                yield chunk, batch
    finally:
        reader.close()


_GONE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC)


def is_directory(staging: str) -> bool:
    return "/" in staging


def located(staging: str, own: Path | None) -> str:
    """Where rows are staged, seen from here; `own`: the sink's own directory."""
    return str(own) if staging == OWN and own is not None else staging


def lost(staging: str) -> StagingLost:
    return StagingLost(f"rows that were staged in the topic {staging!r} are gone")


def forget(config: Any, cluster: Cluster, receipts: Sequence[KafkaReceipt]) -> None:
    """Remove what is published, and whatever dead tries left before it. A failure does no harm: retention removes it too."""
    ends: dict[tuple[str, int], int] = {}
    for receipt in receipts:
        if is_directory(receipt.staging):
            names = {chunk.name for chunks in receipt.chunks.values() for chunk in chunks}
            files.remove(config, receipt.staging, names)
            continue
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


class FileStage(Stage):
    """Rows staged in a file that driver and tasks can reach."""

    chunk_bytes = files.CHUNK_BYTES

    def __init__(self, config: Any, directory: store.Place, epoch: Epoch, task: Task) -> None:
        super().__init__(config, epoch, task)
        self._named = str(directory) if config.staging else OWN
        self._file = files.StageFile(directory, f"{self._stem}.arrows")

    def _put(self, target: str, shard: int | None, batches: Sequence[pa.RecordBatch]) -> Chunk:
        offset, size = self._file.write(batches)
        rows = sum(batch.num_rows for batch in batches)
        return Chunk(
            name=self._file.place.name, target=target, partition=0, offset=offset, rows=rows, bytes=size, shard=shard
        )

    def _settled(self) -> str:
        self._file.finish()
        return self._named
