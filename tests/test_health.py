"""`/healthz` and `/readyz` go red with the reason, and green again: each of the four ways to fail is brought about."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import web
from penstock.config import Config
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig
from penstock.errors import RetryableError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Router
from penstock.runtime import monitor, supervisor
from penstock.runtime.telemetry import Telemetry, judge, ready
from penstock.sink import DeliveryGuarantee
from penstock.source import (
    HealthStatus,
    PollingSource,
    Position,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceCheckpoint,
)
from penstock.testing import ForkEngine

TIMEOUT_SECS = 2


class NoOptions(Config):
    pass


class Next(Position):
    row: int = 0


class Counting(RangeSource[NoOptions, Next]):
    """A row for each time it is asked, until it is away."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.away = False

    def __reduce__(self) -> Any:
        return type(self), ()

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("row", pa.int64())])}

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        if self.away:
            raise RetryableError("the database is away")
        return Next(row=start.row + 1)

    def split(self, start: Next, end: Next) -> Sequence[tuple[int, int]]:
        return [(start.row, end.row)]

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch]:
        yield SourceBatch(pa.record_batch([pa.array(range(*split), pa.int64())], names=["row"]), stream="rows")


class Dropped(Counting):
    """Behind a firewall that drops packets: nothing is refused, each try takes as long as a connection may."""

    asked, answers = threading.Event(), threading.Event()

    def health_check(self) -> HealthStatus:
        self.asked.set()
        assert self.answers.wait(60)
        raise RetryableError("connection timeout expired")


class Pouring(PollingSource[NoOptions]):
    """More rows with each poll, for ever."""

    name = "pouring"

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.polled = 0

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("row", pa.int64())])}

    def poll_batch(self, max_records: int) -> SourceBatch | None:
        self.polled += 1
        rows = pa.record_batch([pa.array(range(1000), pa.int64())], names=["row"])
        return SourceBatch(rows, stream="rows")

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"rows": self.polled})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self.polled = checkpoint.offsets["rows"]


class Gated(FilesSink):
    """Commits while the gate is open, and can be away."""

    gate = threading.Event()
    away = False

    def commit_topic(self, *arguments: Any) -> None:
        assert self.gate.wait(60)
        super().commit_topic(*arguments)

    def health_check(self) -> HealthStatus:
        if Gated.away:
            raise RetryableError("nobody listens on 5432")
        return HealthStatus.healthy()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "HEALTH_SECS", 0.1)
    Gated.gate.set()
    Gated.away = False


@contextmanager
def running(source: Any, tmp_path: Path) -> Iterator[Callable[[str], tuple[int, str]]]:
    """Gives what an address answers."""
    pipeline = Pipeline(
        "watched",
        sources={"orders": source},
        sinks={"lake": Gated(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
        router=Router((), ("lake",)),
        delivery=DeliveryGuarantee.EXACTLY_ONCE,
        processing=Processing(
            state_dir=tmp_path / "state",
            retry_backoff_ms=1,
            max_backoff_ms=50,
            max_retries=100_000,
            health_timeout_secs=TIMEOUT_SECS,
            lag_interval_secs=1,
            journal_max_bytes=20_000,
            metrics_port=0,
        ),
    )
    telemetry, stop = Telemetry.of(pipeline), threading.Event()
    options = {"telemetry": telemetry, "stop": stop, "serve": web.serve}
    thread = threading.Thread(target=supervisor.run, args=[pipeline, ForkEngine(1)], kwargs=options, daemon=True)
    thread.start()

    def ask(path: str) -> tuple[int, str]:
        if telemetry.url is None:
            return 0, "not served yet"
        try:
            with urllib.request.urlopen(f"{telemetry.url}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    try:
        yield ask
    finally:
        Gated.gate.set()
        Gated.away = False
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.02)


def breaks_and_recovers(ask: Callable[[str], tuple[int, str]], broken: Callable[[bool], None], reason: str) -> None:
    until(lambda: ask("/healthz")[0] == 200 and ask("/readyz")[0] == 200)
    broken(True)
    for path in ("/healthz", "/readyz"):
        until(lambda path=path: ask(path)[0] == 503 and reason in ask(path)[1])
    broken(False)
    for path in ("/healthz", "/readyz"):
        until(lambda path=path: ask(path)[0] == 200)


@pytest.mark.parametrize("timeout", [2, 10, 60, 600])
@pytest.mark.parametrize(
    "broken",
    [
        lambda telemetry: telemetry.retry("source:orders", RetryableError("away"), 1.0),
        lambda telemetry: telemetry.retry("pipeline", RetryableError("away"), 1.0),
        lambda telemetry: telemetry.unreachable("sink:lake", "nobody listens"),
        lambda telemetry: telemetry.phase(7, "commit"),
    ],
    ids=["a dead source", "a failing epoch", "an unreachable sink", "a stuck epoch"],
)
def test_it_is_red_within_the_timeout_of_the_file(broken: Callable[[Telemetry], None], timeout: int) -> None:
    """On a clock of the test. A connector is asked `every` so often, so that much less is left."""
    now = [1000.0]
    telemetry = Telemetry("x", sources=["orders"], sinks=["lake"], health_timeout_secs=timeout, clock=lambda: now[0])
    telemetry.state("pipeline", HealthStatus.healthy())
    broken(telemetry)
    now[0] += timeout / 3
    assert judge(telemetry.status()).ok, "what may pass is not red at once"
    now[0] = 1000.0 + timeout - 2 * monitor._every(timeout) + 0.01
    assert not judge(telemetry.status()).ok
    assert not ready(telemetry.status()).ok


def test_a_dead_source(tmp_path: Path) -> None:
    source = Counting()
    with running(source, tmp_path) as ask:
        breaks_and_recovers(ask, lambda broken: setattr(source, "away", broken), "the database is away")


def test_a_source_that_runs_into_a_timeout_has_been_failing_since_it_was_asked(tmp_path: Path) -> None:
    with running(Dropped(), tmp_path) as ask:
        until(lambda: ask("/healthz")[0] != 0)
        assert Dropped.asked.wait(60)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 0.5)
        Dropped.answers.set()
        part = lambda: json.loads(ask("/api/status")[1])["sources"]["orders"]  # noqa: E731
        until(lambda: part()["failing_secs"])
        assert part()["failing_secs"] >= 0.5


def test_a_stuck_epoch(tmp_path: Path) -> None:
    with running(Counting(), tmp_path) as ask:

        def stick(broken: bool) -> None:
            Gated.gate.clear() if broken else Gated.gate.set()

        breaks_and_recovers(ask, stick, "made no progress for")


def test_a_full_journal(tmp_path: Path) -> None:
    with running(Pouring(), tmp_path) as ask:

        def stick(broken: bool) -> None:
            Gated.gate.clear() if broken else Gated.gate.set()

        breaks_and_recovers(ask, stick, "the journal is full")


def test_an_unreachable_sink(tmp_path: Path) -> None:
    with running(Counting(), tmp_path) as ask:
        breaks_and_recovers(ask, lambda broken: setattr(Gated, "away", broken), "nobody listens on 5432")
