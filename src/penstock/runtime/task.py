"""What each task of a job does, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock import failpoints
from penstock.errors import StagingLost
from penstock.pipeline.routing import Target
from penstock.runtime.job import ApplyJob, ApplyResult, Job, Part, TaskResult, is_plain
from penstock.runtime.reading import Reading
from penstock.runtime.writing import Writer
from penstock.sink import SinkContext, Task


def run_task(
    job: Job,
    parts: Sequence[Part],
    task: Task,
    wanted: Callable[[Target], bool] = lambda target: is_plain(target.route),
) -> TaskResult:
    """A passthrough task from its first row to its receipts."""
    failpoints.hit("stage.begin")
    reading = Reading(job, parts, lambda target: wanted(target) or target.topic in job.look)
    writer = Writer(job, task)
    try:
        for rows in reading:
            if wanted(rows.target):
                writer.take(rows)
        return reading.finish(writer.finish())
    finally:
        writer.close()


def run_work(job: ApplyJob, numbers: Sequence[int], task: Task) -> ApplyResult:
    """A task that does some of the work, with sinks that it opens."""
    opened = {job.work[number][0]: job.sinks[job.work[number][0]] for number in numbers}
    try:
        for name, sink in opened.items():
            sink.open(job.contexts.get(name, SinkContext(name=name)))
        return do_work(job, numbers, task)
    finally:
        for sink in opened.values():
            sink.close()


def do_work(job: ApplyJob, numbers: Sequence[int], task: Task) -> ApplyResult:
    """Some of the work, with sinks that are open."""
    failpoints.hit("apply.begin")
    result = ApplyResult(attempt=task.attempt)
    for number in numbers:
        name, work = job.work[number]
        try:
            result.applied[number] = job.sinks[name].apply(job.epoch, work, task)
        except StagingLost:
            result.lost.add(number)
        failpoints.hit("apply.middle")
    failpoints.hit("apply.task")
    return result
