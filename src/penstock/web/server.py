"""
The HTTP server of the console: small, without dependencies, and careful.

It answers a fixed list of addresses. Nothing from a request becomes a path, a header or HTML. Only requests that carry the
token change anything, and a browser sends that for no other site. A connection that takes too much time is closed.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.config import Secret
from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError
from penstock.runtime.telemetry import Telemetry, Verdict, judge, ready
from penstock.web.watched import Fleet, codes

CONNECTIONS = 64
"""Connections at the same time; more are closed at once."""

CONNECTION_SECS = 20.0
"""How long one connection may take from its first byte to its last."""

BODY_BYTES = 16_384

_DIGITS = 10
"""Of a length that is worth reading: Python refuses to read thousands of them."""

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_ONE = re.compile(r"/api/p/([0-9a-f]{12})/(status|detail|history|actions)")


@dataclass(frozen=True)
class Access:
    """Where the server listens, and the token that changes need; on another address than loopback all of the API needs it."""

    host: str
    token: str | None

    @classmethod
    def of(cls, host: str, token: Secret | None) -> Access:
        if not is_loopback(host) and token is None:
            raise ConfigError(
                f"the console is not served on {host} without a token",
                hint='set console_token = { env = "PENSTOCK_TOKEN" }, for `penstock console` --token-env PENSTOCK_TOKEN; '
                "or leave the address at 127.0.0.1",
            )
        known = token.reveal() if token is not None else None
        if known is not None and not known.strip():
            raise ConfigError(
                "the token of the console is empty",
                code="PEN-1005",
                hint="set it to a long random text, or leave it out",
            )
        return cls(host, known)

    def admits(self, authorization: str | None) -> bool:
        """True if the header is `Bearer` and the token, in UTF-8; the server reads a header as Latin-1."""
        scheme, _, given = (authorization or "").partition(" ")
        known = bool(self.token) and scheme.lower() == "bearer"
        return known and hmac.compare_digest(given.strip(" \t").encode("latin-1", "replace"), str(self.token).encode())


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int) -> str:
    """The address of a server on a host and port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server:
    """Serves from its own threads until it is closed."""

    def __init__(self, access: Access, port: int, fleet: Fleet, telemetry: Telemetry | None = None) -> None:
        """`telemetry`: of the run that it belongs to; without, metrics and health are not served."""
        handler = type("Handler", (_Handler,), {"access": access, "fleet": fleet, "telemetry": telemetry})
        try:
            self._http = _Http(access.host, port, handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics on port {port}: {getattr(error, 'strerror', None) or error}",
                hint="choose another metrics_port under [processing], or 0 for any that is free",
            ) from error
        self.port: int = self._http.server_address[1]
        self.url = url_of(access.host, self.port)
        threading.Thread(target=self._http.serve_forever, name="penstock-web", daemon=True).start()

    def close(self) -> None:
        """Stop serving; may be called twice."""
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            full = len(self._open) >= CONNECTIONS
            if not full:
                self._open[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second: end what takes too long, however slowly the bytes trickle."""
        now = time.monotonic()
        with self._guard:
            late = [request for request, since in self._open.items() if now - since > CONNECTION_SECS]
        for request in late:
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended meanwhile

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    access: Access
    fleet: Fleet
    telemetry: Telemetry | None
    timeout = 10  # a client that connects and says nothing must not hold a thread

    # -- what is answered ----------------------------------------------------------------------------------------

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if not self._is_for_us():
            self._refuse(421, "this name is not the name of this server")
        elif path in _STATIC:
            name, kind = _STATIC[path]
            self._answer(200, kind, (files("penstock.web") / "static" / name).read_bytes())
        elif path in ("/healthz", "/readyz") and self.telemetry is not None:
            verdict = (judge if path == "/healthz" else ready)(self.telemetry.status())
            self._verdict(verdict if self._may_read() else Verdict(verdict.ok, "ok" if verdict.ok else "not ok"))
        elif path == "/api/me":
            self._json(
                200, {"writable": self.access.admits(self.headers["Authorization"]), "token": bool(self.access.token)}
            )
        elif not self._may_read():
            self._refuse(401, "this address needs the token: Authorization: Bearer …")
        elif path == "/metrics" and self.telemetry is not None:
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.telemetry.metrics())
        elif path == "/api/status" and self.telemetry is not None:
            self._json(200, self.telemetry.status())
        elif path == "/api/pipelines":
            found = [watched.summary() for watched in self.fleet.all()]
            self._json(200, {"pipelines": [each for each in found if each is not None]})
        elif path == "/api/codes":
            self._json(200, {"codes": codes()})
        else:
            self._one(path, query)

    def _one(self, path: str, query: str) -> None:
        match = _ONE.fullmatch(path)
        watched = self.fleet.get(match[1]) if match else None
        if match is not None and watched is None:
            self._refuse(404, "there is no such pipeline here any more")
            return
        if match is None or watched is None or match[2] == "actions":
            own = "/metrics, /healthz, /readyz and /api/status"
            there = f"there are /, /api/pipelines, {own}"
            if self.telemetry is None:
                there = f"there are / and /api/pipelines; {own} are on the `metrics_port` of each pipeline"
            self._refuse(404, there)
            return
        looks: dict[str, Callable[[], Json]] = {
            "status": watched.status,
            "detail": watched.detail,
            "history": lambda: watched.history(_since(query)),
        }
        try:
            found = looks[match[2]]()
        except (KeyError, TypeError, AttributeError):
            self._refuse(500, "its status cannot be read by this version")
            return
        if found is None:
            self._refuse(404, "it has left no status")
        else:
            self._json(200, found)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        match = _ONE.fullmatch(self.path.partition("?")[0])
        if not self._is_for_us() or not self._is_same_site():
            self._refuse(403, "a request from another site")
        elif not self.access.admits(self.headers["Authorization"]):
            what = "it needs the token" if self.access.token else "read-only: there is no console_token"
            self._refuse(403 if not self.access.token else 401, what)
        elif self.headers.get_content_type() != "application/json":
            self._refuse(415, "a request is application/json")
        elif match is None or match[2] != "actions" or (watched := self.fleet.get(match[1])) is None:
            self._refuse(404, "there is no such pipeline")
        elif (body := self._body()) is not None:
            try:
                self._json(200, {"said": watched.act(body, f"console {self.client_address[0]}")})
            except ConnectorError as error:
                self._json(409, {"error": f"{error.code} {error.message}", "hint": error.hint})

    def _body(self) -> dict[str, Json] | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > _DIGITS or int(length) > BODY_BYTES:
            self._refuse(413, f"a request has at most {BODY_BYTES} bytes, and says how many")
            return None
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            self._refuse(400, "a request is a JSON object")
            return None
        return body

    # -- who may ---------------------------------------------------------------------------------------------------

    def _is_for_us(self) -> bool:
        """On loopback the name in the request must be one of this machine: another site's name may lead here, too."""
        if not is_loopback(self.access.host):
            return True  # there the token decides
        host = self.headers.get("Host")
        if host is None:
            return True  # no browser
        try:
            return is_loopback(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False

    def _is_same_site(self) -> bool:
        origin, host = self.headers.get("Origin"), self.headers.get("Host")
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        return origin is None or origin in (f"http://{host}", f"https://{host}")

    def _may_read(self) -> bool:
        return is_loopback(self.access.host) or self.access.admits(self.headers["Authorization"])

    # -- how ---------------------------------------------------------------------------------------------------------

    def _verdict(self, verdict: Verdict) -> None:
        self._answer(200 if verdict.ok else 503, _TEXT, f"{verdict.reason}\n".encode())

    def _json(self, code: int, value: Json) -> None:
        self._answer(code, _JSON, json.dumps(value, ensure_ascii=False).encode())

    def _refuse(self, code: int, why: str) -> None:
        self._json(code, {"error": why})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library itself refuses, without a word of the request."""
        self.command = getattr(self, "command", None) or "GET"
        self._refuse(code, "this request is not understood")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.close_connection = True
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "penstock"

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


def _since(query: str) -> float:
    try:
        since = float(parse_qs(query).get("since", ["0"])[0])
    except ValueError:
        return 0.0
    return since if math.isfinite(since) else 0.0
