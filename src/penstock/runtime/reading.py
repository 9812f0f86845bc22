"""Read the parts of a job, route their rows, and make rows of messages; in a task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError, DataError
from penstock.formats import Failures
from penstock.pipeline.routing import OnError, Target
from penstock.runtime.job import SAMPLES, Bad, Job, Part, Tally, TaskResult, is_plain
from penstock.runtime.messages import letters
from penstock.runtime.messages.decoding import merged
from penstock.runtime.messages.letters import REPLAY, Place
from penstock.schema import is_envelope
from penstock.sink import Topic
from penstock.source import Note, RangeSource, SourceBatch, SourceContext

_NUMBER = "_number"


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
    origin: Place | None = None
    """Of rows of a replay: where they first came from."""
    result_of: Place | None = None
    """Of rows that a query made: one of the places that its input came from."""

    def only(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """Some of the rows."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        envelopes = None if self.envelopes is None else self.envelopes.filter(chosen)
        return replace(self, batch=self.batch.filter(chosen), envelopes=envelopes)

    @property
    def place(self) -> Place:
        """Where a letter of these rows says that it came from."""
        return self.origin or self.result_of or Place(self.tally.source, self.tally.stream, self.target.topic)

    def places(self, job: Job) -> list[Place]:
        """
        Where letters of these rows say that they came from: one, unless several routes lead to the topic.

        Then each letter names the sink that lacks the record, so that a replay does not reach the others; of SQL one sink of
        its target, since a query is run for all of them.
        """
        place = self.place
        if place.sink is not None or len(job.router.reached(place.source, place.stream, place.topic)) < 2:
            return [place]
        sinks = self.target.sinks if is_plain(self.target.route) else self.target.sinks[:1]
        return [replace(place, sink=sink) for sink in sinks]

    def policy(self, job: Job) -> OnError:
        """What becomes of records that cannot be used. A letter stays one: who asks for a replay cannot know if it works."""
        if self.origin is not None:
            return "dead_letter"
        return job.on_error.of(self.tally.source, self.target.route)


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
                    yield from self._unread(part, tally, error)
        finally:
            for source in opened.values():
                source.close()

    def _unread(self, part: Part, tally: Tally, error: DataError) -> Iterator[Rows]:
        """What becomes of records that the source itself could not read."""
        policy = self._job.on_error.of(part.source)
        if policy == "stop" or (policy == "dead_letter" and len(error.records) < error.count):
            raise error
        tally.rows += error.count  # they came, as messages do that cannot be decoded
        for why in error.samples or [error.message]:
            show(tally, "", error.code, "source", why)
        if policy == "skip":
            tally.skipped[""] = tally.skipped.get("", 0) + error.count
            return
        assert self._job.letters is not None
        tally.kept("", error.code, error.count)
        target = letters.target(self._job.letters)
        if self._wanted(target):  # every task that reads the part meets them, and one of them keeps them
            place = Place(part.source, error.stream, "")
            yield Rows(target, letters.of_records(error, place, self._job.epoch), tally, part=part.number)

    def finish(self, result: TaskResult) -> TaskResult:
        """Add what was read to what was staged."""
        result.tallies = self.tallies
        result.columns = self.columns
        return result

    def _part(self, part: Part, source: RangeSource[Any, Any], tally: Tally) -> Iterator[Rows]:
        for item in source.read(part.split):
            if isinstance(item, Note):
                tally.notes.append(item.value)
            elif part.source == REPLAY:
                yield from self._replayed(part, item.records, tally)
            elif item.stream not in tally.refused and (part.source, item.stream) not in self._job.aside:
                yield from self._routed(part, item, tally)

    def _routed(self, part: Part, item: SourceBatch, tally: Tally) -> Iterator[Rows]:
        tally.stream = item.stream
        tally.rows += item.num_rows
        tally.oldest = _oldest(item.records, tally.oldest)
        for target, rows in self._job.router.route(part.source, item):
            if target is None:
                tally.unrouted += rows.num_rows
            elif self._wanted(target):
                yield from self._decoded(Rows(target, rows, tally, part=part.number))

    def _replayed(self, part: Part, found: pa.RecordBatch, tally: Tally) -> Iterator[Rows]:
        """Letters go where they were going when they failed, and nowhere else: other topics and sinks had them then."""
        tally.rows += found.num_rows
        for kind, place, some in letters.by_place(found):
            tally.stream = place.stream
            reached = np.zeros(some.num_rows, dtype=bool)
            for target, chosen in self._places(kind, place, some):
                reached |= chosen
                if not self._wanted(target):
                    continue
                mine = some if chosen.all() else some.filter(pa.array(chosen))
                batches = [letters.envelopes_of(mine)] if kind == "message" else letters.rows_in(mine)
                for batch in batches:
                    rows = Rows(target, batch, tally, part=part.number, origin=place)
                    yield from self._decoded(rows) if kind == "message" else [rows]
            if not reached.all() and (made := self._astray(kind, place, some.filter(pa.array(~reached)), tally)):
                yield replace(made, part=part.number, origin=place)

    def _places(self, kind: str, place: Place, some: pa.RecordBatch) -> Iterator[tuple[Target, npt.NDArray[np.bool_]]]:
        """The targets that letters of one place go to by the routes as they are now, each with the letters that reach it."""
        router = self._job.router
        if kind == "record":
            return
        if kind == "message":
            numbered = letters.envelopes_of(some).append_column(_NUMBER, pa.array(range(some.num_rows)))
            with contextlib.suppress(ConfigError):  # some, or all, have no route any more
                for target, rows in router.route(place.source, SourceBatch(numbered, stream=place.stream)):
                    if target is not None and (chosen := _going(target, place)):
                        reached = np.zeros(some.num_rows, dtype=bool)
                        reached[rows.column(_NUMBER).to_numpy()] = True
                        yield chosen, reached
            return
        for target in router.reached(place.source, place.stream, place.topic):
            if chosen := _going(target, place):
                if kind == "row":  # as a sink was to get it
                    assert place.sink is not None
                    plain = replace(target.route, sql=None, transform=None, partitions=1)
                    chosen = Target(target.topic, (place.sink,), plain)
                yield chosen, np.ones(some.num_rows, dtype=bool)
                return

    def _astray(self, kind: str, place: Place, some: pa.RecordBatch, tally: Tally) -> Rows | None:
        """Letters whose route or sink is gone stay letters; the one task that writes letters reports it."""
        assert self._job.letters is not None
        target = letters.target(self._job.letters)
        if not self._wanted(target):
            return None
        if kind == "record":
            code, rule = "PEN-3001", "source"
            what = "the source could not read it: correct it there, and drop this letter"
        else:
            code, rule = "PEN-1018", "route.gone"
            what = f"no route leads from {place.source}/{place.stream} to {place.topic}"
            what += f" of sink {place.sink!r}" if place.sink is not None else ""
        tally.kept(place.topic, code, some.num_rows)
        show(tally, place.topic, code, rule, what)
        return Rows(target, letters.again(some, rule, what, code, self._job.epoch), tally)

    def _decoded(self, rows: Rows) -> Iterator[Rows]:
        topic = rows.target.topic
        decoder = self._job.decoders.of(topic) if is_envelope(rows.batch.schema) else None
        if decoder is None:
            yield rows
            return
        known = self.columns.get(
            topic, decoder.known
        )  # an epoch with new columns is staged again, so all rows have them
        decoded = decoder.decode(rows.batch, known)
        if decoder.format.columns() is None and (known is None or decoded.columns != known):
            self.columns[topic] = merged(known, [decoded.columns])
        if len(decoded.failures):
            yield from self._failed(rows, decoded.failures)
        if decoded.rows.num_rows:
            whole = len(decoded.positions) == rows.batch.num_rows
            envelopes = rows.batch if whole else rows.batch.take(pa.array(decoded.positions))
            yield replace(rows, batch=decoded.rows, envelopes=envelopes)

    def _failed(self, rows: Rows, failures: Failures) -> Iterator[Rows]:
        """What becomes of messages that could not be decoded."""
        tally, topic = rows.tally, rows.target.topic
        policy = rows.policy(self._job)
        if policy == "stop":
            raise _refusal(rows, failures)
        if not self._failures:
            return
        for rule, reason in list(zip(failures.rules, failures.reasons, strict=True))[:SAMPLES]:
            show(tally, topic, "PEN-3001", rule, reason)
        if policy == "skip":
            tally.skipped[topic] = tally.skipped.get(topic, 0) + len(failures)
            return
        assert self._job.letters is not None
        for place in rows.places(self._job):
            tally.kept(topic, "PEN-3001", len(failures))
            found = letters.of_messages(rows.batch, failures, place, self._job.epoch)
            yield replace(rows, target=letters.target(self._job.letters), batch=found)


