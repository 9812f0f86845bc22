"""What once went wrong in the epoch protocol, each with the test that would have caught it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import failpoints
from penstock.errors import ConfigError, ConnectorError, FatalError, Fenced, RetryableError, SchemaError
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State, commit, forget, reset, restage
from penstock.runtime.epochs import sweep as protocol
from penstock.runtime.task import run_task, run_work
from penstock.sink import SinkConnectorCapabilities, Task
from penstock.source import Note, SourceBatch
from penstock.tables import TableSource, TableState
from penstock.testing import MemorySink, MemorySinkConfig, MemorySource

TOPICS = [("lake", "/a"), ("lake", "/b")]


class InlineEngine:
    parallelism = 1
    is_local = True

    def check(self, routes):
        pass

    def run(self, job):
        return [run_task(job, job.parts, Task(0))]

    def apply(self, job):
        return [run_work(job, range(len(job.work)), Task(0))]


@dataclass
class Run:
    """A pipeline of two topics whose every item is an epoch, run in this process."""

    path: Path
    topics: list = field(default_factory=lambda: TOPICS)
    items: int = 8
    items_of_b: int = 8
    source_type: type = MemorySource
    sink_type: type = MemorySink

    def loop(self, on_lost="stop", sinks=("lake",), state="state"):
        (self.path / "source").mkdir(exist_ok=True)
        source = self.source_type.of(
            self.path / "source",
            *(
                SourceBatch(pa.RecordBatch.from_pylist([{"id": n}]), stream=s)
                for n in range(self.items)
                for s in ("a", "b")
                if s == "a" or n < self.items_of_b
            ),
        )
        made = {name: self.sink_type(MemorySinkConfig(path=self.path / name)) for name in sinks}
        state = State(self.path / state, "orders")
        state.open()
        try:
            loop = EpochLoop(
                state, {"memory": source}, made, Router((), tuple(sinks)), InlineEngine(), max_epoch_rows=2, threads=1
            )
            for sink in made.values():
                sink.open()
            loop.start(self.topics, on_lost)
        except BaseException:
            state.close()
            raise
        return loop

    def step(self, failpoint=None, on_lost="stop", count=1):
        """One run of `count` steps; a failpoint stands in for the crash, since the loop is thrown away after it."""
        loop = self.loop(on_lost)
        failpoints.arm(failpoint)
        try:
            for _ in range(count):
                loop.step()
        except ConnectorError as error:
            return error
        finally:
            failpoints.arm(None)
            loop.state.close()
        return None

    def ids(self, topic, sink="lake"):
        return [row["id"] for row in MemorySink(MemorySinkConfig(path=self.path / sink)).visible(topic)]

    def lose_state(self):
        shutil.rmtree(self.path / "state")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_resume_that_dies_between_identity_and_manifest_does_not_begin_anew(run, monkeypatch):
    run.step(count=3)
    run.lose_state()
    monkeypatch.setattr(State, "save", lambda self, manifest: pytest.fail("killed here"))
    with pytest.raises(pytest.fail.Exception):
        run.step(on_lost="resume")
    monkeypatch.undo()
    assert run.step() is None
    assert run.ids("/a") == [0, 1, 2, 3]


def test_a_refused_resume_leaves_no_answer_behind_that_the_next_run_takes_for_a_start_over(run, tmp_path_factory):
    stranger = Run(tmp_path_factory.mktemp("stranger"))
    for each in (run, stranger):
        each.step(count=3)
    shutil.rmtree(run.path / "lake" / "b")
    shutil.copytree(stranger.path / "lake" / "b", run.path / "lake" / "b")
    run.lose_state()
    with pytest.raises(FatalError, match="PEN-5007"):
        run.step(on_lost="resume")
    with pytest.raises(FatalError, match="PEN-5007"):
        run.step()
    assert run.ids("/a") == [0, 1, 2]


def test_rows_that_a_sink_committed_before_it_lost_the_rest_survive_the_sweep(run, monkeypatch):
    assert run.step("commit.topic=fail") is not None
    for file in (run.path / "lake" / "b" / "rows").iterdir():
        file.unlink()
    monkeypatch.setattr(protocol, "SWEEP_AFTER_SECS", 0)
    run.step(count=2)
    assert run.ids("/a") == run.ids("/b") == [0, 1]


def test_what_a_try_staged_and_lost_in_part_is_swept_in_the_end(run, monkeypatch):
    assert run.step("stage.after=fail") is not None
    monkeypatch.setattr(protocol, "SWEEP_AFTER_SECS", 0)
    run.step(count=2)
    assert len(list((run.path / "lake").glob("*/rows/*"))) == 4


def test_every_try_at_an_epoch_has_a_name_of_its_own_that_is_durable_before_its_files(run, monkeypatch):
    staged = []

    def pre_commit(self, epoch):
        staged.append((epoch.attempt, State(run.path / "state", "orders").peek().newest.attempts))
        return real(self, epoch)

    real = MemorySink.pre_commit
    monkeypatch.setattr(MemorySink, "pre_commit", pre_commit)
    for _ in range(2):
        assert run.step("stage.after=fail") is not None
    run.step()
    names = [name for name, _ in staged]
    assert len(set(names)) == 3
    assert [known for _, known in staged] == [names[:1], names[:2], names]


def test_a_source_is_told_only_what_a_manifest_says_is_committed(run, monkeypatch):
    said = []
    monkeypatch.setattr(
        MemorySource, "ack", lambda self, end: said.append(State(run.path / "state", "orders").peek().newest.state)
    )
    assert run.step("commit.after=fail") is not None
    assert said == []
    run.step(count=2)
    assert said == ["committed"] * 2


def test_a_sweep_that_fails_does_not_fail_the_epoch(run, monkeypatch):
    assert run.step("stage.after=fail") is not None
    monkeypatch.setattr(protocol, "SWEEP_AFTER_SECS", 0)

    def refuse(self, epoch, keep):
        if keep:
            raise RetryableError("not now")

    monkeypatch.setattr(MemorySink, "sweep", refuse)
    assert run.step(count=2) is None
    assert run.ids("/a") == [0, 1]


def test_a_try_that_failed_just_now_is_not_swept_yet(run, monkeypatch):
    loop = run.loop()
    now = loop._sweeper.abandoned_at + 1000
    monkeypatch.setattr(protocol.time, "monotonic", lambda: now)
    swept = []
    monkeypatch.setattr(MemorySink, "sweep", lambda self, epoch, keep: swept.append(epoch) if keep else None)
    failpoints.arm("stage.after=fail")
    try:
        with pytest.raises(RetryableError):
            loop.step()
    finally:
        failpoints.arm(None)
    loop.step()
    assert not swept, "a task of the failed try may still write"
    now += protocol.SWEEP_AFTER_SECS
    loop.step()
    assert swept
    loop.state.close()


def test_a_topic_that_was_not_known_at_the_start_is_completed_by_a_resume(run):
    run.step(count=1)
    assert run.step("commit.topic=fail") is not None
    run.lose_state()
    run.topics = [("lake", "/a")]
    assert run.step(on_lost="resume", count=2) is None
    assert run.ids("/a") == run.ids("/b") == [0, 1, 2]


def test_a_topic_that_was_not_known_at_the_start_goes_on_after_a_resume(run):
    run.items, run.items_of_b = 5, 1
    run.step(count=4)
    run.lose_state()
    run.topics = [("lake", "/a")]
    (run.path / "lake" / "b").rename(run.path / "elsewhere")  # /b stands at an older epoch than /a
    assert run.ids("/a") == [0, 1, 2, 3, 4]
    (run.path / "elsewhere").rename(run.path / "lake" / "b")
    assert run.step(on_lost="resume") is None
    more = Run(run.path, topics=run.topics, source_type=Later)
    assert more.step() is None
    assert run.ids("/b") == [0, 99]


class Later(MemorySource):
    """The source of a later day: the first items are gone, and one for /b has come."""

    @classmethod
    def of(cls, path, *script):
        late = SourceBatch(pa.RecordBatch.from_pylist([{"id": 99}]), stream="b")
        return super().of(path, *script[:6], late)


def test_a_topic_that_was_not_known_at_the_start_goes_on_after_a_start_over(run):
    run.items, run.items_of_b = 5, 1
    run.step(count=4)
    run.lose_state()
    shutil.rmtree(run.path / "source")
    run.topics = [("lake", "/a")]
    assert run.step(on_lost="start-over") is None
    assert run.ids("/b") == [0, 0], "it was not emptied, and it was asked to start over"


def test_a_zombie_that_completes_its_epoch_during_a_resume_is_not_doubled(run):
    run.step(count=1)
    zombie = run.loop()
    failpoints.arm("commit.topic=fail")
    with pytest.raises(RetryableError):
        zombie.step()
    failpoints.arm(None)
    zombie.state.close()
    shutil.move(run.path / "state", run.path / "zombie")
    resumed = run.loop(on_lost="resume")
    zombie.state.directory = run.path / "zombie"
    failpoints.arm("commit.after=fail")
    with pytest.raises(RetryableError):
        zombie.step()
    failpoints.arm(None)
    assert run.ids("/b") == [0, 1]
    with pytest.raises(Fenced):
        resumed.step()
    resumed.state.close()
    assert run.ids("/b") == [0, 1]


class NotedSource(MemorySource):
    """Its next range starts where the notes of the last one say."""

    def read(self, split):
        yield from super().read(split)
        yield Note(split)

    def next_start(self, end, notes):
        assert notes or not end.index, "the notes of the last epoch are gone"
        return end


def test_the_notes_of_the_last_epoch_survive_a_lost_state_directory(run):
    run.source_type = NotedSource
    run.step(count=2)
    run.lose_state()
    assert run.step(on_lost="resume") is None
    assert run.ids("/a") == [0, 1, 2]


class Forgetful(MemorySink):
    """Stages and commits, and keeps no marker that anyone can ask for."""

    def __init__(self, config):
        super().__init__(config)
        if config.path.name == "plain":
            self.capabilities = SinkConnectorCapabilities().with_two_phase_commit()

    def committed_epoch(self, pipeline, topic):
        return super().committed_epoch(pipeline, topic) if self.capabilities.exactly_once else None

    def commit_topic(self, epoch, topic, receipts, end):
        adopting = epoch if self.capabilities.exactly_once else type(epoch)(epoch.attempt, epoch.attempt, epoch.number)
        super().commit_topic(adopting, topic, receipts, end)


def test_a_sink_without_markers_gets_the_last_epoch_again_on_a_resume(run):
    run.sink_type = Forgetful
    loop = run.loop(sinks=("lake", "plain"))
    failpoints.arm("commit.sink=fail")
    with pytest.raises(RetryableError):
        loop.step()
    failpoints.arm(None)
    loop.state.close()
    assert run.ids("/a") == [0]
    assert run.ids("/a", "plain") == []
    run.lose_state()
    loop = run.loop(on_lost="resume", sinks=("lake", "plain"))
    loop.step()
    loop.state.close()
    assert run.ids("/a") == run.ids("/a", "plain") == [0]


def test_a_target_that_was_dropped_stops_the_run(run):
    run.step(count=2)
    shutil.rmtree(run.path / "lake" / "a")
    with pytest.raises(FatalError, match="PEN-5010"):
        run.step()
    assert run.ids("/b") == [0, 1]


def test_a_target_that_was_put_back_from_a_copy_stops_the_run(run):
    run.step(count=2)
    newest = max((run.path / "lake" / "a" / "log").iterdir())
    newest.unlink()
    with pytest.raises(FatalError, match="PEN-5010"):
        run.step()


def test_a_dropped_target_that_the_last_epoch_did_not_write_to_stops_the_run(tmp_path):
    run = Run(tmp_path, items_of_b=1)
    run.step(count=3)
    assert run.ids("/b") == [0]
    shutil.rmtree(run.path / "lake" / "b")
    with pytest.raises(FatalError, match="PEN-5010 sink 'lake' holds nothing of /b"):
        run.step()


@pytest.mark.parametrize("failpoint", ["plan.after=fail", "prepare.after=fail"])
def test_a_target_that_was_dropped_while_an_epoch_was_in_hand_stops_the_run(run, failpoint):
    run.step(count=2)
    run.step(failpoint)
    shutil.rmtree(run.path / "lake" / "a")
    for _ in range(2):  # a service starts again and again
        with pytest.raises(FatalError, match="PEN-5010 sink 'lake' holds nothing of /a"):
            run.step()


def test_after_a_reset_a_target_may_be_empty(run):
    run.step(count=2)
    shutil.rmtree(run.path / "lake")
    shutil.rmtree(run.path / "source")  # which knows what was acknowledged
    reset(run.path / "state", "orders")
    assert run.step(count=2) is None
    assert run.ids("/a") == [0, 1]


def put_back(run, topic, entries):
    """The target as it was some epochs ago."""
    log = sorted((run.path / "lake" / topic / "log").iterdir())
    for entry in log[entries:]:
        entry.unlink()


@pytest.mark.parametrize("failpoint", [None, "plan.after=fail", "prepare.after=fail"])
def test_a_target_that_the_newest_epoch_did_not_touch_is_missed_when_it_is_put_back(tmp_path, failpoint):
    run = Run(tmp_path, items=6, items_of_b=2)  # the epochs after the second have nothing for /b
    run.step(count=3)
    if failpoint is not None:
        run.step(failpoint)
    put_back(run, "b", 1)
    for _ in range(2):
        with pytest.raises(FatalError, match="PEN-5010 epoch 2 of /b is committed, and sink 'lake' holds epoch 1"):
            run.step()


@pytest.mark.parametrize("failpoint", [None, "plan.after=fail", "prepare.after=fail"])
def test_a_target_that_is_to_be_forgotten_is_not_missed_and_goes_on(tmp_path, failpoint):
    run = Run(tmp_path)
    run.step(count=2)
    run.step(failpoint)
    shutil.rmtree(run.path / "lake" / "b")
    with pytest.raises(FatalError, match=r"(?s)PEN-5010.*penstock offsets forget FILE /b"):
        run.step()
    with pytest.raises(ConfigError, match=r"(?s)was committed to /c.*/a, /b"):
        forget(run.path / "state", "orders", ["/b", "/c"])
    assert forget(run.path / "state", "orders", ["/b"]) == [("lake", "/b")]
    assert run.step(count=2) is None
    assert run.ids("/b") == run.ids("/a")[-2:]
    put_back(run, "b", 1)
    with pytest.raises(FatalError, match="PEN-5010"):
        run.step()


def test_a_target_of_before_a_resume_is_missed_when_it_is_put_back(run):
    run.step(count=3)
    run.lose_state()
    assert run.step(on_lost="resume", count=2) is None
    put_back(run, "a", 3)
    with pytest.raises(FatalError, match=r"PEN-5010.*of an earlier incarnation"):
        run.step()


def test_each_target_is_asked_once_at_a_start(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.step(count=2)
    asked = []
    real = MemorySink.committed_epoch
    monkeypatch.setattr(
        MemorySink, "committed_epoch", lambda self, pipeline, topic: asked.append(topic) or real(self, pipeline, topic)
    )
    run.loop().state.close()
    assert sorted(asked) == ["/a", "/b"]


def test_a_run_on_a_copy_of_the_state_that_reached_the_same_number_with_another_end_is_fenced(tmp_path):
    run = Run(tmp_path)
    copy = copied(run)
    run.step(count=1)
    with pytest.raises(Fenced, match="other ranges"):
        copy.step()
    copy.state.close()
    assert run.ids("/a") == run.ids("/b") == [0, 1]


def copied(run, epochs=1):
    """A loop on a copy of the state, whose next epoch is prepared and has two rows of each topic, not one."""
    run.step(count=epochs)
    shutil.copytree(run.path / "state", run.path / "copy")
    copy = run.loop(state="copy")
    copy.max_epoch_rows = 4
    failpoints.arm("prepare.after=fail")
    with pytest.raises(RetryableError):
        copy.step()
    failpoints.arm(None)
    return copy


def test_an_epoch_that_was_fenced_is_not_taken_for_committed_when_it_is_staged_again(run):
    copy = copied(run)
    run.step(count=1)
    copy.state.close()
    restage(run.path / "copy", "orders")
    for _ in range(2):
        copy = run.loop(state="copy")
        with pytest.raises(Fenced, match="other ranges"):
            copy.step()
        copy.state.close()
    assert run.ids("/a") == run.ids("/b") == [0, 1]


@pytest.mark.parametrize("starts", [False, True], ids=["while it runs", "when it starts"])
def test_what_a_run_has_committed_elsewhere_before_it_was_fenced_is_not_doubled_by_the_other(
    tmp_path, starts, monkeypatch
):
    run = Run(tmp_path)
    run.step(count=1)
    shutil.copytree(run.path / "state", run.path / "copy")
    winner, loser = run.loop(), run.loop(state="copy")
    winner.max_epoch_rows, loser.max_epoch_rows = 1, 4
    failpoints.arm("prepare.after=fail")
    with pytest.raises(RetryableError):
        loser.step()
    failpoints.arm(None)
    winner.step()  # its epoch 2 has a row of `/a` alone, and that of the other run two of each
    monkeypatch.setattr(
        commit, "sorted", lambda all, key=None: sorted(all, key=key, reverse=key is None), raising=False
    )
    with pytest.raises(Fenced, match="other ranges"):
        loser.step()
    monkeypatch.undo()
    assert (run.ids("/a"), run.ids("/b")) == ([0, 1], [0, 1, 2])
    for loop in (loser, winner) if starts else (loser,):
        loop.state.close()
    for _ in range(2):
        with pytest.raises(
            Fenced, match="PEN-5008 sink 'lake' holds an epoch 2 of /b of other ranges than this run has"
        ):
            run.step() if starts else winner.step()
    winner.state.close()
    assert run.ids("/b") == [0, 1, 2]


def test_a_try_that_fails_while_another_run_commits_its_number_is_fenced(run, monkeypatch):
    run.step(count=1)
    shutil.copytree(run.path / "state", run.path / "copy")
    copy = run.loop(state="copy")
    copy.max_epoch_rows = 4
    failpoints.arm("stage.after=fail")
    with pytest.raises(RetryableError):
        copy.step()
    failpoints.arm(None)
    run.step(count=1)
    with pytest.raises(Fenced, match="other ranges"):
        copy.step()
    copy.state.close()


def test_targets_that_two_runs_have_each_given_an_epoch_of_one_number_are_no_place_to_resume_from(
    run, tmp_path_factory
):
    other = Run(tmp_path_factory.mktemp("other") / "copy")
    run.step(count=1)
    shutil.copytree(run.path, other.path)
    loop = other.loop()
    loop.max_epoch_rows = 4
    loop.step()
    loop.state.close()
    run.step("commit.topic=fail")  # `/a` is committed, and `/b` is the other run's
    shutil.rmtree(run.path / "lake" / "b")
    shutil.copytree(other.path / "lake" / "b", run.path / "lake" / "b")
    assert (run.ids("/a"), run.ids("/b")) == ([0, 1], [0, 1, 2])
    run.lose_state()
    for _ in range(2):
        with pytest.raises(FatalError, match="PEN-5007 some targets hold an epoch 2 of other ranges"):
            run.step(on_lost="resume")


@pytest.mark.parametrize("entries", [0, 1], ids=["dropped", "put back"])
@pytest.mark.parametrize("items_of_b", [2, 8], ids=["not in the last epoch", "in the last epoch"])
def test_a_resume_misses_a_target_that_is_older_than_the_others(tmp_path, entries, items_of_b):
    run = Run(tmp_path, items_of_b=items_of_b)
    run.step(count=4)
    shutil.copytree(run.path / "lake" / "b", run.path / "whole")
    put_back(run, "b", entries)
    run.lose_state()
    for _ in range(2):
        with pytest.raises(
            FatalError, match=r"PEN-5010 sink 'lake' holds (nothing|epoch 1) of /b, to which epoch [123] was"
        ):
            run.step(on_lost="resume")
    shutil.rmtree(run.path / "lake" / "b")
    shutil.copytree(run.path / "whole", run.path / "lake" / "b")
    for _ in range(2):  # and once more in the incarnation that follows
        before = len(run.ids("/a"))
        run.lose_state()
        assert run.step(on_lost="resume") is None
        assert run.ids("/a") == list(range(len(run.ids("/a"))))
        assert run.ids("/b") == run.ids("/a")[:items_of_b]
        assert len(run.ids("/a")) > before or before == run.items


class TwoTables(MemorySource, TableSource):
    """Its streams are tables: one that a sink refuses is left out, and the others go on."""

    def tables(self, position):
        return {stream: TableState("active") for stream in ("a", "b")}


class Choosy(MemorySink):
    """`other` takes the first row of `/b`, and refuses the second one."""

    def write_batch(self, topic, batch):
        if topic == "/b" and self.config.path.name == "other" and batch["id"][0].as_py() > 0:
            raise SchemaError("no place for this row")
        return super().write_batch(topic, batch)


def test_a_table_that_one_sink_refuses_is_in_no_sink_of_that_epoch(tmp_path):
    run = Run(tmp_path, items=2, source_type=TwoTables, sink_type=Choosy)
    loop = run.loop(sinks=("lake", "other"))
    loop.max_epoch_rows = 4
    report = loop.step()
    loop.state.close()
    assert run.ids("/a") == run.ids("/a", "other") == [0, 1]
    assert run.ids("/b") == run.ids("/b", "other") == []
    (note,) = State(run.path / "state", "orders").peek().newest.notes["memory"]
    assert (note["failed"]["stream"], note["failed"]["code"]) == ("b", "PEN-4000")
    assert ("lake", "/b") not in report.rows_out
