"""What happens to the pipeline under test, one function per story; each runs in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from penstock.errors import FatalError, Fenced
from penstock.sink import Topic, TopicSink
from penstock.testing.crash.stage import EPOCHS, SINKS, TOPICS, Run, Stage, as_rows, kill_at
from penstock.testing.engine import Forked
from penstock.testing.faults import Fault
from penstock.testing.processes import stopped_children, wait_until, wake_tasks


def killed(stage: Stage, step: str, epoch: int) -> None:
    stage.killed(Run(kill_at(step), epoch))
    stage.run()
    if epoch == EPOCHS - 1:
        assert stage.run() == 0, "a run that finds nothing new committed something"
    stage.check_all()


def killed_in_threads(stage: Stage, step: str) -> None:
    stage.killed(Run(kill_at(step), epoch=2, threads=4))
    stage.run(Run(threads=4))
    stage.check_all()


def killed_twice(stage: Stage, first: str, second: str) -> None:
    stage.killed(Run(kill_at(first), epoch=2))
    stage.killed(Run(kill_at(second), epoch=2 if still_passed(second, first) else 3))
    stage.run()
    stage.check_all()


def failing(stage: Stage, method: str, kind: Literal["reject", "lose_answer"]) -> None:
    fault = Fault(method, kind, stage.path)
    if method == "rollback_epoch":
        stage.killed(Run("stage.after=kill", epoch=2))  # only a recovery rolls back
    stage.run(Run(fault=fault))
    assert fault.struck == 1, f"{method} was never called"
    stage.check_all()


def hanging(stage: Stage, method: str) -> None:
    fault = Fault(method, "hang", stage.path)
    process = stage.start(Run(fault=fault))
    wait_until(lambda: fault.struck > 0, f"{method} to hang")
    process.kill()
    stage.check_prefix()
    stage.run()
    stage.check_all()


def staging_lost(stage: Stage, step: str) -> None:
    stage.killed(Run(kill_at(step), epoch=2))
    before = stage.rows()
    if step == "prepare.after":
        Forked(lambda: stage.contract.lose_staged(stage.path / "one")).result()
    else:  # the first topic of the sink is committed, and what it committed must not be touched
        _lose_topic(stage, "one", TOPICS[1])
    assert stage.rows() == before, "lose_staged deleted rows that were committed"
    stage.run()
    stage.check_all()


def zombie_after(stage: Stage) -> None:
    zombie = stage.stopped(Run("commit.before=stop", epoch=2))
    shutil.copytree(stage.path / "state", stage.path / "copy")
    stage.run(Run(state="copy"))
    stage.check_all()
    must_be_fenced(stage, zombie)


def zombie_of_lost_state(stage: Stage) -> None:
    for nth, name in ((1, "first"), (2, "second")):
        one = replace(stage, path=stage.path / name, started=stage.started)
        one.path.mkdir()
        zombie = one.stopped(Run(f"commit.before=stop@{nth}", epoch=2))
        one.run(Run(state="new", on_lost="resume"))
        one.check_all()
        must_be_fenced(one, zombie)


def zombie_level(stage: Stage) -> None:
    zombie = stage.stopped(Run("commit.before=stop", epoch=2))
    shutil.copytree(stage.path / "state", stage.path / "copy")
    assert stage.run(Run(state="copy", epochs=1)) == 1
    stage.check_all(epochs=2)
    stage.wake(zombie)  # the epoch is there, as it wanted: it may go on
    stage.check_all()


def zombie_task(stage: Stage) -> None:
    driver = stage.start(Run("stage.middle=stop", epoch=2, orphans=True))
    tasks = wait_until(lambda: stopped_children(driver.pid, 2), "two tasks to pass stage.middle")
    driver.kill()
    outlive(stage, tasks)


def outlive(stage: Stage, tasks: Sequence[int]) -> None:
    """Tasks of a driver that was killed go on once its successor has committed the epoch; they add nothing."""
    try:
        if tasks:
            stage.unlock()  # they hold the lock as well, which tasks on other machines do not
        stage.run(Run(epochs=1))
        stage.check_all(epochs=2)
    finally:
        woken = wake_tasks(tasks)
    assert woken == tasks, "a stopped task did not outlive its driver: somebody else has killed it"
    wait_until(lambda: not any(Path(f"/proc/{task}").exists() for task in tasks), "the tasks to end")
    stage.check_all(epochs=2)
    stage.run()
    stage.check_all()


def state_lost(stage: Stage, step: str) -> None:
    stage.killed(Run(kill_at(step), epoch=2))
    before = stage.rows()
    shutil.rmtree(stage.path / "state")
    _must_stop(stage, Run())
    _must_stop(stage, Run())  # having stopped once must not count as an answer
    assert stage.rows() == before
    stage.run(Run(on_lost="resume"))
    stage.check_all()


def state_lost_twice(stage: Stage) -> None:
    topic_by_topic = isinstance(stage.contract.make_sink(stage.path / "none"), TopicSink)
    second = "commit.before@2" if topic_by_topic else "commit.before@3"  # where a part of the epoch is committed
    for number, step in ((2, "commit.before@3"), (2, second), (1, "commit.sink")):
        stage.killed(Run(kill_at(step), epoch=number, on_lost="resume"))
        shutil.rmtree(stage.path / "state")
    stage.run(Run(on_lost="resume"))
    stage.check_all()


def started_over(stage: Stage) -> None:
    stage.killed(Run("commit.sink=kill", epoch=2))
    shutil.rmtree(stage.path / "state")
    shutil.rmtree(stage.path / "source")  # a source that can still be read from its beginning
    for sink in SINKS:
        Forked(partial(stage.contract.empty, stage.path / sink)).result()  # clients of stores do not survive a fork
    stage.run(Run(on_lost="start-over"))
    stage.check_all()


def must_be_fenced(stage: Stage, zombie: Forked[int]) -> None:
    try:
        stage.wake(zombie)
    except Fenced:
        fenced = True
    else:
        fenced = False
    stage.check_all()
    assert fenced, "a zombie woke after its successor had committed, and was not fenced"


def _must_stop(stage: Stage, run: Run) -> None:
    with pytest.raises(FatalError, match="PEN-5007"):
        stage.run(run)


def _lose_topic(stage: Stage, sink: str, topic: Topic) -> None:
    """Delete what one topic of a sink has staged, so that the topic before it is committed and this one is lost."""

    def lose() -> None:
        path = stage.path / sink
        kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        shown = {each: as_rows(stage.contract.visible(path, each)) for each in TOPICS}
        stage.contract.lose_staged(path)
        for file, data in kept.items():
            # What belongs to the other topic is put back: nothing that is committed may be lost.
            if not file.exists() and topic.removeprefix("/") not in file.relative_to(path).parts[:-1]:
                file.write_bytes(data)
        assert {each: as_rows(stage.contract.visible(path, each)) for each in TOPICS} == shown

    Forked(lose).result()


def still_passed(step: str, after: str) -> bool:
    """True when a recovery from a crash at `after` passes `step` in the same epoch."""
    return not step.startswith("stage") or after.startswith("stage")
