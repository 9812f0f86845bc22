"""
Writes the reference pages and the JSON Schema from the config classes: `python -m penstock.reference docs [--check]`.

With `--check` nothing is written, and stale files are listed.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock import errors, formats
from penstock.config import Config, Secret, type_text
from penstock.pipeline import registry
from penstock.pipeline.file import SHARED
from penstock.pipeline.options import Processing, RouteEntry, SchemaEntry, TelemetryOptions
from penstock.pipeline.registry import BUILT_IN, Entry
from penstock.pipeline.routing import OnError
from penstock.pipeline.schemas import RegistryRef
from penstock.remedies import REMEDIES
from penstock.runtime.telemetry import boards, names
from penstock.schema.registry import BUILT_IN as REGISTRIES
from penstock.schema.registry import registry_type
from penstock.sink import DeliveryGuarantee, SinkConnector
from penstock.source import Connector

_GENERATED = "<!-- Written by `python -m penstock.reference docs`; edit the classes it is made from. -->\n"

_ERRORS = [
    "Each error begins with its code; the first digit tells what happens next. An error says itself what to do, after an",
    "arrow, and knows better than this list, which has to do for every case of a code.",
]

_BEGIN = "<!-- Written by `python -m penstock.reference docs`, up to the next mark; edit the class it is made from. -->"
_END = "<!-- From here on written by hand. -->"


def files(directory: Path) -> dict[str, str]:
    """Every generated file, by its path below the docs directory; of a format's page, only the options are."""
    names = sorted({entry.name for entry in BUILT_IN.values()})
    return {
        **{f"connectors/{name}.md": connector_page(name) for name in names},
        **{f"formats/{name}.md": format_page(name, directory / "formats" / f"{name}.md") for name in formats.BUILT_IN},
        "configuration.md": configuration_page(),
        "errors.md": errors_page(),
        "operating.md": operating_page(directory / "operating.md"),
        "grafana/dashboard.json": boards.dashboard(),
        "grafana/alerts.yml": boards.alert_rules(),
        "pipeline.schema.json": json.dumps(file_schema(), indent=2, ensure_ascii=False) + "\n",
    }


def stale(directory: Path) -> list[str]:
    """The generated files that are missing, differ, or belong to no connector or format any more."""
    fresh = files(directory)
    found = [name for name, text in fresh.items() if not _holds(directory / name, text)]
    pages = {f"{kind}/{path.name}" for kind in ("connectors", "formats") for path in (directory / kind).glob("*.md")}
    return sorted([*found, *(pages - set(fresh))])


def write(directory: Path) -> list[str]:
    """Write what is stale; the names of what was written or removed."""
    fresh, names = files(directory), stale(directory)
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in fresh:
            path.write_text(fresh[name], encoding="utf-8")
        else:
            path.unlink()
    return names


def connector_page(name: str) -> str:
    """The page of a system: its source, its sink, or both."""
    entries = [entry for entry in BUILT_IN.values() if entry.name == name]
    return (
        "\n".join([_GENERATED, f"# {name}", *(line for entry in entries for line in _connector_section(entry))]) + "\n"
    )


def format_page(name: str, path: Path) -> str:
    """The page of a wire format: as it was written, with the options as they are."""
    format, extra = formats.load(name), formats.BUILT_IN[name].extra
    whole = path.read_text(encoding="utf-8") if path.exists() else f"# {name}\n\n{_BEGIN}\n{_END}\n"
    before, _, rest = whole.partition(_BEGIN)
    needs = [f"Needs `pip install 'penstock[{extra}]'`.", ""] if extra else []
    options = [inspect.getdoc(format) or "", "", *needs, *_options(format.options_type)]
    return "\n".join([before + _BEGIN, "", *options, "", _END + rest.partition(_END)[2]])


def operating_page(path: Path) -> str:
    """The page about operating: as it was written, with the metrics as they are."""
    whole = path.read_text(encoding="utf-8") if path.exists() else f"# Operating a pipeline\n\n{_BEGIN}\n{_END}\n"
    before, _, rest = whole.partition(_BEGIN)
    return "\n".join([before + _BEGIN, "", names.markdown(), "", _END + rest.partition(_END)[2]])


def _top() -> list[tuple[str, str, str, str]]:
    """What is at the top of the file, before its first section."""
    return [
        (
            "connector_name",
            "text",
            "required",
            "Name of the pipeline; `CONNECTOR_NAME` in the environment overrides it.",
        ),
        (
            "delivery",
            type_text(DeliveryGuarantee),
            '`"at-least-once"`',
            "What is promised; checked before anything starts.",
        ),
        *(
            (key, "text", "none", f"{text}; `{key.upper()}` in the environment overrides it.")
            for key, text in SHARED.items()
        ),
    ]


