"""The epoch protocol, step by step: plan, stage, prepare, commit, finish, ack. `docs/spec/epochs.md` has the crash matrix."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from penstock import failpoints
from penstock.errors import ConnectorError, RangeGone, StagingLost
from penstock.pipeline.routing import Router
from penstock.runtime.epochs.commit import THREADS, Commits
from penstock.runtime.epochs.contexts import Contexts
from penstock.runtime.epochs.lost_state import Markers, OnLost
from penstock.runtime.epochs.manifest import Manifest, Range
from penstock.runtime.epochs.messages import Messages
from penstock.runtime.epochs.stage import Staged, Stager, Wanted
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.sweep import Sweeper
from penstock.runtime.epochs.tries import Tries
from penstock.runtime.epochs.wiring import Pair, Wiring
from penstock.runtime.job import Bad, Engine
from penstock.sink import SinkConnector, Topic, WriteResult, has_second_stage
from penstock.source import RangeSource, ReadLimit


@dataclass(frozen=True)
class EpochReport:
    """What one committed epoch did."""

    number: int
    rows_in: Mapping[str, int] = field(default_factory=dict)
    """Rows read, per source."""
    rows_out: Mapping[tuple[str, Topic], WriteResult] = field(default_factory=dict)
    """Rows written, per sink and topic."""
    skipped: int = 0
    """Rows left out by `on_error = "skip"` and `unrouted = "skip"`."""
    letters: Mapping[Topic, int] = field(default_factory=dict)
    """Records that became dead letters, per topic."""
    codes: Mapping[str, int] = field(default_factory=dict)
    """The same by error code; of an epoch that another run had staged, nothing."""
    oldest: Mapping[str, float] = field(default_factory=dict)
    """When the first row of each source came to be, in seconds since 1970; only where rows know it, and not if `recovered`."""
    bad: Sequence[Bad] = ()
    """The first few of the records that could not be used."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent in plan, stage, apply, commit and ack."""
    recovered: bool = False
    incarnation: str = ""
    began: float = 0.0
    """When this run took it up, in seconds since 1970."""


