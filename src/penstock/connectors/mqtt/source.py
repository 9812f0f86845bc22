"""Messages of an MQTT broker."""

from __future__ import annotations

import base64
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions
from pydantic import Field, NonNegativeInt, field_validator

from penstock.config import Config
from penstock.connectors.mqtt.config import BrokerConfig
from penstock.connectors.mqtt.link import PUBACK, PUBCOMP, PUBREC, Answered, Arrived, Event, Joined, Link, Released
from penstock.connectors.mqtt.received import Packet, Received
from penstock.durable import Json, make_directory, write_atomic
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.source import (
    BufferedBridge,
    ConnectorMetrics,
    HealthStatus,
    PollingSource,
    Schemas,
    SourceCheckpoint,
    SourceContext,
    SourceEnvelope,
    SourceRecord,
)

QOS_0_MESSAGES = 10_000
QOS_0_BYTES = 64 << 20
"""So many messages, or so many bytes of QoS 0, may wait in memory before more of QoS 0 are dropped."""

QoS = Literal[0, 1, 2]


class Subscription(Config):
    filter: str
    """The filter, as in `topics`."""

    qos: QoS
    """Its own quality of service."""


class MqttConfig(BrokerConfig):
    identity: ClassVar[frozenset[str]] = frozenset({"topics", "client_id"})

    topics: Annotated[tuple[str | Subscription, ...], Field(min_length=1)]
    """Filters to subscribe to: `sensors/+/state`, `alarms/#`, `$share/group/jobs/#`, or with a quality of service of their own:
    `{ filter = "logs/#", qos = 0 }`. The topic of a message is its stream."""

    qos: QoS = 1
    """Quality of service of filters that name none. Under 1 and 2 a message is acknowledged once it is on disk here."""

    client_id: str | None = None
    """The name of the session at the broker, which no other client may have; by default one is made and kept in `state_dir`."""

    session_expiry_secs: NonNegativeInt = 604_800
    """How long the broker keeps messages while the pipeline is away (MQTT 5); with 3.1.1 the broker decides."""

    @field_validator("topics")
    @classmethod
    def _are_filters(cls, topics: tuple[str | Subscription, ...]) -> tuple[str | Subscription, ...]:
        for name in (each.filter if isinstance(each, Subscription) else each for each in topics):
            levels = name.split("/")
            ends = all(level in ("+", "#") or not set("+#") & set(level) for level in levels) and "#" not in levels[:-1]
            if not name or not ends or "\0" in name:
                raise ValueError(f"{name!r} is no filter: + takes the place of a whole level, # that of all at the end")
        return topics

    def filters(self) -> dict[str, int]:
        """Each filter and its quality of service."""
        return {
            (each.filter if isinstance(each, Subscription) else each): (
                each.qos if isinstance(each, Subscription) else self.qos
            )
            for each in self.topics
        }


