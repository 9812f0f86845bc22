"""Steps 4 and 5: do the work that the commits of an epoch need, then commit every sink and topic."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from penstock import failpoints
from penstock.durable import Json
from penstock.errors import ConnectorError, FatalError, Fenced, PlanStale, StagingLost
from penstock.runtime.epochs.contexts import Contexts
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.state import State
from penstock.runtime.job import ApplyJob, Engine
from penstock.runtime.task import do_work
from penstock.sink import (
    ABOUT,
    PLANS,
    Applied,
    Epoch,
    EpochSink,
    Receipt,
    SinkConnector,
    Task,
    Topic,
    TopicSink,
    Work,
    has_second_stage,
    is_committed,
)

SMALL_WORK_BYTES = 8 << 20
"""Up to here an epoch's work is done on the driver: it takes less time than starting a job for it."""

THREADS = 8
"""Commits that run at the same time: each mostly waits for a disk, a store or a database."""


@dataclass(eq=False)
class _Commit:
    """The commit of one topic; or of a whole sink, if it commits all its topics at once."""

    name: str
    sink: SinkConnector[Any, Any]
    topic: Topic | None
    receipts: list[Receipt]
    is_first: bool
    """The first one of its sink."""
    work: Sequence[Work] = ()
    applied: dict[int, Applied] = field(default_factory=dict)
    error: ConnectorError | None = None

    @property
    def has_second_stage(self) -> bool:
        return has_second_stage(self.sink)

    @property
    def may_have_work(self) -> bool:
        return self.has_second_stage or publishes_in_parts(self.sink)

    def plan(self, epoch: Epoch) -> None:
        """Ask the sink for the work that this commit needs."""
        failpoints.hit("plan_apply.before")
        try:
            if isinstance(self.sink, EpochSink):
                self.work = self.sink.plan_epoch(epoch, self.receipts)
            else:
                assert isinstance(self.sink, TopicSink)
                assert self.topic is not None
                self.work = self.sink.plan_apply(epoch, self.topic, self.receipts)
        except StagingLost as error:
            self.error = error

    def apply(self, epoch: Epoch) -> None:
        """Do the work here, on the driver."""
        assert isinstance(self.sink, TopicSink | EpochSink)
        job = ApplyJob(epoch, {self.name: self.sink}, [(self.name, work) for work in self.work])
        result = do_work(job, range(len(self.work)), Task(0))
        self.applied = result.applied
        self.error = _lost() if result.lost else None

    def run(self, epoch: Epoch, end: Mapping[str, Json]) -> None:
        """The compare-and-set; what it raises is kept."""
        if not self.is_first:
            failpoints.hit("commit.topic")
        try:
            if self.topic is None:
                self.sink.commit_epoch(epoch, self.receipts, end)
                return
            assert isinstance(self.sink, TopicSink)
            if self.work:
                applied = [self.applied[number] for number in sorted(self.applied)]
                self.sink.commit_applied(epoch, self.topic, self.receipts, end, applied)
            else:
                self.sink.commit_topic(epoch, self.topic, self.receipts, end)
        except ConnectorError as error:
            self.error = error


