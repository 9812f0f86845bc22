"""What a broker's answers to messages that were sent mean."""

from __future__ import annotations

from typing import Literal

from paho.mqtt import client as paho
from paho.mqtt.enums import MessageState, MQTTErrorCode
from paho.mqtt.exception import MalformedPacket
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode


class Strict(paho.Client):
    """A client to which a message is sent by the answer that it waits for, and by no other; to paho each one will do."""

    is_v5: bool

    def _handle_pubackcomp(self, cmd: Literal["PUBACK", "PUBCOMP"]) -> MQTTErrorCode:
        sent = self._sent_as(self._in_packet["packet"], cmd)
        released = MessageState.MQTT_MS_WAIT_FOR_PUBCOMP
        if sent is not None and not (sent.qos == 1 if cmd == "PUBACK" else sent.state == released):
            raise MalformedPacket(f"a {cmd} for a message that waits for another answer")
        return super()._handle_pubackcomp(cmd)

    def _handle_pubrec(self) -> MQTTErrorCode:
        """A refusal, which MQTT 5 has, is the last word about its message; to paho the broker has then taken it."""
        raw = self._in_packet["packet"]
        sent = self._sent_as(raw, "PUBREC")
        if sent is not None and sent.qos != 2:
            raise MalformedPacket("a PUBREC for a message of QoS 1")
        if sent is None or not self.is_v5 or len(raw) < 3 or raw[2] < 0x80:
            return super()._handle_pubrec()
        reason = ReasonCode(PacketTypes.PUBREC, identifier=raw[2])
        with self._out_message_mutex:
            return self._do_on_publish(sent.mid, reason, Properties(PacketTypes.PUBREC))  # type: ignore[no-untyped-call]

    def _sent_as(self, raw: bytes | bytearray, kind: str) -> paho.MQTTMessage | None:
        """The message that an answer is for, if it waits for one."""
        if len(raw) < 2:
            raise MalformedPacket(f"a {kind} without its packet id")
        return self._out_messages.get(raw[0] << 8 | raw[1])
