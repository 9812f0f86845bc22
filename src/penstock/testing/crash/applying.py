"""Kills in the second stage of a commit, for sinks that have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.epochs.commit import publishes_in_parts
from penstock.sink import SinkConnector, has_second_stage
from penstock.testing.crash.scenarios import outlive
from penstock.testing.crash.stage import Run, Stage, kill_at
from penstock.testing.engine import Killed
from penstock.testing.processes import children_of, is_stopped, stopped_children, wait_until

APPLY_STEPS = [
    "plan_apply.before", "plan_apply.before@4", "plan_apply.after", "apply.begin", "apply.middle", "apply.middle@2",
    "apply.task", "apply.after",
]  # fmt: skip
"""Those of the second stage, which only some sinks have."""


class SecondStageCrashes:
    """Kills in the second stage, for sinks that have one."""

    make_sink: Callable[[Path], SinkConnector[Any, Any]]
    whole_epochs: bool
    _play: Callable[..., None]

    @pytest.mark.parametrize("epoch", [1, 2])
    @pytest.mark.parametrize("step", APPLY_STEPS)
    def test_a_run_that_is_killed_in_the_second_stage_loses_and_doubles_nothing(
        self, tmp_path: Path, step: str, epoch: int
    ) -> None:
        self._skip_without_second_stage(tmp_path)
        self._play(_killed_applying, tmp_path, step, epoch)

    @pytest.mark.parametrize("second", ["plan_apply.after", "apply.task", "apply.after", "commit.before@2"])
    @pytest.mark.parametrize("first", ["apply.middle", "apply.after", "commit.before@2", "commit.topic", "commit.sink"])
    def test_a_second_stage_that_is_killed_again_loses_and_doubles_nothing(
        self, tmp_path: Path, first: str, second: str
    ) -> None:
        self._skip_without_second_stage(tmp_path)
        self._play(_killed_applying_twice, tmp_path, first, second)

    def test_a_zombie_task_of_the_second_stage_adds_nothing(self, tmp_path: Path) -> None:
        self._skip_without_second_stage(tmp_path)
        self._play(_zombie_work, tmp_path)

    def _skip_without_second_stage(self, path: Path) -> None:
        sink = self.make_sink(path)
        if not has_second_stage(sink) and (self.whole_epochs or not publishes_in_parts(sink)):
            pytest.skip("the sink has no second stage")


def _killed_applying(stage: Stage, step: str, epoch: int) -> None:
    if _applies(stage, step, epoch):
        stage.run(Run(sweeps=True))
        stage.check_all()
        stage.check_swept()


def _killed_applying_twice(stage: Stage, first: str, second: str) -> None:
    for step in (first, second):
        if not _applies(stage, step, 2):
            return
    stage.run(Run(sweeps=True))
    stage.check_all()
    stage.check_swept()


def _applies(stage: Stage, step: str, epoch: int) -> bool:
    """Kill the run there; False if the epoch has so little work that it ends without passing the step."""
    try:
        stage.run(Run(kill_at(step), epoch))
    except Killed:
        stage.check_prefix()
        return True
    stage.check_all()
    return False


def _zombie_work(stage: Stage) -> None:
    driver = stage.start(Run("apply.begin=stop", epoch=2, orphans=True))
    wait_until(lambda: stopped_children(driver.pid, 2) or is_stopped(driver.pid), "work to begin")
    tasks = list(children_of(driver.pid))  # none if the driver does it: little work has no tasks that could outlive it
    driver.kill()
    outlive(stage, tasks)
