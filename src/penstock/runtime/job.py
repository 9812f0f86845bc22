"""One epoch's work as a value, and what each of its tasks does with it; any `Engine` can run it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from penstock.durable import Json
from penstock.pipeline.routing import OnError, Route, Router, Target
from penstock.runtime.messages.clashes import Path as Column
from penstock.runtime.messages.decoding import Decoders
from penstock.sink import (
    Applied,
    Epoch,
    EpochSink,
    Receipt,
    SinkConnector,
    SinkContext,
    Topic,
    TopicSink,
    Work,
    WriteResult,
)
from penstock.source import RangeSource, Schemas


@dataclass(frozen=True)
class Part:
    """One split of one source's range, numbered in the order of the epoch."""

    number: int
    source: str
    split: Any


@dataclass(frozen=True)
class OnErrors:
    """What becomes of records that cannot be used: the route's setting wins over the source's, that over the pipeline's."""

    pipeline: OnError = "stop"
    sources: Mapping[str, OnError] = field(default_factory=dict)

    def of(self, source: str, route: Route | None = None) -> OnError:
        own = route.on_error if route is not None else None
        return own or self.sources.get(source, self.pipeline)


@dataclass(frozen=True)
class Job:
    """All that an engine needs to stage an epoch; picklable."""

    epoch: Epoch
    parts: Sequence[Part]
    sources: Mapping[str, RangeSource[Any, Any]]
    sinks: Mapping[str, SinkConnector[Any, Any]]
    router: Router
    schemas: Mapping[str, Schemas] = field(default_factory=dict)
    """Schema of each stream, per source, as of this epoch; what SQL is analysed against."""
    on_error: OnErrors = field(default_factory=OnErrors)
    """What becomes of records that cannot be used."""
    letters: str | None = None
    """Name of the sink that takes dead letters; None: no record becomes one."""
    decoders: Decoders = field(default_factory=Decoders)
    """What makes rows of messages."""
    only: frozenset[tuple[str, Topic]] | None = None
    """Stage for these sinks and topics alone; None: for all."""
    without: frozenset[tuple[str, Topic]] = frozenset()
    """Sinks and topics for which nothing is staged."""
    look: frozenset[Topic] = frozenset()
    """Topics of SQL whose payloads are decoded only to see what columns they have."""
    barred: Mapping[tuple[str, Topic], Sequence[Column]] = field(default_factory=dict)
    """Columns and fields of messages that a sink cannot have beside others of the epoch: rows with a value there are refused."""
    aside: frozenset[tuple[str, str]] = frozenset()
    """Sources and streams that are left out, each with a note that says so."""

    contexts: Mapping[str, SinkContext] = field(default_factory=dict)
    """What the sinks are opened with."""

    def wants(self, sink: str, topic: Topic) -> bool:
        pair = (sink, topic)
        return sink in self.sinks and (self.only is None or pair in self.only) and pair not in self.without

    def groups(self, count: int) -> list[list[Part]]:
        """
        The parts in at most `count` runs of neighbours: one task each, so that order within a task is the source's.

        Where a sink needs the order of the whole epoch, there is one.
        """
        count = 1 if self._in_order() else max(1, min(count, len(self.parts)))
        edges = [round(i * len(self.parts) / count) for i in range(count + 1)]
        return [list(self.parts[a:b]) for a, b in pairwise(edges)]

    def _in_order(self) -> bool:
        """True if tasks side by side would mix up what a sink has to get in order: a route with lanes keeps it in these."""
        names = {
            name
            for route in self.router.effective
            if route.partitions == 1
            for name in route.sinks or self.router.sinks
        }
        return any(self.sinks[name].in_order for name in names if name in self.sinks)


@dataclass(frozen=True)
class Bad:
    """One record that could not be used, for people: the first few of an epoch are shown."""

    source: str
    stream: str
    topic: Topic
    code: str
    rule: str
    reason: str


SAMPLES = 5
"""Bad records that a task shows; the others are counted."""


