"""The sources, sinks and routes of a pipeline, and where each stream goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, ConnectorError, is_of_stream
from penstock.pipeline.routing import Router
from penstock.sink import SinkConnector, Topic
from penstock.source import RangeSource
from penstock.tables import TableSource

Pair = tuple[str, Topic]
"""A sink and one of its topics."""


@dataclass
class Wiring:
    sources: Mapping[str, RangeSource[Any, Any]]
    sinks: Mapping[str, SinkConnector[Any, Any]]
    router: Router

    def pairs(self, source: str, stream: str) -> list[Pair]:
        """Where the rows of a stream go; none if its name has no place, which `evolve` tells of that stream alone."""
        try:
            return [(sink, target.topic) for target in self.router.targets(source, stream) for sink in target.sinks]
        except ConfigError as error:
            if not self.is_told_later(error):
                raise
            return []

    def is_told_later(self, error: ConnectorError) -> bool:
        """True if following the streams tells of each one that it is about, and goes on with the others."""
        return is_of_stream(error) and all(isinstance(source, TableSource) for source in self.sources.values())


def followed(source: RangeSource[Any, Any], position: Any) -> list[str]:
    """The tables whose targets are theirs at a position; not those that have met another there."""
    tables = source.tables(position) if isinstance(source, TableSource) else {}
    left = ("gone", "skipped")
    return [stream for stream, each in tables.items() if each.state not in left and each.code != "PEN-1011"]
