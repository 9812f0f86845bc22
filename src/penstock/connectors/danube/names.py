"""What a listener does, and what its consumers are called."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.schema.registry.danube_client import DanubeConfig

logger = logging.getLogger("penstock.danube")

EXCLUSIVE = 0
KEY_SHARED = 3
"""The type of subscription whose consumers do not keep their name: see `Names`."""
KNOWN_SECS = 2.0
"""For this long a broker surely knows a consumer of `key_shared` that is away."""


@dataclass(frozen=True)
class Settings:
    """What a listener does."""

    config: DanubeConfig
    topics: tuple[str, ...]
    subscription: str
    kind: int
    consumer: str
    filters: tuple[str, ...] = ()
    subject: str | None = None
    frames: bool = False
    notes: Path | None = None
    """A directory for what `Names` writes down."""


class Names:
    """
    What the consumer of a partition is called: always the same, so that a later one takes the place of an earlier one.

    But with `key_shared` a broker (0.15.1) forgets who is away for three seconds, counts what was on its way there as
    delivered, and delivers nothing to a later consumer of that name. So a name is used again only right after its stream broke.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[str, tuple[str, float]] = {}  # a name, and since when nobody has it
        self._file = settings.notes / "consumers.json" if settings.notes is not None else None
        self._ids: dict[str, int] = {}  # by partition and name
        with contextlib.suppress(OSError, ValueError):  # it only helps
            self._ids = json.loads(self._file.read_bytes()) if self._file is not None else {}

    def id(self, partition: str) -> int | None:
        """The consumer that the broker made last for this partition and name."""
        return self._ids.get(f"{partition} {self._settings.consumer}")

    def keep(self, partition: str, id: int) -> None:
        """Write down the consumer that the broker made."""
        key = f"{partition} {self._settings.consumer}"
        known = self._ids.get(key)
        if known == id or self._settings.kind == KEY_SHARED:
            return
        if known is not None:
            what = "the broker has forgotten the consumer: it was restarted, or the topic is another broker's now"
            logger.warning("%s: %s; what a restart may lose is on the page about Danube", partition, what)
        self._ids[key] = id
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                fresh = self._file.with_suffix(".new")
                fresh.write_text(json.dumps(self._ids))
                fresh.replace(self._file)

    def of(self, partition: str) -> str:
        own = self._settings
        if own.kind != KEY_SHARED:
            return own.consumer
        name, since = self._known.get(partition, ("", -math.inf))
        return name if time.monotonic() - since < KNOWN_SECS else self._new(partition)

    def left(self, partition: str) -> None:
        """Its stream broke."""
        if known := self._known.get(partition):
            self._known[partition] = known[0], time.monotonic()

    def _new(self, partition: str) -> str:
        name = f"{self._settings.consumer}-{secrets.token_hex(4)}"
        self._known[partition] = name, -math.inf
        return name
