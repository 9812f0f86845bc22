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

from penstock.changes import CHANGE_FIELDS
from penstock.connectors.postgres_cdc import wal
from penstock.connectors.postgresql import connections
from penstock.connectors.postgresql.types import Column, TypeCatalog, arrow_type, quoted, table_schema
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
_PATTERNS = 'patterns are "schema.table", with * for any part'
_CHANGE_NAMES = {each.name for each in CHANGE_FIELDS}
_DROPPED = "----"
_INSERTS = "inserts"
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
    """Those that are captured; `is_key`: part of the replica identity."""
    insert_only: bool = False
    plain_order: bool = True
    """The key's own order is that of its bytes, so that an index on it serves."""
    comparable: bool = True
    """Keys can be compared outside the server as it does."""
    shape: str = ""
    """
    Four digits of the name and four of the type for each column that it ever had, `-` for those of one that was dropped;
    then, behind a `:` each, which file it is in (or its oldest partition), when its columns were last defined, its key,
    what its enums and composites are made of, and what is left out: columns, or (`inserts`) all but inserts.
    """
    members: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """The labels of the enums that its values are made of, the oldest first, and the attributes of composites, by type."""
    defaults: frozenset[int] = frozenset()
    """Numbers of the columns that have a default, or are generated."""
    estimate: int | None = None
    """About how many rows it has, as far as the server knows."""
    generated: frozenset[str] = frozenset()
    """Captured columns that the server computes and stores."""
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
        # A shape of before these were part of it says nothing about them.
        is_respelled = len(before) > 3 and self._respelled(before[3])
        taken_in = {*before[4].split(",")} - {*now[4].split(",")} if len(before) > 4 else set()
        is_wider = any(_digest(column.name) in taken_in for column in self.columns)
        is_wider = is_wider or (len(before) > 4 and self.insert_only != was_insert_only(shape))
        return comes_back or is_filled or is_rewritten or is_respelled or is_wider or before[2:3] != now[2:3]

    def _respelled(self, types: str) -> bool:
        """True if a value of one of these types has another text now: a label was renamed (not added), or an attribute came."""
        are = dict(self.members)
        for kind, count, digest in (each.split(".") for each in types.split(",") if each):
            if int(kind) in are and _digest(*are[int(kind)][: int(count)]) != digest:
                return True
        return False

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


def find_tables(
    connection: psycopg.Connection[Any],
    config: PostgresCdcConfig,
    version: int,
    *,
    required: bool = True,
    strict: bool = True,
) -> Tables:
    """
    The tables that the options choose, as they are now.

    Not `required`: there may be none, since there were some. `strict`: what is wrong with a new one is an error.
    """
    rows = connection.execute(_TABLES).fetchall()
    chosen = {row[0]: row for row in rows if _chosen(f"{row[1]}.{row[2]}", config)}
    # A partition whose root is captured comes with it.
    chosen = {oid: row for oid, row in chosen.items() if row[6] == oid or row[6] not in chosen}
    columns: dict[int, list[tuple[Any, ...]]] = {oid: [] for oid in chosen}
    for row in connection.execute(_COLUMNS, [list(chosen)]).fetchall():
        columns[row[0]].append(row[1:])
    shapes = {row[0]: row[1:] for row in connection.execute(_SHAPES, [list(chosen)]).fetchall()}
    members = _members(connection, {row[1] for rows in columns.values() for row in rows})
    (utf8,) = _one(connection, "SELECT current_setting('server_encoding') = 'UTF8'")
    held = find_publications(connection, publications(config))
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
        made_of = {kind: parts for column, _ in found for kind, parts in members.get(column.type_oid, {}).items()}
        shape += ":" + ",".join(f"{kind}.{len(parts)}.{_digest(*parts)}" for kind, parts in sorted(made_of.items()))
        left_out = [_digest(row[0]) for row in columns[oid] if excluded(stream, row[0], config)]
        shape += ":" + ",".join([*left_out, *([_INSERTS] if insert_only else [])])
        table = replace(table, members=tuple(sorted(made_of.items())))
        table = replace(table, shape=shape, defaults=frozenset(defaults), estimate=estimate if estimate >= 0 else None)
        table = replace(table, generated=frozenset(row[0] for row in columns[oid] if row[4] and row[0] in names))
        table = marked(table, config, held)
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
    if not strict:
        return Tables(captured, refused)
    # What was captured before and cannot be any more is set aside, and does not stop the others.
    known: set[str] = set()
    if wrong or not captured:
        streams = {f"{row[1]}.{row[2]}" for row in rows if any(each.entry(row[0], row[1]) for each in held.values())}
        known = {stream for stream in streams if _chosen(stream, config)}
    if new := sorted(wrong.keys() - known):
        first, more = wrong[new[0]], f"; also wrong: {', '.join(new[1:])}" if new[1:] else ""
        raise ConfigError(first.message + more, code=first.code, hint=first.hint)
    if required and not captured and not known:
        raise ConfigError(_nothing(config, refused), code="PEN-1016", hint=_PATTERNS)
    return Tables(captured, refused)


