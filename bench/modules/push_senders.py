"""What sends to a pipeline that is killed again and again: each notes what was acknowledged, and what it had to send twice."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from brokers import Peer, numbered
from connectors.receiver import Asked, receiving
from penstock.testing.mosquitto import Mosquitto


class Sending:
    """Sends numbered messages from a thread of its own until it is finished."""

    source = ""
    """The lines of the source's section."""

    def __init__(self) -> None:
        self.acknowledged: set[int] = set()
        self.unclear: set[int] = set()
        """Those that were sent more than once, since no answer came: without a name of their own they may be there twice."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def finish(self) -> None:
        """Send nothing new, and wait until all that was sent is acknowledged."""
        self._done.set()
        self._thread.join(300)
        assert not self._thread.is_alive(), "what was sent was never acknowledged"

    def _run(self) -> None:
        raise NotImplementedError


class Published(Sending):
    """By QoS 1 and 2 to a broker, whose answer is the acknowledgement: from there on it is the broker's and ours."""

    def __init__(self, broker: Mosquitto) -> None:
        super().__init__()
        self._broker = broker
        self.source = f'connector = "mqtt"\nurl = "{broker.url}"\nclient_id = "soak"\ntopics = ["events"]\nqos = 2\n'

    def _run(self) -> None:
        peer = Peer(self._broker.port)
        sent = 0
        while not self._done.is_set():
            for qos in (1, 2):  # the lesser of the sender's and the subscription's counts
                peer.publish_all("events", numbered(50, sent), qos)
                self.acknowledged.update(range(sent, sent + 50))
                sent += 50
            time.sleep(0.02)
        peer.close()


class Lines(Sending):
    """Lines over one connection after the other; what was not acknowledged on one is sent again on the next."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.source = f'connector = "tcp"\nurl = "tcp://127.0.0.1:{port}"\nacknowledge = true\n'
        self._port = port

    def _run(self) -> None:
        sent, left = 0, list[int]()
        while not self._done.is_set() or left:
            self.unclear.update(left)
            with contextlib.suppress(OSError, WebSocketException), self._connection() as (send, told):
                ids, known = list(left), 0
                for each in ids:
                    send(b'{"id":%d}' % each)
                while not self._done.is_set() or known < len(ids):
                    for _ in range(0 if self._done.is_set() or len(ids) - known > 5000 else 20):
                        ids.append(sent)
                        left.append(sent)
                        sent += 1
                        send(b'{"id":%d}' % ids[-1])
                    known = told()
                    self.acknowledged.update(ids[:known])
                    left = ids[known:]
                    time.sleep(0.002)
            time.sleep(0.05)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[tuple[Any, Any]]:
        with socket.create_connection(("127.0.0.1", self._port), 10) as sock:
            known, rest = 0, b""

            def told() -> int:
                nonlocal known, rest
                sock.setblocking(False)
                try:
                    found = sock.recv(1 << 16)
                    if not found:
                        raise ConnectionResetError
                    *whole, rest = (rest + found).split(b"\n")
                    known = int(whole[-1]) if whole else known
                except BlockingIOError:
                    pass
                finally:
                    sock.settimeout(10)
                return known

            yield lambda body: sock.sendall(body + b"\n"), told


class Frames(Lines):
    """The same over WebSockets."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.source = f'connector = "websocket"\nurl = "ws://127.0.0.1:{port}"\nmode = "server"\nacknowledge = true\n'

    @contextlib.contextmanager
    def _connection(self) -> Iterator[tuple[Any, Any]]:
        with connect(f"ws://127.0.0.1:{self._port}", open_timeout=10, close_timeout=1) as client:
            known = 0

            def told() -> int:
                nonlocal known
                with contextlib.suppress(TimeoutError):
                    while True:
                        known = int(client.recv(0))
                return known

            yield client.send, told


class Records(Sending):
    """A web API whose list grows; what it has is the truth."""

    def __init__(self, url: str, records: list[dict[str, int]]) -> None:
        super().__init__()
        self.source = (
            f'connector = "http_poll"\nurl = "{url}"\nstream = "records"\nkey = ["id"]\ninterval_secs = 0.05\n'
            'pagination = { type = "offset", size = 200 }\nincremental = { path = "at" }\n'
        )
        self._records = records

    def _run(self) -> None:
        while not self._done.is_set():
            sent = len(self._records)
            self._records += [
                {"id": id, "at": sent // 100} for id in range(sent, sent + 50)
            ]  # two rounds share a value
            self.acknowledged.update(range(sent, sent + 50))
            time.sleep(0.05)


@contextlib.contextmanager
def records() -> Iterator[Records]:
    kept: list[dict[str, int]] = []

    def answer(asked: Asked) -> Any:
        since, at = int(asked.query.get("since", -1)), int(asked.query["offset"])
        return 200, [each for each in kept[max(0, since) * 100 :] if each["at"] >= since][at : at + 200]

    with receiving(answer) as receiver, Records(receiver.url, kept) as sending:
        receiver.asked = _Forgets()
        yield sending


class _Forgets(list[Any]):
    def append(self, item: Any) -> None:
        pass