class Mqtt(PollingSource[MqttConfig]):
    """
    A message is an envelope whose stream is its topic; user properties and `mqtt.retained` are its attributes.

    Exactly-once from the acknowledgement on, under QoS 1 and 2: PUBACK and PUBREC follow the fsync, and packets that come
    again are known by what was journaled with them. `supports_replay` is False: the broker forgets what was acknowledged.
    """

    name = "mqtt"
    supports_replay = False

    def __init__(self, config: MqttConfig) -> None:
        super().__init__(config)
        self._link: Link | None = None
        self._connection = 0
        self._bridge: BufferedBridge[tuple[int, Event]] = BufferedBridge()
        self._received = Received()
        self._subscribed: dict[str, int] = {}
        self._batch = 0
        self._to_send: deque[_Answers] = deque()  # until the batch is on disk
        self._acked: list[Packet] = []  # under QoS 1; the broker may not have seen it
        self._is_asking = self._has_answered = False
        self._repeats = self._dropped = 0
        self._unpromised = _Unpromised()
        self._repeats_known = -1  # how many there were when nothing more came again; -1: not known on this connection

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        self._unpromised = _Unpromised()
        self._bridge = BufferedBridge(1 << 20)  # of what is acknowledged, the protocol allows 65,535 at a time
        self._client_id = self._name()
        try:
            self._connect()
        except RetryableError as error:
            raise FatalError(error.message, code="PEN-5001", hint=error.hint or "check `url` and the broker") from error

    def close(self) -> None:
        self._bridge.close()
        if self._link is not None:
            self._link.leave()
        self._link = None

    def schema(self) -> Schemas:
        return {}

    def data_ready_notify(self) -> threading.Event:
        return self._bridge.ready

    @property
    def _is_connected(self) -> bool:
        return self._link is not None and self._link.failure is None

    def health_check(self) -> HealthStatus:
        if not self._is_connected:
            return HealthStatus()
        if self._unpromised.crowd(self._bridge):
            return HealthStatus.degraded(f"{len(self._bridge):,} messages wait, and those of QoS 0 are dropped")
        return HealthStatus.healthy()

    def metrics(self) -> ConnectorMetrics:
        custom = {"mqtt_repeats_total": self._repeats, "mqtt_qos_0_dropped_total": self._dropped}
        return ConnectorMetrics(errors_total=self._dropped, custom=custom)

    def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
        """What the broker sent; an empty list when only the session has moved on, which is journaled as well."""
        while True:
            events = self._bridge.take(max_records)
            if events is None and self._is_asking:  # nobody can say yet that this was all
                self._bridge.ready.clear()
                if not len(self._bridge) and self._is_connected:
                    self._bridge.ready.wait(1)
                events = self._bridge.take(max_records)
            if events is None:
                return [] if self._stay_connected() else None
            found = self._take(events)
            if found is not None:
                return found

    def _take(self, events: Sequence[tuple[int, Event]]) -> list[SourceEnvelope] | None:
        """The new messages among what happened; None if nothing came of it."""
        found: list[SourceEnvelope] = []
        answers = _Answers(self._batch + 1, self._connection)
        moved = False
        for connection, event in events:
            if isinstance(event, Arrived):
                if self._is_new(event, connection, answers):
                    found.append(_envelope(event))
            else:
                moved = self._follow(event, connection, answers) or moved
        self._ask()
        if not (moved or found or answers.packets):
            return None
        self._batch += 1
        self._to_send.append(answers)
        return found

    def checkpoint(self) -> SourceCheckpoint:
        session: dict[str, Json] = {"subscribed": dict(self._subscribed), "received": self._received.pack()}
        return SourceCheckpoint(offsets={"batch": self._batch}, metadata=session)

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        try:
            self._batch = int(checkpoint.offsets["batch"])
            self._received = Received(checkpoint.metadata["received"])
            self._subscribed = dict(checkpoint.metadata["subscribed"])
        except (KeyError, TypeError, ValueError) as error:
            raise FatalError(
                "the journal holds a checkpoint that is not one of this source",
                code="PEN-5011",
                hint="`penstock offsets reset` begins a new one",
            ) from error

    def commit(self, offsets: Mapping[str, Json]) -> None:
        """The batches are on disk: acknowledge what came on the connection that is still there."""
        while self._to_send and self._to_send[0].batch <= offsets["batch"]:
            answers = self._to_send.popleft()
            if answers.connection == self._connection and self._link is not None:
                self._link.acknowledge(answers.packets)
                self._acked += answers.to_confirm
                self._has_answered = self._has_answered or bool(answers.packets)
        self._ask()

    # -- the session -------------------------------------------------------------------------------------------------

    def _is_new(self, message: Arrived, connection: int, answers: _Answers) -> bool:
        if message.qos == 0:
            self._unpromised.taken += len(message.payload)
            return True
        is_new, packet = self._received.take(message, connection)
        self._repeats += not is_new
        if connection == self._connection:
            answers.packets.append((PUBACK if message.qos == 1 else PUBREC, message.mid))
            if message.qos == 1:
                answers.to_confirm.append(packet)
        return is_new

    def _follow(self, event: Event, connection: int, answers: _Answers) -> bool:
        """Take in what is no message; True if there is something new to journal."""
        if isinstance(event, Joined):
            if not event.session_present:
                self._received.forget()
                self._subscribed = {}
            return not event.session_present
        if isinstance(event, Released):
            self._received.release(event.mid)
            if connection == self._connection:
                answers.packets.append((PUBCOMP, event.mid))
            return True
        if not (isinstance(event, Answered) and isinstance(event.mark, _Mark) and connection == self._connection):
            return False
        self._is_asking = False
        packets = event.mark.packets
        if event.mark.repeats == self._repeats:  # nothing came again meanwhile, so nothing more will
            self._repeats_known = self._repeats
            packets = [*packets, *self._received.before(connection)]
        return self._received.confirm(packets)

    def _ask(self) -> None:
        """Have the broker show that it has seen what was acknowledged, and that it has sent all that it sends again."""
        link = self._link
        if link is None or not self._is_connected or self._is_asking:
            return
        if self._has_answered or self._repeats_known != self._repeats:
            self._is_asking, self._has_answered = True, False
            packets, self._acked = self._acked, []
            link.ask(_Mark(packets, self._repeats))

    # -- the connection ----------------------------------------------------------------------------------------------

    def _stay_connected(self) -> bool:
        """Connect again after a break, subscribe where the broker's session lacks it; True if the session has changed."""
        if self._link is None:
            self._connect()
        link = self._link
        assert link is not None
        if link.failure is not None:
            self._link = None
            link.leave()
            raise link.failure
        if self._subscribed == self.config.filters():
            return False
        if len(self._bridge):  # it may say that the session is a new one
            return False
        self._subscribe(link)
        self._batch, self._repeats_known = self._batch + 1, -1
        self._ask()
        return True

    def _connect(self) -> None:
        number = self._connection + 1
        bridge, unpromised = self._bridge, self._unpromised

        def put(event: Event) -> None:
            if isinstance(event, Arrived) and event.qos == 0:
                if unpromised.crowd(bridge):
                    self._dropped += 1
                    return
                unpromised.put += len(event.payload)
            bridge.put((number, event))

        link = Link(self.config, self._client_id, put, bridge.ready.set)
        try:
            link.join(self.config.session_expiry_secs)
        except BaseException:
            link.leave()
            raise
        self._connection, self._link = number, link
        self._acked, self._is_asking, self._has_answered, self._repeats_known = [], False, False, -1
        self._ask()

    def _subscribe(self, link: Link) -> None:
        wanted = self.config.filters()
        gone = [name for name in self._subscribed if name not in wanted]
        if gone:
            link.await_answer(link.unsubscribe(gone)[1])
        new = [(name, qos) for name, qos in wanted.items() if self._subscribed.get(name) != qos]
        if self.config.version == "5":  # retained messages come with a new subscription, and not each time
            asked = link.subscribe([(name, SubscribeOptions(qos=qos, retainHandling=1)) for name, qos in new])
        else:
            asked = link.subscribe(new)
        for (name, qos), reason in zip(new, link.await_answer(asked[1]), strict=True):
            if reason.is_failure or reason.value < qos:
                given = str(reason) if reason.is_failure else f"only QoS {reason.value} is granted"
                raise ConfigError(
                    f"{self.config.url} refused the subscription to {name!r} with QoS {qos}: {given}",
                    code="PEN-1016",
                    hint="let the user read it in the broker's access list, or ask for less",
                )
        self._subscribed = wanted

    def _name(self) -> str:
        """The client id: the option, else one that was made once."""
        if self.config.client_id is not None:
            return self.config.client_id
        made = f"penstock-{uuid.uuid4().hex[:12]}"
        if self.context.state_dir is None:
            return made
        kept = self.context.state_dir / "client_id"
        if not kept.exists():
            make_directory(kept.parent, private=True)
            write_atomic(kept, made.encode(), private=True)
        return kept.read_text()


