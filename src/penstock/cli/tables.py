"""`penstock tables`: what becomes of each table, and the commands that change it while the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.groups import FileFirst, file_and_names
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.tables import Verb

app = typer.Typer(
    cls=FileFirst,
    no_args_is_help=True,
    help="Show or change the state of captured tables. It does not matter whether the pipeline runs.",
)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [NAME]...",
        help="The pipeline's TOML file, then tables or patterns such as public.*",
        show_default=False,
    ),
]

Source = Annotated[
    str, typer.Option("--source", metavar="NAME", help="Only of this source, where several have such a table.")
]


@app.command("show")
def _show(words: Words = None, json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Show the state of each table. Also rows copied, remarks (last error, what is left out) and the next try."""
    from penstock.cli import load, states, stdout

    file, names = file_and_names(words or ())
    states.show(load(file), names, stdout(), json)


@app.command("pause")
def _pause(words: Words = None, source: Source = "") -> None:
    """Drop a table's changes from now on. One log serves all tables and cannot wait for one."""
    _ask("pause", words, source)


@app.command("resume")
def _resume(words: Words = None, source: Source = "") -> None:
    """Clear a paused or failed table, copy it again, and follow it."""
    _ask("resume", words, source)


@app.command("skip")
def _skip(words: Words = None, source: Source = "") -> None:
    """Leave a table out until `resync`."""
    _ask("skip", words, source)


@app.command("resync")
def _resync(words: Words = None, source: Source = "") -> None:
    """Clear a table and copy it again now. The others are followed meanwhile."""
    _ask("resync", words, source)


def _ask(verb: Verb, words: Sequence[str] | None, source: str) -> None:
    from penstock.cli import load, states, stdout

    file, names = file_and_names(words or ())
    if not names:
        raise ConfigError(f"tables {verb} needs a table", hint='its name, or a pattern: "*" is all of them')
    states.command(load(file), verb, names, source, stdout())
