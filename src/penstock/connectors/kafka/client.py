"""Clients of a Kafka cluster: settings, what its errors mean, topics and their offsets."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec
from pydantic import ValidationInfo, field_validator

from penstock.config import Config, Secret, base_of, beside
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError

Place = tuple[str, int]
"""A topic and one of its partitions."""

Option = Secret | bool | int | float | str

ANSWER_SECS = 15.0
"""How long an answer of the cluster is awaited; beside a broker that restarts it comes later than usual."""

OURS = frozenset({
    "bootstrap.servers", "group.id", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof", "isolation.level",
    "transactional.id", "transaction.timeout.ms", "enable.idempotence", "partitioner", "enable.auto.offset.store", "acks",
    "request.required.acks",
})  # fmt: skip
"""Settings on which the guarantees rest, or that have an option of their own."""

_CREDENTIALS = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.ILLEGAL_SASL_STATE,
)
_RIGHTS = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
_UNKNOWN_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
_FATAL = (
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.POLICY_VIOLATION,
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.UNSUPPORTED_VERSION,
)
_WAYS_ON = {
    KafkaError.INVALID_CONFIG: "correct `topic_config` in the sink, or make the topic yourself",
    KafkaError.INVALID_REPLICATION_FACTOR: "lower `replication` in the sink, or make the topic yourself",
    KafkaError.INVALID_PARTITIONS: "correct `partitions` in the sink, or make the topic yourself",
    KafkaError.POLICY_VIOLATION: "the brokers have rules for new topics: correct `partitions`, `replication` and `topic_config`",
    KafkaError.UNSUPPORTED_VERSION: "update the brokers",
}
_NOT_TAKEN = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD)
"""What tasks look at before they stage rows (see `limits`)."""


_REFUSED_CERTIFICATE = re.compile(r"SSL alert number (4[2-68]|116)\b")
"""TLS alerts about a certificate, which only the other side sends."""


_SECRETS = re.compile(r"password|secret|passphrase|key\.pem$")
_FILES = re.compile(r"\.(location|file|keytab)$")
"""Settings that name files. `ssl.ca.location` may also be `probe`: the library looks for the system's certificates itself."""


_TIMES = re.compile(r" \(after \d+ms in state \w+(?:, \d+ identical error\(s\) suppressed)?\)")


def _without_times(told: str) -> str:
    """What the client said, without what differs each time that it says so."""
    return _TIMES.sub("", told)


class ClusterConfig(Config):
    """What source and sink share."""

    identity: ClassVar[frozenset[str]] = frozenset({"topics", "topic", "mode", "key"})

    bootstrap_servers: str
    """Some brokers of the cluster: `b1:9092,b2:9092`."""

    options: Mapping[str, Option] = {}
    """
    Settings of librdkafka by their own names, such as `{ "security.protocol" = "SASL_SSL", "sasl.mechanism" = "PLAIN",
    "sasl.username" = "app", "sasl.password" = { env = "KAFKA_PASSWORD" }, "ssl.ca.location" = "ca.pem" }`. Secrets are
    references, and files relative to the pipeline file. Settings on which the guarantees rest are refused.
    """

    @field_validator("options")
    @classmethod
    def _not_ours(cls, options: Mapping[str, Option], info: ValidationInfo) -> Mapping[str, Option]:
        for name, value in options.items():
            if name in OURS or name.endswith("_cb"):
                raise ValueError(f"{name!r} cannot be set: Penstock sets it itself, or it has an option of its own")
            if isinstance(value, str) and _SECRETS.search(name):
                raise ValueError(f'{name!r} is a secret: give a reference, {{ env = "NAME" }} or {{ file = "path" }}')
        base = base_of(info)
        return {
            name: beside(base, value) if isinstance(value, str) and _FILES.search(name) and value != "probe" else value
            for name, value in options.items()
        }

    def dataset(self, name: str) -> tuple[str, str]:
        """How lineage tools call a topic: `kafka://broker:port` and its name."""
        return f"kafka://{self.bootstrap_servers.partition(',')[0].strip()}", name

    def settings(self, **more: Any) -> dict[str, Any]:
        """What a client is made from; called where it is used, since it holds secrets."""
        for name, value in self.options.items():
            if isinstance(value, str) and _FILES.search(name) and value != "probe" and not os.path.exists(value):
                raise ConfigError(
                    f"`{name}` in `options` names {value}, and there is no such file",
                    code="PEN-1016",
                    hint="correct the path; on a cluster the file must be there on every machine",
                )
        given = {name: each.reveal() if isinstance(each, Secret) else each for name, each in self.options.items()}
        own = {name.replace("_", "."): value for name, value in more.items()}
        quiet = {"log_level": 0, "client.id": "penstock", "socket.keepalive.enable": True}
        return {**quiet, **own, **given, "bootstrap.servers": self.bootstrap_servers}


