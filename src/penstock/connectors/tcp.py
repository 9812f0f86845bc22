"""Lines of text over TCP: as a server that others connect to, or as a client of one."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal
from urllib.parse import urlsplit

from pydantic import PositiveFloat, PositiveInt, field_validator

from penstock.config import Config
from penstock.connectors.sockets import Begun, allow_connections
from penstock.errors import FatalError, RetryableError
from penstock.source import (
    ConnectorMetrics,
    PartitionInfo,
    ProducerConfig,
    Schemas,
    Sender,
    SourceBatch,
    SourceContext,
    StreamingSource,
)

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_LOOK_SECS = 0.5
"""How long a stop may go unnoticed."""
_NO_FILES_SECS = 0.05
"""The listener stays ready for a connection that cannot be taken: it is not looked at all the time."""


class TcpConfig(Config):
    url: str
    """`tcp://host:port` to connect to, or with `mode = "server"` to listen on; port 0 takes a free one."""

    mode: Literal["client", "server"] = "server"
    """Listen for others, or connect to a server that sends lines."""

    stream: str = "lines"
    """The stream that the lines belong to."""

    acknowledge: bool = False
    """After each fsync the server writes how many lines of the connection are on disk, as a number and a line break. Then all
    lines go through the journal, also where a route says `reliable_dispatch = false`."""

    max_line_bytes: PositiveInt = 1 << 20
    """A longer line ends its connection."""

    max_connections: PositiveInt = 1000
    """Connections beyond these are closed at once."""

    idle_timeout_secs: PositiveFloat = 300
    """A connection that was silent for this long is ended: its other side may be gone without a word."""

    epoch_on_close: bool = False
    """Cut an epoch when a connection ends, so that what it brought is soon seen."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme != "tcp" or not parts.hostname or parts.port is None or parts.path:
            raise ValueError("write tcp://host:port")
        return url

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)


