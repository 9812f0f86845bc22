"""What a source of tables implements: it copies each table once, follows its changes, and takes requests for single tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from penstock.durable import Json
from penstock.errors import ConnectorError
from penstock.requests import Inbox
from penstock.source import C, P, RangeSource

MOST_TEXT = 500
"""Characters of an error that a note keeps: notes are part of the manifest."""


@dataclass(frozen=True)
class TableState:
    """What a source does with one table, at a position. `penstock tables` shows it, and the runtime acts on it."""

    state: Literal["active", "seeding", "paused", "skipped", "failed", "gone", "left_out"]
    """
    `seeding`: it is being copied, or waits for that. `active`: its changes are followed. Of the others nothing is read:
    somebody paused or skipped it, it failed and says why, or it is not in the outside system any more. `left_out`: the
    options choose it, but it cannot be captured at all, or no route takes it; `error` says why.
    """

    copy: int = 0
    """
    How many copies of the table have begun; a copy counts from the range that brings its first rows.

    The first rows of copy 2, and of each later one, MUST follow a truncate (`t`) in the same range, unless the copy
    `refreshes`: the runtime lets the target take other types there.
    """

    complete: bool = False
    """The copy is complete: once this position is committed, the sinks record it (`mark_seeded`)."""

    cleared: bool = False
    """
    It was set aside in the middle of its copy, and the last range cleared the targets. Like the first rows of a copy, this
    counts as another `copy`.
    """

    refreshes: bool = False
    """The copy goes over the rows that are there: no change was missed, so that nothing need be cleared."""

    rows: int = 0
    """Rows that the copy in hand, or the last one, has brought so far."""

    estimate: int | None = None
    """About how many rows the copy will bring."""

    code: str = ""
    """Of the last failure: its code, what went wrong, and what to do."""
    error: str = ""
    hint: str = ""

    since: float | None = None
    """When it failed first, in seconds since 1970."""

    tries: int = 0
    """How often it has failed in a row."""

    next_try: float | None = None
    """When it is tried again, in seconds since 1970; None: when somebody asks for it."""

    note: str = ""
    """Something that a user should know about it: what it waits for, which columns are left out."""

    @property
    def is_read(self) -> bool:
        """True if rows of it are read, now or once its copy begins."""
        return self.state in ("active", "seeding")


class TableSource(RangeSource[C, P]):
    """
    A range source whose streams are tables, each with a life of its own: copied, followed, paused, failed, copied again.

    Everything that decides which rows of a table count MUST be part of the position, never beside it: recovery knows
    nothing else. Two laws of range sources are wider here. A range that copies rows may hold newer ones when it is read
    again. And `next_start` MUST understand the notes that the runtime writes:

    - `Refused`: a sink cannot take the table's rows. Set the table aside, state `failed`, and copy it again later, from a
      truncate on; the others go on. Rows of earlier epochs stay where they are, except for those of a copy that is not
      complete: the next range clears them with a truncate alone (`cleared`), so that no sink keeps half a table.
    - `CopyAgain`: two sinks hold different versions of a copy. Copy these tables once more, from a truncate on.

    It takes up what `Requests(context.state_dir).pending()` gives in `latest`, and names in the end that it returns the
    requests that this end obeys. Once a range *starts* with those names the effect is durable, and the request is `done`.
    """

    def tables(self, position: P) -> Mapping[str, TableState]:
        """Every table that the position knows, by stream; from the position alone, also before `open`."""
        raise NotImplementedError


# -- what the runtime reads off two states -------------------------------------------------------------------------------


def seeded(tables: Mapping[str, TableState]) -> frozenset[str]:
    """The tables whose copy is complete."""
    return frozenset(stream for stream, table in tables.items() if table.complete)


def refilled(before: Mapping[str, TableState], after: Mapping[str, TableState]) -> frozenset[str]:
    """The tables whose rows in the range between two positions follow a clear, or are one."""
    return frozenset(
        stream
        for stream, table in after.items()
        if (table.is_read or table.cleared) and not table.refreshes and table.copy > max(1, _copy(before.get(stream)))
    )


def copied(before: Mapping[str, TableState], after: Mapping[str, TableState]) -> frozenset[str]:
    """The tables of which the range between two positions copies rows."""
    none = TableState("gone")
    return frozenset(
        stream
        for stream, table in after.items()
        if table.is_read and _progress(table) != _progress(before.get(stream, none))
    )


def routed(tables: Mapping[str, TableState], leaves_out: Callable[[str], bool]) -> Mapping[str, TableState]:
    """The states as people are shown them: a table whose rows all go nowhere is left out, whatever its source reads."""
    why, hint = 'no route takes it, and unrouted = "skip"', "add a [[routes]] entry that takes it"
    return {
        stream: replace(table, state="left_out", error=why, hint=hint)
        if table.is_read and leaves_out(stream)
        else table
        for stream, table in tables.items()
    }


def _copy(table: TableState | None) -> int:
    return table.copy if table else 0


def _progress(table: TableState) -> tuple[int, bool, int]:
    return table.copy, table.complete, table.rows


# -- notes that the runtime writes, and that a table source may write as well -------------------------------------------------


class Refused(BaseModel):
    """The note that sets a table aside: its rows cannot be read or cannot be written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stream: str
    at: float
    """When, in seconds since 1970."""
    code: str
    message: str
    hint: str = ""

    @classmethod
    def because(cls, stream: str, error: ConnectorError) -> Refused:
        texts = {"message": error.message[:MOST_TEXT], "hint": error.hint[:MOST_TEXT]}
        return cls(stream=stream, at=time.time(), code=error.code, **texts)

    @classmethod
    def read(cls, note: Json) -> Refused | None:
        """The refusal that a note is; None: it is another note."""
        return cls.model_validate(note["failed"]) if "failed" in note else None

    def note(self) -> Json:
        return {"failed": self.model_dump(mode="json")}


class CopyAgain(BaseModel):
    """The note that has tables copied once more, from a truncate on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    streams: tuple[str, ...]

    @classmethod
    def read(cls, note: Json) -> CopyAgain | None:
        """The tables that a note names; None: it is another note."""
        return cls(streams=tuple(note["again"])) if "again" in note else None

    def note(self) -> Json:
        return {"again": list(self.streams)}


# -- requests -------------------------------------------------------------------------------------------------------------

Verb = Literal["pause", "resume", "skip", "resync"]


class Request(BaseModel):
    """What somebody asks for with `penstock tables`; `name` tells it from every other, and sorts by when it was made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    verb: Verb
    streams: tuple[str, ...]


class Requests(Inbox[Request]):
    """The requests that wait for a source, in its `state_dir`: made while it runs or not."""

    def __init__(self, state_dir: Path | None) -> None:
        super().__init__(None if state_dir is None else state_dir / "requests", Request)

    def add(self, verb: Verb, streams: Sequence[str]) -> Request:
        """Leave a request; it is on disk when this returns."""
        return self.leave(lambda name: Request(name=name, verb=verb, streams=tuple(streams)))
