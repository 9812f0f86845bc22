"""Sources that are asked for records."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from penstock import failpoints
from penstock.durable import Json
from penstock.errors import DataError
from penstock.runtime.ingest.line import Feeder, Line, Stopping, once
from penstock.runtime.journal import Item, JournalPosition
from penstock.source import PollingSource, SourceBatch, SourceCheckpoint, SourceEnvelope


class Polling(Feeder[PollingSource[Any]]):
    """Polls, journals rows and checkpoint as one record, and commits the offsets once they are on disk, in order."""

    def __init__(self, line: Line, source: PollingSource[Any]) -> None:
        super().__init__(line, source)
        self._data_ready = source.data_ready_notify()
        self._to_commit: deque[Mapping[str, Json]] = deque()  # offsets that are on disk and not yet committed
        self._after_ack: deque[tuple[int, SourceCheckpoint]] = deque()  # wait until direct rows are committed
        self._ack_lock = threading.Lock()
        self._last: SourceCheckpoint | None = None  # the newest that was journaled, or is about to be

    def restore(self) -> None:
        if self.line.journal.checkpoint is not None:
            checkpoint = SourceCheckpoint.model_validate(self.line.journal.checkpoint)
            once(self.line.name, lambda: self.source.restore(checkpoint))
            self._last = checkpoint
            # It may have died between the fsync and this: a source that stays idle must hear of it too.
            self._to_commit.append(checkpoint.offsets)

    def feed(self) -> None:
        line, wanted = self.line, self.line.processing.max_batch_records
        self.settle()
        while not line.stop.is_set():
            if self._data_ready is not None:
                self._data_ready.clear()  # before the poll: what is signalled during it is not missed
            try:
                records = line.retry(lambda: self.source.poll_batch(wanted))
            except DataError as error:
                line.skip(error)
                line.stop.wait(line.processing.poll_interval_ms / 1000)  # it may raise the same again and again
                continue
            checkpoint = None if records is None else line.retry(self.source.checkpoint)
            if records is None or checkpoint is None or (not _rows(records) and checkpoint == self._last):
                self._rest()
                continue
            self._last = checkpoint
            if _rows(records):
                line.idle.clear()
            self._take(records, checkpoint)
            if _rows(records) < wanted:  # it has caught up: commit at once. Else the disk works while it reads on.
                self.settle()
            else:
                self._commit()

    def settle(self) -> None:
        super().settle()
        self._commit()

    def wake(self) -> None:
        if self._data_ready is not None:
            self._data_ready.set()

    def on_ack(self, end: JournalPosition) -> None:
        super().on_ack(end)
        self._release()

    def _rest(self) -> None:
        self.settle()
        self.line.idle.set()
        if self._data_ready is not None:
            self._data_ready.wait()
        else:
            self.line.stop.wait(self.line.processing.poll_interval_ms / 1000)

    def _take(self, records: SourceBatch | list[SourceEnvelope], checkpoint: SourceCheckpoint) -> None:
        """
        Journal rows and checkpoint as one record.

        Rows that bypass the journal are lost in a crash. If the source can send them again, its checkpoint waits until
        they are committed, and so do the ones after it.
        """
        line = self.line
        reliable, direct = line.parted(line.usable(records))
        direct_row = line.direct.append(direct) if direct and line.direct is not None else None
        with self._ack_lock:
            waits = self._after_ack[-1][0] if self._after_ack else None
        waits = direct_row if direct_row is not None else waits
        if waits is None or not self.source.supports_replay:
            self._append_checkpoint(checkpoint, reliable)
            return
        line.journal.append(reliable)  # before its checkpoint can be released
        with self._ack_lock:
            self._after_ack.append((waits, checkpoint))
        self._release()  # the ack may have come meanwhile

    def _append_checkpoint(self, checkpoint: SourceCheckpoint, rows: Item = ()) -> None:
        on_durable = lambda: self._to_commit.append(checkpoint.offsets)  # noqa: E731
        self.line.journal.append(rows, checkpoint.model_dump(), on_durable)

    def _release(self) -> None:
        with self._ack_lock:
            while self._after_ack and self._after_ack[0][0] <= self.line.committed.direct:
                self._append_checkpoint(self._after_ack.popleft()[1])
                self.wake()  # the thread that commits offsets

    def _commit(self) -> None:
        while self._to_commit:
            offsets = self._to_commit[0]
            try:
                self.line.retry(lambda: self.source.commit(offsets))  # noqa: B023 - called at once
            except Stopping:
                return  # committed again after the restart
            self._to_commit.popleft()
            failpoints.hit("journal.told")


def _rows(item: SourceBatch | list[SourceEnvelope]) -> int:
    return item.num_rows if isinstance(item, SourceBatch) else len(item)
