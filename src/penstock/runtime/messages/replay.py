"""
A replay is a source: it reads the dead letters that were asked for, once, by a position in the manifest like any other.

The position is the list of what was asked for, in order. A letter that one of its steps covers is done with: replayed or
dropped. So nothing is deleted or marked in the store, and a kill between any two steps of an epoch changes nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from penstock.config import Config
from penstock.durable import Json
from penstock.errors import ConfigError, RetryableError
from penstock.requests import Inbox
from penstock.runtime.messages.letters import LETTERS, REPLAY, TOPIC, rows_of, stored, to_ipc
from penstock.sink import SinkConnector
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch

WHERE = ("topic", "code", "rule", "source", "stream", "sink", "kind")
"""Columns by which letters can be chosen."""

Verb = Literal["replay", "drop"]

Fates = npt.NDArray[np.int64]
"""Per letter the number of the first step that covers it; -1: none does."""


class Step(BaseModel):
    """Letters that were asked for: those of the epochs up to `epoch` that have these values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verb: Verb
    incarnation: str
    """Whose letters are meant: one that reads everything again from the beginning makes letters of its own."""
    epoch: int
    where: Mapping[str, str] = {}

    def covers(self, other: Step) -> bool:
        """True if every letter that the other step covers is covered by this one."""
        same = self.incarnation == other.incarnation
        return same and self.epoch >= other.epoch and self.where.items() <= other.where.items()

    def replaces(self, earlier: Step) -> bool:
        """True if the earlier step says nothing besides this one: what was dropped is never said to be replayed."""
        return self.covers(earlier) and (self.verb == "drop" or earlier.verb == "replay")


