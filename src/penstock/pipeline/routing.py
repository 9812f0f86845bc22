"""
Which topics a stream's rows go to, and which sinks a topic's rows go to.

Patterns, of streams and of attributes: `*` is any run of characters except `/`; `+` is one level and `#`, at the end,
all that follow, where `/` separates levels (`plant/#` also takes `plant`). Everything else is taken literally.
Templates: `{stream}`, `{source}`, `{schema}` and `{table}` (what comes before and after the first dot of the stream),
`{1}`, `{2}`… (what the first, second… wildcard matched).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.hashing import Words, mix, words_of
from penstock.changes.keys import canonical_floats, plain
from penstock.errors import ConfigError
from penstock.schema import key_of
from penstock.schema.evolution import Policy
from penstock.sink import Topic, TopicContext
from penstock.source import SourceBatch

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
DEAD_LETTERS: Topic = "/_dead_letters"
"""The topic of the dead letters, which no route leads to: a sink may hold both them and rows."""

_SKIP = 'set unrouted = "skip" in [processing] to leave such rows out'
_CACHED_STREAMS = 10_000  # a broker may have any number of topics; memory must not follow it


OnError = Literal["stop", "skip", "dead_letter"]
"""What becomes of a record that cannot be used."""


@dataclass(frozen=True)
class Route:
    """One `[[routes]]` entry."""

    stream: str = "#"
    """Pattern of streams."""
    to: str = "/{stream}"
    """Template of the topic."""
    source: str | None = None
    """Name of the source it is for; None: all."""
    match: tuple[tuple[str, str], ...] = ()
    """Attribute patterns, all of which a message must satisfy."""
    sinks: tuple[str, ...] = ()
    """Empty: all sinks."""
    partitions: int = 1
    key: tuple[str, ...] = ()
    reliable_dispatch: bool = True
    sql: str | None = None
    transform: str | None = None
    per_epoch: bool = False
    streaming: bool = False
    output_mode: Literal["append", "update"] = "append"
    schema_evolution: Policy | None = None
    """None: as the sink says."""
    on_error: OnError | None = None
    """None: as the source says."""
    exclude: tuple[str, ...] = ()
    """Patterns of streams that it does not take after all."""

    def key_columns(self, schema: pa.Schema) -> list[str]:
        """The columns whose value keeps its order over `partitions`: the route's, else the schema's, else an envelope's."""
        envelope = ["key"] if {"key", "payload"} <= set(schema.names) else []
        return list(self.key) or key_of(schema) or envelope

    def problems(self) -> list[str]:
        """What is wrong with the pattern and the template, before any stream is known."""
        patterns = [
            ("from", self.stream),
            *(("exclude", pattern) for pattern in self.exclude),
            *((f"match.{name}", pattern) for name, pattern in self.match),
        ]
        found = [f"`{key}` = {pattern!r}: {wrong}" for key, pattern in patterns if (wrong := _wrong_pattern(pattern))]
        wildcards = len(re.findall(r"[*+#]", self.stream))
        known = {"stream", "source", "schema", "table", *(str(n + 1) for n in range(wildcards))}
        for name in _PLACEHOLDER.findall(self.to):
            if name not in known:
                offer = ", ".join(f"{{{each}}}" for each in sorted(known))
                found.append(f"`to` = {self.to!r}: there is no {{{name}}}; there are {offer}")
        if re.search(r"[{}]", _PLACEHOLDER.sub("", self.to)):
            found.append(f"`to` = {self.to!r}: a brace has no partner")
        try:
            topic_name(_PLACEHOLDER.sub("x", self.to))
        except ValueError as wrong:
            found.append(f"`to` = {self.to!r}: {wrong}")
        return found

    def topic(self, source: str, stream: str) -> Topic | None:
        """The topic of a stream, or None if the route does not take it."""
        if self.source not in (None, source):
            return None
        matched = _compiled(self.stream).fullmatch(stream)
        if matched is None or any(matches(pattern, stream) for pattern in self.exclude):
            return None
        schema, dot, table = stream.partition(".")
        values = {
            "stream": stream,
            "source": source,
            "schema": schema if dot else "",
            "table": table if dot else stream,
        }
        values |= {str(n): text or "" for n, text in enumerate(matched.groups(), 1)}
        try:
            return topic_name(_PLACEHOLDER.sub(lambda name: values[name[1]], self.to))
        except ValueError as wrong:
            raise ConfigError(
                f"stream {stream!r} of source {source!r} makes no topic with `to` = {self.to!r}: {wrong}",
                code="PEN-1018",
                hint=f"give that stream a route of its own, or {_SKIP}",
            ) from None


