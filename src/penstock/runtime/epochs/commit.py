"""Steps 4 and 5: do the work that the commits of an epoch need, then commit every sink and topic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from penstock import failpoints
from penstock.durable import Json
from penstock.errors import ConnectorError, FatalError, PlanStale, StagingLost
from penstock.runtime.epochs.contexts import Contexts
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.state import State
from penstock.runtime.job import ApplyJob, Engine, do_work
from penstock.sink import (
    ABOUT,
    PLANS,
    Applied,
    Epoch,
    Receipt,
    SinkConnector,
    Task,
    Topic,
    TopicSink,
    Work,
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

    def __init__(self, state: State, contexts: Contexts, engine: Engine, threads: int) -> None:
        self._state = state
        self._wiring = contexts.wiring
        self._contexts = contexts
        self._engine = engine
        self._threads = threads

    def run(
        self, manifest: Manifest, names: Iterable[str], epoch: Callable[[Manifest, str | None], Epoch], *, again: bool
    ) -> tuple[Manifest, list[str]]:
        """
        Commit these sinks; gives the manifest, and the sinks whose staged data is gone.

        `again`: an earlier call for this epoch may have died anywhere, so each marker is asked first.
        """
        commits = [commit for name in names for commit in self._of_sink(manifest, name)]
        if any(commit.has_second_stage for commit in commits):
            if again:
                manifest, commits = self._still_to_do(manifest, commits, epoch)
            if again or not manifest.applies:
                manifest = self._name_try(manifest)
        lost: set[str] = set()
        for _ in range(PLANS):
            self._plan(epoch(manifest, _last(manifest.applies)), commits)
            retried = self._apply(epoch(manifest, _last(manifest.applies)), commits)
            lost |= {commit.name for commit in commits if isinstance(commit.error, StagingLost)}
            ready = [commit for commit in commits if commit.error is None]
            self._commit(manifest, ready, epoch)
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

    def _still_to_do(
        self, manifest: Manifest, commits: list[_Commit], epoch: Callable[[Manifest, str | None], Epoch]
    ) -> tuple[Manifest, list[_Commit]]:
        """The commits that the targets do not hold yet; of the others the manifest learns whose files they name."""
        left, kept = [], {name: dict(topics) for name, topics in manifest.kept.items()}
        for commit in commits:
            if commit.has_second_stage:
                assert commit.topic is not None
                marker = commit.sink.committed_epoch(manifest.pipeline, commit.topic)
                if is_committed(marker, epoch(manifest, None)):
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
        planned = [commit for commit in commits if commit.has_second_stage]
        for commit in planned:
            assert isinstance(commit.sink, TopicSink)
            assert commit.topic is not None
            failpoints.hit("plan_apply.before")
            try:
                commit.work = commit.sink.plan_apply(epoch, commit.topic, commit.receipts)
            except StagingLost as error:
                commit.error = error
        if any(commit.work for commit in planned):
            failpoints.hit("plan_apply.after")

    def _apply(self, epoch: Epoch, commits: Iterable[_Commit]) -> bool:
        """Do the planned work; True if a task was tried more than once, so that one try may have left files."""
        items = [(commit, number, work) for commit in commits for number, work in enumerate(commit.work)]
        if not items:
            return False
        names = {commit.name for commit, _, _ in items}
        small = sum(work.bytes for _, _, work in items) <= SMALL_WORK_BYTES
        sinks = {name: self._wiring.sinks[name] if small else self._wiring.fresh_sink(name) for name in names}
        work = [(commit.name, work) for commit, _, work in items]
        job = ApplyJob(epoch, sinks, work, self._contexts.in_tasks())  # type: ignore[arg-type]
        results = [do_work(job, range(len(items)), Task(0))] if small else self._engine.apply(job)
        for result in results:
            for number, applied in result.applied.items():
                items[number][0].applied[items[number][1]] = applied
            for number in result.lost:
                items[number][0].error = StagingLost("staged data was gone when the commit's work was done")
        failpoints.hit("apply.after")
        return any(result.attempt for result in results)

    def _commit(
        self, manifest: Manifest, commits: Sequence[_Commit], epoch: Callable[[Manifest, str | None], Epoch]
    ) -> None:
        """All at the same time where the sinks allow it; raises what is neither lost nor stale once all have ended."""
        ends = {False: (epoch(manifest, None), self._end(manifest))}
        if any(commit.work for commit in commits):
            ends[True] = (epoch(manifest, manifest.applies[-1]), self._end(manifest, applied=manifest.applies[-1]))
        beside = [commit for commit in commits if commit.sink.concurrent] if self._threads > 1 else []
        if len(beside) < 2:
            beside = []
        with contextlib.ExitStack() as ending:  # no thread outlives the commit: an engine may fork
            if beside:
                pool = ending.enter_context(ThreadPoolExecutor(min(self._threads, len(beside)), "penstock-commit"))
                waiting = [pool.submit(commit.run, *ends[bool(commit.work)]) for commit in beside]
            for place, commit in enumerate(commits):
                if commit not in beside:
                    commit.run(*ends[bool(commit.work)])
                    if commit.error is None and [c.name for c in commits[place + 1 : place + 2]] != [commit.name]:
                        failpoints.hit("commit.sink")
            for each in waiting if beside else ():
                each.result()
        errors = [commit.error for commit in commits if commit.error is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, FatalError)):
            if not isinstance(error, StagingLost | PlanStale):
                raise error

    def _end(self, manifest: Manifest, **more: Json) -> dict[str, Json]:
        """What the markers keep."""
        end: dict[str, Json] = {source: span.end for source, span in manifest.ranges.items()}
        end[ABOUT] = {
            "start": {source: span.start for source, span in manifest.ranges.items()},
            "topics": {written: sorted(topics) for written, topics in manifest.rows_out.items()},
            "notes": manifest.notes,
            "replaces": self._state.identity.replaces,
            **more,
        }
        return end


def has_second_stage(sink: SinkConnector[Any, Any]) -> bool:
    """True if commits of the sink may need work first."""
    return isinstance(sink, TopicSink) and type(sink).plan_apply is not TopicSink.plan_apply


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


def _fresh(commit: _Commit) -> _Commit:
    return _Commit(commit.name, commit.sink, commit.topic, commit.receipts, commit.is_first)


def _last(tries: Sequence[str]) -> str | None:
    return tries[-1] if tries else None
