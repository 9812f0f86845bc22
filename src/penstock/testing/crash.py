"""The crash suite: kill a run at every step of the protocol, start it again, and compare with what must be there."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pytest

from penstock import failpoints
from penstock.changes import CHANGE_FIELDS
from penstock.changes.old_key import pack_key
from penstock.errors import FatalError, Fenced, RetryableError
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State, sweep
from penstock.runtime.epochs.commit import has_second_stage
from penstock.schema import with_key
from penstock.sink import SinkConnector, Topic, TopicSink
from penstock.source import SourceBatch
from penstock.testing.engine import Forked, ForkEngine, Killed
from penstock.testing.faults import Fault, FaultySink
from penstock.testing.memory import MemorySource

T = TypeVar("T")
Rows = Any
"""Rows as a reader gets them: an Arrow table, or a list of dicts."""

TOPICS = ("/a", "/b")
SINKS = ("one", "two")
EPOCHS = 3
EPOCH_ROWS = 8
"""Rows of one topic in one epoch: two batches, one for each of two tasks."""

PATIENCE_SECS = 30.0
"""Longest wait for another process; a wait that takes this long has failed."""

STEPS = [
    "plan.before", "plan.after", "stage.begin", "stage.middle", "stage.middle@3", "stage.task", "stage.after",
    "prepare.after", "commit.before", "commit.before@2", "commit.before@3", "commit.before@4", "commit.topic",
    "commit.topic@2", "commit.sink", "commit.sink@2", "commit.after", "committed.after", "ack.after",
]  # fmt: skip
"""Every failpoint of the protocol; `@n` is its nth pass in one epoch of two topics and two sinks."""

APPLY_STEPS = [
    "plan_apply.before", "plan_apply.before@4", "plan_apply.after", "apply.begin", "apply.middle", "apply.middle@2",
    "apply.task", "apply.after",
]  # fmt: skip
"""Those of the second stage, which only some sinks have."""


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fresh process: one that has nothing open and shares nothing with this one but the disk."""
    return _submit(_in_fork, function, args)


@dataclass(frozen=True)
class Run:
    """One run of the pipeline under test: where it is killed or stopped, and its options."""

    failpoint: str | None = None
    """`name=action[@count]`, armed when `epoch` begins."""
    epoch: int = 1
    epochs: int | None = None
    """End after so many committed epochs; None: when there is nothing more to read."""
    state: str = "state"
    on_lost: Literal["stop", "resume", "start-over"] = "stop"
    fault: Fault | None = None
    """What goes wrong in the sink `one`."""
    orphans: bool = False
    sweeps: bool = False
    """Remove at once what dead tries left."""
    threads: int = 1
    """Commits at the same time; one, so that the nth pass of a failpoint is always at the same place."""


