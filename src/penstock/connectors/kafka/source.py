"""Read Kafka topics as ranges of offsets."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from confluent_kafka import TopicPartition
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.connectors.kafka.client import (
    ANSWER_SECS,
    Cluster,
    ClusterConfig,
    Place,
    TopicInfo,
    consumer,
    errors,
    lost,
)
from penstock.connectors.kafka.position import KafkaSplit, Offsets, Piece, packed, shares
from penstock.connectors.kafka.read import Reader
from penstock.errors import ConfigError, RetryableError
from penstock.source import (
    ENVELOPE_SCHEMA,
    ConnectorMetrics,
    Finding,
    HealthStatus,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceContext,
)

UNDECIDED_SECS = 60.0
"""A transaction that holds readers back for longer is worth a warning."""


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
    """Topics to read. A name that begins with `^` is a regular expression for whole names; topics that come later join in."""

    start: Literal["earliest", "latest"] | StartAt = "earliest"
    """
    Where a first run begins: at the first records, after the last ones, at a time (`{ timestamp = 2026-05-01T00:00:00Z }`) or
    where a consumer group is (`{ group = "billing" }`; partitions without a commit begin at their first record). Partitions
    and topics that come later always begin at their first record.
    """

    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """`read_uncommitted` also reads rows of transactions that are open or were aborted."""

    on_lost: Literal["stop", "earliest"] = "stop"
    """
    What to do when records that were not read yet are gone: retention removed them, or the topic was deleted or made again.
    `earliest` goes on with the first records that are there, and counts what is lost.
    """

    group_id: str = ""
    """A consumer group to which offsets are committed after each epoch, for the tools that watch lag. They are never read."""

    headers: bool = True
    """Read the headers of records, as `attributes`. Without them reading takes less time."""

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
        self._cluster: Cluster | None = None
        self._topics: dict[str, TopicInfo] = {}
        self._parallelism = 1
        self._lag: int | None = None
        self._lost: dict[tuple[str, int], tuple[int, int]] = {}
        self._committer: Any = None
        self._undecided: dict[Place, tuple[int, float]] = {}

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.close()
        super().open(context)
        self._cluster = Cluster(self.config)
        self._parallelism = context.parallelism
        if context.in_task:
            return
        self._cluster.connect()
        self._look()
        missing = [name for name in self.config.topics if not name.startswith("^") and name not in self._topics]
        if missing and self.config.on_lost == "stop":
            raise ConfigError(
                f"there is no topic {missing[0]!r}",
                code="PEN-1016",
                hint="create it, or correct `topics`; a pattern such as ^orders$ waits for its topics",
            )

    def close(self) -> None:
        if self._committer is not None:
            self._committer.close()
        self._committer = self._cluster = None

    def check(self) -> Sequence[Finding]:
        cluster = Cluster(self.config)
        cluster.connect()
        found = cluster.describe(_matching(self.config.topics, cluster))
        missing = [name for name in self.config.topics if not name.startswith("^") and name not in found]
        findings = [Finding(False, f"there is no topic {name!r}", "create it, or correct `topics`") for name in missing]
        count = sum(len(each.partitions) for each in found.values())
        if found:
            findings.append(Finding(True, f"{len(found)} topics with {count} partitions"))
        elif not missing:
            findings.append(
                Finding(False, "no topic matches yet", "correct `topics`, or wait until the topics are made")
            )
        return findings

    def schema(self) -> Schemas:
        """Records stay as they are until the topic's `[[schemas]]` entry decodes them."""
        return dict.fromkeys(self._topics, ENVELOPE_SCHEMA)

    # -- ranges --------------------------------------------------------------------------------------------------

    def initial(self) -> Offsets:
        self._look()
        first, end = self._edges(self._places())
        start = self.config.start
        if start == "earliest":
            begin = first
        elif start == "latest":
            begin = end
        elif start.timestamp is not None:
            return self.position_at(start.timestamp)
        else:
            begin = {**first, **_committed(self.config, str(start.group), first)}
        return Offsets.of({name: each.id for name, each in self._topics.items()}, begin)

    def position_at(self, when: datetime) -> Offsets:
        """The first records that are not older than `when`, by their own timestamps."""
        self._look()
        first, end = self._edges(self._places())
        found = self._asked.at(first, int(when.timestamp() * 1000))
        begin = {place: end[place] if found.get(place, -1) < 0 else found[place] for place in first}
        return Offsets.of({name: each.id for name, each in self._topics.items()}, begin)

    def latest(self, start: Offsets, limit: ReadLimit) -> Offsets:
        self._parallelism = limit.parallelism
        self._look()
        self._require_all(start)
        first, end = self._edges(self._places())
        begin: dict[Place, int] = {}
        for place, lowest in first.items():
            known = start.next_of(place[0], self._topics[place[0]].id, place[1])
            begin[place] = lowest if known is None else self._not_lost(place, known, lowest, end[place])
        until = limit.until if isinstance(limit.until, Offsets) else None
        if until is not None:
            bounds = {place: until.next_of(place[0], self._topics[place[0]].id, place[1]) for place in begin}
            end = {place: end[place] if (b := bounds[place]) is None else min(end[place], b) for place in begin}
            begin = {place: offset for place, offset in begin.items() if bounds[place] is not None}
        backlog = {place: max(0, end[place] - offset) for place, offset in begin.items()}
        taken = shares(backlog, limit.rows)
        self._lag = sum(backlog.values()) - sum(taken.values())
        ends = {place: offset + taken[place] for place, offset in begin.items()}
        for place, offset in start.places():  # what has no leader for now stays where it is
            if place[0] in self._topics and start.topics[place[0]].id == self._topics[place[0]].id:
                ends.setdefault(place, offset)
        return Offsets.of({name: each.id for name, each in self._topics.items()}, ends)

    def split(self, start: Offsets, end: Offsets) -> Sequence[KafkaSplit]:
        fresh = [
            place for place, _ in end.places() if start.next_of(place[0], end.topics[place[0]].id, place[1]) is None
        ]
        behind = [place for place, _ in end.places()] if self.config.on_lost == "earliest" else fresh
        lowest, _ = self._edges(behind)
        pieces = []
        for place, offset in sorted(end.places()):
            id = end.topics[place[0]].id
            known = start.next_of(place[0], id, place[1])
            if known is None and place not in lowest:
                raise RetryableError(f"the partition {place[0]}/{place[1]} has no leader for now", code="PEN-2001")
            begin = max(known or 0, lowest.get(place, 0))
            if begin < offset:
                pieces.append(Piece(place[0], id, place[1], begin, offset))
        return packed(pieces, self._parallelism)

    def read(self, split: KafkaSplit) -> Iterator[SourceBatch]:
        return Reader(self.config, self._asked, self.context.columns).read(split)

    def ack(self, end: Offsets) -> None:
        offsets = [TopicPartition(*place, offset) for place, offset in end.places()]
        if not self.config.group_id or not offsets:
            return
        if self._committer is None:
            self._committer = consumer(self.config, group_id=self.config.group_id)
        with errors(f"cannot commit offsets to the group {self.config.group_id!r}"):
            for each in self._committer.commit(offsets=offsets, asynchronous=False):
                if each.error is not None:
                    raise RetryableError(f"cannot commit the offset of {each.topic}: {each.error}")

    # -- how it is -----------------------------------------------------------------------------------------------

    def lag(self) -> int | None:
        """Records that are there and not planned yet, in offsets."""
        return self._lag

    def metrics(self) -> ConnectorMetrics:
        lost = sum(last - first for first, last in self._lost.values())
        return ConnectorMetrics(lag=self._lag, custom={"records_lost": float(lost)})

    def health_check(self) -> HealthStatus:
        if self._cluster is None:
            return HealthStatus()
        places = self._places()
        try:
            _, stable = self._asked.edges(places)
            _, high = self._asked.edges(places, committed=False)
        except RetryableError as error:
            return HealthStatus.unhealthy(error.message)
        now = time.monotonic()
        undecided = {place: stable[place] for place in stable.keys() & high.keys() if stable[place] < high[place]}
        since = self._undecided
        self._undecided = {
            place: since[place] if since.get(place, (-1, 0))[0] == offset else (offset, now)
            for place, offset in undecided.items()
        }
        old = [place for place, (_, when) in self._undecided.items() if now - when > UNDECIDED_SECS]
        if old and self.config.isolation_level == "read_committed":
            return HealthStatus.degraded(
                f"a transaction is open in {old[0][0]}/{old[0][1]}, and nothing after it can be read until it ends"
            )
        return HealthStatus.healthy()

    # -- questions to the cluster --------------------------------------------------------------------------------

    @property
    def _asked(self) -> Cluster:
        if self._cluster is None:
            raise RuntimeError("the source is not open")
        return self._cluster

    def _look(self) -> None:
        """The topics as they are now."""
        self._topics = self._asked.describe(_matching(self.config.topics, self._asked))

    def _places(self) -> list[Place]:
        return [(name, partition) for name, each in self._topics.items() for partition in each.partitions]

    def _edges(self, places: Sequence[Place]) -> tuple[dict[Place, int], dict[Place, int]]:
        return self._asked.edges(places, self.config.isolation_level == "read_committed")

    def _require_all(self, start: Offsets) -> None:
        """Refuse to go on where a topic of the position is gone, or another one has its name."""
        if self.config.on_lost == "earliest":
            return
        for name, place in start.topics.items():
            found = self._topics.get(name)
            if found is None or found.id != place.id:
                what = "is gone" if found is None else "was deleted and made again: it has another id"
                raise lost(f"the topic {name!r} {what}")

    def _not_lost(self, place: Place, offset: int, lowest: int, end: int) -> int:
        if lowest <= offset <= max(end, lowest):
            return offset
        if offset > end:  # a lagging replica became leader, or the broker lost its disk
            if self.config.on_lost == "earliest":
                return end
            raise lost(f"{place[0]}/{place[1]} ends at offset {end}, and the position is {offset}")
        if self.config.on_lost == "stop":
            raise lost(f"{place[0]}/{place[1]} begins at offset {lowest}, and the position is {offset}: retention")
        first, _ = self._lost.get(place, (offset, 0))
        self._lost[place] = (first, lowest)
        return lowest


def _committed(config: KafkaConfig, group: str, places: Mapping[Place, int]) -> dict[Place, int]:
    """Where a consumer group is, for the partitions that it has a commit of."""
    reader = consumer(config, group_id=group)
    try:
        with errors(f"cannot ask for the offsets of the group {group!r}"):
            found = reader.committed([TopicPartition(*place) for place in places], timeout=ANSWER_SECS)
    finally:
        reader.close()
    return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}


def _matching(topics: Sequence[str], cluster: Cluster) -> list[str]:
    """The names, and what the patterns match now; never the cluster's own topics, nor ours."""
    found = {each: None for each in topics if not each.startswith("^")}
    patterns = [re.compile(each) for each in topics if each.startswith("^")]
    for name in cluster.names() if patterns else ():
        if not name.startswith("_") and any(each.fullmatch(name) for each in patterns):
            found[name] = None
    return list(found)