class EpochLoop:
    """
    Drives one epoch after another. `step` finishes the epoch in hand or plans the next, so calling it again after any
    failure, in this process or in the next, is the recovery.
    """

    def __init__(
        self,
        state: State,
        sources: Mapping[str, RangeSource[Any, Any]],
        sinks: Mapping[str, SinkConnector[Any, Any]],
        router: Router,
        engine: Engine,
        *,
        max_epoch_rows: int = 10_000_000,
        max_epoch_bytes: int | None = None,
        messages: Messages | None = None,
        threads: int = THREADS,
        on_phase: Callable[[int, str], None] = lambda number, phase: None,
        on_ack: Callable[[str], None] = lambda source: None,
        on_ack_failed: Callable[[str, ConnectorError], None] = lambda source, error: None,
        contexts: Contexts | None = None,
    ) -> None:
        self.state = state
        self.sources = sources
        self.sinks = sinks
        self.engine = engine
        self.max_epoch_rows = max_epoch_rows
        self.max_epoch_bytes = max_epoch_bytes
        self.frozen: dict[str, Any] | None = None
        """Ends beyond which nothing is planned (`--drain`); None: no such ends."""
        self._on_phase = on_phase
        self._on_ack = on_ack
        self._on_ack_failed = on_ack_failed
        self.contexts = contexts or Contexts(state, Wiring(sources, sinks, router))
        """What the connectors are to be opened with."""
        wiring = self.contexts.wiring.pack()
        self._markers = Markers(state, wiring)
        self._messages = messages or Messages()
        self._stager = Stager(self.contexts, engine, self._messages)
        self._commits = Commits(state, self.contexts, engine, threads, on_phase)
        self._sweeper = Sweeper(state, wiring)
        self._tries = Tries(state, wiring, self._markers, self._stager, self._sweeper, on_phase)
        self.copies = self.contexts.copies
        self._unacked: dict[str, Any] = {}
        self._staged = Staged()
        """What the last stage came to, for the report."""

    def start(self, pairs: Iterable[Pair], on_lost: OnLost = "stop") -> None:
        """Compare the state with what the targets say; after the sources and sinks are open, before the first step."""
        newest = self.state.newest
        if newest is not None and newest.state != "committed":
            unswept = sorted({*newest.unswept, newest.number})
            self.state.newest = newest.model_copy(update={"unswept": unswept})
        self._markers.start(pairs, on_lost)
        newest = self.state.newest
        if newest is not None and newest.state == "committed":
            self._unacked = self._ends(newest)
        self.copies.mark()  # the last run may have died between a commit and this

    def pending(self) -> bool:
        """True while an epoch is in hand that is not committed."""
        return self.state.newest is not None and self.state.newest.state != "committed"

    def freeze(self) -> None:
        """Plan nothing beyond what the sources hold now."""
        limit = ReadLimit(parallelism=self.engine.parallelism, whole=True)
        self.frozen = {name: source.latest(self.position(name), limit) for name, source in self.sources.items()}

    def step(self) -> EpochReport | None:
        """Carry one epoch through to its acks; None when the sources have nothing new."""
        seconds: dict[str, float] = {}
        began, incarnation = time.time(), self.state.identity.incarnation
        recovered = self.pending()
        again = self.state.newest is not None and self.state.newest.state == "prepared"
        with _timed(seconds, "plan"):
            manifest = self.state.newest if recovered else self._plan()
        if manifest is None:
            return None
        if manifest.state == "planned":
            try:
                with _timed(seconds, "stage"):
                    manifest = self._prepare(*self._stage(self._bound(manifest, recovered), again=recovered))
            except RangeGone:
                if manifest.only is not None:
                    raise
                self._withdraw()
                return EpochReport(
                    manifest.number, seconds=seconds, recovered=recovered, incarnation=incarnation, began=began
                )
        with _timed(seconds, "commit"):
            manifest = self._finish(self._commit(manifest, again))
        seconds["apply"] = self._commits.take_apply_secs()
        seconds["commit"] -= seconds["apply"]
        with _timed(seconds, "ack"):
            self.ack()
        self.copies.mark()
        self._sweeper.sweep()
        staged, self._staged = self._staged, Staged()
        return EpochReport(
            number=manifest.number,
            rows_in=manifest.rows_in,
            rows_out=manifest.written(),
            skipped=manifest.skipped,
            letters=manifest.letters,
            codes=staged.codes,
            oldest=staged.oldest,
            bad=tuple(staged.samples),
            seconds=seconds,
            recovered=recovered,
            incarnation=incarnation,
            began=began,
        )

    # -- the steps -----------------------------------------------------------------------------------------------

    def _plan(self) -> Manifest | None:
        newest = self.state.newest
        ranges: dict[str, Range] = {}
        moved = False
        for name, source in self.sources.items():
            start = self.position(name)
            until = self.frozen[name] if self.frozen is not None else None
            limit = ReadLimit(self.max_epoch_rows, self.engine.parallelism, until, self.max_epoch_bytes)
            end = source.latest(start, limit)
            is_first = newest is None or name not in newest.ranges
            moved = moved or end != start or (is_first and source.begins_now)
            ranges[name] = Range(start=start.model_dump(mode="json"), end=end.model_dump(mode="json"))
        if not moved:
            return None
        manifest = Manifest(
            pipeline=self.state.pipeline,
            incarnation=self.state.identity.incarnation,
            number=newest.number + 1 if newest else 1,
            ranges=ranges,
            parallelism=self.engine.parallelism,
            attempts=[uuid4().hex[:8]],
            unswept=newest.unswept if newest else [],
            held=newest.held if newest else {},
            **self._messages.plan(newest),
        )
        self._on_phase(manifest.number, "plan")
        failpoints.hit("plan.before")
        self.state.save(manifest)
        failpoints.hit("plan.after")
        return manifest

    def _bound(self, manifest: Manifest, recovered: bool) -> Manifest:
        """
        Bind an epoch to versions of schemas that has none: its state was lost, or somebody asked for other ones.

        One that an earlier run planned takes the schema files as they are now: no sink with two phases shows any of it yet.
        """
        versions = manifest.versions or self._messages.plan(None).get("versions", {})
        if recovered and manifest.only is None:
            versions = {**versions, **self._messages.file_versions()}
        changed = versions != manifest.versions
        return self.state.save(manifest.model_copy(update={"versions": versions})) if changed else manifest

    def _stage(self, manifest: Manifest, again: bool) -> tuple[Manifest, Staged]:
        if again:
            manifest = self._tries.roll_back(manifest)
        manifest, staged = self._tries.run(manifest, Wanted(list(self.sinks), manifest.only))
        failpoints.hit("stage.after")
        return manifest, staged

    def _prepare(self, manifest: Manifest, staged: Staged) -> Manifest:
        recent = self._messages.check(manifest, staged)
        notes = staged.notes if manifest.only is None else self._stager.reread(manifest, staged, manifest.only)
        self._markers.check(staged.rows_out)
        update = {
            "state": "prepared",
            "receipts": staged.receipts,
            "notes": {source: found for source, found in notes.items() if found},
            "rows_in": {**dict.fromkeys(self.sources, 0), **staged.rows_in},
            "rows_out": staged.rows_out,
            "discarded": staged.discarded,
            "skipped": staged.skipped,
            "letters": staged.letters,
            "recent": recent,
            "applies": [uuid4().hex[:8]] if any(map(has_second_stage, self.sinks.values())) else [],
            "unswept": sorted({*manifest.unswept, manifest.number}) if staged.retried else manifest.unswept,
        }
        manifest = self.state.save(manifest.model_copy(update=update))
        self._staged = staged
        failpoints.hit("prepare.after")
        return manifest

    def _commit(self, manifest: Manifest, again: bool) -> Manifest:
        self._on_phase(manifest.number, "commit")
        if again:
            self._sweeper.abandon()
        if manifest.restage is not None:
            manifest = self._tries.anew(manifest)
        manifest, lost = self._commits.run(manifest, sorted(manifest.receipts), again=again)
        for name in lost:
            manifest = self._tries.again(manifest, name)
        if lost:
            manifest, still = self._commits.run(manifest, lost, again=False)
            if still:
                raise StagingLost(f"what {', '.join(still)} had staged was gone twice")
        failpoints.hit("commit.after")
        return manifest

    def _finish(self, manifest: Manifest) -> Manifest:
        update = {
            "state": "committed",
            "held": self._markers.after(manifest),
            "applied": manifest.applied if manifest.number in manifest.unswept else {},
        }
        manifest = self.state.save(manifest.model_copy(update=update))
        failpoints.hit("committed.after")
        self._unacked = self._ends(manifest)
        return manifest

    def ack(self) -> None:
        """Tell the sources what is committed; what fails is tried again later and never fails an epoch."""
        for name, end in list(self._unacked.items()):
            try:
                self.sources[name].ack(end)
            except ConnectorError as error:
                self._on_ack_failed(name, error)
            else:
                del self._unacked[name]
                self._on_ack(name)
        failpoints.hit("ack.after")

    @property
    def unacked(self) -> bool:
        return bool(self._unacked)

    def _withdraw(self) -> None:
        """Close a planned epoch that can never be staged: its number stays bound, to an empty range."""
        assert self.state.newest is not None
        manifest = self._tries.roll_back(self.state.newest)
        ranges = {name: Range(start=span.start, end=span.start) for name, span in manifest.ranges.items()}
        self.state.save(manifest.model_copy(update={"state": "committed", "ranges": ranges}))

    def position(self, name: str) -> Any:
        """Where the next range of a source starts."""
        source, newest = self.sources[name], self.state.newest
        if newest is None or name not in newest.ranges:
            return source.initial()
        end = source.position_type.model_validate(newest.ranges[name].end)
        return source.next_start(end, newest.notes.get(name, ()))

    def _ends(self, manifest: Manifest) -> dict[str, Any]:
        return {
            name: self.sources[name].position_type.model_validate(span.end)
            for name, span in manifest.ranges.items()
            if name in self.sources
        }


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - began
