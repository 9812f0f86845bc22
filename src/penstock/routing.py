"""Which topics a stream's rows go to, and which sinks a topic's rows go to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from penstock.sink import Topic
from penstock.source import SourceBatch


@dataclass(frozen=True)
class Route:
    """One `[[routes]]` entry."""

    stream: str = "#"
    """Pattern of streams: `*` within the name, MQTT-style `+` (one level) and `#` (the rest)."""
    to: str = "/{stream}"
    source: str | None = None
    match: tuple[tuple[str, str], ...] = ()
    """Attribute patterns that a message must satisfy."""
    sinks: tuple[str, ...] = ()
    """Empty: all sinks."""
    partitions: int = 1
    key: tuple[str, ...] = ()
    reliable_dispatch: bool = True
    sql: str | None = None
    transform: str | None = None
    per_epoch: bool = False


@dataclass(frozen=True)
class Target:
    """Where rows go: a topic, the sinks that take it, and the route that says so."""

    topic: Topic
    sinks: tuple[str, ...]
    route: Route = field(compare=False)


@dataclass(frozen=True)
class Router:
    """The routes of a pipeline; a picklable value that tasks use."""

    routes: tuple[Route, ...]
    sinks: tuple[str, ...]
    unrouted: Literal["stop", "skip"] = "stop"

    def targets(self, source: str, stream: str) -> tuple[Target, ...]:
        """Every target that rows of the stream may reach; attributes are not looked at."""
        raise NotImplementedError

    def route(self, source: str, batch: SourceBatch) -> Iterator[tuple[Target | None, pa.RecordBatch]]:
        """The batch's rows for each target, filtered by attributes; rows that reach none go by the `unrouted` policy."""
        raise NotImplementedError
