"""Publications: which changes of which tables the server puts into the log's messages, and the SQL that completes them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psycopg

from penstock.connectors.postgresql.types import quoted
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.catalog import Table
    from penstock.connectors.postgres_cdc.config import PostgresLogConfig


def publications(config: PostgresLogConfig) -> list[str]:
    """The publications that are read: one for all changes, and one for the tables in `insert_only`."""
    return [config.publication, *([f"{config.publication}_inserts"] if config.insert_only else [])]


def truncates(config: PostgresLogConfig) -> str:
    """The publication of TRUNCATE of single partitions; one that publishes rows as the root's cannot show it."""
    return f"{config.publication}_truncates"


@dataclass(frozen=True)
class Entry:
    """How a publication includes a table: by an entry of its own, by its schema's, or (oid 0) as one of all tables."""

    oid: int = 0
    filtered: bool = False
    columns: frozenset[str] | None = None
    """The published columns; None: all."""


@dataclass(frozen=True)
class Publication:
    """A publication as the catalog shows it."""

    oid: int
    altered: str
    """The transaction that set its options last."""
    is_owned: bool
    all_tables: bool
    publishes: frozenset[str]
    via_root: bool
    generated: bool
    tables: dict[int, Entry] = field(default_factory=dict)
    schemas: dict[str, Entry] = field(default_factory=dict)

    def entry(self, oid: int, namespace: str) -> Entry | None:
        """The entry that counts for a table: its schema's or that of all tables overrides one that may be filtered."""
        if self.all_tables:
            return Entry()
        return self.schemas.get(namespace) or self.tables.get(oid)

    def holds(self, table: Table) -> bool:
        """True if the table's entry leaves out no rows and no captured columns."""
        entry = self.entry(table.oid, table.namespace)
        names = {column.name for column in table.columns}
        return entry is not None and not entry.filtered and (entry.columns is None or names <= entry.columns)

    def lacking(self, tables: Collection[Table]) -> dict[str, str]:
        """The options that must be set for all changes of these tables to be published."""
        options = {}
        for table in tables:
            entry = self.entry(table.oid, table.namespace)
            if not _OPERATIONS[table.insert_only] <= self.publishes:
                options["publish"] = _publish(table.insert_only)
            if table.partitioned and not self.via_root:
                options["publish_via_partition_root"] = "true"
            listed = entry is not None and entry.columns is not None and self.holds(table)
            if table.generated and not self.generated and not listed:
                options["publish_generated_columns"] = "stored"
        return options

    def mark(self, table: Table) -> str:
        """
        Equal at two times only if the table was published whole between them; empty if it is not published whole now.

        To take changes out of the log, even for a moment, gives the table a new entry or the publication new options.
        """
        entry = self.entry(table.oid, table.namespace)
        if entry is None or not self.holds(table) or self.lacking([table]):
            return ""
        return f"{self.oid}.{self.altered}.{entry.oid}"


_OPERATIONS = {False: frozenset({"insert", "update", "delete", "truncate"}), True: frozenset({"insert", "truncate"})}
"""What must be published, by whether only inserts are captured."""


def _publish(insert_only: bool) -> str:
    return "'insert, truncate'" if insert_only else "'insert, update, delete, truncate'"


def find_publications(connection: psycopg.Connection[Any], names: Sequence[str]) -> dict[str, Publication]:
    """The publications that exist, by name."""
    rows = connection.execute(_PUBLICATIONS, [list(names)]).fetchall()
    found: dict[str, Publication] = {}
    for name, oid, altered, is_owned, every, does, via_root, generated, kind, of, entry, filtered, columns in rows:
        new = Publication(oid, altered, is_owned, every, frozenset(does), via_root, generated)
        publication = found.setdefault(name, new)
        if kind == "table":
            publication.tables[int(of)] = Entry(entry, filtered, None if columns is None else frozenset(columns))
        elif kind == "schema":
            publication.schemas[of] = Entry(entry)
    return found


def marked(table: Table, config: PostgresLogConfig, held: Mapping[str, Publication]) -> Table:
    """The table with the mark of how it is published now."""
    publication = held.get(publication_of(table, config))
    return replace(table, published=publication.mark(table) if publication else "")


def publication_of(table: Table, config: PostgresLogConfig) -> str:
    return f"{config.publication}_inserts" if table.insert_only else config.publication


def publish(
    connection: psycopg.Connection[Any], config: PostgresLogConfig, tables: Collection[Table], version: int
) -> None:
    """Make the publications and add what they lack; with `manage = false` only verify that nothing is missing."""
    for statement in missing(connection, config, tables, version):
        if not config.manage:
            which = ", ".join(table.stream for table in tables) if len(tables) < 4 else "every table"
            raise ConfigError(
                f"the publication {config.publication!r} does not publish all changes of {which}, and manage = false",
                code="PEN-1016",
                hint=statement,
            )
        connection.execute(statement, prepare=False)
    publish_truncates(connection, config, tables)


