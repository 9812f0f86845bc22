"""The laws that every capture keeps: what is confirmed is not sent again, and what is not, is."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.capture import Change, ChangeCapture, Upsert
from penstock.durable import canonical
from penstock.source import SourceContext
from penstock.testing.processes import PATIENCE_SECS
from penstock.testing.sources import EverySource

QUIET = 3
"""So many times in a row a capture says that it has nothing, until it is believed."""


class CaptureContract(EverySource):
    """
    The conformance tests of a `ChangeCapture`: subclass it and give it the fixtures `source` and `more`.

    `source` has something to capture from the first time that it is read, or `more` makes it appear.
    """

    @pytest.fixture
    def more(self) -> Callable[[], None] | None:
        """Makes some changes happen, at least four."""
        raise NotImplementedError("give the contract a fixture `more`")

    @pytest.fixture
    def again(self, source: ChangeCapture[Any], tmp_path: Path) -> Callable[[], Any]:
        """The capture as the next process has it: `with again() as opened`."""
        return lambda: _opened(source, tmp_path / "kit-state")

    @pytest.fixture
    def first(self, again: Callable[[], Any], more: Callable[[], None]) -> list[Any]:
        """Some changes that were read and not confirmed."""
        with again() as opened:
            _take(opened)  # its mechanism is set up now
        more()
        with again() as opened:
            found = _take(opened)
        assert len(found) >= 4, "let the fixture `more` make at least four changes"
        return [change.event for change in found]

    def test_its_changes_are_of_its_tables_and_fit_their_schemas(self, again: Any, first: Any) -> None:
        with again() as opened:
            for change in _take(opened):
                event = change.event
                assert event.table in opened.tables(), f"{event.table} is not among its tables"
                columns = opened.schema()[event.table.stream].names
                row = event.row if isinstance(event, Upsert) else event.key
                assert set(row) <= set(columns), f"{sorted(set(row) - set(columns))} are not in its schema"
                assert json.loads(canonical(change.position)) == change.position, "a position must survive JSON"

    def test_a_dropped_ack_is_unconfirmed(self, again: Any, first: Any) -> None:
        with again() as opened:
            _take(opened)
        with again() as opened:
            assert _events(opened) == first, "changes that nobody confirmed did not come again"

    def test_acks_count_in_any_order(self, again: Any, first: Any) -> None:
        with again() as opened:
            found = _take(opened)
            for change in random.Random(1).sample(found, len(found)):
                change.ack.confirm()
        with again() as opened:
            assert _events(opened) == [], "changes came again that were confirmed"

    def test_the_resume_point_does_not_move_over_a_gap(self, again: Any, first: Any) -> None:
        with again() as opened:
            for change in _take(opened)[1:]:
                change.ack.confirm()
        with again() as opened:
            assert _events(opened)[:1] == first[:1], "the first change was not confirmed, and did not come again"

    def test_it_goes_on_from_the_confirmed_point(self, again: Any, first: Any, more: Callable[[], None]) -> None:
        half = len(first) // 2
        with again() as opened:
            for change in _take(opened)[:half]:
                change.ack.confirm()
        with again() as opened:
            rest = _take(opened)
            assert [change.event for change in rest][half - len(first) :] == first[half:], (
                "an unconfirmed change is lost"
            )
            assert [change.event for change in rest] == first[len(first) - len(rest) :], "changes come in another order"
            for change in rest:
                change.ack.confirm()
        more()
        with again() as opened:
            assert _events(opened), "it did not go on"

    def test_what_the_journal_holds_is_not_taken_twice(self, again: Any, first: Any) -> None:
        with again() as opened:
            last = _take(opened)[len(first) // 2].position
        with again() as opened:
            opened.restore(json.loads(canonical(last)), {})
            found = [change.event for change in _take(opened) if not _is_repeat(change.position, last)]
            assert found == first[len(first) // 2 + 1 :], "after a position other changes come than before"

    def test_a_snapshot_moves_nothing(self, again: Any, first: Any) -> None:
        with again() as opened:
            tables = opened.tables()
            for change in opened.snapshot(tables):
                assert isinstance(change.event, Upsert), "a snapshot consists of upserts"
                assert change.event.table in tables, f"a snapshot of {change.event.table}, which was not asked for"
                change.ack.confirm()
        with again() as opened:
            assert _events(opened) == first, "a snapshot's acks moved the resume point"

    def test_one_that_was_read_goes_on_in_the_same_process(self, again: Any, first: Any) -> None:
        with again() as opened:
            for change in _take(opened)[: len(first) // 2]:
                change.ack.confirm()
            rest = _take(opened)
            assert [each.event for each in rest][len(first) // 2 - len(first) :] == first[len(first) // 2 :]
            for change in rest:
                change.ack.confirm()
            assert _events(opened) == [], "changes came again that were confirmed, some of them in an earlier live()"

    def test_asking_for_its_lag_disturbs_nothing(self, again: Any, first: Any) -> None:
        with again() as opened:
            found = []
            for change in _until_quiet(opened.live()):
                lag = opened.lag()
                assert lag is None or lag >= 0
                found.append(change.event)
            assert found == first, "a capture that is asked for its lag gives other changes"


@contextlib.contextmanager
def _opened(source: ChangeCapture[Any], state_dir: Path) -> Iterator[ChangeCapture[Any]]:
    copy = pickle.loads(pickle.dumps(source))
    copy.open(SourceContext(state_dir))
    try:
        yield copy
    finally:
        copy.close()


def _take(opened: ChangeCapture[Any]) -> list[Change]:
    live = opened.live()
    try:
        return list(_until_quiet(live))
    finally:
        getattr(live, "close", lambda: None)()


def _events(opened: ChangeCapture[Any]) -> list[Any]:
    return [change.event for change in _take(opened)]


def _until_quiet(live: Iterator[Change | None]) -> Iterator[Change]:
    """Its changes, until it has said a few times in a row that there are none."""
    quiet, give_up = 0, time.monotonic() + PATIENCE_SECS
    while quiet < QUIET:
        assert time.monotonic() < give_up, "a capture must yield None now and then while it has nothing"
        try:
            change = next(live)
        except StopIteration:
            raise AssertionError("live() ended: it must go on until it is closed") from None
        if change is None:
            quiet += 1
        else:
            quiet = 0
            yield change


def _is_repeat(position: Any, last: Any) -> bool:
    """As the runtime tells: only numbers and lists of them have an order that can be relied on."""
    numbers: Sequence[Any] = position if isinstance(position, list) else [position]
    return all(isinstance(each, int) for each in numbers) and bool(position <= last)
