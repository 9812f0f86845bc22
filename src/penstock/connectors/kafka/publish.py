"""
Publish rows and their marker in one transaction.

The order is what makes it a compare-and-set: a producer with the sink's transactional id is made first, which ends whatever an
earlier one has open and refuses all that it may still send; only then is the marker read, up to the high watermark. A run
that moves the marker later has made a producer of that id, and from then on our commit fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from penstock.connectors.kafka.client import ANSWER_SECS, Cluster, consumer, errors, failure, is_of_group
from penstock.connectors.kafka.send import Sending
from penstock.durable import canonical
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError
from penstock.sink import CommittedEpoch, Epoch, Topic

Markers = dict[tuple[str, Topic], CommittedEpoch]

UNDECIDED_SECS = 30.0
"""A transaction in the marker's topic ends within this time, or never."""

BATCH_BYTES = 900_000
"""Rows are sent in batches of this size, which is below what topics take by default."""

_BATCH_FRAME = 500

_PARTITIONERS = {"murmur2": "murmur2_random", "crc32": "consistent_random", "fnv1a": "fnv1a_random"}

_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)


class Publisher:
    """One transactional id, and the partition in which its markers are. Making a second one of it fences the first."""

    def __init__(
        self, config: Any, cluster: Cluster, name: str, partition: int = 0, id: str = "", pipeline: str | None = None
    ) -> None:
        self.name = name
        self.partition = partition
        self.pipeline = pipeline
        """The pipeline that the markers are of; None: of any."""
        self._has_looked = False
        self._stranger: str | None = None
        self._id = id or name
        self._config = config
        self._cluster = cluster
        self._producer: Producer | None = None
        self._batch_bytes = BATCH_BYTES
        self._markers: Markers = {}
        self._next = 0
        self.made = 0
        """How many producers were made so far: whatever was asked under an earlier one may have changed since."""

    def close(self) -> None:
        self._producer = None

    def fit(self, receipts: Iterable[Any]) -> None:
        """Send batches that topics take, some of which take small ones only. Before anything is asked for an epoch."""
        for most in (each.message_bytes for each in receipts if each.message_bytes):
            if most - _BATCH_FRAME < self._batch_bytes:
                self._batch_bytes = max(1, most - _BATCH_FRAME)
                self.close()

    def markers(self) -> Markers:
        """The epochs that Kafka holds, asked once no earlier producer can change it."""
        self.fence()
        return self.seen()

    def seen(self) -> Markers:
        """What the markers are now; somebody else may still write one."""
        place = self.name, self.partition
        _, ends = self._cluster.edges([place], committed=False)
        if place not in ends:
            raise RetryableError(f"the topic {self.name!r} has no leader for now", code="PEN-2001")
        end = ends[place]
        if end < self._next:
            raise FatalError(
                f"the topic {self.name!r} ends at offset {end}, and {self._next} was read: it was deleted or emptied",
                code="PEN-5020",
                hint="it records which epochs are in Kafka: restore it, or start over with `penstock offsets reset FILE`",
            )
        if end > self._next:
            self._read_to(end)
        self._has_looked = True
        if self._stranger is not None:
            raise ConfigError(
                f"the pipelines {self.pipeline!r} and {self._stranger!r} both record their epochs in the topic {self.name!r}, "
                "and so end each other's transactions",
                code="PEN-1000",
                hint="set another `marker_topic` in the newer one of them, or leave it out there",
            )
        return self._markers

    @contextmanager
    def transaction(self, epoch: Epoch, part: str = "") -> Iterator[Sending]:
        """What is sent in the block is visible at once after it, or not at all."""
        producer = self.fence()
        began = time.monotonic()
        sending: Sending | None = None
        try:
            producer.poll(0)  # without it no token of the client's own making is renewed
            producer.begin_transaction()
            sending = Sending(producer, self._config, epoch, part)
            yield sending
            producer.commit_transaction(self._config.transaction_timeout_ms / 1000)
        except KafkaException as error:
            topics = sending.topics if sending is not None else set()
            raise self._broken(error.args[0], time.monotonic() - began, topics) from None
        except BaseException:
            self._abort()
            raise
        finally:
            if sending is not None:
                sending.close()
        self.markers()  # returns once the marker can be read, and so can the rows

    def mark(self, pipeline: str, topic: Topic, marker: CommittedEpoch) -> None:
        """Write a marker; inside a transaction. All that was sent before is with the brokers when it returns."""
        value = canonical(marker.model_dump(mode="json")).encode()
        key = canonical([pipeline, topic]).encode()
        producer = self.fence()
        while True:
            try:
                producer.produce(self.name, value, key=key, partition=self.partition)
                break
            except BufferError:  # rows that are on their way take all the room
                producer.poll(0.1)
        producer.flush(ANSWER_SECS)  # the commit would do it too; here, so that a test can stop where all is sent

    def fence(self) -> Producer:
        """The producer; making it shuts out all earlier ones of its id."""
        if self._producer is not None:
            return self._producer
        settings = {
            "transactional.id": self._id,
            "transaction.timeout.ms": self._config.transaction_timeout_ms,
            "partitioner": _PARTITIONERS[self._config.partitioner],
            "delivery.report.only.error": True,
            "compression.type": self._config.compression,
            "linger.ms": 5,
            "batch.size": self._batch_bytes,
            "message.max.bytes": 100 << 20,
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 256 << 10,
        }
        with errors("the producer cannot be made"):
            producer = Producer({**settings, **self._config.settings(), "acks": "all"})
        try:
            producer.init_transactions(60)
        except KafkaException as error:
            found = error.args[0]
            if found.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
                raise ConfigError(
                    f"`transaction_timeout_ms` = {self._config.transaction_timeout_ms} is more than the brokers allow",
                    code="PEN-1016",
                    hint="set it to their `transaction.max.timeout.ms`, or raise that",
                ) from None
            raise failure(found, f"cannot begin as {self._id!r}") from None
        self._producer = producer
        self.made += 1
        return producer

    def _read_to(self, end: int) -> None:
        reader = consumer(self._config)
        until = time.monotonic() + UNDECIDED_SECS
        try:
            with errors("cannot read the marker"):
                reader.assign([TopicPartition(self.name, self.partition, self._next)])
            while self._next < end:
                with errors("cannot read the marker"):
                    message = reader.poll(0.5)
                if message is not None and message.error() is None:
                    (pipeline, topic), marker = self._marker(message)
                    self._markers[pipeline, topic] = marker
                    self._next = message.offset() + 1
                    if self._has_looked and pipeline != self.pipeline is not None:  # it came while we were at work
                        self._stranger = pipeline
                    until = time.monotonic() + UNDECIDED_SECS
                elif message is not None and message.error().code() == KafkaError._PARTITION_EOF:
                    self._next = max(self._next, message.offset())
                elif message is not None and not is_of_group(message.error()):
                    raise self._unreadable(message.error())
                if self._next < end and time.monotonic() > until:
                    raise self._undecided()
        finally:
            reader.close()

    def _marker(self, message: Any) -> tuple[tuple[str, Topic], CommittedEpoch]:
        try:
            pipeline, topic = json.loads(message.key())
            return (str(pipeline), str(topic)), CommittedEpoch.model_validate_json(message.value())
        except (TypeError, ValueError):
            raise ConfigError(
                f"the topic {self.name!r} holds records that say nothing of epochs, such as that at offset {message.offset()}",
                code="PEN-1016",
                hint="it must be the sink's own: set another `marker_topic`, or leave it out",
            ) from None

    def _unreadable(self, error: KafkaError) -> ConnectorError:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # compaction moves no edge: somebody deleted records
            return FatalError(
                f"records of the topic {self.name!r} were deleted, and it says which epochs are in Kafka",
                code="PEN-5020",
                hint="start over with `penstock offsets reset FILE`, and give the topic `cleanup.policy` = compact",
            )
        return failure(error, "cannot read the marker")

    def _undecided(self) -> FatalError:
        where = f"--topic {self.name} --partition {self.partition}"
        return FatalError(
            f"a transaction in the topic {self.name!r} was neither committed nor aborted for {UNDECIDED_SECS:g} s, "
            "so nobody knows whether an epoch is in Kafka",
            code="PEN-5020",
            hint=f"the broker lost its end: kafka-transactions.sh find-hanging {where}, then abort {where}, and start again",
        )

    def _broken(self, error: KafkaError, secs: float, topics: Set[str]) -> ConnectorError:
        """Whatever went wrong, the next try makes a new producer and asks the marker what became of this one."""
        self._abort()
        if error.code() in _FENCED and secs * 1000 >= self._config.transaction_timeout_ms:
            return RetryableError(
                f"publishing took {secs:.0f} s, and the brokers aborted it after `transaction_timeout_ms`",
                code="PEN-2003",
                hint="raise `transaction_timeout_ms`, or lower `max_epoch_rows` under [processing]",
            )
        if error.code() in _FENCED:
            return RetryableError("another producer took over while the epoch was published", code="PEN-2005")
        found = failure(error, "the epoch was not published")
        is_unknown = found.code == "PEN-5010"
        some_failed = is_unknown or error.code() == KafkaError._INCONSISTENT
        if some_failed and (gone := topics - self._cluster.describe(sorted(topics)).keys()):
            return FatalError(
                f"the topic {min(gone)!r} was deleted after rows were staged for it",
                code="PEN-5010",
                hint="make it again, or have `penstock offsets restage FILE` stage the rows again, which makes it",
            )
        if is_unknown:  # tasks have seen the topic, and not every broker may know it yet
            return RetryableError(found.message, code="PEN-2007")
        return found if isinstance(found, ConfigError | FatalError) else RetryableError(found.message, code=found.code)

    def _abort(self) -> None:
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.abort_transaction(ANSWER_SECS)
        except KafkaException:
            return  # fenced, or out of reach: the next producer's first call ends the transaction
