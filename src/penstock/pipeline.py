"""From one TOML file to a checked pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from penstock import checks, registry, shape, tomlfile
from penstock.checks import PipelineError, Problem
from penstock.config import Config, type_text
from penstock.durable import Json
from penstock.errors import ConfigError, ConnectorError
from penstock.registry import Kind
from penstock.routing import Route, Router
from penstock.schema.evolution import Policy
from penstock.shape import compare_shapes
from penstock.sink import DeliveryGuarantee, SinkConnector
from penstock.source import Connector, SourceConnector
from penstock.tomlfile import TomlFile, Where

__all__ = ["Pipeline", "PipelineError", "Problem", "Processing", "compare_shapes"]

if TYPE_CHECKING:
    from penstock.supervisor import Summary

M = TypeVar("M", bound=Config)

_SECTIONS = (
    "connector_name", "delivery", "processing", "schemas", "source", "sources", "sink", "sinks", "routes"
)  # fmt: skip


class Processing(Config):
    """The `[processing]` section; every key has a default."""

    state_dir: Path = Path("state")
    """Directory of manifests, journals and the lock. Relative to the pipeline file."""

    checkpoint: bool = True
    """Keep manifests. Without them a restart begins anew, and exactly-once is refused."""

    poll_interval_ms: PositiveInt = 100
    """How often a source that sends no signal is asked for new data while it is idle."""

    epoch_interval_ms: NonNegativeInt = 200
    """Least time between the starts of two epochs, unless a source asks for one."""

    max_batch_records: PositiveInt = 65536
    """Hint for how many records one poll of a polling source returns."""

    max_epoch_rows: PositiveInt = 10_000_000
    """Admission control: about how many rows of one source an epoch reads at most."""

    journal_max_bytes: PositiveInt = 1 << 30
    """Size of one source's journal at which the source is held back."""

    linger_ms: NonNegativeInt = 5
    """How long the journal waits for more records before an fsync that serves them all."""

    max_retries: NonNegativeInt = 10
    """Retryable failures in a row after which the pipeline stops."""

    retry_backoff_ms: PositiveInt = 100
    """First pause before a retry; it doubles, with jitter."""

    max_backoff_ms: PositiveInt = 30_000
    """Longest pause before a retry."""

    lag_interval_secs: PositiveInt = 10
    """How often a source's lag is sampled."""

    health_timeout_secs: PositiveInt = 60
    """Time without progress or a health answer after which a connector counts as unhealthy."""

    unrouted: Literal["stop", "skip"] = "stop"
    """What to do with rows that no route takes: stop, or skip and count them."""

    on_error: Literal["stop", "skip"] = "stop"
    """What to do with bad records: stop, or skip and count them."""

    max_error_rate: float = Field(default=1.0, ge=0, le=1)
    """Share of an epoch's records that may be bad, and skipped, before the pipeline stops."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for metrics, health and status over HTTP, on 127.0.0.1; 0 chooses a free one, none serves nothing."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""


class RouteEntry(Config):
    """One `[[routes]]` entry. Without any, every stream goes to `/{stream}` and to all sinks."""

    stream: str = Field(default="#", alias="from", min_length=1)
    """Streams it takes: `*` is any run of characters except `/`, `+` one level, `#` at the end all levels that follow."""

    source: str | None = None
    """Name of the source whose streams it takes; none: all sources."""

    match: dict[str, str] = Field(default={})
    """Patterns that a message's attributes must satisfy, row by row, such as `{ site = "north/#" }`; for columns use `sql`."""

    to: str = "/{stream}"
    """The topic: `{stream}`, `{source}`, `{schema}` and `{table}` (around the stream's first dot), `{1}` (first wildcard)."""

    sinks: list[str] = Field(default=[], min_length=1)
    """Names of the sinks that take the topic; none: all."""

    partitions: PositiveInt = 1
    """Rows of the topic are hashed by key into that many ordered splits."""

    key: list[str] = Field(default=[], min_length=1)
    """Columns whose value keeps its order over `partitions`; none: the key that the source knows."""

    reliable_dispatch: bool = True
    """False lets rows bypass the journal: faster, and lost in a crash unless the source can send them again."""

    sql: str | None = Field(default=None, min_length=1)
    """A query over the epoch's rows, which it sees as the table `input`."""

    transform: str | None = None
    """A function `module:function` from DataFrame to DataFrame, instead of `sql`."""

    per_epoch: bool = False
    """Allows aggregates, DISTINCT, joins and windows, which then see one epoch at a time."""

    schema_evolution: Policy | None = None
    """What happens to rows that a target has no place for; none: as the sink says, see there."""

    def route(self) -> Route:
        fields = self.model_dump(exclude={"match", "sinks", "key"})
        return Route(**fields, match=tuple(self.match.items()), sinks=tuple(self.sinks), key=tuple(self.key))


