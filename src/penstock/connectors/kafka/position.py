"""How far topics were read, and which parts of them a range is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from penstock.connectors.kafka.client import Place
from penstock.durable import Json
from penstock.source import Position

LEAST_SPLIT_OFFSETS = 50_000
"""Fewer offsets are not worth a task of their own."""


class TopicPlaces(BaseModel):
    """The next offset of each partition of one topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """The topic's own id: one that was deleted and made again has another."""
    next: dict[str, int]


class Offsets(Position):
    """The next offset of each partition of each topic. What is missing begins at its first record."""

    topics: dict[str, TopicPlaces] = Field(default_factory=dict)

    def describe(self) -> str:
        parts = [
            f"{name} {', '.join(f'{p}@{each.next[p]}' for p in sorted(each.next, key=int))}"
            for name, each in sorted(self.topics.items())
        ]
        return "; ".join(parts) or "the beginning"

    def next_of(self, topic: str, id: str, partition: int) -> int | None:
        """The next offset; None: the position knows nothing of this partition of this very topic."""
        found = self.topics.get(topic)
        return found.next.get(str(partition)) if found is not None and found.id == id else None

    def places(self) -> Iterator[tuple[Place, int]]:
        """Each partition and its next offset."""
        for name, each in self.topics.items():
            for partition, offset in each.next.items():
                yield (name, int(partition)), offset

    @classmethod
    def of(cls, ids: Mapping[str, str], ends: Mapping[Place, int]) -> Offsets:
        topics: dict[str, dict[str, int]] = {}
        for (name, partition), offset in sorted(ends.items()):
            topics.setdefault(name, {})[str(partition)] = offset
        return cls(topics={name: TopicPlaces(id=ids[name], next=each) for name, each in topics.items()})


@dataclass(frozen=True)
class Piece:
    """A run of offsets of one partition, half open. Not each of them holds a record."""

    topic: str
    id: str
    partition: int
    start: int
    end: int

    @property
    def place(self) -> Place:
        return self.topic, self.partition

    @property
    def size(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True)
class KafkaSplit:
    """Pieces that one task reads; at most one of each partition."""

    pieces: tuple[Piece, ...]


def packed(pieces: list[Piece], parallelism: int) -> list[KafkaSplit]:
    """The pieces, in order, in splits of about the same size: large ones are cut, small ones share a task."""
    total = sum(piece.size for piece in pieces)
    room = target = max(LEAST_SPLIT_OFFSETS, -(-total // max(1, parallelism)))
    splits: list[list[Piece]] = [[]]
    for piece in pieces:
        left: Piece | None = piece
        while left is not None:
            if room <= 0:
                splits.append([])
                room = target
            cut = min(left.end, left.start + room)
            taken = Piece(left.topic, left.id, left.partition, left.start, cut)
            splits[-1].append(taken)
            room -= taken.size
            left = None if cut == left.end else Piece(left.topic, left.id, left.partition, cut, left.end)
    return [KafkaSplit(tuple(each)) for each in splits if each]


def shares(backlog: Mapping[Place, int], rows: int | None) -> dict[Place, int]:
    """How much of each partition's backlog one epoch takes: all of it, or shares of `rows` by its size, at least one each."""
    total = sum(backlog.values())
    if rows is None or total <= rows:
        return dict(backlog)
    return {place: min(size, max(1, size * rows // total)) if size else 0 for place, size in backlog.items()}


SIZES = "sizes"
"""What a task's note holds: for each topic the offsets and the bytes that it read."""


class Sizes:
    """About how many bytes an offset of each topic takes: of the first records that are there, then of what was read last."""

    def __init__(self) -> None:
        self._per_offset: dict[str, float] = {}

    def __contains__(self, topic: str) -> bool:
        return topic in self._per_offset

    def peeked(self, found: Mapping[Place, Sequence[tuple[int, int]]], begin: Mapping[Place, int]) -> None:
        """The offsets and sizes of some records after `begin`."""
        totals: dict[str, tuple[int, int]] = {}
        for place, some in found.items():
            offsets, size = totals.get(place[0], (0, 0))
            if some:
                totals[place[0]] = offsets + some[-1][0] + 1 - begin[place], size + sum(each for _, each in some)
        self._take(totals)

    def noted(self, notes: Sequence[Json]) -> None:
        """What the tasks of an epoch read."""
        totals: dict[str, tuple[int, int]] = {}
        for topic, (offsets, size) in (each for note in notes for each in note[SIZES].items()):
            before = totals.get(topic, (0, 0))
            totals[topic] = before[0] + offsets, before[1] + size
        self._take(totals)

    def of(self, taken: Mapping[Place, int]) -> float:
        """The bytes of so many offsets of each partition."""
        return sum(count * self._per_offset.get(place[0], 0.0) for place, count in taken.items())

    def _take(self, totals: Mapping[str, tuple[int, int]]) -> None:
        self._per_offset.update({topic: size / offsets for topic, (offsets, size) in totals.items() if offsets > 0})
