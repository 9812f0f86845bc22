"""What runs in Spark's tasks."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import SchemaError, reason_of
from penstock.pipeline.routing import Route, Target
from penstock.runtime.job import Job, Part, Tally, TaskResult, is_plain
from penstock.runtime.messages import letters
from penstock.runtime.messages.letters import Place, rows_of, to_ipc
from penstock.runtime.reading import Reading, Rows
from penstock.runtime.task import run_task, run_work
from penstock.runtime.writing import Writer
from penstock.sink import Task, Topic
from penstock.spark.deletes import FilteredChanges
from penstock.spark.failures import discreet
from penstock.spark.sieve import Sieve, letters_of


def pack(value: Any) -> bytes:
    """Pickle with what a notebook or a script defines itself, which no worker could import."""
    from pyspark import cloudpickle

    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


def _attempt() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return int(context.attemptNumber()) if context else 0


@cache
def _freeze() -> None:
    """Exclude objects that existed before the first task from garbage collection, which runs after every task."""
    gc.freeze()


def plain_task(packed: bytes, groups: list[list[Part]]) -> Callable[[int, Iterable[int]], Iterator[bytes]]:
    @discreet
    def task(index: int, nothing: Iterable[int]) -> Iterator[bytes]:
        list(nothing)  # a worker whose input is not read to its end is thrown away
        _freeze()
        yield pack(run_task(pickle.loads(packed), groups[index], Task(index, _attempt())))

    return task


def work_task(packed: bytes, groups: list[list[int]]) -> Callable[[int, Iterable[int]], Iterator[bytes]]:
    @discreet
    def task(index: int, nothing: Iterable[int]) -> Iterator[bytes]:
        list(nothing)
        _freeze()
        yield pack(run_work(pickle.loads(packed), groups[index], Task(index, _attempt())))

    return task


Key = tuple[int, int, int]


def lanes_of(routes: Sequence[Route]) -> dict[Route, int]:
    """The passthrough routes that hash their rows by key, each with the number of its first ordered split."""
    lanes: dict[Route, int] = {}
    for route in routes:
        if is_plain(route) and route.partitions > 1 and route not in lanes:
            lanes[route] = sum(each.partitions for each in lanes)
    return lanes


def scatter_task(
    packed: bytes, groups: list[list[Part]], lanes: dict[Route, int]
) -> Callable[[int, Iterable[int]], Iterator[tuple[Key, bytes]]]:
    """Read a group; write what needs no order across tasks, and send the rest to its lane as opaque bytes."""

    @discreet
    def task(index: int, nothing: Iterable[int]) -> Iterator[tuple[Key, bytes]]:
        list(nothing)  # a worker whose input is not read to its end is thrown away
        job: Job = pickle.loads(packed)
        reading = Reading(job, groups[index], lambda target: is_plain(target.route))
        writer = Writer(job, Task(index, _attempt()))
        try:
            sequence = 0
            for rows in reading:
                route = rows.target.route
                if route not in lanes or rows.target.topic == letters.TOPIC:
                    writer.take(rows)
                    continue
                for lane, part in enumerate(writer.spread(rows, route.partitions)):
                    if part is not None:
                        sequence += 1
                        yield (lanes[route] + lane, index, sequence), _to_lane(part, job)
            result = reading.finish(writer.finish())
        finally:
            writer.close()
        yield (0, -1, index), pack(result)

    return task


def gather_task(packed: bytes, offset: int) -> Callable[[int, Iterable[tuple[Key, bytes]]], Iterator[bytes]]:
    """Write one lane, in the order of the source; results of the readers pass through."""

    @discreet
    def task(index: int, items: Iterable[tuple[Key, bytes]]) -> Iterator[bytes]:
        job: Job = pickle.loads(packed)
        writer = Writer(job, Task(offset + index, _attempt()))
        tallies: dict[int, Tally] = {}
        try:
            for (_, group, _), blob in items:
                if group < 0:
                    yield blob
                    continue
                rows = _from_lane(blob, tallies)
                if rows.tally.stream not in rows.tally.refused:
                    writer.take(rows)
            result = writer.finish()
        finally:
            writer.close()
        result.tallies = tallies
        yield pack(result)

    return task


@dataclass(frozen=True)
class Wanted:
    """The rows that a query reads of an epoch, and where what its tasks found out is collected."""

    target: Target
    schema: pa.Schema
    """The columns that the query uses."""
    known: frozenset[str]
    results: Any
    sieve: Sieve = field(default_factory=Sieve)

    def read(
        self,
        job: Job,
        group: int,
        parts: Sequence[Part],
        fates: FilteredChanges | None = None,
        note: Callable[[pa.RecordBatch], None] = lambda rows: None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one group of splits."""
        decoder = job.decoders.of(self.target.topic)
        columns = frozenset(self.schema.names) if len(self.schema) < len(self.known) and decoder is None else None
        if fates is not None and columns is not None:
            columns |= fates.columns(self.known)
        same = lambda target: _same(target, self.target)  # noqa: E731
        reading = Reading(job, parts, same, columns, failures=not self.sieve.probes)
        writer = Writer(job, Task(READERS + group, _attempt()))
        first = 0
        try:
            for rows in reading:
                if rows.target.topic == letters.TOPIC:
                    writer.take(rows)
                    continue
                given, left = self.sieve.part(group, first, rows)
                if left:
                    writer.take(letters_of(rows, left, job))
                first += rows.batch.num_rows
                note(given.batch)  # before the rows go on: who has seen the last of them finds all notes
                # Columns that the epoch does not know have it staged again.
                seen = self.known if given.envelopes is None else self.known.union(given.batch.schema.names)
                yield conform(given.batch, self.schema, seen, self.target.topic)
            self.results.add({group: reading.finish(writer.finish())})
        finally:
            writer.close()


