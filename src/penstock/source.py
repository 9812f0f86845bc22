"""What a source connector implements. Spark only ever sees ranges; the journal turns the other kinds into them."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, get_args, get_origin

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from penstock.config import Config
from penstock.durable import Json
from penstock.formats import Failed
from penstock.health import ConnectorMetrics as ConnectorMetrics
from penstock.health import Finding as Finding
from penstock.health import HealthState as HealthState
from penstock.health import HealthStatus as HealthStatus

C = TypeVar("C", bound=Config)
T = TypeVar("T")

Schemas = Mapping[str, pa.Schema]
"""The Arrow schema of each stream."""


class Position(BaseModel):
    """How far a source was read: a small JSON value. Its defaults are the beginning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def describe(self) -> str:
        """The position in a few words, for `penstock offsets show`; by default its fields, without those at their defaults."""
        return _in_words(self.model_dump(mode="json", exclude_defaults=True)) or "the beginning"


P = TypeVar("P", bound=Position)


@dataclass(frozen=True)
class Offset:
    """What one record carries: the partition it came from and its place there."""

    partition: str
    value: int | str


@dataclass(frozen=True)
class PartitionInfo:
    """A partition and how far it was read; prints `id@offset`."""

    id: str
    offset: int | str

    def __str__(self) -> str:
        return f"{self.id}@{self.offset}"


@dataclass(frozen=True)
class SourceRecord:
    """One message as the outside system sent it; decoding happens later, in bulk."""

    stream: str
    payload: bytes | None
    """None: a tombstone, which says that what its key names is gone."""
    key: bytes | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    timestamp_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    @classmethod
    def from_json(cls, stream: str, value: Json) -> SourceRecord:
        return cls(stream, json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())

    @classmethod
    def from_string(cls, stream: str, value: str) -> SourceRecord:
        return cls(stream, value.encode())

    @classmethod
    def from_number(cls, stream: str, value: float) -> SourceRecord:
        return cls(stream, repr(value).encode())

    @classmethod
    def from_bytes(cls, stream: str, value: bytes) -> SourceRecord:
        return cls(stream, value)

    def with_key(self, key: bytes | str) -> SourceRecord:
        return replace(self, key=key.encode() if isinstance(key, str) else key)

    def with_attribute(self, name: str, value: str) -> SourceRecord:
        return replace(self, attributes={**self.attributes, name: value})


ENVELOPE_SCHEMA = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("payload", pa.binary()),
        pa.field("attributes", pa.map_(pa.string(), pa.string())),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("offset", pa.struct([("partition", pa.string()), ("value", pa.string())])),
    ]
)
"""A message as a row: as it came. It is decoded later, in bulk, by the schema of its topic."""


@dataclass(frozen=True)
class SourceEnvelope:
    """A record on its way to the journal."""

    record: SourceRecord
    offset: Offset | None = None
    dedupe_key: str | None = None
    """Journaled with the record; the same key again (a redelivery after a lost acknowledgement) is dropped."""

    @classmethod
    def with_offset(cls, record: SourceRecord, offset: Offset) -> SourceEnvelope:
        return cls(record, offset)


