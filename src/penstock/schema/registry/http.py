"""One call to a registry over HTTP: credentials, TLS, retries, and each answer's error class."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import NonNegativeInt, PositiveInt, field_validator, model_validator

from penstock.config import Config, Secret
from penstock.errors import ConfigError, ConnectorError, RetryableError, SchemaError, keep_credentials

_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"
_SHOWN = 300

WHOLE = 6
"""A whole answer may take so many times as long as the longest part of one: bytes that trickle would hold a run for ever."""

MOST_BYTES = 64 << 20
"""Of an answer; a schema is far smaller."""


class HttpConfig(Config):
    """How a registry is reached."""

    url: str
    """Address, such as `https://registry:8081`; Apicurio's is `http://host:8080/apis/ccompat/v7`."""

    username: str | None = None
    """User for basic authentication; at Confluent Cloud, the API key."""

    password: Secret | None = None
    """Password of `username`."""

    token: Secret | None = None
    """Bearer token, instead of a user."""

    ca_file: Path | None = None
    """Certificates that sign the server's, in PEM; by default the system's."""

    certificate_file: Path | None = None
    """The client's certificate, in PEM, for servers that ask for one."""

    key_file: Path | None = None
    """Key of `certificate_file`, if it is in a file of its own."""

    key_password: Secret | None = None
    """Password of the key."""

    timeout_ms: PositiveInt = 10_000
    """Longest wait for a connection, and for each part of an answer; the whole answer has six times as long."""

    max_retries: NonNegativeInt = 5
    """Retries of one call after a passing failure, before the runtime learns of it."""

    retry_backoff_ms: PositiveInt = 100
    """First pause before a retry; it doubles, with jitter."""

    max_backoff_ms: PositiveInt = 5_000
    """Longest pause before a retry, also where the server asks for a longer one."""

    @field_validator("url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is an address with http:// or https://")
        if parts.username or parts.password:
            raise ValueError("credentials do not belong in it: use `username` and `password`, or `token`")
        if parts.query or parts.fragment:
            raise ValueError("it ends before `?` and `#`")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_identity(self) -> HttpConfig:
        if (self.username is None) != (self.password is None):
            raise ValueError("`username` and `password` belong together")
        if self.username is not None and self.token is not None:
            raise ValueError("give either `username` and `password`, or `token`")
        if self.certificate_file is None and (self.key_file or self.key_password):
            raise ValueError("`key_file` and `key_password` need `certificate_file`")
        return self


