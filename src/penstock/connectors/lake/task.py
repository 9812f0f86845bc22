"""One task's rows of one epoch: fitted to their targets, checked and staged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.connectors.lake.staging import Stage, StagedFiles
from penstock.errors import SchemaError
from penstock.schema.evolution import Policy, fit, follow, slimmed
from penstock.sink import Topic, WriteResult

if TYPE_CHECKING:
    from penstock.connectors.lake.sink import LakeSink


class LakeTask:
    """What `write_batch` and `pre_commit` of a lake sink do. Subclasses say how a batch is written."""

    def __init__(self, sink: LakeSink[Any], stage: Stage) -> None:
        self.sink = sink
        self.stage = stage
        self._accepted: dict[tuple[Topic, pa.Schema], pa.Schema] = {}

    def write(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        raise NotImplementedError

    def finish(self) -> StagedFiles:
        return StagedFiles(staged=self.stage.finish())

    def fit(self, topic: Topic, rows: pa.RecordBatch, key: Sequence[str]) -> tuple[pa.RecordBatch, int]:
        """The rows as the target takes them by the topic's policy, and how many lost something."""
        policy, given = self.sink.policy(topic), (topic, rows.schema)
        if given not in self._accepted:
            try:
                self._accepted[given] = self.accept(topic, rows.schema, policy)
            except SchemaError as error:
                slim = slimmed(rows, self.known(topic)) if error.code == "PEN-4001" else rows
                if slim.schema == rows.schema:
                    raise
                return self.fit(topic, slim, key)
        return fit(topic, rows, self._accepted[given], policy, key)

    def accept(self, topic: Topic, rows: pa.Schema, policy: Policy) -> pa.Schema:
        """The columns of the target once such rows are in it; refuses rows that it could not follow."""
        widens = self.stage.spec.widens
        stored, staged = self.stored(topic), self.stage.schema(topic)
        columns = stored or staged or rows
        if stored is not None and staged is not None:
            columns = follow(topic, stored, staged, sink_widens=widens)
        return follow(topic, columns, rows, policy, widens)

    def known(self, topic: Topic) -> pa.Schema | None:
        """The columns of the target, or those of the rows so far that will be its first."""
        return self.stored(topic) or self.stage.schema(topic)

    def stored(self, topic: Topic) -> pa.Schema | None:
        """The columns of the target, as a task can see them; None if there is none yet."""
        return self.sink.target(topic).schema()
