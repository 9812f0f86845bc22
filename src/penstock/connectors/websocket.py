"""Messages over WebSockets: as a client that subscribes, or as a server that others connect to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import DATA_OPCODES, Frame

from penstock.config import Config, Secret
from penstock.connectors.sockets import Begun, allow_connections
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.source import (
    ConnectorMetrics,
    Offset,
    ProducerConfig,
    Schemas,
    Sender,
    SourceContext,
    SourceEnvelope,
    SourceRecord,
    StreamingSource,
)

_LOOK_SECS = 0.2
"""How long a stop may go unnoticed."""
_CLOSE_SECS = 10.0
"""A connection that is ended waits for the other side, which may have vanished, for at most this long."""
_HELD_BYTES = 16 << 20
"""What all connections together may send while the journal is full; after that nothing is read until there is room."""


class WebsocketConfig(Config):
    url: str
    """`ws://host:port/path` to connect to, or `wss://` for TLS; with `mode = "server"` where to listen (port 0: a free one)."""

    mode: Literal["client", "server"] = "client"
    """Connect to a server and subscribe, or listen for others."""

    stream: str = "messages"
    """The stream that the messages belong to."""

    subscribe: tuple[str, ...] = ()
    """Texts that a client sends after each connection, such as `{"op": "subscribe", "channel": "trades"}`."""

    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of the client's request."""

    token: Secret | None = None
    """A client sends it as `Authorization: Bearer …`."""

    ca_file: Path | None = None
    """With `wss://`: certificates (PEM) that sign the other side's. A client checks the server by them, and without it by those
    of the machine; a server that has it asks clients for theirs."""

    cert_file: Path | None = None
    """Certificate (PEM) to show: a server with `wss://` needs one, a client if the server asks. With `key_file`."""

    key_file: Path | None = None
    """Private key (PEM) of `cert_file`."""

    acknowledge: bool = False
    """After each fsync the server sends how many messages of the connection are on disk, as a number. Then all messages go
    through the journal, also where a route says `reliable_dispatch = false`."""

    max_message_bytes: PositiveInt = 1 << 20
    """A larger message ends its connection."""

    max_connections: PositiveInt = 20_000
    """Connections of a server beyond these are closed at once."""

    ping_secs: PositiveFloat = 20
    """The other side is asked this often if it is there; without an answer for as long, the connection is ended. Time in which
    nothing is read because the journal is full does not count."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError("write ws://host:port/path, or wss:// for TLS")
        if parts.username or parts.password:
            raise ValueError("a secret belongs into `token`: an address is shown in messages and logs")
        return url


class Websocket(StreamingSource[WebsocketConfig]):
    """
    A text or binary message is an envelope; its offset is the connection and the number of the message in it.

    A message is safe from its fsync on, and exactly-once from there. `supports_replay` is False: what the other side sends
    while the connection is broken, or had sent and is not yet on disk when the pipeline dies, is gone. A sender that waits
    for `acknowledge` of a server knows what to send again.
    """

    name = "websocket"
    supports_replay = False

    def __init__(self, config: WebsocketConfig) -> None:
        super().__init__(config)
        self._refused = self._connections = 0
        self._gate = _Gate(config)
        self._tls: ssl.SSLContext | None = None
        self.port = urlsplit(config.url).port or 0
        """The port that a server listens on, once it streams."""

    def open(self, context: SourceContext = SourceContext()) -> None:
        super().open(context)
        client_only = [name for name in ("subscribe", "headers", "token") if getattr(self.config, name)]
        if self.config.mode == "server" and client_only:
            raise ConfigError(f'`{client_only[0]}` has no meaning for mode = "server"', code="PEN-1003")
        if self.config.mode == "client" and self.config.acknowledge:
            raise ConfigError('`acknowledge` has no meaning for mode = "client"', code="PEN-1003")
        self._tls = self._context()
        try:
            asyncio.run(self._try())
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise self._refusal(error, FatalError, "PEN-5001") from error

    def schema(self) -> Schemas:
        return {}

    def producer_configs(self) -> Sequence[ProducerConfig]:
        """What is acknowledged has to be on disk, whatever a route says."""
        asked = self.config.acknowledge
        return [replace(each, reliable_dispatch=each.reliable_dispatch or asked) for each in super().producer_configs()]

    def metrics(self) -> ConnectorMetrics:
        custom = {
            "websocket_connections": len(self._gate.open),
            "websocket_connections_refused_total": self._refused,
            "websocket_held_bytes": self._gate.held,
        }
        return ConnectorMetrics(errors_total=self._refused + self._gate.ended, custom=custom)

    def start_streaming(self, sender: Sender) -> None:
        try:
            asyncio.run(self._serve(sender) if self.config.mode == "server" else self._listen(sender))
        except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError) as error:
            raise self._refusal(error, RetryableError, "PEN-2001") from error

    # -- inside the loop ---------------------------------------------------------------------------------------------

    async def _try(self) -> None:
        if self.config.mode == "server":
            async with self._server(lambda connection: connection.close()):
                return
        async with self._client():
            return

    def _context(self) -> ssl.SSLContext | None:
        """What connections are wrapped in; None: `ws://`, plain text."""
        config, is_server = self.config, self.config.mode == "server"
        files = [each for each in ("ca_file", "cert_file", "key_file") if getattr(config, each) is not None]
        if urlsplit(config.url).scheme == "ws":
            if files:
                raise ConfigError(f"`{files[0]}` is for TLS, and {config.url} says plain text", code="PEN-1003")
            return None
        if (config.cert_file is None) != (config.key_file is None) or (is_server and config.cert_file is None):
            raise ConfigError(
                "`cert_file` and `key_file` belong together, and a server with wss:// needs them", code="PEN-1003"
            )
        try:
            purpose = ssl.Purpose.CLIENT_AUTH if is_server else ssl.Purpose.SERVER_AUTH
            context = ssl.create_default_context(purpose, cafile=config.ca_file)
            if config.cert_file is not None:
                context.load_cert_chain(config.cert_file, config.key_file)
            if is_server and config.ca_file is not None:
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the certificates of {config.url} cannot be used: {error.strerror or error}",
                code="PEN-1003",
                hint="they are PEM files, and the key is that of the certificate",
            ) from error
        return context

    def _client(self) -> Any:
        config = self.config
        headers = dict(config.headers)
        if config.token is not None:
            headers["Authorization"] = f"Bearer {config.token.reveal()}"
        return connect(
            config.url,
            additional_headers=headers,
            max_size=config.max_message_bytes,
            max_queue=None,
            ping_interval=None,
            close_timeout=min(config.ping_secs, _CLOSE_SECS),
            proxy=None,
            ssl=self._tls,
            create_connection=cast(Any, partial(_Client, self._gate)),
        )

    @contextlib.asynccontextmanager
    async def _server(self, handle: Any) -> AsyncIterator[Server]:
        parts, config = urlsplit(self.config.url), self.config
        async with serve(
            handle,
            str(parts.hostname),
            parts.port or 0,
            max_size=config.max_message_bytes,
            max_queue=None,
            ping_interval=None,
            close_timeout=min(config.ping_secs, _CLOSE_SECS),
            compression=None,  # of 20,000 connections, each would hold a window
            backlog=1024,
            ssl=self._tls,
            create_connection=cast(Any, partial(_Served, self._gate)),
        ) as server:
            yield server

    async def _listen(self, sender: Sender) -> None:
        self._gate = _Gate(self.config, sender)
        async with self._client() as connection:
            for text in self.config.subscribe:
                await connection.send(text)
            reading = asyncio.create_task(self._read(connection, sender))
            while not sender.stopped and not reading.done():
                await asyncio.wait([reading], timeout=_LOOK_SECS)
                self._gate.look()
            if reading.done():
                reading.result()
                raise RetryableError(f"{self.config.url} ended the connection", code="PEN-2001")
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                await reading

    async def _serve(self, sender: Sender) -> None:
        allow_connections(self.config.max_connections)
        self._gate = _Gate(self.config, sender)
        async with self._server(lambda connection: self._welcome(connection, sender)) as server:
            self.port = server.sockets[0].getsockname()[1]
            while not sender.stopped:
                await asyncio.sleep(_LOOK_SECS)
                self._gate.look()
            self._gate.room.set()

    async def _welcome(self, connection: Any, sender: Sender) -> None:
        if self._gate.is_shut or len(self._gate.open) >= self.config.max_connections:
            self._refused += 1
            why = "the journal is full" if self._gate.is_shut else "too many connections"
            await connection.close(1013, why)
            return
        with contextlib.suppress(ConnectionClosed):
            await self._read(connection, sender)

    async def _read(self, connection: Any, sender: Sender) -> None:
        """Hand over what comes, one after the other, as long as the other side is there."""
        self._gate.enter(connection)
        asking = asyncio.create_task(self._ask(connection))
        try:
            await self._hand_over(connection, sender)
        finally:
            self._gate.leave(connection)
            asking.cancel()

    async def _ask(self, connection: Any) -> None:
        """Ping. The library would take the silence of a connection that is not read for that of the other side."""
        loop, gate, patience = asyncio.get_running_loop(), self._gate, self.config.ping_secs
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.sleep(patience)
                pong, asked = await connection.ping(), loop.time()
                while not pong.done():
                    heard = loop.time() if gate.is_shut else max(asked, gate.opened_at)
                    if loop.time() - heard >= patience:
                        await connection.close(1011, "no answer to a ping")
                        return
                    await asyncio.wait([pong], timeout=heard + patience - loop.time())
                await pong

    async def _hand_over(self, connection: Any, sender: Sender) -> None:
        self._connections += 1
        peer = "{}:{}".format(*(connection.remote_address or ("?", self._connections))[:2])
        teller, number = _Teller(asyncio.get_running_loop(), connection), 0
        async for message in connection:
            while sender.full and not sender.stopped:
                self._gate.room.clear()
                await self._gate.room.wait()
            if sender.stopped:
                return
            number += 1
            acknowledge = partial(teller.is_durable, number) if self.config.acknowledge else None
            text = isinstance(message, str)
            make = SourceRecord.from_string if text else SourceRecord.from_bytes
            record = make(self.config.stream, message).with_attribute("websocket.peer", peer)
            sender.send(SourceEnvelope.with_offset(record, Offset(peer, number)), acknowledge)
            self._gate.count(connection, -len(record.payload or b""))

    def _refusal(self, error: Exception, kind: type[FatalError | RetryableError], code: str) -> Exception:
        if isinstance(error, InvalidStatus) and error.response.status_code in (401, 403):
            return ConfigError(
                f"{self.config.url} refused the credentials: {error}",
                code="PEN-1016",
                hint="check `token` and `headers`",
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return FatalError(
                f"{self.config.url}: {error.verify_message}", code="PEN-5001", hint="check its certificate"
            )
        hint = "check `url`, and that the server runs" if self.config.mode == "client" else "check `url`"
        return kind(f"{self.config.url}: {error or type(error).__name__}", code=code, hint=hint)


class _Gate:
    """
    Bounds what is held in memory while the journal is full, in bytes over all connections.

    Up to the bound connections are read, so that pings are answered; then none is, and the senders feel it.
    """

    def __init__(self, config: WebsocketConfig, sender: Sender | None = None) -> None:
        self.open: set[_Counted] = set()
        """Connections that are read."""
        self.held = 0
        """Bytes of their messages that are not handed over."""
        self.room = asyncio.Event()
        """Set while messages are taken."""
        self.opened_at = 0.0
        """When connections were last read again."""
        self.is_shut = False
        self.begun: Begun[_Counted] = Begun(config.max_message_bytes)
        """Of messages that are not whole yet, of all connections."""
        self.ended = 0
        """Connections that were ended for what they had begun."""
        self._sender = sender

    def enter(self, connection: _Counted) -> None:
        self.open.add(connection)
        self.held += connection.held
        if not self.is_shut:
            connection.transport.resume_reading()

    def leave(self, connection: _Counted) -> None:
        self.open.discard(connection)
        self.held -= connection.held

    def count(self, connection: _Counted, size: int) -> None:
        """So many bytes have come, or are handed over."""
        connection.held += size
        if connection in self.open:
            self.held += size
        if self.is_shut:
            connection.transport.pause_reading()
        elif self.held > _HELD_BYTES and self._sender is not None and self._sender.full:
            self.is_shut = True
            for each in self.open:
                each.transport.pause_reading()

    def begin(self, connection: _Counted, size: int) -> None:
        """So much of a message has come, and its rest has not."""
        largest = self.begun.count(connection, size)
        if largest is not None:
            self.begun.count(largest, 0)  # the loop may hear others before it hears that this one is gone
            self.ended += 1
            largest.transport.abort()

    def look(self) -> None:
        """Go on if there is room again: first what is held, then what comes."""
        if self._sender is None or self._sender.full:
            return
        self.room.set()
        if self.is_shut:
            self.is_shut = False
            self.opened_at = asyncio.get_running_loop().time()
            for each in self.open:
                each.transport.resume_reading()


class _Counted(Connection):
    """A connection that says what it holds. The library bounds messages, and each connection for itself."""

    gate: _Gate
    held = 0
    fragments = 0
    """Bytes of the frames of a message whose last one has not come."""

    def process_event(self, event: Any) -> None:
        super().process_event(event)
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            self.gate.count(self, len(event.data))
            self.fragments = 0 if event.fin else self.fragments + len(event.data)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.gate.begin(self, len(self.protocol.reader.buffer) + self.fragments)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gate.begin(self, 0)


class _Served(_Counted, ServerConnection):
    def __init__(self, gate: _Gate, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = gate


class _Client(_Counted, ClientConnection):
    def __init__(self, gate: _Gate, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = gate


class _Teller:
    """Tells the other side how many messages are on disk; one that does not listen hears the newest number later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Any) -> None:
        self._loop = loop
        self._connection = connection
        self._durable = self._told = 0
        self._task: asyncio.Task[None] | None = None

    def is_durable(self, number: int) -> None:
        """From the journal's thread."""
        self._durable = number
        with contextlib.suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._tell())

    async def _tell(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while self._told < self._durable:
                self._told = self._durable
                await self._connection.send(str(self._told))
