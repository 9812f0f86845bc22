"""One wait for many events."""

from __future__ import annotations

import threading
import time

PIECE_SECS = 1.0


class Waker:
    """One wait for many events: a source's signal, a request for an epoch, the stop."""

    def __init__(self, stop: threading.Event) -> None:
        self._wake = threading.Event()
        self._closed = False
        self._cuts = 0
        self.watch(stop, clear=False)

    def watch(self, event: threading.Event, *, clear: bool) -> None:
        """Wake when the event is set. With `clear` it is cleared at once; else it counts again after the next cut."""
        threading.Thread(target=self._relay, args=(event, clear), name="penstock-waker", daemon=True).start()

    def wait(self, seconds: float | None) -> None:
        """
        Until something happens, or for this long.

        In pieces: a signal that arrives just before a thread blocks does not interrupt it, and its handler, which sets the
        stop, runs only once the thread goes on.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while not self._wake.wait(PIECE_SECS if until is None else min(PIECE_SECS, max(0.0, until - time.monotonic()))):
            if until is not None and time.monotonic() >= until:
                break
        self._wake.clear()

    def cut(self) -> None:
        """An epoch was cut."""
        self._cuts += 1

    def close(self) -> None:
        self._closed = True

    def _relay(self, event: threading.Event, clear: bool) -> None:
        relayed = -1
        while not self._closed:  # looked at once a second, so that no thread outlives its run
            if not event.wait(1.0):
                continue
            if clear:
                event.clear()
            elif relayed == self._cuts:
                time.sleep(0.05)
                continue
            relayed = self._cuts
            self._wake.set()
