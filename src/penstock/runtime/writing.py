"""The sinks of one task, and what becomes of rows that they refuse."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import failpoints
from penstock.changes import own_columns
from penstock.errors import ConnectorError, DataError, SchemaError, is_of_stream
from penstock.formats import Failures, Format
from penstock.pipeline.routing import Target, partition_of, split_by
from penstock.runtime.job import Bad, Job, TaskResult, is_plain
from penstock.runtime.messages import letters
from penstock.runtime.messages.clashes import Filled, having
from penstock.runtime.reading import Rows, show
from penstock.schema import Readable
from penstock.schema.evolution import diff, widens
from penstock.sink import SinkConnector, SinkContext, Task, Topic, TopicContext, WriteResult
from penstock.tables import Refused, TableSource

HOPELESS = 64
"""So many rows were refused one by one, and none was taken: it is the batch that does not fit, not its rows."""


class Writer:
    """The sinks of one task: each is opened when its first rows come, and staged by `finish`."""

    def __init__(self, job: Job, task: Task) -> None:
        self._job = job
        self._task = task
        self._open: dict[str, SinkConnector[Any, Any]] = {}
        self._topics: dict[str, dict[Topic, TopicContext]] = {
            name: dict(job.contexts.get(name, SinkContext()).topics) for name in job.sinks
        }
        self._encoders: dict[Topic, Format[Any] | None] = {}
        self._written: dict[tuple[str, Topic], WriteResult] = defaultdict(WriteResult)
        self._filled: dict[tuple[str, Topic], Filled] = defaultdict(Filled)
        self._samples: list[Bad] = []

    def take(self, rows: Rows) -> None:
        """Write rows of a part. What a sink refuses is left out, kept as dead letters or raised, by policy."""
        for name in rows.target.sinks:
            fitting = self._unbarred(name, rows)
            try:
                self._put(name, rows.target, fitting.batch)
            except ConnectorError as error:
                if not self._kept(name, fitting, error):
                    _leave_out(rows, self._job, error)
                    return

    def keep(self, rows: Rows) -> None:
        """Write rows; what a sink refuses for itself is kept as dead letters, and anything else is raised."""
        for name in rows.target.sinks:
            try:
                self._put(name, rows.target, rows.batch)
            except ConnectorError as error:
                if not self._kept(name, rows, error):
                    raise

    def spread(self, rows: Rows, count: int) -> list[Rows | None]:
        """The rows by the partition of their key; None where there are none."""
        key = rows.target.route.key_columns(rows.batch.schema)
        try:
            where = partition_of(rows.batch, key, count)
        except ConnectorError as error:
            _leave_out(rows, self._job, error)
            return []
        batches = split_by(rows.batch, where, count)
        kept = [None] * count if rows.envelopes is None else split_by(rows.envelopes, where, count)
        return [b and replace(rows, batch=b, envelopes=e) for b, e in zip(batches, kept, strict=True)]

    def write(self, target: Target, batch: pa.RecordBatch) -> None:
        """Hand rows to every sink of the target; raises what one of them refuses."""
        for name in target.sinks:
            self._put(name, target, batch)

    def finish(self) -> TaskResult:
        """Stage what was written: durable, not visible."""
        filled = {target: found.paths for target, found in self._filled.items()}
        result = TaskResult(
            written=dict(self._written), filled=filled, samples=self._samples, attempt=self._task.attempt
        )
        for name, sink in self._open.items():
            sink.flush()
            result.receipts[name] = sink.pre_commit(self._job.epoch)
        failpoints.hit("stage.task")
        return result

    def close(self) -> None:
        for sink in self._open.values():
            sink.close()
        self._open.clear()

    def _put(self, name: str, target: Target, batch: pa.RecordBatch) -> None:
        if not batch.num_rows or not self._job.wants(name, target.topic):
            return
        topics = self._topics[name]  # the driver may not have known the topic: then the route says its policy
        known = target.context(topics.get(target.topic, TopicContext()))
        keeps = self._job.letters is not None and target.topic != letters.TOPIC
        encoder = known.encoder or self._encoder(target.topic)
        topics[target.topic] = replace(known, encoder=encoder, keeps_refused=keeps)
        sink = self._open.get(name) or self._begin(name)
        if target.topic == letters.TOPIC and isinstance(sink, Readable) and not sink.takes_nested:
            batch = letters.flat(batch)
        written = sink.write_batch(target.topic, batch)  # first: what a sink refuses is not written
        if written.records_discarded and not self._written[name, target.topic].records_discarded:
            self._samples.append(_discarded(name, sink, target, batch))
        self._written[name, target.topic] += written
        if self._infers(target):
            self._filled[name, target.topic].note(batch)
        failpoints.hit("stage.middle")

    def _encoder(self, topic: Topic) -> Format[Any] | None:
        if topic not in self._encoders:
            self._encoders[topic] = self._job.decoders.encoder(topic)
        return self._encoders[topic]

    def _begin(self, name: str) -> SinkConnector[Any, Any]:
        sink = self._job.sinks[name]
        self._open[name] = sink
        known = self._job.contexts.get(name, SinkContext())
        sink.open(SinkContext(self._topics[name], known.state_dir, name))
        sink.begin_epoch(self._job.epoch, self._task)
        return sink

    def _kept(self, name: str, rows: Rows, error: ConnectorError) -> bool:
        """Keep the rows that a sink refuses for themselves as dead letters, and write the others; False: it is not the rows."""
        job = self._job
        if rows.policy(job) != "dead_letter" or not isinstance(error, DataError | SchemaError) or job.letters is None:
            return False
        if rows.target.topic == letters.TOPIC:
            return False
        found = self._at_fault(name, rows, error)
        if found is None:
            return False
        self._keep(name, rows, found)
        return True

    def _keep(self, name: str, rows: Rows, found: Sequence[tuple[int, ConnectorError]]) -> None:
        """Keep rows that a sink refuses as dead letters."""
        job, tally = self._job, rows.tally
        assert job.letters is not None
        topic = rows.target.topic
        place, made = replace(rows.place, sink=name), []
        for at, why in found:
            tally.kept(topic, why.code, 1)
            show(tally, topic, why.code, "sink", why.message)
            if rows.envelopes is not None:
                failure = Failures.of({at: ("sink", why.message)})
                made.append(letters.of_messages(rows.envelopes, failure, place, job.epoch, why.code))
            else:
                row = rows.batch.slice(at, 1)
                made.append(letters.of_rows(row, why.code, "sink", why.message, place, job.epoch))
        if made:
            together = pa.Table.from_batches(made).combine_chunks().to_batches()[0]
            self._put(job.letters, letters.target(job.letters), together)

    def _unbarred(self, name: str, rows: Rows) -> Rows:
        """The rows but for those that a sink cannot have beside rows of other tasks, by what the manifest says of its columns."""
        topic = rows.target.topic
        barred = self._job.barred.get((name, topic), ()) if self._infers(rows.target) else ()
        bad = having(rows.batch, barred)
        if not bad.any():
            return rows
        shown = ", ".join(".".join(path) for path in barred)
        error = SchemaError(
            f"{topic} in sink {name!r} has no place for {shown} beside the columns that other rows of the epoch bring",
            code="PEN-4001",
            hint='rename the column in the route\'s SQL; or set on_error = "dead_letter" to keep such rows apart and go on',
        )
        if rows.policy(self._job) != "dead_letter" or self._job.letters is None:
            raise error
        if self._job.wants(name, topic):
            self._keep(name, rows, [(at, error) for at in np.flatnonzero(bad).tolist()])
        return rows.only(~bad)

    def _infers(self, target: Target) -> bool:
        """True for messages as they came, in a format that infers their columns."""
        decoder = self._job.decoders.of(target.topic) if is_plain(target.route) else None
        return decoder is not None and decoder.format.columns() is None

    def _at_fault(self, name: str, rows: Rows, error: ConnectorError) -> list[tuple[int, ConnectorError]] | None:
        """Write the rows that the sink takes, and give back the others; None: it is the whole batch that does not fit."""
        taken = 0

        def refused(start: int, stop: int) -> ConnectorError | None:
            nonlocal taken
            try:
                self._put(name, rows.target, rows.batch.slice(start, stop - start))
            except (DataError, SchemaError) as why:
                return why
            taken += stop - start
            return None

        found: list[tuple[int, ConnectorError]] = []
        named = getattr(error, "rows", None)
        if named and getattr(error, "others_written", False):
            self._written[name, rows.target.topic] += WriteResult(rows.batch.num_rows - len(named))
            return [(at, error) for at in named]
        hopeless = HOPELESS if rows.origin is None and len(named or ()) in (0, rows.batch.num_rows) else math.inf
        for start, stop in _runs(named, rows.batch.num_rows):
            why = refused(start, stop) if named else error
            for each in bisect(refused, start, stop, why) if why is not None else ():
                found.append(each)
                if len(found) >= hopeless and not taken:
                    return None
        return found


def _discarded(name: str, sink: SinkConnector[Any, Any], target: Target, batch: pa.RecordBatch) -> Bad:
    """What `schema_evolution` left out of a sink for the first time: the columns, never the values."""
    known: pa.Schema | None = None
    with contextlib.suppress(ConnectorError):  # it was written: that it cannot be explained is no reason to fail
        known = sink.schema(target.topic)
    own = set(own_columns(batch.schema))
    changed = [] if known is None else [each for each in diff(known, batch.schema) if each.column in own and each.new]
    changes = [each for each in changed if each.old is None or not widens(each.new, each.old)]
    columns = [
        f"{each.column!r} is {each.new}"
        + (f" and the target has {each.old}" if each.old else ", which the target lacks")
        for each in changes
    ]
    what = "; ".join(columns) or "the target has no place for them"
    return Bad(
        "", "", target.topic, "PEN-4001", "schema_evolution", f"rows or values left out of sink {name!r}: {what}"
    )


def bisect(
    refused: Callable[[int, int], ConnectorError | None], start: int, stop: int, why: ConnectorError
) -> Iterator[tuple[int, ConnectorError]]:
    """The rows of a refused run that are refused by themselves; each takes about log2 of the run's length in tries."""
    if stop - start == 1:
        yield start, why
        return
    middle = (start + stop) // 2
    for low, high in ((start, middle), (middle, stop)):
        if (error := refused(low, high)) is not None:
            yield from bisect(refused, low, high, error)


def _runs(named: Sequence[int] | None, count: int) -> list[tuple[int, int]]:
    """The whole batch; or, if the sink names the rows, each of them and the rows in between."""
    if not named:
        return [(0, count)]
    edges = sorted({0, count, *(edge for at in named for edge in (at, at + 1))})
    return list(pairwise(edges))


def _leave_out(rows: Rows, job: Job, error: ConnectorError) -> None:
    """Leave the stream in hand out from here on if its rows are refused and its source can copy it again; else raise."""
    if not (isinstance(job.sources[rows.tally.source], TableSource) and is_of_stream(error)):
        raise error
    rows.tally.refused[rows.tally.stream] = Refused.because(rows.tally.stream, error).note()