class Answer(Exception):
    """A registry's refusal, before anyone has said what it means."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


class Http:
    """Calls to one server; each opens a connection of its own, so that any thread and any process may call."""

    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self._context: ssl.SSLContext | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "_context": None}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON. Raises `Answer` for what the caller explains: not found, not compatible, not valid."""
        for tries in range(self.config.max_retries + 1):
            try:
                return self._once(method, path, body)
            except RetryableError as error:
                if tries == self.config.max_retries:
                    raise
                time.sleep(self._pause(tries, getattr(error, "retry_after", 0.0)))
        raise AssertionError("unreachable")

    def _pause(self, tries: int, asked: float) -> float:
        first, cap = self.config.retry_backoff_ms / 1000, self.config.max_backoff_ms / 1000
        return max(min(cap, first * 2.0**tries) * random.uniform(0.5, 1.0), min(cap, asked))

    def _once(self, method: str, path: str, body: Any) -> Any:
        parts = urlsplit(self.config.url)
        host, timeout = str(parts.hostname), self.config.timeout_ms / 1000
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout, context=self._tls())
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=timeout)
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        try:
            connection.connect()
            with _bounded(connection.sock, WHOLE * timeout):
                connection.request(method, parts.path + path, data, self._headers())
                answer = connection.getresponse()
                text, status, after = _body(answer), answer.status, answer.getheader("Retry-After", "")
        except ssl.SSLCertVerificationError as error:
            raise self._refused(
                f"the certificate of {parts.netloc} is not trusted: {error.verify_message}",
                "name the certificates that sign it in `ca_file`, and the server by the name in its certificate",
            ) from error
        except TimeoutError as error:
            raise RetryableError(f"the registry at {parts.netloc} did not answer in time", code="PEN-2003") from error
        except (OSError, http.client.HTTPException) as error:
            raise RetryableError(
                f"no connection to the registry at {parts.netloc}: {error or type(error).__name__}",
                code="PEN-2001",
                hint="check `url` in [registry], and that the registry runs",
            ) from error
        finally:
            connection.close()
        return self._judge(status, text, after)

    def _judge(self, status: int, text: bytes, retry_after: str) -> Any:
        try:
            found = json.loads(text) if text else None
        except (ValueError, RecursionError):
            found = None
        if status < 300:
            if found is None and text:
                raise self._refused("the answer is not JSON", "check that `url` in [registry] is that of the API")
            return found
        code = found.get("error_code", 0) if isinstance(found, dict) else 0
        message = str(found.get("message") or "") if isinstance(found, dict) else ""
        raise self._error(status, code if isinstance(code, int) else 0, message[:_SHOWN], retry_after)

    def _error(self, status: int, code: int, message: str, retry_after: str) -> Exception:
        host, said = urlsplit(self.config.url).netloc, f": {message}" if message else ""
        if status in (401, 403):
            what = "does not know the credentials" if status == 401 else "does not allow this"
            return ConfigError(
                f"the registry at {host} {what} (HTTP {status}){said}",
                code="PEN-1030",
                hint="check `username` and `password`, or `token`, in [registry], and what they may do",
            )
        if status in (408, 429) or status >= 500:
            kind = "PEN-2002" if status == 429 else "PEN-2003" if status == 408 else "PEN-2000"
            error = RetryableError(f"the registry at {host} answered HTTP {status}{said}", code=kind)
            error.retry_after = float(retry_after) if retry_after.isdigit() else 0.0  # type: ignore[attr-defined]
            return error
        if code >= 10_000 or status in (409, 422):  # a code of three digits comes from the server's own pages
            return Answer(status, code, message)
        return self._refused(
            f"the registry at {host} answered HTTP {status}{said}",
            "check `url` in [registry]: it is that of the registry's API (Apicurio's ends with /apis/ccompat/v7)",
        )

    def _headers(self) -> dict[str, str]:
        headers = {
            "Accept": _ACCEPT,
            "Content-Type": "application/vnd.schemaregistry.v1+json",
            "User-Agent": "penstock",
        }
        if self.config.token is not None:
            headers["Authorization"] = f"Bearer {self.config.token.reveal()}"
        elif self.config.username is not None and self.config.password is not None:
            password = self.config.password.reveal()
            keep_credentials(self.config.username, password)
            pair = f"{self.config.username}:{password}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        return headers

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            password = self.config.key_password.reveal() if self.config.key_password else ""
            try:
                context = ssl.create_default_context(cafile=self.config.ca_file)
                if self.config.certificate_file is not None:
                    # Always a password: without one, OpenSSL would ask for it on the terminal.
                    context.load_cert_chain(self.config.certificate_file, self.config.key_file, password)
            except (OSError, ssl.SSLError) as error:
                raise self._refused(
                    f"the certificates of [registry] cannot be used: {error}",
                    "check `ca_file`, `certificate_file`, `key_file` and `key_password`",
                ) from error
            self._context = context
        return self._context

    def _refused(self, message: str, hint: str) -> ConfigError:
        return ConfigError(message, code="PEN-1032", hint=hint)


@contextlib.contextmanager
def _bounded(line: socket.socket, seconds: float) -> Iterator[None]:
    """Ends the connection when a call takes longer in all, however often something of its answer comes."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(line, socket.SHUT_RDWR)  # not TLS's own, which would take the line from its reader

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _body(answer: http.client.HTTPResponse) -> bytes:
    text = answer.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise http.client.HTTPException(f"an answer of more than {MOST_BYTES >> 20} MiB")
    if answer.length:
        raise http.client.IncompleteRead(text, answer.length)
    return text


def as_error(answer: Answer, what: str) -> ConnectorError:
    """What an answer means where nothing better is known."""
    said = f": {answer.message}" if answer.message else ""
    if answer.status == 409:
        return SchemaError(f"{what} does not fit the earlier versions{said}", code="PEN-4030", hint="use a new subject")
    if answer.code in (42202, 42203):
        return ConfigError(f"the registry refused {what}{said}", code="PEN-1032", hint="check version_strategy")
    if answer.status == 422:
        return SchemaError(f"the registry refused {what}{said}", code="PEN-4031", hint="correct the schema file")
    return ConfigError(
        f"the registry does not have {what}{said}",
        code="PEN-1031",
        hint="penstock schemas list FILE shows what it has",
    )
