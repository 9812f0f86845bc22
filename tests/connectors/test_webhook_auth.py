"""Who may send to a webhook: keys, signatures as their senders make them, tokens, certificates."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import ssl
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from pydantic import ValidationError

from connectors.webhooks import answers, config, request, serving
from penstock.connectors.webhook import Webhook
from penstock.errors import ConfigError

BODY = b'{"id": 1}'


@pytest.fixture(autouse=True)
def _secrets(monkeypatch):
    monkeypatch.setenv("HOOK_SECRET", "correct horse")
    monkeypatch.setenv("HOOK_OLD", "battery staple")
    monkeypatch.setenv("HOOK_TOKEN", "a shared secret of more than thirty-two bytes")


SECRETS = [{"env": "HOOK_SECRET"}, {"env": "HOOK_OLD"}]


def sign(text: bytes, secret: bytes = b"correct horse", algorithm: str = "sha256") -> bytes:
    return hmac.new(secret, text, algorithm).digest()


def test_one_of_several_keys_is_enough_and_no_other_is(tmp_path):
    auth = {"type": "api_key", "keys": SECRETS, "header": "Authorization", "prefix": "Bearer "}
    with serving(tmp_path, auth=auth) as hook:
        assert hook.post(BODY, authorization="Bearer correct horse").status == 200
        assert hook.post(BODY, authorization="Bearer battery staple").status == 200
        for wrong in ("Bearer correct hors", "correct horse", "Bearer correct horse!", "Bearer "):
            assert hook.post(BODY, authorization=wrong).status == 401
        refused = hook.post(BODY)
        assert (refused.status, refused.error) == (401, "unauthorized")
        assert "horse" not in json.dumps(refused.body)
        assert hook.get("/healthz").status == 200  # open, whatever the endpoints ask for


def test_an_endpoint_may_have_its_own_way(tmp_path):
    endpoints = [
        {"path": "/open", "stream": "open", "auth": {"type": "none"}},
        {"path": "/closed", "stream": "closed"},
    ]
    with serving(tmp_path, endpoints=endpoints, auth={"type": "api_key", "keys": SECRETS}) as hook:
        assert hook.post(BODY, "/open").status == 200
        assert hook.post(BODY, "/closed").status == 401
        assert hook.post(BODY, "/closed", x_api_key="correct horse").status == 200


# -- signatures ----------------------------------------------------------------------------------------------------------


def github(body: bytes, at: float, secret: bytes) -> dict[str, str]:
    return {"X-Hub-Signature-256": "sha256=" + sign(body, secret).hex()}


def stripe(body: bytes, at: float, secret: bytes) -> dict[str, str]:
    now = str(int(at))
    good = sign(f"{now}.".encode() + body, secret).hex()
    return {"Stripe-Signature": f"t={now},v0=abc,v1={sign(b'old', b'x').hex()},v1={good}"}


def slack(body: bytes, at: float, secret: bytes) -> dict[str, str]:
    now = str(int(at))
    return {
        "X-Slack-Signature": "v0=" + sign(f"v0:{now}:".encode() + body, secret).hex(),
        "X-Slack-Request-Timestamp": now,
    }


PRESETS = {"github": github, "stripe": stripe, "slack": slack}


@pytest.mark.parametrize("preset", PRESETS)
def test_requests_that_are_signed_as_a_known_sender_does_are_taken(tmp_path, preset):
    make = PRESETS[preset]
    with serving(tmp_path, auth={"type": "hmac", "preset": preset, "secrets": SECRETS}) as hook:
        for secret in (b"correct horse", b"battery staple"):
            assert hook.post(BODY, **make(BODY, time.time(), secret)).status == 200
        assert hook.post(BODY + b" ", **make(BODY, time.time(), b"correct horse")).status == 401
        assert hook.post(BODY, **make(BODY, time.time(), b"wrong")).status == 401
        assert hook.post(BODY).status == 401
        for name, value in make(BODY, time.time(), b"correct horse").items():
            for broken in ("", "sha256=", "v0=zz", "t=1", "t=x,v1=00", value[:-2], value + "0"):
                assert hook.post(BODY, **{**make(BODY, time.time(), b"correct horse"), name: broken}).status == 401
        assert len(hook.events()) == 2


@pytest.mark.parametrize("preset", ["stripe", "slack"])
def test_an_old_request_cannot_be_sent_again(tmp_path, preset):
    make = PRESETS[preset]
    with serving(tmp_path, auth={"type": "hmac", "preset": preset, "secrets": SECRETS}) as hook:
        for away in (-301, 301, -(10**9)):
            assert hook.post(BODY, **make(BODY, time.time() + away, b"correct horse")).status == 401
        assert hook.post(BODY, **make(BODY, time.time() - 250, b"correct horse")).status == 200


@pytest.mark.parametrize("timestamp", ["9" * 400, "9" * 5000, "1_700_000_000", "-1", "1e9", "nan", "inf"])
def test_a_timestamp_that_is_no_time_is_refused_for_what_it_is(tmp_path, timestamp):
    with serving(tmp_path, auth={"type": "hmac", "preset": "slack", "secrets": SECRETS}) as hook:
        headers = {"x-slack-signature": "v0=00", "x-slack-request-timestamp": timestamp}
        refused = hook.post(BODY, **headers)
        assert (refused.status, "seconds since 1970" in refused.body["reason"]) == (401, True)


def test_a_scheme_of_ones_own(tmp_path):
    auth = {
        "type": "hmac",
        "secrets": SECRETS[:1],
        "header": "X-Sig",
        "algorithm": "sha512",
        "encoding": "base64",
        "timestamp_header": "X-Time",
        "signed": "v1|{timestamp}|{body}|",
    }
    with serving(tmp_path, auth=auth) as hook:
        now = str(int(time.time()))
        text = f"v1|{now}|".encode() + BODY + b"|"
        good = base64.b64encode(sign(text, algorithm="sha512")).decode()
        assert hook.post(BODY, x_sig=good, x_time=now).status == 200
        assert hook.post(BODY, x_sig=good, x_time=str(int(now) - 1)).status == 401
        assert hook.post(BODY, x_sig=good).status == 401


def test_the_body_is_signed_as_it_was_sent(tmp_path):
    import gzip

    packed = gzip.compress(BODY)
    with serving(tmp_path, auth={"type": "hmac", "preset": "github", "secrets": SECRETS}) as hook:
        signed = github(packed, 0, b"correct horse")
        assert hook.post(packed, content_encoding="gzip", **signed).status == 200
        assert hook.post(packed, content_encoding="gzip", **github(BODY, 0, b"correct horse")).status == 401
        assert hook.events() == [BODY]


@pytest.mark.parametrize(
    "auth",
    [
        {"type": "hmac", "secrets": SECRETS, "preset": "github", "header": "X"},
        {"type": "hmac", "secrets": SECRETS, "timestamp_header": "T", "signed": "{timestamp}"},
        {"type": "hmac", "secrets": []},
        {"type": "jwt", "algorithms": ["HS256"]},
        {"type": "jwt", "algorithms": ["HS256", "RS256"], "secret": {"env": "X"}},
        {"type": "jwt", "algorithms": ["RS256"], "secret": {"env": "X"}},
        {"type": "jwt", "algorithms": ["none"], "secret": {"env": "X"}},
    ],
)
def test_options_that_would_leave_the_door_open_are_refused(auth):
    with pytest.raises(ValidationError):
        config(auth=auth)


def test_a_missing_or_empty_secret_is_found_when_the_source_is_opened(monkeypatch, tmp_path):
    monkeypatch.setenv("HOOK_EMPTY", "")
    for name in ("HOOK_EMPTY", "HOOK_MISSING"):
        with pytest.raises(ConfigError, match="PEN-1005"):
            Webhook(config(auth={"type": "api_key", "keys": [{"env": name}]})).open()
    for option in ({"jwks_file": tmp_path / "none"}, {"key_file": tmp_path / "none"}):
        with pytest.raises(ConfigError, match="PEN-1016"):
            Webhook(config(auth={"type": "jwt", "algorithms": ["RS256"], **option})).open()


# -- tokens --------------------------------------------------------------------------------------------------------------


def token(key: Any, algorithm: str, kid: str | None = None, **claims: Any) -> str:
    made = {"exp": time.time() + 60, **claims}
    headers = {"kid": kid} if kid else None
    return "Bearer " + jwt.encode({k: v for k, v in made.items() if v is not None}, key, algorithm, headers)


def test_a_token_with_a_shared_secret(tmp_path):
    auth = {
        "type": "jwt",
        "algorithms": ["HS256"],
        "secret": {"env": "HOOK_TOKEN"},
        "audience": "hooks",
        "issuer": "shop",
        "scope": "events.write",
    }
    key = os.environ["HOOK_TOKEN"]
    good = {"aud": "hooks", "iss": "shop", "scope": "read events.write"}
    with serving(tmp_path, auth=auth) as hook:

        def status(*, secret: str = key, algorithm: str = "HS256", **claims: Any) -> int:
            return hook.post(BODY, authorization=token(secret, algorithm, **{**good, **claims})).status

        assert status() == 200
        assert status(scope="read") == 403
        assert status(scope=None) == 403
        assert status(aud="others") == 401
        assert status(iss="others") == 401
        assert status(exp=time.time() - 60) == 401
        assert status(exp=None) == 401
        assert status(nbf=time.time() + 600) == 401
        assert status(secret=key + "x") == 401
        assert status(algorithm="HS512") == 401
        assert hook.post(BODY, authorization=token("", "none", **good)).status == 401
        assert hook.post(BODY, authorization="Bearer x.y.z").status == 401
        assert hook.post(BODY, authorization="Basic eDp5").status == 401
        assert hook.post(BODY).status == 401


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": 1}, "its time, `exp`, is over"),
        ({"nbf": 9e9}, "its time, `nbf`, is still to come"),
        ({"aud": "others"}, "it is for another audience, `aud`"),
        ({"iss": "others"}, "another issuer, `iss`, has made it"),
        ({"exp": None}, "it has no `exp`"),
        ({"aud": None}, "it has no `aud`"),
    ],
)
def test_the_answer_says_what_is_wrong_with_a_token(tmp_path, claims, why):
    auth = {
        "type": "jwt",
        "algorithms": ["HS256"],
        "secret": {"env": "HOOK_TOKEN"},
        "audience": "hooks",
        "issuer": "shop",
    }
    given = {"aud": "hooks", "iss": "shop", **claims}
    with serving(tmp_path, auth=auth) as hook:
        refused = hook.post(BODY, authorization=token(os.environ["HOOK_TOKEN"], "HS256", **given))
        assert refused.body["reason"] == f"the token is not valid: {why}"


def test_the_answer_says_what_is_wrong_with_the_signature_of_a_token(tmp_path):
    path = tmp_path / "jwks.json"
    path.write_text(
        json.dumps({"keys": [{**jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key(), as_dict=True), "kid": "a"}]})
    )
    other = rsa.generate_private_key(65537, 2048)
    with serving(tmp_path, auth={"type": "jwt", "algorithms": ["RS256"], "jwks_file": path}) as hook:
        for given, why in (
            (token(other, "RS256", "a"), "its signature does not fit"),
            (token(RSA, "RS256", "b"), "there is no such key here as it names"),
            (token(RSA, "RS512", "a"), "its algorithm, `alg`, is not taken here"),
            ("Bearer x.y.z", "it cannot be read"),
        ):
            refused = hook.post(BODY, authorization=given)
            assert refused.body["reason"] == f"the token is not valid: {why}"


def pem(key: Any) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


@pytest.mark.parametrize(("key", "algorithm"), [(RSA, "RS256"), (EC, "ES256")], ids=["RS256", "ES256"])
def test_a_token_with_a_public_key_in_a_file(tmp_path, key, algorithm):
    path = tmp_path / "key.pem"
    path.write_bytes(pem(key))
    with serving(tmp_path, auth={"type": "jwt", "algorithms": [algorithm], "key_file": path}) as hook:
        assert hook.post(BODY, authorization=token(key, algorithm)).status == 200
        other = (
            rsa.generate_private_key(65537, 2048) if algorithm == "RS256" else ec.generate_private_key(ec.SECP256R1())
        )
        assert hook.post(BODY, authorization=token(other, algorithm)).status == 401
        # The public key is public: a token that uses it as a shared secret is a forgery.
        forged = {"alg": "HS256", "typ": "JWT"}, {"exp": time.time() + 60}
        head = ".".join(base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode() for each in forged)
        mark = base64.urlsafe_b64encode(hmac.new(path.read_bytes(), head.encode(), hashlib.sha256).digest())
        assert hook.post(BODY, authorization=f"Bearer {head}.{mark.rstrip(b'=').decode()}").status == 401


def test_a_token_that_names_a_key_of_another_kind_is_refused_for_what_it_is(tmp_path):
    path = tmp_path / "jwks.json"
    elliptic = {**jwt.algorithms.ECAlgorithm.to_jwk(EC.public_key(), as_dict=True), "kid": "ec"}
    shared = {"kty": "oct", "k": base64.urlsafe_b64encode(b"x" * 32).rstrip(b"=").decode(), "kid": "oct"}
    path.write_text(json.dumps({"keys": [elliptic, shared]}))
    auth = {"type": "jwt", "algorithms": ["RS256", "ES256"], "jwks_file": path}
    with serving(tmp_path, auth=auth) as hook:
        for key, algorithm, kid in ((RSA, "RS256", "ec"), (RSA, "RS256", "oct"), (b"x" * 32, "HS256", "oct")):
            refused = hook.post(BODY, authorization=token(key, algorithm, kid))
            assert (refused.status, refused.error) == (401, "unauthorized")
        assert hook.post(BODY, authorization=token(EC, "ES256", "ec")).status == 200


def test_keys_of_a_set_may_be_replaced_while_it_runs(tmp_path):
    path = tmp_path / "jwks.json"

    def publish(**keys: Any) -> None:
        made = []
        for kid, key in keys.items():
            kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
            made.append({**kind.to_jwk(key.public_key(), as_dict=True), "kid": kid})
        staged = path.with_suffix(".new")
        staged.write_text(json.dumps({"keys": made}))
        staged.replace(path)

    publish(one=RSA)
    with serving(tmp_path, auth={"type": "jwt", "algorithms": ["RS256", "ES256"], "jwks_file": path}) as hook:
        assert hook.post(BODY, authorization=token(RSA, "RS256", "one")).status == 200
        assert hook.post(BODY, authorization=token(RSA, "RS256")).status == 200
        assert hook.post(BODY, authorization=token(EC, "ES256", "two")).status == 401
        publish(two=EC, three=RSA)
        assert hook.post(BODY, authorization=token(EC, "ES256", "two")).status == 200
        assert hook.post(BODY, authorization=token(RSA, "RS256", "one")).status == 401
        path.write_text("{ half a fi")
        assert hook.post(BODY, authorization=token(EC, "ES256", "two")).status == 200


# -- certificates --------------------------------------------------------------------------------------------------------


def certificate(directory: Any, name: str, issuer: Any = None) -> Any:
    """A key and a certificate for 127.0.0.1; signed by `issuer`, or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(issuer[1].subject if issuer else named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(issuer[0] if issuer else key, hashes.SHA256())
    )
    (directory / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (directory / f"{name}.key").write_bytes(text)
    return key, made


def test_https_and_clients_with_certificates(tmp_path):
    own = certificate(tmp_path, "authority")
    certificate(tmp_path, "server", own)
    certificate(tmp_path, "client", own)
    certificate(tmp_path, "stranger")
    tls = {"cert_file": tmp_path / "server.pem", "key_file": tmp_path / "server.key"}

    def post(port: int, client: str | None = None, authority: str = "authority") -> int:
        context = ssl.create_default_context(cafile=tmp_path / f"{authority}.pem")
        if client:
            context.load_cert_chain(tmp_path / f"{client}.pem", tmp_path / f"{client}.key")
        connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=context)
        connection.request("POST", "/events", BODY, {"Content-Type": "application/json"})
        return connection.getresponse().status

    with serving(tmp_path, tls=tls) as hook:
        assert post(hook.port) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            post(hook.port, authority="stranger")
        with hook.connect() as plain:  # speaks HTTP to a port that wants TLS
            plain.sendall(request(BODY))
            assert answers(plain) == []
        assert post(hook.port) == 200
    with serving(tmp_path, tls={**tls, "client_ca_file": tmp_path / "authority.pem"}) as hook:
        assert post(hook.port, "client") == 200
        for client in (None, "stranger"):
            with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
                post(hook.port, client)
        assert hook.events() == [BODY, BODY, BODY]


def _hmac_of(body: bytes) -> dict[str, str]:
    return {"x_hub_signature_256": "sha256=" + sign(body).hex()}


@pytest.mark.parametrize(
    ("auth", "good", "bad"),
    [
        ({"type": "api_key", "keys": SECRETS}, {"x_api_key": "correct horse"}, {"x_api_key": "wrong"}),
        ({"type": "hmac", "preset": "github", "secrets": SECRETS}, _hmac_of(BODY), _hmac_of(b"another body")),
    ],
    ids=["head", "body"],
)
def test_those_without_a_key_cannot_use_up_the_rate_of_those_with_one(tmp_path, auth, good, bad):
    with serving(tmp_path, auth=auth, rate_limit_per_sec=0.01) as hook:
        assert [hook.post(BODY, **bad).status for _ in range(5)] == [401] * 5
        assert hook.post(BODY, **good).status == 200
        assert hook.post(BODY, **good).status == 429
    with serving(tmp_path / "each", auth=auth, client_rate_limit_per_sec=0.01) as hook:
        assert [hook.post(BODY, **bad).status for _ in range(2)] == [401, 429]  # a client that guesses is slowed down