class Commits:
    """Commits a prepared epoch. May be called again for the same manifest, in this process or in another."""

    def __init__(
        self,
        state: State,
        contexts: Contexts,
        engine: Engine,
        threads: int,
        on_phase: Callable[[int, str], None] = lambda number, phase: None,
    ) -> None:
        self._state = state
        self._wiring = contexts.wiring
        self._contexts = contexts
        self._engine = engine
        self._threads = threads
        self._on_phase = on_phase
        self._apply_secs = 0.0

    def take_apply_secs(self) -> float:
        """Time that the work before the commits took since this was last asked."""
        secs, self._apply_secs = self._apply_secs, 0.0
        return secs

    def run(self, manifest: Manifest, names: Iterable[str], *, again: bool) -> tuple[Manifest, list[str]]:
        """
        Commit these sinks; gives the manifest, and the sinks whose staged data is gone.

        `again`: an earlier call for this epoch may have died anywhere, so each marker is asked first.
        """
        commits = [commit for name in names for commit in self._of_sink(manifest, name)]
        if any(commit.has_second_stage for commit in commits):
            if again:
                manifest, commits = self._still_to_do(manifest, commits)
            if again or not manifest.applies:
                manifest = self._name_try(manifest)
        lost: set[str] = set()
        for _ in range(PLANS):
            began = time.perf_counter()
            self._plan(self._state.epoch(manifest, _last(manifest.applies)), commits)
            if any(commit.work for commit in commits):
                self._on_phase(manifest.number, "apply")
            retried = self._apply(self._state.epoch(manifest, _last(manifest.applies)), commits)
            self._apply_secs += time.perf_counter() - began
            self._on_phase(manifest.number, "commit")
            lost |= {commit.name for commit in commits if isinstance(commit.error, StagingLost)}
            ready = [commit for commit in commits if commit.error is None]
            self._commit(manifest, ready)
            lost |= {commit.name for commit in ready if isinstance(commit.error, StagingLost)}
            manifest = _recorded(manifest, ready, retried)
            stale = [commit for commit in ready if isinstance(commit.error, PlanStale)]
            if not stale:
                return manifest, sorted(lost)
            why, commits = stale[0].error, [_fresh(commit) for commit in stale]
            manifest = self._name_try(manifest)
        assert why is not None
        raise why

    def _of_sink(self, manifest: Manifest, name: str) -> list[_Commit]:
        sink = self._wiring.sinks.get(name)
        if sink is None:
            raise FatalError(
                f"epoch {manifest.number} is prepared for the sink {name!r}, which the pipeline no longer has",
                code="PEN-1013",
                hint="put the sink back until one run has ended well, then remove it",
            )
        receipts = [sink.receipt_type.model_validate(receipt) for receipt in manifest.receipts[name]]
        if not isinstance(sink, TopicSink):
            return [_Commit(name, sink, None, receipts, is_first=True)]
        by_topic: dict[Topic, list[Receipt]] = {}
        for receipt in receipts:
            for topic in receipt.topics():
                by_topic.setdefault(topic, []).append(receipt)
        return [
            _Commit(name, sink, topic, by_topic[topic], is_first=not place)
            for place, topic in enumerate(sorted(by_topic))
        ]

    def _still_to_do(self, manifest: Manifest, commits: list[_Commit]) -> tuple[Manifest, list[_Commit]]:
        """The commits that the targets do not hold yet; of the others the manifest learns whose files they name."""
        left, kept = [], {name: dict(topics) for name, topics in manifest.kept.items()}
        for commit in commits:
            if commit.has_second_stage:
                assert commit.topic is not None
                marker = commit.sink.committed_epoch(manifest.pipeline, commit.topic)
                if is_committed(marker, self._state.epoch(manifest, None)):
                    assert marker is not None
                    won = (marker.end.get(ABOUT) or {}).get("applied")
                    if won is not None:
                        kept.setdefault(commit.name, {})[commit.topic] = won
                    continue
            left.append(commit)
        return manifest.model_copy(update={"kept": kept}), left

    def _name_try(self, manifest: Manifest) -> Manifest:
        """Name the next try at the work before its first file exists."""
        update = {
            "applies": [*manifest.applies, uuid4().hex[:8]],
            "unswept": sorted({*manifest.unswept, manifest.number}) if manifest.applies else manifest.unswept,
        }
        return self._state.save(manifest.model_copy(update=update))

    def _plan(self, epoch: Epoch, commits: Iterable[_Commit]) -> None:
        planned = [commit for commit in commits if commit.may_have_work]
        self._each(planned, lambda commit: commit.plan(epoch))
        if any(commit.work for commit in planned):
            failpoints.hit("plan_apply.after")

    def _apply(self, epoch: Epoch, commits: Iterable[_Commit]) -> bool:
        """Do the planned work; True if a task was tried more than once, so that one try may have left files."""
        working = [commit for commit in commits if commit.work]
        if not working:
            return False
        if sum(work.bytes for commit in working for work in commit.work) <= SMALL_WORK_BYTES:
            self._each(working, lambda commit: commit.apply(epoch))
            retried = False
        else:
            retried = self._apply_in_tasks(epoch, working)
        failpoints.hit("apply.after")
        return retried

    def _apply_in_tasks(self, epoch: Epoch, working: Sequence[_Commit]) -> bool:
        items = [(commit, number) for commit in working for number in range(len(commit.work))]
        sinks = {commit.name: self._wiring.fresh_sink(commit.name) for commit in working}
        work = [(commit.name, commit.work[number]) for commit, number in items]
        results = self._engine.apply(ApplyJob(epoch, sinks, work, self._contexts.in_tasks(self._engine.is_local)))  # type: ignore[arg-type]
        for result in results:
            for place, applied in result.applied.items():
                commit, number = items[place]
                commit.applied[number] = applied
            for place in result.lost:
                items[place][0].error = _lost()
        return any(result.attempt for result in results)

    def _commit(self, manifest: Manifest, commits: Sequence[_Commit]) -> None:
        """Raises what is neither lost nor stale, once all commits have ended."""
        ends = {False: (self._state.epoch(manifest, None), self._end(manifest))}
        if any(commit.work and commit.topic is not None for commit in commits):
            ends[True] = (
                self._state.epoch(manifest, manifest.applies[-1]),
                self._end(manifest, applied=manifest.applies[-1]),
            )
        last = {commit.name: commit for commit in commits}

        def run(commit: _Commit) -> None:
            commit.error = next((each.error for each in commits if isinstance(each.error, Fenced)), None)
            if commit.error is not None:  # what a run commits that is fenced elsewhere is in the way of the other one
                return
            commit.run(*ends[bool(commit.work) and commit.topic is not None])
            if commit.error is None and commit is last[commit.name]:
                failpoints.hit("commit.sink")

        self._each(commits, run)
        errors = [commit.error for commit in commits if commit.error is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, FatalError)):
            if not isinstance(error, StagingLost | PlanStale):
                raise error

    def _each(self, commits: Sequence[_Commit], do: Callable[[_Commit], None]) -> None:
        """Call `do` for each: in threads where the sinks allow it, and for the others one after the other meanwhile."""
        beside = [commit for commit in commits if commit.sink.concurrent]
        if self._threads < 2 or len(beside) < 2:
            beside = []
        alone = [commit for commit in commits if commit not in beside]
        with contextlib.ExitStack() as ending:  # no thread outlives the step: an engine may fork
            waiting = []
            if beside:
                pool = ending.enter_context(ThreadPoolExecutor(min(self._threads, len(beside)), "penstock-commit"))
                waiting = [pool.submit(do, commit) for commit in beside]
            for commit in alone:
                do(commit)
            for each in waiting:
                each.result()

    def _end(self, manifest: Manifest, **more: Json) -> dict[str, Json]:
        """What the markers keep."""
        end: dict[str, Json] = {source: span.end for source, span in manifest.ranges.items()}
        end[ABOUT] = {
            "start": {source: span.start for source, span in manifest.ranges.items()},
            "topics": {written: sorted(topics) for written, topics in manifest.rows_out.items()},
            "notes": manifest.notes,
            "held": manifest.held_before(),
            "replaces": self._state.identity.replaces,
            **more,
        }
        return end


