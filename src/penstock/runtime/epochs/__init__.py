"""
The epoch protocol: bind a number to its ranges, stage, prepare, commit, acknowledge; and go on from any crash.

The manifest is the only authority. `docs/spec/epochs.md` has the crash matrix.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock import failpoints
from penstock.durable import Json, canonical, disk_errors, make_directory, write_atomic
from penstock.errors import (
    ConfigError,
    ConnectorError,
    DataError,
    FatalError,
    RetryableError,
    StagingLost,
    is_of_stream,
)
from penstock.pipeline.routing import Router
from penstock.runtime.job import Engine, Job, Part, Tally, TaskResult, is_plain
from penstock.runtime.telemetry import EpochReport
from penstock.schema import ChangeKind, SchemaEvolvable
from penstock.schema.evolution import Policy, refusal, widens
from penstock.sink import CommittedEpoch, Epoch, SinkConnector, Topic, WriteResult
from penstock.source import RangeSource, ReadLimit, Schemas

FORMAT = 1
"""Version of everything in the state directory; a newer one is refused."""

KEPT = 100
"""Committed manifests that stay for people to look at."""

SWEEP_AFTER_SECS = 30.0
"""How long after a crash its tasks may still write: an executor notices within seconds that its driver is gone."""

M = TypeVar("M", bound=BaseModel)

_EPOCH = "@epoch"
"""Beside the sources' ends a marker holds where the epoch began, what it wrote, its notes and which incarnations came before
its own: enough to go on from a lost state."""

_PUT_BACK = "put the target back as it was; or read everything again with `penstock offsets reset FILE`"

_ANY = 2**63 - 1
"""Stands for the last epoch of an incarnation that was ended without knowing it."""


class Range(BaseModel):
    """From one position (included by the source's own rule) to a later one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: Json
    end: Json


class Manifest(BaseModel):
    """The durable record of one epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: str
    incarnation: str
    number: int
    state: Literal["planned", "prepared", "committed"] = "planned"
    ranges: dict[str, Range]
    attempts: list[str]
    """Every try at staging this epoch, the newest last."""
    only: list[tuple[str, Topic]] | None = None
    """The sinks and topics this epoch is for; None: all. Set for the epoch that completes another incarnation's."""
    receipts: dict[str, list[Json]] = {}
    replaced: dict[str, list[Json]] = {}
    """Receipts of a sink that lost some topics: what they name of the other topics is committed and must not be swept."""
    notes: dict[str, list[Json]] = {}
    rows_in: dict[str, int] = {}
    rows_out: dict[str, dict[Topic, tuple[int, int]]] = {}
    discarded: dict[str, dict[Topic, int]] = {}
    """Rows that `schema_evolution` left out or took a value from, per sink and topic."""
    skipped: int = 0
    unswept: list[int] = []
    """Epochs whose failed tries may have left staged data behind."""


class Identity(BaseModel):
    """`pipeline.json`: whose state this is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: str
    incarnation: str
    adopts: list[tuple[str, int]] = []
    """Markers in targets that this incarnation was told to take over."""
    replaces: list[tuple[str, int]] = []
    """Incarnations that this one follows, each with its last epoch: their markers are adopted when they are met."""
    resumes: Manifest | None = None
    """The first epoch of an incarnation that goes on from a lost state, until it is in a file of its own."""
    topics: dict[str, list[Topic]] = {}
    """What each sink has held at least once; a target that holds nothing of it any more was dropped."""
    shape: Json = None
    """What the pipeline looked like, to tell which changes of its file are safe."""


class State:
    """The state directory: one lock, one identity, one manifest per epoch. `open` it before use."""

    def __init__(self, directory: Path, pipeline: str) -> None:
        self.directory = directory
        self.pipeline = pipeline
        self.newest: Manifest | None = None
        self.fresh = False
        self.identity = Identity(pipeline=pipeline, incarnation=str(uuid4()))
        self._lock: int | None = None

    def open(self) -> None:
        """Take the lock and read everything; refuses what is corrupt, newer, another pipeline's or in use."""
        make_directory(self.directory)
        self._lock = _take_lock(self.directory / "lock", self.pipeline)
        try:
            make_directory(self._epochs)
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)  # the lock goes with its descriptor; the file stays, so that nobody locks a dead name
            self._lock = None

    def peek(self) -> State:
        """Read without the lock, for `status` and `offsets show`."""
        self._read()
        return self

    def save_identity(self, **changes: Json) -> None:
        self.identity = self.identity.model_copy(update=changes)
        _store(self.directory / "pipeline.json", self.identity)

    def save(self, manifest: Manifest) -> Manifest:
        """Make the manifest durable; it replaces the one of the same epoch."""
        _store(self._epochs / f"{manifest.number:012d}.json", manifest)
        self.newest = manifest
        if manifest.state == "committed" and manifest.number % KEPT == 0:
            self._retire(manifest.number - KEPT, keep=manifest.unswept)
        return manifest

    def load(self, number: int) -> Manifest | None:
        path = self._epochs / f"{number:012d}.json"
        return _load(path, Manifest) if path.exists() else None

    def edges(self, source: str) -> dict[str, Json]:
        """Up to where a source is `committed`, and up to where it is `planned`; None where nothing is."""
        newest = self.newest
        span = newest.ranges.get(source) if newest else None
        if newest is None or span is None:
            return {"committed": None, "planned": None}
        return {"committed": span.end if newest.state == "committed" else span.start, "planned": span.end}

    def renew(self) -> None:
        """Begin a new incarnation; its first epoch is number 1. The old manifests are kept aside."""
        old, last = self.identity.incarnation, self.newest.number if self.newest else 0
        replaces = [*self.identity.replaces, (old, last)]
        # Identity first: after a crash in between, the manifests of another incarnation are set aside when read.
        self.save_identity(incarnation=str(uuid4()), replaces=replaces, adopts=[], resumes=None, topics={}, shape=None)
        self._set_aside(old)
        self.newest = None

    @property
    def _epochs(self) -> Path:
        return self.directory / "epochs"

    def _read(self) -> None:
        identity = self.directory / "pipeline.json"
        files = sorted(self._epochs.glob("[0-9]*.json")) if self._epochs.exists() else []
        if not identity.exists():
            if files:
                raise FatalError(
                    f"{identity} is missing, but there are manifests beside it",
                    code="PEN-5004",
                    hint=f"restore it from a copy; or move {self.directory} away to be asked where to go on",
                )
            self.fresh = True
            if self._lock is not None:
                self.save_identity()
            return
        self.identity = _load(identity, Identity)
        if self.identity.pipeline != self.pipeline:
            raise FatalError(
                f"{self.directory} belongs to the pipeline {self.identity.pipeline!r}, not to {self.pipeline!r}",
                code="PEN-5003",
                hint="give each pipeline a `state_dir` of its own",
            )
        if files:
            newest = _load(files[-1], Manifest)
            if newest.incarnation == self.identity.incarnation:
                self.newest = newest
            elif self._lock is not None:
                self._set_aside(newest.incarnation)
        if self.newest is None:
            self.newest = self.identity.resumes

    def _set_aside(self, incarnation: str) -> None:
        with disk_errors():
            if self._epochs.exists():
                os.replace(self._epochs, self.directory / f"epochs-{incarnation}")
        make_directory(self._epochs)

    def _retire(self, below: int, keep: Iterable[int]) -> None:
        kept = {f"{number:012d}.json" for number in keep}
        for file in self._epochs.glob("[0-9]*.json"):
            if file.name < f"{below:012d}.json" and file.name not in kept:
                file.unlink(missing_ok=True)


