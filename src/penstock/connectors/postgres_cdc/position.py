"""Where the capture stands: how far the log was read, what became of each table, and where that leads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from penstock.connectors.postgres_cdc.seed import Copied, Progress
from penstock.durable import Json
from penstock.source import Position


class LogPosition(Position):
    """How far the log was read, and how far each table is copied; `lsn` itself is not part of a range that ends there."""

    lsn: int = 0
    system: str = ""
    timeline: int = 0
    run: str = ""
    """With `snapshot = "always"`: the start that the copies are of."""
    tables: dict[str, Progress] = Field(default_factory=dict)
    copied: tuple[Copied, ...] = ()
    """Chunks whose snapshots the log has not passed."""
    turn: Literal["log", "copy"] = "copy"
    """While there is something to copy: what comes next."""
    quiet: bool = False
    """The last range of log held no changes."""
    settled: int = 0
    """The copies show nothing that is behind this place in the log, and a drain ends nowhere before it; 0: at the start."""
    applied: tuple[str, ...] = ()
    """Requests that this position follows; their files may go."""
    slots: int = 1
    """How often the slot was made; between two of them lies log that nobody reads."""

    @property
    def copying(self) -> bool:
        return any(progress.state in ("waiting", "seeding") for progress in self.tables.values())

    def after(self, notes: Sequence[Json], retried: bool) -> LogPosition:
        """
        Where the next range starts, given what was noted while the one that ends here was read.

        A note may be of a table that this position does not know yet: it is found when the next range is planned.
        """
        tables, copied, quiet = dict(self.tables), list(self.copied), self.quiet
        again: set[str] = set()
        update: dict[str, Any]
        for note in notes:
            quiet = note.get("quiet", quiet)
            if "copied" in note:
                one = Copied.model_validate(note["copied"])
                copied.append(one)
                rows = tables[one.stream].rows + note.get("rows", 0)
                tables[one.stream] = tables[one.stream].model_copy(update={"rows": rows})
            for stream in tables.keys() & note.get("reset", ()):
                if tables[stream].state in ("seeding", "seeded"):
                    update = {"state": "seeding", "frontier": None, "rows": 0}
                    tables[stream] = tables[stream].model_copy(update=update)
                    copied = [each for each in copied if each.stream != stream]
            for stream in tables.keys() & note.get("again", ()):
                if tables[stream].captured and stream not in again:
                    copies = max(tables[stream].copies, 1) + 1
                    update = {"state": "waiting", "frontier": None, "rows": 0, "refresh": False, "copies": copies}
                    tables[stream] = tables[stream].model_copy(update=update)
                    again.add(stream)
            for stream in tables.keys() & note.get("parts", {}).keys():
                if tree := tables[stream].tree:
                    tables[stream] = tables[stream].model_copy(update={"tree": tree.shown(note["parts"][stream])})
            failed = note.get("failed", {"stream": ""})
            if failed["stream"] in tables and tables[failed["stream"]].captured:
                tables[failed["stream"]] = tables[failed["stream"]].failed(failed, retried=retried)
        copied = [c for c in copied if c.stream in tables and tables[c.stream].captured and c.stream not in again]
        update = {
            "tables": tables,
            "copied": tuple(dict.fromkeys(each for each in copied if each.lsn > self.lsn)),
            "quiet": quiet,
            # Never behind the log: a drain must not be sent back.
            "settled": max(self.settled, self.lsn, *(each.lsn for each in copied)),
        }
        return self.model_copy(update=update)
