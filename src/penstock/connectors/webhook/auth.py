"""Who may send: keys, signatures, tokens. Everything secret is compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.config import Secret
from penstock.connectors.webhook.config import ApiKeyAuth, Auth, HmacAuth, JwtAuth, NoAuth
from penstock.connectors.webhook.server import Refused
from penstock.errors import ConfigError

Headers = Mapping[bytes, bytes]
"""Names are in lower case."""

MOST_DIGITS = 15
"""Of a time in seconds."""


class Guard(Protocol):
    """One way of telling who may send. Both methods raise `Refused`."""

    needs_body: bool
    """Only the body says if a request is who it claims to be."""

    def head(self, headers: Headers) -> None:
        """Look at the headers, before the body is read."""

    def body(self, headers: Headers, body: bytes) -> None:
        """Look at the body as it was sent."""


def guard(auth: Auth) -> Guard:
    """Reads the secrets: a missing one is found when the source is opened."""
    match auth:
        case NoAuth():
            return Open()
        case ApiKeyAuth():
            return ApiKey(auth)
        case HmacAuth():
            return Signed(auth)
        case JwtAuth():
            return Token(auth)


class Open:
    needs_body = False

    def head(self, headers: Headers) -> None:
        pass

    def body(self, headers: Headers, body: bytes) -> None:
        pass


class ApiKey(Open):
    def __init__(self, auth: ApiKeyAuth) -> None:
        self._header = auth.header.lower().encode()
        self._keys = [(auth.prefix + key).encode() for key in map(_revealed, auth.keys)]
        self._named = auth.header

    def head(self, headers: Headers) -> None:
        given = headers.get(self._header)
        if given is None:
            raise _unauthorized(f"the header {self._named} is missing")
        # Every key is compared, whichever fits: the time says nothing about them.
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            raise _unauthorized(f"the key in {self._named} is not known")


_PRESETS: dict[str, dict[str, str | None]] = {
    "github": {"header": "X-Hub-Signature-256", "prefix": "sha256=", "timestamp_header": None},
    "slack": {
        "header": "X-Slack-Signature",
        "prefix": "v0=",
        "timestamp_header": "X-Slack-Request-Timestamp",
        "signed": "v0:{timestamp}:{body}",
    },
    "stripe": {"header": "Stripe-Signature"},
}


class Signed(Open):
    needs_body = True

    def __init__(self, auth: HmacAuth) -> None:
        self._stripe = auth.preset == "stripe"
        auth = auth.model_copy(update=_PRESETS.get(auth.preset or "", {}))
        self._auth = auth
        self._header = auth.header.lower().encode()
        self._clock = auth.timestamp_header.lower().encode() if auth.timestamp_header else None
        self._before, _, rest = auth.signed.encode().partition(b"{timestamp}")
        self._between, _, self._after = rest.partition(b"{body}")
        self._secrets = [_revealed(secret).encode() for secret in auth.secrets]

    def head(self, headers: Headers) -> None:
        timestamp, _ = self._found(headers)
        if timestamp is not None:
            self._check_time(timestamp)

    def body(self, headers: Headers, body: bytes) -> None:
        timestamp, signatures = self._found(headers)
        text = body
        if timestamp is not None:
            text = b"".join((self._before, timestamp, self._between, body, self._after))
        wanted = [hmac.digest(secret, text, self._auth.algorithm) for secret in self._secrets]
        if not sum(hmac.compare_digest(given, each) for given in signatures for each in wanted):
            raise _unauthorized(f"the signature in {self._auth.header} does not fit the body")

    def _found(self, headers: Headers) -> tuple[bytes | None, list[bytes]]:
        """The timestamp, if there has to be one, and the signatures."""
        given = headers.get(self._header)
        if given is None:
            raise _unauthorized(f"the header {self._auth.header} is missing")
        if self._stripe:
            parts = [part.partition(b"=") for part in given.split(b",")]
            times = [value for name, _, value in parts if name.strip() == b"t"]
            if len(times) != 1:
                raise _unauthorized(f"{self._auth.header} must hold one t=")
            return times[0], [self._decoded(value) for name, _, value in parts if name.strip() == b"v1"]
        prefix = self._auth.prefix.encode()
        if not given.startswith(prefix):
            raise _unauthorized(f"{self._auth.header} must begin with {self._auth.prefix}")
        timestamp = None
        if self._clock is not None:
            timestamp = headers.get(self._clock)
            if timestamp is None:
                raise _unauthorized(f"the header {self._auth.timestamp_header} is missing")
        return timestamp, [self._decoded(given[len(prefix) :])]

    def _decoded(self, signature: bytes) -> bytes:
        try:
            if self._auth.encoding == "base64":
                return base64.b64decode(signature, validate=True)
            return binascii.unhexlify(signature)
        except binascii.Error:
            return b""

    def _check_time(self, timestamp: bytes) -> None:
        if not timestamp.isdigit() or len(timestamp) > MOST_DIGITS:
            raise _unauthorized("the timestamp is not a number of seconds since 1970")
        away = abs(time.time() - int(timestamp))
        if away > self._auth.tolerance_secs:
            raise _unauthorized(f"the timestamp is more than {self._auth.tolerance_secs} s away from now")


_FAULTS = {
    "ExpiredSignatureError": "its time, `exp`, is over",
    "ImmatureSignatureError": "its time, `nbf`, is still to come",
    "InvalidAudienceError": "it is for another audience, `aud`",
    "InvalidIssuerError": "another issuer, `iss`, has made it",
    "InvalidSignatureError": "its signature does not fit",
    "InvalidAlgorithmError": "its algorithm, `alg`, is not taken here",
    "DecodeError": "it cannot be read",
}
"""What is wrong with a token, by the names of PyJWT."""


class Token(Open):
    def __init__(self, auth: JwtAuth) -> None:
        import jwt

        self._jwt = jwt
        self._auth = auth
        self._set: tuple[int, Mapping[str, Any]] = (0, {})
        self._key: Any = None
        if auth.secret is not None:
            self._key = _revealed(auth.secret)
        elif auth.key_file is not None:
            self._key = self._public_key(auth.key_file)
        else:
            self._keys()

    def head(self, headers: Headers) -> None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise _unauthorized("the header Authorization: Bearer is missing")
        auth = self._auth
        try:
            claims = self._jwt.decode(
                token.strip(),
                self._key or self._key_of(token),
                algorithms=list(auth.algorithms),
                audience=auth.audience,
                issuer=auth.issuer,
                leeway=auth.leeway_secs,
                options={"require": ["exp"], "verify_aud": auth.audience is not None},
            )
        except (
            self._jwt.PyJWTError,
            TypeError,
        ) as error:  # TypeError: a key of the set that is of another kind than `alg`
            raise _unauthorized(f"the token is not valid: {self._fault(error)}") from None
        if auth.scope is not None and auth.scope not in _words(claims.get("scope", claims.get("scp"))):
            raise Refused(403, "forbidden", f"the token does not have the scope {auth.scope}")

    def _public_key(self, path: Path) -> Any:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        try:
            return load_pem_public_key(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read the public key {path}: {error}", code="PEN-1016", hint="key_file is a public key in PEM"
            ) from error

    def _keys(self) -> Mapping[str, Any]:
        """The keys of the set by their `kid`, read again if the file has changed."""
        path = self._auth.jwks_file
        assert path is not None
        try:
            changed = path.stat().st_mtime_ns
            if changed != self._set[0]:
                found = self._jwt.PyJWKSet.from_dict(json.loads(path.read_bytes()))
                self._set = (changed, {str(each.key_id): each.key for each in found.keys})
        except (OSError, ValueError, AttributeError, self._jwt.PyJWTError) as error:
            if not self._set[1]:  # later, a file that is being replaced is no reason to forget the keys
                raise ConfigError(
                    f"cannot read the key set {path}: {error}", code="PEN-1016", hint="jwks_file is a JSON Web Key Set"
                ) from error
        return self._set[1]

    def _key_of(self, token: bytes) -> Any:
        keys, kid = self._keys(), self._jwt.get_unverified_header(token).get("kid")
        if kid is None and len(keys) == 1:
            return next(iter(keys.values()))
        if str(kid) not in keys:
            raise self._jwt.InvalidKeyError
        return keys[str(kid)]

    def _fault(self, error: Exception) -> str:
        if isinstance(error, self._jwt.MissingRequiredClaimError):
            return f"it has no `{error.claim}`"
        if isinstance(error, self._jwt.InvalidKeyError | TypeError):
            return "there is no such key here as it names"
        return _FAULTS.get(type(error).__name__, "it cannot be checked")


def _words(scope: Any) -> list[str]:
    return scope.split() if isinstance(scope, str) else list(scope) if isinstance(scope, list) else []


def _revealed(secret: Secret) -> str:
    text = secret.reveal()
    if not text:
        raise ConfigError(
            "a secret of the webhook is empty: everybody could sign with it",
            code="PEN-1005",
            hint="set it to a long random text",
        )
    return text


def _unauthorized(reason: str) -> Refused:
    return Refused(401, "unauthorized", reason, {"WWW-Authenticate": "Bearer"})
