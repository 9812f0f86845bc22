"""What is asked of a database, in SQL that all of them understand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from penstock.durable import Json
from penstock.errors import ConfigError, DataError
from penstock.schema import with_key

Place = Sequence[Json]
"""The cursor of a row and then its key, as the database compares them."""


@dataclass(frozen=True)
class Table:
    """A table as it looks now."""

    stream: str
    sql: str
    schema: pa.Schema
    order: tuple[str, ...]
    """The columns by which it is read: the cursor, then the key."""
    details: Any = None
    """What the database itself needs to read its values."""

    @classmethod
    def of(cls, stream: str, sql: str, columns: pa.Schema, order: Sequence[str], details: Any = None) -> Table:
        """The table, if it has what it is to be read by."""
        missing = [name for name in order if name not in columns.names]
        if missing:
            raise ConfigError(
                f"{stream} has no column {missing[0]!r}",
                code="PEN-1016",
                hint=f"it has {', '.join(columns.names)}; see `key` and `cursor`",
            )
        return cls(stream, sql, with_key(columns, order[1:]), tuple(dict.fromkeys(order)), details)


@dataclass(frozen=True)
class Found:
    """A row and its place."""

    place: list[Json]
    row: Mapping[str, Any]


class Database(Protocol):
    """One connection, for one thread; each system has its own."""

    @property
    def broken(self) -> bool:
        """True if nothing more can be asked over it."""

    def mark(self, number: int) -> str:
        """The placeholder of the value with that number, from 1, in its SQL."""

    def describe(self, stream: str, order: Sequence[str]) -> Table:
        """The table of that name; a `ConfigError` if there is none."""

    def select(self, table: Table, rest: str, values: Sequence[Json]) -> list[Found]:
        """The rows of the table that `rest` of the statement chooses."""

    def one(self, table: Table, statement: str, values: Sequence[Json]) -> Any:
        """The only value that a statement gives."""

    def newest(self, table: Table) -> Json:
        """The largest cursor; None if there is none. A `Place` holds it as it is."""

    def close(self) -> None: ...


def page(database: Database, table: Table, after: Place | None, upto: Place, rows: int) -> list[Found]:
    """The next rows after `after`, up to `upto`, which may be a cursor alone."""
    where, values = _where(database, table, after, upto)
    order = ", ".join(map(quoted, table.order))
    found = database.select(table, f"{where} ORDER BY {order} LIMIT {rows}", values)
    for each in found:
        if None in each.place:
            name = table.order[each.place.index(None)]
            raise DataError(f"a row of {table.stream} has no value in {name!r}, which is part of its key")
    return found


def count(database: Database, table: Table, after: Place | None, most: int) -> int:
    """How many rows come after `after`, as far as it is worth counting."""
    where, values = _where(database, table, after, None)
    return int(
        database.one(table, f"SELECT count(*) FROM (SELECT 1 FROM {table.sql}{where} LIMIT {most}) AS n", values)
    )


def has_nulls(database: Database, table: Table) -> bool:
    """True if there are rows without a cursor."""
    column = quoted(table.order[0])
    return bool(database.one(table, f"SELECT EXISTS (SELECT 1 FROM {table.sql} WHERE {column} IS NULL)", ()))


def _where(database: Database, table: Table, after: Place | None, upto: Place | None) -> tuple[str, list[Json]]:
    parts = [f"{quoted(table.order[0])} IS NOT NULL"]
    values: list[Json] = []
    for sign, edge in ((">", after), ("<=", upto)):
        if edge is not None:
            names = ", ".join(map(quoted, table.order[: len(edge)]))
            marks = ", ".join(database.mark(len(values) + n) for n in range(1, len(edge) + 1))
            parts.append(f"({names}) {sign} ({marks})")
            values += edge
    return f" WHERE {' AND '.join(parts)}", values


def quoted(name: str) -> str:
    """A name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def parted(stream: str) -> tuple[str, str]:
    """Schema and table; the schema may be empty."""
    schema, dot, table = stream.partition(".")
    return (schema, table) if dot else ("", schema)


def sql_name(stream: str) -> str:
    """`schema.table` for SQL."""
    return ".".join(quoted(part) for part in parted(stream) if part)


@contextmanager
def closing_on_error(database: Database) -> Iterator[None]:
    try:
        yield
    except BaseException:
        database.close()
        raise
