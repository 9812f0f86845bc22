"""A toy database in a file, and the table source that captures it: the kit's reference for change capture."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from penstock.changes import CHANGE_FIELDS, Op
from penstock.config import Config
from penstock.durable import Json, make_directory, write_atomic
from penstock.errors import RangeGone
from penstock.schema import with_key
from penstock.source import Note, Position, ReadLimit, Schemas, SourceBatch, SourceContext
from penstock.tables import CopyAgain, Refused, Request, Requests, TableSource, TableState

Rows = dict[int, str]
"""A table: the note of each id."""

SCHEMA = with_key(pa.schema([("id", pa.int64()), ("note", pa.string()), *CHANGE_FIELDS]), ["id"])

RETRY_SECS = 60.0
"""How long a table that failed is left alone."""


class MemoryDatabase:
    """Tables of ids and notes. All there is of it is its log: a line per change, and a table is what its lines come to."""

    def __init__(self, path: Path) -> None:
        self._log = path / "log"
        self._slot = path / "slot"

    def put(self, table: str, id: int, note: str) -> None:
        """Insert a row, or update it."""
        self._append(table, "put", id, note)

    def delete(self, table: str, id: int) -> None:
        self._append(table, "delete", id)

    def drop(self, table: str) -> None:
        self._append(table, "drop")

    def lose_log(self) -> None:
        """The server has removed all log up to now, whether or not somebody still needed it."""
        write_atomic(self._slot.with_name("lost"), str(len(self.lines())).encode())

    @property
    def lost(self) -> int:
        """Log before this line cannot be read any more."""
        file = self._slot.with_name("lost")
        return int(file.read_text()) if file.exists() else 0

    @property
    def slot(self) -> int | None:
        """From which line on the log is kept for the capture; None: it has never begun."""
        return int(self._slot.read_text()) if self._slot.exists() else None

    def keep(self, line: int) -> None:
        write_atomic(self._slot, str(line).encode())

    def lines(self) -> list[list[Any]]:
        """The log: table, what was done, id and note."""
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def tables(self, upto: int | None = None) -> dict[str, Rows]:
        """Every table that is there, as of a line of the log or as of now."""
        found: dict[str, Rows] = {}
        for table, done, id, note in self.lines()[:upto]:
            if done == "put":
                found.setdefault(table, {})[id] = note
            elif done == "delete":
                found.setdefault(table, {}).pop(id, None)
            else:
                found.pop(table, None)
        return found

    def content(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table now, as dicts in the order of their ids."""
        return [{"id": id, "note": note} for id, note in sorted(self.tables().get(table, {}).items())]

    def _append(self, table: str, done: str, id: int = 0, note: str = "") -> None:
        with open(self._log, "a") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            log.write(json.dumps([table, done, id, note]) + "\n")


class MemoryTablesConfig(Config):
    path: Path
    """Directory of the database."""

    chunk_rows: PositiveInt = 3
    """Rows of a table that one epoch copies."""


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Chunk(_Value):
    """Ids after `after` up to `upto` (None: all the rest), as they were at a line of the log."""

    after: int
    upto: int | None
    line: int


class Progress(_Value):
    """What is done with one table."""

    state: Literal["waiting", "seeding", "active", "paused", "skipped", "failed", "gone"] = "waiting"
    copy_number: int = 0
    """Copies that have begun."""
    frontier: int = -1
    """While seeding: the last id that was copied."""
    chunks: tuple[Chunk, ...] = ()
    """What was copied, until the log has passed the line that it was read at."""
    rows: int = 0
    part: bool = False
    """The targets hold rows of a copy that is not complete."""
    cleared: bool = False
    """It failed, and the targets were cleared of those."""
    failure: Refused | None = None
    tries: int = 0

    @property
    def is_read(self) -> bool:
        return self.state in ("waiting", "seeding", "active")

    def again(self) -> Progress:
        """To be copied once more, from the beginning."""
        return self.model_copy(update={"state": "waiting", "frontier": -1, "chunks": (), "rows": 0})

    def ended(self, state: str, **update: Any) -> Progress:
        return self.model_copy(update={"state": state, "frontier": -1, "chunks": (), **update})

    def emptied(self) -> Progress:
        """The same after a range that clears the targets."""
        return self.model_copy(update={"part": False, "cleared": True, "copy_number": self.copy_number + 1})

    def counts(self, line: int, id: int) -> bool:
        """True if a change is to be handed over: its row was copied, and the copy does not contain the change."""
        if self.state == "waiting" or (self.state == "seeding" and id > self.frontier):
            return False
        known = [each for each in self.chunks if id > each.after and (each.upto is None or id <= each.upto)]
        return all(line >= each.line for each in known)


