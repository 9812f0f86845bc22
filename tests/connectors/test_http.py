"""The http sink: requests as a receiver sees them, keys that tell repeats, and what each answer leads to."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import pickle
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from brokers import Certificates
from connectors.receiver import Asked, Receiver, receiving
from connectors.webhooks import serving
from penstock.connectors.http import HttpSink, HttpSinkConfig
from penstock.connectors.http_poll import HttpPoll, HttpPollConfig
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.sink import Epoch, SinkContext, Task
from penstock.testing import ForkEngine, SinkContract

ROWS = pa.record_batch({"id": [1, 2, 3], "name": ["a", "b/ä", "a"]})


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("API_SECRET", "correct horse")


@pytest.fixture
def receiver():
    with receiving() as made:
        yield made


class TestContract(SinkContract):
    @pytest.fixture
    def sink(self, receiver: Receiver) -> HttpSink:
        return HttpSink(HttpSinkConfig(url=f"{receiver.url}/in", batch_rows=4))

    @pytest.fixture
    def visible(self, receiver: Receiver) -> Any:
        return lambda: [row for asked in receiver.asked for row in asked.json]


def send(
    receiver: Receiver,
    *batches: pa.RecordBatch,
    number: int = 1,
    task: int = 0,
    topic: str = "/lake/orders",
    name: str = "",
    **options: Any,
) -> list[Asked]:
    """What one task of an epoch sends; the requests that came of it."""
    sink = pickle.loads(pickle.dumps(HttpSink(HttpSinkConfig(**{"url": f"{receiver.url}/in", **options}))))
    epoch = Epoch("orders", "incarnation", number)
    before = len(receiver.asked)
    sink.open(SinkContext(name=name))
    try:
        sink.begin_epoch(epoch, Task(task))
        for batch in batches:
            sink.write_batch(topic, batch)
        sink.pre_commit(epoch)
    finally:
        sink.close()
    return receiver.asked[before:]


def key(asked: Asked) -> str:
    return asked.headers["idempotency-key"]


def test_each_row_is_a_request_in_json(receiver):
    found = send(receiver, ROWS, max_inflight=1, headers={"X-From": "us"})
    assert [each.json for each in found] == ROWS.to_pylist()
    assert {(each.method, each.path) for each in found} == {("POST", "/in")}
    assert {(each.headers["content-type"], each.headers["x-from"]) for each in found} == {("application/json", "us")}


@pytest.mark.parametrize("how", ["json_array", "ndjson"])
def test_rows_go_in_batches_that_are_bounded_by_rows_and_bytes(receiver, how):
    many = pa.record_batch({"id": list(range(10))})
    found = send(receiver, many, batch_rows=4, batch_format=how, max_inflight=1, method="PUT")
    read = json.loads if how == "json_array" else lambda body: [json.loads(line) for line in body.splitlines()]
    assert [len(read(each.body)) for each in found] == [4, 4, 2]
    assert [row for each in found for row in read(each.body)] == many.to_pylist()
    assert {each.headers["content-type"] for each in found} == {
        f"application/{'json' if how == 'json_array' else 'x-ndjson'}"
    }
    assert len(send(receiver, many, batch_rows=100, batch_bytes=20)) == 5


def test_the_address_is_made_of_topic_and_columns_whose_values_cannot_change_its_path(receiver):
    found = send(receiver, ROWS, url=f"{receiver.url}/{{topic}}/{{name}}", max_inflight=1)
    assert [each.target for each in found] == ["/lake/orders/a", "/lake/orders/b%2F%C3%A4", "/lake/orders/a"]
    grouped = send(receiver, ROWS, url=f"{receiver.url}/{{name}}", batch_rows=10, max_inflight=1)
    assert {each.target: [row["id"] for row in each.json] for each in grouped} == {"/a": [1, 3], "/b%2F%C3%A4": [2]}


def test_attributes_travel_as_headers_and_cannot_break_out_of_them(receiver):
    rows = pa.record_batch({"id": [1, 2], "X-Tenant": ["north", "a\r\nEvil: 1"]})
    found = send(receiver, rows, attributes=["X-Tenant"], max_inflight=1)
    assert [each.headers["x-tenant"] for each in found] == ["north", "a%0D%0AEvil%3A%201"]
    assert [each.json for each in found] == [{"id": 1}, {"id": 2}]
    assert "evil" not in found[1].headers


# -- idempotency keys ----------------------------------------------------------------------------------------------------


def test_attributes_of_rows_that_share_a_request_are_refused():
    """They have left the body and would be in no header."""
    with pytest.raises(ValidationError, match="batch_rows"):
        HttpSinkConfig(url="http://localhost/", attributes=("name",), batch_rows=2)


@pytest.mark.parametrize("options", [{}, {"batch_rows": 2}])
def test_an_epoch_that_is_sent_again_has_the_same_keys(receiver, options):
    equal = pa.record_batch({"id": [7, 7, 7, 7, 8]})
    first = Counter((key(each), each.body) for each in send(receiver, ROWS, equal, **options))
    again = Counter((key(each), each.body) for each in send(receiver, ROWS, equal, **options))
    assert first == again
    assert len(first) == sum(first.values()), "two requests of an epoch share a key"


def test_equal_rows_of_two_tasks_epochs_topics_or_sinks_have_different_keys(receiver):
    one = pa.record_batch({"id": [7]})
    found = [
        *send(receiver, one, task=0),
        *send(receiver, one, task=1),
        *send(receiver, one, number=2),
        *send(receiver, one, topic="/other"),
        *send(receiver, one, name="second"),
    ]
    assert len({key(each) for each in found}) == 5


def test_a_key_never_names_two_different_bodies_when_rows_come_in_another_order(receiver):
    first = send(receiver, ROWS)
    again = send(receiver, ROWS.take(pa.array([2, 0, 1])))
    assert {key(each): each.body for each in first} == {key(each): each.body for each in again}


# -- answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"batch_rows": 100}, {"batch_rows": 100, "batch_format": "ndjson"}])
def test_rows_that_are_refused_are_named_and_the_others_are_taken_once(options):
    taken: list[int] = []

    def answer(asked: Asked) -> Any:
        body = asked.body.decode()
        rows = json.loads(body if body.startswith("[") else "[" + ",".join(body.splitlines()) + "]")
        if any(row["id"] % 5 == 3 for row in rows):
            return 422, {}
        taken.extend(row["id"] for row in rows)
        return 200, {}

    with receiving(answer) as receiver, pytest.raises(DataError) as caught:
        send(receiver, pa.record_batch({"id": list(range(20))}), **options)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (list(error.rows), error.others_written) == ([3, 8, 13, 18], True)
    assert sorted(taken) == [each for each in range(20) if each % 5 != 3]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_request_is_tried_again_after_the_pause_that_the_server_asks_for(status):
    left = [2]

    def answer(asked: Asked) -> Any:
        left[0] -= 1
        return (status, {}, {"Retry-After": "0"}) if left[0] >= 0 else (200, {})

    with receiving(answer) as receiver:
        found = send(receiver, ROWS.slice(0, 1))
    assert len(found) == 3
    assert len({key(each) for each in found}) == 1
    with receiving(lambda asked: (status, {}, {"Retry-After": "0"})) as receiver, pytest.raises(RetryableError):
        send(receiver, ROWS.slice(0, 1), max_tries=2)


def test_a_lost_answer_or_connection_is_tried_again_by_the_runtime(receiver):
    receiver.answer = lambda asked: None
    with pytest.raises(RetryableError, match="PEN-2001"):
        send(receiver, ROWS)
    with pytest.raises(RetryableError, match="PEN-2001"):
        send(receiver, ROWS, url="http://127.0.0.1:9/in")


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["long", "slow"])
def test_an_answer_that_does_not_end_is_not_waited_for(pause):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock, contextlib.suppress(OSError):
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while True:
                    sock.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
                    time.sleep(pause)

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        send(Receiver(url=f"http://127.0.0.1:{server.getsockname()[1]}"), ROWS.slice(0, 1), timeout_secs=0.5)
        answering.join(60)
        assert not answering.is_alive(), "the connection was closed"


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_what_is_wrong_with_the_address_or_the_credentials_is_no_fault_of_rows(receiver, status):
    receiver.answer = lambda asked: (status, {})
    with pytest.raises(FatalError, match="PEN-5001"):
        send(receiver, ROWS)


def test_an_address_that_is_made_of_a_row_and_not_there_is_the_rows_fault(receiver):
    receiver.answer = lambda asked: (404 if asked.path == "/b%2F%C3%A4" else 200, {})
    with pytest.raises(DataError) as caught:
        send(receiver, ROWS, url=f"{receiver.url}/{{name}}")
    assert caught.value.rows == [1]


def test_an_address_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="PEN-1003"):
        HttpSink(HttpSinkConfig(url="ftp://x/y")).open()


# -- credentials ---------------------------------------------------------------------------------------------------------

SECRET = {"env": "API_SECRET"}


@pytest.mark.parametrize(
    ("auth", "sent"),
    [
        ({"type": "bearer", "token": SECRET}, {"authorization": "Bearer correct horse"}),
        ({"type": "basic", "user": "me", "password": SECRET}, {"authorization": "Basic bWU6Y29ycmVjdCBob3JzZQ=="}),
        ({"type": "api_key", "key": SECRET}, {"x-api-key": "correct horse"}),
        ({"type": "api_key", "key": SECRET, "header": "X-K"}, {"x-k": "correct horse"}),
    ],
)
def test_credentials_are_sent(receiver, auth, sent):
    found = send(receiver, ROWS.slice(0, 1), auth=auth)[0]
    assert sent.items() <= found.headers.items()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secure(certificates: Certificates, request: pytest.FixtureRequest) -> Iterator[Receiver]:
    """A receiver by HTTPS with the certificate of a name, which asks clients for theirs; or by TLS 1.2 alone."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates["ca.pem"])
    context.load_cert_chain(certificates[f"{request.param}.pem"], certificates[f"{request.param}.key"])
    context.verify_mode = ssl.CERT_REQUIRED
    with receiving(lambda asked: (200, [{"id": 1}]), tls=context) as made:
        yield made