@dataclass
class _Unpromised:
    """Bytes of QoS 0 that have come and that were taken; each number is written by one thread."""

    put: int = 0
    taken: int = 0

    def crowd(self, bridge: BufferedBridge[tuple[int, Event]]) -> bool:
        """True if no more of them may wait."""
        return len(bridge) >= QOS_0_MESSAGES or self.put - self.taken >= QOS_0_BYTES


@dataclass
class _Answers:
    """What the broker hears once a batch is on disk."""

    batch: int
    connection: int
    packets: list[tuple[int, int]] = field(default_factory=list)
    to_confirm: list[Packet] = field(default_factory=list)


@dataclass(frozen=True)
class _Mark:
    """What a ping's answer shows: that these acknowledgements were seen, if nothing came again since so many repeats."""

    packets: list[Packet]
    repeats: int


def _envelope(message: Arrived) -> SourceEnvelope:
    record = SourceRecord.from_bytes(message.topic, message.payload)
    if message.is_retained:
        record = record.with_attribute("mqtt.retained", "true")
    if message.properties is not None:
        for name, value in _attributes(message.properties):
            record = record.with_attribute(name, value)
    return SourceEnvelope(record)


def _attributes(properties: Properties) -> Iterator[tuple[str, str]]:
    """User properties by their names but for ours, which nobody else may claim; of a name that comes twice, the last value."""
    for name, own in (("ContentType", "content_type"), ("ResponseTopic", "response_topic")):
        if hasattr(properties, name):
            yield f"mqtt.{own}", getattr(properties, name)
    if hasattr(properties, "CorrelationData"):
        yield "mqtt.correlation_data", base64.b64encode(properties.CorrelationData).decode()
    yield from (pair for pair in getattr(properties, "UserProperty", ()) if not pair[0].startswith("mqtt."))
