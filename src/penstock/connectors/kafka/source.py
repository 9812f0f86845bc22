"""Read Kafka topics as ranges of offsets."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.connectors.kafka.client import NO_ID, Cluster, ClusterConfig, Place, TopicInfo
from penstock.connectors.kafka.group import Group
from penstock.connectors.kafka.position import KafkaSplit, Offsets, Piece, Sizes, packed, shares
from penstock.connectors.kafka.read import Reader
from penstock.connectors.kafka.topics import Topics, is_read, matching, no_leader
from penstock.connectors.kafka.undecided import Undecided
from penstock.connectors.kafka.watch import Watch
from penstock.durable import Json
from penstock.errors import ConfigError, RetryableError
from penstock.source import (
    ENVELOPE_SCHEMA,
    ConnectorMetrics,
    Finding,
    HealthStatus,
    Note,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceContext,
)


class StartAt(BaseModel):
    """`{ timestamp = 2026-05-01T00:00:00Z }` or `{ group = "billing" }`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timestamp: datetime | None = None
    group: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> StartAt:
        if (self.timestamp is None) == (self.group is None):
            raise ValueError('give { timestamp = … } or { group = "…" }')
        if self.timestamp is not None and self.timestamp.tzinfo is None:
            raise ValueError("give the time zone too: 2026-05-01T00:00:00Z")
        return self


class KafkaConfig(ClusterConfig):
    topics: Annotated[tuple[str, ...], Field(min_length=1)]
    """
    Topics to read. A name that begins with `^` is a regular expression for whole names; topics that come later join in.
    Topics whose names begin with `_` are Kafka's own or ours, and only read by their whole name.
    """

    start: Literal["earliest", "latest"] | StartAt = "earliest"
    """
    Where a first run begins: at the first records, after the last ones, at a time (`{ timestamp = 2026-05-01T00:00:00Z }`) or
    where a consumer group is (`{ group = "billing" }`; partitions without a commit begin at their first record). Partitions
    and topics that come later always begin at their first record.
    """

    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """
    `read_uncommitted` also reads rows of transactions that are open or were aborted, each once: what a producer wrote, gave up
    and wrote again comes twice.
    """

    on_lost: Literal["stop", "earliest"] = "stop"
    """
    What to do when records that were not read yet are gone: retention removed them, the topic was deleted or made again, or a
    partition lost its last records. `earliest` goes on with the first records that are there, in the last case with those that
    come next, and counts what is lost.
    """

    group_id: str = ""
    """A consumer group to which offsets are committed after each epoch, for the tools that watch lag. They are never read."""

    headers: bool = True
    """Read the headers of records, as `attributes`. Without them reading takes less time."""

    def reads(self, namespace: str, name: str) -> bool:
        """Whether a topic, as lineage tools call it, is one that is read."""
        servers = (f"kafka://{each.strip()}" for each in self.bootstrap_servers.split(","))
        return namespace in servers and is_read(self.topics, name)

    @field_validator("topics")
    @classmethod
    def _patterns(cls, topics: tuple[str, ...]) -> tuple[str, ...]:
        for each in topics:
            try:
                re.compile(each)
            except re.error as error:
                raise ValueError(f"{each!r} is no regular expression: {error}") from None
        return topics


