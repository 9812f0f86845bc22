"""What a client does about credentials, certificates, failures and repeated questions."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from penstock.config import Secret
from penstock.errors import ConfigError, RetryableError
from penstock.formats import WireSchema
from penstock.schema.registry.confluent import Confluent, ConfluentConfig
from penstock.testing.registry import Fault, RegistryServer

V1 = WireSchema("avro", '{"type":"record","name":"R","fields":[{"name":"id","type":"long"}]}')
V2 = WireSchema("avro", '{"type":"record","name":"R","fields":[{"name":"id","type":"long"},'
                '{"name":"x","type":"long","default":0}]}')  # fmt: skip


def client(url: str, **options: object) -> Confluent:
    return Confluent(ConfluentConfig(url=url, retry_backoff_ms=1, max_backoff_ms=5, **options))


@pytest.fixture
def server():
    with RegistryServer() as running:
        yield running


class TestCredentials:
    def test_a_user_with_its_password_is_let_in(self, monkeypatch):
        monkeypatch.setenv("REGISTRY_PASSWORD", "open-sesame")
        with RegistryServer(user=("app", "open-sesame")) as server:
            secret = Secret(env="REGISTRY_PASSWORD")
            assert client(server.url, username="app", password=secret).subjects() == []

    def test_a_token_is_sent(self, tmp_path):
        (tmp_path / "token").write_text("abc-token\n")
        with RegistryServer(token="abc-token") as server:
            assert client(server.url, token=Secret(file=tmp_path / "token")).subjects() == []

    def test_a_secret_is_read_at_each_call(self, tmp_path):
        token = tmp_path / "token"
        token.write_text("of-yesterday")
        with RegistryServer(token="of-today") as server:
            registry = client(server.url, token=Secret(file=token))
            with pytest.raises(ConfigError, match="PEN-1030"):
                registry.subjects()
            token.write_text("of-today")
            assert registry.subjects() == []

    def test_credentials_do_not_follow_a_redirect(self, server, tmp_path):
        (tmp_path / "token").write_text("abc-token")
        with RegistryServer() as elsewhere:
            server.fail(302, Location=elsewhere.url + "/subjects")
            with pytest.raises(ConfigError, match="PEN-1032"):
                client(server.url, token=Secret(file=tmp_path / "token")).subjects()
            assert elsewhere.calls == []

    def test_a_wrong_password_is_a_wrong_setting_and_is_not_shown(self, monkeypatch):
        monkeypatch.setenv("REGISTRY_PASSWORD", "wrong-password")
        with RegistryServer(user=("app", "open-sesame")) as server:
            registry = client(server.url, username="app", password=Secret(env="REGISTRY_PASSWORD"))
            with pytest.raises(ConfigError, match="PEN-1030") as caught:
                registry.subjects()
            assert len(server.calls) == 1, "it is not tried again"
        assert "wrong-password" not in str(caught.value)
        assert "wrong-password" not in repr(registry.config)
        assert b"wrong-password" not in pickle.dumps(registry)

    def test_a_secret_in_the_servers_own_message_is_left_out(self, server, monkeypatch):
        monkeypatch.setenv("REGISTRY_TOKEN", "tell-no-one")
        registry = client(server.url, token=Secret(env="REGISTRY_TOKEN"), max_retries=0)
        with pytest.raises(ConfigError, match="PEN-1031") as caught:
            registry.fetch_schema("tell-no-one")
        assert "tell-no-one" not in str(caught.value)

    @pytest.mark.parametrize(
        "options",
        [
            {"url": "registry:8081"},
            {"url": "ftp://registry"},
            {"url": "http://app:word@registry"},
            {"url": "http://registry?x=1"},
            {"url": "http://registry", "username": "app"},
            {"url": "http://registry", "password": {"env": "X"}},
            {"url": "http://registry", "username": "a", "password": {"env": "X"}, "token": {"env": "Y"}},
            {"url": "http://registry", "key_file": "key.pem"},
        ],
    )
    def test_options_that_do_not_go_together_are_refused(self, options):
        with pytest.raises(ValidationError) as caught:
            ConfluentConfig.model_validate(options)
        assert "word" not in str(caught.value).replace("password", "")


class TestTls:
    def test_a_server_of_a_known_authority_is_trusted_and_another_is_not(self, keys):
        with RegistryServer(certificate=(keys / "server.pem", keys / "server.key")) as server:
            assert client(server.url, ca_file=keys / "ca.pem").subjects() == []
            with pytest.raises(ConfigError, match="PEN-1032") as caught:
                client(server.url).subjects()
            assert "ca_file" in caught.value.hint

    def test_a_client_shows_its_certificate(self, keys, monkeypatch):
        monkeypatch.setenv("KEY_PASSWORD", "key-word")
        certificate = (keys / "server.pem", keys / "server.key")
        with RegistryServer(certificate=certificate, client_ca=keys / "ca.pem") as server:
            options = {"ca_file": keys / "ca.pem", "certificate_file": keys / "client.pem"}
            registry = client(server.url, key_file=keys / "client.key", **options)
            assert registry.subjects() == []
            assert pickle.loads(pickle.dumps(registry)).subjects() == []
            locked = {"key_file": keys / "locked.key", "key_password": Secret(env="KEY_PASSWORD")}
            assert client(server.url, **locked, **options).subjects() == []
            with pytest.raises(RetryableError, match="PEN-2001"):
                client(server.url, ca_file=keys / "ca.pem", max_retries=0).subjects()

    def test_certificates_that_cannot_be_read_are_a_wrong_setting(self, keys, tmp_path):
        (tmp_path / "ca.pem").write_text("nothing")
        for file in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
            with pytest.raises(ConfigError, match="PEN-1032"):
                client("https://127.0.0.1:9", ca_file=file).subjects()
        locked = {"certificate_file": keys / "client.pem", "key_file": keys / "locked.key"}
        with pytest.raises(ConfigError, match="PEN-1032"):
            client("https://127.0.0.1:9", **locked).subjects()


@contextlib.contextmanager
def answering(answer: bytes, trickling: bool = False) -> Iterator[str]:
    """The address of a server that says the same to everyone, and then perhaps a blank now and then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    with caller, contextlib.suppress(OSError):
                        caller.recv(65536)
                        caller.sendall(answer)
                        for _ in range(500 if trickling else 0):
                            time.sleep(0.05)
                            caller.sendall(b" ")

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "code"), [(500, "PEN-2000"), (503, "PEN-2000"), (429, "PEN-2002"), (408, "PEN-2003")]
    )
    def test_what_passes_is_tried_again_and_then_handed_on(self, server, status, code):
        registry = client(server.url, max_retries=3)
        server.fail(status, 3)
        assert registry.subjects() == []
        assert len(server.calls) == 4
        server.fail(status, 4)
        with pytest.raises(RetryableError, match=code):
            registry.subjects()

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_refusal_is_not_tried_again(self, server, status):
        server.fail(status, 1)
        with pytest.raises(ConfigError, match="PEN-1030"):
            client(server.url).subjects()
        assert len(server.calls) == 1

    def test_a_wait_that_the_server_asks_for_is_kept_within_bounds(self, server, monkeypatch):
        pauses: list[float] = []
        monkeypatch.setattr(
            "penstock.schema.registry.http.time", SimpleNamespace(sleep=pauses.append)
        )  # not for all threads
        registry = Confluent(ConfluentConfig(url=server.url, retry_backoff_ms=1, max_backoff_ms=2000))
        server.fail(429, 1, Retry_After="1")
        server.fail(429, 1, Retry_After="3600")
        assert registry.subjects() == []
        assert pauses == [1.0, 2.0]

    def test_pauses_double_up_to_a_cap(self, server, monkeypatch):
        pauses: list[float] = []
        monkeypatch.setattr(
            "penstock.schema.registry.http.time", SimpleNamespace(sleep=pauses.append)
        )  # not for all threads
        monkeypatch.setattr("penstock.schema.registry.http.random.uniform", lambda low, high: high)
        server.fail(503, 4)
        Confluent(ConfluentConfig(url=server.url, retry_backoff_ms=100, max_backoff_ms=300)).subjects()
        assert pauses == [0.1, 0.2, 0.3, 0.3]

    def test_a_broken_connection_is_tried_again(self, server):
        server.meet(Fault.DROPPED, Fault.ANSWER_LOST)
        assert client(server.url).subjects() == []

    def test_a_registration_whose_answer_is_lost_is_registered_once(self, server):
        registry = client(server.url)
        server.meet(Fault.NONE, Fault.ANSWER_LOST)  # first comes a lookup, then the registration
        made = registry.register_schema("s", V1)
        assert (made.version, registry.versions("s")) == (1, [1])
        assert server.calls.count("POST /subjects/s/versions") == 2

    @pytest.mark.parametrize("answer", [{}, [{}], {"schema": 1}, "a text", {"status": "ok"}], ids=str)
    @pytest.mark.parametrize(
        "ask",
        [
            lambda registry: registry.fetch_schema("orders"),
            lambda registry: registry.subjects() and registry.versions("orders"),
            lambda registry: registry.places(1),
            lambda registry: registry.find_schema("orders", V1),
            lambda registry: registry.compatibility("orders"),
            lambda registry: registry.register_schema("orders", V1),
        ],
    )
    def test_answers_of_another_server_are_a_wrong_setting(self, server, monkeypatch, answer, ask):
        monkeypatch.setattr(server.schemas, "answer", lambda *call: answer)
        with pytest.raises(ConfigError, match=r"PEN-1032 the answer of http.* is not that of a schema registry"):
            ask(client(server.url))

    def test_nobody_there_is_a_passing_failure(self):
        with RegistryServer() as server:
            url = server.url
        with pytest.raises(RetryableError, match="PEN-2001"):
            client(url, max_retries=1).subjects()

    def test_a_server_that_does_not_answer_in_time_is_a_passing_failure(self):
        import socket

        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(RetryableError, match="PEN-2003"):
                client(url, timeout_ms=20, max_retries=0).subjects()

    @pytest.mark.parametrize("head", [True, False], ids=["in the headers", "in the body"])
    def test_an_answer_that_trickles_is_a_passing_failure(self, head):
        begun = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" + (b"" if head else b"\r\n")
        with answering(begun, trickling=True) as url, pytest.raises(RetryableError, match="PEN-2003"):
            client(url, timeout_ms=200, max_retries=0).subjects()

    def test_an_answer_that_is_cut_off_is_a_passing_failure(self):
        cut = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n[]"
        with answering(cut) as url, pytest.raises(RetryableError, match="PEN-2001"):
            client(url, max_retries=1).subjects()

    def test_an_answer_without_end_does_not_fill_the_memory(self, monkeypatch):
        monkeypatch.setattr("penstock.schema.registry.http.MOST_BYTES", 1000)
        with (
            answering(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 2000) as url,
            pytest.raises(RetryableError, match="more than"),
        ):
            client(url, max_retries=0).subjects()

    @pytest.mark.parametrize(
        "body",
        [
            b"[" * 100_000,
            b'{"schema": "1", "schemaType": ["AVRO"]}',
            b'{"schema": "1", "version": "two"}',
            b'{"schema": "1", "references": 5}',
            b'{"schema": "1", "references": ["a"]}',
            b'{"schema": "1", "references": [{"name": "a", "subject": "s", "version": null}]}',
        ],
        ids=lambda body: body[:40].decode(),
    )
    def test_a_schema_that_is_none_is_a_wrong_setting(self, body):
        with (
            answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as url,
            pytest.raises(ConfigError, match="PEN-1032"),
        ):
            client(url).fetch_schema("orders")


