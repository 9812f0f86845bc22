"""Read the parts of a job, route their rows, and make rows of messages; in a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError
from penstock.formats import Failures
from penstock.pipeline.routing import Target
from penstock.runtime.job import SAMPLES, Bad, Job, Part, Tally, TaskResult
from penstock.runtime.messages import letters
from penstock.runtime.messages.decoding import DecodedRows, is_envelope, merged
from penstock.runtime.messages.letters import Place
from penstock.sink import Topic
from penstock.source import Note, RangeSource, SourceBatch, SourceContext


@dataclass(frozen=True)
class Rows:
    """Rows of one part on their way to a target."""

    target: Target
    batch: pa.RecordBatch
    tally: Tally
    envelopes: pa.RecordBatch | None = None
    """The messages that these rows were decoded from, row by row."""
    part: int = 0
    """Number of the part that they are of."""

    def only(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        envelopes = None if self.envelopes is None else self.envelopes.filter(chosen)
        return replace(self, batch=self.batch.filter(chosen), envelopes=envelopes)

    @property
    def place(self) -> Place:
        return Place(self.tally.source, self.tally.stream, self.target.topic)


class Reading:
    """
    Iterate to get the rows of the parts, in order, by target.

    `wanted`: only rows for these targets. `columns`: what anything downstream uses; None: all. `failures`: false if another
    task reads the same parts and tells of them.
    """

    def __init__(
        self,
        job: Job,
        parts: Sequence[Part],
        wanted: Callable[[Target], bool] = lambda _: True,
        columns: frozenset[str] | None = None,
        failures: bool = True,
    ) -> None:
        self._job = job
        self._parts = parts
        self._wanted = wanted
        self._columns = columns
        self._failures = failures
        self.tallies: dict[int, Tally] = {}
        self.columns: dict[Topic, pa.Schema] = {}
        """Columns that the epoch did not know, per topic, with those that it did."""

    def __iter__(self) -> Iterator[Rows]:
        opened: dict[str, RangeSource[Any, Any]] = {}
        try:
            for part in self._parts:
                if part.source not in opened:
                    source = self._job.sources[part.source]
                    source.open(SourceContext(columns=self._columns, in_task=True))
                    opened[part.source] = source
                tally = self.tallies[part.number] = Tally(part.source)
                try:
                    yield from self._part(part, opened[part.source], tally)
                except DataError as error:
                    if self._job.on_error.of(part.source) != "skip":
                        raise
                    tally.skipped[""] = tally.skipped.get("", 0) + error.count
                    for why in error.samples or [error.message]:
                        _show(tally, "", error.code, "source", why)
        finally:
            for source in opened.values():
                source.close()

    def finish(self, result: TaskResult) -> TaskResult:
        """Add what was read to what was staged."""
        result.tallies = self.tallies
        result.columns = self.columns
        return result

    def _part(self, part: Part, source: RangeSource[Any, Any], tally: Tally) -> Iterator[Rows]:
        for item in source.read(part.split):
            if isinstance(item, Note):
                tally.notes.append(item.value)
            elif item.stream not in tally.refused and (part.source, item.stream) not in self._job.aside:
                yield from self._routed(part, item, tally)

    def _routed(self, part: Part, item: SourceBatch, tally: Tally) -> Iterator[Rows]:
        tally.stream = item.stream
        tally.rows += item.num_rows
        for target, rows in self._job.router.route(part.source, item):
            if target is None:
                tally.unrouted += rows.num_rows
            elif self._wanted(target):
                yield from self._decoded(Rows(target, rows, tally, part=part.number))

    def _decoded(self, rows: Rows) -> Iterator[Rows]:
        topic = rows.target.topic
        decoder = self._job.decoders.of(topic) if is_envelope(rows.batch.schema) else None
        if decoder is None:
            yield rows
            return
        decoded = decoder.decode(rows.batch)
        if decoder.format.columns() is None:
            self._learn(topic, decoder.known, decoded)
        if len(decoded.failures):
            yield from self._failed(rows, decoded.failures)
        if decoded.rows.num_rows:
            whole = len(decoded.positions) == rows.batch.num_rows
            envelopes = rows.batch if whole else rows.batch.take(pa.array(decoded.positions))
            yield replace(rows, batch=decoded.rows, envelopes=envelopes)

    def _learn(self, topic: Topic, known: pa.Schema | None, decoded: DecodedRows) -> None:
        if known is None or decoded.columns != known:
            found = [each for each in (self.columns.get(topic), decoded.columns) if each is not None]
            self.columns[topic] = merged(known, found)

    def _failed(self, rows: Rows, failures: Failures) -> Iterator[Rows]:
        """What becomes of messages that could not be decoded."""
        tally, topic = rows.tally, rows.target.topic
        policy = self._job.on_error.of(tally.source, rows.target.route)
        if policy == "stop":
            raise _refusal(rows, failures)
        if not self._failures:
            return
        for rule, reason in list(zip(failures.rules, failures.reasons, strict=True))[:SAMPLES]:
            _show(tally, topic, "PEN-3001", rule, reason)
        if policy == "skip":
            tally.skipped[topic] = tally.skipped.get(topic, 0) + len(failures)
            return
        assert self._job.letters is not None
        tally.letters[topic] = tally.letters.get(topic, 0) + len(failures)
        found = letters.of_messages(rows.batch, failures, rows.place, self._job.epoch)
        yield replace(rows, target=letters.target(self._job.letters), batch=found)


def _show(tally: Tally, topic: Topic, code: str, rule: str, reason: str) -> None:
    if len(tally.samples) < SAMPLES:
        tally.samples.append(Bad(tally.source, tally.stream, topic, code, rule, reason))


def _refusal(rows: Rows, failures: Failures) -> DataError:
    more = f" (and {len(failures) - 1:,} more of {rows.batch.num_rows:,})" if len(failures) > 1 else ""
    error = DataError(
        f"a message of stream {rows.tally.stream!r} for topic {rows.target.topic} cannot be decoded: "
        f"{failures.reasons[0]} ({failures.rules[0]}){more}",
        code="PEN-3001",
        hint='set on_error = "dead_letter" to keep such messages apart and go on, or "skip" to leave them out',
    )
    error.count = len(failures)
    return error
