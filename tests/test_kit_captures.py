"""The kit's laws for captures: a capture that keeps them all, and for each law one that breaks it and is caught."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.capture import Ack, AckSink, Change, ChangeCapture, Delete, SnapshotTable, Upsert
from penstock.config import Config
from penstock.testing import CaptureContract, captures

THINGS = SnapshotTable("public", "things")


class ThingsConfig(Config):
    path: Path
    """A directory that stands for the outside system: `log` holds a number per change, `slot` how many are confirmed."""


class Things(ChangeCapture[ThingsConfig]):
    """Every third change is a delete."""

    name = "things"

    def tables(self):
        return [THINGS]

    def schema(self):
        return {THINGS.stream: pa.schema([("id", pa.int64()), ("note", pa.string())])}

    def log(self):
        path = self.config.path / "log"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def slot(self):
        path = self.config.path / "slot"
        return int(path.read_text()) if path.exists() else 0

    def moved(self, position):
        (self.config.path / "slot").write_text(str(position + 1))

    def event(self, number):
        return Delete(THINGS, {"id": number}) if number % 3 == 2 else Upsert(THINGS, {"id": number, "note": "x"})

    def live(self):
        acks = AckSink(self.moved)
        at = self.slot()
        while True:
            for number in self.log()[at:]:
                yield Change(self.event(number), acks.ack(at), at)
                at += 1
            yield None

    def snapshot(self, tables):
        return (Change(self.event(number)) for number in self.log() if number % 3 != 2 and THINGS in tables)

    def lag(self):
        return len(self.log()) - self.slot()


@pytest.fixture
def more(tmp_path):
    numbers = itertools.count(10)

    def happen():
        with open(tmp_path / "log", "a") as log:
            log.writelines(f"{next(numbers)}\n" for _ in range(6))

    return happen


class TestThings(CaptureContract):
    @pytest.fixture
    def source(self, tmp_path):
        return Things(ThingsConfig(path=tmp_path))

    @pytest.fixture
    def more(self, more):
        return more


class HidesAColumn(Things):
    def schema(self):
        return {THINGS.stream: pa.schema([("id", pa.int64())])}


class HasAStrangePosition(Things):
    def live(self):
        return (change and Change(change.event, change.ack, (change.position,)) for change in super().live())


class MovesWhenItReads(Things):
    """Takes a change for confirmed as soon as it was handed over."""

    def live(self):
        for change in super().live():
            yield change
            if change is not None:
                self.moved(change.position)


class MovesToTheLastAck(Things):
    """An ack in the middle confirms all before it."""

    def live(self):
        for change in super().live():
            at = change and change.position
            yield change and Change(change.event, Ack(lambda at=at: self.moved(max(at, self.slot() - 1))), at)


class NeverMoves(Things):
    def moved(self, position):
        pass


class MovesOneTooFar(Things):
    def moved(self, position):
        (self.config.path / "slot").write_text(str(position + 2))


class GoesBack(Things):
    """Its positions say nothing, and it does not go on behind them."""

    def live(self):
        return (change and Change(change.event, change.ack, str(change.position)) for change in super().live())


class CopyMoves(Things):
    def snapshot(self, tables):
        acks = AckSink(self.moved)
        return (Change(c.event, acks.ack(n)) for n, c in enumerate(super().snapshot(tables)))


class CopiesDeletes(Things):
    def snapshot(self, tables):
        return (Change(self.event(number)) for number in self.log())


class KeepsItsAcks(Things):
    """One that was dropped in an earlier `live` blocks all that come."""

    def live(self):
        self.acks = self.__dict__.get("acks") or AckSink(self.moved)
        at = self.slot()
        while True:
            for number in self.log()[at:]:
                yield Change(self.event(number), self.acks.ack(at), at)
                at += 1
            yield None


class LosesOneWhenAsked(Things):
    asked = 0

    def lag(self):
        self.asked += 1
        return super().lag()

    def live(self):
        for change in super().live():
            if change is None or self.asked != 2:
                yield change
            else:
                self.asked += 1


class NeverQuiet(Things):
    def live(self):
        while True:
            yield from (change for change in itertools.islice(super().live(), len(self.log()) - self.slot()))


class Ends(Things):
    def live(self):
        return itertools.takewhile(lambda change: change is not None, super().live())


BROKEN = [
    ("test_its_changes_are_of_its_tables_and_fit_their_schemas", HidesAColumn, "not in its schema"),
    ("test_its_changes_are_of_its_tables_and_fit_their_schemas", HasAStrangePosition, "survive JSON"),
    ("test_a_dropped_ack_is_unconfirmed", MovesWhenItReads, "nobody confirmed"),
    ("test_acks_count_in_any_order", NeverMoves, "came again that were confirmed"),
    ("test_the_resume_point_does_not_move_over_a_gap", MovesToTheLastAck, "did not come again"),
    ("test_it_goes_on_from_the_confirmed_point", MovesOneTooFar, "unconfirmed change is lost"),
    ("test_what_the_journal_holds_is_not_taken_twice", GoesBack, "other changes come than before"),
    ("test_a_snapshot_moves_nothing", CopyMoves, "acks moved"),
    ("test_a_snapshot_moves_nothing", CopiesDeletes, "consists of upserts"),
    ("test_one_that_was_read_goes_on_in_the_same_process", KeepsItsAcks, "in an earlier live"),
    ("test_asking_for_its_lag_disturbs_nothing", LosesOneWhenAsked, "gives other changes"),
    ("test_a_dropped_ack_is_unconfirmed", Ends, "it must go on"),
    ("test_a_dropped_ack_is_unconfirmed", NeverQuiet, "must yield None"),
]


@pytest.mark.parametrize(("law", "broken", "message"), BROKEN)
def test_a_capture_that_breaks_a_law_is_caught(law, broken, message, tmp_path, more, monkeypatch):
    monkeypatch.setattr(captures, "PATIENCE_SECS", 0.2)
    more()
    good, bad = Things(ThingsConfig(path=tmp_path)), broken(ThingsConfig(path=tmp_path))
    with captures._opened(good, tmp_path) as opened:
        first = captures._events(opened)
    fixtures = {"again": lambda: captures._opened(bad, tmp_path), "first": first, "more": more}
    test = getattr(CaptureContract(), law)
    wanted = inspect.signature(test).parameters
    with pytest.raises(AssertionError, match=message):
        test(**{name: value for name, value in fixtures.items() if name in wanted})


def test_every_law_of_captures_has_one_that_breaks_it():
    laws = {name for name, test in vars(CaptureContract).items() if name.startswith("test_") and test is not None}
    assert laws == {law for law, _, _ in BROKEN}


def test_a_capture_is_not_asked_to_keep_the_laws_of_ranges():
    assert not hasattr(CaptureContract, "test_an_ack_may_repeat_and_may_be_old")