@pytest.mark.parametrize(
    ("secure", "ca", "own", "is_taken"),
    [
        ("server", "ca.pem", "client", True),
        ("server", "other.pem", "client", False),
        ("server", None, "client", False),
        ("misnamed", "ca.pem", "client", False),
        ("server", "ca.pem", None, False),
        ("server", "ca.pem", "stranger", False),
    ],
    ids=["right", "wrong authority", "those of the machine", "wrong host name", "no certificate", "wrong certificate"],
    indirect=["secure"],
)
def test_certificates_of_both_sides_are_checked(secure, ca, own, is_taken, certificates, tmp_path):
    options: dict[str, Any] = {} if ca is None else {"ca_file": certificates[ca]}
    if own is not None:  # a file with both
        both = certificates[f"{own}.key"].read_bytes() + certificates[f"{own}.pem"].read_bytes()
        options["cert_file"] = tmp_path / "own.pem"
        options["cert_file"].write_bytes(both)
    source = HttpPoll(HttpPollConfig(url=secure.url, stream="s", **options))
    source.open()
    try:
        for call in (lambda: send(secure, ROWS, **options), lambda: source.poll_batch(10)):
            if is_taken:
                assert call()
            else:
                with pytest.raises(RetryableError, match="PEN-2001"):
                    call()
    finally:
        source.close()
    assert bool(secure.asked) == is_taken


