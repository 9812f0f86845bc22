"""One connection to a broker: a paho client that reads in bulk and leaves acknowledgements to its owner."""

from __future__ import annotations

import contextlib
import inspect
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paho.mqtt import __version__ as paho_version
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.exception import MalformedPacket
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from penstock.connectors.mqtt.answers import Strict
from penstock.connectors.mqtt.config import BrokerConfig
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError

PUBACK, PUBREC, PUBCOMP = 0x40, 0x50, 0x70

_READ_BYTES = 1 << 16
_REFUSED = {
    "Bad user name or password",
    "Not authorized",
    "Unsupported protocol version",
    "Client identifier not valid",
}
"""Answers to a connection that a person has to do something about."""


_OVERRIDDEN = {
    "_create_socket": ("self",),
    "_do_on_publish": ("self", "mid", "reason_code", "properties"),
    "_handle_pingresp": ("self",),
    "_handle_pubackcomp": ("self", "cmd"),
    "_handle_publish": ("self",),
    "_handle_pubrec": ("self",),
    "_handle_pubrel": ("self",),
    "_packet_queue": ("self", "command", "packet", "mid", "qos", "info"),
    "_send_pingreq": ("self",),
    "_sock_close": ("self",),
    "_thread_main": ("self",),
    "loop_read": ("self", "max_packets"),
}
"""Methods of paho that `Link` overrides or calls. By its public ones PUBREC is sent before a message is safe."""


def require_known(client: type = paho.Client) -> None:
    """Refuse a paho that is made in another way than the one that `Link` was written for."""
    for name, parameters in _OVERRIDDEN.items():
        found = getattr(client, name, None)
        if found is None or tuple(inspect.signature(found).parameters) != parameters:
            raise FatalError(
                f"paho-mqtt {paho_version} is not one that this Penstock knows: {name} of its client has changed",
                code="PEN-5001",
                hint="install paho-mqtt 2.1 or 2.2",
            )


@dataclass(frozen=True, slots=True)
class Joined:
    """The broker has accepted the connection."""

    session_present: bool
    """False: it knows nothing of an earlier session."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message as the broker sent it."""

    topic: str
    payload: bytes
    qos: int
    mid: int
    """The packet id; 0 under QoS 0."""
    is_repeat: bool
    """DUP: it was sent before, and may have arrived."""
    is_retained: bool
    properties: Properties | None