def configuration_page() -> str:
    """What a pipeline file holds besides its connectors."""
    common = [
        ("connector", "text", "required", 'Name of the connector, or `"package.module:Class"` for one of your own.'),
        ("name", "text", "the connector's", "Name by which routes, metrics and the state know it; unique."),
        ("on_error", type_text(OnError), "as `[processing]` says", "What to do with bad records of this source."),
    ]
    sections = (("[processing]", Processing), ("[telemetry]", TelemetryOptions), ("[[routes]]", RouteEntry))
    lines = [
        _GENERATED,
        "# The pipeline file",
        "",
        "One TOML file, named on the command line or by `CONNECTOR_CONFIG_PATH`. Relative paths in it are taken from its own",
        "directory, and so are modules named as `package.module:name`. Unknown keys are refused, and all errors are shown at",
        "once. An editor that knows JSON Schema can use [pipeline.schema.json](pipeline.schema.json).",
        "",
        'Secrets are references, never text: `{ env = "NAME" }` or `{ file = "path" }`. They are read where they are used.',
        "",
        *_table(_top()),
        "",
        "## `[source]`, `[[sources]]`, `[sink]`, `[[sinks]]`",
        "",
        "`[source]` is short for one `[[sources]]`, `[sink]` for one `[[sinks]]`. Besides the connector's own options:",
        "",
        *_table(common),
        "",
        *_connector_list(),
        "",
        *(line for name, model in sections for line in (*_section(name, model), "")),
        "Every route that matches applies. A row reaches one sink under one topic once, by the first route that leads there.",
        "",
        *_section("[[schemas]]", SchemaEntry),
        "",
        f"Options of the format go beside these: {_format_links()}.",
        "",
        "## `[registry]`",
        "",
        "Where schemas are kept by subject and version: see [registries](registries.md).",
        "",
        *_table([("type", " or ".join(f'`"{name}"`' for name in REGISTRIES), '`"embedded"`', "Which registry.")]),
        *(line for name in REGISTRIES for line in _registry_options(name)),
    ]
    return "\n".join(lines) + "\n"


def _format_links() -> str:
    return " ".join(f"[`{name}`](formats/{name}.md)" for name in sorted(formats.BUILT_IN))


def errors_page() -> str:
    """Every code, grouped by what happens next."""
    kinds = [errors.ConfigError, errors.RetryableError, errors.DataError, errors.SchemaError, errors.FatalError]
    lines = [_GENERATED, "# Errors", "", *_ERRORS]
    for digit, kind in enumerate(kinds, 1):
        lines += [
            "",
            f"## PEN-{digit}xxx: `{kind.__name__}`",
            "",
            f"{inspect.getdoc(kind)} Action: {errors.ACTIONS[kind]}.",
        ]
        lines += ["", "| code | meaning | what to do |", "|---|---|---|"]
        lines += [
            f"| {code} | {_cell(text)} | {_cell(REMEDIES[code])} |"
            for code, text in errors.CODES.items()
            if code.startswith(f"PEN-{digit}")
        ]
    special = [
        f"`{kind.__name__}` ({kind.default_code}): {inspect.getdoc(kind)}"
        for kind in (errors.StagingLost, errors.Fenced)
    ]
    return "\n".join([*lines, "", *special]) + "\n"


def file_schema() -> dict[str, Any]:
    """JSON Schema of the whole file."""
    definitions: dict[str, Any] = {}
    connectors: dict[str, list[Any]] = {"source": [], "sink": []}
    for entry in BUILT_IN.values():
        options = _schema(registry.config_of(_load(entry)), definitions)
        options["properties"] = {
            "connector": {"const": entry.name},
            "name": {"type": "string"},
            **({"on_error": {"enum": list(get_args(OnError))}} if entry.kind == "source" else {}),
            **options["properties"],
        }
        options["required"] = ["connector", *options.get("required", ())]
        title = f"{entry.name}_{entry.kind}"
        definitions[title] = {**options, "title": title}
        connectors[str(entry.kind)].append({"$ref": f"#/$defs/{title}"})
    own = {"type": "object", "properties": {"connector": {"type": "string", "pattern": ":"}}, "required": ["connector"]}
    definitions |= {kind: {"anyOf": [*known, own]} for kind, known in connectors.items()}
    sections: dict[str, type[Config]] = {
        "processing": Processing,
        "telemetry": TelemetryOptions,
        "route": RouteEntry,
        "schema": SchemaEntry,
    }
    for title, model in sections.items():
        definitions[title] = _schema(model, definitions)
    for name in formats.BUILT_IN:  # the options of a format go beside those of the entry
        known = _schema(formats.load(name).options_type, definitions).get("properties", {})
        definitions["schema"]["properties"] = {**known, **definitions["schema"]["properties"]}
    definitions["registry"] = {"anyOf": [_registry_schema(name, definitions) for name in REGISTRIES]}
    many = {
        kind: {"type": "array", "items": {"$ref": f"#/$defs/{kind}"}} for kind in ("source", "sink", "route", "schema")
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Penstock pipeline",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "connector_name": {"type": "string"},
            "delivery": {"enum": [str(each) for each in DeliveryGuarantee]},
            **{key: {"type": "string"} for key in SHARED},
            "processing": {"$ref": "#/$defs/processing"},
            "telemetry": {"$ref": "#/$defs/telemetry"},
            "registry": {"$ref": "#/$defs/registry"},
            "schemas": many["schema"],
            "source": {"$ref": "#/$defs/source"},
            "sources": many["source"],
            "routes": many["route"],
            "sink": {"$ref": "#/$defs/sink"},
            "sinks": many["sink"],
        },
        "$defs": dict(sorted(definitions.items())),
    }


