"""`penstock peek` and `penstock logs`: a first look at what came out, and at what went wrong."""

from __future__ import annotations

import json as codec
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.errors import ConfigError, printable
from penstock.pipeline import Pipeline
from penstock.runtime.telemetry import read_status

_FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "ipc"}


def peek(target: str, pipeline: Pipeline | None, rows: int, json: bool, console: Console) -> None:
    """Print the first rows of a target; `pipeline`: the one whose topic it is."""
    places = [Path(target)] if pipeline is None else list(_places(pipeline, target))
    found = [place for place in places if place.exists()]
    if not found:
        looked = f" (looked in {', '.join(map(str, places))})" if places else ""
        raise ConfigError(
            f"there is nothing to see of {target}{looked}",
            hint="name a directory or a file, or a topic with the pipeline file: penstock peek /orders pipeline.toml",
        )
    table = _first(found[0], rows)
    if json:
        for row in table.to_pylist():
            print(codec.dumps(row, default=str, ensure_ascii=False))
        return
    shown = Table(*map(printable, table.schema.names), box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in table.to_pylist():
        shown.add_row(*(Text("" if value is None else printable(str(value))) for value in row.values()))
    console.print(Text.assemble((f"{found[0]} ", "dim"), f"{table.num_rows} rows shown, {len(table.schema)} columns"))
    console.print(shown)


def _places(pipeline: Pipeline, topic: str) -> Any:
    """Where the sinks of a pipeline keep a topic, for those that have a `path`."""
    for sink in pipeline.sinks.values():
        path = getattr(sink.config, "path", None)
        if path is not None:
            yield Path(str(path).replace("{topic}", topic.lstrip("/")))


def _first(place: Path, rows: int) -> pa.Table:
    """As many rows of a target as asked for, from its oldest files on."""
    parts: list[pa.Table] = []
    for part in _delta(place) if (place / "_delta_log").is_dir() else _files(place, rows):
        parts.append(part.slice(0, rows - sum(each.num_rows for each in parts)))
        if sum(each.num_rows for each in parts) >= rows:
            break
    if not any(part.num_rows for part in parts):
        raise ConfigError(f"{place} holds no rows yet", hint="penstock status FILE says how far the pipeline is")
    return pa.concat_tables(parts, promote_options="permissive")


def _delta(place: Path) -> Iterator[pa.Table]:
    """The rows of a Delta table, without those that are marked as deleted."""
    from deltalake import DeltaTable

    from penstock.connectors.delta.columns import delta_schema
    from penstock.connectors.delta.files import Log
    from penstock.connectors.delta.table import Table as Version

    table = Version(place, DeltaTable(str(place)))
    for file in reversed(Log(table).files()):  # the log names the newest first
        yield from file.read(place, delta_schema(str(place), table.columns()))


def _files(place: Path, rows: int) -> Iterator[pa.Table]:
    files = [place]
    if place.is_dir():
        listed = sorted(place.rglob("*"))
        inside = [each.relative_to(place).parts for each in listed]
        own = [any(part.startswith(("_", ".")) for part in parts) for parts in inside]
        files = [each for each, hidden in zip(listed, own, strict=True) if not hidden and each.suffix in _FORMATS]
    for file in files:
        if file.suffix not in _FORMATS:
            raise ConfigError(f"cannot read {file}", hint=f"it can be {', '.join(_FORMATS)}")
        yield ds.dataset(str(file), format=_FORMATS[file.suffix]).head(rows, use_threads=False)


def logs(pipeline: Pipeline, lines: int, console: Console) -> None:
    """Print the last errors, and the end of Spark's log."""
    state_dir = pipeline.processing.state_dir
    status = read_status(state_dir)
    for error in status["errors"] if status else ():
        text = Text.assemble((f"{error['at']} ", "dim"), f"{error['component']} ", (f"{error['code']} ", "red"))
        console.print(text.append(error["text"]), soft_wrap=True)
        if error.get("hint"):
            console.print(Text(f"  → {error['hint']}"), soft_wrap=True)
    try:
        with open(state_dir / "spark.log", encoding="utf-8", errors="replace") as file:
            last = deque(file, lines)
    except FileNotFoundError:
        last = deque(["Spark has left no log here: it did not run yet"])
    console.print(Text(f"-- {state_dir / 'spark.log'}", style="dim"), soft_wrap=True)
    for line in last:
        console.print(Text(line.rstrip()), soft_wrap=True)
