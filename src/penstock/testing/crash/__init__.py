"""The crash suite: kill a run at every step of the protocol, start it again, and compare with what must be there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.sink import SinkConnector, Topic, TopicSink, has_second_stage
from penstock.testing.crash.applying import SecondStageCrashes
from penstock.testing.crash.scenarios import (
    failing,
    hanging,
    killed,
    killed_in_threads,
    killed_twice,
    staging_lost,
    started_over,
    state_lost,
    state_lost_twice,
    zombie_after,
    zombie_level,
    zombie_of_lost_state,
    zombie_task,
)
from penstock.testing.crash.stage import Rows, Stage, is_hidden
from penstock.testing.processes import submit

STEPS = [
    "plan.before", "plan.after", "stage.begin", "stage.middle", "stage.middle@3", "stage.task", "stage.after",
    "prepare.after", "commit.before", "commit.before@2", "commit.before@3", "commit.before@4", "commit.topic",
    "commit.topic@2", "commit.sink", "commit.sink@2", "commit.after", "committed.after", "ack.after",
]  # fmt: skip
"""Every failpoint of the protocol; `@n` is its nth pass in one epoch of two topics and two sinks."""


class CrashContract(SecondStageCrashes):
    """
    The crash suite of an exactly-once sink: a test class with two methods, at the top of its module.

    Runs two sinks with two topics each through three epochs, in processes that are killed, stopped and woken. A sink
    that promises upsert and changelog gets changes, which are wrong when one is lost or applied out of its order.
    """

    commits_without_work = True
    """False for a sink with a second stage in which every epoch has work."""

    zygote = False
    """True for a sink whose clients do not survive a fork: tasks are forked from a process that never opens one."""

    stored = False
    """True to keep the state in a store: every run begins in a directory of its own, as on another machine."""

    ordered = False
    """True when `visible` shows rows in the order they came."""

    whole_epochs = True
    """False for a sink that publishes an epoch in parts (`plan_epoch`): a crash may show some of them."""

    def make_sink(self, path: Path) -> SinkConnector[Any, Any]:
        """A sink that is not open, with a target of its own at (or named after) `path`."""
        raise NotImplementedError

    def visible(self, path: Path, topic: Topic) -> Rows:
        """The rows of a topic that a reader of the target made for `path` sees now; none if there is no target yet."""
        raise NotImplementedError

    def lose_staged(self, path: Path) -> None:
        """Delete data that is staged and not committed; by default every file whose name tells of the second epoch."""
        lost = [file for file in path.rglob("*000000000002-*") if file.is_file() and not is_hidden(file, path)]
        assert lost, f"no staged file of epoch 2 below {path}: override lose_staged"
        for file in lost:
            file.unlink()

    def empty(self, path: Path) -> None:
        """Empty the target, as a person does who starts over."""
        shutil.rmtree(path)

    # -- killed at every step ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("epoch", [1, 2])
    @pytest.mark.parametrize("step", STEPS)
    def test_a_run_that_is_killed_loses_and_doubles_nothing(self, tmp_path: Path, step: str, epoch: int) -> None:
        self._skip_unreachable(step, tmp_path)
        self._play(killed, tmp_path, step, epoch)

    @pytest.mark.parametrize("step", ["commit.before", "commit.before@3", "commit.after"])
    def test_commits_at_the_same_time_can_be_killed(self, tmp_path: Path, step: str) -> None:
        if not self.make_sink(tmp_path).concurrent:
            pytest.skip("the sink commits one topic after the other")
        self._play(killed_in_threads, tmp_path, step)

    @pytest.mark.parametrize("second", ["stage.task", "commit.before@2", "commit.after", "ack.after"])
    @pytest.mark.parametrize("first", ["stage.middle", "prepare.after", "commit.sink"])
    def test_a_recovery_that_is_killed_loses_and_doubles_nothing(self, tmp_path: Path, first: str, second: str) -> None:
        self._play(killed_twice, tmp_path, first, second)

    # -- answers that get lost, sinks that refuse ----------------------------------------------------------------

    @pytest.mark.parametrize(
        "method",
        [
            "begin_epoch",
            "write_batch",
            "pre_commit",
            "plan_apply",
            "apply",
            "commit_applied",
            "commit_topic",
            "commit_epoch",
            "rollback_epoch",
        ],
    )
    @pytest.mark.parametrize("kind", ["reject", "lose_answer"])
    def test_a_call_that_fails_once_is_made_good(self, tmp_path: Path, method: str, kind: str) -> None:
        self._skip_unreachable(method, tmp_path)
        self._play(failing, tmp_path, method, kind)

    @pytest.mark.parametrize("method", ["write_batch", "commit_epoch", "commit_topic"])
    def test_a_sink_that_hangs_can_be_killed(self, tmp_path: Path, method: str) -> None:
        self._skip_unreachable(method, tmp_path)
        self._play(hanging, tmp_path, method)

    @pytest.mark.parametrize("step", ["prepare.after", "commit.topic"])
    def test_staged_data_that_is_deleted_is_staged_again(self, tmp_path: Path, step: str) -> None:
        self._skip_unreachable(step, tmp_path)
        self._play(staging_lost, tmp_path, step)

    # -- zombies -------------------------------------------------------------------------------------------------

    def test_a_zombie_that_commits_after_its_successor_is_fenced(self, tmp_path: Path) -> None:
        self._play(zombie_after, tmp_path)

    def test_a_zombie_of_a_lost_incarnation_is_fenced(self, tmp_path: Path) -> None:
        self._play(zombie_of_lost_state, tmp_path)

    def test_a_zombie_that_finds_its_epoch_committed_doubles_nothing(self, tmp_path: Path) -> None:
        self._play(zombie_level, tmp_path)

    def test_a_task_that_outlives_its_driver_adds_nothing(self, tmp_path: Path) -> None:
        self._play(zombie_task, tmp_path)

    # -- the state directory is lost -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "step", ["commit.after", "committed.after", "commit.before@2", "commit.before@3", "commit.before@4"]
    )
    def test_a_lost_state_directory_stops_the_run_until_it_is_told_to_resume(self, tmp_path: Path, step: str) -> None:
        self._play(state_lost, tmp_path, step)

    def test_a_state_directory_that_is_lost_twice_can_be_resumed_twice(self, tmp_path: Path) -> None:
        self._play(state_lost_twice, tmp_path)

    def test_a_lost_state_directory_can_be_started_over_with_empty_targets(self, tmp_path: Path) -> None:
        self._play(started_over, tmp_path)

    # -- small things --------------------------------------------------------------------------------------------

    def _play(self, scenario: Callable[..., None], path: Path, *args: Any) -> None:
        """Play a scenario in a process that has no threads and nothing open, so that it can fork."""
        submit(play, type(self), path, scenario, args)

    def _skip_unreachable(self, step: str, path: Path) -> None:
        sink = self.make_sink(path)
        by_topic = isinstance(sink, TopicSink)
        if step.startswith(("commit.topic", "commit_topic")) and not by_topic:
            pytest.skip("the sink commits all its topics at once")
        if step == "commit_epoch" and by_topic:
            pytest.skip("the sink commits topic by topic")
        if step in ("plan_apply", "apply", "commit_applied") and not has_second_stage(sink):
            pytest.skip("the sink has no second stage")
        if step == "commit_topic" and has_second_stage(sink) and not self.commits_without_work:
            pytest.skip("the sink always has work")


def play(contract: type[CrashContract], path: Path, scenario: Callable[..., None], args: tuple[Any, ...]) -> None:
    stage = Stage(path, contract())
    try:
        scenario(stage, *args)
    finally:
        stage.end()
