"""Credentials, certificates and what a user reads when one of them is wrong; against a real broker."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from kafka_topics import acknowledged, batches, finish, fresh, make_topic, records, send, values
from penstock.connectors.kafka.client import Cluster
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig, StartAt
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.sink import Epoch, Task
from penstock.source import ReadLimit
from penstock.testing.kafka import KafkaServer
from penstock.testing.processes import elsewhere, wait_until
from penstock.testing.sinks.steps import END, commit, epoch_of, opened_sink, rows, stage
from penstock.testing.sources.steps import opened_source

MODULES = "org.apache.kafka.common.security"
PASSWORD = "right-password"


def openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(need: Callable[[object, str], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA and what it signed: the broker's certificate, one for another host, a client's; and a stranger's CA with a client."""
    need(shutil.which("openssl"), "openssl is not installed")
    place = tmp_path_factory.mktemp("keys")
    for name in ("ca", "stranger"):
        openssl(place, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    signed = {
        "broker": "IP:127.0.0.1",
        "elsewhere": "DNS:elsewhere.example",
        "client": "DNS:client",
        "other": "DNS:client",
    }
    for name, names in signed.items():
        ca = "stranger" if name == "other" else "ca"
        openssl(place, "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        (place / "names").write_text(f"subjectAltName={names}")
        openssl(place, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial",
                "-days", "2", "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
        both = (place / f"{name}.key").read_text() + (place / f"{name}.pem").read_text()
        (place / f"{name}-both.pem").write_text(both)
    return place


@pytest.fixture(scope="module")
def secured(kafka_installed: None, keys: Path) -> Iterator[KafkaServer]:
    """TLS with a client's certificate, TLS with a password, passwords and tokens without TLS, and a wrong certificate."""
    stores = {
        f"listener.name.{name}.ssl.{store}": value
        for name, own in (("ssl", "broker"), ("sasl_ssl", "broker"), ("other", "elsewhere"))
        for store, value in (
            ("keystore.type", "PEM"),
            ("keystore.location", str(keys / f"{own}-both.pem")),
            ("truststore.type", "PEM"),
            ("truststore.location", str(keys / "ca.pem")),
        )
    }
    plain = f'{MODULES}.plain.PlainLoginModule required user_app="{PASSWORD}" user_little="{PASSWORD}";'
    settings = {
        **stores,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:app;User:CN=client",  # but not `little`
        "listener.name.ssl.ssl.client.auth": "required",
        "listener.name.sasl_ssl.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": plain,
        "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": plain,
        "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config": f"{MODULES}.scram.ScramLoginModule required;",
        "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config": f"{MODULES}.scram.ScramLoginModule required;",
        "listener.name.sasl_plaintext.oauthbearer.sasl.jaas.config": f"{MODULES}.oauthbearer.OAuthBearerLoginModule "
        'required unsecuredLoginStringClaim_sub="broker";',
    }
    with KafkaServer(listeners=("SSL", "SASL_SSL", "SASL_PLAINTEXT", "OTHER:SSL"), settings=settings) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        for kind in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            user = UserScramCredentialUpsertion("app", ScramCredentialInfo(kind, 4096), PASSWORD.encode())
            for future in admin.alter_user_scram_credentials([user]).values():
                future.result(60)
        yield running


class Tokens(BaseHTTPRequestHandler):
    """An identity provider that knows one client, and whose tokens live as long as `lives_secs`."""

    lives_secs = 300

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        given = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        now = int(time.time())
        head, body = {"alg": "none"}, {"sub": "app", "iat": now, "exp": now + self.lives_secs}
        token = "".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") + "." for part in (head, body)
        )
        known = given == f"app:{PASSWORD}"
        answer = json.dumps({"access_token": token, "token_type": "Bearer"} if known else {"error": "invalid_client"})
        self.send_response(200 if known else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def tokens() -> Iterator[str]:
    """The address where tokens are given out."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tokens)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/token"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_RIGHT", PASSWORD)
    monkeypatch.setenv("KAFKA_WRONG", "wrong-password")


def login(mechanism: str, secret: str = "KAFKA_RIGHT", protocol: str = "SASL_PLAINTEXT") -> dict[str, Any]:
    return {
        "security.protocol": protocol,
        "sasl.mechanism": mechanism,
        "sasl.username": "app",
        "sasl.password": {"env": secret},
    }


def by_endpoint(tokens: str, secret: str = "KAFKA_RIGHT") -> dict[str, Any]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "app",
        "sasl.oauthbearer.client.secret": {"env": secret},
        "sasl.oauthbearer.token.endpoint.url": tokens,
    }


def ways(keys: Path, tokens: str) -> dict[str, tuple[str, dict[str, Any]]]:
    ca = {"ssl.ca.location": str(keys / "ca.pem")}
    token = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}
    own = {"ssl.certificate.location": str(keys / "client.pem"), "ssl.key.location": str(keys / "client.key")}
    return {
        "SASL PLAIN": ("SASL_PLAINTEXT", login("PLAIN")),
        "SASL SCRAM": ("SASL_PLAINTEXT", login("SCRAM-SHA-256")),
        "SASL SCRAM 512": ("SASL_PLAINTEXT", login("SCRAM-SHA-512")),
        "OAUTHBEARER by an endpoint": ("SASL_PLAINTEXT", by_endpoint(tokens)),
        "OAUTHBEARER": (
            "SASL_PLAINTEXT",
            {**token, "enable.sasl.oauthbearer.unsecure.jwt": True, "sasl.oauthbearer.config": "principal=app"},
        ),
        "TLS with SASL PLAIN": ("SASL_SSL", {**login("PLAIN", protocol="SASL_SSL"), **ca}),
        "mutual TLS": ("SSL", {"security.protocol": "SSL", **ca, **own}),
    }


WAYS = [
    "SASL PLAIN",
    "SASL SCRAM",
    "SASL SCRAM 512",
    "OAUTHBEARER",
    "OAUTHBEARER by an endpoint",
    "TLS with SASL PLAIN",
    "mutual TLS",
]


@pytest.mark.parametrize("way", WAYS)
def test_rows_go_in_and_out_over(secured: KafkaServer, keys: Path, tokens: str, way: str) -> None:
    listener, options = ways(keys, tokens)[way]
    address, topic = secured.address(listener), make_topic(secured.bootstrap, fresh("secured"))
    send(secured.bootstrap, topic, [b"1", b"2"])
    with opened_source(Kafka(KafkaConfig(bootstrap_servers=address, topics=(topic,), options=options))) as source:
        start = source.initial()
        splits = source.split(start, source.latest(start, ReadLimit()))
        found = [row for split in splits for batch in batches(source, split) for row in batch.records.to_pylist()]
    assert [row["payload"] for row in found] == [b"1", b"2"]
    stem = fresh("secured")
    sink = KafkaSink(KafkaSinkConfig(bootstrap_servers=address, topic=f"{stem}.{{topic}}", options=options))
    commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0))])
    assert len(records(secured.bootstrap, f"{stem}.lake.orders")) == 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("password", "refused the credentials"),
        ("SCRAM password", "refused the credentials"),
        ("token", "refused the credentials"),
        ("client secret", "refused the credentials"),
        ("mechanism", "refused the credentials"),
        ("CA", "TLS connection failed"),
        ("host name", "TLS connection failed"),
        ("no certificate", "refused the client's certificate"),
        ("certificate", "refused the client's certificate"),
        ("protocol", r"no broker .*\n.*security\.protocol"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    secured: KafkaServer, keys: Path, tokens: str, monkeypatch: pytest.MonkeyPatch, wrong: str, message: str
) -> None:
    monkeypatch.setattr("penstock.connectors.kafka.client.ANSWER_SECS", 5.0)
    ca, tls = {"ssl.ca.location": str(keys / "ca.pem")}, {"security.protocol": "SSL"}
    own = {"ssl.certificate.location": str(keys / "other.pem"), "ssl.key.location": str(keys / "other.key")}
    _, token = ways(keys, tokens)["OAUTHBEARER"]
    listener, options = {
        "token": ("SASL_PLAINTEXT", {**token, "sasl.oauthbearer.config": "principalClaimName=azp principal=app"}),
        "client secret": ("SASL_PLAINTEXT", by_endpoint(tokens, "KAFKA_WRONG")),
        "certificate": ("SSL", {**tls, **ca, **own}),
        "password": ("SASL_PLAINTEXT", login("PLAIN", "KAFKA_WRONG")),
        "SCRAM password": ("SASL_PLAINTEXT", login("SCRAM-SHA-256", "KAFKA_WRONG")),
        "mechanism": ("SASL_SSL", {**login("SCRAM-SHA-256", protocol="SASL_SSL"), **ca}),
        "CA": ("SASL_SSL", {**login("PLAIN", protocol="SASL_SSL"), "ssl.ca.location": str(keys / "stranger.pem")}),
        "host name": ("OTHER", {**tls, **ca}),
        "no certificate": ("SSL", {**tls, **ca}),
        "protocol": ("SASL_PLAINTEXT", {**tls, **ca}),
    }[wrong]
    given = {"bootstrap_servers": secured.address(listener), "options": options}
    for connector in (Kafka(KafkaConfig(topics=("t",), **given)), KafkaSink(KafkaSinkConfig(**given))):
        with pytest.raises((ConfigError, RetryableError), match=message) as refused:
            connector.open()
        connector.close()
        assert PASSWORD not in str(refused.value)
        assert "wrong-password" not in str(refused.value)
        assert refused.value.hint


def allow(secured: KafkaServer, kind: ResourceType, name: str, *operations: AclOperation) -> None:
    """Give the user `little` rights for all names that begin so."""
    admin = AdminClient({"bootstrap.servers": secured.bootstrap})
    user, granted = ("User:little", "*"), AclPermissionType.ALLOW
    finish(
        admin.create_acls(
            [AclBinding(kind, name, ResourcePatternType.PREFIXED, *user, each, granted) for each in operations]
        )
    )


def readable(source: Kafka) -> int:
    start = source.initial()
    end = source.latest(start, ReadLimit())
    found = sum(batch.records.num_rows for split in source.split(start, end) for batch in batches(source, split))
    acknowledged(source, end)
    return found


def of_little(secured: KafkaServer) -> dict[str, Any]:
    return {
        "bootstrap_servers": secured.address("SASL_PLAINTEXT"),
        "options": {**login("PLAIN"), "sasl.username": "little"},
    }


def test_a_source_needs_no_more_rights_than_the_page_says(secured: KafkaServer) -> None:
    topic, group = make_topic(secured.bootstrap, fresh("in")), fresh("group")
    send(secured.bootstrap, topic, [b"1", b"2"])
    config = KafkaConfig(topics=(topic,), group_id=group, **of_little(secured))
    with pytest.raises(FatalError, match="may not do this"):
        Kafka(config).open()
    allow(secured, ResourceType.TOPIC, topic, AclOperation.READ)

    def began() -> bool:  # rights reach the broker a moment later
        with contextlib.suppress(FatalError), opened_source(Kafka(config)) as source:
            return readable(source) == 2 and "may not do this" in source.health_check().reason
        return False

    wait_until(began, "the source to read, and to say that the group refuses it")
    with (
        opened_source(Kafka(config.model_copy(update={"start": StartAt(group=group)}))) as source,
        pytest.raises(FatalError, match="may not do this"),
    ):
        source.initial()
    allow(secured, ResourceType.GROUP, group, AclOperation.READ)
    with opened_source(Kafka(config)) as source:
        wait_until(lambda: readable(source) == 2 and not source.health_check().reason, "the group to take offsets")


def test_a_sink_needs_no_more_rights_than_the_page_says(secured: KafkaServer) -> None:
    stem, markers, can = fresh("out"), fresh("_markers"), AclOperation
    allow(secured, ResourceType.TOPIC, stem, can.WRITE, can.CREATE, can.DESCRIBE_CONFIGS)
    allow(secured, ResourceType.TOPIC, markers, can.READ, can.WRITE, can.CREATE, can.DELETE)
    allow(secured, ResourceType.TRANSACTIONAL_ID, markers, can.WRITE)
    refused: list[str] = []
    given = {"topic": f"{stem}.{{topic}}", "marker_topic": markers, "staging": "topic", **of_little(secured)}
    for number, in_tasks in enumerate((1 << 30, 0), 1):
        sink, epoch = KafkaSink(KafkaSinkConfig(publish_in_tasks_bytes=in_tasks, **given)), epoch_of(number)

        def written(sink: KafkaSink = sink, epoch: Epoch = epoch) -> bool:
            try:
                with opened_sink(sink) as driver:
                    receipts = [stage(sink, epoch, rows(0))]
                    for work in driver.plan_epoch(epoch, receipts):
                        driver.apply(epoch, work, Task(0))
                    driver.commit_epoch(epoch, receipts, END)
            except FatalError as error:
                refused.append(str(error))
                return False
            return True

        try:
            wait_until(written, "the epoch to be written")
        except AssertionError as error:
            raise AssertionError(refused[-1]) from error
        assert len(records(secured.bootstrap, f"{stem}.lake.orders")) == 10 * number
    assert values(secured.bootstrap, f"{markers}.staging") == [], "what is published goes"


def test_tokens_are_renewed_before_they_end(
    kafka_installed: None, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers close connections whose token has ended; a driver lives longer than any."""
    monkeypatch.setattr(Tokens, "lives_secs", 3)
    own = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}
    unsecured = {"enable.sasl.oauthbearer.unsecure.jwt": True, "sasl.oauthbearer.config": "principal=app lifeSeconds=3"}
    listener = "listener.name.sasl_plaintext"
    settings = {
        f"{listener}.sasl.enabled.mechanisms": "OAUTHBEARER",
        f"{listener}.oauthbearer.connections.max.reauth.ms": "2000",
        f"{listener}.oauthbearer.sasl.jaas.config": f"{MODULES}.oauthbearer.OAuthBearerLoginModule "
        'required unsecuredLoginStringClaim_sub="broker";',
    }
    with KafkaServer(listeners=("SASL_PLAINTEXT",), settings=settings) as server, contextlib.ExitStack() as stack:
        address, topic = server.address("SASL_PLAINTEXT"), make_topic(server.bootstrap, fresh("renewed"))
        opened = []
        for options in (by_endpoint(tokens), {**own, **unsecured}):
            given = {"bootstrap_servers": address, "options": options}
            sink = KafkaSink(KafkaSinkConfig(topic=f"{fresh('out')}.{{topic}}", **given))
            source = stack.enter_context(opened_source(Kafka(KafkaConfig(topics=(topic,), **given))))
            opened.append((source, sink, stack.enter_context(opened_sink(sink))))
        for epoch in map(epoch_of, (1, 2)):
            time.sleep(4)  # longer than a token lives
            for source, sink, driver in opened:

                def done(source: Any = source, sink: Any = sink, driver: Any = driver, epoch: Any = epoch) -> bool:
                    with contextlib.suppress(RetryableError):
                        source.latest(source.initial(), ReadLimit())
                        driver.commit_epoch(epoch, [stage(sink, epoch, rows(0))], END)
                        return True
                    return False

                wait_until(done, "an epoch with a newer token")


def test_a_secret_that_is_not_set_is_named(secured: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_RIGHT")
    config = KafkaConfig(bootstrap_servers=secured.bootstrap, topics=("t",), options=login("PLAIN"))
    assert PASSWORD not in repr(config)
    with pytest.raises(ConfigError, match=r"PEN-1005 .*KAFKA_RIGHT"):
        Kafka(config).open()


def test_a_cluster_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.connectors.kafka.client.ANSWER_SECS", 1.0)
    away = {"bootstrap_servers": "127.0.0.1:1"}
    for connector in (Kafka(KafkaConfig(topics=("t",), **away)), KafkaSink(KafkaSinkConfig(**away))):
        with pytest.raises(RetryableError, match="PEN-2001 no broker") as refused:
            connector.open()
        assert refused.value.message.count("Connection refused") == 1
        assert "`security.protocol` in `options`" in refused.value.hint
        connector.close()


def test_a_client_that_is_forgotten_before_its_last_answer_does_not_end_the_process() -> None:
    """The garbage collector may run in the client's own thread, and there the library aborts when a client is freed."""
    assert elsewhere(forget_a_client) == "alive"


def forget_a_client() -> str:
    gc.disable()
    collected = threading.Event()

    def ask() -> None:
        cluster = Cluster(KafkaConfig(bootstrap_servers="127.0.0.1:1", topics=("t",)))
        early, late = (
            cluster.client.describe_topics(TopicCollection(["t"]), request_timeout=secs)["t"] for secs in (0.2, 1.5)
        )
        late.add_done_callback(lambda _: (gc.collect(), collected.set()))
        early.result(60)  # what it raises refers to this frame, and `early` to what it raised

    with contextlib.suppress(KafkaException):
        ask()
    assert collected.wait(60)
    return "alive"
