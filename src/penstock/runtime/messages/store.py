"""Where dead letters are kept: the sink that the file names, or a Delta table in the state directory."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.durable import make_directory
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline, registry
from penstock.runtime.messages.letters import LETTERS, REPLAY, SINK
from penstock.runtime.messages.replay import Replay, ReplayConfig, files, read_sink
from penstock.schema import Readable
from penstock.sink import SinkConnector
from penstock.source import Connector, RangeSource

FOLDER = "dead_letters"


def wants_letters(pipeline: Pipeline) -> bool:
    """True if anything in the file says `on_error = "dead_letter"`."""
    policies = [pipeline.processing.on_error, *pipeline.on_error.values()]
    return "dead_letter" in policies or any(route.on_error == "dead_letter" for route in pipeline.router.effective)


def letter_sink(pipeline: Pipeline) -> dict[str, SinkConnector[Any, Any]]:
    """The sink that takes dead letters, by its name; empty: no record becomes one."""
    state_dir, named = pipeline.processing.state_dir, pipeline.processing.dead_letter_sink
    if named is not None and wants_letters(pipeline):
        return {named: pipeline.sinks[named]}
    if wants_letters(pipeline) or has_letters(state_dir):
        return {SINK: _default_store(state_dir)}
    return {}


def usable(pipeline: Pipeline) -> str:
    """Raises if the run could not keep the letters that the file asks for; has nothing else to say."""
    if wants_letters(pipeline) and pipeline.processing.dead_letter_sink is None:
        _default_kind()
    return ""


def replay_source(pipeline: Pipeline, incarnation: str) -> dict[str, RangeSource[Any, Any]]:
    """The source that brings dead letters back, by its name; empty: there can be none."""
    processing, sink = pipeline.processing, readable_sink(pipeline)
    in_default_store = wants_letters(pipeline) and processing.dead_letter_sink is None
    if not processing.checkpoint or not (in_default_store or sink is not None or has_letters(processing.state_dir)):
        return {}
    named = processing.dead_letter_sink or ""
    config = ReplayConfig(path=processing.state_dir / FOLDER, incarnation=incarnation, sink=sink, named=named)
    return {REPLAY: Replay(config)}


def readable_sink(pipeline: Pipeline) -> SinkConnector[Any, Any] | None:
    """The sink that the file names for dead letters, if they can be read there again."""
    named = pipeline.processing.dead_letter_sink
    sink = pipeline.sinks[named] if named is not None and wants_letters(pipeline) else None
    return sink if isinstance(sink, Readable) else None


def has_letters(state_dir: Path) -> bool:
    """True if a letter was ever kept in the default store."""
    return (state_dir / FOLDER / "_delta_log").exists()


@dataclass(frozen=True)
class Stored:
    """Every letter: in the default store, and in the sink that the file names if it can be read."""

    letters: pa.Table
    """Some of their columns."""
    files: Sequence[tuple[str, int]]
    """The files of the default store with their numbers of rows, in the order of `letters`."""
    named: pa.Table
    """The letters of the sink that the file names, whole; they come last."""

    def whole(self, places: Sequence[int]) -> pa.Table:
        """All columns of a few letters. Of each file only the row groups that hold them are read: payloads may be large."""
        ends = list(itertools.accumulate(rows for _, rows in self.files))
        found = [LETTERS.empty_table()]
        for number, held in itertools.groupby(places, lambda place: bisect.bisect_right(ends, place)):
            rows = [place - (ends[number - 1] if number else 0) for place in held]
            found.append(_rows(self.files[number][0], rows) if number < len(ends) else self.named.take(rows))
        return pa.concat_tables(found)


def read_letters(pipeline: Pipeline, columns: Sequence[str] = LETTERS.names) -> Stored:
    """These columns of every letter."""
    schema = pa.schema([LETTERS.field(name) for name in columns])
    # File by file: Arrow's scanner has threads that may outlive it.
    stored = files(pipeline.processing.state_dir / FOLDER)
    read = [pq.ParquetFile(file).read(columns=list(columns)) for file in stored]
    sink = readable_sink(pipeline)
    named = LETTERS.empty_table() if sink is None else read_sink(sink).select(LETTERS.names).cast(LETTERS)
    all_of_them = [each.select(list(columns)).cast(schema) for each in (*read, named)]
    sizes = [(file, each.num_rows) for file, each in zip(stored, read, strict=True)]
    return Stored(pa.concat_tables(all_of_them), sizes, named)


def keep_private(state_dir: Path) -> None:
    """Close all that is in the default store to others: a client of Delta makes its files as it makes those of any table."""
    for directory, _, names in os.walk(state_dir / FOLDER):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            with contextlib.suppress(OSError):  # gone meanwhile, or made by the user of an executor
                mode = os.stat(path).st_mode
                if mode & 0o077:
                    os.chmod(path, mode & 0o700)


def _rows(file: str, rows: Sequence[int]) -> pa.Table:
    parquet = pq.ParquetFile(file)
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    ends = list(itertools.accumulate(sizes))
    groups = sorted({bisect.bisect_right(ends, row) for row in rows})
    left_out = [0, *itertools.accumulate(0 if group in groups else size for group, size in enumerate(sizes))]
    taken = [row - left_out[bisect.bisect_right(ends, row)] for row in rows]
    return parquet.read_row_groups(groups).take(taken).select(LETTERS.names).cast(LETTERS)


def _default_store(state_dir: Path) -> SinkConnector[Any, Any]:
    """The Delta table that is used when the file names no sink. It holds whole payloads: only its user may look into it."""
    make_directory(state_dir / FOLDER, private=True)
    kind = _default_kind()
    made = kind(registry.config_of(kind).model_validate({"path": str(state_dir / FOLDER)}))
    assert isinstance(made, SinkConnector)
    return made


def _default_kind() -> type[Connector[Any]]:
    try:
        return registry.load("sink", "delta")
    except ConfigError as error:
        raise ConfigError(
            f"dead letters are kept in a Delta table, unless a sink is named for them: {error.message}",
            code=error.code,
            hint=f"{error.hint}; or name a sink of the file in `dead_letter_sink` under [processing]",
        ) from error