def reset(directory: Path, pipeline: str) -> None:
    """`offsets reset`: the next run reads every source from its beginning, in a new incarnation."""
    state = State(directory, pipeline)
    state.open()
    try:
        state.renew()
    finally:
        state.close()


@dataclass
class EpochLoop:
    """
    Drives one epoch after another. `step` finishes the epoch in hand or plans the next, so calling it again after any
    failure, in this process or in the next, is the recovery.
    """

    state: State
    sources: Mapping[str, RangeSource[Any, Any]]
    sinks: Mapping[str, SinkConnector[Any, Any]]
    router: Router
    engine: Engine
    max_epoch_rows: int = 10_000_000
    skip_bad: bool = False
    max_error_rate: float = 1.0
    on_phase: Callable[[int, str], None] = lambda number, phase: None
    on_ack_failed: Callable[[str, ConnectorError], None] = lambda source, error: None
    frozen: dict[str, Any] | None = None
    """Ends beyond which nothing is planned (`--drain`); None: no such ends."""

    _values: dict[str, dict[str, bytes]] = field(default_factory=dict)
    _unacked: dict[str, Any] = field(default_factory=dict)
    _checked: set[tuple[str, Topic]] = field(default_factory=set)
    _evolved: dict[tuple[str, Topic], pa.Schema] = field(default_factory=dict)
    _seeded: dict[str, frozenset[str]] = field(default_factory=dict)
    _abandoned_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # Tasks get connectors as they were made, not as the driver opened them: a connection does not travel.
        self._values = {
            kind: {name: _pickled(kind, name, each) for name, each in connectors.items()}
            for kind, connectors in (("source", self.sources), ("sink", self.sinks))
        }
        for name, source in self.sources.items():
            if source.has_tables:
                source.held = partial(self._held, name)

    # -- starting ------------------------------------------------------------------------------------------------

    def start(
        self, topics: Iterable[tuple[str, Topic]], on_lost: Literal["stop", "resume", "start-over"] = "stop"
    ) -> None:
        """Compare the state with what the targets say; after the sources and sinks are open, before the first step."""
        newest = self.state.newest
        if newest is not None and newest.state == "committed":
            self._unacked = self._ends(newest)
        elif newest is not None:
            unswept = sorted({*newest.unswept, newest.number})
            self.state.newest = newest.model_copy(update={"unswept": unswept})
        self._check_kept()
        foreign = {pair: marker for pair in topics if (marker := self._foreign(*pair))}
        if foreign:
            self._take_over(foreign, on_lost)
        elif newest is not None and newest.state == "committed":
            self._check_targets(newest)
        self._mark_seeded()  # the last run may have died between a commit and this

    def _foreign(self, sink: str, topic: Topic) -> CommittedEpoch | None:
        """The marker of a topic if it is not one that this state knows."""
        try:
            marker = self.sinks[sink].committed_epoch(self.state.pipeline, topic)
        except ConnectorError as error:
            if not self._is_told_later(error):
                raise
            return None
        self._checked.add((sink, topic))
        if marker is None:
            return None
        identity, newest = self.state.identity, self.state.newest
        if marker.incarnation == identity.incarnation:
            known = 0 if newest is None else newest.number - (newest.state == "planned")
            return marker if marker.number > known else None
        pair = (marker.incarnation, marker.number)
        if pair in {tuple(adopted) for adopted in identity.adopts}:
            return None
        if any(marker.incarnation == old and marker.number <= last for old, last in identity.replaces):
            self.state.save_identity(adopts=[*identity.adopts, pair])
            return None
        return marker

    def _take_over(
        self, foreign: dict[tuple[str, Topic], CommittedEpoch], on_lost: Literal["stop", "resume", "start-over"]
    ) -> None:
        (sink, topic), one = max(foreign.items(), key=lambda item: item[1].number)
        if on_lost == "stop" or self.state.newest is not None:
            raise FatalError(
                f"sink {sink!r} already holds epoch {one.number} of {topic} from incarnation {one.incarnation}, "
                f"which {self.state.directory} knows nothing of: was the state directory deleted or put back from a copy?",
                code="PEN-5007",
                hint="`penstock run FILE --lost-state resume` goes on from the end that the target records; "
                "`--lost-state start-over` reads everything again (empty the target first, or its rows will be doubled)"
                + ("; move this state directory away first" if self.state.newest is not None else ""),
            )
        if on_lost == "resume":
            self._resume(foreign)
            return
        markers = {(marker.incarnation, marker.number) for marker in foreign.values()}
        ended = [(incarnation, _ANY) for incarnation in sorted({incarnation for incarnation, _ in markers})]
        identity = self.state.identity
        self.state.save_identity(adopts=[*identity.adopts, *sorted(markers)], replaces=[*identity.replaces, *ended])

    def _resume(self, foreign: dict[tuple[str, Topic], CommittedEpoch]) -> None:
        """Go on from the last epoch in the targets: in a new incarnation, whose first epoch completes that one."""
        one = _newest(foreign.values())
        about = one.end.get(_EPOCH) or {}
        # Every epoch before `one` was committed everywhere. Of `one` itself some topics may be missing.
        markers, missing = {(each.incarnation, each.number) for each in foreign.values()}, []
        for name, written in about.get("topics", {}).items():
            for each in written if name in self.sinks else ():  # one without markers gets it again: at least once
                marker = self.sinks[name].committed_epoch(self.state.pipeline, each)
                if marker is not None:
                    markers.add((marker.incarnation, marker.number))
                if marker is None or (marker.incarnation, marker.number) != (one.incarnation, one.number):
                    missing.append((name, each))
        ranges = {
            name: Range(start=about["start"][name] if missing else end, end=end)
            for name, end in one.end.items()
            if name in self.sources
        }
        manifest = Manifest(
            pipeline=self.state.pipeline,
            incarnation=self.state.identity.incarnation,
            number=1,
            state="planned" if missing else "committed",
            ranges=ranges,
            attempts=[uuid4().hex[:8]],
            only=missing or None,
            notes=about.get("notes", {}),
        )
        # One write for all: an incarnation that adopts the markers and does not go on from them would double everything.
        replaces = [*((old, last) for old, last in about.get("replaces", ())), (one.incarnation, one.number)]
        held: dict[str, list[Topic]] = {}
        for name, topic in sorted(foreign):
            held.setdefault(name, []).append(topic)
        self.state.save_identity(adopts=sorted(markers), replaces=replaces, resumes=manifest, topics=held)
        self.state.save(manifest)
        if not missing:
            self._unacked = self._ends(manifest)

    def _check_kept(self) -> None:
        """A target that was committed to holds something, wherever a crash has left the epoch in hand."""
        for name, topics in self.state.identity.topics.items():
            for topic in topics if name in self.sinks else ():
                if self.sinks[name].committed_epoch(self.state.pipeline, topic) is None:
                    raise FatalError(
                        f"sink {name!r} holds nothing of {topic}, to which epochs were committed: the target was dropped",
                        code="PEN-5010",
                        hint=_PUT_BACK,
                    )

    def _remember(self, manifest: Manifest) -> None:
        """Record what was committed to for the first time, before the manifest says so."""
        known = self.state.identity.topics
        added = {
            name: [*known.get(name, []), *new]
            for name, topics in manifest.rows_out.items()
            if self.sinks[name].capabilities.exactly_once
            and (new := sorted(set(topics).difference(known.get(name, ()))))
        }
        if added:
            self.state.save_identity(topics={**known, **added})

    def _check_targets(self, newest: Manifest) -> None:
        """A target that no longer holds the last committed epoch has lost rows; going on would hide it."""
        for name, topics in newest.rows_out.items():
            for topic in topics if name in self.sinks and self.sinks[name].capabilities.exactly_once else ():
                marker = self.sinks[name].committed_epoch(self.state.pipeline, topic)
                if marker is None or (marker.incarnation, marker.number) != (newest.incarnation, newest.number):
                    found = "nothing" if marker is None else f"epoch {marker.number}"
                    raise FatalError(
                        f"epoch {newest.number} of {topic} is committed, and sink {name!r} holds {found}: "
                        "the target was dropped or put back from a copy",
                        code="PEN-5010",
                        hint=_PUT_BACK,
                    )

    # -- one epoch -----------------------------------------------------------------------------------------------

    def pending(self) -> bool:
        """True while an epoch is in hand that is not committed."""
        return self.state.newest is not None and self.state.newest.state != "committed"

    def freeze(self) -> None:
        """Plan nothing beyond what the sources hold now."""
        limit = ReadLimit(parallelism=self.engine.parallelism)
        self.frozen = {name: source.latest(self._start(name), limit) for name, source in self.sources.items()}

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
                    manifest = self._stage(manifest, again=recovered)
            except FatalError:
                if not self._withdraw():
                    raise
                return EpochReport(manifest.number, {}, {}, 0, seconds, recovered)
        with _timed(seconds, "commit"):
            manifest = self._commit(manifest)
        self._unacked = self._ends(manifest)
        with _timed(seconds, "ack"):
            self.ack()
        self._mark_seeded()
        self._sweep()
        return EpochReport(
            number=manifest.number,
            rows_in=manifest.rows_in,
            rows_out=_results(manifest),
            skipped=manifest.skipped,
            seconds=seconds,
            recovered=recovered,
        )

    def ack(self) -> None:
        """Tell the sources what is committed; what fails stays to be told again and never fails an epoch."""
        for name, end in list(self._unacked.items()):
            try:
                self.sources[name].ack(end)
            except ConnectorError as error:
                self.on_ack_failed(name, error)
            else:
                del self._unacked[name]
        failpoints.hit("ack.after")

    @property
    def unacked(self) -> bool:
        return bool(self._unacked)

    def _plan(self) -> Manifest | None:
        newest = self.state.newest
        limit = ReadLimit(rows=self.max_epoch_rows, parallelism=self.engine.parallelism)
        ranges: dict[str, Range] = {}
        moved = False
        for name, source in self.sources.items():
            start = self._start(name)
            end = source.latest(start, limit)
            if self.frozen is not None:
                end = source.earlier(end, self.frozen[name])
            moved = moved or end != start
            ranges[name] = Range(start=_dump(start), end=_dump(end))
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
        self.on_phase(manifest.number, "plan")
        failpoints.hit("plan.before")
        self.state.save(manifest)
        failpoints.hit("plan.after")
        return manifest

    def _stage(self, manifest: Manifest, again: bool) -> Manifest:
        if again:
            manifest = self._roll_back(manifest)
        results = self._run(manifest, list(self.sinks), manifest.only)
        failpoints.hit("stage.after")
        tallies: dict[int, Tally] = {}
        for result in results:
            tallies.update(result.tallies)
        rows_in: dict[str, int] = dict.fromkeys(self.sources, 0)
        for tally in tallies.values():
            rows_in[tally.source] += tally.rows
        notes = _notes(results) if manifest.only is None else self._reread(manifest, results, manifest.only)
        skipped = sum(tally.skipped for tally in tallies.values())
        bad = skipped - sum(tally.unrouted for tally in tallies.values())
        if bad > self.max_error_rate * (bad + sum(rows_in.values())):
            raise DataError(
                f"{bad} of {bad + sum(rows_in.values())} records of epoch {manifest.number} had to be skipped",
                code="PEN-3002",
                hint="mend the data, or raise `max_error_rate`",
            )
        rows_out, discarded = _written(results)
        foreign = {
            (sink, topic): marker
            for sink, topics in rows_out.items()
            for topic in topics
            if (sink, topic) not in self._checked and (marker := self._foreign(sink, topic))
        }
        if foreign:
            self._take_over(foreign, "stop")
        retried = any(result.attempt for result in results)
        manifest = manifest.model_copy(
            update={
                "state": "prepared",
                "receipts": _receipts(results),
                "notes": {source: found for source, found in notes.items() if found},
                "rows_in": rows_in,
                "rows_out": rows_out,
                "discarded": discarded,
                "skipped": skipped,
                "unswept": sorted({*manifest.unswept, manifest.number}) if retried else manifest.unswept,
            }
        )
        self.state.save(manifest)
        failpoints.hit("prepare.after")
        return manifest

    def _roll_back(self, manifest: Manifest) -> Manifest:
        """Remove what earlier tries staged, and name the next one before it begins."""
        self._abandoned_at = time.monotonic()
        for name, topic in sorted(self._checked):
            marker = self.sinks[name].committed_epoch(self.state.pipeline, topic)
            if marker and (marker.incarnation, marker.number) == (manifest.incarnation, manifest.number):
                raise FatalError(
                    f"{topic} in sink {name!r} holds epoch {marker.number}, but its manifest says that nothing is committed",
                    code="PEN-5007",
                    hint=f"{self.state.directory} was put back from an older copy: move it away to be asked where to go on",
                )
        for attempt in manifest.attempts:
            for sink in self.sinks.values():
                sink.rollback_epoch(self._epoch(manifest, attempt), ())
        unswept = sorted({*manifest.unswept, manifest.number})
        attempts = [*manifest.attempts, uuid4().hex[:8]]
        return self.state.save(manifest.model_copy(update={"attempts": attempts, "unswept": unswept}))

    def _commit(self, manifest: Manifest) -> Manifest:
        self.on_phase(manifest.number, "commit")
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
        self._remember(manifest)
        self.state.save(manifest.model_copy(update={"state": "committed"}))
        failpoints.hit("committed.after")
        assert self.state.newest is not None
        return self.state.newest

    def _commit_sink(self, manifest: Manifest, name: str) -> None:
        sink = self.sinks[name]
        receipts = [sink.receipt_type.model_validate(receipt) for receipt in manifest.receipts[name]]
        end: dict[str, Json] = {source: span.end for source, span in manifest.ranges.items()}
        end[_EPOCH] = {
            "start": {source: span.start for source, span in manifest.ranges.items()},
            "topics": {written: sorted(topics) for written, topics in manifest.rows_out.items()},
            "notes": manifest.notes,
            "replaces": self.state.identity.replaces,
        }
        sink.commit_epoch(self._epoch(manifest), receipts, end)

    def _stage_again(self, manifest: Manifest, name: str) -> Manifest:
        """One sink lost what it had staged: stage the topics that it has not committed, from the range."""
        sink, lost = self.sinks[name], []
        self._abandoned_at = time.monotonic()
        for topic in manifest.rows_out.get(name, {}):
            marker = sink.committed_epoch(self.state.pipeline, topic)
            if marker is None or (marker.incarnation, marker.number) != (manifest.incarnation, manifest.number):
                lost.append((name, topic))
        attempts = [*manifest.attempts, uuid4().hex[:8]]
        unswept = sorted({*manifest.unswept, manifest.number})
        manifest = self.state.save(manifest.model_copy(update={"attempts": attempts, "unswept": unswept}))
        results = self._run(manifest, [name], lost)
        staged, _ = _written(results)
        gone = {topic for _, topic in lost} - staged.get(name, {}).keys()  # this time their streams were set aside
        kept = {topic: rows for topic, rows in manifest.rows_out.get(name, {}).items() if topic not in gone}
        update = {
            "rows_out": {**manifest.rows_out, name: kept},
            "receipts": {**manifest.receipts, name: _receipts(results).get(name, [])},
            "notes": self._reread(manifest, results, lost),
            "replaced": {**manifest.replaced, name: [*manifest.replaced.get(name, []), *manifest.receipts[name]]},
        }
        return self.state.save(manifest.model_copy(update=update))

    def _reread(
        self, manifest: Manifest, results: Sequence[TaskResult], pairs: Sequence[tuple[str, Topic]]
    ) -> dict[str, list[Json]]:
        """The notes of an epoch whose range was read again for these sinks and topics alone."""
        first, again = manifest.notes, _notes(results)
        counted = dict(first)
        for name in again:
            source = self.sources[name]
            streams = frozenset(s for s in source.schema() if not set(pairs).isdisjoint(self._pairs(name, s)))
            counted[name] = list(source.reread(first.get(name, ()), again[name], streams))
        return counted

    def _withdraw(self) -> bool:
        """Close a planned epoch that can never be staged: its number stays bound, to an empty range."""
        manifest = self.state.newest
        if manifest is None or manifest.state != "planned" or manifest.only is not None:
            return False
        try:
            gone = any(
                source.withdraw(*(source.position_type.model_validate(edge) for edge in (span.start, span.end)))
                for name, span in manifest.ranges.items()
                if span.start != span.end and (source := self.sources[name])
            )
        except RetryableError:
            gone = False  # the source does not answer: what failed is told, and this is asked at the next start
        if not gone:
            return False
        manifest = self._roll_back(manifest)
        ranges = {name: Range(start=span.start, end=span.start) for name, span in manifest.ranges.items()}
        self.state.save(manifest.model_copy(update={"state": "committed", "ranges": ranges}))
        return True

    def _run(
        self, manifest: Manifest, sinks: Sequence[str], only: Sequence[tuple[str, Topic]] | None
    ) -> Sequence[TaskResult]:
        self.on_phase(manifest.number, "stage")
        parts: list[Part] = []
        schemas: dict[str, Schemas] = {}
        cleared: set[tuple[str, str]] = set()
        for name, span in manifest.ranges.items():
            source = self.sources[name]
            start, end = (source.position_type.model_validate(edge) for edge in (span.start, span.end))
            if start != end:
                parts += [Part(len(parts) + i, name, split) for i, split in enumerate(source.split(start, end))]
                schemas[name] = source.schema()
                cleared |= {(name, stream) for stream in source.cleared(start, end)}
        renewed: set[tuple[str, Topic]] = set()
        aside = self._follow(schemas, manifest, cleared, renewed)
        job = Job(
            epoch=self._epoch(manifest),
            parts=parts,
            sources={name: pickle.loads(self._values["source"][name]) for name in schemas},
            sinks={name: pickle.loads(self._values["sink"][name]) for name in sinks},
            router=self.router,
            schemas={n: {s: each for s, each in found.items() if (n, s) not in aside} for n, found in schemas.items()},
            skip_bad=self.skip_bad,
            only=None if only is None else frozenset((sink, topic) for sink, topic in only),
            aside=frozenset(aside),
            renewed=frozenset(renewed),
        )
        told = {-number: Tally(source, notes=[note]) for number, ((source, _), note) in enumerate(aside.items(), 1)}
        return [*(self.engine.run(job) if parts else ()), *([TaskResult(tallies=told)] if told else [])]

    def _follow(
        self,
        schemas: Mapping[str, Schemas],
        manifest: Manifest,
        cleared: Collection[tuple[str, str]],
        renewed: set[tuple[str, Topic]],
    ) -> dict[tuple[str, str], Json]:
        """
        Let the sinks follow every stream; gives those that are left out since one cannot, with the notes that say so.

        Targets of `cleared` streams whose types are replaced with the rows go into `renewed`.
        """
        aside = {}
        owners = self._owners(manifest)
        for name, streams in schemas.items():
            for stream, schema in streams.items():
                try:
                    if self.sources[name].has_tables:
                        self._claim(name, stream, owners)
                    found = self._evolve({name: {stream: schema}}, (name, stream) in cleared)
                    renewed.update(found)
                except ConnectorError as error:
                    note = self.sources[name].set_aside(stream, error) if is_of_stream(error) else None
                    if note is None:
                        raise
                    aside[name, stream] = note
        return aside

    def _claim(self, source: str, stream: str, owners: dict[tuple[str, Topic], str]) -> None:
        """Refuse a table without a route, and one that would go where another goes."""
        targets = self.router.targets(source, stream)
        if not targets and self.router.unrouted == "stop":
            raise self.router.no_route(source, stream)
        mine = f"{source}/{stream}"
        for sink, topic in [(sink, target.topic) for target in targets for sink in target.sinks]:
            if (first := owners.setdefault((sink, topic), mine)) != mine:
                raise ConfigError(
                    f"the streams {first} and {mine} meet in topic {topic} of sink {sink!r}",
                    code="PEN-1011",
                    hint="put {schema}, {stream} or {source} into `to` of the route; or leave the table out",
                )

    def _owners(self, manifest: Manifest) -> dict[tuple[str, Topic], str]:
        """The tables that were there before the epoch, by where they go."""
        owners: dict[tuple[str, Topic], str] = {}
        for name, span in manifest.ranges.items():
            source = self.sources[name]
            for stream in followed(source, source.position_type.model_validate(span.start)):
                for pair in self._pairs(name, stream):
                    owners.setdefault(pair, f"{name}/{stream}")
        return owners

    def _evolve(self, schemas: Mapping[str, Schemas], cleared: bool = False) -> list[tuple[str, Topic]]:
        """Let sinks that can follow a schema do so before the rows that need it are staged; gives those that do it later."""
        later: list[tuple[str, Topic]] = []
        for source, streams in schemas.items():
            for stream, new in streams.items():
                for target in self.router.targets(source, stream):
                    for name in target.sinks:
                        sink, known = self.sinks[name], self._evolved.get((name, target.topic))
                        target.tell(sink, new)
                        policy = sink.policy(target.topic)
                        # Of SQL only the tasks know the schema, and what is discarded is known there row by row.
                        if not is_plain(target.route) or policy.discards or known == new:
                            continue
                        if isinstance(sink, SchemaEvolvable) and self._evolve_one(
                            sink, target.topic, policy, new, cleared
                        ):
                            later.append((name, target.topic))
                        else:
                            self._evolved[name, target.topic] = new
        return later

    def _pairs(self, source: str, stream: str) -> list[tuple[str, Topic]]:
        try:
            return [(sink, target.topic) for target in self.router.targets(source, stream) for sink in target.sinks]
        except ConfigError as error:
            if not self._is_told_later(error):
                raise
            return []

    def _is_told_later(self, error: ConnectorError) -> bool:
        """True if `_follow` tells it of each stream that it is about, and goes on with the others."""
        return is_of_stream(error) and all(source.has_tables for source in self.sources.values())

    def _is_seeded(self, sink: str, topic: Topic) -> bool | None:
        """None: the sink has no place for the topic."""
        try:
            return self.sinks[sink].is_seeded(topic)
        except ConnectorError as error:
            if not self._is_told_later(error):
                raise
            return None

    def _held(self, source: str, stream: str) -> list[bool]:
        held = [bool(self._is_seeded(sink, topic)) for sink, topic in self._pairs(source, stream)]
        # Who starts over has asked for everything again, whatever the targets hold.
        return [*held, False] if self.state.identity.replaces else held

    def _mark_seeded(self) -> None:
        """Tell the sinks which first copies are complete, once each has been committed."""
        newest = self.state.newest
        if newest is None or newest.state != "committed":
            return
        for name, source in self.sources.items():
            if not source.has_tables or name not in newest.ranges:
                continue
            seeded = source.seeded(self._start(name))
            try:
                for stream in sorted(seeded - self._seeded.get(name, frozenset())):
                    for sink, topic in self._pairs(name, stream):
                        if self._is_seeded(sink, topic) is False:
                            self.sinks[sink].mark_seeded(topic)
            except RetryableError:
                continue  # told again after the next epoch
            self._seeded[name] = seeded

    def _evolve_one(self, sink: Any, topic: Topic, policy: Policy, new: pa.Schema, cleared: bool) -> bool:
        """True if the target changes only with the rows, since it cannot follow, and is cleared."""
        old = sink.schema(topic)
        changes = sink.diff_schemas(old, new) if old is not None else ()
        if cleared and policy is Policy.EVOLVE and not sink.evaluate_evolution(changes) and sink.renews(topic, changes):
            return True
        for change in changes:
            added = change.kind is ChangeKind.ADDED
            wider = change.kind is ChangeKind.RETYPED and not widens(change.new, change.old)
            if (policy is Policy.FREEZE and (added or wider)) or (wider and not sink.evaluate_evolution([change])):
                raise refusal(topic, change.column, change.old, change.new, policy)
        if changes:
            sink.apply_evolution(topic, changes)
        return False

    def _sweep(self) -> None:
        """Remove what failed tries left behind, once no task of theirs can still write."""
        newest = self.state.newest
        if newest is None or not newest.unswept or time.monotonic() - self._abandoned_at < SWEEP_AFTER_SECS:
            return
        try:
            for number in newest.unswept:
                self._sweep_epoch(number)
        except RetryableError:
            return  # the epoch is committed, and what is left lying takes nothing but room: later
        # Not written now: the next manifest carries it, and sweeping twice does no harm.
        self.state.newest = newest.model_copy(update={"unswept": []})

    def _sweep_epoch(self, number: int) -> None:
        manifest = self.state.load(number)
        for attempt in manifest.attempts if manifest else ():
            assert manifest is not None
            for name, sink in self.sinks.items():
                named = (*manifest.receipts.get(name, ()), *manifest.replaced.get(name, ()))
                keep = [sink.receipt_type.model_validate(each) for each in named]
                sink.sweep(self._epoch(manifest, attempt), keep)

    # -- small things --------------------------------------------------------------------------------------------

    def _epoch(self, manifest: Manifest, attempt: str | None = None) -> Epoch:
        adopts = frozenset((incarnation, number) for incarnation, number in self.state.identity.adopts)
        if manifest.only is not None:
            # Topics that missed the epoch which this one completes: if they have it by now, another run is alive.
            adopts -= {tuple(self.state.identity.replaces[-1])}
        return Epoch(
            manifest.pipeline, manifest.incarnation, manifest.number, attempt or manifest.attempts[-1], adopts=adopts
        )

    def _start(self, name: str) -> Any:
        source, newest = self.sources[name], self.state.newest
        if newest is None or name not in newest.ranges:
            return source.initial()
        end = source.position_type.model_validate(newest.ranges[name].end)
        return source.advance(end, newest.notes.get(name, ()))

    def _ends(self, manifest: Manifest) -> dict[str, Any]:
        return {
            name: self.sources[name].position_type.model_validate(span.end)
            for name, span in manifest.ranges.items()
            if name in self.sources
        }


