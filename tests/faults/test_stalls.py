"""A network that stands still for a moment, in the middle of a message: sat out, or given up and begun anew."""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect
from websockets.sync.server import serve

from connectors.receiver import Asked, Says, receiving
from penstock.testing.mosquitto import free_port
from penstock.testing.processes import wait_until
from push_runs import Pushed

PATIENCE_SECS = 60.0
FIRST = 9999
"""The message that shows that a source serves."""


class Line:
    """A TCP line to a port that passes `quota` bytes of each connection, and then nothing in either direction until `go`."""

    def __init__(self, port: int, quota: int) -> None:
        self._target, self._quota = port, quota
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.connections = 0
        self.stalled = threading.Event()
        self.go = threading.Event()
        self.ended = threading.Event()
        """The server has ended a connection."""
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exception: object) -> None:
        self.go.set()
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                self.connections += 1
                other = socket.create_connection(("127.0.0.1", self._target))
                for way in (self._there, self._back):
                    threading.Thread(target=way, args=(one, other), daemon=True).start()

    def _there(self, one: socket.socket, other: socket.socket) -> None:
        left = self._quota
        with contextlib.suppress(OSError):
            while raw := one.recv(4096):
                if len(raw) > left and not self.go.is_set():
                    other.sendall(raw[:left])
                    raw = raw[left:]
                    self.stalled.set()
                    self.go.wait(PATIENCE_SECS)
                left -= len(raw)
                other.sendall(raw)
        _end(one, other)

    def _back(self, one: socket.socket, other: socket.socket) -> None:
        held, raw = b"", b"?"
        with contextlib.suppress(OSError):
            while raw:
                if select.select([other], [], [], 0.1)[0]:
                    held += (raw := other.recv(4096))
                if self.go.is_set() or not self.stalled.is_set():
                    one.sendall(held)
                    held = b""
        self.ended.set()
        if self.stalled.is_set():
            self.go.wait(PATIENCE_SECS)
        with contextlib.suppress(OSError):
            one.sendall(held)
        _end(one, other)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _by_tcp(port: int, ids: list[int]) -> int:
    """Send messages; returns how many of them the server says are on disk. So do the others."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECS) as sock, sock.makefile() as told:
        sock.sendall(b"".join(b'{"id": %d}\n' % each for each in ids))
        durable = 0
        while durable < len(ids) and (line := told.readline()):
            durable = int(line)
        return durable


def _by_websocket(port: int, ids: list[int]) -> int:
    durable = 0
    with connect(f"ws://127.0.0.1:{port}", ping_interval=None, open_timeout=PATIENCE_SECS) as client:
        for each in ids:
            client.send(b'{"id": %d}' % each)
        with contextlib.suppress(WebSocketException):
            while durable < len(ids):
                durable = int(client.recv(timeout=PATIENCE_SECS))
    return durable


def _by_webhook(port: int, ids: list[int]) -> int:
    body = b"".join(b'{"id": %d}\n' % each for each in ids)
    head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECS) as sock:
        sock.sendall(head + body)
        answer = sock.recv(4096)
    return len(ids) if answer.startswith(b"HTTP/1.1 200") else 0


SENDERS: dict[str, Callable[[int, list[int]], int]] = {
    "tcp": _by_tcp,
    "websocket": _by_websocket,
    "webhook": _by_webhook,
}
SOURCES = {
    "tcp": 'connector = "tcp"\nurl = "tcp://127.0.0.1:{port}"\nacknowledge = true\nidle_timeout_secs = {secs}',
    "websocket": 'connector = "websocket"\nurl = "ws://127.0.0.1:{port}"\nmode = "server"\nacknowledge = true\n'
    "ping_secs = {secs}",
    "webhook": 'connector = "webhook"\nport = {port}\nauth = {{ type = "none" }}\nrequest_timeout_secs = {secs}\n'
    'endpoints = [{{ path = "/x", stream = "x", format = "ndjson" }}]',
}


def _serves(send: Callable[[int, list[int]], int], port: int) -> bool:
    with contextlib.suppress(OSError, WebSocketException):
        return send(port, [FIRST]) == 1
    return False


STALLS = [
    pytest.param(60, 1.5, id="sat-out"),
    pytest.param(0.5, 0, id="given-up"),
    pytest.param(60, 30, id="half a minute sat-out", marks=pytest.mark.soak),
    pytest.param(10, 30, id="half a minute given-up", marks=pytest.mark.soak),
]
"""The patience of a source, and for how long the network stands still at least."""


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("secs", "stall"), STALLS)
def test_a_stalled_sender_loses_nothing_that_was_acknowledged_and_keeps_no_other_waiting(
    name: str, secs: float, stall: float, tmp_path: Path
) -> None:
    port, send, ids, others = free_port(), SENDERS[name], list(range(200)), list(range(1000, 1010))
    pushed, durable = Pushed(tmp_path, SOURCES[name].format(port=port, secs=secs)), list[int]()
    run = pushed.start()
    wait_until(lambda: _serves(send, port), "the source to serve, and not only to try its port")
    with Line(port, quota=1500) as line:
        stalled = threading.Thread(target=lambda: durable.append(send(line.port, ids)), daemon=True)
        stalled.start()
        assert line.stalled.wait(PATIENCE_SECS)
        over = time.monotonic() + stall
        assert send(port, others) == len(others)
        if secs < 60:
            assert line.ended.wait(PATIENCE_SECS), "the source did not give the connection up"
            time.sleep(max(0, over - time.monotonic()))
        else:
            assert not line.ended.wait(stall)
        line.go.set()
        stalled.join(PATIENCE_SECS)
    known = durable[0]
    assert (known == len(ids)) == (secs == 60)
    assert send(port, ids[known:]) == len(ids[known:]), "the rest is sent again"
    pushed.await_ids(1 + len(ids) + len(others))
    run.kill()
    found = pushed.ids()
    assert set(found) == {FIRST, *ids, *others}
    assert all(found[each] == 1 for each in (*ids[:known], *others))


@pytest.mark.parametrize(("secs", "stall"), STALLS)
def test_a_web_api_that_stalls_is_waited_for_or_asked_again(secs: float, stall: float, tmp_path: Path) -> None:
    def answer(asked: Asked) -> Says:
        at = int(asked.query["offset"])
        return 200, [{"id": id} for id in range(at, min(at + 10, 200))]

    with receiving(answer) as api, Line(int(api.url.rpartition(":")[2]), quota=1500) as line:
        pushed = Pushed(
            tmp_path,
            f'connector = "http_poll"\nurl = "http://127.0.0.1:{line.port}/"\nstream = "x"\nkey = ["id"]\n'
            f'timeout_secs = {secs}\ninterval_secs = 0.05\npagination = {{ type = "offset", size = 10 }}\n',
        )
        run = pushed.start()
        assert line.stalled.wait(PATIENCE_SECS)
        time.sleep(stall)
        if secs < 60:
            wait_until(lambda: line.connections >= 3, "the source to ask again")
        else:
            assert line.connections == 1
        line.go.set()
        pushed.await_ids(200)
        run.kill()
    assert pushed.ids() == Counter(range(200))


@pytest.mark.parametrize(
    "source",
    [
        'connector = "tcp"\nurl = "tcp://127.0.0.1:{port}"\nmode = "client"\nidle_timeout_secs = 0.5',
        'connector = "websocket"\nurl = "ws://127.0.0.1:{port}"\nsubscribe = ["{many}"]\nping_secs = 0.5',
    ],
    ids=["tcp", "websocket"],
)
def test_a_server_that_stalls_is_given_up_and_dialled_again(source: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        quota = 1500 if "websocket" in source else -1
        port = stack.enter_context(_feed("websocket" in source))
        line = stack.enter_context(Line(port, quota))
        if quota < 0:
            line.stalled.set()
        pushed = Pushed(tmp_path, source.format(port=line.port, many=secrets.token_hex(3000)))
        run = pushed.start()
        stack.callback(run.kill)
        wait_until(lambda: line.connections >= 3, "the source to dial again")  # one is the look of its opening
        line.go.set()
        pushed.await_ids(10)


@contextlib.contextmanager
def _feed(is_websocket: bool) -> Iterator[int]:
    """A server that sends ten messages to each that connects, and waits for it to go."""
    rows = [json.dumps({"id": each}) for each in range(10)]
    if is_websocket:

        def feed(connection: Any) -> None:
            connection.recv()
            for row in rows:
                connection.send(row)
            connection.recv()

        with serve(feed, "127.0.0.1", 0, ping_interval=None) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server.socket.getsockname()[1]
            server.shutdown()
        return

    class Feed(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write("".join(f"{row}\n" for row in rows).encode())
            self.rfile.read()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Feed) as plain:
        plain.daemon_threads = True
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        yield plain.server_address[1]
        plain.shutdown()
