"""What a source connector implements. Spark only ever sees ranges; the journal turns the other kinds into them."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from penstock.config import Config
from penstock.durable import Json
from penstock.errors import ConnectorError

C = TypeVar("C", bound=Config)

Schemas = Mapping[str, pa.Schema]
"""The Arrow schema of each stream."""


class Position(BaseModel):
    """Where a source stands: a small JSON value. Its defaults are the beginning."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    payload: bytes
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
        return cls(records, partition, stream)

    @property
    def num_rows(self) -> int:
        return int(self.records.num_rows)


@dataclass(frozen=True)
class Note:
    """A small JSON value that `read` yields among its batches; it is stored in the epoch's manifest (see `advance`)."""

    value: Json


class SourceCheckpoint(BaseModel):
    """A polling source's position: stored with the rows it describes, handed back by `restore`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offsets: dict[str, Json] = {}
    epoch: int = 0
    metadata: dict[str, Json] = {}


class HealthState(StrEnum):
    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True)
class HealthStatus:
    """A connector's own word about itself; everything but healthy carries a reason."""

    state: HealthState = HealthState.UNKNOWN
    reason: str = ""

    @classmethod
    def healthy(cls) -> HealthStatus:
        return cls(HealthState.HEALTHY)

    @classmethod
    def degraded(cls, reason: str) -> HealthStatus:
        return cls(HealthState.DEGRADED, reason)

    @classmethod
    def unhealthy(cls, reason: str) -> HealthStatus:
        return cls(HealthState.UNHEALTHY, reason)

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


@dataclass(frozen=True)
class ConnectorMetrics:
    """Counters a connector keeps itself; the runtime counts rows and bytes for everyone."""

    records_total: int = 0
    bytes_total: int = 0
    errors_total: int = 0
    lag: int | None = None
    custom: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamState:
    """One line of `penstock tables`: what a source does with a stream."""

    stream: str
    state: str
    """`active`, `seeding`, `paused`, `skipped`, `failed` or `gone`."""
    rows: int = 0
    """Rows that its first copy has so far."""
    estimate: int | None = None
    """About how many that will be."""
    code: str = ""
    error: str = ""
    hint: str = ""
    since: float | None = None
    tries: int = 0
    next_try: float | None = None
    """When it is tried again, in seconds of the epoch."""


@dataclass(frozen=True)
class Finding:
    """One line of `penstock check`: `ok`, or what is wrong and the command or SQL that fixes it."""

    ok: bool
    what: str
    fix: str = ""


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
    """How much one epoch may read: hints that `latest` keeps as well as its system allows."""

    rows: int | None = None
    parallelism: int = 1
    """Tasks that can run at once; `split` need not make more splits than this."""


def type_argument(cls: type, bound: type) -> Any:
    """The class among the type arguments of `cls`'s generic bases that derives from `bound`."""
    for base in vars(cls).get("__orig_bases__", ()):  # its own: what a parent's say, it inherits or overrides
        if get_origin(base) is not None:
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, bound):
                    return argument
    return None


class Connector(Generic[C]):
    """What sources and sinks share: a picklable value made from its config; connections open in `open()`."""

    name: ClassVar[str]
    """The system's name, as it stands behind `connector =`."""

    config_type: ClassVar[type[Config]]

    checks_refused: ClassVar[bool] = False
    """True if `check` also works after `open` refused, and lists all that it would refuse for."""

    def __init__(self, config: C) -> None:
        self.config = config

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = type_argument(cls, Config)
        if config is not None:
            cls.config_type = config

    def open(self) -> None:
        """Connect, test, discover; called once in each process that uses the connector. The first one is not retried."""

    def close(self) -> None:
        """Let go of everything; may be called twice, and after a failed `open`."""

    def check(self) -> Sequence[Finding]:
        """What `penstock check` shows, after `open`: settings of the outside system that would fail later."""
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

    routed: tuple[ProducerConfig, ...] = ()
    """The topics that the routes give this source; set by the runtime before `open`."""

    state_dir: Path | None = None
    """A directory of the source's own inside the pipeline's state directory; set by the runtime before `open`."""

    columns: frozenset[str] | None = None
    """In a task: the columns that anything downstream uses; None: all. A source may hand over more."""

    def schema(self) -> Schemas:
        """Schema of each stream as of now; on the driver, after `open` and again for each epoch."""
        raise NotImplementedError

    def lag(self) -> int | None:
        """How far the source is behind, in its own unit (bytes, rows); sampled every `lag_interval_secs`."""
        return None

    def data_ready_notify(self) -> threading.Event | None:
        """An event the source sets when there is something to read; awaited instead of the poll timer, cleared by the runtime."""
        return None

    def checkpoint_requested(self) -> threading.Event | None:
        """An event the source sets to have an epoch cut now; cleared by the runtime once that epoch is cut."""
        return None

    def producer_configs(self) -> Sequence[ProducerConfig]:
        """How each topic is produced; called once after `open`. The default is what the routes say."""
        return self.routed


