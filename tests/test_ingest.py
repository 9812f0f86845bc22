"""Sources that push or are polled: nothing lost, nothing doubled, nobody told before the fsync."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import failpoints
from penstock.capture import AckSink, Change, ChangeCapture, ChangeEvent, Delete, SnapshotTable, Upsert
from penstock.config import Config
from penstock.durable import Json
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.pipeline import Processing
from penstock.runtime.ingest import Ingest
from penstock.runtime.journal import JournalConfig, JournalPosition, JournalSource
from penstock.source import (
    BufferedBridge,
    HealthState,
    HealthStatus,
    PollingSource,
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

processes = multiprocessing.get_context("fork")
ROWS = 20


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "the condition never came true"
        time.sleep(0.002)


def envelope(number: int, stream: str = "s", key: str | None = None) -> SourceEnvelope:
    return SourceEnvelope(SourceRecord.from_number(stream, number), dedupe_key=key)


def journaled(directory: Path) -> list[int]:
    """Every number in the journal, as another process reads it."""
    source = JournalSource(JournalConfig(directory=directory))
    start = source.initial()
    splits = source.split(start, source.latest(start, ReadLimit()))
    batches = [batch.records for split in splits for batch in source.read(split)]
    return [int(value) for batch in batches for value in batch.column("payload").to_pylist()]


def written(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def write(file: Path, number: int) -> None:
    with open(file, "ab") as out:
        out.write(b"%d\n" % number)


class Nothing(Config):
    """No options."""


class Log(PollingSource[Nothing]):
    """A log of `count` numbers that is read from a checkpoint; `told` is a file, since it must outlive a kill."""

    name = "log"

    def __init__(self, count: int = ROWS, step: int = 3, told: Path | None = None, journal: Path | None = None) -> None:
        super().__init__(Nothing())
        self.count, self.step, self.told, self.journal = count, step, told, journal
        self.at = 0
        self.calls: list[str] = []
        self.fails: list[Exception] = []

    def open(self, context: SourceContext = SourceContext()) -> None:
        self.calls.append("open")

    def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
        self.calls.append("poll")
        if self.fails:
            raise self.fails.pop(0)
        found = [envelope(n) for n in range(self.at, min(self.at + self.step, self.count))]
        self.at += len(found)
        return found or None

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"at": self.at})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self.calls.append(f"restore {checkpoint.offsets['at']}")
        self.at = checkpoint.offsets["at"]

    def commit(self, offsets: Mapping[str, Json]) -> None:
        self.calls.append(f"commit {offsets['at']}")
        if self.journal is not None:
            assert len(journaled(self.journal)) >= offsets["at"], "told before it was durable"
        if self.told is not None:
            write(self.told, offsets["at"])


class Broker(StreamingSource[Nothing]):
    """Sends `count` messages; after a restart all that were not acknowledged, as a broker does."""

    name = "broker"

    def __init__(self, acked: Path, journal: Path, count: int = ROWS) -> None:
        super().__init__(Nothing())
        self.acked, self.journal, self.count = acked, journal, count

    def start_streaming(self, sender: Sender) -> None:
        for number in sorted(set(range(self.count)) - set(written(self.acked))):
            acked = threading.Event()
            sender.send(envelope(number, key=str(number)), lambda n=number, event=acked: self._ack(n, event))
            if number % 5 == 4:
                acked.wait(10)
        sender.wait(3600)

    def _ack(self, number: int, event: threading.Event) -> None:
        assert number in journaled(self.journal), "acknowledged before it was durable"
        write(self.acked, number)
        event.set()


class Pushes(StreamingSource[Nothing]):
    """Runs a script: one callable per call of start_streaming, the last one again and again."""

    name = "pushes"

    def __init__(self, *script: Callable[[Sender], object]) -> None:
        super().__init__(Nothing())
        self.script = list(script)
        self.runs = 0

    def start_streaming(self, sender: Sender) -> None:
        self.runs += 1
        (self.script.pop(0) if len(self.script) > 1 else self.script[0])(sender)


def fast(**options: Any) -> Processing:
    return Processing(**{"poll_interval_ms": 1, "retry_backoff_ms": 1, "max_backoff_ms": 2, "linger_ms": 1, **options})


@pytest.fixture
def ingest(tmp_path: Path) -> Iterator[Callable[..., Ingest]]:
    made: list[Ingest] = []

    def make(source: Any, processing: Processing | None = None, **options: Any) -> Ingest:
        made.append(Ingest("test", source, tmp_path / "journal", processing or fast(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def broken(sender: Sender) -> None:
    raise RetryableError("the connection broke", code="PEN-2001")


def waits(sender: Sender) -> None:
    sender.wait(3600)


# killed at every step


def run_log(directory: Path, point: str | None) -> None:
    failpoints.arm(point)
    ingest = Ingest("log", Log(told=directory / "told", journal=directory / "j"), directory / "j", fast(linger_ms=0))
    ingest.start()
    until(lambda: ROWS in written(directory / "told") or ingest.failure)
    ingest.close()
    os._exit(1 if ingest.failure else 0)


def run_broker(directory: Path, point: str | None) -> None:
    failpoints.arm(point)
    ingest = Ingest("broker", Broker(directory / "told", directory / "j"), directory / "j", fast(linger_ms=0))
    ingest.start()
    until(lambda: len(set(written(directory / "told"))) == ROWS or ingest.failure)
    ingest.close()
    os._exit(1 if ingest.failure else 0)


@pytest.mark.parametrize("run", [run_log, run_broker])
@pytest.mark.parametrize("point", ["journal.data", "journal.index", "journal.told"])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_kill_at_any_step_loses_nothing_and_doubles_nothing(
    tmp_path: Path, run: Callable[[Path, str | None], None], point: str, passes: int
) -> None:
    child = processes.Process(target=run, args=(tmp_path, f"{point}=kill@{passes}"))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    told = written(tmp_path / "told")
    assert len(journaled(tmp_path / "j")) >= (max(told, default=0) if run is run_log else len(told))
    child = processes.Process(target=run, args=(tmp_path, None))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert journaled(tmp_path / "j") == list(range(ROWS))


def test_random_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    for seed in range(4):
        child = processes.Process(target=run_broker, args=(tmp_path, None))
        child.start()
        child.join(random.Random(seed).uniform(0, 0.05))
        child.kill()
        child.join()
    child = processes.Process(target=run_broker, args=(tmp_path, None))
    child.start()
    child.join(30)
    assert sorted(journaled(tmp_path / "j")) == list(range(ROWS))


# polling


def test_a_polling_source_is_restored_before_its_first_poll_and_told_in_order(tmp_path: Path, ingest: Any) -> None:
    first = Log(count=6)
    one = ingest(first)
    one.start()
    until(lambda: "commit 6" in first.calls)
    one.close()
    assert first.calls[:4] == ["open", "poll", "commit 3", "poll"]
    second = Log(count=9)
    one = ingest(second)
    one.start()
    until(lambda: "commit 9" in second.calls)
    one.close()
    assert second.calls[:4] == ["open", "restore 6", "commit 6", "poll"]
    assert journaled(tmp_path / "journal") == list(range(9))


def test_full_polls_are_journaled_while_the_next_one_is_read(
    tmp_path: Path, ingest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Log(count=50_000, step=1000)
    one = ingest(source, fast(max_batch_records=1000))
    one.open()
    disk, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (disk.wait(10), fsync(descriptor))[1])
    one.start()
    until(lambda: source.calls.count("poll") > 2)
    assert not any(call.startswith("commit") for call in source.calls)
    disk.set()
    until(lambda: one.line.idle.is_set())
    commits = [int(call.split()[1]) for call in source.calls if call.startswith("commit")]
    assert commits == list(range(1000, 50_001, 1000))
    assert journaled(tmp_path / "journal") == list(range(50_000))


def test_a_signal_is_read_at_once_however_long_the_poll_interval_is(tmp_path: Path, ingest: Any) -> None:
    class Signalled(Log):
        ready = threading.Event()

        def data_ready_notify(self) -> threading.Event:
            return self.ready

    source = Signalled(count=0)
    one = ingest(source, fast(poll_interval_ms=60_000))
    one.start()
    until(lambda: one.line.idle.is_set())
    polls = source.calls.count("poll")
    one.ready.clear()
    source.count = 1
    source.ready.set()
    assert one.ready.wait(2)
    until(lambda: "commit 1" in source.calls, 2)
    assert journaled(tmp_path / "journal") == [0]
    until(lambda: one.line.idle.is_set())
    assert source.calls.count("poll") == polls + 2
    began = time.monotonic()
    assert one.stop()
    assert time.monotonic() - began < 2


def test_an_idle_source_costs_next_to_no_processor_time(ingest: Any) -> None:
    class Signalled(Log):
        ready = threading.Event()

        def data_ready_notify(self) -> threading.Event:
            return self.ready

    others = set(threading.enumerate())  # of earlier tests and of pytest's own: what they take is not the source's
    one = ingest(Signalled(count=5))
    one.start()
    until(lambda: one.line.idle.is_set())
    clocks = [time.pthread_getcpuclockid(each.ident or 0) for each in set(threading.enumerate()) - others]
    assert clocks
    before = [time.clock_gettime(each) for each in clocks]
    threading.Event().wait(1)
    assert sum(map(time.clock_gettime, clocks)) - sum(before) < 0.02


def test_a_callback_client_serves_a_polling_source_through_a_bridge(tmp_path: Path, ingest: Any) -> None:
    class Bridged(Log):
        bridge = BufferedBridge(capacity=10)

        def data_ready_notify(self) -> threading.Event:
            return self.bridge.ready

        def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
            return self.bridge.take(4)

    source = Bridged()
    one = ingest(source, fast(poll_interval_ms=60_000))
    one.start()
    client = threading.Thread(target=lambda: [source.bridge.put(envelope(n)) for n in range(100)])
    client.start()
    client.join(10)
    until(lambda: one.journal.tail == 100)
    assert journaled(tmp_path / "journal") == list(range(100))


def test_a_passing_failure_degrades_backs_off_and_goes_on(tmp_path: Path, ingest: Any) -> None:
    states: list[HealthStatus] = []
    source = Log(count=4)
    source.fails = [RetryableError("timed out", code="PEN-2003"), RetryableError("rate limited", code="PEN-2002")]
    one = ingest(source, on_state=lambda name, status: states.append(status))
    one.start()
    until(lambda: one.line.idle.is_set())
    assert one.counts.retries == 2
    assert [s.state for s in states if s.state is not HealthState.UNKNOWN] == ["degraded", "degraded", "healthy"]
    assert "timed out" in states[0].reason
    assert one.health() == HealthStatus.healthy()
    assert journaled(tmp_path / "journal") == list(range(4))


def test_rows_are_kept_while_their_checkpoint_or_commit_is_retried(tmp_path: Path, ingest: Any) -> None:
    class Shaky(Log):
        shakes = 0

        def _shake(self) -> None:
            self.shakes += 1
            if self.shakes % 2:
                raise RetryableError("not now")

        def checkpoint(self) -> SourceCheckpoint:
            self._shake()
            return super().checkpoint()

        def commit(self, offsets: Mapping[str, Json]) -> None:
            self._shake()
            super().commit(offsets)

    source = Shaky(count=6)
    one = ingest(source)
    one.start()
    until(lambda: "commit 6" in source.calls)
    assert [call for call in source.calls if call.startswith("commit")] == ["commit 3", "commit 6"]
    assert journaled(tmp_path / "journal") == list(range(6))


def test_too_many_failures_in_a_row_stop_the_pipeline(ingest: Any) -> None:
    source = Log()
    source.fails = [RetryableError("timed out", code="PEN-2003", hint="look at the firewall") for _ in range(9)]
    one = ingest(source, fast(max_retries=3))
    one.start()
    assert one.ready.wait(10)
    until(lambda: one.failure)
    assert one.failure.code == "PEN-5013"
    assert "look at the firewall" in str(one.failure)
    assert source.calls.count("poll") == 4
    assert one.health().state is HealthState.UNHEALTHY


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RetryableError("no route to host"), "PEN-5001"),
        (ConfigError("no such topic"), "PEN-1000"),
        (FatalError("no"), "PEN-5000"),
    ],
)
def test_the_first_open_is_not_retried(ingest: Any, raised: Exception, code: str) -> None:
    class Unreachable(Log):
        def open(self, context: SourceContext = SourceContext()) -> None:
            super().open(context)
            raise raised

    one = ingest(source := Unreachable())
    with pytest.raises((FatalError, ConfigError), match=code):
        one.start()
    assert source.calls == ["open"]


def test_an_invalid_checkpoint_stops_the_start(ingest: Any) -> None:
    one = ingest(Log(count=3))
    one.start()
    until(lambda: one.line.idle.is_set())
    one.close()

    class Picky(Log):
        def restore(self, checkpoint: SourceCheckpoint) -> None:
            raise FatalError("the log begins later", code="PEN-5011")

    with pytest.raises(FatalError, match="PEN-5011"):
        ingest(Picky()).start()


def test_bad_data_stops_or_is_skipped_by_policy(tmp_path: Path, ingest: Any) -> None:
    source = Log(count=3)
    source.fails = [DataError("not JSON")]
    one = ingest(source, fast(on_error="skip"))
    one.start()
    until(lambda: one.line.idle.is_set())
    assert one.counts.skipped == 1
    one.close()
    assert journaled(tmp_path / "journal") == [0, 1, 2]
    source = Log(count=3)
    source.fails = [DataError("not JSON")]
    one = ingest(source)
    one.start()
    until(lambda: one.failure)
    assert one.failure.code == "PEN-3000"


def test_a_bug_in_a_connector_stops_the_pipeline_with_a_code(ingest: Any) -> None:
    source = Log()
    source.fails = [KeyError("surprise")]
    one = ingest(source)
    one.start()
    until(lambda: one.failure)
    assert one.failure.code == "PEN-5012"
    assert isinstance(one.failure.__cause__, KeyError)


def test_a_source_held_back_by_a_full_journal_shows_it_and_stops_cleanly(tmp_path: Path, ingest: Any) -> None:
    source = Log(count=10_000)
    one = ingest(source, fast(journal_max_bytes=5000))
    one.start()
    until(lambda: one.health().state is HealthState.DEGRADED)
    assert "full" in one.health().reason
    end = one.range_source.latest(JournalPosition(), ReadLimit())
    one.range_source.ack(end)
    until(lambda: one.journal.tail > end.row)
    until(lambda: one.journal.full)
    assert one.stop()
    assert one.failure is None
    tail = one.journal.tail
    one.close()
    assert [call for call in source.calls if call.startswith("commit")][-1] == f"commit {tail}"


def test_stopping_makes_durable_what_was_accepted_and_starts_no_poll(tmp_path: Path, ingest: Any) -> None:
    source = Log(count=1_000_000)
    one = ingest(source, fast(max_batch_records=3, linger_ms=50))
    one.start()
    until(lambda: source.at > 300)
    assert one.stop()
    told = [int(call.split()[1]) for call in source.calls if call.startswith("commit")][-1]
    assert told == one.journal.tail == one.journal.appended
    polls = source.calls.count("poll")
    one.close()
    assert source.calls.count("poll") == polls


# pushing


def test_a_broken_connection_is_called_again_and_a_healthy_run_resets_the_count(tmp_path: Path, ingest: Any) -> None:
    def sends_then_breaks(sender: Sender) -> None:
        sender.send(envelope(1))
        broken(sender)

    states: list[HealthStatus] = []
    source = Pushes(broken, broken, sends_then_breaks, broken, waits)
    one = ingest(source, fast(max_retries=2), on_state=lambda name, status: states.append(status))
    one.start()
    until(lambda: source.runs == 5)
    assert one.failure is None
    assert one.counts.retries == 4
    assert HealthStatus.degraded("PEN-2001 the connection broke") in states
    assert HealthStatus.healthy() in states
    assert one.health().state is HealthState.UNKNOWN  # it runs again and has said nothing yet
    assert one.stop()
    assert journaled(tmp_path / "journal") == [1]


def test_a_source_that_breaks_every_time_stops_the_pipeline(ingest: Any) -> None:
    one = ingest(Pushes(broken), fast(max_retries=3))
    one.start()
    until(lambda: one.failure)
    assert one.failure.code == "PEN-5013"
    assert one.source.runs == 4


def test_a_source_that_returns_early_is_called_again_and_the_state_says_why(ingest: Any) -> None:
    states: list[HealthStatus] = []
    one = ingest(Pushes(lambda sender: None), fast(max_retries=2), on_state=lambda name, status: states.append(status))
    one.start()
    until(lambda: one.source.runs > 5)
    assert one.failure is None
    assert "returned" in states[0].reason


def test_the_pause_doubles_up_to_its_cap(ingest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    one = ingest(Pushes(broken), fast(max_retries=6, retry_backoff_ms=1, max_backoff_ms=8))
    pauses: list[float] = []
    monkeypatch.setattr(one._stop, "wait", lambda seconds: pauses.append(seconds) or False)
    one.start()
    until(lambda: one.failure)
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.008, 0.008]


def test_senders_are_refused_after_the_stop_and_what_they_sent_is_durable(tmp_path: Path, ingest: Any) -> None:
    refused: list[RetryableError] = []
    told: list[int] = []

    def sends_on(sender: Sender) -> None:
        for n in range(1_000_000):
            try:
                sender.send(envelope(n), lambda n=n: told.append(n))
            except RetryableError as error:
                assert sender.stopped
                refused.append(error)
                raise

    one = ingest(Pushes(sends_on))
    one.start()
    until(lambda: len(told) > 100)
    assert one.stop()
    assert refused
    assert one.failure is None
    assert told == list(range(one.journal.tail))
    assert journaled(tmp_path / "journal") == told


def test_many_threads_may_send_and_batches_stay_whole(tmp_path: Path, ingest: Any) -> None:
    told = threading.Semaphore(0)

    def send_all(sender: Sender) -> None:
        def send(base: int) -> None:
            sender.send_batch([envelope(base * 10 + n) for n in range(10)], told.release)

        threads = [threading.Thread(target=send, args=(base,)) for base in range(20)]
        for thread in threads:
            thread.start()
        sender.wait(3600)

    one = ingest(Pushes(send_all))
    one.start()
    assert all(told.acquire(timeout=10) for _ in range(20))
    found = journaled(tmp_path / "journal")
    assert sorted(found) == list(range(200))
    assert all(found[at : at + 10] == list(range(found[at], found[at] + 10)) for at in range(0, 200, 10))


@pytest.mark.parametrize("reliable", [None, lambda stream: stream != "direct"], ids=["journal", "both"])
def test_an_offer_does_not_wait_and_nothing_of_a_refused_one_is_taken(
    tmp_path: Path, ingest: Any, reliable: Any
) -> None:
    taken: list[bool] = []

    def offers(sender: Sender) -> None:
        while len(taken) < 200:
            part = [envelope(len(taken)), SourceEnvelope(SourceRecord("direct" if reliable else "events", b"x" * 99))]
            taken.append(sender.offer(part))
        sender.wait(3600)

    one = ingest(Pushes(offers), fast(journal_max_bytes=2000), reliable=reliable)
    one.start()
    until(lambda: len(taken) == 200 or one.failure)
    one.line.flush()
    count = sum(taken)
    assert 0 < count < 200
    rows = one.journal.tail + (one.line.direct.tail if reliable else 0)
    assert rows == 2 * count
    assert one.failure is None


def test_a_lost_acknowledgement_does_not_stop_the_pipeline(tmp_path: Path, ingest: Any) -> None:
    def sends(sender: Sender) -> None:
        sender.send(envelope(1), lambda: broken(sender))
        sender.send(envelope(2))
        sender.wait(3600)

    one = ingest(Pushes(sends))
    one.start()
    until(lambda: one.journal.tail == 2)
    assert one.failure is None


def test_envelopes_that_cannot_be_stored_are_skipped_by_policy_and_still_acknowledged(
    tmp_path: Path, ingest: Any
) -> None:
    told = threading.Event()

    def sends(sender: Sender) -> None:
        sender.send_batch([envelope(1), SourceEnvelope(SourceRecord("\ud800", b"")), envelope(2)], told.set)
        sender.wait(3600)

    one = ingest(Pushes(sends), fast(on_error="skip"))
    one.start()
    assert told.wait(10)
    assert one.counts.skipped == 1
    assert journaled(tmp_path / "journal") == [1, 2]


def test_a_disk_that_refuses_stops_the_pipeline(ingest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def sends(sender: Sender) -> None:
        monkeypatch.setattr(os, "fsync", refuse)
        sender.send(envelope(1), lambda: pytest.fail("told, though it is not on disk"))
        sender.wait(3600)

    one = ingest(Pushes(sends))
    one.start()
    until(lambda: one.failure)
    assert one.failure.code == "PEN-5009"
    assert one.ready.is_set()
    monkeypatch.undo()


def test_a_manifest_ahead_of_the_journal_stops_the_start(ingest: Any) -> None:
    with pytest.raises(FatalError, match="PEN-5005"):
        ingest(Pushes(waits)).open(committed=JournalPosition(), planned=JournalPosition(row=5))


# bypassing


def test_unreliable_streams_bypass_the_journal_and_go_with_the_process(tmp_path: Path, ingest: Any) -> None:
    told: list[int] = []

    def sends(sender: Sender) -> None:
        sender.send_batch([envelope(1, "sure"), envelope(2, "fast")], lambda: told.append(1))
        sender.send(envelope(3, "fast"), lambda: told.append(2))
        sender.wait(3600)

    one = ingest(Pushes(sends), reliable=lambda stream: stream == "sure")
    one.start()
    until(lambda: len(told) == 2)
    ranges = one.range_source
    end = ranges.latest(ranges.initial(), ReadLimit())
    assert end == JournalPosition(row=1, direct=2)
    splits = ranges.split(ranges.initial(), end)
    assert sorted(b.stream for split in splits for b in ranges.read(split)) == ["fast", "sure"]
    one.close()
    again = ingest(Pushes(waits), reliable=lambda stream: stream == "sure")
    again.open(committed=JournalPosition(), planned=end)
    ranges = again.range_source
    assert [b.stream for split in splits for b in ranges.read(split)] == ["sure"]
    assert ranges.latest(end, ReadLimit()) == end


def test_the_checkpoint_of_bypassing_rows_waits_until_they_are_committed(ingest: Any) -> None:
    source = Log(count=6)
    one = ingest(source, reliable=lambda stream: False)
    one.start()
    until(lambda: one.line.idle.is_set())
    assert not any(call.startswith("commit") for call in source.calls)
    one.range_source.ack(JournalPosition(direct=3))
    until(lambda: "commit 3" in source.calls)
    one.close()
    again = Log(count=6)
    two = ingest(again, reliable=lambda stream: False)
    two.start()
    until(lambda: two.line.idle.is_set())
    assert again.calls[1] == "restore 3"


def test_a_source_that_cannot_replay_is_told_on_receipt(ingest: Any) -> None:
    class Gone(Log):
        supports_replay = False

    source = Gone(count=6)
    one = ingest(source, reliable=lambda stream: False)
    one.start()
    until(lambda: "commit 6" in source.calls)


# capture

ORDERS, USERS = SnapshotTable("public", "orders"), SnapshotTable("public", "users")


class Capture(ChangeCapture[Nothing]):
    """Plays `events`, each at its own position; the resume point is a file, as a slot would be."""

    name = "capture"

    def __init__(
        self, resume: Path, events: Sequence[ChangeEvent | Exception | None], rows: Sequence[Upsert] = ()
    ) -> None:
        super().__init__(Nothing())
        self.resume, self.events, self.rows = resume, events, rows
        self.snapshots = 0
        self.sink = AckSink(lambda position: write(self.resume, position))
        self.over = threading.Event()

    def tables(self) -> Sequence[SnapshotTable]:
        return [ORDERS, USERS]

    def schema(self) -> Schemas:
        columns = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
        return {ORDERS.stream: columns, USERS.stream: columns}

    def live(self) -> Iterator[Change | None]:
        start = max(written(self.resume), default=-1) + 1
        for position, event in list(enumerate(self.events))[start:]:
            if isinstance(event, Exception):
                self.events = [e for e in self.events if e is not event]
                raise event
            yield Change(event, self.sink.ack(position), position) if event is not None else None
        while not self.over.is_set():
            yield None
            self.over.wait(0.005)

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        self.snapshots += 1
        return (Change(row) for row in self.rows if row.table in tables)


def changes(directory: Path) -> list[dict[str, Any]]:
    source = JournalSource(JournalConfig(directory=directory))
    splits = source.split(source.initial(), source.latest(source.initial(), ReadLimit()))
    found = [
        {"stream": batch.stream, **row}
        for split in splits
        for batch in source.read(split)
        for row in batch.records.to_pylist()
    ]
    return sorted(found, key=lambda row: row["_position"])


def upsert(number: int, table: SnapshotTable = ORDERS, **options: Any) -> Upsert:
    return Upsert(table, {"id": number, "name": f"n{number}"}, **options)


def test_changes_become_rows_in_order_and_are_confirmed_after_the_fsync(tmp_path: Path, ingest: Any) -> None:
    events = [upsert(1), upsert(2, USERS), Upsert(ORDERS, {"id": 1}, old_key={"id": 7}), Delete(ORDERS, {"id": 1})]
    source = Capture(tmp_path / "slot", events)
    one = ingest(source)
    one.start()
    until(lambda: 3 in written(tmp_path / "slot"))
    found = changes(tmp_path / "journal")
    assert [(r["stream"], r["_op"], r["id"], r["name"]) for r in found] == [
        ("public.orders", "u", 1, "n1"),
        ("public.users", "u", 2, "n2"),
        ("public.orders", "u", 1, None),
        ("public.orders", "d", 1, None),
    ]
    assert [r["_unchanged"] for r in found] == [None, None, ["name"], None]
    assert found[2]["_old_key"] == '{"id":7}'
    assert len(list(one.range_source.schema())) == 2
    until(lambda: one.health() == HealthStatus.healthy())


def test_many_changes_share_few_records(tmp_path: Path, ingest: Any) -> None:
    source = Capture(tmp_path / "slot", [upsert(n) for n in range(5000)])
    one = ingest(source, fast(linger_ms=50))
    one.start()
    until(lambda: one.journal.tail == 5000)
    assert one.journal.counts()["journal_commits_total"] < 200
    assert [r["id"] for r in changes(tmp_path / "journal")] == list(range(5000))


def test_changes_that_come_again_after_a_lost_confirmation_are_dropped(tmp_path: Path, ingest: Any) -> None:
    slot = tmp_path / "slot"
    one = ingest(Capture(slot, [upsert(n) for n in range(5)]))
    one.start()
    until(lambda: 4 in written(slot))
    one.close()
    slot.write_text("1\n")
    one = ingest(Capture(slot, [upsert(n) for n in range(8)]))
    one.start()
    until(lambda: 7 in written(slot))
    found = changes(tmp_path / "journal")
    assert [r["id"] for r in found] == list(range(8))
    assert len({r["_position"] for r in found}) == 8


def test_changes_that_share_a_position_are_neither_lost_nor_doubled(tmp_path: Path, ingest: Any) -> None:
    class Transaction(Capture):
        def live(self) -> Iterator[Change | None]:
            yield from (Change(event, position=7) for event in self.events)
            while not self.over.is_set():
                yield None
                self.over.wait(0.005)

    for count in (2, 5):
        one = ingest(Transaction(tmp_path / "slot", [upsert(n) for n in range(count)]))
        one.start()
        until(lambda one=one, count=count: one.journal.tail == count)
        one.close()
    assert [r["id"] for r in changes(tmp_path / "journal")] == list(range(5))


def test_a_broken_capture_goes_on_from_its_resume_point(tmp_path: Path, ingest: Any) -> None:
    events = [upsert(0), upsert(1), RetryableError("gone away"), upsert(2)]
    one = ingest(Capture(tmp_path / "slot", events))
    one.start()
    until(lambda: one.journal.tail == 3)
    assert one.counts.retries == 1
    assert [r["id"] for r in changes(tmp_path / "journal")] == [0, 1, 2]


def test_unseeded_tables_are_copied_first_and_only_once(tmp_path: Path, ingest: Any) -> None:
    copy = [upsert(n) for n in range(10)] + [upsert(n, USERS) for n in range(5)]
    source = Capture(tmp_path / "slot", [upsert(100)], copy)
    one = ingest(source, unseeded=lambda: [ORDERS])
    one.start()
    until(lambda: one.journal.tail == 11)
    one.close()
    found = changes(tmp_path / "journal")
    assert [(r["_op"], r["id"]) for r in found] == [("r", n) for n in range(10)] + [("u", 100)]
    assert one.feeder.seeded() == {"public.orders": 10}

    again = Capture(tmp_path / "slot", [upsert(100), upsert(101)], copy)
    one = ingest(again, unseeded=lambda: [ORDERS])
    one.open(committed=JournalPosition(row=4))
    one.start()
    until(lambda: one.journal.tail == 12)
    one.close()
    assert again.snapshots == 0

    lost = Capture(tmp_path / "slot", [upsert(100), upsert(101)], copy)
    one = ingest(lost, unseeded=lambda: [ORDERS])
    one.open(committed=JournalPosition(row=12))
    one.start()
    until(lambda: one.journal.tail == 23)
    assert lost.snapshots == 1
    assert [r["_op"] for r in changes(tmp_path / "journal")[12:]] == ["t"] + ["r"] * 10


def test_a_copy_that_was_cut_short_is_cleared_before_it_is_made_again(tmp_path: Path, ingest: Any) -> None:
    class Short(Capture):
        def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
            yield from list(super().snapshot(tables))[:3]
            if self.snapshots == 1:
                raise RetryableError("gone away")

    one = ingest(Short(tmp_path / "slot", [], [upsert(n) for n in range(3)]), unseeded=lambda: [ORDERS, USERS])
    one.start()
    until(lambda: len(one.feeder.seeded()) == 2)
    found = changes(tmp_path / "journal")
    assert [(r["_op"], r["id"]) for r in found] == [
        *(("r", n) for n in range(3)),
        ("t", None),
        *(("r", n) for n in range(3)),
    ]


def test_a_copy_that_no_epoch_has_yet_is_not_made_again(tmp_path: Path, ingest: Any) -> None:
    for _ in range(2):
        source = Capture(tmp_path / "slot", [upsert(1)])
        one = ingest(source, unseeded=lambda: [ORDERS])
        one.start()
        until(lambda one=one: one.journal.tail == 1 and one.feeder.seeded())
        one.close()
    assert source.snapshots == 0


def test_a_capture_is_told_what_the_journal_holds(tmp_path: Path, ingest: Any) -> None:
    class Placed(Capture):
        restored: Any = None

        def restore(self, position: Any, copies: Any) -> None:
            self.restored = (position, copies)

        def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
            return (Change(row, position={"row": row.row["id"]}) for row in self.rows)

    source = Placed(tmp_path / "slot", [upsert(1), upsert(2)], [upsert(7), upsert(8)])
    one = ingest(source, unseeded=lambda: [ORDERS])
    one.start()
    until(lambda: 1 in written(tmp_path / "slot"))
    one.close()
    assert source.restored is None
    source = Placed(tmp_path / "slot", [], ())
    one = ingest(source)
    one.start()
    assert source.restored == (1, {"public.orders": {"row": 8}})


def test_a_table_that_changes_its_shape_between_two_changes_keeps_both(tmp_path: Path, ingest: Any) -> None:
    class Reshaped(Capture):
        shape = pa.schema([("id", pa.int64())])

        def schema(self) -> Schemas:
            return {ORDERS.stream: self.shape}

        def live(self) -> Iterator[Change | None]:
            yield Change(Upsert(ORDERS, {"id": 1}), position=0)
            yield None
            self.shape = pa.schema([("id", pa.string())])
            yield Change(Upsert(ORDERS, {"id": "two"}), position=1)
            yield from super().live()

    one = ingest(Reshaped(tmp_path / "slot", []))
    one.start()
    until(lambda: one.journal.tail == 2)
    assert [r["id"] for r in changes(tmp_path / "journal")] == [1, "two"]


def test_a_value_that_does_not_fit_its_column_stops_the_pipeline(tmp_path: Path, ingest: Any) -> None:
    one = ingest(Capture(tmp_path / "slot", [Upsert(ORDERS, {"id": "one", "name": ""})]))
    one.start()
    until(lambda: one.failure)
    assert one.failure.code == "PEN-3001"
    assert "public.orders.id" in str(one.failure)
    assert not written(tmp_path / "slot")


# the contracts these rely on


def test_a_bridge_blocks_when_full_and_wakes_on_close() -> None:
    bridge = BufferedBridge(capacity=2)
    assert bridge.put(envelope(1))
    assert bridge.put(envelope(2))
    assert bridge.ready.is_set()
    assert not bridge.put(envelope(3), timeout_secs=0.01)
    answers: list[bool] = []
    blocked = threading.Thread(target=lambda: answers.append(bridge.put(envelope(3))))
    blocked.start()
    taken = bridge.take(1)
    assert taken == [envelope(1)] or [e.record.payload for e in taken or ()] == [b"1"]
    blocked.join(10)
    assert answers == [True]
    blocked = threading.Thread(target=lambda: answers.append(bridge.put(envelope(4))))
    blocked.start()
    bridge.close()
    blocked.join(10)
    assert answers == [True, False]
    bridge.ready.clear()
    assert [e.record.payload for e in bridge.take(1) or ()] == [b"2"]
    assert bridge.ready.is_set()
    assert [e.record.payload for e in bridge.take(9) or ()] == [b"3"]
    assert bridge.take(9) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_resume_point_moves_over_a_contiguous_run_only(seed: int) -> None:
    moved: list[int] = []
    sink = AckSink(moved.append)
    acks = [sink.ack(n) for n in range(50)]
    order = random.Random(seed).sample(range(50), 50)
    confirmed: set[int] = set()
    for number in order:
        acks[number].confirm()
        confirmed.add(number)
        run = next(n for n in range(51) if n not in confirmed)
        assert (moved[-1] if moved else -1) == run - 1
    acks[3].confirm()
    assert moved == sorted(set(moved))
    assert moved[-1] == 49


def test_a_dropped_ack_holds_the_resume_point() -> None:
    moved: list[int] = []
    sink = AckSink(moved.append)
    acks = [sink.ack(n) for n in range(3)]
    acks[0].confirm()
    acks[2].confirm()
    assert moved == [0]


def test_acks_may_be_confirmed_from_many_threads() -> None:
    moved: list[int] = []
    sink = AckSink(moved.append)
    acks = [sink.ack(n) for n in range(400)]
    threads = [threading.Thread(target=lambda part=part: [ack.confirm() for ack in acks[part::8]]) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moved == sorted(moved)
    assert moved[-1] == 399


def test_batches_of_a_polling_source_keep_their_schema(tmp_path: Path, ingest: Any) -> None:
    class Arrow(Log):
        def poll_batch(self, max_records: int) -> SourceBatch | None:  # type: ignore[override]
            if self.at:
                return None
            self.at = 3
            return SourceBatch(pa.record_batch({"x": [1, 2, 3]}), stream="t")

    one = ingest(Arrow())
    one.start()
    until(lambda: one.line.idle.is_set())
    assert one.range_source.schema() == {"t": pa.schema([("x", pa.int64())])}
