"""The events of requests, on their way to the journal."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.connectors.webhook.auth import Guard
from penstock.connectors.webhook.bodies import Cut, Events, member
from penstock.connectors.webhook.config import Endpoint
from penstock.connectors.webhook.server import Exchange
from penstock.source import SourceBatch, SourceEnvelope, SourceRecord

MANY = 8
"""From so many events on, they are made into rows at once."""


class Route:
    """An endpoint, ready for use."""

    def __init__(self, endpoint: Endpoint, auth: Guard) -> None:
        self.stream = endpoint.stream
        self.auth = auth
        self.methods = {method.encode() for method in endpoint.methods}
        self.allowed = ", ".join(endpoint.methods)
        self.cut: Cut | None = None if endpoint.format == "auto" else endpoint.format
        self._kept = [(name.lower().encode(), name.lower()) for name in endpoint.headers]
        dedupe = endpoint.dedupe
        self._header = dedupe.header.lower().encode() if dedupe and dedupe.header else None
        self._path = dedupe.path.split(".") if dedupe and dedupe.path else None

    @property
    def dedupes(self) -> bool:
        return self._header is not None or self._path is not None

    @property
    def keeps_headers(self) -> bool:
        return bool(self._kept)

    def attributes(self, exchange: Exchange) -> dict[str, str]:
        """The headers of a request that are kept."""
        headers = exchange.headers
        return {name: headers[key].decode("latin-1") for key, name in self._kept if key in headers}

    def key(self, exchange: Exchange, event: bytes, number: int) -> str | None:
        """What tells a retry of the event with a number in its request; None: nothing does."""
        if not self.dedupes:
            return None
        if self._path is not None:
            found = member(event, self._path)
        else:
            given = exchange.headers.get(self._header or b"")
            found = None if given is None else f"{number}:{given.decode('latin-1')}"
        return None if found is None else f"{self.stream}\n{found}"


class Waiting:
    """A request whose events are not stored yet."""

    __slots__ = ("events", "exchange", "route", "size")

    def __init__(self, exchange: Exchange, route: Route, events: Events, size: int) -> None:
        self.exchange = exchange
        self.route = route
        self.events = events
        self.size = size

    def listed(self) -> Sequence[bytes]:
        """The events one by one."""
        return self.events.to_pylist() if isinstance(self.events, pa.Array) else self.events


def envelopes_of(group: Sequence[Waiting]) -> list[SourceEnvelope]:
    """The events of requests, one by one."""
    found = []
    for waiting in group:
        route, exchange = waiting.route, waiting.exchange
        attributes = route.attributes(exchange)
        for number, event in enumerate(waiting.listed()):
            record = SourceRecord(route.stream, event, None, attributes)
            found.append(SourceEnvelope(record, None, route.key(exchange, event, number)))
    return found


def rows_of(route: Route, group: Sequence[Waiting]) -> SourceBatch:
    """The events of requests to one endpoint, column by column."""
    if not route.keeps_headers:
        return SourceBatch.of_messages(route.stream, _payloads(group), {})
    each = [SourceBatch.of_messages(route.stream, w.events, route.attributes(w.exchange)).records for w in group]
    return SourceBatch(pa.concat_batches(each), stream=route.stream)


def _payloads(group: Sequence[Waiting]) -> Events:
    if len(group) == 1:
        return group[0].events
    if not any(isinstance(waiting.events, pa.Array) for waiting in group):
        return [event for waiting in group for event in waiting.events]
    return pa.concat_arrays([pa.array(waiting.events, pa.binary()) for waiting in group])
