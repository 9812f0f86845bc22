"""The kit's laws for table sources: one that keeps them all, and for each law one that breaks it and is caught."""

from __future__ import annotations

import inspect
import itertools
import pickle
from dataclasses import replace

import pytest

from penstock.errors import RetryableError
from penstock.runtime.epochs import State
from penstock.source import ReadLimit, SourceContext
from penstock.tables import CopyAgain, Refused, Requests, TableSource
from penstock.testing import (
    Fault,
    FaultySource,
    MemoryDatabase,
    MemoryTables,
    MemoryTablesConfig,
    TableSourceContract,
    tables,
)
from penstock.testing.database import Progress
from penstock.testing.tables import RequestLaws, TableMirror

pytestmark = pytest.mark.processes

TABLES = ("shop.items", "shop.orders")


def fill(path):
    database = MemoryDatabase(path)
    for id, table in itertools.product(range(1, 9), TABLES):
        database.put(table, id, f"{table} {id}")
    return database


def changes(database):
    numbers = itertools.count(100)

    def happen(stream):
        number = next(numbers)
        database.put(stream, number, "new")
        database.put(stream, number % 5 + 1, f"changed {number}")
        database.delete(stream, number % 3 + 6)

    return happen


class TestMemoryTables(TableSourceContract):
    @pytest.fixture
    def database(self, tmp_path):
        return fill(tmp_path)

    @pytest.fixture
    def source(self, database, tmp_path):
        return MemoryTables(MemoryTablesConfig(path=tmp_path))

    @pytest.fixture
    def change(self, database):
        return changes(database)

    @pytest.fixture
    def content(self, database):
        return database.content


class SaysNothingOfCompleteCopies(MemoryTables):
    def tables(self, position):
        return {name: replace(each, complete=False) for name, each in super().tables(position).items()}


class LosesAChange(MemoryTables):
    def _read_log(self, split):
        *others, _ = super()._read_log(split)
        return iter(others)


class ForgetsWhatCopiesHold(MemoryTables):
    def next_start(self, end, notes):
        after = super().next_start(end, notes)
        tables = {name: each.model_copy(update={"chunks": ()}) for name, each in after.tables.items()}
        return after.model_copy(update={"tables": tables})


class RemembersBesideThePosition(MemoryTables):
    """Passes over what it has planned before, whether or not that was ever committed."""

    def latest(self, start, limit):
        file = self.config.path / "planned"
        end = super().latest(start, limit)
        if file.exists() and end.line <= int(file.read_text()) and end.line > start.line:
            return end.model_copy(update={"gaps": end.gaps + 1})
        file.write_text(str(end.line))
        return end


class KnowsItsTablesOnlyWhenOpen(MemoryTables):
    def tables(self, position):
        known = super().tables(position)
        return known if self.context.state_dir is not None else {**known, "more": known["shop.items"]}


class ReadsOtherRowsAgain(MemoryTables):
    def _read_log(self, split):
        with open(self.config.path / "reads", "a") as file:
            file.write(".")
        reads = (self.config.path / "reads").stat().st_size
        yield from list(super()._read_log(split))[reads % 2 :]


class KnowsNoBounds(MemoryTables):
    def latest(self, start, limit):
        return super().latest(start, replace(limit, until=None))


class MakesUpTables(MemoryTables):
    def next_start(self, end, notes):
        after = super().next_start(end, notes)
        new = {refused.stream for note in notes if (refused := Refused.read(note))} - after.tables.keys()
        return after.model_copy(update={"tables": {**after.tables, **{name: Progress() for name in new}}})


class IgnoresRefusals(MemoryTables):
    def next_start(self, end, notes):
        return super().next_start(end, [note for note in notes if not Refused.read(note)])


class LeavesPartsOfCopies(MemoryTables):
    def next_start(self, end, notes):
        after = super().next_start(end, notes)
        tables = {name: each.model_copy(update={"part": False}) for name, each in after.tables.items()}
        return after.model_copy(update={"tables": tables})


class CopiesWithoutAClear(MemoryTables):
    def _read_copy(self, split):
        return super()._read_copy(replace(split, begins=False))


class IgnoresNotesToCopyAgain(MemoryTables):
    def next_start(self, end, notes):
        return super().next_start(end, [note for note in notes if not CopyAgain.read(note)])


class IgnoresRequests(MemoryTables):
    def _with_requests(self, start):
        return start


class ResumesSkippedTables(MemoryTables):
    def _with_requests(self, start):
        after = super()._with_requests(start)
        tables = {n: each.again() if each.state == "skipped" else each for n, each in after.tables.items()}
        return after.model_copy(update={"tables": tables})


class IsDoneTooSoon(MemoryTables):
    def _with_requests(self, start):
        after = super()._with_requests(start)
        Requests(self.context.state_dir).done(after.obeyed)
        return after


class NeverAsksTheTargets(MemoryTables):
    def open(self, context=SourceContext()):
        super().open(SourceContext(context.state_dir))