NO_ID = ("", "None", "A" * 22)
"""What an old broker gives for a topic's id: nothing, or zeros."""


@dataclass(frozen=True)
class TopicInfo:
    """A topic as the cluster has it now."""

    id: str
    partitions: tuple[int, ...]
    has_leaders: bool = True


def failure(error: KafkaError, what: str) -> ConnectorError:
    """What an error of the client means for the pipeline. Its own `retriable()` knows only part of it."""
    code, text = error.code(), f"{what}: {error.str()} ({error.name()})"
    if code in _CREDENTIALS:
        return ConfigError(
            f"the brokers refused the credentials: {text}",
            code="PEN-1016",
            hint="check `sasl.mechanism`, `sasl.username` and `sasl.password` (or the token's settings) in `options`",
        )
    if code == KafkaError._SSL:
        return ConfigError(
            f"the TLS connection failed: {text}",
            code="PEN-1016",
            hint="check `ssl.ca.location`, the host name that the certificate is for, and the client's certificate",
        )
    if code in _RIGHTS:
        return FatalError(f"the user may not do this: {text}", hint="grant the missing rights (ACLs) to the user")
    if code in (KafkaError._INVALID_ARG, KafkaError._CONFLICT, KafkaError._NOT_IMPLEMENTED):
        return ConfigError(text, code="PEN-1016", hint="correct `options`")
    if code in _UNKNOWN_TOPIC:
        return FatalError(text, code="PEN-5010", hint="was the topic deleted?")
    if code in _NOT_TAKEN:
        return FatalError(
            text,
            hint="the topic takes less than when the rows were staged: raise its settings again, or leave such rows out "
            "with `penstock offsets restage FILE`",
        )
    if code in _FATAL:
        return FatalError(text, hint=_WAYS_ON.get(code, ""))
    timed_out = code in (KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT, KafkaError._MSG_TIMED_OUT)
    return RetryableError(text, code="PEN-2003" if timed_out else "PEN-2001")


def lost(what: str, next: str = "the first records that are there") -> FatalError:
    """Records that the position counts on are not there any more; `next`: what would be read if losses were accepted."""
    return FatalError(
        f"{what}; records that were not read yet cannot be read any more",
        code="PEN-5011",
        hint=f'set on_lost = "earliest" to go on with {next}, or start over with `penstock offsets reset FILE`',
    )


def not_known(topic: str) -> RetryableError:
    """A topic that was just seen or made: another broker may hear of it a moment later."""
    return RetryableError(f"not every broker knows the topic {topic!r} yet", code="PEN-2007")


@contextmanager
def errors(what: str) -> Iterator[None]:
    """Turn the client's exceptions into ours."""
    try:
        yield
    except KafkaException as error:
        raise failure(error.args[0], what) from None


