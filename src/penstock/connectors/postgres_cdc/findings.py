"""What `penstock check` says of a server: everything that would fail later, with the SQL that fixes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa

from penstock.connectors.postgres_cdc.catalog import PATTERNS, Table, Tables, find_tables, nothing
from penstock.connectors.postgres_cdc.log.slot import Server, creating, require_capable, server, slot, verify_slot
from penstock.connectors.postgres_cdc.publications import (
    Publication,
    find_publications,
    missing,
    missing_truncates,
    publication_of,
    publications,
    truncates,
)
from penstock.connectors.postgresql import connections
from penstock.connectors.postgresql.failures import LOST
from penstock.connectors.postgresql.types import TypeCatalog, arrow_type, quoted
from penstock.errors import ConfigError
from penstock.source import Finding

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.config import PostgresLogConfig

_IDENTITIES = {"d": "default", "f": "full", "i": "index", "n": "nothing"}


@dataclass(frozen=True)
class _Limits:
    slots: int
    max_slots: int
    senders: int
    max_senders: int
    may_replicate: bool
    may_create: bool
    user: str


def findings(connection: psycopg.Connection[Any], config: PostgresLogConfig, begun: bool) -> Iterator[Finding]:
    """Everything that would fail later, with the SQL that fixes it. `begun`: an earlier run needs the slot that it read from."""
    here = server(connection)
    try:
        require_capable(here)
        yield Finding(True, f"wal_level is {here.wal_level}")
    except ConfigError as error:
        yield Finding(False, error.message, error.hint)
        if "too old" in error.message:
            return
    row = connection.execute(_LIMITS).fetchone()
    assert row is not None
    limits = _Limits(*row)
    yield from _slot_findings(connection, config, here, limits, begun)
    room = limits.senders < limits.max_senders
    fix = "" if room else f"ALTER SYSTEM SET max_wal_senders = {limits.max_senders + 5}; then restart the server"
    yield Finding(room, f"{limits.senders} of {limits.max_senders} senders are in use", fix)
    fix = "" if limits.may_replicate else f"ALTER ROLE {quoted(limits.user)} REPLICATION -- as a superuser"
    yield Finding(limits.may_replicate, f"the user {'may' if limits.may_replicate else 'may not'} replicate", fix)
    tables = find_tables(connection, config, here.version, strict=False)
    if not tables.captured:
        yield Finding(False, nothing(config, tables.refused), PATTERNS)
    held = find_publications(connection, publications(config))
    yield from _publication_findings(connection, config, here, limits, tables, held)
    for stream, finding in tables.refused.items():
        yield Finding(False, f"{stream} is left out: {finding.what}", finding.fix)
    oids = [table.oid for table in tables.captured.values()]
    rights = {oid: _Rights(*each) for oid, *each in connection.execute(_PRIVILEGES, [oids]).fetchall()}
    catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
    for table in tables.captured.values():
        yield from _right_findings(table, config, held, rights.get(table.oid, _Rights()), quoted(limits.user))
        yield _key_finding(table, catalog)
        yield from _column_findings(table, catalog)


def _slot_findings(
    connection: psycopg.Connection[Any], config: PostgresLogConfig, here: Server, limits: _Limits, begun: bool
) -> Iterator[Finding]:
    found = slot(connection, config.slot)
    free = limits.slots < limits.max_slots
    if found is None and begun:
        yield Finding(False, f"PEN-5011 the replication slot {config.slot!r} does not exist any more", LOST)
    elif found is None and not config.manage:
        what = f"the replication slot {config.slot!r} does not exist, and manage = false"
        yield Finding(False, what, creating(config.slot))
    elif found is None:
        more = f"ALTER SYSTEM SET max_replication_slots = {limits.max_slots + 5}; then restart the server"
        what = f"{limits.slots} of {limits.max_slots} replication slots are in use; one more will be made"
        yield Finding(free, what, "" if free else more)
    else:
        lost = found.wal_status == "lost"
        fix = f"SELECT pg_drop_replication_slot({connections.literal(config.slot)})" if lost else ""
        yield Finding(not lost, f"the replication slot {config.slot!r} is {found.wal_status}", fix)
        if not lost:
            try:
                verify_slot(found, config.slot, here)
            except ConfigError as error:
                yield Finding(False, error.message, error.hint)


def _publication_findings(
    connection: psycopg.Connection[Any],
    config: PostgresLogConfig,
    here: Server,
    limits: _Limits,
    tables: Tables,
    held: Mapping[str, Publication],
) -> Iterator[Finding]:
    """Whether the publications are complete, or can be completed."""
    captured = list(tables.captured.values())
    try:
        lacking = list(missing(connection, config, captured, here.version))
    except ConfigError as error:
        yield Finding(False, error.message, error.hint)
    else:
        grant = (
            "" if limits.may_create else f"GRANT CREATE ON DATABASE {quoted(here.database)} TO {quoted(limits.user)}"
        )
        yield from _statement_findings(config, lacking, grant, all(each.is_owned for each in held.values()))
    if statement := missing_truncates(connection, config, captured):
        will = config.manage and limits.may_create
        what = (
            "will be made or completed"
            if will
            else "lacks tables: when a partition is rewritten, its root is copied again"
        )
        yield Finding(True, f"the publication {truncates(config)!r} {what}", "" if will else statement)


def _statement_findings(
    config: PostgresLogConfig, lacking: Sequence[str], grant: str, owned: bool
) -> Iterator[Finding]:
    """`grant`: the SQL that allows the user to make a publication; empty if it is allowed."""
    name = repr(config.publication)
    if not lacking:
        yield Finding(True, f"the publication {name} exists and is complete")
    for statement in lacking:
        makes = statement.startswith("CREATE")
        if not config.manage:
            what = "does not exist" if makes else "does not publish every table and all of its changes"
            yield Finding(False, f"the publication {name} {what}, and manage = false", statement)
        elif makes:
            fix = f"{grant}; or let a superuser run: {statement}" if grant else ""
            yield Finding(not grant, f"the publication {name} will be made", fix)
        else:
            fix = "" if owned else f"let its owner or a superuser run: {statement}"
            what = "will be completed" if owned else "is not complete, and the user does not own it"
            yield Finding(owned, f"the publication {name} {what}", fix)


@dataclass(frozen=True)
class _Rights:
    """What the user may do with a table."""

    enters: bool = True
    reads: bool = True
    owns: bool = True
    is_hidden: bool = False
    denied: Sequence[str] = ()


def _right_findings(
    table: Table, config: PostgresLogConfig, held: Mapping[str, Publication], may: _Rights, user: str
) -> Iterator[Finding]:
    if not may.enters:
        fix = f"GRANT USAGE ON SCHEMA {quoted(table.namespace)} TO {user}"
        yield Finding(False, f"{table.stream} may not be read: no usage of its schema", fix)
    # A table without a usable key is copied page by page, which needs the right to read all columns.
    if not may.reads and (not table.chunked or any(column.name in may.denied for column in table.columns)):
        yield Finding(False, f"{table.stream} may not be read", f"GRANT SELECT ON {table.sql} TO {user}")
    if may.is_hidden:
        fix = f"ALTER ROLE {user} BYPASSRLS -- as a superuser; or let {user} own the table"
        yield Finding(False, f"{table.stream} may not be read whole: it has row-level security", fix)
    name = publication_of(table, config)
    if config.manage and not may.owns and not (name in held and held[name].holds(table)):
        fix = (
            f"ALTER TABLE {table.sql} OWNER TO {user}; or, as a superuser, once there is a publication: "
            f"ALTER PUBLICATION {quoted(name)} ADD TABLE {table.sql}"
        )
        yield Finding(False, f"{table.stream} may not be published: the user does not own it", fix)


def _key_finding(table: Table, catalog: TypeCatalog) -> Finding:
    identity, key = _IDENTITIES[table.replica_identity], ", ".join(table.key) or "none"
    what = f"{table.stream}: replica identity {identity}, key {key}"
    kinds = {c.name: arrow_type(*c.held, catalog) for c in table.columns if c.name in table.key}
    if nested := [name for name, kind in kinds.items() if pa.types.is_nested(kind)]:
        fix = f'text_columns = ["{table.stream}.{nested[0]}"]; or use it with sinks that append only'
        return Finding(False, f"{what}; it cannot be upserted by the array {nested[0]!r}", fix)
    if table.insert_only:
        return Finding(True, f"{what}; only inserts are captured")
    if table.key:
        return Finding(True, what)
    fix = f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…), not DEFERRABLE; or use it with sinks that append only"
    return Finding(False, f"{what}; it is copied in one go, and cannot be upserted", fix)


def _column_findings(table: Table, catalog: TypeCatalog) -> Iterator[Finding]:
    """Columns that are left out, and columns with values that a list has no place for."""
    if table.unpublished:
        which = ", ".join(repr(name) for name in table.unpublished)
        what = f"{table.stream}: left out: {which} (generated; the server does not publish it)"
        yield Finding(True, what, "compute it downstream; or make it a plain column, or a STORED one on PostgreSQL 18")
    lists = [c.name for c in table.columns if pa.types.is_list(arrow_type(*c.held, catalog))]
    if lists:
        what = f"{table.stream}: arrays in {', '.join(map(repr, lists))} need one dimension, with subscripts from 1"
        fix = f'if some have others: text_columns = ["{table.stream}.{lists[0]}"]'
        yield Finding(True, what, fix)


_LIMITS = """
    SELECT (SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
           (SELECT count(*) FROM pg_stat_replication), current_setting('max_wal_senders')::int,
           (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user),
           has_database_privilege(current_database(), 'CREATE'), current_user::text"""

_PRIVILEGES = """
    SELECT c.oid::int8, has_schema_privilege(c.relnamespace, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
           pg_has_role(c.relowner, 'USAGE'), row_security_active(c.oid),
           CASE WHEN has_table_privilege(c.oid, 'SELECT') THEN '{}' ELSE ARRAY(
              SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                 AND NOT has_column_privilege(c.oid, a.attnum, 'SELECT')) END
      FROM pg_class c WHERE c.oid = ANY(%s::oid[])"""
