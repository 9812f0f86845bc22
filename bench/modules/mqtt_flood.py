"""Publish by QoS 1: `mqtt_flood.py PORT TOPIC COUNT RATE [FIRST]`; a rate of 0 is as fast as the broker takes them."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

WINDOW = 20_000
"""Messages that may wait for the broker's answer."""


def text(value: str) -> bytes:
    return struct.pack("!H", len(value)) + value.encode()


def packet(kind: int, body: bytes) -> bytes:
    size, head = len(body), bytearray([kind])
    while True:
        size, digit = divmod(size, 128)
        head.append(digit | (0x80 if size else 0))
        if not size:
            return bytes(head) + body


def message(id: int, sent: float) -> bytes:
    """About two hundred bytes of JSON."""
    return json.dumps({"id": id, "sent": sent, "sensor": "a-17", "value": 21.5, "note": "x" * 118}).encode()


class Publisher:
    """A client of its own, since paho's would be what is measured."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), 60)
        self._sock.sendall(packet(0x10, text("MQTT") + b"\x04\x02\x00\x00" + text("flood")))
        assert self._sock.recv(4)[3] == 0
        self._sent = self._bytes = 0

    def publish(self, topic: str, payloads: list[bytes]) -> None:
        out = []
        for payload in payloads:
            self._sent += 1
            out.append(packet(0x32, text(topic) + struct.pack("!H", self._sent % 65_535 + 1) + payload))
        self._sock.sendall(b"".join(out))
        self.settle(WINDOW)

    def settle(self, most: int = 0) -> None:
        """Wait until no more than so many are unanswered."""
        while self._sent - self._bytes // 4 > most:
            found = self._sock.recv(1 << 16)
            assert found, "the broker hung up"
            self._bytes += len(found)


def main(port: int, topic: str, count: int, rate: int, first: int = 0) -> None:
    publisher = Publisher(port)
    step = max(1, rate // 50) if rate else 1000
    began = time.perf_counter()
    for start in range(0, count, step):
        if rate:
            time.sleep(max(0.0, began + start / rate - time.perf_counter()))
        now = time.time()
        ids = range(first + start, first + min(count, start + step))
        publisher.publish(topic, [message(id, now) for id in ids])
    publisher.settle()
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
