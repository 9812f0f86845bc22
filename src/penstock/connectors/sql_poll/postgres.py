"""PostgreSQL tables and views, their values as `postgres_cdc` gives them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.config import Secret
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.config import NOTICED
from penstock.connectors.postgresql.types import SESSION, Column, TypeCatalog, parse_text, select_text, table_schema
from penstock.connectors.sql_poll.database import Found, Table, quoted, sql_name
from penstock.durable import Json
from penstock.errors import ConfigError, DataError, FatalError, RetryableError

_COLUMNS = """
    SELECT a.attname::text, a.atttypid::int8, a.atttypmod FROM pg_attribute a
     WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""


class Postgres:
    """A connection to one database."""

    def __init__(self, dsn: str, password: Secret | None) -> None:
        with _errors("cannot connect to PostgreSQL"):
            given = conninfo_to_dict(dsn)
            if given.get("password"):
                raise ConfigError(
                    "the dsn holds a password", code="PEN-1016", hint="give it as `password = { env = … }`"
                )
            secret = {"password": password.reveal()} if password else {}
            noticed = {name: value for name, value in NOTICED.items() if name not in given}
            known = make_conninfo(dsn, application_name="penstock", **noticed, **secret)
            # Raw: a name may hold what other cursors take for the place of a value.
            self._connection = connections.make(
                known, lambda info: psycopg.connect(info, autocommit=True, cursor_factory=psycopg.RawCursor)
            )
            for name, value in SESSION.items():
                self._connection.execute("SELECT set_config($1, $2, false)", [name, value])
            self._catalog = TypeCatalog.from_rows(self._connection.execute(TypeCatalog.SQL).fetchall())

    @property
    def broken(self) -> bool:
        return self._connection.closed

    def close(self) -> None:
        self._connection.close()

    def mark(self, number: int) -> str:
        return f"${number}"

    def describe(self, stream: str, order: Sequence[str]) -> Table:
        sql = sql_name(stream)
        with _errors(f"cannot read {stream}"):
            rows = self._connection.execute(_COLUMNS, [sql]).fetchall()
            columns = [Column(*row) for row in rows]
            if any(
                column.type_oid not in self._catalog.types for column in columns
            ):  # a type made since, or a composite
                self._catalog = TypeCatalog.from_rows(self._connection.execute(TypeCatalog.SQL).fetchall())
        if not columns:
            raise ConfigError(
                f"there is no table {stream!r}", code="PEN-1016", hint="correct `tables`, or create the table"
            )
        return Table.of(stream, sql, table_schema(columns, self._catalog), order, columns)

    def select(self, table: Table, rest: str, values: Sequence[Json]) -> list[Found]:
        columns: list[Column] = table.details
        wanted = ", ".join(select_text(column, self._catalog) for column in columns)
        with _errors(f"cannot read {table.stream}"):
            rows = self._connection.execute(f"SELECT {wanted} FROM {table.sql}{rest}", values).fetchall()
        if not rows:
            return []
        texts = dict(zip(table.schema.names, zip(*rows, strict=True), strict=True))
        found = [self._parsed(column, texts[column.name]) for column in columns]
        places = zip(*(texts[name] for name in table.order), strict=True)
        names = table.schema.names
        return [
            Found(list(place), dict(zip(names, row, strict=True)))
            for place, row in zip(places, zip(*found, strict=True), strict=True)
        ]

    def _parsed(self, column: Column, texts: Sequence[str | None]) -> list[Any]:
        text = pa.array(texts, pa.string())
        try:
            return _values(parse_text(text, column.type_oid, column.typmod, self._catalog, name=column.name))
        except DataError as error:
            name = quoted(column.name)
            hint = f"name a view in `tables` that gives the column as text: CREATE VIEW … AS SELECT …, {name}::text AS {name}"
            raise DataError(error.message, code=error.code, hint=hint) from error

    def one(self, table: Table, statement: str, values: Sequence[Json]) -> Any:
        with _errors(f"cannot read {table.stream}"):
            row = self._connection.execute(statement, values).fetchone()
        return row[0] if row else None

    def newest(self, table: Table) -> Json:
        column = next(column for column in table.details if column.name == table.order[0])
        name = quoted(column.name)
        text = select_text(column, self._catalog)
        # Ordered and not max(): not every type that can be compared has that.
        return self.one(
            table, f"SELECT {text} FROM {table.sql} WHERE {name} IS NOT NULL ORDER BY {name} DESC LIMIT 1", ()
        )


def _values(column: pa.Array) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except OverflowError:  # Python's dates end with the year 9999, PostgreSQL's and Arrow's do not
        return [each if each.is_valid else None for each in column]


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        with failures.errors(what):
            yield
    except FatalError as error:
        if isinstance(error.__cause__, psycopg.errors.UndefinedColumn):  # dropped since it was described
            raise RetryableError(error.message) from error
        raise
