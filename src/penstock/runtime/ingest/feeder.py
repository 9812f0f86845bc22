"""Runs one source that pushes, is polled or captures: a supervised thread, into a journal that Spark reads as ranges."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.capture import ChangeCapture, SnapshotTable
from penstock.durable import Json
from penstock.errors import ConnectorError, FatalError, RetryableError
from penstock.runtime.ingest.capturing import Capturing
from penstock.runtime.ingest.line import Counts, Feeder, Line, Reports, Stopping, once
from penstock.runtime.ingest.polling import Polling
from penstock.runtime.ingest.pushing import Pushing
from penstock.runtime.journal import Journal, JournalConfig, JournalPosition, JournalSource
from penstock.source import (
    ConnectorMetrics,
    HealthState,
    HealthStatus,
    PollingSource,
    SourceConnector,
    SourceContext,
    StreamingSource,
)

if TYPE_CHECKING:
    from penstock.pipeline import Processing

logger = logging.getLogger("penstock.ingest")


class Ingest:
    """
    Moves one source's rows into its journal: `open`, `start`, then `range_source` has them; `stop`, last ack, `close`.

    The outside system hears of a row only after the fsync. `failure` is what must stop the pipeline; whenever it or the
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
        record: Callable[[], None] = lambda: None,
    ) -> None:
        """
        `reliable` says per stream if its rows need the journal; `unseeded` which tables some target has no copy of, and
        `lacking` which targets of a stream those are. `record` makes rows durable where more than their disk is asked for.
        """
        self.name = name
        self.source = source
        self.ready = ready or threading.Event()
        self._directory = journal_dir
        self._processing = processing
        self._record = record
        self._reports = Reports(on_state, on_retry)
        self._is_reliable = reliable
        self._make = _feeder_of(source, unseeded, lacking)
        self._stop = threading.Event()
        self._line: Line | None = None
        self.feeder: Feeder[Any] | None = None
        self._range_source: JournalSource | None = None
        self._thread = threading.Thread(target=self._run, name=f"ingest-{name}", daemon=True)
        self._failure: ConnectorError | None = None

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
        if self._line is None:
            self._recover(committed, planned)
        assert self._range_source is not None
        self._range_source.open(context)  # an epoch in hand is split as it was planned
        once(self.name, lambda: self.source.open(context))
        self.feeder = self._make(self.line)

    def _recover(self, committed: JournalPosition | None, planned: JournalPosition | None) -> None:
        processing, direct_dir = self._processing, None

        def durable() -> None:  # on the disk, and nobody outside knows of it yet
            self._record()
            self.ready.set()

        journal = Journal(self._directory, processing.journal_max_bytes, processing.linger_ms, on_commit=durable)
        self._line = Line(self.name, journal, None, self._is_reliable, processing, self._reports, self._stop)
        self._line.is_new = committed is None and not journal.first
        self._line.committed = committed = committed or self._line.committed
        planned = planned or committed
        journal.require(committed.row)
        journal.require(planned.row)
        journal.retain(committed.row)
        if self._is_reliable is not None:
            direct_dir = self._directory.with_name(f"{self._directory.name}-direct")
            self._line.direct = Journal(
                direct_dir,
                processing.journal_max_bytes,
                durable=False,
                first_row=planned.direct,
                on_commit=self.ready.set,
            )
        config = JournalConfig(directory=self._directory, direct=direct_dir, max_epoch_bytes=processing.max_epoch_bytes)
        self._range_source = JournalSource(config).bind(
            journal, self._line.direct, self.source, self.ready, self._on_ack
        )

    def start(self) -> None:
        """Hand the source its last durable checkpoint and begin to read; opens first if that was not done."""
        if self.feeder is None:
            self.open()
        assert self.feeder is not None
        self.feeder.restore()
        self._thread.start()

    def stop(self, timeout_secs: float = 30) -> bool:
        """
        Start no poll and refuse sends; returns once what was accepted is durable and acknowledged.

        False if the source did not return in time.
        """
        self._stop.set()
        for journal in self._journals():
            journal.refuse()
        if self.feeder is not None:
            self.feeder.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Close source and journal; after the last ack. May be called twice."""
        self.stop()
        self.source.close()
        for journal in self._journals():
            journal.close()

    @property
    def line(self) -> Line:
        assert self._line is not None, "open the ingest first"
        return self._line

    @property
    def journal(self) -> Journal:
        return self.line.journal

    @property
    def range_source(self) -> JournalSource:
        """The rows as ranges; on the driver. Its pickled copies read in tasks."""
        assert self._range_source is not None, "open the ingest first"
        return self._range_source

    @property
    def counts(self) -> Counts:
        """Retries, and bad records that were left out."""
        return self._line.counts if self._line else Counts()

    @property
    def failure(self) -> ConnectorError | None:
        """What must stop the pipeline, or None."""
        failures = [self._failure, *(journal.failure for journal in self._journals())]
        return next((failure for failure in failures if failure is not None), None)

    def copied(self, committed: Json) -> Mapping[str, Sequence[str]]:
        """The tables whose copy ends before a committed position, and the targets that it was made for."""
        feeder = self.feeder
        assert feeder is not None, "open the ingest first"
        return {stream: feeder.seeded_for(stream) for stream, end in feeder.seeded().items() if committed["row"] >= end}

    def caught_up(self, since: float) -> bool:
        """True once the source has handed over what it had at `since` (`time.monotonic()`)."""
        return self.feeder is not None and self.feeder.caught_up(since)

    def health(self) -> HealthStatus:
        """What is known here, and else the source's own word."""
        if self.failure is not None:
            return HealthStatus.unhealthy(str(self.failure))
        if self._line is None:
            return self.source.health_check()
        if full := self._line.fullness():
            return full
        if self._line.status.state is HealthState.DEGRADED:
            return self._line.status
        own = self.source.health_check()
        return self._line.status if own.state is HealthState.UNKNOWN else own

    def metrics(self) -> ConnectorMetrics:
        """The source's own counters, and the journal's among the custom ones."""
        own = self.source.metrics()
        return ConnectorMetrics(
            own.records_total or self.line.rows,
            own.bytes_total,
            own.errors_total or self.counts.skipped,
            own.lag,
            {**own.custom, **self.journal.counts(), "retries": self.counts.retries},
        )

    def _journals(self) -> list[Journal]:
        line = self._line
        return [] if line is None else [line.journal, *([line.direct] if line.direct else [])]

    def _on_ack(self, end: JournalPosition) -> None:
        if self.feeder is not None:
            self.feeder.on_ack(end)

    def _run(self) -> None:
        assert self.feeder is not None
        try:
            with contextlib.suppress(Stopping):
                self._feed(self.feeder)
            self.feeder.settle()
        except ConnectorError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a bug in a connector stops the pipeline instead of one silent thread
            failure = FatalError(f"{self.name}: {error!r}", code="PEN-5012", hint="this is a bug in the connector")
            failure.__cause__ = error
            self._fail(failure)

    def _feed(self, feeder: Feeder[Any]) -> None:
        try:
            feeder.feed()
        except RetryableError:  # the journal refuses rows, or a connection broke while it was being closed
            if not self._stop.is_set():
                raise

    def _fail(self, error: ConnectorError) -> None:
        logger.error("%s stopped: %s", self.name, error)
        self._failure = error
        self.line.say(HealthStatus.unhealthy(str(error)))
        self.ready.set()


def _feeder_of(
    source: SourceConnector[Any],
    unseeded: Callable[[], Sequence[SnapshotTable]],
    lacking: Callable[[str], Sequence[str]],
) -> Callable[[Line], Feeder[Any]]:
    """What moves the rows of a source of this kind."""
    if isinstance(source, PollingSource):
        return lambda line: Polling(line, source)
    if isinstance(source, StreamingSource):
        return lambda line: Pushing(line, source)
    if isinstance(source, ChangeCapture):
        return lambda line: Capturing(line, source, unseeded, lacking)
    raise TypeError(f"{type(source).__name__} needs no journal: it is not a polling, streaming or capturing source")
