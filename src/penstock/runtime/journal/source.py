"""A journal as a range source: a connector of the runtime's own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from penstock.config import Config
from penstock.errors import FatalError, RetryableError
from penstock.runtime.journal.envelopes import by_stream
from penstock.runtime.journal.segment import (
    Block,
    coalesced,
    end_within,
    first_row,
    gone,
    identity_of,
    read_blocks,
    schemas_of,
    segments_of,
    serialise,
    tail_of,
)
from penstock.runtime.journal.writer import Journal
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch, SourceConnector

LEAST_SPLIT_ROWS = 1024

UNSEEN = "PEN-5016"
"""The code of a task that cannot see the journal."""


class JournalConfig(Config):
    """Where a source's rows are."""

    directory: Path
    """The journal's directory. Tasks read it where they see it; else an engine carries the rows of a split to them."""

    direct: Path | None = None
    """The directory of rows that bypass the journal's promise; they may be gone after a crash."""

    max_epoch_bytes: int = 1 << 28
    """About how many bytes one range holds at most."""

    parallelism: int = 1
    """How many splits a range has at most, until `latest` is asked for more."""


class JournalPosition(Position):
    """The number of rows before it, in the journal and among those that bypass it."""

    row: int = 0
    direct: int = 0

    def describe(self) -> str:
        beside = f", and {self.direct:,} that bypass it" if self.direct else ""
        return f"row {self.row:,} of the journal{beside}" if self.row or self.direct else "the beginning"


@dataclass(frozen=True)
class JournalSplit:
    """Rows `start` to `end`, without `end`."""

    directory: Path
    start: int
    end: int
    lossy: bool = False
    identity: str = ""
    """Of the journal that the driver writes; a directory of that name on another machine may be another one."""
    carried: Carried | None = None
    """The rows themselves, for tasks that cannot see the directory."""

    def rows(self) -> list[tuple[str | None, bytes]]:
        """On the driver: the rows, to be carried to a task."""
        return [(stream, serialise(batch)) for stream, batch in _read(self)]


class Carried(Protocol):
    """Rows that an engine brings to a task, such as a broadcast of Spark's: `value` is what `JournalSplit.rows` gave."""

    @property
    def value(self) -> list[tuple[str | None, bytes]]: ...


