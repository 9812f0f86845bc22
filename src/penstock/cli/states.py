"""The state of each captured table, and requests that change it while the others go on."""

from __future__ import annotations

import difflib
import json as codec
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.view import duration
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.runtime.epochs import State
from penstock.runtime.telemetry import ENDED, read_status
from penstock.tables import Request, Requests, TableSource, TableState, Verb

_COLOURS = {
    "active": "green",
    "seeding": "cyan",
    "paused": "blue",
    "skipped": "dim",
    "failed": "red",
    "gone": "dim",
    "left_out": "yellow",
}


@dataclass(frozen=True)
class _Known:
    """A source that has tables, where it keeps its requests, and what its newest position says of them."""

    name: str
    directory: Path
    states: Mapping[str, TableState]

    @property
    def requests(self) -> list[Request]:
        return Requests(self.directory).pending()


def show(pipeline: Pipeline, names: Sequence[str], console: Console, json: bool) -> None:
    """Print a line per table."""
    sources = _sources(pipeline)
    chosen = {known.name: _chosen([known], names)[known.name] if names else None for known in sources}
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
        print(codec.dumps(lines, indent=1))
        return
    if not shown:
        console.print(f"{pipeline.name} has not read any table yet: penstock run", soft_wrap=True)
        return
    many = len(sources) > 1
    table = Table(*(["source"] if many else []), "table", "state", "rows copied", "remarks", "next try", box=None)
    table.header_style, table.padding = "dim", (0, 2, 0, 0)
    for known, stream, each, asked in shown:
        state = Text(each.state.replace("_", " "), style=_COLOURS.get(each.state, ""))
        state.append("".join(f" → {verb}" for verb in asked), style="yellow")
        table.add_row(*([known.name] if many else []), stream, state, _rows(each), _error(each), _next(each))
    console.print(table)


def command(pipeline: Pipeline, verb: Verb, names: Sequence[str], console: Console) -> None:
    """Leave a command for the source, and say when it is taken up."""
    sources = _sources(pipeline)
    chosen = _chosen(sources, names)
    for known in sources:
        streams = chosen[known.name]
        left_out = [stream for stream in streams if known.states[stream].state == "left_out"]
        if left_out and len(left_out) == len(streams):
            state = known.states[left_out[0]]
            raise ConfigError(f"{left_out[0]} cannot be captured: {state.error}", hint=state.hint)
        streams = chosen[known.name] = [stream for stream in streams if stream not in left_out]
        skipped = [stream for stream in streams if known.states[stream].state == "skipped"]
        if verb == "resume" and skipped and len(skipped) == len(streams):
            raise ConfigError(f"{skipped[0]} is skipped, not paused", hint=f"penstock tables resync FILE {skipped[0]}")
    status = read_status(pipeline.processing.state_dir)
    runs = status is not None and status["state"] not in (*ENDED, "dead")
    for known in sources:
        if chosen[known.name]:
            Requests(known.directory).add(verb, chosen[known.name])
            when = "taken up with the next epoch" if runs else "kept for the next start"
            console.print(f"{verb} {', '.join(chosen[known.name])}: {when}", soft_wrap=True)


def _sources(pipeline: Pipeline) -> list[_Known]:
    state = State(pipeline.processing.state_dir, pipeline.name).peek()
    found = [
        _Known(name, state.directory / "sources" / name, _states(state, name, source))
        for name, source in pipeline.sources.items()
        if isinstance(source, TableSource)
    ]
    if not found:
        raise ConfigError(f"no source of {pipeline.name} has tables", hint="sources that copy tables do: postgres_cdc")
    return found


def _states(state: State, name: str, source: TableSource[Any, Any]) -> Mapping[str, TableState]:
    newest = state.newest
    if newest is None or name not in newest.ranges:
        return {}
    span, ended = newest.ranges[name], newest.state == "committed"
    position = source.position_type.model_validate(span.end if ended else span.start)
    return source.tables(source.next_start(position, newest.notes.get(name, ()) if ended else ()))


def _chosen(sources: Sequence[_Known], names: Sequence[str]) -> dict[str, list[str]]:
    """Per source the tables that the names and patterns choose; each must choose one."""
    everything = sorted({stream for known in sources for stream in known.states})
    for name in names:
        if not any(_fits(stream, name) for stream in everything):
            nearest = difflib.get_close_matches(name, everything, n=1, cutoff=0)
            raise ConfigError(
                f"no table is called {name!r}" + (f"; the nearest is {nearest[0]!r}" if nearest else ""),
                hint="penstock tables show FILE lists them" if everything else "it has not run yet: penstock run FILE",
            )
    return {
        known.name: [stream for stream in known.states if any(_fits(stream, name) for name in names)]
        for known in sources
    }


def _fits(stream: str, name: str) -> bool:
    return stream == name or fnmatchcase(stream, name)


def _rows(each: TableState) -> str:
    return f"{each.rows:,}" + (f" of about {each.estimate:,}" if each.estimate and each.state == "seeding" else "")


def _error(each: TableState) -> Text:
    if not each.code:
        return Text(each.note)
    text = Text.assemble((each.code, "red"), f" {each.error}")
    if each.hint:
        text.append(f"\n→ {each.hint}")
    return text.append(f"\n{each.note}") if each.note else text


def _next(each: TableState) -> str:
    if each.state != "failed":
        return ""
    if each.next_try is None:
        return "when asked: resync"
    left = each.next_try - time.time()
    return f"try {each.tries + 1} " + (f"in {duration(left)}" if left > 0 else "as soon as it can be read")
