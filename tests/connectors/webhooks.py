"""A webhook source with its journal, in this process, and clients that say exactly what they are asked to."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.connectors.webhook import Webhook, WebhookConfig
from penstock.pipeline.options import Processing
from penstock.runtime.ingest import Ingest
from penstock.runtime.journal import JournalConfig, JournalSource
from penstock.source import ReadLimit, SourceContext

PATIENCE_SECS = 60.0


@dataclass
class Answer:
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str:
        return str(self.body.get("error"))


def config(**options: Any) -> WebhookConfig:
    """One endpoint `/events` and no authentication, unless the options say more."""
    plain = {"port": 0, "auth": {"type": "none"}, "endpoints": [{"path": "/events", "stream": "events"}]}
    return WebhookConfig.model_validate({**plain, **options})


class Running:
    """A webhook that serves into a journal."""

    def __init__(self, ingest: Ingest, source: Webhook, journal: Path) -> None:
        self.ingest, self.source, self._journal = ingest, source, journal
        self.port = source.port

    def post(
        self,
        body: bytes | str | list[Any] | dict[str, Any],
        path: str = "/events",
        method: str = "POST",
        **headers: str,
    ) -> Answer:
        """One request over a connection of its own; `content_type="…"` is the header Content-Type."""
        if not isinstance(body, bytes | str):
            body = json.dumps(body)
        named = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECS)
        with contextlib.closing(connection):
            connection.request(method, path, body, {name: text for name, text in named.items() if text})
            return _answer(connection.getresponse())

    def get(self, path: str) -> Answer:
        return self.post(b"", path, "GET", content_type="")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECS)

    def raw(self, *pieces: bytes) -> list[Answer]:
        """Send bytes as they are, and read every answer until the server closes."""
        with self.connect() as client:
            for piece in pieces:
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
            return answers(client)

    def events(self, stream: str = "events") -> list[bytes]:
        """What is in the journal, as another process would read it."""
        return [payload for payload, _ in self.rows(stream)]

    def rows(self, stream: str = "events") -> list[tuple[bytes, dict[str, str]]]:
        found = []
        for name, payload, attributes in journaled(self._journal):
            if name == stream:
                found.append((payload, attributes))
        return found


def journaled(directory: Path) -> list[tuple[str, bytes, dict[str, str]]]:
    """Stream, payload and attributes of every row that is durable, in order."""
    source = JournalSource(JournalConfig(directory=directory))
    start = source.initial()
    batches = [b.records for s in source.split(start, source.latest(start, ReadLimit())) for b in source.read(s)]
    return [
        (row["stream"], row["payload"], dict(row["attributes"] or ())) for each in batches for row in each.to_pylist()
    ]


@contextlib.contextmanager
def serving(
    directory: Path, *, context: SourceContext = SourceContext(), processing: Any = None, **options: Any
) -> Iterator[Running]:
    """A webhook that runs until the block ends."""
    source = Webhook(config(**options))
    wanted = Processing(linger_ms=0, **(processing or {}))
    ingest = Ingest("webhook", source, directory / "journal", wanted)
    try:
        ingest.open(context=context)
        running = Running(ingest, source, directory / "journal")
        ingest.start()
        yield running
        assert ingest.stop(PATIENCE_SECS), "the source did not return"
        assert ingest.failure is None, ingest.failure
    finally:
        ingest.close()


def request(
    body: bytes = b"{}", path: str = "/events", method: str = "POST", *headers: str, length: bool = True
) -> bytes:
    """The bytes of a plain request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    lines += [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def answers(client: socket.socket) -> list[Answer]:
    """Every answer until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", 0))
        status = int(first.split()[1])
        found.append(Answer(status, json.loads(data[:length]) if length else {}, headers))
        data = data[length:]
    return found


def answer(client: socket.socket) -> Answer:
    """The next answer on a connection that stays open."""
    response = http.client.HTTPResponse(client)
    response.begin()
    return _answer(response)


def _answer(response: http.client.HTTPResponse) -> Answer:
    text = response.read()
    return Answer(response.status, json.loads(text) if text else {}, dict(response.headers))
