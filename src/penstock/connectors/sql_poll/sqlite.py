"""SQLite files, read only."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from penstock.connectors.sql_poll.database import Found, Table, parted, quoted, sql_name
from penstock.durable import Json
from penstock.errors import ConfigError, FatalError, RetryableError

BUSY_SECS = 5.0
"""How long a reader waits for a writer."""


class Sqlite:
    """A connection to one file."""

    broken = False

    def __init__(self, path: str) -> None:
        with _errors(f"cannot open {path}"):
            # Opened in one thread, read in another, never in two at once.
            self._connection = sqlite3.connect(
                f"file:{quote(path)}?mode=ro",
                uri=True,
                timeout=BUSY_SECS,
                isolation_level=None,
                check_same_thread=False,
            )

    def close(self) -> None:
        self._connection.close()

    def mark(self, number: int) -> str:
        return f"?{number}"

    def describe(self, stream: str, order: Sequence[str]) -> Table:
        schema, name = parted(stream)
        with _errors(f"cannot read {stream}"):
            rows = self._connection.execute(
                "SELECT name, type FROM pragma_table_xinfo(?, ?) WHERE hidden <> 1", (name, schema or "main")
            ).fetchall()
        if not rows:
            raise ConfigError(
                f"there is no table {stream!r}", code="PEN-1016", hint="correct `tables`, or create the table"
            )
        kinds = {name: _kind(declared) for name, declared in rows}
        columns = pa.schema([(name, kind) for name, (kind, _) in kinds.items()])
        blobs = [name for name in order if name in kinds and pa.types.is_binary(columns.field(name).type)]
        if blobs:
            hint = "use a number or a text"
            raise ConfigError(
                f"{stream}.{blobs[0]} is a BLOB and cannot be a key or cursor", code="PEN-1016", hint=hint
            )
        return Table.of(stream, sql_name(stream), columns, order, [made for _, made in kinds.values()])

    def select(self, table: Table, rest: str, values: Sequence[Json]) -> list[Found]:
        names = table.schema.names
        wanted = ", ".join(map(quoted, [*table.order, *names]))
        with _errors(f"cannot read {table.stream}"):
            rows = self._connection.execute(f"SELECT {wanted} FROM {table.sql}{rest}", values).fetchall()
        edge = len(table.order)
        return [
            Found(
                list(row[:edge]),
                {n: None if v is None else f(v) for n, f, v in zip(names, table.details, row[edge:], strict=True)},
            )
            for row in rows
        ]

    def one(self, table: Table, statement: str, values: Sequence[Json]) -> Any:
        with _errors(f"cannot read {table.stream}"):
            return self._connection.execute(statement, values).fetchone()[0]

    def newest(self, table: Table) -> Json:
        return self.one(table, f"SELECT max({quoted(table.order[0])}) FROM {table.sql}", ())


def _kind(declared: str) -> tuple[pa.DataType, Callable[[Any], Any]]:
    """What a column holds by its declared type, as SQLite itself decides; what has no type of its own comes as text."""
    name = declared.upper()
    if "INT" in name:
        return pa.int64(), _same
    if any(part in name for part in ("CHAR", "CLOB", "TEXT")):
        return pa.string(), str
    if "BLOB" in name:
        return pa.binary(), _same
    if any(part in name for part in ("REAL", "FLOA", "DOUB")):
        return pa.float64(), _same
    if "BOOL" in name:
        return pa.bool_(), bool
    return pa.string(), str


def _same(value: Any) -> Any:
    return value


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:  # locked, gone, or a column that was dropped since it was described
        raise RetryableError(f"{what}: {error}", code="PEN-2001") from error
    except sqlite3.Error as error:
        raise FatalError(f"{what}: {error}", hint="see that the file is an SQLite database") from error
