"""What a sink connector implements: stage in tasks, commit on the driver, and know what it has committed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from penstock import failpoints
from penstock.durable import Json
from penstock.errors import Fenced, PlanStale, StagingLost
from penstock.formats import Format
from penstock.schema.evolution import EvolutionConfig, Policy
from penstock.source import C, Connector, type_argument

Topic = str
"""A name like `/lake/orders`; with a schema, it is all that a sink knows about where rows came from."""

Positions = Mapping[str, Json]
"""A position per source."""


PLANS = 5
"""How often a topic's work is planned before its epoch waits: each time another writer has moved the target on."""


class DeliveryGuarantee(StrEnum):
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"


@dataclass(frozen=True)
class Epoch:
    """One range per source, committed as one unit. The number is bound to its ranges for ever."""

    pipeline: str
    incarnation: str
    number: int
    attempt: str = field(default_factory=lambda: uuid4().hex[:8], compare=False)
    """Names one try at staging, so that a rollback can never touch what another try or another run has staged."""
    adopts: frozenset[tuple[str, int]] = field(default=frozenset(), compare=False)
    """Markers `(incarnation, number)` of earlier incarnations that this one takes over."""
    start: Positions = field(default_factory=dict, compare=False)
    end: Positions = field(default_factory=dict, compare=False)
    """Where the sources are before and after the epoch: what tells it from another run's epoch of the same number."""

    def stem(self, task: Task | None = None) -> str:
        """The beginning of every staged name of this try; with a task, a fresh whole name."""
        stem = f"{self.number:012d}-{self.attempt}"
        return f"{stem}-{task.partition:05d}-{task.attempt:02d}-{uuid4().hex[:8]}" if task else stem

    def __str__(self) -> str:
        return f"{self.pipeline} · epoch {self.number}"


@dataclass(frozen=True)
class Task:
    """One task of an epoch's job, and which try of it this is."""

    partition: int
    attempt: int = 0


class Receipt(BaseModel):
    """What a task hands over after it staged its part of an epoch: small, picklable, JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def topics(self) -> Iterable[Topic]:
        """The topics that were staged."""
        return ()


R = TypeVar("R", bound=Receipt)


class Work(BaseModel):
    """
    One piece of heavy work that the commit of a topic needs, such as one data file to rewrite: small and picklable.

    A subclass adds what `apply` must know, the target's version that the plan saw among it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: Topic
    bytes: int = 0
    """About how much it reads and writes. Little work is done on the driver, where it needs no job."""


class Applied(Receipt):
    """What `apply` hands over: durable by then, and visible to nobody until the commit names it."""

    topic: Topic

    def topics(self) -> Iterable[Topic]:
        return (self.topic,)


