"""
Publish an epoch and its marker in one transaction; on the driver.

The order is what makes it a compare-and-set: a producer with the sink's transactional id is made first, which ends whatever an
earlier one has open and refuses all that it may still send; only then is the marker read, up to the high watermark. A run
that moves the marker later has made a producer of that id, and from then on our commit fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from penstock.connectors.kafka.client import ANSWER_SECS, Cluster, consumer, errors, failure
from penstock.connectors.kafka.staging import KafkaReceipt, forget, staged
from penstock.durable import canonical
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic

Markers = dict[tuple[str, Topic], CommittedEpoch]

UNDECIDED_SECS = 30.0
"""A transaction in the marker's topic ends within this time, or never."""

_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)


class Publisher:
    """One transactional id. Made by the driver alone: a second one fences the first."""

    def __init__(self, config: Any, cluster: Cluster, name: str) -> None:
        self.name = name
        self._config = config
        self._cluster = cluster
        self._producer: Producer | None = None
        self._markers: Markers = {}
        self._next = 0

    def close(self) -> None:
        self._producer = None

    def markers(self) -> Markers:
        """The epochs that Kafka holds, asked of the marker's topic once no earlier producer can change it."""
        self._fence()
        _, ends = self._cluster.edges([(self.name, 0)], committed=False)
        if (self.name, 0) not in ends:
            raise RetryableError(f"the topic {self.name!r} has no leader for now", code="PEN-2001")
        end = ends[self.name, 0]
        if end < self._next:
            raise FatalError(
                f"the topic {self.name!r} ends at offset {end}, and {self._next} was read: it was deleted or emptied",
                code="PEN-5020",
                hint="it records which epochs are in Kafka: restore it, or start over with `penstock offsets reset FILE`",
            )
        if end > self._next:
            self._read_to(end)
        return self._markers

    def publish(
        self,
        epoch: Epoch,
        topics: Sequence[Topic],
        receipts: Sequence[KafkaReceipt],
        end: Positions,
        before_commit: Callable[[], None],  # called for each topic; at the last one all is sent
    ) -> None:
        """The rows of `topics`, in the order of tasks and rows, and a marker of each topic: visible at once or not at all."""
        producer = self._fence()
        began = time.monotonic()
        marker = CommittedEpoch(incarnation=epoch.incarnation, number=epoch.number, end=dict(end))
        try:
            producer.begin_transaction()
            sending = Sending(producer, self._config, epoch)
            for topic in topics:
                for receipt in receipts:
                    chunks = receipt.chunks.get(topic, ())
                    for batch in staged(self._config, receipt.staging, chunks):
                        sending.send(chunks[0].target, batch)
                value = canonical(marker.model_dump(mode="json"))
                producer.produce(
                    self.name, value.encode(), key=canonical([epoch.pipeline, topic]).encode(), partition=0
                )
                sending.flush()
                before_commit()
            producer.commit_transaction(self._config.transaction_timeout_ms / 1000)
        except KafkaException as error:
            raise self._broken(error.args[0], time.monotonic() - began) from None
        except BaseException:
            self._abort()
            raise
        self.markers()  # returns once the marker can be read, and so can the rows
        forget(self._cluster, receipts)

    def _fence(self) -> Producer:
        if self._producer is not None:
            return self._producer
        settings = {
            "transactional.id": self.name,
            "transaction.timeout.ms": self._config.transaction_timeout_ms,
            "partitioner": "murmur2_random",  # as the Java client's
            "compression.type": self._config.compression,
            "linger.ms": 5,
            "batch.size": 900_000,
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
            raise failure(found, f"cannot begin as {self.name!r}") from None
        self._producer = producer
        return producer

    def _read_to(self, end: int) -> None:
        reader = consumer(self._config)
        until = time.monotonic() + UNDECIDED_SECS
        try:
            with errors("cannot read the marker"):
                reader.assign([TopicPartition(self.name, 0, self._next)])
            while self._next < end:
                with errors("cannot read the marker"):
                    message = reader.poll(0.5)
                if message is not None and message.error() is None:
                    pipeline, topic = json.loads(message.key())
                    self._markers[pipeline, topic] = CommittedEpoch.model_validate_json(message.value())
                    self._next = message.offset() + 1
                    until = time.monotonic() + UNDECIDED_SECS
                elif message is not None and message.error().code() == KafkaError._PARTITION_EOF:
                    self._next = max(self._next, message.offset())
                elif message is not None:
                    raise self._unreadable(message.error())
                if self._next < end and time.monotonic() > until:
                    raise self._undecided()
        finally:
            reader.close()

    def _unreadable(self, error: KafkaError) -> ConnectorError:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # compaction moves no edge: somebody deleted records
            return FatalError(
                f"records of the topic {self.name!r} were deleted, and it says which epochs are in Kafka",
                code="PEN-5020",
                hint="start over with `penstock offsets reset FILE`, and give the topic `cleanup.policy` = compact",
            )
        return failure(error, "cannot read the marker")

    def _undecided(self) -> FatalError:
        where = f"--topic {self.name} --partition 0"
        return FatalError(
            f"a transaction in the topic {self.name!r} was neither committed nor aborted for {UNDECIDED_SECS:g} s, "
            "so nobody knows whether an epoch is in Kafka",
            code="PEN-5020",
            hint=f"the broker lost its end: kafka-transactions.sh find-hanging {where}, then abort {where}, and start again",
        )

    def _broken(self, error: KafkaError, secs: float) -> ConnectorError:
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
        return found if isinstance(found, ConfigError | FatalError) else RetryableError(found.message, code=found.code)

    def _abort(self) -> None:
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.abort_transaction(ANSWER_SECS)
        except KafkaException:
            return  # fenced, or out of reach: the next producer's first call ends the transaction


class Sending:
    """Sends rows, one by one or in bulk, and counts them."""

    def __init__(self, producer: Producer, config: Any, epoch: Epoch) -> None:
        self._producer = producer
        self._epoch = canonical([epoch.pipeline, epoch.incarnation, epoch.number]).encode() if config.headers else b""
        self._rows = 0

    def send(self, topic: str, batch: pa.RecordBatch) -> None:
        keys, values, headers = (batch.column(name) for name in ("key", "value", "headers"))
        bare = headers.null_count == len(headers) or not len(headers.keys)
        each_headers: list[Any] = [[]] * len(headers) if bare else [each or [] for each in headers.to_pylist()]
        for key, value, own in zip(keys.to_pylist(), values.to_pylist(), each_headers, strict=True):
            more = {"headers": self._with_epoch(own)} if own or self._epoch else {}
            self._produce(topic, value, key, more)
            self._rows += 1

    def flush(self) -> None:
        """`commit_transaction` would do it too; here, so that a test can stop where everything is sent."""
        self._producer.flush(ANSWER_SECS)

    def _with_epoch(self, own: list[tuple[str, str]]) -> list[tuple[str, bytes]]:
        found = [(name, value.encode()) for name, value in own]
        if self._epoch:
            found += [("penstock.epoch", self._epoch), ("penstock.row", str(self._rows).encode())]
        return found

    def _produce(self, topic: str, value: bytes | None, key: bytes | None, more: dict[str, Any]) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key=key, **more)
                return
            except BufferError:
                self._producer.poll(0.1)
