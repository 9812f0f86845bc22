"""
Publish a large epoch in tasks: its rows are divided by their keys into shards, and each shard is one transaction.

A shard has a transactional id and a partition for its markers of its own, so each is the same compare-and-set as a whole epoch
is. What joins them is the run's *claim*, a record among the sink's markers:

1. A driver that takes over fences the sink's own producer, writes its claim, and only then fences the producers of all shards.
2. A task makes the producer of its shard, and only then reads the claim. If it is not the one that the work names, it stops.

So a task of an earlier run was either fenced by step 1, or finds the new claim by step 2. The epoch's marker is written when
all shards are in Kafka, and a run that finds some of them there publishes the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.connectors.kafka.client import Cluster
from penstock.connectors.kafka.publish import Publisher
from penstock.connectors.kafka.staging import OWN, SHARDS, Chunk, KafkaReceipt, located, of_shard, staged
from penstock.errors import FatalError, RetryableError
from penstock.sink import ABOUT, CommittedEpoch, Epoch, Work, is_committed

CLAIM = "@claim"
"""Which run may publish shards; beside the topics among the sink's markers."""

SHARD = "@shard"
"""What the marker of a shard is for."""

_AFTER_RESET = (
    ", and then make it again all the same: an earlier version began that epoch, "
    "and nothing says whether that was before the reset"
)
"""A claim that does not name its incarnation may be this one's, so that it stops the sink after a reset, too."""


class ShardWork(Work):
    """One shard of an epoch."""

    shard: int
    claim: str
    marker_topic: str
    staged: tuple[tuple[str, tuple[Chunk, ...]], ...]
    """For each task, in order: the staging topic or directory, and its chunks that hold rows of the shard."""
    message_bytes: int = 0
    """As in a receipt."""

    @property
    def is_beside_the_driver(self) -> bool:
        """True if rows are staged in the sink's own directory, perhaps by a run whose tasks were on the driver's machine."""
        return any(staging == OWN for staging, _ in self.staged)

    def located(self, own: Path | None) -> ShardWork:
        """With the sink's own directory as it is here."""
        return self.model_copy(
            update={"staged": tuple((located(staging, own), chunks) for staging, chunks in self.staged)}
        )


def topic_of(marker_topic: str) -> str:
    """The topic with the markers of shards."""
    return f"{marker_topic}.shards"


def publisher_of(config: Any, cluster: Cluster, marker_topic: str, shard: int) -> Publisher:
    return Publisher(config, cluster, topic_of(marker_topic), shard, f"{marker_topic}.shard-{shard}")


