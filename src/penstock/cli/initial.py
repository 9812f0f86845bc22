"""`penstock init`: a pipeline file to start from, with a comment for each option."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.text import Text

from penstock.config import type_text
from penstock.errors import ConfigError, ConnectorError
from penstock.pipeline import Pipeline, registry

Kind = Literal["source", "sink"]


def write(
    file: Path, source: str | None, sink: str | None, name: str | None, given: list[str], console: Console
) -> None:
    """Write the file, and say what is wrong with it, if anything is."""
    if file.exists():
        raise ConfigError(f"{file} exists already", hint="name another file")
    values = dict(_option(each) for each in given)
    chosen: dict[Kind, str] = {"source": source or _ask("source"), "sink": sink or _ask("sink")}
    lines = [
        f"connector_name = {json.dumps(name or file.resolve().parent.name or 'pipeline')}",
        "# What is promised: at-least-once, or exactly-once where source and sink can keep it.",
        '# delivery = "exactly-once"',
        "",
        "[processing]",
        "# The console, metrics and health on http://127.0.0.1:8601",
        "metrics_port = 8601",
        "",
    ]
    for kind, connector in chosen.items():
        lines += [*_section(kind, connector, values), ""]
    unknown = [each for each in values if each.partition(".")[0] not in chosen]
    if unknown:
        raise ConfigError(f"--set {unknown[0]}", hint="it begins with source. or sink.: --set source.rows=100")
    _save(file, "\n".join(lines), console)


def write_from_danube(file: Path, origin: Path, console: Console) -> None:
    """Write the file from one of Danube Connect, and list what could not be carried over."""
    from penstock.cli import from_danube

    if file.exists():
        raise ConfigError(f"{file} exists already", hint="name another file")
    moved = from_danube.convert(origin)
    _save(file, moved.text(origin.name), console)
    if moved.notes:
        console.print(Text("not carried over, or different here (also at the top of the file):", style="yellow"))
        for note in moved.notes:
            console.print(Text(f"- {note}"), soft_wrap=True)


def _save(file: Path, text: str, console: Console) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    console.print(Text.assemble(("wrote ", "dim"), str(file)), soft_wrap=True)
    try:
        Pipeline.from_toml(file)
    except ConnectorError as error:
        console.print(Text(f"to correct in it: {error}", style="yellow"), soft_wrap=True)
    else:
        console.print(Text(f"next: penstock check {file}, then penstock run {file}"), soft_wrap=True)


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}", hint="it is NAME=VALUE: --set source.rows=100")
    return name, value


def _ask(kind: Kind) -> str:
    names = sorted({entry.name for entry in registry.entries() if entry.kind == kind})
    return str(typer.prompt(f"Which {kind}? ({', '.join(names)})"))


def _section(kind: Kind, connector: str, values: Mapping[str, str]) -> list[str]:
    config = registry.config_of(registry.load(kind, connector))
    lines = [f"[{kind}]", f"connector = {json.dumps(connector)}"]
    for name, field in config.model_fields.items():
        shown = field.alias or name
        asked = values.get(f"{kind}.{shown}")
        if asked is None and field.is_required():
            asked = str(typer.prompt(f"{kind}.{shown} ({type_text(field.annotation, field.metadata)})"))
        lines += ["", *(f"# {line}" for line in (field.description or "").splitlines() if line)]
        lines.append(f"{shown} = {_value(asked)}" if asked is not None else f"# {shown} = {_default(field)}")
    return lines


def _value(text: str) -> str:
    """As TOML: what reads as a value is one, and anything else is text."""
    import tomllib

    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return json.dumps(text, ensure_ascii=False)
    return text


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "…"
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError):
        return json.dumps(str(value), ensure_ascii=False)
