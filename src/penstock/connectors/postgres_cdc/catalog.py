"""The tables that the options choose, as the server's catalog shows them, and why some of them cannot be captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.postgres_cdc.publications import Publication, find_publications, marked, publications
from penstock.connectors.postgres_cdc.shape import INSERTS, CurrentShape, Shape, TypeMark, digest
from penstock.connectors.postgresql.types import Column, TypeCatalog, quoted, table_schema
from penstock.errors import ConfigError
from penstock.source import Finding

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.config import PostgresLogConfig

COMPARABLE = {
    20: "int8", 21: "int2", 23: "int4", 2950: "uuid", 25: "text", 1043: "varchar", 17: "bytea",
    1082: "date", 1114: "timestamp", 1184: "timestamptz",
}  # fmt: skip
"""Types whose order is the same in Arrow as in the server (text: by `COLLATE "C"`)."""

PATTERNS = 'patterns are "schema.table", with * for any part'

_TEXT = (25, 1043)
_CHANGE_NAMES = {each.name for each in CHANGE_FIELDS}
_FIRST_OWN_OID = 16384
"""Types below come with the server: none of them is an enum or a composite that can be altered."""


@dataclass(frozen=True)
class Table:
    """A table that the options choose, as the catalog shows it."""

    oid: int
    namespace: str
    name: str
    partitioned: bool
    replica_identity: str
    primary_key: tuple[str, ...]
    index: tuple[str, ...]
    """The columns of the index that is the key, in its order."""
    columns: tuple[Column, ...]
    """The captured columns; `is_key`: part of the replica identity."""
    shape: CurrentShape
    insert_only: bool = False
    plain_order: bool = True
    """The key's own order is that of its bytes, so that an index on it serves."""
    comparable: bool = True
    """Keys can be compared outside the server as it does."""
    estimate: int | None = None
    """About how many rows it has, as far as the server knows."""
    generated: frozenset[str] = frozenset()
    """Captured columns that the server computes and stores."""
    unpublished: tuple[str, ...] = ()
    """Generated columns that the server cannot publish: virtual ones, and before version 18 stored ones."""
    published: str = ""
    """How it is published, see `Publication.mark`; empty: not at all, or without some of its changes."""

    @property
    def stream(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def sql(self) -> str:
        return f"{quoted(self.namespace)}.{quoted(self.name)}"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that tell rows apart: a delete is sure to carry them."""
        named = tuple(column.name for column in self.columns if column.is_key)
        return named if named and self.replica_identity != "f" else self.primary_key

    @property
    def key_columns(self) -> tuple[Column, ...]:
        """The key in the order of its index."""
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.index)

    @property
    def chunked(self) -> bool:
        """True if it can be copied in the order of its key, part by part."""
        return bool(self.index) and self.comparable

    @property
    def has_identity(self) -> bool:
        """True if the server lets updates and deletes be published."""
        return self.replica_identity == "f" or any(column.is_key for column in self.columns)

    def order_by(self) -> list[str]:
        """The key as expressions whose order is the same everywhere."""
        return [
            f'{quoted(column.name)} COLLATE "C"'
            if column.type_oid in _TEXT and not self.plain_order
            else quoted(column.name)
            for column in self.key_columns
        ]

    def schema(self, catalog: TypeCatalog) -> pa.Schema:
        """The schema of its changes."""
        own = table_schema(self.columns, catalog, self.key)
        return pa.schema([*own, *CHANGE_FIELDS], metadata=own.metadata)


@dataclass(frozen=True)
class Tables:
    """The tables that are captured, and the ones that are chosen and cannot be."""

    captured: Mapping[str, Table] = field(default_factory=dict)
    refused: Mapping[str, Finding] = field(default_factory=dict)
    """By stream: why it is left out, and how to change that."""


def find_tables(
    connection: psycopg.Connection[Any],
    config: PostgresLogConfig,
    version: int,
    *,
    required: bool = True,
    strict: bool = True,
) -> Tables:
    """
    The tables that the options choose, as they are now.

    `required`: it is an error if there are none. `strict`: it is an error if a table that was never captured is wrong.
    """
    look = _Look.at(connection, config)
    captured: dict[str, Table] = {}
    refused: dict[str, Finding] = {}
    wrong: dict[str, ConfigError] = {}
    for row in sorted(look.chosen.values()):
        table = look.table(row, config, version)
        twin = captured.get(table.stream)
        if twin is not None:
            what = f"its stream name {table.stream} is also that of {twin.sql}"
            refused[table.sql] = Finding(False, what, "rename one of the two tables")
            continue
        refusal = look.refusal(row, table, config)
        if refusal is None:
            captured[table.stream] = table
            continue
        refused[table.stream] = refusal.finding
        if refusal.stops:
            what = f"{table.stream} cannot be captured: {refusal.finding.what}"
            wrong[table.stream] = ConfigError(what, code="PEN-1016", hint=refusal.finding.fix + refusal.otherwise)
    if strict:
        _require(look, config, captured, refused, wrong, required)
    return Tables(captured, refused)


def _require(
    look: _Look,
    config: PostgresLogConfig,
    captured: Mapping[str, Table],
    refused: Mapping[str, Finding],
    wrong: Mapping[str, ConfigError],
    required: bool,
) -> None:
    """Raise what is wrong, unless it concerns a table that was captured before: that one is set aside by itself."""
    before: set[str] = set()
    if wrong or not captured:
        streams = {
            f"{row[1]}.{row[2]}"
            for row in look.rows
            if any(each.entry(row[0], row[1]) for each in look.publications.values())
        }
        before = {stream for stream in streams if chosen(stream, config)}
    if new := sorted(wrong.keys() - before):
        first, more = wrong[new[0]], f"; also wrong: {', '.join(new[1:])}" if new[1:] else ""
        raise ConfigError(first.message + more, code=first.code, hint=first.hint)
    if required and not captured and not before:
        raise ConfigError(nothing(config, refused), code="PEN-1016", hint=PATTERNS)


@dataclass(frozen=True)
class _Refusal:
    """Why a chosen table cannot be captured; `stops`: a start without it would surprise, so there is none."""

    finding: Finding
    stops: bool = False
    otherwise: str = ""
    """More ways to fix it, for the error of a start."""

    @classmethod
    def of(cls, what: str, fix: str, *, stops: bool = False, otherwise: str = "") -> _Refusal:
        return cls(Finding(False, what, fix), stops, otherwise)


@dataclass(frozen=True)
class _Look:
    """What the catalog answered, by table."""

    rows: Sequence[tuple[Any, ...]]
    chosen: Mapping[int, tuple[Any, ...]]
    columns: Mapping[int, Sequence[tuple[Any, ...]]]
    shapes: Mapping[int, tuple[str, Sequence[int], Mapping[str, str]]]
    members: Mapping[int, Mapping[int, tuple[str, ...]]]
    publications: Mapping[str, Publication]
    utf8: bool

    @classmethod
    def at(cls, connection: psycopg.Connection[Any], config: PostgresLogConfig) -> _Look:
        rows = connection.execute(_TABLES).fetchall()
        found = {row[0]: row for row in rows if chosen(f"{row[1]}.{row[2]}", config)}
        # A partition whose root is captured comes with it.
        found = {oid: row for oid, row in found.items() if row[6] == oid or row[6] not in found}
        columns: dict[int, list[tuple[Any, ...]]] = {oid: [] for oid in found}
        for row in connection.execute(_COLUMNS, [list(found)]).fetchall():
            columns[row[0]].append(row[1:])
        shapes = {oid: shape for oid, *shape in connection.execute(_SHAPES, [list(found)]).fetchall()}
        members = _members(connection, {each[1] for some in columns.values() for each in some})
        encoding = connection.execute("SELECT current_setting('server_encoding') = 'UTF8'").fetchone()
        held = find_publications(connection, publications(config))
        return cls(rows, found, columns, shapes, members, held, bool(encoding and encoding[0]))

    def table(self, row: tuple[Any, ...], config: PostgresLogConfig, version: int) -> Table:
        """A chosen table; its key may have columns that are not captured, see `refusal`."""
        oid, namespace, name, kind, identity, primary_key, _, identity_key, estimate, _ = row
        stream = f"{namespace}.{name}"
        index = tuple(identity_key if identity == "i" else primary_key)
        key = index if identity in "di" else ()
        captured = [
            (Column(column, type_oid, typmod, column in key, not required, as_text(stream, column, config)), plain)
            for column, type_oid, typmod, required, generated, plain in self.columns[oid]
            if _is_sent(generated, version) and not excluded(stream, column, config)
        ]
        columns = tuple(column for column, _ in captured)
        names = {column.name for column in columns}
        insert_only = matches(stream, config.insert_only)
        kinds = {0 if column.as_text else column.type_oid for column in columns if column.name in index}
        table = Table(
            oid,
            namespace,
            name,
            kind == "p",
            identity,
            tuple(primary_key),
            index,
            columns,
            self._shape(oid, stream, index, columns, insert_only, config),
            insert_only,
            plain_order=all(plain for column, plain in captured if column.name in index),
            comparable=kinds <= {*COMPARABLE} and (self.utf8 or kinds.isdisjoint(_TEXT)),
            estimate=estimate if estimate >= 0 else None,
            generated=frozenset(each[0] for each in self.columns[oid] if each[4] and each[0] in names),
            unpublished=tuple(
                each[0]
                for each in self.columns[oid]
                if not _is_sent(each[4], version) and not excluded(stream, each[0], config)
            ),
        )
        return marked(table, config, self.publications)

    def _shape(
        self,
        oid: int,
        stream: str,
        index: tuple[str, ...],
        columns: tuple[Column, ...],
        insert_only: bool,
        config: PostgresLogConfig,
    ) -> CurrentShape:
        text, defaults, defined_in = self.shapes.get(oid, ("", [], {}))
        found = Shape.parse(text)
        as_texts = [column.name for column in columns if column.as_text]
        members = {kind: parts for c in columns for kind, parts in self.members.get(c.type_oid, {}).items()}
        left_out = [digest(each[0]) for each in self.columns[oid] if excluded(stream, each[0], config)]
        return CurrentShape(
            found.columns,
            found.file,
            found.defined,
            digest(repr((index, as_texts) if as_texts else index)),
            tuple(TypeMark(kind, len(parts), digest(*parts)) for kind, parts in sorted(members.items())),
            (*left_out, *([INSERTS] if insert_only else [])),
            ".".join(
                (
                    digest(*(str(column.type_oid) for name in index for column in columns if column.name == name)),
                    digest(*(defined_in[name] for name in index)),
                )
            ),
            frozenset(defaults),
            members,
            frozenset(digest(column.name) for column in columns),
        )

    def refusal(self, row: tuple[Any, ...], table: Table, config: PostgresLogConfig) -> _Refusal | None:
        """Why a chosen table cannot be captured; None if it can."""
        named = table.stream in config.tables
        if row[9]:
            what = "it is UNLOGGED, so the log does not hold its changes"
            return _Refusal.of(
                what, f"ALTER TABLE {table.sql} SET LOGGED; or put it into `exclude_tables`", stops=named
            )
        names = {column.name for column in table.columns}
        missing = [column for column in (*table.primary_key, *table.index) if column not in names]
        unsent = sorted({*missing}.intersection(table.unpublished))
        if unsent:
            column = quoted(unsent[0])
            return _Refusal.of(
                f"its key has the generated column {column}, which the server does not publish",
                f"ALTER TABLE {table.sql} ALTER {column} DROP EXPRESSION; or put it into `exclude_tables`",
            )
        if missing:
            what = f"exclude_columns leaves out {missing[0]!r}, which is part of its key"
            return _Refusal.of(what, "keep the key: rows cannot be identified without it", stops=True)
        if clash := sorted(names & _CHANGE_NAMES):
            what = f"its column {clash[0]!r} has the name of a column that describes a change"
            return _Refusal.of(what, "rename the column, or put it into `exclude_columns`")
        if table.has_identity or table.insert_only:
            return None
        return _Refusal.of(
            "it has no replica identity",
            identity_fix(table),
            stops=named,
            otherwise="; or put it into `insert_only`, or into `exclude_tables`",
        )


def _members(connection: psycopg.Connection[Any], types: set[int]) -> dict[int, dict[int, tuple[str, ...]]]:
    """Per type the enums and composites in its values, and the members of each."""
    own = [oid for oid in types if oid >= _FIRST_OWN_OID]
    found: dict[int, dict[int, tuple[str, ...]]] = {}
    for oid, kind, parts in connection.execute(_MEMBERS, [own]).fetchall() if own else ():
        found.setdefault(oid, {})[kind] = tuple(parts)
    return found


def identity_fix(table: Table) -> str:
    """The SQL that lets updates and deletes of a table be published."""
    if table.primary_key:
        return f"ALTER TABLE {table.sql} REPLICA IDENTITY DEFAULT"
    return f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL; for a sink that upserts rather ADD PRIMARY KEY"


def with_publications(tables: Tables, config: PostgresLogConfig, held: Mapping[str, Publication]) -> Tables:
    """The tables with the marks of how they are published now."""
    return replace(tables, captured={s: marked(table, config, held) for s, table in tables.captured.items()})


def nothing(config: PostgresLogConfig, refused: Mapping[str, Finding]) -> str:
    """What to say if no table is captured."""
    left_out = "".join(f"; {stream}: {finding.what}" for stream, finding in refused.items())
    return f"no table that can be captured matches tables = {list(config.tables)}{left_out}"


def chosen(stream: str, config: PostgresLogConfig) -> bool:
    return matches(stream, config.tables) and not matches(stream, config.exclude_tables)


def excluded(stream: str, column: str, config: PostgresLogConfig) -> bool:
    return matches(f"{stream}.{column}", config.exclude_columns)


def as_text(stream: str, column: str, config: PostgresLogConfig) -> bool:
    return matches(f"{stream}.{column}", config.text_columns)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _is_sent(generated: str, version: int) -> bool:
    """True for a column that the server can publish, by `pg_attribute.attgenerated`."""
    return not generated or (generated == "s" and version >= 180000)


# Not a deferrable key: two rows may have it at a time (`SET id = id + 1`), and the server takes none as an identity.
_KEY = """
    coalesce((SELECT array_agg(a.attname::text ORDER BY k.place)
       FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, place), pg_attribute a
      WHERE i.indrelid = c.oid AND i.{which} AND i.indisvalid AND i.indimmediate AND k.place <= i.indnkeyatts
        AND a.attrelid = c.oid AND a.attnum = k.attnum), '{{}}')"""

# `pg_partition_tree` would wait for a session that has locked one of the partitions.
_PARTS = """
    (WITH RECURSIVE parts AS (
        SELECT {of} AS oid UNION ALL SELECT inhrelid FROM parts p JOIN pg_inherits i ON i.inhparent = p.oid)
     SELECT oid FROM parts)"""

_TABLES = f"""
    SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relkind::text, c.relreplident::text,
           {_KEY.format(which="indisprimary")},
           coalesce(pg_partition_root(c.oid), c.oid)::oid::int8,
           {_KEY.format(which="indisreplident")},
           CASE c.relkind WHEN 'r' THEN c.reltuples ELSE (
              SELECT CASE WHEN bool_and(leaf.reltuples >= 0) THEN sum(leaf.reltuples) ELSE -1 END
                FROM {_PARTS.format(of="c.oid")} part JOIN pg_class leaf ON leaf.oid = part.oid AND leaf.relkind <> 'p')
           END::int8,
           c.relpersistence = 'u'
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') AND c.relpersistence IN ('p', 'u')
       AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_toast%'
     ORDER BY c.oid"""

_COLUMNS = """
    SELECT a.attrelid::int8, a.attname::text, a.atttypid::int8, a.atttypmod, a.attnotnull, a.attgenerated::text,
           a.attcollation = 0 OR co.collname IN ('C', 'POSIX', 'ucs_basic') OR co.collprovider = 'b'
           OR (co.collname = 'default' AND (SELECT d.datcollate IN ('C', 'POSIX') OR d.datlocprovider::text = 'b'
                                              FROM pg_database d WHERE d.datname = current_database()))
      FROM pg_attribute a LEFT JOIN pg_collation co ON co.oid = a.attcollation
     WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
     ORDER BY a.attrelid, a.attnum"""

_SHAPES = f"""
    SELECT a.attrelid::int8,
           string_agg(CASE WHEN a.attisdropped THEN '--------' ELSE left(md5(a.attname), 4) || left(md5(a.atttypid || CASE
                      WHEN a.atttypid = 1700 THEN ':' || a.atttypmod ELSE '' END), 4) END, '' ORDER BY a.attnum)
           || ':' || coalesce((SELECT f.relfilenode FROM {_PARTS.format(of="a.attrelid")} part
                       JOIN pg_class f ON f.oid = part.oid WHERE f.relfilenode > 0 ORDER BY f.oid LIMIT 1), 0)
           || ':' || left(md5(string_agg(a.xmin::text, ' ' ORDER BY a.attnum)), 8),
           coalesce(array_agg(a.attnum::int) FILTER (WHERE a.atthasdef OR a.atthasmissing), '{{}}'),
           coalesce(jsonb_object_agg(a.attname, a.xmin::text) FILTER (WHERE NOT a.attisdropped), '{{}}')
      FROM pg_attribute a WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0
     GROUP BY a.attrelid"""

# Through arrays, domains, ranges and attributes, however deep.
_MEMBERS = """
    WITH RECURSIVE made AS (
        SELECT own AS oid, own AS kind FROM unnest(%s::oid[]) own
         UNION
        SELECT m.oid, below.kind FROM made m JOIN pg_type t ON t.oid = m.kind CROSS JOIN LATERAL (
            SELECT t.typbasetype AS kind UNION ALL SELECT t.typelem
             UNION ALL SELECT a.atttypid FROM pg_attribute a
                        WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
             UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)) below
         WHERE below.kind <> 0)
    SELECT m.oid::int8, m.kind::int8,
           CASE t.typtype WHEN 'e' THEN ARRAY(SELECT e.enumlabel::text FROM pg_enum e WHERE e.enumtypid = t.oid ORDER BY e.oid)
           ELSE ARRAY[(SELECT coalesce(string_agg(a.attnum || ' ' || a.atttypid, ',' ORDER BY a.attnum), '')
                         FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped)] END
      FROM made m JOIN pg_type t ON t.oid = m.kind WHERE t.typtype IN ('e', 'c')"""
