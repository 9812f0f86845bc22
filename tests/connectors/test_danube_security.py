"""Certificates and tokens of a Danube broker: who is let in, and what a user sees who is not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.connectors.danube import Danube, DanubeSink
from penstock.connectors.danube.sink import DanubeSinkConfig
from penstock.connectors.danube.source import DanubeSourceConfig
from penstock.errors import ConfigError, FatalError
from penstock.formats import WireSchema
from penstock.schema.registry.danube import DanubeRegistry
from penstock.schema.registry.danube_client import DanubeConfig
from penstock.sink import Epoch, Task
from penstock.source import HealthState
from penstock.testing import RecordingSender
from penstock.testing.danube import DanubeBroker
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.xdist_group("danube")

TOPIC = "/default/events"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, need: Any) -> Path:
    """Two authorities; of the first a broker, one for another host and a client, of the other a stranger."""
    need(shutil.which("openssl"), "openssl is not installed")
    path = tmp_path_factory.mktemp("danube-keys")

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=path, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        run("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, authority, host in (
        ("server", "ca", "IP:127.0.0.1"),
        ("elsewhere", "ca", "DNS:elsewhere.example"),
        ("client", "ca", "DNS:client.example"),
        ("stranger", "other", "DNS:client.example"),
    ):
        (path / "names").write_text(f"subjectAltName={host}\n")
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "names")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-days", "2", *signed)
    (path / "no.pem").write_text("no certificate")
    return path


@pytest.fixture(scope="module")
def mutual(keys: Path) -> Iterator[DanubeBroker]:
    """A broker that asks clients for a certificate."""
    files = {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    with DanubeBroker(**{name: str(keys / file) for name, file in files.items()}) as broker:
        broker.tell("create", topic=TOPIC)
        yield broker


OPTIONS = {"ca": "ca_file", "certificate": "certificate_file", "key": "key_file"}


def certificates(keys: Path, **files: str) -> dict[str, Path]:
    return {OPTIONS[name]: keys / file for name, file in files.items()}


def source(broker: DanubeBroker, **options: Any) -> Danube:
    given = {"url": broker.url, "topics": [TOPIC], "subscription": "penstock", **options}
    return Danube(DanubeSourceConfig.model_validate(given))


def sink(broker: DanubeBroker, **options: Any) -> DanubeSink:
    return DanubeSink(DanubeSinkConfig.model_validate({"url": broker.url, "topic": TOPIC, **options}))


def send(opened: DanubeSink, number: int) -> None:
    epoch = Epoch("orders", "incarnation", number)
    opened.begin_epoch(epoch, Task(0))
    opened.write_batch("/shop/orders", pa.record_batch({"id": [number]}))
    opened.pre_commit(epoch)


def test_a_broker_of_a_known_authority_is_trusted_and_another_is_not(keys: Path) -> None:
    with DanubeBroker(certificate=str(keys / "server.pem"), key=str(keys / "server.key")) as broker:
        broker.tell("create", topic=TOPIC)
        trusting = source(broker, ca_file=keys / "ca.pem")
        trusting.open()
        trusting.close()
        for wrong, hint in (
            ({}, "ca_file"),
            ({"ca_file": keys / "other.pem"}, "ca_file"),
            ({"url": broker.url.replace("https", "http")}, "https://"),
        ):
            with pytest.raises(FatalError, match="PEN-5001") as caught:
                source(broker, **wrong).open()
            assert hint in caught.value.hint
        with pytest.raises(ConfigError, match="PEN-1015"):
            source(broker, ca_file=keys / "missing.pem").open()


def test_a_certificate_for_another_host_is_refused_by_name(keys: Path) -> None:
    with DanubeBroker(certificate=str(keys / "elsewhere.pem"), key=str(keys / "elsewhere.key")) as broker:
        with pytest.raises(FatalError, match="Hostname") as caught:
            source(broker, ca_file=keys / "ca.pem").open()
        assert "another host" in caught.value.hint


def test_a_broker_without_tls_is_said(keys: Path) -> None:
    with DanubeBroker() as broker:
        with pytest.raises(FatalError) as caught:
            source(broker, url=broker.url.replace("http", "https"), ca_file=keys / "ca.pem").open()
        assert "no TLS" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"ca": "ca.pem"}, "set `certificate_file` and `key_file`"),
        ({"ca": "ca.pem", "certificate": "stranger.pem", "key": "stranger.key"}, "trusts who signed"),
        ({"ca": "other.pem", "certificate": "client.pem", "key": "client.key"}, "`ca_file`"),
        ({"ca": "ca.pem", "certificate": "client.pem", "key": "stranger.key"}, "another certificate"),
        ({"ca": "no.pem", "certificate": "client.pem", "key": "client.key"}, "holds no PEM"),
    ],
    ids=["no certificate", "a stranger's", "wrong authority", "wrong key", "no PEM"],
)
def test_a_client_that_is_not_let_in_is_told_why(
    mutual: DanubeBroker, keys: Path, files: dict[str, str], hint: str
) -> None:
    for attempt in (
        source(mutual, **certificates(keys, **files)).open,
        sink(mutual, **certificates(keys, **files)).check,
    ):
        with pytest.raises(FatalError, match="PEN-5001") as caught:
            attempt()
        assert hint in caught.value.hint


def test_with_the_clients_certificate_source_sink_and_registry_work(mutual: DanubeBroker, keys: Path) -> None:
    own = certificates(keys, ca="ca.pem", certificate="client.pem", key="client.key")
    registry = DanubeRegistry(DanubeConfig.model_validate({"url": mutual.url, **own}))
    registry.register_schema("mutual", WireSchema("json_schema", '{"type": "object"}'))
    registry.close()
    reading, writing, sender = source(mutual, **own), sink(mutual, schema_subject="mutual", **own), RecordingSender()
    reading.open()
    with sender.streaming(reading):
        wait_until(lambda: reading.health_check().state is HealthState.HEALTHY, "health")
        writing.open()
        send(writing, 7)
        writing.close()
        wait_until(lambda: sender.count, "the message")
    assert sender.rows[TOPIC] == [b'{"id":7}']


def test_a_wrong_token_is_a_wrong_setting_and_its_text_stays_hidden(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("very-wrong-token")
    with DanubeBroker(tokens=["right-token"]) as broker:
        for options in ({}, {"token": {"file": tmp_path / "token"}}):
            with pytest.raises(ConfigError, match="PEN-1016") as caught:
                source(broker, **options).open()
            assert "very-wrong-token" not in str(caught.value)
            assert "token" in caught.value.hint


def test_a_token_without_rights_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("nobodys-token")
    with DanubeBroker(tokens=["right-token"], powerless=["nobodys-token"]) as broker:
        with pytest.raises(ConfigError, match="no binding grants") as caught:
            source(broker, token={"file": tmp_path / "token"}).open()
        assert "rights" in caught.value.hint


def test_a_token_in_a_file_is_rotated_while_the_source_runs(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first-token\n")
    with DanubeBroker(tokens=["first-token"]) as broker:
        opened = source(broker, token={"file": token}, create_topics=True)
        opened.open()
        sender = RecordingSender()
        with sender.streaming(opened):
            wait_until(lambda: opened.health_check().state is HealthState.HEALTHY, "health")
            broker.tell("set", tokens=["second-token"])
            broker.tell("break")
            wait_until(lambda: opened.health_check().state is HealthState.DEGRADED, "the refusal")
            token.write_text("second-token\n")
            wait_until(lambda: opened.health_check().state is HealthState.HEALTHY, "the next try")
        registry = DanubeRegistry(DanubeConfig.model_validate({"url": broker.url, "token": {"file": token}}))
        assert registry.versions("orders") == []
        registry.close()


def test_a_token_that_is_away_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first-token\r\n")
    with DanubeBroker(tokens=["first-token"]) as broker:
        opened = source(broker, token={"file": token}, create_topics=True)
        opened.open()
        with RecordingSender().streaming(opened):
            wait_until(lambda: opened.health_check().state is HealthState.HEALTHY, "health")
            token.unlink()
            broker.tell("break")
            wait_until(lambda: "secret file" in opened.health_check().reason, "the truth")
            token.write_text("first-token")
            wait_until(lambda: opened.health_check().state is HealthState.HEALTHY, "the next try")


def test_a_token_that_no_call_could_carry_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("two\nlines")
    with DanubeBroker() as broker, pytest.raises(ConfigError, match="PEN-1016") as caught:
        source(broker, token={"file": tmp_path / "token"}).open()
    assert "two" not in str(caught.value)


def test_a_token_is_rotated_between_two_messages_of_a_sink(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first-token")
    with DanubeBroker(tokens=["first-token"]) as broker:
        writing = sink(broker, token={"file": token})
        writing.open()
        send(writing, 1)
        broker.tell("set", tokens=["second-token"])
        token.write_text("second-token")
        writing.write_batch("/shop/orders", pa.record_batch({"id": [2]}))
        writing.flush()
        writing.close()
        assert [message.payload for message in broker.messages(TOPIC)] == [b'{"id":1}', b'{"id":2}']


def test_a_topic_is_read_where_the_lookup_says() -> None:
    with DanubeBroker() as serving, DanubeBroker(redirect=serving.url) as asked:
        for each in (serving, asked):
            each.tell("create", topic=TOPIC)
        opened = source(asked)
        opened.open()
        with RecordingSender().streaming(opened):
            wait_until(lambda: serving.subscription(TOPIC, "penstock").get("consumers"), "the other broker")


def test_a_cluster_that_only_just_made_a_topic_is_asked_again() -> None:
    with DanubeBroker(is_cluster=True) as broker:
        opened = source(broker, create_topics=True)
        opened.open()
        opened.close()
        assert TOPIC in broker.tell("report")["topics"]