@dataclass
class Stage:
    """A pipeline of two topics and two sinks in a directory, and the ways to run it."""

    path: Path
    contract: CrashContract
    started: list[Forked[int]] = field(default_factory=list)

    def start(self, run: Run) -> Forked[int]:
        """Begin a run in a process of its own."""
        process = Forked(lambda: self._drive(run), orphan=False)
        self.started.append(process)
        return process

    def run(self, run: Run | None = None) -> int:
        """A run to its end: how many epochs it committed."""
        return self.start(run or Run()).result()

    def killed(self, run: Run) -> None:
        """A run that must die at its failpoint; whatever it left behind must be whole epochs, none of them twice."""
        try:
            self.run(run)
        except Killed:
            self.check_prefix()
        else:
            raise AssertionError(f"the run never passed {run.failpoint} in epoch {run.epoch}")

    def stopped(self, run: Run) -> Forked[int]:
        """A run that is stopped at its failpoint and can be woken."""
        process = self.start(run)
        passes = f"the run to pass {run.failpoint} in epoch {run.epoch}"
        if wait_until(lambda: _process_state(process.pid) in "TZ", passes) and not _is_stopped(process.pid):
            raise AssertionError(f"{process.result()} epochs were committed, and the run never passed {run.failpoint}")
        return process

    def wake(self, process: Forked[int]) -> int:
        os.kill(process.pid, signal.SIGCONT)
        return process.result()

    def rows(self) -> dict[tuple[str, Topic], list[int]]:
        """The ids that each sink shows of each topic; read in a process of its own, which knows only the target."""

        def read() -> dict[tuple[str, Topic], list[int]]:
            shown = {
                (sink, topic): self.contract.visible(self.path / sink, topic) for sink in SINKS for topic in TOPICS
            }
            ids = _applied if self.applies_changes else _ids
            return {each: ids(as_rows(rows)) for each, rows in shown.items()}

        return Forked(read).result()

    def check_prefix(self) -> None:
        """Every target holds the first so many epochs, whole; a crash may never show anything else."""
        for (sink, topic), ids in self.rows().items():
            whole = list(range(len(ids) // EPOCH_ROWS * EPOCH_ROWS))
            assert sorted(ids) == whole, f"{topic} in {sink} is not a prefix of whole epochs: {_difference(ids, whole)}"

    def check_all(self, epochs: int = EPOCHS) -> None:
        """Every row exactly once in each topic of each sink, in order where the contract promises it."""
        expected = list(range(epochs * EPOCH_ROWS))
        for (sink, topic), ids in self.rows().items():
            shown = ids if self.contract.ordered else sorted(ids)
            assert shown == expected, f"{topic} in {sink}: {_difference(ids, expected)}"

    def check_swept(self) -> None:
        """Nothing of a dead try is left, once its tasks cannot write any more."""
        state = State(self.path / "state", "crash").peek()
        for manifest in (state.load(number) for number in range(1, EPOCHS + 1)):
            assert manifest is not None
            won = {each for topics in manifest.kept.values() for each in topics.values()}
            dead = set(manifest.applies) - won
            left = [file for name in dead for file in self.path.rglob(f"*{name}*") if file.is_file()]
            assert not left, f"a dead try left {left}"

    def unlock(self) -> None:
        """Take the lock away from a run that still holds it, as a lost network mount would."""
        (self.path / "state" / "lock").unlink()

    def end(self) -> None:
        for process in self.started:
            process.kill()

    def source(self) -> MemorySource:
        (self.path / "source").mkdir(exist_ok=True)
        half = EPOCH_ROWS // 2
        firsts = range(0, EPOCHS * EPOCH_ROWS, half)
        batch = _changes if self.applies_changes else _batch
        return MemorySource.of(self.path / "source", *(batch(s, f, half) for f in firsts for s in ("a", "b")))

    @property
    def applies_changes(self) -> bool:
        """True for a sink that gets changes and must apply them, not only rows that it adds."""
        promised = self.contract.make_sink(self.path / "none").capabilities
        return promised.upsert and promised.changelog

    def loop(self, run: Run) -> EpochLoop:
        sinks: dict[str, SinkConnector[Any, Any]] = {each: self.contract.make_sink(self.path / each) for each in SINKS}
        if run.fault is not None:
            sinks["one"] = FaultySink(sinks["one"], run.fault)

        def arm(number: int, phase: str) -> None:
            if run.failpoint is not None and number == run.epoch and not armed:
                armed.append(number)
                failpoints.arm(run.failpoint)

        armed: list[int] = []
        return EpochLoop(
            state=State(self.path / run.state, "crash"),
            sources={"memory": self.source()},
            sinks=sinks,
            router=Router((), SINKS),
            engine=ForkEngine(2, die_with_task=True, orphans=run.orphans),
            max_epoch_rows=(4 if self.applies_changes else 2) * EPOCH_ROWS,
            on_phase=arm,
            threads=run.threads,
        )

    def _drive(self, run: Run) -> int:
        os.fsync = _no_fsync  # SIGKILL leaves the page cache; what a power cut leaves is tested elsewhere
        if run.sweeps:
            sweep.SWEEP_AFTER_SECS = 0.0  # no task of an earlier run is alive
        loop = self.loop(run)
        _open_when_free(loop.state)
        loop.contexts.open()
        loop.start([(sink, topic) for sink in SINKS for topic in TOPICS], run.on_lost)
        if loop.unacked:
            loop.ack()
        committed, retries = 0, 5
        while run.epochs is None or committed < run.epochs:
            try:
                if loop.step() is None:
                    break
                committed += 1
            except RetryableError:
                retries -= 1
                if not retries:
                    raise
        loop.state.close()
        return committed


class CrashContract:
    """
    The crash suite of an exactly-once sink: a test class with two methods, at the top of its module.

    Runs two sinks with two topics each through three epochs, in processes that are killed, stopped and woken. A sink
    that promises upsert and changelog gets changes, which are wrong when one is lost or applied out of its order.
    """

    commits_without_work = True
    """False for a sink with a second stage in which every epoch has work."""

    ordered = False
    """True when `visible` shows rows in the order they came."""

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
        self._play(_killed, tmp_path, step, epoch)

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

    @pytest.mark.parametrize("step", ["commit.before", "commit.before@3", "commit.after"])
    def test_commits_at_the_same_time_can_be_killed(self, tmp_path: Path, step: str) -> None:
        if not self.make_sink(tmp_path).concurrent:
            pytest.skip("the sink commits one topic after the other")
        self._play(_killed_in_threads, tmp_path, step)

    @pytest.mark.parametrize("second", ["stage.task", "commit.before@2", "commit.after", "ack.after"])
    @pytest.mark.parametrize("first", ["stage.middle", "prepare.after", "commit.sink"])
    def test_a_recovery_that_is_killed_loses_and_doubles_nothing(self, tmp_path: Path, first: str, second: str) -> None:
        self._play(_killed_twice, tmp_path, first, second)

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
        self._play(_failing, tmp_path, method, kind)

    @pytest.mark.parametrize("method", ["write_batch", "commit_epoch", "commit_topic"])
    def test_a_sink_that_hangs_can_be_killed(self, tmp_path: Path, method: str) -> None:
        self._skip_unreachable(method, tmp_path)
        self._play(_hanging, tmp_path, method)

    @pytest.mark.parametrize("step", ["prepare.after", "commit.topic"])
    def test_staged_data_that_is_deleted_is_staged_again(self, tmp_path: Path, step: str) -> None:
        self._skip_unreachable(step, tmp_path)
        self._play(_staging_lost, tmp_path, step)

    # -- zombies -------------------------------------------------------------------------------------------------

    def test_a_zombie_that_commits_after_its_successor_is_fenced(self, tmp_path: Path) -> None:
        self._play(_zombie_behind, tmp_path)

    def test_a_zombie_of_a_lost_incarnation_is_fenced(self, tmp_path: Path) -> None:
        self._play(_zombie_of_lost_state, tmp_path)

    def test_a_zombie_that_finds_its_epoch_committed_doubles_nothing(self, tmp_path: Path) -> None:
        self._play(_zombie_level, tmp_path)

    def test_a_task_that_outlives_its_driver_adds_nothing(self, tmp_path: Path) -> None:
        self._play(_zombie_task, tmp_path)

    # -- the state directory is lost -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "step", ["commit.after", "committed.after", "commit.before@2", "commit.before@3", "commit.before@4"]
    )
    def test_a_lost_state_directory_stops_the_run_until_it_is_told_to_resume(self, tmp_path: Path, step: str) -> None:
        self._play(_state_lost, tmp_path, step)

    def test_a_state_directory_that_is_lost_twice_can_be_resumed_twice(self, tmp_path: Path) -> None:
        self._play(_state_lost_twice, tmp_path)

    def test_a_lost_state_directory_can_be_started_over_with_empty_targets(self, tmp_path: Path) -> None:
        self._play(_started_over, tmp_path)

    # -- small things --------------------------------------------------------------------------------------------

    def _play(self, scenario: Callable[..., None], path: Path, *args: Any) -> None:
        """Play a scenario in a process that has no threads and nothing open, so that it can fork."""
        _submit(_scenario, type(self), path, scenario, args)

    def _skip_without_second_stage(self, path: Path) -> None:
        if not has_second_stage(self.make_sink(path)):
            pytest.skip("the sink has no second stage")

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


# -- scenarios: each is a function of a Stage, played in a clean process ---------------------------------------------


def _killed(stage: Stage, step: str, epoch: int) -> None:
    stage.killed(Run(_kill(step), epoch))
    stage.run()
    if epoch == EPOCHS - 1:
        assert stage.run() == 0, "a run that finds nothing new committed something"
    stage.check_all()


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
        stage.run(Run(_kill(step), epoch))
    except Killed:
        stage.check_prefix()
        return True
    stage.check_all()
    return False


def _zombie_work(stage: Stage) -> None:
    driver = stage.start(Run("apply.begin=stop", epoch=2, orphans=True))
    wait_until(lambda: _stopped_children(driver.pid, 2) or _is_stopped(driver.pid), "work to begin")
    tasks = list(_children(driver.pid))  # none if the driver does it: little work has no tasks that could outlive it
    driver.kill()
    try:
        if tasks:
            stage.unlock()
        stage.run(Run(epochs=1))
        stage.check_all(epochs=2)
    finally:
        for task in tasks:
            os.kill(task, signal.SIGCONT)
    wait_until(lambda: not any(Path(f"/proc/{task}").exists() for task in tasks), "the tasks to end")
    stage.check_all(epochs=2)
    stage.run()
    stage.check_all()


def _killed_in_threads(stage: Stage, step: str) -> None:
    stage.killed(Run(_kill(step), epoch=2, threads=4))
    stage.run(Run(threads=4))
    stage.check_all()


def _killed_twice(stage: Stage, first: str, second: str) -> None:
    stage.killed(Run(_kill(first), epoch=2))
    stage.killed(Run(_kill(second), epoch=2 if _still_passed(second, first) else 3))
    stage.run()
    stage.check_all()


def _failing(stage: Stage, method: str, kind: Literal["reject", "lose_answer"]) -> None:
    fault = Fault(method, kind, stage.path)
    if method == "rollback_epoch":
        stage.killed(Run("stage.after=kill", epoch=2))  # only a recovery rolls back
    stage.run(Run(fault=fault))
    assert fault.struck == 1, f"{method} was never called"
    stage.check_all()


def _hanging(stage: Stage, method: str) -> None:
    fault = Fault(method, "hang", stage.path)
    process = stage.start(Run(fault=fault))
    wait_until(lambda: fault.struck > 0, f"{method} to hang")
    process.kill()
    stage.check_prefix()
    stage.run()
    stage.check_all()


def _staging_lost(stage: Stage, step: str) -> None:
    stage.killed(Run(_kill(step), epoch=2))
    before = stage.rows()
    if step == "prepare.after":
        Forked(lambda: stage.contract.lose_staged(stage.path / "one")).result()
    else:  # the first topic of the sink is committed, and what it committed must not be touched
        _lose_topic(stage, "one", TOPICS[1])
    assert stage.rows() == before, "lose_staged deleted rows that were committed"
    stage.run()
    stage.check_all()


def _zombie_behind(stage: Stage) -> None:
    zombie = stage.stopped(Run("commit.before=stop", epoch=2))
    shutil.copytree(stage.path / "state", stage.path / "copy")
    stage.run(Run(state="copy"))
    stage.check_all()
    _must_be_fenced(stage, zombie)


def _zombie_of_lost_state(stage: Stage) -> None:
    for nth, name in ((1, "first"), (2, "second")):
        one = replace(stage, path=stage.path / name, started=stage.started)
        one.path.mkdir()
        zombie = one.stopped(Run(f"commit.before=stop@{nth}", epoch=2))
        one.run(Run(state="new", on_lost="resume"))
        one.check_all()
        _must_be_fenced(one, zombie)


def _zombie_level(stage: Stage) -> None:
    zombie = stage.stopped(Run("commit.before=stop", epoch=2))
    shutil.copytree(stage.path / "state", stage.path / "copy")
    assert stage.run(Run(state="copy", epochs=1)) == 1
    stage.check_all(epochs=2)
    stage.wake(zombie)  # the epoch is there, as it wanted: it may go on
    stage.check_all()


def _zombie_task(stage: Stage) -> None:
    driver = stage.start(Run("stage.middle=stop", epoch=2, orphans=True))
    tasks = wait_until(lambda: _stopped_children(driver.pid, 2), "two tasks to pass stage.middle")
    driver.kill()
    try:
        stage.unlock()  # its tasks hold the lock as well, which tasks on other machines do not
        stage.run(Run(epochs=1))
        stage.check_all(epochs=2)
    finally:
        for task in tasks:
            os.kill(task, signal.SIGCONT)
    wait_until(lambda: not any(Path(f"/proc/{task}").exists() for task in tasks), "the tasks to end")
    stage.check_all(epochs=2)
    stage.run()
    stage.check_all()


def _state_lost(stage: Stage, step: str) -> None:
    stage.killed(Run(_kill(step), epoch=2))
    before = stage.rows()
    shutil.rmtree(stage.path / "state")
    _must_stop(stage, Run())
    _must_stop(stage, Run())  # having stopped once must not count as an answer
    assert stage.rows() == before
    stage.run(Run(on_lost="resume"))
    stage.check_all()


def _state_lost_twice(stage: Stage) -> None:
    topic_by_topic = isinstance(stage.contract.make_sink(stage.path / "none"), TopicSink)
    second = "commit.before@2" if topic_by_topic else "commit.before@3"  # where a part of the epoch is committed
    for number, step in ((2, "commit.before@3"), (2, second), (1, "commit.sink")):
        stage.killed(Run(_kill(step), epoch=number, on_lost="resume"))
        shutil.rmtree(stage.path / "state")
    stage.run(Run(on_lost="resume"))
    stage.check_all()


def _started_over(stage: Stage) -> None:
    stage.killed(Run("commit.sink=kill", epoch=2))
    shutil.rmtree(stage.path / "state")
    shutil.rmtree(stage.path / "source")  # a source that can still be read from its beginning
    for sink in SINKS:
        stage.contract.empty(stage.path / sink)
    stage.run(Run(on_lost="start-over"))
    stage.check_all()


def _must_be_fenced(stage: Stage, zombie: Forked[int]) -> None:
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


# -- helpers ---------------------------------------------------------------------------------------------------------


def as_rows(rows: Rows) -> list[dict[str, Any]]:
    return rows.to_pylist() if isinstance(rows, pa.Table) else [dict(row) for row in rows]


def is_hidden(file: Path, below: Path) -> bool:
    """True for a sink's bookkeeping: a name with a dot at its front, or anything below one."""
    return any(part.startswith(".") for part in file.relative_to(below).parts)


def wait_until(condition: Callable[[], T | None], what: str) -> T:
    """The first true value of `condition`, asked every few milliseconds."""
    until = time.monotonic() + PATIENCE_SECS
    while not (found := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {PATIENCE_SECS:.0f} s for {what}")
        time.sleep(0.005)
    return found


@cache
def _elsewhere() -> ProcessPoolExecutor:
    # Spawned, not forked: the test's own process may have threads and clients that no fork survives.
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), initializer=_warm_up)


