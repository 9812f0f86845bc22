"""How a Danube broker is reached: options, channels, credentials, and each answer's error class."""

from __future__ import annotations

import os

# Before gRPC is imported for the first time: its handlers end processes that are forked beside a client. So code that needs
# gRPC or the stubs takes them from here.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import grpc
from danube.proto import DanubeApi_pb2 as api
from danube.proto import DanubeApi_pb2_grpc as services
from danube.proto import SchemaRegistry_pb2 as schemas
from danube.proto.SchemaRegistry_pb2_grpc import SchemaRegistryStub
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pydantic import PositiveInt, field_validator, model_validator

from penstock.config import Config, Secret
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError

__all__ = [
    "LIST_SUBJECTS",
    "Calls",
    "DanubeConfig",
    "Place",
    "Subjects",
    "api",
    "channel",
    "credentials",
    "current",
    "failure",
    "first",
    "fnv1a",
    "grpc",
    "partitions_of",
    "schemas",
    "services",
]

T = TypeVar("T")
Code = grpc.StatusCode

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),  # a peer that is gone without a word is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a channel of its own is a connection of its own
]


class DanubeConfig(Config):
    """How a broker is reached; what sources, sinks and the registry share."""

    shared: ClassVar[Mapping[str, str]] = {"url": "danube_service_url"}

    url: str
    """Address of a broker, such as `http://localhost:6650`, or `https://…` for TLS."""

    token: Secret | None = None
    """Token (a JWT) that goes with every call; read again for each one, so that a file can be rotated."""

    ca_file: Path | None = None
    """Certificates that sign the broker's, in PEM; by default the system's."""

    certificate_file: Path | None = None
    """The client's certificate, in PEM, for brokers that ask for one (mTLS)."""

    key_file: Path | None = None
    """Key of `certificate_file`."""

    timeout_ms: PositiveInt = 10_000
    """Longest wait for the answer to one call."""

    @field_validator("url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ValueError("it is an address like http://host:6650 or https://host:6650")
        if parts.username or parts.password or parts.query or parts.path.strip("/"):
            raise ValueError("it ends after the port, and credentials do not belong in it: use `token`")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_identity(self) -> DanubeConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("`certificate_file` and `key_file` belong together")
        if self.url.startswith("http://") and (self.ca_file or self.certificate_file):
            raise ValueError("certificates need TLS: write https:// in `url`")
        return self

    @property
    def exposes_token(self) -> bool:
        """True if others on the way can read the token."""
        parts = urlsplit(self.url)
        near = parts.hostname in ("localhost", "::1") or str(parts.hostname).startswith("127.")
        return self.token is not None and parts.scheme == "http" and not near

    @property
    def timeout(self) -> float:
        return self.timeout_ms / 1000


@dataclass(frozen=True)
class Place:
    """Which broker serves a topic, and over which address it is reached."""

    connect: str
    broker: str
    is_proxy: bool = False


def channel(config: DanubeConfig, url: str, make: Any = grpc) -> Any:
    """A channel to a broker; `make` is `grpc` or `grpc.aio`."""
    target = url.partition("://")[2] or url
    if not config.url.startswith("https://"):
        return make.insecure_channel(target, options=_OPTIONS)
    read = [_read(path) for path in (config.ca_file, config.key_file, config.certificate_file)]
    return make.secure_channel(target, grpc.ssl_channel_credentials(*read), options=_OPTIONS)


def credentials(config: DanubeConfig, place: Place | None = None) -> list[tuple[str, str]]:
    """What goes with a call: the token as it is now, and the broker's name for a proxy."""
    found = []
    if config.token is not None:
        token = config.token.reveal().strip()
        if not token.isascii() or not token.isprintable():
            hint = "a token is one line of letters, digits and a few signs: look for a line break or a wrong file"
            raise ConfigError("`token` holds what no header of a call can hold", code="PEN-1016", hint=hint)
        found.append(("authorization", f"Bearer {token}"))
    return [*found, ("x-danube-broker-url", place.broker)] if place is not None and place.is_proxy else found


def current(config: DanubeConfig, place: Place | None = None) -> list[tuple[str, str]]:
    """As `credentials`, while a pipeline runs: a file that is not there for a moment is being replaced."""
    try:
        return credentials(config, place)
    except ConfigError as error:
        raise RetryableError(error.message, code="PEN-2000", hint=error.hint) from error


_TOKEN_HINT = "check `token` and the rights of its principal; a token in a file is read again for each call"
_TAKEN_HINT = (
    "another consumer has the subscription: stop that one, and if it is gone, take its place by its name in `consumer_name`, "
    "which the broker keeps until it is restarted; or use another `subscription`, or share it by `subscription_type`"
)
_NAMESPACE_HINT = (
    "topics are made only in namespaces that are there: `danube-admin namespaces create` makes one, and the broker's "
    "`bootstrap_namespaces` lists those that it begins with"
)
_HINTS = {
    "served by another broker": "a standalone broker does not serve its topics again after a restart: make them again, or run a "
    "cluster of one",
    "certificate_verify_failed": "no authority that is trusted signed the broker's certificate: set `ca_file` to one that did",
    "hostname verification": "the broker's certificate is for another host: use a name in `url` that the certificate has",
    "wrong_version_number": "the broker has no TLS at this port: write http:// in `url`",
    "security handshaker": "`ca_file`, `certificate_file` or `key_file` holds no PEM, or the key is of another certificate",
}
"""What to do, by a piece of what gRPC or the broker says where no call was answered."""
_CLOSED = ("socket closed", "connection reset", "broken pipe")


def failure(error: Any, what: str, config: DanubeConfig | None = None) -> ConnectorError:
    """The error class of a failed call, by what should happen next."""
    code, details = error.code(), (error.details() or "").partition("\n")[0][:400]
    message = f"{what}: {code.name}: {details}"
    if code is Code.PERMISSION_DENIED and "not able to subscribe" in details.lower():
        return RetryableError(message, code="PEN-2000", hint=_TAKEN_HINT)
    if code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED):
        return RetryableError(message, code="PEN-2000", hint=_TOKEN_HINT)
    if "unable to find the namespace" in details.lower():  # of code UNAVAILABLE
        return ConfigError(message, code="PEN-1016", hint=_NAMESPACE_HINT)
    if code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED):
        return ConfigError(
            message, code="PEN-1016", hint="the broker will not take this: correct the settings it names"
        )
    if code is Code.UNAVAILABLE:
        return RetryableError(message, code="PEN-2001", hint=_unavailable(details.lower(), config))
    codes = {Code.DEADLINE_EXCEEDED: "PEN-2003", Code.RESOURCE_EXHAUSTED: "PEN-2002"}
    return RetryableError(message, code=codes.get(code, "PEN-2000"))


