"""Where dead letters are kept: the sink that the file names, or a Delta table in the state directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.pipeline import Pipeline, registry
from penstock.runtime.messages.letters import LETTERS, REPLAY, SINK
from penstock.runtime.messages.replay import Replay, ReplayConfig, files, read_sink
from penstock.schema import Readable
from penstock.sink import SinkConnector
from penstock.source import RangeSource

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


def read_letters(pipeline: Pipeline, columns: Sequence[str] = LETTERS.names) -> pa.Table:
    """These columns of every letter: in the default store, and in the sink that the file names if it can be read."""
    schema = pa.schema([LETTERS.field(name) for name in columns])
    # File by file: Arrow's scanner has threads that may outlive it.
    stored = files(pipeline.processing.state_dir / FOLDER)
    read = [pq.ParquetFile(file).read(columns=list(columns)) for file in stored]
    if (sink := readable_sink(pipeline)) is not None:
        read.append(read_sink(sink))
    return pa.concat_tables([schema.empty_table(), *(each.select(list(columns)).cast(schema) for each in read)])


def _default_store(state_dir: Path) -> SinkConnector[Any, Any]:
    """The Delta table that is used when the file names no sink."""
    kind = registry.load("sink", "delta")
    made = kind(registry.config_of(kind).model_validate({"path": str(state_dir / FOLDER)}))
    assert isinstance(made, SinkConnector)
    return made
