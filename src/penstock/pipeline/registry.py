"""
Finds connectors by name and imports them only then.

Built in, from the entry-point group `penstock.connectors` (a name that a source and a sink share is written `name.source`
and `name.sink` there), or named in the file as `package.module:Class`, beside which modules of its own may lie.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.sink import SinkConnector
from penstock.source import Connector, SourceConnector

Kind = Literal["source", "sink"]
GROUP = "penstock.connectors"

_BASES: dict[Kind, type[Connector[Any]]] = {"source": SourceConnector, "sink": SinkConnector}


@dataclass(frozen=True)
class Entry:
    """A connector that can be named, imported or not."""

    kind: Kind | None
    """None: an entry point that has not been imported."""
    name: str
    target: str
    """`module:Class`."""
    extra: str = ""
    modules: tuple[str, ...] = ()
    """What the extra installs."""
    built_in: bool = True


BUILT_IN: dict[tuple[Kind, str], Entry] = {
    (entry.kind, entry.name): entry
    for entry in (
        Entry("source", "generator", "penstock.connectors.generator:Generator"),
        Entry("source", "files", "penstock.connectors.files:Files"),
        Entry(
            "source",
            "postgres_cdc",
            "penstock.connectors.postgres_cdc:PostgresCdc",
            "postgres-cdc",
            ("psycopg", "adbc_driver_postgresql"),
        ),
        Entry(
            "source",
            "postgres_capture",
            "penstock.connectors.postgres_capture.source:PostgresCapture",
            "postgres-capture",
            ("psycopg", "adbc_driver_postgresql"),
        ),
        Entry("source", "kafka", "penstock.connectors.kafka.source:Kafka", "kafka", ("confluent_kafka",)),
        Entry("source", "sql_poll", "penstock.connectors.sql_poll:SqlPoll"),
        Entry(
            "source", "webhook", "penstock.connectors.webhook:Webhook", "webhook", ("httptools", "jwt", "cryptography")
        ),
        Entry("source", "http_poll", "penstock.connectors.http_poll:HttpPoll", "http-poll", ("httpx",)),
        Entry("sink", "http", "penstock.connectors.http:HttpSink", "http", ("httpx",)),
        Entry("source", "mqtt", "penstock.connectors.mqtt.source:Mqtt", "mqtt", ("paho",)),
        Entry("sink", "mqtt", "penstock.connectors.mqtt.sink:MqttSink", "mqtt", ("paho",)),
        Entry("source", "danube", "penstock.connectors.danube:Danube", "danube", ("danube", "grpc")),
        Entry("sink", "danube", "penstock.connectors.danube:DanubeSink", "danube", ("danube", "grpc")),
        Entry("source", "tcp", "penstock.connectors.tcp:Tcp"),
        Entry("source", "websocket", "penstock.connectors.websocket:Websocket", "websocket", ("websockets",)),
        Entry("sink", "console", "penstock.connectors.console:Console"),
        Entry("sink", "files", "penstock.connectors.files.sink:FilesSink"),
        Entry(
            "sink",
            "postgres",
            "penstock.connectors.postgres:Postgres",
            "postgres",
            ("psycopg", "adbc_driver_postgresql"),
        ),
        Entry("sink", "kafka", "penstock.connectors.kafka.sink:KafkaSink", "kafka", ("confluent_kafka",)),
        Entry("sink", "delta", "penstock.connectors.delta:Delta", "delta", ("deltalake",)),
        Entry("sink", "iceberg", "penstock.connectors.iceberg:Iceberg", "iceberg", ("pyiceberg", "sqlalchemy")),
    )
    if entry.kind is not None
}


def entries(kind: Kind | None = None) -> list[Entry]:
    """Everything that can be named, nothing imported; third-party ones of unknown kind are listed under both."""
    found = [*BUILT_IN.values(), *_entry_points()]
    return [entry for entry in found if kind is None or entry.kind in (kind, None)]


def load(kind: Kind, name: str, base: Path | None = None) -> type[Connector[Any]]:
    """The class of a connector; `base` is the pipeline file's directory, where `module:Class` is looked for first."""
    if ":" in name:
        return _checked(kind, name, load_object(name, base))
    entry = _find(kind, name)
    if entry is None:
        raise _unknown(kind, name)
    missing = [module for module in entry.modules if importlib.util.find_spec(module) is None]
    if missing:
        raise _missing_extra(entry, missing[0])
    try:
        return _checked(kind, name, load_object(entry.target))
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise _missing_extra(entry, str(error.__cause__.name)) from error
        raise


def source_type(name: str, base: Path | None = None) -> type[SourceConnector[Any]]:
    """The class of a source."""
    found = load("source", name, base)
    assert issubclass(found, SourceConnector)
    return found


def config_of(connector: type[Connector[Any]]) -> type[Config]:
    """The class of a connector's options; one that declares none takes none."""
    return getattr(connector, "config_type", Config)


