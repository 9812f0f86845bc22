"""Run `quickstart.toml` to its end, read its table back, and count what is there."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
from deltalake import DeltaTable
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli import guarded, running
from penstock.cli.view import size
from penstock.epochs import State
from penstock.errors import FatalError
from penstock.pipeline import Pipeline

FILE = Path(__file__).with_name("quickstart.toml")


def main() -> None:
    pipeline = Pipeline.from_toml(FILE)
    _start_fresh(pipeline)
    status = running.run(pipeline, drain=True, closing_line=False).status()
    table = pipeline.processing.state_dir.parent / "lake" / "orders"
    expected = pipeline.sources["generator"].config.rows
    if status["rows"]["in"] < expected:  # stopped by a person: what was not read is not lost
        raise FatalError(
            f"stopped after {status['rows']['in']:,} of {expected:,} rows", hint="make run starts it again"
        )
    lost, doubled, strange = count(table, expected)
    _summary(status, table)
    if strange:
        print(f"{strange:,} rows that nobody sent")
    print(f"lost {lost} · doubled {doubled}", flush=True)
    if lost or doubled or strange:
        sys.exit(1)


def count(table: Path, expected: int) -> tuple[int, int, int]:
    """Ids of `0..expected-1` that are missing, rows beyond the first of an id, and ids that were never sent."""
    ids = DeltaTable(str(table)).to_pyarrow_table(columns=["id"])["id"].to_numpy()
    known = ids[(ids >= 0) & (ids < expected)]
    times = np.bincount(known, minlength=expected)
    return int((times == 0).sum()), int((times[times > 1] - 1).sum()), len(ids) - len(known)


def _start_fresh(pipeline: Pipeline) -> None:
    directory = pipeline.processing.state_dir
    if directory.exists():
        state = State(directory, pipeline.name)
        state.open()  # refuses when a quickstart is running in there
        state.close()
    shutil.rmtree(directory.parent, ignore_errors=True)


def _summary(status: dict, table: Path) -> None:
    console = Console(highlight=False)
    here = os.path.relpath(table)
    python = os.path.relpath(sys.executable) if sys.prefix != sys.base_prefix else sys.executable
    show = os.path.relpath(Path(__file__).with_name("show.py"))
    rows, working = status["rows"], status["working_secs"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("rows in", f"{rows['in']:,}")
    grid.add_row("rows out", f"{rows['out']:,}")
    grid.add_row("epochs", f"{status['epochs']:,}")
    grid.add_row("rows per second", f"{rows['out'] / working:,.0f} over {working:.1f} s of work")
    grid.add_row("table", f"{here} ({size(status['bytes']['out'])}, Delta)")
    console.print()
    console.print(grid)
    console.print(Text("see its rows", style="dim"))
    console.print(Text(f"  {python} {show} {here}", style="bold cyan"), soft_wrap=True)  # one line, to be copied
    console.print()


if __name__ == "__main__":
    guarded(main, debug="--debug" in sys.argv)
