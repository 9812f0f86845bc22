"""The topics of a test broker: their logs, producers and subscriptions."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path
from typing import Any

from danube.proto.DanubeApi_pb2 import StreamMessage

from penstock.testing.danube.dispatch import EXCLUSIVE, Consumer, Delivery, Subscription
from penstock.testing.danube.options import Metadata, Options


class Topic:
    """One topic, or one partition of one."""

    def __init__(self, name: str, reliable: bool, options: Options, metadata: Metadata, directory: Path) -> None:
        self.name = name
        self.reliable = reliable
        self.log: list[Any] = []
        self.producers: dict[int, str] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self._options = options
        self._metadata = metadata
        self._file = (directory / (name.strip("/").replace("/", "+") + ".log")) if options.keeps_log else None
        if self._file is not None and self._file.exists():
            self.log = list(_read(self._file.read_bytes()))

    def publish(self, message: Any, topics: Topics) -> None:
        message.msg_id.topic_name = self.name
        message.msg_id.topic_offset = len(self.log) if self.reliable else 0  # as the real one, which keeps none of them
        self.log.append(message)
        if self.reliable and self._file is not None:
            data = message.SerializeToString()
            with self._file.open("ab") as file:
                file.write(struct.pack("<I", len(data)) + data)
        for subscription in self.subscriptions.values():
            if self.reliable:
                subscription.published()
                continue
            for consumer in subscription.consumers:  # no window, no acknowledgement: who is there and has room gets it
                if consumer.active and consumer.queue.qsize() < self._options.loose_messages:
                    consumer.queue.put_nowait(message)
        topics.published += 1

    def subscribe(self, name: str, kind: int, consumer: str, filters: list[str], topics: Topics) -> Consumer | str:
        """The consumer; or why not."""
        subscription = self.subscriptions.get(name)
        if subscription is None:
            subscription = self.subscriptions[name] = self._subscription(name, kind, topics)
        known = subscription.find(consumer)
        if known is not None:
            known.take_over()
            known.active = True
            subscription.retry_now(known)
            return known
        if subscription.kind == EXCLUSIVE and subscription.consumers:
            return f"the Exclusive subscription {name} can't be shared with other consumers"
        made = Consumer(consumer, filters)
        subscription.consumers.append(made)
        subscription.pump()
        return made

    def _subscription(self, name: str, kind: int, topics: Topics) -> Subscription:
        place = f"{self.name} {name}"

        def save(cursor: int) -> None:
            self._metadata.cursors[place] = cursor
            self._metadata.save()

        def dead_letter(delivery: Delivery) -> None:
            copy = StreamMessage()
            copy.CopyFrom(delivery.message)
            origin = delivery.message.msg_id
            copy.attributes["x-original-topic"] = origin.topic_name
            copy.attributes["x-original-subscription"] = name
            copy.attributes["x-original-topic-offset"] = str(origin.topic_offset)
            copy.attributes["x-original-producer-id"] = str(origin.producer_id)
            copy.attributes["x-original-broker-addr"] = origin.broker_addr
            copy.attributes["x-poison-policy"] = "dead_letter"
            copy.attributes["x-delivery-attempt"] = str(delivery.attempt)
            if delivery.reason:
                copy.attributes["x-failure-reason"] = delivery.reason
            copy.msg_id.producer_id = 0
            topics.get(self._options.dead_letter_topic, True).publish(copy, topics)

        # A subscription is new at the head of the log; a known one goes on after its cursor, also if a restart lost the log:
        # then what comes at lower offsets is never delivered, as by a real broker.
        known = self._metadata.cursors.get(place)
        begin = len(self.log) if known is None else known + 1
        log = self.log if self.reliable else []  # of the others it keeps nothing
        found = Subscription(name, kind, self._options, log, begin, save, dead_letter, known is None)
        if known is None and self.reliable and self._options.keeps_log:
            found.flush()
        return found


class Topics:
    """All topics of a broker."""

    def __init__(self, options: Options, metadata: Metadata, directory: Path) -> None:
        self._options = options
        self._metadata = metadata
        self._directory = directory
        self._topics: dict[str, Topic] = {}
        self.unserved = set(metadata.topics) if options.standalone else set()
        self.published = 0

    def find(self, name: str) -> Topic | None:
        """A topic that exists: loaded when it is first asked for."""
        if name not in self._topics and name in self._metadata.topics and name not in self.unserved:
            reliable = self._metadata.topics[name]["reliable"]
            self._topics[name] = Topic(name, reliable, self._options, self._metadata, self._directory)
        return self._topics.get(name)

    def get(self, name: str, reliable: bool, subject: str = "") -> Topic:
        found = self.find(name)
        if found is None:
            self._metadata.topics[name] = {"reliable": reliable, "subject": subject, "policy": "warn", "payload": False}
            self._metadata.save()
            found = self.find(name)
            assert found is not None
        return found

    def facts(self, name: str) -> dict[str, Any]:
        return self._metadata.topics[name]

    def partitions(self, name: str) -> list[str]:
        """As the real one answers: itself, or else whatever has a name that begins so."""
        if name in self._metadata.topics:
            return [name]
        return sorted(each for each in self._metadata.topics if each.startswith(name))

    def producer(self, topic: Topic, name: str) -> int:
        for number, known in topic.producers.items():
            if known == name:
                return number
        number = random.getrandbits(63)
        topic.producers[number] = name
        return number

    def of_producer(self, number: int) -> Topic | None:
        return next((each for each in self._topics.values() if number in each.producers), None)

    def consumers(self) -> list[tuple[Subscription, Consumer]]:
        return [
            (each, consumer)
            for topic in self._topics.values()
            for each in topic.subscriptions.values()
            for consumer in each.consumers
        ]

    def reset(self) -> None:
        """As if it had just been made."""
        for known in (self._topics, self._metadata.topics, self._metadata.cursors, self._metadata.subjects):
            known.clear()

    def forget(self, name: str) -> list[tuple[Subscription, Consumer]]:
        """Drop a topic's subscriptions, as a broker does that hands the topic to another one."""
        topic = self._topics[name]
        gone = [pair for pair in self.consumers() if pair[0] in topic.subscriptions.values()]
        topic.subscriptions.clear()
        return gone

    def subscriptions(self) -> list[Subscription]:
        return [each for topic in self._topics.values() for each in topic.subscriptions.values()]

    def report(self) -> dict[str, Any]:
        """For tests: what the broker holds and knows."""
        return {
            name: {
                "messages": len(topic.log),
                "subject": self.facts(name)["subject"],
                "producers": sorted(topic.producers.values()),
                "subscriptions": {
                    each.name: {
                        "cursor": each.cursor,
                        "acknowledged": each.acknowledged,
                        "in_flight": sorted(each.in_flight),
                        "attempts": {str(offset): count for offset, count in each.attempts.items()},
                        "nacks": each.nacks,
                        "stalled": each.stalled,
                        "poisoned": sorted(each.poisoned),
                        "evicted": [one.name for one in each.consumers if one.is_evicted],
                        "consumers": {one.name: one.active for one in each.consumers},
                    }
                    for each in topic.subscriptions.values()
                },
            }
            for name, topic in self._topics.items()
        }


def is_name(topic: str) -> bool:
    return re.fullmatch(r"/[\w-]+/[\w-]+", topic) is not None


def _read(data: bytes) -> Any:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        yield StreamMessage.FromString(data[at + 4 : at + 4 + size])
        at += 4 + size
