"""Credentials, certificates and what a user reads when one of them is wrong; against a real broker."""

from __future__ import annotations

import contextlib
import gc
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from kafka_topics import batches, fresh, make_topic, records, send
from penstock.connectors.kafka.client import Cluster
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.errors import ConfigError, RetryableError
from penstock.source import ReadLimit
from penstock.testing.kafka import KafkaServer
from penstock.testing.processes import elsewhere
from penstock.testing.sinks.steps import commit, epoch_of, rows, stage
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
    plain = f'{MODULES}.plain.PlainLoginModule required user_app="{PASSWORD}";'
    settings = {
        **stores,
        "listener.name.ssl.ssl.client.auth": "required",
        "listener.name.sasl_ssl.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": plain,
        "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": plain,
        "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config": f"{MODULES}.scram.ScramLoginModule required;",
        "listener.name.sasl_plaintext.oauthbearer.sasl.jaas.config": f"{MODULES}.oauthbearer.OAuthBearerLoginModule "
        'required unsecuredLoginStringClaim_sub="broker";',
    }
    with KafkaServer(listeners=("SSL", "SASL_SSL", "SASL_PLAINTEXT", "OTHER:SSL"), settings=settings) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        user = UserScramCredentialUpsertion(
            "app", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), PASSWORD.encode()
        )
        for future in admin.alter_user_scram_credentials([user]).values():
            future.result(60)
        yield running


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


def ways(keys: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    ca = {"ssl.ca.location": str(keys / "ca.pem")}
    token = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}
    own = {"ssl.certificate.location": str(keys / "client.pem"), "ssl.key.location": str(keys / "client.key")}
    return {
        "SASL PLAIN": ("SASL_PLAINTEXT", login("PLAIN")),
        "SASL SCRAM": ("SASL_PLAINTEXT", login("SCRAM-SHA-256")),
        "OAUTHBEARER": (
            "SASL_PLAINTEXT",
            {**token, "enable.sasl.oauthbearer.unsecure.jwt": True, "sasl.oauthbearer.config": "principal=app"},
        ),
        "TLS with SASL PLAIN": ("SASL_SSL", {**login("PLAIN", protocol="SASL_SSL"), **ca}),
        "mutual TLS": ("SSL", {"security.protocol": "SSL", **ca, **own}),
    }


@pytest.mark.parametrize("way", ["SASL PLAIN", "SASL SCRAM", "OAUTHBEARER", "TLS with SASL PLAIN", "mutual TLS"])
def test_rows_go_in_and_out_over(secured: KafkaServer, keys: Path, way: str) -> None:
    listener, options = ways(keys)[way]
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
        ("mechanism", "refused the credentials"),
        ("CA", "TLS connection failed"),
        ("host name", "TLS connection failed"),
        ("no certificate", "refused the client's certificate"),
        ("certificate", "refused the client's certificate"),
        ("protocol", r"no broker .*\n.*security\.protocol"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    secured: KafkaServer, keys: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, message: str
) -> None:
    monkeypatch.setattr("penstock.connectors.kafka.client.ANSWER_SECS", 5.0)
    ca, tls = {"ssl.ca.location": str(keys / "ca.pem")}, {"security.protocol": "SSL"}
    own = {"ssl.certificate.location": str(keys / "other.pem"), "ssl.key.location": str(keys / "other.key")}
    _, token = ways(keys)["OAUTHBEARER"]
    listener, options = {
        "token": ("SASL_PLAINTEXT", {**token, "sasl.oauthbearer.config": "principalClaimName=azp principal=app"}),
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
        with pytest.raises(RetryableError, match="PEN-2001 no broker"):
            connector.open()
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
