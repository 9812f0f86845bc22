"""What connectors that call a web API share: credentials, TLS, and what an answer means."""

from __future__ import annotations

import email.utils
import hashlib
import hmac
import ssl
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import Field, PositiveFloat, field_validator

from penstock.config import Config, Secret
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError, keep_credentials, keep_secret

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that may be others next time."""

MOST_DRAINED = 1 << 20

LONGEST_SECS = 86_400.0
"""A server that asks for a longer pause is asked again after this one."""


class BearerAuth(Config):
    type: Literal["bearer"]
    """`"bearer"`: `Authorization: Bearer …`."""

    token: Secret
    """The token."""


class BasicAuth(Config):
    type: Literal["basic"]
    """`"basic"`: a user and a password."""

    user: str
    """The user."""

    password: Secret
    """The user's password."""


class KeyAuth(Config):
    type: Literal["api_key"]
    """`"api_key"`: a header, or a parameter of the URL."""

    key: Secret
    """The key."""

    header: str = "X-API-Key"
    """The header that holds it."""

    param: str | None = None
    """The parameter of the URL that holds it, instead of a header."""


class OAuth2(Config):
    type: Literal["oauth2"]
    """`"oauth2"`: a token that the server gives for client credentials; fetched again before it ends."""

    token_url: str
    """Where tokens are given."""

    client_id: str
    """Who asks."""

    client_secret: Secret
    """The client's secret."""

    scope: str | None = None
    """What the token is for."""


class SignedAuth(Config):
    type: Literal["hmac"]
    """`"hmac"`: a signature of time and body, as the `webhook` source checks it."""

    secret: Secret
    """The secret that signs."""

    header: str = "X-Signature"
    """The header that holds the signature, in hexadecimal."""

    timestamp_header: str = "X-Timestamp"
    """The header that holds the time in seconds since 1970. What is signed is this time, a dot and the body."""


Auth = Annotated[BearerAuth | BasicAuth | KeyAuth | OAuth2 | SignedAuth, Field(discriminator="type")]


class HttpConfig(Config):
    """How a web API is called."""

    url: str
    """The address, with `http://` or `https://`."""

    auth: Auth | None = None
    """Credentials: a table whose `type` is `"bearer"`, `"basic"`, `"api_key"`, `"oauth2"` or `"hmac"`; none: no credentials."""

    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request. Secrets belong into `auth`."""

    timeout_secs: PositiveFloat = 30
    """Time for the server to answer."""

    ca_file: Path | None = None
    """Authorities that may have signed the server's certificate, in PEM; none: those that the system trusts."""

    cert_file: Path | None = None
    """A certificate of our own with its private key, in PEM, for servers that ask for one."""

    @field_validator("url")
    @classmethod
    def _holds_no_secret(cls, url: str) -> str:
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError("user and password belong into `auth`: an address is shown in messages and logs")
        return url


def _is_address(url: str) -> bool:
    try:
        urlsplit(url).port  # noqa: B018 - which raises for brackets without an end, and for ports that there are not
    except ValueError:
        return False
    return url.startswith(("http://", "https://"))


def client(config: HttpConfig, connections: int = 1) -> httpx.Client:
    """A client for the API; it connects when it is first used."""
    if not _is_address(config.url):
        raise ConfigError(f"`url` = {config.url!r} is no address of the web", code="PEN-1003", hint="write https://…")
    return httpx.Client(
        auth=_auth(config.auth),
        headers=config.headers,
        timeout=config.timeout_secs,
        verify=_tls(config),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
    )


def drain(answer: httpx.Response, secs: float) -> None:
    """
    Read the body of an answer that says enough with its status, so that the connection can be used again.

    One that is long, or does not end in time, is not waited for: its connection is closed instead.
    """
    until = time.monotonic() + secs
    left = MOST_DRAINED
    for piece in answer.iter_raw():
        left -= len(piece)
        if left < 0 or time.monotonic() > until:
            return


def passing(error: httpx.HTTPError, what: str) -> RetryableError:
    """An error of the connection, as what happens next."""
    code = "PEN-2003" if isinstance(error, httpx.TimeoutException) else "PEN-2001"
    hint = "`ca_file` names those that may have signed the server's certificate" if "CERTIFICATE" in str(error) else ""
    return RetryableError(f"{what}: {type(error).__name__}: {error}", code=code, hint=hint)


