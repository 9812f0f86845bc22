"""The sources, sinks and routes of a pipeline, and where each stream goes."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from typing import Any

from penstock.errors import ConfigError, ConnectorError, is_of_stream
from penstock.pipeline.routing import Router
from penstock.sink import SinkConnector, Topic
from penstock.source import RangeSource
from penstock.tables import TableSource

Pair = tuple[str, Topic]
"""A sink and one of its topics."""


class Wiring:
    """`pack` it before any connector is opened, and tasks get connectors as they were made: a connection does not travel."""

    def __init__(
        self,
        sources: Mapping[str, RangeSource[Any, Any]],
        sinks: Mapping[str, SinkConnector[Any, Any]],
        router: Router,
    ) -> None:
        self.sources = sources
        self.sinks = sinks
        self.router = router
        self._packed: dict[tuple[str, str], bytes] = {}

    def pack(self) -> Wiring:
        """Keep every connector as it is now."""
        for kind, connectors in (("source", self.sources), ("sink", self.sinks)):
            for name, connector in connectors.items():
                self._packed[kind, name] = _pickled(kind, name, connector)
        return self

    def fresh_source(self, name: str) -> RangeSource[Any, Any]:
        """A copy of a source for a task."""
        return pickle.loads(self._packed["source", name])  # type: ignore[no-any-return]

    def fresh_sink(self, name: str) -> SinkConnector[Any, Any]:
        """A copy of a sink for a task."""
        return pickle.loads(self._packed["sink", name])  # type: ignore[no-any-return]

    def pairs(self, source: str, stream: str) -> list[Pair]:
        """Where the rows of a stream go; none if its name has no place, which `evolve` tells of that stream alone."""
        try:
            return [(sink, target.topic) for target in self.router.targets(source, stream) for sink in target.sinks]
        except ConfigError as error:
            if not self.is_told_later(error):
                raise
            return []

    def rows_of_each(self, most: int, sources: Collection[str], letters: str | None = None) -> int:
        """
        About how many rows of each source an epoch reads: `most`, or less where sources share what a sink takes.

        `letters` is the sink that takes the dead letters of all sources.
        """
        found = most
        for name, sink in self.sinks.items():
            leading = sum(name == letters or self.router.leads_to(source, name) for source in sources)
            if sink.max_epoch_rows is not None and leading:
                found = min(found, max(1, sink.max_epoch_rows // leading))
        return found

    def is_told_later(self, error: ConnectorError) -> bool:
        """True if following the streams tells of each one that it is about, and goes on with the others."""
        return is_of_stream(error) and all(isinstance(source, TableSource) for source in self.sources.values())


def followed(source: RangeSource[Any, Any], position: Any) -> list[str]:
    """The tables whose targets are theirs at a position; not those that have met another there."""
    tables = source.tables(position) if isinstance(source, TableSource) else {}
    left = ("gone", "skipped")
    return [stream for stream, each in tables.items() if each.state not in left and each.code != "PEN-1011"]


def _pickled(kind: str, name: str, connector: Any) -> bytes:
    try:
        return pickle.dumps(connector)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{kind} {name!r} cannot be pickled, so it cannot travel to tasks: {error}",
            code="PEN-1016",
            hint="define its class in a module, and make connections in `open`, not in `__init__`",
        ) from error
