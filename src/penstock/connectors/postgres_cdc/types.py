"""PostgreSQL's types as Arrow types: one mapping for the WAL and for the seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pyarrow as pa

SESSION: Mapping[str, str] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
}
"""Settings that every connection must make before it reads values, by WAL or by SELECT: text output depends on them."""


@dataclass(frozen=True)
class Column:
    """A column of a table; `is_key` says that it belongs to the replica identity."""

    name: str
    type_oid: int
    typmod: int = -1
    is_key: bool = False
    nullable: bool = True


@dataclass(frozen=True)
class TypeCatalog:
    """The types of one database, and what is done about values that Arrow has no exact place for; picklable."""

    SQL: ClassVar[str] = ""
    """Run once per session that decodes; its rows go to `from_rows`."""

    types: Mapping[int, Any] = field(default_factory=dict)
    numeric: Literal["decimal", "text"] = "decimal"
    arrays: Literal["list", "text"] = "list"
    infinity: Literal["extreme", "null", "error"] = "extreme"

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any]], **options: Any) -> TypeCatalog:
        raise NotImplementedError


def arrow_type(oid: int, typmod: int, catalog: TypeCatalog) -> pa.DataType:
    """The Arrow type that holds every value of a PostgreSQL type."""
    raise NotImplementedError


def table_schema(columns: Sequence[Column], catalog: TypeCatalog, key: Sequence[str] | None = None) -> pa.Schema:
    """The columns as an Arrow schema, with its key; every field is nullable, since a delete knows only its key."""
    raise NotImplementedError


def parse_text(values: pa.Array, oid: int, typmod: int, catalog: TypeCatalog, *, name: str = "") -> pa.Array:
    """PostgreSQL's text output (string or binary array, nulls allowed) as `arrow_type`; `name` is for the error message."""
    raise NotImplementedError


def select_text(column: Column, catalog: TypeCatalog) -> str:
    """The SQL expression (quoted) that gives the column's text exactly as the WAL does; `col::text` differs for char, bool, inet."""
    raise NotImplementedError


def select_native(column: Column, catalog: TypeCatalog) -> str:
    """The fastest SQL expression for a SELECT over ADBC whose result `from_select` turns into the same Arrow value."""
    raise NotImplementedError


def from_select(values: pa.Array, column: Column, catalog: TypeCatalog) -> pa.Array:
    """What `select_native` returned over ADBC as `arrow_type`."""
    raise NotImplementedError
