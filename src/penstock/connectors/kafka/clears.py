"""
Truncates in a log of keys: a tombstone for every key that the topic holds.

No record removes all keys, so the driver reads the topic and removes each. Changes of the same epoch that came before the
truncate are not sent at all; whichever task had them, their position tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, TopicPartition

from penstock.connectors.kafka.client import Cluster, consumer, errors, failure, is_of_group
from penstock.connectors.kafka.rows import NAMES, POSITION
from penstock.connectors.kafka.staging import Cleared, KafkaReceipt
from penstock.connectors.messages import ATTRIBUTES
from penstock.errors import RetryableError
from penstock.sink import Topic

BATCH_ROWS = 20_000
NO_PROGRESS_SECS = 30.0


class Clears:
    """The truncates of an epoch, and the keys that each removes. Made once no earlier producer can add any."""

    def __init__(self, config: Any, cluster: Cluster, receipts: Sequence[KafkaReceipt]) -> None:
        self._last: dict[Topic, Cleared] = {}
        for topic, each in (item for receipt in receipts for item in receipt.cleared.items()):
            if topic not in self._last or self._last[topic].position < each.position:
                self._last[topic] = each
        self._held = {topic: held_keys(config, cluster, each.target) for topic, each in self._last.items()}

    def tombstones(self, topic: Topic) -> Iterator[tuple[str, pa.RecordBatch]]:
        """What removes all that the topic held, each key in the partition where it is."""
        for partition, keys in self._held.get(topic, {}).items():
            for first in range(0, len(keys), BATCH_ROWS):
                some = pa.array(keys[first : first + BATCH_ROWS], pa.binary())
                none = [pa.nulls(len(some), pa.binary()), pa.nulls(len(some), ATTRIBUTES)]
                columns = [some, *none, pa.repeat(pa.scalar(partition, pa.int32()), len(some))]
                yield self._last[topic].target, pa.RecordBatch.from_arrays(columns, names=[*NAMES, "partition"])

    def after(self, topic: Topic, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The changes that came after the truncate."""
        if topic not in self._last or POSITION not in batch.schema.names:
            return batch
        return batch.filter(pc.greater(batch.column(POSITION), self._last[topic].position))


def held_keys(config: Any, cluster: Cluster, topic: str) -> dict[int, list[bytes]]:
    """The keys in each partition of a topic that have a value, as of all that is committed by now."""
    found = cluster.describe([topic]).get(topic)
    places = [(topic, partition) for partition in found.partitions] if found else []
    begins, ends = cluster.edges(places, committed=False)
    if len(ends) < len(places):
        raise RetryableError(f"a partition of {topic!r} has no leader for now", code="PEN-2001")
    held: dict[int, dict[bytes, None]] = {partition: {} for _, partition in places}
    left = {place[1]: end for place, end in ends.items() if begins[place] < end}
    reader = consumer(config)
    until = time.monotonic() + NO_PROGRESS_SECS
    try:
        with errors(f"cannot read {topic!r}"):
            reader.assign([TopicPartition(topic, partition, begins[topic, partition]) for partition in left])
        while left:
            with errors(f"cannot read {topic!r}"):
                messages = reader.consume(BATCH_ROWS, 0.02)
            if not messages and time.monotonic() > until:
                raise RetryableError(
                    f"a truncate waits for the end of {topic!r}: no broker answers, or somebody's transaction is open there",
                    code="PEN-2003",
                )
            for message in messages:
                partition, offset, error = message.partition(), message.offset(), message.error()
                if error is not None and is_of_group(error):
                    continue
                if error is None:
                    until = time.monotonic() + NO_PROGRESS_SECS
                    if message.value() is None:
                        held[partition].pop(message.key(), None)
                    elif message.key() is not None:
                        held[partition][message.key()] = None
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise failure(error, f"cannot read {topic!r}")
                if offset + (error is None) >= left.get(partition, offset + 2):
                    del left[partition]
    finally:
        reader.close()
    return {partition: list(keys) for partition, keys in held.items() if keys}
