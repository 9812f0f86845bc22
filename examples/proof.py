"""What the examples that count their own rows share: a fresh start, the summary, the last line."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock.pipeline import Pipeline
from penstock.runtime.epochs import State


def start_fresh(pipeline: Pipeline) -> Path:
    """Remove what an earlier run left; the directory that this one writes into."""
    directory = pipeline.processing.state_dir
    if directory.exists():
        state = State(directory, pipeline.name)
        state.open()  # refuses when one is running in there
        state.close()
    shutil.rmtree(directory.parent, ignore_errors=True)
    return directory.parent


def summary(lines: Mapping[str, str], table: Path) -> None:
    """Print the figures, and the command that shows the table's rows."""
    console = Console(highlight=False, soft_wrap=True)  # a command to be copied stays one line
    show = " ".join(map(near, [sys.executable, Path(__file__).with_name("show.py"), table]))
    console.print()
    for label, text in {**lines, "see its rows": show}.items():
        console.print(Text.assemble((f"{label:<17} ", "dim"), (text, "bold cyan" if text == show else "")))
    console.print()


def verdict(lost: int, doubled: int) -> None:
    """Print the last line; a run that lost or doubled a row has failed."""
    print(f"lost {lost} · doubled {doubled}", flush=True)
    if lost or doubled:
        sys.exit(1)


def near(path: str | Path) -> str:
    """As it is reached from here, quoted for a shell; what lies elsewhere by its whole name."""
    relative = os.path.relpath(path)
    return shlex.quote(os.path.abspath(path) if relative.startswith("..") else relative)