@pytest.mark.parametrize("url", ["https://me:secret@api.example.com/", "http://secret@h", "http://me:@h/a@b"])
def test_an_address_that_holds_a_secret_is_refused(url):
    for config in (HttpSinkConfig, lambda **given: HttpPollConfig(stream="s", **given)):
        with pytest.raises(ValidationError, match="auth"):
            config(url=url)
        assert config(url="http://h/a@b?c=d@e").url == "http://h/a@b?c=d@e"


def test_certificates_for_plain_text_are_refused(receiver, certificates):
    with pytest.raises(ConfigError, match=r"PEN-1003.*ca_file"):
        send(receiver, ROWS, ca_file=certificates["ca.pem"])


def test_a_key_may_be_a_parameter_of_the_address(receiver):
    found = send(receiver, ROWS.slice(0, 1), auth={"type": "api_key", "key": SECRET, "param": "k"})[0]
    assert found.query == {"k": "correct horse"}


def test_a_signature_fits_time_and_body(receiver):
    found = send(receiver, ROWS.slice(0, 1), auth={"type": "hmac", "secret": SECRET})[0]
    text = found.headers["x-timestamp"].encode() + b"." + found.body
    assert found.headers["x-signature"] == hmac.new(b"correct horse", text, hashlib.sha256).hexdigest()


