"""Where dead letters are kept: the sink that the file names, or a Delta table in the state directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.pipeline import Pipeline, registry
from penstock.runtime.messages.letters import SINK
from penstock.sink import SinkConnector

FOLDER = "dead_letters"


def wants_letters(pipeline: Pipeline) -> bool:
    """True if anything in the file says `on_error = "dead_letter"`."""
    policies = [pipeline.processing.on_error, *pipeline.on_error.values()]
    return "dead_letter" in policies or any(route.on_error == "dead_letter" for route in pipeline.router.effective)


def letter_sink(pipeline: Pipeline, state_dir: Path) -> dict[str, SinkConnector[Any, Any]]:
    """The sink that takes dead letters, by its name; empty: no record becomes one."""
    if not wants_letters(pipeline):
        return {}
    named = pipeline.processing.dead_letter_sink
    if named is not None:
        return {named: pipeline.sinks[named]}
    return {SINK: default_store(state_dir)}


def default_store(state_dir: Path) -> SinkConnector[Any, Any]:
    """The Delta table that is used when the file names no sink."""
    kind = registry.load("sink", "delta")
    made = kind(registry.config_of(kind).model_validate({"path": str(state_dir / FOLDER)}))
    assert isinstance(made, SinkConnector)
    return made
