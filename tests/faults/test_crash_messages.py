"""Kill a run of messages, some of which are bad, and then a replay of those, at every step: in = out + dead, none twice."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock import failpoints
from penstock.connectors.delta import Delta
from penstock.errors import DataError
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.epochs import State
from penstock.runtime.messages.replay import ReplayRequests, Step
from penstock.sink import Topic, WriteResult
from penstock.testing import ForkEngine
from penstock.testing.engine import Forked, Killed
from penstock.testing.processes import elsewhere
from test_messages import Home
from thorough import few

STEPS = [name for name in failpoints.NAMES if not name.startswith(("plan_apply", "apply", "commit.topic"))]
"""Every step; `commit.topic` needs a sink with two topics, and the second stage one that applies changes."""

COUNT = 40
MISFIT = 13
"""A message that is well formed, and that the sink refuses."""


class Picky(Delta):
    """Refuses a row until a file says that it was corrected."""

    name = "picky"

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        is_corrected = Path(self.config.path).parent.parent.joinpath("corrected").exists()
        if "id" in batch.schema.names and not is_corrected and pc.any(pc.equal(batch.column("id"), MISFIT)).as_py():
            raise DataError(f"{MISFIT} is refused")
        return super().write_batch(topic, batch)


class Run(Home):
    """A pipeline of which a schema and a sink are corrected later."""

    corrected = False

    def entry(self) -> str:
        key = "" if self.corrected else 'key = ["id"]\n'
        return f'[[schemas]]\ntopic = "/a"\nschema_type = "json"\n{key}'

    def fill(self) -> None:
        for number in range(COUNT):
            extra = {"extra": number / 2} if number > COUNT // 2 else {}
            self.put({"no" if number % 7 == 3 else "id": number, **extra})

    def correct(self) -> None:
        self.corrected = True
        (self.path / "corrected").touch()

    def drive(self, failpoint: str | None = None) -> None:
        """A run to its end, or to its failpoint, in a process of its own."""
        self.pipeline(self.entry())
        file = self.path / "pipeline.toml"
        file.write_text(file.read_text().replace('"delta"', '"test_crash_messages:Picky"'))

        def run() -> None:
            os.fsync = lambda fd: None  # SIGKILL leaves the page cache
            failpoints.arm(failpoint)
            supervisor.run(Pipeline.from_toml(file), ForkEngine(2, die_with_task=True), drain=True)

        Forked(run).result()

    def killed(self, step: str) -> None:
        with pytest.raises(Killed):
            self.drive(f"{step}=kill")

    def numbers(self) -> list[int]:
        """The messages that became rows."""

        def read() -> list[int]:
            shown = self.rows() if (self.path / "lake" / "a" / "_delta_log").exists() else []
            return sorted(row["id"] if row["id"] is not None else row["no"] for row in shown)

        return Forked(read).result()

    def attempts(self) -> Counter[int]:
        """How many letters there are of each attempt."""
        return Forked(lambda: Counter(letter["attempt"] for letter in self.letters())).result()

    def ask(self) -> None:
        state = State(self.path / "state", "messages").peek()
        assert state.newest is not None
        step = Step(verb="replay", incarnation=state.identity.incarnation, epoch=state.newest.number)
        ReplayRequests.of(self.path / "state").add(step)


DEAD = [number for number in range(COUNT) if number % 7 == 3 or number == MISFIT]


def _killed(path: Path, step: str) -> None:
    run = Run(path)
    run.fill()
    run.killed(step)
    assert Counter(run.numbers()) <= Counter(range(COUNT))
    run.drive()
    assert run.numbers() == sorted(set(range(COUNT)) - set(DEAD))
    assert run.attempts() == {1: len(DEAD)}
    run.ask()
    run.correct()
    if not step.startswith("journal"):
        run.killed(step)
    run.drive()
    run.drive()
    assert run.numbers() == list(range(COUNT))
    assert run.attempts() == {1: len(DEAD)}


def _fails_again(path: Path, step: str) -> None:
    run = Run(path)
    run.fill()
    run.drive()
    run.ask()
    run.killed(step)
    run.drive()
    assert run.attempts() == {1: len(DEAD), 2: len(DEAD)}
    run.ask()
    run.correct()
    run.drive()
    assert run.numbers() == list(range(COUNT))
    assert run.attempts() == {1: len(DEAD), 2: len(DEAD)}


def _store_lost(path: Path) -> None:
    """The letters are found again, also those that only a sink's refusal makes."""
    run = Run(path)
    run.fill()
    run.killed("prepare.after")
    staged = list((path / "state" / "dead_letters").rglob("*.parquet"))
    assert staged
    for file in staged:
        file.unlink()
    run.drive()
    assert run.numbers() == sorted(set(range(COUNT)) - set(DEAD))
    assert run.attempts() == {1: len(DEAD)}


@pytest.mark.parametrize("step", few(STEPS))
def test_bad_messages_are_neither_lost_nor_doubled_by_a_kill_nor_by_one_of_their_replay(
    tmp_path: Path, step: str
) -> None:
    elsewhere(_killed, tmp_path, step)


@pytest.mark.parametrize("step", few(["plan.after", "stage.after", "prepare.after", "commit.sink", "committed.after"]))
def test_a_replay_that_fails_again_makes_each_letter_once(tmp_path: Path, step: str) -> None:
    elsewhere(_fails_again, tmp_path, step)


def test_letters_that_were_staged_and_are_gone_are_staged_again(tmp_path: Path) -> None:
    elsewhere(_store_lost, tmp_path)
