"""Commands that have commands of their own: the file may come before or after the word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

File = Annotated[
    Path | None,
    typer.Argument(envvar="CONNECTOR_CONFIG_PATH", help="The pipeline's TOML file.", show_default=False),
]


class FileFirst(TyperGroup):
    """Takes `penstock tables FILE show` for `penstock tables show FILE`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if len(args) > 1 and args[0] not in self.commands and args[1] in self.commands:
            args = [args[1], args[0], *args[2:]]
        words = [word for word in args[:2] if not word.startswith("-")]
        if words and not set(words) & set(self.commands):
            named = next((word for word in words if not word.endswith(".toml")), words[-1])
            ctx.fail(f"{named!r} is not a command; there are {', '.join(self.commands)}")
        return super().parse_args(ctx, args)


def file_and_names(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The pipeline file among the words, if it comes first, and the names that follow."""
    if not words:
        return None, []
    first, *rest = words
    is_file = first.endswith(".toml") or Path(first).is_file() or "CONNECTOR_CONFIG_PATH" not in os.environ
    return (Path(first), rest) if is_file else (None, list(words))
