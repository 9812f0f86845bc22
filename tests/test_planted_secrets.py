"""Every connector that takes a secret: neither `check` nor what it leaves shows it, also if the other side sends it back."""
# ruff: noqa: E501 (inline tables of TOML are one line)

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from penstock.cli import main
from penstock.config import Secret
from penstock.pipeline import registry

pytestmark = pytest.mark.processes

PLANTED = "planted-Narwhal-77"
REF = '{ env = "PLANTED_SECRET" }'

S3 = f"""path = "s3://bucket/{{topic}}"
storage_options = {{ endpoint = "http://HOST", allow_http = true, region = "x", access_key_id = {REF}, secret_access_key = {REF} }}
"""
KAFKA = f"""bootstrap_servers = "HOST"
options = {{ "security.protocol" = "SASL_PLAINTEXT", "sasl.mechanism" = "PLAIN", "sasl.username" = "me", "sasl.password" = {REF} }}
"""
POSTGRES = f'dsn = "postgresql://me@HOST/db"\npassword = {REF}\n'

OPTIONS = {
    ("source", "files"): S3.replace("{topic}", "*.jsonl"),
    ("source", "postgres_cdc"): POSTGRES + 'tables = ["*"]\n',
    ("source", "postgres_capture"): POSTGRES + 'tables = ["*"]\n',
    ("source", "kafka"): KAFKA + 'topics = ["orders"]\n',
    ("source", "sql_poll"): POSTGRES + 'tables = ["t"]\nkey = ["id"]\ncursor = "id"\n',
    ("source", "webhook"): f"""port = 0
endpoints = [{{ path = "/in", stream = "in" }}]
auth = {{ type = "api_key", keys = [{REF}] }}
""",
    (
        "source",
        "http_poll",
    ): f'url = "http://HOST/items"\nstream = "items"\nauth = {{ type = "bearer", token = {REF} }}\n',
    ("sink", "http"): f'url = "http://HOST/items"\nauth = {{ type = "bearer", token = {REF} }}\n',
    ("source", "mqtt"): f'url = "mqtt://HOST"\nusername = "me"\npassword = {REF}\ntopics = ["a/#"]\n',
    ("sink", "mqtt"): f'url = "mqtt://HOST"\nusername = "me"\npassword = {REF}\n',
    ("source", "danube"): f'url = "http://HOST"\ntoken = {REF}\ntopics = ["/default/x"]\nsubscription = "s"\n',
    ("sink", "danube"): f'url = "http://HOST"\ntoken = {REF}\n',
    ("source", "websocket"): f'url = "ws://HOST/"\ntoken = {REF}\n',
    ("sink", "files"): S3,
    ("sink", "postgres"): POSTGRES,
    ("sink", "kafka"): KAFKA,
    ("sink", "delta"): S3,
    ("sink", "iceberg"): S3,
}


def takes_a_secret(annotation: Any, seen: tuple[type, ...] = ()) -> bool:
    if not isinstance(annotation, type):
        return any(takes_a_secret(each, seen) for each in get_args(annotation))
    if issubclass(annotation, Secret):
        return True
    inside = issubclass(annotation, BaseModel) and annotation not in seen
    fields = annotation.model_fields.values() if inside else ()  # type: ignore[attr-defined]
    return any(takes_a_secret(each.annotation, (*seen, annotation)) for each in fields)


def test_every_connector_that_takes_a_secret_is_tried() -> None:
    found = {
        (entry.kind, entry.name)
        for entry in registry.BUILT_IN.values()
        if takes_a_secret(registry.config_of(registry.load(entry.kind, entry.name)))
    }
    assert found == set(OPTIONS)


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """Refuses whatever it is asked, and sends it back."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(2)
                asked = client.recv(4096)
                body = asked + PLANTED.encode()
                client.sendall(b"HTTP/1.1 403 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()


@pytest.mark.parametrize(("kind", "name"), OPTIONS, ids=[f"{name} {kind}" for kind, name in OPTIONS])
def test_a_secret_is_shown_nowhere(
    kind: str,
    name: str,
    echo: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", PLANTED)
    monkeypatch.setattr("penstock.runtime.sampling.WAIT_SECS", 0.5)
    other = '[sink]\nconnector = "console"\n' if kind == "source" else '[source]\nconnector = "generator"\n'
    options = OPTIONS[kind, name].replace("HOST", echo)  # type: ignore[index]
    file = tmp_path / "pipeline.toml"
    file.write_text(f'connector_name = "planted"\n[{kind}]\nconnector = "{name}"\n{options}{other}')
    caplog.set_level(logging.DEBUG, "penstock")
    with pytest.raises(SystemExit) as ended:
        main(["check", str(file), "--sample", "1"])
    out, err = capfd.readouterr()
    assert "PEN-1003" not in err, err
    assert "PEN-1004" not in err, err
    assert ended.value.code in (0, 1), err
    left = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != file)
    shown = out + err + caplog.text + left.decode("utf-8", "replace")
    assert PLANTED not in shown
    assert PLANTED not in Path(f"/proc/{os.getpid()}/cmdline").read_text()
