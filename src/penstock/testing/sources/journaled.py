"""Laws of sources that are polled or push."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.durable import canonical
from penstock.errors import ConnectorError
from penstock.source import (
    ENVELOPE_SCHEMA,
    PollingSource,
    SourceBatch,
    SourceCheckpoint,
    SourceEnvelope,
    StreamingSource,
)
from penstock.testing.processes import wait_until
from penstock.testing.sources.steps import Comparing, Rows, expected_rows, joined, kind, opened_source

STOP_SECS = 10.0
"""Within this time a streaming source returns after it was stopped."""


class RecordingSender:
    """A sender that keeps what it is sent, and calls back when the test says that it is on disk."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.failed: BaseException | None = None
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def count(self) -> int:
        with self._lock:
            return sum(map(len, self.rows.values()))

    @property
    def full(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        return self._stopped.wait(seconds)

    def send(self, item: SourceEnvelope | SourceBatch, on_durable: Callable[[], None] | None = None) -> None:
        self._keep([item], on_durable)

    def send_batch(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> None:
        self._keep(envelopes, on_durable)

    def offer(
        self, items: SourceBatch | Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None
    ) -> bool:
        self._keep([items] if isinstance(items, SourceBatch) else items, on_durable)
        return True

    def make_durable(self) -> None:
        """Call back for everything that was sent, in order."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    @contextlib.contextmanager
    def streaming(self, source: StreamingSource[Any]) -> Iterator[None]:
        """Run the source until the block ends; then it must return."""

        def run() -> None:
            try:
                source.start_streaming(self)
            except BaseException as error:  # noqa: BLE001 - raised again in the test
                self.failed = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(STOP_SECS)
        assert not thread.is_alive(), f"the source did not return within {STOP_SECS:.0f} s after it was stopped"
        if self.failed is not None:
            raise self.failed

    def _keep(self, items: Sequence[SourceEnvelope | SourceBatch], on_durable: Callable[[], None] | None) -> None:
        assert not self.stopped, "the source sends after it was stopped"
        with self._lock:
            for stream, rows in _polled(items).items():
                self.rows.setdefault(stream, []).extend(rows)
            if on_durable is not None:
                self._waiting.append(on_durable)


class JournaledLaws(Comparing):
    """Sources that are polled or push: checkpoints, commits, and what waits for the disk."""

    @kind(PollingSource)
    def test_polling_goes_on_exactly_from_every_checkpoint(self, source: PollingSource[Any], expected: Any) -> None:
        with opened_source(source) as opened:
            polls, checkpoints = _poll(opened, 3, expected)
        assert polls, "the fixture `source` has nothing to poll"
        whole = joined(polls)
        if expected is not None:
            self._same(whole, expected_rows(expected, whole), "what is polled and what is expected", ordered=False)
        for taken in {0, len(polls) // 2, len(polls) - 1}:
            stored = SourceCheckpoint.model_validate_json(canonical(checkpoints[taken].model_dump(mode="json")))
            assert stored == checkpoints[taken], "JSON does not bring the checkpoint back"
            with opened_source(source) as another:
                another.restore(stored)
                rest = _poll(another, 3, None, sum(map(len, joined(polls[taken + 1 :]).values())))[0]
            self._same(joined([*polls[: taken + 1], *rest]), whole, f"polling from checkpoint {taken} and in one go")

    @kind(PollingSource)
    def test_a_commit_may_repeat_and_nothing_is_told_before_it(
        self, source: PollingSource[Any], told: Callable[[], int] | None
    ) -> None:
        with opened_source(source) as opened:
            polls, checkpoints = _poll(opened, 3, None)
            assert polls, "the fixture `source` has nothing to poll"
            assert told is None or not told(), "records were acknowledged before anything was on disk"
            for checkpoint in (*checkpoints, checkpoints[-1]):
                opened.commit(checkpoint.offsets)
            if told is not None:
                wait_until(lambda: told() >= sum(map(len, joined(polls).values())), "the records to be acknowledged")

    @kind(PollingSource)
    def test_an_invalid_checkpoint_is_refused(
        self, source: PollingSource[Any], invalid_checkpoint: SourceCheckpoint
    ) -> None:
        with opened_source(source) as opened, pytest.raises(ConnectorError):
            opened.restore(invalid_checkpoint)

    @kind(StreamingSource)
    def test_streaming_sends_everything_waits_until_it_is_durable_and_stops(
        self,
        source: StreamingSource[Any],
        expected: Any,
        more: Callable[[], None] | None,
        told: Callable[[], int] | None,
    ) -> None:
        sender = RecordingSender()
        with opened_source(source) as opened, sender.streaming(opened):
            if more is not None:
                more()
            count = 1 if expected is None else sum(map(len, expected_rows(expected, {}).values()))
            wait_until(lambda: sender.count >= count or sender.failed, f"{count} records to be sent")
            assert told is None or not told(), "records were acknowledged before anything was on disk"
            sender.make_durable()
            if told is not None:
                wait_until(lambda: told() >= count, "the records to be acknowledged")
        if expected is not None:
            self._same(
                sender.rows, expected_rows(expected, sender.rows), "what was sent and what is expected", ordered=False
            )


def _poll(
    source: PollingSource[Any], limit: int, expected: Any, wanted: int | None = None
) -> tuple[list[Rows], list[SourceCheckpoint]]:
    """Poll until all that is expected has come, or so many records, or until there is nothing."""
    found: list[Rows] = []
    checkpoints: list[SourceCheckpoint] = []
    if expected is not None:
        wanted = sum(map(len, expected_rows(expected, {}).values()))

    def poll() -> bool:
        batch = source.poll_batch(limit)
        if batch is not None and (isinstance(batch, SourceBatch) or batch):  # else only its checkpoint moved
            found.append(_polled([batch] if isinstance(batch, SourceBatch) else batch))
            checkpoints.append(source.checkpoint())
        return batch is None if wanted is None else sum(map(len, joined(found).values())) >= wanted

    if wanted != 0:
        wait_until(poll, "the records that the source holds")
    return found, checkpoints


def _polled(items: Sequence[SourceEnvelope | SourceBatch]) -> Rows:
    found: Rows = defaultdict(list)
    for item in items:
        if isinstance(item, SourceBatch):
            is_messages = item.records.schema.equals(ENVELOPE_SCHEMA)
            found[item.stream] += (item.records.column("payload") if is_messages else item.records).to_pylist()
        else:
            found[item.record.stream].append(item.record.payload)
    return dict(found)