class CommittedEpoch(BaseModel):
    """The marker that a target keeps: whose epoch it holds, and where the sources stood at its end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    incarnation: str
    number: int
    end: dict[str, Json] = {}


@dataclass(frozen=True)
class WriteResult:
    records_written: int = 0
    bytes_written: int = 0
    records_discarded: int = 0
    """Rows that `schema_evolution` left out, or took a value from."""

    def __add__(self, other: WriteResult) -> WriteResult:
        return WriteResult(
            self.records_written + other.records_written,
            self.bytes_written + other.bytes_written,
            self.records_discarded + other.records_discarded,
        )


@dataclass(frozen=True)
class SinkConnectorCapabilities:
    """What a sink promises; each flag switches on tests in the kit."""

    exactly_once: bool = False
    idempotent: bool = False
    upsert: bool = False
    changelog: bool = False
    two_phase_commit: bool = False
    schema_evolution: bool = False
    partitioned: bool = False

    def with_exactly_once(self) -> SinkConnectorCapabilities:
        return replace(self, exactly_once=True)

    def with_idempotent(self) -> SinkConnectorCapabilities:
        return replace(self, idempotent=True)

    def with_upsert(self) -> SinkConnectorCapabilities:
        return replace(self, upsert=True)

    def with_changelog(self) -> SinkConnectorCapabilities:
        return replace(self, changelog=True)

    def with_two_phase_commit(self) -> SinkConnectorCapabilities:
        return replace(self, two_phase_commit=True)

    def with_schema_evolution(self) -> SinkConnectorCapabilities:
        return replace(self, schema_evolution=True)

    def with_partitioned(self) -> SinkConnectorCapabilities:
        return replace(self, partitioned=True)

    def __str__(self) -> str:
        return " ".join(flag.name for flag in fields(self) if getattr(self, flag.name)) or "none"


def has_second_stage(sink: SinkConnector[Any, Any]) -> bool:
    """True if commits of the sink may need work first."""
    return isinstance(sink, TopicSink) and sink.needs_apply and sink.__class__.plan_apply is not TopicSink.plan_apply


def is_committed(marker: CommittedEpoch | None, epoch: Epoch) -> bool:
    """
    True when the target already holds `epoch`; `Fenced` when the marker is of a run that this one does not follow.

    Two runs on two copies of a state directory reach the same number with other ends: the first to commit wins.

    Sinks ask on the very snapshot that they commit from: asking is what makes their commit a compare-and-set.
    """
    if marker is None:
        return False
    if marker.incarnation == epoch.incarnation:
        if marker.number > epoch.number:
            raise Fenced(f"the target holds epoch {marker.number}, and this run wants to commit {epoch.number}")
        if marker.number == epoch.number and not same_ranges(marker.end, _edges(epoch)):
            raise Fenced(
                f"the target holds an epoch {marker.number} of other ranges: another run of this incarnation wrote it",
                hint="two runs work on copies of one state directory: stop this one and keep the state of the other",
            )
        return marker.number == epoch.number
    if (marker.incarnation, marker.number) in epoch.adopts:
        return False
    raise Fenced(
        f"the target holds epoch {marker.number} of incarnation {marker.incarnation}, not of {epoch.incarnation}",
        hint="another pipeline or run writes there: stop it, or give this one a target or a name of its own",
    )


ABOUT = "@epoch"
"""Beside the sources' ends a marker holds where the epoch began, what it wrote, its notes and which incarnations came before
its own: enough to go on from a lost state."""


def same_ranges(one: Positions, other: Positions) -> bool:
    """Compared for the sources that both ends know: a pipeline may have got or lost one in between."""
    began, too = ((end.get(ABOUT) or {}).get("start", {}) for end in (one, other))
    edges = ((_of_sources(one), _of_sources(other)), (began, too))
    return all(left[source] == right[source] for left, right in edges for source in left.keys() & right.keys())


def _edges(epoch: Epoch) -> Positions:
    return {**epoch.end, ABOUT: {"start": epoch.start}}


def _of_sources(end: Positions) -> dict[str, Json]:
    return {source: edge for source, edge in end.items() if source != ABOUT}


@dataclass(frozen=True)
class TopicContext:
    """What the runtime knows about one topic of a sink."""

    policy: Policy | None = None
    """What the topic's route says about rows that the target has no place for; None: the sink's own option counts."""

    source_schema: pa.Schema | None = None
    """The columns that the stream has now, as its source says; None where nobody knows: before the first epoch, after SQL."""

    encoder: Format[Any] | None = None
    """In a task: how a message sink writes the rows as payloads, by the topic's `[[schemas]]`; None: the sink chooses."""

    keeps_refused: bool = False
    """
    In a task: rows that `write_batch` refuses for themselves are kept as dead letters.

    A sink that would otherwise find them when it commits looks for them while it writes, at some cost.
    """

    refilled: bool = False
    """
    In a task: the rows of this epoch follow a clear, and the target takes their types with them.

    Set only where the sink has agreed (`evaluate_evolution(changes, refilled=topic)`).
    """