class Pinned(Config):
    """Exactly this version."""

    pinned: PositiveInt
    """The version."""


class Minimum(Config):
    """This version or a later one."""

    minimum: PositiveInt
    """The lowest version."""


class SchemaEntry(Config):
    """One `[[schemas]]` entry: validate and serialise a topic by a schema. Not supported yet, and refused."""

    topic: str
    """The topic it is for."""

    subject: str
    """Its name in the schema registry."""

    schema_type: Literal["json_schema", "string", "bytes", "number", "avro"]
    """How payloads are written."""

    schema_file: Path | None = None
    """File that holds the schema, relative to the pipeline file."""

    auto_register: bool = False
    """Register the schema when the registry does not have it."""

    version_strategy: Literal["latest"] | Pinned | Minimum = "latest"
    """Which version to use: `"latest"`, `{ pinned = 2 }` or `{ minimum = 1 }`."""


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline: connectors made, not opened."""

    name: str
    sources: Mapping[str, SourceConnector[Any]]
    sinks: Mapping[str, SinkConnector[Any, Any]]
    router: Router
    delivery: DeliveryGuarantee = DeliveryGuarantee.AT_LEAST_ONCE
    processing: Processing = field(default_factory=Processing)
    file: Path | None = None
    """The file it was read from, if any."""

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str] | None = None) -> Pipeline:
        """Read and check a file, by default the one that `CONNECTOR_CONFIG_PATH` names; all its errors come at once."""
        chosen = path or os.environ.get("CONNECTOR_CONFIG_PATH")
        if not chosen:
            raise ConfigError(
                "no pipeline file was given", code="PEN-1015", hint="name one, or set CONNECTOR_CONFIG_PATH"
            )
        return _Reader(tomlfile.read(Path(os.path.abspath(chosen)))).pipeline()

    @property
    def base(self) -> Path | None:
        """The directory of the file, from which relative paths and modules are found."""
        return self.file.parent if self.file else None

    @property
    def notices(self) -> list[str]:
        """What this pipeline does not promise, said before it starts."""
        return list(checks.notices(self))

    @property
    def third_party(self) -> list[Path]:
        """Files and package directories that executors need besides Penstock."""
        transforms = [registry.load_object(r.transform, self.base) for r in self.router.routes if r.transform]
        connectors = [type(each) for each in (*self.sources.values(), *self.sinks.values())]
        return registry.third_party_modules([*connectors, *transforms], self.base)

    def validate(self) -> None:
        """Refuse a pipeline that cannot keep its promises; a file's pipeline is checked already."""
        problems = [
            *checks.name_problems("a pipeline's name", self.name, ()),
            *(p for name in self.sources for p in checks.name_problems("a source's name", name, ("sources", name))),
            *(p for name in self.sinks for p in checks.name_problems("a sink's name", name, ("sinks", name))),
            *([] if self.sources else [Problem("PEN-1004", "a pipeline needs a source")]),
            *([] if self.sinks else [Problem("PEN-1004", "a pipeline needs a sink")]),
            *checks.route_problems(self.router.routes, self.sources, self.sinks, self.base),
            *checks.evolution_problems(self),
            *checks.delivery_problems(self),
        ]
        checks.refuse(problems, f"the pipeline {self.name!r}")

    def check_streams(self, streams: Mapping[str, Iterable[str]]) -> list[Problem]:
        """What is wrong once each source's streams are known, as after `open`: streams that meet, streams without a route."""
        return list(checks.stream_problems(self, streams))

    def require_streams(self, streams: Mapping[str, Iterable[str]]) -> None:
        """Refuse what `check_streams` finds."""
        checks.refuse(self.check_streams(streams), f"the pipeline {self.name!r}")

    def shape(self) -> Json:
        """What a later run is compared with, see `shape.compare_shapes`; holds no secrets and no connection details."""
        return shape.shape_of(self.name, self.sources, self.sinks, self.router, self.delivery, self.base)

    def run(self, spark: Any = None, drain: bool = False) -> Summary:
        """Run until stopped, or with `drain` until all that is there now is committed; in the caller's session if given."""
        self.validate()
        from penstock import supervisor  # here, since it imports this module

        return supervisor.run(self, spark=spark, drain=drain)