@dataclass(frozen=True)
class SourceBatch:
    """Rows of one stream."""

    records: pa.RecordBatch
    partition: PartitionInfo | None = None
    stream: str = ""

    @classmethod
    def with_partition(cls, records: pa.RecordBatch, partition: PartitionInfo, stream: str = "") -> SourceBatch:
        """Rows that end at the offset of `partition`: messages without offsets of their own get theirs by it."""
        return cls(records, partition, stream)

    @classmethod
    def of_messages(
        cls, stream: str, payloads: Sequence[bytes] | pa.Array, attributes: Mapping[str, str]
    ) -> SourceBatch:
        """Messages of now with the same attributes: many of them cost less than an envelope each."""
        count, size = len(payloads), len(attributes)
        columns = [
            pa.repeat(pa.scalar(stream, pa.string()), count),
            pa.nulls(count, pa.binary()),
            payloads if isinstance(payloads, pa.Array) else pa.array(payloads, pa.binary()),
            pa.MapArray.from_arrays(
                pa.array(np.arange(count + 1, dtype=np.int32) * size),
                pa.array([*attributes] * count, pa.string()),
                pa.array([*attributes.values()] * count, pa.string()),
            ),
            pa.repeat(pa.scalar(time.time_ns() // 1_000_000, pa.timestamp("ms", tz="UTC")), count),
            pa.nulls(count, ENVELOPE_SCHEMA.field("offset").type),
        ]
        return cls(pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA), stream=stream)

    @property
    def num_rows(self) -> int:
        return int(self.records.num_rows)


@dataclass(frozen=True)
class Note:
    """A small JSON value that `read` yields among its batches; it is stored in the epoch's manifest (see `next_start`)."""

    value: Json


class SourceCheckpoint(BaseModel):
    """A polling source's position: stored with the rows it describes, handed back by `restore`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offsets: dict[str, Json] = {}
    epoch: int = 0
    metadata: dict[str, Json] = {}


@dataclass(frozen=True)
class ProducerConfig:
    """How one topic is produced; derived from the routes."""

    topic: str
    partitions: int = 1
    reliable_dispatch: bool = True
    schema_config: Json = None
    """The `[[schemas]]` entry of the topic; filled in by the runtime."""


@dataclass(frozen=True)
class ReadLimit:
    """How much one epoch may read. `rows`, `bytes` and `parallelism` are hints; `until` and `whole` are laws."""

    rows: int | None = None
    parallelism: int = 1
    """Tasks that can run at once; `split` need not make more splits than this."""
    until: Position | None = None
    """Read nothing past this position, which `latest` gave before (`--drain`). `bounded` applies it."""
    bytes: int | None = None  # for sources that know the size of what they have not read
    whole: bool = False
    """All that is there is wanted (`--drain` begins): what is not known now is a `RetryableError`, not left for later."""

    def bounded(self, end: P) -> P:
        """`end`, or the lesser of `end` and `until`: number by number and text by text, which fits most positions."""
        if self.until is None:
            return end
        return type(end).model_validate(_lesser(end.model_dump(mode="json"), self.until.model_dump(mode="json")))


def _no_copies(stream: str) -> Sequence[bool]:
    return ()


def _none_refused(stream: str, payloads: Sequence[bytes]) -> Failed:
    return {}


@dataclass(frozen=True)
class SourceContext:
    """What the runtime knows and a source may want to know; the argument of `open`."""

    state_dir: Path | None = None
    """On the driver: a directory of the source's own, inside the pipeline's state directory. The source makes it."""

    pipeline: str = field(default="", kw_only=True)
    """On the driver: the pipeline's name."""

    produces: tuple[ProducerConfig, ...] = ()
    """On the driver: the topics that the routes give this source."""

    copies_of: Callable[[str], Sequence[bool]] = _no_copies
    """On the driver: whether each target of a stream has a complete first copy. If only some do, see `TableState.copy`."""

    refused: Callable[[str, Sequence[bytes]], Failed | None] = _none_refused
    """On the driver: which payloads of a stream no schema of its topics has a row for, by position. None: they have no schema."""

    parallelism: int = 1
    """On the driver: how many tasks the epoch in hand was planned for. Split it as before: sinks may name rows by task."""

    in_task: bool = False
    """True where splits are read, False where ranges are planned."""

    columns: frozenset[str] | None = None
    """In a task: the columns that anything downstream uses; None means all. A source may hand over more."""


def type_argument(cls: type, bound: type) -> Any:
    """The class among the type arguments of `cls`'s generic bases that derives from `bound`."""
    for base in vars(cls).get("__orig_bases__", ()):  # its own: what a parent's say, it inherits or overrides
        if get_origin(base) is not None:
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, bound):
                    return argument
    return None