@dataclass(frozen=True)
class Target:
    """Where rows go: a topic, the sinks that take it, and the route that says so."""

    topic: Topic
    sinks: tuple[str, ...]
    route: Route = field(compare=False)

    def context(self, known: TopicContext, schema: pa.Schema | None = None) -> TopicContext:
        """What its sinks are to know of the topic: what they knew, the route's policy, and the stream's schema as of now."""
        plain = self.route.sql is None and self.route.transform is None  # what SQL makes of it is not known
        return replace(
            known,
            policy=self.route.schema_evolution or known.policy,
            source_schema=schema if plain and schema is not None else known.source_schema,
        )


@dataclass(frozen=True)
class Router:
    """
    The routes of a pipeline; a picklable value that tasks use.

    Every route that matches applies; a row reaches one sink under one topic once, by the first route that leads there.
    """

    routes: tuple[Route, ...]
    """None: every stream goes to `/{stream}` and all sinks."""
    sinks: tuple[str, ...]
    unrouted: Literal["stop", "skip"] = "stop"
    _targets: dict[tuple[str, str], tuple[Target, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_targets": {}}

    @property
    def effective(self) -> tuple[Route, ...]:
        """The routes, or the default route if there are none."""
        return self.routes or (Route(),)

    def targets(self, source: str, stream: str) -> tuple[Target, ...]:
        """Every target that rows of the stream may reach; attributes are not looked at."""
        found = self._targets.get((source, stream))
        if found is None:
            if len(self._targets) >= _CACHED_STREAMS:
                self._targets.clear()
            found = self._targets[source, stream] = tuple(self._find(source, stream))
        return found

    def leads_to(self, source: str, sink: str) -> bool:
        """True if a route may take rows of the source to the sink, whatever its streams are."""
        return any(route.source in (None, source) and sink in (route.sinks or self.sinks) for route in self.effective)

    def leaves_out(self, source: str, stream: str) -> bool:
        """True if no route takes any row of the stream, and `unrouted` says that this is meant."""
        return self.unrouted == "skip" and not self.targets(source, stream)

    def _find(self, source: str, stream: str) -> Iterator[Target]:
        taken: set[tuple[Topic, str]] = set()
        for route in self.effective:
            try:
                topic = route.topic(source, stream)
            except ConfigError:
                if self.unrouted == "stop":
                    raise
                continue
            if topic is None:
                continue
            sinks = tuple(sink for sink in route.sinks or self.sinks if (topic, sink) not in taken)
            if not route.match:
                taken |= {(topic, sink) for sink in sinks}
            if sinks:
                yield Target(topic, sinks, route)

    def reached(self, source: str, stream: str, topic: Topic) -> list[Target]:
        """The targets of one topic that rows of the stream may reach; none also if the stream makes no topic."""
        try:
            return [target for target in self.targets(source, stream) if target.topic == topic]
        except ConfigError:
            return []

    def route(self, source: str, batch: SourceBatch) -> Iterator[tuple[Target | None, pa.RecordBatch]]:
        """The batch's rows for each target, filtered by attributes; under `unrouted = "skip"`, None and the rows for none."""
        records = batch.records
        if not records.num_rows:
            return
        targets = self.targets(source, batch.stream)
        if not any(target.route.match for target in targets):
            yield from ((target, records) for target in targets)
            if not targets:
                yield None, self._unrouted(source, batch.stream, records)
            return
        reached = np.zeros(records.num_rows, dtype=bool)
        taken: dict[tuple[Topic, str], npt.NDArray[np.bool_]] = {}
        for target in targets:
            rows = _matching(records, target.route.match)
            reached |= rows
            for part, left in _untaken(target, rows, taken):
                if left.any():
                    yield part, records if left.all() else records.filter(pa.array(left))
        if not reached.all():
            yield None, self._unrouted(source, batch.stream, records.filter(pa.array(~reached)))

    def _unrouted(self, source: str, stream: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self.unrouted == "skip":
            return rows
        raise self.no_route(source, stream)

    def no_route(self, source: str, stream: str) -> ConfigError:
        """The error for rows of a stream that no route takes."""
        patterns = {route.stream: route for route in self.effective}
        nearest = difflib.get_close_matches(stream, patterns, n=1, cutoff=0)
        attributes = any(target.route.match for target in self.targets(source, stream))
        return ConfigError(
            f"no route takes {'some rows' if attributes else 'rows'} of stream {stream!r} of source {source!r}"
            + (f"; the nearest is from = {nearest[0]!r}" if nearest else ""),
            code="PEN-1018",
            hint=f"add a [[routes]] entry for it, or {_SKIP}",
        )


def topic_name(text: str) -> Topic:
    """A topic's name with its leading slash; ValueError when it could not be a path of plain levels."""
    name = "/" + text.lstrip("/")
    levels = name[1:].split("/")
    if "" in levels:
        raise ValueError(f"{name!r} has an empty level")
    if any(level in (".", "..") for level in levels):
        raise ValueError(f"{name!r} has a level of dots")
    if not name.isprintable():
        raise ValueError(f"{name!r} has a control character")
    if name.casefold() == DEAD_LETTERS:
        raise ValueError(f"{name!r} is the topic of the dead letters")
    return name


def partition_of(batch: pa.RecordBatch, key_columns: Sequence[str], partitions: int) -> npt.NDArray[np.int64]:
    """
    The partition of each row, by the value of its key; the same in every process, release and integer width.

    A row whose key is null in every column goes to partition 0.
    """
    if not key_columns:
        raise ConfigError(
            f"rows without a key cannot be spread over {partitions} partitions",
            code="PEN-1010",
            hint='name the columns in the route: key = ["id"]',
        )
    missing = [name for name in key_columns if name not in batch.schema.names]
    if missing:
        raise ConfigError(
            f"the key column {missing[0]!r} is not among {', '.join(batch.schema.names)}",
            code="PEN-1010",
            hint="correct `key` in the route",
        )
    hashed = np.zeros(batch.num_rows, dtype=np.uint64)
    null = np.ones(batch.num_rows, dtype=bool)
    for name in key_columns:
        column = batch.column(name)
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        values = mix(_words(name, column))
        values[nulls] = 0
        hashed = mix(hashed ^ values)
        null &= nulls
    result = (hashed % np.uint64(partitions)).astype(np.int64)
    result[null] = 0
    return result


def split_by(batch: pa.RecordBatch, indices: npt.NDArray[np.int64], n: int) -> list[pa.RecordBatch | None]:
    """The rows of each index from 0 to n - 1, in their order; None where there are none."""
    if n == 1:
        return [batch if batch.num_rows else None]
    order = np.argsort(indices, kind="stable")
    sorted_rows = batch.take(pa.array(order))
    counts = np.bincount(indices, minlength=n)
    starts = np.cumsum(counts) - counts
    return [sorted_rows.slice(int(s), int(c)) if c else None for s, c in zip(starts, counts, strict=True)]


def _wrong_pattern(pattern: str) -> str | None:
    levels = pattern.split("/")
    for place, level in enumerate(levels):
        if any(wild in level and level != wild for wild in "+#"):
            return "`+` and `#` are whole levels; within a name write `*`"
        if level == "#" and place < len(levels) - 1:
            return "`#` takes all that follows, so it must be the last level"
    return None


def _expression(pattern: str) -> str:
    """The pattern as a regular expression with a group per wildcard, in the syntax that Python and RE2 share."""
    levels = [
        "([^/]*)" if level == "+" else "([^/]*)".join(map(re.escape, level.split("*"))) for level in pattern.split("/")
    ]
    if pattern == "#":
        return r"(?s:(.*))"
    if pattern.endswith("/#"):
        return "/".join(levels[:-1]) + r"(?:/(?s:(.*)))?"
    return "/".join(levels)


def matches(pattern: str, text: str) -> bool:
    """True if a stream, a topic or an attribute satisfies a pattern."""
    return _compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(_expression(pattern))


def _matching(records: pa.RecordBatch, match: tuple[tuple[str, str], ...]) -> npt.NDArray[np.bool_]:
    """Which rows satisfy every attribute pattern; a row without the attribute does not."""
    if not match:
        return np.ones(records.num_rows, dtype=bool)
    place = records.schema.get_field_index("attributes")
    if place < 0 or not pa.types.is_map(records.schema.field(place).type):
        return np.zeros(records.num_rows, dtype=bool)
    attributes = records.column(place)
    rows = np.ones(records.num_rows, dtype=bool)
    for name, pattern in match:
        values = pc.map_lookup(attributes, name, "last")
        found = pc.match_substring_regex(values, rf"\A(?:{_expression(pattern)})\z")
        rows &= pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return rows


def _untaken(
    target: Target, rows: npt.NDArray[np.bool_], taken: dict[tuple[Topic, str], npt.NDArray[np.bool_]]
) -> Iterator[tuple[Target, npt.NDArray[np.bool_]]]:
    """The target with the rows that no earlier route sent there; sink by sink where they differ."""
    fresh = tuple(sink for sink in target.sinks if (target.topic, sink) not in taken)
    if fresh:
        yield Target(target.topic, fresh, target.route), rows
    for sink in target.sinks:
        before = taken.get((target.topic, sink))
        if before is not None and sink not in fresh:
            yield Target(target.topic, (sink,), target.route), rows & ~before
        taken[target.topic, sink] = rows if before is None else rows | before


def _words(name: str, column: pa.Array) -> Words:
    """A number per row: the same for equal values, whatever the width of their type; of nulls anything."""
    values = plain(column)
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz), safe=False)
    elif pa.types.is_floating(values.type):
        values = canonical_floats(values.cast(pa.float64()))
    try:
        return words_of(values)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ConfigError(
            f"the key column {name!r} has type {column.type}, which cannot be used as a key",
            code="PEN-1010",
            hint="name other columns in `key` of the route",
        ) from None
