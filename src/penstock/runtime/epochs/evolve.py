"""Let every sink follow the streams of an epoch before the rows that need it are staged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError, is_of_stream
from penstock.runtime.epochs.contexts import Contexts
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.wiring import Pair, followed
from penstock.runtime.job import OnErrors, is_plain
from penstock.runtime.messages.decoding import Decoders
from penstock.schema import ChangeKind, Doubling, SchemaChange, SchemaEvolvable, is_envelope, key_of
from penstock.schema.evolution import Policy, becomes_double, is_doubling, refusal, widens_or_doubles
from penstock.sink import Topic
from penstock.source import Schemas
from penstock.tables import Refused, TableSource


@dataclass
class Following:
    """What came of it."""

    skipped: dict[tuple[str, str], Json] = field(default_factory=dict)
    """Sources and streams that are left out since a sink cannot follow, with the notes that say so."""
    renewed: set[Pair] = field(default_factory=set)
    """Targets that are cleared and take the types of their rows."""


class Followers:
    """The sinks, and the schema that each of them was last seen to follow."""

    def __init__(self, contexts: Contexts) -> None:
        self._wiring = contexts.wiring
        self._contexts = contexts
        self._evolved: dict[Pair, pa.Schema] = {}
        self._is_plain: dict[Pair, bool] = {}
        self._keys: dict[Topic, set[str]] = {}
        self._on_error = OnErrors()

    def follow(
        self,
        schemas: Mapping[str, Schemas],
        manifest: Manifest,
        cleared: Collection[tuple[str, str]],
        decoders: Decoders,
        on_error: OnErrors,
    ) -> Following:
        """`cleared`: sources and streams whose rows in this epoch follow a clear of their target."""
        self._on_error = on_error
        following = Following()
        owners = self._owners(manifest)
        for name, streams in schemas.items():
            source = self._wiring.sources[name]
            for stream, schema in streams.items():
                try:
                    if isinstance(source, TableSource):
                        self._claim(name, stream, owners)
                    renewed = self._evolve(name, stream, schema, (name, stream) in cleared, decoders)
                    following.renewed.update(list(renewed))
                except ConnectorError as error:
                    if not (isinstance(source, TableSource) and is_of_stream(error)):
                        raise
                    following.skipped[name, stream] = Refused.because(stream, error).note()
        return following

    def _owners(self, manifest: Manifest) -> dict[Pair, str]:
        """The tables that were there before the epoch, by where they go."""
        owners: dict[Pair, str] = {}
        for name, span in manifest.ranges.items():
            source = self._wiring.sources[name]
            for stream in followed(source, source.position_type.model_validate(span.start)):
                for pair in self._wiring.pairs(name, stream):
                    owners.setdefault(pair, f"{name}/{stream}")
        return owners

    def _claim(self, source: str, stream: str, owners: dict[Pair, str]) -> None:
        """Refuse a table without a route, and one that would go where another goes."""
        router = self._wiring.router
        targets = router.targets(source, stream)
        if not targets and router.unrouted == "stop":
            raise router.no_route(source, stream)
        mine = f"{source}/{stream}"
        for sink, topic in [(sink, target.topic) for target in targets for sink in target.sinks]:
            if (first := owners.setdefault((sink, topic), mine)) != mine:
                raise ConfigError(
                    f"the streams {first} and {mine} meet in topic {topic} of sink {sink!r}",
                    code="PEN-1011",
                    hint="put {schema}, {stream} or {source} into `to` of the route; or leave the table out",
                )

    def _evolve(self, source: str, stream: str, schema: pa.Schema, cleared: bool, decoders: Decoders) -> Iterable[Pair]:
        """Let each sink of a stream follow its schema; yields those that do it later, with the rows."""
        for target in self._wiring.router.targets(source, stream):
            new = decoders.schema(target.topic, schema)
            if new is None:
                continue  # nothing is known of the payloads yet
            for name in target.sinks:
                sink, pair = self._wiring.sinks[name], (name, target.topic)
                self._contexts.learn(name, target, new, source, stream)
                self._keys.setdefault(target.topic, set()).update(target.route.key_columns(new))
                self._is_plain[pair] = self._is_plain.get(pair, True) and is_plain(target.route)
                policy = sink.policy(target.topic)
                # Of SQL only the tasks know the schema, and what is discarded is known there row by row.
                if not is_plain(target.route) or policy.discards or self._evolved.get(pair) == new:
                    continue
                try:
                    if isinstance(sink, SchemaEvolvable) and _evolve_one(sink, target.topic, policy, new, cleared):
                        yield pair
                    else:
                        self._evolved[pair] = new
                except ConnectorError as error:
                    is_kept = is_envelope(schema) and self._on_error.of(source, target.route) != "stop"
                    if not is_kept or not is_of_stream(error):
                        raise  # of messages that are kept, tasks refuse only those with a value that has no place

    def can_be_double(self, topic: Topic, known: pa.Schema, wider: pa.Schema, column: str) -> bool:
        """True if every target of a topic lets whole numbers in a column become doubles, as the wider columns want it."""
        is_nested = not becomes_double(known.field(column).type, wider.field(column).type)
        for (name, mine), plain in self._is_plain.items():
            sink = self._wiring.sinks[name]
            if mine != topic or (plain and sink.schema(topic) is None):
                continue
            is_fixed = is_nested or not plain or column in self._keys[topic]
            is_fixed = is_fixed or sink.policy(topic) is not Policy.EVOLVE
            if is_fixed or not isinstance(sink, Doubling) or not sink.can_be_double(topic, column):
                return False
        return True


def _keeps_key(change: SchemaChange, new: pa.Schema) -> bool:
    """False if a column of the key would get doubles: keys would be compared as other values than they were."""
    return not (is_doubling(change) and change.column in key_of(new))


def _evolve_one(sink: Any, topic: Topic, policy: Policy, new: pa.Schema, cleared: bool) -> bool:
    """True if the target changes only with the rows, since it cannot follow, and is cleared."""
    old = sink.schema(topic)
    changes = sink.diff_schemas(old, new) if old is not None else ()
    # What is cleared anyway is not written again first.
    can_follow = sink.evaluate_evolution(changes) and not any(map(is_doubling, changes))
    if cleared and policy is Policy.EVOLVE and not can_follow and sink.evaluate_evolution(changes, refilled=topic):
        return True
    for change in changes:
        added = change.kind is ChangeKind.ADDED
        wider = change.kind is ChangeKind.RETYPED and not widens_or_doubles(change.new, change.old)
        if (policy is Policy.FREEZE and (added or wider)) or (
            wider and not (sink.evaluate_evolution([change]) and _keeps_key(change, new))
        ):
            raise refusal(topic, change.column, change.old, change.new, policy)
    early = [change for change in changes if not sink.evolves_with_rows or is_doubling(change)]
    if early:
        sink.apply_evolution(topic, early)
    return False
