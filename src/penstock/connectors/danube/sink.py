"""Send rows to topics of a Danube broker, each message named so that a repeat is recognised."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Annotated
from urllib.parse import urlsplit

import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveInt

from penstock.connectors.danube.message import EPOCH, INCARNATION, PIPELINE, SEQUENCE
from penstock.connectors.danube.producers import Binding, Message, Producers
from penstock.connectors.messages import Template, encode, refuse_rows
from penstock.errors import ConfigError, RetryableError
from penstock.schema.registry.danube import DanubeRegistry, unpacked
from penstock.schema.registry.danube_client import Calls, DanubeConfig, first
from penstock.schema.registry.versions import Pinned, VersionStrategy, choose
from penstock.sink import Epoch, Receipt, SinkConnector, SinkContext, Task, Topic, TopicContext, WriteResult
from penstock.source import Finding

HANDED_OVER = 1000
"""Messages that are made before they go to the thread that sends them: one waking for all."""
NAME = re.compile(r"/[\w-]+/[\w-]+")


class DanubeSinkConfig(DanubeConfig):
    topic: Annotated[str, Field(min_length=1)] = "/{topic}"
    """Danube's topic: `{topic}` is the pipeline's without its first slash, `{column}` a value of the row."""

    partitions: NonNegativeInt = 0
    """Partitions that the topic is made with; 0: none. A routing key has one partition, messages without a key take turns."""

    reliable_dispatch: bool = True
    """Whether the broker keeps messages until they are acknowledged. It must be as the topic was made."""

    key: list[str] = Field(default=[])
    """Columns that make the routing key, which keeps the order of its messages; none: the topic's own key, if it has one."""

    attributes: list[str] = Field(default=[])
    """Columns that become attributes of the message, and leave its payload."""

    schema_subject: str | None = Field(default=None, min_length=1)
    """
    Subject in the broker's registry that producers are bound to and messages name; it must be there.

    None: that of the topic's `[[schemas]]`, if `[registry]` is the same broker's, and otherwise no schema.
    """

    version_strategy: VersionStrategy = "latest"
    """With `schema_subject`, which version they name: `"latest"`, `{ pinned = 2 }` or `{ minimum = 1 }`."""

    window: PositiveInt = 1000
    """Messages of a task that may wait for the broker's answer."""


class DanubeSink(SinkConnector[DanubeSinkConfig, Receipt]):
    """
    A task sends as it reads, many messages at a time and one at a time of each routing key, so that its order holds.

    One task sends an epoch, unless the route's `partitions` spread it over several by key.

    At-least-once: a repeat after a crash carries the same `penstock.pipeline`, `penstock.incarnation`, `penstock.epoch` and
    `penstock.sequence` in its attributes, by which our own source drops it, as long as the repeat is among its last 100,000
    messages. Between two Penstocks a row then arrives exactly once, if an epoch that is staged again is read by as many
    tasks as before: always, where one task sends it.
    """

    name = "danube"
    in_order = True

    _producers: Producers | None = None

    def open(self, context: SinkContext = SinkContext()) -> None:
        """Only knocks at the door: the driver must not speak gRPC, which its forks would not outlive."""
        super().open(context)
        Template(self.config.topic)
        parts = urlsplit(self.config.url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), self.config.timeout).close()
        except OSError as error:
            raise RetryableError(
                f"the Danube broker {self.config.url} cannot be reached: {error.strerror or error}",
                code="PEN-2001",
                hint="is the broker running, and `url` right?",
            ) from error

    def close(self) -> None:
        if self._producers is not None:
            self._producers.close()
        self._producers = None

    def check(self) -> Sequence[Finding]:
        with Calls(self.config) as calls:
            first(lambda: calls.partitions("/default/penstock-check"))
        if self.config.token is not None and self.config.url.startswith("http://"):
            return [Finding(False, "the token goes over the network in plain text", "use https:// in `url`")]
        return []

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self.close()
        own = self.config
        self._producers = Producers(
            own, own.partitions, own.reliable_dispatch, own.window, f"penstock-{epoch.pipeline}"
        )
        self._named = {PIPELINE: epoch.pipeline, INCARNATION: epoch.incarnation, EPOCH: str(epoch.number)}
        self._task = task.partition
        self._sent: dict[Topic, int] = {}
        self._bindings: dict[str, Binding | None] = {}

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._producers is not None, "begin_epoch comes first"
        context = self.context.topic(topic)
        names = Template(self.config.topic).names(topic, batch)
        messages = encode(batch, context, self.config.key, self.config.attributes)
        refuse_rows(messages.payloads.is_null(), "Danube has no message without a payload, which a tombstone is")
        keys = list(_texts(messages.keys))
        first_row = self._sent.get(topic, 0)
        rows = zip(names.to_pylist(), keys, messages.triples(), strict=True)
        made = self._producers.message
        waiting: list[Message] = []
        for number, (name, key, (_, payload, attributes)) in enumerate(rows, first_row):
            named = {**dict(attributes), **self._named, SEQUENCE: f"{topic}@{self._task}.{number}"}
            waiting.append(made(name, self._binding(name, context), payload or b"", key, number, named))
            if len(waiting) >= HANDED_OVER:
                self._producers.send(waiting)
                waiting = []
        self._producers.send(waiting)
        self._sent[topic] = first_row + len(messages)
        return WriteResult(len(messages), messages.nbytes)

    def flush(self) -> None:
        if self._producers is not None:
            self._producers.settle()

    def _binding(self, name: str, context: TopicContext) -> Binding | None:
        """The schema that messages of a topic name; asked for once in each epoch."""
        if name in self._bindings:
            return self._bindings[name]
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no topic of Danube's",
                code="PEN-1016",
                hint='a topic is /namespace/name, of letters, digits, _ and -: set `topic`, such as "/default/orders"',
            )
        found: Binding | None = None
        written = context.encoder.schema if context.encoder is not None else None
        if self.config.schema_subject is not None:
            registry = DanubeRegistry(self.config)
            chosen = choose(registry, self.config.schema_subject, self.config.version_strategy)
            registry.close()
            found = Binding(chosen.subject, *unpacked(chosen.id), self._reference())
        elif written is not None and written.id and written.origin == self.config.url:
            # The version is the one that the driver chose for this epoch, by the entry's own version_strategy.
            found = Binding(written.subject, *unpacked(written.id), ("pinned_version", written.version))
        self._bindings[name] = found
        return found

    def _reference(self) -> tuple[str, int | bool]:
        strategy = self.config.version_strategy
        if strategy == "latest":
            return "use_latest", True
        return (
            ("pinned_version", strategy.pinned) if isinstance(strategy, Pinned) else ("min_version", strategy.minimum)
        )


def _texts(keys: pa.Array) -> Iterator[str | None]:
    """Routing keys are text: bytes that are none become their digest."""
    for key in keys.to_pylist():
        if key is None:
            yield None
            continue
        try:
            yield key.decode()
        except UnicodeDecodeError:
            yield hashlib.blake2b(key, digest_size=16).hexdigest()
