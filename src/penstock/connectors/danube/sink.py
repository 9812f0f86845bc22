"""Send rows to topics of a Danube broker, each message named so that a repeat is recognised."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from penstock.connectors.danube.message import BESIDE, EPOCH, INCARNATION, PIPELINE, SEQUENCE
from penstock.connectors.danube.producers import Binding, Message, Producers
from penstock.connectors.messages import ID, SUBJECT, VERSION, Template, encode, refuse_rows
from penstock.errors import ConfigError, DataError, RetryableError
from penstock.formats import WireSchema
from penstock.schema.registry.danube import DanubeRegistry, unpacked
from penstock.schema.registry.danube_client import Calls, DanubeConfig, first
from penstock.schema.registry.versions import Pinned, VersionStrategy, choose
from penstock.sink import Epoch, Receipt, SinkConnector, SinkContext, Task, Topic, TopicContext, WriteResult
from penstock.source import Finding

HANDED_OVER = 1000
"""Messages that are made before they go to the thread that sends them: one waking for all."""
PLACE_BYTES = 512
"""What a message grows by when its producer is known."""
NAME = re.compile(r"/[\w-]+/[\w-]+")

_REF = frozenset((SUBJECT, VERSION, ID))
"""A message of a producer that is bound to a schema names it in a field of its own."""


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
    Subject in the broker's registry that producers are bound to and messages name; it must be there, or see `schema_type`.

    None: that of the topic's `[[schemas]]`, if `[registry]` is the same broker's, and otherwise no schema.
    """

    schema_type: Literal["string", "number", "bytes"] | None = None
    """With `schema_subject`: a subject that is not there is registered with this type. Others are registered by `[[schemas]]`."""

    version_strategy: VersionStrategy = "latest"
    """With `schema_subject`, which version they name: `"latest"`, `{ pinned = 2 }` or `{ minimum = 1 }`."""

    window: PositiveInt = 1000
    """Messages of a task that may wait for the broker's answer."""

    max_message_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    """The broker's limit for a message with its key and attributes: 4 MiB unless it was raised. A larger row is a bad row."""

    @model_validator(mode="after")
    def _schema_has_subject(self) -> DanubeSinkConfig:
        if self.version_strategy != "latest" and self.schema_subject is None:
            raise ValueError(
                "`version_strategy` is for `schema_subject`: set that too, or set the strategy in [[schemas]]"
            )
        if self.schema_type is not None and self.schema_subject is None:
            raise ValueError("`schema_type` is for `schema_subject`: set that too, or leave it out")
        return self