@dataclass
class Tally:
    """What reading one part came to. Keyed by part, so that a task that runs twice is counted once."""

    source: str
    rows: int = 0
    unrouted: int = 0
    """Good rows that no route takes."""
    skipped: dict[Topic, int] = field(default_factory=dict)
    """Records that could not be used and were left out, per topic; what the source itself refuses has none."""
    letters: dict[Topic, int] = field(default_factory=dict)
    """Records that became dead letters, per topic."""
    codes: dict[str, int] = field(default_factory=dict)
    """The same by error code."""
    oldest: float | None = None
    """When the first of the rows that know it was committed in the outside system, or received; seconds since 1970."""
    samples: list[Bad] = field(default_factory=list)
    notes: list[Json] = field(default_factory=list)
    stream: str = ""
    """The stream in hand."""
    refused: dict[str, Json] = field(default_factory=dict)
    """Streams that a sink refused, with the notes that say so; their rows are left out from there on."""

    def kept(self, topic: Topic, code: str, count: int) -> None:
        """So many records of a topic became dead letters."""
        self.letters[topic] = self.letters.get(topic, 0) + count
        self.codes[code] = self.codes.get(code, 0) + count

    def add(self, other: Tally) -> None:
        """Take over what another task made of the same part: it may have read it for another topic, or written some of it."""
        self.rows, self.unrouted = max(self.rows, other.rows), max(self.unrouted, other.unrouted)
        for mine, others in ((self.skipped, other.skipped), (self.letters, other.letters)):
            for topic, count in others.items():
                # What the source itself refuses is met by every task that reads the part.
                mine[topic] = max(mine.get(topic, 0), count) if not topic else mine.get(topic, 0) + count
        for code, count in other.codes.items():
            self.codes[code] = self.codes.get(code, 0) + count
        self.oldest = min((at for at in (self.oldest, other.oldest) if at is not None), default=None)
        self.samples += other.samples
        self.notes += [note for note in other.notes if note not in self.notes]
        self.refused |= other.refused


@dataclass
class TaskResult:
    """What a task hands back to the driver."""

    receipts: dict[str, Receipt] = field(default_factory=dict)
    written: dict[tuple[str, Topic], WriteResult] = field(default_factory=dict)
    tallies: dict[int, Tally] = field(default_factory=dict)
    refused: dict[tuple[str, str], Json] = field(default_factory=dict)
    """Sources and streams that a sink refused where no part of theirs was being read, with the notes that say so."""
    columns: dict[Topic, pa.Schema] = field(default_factory=dict)
    """Columns of payloads that the epoch did not know yet, together with those that it did."""
    filled: dict[tuple[str, Topic], list[Column]] = field(default_factory=dict)
    """Columns and fields with values in the rows that a sink took of messages whose format infers them."""
    samples: list[Bad] = field(default_factory=list)
    """The first of the rows that sinks left out."""
    attempt: int = 0
    """Which try of the task this was; more than 0 means that an earlier one may have left staged data."""


@dataclass(frozen=True)
class ApplyJob:
    """The work that commits of an epoch need; picklable."""

    epoch: Epoch
    sinks: Mapping[str, TopicSink[Any, Any] | EpochSink[Any, Any]]
    work: Sequence[tuple[str, Work]]
    """Each with the name of its sink."""
    contexts: Mapping[str, SinkContext] = field(default_factory=dict)
    """What the sinks are opened with."""

    def groups(self, count: int) -> list[list[int]]:
        """The numbers of the work items for each of at most `count` tasks, about the same number of bytes in each."""
        groups: list[list[int]] = [[] for _ in range(max(1, min(count, len(self.work))))]
        sizes = [0] * len(groups)
        for number in sorted(range(len(self.work)), key=lambda number: -self.work[number][1].bytes):
            least = sizes.index(min(sizes))
            groups[least].append(number)
            sizes[least] += self.work[number][1].bytes + 1
        return groups


@dataclass
class ApplyResult:
    """What a task of an `ApplyJob` hands back to the driver."""

    applied: dict[int, Applied] = field(default_factory=dict)
    """By the number of the work item, so that a task that runs twice is counted once."""
    lost: set[int] = field(default_factory=set)
    """Items whose staged data is gone."""
    attempt: int = 0


class Engine(Protocol):
    """Runs a job's tasks somewhere. `SparkEngine` is the product; the kit has one that forks plain processes."""

    @property
    def parallelism(self) -> int:
        """Tasks that can run at once."""

    @property
    def is_local(self) -> bool:
        """True if all tasks run on the driver's machine; once it has started."""

    @property
    def version(self) -> str:
        """What it is, for people; once it has started."""

    def start(self) -> None:
        """Get ready, in a thread of its own while the connectors open."""

    def hold(self, lock: Path) -> None:
        """Hold this lock for as long as any task may run, also if the driver is killed; after `start`."""

    def busy(self) -> bool:
        """True while a task runs."""

    def stop(self) -> None:
        """Let go of everything; may be called twice, and while `start` runs."""

    def check(self, routes: Sequence[tuple[Target, pa.Schema]], keyed: Collection[str] = ()) -> None:
        """Refuse what the routes ask for and the engine cannot do; before the first epoch. `keyed` sinks apply changes."""

    def run(self, job: Job) -> Sequence[TaskResult]:
        """Run every task to its end and give back their results; raise if one failed for good."""

    def apply(self, job: ApplyJob) -> Sequence[ApplyResult]:
        """The same for the work that commits need."""


def is_plain(route: Route) -> bool:
    """True for passthrough: rows never enter the JVM."""
    return route.sql is None and route.transform is None