# -- reading the file --------------------------------------------------------------------------------------------------


class _Reader:
    """Reads one file and gathers everything that is wrong with it."""

    def __init__(self, file: TomlFile) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.places: dict[Where, Where] = {}
        """Where the file has each named connector."""
        self.declared: dict[Kind, list[str]] = {"source": [], "sink": []}

    def pipeline(self) -> Pipeline:
        data = self.file.data
        for key in data:
            if key not in _SECTIONS:
                self.problems.append(_unknown_key(key, "the file", _SECTIONS, (key,)))
        processing = self._processing()
        sources = self._connectors("source")
        sinks = self._connectors("sink")
        self._schemas()
        routes = [entry.route() if entry else None for entry in self._entries("routes", RouteEntry)]
        router = Router(tuple(route for route in routes if route), tuple(self.declared["sink"]), processing.unrouted)
        found = Pipeline(self._name(), sources, sinks, router, self._delivery(), processing, self.file.path)
        self.problems += checks.route_problems(routes, self.declared["source"], self.declared["sink"], found.base)
        self.problems += checks.evolution_problems(found)
        self.problems += checks.delivery_problems(found)
        self._refuse()
        return found

    def _name(self) -> str:
        override = os.environ.get("CONNECTOR_NAME")
        name = override or self.file.data.get("connector_name")
        if name is None:
            hint = 'connector_name = "orders-to-lake"'
            self.problems.append(Problem("PEN-1004", "the file needs 'connector_name'", hint))
            return "unnamed"
        what = "CONNECTOR_NAME" if override else "'connector_name'"
        wrong = checks.name_problems(what, name, () if override else ("connector_name",))
        self.problems += wrong
        return "unnamed" if wrong else name

    def _delivery(self) -> DeliveryGuarantee:
        given = self.file.data.get("delivery", "at-least-once")
        if given in list(DeliveryGuarantee):
            return DeliveryGuarantee(given)
        what = f"'delivery' must be {type_text(DeliveryGuarantee)}, not {checks.shown(given)}"
        self.problems.append(Problem("PEN-1003", what, where=("delivery",)))
        return DeliveryGuarantee.AT_LEAST_ONCE

    def _processing(self) -> Processing:
        given = self.file.data.get("processing", {})
        if isinstance(given, dict) and given.get("on_error") == "dead_letter":
            self.problems.append(
                Problem(
                    "PEN-1009",
                    'on_error = "dead_letter" is not supported yet: there is no dead-letter queue to put bad records in',
                    'choose "stop", or "skip" to leave bad records out and count them',
                    ("processing", "on_error"),
                )
            )
            given = {key: value for key, value in given.items() if key != "on_error"}
        return self._section(Processing, given, "[processing]", ("processing",)) or Processing()

    def _schemas(self) -> None:
        for place, entry in enumerate(self._entries("schemas", SchemaEntry)):
            topic = f" for the topic {entry.topic!r}" if entry else ""
            self.problems.append(
                Problem(
                    "PEN-1009",
                    f"[[schemas]]{topic} is not supported yet: rows would pass without being checked",
                    "remove the entry",
                    ("schemas", place),
                )
            )

    def _entries(self, key: str, model: type[M]) -> list[M | None]:
        given = self.file.data.get(key, [])
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            self.problems.append(Problem("PEN-1003", f"'{key}' must be a list of tables", f"write [[{key}]]", (key,)))
            return []
        return [self._section(model, each, f"[[{key}]]", (key, place)) for place, each in enumerate(given)]

    def _connectors(self, kind: Kind) -> dict[str, Any]:
        one, many = self.file.data.get(kind), self.file.data.get(f"{kind}s")
        if one is not None and many is not None:
            what = f"the file has both [{kind}] and [[{kind}s]]"
            self.problems.append(Problem("PEN-1002", what, f"make [{kind}] one of the [[{kind}s]]", (kind,)))
        found: dict[str, Any] = {}
        for label, where, given in (
            *([(f"[{kind}]", (kind,), one)] if one is not None else []),
            *((f"[[{kind}s]]", (f"{kind}s", n), each) for n, each in enumerate(many if isinstance(many, list) else [])),
        ):
            if not isinstance(given, dict):
                what, hint = f"'{kind}' must be a table", f"write [{kind}], or [[{kind}s]] for several"
                self.problems.append(Problem("PEN-1003", what, hint, where))
                continue
            found |= self._connector(kind, given, label, where)
        if many is not None and not isinstance(many, list):
            what, hint = f"'{kind}s' must be a list of tables", f"write [{kind}] for one, or [[{kind}s]] for several"
            self.problems.append(Problem("PEN-1003", what, hint, (f"{kind}s",)))
        elif one is None and not many:
            what, hint = f"the file needs a {kind}", f'[{kind}] and in it connector = "…"'
            self.problems.append(Problem("PEN-1004", what, hint))
        return found

    def _connector(self, kind: Kind, given: dict[str, Any], label: str, where: Where) -> dict[str, Any]:
        connector = given.get("connector")
        if not isinstance(connector, str):
            code, verb = ("PEN-1004", "needs") if connector is None else ("PEN-1003", "needs text in")
            names = ", ".join(sorted({entry.name for entry in registry.entries(kind)}))
            self.problems.append(Problem(code, f"{label} {verb} 'connector'", f"there are {names}", where))
            return {}
        before = len(self.problems)
        cls: type[Connector[Any]] | None = None
        try:
            cls = registry.load(kind, connector, self.file.path.parent)
        except ConfigError as error:
            self.problems.append(Problem(error.code, error.message, error.hint, (*where, "connector")))
        name = given.get("name", getattr(cls, "name", connector))
        if cls is not None or "name" in given:
            self.problems += checks.name_problems(f"'name' in {label}", name, (*where, "name"))
        if name in self.declared[kind]:
            what, hint = f"two {kind}s are named {name!r}", "give each a `name` of its own"
            self.problems.append(Problem("PEN-1003", what, hint, (*where, "name")))
        self.declared[kind].append(str(name))
        self.places[f"{kind}s", str(name)] = where
        options = {key: value for key, value in given.items() if key not in ("name", "connector")}
        if cls is None:
            return {}
        config = self._section(registry.config_of(cls), options, label, where, ("name", "connector"))
        if config is None or len(self.problems) > before:
            return {}
        try:
            return {name: cls(config)}
        except ConnectorError as error:
            self.problems.append(Problem(error.code, error.message, error.hint, where))
            return {}

    def _section(self, model: type[M], given: Any, label: str, where: Where, also: Sequence[str] = ()) -> M | None:
        """The section as its class, or None and what is wrong with it; `also` are keys that are valid besides its own."""
        if not isinstance(given, dict):
            self.problems.append(Problem("PEN-1003", f"{label} must be a table", where=where))
            return None
        try:
            # Strict, and as JSON: true is no number and "5" is none either, but text may be a path.
            return model.model_validate_json(
                json.dumps(given, default=str), strict=True, context={"base": self.file.path.parent}
            )
        except ValidationError as error:
            found = error.errors(include_url=False)
        except ConnectorError as error:
            self.problems.append(Problem(error.code, error.message, error.hint, where))
            return None
        told: set[Where] = set()
        for way, each in sorted(((_way(given, each), each) for each in found), key=lambda pair: len(pair[0])):
            # A value that fits no branch of a union is one mistake, not one per branch.
            if not any(way[: len(shorter)] == shorter for shorter in told):
                told |= {way} if way else set()
                self.problems.append(_from_pydantic(each, model, given, label, where, way, also))
        return None

    def _refuse(self) -> None:
        lines = {id(problem): self._line(problem) for problem in self.problems}
        self.problems.sort(key=lambda problem: lines[id(problem)])
        name = self.file.path.name
        places = [f"{name}:{lines[id(problem)]}: " for problem in self.problems]
        checks.refuse(self.problems, name, places)

    def _line(self, problem: Problem) -> int:
        way = problem.where
        return self.file.line((*self.places.get(way[:2], way[:2]), *way[2:]))