def _oldest(records: pa.RecordBatch, known: float | None) -> float | None:
    """The earliest time at which a row came to be, as changes and messages say it; copied rows do not."""
    column = next((name for name in ("_committed_at", "timestamp") if name in records.schema.names), None)
    if column is None or not (column == "_committed_at" or is_envelope(records.schema)):
        return known
    first = pc.min(records.column(column)).cast(pa.timestamp("us", tz="UTC")).value
    return known if first is None else min(first / 1e6, known or first / 1e6)


def _going(target: Target, place: Place) -> Target | None:
    """The target as far as letters of a place go there; of SQL whole or not at all."""
    if target.topic != place.topic or place.sink not in (None, *target.sinks):
        return None
    if place.sink is None or not is_plain(target.route):
        return target
    return Target(target.topic, (place.sink,), target.route)


def show(tally: Tally, topic: Topic, code: str, rule: str, reason: str) -> None:
    """Keep a bad record among the first few that people are shown."""
    if len(tally.samples) < SAMPLES:
        tally.samples.append(Bad(tally.source, tally.stream, topic, code, rule, reason))


def _at(batch: pa.RecordBatch, failures: Failures) -> str:
    """Where the first of the failures is in its source, where that counts its messages; as `penstock dlq` shows it."""
    offset = batch.column("offset")[int(failures.positions[0])].as_py()
    return f" at {offset['partition']}@{offset['value']}" if offset else ""


def _refusal(rows: Rows, failures: Failures) -> DataError:
    more = f" (and {len(failures) - 1:,} more of {rows.batch.num_rows:,})" if len(failures) > 1 else ""
    error = DataError(
        f"a message of stream {rows.tally.stream!r} for topic {rows.target.topic}{_at(rows.batch, failures)} cannot be decoded: "
        f"{failures.reasons[0]} ({failures.rules[0]}){more}",
        code="PEN-3001",
        hint='set on_error = "dead_letter" to keep such messages apart and go on, or "skip" to leave them out',
    )
    error.count = len(failures)
    return error
