"""Show the first rows of a Delta table: `show.py PATH [ROWS]`."""

from __future__ import annotations

import sys

from deltalake import DeltaTable
from rich.console import Console
from rich.table import Table


def main(path: str, rows: int = 10) -> None:
    delta = DeltaTable(path)
    dataset = delta.to_pyarrow_dataset()
    head = dataset.head(rows)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in head.schema:
        table.add_column(f"{column.name}\n[dim]{column.type}[/]", no_wrap=True)
    for row in head.to_pylist():
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
    console.print(table)
    console.print(f"{dataset.count_rows():,} rows, version {delta.version()} of the table", style="dim")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 10)