def followed(source: RangeSource[Any, Any], position: Any) -> list[str]:
    """The tables whose targets are theirs at a position; not those that have met another there."""
    left = ("gone", "skipped")
    return [each.stream for each in source.streams(position) if each.state not in left and each.code != "PEN-1011"]


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


def _newest(markers: Iterable[CommittedEpoch]) -> CommittedEpoch:
    """The last epoch of the incarnation that all others came before; refuses markers that do not tell which it is."""
    found = list(markers)
    last = {tuple(each) for marker in found for each in (marker.end.get(_EPOCH) or {}).get("replaces", ())}
    leading = [marker for marker in found if all(marker.incarnation != incarnation for incarnation, _ in last)]
    one = max(leading, key=lambda marker: marker.number, default=None)
    if one is not None:
        before = {one.incarnation: one.number, **dict((one.end.get(_EPOCH) or {}).get("replaces", ()))}
        if all(marker.number <= before.get(marker.incarnation, -1) for marker in found):
            return one
    raise FatalError(
        "the targets hold epochs of more than one incarnation, and none of them tells which came last",
        code="PEN-5007",
        hint="another pipeline of this name writes there as well: empty the targets, and `--lost-state start-over`",
    )


def _receipts(results: Sequence[TaskResult]) -> dict[str, list[Json]]:
    receipts: dict[str, list[Json]] = {}
    for result in results:
        for name, receipt in result.receipts.items():
            receipts.setdefault(name, []).append(receipt.model_dump(mode="json"))
    return receipts


