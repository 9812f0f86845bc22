"""Sources that push."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import DataError, RetryableError
from penstock.runtime.ingest.line import Feeder, Line
from penstock.runtime.journal import Full, Item
from penstock.source import HealthState, HealthStatus, SourceBatch, SourceEnvelope, StreamingSource


class Pushing(Feeder[StreamingSource[Any]]):
    """Lets the source push, and calls it again when its connection breaks."""

    def feed(self) -> None:
        line, sender = self.line, Sender(self.line)
        while not line.stop.is_set():
            began, rows = time.monotonic(), line.rows
            error: RetryableError | None = None
            why = "start_streaming returned, though nobody asked it to stop"
            try:
                self.source.start_streaming(sender)
            except RetryableError as broken:
                error, why = broken, str(broken)
            except DataError as bad:
                line.skip(bad)
                why = str(bad)
            if line.stop.is_set():
                return
            self.settle()
            line.rested(began, rows)
            line.back_off(why, error)

    def caught_up(self, since: float) -> bool:
        """What has not been pushed is not there."""
        return True


class Sender:
    """What a streaming source is given."""

    def __init__(self, line: Line) -> None:
        self._line = line

    @property
    def stopped(self) -> bool:
        return self._line.stop.is_set()

    @property
    def full(self) -> bool:
        """True while a send would block; for a source that must answer its caller instead."""
        return self._line.journal.full

    def wait(self, seconds: float) -> bool:
        return self._line.stop.wait(seconds)

    def send(self, item: SourceEnvelope | SourceBatch, on_durable: Callable[[], None] | None = None) -> None:
        self._accept(item if isinstance(item, SourceBatch) else (item,), on_durable)

    def send_batch(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> None:
        self._accept(envelopes, on_durable)

    def offer(
        self, items: SourceBatch | Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None
    ) -> bool:
        try:
            self._accept(items, on_durable, wait=False)
        except Full:
            return False
        return True

    def _accept(self, item: Item, on_durable: Callable[[], None] | None, wait: bool = True) -> None:
        line = self._line
        reliable, direct = line.parted(line.usable(item))
        call_back = None if on_durable is None else lambda: line.acknowledge(on_durable)
        if direct and line.direct is not None:
            # Where it may not wait, both must have room before either takes a row: half of it would come again.
            if not wait and reliable and line.journal.full:
                raise Full
            line.direct.append(direct, None, None if reliable else call_back, wait=wait)
        if reliable or not direct:
            line.journal.append(reliable, None, call_back, wait=wait or bool(direct))
        if line.status.state is not HealthState.HEALTHY:
            line.say(HealthStatus.healthy())
