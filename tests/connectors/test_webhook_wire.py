"""What a webhook does with bytes that are not HTTP, or not quite: each is refused, and the others are served."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from connectors.webhooks import Running, answer, answers, request, serving
from penstock.connectors.webhook.server import Exchange
from penstock.testing.processes import wait_until

HEAD = b"POST /events HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HIDDEN = b'POST /events HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"smuggled"'


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("hook"), max_header_bytes=4000, max_body_bytes=10_000) as running:
        yield running


def still_serves(hook: Running) -> None:
    """It takes an event, and has taken none that it should not have."""
    assert hook.post(b'"good"').status == 200
    assert set(hook.events()) == {b'"good"'}


SMUGGLED = {
    "both lengths": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "both lengths, other order": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "the same length twice": HEAD + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "a list of lengths": HEAD + b"Content-Length: 0, 0\r\n\r\n" + HIDDEN,
    "a signed length": HEAD + b"Content-Length: +0\r\n\r\n" + HIDDEN,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + HIDDEN,
    "a huge length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + HIDDEN,
    "a hexadecimal length": HEAD + b"Content-Length: 0x0\r\n\r\n" + HIDDEN,
    "a coding before chunked": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a coding after chunked": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "not quite chunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked after a vertical tab": HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a folded header": HEAD + b"X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunked in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "bare line feeds": HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 0\n\n" + HIDDEN,
    "a bare carriage return": HEAD + b"X: a\rContent-Length: 9\r\n\r\n" + HIDDEN,
    "a NUL in a header": HEAD + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "two hosts": HEAD + b"Host: y\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "no host": HEAD.replace(b"Host: x\r\n", b"") + b"Content-Length: 0\r\n\r\n" + HIDDEN,
    "an upgrade": HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
}


@pytest.mark.parametrize("shape", SMUGGLED)
def test_a_request_that_two_programs_might_read_differently_is_refused(hook, shape):
    found = hook.raw(SMUGGLED[shape])
    assert [each.status for each in found] in ([400], [413]), found
    assert found[0].headers["connection"] == "close"
    still_serves(hook)


MALFORMED = {
    "nothing of the kind": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"FROBNICATE /events HTTP/1.1\r\nHost: x\r\n\r\n",
    "no version": b"POST /events\r\nHost: x\r\n\r\n",
    "another version": b"POST /events HTTP/3.7\r\nHost: x\r\n\r\n",
    "a header without a name": HEAD + b": x\r\n\r\n",
    "a header without a colon": HEAD + b"nonsense\r\n\r\n",
}


@pytest.mark.parametrize("shape", MALFORMED)
def test_bytes_that_are_not_http_are_refused(hook, shape):
    assert [each.status for each in hook.raw(MALFORMED[shape])] == [400]
    still_serves(hook)


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = {
    "no size": b"\r\nabc\r\n0\r\n\r\n",
    "no number": b"xyz\r\nabc\r\n0\r\n\r\n",
    "a negative size": b"-3\r\nabc\r\n0\r\n\r\n",
    "a size that overflows": b"ffffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "a size that is too small": b'2\r\n"abcd"\r\n0\r\n\r\n',
    "a size in 0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "line feeds only": b"3\nabc\n0\n\n",
}


@pytest.mark.parametrize("shape", CHUNKS)
def test_invalid_chunks_are_refused_and_nothing_is_stored(hook, shape):
    found = hook.raw(CHUNKED + CHUNKS[shape])
    assert [each.status for each in found] in ([400], [413])
    still_serves(hook)


def test_chunks_are_joined_and_their_trailers_left_out(tmp_path):
    with serving(tmp_path) as hook:
        body = b'3;a="b"\r\n"ab\r\n2\r\nc"\r\n0\r\nX-Evil: 1\r\nAuthorization: x\r\n\r\n'
        assert [each.status for each in hook.raw(CHUNKED + body + request(b"2"))] == [200, 200]
        assert hook.events() == [b'"abc"', b"2"]


def test_chunks_that_are_cut_short_are_not_stored(hook):
    assert hook.raw(CHUNKED + b'9\r\n"abc') == []
    still_serves(hook)


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"X-Huge: " + b"x" * 5000 + b"\r\n\r\n",),
        (HEAD + b"X-Huge: ", *(b"x" * 1000 for _ in range(5))),  # it never ends
        (b"POST /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",),
        (HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n",),
        (b"\r\n" * 3000,),
    ],
    ids=["large", "without end", "address", "many", "blank"],
)
def test_a_huge_head_is_refused(hook, pieces):
    assert [each.status for each in hook.raw(*pieces)] in ([431], [])
    still_serves(hook)


def test_a_body_that_grows_beyond_its_limit_is_refused_while_it_comes(hook):
    chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
    with hook.connect() as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(CHUNKED + chunk * 100)
        assert [each.status for each in answers(client)] == [413]
    frames = b"".join(b"1;%s\r\nx\r\n" % (b"e" * 500) for _ in range(400))  # small, in huge frames
    with hook.connect() as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(CHUNKED + frames)
        assert [each.status for each in answers(client)] == [413]
    still_serves(hook)


def test_bodies_that_come_in_at_a_time_are_bounded_together_and_small_requests_are_served(tmp_path):
    """Signatures are checked when the body is whole: until then anybody could fill the memory."""
    head = HEAD + b"Content-Length: 60000\r\n\r\n"
    whole = b'"' + b"x" * 59_998 + b'"'
    with serving(tmp_path, max_body_bytes=60_000, max_held_bytes=100_000) as hook:
        still_serves(hook)
        held = lambda: hook.source._serving._server.held  # noqa: E731
        with hook.connect() as gone, hook.connect() as first:
            gone.sendall(head + whole[:55_000])
            wait_until(lambda: held() == 55_000, "the first piece")
            with hook.connect() as second:
                second.sendall(head + whole[:55_000])
                refused = answer(second)
                assert (refused.status, refused.error, refused.headers["Retry-After"]) == (503, "unavailable", "1")
            still_serves(hook)
            gone.close()
            wait_until(lambda: held() == 0, "its bytes to be forgotten")
            first.sendall(head + whole[:55_000])
            wait_until(lambda: held() == 55_000, "the piece of another")
            first.sendall(whole[55_000:])
            assert answer(first).status == 200
        assert held() == 0
        assert hook.events()[-1] == whole


def test_a_body_in_tiny_pieces_costs_no_more_than_its_bytes():
    exchange = Exchange(None)
    for at in range(1_000_000):
        exchange.add(b"%d" % (at % 10))
    exchange.add(b"x" * 10_000)
    exchange.add(b"end")
    assert exchange.body == b"0123456789" * 100_000 + b"x" * 10_000 + b"end"
    assert len(exchange.chunks) < 20, "a million objects would be fifty times as large"


# -- slow and silent clients ---------------------------------------------------------------------------------------------


def test_clients_that_send_byte_by_byte_are_given_up_and_the_others_are_served(tmp_path):
    limits = {"header_timeout_secs": 1, "request_timeout_secs": 2, "idle_timeout_secs": 1}
    with serving(tmp_path, **limits) as hook:
        slow = [hook.connect() for _ in range(30)]
        half = hook.connect()
        half.sendall(request(b'"half of it"')[:-5])
        statuses: list[int] = []

        def trickle(client: socket.socket) -> None:
            data = request(b"{}", "/events", "POST", "X: " + "y" * 100_000)
            with contextlib.suppress(OSError):
                for at in range(len(data)):
                    client.sendall(data[at : at + 1])
                    if statuses:
                        break
                    time.sleep(0.02)

        for client in slow:
            threading.Thread(target=trickle, args=(client,), daemon=True).start()
        for _ in range(5):
            assert hook.post(b'"good"').status == 200
        assert answer(slow[0]).status == 408
        statuses.append(408)
        assert [each.status for each in answers(half)] == [408]
        idle = hook.connect()
        assert idle.recv(10) == b""  # closed without a word
        wait_until(lambda: hook.source.metrics().custom["connections"] == 0, "the slow clients to be given up")
        assert hook.events() == [b'"good"'] * 5


def test_a_client_that_takes_no_answers_is_given_up(tmp_path):
    with serving(tmp_path, request_timeout_secs=1, idle_timeout_secs=1) as hook:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", hook.port))
        client.settimeout(60)
        with contextlib.suppress(OSError):
            while True:
                client.sendall(request(b"{}", "/nowhere") * 200)  # and never reads
        assert hook.post(b"1").status == 200
        wait_until(lambda: hook.source.metrics().custom["connections"] == 0, "the client to be given up")


def test_connections_that_break_in_the_middle_leave_nothing(tmp_path):
    with serving(tmp_path) as hook:
        for cut in range(0, len(request(b'"half"')), 7):
            with hook.connect() as client:
                client.sendall(request(b'"half"')[:cut])
                # A reset instead of an end, as of a machine that vanished.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert hook.post(b'"good"').status == 200
        wait_until(lambda: hook.source.metrics().custom["connections"] == 0, "the connections to end")
        assert hook.events() == [b'"good"']


def test_idle_connections_make_room_for_others(tmp_path):
    with serving(tmp_path, max_connections=50) as hook:
        idle = [hook.connect() for _ in range(60)]
        assert hook.post(b"1").status == 200
        assert idle[0].recv(10) == b"", "the one that was idle longest"
        busy = [hook.connect() for _ in range(50)]
        for client in busy:
            client.sendall(request(b"12")[:-1])
        wait_until(lambda: len(hook.source._serving._server.idle) == 0, "all to be busy")
        with hook.connect() as one_more:
            assert [each.status for each in answers(one_more)] == [503]
        for client in busy:
            client.sendall(b"2")
        assert [answer(client).status for client in busy] == [200] * 50
