"""What a running pipeline tells about itself: counters, states, and the status that every front shows."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.durable import Json
from penstock.errors import ConnectorError, from_text, printable, without_secrets
from penstock.remedies import REMEDIES
from penstock.runtime.telemetry.history import EPOCH_FIELDS, HEALTH, History, add_run
from penstock.runtime.telemetry.names import CUSTOM, SLOT_STATES
from penstock.runtime.telemetry.parts import MOST_FLOWS, Looks, Parts, most_behind, named
from penstock.runtime.telemetry.ports import listening
from penstock.runtime.telemetry.prometheus import Metrics
from penstock.runtime.telemetry.rates import Rates
from penstock.runtime.telemetry.schemas import SchemaLog
from penstock.runtime.telemetry.status import StatusFile, process_started, read_status, sum_up
from penstock.runtime.telemetry.totals import Totals, log_epoch, one_line
from penstock.runtime.telemetry.waits import Waits
from penstock.source import Connector, ConnectorMetrics, HealthState, HealthStatus
from penstock.tables import TableState

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline
    from penstock.runtime.epochs import EpochReport

log = logging.getLogger("penstock")

_PORTS_EVERY = 12
"""Samples of the history between two looks at the ports."""


@dataclass
class _Phase:
    number: int
    name: str
    since: float


class Telemetry:
    """
    The runtime reports here what happens, from any thread; `status()` is what every front shows.

    Events are logged as they come. `publish` also keeps `status.json` beside the manifests.
    """

    def __init__(
        self,
        pipeline: str,
        *,
        sources: Mapping[str, Connector[Any] | None] | Iterable[str] = (),
        sinks: Mapping[str, Connector[Any] | None] | Iterable[str] = (),
        notices: Iterable[str] = (),
        health_timeout_secs: float = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self.url: str | None = None
        """Where `penstock.web` serves this status; set by it."""
        self.counters: dict[str, Callable[[], ConnectorMetrics]] = {
            f"{kind}:{name}": connector.metrics
            for kind, these in (("source", named(sources)), ("sink", named(sinks)))
            for name, connector in these.items()
            if connector is not None
        }
        """What is asked for a component's own counters."""
        self.looks = Looks()
        """What is asked for when a status is made; set by the supervisor."""
        self.exports: Callable[[], Mapping[str, Json]] = dict
        """What each collector got, where there are any."""
        self.file: Path | None = None
        """The pipeline file, if there is one."""
        self.ports: list[dict[str, Json]] = []
        """The ports on which the run listens, as of the last look."""
        self.waits = Waits(clock)
        """What a start waits for."""
        self._clock = clock
        self._lock = threading.Lock()
        self._timeout = health_timeout_secs
        self._notices = list(notices)
        self._started_at = time.time()
        self._started = self._progress = clock()
        self._engine = ""
        self._retrying: set[str] = set()
        self._ended: tuple[str, str] | None = None
        self._in_hand: _Phase | None = None
        self._last: dict[str, Json] | None = None
        self._totals = Totals(read=dict.fromkeys(named(sources), 0))
        self._parts = Parts(self._totals, list(named(sinks)))
        self._rates = Rates(self._started)
        self._committed_at = 0.0
        self._file = StatusFile(self.status)
        self._history = History(self._sample)
        self._schemas = SchemaLog()
        self._samples = 0
        self.on_epoch: list[Callable[[EpochReport], None]] = []
        """Called with the report of every committed epoch, in the thread that commits."""
        self.numbers = Metrics(self.status, self._counted)
        """What a scrape shows."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> Telemetry:
        """The telemetry of a checked pipeline."""
        made = cls(
            pipeline.name,
            sources=pipeline.sources,
            sinks=pipeline.sinks,
            notices=getattr(pipeline, "notices", ()),
            health_timeout_secs=pipeline.processing.health_timeout_secs,
        )
        made.file = getattr(pipeline, "file", None)
        return made

    # What the runtime reports.

    def engine(self, text: str) -> None:
        """How far the engine's start has come, and in the end what it is."""
        with self._lock:
            self._engine = text
            self._progress = self._clock()
        log.info("engine: %s", text)
        self._file.changed()

    def state(self, component: str, status: HealthStatus) -> None:
        """The health of `pipeline`, `source:<name>` or `sink:<name>`; the same one again costs nothing."""
        status = HealthStatus(status.state, without_secrets(status.reason))
        with self._lock:
            health = self._parts.health
            if status.state is HealthState.HEALTHY:
                self._parts.failing.pop(component, None)
            before = health.get(component, HealthStatus())
            if before == status:
                return
            health[component] = status
            is_said = _but_for_numbers(before) == _but_for_numbers(status)  # such as how long it waits already
            if component == "pipeline":
                self._progress = self._clock()
            retrying = component in self._retrying and status.state is not HealthState.UNHEALTHY
            if status.state is HealthState.HEALTHY:
                self._retrying.discard(component)
                if failed := self._parts.failed(component.removeprefix("source:")):  # as every other front says it
                    some = ", ".join([*list(failed)[:3], *(["…"] if len(failed) > 3 else [])])
                    status = HealthStatus.degraded(f"{len(failed)} of its tables failed: {some}")
        level = logging.WARNING if status.state in (HealthState.DEGRADED, HealthState.UNHEALTHY) else logging.INFO
        # The line of the retry, or of the state before, has said it all.
        log.log(logging.DEBUG if retrying or is_said else level, "%s is %s", component, one_line(str(status)))
        self._file.changed()

    def unreachable(self, component: str, reason: str, waited_secs: float = 0.0) -> None:
        """
        A component did not answer, or said that it cannot be reached: degraded, and unhealthy if that lasts.

        `waited_secs`: how long its answer took. It has been failing for as long: a connection that is not refused but
        runs into its timeout must not be red later for it.
        """
        with self._lock:
            self._parts.failing.setdefault(component, self._clock() - waited_secs)
        self.state(component, HealthStatus.degraded(reason))

    def phase(self, number: int, name: str) -> None:
        """Epoch `number` enters a phase; the same phase again is a sign of life from a long one, `idle` ends the epoch."""
        with self._lock:
            now = self._clock()
            self._progress = now
            for source in self._totals.read if name == "stage" else ():
                self._parts.unacked.setdefault(source, now)
            if name == "idle":
                self._in_hand = None
            elif self._in_hand is None or (self._in_hand.number, self._in_hand.name) != (number, name):
                self._in_hand = _Phase(number, name, now)
        self._file.changed()

    def epoch(self, report: EpochReport) -> None:
        """An epoch is committed."""
        rows_in = sum(report.rows_in.values())
        rows_out = sum(written.records_written for written in report.rows_out.values())
        with self._lock:
            now = self._clock()
            self._progress = now
            self._in_hand = None
            self._totals.add(report)
            self._committed_at = time.time()
            latency = {source: max(0.0, self._committed_at - at) for source, at in report.oldest.items()}
            self._totals.latency = max(latency.values(), default=self._totals.latency)
            self._last = {
                "number": report.number,
                "rows_in": rows_in,
                "rows_out": rows_out,
                "seconds": {name: round(value, 6) for name, value in report.seconds.items()},
                "recovered": report.recovered,
                "committed_at": _iso(self._committed_at),
            }
            begin = self._rates.add(now, sum(report.seconds.values()), rows_in, rows_out)
            for source, rows in report.rows_in.items():
                self._parts.meters[source].add(begin, now, rows)
            for pair, written in report.rows_out.items():
                self._parts.meters[pair].add(begin, now, written.records_written, written.bytes_written)
        self.numbers.observe(report.seconds, latency)
        about = {"number": report.number, "rows_in": rows_in, "rows_out": rows_out, **report.seconds}
        self._history.epoch([about.get(field, 0.0) for field in EPOCH_FIELDS])
        log_epoch(report, rows_in, rows_out)
        for tell in self.on_epoch:
            try:
                tell(report)
            except Exception:  # exports steer nothing
                log.exception("epoch=%d could not be exported", report.number)
        self._file.changed()

    def acked(self, source: str) -> None:
        """All that was committed of a source is acknowledged."""
        with self._lock:
            self._parts.unacked.pop(source, None)

    def tables(self, source: str, tables: Mapping[str, TableState]) -> None:
        """What a source does with each of its tables; one that failed makes the source degraded."""
        with self._lock:
            before = self._parts.tables.get(source, {})
            self._parts.copying(source, tables, self._clock())
        for name, table in tables.items():
            was = before.get(name)
            if table.state == "failed" and (was is None or (was.state, was.error) != ("failed", table.error)):
                error = ConnectorError(table.error, code=table.code or None, hint=table.hint)
                with self._lock:
                    self._remember(f"source:{source}", error)
                log.warning("source:%s table %s failed: %s", source, printable(name), one_line(str(error)))
        self._file.changed()

    def retry(self, component: str, error: BaseException | str, backoff_secs: float) -> None:
        """`component` failed with something that may pass, and is tried again after `backoff_secs`: until then it is degraded."""
        text = error.message if isinstance(error, ConnectorError) else str(error)
        with self._lock:
            self._totals.retries[component] += 1
            self._remember(component, error)
            if backoff_secs > 0:
                self._retrying.add(component)
                self._parts.failing.setdefault(component, self._clock())
                self._parts.health[component] = HealthStatus.degraded(f"retrying after: {without_secrets(text)}")
        logging.getLogger("penstock.retry").warning(
            "%s: %s; trying again in %.1f s", component, one_line(without_secrets(str(error))), backoff_secs
        )
        self._file.changed()

    def lag(self, source: str, value: int | None, unit: str = "rows") -> None:
        """How far a source is behind, in rows or bytes."""
        with self._lock:
            self._parts.lag[source] = (value, unit)
        self._file.changed()

    def message(self, level: str, text: str) -> None:
        """Anything else a person should know: `debug`, `info`, `warning` or `error`."""
        text = without_secrets(text)
        if level == "error":
            with self._lock:
                self._remember("pipeline", from_text(text) or text)
            self._file.changed()
        number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        logging.getLogger("penstock.message").log(number, "%s", text)

    def close(self, error: BaseException | None = None) -> None:
        """The pipeline has ended, by itself or by `error`; the first call counts."""
        with self._lock:
            if self._ended is None:
                self._ended = ("failed", without_secrets(str(error))) if error else ("stopped", "")
                self._in_hand = None
                self._parts.lag.clear()  # nobody asks for it any more
                if error:
                    self._remember("pipeline", error)
        self._history.close()
        self._file.close()

    def publish(self, state_dir: Path) -> None:
        """
        Keep `status.json` in the state directory from now on, and show the last epoch of the run before.

        Only the holder of the directory's lock calls this: another run must not speak for the one that is running.
        """
        earlier = read_status(state_dir)
        with self._lock:
            if earlier is not None and self._last is None:
                self._last = earlier["last_epoch"]
        if earlier is not None:
            add_run(state_dir, earlier)
        self._schemas.begin(state_dir)
        self._history.begin(state_dir)
        self._file.begin(state_dir)

    # What the fronts show.

    def status(self) -> dict[str, Json]:
        """Everything there is to know, as JSON."""
        positions, flows, counted = self.looks.positions(), self.looks.flows(), self._counted()
        exports = dict(self.exports())
        with self._lock:
            now = self._clock()
            totals = self._totals
            status: dict[str, Json] = {
                "pipeline": self.pipeline,
                "version": __version__,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_started": process_started(os.getpid()),
                "url": self.url,
                "ports": self.ports,
                "file": str(self.file) if self.file else None,
                "versions": _versions(),
                "own": self._own(),
                "engine": self._engine,
                "waits": [] if self._ended else self.waits.shown(),
                "started_at": _iso(self._started_at),
                "updated_at": _iso(time.time()),
                "uptime_secs": round(now - self._started, 3),
                "working_secs": self._rates.working_secs,
                "quiet_secs": round(now - self._progress, 3),
                "health_timeout_secs": self._timeout,
                "epochs": totals.epochs,
                "recovered": totals.recovered,
                "epoch": self._in_hand
                and {
                    "number": self._in_hand.number,
                    "phase": self._in_hand.name,
                    "secs": round(now - self._in_hand.since, 3),
                },
                "last_epoch": self._last,
                "committed_at": self._committed_at,
                "rows": {
                    "in": sum(totals.read.values()),
                    "out": sum(topic.rows for topic in totals.written.values()),
                    **self._rates.shown(now),
                },
                "bytes": {"out": sum(topic.bytes for topic in totals.written.values())},
                "skipped": totals.skipped,
                "dead_letters": sum(totals.letters.values()),
                "dead_letters_by_code": dict(totals.letters),
                "latency_secs": None if totals.latency is None else round(totals.latency, 3),
                "discarded": sum(topic.discarded for topic in totals.written.values()),
                "retries": dict(totals.retries),
                "sources": self._parts.all_sources(now, positions, _of_journal_and_slot(counted)),
                "sinks": self._parts.all_sinks(now),
                "flows": [list(flow) for flow in flows[:MOST_FLOWS]],
                "bad": list(totals.bad),
                "errors": list(totals.errors),
                "errors_by_code": dict(totals.codes),
                "notices": self._notices,
                "exports": exports,
            }
        sum_up(status)
        status["reason"] = "; ".join(status["problems"])
        return status

    def metrics(self) -> bytes:
        """The same in Prometheus' text format, with what the connectors count themselves."""
        return self.numbers.text()

    def _counted(self) -> dict[str, ConnectorMetrics]:
        """What each connector counts itself; one that cannot tell just now is left out."""
        found = {}
        for component, ask in self.counters.items():
            with contextlib.suppress(Exception):  # a scrape must not fail, and not report a failure twice
                found[component] = ask()
        return found

    def _own(self) -> dict[str, Json]:
        if self._ended:
            return {"state": self._ended[0], "reason": self._ended[1], "failing_secs": 0.0}
        return self._parts.component("pipeline", self._clock())

    def _sample(self) -> dict[str, float]:
        """For the history; looks at schemas and ports as well, since it is asked every few seconds."""
        self._schemas.look(self.looks.schemas(), self._last["number"] if self._last else None)
        self._samples += 1
        if self._samples % _PORTS_EVERY == 0:
            self.ports = listening()
        status = self.status()
        behind = most_behind(status)
        journals = [source["own"].get("journal_bytes", 0) for source in status["sources"].values()]
        return {
            "rows_in": status["rows"]["in"],
            "rows_out": status["rows"]["out"],
            "bytes_out": status["bytes"]["out"],
            "dead_letters": status["dead_letters"],
            "retries": sum(status["retries"].values()),
            "epochs": status["epochs"],
            **{f"lag_{unit}": math.nan if lag is None else lag for unit, lag in behind.items()},
            "latency": math.nan if status["latency_secs"] is None else status["latency_secs"],
            "journal": sum(journals),
            "health": HEALTH.get(status["state"], math.nan),
        }

    def _remember(self, component: str, error: BaseException | str) -> None:
        code = error.code if isinstance(error, ConnectorError) else "PEN-5012"
        text = (
            error.message if isinstance(error, ConnectorError) else without_secrets(str(error)) or type(error).__name__
        )
        self._totals.codes[code] += 1
        hint = (error.hint if isinstance(error, ConnectorError) else "") or REMEDIES[code]
        about = {"component": component, "code": code, "text": text, "hint": hint}
        self._totals.errors.append({"at": _iso(time.time()), **about})


def _of_journal_and_slot(counted: Mapping[str, ConnectorMetrics]) -> dict[str, dict[str, float]]:
    shown = {*CUSTOM, *(f"slot_{state}" for state in SLOT_STATES)}
    return {
        component: {name: value for name, value in metrics.custom.items() if name in shown}
        for component, metrics in counted.items()
    }


@functools.cache
def _versions() -> dict[str, str]:
    found = {"penstock": __version__, "python": platform.python_version()}
    for package in ("pyspark", "pyarrow", "pandas", "pydantic"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _but_for_numbers(status: HealthStatus) -> str:
    return re.sub(r"\d+", "…", str(status))
