"""How a running pipeline behaves: signals instead of timers, requests, retries, stopping, refusing. No JVM."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from rich.console import Console

from penstock.changes import CHANGE_FIELDS
from penstock.cli.states import show
from penstock.config import Config, Secret
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.files import Files, FilesConfig
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig, read_published
from penstock.connectors.generator import Generator, GeneratorConfig
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError
from penstock.pipeline import Pipeline, Processing
from penstock.pipeline.routing import Route, Router
from penstock.runtime import commands, monitor, readiness, supervisor
from penstock.runtime.epochs import State, Wiring, reset
from penstock.runtime.telemetry import Telemetry
from penstock.schema import with_key
from penstock.sink import DeliveryGuarantee
from penstock.source import (
    BufferedBridge,
    HealthStatus,
    PollingSource,
    Position,
    ProducerConfig,
    RangeSource,
    ReadLimit,
    Schemas,
    Sender,
    SourceBatch,
    SourceCheckpoint,
    SourceContext,
    SourceEnvelope,
    SourceRecord,
    StreamingSource,
)
from penstock.spark import engine_for
from penstock.tables import TableSource, TableState
from penstock.testing import ForkEngine

pytestmark = pytest.mark.processes


class NoOptions(Config):
    pass


class Next(Position):
    row: int = 0


class Tap(RangeSource[NoOptions, Next]):
    """Rows that appear when the test says so."""

    name = "tap"

    def __init__(self, *, ready: bool = False, request: bool = False) -> None:
        super().__init__(NoOptions())
        self.ready = threading.Event() if ready else None
        self.request = threading.Event() if request else None
        self.available = 0
        self.looked = 0
        self.failures: list[ConnectorError] = []
        self.ack_failures: list[ConnectorError] = []
        self.acked: list[int] = []
        self.opened = 0

    def __reduce__(self) -> Any:
        return type(self), ()

    def open(self, context: SourceContext = SourceContext()) -> None:
        super().open(context)
        self.opened += 1

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("row", pa.int64())])}

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        self.looked += 1
        if self.failures:
            raise self.failures.pop(0)
        return limit.bounded(Next(row=max(start.row, self.available)))

    def split(self, start: Next, end: Next) -> Sequence[tuple[int, int]]:
        return [(start.row, end.row)]

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch]:
        yield SourceBatch(pa.record_batch([pa.array(range(*split), pa.int64())], names=["row"]), stream="rows")

    def ack(self, end: Next) -> None:
        if self.ack_failures:
            raise self.ack_failures.pop(0)
        self.acked.append(end.row)

    def data_ready_notify(self) -> threading.Event | None:
        return self.ready

    def checkpoint_requested(self) -> threading.Event | None:
        return self.request


class Growing(Tap):
    """Has ten rows more whenever it is asked."""

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        self.available += 10
        return limit.bounded(Next(row=min(self.available, start.row + (limit.rows or self.available))))


class Behind(Tap):
    """Counts how often it is asked for its lag."""

    asked = 0

    def lag(self) -> int:
        self.asked += 1
        return 7


class Running:
    """A pipeline in a thread, stopped at the end of the test."""

    def __init__(self, pipeline: Pipeline, **options: Any) -> None:
        self.pipeline = pipeline
        self.telemetry = Telemetry.of(pipeline)
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.summary: supervisor.Summary | None = None
        self._options = options
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.summary = supervisor.run(
                self.pipeline, engine=ForkEngine(2), telemetry=self.telemetry, stop=self.stop, **self._options
            )
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.error = error

    def ends(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def stopped(self) -> supervisor.Summary:
        self.stop.set()
        self.ends()
        if self.error is not None:
            raise self.error
        assert self.summary is not None
        return self.summary


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.01)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Pipeline]:
    def build(source: Any, **processing: Any) -> Pipeline:
        settings = {"state_dir": tmp_path / "state", "retry_backoff_ms": 1, **processing}
        return Pipeline(
            "supervised",
            sources={"source": source},
            sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
            router=Router((), ("lake",)),
            delivery=DeliveryGuarantee.EXACTLY_ONCE,
            processing=Processing(**settings),
        )

    return build


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], list[int]]:
    def rows() -> list[int]:
        table = read_published(tmp_path / "lake" / "rows")
        return sorted(table["row"].to_pylist()) if table.num_rows else []

    return rows


def test_a_signalled_row_is_committed_though_the_timer_is_far_away(build: Any, rows: Any) -> None:
    tap = Tap(ready=True)
    running = Running(build(tap, poll_interval_ms=60_000))
    until(lambda: tap.looked)
    assert tap.ready is not None
    for available in (1, 3):
        tap.available = available
        tap.ready.set()
        until(lambda: rows() == list(range(tap.available)))
    assert not tap.ready.is_set()
    running.stopped()


def test_a_source_that_signals_is_not_polled(build: Any) -> None:
    tap = Tap(ready=True)
    running = Running(build(tap, poll_interval_ms=1, epoch_interval_ms=0))
    until(lambda: tap.looked)
    looked = tap.looked
    time.sleep(0.3)  # the point is that nothing happens meanwhile
    assert tap.looked == looked
    running.stopped()


class Flood(StreamingSource[Config]):
    """Sends more than the journal takes."""

    name = "flood"

    def start_streaming(self, sender: Sender) -> None:
        for _ in range(60):
            sender.send(SourceEnvelope(SourceRecord("rows", os.urandom(1000))))
        sender.wait(3600)


def test_a_full_journal_is_emptied_at_once_however_long_the_interval(build: Any, tmp_path: Path) -> None:
    running = Running(build(Flood(Config()), epoch_interval_ms=600_000, journal_max_bytes=20_000))
    until(lambda: read_published(tmp_path / "lake" / "rows").num_rows == 60, seconds=60)
    assert running.stopped().epochs > 1


def test_a_requested_epoch_is_cut_now_and_the_request_is_cleared(build: Any, rows: Any) -> None:
    tap = Tap(request=True)
    assert tap.request is not None
    tap.available = 1
    running = Running(build(tap, epoch_interval_ms=600_000, poll_interval_ms=60_000))
    until(lambda: rows() == [0])
    tap.available = 2
    tap.request.set()
    until(lambda: rows() == [0, 1])
    until(lambda: not tap.request.is_set())
    running.stopped()


def test_a_request_with_nothing_to_read_stays_until_there_is_something(build: Any, rows: Any) -> None:
    tap = Tap(request=True)
    assert tap.request is not None
    running = Running(build(tap, epoch_interval_ms=0, poll_interval_ms=20))
    tap.request.set()
    until(lambda: tap.looked > 5)
    assert tap.request.is_set()
    tap.available = 1
    until(lambda: rows() == [0])
    until(lambda: not tap.request.is_set())
    running.stopped()


def test_what_passes_is_waited_out_and_the_source_opened_anew(build: Any, rows: Any) -> None:
    tap = Tap()
    tap.failures = [RetryableError("the connection broke", code="PEN-2001")] * 3
    tap.available = 5
    running = Running(build(tap))
    until(lambda: rows() == list(range(5)))
    assert tap.opened == 4
    running.stopped()
    assert running.telemetry.status()["state"] != "failed"


def test_too_many_retries_in_a_row_stop_the_pipeline(build: Any) -> None:
    tap = Tap()
    tap.failures = [RetryableError("the connection broke", code="PEN-2001", hint="plug it in")] * 5
    running = Running(build(tap, max_retries=2))
    running.ends()
    assert isinstance(running.error, FatalError)
    assert running.error.code == "PEN-5013"
    assert "the connection broke" in str(running.error)
    assert running.error.hint == "plug it in; then start again, or raise `max_retries`: nothing is lost"


def test_a_failed_ack_is_told_again_and_fails_no_epoch(build: Any, rows: Any) -> None:
    tap = Tap()
    tap.ack_failures = [RetryableError("no answer")] * 2
    tap.available = 5
    running = Running(build(tap))
    until(lambda: tap.acked == [5])
    assert rows() == list(range(5))
    assert running.stopped().epochs == 1


def test_the_first_open_is_not_retried(build: Any) -> None:
    class Unreachable(Tap):
        def open(self, context: SourceContext = SourceContext()) -> None:
            super().open(context)
            raise RetryableError("no route to the host", hint="is it running?")

    tap = Unreachable()
    running = Running(build(tap))
    running.ends()
    assert isinstance(running.error, FatalError)
    assert running.error.code == "PEN-5001"
    assert "source:source" in str(running.error)
    assert tap.opened == 1


class Parted(Tap):
    """Wants its topic in two partitions."""

    def producer_configs(self) -> Sequence[ProducerConfig]:
        self.asked = getattr(self, "asked", 0) + 1
        return [replace(config, partitions=2) for config in super().producer_configs()]


def test_a_source_may_ask_for_partitions_and_it_is_told(
    build: Any, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tap = Parted()
    tap.available = 20
    pipeline = replace(build(tap), router=Router((Route(to="/rows", key=("row",)),), ("lake",)))
    with caplog.at_level("INFO"):
        Running(pipeline, drain=True).ends()
    assert sorted(rows()) == list(range(20))
    assert tap.asked == 1
    assert (
        "source source: /rows is produced in 2 partitions, through the journal, as the source asks for" in caplog.text
    )


def test_drain_ends_with_what_was_there_though_more_keeps_coming(build: Any, rows: Any) -> None:
    running = Running(build(Growing(), max_epoch_rows=4), drain=True)
    running.ends()
    assert running.error is None
    assert rows() == list(range(10))


class Cautious(FilesSink):
    max_epoch_rows = 4


class Counting(Tap):
    """Notes how many rows it is asked for."""

    limits: ClassVar[list[int | None]] = []

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        self.limits.append(limit.rows)
        return super().latest(start, limit)


@pytest.mark.parametrize(("sink", "rows"), [(FilesSink, 6), (Cautious, 4)])
def test_a_sink_bounds_the_rows_of_an_epoch(build: Any, sink: type[FilesSink], rows: int) -> None:
    Counting.limits.clear()
    pipeline = build(Counting(), max_epoch_rows=6)
    Running(replace(pipeline, sinks={"lake": sink(pipeline.sinks["lake"].config)}), drain=True).ends()
    assert set(Counting.limits) - {None} == {rows}


def test_sources_share_what_a_sink_takes_in_an_epoch(build: Any, tmp_path: Path) -> None:
    Counting.limits.clear()
    pipeline = build(Counting(), max_epoch_rows=6)
    config = pipeline.sinks["lake"].config
    to_both = [Route(source=name, to=f"/{name}") for name in ("one", "two")]
    routes = (*to_both, Route(source="three", to="/three", sinks=("free",)))
    sinks = {"lake": Cautious(config), "free": FilesSink(FilesSinkConfig(path=str(tmp_path / "free" / "{topic}")))}
    sources = {name: Counting() for name in ("one", "two", "three")}
    router = Router(routes, tuple(sinks))
    Running(replace(pipeline, sources=sources, sinks=sinks, router=router), drain=True).ends()
    assert set(Counting.limits) - {None} == {2}, "two of the three share four"


def test_the_sink_of_the_letters_is_shared_by_all_sources(tmp_path: Path) -> None:
    sinks = {
        name: kind(FilesSinkConfig(path=str(tmp_path))) for name, kind in (("lake", Cautious), ("free", FilesSink))
    }
    routes = (Route(source="one"), Route(source="two"), Route(sinks=("free",)))
    wiring = Wiring({}, sinks, Router(routes, tuple(sinks)))
    assert wiring.rows_of_each(100, ("one", "two")) == 2
    for letters, rows in ((None, 2), ("lake", 1), ("free", 2)):
        assert wiring.rows_of_each(100, ("one", "two", "three", "four"), letters) == rows
    assert wiring.rows_of_each(100, [f"s{n}" for n in range(9)], "lake") == 1, "never none"
    assert wiring.rows_of_each(100, ("three", "four")) == 100, "none of them leads there"


def test_a_drain_that_is_asked_for_later_takes_what_is_there_by_then(build: Any, rows: Any) -> None:
    tap, drain = Tap(), threading.Event()
    tap.available = 5
    running = Running(build(tap), drain=drain)
    until(lambda: tap.acked == [5])
    tap.available = 12
    drain.set()
    running.ends()
    assert running.error is None
    assert rows() == list(range(12))


def test_without_checkpoints_a_restart_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        pipeline = Pipeline(
            "forgetful",
            sources={"source": Generator(GeneratorConfig(rows=10))},
            sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "lake")))},
            router=Router((), ("lake",)),
            processing=Processing(state_dir=tmp_path / "state", checkpoint=False),
        )
        running = Running(pipeline, drain=True, lost_state="start-over")
        running.ends()
        assert running.error is None
    assert sorted(read_published(tmp_path / "lake")["id"].to_pylist()) == sorted([*range(10), *range(10)])


def test_a_connector_that_cannot_travel_to_tasks_is_refused_by_name(build: Any) -> None:
    class Local(Tap):
        pass

    running = Running(build(Local()))
    running.ends()
    assert isinstance(running.error, ConfigError)
    assert "source 'source' cannot be pickled" in str(running.error)


def test_a_failed_open_is_told_without_waiting_for_the_engine(build: Any) -> None:
    class SlowEngine(ForkEngine):
        stopped = threading.Event()
        let_go = threading.Event()

        def start(self) -> None:
            self.let_go.wait(20)

        def hold(self, lock: Path) -> None:
            pass

        def stop(self) -> None:
            self.stopped.set()

    class Refusing(Tap):
        def open(self, context: SourceContext = SourceContext()) -> None:
            raise ConfigError("no such thing")

    engine = SlowEngine(2)
    with pytest.raises(ConfigError, match="no such thing"):
        supervisor.run(build(Refusing()), engine=engine)
    assert not engine.stopped.is_set()
    engine.let_go.set()
    assert engine.stopped.wait(10), "an engine that is no longer wanted stops itself"


class Changing(Tap):
    """Rows that are changes."""

    def schema(self) -> Schemas:
        return {"rows": with_key(pa.schema([("row", pa.int64()), *CHANGE_FIELDS]), ["row"])}


def test_changes_that_a_query_could_filter_out_are_refused_by_a_sink_that_applies_them(tmp_path: Path) -> None:
    pipeline = Pipeline(
        "filtered",
        sources={"source": Changing()},
        sinks={"lake": Delta(DeltaConfig(path=str(tmp_path / "lake"), mode="upsert"))},
        router=Router((Route(sql="SELECT * FROM input WHERE row > 1"),), ("lake",)),
        processing=Processing(state_dir=tmp_path / "state"),
    )
    running = Running(pipeline, drain=True)
    running.ends()
    assert isinstance(running.error, ConfigError)
    assert running.error.code == "PEN-1009"


def test_two_runs_at_once_are_refused_and_the_first_is_named(build: Any) -> None:
    first = Running(build(Tap()))
    until(lambda: first.telemetry.status()["state"] == "running")
    second = Running(build(Tap()))
    second.ends()
    assert isinstance(second.error, FatalError)
    assert second.error.code == "PEN-5002"
    assert f"process {os.getpid()}" in str(second.error)
    first.stopped()


def test_a_source_that_was_renamed_is_refused(build: Any, tmp_path: Path) -> None:
    running = Running(build(Generator(GeneratorConfig(rows=10))), drain=True)
    running.ends()
    assert running.error is None
    pipeline = build(Generator(GeneratorConfig(rows=10)))
    renamed = Pipeline(
        pipeline.name,
        sources={"other": pipeline.sources["source"]},
        sinks=pipeline.sinks,
        router=pipeline.router,
        processing=pipeline.processing,
    )
    again = Running(renamed, drain=True)
    again.ends()
    assert isinstance(again.error, ConfigError)
    assert again.error.code == "PEN-1013"


def test_after_a_reset_everything_is_read_again(build: Any, tmp_path: Path) -> None:
    for expected in (10, 20):
        running = Running(build(Generator(GeneratorConfig(rows=10))), drain=True)
        running.ends()
        assert running.error is None
        assert read_published(tmp_path / "lake" / "rows").num_rows == expected
        reset(tmp_path / "state", "supervised")


def test_a_state_directory_of_another_pipeline_is_refused(build: Any, tmp_path: Path) -> None:
    other = State(tmp_path / "state", "another")
    other.open()
    other.close()
    running = Running(build(Tap()))
    running.ends()
    assert isinstance(running.error, FatalError)
    assert running.error.code == "PEN-5003"


class CallbackClient(PollingSource[NoOptions]):
    """A client that calls back, polled through a bridge."""

    name = "callback_client"

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.bridge = BufferedBridge(capacity=10)
        self.sent = 0
        self.committed: list[Any] = []

    def __reduce__(self) -> Any:
        return type(self), ()

    def schema(self) -> Schemas:
        return {}

    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            assert self.bridge.put(SourceEnvelope(SourceRecord.from_number("rows", self.sent)), timeout_secs=10)

    def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
        return self.bridge.take(max_records)

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"rows": self.sent})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self.sent = checkpoint.offsets["rows"]

    def commit(self, offsets: Any) -> None:
        self.committed.append(offsets["rows"])

    def data_ready_notify(self) -> threading.Event | None:
        return self.bridge.ready


def test_messages_of_a_callback_client_reach_the_sink_through_bridge_and_journal(build: Any, tmp_path: Path) -> None:
    client = CallbackClient()
    running = Running(build(client, poll_interval_ms=60_000))
    until(lambda: running.telemetry.status()["state"] == "running")
    client.deliver(25)  # more than the bridge holds: the callback waits until there is room
    target = tmp_path / "lake" / "rows"
    until(lambda: read_published(target).num_rows == 25)
    assert [int(payload) for payload in read_published(target)["payload"].to_pylist()] == list(range(1, 26))
    assert client.committed[-1] == 25
    running.stopped()


class Backlog(PollingSource[NoOptions]):
    """Has a thousand rows for each of forty polls, and then nothing more."""

    name = "backlog"

    def __init__(self) -> None:
        super().__init__(NoOptions())
        self.polled = 0

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("row", pa.int64())])}

    def poll_batch(self, max_records: int) -> SourceBatch | None:
        if self.polled == 40:
            return None
        first, self.polled = self.polled * 1000, self.polled + 1
        rows = pa.record_batch([pa.array(range(first, first + 1000), pa.int64())], names=["row"])
        return SourceBatch(rows, stream="rows")

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"rows": self.polled})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self.polled = checkpoint.offsets["rows"]


def test_drain_reads_a_backlog_that_is_larger_than_the_journal(build: Any, rows: Any) -> None:
    running = Running(build(Backlog(), journal_max_bytes=50_000, epoch_interval_ms=0), drain=True)
    running.ends()
    assert running.error is None
    assert rows() == list(range(40_000))


def test_a_second_drain_of_a_journaled_source_ends_though_nothing_is_new(build: Any, rows: Any) -> None:
    for _ in range(2):
        running = Running(build(Backlog(), epoch_interval_ms=0), drain=True)
        running.ends()
        assert running.error is None
        assert rows() == list(range(40_000))


class Waking(Backlog):
    """Is not ready yet when it is opened first."""

    opened = 0

    def open(self, context: SourceContext = SourceContext()) -> None:
        super().open(context)
        self.opened += 1
        if self.opened == 1:
            raise RetryableError("it is starting up", code="PEN-2007")


def test_a_journaled_source_that_is_not_ready_yet_is_waited_for(build: Any, rows: Any) -> None:
    running = Running(build(Waking(), epoch_interval_ms=0), drain=True)
    running.ends()
    assert running.error is None
    assert rows() == list(range(40_000))


IDLE = """
import sys, threading
from pathlib import Path
from penstock.runtime import monitor, supervisor
from penstock.pipeline import Pipeline
from penstock.tables import TableSource, TableState
from penstock.testing import ForkEngine
supervisor.run(Pipeline.from_toml(sys.argv[1]), engine=ForkEngine(2))
"""

PIPELINE = """
connector_name = "idle"
[source]
connector = "generator"
rows = 10
[sink]
connector = "files"
path = "lake"
"""


def test_an_idle_pipeline_uses_next_to_no_cpu(tmp_path: Path) -> None:
    """Over a few seconds here; `tests/spark` does it over a minute, with the JVM."""
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    process = subprocess.Popen([sys.executable, "-c", IDLE, str(tmp_path / "pipeline.toml")])
    try:
        until(lambda: list((tmp_path / "lake").glob("*.parquet")), 90)
        before, began = cpu_secs(process.pid), time.monotonic()
        time.sleep(4)
        used = (cpu_secs(process.pid) - before) / (time.monotonic() - began)
        assert used < 0.05, f"{used:.1%} of a core"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def cpu_secs(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_lag_is_sampled_as_often_as_the_file_says(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "HEALTH_SECS", 3600.0)
    behind = Behind()
    running = Running(build(behind, lag_interval_secs=1))
    until(lambda: behind.asked >= 3)
    running.stopped()
    source = running.telemetry.status()["sources"]["source"]
    assert (source["lag"], source["lag_unit"]) == (7, "rows")


def test_the_same_pipeline_again_is_told_no_change(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO", logger="penstock"):
            supervisor.run(build(Tap()), engine=ForkEngine(1), drain=True)
    assert "from now on" not in caplog.text


def test_a_change_that_was_refused_can_be_taken_back(build: Any) -> None:
    supervisor.run(build(Tap()), engine=ForkEngine(1), drain=True)
    wrong = replace(build(Tap()), router=Router((Route("#", "/{stream}"), Route("rows", "/x", sql="?")), ("lake",)))
    with pytest.raises(ConfigError):
        supervisor.run(wrong, engine=ForkEngine(1), drain=True)
    supervisor.run(build(Tap()), engine=ForkEngine(1), drain=True)


class Moody(Tap):
    """Answers questions about itself in the way that the test wants."""

    def __init__(self, health: Callable[[], HealthStatus] = HealthStatus.healthy) -> None:
        super().__init__()
        self.health = health
        self.lag_asked = 0

    def health_check(self) -> HealthStatus:
        return self.health()

    def lag(self) -> int | None:
        self.lag_asked += 1
        return 0


def health_of(running: Running) -> str:
    part = running.telemetry.status()["sources"]["source"]
    return f"{part['state']} {part['reason']}"


def test_a_health_check_that_never_returns_is_told_and_does_not_hold_up_the_end(build: Any) -> None:
    answer = threading.Event()

    def silent() -> HealthStatus:
        answer.wait()
        return HealthStatus.healthy()

    running = Running(build(Moody(silent), health_timeout_secs=1))
    until(lambda: health_of(running).startswith("unhealthy its health check has not answered"))
    running.stopped()
    answer.set()


def test_a_bug_in_a_health_check_is_told_and_silences_nobody(build: Any) -> None:
    def broken() -> HealthStatus:
        raise KeyError("size")

    moody = Moody(broken)
    running = Running(build(moody, lag_interval_secs=1))
    until(lambda: health_of(running) == "degraded KeyError: 'size'")
    asked = moody.lag_asked
    until(lambda: moody.lag_asked > asked)
    running.stopped()


def test_the_lag_is_sampled_as_often_as_asked_for(build: Any) -> None:
    moody = Moody()
    running = Running(build(moody, lag_interval_secs=1))
    until(lambda: moody.lag_asked >= 3, seconds=4.5)
    running.stopped()


def test_a_drain_waits_out_what_passes_from_its_first_look_on(build: Any, rows: Any) -> None:
    tap = Tap()
    tap.available = 3
    tap.failures = [RetryableError("not now")]
    supervisor.run(build(tap), engine=ForkEngine(1), drain=True)
    assert rows() == [0, 1, 2]


def test_without_manifests_every_run_begins_anew(build: Any, rows: Any) -> None:
    for _ in range(2):
        tap = Tap()
        tap.available = 2
        pipeline = replace(build(tap, checkpoint=False), delivery=DeliveryGuarantee.AT_LEAST_ONCE)
        assert supervisor.run(pipeline, engine=ForkEngine(1), drain=True).rows_out == 2
    assert rows() == [0, 0, 1, 1]


def test_rows_that_no_route_takes_are_no_errors(build: Any) -> None:
    two = Generator(GeneratorConfig(rows=10, streams=("a", "b")))
    pipeline = build(two, unrouted="skip", max_error_rate=0.0)
    pipeline = replace(pipeline, router=Router((Route("a", "/a"),), ("lake",), "skip"))
    assert supervisor.run(pipeline, engine=ForkEngine(1), drain=True).skipped == 10


def test_a_state_directory_that_others_can_write_in_is_closed_or_refused(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    theirs = os.geteuid() + 1
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: theirs)
        with pytest.raises(FatalError, match=r"everybody can write in .*, and it belongs to another user"):
            supervisor.run(build(Backlog(), epoch_interval_ms=0), engine=ForkEngine(1), drain=True)
        with pytest.raises(FatalError, match="belongs to another user"):
            readiness.state_directory(build(Backlog(), epoch_interval_ms=0))
    assert not list(state.iterdir()), "nothing of it is used"
    supervisor.run(build(Backlog(), epoch_interval_ms=0), engine=ForkEngine(1), drain=True)
    assert stat.S_IMODE(state.stat().st_mode) == 0o755, "who may read it is left to its user"


def test_only_its_user_can_read_a_state_directory(build: Any, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        running = Running(build(Backlog(), epoch_interval_ms=0), drain=True)
        running.ends()
    finally:
        os.umask(before)
    assert running.error is None
    state = tmp_path / "state"
    directories = [state, *(path for path in state.rglob("*") if path.is_dir())]
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in directories} == {
        path.name: "0o700" for path in directories
    }
    assert "journal" in {path.name for path in directories}
    files = [path for path in state.rglob("*") if path.is_file()]
    assert {"status.json", "pipeline.json", "lock", "tail"} <= {path.name for path in files}
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {p.name: "0o600" for p in files}


def test_dead_letters_are_their_users_alone_also_in_a_state_directory_that_others_may_read(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"v": 1}\n{"v": "a secret"}\n')
    pipeline = Pipeline(
        "letters",
        sources={"in": Files(FilesConfig(path=tmp_path / "in", settle_ms=0, columns={"v": "int64"}))},
        sinks={"lake": FilesSink(FilesSinkConfig(path=str(tmp_path / "lake" / "{topic}")))},
        router=Router((), ("lake",)),
        processing=Processing(state_dir=tmp_path / "state", on_error="dead_letter"),
    )
    supervisor.run(pipeline, ForkEngine(1), drain=True)
    assert list((tmp_path / "state" / "dead_letters").rglob("*.parquet"))
    assert stat.S_IMODE((tmp_path / "state" / "dead_letters").stat().st_mode) == 0o700
    others = [path for path in (tmp_path / "state").rglob("*") if "dead_letters" not in path.parts and path.is_file()]
    assert [path for path in others if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


class Captured(Tap, TableSource[NoOptions, Next]):
    """Says that one of its tables failed."""

    def tables(self, position: Next) -> dict[str, TableState]:
        return {"rows": TableState("active"), "broken": TableState("failed", code="PEN-3006", error="no such column")}


def test_a_drain_tells_which_tables_failed(build: Any) -> None:
    source = Captured()
    source.available = 10
    running = Running(build(source), drain=True)
    running.ends()
    assert running.error is None
    assert running.summary is not None
    assert running.summary.failed_tables == {"source": ["broken"]}
    status = running.telemetry.status()
    assert status["reason"] == "source source is degraded: 1 table failed: broken (PEN-3006 no such column)"
    again = Running(build(source), drain=True)  # nothing is new, and the table is as it was
    again.ends()
    assert again.summary is not None
    assert again.summary.failed_tables == {"source": ["broken"]}


class Two(Captured):
    """Has a table that no route takes."""

    def tables(self, position: Next) -> dict[str, TableState]:
        return {"rows": TableState("active"), "log": TableState("active")}


def test_a_table_that_no_route_takes_is_shown_as_left_out_with_the_reason(build: Any) -> None:
    source = Two()
    source.available = 10
    pipeline = replace(build(source), router=Router((Route(stream="rows"),), ("lake",), unrouted="skip"))
    running = Running(pipeline, drain=True)
    running.ends()
    assert running.error is None
    why = 'no route takes it, and unrouted = "skip"'
    states = {name: (each.state, each.error) for name, each in commands.table_sources(pipeline)[0].states.items()}
    assert states == {"rows": ("active", ""), "log": ("left_out", why)}
    shown = Console(record=True, width=200, file=io.StringIO())
    show(pipeline, [], shown, json=False)
    assert why in shown.export_text()
    assert re.search(r'table="log".*left_out|left_out.*table="log"', running.telemetry.metrics().decode())
    with pytest.raises(ConfigError, match="log cannot be captured: no route takes it"):
        commands.tables_asked(pipeline, "resync", ["log"], "test")


def test_what_an_ingest_counts_is_scraped(build: Any) -> None:
    running = Running(build(Backlog(), epoch_interval_ms=0), drain=True)
    running.ends()
    text = running.telemetry.metrics().decode()
    assert 'penstock_journal_rows{connector="source"} 0.0' in text
    assert 'penstock_journal_oldest_seconds{connector="source"} 0.0' in text
    (fsyncs,) = re.findall(r'^penstock_journal_fsyncs_total\{connector="source"\} (.*)$', text, re.MULTILINE)
    (seconds,) = re.findall(r'^penstock_journal_fsync_seconds_total\{connector="source"\} (.*)$', text, re.MULTILINE)
    assert float(fsyncs) >= 2
    assert float(seconds) > 0
    assert 'penstock_connector{component="source:source",name="records_total"} 40000.0' in text


class Locked(Config):
    password: Secret


class Talkative(RangeSource[Locked, Next]):
    """Its client puts the password into what it complains of."""

    name = "talkative"

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("row", pa.int64())])}

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        return Next(row=1)

    def split(self, start: Next, end: Next) -> Sequence[int]:
        return [end.row]

    def read(self, split: int) -> Iterator[SourceBatch]:
        raise ValueError(f"no access with {self.config.password.reveal()}")

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.config.password.reveal()


def test_a_secret_in_the_message_of_a_client_is_shown_nowhere(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.errors._secrets", set())
    monkeypatch.setenv("TALKATIVE", "swordfish")
    pipeline = build(Talkative(Locked(password=Secret(env="TALKATIVE"))))
    with pytest.raises(ValueError, match="swordfish"):  # for who debugs it; the command line says it as a FatalError
        supervisor.run(pipeline, engine=ForkEngine(1), drain=True)
    assert str(FatalError("no access with swordfish", hint="not swordfish")) == "PEN-5000 no access with …\n  → not …"
    written = [file for file in tmp_path.rglob("*") if file.is_file() and b"swordfish" in file.read_bytes()]
    assert written == []
    assert "swordfish" not in caplog.text


@pytest.mark.parametrize(
    ("routes", "alone", "plain"),
    [((), True, True), ((Route(),), True, True), ((Route(), Route(sql="…")), True, False), ((), False, False)],
)
def test_only_a_process_that_runs_nothing_but_passthrough_has_a_jvm_for_nothing_else(
    build: Any, monkeypatch: pytest.MonkeyPatch, routes: tuple[Route, ...], alone: bool, plain: bool
) -> None:
    started: dict[str, Any] = {}

    class Engine:
        def __init__(self, spark: Any, **options: Any) -> None:
            started.update(options)
            raise FatalError("not here")

    monkeypatch.setattr("penstock.spark.engine.SparkEngine", Engine)
    pipeline = build(Tap())
    pipeline = replace(pipeline, router=replace(pipeline.router, routes=routes))
    with pytest.raises(FatalError, match="not here"):
        engine_for(pipeline, alone=alone)
    assert started["plain"] is plain
