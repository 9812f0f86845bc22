"""Have the next run begin elsewhere: `penstock offsets reset --to`, for a position or a time."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from penstock.abilities import Timed
from penstock.errors import ConfigError, FatalError
from penstock.pipeline import Pipeline
from penstock.runtime.epochs import Manifest, Range, State
from penstock.runtime.journal import JournalPosition
from penstock.runtime.journal.segment import first_row, tail_of
from penstock.source import Position, RangeSource, ReadLimit, SourceContext
from penstock.tables import TableSource

BEGINNING = "beginning"


@dataclass(frozen=True)
class Move:
    """Where the next run would read a source from, and where it has been read up to."""

    source: str
    before: Position | None
    after: Position


def moves(pipeline: Pipeline, to: str, names: Sequence[str] = ()) -> list[Move]:
    """
    What `to` means for these sources, by default all: `beginning`, a time with its zone, or a position as JSON.

    Each source is asked whether it can still be read from there. Changes nothing.
    """
    state = State.of(pipeline).peek()
    newest = _committed(state)
    unknown = [name for name in names if name not in pipeline.sources]
    if unknown:
        raise ConfigError(f"no source is called {unknown[0]!r}", hint=f"there are {', '.join(pipeline.sources)}")
    chosen = list(names or pipeline.sources)
    if to.lstrip().startswith("{") and len(chosen) > 1:
        raise ConfigError("a position is one source's", hint=f"--source {chosen[0]}")
    found = []
    for name in chosen:
        source: Any = pipeline.sources[name]
        if isinstance(source, TableSource):
            raise ConfigError(
                f"source {name!r} cannot go back: its database lets go of the log that is committed",
                hint="penstock tables resync FILE TABLE copies single tables again; offsets reset without --to all of them",
            )
        kind: type[Position] = source.position_type if isinstance(source, RangeSource) else JournalPosition
        before = kind.model_validate(newest.ranges[name].end) if name in newest.ranges else None
        with _asked(source, name, state.directory) as place:
            after = place.found(kind, to, lambda when, name=name: _by_epochs(state, name, when))
            place.require(after)
        found.append(Move(name, before, after))
    return found


def move(pipeline: Pipeline, moved: Sequence[Move]) -> None:
    """Begin a new incarnation that goes on from there; sources that are not named stay where they are."""
    state = State.of(pipeline)
    state.open()
    try:
        newest = _committed(state)
        ends = {each.source: each.after.model_dump(mode="json") for each in moved}
        kept = {name: span.end for name, span in newest.ranges.items() if name not in ends}
        state.renew(
            lambda incarnation: Manifest(
                pipeline=pipeline.name,
                incarnation=incarnation,
                number=1,
                state="committed",
                ranges={name: Range(start=end, end=end) for name, end in {**kept, **ends}.items()},
                attempts=[uuid4().hex[:8]],
                notes={name: notes for name, notes in newest.notes.items() if name in kept},
                versions=newest.versions,
                columns=newest.columns,
            )
        )
    finally:
        state.close()


def _committed(state: State) -> Manifest:
    newest = state.newest
    if newest is None:
        raise ConfigError(
            f"{state.pipeline} has committed no epoch yet", hint="penstock run FILE begins at the beginning"
        )
    if newest.state != "committed":
        raise ConfigError(
            f"epoch {newest.number} is {newest.state}: some targets may hold it, and others not",
            hint="penstock run FILE --drain finishes it first",
        )
    return newest


def _by_epochs(state: State, source: str, when: datetime) -> Any:
    """The end of the last epoch that was committed before a time, as far as manifests are kept."""
    found = None
    files = sorted((state.directory / "epochs").glob("[0-9]*.json"))
    for file in files:
        if datetime.fromtimestamp(file.stat().st_mtime, UTC) <= when:
            manifest = state.load(int(file.stem))
            if manifest is not None and manifest.state == "committed" and source in manifest.ranges:
                found = manifest.ranges[source].end
    if found is None:
        oldest = datetime.fromtimestamp(files[0].stat().st_mtime, UTC) if files else None
        kept = (
            f"the oldest epoch that is kept was committed at {oldest:%Y-%m-%dT%H:%M:%SZ}" if oldest else "none is kept"
        )
        raise ConfigError(
            f"no epoch of source {source!r} from before {when.isoformat()} is known: {kept}",
            hint="give a later time, a position, or `beginning`",
        )
    return found


class _Ranges:
    """A source that can be read again, opened with a copy of its own directory: it may know there what a position means."""

    def __init__(self, source: RangeSource[Any, Any], own: Path) -> None:
        self._source = source
        self._own = own

    def __enter__(self) -> _Ranges:
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-offsets-")
        try:
            if self._own.is_dir():
                shutil.copytree(self._own, self._scratch.name, dirs_exist_ok=True)
            self._source.open(SourceContext(Path(self._scratch.name)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()
        self._scratch.cleanup()

    def found(self, kind: type[Position], to: str, by_epochs: Any) -> Position:
        when = _time(to)
        if when is not None and isinstance(self._source, Timed):
            return kind.model_validate(self._source.position_at(when))
        return _position(kind, to, when, by_epochs)

    def require(self, position: Position) -> None:
        self._source.latest(position, ReadLimit(1))


class _Journaled:
    """A source whose rows are in a journal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> _Journaled:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def found(self, kind: type[Position], to: str, by_epochs: Any) -> Position:
        if to == BEGINNING:
            return JournalPosition(row=first_row(self._directory))
        return _position(kind, to, _time(to), by_epochs)

    def require(self, position: Position) -> None:
        assert isinstance(position, JournalPosition)
        first, last = first_row(self._directory), tail_of(self._directory) or 0
        if not first <= position.row <= last:
            raise FatalError(
                f"the journal holds rows {first:,} to {last:,}, and not row {position.row:,}",
                code="PEN-5005",
                hint="rows that are committed are let go of; give a position within them, or `beginning`",
            )


def _asked(source: Any, name: str, state_dir: Path) -> _Ranges | _Journaled:
    if isinstance(source, RangeSource):
        return _Ranges(source, state_dir / "sources" / name)
    return _Journaled(state_dir / "journal" / name)


def _position(kind: type[Position], to: str, when: datetime | None, by_epochs: Any) -> Position:
    if to == BEGINNING:
        return kind()
    given: Any = None
    if when is not None:
        given = by_epochs(when)
    else:
        try:
            given = json.loads(to)
        except ValueError:
            raise ConfigError(
                f"--to {to} is neither a time nor a position",
                hint="give `beginning`, a time such as 2026-05-01T00:00:00Z, or a position as `offsets show --json` prints it",
            ) from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in error.errors())
        raise ConfigError(
            f"--to {to} is no position of this source: {wrong}", hint="penstock offsets show FILE --json prints one"
        ) from None


def _time(to: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(to)
    except ValueError:
        return None
    if when.tzinfo is None:
        raise ConfigError(f"--to {to} has no time zone", hint=f"{when.isoformat()}Z is the time in UTC")
    return when
