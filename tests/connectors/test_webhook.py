"""The webhook source: what it takes, what it refuses and with which word, and that 200 means durable."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from connectors.webhooks import Answer, Running, answer, answers, config, request, serving
from penstock.connectors.webhook import Webhook, bodies
from penstock.connectors.webhook.bodies import cut
from penstock.connectors.webhook.limits import Rates
from penstock.connectors.webhook.server import Refused
from penstock.errors import ConfigError, RetryableError
from penstock.pipeline.options import Processing
from penstock.runtime.ingest import Ingest
from penstock.source import ENVELOPE_SCHEMA, ReadLimit, SourceContext
from penstock.testing import SourceContract
from penstock.testing.processes import wait_until

EVENTS = [b'{"id":1}', b'{"id":2}', b'{"id":3}']


class TestContract(SourceContract):
    @pytest.fixture
    def port(self) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    @pytest.fixture
    def source(self, port: int) -> Webhook:
        return Webhook(config(port=port))

    @pytest.fixture
    def expected(self) -> Any:
        return {"events": EVENTS}

    @pytest.fixture
    def statuses(self) -> list[int]:
        return []

    @pytest.fixture
    def more(self, port: int, statuses: list[int]) -> Any:
        def send(event: bytes) -> None:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(request(event))
                statuses.append(answer(client).status)

        return lambda: [threading.Thread(target=send, args=(event,), daemon=True).start() for event in EVENTS]

    @pytest.fixture
    def told(self, statuses: list[int]) -> Any:
        return lambda: statuses.count(200)

    @pytest.fixture
    def wrong(self, tmp_path: Path) -> Webhook:
        return Webhook(config(tls={"cert_file": tmp_path / "none.pem", "key_file": tmp_path / "none.pem"}))


# -- bodies --------------------------------------------------------------------------------------------------------------


def test_an_event_is_stored_as_it_was_sent_and_answered_200(tmp_path):
    with serving(tmp_path) as hook:
        assert hook.post(b' {"n": 1.10, "n": 2}\n') == Answer(200, {"accepted": 1}, hook.post(b"{}").headers)
        assert hook.events() == [b' {"n": 1.10, "n": 2}\n', b"{}"]


@pytest.mark.parametrize(
    ("body", "content_type", "events"),
    [
        (b'[{"a": 1.10}, [2] ,"x", 12345678901234567890123]', "application/json", 4),
        (b"[]", "application/json", 0),
        (b" [ ] ", "application/json; charset=utf-8", 0),
        (b'{"a":1}\n\n {"a":2} \r\n{"a":3}', "application/x-ndjson", 3),
        (b'{"specversion":"1.0"}', "application/cloudevents+json", 1),
        (b"a=1&b=%C3%A4&b=3&c=", "application/x-www-form-urlencoded", 1),
    ],
)
def test_a_body_is_cut_into_events_by_its_content_type(tmp_path, body, content_type, events):
    with serving(tmp_path) as hook:
        assert hook.post(body, content_type=content_type).body == {"accepted": events}
        assert len(hook.events()) == events


@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n", b"\n \n\t"])
def test_lines_of_a_large_body_are_cut_as_those_of_a_small_one(monkeypatch, last):
    body = b'\n{"a":1}\r\n\r\n  \n {"a":2} \n\n{"a":\t3}' + last
    few = cut(body, "ndjson")
    monkeypatch.setattr(bodies, "MANY_BYTES", 0)
    many = cut(body, "ndjson")
    many.validate(full=True)
    assert many.to_pylist() == few == [b'{"a":1}\r', b' {"a":2} ', b'{"a":\t3}']
    assert cut(b"\n \n" + last, "ndjson").to_pylist() == []


def test_items_of_an_array_keep_their_text_and_a_form_is_an_object(tmp_path):
    with serving(tmp_path) as hook:
        hook.post(b'[ {"a": 1.10} ,12345678901234567890123]')
        hook.post(b"a=1&b=x&b=y&c=", content_type="application/x-www-form-urlencoded")
        assert hook.events() == [b'{"a": 1.10}', b"12345678901234567890123", b'{"a":"1","b":["x","y"],"c":""}']


@pytest.mark.parametrize("body", [b"[1,", b"[1 2]", b"[1,]", b"[1]x", b"", b"  ", b"[\xff]", b"[" * 100_000])
def test_a_broken_array_or_an_empty_body_is_answered_400(tmp_path, body):
    with serving(tmp_path) as hook:
        assert hook.post(body).status == 400
        assert hook.events() == []


def test_an_endpoint_with_a_format_takes_every_content_type(tmp_path):
    endpoints = [{"path": f"/{how}", "stream": how, "format": how} for how in ("raw", "json", "ndjson")]
    with serving(tmp_path, endpoints=endpoints) as hook:
        assert hook.post(b"\x00\xff[", "/raw", content_type="image/png").status == 200
        assert hook.post(b"[1,2]", "/json", content_type="text/plain").body == {"accepted": 2}
        assert hook.post(b"1\n2\n", "/ndjson", content_type="").body == {"accepted": 2}
        assert hook.events("raw") == [b"\x00\xff["]


def test_gzip_is_unpacked_up_to_the_limit(tmp_path):
    with serving(tmp_path, max_body_bytes=1000) as hook:
        two = gzip.compress(b'[{"a":1},') + gzip.compress(b'{"a":2}]')  # a file of two members is one text
        assert hook.post(two, content_encoding="gzip").body == {"accepted": 2}
        assert hook.post(gzip.compress(b"1" * 1001), content_encoding="gzip").status == 413
        assert hook.post(gzip.compress(b"1" * 50_000_000), content_encoding="gzip").status == 413
        assert hook.post(two[:-4], content_encoding="gzip").status == 400
        assert hook.post(b"nothing of the kind", content_encoding="gzip").status == 400
        assert hook.post(two, content_encoding="br").status == 415


def test_a_body_that_takes_long_to_cut_is_refused_before_it_keeps_others_waiting(tmp_path):
    with serving(tmp_path) as hook:
        empty = gzip.compress(b"")
        assert hook.post(empty * 5000 + gzip.compress(b"{}"), content_encoding="gzip").body == {"accepted": 1}
        assert hook.post(empty * 10_001, content_encoding="gzip").status == 413
        assert hook.post(b"[" + b"1," * 99_999 + b"1]").body == {"accepted": 100_000}
        refused = hook.post(b"[" + b"1," * 100_000 + b"1]")
        assert (refused.status, "NDJSON" in refused.body["reason"]) == (413, True)


def test_many_events_of_a_request_are_stored_as_few_are(tmp_path):
    endpoints = [{"path": "/events", "stream": "events", "headers": ["X-From", "X-Other"]}]
    lines = [b'{"id": %d}' % number for number in range(500)]
    with serving(tmp_path, endpoints=endpoints) as hook:
        for part in (lines[:1], lines[1:300], lines[300:305], lines[305:]):
            sent = hook.post(b"\n".join(part), content_type="application/x-ndjson", x_from="shop")
            assert sent.body == {"accepted": len(part)}
        assert hook.rows() == [(line, {"x-from": "shop"}) for line in lines]
        assert hook.ingest.range_source.schema() == {"events": ENVELOPE_SCHEMA}


def test_named_headers_are_kept_as_attributes_and_each_path_is_a_stream(tmp_path):
    endpoints = [
        {"path": "/github", "stream": "github", "headers": ["X-GitHub-Event"]},
        {"path": "/shop", "stream": "shop", "methods": ["PUT", "POST"]},
    ]
    with serving(tmp_path, endpoints=endpoints) as hook:
        assert hook.post({"a": 1}, "/github?x=1", x_github_event="push", x_other="no").status == 200
        assert hook.post({"a": 2}, "/shop", "PUT").status == 200
        assert hook.rows("github") == [(b'{"a": 1}', {"x-github-event": "push"})]
        assert hook.events("shop") == [b'{"a": 2}']


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_every_refusal_has_its_status_and_a_reason_in_json(tmp_path):
    with serving(tmp_path, max_body_bytes=100, allow=["127.0.0.0/8"]) as hook:
        found = {
            404: hook.post({}, "/nowhere"),
            405: hook.get("/events"),
            413: hook.post(b"x" * 101),
            415: hook.post(b"x", content_type="image/png"),
        }
        assert {status: each.status for status, each in found.items()} == {status: status for status in found}
        assert all(
            each.body["reason"] and each.headers["Content-Type"] == "application/json" for each in found.values()
        )
        assert found[405].headers["Allow"] == "POST"
        assert hook.events() == []
        assert hook.source.metrics().custom["refused_404"] == 1


def test_only_clients_of_allowed_networks_may_send(tmp_path):
    with serving(tmp_path, allow=["10.0.0.0/8"], trusted_proxies=["127.0.0.1/32"]) as hook:
        assert hook.post({}).status == 403
        assert hook.post({}, x_forwarded_for="10.1.2.3").status == 200
        assert hook.post({}, x_forwarded_for="10.1.2.3, 192.0.2.1").status == 403  # what the proxy itself saw counts


@pytest.mark.parametrize(
    ("forwarded", "status"),
    [("10.1.2.3:5555", 200), ("[::ffff:10.1.2.3]:443", 200), ("[2001:db8::1]", 403), ("10.1.2.3:x", 403)],
)
def test_a_proxy_may_write_the_port_of_a_client(tmp_path, forwarded, status):
    with serving(tmp_path, allow=["10.0.0.0/8"], trusted_proxies=["127.0.0.1/32"]) as hook:
        assert hook.post({}, x_forwarded_for=forwarded).status == status


def test_a_client_that_is_no_trusted_proxy_cannot_say_who_it_is(tmp_path):
    with serving(tmp_path, allow=["10.0.0.0/8"]) as hook:
        assert hook.post({}, x_forwarded_for="10.1.2.3").status == 403


def test_rates_are_kept_over_connections_and_count_each_client_for_itself(tmp_path):
    with serving(tmp_path, client_rate_limit_per_sec=0.01, trusted_proxies=["127.0.0.1"]) as hook:
        assert [hook.post({}, x_forwarded_for=each).status for each in ("1.1.1.1", "2.2.2.2")] == [200, 200]
        refused = hook.post({}, x_forwarded_for="1.1.1.1")
        assert refused.status == 429
        assert 0 < int(refused.headers["Retry-After"]) <= 100
    with serving(tmp_path / "overall", rate_limit_per_sec=2) as hook:
        statuses = [hook.post({}).status for _ in range(20)]
        assert statuses[:2] == [200, 200]
        assert 429 in statuses


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("unknown:1", "unknown:2", False),
    ],
)
def test_a_client_of_ipv6_is_its_network(one, other, are_one):
    """It has as many addresses as it likes."""
    rates = Rates(None, 1)
    rates.take_of(one)
    with pytest.raises(Refused) if are_one else contextlib.nullcontext():
        rates.take_of(other)


def test_a_full_journal_is_answered_503_until_there_is_room(tmp_path):
    with serving(tmp_path, processing={"journal_max_bytes": 4000}, retry_after_secs=7) as hook:
        statuses = [hook.post(b"1" * 500) for _ in range(20)]
        refused = statuses[-1]
        assert (refused.status, refused.error, refused.headers["Retry-After"]) == (503, "full", "7")
        assert hook.get("/healthz").status == 503
        taken = sum(each.status == 200 for each in statuses)
        assert len(hook.events()) == taken
        source = hook.ingest.range_source
        source.ack(source.latest(source.initial(), ReadLimit()))
        assert hook.get("/healthz") == Answer(200, {"status": "ok"}, hook.get("/healthz").headers)
        assert hook.post({}).status == 200


def test_a_disk_that_refuses_is_never_answered_200(tmp_path, monkeypatch):
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    ingest = Ingest("webhook", Webhook(config()), tmp_path / "journal", Processing(linger_ms=0))
    ingest.open()
    hook = Running(ingest, ingest.source, tmp_path / "journal")
    ingest.start()
    try:
        monkeypatch.setattr("penstock.runtime.journal.disk.os.fsync", refuse)
        with (
            hook.connect() as first
        ):  # it is with the disk when the disk refuses: it gets no answer, and will come again
            first.sendall(request(b'{"n": 1}'))
            wait_until(lambda: ingest.failure, "the disk to refuse")
            assert hook.post({"n": 2}).status == 503
            assert ingest.stop(60)
            assert [each.status for each in answers(first)] in ([], [503])
    finally:
        monkeypatch.undo()
        ingest.close()
    assert hook.events() == []


# -- retries -------------------------------------------------------------------------------------------------------------


def test_a_retry_is_told_by_a_header_also_after_a_restart(tmp_path):
    endpoints = [{"path": "/events", "stream": "events", "dedupe": {"header": "X-Delivery"}}]
    for _ in range(2):
        with serving(tmp_path, endpoints=endpoints) as hook:
            assert hook.post({"n": 1}, x_delivery="a").status == 200
            assert hook.post([1, 2], x_delivery="b").status == 200
            assert hook.post({"n": 3}).status == 200  # without a key every one is new
    assert hook.events() == [b'{"n": 1}', b"1", b"2", b'{"n": 3}', b'{"n": 3}']


def test_a_retry_is_told_by_a_member_of_the_event(tmp_path):
    endpoints = [{"path": "/events", "stream": "events", "dedupe": {"path": "meta.id"}}]
    with serving(tmp_path, endpoints=endpoints) as hook:
        assert hook.post([{"meta": {"id": 7}}, {"meta": {"id": 8}}, {"meta": {"id": 7}}]).status == 200
        assert hook.post({"meta": {"id": 8}, "more": 1}).status == 200
        assert hook.post(b"not json").status == 200
        assert len(hook.events()) == 3


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_key_that_is_no_text_is_stored_and_no_request_beside_it_suffers(tmp_path, on_error):
    endpoints = [{"path": "/events", "stream": "events", "dedupe": {"path": "id"}}]
    half, good = b'{"id": "\\ud800"}', b'{"id": "good"}'
    with serving(tmp_path, endpoints=endpoints, processing={"on_error": on_error}) as hook:
        found = hook.raw(request(half) + request(good) + request(half))
        assert [each.status for each in found] == [200, 200, 200]
        assert hook.events() == [half, good], "what was answered 200 is stored, and a retry of it is known"


# -- schemas -------------------------------------------------------------------------------------------------------------


def test_validation_refuses_the_whole_request_before_anything_is_stored(tmp_path):
    def refused(stream: str, payloads: Any) -> dict[int, tuple[str, str]]:
        return {
            at: ("json_schema.required", f"{stream}: id is missing")
            for at, each in enumerate(payloads)
            if "id" not in json.loads(each)
        }

    with serving(tmp_path, context=SourceContext(refused=refused), validate_on_receive=True) as hook:
        found = hook.post([{"id": 1}, {"no": 2}])
        assert (found.status, found.body["rule"], found.body["event"]) == (422, "json_schema.required", 1)
        assert hook.post({"id": 3}).status == 200
        assert hook.events() == [b'{"id": 3}']


@pytest.mark.parametrize("error", [RetryableError("the registry is away"), ValueError("a bug")], ids=["away", "bug"])
def test_events_that_cannot_be_checked_are_answered_503_and_not_stored(tmp_path, error):
    def refused(stream: str, payloads: Sequence[bytes]) -> Any:
        if payloads and broken:
            raise error
        return {}

    broken = [True]
    context = SourceContext(refused=refused)
    with serving(tmp_path, validate_on_receive=True, context=context) as hook:
        answer = hook.post({"id": 1})
        assert (answer.status, answer.error) == (503, "unavailable")
        assert answer.headers["Retry-After"] == "5"
        broken.clear()
        assert hook.post({"id": 2}).status == 200
        assert hook.events() == [b'{"id": 2}']


def test_validation_without_a_schema_is_refused_at_the_start():
    source = Webhook(config(validate_on_receive=True))
    with pytest.raises(ConfigError, match="PEN-1016"):
        source.open(SourceContext(refused=lambda stream, payloads: None))


# -- the server ----------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_when_the_source_is_opened(tmp_path):
    with serving(tmp_path) as hook, pytest.raises(ConfigError, match="PEN-1016 cannot listen"):
        Webhook(config(port=hook.port)).open()


def test_requests_of_one_connection_are_answered_in_order(tmp_path):
    with serving(tmp_path) as hook:
        sent = [request(b"%d" % n, "/events" if n % 3 else "/none") for n in range(600)]
        found = hook.raw(b"".join(sent))
        assert [each.status for each in found] == [200 if n % 3 else 404 for n in range(600)]
        assert hook.events() == [b"%d" % n for n in range(600) if n % 3]


def test_a_client_may_ask_before_it_sends_a_large_body(tmp_path):
    with serving(tmp_path, auth={"type": "none"}) as hook, hook.connect() as client:
        client.sendall(request(b"", "/events", "POST", "Expect: 100-continue", "Content-Length: 4", length=False))
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"1234")
        assert answer(client).status == 200
        client.sendall(request(b"", "/none", "POST", "Expect: 100-continue", "Content-Length: 4", length=False))
        assert answer(client).status == 404


def test_stopping_answers_what_is_stored_and_refuses_the_rest(tmp_path):
    with serving(tmp_path) as hook:
        idle, partial = hook.connect(), hook.connect()
        partial.sendall(request(b"1234")[:-2])
        assert hook.post({"n": 1}).status == 200
        wait_until(lambda: hook.source.metrics().custom["connections"] == 2, "both connections")
        assert hook.ingest.stop(60)
        assert answer(partial).status == 503
        assert idle.recv(10) == b""
        with pytest.raises(ConnectionRefusedError):
            hook.connect()
    assert hook.events() == [b'{"n": 1}']
