"""
Random histories of runs, crashes, and copies of states and targets that are put back.

Most of them end in an error that a person must answer. But a run that ends well must leave in every target exactly the rows
up to where its state says that it has come: none lost, none doubled.
"""

from __future__ import annotations

import contextlib
import random
import shutil

import pyarrow as pa
import pytest
from test_restored_targets import SINKS, Inline

from penstock import failpoints
from penstock.errors import ConnectorError
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State, restage
from penstock.source import SourceBatch
from penstock.testing import MemorySink, MemorySource

ROWS = [(n, stream) for n in range(30) for stream in "ab" if stream == "a" or n % 3 == 0]
TARGETS = [("one", "/a"), ("one", "/b"), ("two", "/a"), ("two", "/b")]
CRASHES = ("plan.after", "stage.after", "prepare.after", "commit.before", "commit.topic", "commit.after",
           "committed.after", "ack.after")  # fmt: skip


class Lasting(MemorySource):
    """Its rows can be read again whatever was acknowledged, so that nothing but the epochs keeps them from coming twice."""

    def ack(self, end):
        pass


class History:
    """Deeds, one after the other. States and targets are directories: to copy one is all that a backup does."""

    def __init__(self, path, make, seed):
        self.path, self.make = path, make
        self.dice = random.Random(seed)
        self.states = ["state"]
        self.kept = []
        self.told = []
        (path / "source").mkdir(parents=True)

    def loop(self, state, on_lost="stop"):
        batches = [SourceBatch(pa.RecordBatch.from_pylist([{"id": n}]), stream=s) for n, s in ROWS]
        sinks = {name: self.make(self.path / name) for name in ("one", "two")}
        opened = State(self.path / state, "orders")
        opened.open()
        try:
            source = Lasting.of(self.path / "source", *batches)
            parts = {"memory": source}, sinks, Router((), ("one", "two")), Inline()
            loop = EpochLoop(opened, *parts, max_epoch_rows=self.dice.choice([1, 2, 3, 5]), threads=1)
            loop.contexts.open()
            loop.start(TARGETS, on_lost)
        except BaseException:
            opened.close()
            raise
        return loop

    def run(self, state, on_lost="stop", crashes=False, beside=None):
        loops = [self.loop(state, on_lost)]
        try:
            loops += [] if beside is None else [self.loop(beside)]
            for _ in range(self.dice.randrange(1, 4)):
                if crashes:
                    failpoints.arm(f"{self.dice.choice(CRASHES)}=fail@{self.dice.choice([1, 1, 2])}")
                self.dice.choice(loops).step()
                loops[0].step()
        finally:
            failpoints.arm(None)
            for loop in loops:
                loop.state.close()
                for sink in loop.sinks.values():
                    sink.close()
        newest = loops[0].state.newest
        if newest is not None and newest.state == "committed":
            self.check(newest.ranges["memory"].end["index"])

    def check(self, end):
        for sink, topic in TARGETS:
            expected = [n for n, stream in ROWS[:end] if f"/{stream}" == topic]
            assert self.ids(sink, topic) == expected, f"{topic} in {sink}, up to {end}, after {self.told}"

    def ids(self, name, topic):
        sink = self.make(self.path / name)
        if isinstance(sink, MemorySink):
            return sorted(row["id"] for row in sink.visible(topic))
        sink.open()
        with contextlib.closing(sink):
            found = sink.read_topic(topic)
            return sorted(found["id"].to_pylist()) if found is not None else []

    def do(self):
        deeds = {"run": 8, "crash": 5, "resume": 1, "two at once": 1, "stage again": 1, "copy a state": 2, "keep": 4,
                 "put back": 3, "drop": 0.5}  # fmt: skip
        what, state = self.dice.choices(list(deeds), list(deeds.values()))[0], self.dice.choice(self.states)
        self.told.append(f"{what} ({state})")
        with contextlib.suppress(ConnectorError):
            if what in ("run", "crash"):
                self.run(state, crashes=what == "crash")
            elif what == "two at once":
                others = [each for each in self.states if each != state]
                self.run(state, beside=self.dice.choice(others) if others else None)
            elif what == "resume":
                shutil.rmtree(self.path / state, ignore_errors=True)
                self.run(state, on_lost="resume")
            elif what == "stage again" and (self.path / state).exists():
                restage(self.path / state, "orders")
            else:
                self.move(what, state)

    def move(self, what, state):
        name, topic = self.dice.choice(TARGETS)
        target = self.dice.choice([self.path / state, self.path / name / topic[1:], self.path / name / topic[1:]])
        if what == "copy a state" and (self.path / state).exists():
            self.states.append(f"state{len(self.states)}")
            shutil.copytree(self.path / state, self.path / self.states[-1])
        elif what == "keep" and target.exists():
            self.kept.append((target, self.path / f"kept{len(self.kept)}"))
            shutil.copytree(*self.kept[-1])
        elif what == "put back" and self.kept:
            target, copy = self.dice.choice(self.kept)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(copy, target)
        elif what == "drop":
            shutil.rmtree(self.path / name / topic[1:], ignore_errors=True)


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [("memory", 12), *(pytest.param(kind, 150, marks=pytest.mark.soak) for kind in SINKS)],
)
def test_a_run_that_ends_well_has_lost_and_doubled_nothing_whatever_was_put_back_before_it(tmp_path, kind, seeds):
    for seed in range(seeds):
        history = History(tmp_path / str(seed), SINKS[kind], seed)
        for _ in range(history.dice.randrange(6, 16)):
            history.do()
        shutil.rmtree(tmp_path / str(seed))