def _way(given: dict[str, Any], error: Any) -> Where:
    """The way to the key that an error is about, without the tags that pydantic adds for the branches of a union."""
    way: list[str | int] = []
    value: Any = given
    for place, part in enumerate(error["loc"]):
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            way.append(part)
        elif error["type"] == "missing" and place == len(error["loc"]) - 1:
            way.append(part)
    return tuple(way)


def _from_pydantic(
    error: Any, model: type[Config], given: dict[str, Any], label: str, where: Where, way: Where, also: Sequence[str]
) -> Problem:
    """One of pydantic's errors in our words: the key, what was expected, what stands there."""
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    key = ".".join(map(str, way))
    if not way:
        return Problem("PEN-1016", f"{label}: {_message(error)}", where=where)
    info = fields.get(str(way[0]))
    if error["type"] == "extra_forbidden":
        known = _keys_of(info.annotation) if info else (*fields, *also)
        return _unknown_key(str(way[-1]), f"'{way[0]}' of {label}" if info else label, known, (*where, *way))
    if error["type"] == "missing" and len(way) == 1 and info is not None:
        hint = f"{type_text(info.annotation, info.metadata)}: {info.description or ''}".rstrip(": ")
        return Problem("PEN-1004", f"{label} needs '{key}'", hint, where)
    if info is None or len(way) > 1 or error["type"] in ("value_error", "assertion_error"):
        return Problem("PEN-1003", f"'{key}' in {label}: {_message(error)}", where=(*where, *way))
    expected = type_text(info.annotation, info.metadata)
    hidden = tomlfile.is_secret(way) or "secret" in expected
    instead = "" if hidden else f", not {checks.shown(given[str(way[0])])}"
    return Problem("PEN-1003", f"'{key}' in {label} must be {_article(expected)}{instead}", where=(*where, *way))


def _message(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return tomlfile.without_password(
        message.replace("Input should be", "should be").replace("Field required", "is missing")
    )


def _keys_of(annotation: Any) -> list[str]:
    """The keys of the tables that an option may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(annotation.model_fields)
    return [key for argument in get_args(annotation) for key in _keys_of(argument)]


def _article(expected: str) -> str:
    return expected if expected.startswith(('"', "true")) else f"a {expected}"


def _unknown_key(key: str, label: str, known: Iterable[str], where: Where) -> Problem:
    near = checks.nearest(key, known)
    guess = f"; did you mean '{near}'?" if near else ""
    hint = "" if near else f"the keys are {', '.join(known)}" if known else "it has no options"
    return Problem("PEN-1002", f"unknown key '{key}' in {label}{guess}", hint, where)