@dataclass(frozen=True)
class SinkContext:
    """
    What the runtime knows and a sink may want to know; the argument of `open`.

    On the driver a sink stays open while schemas change from epoch to epoch: ask when you need it, and keep no answer.
    """

    topics: Mapping[Topic, TopicContext] = field(default_factory=dict)

    state_dir: Path | None = None
    """
    A directory of the sink's own, inside the pipeline's state directory; in tasks only if they run on the driver's machine.

    The sink makes it.
    """

    name: str = ""
    """The sink's name in the pipeline: what it sends to others says by it which of several sinks has sent it."""

    def topic(self, name: Topic) -> TopicContext:
        """What is known about a topic now."""
        return self.topics.get(name, _UNKNOWN)

    def __reduce__(self) -> tuple[type[SinkContext], tuple[dict[Topic, TopicContext], Path | None, str]]:
        return SinkContext, (dict(self.topics), self.state_dir, self.name)


_UNKNOWN = TopicContext()


class SinkConnector(Connector[C], Generic[C, R]):
    """Base of all sinks. Each method says where it runs."""

    capabilities: SinkConnectorCapabilities = SinkConnectorCapabilities()
    receipt_type: ClassVar[type[Receipt]] = Receipt

    context: SinkContext = SinkContext()
    """What the last `open` was given."""

    evolves_with_rows: ClassVar[bool] = False
    """
    True if the commit gives the target the columns that its rows have. The runtime then alters nothing before, except where
    files must be written again: an epoch that fails leaves no column.
    """

    in_order: ClassVar[bool] = False
    """
    True if others see rows as tasks write them, and their order counts. One task then reads an epoch, except for routes
    whose `partitions` keep the order of each key.
    """

    max_epoch_rows: ClassVar[int | None] = None
    """
    About how many rows an epoch reads at most, whatever `[processing]` allows: for sinks that may send a whole epoch again.

    Sources that lead to the sink share it. A row may still become several: by routes to several topics, and by SQL.
    """

    concurrent: ClassVar[bool] = False
    """True if the sink may commit in a thread of its own beside other sinks, and its topics beside one another."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        receipt = type_argument(cls, Receipt)
        if receipt is not None:
            cls.receipt_type = receipt

    def open(self, context: SinkContext = SinkContext()) -> None:
        """
        Connect, test, discover; called once in each process that uses the sink. The first call is not retried.

        Override it with the same signature, and call `super().open(context)` to find the context in `self.context`.
        """
        self.context = context

    def policy(self, topic: Topic) -> Policy:
        """Provided: what the topic's route, else the sink's own option says about rows that the target has no place for."""
        own = self.config.schema_evolution if isinstance(self.config, EvolutionConfig) else Policy.EVOLVE
        return self.context.topic(topic).policy or own

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        """Task: before its first `write_batch` of the epoch."""

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        """Task: take rows. Nothing may become visible in a sink with two-phase commit."""
        raise NotImplementedError

    def flush(self) -> None:
        """Task: hand buffered rows to the system; the runtime calls it before `pre_commit`."""

    def pre_commit(self, epoch: Epoch) -> R:
        """Task, after `flush`: make everything that was staged durable (fsync), and nothing visible."""
        self.flush()
        return self.receipt_type()  # type: ignore[return-value]

    def commit_epoch(self, epoch: Epoch, receipts: Sequence[R], end: Positions) -> None:
        """
        Driver: make the epoch visible, per topic one atomic compare-and-set that also records (incarnation, number, end).

        May be called again for an epoch that is already there: a topic already at `epoch.number` is done.
        """

    def committed_epoch(self, pipeline: str, topic: Topic) -> CommittedEpoch | None:
        """Driver: ask the target itself."""
        return None

    def rollback_epoch(self, epoch: Epoch, receipts: Sequence[R]) -> None:
        """
        Driver: remove what this try (`epoch.attempt`) staged. The default sweeps all of it.

        Called when a stage failed, before the epoch is staged again, and only after `committed_epoch` said no.
        """
        self.sweep(epoch, ())

    def sweep(self, epoch: Epoch, keep: Sequence[R]) -> None:
        """Driver: remove what this try staged and `keep` does not name; once no task of the try can still write."""

    def is_seeded(self, topic: Topic) -> bool:
        """Driver: True when the topic's first copy is complete in the target."""
        return False

    def mark_seeded(self, topic: Topic) -> None:
        """Driver: record in the target that the topic's first copy is complete."""

    def schema(self, topic: Topic) -> pa.Schema | None:
        """Driver: the input the sink expects; None means any."""
        return None


