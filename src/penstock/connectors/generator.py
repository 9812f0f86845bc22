"""Make rows out of nothing: the same ones for the same seed, at full speed or at a steady rate."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from penstock.changes.hashing import mix
from penstock.config import Config
from penstock.schema import with_key
from penstock.source import HealthStatus, Position, RangeSource, ReadLimit, Schemas, SourceBatch

ColumnName = Literal[
    "id",
    "customer",
    "name",
    "amount",
    "ratio",
    "active",
    "at",
    "day",
    "note",
    "score",
    "code",
    "payload",
    "tags",
    "place",
]


class GeneratorConfig(Config):
    rows: NonNegativeInt | None = None
    """How many rows each stream has; none: it never ends."""

    rows_per_sec: PositiveFloat | None = None
    """Steady rate of each stream, also while nobody reads; none: as fast as they are asked for."""

    streams: Annotated[tuple[str, ...], Field(min_length=1)] = ("rows",)
    """Names of the streams. Each has its own dense `id`, from 0, and rows of its own."""

    seed: int = 0
    """Another seed makes other rows."""

    columns: Annotated[tuple[ColumnName, ...], Field(min_length=1)] = (
        "id", "customer", "name", "amount", "ratio", "active", "at", "day", "note", "score",
    )  # fmt: skip
    """
    Which columns to make: `id` int64, `customer` int32, `name` string, `amount` decimal128(12, 2), `ratio` float64,
    `active` bool, `at` timestamp, `day` date32, `note` string with nulls, `score` int64 with nulls, `code` string without
    repeats, `payload` binary, `tags` list of strings, `place` struct.
    """

    batch_rows: PositiveInt = 65536
    """Rows in one Arrow batch."""

    @field_validator("streams", "columns")
    @classmethod
    def _no_repeats(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("a name is here twice")
        return names


class NextIds(Position):
    """The next id of each stream, and when its row is due; the ids at the end are not part of a range."""

    ids: dict[str, int] = Field(default_factory=dict)
    due_us: dict[str, int] = Field(default_factory=dict)
    """Microseconds since 1970 at which each stream's next row is due; only with `rows_per_sec`."""

    def describe(self) -> str:
        return ", ".join(f"{stream} to row {id:,}" for stream, id in self.ids.items()) or "the beginning"


@dataclass(frozen=True)
class IdRange:
    stream: str
    start: int
    end: int


