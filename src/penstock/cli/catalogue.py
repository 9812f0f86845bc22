"""`penstock connectors`: which there are, whether they can be used here, and their options."""

from __future__ import annotations

import importlib.util
import inspect
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock import reference
from penstock.config import type_text
from penstock.errors import ConfigError, ConnectorError
from penstock.pipeline import registry
from penstock.sink import SinkConnector


def show_all(console: Console) -> None:
    """One line per connector."""
    table = Table("connector", "kind", "installed", "what it is", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for entry in sorted(registry.entries(), key=lambda entry: (entry.kind or "", entry.name)):
        missing = [module for module in entry.modules if importlib.util.find_spec(module) is None]
        if missing:
            how = Text(f"pip install 'penstock[{entry.extra}]'", style="yellow")
            table.add_row(entry.name, entry.kind or "?", how, "")
            continue
        try:
            connector = registry.load(entry.kind or "source", entry.name)
            what = Text(_first_line(sys.modules.get(entry.target.partition(":")[0], connector)))
            table.add_row(entry.name, entry.kind or "?", Text("yes", style="green"), what)
        except ConnectorError as error:
            table.add_row(entry.name, entry.kind or "?", Text("no", style="red"), error.message)
    console.print(table)


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
        table = Table("option", "type", "default", "", box=None, header_style="dim", padding=(0, 2, 0, 0))
        for option, field in reference.options_of(registry.config_of(connector)).items():
            default = reference.default_of(field)
            table.add_row(
                option,
                Text(type_text(field.annotation, field.metadata)),
                Text(default, style="yellow" if default == "required" else ""),
                Text(" ".join((field.description or "").split())),  # as it is: a type such as list[x] is no markup
            )
        console.print(table)


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
