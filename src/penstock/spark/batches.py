"""A sink for `foreachBatch`: what `format("penstock")` does, for every output mode and with the executors' help at the commit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from penstock.errors import FatalError, StagingLost
from penstock.runtime.epochs.commit import SMALL_WORK_BYTES
from penstock.runtime.job import ApplyJob, ApplyResult
from penstock.sink import Applied, Epoch
from penstock.spark.tasks import pack, work_task
from penstock.spark.writer import Output, epoch_of


class BatchSink:
    """
    `df.writeStream.outputMode("update").foreachBatch(BatchSink("delta", path=…, mode="upsert", key=["id"]))`.

    The options are those of `format("penstock")`. Each batch is an epoch, as there: the id of the query is its incarnation,
    the number of the batch its number. Heavy work of a commit runs in tasks, and the sink's client is imported once.
    """

    def __init__(self, connector: str, **options: Any) -> None:
        texts = {
            name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in options.items()
        }
        self._options = {"connector": connector, **texts}

    def __call__(self, batch: Any, number: int) -> None:
        """Write one batch, once; called by Spark."""
        context = batch.sparkSession.sparkContext
        query = context.getLocalProperty("sql.streaming.queryId")
        if query is None:
            raise FatalError("a BatchSink is for foreachBatch of a streaming query", code="PEN-5012")
        output = _Spread(context, self._options, batch.schema)
        epoch = epoch_of(query, number, output.pipeline)
        staged = batch.mapInArrow(_stage_task(pack((output.alone(), epoch))), "staged binary").collect()
        output.commit([pickle.loads(row.staged) for row in staged])


class _Spread(Output):
    """An output whose heavy work is spread over tasks."""

    def __init__(self, context: Any, options: dict[str, str], schema: Any) -> None:
        super().__init__(options, schema, overwrite=False)
        self._context = context
        self._made_of = (options, schema, False)

    def alone(self) -> Output:
        """For tasks, where there is no context."""
        return Output(*self._made_of)

    def apply(self, job: ApplyJob) -> list[Applied]:
        if sum(work.bytes for _, work in job.work) <= SMALL_WORK_BYTES:
            return super().apply(job)
        groups = job.groups(int(self._context.defaultParallelism))
        fresh = ApplyJob(job.epoch, {name: self.alone().sink for name in job.sinks}, job.work)  # type: ignore[misc]
        tasks = self._context.parallelize([], len(groups)).mapPartitionsWithIndex(work_task(pack(fresh), groups))
        results: list[ApplyResult] = [pickle.loads(each) for each in tasks.collect()]
        done = {number: applied for result in results for number, applied in result.applied.items()}
        if any(result.lost for result in results):
            raise StagingLost("staged rows were gone when they were to be applied")
        return [done[number] for number in sorted(done)]


def _stage_task(packed: bytes) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        output, epoch = pickle.loads(packed)
        assert isinstance(epoch, Epoch)
        staged = output.stage(epoch, batches)
        yield pa.RecordBatch.from_arrays([pa.array([pack(staged)], pa.binary())], names=["staged"])

    return task
