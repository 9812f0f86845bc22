"""A source of many tables with one change each per epoch, and what a change does to a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from penstock.changes import CHANGE_FIELDS
from penstock.config import Config
from penstock.schema import with_key
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch


class ManyConfig(Config):
    tables: int
    """How many there are."""

    changed: int
    """How many of them change in each epoch."""

    first_rows: int = 1
    """Rows of each table in the first epoch."""

    rows: int = 1
    """Rows of each changed table in every later one."""


class Epochs(Position):
    done: int = 0


SCHEMA = with_key(pa.schema([("id", pa.int64()), ("name", pa.string()), *CHANGE_FIELDS]), ["id"])


class ManyTables(RangeSource[ManyConfig, Epochs]):
    """Each epoch is one split. The first one fills every table; supports exactly-once."""

    name = "many_tables"

    def schema(self) -> Schemas:
        return {f"t{number:03d}": SCHEMA for number in range(self.config.tables)}

    def latest(self, start: Epochs, limit: ReadLimit) -> Epochs:
        return Epochs(done=start.done + 1)

    def split(self, start: Epochs, end: Epochs) -> Sequence[int]:
        return range(start.done, end.done)

    def read(self, split: int) -> Iterator[SourceBatch]:
        rows = self.config.rows if split else self.config.first_rows
        batch = pa.RecordBatch.from_pydict(
            {
                "id": pa.array(range(rows), pa.int64()),
                "name": pa.array([f"epoch {split}"] * rows),
                "_op": pa.array(["u" if split else "c"] * rows, SCHEMA.field("_op").type),
                "_position": pa.array([f"{split:08d}.{row:08d}" for row in range(rows)]),
                **{
                    field.name: pa.nulls(rows, field.type)
                    for field in CHANGE_FIELDS
                    if field.name not in ("_op", "_position")
                },
            },
            schema=SCHEMA,
        )
        for number in range(self.config.changed if split else self.config.tables):
            yield SourceBatch(batch, stream=f"t{number:03d}")
