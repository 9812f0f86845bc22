"""The options of the webhook source."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from penstock.config import Config, Secret

Algorithm = Literal["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384"]


class NoAuth(Config):
    """All that reach the port may send."""

    type: Literal["none"]
    """`"none"`: every request is taken. Only for networks that you trust."""


class ApiKeyAuth(Config):
    type: Literal["api_key"]
    """`"api_key"`: a header holds a key."""

    keys: Annotated[tuple[Secret, ...], Field(min_length=1)]
    """The keys that are taken; while one replaces another, both."""

    header: str = "X-API-Key"
    """The header that holds the key."""

    prefix: str = ""
    """What comes before the key in the header, such as `"Bearer "`."""


class HmacAuth(Config):
    type: Literal["hmac"]
    """`"hmac"`: a header holds a signature of the body as it was sent."""

    secrets: Annotated[tuple[Secret, ...], Field(min_length=1)]
    """The secrets that sign; while one replaces another, both."""

    preset: Literal["github", "stripe", "slack"] | None = None
    """The scheme of a known sender, instead of the options below."""

    header: str = "X-Signature"
    """The header that holds the signature."""

    algorithm: Literal["sha256", "sha1", "sha512"] = "sha256"
    """The hash."""

    encoding: Literal["hex", "base64"] = "hex"
    """How the signature is written."""

    prefix: str = ""
    """What comes before the signature in the header, such as `"sha256="`."""

    timestamp_header: str | None = None
    """A header that holds the time of sending in seconds since 1970, which is signed too."""

    signed: str = "{timestamp}.{body}"
    """What is signed where there is a `timestamp_header`; else it is the body."""

    tolerance_secs: PositiveInt = 300
    """How far a timestamp may be from this machine's clock: older requests are refused, so that none can be sent again."""

    @model_validator(mode="after")
    def _one_scheme(self) -> Self:
        own = {"header", "algorithm", "encoding", "prefix", "timestamp_header", "signed"} & self.model_fields_set
        if self.preset is not None and own:
            raise ValueError(f"preset = {self.preset!r} sets {', '.join(sorted(own))}: leave out one or the other")
        if "{body}" not in self.signed or "{timestamp}" not in self.signed:
            raise ValueError("signed must hold {timestamp} and {body}: what is not signed can be forged")
        return self


class JwtAuth(Config):
    type: Literal["jwt"]
    """`"jwt"`: `Authorization: Bearer` holds a signed token."""

    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)]
    """The algorithms that are taken: `HS…` with `secret`, `RS…` and `ES…` with `key_file` or `jwks_file`."""

    secret: Secret | None = None
    """The shared secret of `HS256`, `HS384` and `HS512`."""

    key_file: Path | None = None
    """The public key of `RS…` and `ES…`, in PEM."""

    jwks_file: Path | None = None
    """A JSON Web Key Set; the token's `kid` says which key. It is read again when the file changes."""

    audience: str | None = None
    """The `aud` that a token must have."""

    issuer: str | None = None
    """The `iss` that a token must have."""

    scope: str | None = None
    """A word that `scope` must hold; a valid token without it is answered 403."""

    leeway_secs: NonNegativeInt = 30
    """How far the clocks of signer and receiver may be apart."""

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if sum(each is not None for each in (self.secret, self.key_file, self.jwks_file)) != 1:
            raise ValueError("give one of secret, key_file and jwks_file")
        shared = {each.startswith("HS") for each in self.algorithms}
        if shared != {self.secret is not None}:
            raise ValueError("HS… goes with secret, RS… and ES… with key_file or jwks_file; the two kinds do not mix")
        return self


Auth = Annotated[NoAuth | ApiKeyAuth | HmacAuth | JwtAuth, Field(discriminator="type")]