def _members(connection: psycopg.Connection[Any], types: set[int]) -> dict[int, dict[int, tuple[str, ...]]]:
    """Per type the enums and composites that its values are made of, and what these are made of."""
    own = [oid for oid in types if oid >= _FIRST_OWN_OID]
    found: dict[int, dict[int, tuple[str, ...]]] = {}
    for oid, kind, parts in connection.execute(_MEMBERS, [own]).fetchall() if own else ():
        found.setdefault(oid, {})[kind] = tuple(parts)
    return found


def was_insert_only(shape: str) -> bool:
    """True if changes other than inserts were left out of what was read in that shape."""
    return _INSERTS in shape.split(":")[-1].split(",")


def _digest(*texts: str) -> str:
    return hashlib.md5("\0".join(texts).encode(), usedforsecurity=False).hexdigest()[:8]


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


@dataclass(frozen=True)
class Entry:
    """By what a publication holds a table: an entry of its own, of its schema, or (0) that of all tables."""

    oid: int = 0
    filtered: bool = False
    columns: frozenset[str] | None = None
    """Those that are published; None: all."""


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
        """What holds a table; that of its schema or of all tables goes before one that may be filtered."""
        if self.all_tables:
            return Entry()
        return self.schemas.get(namespace) or self.tables.get(oid)

    def holds(self, table: Table) -> bool:
        """True if no rows and no captured columns of a table are left out by its entry."""
        entry = self.entry(table.oid, table.namespace)
        names = {column.name for column in table.columns}
        return entry is not None and not entry.filtered and (entry.columns is None or names <= entry.columns)

    def lacking(self, tables: Iterable[Table]) -> dict[str, str]:
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
        The same at two times only if the table was published whole between them; empty if it is not now.

        Whatever takes changes out of the log, even for a moment, leaves another entry or other options behind.
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
    """Those of the publications that are there, by name."""
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


def marked(table: Table, config: PostgresCdcConfig, held: Mapping[str, Publication]) -> Table:
    """With the mark of how it is published now."""
    publication = held.get(_publication_of(table, config))
    return replace(table, published=publication.mark(table) if publication else "")


def _publication_of(table: Table, config: PostgresCdcConfig) -> str:
    return f"{config.publication}_inserts" if table.insert_only else config.publication


def publish(connection: psycopg.Connection[Any], config: PostgresCdcConfig, tables: Tables, version: int) -> None:
    """Make the publications and add what they lack, or, with `manage = false`, only see that nothing is missing."""
    for statement in missing(connection, config, tables, version):
        if not config.manage:
            which = ", ".join(tables.captured) if len(tables.captured) < 4 else "every table"
            raise ConfigError(
                f"the publication {config.publication!r} does not hold all changes of {which}, and manage = false",
                code="PEN-1016",
                hint=statement,
            )
        connection.execute(statement, prepare=False)
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
    held = find_publications(connection, [name]).get(name) if wanted else None
    lacking = ", ".join(t.sql for t in wanted if held is None or held.entry(t.oid, t.namespace) is None)
    if not lacking:
        return ""
    if held is not None:
        return f"ALTER PUBLICATION {quoted(name)} ADD TABLE {lacking}"
    settings = "publish = 'truncate', publish_via_partition_root = false"
    return f"CREATE PUBLICATION {quoted(name)} FOR TABLE {lacking} WITH ({settings})"