class Kafka(RangeSource[KafkaConfig, Offsets]):
    """
    A position is the next offset of each partition, with the id of its topic; a range is half open.

    Supports exactly-once: under `read_committed` a range ends at the last stable offset, before which nothing is undecided,
    so it always holds the same records. Of a compacted topic it holds fewer of them later, and the same last one of each key.
    """

    name = "kafka"

    def __init__(self, config: KafkaConfig) -> None:
        super().__init__(config)
        self.begins_now = config.start != "earliest"
        self._began: Offsets | None = None
        self._opened: Topics | None = None
        self._parallelism = 1
        self._left: dict[Place, tuple[int, int]] = {}
        """What is there and not planned: the next offset, and how many there are."""
        self._is_planned = False
        self._lag_secs = 0.0
        self._sizes = Sizes()
        self._watch: Watch | None = None
        self._group: Group | None = None
        self._unshown = ""
        self._undecided = Undecided()

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        self._opened = topics = Topics(self.config)
        self._parallelism = context.parallelism
        if context.in_task:
            return
        self._group = Group(topics.cluster, self.config.group_id) if self.config.group_id else None
        topics.cluster.connect()
        topics.look()
        missing = [name for name in self.config.topics if not name.startswith("^") and name not in topics.known]
        if missing and self.config.on_lost == "stop":
            raise ConfigError(
                f"there is no topic {missing[0]!r}",
                code="PEN-1016",
                hint="create it, or correct `topics`; a pattern such as ^orders$ waits for its topics",
            )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._group = self._opened = self._watch = self._began = None

    def check(self) -> Sequence[Finding]:
        cluster = Cluster(self.config)
        cluster.connect()
        found = cluster.describe(matching(self.config.topics, cluster))
        missing = [name for name in self.config.topics if not name.startswith("^") and name not in found]
        findings = [Finding(False, f"there is no topic {name!r}", "create it, or correct `topics`") for name in missing]
        count = sum(len(each.partitions) for each in found.values())
        if found:
            findings.append(Finding(True, f"{len(found)} topics with {count} partitions"))
        elif not missing:
            findings.append(
                Finding(True, "no topic matches yet", "correct `topics`, unless the topics are still to be made")
            )
        return [*findings, *_seldom_meant(self.config, cluster, found)]

    def schema(self) -> Schemas:
        """Records stay as they are until the topic's `[[schemas]]` entry decodes them."""
        return dict.fromkeys(self._opened.known if self._opened else (), ENVELOPE_SCHEMA)

    # -- ranges --------------------------------------------------------------------------------------------------

    def initial(self) -> Offsets:
        if self.begins_now and self._began is not None:
            return self._began
        topics = self._topics
        topics.look()
        start = self.config.start
        if start == "earliest":
            self._began = Offsets.of(topics.ids, topics.edges(topics.places())[0])
        elif start == "latest":
            self._began = Offsets.of(topics.ids, topics.all_edges()[1])
        elif start.timestamp is not None:
            self._began = self.position_at(start.timestamp)
        else:
            first, _ = topics.all_edges()
            found = topics.not_beyond(Group(topics.cluster, str(start.group)).offsets(first))
            self._began = Offsets.of(topics.ids, {**first, **found})
        return self._began

    def position_at(self, when: datetime) -> Offsets:
        """The first records that are not older than `when`, by their own timestamps."""
        topics = self._topics
        topics.look()
        first, end = topics.all_edges()
        found = topics.cluster.at(first, int(when.timestamp() * 1000))
        if first.keys() - found.keys():
            raise RetryableError("a partition has no leader for now", code="PEN-2001")
        begin = {place: end[place] if found[place] < 0 else found[place] for place in first}
        return Offsets.of(topics.ids, begin)

    def latest(self, start: Offsets, limit: ReadLimit) -> Offsets:
        self._parallelism = limit.parallelism
        topics = self._topics
        topics.look()
        topics.require_all(start)
        first, end = topics.edges(topics.places())
        begin: dict[Place, int] = {}
        for place, lowest in first.items():
            known = start.next_of(place[0], topics.ids[place[0]], place[1])
            begin[place] = lowest if known is None else topics.not_lost(place, known, lowest, end[place])
        until = limit.until if isinstance(limit.until, Offsets) else None
        if until is not None:
            bounds = {place: until.next_of(place[0], topics.ids[place[0]], place[1]) for place in begin}
            end = {place: end[place] if (b := bounds[place]) is None else min(end[place], b) for place in begin}
            begin = {place: offset for place, offset in begin.items() if bounds[place] is not None}
        backlog = {place: max(0, end[place] - offset) for place, offset in begin.items()}
        taken = self._within(backlog, begin, limit)
        topics.require_leaders(start, limit, first, any(taken.values()))
        ends = {place: offset + taken[place] for place, offset in begin.items()}
        self._left = {place: (ends[place], left) for place in ends if (left := backlog[place] - taken[place])}
        self._is_planned = True
        if self._watch is not None and until is None:
            self._watch.planned({place: ends[place] for place in ends if place not in self._left}, bool(self._left))
        for place, offset in start.places():  # what has no leader for now stays where it is
            if start.topics[place[0]].id == topics.ids.get(place[0]):
                ends.setdefault(place, offset)
        return Offsets.of(topics.ids, ends)

    def _within(self, backlog: Mapping[Place, int], begin: Mapping[Place, int], limit: ReadLimit) -> dict[Place, int]:
        """How many offsets of each partition an epoch takes, by the rows and bytes that it may have."""
        taken = shares(backlog, limit.rows)
        if limit.bytes is None or not any(taken.values()):
            return taken
        unknown = [place for place in taken if taken[place] and place[0] not in self._sizes]
        if unknown:
            found = self._topics.peek({place: begin[place] for place in unknown}, backlog, 100)
            self._sizes.peeked({place: [(m.offset(), _size(m)) for m in some] for place, some in found.items()}, begin)
        size = self._sizes.of(taken)
        return taken if size <= limit.bytes else shares(taken, int(sum(taken.values()) * limit.bytes / size))

    def next_start(self, end: Offsets, notes: Sequence[Json]) -> Offsets:
        """`end`; what the tasks note about the sizes of records is what the next epoch is measured by."""
        self._sizes.noted(notes)
        return end

    def split(self, start: Offsets, end: Offsets) -> Sequence[KafkaSplit]:
        fresh = [
            place for place, _ in end.places() if start.next_of(place[0], end.topics[place[0]].id, place[1]) is None
        ]
        behind = [place for place, _ in end.places()] if self.config.on_lost == "earliest" else fresh
        lowest, _ = self._topics.edges(behind)
        gone = self._topics.gone(end)
        pieces = []
        for place, offset in sorted(end.places()):
            if place[0] in gone:
                continue
            id = end.topics[place[0]].id
            known = start.next_of(place[0], id, place[1])
            if known is None and place not in lowest:
                raise no_leader(place)
            begin = max(known or 0, lowest.get(place, 0))
            if known is not None and known < begin:  # removed since the range was planned
                self._topics.count_lost(place, known, min(begin, offset))
            if begin < offset:
                pieces.append(Piece(place[0], id, place[1], begin, offset))
        return packed(pieces, self._parallelism)

    def read(self, split: KafkaSplit) -> Iterator[SourceBatch | Note]:
        return Reader(self.config, self._topics.cluster, self.context.columns).read(split)

    def ack(self, end: Offsets) -> None:
        """What a group does not take for good is shown by the health of the source; no run waits for it."""
        topics = self._topics
        ends = {place: offset for place, offset in end.places() if end.topics[place[0]].id == topics.ids.get(place[0])}
        if self._group is not None and ends:
            self._unshown = self._group.commit(ends)

    # -- how it is -----------------------------------------------------------------------------------------------

    def lag(self) -> int | None:
        """Records that are there and not planned yet, in offsets."""
        return sum(count for _, count in self._left.values()) if self._is_planned else None

    def metrics(self) -> ConnectorMetrics:
        lost = self._opened.lost if self._opened else 0
        return ConnectorMetrics(lag=self.lag(), custom={"records_lost": float(lost), "lag_seconds": self._lag_secs})

    def data_ready_notify(self) -> threading.Event:
        return self._watched().ready

    def checkpoint_requested(self) -> threading.Event:
        """Set when topics or partitions have come, or a topic was made again: they are in the next epoch, at once."""
        return self._watched().requested

    def health_check(self) -> HealthStatus:
        if self._opened is None:
            return HealthStatus()
        topics = self._opened
        try:
            held = self._undecided.oldest(topics.cluster, topics.places())
        except RetryableError as error:
            return HealthStatus.unhealthy(error.message)
        self._lag_secs = topics.oldest_secs(self._left)
        if held is not None and self.config.isolation_level == "read_committed":
            return HealthStatus.degraded(
                f"a transaction is open in {held[0]}/{held[1]}, and nothing after it can be read until it ends"
            )
        return HealthStatus.degraded(self._unshown) if self._unshown else HealthStatus.healthy()

    @property
    def _topics(self) -> Topics:
        if self._opened is None:
            raise RuntimeError("the source is not open")
        return self._opened

    def _watched(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(self.config, self._topics.has_changed)
            self._watch.start()
        return self._watch


def _size(message: Any) -> int:
    return len(message) + len(message.key() or b"")


def _seldom_meant(config: KafkaConfig, cluster: Cluster, found: Mapping[str, TopicInfo]) -> Iterator[Finding]:
    group = config.start.group if isinstance(config.start, StartAt) else None
    places = [(name, partition) for name, each in found.items() for partition in each.partitions]
    if group and places and not Group(cluster, group).offsets(places):
        yield Finding(
            True, f"the group {group!r} has no offsets in these topics: a first run begins at their first records"
        )
    if any(each.id in NO_ID for each in found.values()):
        yield Finding(
            True,
            "the brokers give topics no ids, as Kafka does since 2.8: one that is deleted and made again is noticed only "
            "where it ends before the position",
        )
    if config.isolation_level == "read_uncommitted":
        yield Finding(
            True,
            "records of transactions that are open or were aborted are read too: what a producer tried again is there "
            "twice",
        )
