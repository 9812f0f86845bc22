"""Which packets the broker may send again: what tells a message that is repeated from one that is new."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.connectors.mqtt.link import Arrived

_ENTRY = struct.Struct("!HB8s")


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """A packet id in use, and what came under it."""

    mid: int
    qos: int
    digest: bytes
    connection: int
    """Which connection brought it last; 0: one of an earlier run."""


class Received:
    """
    The packets that are safe here, and of which the broker may not know it yet.

    A broker sends such a packet again with DUP, under the same id and with the same content. Then it is a repeat. A packet
    with DUP that is not here was never received: its first try was lost.

    QoS 2: the id is the broker's until PUBCOMP. It is forgotten with PUBREL, and PUBCOMP is sent once that is on disk.
    QoS 1: the id is free again as soon as the broker has seen PUBACK. It is forgotten once an answer to a later ping shows
    that it has.
    """

    def __init__(self, packed: str = "") -> None:
        raw = base64.b64decode(packed)
        found = (Packet(mid, qos, digest, 0) for mid, qos, digest in _ENTRY.iter_unpack(raw))
        self._packets = {packet.mid: packet for packet in found}

    def __len__(self) -> int:
        return len(self._packets)

    def take(self, message: Arrived, connection: int) -> tuple[bool, Packet]:
        """Note a message, and say if it is new."""
        digest = hashlib.blake2b(message.payload, digest_size=8, key=message.topic.encode()[-64:]).digest()
        known = self._packets.get(message.mid)
        is_new = not (message.is_repeat and known and known.digest == digest and known.qos == message.qos)
        packet = Packet(message.mid, message.qos, digest, connection)
        self._packets[message.mid] = packet
        return is_new, packet

    def release(self, mid: int) -> None:
        """QoS 2: the broker will not send this packet again."""
        self._packets.pop(mid, None)

    def confirm(self, packets: Iterable[Packet]) -> bool:
        """QoS 1: the broker has seen that these were received; True if one of them was still kept."""
        gone = [each for each in packets if self._packets.get(each.mid) is each]
        for packet in gone:
            del self._packets[packet.mid]
        return bool(gone)

    def before(self, connection: int) -> list[Packet]:
        """QoS 1: packets of earlier connections, which this one has not brought again."""
        return [each for each in self._packets.values() if each.qos == 1 and each.connection < connection]

    def forget(self) -> None:
        """The broker has begun a new session: no packet of the old one comes again."""
        self._packets = {}

    def pack(self) -> str:
        """As text for a checkpoint."""
        raw = b"".join(_ENTRY.pack(each.mid, each.qos, each.digest) for each in self._packets.values())
        return base64.b64encode(raw).decode()
