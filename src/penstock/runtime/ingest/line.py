"""What the thread of every source works with: its journals, its retries, its word to the runtime."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock import failpoints
from penstock.errors import NOT_READY, DataError, FatalError, RetryableError
from penstock.runtime.job import SAMPLES, Bad
from penstock.runtime.journal import Item, Journal, JournalPosition, size_of
from penstock.runtime.retry import Backoff
from penstock.source import HealthState, HealthStatus, SourceBatch, SourceConnector, SourceEnvelope

if TYPE_CHECKING:
    from penstock.pipeline import Processing

T = TypeVar("T")
S = TypeVar("S", bound=SourceConnector[Any])

logger = logging.getLogger("penstock.ingest")


class Stopping(Exception):
    """Leaves a wait when the source has to stop."""


@dataclass(frozen=True)
class Reports:
    """Where a line's news goes; all may be called from any thread."""

    on_state: Callable[[str, HealthStatus], None] = lambda name, status: None
    on_retry: Callable[[str, BaseException | str, float], None] = lambda name, error, pause: None


@dataclass
class Counts:
    """What a line has counted."""

    retries: int = 0
    skipped: int = 0
    """Bad records left out by `on_error = "skip"`."""
    bad: deque[Bad] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """The first few of them since `take_bad` was last called."""

    def take_bad(self) -> list[Bad]:
        taken = []
        while self.bad:
            taken.append(self.bad.popleft())
        return taken


class Line:
    """The way from one source to its journal, and to the one of rows that bypass it."""

    def __init__(
        self,
        name: str,
        journal: Journal,
        direct: Journal | None,
        is_reliable: Callable[[str], bool] | None,
        processing: Processing,
        reports: Reports,
        stop: threading.Event,
    ) -> None:
        self.name = name
        self.journal = journal
        self.direct = direct
        self.processing = processing
        self.stop = stop
        self.idle = threading.Event()
        """Set while a source that is asked has said that it has nothing more."""
        self.committed = JournalPosition(row=journal.first)
        self.is_new = True
        """No epoch of its rows was ever committed, and none of them is gone."""
        self.status = HealthStatus()
        self.counts = Counts()
        self._is_reliable = is_reliable
        self._reliable_streams: dict[str, bool] = {}
        self._reports = reports
        self._backoff = Backoff(processing, name)
        self._full_since: tuple[float, JournalPosition] | None = None

    @property
    def rows(self) -> int:
        """Rows accepted so far, over all runs."""
        return self.journal.appended + (self.direct.appended if self.direct else 0)

    def say(self, status: HealthStatus) -> None:
        """Report how the source is, if that has changed."""
        if status != self.status:
            self.status = status
            self._reports.on_state(self.name, status)

    def flush(self) -> None:
        """Wait until all that was accepted is durable."""
        if self.direct is not None:
            self.direct.flush()
        self.journal.flush()

    def fullness(self) -> HealthStatus | None:
        """A full journal holds the source back, as it should; one out of which nothing is committed is stuck."""
        if not self.journal.full:
            self._full_since = None
            return None
        now, at = time.monotonic(), self.committed
        if self._full_since is None or self._full_since[1] != at:
            self._full_since = (now, at)
        secs = now - self._full_since[0]
        what = f"the journal is full: {self.journal.held_bytes:,} bytes wait to be committed"
        if self.journal.no_room:
            what = f"the source waits for room on the disk: {self.journal.no_room}"
        if secs > self.processing.health_timeout_secs / 2:
            return HealthStatus.unhealthy(f"{what}, and nothing was for {secs:.0f} s")
        return HealthStatus.degraded(what)

    # -- retrying ------------------------------------------------------------------------------------------------

    def retry(self, call: Callable[[], T]) -> T:
        """The answer of `call`, asked for again while its failure is one that passes."""
        while True:
            try:
                answer = call()
            except RetryableError as error:
                self.back_off(str(error), error)
                continue
            self._backoff.reset()
            self.say(HealthStatus.healthy())
            return answer

    def back_off(self, why: str, error: RetryableError | None) -> None:
        """Wait before the next try; only failures count, a source that just returns may go on doing so."""
        if self.stop.is_set():
            raise Stopping
        # A system that is not ready yet is waited for, however long that takes.
        pause = self._backoff.next(None if error is not None and error.code == NOT_READY else error)
        self.counts.retries += 1
        self._reports.on_retry(self.name, error or why, pause)
        self.say(HealthStatus.degraded(why))
        if self.stop.wait(pause):
            raise Stopping
        self.say(HealthStatus(HealthState.UNKNOWN, f"trying again after: {why}"))

    def rested(self, began: float, rows: int) -> None:
        """A long call has ended that began then, at so many rows: one that brought some, or lasted, was a healthy run."""
        if self.rows > rows or time.monotonic() - began > self.processing.max_backoff_ms / 1000:
            self._backoff.reset()

    # -- rows ----------------------------------------------------------------------------------------------------

    def skip(self, error: DataError) -> None:
        """Leave bad records out, or raise, by `on_error`."""
        if self.processing.on_error == "stop":
            raise error
        self.counts.skipped += error.count
        named = error.samples or [error.message]
        self.counts.bad += [Bad(self.name, "", "", error.code, "source", why) for why in named]

    def usable(self, item: Item) -> Item:
        """The item without envelopes that cannot be journaled; with `on_error = "stop"` the journal refuses them."""
        if self.processing.on_error == "stop" or isinstance(item, SourceBatch):
            return item
        usable = []
        for one in item:
            try:
                if isinstance(one, SourceEnvelope):
                    size_of(one)
                usable.append(one)
            except DataError as error:
                self.skip(error)
        return usable  # type: ignore[return-value]

    def parted(self, item: Item) -> tuple[Item, Item]:
        """What goes through the journal, and what bypasses it."""
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

    def acknowledge(self, on_durable: Callable[[], None]) -> None:
        """Call back to the outside system: rows are durable."""
        try:
            on_durable()
        except RetryableError as error:  # its connection broke: the outside system will send again
            logger.warning("%s: could not acknowledge: %s", self.name, error)
        failpoints.hit("journal.told")


class Feeder(ABC, Generic[S]):
    """One way of getting rows out of a source; `feed` runs in the source's thread."""

    def __init__(self, line: Line, source: S) -> None:
        self.line = line
        self.source = source

    def restore(self) -> None:
        """Hand the source what the journal knows of it; before `feed`."""

    @abstractmethod
    def feed(self) -> None:
        """Move rows into the journal until the line stops."""

    def settle(self) -> None:
        """Wait until what was accepted is durable, and the outside system knows."""
        self.line.flush()

    def wake(self) -> None:
        """The line stops: end a wait of the source's own."""

    def on_ack(self, end: JournalPosition) -> None:
        """An epoch is committed up to here."""
        self.line.committed = end

    def caught_up(self, since: float) -> bool:
        """True once the source has handed over what it had at `since` (`time.monotonic()`)."""
        return self.line.idle.is_set()

    def seeded(self) -> Mapping[str, int]:
        """For each table that was copied, the row after its last one."""
        return {}

    def seeded_for(self, stream: str) -> Sequence[str]:
        """The targets that lacked a copy when the last one was begun; others, added since, did not get all of it."""
        return ()


def once(name: str, call: Callable[[], None]) -> None:
    """Call what is not tried again: a failure that might pass is fatal here, unless the system is only not ready yet."""
    try:
        call()
    except RetryableError as error:
        if error.code == NOT_READY:
            raise
        raise FatalError(f"{name}: {error.message}", code="PEN-5001", hint=error.hint) from error
