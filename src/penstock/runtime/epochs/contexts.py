"""What connectors learn when they are opened, and later."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pyarrow as pa

from penstock.durable import Json
from penstock.formats import Failed
from penstock.pipeline.routing import Target
from penstock.pipeline.schemas import TopicSchemas
from penstock.runtime.epochs.first_copies import FirstCopies
from penstock.runtime.epochs.state import State
from penstock.runtime.epochs.wiring import Pair, Wiring
from penstock.runtime.messages.codecs import Codecs
from penstock.sink import SinkContext, Topic, TopicContext
from penstock.source import ProducerConfig, SourceContext


class Contexts:
    """The contexts of a pipeline's connectors. Those of sinks are views of what is learned while epochs go by."""

    def __init__(self, state: State, wiring: Wiring, codecs: Codecs | None = None) -> None:
        self.wiring = wiring
        self._state = state
        self._codecs = codecs or Codecs(TopicSchemas(), state.directory)
        self.copies = FirstCopies(state, wiring)
        self._sources = state.directory / "sources"
        self._sinks = (state.directory / "sinks").absolute()
        self._topics: dict[str, dict[Topic, TopicContext]] = {name: {} for name in wiring.sinks}
        self._columns: dict[Topic, pa.Schema] = {}
        self._flows: dict[tuple[str, Topic, str], None] = {}
        self._streams: dict[tuple[str, str], pa.Schema] = {}

    def open(self) -> None:
        """Open every connector; sinks first, since a source may ask what they hold."""
        for name, sink in self.wiring.sinks.items():
            sink.open(self.sink(name))
        for name, source in self.wiring.sources.items():
            source.open(self.source(name))

    def source(self, name: str) -> SourceContext:
        """For a source, on the driver."""
        produces = tuple(
            ProducerConfig(
                route.to, route.partitions, route.reliable_dispatch, schema_config=self._schema_config(route.to)
            )
            for route in self.wiring.router.effective
            if route.source in (None, name)
        )
        held, refused = partial(self.copies.held, name), partial(self._refused, name)
        newest = self._state.newest
        return SourceContext(
            self._sources / name,
            produces,
            held,
            refused,
            parallelism=newest.parallelism if newest else 1,
            pipeline=self._state.pipeline,
        )

    def _refused(self, source: str, stream: str, payloads: Sequence[bytes]) -> Failed | None:
        """By the routes that take every message of the stream; which others take one is found when it is routed."""
        topics = [each.topic for each in self.wiring.router.targets(source, stream) if not each.route.match]
        return self._codecs.refused(dict.fromkeys(topics), payloads)

    def _schema_config(self, topic: Topic) -> Json:
        """The `[[schemas]]` entry by which messages of a topic are decoded; None: there is none."""
        found = self._codecs.schemas.of(topic, "source")
        return None if found is None else found.entry.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def sink(self, name: str) -> SinkContext:
        """For a sink, on the driver: it shows what is learned later, too."""
        return SinkContext(MappingProxyType(self._topics[name]), self._sinks / name, name)

    def learn(self, sink: str, target: Target, schema: pa.Schema, source: str = "", stream: str = "") -> None:
        """Take over what a route says of a topic, and the schema that its stream has now."""
        self._columns[target.topic] = self._streams[source, stream] = schema
        self._flows[source, target.topic, sink] = None
        topics = self._topics[sink]
        topics[target.topic] = target.context(topics.get(target.topic, TopicContext()), schema)

    def columns(self) -> dict[Topic, dict[str, str]]:
        """The columns of each topic with their types, as they enter it; for people."""
        return {topic: {each.name: str(each.type) for each in schema} for topic, schema in [*self._columns.items()]}

    def streams(self) -> dict[tuple[str, str], dict[str, str]]:
        """The columns of each stream of a source with their types, once decoded."""
        return {key: {each.name: str(each.type) for each in schema} for key, schema in [*self._streams.items()]}

    def flows(self) -> list[tuple[str, Topic, str]]:
        """Source, topic and sink of every way that rows take, as far as it is known."""
        return [*self._flows]

    def in_tasks(self, is_local: bool, refilled: Collection[Pair] = ()) -> dict[str, SinkContext]:
        """For the sinks of one job. `refilled`: targets that are cleared and take the types of their rows."""
        return {
            name: SinkContext(
                {t: replace(known, refilled=(name, t) in refilled) for t, known in topics.items()},
                self._sinks / name if is_local else None,
                name,
            )
            for name, topics in self._topics.items()
        }
