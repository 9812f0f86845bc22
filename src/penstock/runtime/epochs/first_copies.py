"""First copies: which targets hold a whole one, and telling them when theirs is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Protocol

from penstock import tables
from penstock.durable import Json
from penstock.errors import ConnectorError, RetryableError
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.wiring import Pair, Wiring
from penstock.tables import TableSource


class Capture(Protocol):
    """A capture whose copies go through the journal."""

    def copied(self, committed: Json) -> Mapping[str, Collection[str]]:
        """The streams whose copy ends before a committed position, and the targets (by name) that it was made for."""


class FirstCopies:
    """Asks the sinks what they hold, on behalf of table sources and captures alike."""

    def __init__(self, state: State, wiring: Wiring) -> None:
        self._state = state
        self._wiring = wiring
        self._told: dict[str, frozenset[str]] = {}
        self.captures: Mapping[str, Capture] = {}

    def held(self, source: str, stream: str) -> list[bool]:
        """For each target of a stream, whether its first copy is complete there."""
        held = [bool(self._is_seeded(pair)) for pair in self._wiring.pairs(source, stream)]
        # Who starts over has asked for everything again, whatever the targets hold.
        return [*held, False] if self._state.identity.replaces else held

    def lacking(self, source: str, stream: str) -> dict[str, Pair]:
        """The targets of a stream whose first copy is not complete, by name."""
        pairs = self._wiring.pairs(source, stream)
        return {f"{sink} {topic}": (sink, topic) for sink, topic in pairs if not self._is_seeded((sink, topic))}

    def mark(self) -> None:
        """Tell the sinks which first copies are complete, once an epoch that holds their last row is committed."""
        newest = self._state.newest
        if newest is not None and newest.state == "committed":
            for name, source in self._wiring.sources.items():
                if isinstance(source, TableSource) and name in newest.ranges:
                    end = source.position_type.model_validate(newest.ranges[name].end)
                    known = source.tables(source.next_start(end, newest.notes.get(name, ())))
                    with contextlib.suppress(RetryableError):  # tried again after the next epoch
                        self._mark_tables(name, tables.seeded(known))
        for name, capture in self.captures.items():
            with contextlib.suppress(RetryableError):
                self._mark_captured(name, capture)

    def _mark_tables(self, name: str, seeded: frozenset[str]) -> None:
        for stream in sorted(seeded - self._told.get(name, frozenset())):
            for sink, topic in self._wiring.pairs(name, stream):
                if self._is_seeded((sink, topic)) is False:
                    self._wiring.sinks[sink].mark_seeded(topic)
        self._told[name] = seeded

    def _mark_captured(self, name: str, capture: Capture) -> None:
        committed = self._state.edges(name)["committed"]
        for stream, made_for in capture.copied(committed).items() if committed else ():
            for target, (sink, topic) in self.lacking(name, stream).items():
                if target in made_for:
                    self._wiring.sinks[sink].mark_seeded(topic)

    def _is_seeded(self, pair: Pair) -> bool | None:
        """None: the sink has no place for the topic."""
        sink, topic = pair
        try:
            return self._wiring.sinks[sink].is_seeded(topic)
        except ConnectorError as error:
            if not self._wiring.is_told_later(error):
                raise
            return None