class DanubeSink(SinkConnector[DanubeSinkConfig, Receipt]):
    """
    A task sends as it reads, many messages at a time and one at a time of each routing key, so that its order holds.

    One task sends an epoch, unless the route's `partitions` spread it over several by key.

    At-least-once: a repeat after a crash carries the same `penstock.pipeline`, `penstock.incarnation`, `penstock.epoch` and
    `penstock.sequence` in its attributes, by which our own source drops it, as long as the first is among its last 100,000
    messages: so an epoch reads about 50,000 rows at most, which are as many messages unless routes or SQL make more of them.
    Between two Penstocks a row then arrives exactly once, as long as the next one knows the whole epoch, and if an epoch that
    is staged again is read by as many tasks as before: always, where one task sends it.
    """

    name = "danube"
    in_order = True
    max_epoch_rows = 50_000  # half of what a source knows, so that as many others may come between

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
        if self.config.exposes_token:
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
        self._equal: dict[tuple[Topic, bytes], int] = {}  # how many messages of the epoch were the same
        self._bindings: dict[str, Binding | None] = {}

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._producers is not None, "begin_epoch comes first"
        context = self.context.topic(topic)
        names = self._names(topic, batch)
        messages = encode(batch, context, self.config.key, self.config.attributes)
        refuse_rows(messages.payloads.is_null(), "Danube has no message without a payload, which a tombstone is")
        keys = list(_texts(messages.keys))
        first_row = self._sent.get(topic, 0)
        rows = zip(names, keys, messages.triples(), strict=True)
        made = self._producers.message
        waiting: list[Message] = []
        large: list[int] = []
        most = self.config.max_message_bytes - PLACE_BYTES
        for number, (name, key, (_, payload, attributes)) in enumerate(rows, first_row):
            binding = self._binding(name, context)
            carried = _carried(attributes, BESIDE if binding is None else BESIDE | _REF)
            sequence = self._sequence(topic, name, payload or b"", key, carried)
            named = {**carried, **self._named, SEQUENCE: sequence}
            message = made(name, binding, payload or b"", key, number, named)
            if message.stream_message.ByteSize() > most:
                large.append(number - first_row)
                continue
            waiting.append(message)
            if len(waiting) >= HANDED_OVER:
                self._producers.send(waiting)
                waiting = []
        self._producers.send(waiting)
        self._sent[topic] = first_row + len(messages)
        if large:
            what = f"a message has more than {self.config.max_message_bytes:,} bytes, which the broker does not take"
            error = DataError(what, hint="raise `max_message_bytes` if the broker's own limit is higher")
            error.rows, error.count, error.others_written = large, len(large), True
            raise error
        return WriteResult(len(messages), messages.nbytes)

    def flush(self) -> None:
        if self._producers is not None:
            self._producers.settle()

    def _sequence(self, topic: Topic, name: str, payload: bytes, key: str | None, carried: dict[str, str]) -> str:
        """
        Which message of the epoch this is: the digest of what it says, and how many said the same before it.

        So it has the same name if the epoch is sent again in another order, or with rows more: SQL may shuffle rows, and
        what was a bad row may be a good one by then.
        """
        said_beside = sorted(pair for pair in carried.items() if pair[0] not in _REF)
        digest = hashlib.blake2b(repr((name, key, said_beside)).encode(), digest_size=8)
        digest.update(payload)
        said = digest.digest()
        earlier = self._equal.get((topic, said), 0)
        self._equal[topic, said] = earlier + 1
        return f"{self.context.name}{topic}@{self._task}.{said.hex()}.{earlier}"

    def _names(self, topic: Topic, batch: pa.RecordBatch) -> list[str]:
        """Where each row goes. A value that makes no name is a bad row; without columns in it, `topic` is a wrong setting."""
        template = Template(self.config.topic)
        found = template.names(topic, batch)
        names: list[str] = found.to_pylist()
        wrong = [name for name in set(names) if not NAME.fullmatch(name)]
        hint = 'a topic is /namespace/name, of letters, digits, _ and -: set `topic`, such as "/default/orders"'
        if wrong and template.columns:
            what = f"a value of the row makes no topic of Danube's by `topic` = {self.config.topic!r}"
            refuse_rows(pc.is_in(found, pa.array(wrong, found.type)), what, hint)
        if wrong:
            raise ConfigError(f"{wrong[0]!r} is no topic of Danube's", code="PEN-1016", hint=hint)
        return names

    def _binding(self, name: str, context: TopicContext) -> Binding | None:
        """The schema that messages of a topic name; asked for once in each epoch."""
        if name in self._bindings:
            return self._bindings[name]
        found: Binding | None = None
        written = context.encoder.schema if context.encoder is not None else None
        if self.config.schema_subject is not None:
            registry = DanubeRegistry(self.config)
            if self.config.schema_type is not None and not registry.versions(self.config.schema_subject):
                registry.register_schema(self.config.schema_subject, WireSchema(self.config.schema_type, ""))
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


def _carried(attributes: Sequence[tuple[str, str | None]], beside: Collection[str]) -> dict[str, str]:
    """What goes on with a message: values that are there, and nothing that an earlier broker, or the message itself, says."""
    return {name: value for name, value in attributes if value is not None and name not in beside}


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
