"""One epoch's work as a value, and what each of its tasks does with it; any `Engine` can run it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from penstock import failpoints
from penstock.durable import Json
from penstock.errors import ConnectorError, DataError, StagingLost, is_of_stream
from penstock.pipeline.routing import Route, Router, Target
from penstock.sink import (
    Applied,
    Epoch,
    Receipt,
    SinkConnector,
    SinkContext,
    Task,
    Topic,
    TopicContext,
    TopicSink,
    Work,
    WriteResult,
)
from penstock.source import Note, RangeSource, Schemas, SourceContext
from penstock.tables import Refused, TableSource


@dataclass(frozen=True)
class Part:
    """One split of one source's range, numbered in the order of the epoch."""

    number: int
    source: str
    split: Any


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
    skip_bad: bool = False
    """Leave bad records out and count them (`on_error = "skip"`)."""
    only: frozenset[tuple[str, Topic]] | None = None
    """Stage for these sinks and topics alone; None: for all."""
    without: frozenset[tuple[str, Topic]] = frozenset()
    """Sinks and topics for which nothing is staged."""
    aside: frozenset[tuple[str, str]] = frozenset()
    """Sources and streams that are left out, each with a note that says so."""

    contexts: Mapping[str, SinkContext] = field(default_factory=dict)
    """What the sinks are opened with."""

    def wants(self, sink: str, topic: Topic) -> bool:
        pair = (sink, topic)
        return sink in self.sinks and (self.only is None or pair in self.only) and pair not in self.without

    def groups(self, count: int) -> list[list[Part]]:
        """The parts in at most `count` runs of neighbours: one task each, so that order within a task is the source's."""
        count = max(1, min(count, len(self.parts)))
        edges = [round(i * len(self.parts) / count) for i in range(count + 1)]
        return [list(self.parts[a:b]) for a, b in pairwise(edges)]


@dataclass
class Tally:
    """What reading one part came to. Keyed by part, so that a task that runs twice is counted once."""

    source: str
    rows: int = 0
    skipped: int = 0
    unrouted: int = 0
    """How many of those skipped were good rows that no route takes."""
    notes: list[Json] = field(default_factory=list)
    stream: str = ""
    """The stream in hand."""
    refused: dict[str, Json] = field(default_factory=dict)
    """Streams that a sink refused, with the notes that say so; their rows are left out from there on."""


@dataclass
class TaskResult:
    """What a task hands back to the driver."""

    receipts: dict[str, Receipt] = field(default_factory=dict)
    written: dict[tuple[str, Topic], WriteResult] = field(default_factory=dict)
    tallies: dict[int, Tally] = field(default_factory=dict)
    refused: dict[tuple[str, str], Json] = field(default_factory=dict)
    """Sources and streams that a sink refused where no part of theirs was being read, with the notes that say so."""
    attempt: int = 0
    """Which try of the task this was; more than 0 means that an earlier one may have left staged data."""


@dataclass(frozen=True)
class ApplyJob:
    """The work that commits of an epoch need; picklable."""

    epoch: Epoch
    sinks: Mapping[str, TopicSink[Any, Any]]
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


def read_parts(
    job: Job,
    parts: Sequence[Part],
    tallies: dict[int, Tally],
    wanted: Callable[[Target], bool] = lambda _: True,
    columns: frozenset[str] | None = None,
) -> Iterator[tuple[Tally, Target, pa.RecordBatch]]:
    """Read the parts in order and yield their rows by target, with the tally of their part; in a task."""
    opened: dict[str, RangeSource[Any, Any]] = {}
    try:
        for part in parts:
            if part.source not in opened:
                source = job.sources[part.source]
                source.open(SourceContext(columns=columns, in_task=True))
                opened[part.source] = source
            tally = tallies[part.number] = Tally(part.source)
            try:
                for item in opened[part.source].read(part.split):
                    if isinstance(item, Note):
                        tally.notes.append(item.value)
                        continue
                    if item.stream in tally.refused or (part.source, item.stream) in job.aside:
                        continue
                    tally.stream = item.stream
                    tally.rows += item.num_rows
                    for target, rows in job.router.route(part.source, item):
                        if target is None:
                            tally.skipped += rows.num_rows
                            tally.unrouted += rows.num_rows
                        elif wanted(target):
                            yield tally, target, rows
            except DataError as error:
                if not job.skip_bad:
                    raise
                tally.skipped += error.count
    finally:
        for source in opened.values():
            source.close()


