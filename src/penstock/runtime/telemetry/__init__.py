"""What a running pipeline tells about itself: counters, states, and the status that every front shows."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from penstock import __version__
from penstock.durable import Json
from penstock.errors import ConnectorError, from_text, without_secrets
from penstock.sink import Topic, WriteResult
from penstock.source import Connector, ConnectorMetrics, HealthState, HealthStatus

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline
    from penstock.runtime.epochs import EpochReport

log = logging.getLogger("penstock")

STATUS_FILE = "status.json"
ENDED = ("stopped", "failed", "dead")
"""The states a pipeline does not leave by itself."""
HISTORY_SECS = 60
_RATE_SECS = 10.0
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


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


class Telemetry:
    """
    Told by the runtime what happens, from any thread; `status()` is what every front shows.

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
        self._clock = clock
        self._lock = threading.Lock()
        self._timeout = health_timeout_secs
        self._notices = list(notices)
        self._connectors = {
            **{f"source:{name}": connector for name, connector in _named(sources).items()},
            **{f"sink:{name}": connector for name, connector in _named(sinks).items()},
        }
        self._started_at = time.time()
        self._started = self._progress = clock()
        self._engine = ""
        self._health = {name: HealthStatus() for name in ("pipeline", *self._connectors)}
        self._ended: tuple[str, str] | None = None
        self._in_hand: _Phase | None = None
        self._last: dict[str, Json] | None = None
        self._epochs = self._recovered = self._skipped = self._letters = 0
        self._read = dict.fromkeys(_named(sources), 0)
        self._written: dict[tuple[str, Topic], _Written] = {}
        self._lag: dict[str, int | None] = {}
        self._retries: Counter[str] = Counter()
        self._codes: Counter[str] = Counter()
        self._errors: deque[dict[str, Json]] = deque(maxlen=10)
        self._rates: deque[tuple[float, float, int, int]] = deque()
        self._committed_at = 0.0
        self._worked: tuple[float, float] | None = None
        self._file: Path | None = None
        self._writing = threading.Lock()
        self._dirty = threading.Event()
        self._registry, self._seconds = _registry(self)

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

    # What the runtime tells.

    def engine(self, text: str) -> None:
        """How far the engine's start has come, and in the end what it is."""
        with self._lock:
            self._engine = text
            self._progress = self._clock()
        log.info("engine: %s", text)
        self._dirty.set()

    def state(self, component: str, status: HealthStatus) -> None:
        """The health of `pipeline`, `source:<name>` or `sink:<name>`; the same one again costs nothing."""
        with self._lock:
            before = self._health.get(component, HealthStatus())
            if before == status:
                return
            self._health[component] = status
            if component == "pipeline":
                self._progress = self._clock()
        level = logging.WARNING if status.state in (HealthState.DEGRADED, HealthState.UNHEALTHY) else logging.INFO
        log.log(level, "%s is %s", component, status)
        self._dirty.set()

    def phase(self, number: int, name: str) -> None:
        """Epoch `number` enters a phase; the same phase again is a sign of life from a long one, `idle` ends the epoch."""
        with self._lock:
            now = self._clock()
            self._progress = now
            if name == "idle":
                self._in_hand = None
            elif self._in_hand is None or (self._in_hand.number, self._in_hand.name) != (number, name):
                self._in_hand = _Phase(number, name, now)
        self._dirty.set()

    def epoch(self, report: EpochReport) -> None:
        """An epoch is committed."""
        rows_in = sum(report.rows_in.values())
        written = sum(report.rows_out.values(), WriteResult())
        rows_out = written.records_written
        secs = sum(report.seconds.values())
        with self._lock:
            now = self._clock()
            self._progress = now
            self._in_hand = None
            self._epochs += 1
            self._recovered += report.recovered
            self._skipped += report.skipped
            self._letters += sum(report.letters.values())
            for source, rows in report.rows_in.items():
                self._read[source] = self._read.get(source, 0) + rows
            for key, result in report.rows_out.items():
                topic = self._written.setdefault(key, _Written())
                topic.rows += result.records_written
                topic.bytes += result.bytes_written
                topic.discarded += result.records_discarded
                topic.last_epoch = report.number
            self._committed_at = time.time()
            self._last = {
                "number": report.number,
                "rows_in": rows_in,
                "rows_out": rows_out,
                "seconds": {name: round(value, 6) for name, value in report.seconds.items()},
                "recovered": report.recovered,
                "committed_at": _iso(self._committed_at),
            }
            # An epoch's rows count over the time they took, so that few long epochs show an even rate.
            begin = max(self._rates[-1][1] if self._rates else self._started, now - max(secs, 1e-3))
            self._worked = (self._worked[0] if self._worked else begin, now)
            self._rates.append((min(begin, now - 1e-3), now, rows_in, rows_out))
            while self._rates[0][1] < now - HISTORY_SECS:
                self._rates.popleft()
        for name, value in report.seconds.items():
            self._seconds.labels(name).observe(value)
        log.info(
            "epoch=%d rows_in=%d rows_out=%d bytes_out=%d skipped=%d secs=%.3f %s%s",
            *(report.number, rows_in, rows_out, written.bytes_written, report.skipped, secs),
            " ".join(f"{name}={value:.3f}" for name, value in report.seconds.items()),
            " recovered" if report.recovered else "",
        )
        if report.letters:
            log.warning(
                "epoch=%d dead_letters=%d: `penstock dlq` shows them", report.number, sum(report.letters.values())
            )
        for each in report.bad:
            place = f"{each.source}/{each.stream} → {each.topic or '(no topic)'}"
            log.warning("epoch=%d %s: %s %s (%s)", report.number, place, each.code, each.reason, each.rule)
        for (sink, name), result in report.rows_out.items():
            if result.records_discarded:
                log.warning(
                    "epoch=%d discarded=%d sink=%s topic=%s: the target has no place for them (schema_evolution)",
                    *(report.number, result.records_discarded, sink, name),
                )
        self._dirty.set()

    def retry(self, component: str, error: BaseException, backoff_secs: float) -> None:
        """`component` failed with something that passes and is tried again after `backoff_secs`."""
        with self._lock:
            self._retries[component] += 1
            self._remember(component, error)
        text = str(error).replace("\n", " ")
        logging.getLogger("penstock.retry").warning("%s: %s; trying again in %.1f s", component, text, backoff_secs)
        self._dirty.set()

    def lag(self, source: str, value: int | None) -> None:
        """How far a source is behind, in its own unit."""
        with self._lock:
            self._lag[source] = value
        self._dirty.set()

    def message(self, level: str, text: str) -> None:
        """Anything else a person should know: `debug`, `info`, `warning` or `error`."""
        if level == "error":
            with self._lock:
                self._remember("pipeline", from_text(text) or text)
            self._dirty.set()
        told = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        logging.getLogger("penstock.message").log(told, "%s", text)

    def close(self, error: BaseException | None = None) -> None:
        """The pipeline has ended, by itself or by `error`; the first call counts."""
        with self._lock:
            if self._ended is None:
                self._ended = ("failed", without_secrets(str(error))) if error else ("stopped", "")
                self._in_hand = None
                self._lag.clear()  # nobody asks for it any more
                if error:
                    self._remember("pipeline", error)
        self._dirty.set()
        if self._file is not None:
            self._write()

    def publish(self, state_dir: Path) -> None:
        """
        Keep `status.json` in the state directory from now on, at most one write a second.

        Only the holder of the directory's lock calls this: another run must not speak for the one that is running.
        """
        self._file = state_dir / STATUS_FILE
        self._dirty.clear()
        self._write()
        threading.Thread(target=self._keep_writing, name="penstock-status", daemon=True).start()

    # What the fronts show.

    def status(self) -> dict[str, Json]:
        """Everything there is to know, as JSON."""
        with self._lock:
            now = self._clock()
            rate_in, rate_out = self._rate(now)
            state, reason = self._ended or self._state()
            return {
                "pipeline": self.pipeline,
                "version": __version__,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_started": process_started(os.getpid()),
                "url": self.url,
                "state": state,
                "reason": reason,
                "engine": self._engine,
                "started_at": _iso(self._started_at),
                "updated_at": _iso(time.time()),
                "uptime_secs": round(now - self._started, 3),
                "working_secs": round(self._worked[1] - self._worked[0], 3) if self._worked else 0.0,
                "quiet_secs": round(now - self._progress, 3),
                "health_timeout_secs": self._timeout,
                "epochs": self._epochs,
                "recovered": self._recovered,
                "epoch": self._in_hand
                and {
                    "number": self._in_hand.number,
                    "phase": self._in_hand.name,
                    "secs": round(now - self._in_hand.since, 3),
                },
                "last_epoch": self._last,
                "rows": {
                    "in": sum(self._read.values()),
                    "out": sum(topic.rows for topic in self._written.values()),
                    "in_per_sec": rate_in,
                    "out_per_sec": rate_out,
                    "history": self._history(now),
                },
                "bytes": {"out": sum(topic.bytes for topic in self._written.values())},
                "skipped": self._skipped,
                "dead_letters": self._letters,
                "discarded": sum(topic.discarded for topic in self._written.values()),
                "retries": dict(self._retries),
                "sources": {
                    name: {"rows": rows, "lag": self._lag.get(name), **self._component(f"source:{name}")}
                    for name, rows in self._read.items()
                },
                "sinks": self._sinks(),
                "errors": list(self._errors),
                "errors_by_code": dict(self._codes),
                "notices": self._notices,
            }

    def metrics(self) -> bytes:
        """The same in Prometheus' text format, with what the connectors count themselves."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))

    def connector_metrics(self) -> Iterator[tuple[str, ConnectorMetrics]]:
        """What each connector counts itself; one that cannot tell just now is left out."""
        for name, connector in self._connectors.items():
            if connector is not None:
                with contextlib.suppress(Exception):  # a scrape must not fail, and not tell a failure twice
                    yield name, connector.metrics()

    @property
    def committed_at(self) -> float:
        """When the last epoch was committed, in seconds since 1970; 0 if none was."""
        return self._committed_at

    def _state(self) -> tuple[str, str]:
        health = self._health["pipeline"]
        names = {HealthState.UNKNOWN: "starting", HealthState.HEALTHY: "running"}
        return names.get(health.state, str(health.state)), health.reason

    def _component(self, name: str) -> dict[str, Json]:
        health = self._health.get(name, HealthStatus())
        return {"state": str(health.state), "reason": health.reason, "retries": self._retries[name]}

    def _sinks(self) -> dict[str, Json]:
        names = [n.removeprefix("sink:") for n in self._connectors if n.startswith("sink:")]
        sinks: dict[str, Json] = {
            name: {"rows": 0, "bytes": 0, **self._component(f"sink:{name}"), "topics": {}}
            for name in dict.fromkeys([*names, *(sink for sink, _ in self._written)])
        }
        for (sink, topic), written in sorted(self._written.items()):
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
        self._codes[code] += 1
        self._errors.append({"at": _iso(time.time()), "component": component, "code": code, "text": text})

    def _rate(self, now: float) -> tuple[float, float]:
        window = min(_RATE_SECS, max(now - self._rates[0][0], 0.5)) if self._rates else 1.0
        rows_in = rows_out = 0.0
        for begin, end, read, written in self._rates:
            share = max(0.0, end - max(begin, now - window)) / (end - begin)
            rows_in += read * share
            rows_out += written * share
        return round(rows_in / window, 1), round(rows_out / window, 1)

    def _history(self, now: float) -> list[int]:
        seconds = [0.0] * HISTORY_SECS  # rows out in each of the last seconds, the newest last
        for begin, end, _, written in self._rates:
            first = max(0, int(HISTORY_SECS - (now - begin)))
            for second in range(first, HISTORY_SECS):
                left = now - HISTORY_SECS + second
                share = max(0.0, min(end, left + 1) - max(begin, left)) / (end - begin)
                if share == 0 and left > end:
                    break
                seconds[second] += written * share
        return [round(rows) for rows in seconds]

    def _keep_writing(self) -> None:
        while self._ended is None:
            self._dirty.wait()
            self._dirty.clear()
            if self._ended is None:
                self._write()
                time.sleep(1)

    def _write(self) -> None:
        assert self._file is not None
        temporary = self._file.with_name(f".{STATUS_FILE}.{uuid4().hex[:8]}")
        with self._writing:  # asking and replacing are one step: an older status never follows the last one
            try:  # it steers nothing, so it is not synced, and a full disk does not stop a pipeline here
                temporary.write_text(json.dumps(self.status(), ensure_ascii=False, indent=1))
                os.replace(temporary, self._file)
            except OSError as error:
                log.debug("cannot write %s: %s", self._file, error.strerror)
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Verdict:
    """What health checks answer, and why."""

    ok: bool
    reason: str


def judge(status: Mapping[str, Json]) -> Verdict:
    """Whether a pipeline with this status is alive: not dead, not sick, and not stuck with work in hand."""
    if status["state"] in (*ENDED, "unhealthy"):
        return Verdict(False, f"{status['state']}: {status['reason']}".removesuffix(": "))
    parts = [(f"{kind[:-1]} {name}", part) for kind in ("sources", "sinks") for name, part in status[kind].items()]
    for name, part in parts:
        if part["state"] == HealthState.UNHEALTHY:
            return Verdict(False, f"{name} is unhealthy: {part['reason']}")
    quiet, epoch = status["quiet_secs"], status["epoch"]
    if quiet > status["health_timeout_secs"]:
        if epoch:
            return Verdict(False, f"epoch {epoch['number']} made no progress for {quiet:.0f} s, in {epoch['phase']}")
        if status["state"] == "starting":
            return Verdict(False, f"starting for {quiet:.0f} s: {status['engine'] or 'no engine yet'}")
    doubts = [f"{name} is degraded: {part['reason']}" for name, part in parts if part["state"] == HealthState.DEGRADED]
    if status["state"] == "degraded":
        doubts.insert(0, f"degraded: {status['reason']}")
    return Verdict(True, "; ".join(doubts) or status["state"])


def ready(status: Mapping[str, Json]) -> Verdict:
    """Whether the pipeline does its work: an epoch was committed, or the sources are open and have nothing to read."""
    verdict = judge(status)
    if not verdict.ok:
        return verdict
    if status["epochs"] or status["state"] != "starting":
        return Verdict(True, verdict.reason)
    return Verdict(False, f"starting: {status['engine']}".removesuffix(": "))


def read_status(state_dir: Path) -> dict[str, Json] | None:
    """
    The status that a pipeline left in its state directory; None if it never ran.

    It tells the truth about a process that is gone: its state is then `dead`, unless it had ended.
    """
    try:
        status: dict[str, Json] = json.loads((state_dir / STATUS_FILE).read_text())
        age = max(0.0, time.time() - datetime.fromisoformat(status["updated_at"]).timestamp())
        ended = status["state"] in ENDED
        here = status["host"] == socket.gethostname()
        alive = not here or process_started(status["pid"]) == status["process_started"] is not None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # not ours, or half a file of a machine that lost power
        return None
    if not ended and not alive:
        return {**status, "state": "dead", "reason": f"process {status['pid']} is gone without a word", "epoch": None}
    if not ended:
        status["uptime_secs"] += age
        status["quiet_secs"] += age
        if not here:  # its process cannot be looked at from this machine
            status["reason"] = f"{status['reason']} (on {status['host']}, last heard of {age:.0f} s ago)".lstrip()
    return status


def process_started(pid: int) -> str | None:
    """When a process began, so that another one with its number is not taken for it; None if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else after_name[19]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def _named(connectors: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    return dict(connectors) if isinstance(connectors, Mapping) else dict.fromkeys(connectors)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _registry(telemetry: Telemetry) -> tuple[Any, Any]:
    from prometheus_client import CollectorRegistry, Histogram

    registry = CollectorRegistry(auto_describe=False)
    seconds = Histogram(
        "penstock_epoch_seconds", "Time of an epoch by phase.", ["phase"], registry=registry, buckets=_BUCKETS
    )
    registry.register(_Collector(telemetry))
    return registry, seconds


class _Collector:
    """Turns the status into metrics when they are scraped, so that there is one set of counters."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import CounterMetricFamily as Count
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

        status = self._telemetry.status()
        info = Gauge("penstock_info", "The pipeline and the version that runs it.", labels=["pipeline", "version"])
        info.add_metric([status["pipeline"], status["version"]], 1)

        where = ["direction", "connector", "topic"]
        rows = Count("penstock_rows", "Rows of committed epochs.", labels=where)
        discarded = Count(
            "penstock_discarded",
            "Rows that `schema_evolution` left out or took a value from.",
            labels=["connector", "topic"],
        )
        size = Count("penstock_bytes", "Bytes of committed epochs, as the sinks count them.", labels=where)
        for name, source in status["sources"].items():
            rows.add_metric(["in", name, ""], source["rows"])
        for name, sink in status["sinks"].items():
            for topic, written in sink["topics"].items():
                rows.add_metric(["out", name, topic], written["rows"])
                size.add_metric(["out", name, topic], written["bytes"])
                discarded.add_metric([name, topic], written["discarded"])

        retries = Count("penstock_retries", "Failures that were tried again.", labels=["component"])
        state = Gauge("penstock_state", "1 for the state a component is in.", labels=["component", "state"])
        state.add_metric(["pipeline", status["state"]], 1)
        for kind in ("source", "sink"):
            for name, part in status[f"{kind}s"].items():
                state.add_metric([f"{kind}:{name}", part["state"]], 1)
        for component, count in status["retries"].items():
            retries.add_metric([component], count)
        errors = Count("penstock_errors", "Errors by code.", labels=["code"])
        for code, count in status["errors_by_code"].items():
            errors.add_metric([code], count)
        lag = Gauge("penstock_lag", "How far a source is behind, in its own unit.", labels=["connector"])
        for name, source in status["sources"].items():
            if source["lag"] is not None:
                lag.add_metric([name], source["lag"])

        yield from (info, rows, size, discarded, retries, state, errors, lag)
        yield Count("penstock_epochs", "Committed epochs.", value=status["epochs"])
        yield Count("penstock_skipped", "Rows left out by policy.", value=status["skipped"])
        yield Count("penstock_dead_letters", "Records kept as dead letters.", value=status["dead_letters"])
        yield Gauge("penstock_uptime_seconds", "Time since the start.", value=status["uptime_secs"])
        yield Gauge(
            "penstock_last_commit_timestamp_seconds",
            "When the last epoch was committed; 0 before the first.",
            value=self._telemetry.committed_at,
        )
        yield from self._own()

    def _own(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

        own = Gauge("penstock_connector", "What a connector counts itself.", labels=["component", "name"])
        for component, metrics in self._telemetry.connector_metrics():
            if metrics == ConnectorMetrics():  # it counts nothing: noughts would say that nothing came
                continue
            counted = {
                "records_total": metrics.records_total,
                "bytes_total": metrics.bytes_total,
                "errors_total": metrics.errors_total,
                **({} if metrics.lag is None else {"lag": metrics.lag}),
                **metrics.custom,
            }
            for name, value in counted.items():
                own.add_metric([component, name], value)
        yield own
