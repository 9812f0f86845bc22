"""
Credentials and certificates with a real registry: Apicurio over TLS, with tokens that it checks by a public key.

Basic authentication is its own way: it trades the user for a token at an identity provider, which is ours here. It cannot be
told to ask for a client's certificate once it is built, so mutual TLS is left to the kit's server.
"""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from penstock.config import Secret
from penstock.errors import ConfigError
from penstock.formats import WireSchema
from penstock.schema.registry.confluent import Confluent, ConfluentConfig
from penstock.testing.apicurio import ApicurioServer, is_installed

SCHEMA = WireSchema("avro", '{"type":"record","name":"R","fields":[{"name":"id","type":"long"}]}')
USER, PASSWORD = "penstock", "a secret: with a colon"


def token_of(key: Path) -> str:
    """A token for an hour, signed with the key."""
    now = int(time.time())
    claims = {"sub": USER, "preferred_username": USER, "iss": "tests", "iat": now, "exp": now + 3600}
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()) for each in ({"alg": "RS256", "typ": "JWT"}, claims)]
    text = b".".join(each.rstrip(b"=") for each in parts)
    signed = subprocess.run(
        ["openssl", "dgst", "-sha256", "-sign", str(key)], input=text, capture_output=True, check=True
    ).stdout
    return (text + b"." + base64.urlsafe_b64encode(signed).rstrip(b"=")).decode()


class Provider(BaseHTTPRequestHandler):
    """Gives a token for the right user and password, in the body or in the header."""

    token = ""

    def do_POST(self) -> None:
        body = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        given = body.get("client_id", [""])[0], body.get("client_secret", [""])[0]
        header = self.headers.get("Authorization", "")
        if header.startswith("Basic "):
            user, _, password = base64.b64decode(header.removeprefix("Basic ")).decode().partition(":")
            given = user, password
        is_right = given == (USER, PASSWORD)
        answer = (
            {"access_token": self.token, "token_type": "Bearer", "expires_in": 3600} if is_right else {"error": "no"}
        )
        text = json.dumps(answer).encode()
        self.send_response(200 if is_right else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def token(keys: Path) -> str:
    return token_of(keys / "server.key")


@pytest.fixture(scope="module")
def server(keys: Path, token: str, need) -> Iterator[ApicurioServer]:
    need(is_installed(), "Apicurio is not installed: python -m penstock.testing.apicurio fetches it")
    public = subprocess.run(
        ["openssl", "pkey", "-in", str(keys / "server.key"), "-pubout", "-outform", "DER"],
        capture_output=True,
        check=True,
    ).stdout
    Provider.token = token
    provider = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=provider.serve_forever, daemon=True).start()
    settings = [
        "registry.auth.enabled=true",
        "registry.auth.basic-auth-client-credentials.enabled=true",
        f"registry.auth.token.endpoint=http://127.0.0.1:{provider.server_port}/token",
        "quarkus.oidc.tenant-enabled=true",
        "quarkus.oidc.auth-server-url=",
        "quarkus.oidc.discovery-enabled=false",
        f"quarkus.oidc.public-key={base64.b64encode(public).decode()}",
    ]
    try:
        with ApicurioServer((keys / "server.pem", keys / "server.key"), settings) as running:
            yield running
    finally:
        provider.shutdown()
        provider.server_close()


def client(server: ApicurioServer, keys: Path, **options: object) -> Confluent:
    return Confluent(ConfluentConfig(url=server.url, ca_file=keys / "ca.pem", **options))


def test_a_bearer_token_is_let_in_over_tls(server, keys, token, monkeypatch):
    monkeypatch.setenv("TOKEN", token)
    registry = client(server, keys, token=Secret(env="TOKEN"))
    made = registry.register_schema("bearer", SCHEMA)
    assert (made.version, registry.fetch_schema_by_id(made.id).text) == (1, SCHEMA.text)


def test_a_user_with_its_password_is_let_in_over_tls(server, keys, monkeypatch):
    monkeypatch.setenv("PASSWORD", PASSWORD)
    registry = client(server, keys, username=USER, password=Secret(env="PASSWORD"))
    assert registry.register_schema("basic", SCHEMA).version == 1
    assert registry.versions("basic") == [1]


def test_who_is_not_known_is_told_so(server, keys, token, monkeypatch):
    monkeypatch.setenv("WRONG", token[:-4] + "AAAA")
    with pytest.raises(ConfigError, match="PEN-1030"):
        client(server, keys).subjects()
    with pytest.raises(ConfigError, match="PEN-1030"):
        client(server, keys, token=Secret(env="WRONG")).subjects()
    with pytest.raises(ConfigError, match="PEN-1030"):
        client(server, keys, username=USER, password=Secret(env="WRONG")).subjects()


def test_a_certificate_that_nobody_vouches_for_is_refused(server):
    with pytest.raises(ConfigError, match=r"PEN-1032 .*not trusted"):
        Confluent(ConfluentConfig(url=server.url)).subjects()