class Connector(Generic[C]):
    """What sources and sinks share: a value made from its config alone, which travels to tasks as that config."""

    name: ClassVar[str]
    """The system's name, as users write it after `connector =`."""

    config_type: ClassVar[type[Config]]

    def __init__(self, config: C) -> None:
        self.config = config

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = type_argument(cls, Config)
        if config is not None:
            cls.config_type = config

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """A copy is made from the config, in another process or in this one: connections do not travel."""
        return type(self), (self.config,)

    def close(self) -> None:
        """Release everything; may be called twice, and after a failed `open`."""

    def check(self) -> Sequence[Finding]:
        """
        For `penstock check`: settings of the outside system that would fail later, and how to fix each.

        Called after `open`, and also after an `open` that refused, so that a user sees all that is wrong at once: ask over
        a connection of its own, or raise.
        """
        return ()

    def health_check(self) -> HealthStatus:
        """On the driver, every few seconds, from a thread of its own."""
        return HealthStatus()

    def metrics(self) -> ConnectorMetrics:
        """On the driver, whenever metrics are scraped."""
        return ConnectorMetrics()


class SourceConnector(Connector[C]):
    """Base of all sources."""

    supports_replay: bool = True
    """False: rows that bypass the journal are gone once they were handed over (at-most-once)."""

    context: SourceContext = SourceContext()
    """What the last `open` was given."""
    lag_unit: ClassVar[Literal["rows", "bytes"]] = "rows"
    """What `lag` counts."""

    def open(self, context: SourceContext = SourceContext()) -> None:
        """
        Connect, test, discover; called once in each process that uses the source. The first call is not retried.

        Override it with the same signature, and call `super().open(context)` to find the context in `self.context`.
        """
        self.context = context

    def schema(self) -> Schemas:
        """Schema of each stream as of now; on the driver, after `open` and again for each epoch."""
        raise NotImplementedError

    def lag(self) -> int | None:
        """How much is left to read, in `lag_unit`; asked every `lag_interval_secs`."""
        return None

    def data_ready_notify(self) -> threading.Event | None:
        """An event that the source sets when there is something to read: awaited instead of a timer, cleared by the runtime."""
        return None

    def checkpoint_requested(self) -> threading.Event | None:
        """An event that the source sets to have an epoch cut now; cleared by the runtime once that epoch is cut."""
        return None

    def producer_configs(self) -> Sequence[ProducerConfig]:
        """
        How each topic is produced; called once after `open`, before anything is read. The default is what the routes say.

        A source may ask for more partitions of a topic, or for the journal (`reliable_dispatch`) where a route bypasses it.
        """
        return self.context.produces


class RangeSource(SourceConnector[C], Generic[C, P]):
    """
    A source that can be read again. `read` runs in tasks, everything else on the driver.

    Laws: `read(a, c) = read(a, b) + read(b, c)`; the same range always holds the same rows; splits cover a range exactly.
    A planned range that can never be read again is a `RangeGone`, raised by `split` or `read`, if the source can go on from
    its start without it.
    """

    position_type: ClassVar[type[Position]]
    begins_now: bool = False
    """True if `initial()` has another answer later: an epoch records the first one, though there is nothing to read yet."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        position = type_argument(cls, Position)
        if position is not None:
            cls.position_type = position

    def initial(self) -> P:
        """The beginning, when no epoch was ever committed."""
        return self.position_type()  # type: ignore[return-value]

    def latest(self, start: P, limit: ReadLimit) -> P:
        """The end of the next range, not past `limit.until`; `start` itself when there is nothing to read."""
        raise NotImplementedError

    def split(self, start: P, end: P) -> Sequence[Any]:
        """Picklable parts of the range, in order; each is read by one task."""
        raise NotImplementedError

    def read(self, split: Any) -> Iterator[SourceBatch | Note]:
        """The rows of a split, in a task; may be called again for the same split after a failure."""
        raise NotImplementedError

    def next_start(self, end: P, notes: Sequence[Json]) -> P:
        """Where the range after `end` starts, given the notes of the one before; deterministic, since recovery asks again."""
        return end

    def ack(self, end: P) -> None:
        """Everything before `end` is committed; may repeat, also with an end that was acked long ago."""


class PollingSource(SourceConnector[C]):
    """A source that is asked for records; they are journaled before anything else happens."""

    def poll_batch(self, max_records: int) -> SourceBatch | list[SourceEnvelope] | None:
        """Up to about `max_records` new records; none if only the checkpoint moved; None: nothing yet, or rate limited."""
        raise NotImplementedError

    def checkpoint(self) -> SourceCheckpoint:
        """How far the last `poll_batch` has come; journaled together with its rows."""
        raise NotImplementedError

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Go on from `checkpoint`; after `open`, before the first poll. Raises on one that is not valid."""
        raise NotImplementedError

    def commit(self, offsets: Mapping[str, Json]) -> None:
        """The offsets of a checkpoint are on disk: tell the outside system. In order, after the journal's fsync."""


