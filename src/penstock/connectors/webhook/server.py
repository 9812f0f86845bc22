"""
HTTP/1.1 for many small requests: one protocol object per connection, over the parser that Node uses (llhttp).

It is written by hand since a request must cost little: `bench/push.py` measures what one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol
from weakref import WeakSet

import httptools

from penstock.connectors.webhook.config import WebhookConfig

MOST_WAITING = 256
"""Requests that one connection may send ahead of their answers."""
MOST_HEADERS = 128
SMALL_BYTES = 4096
JOINED_BYTES = 1 << 16
LINGER_SECS = 2.0
"""How long the rest of a refused request is thrown away: to close at once could destroy the answer on its way."""


class Refused(Exception):
    """A request is answered with an error."""

    def __init__(
        self, status: int, error: str, reason: str, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.body = {"error": error, "reason": reason, **more}
        self.headers = headers or {}


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "chunks",
        "connection",
        "endpoint",
        "headers",
        "keep_alive",
        "method",
        "path",
        "refused",
        "reply",
        "size",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.headers: dict[bytes, bytes] = {}
        self.method = self.path = b""
        self.chunks: list[bytes | bytearray] = []
        self.size = 0
        self.keep_alive = True
        self.refused: Refused | None = None
        self.reply: bytes | None = None
        self.endpoint: Any = None
        """What the application found by the path."""

    @property
    def body(self) -> bytes:
        return bytes(self.chunks[0]) if len(self.chunks) == 1 else b"".join(self.chunks)  # `bytes` copies no bytes

    def add(self, data: bytes) -> None:
        """More of the body; small pieces are put together, since each of its own would cost far more than its bytes."""
        chunks = self.chunks
        if not chunks or len(data) >= SMALL_BYTES:
            chunks.append(data)
        elif isinstance(last := chunks[-1], bytearray) and len(last) < JOINED_BYTES:
            last += data
        else:
            chunks.append(bytearray(data))

    def accept(self, reply: bytes) -> None:
        """Answer 200 with a reply that is ready to send."""
        self.reply = reply if self.keep_alive else reply.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        self.connection.flush()

    def refuse(self, refused: Refused) -> None:
        """Answer with an error."""
        self.connection.server.application.count(refused.status)
        headers = dict(refused.headers) if self.keep_alive else {**refused.headers, "Connection": "close"}
        self.reply = response(refused.status, refused.body, headers)
        self.connection.flush()


class Application(Protocol):
    """What is served."""

    def begin(self, exchange: Exchange) -> None:
        """The head is there: raise `Refused`, or let the body come."""

    def complete(self, exchange: Exchange) -> None:
        """The whole request is there: answer it, now or later."""

    def count(self, status: int) -> None:
        """A request was refused."""


class Server:
    """The connections of one server, and the limits that hold for them."""

    def __init__(self, application: Application, config: WebhookConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.application = application
        self.config = config
        self.loop = loop
        self.connections: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}
        """Those between two requests, idle longest first."""
        self.held = 0
        """Bytes of bodies that are not whole yet."""
        self.most_held = max(config.max_held_bytes, config.max_body_bytes)
        self.stopping = False
        self.sockets: list[socket.socket] = []
        """Those that listen."""
        _servers.add(self)

    def connect(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self)

    def admit(self, connection: Connection) -> bool:
        """True if there is room for one more; the one that was idle longest makes room."""
        if len(self.connections) >= self.config.max_connections:
            oldest = next(iter(self.idle), None)
            if oldest is None:
                return False
            oldest.end()
        self.connections[connection] = None
        return True

    def sweep(self) -> None:
        """End connections whose client is too slow; once a second."""
        now, config = self.loop.time(), self.config
        for connection in list(self.connections):
            connection.expire(now, config)

    def stop(self) -> None:
        """End the idle connections and refuse what is not whole; the others end with their answer."""
        self.stopping = True
        for connection in list(self.connections):
            connection.stop()


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.peer = ""
        self._transport: asyncio.Transport
        self._requests = Requests(self)
        self._waiting: deque[Exchange] = deque()  # requests in the order they came, not yet answered
        self._since = server.loop.time()  # the current request, or the idle time, began then
        self._blocked: float | None = None  # the client takes no answers since then
        self._paused = False  # it has sent too many requests ahead
        self._held = 0  # bytes of a body that is not whole yet
        self.ended = False

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = str(address[0]) if address else ""
        if self.server.stopping or not self.server.admit(self):
            self.fail(503, "unavailable", "there are too many connections", {"Retry-After": "1"})
            self.end()
            return
        self.server.idle[self] = None

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self._hold(0)
        self.server.connections.pop(self, None)
        self.server.idle.pop(self, None)

    def eof_received(self) -> bool:
        """The client sends no more; it may still wait for answers."""
        if self._requests.current is not None or not self._waiting:
            self.end()
            return False
        self._waiting[-1].keep_alive = False
        return True

    def pause_writing(self) -> None:
        self._blocked = self.server.loop.time()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked = None
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self._paused and self._blocked is None:
            self._transport.resume_reading()

    def end(self) -> None:
        """Close, once what was written is sent."""
        self.ended = True
        self.server.idle.pop(self, None)
        self._transport.close()

    def stop(self) -> None:
        """The server stops: a request that is not whole yet will not be taken."""
        if self._requests.current is not None:
            self.fail(503, "stopping", "the pipeline is stopping", {"Retry-After": "1"})
        elif not self._waiting and not self.ended:
            self.end()

    def let_go(self) -> None:
        """In a forked child: its copy of the socket would keep a client waiting after the parent was killed."""
        with contextlib.suppress(OSError):
            os.close(self._transport.get_extra_info("socket").fileno())

    def abort(self) -> None:
        """Close at once; the client gets no answer, and will send again."""
        self._transport.abort()

    def expire(self, now: float, config: WebhookConfig) -> None:
        """Give up a client that is too slow."""
        if self._blocked is not None:
            if now - self._blocked > config.request_timeout_secs:
                self._transport.abort()
        elif self.ended:
            if not self._waiting and now - self._since > LINGER_SECS:
                self._transport.abort()
        elif self._requests.current is not None:
            allowed = config.request_timeout_secs if self._requests.head_done else config.header_timeout_secs
            if now - self._since > allowed:
                self.fail(408, "timeout", "the request did not come in within its time")
        elif not self._waiting and now - self._since > config.idle_timeout_secs:
            self.end()

    # -- answers -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        if self._requests.current is None:
            self.server.idle.pop(self, None)
            self._since = self.server.loop.time()
        self._requests.feed(data)
        if (held := self._requests.held) != self._held:
            self._hold(held)

    def _hold(self, held: int) -> None:
        """Count what waits for the rest of its request: of all connections together it is bounded."""
        self.server.held += held - self._held
        self._held = held
        if held and self.server.held > self.server.most_held:
            self.fail(503, "unavailable", "too many large requests are coming in", {"Retry-After": "1"})

    def received(self, exchange: Exchange) -> None:
        """A request is whole."""
        self._waiting.append(exchange)
        if len(self._waiting) > MOST_WAITING:
            self._paused = True
            self._transport.pause_reading()
        try:
            if exchange.refused is not None:
                raise exchange.refused
            self.server.application.complete(exchange)
        except Refused as refused:
            exchange.refuse(refused)

    def go_on(self) -> None:
        """The client waits for a word before it sends the body."""
        if not self._waiting:  # it must not overtake an answer
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def flush(self) -> None:
        """Send the answers that are ready, in the order of their requests."""
        waiting = self._waiting
        if not waiting or waiting[0].reply is None or self._transport.is_closing():
            return
        ready, open_ = [], True
        while open_ and waiting and (reply := waiting[0].reply) is not None:
            ready.append(reply)
            open_ = waiting.popleft().keep_alive
        self._transport.write(ready[0] if len(ready) == 1 else b"".join(ready))
        self._since = self.server.loop.time() if self._requests.current is None else self._since
        if self._paused and len(waiting) <= MOST_WAITING:
            self._paused = False
            self.resume_reading()
        if self.ended and not waiting and self._transport.can_write_eof():
            self._transport.write_eof()  # and read on for a while: see `LINGER_SECS`
        elif not open_ or ((self.server.stopping or self.ended) and not waiting):
            self.end()
        elif not waiting and self._requests.current is None:
            self.server.idle[self] = None

    def fail(self, status: int, error: str, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self.finish(Refused(status, error, reason, headers))

    def finish(self, refused: Refused) -> None:
        """Answer what is being received, and take nothing more: where the next request would begin is not known."""
        if self.ended:
            return
        exchange = self._requests.take() or Exchange(self)
        self._hold(0)
        self.ended = True
        self._since = self.server.loop.time()
        self.server.idle.pop(self, None)
        exchange.keep_alive = False
        self._waiting.append(exchange)
        exchange.refuse(refused)


class Requests:
    """Makes requests of the bytes of one connection; the methods `on_…` are called by the parser."""

    def __init__(self, connection: Connection) -> None:
        self.current: Exchange | None = None
        """The request that is coming in."""
        self.head_done = False
        self._connection = connection
        self._server = connection.server
        self._parser = httptools.HttpRequestParser(self)
        self._raw_bytes = 0  # of the current request, as they came

    @property
    def held(self) -> int:
        """Bytes of the body that is coming in and will be taken."""
        exchange = self.current
        return exchange.size if exchange is not None and exchange.refused is None else 0

    def take(self) -> Exchange | None:
        """The request that is coming in; the rest of it is not wanted."""
        taken, self.current = self.current, None
        return taken

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._connection.fail(400, "bad_request", "the server does not change protocols")
        except httptools.HttpParserError as error:
            self._connection.fail(400, "bad_request", f"this is not HTTP/1.1: {type(error).__name__}")
        else:
            self._bound()

    def _bound(self) -> None:
        """Refuse heads without an end, and bodies that are mostly frames of chunks."""
        config = self._server.config
        if self.current is None and self._raw_bytes:  # blank lines before a request
            if self._raw_bytes > config.max_header_bytes:
                self._connection.fail(431, "headers_too_large", "the head is too large")
        elif not self.head_done:
            if self._raw_bytes > config.max_header_bytes:
                self._connection.fail(431, "headers_too_large", f"the head is over {config.max_header_bytes} bytes")
        elif self._raw_bytes > config.max_header_bytes + 2 * config.max_body_bytes + (64 << 10):
            self._connection.fail(413, "too_large", "the request is too large")

    def on_message_begin(self) -> None:
        self.current = Exchange(self._connection)
        self.head_done = False

    def on_url(self, url: bytes) -> None:
        if self.current is not None:
            self.current.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self.current
        if exchange is None or self.head_done or self._connection.ended:  # after the head come the trailers of chunks
            return
        headers, name = exchange.headers, name.lower()
        if name in headers:
            if name in _ONCE:
                self._connection.fail(400, "bad_request", f"the header {name.decode('latin-1')} comes twice")
                return
            headers[name] += b", " + value
        else:
            headers[name] = value
        if len(headers) > MOST_HEADERS:
            self._connection.fail(431, "headers_too_large", f"there are over {MOST_HEADERS} headers")

    def on_headers_complete(self) -> None:
        exchange = self.current
        if exchange is None or self._connection.ended:
            return
        headers, config = exchange.headers, self._server.config
        self.head_done = True
        size = len(exchange.path) + sum(map(len, headers)) + sum(map(len, headers.values()))
        if size > config.max_header_bytes:
            self._connection.fail(431, "headers_too_large", f"the head is over {config.max_header_bytes} bytes")
            return
        exchange.method = self._parser.get_method()
        exchange.keep_alive = self._parser.should_keep_alive() and not self._server.stopping
        exchange.path = exchange.path.partition(b"?")[0]
        wrong = _ambiguous(self._parser.get_http_version(), headers)
        if wrong:
            self._connection.fail(400, "bad_request", wrong)
            return
        length = headers.get(b"content-length")
        if length is not None and int(length) > config.max_body_bytes:
            self._too_large()
            return
        try:
            self._server.application.begin(exchange)
        except Refused as refused:
            exchange.refused = refused
        if b"expect" in headers:
            self._expected(exchange)

    def _expected(self, exchange: Exchange) -> None:
        if exchange.refused is not None:
            self._connection.finish(exchange.refused)
        elif exchange.headers[b"expect"].lower() != b"100-continue":
            self._connection.fail(417, "expectation_failed", "only Expect: 100-continue is known")
        else:
            self._connection.go_on()

    def on_body(self, data: bytes) -> None:
        exchange = self.current
        if exchange is None or self._connection.ended:
            return
        exchange.size += len(data)
        if exchange.size > self._server.config.max_body_bytes:
            self._too_large()
        elif exchange.refused is None:
            exchange.add(data)

    def on_message_complete(self) -> None:
        exchange = self.take()
        self._raw_bytes = 0
        if exchange is not None and not self._connection.ended:
            self._connection.received(exchange)

    def _too_large(self) -> None:
        self._connection.fail(413, "too_large", f"the body is over {self._server.config.max_body_bytes} bytes")


_ONCE = frozenset(
    {b"content-length", b"transfer-encoding", b"host", b"content-type", b"content-encoding", b"authorization"}
)
"""Headers of which two would mean two things."""


def _ambiguous(version: str, headers: Mapping[bytes, bytes]) -> str:
    """Why two programs might see different requests here (smuggling); empty: they would not."""
    encoding = headers.get(b"transfer-encoding")
    if encoding is not None:
        if b"content-length" in headers:
            return "Content-Length and Transfer-Encoding exclude each other"
        if version != "1.1" or encoding.lower() != b"chunked":
            return "the only Transfer-Encoding is chunked, in HTTP/1.1"
    if b"upgrade" in headers:
        return "the server does not change protocols"
    length = headers.get(b"content-length")
    if length is not None and not length.isdigit():
        return "Content-Length is not a number"
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not spoken here"
    return "the header Host is missing" if version == "1.1" and b"host" not in headers else ""


def response(status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """A whole answer with a JSON body."""
    text = json.dumps(body).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n{lines}"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode("latin-1") + text


_servers: WeakSet[Server] = WeakSet()


def _after_fork() -> None:
    for server in list(_servers):
        for listening in server.sockets:
            listening.close()
        for connection in server.connections:
            connection.let_go()


os.register_at_fork(after_in_child=_after_fork)
