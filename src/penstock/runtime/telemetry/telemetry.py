"""What a running pipeline tells about itself: counters, states, and the status that every front shows."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.durable import Json
from penstock.errors import ConnectorError, from_text, without_secrets
from penstock.runtime.telemetry.prometheus import Metrics
from penstock.runtime.telemetry.status import StatusFile, assess, process_started, read_status
from penstock.sink import Topic, WriteResult
from penstock.source import Connector, ConnectorMetrics, HealthState, HealthStatus
from penstock.tables import TableState

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline
    from penstock.runtime.epochs import EpochReport

log = logging.getLogger("penstock")

HISTORY_SECS = 60
_RATE_SECS = 10.0
_FAILED_NAMED = 3


@dataclass
class _Phase:
    number: int
    name: str
    since: float


@dataclass
class _Written:
    rows: int = 0
    discarded: int = 0
    bytes: int = 0
    last_epoch: int | None = None

    def add(self, result: WriteResult, epoch: int) -> None:
        self.rows += result.records_written
        self.bytes += result.bytes_written
        self.discarded += result.records_discarded
        self.last_epoch = epoch


@dataclass
class _Totals:
    """What this run has done."""

    epochs: int = 0
    recovered: int = 0
    skipped: int = 0
    letters: int = 0
    read: dict[str, int] = field(default_factory=dict)
    written: dict[tuple[str, Topic], _Written] = field(default_factory=dict)
    retries: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    errors: deque[dict[str, Json]] = field(default_factory=lambda: deque(maxlen=10))
    bad: deque[dict[str, Json]] = field(default_factory=lambda: deque(maxlen=10))

    def add(self, report: EpochReport) -> None:
        self.epochs += 1
        self.recovered += report.recovered
        self.skipped += report.skipped
        self.letters += sum(report.letters.values())
        for source, rows in report.rows_in.items():
            self.read[source] = self.read.get(source, 0) + rows
        for pair, result in report.rows_out.items():
            self.written.setdefault(pair, _Written()).add(result, report.number)
        for each in report.bad:
            named = {"source": each.source, "stream": each.stream, "topic": each.topic}
            self.bad.append({"epoch": report.number, **named, "code": each.code, "reason": each.reason})


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
            for kind, named in (("source", _named(sources)), ("sink", _named(sinks)))
            for name, connector in named.items()
            if connector is not None
        }
        """What is asked for a component's own counters."""
        self._clock = clock
        self._lock = threading.Lock()
        self._timeout = health_timeout_secs
        self._notices = list(notices)
        self._sink_names = list(_named(sinks))
        self._started_at = time.time()
        self._started = self._progress = clock()
        self._engine = ""
        self._health: dict[str, HealthStatus] = {}
        self._tables: dict[str, Mapping[str, TableState]] = {}
        self._retrying: set[str] = set()
        self._ended: tuple[str, str] | None = None
        self._in_hand: _Phase | None = None
        self._last: dict[str, Json] | None = None
        self._totals = _Totals(read=dict.fromkeys(_named(sources), 0))
        self._lag: dict[str, int | None] = {}
        self._rates = _Rates(self._started)
        self._committed_at = 0.0
        self._file = StatusFile(self.status)
        self._metrics = Metrics(self.status, self._counted)

    @classmethod
    def of(cls, pipeline: Pipeline) -> Telemetry:
        """The telemetry of a checked pipeline."""
        return cls(
            pipeline.name,
            sources=pipeline.sources,
            sinks=pipeline.sinks,
            notices=getattr(pipeline, "notices", ()),
            health_timeout_secs=pipeline.processing.health_timeout_secs,
        )

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
        with self._lock:
            before = self._health.get(component, HealthStatus())
            if before == status:
                return
            self._health[component] = status
            if component == "pipeline":
                self._progress = self._clock()
            retrying = component in self._retrying and status.state is not HealthState.UNHEALTHY
            if status.state is HealthState.HEALTHY:
                self._retrying.discard(component)
        level = logging.WARNING if status.state in (HealthState.DEGRADED, HealthState.UNHEALTHY) else logging.INFO
        # The line of the retry has said it all.
        log.log(logging.DEBUG if retrying else level, "%s is %s", component, one_line(str(status)))
        self._file.changed()

    def phase(self, number: int, name: str) -> None:
        """Epoch `number` enters a phase; the same phase again is a sign of life from a long one, `idle` ends the epoch."""
        with self._lock:
            now = self._clock()
            self._progress = now
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
            self._last = {
                "number": report.number,
                "rows_in": rows_in,
                "rows_out": rows_out,
                "seconds": {name: round(value, 6) for name, value in report.seconds.items()},
                "recovered": report.recovered,
                "committed_at": _iso(self._committed_at),
            }
            self._rates.add(now, sum(report.seconds.values()), rows_in, rows_out)
        self._metrics.observe(report.seconds)
        _log_epoch(report, rows_in, rows_out)
        self._file.changed()

    def tables(self, source: str, tables: Mapping[str, TableState]) -> None:
        """What a source does with each of its tables; one that failed makes the source degraded."""
        with self._lock:
            before, self._tables[source] = self._tables.get(source, {}), tables
        for name, table in tables.items():
            was = before.get(name)
            if table.state == "failed" and (was is None or (was.state, was.error) != ("failed", table.error)):
                error = ConnectorError(table.error, code=table.code or None, hint=table.hint)
                with self._lock:
                    self._remember(f"source:{source}", error)
                log.warning("source:%s table %s failed: %s", source, name, one_line(str(error)))
        self._file.changed()

    def retry(self, component: str, error: BaseException | str, backoff_secs: float) -> None:
        """`component` failed with something that may pass, and is tried again after `backoff_secs`: until then it is degraded."""
        text = error.message if isinstance(error, ConnectorError) else str(error)
        with self._lock:
            self._totals.retries[component] += 1
            self._remember(component, error)
            if backoff_secs > 0:
                self._retrying.add(component)
                self._health[component] = HealthStatus.degraded(f"retrying after: {without_secrets(text)}")
        logging.getLogger("penstock.retry").warning(
            "%s: %s; trying again in %.1f s", component, one_line(without_secrets(str(error))), backoff_secs
        )
        self._file.changed()

    def lag(self, source: str, value: int | None) -> None:
        """How far a source is behind, in its own unit."""
        with self._lock:
            self._lag[source] = value
        self._file.changed()

    def message(self, level: str, text: str) -> None:
        """Anything else a person should know: `debug`, `info`, `warning` or `error`."""
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
                self._lag.clear()  # nobody asks for it any more
                if error:
                    self._remember("pipeline", error)
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
        self._file.begin(state_dir)

    # What the fronts show.

    def status(self) -> dict[str, Json]:
        """Everything there is to know, as JSON."""
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
                "own": self._own(),
                "engine": self._engine,
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
                "dead_letters": totals.letters,
                "discarded": sum(topic.discarded for topic in totals.written.values()),
                "retries": dict(totals.retries),
                "sources": self._sources(),
                "sinks": self._sinks(),
                "bad": list(totals.bad),
                "errors": list(totals.errors),
                "errors_by_code": dict(totals.codes),
                "notices": self._notices,
            }
        status["state"], status["problems"] = assess(status)
        status["reason"] = "; ".join(status["problems"])
        return status

    def metrics(self) -> bytes:
        """The same in Prometheus' text format, with what the connectors count themselves."""
        return self._metrics.text()

    def _counted(self) -> dict[str, ConnectorMetrics]:
        """What each connector counts itself; one that cannot tell just now is left out."""
        found = {}
        for component, ask in self.counters.items():
            with contextlib.suppress(Exception):  # a scrape must not fail, and not report a failure twice
                found[component] = ask()
        return found

    def _own(self) -> dict[str, Json]:
        if self._ended:
            return {"state": self._ended[0], "reason": self._ended[1]}
        health = self._health.get("pipeline", HealthStatus())
        return {"state": str(health.state), "reason": health.reason}

    def _component(self, name: str) -> dict[str, Json]:
        health = self._health.get(name, HealthStatus())
        return {"state": str(health.state), "reason": health.reason, "retries": self._totals.retries[name]}

    def _sources(self) -> dict[str, Json]:
        found = {}
        for name, rows in self._totals.read.items():
            part = self._component(f"source:{name}")
            tables = self._tables.get(name, {})
            failed = {
                table: {"code": known.code, "error": known.error, "hint": known.hint, "next_try": known.next_try}
                for table, known in sorted(tables.items())
                if known.state == "failed"
            }
            if failed and part["state"] != HealthState.UNHEALTHY:
                own = f"; {part['reason']}" if part["reason"] else ""
                part |= {"state": str(HealthState.DEGRADED), "reason": f"{_failures(failed)}{own}"}
            states = {table: known.state for table, known in tables.items()}
            about = {"rows": rows, "lag": self._lag.get(name), "tables": {"states": states, "failed": failed}}
            found[name] = {**about, **part}
        return found

    def _sinks(self) -> dict[str, Json]:
        sinks: dict[str, Json] = {
            name: {"rows": 0, "bytes": 0, **self._component(f"sink:{name}"), "topics": {}}
            for name in dict.fromkeys([*self._sink_names, *(sink for sink, _ in self._totals.written)])
        }
        for (sink, topic), written in sorted(self._totals.written.items()):
            sinks[sink]["rows"] += written.rows
            sinks[sink]["bytes"] += written.bytes
            sinks[sink]["topics"][topic] = {
                "rows": written.rows,
                "bytes": written.bytes,
                "discarded": written.discarded,
                "last_epoch": written.last_epoch,
            }
        return sinks

    def _remember(self, component: str, error: BaseException | str) -> None:
        code = error.code if isinstance(error, ConnectorError) else "PEN-5012"
        text = (
            error.message if isinstance(error, ConnectorError) else without_secrets(str(error)) or type(error).__name__
        )
        self._totals.codes[code] += 1
        self._totals.errors.append({"at": _iso(time.time()), "component": component, "code": code, "text": text})


