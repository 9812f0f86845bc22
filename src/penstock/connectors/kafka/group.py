"""A consumer group: where it is, and how far the source has read, for the tools that people watch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition

from penstock.connectors.kafka.client import ANSWER_SECS, Cluster, Place, errors, failure
from penstock.errors import RetryableError

WAIT_SECS = 2.0
"""An epoch waits no longer for the group; what comes later is heard of with the next one."""

_HAS_MEMBERS = (
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.NON_EMPTY_GROUP,
)


class Group:
    """One group, by questions that anybody may ask: a consumer of it would wait for its coordinator for most of a minute."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._asked: Future[Any] | None = None

    def offsets(self, places: Iterable[Place]) -> dict[Place, int]:
        """Where the group is; a partition without a commit is left out."""
        listed = ConsumerGroupTopicPartitions(self._name, [TopicPartition(*place) for place in places])
        if not listed.topic_partitions:  # no topic matches yet; without a list all are meant
            return {}
        with errors(f"cannot ask for the offsets of the group {self._name!r}"):
            (future,) = self._cluster.client.list_consumer_group_offsets(
                [listed], require_stable=True, request_timeout=ANSWER_SECS
            ).values()
            found = future.result().topic_partitions
            for each in found:
                if each.error is not None:
                    raise KafkaException(each.error)
        return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}

    def commit(self, ends: Mapping[Place, int]) -> str:
        """Show how far was read. Gives what is wrong if the group does not take it for good; no run waits for that."""
        what = f"cannot commit offsets to the group {self._name!r}"
        try:
            if self._asked is not None and wait([self._asked], WAIT_SECS).not_done:
                raise TimeoutError
            self._asked = self._ask(ends)
            answer = self._asked.result(WAIT_SECS)
            wrong = next((each.error for each in answer.topic_partitions if each.error is not None), None)
        except KafkaException as error:
            wrong = error.args[0]
        except TimeoutError:
            raise RetryableError(f"{what}: its coordinator does not answer", code="PEN-2003") from None
        if wrong is None:
            return ""
        if wrong.code() in _HAS_MEMBERS:
            return f"the group {self._name!r} has consumers of its own: give `group_id` a name that nobody else uses"
        found = failure(wrong, what)
        if isinstance(found, RetryableError):
            raise found
        return found.message

    def _ask(self, ends: Mapping[Place, int]) -> Future[Any]:
        listed = ConsumerGroupTopicPartitions(self._name, [TopicPartition(*p, offset) for p, offset in ends.items()])
        asked = self._cluster.client.alter_consumer_group_offsets([listed], request_timeout=ANSWER_SECS)
        return next(iter(asked.values()))
