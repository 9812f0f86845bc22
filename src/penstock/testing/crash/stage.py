"""One pipeline under test: its runs, which are killed or stopped, and what must be visible afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import pyarrow as pa

from penstock import failpoints
from penstock.changes import CHANGE_FIELDS
from penstock.changes.old_key import pack_key
from penstock.errors import FatalError, RetryableError
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State, replica, sweep
from penstock.schema import with_key
from penstock.sink import SinkConnector, Topic
from penstock.source import SourceBatch
from penstock.testing.engine import Forked, ForkEngine, Killed
from penstock.testing.faults import Fault, FaultySink
from penstock.testing.memory import MemorySource
from penstock.testing.processes import PATIENCE_SECS, is_stopped, process_state, wait_until

if TYPE_CHECKING:
    from penstock.testing.crash import CrashContract

Rows = Any
"""Rows as a reader gets them: an Arrow table, or a list of dicts."""


TOPICS = ("/a", "/b")


SINKS = ("one", "two")


EPOCHS = 3


EPOCH_ROWS = 8
"""Rows of one topic in one epoch: two batches, one for each of two tasks."""


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
        if wait_until(lambda: process_state(process.pid) in "TZ", passes) and not is_stopped(process.pid):
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
            if not self.contract.whole_epochs:  # the last one may be there in part
                whole += sorted(id for id in ids if len(whole) <= id < len(whole) + EPOCH_ROWS)
            assert sorted(ids) == whole, f"{topic} in {sink} is not a prefix of whole epochs: {_difference(ids, whole)}"

    def check_all(self, epochs: int = EPOCHS) -> None:
        """Every row exactly once in each topic of each sink, in order where the contract promises it."""
        expected = list(range(epochs * EPOCH_ROWS))
        for (sink, topic), ids in self.rows().items():
            shown = ids if self.contract.ordered else sorted(ids)
            assert shown == expected, f"{topic} in {sink}: {_difference(ids, expected)}"

    def check_swept(self) -> None:
        """Nothing of a dead try is left, once its tasks cannot write any more."""
        state = self.state().peek()
        for manifest in (state.load(number) for number in range(1, EPOCHS + 1)):
            assert manifest is not None
            won = {each for topics in manifest.kept.values() for each in topics.values()}
            dead = set(manifest.applies) - won
            left = [file for name in dead for file in self.path.rglob(f"*{name}*") if file.is_file()]
            assert not left, f"a dead try left {left}"

    def unlock(self) -> None:
        """Take the lock away from a run that still holds it, as a lost network mount would."""
        (self.path / "state" / "lock").unlink(missing_ok=self.contract.stored)

    def state(self, name: str = "state") -> State:
        """The state of a run: a directory, or a copy of its own of what a store has."""
        if not self.contract.stored:
            return State(self.path / name, "crash")
        return State(self.path / f"copy-{uuid4().hex[:8]}", "crash", self.path / name)

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
            state=self.state(run.state),
            sources={"memory": self.source()},
            sinks=sinks,
            router=Router((), SINKS),
            engine=ForkEngine(2, die_with_task=True, orphans=run.orphans, zygote=self.contract.zygote),
            max_epoch_rows=(4 if self.applies_changes else 2) * EPOCH_ROWS,
            on_phase=arm,
            threads=run.threads,
        )

    def _drive(self, run: Run) -> int:
        os.fsync = _no_fsync  # SIGKILL leaves the page cache; what a power cut leaves is tested elsewhere
        if run.sweeps:
            sweep.SWEEP_AFTER_SECS = 0.0  # no task of an earlier run is alive
        replica.LEASE_SECS = 0.1  # nobody renews that of a run which was killed
        loop = self.loop(run)
        open_when_free(loop.state)
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


def as_rows(rows: Rows) -> list[dict[str, Any]]:
    return rows.to_pylist() if isinstance(rows, pa.Table) else [dict(row) for row in rows]


def is_hidden(file: Path, below: Path) -> bool:
    """True for a sink's bookkeeping: a name with a dot at its front, or anything below one."""
    return any(part.startswith(".") for part in file.relative_to(below).parts)


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


def kill_at(step: str) -> str:
    name, _, count = step.partition("@")
    return f"{name}=kill@{count or 1}"


def _difference(found: Sequence[int], expected: Sequence[int]) -> str:
    doubled = sorted(each for each, count in Counter(found).items() if count > 1)
    missing, strange = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    parts = {"lost": missing, "doubled": doubled, "not expected": strange}
    return "; ".join(f"{name} {ids}" for name, ids in parts.items() if ids) or f"not in order: {list(found)}"


def open_when_free(state: State) -> None:
    """A killed run's tasks hold its lock until they are gone as well."""
    until = time.monotonic() + PATIENCE_SECS
    while True:
        try:
            return state.open()
        except FatalError as error:
            if error.code != "PEN-5002" or time.monotonic() > until:
                raise
        time.sleep(0.005)
