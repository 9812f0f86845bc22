"""How rows are laid out in directories by the values of some of their columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import SchemaError
from penstock.sink import Topic

_NULL = "__HIVE_DEFAULT_PARTITION__"

Split = Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]
"""Rows of one batch by partition: the partition's values as text, and its rows."""


class Layout(Protocol):
    """How a topic's rows are spread over partitions."""

    @property
    def names(self) -> Sequence[str]:
        """What the partitions are named after, in this order."""

    def check(self, topic: Topic, schema: pa.Schema) -> None:
        """Refuse rows that cannot be laid out so."""

    def split(self, topic: Topic, batch: pa.RecordBatch) -> Split:
        """The rows of each partition, as its files hold them."""


@dataclass(frozen=True)
class Directories:
    """Partitions by the values of columns, which are in the names of directories and not in the files."""

    names: tuple[str, ...] = ()

    def check(self, topic: Topic, schema: pa.Schema) -> None:
        missing = [name for name in self.names if name not in schema.names]
        if missing or len(schema.names) == len(self.names):
            raise SchemaError(
                f"{topic} has the columns {', '.join(schema.names)}; `partition_by` needs {', '.join(self.names)}"
                " and at least one more",
                code="PEN-4002",
                hint="change `partition_by`, or route this topic to another sink",
            )

    def split(self, topic: Topic, batch: pa.RecordBatch) -> Split:
        return split(batch, self.names)


def split(batch: pa.RecordBatch, columns: Sequence[str]) -> Split:
    """The batch's rows by the values of `columns`, as text and without them; order within a partition is kept."""
    if not batch.num_rows:
        return
    if not columns:
        yield (), batch
        return
    codes = np.zeros(batch.num_rows, np.int64)
    texts: list[list[str | None]] = []
    for name in columns:
        encoded = batch.column(name).dictionary_encode(null_encoding="encode")
        texts.append(partition_text(name, encoded.dictionary))
        codes = codes * len(texts[-1]) + encoded.indices.to_numpy()
    rows = batch.drop_columns(list(columns))
    found, starts = np.unique(np.sort(codes), return_index=True)
    if len(found) > 1:
        rows = rows.take(pa.array(np.argsort(codes, kind="stable")))
    for code, start, end in zip(found.tolist(), starts, [*starts[1:], batch.num_rows], strict=True):
        values: list[str | None] = []
        for each in reversed(texts):
            code, position = divmod(code, len(each))
            values.append(each[position])
        yield tuple(reversed(values)), rows.slice(start, end - start)


def partition_text(name: str, values: pa.Array) -> list[str | None]:
    """Values of a partition column as text, from which `pc.cast` makes them again."""
    kind = values.type
    if types.is_dictionary(kind):
        return partition_text(name, values.dictionary_decode())
    if types.is_timestamp(kind):
        if kind.tz is None:
            return list(pc.cast(values, pa.string()).to_pylist())
        utc = pc.cast(pc.cast(values, pa.timestamp(kind.unit, "UTC")), pa.string())
        return list(pc.replace_substring(utc, " ", "T").to_pylist())
    if any(is_kind(kind) for is_kind in (types.is_integer, types.is_boolean, types.is_date, types.is_string)) or any(
        is_kind(kind) for is_kind in (types.is_large_string, types.is_string_view)
    ):
        return list(pc.cast(values, pa.string()).to_pylist())
    raise SchemaError(
        f"the column {name!r} is {kind}, and a partition column must be text, integer, boolean, date or timestamp",
        code="PEN-4002",
        hint="change `partition_by`, or cast the column in the route's SQL",
    )


def hive(partition: dict[str, str | None]) -> list[str]:
    """The directories of a partition: `day=2026-01-01`."""
    return [f"{_quoted(name)}={_NULL if value is None else _quoted(value)}" for name, value in partition.items()]


def _quoted(text: str) -> str:
    """A tilde too: the client of Delta quotes it when it compacts, and does not find the file."""
    return quote(text, safe="").replace("~", "%7E")