class Cluster:
    """Questions about topics and offsets; one client, not fork-safe: made in the process that asks."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._told: deque[KafkaError] = deque(maxlen=50)
        with errors("the client cannot be made"):
            # By default the client believes for five minutes that a broker which is gone has the answers.
            fresh = {"topic.metadata.refresh.interval.ms": 2000}
            held = [AdminClient({**fresh, **config.settings(), "error_cb": self._told.append})]
        self._held = held
        weakref.finalize(self, _let_go, held).atexit = False

    def connect(self) -> None:
        """The first question: tells wrong credentials from a cluster that is not there."""
        until = time.monotonic() + ANSWER_SECS
        while True:
            try:
                self.client.list_topics(timeout=1.0)
                return
            except KafkaException as error:
                self.client.poll(0)
                for each in self._told:
                    if isinstance(found := failure(each, "cannot connect"), ConfigError):
                        raise found from None
                    if _REFUSED_CERTIFICATE.search(each.str()):
                        raise ConfigError(
                            f"the brokers refused the client's certificate, or want one: {each.str()}",
                            code="PEN-1016",
                            hint="set `ssl.certificate.location` and `ssl.key.location` in `options` to one that they trust",
                        ) from None
                if time.monotonic() > until:
                    told = (
                        "; ".join(dict.fromkeys(_without_times(each.str()) for each in self._told))
                        or error.args[0].str()
                    )
                    raise RetryableError(
                        f"no broker of {self._config.bootstrap_servers} answers: {told}",
                        code="PEN-2001",
                        hint="does `security.protocol` in `options` fit the listener of this address?"
                        if "SSL" in told
                        else "is it running and reachable from here, and does `security.protocol` in `options` fit its listener?",
                    ) from None

    def brokers(self) -> int:
        """How many there are."""
        with errors("cannot list the brokers"):
            return len(self.client.list_topics(timeout=ANSWER_SECS).brokers)

    def names(self) -> list[str]:
        """All topics."""
        with errors("cannot list the topics"):
            return sorted(self.client.list_topics(timeout=ANSWER_SECS).topics)

    def describe(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """Id and partitions of the topics that exist. A topic that was made again has another id."""
        if not names:
            return {}
        with errors("cannot describe the topics"):
            asked = self.client.describe_topics(TopicCollection(list(names)), request_timeout=ANSWER_SECS)
        found = {}
        for name, future in asked.items():
            try:
                answer = future.result()
            except KafkaException as error:
                if error.args[0].code() in _UNKNOWN_TOPIC:
                    continue
                if error.args[0].code() == KafkaError._TIMED_OUT:
                    self.names()  # the broker that it waited for is gone: learn which one there is now
                raise failure(error.args[0], f"cannot describe the topic {name!r}") from None
            # Without a leader for now, a partition is still there.
            led = all(each.leader is not None and each.leader.id >= 0 for each in answer.partitions)
            found[name] = TopicInfo(str(answer.topic_id), tuple(sorted(each.id for each in answer.partitions)), led)
        return found

    def require(self, name: str, partitions: int, settings: Mapping[str, str], replication: int = -1) -> None:
        """Make a topic if it does not exist."""
        if name not in self.describe([name]):
            self.create(name, partitions, replication, settings)

    def create(self, name: str, partitions: int, replication: int, settings: Mapping[str, str]) -> None:
        """Make a topic, unless somebody else just did, and wait until it has leaders."""
        new = NewTopic(name, partitions, replication, config=dict(settings))
        with errors(f"cannot create the topic {name!r}"):
            asked = self.client.create_topics([new], operation_timeout=ANSWER_SECS, request_timeout=ANSWER_SECS)
            try:
                asked[name].result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
        until, pause = time.monotonic() + ANSWER_SECS, threading.Event()
        # By this question and not by its offsets: the client remembers for a while that it found no leader.
        while not (found := self.describe([name]).get(name)) or not found.has_leaders:
            if time.monotonic() > until:
                raise RetryableError(f"the new topic {name!r} has no leader yet", code="PEN-2007")
            pause.wait(0.02)

    def settings(self, topic: str) -> dict[str, str]:
        """The settings of a topic as they are now."""
        asked = self.client.describe_configs(
            [ConfigResource(ConfigResource.Type.TOPIC, topic)], request_timeout=ANSWER_SECS
        )
        with errors(f"cannot ask for the settings of the topic {topic!r}"):
            try:
                (found,) = (future.result() for future in asked.values())
            except KafkaException as error:
                if error.args[0].code() in _UNKNOWN_TOPIC:
                    raise not_known(topic) from None
                raise
        return {name: str(each.value) for name, each in found.items()}

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has that was just seen or made."""
        found = self.describe([topic]).get(topic)
        if found is None:
            raise not_known(topic)
        return len(found.partitions)

    def edges(self, places: Iterable[Place], committed: bool = True) -> tuple[dict[Place, int], dict[Place, int]]:
        """
        First offset and end of each partition; one that has no leader for now is in neither.

        `committed`: the end is the last stable offset, before which nothing is undecided; else the high watermark.
        """
        places = list(places)
        first = self._ask(places, OffsetSpec.earliest(), committed)
        end = self._ask(places, OffsetSpec.latest(), committed)
        firsts, ends = _answers(first), _answers(end)
        both = firsts.keys() & ends.keys()
        if len(both) < len(places):
            self.names()  # else the client goes on believing for a while that there is no leader
        return {place: firsts[place] for place in both}, {place: ends[place] for place in both}

    def at(self, places: Iterable[Place], timestamp_ms: int) -> dict[Place, int]:
        """The first offset of each partition that is not older than a time; -1: there is none."""
        return _answers(self._ask(list(places), OffsetSpec.for_timestamp(timestamp_ms), True))

    def _ask(self, places: Sequence[Place], what: OffsetSpec, committed: bool) -> dict[Place, Future[Any]]:
        if not places:
            return {}
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        with errors("cannot ask for offsets"):
            asked = self.client.list_offsets(
                {TopicPartition(*place): what for place in places},
                isolation_level=isolation,
                request_timeout=ANSWER_SECS,
            )
        return {(each.topic, each.partition): future for each, future in asked.items()}

    @property
    def client(self) -> AdminClient:
        """The client, once it has heard what happened meanwhile: without that it renews no token of its own making."""
        self._held[0].poll(0)
        return self._held[0]


