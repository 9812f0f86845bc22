"""The subscriptions of a source: one stream per partition, each with a reconnect of its own, on one event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.connectors.danube.gaps import Gaps
from penstock.connectors.danube.message import envelope
from penstock.connectors.danube.names import EXCLUSIVE, Names, Settings
from penstock.connectors.danube.partitions import has_gap
from penstock.connectors.danube.room import HELD, Room
from penstock.connectors.danube.schemas import Refusals, Refused, Schemas
from penstock.errors import ConnectorError, RetryableError
from penstock.schema.registry.danube_client import (
    Place,
    api,
    channel,
    current,
    failure,
    grpc,
    partitions_of,
    services,
)
from penstock.source import ConnectorMetrics, HealthStatus, Sender

logger = logging.getLogger("penstock.danube")

TRIES = 5
"""So many tries in a row at one partition, and the runtime learns of it: it counts them, and stops in the end."""
LOOK_SECS = 15.0
"""How often new partitions are looked for, and the broker is asked if it still knows a consumer."""
SOON_SECS = 0.1
"""How often they are looked for while a topic is being made: a partition has to be subscribed to before its first message."""
TICK_SECS = 0.05
GATHER_SECS = 0.002
"""How long messages gather before they go to the journal together: it takes a hundred as easily as one."""
ACKS = 16
"""
Acknowledgements of one subscription that may wait for the broker's answer.

