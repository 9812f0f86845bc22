"""Connectors that only the Spark tests need; importable, so that Spark's workers find them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from penstock.changes import CHANGE_FIELDS
from penstock.config import Config
from penstock.connectors.files.sink import FilesSink
from penstock.durable import Json
from penstock.errors import DataError, SchemaError
from penstock.schema import with_key
from penstock.sink import Epoch, Task, Topic, Work, WriteResult
from penstock.source import (
    Note,
    PollingSource,
    Position,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceCheckpoint,
)
from penstock.tables import Refused, TableSource, TableState
from penstock.testing.applying import MemoryApplied, MemoryApplySink


class KeyedConfig(Config):
    rows: int = 1000
    splits: int = 4
    keys: int = 7
    fail: str = ""


class TicksConfig(Config):
    rows: int


class Ticks(PollingSource[TicksConfig]):
    """Numbers, ten at a poll."""

    name = "ticks"
    _next = 0

    def schema(self) -> Schemas:
        return {"ticks": pa.schema([("n", pa.int64())])}

    def poll_batch(self, max_records: int) -> SourceBatch | None:
        numbers = range(self._next, min(self._next + 10, self.config.rows))
        self._next += len(numbers)
        return SourceBatch(pa.record_batch({"n": pa.array(numbers, pa.int64())}), stream="ticks") if numbers else None

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"ticks": self._next})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._next = checkpoint.offsets["ticks"]


class Next(Position):
    row: int = 0


class Keyed(RangeSource[KeyedConfig, Next]):
    """Rows whose key repeats over all splits; `fail` says what reading the second split does."""

    name = "keyed"

    def schema(self) -> Schemas:
        return {"rows": with_key(pa.schema([("key", pa.string()), ("row", pa.int64())]), ["key"])}

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        return Next(row=min(self.config.rows, start.row + (limit.rows or self.config.rows)))

    def split(self, start: Next, end: Next) -> Sequence[tuple[int, int]]:
        count = self.config.splits
        edges = [start.row + (end.row - start.row) * i // count for i in range(count + 1)]
        return [(a, b) for a, b in itertools.pairwise(edges) if a < b]

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch | Note]:
        rows = range(*split)
        columns = [[f"key-{row % self.config.keys}" for row in rows], list(rows)]
        yield SourceBatch(pa.record_batch([pa.array(c) for c in columns], schema=self.schema()["rows"]), stream="rows")
        yield Note({"split": list(split)})
        if split[0] > 0:
            self._fail()

    def _fail(self) -> None:
        match self.config.fail:
            case "schema":
                raise SchemaError("the rows changed their shape", hint="look at them")
            case "data":
                error = DataError("three bad records")
                error.count = 3
                raise error
            case "bug":
                raise ZeroDivisionError("a bug in a connector")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case path if path:
                once = Path(path)
                if not once.exists():
                    once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)


class Told(Position):
    epoch: int = 0
    aside: tuple[str, ...] = ()


class Apart(TableSource[KeyedConfig, Told]):
    """Two streams of ten rows an epoch; one that a sink or a query cannot take is left out from then on."""

    name = "apart"

    def schema(self) -> Schemas:
        plain = with_key(pa.schema([("key", pa.string()), ("row", pa.int64())]), ["key"])
        return {"good": plain, "bad": plain}

    def latest(self, start: Told, limit: ReadLimit) -> Told:
        return start.model_copy(update={"epoch": min(start.epoch + 1, 2)})

    def split(self, start: Told, end: Told) -> Sequence[tuple[int, tuple[str, ...]]]:
        return [(start.epoch, start.aside)]

    def read(self, split: tuple[int, tuple[str, ...]]) -> Iterator[SourceBatch | Note]:
        epoch, aside = split
        for stream in ("bad", "good"):
            if stream not in aside:
                rows = {"key": [f"{stream}-{n}" for n in range(10)], "row": [10 * epoch + n for n in range(10)]}
                yield SourceBatch(pa.RecordBatch.from_pydict(rows, schema=self.schema()[stream]), stream=stream)
        yield Note({"read": epoch})

    def tables(self, position: Told) -> Mapping[str, TableState]:
        return {stream: TableState("failed" if stream in position.aside else "active") for stream in ("good", "bad")}

    def next_start(self, end: Told, notes: Sequence[Json]) -> Told:
        return end.model_copy(
            update={"aside": tuple(sorted({refused.stream for note in notes if (refused := Refused.read(note))}))}
        )


class Picky(FilesSink):
    """Refuses every row of a key that begins with `bad`."""

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        if "key" in batch.schema.names and any(key.startswith("bad") for key in batch["key"].to_pylist()):
            raise SchemaError(f"{topic} has bad keys")
        return super().write_batch(topic, batch)


class Wide(Keyed):
    """The same rows with one column more."""

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("key", pa.string()), ("row", pa.int64()), ("heavy", pa.binary())])}

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch]:
        rows = range(*split)
        columns = [[f"key-{row % self.config.keys}" for row in rows], list(rows), [b"x"] * len(rows)]
        yield SourceBatch(pa.record_batch([pa.array(c) for c in columns], schema=self.schema()["rows"]), stream="rows")


class ScriptedConfig(Config):
    epochs: tuple[tuple[dict[str, str | int | list[str] | None], ...], ...] = ()


class Scripted(RangeSource[ScriptedConfig, Next]):
    """Changes of people, an epoch each, two to a split; `old` in the script is the key that a row has left."""

    name = "scripted"

    def schema(self) -> Schemas:
        own = [("id", pa.int64()), ("name", pa.string()), ("age", pa.int64())]
        return {"people": with_key(pa.schema([*(pa.field(*each) for each in own), *CHANGE_FIELDS]), ["id"])}

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        return Next(row=min(len(self.config.epochs), start.row + (limit.rows or len(self.config.epochs))))

    def split(self, start: Next, end: Next) -> Sequence[tuple[int, int]]:
        return [(start.row, first) for first in range(0, len(self.config.epochs[start.row]), 2)]

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch | Note]:
        number, first = split
        rows = [
            {
                **{name: change.get(name) for name in ("id", "name", "age", "_op", "_unchanged")},
                "_position": f"{number:04}/{first + at:04}",
                "_old_key": None if "old" not in change else f'{{"id":{change["old"]}}}',
            }
            for at, change in enumerate(self.config.epochs[number][first : first + 2])
        ]
        yield SourceBatch(pa.RecordBatch.from_pylist(rows, schema=self.schema()["people"]), stream="people")


class AppliesElsewhere(MemoryApplySink):
    """Tells in which processes its work was done."""

    def apply(self, epoch: Epoch, work: Work, task: Task) -> MemoryApplied:
        (self.config.path / f"applied-by-{os.getpid()}").touch()
        return super().apply(epoch, work, task)


class HeardConfig(Config):
    rows: int
    told: str


class Heard(RangeSource[HeardConfig, Next]):
    """Numbers that lag as long as they are not planned; what it is told of them, it writes to a file."""

    name = "heard"
    _planned = 0

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("row", pa.int64())])}

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        self._planned = min(self.config.rows, start.row + (limit.rows or self.config.rows))
        return limit.bounded(Next(row=self._planned))

    def split(self, start: Next, end: Next) -> Sequence[tuple[int, int]]:
        return [(start.row, end.row)]

    def read(self, split: tuple[int, int]) -> Iterator[SourceBatch]:
        yield SourceBatch(pa.record_batch([pa.array(range(*split), pa.int64())], names=["row"]), stream="rows")

    def ack(self, end: Next) -> None:
        Path(self.config.told).write_text(str(end.row))

    def lag(self) -> int | None:
        return self.config.rows - self._planned