class EpochSink(SinkConnector[C, R]):
    """A sink that commits all topics at once, and has tasks publish the parts of an epoch that is large."""

    def plan_epoch(self, epoch: Epoch, receipts: Sequence[R]) -> Sequence[Work]:
        """
        Driver, before `commit_epoch`: the parts of a large epoch that `apply` publishes.

        The target itself records each part, so that it is published once: `commit_epoch` finishes what is left of them.
        May be called again for the same epoch, and then gives what is left. None: `commit_epoch` does everything.
        """
        return ()

    def apply(self, epoch: Epoch, work: Work, task: Task) -> Applied:
        """Task, or the driver if all of it is little: do one piece of planned work; may be called again for the same piece."""
        raise NotImplementedError


class TopicSink(SinkConnector[C, R]):
    """
    A sink that commits topic by topic (lakes, files).

    One whose commit needs heavy work also implements `plan_apply`, `apply` and `commit_applied`; then the commit itself
    is metadata only.
    """

    applied_type: ClassVar[type[Applied]] = Applied
    """What `apply` gives."""

    needs_apply: bool = True
    """False if the sink has `plan_apply` and, with its options, no use for it."""

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[R], end: Positions) -> None:
        """Driver: the compare-and-set of one topic. Ask `is_committed` on the snapshot that you commit from."""
        raise NotImplementedError

    def plan_apply(self, epoch: Epoch, topic: Topic, receipts: Sequence[R]) -> Sequence[Work]:
        """
        Driver: the work that the commit of a topic needs, from one version of the target; none if the epoch is there.

        Writes nothing. May be called again for the same epoch, with another `epoch.attempt`.
        """
        return ()

    def apply(self, epoch: Epoch, work: Work, task: Task) -> Applied:
        """
        Task, or the driver if all of it is little: do one piece of work, durable and visible to nobody.

        Names every file after `epoch.stem(task)`, so that `sweep` finds what a dead try left.
        """
        raise NotImplementedError

    def commit_applied(
        self, epoch: Epoch, topic: Topic, receipts: Sequence[R], end: Positions, applied: Sequence[Applied]
    ) -> None:
        """
        Driver: `commit_topic` for a topic that had work: metadata only, one compare-and-set.

        Raises `PlanStale` if the target is not at the very version that the plan saw.
        """
        raise NotImplementedError

    def commit_epoch(self, epoch: Epoch, receipts: Sequence[R], end: Positions) -> None:
        """Driver: every topic, with its work done in this process. The runtime calls the methods above instead."""
        lost: StagingLost | None = None
        for position, topic in enumerate(sorted({topic for receipt in receipts for topic in receipt.topics()})):
            if position:
                failpoints.hit("commit.topic")
            try:
                self._commit_alone(epoch, topic, [r for r in receipts if topic in r.topics()], end)
            except StagingLost as error:
                lost = error  # the other topics go on: only these receipts can finish what is half committed of them
        if lost is not None:
            raise lost

    def _commit_alone(self, epoch: Epoch, topic: Topic, receipts: Sequence[R], end: Positions) -> None:
        for _ in range(PLANS):
            own = replace(epoch, attempt=uuid4().hex[:8])  # the work has a try of its own
            work = self.plan_apply(own, topic, receipts)
            applied = [self.apply(own, each, Task(number)) for number, each in enumerate(work)]
            try:
                if work:
                    self.commit_applied(own, topic, receipts, end, applied)
                else:
                    self.commit_topic(epoch, topic, receipts, end)
                return
            except PlanStale as error:
                stale = error
        raise stale