def publish_truncates(
    connection: psycopg.Connection[Any], config: PostgresLogConfig, tables: Collection[Table]
) -> None:
    """Make the publication of truncates, if that is allowed; without it a rewritten partition counts as truncated."""
    statement = missing_truncates(connection, config, tables) if config.manage else ""
    if statement:
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable):
            connection.execute(statement)


def missing_truncates(connection: psycopg.Connection[Any], config: PostgresLogConfig, tables: Collection[Table]) -> str:
    """The statement that completes the publication of truncates; empty if it is complete or not needed."""
    name = truncates(config)
    wanted = [table for table in tables if table.partitioned and config.follows_partitions]
    held = find_publications(connection, [name]).get(name) if wanted else None
    lacking = ", ".join(t.sql for t in wanted if held is None or held.entry(t.oid, t.namespace) is None)
    if not lacking:
        return ""
    if held is not None:
        return f"ALTER PUBLICATION {quoted(name)} ADD TABLE {lacking}"
    settings = "publish = 'truncate', publish_via_partition_root = false"
    return f"CREATE PUBLICATION {quoted(name)} FOR TABLE {lacking} WITH ({settings})"


def missing(
    connection: psycopg.Connection[Any], config: PostgresLogConfig, tables: Collection[Table], version: int
) -> Iterator[str]:
    """The statements that complete the publications."""
    known = find_publications(connection, publications(config))
    for publication in publications(config):
        inserts = publication != config.publication
        wanted = [table for table in tables if table.insert_only == inserts]
        held, name = known.get(publication), quoted(publication)
        if held is None:
            options = {
                "publish": _publish(inserts),
                "publish_via_partition_root": "true",
                **({"publish_generated_columns": "stored"} if version >= 180000 else {}),
            }
            of = f" FOR TABLE {', '.join(table.sql for table in wanted)}" if wanted else ""
            yield f"CREATE PUBLICATION {name}{of} WITH ({_settings(options)})"
            continue
        if lacking := held.lacking(wanted):
            if "publish" in lacking and not inserts:
                _refuse_to_break(connection, publication)
            yield f"ALTER PUBLICATION {name} SET ({_settings(lacking)})"
        partial = [table for table in wanted if not held.holds(table)]
        new = [table.sql for table in partial if held.entry(table.oid, table.namespace) is None]
        for table in partial:
            if table.sql not in new:  # in one transaction, so that no change falls between the two
                yield f"ALTER PUBLICATION {name} DROP TABLE {table.sql}; ALTER PUBLICATION {name} ADD TABLE {table.sql}"
        if new:
            yield f"ALTER PUBLICATION {name} ADD TABLE {', '.join(new)}"


def _settings(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())


def _refuse_to_break(connection: psycopg.Connection[Any], publication: str) -> None:
    """Refuse to publish updates of a table without replica identity: they would fail for everyone."""
    found = connection.execute(_WITHOUT_IDENTITY, [publication]).fetchone()
    if found is not None:
        raise ConfigError(
            f"the publication {publication!r} does not publish updates and deletes, and cannot be made to: "
            f"it includes {found[0]}, which has no replica identity",
            code="PEN-1016",
            hint="name another `publication`; one that does not exist is made",
        )


# The view pg_publication_tables would wait for a session that has locked one of the tables.
_PUBLICATIONS = """
    SELECT p.pubname::text, p.oid::int8, p.xmin::text, pg_has_role(p.pubowner, 'USAGE'), p.puballtables,
           array_remove(ARRAY[CASE WHEN pubinsert THEN 'insert' END, CASE WHEN pubupdate THEN 'update' END,
                              CASE WHEN pubdelete THEN 'delete' END, CASE WHEN pubtruncate THEN 'truncate' END], NULL),
           p.pubviaroot, coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false), held.*
      FROM pg_publication p LEFT JOIN LATERAL (
            SELECT 'table' AS kind, r.prrelid::text, r.oid::int8, r.prqual IS NOT NULL,
                   CASE WHEN r.prattrs IS NOT NULL THEN ARRAY(
                      SELECT a.attname::text FROM pg_attribute a
                       WHERE a.attrelid = r.prrelid AND a.attnum = ANY(r.prattrs)) END
              FROM pg_publication_rel r WHERE r.prpubid = p.oid
            UNION ALL
            SELECT 'schema', n.nspname::text, s.oid::int8, false, NULL
              FROM pg_publication_namespace s JOIN pg_namespace n ON n.oid = s.pnnspid WHERE s.pnpubid = p.oid
           ) AS held ON true
     WHERE p.pubname = ANY(%s)"""

_WITHOUT_IDENTITY = """
    SELECT n.nspname || '.' || c.relname
      FROM pg_publication p CROSS JOIN pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE p.pubname = %s AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
       AND (p.puballtables
            OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid)
            OR EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace))
       AND c.relreplident <> 'f' AND NOT EXISTS (
            SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indimmediate
               AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END)
     LIMIT 1"""
