"""What people ask of a source's streams, running or not: durable requests, taken up in order and forgotten once done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from penstock import durable

Verb = Literal["pause", "resume", "skip", "resync"]


class Request(BaseModel):
    """One command; `name` tells it from every other, and sorts by when it was given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    verb: Verb
    streams: tuple[str, ...]


def ask(directory: Path, verb: Verb, streams: Sequence[str]) -> Request:
    """Leave a request for the source whose `state_dir` this is; it is on disk when this returns."""
    place = directory / "requests"
    durable.make_directory(place)
    # Behind all that wait, also when the clock was set back.
    last = max((int(each.name.partition("-")[0]) for each in asked(directory)), default=0)
    name = f"{max(time.time_ns(), last + 1):020d}-{uuid4().hex[:8]}"
    request = Request(name=name, verb=verb, streams=tuple(streams))
    durable.write_atomic(place / f"{name}.json", request.model_dump_json().encode())
    return request


def asked(directory: Path | None) -> list[Request]:
    """The requests that are there, in order."""
    place = None if directory is None else directory / "requests"
    if place is None or not place.is_dir():
        return []
    found = []
    for file in sorted(place.glob("[0-9]*.json")):
        with contextlib.suppress(FileNotFoundError):  # the running pipeline is done with it
            found.append(Request.model_validate_json(file.read_bytes()))
    return found


def forget(directory: Path, names: Iterable[str]) -> None:
    """Remove requests whose effect is durable; a second time does nothing."""
    files = [directory / "requests" / f"{name}.json" for name in names]
    removed = [file for file in files if file.exists()]
    for file in removed:
        file.unlink(missing_ok=True)
    if removed:
        durable.fsync(directory / "requests")
