"""What goes to a terminal holds nothing that the terminal would take for a command: names, rows and messages come from others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from penstock.errors import printable

_STEERING = (
    *range(9),
    *range(11, 32),
    *range(127, 160),
    0x061C,
    0x200E,
    0x200F,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
"""Control characters but tab and line break, and those that turn the direction of text."""
_PICTURES = {code: chr(0x2400 + code) if code < 32 else "␡" if code == 127 else "�" for code in _STEERING}
_ESCAPES = {code: f"\\u{code:04x}" for code in _STEERING}


_LEAST = 20
"""Characters of a value that are worth a column of their own."""

NARROW = 80
"""Terminals with fewer columns get lines below each other: in a table, names and reasons would be cut."""


def visible(text: str) -> str:
    """The text with a picture in the place of each character that steers a terminal."""
    return text.translate(_PICTURES)


def json_text(value: Any, indent: int | None = None) -> str:
    """As JSON, which may be shown in a terminal."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str).translate(_ESCAPES)


class Terminal(Console):
    """Shows text as it is, and nothing of it as a command: not of the terminal, nor of rich's own markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment(visible(text), segment.style)


def listing(console: Console, heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print a table; in a narrow terminal a paragraph for each row, so that nothing of it is cut."""
    if console.width >= NARROW:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for head in heads:
            table.add_column(head, overflow="fold")
        for row in rows:
            table.add_row(*(_text(cell) for cell in row))
        console.print(table)
        return
    for first, *rest in rows:
        console.print(Text.assemble((f"{heads[0]} ", "dim"), _text(first)), soft_wrap=True)
        for head, cell in zip(heads[1:], rest, strict=True):
            if text := _text(cell):
                console.print(Text.assemble((f"  {head} " if head else "  ", "dim"), text), soft_wrap=True)


def show_rows(names: Sequence[str], rows: Sequence[Sequence[Text]], console: Console) -> None:
    """Print rows of data; where there is no room for their columns, the columns of each below each other."""
    names = [printable(name) for name in names]
    least = [max([len(name), *(min(row[place].cell_len, _LEAST) for row in rows)]) for place, name in enumerate(names)]
    if sum(least) + 2 * len(least) <= console.width:
        table = Table(*names, box=None, header_style="dim", padding=(0, 2, 0, 0))
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    for row in rows:
        record = Table.grid("", "", padding=(0, 2, 0, 0))
        record.columns[0].style, record.columns[1].overflow = "dim", "fold"
        for name, value in zip(names, row, strict=True):
            record.add_row(name, value)
        console.print(record, Text())


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