class RangeSource(SourceConnector[C], Generic[C, P]):
    """
    A source that can be read again: `latest`, `split` and `ack` run on the driver, `read` in tasks.

    Laws: `read(a, c) = read(a, b) + read(b, c)`; the same range always holds the same rows; splits cover a range exactly.
    """

    position_type: ClassVar[type[Position]]

    has_tables: ClassVar[bool] = False
    """Its streams are copied and followed one by one: it answers `streams` and `seeded`, and takes `penstock.commands`."""

    held: Callable[[str], Sequence[bool]] = staticmethod(lambda stream: ())
    """
    On the driver: for each sink of a stream, if its first copy is complete there; set by the runtime before `initial`.

    All: it need not be copied. Some: what they hold must be cleared when it is.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        position = type_argument(cls, Position)
        if position is not None:
            cls.position_type = position

    def initial(self) -> P:
        """The beginning, when no epoch was ever committed."""
        return self.position_type()  # type: ignore[return-value]

    def latest(self, start: P, limit: ReadLimit) -> P:
        """The end of the next range: `start` itself when there is nothing to read."""
        raise NotImplementedError

    def split(self, start: P, end: P) -> Sequence[Any]:
        """Picklable parts of the range, in order; each is read by one task."""
        raise NotImplementedError

    def read(self, split: Any) -> Iterator[SourceBatch | Note]:
        """The rows of a split, in a task; may be called again for the same split after a failure."""
        raise NotImplementedError

    def advance(self, end: P, notes: Sequence[Json]) -> P:
        """Where the next range starts, given the notes of this one; deterministic, since recovery calls it again."""
        return end

    def set_aside(self, stream: str, error: ConnectorError) -> Json | None:
        """
        The note that leaves out one stream whose rows a sink refuses, so that the others go on; None: they cannot.

        On the driver or in a task. What was staged of the stream in that epoch stays, so the source must begin it anew.
        """
        return None

    def cleared(self, start: P, end: P) -> frozenset[str]:
        """Streams whose rows in the range follow a clear, so that a target may take other types with it; on the driver."""
        return frozenset()

    def reread(self, notes: Sequence[Json], again: Sequence[Json], streams: frozenset[str]) -> Sequence[Json]:
        """
        The notes that count when a range was read a second time for a sink that had lost it, while others keep the first.

        `streams` are those that were staged again; the default is right for sources whose notes never differ.
        """
        return notes or again

    def withdraw(self, start: P, end: P) -> bool:
        """True if this planned range can never be read again and the source can go on from `start` without it."""
        return False

    def streams(self, position: P) -> Sequence[StreamState]:
        """What `penstock tables` shows; from the position alone, since nothing need be running."""
        return ()

    def seeded(self, position: P) -> frozenset[str]:
        """The streams whose first copy is complete at a position that is committed."""
        return frozenset()

    def earlier(self, a: P, b: P) -> P:
        """The earlier of two ends of ranges with one start; the default takes the lesser of each number and text in them."""
        return type(a).model_validate(_lesser(a.model_dump(mode="json"), b.model_dump(mode="json")))

    def ack(self, end: P) -> None:
        """Everything before `end` is committed; may repeat, also with an end that was acked long ago."""


class PollingSource(SourceConnector[C]):
    """A source that is asked for records; they are journaled before anything else happens."""

    def poll_batch(self, max_records: int) -> SourceBatch | list[SourceEnvelope] | None:
        """Up to about `max_records` new records; None when there are none yet, or when rate limited."""
        raise NotImplementedError

    def checkpoint(self) -> SourceCheckpoint:
        """Where the source stands after the last `poll_batch`; journaled together with its rows."""
        raise NotImplementedError

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Go on from `checkpoint`; after `open`, before the first poll. Raises on one that is not valid."""
        raise NotImplementedError

    def commit(self, offsets: Mapping[str, Json]) -> None:
        """The offsets of a checkpoint are on disk: tell the outside system. In order, after the journal's fsync."""


class Sender(Protocol):
    """Where a streaming source puts its records; both calls block while the journal is full."""

    @property
    def stopped(self) -> bool:
        """True once the source must return; sends are then refused."""

    def wait(self, seconds: float) -> bool:
        """Sleep until stopped or for `seconds`; True when stopped."""

    def send(self, item: SourceEnvelope | SourceBatch, on_durable: Callable[[], None] | None = None) -> None:
        """Hand over one item; `on_durable` is called once it is on disk, in order, from the journal's thread."""

    def send_batch(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> None:
        """Hand over many envelopes as one unit."""


class StreamingSource(SourceConnector[C]):
    """A source that pushes."""

    def start_streaming(self, sender: Sender) -> None:
        """Push until `sender.stopped`; a broken connection raises `RetryableError`, and the runtime calls again."""
        raise NotImplementedError


class BufferedBridge:
    """
    Lets a client that calls back serve a source that is polled: `put` from the client's thread, `take` in `poll_batch`.

    `put` blocks while `capacity` envelopes wait, which is the backpressure; return `ready` from `data_ready_notify`.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self.ready = threading.Event()
        self._capacity = capacity
        self._waiting: deque[SourceEnvelope] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, envelope: SourceEnvelope, timeout_secs: float | None = None) -> bool:
        """Hand over an envelope; False if the bridge was closed or stayed full."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._capacity, timeout_secs)
            if self._closed or len(self._waiting) >= self._capacity:
                return False
            self._waiting.append(envelope)
        self.ready.set()
        return True

    def take(self, max_records: int) -> list[SourceEnvelope] | None:
        """Up to `max_records` envelopes in the order they came, or None."""
        with self._changed:
            taken = [self._waiting.popleft() for _ in range(min(max_records, len(self._waiting)))]
            if self._waiting:
                self.ready.set()
            self._changed.notify_all()
        return taken or None

    def close(self) -> None:
        """Refuse further envelopes and wake whoever waits to put one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _lesser(a: Json, b: Json) -> Json:
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _lesser(a[key], b[key]) for key in a if key in b}
    return min(a, b) if type(a) is type(b) and not isinstance(a, list) and a is not None else b
