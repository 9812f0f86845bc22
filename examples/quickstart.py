"""Run `quickstart.toml` to its end, read its table back, and count what is there."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
from deltalake import DeltaTable
from rich.console import Console
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
    console = Console(highlight=False, soft_wrap=True)  # a command to be copied stays one line
    rows, working = status["rows"], status["working_secs"]
    command = [sys.executable, Path(__file__).with_name("show.py"), table]
    lines = {
        "rows in": f"{rows['in']:,}",
        "rows out": f"{rows['out']:,}",
        "epochs": f"{status['epochs']:,}",
        "rows per second": f"{rows['out'] / working:,.0f}, over {working:.1f} s of work",
        "table": f"{_near(table)} (Delta, {size(status['bytes']['out'])})",
        "see its rows": " ".join(map(_near, command)),
    }
    console.print()
    for label, text in lines.items():
        console.print(Text.assemble((f"{label:<17}", "dim"), (text, "bold cyan" if label == "see its rows" else "")))
    console.print()


def _near(path: str | Path) -> str:
    """As it is reached from here, quoted for a shell; what lies elsewhere by its whole name."""
    relative = os.path.relpath(path)
    return shlex.quote(os.path.abspath(path) if relative.startswith("..") else relative)


if __name__ == "__main__":
    guarded(main, debug="--debug" in sys.argv)
