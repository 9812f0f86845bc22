"""Show the first rows of a Delta table: `show.py PATH [ROWS]`."""

from __future__ import annotations

import sys

from deltalake import DeltaTable
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from rich.console import Console
from rich.table import Table
from rich.text import Text


def main(path: str, rows: int = 10) -> None:
    delta = DeltaTable(path)
    # Arrow reads the files itself: threads that still read ahead through Python can hang an interpreter that ends.
    dataset = delta.to_pyarrow_dataset(filesystem=SubTreeFileSystem(path, LocalFileSystem()))
    head = dataset.head(rows)
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    shown, left = [], console.width
    for column in head.schema:
        cells = [_cell(value) for value in head[column.name].to_pylist()]
        left -= 2 + max(len(text) for text in (column.name, str(column.type), *cells))
        if shown and left < 0:
            break
        table.add_column(Text.assemble(f"{column.name}\n", (str(column.type), "dim")), no_wrap=True)
        shown.append(cells)
    for row in zip(*shown, strict=True):
        table.add_row(*row)
    console.print(table)
    more = len(head.schema) - len(shown)
    also = f", {more} more columns than fit here" if more else ""
    console.print(f"{dataset.count_rows():,} rows, version {delta.version()} of the table{also}", style="dim")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 10)
