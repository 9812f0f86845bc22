"""Watches a running pipeline: asks its connectors how they are, and tells a long step from one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import ConnectorError, without_secrets
from penstock.pipeline import Pipeline
from penstock.runtime.commands import end_requests
from penstock.runtime.ingest import Ingest
from penstock.runtime.job import Engine
from penstock.runtime.telemetry import Telemetry
from penstock.runtime.telemetry.status import patience_secs
from penstock.source import HealthState, HealthStatus, SourceConnector

END_SECS = 0.5
"""How often requests to end are looked for."""

HEALTH_SECS = 5.0
"""How often connectors are asked how they are."""


@dataclass
class Step:
    """The step of the loop in hand."""

    began: float
    number: int = 0
    phase: str = ""


class Monitor:
    """Asks the connectors how they are, and the sources how far they lag, in a thread of its own."""

    def __init__(
        self,
        pipeline: Pipeline,
        telemetry: Telemetry,
        engine: Engine,
        ingests: Mapping[str, Ingest],
        step: Callable[[], Step | None],
    ) -> None:
        """`step` gives the one in hand."""
        self._pipeline = pipeline
        self._telemetry = telemetry
        self._engine = engine
        self._ingests = ingests
        self._step = step
        self._closed = threading.Event()
        self._questions: list[_Question] = []
        self._thread = threading.Thread(target=self._watch, name="penstock-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for question in self._questions:
            question.end()

    def _watch(self) -> None:
        processing = self._pipeline.processing
        timeout = processing.health_timeout_secs
        pause, patience = min(_every(timeout), processing.lag_interval_secs), patience_secs(timeout)
        while not self._closed.wait(pause if self._questions else 0.2):
            self._questions = self._questions or list(self._asked_of_all())
            for question in self._questions:
                waited = question.put()
                if waited > patience:
                    silent = f"its health check has not answered for {waited:.0f} s"
                    self._telemetry.state(question.component, HealthStatus.unhealthy(silent))
            self._watch_step()

    def _asked_of_all(self) -> Iterator[_Question]:
        pipeline, telemetry = self._pipeline, self._telemetry
        every = _every(pipeline.processing.health_timeout_secs)

        def tell_health(component: str, ask: Callable[[], HealthStatus]) -> None:
            began = time.monotonic()
            health: HealthStatus | str = _asked(ask, str)
            if self._closed.is_set():
                return
            if isinstance(health, str):
                telemetry.unreachable(component, health, time.monotonic() - began)
            elif health.state is not HealthState.UNKNOWN:
                telemetry.state(component, health)

        def tell_lag(name: str, source: SourceConnector[Any]) -> None:
            lag = _asked(source.lag, lambda reason: None)
            if not self._closed.is_set():
                telemetry.lag(name, lag, source.lag_unit)

        for name, source in pipeline.sources.items():
            ingest = self._ingests.get(name)
            ask = ingest.health if ingest else source.health_check
            yield _Question(f"source:{name}", every, partial(tell_health, f"source:{name}", ask))
            yield _Question(f"source:{name}", pipeline.processing.lag_interval_secs, partial(tell_lag, name, source))
        for name, sink in pipeline.sinks.items():
            yield _Question(f"sink:{name}", every, partial(tell_health, f"sink:{name}", sink.health_check))

    def _watch_step(self) -> None:
        """Tell a long stage, whose tasks run, from a source that does not answer."""
        step, telemetry = self._step(), self._telemetry
        if step is None:
            return
        if step.phase == "stage" and self._engine.busy():
            telemetry.phase(step.number, step.phase)
        waited = time.monotonic() - step.began
        if not step.phase and waited > patience_secs(self._pipeline.processing.health_timeout_secs):
            telemetry.state("pipeline", HealthStatus.unhealthy(f"no source has answered for {waited:.0f} s"))


def _every(timeout: float) -> float:
    """How often connectors are asked: often enough that the answer is known within the timeout."""
    return min(HEALTH_SECS, timeout / 4)


class EndWatch:
    """Looks for requests to end that somebody leaves in the state directory, in a thread of its own."""

    def __init__(self, state_dir: Path, *, stop: threading.Event, drain: threading.Event) -> None:
        self._requests = end_requests(state_dir)
        self._requests.done(request.name for request in self._requests.pending())  # they were for an earlier run
        self._ends: dict[str, threading.Event] = {"stop": stop, "drain": drain}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-end-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(END_SECS):
            for request in self._requests.pending():
                self._requests.done([request.name])
                self._ends[request.verb].set()


class _Question:
    """Something that a connector is asked again and again, each time in a thread of its own: the answer may never come."""

    def __init__(self, component: str, every_secs: float, ask: Callable[[], None]) -> None:
        self.component = component
        self._every = every_secs
        self._ask = ask
        self._since = float("-inf")
        self._thread: threading.Thread | None = None

    def put(self) -> float:
        """Ask when it is time; gives how long the answer has been waited for."""
        now = time.monotonic()
        if self._thread is not None and self._thread.is_alive():
            return now - self._since
        if now - self._since >= self._every:
            self._since = now
            self._thread = threading.Thread(target=self._ask, name=f"penstock-ask-{self.component}", daemon=True)
            self._thread.start()
        return 0.0

    def end(self) -> None:
        """Let an answer that is on its way come in before the connector closes."""
        if self._thread is not None:
            self._thread.join(1.0)


def _asked(question: Callable[[], Any], otherwise: Callable[[str], Any]) -> Any:
    try:
        return question()
    except ConnectorError as error:
        return otherwise(error.message)
    except Exception as error:  # noqa: BLE001 (a bug in a connector is reported, and must not silence all others)
        return otherwise(without_secrets(f"{type(error).__name__}: {error}"))