class Generator(RangeSource[GeneratorConfig, NextIds]):
    """
    Splits are runs of ids of one stream.

    Supports exactly-once: a row depends on the seed, its stream and its id alone, never on how a range was cut.
    """

    name = "generator"

    _parallelism: int | None = None
    _planned: NextIds | None = None

    def schema(self) -> Schemas:
        schema = pa.schema([(name, _COLUMNS[name][0]) for name in self.config.columns])
        return dict.fromkeys(self.config.streams, with_key(schema, ["id"]) if "id" in self.config.columns else schema)

    def provide_schema(self) -> dict[str, pa.Schema]:
        return dict(self.schema())

    def is_authoritative(self) -> bool:
        return True

    def latest(self, start: NextIds, limit: ReadLimit) -> NextIds:
        self._parallelism = limit.parallelism
        now = time.time_ns() // 1000
        waiting = self._waiting(start, now)
        room = limit.rows
        if room is None and self.config.rows is None and self.config.rows_per_sec is None:
            room = (
                16 * self.config.batch_rows * limit.parallelism * len(waiting)
            )  # even "all there is" must end somewhere
        counts = _share(waiting, room)
        self._planned = start
        if any(counts.values()):
            ids = {**start.ids, **{stream: start.ids.get(stream, 0) + count for stream, count in counts.items()}}
            self._planned = limit.bounded(NextIds(ids=ids, due_us=self._due(start, counts, now)))
        return self._planned

    def split(self, start: NextIds, end: NextIds) -> Sequence[IdRange]:
        edges = ((stream, start.ids.get(stream, 0), last) for stream, last in sorted(end.ids.items()))
        ranges = [IdRange(stream, first, last) for stream, first, last in edges if first < last]
        total = sum(each.end - each.start for each in ranges)
        step = -(-total // (self._parallelism or self.context.parallelism))
        step = max(1, -(-step // self.config.batch_rows)) * self.config.batch_rows
        return [
            IdRange(each.stream, max(cut, each.start), min(cut + step, each.end))
            for each in ranges
            for cut in range(each.start - each.start % self.config.batch_rows, each.end, step)
        ]

    def read(self, split: IdRange) -> Iterator[SourceBatch]:
        schema = self.schema()[split.stream]
        rows, salt = self.config.batch_rows, _number(self.config.seed, split.stream)
        for start in range(split.start - split.start % rows, split.end, rows):
            ids = np.arange(max(start, split.start), min(start + rows, split.end), dtype=np.int64)
            bits = mix(ids.view(np.uint64) + np.uint64(salt))
            columns = [_COLUMNS[name][1](ids, _Draw(name, bits)) for name in self.config.columns]
            yield SourceBatch(pa.RecordBatch.from_arrays(columns, schema=schema), stream=split.stream)

    def lag(self) -> int | None:
        """Rows that are due and not planned; None when they never end and have no rate."""
        if self._planned is None or (self.config.rows is None and self.config.rows_per_sec is None):
            return None
        return sum(self._waiting(self._planned, time.time_ns() // 1000).values())

    def health_check(self) -> HealthStatus:
        return HealthStatus.healthy()

    def _waiting(self, start: NextIds, now_us: int) -> dict[str, int]:
        """Rows of each stream that may be planned now."""
        waiting = {}
        for stream in self.config.streams:
            count = (_ENDLESS if self.config.rows is None else self.config.rows) - start.ids.get(stream, 0)
            if self.config.rows_per_sec is not None:
                late_us = now_us - start.due_us.get(stream, now_us)
                count = min(count, 0 if late_us < 0 else 1 + int(late_us * self.config.rows_per_sec / 1_000_000))
            waiting[stream] = max(0, count)
        return waiting

    def _due(self, start: NextIds, counts: dict[str, int], now_us: int) -> dict[str, int]:
        if self.config.rows_per_sec is None:
            return {}
        step_us = 1_000_000 / self.config.rows_per_sec
        return {stream: start.due_us.get(stream, now_us) + int(count * step_us) for stream, count in counts.items()}


Ids = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]

_ENDLESS = 1 << 62
_WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "ledge", "marsh",
    "nadir", "oasis", "prism", "quarry", "ridge", "slate", "tidal", "umbra", "vale", "weir", "xenon", "yonder", "zephyr",
)  # fmt: skip
_NAMES = pa.array([f"{first} {second}" for first in _WORDS for second in _WORDS])
_NOTES = pa.array(
    [f"the {first} by the {second}" for first in _WORDS for second in _WORDS[::5]] + ["", "naïve café ☕"]
)
_TAGS = pa.array(_WORDS)
_CITIES = pa.array(["Athens", "Bergen", "Cádiz", "Delft", "Essen", "Fès", "Graz", "Hobart"])
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)
_YEAR_2024_US = 1_704_067_200_000_000
_YEAR_2024_DAYS = 19_723


class _Draw:
    """Random numbers of one column, one row per element of `bits`; they depend on nothing else."""

    def __init__(self, column: str, bits: Bits) -> None:
        self._column = column
        self._bits = bits

    def bits(self, salt: str = "") -> Bits:
        return mix(self._bits ^ np.uint64(_number(self._column, salt)))

    def below(self, bound: int, salt: str = "") -> Ids:
        """Numbers in `0..bound-1`: the upper half of the bits, scaled, which is faster than a remainder."""
        return ((self.bits(salt) >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).view(np.int64)

    def unit(self, salt: str = "") -> npt.NDArray[np.float64]:
        return (self.bits(salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def nulls(self, one_in: int) -> npt.NDArray[np.bool_]:
        return np.equal(self.below(one_in, "null"), 0)


def _amount(ids: Ids, draw: _Draw) -> pa.Array:
    halves = np.zeros((len(ids), 2), dtype=np.int64)
    halves[:, 0] = draw.below(10_000_000) - 1_000_000
    halves[:, 1] = halves[:, 0] >> 63  # the sign fills the upper half of the 128 bits
    return pa.Array.from_buffers(pa.decimal128(12, 2), len(ids), [None, pa.py_buffer(halves)])


def _code(ids: Ids, draw: _Draw) -> pa.Array:
    # Whole 64 bits of a bijection of the id: no two rows of a stream share a code.
    text = _HEX[draw.bits().view(np.uint8)]
    offsets = np.arange(len(ids) + 1, dtype=np.int32) * 16
    return pa.Array.from_buffers(pa.string(), len(ids), [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def _payload(ids: Ids, draw: _Draw) -> pa.Array:
    ends = np.cumsum(draw.below(9, "length"), dtype=np.int32)
    offsets = np.concatenate((np.zeros(1, np.int32), ends))
    rows = np.repeat(np.arange(len(ids)), np.diff(offsets))
    data = draw.bits().view(np.uint8).reshape(-1, 8)[rows, np.arange(offsets[-1]) - offsets[rows]]
    return pa.Array.from_buffers(pa.binary(), len(ids), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _tags(ids: Ids, draw: _Draw) -> pa.Array:
    lengths = draw.below(4, "length")
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
    rows = np.repeat(np.arange(len(ids)), lengths)
    which = (draw.below(len(_TAGS))[rows] + 7 * (np.arange(offsets[-1]) - offsets[rows])) % len(_TAGS)
    return pa.ListArray.from_arrays(pa.array(offsets), _TAGS.take(pa.array(which)))


def _place(ids: Ids, draw: _Draw) -> pa.Array:
    parts = [
        _CITIES.take(pa.array(draw.below(len(_CITIES)))),
        draw.unit("lat") * 180 - 90,
        draw.unit("lon") * 360 - 180,
    ]
    return pa.StructArray.from_arrays([pa.array(part) for part in parts], fields=list(_PLACE))


def _note(ids: Ids, draw: _Draw) -> pa.Array:
    return _NOTES.take(pa.array(draw.below(len(_NOTES)), mask=draw.nulls(10)))


_PLACE = pa.struct([("city", pa.string()), ("lat", pa.float64()), ("lon", pa.float64())])
_COLUMNS: dict[str, tuple[pa.DataType, Callable[[Ids, _Draw], Any]]] = {
    "id": (pa.int64(), lambda ids, draw: pa.array(ids)),
    "customer": (pa.int32(), lambda ids, draw: pa.array(draw.below(100_000).astype(np.int32))),
    "name": (pa.string(), lambda ids, draw: _NAMES.take(pa.array(draw.below(len(_NAMES))))),
    "amount": (pa.decimal128(12, 2), _amount),
    "ratio": (pa.float64(), lambda ids, draw: pa.array(draw.unit())),
    "active": (pa.bool_(), lambda ids, draw: pa.array(draw.bits() >> np.uint64(63) == 1)),
    "at": (
        pa.timestamp("us", tz="UTC"),
        lambda ids, draw: pa.array(_YEAR_2024_US + ids * 1000 + draw.below(1000)).view(pa.timestamp("us", tz="UTC")),
    ),
    "day": (
        pa.date32(),
        lambda ids, draw: pa.array((_YEAR_2024_DAYS + draw.below(731)).astype(np.int32)).view(pa.date32()),
    ),
    "note": (pa.string(), _note),
    "score": (pa.int64(), lambda ids, draw: pa.array(draw.below(1_000_001) - 500_000, mask=draw.nulls(4))),
    "code": (pa.string(), _code),
    "payload": (pa.binary(), _payload),
    "tags": (pa.list_(pa.string()), _tags),
    "place": (_PLACE, _place),
}


def _number(*parts: object) -> int:
    """64 bits that are the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _share(waiting: dict[str, int], room: int | None) -> dict[str, int]:
    """How many rows of each stream are planned, so that together they are at most `room` and none starves."""
    counts = {}
    for place, (stream, count) in enumerate(sorted(waiting.items(), key=lambda item: -item[1])):
        share = count if room is None else min(count, -(-room // (len(waiting) - place)))
        room = None if room is None else room - share
        counts[stream] = share
    return counts
