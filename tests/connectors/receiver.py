"""A web server in this process that notes what it is asked, and answers as a test says."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Says = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
"""A status, a body (bytes as they are, others as JSON) and headers."""


@dataclass
class Receiver:
    """`answer` says what each request is answered; None closes the connection without a word."""

    answer: Callable[[Asked], Says | None] = lambda asked: (200, {})
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def receiving(
    answer: Callable[[Asked], Says | None] = lambda asked: (200, {}), tls: ssl.SSLContext | None = None
) -> Iterator[Receiver]:
    """A server on a port of its own, until the block ends; with `tls` by HTTPS, as `localhost`."""
    receiver = Receiver(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = Asked(self.command, self.path, {n.lower(): v for n, v in self.headers.items()}, body)
            with receiver.lock:
                receiver.asked.append(asked)
                says = receiver.answer(asked)
            if says is None:
                self.close_connection = True
                return
            status, content, *more = says
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if status != 304 else 0))
            self.end_headers()
            self.wfile.write(data if status != 304 else b"")

        do_GET = do_POST = do_PUT = do_PATCH = _any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False  # type: ignore[misc]
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        receiver.url = f"https://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
