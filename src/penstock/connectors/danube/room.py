"""How long received messages wait for the journal: a broker counts each one that is not acknowledged in time against it."""

from __future__ import annotations

import time

from penstock.source import Sender

HELD_SECS = 15.0
"""The longest wait before the source leaves its broker: half of the time that a broker gives an acknowledgement."""

HELD = "the source left until the journal has room and is written: what waits too long, the broker gives up"


class Room:
    """What was handed over and is not durable yet, and whether that has lasted too long."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._waiting: dict[int, float] = {}  # since when, the oldest first
        self._full_since: float | None = None
        self.held = False
        """True from when it has lasted too long until all is durable, and the journal takes more."""

    def enter(self, unit: object) -> None:
        """A unit of messages goes to the journal."""
        self._waiting[id(unit)] = time.monotonic()

    def leave(self, unit: object) -> None:
        """It is durable."""
        self._waiting.pop(id(unit), None)

    @property
    def is_settled(self) -> bool:
        return not self._waiting

    def look(self) -> None:
        """Find out again whether messages wait for too long."""
        now, full = time.monotonic(), self._sender.full
        self._full_since = (self._full_since or now) if full else None
        oldest = min(self._full_since or now, next(iter(self._waiting.values()), now))
        self.held = (self.held or now - oldest > HELD_SECS) and (full or not self.is_settled)
