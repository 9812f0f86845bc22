"""`penstock init`: a pipeline file to start from, with a comment for each option."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.text import Text

from penstock.config import type_text
from penstock.errors import ConfigError, ConnectorError
from penstock.pipeline import Pipeline, registry

Kind = Literal["source", "sink"]

SCHEMAS = (
    "# Messages (kafka, mqtt, webhook …) stay bytes until a schema says how to decode them: docs/messages.md.",
    "# [[schemas]]",
    '# topic = "/in"',
    '# schema_type = "json"',
    "",
)

_LONG = 80
"""Of words that say what a value looks like: more does not help."""

EXACTLY_ONCE = 'delivery = "exactly-once"'


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
        "",
        "# What is promised: exactly-once where source and sink can keep it, else at-least-once.",
        EXACTLY_ONCE,
        "",
        "[processing]",
        "# The console, metrics and health on http://127.0.0.1:8601",
        "metrics_port = 8601",
        "",
    ]
    for kind, connector in chosen.items():
        lines += [*_section(kind, connector, values), ""]
    if values:  # what no section has taken
        first = next(iter(values))
        options = [name for name in chosen if first.startswith(f"{name}.")]
        known = f"penstock connectors {chosen[options[0]]} lists its options" if options else ""
        raise ConfigError(
            f"--set {first}: there is no such option",
            hint=known or "it begins with source. or sink.: --set source.rows=100",
        )
    _save(file, "\n".join([*lines, *SCHEMAS]), console)


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
    wrong = _refused(file)
    if wrong is not None and EXACTLY_ONCE in text:
        # Not every pair can promise it. The reason is kept beside the line, for a reader who wants more.
        file.write_text(
            text.replace(EXACTLY_ONCE, f'delivery = "at-least-once"    # {_reason(wrong)}'), encoding="utf-8"
        )
        if (still := _refused(file)) is not None:
            file.write_text(text, encoding="utf-8")
            wrong = still
        else:
            console.print(Text(f"delivery is at-least-once: {_reason(wrong)}", style="yellow"), soft_wrap=True)
            wrong = None
    if wrong is not None:
        console.print(Text(f"to correct in it: {wrong}", style="yellow"), soft_wrap=True)
    else:
        console.print(Text(f"next: penstock check {file}, then penstock run {file}"), soft_wrap=True)


def _refused(file: Path) -> ConnectorError | None:
    try:
        Pipeline.from_toml(file)
    except ConnectorError as error:
        return error
    return None


def _reason(error: ConnectorError) -> str:
    """The first that is wrong, without its place in the file."""
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    return re.sub(r"^\S+:\d+: (PEN-\d+ )?", "", lines[min(1, len(lines) - 1)])


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}", hint="it is NAME=VALUE: --set source.rows=100")
    return name, value


def _ask(kind: Kind) -> str:
    names = sorted({entry.name for entry in registry.entries() if entry.kind == kind})
    return _answer(f"Which {kind}? ({', '.join(names)})", f"--{kind} NAME: one of {', '.join(names)}")


def _answer(question: str, instead: str) -> str:
    """Ask a person; where there is none, say how to do without."""
    try:
        return str(typer.prompt(question))
    except typer.Abort as error:
        if sys.stdin.isatty():
            raise
        raise ConfigError("there is nobody to ask, and not all that is needed is given", hint=instead) from error


def _section(kind: Kind, connector: str, values: dict[str, str]) -> list[str]:
    """The lines of a section; takes its options out of `values`."""
    config = registry.config_of(registry.load(kind, connector))
    lines = [f"[{kind}]", f"connector = {json.dumps(connector)}"]
    fields = {field.alias or name: field for name, field in config.model_fields.items()}
    needed = [f"--set {kind}.{name}=…" for name, field in fields.items() if field.is_required()]
    missing = " ".join(each for each in needed if each.removeprefix("--set ").removesuffix("=…") not in values)
    for name, field in fields.items():
        words = type_text(field.annotation, field.metadata)
        words = words if len(words) < _LONG else "see above"
        asked = values.pop(f"{kind}.{name}", None)
        if asked is None and field.is_required():
            asked = _answer(f"{field.description or ''}\n{kind}.{name} ({words})".lstrip(), missing)
        lines += ["", *(f"# {line}" for line in (field.description or "").splitlines() if line)]
        lines.append(f"{name} = {_value(asked)}" if asked is not None else f"# {name} = {_default(field, words)}")
    return lines


def _value(text: str) -> str:
    """As TOML: what reads as a value is one, and anything else is text."""
    return text if _is_toml(text) else json.dumps(text, ensure_ascii=False)


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def _default(field: FieldInfo, words: str) -> str:
    """The default as TOML; where there is none, what a value looks like."""
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return f"…    # {words}"
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    return text if _is_toml(text) else f"…    # {words}"


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)
