"""Runs a checked pipeline: opens its connectors, drives its epochs, waits out what passes and stops on what does not."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
from pydantic import ValidationError

from penstock.capture import ChangeCapture, SnapshotTable
from penstock.durable import Json
from penstock.errors import ENGINE_GONE, NOT_READY, Action, ConnectorError, FatalError, RetryableError, action
from penstock.pipeline import Pipeline, compare_shapes
from penstock.pipeline.checks import stream_notices
from penstock.pipeline.routing import Router, Target
from penstock.runtime.epochs import Contexts, EpochLoop, EpochReport, State, Wiring, followed
from penstock.runtime.epochs.messages import Messages
from penstock.runtime.ingest import Ingest
from penstock.runtime.job import Engine, OnErrors
from penstock.runtime.journal import JournalPosition
from penstock.runtime.messages import letters
from penstock.runtime.messages.codecs import Codecs
from penstock.runtime.messages.foreseen import LETTERS, lives_with, misfits
from penstock.runtime.messages.letters import SINK
from penstock.runtime.messages.store import keep_private, letter_sink, replay_source
from penstock.runtime.monitor import EndWatch, Monitor, Step
from penstock.runtime.retry import Backoff
from penstock.runtime.starting import Starting
from penstock.runtime.telemetry import Looks, Telemetry
from penstock.runtime.telemetry.export import Exporters
from penstock.runtime.telemetry.ports import listening
from penstock.runtime.waker import Waker
from penstock.schema import discover
from penstock.sink import SinkConnector, Topic
from penstock.source import (
    HealthStatus,
    ProducerConfig,
    RangeSource,
    Schemas,
    SourceConnector,
)
from penstock.tables import TableSource, routed

FULL_SECS = 1.0
"""How often the journals are asked whether they are full, while an epoch waits for its interval."""

REQUEST_SECS = 1.0
"""How often requests for a replay are looked for, where nothing else needs a timer."""

LostState = Literal["stop", "resume", "start-over"]


@dataclass
class Summary:
    """What a run came to."""

    epochs: int = 0
    rows_in: int = 0
    rows_out: int = 0
    skipped: int = 0
    seconds: float = 0.0
    first_commit_secs: float | None = None
    """From the call of `run` to the first committed epoch."""
    failed_tables: dict[str, list[str]] = field(default_factory=dict)
    """Per source, the tables that are set aside at the end."""

    def add(self, report: EpochReport, since: float) -> None:
        self.epochs += 1
        self.rows_in += sum(report.rows_in.values())
        self.rows_out += sum(written.records_written for written in report.rows_out.values())
        self.skipped += report.skipped
        if self.first_commit_secs is None:
            self.first_commit_secs = time.monotonic() - since


class Server(Protocol):
    """Something that is closed when the run ends."""

    def close(self) -> None: ...


Serve = Callable[[Telemetry, int, Pipeline], Server]
"""Publishes telemetry on a port; `penstock.web.serve` is the product."""


def run(
    pipeline: Pipeline,
    engine: Engine,
    *,
    drain: bool | threading.Event = False,
    telemetry: Telemetry | None = None,
    stop: threading.Event | None = None,
    lost_state: LostState = "stop",
    serve: Serve | None = None,
) -> Summary:
    """
    Run until `stop` is set, or with `drain` until all that was there at the start is committed.

    An event as `drain` says later that it is time to: all that is there when it is set is committed.
    `serve` publishes the telemetry on `metrics_port`, where the pipeline names one.
    """
    own = telemetry is None
    telemetry = telemetry or Telemetry.of(pipeline)
    if isinstance(drain, bool):
        asked, drain = drain, threading.Event()
        if asked:
            drain.set()
    supervisor = _Supervisor(pipeline, telemetry, stop or threading.Event(), drain, lost_state, serve)
    try:
        with contextlib.ExitStack() as resources:
            summary = supervisor.run(resources, engine)
    except BaseException as error:
        if own:
            telemetry.close(error)
        raise
    if own:
        telemetry.close()
    return summary


@dataclass
class _Supervisor:
    pipeline: Pipeline
    telemetry: Telemetry
    stop: threading.Event
    drain: threading.Event
    lost_state: LostState
    serve: Serve | None = None
    summary: Summary = field(default_factory=Summary)
    ingests: dict[str, Ingest] = field(default_factory=dict)
    ranges: dict[str, RangeSource[Any, Any]] = field(default_factory=dict)
    requests: list[threading.Event] = field(default_factory=list)
    router: Router = field(init=False)
    contexts: Contexts = field(init=False)
    sinks: dict[str, SinkConnector[Any, Any]] = field(default_factory=dict)
    """Those of the pipeline, and the one that takes dead letters."""
    messages: Messages = field(default_factory=Messages)
    skipped: int = 0
    drain_began: float | None = None
    step: Step | None = None
    """The step in hand, for the monitor."""

    def __post_init__(self) -> None:
        self.router = self.pipeline.router

    @property
    def draining(self) -> bool:
        return self.drain.is_set()

    def run(self, resources: contextlib.ExitStack, engine: Engine) -> Summary:
        began = time.monotonic()
        processing = self.pipeline.processing
        directory = processing.state_dir
        if not processing.checkpoint:
            directory = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
            self.lost_state = "start-over"  # what the targets hold of earlier runs is no news
        state = State.of(self.pipeline) if processing.checkpoint else State(directory, self.pipeline.name)
        state.open()
        resources.callback(state.close)
        shape = self._compare(state)
        self.telemetry.publish(directory)
        if processing.metrics_port is not None and self.serve is not None:
            resources.callback(self.serve(self.telemetry, processing.metrics_port, self.pipeline).close)
        exporters = Exporters(self.telemetry, self.pipeline)
        resources.push(lambda kind, error, trace: exporters.close(error))
        starting = Starting(engine, directory / "lock.jvm", self.telemetry)
        resources.callback(starting.stop)
        letters = letter_sink(self.pipeline)
        self.sinks = {**self.pipeline.sinks, **letters}
        if SINK in letters:
            self.telemetry.on_epoch.append(lambda report: keep_private(directory) if report.letters else None)
        codecs = Codecs(self.pipeline.schemas, directory)
        codecs.register()  # a schema that is not compatible is refused before anything starts
        policies = OnErrors(processing.on_error, self.pipeline.on_error)
        self.messages = Messages(codecs, policies, next(iter(letters), None), processing.max_error_rate)
        self.contexts = Contexts(state, Wiring(self.ranges, self.sinks, self.router), codecs)
        self.contexts.copies.captures = self.ingests
        self.telemetry.looks = Looks(
            partial(_positions, state, self.ranges),
            self.contexts.columns,
            self.contexts.flows,
            self.contexts.streams,
        )
        self._open(state, resources)
        if not starting.wait(self.stop):
            return self.summary
        loop = self._loop(state, engine)
        if state.identity.shape != shape:  # not before everything was accepted: a refused change may be taken back
            state.save_identity(shape=shape)
        for ingest in self.ingests.values():
            ingest.start()
        waker = Waker(self.stop)
        resources.callback(waker.close)
        resources.callback(EndWatch(directory, stop=self.stop, drain=self.drain).close)
        monitor = Monitor(self.pipeline, self.telemetry, engine, self.ingests, lambda: self.step)
        resources.callback(monitor.close)
        self.telemetry.ports = listening()
        for port in self.telemetry.ports:
            self.telemetry.message("info", f"listens on {port['address']}:{port['port']} ({port['program']})")
        self._drive(loop, waker, began)
        for ingest in self.ingests.values():
            ingest.stop()  # what was accepted becomes durable before anything closes
        if loop.unacked:
            loop.ack()
        self.summary.seconds = time.monotonic() - began
        return self.summary

    # -- before the first epoch ----------------------------------------------------------------------------------

    def _compare(self, state: State) -> Json:
        shape = self.pipeline.shape()
        if not state.fresh and state.identity.shape is not None:
            for notice in compare_shapes(state.identity.shape, shape):
                self.telemetry.message("info", notice)
        return shape

    def _open(self, state: State, resources: contextlib.ExitStack) -> None:
        """
        Open every connector, sinks first: a capture asks them what is seeded.

        A first open that fails is final, unless the system says that it is not ready yet (PEN-2007).
        """
        for name, sink in self.sinks.items():
            self._open_one(f"sink:{name}", sink, resources, partial(sink.open, self.contexts.sink(name)))
        replay = replay_source(self.pipeline, state.identity.incarnation)
        for name, source in {**self.pipeline.sources, **replay}.items():
            context = self.contexts.source(name)
            if isinstance(source, RangeSource):
                self.ranges[name] = source
                self._open_one(f"source:{name}", source, resources, partial(source.open, context))
            else:
                ingest = self.ingests[name] = self._ingest(name, source, state)
                known = {
                    edge: value and JournalPosition.model_validate(value) for edge, value in state.edges(name).items()
                }
                self._open_one(f"source:{name}", ingest, resources, partial(ingest.open, **known, context=context))
                self.telemetry.counters[f"source:{name}"] = ingest.metrics
                self.ranges[name] = ingest.range_source
            self._produce(name, source.producer_configs())

    def _produce(self, source: str, configs: Sequence[ProducerConfig]) -> None:
        """Take over what a source says of its topics: more ordered splits, or rows that must not bypass the journal."""
        asked = {config.topic: config for config in configs}
        routes = []
        for route in self.router.effective:
            config = asked.get(route.to) if route.source in (None, source) else None
            if config is not None:
                reliable = route.reliable_dispatch or config.reliable_dispatch
                if (config.partitions, reliable) != (route.partitions, route.reliable_dispatch):
                    journal = "through the journal" if reliable else "past the journal"
                    what = f"source {source}: {route.to} is produced in {config.partitions} partitions, {journal}"
                    self.telemetry.message("info", f"{what}, as the source asks for")
                route = replace(route, partitions=config.partitions, reliable_dispatch=reliable)
            routes.append(route)
        self.router = replace(self.router, routes=tuple(routes))
        self.contexts.wiring.router = self.router

    def _ingest(self, name: str, source: SourceConnector[Any], state: State) -> Ingest:
        direct = any(not route.reliable_dispatch for route in self.router.effective)

        def reliable(stream: str) -> bool:
            return any(target.route.reliable_dispatch for target in self.router.targets(name, stream))

        def unseeded() -> list[SnapshotTable]:
            assert isinstance(source, ChangeCapture)
            return [table for table in source.tables() if self.contexts.copies.lacking(name, table.stream)]

        return Ingest(
            name,
            source,
            state.directory / "journal" / name,
            self.pipeline.processing,
            on_state=lambda which, health: self.telemetry.state(f"source:{which}", health),
            on_retry=lambda which, error, pause: self.telemetry.retry(f"source:{which}", error, pause),
            reliable=reliable if direct else None,
            unseeded=unseeded,
            lacking=lambda stream: sorted(self.contexts.copies.lacking(name, stream)),
            record=state.record,
        )

    def _caught_up(self) -> bool:
        """For `--drain`: True once every source has handed over what it had when the drain was first noticed."""
        if self.drain_began is None:
            self.drain_began = time.monotonic()
        return all(ingest.caught_up(self.drain_began) for ingest in self.ingests.values())

    def _open_one(
        self, label: str, connector: Any, resources: contextlib.ExitStack, opening: Callable[[], None]
    ) -> None:
        resources.callback(connector.close)
        with self.telemetry.waits.until(f"{label.replace(':', ' ', 1)} to open"):
            self._try_to_open(label, opening)
        self.telemetry.state(label, HealthStatus.healthy())

    def _try_to_open(self, label: str, opening: Callable[[], None]) -> None:
        retry = Backoff(self.pipeline.processing)
        while True:
            try:
                return opening()
            except RetryableError as error:
                if error.code != NOT_READY or self.stop.is_set():
                    raise FatalError(f"{label}: {error.message}", code="PEN-5001", hint=error.hint) from error
                pause = retry.next(error)
                self.telemetry.retry(label, error, pause)
                self.stop.wait(pause)

    def _loop(self, state: State, engine: Engine) -> EpochLoop:
        processing = self.pipeline.processing
        loop = EpochLoop(
            state,
            self.ranges,
            self.sinks,
            self.router,
            engine,
            max_epoch_rows=self.contexts.wiring.rows_of_each(
                processing.max_epoch_rows, self.pipeline.sources, self.messages.letters
            ),
            max_epoch_bytes=processing.max_epoch_bytes,
            messages=self.messages,
            on_phase=self._phase,
            on_ack=self.telemetry.acked,
            on_ack_failed=lambda name, error: self.telemetry.retry(f"source:{name}", error, 0.0),
            contexts=self.contexts,
        )
        routes: list[tuple[Target, pa.Schema]] = []
        pairs: set[tuple[str, Topic]] = set()
        if self.messages.letters is not None:
            pairs.add((self.messages.letters, letters.TOPIC))
        decoders = self.messages.decoders_now(state.newest)
        known = self._placed({name: discover(source) for name, source in self._own_ranges()}, state)
        for notice in stream_notices(self.pipeline, {**known, **self._captured()}):
            self.telemetry.message("warning", notice)
        sources, sinks = self.pipeline.sources, self.pipeline.sinks
        versions = state.newest.versions if state.newest else {}
        lived_with = lives_with(self.pipeline, versions, self.messages.versions_now() if versions else {})
        for stops, misfit in misfits(decoders, self.router, sources, sinks, known, lived_with):
            if stops:
                raise misfit
            self.telemetry.message("warning", f"{misfit.code} {misfit.message}: {LETTERS}")
        for name, schemas in known.items():
            for stream, given in schemas.items():
                for target in self.router.targets(name, stream):
                    pairs |= {(sink, target.topic) for sink in target.sinks}
                    schema = decoders.schema(target.topic, given)
                    if schema is None:
                        continue  # its payloads are not known yet, nor what SQL would make of them
                    for sink in target.sinks:
                        self.contexts.learn(sink, target, schema, name, stream)
                    routes.append((target, schema))
        keyed = [name for name, sink in self.pipeline.sinks.items() if sink.capabilities.upsert]
        engine.check(routes, keyed)
        with self.telemetry.waits.until("what the targets hold to be compared"):
            loop.start(sorted(pairs), self.lost_state)
        return loop

    def _captured(self) -> dict[str, Schemas]:
        """The streams of captures by their own word: a journal knows only those of which rows came."""
        captures = {name: each for name, each in self.pipeline.sources.items() if isinstance(each, ChangeCapture)}
        return {name: capture.schema() for name, capture in captures.items()}

    def _placed(self, known: dict[str, Schemas], state: State) -> dict[str, Schemas]:
        """Refuse streams without a place of their own; a table that came after the first start is set aside in its epoch."""
        if not self.pipeline.check_streams(known):
            return known
        newest, placed = state.newest, dict(known)
        for name, source in self.ranges.items():
            if isinstance(source, TableSource) and newest is not None and name in newest.ranges:
                start = source.position_type.model_validate(newest.ranges[name].start)
                placed[name] = {s: known[name][s] for s in followed(source, start) if s in known[name]}
        self.pipeline.require_streams(placed)
        return placed

    # -- epochs --------------------------------------------------------------------------------------------------

    def _drive(self, loop: EpochLoop, waker: Waker, began: float) -> None:
        processing = self.pipeline.processing
        interval = processing.epoch_interval_ms / 1000
        signals = [source.data_ready_notify() for _, source in self._own_ranges()]
        for event in signals:
            if event is not None:
                waker.watch(event, clear=True)
        timer: float | None = processing.poll_interval_ms / 1000
        if signals and all(signals):
            timer = REQUEST_SECS if letters.REPLAY in self.ranges else None
        self.requests = [event for source in self.pipeline.sources.values() if (event := source.checkpoint_requested())]
        for event in (*self.requests, *([] if self.draining else [self.drain])):
            waker.watch(event, clear=False)
        retry = Backoff(processing)
        self.telemetry.state("pipeline", HealthStatus.healthy())
        self._show_tables(loop)
        last = -interval
        while not self.stop.is_set():
            for ingest in self.ingests.values():
                if ingest.failure is not None:
                    raise ingest.failure
            early = last + interval - time.monotonic()
            if early > 0 and not self.draining and not self._cuts_now():
                waker.wait(min(early, FULL_SECS))
                continue
            last = time.monotonic()
            self.step = Step(last)
            try:
                # The epoch in hand comes first: its range may turn out to be gone.
                if self.draining and loop.frozen is None and not loop.pending() and self._caught_up():
                    loop.freeze()
                report = loop.step()
            except ConnectorError as error:
                self._failed(error, retry)
                continue
            self.step = None
            retry.reset()
            self.telemetry.state("pipeline", HealthStatus.healthy())
            if report is not None:
                report = self._with_ingested(report)
                self.summary.add(report, began)
                self.telemetry.epoch(report)
                self._show_tables(loop)
                waker.cut()
            elif self.draining and loop.frozen is None:
                waker.wait(0.05)  # a journal that is full is emptied by epochs, so they go on meanwhile
            else:
                if loop.unacked:
                    loop.ack()
                if self.draining and not loop.unacked:
                    return
                waker.wait(processing.max_backoff_ms / 1000 if loop.unacked and timer is None else timer)

    def _cuts_now(self) -> bool:
        """A source asks for an epoch, or is held back by a full journal until one is committed."""
        is_full = any(ingest.journal.full for ingest in self.ingests.values())
        return is_full or any(event.is_set() for event in self.requests)

    def _own_ranges(self) -> list[tuple[str, RangeSource[Any, Any]]]:
        """Those of the pipeline's own sources."""
        return [(name, source) for name, source in self.ranges.items() if name != letters.REPLAY]

    def _with_ingested(self, report: EpochReport) -> EpochReport:
        """The report with the bad records that the ingests left out since the last one."""
        before, self.skipped = self.skipped, sum(ingest.counts.skipped for ingest in self.ingests.values())
        bad = [each for ingest in self.ingests.values() for each in ingest.counts.take_bad()]
        return replace(report, skipped=report.skipped + self.skipped - before, bad=(*report.bad, *bad))

    def _show_tables(self, loop: EpochLoop) -> None:
        """Show what became of each table, and which of them failed."""
        for name, source in self.ranges.items():
            if isinstance(source, TableSource) and loop.state.newest is not None:
                tables = routed(
                    source.tables(loop.position(name)), partial(self.contexts.wiring.router.leaves_out, name)
                )
                self.telemetry.tables(name, tables)
                self.summary.failed_tables[name] = sorted(t for t, known in tables.items() if known.state == "failed")

    def _phase(self, number: int, phase: str) -> None:
        if phase == "stage":  # the epoch is bound to its ranges: what was asked for is cut
            for event in self.requests:
                event.clear()
        if self.step is not None:
            self.step.number, self.step.phase = number, phase
        self.telemetry.phase(number, phase)

    def _failed(self, error: ConnectorError, retry: Backoff) -> None:
        """Wait and go on if the error may pass; raise it if not."""
        while True:
            if error.code == ENGINE_GONE and self.stop.is_set():
                what = "the signal that asks for the end has ended Spark too: the next run finishes the epoch in hand"
                self.telemetry.message("warning", what)
                return
            if action(error) not in (Action.RETRY, Action.RESTAGE):
                raise error
            pause = retry.next(error)
            self.telemetry.retry("pipeline", error, pause)
            if self.stop.wait(pause):
                return
            try:  # a broken connection is closed and opened again; connectors have no retry loops of their own
                for connector in (*self.ranges.values(), *self.sinks.values()):
                    connector.close()
                self.contexts.open()
                return
            except ConnectorError as again:
                error = again


def _positions(state: State, ranges: Mapping[str, RangeSource[Any, Any]]) -> dict[str, str]:
    """How far each source was read by the newest epoch, in words."""
    newest = state.newest
    found = {}
    for name, span in newest.ranges.items() if newest is not None else ():
        if name in ranges:
            with contextlib.suppress(ValidationError):  # of another version: the start says so
                found[name] = ranges[name].position_type.model_validate(span.end).describe()
    return found
