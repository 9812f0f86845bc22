"""Send requests: `webhook_load.py PORT REQUESTS CONNECTIONS EVENTS`, each with so many events; prints the seconds it took."""

from __future__ import annotations

import asyncio
import json
import sys
import time

EVENT = {"id": 12345, "sensor": "a-17", "value": 21.5, "at": "2026-01-01T00:00:00Z", "note": "x" * 110}
"""About two hundred bytes."""


def request(events: int) -> bytes:
    """The same request each time: making it must not be what is measured."""
    body = b"".join(json.dumps({**EVENT, "id": at}).encode() + b"\n" for at in range(events))
    kind = b"application/json" if events == 1 else b"application/x-ndjson"
    head = b"POST /events HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


class Client(asyncio.Protocol):
    """One connection that sends the next request when the last one is answered."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._load.send(transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            assert head.startswith(b"http/1.1 200"), self._buffer
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._load.answered(self._transport)


class Load:
    def __init__(self, requests: int, events: int) -> None:
        self._left = self._due = requests
        self._request = request(events)
        self.done = asyncio.get_running_loop().create_future()

    def send(self, transport: asyncio.Transport) -> None:
        if self._left:
            self._left -= 1
            transport.write(self._request)

    def answered(self, transport: asyncio.Transport) -> None:
        self._due -= 1
        if self._due == 0:
            self.done.set_result(None)
        else:
            self.send(transport)


async def main(port: int, requests: int, connections: int, events: int) -> None:
    load, loop = Load(requests, events), asyncio.get_running_loop()
    began = time.perf_counter()
    for _ in range(connections):
        await loop.create_connection(lambda: Client(load), "127.0.0.1", port)
    await load.done
    print(time.perf_counter() - began)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:5])))
