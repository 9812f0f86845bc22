"""Reads a pipeline file and gathers everything that is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from penstock import formats
from penstock.config import Config, type_text
from penstock.errors import ConfigError, ConnectorError, SchemaError
from penstock.pipeline import Pipeline, checks, registry, schemas
from penstock.pipeline import toml as tomlfile
from penstock.pipeline.checks import Problem
from penstock.pipeline.options import Processing, RouteEntry, SchemaEntry, TelemetryOptions
from penstock.pipeline.registry import Kind
from penstock.pipeline.routing import OnError, Router
from penstock.pipeline.schemas import RegistryRef, TopicSchema, TopicSchemas
from penstock.pipeline.toml import TomlFile, Where
from penstock.schema.registry import registry_type
from penstock.sink import DeliveryGuarantee
from penstock.source import Connector

M = TypeVar("M", bound=Config)

SHARED = {"danube_service_url": "Address of the Danube broker, for all sections that have no `url` of their own"}
"""Keys at the root that are for an option of several sections; a variable of that name in capitals overrides them."""

_SECTIONS = (
    "connector_name", "delivery", "processing", "telemetry", "registry", "schemas", "source", "sources", "sink", "sinks",
    "routes", *SHARED,
)  # fmt: skip


class Reader:
    """Reads one file and gathers everything that is wrong with it."""

    def __init__(self, file: TomlFile) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.places: dict[Where, Where] = {}
        """Where the file has each named connector."""
        self.declared: dict[Kind, list[str]] = {"source": [], "sink": []}
        self.on_error: dict[str, Any] = {}
        self._taken: set[str] = set()

    def pipeline(self) -> Pipeline:
        data = self.file.data
        for key in data:
            if key not in _SECTIONS:
                self.problems.append(self._unknown(key))
        processing = self._processing()
        sources = self._connectors("source")
        sinks = self._connectors("sink")
        topics = self._schemas()
        routes = [entry.route() if entry else None for entry in self._entries("routes", RouteEntry)]
        names = list(self.declared["sink"])  # what takes dead letters takes rows only if a route says so
        rest = [name for name in names if name != processing.dead_letter_sink]
        router = Router(tuple(route for route in routes if route), tuple(rest or names), processing.unrouted)
        found = Pipeline(
            self._name(),
            sources,
            sinks,
            router,
            self._delivery(),
            processing,
            topics,
            self.on_error,
            self.file.path,
            self._telemetry(),
        )
        self.problems += checks.route_problems(routes, self.declared["source"], self.declared["sink"], found.base)
        self.problems += checks.sink_problems(found)
        self.problems += checks.evolution_problems(found)
        self.problems += checks.letter_problems(found.processing.dead_letter_sink, self.declared["sink"])
        self.problems += checks.letter_store_problems(found)
        self.problems += checks.delivery_problems(found)
        for key in SHARED:
            if key in data and key not in self._taken:
                what, hint = f"nothing in the file uses '{key}'", "leave it out, or check the names of the connectors"
                self.problems.append(Problem("PEN-1002", what, hint, (key,)))
        self._refuse()
        return found

    def _unknown(self, key: str) -> Problem:
        found = _unknown_key(key, "the file", _SECTIONS, (key,))
        if "danube_service_url" not in self.file.data:
            return found
        return replace(found, hint=f"penstock init NEW.toml --from-danube {self.file.path.name} rewrites such a file")

    def _shared(self, model: type[Config], given: Any) -> Any:
        """A section, with what the root says for options that it leaves out."""
        for option, key in model.shared.items() if isinstance(given, dict) else ():
            self._taken.add(key)
            value = os.environ.get(key.upper()) or self.file.data.get(key)
            if value is not None:
                given = {option: value, **given}
        return given

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
        return self._section(Processing, given, "[processing]", ("processing",)) or Processing()

    def _telemetry(self) -> TelemetryOptions:
        given = self.file.data.get("telemetry", {})
        return self._section(TelemetryOptions, given, "[telemetry]", ("telemetry",)) or TelemetryOptions()

    def _registry(self) -> RegistryRef:
        given = self.file.data.get("registry", {})
        if not isinstance(given, dict) or not isinstance(given.get("type", "embedded"), str):
            self.problems.append(Problem("PEN-1003", "[registry] must be a table with a `type`", where=("registry",)))
            return RegistryRef()
        name = given.get("type", "embedded")
        try:
            model = registry_type(name).config_type
        except ConfigError as error:
            self.problems.append(Problem(error.code, error.message, error.hint, ("registry", "type")))
            return RegistryRef()
        options = self._shared(model, {key: value for key, value in given.items() if key != "type"})
        config = self._section(model, options, "[registry]", ("registry",), ("type",))
        return RegistryRef(name, config)

    def _schemas(self) -> TopicSchemas:
        given = self.file.data.get("schemas", [])
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            what = "'schemas' must be a list of tables"
            self.problems.append(Problem("PEN-1003", what, "write [[schemas]]", ("schemas",)))
            return TopicSchemas()
        read = [self._schema(each, ("schemas", place)) for place, each in enumerate(given)]
        entries = [each for each in read if each is not None]
        if len(entries) == len(read):
            for place, what, hint in schemas.problems(entries):
                self.problems.append(Problem("PEN-1020", what, hint, ("schemas", place)))
        return TopicSchemas(tuple(entries), self._registry())

    def _schema(self, given: dict[str, Any], where: Where) -> TopicSchema | None:
        """An entry's own keys and its format's, which are in one table."""
        own = {info.alias or name for name, info in SchemaEntry.model_fields.items()}
        name = given.get("schema_type")
        try:
            model = formats.load(name).options_type if isinstance(name, str) else Config
        except ConfigError as error:
            self.problems.append(Problem(error.code, error.message, error.hint, (*where, "schema_type")))
            return None
        mine = {key: value for key, value in given.items() if key in own}
        entry = self._section(SchemaEntry, mine, "[[schemas]]", where, tuple(model.model_fields))
        rest = {key: value for key, value in given.items() if key not in own or key in model.model_fields}
        options = self._section(model, rest, "[[schemas]]", where, tuple(own))
        if entry is None or options is None:
            return None
        try:
            return TopicSchema(entry, options, schemas.read_schema(entry, options))
        except (ConfigError, SchemaError) as error:
            self.problems.append(Problem(error.code, error.message, error.hint, (*where, "schema_file")))
            return None

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
        beside = ("name", "connector", *(("on_error",) if kind == "source" else ()))
        if kind == "source" and (on_error := self._on_error(given, label, where)):
            self.on_error[str(name)] = on_error
        options = {key: value for key, value in given.items() if key not in beside}
        if cls is None:
            return {}
        model = registry.config_of(cls)
        config = self._section(model, self._shared(model, options), label, where, beside)
        if config is None or len(self.problems) > before:
            return {}
        try:
            return {name: cls(config)}
        except ConnectorError as error:
            self.problems.append(Problem(error.code, error.message, error.hint, where))
            return {}

    def _on_error(self, given: dict[str, Any], label: str, where: Where) -> Any:
        value = given.get("on_error")
        if value is None or value in get_args(OnError):
            return value
        what = f"'on_error' in {label} must be {type_text(OnError)}, not {checks.shown(value)}"
        self.problems.append(Problem("PEN-1003", what, where=(*where, "on_error")))
        return None

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
    """One of pydantic's errors in our words: the key, what was expected, what was found."""
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
