"""Laws of range sources."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from penstock.durable import canonical
from penstock.source import (
    Note,
    Position,
    RangeSource,
    ReadLimit,
    SourceBatch,
)
from penstock.testing.processes import elsewhere, wait_until
from penstock.testing.sources.steps import Comparing, Rows, expected_rows, joined, kind, opened_source

LIMITS = (1, 3, 10, 100)
"""Rows per epoch by which the contract cuts a source into ranges."""


class RangeLaws(Comparing):
    """Ranges neither skip nor overlap, and hold the same rows each time."""

    max_cuts = 50
    """Of a source that has more, only the first so many ranges are looked at."""

    @kind(RangeSource)
    def test_positions_survive_json(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            for position in self._cuts(opened, 3):
                assert isinstance(position, source.position_type)
                assert _through_json(source, position) == position

    @kind(RangeSource)
    def test_rows_are_of_the_schema_that_it_gives(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            cuts, schemas = self._cuts(opened, 100), opened.schema()
            for batch in _batches(opened, cuts[0], cuts[-1]):
                assert batch.stream in schemas, f"rows come from {batch.stream!r}, and schema() does not know it"
                found, given = batch.records.schema, schemas[batch.stream]
                assert found.equals(given), f"rows of {batch.stream!r} are\n{found}\nand schema() says\n{given}"

    @kind(RangeSource)
    def test_the_end_stays_where_it_is_while_nothing_new_comes(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            start = opened.initial()
            assert opened.initial() == start, "initial() moves"
            for limit in (ReadLimit(rows=3), ReadLimit(rows=1000, parallelism=4)):
                assert opened.latest(start, limit) == opened.latest(start, limit), (
                    "latest() moves, and nothing new came"
                )
            end = self._cuts(opened, 100)[-1]
            if opened.latest(end, ReadLimit()) == end:
                assert opened.split(end, end) in ([], (), range(0)) or not list(opened.split(end, end))

    @kind(RangeSource)
    @pytest.mark.parametrize("limit", LIMITS)
    def test_a_range_holds_the_rows_of_the_ranges_it_is_cut_into(
        self, source: RangeSource[Any, Any], limit: int
    ) -> None:
        with opened_source(source) as opened:
            cuts = self._cuts(opened, limit)
            pieces = [_read(opened, a, b) for a, b in pairwise(cuts)]
            middle = len(cuts) // 2
            for a, c in {(0, len(cuts) - 1), (0, middle), (middle, len(cuts) - 1), (0, 2), (1, 3)}:
                if a < c < len(cuts):
                    self._same(
                        _read(opened, cuts[a], cuts[c]), joined(pieces[a:c]), f"range {a}–{c} and its {c - a} pieces"
                    )

    @kind(RangeSource)
    def test_all_there_is_can_be_one_range(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            cuts = self._cuts(opened, 10)
            if opened.latest(cuts[-1], ReadLimit(rows=10)) != cuts[-1]:
                pytest.skip(f"the source holds more than {self.max_cuts} ranges")
            whole = _read(opened, cuts[0], opened.latest(cuts[0], ReadLimit()))
            self._same(whole, _read(opened, cuts[0], cuts[-1]), "latest() without a limit and everything there is")

    @kind(RangeSource)
    def test_a_range_always_holds_the_same_rows(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened, opened_source(source) as another:
            cuts = self._cuts(opened, 10)
            first = _read(opened, cuts[0], cuts[-1])
            self._same(_read(opened, cuts[0], cuts[-1]), first, "a range and the same range again")
            self._same(_read(another, cuts[0], cuts[-1]), first, "a range and the same range in another copy")

    @kind(RangeSource)
    def test_splits_cover_a_range_exactly_in_any_order_and_process(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            cuts = self._cuts(opened, 10)
            for parallelism in (1, 4):
                opened.latest(cuts[0], ReadLimit(rows=10, parallelism=parallelism))
                splits = list(opened.split(cuts[0], cuts[-1]))
                backwards = elsewhere(_read_splits, source, splits[::-1])[::-1]
                self._same(joined(backwards), _read(opened, cuts[0], cuts[-1]), "splits read elsewhere and the range")

    @kind(RangeSource)
    def test_a_position_from_json_goes_on_exactly_in_a_new_process(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            cuts = self._cuts(opened, 10)
            first = _read(opened, cuts[0], cuts[1])
            whole = _read(opened, cuts[0], cuts[-1])
        rest = elsewhere(_read_on, source, canonical(cuts[1].model_dump(mode="json")), len(cuts) - 2, 10)
        self._same(joined([first, rest]), whole, "what two processes read one after the other, and the whole")

    @kind(RangeSource)
    def test_an_ack_may_repeat_and_may_be_old(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            cuts = self._cuts(opened, 10)
            pieces = [_read(opened, a, b) for a, b in pairwise(cuts)]
            middle = len(cuts) // 2
            for end in (cuts[middle], cuts[middle], cuts[0], cuts[middle]):
                opened.ack(end)
            self._same(_read(opened, cuts[middle], cuts[-1]), joined(pieces[middle:]), "what comes after an ack, twice")
        with opened_source(source) as another:
            another.ack(cuts[1])
            another.ack(cuts[-1])

    @kind(RangeSource)
    def test_nothing_is_planned_past_a_position_that_bounds_it(self, source: RangeSource[Any, Any]) -> None:
        with opened_source(source) as opened:
            cuts = self._cuts(opened, 3)
            for until in {1, len(cuts) // 2, len(cuts) - 1}:
                position, bound = cuts[0], cuts[until]
                for _ in cuts:
                    position = opened.latest(position, ReadLimit(rows=1000, until=bound))
                assert position == bound, f"bounded by {bound}, latest() comes to {position}"
                self._same(
                    _read(opened, cuts[0], position),
                    _read(opened, cuts[0], bound),
                    "a range up to a bound and the range",
                )
                assert opened.latest(bound, ReadLimit(until=bound)) == bound, "latest() goes on past its bound"

    @kind(RangeSource)
    def test_it_holds_the_rows_that_are_expected(self, source: RangeSource[Any, Any], expected: Any) -> None:
        if expected is None:
            pytest.skip("no fixture `expected`")
        with opened_source(source) as opened:
            found = _read(opened, opened.initial(), opened.latest(opened.initial(), ReadLimit()))
        self._same(found, expected_rows(expected, found), "what is read and what is expected", ordered=False)

    @kind(RangeSource)
    def test_rows_that_come_later_are_in_later_ranges_only(
        self, source: RangeSource[Any, Any], more: Callable[[], None] | None
    ) -> None:
        if more is None:
            pytest.skip("no fixture `more`")
        with opened_source(source) as opened:
            start = opened.initial()
            end = opened.latest(start, ReadLimit())
            before = _read(opened, start, end)
            more()
            self._same(_read(opened, start, end), before, "a range before and after more rows came")
            later = wait_until(lambda: _moved(opened, end), "latest() to move after more rows came")
            after = _read(opened, end, later)
            assert any(after.values()), "more rows came, and the next range is empty"
            self._same(_read(opened, start, later), joined([before, after]), "the whole and its two ranges")

    def _cuts(self, source: RangeSource[Any, Any], limit: int) -> list[Position]:
        """Ends of consecutive ranges of about `limit` rows, from the beginning."""
        cuts = [source.initial()]
        while len(cuts) <= self.max_cuts:
            end = source.latest(cuts[-1], ReadLimit(rows=limit))
            if end == cuts[-1]:
                break
            cuts.append(end)
        assert len(cuts) > 1, "the fixture `source` has nothing to read"
        return cuts


def _through_json(source: RangeSource[Any, Any], position: Position) -> Position:
    return source.position_type.model_validate(json.loads(canonical(position.model_dump(mode="json"))))


def _batches(source: RangeSource[Any, Any], start: Position, end: Position) -> Iterator[SourceBatch]:
    for split in source.split(start, end):
        for item in source.read(pickle.loads(pickle.dumps(split))):
            if not isinstance(item, Note):
                yield item


def _read(source: RangeSource[Any, Any], start: Position, end: Position) -> Rows:
    return _rows(_batches(source, start, end)) if start != end else {}


def _read_splits(source: RangeSource[Any, Any], splits: Sequence[Any]) -> list[Rows]:
    """The rows of each split, each read by a copy of its own; in another process."""
    found = []
    for split in splits:
        with opened_source(source) as opened:
            found.append(_rows(item for item in opened.read(split) if not isinstance(item, Note)))
    return found


def _read_on(source: RangeSource[Any, Any], start: str, ranges: int, limit: int) -> Rows:
    """The rows of so many further ranges; in another process."""
    pieces = []
    with opened_source(source) as opened:
        position = source.position_type.model_validate(json.loads(start))
        for _ in range(ranges):
            end = opened.latest(position, ReadLimit(rows=limit))
            pieces.append(_read(opened, position, end))
            position = end
    return joined(pieces)


def _rows(batches: Iterator[SourceBatch]) -> Rows:
    found: Rows = defaultdict(list)
    for batch in batches:
        found[batch.stream] += batch.records.to_pylist()
    return dict(found)


def _moved(source: RangeSource[Any, Any], start: Position) -> Position | None:
    end = source.latest(start, ReadLimit())
    return end if end != start else None