def _submit(function: Callable[..., Any], *args: Any) -> Any:
    # Pickled here and not by the pool: the other process must know where to look before it unpickles a test's classes.
    work = pickle.dumps((function, args))
    return _elsewhere().submit(_work, sys.path, work).result(timeout=4 * PATIENCE_SECS)


def _work(path: list[str], work: bytes) -> Any:
    sys.path[:] = path
    function, args = pickle.loads(work)
    return function(*args)


def _warm_up() -> None:
    """Pay once for what every forked process would pay for again: Arrow's late imports, and copies of what is garbage."""
    pa.array([0])
    gc.collect()
    gc.freeze()


def _in_fork(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    return Forked(lambda: function(*args)).result()


def _scenario(contract: type[CrashContract], path: Path, scenario: Callable[..., None], args: tuple[Any, ...]) -> None:
    stage = Stage(path, contract())
    try:
        scenario(stage, *args)
    finally:
        stage.end()


def _batch(stream: str, first: int, count: int) -> SourceBatch:
    schema = with_key(pa.schema([("id", pa.int64()), ("name", pa.string())]), ["id"])
    ids = list(range(first, first + count))
    return SourceBatch(pa.record_batch([ids, [f"{stream}-{each}" for each in ids]], schema=schema), stream=stream)


def _changes(stream: str, first: int, count: int) -> SourceBatch:
    """As `_batch`, as changes: rows of the batch before are updated without their `doc`, and one row moves on and on."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("doc", pa.string()), *CHANGE_FIELDS])
    kept = {"_unchanged": ["doc"]}
    events: list[dict[str, Any]] = [
        {"_op": "c", "id": id, "name": "new", "doc": f"doc {id}"} for id in _span(first, count)
    ]
    before = max(first - count, 0)
    events += [{"_op": "u", "id": id, "name": f"since {first}", **kept} for id in _span(before, count - 1)]
    moved = {"_op": "u", **kept, "_old_key": pack_key({"id": -first})} if first else {"_op": "c", "doc": "moves"}
    events.append({"id": -first - count, "name": "moves", **moved})
    for place, event in enumerate(events):
        event["_position"] = f"{first:06d}.{place:03d}"
    return SourceBatch(pa.RecordBatch.from_pylist(events, schema=with_key(schema, ["id"])), stream=stream)


def _applied(rows: list[dict[str, Any]]) -> list[int]:
    """The ids of the rows, without the one that moves; every row must be as the last epoch left it."""
    found = {row["id"]: (row["name"], row["doc"]) for row in rows}
    ids = [row["id"] for row in rows if row["id"] >= 0]
    half, end = EPOCH_ROWS // 2, len(ids)
    expected = {id: (f"since {(id // half + 1) * half}", f"doc {id}") for id in _span(0, end)}
    expected |= {id: ("new", f"doc {id}") for id in _span(0, end) if id >= end - half or id % half == half - 1}
    expected |= {-end: ("moves", "moves")} if end else {}
    assert found == expected, f"not what the changes come to: {set(found.items()) ^ set(expected.items())}"
    return ids


def _ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


def _span(first: int, count: int) -> range:
    return range(first, first + count)


def _no_fsync(fd: Any) -> None:
    pass


def _kill(step: str) -> str:
    name, _, count = step.partition("@")
    return f"{name}=kill@{count or 1}"


def _still_passed(step: str, after: str) -> bool:
    """True when a recovery from a crash at `after` passes `step` in the same epoch."""
    return not step.startswith("stage") or after.startswith("stage")


def _difference(found: Sequence[int], expected: Sequence[int]) -> str:
    doubled = sorted(each for each, count in Counter(found).items() if count > 1)
    missing, strange = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    parts = {"lost": missing, "doubled": doubled, "not expected": strange}
    return "; ".join(f"{name} {ids}" for name, ids in parts.items() if ids) or f"not in order: {list(found)}"


def _open_when_free(state: State) -> None:
    """A killed run's tasks hold its lock until they are gone as well."""
    until = time.monotonic() + PATIENCE_SECS
    while True:
        try:
            return state.open()
        except FatalError as error:
            if error.code != "PEN-5002" or time.monotonic() > until:
                raise
        time.sleep(0.005)


def _is_stopped(pid: int) -> bool:
    return _process_state(pid) == "T"


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def _stopped_children(pid: int, count: int) -> list[int]:
    children = list(_children(pid))
    return children if len(children) == count and all(_is_stopped(child) for child in children) else []


def _children(pid: int) -> Iterator[int]:
    for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(text)