class ReplayRequest(BaseModel):
    """What somebody asks for with `penstock dlq`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    step: Step
    letters: str = ""
    """The sink that the file named for dead letters; empty: none. A run with another one leaves the request alone."""


class ReplayRequests(Inbox[ReplayRequest]):
    """The requests that wait for the next epoch."""

    def __init__(self, state_dir: Path | None) -> None:
        super().__init__(None if state_dir is None else state_dir / "requests", ReplayRequest)

    @classmethod
    def of(cls, pipeline_state: Path) -> ReplayRequests:
        """Those in the state directory of a pipeline."""
        return cls(pipeline_state / "sources" / REPLAY)

    def add(self, step: Step, letters: str = "") -> ReplayRequest:
        """Leave a request; it is on disk when this returns."""
        return self.leave(lambda name: ReplayRequest(name=name, step=step, letters=letters))


class Replayed(Position):
    """Everything that was asked for so far."""

    steps: tuple[Step, ...] = ()
    requests: tuple[str, ...] = ()
    """Names of the requests that the last of the steps came from."""


class ReplayConfig(Config):
    path: Path
    """The Delta table that holds the letters."""

    incarnation: str
    """Whose letters count."""

    sink: Any = None
    """The sink that holds more of them, if the file names one that can be read."""

    named: str = ""
    """The name of that sink."""


@dataclass(frozen=True)
class Letters:
    """Some letters of the store."""

    files: tuple[str, ...]
    """Empty: those in `rows`."""
    done: tuple[Step, ...]
    """What these cover was dealt with before."""
    steps: tuple[Step, ...]
    """What is asked for now."""
    rows: bytes = b""
    """Letters of the sink that the file names, as an Arrow stream: the driver reads them, since a task may be forked."""


class Replay(RangeSource[ReplayConfig, Replayed]):
    """
    Dead letters that somebody asked for, as they are in the store.

    Supports exactly-once: letters are only ever added, with numbers of epochs that grow, and a step names its last one.
    """

    name = "replay"

    def schema(self) -> Schemas:
        return {}

    def latest(self, start: Replayed, limit: ReadLimit) -> Replayed:
        pending = [each for each in self._requests.pending() if each.letters in ("", self.config.named)]
        waiting = [each for each in pending if each.name not in start.requests]
        if isinstance(limit.until, Replayed):
            waiting = [each for each in waiting if each.name in limit.until.requests]
        if not waiting:
            return start
        steps = [each.step for each in waiting if each.step.incarnation == self.config.incarnation]
        steps.sort(
            key=lambda step: step.verb != "drop"
        )  # a replay that has not begun takes nothing that is dropped since
        return Replayed(steps=(*start.steps, *steps), requests=tuple(each.name for each in waiting))

    def split(self, start: Replayed, end: Replayed) -> Sequence[Letters]:
        steps = end.steps[len(start.steps) :]
        if not any(step.verb == "replay" for step in steps):
            return []
        splits = [Letters(found, start.steps, steps) for found in _runs(files(self.config.path))]
        if self.config.sink is not None:
            found = [_asked(batch, start.steps, steps) for batch in read_sink(self.config.sink).to_batches(SPLIT_ROWS)]
            splits += [Letters((), start.steps, steps, to_ipc(batch)) for batch in found if batch.num_rows]
        return splits

    def read(self, split: Letters) -> Iterator[SourceBatch]:
        for batch in _by_epoch(split.files) if split.files else [rows_of(split.rows)]:
            if (found := _asked(batch, split.done, split.steps)).num_rows:
                yield SourceBatch(found, stream=TOPIC)

    def next_start(self, end: Replayed, notes: Sequence[Json]) -> Replayed:
        """Without the steps that a later one covers, or of a lost state: the position would grow for ever."""
        mine = [step for step in end.steps if step.incarnation == self.config.incarnation]
        kept = [step for at, step in enumerate(mine) if not any(later.replaces(step) for later in mine[at + 1 :])]
        return Replayed(steps=tuple(kept), requests=end.requests)

    def ack(self, end: Replayed) -> None:
        self._requests.done(end.requests)

    @property
    def _requests(self) -> ReplayRequests:
        return ReplayRequests(self.context.state_dir)


SPLIT_ROWS = 10_000
"""Letters of a sink that one task gets."""

WINDOW_ROWS = 20_000
"""Letters of files that are put in order at once, give or take those of an epoch."""


def _asked(letters: pa.RecordBatch, done: Sequence[Step], steps: Sequence[Step]) -> pa.RecordBatch:
    """The letters that some steps replay, and that no earlier one dealt with."""
    is_asked = np.isin(fates(letters, steps), [at for at, step in enumerate(steps) if step.verb == "replay"])
    return letters.filter(pa.array(is_asked & (fates(letters, done) < 0)))


def read_sink(sink: SinkConnector[Any, Any]) -> pa.Table:
    """
    The letters that a sink of the file holds, the oldest first, so that the last of a key is the one that stays.

    By a copy, since another one may be open.
    """
    own = pickle.loads(pickle.dumps(sink))
    try:
        own.open()
        found = own.read_topic(TOPIC)
    finally:
        own.close()
    letters = LETTERS.empty_table() if found is None else stored(found)
    return letters.take(pc.sort_indices(letters.column("epoch")))  # stable


def files(path: Path) -> list[str]:
    """The files of the store, in order; none if no letter was ever written."""
    from deltalake import DeltaTable

    if not (path / "_delta_log").exists():
        return []
    return sorted(DeltaTable(path).file_uris())


def fates(letters: pa.RecordBatch | pa.Table, steps: Sequence[Step]) -> Fates:
    """Which of the steps deals with each letter."""
    found = np.full(letters.num_rows, -1, np.int64)
    for at, step in enumerate(steps):
        is_covered = having(letters, {"incarnation": step.incarnation, **step.where})
        is_covered &= _numpy(pc.less_equal(letters.column("epoch"), step.epoch))
        found[(found < 0) & is_covered] = at
    return found


def having(letters: pa.RecordBatch | pa.Table, where: Mapping[str, str]) -> npt.NDArray[np.bool_]:
    """Which letters have all of these values."""
    found = np.ones(letters.num_rows, dtype=bool)
    for name, value in where.items():
        found &= _numpy(pc.fill_null(pc.equal(letters.column(name), value), False))
    return found


def _numpy(mask: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    whole = mask.combine_chunks() if isinstance(mask, pa.ChunkedArray) else mask
    found: npt.NDArray[np.bool_] = whole.to_numpy(zero_copy_only=False).astype(bool)
    return found


def _runs(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """
    The files, the oldest letters first, and together those whose epochs lie between each other's.

    Upkeep joins small files: what comes of it may hold letters that are older than those of a file beside it, and newer ones.
    """
    spans = sorted((*_span(name), name) for name in names)
    run: list[str] = []
    last = 0
    for first, end, name in spans:
        if run and first >= last:
            yield tuple(run)
            run = []
        run.append(name)
        last = max(last, end)
    if run:
        yield tuple(run)


def _span(name: str) -> tuple[int, int]:
    """The first and the last epoch of the letters of a file."""
    epochs = _opened(name).read(columns=["epoch"])["epoch"]
    return (pc.min(epochs).as_py(), pc.max(epochs).as_py()) if len(epochs) else (0, 0)


def _by_epoch(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The letters of some files, those of earlier epochs first: of several of one key the last one is to stay."""
    opened = [_opened(name) for name in names]
    epochs = [file.read(columns=["epoch"])["epoch"].to_numpy() for file in opened]
    if len(opened) == 1 and (np.diff(epochs[0]) >= 0).all():
        yield from opened[0].iter_batches()
        return
    found, counts = np.unique(np.concatenate(epochs), return_counts=True)
    windows = (np.cumsum(counts) - 1) // WINDOW_ROWS
    for window in np.unique(windows):
        first, last = found[windows == window][[0, -1]]
        parts = [_within(file, own, first, last) for file, own in zip(opened, epochs, strict=True)]
        letters = pa.concat_tables([each for each in parts if each is not None])
        yield from letters.take(pc.sort_indices(letters["epoch"])).combine_chunks().to_batches()  # the sort is stable


def _within(file: pq.ParquetFile, epochs: Fates, first: int, last: int) -> pa.Table | None:
    """The letters of some epochs; only row groups that hold some are read."""
    sizes = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
    is_in = np.split((epochs >= first) & (epochs <= last), np.cumsum(sizes)[:-1])
    groups = [at for at, some in enumerate(is_in) if some.any()]
    if not groups:
        return None
    return file.read_row_groups(groups).filter(pa.array(np.concatenate([is_in[at] for at in groups])))


def _opened(file: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file)
    except FileNotFoundError as error:
        raise RetryableError(f"{file} of the dead letters was joined with others or removed meanwhile") from error


def parse_where(words: Sequence[str]) -> dict[str, str]:
    """`topic=/orders` and the like."""
    where = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in WHERE:
            raise ConfigError(f"--where {word}", hint=f"write NAME=VALUE; the names are {', '.join(WHERE)}")
        where[name] = f"/{value}" if name == "topic" and value and not value.startswith("/") else value
    return where
