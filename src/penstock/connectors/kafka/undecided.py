"""Transactions that stay open, and so hold back every reader that waits for their end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.connectors.kafka.client import Cluster, Place

UNDECIDED_SECS = 60.0
"""One that holds readers back for longer is worth a warning."""


class Undecided:
    """Where the last stable offset does not move below the end of a partition, and since when."""

    def __init__(self) -> None:
        self._since: dict[Place, tuple[int, float]] = {}

    def oldest(self, cluster: Cluster, places: Sequence[Place]) -> Place | None:
        """A partition in which a transaction has been open for too long, as far as earlier looks tell."""
        _, stable = cluster.edges(places)
        _, high = cluster.edges(places, committed=False)
        now, before = time.monotonic(), self._since
        self._since = {
            place: before[place] if before.get(place, (-1, 0))[0] == stable[place] else (stable[place], now)
            for place in stable.keys() & high.keys()
            if stable[place] < high[place]
        }
        return min((place for place, (_, when) in self._since.items() if now - when > UNDECIDED_SECS), default=None)