class JournalSource(RangeSource[JournalConfig, JournalPosition]):
    """
    A journal as ranges of row numbers; each split is a contiguous run of rows.

    Supports exactly-once: a row keeps its number, and goes only after an ack. `bind` makes the driver's copy: it
    knows the writers and speaks for the source that feeds them.
    """

    name = "journal"

    def __init__(self, config: JournalConfig) -> None:
        super().__init__(config)
        self._parallelism: int | None = None
        self._bound: _Bound | None = None

    def bind(
        self,
        journal: Journal,
        direct: Journal | None = None,
        origin: SourceConnector[Any] | None = None,
        ready: threading.Event | None = None,
        on_ack: Callable[[JournalPosition], None] = lambda end: None,
    ) -> JournalSource:
        """Tie this copy to the writers in its process; copies made by pickling are readers only."""
        self._bound = _Bound(journal, direct, origin, ready, on_ack)
        return self

    def schema(self) -> Schemas:
        """The last schema of each stream seen so far."""
        if self._bound is not None:
            direct = self._bound.direct.schemas() if self._bound.direct else {}
            return {**direct, **self._bound.journal.schemas()}
        return {**schemas_of(self.config.direct), **schemas_of(self.config.directory)}

    def initial(self) -> JournalPosition:
        """The first row that is still there: after `offsets reset`, earlier ones may be gone."""
        return JournalPosition(row=first_row(self.config.directory), direct=first_row(self.config.direct))

    def latest(self, start: JournalPosition, limit: ReadLimit) -> JournalPosition:
        self._parallelism = limit.parallelism
        row, direct = self._tails()
        rows, direct_rows = max(0, row - start.row), max(0, direct - start.direct)
        if limit.rows is not None:
            # Each side gets half, and what the other leaves: neither may starve.
            direct_rows = min(direct_rows, max(limit.rows // 2, limit.rows - rows))
            rows = min(rows, limit.rows - direct_rows)
            rows = self._within_bytes(self.config.directory, start.row, rows)
            if self.config.direct is not None:
                direct_rows = self._within_bytes(self.config.direct, start.direct, direct_rows)
        return limit.bounded(JournalPosition(row=start.row + rows, direct=start.direct + direct_rows))

    def split(self, start: JournalPosition, end: JournalPosition) -> Sequence[JournalSplit]:
        directory, direct = self.config.directory, self.config.direct
        mine = identity_of(directory)
        splits = [JournalSplit(directory, a, b, identity=mine) for a, b in self._parts(start.row, end.row)]
        if direct is not None:
            mine = identity_of(direct)
            splits += [JournalSplit(direct, a, b, True, mine) for a, b in self._parts(start.direct, end.direct)]
        return splits

    def read(self, split: JournalSplit) -> Iterator[SourceBatch]:
        for stream, batch in coalesced(_read(split) if split.carried is None else _carried(split.carried)):
            if stream is None:
                yield from by_stream(batch)
            else:
                yield SourceBatch(batch, stream=stream)

    def ack(self, end: JournalPosition) -> None:
        if self._bound is not None:
            self._bound.journal.retain(end.row)
            if self._bound.direct is not None:
                self._bound.direct.retain(end.direct)
            self._bound.on_ack(end)

    def data_ready_notify(self) -> threading.Event | None:
        return self._bound.ready if self._bound else None

    def checkpoint_requested(self) -> threading.Event | None:
        return self._bound.origin.checkpoint_requested() if self._bound and self._bound.origin else None

    def lag(self) -> int | None:
        return self._bound.origin.lag() if self._bound and self._bound.origin else None

    def _tails(self) -> tuple[int, int]:
        if self._bound is not None:
            return self._bound.journal.tail, self._bound.direct.tail if self._bound.direct else 0
        direct = self.config.direct
        return tail_of(self.config.directory) or 0, (tail_of(direct) or 0) if direct is not None else 0

    def _within_bytes(self, directory: Path, start: int, rows: int) -> int:
        if rows == 0 or _size_of(directory) <= self.config.max_epoch_bytes:
            return rows
        return end_within(directory, start, start + rows, self.config.max_epoch_bytes) - start

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        most = self._parallelism or max(self.config.parallelism, self.context.parallelism)
        parts = max(1, min(most, (end - start) // LEAST_SPLIT_ROWS))
        edges = [start + (end - start) * n // parts for n in range(parts + 1)]
        return ((a, b) for a, b in pairwise(edges) if a < b)


@dataclass(frozen=True)
class _Bound:
    journal: Journal
    direct: Journal | None
    origin: SourceConnector[Any] | None
    ready: threading.Event | None
    on_ack: Callable[[JournalPosition], None]


def _read(split: JournalSplit) -> Iterator[Block]:
    """The rows of a split, block by block."""
    _require_shared(split)
    row = split.start
    segments = segments_of(split.directory)
    try:
        for segment, following in zip_longest(segments, segments[1:]):
            if segment.first >= split.end or (following is not None and following.first <= row):
                continue
            for stream, batch in read_blocks(segment, row, split.end):
                row += batch.num_rows
                yield stream, batch
    except FileNotFoundError:
        segments = segments_of(split.directory)
    if split.lossy or row == split.end:
        return
    if segments and segments[0].first > row:
        raise gone(split.directory, row)
    raise _behind(split, row)


def _carried(rows: Carried) -> Iterator[Block]:
    for stream, raw in rows.value:
        yield stream, pa.ipc.open_stream(raw).read_next_batch()


def _size_of(directory: Path) -> int:
    files = (file for segment in segments_of(directory) for file in (segment.index, segment.data))
    return sum(file.stat().st_size for file in files if file.exists())


def _require_shared(split: JournalSplit) -> None:
    """Refuse to read where the driver's journal cannot be seen: rows that may be lost would be lost here without a word."""
    tail = tail_of(split.directory)
    if tail is None or identity_of(split.directory) != (split.identity or identity_of(split.directory)):
        what = "there is no journal" if tail is None else "there is another journal of the name"
        raise FatalError(
            f"{what} {split.directory} on {socket.gethostname()}, where a task was to read it",
            code=UNSEEN,
            hint="the driver and all executors must see the same `state_dir`: put it on storage that they share, "
            "or run with --master local[*]",
        )
    if tail < split.end:
        raise _behind(split, tail)


def _behind(split: JournalSplit, row: int) -> RetryableError:
    return RetryableError(
        f"the journal {split.directory} ends at row {row} as seen from {socket.gethostname()}, "
        f"and row {split.end - 1} was planned",
        hint="if this stays, the directory is not the shared storage that the driver writes to",
    )
