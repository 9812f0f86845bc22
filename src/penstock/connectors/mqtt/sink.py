"""Send rows to an MQTT broker as messages."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from pydantic import Field, PositiveInt

from penstock.connectors.messages import Template, Window, encode, refuse_rows
from penstock.connectors.mqtt.config import BrokerConfig
from penstock.connectors.mqtt.link import Link
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.sink import Receipt, SinkConnector, SinkContext, Topic, WriteResult

MOST_BYTES = 268_435_460
"""Of a packet of MQTT, names and properties included; a broker may take less."""
MOST_TEXT_BYTES = 65_535
IDS = 60_000
"""So many messages have packet ids of their own: by them an answer is that of a row."""

_NO_TEXT = "\\x00-\\x1f\\x7f-\\x{9f}\\x{fdd0}-\\x{fdef}" + "".join(
    f"\\x{{{plane:x}fffe}}\\x{{{plane:x}ffff}}" for plane in range(17)
)
"""Control characters, and code points that are none: a broker that meets one ends the connection."""

_OF_THE_MESSAGE = {144, 149, 153}
"""Refusals that are about a single message: its topic's name, its size, its format."""
_PASSING = {131, 136, 137, 146, 151}


class MqttSinkConfig(BrokerConfig):
    topic: str = "{topic}"
    """Where each row goes: a text with `{topic}` (without its first slash) and `{column}`, such as `devices/{device}/state`."""

    qos: Literal[1, 2] = 1
    """Quality of service. Under 2 the broker drops what a broken connection makes us send twice, but not a repeated epoch."""

    retain: bool = False
    """The broker keeps the last message of each topic for clients that subscribe later."""

    attributes: tuple[str, ...] = ()
    """Columns that travel as user properties instead of in the payload; needs version 5."""

    max_packet_bytes: Annotated[PositiveInt, Field(le=MOST_BYTES)] = MOST_BYTES
    """Larger messages, with topic and user properties, are bad data. A broker of MQTT 5 says itself if it takes less; with
    3.1.1 it ends the connection, each time."""