class Sender(Protocol):
    """Where a streaming source puts its records; `send` and `send_batch` block while the journal is full."""

    @property
    def stopped(self) -> bool:
        """True once the source must return; sends are then refused."""

    @property
    def full(self) -> bool:
        """True while a send would block: stop taking from the outside system, and keep its connection alive."""

    def wait(self, seconds: float) -> bool:
        """Sleep until stopped or for `seconds`; True when stopped."""

    def send(self, item: SourceEnvelope | SourceBatch, on_durable: Callable[[], None] | None = None) -> None:
        """Hand over one item; `on_durable` is called once it is on disk, in order, from the journal's thread."""

    def send_batch(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> None:
        """Hand over many envelopes as one unit."""

    def offer(
        self, items: SourceBatch | Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None
    ) -> bool:
        """
        As `send` and `send_batch`, for a thread that must not wait: False where it would have to, and nothing was taken.

        Many messages without dedupe keys are cheapest as a batch of `ENVELOPE_SCHEMA`.
        """


class StreamingSource(SourceConnector[C]):
    """A source that pushes."""

    def start_streaming(self, sender: Sender) -> None:
        """Push until `sender.stopped`; a broken connection raises `RetryableError`, and the runtime calls again."""
        raise NotImplementedError


class BufferedBridge(Generic[T]):
    """
    Lets a client that calls back serve a source that is polled: `put` from the client's thread, `take` in `poll_batch`.

    `put` blocks while `capacity` items wait, which is the backpressure; return `ready` from `data_ready_notify`.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self.ready = threading.Event()
        self._capacity = capacity
        self._waiting: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: T, timeout_secs: float | None = None) -> bool:
        """Hand over an item, such as an envelope; False if the bridge was closed or stayed full."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._capacity, timeout_secs)
            if self._closed or len(self._waiting) >= self._capacity:
                return False
            self._waiting.append(item)
        self.ready.set()
        return True

    def take(self, most: int) -> list[T] | None:
        """Up to so many items in the order they came, or None."""
        with self._changed:
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            if self._waiting:
                self.ready.set()
            self._changed.notify_all()
        return taken or None

    def close(self) -> None:
        """Refuse further items and wake threads that wait to put one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _in_words(value: Json) -> str:
    if isinstance(value, dict):
        shown = ", ".join(f"{name} {_in_words(each)}" for name, each in list(value.items())[:8])
        return shown + (f" and {len(value) - 8:,} more" if len(value) > 8 else "")
    if isinstance(value, list):
        return f"{len(value):,} entries" if len(value) != 1 else "1 entry"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _lesser(a: Json, b: Json) -> Json:
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _lesser(a[key], b[key]) for key in a if key in b}
    return min(a, b) if type(a) is type(b) and not isinstance(a, list) and a is not None else b
