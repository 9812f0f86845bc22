"""What a change-capture mechanism implements, and how its resume point moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.durable import Json
from penstock.source import C, SourceConnector


@dataclass(frozen=True)
class SnapshotTable:
    """A table to copy."""

    schema: str
    table: str

    @property
    def stream(self) -> str:
        return f"{self.schema}.{self.table}" if self.schema else self.table


@dataclass(frozen=True)
class Upsert:
    """A row as it is now."""

    table: SnapshotTable
    row: Mapping[str, Any]
    old_key: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Delete:
    """The key of a row that is gone."""

    table: SnapshotTable
    key: Mapping[str, Any]


ChangeEvent = Upsert | Delete


class Ack:
    """Confirms one change; dropped without `confirm`, the change comes again after a restart."""

    __slots__ = ("_confirm",)

    def __init__(self, confirm: Callable[[], None] | None = None) -> None:
        self._confirm = confirm

    def confirm(self) -> None:
        """The change is durable; may be called once, from any thread, in any order."""
        confirm, self._confirm = self._confirm, None
        if confirm is not None:
            confirm()


@dataclass(frozen=True)
class Change:
    """An event, the way to confirm it, and its place among the changes."""

    event: ChangeEvent
    ack: Ack = field(default_factory=Ack)
    position: Json = None


class AckSink:
    """Collects confirmations in any order; the resume point moves only over a contiguous run of them."""

    def __init__(self, moved: Callable[[Json], None]) -> None:
        self._moved = moved
        self._lock = threading.Lock()
        self._positions: dict[int, Json] = {}
        self._confirmed: set[int] = set()
        self._issued = 0
        self._next = 0

    def ack(self, position: Json) -> Ack:
        """An ack for the next change, in the order of the changes."""
        with self._lock:
            number = self._issued
            self._issued += 1
            self._positions[number] = position
        return Ack(lambda: self._confirm(number))

    def _confirm(self, number: int) -> None:
        # `moved` runs under the lock: two threads must not report their resume points in the wrong order.
        with self._lock:
            self._confirmed.add(number)
            reached: Json = None
            before = self._next
            while self._next in self._confirmed:
                self._confirmed.remove(self._next)
                reached = self._positions.pop(self._next)
                self._next += 1
            if self._next > before:
                self._moved(reached)


MAX_SLEEP_SECS = 0.1
"""Longest time that a waiting capture goes without noticing a stop."""


def pause(seconds: float) -> Iterator[None]:
    """What `live` yields while it waits for its next look, often enough to be stopped."""
    until = time.monotonic() + seconds
    left = seconds
    while left > 0:
        yield None
        time.sleep(min(left, MAX_SLEEP_SECS))
        left = until - time.monotonic()


class ChangeCapture(SourceConnector[C]):
    """
    A capture mechanism: `live` from its own durable position, `snapshot` when the engine asks for one.

    Whether a snapshot is needed is not the mechanism's call: the engine asks the sink (`is_seeded`). `schema` is asked for
    each batch of changes: keep it in memory, and yield None before a change whose row has another shape than the last.
    """

    def restore(self, position: Json, copies: Mapping[str, Json]) -> None:
        """
        What the journal holds; after `open`, before anything is read. A kill may have lost the confirmation of it.

        `position` is that of the last live change, `copies` those of the last row of each snapshot that is complete, by
        stream. Changes that come again are left out if their positions are numbers or lists of numbers; a mechanism
        with others goes on after `position` by itself.
        """

    def tables(self) -> Sequence[SnapshotTable]:
        """The tables that are captured; after `open`."""
        raise NotImplementedError

    def live(self) -> Iterator[Change | None]:
        """Changes from the mechanism's own resume point; None now and then when there is none, so that it can be stopped."""
        raise NotImplementedError

    def caught_up(self, since: float) -> bool:
        """
        False while `live` holds back a change that was there at `since` (`time.monotonic()`): `--drain` waits for it.

        Asked from another thread. Needed only by a mechanism that says None while it knows of changes.
        """
        return True

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        """The rows of `tables` as upserts; their acks move nothing, and there is no end marker."""
        return iter(())