class Capture(Position):
    """The next line of the log, and what is done with each table. A range holds its first line and not its last."""

    line: int = 0
    tables: dict[str, Progress] = Field(default_factory=dict)
    turn: Literal["copy", "log"] = "copy"
    """While there is something to copy: what comes next."""
    obeyed: tuple[str, ...] = ()
    """Requests that this position obeys."""
    gaps: int = 0
    """How often log was lost before it was read."""


@dataclass(frozen=True)
class CopySplit:
    table: str
    after: int
    upto: int | None
    copy: int
    begins: bool
    """The first one of its copy."""


@dataclass(frozen=True)
class LogSplit:
    start: Capture
    end: int


class MemoryTables(TableSource[MemoryTablesConfig, Capture]):
    """
    A range is a stretch of the log (one split) or the next ids of every table that is being copied (one split each).

    Supports exactly-once: the log is kept until it is acknowledged, and a change that a copy contains is dropped.

    Copies and log take turns. A chunk is read as of now, which is never before the position's own line: so a change of an
    id beyond the frontier may be dropped, since the chunk that brings the id will contain it.
    """

    name = "memory_tables"

    def open(self, context: SourceContext = SourceContext()) -> None:
        super().open(context)
        make_directory(self.config.path)

    @property
    def database(self) -> MemoryDatabase:
        return MemoryDatabase(self.config.path)

    def schema(self) -> Schemas:
        return dict.fromkeys(self.database.tables(), SCHEMA)

    def tables(self, position: Capture) -> Mapping[str, TableState]:
        return {
            name: TableState(
                "seeding" if each.state == "waiting" else each.state,
                copy=each.copy_number,
                complete=each.state == "active",
                cleared=each.cleared,
                rows=each.rows,
                code=each.failure.code if each.failure else "",
                error=each.failure.message if each.failure else "",
                hint=each.failure.hint if each.failure else "",
                since=each.failure.at if each.failure else None,
                tries=each.tries,
                next_try=each.failure.at + RETRY_SECS if each.failure else None,
            )
            for name, each in position.tables.items()
        }

    # -- planning ------------------------------------------------------------------------------------------------

    def initial(self) -> Capture:
        if self.database.slot is None:
            self._remember_beginning()
            self.database.keep(len(self.database.lines()))
        tables = {}
        for name in self.database.tables():
            held = self.context.copies_of(name)
            # What every target holds is followed from where the log was kept, if it was kept since they were filled.
            follows = bool(held) and all(held) and not self._began
            tables[name] = Progress(state="active" if follows else "waiting", copy_number=int(any(held)))
        return Capture(line=self.database.slot or 0, tables=tables)

    @property
    def _began(self) -> bool:
        """True if this state directory is the one under which the log began to be kept."""
        return self.context.state_dir is None or (self.context.state_dir / "began").exists()

    def _remember_beginning(self) -> None:
        if self.context.state_dir is not None:
            make_directory(self.context.state_dir)
            write_atomic(self.context.state_dir / "began", b"")

    def latest(self, start: Capture, limit: ReadLimit) -> Capture:
        end = self._with_requests(self._with_catalog(start))
        upto = len(self.database.lines())
        if start.line < self.database.lost:  # nobody knows what happened in between: everything is copied again
            lost = {name: each.again() if each.is_read else each for name, each in end.tables.items()}
            return end.model_copy(update={"tables": lost, "line": upto, "turn": "copy", "gaps": start.gaps + 1})
        if parts := {name: each.emptied() for name, each in end.tables.items() if each.state == "failed" and each.part}:
            return end.model_copy(update={"tables": {**end.tables, **parts}})
        copying = {name: each for name, each in end.tables.items() if each.state in ("waiting", "seeding")}
        if isinstance(limit.until, Capture) and not copying:
            # At least as far as the copies reach into the log: before that, the tables are of different times.
            reached = [chunk.line for each in end.tables.values() for chunk in each.chunks]
            upto = min(upto, max(start.line, limit.until.line, *reached))
        if limit.rows is not None:
            upto = min(upto, start.line + limit.rows)
        if copying and (end.turn == "copy" or upto == start.line):
            planned = {name: self._next(name, each) for name, each in copying.items()}
            return end.model_copy(update={"tables": {**end.tables, **planned}, "turn": "log"})
        return end if upto == start.line else end.model_copy(update={"line": upto, "turn": "copy"})

    def _with_catalog(self, start: Capture) -> Capture:
        there, tables = self.database.tables(), dict(start.tables)
        for name, each in start.tables.items():
            if name not in there and (each.is_read or each.state == "failed"):
                tables[name] = each.ended("gone")
            elif (name in there and each.state == "gone") or (
                each.failure and each.state == "failed" and time.time() >= each.failure.at + RETRY_SECS
            ):
                tables[name] = each.again()
            elif each.state == "active" and each.failure:
                tables[name] = each.model_copy(update={"failure": None, "tries": 0})
        tables |= {name: Progress(copy_number=int(any(self.context.copies_of(name)))) for name in there.keys() - tables}
        return start if tables == start.tables else start.model_copy(update={"tables": tables})

    def _with_requests(self, start: Capture) -> Capture:
        requests = Requests(self.context.state_dir)
        pending = requests.pending()
        requests.done(each.name for each in pending if each.name in start.obeyed)  # their effect is durable
        new = [each for each in pending if each.name not in start.obeyed]
        if not new:
            return start
        tables = dict(start.tables)
        for request in new:
            for name in tables.keys() & set(request.streams):
                tables[name] = _obeying(request, tables[name])
        return start.model_copy(update={"tables": tables, "obeyed": tuple(each.name for each in new)})

    def _next(self, name: str, progress: Progress) -> Progress:
        """The table with its next ids copied."""
        left = sorted(id for id in self.database.tables().get(name, {}) if id > progress.frontier)
        more, begun = len(left) > self.config.chunk_rows, progress.state == "waiting"
        return progress.model_copy(
            update={
                "state": "seeding" if more else "active",
                "frontier": left[self.config.chunk_rows - 1] if more else -1,
                "copy_number": progress.copy_number + begun,
                "cleared": False,
            }
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def split(self, start: Capture, end: Capture) -> Sequence[CopySplit | LogSplit]:
        if end.gaps != start.gaps:
            return []
        if end.line > start.line:
            return [LogSplit(start, end.line)]
        splits = []
        for name, after in end.tables.items():
            before = start.tables.get(name, Progress())
            begins = before.copy_number != after.copy_number
            goes_on = before.state == "seeding" and (before.state, before.frontier) != (after.state, after.frontier)
            if after.cleared and not before.cleared:
                splits.append(CopySplit(name, -1, -1, after.copy_number, begins=True))
            if after.state in ("seeding", "active") and (begins or goes_on):
                upto = after.frontier if after.state == "seeding" else None
                splits.append(CopySplit(name, -1 if begins else before.frontier, upto, after.copy_number, begins))
        return splits

    def read(self, split: CopySplit | LogSplit) -> Iterator[SourceBatch | Note]:
        yield from self._read_log(split) if isinstance(split, LogSplit) else self._read_copy(split)

    def _read_copy(self, split: CopySplit) -> Iterator[SourceBatch | Note]:
        line = len(self.database.lines())
        there = self.database.tables(line).get(split.table, {})
        ids = sorted(id for id in there if id > split.after and (split.upto is None or id <= split.upto))
        place = f"{line:012d}.1.{split.copy:06d}"
        rows = [_row(Op.TRUNCATE, f"{place}.0")] if split.begins and split.copy > 1 else []
        rows += [_row(Op.SEEDED, f"{place}.1.{id:012d}", id, there[id]) for id in ids]
        if rows:
            yield SourceBatch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), stream=split.table)
        if split.upto == -1:
            return  # a clear alone
        chunk = Chunk(after=split.after, upto=split.upto, line=line)
        yield Note({"copied": split.table, "chunk": chunk.model_dump(), "rows": len(ids)})

    def _read_log(self, split: LogSplit) -> Iterator[SourceBatch | Note]:
        start = split.start
        if start.line < self.database.lost:
            raise RangeGone(f"the log from line {start.line} on is gone", hint="every table is copied again")
        known, dropped = self.database.tables(start.line), set()
        for number, (table, done, id, note) in enumerate(self.database.lines()[start.line : split.end], start.line):
            there = known.setdefault(table, {})
            op = Op.DELETE if done == "delete" else Op.UPDATE if id in there else Op.INSERT
            is_news = done != "delete" or id in there
            if done == "drop":
                del known[table]
                dropped.add(table)
            elif done == "put":
                there[id] = note
            else:
                there.pop(id, None)
            progress = start.tables.get(table, Progress(state="gone"))
            if is_news and table not in dropped and progress.is_read and progress.counts(number, id):
                rows = [_row(op, f"{number:012d}.2", id, note if done == "put" else None)]
                yield SourceBatch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), stream=table)
        if dropped:  # those that are there again are other tables
            yield Note(CopyAgain(streams=tuple(sorted(dropped))).note())

    def next_start(self, end: Capture, notes: Sequence[Json]) -> Capture:
        tables = dict(end.tables)
        for note in notes:
            again = CopyAgain.read(note)
            for name in tables.keys() & set(again.streams if again else ()):
                tables[name] = tables[name].again() if tables[name].is_read else tables[name]
            if "copied" in note and note["copied"] in tables:
                each = tables[note["copied"]]
                chunks = (*each.chunks, Chunk.model_validate(note["chunk"]))
                tables[note["copied"]] = each.model_copy(update={"chunks": chunks, "rows": each.rows + note["rows"]})
            refused = Refused.read(note)
            if refused and refused.stream in tables and tables[refused.stream].is_read:
                each = tables[refused.stream]
                tables[refused.stream] = each.ended("failed", failure=refused, tries=each.tries + 1)
        for name, each in tables.items():
            unpassed = tuple(c for c in each.chunks if c.line > end.line)
            part = each.part and (not each.is_read or bool(unpassed)) if each.state != "seeding" else each.rows > 0
            tables[name] = each.model_copy(update={"chunks": unpassed, "part": part})
        return end.model_copy(update={"tables": tables})

    def ack(self, end: Capture) -> None:
        self.database.keep(max(end.line, self.database.slot or 0))

    def lag(self) -> int | None:
        """Lines of log that are not acknowledged."""
        return len(self.database.lines()) - (self.database.slot or 0)


def _obeying(request: Request, progress: Progress) -> Progress:
    if request.verb == "resync" or (request.verb == "resume" and progress.state in ("paused", "failed")):
        return progress.again()
    if request.verb == "skip":
        return progress.ended("skipped")
    if request.verb == "pause" and progress.state not in ("skipped", "gone"):
        return progress.ended("paused")
    return progress


def _row(op: Op, position: str, id: int | None = None, note: str | None = None) -> dict[str, Any]:
    return {"id": id, "note": note, "_op": str(op), "_position": position}
