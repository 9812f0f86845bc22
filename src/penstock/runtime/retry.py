"""Pauses between two tries."""

from __future__ import annotations

import random
from typing import Protocol

from penstock.errors import ConnectorError, FatalError


class Limits(Protocol):
    """The options of `[processing]` that bound retries."""

    @property
    def retry_backoff_ms(self) -> int: ...
    @property
    def max_backoff_ms(self) -> int: ...
    @property
    def max_retries(self) -> int: ...


class Backoff:
    """Pauses that double, with jitter, up to a cap; too many failures in a row are a `FatalError`."""

    def __init__(self, processing: Limits, who: str = "") -> None:
        self._processing = processing
        self._who = f"{who}: " if who else ""
        self._count = 0

    def next(self, error: ConnectorError | None) -> float:
        """The pause before the next try, in seconds; without an error nothing has failed, and it may go on for ever."""
        processing = self._processing
        if error is not None and self._count >= processing.max_retries:
            raise FatalError(
                f"{self._who}gave up after {processing.max_retries} retries in a row: {error.message}",
                code="PEN-5013",
                hint=f"{error.hint or 'remove the cause'}; then start again, or raise `max_retries`: nothing is lost",
            ) from error
        pause = min(processing.max_backoff_ms, processing.retry_backoff_ms * 2.0 ** min(self._count, 60)) / 1000
        self._count += 1
        return pause * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """A healthy run: the next failure is the first again."""
        self._count = 0
