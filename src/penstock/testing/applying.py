"""A memory sink with a second stage: the reference for sinks whose commits need heavy work."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock import failpoints
from penstock.durable import canonical, disk_errors, fsync, publish_once
from penstock.errors import PlanStale, StagingLost
from penstock.sink import Applied, CommittedEpoch, Epoch, Positions, Receipt, Task, Topic, Work, is_committed
from penstock.testing.memory import MemoryReceipt, MemorySink


class MemoryWork(Work):
    file: str
    """A staged file whose rows are to be written again."""
    version: int
    """Entries in the topic's log when this was planned."""


class MemoryApplied(Applied):
    file: str
    version: int


class MemoryApplySink(MemorySink):
    """
    As `MemorySink`, but what tasks staged is written a second time before it is committed, one piece of work per file.

    An example of sinks that rewrite files of their target. `work_bytes` says whether the driver or a job does it.
    """

    applied_type = MemoryApplied
    work_bytes = 1 << 30

    def plan_apply(self, epoch: Epoch, topic: Topic, receipts: Sequence[MemoryReceipt]) -> Sequence[MemoryWork]:
        log = self._log(topic)
        if is_committed(_marker_of(log, epoch.pipeline), epoch):
            return ()
        files = [name for receipt in receipts for name in receipt.files[topic]]
        for name in files:
            self._require(topic, name)
        return [MemoryWork(topic=topic, bytes=self.work_bytes, file=name, version=len(log)) for name in files]

    def apply(self, epoch: Epoch, work: Work, task: Task) -> MemoryApplied:
        assert isinstance(work, MemoryWork)
        self._require(work.topic, work.file)
        directory = self._topic(work.topic) / "rows"
        rows = pa.ipc.open_file(pa.memory_map(str(directory / work.file))).read_all()
        name = f"{epoch.stem(task)}.arrow"
        with disk_errors(), pa.ipc.new_file(str(directory / name), rows.schema) as writer:
            writer.write_table(rows)
        fsync(directory / name)
        return MemoryApplied(topic=work.topic, file=name, version=work.version)

    def commit_applied(
        self,
        epoch: Epoch,
        topic: Topic,
        receipts: Sequence[MemoryReceipt],
        end: Positions,
        applied: Sequence[Applied],
    ) -> None:
        log = self._log(topic)
        if is_committed(_marker_of(log, epoch.pipeline), epoch):
            return
        done = [each for each in applied if isinstance(each, MemoryApplied)]
        if any(each.version != len(log) for each in done):
            raise PlanStale(f"{topic} was planned at version {done[0].version}, and is at {len(log)}")
        files = [each.file for each in done]
        entry = self._entry(epoch, topic, files, end)
        failpoints.hit("commit.before")
        if not publish_once(self._topic(topic) / "log" / f"{len(log):012d}.json", canonical(entry).encode()):
            raise PlanStale(f"another commit to {topic} came first")

    def commit_topic(self, epoch: Epoch, topic: Topic, receipts: Sequence[MemoryReceipt], end: Positions) -> None:
        if not is_committed(_marker_of(self._log(topic), epoch.pipeline), epoch):
            raise PlanStale(f"{topic} was committed when this was planned, and is not any more")

    def sweep(self, epoch: Epoch, keep: Sequence[Receipt]) -> None:
        super().sweep(epoch, [MemoryReceipt(files=_files(each)) for each in keep])

    def _require(self, topic: Topic, name: str) -> None:
        path = self._topic(topic) / "rows" / name
        if not path.exists():
            raise StagingLost(f"{path} is gone")


def _files(receipt: Receipt) -> dict[Topic, list[str]]:
    if isinstance(receipt, MemoryApplied):
        return {receipt.topic: [receipt.file]}
    assert isinstance(receipt, MemoryReceipt)
    return receipt.files


def _marker_of(log: list[dict[str, object]], pipeline: str) -> CommittedEpoch | None:
    markers = [entry["marker"] for entry in log if entry["pipeline"] == pipeline]
    return CommittedEpoch.model_validate(markers[-1]) if markers else None