A broker (0.15.1) queues 32 commands for a subscription. If that queue is full when the process dies, its partition stops for
good: what notices the death waits for a place in the queue, and the queue for what notices the death. So half of it stays free.
"""
ACK_PAUSES = (0.0, 0.2, 1.0, 5.0)
"""Before each try at one acknowledgement: a message that comes again after half a minute may be too old to be known."""
_TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
SETTLE_SECS = 2.0
"""How long a stop waits for the acknowledgements of what was handed over: the rest comes again, and is dropped."""


@dataclass
class Counts:
    """For metrics; changed on the loop, read by anyone."""

    records: int = 0
    bytes: int = 0
    errors: int = 0
    acked: int = 0
    refused: int = 0
    skipped: int = 0
    reconnects: int = 0

    def metrics(self) -> ConnectorMetrics:
        custom = {
            "acknowledged_total": float(self.acked),
            "refused_total": float(self.refused),
            "skipped_total": float(self.skipped),
            "reconnects_total": float(self.reconnects),
        }
        return ConnectorMetrics(self.records, self.bytes, self.errors, None, custom)


@dataclass(eq=False)
class Session:
    """One life of a subscription. What it delivered may be acknowledged only through it: see `_acknowledge`."""

    partition: str
    stub: Any
    channel: Any
    place: Place
    consumer_id: int = 0
    alive: bool = True
    call: Any = None
    """The stream that it receives from."""
    acks: deque[Any] = field(default_factory=deque)
    """Places of messages that are durable, and not yet acknowledged."""
    acking: set[asyncio.Task[None]] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    """Offsets of acknowledgements that are on their way."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Listener:
    """Receives from all partitions until the sender stops, and acknowledges what is durable."""

    settings: Settings
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._states: dict[str, str] = {}  # per partition why it is not connected; empty: it is
        self._streams: dict[str, str] = {}  # of each partition the topic that was asked for
        self._refusals = Refusals()
        self._names = Names(self.settings)
        self._gaps = Gaps(self.settings.notes, f"{self.settings.config.url} {self.settings.subscription}")
        self._numbers = itertools.count(1)

    # -- the loop ------------------------------------------------------------------------------------------------

    async def run(self, sender: Sender) -> None:
        """Until the sender stops, or a partition cannot be had."""
        self._states, self._no_room, self._incomplete = {}, False, False
        self._room = Room(sender)
        self._arrived = asyncio.Event()
        self._waiting: list[tuple[Session, Any, bytes]] = []
        self._sessions: set[Session] = set()
        self._closing: set[asyncio.Future[Any]] = set()
        self._sender, self._loop = sender, asyncio.get_running_loop()
        self._schemas = Schemas(self.settings.config, self.settings.subject, self.settings.frames)
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gaps.begin()
        self._start(self._look())
        self._start(self._hand_over())
        try:
            while not sender.stopped and not self._failed.done():
                await asyncio.wait([self._failed], timeout=TICK_SECS)
                self._room.look()
                for session in self._sessions if self._room.held else ():
                    session.call.cancel()
            await self._settle()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*self._closing, return_exceptions=True)
            self._gaps.end()
            self._schemas.close()
        broken = self._failed.exception() if self._failed.done() else None
        if broken is not None and not sender.stopped:
            raise broken

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whatever ends a task ends the run: a partition that nobody reads any more must not go unnoticed."""
        broken = None if task.cancelled() else task.exception()
        if broken is not None:
            self._fail(broken)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def health(self) -> HealthStatus:
        """What is connected, and what was refused last."""
        states = dict(self._states)
        down = {partition: why for partition, why in states.items() if why}
        if not states:
            return HealthStatus()
        if down:
            partition, why = next(iter(down.items()))
            return HealthStatus.degraded(f"{len(down)} of {len(states)} are not connected: {partition}: {why}")
        if last := self._refusals.last:
            return HealthStatus.degraded(f"{self.counts.refused} deliveries were refused, the last: {last}")
        if last := self._gaps.last:
            return HealthStatus.degraded(last)
        return HealthStatus.healthy()

    async def _look(self) -> None:
        """Receive from every partition, also from those that come later."""
        while True:
            for partition in await self._partitions():
                if partition not in self._states:
                    self._states[partition] = "connecting"
                    self._start(self._keep_receiving(partition))
            await asyncio.sleep(SOON_SECS if self._incomplete else LOOK_SECS)

    async def _partitions(self) -> list[str]:
        """Every partition of every topic; a broker that cannot say leaves those that are known."""
        link = channel(self.settings.config, self.settings.config.url, grpc.aio)
        found: list[str] = []
        self._incomplete = False
        try:
            for topic in self.settings.topics:
                request = api.TopicLookupRequest(request_id=next(self._numbers), topic=topic)
                answer = await services.DiscoveryStub(link).TopicPartitions(request, **self._with())
                partitions = partitions_of(topic, answer.partitions) or [topic]
                self._incomplete |= has_gap(topic, partitions)
                self._streams |= dict.fromkeys(partitions, topic)
                found += partitions
        except grpc.RpcError as error:
            topics = ", ".join(self.settings.topics)
            broken = failure(error, f"the partitions of {topics} cannot be listed", self.settings.config)
            if not self._states:
                raise broken from error
        finally:
            await link.close()
        return found

    async def _keep_receiving(self, partition: str) -> None:
        """Connect, receive, and connect again: with a pause that doubles, and an end."""
        tries = 0
        while True:
            while self._room.held:
                self._states[partition] = HELD
                await asyncio.sleep(TICK_SECS)
            began = time.monotonic()
            try:
                await self._receive(partition)
            except grpc.RpcError as error:
                broken = failure(error, partition, self.settings.config)
            except ConnectorError as error:
                broken = error
            if self._room.held:
                continue  # it was left, and nothing is broken
            if time.monotonic() - began > 10 or not self._states[partition]:
                tries = 0  # it was connected
            self._states[partition] = broken.message
            self.counts.errors += 1
            self.counts.reconnects += 1
            tries += 1
            if tries >= TRIES or not isinstance(broken, RetryableError):
                raise broken
            await asyncio.sleep(min(5.0, 0.1 * 2**tries) * random.uniform(0.5, 1.0))

    async def _receive(self, partition: str) -> None:
        """One life of a subscription: look up, subscribe, receive until it breaks."""
        session = await self._subscribe(partition)
        watching = asyncio.create_task(self._watch(session))
        try:
            request = api.ReceiveRequest(request_id=next(self._numbers), consumer_id=session.consumer_id)
            call = session.stub.ReceiveMessages(request, metadata=current(self.settings.config, session.place))
            session.call = call
            self._sessions.add(session)
            watching.add_done_callback(lambda done: call.cancel())
            await call.wait_for_connection()
            self._states[partition] = ""
            async for message in call:
                await self._take(session, message)
            code = await call.code()
            why = "its stream ended; is there another of that name?"
            raise RetryableError(f"{partition}: the consumer was closed, {why} ({code.name})", code="PEN-2001")
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._room.held and not (own and own.cancelling()):
                raise RetryableError(f"{partition}: {HELD}", code="PEN-2001") from None
            if watching.done() and not watching.cancelled() and not (own and own.cancelling()):
                raise RetryableError(f"{partition}: {watching.result()}", code="PEN-2001") from None
            raise
        finally:
            # From here on no acknowledgement of this life goes out: after a restart of the broker the same offset may be
            # another message, which nobody has written down.
            session.alive = False
            self._sessions.discard(session)
            self._names.left(partition)
            for task in (watching, *session.acking):
                task.cancel()
            self._closing.add(asyncio.ensure_future(session.channel.close()))

    async def _subscribe(self, partition: str) -> Session:
        own = self.settings
        place = await self._place(partition)
        link = channel(own.config, place.connect, grpc.aio)
        session = Session(partition, services.ConsumerServiceStub(link), link, place)
        request = api.ConsumerRequest(
            request_id=next(self._numbers),
            topic_name=partition,
            consumer_name=self._names.of(partition),
            subscription=own.subscription,
            subscription_type=own.kind,
            key_filters=own.filters,
        )
        try:
            session.consumer_id = (await session.stub.Subscribe(request, **self._with(place))).consumer_id
        except BaseException as error:
            # A broker (0.15.1) whose consumer died while messages were handed to it waits for ever for room there, and answers
            # nobody who subscribes. Who reads on as that consumer makes room.
            known = self._names.id(partition)
            if isinstance(error, grpc.RpcError) and error.code() is _TOO_LATE and known is not None:
                session.consumer_id = known
                return session
            await link.close()
            raise
        self._names.keep(partition, session.consumer_id)
        return session

    async def _place(self, partition: str) -> Place:
        link = channel(self.settings.config, self.settings.config.url, grpc.aio)
        try:
            request = api.TopicLookupRequest(request_id=next(self._numbers), topic=partition)
            answer = await services.DiscoveryStub(link).TopicLookup(request, **self._with())
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return Place(self.settings.config.url, self.settings.config.url)  # its answer to `Subscribe` says more
        finally:
            await link.close()
        if answer.response_type == api.TopicLookupResponse.Failed:
            raise RetryableError(f"{partition}: no broker serves it now", code="PEN-2001")
        return Place(answer.connect_url, answer.broker_url, answer.proxy)

    async def _watch(self, session: Session) -> str:
        """Ends, with the reason, when the broker no longer knows the consumer: its stream would stay silent for ever."""
        health = services.HealthCheckStub(session.channel)
        kind = api.HealthCheckRequest.Consumer
        while True:
            await asyncio.sleep(LOOK_SECS)
            request = api.HealthCheckRequest(request_id=next(self._numbers), client=kind, id=session.consumer_id)
            try:
                answer = await health.HealthCheck(request, **self._with(session.place))
            except grpc.RpcError as error:
                return failure(error, "the broker was asked for the consumer's health").message
            except RetryableError as error:
                return error.message
            if answer.status == api.HealthCheckResponse.CLOSE:
                return "the broker no longer knows the consumer"

    def _with(self, place: Place | None = None) -> dict[str, Any]:
        return {"timeout": self.settings.config.timeout, "metadata": current(self.settings.config, place)}

    # -- messages ------------------------------------------------------------------------------------------------

    async def _take(self, session: Session, message: Any) -> None:
        frame = b""
        if self.settings.kind == EXCLUSIVE and (gap := self._gaps.look(message.msg_id)):
            self.counts.skipped = self._gaps.skipped
            logger.error("%s; another consumer under this name took them, or the broker dropped them", gap)
        if self._schemas.needed:
            try:
                frame = await self._schemas.frame(message)
            except Refused as refused:
                await self._refuse(session, message, str(refused))
                return
        self._refusals.taken(message.msg_id)
        while (self._no_room or self._sender.full) and not self._sender.stopped:
            if self._room.held:
                return  # with the session; it comes again
            await asyncio.sleep(TICK_SECS)  # nothing is taken, and the connection stays for a while
        self._waiting.append((session, message, frame))
        self._arrived.set()

    async def _hand_over(self) -> None:
        """All that gathered goes to the journal as one unit; what it has no room for is offered again."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(GATHER_SECS)
            self._arrived.clear()
            taken, self._waiting = self._waiting, []
            envelopes = [envelope(one, frame, self._streams[session.partition]) for session, one, frame in taken]
            places = [(session, message.msg_id) for session, message, _ in taken]
            room = self._room
            room.enter(places)

            def durable(places: list[tuple[Session, Any]] = places, room: Room = room) -> None:
                self._loop.call_soon_threadsafe(self._acknowledge, places, room)  # from the journal's thread

            while not self._sender.stopped and not self._sender.offer(envelopes, durable):
                self._no_room = True
                await asyncio.sleep(TICK_SECS)
            self._no_room = False
            self.counts.records += len(taken)
            self.counts.bytes += sum(len(message.payload) for _, message, _ in taken)

    def _acknowledge(self, places: list[tuple[Session, Any]], room: Room) -> None:
        room.leave(places)
        for session, place in places:
            if session.alive:
                session.acks.append(place)
        for session in self._sessions:
            for _ in range(min(len(session.acks), ACKS - len(session.acking))):
                task = asyncio.create_task(self._ask(session))
                session.acking.add(task)
                task.add_done_callback(session.acking.discard)

    async def _ask(self, session: Session) -> None:
        """
        One acknowledgement after the other, as long as some wait; the newest goes out when those before it are answered.

        A broker (0.15.1) that gets it while an earlier message is still on its way takes nothing more, no acknowledgement
        and no refusal, and delivers nothing again, until somebody sends the next message.
        """
        name, acks = self.settings.subscription, session.acks
        while acks:
            place = acks.popleft()
            session.asked.add(place.topic_offset)
            try:
                while not acks and min(session.asked, default=place.topic_offset) < place.topic_offset:
                    session.answered.clear()
                    await session.answered.wait()
                request = api.AckRequest(request_id=next(self._numbers), msg_id=place, subscription_name=name)
                for pause in ACK_PAUSES:
                    await asyncio.sleep(pause)
                    try:
                        await session.stub.Ack(request, **self._with(session.place))
                        self.counts.acked += 1
                        break
                    except (grpc.RpcError, RetryableError):
                        self.counts.errors += 1  # after the last try the message comes again, and is acknowledged then
            finally:
                session.asked.discard(place.topic_offset)
                session.answered.set()

    async def _refuse(self, session: Session, message: Any, reason: str) -> None:
        """Hand it back with the reason: the broker's own policy says what becomes of it."""
        self.counts.refused += 1
        logger.warning("refused %s", self._refusals.add(message.msg_id, reason))
        request = api.NackRequest(
            request_id=next(self._numbers),
            msg_id=message.msg_id,
            subscription_name=self.settings.subscription,
            reason=reason,
        )
        await session.stub.Nack(request, **self._with(session.place))

    async def _settle(self) -> None:
        until = time.monotonic() + SETTLE_SECS
        while (not self._room.is_settled or any(each.acking for each in self._sessions)) and time.monotonic() < until:
            await asyncio.sleep(0.005)
