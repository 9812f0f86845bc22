"""What is there and what must be there: tables, keys, publications, and the SQL that mends what is missing."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa

from penstock.change import CHANGE_FIELDS
from penstock.connectors.postgres_cdc import wal
from penstock.connectors.postgres_cdc.types import Column, TypeCatalog, arrow_type, quoted, table_schema
from penstock.errors import ConfigError
from penstock.source import Finding

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.config import PostgresCdcConfig

COMPARABLE = {
    20: "int8", 21: "int2", 23: "int4", 2950: "uuid", 25: "text", 1043: "varchar", 17: "bytea",
    1082: "date", 1114: "timestamp", 1184: "timestamptz",
}  # fmt: skip
"""Types whose order is the same in Arrow as in the server (text: by `COLLATE "C"`)."""

_TEXT = (25, 1043)
_CHANGE_NAMES = {each.name for each in CHANGE_FIELDS}
_DROPPED = "----"


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
    """Those that are captured; `is_key`: part of the replica identity."""
    insert_only: bool = False
    plain_order: bool = True
    """The key's own order is that of its bytes, so that an index on it serves."""
    comparable: bool = True
    """Keys can be compared outside the server as it does."""
    shape: str = ""
    """
    Four digits of the name and four of the type for each column that it ever had, `-` for those of one that was dropped;
    then, behind a `:` each, which file it is in (or its oldest partition), when its columns were last defined, its key.
    """
    defaults: frozenset[int] = frozenset()
    """Numbers of the columns that have a default, or are generated."""
    estimate: int | None = None
    """About how many rows it has, as far as the server knows."""

    @property
    def stream(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def sql(self) -> str:
        return f"{quoted(self.namespace)}.{quoted(self.name)}"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that tell rows apart: what a delete is sure to carry."""
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

    def differs(self, shape: str) -> bool:
        """True if rows that were copied in that shape hold other values now, though no change of theirs is in the log."""
        (old, *before), (new, *now) = (each.split(":") for each in (shape, self.shape))
        were, are = (re.findall("(....)(....)", each) for each in (old, new))
        if any(a != b and b[1] != _DROPPED for a, b in zip(were, are, strict=False)):
            return True
        added = are[len(were) :]
        # The target has what a column of that name held; of one that came and went unseen, the name is not known.
        gone = {a[0] for a, b in zip(were, are, strict=False) if b[1] == _DROPPED and a[0] != _DROPPED}
        comes_back = any(name in gone or (_DROPPED, _DROPPED) in added for name, kind in added if kind != _DROPPED)
        is_filled = any(number in self.defaults for number in range(len(were) + 1, len(are) + 1))
        # Other files alone are those of a VACUUM FULL or TRUNCATE, and other definitions those of a new default.
        is_rewritten = all(a != b for a, b in zip(before[:2], now[:2], strict=True))
        return comes_back or is_filled or is_rewritten or before[2:] != now[2:]

    def shape_after(self, shape: str) -> str:
        """`shape` as it is now: columns that were dropped in the meantime keep their names in it."""
        old, (new, *now) = shape.split(":")[0], self.shape.split(":")
        parts = zip_longest(re.findall("....", old), re.findall("....", new), fillvalue=_DROPPED)
        names = (a if b == _DROPPED and place % 2 == 0 else b for place, (a, b) in enumerate(parts))
        return ":".join(["".join(names), *now])

    def schema(self, catalog: TypeCatalog) -> pa.Schema:
        """What its changes look like."""
        own = table_schema(self.columns, catalog, self.key)
        return pa.schema([*own, *CHANGE_FIELDS], metadata=own.metadata)


@dataclass(frozen=True)
class Tables:
    """The tables that are captured, and those that are chosen and cannot be."""

    captured: Mapping[str, Table] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why, by stream."""


def find_tables(connection: psycopg.Connection[Any], config: PostgresCdcConfig, version: int) -> Tables:
    """The tables that the options choose, as they are now."""
    rows = connection.execute(_TABLES).fetchall()
    chosen = {row[0]: row for row in rows if _chosen(f"{row[1]}.{row[2]}", config)}
    # A partition whose root is captured comes with it.
    chosen = {oid: row for oid, row in chosen.items() if row[6] == oid or row[6] not in chosen}
    columns: dict[int, list[tuple[Any, ...]]] = {oid: [] for oid in chosen}
    for row in connection.execute(_COLUMNS, [list(chosen)]).fetchall():
        columns[row[0]].append(row[1:])
    shapes = {row[0]: row[1:] for row in connection.execute(_SHAPES, [list(chosen)]).fetchall()}
    (utf8,) = _one(connection, "SELECT current_setting('server_encoding') = 'UTF8'")
    captured: dict[str, Table] = {}
    refused: dict[str, str] = {}
    wrong: dict[str, ConfigError] = {}
    for oid, (_, namespace, name, kind, identity, primary_key, _, identity_key, estimate) in sorted(chosen.items()):
        stream = f"{namespace}.{name}"
        index = tuple(identity_key if identity == "i" else primary_key)
        key = index if identity in "di" else ()
        found = [
            (Column(column, type_oid, typmod, column in key, not required, as_text(stream, column, config)), plain)
            for column, type_oid, typmod, required, generated, plain in columns[oid]
            if _published(generated, version) and not excluded(stream, column, config)
        ]
        insert_only = _matches(stream, config.insert_only)
        names = {column.name for column, _ in found}
        missing = [column for column in (*primary_key, *index) if column not in names]
        unsent = {row[0] for row in columns[oid] if not _published(row[4], version)}.intersection(missing)
        table = Table(
            oid, namespace, name, kind == "p", identity, tuple(primary_key), index, tuple(column for column, _ in found),
            insert_only, all(plain for column, plain in found if column.name in index),
        )  # fmt: skip
        shape, defaults = shapes.get(oid, ("", []))
        as_texts = [column.name for column, _ in found if column.as_text]
        rest = repr((index, as_texts) if as_texts else index)
        shape = f"{shape}:{hashlib.md5(rest.encode(), usedforsecurity=False).hexdigest()[:8]}"
        table = replace(table, shape=shape, defaults=frozenset(defaults), estimate=estimate if estimate >= 0 else None)
        if not missing:
            types = {0 if column.as_text else column.type_oid for column in table.key_columns}
            table = replace(table, comparable=types <= {*COMPARABLE} and (utf8 or types.isdisjoint(_TEXT)))
        if stream in captured:
            refused[table.sql] = (
                f"it has the same name as {captured[stream].sql} where a dot stands between (rename one)"
            )
        elif unsent:
            column = quoted(min(unsent))
            refused[stream] = (
                f"its key has the generated column {column}, which servers before 18 do not send "
                f"(ALTER TABLE {table.sql} ALTER {column} DROP EXPRESSION; or put it into `exclude_tables`)"
            )
        elif missing:
            refused[stream] = f"exclude_columns leaves out {missing[0]!r}, which is part of its key (keep the key)"
            wrong[stream] = ConfigError(
                f"exclude_columns leaves out {missing[0]!r}, which is part of the key of {stream}",
                code="PEN-1016",
                hint="keep the key; rows could not be told apart without it",
            )
        elif clash := sorted(names & _CHANGE_NAMES):
            refused[stream] = f"its column {clash[0]!r} has the name of one that describes a change (rename it)"
        elif table.has_identity or insert_only:
            captured[stream] = table
        else:
            refused[stream] = f"no replica identity ({identity_fix(table)})"
            if stream in config.tables:
                wrong[stream] = ConfigError(
                    f"{stream} has no replica identity: publishing its updates would make them fail for everyone",
                    code="PEN-1016",
                    hint=f"{identity_fix(table)}; or put it into `insert_only`, or into `exclude_tables`",
                )
    # What was captured before and cannot be any more is set aside, and does not stop the others.
    published = _published_streams(connection, publications(config)) if wrong or not captured else set()
    known = {stream for stream in published if _chosen(stream, config)}
    for stream in sorted(wrong.keys() - known):
        raise wrong[stream]
    if not captured and not known:
        raise ConfigError(
            f"no table that can be captured matches tables = {list(config.tables)}"
            + "".join(f"; {stream}: {why}" for stream, why in refused.items()),
            code="PEN-1016",
            hint='patterns are "schema.table", with * for any part',
        )
    return Tables(captured, refused)


def identity_fix(table: Table) -> str:
    """The SQL that lets updates and deletes of a table be published."""
    if table.primary_key:
        return f"ALTER TABLE {table.sql} REPLICA IDENTITY DEFAULT"
    return f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL"


# -- publications ----------------------------------------------------------------------------------------------------


def publications(config: PostgresCdcConfig) -> list[str]:
    """The publications that are read: one for all changes, one more for tables of which only inserts are captured."""
    return [config.publication, *([f"{config.publication}_inserts"] if config.insert_only else [])]


def truncates(config: PostgresCdcConfig) -> str:
    """The publication that shows truncates of single partitions; no other can that shows their rows as those of the root."""
    return f"{config.publication}_truncates"


def publish(connection: psycopg.Connection[Any], config: PostgresCdcConfig, tables: Tables, version: int) -> None:
    """Make the publications and add what they lack, or, with `manage = false`, only see that nothing is missing."""
    for statement in missing(connection, config, tables, version):
        if not config.manage:
            raise ConfigError(
                f"the publication {config.publication!r} does not hold every table, and manage = false",
                code="PEN-1016",
                hint=statement,
            )
        connection.execute(statement)
    publish_truncates(connection, config, tables)


def publish_truncates(connection: psycopg.Connection[Any], config: PostgresCdcConfig, tables: Tables) -> None:
    """Make the publication of truncates, if that is allowed; without it a partition that is rewritten counts as truncated."""
    statement = missing_truncates(connection, config, tables) if config.manage else ""
    if statement:
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable):
            connection.execute(statement)