def _registry_schema(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    options = _schema(registry_type(name).config_type, definitions)
    options["properties"] = {"type": {"const": name}, **options.get("properties", {})}
    if name != RegistryRef.type:
        options["required"] = ["type", *options.get("required", ())]
    return options


def options_of(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The options of a config class by the names that the file uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` say which are stale."""
    places = [each for each in arguments if each != "--check"]
    if len(places) != 1:
        print("usage: python -m penstock.reference DIRECTORY [--check]", file=sys.stderr)
        return 2
    directory = Path(places[0])
    if "--check" not in arguments:
        for name in write(directory):
            print(f"wrote {directory / name}")
        return 0
    names = stale(directory)
    for name in names:
        print(f"stale: {directory / name}")
    if names:
        print(f"run: python -m penstock.reference {directory}")
    return 1 if names else 0


def _load(entry: Entry) -> type[Connector[Any]]:
    assert entry.kind is not None
    return registry.load(entry.kind, entry.name)


def _connector_section(entry: Entry) -> Iterator[str]:
    connector = _load(entry)
    module = sys.modules[entry.target.partition(":")[0]]
    yield from ["", f"## {str(entry.kind).capitalize()}", "", inspect.getdoc(module) or "", ""]
    yield inspect.getdoc(connector) or ""
    if issubclass(connector, SinkConnector):
        yield from ["", f"Capabilities: {connector.capabilities}."]
    if entry.extra:
        yield from ["", f"Needs `pip install 'penstock[{entry.extra}]'`."]
    yield from ["", *_options(registry.config_of(connector))]


def _connector_list() -> Iterator[str]:
    for kind in ("source", "sink"):
        names = [f"[{entry.name}](connectors/{entry.name}.md)" for entry in BUILT_IN.values() if entry.kind == kind]
        yield f"{kind.capitalize()}s: {', '.join(names)}.  "


def _registry_options(name: str) -> list[str]:
    model = registry_type(name).config_type
    return ["", f"Options of `{name}`:", "", *_options(model)] if model.model_fields else []


def _section(title: str, model: type[Config]) -> list[str]:
    return [f"## `{title}`", "", inspect.getdoc(model) or "", "", *_options(model)]


def _options(model: type[BaseModel]) -> list[str]:
    shared = model.shared if issubclass(model, Config) else {}
    rows = [
        (
            name,
            type_text(info.annotation, info.metadata),
            _quoted(shared.get(name) or default_of(info)),
            " ".join((info.description or "").split()),
        )
        for name, info in options_of(model).items()
    ]
    return _table(rows) if rows else ["It has no options."]


def _table(rows: Iterable[tuple[str, str, str, str]]) -> list[str]:
    lines = [f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(text)} |" for name, kind, default, text in rows]
    return ["| option | type | default | meaning |", "|---|---|---|---|", *lines]


def default_of(info: FieldInfo) -> str:
    """An option's default as the file would write it, `none`, or `required`."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None or value in ([], {}, ()):
        return "none"
    return _toml(value)


def _quoted(default: str) -> str:
    return default if default in ("none", "required") else f"`{default}`"


def _toml(value: Any) -> str:
    if isinstance(value, Enum):
        return _toml(value.value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(each)}' for key, each in value.items())} }}"
    if isinstance(value, Secret):
        return _toml(value.model_dump(mode="json", exclude_none=True))
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _schema(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/$defs/{model}")
    definitions |= schema.pop("$defs", {})
    schema.setdefault("properties", {})
    if issubclass(model, Config) and "required" in schema:  # what the root of the file may give
        schema["required"] = [name for name in schema["required"] if name not in model.shared]
    return schema


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