def _unavailable(details: str, config: DanubeConfig | None) -> str:
    found = next((hint for words, hint in _HINTS.items() if words in details), "")
    if found or config is None or not any(each in details for each in _CLOSED):
        return found
    if config.url.startswith("http://"):
        return "the broker closed the connection: if it has TLS, write https:// in `url`"
    if config.certificate_file is None:
        return "the broker closed the connection: if it asks for a certificate, set `certificate_file` and `key_file`"
    return "the broker closed the connection: check that it trusts who signed `certificate_file`"


def _subjects_type() -> Any:
    """The answer to ListSubjects, which brokers have and the stubs of danube-client 0.5 lack: only the names are read."""
    file = descriptor_pb2.FileDescriptorProto(name="penstock_danube_subjects.proto", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, field, kind in (("Subject", "subject", kinds.TYPE_STRING), ("Subjects", "subjects", kinds.TYPE_MESSAGE)):
        repeated = kind == kinds.TYPE_MESSAGE
        file.message_type.add(name=name).field.add(
            name=field,
            number=1,
            type=kind,
            label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL,
            type_name=".Subject" if repeated else None,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Subjects"))


Subjects = _subjects_type()
LIST_SUBJECTS = "/danube_schema.SchemaRegistry/ListSubjects"


class _ListSubjects:
    """A stub of one call."""

    def __init__(self, channel: Any) -> None:
        self.ListSubjects = channel.unary_unary(
            LIST_SUBJECTS, request_serializer=lambda nothing: b"", response_deserializer=Subjects.FromString
        )


class Calls:
    """Single calls to a broker, each of which may be repeated; for what is asked now and then."""

    def __init__(self, config: DanubeConfig) -> None:
        self.config = config
        self._channel: Any = None
        self._numbers = itertools.count(1)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def partitions(self, topic: str) -> list[str]:
        """The partitions of a topic, itself if it has none; empty: there is no such topic."""
        request = api.TopicLookupRequest(request_id=next(self._numbers), topic=topic)
        answer = self._call(services.DiscoveryStub, "TopicPartitions", request, f"the topic {topic}")
        return partitions_of(topic, answer.partitions)

    def create(self, topic: str, reliable: bool) -> None:
        """Make a topic: a producer may."""
        request = api.ProducerRequest(
            request_id=next(self._numbers),
            producer_name="penstock-create",
            topic_name=topic,
            dispatch_strategy=api.Reliable if reliable else api.NonReliable,
        )
        for left in range(5, -1, -1):  # a cluster makes a topic and answers that it is to be looked up again
            try:
                self._call(services.ProducerServiceStub, "CreateProducer", request, f"the topic {topic}")
                return
            except RetryableError:
                if self.partitions(topic):
                    return
                if not left:
                    raise
                time.sleep(0.2)

    def subjects(self) -> list[str]:
        """The names of all subjects of the registry."""
        answer = self._call(_ListSubjects, "ListSubjects", None, "the list of subjects")
        return sorted(each.subject for each in answer.subjects)

    def registry(self, method: str, request: Any, what: str) -> Any:
        """A call of the schema registry. `grpc.RpcError` with NOT_FOUND and INTERNAL come as they are: they say more."""
        return self._call(SchemaRegistryStub, method, request, what, (Code.NOT_FOUND, Code.INTERNAL))

    def _call(self, stub: Any, method: str, request: Any, what: str, own: Sequence[Any] = ()) -> Any:
        if self._channel is None:
            self._channel = channel(self.config, self.config.url)
        try:
            return getattr(stub(self._channel), method)(
                request, timeout=self.config.timeout, metadata=credentials(self.config)
            )
        except grpc.RpcError as error:
            if error.code() in own:
                raise
            raise failure(error, f"the Danube broker {self.config.url} refused {what}", self.config) from error


def first(call: Callable[[], T]) -> T:
    """A first call, which is not tried again: what might pass later is fatal here, and wrong credentials are a setting."""
    try:
        return call()
    except RetryableError as error:
        text = error.message
        if error.hint == _TOKEN_HINT:
            raise ConfigError(text, code="PEN-1016", hint=error.hint) from error
        raise FatalError(text, code="PEN-5001", hint=error.hint or "is the broker running, and `url` right?") from error


def fnv1a(key: str) -> int:
    """FNV-1a with 64 bits: by it every client of Danube chooses the partition of a routing key."""
    found = 0xCBF29CE484222325
    for byte in key.encode():
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return found


def partitions_of(topic: str, answer: Iterable[str]) -> list[str]:
    """What of a broker's answer is of the topic: it answers with every topic whose name begins as this one's does."""
    own = re.compile(re.escape(topic) + r"(-part-\d+)?")
    return sorted(filter(own.fullmatch, answer), key=_number)


def _number(partition: str) -> tuple[str, int]:
    stem, _, number = partition.rpartition("-part-")
    return (stem, int(number)) if stem and number.isdigit() else (partition, 0)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", code="PEN-1015") from error
