"""The state of each captured table, and requests that change it while the others go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import NARROW, json_text
from penstock.cli.view import duration
from penstock.errors import printable
from penstock.pipeline import Pipeline
from penstock.runtime.commands import chosen_tables, table_sources, tables_asked
from penstock.tables import TableState, Verb

_COLOURS = {
    "active": "green",
    "seeding": "cyan",
    "paused": "blue",
    "skipped": "dim",
    "failed": "red",
    "gone": "dim",
    "left_out": "yellow",
}


def show(pipeline: Pipeline, names: Sequence[str], console: Console, json: bool) -> None:
    """Print a line per table."""
    sources = table_sources(pipeline)
    chosen = chosen_tables(sources, names) if names else dict.fromkeys(known.name for known in sources)
    shown = [
        (known, stream, each, [r.verb for r in known.requests if stream in r.streams])
        for known in sources
        for stream, each in known.states.items()
        if (streams := chosen[known.name]) is None or stream in streams
    ]
    if json:
        lines = [
            {"source": k.name, "stream": stream, **asdict(each), "asked": asked} for k, stream, each, asked in shown
        ]
        print(json_text(lines, indent=1))
        return
    if not shown:
        console.print(f"{pipeline.name} has not read any table yet: penstock run", soft_wrap=True)
        return
    many = len(sources) > 1
    parts = [
        ([known.name] if many else [], Text(printable(s)), _state(each, asked), each) for known, s, each, asked in shown
    ]
    if console.width < NARROW:
        for source, name, state, each in parts:
            console.print(Text("  ").join([*map(Text, source), name, state]), soft_wrap=True)
            about = Text("\n").join(text for text in (_error(each), Text(_next(each))) if text)
            console.print(Padding(Group(f"{_rows(each)} rows copied", *([about] if about else [])), (0, 0, 0, 2)))
        return
    table = Table(*(["source"] if many else []), "table", "state", "rows copied", "remarks", "next try", box=None)
    table.header_style, table.padding = "dim", (0, 2, 0, 0)
    for column in table.columns:
        column.overflow = "fold"  # a name is never cut
    for source, name, state, each in parts:
        table.add_row(*source, name, state, _rows(each), _error(each), _next(each))
    console.print(table)


def _state(each: TableState, asked: Sequence[str]) -> Text:
    state = Text(each.state.replace("_", " "), style=_COLOURS.get(each.state, ""))
    return state.append("".join(f" → {verb}" for verb in asked), style="yellow")


def command(pipeline: Pipeline, verb: Verb, names: Sequence[str], source: str, console: Console) -> None:
    """Leave a command for the source, and say when it is taken up."""
    for line in tables_asked(pipeline, verb, names, "command line", source):
        console.print(Text(line), soft_wrap=True)


def _rows(each: TableState) -> str:
    return f"{each.rows:,}" + (f" of about {each.estimate:,}" if each.estimate and each.state == "seeding" else "")


def _error(each: TableState) -> Text:
    if not each.error:
        return Text(each.note)
    text = Text.assemble((f"{each.code} " if each.code else "", "red"), printable(each.error))
    if each.hint:
        text.append(f"\n→ {printable(each.hint)}")
    return text.append(f"\n{each.note}") if each.note else text


def _next(each: TableState) -> str:
    if each.state != "failed":
        return ""
    if each.next_try is None:
        return "when asked: resync"
    left = each.next_try - time.time()
    return f"try {each.tries + 1} " + (f"in {duration(left)}" if left > 0 else "as soon as it can be read")
