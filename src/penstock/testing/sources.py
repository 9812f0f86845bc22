"""The laws that every source keeps: ranges that neither skip nor overlap, positions that bring one back exactly."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from penstock.durable import canonical
from penstock.errors import ConfigError, ConnectorError, FatalError
from penstock.source import (
    ConnectorMetrics,
    HealthStatus,
    Note,
    PollingSource,
    Position,
    RangeSource,
    ReadLimit,
    SourceBatch,
    SourceCheckpoint,
    SourceConnector,
    SourceEnvelope,
    StreamingSource,
)
from penstock.testing.crash import as_rows, elsewhere, wait_until

Rows = dict[str, list[Any]]
"""The rows of each stream, in order: a dict per row, or a tuple of stream, key and payload per envelope."""

STOP_SECS = 10.0
"""Within this time a streaming source returns after it was stopped."""

LIMITS = (1, 3, 10, 100)
"""Rows per epoch by which the contract cuts a source into ranges."""


def kind(wanted: type[SourceConnector[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test only for sources of that kind."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.kind = wanted  # type: ignore[attr-defined]
        return test

    return mark


class SourceContract:
    """
    The conformance tests of a source of any kind: subclass it and give it the fixture `source`.

    More fixtures make more tests: `expected`, `more`, `told`, `wrong`.
    """

    ordered = True
    """True when the rows of a stream have one order, however they are cut into ranges and splits."""

    max_cuts = 50
    """Of a source that has more, only the first so many ranges are looked at."""

    @pytest.fixture
    def source(self) -> SourceConnector[Any]:
        """A source that is not open, with some rows to read."""
        raise NotImplementedError("give the contract a fixture `source`")

    @pytest.fixture
    def expected(self) -> Any:
        """The rows it holds: a table or a list of dicts, per stream if there are several; payloads of a message source."""
        return None

    @pytest.fixture
    def more(self) -> Callable[[], None] | None:
        """Makes more rows appear."""
        return None

    @pytest.fixture
    def told(self) -> Callable[[], int] | None:
        """How many records the outside system knows to be safe."""
        return None

    @pytest.fixture
    def wrong(self) -> SourceConnector[Any] | None:
        """A source whose settings are wrong in a way that shows when it is opened."""
        return None

    @pytest.fixture
    def invalid_checkpoint(self) -> SourceCheckpoint:
        """A checkpoint that `restore` must refuse."""
        return SourceCheckpoint(offsets={"\0": "\0"}, metadata={"\0": "\0"})

    @pytest.fixture(autouse=True)
    def _only_its_kind(self, request: pytest.FixtureRequest, source: SourceConnector[Any]) -> None:
        wanted = getattr(request.function, "kind", SourceConnector)
        if not isinstance(source, wanted):
            pytest.skip(f"not a {wanted.__name__}")

    # -- every source --------------------------------------------------------------------------------------------

    def test_it_is_a_picklable_value_until_it_is_opened(self, source: SourceConnector[Any]) -> None:
        copy = pickle.loads(pickle.dumps(source))
        assert copy.config == source.config, "the copy has another config"

    def test_opening_and_closing_may_repeat(self, source: SourceConnector[Any]) -> None:
        source.close()
        for _ in range(2):
            source.open()
            source.close()
            source.close()

    def test_an_unknown_option_is_refused(self, source: SourceConnector[Any]) -> None:
        with pytest.raises(ValidationError):
            type(source.config).model_validate({**dict(source.config), "no_such_option": 1})

    def test_a_wrong_setting_is_a_config_error(self, wrong: SourceConnector[Any] | None) -> None:
        if wrong is None:
            pytest.skip("no fixture `wrong`")
        with pytest.raises((ConfigError, FatalError)):
            wrong.open()
        wrong.close()

    def test_it_answers_what_the_runtime_asks_of_it(self, source: SourceConnector[Any]) -> None:
        with _open(source) as opened:
            assert isinstance(opened.health_check(), HealthStatus)
            assert isinstance(opened.metrics(), ConnectorMetrics)
            assert opened.lag() is None or isinstance(opened.lag(), int)
            assert all(finding.what for finding in opened.check())
            assert all(config.topic for config in opened.producer_configs())
            for event in (opened.data_ready_notify(), opened.checkpoint_requested()):
                assert event is None or isinstance(event, threading.Event)

    # -- ranges --------------------------------------------------------------------------------------------------

    @kind(RangeSource)
    def test_positions_survive_json(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
            for position in self._cuts(opened, 3):
                assert isinstance(position, source.position_type)
                assert _through_json(source, position) == position

    @kind(RangeSource)
    def test_rows_are_of_the_schema_that_it_gives(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
            cuts, schemas = self._cuts(opened, 100), opened.schema()
            for batch in _batches(opened, cuts[0], cuts[-1]):
                assert batch.stream in schemas, f"rows come from {batch.stream!r}, and schema() does not know it"
                found, given = batch.records.schema, schemas[batch.stream]
                assert found.equals(given), f"rows of {batch.stream!r} are\n{found}\nand schema() says\n{given}"

    @kind(RangeSource)
    def test_the_end_stays_where_it_is_while_nothing_new_comes(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
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
        with _open(source) as opened:
            cuts = self._cuts(opened, limit)
            pieces = [_read(opened, a, b) for a, b in pairwise(cuts)]
            middle = len(cuts) // 2
            for a, c in {(0, len(cuts) - 1), (0, middle), (middle, len(cuts) - 1), (0, 2), (1, 3)}:
                if a < c < len(cuts):
                    self._same(
                        _read(opened, cuts[a], cuts[c]), _joined(pieces[a:c]), f"range {a}–{c} and its {c - a} pieces"
                    )

    @kind(RangeSource)
    def test_all_there_is_can_be_one_range(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
            cuts = self._cuts(opened, 10)
            if opened.latest(cuts[-1], ReadLimit(rows=10)) != cuts[-1]:
                pytest.skip(f"the source holds more than {self.max_cuts} ranges")
            whole = _read(opened, cuts[0], opened.latest(cuts[0], ReadLimit()))
            self._same(whole, _read(opened, cuts[0], cuts[-1]), "latest() without a limit and everything there is")

    @kind(RangeSource)
    def test_a_range_always_holds_the_same_rows(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened, _open(source) as another:
            cuts = self._cuts(opened, 10)
            first = _read(opened, cuts[0], cuts[-1])
            self._same(_read(opened, cuts[0], cuts[-1]), first, "a range and the same range again")
            self._same(_read(another, cuts[0], cuts[-1]), first, "a range and the same range in another copy")

    @kind(RangeSource)
    def test_splits_cover_a_range_exactly_in_any_order_and_process(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
            cuts = self._cuts(opened, 10)
            for parallelism in (1, 4):
                opened.latest(cuts[0], ReadLimit(rows=10, parallelism=parallelism))
                splits = list(opened.split(cuts[0], cuts[-1]))
                backwards = elsewhere(_read_splits, source, splits[::-1])[::-1]
                self._same(_joined(backwards), _read(opened, cuts[0], cuts[-1]), "splits read elsewhere and the range")

    @kind(RangeSource)
    def test_a_position_from_json_goes_on_exactly_in_a_new_process(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
            cuts = self._cuts(opened, 10)
            first = _read(opened, cuts[0], cuts[1])
            whole = _read(opened, cuts[0], cuts[-1])
        rest = elsewhere(_read_on, source, canonical(cuts[1].model_dump(mode="json")), len(cuts) - 2, 10)
        self._same(_joined([first, rest]), whole, "what two processes read one after the other, and the whole")

    @kind(RangeSource)
    def test_an_ack_may_repeat_and_may_be_old(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
            cuts = self._cuts(opened, 10)
            pieces = [_read(opened, a, b) for a, b in pairwise(cuts)]
            middle = len(cuts) // 2
            for end in (cuts[middle], cuts[middle], cuts[0], cuts[middle]):
                opened.ack(end)
            self._same(
                _read(opened, cuts[middle], cuts[-1]), _joined(pieces[middle:]), "what comes after an ack, twice"
            )
        with _open(source) as another:
            another.ack(cuts[1])
            another.ack(cuts[-1])

    @kind(RangeSource)
    def test_nothing_is_planned_past_a_position_that_bounds_it(self, source: RangeSource[Any, Any]) -> None:
        with _open(source) as opened:
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
        with _open(source) as opened:
            found = _read(opened, opened.initial(), opened.latest(opened.initial(), ReadLimit()))
        self._same(found, _expected(expected, found), "what is read and what is expected", ordered=False)

    @kind(RangeSource)
    def test_rows_that_come_later_are_in_later_ranges_only(
        self, source: RangeSource[Any, Any], more: Callable[[], None] | None
    ) -> None:
        if more is None:
            pytest.skip("no fixture `more`")
        with _open(source) as opened:
            start = opened.initial()
            end = opened.latest(start, ReadLimit())
            before = _read(opened, start, end)
            more()
            self._same(_read(opened, start, end), before, "a range before and after more rows came")
            later = wait_until(lambda: _moved(opened, end), "latest() to move after more rows came")
            after = _read(opened, end, later)
            assert any(after.values()), "more rows came, and the next range is empty"
            self._same(_read(opened, start, later), _joined([before, after]), "the whole and its two ranges")

    # -- polling -------------------------------------------------------------------------------------------------

    @kind(PollingSource)
    def test_polling_goes_on_exactly_from_every_checkpoint(self, source: PollingSource[Any], expected: Any) -> None:
        with _open(source) as opened:
            polls, checkpoints = _poll(opened, 3, expected)
        assert polls, "the fixture `source` has nothing to poll"
        whole = _joined(polls)
        if expected is not None:
            self._same(whole, _expected(expected, whole), "what is polled and what is expected", ordered=False)
        for taken in {0, len(polls) // 2, len(polls) - 1}:
            stored = SourceCheckpoint.model_validate_json(canonical(checkpoints[taken].model_dump(mode="json")))
            assert stored == checkpoints[taken], "JSON does not bring the checkpoint back"
            with _open(source) as another:
                another.restore(stored)
                rest = _poll(another, 3, None, len(polls) - taken - 1)[0]
            self._same(_joined([*polls[: taken + 1], *rest]), whole, f"polling from checkpoint {taken} and in one go")

    @kind(PollingSource)
    def test_a_commit_may_repeat_and_nothing_is_told_before_it(
        self, source: PollingSource[Any], told: Callable[[], int] | None
    ) -> None:
        with _open(source) as opened:
            polls, checkpoints = _poll(opened, 3, None)
            assert polls, "the fixture `source` has nothing to poll"
            assert told is None or not told(), "records were acknowledged before anything was on disk"
            for checkpoint in (*checkpoints, checkpoints[-1]):
                opened.commit(checkpoint.offsets)
            if told is not None:
                wait_until(lambda: told() >= sum(map(len, _joined(polls).values())), "the records to be acknowledged")

    @kind(PollingSource)
    def test_an_invalid_checkpoint_is_refused(
        self, source: PollingSource[Any], invalid_checkpoint: SourceCheckpoint
    ) -> None:
        with _open(source) as opened, pytest.raises(ConnectorError):
            opened.restore(invalid_checkpoint)

    # -- streaming -----------------------------------------------------------------------------------------------

    @kind(StreamingSource)
    def test_streaming_sends_everything_waits_until_it_is_durable_and_stops(
        self,
        source: StreamingSource[Any],
        expected: Any,
        more: Callable[[], None] | None,
        told: Callable[[], int] | None,
    ) -> None:
        sender = RecordingSender()
        with _open(source) as opened, sender.streaming(opened):
            if more is not None:
                more()
            count = 1 if expected is None else sum(map(len, _expected(expected, {}).values()))
            wait_until(lambda: sender.count >= count or sender.failed, f"{count} records to be sent")
            assert told is None or not told(), "records were acknowledged before anything was on disk"
            sender.make_durable()
            if told is not None:
                wait_until(lambda: told() >= count, "the records to be acknowledged")
        if expected is not None:
            self._same(
                sender.rows, _expected(expected, sender.rows), "what was sent and what is expected", ordered=False
            )

    # -- small things --------------------------------------------------------------------------------------------

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

    def _same(self, found: Rows, wanted: Rows, what: str, ordered: bool | None = None) -> None:
        for stream in sorted({*found, *wanted}):
            one, two = found.get(stream, []), wanted.get(stream, [])
            if not (self.ordered if ordered is None else ordered):
                one, two = sorted(one, key=repr), sorted(two, key=repr)
            if one != two:
                extra, missing = _but_not_in(one, two), _but_not_in(two, one)
                raise AssertionError(
                    f"{what} differ in stream {stream!r}: {len(one)} rows and {len(two)}; "
                    f"too many {extra[:3]}, missing {missing[:3]}"
                    + ("" if extra or missing else "; the rows are the same and their order is not")
                )


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


@contextlib.contextmanager
def _open(source: Any) -> Iterator[Any]:
    """A copy of the source as another process gets it, open."""
    copy = pickle.loads(pickle.dumps(source))
    copy.open()
    try:
        yield copy
    finally:
        copy.close()


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
        with _open(source) as opened:
            found.append(_rows(item for item in opened.read(split) if not isinstance(item, Note)))
    return found


def _read_on(source: RangeSource[Any, Any], start: str, ranges: int, limit: int) -> Rows:
    """The rows of so many further ranges; in another process."""
    pieces = []
    with _open(source) as opened:
        position = source.position_type.model_validate(json.loads(start))
        for _ in range(ranges):
            end = opened.latest(position, ReadLimit(rows=limit))
            pieces.append(_read(opened, position, end))
            position = end
    return _joined(pieces)


def _rows(batches: Iterator[SourceBatch]) -> Rows:
    found: Rows = defaultdict(list)
    for batch in batches:
        found[batch.stream] += batch.records.to_pylist()
    return dict(found)


def _moved(source: RangeSource[Any, Any], start: Position) -> Position | None:
    end = source.latest(start, ReadLimit())
    return end if end != start else None


def _poll(
    source: PollingSource[Any], limit: int, expected: Any, polls: int | None = None
) -> tuple[list[Rows], list[SourceCheckpoint]]:
    """Poll until all that is expected has come, or so many times, or until there is nothing."""
    found: list[Rows] = []
    checkpoints: list[SourceCheckpoint] = []
    wanted = None if expected is None else sum(map(len, _expected(expected, {}).values()))

    def poll() -> bool:
        batch = source.poll_batch(limit)
        if batch is not None:
            found.append(_polled([batch] if isinstance(batch, SourceBatch) else batch))
            checkpoints.append(source.checkpoint())
        count = sum(map(len, _joined(found).values()))
        if wanted is not None:
            return count >= wanted
        return batch is None if polls is None else len(found) >= polls

    if polls != 0:
        wait_until(poll, "the records that the source holds")
    return found, checkpoints


def _polled(items: Sequence[SourceEnvelope | SourceBatch]) -> Rows:
    found: Rows = defaultdict(list)
    for item in items:
        if isinstance(item, SourceBatch):
            found[item.stream] += item.records.to_pylist()
        else:
            found[item.record.stream].append(item.record.payload)
    return dict(found)


def _joined(pieces: Sequence[Rows]) -> Rows:
    found: Rows = defaultdict(list)
    for piece in pieces:
        for stream, rows in piece.items():
            found[stream] += rows
    return dict(found)


def _expected(expected: Any, found: Rows) -> Rows:
    """What a fixture says, by stream; with only one stream it need not name it."""
    if isinstance(expected, dict):
        return {stream: _plain(rows) for stream, rows in expected.items()}
    assert len(found) <= 1, f"give `expected` by stream, there are {sorted(found)}"
    return {next(iter(found), ""): _plain(expected)}


def _plain(rows: Any) -> list[Any]:
    if isinstance(rows, pa.RecordBatch | pa.Table):
        return rows.to_pylist()  # type: ignore[no-any-return]
    return [row if isinstance(row, bytes) else as_rows([row])[0] for row in rows]


def _but_not_in(one: Sequence[Any], two: Sequence[Any]) -> list[Any]:
    left = list(two)
    extra = []
    for row in one:
        if row in left:
            left.remove(row)
        else:
            extra.append(row)
    return extra
