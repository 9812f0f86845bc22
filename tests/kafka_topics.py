"""What the tests of Kafka share: topics of their own, records in transactions, readers that see what a consumer sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.errors import RetryableError
from penstock.source import RangeSource, SourceBatch
from penstock.testing.processes import wait_until

QUIET = {"log_level": 0}


def fresh(stem: str) -> str:
    return f"{stem}-{uuid4().hex[:8]}"


def make_topic(address: str, name: str, partitions: int = 1, replication: int = 1, **config: Any) -> str:
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    settings = {key.replace("_", "."): str(value) for key, value in config.items()}
    finish(admin.create_topics([NewTopic(name, partitions, replication, config=settings)], operation_timeout=60))
    return name


def finish(asked: Mapping[Any, Future[Any]]) -> None:
    """
    Wait for answers. What `result()` raises is also kept by the future, with the caller's frame and so with the client,
    which would be freed, and the process ended, by the client's own thread if that is the last to let the future go.
    """
    for future in asked.values():
        if (error := future.exception(60)) is not None:
            raise KafkaException(*error.args)


def delete_topic(address: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    finish(admin.delete_topics([name], operation_timeout=60))
    wait_until(lambda: name not in admin.list_topics(timeout=10).topics, f"{name} to go")


def remake_topic(address: str, name: str, partitions: int = 1) -> None:
    """Delete a topic and make another one of the same name."""
    delete_topic(address, name)

    def made() -> bool:
        with contextlib.suppress(Exception):
            make_topic(address, name, partitions)
            return True
        return False

    wait_until(made, f"{name} to be made again")


def truncate(address: str, name: str, before: int, partition: int = 0) -> None:
    """Remove the records before an offset, as retention does."""
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    finish(admin.delete_records([TopicPartition(name, partition, before)]))


def send(address: str, topic: str, values: Iterable[bytes | None], partition: int = 0, **more: Any) -> None:
    producer = Producer({"bootstrap.servers": address, "linger.ms": 1, **QUIET})
    for value in values:
        producer.produce(topic, value, partition=partition, **more)
    assert producer.flush(60) == 0


@contextlib.contextmanager
def transaction(address: str, commit: bool = True, id: str | None = None) -> Iterator[Producer]:
    settings = {"bootstrap.servers": address, "transactional.id": id or fresh("test"), **QUIET}
    producer = Producer(settings)
    producer.init_transactions(60)
    producer.begin_transaction()
    yield producer
    assert producer.flush(60) == 0  # else an abort throws them away unsent
    if commit:
        producer.commit_transaction(60)
    else:
        producer.abort_transaction(60)


def records(address: str, topic: str, committed: bool = True) -> list[Any]:
    """What a consumer sees from the first record to the end of now, partition by partition."""
    reader = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "test",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            **QUIET,
        }
    )
    found: list[Any] = []
    try:
        metadata = reader.list_topics(timeout=60).topics
        if topic not in metadata or metadata[topic].error is not None:
            return []
        left = set(metadata[topic].partitions)
        reader.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in sorted(left)])

        def at_end() -> bool:
            for message in reader.consume(1000, 0.05):
                if (error := message.error()) is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                else:
                    raise AssertionError(error)
            return not left

        wait_until(at_end, f"the end of {topic}")
    finally:
        reader.close()
    return sorted(found, key=lambda m: (m.partition(), m.offset()))


def batches(source: RangeSource[Any, Any], split: Any) -> Iterator[SourceBatch]:
    """What a split holds, without the notes of its task."""
    return (item for item in source.read(split) if isinstance(item, SourceBatch))


def values(address: str, topic: str, committed: bool = True) -> Sequence[bytes | None]:
    return [message.value() for message in records(address, topic, committed)]


def acknowledged(source: RangeSource[Any, Any], end: Any) -> None:
    """As the runtime does: a group whose coordinator is not there yet is told again."""

    def told() -> bool:
        try:
            source.ack(end)
        except RetryableError:
            return False
        return True

    wait_until(told, "the group to take offsets")
