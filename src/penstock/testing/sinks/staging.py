"""Laws of staging: what is visible before a commit, and what a failed try leaves."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.durable import canonical
from penstock.errors import PlanStale
from penstock.sink import (
    Applied,
    Epoch,
    Receipt,
    Task,
    has_second_stage,
)
from penstock.testing.crash.stage import is_hidden
from penstock.testing.sinks.steps import (
    END,
    OTHER,
    TOPIC,
    Sink,
    Visible,
    commit,
    epoch_of,
    ids_of,
    needs,
    opened_sink,
    rows,
    stage,
    visible_rows,
)


class TwoPhaseLaws:
    """Staged rows are visible to nobody, and a failed try leaves nothing."""

    @needs("two_phase_commit")
    def test_nothing_is_visible_before_the_commit(self, sink: Sink, visible: Visible) -> None:
        epoch = epoch_of(1)
        with opened_sink(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            opened.write_batch(TOPIC, rows(0))
            assert visible_rows(visible) == [], "rows are visible after write_batch"
            opened.flush()
            assert visible_rows(visible) == [], "rows are visible after flush"
            receipt = opened.pre_commit(epoch)
        assert visible_rows(visible) == [], "rows are visible after pre_commit"
        commit(sink, epoch, [receipt])
        assert ids_of(visible) == list(range(10))

    @needs("two_phase_commit")
    def test_a_receipt_names_the_topics_that_were_staged(self, sink: Sink) -> None:
        epoch = epoch_of(1)
        with opened_sink(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            for topic in (TOPIC, OTHER):
                opened.write_batch(topic, rows(0))
            assert set(opened.pre_commit(epoch).topics()) == {TOPIC, OTHER}

    @needs("two_phase_commit")
    def test_a_rollback_leaves_nothing_of_its_try(self, sink: Sink, visible: Visible, tmp_path: Path) -> None:
        epoch = epoch_of(1)
        receipt = stage(sink, epoch, rows(0))
        self._die_writing(sink, epoch)
        with opened_sink(sink) as opened:
            opened.rollback_epoch(epoch, [receipt])
            opened.rollback_epoch(epoch, ())
        assert visible_rows(visible) == []
        assert not _files_of(tmp_path, epoch), "the rollback left staged files behind"
        again = epoch_of(1)
        commit(sink, again, [stage(sink, again, rows(0))])
        assert ids_of(visible) == list(range(10))

    @needs("two_phase_commit")
    def test_a_rollback_touches_no_other_try(self, sink: Sink, visible: Visible) -> None:
        mine, theirs = epoch_of(1), epoch_of(1)
        stage(sink, mine, rows(0))
        receipt = stage(sink, theirs, rows(0))
        with opened_sink(sink) as opened:
            opened.rollback_epoch(mine, ())
        commit(sink, theirs, [receipt])
        assert ids_of(visible) == list(range(10)), "the rollback of one try removed what another one had staged"

    @needs("two_phase_commit")
    def test_a_rollback_touches_nothing_that_is_committed(self, sink: Sink, visible: Visible) -> None:
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0))])
        failed = epoch_of(2)
        stage(sink, failed, rows(10))
        with opened_sink(sink) as opened:
            opened.rollback_epoch(failed, ())
        assert ids_of(visible) == list(range(10))

    @needs("two_phase_commit")
    def test_a_task_that_dies_shows_nothing(self, sink: Sink, visible: Visible) -> None:
        epoch = epoch_of(1)
        self._die_writing(sink, epoch)
        assert visible_rows(visible) == []
        commit(sink, epoch, [stage(sink, epoch, rows(0), task=1)])
        assert ids_of(visible) == list(range(10)), "rows of a task without a receipt became visible"

    @needs("two_phase_commit")
    def test_a_sweep_keeps_what_the_receipts_name_and_removes_the_rest(
        self, sink: Sink, visible: Visible, tmp_path: Path
    ) -> None:
        failed, epoch = epoch_of(1), epoch_of(1)
        stage(sink, failed, rows(0))
        kept = stage(sink, epoch, rows(0))
        named = _files_of(tmp_path, epoch)
        stage(sink, epoch, rows(0))  # a task that ran twice: only one of its receipts counts
        doubled = set(_files_of(tmp_path, epoch)) - set(named)
        commit(sink, epoch, [kept])
        with opened_sink(sink) as opened:
            for each in (failed, epoch, epoch):
                opened.sweep(each, [kept])
        assert ids_of(visible) == list(range(10)), "the sweep removed rows that are committed"
        assert not _files_of(tmp_path, failed), "the sweep left files of a failed try behind"
        assert not doubled & set(_files_of(tmp_path, epoch)), "the sweep left files behind that no receipt names"

    def _die_writing(self, sink: Sink, epoch: Epoch) -> None:
        """A task that takes rows and never gets to its receipt."""
        with opened_sink(sink) as opened:
            opened.begin_epoch(epoch, Task(7))
            opened.write_batch(TOPIC, rows(70))
            opened.flush()


class SecondStageLaws:
    """Work between `prepared` and the commit, for sinks that plan some."""

    def test_work_is_small_and_what_it_gives_is_visible_to_nobody(self, sink: Sink, visible: Visible) -> None:
        planned = _planned(sink, epoch_of(2))
        before = visible_rows(visible)
        for applied in planned.apply():
            again = sink.applied_type.model_validate(json.loads(canonical(applied.model_dump(mode="json"))))  # type: ignore[attr-defined]
            assert again == applied, "what `apply` gives does not survive the manifest"
        assert visible_rows(visible) == before, "work that is done shows before its commit"

    def test_work_that_is_done_is_committed_once(self, sink: Sink, visible: Visible) -> None:
        planned = _planned(sink, epoch_of(2))
        applied = planned.apply()
        planned.commit(applied)
        shown = visible_rows(visible)
        assert [row for row in shown if row["id"] == 5], "the commit does not show what was applied"
        planned.commit(applied)
        assert visible_rows(visible) == shown, "a commit that ran twice was applied twice"
        with opened_sink(sink) as opened:
            assert not opened.plan_apply(planned.epoch, TOPIC, planned.receipts), "there is work for a committed epoch"  # type: ignore[attr-defined]

    def test_a_plan_that_another_commit_overtook_is_stale(self, sink: Sink, visible: Visible) -> None:
        planned = _planned(sink, epoch_of(2))
        applied = planned.apply()
        other = Epoch("another", "one", 1)
        commit(sink, other, [stage(sink, other, rows(50))])
        before = visible_rows(visible)
        with pytest.raises(PlanStale):
            planned.commit(applied)
        assert visible_rows(visible) == before, "a plan was committed on a version that it had not seen"
        commit(sink, planned.epoch, planned.receipts)
        assert {row["id"] for row in visible_rows(visible)} >= set(range(5, 15)) | set(range(50, 60))

    def test_a_sweep_removes_the_work_of_a_dead_try_and_keeps_what_is_committed(
        self, sink: Sink, visible: Visible, tmp_path: Path
    ) -> None:
        planned = _planned(sink, epoch_of(2))
        dead = replace(planned, epoch=epoch_of(2))
        dead.apply()
        applied = planned.apply()
        planned.commit(applied)
        shown = visible_rows(visible)
        with opened_sink(sink) as opened:
            opened.sweep(dead.epoch, applied)
            opened.sweep(planned.epoch, applied)
        assert visible_rows(visible) == shown, "the sweep removed rows that are committed"
        assert not _files_of(tmp_path, dead.epoch), "the sweep left files of a dead try"


@dataclass(frozen=True)
class _Planned:
    """An epoch that is staged, after one that is committed, and the second stage of its commit."""

    sink: Sink
    epoch: Epoch
    receipts: Sequence[Receipt]

    def apply(self) -> list[Applied]:
        with opened_sink(self.sink) as driver:
            work = driver.plan_apply(self.epoch, TOPIC, self.receipts)  # type: ignore[attr-defined]
        if not work:
            pytest.skip("there is no work in a second epoch of the same keys")
        assert len(pickle.dumps(work)) < 100_000, "work is to say what must be done, not to carry the rows"
        with opened_sink(self.sink) as task:
            return [task.apply(self.epoch, each, Task(number)) for number, each in enumerate(work)]  # type: ignore[attr-defined]

    def commit(self, applied: Sequence[Applied]) -> None:
        with opened_sink(self.sink) as driver:
            driver.commit_applied(self.epoch, TOPIC, self.receipts, END, applied)  # type: ignore[attr-defined]


def _planned(sink: Sink, epoch: Epoch) -> _Planned:
    if not has_second_stage(sink):
        pytest.skip("the sink has no second stage")
    first = epoch_of(1)
    commit(sink, first, [stage(sink, first, rows(0))])
    return _Planned(sink, replace(epoch, attempt=uuid4().hex[:8]), [stage(sink, epoch, rows(5))])


def _files_of(root: Path, epoch: Epoch) -> list[Path]:
    """The files of one try: staged names carry it."""
    return [path for path in root.rglob(f"*{epoch.attempt}*") if path.is_file() and not is_hidden(path, root)]
