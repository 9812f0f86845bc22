"""The one writer of a journal: what is appended waits in memory for its thread, which makes it durable in groups."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

from penstock.durable import Json, canonical
from penstock.errors import ConnectorError, FatalError, RetryableError
from penstock.runtime.journal import disk as disks
from penstock.runtime.journal import segment as segments
from penstock.runtime.journal.disk import Disk
from penstock.runtime.journal.envelopes import Repeats, encode, placed, size_of
from penstock.runtime.journal.segment import Block, bytes_of, coalesced, corrupt, gone, schema_of
from penstock.source import ENVELOPE_SCHEMA, Schemas, SourceBatch, SourceEnvelope

PENDING_BYTES = 64 << 20
"""How much may wait in memory for the disk."""
URGENT_BYTES = 1 << 20
"""So much is written without waiting for more."""

ROOM_SECS = 0.5
"""How often a full disk is asked again."""

logger = logging.getLogger("penstock.journal")

Item = SourceBatch | Sequence[SourceBatch] | Sequence[SourceEnvelope]
"""What is appended as one unit: durable as a whole or not at all."""


class Full(Exception):
    """There is no room now, and the caller did not want to wait."""


class Journal:
    """
    The one writer of a journal directory: its own thread writes and syncs, and one pair of fsyncs serves all that waited.

    With `durable=False` nothing is synced and the rows of an earlier run are thrown away.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = 1 << 30,
        linger_ms: int = 5,
        *,
        durable: bool = True,
        first_row: int = 0,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self.failure: ConnectorError | None = None
        """Why nothing can be appended any more; a failed fsync is never tried again."""
        self._max_bytes = max_bytes
        self._linger = linger_ms / 1000 if durable else 0
        self._on_commit = on_commit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._moved = threading.Condition(self._lock)
        self._pending: list[_Entry] = []
        self._pending_bytes = 0
        self._appended = self._settled = 0
        self._refusing = self._closed = self._hurry = False
        self._acked = 0
        self.no_room = ""
        """Why the disk takes nothing now, if it is full: what was appended waits until there is room."""
        segment_bytes = max(1, min(disks.SEGMENT_BYTES, max_bytes // 8))
        self._disk = Disk(directory, self._lock, segment_bytes, durable=durable, first_row=first_row)
        self._repeats = Repeats(self._disk.keys)  # the keys of appended records, waiting or durable
        self._held = self._disk.held(0)
        self._next_row = self.tail
        self._thread = threading.Thread(target=self._run, name=f"journal-{directory.name}", daemon=True)
        self._thread.start()

    @property
    def first(self) -> int:
        """The first row that is still here."""
        return self._disk.segments[0].first

    @property
    def tail(self) -> int:
        """The number of durable rows that ever were; the next row gets this number."""
        return self._disk.tail

    @property
    def appended(self) -> int:
        """The tail as it will be once everything appended is durable."""
        return self._next_row

    @property
    def checkpoint(self) -> Json:
        """The last durable one."""
        return self._disk.checkpoint

    @property
    def held_bytes(self) -> int:
        """Bytes that wait in memory for the disk, and segments on disk in which a row waits for its epoch."""
        return self._held + self._pending_bytes

    @property
    def full(self) -> bool:
        """True while an append would wait; for callers that must answer instead."""
        return bool(self.no_room) or self.held_bytes >= self._max_bytes

    def counts(self) -> dict[str, float]:
        """For metrics: what waits, for how long, and what the disk took."""
        oldest, fsyncs = self._disk.oldest(), self._disk.fsyncs
        return {
            "journal_bytes": self.held_bytes,
            "journal_rows": self.appended - max(self._acked, self.first),
            "journal_oldest_seconds": 0.0 if oldest is None else max(0.0, time.time() - oldest),
            "journal_commits_total": self._disk.commits,
            "journal_limit_bytes": self._max_bytes,
            "journal_fsyncs_total": fsyncs.count,
            "journal_fsync_seconds_total": fsyncs.seconds,
        }

    def append(
        self,
        item: Item,
        checkpoint: Json = None,
        on_durable: Callable[[], None] | None = None,
        *,
        wait: bool = True,
    ) -> int:
        """
        Hand over rows, waiting while the journal is full; returns the number of the row that comes after them.

        Without `wait` it raises `Full` instead.

        `on_durable` runs in the journal's thread after the fsync, in order. Envelopes whose dedupe key is known are left
        out; their callback still waits for the original that they repeat.
        """
        entry = _Entry(item, checkpoint, on_durable)
        with self._lock:
            if not wait and not self._refuses(entry) and not self._has_room(entry.size):
                raise Full
            self._moved.wait_for(lambda: self._refuses(entry) or self._has_room(entry.size))
            if self.failure:
                raise self.failure
            if self._refuses(entry):
                raise RetryableError(
                    "the source is stopping and takes no more rows", hint="send them again after the restart"
                )
            entry.envelopes = self._repeats.without(entry.envelopes)
            urgent = not self._pending or self._pending_bytes < URGENT_BYTES <= self._pending_bytes + entry.size
            self._pending.append(entry)
            self._pending_bytes += entry.size
            self._appended += 1
            self._next_row += entry.rows
            if urgent:
                self._work.notify()
            return self._next_row

    def flush(self) -> None:
        """Wait, without lingering, until all that was appended is durable and its callbacks have run."""
        with self._lock:
            goal = self._appended
            self._hurry = True
            self._work.notify()
            self._moved.wait_for(lambda: self.failure or self._settled >= goal)
            if self.failure:
                raise self.failure

    def refuse(self) -> None:
        """Take no more rows and wake threads that wait to append; what was accepted still becomes durable."""
        with self._lock:
            self._refusing = True
            self._moved.notify_all()

    def close(self) -> None:
        """Write what was accepted and let go of the directory; may be called twice."""
        with self._lock:
            self._closed = self._refusing = True
            self._work.notify()
            self._moved.notify_all()
        self._thread.join()
        self._disk.close()

    def require(self, row: int) -> None:
        """Refuse to go on when a manifest names a row that the journal does not have, or no longer has."""
        if row > self.tail:
            raise corrupt(
                self.directory, f"it ends before row {self.tail}, but a manifest has planned rows up to {row}"
            )
        if row < self.first:
            raise gone(self.directory, row)

    def retain(self, row: int) -> None:
        """Everything before `row` is committed: delete the segments that hold nothing else. May repeat."""
        with self._lock:
            if self._closed:  # it may be another process's by now
                return
            self._acked = max(self._acked, row)
        self._disk.retain(self._acked)
        with self._lock:
            self._held = self._disk.held(self._acked)
            self._moved.notify_all()

    def schemas(self) -> Schemas:
        """The last schema of each stream seen so far."""
        with self._lock:
            streams = dict(self._disk.streams)
        return {stream: schema_of(text) for stream, text in streams.items()}

    def _refuses(self, entry: _Entry) -> bool:
        return self._closed or self.failure is not None or (self._refusing and entry.rows > 0)

    def _has_room(self, size: int) -> bool:
        if size == 0 or self.held_bytes == 0:
            return True
        in_memory = self._pending_bytes == 0 or self._pending_bytes + size <= PENDING_BYTES
        return in_memory and not self.full and size <= self._max_bytes

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                if self._linger:
                    self._work.wait_for(
                        lambda: self._hurry or self._closed or self._pending_bytes >= URGENT_BYTES, self._linger
                    )
                group, self._pending, self._hurry = self._pending, [], False
            try:
                while (full := self._commit(group)) is not None:
                    _await_room(self, full)
                self._on_commit()
                for entry in group:
                    if entry.on_durable is not None:
                        entry.on_durable()
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be appended after it
                self._poison(error)
                return
            with self._lock:
                self._settled += len(group)
                self._moved.notify_all()

    def _poison(self, error: Exception) -> None:
        with self._lock:
            self.failure = (
                error
                if isinstance(error, ConnectorError)
                else FatalError(f"the journal {self.directory} stopped: {error!r}", code="PEN-5012")
            )
            self.failure.__cause__ = error.__cause__ if error is self.failure else error
            self._moved.notify_all()
        self._on_commit()  # wake the thread that waits for rows, so that it finds the failure

    def _commit(self, group: list[_Entry]) -> disks.NoRoom | None:
        """Make a group durable; or why the disk has no room for it now."""
        blocks = list(_blocks(group))
        checkpoint = next((entry.checkpoint for entry in reversed(group) if entry.checkpoint is not None), None)
        if blocks or checkpoint is not None:
            envelopes = [envelope for entry in group for envelope in entry.envelopes]
            keys = [each.dedupe_key for each in envelopes if each.dedupe_key is not None]
            streams = {each.record.stream for each in envelopes}
            streams |= {each.stream for entry in group for each in entry.batches if _is_messages(each)}
            try:
                self._disk.commit(blocks, keys, checkpoint, streams)
            except disks.NoRoom as full:
                return full
        with self._lock:
            self._pending_bytes -= sum(entry.size for entry in group)
            self._held = self._disk.held(self._acked)
            self.no_room = ""
        return None


def _await_room(journal: Journal, full: disks.NoRoom) -> None:
    if not journal.no_room:
        logger.warning("the journal %s waits for room on the disk: %s", journal.directory, full)
    with journal._lock:
        journal.no_room = str(full)
        if journal._closed:
            raise FatalError(
                f"the journal {journal.directory} has no room for rows that were accepted: {full}",
                code="PEN-5009",
                hint="free some space and start again; they were not acknowledged, so their sender has them",
            )
        journal._work.wait(ROOM_SECS)


class _Entry:
    """One append on its way to the disk."""

    __slots__ = ("batches", "checkpoint", "envelopes", "on_durable", "size")

    def __init__(self, item: Item, checkpoint: Json, on_durable: Callable[[], None] | None) -> None:
        self.batches: Sequence[SourceBatch] = ()
        self.envelopes: Sequence[SourceEnvelope] = ()
        if isinstance(item, SourceBatch):
            self.batches = (item,)
        elif item and isinstance(item[0], SourceBatch):
            self.batches = item  # type: ignore[assignment]
        else:
            self.envelopes = item  # type: ignore[assignment]
        # Everything that could fail later, in the journal's thread, fails here, in the caller's.
        self.size = sum(bytes_of(batch.records) for batch in self.batches) + sum(map(size_of, self.envelopes))
        self.checkpoint = None if checkpoint is None else json.loads(canonical(checkpoint))
        self.on_durable = on_durable

    @property
    def rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches) + len(self.envelopes)


def _blocks(group: list[_Entry]) -> Iterator[Block]:
    """The rows of a group in their order, small neighbours joined and large batches cut."""
    for stream, batch in coalesced(chain.from_iterable(map(_pieces, _joined(group)))):
        step = max(1, batch.num_rows * segments.BLOCK_BYTES // max(1, bytes_of(batch)))
        for start in range(0, batch.num_rows, step):
            yield stream, batch.slice(start, step)


def _joined(group: list[_Entry]) -> Iterator[list[SourceEnvelope] | Sequence[SourceBatch]]:
    """Neighbouring envelopes as one list: they are encoded together."""
    for batches, entries in groupby(group, lambda entry: bool(entry.batches)):
        if batches:
            yield from (entry.batches for entry in entries)
        else:
            yield list(chain.from_iterable(entry.envelopes for entry in entries))


def _pieces(item: list[SourceEnvelope] | Sequence[SourceBatch]) -> Iterator[Block]:
    if not item:
        return
    if isinstance(item[0], SourceBatch):
        for batch in item:
            assert isinstance(batch, SourceBatch)
            yield (None, placed(batch)) if _is_messages(batch) else (batch.stream, batch.records)
        return
    envelopes: list[SourceEnvelope] = item  # type: ignore[assignment]
    start = size = 0
    for end, envelope in enumerate(envelopes):
        size += len(envelope.record.payload or b"")
        if size > PENDING_BYTES:  # an Arrow binary column ends at 2 GiB
            yield None, encode(envelopes[start : end + 1])
            start, size = end + 1, 0
    if start < len(envelopes):
        yield None, encode(envelopes[start:])


def _is_messages(batch: SourceBatch) -> bool:
    """True for messages that came as a batch: they are stored as envelopes are."""
    return bool(batch.records.schema.equals(ENVELOPE_SCHEMA))