class Dedupe(Config):
    """What tells a retry from a new event."""

    header: str | None = None
    """A header that is the same in every retry, such as `X-GitHub-Delivery`."""

    path: str | None = None
    """A member of each event, such as `id` or `meta.event_id`."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.header is None) == (self.path is None):
            raise ValueError('dedupe is either { header = "…" } or { path = "…" }')
        return self


class Endpoint(Config):
    """One address of the server."""

    path: str
    """The path of its URL, such as `/github`."""

    stream: str = Field(min_length=1)
    """The stream that its events belong to."""

    methods: Annotated[tuple[Literal["POST", "PUT", "PATCH"], ...], Field(min_length=1)] = ("POST",)
    """The methods that are taken."""

    auth: Auth | None = None
    """Who may send here; none: the source's `auth`."""

    format: Literal["auto", "json", "ndjson", "form", "raw"] = "auto"
    """
    How a body is cut into events: `json` (an array is one event for each item), `ndjson` (one for each line), `form` (a JSON
    object of its fields), `raw` (the body as it is). `auto` goes by the content type, and refuses others than the first three.
    """

    headers: tuple[str, ...] = ()
    """Headers that become attributes of the message; the names of attributes are in lower case."""

    dedupe: Dedupe | None = None
    """What tells a retry: an event whose key is among the last 100,000 is acknowledged and not stored again."""

    @field_validator("path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if not path.startswith("/") or any(each in path for each in "?# "):
            raise ValueError("a path begins with / and has no query")
        return path


class Tls(Config):
    """HTTPS."""

    cert_file: Path
    """The certificate and its chain, in PEM."""

    key_file: Path
    """Its private key, in PEM."""

    client_ca_file: Path | None = None
    """With it, clients must show a certificate that one of these authorities has signed."""


class WebhookConfig(Config):
    identity: ClassVar[frozenset[str]] = frozenset()

    port: int = Field(ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""

    host: str = "127.0.0.1"
    """The address to listen on; `0.0.0.0` is all of IPv4, `::` all of IPv6."""

    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1)]
    """
    The addresses of the server, a `[[source.endpoints]]` each: `path`, `stream`, `methods`, `auth`, `format`, `headers`,
    `dedupe`; see `docs/webhook.md`.
    """

    auth: Auth
    """Who may send, where an endpoint does not say: `{ type = "none" }`, `"api_key"`, `"hmac"` or `"jwt"`; see
    `docs/webhook.md`."""

    tls: Tls | None = None
    """Serve HTTPS: `cert_file`, `key_file`, and `client_ca_file` if clients must have certificates."""

    validate_on_receive: bool = False
    """Answer 422 to events that the `[[schemas]]` of their topic have no row for, before anything is stored."""

    allow: tuple[str, ...] = ()
    """Networks whose clients may send, such as `10.0.0.0/8`; others are answered 403. None: all."""

    trusted_proxies: tuple[str, ...] = ()
    """Networks of proxies whose `X-Forwarded-For` says who the client is."""

    rate_limit_per_sec: PositiveFloat | None = None
    """Requests a second that are taken from all clients together; up to a second's worth may come at once. A request whose
    credentials are refused does not count."""

    client_rate_limit_per_sec: PositiveFloat | None = None
    """Requests a second that are taken from one client address, of IPv6 from one network of 64 bits; those that are refused
    count too."""

    max_body_bytes: PositiveInt = 10 << 20
    """Largest body, as sent and after gzip."""

    max_held_bytes: PositiveInt = 256 << 20
    """Bodies that are not whole yet, of all requests together; a request that would make it more is answered 503. It is never
    less than `max_body_bytes`."""

    max_header_bytes: PositiveInt = 16 << 10
    """Largest request line and headers together."""

    max_connections: PositiveInt = 20_000
    """Connections at a time. One more ends the one that was idle longest; if none is, it is refused."""

    header_timeout_secs: PositiveFloat = 10
    """Time for the head of a request to come in."""

    request_timeout_secs: PositiveFloat = 60
    """Time for a whole request to come in, and for an answer to be taken."""

    idle_timeout_secs: PositiveFloat = 75
    """Time that a connection may be kept open between requests."""

    retry_after_secs: PositiveInt = 5
    """What `Retry-After` says when the journal is full or the pipeline stops."""

    health_path: str = "/healthz"
    """Answers 200 while events are taken, 503 while they are not; needs no authentication."""

    @field_validator("allow", "trusted_proxies")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for each in networks:
            ipaddress.ip_network(each)
        return networks

    @model_validator(mode="after")
    def _paths_differ(self) -> Self:
        paths = [self.health_path, *(endpoint.path for endpoint in self.endpoints)]
        if len(set(paths)) < len(paths):
            raise ValueError("two endpoints have the same path, or one has that of health_path")
        return self
