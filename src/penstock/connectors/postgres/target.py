"""A topic's table: its name, its columns as the catalog shows them, and the statements that make it fit the rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
from pyarrow import types

from penstock.connectors.postgres.columns import origin, sql_type
from penstock.connectors.postgresql.types import BPCHAR, NAME, TEXT, VARCHAR, TypeCatalog, arrow_type, quoted
from penstock.errors import ConfigError, SchemaError
from penstock.schema.evolution import Policy, follow, refusal
from penstock.sink import Topic

DELETED = "_deleted"
"""The column that marks rows as deleted, with `soft_delete`."""

_TEXTS = (TEXT, VARCHAR, BPCHAR, NAME)
_NAME_BYTES = 63
_PLACEHOLDER = re.compile(r"\{(.*?)\}")


@dataclass(frozen=True)
class Name:
    """A table's name, as it stands in the catalog."""

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
                f"`table` holds a placeholder that is not known: {self.template}",
                code="PEN-1003",
                hint="{topic}, {schema} and {table} are",
            )

    def claim(self, topic: Topic) -> Name:
        """The table of the topic; refused when it is another topic's, or no name for a table."""
        whole = topic.removeprefix("/")
        before, _, table = whole.replace("/", ".").rpartition(".")
        parts = {"topic": whole, "schema": before.rpartition(".")[2] or "public", "table": table}
        first, dot, second = self.template.partition(".")
        name = Name(*(_filled(each, parts) for each in ((first, second) if dot else ("public", first))))
        for each in (name.namespace, name.table):
            if not each or "\0" in each or len(each.encode()) > _NAME_BYTES or name.namespace == self.reserved:
                raise ConfigError(
                    f"the topic {topic!r} cannot have the table {name.sql}",
                    code="PEN-1010",
                    hint=f"PostgreSQL's names have 1 to {_NAME_BYTES} bytes, and {self.reserved} is the sink's own schema: "
                    "choose another `table`, or route to another name",
                )
        if self._claims.setdefault(name, topic) != topic:
            raise ConfigError(
                f"the topics {self._claims[name]} and {topic} meet in the table {name.sql}",
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

    @property
    def is_text(self) -> bool:
        """True if text is assigned to it as it is."""
        return self.base in _TEXTS

    @property
    def computed(self) -> str:
        """The type of an expression that is assigned to it: an explicit cast to a shorter text would cut it off silently."""
        if not self.is_text:
            return self.type
        return "text[]" if types.is_list(self.arrow) else "text"


@dataclass(frozen=True)
class Target:
    """A table that is there."""

    name: Name
    columns: Mapping[str, Column]
    unique: Sequence[frozenset[str]]
    """The sets of columns that tell rows apart."""

    def schema(self) -> pa.Schema:
        """Its columns but those that it makes itself."""
        return pa.schema([(each.name, each.arrow) for each in self.columns.values() if not each.generated])


class Catalog:
    """What a server says about its tables and types; types are asked for again when one is not known."""

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

    def _column(self, name: str, kind: str, oid: int, typmod: int, required: bool, generated: bool) -> Column:
        base, modifier = self._types.base(oid, typmod)
        element = self._types.element(base)
        inner = self._types.base(element[0], modifier)[0] if element else base
        length = modifier - 4 if inner in (VARCHAR, BPCHAR) and modifier >= 4 else None
        return Column(name, kind, arrow_type(oid, typmod, self._types), inner, length, required, generated)


def known_types(connection: psycopg.Connection[Any], schema: pa.Schema) -> dict[str, str]:
    """For every field the type that a column for it has here: its own, if the server knows it, else what holds the values."""
    named = [(each.name, place, *pair) for each in schema for place, pair in enumerate(origin(each))]
    found = {each.name: sql_type(each.type) for each in schema}
    if named:
        rows = connection.execute(_TYPES, [list(each) for each in zip(*named, strict=True)]).fetchall()
        found.update(rows)
    return found


def widened(topic: Topic, target: pa.Schema, rows: pa.Schema, policy: Policy) -> pa.Schema:
    """The target's columns once the rows are in it; those that they add or widen know what they came from."""
    wider = follow(topic, target, rows, policy)
    origins = {each.name: each.metadata for each in rows}
    changed = [
        each
        if each.name in target.names and target.field(each.name).type == each.type
        else each.with_metadata(origins.get(each.name) or {})
        for each in wider
    ]
    for name in wider.names:
        if len(name.encode()) > _NAME_BYTES:
            raise SchemaError(
                f"the column {name!r} of {topic} has a longer name than PostgreSQL takes, which would cut it off",
                code="PEN-4002",
                hint=f"shorten it to {_NAME_BYTES} bytes in the route's SQL",
            )
    return pa.schema(changed)


def altered(
    connection: psycopg.Connection[Any], topic: Topic, target: Target, rows: pa.Schema, policy: Policy
) -> dict[str, str]:
    """The columns that a table must get, or must get another type for, to hold the rows; refused if the policy says so."""
    wider = widened(topic, target.schema(), rows, policy)
    changed = [each for each in wider if (known := target.columns.get(each.name)) is None or known.arrow != each.type]
    kinds = known_types(connection, pa.schema(changed))
    texts = [
        each
        for each in rows
        if each.name not in kinds and origin(each) and (known := target.columns.get(each.name)) and _is_shorter(known)
    ]
    for name, kind in known_types(connection, pa.schema(texts)).items():
        if _is_longer(target.columns[name], kind) and not policy.discards:
            if policy is not Policy.EVOLVE:
                raise refusal(topic, name, target.columns[name].arrow, rows.field(name).type, policy, is_wider=True)
            kinds[name] = kind
    return kinds


def _is_shorter(column: Column) -> bool:
    """True for a column that Arrow knows as text, and that does not take any."""
    return column.arrow == pa.string() and (column.length is not None or not column.is_text)


def _is_longer(column: Column, kind: str) -> bool:
    """True if `kind` takes every text that the column does, and more."""
    length = re.fullmatch(r"character(?: varying)?\((\d+)\)", kind)
    if length is None:
        return kind in ("text", "character varying")
    return column.length is not None and int(length.group(1)) > column.length


def alterations(target: Target, kinds: Mapping[str, str]) -> list[str]:
    """What ALTER TABLE is to do for `altered`."""
    return [
        f"ALTER COLUMN {quoted(name)} TYPE {kind} USING {quoted(name)}::{kind}"
        if name in target.columns
        else f"ADD COLUMN {quoted(name)} {kind}"
        for name, kind in kinds.items()
    ]


def creation(
    connection: psycopg.Connection[Any], name: Name, columns: pa.Schema, key: Sequence[str], soft_delete: bool
) -> list[str]:
    """The statements that make a table, and its schema if there is none."""
    kinds = known_types(connection, columns)
    parts = [f"{quoted(each)} {kind}" for each, kind in kinds.items()]
    if soft_delete:
        parts.append(f"{quoted(DELETED)} bool NOT NULL DEFAULT false")
    if key:
        parts.append(f"PRIMARY KEY ({', '.join(map(quoted, key))})")
    there = connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", [name.namespace]).fetchone() is not None
    make = [] if there else [f"CREATE SCHEMA {quoted(name.namespace)}"]
    return [*make, f"CREATE TABLE {name.sql} ({', '.join(parts)})"]


def refuse_unfit(topic: Topic, target: Target, key: Sequence[str], soft_delete: bool) -> None:
    """Refuse a table in which rows cannot be found by their key."""
    missing = [name for name in key if name not in target.columns]
    if key and (missing or frozenset(key) not in target.unique):
        columns = ", ".join(map(quoted, key))
        raise SchemaError(
            f"the table {target.name.sql} of {topic} has no unique index on ({columns}), which upserts need",
            code="PEN-4002",
            hint=f"CREATE UNIQUE INDEX ON {target.name.sql} ({columns}), or set `key`",
        )
    marker = target.columns.get(DELETED)
    if soft_delete and marker is not None and marker.arrow != pa.bool_():
        raise SchemaError(
            f"the column {DELETED} of {target.name.sql} is {marker.type}, and soft_delete needs it as a bool",
            code="PEN-4002",
        )


_COLUMNS = """
    SELECT c.relkind::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.atttypid::int8, a.atttypmod,
           a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', a.attgenerated <> '' OR a.attidentity = 'a'
      FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
     WHERE c.oid = to_regclass(%s) ORDER BY a.attnum"""

_UNIQUE = """
    SELECT (SELECT array_agg(a.attname::text) FROM unnest(i.indkey) WITH ORDINALITY AS k(attnum, place), pg_attribute a
             WHERE a.attrelid = i.indrelid AND a.attnum = k.attnum AND k.place <= i.indnkeyatts)
      FROM pg_index i
     WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid AND i.indimmediate
       AND i.indpred IS NULL AND i.indexprs IS NULL"""

_TYPES = """
    SELECT DISTINCT ON (n.field) n.field, format_type(to_regtype(n.kind)::oid, n.typmod)
      FROM unnest(%s::text[], %s::int[], %s::text[], %s::int[]) AS n(field, place, kind, typmod)
     WHERE to_regtype(n.kind) IS NOT NULL ORDER BY n.field, n.place"""
