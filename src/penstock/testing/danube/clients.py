"""A plain producer and a plain consumer, for tests: what anyone else's program sees of a broker."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from penstock.schema.registry.danube_client import DanubeConfig, api, channel, fnv1a, services


class PlainProducer:
    """Sends one message after the other; made again after a restart of the broker."""

    def __init__(self, url: str, topic: str, *, partitions: int = 0, reliable: bool = True, subject: str = "") -> None:
        self._channel = channel(DanubeConfig(url=url), url)
        self._stub = services.ProducerServiceStub(self._channel)
        self._numbers = itertools.count(1)
        names = [f"{topic}-part-{number}" for number in range(partitions)] or [topic]
        self._ids = {name: self._create(name, reliable, subject) for name in names}

    def __enter__(self) -> PlainProducer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def send(
        self,
        payload: bytes,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        schema: tuple[int, int] | None = None,
    ) -> None:
        names = list(self._ids)
        number = next(self._numbers)
        name = names[(fnv1a(key) if key is not None else number) % len(names)]
        message = api.StreamMessage(
            request_id=number,
            msg_id=api.MsgID(producer_id=self._ids[name], topic_name=name),
            payload=payload,
            publish_time=time.time_ns() // 1_000_000,
            producer_name="plain",
            attributes=dict(attributes or {}),
            routing_key=key,
        )
        if schema is not None:
            message.schema_id, message.schema_version = schema
        self._stub.SendMessage(message, timeout=30)

    def _create(self, name: str, reliable: bool, subject: str) -> int:
        request = api.ProducerRequest(
            producer_name="plain",
            topic_name=name,
            dispatch_strategy=api.Reliable if reliable else api.NonReliable,
            schema_ref=api.SchemaReference(subject=subject, use_latest=True) if subject else None,
        )
        return int(self._stub.CreateProducer(request, timeout=30).producer_id)


class PlainConsumer:
    """Receives and acknowledges one message after the other."""

    def __init__(
        self, url: str, topic: str, subscription: str = "plain", *, kind: int = 0, name: str = "plain"
    ) -> None:
        self._channel = channel(DanubeConfig(url=url), url)
        self._stub = services.ConsumerServiceStub(self._channel)
        self._subscription = subscription
        request = api.ConsumerRequest(
            topic_name=topic, consumer_name=name, subscription=subscription, subscription_type=kind
        )
        found = self._stub.Subscribe(request, timeout=30)
        self._call = self._stub.ReceiveMessages(api.ReceiveRequest(consumer_id=found.consumer_id))

    def __enter__(self) -> PlainConsumer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._call.cancel()
        self._channel.close()

    def next(self, ack: bool = True) -> Any:
        message = next(self._call)
        if ack:
            self.ack(message)
        return message

    def ack(self, message: Any) -> None:
        self._stub.Ack(api.AckRequest(msg_id=message.msg_id, subscription_name=self._subscription), timeout=30)

    def nack(self, message: Any, reason: str, delay_ms: int | None = None) -> None:
        request = api.NackRequest(
            msg_id=message.msg_id, subscription_name=self._subscription, reason=reason, delay_ms=delay_ms
        )
        self._stub.Nack(request, timeout=30)
