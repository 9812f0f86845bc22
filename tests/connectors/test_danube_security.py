"""Certificates and tokens of a Danube broker: who is let in, and what a user sees who is not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors.danube import Danube
from penstock.connectors.danube.source import DanubeSourceConfig
from penstock.errors import ConfigError, FatalError
from penstock.schema.registry.danube import DanubeRegistry
from penstock.schema.registry.danube_client import DanubeConfig
from penstock.source import HealthState
from penstock.testing import RecordingSender
from penstock.testing.danube import DanubeBroker
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.xdist_group("danube")

TOPIC = "/default/events"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, need: Any) -> Path:
    """A certificate authority, and certificates of a broker and of a client."""
    need(shutil.which("openssl"), "openssl is not installed")
    path = tmp_path_factory.mktemp("danube-keys")

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=path, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return path


def source(broker: DanubeBroker, **options: Any) -> Danube:
    given = {"url": broker.url, "topics": [TOPIC], "subscription": "penstock", **options}
    return Danube(DanubeSourceConfig.model_validate(given))


def test_a_broker_of_a_known_authority_is_trusted_and_another_is_not(keys: Path) -> None:
    with DanubeBroker(certificate=str(keys / "server.pem"), key=str(keys / "server.key")) as broker:
        broker.tell("create", topic=TOPIC)
        trusting = source(broker, ca_file=keys / "ca.pem")
        trusting.open()
        trusting.close()
        for wrong in ({}, {"url": broker.url.replace("https", "http")}):
            with pytest.raises(FatalError, match="PEN-5001"):
                source(broker, timeout_ms=3000, **wrong).open()
        with pytest.raises(ConfigError, match="PEN-1015"):
            source(broker, ca_file=keys / "missing.pem").open()


def test_a_broker_may_ask_for_the_clients_certificate(keys: Path) -> None:
    files = {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    with DanubeBroker(**{name: str(keys / file) for name, file in files.items()}) as broker:
        broker.tell("create", topic=TOPIC)
        with pytest.raises(FatalError, match="PEN-5001"):
            source(broker, ca_file=keys / "ca.pem", timeout_ms=3000).open()
        own = {"ca_file": keys / "ca.pem", "certificate_file": keys / "client.pem", "key_file": keys / "client.key"}
        known = source(broker, **own)
        known.open()
        known.close()


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
