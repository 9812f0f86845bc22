"""Producers of one task: a window of messages that wait for the broker's answer, one at a time of each routing key."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.connectors.danube import partitions as parts
from penstock.connectors.danube.loop import shared, submit
from penstock.connectors.messages import Window
from penstock.errors import ConfigError, ConnectorError, DataError, RetryableError
from penstock.schema.registry.danube_client import (
    DanubeConfig,
    Place,
    api,
    channel,
    current,
    failure,
    fnv1a,
    grpc,
    partitions_of,
    services,
)

TRIES = 6
"""So often a call is tried before the epoch is: what was sent is sent again then."""


@dataclass(frozen=True)
class Binding:
    """The schema that messages name, and how the producer refers to it."""

    subject: str
    id: int
    version: int
    reference: tuple[str, int | bool]


@dataclass
class _Producer:
    id: int
    stub: Any
    place: Place


class Message(NamedTuple):
    """A message on its way: `topic` is its partition of `base`, and `stream_message` lacks only what the producer knows."""

    base: str
    topic: str
    key: str | None
    binding: Binding | None
    stream_message: Any


class Producers:
    """Sends from the loop's thread; `send` blocks while the window is full, `settle` until it is empty."""

    def __init__(self, config: DanubeConfig, partitions: int, reliable: bool, window: int, name: str) -> None:
        self._config = config
        self._partitions = partitions
        self._reliable = reliable
        self._name = name
        self._most = window
        self._window = Window(window, TRIES * config.timeout)
        self._numbers = itertools.count(1)
        self._made: dict[str, asyncio.Future[_Producer]] = {}
        self._whole: set[str] = set()  # topics whose partitions are all there
        self._locks: dict[str, asyncio.Lock] = {}  # of topics while that is found out
        self._channels: dict[str, Any] = {}
        self._waiting: deque[Message] = deque()
        self._keys: dict[
            tuple[str, str], deque[Message]
        ] = {}  # keys of which one is under way, and those that wait for it
        self._workers: set[asyncio.Task[None]] = set()
        self._failed = False
        self._loop = shared()

    def message(
        self,
        topic: str,
        binding: Binding | None,
        payload: bytes,
        key: str | None,
        number: int,
        attributes: Mapping[str, str],
    ) -> Message:
        """A message as it is sent; `number` chooses the partition of one without a key."""
        base = topic
        if self._partitions:
            chosen = fnv1a(key) if key is not None else number
            topic = f"{topic}-part-{chosen % self._partitions}"
        made = api.StreamMessage(
            request_id=next(self._numbers),
            payload=payload,
            publish_time=time.time_ns() // 1_000_000,
            producer_name=self._name,
            attributes=attributes,
            routing_key=key,
        )
        made.msg_id.topic_name = topic
        if binding is not None:
            made.schema_id, made.schema_version = binding.id, binding.version
        return Message(base, topic, key, binding, made)

    def send(self, messages: Sequence[Message]) -> None:
        """Hand over messages, in their order; raises what an earlier one failed with."""
        self._window.enter(len(messages))
        self._loop.call_soon_threadsafe(self._begin, messages)

    def settle(self) -> None:
        """Wait until every message is answered."""
        self._window.settle()

    def close(self) -> None:
        submit(self._close()).result(30)

    # -- in the loop's thread ------------------------------------------------------------------------------------

    def _begin(self, messages: Sequence[Message]) -> None:
        """As many workers as the window allows: each sends one message at a time, so nothing is made for each message."""
        self._waiting.extend(messages)
        for _ in range(min(len(self._waiting), self._most - len(self._workers))):
            worker = self._loop.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        while self._waiting and not self._failed:
            message = self._waiting.popleft()
            if message.key is None:
                await self._deliver(message)
                continue
            name = (message.topic, message.key)
            if (others := self._keys.get(name)) is not None:
                others.append(message)  # sent by who sends the one before it
                continue
            self._keys[name] = others = deque([message])
            while others and not self._failed:
                await self._deliver(others.popleft())
            del self._keys[name]

    async def _deliver(self, message: Message) -> None:
        """Send one message. After one that fails none is sent: it could overtake it, and the epoch is sent again."""
        error: ConnectorError | None = None
        try:
            await self._send(message)
        except ConnectorError as broken:
            error, self._failed = broken, True
        except asyncio.CancelledError:
            self._failed = True
            self._window.leave(RetryableError("the sink was closed", code="PEN-2001"))
            raise
        self._window.leave(error)

    async def _send(self, message: Message) -> None:
        topic, sent = message.topic, message.stream_message
        for left in range(TRIES, -1, -1):
            made = self._made.get(topic)
            if made is None:
                made = self._made[topic] = asyncio.ensure_future(self._produce(message))
            try:
                producer = made.result() if made.done() else await asyncio.shield(made)
                sent.msg_id.producer_id = producer.id
                sent.msg_id.broker_addr = producer.place.broker
                await producer.stub.SendMessage(sent, **self._with(producer.place))
                return
            except grpc.RpcError as error:
                broken: ConnectorError = _failure(error, topic, self._config)
            except RetryableError as error:
                broken = error
            if not left or not isinstance(broken, RetryableError):
                raise broken
            if self._made.get(topic) is made:  # it may be another broker's by now, or one that was started again
                del self._made[topic]
            await asyncio.sleep(min(2.0, 0.05 * 2 ** (TRIES - left)) * random.uniform(0.5, 1.0))

    async def _produce(self, message: Message) -> _Producer:
        """The producer of a partition, once all partitions are there: see `partitions.missing`."""
        base, binding = message.base, message.binding
        async with self._locks.setdefault(base, asyncio.Lock()):
            if base not in self._whole:
                request = api.TopicLookupRequest(request_id=next(self._numbers), topic=base)
                discovery = services.DiscoveryStub(self._channel(self._config.url))
                answer = await discovery.TopicPartitions(request, **self._with())
                for topic in parts.missing(base, self._partitions, partitions_of(base, answer.partitions)):
                    await self._make(topic, binding)
                self._whole.add(base)
        return await self._create(message.topic, binding)

    async def _make(self, topic: str, binding: Binding | None) -> None:
        for left in range(TRIES, -1, -1):
            try:
                await self._create(topic, binding)
                return
            except grpc.RpcError as error:  # a cluster makes a topic and answers that it is to be looked up again
                will_not = not isinstance(failure(error, topic, self._config), RetryableError)
                if not left or will_not or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05 * (TRIES - left))

    async def _create(self, topic: str, binding: Binding | None) -> _Producer:
        place = await self._place(topic)
        stub = services.ProducerServiceStub(self._channel(place.connect))
        request = api.ProducerRequest(
            request_id=next(self._numbers),
            producer_name=self._name,
            topic_name=topic,
            dispatch_strategy=api.Reliable if self._reliable else api.NonReliable,
        )
        if binding is not None:
            request.schema_ref.subject = binding.subject
            setattr(request.schema_ref, *binding.reference)
        answer = await stub.CreateProducer(request, **self._with(place))
        return _Producer(answer.producer_id, stub, place)

    async def _place(self, topic: str) -> Place:
        """Where a topic is; one that is not there yet is made where we are."""
        request = api.TopicLookupRequest(request_id=next(self._numbers), topic=topic)
        here = self._config.url
        try:
            answer = await services.DiscoveryStub(self._channel(here)).TopicLookup(request, **self._with())
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return Place(here, here)
            raise
        return Place(answer.connect_url, answer.broker_url, answer.proxy)

    def _channel(self, url: str) -> Any:
        if url not in self._channels:
            self._channels[url] = channel(self._config, url, grpc.aio)
        return self._channels[url]

    def _with(self, place: Place | None = None) -> dict[str, Any]:
        return {"timeout": self._config.timeout, "metadata": current(self._config, place)}

    async def _close(self) -> None:
        under_way: list[asyncio.Future[Any]] = [*self._workers, *self._made.values()]
        for each in under_way:
            each.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for link in self._channels.values():
            await link.close()


def _failure(error: Any, topic: str, config: DanubeConfig) -> ConnectorError:
    """
    As for every call; but a message that the topic's policy refuses will be refused again.

    A topic that has gone to another broker and a log that cannot be written come with the same code.
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED and "to publish" in details:
        if not any(words in details.lower() for words in ("schema", "validation")):
            return RetryableError(f"{topic}: the broker takes no message now: {details[:300]}", code="PEN-2001")
        hint = "the topic enforces a schema: set `schema_subject` to its subject, or change the topic's policy"
        return ConfigError(f"{topic}: the broker refuses a message: {details[:300]}", code="PEN-1016", hint=hint)
    if any(words in details for words in ("larger than max", "too large", "exceeds maximum")):
        hint = "set `max_message_bytes` to the broker's own limit: a row above it becomes a bad row"
        return DataError(f"{topic}: the broker does not take a message of that size: {details[:300]}", hint=hint)
    return failure(error, topic, config)