def load_object(spec: str, base: Path | None = None) -> Any:
    """What `module:name` names; with `base`, that directory comes first on the path, as if a script ran there."""
    module_name, _, attribute = spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ConfigError(f"{spec!r} is not of the form package.module:name", code="PEN-1006")
    if base is not None:
        _add_to_path(base, spec, module_name)
    module = _import(spec, module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = _nearest(part, dir(found))
            raise ConfigError(
                f"module {module_name} ({getattr(module, '__file__', 'built in')}) has no {attribute!r}",
                code="PEN-1006",
                hint=f"did you mean {near!r}?" if near else "",
            )
        found = getattr(found, part)
    return found


def third_party_modules(objects: Iterable[Any], base: Path | None = None) -> list[Path]:
    """
    The files and package directories that executors need besides Penstock, to be shipped to them.

    They hold the classes and functions among `objects`, and what else was imported from `base` if one of those is there.
    """
    tops = {getattr(each, "__module__", "").partition(".")[0] for each in objects}
    found = {path for top in tops - {"penstock", "__main__", "builtins"} if (path := _home(top))}
    if any(path.parent == base for path in found):
        found |= {path for top in list(sys.modules) if (path := _home(top)) and path.parent == base}
    return sorted(found)


def _find(kind: Kind, name: str) -> Entry | None:
    if (kind, name) in BUILT_IN:
        return BUILT_IN[kind, name]
    return next((entry for entry in _entry_points() if entry.name == name and entry.kind in (kind, None)), None)


def _entry_points() -> Iterator[Entry]:
    for point in entry_points(group=GROUP):
        name, _, suffix = point.name.partition(".")
        kinds: dict[str, Kind | None] = {"source": "source", "sink": "sink", "": None}
        if suffix in kinds:
            yield Entry(kinds[suffix], name, point.value, built_in=False)


def _add_to_path(base: Path, spec: str, module_name: str) -> None:
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
        importlib.invalidate_caches()
    top = module_name.partition(".")[0]
    here = next((path for path in (base / top, base / f"{top}.py") if path.exists()), None)
    loaded = _home(top)
    if here and loaded and loaded != here:
        raise ConfigError(
            f"cannot import {spec!r}: {top} is {here} here, but {loaded} was imported before",
            code="PEN-1006",
            hint="give one of the two modules another name",
        )


def _import(spec: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a stranger's module may fail in any way, and the file's reader must know how
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            reason = "there is no such module"
            hint = f"put {module_name.partition('.')[0]}.py beside the pipeline file, or install the package"
        else:
            reason, hint = f"{type(error).__name__}: {error}", "import it by itself to see where it fails"
        raise ConfigError(f"cannot import {spec!r}: {reason}", code="PEN-1006", hint=hint) from error


def _home(top: str) -> Path | None:
    """The file or package directory of an imported top-level module."""
    module = sys.modules.get(top)
    if module is None or "." in top:
        return None
    if file := getattr(module, "__file__", None):
        path = Path(os.path.abspath(file))
        return path.parent if path.name == "__init__.py" else path
    paths = list(getattr(module, "__path__", ()))
    return Path(os.path.abspath(paths[0])) if paths else None


def _checked(kind: Kind, name: str, found: Any) -> type[Connector[Any]]:
    if inspect.isclass(found) and issubclass(found, _BASES[kind]):
        return found
    other = next((each for each, base in _BASES.items() if inspect.isclass(found) and issubclass(found, base)), None)
    raise ConfigError(
        f"{name!r} is {f'a {other}, not a {kind}' if other else 'not a connector class'}",
        code="PEN-1006",
        hint=f"a {kind} derives from {_BASES[kind].__module__}.{_BASES[kind].__name__}",
    )


def _unknown(kind: Kind, name: str) -> ConfigError:
    names = sorted({entry.name for entry in entries(kind)})
    near = _nearest(name, names)
    other: Kind = "sink" if kind == "source" else "source"
    if (other, name) in BUILT_IN:
        return ConfigError(f"{name!r} is a {other}, not a {kind}", code="PEN-1006", hint=f"{kind}s: {', '.join(names)}")
    return ConfigError(
        f"unknown {kind} connector {name!r}" + (f"; did you mean {near!r}?" if near else ""),
        code="PEN-1006",
        hint=f'there are {", ".join(names)}; one of your own is written "package.module:Class"',
    )


def _missing_extra(entry: Entry, module: str) -> ConfigError:
    if not entry.built_in:
        hint = f"install the package {module} that it needs"
    elif entry.extra:
        hint = f"pip install 'penstock[{entry.extra}]'"
    else:
        hint = "install Penstock again"
    return ConfigError(
        f"the connector {entry.name!r} needs the module {module}, which is not installed", code="PEN-1007", hint=hint
    )


def _nearest(word: str, words: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(words), n=1)), None)
