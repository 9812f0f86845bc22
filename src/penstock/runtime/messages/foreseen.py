"""Before the first message: whether the targets of a topic can have the columns that its schema gives it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError, ConnectorError, SchemaError
from penstock.pipeline import Pipeline
from penstock.pipeline.routing import Route, Router, Target
from penstock.runtime.job import OnErrors, is_plain
from penstock.runtime.messages.decoding import Decoder, Decoders
from penstock.schema import Choosy, is_envelope
from penstock.sink import SinkConnector
from penstock.source import PollingSource, Schemas, SourceConnector, StreamingSource

LETTERS = "such messages become dead letters"
"""What is said of a misfit that does not stop a start."""


def misfits(
    decoders: Decoders,
    router: Router,
    sources: Mapping[str, SourceConnector[Any]],
    sinks: Mapping[str, SinkConnector[Any, Any]],
    streams: Mapping[str, Schemas],
    lived_with: Callable[[Target], bool],
) -> Iterator[tuple[bool, ConnectorError]]:
    """
    What is wrong with topics whose format fixes their columns; what SQL makes of them is known to Spark alone.

    `streams`: what the sources say of their streams. Messages that are pushed or polled name theirs only when they come.
    `lived_with`: whether earlier runs had the same schema and kept what does not fit as dead letters. Each error comes with
    whether it must stop the start.
    """
    asked: set[tuple[str, str]] = set()
    for target in message_targets(decoders, router, sources, streams):
        decoder = decoders.of(target.topic)
        if decoder is None or decoder.format.columns() is None:
            continue
        try:
            columns = _columns(target, decoder)
        except ConfigError as error:
            if ("", target.topic) not in asked:
                asked.add(("", target.topic))
                yield not lived_with(target), error
            continue
        for name in target.sinks if is_plain(target.route) else ():
            sink = sinks.get(name)
            if sink is None or (name, target.topic) in asked:
                continue
            asked.add((name, target.topic))
            discards = (target.route.schema_evolution or sink.policy(target.topic)).discards
            if discards or not isinstance(sink, Choosy):
                continue
            try:
                sink.check_columns(target.topic, columns)
            except SchemaError as error:
                yield (
                    not lived_with(target),
                    type(error)(f"sink {name!r}: {error.message}", code=error.code, hint=error.hint),
                )


def lives_with(
    pipeline: Pipeline, versions: Mapping[str, int], now: Mapping[str, int | None]
) -> Callable[[Target], bool]:
    """
    Whether an earlier run had a topic's schema of now, and what does not fit becomes letters: then a start goes on.

    `versions`: of the newest epoch; no epoch is planned with a schema that the start refused. `now`: of the next one.
    """
    policies = OnErrors(pipeline.processing.on_error, pipeline.on_error)

    def lived_with(target: Target) -> bool:
        entry = pipeline.schemas.of(target.topic, "source")
        named = [target.route.source] if target.route.source else [*pipeline.sources]
        keeps = all(policies.of(each, target.route) == "dead_letter" for each in named)
        same = entry is not None and entry.place in versions and versions[entry.place] == now.get(entry.place)
        return same and keeps

    return lived_with


def _columns(target: Target, decoder: Decoder) -> pa.Schema:
    columns, schema = decoder.format.columns(), decoder.schema()
    assert columns is not None
    assert schema is not None
    taken = [name for name in columns.names if name.lower() in decoder.reserved]
    if taken:
        raise ConfigError(
            f"the schema of {target.topic} has a field {taken[0]!r}, which is the name of a column of Penstock's own",
            code="PEN-1020",
            hint="rename the field; `_op` is for formats of changes such as debezium, the others are what `metadata` names",
        )
    lacking = [] if decoder.format.uses_keys else [name for name in decoder.key if name not in schema.names]
    if lacking:
        near = difflib.get_close_matches(lacking[0], schema.names, n=1)
        raise ConfigError(
            f"the key of {target.topic} names the column {lacking[0]!r}, which its schema does not have"
            + (f"; did you mean {near[0]!r}?" if near else ""),
            code="PEN-1020",
            hint=f"the columns are {', '.join(schema.names)}: without a key no message could be a row",
        )
    return schema


def message_targets(
    decoders: Decoders, router: Router, sources: Mapping[str, SourceConnector[Any]], streams: Mapping[str, Schemas]
) -> Iterator[Target]:
    """Where messages go, as far as that is known before they come."""
    for source, known in streams.items():
        for stream, schema in known.items():
            if is_envelope(schema):
                yield from router.targets(source, stream)
    topics = [each.entry.topic for each in decoders.schemas.entries if each.serves("source")]
    pushed = [name for name, each in sources.items() if isinstance(each, PollingSource | StreamingSource)]
    for route in router.effective:
        if route.source in pushed or (route.source is None and pushed):
            for topic in topics:
                if not set("*+#") & set(topic) and _leads_to(route, topic):
                    yield Target(topic, route.sinks or router.sinks, route)


def _leads_to(route: Route, topic: str) -> bool:
    parts = re.split(r"\{[^}]*\}", route.to)
    return re.fullmatch(".+".join(map(re.escape, parts)), topic) is not None
