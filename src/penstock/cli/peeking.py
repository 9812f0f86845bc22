"""`penstock peek` and `penstock logs`: a first look at what came out, and at what went wrong."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from rich.console import Console
from rich.text import Text

from penstock.abilities import Named, Peekable, first_of
from penstock.cli.terminal import json_text, show_rows
from penstock.errors import ConfigError, printable
from penstock.pipeline import Pipeline
from penstock.runtime.messages.box import as_json
from penstock.runtime.telemetry import read_status
from penstock.sink import SinkConnector
from penstock.store import is_object_url

_FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "ipc"}


def peek(target: str, pipeline: Pipeline | None, rows: int, json: bool, console: Console, sink: str = "") -> None:
    """Print the first rows of a target; `pipeline`: the one whose topic it is, `sink`: which of its sinks."""
    place, table = _in_place(target, rows) if pipeline is None else _in_sinks(pipeline, target, rows, sink)
    if not table.num_rows:
        raise ConfigError(f"{place} holds no rows yet", hint="penstock status FILE says how far the pipeline is")
    if json:
        kind = pa.struct(list(table.schema))
        for row in table.to_pylist():
            print(json_text(as_json(row, kind)))
        return
    cells = [
        [Text("" if value is None else printable(str(value))) for value in row.values()] for row in table.to_pylist()
    ]
    console.print(
        Text.assemble(
            (f"{place} ", "dim"), f"{_many(table.num_rows, 'row')} shown, {_many(len(table.schema), 'column')}"
        )
    )
    show_rows(table.schema.names, cells, console)


def _in_place(target: str, rows: int) -> tuple[str, pa.Table]:
    """A local directory or file."""
    with_file = f"name the pipeline file as well: penstock peek {target} pipeline.toml"
    if is_object_url(target):
        raise ConfigError(f"{target} is in a store, and only a pipeline file says how to reach it", hint=with_file)
    place = Path(target.removeprefix("file://"))
    if not place.exists():
        raise ConfigError(
            f"there is nothing to see of {place}",
            hint="name a directory or a file, or a topic with the pipeline file: penstock peek /orders pipeline.toml",
        )
    if any(place.glob("metadata/*.metadata.json")):
        raise ConfigError(f"{place} is an Iceberg table, and only its catalog knows its rows", hint=with_file)
    pieces = _delta(place) if (place / "_delta_log").is_dir() else _files(place, rows)
    return str(place), first_of(pieces, rows) or pa.table({})


def _in_sinks(pipeline: Pipeline, topic: str, rows: int, only: str) -> tuple[str, pa.Table]:
    """The target of a topic, or of the topic whose directory this is, in the first sink that has one."""
    if only and only not in pipeline.sinks:
        raise ConfigError(f"there is no sink {only!r}", hint=f"it can be {', '.join(pipeline.sinks)}")
    looked = []
    for name, sink in pipeline.sinks.items():
        if only and name != only:
            continue
        if not isinstance(sink, Peekable):
            looked.append(f"the sink {name!r} cannot be looked into")
            continue
        named = _topic_in(sink, topic) or topic
        place = _called(sink, named)
        try:
            sink.open()
            found = sink.first_rows(named, rows)
        finally:
            sink.close()
        if found is not None:
            return place, found
        looked.append(f"{place} does not exist")
    raise ConfigError(
        f"there is nothing to see of {topic}: {'; '.join(looked)}",
        hint="penstock check FILE lists the topics; has the pipeline run?",
    )


def _topic_in(sink: SinkConnector[Any, Any], directory: str) -> str | None:
    """The topic that a sink keeps in a directory, on a disk or in a store; None if it keeps none there."""
    template = getattr(sink.config, "path", None)
    if not isinstance(template, str):
        return None
    pattern = re.escape(_whole(template)).replace(re.escape("{topic}"), "(.+)")
    found = re.fullmatch(pattern, _whole(directory))
    return f"/{found[1]}" if found and found.groups() else None


def _whole(place: str) -> str:
    return place.rstrip("/") if is_object_url(place) else os.path.abspath(place.removeprefix("file://"))


def _called(sink: SinkConnector[Any, Any], topic: str) -> str:
    """Where a sink keeps a topic, as people write it."""
    space, name = sink.config.dataset(topic) if isinstance(sink.config, Named) else (sink.name, topic)
    return name if space == "file" else f"{space}/{name.lstrip('/')}"


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


def _many(count: int, one: str) -> str:
    return f"{count} {one}{'' if count == 1 else 's'}"