class Tcp(StreamingSource[TcpConfig]):
    """
    A line is a message; its offset is the connection and the number of the line in it. Empty lines do not count.

    A line is safe from its fsync on, and exactly-once from there. `supports_replay` is False: what was sent and is not yet on
    disk when the pipeline dies is gone, unless the sender waits for `acknowledge` and sends the rest again.
    """

    name = "tcp"
    supports_replay = False

    def __init__(self, config: TcpConfig) -> None:
        super().__init__(config)
        self._listener: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._ended = threading.Event()
        self._refused = self._cut = 0
        self._begun: Begun[_Connection] = Begun(config.max_line_bytes)

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        try:
            if self.config.mode == "server":
                self._listener = socket.create_server(self.config.address, backlog=1024)
                self._listener.setblocking(False)
            else:
                self._dial().close()
        except OSError as error:
            doing = "listen on" if self.config.mode == "server" else "connect to"
            raise FatalError(
                f"cannot {doing} {self.config.url}: {error.strerror or error}", code="PEN-5001", hint="check `url`"
            ) from error

    def close(self) -> None:
        for connection in list(self._connections.values()):
            connection.sock.close()
        self._connections, self._begun = {}, Begun(self.config.max_line_bytes)
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def schema(self) -> Schemas:
        return {}

    @property
    def port(self) -> int:
        """The port that a server listens on."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def producer_configs(self) -> Sequence[ProducerConfig]:
        """What is acknowledged has to be on disk, whatever a route says."""
        asked = self.config.acknowledge
        return [replace(each, reliable_dispatch=each.reliable_dispatch or asked) for each in super().producer_configs()]

    def checkpoint_requested(self) -> threading.Event | None:
        return self._ended if self.config.epoch_on_close else None

    def metrics(self) -> ConnectorMetrics:
        custom = {"tcp_connections": len(self._connections), "tcp_connections_refused_total": self._refused}
        return ConnectorMetrics(errors_total=self._cut, custom=custom)

    def start_streaming(self, sender: Sender) -> None:
        with selectors.DefaultSelector() as selector, _Bell() as bell:
            selector.register(bell.listener, selectors.EVENT_READ)
            if self._listener is not None:
                allow_connections(self.config.max_connections)
                selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._add(selector, self._connect(), bell)
            while not sender.stopped:
                for key, _ in selector.select(_LOOK_SECS):
                    if key.fileobj is self._listener:
                        self._accept(selector, bell)
                    elif key.fileobj is bell.listener:
                        bell.clear()
                    else:
                        self._receive(selector, key.data, sender)
                self._acknowledge(selector)
                self._end_silent(selector)
                if self._listener is None and not self._connections:
                    raise RetryableError(f"{self.config.url} ended the connection", code="PEN-2001")
            deadline = time.monotonic() + 5
            while (
                any(each.durable < each.number for each in self._connections.values()) and time.monotonic() < deadline
            ):
                selector.select(_LOOK_SECS)
                bell.clear()
                self._acknowledge(selector)

    # -- connections -------------------------------------------------------------------------------------------------

    def _dial(self) -> socket.socket:
        return socket.create_connection(self.config.address, timeout=20)

    def _connect(self) -> socket.socket:
        try:
            return self._dial()
        except OSError as error:
            raise RetryableError(f"cannot connect to {self.config.url}: {error}", code="PEN-2001") from error

    def _accept(self, selector: selectors.BaseSelector, bell: _Bell) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it has gone already, or there are too many files open: the others go on
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_NO_FILES_SECS)
            return
        if len(self._connections) >= self.config.max_connections:
            self._refused += 1
            sock.close()
            return
        self._add(selector, sock, bell)

    def _add(self, selector: selectors.BaseSelector, sock: socket.socket, bell: _Bell) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _Connection(sock, bell, self.config.max_line_bytes)
        self._connections[sock.fileno()] = connection
        selector.register(sock, selectors.EVENT_READ, connection)

    def _receive(self, selector: selectors.BaseSelector, connection: _Connection, sender: Sender) -> None:
        if self._connections.get(connection.fileno) is not connection:
            return  # it was ended after the selector had found it
        try:
            raw = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        lines = list(connection.lines(raw))
        if lines:
            connection.number = number = connection.number + len(lines)
            rows = SourceBatch.of_messages(self.config.stream, lines, {"tcp.peer": connection.peer}).records
            partition = PartitionInfo(connection.peer, number)
            batch = SourceBatch.with_partition(rows, partition, self.config.stream)
            began = time.monotonic()
            sender.send(batch, lambda: connection.is_durable(number))
            for each in self._connections.values():  # while the journal was full, it was we who did not listen
                each.heard_at += time.monotonic() - began
        if connection.is_too_long:
            self._drop(connection, f"sent a line of over {self.config.max_line_bytes:,} bytes")
            self._end(selector, connection)
        elif raw:
            largest = self._begun.count(connection, len(connection.rest))
            if largest is not None:
                self._drop(largest, "began a line that is the longest of too many that wait for their ends")
                self._end(selector, largest)
        else:
            self._drop(connection, "ended in the middle of a line")
            connection.sends_no_more = True
            if not self.config.acknowledge:
                self._end(selector, connection)
            else:  # it may still wait to hear what is on disk
                selector.unregister(connection.sock)

    def _drop(self, connection: _Connection, why: str) -> None:
        """Forget the line that a connection has begun."""
        if connection.rest:
            self._cut += 1
            logger.warning("%s: %s %s; that line is dropped", self.config.url, connection.peer, why)
            connection.rest.clear()
        self._begun.count(connection, 0)

    def _acknowledge(self, selector: selectors.BaseSelector) -> None:
        for connection in list(self._connections.values()) if self.config.acknowledge else ():
            try:
                connection.acknowledge()
            except OSError:
                self._end(selector, connection)
            if connection.sends_no_more and connection.knows_all:
                self._end(selector, connection)

    def _end_silent(self, selector: selectors.BaseSelector) -> None:
        before = time.monotonic() - self.config.idle_timeout_secs
        for connection in [each for each in self._connections.values() if each.heard_at < before]:
            self._end(selector, connection)

    def _end(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        if self._connections.pop(connection.fileno, None) is not None:
            self._begun.count(connection, 0)
            with contextlib.suppress(KeyError):
                selector.unregister(connection.sock)
            connection.sock.close()
            self._ended.set()


class _Connection:
    """One other side, and what is known of its lines."""

    def __init__(self, sock: socket.socket, bell: _Bell, max_line_bytes: int) -> None:
        self.sock = sock
        self.fileno = sock.fileno()
        self.peer = "{}:{}".format(*sock.getpeername()[:2]) if _is_there(sock) else "?"
        self.number = 0
        """Lines that were handed over."""
        self.durable = 0
        """Lines that are on disk."""
        self.rest = bytearray()
        """The beginning of a line. It may grow by a byte at a time, so it is not copied each time."""
        self.heard_at = time.monotonic()
        self.sends_no_more = False
        self._bell = bell
        self._most = max_line_bytes
        self._told = 0
        self._to_tell = b""

    @property
    def is_too_long(self) -> bool:
        return len(self.rest) > self._most

    @property
    def knows_all(self) -> bool:
        """True once the other side knows that all its lines are on disk."""
        return self._told == self.number and not self._to_tell

    def lines(self, raw: bytes) -> Iterator[bytes]:
        """The whole lines so far; one that is too long stays in `rest`."""
        if raw:
            self.heard_at = time.monotonic()
        self.rest += raw
        if b"\n" not in raw:
            return
        *whole, rest = bytes(self.rest).split(b"\n")
        self.rest = bytearray(rest)
        for line in whole:
            if len(line) > self._most:
                self.rest = bytearray(line)
                return
            if line := line.removesuffix(b"\r"):
                yield line

    def is_durable(self, number: int) -> None:
        """From the journal's thread."""
        self.durable = number
        self._bell.ring()

    def acknowledge(self) -> None:
        if self.durable > self._told and not self._to_tell:  # one that does not listen hears the newest number later
            self._told = self.durable
            self._to_tell = b"%d\n" % self._told
        if self._to_tell:
            with contextlib.suppress(BlockingIOError):
                self._to_tell = self._to_tell[self.sock.send(self._to_tell) :]


class _Bell:
    """Wakes a selector from another thread."""

    def __init__(self) -> None:
        self.listener, self._rung = socket.socketpair()
        self.listener.setblocking(False)
        self._rung.setblocking(False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it is over
            self._rung.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.listener.recv(4096)

    def __enter__(self) -> _Bell:
        return self

    def __exit__(self, *exception: object) -> None:
        self.listener.close()
        self._rung.close()


def _is_there(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
