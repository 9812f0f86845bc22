"""
Spark's own writers over sinks: `df.write.format("penstock")` and `df.writeStream.format("penstock")`.

A batch of a query is an epoch: the id of the query is its incarnation, the number of the batch its number. Tasks stage their
rows and hand over receipts; one commit, in a process of its own on the driver, makes them visible and moves the marker in
the target. Spark repeats a batch that it does not know to be written. Then the marker says that it is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from penstock import failpoints
from penstock.errors import ConfigError, FatalError, PlanStale, RetryableError, StagingLost
from penstock.runtime.retry import Backoff
from penstock.sink import (
    PLANS,
    Applied,
    DeliveryGuarantee,
    Epoch,
    Receipt,
    SinkConnector,
    Task,
    TopicSink,
    has_second_stage,
    is_committed,
)
from penstock.spark.given import connector_of
from penstock.spark.versions import arrow_schema

if TYPE_CHECKING:
    from penstock.runtime.job import ApplyJob

OWN = ("topic", "pipeline", "epoch", "delivery")
"""Options of the writer itself; all others are the sink's."""

_SINK = "sink"

_log = logging.getLogger("penstock.spark")


@dataclass(frozen=True)
class _Patience:
    """How often a commit is tried again before the query fails; Spark then repeats the batch."""

    retry_backoff_ms: int = 100
    max_backoff_ms: int = 30_000
    max_retries: int = 6


@dataclass
class Staged(WriterCommitMessage):  # type: ignore[misc]
    """What a task has staged; None if it had no rows."""

    epoch: Epoch
    receipt: Receipt | None