def _let_go(held: list[AdminClient]) -> None:
    """
    Free a client, but never in one of its own threads: the library would end the process.

    A failed answer refers to the frames that it passed, and so to the client. The last to hold it, or the one in which the
    garbage collector runs, may be the client's own thread that delivers answers.
    """
    if isinstance(threading.current_thread(), threading._DummyThread):  # one that Python did not start
        threading.Thread(target=held.clear, name="penstock-kafka-close", daemon=True).start()
    else:
        held.clear()


_NO_LEADER = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError._NOENT,
    *_UNKNOWN_TOPIC,  # of a partition that not every broker knows of yet
)


def _answers(asked: Mapping[Place, Future[Any]]) -> dict[Place, int]:
    wait(asked.values(), ANSWER_SECS + 5)
    found = {}
    for place, future in asked.items():
        try:
            if (offset := int(future.result(0).offset)) >= -1:  # less: its leader went while it was asked
                found[place] = offset
        except KafkaException as error:
            if error.args[0].code() not in _NO_LEADER:
                raise failure(error.args[0], f"cannot ask for the offsets of {place[0]!r}") from None
        except TimeoutError:
            raise RetryableError("no answer about offsets", code="PEN-2003") from None
    return found


READING = {
    "group.id": "penstock",  # the client wants one; nothing is committed to it
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.queue.backoff.ms": 5,  # by default a reader waits a second each time its queue was full
    "fetch.wait.max.ms": 10,  # after a control record the end comes only with the next fetch
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 65_536,
    "fetch.message.max.bytes": 8 << 20,
    "check.crcs": True,
}
"""Settings of every reader of a range."""


def is_of_group(error: KafkaError) -> bool:
    """True of an error that is none: each reader looks for a group that it does not use, and need not have a right to it."""
    return bool(error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED)


def reading(config: ClusterConfig, committed: bool = True, **more: Any) -> dict[str, Any]:
    """The settings of a reader that is assigned partitions and offsets, and commits nothing by itself."""
    own = {name.replace("_", "."): value for name, value in more.items()}
    isolation = "read_committed" if committed else "read_uncommitted"
    return {**READING, **config.settings(), **own, "isolation.level": isolation}


def consumer(config: ClusterConfig, committed: bool = True, **more: Any) -> Consumer:
    """A reader with those settings."""
    with errors("the consumer cannot be made"):
        return Consumer(reading(config, committed, **more))
