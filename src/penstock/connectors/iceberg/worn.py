"""Which data files an upsert writes again: those with many deleted rows, and small ones that become one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyiceberg.manifest import DataFile
from pyiceberg.typedef import Record

from penstock.changes.keys import Ints

if TYPE_CHECKING:
    from penstock.connectors.iceberg.upsert import TableFile

Group = tuple[int, Record]

FAN = 8
"""Files of about one size that become one: each row is written again once per eightfold growth of its file."""

SMALL_ROWS, SMALL_BYTES = 250_000, 4 << 20
"""A file with as many rows or bytes stays as it is."""


def group_of(file: DataFile) -> Group:
    """What one delete file may be about: one partition of one layout."""
    return file.spec_id, file.partition


def worst_first(files: Iterable[tuple[TableFile, Ints]], percent: float, most: int) -> list[TableFile]:
    """
    Of files and their deleted rows those that have many of them, the worst first, and not too many rows in all.

    A file has, once that share of its rows is deleted; and the worst ones have, as long as half that share of the whole
    table is. So files of one age do not come due all at once.
    """
    counted = [(len(dead), file) for file, dead in files]
    rows, dead = sum(file.rows for _, file in counted), sum(count for count, _ in counted)
    due: list[TableFile] = []
    for count, file in sorted(counted, key=lambda each: each[0] / max(each[1].rows, 1), reverse=True):
        is_worn = count * 100 >= file.rows * percent or dead * 200 > rows * percent
        if not count or not is_worn or file.rows > most:
            break
        due.append(file)
        most, rows, dead = most - file.rows, rows - count, dead - count
    return due


def joined(files: Iterable[TableFile], most: int) -> Iterator[list[TableFile]]:
    """Small files of one partition and about one size, the smallest first, and not too many rows in all."""
    alike: dict[tuple[int, Group], list[TableFile]] = defaultdict(list)
    for file in files:
        if file.rows < SMALL_ROWS and file.bytes < SMALL_BYTES:
            alike[file.rows.bit_length() // 3, group_of(file.data)].append(file)
    for (_, _), found in sorted(alike.items(), key=lambda each: each[0][0]):
        for first in range(0, len(found) - FAN + 1, FAN):
            group = found[first : first + FAN]
            most -= sum(file.rows for file in group)
            if most < 0:
                return
            yield group