def missing_truncates(connection: psycopg.Connection[Any], config: PostgresCdcConfig, tables: Tables) -> str:
    """The statement that makes the publication of truncates complete, if there is a use for it."""
    name = truncates(config)
    wanted = [table for table in tables.captured.values() if table.partitioned and config.snapshot != "never"]
    held = _published_streams(connection, [name]) if wanted else set()
    lacking = ", ".join(table.sql for table in wanted if table.stream not in held)
    if not lacking:
        return ""
    if connection.execute("SELECT FROM pg_publication WHERE pubname = %s", [name]).fetchone():
        return f"ALTER PUBLICATION {quoted(name)} ADD TABLE {lacking}"
    settings = "publish = 'truncate', publish_via_partition_root = false"
    return f"CREATE PUBLICATION {quoted(name)} FOR TABLE {lacking} WITH ({settings})"


def missing(
    connection: psycopg.Connection[Any], config: PostgresCdcConfig, tables: Tables, version: int
) -> Iterator[str]:
    """The statements that make the publications complete."""
    known = {name for (name,) in connection.execute("SELECT pubname FROM pg_publication").fetchall()}
    for publication in publications(config):
        inserts = publication != config.publication
        wanted = [table for table in tables.captured.values() if table.insert_only == inserts]
        held = _published_streams(connection, [publication])
        lacking = [table.sql for table in wanted if table.stream not in held]
        if publication not in known:
            options = {
                "publish": "'insert, truncate'" if inserts else "'insert, update, delete, truncate'",
                "publish_via_partition_root": "true",
                **({"publish_generated_columns": "stored"} if version >= 180000 else {}),
            }
            settings = ", ".join(f"{name} = {value}" for name, value in options.items())
            of = f" FOR TABLE {', '.join(lacking)}" if lacking else ""
            yield f"CREATE PUBLICATION {quoted(publication)}{of} WITH ({settings})"
        elif lacking:
            yield f"ALTER PUBLICATION {quoted(publication)} ADD TABLE {', '.join(lacking)}"