class _Rates:
    """Rows per second, now and over the last minute."""

    def __init__(self, started: float) -> None:
        self._spans: deque[tuple[float, float, int, int]] = deque()
        self._started = started
        self._worked: tuple[float, float] | None = None

    @property
    def working_secs(self) -> float:
        """From the first row to the last."""
        return round(self._worked[1] - self._worked[0], 3) if self._worked else 0.0

    def add(self, now: float, secs: float, rows_in: int, rows_out: int) -> None:
        """An epoch's rows count over the time they took, so that few long epochs show an even rate."""
        begin = max(self._spans[-1][1] if self._spans else self._started, now - max(secs, 1e-3))
        self._worked = (self._worked[0] if self._worked else begin, now)
        self._spans.append((min(begin, now - 1e-3), now, rows_in, rows_out))
        while self._spans[0][1] < now - HISTORY_SECS:
            self._spans.popleft()

    def shown(self, now: float) -> dict[str, Json]:
        """As the status has it."""
        window = min(_RATE_SECS, max(now - self._spans[0][0], 0.5)) if self._spans else 1.0
        rows_in = rows_out = 0.0
        for begin, end, read, written in self._spans:
            share = max(0.0, end - max(begin, now - window)) / (end - begin)
            rows_in += read * share
            rows_out += written * share
        return {
            "in_per_sec": round(rows_in / window, 1),
            "out_per_sec": round(rows_out / window, 1),
            "history": self._history(now),
        }

    def _history(self, now: float) -> list[int]:
        seconds = [0.0] * HISTORY_SECS  # rows out in each of the last seconds, the newest last
        for begin, end, _, written in self._spans:
            first = max(0, int(HISTORY_SECS - (now - begin)))
            for second in range(first, HISTORY_SECS):
                left = now - HISTORY_SECS + second
                share = max(0.0, min(end, left + 1) - max(begin, left)) / (end - begin)
                if share == 0 and left > end:
                    break
                seconds[second] += written * share
        return [round(rows) for rows in seconds]


