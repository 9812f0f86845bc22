"""What can be wrong with a pipeline before anything starts: its routes, its delivery, streams that meet."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.abilities import Named
from penstock.capture import ChangeCapture
from penstock.errors import ConfigError
from penstock.pipeline import registry
from penstock.pipeline.registry import Kind
from penstock.pipeline.routing import DEAD_LETTERS, Route, matches
from penstock.pipeline.toml import Where, without_password
from penstock.schema import Readable, is_envelope
from penstock.schema.evolution import EvolutionConfig
from penstock.schema.registry.versions import Pinned
from penstock.sink import DeliveryGuarantee, SinkConnector, Topic
from penstock.source import Connector, PollingSource, RangeSource, StreamingSource

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

MOST_TURNS = 20
"""A pipeline may read what it wrote, as a second step; rows that come back more often do so for ever."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a pipeline, and where it says so."""

    code: str
    what: str
    hint: str = ""
    where: Where = ()

    def __str__(self) -> str:
        return f"{self.code} {self.what}"


class PipelineError(ConfigError):
    """Everything that is wrong with a pipeline, at once."""

    def __init__(
        self, message: str, *, code: str | None = None, hint: str = "", problems: Sequence[Problem] = ()
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.problems = tuple(problems)


def nearest(word: str, words: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(words), n=1)), None)