@dataclass(frozen=True, slots=True)
class Released:
    """PUBREL: the broker will not send this packet again."""

    mid: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The broker has seen all that was sent before `ask`."""

    mark: object


Event = Joined | Arrived | Released | Answered


class Buffered:
    """A socket that is read in large pieces: paho asks for single bytes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._bytes = b""
        self._at = 0

    def recv(self, size: int) -> bytes:
        if self._at == len(self._bytes):
            self._bytes, self._at = self._inner.recv(_READ_BYTES), 0
        found = self._bytes[self._at : self._at + size]
        self._at += len(found)
        return found

    def pending(self) -> int:
        """Bytes that are here already: then nobody need wait for the socket."""
        inside = self._inner.pending() if hasattr(self._inner, "pending") else 0
        return len(self._bytes) - self._at + inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Link(Strict):
    """
    One connection, from `join` to `leave`; a broken one is not taken up again.

    What happens goes to `on_event`, in order, from the connection's own thread, which must not be kept waiting; and once it
    is over, `on_end` is called.
    """

    def __init__(
        self,
        config: BrokerConfig,
        client_id: str,
        on_event: Callable[[Event], None] = lambda event: None,
        on_end: Callable[[], None] = lambda: None,
        *,
        is_new: bool = False,
    ) -> None:
        """`is_new`: begin without a session, and leave none."""
        require_known()
        self.is_v5 = config.version == "5"
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion.MQTTv5 if self.is_v5 else MQTTProtocolVersion.MQTTv311,
            clean_session=None if self.is_v5 else is_new,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        self.suppress_exceptions = False
        self.failure: ConnectorError | None = None
        """Why the connection ended."""
        self.most_bytes: int | None = None
        """The largest packet that the broker takes; None: it has not said."""
        self._tell = on_event
        self.on_end = on_end
        self._config = config
        self._is_new = is_new
        self._connected = threading.Event()
        self._over = threading.Event()
        self._leaving = False
        self._marks: deque[object] = deque()
        self._ping_lock = threading.Lock()
        self._acknowledged: dict[int, tuple[threading.Event, list[ReasonCode]]] = {}
        self._ack_lock = threading.Lock()
        self.max_inflight_messages_set(config.max_inflight)
        self.max_queued_messages_set(0)
        self.connect_timeout = config.timeout_secs
        self.on_connect = self._joined
        self.on_disconnect = self._ended
        self.on_subscribe = lambda client, data, mid, reasons, properties: self._heard(mid, reasons)
        self.on_unsubscribe = self.on_subscribe

    def join(self, session_expiry_secs: int = 0) -> None:
        """Connect. What a person has to correct is a `ConfigError`; anything else a `RetryableError`."""
        config = self._config
        if (context := config.tls()) is not None:
            self.tls_set_context(context)
        if config.username is not None or config.password is not None:
            self.username_pw_set(config.username or "", config.password.reveal() if config.password else None)
        wishes: dict[str, Any] = {}
        if self.is_v5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = session_expiry_secs
            properties.ReceiveMaximum = config.max_inflight
            wishes = {"clean_start": self._is_new, "properties": properties}
        try:
            self.connect(config.host, config.port, config.keepalive_secs, **wishes)
        except ssl.SSLCertVerificationError as error:
            why = f"the broker's certificate is not accepted: {error.verify_message}"
            raise self._unreachable(why, "`ca_file` names those that may have signed it") from error
        except OSError as error:  # TLS as well
            raise self._unreachable(str(error)) from error
        self.loop_start()
        if not self._connected.wait(config.timeout_secs) and self.failure is None:
            self.failure = self._unreachable(f"no answer for {config.timeout_secs:g} s")
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        """Send what waits, say goodbye, and end the thread; may be called twice."""
        self._leaving = True
        if self._connected.is_set() and not self._over.is_set():
            self.disconnect()
            self._over.wait(5)
        sock = self.socket()
        if sock is not None:  # a stalled broker must not keep us
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        self.loop_stop()
        self._sock_close()

    def acknowledge(self, packets: Sequence[tuple[int, int]]) -> None:
        """Send PUBACK, PUBREC or PUBCOMP for packet ids, all in one write."""
        if packets:
            raw = b"".join(struct.pack("!BBH", kind, 2, mid) for kind, mid in packets)
            self._packet_queue(packets[0][0], raw, packets[0][1], 1)

    def ask(self, mark: object) -> None:
        """Send a ping; its answer, which gives `mark` back, shows that the broker has seen all that was sent before."""
        with self._ping_lock:
            self._marks.append(mark)
            super()._send_pingreq()

    def await_answer(self, mid: int | None) -> list[ReasonCode]:
        """What the broker said to a subscription."""
        assert mid is not None
        done, reasons = self._answer_of(mid)
        if not done.wait(self._config.timeout_secs):
            raise self.failure or RetryableError(f"{self._config.url} does not answer a subscription", code="PEN-2003")
        if self.failure is not None:
            raise self.failure
        return reasons

    # -- what paho calls ---------------------------------------------------------------------------------------------

    def _create_socket(self) -> Any:
        return Buffered(super()._create_socket())

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """All packets that are here, and not one for each look at the socket."""
        while True:
            code = super().loop_read(max_packets)
            sock = self._sock
            if code or sock is None or not sock.pending():  # type: ignore[attr-defined]
                return code

    def _handle_publish(self) -> MQTTErrorCode:
        """Hand the message over at once, also under QoS 2, whose PUBREC says that it is safe here."""
        head, raw = self._in_packet["command"], bytes(self._in_packet["packet"])
        qos, mid, properties = (head & 6) >> 1, 0, None
        if qos > 2:
            raise MalformedPacket("a PUBLISH of QoS 3")
        try:
            at = 2 + (raw[0] << 8 | raw[1])
            topic = raw[2:at].decode()
            if qos:
                mid = raw[at] << 8 | raw[at + 1]
                at += 2
            if not topic or bool(qos) != bool(mid):
                raise MalformedPacket("a PUBLISH without a topic or an id")
            if self.is_v5:
                if raw[at]:
                    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
                    at += properties.unpack(raw[at:])[1]  # type: ignore[no-untyped-call]
                else:
                    at += 1
        except (IndexError, UnicodeDecodeError) as error:
            raise MalformedPacket("a PUBLISH that cannot be read") from error
        message = Arrived(topic, raw[at:], qos, mid, bool(head & 8), bool(head & 1), properties)
        self._tell(message)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _handle_pubrel(self) -> MQTTErrorCode:
        raw = self._in_packet["packet"]
        if len(raw) < 2:
            raise MalformedPacket("a PUBREL without its packet id")
        self._tell(Released(raw[0] << 8 | raw[1]))
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _send_pingreq(self) -> MQTTErrorCode:
        with self._ping_lock:
            self._marks.append(None)
            return super()._send_pingreq()

    def _handle_pingresp(self) -> MQTTErrorCode:
        mark = self._marks.popleft() if self._marks else None
        if mark is not None:
            self._tell(Answered(mark))
        return super()._handle_pingresp()

    def _joined(self, client: Any, data: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        if reason.is_failure:
            kind = ConfigError if str(reason) in _REFUSED else RetryableError
            hint = "check `username`, `password` and the broker's access list" if kind is ConfigError else ""
            code = "PEN-1016" if kind is ConfigError else "PEN-2001"
            self.failure = kind(f"{self._config.url} refused the connection: {reason}", code=code, hint=hint)
        else:
            self.most_bytes = getattr(properties, "MaximumPacketSize", None)
            self._tell(Joined(flags.session_present))
        self._connected.set()

    def _ended(self, client: Any, data: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        if not self._leaving:
            why = str(reason)
            if reason.value == 142:
                why = "another client took the session over (the same `client_id`)"
            elif why == "Unspecified error":  # brokers that say nothing, also where a session is taken over
                why = "without a word; if that repeats, another client has the same `client_id`, or the line breaks"
                why += "" if self._config.url.startswith("mqtts://") else ", or the broker wants TLS (mqtts://)"
            self.failure = self.failure or self._unreachable(f"the connection ended: {why}")
        self._finish()

    def _thread_main(self) -> None:
        try:
            super()._thread_main()
        except Exception as error:  # noqa: BLE001 - paho fails in many ways at a packet that is none; nobody may wait for more
            self.failure = self.failure or self._unreachable(
                f"a packet cannot be read: {type(error).__name__}: {error}"
            )
            self._finish()

    def _finish(self) -> None:
        self._over.set()
        self._connected.set()
        with self._ack_lock:
            waiting = list(self._acknowledged.values())
        for done, _ in waiting:
            done.set()
        self.on_end()

    def _heard(self, mid: int, reasons: Any) -> None:
        done, found = self._answer_of(mid)
        found.extend(reasons or ())
        done.set()

    def _answer_of(self, mid: int) -> tuple[threading.Event, list[ReasonCode]]:
        with self._ack_lock:
            return self._acknowledged.setdefault(mid, (threading.Event(), []))

    def _unreachable(self, why: str, hint: str = "") -> RetryableError:
        return RetryableError(f"{self._config.url}: {why}", code="PEN-2001", hint=hint)