def one_line(text: str) -> str:
    """A message and its hint in one line of a log."""
    return " ".join(text.split())


def _log_epoch(report: EpochReport, rows_in: int, rows_out: int) -> None:
    written = sum(result.bytes_written for result in report.rows_out.values())
    log.info(
        "epoch=%d rows_in=%d rows_out=%d bytes_out=%d skipped=%d secs=%.3f %s%s",
        *(report.number, rows_in, rows_out, written, report.skipped, sum(report.seconds.values())),
        " ".join(f"{name}={value:.3f}" for name, value in report.seconds.items()),
        " recovered" if report.recovered else "",
    )
    if report.letters:
        log.warning("epoch=%d dead_letters=%d: `penstock dlq` shows them", report.number, sum(report.letters.values()))
    for each in report.bad:
        topic = f" topic={each.topic}" if each.topic else ""
        log.warning(
            "epoch=%d bad source=%s stream=%s%s %s: %s (%s)",
            *(report.number, each.source, each.stream, topic, each.code, one_line(each.reason), each.rule),
        )
    for (sink, name), result in report.rows_out.items():
        if result.records_discarded:
            log.warning(
                "epoch=%d discarded=%d sink=%s topic=%s: the target has no place for them (schema_evolution)",
                *(report.number, result.records_discarded, sink, name),
            )


def _failures(failed: Mapping[str, Json]) -> str:
    many = f"{len(failed):,} tables" if len(failed) > 1 else "1 table"
    named = [f"{table} ({why['code']} {why['error']})" for table, why in list(failed.items())[:_FAILED_NAMED]]
    more = f", and {len(failed) - _FAILED_NAMED:,} more" if len(failed) > _FAILED_NAMED else ""
    return f"{many} failed: {', '.join(named)}{more}"


def _named(connectors: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    return dict(connectors) if isinstance(connectors, Mapping) else dict.fromkeys(connectors)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
