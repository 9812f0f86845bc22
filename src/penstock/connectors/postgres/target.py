"""A topic's table: its name, and its columns as the server's catalog shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
from pyarrow import types

from penstock.connectors.postgresql.types import BPCHAR, NAME, TEXT, VARCHAR, TypeCatalog, arrow_type, quoted
from penstock.connectors.upsert import DELETED
from penstock.errors import ConfigError, SchemaError
from penstock.sink import Topic

_TEXTS = (TEXT, VARCHAR, BPCHAR, NAME)
NAME_BYTES = 63
"""The longest name that PostgreSQL takes; it would cut off the rest."""

_PLACEHOLDER = re.compile(r"\{(.*?)\}")


@dataclass(frozen=True)
class Name:
    """A table's name, as the catalog has it."""

    namespace: str
    table: str

    @property
    def sql(self) -> str:
        return f"{quoted(self.namespace)}.{quoted(self.table)}"


@dataclass
class Names:
    """The `table` option: one table per topic."""

    template: str
    reserved: str
    _claims: dict[Name, Topic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rest = re.sub(r"\{(topic|schema|table)\}", "", self.template)
        if not self.template or "{" in rest or "}" in rest:
            raise ConfigError(
                f"`table` has an unknown placeholder: {self.template}",
                code="PEN-1003",
                hint="use {topic}, {schema} and {table}",
            )

    def claim(self, topic: Topic) -> Name:
        """The table of the topic; refused if it is another topic's, or its name is none for a table."""
        whole = topic.removeprefix("/")
        before, _, table = whole.replace("/", ".").rpartition(".")
        parts = {"topic": whole, "schema": before.rpartition(".")[2] or "public", "table": table}
        first, dot, second = self.template.partition(".")
        name = Name(*(_filled(each, parts) for each in ((first, second) if dot else ("public", first))))
        for each in (name.namespace, name.table):
            if not each or "\0" in each or len(each.encode()) > NAME_BYTES or name.namespace == self.reserved:
                raise ConfigError(
                    f"the topic {topic!r} cannot have the table {name.sql}",
                    code="PEN-1010",
                    hint=f"PostgreSQL's names have 1 to {NAME_BYTES} bytes, and the schema {self.reserved} is for the sink's "
                    "own tables: choose another `table`, or route to another name",
                )
        if self._claims.setdefault(name, topic) != topic:
            raise ConfigError(
                f"the topics {self._claims[name]} and {topic} would share the table {name.sql}",
                code="PEN-1011",
                hint='give each a table of its own: table = "{schema}.{table}"',
            )
        return name


def _filled(template: str, parts: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: parts[found.group(1)], template)


@dataclass(frozen=True)
class Column:
    """A column of a target."""

    name: str
    type: str
    """As SQL writes it."""
    arrow: pa.DataType
    """As its values are read."""
    base: int
    """The type below domains; of an array, that of its elements."""
    length: int | None = None
    """Most characters of a varchar or char."""
    required: bool = False
    """It takes no nulls, and has no default."""
    generated: bool = False
    collation: str = ""
    """Of a text whose collation is not the database's default: the collation's name, as SQL writes it."""

    @property
    def is_text(self) -> bool:
        """True if text is assigned to it as it is."""
        return self.base in _TEXTS

    @property
    def computed(self) -> str:
        """The type of an expression that is assigned to it: a cast to a shorter text would cut off the rest silently."""
        if not self.is_text:
            return self.type
        return "text[]" if types.is_list(self.arrow) else "text"

    def compared(self, expression: str) -> str:
        """
        The SQL of a value that is compared with the column, or with other values as the column would compare them.

        Trailing spaces do not count in a char(n); a cast to a char without a length cuts nothing off.
        """
        kind = "bpchar" if self.base == BPCHAR and not types.is_list(self.arrow) else self.computed
        return f"{expression}::{kind}{self.collation and f' COLLATE {self.collation}'}"


@dataclass(frozen=True)
class Target:
    """A table that exists."""

    name: Name
    columns: Mapping[str, Column]
    unique: Sequence[frozenset[str]]
    """The sets of columns that have a unique index."""

    def schema(self) -> pa.Schema:
        """Its columns, without those that it generates itself."""
        return pa.schema([(each.name, each.arrow) for each in self.columns.values() if not each.generated])


class Catalog:
    """The server's tables and types; types are asked for again when one is unknown."""

    def __init__(self) -> None:
        self._types = TypeCatalog()

    def find(self, connection: psycopg.Connection[Any], name: Name) -> Target | None:
        """The table as it is now; None if there is none."""
        rows = connection.execute(_COLUMNS, [name.sql]).fetchall()
        if not rows:
            return None
        if rows[0][0] not in ("r", "p"):
            raise SchemaError(f"{name.sql} is not a table", code="PEN-4002", hint="choose another `table`")
        if any(row[3] not in self._types.types for row in rows):
            self._types = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
        columns = {row[1]: self._column(*row[1:]) for row in rows if row[1] is not None}
        unique = [frozenset(row[0]) for row in connection.execute(_UNIQUE, [name.sql]).fetchall()]
        return Target(name, columns, unique)

    def _column(
        self, name: str, kind: str, oid: int, typmod: int, required: bool, generated: bool, collation: str
    ) -> Column:
        base, modifier = self._types.base(oid, typmod)
        element = self._types.element(base)
        inner = self._types.base(element[0], modifier)[0] if element else base
        length = modifier - 4 if inner in (VARCHAR, BPCHAR) and modifier >= 4 else None
        return Column(name, kind, arrow_type(oid, typmod, self._types), inner, length, required, generated, collation)


def refuse_unfit(topic: Topic, target: Target, key: Sequence[str], soft_delete: bool) -> None:
    """Refuse a table in which rows cannot be found by their key."""
    missing = [name for name in key if name not in target.columns]
    columns = ", ".join(map(quoted, key))
    if missing:
        table, absent = target.name.sql, ", ".join(map(quoted, missing))
        raise SchemaError(
            f"the table {table} of {topic} has no column {absent}, which the key of its rows needs",
            code="PEN-4002",
            hint=f"if it was renamed in the source: ALTER TABLE {table} RENAME COLUMN … TO {quoted(missing[0])}; "
            f"else add it, fill it, and CREATE UNIQUE INDEX ON {table} ({columns})",
        )
    if key and frozenset(key) not in target.unique:
        others = " and ".join(f"({', '.join(map(quoted, sorted(each)))})" for each in sorted(target.unique, key=sorted))
        raise SchemaError(
            f"the table {target.name.sql} of {topic} has no unique index on ({columns}), which upserts need",
            code="PEN-4002",
            hint=f"CREATE UNIQUE INDEX ON {target.name.sql} ({columns}), or set `key`"
            + (f"; if the table has another key now, first drop the unique index on {others}" if others else ""),
        )
    marker = target.columns.get(DELETED)
    if soft_delete and marker is not None and marker.arrow != pa.bool_():
        raise SchemaError(
            f"the column {DELETED} of {target.name.sql} is {marker.type}, and soft_delete needs it as a bool",
            code="PEN-4002",
        )


_COLUMNS = """
    SELECT c.relkind::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.atttypid::int8, a.atttypmod,
           a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', a.attgenerated <> '' OR a.attidentity = 'a',
           coalesce((SELECT format('%%I.%%I', n.nspname, o.collname)
                       FROM pg_collation o JOIN pg_namespace n ON n.oid = o.collnamespace
                      WHERE o.oid = a.attcollation AND o.collprovider <> 'd'), '')
      FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
     WHERE c.oid = to_regclass(%s) ORDER BY a.attnum"""

_UNIQUE = """
    SELECT (SELECT array_agg(a.attname::text) FROM unnest(i.indkey) WITH ORDINALITY AS k(attnum, place), pg_attribute a
             WHERE a.attrelid = i.indrelid AND a.attnum = k.attnum AND k.place <= i.indnkeyatts)
      FROM pg_index i
     WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid AND i.indimmediate
       AND i.indpred IS NULL AND i.indexprs IS NULL"""