def failure(response: httpx.Response, what: str) -> ConnectorError:
    """What an answer other than success means, where it says nothing about a record."""
    status = f"{what} was answered {response.status_code} {response.reason_phrase}"
    if response.status_code in PASSING or response.status_code >= 500:
        return RetryableError(status, code="PEN-2002" if response.status_code == 429 else "PEN-2001")
    if response.status_code in (401, 403, 407):
        return FatalError(status, code="PEN-5001", hint="correct `auth`, or let these credentials in there")
    return FatalError(status, code="PEN-5001", hint="correct `url`")


def pause_of(response: httpx.Response) -> float | None:
    """The seconds that `Retry-After` asks for, a day at most, written as a number or as a date; None: it does not say."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return min(LONGEST_SECS, float(text))
    try:
        return min(LONGEST_SECS, max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time()))
    except (ValueError, TypeError, OverflowError):
        return None


def _tls(config: HttpConfig) -> ssl.SSLContext:
    given = [name for name in ("ca_file", "cert_file") if getattr(config, name) is not None]
    called = [config.url, config.auth.token_url if isinstance(config.auth, OAuth2) else ""]
    if given and not any(url.startswith("https://") for url in called):
        raise ConfigError(
            f"`{given[0]}` is for TLS, and {config.url} says plain text", code="PEN-1003", hint="write https://"
        )
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
        if config.cert_file is not None:
            context.load_cert_chain(config.cert_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot load a certificate: {error}", code="PEN-1016", hint="ca_file and cert_file are PEM files"
        ) from error
    return context


def _auth(auth: Auth | None) -> httpx.Auth | None:
    match auth:
        case None:
            return None
        case BearerAuth():
            return _Header("Authorization", f"Bearer {auth.token.reveal()}")
        case BasicAuth():
            keep_credentials(auth.user, auth.password.reveal())
            return httpx.BasicAuth(auth.user, auth.password.reveal())
        case KeyAuth():
            return _Parameter(auth.param, auth.key.reveal()) if auth.param else _Header(auth.header, auth.key.reveal())
        case OAuth2():
            return _Tokens(auth)
        case SignedAuth():
            return _Signature(auth)


class _Header(httpx.Auth):
    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        request.headers[self._name] = self._value
        yield request


class _Parameter(httpx.Auth):
    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        request.url = request.url.copy_set_param(self._name, self._value)
        yield request


class _Signature(httpx.Auth):
    requires_request_body = True

    def __init__(self, auth: SignedAuth) -> None:
        self._auth = auth
        self._secret = auth.secret.reveal().encode()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        now = str(int(time.time()))
        signed = hmac.new(self._secret, now.encode() + b"." + request.content, hashlib.sha256)
        request.headers[self._auth.timestamp_header] = now
        request.headers[self._auth.header] = signed.hexdigest()
        yield request


_TOKENS: dict[tuple[str, str, str | None], tuple[str, float]] = {}
"""Tokens of this process and when each ends: a task that opens its sink need not ask for one again."""
_TOKENS_LOCK = threading.Lock()


class _Tokens(httpx.Auth):
    """Client credentials: one token for all, and a new one when it ends or is refused."""

    def __init__(self, auth: OAuth2) -> None:
        self._auth = auth
        self._secret = auth.client_secret.reveal()
        keep_credentials(auth.client_id, self._secret)
        self._name = (auth.token_url, auth.client_id, auth.scope)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        for again in (False, True):
            with _TOKENS_LOCK:
                token, ends = _TOKENS.get(self._name, ("", 0.0))
            if time.time() >= ends:
                token = self._taken((yield self._question()))
            request.headers["Authorization"] = f"Bearer {token}"
            response = yield request
            if response.status_code != 401 or again:
                return
            with _TOKENS_LOCK:
                if _TOKENS.get(self._name, ("",))[0] == token:
                    del _TOKENS[self._name]

    def _question(self) -> httpx.Request:
        form = {"grant_type": "client_credentials"} | ({"scope": self._auth.scope} if self._auth.scope else {})
        asked = httpx.Request("POST", self._auth.token_url, data=form)
        return next(httpx.BasicAuth(self._auth.client_id, self._secret).auth_flow(asked))

    def _taken(self, response: httpx.Response) -> str:
        response.read()
        if response.status_code != 200:
            raise failure(response, f"the question for a token at {self._auth.token_url}")
        try:
            answer = response.json()
            token, lasts = str(answer["access_token"]), float(answer.get("expires_in") or 300)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FatalError(
                f"{self._auth.token_url} gave no token", code="PEN-5001", hint="correct `token_url` of `auth`"
            ) from None
        keep_secret(token)
        with _TOKENS_LOCK:
            _TOKENS[self._name] = (token, time.time() + max(1.0, lasts * 0.9))
        return token
