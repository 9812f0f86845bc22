"""The laws that every table source keeps: copies, refusals, requests and lost ranges, with kills at every step."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.durable import canonical
from penstock.errors import RetryableError, SchemaError
from penstock.runtime.epochs import State, reset
from penstock.sink import Topic, WriteResult
from penstock.source import Note, RangeSource, ReadLimit, SourceContext
from penstock.tables import CopyAgain, Refused, Requests, TableSource, TableState
from penstock.testing.memory import MemorySink, MemorySinkConfig
from penstock.testing.mirror import Mirror, Row, replayed
from penstock.testing.processes import elsewhere, wait_until
from penstock.testing.sources import EverySource

RANGES = 300
"""More ranges than this come only from a source that never ends."""

STEPS = (
    "plan.before=kill",
    "plan.after=kill@2",
    "stage.begin=kill@2",
    "stage.middle=kill",
    "stage.task=kill@2",
    "stage.after=kill",
    "prepare.after=kill@2",
    "commit.before=kill@2",
    "commit.after=kill",
    "committed.after=kill@2",
    "ack.after=kill",
)
"""Where a run is killed: at the first or the second pass, so that copies and changes are hit."""


class RefusingSink(MemorySink):
    """Refuses rows of the topics that the file `refused` in its directory names; it can be cleared."""

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        file = self.config.path / "refused"
        if file.exists() and topic in file.read_text().split() and {*batch.column("_op").to_pylist()} != {"t"}:
            raise SchemaError(f"{topic} has no place here", hint="a test asked for it")
        return super().write_batch(topic, batch)


@dataclass
class TableMirror(Mirror):
    """A pipeline from a table source into logs of changes, and what its state says of each table."""

    content: Callable[[str], list[Row]] = lambda stream: []
    key: tuple[str, ...] = ("id",)
    targets: tuple[str, ...] = ("target",)

    @property
    def requests(self) -> Requests:
        return Requests(self.path / "state" / "sources" / "source")

    @property
    def position(self) -> Any:
        newest = State(self.path / "state", "mirror").peek().newest
        assert newest is not None, "nothing was planned yet"
        end = self.source.position_type.model_validate(newest.ranges["source"].end)
        return self.source.next_start(end, newest.notes.get("source", ()))

    def states(self) -> dict[str, TableState]:
        """The state of each table, asked of a source that was never opened."""
        return dict(_copy(self.source).tables(self.position))

    def refuse(self, *streams: str) -> None:
        """Let the sinks refuse these tables, and take all others."""
        for target in self.targets:
            (self.path / target).mkdir(parents=True, exist_ok=True)
            (self.path / target / "refused").write_text(" ".join(f"/{stream}" for stream in streams))

    def ops(self, stream: str) -> str:
        """What was written of a table, an operation after the other."""
        return "".join(row["_op"] for row in self.log(stream))

    def check(self, *streams: str) -> None:
        """Every target holds exactly what the tables hold."""
        for stream in streams or self.states():
            expected = sorted(self.content(stream), key=lambda row: tuple(repr(row[name]) for name in self.key))
            for target, sink in self._sinks().items():
                log = sorted(sink.visible(f"/{stream}"), key=lambda row: row["_position"])
                found = replayed(log, self.key)
                assert found == expected, f"{stream} in {target} is\n{found}\nand should be\n{expected}"

    def _sinks(self) -> dict[str, MemorySink]:
        return {name: RefusingSink(MemorySinkConfig(path=self.path / name)) for name in self.targets}


class RequestLaws:
    """What `penstock tables` asks for is done once."""

    def test_a_paused_table_is_left_alone_and_copied_again_when_it_resumes(
        self, copied: TableMirror, change: Any
    ) -> None:
        paused, *others = copied.states()
        copied.requests.add("pause", [paused])
        copied.run()
        assert copied.states()[paused].state == "paused"
        before = copied.ops(paused)
        for stream in (paused, *others):
            change(stream)
        copied.run()
        copied.check(*others)
        assert copied.ops(paused) == before, f"{paused} is paused, and rows of it came"
        copied.requests.add("resume", [paused])
        copied.run()
        copied.check()
        assert copied.states()[paused].state == "active"

    def test_a_skipped_table_stays_so_until_it_is_copied_on_request(self, copied: TableMirror, change: Any) -> None:
        skipped = next(iter(copied.states()))
        copied.requests.add("skip", [skipped])
        copied.requests.add("resume", [skipped])
        copied.run()
        assert copied.states()[skipped].state == "skipped", "`resume` is for paused tables"
        change(skipped)
        copied.requests.add("resync", [skipped])
        copied.run()
        copied.check()

    @pytest.mark.parametrize("step", STEPS)
    def test_a_request_counts_once_wherever_a_run_is_killed(self, copied: TableMirror, change: Any, step: str) -> None:
        stream = next(iter(copied.states()))
        before = copied.states()[stream].copy
        copied.requests.add("resync", [stream])
        change(stream)
        for _ in range(2):
            copied.killed(step)
        copied.run()
        copied.run()  # with the start of a range that names it, a request is done
        copied.check()
        assert copied.states()[stream].copy == before + 1, "one request, and more than one copy"
        assert copied.requests.pending() == [], "its effect is durable, and the request still waits"


class TableSourceContract(EverySource, RequestLaws):
    """
    The conformance tests of a `TableSource`: subclass it and give it the fixtures `source`, `change` and `content`.

    `source` has at least two tables, and four rows in each.
    """

    key: tuple[str, ...] = ("id",)
    """The key of its tables."""

    @pytest.fixture
    def source(self) -> TableSource[Any, Any]:
        """A source that is not open, whose tables hold some rows."""
        raise NotImplementedError("give the contract a fixture `source`")

    @pytest.fixture
    def change(self) -> Callable[[str], None]:
        """Changes a table: a new row, an update of one, a delete of another."""
        raise NotImplementedError("give the contract a fixture `change`")

    @pytest.fixture
    def content(self) -> Callable[[str], list[Row]]:
        """The rows of a table now, as dicts."""
        raise NotImplementedError("give the contract a fixture `content`")

    @pytest.fixture
    def mirror(self, source: Any, content: Any, tmp_path: Path) -> TableMirror:
        """A pipeline that has not run."""
        (tmp_path / "kit").mkdir()
        return TableMirror(tmp_path / "kit", source, content=content, key=self.key)

    @pytest.fixture
    def copied(self, mirror: TableMirror) -> TableMirror:
        """A pipeline that has copied all tables."""
        mirror.run()
        assert len(mirror.states()) >= 2, "let the fixture `source` have two tables"
        return mirror

    # -- copies and changes --------------------------------------------------------------------------------------

    def test_every_table_is_copied_once_and_its_sinks_are_told(self, copied: TableMirror) -> None:
        copied.check()
        (sink,) = copied._sinks().values()
        for stream, table in copied.states().items():
            assert (table.state, table.copy, table.complete) == ("active", 1, True), f"{stream} is {table}"
            assert copied.ops(stream) == "r" * table.rows, f"{table.rows} rows of {stream} were copied, they say"
            assert sink.is_seeded(f"/{stream}"), f"the first copy of {stream} is complete, and its sink does not know"

    def test_changes_are_followed_neither_lost_nor_doubled(self, copied: TableMirror, change: Any) -> None:
        for _ in range(3):
            for stream in copied.states():
                change(stream)
            copied.run()
            copied.check()

    def test_changes_while_tables_are_copied_count_once(self, mirror: TableMirror, change: Any) -> None:
        for _ in range(RANGES):
            assert mirror.killed("ack.after=kill"), "no epoch, and the copies are not complete"
            if all(table.complete for table in mirror.states().values()):
                break
            for stream in mirror.states():
                change(stream)
        mirror.run()
        mirror.check()

    @pytest.mark.parametrize("step", STEPS)
    def test_a_kill_at_any_step_loses_and_doubles_nothing(self, mirror: TableMirror, change: Any, step: str) -> None:
        mirror.killed(step)
        if State(mirror.path / "state", "mirror").peek().newest is not None:
            for stream in mirror.states():
                change(stream)
        mirror.killed(step)
        mirror.run()
        mirror.check()
        for stream in mirror.states():
            change(stream)
        mirror.killed(step)
        mirror.run()
        mirror.check()

    def test_a_copy_that_reaches_two_sinks_in_different_versions_is_made_again(
        self, mirror: TableMirror, change: Any
    ) -> None:
        mirror.targets = ("target", "other")
        assert mirror.killed("prepare.after=kill"), "the first epoch is never prepared"
        for file in (mirror.path / "other").glob("*/rows/*"):
            file.unlink()  # of the first try; `target` still has its own
        for stream in mirror.states() or _streams(mirror):
            change(stream)
        mirror.run()
        mirror.check()

    # -- positions -----------------------------------------------------------------------------------------------

    def test_states_come_from_the_position_alone(self, copied: TableMirror, change: Any) -> None:
        for stream in copied.states():
            change(stream)
        with _opened(copied) as opened:
            positions = [end for _, end in _ranges(opened, copied.position)]
            assert positions, "tables were changed, and there is nothing to read"
            for position in positions:
                stored = json.loads(canonical(position.model_dump(mode="json")))
                again = copied.source.position_type.model_validate(stored)
                assert again == position, "JSON does not bring the position back"
                assert _copy(copied.source).tables(again) == opened.tables(position), "another copy knows other states"

    def test_a_range_of_changes_always_holds_the_same_rows(self, copied: TableMirror, change: Any) -> None:
        for stream in copied.states():
            change(stream)
        with _opened(copied) as opened:
            for start, end in _ranges(opened, copied.position):
                splits = list(opened.split(start, end))
                first = [_rows(opened, split) for split in splits]
                assert [_rows(opened, split) for split in splits] == first, "a range read again holds other rows"
                if any(first):
                    break
            else:
                pytest.fail("tables were changed, and no range holds the changes")
        assert elsewhere(_read_elsewhere, copied.source, splits) == first, "another process reads other rows"

    def test_nothing_is_planned_past_a_bound_although_the_tables_go_on_changing(
        self, mirror: TableMirror, change: Any
    ) -> None:
        with _opened(mirror) as opened:
            bound = opened.latest(opened.initial(), ReadLimit())
            streams = list(opened.schema())
            last = opened.initial()
            for _, last in _ranges(opened, opened.initial(), until=bound):  # noqa: B007 - the last one counts
                for stream in streams:
                    change(stream)
            assert all(table.complete for table in opened.tables(last).values()), "a copy is left unfinished"

    # -- notes ---------------------------------------------------------------------------------------------------

    def test_notes_of_tables_that_a_position_does_not_know_change_nothing(self, copied: TableMirror) -> None:
        position: Any = copied.position
        source: Any = copied.source
        notes = [Refused.because("no.such", SchemaError("no")).note(), CopyAgain(streams=("no.such",)).note()]
        assert source.tables(source.next_start(position, notes)) == source.tables(position)

    def test_a_refused_table_is_set_aside_and_the_others_go_on(self, copied: TableMirror, change: Any) -> None:
        refused, *others = copied.states()
        copied.refuse(refused)
        for stream in (refused, *others):
            change(stream)
        copied.run()
        table = copied.states()[refused]
        assert (table.state, table.code) == ("failed", "PEN-4000"), f"{refused} is {table}"
        assert "has no place here" in table.error
        assert table.hint == "a test asked for it"
        assert table.tries >= 1
        assert table.since is not None
        assert not table.complete
        copied.check(*others)

    def test_a_refused_table_is_copied_again_once_it_is_taken(self, copied: TableMirror, change: Any) -> None:
        refused = next(iter(copied.states()))
        copied.refuse(refused)
        change(refused)
        copied.run()
        before = copied.states()[refused]
        copied.refuse()
        change(refused)
        copied.requests.add("resume", [refused])
        copied.run()
        after = copied.states()[refused]
        assert (after.state, after.complete) == ("active", True), f"{refused} is {after}"
        assert after.copy > before.copy
        copied.check()
        assert "t" in copied.ops(refused), (
            "rows from before the failure are still there: a copy must begin with a clear"
        )

    @pytest.mark.parametrize(
        "step", ["plan.after=kill", "stage.task=kill", "prepare.after=kill", "commit.before=kill@2"]
    )
    def test_a_table_that_one_sink_refuses_in_the_middle_of_its_copy_is_left_in_none(
        self, mirror: TableMirror, step: str
    ) -> None:
        mirror.targets = ("target", "other")
        for _ in range(RANGES):
            assert mirror.killed("ack.after=kill"), "no epoch, and the copies are not complete"
            begun = [stream for stream, table in mirror.states().items() if table.state == "seeding" and table.rows]
            if begun or all(table.complete for table in mirror.states().values()):
                break
        if not begun:
            pytest.skip("each of its copies is one range")
        mirror.refuse(begun[0])
        (mirror.path / "other" / "refused").unlink()
        for _ in range(2):
            mirror.killed(step)
        mirror.run()
        table = mirror.states()[begun[0]]
        assert (table.state, table.cleared) == ("failed", True), f"{begun[0]} is {table}"
        for target, sink in mirror._sinks().items():
            log = sorted(sink.visible(f"/{begun[0]}"), key=lambda row: row["_position"])
            assert log, f"{target} was to hold part of a copy"
            assert replayed(log, mirror.key) == [], f"{target} holds part of a copy"
        mirror.check(*mirror.states().keys() - {begun[0]})
        mirror.refuse()
        mirror.requests.add("resume", begun[:1])
        mirror.run()
        mirror.check()

    def test_a_note_to_copy_again_begins_another_copy(self, copied: TableMirror) -> None:
        stream, other = list(copied.states())[:2]
        with _opened(copied) as opened:
            start = opened.next_start(copied.position, [CopyAgain(streams=(stream,)).note()])
            before = opened.tables(start)
            assert not before[stream].complete, "it is to be copied again, and counts as complete"
            assert before[other].complete
            read: list[Row] = []
            for a, b in _ranges(opened, start):
                read += [row for split in opened.split(a, b) for name, row in _rows(opened, split) if name == stream]
                if opened.tables(b)[stream].complete:
                    break
            assert opened.tables(b)[stream].copy == before[stream].copy + 1
        ordered = sorted(read, key=lambda row: row["_position"])
        assert ordered[0]["_op"] == "t", "another copy must begin with a clear"
        assert replayed(ordered, self.key) == replayed(copied.log(stream), self.key)

    # -- starting over -------------------------------------------------------------------------------------------

    def test_after_a_reset_everything_is_copied_again_from_a_clear(self, copied: TableMirror, change: Any) -> None:
        for stream in copied.states():
            change(stream)
        reset(copied.path / "state", "mirror")
        copied.run()
        copied.check()
        assert all("t" in copied.ops(stream) for stream in copied.states())

    def test_a_copy_into_a_target_that_holds_one_begins_with_a_clear(self, mirror: TableMirror) -> None:
        (sink,) = mirror._sinks().values()
        sink.open()
        streams = _streams(mirror)
        for stream in streams:
            sink.mark_seeded(f"/{stream}")
        mirror.run()
        for stream in streams:
            ops = mirror.ops(stream)
            assert ops.startswith("t") or "r" not in ops, f"{stream} was copied over the rows in the target: {ops}"


def _copy(source: Any) -> Any:
    return pickle.loads(pickle.dumps(source))


@contextmanager
def _opened(mirror: TableMirror) -> Iterator[TableSource[Any, Any]]:
    """A copy of the source as the next run has it."""
    copy = _copy(mirror.source)
    copy.open(SourceContext(mirror.path / "state" / "sources" / "source"))
    try:
        yield copy
    finally:
        copy.close()


def _streams(mirror: TableMirror) -> list[str]:
    with _opened(mirror) as opened:
        return list(opened.schema())


def _rows(source: RangeSource[Any, Any], split: Any) -> list[tuple[str, Row]]:
    items = (item for item in source.read(split) if not isinstance(item, Note))
    return [(item.stream, row) for item in items for row in item.records.to_pylist()]


def _read_elsewhere(source: RangeSource[Any, Any], splits: Sequence[Any]) -> list[list[tuple[str, Row]]]:
    found = []
    for split in splits:
        copy = _copy(source)
        copy.open(SourceContext(in_task=True))
        found.append(_rows(copy, split))
        copy.close()
    return found


def _ranges(source: TableSource[Any, Any], start: Any, until: Any = None) -> Iterator[tuple[Any, Any]]:
    """The ranges from a position to the end of what there is, each read and acknowledged once it was looked at."""
    for _ in range(RANGES):
        limit = ReadLimit(rows=10, parallelism=2, until=until)
        end = wait_until(partial(_planned, source, start, limit), "a range")
        if end == start:
            return
        yield start, end
        notes = [n.value for split in source.split(start, end) for n in source.read(split) if isinstance(n, Note)]
        start = source.next_start(end, json.loads(json.dumps(notes)))
        source.ack(start)
    pytest.fail(f"there is more to read after {RANGES} ranges")


def _planned(source: TableSource[Any, Any], start: Any, limit: ReadLimit) -> Any:
    """The end of the next range; None while a table waits for its copy to begin."""
    try:
        end = source.latest(start, limit)
    except RetryableError:  # a killed run's session may hold the log for a moment
        return None
    waits = end == start and any(table.state == "seeding" for table in source.tables(start).values())
    return None if waits else end