class TestCache:
    def test_what_has_an_id_or_a_version_is_asked_for_once(self, server):
        made = client(server.url).register_schema("s", V1)
        registry = client(server.url)
        first = [registry.fetch_schema_by_id(made.id), registry.fetch_schema("s", 1)]
        server.calls.clear()
        assert [registry.fetch_schema_by_id(made.id), registry.fetch_schema("s", 1)] == first
        assert pickle.loads(pickle.dumps(registry)).fetch_schema_by_id(made.id) == first[0]
        assert server.calls == []

    def test_the_latest_is_believed_for_a_while(self, server, monkeypatch):
        now = [100.0]
        monkeypatch.setattr("penstock.schema.registry.confluent.time.monotonic", lambda: now[0])
        registry = client(server.url, latest_cache_secs=10)
        registry.register_schema("s", V1)
        assert registry.fetch_schema("s").version == 1
        client(server.url).register_schema("s", V2)
        assert registry.fetch_schema("s").version == 1
        now[0] += 11
        assert registry.fetch_schema("s").version == 2

    def test_who_registers_sees_the_own_version_at_once(self, server):
        registry = client(server.url, latest_cache_secs=1000)
        registry.register_schema("s", V1)
        assert registry.fetch_schema("s").version == 1
        registry.register_schema("s", V2)
        assert registry.fetch_schema("s").version == 2