def read_task(
    packed: bytes, groups: list[list[Part]], wanted: Wanted, fates: FilteredChanges | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    @discreet
    def task(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        job: Job = pickle.loads(packed)
        with fates.noting(_side_file(job)) if fates else contextlib.nullcontext(lambda rows: None) as note:
            for batch in ids:
                for index in batch.column(0).to_pylist():
                    yield from wanted.read(job, index, groups[index], fates, note)

    return task


def seeded_task(wanted: Wanted) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For streaming queries, whose plan outlives an epoch: the job comes with the rows that ask for a group."""

    def task(seeds: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in seeds:
            for index, packed in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                job, groups = pickle.loads(packed)
                yield from wanted.read(job, index, groups[index])

    return task


READERS = 50_000
"""Tasks that read for SQL have numbers from here on: those that write have the first ones."""


def _to_lane(rows: Rows, job: Job) -> bytes:
    """Rows on their way to a lane; with the messages they came from only if a sink's refusal may make letters of them."""
    kept = rows.envelopes if rows.policy(job) == "dead_letter" else None
    envelopes = None if kept is None else to_ipc(kept)
    place = (rows.target, rows.tally.source, rows.tally.stream, rows.part, rows.origin)
    return pickle.dumps((*place, to_ipc(rows.batch), envelopes))


def _from_lane(blob: bytes, tallies: dict[int, Tally]) -> Rows:
    target, source, stream, part, origin, batch, envelopes = pickle.loads(blob)
    tally = tallies.setdefault(part, Tally(source))
    tally.stream = stream
    return Rows(target, rows_of(batch), tally, None if envelopes is None else rows_of(envelopes), part, origin)


def _same(target: Target, wanted: Target) -> bool:
    return target.topic == wanted.topic and target.route == wanted.route


def _side_file(job: Job) -> Path:
    """Where the two Python processes of one task meet: Spark removes the directory with itself."""
    from pyspark import TaskContext

    directory = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()
    return Path(directory) / f"penstock-{job.epoch.stem()}-{TaskContext.get().taskAttemptId()}.arrow"


def count_task(
    packed: bytes, groups: list[list[Part]], wanted: Target
) -> Callable[[int, Iterable[int]], Iterator[tuple[int, int]]]:
    """How many rows each task reads for a topic."""

    @discreet
    def task(index: int, nothing: Iterable[int]) -> Iterator[tuple[int, int]]:
        list(nothing)
        reading = Reading(pickle.loads(packed), groups[index], lambda target: _same(target, wanted), failures=False)
        yield index, sum(rows.batch.num_rows for rows in reading)

    return task


def evaluate_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compute every column of a query, and keep nothing."""
    for _ in batches:
        pass
    yield from ()


def write_task(
    packed: bytes, target: Target, columns: pa.Schema, fates: FilteredChanges | None, origin: Place | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    @discreet
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        job: Job = pickle.loads(packed)
        writer = Writer(job, Task(TaskContext.get().partitionId(), _attempt()))
        came_out: list[pa.Table] = []
        number, tally = made_of(job, origin)
        try:
            for batch in batches:
                rows = batch.rename_columns(columns.names).replace_schema_metadata(columns.metadata)
                if origin is None:
                    writer.write(target, rows)
                else:
                    writer.keep(Rows(target, rows, tally, part=number, result_of=origin))
                if fates is not None:
                    came_out.append(fates.came_out(rows))
            if fates is not None:
                for rows in fates.gone(_side_file(job), came_out, columns):
                    writer.write(replace(target, sinks=fates.sinks), rows.replace_schema_metadata(columns.metadata))
            result = writer.finish()
        finally:
            writer.close()
        if tally.letters:
            result.tallies = {number: tally}
        yield pa.RecordBatch.from_arrays([pa.array([pack(result)], pa.binary())], names=["result"])

    return task


def made_of(job: Job, origin: Place | None) -> tuple[int, Tally]:
    """The part that letters of a query's results are counted with: of the rows that the query made it of nothing is known."""
    part = next((part for part in job.parts if origin is not None and part.source == origin.source), job.parts[0])
    return part.number, Tally(part.source, stream="" if origin is None else origin.stream)


def conform(batch: pa.RecordBatch, schema: pa.Schema, known: frozenset[str], topic: Topic) -> pa.RecordBatch:
    """The batch with exactly the columns that the epoch's SQL uses; a column that its analysis did not know is refused."""
    unknown = [name for name in batch.schema.names if name not in known]
    if unknown:
        raise SchemaError(
            f"rows of {topic} have columns that its schema does not know: {', '.join(unknown)}",
            hint="the source must report every column in schema() before it hands over rows with it",
        )
    columns = []
    for column in schema:
        index = batch.schema.get_field_index(column.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, column.type))
            continue
        try:
            columns.append(batch.column(index).cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"column {column.name} of {topic} holds {batch.schema.field(index).type}, not {column.type}: {reason_of(error)}",
                code="PEN-4001",
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def result_param() -> Any:
    from pyspark.accumulators import AccumulatorParam

    class Results(AccumulatorParam[dict[int, TaskResult]]):  # type: ignore[misc]
        def zero(self, value: dict[int, TaskResult]) -> dict[int, TaskResult]:
            return {}

        def addInPlace(self, value1: dict[int, TaskResult], value2: dict[int, TaskResult]) -> dict[int, TaskResult]:
            value1.update(value2)  # by group, so a task that ran twice counts once
            return value1

    return Results()
