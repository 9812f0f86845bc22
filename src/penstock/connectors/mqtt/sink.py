"""Send rows to an MQTT broker as messages."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from penstock.connectors.messages import Messages, Template, Window, encode, refuse_rows
from penstock.connectors.mqtt.config import BrokerConfig
from penstock.connectors.mqtt.link import Link
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.sink import Receipt, SinkConnector, SinkContext, Topic, WriteResult

MAX_BYTES = 268_000_000
"""A packet of MQTT holds 268,435,455 bytes, names and properties included."""

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
        refuse_rows(pc.greater(pc.binary_length(messages.payloads), MAX_BYTES), "a payload is too large for MQTT")
        refused = self._publish(names, messages)
        if refused:
            error = DataError(f"{self.config.url} refused {len(refused)} messages: {next(iter(refused.values()))}")
            error.rows, error.count, error.others_written = sorted(refused), len(refused), True
            raise error
        return WriteResult(batch.num_rows, messages.nbytes)

    def _names(self, topic: Topic, batch: pa.RecordBatch) -> pa.Array:
        names = self._template.names(topic, batch)
        size = pc.binary_length(names)
        bad = pc.or_(pc.match_substring_regex(names, r"[+#\x00]"), pc.or_(pc.equal(size, 0), pc.greater(size, 65_535)))
        refuse_rows(
            bad, f"a row makes `topic` = {self.config.topic!r} no name: empty, too long, or with +, # or NUL in it"
        )
        return names

    def _publish(self, names: pa.Array, messages: Messages) -> dict[int, str]:
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
        pairs = zip(names.to_pylist(), messages.triples(), strict=True)
        for row, (name, (_, payload, attributes)) in enumerate(pairs):
            window.enter()
            rows[link.publish(name, payload, config.qos, config.retain, self._properties(attributes)).mid] = row
        window.settle()
        return {rows[mid]: self._judged(reason) for mid, reason in answers.items()}

    def _properties(self, attributes: list[tuple[str, str]]) -> Properties | None:
        if not attributes or self.config.version != "5":
            return None
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.UserProperty = [pair for pair in attributes if not pair[0].startswith("mqtt.")]
        return properties

    def _judged(self, reason: ReasonCode) -> str:
        if reason.value in _OF_THE_MESSAGE:
            return str(reason)
        what = f"{self.config.url} refused a message: {reason}"
        if reason.value in _PASSING:
            raise RetryableError(what, code="PEN-2002")
        raise FatalError(what, code="PEN-5010", hint="let the user write there in the broker's access list")
