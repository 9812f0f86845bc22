"""The epoch protocol, step by step: plan, stage, prepare, commit, finish, ack. `docs/spec/epochs.md` has the crash matrix."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from penstock import failpoints, tables
from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError, DataError, FatalError, RangeGone, RetryableError, StagingLost
from penstock.pipeline.routing import Router
from penstock.runtime.epochs.contexts import Contexts
from penstock.runtime.epochs.evolve import Followers
from penstock.runtime.epochs.lost_state import ABOUT, Markers, OnLost
from penstock.runtime.epochs.manifest import Manifest, Range
from penstock.runtime.epochs.staged import Staged
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.wiring import Pair, Wiring
from penstock.runtime.job import Engine, Job, Part
from penstock.sink import Epoch, SinkConnector, Topic, WriteResult
from penstock.source import RangeSource, ReadLimit, Schemas
from penstock.tables import CopyAgain, Refused, TableSource

SWEEP_AFTER_SECS = 30.0
"""How long after a crash its tasks may still write: an executor notices within seconds that its driver is gone."""


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
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent in plan, stage, commit and ack."""
    recovered: bool = False


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
        skip_bad: bool = False,
        max_error_rate: float = 1.0,
        on_phase: Callable[[int, str], None] = lambda number, phase: None,
        on_ack_failed: Callable[[str, ConnectorError], None] = lambda source, error: None,
        contexts: Contexts | None = None,
    ) -> None:
        self.state = state
        self.sources = sources
        self.sinks = sinks
        self.engine = engine
        self.max_epoch_rows = max_epoch_rows
        self.frozen: dict[str, Any] | None = None
        """Ends beyond which nothing is planned (`--drain`); None: no such ends."""
        self._skip_bad = skip_bad
        self._max_error_rate = max_error_rate
        self._on_phase = on_phase
        self._on_ack_failed = on_ack_failed
        self.contexts = contexts or Contexts(state, Wiring(sources, sinks, router))
        """What the connectors are to be opened with."""
        self._wiring = self.contexts.wiring
        self._markers = Markers(state, self._wiring)
        self._followers = Followers(self.contexts)
        self.copies = self.contexts.copies
        self._unacked: dict[str, Any] = {}
        self._abandoned_at = time.monotonic()
        # Tasks get connectors as they were made, not as the driver opened them: a connection does not travel.
        self._values = {
            kind: {name: _pickled(kind, name, each) for name, each in connectors.items()}
            for kind, connectors in (("source", sources), ("sink", sinks))
        }

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
        limit = ReadLimit(parallelism=self.engine.parallelism)
        self.frozen = {name: source.latest(self.position(name), limit) for name, source in self.sources.items()}

    def step(self) -> EpochReport | None:
        """Carry one epoch through to its acks; None when the sources have nothing new."""
        seconds: dict[str, float] = {}
        recovered = self.pending()
        with _timed(seconds, "plan"):
            manifest = self.state.newest if recovered else self._plan()
        if manifest is None:
            return None
        if manifest.state == "planned":
            try:
                with _timed(seconds, "stage"):
                    manifest = self._prepare(*self._stage(manifest, again=recovered))
            except RangeGone:
                if manifest.only is not None:
                    raise
                self._withdraw()
                return EpochReport(manifest.number, {}, {}, 0, seconds, recovered)
        with _timed(seconds, "commit"):
            manifest = self._finish(self._commit(manifest))
        with _timed(seconds, "ack"):
            self.ack()
        self.copies.mark()
        self._sweep()
        return EpochReport(
            number=manifest.number,
            rows_in=manifest.rows_in,
            rows_out=manifest.written(),
            skipped=manifest.skipped,
            seconds=seconds,
            recovered=recovered,
        )

    # -- the steps -----------------------------------------------------------------------------------------------

    def _plan(self) -> Manifest | None:
        newest = self.state.newest
        ranges: dict[str, Range] = {}
        moved = False
        for name, source in self.sources.items():
            start = self.position(name)
            until = self.frozen[name] if self.frozen is not None else None
            end = source.latest(start, ReadLimit(self.max_epoch_rows, self.engine.parallelism, until))
            moved = moved or end != start
            ranges[name] = Range(start=start.model_dump(mode="json"), end=end.model_dump(mode="json"))
        if not moved:
            return None
        manifest = Manifest(
            pipeline=self.state.pipeline,
            incarnation=self.state.identity.incarnation,
            number=newest.number + 1 if newest else 1,
            ranges=ranges,
            attempts=[uuid4().hex[:8]],
            unswept=newest.unswept if newest else [],
        )
        self._on_phase(manifest.number, "plan")
        failpoints.hit("plan.before")
        self.state.save(manifest)
        failpoints.hit("plan.after")
        return manifest

    def _stage(self, manifest: Manifest, again: bool) -> tuple[Manifest, Staged]:
        if again:
            manifest = self._roll_back(manifest)
        staged = self._run(manifest, list(self.sinks), manifest.only)
        failpoints.hit("stage.after")
        return manifest, staged

    def _prepare(self, manifest: Manifest, staged: Staged) -> Manifest:
        read = staged.bad + sum(staged.rows_in.values())
        if staged.bad > self._max_error_rate * read:
            raise DataError(
                f"{staged.bad} of {read} records of epoch {manifest.number} had to be skipped",
                code="PEN-3002",
                hint="mend the data, or raise `max_error_rate`",
            )
        notes = staged.notes if manifest.only is None else self._reread(manifest, staged, manifest.only)
        self._markers.check(staged.rows_out)
        update = {
            "state": "prepared",
            "receipts": staged.receipts,
            "notes": {source: found for source, found in notes.items() if found},
            "rows_in": {**dict.fromkeys(self.sources, 0), **staged.rows_in},
            "rows_out": staged.rows_out,
            "discarded": staged.discarded,
            "skipped": staged.skipped,
            "unswept": sorted({*manifest.unswept, manifest.number}) if staged.retried else manifest.unswept,
        }
        manifest = self.state.save(manifest.model_copy(update=update))
        failpoints.hit("prepare.after")
        return manifest

    def _commit(self, manifest: Manifest) -> Manifest:
        self._on_phase(manifest.number, "commit")
        for name in sorted(manifest.receipts):
            if name not in self.sinks:
                raise FatalError(
                    f"epoch {manifest.number} is prepared for the sink {name!r}, which the pipeline no longer has",
                    code="PEN-1013",
                    hint="put the sink back until one run has ended well, then remove it",
                )
            try:
                self._commit_sink(manifest, name)
            except StagingLost:
                manifest = self._stage_again(manifest, name)
                self._commit_sink(manifest, name)
            failpoints.hit("commit.sink")
        failpoints.hit("commit.after")
        return manifest

    def _finish(self, manifest: Manifest) -> Manifest:
        self._markers.remember(manifest)
        manifest = self.state.save(manifest.model_copy(update={"state": "committed"}))
        failpoints.hit("committed.after")
        self._unacked = self._ends(manifest)
        return manifest

    def ack(self) -> None:
        """Tell the sources what is committed; what fails stays to be told again and never fails an epoch."""
        for name, end in list(self._unacked.items()):
            try:
                self.sources[name].ack(end)
            except ConnectorError as error:
                self._on_ack_failed(name, error)
            else:
                del self._unacked[name]
        failpoints.hit("ack.after")

    @property
    def unacked(self) -> bool:
        return bool(self._unacked)

    # -- parts of steps ------------------------------------------------------------------------------------------

    def _run(self, manifest: Manifest, sinks: Sequence[str], only: Sequence[Pair] | None) -> Staged:
        """One job of the engine, for these sinks; with `only`, for these of their topics."""
        self._on_phase(manifest.number, "stage")
        parts: list[Part] = []
        schemas: dict[str, Schemas] = {}
        cleared: set[tuple[str, str]] = set()
        for name, span in manifest.ranges.items():
            source = self.sources[name]
            start, end = (source.position_type.model_validate(edge) for edge in (span.start, span.end))
            if start != end:
                parts += [Part(len(parts) + i, name, split) for i, split in enumerate(source.split(start, end))]
                schemas[name] = source.schema()
                if isinstance(source, TableSource):
                    refilled = tables.refilled(source.tables(start), source.tables(end))
                    cleared |= {(name, stream) for stream in refilled}
        following = self._followers.follow(schemas, manifest, cleared)
        skipped = following.skipped
        job = Job(
            epoch=self._epoch(manifest),
            parts=parts,
            sources={name: pickle.loads(self._values["source"][name]) for name in schemas},
            sinks={name: pickle.loads(self._values["sink"][name]) for name in sinks},
            router=self._wiring.router,
            schemas={
                n: {s: each for s, each in found.items() if (n, s) not in skipped} for n, found in schemas.items()
            },
            skip_bad=self._skip_bad,
            only=None if only is None else frozenset((sink, topic) for sink, topic in only),
            aside=frozenset(skipped),
            contexts=self.contexts.in_tasks(following.renewed),
        )
        return Staged.of(self.engine.run(job) if parts else (), skipped)

    def _roll_back(self, manifest: Manifest) -> Manifest:
        """Remove what earlier tries staged, and name the next one before it begins."""
        self._abandoned_at = time.monotonic()
        for name, topic in sorted(self._markers.checked):
            if self._markers.holds(name, topic, manifest):
                raise FatalError(
                    f"{topic} in sink {name!r} holds epoch {manifest.number}, but its manifest says that nothing is committed",
                    code="PEN-5007",
                    hint=f"{self.state.directory} was put back from an older copy: move it away to be asked where to go on",
                )
        for attempt in manifest.attempts:
            for sink in self.sinks.values():
                sink.rollback_epoch(self._epoch(manifest, attempt), ())
        return self._name_try(manifest)

    def _name_try(self, manifest: Manifest) -> Manifest:
        unswept = sorted({*manifest.unswept, manifest.number})
        attempts = [*manifest.attempts, uuid4().hex[:8]]
        return self.state.save(manifest.model_copy(update={"attempts": attempts, "unswept": unswept}))

    def _commit_sink(self, manifest: Manifest, name: str) -> None:
        sink = self.sinks[name]
        receipts = [sink.receipt_type.model_validate(receipt) for receipt in manifest.receipts[name]]
        end: dict[str, Json] = {source: span.end for source, span in manifest.ranges.items()}
        end[ABOUT] = {
            "start": {source: span.start for source, span in manifest.ranges.items()},
            "topics": {written: sorted(topics) for written, topics in manifest.rows_out.items()},
            "notes": manifest.notes,
            "replaces": self.state.identity.replaces,
        }
        sink.commit_epoch(self._epoch(manifest), receipts, end)

    def _stage_again(self, manifest: Manifest, name: str) -> Manifest:
        """One sink lost what it had staged: stage the topics that it has not committed, from the range."""
        self._abandoned_at = time.monotonic()
        known = manifest.rows_out.get(name, {})
        lost = [(name, topic) for topic in known if not self._markers.holds(name, topic, manifest)]
        manifest = self._name_try(manifest)
        staged = self._run(manifest, [name], lost)
        gone = {topic for _, topic in lost} - staged.rows_out.get(
            name, {}
        ).keys()  # this time their streams were set aside
        update = {
            "rows_out": {**manifest.rows_out, name: {topic: n for topic, n in known.items() if topic not in gone}},
            "receipts": {**manifest.receipts, name: staged.receipts.get(name, [])},
            "notes": self._reread(manifest, staged, lost),
            "replaced": {**manifest.replaced, name: [*manifest.replaced.get(name, []), *manifest.receipts[name]]},
        }
        return self.state.save(manifest.model_copy(update=update))

    def _reread(self, manifest: Manifest, staged: Staged, pairs: Sequence[Pair]) -> dict[str, list[Json]]:
        """The notes of an epoch whose range was read again for these sinks and topics alone."""
        counted = dict(manifest.notes)
        for name, again in staged.notes.items():
            first = manifest.notes.get(name, [])
            if isinstance(self.sources[name], TableSource):
                counted[name] = [*first, *self._differing(name, manifest.ranges[name], again, pairs)]
            else:
                counted[name] = list(first or again)
        return counted

    def _differing(self, name: str, span: Range, again: Sequence[Json], pairs: Sequence[Pair]) -> Iterator[Json]:
        """
        What is to be noted of tables that were staged a second time, for some sinks alone.

        A copy that is read twice may hold other rows: two sinks have different ones, and both get the next copy. A table
        that failed this time is missing in one sink.
        """
        source: TableSource[Any, Any] = self.sources[name]  # type: ignore[assignment]
        start, end = (source.position_type.model_validate(edge) for edge in (span.start, span.end))
        streams = {s for s in source.schema() if not set(pairs).isdisjoint(self._wiring.pairs(name, s))}
        copied = tables.copied(source.tables(start), source.tables(source.next_start(end, again)))
        if copied & streams:
            yield CopyAgain(streams=tuple(sorted(copied & streams))).note()
        yield from (note for note in again if (refused := Refused.read(note)) and refused.stream in streams)

    def _withdraw(self) -> None:
        """Close a planned epoch that can never be staged: its number stays bound, to an empty range."""
        assert self.state.newest is not None
        manifest = self._roll_back(self.state.newest)
        ranges = {name: Range(start=span.start, end=span.start) for name, span in manifest.ranges.items()}
        self.state.save(manifest.model_copy(update={"state": "committed", "ranges": ranges}))

    def _sweep(self) -> None:
        """Remove what failed tries left, once no task of theirs can still write."""
        newest = self.state.newest
        if newest is None or not newest.unswept or time.monotonic() - self._abandoned_at < SWEEP_AFTER_SECS:
            return
        try:
            for manifest in filter(None, map(self.state.load, newest.unswept)):
                for name, sink in self.sinks.items():
                    named = (*manifest.receipts.get(name, ()), *manifest.replaced.get(name, ()))
                    keep = [sink.receipt_type.model_validate(each) for each in named]
                    for attempt in manifest.attempts:
                        sink.sweep(self._epoch(manifest, attempt), keep)
        except RetryableError:
            return  # the epoch is committed, and what is left lying takes nothing but room: later
        # Not written now: the next manifest carries it, and sweeping twice does no harm.
        self.state.newest = newest.model_copy(update={"unswept": []})

    def _epoch(self, manifest: Manifest, attempt: str | None = None) -> Epoch:
        adopts = frozenset((incarnation, number) for incarnation, number in self.state.identity.adopts)
        if manifest.only is not None:
            # Topics that missed the epoch which this one completes: if they have it by now, another run is alive.
            adopts -= {tuple(self.state.identity.replaces[-1])}
        return Epoch(
            manifest.pipeline, manifest.incarnation, manifest.number, attempt or manifest.attempts[-1], adopts=adopts
        )

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


def _pickled(kind: str, name: str, connector: Any) -> bytes:
    try:
        return pickle.dumps(connector)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{kind} {name!r} cannot be pickled, so it cannot travel to tasks: {error}",
            code="PEN-1016",
            hint="define its class in a module, and make connections in `open`, not in `__init__`",
        ) from error


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - began
