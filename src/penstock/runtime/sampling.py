"""A few rows of a source, routed and decoded as a run does it; nothing is acknowledged, staged or committed."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.abilities import Sampled
from penstock.config import Config
from penstock.errors import ConnectorError, DataError, FatalError
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Target
from penstock.runtime.job import Bad, Job, OnErrors, Part
from penstock.runtime.journal.envelopes import by_stream, encode
from penstock.runtime.messages.codecs import Codecs
from penstock.runtime.reading import Reading
from penstock.schema import discover, is_envelope
from penstock.sink import Epoch
from penstock.source import (
    Note,
    PollingSource,
    Position,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceConnector,
    SourceContext,
    SourceEnvelope,
    StreamingSource,
)

WAIT_SECS = 10.0
"""How long a source that pushes or is polled is waited for."""

_END_SECS = 30.0
"""How long a source that pushes may take to return once it is asked to."""


@dataclass
class Sample:
    """What came of the rows of one source."""

    rows: list[tuple[Target, str, pa.RecordBatch]] = field(default_factory=list)
    """Where rows would go, of which stream they are, and the rows; of a route with SQL, what its query would see."""
    unrouted: int = 0
    bad: list[Bad] = field(default_factory=list)
    """Records that could not be decoded."""


def sample(pipeline: Pipeline, name: str, source: SourceConnector[Any], rows: int) -> Sample:
    """Read about so many rows of each stream of a source that is open."""
    refused: list[DataError] = []
    given = _Given(_few(_until_refused(_read(source, rows), refused), rows), refused)
    job = Job(
        epoch=Epoch(pipeline.name, "sample", 0),
        parts=[Part(0, name, None)],
        sources={name: given},
        sinks={},
        router=pipeline.router,
        on_error=OnErrors("skip"),
        decoders=Codecs(pipeline.schemas, pipeline.processing.state_dir).decoders_unregistered(),
    )
    found, reading = Sample(), Reading(job, job.parts)
    for each in reading:
        found.rows.append((each.target, each.tally.stream, each.batch))
    for tally in reading.tallies.values():
        found.unrouted += tally.unrouted
        found.bad += tally.samples
    return found


def _until_refused(batches: Iterator[SourceBatch], refused: list[DataError]) -> Iterator[SourceBatch]:
    """What a source gives before it says which of its records are bad: they are shown like those that cannot be decoded."""
    try:
        yield from batches
    except DataError as error:
        refused.append(error)


def _few(batches: Iterator[SourceBatch], rows: int) -> list[SourceBatch]:
    """Of each stream so many rows at most, in one piece where their columns agree."""
    left: dict[str, int] = {}
    pieces: dict[tuple[str, pa.Schema], list[pa.RecordBatch]] = {}
    for batch in batches:
        room = left.setdefault(batch.stream, rows)
        if room > 0:
            left[batch.stream] = room - batch.num_rows
            pieces.setdefault((batch.stream, batch.records.schema), []).append(batch.records.slice(0, room))
    return [SourceBatch(pa.concat_batches(found), stream=stream) for (stream, _), found in pieces.items()]


def _read(source: SourceConnector[Any], rows: int) -> Iterator[SourceBatch]:
    if isinstance(source, Sampled):
        yield from source.sample(rows)
    elif isinstance(source, RangeSource):
        yield from _first_range(source, rows)
    elif isinstance(source, PollingSource):
        yield from _polled(source, rows)
    elif isinstance(source, StreamingSource):
        yield from _pushed(source, rows)
    else:
        raise FatalError("this source has no rows to show before it runs", hint="leave --sample out for it")


def _first_range(source: RangeSource[Any, Any], rows: int) -> Iterator[SourceBatch]:
    start = source.initial()
    end = source.latest(start, ReadLimit(rows * max(1, len(discover(source)))))  # of all streams together
    reader = pickle.loads(pickle.dumps(source))  # as in a task
    try:
        reader.open(SourceContext(in_task=True))
        for split in source.split(start, end) if start != end else ():
            yield from (each for each in reader.read(split) if not isinstance(each, Note))
    finally:
        reader.close()


def _polled(source: PollingSource[Any], rows: int) -> Iterator[SourceBatch]:
    give_up, count = time.monotonic() + WAIT_SECS, 0
    while count < rows and time.monotonic() < give_up:
        found = source.poll_batch(rows)
        if not found:
            if count:
                return
            time.sleep(0.1)
            continue
        for batch in _batches(found):
            count += batch.num_rows
            yield batch


def _pushed(source: StreamingSource[Any], rows: int) -> Iterator[SourceBatch]:
    """Nothing is said to be durable, so the other side keeps what it sent and sends it again to the next run."""
    sender, failed = _Taker(rows), []

    def push() -> None:
        try:
            source.start_streaming(sender)
        except ConnectorError as error:
            failed.append(error)
        finally:
            sender.enough.set()

    thread = threading.Thread(target=push, name="penstock-sample", daemon=True)
    thread.start()
    sender.enough.wait(WAIT_SECS)
    sender.enough.set()
    thread.join(_END_SECS)
    if failed and not sender.taken:
        raise failed[0]
    yield from list(sender.taken)


def _batches(items: SourceBatch | Sequence[SourceEnvelope]) -> Iterator[SourceBatch]:
    if not isinstance(items, SourceBatch):
        yield from by_stream(encode(items))
    elif not items.stream and is_envelope(items.records.schema):
        yield from by_stream(items.records)
    else:
        yield items


class _Taker:
    """A sender that keeps the first rows and calls nobody back."""

    def __init__(self, rows: int) -> None:
        self.taken: list[SourceBatch] = []
        self.enough = threading.Event()
        self._left = rows

    @property
    def stopped(self) -> bool:
        return self.enough.is_set()

    @property
    def full(self) -> bool:
        return self.stopped

    def wait(self, seconds: float) -> bool:
        return self.enough.wait(seconds)

    def send(self, item: SourceEnvelope | SourceBatch, on_durable: Callable[[], None] | None = None) -> None:
        self.offer(item if isinstance(item, SourceBatch) else [item])

    def send_batch(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> None:
        self.offer(envelopes)

    def offer(
        self, items: SourceBatch | Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None
    ) -> bool:
        if self.stopped:
            return False
        for batch in _batches(items):
            self.taken.append(batch)
            self._left -= batch.num_rows
        if self._left <= 0:
            self.enough.set()
        return True


class _NoOptions(Config):
    pass


class _Given(RangeSource[_NoOptions, Position]):
    """Batches that were read already, as a source."""

    def __init__(self, batches: Sequence[SourceBatch], refused: Sequence[DataError]) -> None:
        super().__init__(_NoOptions())
        self._batches_read = batches
        self._refused = refused

    def schema(self) -> Schemas:
        return {batch.stream: batch.records.schema for batch in self._batches_read}

    def read(self, split: Any) -> Iterator[SourceBatch]:
        yield from self._batches_read
        for error in self._refused:
            raise error