def refuse(problems: Sequence[Problem], of: str, places: Sequence[str] | None = None) -> None:
    """Raise all problems as one error; a single one keeps its code and its hint."""
    if not problems:
        return
    places = places or [""] * len(problems)
    if len(problems) == 1:
        (problem,) = problems
        raise PipelineError(f"{places[0]}{problem.what}", code=problem.code, hint=problem.hint, problems=problems)
    codes = {problem.code for problem in problems}
    lines = [f"{len(problems)} errors in {of}"]
    for place, problem in zip(places, problems, strict=True):
        lines.append(f"  {place}{problem}")
        lines += [f"    → {problem.hint}"] if problem.hint else []
    raise PipelineError("\n".join(lines), code=codes.pop() if len(codes) == 1 else "PEN-1000", problems=problems)


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = without_password(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= 60 else f"{text[:57]}…"


def name_problems(what: str, name: Any, where: Where) -> list[Problem]:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return []
    hint = "letters, digits, '.', '_' and '-', beginning with a letter or digit"
    return [Problem("PEN-1003", f"{what} cannot be {shown(name)}", hint, where)]


def route_problems(
    routes: Sequence[Route | None], sources: Iterable[str], sinks: Iterable[str], base: Path | None
) -> Iterator[Problem]:
    """What is wrong with each route; one that could not be read is None, and keeps its place."""
    sources, sinks = list(sources), list(sinks)
    for place, route in enumerate(routes):
        where: Where = ("routes", place)
        if route is None:
            continue
        for what in route.problems():
            key = what.partition("`")[2].partition("`")[0].partition(".")[0]
            yield Problem("PEN-1010", what, where=(*where, key))
        if route.source is not None and route.source not in sources:
            yield _unknown_name("source", route.source, sources, (*where, "source"))
        for sink in route.sinks:
            if sink not in sinks:
                yield _unknown_name("sink", sink, sinks, (*where, "sinks"))
        if len(set(route.sinks)) < len(route.sinks):
            yield Problem("PEN-1010", "the route names a sink twice", "name it once", (*where, "sinks"))
        if route.sql is not None and route.transform is not None:
            hint = "keep one of them: a function can call spark.sql itself"
            yield Problem("PEN-1010", "the route has both 'sql' and 'transform'", hint, (*where, "transform"))
        spark = "sql" if route.sql is not None else "transform" if route.transform is not None else None
        if route.per_epoch and spark is None:
            hint = "remove it; rows pass one by one anyway"
            yield Problem("PEN-1010", "'per_epoch' needs 'sql' or 'transform'", hint, (*where, "per_epoch"))
        if route.streaming and (spark is None or route.per_epoch):
            what = (
                "'streaming' needs 'sql' or 'transform'"
                if spark is None
                else "'streaming' and 'per_epoch' exclude each other"
            )
            yield Problem("PEN-1010", what, "remove one of them", (*where, "streaming"))
        if route.output_mode != "append" and not route.streaming:
            yield Problem("PEN-1010", "'output_mode' needs 'streaming = true'", "remove it", (*where, "output_mode"))
        if route.partitions > 1 and spark is not None:
            hint = f"remove 'partitions': with '{spark}' Spark decides which rows stay together"
            what = f"'partitions' cannot be kept through '{spark}'"
            yield Problem("PEN-1010", what, hint, (*where, "partitions"))
        if route.transform is not None:
            yield from _transform_problems(route.transform, base, (*where, "transform"))
        for other in routes[:place]:
            if other is not None and _same_target(route, other, sinks) and _work(route) != _work(other):
                differ = "sql, transform, partitions, key or schema_evolution"
                what = f"two routes lead to {route.to!r} in one sink and differ in {differ}"
                yield Problem("PEN-1010", what, "make them agree, or give one another topic", where)


def _transform_problems(spec: str, base: Path | None, where: Where) -> Iterator[Problem]:
    try:
        if not callable(registry.load_object(spec, base)):
            yield Problem("PEN-1010", f"transform {spec!r} is not a function", "name one", where)
    except ConfigError as error:
        yield Problem("PEN-1010", error.message, error.hint, where)


def _same_target(a: Route, b: Route, sinks: Sequence[str]) -> bool:
    return a.to.lstrip("/") == b.to.lstrip("/") and bool(set(a.sinks or sinks) & set(b.sinks or sinks))


def _work(route: Route) -> tuple[object, ...]:
    stateful = (route.streaming, route.output_mode)
    return route.sql, route.transform, route.per_epoch, stateful, route.partitions, route.key, route.schema_evolution


def _unknown_name(kind: Kind, name: str, known: Sequence[str], where: Where) -> Problem:
    near = nearest(name, known)
    guess = f"; did you mean {near!r}?" if near else ""
    return Problem("PEN-1010", f"no {kind} is named {name!r}{guess}", f"{kind}s: {', '.join(known) or 'none'}", where)


def letter_store_problems(pipeline: Pipeline) -> Iterator[Problem]:
    """A store of dead letters that wants rows with a key."""
    name = pipeline.processing.dead_letter_sink or ""
    sink = pipeline.sinks.get(name)
    if sink is not None and getattr(sink.config, "mode", "append") != "append":
        what = f"dead letters are rows without a key or a change, and sink {name!r} has another mode than append"
        hint = 'name a sink with mode = "append", or leave out `dead_letter_sink`'
        yield Problem("PEN-1010", what, hint, ("processing", "dead_letter_sink"))


def letter_problems(name: str | None, sinks: Sequence[str]) -> Iterator[Problem]:
    """A store of dead letters that is no sink of the file."""
    if name is not None and name not in sinks:
        yield _unknown_name("sink", name, sinks, ("processing", "dead_letter_sink"))


def sink_problems(pipeline: Pipeline) -> Iterator[Problem]:
    """Two sinks that would shut each other out."""
    owners: dict[str, str] = {}
    for name, sink in pipeline.sinks.items():
        claims = getattr(sink.config, "claims", None)
        if claims is None:
            continue
        claimed, hint = claims(pipeline.name)
        taken = [what for what in claimed if owners.setdefault(what, name) != name]
        for what in taken[:1]:
            text = f"sinks {owners[what]!r} and {name!r} would both use {what}"
            yield Problem("PEN-1000", text, hint, ("sinks", name))


def evolution_problems(pipeline: Pipeline) -> Iterator[Problem]:
    for place, route in enumerate(pipeline.router.routes):
        for name in route.sinks or pipeline.router.sinks if route.schema_evolution else ():
            sink = pipeline.sinks.get(name)
            if sink is not None and not isinstance(sink.config, EvolutionConfig):
                what = (
                    f"sink {name!r} ({_connector_name(sink)}) takes rows of any schema, and has no `schema_evolution`"
                )
                hint = "name the sinks of the route that have one in its `sinks`"
                yield Problem("PEN-1010", what, hint, ("routes", place, "schema_evolution"))


def delivery_problems(pipeline: Pipeline) -> Iterator[Problem]:
    if pipeline.delivery is not DeliveryGuarantee.EXACTLY_ONCE:
        return
    way_out = 'or set delivery = "at-least-once"'
    if not pipeline.processing.checkpoint:
        hint = f"remove checkpoint = false, {way_out}"
        yield Problem("PEN-1008", "exactly-once needs manifests", hint, ("processing", "checkpoint"))
    for name, source in pipeline.sources.items():
        if not isinstance(source, RangeSource | PollingSource | StreamingSource | ChangeCapture):
            what = f"source {name!r} ({_connector_name(source)}) cannot be read again, nor journaled"
            yield Problem("PEN-1008", what, f"use another source, {way_out}", ("sources", name))
    for place, route in enumerate(pipeline.router.routes):
        for name in _at_most_once(pipeline, route):
            what = f"reliable_dispatch = false would lose rows of source {name!r} in a crash: it cannot send them again"
            hint = f"remove reliable_dispatch = false from the route, {way_out}"
            yield Problem("PEN-1008", what, hint, ("routes", place, "reliable_dispatch"))
    for name, sink in pipeline.sinks.items():
        if not _writes_once(pipeline, name):
            what = f"sink {name!r} ({_connector_name(sink)}) may write a row twice"
            hint = (
                f"set `key` on its routes, {way_out}"
                if sink.capabilities.idempotent
                else f"use another sink, {way_out}"
            )
            yield Problem("PEN-1008", what, hint, ("sinks", name))


def notices(pipeline: Pipeline) -> Iterator[str]:
    if not pipeline.processing.checkpoint:
        yield "checkpoint = false: a restart begins from the start and writes again what was written before"
    for name, sink in pipeline.sinks.items():
        if not _writes_once(pipeline, name):
            yield f"sink {name!r} ({_connector_name(sink)}) may repeat rows after a crash"
        is_named = name == pipeline.processing.dead_letter_sink
        if is_named and not isinstance(sink, Readable):
            yield f"dead letters in sink {name!r} ({_connector_name(sink)}) cannot be shown or replayed by `penstock dlq`"
        if not is_named and not any(
            name in (route.sinks or pipeline.router.sinks) for route in pipeline.router.effective
        ):
            yield f"sink {name!r} gets no rows: no route names it"
    if pipeline.delivery is DeliveryGuarantee.EXACTLY_ONCE:
        for each in pipeline.schemas.entries:
            if each.subject is not None and not each.uses_file and not isinstance(each.entry.version_strategy, Pinned):
                yield (
                    f"the schema of {each.entry.topic} is whatever version {each.subject!r} has when an epoch is planned: "
                    "pin it with version_strategy = { pinned = … } if others may register versions"
                )
    for route in pipeline.router.routes:
        if route.reliable_dispatch:
            continue
        lost = _at_most_once(pipeline, route)
        for name, source in pipeline.sources.items():
            if route.source not in (None, name):
                continue
            if isinstance(source, RangeSource):
                yield f"reliable_dispatch = false changes nothing for source {name!r}, which has no journal"
            elif name in lost:
                yield f"source {name!r} is at-most-once for {route.stream!r}: what a crash finds in memory is lost"


def _at_most_once(pipeline: Pipeline, route: Route) -> list[str]:
    """The sources whose rows may be lost because the route bypasses the journal."""
    return [
        name
        for name, source in pipeline.sources.items()
        if not route.reliable_dispatch
        and route.source in (None, name)
        and not isinstance(source, RangeSource)
        and not source.supports_replay
    ]


def _writes_once(pipeline: Pipeline, name: str) -> bool:
    """True for a sink that is exactly-once, or idempotent and given the key by its options or by every route to it."""
    sink = pipeline.sinks[name]
    if sink.capabilities.exactly_once:
        return True
    routes = [route for route in pipeline.router.effective if name in (route.sinks or pipeline.router.sinks)]
    has_key = bool(getattr(sink.config, "key", None)) or (bool(routes) and all(route.key for route in routes))
    return sink.capabilities.idempotent and has_key


def stream_problems(pipeline: Pipeline, streams: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
    targets: dict[tuple[str, str], tuple[str, str, Topic, str]] = {}
    for source, stream in [(source, stream) for source, names in streams.items() for stream in names]:
        try:
            found = pipeline.router.targets(source, stream)
        except ConfigError as error:
            yield Problem(error.code, error.message, error.hint)
            continue
        if not found and pipeline.router.unrouted == "stop":
            hint = 'add a [[routes]] entry, or set unrouted = "skip" in [processing]'
            yield Problem("PEN-1018", f"no route takes stream {stream!r} of source {source!r}", hint)
        yield from _circles(pipeline, source, stream)
        for topic, sink in {(target.topic, sink): None for target in found for sink in target.sinks}:
            key, place = _target_of(pipeline.sinks[sink], sink, topic)
            mine = (source, stream, topic, sink)
            first = targets.setdefault(key, mine)
            are_messages = all(_is_pushed(pipeline, streams, each[0], each[1]) for each in (first, mine))
            if first != mine and not (first[2:] == mine[2:] and are_messages):
                yield _meeting(first, mine, place)


def _is_pushed(pipeline: Pipeline, streams: Mapping[str, Iterable[str]], source: str, stream: str) -> bool:
    """True for messages of a stream that nobody knew before it came, such as a broker's topic: a topic takes all of them."""
    known = streams[source]
    if not isinstance(pipeline.sources[source], StreamingSource | PollingSource) or not isinstance(known, Mapping):
        return False
    return is_envelope(known[stream])


def _circles(pipeline: Pipeline, source: str, stream: str) -> Iterator[Problem]:
    """Rows that a sink writes where a source reads, and that come to such a place again and again."""
    first = list(_read_again(pipeline, source, stream))
    now = {(reader, name): None for _, reader, name in first}
    for _ in range(MOST_TURNS):
        now = {(reader, name): None for each in now for _, reader, name in _read_again(pipeline, *each)}
    for sink, reader, name in first if now else ():
        what = f"sink {sink!r} writes {source}/{stream} to {name!r}, which source {reader!r} reads: it would never end"
        hint = f"set another `topic` in sink {sink!r}, or name the topics of source {reader!r} more narrowly"
        yield Problem("PEN-1010", what, hint, ("sinks", sink))


def _read_again(pipeline: Pipeline, source: str, stream: str) -> Iterator[tuple[str, str, str]]:
    """The sink, the source that reads there, and its stream, of each place to which rows of a stream go as they are."""
    with contextlib.suppress(ConfigError):  # a stream that has no place is a problem of its own
        for target in pipeline.router.targets(source, stream):
            route = target.route
            if route.sql is not None or route.transform is not None or route.match:
                continue  # it may tell what came back from what is new
            for sink in target.sinks:
                config = pipeline.sinks[sink].config
                if not isinstance(config, Named):
                    continue
                namespace, name = config.dataset(target.topic)
                for reader, each in pipeline.sources.items():
                    reads = getattr(each.config, "reads", None)
                    if reads is not None and reads(namespace, name):
                        yield sink, reader, name


def stream_notices(pipeline: Pipeline, streams: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Patterns that match nothing of what the sources have now: they may match later, or never were what was meant."""
    for name, known in streams.items():
        is_message_source = isinstance(pipeline.sources.get(name), PollingSource | StreamingSource)
        if not list(known) and not is_message_source:  # a message names its stream when it comes
            yield f"source {name!r} has no streams now, so no rows will come until it has one"
    yield from _unused_schemas(pipeline, streams)
    yield from _unmatched_schemas(pipeline, streams)
    for route in pipeline.router.routes:
        known = [s for name, found in streams.items() if route.source in (None, name) for s in found]
        if known and not any(matches(route.stream, stream) for stream in known):
            near = nearest(route.stream, known)
            guess = f"; did you mean {near!r}?" if near else ""
            yield f"the route from {route.stream!r} matches no stream that is there now{guess}"
        for pattern in route.exclude:
            if known and not any(matches(pattern, stream) for stream in known):
                yield f"exclude = {pattern!r} of the route from {route.stream!r} matches no stream that is there now"


def _unused_schemas(pipeline: Pipeline, streams: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Entries of [[schemas]] for topics whose source gives rows, which have columns already, and no messages."""
    said: set[Topic] = set()
    for name, known in streams.items():
        for stream, schema in known.items() if isinstance(known, Mapping) else ():
            if schema is None or is_envelope(schema):
                continue
            with contextlib.suppress(ConfigError):  # a stream that has no place is a problem of its own
                for target in pipeline.router.targets(name, stream):
                    found = pipeline.schemas.of(target.topic, "source")
                    writes = all(isinstance(pipeline.sinks.get(sink), Readable) for sink in target.sinks)
                    if found is None or target.topic in said or not (found.entry.direction == "source" or writes):
                        continue
                    said.add(target.topic)
                    yield (
                        f"[[schemas]] for {target.topic} changes nothing: source {name!r} gives rows with columns, not messages, "
                        "and no sink of the topic sends messages"
                    )


def _unmatched_schemas(pipeline: Pipeline, streams: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Entries of [[schemas]] for a topic that no stream leads to, as far as the sources know their streams."""
    if any(isinstance(each, PollingSource | StreamingSource) for each in pipeline.sources.values()):
        return
    topics = {DEAD_LETTERS}
    for name, known in streams.items():
        for stream in known:
            with contextlib.suppress(ConfigError):  # a stream that has no place is a problem of its own
                topics |= {target.topic for target in pipeline.router.targets(name, stream)}
    for each in pipeline.schemas.entries if len(topics) > 1 else ():
        if not any(each.takes(topic) for topic in topics):
            near = nearest(each.entry.topic, topics)
            guess = f"; did you mean {near!r}?" if near else ""
            yield f"[[schemas]] for {each.entry.topic} fits no topic that is there now{guess}"


def _target_of(sink: SinkConnector[Any, Any], name: str, topic: Topic) -> tuple[tuple[str, str], str]:
    """What a topic's rows of a sink end up in: the path, where it has one, else the topic within the sink."""
    path = getattr(sink.config, "path", None)
    if path is None:
        place_of = getattr(sink.config, "place_of", str)
        return (name, place_of(topic)), f"topic {place_of(topic)} of sink {name!r}"
    place = str(path).replace("{topic}", topic.lstrip("/"))
    return (_connector_name(sink), place), place


def _meeting(first: tuple[str, str, Topic, str], second: tuple[str, str, Topic, str], place: str) -> Problem:
    (source_a, stream_a, topic_a, sink_a), (source_b, stream_b, topic_b, sink_b) = first, second
    where: Where
    if topic_a != topic_b:
        hint, where = f"put {{topic}} into the path of sink {sink_b!r}", ("sinks", sink_b)
        if place.startswith("topic "):
            hint = (
                f"put {{topic}} into `topic` of sink {sink_b!r}, and let `to` of the routes differ in more than . and /"
            )
    elif sink_a != sink_b:
        hint, where = (
            "give the two sinks paths of their own, or each its own topics by `sinks` in the routes",
            ("sinks", sink_b),
        )
    else:
        hint, where = (
            "put {table}, {stream} or {source} into `to` of the route, or give each a route of its own",
            ("routes",),
        )
    a, b = f"{source_a}/{stream_a}", f"{source_b}/{stream_b}"
    what = f"the streams {a} and {b} meet in {place}" if a != b else f"the stream {a} reaches {place} twice"
    return Problem("PEN-1011", what, hint, where)


def _connector_name(connector: Connector[Any]) -> str:
    return getattr(connector, "name", type(connector).__name__)
