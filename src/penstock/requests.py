"""Requests that somebody leaves for a running pipeline, or for its next run: one file each, obeyed in their order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from penstock import durable

R = TypeVar("R", bound=BaseModel)


class Inbox(Generic[R]):
    """The requests of one kind that wait in a directory; each has a `name`, which sorts by when it was made."""

    def __init__(self, place: Path | None, kind: type[R]) -> None:
        self._place = place
        self._kind = kind

    def leave(self, make: Callable[[str], R]) -> R:
        """Leave the request that `make` gives for a name; it is on disk when this returns."""
        assert self._place is not None, "nobody without a state directory takes requests"
        durable.make_directory(self._place, private=True)
        # After all that wait, also when the clock was set back.
        last = max((int(file.stem.partition("-")[0]) for file in self._files()), default=0)
        name = f"{max(time.time_ns(), last + 1):020d}-{uuid4().hex[:8]}"
        request = make(name)
        durable.write_atomic(self._place / f"{name}.json", request.model_dump_json().encode(), private=True)
        return request

    def pending(self) -> list[R]:
        """The requests that wait, in order."""
        found = []
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):  # the running pipeline is done with it
                found.append(self._kind.model_validate_json(file.read_bytes()))
        return found

    def done(self, names: Iterable[str]) -> None:
        """Remove requests whose effect is durable; a second time does nothing."""
        place = self._place
        removed = [] if place is None else [file for name in names if (file := place / f"{name}.json").exists()]
        for file in removed:
            file.unlink(missing_ok=True)
        if place is not None and removed:
            durable.fsync(place)

    def _files(self) -> list[Path]:
        return sorted(self._place.glob("[0-9]*.json")) if self._place is not None else []
