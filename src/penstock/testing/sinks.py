"""The laws that every sink keeps; each flag of its capabilities switches on the tests of what the flag promises."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pydantic import ValidationError

from penstock import failpoints
from penstock.changes import CHANGE_FIELDS
from penstock.changes.old_key import pack_key
from penstock.durable import canonical
from penstock.errors import Fenced, PlanStale, RetryableError, SchemaError, StagingLost
from penstock.runtime.epochs.commit import has_second_stage
from penstock.schema import with_key
from penstock.schema.evolution import EvolutionConfig, Policy
from penstock.sink import (
    Applied,
    CommittedEpoch,
    Epoch,
    Receipt,
    SinkConnector,
    SinkContext,
    Task,
    Topic,
    TopicContext,
    WriteResult,
)
from penstock.source import ConnectorMetrics, HealthStatus
from penstock.testing.crash import PATIENCE_SECS, as_rows, elsewhere, is_hidden

Sink = SinkConnector[Any, Any]
Visible = Callable[..., Any]

TOPIC: Topic = "/lake/orders"
OTHER: Topic = "/lake/returns"
END = {"kit": {"index": 7}}

WIDER = [
    (pa.scalar(7, pa.int32()), pa.scalar(1 << 40, pa.int64())),
    (pa.scalar(0.5, pa.float32()), pa.scalar(0.1, pa.float64())),
    (pa.scalar(20_000, pa.date32()), pa.scalar(1_700_000_000_123_456, pa.timestamp("us"))),
]
"""A value of a type, and one that only a wider type holds."""


def needs(*flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test only for sinks whose capabilities have all of `flags`."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.needs = flags  # type: ignore[attr-defined]
        return test

    return mark


class SinkContract:
    """
    The conformance tests of a sink: subclass it and give it the fixtures `sink` and `visible`.

    `visible(topic)` reads the target by the test's own means; with no parameter it reads the one target there is.
    """

    @pytest.fixture
    def sink(self) -> Sink:
        """A sink that is not open, with an empty target."""
        raise NotImplementedError("give the contract a fixture `sink`")

    @pytest.fixture
    def visible(self) -> Visible:
        """The rows that a reader of the target sees now: an Arrow table or a list of dicts."""
        raise NotImplementedError("give the contract a fixture `visible`")

    @pytest.fixture
    def lose_staged(self, tmp_path: Path) -> Callable[[Sequence[Receipt]], None] | None:
        """Deletes what the receipts name; by default the local files. None: staged data cannot be lost on its own."""
        return lambda receipts: _delete_named(tmp_path, receipts)

    @pytest.fixture
    def partitioned_sink(self, sink: Sink) -> Sink:
        """The same sink, with rows laid out by the column `part`."""
        return type(sink)(sink.config.model_copy(update={"partition_by": ("part",)}))

    @pytest.fixture(autouse=True)
    def _only_what_it_promises(self, request: pytest.FixtureRequest, sink: Sink) -> None:
        missing = [flag for flag in getattr(request.function, "needs", ()) if not getattr(sink.capabilities, flag)]
        if missing:
            pytest.skip(f"the sink does not claim {' and '.join(missing)}")

    # -- every sink ----------------------------------------------------------------------------------------------

    def test_it_is_a_picklable_value_until_it_is_opened(self, sink: Sink) -> None:
        copy = pickle.loads(pickle.dumps(sink))
        assert copy.config == sink.config, "the copy has another config"

    def test_opening_and_closing_may_repeat(self, sink: Sink) -> None:
        sink.close()
        for _ in range(2):
            sink.open()
            sink.close()
            sink.close()

    def test_an_unknown_option_is_refused(self, sink: Sink) -> None:
        with pytest.raises(ValidationError):
            type(sink.config).model_validate({**dict(sink.config), "no_such_option": 1})

    def test_it_answers_what_the_runtime_asks_of_it(self, sink: Sink) -> None:
        with _open(sink) as opened:
            assert isinstance(opened.health_check(), HealthStatus)
            assert isinstance(opened.metrics(), ConnectorMetrics)
            assert all(finding.what for finding in opened.check())
            assert opened.schema(TOPIC) is None or isinstance(opened.schema(TOPIC), pa.Schema)

    def test_rows_of_all_tasks_and_batches_are_visible_after_the_commit(self, sink: Sink, visible: Visible) -> None:
        epoch = _epoch(1)
        _commit(sink, epoch, [_stage(sink, epoch, rows(0), rows(10), task=0), _stage(sink, epoch, rows(20), task=1)])
        _commit(sink, _epoch(2), [_stage(sink, _epoch(2), rows(30))])
        assert _shown(visible) == rows(0, 40).to_pylist(), "what was written is not what is visible"

    def test_a_first_copy_without_rows_is_remembered_and_rows_may_follow(self, sink: Sink, visible: Visible) -> None:
        if type(sink).is_seeded is SinkConnector.is_seeded:
            pytest.skip("the sink does not remember first copies")
        with _open(sink, SinkContext({TOPIC: TopicContext(source_schema=rows(0).schema)})) as opened:
            assert not opened.is_seeded(TOPIC), "nothing was copied yet"
            opened.mark_seeded(TOPIC)
        with _open(sink) as opened:
            assert opened.is_seeded(TOPIC), "the copy is forgotten"
            assert opened.committed_epoch("kit", TOPIC) is None
        assert _shown(visible) == []
        _commit(sink, _epoch(1), [_stage(sink, _epoch(1), rows(0))])
        assert _ids(visible) == list(range(10))

    def test_it_counts_what_it_takes(self, sink: Sink) -> None:
        epoch = _epoch(1)
        with _open(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            written = opened.write_batch(TOPIC, rows(0, 7))
            opened.flush()
            opened.pre_commit(epoch)
        assert isinstance(written, WriteResult)
        assert written.records_written == 7

    def test_receipts_survive_pickle_and_json(self, sink: Sink) -> None:
        receipt = _stage(sink, _epoch(1), rows(0), through_json=False)
        assert isinstance(receipt, sink.receipt_type), f"{receipt!r} is no {sink.receipt_type.__name__}"
        assert pickle.loads(pickle.dumps(receipt)) == receipt
        text = canonical(receipt.model_dump(mode="json"))
        assert sink.receipt_type.model_validate(json.loads(text)) == receipt, "JSON does not bring the receipt back"

    def test_a_topic_without_rows_holds_nothing(self, sink: Sink, visible: Visible) -> None:
        assert _shown(visible) == []
        with _open(sink) as opened:
            assert opened.committed_epoch("kit", TOPIC) is None
            opened.commit_epoch(_epoch(1), [], END)
        assert _shown(visible) == []

    # -- two-phase commit ----------------------------------------------------------------------------------------

    @needs("two_phase_commit")
    def test_nothing_is_visible_before_the_commit(self, sink: Sink, visible: Visible) -> None:
        epoch = _epoch(1)
        with _open(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            opened.write_batch(TOPIC, rows(0))
            assert _shown(visible) == [], "rows are visible after write_batch"
            opened.flush()
            assert _shown(visible) == [], "rows are visible after flush"
            receipt = opened.pre_commit(epoch)
        assert _shown(visible) == [], "rows are visible after pre_commit"
        _commit(sink, epoch, [receipt])
        assert _ids(visible) == list(range(10))

    @needs("two_phase_commit")
    def test_a_receipt_names_the_topics_that_were_staged(self, sink: Sink) -> None:
        epoch = _epoch(1)
        with _open(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            for topic in (TOPIC, OTHER):
                opened.write_batch(topic, rows(0))
            assert set(opened.pre_commit(epoch).topics()) == {TOPIC, OTHER}

    @needs("two_phase_commit")
    def test_a_rollback_leaves_nothing_of_its_try(self, sink: Sink, visible: Visible, tmp_path: Path) -> None:
        epoch = _epoch(1)
        receipt = _stage(sink, epoch, rows(0))
        self._die_writing(sink, epoch)
        with _open(sink) as opened:
            opened.rollback_epoch(epoch, [receipt])
            opened.rollback_epoch(epoch, ())
        assert _shown(visible) == []
        assert not _files_of(tmp_path, epoch), "the rollback left staged files behind"
        again = _epoch(1)
        _commit(sink, again, [_stage(sink, again, rows(0))])
        assert _ids(visible) == list(range(10))

    @needs("two_phase_commit")
    def test_a_rollback_touches_no_other_try(self, sink: Sink, visible: Visible) -> None:
        mine, theirs = _epoch(1), _epoch(1)
        _stage(sink, mine, rows(0))
        receipt = _stage(sink, theirs, rows(0))
        with _open(sink) as opened:
            opened.rollback_epoch(mine, ())
        _commit(sink, theirs, [receipt])
        assert _ids(visible) == list(range(10)), "the rollback of one try removed what another one had staged"

    @needs("two_phase_commit")
    def test_a_rollback_touches_nothing_that_is_committed(self, sink: Sink, visible: Visible) -> None:
        _commit(sink, _epoch(1), [_stage(sink, _epoch(1), rows(0))])
        failed = _epoch(2)
        _stage(sink, failed, rows(10))
        with _open(sink) as opened:
            opened.rollback_epoch(failed, ())
        assert _ids(visible) == list(range(10))

    @needs("two_phase_commit")
    def test_a_task_that_dies_shows_nothing(self, sink: Sink, visible: Visible) -> None:
        epoch = _epoch(1)
        self._die_writing(sink, epoch)
        assert _shown(visible) == []
        _commit(sink, epoch, [_stage(sink, epoch, rows(0), task=1)])
        assert _ids(visible) == list(range(10)), "rows of a task without a receipt became visible"

    @needs("two_phase_commit")
    def test_a_sweep_keeps_what_the_receipts_name_and_removes_the_rest(
        self, sink: Sink, visible: Visible, tmp_path: Path
    ) -> None:
        failed, epoch = _epoch(1), _epoch(1)
        _stage(sink, failed, rows(0))
        kept = _stage(sink, epoch, rows(0))
        named = _files_of(tmp_path, epoch)
        _stage(sink, epoch, rows(0))  # a task that ran twice: only one of its receipts counts
        doubled = set(_files_of(tmp_path, epoch)) - set(named)
        _commit(sink, epoch, [kept])
        with _open(sink) as opened:
            for each in (failed, epoch, epoch):
                opened.sweep(each, [kept])
        assert _ids(visible) == list(range(10)), "the sweep removed rows that are committed"
        assert not _files_of(tmp_path, failed), "the sweep left files of a failed try behind"
        assert not doubled & set(_files_of(tmp_path, epoch)), "the sweep left files behind that no receipt names"

    # -- the second stage ----------------------------------------------------------------------------------------

    def test_work_is_small_and_what_it_gives_is_visible_to_nobody(self, sink: Sink, visible: Visible) -> None:
        planned = _planned(sink, _epoch(2))
        before = _shown(visible)
        for applied in planned.apply():
            again = sink.applied_type.model_validate(json.loads(canonical(applied.model_dump(mode="json"))))  # type: ignore[attr-defined]
            assert again == applied, "what `apply` gives does not survive the manifest"
        assert _shown(visible) == before, "work that is done shows before its commit"

    def test_work_that_is_done_is_committed_once(self, sink: Sink, visible: Visible) -> None:
        planned = _planned(sink, _epoch(2))
        applied = planned.apply()
        planned.commit(applied)
        shown = _shown(visible)
        assert [row for row in shown if row["id"] == 5], "the commit does not show what was applied"
        planned.commit(applied)
        assert _shown(visible) == shown, "a commit that ran twice was applied twice"
        with _open(sink) as opened:
            assert not opened.plan_apply(planned.epoch, TOPIC, planned.receipts), "there is work for a committed epoch"  # type: ignore[attr-defined]

    def test_a_plan_that_another_commit_overtook_is_stale(self, sink: Sink, visible: Visible) -> None:
        planned = _planned(sink, _epoch(2))
        applied = planned.apply()
        other = Epoch("another", "one", 1)
        _commit(sink, other, [_stage(sink, other, rows(50))])
        before = _shown(visible)
        with pytest.raises(PlanStale):
            planned.commit(applied)
        assert _shown(visible) == before, "a plan was committed on a version that it had not seen"
        _commit(sink, planned.epoch, planned.receipts)
        assert {row["id"] for row in _shown(visible)} >= set(range(5, 15)) | set(range(50, 60))

    def test_a_sweep_removes_the_work_of_a_dead_try_and_keeps_what_is_committed(
        self, sink: Sink, visible: Visible, tmp_path: Path
    ) -> None:
        planned = _planned(sink, _epoch(2))
        dead = replace(planned, epoch=_epoch(2))
        dead.apply()
        applied = planned.apply()
        planned.commit(applied)
        shown = _shown(visible)
        with _open(sink) as opened:
            opened.sweep(dead.epoch, applied)
            opened.sweep(planned.epoch, applied)
        assert _shown(visible) == shown, "the sweep removed rows that are committed"
        assert not _files_of(tmp_path, dead.epoch), "the sweep left files of a dead try"

    # -- exactly once --------------------------------------------------------------------------------------------

    @needs("exactly_once")
    def test_an_epoch_that_is_committed_twice_is_there_once(self, sink: Sink, visible: Visible) -> None:
        for number in (1, 2):
            epoch = _epoch(number)
            receipts = [_stage(sink, epoch, rows(number * 10))]
            with _open(sink) as opened:
                opened.commit_epoch(epoch, receipts, END)
                opened.commit_epoch(epoch, receipts, END)
            _commit(sink, epoch, receipts)
        assert _ids(visible) == list(range(10, 30)), "a commit that ran twice was applied twice"

    @needs("exactly_once")
    def test_another_try_at_a_committed_epoch_adds_nothing(self, sink: Sink, visible: Visible) -> None:
        for _ in range(2):
            epoch = _epoch(1)
            _commit(sink, epoch, [_stage(sink, epoch, rows(0))])
        assert _ids(visible) == list(range(10))

    @needs("exactly_once")
    def test_the_target_records_whose_epoch_it_holds_and_where_it_ended(self, sink: Sink) -> None:
        for number in (1, 2):
            epoch, end = _epoch(number), {"kit": {"index": number}, "@epoch": {"start": {}, "topics": {"a": ["/b"]}}}
            _commit(sink, epoch, [_stage(sink, epoch, rows(number * 10))], end)
            with _open(sink) as opened:
                marker = opened.committed_epoch("kit", TOPIC)
                assert isinstance(marker, CommittedEpoch), f"after epoch {number} the target records {marker!r}"
                assert (marker.incarnation, marker.number, marker.end) == ("one", number, end)
                assert opened.committed_epoch("kit", OTHER) is None, "a topic without rows has a marker"
                assert opened.committed_epoch("another pipeline", TOPIC) is None, (
                    "markers of two pipelines are mixed up"
                )

    @needs("exactly_once")
    def test_another_process_sees_the_same_marker(self, sink: Sink) -> None:
        _commit(sink, _epoch(3), [_stage(sink, _epoch(3), rows(0))])
        with _open(sink) as opened:
            here = opened.committed_epoch("kit", TOPIC)
        assert elsewhere(_marker, sink) == here is not None

    @needs("exactly_once")
    def test_every_topic_of_an_epoch_is_committed(self, sink: Sink, visible: Visible) -> None:
        epoch = _epoch(1)
        with _open(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            opened.write_batch(TOPIC, rows(0))
            opened.write_batch(OTHER, rows(50))
            receipt = opened.pre_commit(epoch)
        _commit(sink, epoch, [receipt, _stage(sink, epoch, rows(60), topic=OTHER, task=1)])
        with _open(sink) as opened:
            markers = [opened.committed_epoch("kit", topic) for topic in (TOPIC, OTHER)]
        assert [marker and marker.number for marker in markers] == [1, 1]
        if inspect.signature(visible).parameters:
            assert _ids(visible) == list(range(10))
            assert _ids(visible, OTHER) == list(range(50, 70))

    @needs("exactly_once")
    def test_a_commit_of_an_older_epoch_is_fenced(self, sink: Sink, visible: Visible) -> None:
        late = _epoch(1)
        receipts = [_stage(sink, late, rows(90))]
        with _open(sink) as zombie:
            zombie.committed_epoch("kit", TOPIC)
            for number in (1, 2):
                _commit(sink, _epoch(number), [_stage(sink, _epoch(number), rows(number * 10))])
            _must_be_refused(zombie, late, receipts)
        assert _ids(visible) == list(range(10, 30))

    @needs("exactly_once")
    def test_another_incarnation_is_fenced_unless_it_adopts_the_marker(self, sink: Sink, visible: Visible) -> None:
        _commit(sink, _epoch(500), [_stage(sink, _epoch(500), rows(0))])
        stranger = _epoch(1, "two")
        with _open(sink) as opened:
            _must_be_refused(opened, stranger, [_stage(sink, stranger, rows(90))])
        heir = _epoch(1, "two", adopts=frozenset({("one", 500)}))
        _commit(sink, heir, [_stage(sink, heir, rows(10))])
        zombie = _epoch(501)
        with _open(sink) as opened:
            marker = opened.committed_epoch("kit", TOPIC)
            assert marker is not None
            assert (marker.incarnation, marker.number) == ("two", 1)
            _must_be_refused(opened, zombie, [_stage(sink, zombie, rows(90))])
        assert _ids(visible) == list(range(20))

    @needs("exactly_once")
    @pytest.mark.parametrize("rival", ["the same epoch", "another incarnation", "a later incarnation"])
    def test_of_two_commits_that_race_one_wins(
        self, sink: Sink, visible: Visible, monkeypatch: pytest.MonkeyPatch, rival: str
    ) -> None:
        """The second one runs from its start to its end at the very point where the first would become visible."""
        first = 0
        epoch = _epoch(5)
        other = {"the same epoch": _epoch(5), "another incarnation": _epoch(5, "two")}.get(rival)
        if other is None:
            _commit(sink, _epoch(4), [_stage(sink, _epoch(4), rows(0))])
            first, other = 10, _epoch(1, "two", adopts=frozenset({("one", 4)}))
        theirs = [_stage(sink, other, rows(first))]
        receipts = [_stage(sink, epoch, rows(first))]
        race = _Race(lambda: _commit(sink, other, theirs))
        monkeypatch.setattr(failpoints, "hit", race.hit)
        with _open(sink) as opened:
            lost = _refusal(opened, epoch, receipts)
            assert race.run, "the commit never passed failpoints.hit('commit.before')"
            race.join()
            if lost is not None and not isinstance(lost, Fenced):
                lost = _refusal(opened, epoch, receipts)  # it asked to be called again
            won = [each for each, error in (("first", lost), ("second", race.error)) if error is None]
        assert _ids(visible) == list(range(first + 10)), f"won: {won}"
        assert len(won) == 1 or rival == "the same epoch", f"of two commits that exclude each other these won: {won}"

    @needs("exactly_once", "two_phase_commit")
    def test_staged_data_that_is_gone_is_reported_as_lost(
        self, sink: Sink, visible: Visible, lose_staged: Callable[[Sequence[Receipt]], None] | None
    ) -> None:
        if lose_staged is None:
            pytest.skip("staged data cannot be lost on its own")
        epoch = _epoch(1)
        receipts = [_stage(sink, epoch, rows(0))]
        lose_staged(receipts)
        with _open(sink) as opened:
            with pytest.raises(StagingLost):
                opened.commit_epoch(epoch, receipts, END)
            assert opened.committed_epoch("kit", TOPIC) is None, "an epoch whose rows are gone is marked as committed"
        again = _epoch(1)
        _commit(sink, again, [_stage(sink, again, rows(0))])
        assert _ids(visible) == list(range(10))

    # -- durable means fsync -------------------------------------------------------------------------------------

    @needs("two_phase_commit")
    def test_what_is_staged_is_synced_before_the_receipt(
        self, sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = Synced(tmp_path, monkeypatch)
        _stage(sink, _epoch(1), rows(0))
        synced.check()

    @needs("two_phase_commit")
    def test_what_is_committed_is_synced_before_commit_returns(
        self, sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced = Synced(tmp_path, monkeypatch)
        for number in (1, 2):
            epoch = _epoch(number)
            _commit(sink, epoch, [_stage(sink, epoch, rows(number * 10))])
            synced.check()

    # -- what else a sink may promise ----------------------------------------------------------------------------

    @needs("idempotent")
    def test_a_row_that_comes_twice_is_there_once(self, sink: Sink, visible: Visible) -> None:
        for number in (1, 2):
            epoch = _epoch(number)
            _commit(sink, epoch, [_stage(sink, epoch, rows(0), rows(0))])
        assert _shown(visible) == rows(0).to_pylist()

    @needs("upsert")
    def test_the_newest_row_of_a_key_stays(self, sink: Sink, visible: Visible) -> None:
        _commit(sink, _epoch(1), [_stage(sink, _epoch(1), rows(0), rows(5, name="newer"))])
        _commit(sink, _epoch(2), [_stage(sink, _epoch(2), rows(8, name="newest"))])
        names = [row["name"] for row in _shown(visible)]
        assert names == [f"row {id}" for id in range(5)] + ["newer"] * 3 + ["newest"] * 10

    @needs("changelog")
    def test_changes_are_applied_by_upsert_sinks_and_kept_by_others(self, sink: Sink, visible: Visible) -> None:
        first, second = [("c", 1, "new"), ("c", 2, "new"), ("u", 1, "changed")], [("d", 2, None), ("c", 3, "new")]
        for number, changes in ((1, first), (2, second)):
            epoch = _epoch(number)
            _commit(sink, epoch, [_stage(sink, epoch, _changes(changes, number))])
        found = as_rows(_call(visible, TOPIC))
        if sink.capabilities.upsert:
            assert sorted((row["id"], row["name"]) for row in found) == [(1, "changed"), (3, "new")]
        else:
            shown = [(row["_op"], row["id"], row["name"]) for row in found]
            assert sorted(shown, key=str) == sorted([*first, *second], key=str), "a change got lost or was altered"

    @needs("upsert", "changelog")
    def test_changes_are_applied_in_the_order_of_their_positions(self, sink: Sink, visible: Visible) -> None:
        """Whatever task they come through; also a row that is deleted and comes back."""
        _apply(sink, 1, [("c", 1, "old"), ("c", 2, "old"), ("c", 3, "old")])
        late, early = (
            _changes([("u", 1, "last"), ("c", 2, "back")], 2, first=5),
            _changes([("u", 1, "x"), ("d", 2, None)], 2),
        )
        epoch = _epoch(2)
        _commit(sink, epoch, [_stage(sink, epoch, late, task=0), _stage(sink, epoch, early, task=1)])
        assert _by_id(visible, "name") == {1: "last", 2: "back", 3: "old"}

    @needs("upsert", "changelog")
    def test_a_truncate_empties_the_target_of_what_came_before_it(self, sink: Sink, visible: Visible) -> None:
        _apply(sink, 1, [("c", 1, "old"), ("c", 2, "old")])
        _apply(sink, 2, [("c", 3, "void"), ("t", None, None), ("c", 2, "new")])
        assert _by_id(visible, "name") == {2: "new"}
        _apply(sink, 3, [("t", None, None)])
        assert _by_id(visible, "name") == {}

    @needs("upsert", "changelog")
    def test_a_column_that_is_unchanged_keeps_its_value(self, sink: Sink, visible: Visible) -> None:
        """The stored one, or that of an earlier change of the epoch; a row that is new has none."""
        _apply(sink, 1, [("c", 1, "old"), ("c", 2, "old"), ("c", 3, "old")])
        kept = {"_unchanged": ["name"]}
        _apply(
            sink, 2, [("u", 1, None, kept), ("u", 2, "new"), ("u", 2, None, kept), ("d", 3, None), ("c", 3, None, kept)]
        )
        _apply(sink, 3, [("u", 1, None, kept)])
        assert _by_id(visible, "name") == {1: "old", 2: "new", 3: None}

    @needs("upsert", "changelog")
    def test_a_row_whose_key_changes_moves_with_what_was_not_sent(self, sink: Sink, visible: Visible) -> None:
        """Two rows swap their keys over a third one; another moves twice, in two epochs."""

        def move(old: int, new: int) -> tuple[Any, ...]:
            return ("u", new, None, {"_unchanged": ["name"], "_old_key": pack_key({"id": old})})

        _apply(sink, 1, [("c", 1, "one"), ("c", 2, "two"), ("c", 7, "seven")])
        _apply(sink, 2, [move(1, 3), move(2, 1), move(3, 2), move(7, 8)])
        _apply(sink, 3, [move(8, 9), ("c", 8, "eight")])
        assert _by_id(visible, "name") == {1: "two", 2: "one", 8: "eight", 9: "seven"}

    @needs("upsert", "changelog")
    def test_a_column_that_a_change_does_not_know_keeps_its_value(self, sink: Sink, visible: Visible) -> None:
        def with_note(batch: pa.RecordBatch, notes: Sequence[str | None]) -> pa.RecordBatch:
            return batch.append_column("note", pa.array(notes, pa.string()))

        epoch = _epoch(1)
        _commit(sink, epoch, [_stage(sink, epoch, with_note(_changes([("c", 1, "a"), ("c", 2, "b")], 1), ["x", "y"]))])
        _apply(sink, 2, [("u", 1, "c"), ("c", 3, "d")])
        epoch = _epoch(3)
        older, newer = _changes([("u", 2, "e")], 3), with_note(_changes([("c", 4, "f")], 3, first=1), ["z"])
        _commit(sink, epoch, [_stage(sink, epoch, older, newer)])
        assert _by_id(visible, "note") == {1: "x", 2: "y", 3: None, 4: "z"}

    @needs("schema_evolution")
    def test_a_column_that_is_added_is_null_in_older_rows(self, sink: Sink, visible: Visible) -> None:
        wider = rows(10).append_column("note", pa.array(["x"] * 10))
        for number, batch in ((1, rows(0)), (2, wider), (3, rows(20))):
            _commit(sink, _epoch(number), [_stage(sink, _epoch(number), batch)])
        notes = [row["note"] for row in _shown(visible, columns=("id", "note"))]
        assert notes == [None] * 10 + ["x"] * 10 + [None] * 10

    @needs("schema_evolution")
    def test_a_column_of_another_type_is_refused_by_its_name(self, sink: Sink, visible: Visible) -> None:
        _commit(sink, _epoch(1), [_stage(sink, _epoch(1), rows(0))])
        other = rows(10).set_column(1, "name", pa.array([[1]] * 10, pa.list_(pa.int64())))
        with pytest.raises(SchemaError, match="name"):
            _commit(sink, _epoch(2), [_stage(sink, _epoch(2), other)])
        assert _ids(visible) == list(range(10))

    @needs("schema_evolution")
    @pytest.mark.parametrize(("narrow", "wide"), WIDER, ids=lambda each: str(each.type))
    def test_a_type_that_becomes_wider_is_followed_or_refused_by_its_name(
        self, sink: Sink, visible: Visible, narrow: pa.Scalar, wide: pa.Scalar
    ) -> None:
        refused: SchemaError | None = None
        for number, value in enumerate((narrow, wide, narrow), 1):
            batch = rows(10 * number).append_column("value", pa.repeat(value, 10))
            try:
                _commit(sink, _epoch(number), [_stage(sink, _epoch(number), batch)])
            except SchemaError as error:
                refused = error
        values = [narrow, narrow] if refused else [narrow.cast(wide.type), wide, narrow.cast(wide.type)]
        shown = [row["value"] for row in _shown(visible, columns=("id", "value"))]
        assert shown == [each.as_py() for each in values for _ in range(10)]
        assert refused is None or "value" in str(refused)

    @needs("schema_evolution")
    def test_freeze_refuses_a_new_column_and_names_itself(self, sink: Sink, visible: Visible) -> None:
        sink = _with_policy(sink, Policy.FREEZE)
        _commit(sink, _epoch(1), [_stage(sink, _epoch(1), rows(0))])
        with pytest.raises(SchemaError, match=r"(?s)note.*freeze"):
            _commit(sink, _epoch(2), [_stage(sink, _epoch(2), _noted(10))])
        assert _ids(visible) == list(range(10))

    @needs("schema_evolution")
    def test_discard_row_leaves_out_what_has_no_place_and_counts_it(self, sink: Sink, visible: Visible) -> None:
        sink = _with_policy(sink, Policy.DISCARD_ROW)
        _commit(sink, _epoch(1), [_stage(sink, _epoch(1), rows(0))])
        assert _discarded(sink, _epoch(2), _noted(10)) == (5, 5)
        _commit(sink, _epoch(2), [_stage(sink, _epoch(2), _noted(10))])
        assert _ids(visible) == [*range(10), *range(11, 20, 2)]

    @needs("schema_evolution")
    def test_discard_value_keeps_the_row_without_it_and_counts_it(self, sink: Sink, visible: Visible) -> None:
        sink = _with_policy(sink, Policy.DISCARD_VALUE)
        _commit(sink, _epoch(1), [_stage(sink, _epoch(1), rows(0))])
        assert _discarded(sink, _epoch(2), _noted(10)) == (10, 5)
        _commit(sink, _epoch(2), [_stage(sink, _epoch(2), _noted(10))])
        assert _ids(visible) == list(range(20))
        assert all("note" not in row for row in as_rows(_call(visible, TOPIC)))

    @needs("partitioned")
    def test_rows_laid_out_by_a_column_come_back_whole(self, partitioned_sink: Sink, visible: Visible) -> None:
        parts = ["plain", "a b/c=d%é", None, "..", "plain"] * 4
        batch = rows(0, 20).set_column(2, "part", pa.array(parts))
        epoch = _epoch(1)
        _commit(partitioned_sink, epoch, [_stage(partitioned_sink, epoch, batch)])
        assert _shown(visible) == batch.to_pylist()

    def _die_writing(self, sink: Sink, epoch: Epoch) -> None:
        """A task that takes rows and never gets to its receipt."""
        with _open(sink) as opened:
            opened.begin_epoch(epoch, Task(7))
            opened.write_batch(TOPIC, rows(70))
            opened.flush()


class Synced:
    """Records what is fsynced below a directory, and tells what is not."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._before = self._entries()
        self._files: dict[tuple[int, int], tuple[int, int]] = {}
        self._names: dict[tuple[int, int], set[str]] = {}
        for call in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, call, self._recording(getattr(os, call)))

    def check(self) -> None:
        """Every new file is synced as it is now, and its name in the directory that holds it."""
        new = {path for path in self._entries() - self._before if not is_hidden(path, self._root)}
        files = [path for path in new if path.is_file() and path.stat().st_size]
        if not files:
            pytest.skip("the sink writes no local files")
        for path in sorted(files):
            found = path.stat()
            synced = self._files.get((found.st_dev, found.st_ino))
            assert synced == (found.st_size, found.st_mtime_ns), (
                f"{path} was {'never fsynced' if synced is None else 'written to after its fsync'}: "
                "a power cut would leave the promise without the rows"
            )
        for path in sorted(each for file in files for each in (file, *file.parents) if each in new):
            directory = path.parent.stat()
            assert path.name in self._names.get((directory.st_dev, directory.st_ino), ()), (
                f"{path.parent} was not fsynced after {path.name} appeared in it: a power cut would leave no such name"
            )

    def _entries(self) -> set[Path]:
        return set(self._root.rglob("*"))

    def _recording(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def record(descriptor: Any) -> None:
            sync(descriptor)
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            found, path = os.fstat(number), f"/proc/self/fd/{number}"
            key = (found.st_dev, found.st_ino)
            if os.path.isdir(path):
                self._names[key] = set(os.listdir(path))
            else:
                self._files[key] = (found.st_size, found.st_mtime_ns)

        return record


class _Race:
    """Runs a rival once, from start to end, when `commit.before` is first passed; or beside it, if it has to wait."""

    def __init__(self, rival: Callable[[], None]) -> None:
        self.run = False
        self.error: Exception | None = None
        self._rival = rival
        self._thread = threading.Thread(target=self._go, daemon=True)

    def hit(self, name: str) -> None:
        if name == "commit.before" and not self.run:
            self.run = True
            self._thread.start()
            self._thread.join(2)  # a sink that locks its target makes the rival wait for us

    def join(self) -> None:
        self._thread.join(PATIENCE_SECS)
        assert not self._thread.is_alive(), "a rival commit never came back"

    def _go(self) -> None:
        try:
            self._rival()
        except (Fenced, RetryableError) as error:
            self.error = error


def rows(first: int, count: int = 10, name: str | None = None) -> pa.RecordBatch:
    """The rows that the contract writes: `id` is their key."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("part", pa.string())])
    ids = range(first, first + count)
    names = [name or f"row {id}" for id in ids]
    return pa.record_batch([list(ids), names, [f"part {id % 3}" for id in ids]], schema=with_key(schema, ["id"]))


def _changes(changes: Sequence[tuple[Any, ...]], epoch: int, first: int = 0) -> pa.RecordBatch:
    """Changes as (op, id, name, more columns); `first` is the place of the first of them in the epoch."""
    schema = with_key(pa.schema([("id", pa.int64()), ("name", pa.string()), *CHANGE_FIELDS]), ["id"])
    found = [
        {"id": id, "name": name, "_op": op, "_position": f"{epoch:04d}/{place:04d}", **(more[0] if more else {})}
        for place, (op, id, name, *more) in enumerate(changes, first)
    ]
    return pa.RecordBatch.from_pylist(found, schema=schema)


def _apply(sink: Sink, number: int, changes: Sequence[tuple[Any, ...]]) -> None:
    epoch = _epoch(number)
    _commit(sink, epoch, [_stage(sink, epoch, _changes(changes, number))])


def _by_id(visible: Visible, column: str) -> dict[int, Any]:
    """A column's values; a key that is there twice is a failure."""
    found = as_rows(_call(visible, TOPIC))
    shown = {row["id"]: row.get(column) for row in found}
    assert len(shown) == len(found), f"a key is there twice: {sorted(row['id'] for row in found)}"
    return shown


def _epoch(number: int, incarnation: str = "one", **more: Any) -> Epoch:
    return Epoch("kit", incarnation, number, **more)


@contextlib.contextmanager
def _open(sink: Sink, context: SinkContext = SinkContext()) -> Iterator[Sink]:
    """A copy of the sink as another process gets it, open."""
    copy: Sink = pickle.loads(pickle.dumps(sink))
    copy.open(context)
    try:
        yield copy
    finally:
        copy.close()


def _stage(
    sink: Sink, epoch: Epoch, *batches: pa.RecordBatch, topic: Topic = TOPIC, task: int = 0, through_json: bool = True
) -> Receipt:
    """One task from its start to its receipt, which then is as the manifest keeps it."""
    with _open(sink) as opened:
        opened.begin_epoch(epoch, Task(task))
        for batch in batches:
            opened.write_batch(topic, batch)
        receipt: Receipt = opened.pre_commit(epoch)
    if not through_json:
        return receipt
    return sink.receipt_type.model_validate(json.loads(canonical(receipt.model_dump(mode="json"))))


def _commit(sink: Sink, epoch: Epoch, receipts: Sequence[Receipt], end: Any = None) -> None:
    with _open(sink) as opened:
        opened.commit_epoch(epoch, receipts, END if end is None else end)


@dataclass(frozen=True)
class _Planned:
    """An epoch that is staged, after one that is committed, and the second stage of its commit."""

    sink: Sink
    epoch: Epoch
    receipts: Sequence[Receipt]

    def apply(self) -> list[Applied]:
        with _open(self.sink) as driver:
            work = driver.plan_apply(self.epoch, TOPIC, self.receipts)  # type: ignore[attr-defined]
        if not work:
            pytest.skip("there is no work in a second epoch of the same keys")
        assert len(pickle.dumps(work)) < 100_000, "work is to say what must be done, not to carry the rows"
        with _open(self.sink) as task:
            return [task.apply(self.epoch, each, Task(number)) for number, each in enumerate(work)]  # type: ignore[attr-defined]

    def commit(self, applied: Sequence[Applied]) -> None:
        with _open(self.sink) as driver:
            driver.commit_applied(self.epoch, TOPIC, self.receipts, END, applied)  # type: ignore[attr-defined]


def _planned(sink: Sink, epoch: Epoch) -> _Planned:
    if not has_second_stage(sink):
        pytest.skip("the sink has no second stage")
    first = _epoch(1)
    _commit(sink, first, [_stage(sink, first, rows(0))])
    return _Planned(sink, replace(epoch, attempt=uuid4().hex[:8]), [_stage(sink, epoch, rows(5))])


def _with_policy(sink: Sink, policy: Policy) -> Sink:
    if not isinstance(sink.config, EvolutionConfig):
        pytest.skip("the sink has no option `schema_evolution`")
    return type(sink)(sink.config.model_copy(update={"schema_evolution": policy}))


def _noted(first: int) -> pa.RecordBatch:
    """Ten rows with a column more, and a value in it for every other row, the first among them."""
    return rows(first).append_column("note", pa.array(["x", None] * 5))


def _discarded(sink: Sink, epoch: Epoch, batch: pa.RecordBatch) -> tuple[int, int]:
    """How many rows a sink says it has taken, and how many lost something; in a try that goes no further."""
    with _open(sink) as opened:
        opened.begin_epoch(epoch, Task(5))
        written = opened.write_batch(TOPIC, batch)
        return written.records_written, written.records_discarded


def _marker(sink: Sink) -> CommittedEpoch | None:
    with _open(sink) as opened:
        return opened.committed_epoch("kit", TOPIC)


def _refusal(sink: Sink, epoch: Epoch, receipts: Sequence[Receipt]) -> Fenced | RetryableError | None:
    try:
        sink.commit_epoch(epoch, receipts, END)
    except (Fenced, RetryableError) as error:
        return error
    return None


def _must_be_refused(sink: Sink, epoch: Epoch, receipts: Sequence[Receipt]) -> None:
    error = _refusal(sink, epoch, receipts)
    if error is not None and not isinstance(error, Fenced):
        error = _refusal(sink, epoch, receipts)  # it asked to be called again
    assert isinstance(error, Fenced), f"{epoch} of {epoch.incarnation} was not fenced: {error}"


def _call(visible: Visible, topic: Topic) -> Any:
    return visible(topic) if inspect.signature(visible).parameters else visible()


def _shown(
    visible: Visible, topic: Topic = TOPIC, columns: Sequence[str] = ("id", "name", "part")
) -> list[dict[str, Any]]:
    found = sorted(as_rows(_call(visible, topic)), key=lambda row: int(row["id"]))
    return [{column: row[column] for column in columns} for row in found]


def _ids(visible: Visible, topic: Topic = TOPIC) -> list[int]:
    return [row["id"] for row in _shown(visible, topic, ("id",))]


def _files_of(root: Path, epoch: Epoch) -> list[Path]:
    """The files of one try: staged names carry it."""
    return [path for path in root.rglob(f"*{epoch.attempt}*") if path.is_file() and not is_hidden(path, root)]


def _delete_named(root: Path, receipts: Sequence[Receipt]) -> None:
    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list):
            for each in value:
                yield from texts(each)
        elif isinstance(value, str) and value:
            yield value

    named = {Path(text).name for receipt in receipts for text in texts(receipt.model_dump(mode="json"))}
    found = [path for path in root.rglob("*") if path.is_file() and not is_hidden(path, root)]
    lost = [path for path in found if any(path.name.startswith(name) for name in named - {""})]
    assert lost, "no file that a receipt names was found: give the contract a fixture `lose_staged(receipts)`"
    for path in lost:
        path.unlink()
