"""The tcp source against real sockets: lines, acknowledgements, and other sides that misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.connectors import sockets
from penstock.connectors.tcp import Tcp, TcpConfig, _Bell, _Connection
from penstock.errors import FatalError, RetryableError
from penstock.runtime.journal import Journal
from penstock.runtime.journal.envelopes import placed
from penstock.source import ProducerConfig, SourceContext
from penstock.testing import SourceContract
from penstock.testing.mosquitto import answers, free_port
from penstock.testing.processes import wait_until
from penstock.testing.sources.journaled import RecordingSender
from push_runs import Pushed, await_kill


class Keeping(RecordingSender):
    """Keeps whole messages with their offsets, and calls back at once if asked to."""

    def __init__(self, durable: bool = True) -> None:
        super().__init__()
        self.kept: list[dict[str, Any]] = []
        self._durable = durable

    def send(self, item: Any, on_durable: Callable[[], None] | None = None) -> None:
        super().send(item, on_durable)
        self.kept += placed(item).to_pylist()
        if self._durable:
            self.make_durable()

    @property
    def payloads(self) -> list[bytes | None]:
        return [each["payload"] for each in self.kept]


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[Tcp, Keeping]]]:
    """A server that runs, and what it was sent."""
    started: list[Any] = []

    def start(durable: bool = True, **options: Any) -> tuple[Tcp, Keeping]:
        source, sender = Tcp(TcpConfig(url="tcp://127.0.0.1:0", **options)), Keeping(durable)
        source.open()
        running = sender.streaming(source)
        running.__enter__()
        started.append((source, running))
        return source, sender

    yield start
    for source, running in started:
        running.__exit__(None, None, None)
        source.close()


def dial(source: Tcp) -> socket.socket:
    return socket.create_connection(("127.0.0.1", source.port), timeout=60)


class TestTcp(SourceContract):
    @pytest.fixture
    def source(self) -> Tcp:
        return Tcp(TcpConfig(url=f"tcp://127.0.0.1:{free_port()}"))

    @pytest.fixture
    def more(self, source: Tcp) -> Callable[[], None]:
        def send() -> None:
            with socket.create_connection(source.config.address, timeout=60) as sock:
                sock.sendall(b"a\nb\n")

        return send

    @pytest.fixture
    def expected(self) -> dict[str, list[bytes]]:
        return {"lines": [b"a", b"b"]}

    @pytest.fixture
    def wrong(self) -> Tcp:
        return Tcp(TcpConfig(url="tcp://127.0.0.1:9", mode="client"))


def test_lines_are_cut_whatever_pieces_they_come_in(serve: Callable[..., Any]) -> None:
    source, sender = serve()
    with dial(source) as sock:
        for piece in (b"on", b"e\r\ntw", b"o\n\n\nthree\n", b"fo", b"ur\n"):
            sock.sendall(piece)
        wait_until(lambda: len(sender.kept) >= 4, "four lines")
        here = "{}:{}".format(*sock.getsockname())
    assert sender.payloads == [b"one", b"two", b"three", b"four"]
    assert [each["offset"] for each in sender.kept] == [{"partition": here, "value": str(n)} for n in (1, 2, 3, 4)]
    assert sender.kept[0]["attributes"] == [("tcp.peer", here)]


def test_the_sender_hears_how_many_lines_are_on_disk(serve: Callable[..., Any]) -> None:
    source, sender = serve(durable=False, acknowledge=True)
    with dial(source) as sock:
        sock.sendall(b"a\nb\nc\n")
        wait_until(lambda: len(sender.kept) >= 3, "three lines")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(100)
        sender.make_durable()
        sock.settimeout(60)
        assert sock.makefile().readline() in ("1\n", "2\n", "3\n")


def test_a_sender_that_says_that_it_sends_no_more_hears_of_its_last_line(serve: Callable[..., Any]) -> None:
    source, sender = serve(durable=False, acknowledge=True)
    with dial(source) as sock:
        sock.sendall(b"a\nb\n")
        sock.shutdown(socket.SHUT_WR)  # as `nc -N` does
        wait_until(lambda: len(sender.kept) >= 2, "two lines")
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(100)
        sender.make_durable()
        sock.settimeout(60)
        assert sock.makefile().readlines()[-1] == "2\n", "then the server hangs up"
    wait_until(lambda: not source._connections, "the connection to be gone")


def test_a_sender_that_does_not_listen_is_told_the_newest_number_later() -> None:
    """Each that it was not told would be kept in memory."""
    told = bytearray()
    room = 3

    def send(raw: bytes) -> int:
        nonlocal room
        if not room:
            raise BlockingIOError
        taken = raw[:room]
        told.extend(taken)
        room -= len(taken)
        return len(taken)

    with socket.create_server(("127.0.0.1", 0)) as server, _Bell() as bell:
        with socket.create_connection(server.getsockname()), server.accept()[0] as taken:
            connection = _Connection(taken, bell, 1 << 20)
        connection.sock = SimpleNamespace(send=send)  # type: ignore[assignment]
        connection.number = 1000
        for number in range(100, 1001):
            connection.is_durable(number)
            connection.acknowledge()
            assert len(connection._to_tell) <= 4
        assert not connection.knows_all
        room = 100
        while not connection.knows_all:
            connection.acknowledge()
    assert bytes(told) == b"100\n1000\n"


def test_a_client_reads_from_a_server_and_says_when_it_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = Tcp(TcpConfig(url=f"tcp://127.0.0.1:{server.getsockname()[1]}", mode="client", stream="s"))
        source.open()
        server.accept()[0].close()  # the try of `open`
        sender = Keeping()

        def hang_up() -> None:
            with sender.streaming(source):
                other, _ = server.accept()
                other.sendall(b"a\nb\n")
                other.close()
                wait_until(lambda: sender.failed, "the end to be noticed")

        with pytest.raises(RetryableError, match="PEN-2001"):
            hang_up()
        assert sender.rows == {"s": [b"a", b"b"]}
        source.close()


def test_slow_and_silent_and_endless_clients_keep_nobody_else_waiting(serve: Callable[..., Any]) -> None:
    source, sender = serve(max_line_bytes=1000, max_connections=50)
    slow = [dial(source) for _ in range(40)]
    for sock in slow:
        sock.sendall(b"never ending")  # and no line break
    endless = dial(source)
    endless.sendall(b"x" * 5000)
    assert endless.recv(1) == b"", "a line that is too long ends its connection"
    with dial(source) as good:
        good.sendall(b"good\n")
        wait_until(lambda: sender.kept, "the good one's line")
    more = [dial(source) for _ in range(30)]
    closed = 0
    for sock in more:
        sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            closed += sock.recv(1) == b""
    assert closed >= 15, "beyond max_connections they are closed"
    assert sender.payloads == [b"good"]
    assert source.metrics().errors_total >= 1
    for sock in (*slow, endless, *more):
        sock.close()


def test_of_lines_that_are_begun_and_never_ended_the_longest_is_dropped_and_not_who_sends_next(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "BEGUN_BYTES", 1)
    source, sender = serve(max_line_bytes=61_000)
    with dial(source) as small, dial(source) as one, dial(source) as two, dial(source) as good:
        held = 0
        for sock, size in ((small, 1_000), (one, 60_000), (two, 60_000)):
            sock.sendall(b"x" * size)
            held += size
            wait_until(lambda: source._begun.bytes == held, "the beginnings")  # noqa: B023
        good.sendall(b"y" * 5_000)
        assert one.recv(1) == b"", "it holds most, and longer than the other that holds as much"
        for sock in (good, small, two):
            sock.sendall(b"\n")
        wait_until(lambda: len(sender.kept) == 3, "the lines of all that are left")
        two.sendall(b"half")
        wait_until(lambda: source._begun.bytes == 4, "a beginning")
        two.close()
        wait_until(lambda: source._begun.bytes == 0, "nothing to be left")
    assert sorted(map(len, sender.payloads)) == [1_000, 5_000, 60_000]


def test_a_line_that_is_too_long_within_a_piece_keeps_those_before_it(serve: Callable[..., Any]) -> None:
    source, sender = serve(max_line_bytes=10)
    with dial(source) as sock:
        sock.sendall(b"a\n" + b"x" * 11 + b"\nb\n")
        assert sock.recv(1) == b""
    assert sender.payloads == [b"a"]


def test_a_silent_connection_is_ended_and_half_a_line_is_dropped(serve: Callable[..., Any]) -> None:
    source, sender = serve(idle_timeout_secs=0.2)
    with dial(source) as sock:
        sock.sendall(b"whole\nhalf")
        assert sock.recv(1) == b""
    wait_until(lambda: not source._connections, "the connection to be gone")
    assert sender.payloads == [b"whole"]


def test_connections_are_not_ended_for_a_silence_that_was_ours(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr("penstock.connectors.tcp.time", clock)
    source, sender = serve()
    blocked, room, send = threading.Event(), threading.Event(), sender.send

    def full(item: Any, on_durable: Callable[[], None] | None = None) -> None:
        blocked.set()
        assert room.wait(60)
        send(item, on_durable)

    with dial(source) as one, dial(source) as other:
        other.sendall(b"first\n")
        wait_until(lambda: sender.payloads == [b"first"], "the first line")
        sender.send = full
        one.sendall(b"waits\n")
        time.sleep(0.2)  # it is taken before the other's, which then waits in the kernel
        other.sendall(b"second\n")
        time.sleep(1.5)
        room.set()
        other.sendall(b"third\n")
        wait_until(lambda: len(sender.kept) == 4, "all lines")
        assert sorted(sender.payloads) == [b"first", b"second", b"third", b"waits"]


def test_a_line_that_comes_byte_by_byte_costs_no_more_the_longer_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, _Bell() as bell:
        with socket.create_connection(server.getsockname()), server.accept()[0] as taken:
            connection = _Connection(taken, bell, 1 << 20)
        list(connection.lines(b"x" * 1_000_000))
        began = time.process_time()
        for _ in range(20_000):
            assert not list(connection.lines(b"x"))
        assert time.process_time() - began < 1, "20 GB would have been copied"
        assert [len(line) for line in connection.lines(b"\ny\n")] == [1_020_000, 1]


def test_an_epoch_is_asked_for_when_a_connection_ends(serve: Callable[..., Any]) -> None:
    source, _ = serve(epoch_on_close=True)
    asked = source.checkpoint_requested()
    assert asked is not None
    dial(source).close()
    assert asked.wait(60)
    assert Tcp(TcpConfig(url="tcp://h:1")).checkpoint_requested() is None


@pytest.mark.parametrize("is_reliable", [True, False], ids=["journal", "direct"])
def test_the_end_of_a_connection_cuts_an_epoch_and_a_route_may_pass_the_journal_by(
    is_reliable: bool, tmp_path: Path
) -> None:
    port = free_port()
    source = f'connector = "tcp"\nurl = "tcp://127.0.0.1:{port}"\nepoch_on_close = true\n'
    run = Pushed(tmp_path, source, "epoch_interval_ms = 100_000_000")
    text = run.file.read_text().replace("exactly-once", "at-least-once")
    run.file.write_text(text.replace('to = "/all"', f'to = "/all"\nreliable_dispatch = {str(is_reliable).lower()}'))
    running = run.start()
    wait_until(lambda: answers(port), "the server to listen")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        here = "{}:{}".format(*sock.getsockname())
        sock.sendall(b'{"id": 1}\n{"id": 2}\n')
    run.await_ids(2)
    running.kill()
    assert [row["offset"] for row in run.rows()] == [{"partition": here, "value": str(n)} for n in (1, 2)]
    homes = {each.parent for each in (tmp_path / "state").rglob("*.index")}
    journal = Journal(next(home for home in homes if not home.name.endswith("-direct")))
    assert journal.tail == (2 if is_reliable else 0)
    journal.close()


def test_lines_that_are_acknowledged_go_through_the_journal_whatever_a_route_says() -> None:
    produces = (ProducerConfig("/lines", reliable_dispatch=False),)
    for acknowledge in (False, True):
        source = Tcp(TcpConfig(url="tcp://127.0.0.1:0", acknowledge=acknowledge))
        source.open(SourceContext(produces=produces))
        assert [each.reliable_dispatch for each in source.producer_configs()] == [acknowledge]
        source.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        source = Tcp(TcpConfig(url=f"tcp://127.0.0.1:{taken.getsockname()[1]}"))
        with pytest.raises(FatalError, match="PEN-5001 cannot listen"):
            source.open()


@pytest.mark.parametrize("url", ["h:1", "http://h:1", "tcp://h", "tcp://h:1/path"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        TcpConfig(url=url)


@pytest.mark.parametrize("step", ["journal.data", "journal.index", "commit.after"])
def test_what_was_acknowledged_is_there_after_a_kill_once(step: str, tmp_path: Path) -> None:
    port = free_port()
    run = Pushed(tmp_path, f'connector = "tcp"\nurl = "tcp://127.0.0.1:{port}"\nacknowledge = true\n')
    acknowledged: list[int] = []

    def send(start: int) -> int:
        """Send until the connection breaks; returns the next number."""
        number = start
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            replies = sock.makefile()

            def listen() -> None:
                with contextlib.suppress(OSError):
                    for line in replies:
                        acknowledged.extend(range(start + len(seen), start + int(line)))
                        seen.extend(range(len(seen), int(line)))

            seen: list[int] = []
            listening = threading.Thread(target=listen)
            listening.start()
            try:
                while True:
                    sock.sendall(b'{"id": %d}\n' % number)
                    number += 1
                    if number % 50 == 0:
                        threading.Event().wait(0.01)
            except OSError:
                listening.join()
                return number

    killed = run.start(f"{step}=kill@3")
    wait_until(lambda: answers(port), "the server to listen")
    sent = send(0)
    await_kill(killed)
    run.drain()
    found = run.ids()
    assert acknowledged, "some were acknowledged"
    assert set(acknowledged) <= set(found), "what was acknowledged is there"
    assert max(found.values()) == 1, "and nothing is there twice"
    assert set(found) <= set(range(sent))