class Shards:
    """The shards of a sink, on its driver; they belong to one producer of the sink."""

    def __init__(self, config: Any, cluster: Cluster, main: Publisher) -> None:
        self._config = config
        self._cluster = cluster
        self._main = main
        self._claim = ""
        self._claimed_by = self._none_seen_by = 0
        self._publishers = [publisher_of(config, cluster, main.name, shard) for shard in range(SHARDS)]

    def close(self) -> None:
        for each in self._publishers:
            each.close()

    def done(self, epoch: Epoch) -> list[int] | None:
        """The shards of the epoch that are in Kafka, which no other run can change any more; None: there never were any."""
        self._main.fence()
        if self._none_seen_by == self._main.made:
            return None
        if not self._claim and not self._were_begun(epoch):
            self._none_seen_by = self._main.made
            return None
        self._take(epoch)
        return [shard for shard, each in enumerate(self._publishers) if is_done(each, epoch)]

    def make_topic(self, epoch: Epoch, settings: Mapping[str, str]) -> None:
        """The topic for their markers, with the first large epoch."""
        if not self._were_begun(epoch):
            self._cluster.require(topic_of(self._main.name), SHARDS, settings)

    def _were_begun(self, epoch: Epoch) -> bool:
        """Whether some may be in Kafka: nobody publishes one without a claim. Then their markers must be there."""
        claim = self._main.seen().get((epoch.pipeline, CLAIM))
        if claim is None or claim.end.get("incarnation", epoch.incarnation) != epoch.incarnation:
            return False
        topic = topic_of(self._main.name)
        if topic in self._cluster.describe([topic]):
            return True
        after = "" if "incarnation" in claim.end else _AFTER_RESET
        raise FatalError(
            f"the topic {topic!r} is gone, and it says which parts of a large epoch are in Kafka",
            code="PEN-5020",
            hint=f"if no run ended while it published a large epoch, make it again with {SHARDS} partitions and "
            "`cleanup.policy` = compact; else some of its rows may be there already: start over with "
            f"`penstock offsets reset FILE`{after}",
        )

    def work(self, epoch: Epoch, receipts: Sequence[KafkaReceipt]) -> list[ShardWork]:
        """What is left to publish of an epoch."""
        self._take(epoch)
        self._none_seen_by = 0
        done, found = self.done(epoch) or (), []
        for shard in (each for each in range(SHARDS) if each not in done):
            parts = [
                (receipt.staging, tuple(of_shard(chunks, shard)))
                for receipt in receipts
                for chunks in receipt.chunks.values()
            ]
            some = tuple((staging, chunks) for staging, chunks in parts if chunks)
            size = sum(
                chunk.bytes if chunk.shard is not None else chunk.bytes // SHARDS for _, c in some for chunk in c
            )
            topic = min(topic for receipt in receipts for topic in receipt.topics())
            found.append(
                ShardWork(
                    topic=topic,
                    bytes=size,
                    shard=shard,
                    claim=self._claim,
                    marker_topic=self._main.name,
                    staged=some,
                    message_bytes=min((each.message_bytes for each in receipts if each.message_bytes), default=0),
                )
            )
        return found

    def publish(self, epoch: Epoch, work: ShardWork) -> None:
        """One shard, here on the driver."""
        publish_shard(self._config, self._publishers[work.shard], self._main, epoch, work)

    def _take(self, epoch: Epoch) -> None:
        """Write the claim of this run, and shut out the tasks of all others."""
        self._main.fence()
        if self._claimed_by == self._main.made:
            return
        claim = uuid4().hex
        with self._main.transaction(epoch):
            made_for = {"incarnation": epoch.incarnation}
            self._main.mark(epoch.pipeline, CLAIM, CommittedEpoch(incarnation=claim, number=0, end=made_for))
        with ThreadPoolExecutor(SHARDS, "penstock-kafka") as pool:
            for each in [pool.submit(publisher.fence) for publisher in self._publishers]:
                each.result()
        for publisher in self._publishers:
            publisher.close()  # tasks make their own
        self._claim, self._claimed_by = claim, self._main.made


def is_done(publisher: Publisher, epoch: Epoch) -> bool:
    """Whether Kafka holds the shard; what an earlier incarnation wrote there is of no interest."""
    marker = publisher.seen().get((epoch.pipeline, SHARD))
    return marker is not None and marker.incarnation == epoch.incarnation and is_committed(marker, epoch)


def publish_shard(config: Any, publisher: Publisher, main: Publisher, epoch: Epoch, work: ShardWork) -> None:
    """Publish a shard unless it is there; in a task, or on the driver."""
    publisher.fit([work])
    publisher.fence()
    claim = main.seen().get((epoch.pipeline, CLAIM))
    if claim is None or claim.incarnation != work.claim:
        raise RetryableError("another run has taken over the sink", code="PEN-2005")
    if is_done(publisher, epoch):
        return
    end = {**epoch.end, ABOUT: {"start": dict(epoch.start)}}
    with publisher.transaction(epoch, f"{work.shard}.") as sending:
        for staging, chunks in work.staged:
            for target, batch in staged(config, staging, chunks, work.shard):
                sending.send(target, batch)
        publisher.mark(
            epoch.pipeline, SHARD, CommittedEpoch(incarnation=epoch.incarnation, number=epoch.number, end=end)
        )
