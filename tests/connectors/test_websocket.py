"""The websocket source against real servers and clients of the same library."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from websockets.exceptions import ConnectionClosed, InvalidMessage
from websockets.sync.client import connect
from websockets.sync.server import serve

from brokers import Certificates
from penstock.connectors import sockets, websocket
from penstock.connectors.websocket import Websocket, WebsocketConfig, _Teller
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.source import ProducerConfig, SourceContext
from penstock.testing import SourceContract
from penstock.testing.mosquitto import free_port
from penstock.testing.processes import wait_until
from penstock.testing.sources.journaled import RecordingSender
from push_runs import Pushed, await_kill

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Filling(RecordingSender):
    """A sender whose journal is full when the test says so."""

    is_full = False

    @property
    def full(self) -> bool:
        return self.is_full


@pytest.fixture
def running() -> Iterator[Callable[..., tuple[Websocket, Filling, str]]]:
    """A source that listens, what it was sent, and its address."""
    started: list[Any] = []

    def start(**options: Any) -> tuple[Websocket, Filling, str]:
        source, sender = Websocket(WebsocketConfig(url="ws://127.0.0.1:0", mode="server", **options)), Filling()
        source.open()
        streaming = sender.streaming(source)
        streaming.__enter__()
        started.append((source, streaming))
        wait_until(lambda: source.port, "the server to listen")
        return source, sender, f"ws://127.0.0.1:{source.port}"

    yield start
    for source, streaming in started:
        streaming.__exit__(None, None, None)
        source.close()


class TestWebsocket(SourceContract):
    @pytest.fixture
    def source(self) -> Websocket:
        return Websocket(WebsocketConfig(url=f"ws://127.0.0.1:{free_port()}", mode="server"))

    @pytest.fixture
    def more(self, source: Websocket) -> Callable[[], None]:
        def send() -> None:
            wait_until(lambda: _speaks(source.config.url), "the server to listen")
            with connect(source.config.url) as client:
                client.send("a")
                client.send(b"b")

        return send

    @pytest.fixture
    def expected(self) -> dict[str, list[bytes]]:
        return {"messages": [b"a", b"b"]}

    @pytest.fixture
    def wrong(self) -> Websocket:
        return Websocket(WebsocketConfig(url="ws://127.0.0.1:9"))


def test_a_client_subscribes_each_time_and_says_when_the_server_hangs_up() -> None:
    heard: list[Any] = []

    def handle(connection: Any) -> None:
        with contextlib.suppress(ConnectionClosed):
            heard.append(connection.recv())
            connection.send("one")
            connection.send(b"two")

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        source = Websocket(WebsocketConfig(url=url, subscribe=('{"op": "subscribe"}',), stream="s"))
        source.open()
        for turn in (1, 2):
            sender = RecordingSender()
            with pytest.raises(RetryableError, match="PEN-2001"), sender.streaming(source):
                wait_until(lambda: sender.failed, "the end to be noticed")  # noqa: B023
            assert sender.rows == {"s": [b"one", b"two"]}
            assert heard == ['{"op": "subscribe"}'] * turn
        server.shutdown()


def test_a_sender_hears_what_is_on_disk(running: Callable[..., Any]) -> None:
    _, sender, url = running(acknowledge=True)
    with connect(url) as client:
        client.send("a")
        client.send("b")
        wait_until(lambda: sender.count == 2, "two messages")
        with pytest.raises(TimeoutError):
            client.recv(timeout=0.1)
        sender.make_durable()
        while (told := client.recv(timeout=60)) != "2":
            assert told == "1"


def test_a_sender_that_does_not_listen_is_told_the_newest_number_later() -> None:
    """Each that it was not told would be kept in memory."""
    told: list[str] = []

    async def run() -> None:
        listens = asyncio.Event()

        async def send(text: str) -> None:
            told.append(text)
            await listens.wait()

        teller = _Teller(asyncio.get_running_loop(), SimpleNamespace(send=send))
        for number in range(1, 1001):
            teller.is_durable(number)
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 2
        listens.set()
        while told[-1] != "1000":
            await asyncio.sleep(0)

    asyncio.run(run())
    assert told[-2:] == [told[0], "1000"]


def test_a_message_carries_who_sent_it_and_which_one_of_theirs_it_is(tmp_path: Path) -> None:
    port = free_port()
    run = Pushed(tmp_path, f'connector = "websocket"\nmode = "server"\nurl = "ws://127.0.0.1:{port}"\n')
    running = run.start()
    wait_until(lambda: _speaks(f"ws://127.0.0.1:{port}"), "the server to listen")
    with connect(f"ws://127.0.0.1:{port}") as client:
        here = "{}:{}".format(*client.socket.getsockname())
        client.send('{"id": 1}')
        client.send('{"id": 2}')
        run.await_ids(2)
    running.kill()
    assert [row["offset"] for row in run.rows()] == [{"partition": here, "value": str(n)} for n in (1, 2)]


def test_broken_frames_huge_messages_and_slow_clients_keep_nobody_else_waiting(running: Callable[..., Any]) -> None:
    source, sender, url = running(max_message_bytes=1000, max_connections=30)
    address = ("127.0.0.1", source.port)
    slow = [socket.create_connection(address) for _ in range(20)]  # a request that never ends
    for sock in slow:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
    noise = socket.create_connection(address, timeout=60)
    noise.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
    with connect(url) as large:
        large.send("x" * 2000)
        with pytest.raises(ConnectionClosed):
            large.recv(timeout=60)
    with connect(url) as broken:
        broken.socket.sendall(b"\xff\xff\xff\xff")  # reserved bits, an opcode that is none
        with pytest.raises(ConnectionClosed):
            broken.recv(timeout=60)
    with connect(url) as good:
        good.send("good")
        wait_until(lambda: sender.count == 1, "the good one's message")
    assert sender.rows == {"messages": [b"good"]}
    for sock in (*slow, noise):
        sock.close()


@pytest.mark.parametrize("how", ["a frame", "fragments"])
def test_of_messages_that_are_begun_and_never_ended_the_largest_goes_and_not_who_sends_next(
    how: str, running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "BEGUN_BYTES", 1)
    source, sender, url = running(max_message_bytes=61_000)

    def begin(client: Any, size: int) -> None:
        if how == "a frame":  # of which the end is missing
            client.socket.sendall(b"\x82\xff" + (size + 1).to_bytes(8, "big") + bytes(4) + b"x" * size)
        else:
            client.socket.sendall(b"\x02\xff" + size.to_bytes(8, "big") + bytes(4) + b"x" * size)

    with connect(url) as one, connect(url) as two, connect(url) as good:
        for number, client in enumerate((one, two), 1):
            begin(client, 60_000)
            wait_until(lambda: source._gate.begun.bytes >= number * 60_000, "the beginnings of two")  # noqa: B023
        begin(good, 5_000)
        with pytest.raises(ConnectionClosed):
            one.recv(timeout=60)
        for client in (good, two):
            client.socket.sendall(b"x" if how == "a frame" else b"\x80\x80" + bytes(4))
        wait_until(lambda: sender.count == 2, "the messages of both that are left")
        begin(two, 5_000)
        wait_until(lambda: source._gate.begun.bytes >= 5_000, "a beginning")
        two.socket.shutdown(socket.SHUT_RDWR)  # without a word
        wait_until(lambda: source._gate.begun.bytes == 0, "nothing to be left")
    assert source.metrics().errors_total == 1
    assert sorted(map(len, sender.rows["messages"])) in ([5_000, 60_000], [5_001, 60_001])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def _trusting(certificates: Certificates, name: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates["ca.pem"])
    if name is not None:
        context.load_cert_chain(certificates[f"{name}.pem"], certificates[f"{name}.key"])
    return context


@pytest.mark.parametrize(
    ("ca", "taken", "refused"), [(None, [None, "client"], []), ("ca.pem", ["client"], [None, "stranger"])]
)
def test_a_server_speaks_tls_and_asks_for_certificates_if_it_should(
    certificates: Certificates, ca: str | None, taken: list[str | None], refused: list[str | None]
) -> None:
    files = {"cert_file": certificates["server.pem"], "key_file": certificates["server.key"]}
    asked = certificates[ca] if ca else None
    source = Websocket(WebsocketConfig(url="wss://localhost:0", mode="server", ca_file=asked, **files))
    sender = RecordingSender()
    source.open()

    def speak(name: str | None) -> None:
        with connect(url, ssl=_trusting(certificates, name), open_timeout=60) as client:
            before = sender.count
            client.send("hello")
            client.ping().wait(60)
            wait_until(lambda: sender.count > before, "the message")

    with sender.streaming(source):
        url = f"wss://localhost:{wait_until(lambda: source.port, 'the server to listen')}"
        for name in taken:
            speak(name)
        for name in refused:
            with pytest.raises((ssl.SSLError, OSError, ConnectionClosed, InvalidMessage)):
                speak(name)
        with pytest.raises((InvalidMessage, ConnectionClosed, OSError)):
            connect(url.replace("wss", "ws"), open_timeout=60)
    assert sender.rows == {"messages": [b"hello"] * len(taken)}


@pytest.mark.parametrize(
    ("server", "given", "why"),
    [
        ("server", {}, "certificate"),  # an authority that the machine does not know
        ("server", {"ca_file": "other.pem"}, "certificate"),
        ("misnamed", {"ca_file": "ca.pem"}, "[Hh]ostname|not valid for"),
        ("server", {"ca_file": "ca.pem", "cert_file": "stranger.pem", "key_file": "stranger.key"}, ""),
    ],
    ids=["no ca", "wrong ca", "wrong name", "wrong client certificate"],
)
def test_a_client_that_sees_another_certificate_than_it_should_does_not_connect(
    certificates: Certificates, server: str, given: dict[str, str], why: str
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates["ca.pem"])
    context.load_cert_chain(certificates[f"{server}.pem"], certificates[f"{server}.key"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # with 1.3 a client hears of a refusal only when it reads
    if "cert_file" in given:
        context.verify_mode = ssl.CERT_REQUIRED
    files = {name: certificates[file] for name, file in given.items()}
    with serve(lambda connection: None, "localhost", 0, ssl=context) as listening:
        running = threading.Thread(target=listening.serve_forever)
        running.start()
        try:
            url = f"wss://localhost:{listening.socket.getsockname()[1]}"
            with pytest.raises(FatalError, match=f"PEN-5001.*{why}"):
                Websocket(WebsocketConfig(url=url, **files)).open()
            if server == "server":
                right = {"ca_file": certificates["ca.pem"]}
                if "cert_file" in given:
                    right |= {"cert_file": certificates["client.pem"], "key_file": certificates["client.key"]}
                Websocket(WebsocketConfig(url=url, **right)).open()
        finally:
            listening.shutdown()
            running.join()


def test_messages_that_are_acknowledged_go_through_the_journal_whatever_a_route_says() -> None:
    produces = (ProducerConfig("/messages", reliable_dispatch=False),)
    for acknowledge in (False, True):
        source = Websocket(WebsocketConfig(url="ws://127.0.0.1:0", mode="server", acknowledge=acknowledge))
        source.open(SourceContext(produces=produces))
        assert [each.reliable_dispatch for each in source.producer_configs()] == [acknowledge]


def test_the_place_of_a_client_that_vanished_without_a_word_is_free_again(running: Callable[..., Any]) -> None:
    source, sender, url = running(ping_secs=0.5, max_connections=1)
    vanished = socket.create_connection(("127.0.0.1", source.port))  # it reads nothing, and never says that it is gone
    vanished.sendall(HANDSHAKE)
    wait_until(lambda: source.metrics().custom["websocket_connections"] == 1, "its place to be taken")
    wait_until(lambda: source.metrics().custom["websocket_connections"] == 0, "a ping without an answer to end it")
    with connect(url) as client:
        client.send("next")
        wait_until(lambda: sender.count == 1, "the next one's message")
    vanished.close()


def test_a_full_journal_bounds_what_all_connections_hold_and_nothing_is_lost(
    running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, senders, each = 1 << 20, 6, 60
    monkeypatch.setattr(websocket, "_HELD_BYTES", bound)
    source, sender, url = running()
    held = lambda: source.metrics().custom["websocket_held_bytes"]  # noqa: E731

    def send(name: int, client: Any) -> None:
        for number in range(each):
            client.send(f"{name} {number} ".ljust(1 << 17, "x"))

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(url, ping_interval=None)) for _ in range(senders)]
        wait_until(lambda: source.metrics().custom["websocket_connections"] == senders, "the connections")
        sender.is_full = True
        threads = [threading.Thread(target=send, args=pair, daemon=True) for pair in enumerate(clients)]
        for thread in threads:
            thread.start()
        wait_until(lambda: held() > bound, "the bound to be reached")
        with connect(url) as late, pytest.raises(ConnectionClosed, match="full"):
            late.recv(timeout=60)
        assert held() <= bound + (senders + 1) * (1 << 18), "one more piece of each connection at most"
        sender.is_full = False
        wait_until(lambda: sender.count == senders * each, "all messages")
        for thread in threads:
            thread.join(60)
    found = [tuple(map(int, row.split()[:2])) for row in sender.rows["messages"]]
    for name in range(senders):
        assert [number for who, number in found if who == name] == list(range(each))
    wait_until(lambda: held() == 0, "nothing to be held")


def test_a_sender_that_goes_on_while_the_journal_is_full_is_not_ended_for_it(
    running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "_HELD_BYTES", 100, raising=False)
    _, sender, url = running(ping_secs=0.5)
    with connect(url, ping_interval=None) as client:
        sender.is_full = True
        for number in range(200):
            client.send(f"{number}".ljust(100))
        time.sleep(3)  # pings are due all the while, and answers to them wait behind the messages
        client.send("last")
        sender.is_full = False
        wait_until(lambda: sender.count == 201, "all messages")
        assert [int(row) for row in sender.rows["messages"][:-1]] == list(range(200))
        client.send("and it is still there")
        wait_until(lambda: sender.count == 202, "one more")


def test_connections_beyond_the_limit_are_told_so(running: Callable[..., Any]) -> None:
    source, _, url = running(max_connections=2)
    with connect(url), connect(url):
        wait_until(lambda: source.metrics().custom["websocket_connections"] == 2, "two connections")
        with connect(url) as third, pytest.raises(ConnectionClosed, match="too many"):
            third.recv(timeout=60)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "server", "subscribe": ("a",)},
        {"mode": "client", "acknowledge": True},
        {"mode": "server", "url": "wss://127.0.0.1:1"},
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="PEN-1003"):
        Websocket(WebsocketConfig(**{"url": "ws://127.0.0.1:1", **options})).open()


@pytest.mark.parametrize("url", ["http://h", "ws://me:secret@h", "wss://secret@h/x"])
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        WebsocketConfig(url=url)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"ws://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FatalError, match="PEN-5001"):
            Websocket(WebsocketConfig(url=url, mode="server")).open()


@pytest.mark.parametrize("step", ["journal.index", "commit.after"])
def test_what_was_acknowledged_is_there_after_a_kill_once(step: str, tmp_path: Path) -> None:
    port = free_port()
    url = f"ws://127.0.0.1:{port}"
    run = Pushed(tmp_path, f'connector = "websocket"\nurl = "{url}"\nmode = "server"\nacknowledge = true\n')
    killed = run.start(f"{step}=kill@3")
    wait_until(lambda: _speaks(url), "the server to listen")  # `open` tries the port and lets it go again
    sent = acknowledged = 0
    with contextlib.suppress(OSError, ConnectionClosed), connect(url) as client:
        while True:
            for _ in range(20):
                client.send(f'{{"id": {sent}}}')
                sent += 1
            while acknowledged < sent:
                acknowledged = int(client.recv(timeout=60))
    await_kill(killed)
    run.drain()
    found = run.ids()
    assert acknowledged, "some were acknowledged"
    assert set(range(acknowledged)) <= set(found) <= set(range(sent))
    assert max(found.values()) == 1


def _speaks(url: str) -> bool:
    try:
        with connect(url):
            return True
    except (OSError, InvalidMessage, ConnectionClosed):
        return False
