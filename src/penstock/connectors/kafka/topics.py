"""The topics that a source reads, as they are in the cluster now, and what has become of them since the last look."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.connectors.kafka.client import Cluster, Place, TopicInfo, lost
from penstock.connectors.kafka.position import Offsets
from penstock.connectors.kafka.read import peek
from penstock.errors import FatalError, RetryableError
from penstock.source import ReadLimit

PEEKED_PARTITIONS = 16
"""Partitions that are looked into, the fullest ones, to tell how large or how old records are."""


class Topics:
    """What a source asks the cluster."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.cluster = Cluster(config)
        self.known: dict[str, TopicInfo] = {}
        """As of the last look."""
        self._lost: dict[tuple[str, int], tuple[int, int, int]] = {}
        """The last loss of a partition of a topic's id, half open, and how many were lost before it."""

    @property
    def ids(self) -> dict[str, str]:
        return {name: each.id for name, each in self.known.items()}

    @property
    def lost(self) -> int:
        """Records that were gone before they were read."""
        return sum(before + last - first for first, last, before in self._lost.values())

    def look(self) -> None:
        self.known = self._now()

    def has_changed(self) -> bool:
        """Whether the topics are others than at the last look, or have other partitions."""
        now, before = self._now(), self.known
        return {n: (t.id, t.partitions) for n, t in now.items()} != {n: (t.id, t.partitions) for n, t in before.items()}

    def places(self) -> list[Place]:
        return [(name, partition) for name, each in self.known.items() for partition in each.partitions]

    def edges(self, places: Sequence[Place]) -> tuple[dict[Place, int], dict[Place, int]]:
        """First offset and end, as far as the source may read."""
        return self.cluster.edges(places, self._committed)

    def all_edges(self) -> tuple[dict[Place, int], dict[Place, int]]:
        """First offset and end of every partition: one that is left out would later begin at its first record."""
        places = self.places()
        first, end = self.edges(places)
        if missing := set(places) - first.keys():
            raise no_leader(min(missing))
        return first, end

    def peek(self, starts: Mapping[Place, int], backlog: Mapping[Place, int], count: int) -> Mapping[Place, list[Any]]:
        """Up to so many of the next records of the partitions that have most of them."""
        fullest = sorted(starts, key=lambda place: -backlog[place])[:PEEKED_PARTITIONS]
        return peek(self._config, self._committed, {each: starts[each] for each in fullest}, count) if fullest else {}

    def oldest_secs(self, left: Mapping[Place, tuple[int, int]]) -> float:
        """How old the oldest record is of what is left in each partition: the next offset, and how many there are."""
        starts, counts = ({place: pair[at] for place, pair in left.items()} for at in (0, 1))
        times = [message.timestamp()[1] for some in self.peek(starts, counts, 1).values() for message in some]
        return max(0.0, time.time() - min(times) / 1000) if times else 0.0

    def require_all(self, start: Offsets) -> None:
        """Refuse to go on where a topic of the position is gone, or another one has its name."""
        if self._config.on_lost == "earliest":
            return
        for name, place in start.topics.items():
            found = self.known.get(name)
            if found is None or found.id != place.id:
                what = "is gone" if found is None else "was deleted and made again: it has another id"
                raise lost(f"the topic {name!r} {what}")

    def gone(self, end: Offsets) -> set[str]:
        """The topics of a planned range of which nothing is left to read, where that is no reason to stop."""
        if self._config.on_lost == "stop":
            return set()
        now = self.cluster.describe(sorted(end.topics))
        return {name for name, place in end.topics.items() if name not in now or now[name].id != place.id}

    def require_leaders(self, start: Offsets, limit: ReadLimit, led: Collection[Place], is_more: bool) -> None:
        """A drain must not end before partitions that have no leader for now."""
        ids, until = self.ids, limit.until
        missing = [place for place in self.places() if place not in led]
        if isinstance(until, Offsets) and not is_more:
            missing = [
                (name, partition)
                for name, partition in missing
                if (until.next_of(name, ids[name], partition) or 0) > (start.next_of(name, ids[name], partition) or 0)
            ]
        elif not limit.whole:
            return
        if missing:
            raise no_leader(min(missing))

    def not_lost(self, place: Place, offset: int, lowest: int, end: int) -> int:
        """Where a partition goes on: at its offset, unless its records are gone."""
        if lowest <= offset <= max(end, lowest):
            return offset
        if offset > end:
            _, high = self.cluster.edges([place], committed=False)
            if offset <= high.get(place, offset):  # a transaction before it is open, or nobody leads the partition now
                return offset
            # A lagging replica became leader, or the broker lost its disk. What is there was read, most of it at least.
            if self._config.on_lost == "earliest":
                return end
            raise lost(
                f"{place[0]}/{place[1]} ends at offset {end}, and the position is {offset}: its last records are gone",
                "those that come next",
            )
        if self._config.on_lost == "stop":
            raise lost(f"{place[0]}/{place[1]} begins at offset {lowest}, and the position is {offset}: retention")
        self.count_lost(place, offset, lowest)
        return lowest

    def not_beyond(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Where a group is, but for partitions that end before: it is of an earlier topic of this name."""
        _, ends = self.cluster.edges(list(offsets), committed=False)
        for place, offset in offsets.items():
            if offset > (end := ends.get(place, offset)) and self._config.on_lost == "stop":
                raise FatalError(
                    f"{place[0]}/{place[1]} ends at offset {end}, and the group {self._config.start.group!r} is at {offset}: "
                    "in an earlier topic of this name, or records are lost",
                    code="PEN-5011",
                    hint='set on_lost = "earliest" to begin there with the first record, or choose another `start`',
                )
        return {place: offset for place, offset in offsets.items() if offset <= ends.get(place, offset)}

    def count_lost(self, place: Place, offset: int, lowest: int) -> None:
        """Records from `offset` on that are gone; the same ones may be reported again, and more of them."""
        key = self.ids.get(place[0], ""), place[1]
        first, last, before = self._lost.get(key, (offset, offset, 0))
        if offset > last:
            first, before = offset, before + last - first
        self._lost[key] = first, max(last, lowest), before

    @property
    def _committed(self) -> bool:
        return bool(self._config.isolation_level == "read_committed")

    def _now(self) -> dict[str, TopicInfo]:
        return self.cluster.describe(matching(self._config.topics, self.cluster))


def no_leader(place: Place) -> RetryableError:
    return RetryableError(f"the partition {place[0]}/{place[1]} has no leader for now", code="PEN-2001")


def matching(topics: Sequence[str], cluster: Cluster) -> list[str]:
    """The names, and what the patterns match now; never the cluster's own topics, nor ours."""
    found = {each: None for each in topics if not each.startswith("^")}
    for name in cluster.names() if len(found) < len(set(topics)) else ():
        if is_read(topics, name):
            found[name] = None
    return list(found)


def is_read(topics: Sequence[str], name: str) -> bool:
    """Whether these names and patterns mean a topic."""
    patterns = (re.compile(each) for each in topics if each.startswith("^"))
    return name in topics or (not name.startswith("_") and any(each.fullmatch(name) for each in patterns))
