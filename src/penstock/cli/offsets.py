"""`penstock offsets`: how far the sources have been read, and how to have the next run begin elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.groups import File, FileFirst, file_and_names
from penstock.cli.terminal import json_text, listing

if TYPE_CHECKING:
    from penstock.durable import Json
    from penstock.pipeline import Pipeline
    from penstock.runtime.epochs import Manifest, State

app = typer.Typer(cls=FileFirst, no_args_is_help=True, help="Show or change how far the sources have been read.")

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE] [TOPIC]...", help="The pipeline's TOML file, then topics.", show_default=False),
]

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask first.")]

_STATES = {
    "planned": "planned: its rows are not staged yet; the next run reads them again",
    "prepared": "prepared: its rows are staged, and the next run commits them",
    "committed": "committed: its rows are in the targets",
}


@app.command("show")
def _show(file: File = None, json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Show the newest epoch, and how far it reads each source."""
    from penstock.cli import load, stdout
    from penstock.runtime.epochs import State

    pipeline = load(file)
    show(pipeline, State.of(pipeline).peek(), stdout(), json)


@app.command("reset")
def _reset(
    file: File = None,
    yes: Yes = False,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="POSITION|TIME", help="Where to begin: beginning, 2026-05-01T00:00:00Z, or a position."
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="NAME", help="With --to: this source alone; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
) -> None:
    """Have the next run read every source from its beginning, or from where --to says. Empty the targets first."""
    from penstock.cli import load
    from penstock.errors import ConfigError
    from penstock.runtime.epochs import reset

    pipeline = load(file)
    if to is not None:
        _move(pipeline, to, source or [], yes, dry_run)
        return
    if source:
        raise ConfigError("--source needs --to", hint="--to beginning")
    if dry_run:
        print(f"the next run of {pipeline.name} would read {', '.join(pipeline.sources)} from the beginning")
        print("nothing was changed")
        return
    question = f"The next run of {pipeline.name} will read every source from its beginning. Go on?"
    if not yes and not typer.confirm(question):
        raise typer.Exit(1)
    reset(pipeline.processing.state_dir, pipeline.name, pipeline.processing.state_place)
    print("a new incarnation begins with the next run; empty the targets first, or they will hold the rows twice")


def _move(pipeline: Pipeline, to: str, names: Sequence[str], yes: bool, dry_run: bool) -> None:
    from penstock.cli import stdout
    from penstock.runtime.moving import move, moves

    moved = moves(pipeline, to, names)
    rows = [(each.source, each.before.describe() if each.before else "", each.after.describe()) for each in moved]
    listing(stdout(), ("source", "read up to", "would begin at"), rows)
    if dry_run:
        print("nothing was changed")
        return
    question = f"The next run of {pipeline.name} will begin there: rows that the targets hold come again. Go on?"
    if not yes and not typer.confirm(question):
        raise typer.Exit(1)
    move(pipeline, moved)
    print("a new incarnation begins there with the next run; rows that the targets hold already come once more")


@app.command("restage")
def _restage(
    file: File = None,
    yes: Yes = False,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="TOPIC", help="Leave this topic out; may be repeated.")
    ] = None,
) -> None:
    """Have the next run stage its epoch again. For one that a target refuses, or whose schema is gone or was wrong."""
    from penstock.cli import load
    from penstock.runtime.epochs import State

    pipeline = load(file)
    restage(State.of(pipeline).peek(), without or [], yes)


@app.command("forget")
def _forget(words: Words = None, yes: Yes = False) -> None:
    """Have the next run not miss what was committed to a topic whose target was deleted, or restored from an older copy."""
    from penstock.cli import load
    from penstock.errors import ConfigError
    from penstock.runtime.epochs import forget

    file, topics = file_and_names(words or ())
    if not topics:
        raise ConfigError("offsets forget needs a topic", hint="the one that the error names, such as /orders")
    pipeline, named = load(file), [f"/{topic.lstrip('/')}" for topic in topics]
    question = (
        f"Rows of {', '.join(named)} that were committed and are not in the target any more will be missing there; those of "
        "captured tables until `penstock tables resync`. Go on?"
    )
    if not yes and not typer.confirm(question):
        raise typer.Exit(1)
    for sink, topic in forget(pipeline.processing.state_dir, pipeline.name, named, pipeline.processing.state_place):
        print(f"the next run takes {topic} in sink {sink!r} as it is")


def show(pipeline: Pipeline, state: State, console: Console, json: bool) -> None:
    """Print the newest epoch in words, or as it was recorded."""
    newest = state.newest
    if newest is None:
        what = "never ran" if state.fresh else "starts over with the next run"
        console.print(f"{state.pipeline} {what}: no epoch in {state.directory}", soft_wrap=True)
        return
    if json:
        ranges = {source: range.model_dump(mode="json") for source, range in newest.ranges.items()}
        found = {"epoch": newest.number, "state": newest.state, "incarnation": newest.incarnation, "ranges": ranges}
        print(json_text(found, indent=1))
        return
    console.print(Text.assemble(("epoch ", "dim"), f"{newest.number} {_STATES[newest.state]}"), soft_wrap=True)
    console.print(Text.assemble(("incarnation ", "dim"), newest.incarnation))
    rows = []
    for source, range in newest.ranges.items():
        end, start = (_words(pipeline, source, each) for each in (range.end, range.start))
        rows.append((source, end, "the same place" if end == start else start))
    listing(console, ("source", "read up to", "the epoch begins at"), rows)
    if newest.state == "prepared":
        _show_staged(newest, console)


def _show_staged(newest: Manifest, console: Console) -> None:
    staged = [
        (sink, topic, f"{rows:,}")
        for sink, topics in sorted(newest.rows_out.items())
        for topic, (rows, _) in sorted(topics.items())
    ]
    listing(console, ("sink", "topic", "rows staged"), staged)


def restage(state: State, without: Sequence[str], yes: bool) -> None:
    """Mark the prepared epoch; asks before rows are left out."""
    from penstock.runtime import epochs

    newest = state.newest
    if newest is not None and newest.state == "prepared" and without:
        rows = {topic: n for topics in newest.rows_out.values() for topic, (n, _) in topics.items() if topic in without}
        named = ", ".join(f"{topic} ({n:,} rows)" for topic, n in sorted(rows.items()))
        question = (
            f"Epoch {newest.number} will be committed without {named}, where it is not yet. "
            "Captured tables are copied again; rows of other sources will be missing there. Go on?"
        )
        if rows and not yes and not typer.confirm(question):
            raise typer.Exit(1)
    manifest = epochs.restage(state.directory, state.pipeline, without, state.place)
    if manifest.state == "planned":
        print(f"the next run reads epoch {manifest.number} by the schemas that the file asks for then")
        return
    print(
        f"the next run stages again what the targets do not hold of epoch {manifest.number}, by the file as it is now"
    )


def _words(pipeline: Pipeline, source: str, position: Json) -> str:
    from pydantic import ValidationError

    from penstock.durable import canonical
    from penstock.runtime.journal import JournalPosition
    from penstock.runtime.messages.letters import REPLAY
    from penstock.runtime.messages.replay import Replayed
    from penstock.source import Position, RangeSource

    known: Any = pipeline.sources.get(source)
    kind: type[Position] = known.position_type if isinstance(known, RangeSource) else JournalPosition
    if source == REPLAY:
        kind = Replayed
    try:
        return kind.model_validate(position).describe()
    except ValidationError:  # another version's, or a source that the file no longer names
        return canonical(position)
