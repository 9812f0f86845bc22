"""Rows per second, as people are shown them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from penstock.durable import Json

HISTORY_SECS = 60
RATE_SECS = 10.0


class Meter:
    """What came in the last seconds, as a rate."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float, float, float]] = deque()

    def add(self, begin: float, end: float, rows: float, size: float = 0.0) -> None:
        """So much came evenly over this time."""
        self._spans.append((min(begin, end - 1e-3), end, rows, size))
        while self._spans and self._spans[0][1] < end - RATE_SECS:
            self._spans.popleft()

    def rates(self, now: float) -> tuple[float, float]:
        """Rows and bytes per second."""
        if not self._spans:
            return 0.0, 0.0
        window = min(RATE_SECS, max(now - self._spans[0][0], 0.5))
        rows = size = 0.0
        for begin, end, more_rows, more_bytes in self._spans:
            share = max(0.0, end - max(begin, now - window)) / (end - begin)
            rows += more_rows * share
            size += more_bytes * share
        return round(rows / window, 1), round(size / window, 1)


class Meters(dict[Hashable, Meter]):
    """A meter for each thing that is counted."""

    def __missing__(self, key: Hashable) -> Meter:
        return self.setdefault(key, Meter())


class Rates:
    """Rows per second of the whole pipeline, now and over the last minute."""

    def __init__(self, started: float) -> None:
        self._spans: deque[tuple[float, float, int, int]] = deque()
        self._started = started
        self._worked: tuple[float, float] | None = None

    @property
    def working_secs(self) -> float:
        """From the first row to the last."""
        return round(self._worked[1] - self._worked[0], 3) if self._worked else 0.0

    def add(self, now: float, secs: float, rows_in: int, rows_out: int) -> float:
        """An epoch's rows count over the time they took, so that few long epochs show an even rate; gives when it began."""
        begin = max(self._spans[-1][1] if self._spans else self._started, now - max(secs, 1e-3))
        self._worked = (self._worked[0] if self._worked else begin, now)
        self._spans.append((min(begin, now - 1e-3), now, rows_in, rows_out))
        while self._spans[0][1] < now - HISTORY_SECS:
            self._spans.popleft()
        return begin

    def shown(self, now: float) -> dict[str, Json]:
        """As the status has it."""
        window = min(RATE_SECS, max(now - self._spans[0][0], 0.5)) if self._spans else 1.0
        rows_in = rows_out = 0.0
        for begin, end, read, written in self._spans:
            share = max(0.0, end - max(begin, now - window)) / (end - begin)
            rows_in += read * share
            rows_out += written * share
        return {
            "in_per_sec": round(rows_in / window, 1),
            "out_per_sec": round(rows_out / window, 1),
            "history": self._history(now),
        }

    def _history(self, now: float) -> list[int]:
        seconds = [0.0] * HISTORY_SECS  # rows out in each of the last seconds, the newest last
        for begin, end, _, written in self._spans:
            first = max(0, int(HISTORY_SECS - (now - begin)))
            for second in range(first, HISTORY_SECS):
                left = now - HISTORY_SECS + second
                share = max(0.0, min(end, left + 1) - max(begin, left)) / (end - begin)
                if share == 0 and left > end:
                    break
                seconds[second] += written * share
        return [round(rows) for rows in seconds]
