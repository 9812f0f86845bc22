"""What a start waits for, so that a slow one says why."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping

from penstock.durable import Json
from penstock.errors import printable

log = logging.getLogger("penstock")


class Waits:
    """What is waited for just now, by any thread, and since when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}

    @contextlib.contextmanager
    def until(self, what: str) -> Iterator[None]:
        """`what` is waited for until the block ends: `Spark to start`, `sink lake to open`."""
        log.info("waiting for %s", printable(what))
        with self._lock:
            self._since[what] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._since.pop(what, None)

    def shown(self) -> list[dict[str, Json]]:
        """For the status: the oldest first."""
        with self._lock:
            now = self._clock()
            return [{"for": what, "secs": round(now - since, 3)} for what, since in self._since.items()]


def in_words(status: Mapping[str, Json]) -> str:
    """What a status waits for, in a few words; empty if nothing."""
    return ", ".join(each["for"] for each in status.get("waits", ()))