def test_a_token_is_fetched_once_and_again_when_it_is_refused():
    given = []

    def answer(asked: Asked) -> Any:
        if asked.path == "/token":
            assert asked.headers["authorization"] == "Basic bWU6Y29ycmVjdCBob3JzZQ=="
            assert asked.body == b"grant_type=client_credentials&scope=write"
            given.append(f"token-{len(given)}")
            return 200, {"access_token": given[-1], "expires_in": 3600 if len(given) == 1 else None}
        return (200 if asked.headers["authorization"] == f"Bearer {given[-1]}" else 401), {}

    with receiving(answer) as receiver:
        auth = {"type": "oauth2", "token_url": f"{receiver.url}/token", "client_id": "me", "client_secret": SECRET}
        options = {"auth": {**auth, "scope": "write"}, "max_inflight": 1}
        send(receiver, ROWS, **options)
        send(receiver, ROWS, **options)
        assert given == ["token-0"]
        given.append("another")  # the server has forgotten the first
        send(receiver, ROWS, **options)
        assert given == ["token-0", "another", "token-2"]
        receiver.answer = lambda asked: (400, {})
        with pytest.raises(FatalError, match="PEN-5001"):
            send(receiver, ROWS, auth={**auth, "client_id": "other"})


# -- a whole pipeline ----------------------------------------------------------------------------------------------------


def test_rows_travel_from_a_file_over_http_into_a_webhook_and_bad_ones_become_letters(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {each}}}\n' for each in range(20)))
    auth = {"type": "hmac", "secrets": [SECRET], "timestamp_header": "X-Timestamp"}
    refused = lambda stream, payloads: {  # noqa: E731
        at: ("test", "no") for at, each in enumerate(payloads) if json.loads(each)["id"] == 13
    }
    from penstock.source import SourceContext

    endpoints = [{"path": "/in", "stream": "events", "dedupe": {"header": "Idempotency-Key"}}]
    options = {"auth": auth, "endpoints": endpoints, "validate_on_receive": True}
    with serving(tmp_path / "hook", context=SourceContext(refused=refused), **options) as hook:
        (tmp_path / "pipeline.toml").write_text(f"""
connector_name = "out"
[processing]
on_error = "dead_letter"
[source]
connector = "files"
path = "in.jsonl"
[sink]
connector = "http"
url = "http://127.0.0.1:{hook.port}/in"
batch_rows = 8
auth = {{ type = "hmac", secret = {{ env = "API_SECRET" }} }}
""")
        summary = supervisor.run(Pipeline.from_toml(tmp_path / "pipeline.toml"), ForkEngine(1), drain=True)
        assert summary.rows_out == 19 + 1  # the letter is a row, too
        assert sorted(json.loads(each)["id"] for each in hook.events()) == [each for each in range(20) if each != 13]


def test_a_receiver_that_drops_repeats_gets_the_rows_of_two_sinks(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {each}}}\n' for each in range(5)))
    endpoints = [{"path": "/in", "stream": "events", "dedupe": {"header": "Idempotency-Key"}}]
    with serving(tmp_path / "hook", endpoints=endpoints) as hook:
        sinks = "".join(
            f'[[sinks]]\nname = "{name}"\nconnector = "http"\nurl = "http://127.0.0.1:{hook.port}/in"\n'
            for name in ("first", "second")
        )
        (tmp_path / "pipeline.toml").write_text(
            f'connector_name = "out"\n[source]\nconnector = "files"\npath = "in.jsonl"\n{sinks}'
        )
        supervisor.run(Pipeline.from_toml(tmp_path / "pipeline.toml"), ForkEngine(1), drain=True)
        assert sorted(json.loads(each)["id"] for each in hook.events()) == sorted([*range(5)] * 2)