def publishes_in_parts(sink: SinkConnector[Any, Any]) -> bool:
    """True if the sink commits all topics at once, and may have tasks publish parts of a large epoch before."""
    return isinstance(sink, EpochSink)


def _recorded(manifest: Manifest, commits: Iterable[_Commit], retried: bool) -> Manifest:
    """The manifest with the try that each topic was committed by, and its files if others of that try may lie beside them."""
    kept = {name: dict(topics) for name, topics in manifest.kept.items()}
    applied = dict(manifest.applied)
    for commit in commits:
        if commit.applied and commit.error is None and commit.topic is not None:
            kept.setdefault(commit.name, {})[commit.topic] = manifest.applies[-1]
            files = [each.model_dump(mode="json") for each in commit.applied.values()]
            applied[commit.name] = [*applied.get(commit.name, []), *files]
    unswept = sorted({*manifest.unswept, manifest.number}) if retried else manifest.unswept
    return manifest.model_copy(update={"kept": kept, "applied": applied, "unswept": unswept})


def _lost() -> StagingLost:
    return StagingLost("staged data was gone when the work of the commit was done")


def _fresh(commit: _Commit) -> _Commit:
    return _Commit(commit.name, commit.sink, commit.topic, commit.receipts, commit.is_first)


def _last(tries: Sequence[str]) -> str | None:
    return tries[-1] if tries else None
