"""
A source of changes that follow from their number alone, so that the end of it can be computed; and a run without a JVM.

The first tick makes `ROWS` rows; each later one changes or deletes `CHANGES` of them, by keys drawn at random.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.changes import CHANGE_FIELDS
from penstock.config import Config
from penstock.schema import with_key
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch

ROWS = 60_000
CHANGES = 200
PER_SECOND = 5
SCHEMA = with_key(pa.schema([("id", pa.int64()), ("value", pa.int64()), ("note", pa.string()), *CHANGE_FIELDS]), ["id"])


class UpdatesConfig(Config):
    path: Path
    """A file that says after which tick to stop, once it is there; `….began` beside it holds the time of the first tick."""


class Tick(Position):
    tick: int = 0


class Updates(RangeSource[UpdatesConfig, Tick]):
    name = "updates"

    def schema(self) -> Schemas:
        return {"rows": SCHEMA}

    def latest(self, start: Tick, limit: ReadLimit) -> Tick:
        return limit.bounded(Tick(tick=max(start.tick, min(start.tick + 25, due(self.config.path)))))

    def split(self, start: Tick, end: Tick) -> Sequence[tuple[int, int]]:
        middle = (start.tick + end.tick + 1) // 2
        return [each for each in ((start.tick, middle), (middle, end.tick)) if each[0] < each[1]]

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch]:
        for tick in range(*split):
            ids, values, deleted = changes(tick)
            count = len(ids)
            columns = {
                "id": pa.array(ids),
                "value": pa.array(values),
                "note": pa.array([f"note {each % 97}" for each in values.tolist()]),
                "_op": pa.array(np.where(deleted, "d", "u" if tick else "c")),
                "_position": pa.array([f"{tick:09d}.{place:06d}" for place in range(count)]),
            }
            arrays = [columns.get(each.name, pa.nulls(count, each.type)).cast(each.type) for each in SCHEMA]
            yield SourceBatch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), stream="rows")


def due(limit: Path) -> int:
    """How many ticks there are by now."""
    if limit.exists():
        return int(limit.read_text())
    began = float(limit.with_name(f"{limit.name}.began").read_text())
    return int((time.time() - began) * PER_SECOND) + 1


def changes(tick: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, values and which of them are deletes. No value comes twice."""
    if not tick:
        return np.arange(ROWS), np.arange(ROWS), np.zeros(ROWS, bool)
    chance = np.random.default_rng(tick)
    ids = chance.integers(0, ROWS, CHANGES)
    return ids, ROWS + (tick - 1) * CHANGES + np.arange(CHANGES), chance.random(CHANGES) < 0.1


def values(ticks: int) -> np.ndarray:
    """The values of all changes."""
    return np.arange(ROWS + max(0, ticks - 1) * CHANGES)


def expected(ticks: int) -> np.ndarray:
    """The last value of each key; -1 if it is deleted."""
    found = np.full(ROWS, -1)
    for tick in range(ticks):
        ids, new, deleted = changes(tick)
        for place, value, gone in zip(ids.tolist(), new.tolist(), deleted.tolist(), strict=True):
            found[place] = -1 if gone else value
    return found


def main() -> None:
    from penstock.pipeline import Pipeline
    from penstock.runtime import supervisor
    from penstock.testing import ForkEngine

    engine = ForkEngine(2, task_attempts=2, zygote=True)  # before any client is made
    supervisor.run(Pipeline.from_toml(sys.argv[1]), engine, drain="--drain" in sys.argv)


if __name__ == "__main__":
    main()