class Writer:
    """The sinks of one task: each is opened when its first rows come, and staged by `finish`."""

    def __init__(self, job: Job, task: Task) -> None:
        self._job = job
        self._task = task
        self._open: dict[str, SinkConnector[Any, Any]] = {}
        self._topics: dict[str, dict[Topic, TopicContext]] = {
            name: dict(job.contexts.get(name, SinkContext()).topics) for name in job.sinks
        }
        self._written: dict[tuple[str, Topic], WriteResult] = defaultdict(WriteResult)

    def write(self, target: Target, batch: pa.RecordBatch) -> None:
        """Hand the rows to every sink of the target."""
        for name in target.sinks:
            if batch.num_rows and self._job.wants(name, target.topic):
                topics = self._topics[name]  # the driver may not have known the topic: then the route says its policy
                topics[target.topic] = target.context(topics.get(target.topic, TopicContext()))
                sink = self._open.get(name) or self._begin(name)
                written = sink.write_batch(target.topic, batch)  # first: what a sink refuses is not written
                self._written[name, target.topic] += written
                failpoints.hit("stage.middle")

    def finish(self) -> TaskResult:
        """Stage what was written: durable, not visible."""
        result = TaskResult(written=dict(self._written), attempt=self._task.attempt)
        for name, sink in self._open.items():
            sink.flush()
            result.receipts[name] = sink.pre_commit(self._job.epoch)
        failpoints.hit("stage.task")
        return result

    def close(self) -> None:
        for sink in self._open.values():
            sink.close()
        self._open.clear()

    def _begin(self, name: str) -> SinkConnector[Any, Any]:
        sink = self._job.sinks[name]
        self._open[name] = sink
        sink.open(SinkContext(self._topics[name]))
        sink.begin_epoch(self._job.epoch, self._task)
        return sink


def write(writer: Writer, target: Target, rows: pa.RecordBatch, tally: Tally, job: Job) -> None:
    """Write rows of the stream in hand."""
    with leaving_out(tally, job):
        writer.write(target, rows)


@contextlib.contextmanager
def leaving_out(tally: Tally, job: Job) -> Iterator[None]:
    """Leave the stream in hand out from here on if its rows are refused and its source can copy it again."""
    try:
        yield
    except ConnectorError as error:
        if not (isinstance(job.sources[tally.source], TableSource) and is_of_stream(error)):
            raise
        tally.refused[tally.stream] = Refused.because(tally.stream, error).note()


def run_task(
    job: Job,
    parts: Sequence[Part],
    task: Task,
    wanted: Callable[[Target], bool] = lambda target: is_plain(target.route),
) -> TaskResult:
    """A passthrough task from its first row to its receipts."""
    failpoints.hit("stage.begin")
    tallies: dict[int, Tally] = {}
    writer = Writer(job, task)
    try:
        for tally, target, rows in read_parts(job, parts, tallies, wanted):
            write(writer, target, rows, tally, job)
        result = writer.finish()
    finally:
        writer.close()
    result.tallies = tallies
    return result


def run_work(job: ApplyJob, numbers: Sequence[int], task: Task) -> ApplyResult:
    """A task that does some of the work, with sinks that it opens."""
    opened = {job.work[number][0]: job.sinks[job.work[number][0]] for number in numbers}
    try:
        for name, sink in opened.items():
            sink.open(job.contexts.get(name, SinkContext()))
        return do_work(job, numbers, task)
    finally:
        for sink in opened.values():
            sink.close()


def do_work(job: ApplyJob, numbers: Sequence[int], task: Task) -> ApplyResult:
    """Some of the work, with sinks that are open."""
    failpoints.hit("apply.begin")
    result = ApplyResult(attempt=task.attempt)
    for number in numbers:
        name, work = job.work[number]
        try:
            result.applied[number] = job.sinks[name].apply(job.epoch, work, task)
        except StagingLost:
            result.lost.add(number)
        failpoints.hit("apply.middle")
    failpoints.hit("apply.task")
    return result