def missing(
    connection: psycopg.Connection[Any], config: PostgresCdcConfig, tables: Tables, version: int
) -> Iterator[str]:
    """The statements that make the publications complete."""
    known = find_publications(connection, publications(config))
    for publication in publications(config):
        inserts = publication != config.publication
        wanted = [table for table in tables.captured.values() if table.insert_only == inserts]
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
            if table.sql not in new:  # in one transaction: nobody's changes fall between the two
                yield f"ALTER PUBLICATION {name} DROP TABLE {table.sql}; ALTER PUBLICATION {name} ADD TABLE {table.sql}"
        if new:
            yield f"ALTER PUBLICATION {name} ADD TABLE {', '.join(new)}"


def _settings(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())


def _refuse_to_break(connection: psycopg.Connection[Any], publication: str) -> None:
    """Updates of a table without replica identity fail for everyone as soon as they are published."""
    found = connection.execute(_WITHOUT_IDENTITY, [publication]).fetchone()
    if found is not None:
        raise ConfigError(
            f"the publication {publication!r} does not publish updates and deletes, and must not begin to: "
            f"{found[0]}, which it holds as well, has no replica identity",
            code="PEN-1016",
            hint="name another `publication`; one that does not exist is made",
        )


# -- check -----------------------------------------------------------------------------------------------------------


def findings(connection: psycopg.Connection[Any], config: PostgresCdcConfig) -> Iterator[Finding]:
    """Everything that would fail later, with the SQL that mends it."""
    here = wal.server(connection)
    if here.version < wal.OLDEST:
        fix = f"{wal.OLDEST // 10000} is the oldest that works"
        yield Finding(False, f"PostgreSQL {here.version // 10000} is too old", fix)
        return
    if not here.flushed:
        yield Finding(False, "the server is a standby", "point `dsn` at the primary")
    yield Finding(
        here.wal_level == "logical",
        f"wal_level is {here.wal_level}",
        "" if here.wal_level == "logical" else "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
    )
    slot = wal.slot(connection, config.slot)
    slots, max_slots, senders, max_senders, may_replicate, may_create, user = _one(connection, _LIMITS)
    free = slots < max_slots
    if slot is None and not config.manage:
        fix = f"SELECT pg_create_logical_replication_slot({connections.literal(config.slot)}, '{wal.PLUGIN}')"
        yield Finding(False, f"the replication slot {config.slot!r} is not there, and manage = false", fix)
    elif slot is None:
        fix = "" if free else f"ALTER SYSTEM SET max_replication_slots = {max_slots + 5}; then restart the server"
        yield Finding(free, f"{slots} of {max_slots} replication slots are in use; one more will be made", fix)
    else:
        lost = slot.wal_status == "lost"
        fix = f"SELECT pg_drop_replication_slot({connections.literal(config.slot)})" if lost else ""
        yield Finding(not lost, f"the replication slot {config.slot!r} is {slot.wal_status}", fix)
        if not lost:
            try:
                wal.verify_slot(slot, config.slot, here)
            except ConfigError as error:
                yield Finding(False, error.message, error.hint)
    room = senders < max_senders
    fix = "" if room else f"ALTER SYSTEM SET max_wal_senders = {max_senders + 5}; then restart the server"
    yield Finding(room, f"{senders} of {max_senders} senders are in use", fix)
    fix = "" if may_replicate else f"ALTER ROLE {quoted(user)} REPLICATION -- as a superuser"
    yield Finding(may_replicate, f"the user {'may' if may_replicate else 'may not'} replicate", fix)
    tables = find_tables(connection, config, here.version, strict=False)
    if not tables.captured:
        yield Finding(False, _nothing(config, tables.refused), _PATTERNS)
    held = find_publications(connection, publications(config))
    try:
        lacking = list(missing(connection, config, tables, here.version))
    except ConfigError as error:
        yield Finding(False, error.message, error.hint)
    else:
        grant = "" if may_create else f"GRANT CREATE ON DATABASE {quoted(here.database)} TO {quoted(user)}"
        owned = all(each.is_owned for each in held.values())
        yield from _publication_findings(config, lacking, grant, owned)
    truncating = missing_truncates(connection, config, tables)
    if truncating:
        will = config.manage and may_create
        what = (
            "will be made or completed"
            if will
            else "lacks tables: a partition that is rewritten makes its root be copied"
        )
        yield Finding(True, f"the publication {truncates(config)!r} {what}", "" if will else truncating)
    yield from _table_findings(connection, config, tables, held, quoted(user))