def _notes(results: Sequence[TaskResult]) -> dict[str, list[Json]]:
    """In the order of the parts; of a part that several topics read, what each of them has to say."""
    parts: dict[int, tuple[str, list[Json]]] = {}
    for result in results:
        for number, tally in result.tallies.items():
            _, found = parts.setdefault(number, (tally.source, []))
            found += [note for note in tally.notes if note not in found]
    notes: dict[str, list[Json]] = {}
    for _, (source, found) in sorted(parts.items()):
        notes.setdefault(source, []).extend(found)
    return notes


def _written(
    results: Sequence[TaskResult],
) -> tuple[dict[str, dict[Topic, tuple[int, int]]], dict[str, dict[Topic, int]]]:
    """What reached each sink and topic, and what was discarded there; one that nothing reached has no epoch to check."""
    total: dict[tuple[str, Topic], WriteResult] = {}
    for result in results:
        for pair, one in result.written.items():
            total[pair] = total.get(pair, WriteResult()) + one
    written: dict[str, dict[Topic, tuple[int, int]]] = {}
    discarded: dict[str, dict[Topic, int]] = {}
    for (sink, topic), one in total.items():
        if one.records_written:
            written.setdefault(sink, {})[topic] = (one.records_written, one.bytes_written)
        if one.records_discarded:
            discarded.setdefault(sink, {})[topic] = one.records_discarded
    return written, discarded


