"""Roles of AWS: keys for a while, asked for again before they end and once a store calls them expired."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from penstock import store
from penstock.config import Config
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.store import roles
from penstock.store.options import for_delta
from penstock.testing.s3 import KEY, SECRET
from penstock.testing.spoiler import Spoiler

ROLE = "arn:aws:iam::123456789012:role/lake"


class Options(Config):
    storage_options: store.StorageOptions


class Tokens(ThreadingHTTPServer):
    """Takes requests whose signature botocore would have made, and gives the keys of the S3 server."""

    asked = 0
    secret = SECRET
    lasts = timedelta(hours=1)
    status = 200

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        names = self.headers["Authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
        request = AWSRequest("POST", self.server.endpoint, {name: self.headers[name] for name in names}, body)
        request.context["timestamp"] = self.headers["x-amz-date"]
        signer = SigV4Auth(Credentials("asker", "of-the-asker"), "sts", "eu-west-1")
        text = signer.string_to_sign(request, signer.canonical_request(request))
        fine = signer.signature(text, request) == self.headers["Authorization"].rpartition("Signature=")[2]
        fine &= parse_qs(body.decode())["RoleArn"] == [ROLE]
        self.server.asked += 1
        status = self.server.status if fine else 403
        ends = (datetime.now(UTC) + self.server.lasts).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = f"<AccessKeyId>{KEY}</AccessKeyId><SecretAccessKey>{self.server.secret}</SecretAccessKey>"
        keys += f"<SessionToken>token-{self.server.asked}</SessionToken><Expiration>{ends}</Expiration>"
        answer = f'<R xmlns="https://sts"><C>{keys}</C></R>' if status == 200 else "<E><Code>AccessDenied</Code></E>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def tokens(monkeypatch):
    monkeypatch.setenv("ASKER", "asker")
    monkeypatch.setenv("ASKER_SECRET", "of-the-asker")
    monkeypatch.setattr(roles, "_held", {})
    with Tokens(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def given(server, tokens, **more):
    own = {"access_key_id": {"env": "ASKER"}, "secret_access_key": {"env": "ASKER_SECRET"}, "region": "eu-west-1"}
    return Options(
        storage_options=server.options(role_arn=ROLE, sts_endpoint=tokens.endpoint, **own, **more)
    ).storage_options


def test_the_keys_of_a_role_open_the_store_and_are_asked_for_once(strict_s3, tokens):
    bucket = store.at(strict_s3.bucket(), given(strict_s3, tokens))
    store.put(bucket / "a", b"1")
    assert (bucket / "a").read_bytes() == b"1"
    named = for_delta(str(bucket), bucket.store.options)
    assert named["aws_session_token"] == "token-1"
    assert not any("role" in name or "sts" in name for name in named)
    assert tokens.asked == 1


def test_keys_are_renewed_before_they_end(strict_s3, tokens, monkeypatch):
    bucket = store.at(strict_s3.bucket(), given(strict_s3, tokens))
    store.put(bucket / "a", b"1")
    now = time.time()
    monkeypatch.setattr(roles.time, "time", lambda: now + 3600 - roles.EARLY_SECS + 1)
    bucket.store._bucket.look_again = 0.0
    store.put(bucket / "a", b"2")
    assert tokens.asked == 2


def test_keys_that_the_store_calls_expired_are_asked_for_again(strict_s3, tokens):
    with Spoiler(strict_s3.port) as spoiler:
        bucket = store.at(strict_s3.bucket(), given(strict_s3, tokens, endpoint=spoiler.endpoint))
        store.put(bucket / "a", b"1")
        spoiler.spoil("PUT", "/a", "400")
        with pytest.raises(RetryableError, match=r"PEN-2001.*expired"):
            store.put(bucket / "a", b"2")
        store.put(bucket / "a", b"3")
        assert tokens.asked == 2


def test_a_role_that_may_not_be_assumed_is_named_without_keys(strict_s3, tokens):
    tokens.status = 403
    with pytest.raises(
        FatalError, match=r"PEN-5050 the role arn:.*lake cannot be assumed: 403 AccessDenied"
    ) as refused:
        store.put(store.at(strict_s3.bucket(), given(strict_s3, tokens)) / "a", b"1")
    assert "of-the-asker" not in str(refused.value)
    tokens.status = 503
    with pytest.raises(RetryableError, match="PEN-2001"):
        store.put(store.at(strict_s3.bucket(), given(strict_s3, tokens)) / "a", b"1")


def test_a_role_needs_somebody_who_asks_for_it(strict_s3):
    options = {"role_arn": ROLE, "region": "eu-west-1"}
    with pytest.raises(ConfigError, match="PEN-1004 `role_arn` needs keys"):
        store.head(store.at("s3://lake/a", Options(storage_options=options).storage_options))


def test_a_profile_may_name_a_role_and_whose_keys_ask_for_it(strict_s3, tokens, tmp_path, monkeypatch):
    (tmp_path / "config").write_text(f"[profile lake]\nrole_arn = {ROLE}\nsource_profile = me\nregion = eu-west-1\n")
    (tmp_path / "credentials").write_text("[me]\naws_access_key_id = asker\naws_secret_access_key = of-the-asker\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    options = strict_s3.options(profile="lake", sts_endpoint=tokens.endpoint)
    plain = {
        name: value for name, value in options.items() if name not in ("access_key_id", "secret_access_key", "region")
    }
    bucket = store.at(strict_s3.bucket(), Options(storage_options=plain).storage_options)
    store.put(bucket / "a", b"1")
    assert tokens.asked == 1
