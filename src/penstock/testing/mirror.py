"""A change-capture pipeline into the kit's sink, killed and started again at will, and the oracle that reads its log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock import failpoints
from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import unpack_key
from penstock.errors import RetryableError
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.source import RangeSource
from penstock.tables import TableSource
from penstock.testing.crash.stage import open_when_free
from penstock.testing.engine import Forked, ForkEngine, Killed
from penstock.testing.memory import MemorySink, MemorySinkConfig
from penstock.testing.processes import PATIENCE_SECS

Row = dict[str, Any]
Until = Literal["caught_up", "copied", "killed"]
"""When a run ends: with nothing left to read, as soon as every table is copied, or not by itself."""

_ABOUT = {each.name for each in CHANGE_FIELDS}


@dataclass
class Mirror:
    """A pipeline from one range source into a log of changes, in a directory."""

    path: Path
    source: RangeSource[Any, Any]
    parallelism: int = 2

    def run(self, failpoint: str | None = None, until: Until = "caught_up") -> int:
        """Run in a process of its own to its end; how many epochs it committed."""
        return self.start(failpoint, until).result()

    def start(self, failpoint: str | None = None, until: Until = "killed") -> Forked[int]:
        """Begin a run."""
        return Forked(lambda: self._drive(failpoint, until))

    def killed(self, failpoint: str) -> bool:
        """Run until the failpoint kills it; False if it came to its end instead."""
        try:
            self.run(failpoint)
        except Killed:
            return True
        return False

    def log(self, stream: str) -> list[Row]:
        """Everything that was written of a stream, in the order of the changes."""
        rows = next(iter(self._sinks().values())).visible(f"/{stream}")
        return sorted(rows, key=lambda row: row["_position"])

    def _sink(self) -> MemorySink:
        return MemorySink(MemorySinkConfig(path=self.path / "target"))

    def _sinks(self) -> dict[str, MemorySink]:
        return {"target": self._sink()}

    def _drive(self, failpoint: str | None, until: Until) -> int:
        state, sinks, committed = State(self.path / "state", "mirror"), self._sinks(), 0
        open_when_free(state)
        engine = ForkEngine(self.parallelism, die_with_task=True)
        loop = EpochLoop(state, {"source": self.source}, sinks, Router((), tuple(sinks)), engine)
        failpoints.arm(failpoint)
        patience = time.monotonic() + PATIENCE_SECS
        try:
            loop.contexts.open()
            loop.start([])
            while True:
                try:
                    report = loop.step()
                except RetryableError:  # a killed run's session may hold the slot for a moment
                    if time.monotonic() > patience:
                        raise
                    time.sleep(0.05)
                    continue
                committed += report is not None
                if report is None and loop.unacked:
                    loop.ack()
                ended = {"killed": False, "copied": True, "caught_up": report is None and not loop.unacked}[until]
                if ended and not _copying(loop):
                    return committed
                if report is None:
                    time.sleep(0.01)
        finally:
            failpoints.arm(None)
            self.source.close()
            state.close()


def _copying(loop: EpochLoop) -> bool:
    newest = loop.state.newest
    if newest is None:
        return True
    source = loop.sources["source"]
    end = source.position_type.model_validate(newest.ranges["source"].end)
    assert isinstance(source, TableSource)
    known = source.tables(source.next_start(end, newest.notes.get("source", ())))
    return any(table.state == "seeding" for table in known.values())


def replayed(log: Sequence[Row], key: Sequence[str], refreshed: bool = False) -> list[Row]:
    """
    The table that a log of changes leads to; the log must be exact.

    Every key begins with one `r` or `c`, is updated and deleted only while it is there, and is copied only while it is not.
    `refreshed`: rows were copied over those that are there, once more, and changes that the copy holds come after it.
    """
    table: dict[tuple[Any, ...], Row] = {}
    for row in log:
        op, values = row["_op"], {name: value for name, value in row.items() if name not in _ABOUT}
        place = tuple(values[name] for name in key)
        if op == Op.TRUNCATE:
            table.clear()
            continue
        if op == Op.DELETE:
            assert place in table or refreshed, f"{place} is deleted and not there: {row}"
            table.pop(place, None)
            continue
        old = place
        if row["_old_key"] is not None:
            before = unpack_key(row["_old_key"])
            old = tuple(before[name] for name in key)
        if op == Op.UPDATE:
            assert old in table or refreshed, f"{old} is updated and not there: {row}"
            for name in row["_unchanged"] or ():
                values[name] = table.get(old, table.get(place, {})).get(name)
            table.pop(old, None)
        assert place not in table or refreshed, f"{place} comes twice: {row} after {table[place]}"
        table[place] = values
    return sorted(table.values(), key=lambda row: tuple(map(repr, (row[name] for name in key))))


def versions_are_dense(log: Sequence[Row], key: str, version: str) -> None:
    """Every change of a row counts `version` up by one: none may be missing, none may come twice."""
    last: dict[Any, int] = {}
    for row in log:
        if row["_op"] == Op.TRUNCATE:
            last.clear()
        elif row["_op"] == Op.DELETE:
            last.pop(row[key])
        else:
            before = last.get(row[key])
            assert before is None or row[version] == before + 1, f"{row[key]} was at {before}, then came {row}"
            last[row[key]] = row[version]