def _results(manifest: Manifest) -> dict[tuple[str, Topic], WriteResult]:
    written = {
        (sink, topic): WriteResult(rows, size)
        for sink, topics in manifest.rows_out.items()
        for topic, (rows, size) in topics.items()
    }
    for sink, topics in manifest.discarded.items():
        for topic, rows in topics.items():
            written[sink, topic] = written.get((sink, topic), WriteResult()) + WriteResult(records_discarded=rows)
    return written


def _dump(position: BaseModel) -> Json:
    return position.model_dump(mode="json")


def _store(path: Path, value: BaseModel) -> None:
    body = canonical(value.model_dump(mode="json"))
    write_atomic(path, canonical({"format": FORMAT, "crc32": zlib.crc32(body.encode()), "body": body}).encode())


def _load(path: Path, kind: type[M]) -> M:
    try:
        stored = json.loads(path.read_bytes())
        version, checksum, body = stored["format"], stored["crc32"], stored["body"]
        if version <= FORMAT:
            if zlib.crc32(body.encode()) != checksum:
                raise ValueError("its checksum does not match")
            return kind.model_validate_json(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ValidationError is a ValueError
        reason = "it does not hold what it should" if isinstance(error, ValidationError | KeyError) else str(error)
        raise FatalError(
            f"{path} is corrupt: {reason}",
            code="PEN-5004",
            hint="restore it from a copy; or move the state directory away to be asked where to go on",
        ) from error
    raise FatalError(
        f"{path} has format {version}, and this Penstock knows {FORMAT}", code="PEN-5006", hint="run the newer version"
    )


def _take_lock(path: Path, pipeline: str) -> int:
    with disk_errors():
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise FatalError(
            f"{path.parent} is in use by {holder}",
            code="PEN-5002",
            hint="wait until it has ended or stop it; two runs of one pipeline never share a state directory",
        ) from None
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = f"process {os.getpid()} on {socket.gethostname()} ({pipeline}, since {since})"
    try:
        with disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
