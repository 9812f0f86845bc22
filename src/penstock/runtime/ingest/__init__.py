"""Run the sources that push or are polled: one supervised thread each, into a journal that Spark reads as ranges."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from penstock import failpoints
from penstock.capture import Ack, Change, ChangeCapture, Delete, SnapshotTable, Upsert
from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import pack_key
from penstock.durable import Json
from penstock.errors import NOT_READY, ConnectorError, DataError, FatalError, RetryableError
from penstock.runtime.job import SAMPLES, Bad
from penstock.runtime.journal import Item, Journal, JournalConfig, JournalPosition, JournalSource, size_of
from penstock.runtime.retry import Backoff
from penstock.source import (
    ConnectorMetrics,
    HealthState,
    HealthStatus,
    PollingSource,
    SourceBatch,
    SourceCheckpoint,
    SourceConnector,
    SourceContext,
    SourceEnvelope,
    StreamingSource,
)

if TYPE_CHECKING:
    from penstock.pipeline import Processing

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Ingest:
    """
    Moves one source's rows into its journal: `open`, `start`, then `range_source` has them; `stop`, last ack, `close`.

    The outside system is told of a row only after the fsync. `failure` is what must stop the pipeline; whenever it or the
    durable tail changes, `ready` is set.
    """

    def __init__(
        self,
        name: str,
        source: SourceConnector[Any],
        journal_dir: Path,
        processing: Processing,
        *,
        on_state: Callable[[str, HealthStatus], None] = lambda name, status: None,
        on_retry: Callable[[str, BaseException | str, float], None] = lambda name, error, pause: None,
        ready: threading.Event | None = None,
        reliable: Callable[[str], bool] | None = None,
        unseeded: Callable[[], Sequence[SnapshotTable]] = lambda: (),
        lacking: Callable[[str], Sequence[str]] = lambda stream: (),
    ) -> None:
        """
        `reliable` says per stream if its rows need the journal; `unseeded` which tables some target has no copy of, and
        `lacking` which targets of a stream those are.
        """
        if not isinstance(source, PollingSource | StreamingSource | ChangeCapture):
            raise TypeError(
                f"{type(source).__name__} needs no journal: it is not a polling, streaming or capturing source"
            )
        self.name = name
        self.source = source
        self.ready = ready or threading.Event()
        self.idle = threading.Event()
        """Set while a source that is asked has said that it has nothing more."""
        self.retries = 0
        self.skipped = 0
        """Bad records left out by `on_error = "skip"`."""
        self._bad: deque[Bad] = deque(maxlen=SAMPLES)
        self._directory = journal_dir
        self._processing = processing
        self._on_state = on_state
        self._on_retry = on_retry
        self._unseeded = unseeded
        self._lacking = lacking
        self._is_reliable = reliable
        self._reliable_streams: dict[str, bool] = {}
        self._journal: Journal | None = None
        self._direct: Journal | None = None
        self._range_source: JournalSource | None = None
        self._committed = JournalPosition()
        self._is_new = True  # no epoch of its rows was ever committed, and none of them is gone
        self._stop = threading.Event()
        self._data_ready: threading.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"ingest-{name}", daemon=True)
        self._failure: ConnectorError | None = None
        self._status = HealthStatus()
        self._backoff = Backoff(processing, name)
        self._copied: set[str] = set()  # tables whose snapshot was made by this process
        self._to_tell: deque[Mapping[str, Json]] = deque()  # offsets that are on disk and not yet committed
        self._after_ack: deque[tuple[int, SourceCheckpoint]] = deque()  # wait until direct rows are committed
        self._ack_lock = threading.Lock()

    def open(
        self,
        committed: JournalPosition | None = None,
        planned: JournalPosition | None = None,
        context: SourceContext = SourceContext(),
    ) -> None:
        """
        Recover the journal and open the source, which is not retried.

        `committed` is the end of the last committed epoch, `planned` that of the newest manifest, which the journal must know.
        """
        processing = self._processing
        self._journal = Journal(
            self._directory, processing.journal_max_bytes, processing.linger_ms, on_commit=self.ready.set
        )
        self._committed = committed or JournalPosition(row=self._journal.first)
        self._is_new = committed is None and not self._journal.first
        planned = planned or self._committed
        self._journal.require(self._committed.row)
        self._journal.require(planned.row)
        self._journal.retain(self._committed.row)
        direct_dir = None
        if self._is_reliable is not None:
            direct_dir = self._directory.with_name(f"{self._directory.name}-direct")
            self._direct = Journal(
                direct_dir,
                processing.journal_max_bytes,
                durable=False,
                first_row=planned.direct,
                on_commit=self.ready.set,
            )
        config = JournalConfig(directory=self._directory, direct=direct_dir)
        self._range_source = JournalSource(config).bind(
            self._journal, self._direct, self.source, self.ready, self._on_ack
        )
        self._first(lambda: self.source.open(context))

    def start(self) -> None:
        """Hand the source its last durable checkpoint and begin to read; opens first if that was not done."""
        if self._journal is None:
            self.open()
        self._data_ready = self.source.data_ready_notify()
        if isinstance(self.source, PollingSource) and self.journal.checkpoint is not None:
            source, checkpoint = self.source, SourceCheckpoint.model_validate(self.journal.checkpoint)
            self._first(lambda: source.restore(checkpoint))
            # It may have died between the fsync and this: a source that stays idle must hear of it too.
            self._to_tell.append(checkpoint.offsets)
        if isinstance(self.source, ChangeCapture) and self.journal.checkpoint is not None:
            capture, known = self.source, self.journal.checkpoint["metadata"]
            self._first(lambda: capture.restore(known.get("position"), known.get("copies", {})))
        self._thread.start()

    def stop(self, timeout_secs: float = 30) -> bool:
        """
        Start no poll and refuse sends; returns once what was accepted is durable and told.

        False if the source did not return in time.
        """
        self._stop.set()
        for journal in (self._journal, self._direct):
            if journal is not None:
                journal.refuse()
        if self._data_ready is not None:
            self._data_ready.set()
        if self._thread.is_alive():
            self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Close source and journal; after the last ack. May be called twice."""
        self.stop()
        self.source.close()
        for journal in (self._journal, self._direct):
            if journal is not None:
                journal.close()

    @property
    def journal(self) -> Journal:
        assert self._journal is not None, "open the ingest first"
        return self._journal

    @property
    def range_source(self) -> JournalSource:
        """The rows as ranges; on the driver. Its pickled copies read in tasks."""
        assert self._range_source is not None, "open the ingest first"
        return self._range_source

    @property
    def failure(self) -> ConnectorError | None:
        """What must stop the pipeline, or None."""
        failures = [
            self._failure,
            *(journal.failure for journal in (self._journal, self._direct) if journal is not None),
        ]
        return next((failure for failure in failures if failure is not None), None)

    @property
    def seeded(self) -> Mapping[str, JournalPosition]:
        """For each table that was copied, the position behind its last row: once that is committed, the table is seeded."""
        known = (self.journal.checkpoint or {}).get("metadata", {})
        return {stream: JournalPosition(row=row) for stream, row in known.get("seeded", {}).items()}

    def copied(self, committed: Json) -> Mapping[str, Sequence[str]]:
        """The tables whose copy ends before a committed position, and the targets that it was made for."""
        return {stream: self.seeded_for(stream) for stream, end in self.seeded.items() if committed["row"] >= end.row}

    def seeded_for(self, stream: str) -> Sequence[str]:
        """The targets that lacked a copy when the last one was begun; others, added since, did not get all of it."""
        known = (self.journal.checkpoint or {}).get("metadata", {})
        return list(known.get("seeded_for", {}).get(stream, ()))

    @property
    def rows(self) -> int:
        """Rows accepted so far, over all runs."""
        return sum(journal.appended for journal in (self._journal, self._direct) if journal is not None)

    def caught_up(self, since: float) -> bool:
        """True once the source has handed over what it had at `since` (`time.monotonic()`); a pushing source always has."""
        if isinstance(self.source, StreamingSource):
            return True
        if isinstance(self.source, ChangeCapture) and not self.source.caught_up(since):
            return False
        return self.idle.is_set()

    def health(self) -> HealthStatus:
        """What is known here, and else the source's own word."""
        if self.failure is not None:
            return HealthStatus.unhealthy(str(self.failure))
        if self._journal is not None and self._journal.full:
            return HealthStatus.degraded(f"the journal is full: {self._journal.held_bytes} bytes wait to be committed")
        if self._status.state is HealthState.DEGRADED:
            return self._status
        own = self.source.health_check()
        return self._status if own.state is HealthState.UNKNOWN else own

    def metrics(self) -> ConnectorMetrics:
        """The source's own counters, and the journal's among the custom ones."""
        own = self.source.metrics()
        journal = {
            "journal_bytes": self.journal.held_bytes,
            "journal_rows": self.journal.appended - self._committed.row,
            "retries": self.retries,
        }
        return ConnectorMetrics(
            own.records_total or self.rows,
            own.bytes_total,
            own.errors_total or self.skipped,
            own.lag,
            {**own.custom, **journal},
        )

    def _first(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RetryableError as error:
            raise FatalError(f"{self.name}: {error.message}", code="PEN-5001", hint=error.hint) from error

    def _run(self) -> None:
        try:
            with contextlib.suppress(_Stopping):
                self._read()
            self._settle()
        except ConnectorError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a bug in a connector stops the pipeline instead of one silent thread
            failure = FatalError(f"{self.name}: {error!r}", code="PEN-5012", hint="this is a bug in the connector")
            failure.__cause__ = error
            self._fail(failure)

    def _read(self) -> None:
        try:
            if isinstance(self.source, PollingSource):
                self._poll(self.source)
            elif isinstance(self.source, StreamingSource):
                self._stream(self.source)
            elif isinstance(self.source, ChangeCapture):
                self._capture(self.source)
        except RetryableError:  # the journal refuses rows, or a connection broke while it was being closed
            if not self._stop.is_set():
                raise

    def _fail(self, error: ConnectorError) -> None:
        logger.error("%s stopped: %s", self.name, error)
        self._failure = error
        self._say(HealthStatus.unhealthy(str(error)))
        self.ready.set()

    def _say(self, status: HealthStatus) -> None:
        if status != self._status:
            self._status = status
            self._on_state(self.name, status)

    # polling

    def _poll(self, source: PollingSource[Any]) -> None:
        wanted = self._processing.max_batch_records
        self._settle()
        while not self._stop.is_set():
            if self._data_ready is not None:
                self._data_ready.clear()  # before the poll: what is signalled during it is not missed
            try:
                records = self._retry(lambda: source.poll_batch(wanted))
            except DataError as error:
                self._skip(error)
                self._stop.wait(self._processing.poll_interval_ms / 1000)  # it may raise the same again and again
                continue
            if records is None or not _rows(records):
                self._settle()
                self.idle.set()
                if self._data_ready is not None:
                    self._data_ready.wait()
                else:
                    self._stop.wait(self._processing.poll_interval_ms / 1000)
                continue
            self.idle.clear()
            self._journal_poll(records, self._retry(source.checkpoint))
            if _rows(records) < wanted:  # it has caught up: tell at once. Else the disk works while it reads on.
                self._settle()
            else:
                self._tell()

    def _journal_poll(self, records: SourceBatch | list[SourceEnvelope], checkpoint: SourceCheckpoint) -> None:
        """
        Journal rows and checkpoint as one record.

        Rows that bypass the journal are lost in a crash. If the source can send them again, its checkpoint waits until
        they are committed, and so do those behind it.
        """
        reliable, direct = self._parted(self._usable(records))
        direct_row = self._direct.append(direct) if direct and self._direct is not None else None
        with self._ack_lock:
            waits = self._after_ack[-1][0] if self._after_ack else None
        waits = direct_row if direct_row is not None else waits
        if waits is None or not self.source.supports_replay:
            self._append_checkpoint(checkpoint, reliable)
            return
        self.journal.append(reliable)  # before its checkpoint can be released
        with self._ack_lock:
            self._after_ack.append((waits, checkpoint))
        self._release()  # the ack may have come meanwhile

    def _append_checkpoint(self, checkpoint: SourceCheckpoint, rows: Item = ()) -> None:
        self.journal.append(rows, checkpoint.model_dump(), lambda: self._to_tell.append(checkpoint.offsets))

    def _on_ack(self, end: JournalPosition) -> None:
        self._committed = end
        self._release()

    def _release(self) -> None:
        with self._ack_lock:
            while self._after_ack and self._after_ack[0][0] <= self._committed.direct:
                self._append_checkpoint(self._after_ack.popleft()[1])
                if self._data_ready is not None:
                    self._data_ready.set()  # wakes the thread that tells

    def _settle(self) -> None:
        for journal in (self._direct, self._journal):
            if journal is not None:
                journal.flush()
        self._tell()

    def _tell(self) -> None:
        while self._to_tell:
            offsets = self._to_tell[0]
            assert isinstance(self.source, PollingSource)
            source = self.source
            try:
                self._retry(lambda: source.commit(offsets))  # noqa: B023 - called at once
            except _Stopping:
                return  # told again after the restart
            self._to_tell.popleft()
            failpoints.hit("journal.told")

    # pushing

    def _stream(self, source: StreamingSource[Any]) -> None:
        sender = _Sender(self)
        while not self._stop.is_set():
            began, before = time.monotonic(), self.rows
            error: RetryableError | None = None
            why = "start_streaming returned, though it was not told to stop"
            try:
                source.start_streaming(sender)
            except RetryableError as broken:
                error, why = broken, str(broken)
            except DataError as bad:
                self._skip(bad)
                why = str(bad)
            if self._stop.is_set():
                return
            self._settle()
            if self.rows > before or time.monotonic() - began > self._processing.max_backoff_ms / 1000:
                self._backoff.reset()
            self._back_off(why, error)

    def _accept(self, item: Item, on_durable: Callable[[], None] | None) -> None:
        reliable, direct = self._parted(self._usable(item))
        told = None if on_durable is None else lambda: self._call_back(on_durable)
        if direct and self._direct is not None:
            self._direct.append(direct, None, None if reliable else told)
        if reliable or not direct:
            self.journal.append(reliable, None, told)
        if self._status.state is not HealthState.HEALTHY:
            self._say(HealthStatus.healthy())

    def _call_back(self, on_durable: Callable[[], None]) -> None:
        try:
            on_durable()
        except RetryableError as error:  # its connection broke: the outside system will send again
            logger.warning("%s: could not acknowledge: %s", self.name, error)
        failpoints.hit("journal.told")

    def _usable(self, item: Item) -> Item:
        """The item without envelopes that cannot be journaled; with `on_error = "stop"` the journal refuses them."""
        if self._processing.on_error == "stop" or isinstance(item, SourceBatch):
            return item
        usable = []
        for one in item:
            try:
                if isinstance(one, SourceEnvelope):
                    size_of(one)
                usable.append(one)
            except DataError as error:
                self._skip(error)
        return usable  # type: ignore[return-value]

    def _parted(self, item: Item) -> tuple[Item, Item]:
        if self._is_reliable is None:
            return item, ()
        items: Sequence[Any] = [item] if isinstance(item, SourceBatch) else item
        parts: tuple[list[Any], list[Any]] = ([], [])
        for one in items:
            stream = one.stream if isinstance(one, SourceBatch) else one.record.stream
            if stream not in self._reliable_streams:
                self._reliable_streams[stream] = self._is_reliable(stream)
            parts[not self._reliable_streams[stream]].append(one)
        return parts

    # capture

    def _capture(self, source: ChangeCapture[Any]) -> None:
        buffer = _Changes(self, source)
        while not self._stop.is_set():
            began, before = time.monotonic(), self.rows
            error: RetryableError | None = None
            why = "live() ended, though it was not told to stop"
            try:
                self._snapshot(source, buffer)
                buffer.resume()
                quiet = 0  # one None may stand between two changes
                for change in source.live():
                    if self._stop.is_set():
                        break
                    buffer.add(change)
                    quiet = 0 if change is not None else quiet + 1
                    if quiet == 0:
                        self.idle.clear()
                    elif quiet == 2:
                        self._settle()
                        self.idle.set()
                        self._say(HealthStatus.healthy())
                buffer.flush()
            except RetryableError as broken:
                error, why = broken, str(broken)
            if self._stop.is_set():
                return
            self.idle.clear()
            buffer.flush()
            self.journal.flush()  # confirmed before `live` looks for its resume point again
            if self.rows > before or time.monotonic() - began > self._processing.max_backoff_ms / 1000:
                self._backoff.reset()
            self._back_off(why, error)

    def _snapshot(self, source: ChangeCapture[Any], buffer: _Changes) -> None:
        """Copy the tables that no sink has, unless their copy is in the journal and only waits for its epoch."""
        waiting = {s for s, end in self.seeded.items() if self._is_new or end.row > self._committed.row}
        waiting = {s for s in waiting if set(self._lacking(s)) <= set(self.seeded_for(s))} | self._copied
        tables = [table for table in self._unseeded() if table.stream not in waiting]
        if tables:
            buffer.start_snapshot({table.stream: list(self._lacking(table.stream)) for table in tables})
            for change in source.snapshot(tables):
                if self._stop.is_set():
                    raise _Stopping
                buffer.add(change, Op.SEEDED)
            buffer.finish_snapshot(tables)
            self._copied |= {table.stream for table in tables}

    # retrying

    def _retry(self, call: Callable[[], T]) -> T:
        """The answer of `call`, asked for again while its failure is one that passes."""
        while True:
            try:
                answer = call()
            except RetryableError as error:
                self._back_off(str(error), error)
                continue
            self._backoff.reset()
            self._say(HealthStatus.healthy())
            return answer

    def _back_off(self, why: str, error: RetryableError | None) -> None:
        """Wait before the next try; only failures count, a source that just returns may go on doing so."""
        if self._stop.is_set():
            raise _Stopping
        # A system that is not ready yet is waited for, however long that takes.
        pause = self._backoff.next(None if error is not None and error.code == NOT_READY else error)
        self.retries += 1
        self._on_retry(self.name, error or why, pause)
        self._say(HealthStatus.degraded(why))
        if self._stop.wait(pause):
            raise _Stopping
        self._say(HealthStatus(HealthState.UNKNOWN, f"trying again after: {why}"))

    def _skip(self, error: DataError) -> None:
        if self._processing.on_error == "stop":
            raise error
        self.skipped += error.count
        self._bad += [Bad(self.name, "", "", error.code, "source", why) for why in error.samples or [error.message]]

    def take_bad(self) -> list[Bad]:
        """The first few of the bad records that were left out since this was last asked."""
        taken = []
        while self._bad and len(taken) < SAMPLES:
            taken.append(self._bad.popleft())
        self._bad.clear()
        return taken


class _Stopping(Exception):
    """Leaves a wait when the source is told to stop."""


class _Sender:
    """What a streaming source is given."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest

    @property
    def stopped(self) -> bool:
        return self._ingest._stop.is_set()

    @property
    def full(self) -> bool:
        """True while a send would block; for a source that must answer its caller instead."""
        return self._ingest.journal.full

    def wait(self, seconds: float) -> bool:
        return self._ingest._stop.wait(seconds)

    def send(self, item: SourceEnvelope | SourceBatch, on_durable: Callable[[], None] | None = None) -> None:
        self._ingest._accept(item if isinstance(item, SourceBatch) else (item,), on_durable)

    def send_batch(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> None:
        self._ingest._accept(envelopes, on_durable)


class _Changes:
    """
    Gathers changes into batches per table.

    `_position` is the change's number, which goes on over restarts: it sorts as text in the order they were captured.
    """

    def __init__(self, ingest: Ingest, source: ChangeCapture[Any]) -> None:
        known = (ingest.journal.checkpoint or {}).get("metadata", {})
        self._ingest = ingest
        self._source = source
        self._number: int = known.get("number", 0)
        self._seeded: dict[str, int] = known.get("seeded", {})
        self._seeded_for: dict[str, list[str]] = known.get("seeded_for", {})
        self._copies: dict[str, Json] = known.get("copies", {})  # the position of a complete copy's last row
        self._copying: dict[str, Json] = {}
        self._copying_for: dict[str, list[str]] = {}
        self._known: set[str] = set()  # streams that had rows in the journal before the snapshot
        self._position: Json = known.get("position")
        self._at_position: int = known.get("at_position", 0)  # a transaction's changes may share its position
        self._repeats: tuple[Json, int] | None = None
        self._waiting: list[tuple[Op, Change, int]] = []
        self._first_at = 0.0

    def resume(self) -> None:
        """`live` begins again: up to the last position that was taken, its changes are repeats."""
        self._repeats = (self._position, self._at_position)

    def add(self, change: Change | None, op: Op | None = None) -> None:
        """Take a change; a repeat is confirmed again and left out."""
        limits = self._ingest._processing
        if change is not None:
            if op is None and self._is_repeat(change.position):
                self._ingest.journal.append((), None, change.ack.confirm)
                return
            if op is Op.SEEDED:
                self._clear(change.event.table)
                self._copying[change.event.table.stream] = change.position
            if not self._waiting:
                self._first_at = time.monotonic()
            live = Op.UPDATE if isinstance(change.event, Upsert) else Op.DELETE
            self._waiting.append((op or live, change, self._number))
            self._number += 1
            if op is None:
                self._at_position = self._at_position + 1 if change.position == self._position else 1
                self._position = change.position
        lingered = time.monotonic() - self._first_at >= limits.linger_ms / 1000
        if change is None or lingered or len(self._waiting) >= limits.max_batch_records:
            self.flush()

    def _is_repeat(self, position: Json) -> bool:
        if self._repeats is None:
            return False
        last, count = self._repeats
        if _precedes(position, last):
            return True
        if _has_order(position) and position == last and count > 0:
            self._repeats = (last, count - 1)
            return True
        self._repeats = None
        return False

    def start_snapshot(self, targets: Mapping[str, list[str]]) -> None:
        """Of streams that the journal knows, a copy is not the first: it was cut short, or is made for another sink."""
        self.flush()
        self._ingest.journal.flush()
        self._known = set(self._ingest.journal.schemas())
        self._copying, self._copying_for = {}, dict(targets)

    def _clear(self, table: SnapshotTable) -> None:
        """Before the first row of another copy: what was copied before may hold rows that are gone from this one."""
        if table.stream in self._known:
            self._known.remove(table.stream)
            self.add(Change(Delete(table, {})), Op.TRUNCATE)

    def finish_snapshot(self, tables: Sequence[SnapshotTable]) -> None:
        """Note with the last rows where the snapshot ended: a restart need not make it again."""
        self.flush()
        self._ingest.journal.flush()
        end = self._ingest.journal.tail
        self._seeded = {**self._seeded, **{table.stream: end for table in tables}}
        self._seeded_for = {**self._seeded_for, **self._copying_for}
        kept = {stream: at for stream, at in self._copies.items() if stream not in {table.stream for table in tables}}
        self._copies = {**kept, **self._copying}
        self._ingest.journal.append((), self._checkpoint())
        self._ingest.journal.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        tables: dict[str, list[tuple[Op, Change, int]]] = {}
        for one in self._waiting:
            tables.setdefault(one[1].event.table.stream, []).append(one)
        schemas = self._source.schema()
        batches = [
            SourceBatch(_batch(stream, schemas.get(stream), changes), stream=stream)
            for stream, changes in tables.items()
        ]
        acks = [change.ack for _, change, _ in self._waiting]
        self._waiting = []
        self._ingest.journal.append(batches, self._checkpoint(), lambda: _confirm(acks))

    def _checkpoint(self) -> Json:
        metadata = {
            "number": self._number,
            "position": self._position,
            "at_position": self._at_position,
            "seeded": self._seeded,
            "seeded_for": self._seeded_for,
            "copies": self._copies,
        }
        return SourceCheckpoint(metadata=metadata).model_dump()


def _batch(stream: str, schema: pa.Schema | None, changes: list[tuple[Op, Change, int]]) -> pa.RecordBatch:
    """The changes of one table as rows, with the columns that describe a change."""
    rows = [c.event.row if isinstance(c.event, Upsert) else c.event.key for _, c, _ in changes]
    names = {name for row in rows for name in row}
    if schema is None or names - set(schema.names):
        raise DataError(
            f"{stream} has columns {sorted(names)}, its schema has {sorted(schema.names) if schema else 'none'}",
            code="PEN-3001",
            hint="schema() of a capture must name every column of every table that it captures",
        )
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        try:
            columns.append(pa.array(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise DataError(f"{stream}.{field.name} does not fit {field.type}: {error}", code="PEN-3001") from error
    fields = [field.with_nullable(True) for field in schema]  # a delete carries its key only
    columns += [
        pa.array([op.value for op, _, _ in changes], pa.string()),
        pa.array([f"{number:020d}" for _, _, number in changes], pa.string()),
        pa.nulls(len(changes), pa.int64()),
        pa.nulls(len(changes), pa.timestamp("us", tz="UTC")),
        pa.array([_missing(c, schema.names) for _, c, _ in changes], pa.list_(pa.string())),
        pa.array([_old_key(c) for _, c, _ in changes], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, *CHANGE_FIELDS], metadata=schema.metadata))


def _rows(item: Item) -> int:
    if isinstance(item, SourceBatch):
        return item.num_rows
    return sum(one.num_rows if isinstance(one, SourceBatch) else 1 for one in item)


def _confirm(acks: Sequence[Ack]) -> None:
    for ack in acks:
        ack.confirm()
    failpoints.hit("journal.told")


def _has_order(position: Json) -> bool:
    """
    True for numbers and lists of them.

    The order of text cannot be trusted (`0/9` and `0/10`): such changes are journaled again rather than lost.
    """
    return isinstance(position, int) or (isinstance(position, list) and all(isinstance(n, int) for n in position))


def _precedes(position: Json, last: Json) -> bool:
    return _has_order(position) and _has_order(last) and type(position) is type(last) and bool(position < last)


def _missing(change: Change, names: Sequence[str]) -> list[str] | None:
    if not isinstance(change.event, Upsert):
        return None
    row = change.event.row
    return [name for name in names if name not in row] or None


def _old_key(change: Change) -> str | None:
    old_key = change.event.old_key if isinstance(change.event, Upsert) else None
    return None if old_key is None else pack_key(old_key)
