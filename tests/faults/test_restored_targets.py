"""Targets that were restored from an older copy, and runs on copies of one state directory: with every sink that has a marker."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pytest

from penstock import failpoints
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.errors import ConnectorError, FatalError, Fenced
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.runtime.task import run_task, run_work
from penstock.sink import Task
from penstock.source import SourceBatch
from penstock.testing import MemorySink, MemorySinkConfig, MemorySource

SINKS = {
    "files": lambda path: FilesSink(FilesSinkConfig(path=f"{path}/{{topic}}")),
    "delta": lambda path: Delta(DeltaConfig(path=f"{path}/{{topic}}")),
    "delta upsert": lambda path: Delta(DeltaConfig(path=f"{path}/{{topic}}", mode="upsert", key=["id"])),
    "delta vectors": lambda path: Delta(
        DeltaConfig(path=f"{path}/{{topic}}", mode="upsert", key=["id"], apply="vectors")
    ),
    "iceberg": lambda path: Iceberg(IcebergConfig(path=f"{path}/{{topic}}")),
    "iceberg upsert": lambda path: Iceberg(IcebergConfig(path=f"{path}/{{topic}}", mode="upsert", key=["id"])),
    "memory": lambda path: MemorySink(MemorySinkConfig(path=path)),
}


class Inline:
    parallelism = 1
    is_local = True

    def check(self, routes, keyed=()):
        pass

    def run(self, job):
        return [run_task(job, job.parts, Task(0))]

    def apply(self, job):
        return [run_work(job, range(len(job.work)), Task(0))]


class Run:
    """A pipeline of two topics. Each item is an epoch; from the third on there are none for `/b`."""

    def __init__(self, path, make):
        self.path, self.make = path, make
        (path / "source").mkdir()

    def loop(self, state="state"):
        rows = [(n, s) for n in range(8) for s in "ab" if s == "a" or n < 2]
        batches = [SourceBatch(pa.RecordBatch.from_pylist([{"id": n}]), stream=s) for n, s in rows]
        source, sink = MemorySource.of(self.path / "source", *batches), self.make(self.path / "lake")
        opened = State(self.path / state, "orders")
        opened.open()
        try:
            parts = {"memory": source}, {"lake": sink}, Router((), ("lake",)), Inline()
            loop = EpochLoop(opened, *parts, max_epoch_rows=2, threads=1)
            loop.contexts.open()
            loop.start([("lake", "/a"), ("lake", "/b")])
        except BaseException:
            opened.close()
            raise
        return loop

    def step(self, count=1, failpoint=None):
        loop = self.loop()
        failpoints.arm(failpoint)
        try:
            for _ in range(count):
                loop.step()
        except ConnectorError:
            assert failpoint is not None
        finally:
            failpoints.arm(None)
            loop.state.close()
            for sink in loop.sinks.values():
                sink.close()

    def ids(self, topic):
        sink = self.make(self.path / "lake")
        if isinstance(sink, MemorySink):
            return [row["id"] for row in sink.visible(topic)]
        sink.open()
        try:
            return sorted(sink.read_topic(topic)["id"].to_pylist())
        finally:
            sink.close()


@pytest.fixture(params=SINKS)
def run(tmp_path, request):
    return Run(tmp_path, SINKS[request.param])


@pytest.mark.parametrize("failpoint", [None, "plan.after=fail", "prepare.after=fail"])
def test_a_topic_that_is_restored_is_missed_whatever_the_newest_epoch_is(run, failpoint):
    run.step()
    shutil.copytree(run.path / "lake" / "b", run.path / "old")
    run.step(2)
    if failpoint is not None:
        run.step(1, failpoint)
    assert run.ids("/b") == [0, 1]
    shutil.rmtree(run.path / "lake" / "b")
    shutil.copytree(run.path / "old", run.path / "lake" / "b")
    for _ in range(2):
        with pytest.raises(FatalError, match="PEN-5010"):
            run.step()


def test_two_runs_on_copies_of_a_state_that_reach_one_number_with_other_ends_are_told_apart(run):
    run.step()
    shutil.copytree(run.path / "state", run.path / "copy")
    copy = run.loop("copy")
    copy.max_epoch_rows = 3
    failpoints.arm("prepare.after=fail")
    with pytest.raises(ConnectorError):
        copy.step()
    failpoints.arm(None)
    run.step()
    with pytest.raises(Fenced, match="other ranges"):
        copy.step()
    copy.state.close()
    assert run.ids("/a") == run.ids("/b") == [0, 1]
