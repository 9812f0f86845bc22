"""One subscription of a reliable topic: a window of messages that wait for their acknowledgement, and who gets them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from danube.proto.DanubeApi_pb2 import StreamMessage

from penstock.testing.danube.options import Options

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)

EVICTED_BEATS = 6
"""So many beats without a stream, and a consumer of KEY_SHARED is forgotten."""


class Consumer:
    """One consumer: its messages wait in a queue, which outlives its stream."""

    def __init__(self, name: str, filters: list[str]) -> None:
        self.id = random.getrandbits(63)
        self.name = name
        self.filters = filters
        self.active = True
        self.away = 0
        """Beats without a stream; of KEY_SHARED only."""
        self.queue: asyncio.Queue[StreamMessage] = asyncio.Queue()
        self.returned: list[StreamMessage] = []
        """Taken from the queue for a stream that ended before it could send them."""
        self.session = 0
        """Counts streams: an earlier one ends when a later one begins."""
        self.taken_over = asyncio.Event()

    @property
    def is_evicted(self) -> bool:
        return self.away >= EVICTED_BEATS

    def wants(self, key: str) -> bool:
        return not self.is_evicted and (not self.filters or any(fnmatchcase(key, each) for each in self.filters))

    def take_over(self) -> int:
        self.taken_over.set()
        self.taken_over = asyncio.Event()
        self.session += 1
        return self.session


@dataclass
class Delivery:
    """A message that was handed out."""

    message: Any
    attempt: int = 0
    state: str = "ready"
    """`ready`, `sent`, `waiting` or `poisoned`."""
    until: float = 0.0
    """When its acknowledgement is late (`sent`), or when it is due again (`waiting`)."""
    consumer: int = 0
    reason: str = ""


@dataclass
class Subscription:
    """What a topic keeps for each name under which it is read."""

    name: str
    kind: int
    options: Options
    log: list[Any]
    next: int
    """The first offset that was not handed out."""
    save_cursor: Callable[[int], None]
    dead_letter: Callable[[Any], None]
    is_live: bool = False
    """It began in this life of the broker, which keeps few messages for it: see `Options.live_messages`."""
    consumers: list[Consumer] = field(default_factory=list)
    in_flight: dict[int, Delivery] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    cursor: int = -1
    attempts: dict[int, int] = field(default_factory=dict)
    """For tests: how often each offset was handed out."""
    acknowledged: int = 0
    nacks: list[str] = field(default_factory=list)
    poisoned: set[int] = field(default_factory=set)
    stalled: bool = False
    """It waits for the next message of the topic, and does nothing else: see `_stall`."""
    _commands: list[Callable[[], None]] = field(default_factory=list)
    _saved_at: float = field(default_factory=time.monotonic)
    _turn: int = 0

    def __post_init__(self) -> None:
        self.cursor = self.next - 1

    def find(self, name: str) -> Consumer | None:
        return next((each for each in self.consumers if each.name == name), None)

    def retry_now(self, consumer: Consumer) -> None:
        """A consumer left or came back: what it did not acknowledge goes out again at once."""
        if self.stalled:
            self._commands.append(lambda: self.retry_now(consumer))
            return
        for delivery in self.in_flight.values() if self.kind != KEY_SHARED else ():
            if delivery.state != "poisoned" and (self.kind == EXCLUSIVE or delivery.consumer in (0, consumer.id)):
                delivery.state, delivery.until, delivery.consumer = "waiting", 0.0, 0
        self.pump()

    def published(self) -> None:
        """The topic has a message more."""
        self.stalled = False
        self.advance()
        commands, self._commands = self._commands, []
        for command in commands:
            command()

    def ack(self, offset: int) -> None:
        """Only what waits for it: one that comes too late does nothing."""
        if self.stalled:
            self._commands.append(lambda: self.ack(offset))
            return
        delivery = self.in_flight.get(offset)
        if delivery is not None and delivery.state == "sent":
            self.acknowledged += 1
            self._done(offset)
        self.advance()
        self._stall()

    def nack(self, offset: int, delay_ms: int, reason: str) -> None:
        if self.stalled:
            self._commands.append(lambda: self.nack(offset, delay_ms, reason))
            return
        delivery = self.in_flight.get(offset)
        if delivery is not None:
            self.nacks.append(reason)
            self._fail(delivery, reason, delay_ms)
        self.pump()
        self._stall()

    def _stall(self) -> None:
        """
        As the real one (0.15.1) when it looks for a message that is not there: the newest was acknowledged, or dropped, and an
        earlier one is still on its way, or was dropped. It takes the newest that it remembers for the last one it has read.
        """
        newest = max([*self.in_flight, self.cursor])
        reading = self.next >= len(self.log) and len(self.in_flight) < self.options.max_unacked
        is_served = self.kind != KEY_SHARED and any(each.active for each in self.consumers)
        self.stalled = is_served and reading and not self.poisoned and newest < len(self.log) - 1

    def beat(self) -> None:
        """Twice a second: late acknowledgements, messages that are due again, consumers that are gone."""
        if self.stalled:
            return
        now = time.monotonic()
        for consumer in self.consumers if self.kind == KEY_SHARED else ():
            if not consumer.active and not consumer.is_evicted:
                consumer.away += 1
                if consumer.is_evicted:
                    self._evict(consumer)
            elif consumer.active and not consumer.is_evicted:
                consumer.away = 0
        for delivery in self.in_flight.values():
            if delivery.state == "sent" and now >= delivery.until:
                self._fail(delivery, "ack timeout", 0)
        self.pump()
        if self.options.stalls_by_key and self.kind == KEY_SHARED and any(each.active for each in self.consumers):
            self.stalled = bool(self.in_flight)

    def pump(self) -> None:
        """Hand out what may be handed out now: what is due again, and what is new."""
        if self.options.poison_policy != "block":
            for offset in sorted(self.poisoned):
                if self.options.poison_policy == "dead_letter":
                    self.dead_letter(self.in_flight[offset])
                self._done(offset)
        now = time.monotonic()
        for delivery in list(self.in_flight.values()):
            if delivery.state in ("ready", "waiting") and now >= delivery.until:
                self._send(delivery)
        self.advance()

    def advance(self) -> None:
        """Hand out what is new, as far as the window allows."""
        if self.is_live:  # what was dropped is never acknowledged: the cursor stays before it
            self.next = max(self.next, len(self.log) - self.options.live_messages)
        while not self.poisoned and self.next < len(self.log) and len(self.in_flight) < self.options.max_unacked:
            message = self.log[self.next]
            key = _key(message)
            known = [each for each in self.consumers if not each.is_evicted]
            if self.kind == KEY_SHARED and known and not any(each.wants(key) for each in known):
                self.next += 1
                self._done(self.next - 1)  # nobody asked for this key
                continue
            if self._target(message, looking=True) is None:
                break
            if self.kind == KEY_SHARED and any(_key(each.message) == key for each in self.in_flight.values()):
                break  # the message before it with this key is not acknowledged
            self.in_flight[self.next] = delivery = Delivery(message)
            self.next += 1
            self._send(delivery)

    def _evict(self, consumer: Consumer) -> None:
        """What was on its way there counts as delivered, and who comes later under its name gets nothing: as the real one."""
        for offset in [offset for offset, each in self.in_flight.items() if each.consumer == consumer.id]:
            self._done(offset)

    def flush(self) -> None:
        self.save_cursor(self.cursor)
        self._saved_at = time.monotonic()

    def _send(self, delivery: Delivery) -> None:
        consumer = self._target(delivery.message)
        if consumer is None:
            return
        delivery.attempt += 1
        delivery.state, delivery.consumer = "sent", consumer.id
        delivery.until = time.monotonic() + self.options.ack_timeout_ms / 1000
        offset = delivery.message.msg_id.topic_offset
        self.attempts[offset] = self.attempts.get(offset, 0) + 1
        consumer.queue.put_nowait(delivery.message)

    def _target(self, message: Any, looking: bool = False) -> Consumer | None:
        """Who gets a message now; only a look takes no turn."""
        able = [each for each in self.consumers if each.active]
        if self.kind == KEY_SHARED:
            able = [each for each in able if each.wants(_key(message))]
            return able[fnv1a(_key(message)) % len(able)] if able else None
        if self.kind == SHARED and able:
            self._turn += not looking
            return able[self._turn % len(able)]
        first = self.consumers[:1]  # also of FAILOVER: nobody takes the place of one that is gone
        return first[0] if first and first[0].active else None

    def _fail(self, delivery: Delivery, reason: str, delay_ms: int) -> None:
        delivery.reason, delivery.consumer = reason, 0
        if delivery.attempt > self.options.max_redelivery_count:
            delivery.state = "poisoned"
            self.poisoned.add(delivery.message.msg_id.topic_offset)
            return
        own = self.options.base_redelivery_delay_ms << min(30, max(1, delivery.attempt) - 1)
        delay = min(max(own, delay_ms), self.options.max_redelivery_delay_ms)
        delivery.state, delivery.until = "waiting", time.monotonic() + delay / 1000

    def _done(self, offset: int) -> None:
        self.in_flight.pop(offset, None)
        self.poisoned.discard(offset)
        self.acked.add(offset)
        while self.cursor + 1 in self.acked:
            self.cursor += 1
            self.acked.discard(self.cursor)
        if time.monotonic() - self._saved_at >= self.options.cursor_flush_ms / 1000:
            self.flush()


def fnv1a(key: str) -> int:
    """FNV-1a, 64 bits: what chooses the partition of a routing key."""
    found = 0xCBF29CE484222325
    for byte in key.encode():
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return found


def _key(message: Any) -> str:
    return str(message.routing_key) if message.HasField("routing_key") else str(message.producer_name)