# -- check -----------------------------------------------------------------------------------------------------------


def findings(connection: psycopg.Connection[Any], config: PostgresCdcConfig) -> Iterator[Finding]:
    """Everything that would fail later, with the SQL that mends it."""
    here = wal.server(connection)
    yield Finding(
        here.wal_level == "logical",
        f"wal_level is {here.wal_level}",
        "" if here.wal_level == "logical" else "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
    )
    slot = wal.slot(connection, config.slot)
    slots, max_slots, senders, max_senders, may_replicate, may_create = _one(connection, _LIMITS)
    free = slots < max_slots
    if slot is None and not config.manage:
        fix = f"SELECT pg_create_logical_replication_slot({wal.literal(config.slot)}, '{wal.PLUGIN}')"
        yield Finding(False, f"the replication slot {config.slot!r} is not there, and manage = false", fix)
    elif slot is None:
        fix = "" if free else f"ALTER SYSTEM SET max_replication_slots = {max_slots + 5}; then restart the server"
        yield Finding(free, f"{slots} of {max_slots} replication slots are in use; one more will be made", fix)
    else:
        lost = slot.wal_status == "lost"
        fix = f"SELECT pg_drop_replication_slot({wal.literal(config.slot)})" if lost else ""
        yield Finding(not lost, f"the replication slot {config.slot!r} is {slot.wal_status}", fix)
    room = senders < max_senders
    fix = "" if room else f"ALTER SYSTEM SET max_wal_senders = {max_senders + 5}; then restart the server"
    yield Finding(room, f"{senders} of {max_senders} senders are in use", fix)
    fix = "" if may_replicate else "ALTER ROLE CURRENT_USER REPLICATION -- as a superuser"
    yield Finding(may_replicate, f"the user {'may' if may_replicate else 'may not'} replicate", fix)
    tables = find_tables(connection, config, here.version)
    lacking = list(missing(connection, config, tables, here.version))
    if lacking and config.manage:
        fix = "" if may_create else "GRANT CREATE ON DATABASE … TO CURRENT_USER -- or run it yourself: " + lacking[0]
        yield Finding(bool(may_create), f"the publication {config.publication!r} will be made or completed", fix)
    else:
        yield Finding(
            not lacking,
            f"the publication {config.publication!r} {'lacks tables' if lacking else 'is there'}",
            *lacking[:1],
        )
    truncating = missing_truncates(connection, config, tables)
    if truncating:
        will = config.manage and may_create
        what = (
            "will be made or completed"
            if will
            else "lacks tables: a partition that is rewritten makes its root be copied"
        )
        yield Finding(True, f"the publication {truncates(config)!r} {what}", "" if will else truncating)
    yield from _table_findings(connection, tables)