class Output:
    """Where the rows of a query go, and how; a picklable value."""

    def __init__(self, options: Mapping[str, str], schema: Any, overwrite: bool) -> None:
        made, config, own = connector_of("sink", options, OWN)
        self.sink: SinkConnector[Any, Any] = made(config)  # type: ignore[assignment]
        self.topic = "/" + own.get("topic", "rows").lstrip("/")
        self.pipeline = own.get("pipeline")
        self.number = int(own["epoch"]) if "epoch" in own else None
        self.columns: pa.Schema = arrow_schema(schema)
        self._check(own.get("delivery", DeliveryGuarantee.AT_LEAST_ONCE), overwrite)

    def _check(self, delivery: str, overwrite: bool) -> None:
        name, able = type(self.sink).name, self.sink.capabilities
        if delivery not in list(DeliveryGuarantee):
            raise ConfigError(
                f"delivery is {delivery!r}", code="PEN-1003", hint=f"use {' or '.join(DeliveryGuarantee)}"
            )
        if delivery == DeliveryGuarantee.EXACTLY_ONCE and not (able.exactly_once or able.idempotent):
            raise ConfigError(
                f"{name} cannot tell a repeated batch from a new one, so it is at-least-once",
                code="PEN-1008",
                hint='choose another sink, or option("delivery", "at-least-once")',
            )
        if overwrite:
            raise ConfigError(
                f"{name} does not replace a whole target in one step",
                code="PEN-1009",
                hint='use mode("append"); for outputMode("update") of a stream: foreachBatch(penstock.BatchSink(…))',
            )

    def apply(self, job: ApplyJob) -> list[Applied]:
        """The second stage, here: a commit of Spark's own has no executors."""
        applied = []
        for number, (_, work) in enumerate(job.work):
            applied.append(job.sinks[_SINK].apply(job.epoch, work, Task(number)))
            failpoints.hit("apply.middle")
        return applied

    def stage(self, epoch: Epoch, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Task: write the rows and stage them."""
        from pyspark import TaskContext

        from penstock.pipeline.routing import Route, Router, Target
        from penstock.runtime.job import Job
        from penstock.runtime.writing import Writer

        context = TaskContext.get()
        router = Router((Route(to=self.topic),), (_SINK,))
        target = Target(self.topic, (_SINK,), router.routes[0])
        writer = Writer(Job(epoch, (), {}, {_SINK: self.sink}, router), Task(context.partitionId(), _tries(context)))
        try:
            failpoints.hit("stage.begin")
            for batch in batches:
                if batch.num_rows:
                    writer.write(target, self._conform(batch))
            return Staged(epoch, writer.finish().receipts.get(_SINK))
        finally:
            writer.close()

    def _conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same rows in the types that every session hands over, whichever time zone it has."""
        if batch.schema == self.columns:
            return batch
        arrays = [column.cast(field.type) for column, field in zip(batch.columns, self.columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.columns)

    def commit(self, messages: Sequence[Staged | None]) -> None:
        """Driver: make the epoch visible once, however often it is called."""
        staged = [each for each in messages if each is not None]
        receipts = [each.receipt for each in staged if each.receipt is not None]
        if not receipts:
            return
        epoch = staged[0].epoch
        backoff = Backoff(_Patience())
        while True:
            try:
                with self._opened():
                    failpoints.hit("stage.after")
                    self._commit(epoch, receipts)
                    failpoints.hit("commit.after")
                    self._tidy(epoch, receipts)
                return
            except StagingLost:
                raise  # only the batch itself can bring it back: Spark repeats it when the query starts again
            except RetryableError as error:
                pause = backoff.next(error)
                _log.warning("%s; once more in %.1f s", error, pause)
                time.sleep(pause)

    def _commit(self, epoch: Epoch, receipts: Sequence[Receipt]) -> None:
        topics = sorted({topic for receipt in receipts for topic in receipt.topics()})
        if all(is_committed(self.sink.committed_epoch(epoch.pipeline, topic), epoch) for topic in topics) and topics:
            return
        if isinstance(self.sink, TopicSink) and has_second_stage(self.sink):
            for topic in topics:
                self._apply(self.sink, epoch, topic, [each for each in receipts if topic in each.topics()])
        else:
            self.sink.commit_epoch(epoch, receipts, {})

    def _apply(self, sink: TopicSink[Any, Any], epoch: Epoch, topic: str, receipts: Sequence[Receipt]) -> None:
        own = replace(epoch, attempt=_short(epoch.attempt, "apply"))
        for _ in range(PLANS):
            failpoints.hit("plan_apply.before")
            work = sink.plan_apply(own, topic, receipts)
            if not work:
                sink.commit_topic(epoch, topic, receipts, {})
                return
            from penstock.runtime.job import ApplyJob

            applied = self.apply(ApplyJob(own, {_SINK: sink}, [(_SINK, each) for each in work]))
            try:
                failpoints.hit("apply.after")
                sink.commit_applied(own, topic, receipts, {}, applied)
            except PlanStale as error:
                stale = error
                continue
            sink.sweep(own, applied)  # others of this name are of runs that died before their commit
            return
        raise stale

    def _tidy(self, epoch: Epoch, receipts: Sequence[Receipt]) -> None:
        """Remove what other tries at this epoch left: it is committed, so nobody has a use for it."""
        with contextlib.suppress(RetryableError):
            self.sink.sweep(epoch, receipts)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        self.sink.open()
        try:
            yield
        finally:
            self.sink.close()


def query_epoch(pipeline: str | None) -> Epoch:
    """Task: the epoch of the batch that the task belongs to."""
    from pyspark import TaskContext

    context = TaskContext.get()
    query, batch = (context.getLocalProperty(key) for key in ("sql.streaming.queryId", "streaming.sql.batchId"))
    if query is None or batch is None:
        raise FatalError("Spark does not say which batch of which query this task belongs to", code="PEN-5012")
    return epoch_of(query, int(batch), pipeline)


def epoch_of(query: str, batch: int, pipeline: str | None) -> Epoch:
    """All runs of the query have one name for their tries at a batch: who commits it removes what the others left."""
    return Epoch(pipeline or f"spark-{query}", query, batch, attempt=_short(query, str(batch)))


def written_epoch(pipeline: str | None, number: int | None) -> Epoch:
    """The epoch of one `df.write`; with both options it is the same one if the job runs again."""
    if (pipeline is None) != (number is None):
        raise ConfigError(
            'option("pipeline", …) and option("epoch", …) belong together',
            code="PEN-1004",
            hint="a write that is repeated under the same two is done once",
        )
    if pipeline is None or number is None:
        own = uuid.uuid4().hex
        return Epoch(f"spark-{own}", own, 1)
    incarnation = str(uuid.uuid5(uuid.NAMESPACE_URL, f"penstock:spark:{pipeline}"))
    return Epoch(pipeline, incarnation, number, attempt=_short(pipeline, str(number)))


class BatchWriter(DataSourceArrowWriter):  # type: ignore[misc]
    def __init__(self, output: Output) -> None:
        self._output = output
        self._epoch = written_epoch(output.pipeline, output.number)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._output.stage(self._epoch, iterator)

    def commit(self, messages: list[Any]) -> None:
        self._output.commit(messages)


_STREAM_BASES = (
    (datasource.DataSourceStreamArrowWriter,)
    if hasattr(datasource, "DataSourceStreamArrowWriter")
    else (DataSourceStreamWriter, DataSourceArrowWriter)  # there any writer that is an Arrow one gets Arrow
)


class StreamWriter(*_STREAM_BASES):  # type: ignore[misc]
    """
    A failed batch leaves what it has staged: the query goes on with the same batch, and its commit removes the rest.

    So `abort` does nothing. A run that was taken for dead may not remove what its successor has staged for the same batch.
    """

    def __init__(self, output: Output) -> None:
        if output.number is not None:
            raise ConfigError(
                'option("epoch", …) is for df.write: the batches of a stream have numbers', code="PEN-1003"
            )
        self._output = output

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._output.stage(query_epoch(self._output.pipeline), iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:
        self._output.commit(messages)

    def abort(self, messages: list[Any], batchId: int) -> None:
        pass


def _tries(context: Any) -> int:
    return int(context.attemptNumber())


def _short(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
