"""Write topics to Kafka in transactions, each epoch exactly once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field, PositiveInt, field_validator

from penstock import failpoints, store
from penstock.connectors.kafka import files
from penstock.connectors.kafka.clears import Clears
from penstock.connectors.kafka.client import Cluster, ClusterConfig
from penstock.connectors.kafka.limits import Limits
from penstock.connectors.kafka.publish import Publisher
from penstock.connectors.kafka.read import peek
from penstock.connectors.kafka.rows import as_messages
from penstock.connectors.kafka.send import epoch_header
from penstock.connectors.kafka.shards import Shards, ShardWork, publish_shard, publisher_of
from penstock.connectors.kafka.staging import (
    STAGING_PARTITIONS,
    FileStage,
    KafkaReceipt,
    Stage,
    TopicStage,
    forget,
    located,
    staged,
)
from penstock.connectors.kafka.undecided import Undecided
from penstock.errors import ConfigError, ConnectorError, DataError, FatalError, StagingLost
from penstock.sink import (
    Applied,
    CommittedEpoch,
    Epoch,
    EpochSink,
    Positions,
    SinkConnectorCapabilities,
    SinkContext,
    Task,
    Topic,
    Work,
    WriteResult,
    is_committed,
)
from penstock.source import Finding, HealthStatus

MARKER_SETTINGS = {
    "cleanup.policy": "compact",
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.01",  # else a week of epochs is read at each start
}
STAGING_SETTINGS = {"cleanup.policy": "delete", "max.message.bytes": str(100 << 20)}


class KafkaSinkConfig(ClusterConfig):
    topic: str = "{topic}"
    """The Kafka topic; `{topic}` is the pipeline's topic with dots for slashes: `/lake/orders` is `lake.orders`."""

    mode: Literal["append", "upsert", "changes"] = "append"
    """
    `append` writes each row. `upsert` writes the newest row of a key under the key, and a delete as a tombstone, for compacted
    topics. `changes` writes each change with its change columns, or in Debezium's envelope, by the topic's `[[schemas]]`.
    """

    key: tuple[str, ...] = ()
    """Columns that make the record's key; none: the topic's own key. One column is written as text, several as a JSON object."""

    create: bool = True
    """Make topics that do not exist; `false`: such a topic stops the pipeline."""

    partitions: Annotated[int, Field(ge=-1)] = -1
    """Partitions of topics that are made; -1: the broker's default."""

    replication: Annotated[int, Field(ge=-1)] = -1
    """Replicas of topics that are made; -1: the broker's default."""

    topic_config: Mapping[str, str | int | float | bool] = {}
    """Settings of topics that are made, such as `{ "cleanup.policy" = "compact" }`."""

    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "lz4"
    """How batches of records are compressed."""

    headers: bool = False
    """Add the headers `penstock.epoch` (pipeline, incarnation and number) and `penstock.row` (the row's place in the epoch)."""

    partitioner: Literal["murmur2", "crc32", "fnv1a"] = "murmur2"
    """How keys choose partitions: `murmur2` as Java clients do, `crc32` as other clients of librdkafka, `fnv1a` as Sarama."""

    partition_column: str = ""
    """A column of whole numbers that names each row's partition; none: the key chooses. It stays in the value."""

    keep_timestamps: bool = False
    """
    Give records the time that they came with (`timestamp` of messages that are forwarded as they came, else the column
    `_timestamp`), not that of their publishing. Rows are then sent one by one, which takes longer.
    """

    publish_in_tasks_bytes: Annotated[int, Field(ge=0)] = 128 << 20
    """
    An epoch with more bytes is published by several tasks, each in a transaction of its own: all rows of a key are in one of
    them, and readers see the parts of the epoch one after the other. A smaller one is visible at once.
    """

    transaction_timeout_ms: Annotated[PositiveInt, Field(ge=1000)] = 300_000
    """The longest time that publishing an epoch may take; not over the broker's `transaction.max.timeout.ms`."""

    marker_topic: str = ""
    """
    Where the sink records which epochs are in Kafka, and its transactional id; none: `_penstock.`, the pipeline's name and a hash
    of `topic`. No two sinks may share it. With `staging = "topic"` rows wait for their commit in a topic of this name with
    `.staging` added.
    """

    staging: str = ""
    """
    Where rows wait for their commit: `topic`, or a directory or an address in an object store that the driver and all tasks
    reach; none: the pipeline's state directory if its tasks run on the driver's machine, else a topic.
    """

    storage_options: store.StorageOptions = Field(default_factory=dict)
    """Region, endpoint and credentials of the object store that `staging` names; see `docs/object-stores.md`."""

    def dataset(self, name: str) -> tuple[str, str]:
        """How lineage tools call the Kafka topic of a topic."""
        return super().dataset(self.topic_of(name))

    def topic_of(self, topic: Topic) -> str:
        """The Kafka topic of a topic."""
        return self.topic.replace("{topic}", topic.strip("/").replace("/", "."))

    def place_of(self, topic: Topic) -> str:
        """
        What no two topics may share. That is the Kafka topic in `upsert`, since the rows of the one would replace those of the
        other under the same keys, and where `topic` promises each its own.
        """
        return self.topic_of(topic) if self.mode == "upsert" or "{topic}" in self.topic else topic

    def markers(self, pipeline: str) -> str:
        """The topic with the markers of a pipeline."""
        if self.marker_topic:
            return self.marker_topic
        digest = hashlib.sha256(f"{pipeline}\0{self.topic}".encode()).hexdigest()[:8]
        return f"_penstock.{re.sub(r'[^a-zA-Z0-9._-]', '-', pipeline)[:180]}.{digest}"

    def claims(self, pipeline: str) -> tuple[Sequence[str], str]:
        """What two sinks of a pipeline cannot share: their producers would fence each other; and the way to avoid it."""
        topic, servers = self.markers(pipeline), (each.strip() for each in self.bootstrap_servers.split(","))
        return [
            f"the marker topic {topic!r} of kafka://{each}" for each in servers
        ], "set `marker_topic` in one of them"

    @field_validator("marker_topic")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if name and not re.fullmatch(r"[a-zA-Z0-9._-]{1,240}", name):
            raise ValueError("letters, digits, dots, dashes and underscores, at most 240")
        return name

    @field_validator("staging")
    @classmethod
    def _is_whole(cls, staging: str) -> str:
        if staging in ("", "topic") or store.is_object_url(staging) or Path(staging).is_absolute():
            return staging
        raise ValueError('"topic", an absolute directory, or an address such as s3://bucket/staging')

    @field_validator("topic")
    @classmethod
    def _only_topic(cls, topic: str) -> str:
        if re.search(r"[{}]", topic.replace("{topic}", "")):
            raise ValueError("only {topic} can be in braces")
        return topic


