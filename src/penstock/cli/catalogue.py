"""`penstock connectors`: which there are, whether they can be used here, and their options."""

from __future__ import annotations

import importlib.util
import inspect
import sys

from rich.console import Console
from rich.text import Text

from penstock import reference
from penstock.cli.terminal import listing
from penstock.config import type_text
from penstock.errors import ConfigError, ConnectorError
from penstock.pipeline import registry
from penstock.sink import SinkConnector


def show_all(console: Console) -> None:
    """One line per connector."""
    rows: list[tuple[str | Text, ...]] = []
    for entry in sorted(registry.entries(), key=lambda entry: (entry.kind or "", entry.name)):
        missing = [module for module in entry.modules if importlib.util.find_spec(module) is None]
        if missing:
            how = Text(f"pip install 'penstock[{entry.extra}]'", style="yellow")
            rows.append((entry.name, entry.kind or "?", how, ""))
            continue
        try:
            connector = registry.load(entry.kind or "source", entry.name)
            what = Text(_first_line(sys.modules.get(entry.target.partition(":")[0], connector)))
            rows.append((entry.name, entry.kind or "?", Text("yes", style="green"), what))
        except ConnectorError as error:
            rows.append((entry.name, entry.kind or "?", Text("no", style="red"), error.message))
    listing(console, ("connector", "kind", "installed", "what it is"), rows)


def show(name: str, console: Console) -> None:
    """The options of the source and the sink with this name."""
    found = sorted((entry for entry in registry.entries() if entry.name == name), key=lambda entry: entry.kind or "")
    if not found:
        known = ", ".join(sorted({entry.name for entry in registry.entries()}))
        raise ConfigError(f"there is no connector {name!r}", code="PEN-1006", hint=f"there are {known}")
    for entry in found:
        kind = entry.kind or "source"
        connector = registry.load(kind, name)
        console.print(Text.assemble((name, "bold"), (f" {kind}", "dim")))
        for paragraph in (inspect.getdoc(connector) or "").split("\n\n"):
            console.print(Text(" ".join(paragraph.split())))
        if issubclass(connector, SinkConnector):
            console.print(Text.assemble(("capabilities ", "dim"), str(connector.capabilities)))
        rows: list[tuple[str | Text, ...]] = []
        for option, field in reference.options_of(registry.config_of(connector)).items():
            default = reference.default_of(field)
            takes, about = type_text(field.annotation, field.metadata), " ".join((field.description or "").split())
            rows.append((option, takes, Text(default, style="yellow" if default == "required" else ""), about))
        listing(console, ("option", "type", "default", ""), rows)


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