def _publication_findings(
    config: PostgresCdcConfig, lacking: Sequence[str], grant: str, owned: bool
) -> Iterator[Finding]:
    """Whether the publications are whole, or can be made so; `grant`: what it takes to make one."""
    name = repr(config.publication)
    if not lacking:
        yield Finding(True, f"the publication {name} is there")
    for statement in lacking:
        makes = statement.startswith("CREATE")
        if not config.manage:
            what = "is not there" if makes else "does not hold every table and all of its changes"
            yield Finding(False, f"the publication {name} {what}, and manage = false", statement)
        elif makes:
            fix = f"{grant}; or have it run by a superuser: {statement}" if grant else ""
            yield Finding(not grant, f"the publication {name} will be made", fix)
        else:
            fix = "" if owned else f"have it run by its owner or a superuser: {statement}"
            what = "will be completed" if owned else "is not complete, and the user does not own it"
            yield Finding(owned, f"the publication {name} {what}", fix)


def _table_findings(
    connection: psycopg.Connection[Any],
    config: PostgresCdcConfig,
    tables: Tables,
    held: Mapping[str, Publication],
    user: str,
) -> Iterator[Finding]:
    for stream, why in tables.refused.items():
        what, _, fix = why.partition(" (")
        yield Finding(False, f"{stream} is left out: {what}", fix.rstrip(")"))
    names = {"d": "default", "f": "full", "i": "index", "n": "nothing"}
    oids = [table.oid for table in tables.captured.values()]
    may = {oid: each for oid, *each in connection.execute(_PRIVILEGES, [oids]).fetchall()}
    catalog = TypeCatalog.from_rows(connection.execute(TypeCatalog.SQL).fetchall())
    for table in tables.captured.values():
        enters, reads, owns, is_hidden, denied = may.get(table.oid, (True, True, True, False, ()))
        if not enters:
            fix = f"GRANT USAGE ON SCHEMA {quoted(table.namespace)} TO {user}"
            yield Finding(False, f"{table.stream} may not be read: no usage of its schema", fix)
        # By its pages it is read only by who may read all of it.
        if not reads and (not table.chunked or any(column.name in denied for column in table.columns)):
            yield Finding(False, f"{table.stream} may not be read", f"GRANT SELECT ON {table.sql} TO {user}")
        if is_hidden:
            fix = f"ALTER ROLE {user} BYPASSRLS -- as a superuser; or let {user} own the table"
            yield Finding(False, f"{table.stream} may not be read whole: it has row-level security", fix)
        name = _publication_of(table, config)
        if config.manage and not owns and not (name in held and held[name].holds(table)):
            fix = (
                f"ALTER TABLE {table.sql} OWNER TO {user}; or, as a superuser, once there is a publication: "
                f"ALTER PUBLICATION {quoted(name)} ADD TABLE {table.sql}"
            )
            yield Finding(False, f"{table.stream} may not be published: the user does not own it", fix)
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


def _nothing(config: PostgresCdcConfig, refused: Mapping[str, str]) -> str:
    left_out = "".join(f"; {stream}: {why}" for stream, why in refused.items())
    return f"no table that can be captured matches tables = {list(config.tables)}{left_out}"


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

# By arrays, domains, ranges and attributes, however deep.
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

# The view pg_publication_tables would wait for whoever has locked one of the tables.
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
            SELECT FROM pg_index i WHERE i.indrelid = c.oid
               AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END)
     LIMIT 1"""

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