class KafkaSink(EpochSink[KafkaSinkConfig, KafkaReceipt]):
    """
    Tasks encode rows and stage them in files, or on a cluster in a Kafka topic of their own; the driver publishes an epoch
    and its marker in one transaction, after it has fenced every earlier producer. Tasks publish large epochs, in one
    transaction each.

    Supports exactly-once for consumers with `isolation.level = read_committed`: they see each row once, the rows of a key in
    their order, and whole epochs unless they are large. Others also see rows of transactions that are open or were aborted.
    """

    name = "kafka"
    capabilities = SinkConnectorCapabilities().with_exactly_once().with_two_phase_commit()

    def __init__(self, config: KafkaSinkConfig) -> None:
        super().__init__(config)
        promised = type(self).capabilities
        more = {"upsert": promised.with_upsert, "changes": promised.with_changelog}.get(config.mode)
        self.capabilities = more() if more else promised
        self._cluster: Cluster | None = None
        self._publisher: Publisher | None = None
        self._shards: Shards | None = None
        self._stage: Stage | None = None
        self._limits: dict[str, Limits] = {}
        self._undecided = Undecided()
        self._written: set[str] = set()
        self._overhead = 0

    def open(self, context: SinkContext = SinkContext()) -> None:
        self.close()
        super().open(context)
        self._cluster = Cluster(self.config)
        self._cluster.connect()

    def close(self) -> None:
        self._cluster = self._stage = None
        for each in (self._publisher, self._shards):
            if each is not None:
                each.close()
        self._publisher = self._shards = None
        self._limits = {}

    def check(self) -> Sequence[Finding]:
        cluster = Cluster(self.config)
        cluster.connect()
        findings = [Finding(True, f"the cluster at {self.config.bootstrap_servers} answers")]
        brokers = cluster.brokers()
        if self.config.create and self.config.replication > brokers:
            what = f"topics cannot be made with {self.config.replication} replicas: the cluster has {brokers} broker(s)"
            findings.append(Finding(True, what, "lower `replication` in the sink, or make the topics yourself"))
        return findings

    def health_check(self) -> HealthStatus:
        if self._cluster is None or self._publisher is None:
            return HealthStatus()
        place = self._publisher.name, 0
        try:
            _, ends = self._cluster.edges([place])
            found = self._cluster.describe(sorted(self._written))
            places = [(name, partition) for name, each in found.items() for partition in each.partitions]
            held = self._undecided.oldest(self._cluster, places)
        except ConnectorError as error:
            return HealthStatus.unhealthy(error.message)
        if place not in ends:
            return HealthStatus.degraded(f"the topic {place[0]!r} has no leader for now")
        if held is not None:
            return HealthStatus.degraded(
                f"a transaction is open in {held[0]}/{held[1]}, and consumers that read committed records see nothing after it"
            )
        return HealthStatus.healthy()

    def first_rows(self, topic: Topic, rows: int) -> pa.Table | None:
        name = self.config.topic_of(topic)
        found = self._asked.describe([name]).get(name)
        if found is None:
            return None
        begins, _ = self._asked.edges([(name, partition) for partition in found.partitions])
        records = [each for some in peek(self.config, True, begins, rows).values() for each in some]
        records.sort(key=lambda each: (each.timestamp()[1], each.partition(), each.offset()))
        return pa.Table.from_pylist([_shown(each) for each in records[:rows]], _SHOWN)

    # -- tasks ---------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._overhead = len(epoch_header(epoch)) + 100 if self.config.headers else 0
        if (directory := self._directory(epoch.pipeline)) is not None:
            self._stage = FileStage(self.config, directory, epoch, task)
            return
        staging = f"{self.config.markers(epoch.pipeline)}.staging"
        self._asked.require(staging, STAGING_PARTITIONS, STAGING_SETTINGS)
        self._stage = TopicStage(self.config, staging, self._asked.partitions(staging), epoch, task)

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        assert self._stage is not None, "begin_epoch comes first"
        limits = self._target(topic)
        messages = as_messages(batch, self.context.topic(topic), self.config)
        try:
            limits.refuse(messages, self._overhead)
        except DataError as error:
            if messages.batch.num_rows != batch.num_rows:
                error.rows = ()  # records are not rows here, so the runtime must find them
            raise
        self._stage.write(topic, limits.topic, messages)
        return WriteResult(batch.num_rows, messages.nbytes)

    def pre_commit(self, epoch: Epoch) -> KafkaReceipt:
        assert self._stage is not None, "begin_epoch comes first"
        stage, self._stage = self._stage, None
        smallest = min((each.message_bytes for each in self._limits.values()), default=0)
        return stage.finish().model_copy(update={"message_bytes": smallest})

    # -- driver --------------------------------------------------------------------------------------------------

    def commit_epoch(self, epoch: Epoch, receipts: Sequence[KafkaReceipt], end: Positions) -> None:
        topics = sorted({topic for receipt in receipts for topic in receipt.topics()})
        if not topics:
            return
        own = self.context.state_dir
        receipts = [each.model_copy(update={"staging": located(each.staging, own)}) for each in receipts]
        self._written |= {chunk.target for receipt in receipts for some in receipt.chunks.values() for chunk in some}
        publisher = self._published(epoch.pipeline)
        publisher.fit(receipts)
        if left := _left(publisher, epoch, topics):
            try:
                self._publish(publisher, epoch, left, receipts, end)
            except StagingLost:
                # A successor that committed the epoch while we were stopped has removed what it published.
                if _left(publisher, epoch, topics):
                    raise
        forget(self.config, self._asked, receipts)  # also after a run that died before it came to this

    def _publish(
        self,
        publisher: Publisher,
        epoch: Epoch,
        topics: Sequence[Topic],
        receipts: Sequence[KafkaReceipt],
        end: Positions,
    ) -> None:
        """All rows and a marker of each topic: visible at once, or what tasks have begun is finished."""
        assert self._shards is not None
        begun = self._shards.done(epoch)
        for work in self._shards.work(epoch, receipts) if begun else ():
            self._shards.publish(epoch, work)
        marker = CommittedEpoch(incarnation=epoch.incarnation, number=epoch.number, end=dict(end))
        clears = Clears(self.config, self._asked, receipts)  # before the transaction: it would wait for its own end
        with publisher.transaction(epoch) as sending:
            for topic in topics:
                for target, batch in clears.tombstones(topic):
                    sending.send(target, batch)
                for receipt in () if begun else receipts:
                    for target, batch in staged(self.config, receipt.staging, receipt.chunks.get(topic, ())):
                        sending.send(target, clears.after(topic, batch))
                publisher.mark(epoch.pipeline, topic, marker)
                failpoints.hit("commit.before")

    def plan_epoch(self, epoch: Epoch, receipts: Sequence[KafkaReceipt]) -> Sequence[Work]:
        size = sum(chunk.bytes for receipt in receipts for chunks in receipt.chunks.values() for chunk in chunks)
        topics = sorted({topic for receipt in receipts for topic in receipt.topics()})
        if not topics or size < self.config.publish_in_tasks_bytes or any(receipt.cleared for receipt in receipts):
            return ()  # a truncate is of all keys, and so of no shard
        publisher = self._published(epoch.pipeline)
        publisher.fit(receipts)
        if not _left(publisher, epoch, topics):
            return ()
        assert self._shards is not None
        self._shards.make_topic(epoch, MARKER_SETTINGS)
        return self._shards.work(epoch, receipts)

    def apply(self, epoch: Epoch, work: Work, task: Task) -> Applied:
        assert isinstance(work, ShardWork)
        if self.context.state_dir is None and work.is_beside_the_driver:
            return Applied(topic=work.topic)  # the driver publishes it at the commit
        work = work.located(self.context.state_dir)
        # Only looked at: the driver's is the one that writes.
        main = Publisher(self.config, self._asked, work.marker_topic)
        own = publisher_of(self.config, self._asked, work.marker_topic, work.shard)
        try:
            publish_shard(self.config, own, main, epoch, work)
        except StagingLost:
            # As at the commit: another run that has published it has removed it too.
            if (found := main.seen().get((epoch.pipeline, work.topic))) is None or not is_committed(found, epoch):
                raise
        finally:
            own.close()
        return Applied(topic=work.topic)

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        return self._published(pipeline).markers().get((pipeline, topic))

    def sweep(self, epoch: Epoch, keep: Sequence[KafkaReceipt]) -> None:
        """In a topic, what dead tries staged goes with the next commit, or with the topic's retention."""
        named = {chunk.name for receipt in keep for chunks in receipt.chunks.values() for chunk in chunks}
        # `staging` may be another one than when it was staged.
        for directory in {self._directory(epoch.pipeline), self.context.state_dir}:
            if directory is not None:
                files.sweep(directory, epoch, named)

    def _directory(self, pipeline: str) -> store.Place | None:
        """Where files are staged; None: rows are staged in a topic."""
        if self.config.staging == "topic":
            return None
        if self.config.staging:
            cluster = hashlib.sha256(self.config.bootstrap_servers.encode()).hexdigest()[:8]
            name = f"{self.config.markers(pipeline)}.{cluster}"  # two clusters may have a topic of one name
            return store.at(self.config.staging, self.config.storage_options) / name
        return self.context.state_dir

    # -- topics --------------------------------------------------------------------------------------------------

    @property
    def _asked(self) -> Cluster:
        assert self._cluster is not None, "the sink is not open"
        return self._cluster

    def _published(self, pipeline: str) -> Publisher:
        """The publisher of a pipeline; only the driver has one, since making it fences all others."""
        name = self.config.markers(pipeline)
        if self._publisher is not None and (self._publisher.name, self._publisher.pipeline) != (name, pipeline):
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            self._asked.require(name, 1, MARKER_SETTINGS)
            self._publisher = Publisher(self.config, self._asked, name, pipeline=pipeline)
            self._shards = Shards(self.config, self._asked, self._publisher)
        return self._publisher

    def _target(self, topic: Topic) -> Limits:
        """The Kafka topic of a topic, made if it does not exist; in a task, before anything is staged for it."""
        name = self.config.topic_of(topic)
        if name in self._limits:
            return self._limits[name]
        for other in self.context.topics:
            if other != topic and self.config.place_of(other) == self.config.place_of(topic):
                raise ConfigError(
                    f"the topics {other} and {topic} meet in the Kafka topic {name!r}",
                    code="PEN-1011",
                    hint="put {topic} into the sink's `topic`, and let `to` of their routes differ in more than . and /",
                )
        if not re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name) or name in (".", ".."):
            raise ConfigError(
                f"{name!r} cannot be the name of a Kafka topic",
                code="PEN-1010",
                hint="letters, digits, dots, dashes and underscores, at most 249: correct the route's `to` or the sink's `topic`",
            )
        if name not in self._asked.describe([name]):
            if not self.config.create:
                raise FatalError(
                    f"there is no topic {name!r}", code="PEN-5010", hint="create it, or leave `create = false` out"
                )
            settings = {key: _text(value) for key, value in self.config.topic_config.items()}
            self._asked.require(name, self.config.partitions, settings, self.config.replication)
        self._limits[name] = Limits.of(self._asked, name)
        return self._limits[name]


def _left(publisher: Publisher, epoch: Epoch, topics: Sequence[Topic]) -> list[Topic]:
    """The topics whose rows of an epoch are not in Kafka yet."""
    markers = publisher.markers()
    return [topic for topic in topics if not is_committed(markers.get((epoch.pipeline, topic)), epoch)]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_SHOWN = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", "UTC")),
        ("key", pa.string()),
        ("value", pa.string()),
    ]
)


def _shown(record: Any) -> dict[str, Any]:
    """A record for people; bytes that are no text are shown by their codes."""
    at = record.timestamp()[1]
    texts = {"key": record.key(), "value": record.value()}
    return {
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp": at if at >= 0 else None,
        **{name: each and each.decode(errors="backslashreplace") for name, each in texts.items()},
    }
