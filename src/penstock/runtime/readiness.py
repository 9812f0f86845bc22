"""What a run needs on this machine besides its connectors; `penstock check` and `penstock run` look at the same list."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock import store as stores
from penstock.durable import disk_errors
from penstock.errors import ConfigError, FatalError
from penstock.pipeline import Pipeline
from penstock.pipeline.shape import compare_shapes
from penstock.runtime.epochs import State
from penstock.runtime.epochs.state import refuse_foreign
from penstock.runtime.messages import store
from penstock.runtime.telemetry import ENDED, export, read_status
from penstock.source import RangeSource

Look = Callable[[Pipeline], str]
"""Raises what a run would raise. Otherwise says in a few words what it found, or nothing."""


def state_directory(pipeline: Pipeline) -> str:
    """The state directory can be written, belongs to this pipeline, and holds what this version understands."""
    directory = pipeline.processing.state_dir
    if not pipeline.processing.checkpoint:
        return "no state is kept: checkpoint = false"
    nearest = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise FatalError(
            f"the state directory {directory} cannot be made: {nearest} is not a directory",
            code="PEN-5009",
            hint="choose another `state_dir` under [processing], or move that file away",
        )
    try:  # a file system that is mounted read-only, or that makes no directories, is found only by trying
        os.rmdir(tempfile.mkdtemp(prefix=".penstock-", dir=nearest))
    except OSError as error:
        raise FatalError(
            f"the state directory {directory} cannot be written: {error.strerror}",
            code="PEN-5009",
            hint=f"give this user write permission in {nearest}, or choose another `state_dir` under [processing]",
        ) from error
    with disk_errors(directory):
        if directory.is_dir():
            refuse_foreign(directory)
        place = pipeline.processing.state_place
        if place is not None:
            stores.refuse_without_conditions(place)
        state = State.of(pipeline).peek()
    _positions(pipeline, state)
    where = directory if place is None else f"{place}, copied to {directory}"
    if runs(pipeline):
        return f"state in {where}; the pipeline runs, and a second run is refused until it has ended (PEN-5002)"
    if state.fresh or state.newest is None:
        return f"state in {where}; no epoch was committed yet"
    return f"state in {where}; epoch {state.newest.number} is {state.newest.state}"


def safe_changes(pipeline: Pipeline) -> str:
    """The changes of the file since the last run are safe, see docs/spec/changes.md."""
    if not pipeline.processing.checkpoint:
        return ""
    state = State.of(pipeline).peek()
    if state.fresh or state.identity.shape is None:
        return ""
    notices = compare_shapes(state.identity.shape, pipeline.shape())
    return f"since the last run {'; '.join(notices)}" if notices else ""


def free_port(pipeline: Pipeline) -> str:
    """The port of `metrics_port` is free."""
    port = pipeline.processing.metrics_port
    if not port or runs(pipeline):  # its own run has the port
        return ""
    host = pipeline.processing.metrics_host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: a port of a while ago is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on port {port}: {error.strerror}",
                hint="choose another metrics_port under [processing], or 0 for any that is free",
            ) from error
    return f"port {port} of {host} is free for the console and metrics"


LOOKS: tuple[Look, ...] = (state_directory, safe_changes, free_port, export.refuse, store.usable)


def runs(pipeline: Pipeline) -> bool:
    """True while a run of the pipeline has the state directory."""
    status = read_status(pipeline.processing.state_dir)
    return status is not None and status["state"] not in (*ENDED, "dead")


def _positions(pipeline: Pipeline, state: State) -> None:
    """Every recorded position is one that its source understands."""
    ranges = state.newest.ranges if state.newest else {}
    for name, source in pipeline.sources.items():
        if name in ranges and isinstance(source, RangeSource):
            _understood(name, source, ranges[name].end, state.directory)


def _understood(name: str, source: RangeSource[Any, Any], position: Any, directory: Path) -> None:
    try:
        source.position_type.model_validate(position)
    except ValidationError as error:
        raise FatalError(
            f"the position of source {name!r} in {directory} is not one that {type(source).__name__} understands",
            code="PEN-5006",
            hint="run the version of the connector that wrote it; or read from the beginning: penstock offsets reset FILE",
        ) from error
