"""Updates of random rows at a steady rate, which follow from their number alone: so what a table must hold can be computed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.config import Config
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch

NUMBERS, TEXTS = 6, 3


class UpdatesConfig(Config):
    path: Path
    """A file that holds the time of the first update. Until it is there, there is one update, which is not counted."""

    rows: int
    """Of the table."""

    rate: int
    """Updates a second."""


class Count(Position):
    count: int = 0


class Updates(RangeSource[UpdatesConfig, Count]):
    name = "updates"

    def schema(self) -> Schemas:
        return {"rows": updates(np.arange(0), self.config.rows).schema}

    def latest(self, start: Count, limit: ReadLimit) -> Count:
        began = self.config.path
        due = 1 + int((time.time() - float(began.read_text())) * self.config.rate) if began.exists() else 1
        return limit.bounded(Count(count=max(start.count, due)))

    def split(self, start: Count, end: Count) -> Sequence[tuple[int, int]]:
        return [(start.count, end.count)] if start.count < end.count else []

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch]:
        yield SourceBatch(updates(np.arange(*split), self.config.rows), stream="rows")


def rows(ids: np.ndarray, turn: np.ndarray | int) -> pa.RecordBatch:
    """Ten columns whose values follow from the id and the turn."""
    numbers = {f"n{place}": pa.array(ids * (place + 7) % 1_000_003 + turn) for place in range(NUMBERS)}
    texts = {f"t{place}": pa.array((ids * 31 + place + turn) % 9973).cast(pa.string()) for place in range(TEXTS)}
    return pa.record_batch({"id": pa.array(ids), **numbers, **texts})


def updates(numbers: np.ndarray, of: int) -> pa.RecordBatch:
    """The rows that these updates write."""
    return rows(keys(numbers, of), numbers + 1)


def keys(numbers: np.ndarray, of: int) -> np.ndarray:
    """For each update its key, as good as drawn at random (splitmix64)."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(of)).astype(np.int64)


def wrong(ids: np.ndarray, values: np.ndarray, count: int, of: int) -> int:
    """How many rows of a table are missing, doubled or not as so many updates leave them; `values` are of the column `n0`."""
    turns = np.zeros(of, np.int64)
    turns[keys(np.arange(count), of)] = np.arange(count) + 1  # the last one of each key stays
    order = np.argsort(ids, kind="stable")
    ids, values = ids[order], values[order]
    if len(ids) != of or not np.array_equal(ids, np.arange(of)):
        return abs(len(ids) - of) + len(np.setdiff1d(np.arange(of), ids)) or of
    return int(np.count_nonzero(values != ids * 7 % 1_000_003 + turns))