class MqttSink(SinkConnector[MqttSinkConfig, Receipt]):
    """
    A row is a message, encoded by the topic's `[[schemas]]`, else as JSON.

    At-least-once: a message is sent while its epoch is staged, and an epoch that is staged again is sent again.
    """

    name = "mqtt"

    def __init__(self, config: MqttSinkConfig) -> None:
        super().__init__(config)
        self._link: Link | None = None
        self._template = Template(config.topic)

    def open(self, context: SinkContext = SinkContext()) -> None:
        self.close()
        super().open(context)
        if self.config.attributes and self.config.version != "5":
            raise ConfigError("`attributes` need MQTT 5", code="PEN-1003", hint='set version = "5", or leave them out')
        link = Link(self.config, f"penstock-{uuid.uuid4().hex[:12]}", is_new=True)
        try:
            link.join()
        except BaseException:
            link.leave()
            raise
        self._link = link

    def close(self) -> None:
        if self._link is not None:
            self._link.leave()
        self._link = None

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        """Publish the rows, and wait until the broker has answered for each."""
        names = self._names(topic, batch)
        messages = encode(batch, self.context.topic(topic), attributes=self.config.attributes)
        ready = [(payload, self._sent(pairs)) for _, payload, pairs in messages.triples()]
        self._refuse_properties(ready)
        self._refuse_sizes(names, ready)
        refused: dict[int, str] = {}
        for start in range(0, len(ready), IDS):
            found = self._publish(names.slice(start, IDS).to_pylist(), ready[start : start + IDS])
            refused |= {start + row: why for row, why in found.items()}
        if refused:
            error = DataError(f"{self.config.url} refused {len(refused)} messages: {next(iter(refused.values()))}")
            error.rows, error.count, error.others_written = sorted(refused), len(refused), True
            raise error
        return WriteResult(batch.num_rows, messages.nbytes)

    def _names(self, topic: Topic, batch: pa.RecordBatch) -> pa.Array:
        names = self._template.names(topic, batch)
        size = pc.binary_length(names)
        bad = pc.or_(pc.equal(size, 0), pc.greater(size, MOST_TEXT_BYTES))
        bad = pc.or_(bad, pc.match_substring_regex(names, f"[+#{_NO_TEXT}]"))
        if not self.config.topic.startswith("$"):  # those are the broker's own
            bad = pc.or_(bad, pc.starts_with(names, "$"))
        refuse_rows(
            bad,
            f"a row makes `topic` = {self.config.topic!r} no name: empty, too long, beginning with $, or with +, # or a "
            "control character in it",
        )
        return names

    def _sent(self, attributes: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The attributes of a message that go with it."""
        return [pair for pair in attributes if not pair[0].startswith("mqtt.")] if self.config.version == "5" else []

    def _refuse_properties(self, ready: Sequence[Ready]) -> None:
        texts = [(row, text) for row, (_, pairs) in enumerate(ready) for pair in pairs for text in pair]
        if not texts:
            return
        found = pa.array([text for _, text in texts], pa.string())
        wrong = pc.greater(pc.binary_length(found), MOST_TEXT_BYTES)
        wrong = pc.or_(wrong, pc.match_substring_regex(found, f"[{_NO_TEXT}]")).to_pylist()
        rows = {row for (row, _), is_wrong in zip(texts, wrong, strict=True) if is_wrong}
        refuse_rows(
            pa.array([row in rows for row in range(len(ready))]),
            "a row has an attribute that no user property can hold: too long, or with a control character in it",
            hint="leave its column in the payload: take it out of `attributes`",
        )

    def _refuse_sizes(self, names: pa.Array, ready: Sequence[Ready]) -> None:
        assert self._link is not None
        most = min(self.config.max_packet_bytes, self._link.most_bytes or MOST_BYTES)
        sizes = zip(pc.binary_length(names).to_pylist(), ready, strict=True)
        is_v5 = self.config.version == "5"
        bad = pa.array([_packet_bytes(name, each, is_v5) > most for name, each in sizes])
        refuse_rows(bad, f"a message is larger than the {most:,} bytes that {self.config.url} takes")

    def _publish(self, names: Sequence[str], ready: Sequence[Ready]) -> dict[int, str]:
        """Send all; returns why the broker refused single messages, by row."""
        link, config = self._link, self.config
        assert link is not None
        window = Window(config.max_inflight, config.timeout_secs)
        answers: dict[int, ReasonCode] = {}

        def heard(client: Any, data: Any, mid: int, reason: ReasonCode, properties: Any) -> None:
            if reason.is_failure:
                answers[mid] = reason
            window.leave()

        link.on_publish = heard
        link.on_end = lambda: window.fail(link.failure or RetryableError("the connection ended", code="PEN-2001"))
        if link.failure is not None:
            raise link.failure
        rows: dict[int, int] = {}
        for row, (name, (payload, pairs)) in enumerate(zip(names, ready, strict=True)):
            window.enter()
            rows[link.publish(name, payload, config.qos, config.retain, _properties(pairs)).mid] = row
        window.settle()
        return {rows[mid]: self._judged(reason) for mid, reason in answers.items()}

    def _judged(self, reason: ReasonCode) -> str:
        if reason.value in _OF_THE_MESSAGE:
            return str(reason)
        what = f"{self.config.url} refused a message: {reason}"
        if reason.value in _PASSING:
            raise RetryableError(what, code="PEN-2002")
        raise FatalError(what, code="PEN-5010", hint="let the user write there in the broker's access list")


Ready = tuple[bytes | None, list[tuple[str, str]]]
"""A message: payload and user properties."""


def _properties(pairs: list[tuple[str, str]]) -> Properties | None:
    if not pairs:
        return None
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    properties.UserProperty = pairs
    return properties


def _packet_bytes(name_bytes: int, message: Ready, is_v5: bool) -> int:
    """The size of a message on its way, under QoS 1 or 2."""
    payload, pairs = message
    size = 2 + name_bytes + 2 + len(payload or b"")
    if is_v5:
        own = sum(5 + len(name.encode()) + len(value.encode()) for name, value in pairs)
        size += own + _number_bytes(own)
    return 1 + size + _number_bytes(size)


def _number_bytes(number: int) -> int:
    """Bytes of a number that MQTT writes seven bits at a time."""
    return max(1, -(-number.bit_length() // 7))