BROKEN = [
    ("test_every_table_is_copied_once_and_its_sinks_are_told", SaysNothingOfCompleteCopies, "shop.items is"),
    ("test_changes_are_followed_neither_lost_nor_doubled", LosesAChange, "and should be"),
    ("test_changes_while_tables_are_copied_count_once", ForgetsWhatCopiesHold, "twice|not there|should be"),
    ("test_a_kill_at_any_step_loses_and_doubles_nothing", RemembersBesideThePosition, "and should be"),
    (
        "test_a_copy_that_reaches_two_sinks_in_different_versions_is_made_again",
        IgnoresNotesToCopyAgain,
        "should be|twice|not there",
    ),
    ("test_states_come_from_the_position_alone", KnowsItsTablesOnlyWhenOpen, "another copy knows other states"),
    ("test_a_range_of_changes_always_holds_the_same_rows", ReadsOtherRowsAgain, "a range read again holds other rows"),
    ("test_nothing_is_planned_past_a_bound_although_the_tables_go_on_changing", KnowsNoBounds, "there is more to read"),
    ("test_notes_of_tables_that_a_position_does_not_know_change_nothing", MakesUpTables, "no.such"),
    ("test_a_refused_table_is_set_aside_and_the_others_go_on", IgnoresRefusals, "shop.items is"),
    ("test_a_refused_table_is_copied_again_once_it_is_taken", CopiesWithoutAClear, "twice|begin with a clear"),
    (
        "test_a_table_that_one_sink_refuses_in_the_middle_of_its_copy_is_left_in_none",
        LeavesPartsOfCopies,
        "shop.items is",
    ),
    ("test_a_note_to_copy_again_begins_another_copy", CopiesWithoutAClear, "must begin with a clear"),
    ("test_a_paused_table_is_left_alone_and_copied_again_when_it_resumes", IgnoresRequests, "paused"),
    ("test_a_skipped_table_stays_so_until_it_is_copied_on_request", ResumesSkippedTables, "for paused tables"),
    ("test_a_request_counts_once_wherever_a_run_is_killed", IsDoneTooSoon, "one request"),
    ("test_after_a_reset_everything_is_copied_again_from_a_clear", CopiesWithoutAClear, "twice|should be"),
    (
        "test_a_copy_into_a_target_that_holds_one_begins_with_a_clear",
        NeverAsksTheTargets,
        "copied over the rows in the target",
    ),
]


@pytest.mark.parametrize(("law", "kind", "told"), BROKEN, ids=[law for law, *_ in BROKEN])
def test_a_table_source_that_breaks_a_law_is_caught(law, kind, told, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RANGES", 12)
    database = fill(tmp_path)
    mirror = TableMirror(tmp_path / "kit", kind(MemoryTablesConfig(path=tmp_path)), content=database.content)
    mirror.path.mkdir()
    wanted = inspect.signature(getattr(TestMemoryTables, law)).parameters
    given = {"mirror": mirror, "copied": mirror, "change": changes(database), "step": "plan.before=kill"}
    if "copied" in wanted:
        mirror.run()
    with pytest.raises((AssertionError, pytest.fail.Exception), match=told):
        getattr(TestMemoryTables(), law)(**{name: given[name] for name in wanted if name != "self"})


def test_every_law_has_a_source_that_breaks_it():
    laws = {name for part in (TableSourceContract, RequestLaws) for name in vars(part) if name.startswith("test_")}
    assert laws == {law for law, *_ in BROKEN}


# -- what only the toy database can show ---------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path):
    database = fill(tmp_path)
    (tmp_path / "kit").mkdir()
    made = TableMirror(tmp_path / "kit", MemoryTables(MemoryTablesConfig(path=tmp_path)), content=database.content)
    made.run()
    return made


def test_a_planned_range_whose_log_is_lost_is_given_up_and_everything_copied_again(mirror, tmp_path):
    database = MemoryDatabase(tmp_path)
    database.put("shop.orders", 50, "planned and never read")
    assert mirror.killed("plan.after=kill")
    number = State(mirror.path / "state", "mirror").peek().newest.number
    database.lose_log()
    database.put("shop.items", 51, "after it")
    mirror.run()
    mirror.check()
    closed = State(mirror.path / "state", "mirror").peek().load(number)
    assert (closed.state, closed.rows_out) == ("committed", {})
    assert closed.ranges["source"].start == closed.ranges["source"].end
    assert all(table.copy == 2 for table in mirror.states().values())


def test_a_table_that_is_dropped_and_made_again_is_another_table(mirror, tmp_path):
    database = MemoryDatabase(tmp_path)
    database.drop("shop.orders")
    database.put("shop.orders", 2, "another one")
    mirror.run()
    mirror.check()
    database.drop("shop.orders")
    mirror.run()
    assert mirror.states()["shop.orders"].state == "gone"
    database.put("shop.orders", 3, "back")
    mirror.run()
    mirror.check()


def test_a_table_that_is_new_is_copied_while_the_others_go_on(mirror, tmp_path):
    MemoryDatabase(tmp_path).put("shop.people", 1, "new")
    mirror.run()
    mirror.check()
    assert set(mirror.states()) == {"shop.items", "shop.orders", "shop.people"}


def test_what_every_target_holds_is_followed_and_not_copied_again(mirror, tmp_path):
    other = TableMirror(tmp_path / "other", mirror.source, content=mirror.content)
    (sink,) = other._sinks().values()
    other.path.mkdir()
    sink.open()
    sink.mark_seeded("/shop.orders")
    MemoryDatabase(tmp_path).put("shop.orders", 60, "followed")
    other.run()
    assert other.ops("shop.orders") == "c"
    other.check("shop.items")


def test_a_wrapper_with_a_fault_is_in_all_else_what_it_wraps(tmp_path):
    fill(tmp_path)
    fault = Fault("latest", "reject", tmp_path)
    source = pickle.loads(pickle.dumps(FaultySource(MemoryTables(MemoryTablesConfig(path=tmp_path)), fault)))
    source.open(SourceContext(tmp_path / "state"))
    assert isinstance(source, TableSource)
    assert source.context.state_dir == tmp_path / "state"
    assert source.tables(source.initial()).keys() == set(TABLES)
    with pytest.raises(RetryableError):
        source.latest(source.initial(), ReadLimit())
    assert source.latest(source.initial(), ReadLimit()) != source.initial()
