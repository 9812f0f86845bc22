"""Take events over HTTP, and answer 200 once they are on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from penstock.connectors.sockets import allow_connections
from penstock.connectors.webhook.auth import guard
from penstock.connectors.webhook.bodies import cut, cut_by, inflate
from penstock.connectors.webhook.config import Tls, WebhookConfig
from penstock.connectors.webhook.events import MANY, Route, Waiting, envelopes_of, rows_of
from penstock.connectors.webhook.limits import Networks, Rates, client_of
from penstock.connectors.webhook.server import Exchange, Refused, Server, response
from penstock.errors import ConfigError, ConnectorError, DataError
from penstock.source import (
    ENVELOPE_SCHEMA,
    ConnectorMetrics,
    HealthStatus,
    Schemas,
    Sender,
    SourceBatch,
    SourceContext,
    SourceEnvelope,
    StreamingSource,
)

logger = logging.getLogger(__name__)

LOOK_SECS = 0.1
"""How often the server looks if it has to stop."""
DRAIN_SECS = 8.0
"""How long a stop waits for answers that are due."""
GROUP_BYTES = 1 << 20
"""About how much is handed to the journal as one unit."""
PATIENCE = 0.25
"""How long requests may wait for others to share their fsync, as a share of what the last one took."""
MOST_PATIENCE_SECS = 0.002


class Webhook(StreamingSource[WebhookConfig]):
    """
    Each event of a request is a message of its endpoint's stream.

    Supports exactly-once from the 200 on: it is sent after the fsync. A sender that got no answer sends again, and `dedupe`
    names what tells such a retry; without it, it is stored twice. Many requests share one fsync.
    """

    name = "webhook"

    def __init__(self, config: WebhookConfig) -> None:
        super().__init__(config)
        self._socket: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        self._serving: Serving | None = None
        self._routes: dict[bytes, Route] = {}
        self._rates = Rates(None, None)

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        config = self.config
        for endpoint in config.endpoints if config.validate_on_receive else ():
            if context.refused(endpoint.stream, ()) is None:
                raise ConfigError(
                    f"validate_on_receive needs a [[schemas]] entry for the topic of {endpoint.stream!r}",
                    code="PEN-1016",
                    hint="add one, or leave out validate_on_receive",
                )
        self._tls = _tls(config.tls) if config.tls is not None else None
        self._routes = {each.path.encode(): Route(each, guard(each.auth or config.auth)) for each in config.endpoints}
        self._rates = Rates(config.rate_limit_per_sec, config.client_rate_limit_per_sec)
        self._socket = _listen(config.host, config.port)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    @property
    def port(self) -> int:
        """The port that it listens on, after `open`."""
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    def schema(self) -> Schemas:
        return {endpoint.stream: ENVELOPE_SCHEMA for endpoint in self.config.endpoints}

    def health_check(self) -> HealthStatus:
        return HealthStatus.healthy() if self._serving is not None else HealthStatus()

    def metrics(self) -> ConnectorMetrics:
        return self._serving.metrics() if self._serving is not None else ConnectorMetrics()

    def start_streaming(self, sender: Sender) -> None:
        if self._socket is None or self._socket.fileno() < 0:  # a call after one that failed
            self._socket = _listen(self.config.host, self.config.port)
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            self._serving = Serving(self.config, self._routes, self._rates, sender, loop, self.context.refused)
            runner.run(self._serving.serve(self._socket, self._tls))


class Serving:
    """One run of the server: takes requests, hands their events to the journal in groups, answers."""

    def __init__(
        self,
        config: WebhookConfig,
        routes: dict[bytes, Route],
        rates: Rates,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        refused: Callable[[str, Sequence[bytes]], dict[int, tuple[str, str]] | None],
    ) -> None:
        self._config = config
        self._routes = routes
        self._rates = rates
        self._sender = sender
        self._loop = loop
        self._refused = refused
        self._allowed = Networks(config.allow)
        self._trusted = Networks(config.trusted_proxies)
        self._health_path = config.health_path.encode()
        self._server = Server(self, config, loop)
        self._group: list[Waiting] = []  # requests that gather while the journal is busy with the ones before
        self._group_bytes = 0
        self._due = 0  # requests that are with the journal
        self._usual = 0  # requests that were under way when the last ones were stored
        self._patience = 0.0
        self._handed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._accepted = self._events = 0
        self._statuses: Counter[int] = Counter()
        self._replies: dict[int, bytes] = {}

    async def serve(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Until the sender is stopped and every answer that is due is sent."""
        allow_connections(self._config.max_connections)
        config, server = self._config, self._server
        handshake = config.header_timeout_secs if tls is not None else None
        own = listening.dup()  # the loop closes what it is given, and the source may serve again
        server.sockets = [listening, own]
        listener = await self._loop.create_server(
            server.connect, sock=own, ssl=tls, backlog=1024, ssl_handshake_timeout=handshake
        )
        swept = self._loop.time()
        while not self._sender.stopped:
            await asyncio.sleep(LOOK_SECS)
            self._hand_over()  # nobody waits longer than this for the ones before
            if self._loop.time() - swept >= 1:
                swept = self._loop.time()
                server.sweep()
        listener.close()
        listening.close()
        server.stop()
        self._hand_over()
        until = self._loop.time() + DRAIN_SECS
        while self._loop.time() < until and (self._due or server.connections):
            await asyncio.sleep(0.01)
            server.sweep()
        for connection in list(server.connections):
            connection.abort()
        await asyncio.sleep(0)

    def metrics(self) -> ConnectorMetrics:
        refused = {f"refused_{status}": float(count) for status, count in self._statuses.items()}
        return ConnectorMetrics(
            records_total=self._events,
            errors_total=sum(self._statuses.values()),
            custom={"requests": self._accepted, "connections": len(self._server.connections), **refused},
        )

    # -- the application -----------------------------------------------------------------------------------------

    def count(self, status: int) -> None:
        self._statuses[status] += 1

    def begin(self, exchange: Exchange) -> None:
        if exchange.path == self._health_path:
            return
        route = self._routes.get(exchange.path)
        if route is None:
            raise Refused(404, "not_found", "there is no endpoint at this path")
        if exchange.method not in route.methods:
            raise Refused(405, "method_not_allowed", f"send {route.allowed}", {"Allow": route.allowed})
        headers = exchange.headers
        client = client_of(exchange.connection.peer, headers.get(b"x-forwarded-for"), self._trusted)
        if self._allowed and client not in self._allowed:
            raise Refused(403, "forbidden", "this client may not send here")
        self._rates.take_of(client)
        route.auth.head(headers)
        if not route.auth.needs_body:
            self._rates.take_of_all()
        if headers.get(b"content-encoding", b"gzip").lower() not in (b"gzip", b"identity"):
            raise Refused(415, "unsupported_media_type", "the only content encoding is gzip")
        how = route.cut or cut_by(headers.get(b"content-type", b""))
        if self._sender.full or self._sender.stopped:
            raise self._unavailable()
        exchange.endpoint = (route, how)

    def complete(self, exchange: Exchange) -> None:
        if exchange.endpoint is None:
            self._answer_health(exchange)
            return
        route, how = exchange.endpoint
        body, headers = exchange.body, exchange.headers
        route.auth.body(headers, body)
        if route.auth.needs_body:
            self._rates.take_of_all()
        if b"content-encoding" in headers:
            body = inflate(body, headers[b"content-encoding"].lower(), self._config.max_body_bytes)
        exchange.chunks = []
        events = cut(body, how)
        if not self._group and not self._due:
            self._loop.call_soon(self._gather)  # with all that comes in this turn of the loop
        self._group.append(Waiting(exchange, route, events, len(body)))
        self._group_bytes += len(body)
        if self._group_bytes >= GROUP_BYTES or (self._timer is not None and len(self._group) >= self._usual):
            self._hand_over()

    def _answer_health(self, exchange: Exchange) -> None:
        if exchange.method not in (b"GET", b"HEAD"):
            raise Refused(405, "method_not_allowed", "send GET", {"Allow": "GET, HEAD"})
        if self._sender.full or self._sender.stopped:
            raise self._unavailable()
        reply = response(200, {"status": "ok"})
        exchange.accept(reply if exchange.method == b"GET" else reply.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")

    # -- the journal ---------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Wait a little for as many requests as came last time: senders that were answered together send together."""
        if self._due or not self._group or self._timer is not None:
            return
        if len(self._group) >= self._usual or not self._patience:
            self._hand_over()
        else:
            self._timer = self._loop.call_later(self._patience, self._hand_over)

    def _hand_over(self) -> None:
        """
        Hand the requests that have gathered to the journal: it takes one call, and one call back.

        While it writes them, the next ones gather. So under load one pair of fsyncs serves many requests.
        """
        group, self._group, self._group_bytes = self._group, [], 0
        self._handed = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._config.validate_on_receive:
            group = self._validated(group)
        by_route: dict[Route, list[Waiting]] = {}
        for waiting in group:
            by_route.setdefault(waiting.route, []).append(waiting)
        for route, part in by_route.items():
            many = not route.dedupes and sum(len(waiting.events) for waiting in part) >= MANY
            self._offer(part, rows_of(route, part) if many else envelopes_of(part))

    def _offer(self, group: list[Waiting], items: SourceBatch | list[SourceEnvelope]) -> None:
        self._due += len(group)
        refused = None
        try:
            if not self._sender.offer(items, partial(self._call_soon, self._stored, group)):
                refused = self._unavailable()
        except DataError as error:
            refused = Refused(400, "bad_request", error.message)
        except ConnectorError:  # the source stops, or the disk refuses: the runtime knows why
            refused = self._unavailable()
        if refused is not None:
            self._due -= len(group)
            for waiting in group:
                waiting.exchange.refuse(refused)

    def _call_soon(self, call: Callable[[list[Waiting]], None], group: list[Waiting]) -> None:
        with contextlib.suppress(RuntimeError):  # the server is gone, and its clients will send again
            self._loop.call_soon_threadsafe(call, group)

    def _stored(self, group: list[Waiting]) -> None:
        self._due -= len(group)
        if not self._due:
            self._usual = len(group) + len(self._group)
            self._patience = min(MOST_PATIENCE_SECS, (self._loop.time() - self._handed) * PATIENCE)
            if self._group:
                self._gather()
        for waiting in group:
            count = len(waiting.events)
            self._accepted += 1
            self._events += count
            reply = self._replies.get(count)
            if reply is None:
                reply = response(200, {"accepted": count})
                if count < 1000:
                    self._replies[count] = reply
            waiting.exchange.accept(reply)

    def _validated(self, group: list[Waiting]) -> list[Waiting]:
        """The requests whose events the schemas take; the others are answered."""
        streams: dict[str, list[tuple[Waiting, int, bytes]]] = {}
        for waiting in group:
            for number, event in enumerate(waiting.listed()):
                streams.setdefault(waiting.route.stream, []).append((waiting, number, event))
        bad: dict[Waiting, Refused] = {}
        for stream, events in streams.items():
            try:
                found = self._refused(stream, [each[2] for each in events]) or {}
            except Exception as error:  # noqa: BLE001 - a registry that is away, or worse: each request has to be answered
                logger.warning("events of %s cannot be checked: %r", stream, error)
                bad |= dict.fromkeys((each[0] for each in events), self._unavailable("the events cannot be checked"))
                continue
            for at, (rule, reason) in found.items():
                waiting, number, _ = events[at]
                bad.setdefault(waiting, Refused(422, "invalid", reason, rule=rule, event=number))
        for waiting, refused in bad.items():
            waiting.exchange.refuse(refused)
        return [waiting for waiting in group if waiting not in bad]

    def _unavailable(self, why: str = "") -> Refused:
        pause = {"Retry-After": str(self._config.retry_after_secs)}
        if self._sender.stopped:
            return Refused(503, "stopping", "the pipeline is stopping", pause)
        if why:
            return Refused(503, "unavailable", why, pause)
        return Refused(503, "full", "the journal takes no more now", pause)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(1024)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            code="PEN-1016",
            hint="is another program, or this pipeline, serving there already? Choose another host or port",
        ) from error
    listening.setblocking(False)
    return listening


def _tls(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(tls.client_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot load the certificate {tls.cert_file}: {error}",
            code="PEN-1016",
            hint="cert_file, key_file and client_ca_file are PEM files; the key must be the certificate's",
        ) from error
    return context