def _table_findings(connection: psycopg.Connection[Any], tables: Tables) -> Iterator[Finding]:
    for stream, why in tables.refused.items():
        what, _, fix = why.partition(" (")
        yield Finding(False, f"{stream} is left out: {what}", fix.rstrip(")"))
    names = {"d": "default", "f": "full", "i": "index", "n": "nothing"}
    catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
    for table in tables.captured.values():
        (may_read,) = _one(connection, "SELECT has_table_privilege(%s::oid, 'SELECT')", [table.oid])
        if not may_read:
            yield Finding(False, f"{table.stream} may not be read", f"GRANT SELECT ON {table.sql} TO CURRENT_USER")
        what = f"{table.stream}: replica identity {names[table.replica_identity]}, key {', '.join(table.key) or 'none'}"
        kinds = {c.name: arrow_type(*c.held, catalog) for c in table.columns if c.name in table.key}
        if nested := [name for name, kind in kinds.items() if pa.types.is_nested(kind)]:
            fix = f'text_columns = ["{table.stream}.{nested[0]}"]; or use it with sinks that append only'
            yield Finding(False, f"{what}; it cannot be upserted by the array {nested[0]!r}", fix)
        elif table.insert_only:
            yield Finding(True, f"{what}; only inserts are captured")
        elif table.key:
            yield Finding(True, what)
        else:
            fix = f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…); or use it with sinks that append only"
            yield Finding(False, f"{what}; it is copied in one go, and cannot be upserted", fix)


# -- helpers ---------------------------------------------------------------------------------------------------------


def _one(connection: psycopg.Connection[Any], query: str, values: Sequence[Any] = ()) -> Any:
    return connection.execute(query, values or None).fetchone()


def _published_streams(connection: psycopg.Connection[Any], names: Sequence[str]) -> set[str]:
    return {stream for (stream,) in connection.execute(_PUBLISHED, [list(names)]).fetchall()}


def _chosen(stream: str, config: PostgresCdcConfig) -> bool:
    return _matches(stream, config.tables) and not _matches(stream, config.exclude_tables)


def excluded(stream: str, column: str, config: PostgresCdcConfig) -> bool:
    return _matches(f"{stream}.{column}", config.exclude_columns)


def as_text(stream: str, column: str, config: PostgresCdcConfig) -> bool:
    return _matches(f"{stream}.{column}", config.text_columns)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _published(generated: str, version: int) -> bool:
    return not generated or (generated == "s" and version >= 180000)


_KEY = """
    coalesce((SELECT array_agg(a.attname::text ORDER BY k.place)
       FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, place), pg_attribute a
      WHERE i.indrelid = c.oid AND i.{which} AND i.indisvalid AND k.place <= i.indnkeyatts
        AND a.attrelid = c.oid AND a.attnum = k.attnum), '{{}}')"""

# `pg_partition_tree` would wait for whoever has locked one of the partitions.
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
           END::int8
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
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
           coalesce(array_agg(a.attnum::int) FILTER (WHERE a.atthasdef OR a.atthasmissing), '{{}}')
      FROM pg_attribute a WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0
     GROUP BY a.attrelid"""

# The view pg_publication_tables would wait for whoever has locked one of the tables.
_PUBLISHED = """
    SELECT n.nspname || '.' || c.relname
      FROM pg_publication p CROSS JOIN pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE p.pubname = ANY(%s) AND c.relkind IN ('r', 'p')
       AND (p.puballtables
            OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid)
            OR EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace))"""

_LIMITS = """
    SELECT (SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
           (SELECT count(*) FROM pg_stat_replication), current_setting('max_wal_senders')::int,
           (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user),
           has_database_privilege(current_database(), 'CREATE')"""
