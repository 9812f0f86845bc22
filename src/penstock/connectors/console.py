"""Show the first rows of each epoch on the terminal of the driver."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from itertools import islice
from math import isfinite
from typing import Annotated, Any, Literal

import pyarrow as pa
import rich.console
import rich.table
import rich.text
from pydantic import Field, NonNegativeInt

from penstock.config import Config
from penstock.errors import FatalError
from penstock.sink import Epoch, Positions, Receipt, SinkConnector, Task, Topic, WriteResult


class ConsoleConfig(Config):
    format: Literal["table", "jsonl"] = "table"
    """`table` for people; `jsonl` for programs: nothing but rows on standard output, the totals on standard error."""

    max_rows: Annotated[NonNegativeInt, Field(le=1000)] = 20
    """Rows of each topic that are shown per epoch, values beyond a few thousand characters cut; 0 shows only totals."""


class Shown(Receipt):
    """The first rows of a task as JSON text (their columns in order) and how many there were, per topic."""

    rows: dict[Topic, list[str]] = Field(default_factory=dict)
    total: dict[Topic, int] = Field(default_factory=dict)

    def topics(self) -> Iterable[Topic]:
        return self.total


class Console(SinkConnector[ConsoleConfig, Shown]):
    """
    Tasks keep their first rows in the receipt, since what they print is never seen; the driver prints at commit.

    At-least-once: an epoch whose commit is repeated after a crash is shown again.
    """

    name = "console"

    _rows: dict[Topic, list[str]]
    _total: dict[Topic, int]

    def begin_epoch(self, epoch: Epoch, task: Task) -> None:
        self._rows, self._total = {}, {}

    def write_batch(self, topic: Topic, batch: pa.RecordBatch) -> WriteResult:
        rows = self._rows.setdefault(topic, [])
        for row in batch.slice(0, max(0, self.config.max_rows - len(rows))).to_pylist():
            line = json.dumps(_plain(row), ensure_ascii=False)
            rows.append(line if len(line) <= _MAX_LINE else json.dumps(_shortened(_plain(row)), ensure_ascii=False))
        self._total[topic] = self._total.get(topic, 0) + batch.num_rows
        return WriteResult(records_written=batch.num_rows, bytes_written=batch.nbytes)

    def pre_commit(self, epoch: Epoch) -> Shown:
        return Shown(rows=self._rows, total=self._total)

    def commit_epoch(self, epoch: Epoch, receipts: Sequence[Shown], end: Positions) -> None:
        show = self._show_table if self.config.format == "table" else self._show_lines
        try:
            for topic in sorted({topic for receipt in receipts for topic in receipt.topics()}):
                lines = list(islice((row for r in receipts for row in r.rows.get(topic, ())), self.config.max_rows))
                total = sum(receipt.total.get(topic, 0) for receipt in receipts)
                show(f"{topic} · epoch {epoch.number} · {len(lines):,} of {total:,} rows", lines)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise FatalError("standard output was closed", code="PEN-5010", hint="keep its reader open") from error

    def _show_lines(self, title: str, lines: Sequence[str]) -> None:
        for line in lines:
            print(line)
        print(title, file=sys.stderr)

    def _show_table(self, title: str, lines: Sequence[str]) -> None:
        rows = [json.loads(line) for line in lines]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        terminal = rich.console.Console(file=sys.stdout)  # looked up now: a live view may have replaced it
        terminal.print(rich.text.Text(title))
        if columns:
            table = rich.table.Table()
            for name in columns:
                table.add_column(rich.text.Text(_visible(name)), overflow="ellipsis", no_wrap=True)
            for row in rows:
                table.add_row(*(rich.text.Text(_cell(row.get(name))) for name in columns))
            terminal.print(table)


_MAX_LINE = 8192


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case date() | time():
            return value.isoformat()
        case _:
            return str(value)


def _shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its long values cut: a receipt is small, whatever the rows are."""
    most = max(16, _MAX_LINE // max(1, len(row)))
    texts = ((name, value if isinstance(value, str) else json.dumps(value)) for name, value in row.items())
    return {name: row[name] if len(text) <= most else text[:most] + "…" for name, text in texts}


def _cell(value: Any) -> str:
    return "" if value is None else _visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _visible(text: str) -> str:
    """The text with control characters escaped: rows must not steer the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
