"""Metrics, health and status over HTTP, on this machine only."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.errors import ConfigError
from penstock.runtime.telemetry import Telemetry, Verdict, judge, ready

_TEXT = "text/plain; charset=utf-8"


class Server:
    """Serves one pipeline's telemetry from its own threads until it is closed."""

    def __init__(self, telemetry: Telemetry, port: int) -> None:
        handler = type("Handler", (_Handler,), {"telemetry": telemetry})
        try:
            self._http = _Http(("127.0.0.1", port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics on port {port}: {getattr(error, 'strerror', None) or error}",
                hint="choose another metrics_port under [processing], or 0 for any that is free",
            ) from error
        self.port: int = self._http.server_address[1]
        telemetry.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, name="penstock-web", daemon=True).start()

    def close(self) -> None:
        """Stop serving; may be called twice."""
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(telemetry: Telemetry, port: int) -> Server:
    """Serve `/metrics`, `/healthz`, `/readyz` and `/api/status` on 127.0.0.1; port 0 takes a free one."""
    return Server(telemetry, port)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    telemetry: Telemetry
    timeout = 10  # a client that connects and says nothing must not hold a thread

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", self.telemetry.metrics())
        elif path == "/healthz":
            self._verdict(judge(self.telemetry.status()))
        elif path == "/readyz":
            self._verdict(ready(self.telemetry.status()))
        elif path == "/api/status":
            body = json.dumps(self.telemetry.status(), ensure_ascii=False, indent=1)
            self._answer(200, "application/json", body.encode())
        else:
            self._answer(404, _TEXT, b"there are /metrics, /healthz, /readyz and /api/status\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _verdict(self, verdict: Verdict) -> None:
        self._answer(200 if verdict.ok else 503, _TEXT, f"{verdict.reason}\n".encode())

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""
