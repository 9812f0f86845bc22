"""The position of a capture: how far the log was read, the state of each table, and where the next range starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from penstock.connectors.postgres_cdc.table_errors import TableError
from penstock.connectors.postgres_cdc.tables import (
    Copying,
    Following,
    Key,
    TableProgress,
    Value,
    Waiting,
)
from penstock.durable import Json
from penstock.source import Position
from penstock.tables import CopyAgain, Refused


class Copied(Value):
    """A chunk that was copied, and the snapshot it was read in; kept until the log has passed that snapshot."""

    stream: str
    after: Key | None = None
    upto: Key | None = None
    snapshot: str
    lsn: int
    """Every transaction that the snapshot shows committed before this place in the log."""


class LeftOut(Value):
    """Why a chosen table cannot be captured, and how to change that."""

    what: str
    fix: str = ""


class LogPosition(Position):
    """How far the log was read, and how far each table is copied; a range does not include `lsn`, where it ends."""

    lsn: int = 0
    system: str = ""
    timeline: int = 0
    run: str = ""
    """With `snapshot = "always"`: the start that the copies belong to."""
    tables: dict[str, TableProgress] = Field(default_factory=dict)
    refused: dict[str, LeftOut] = Field(default_factory=dict)
    """Tables that are chosen and cannot be captured."""
    copied: tuple[Copied, ...] = ()
    """Chunks whose snapshots the log has not passed."""
    turn: Literal["log", "copy"] = "copy"
    """What comes next while there is something to copy."""
    quiet: bool = False
    """The last range of log held no changes."""
    settled: int = 0
    """Highest LSN that any copied chunk may already contain; a drain must read the log at least this far."""
    applied: tuple[str, ...] = ()
    """Requests that this position obeys; their files may be removed."""
    slots: int = 1
    """How often the slot was made; the log between two slots is never read. 0: no slot could be made yet."""

    def describe(self) -> str:
        if not self.lsn and not self.tables:
            return "the beginning"
        copying = sum(isinstance(table, Waiting | Copying) for table in self.tables.values())
        tables = f"{len(self.tables):,} {'table' if len(self.tables) == 1 else 'tables'}"
        return f"log {self.lsn >> 32:X}/{self.lsn & 0xFFFFFFFF:X}, {tables}" + (
            f", {copying:,} being copied" * bool(copying)
        )

    @property
    def copying(self) -> bool:
        return any(isinstance(table, Waiting | Copying) for table in self.tables.values())

    def with_table(self, stream: str, table: TableProgress) -> LogPosition:
        return self.with_tables({stream: table})

    def with_tables(self, tables: Mapping[str, TableProgress]) -> LogPosition:
        """The position with some tables in another state; chunks of tables that are not captured do not count any more."""
        merged = {**self.tables, **tables}
        copied = tuple(each for each in self.copied if each.stream in merged and merged[each.stream].captured)
        return self.model_copy(update={"tables": merged, "copied": copied})

    def forget_copies(self, streams: Mapping[str, Any]) -> LogPosition:
        """The position without the chunks of some tables."""
        return self.model_copy(update={"copied": tuple(each for each in self.copied if each.stream not in streams)})

    def after(self, notes: Sequence[Json], retried: bool, whole: int) -> LogPosition:
        """
        The start of the next range, given the notes of the one that ends here.

        A note may name a table that this position does not know yet: it is found when the next range is planned. A table that
        was refused after more than `whole` rows is copied again when somebody asks for it: each try would show as many rows
        in the targets, and remove them.
        """
        tables, copied, again = dict(self.tables), list(self.copied), set[str]()
        for note in notes:
            if "copied" in note:
                one = Copied.model_validate(note["copied"])
                copied.append(one)
                table = tables[one.stream]
                tables[one.stream] = table.model_copy(update={"rows": table.rows + note.get("rows", 0)})
            for stream in tables.keys() & note.get("reset", ()):
                table = tables[stream]
                if isinstance(table, Copying | Following):
                    tables[stream] = table.restarted()
                    copied = [each for each in copied if each.stream != stream]
            if once_more := CopyAgain.read(note):
                for stream in tables.keys() & {*once_more.streams} - again:
                    table = tables[stream]
                    if isinstance(table, Waiting | Copying | Following):
                        tables[stream] = table.again()
                        again.add(stream)
            for stream in tables.keys() & note.get("parts", {}).keys():
                table = tables[stream]
                if isinstance(table, Waiting | Copying | Following) and table.tree:
                    tables[stream] = table.with_fields(tree=table.tree.shown(note["parts"][stream]))
            if (refused := Refused.read(note)) and refused.stream in tables:
                was = self.tables[refused.stream]
                if was.remains == "clearing":
                    tables[refused.stream] = was.model_copy(update={"remains": "kept"})
                elif was.captured:
                    large = was.remains == "part" and was.rows >= whole and refused.code != TableError.default_code
                    tables[refused.stream] = was.failed(refused, retried=retried and not large)
        copied = [c for c in copied if c.stream in tables and tables[c.stream].captured and c.stream not in again]
        unpassed = {each.stream for each in copied if each.lsn > self.lsn}
        tables = {stream: _with_remains(table, stream in unpassed) for stream, table in tables.items()}
        return self.model_copy(
            update={
                "tables": tables,
                "copied": tuple(dict.fromkeys(each for each in copied if each.lsn > self.lsn)),
                "quiet": next((note["quiet"] for note in reversed(notes) if "quiet" in note), self.quiet),
                # Never before the log: a drain must not be sent back.
                "settled": max(self.settled, self.lsn, *(each.lsn for each in copied)),
            }
        )


def _with_remains(table: TableProgress, unpassed: bool) -> TableProgress:
    """
    The table with what the targets hold of an incomplete copy after a range.

    A copy of several ranges is complete once the log has passed all of its chunks: before that they are of different times.
    """
    if isinstance(table, Copying):
        remains = "part" if table.rows and not table.refresh else ""
    elif isinstance(table, Following):
        remains = "part" if table.remains == "part" and unpassed else ""
    else:
        remains = "cleared" if table.remains == "clearing" else table.remains
    return table if remains == table.remains else table.model_copy(update={"remains": remains})
