"""Make a table fit the rows of an epoch: create it, add columns, widen types; or say what that would come to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from penstock.changes import own_columns
from penstock.connectors.postgres.columns import origin, picked, plain, refuse, sql_type
from penstock.connectors.postgres.target import NAME_BYTES, Catalog, Column, Name, Target, refuse_unfit
from penstock.connectors.postgresql.types import quoted
from penstock.connectors.upsert import DELETED
from penstock.errors import SchemaError
from penstock.schema.evolution import EXACT, Policy, becomes_double, follow, no_exact_double, refusal, widens_or_doubles
from penstock.sink import Topic

MOST_COLUMNS = 1590
"""A table has at most 1,600; some are left for those that a staging table has besides."""

_TRIAL = Name("pg_temp", "penstock_trial")


@dataclass(frozen=True)
class Fit:
    """How a topic's table is made to fit its rows."""

    topic: Topic
    name: Name
    schemas: Sequence[pa.Schema]
    """The columns of the rows, for each schema that the epoch has, in the order in which they came."""
    policy: Policy
    key: Sequence[str]
    soft_delete: bool

    def make(self, connection: psycopg.Connection[Any], catalog: Catalog) -> Target:
        """Create or alter the table; the table as it is then."""
        target = catalog.find(connection, self.name)
        if target is None:
            for statement in _creation(connection, self.name, self._whole(), self.key, self.soft_delete):
                connection.execute(statement)
        else:
            refuse_unfit(self.topic, target, self.key, self.soft_delete)
            target = self._altered(connection, catalog, target)
        found = target or catalog.find(connection, self.name)
        assert found is not None
        return found

    def foresee(self, connection: psycopg.Connection[Any], catalog: Catalog) -> Target:
        """
        The table as `make` will leave it, while nothing is locked or changed yet.

        If there is something to create or to alter, that is tried on an empty copy of the table.
        """
        target = catalog.find(connection, self.name)
        if target is not None and not any(
            altered(connection, self.topic, target, each, self.policy) for each in self.schemas
        ):
            return target
        with connection.transaction(force_rollback=True):
            trial = replace(self, name=_TRIAL)
            if target is None:
                return replace(trial.make(connection, catalog), name=self.name)
            connection.execute(
                f"CREATE TEMP TABLE {_TRIAL.table} (LIKE {self.name.sql} INCLUDING GENERATED INCLUDING IDENTITY)"
            )
            found = catalog.find(connection, _TRIAL)
            assert found is not None
            return replace(trial._altered(connection, catalog, found), name=self.name, unique=target.unique)

    def _whole(self) -> pa.Schema:
        whole = self.schemas[0]
        for each in self.schemas[1:]:
            whole = widened(self.topic, whole, each, self.policy)
        return whole

    def _altered(self, connection: psycopg.Connection[Any], catalog: Catalog, target: Target) -> Target:
        for each in self.schemas:
            changes = _alterations(target, altered(connection, self.topic, target, each, self.policy))
            if self.soft_delete and DELETED not in target.columns:
                changes.append(f"ADD COLUMN {quoted(DELETED)} bool NOT NULL DEFAULT false")
            if changes:
                connection.execute(f"ALTER TABLE {self.name.sql} {', '.join(changes)}")
                found = catalog.find(connection, self.name)
                assert found is not None
                target = found
        return target


def make_empty(
    connection: psycopg.Connection[Any], name: Name, columns: pa.Schema, key: Sequence[str], soft_delete: bool
) -> None:
    """Create a table of which no rows came."""
    for statement in _creation(connection, name, columns, key, soft_delete):
        connection.execute(statement)


def known_types(connection: psycopg.Connection[Any], schema: pa.Schema) -> dict[str, str]:
    """For every field the type of a column for it: the type that it came from if this server has it, else one that fits."""
    named = [(each.name, place, *pair) for each in schema for place, pair in enumerate(origin(each))]
    found = {each.name: sql_type(each.type) for each in schema}
    if named:
        rows = connection.execute(_TYPES, [list(each) for each in zip(*named, strict=True)]).fetchall()
        found.update(rows)
    return found


def widened(topic: Topic, target: pa.Schema, rows: pa.Schema, policy: Policy) -> pa.Schema:
    """The target's columns once it holds the rows; columns that are new or wider keep the name of the type they came from."""
    wider = follow(topic, target, rows, policy, widens_or_doubles)
    origins = {each.name: each.metadata for each in rows}
    changed = [
        each
        if each.name in target.names and target.field(each.name).type == each.type
        else each.with_metadata(origins.get(each.name) or {})
        for each in wider
    ]
    for name in wider.names:
        if len(name.encode()) > NAME_BYTES:
            raise SchemaError(
                f"the name of the column {name!r} of {topic} is too long for PostgreSQL, which would cut it off",
                code="PEN-4002",
                hint=f"shorten it to {NAME_BYTES} bytes in the route's SQL",
            )
    return pa.schema(changed)


def refuse_columns(topic: Topic, schema: pa.Schema, target: Target | None, policy: Policy) -> None:
    """Refuse columns that a table, or this one, could never have; before there are rows."""
    given = pa.schema([each for each in schema if not pa.types.is_null(each.type)])
    for each in given:
        refuse(topic, each)
    there = target.columns if target is not None else {}
    if len({*there, *given.names}) > MOST_COLUMNS:
        raise SchemaError(
            f"the table of {topic} would have more than {MOST_COLUMNS:,} columns, which PostgreSQL has no place for",
            code="PEN-4002",
            hint="list the columns that are needed in the route's SQL",
        )
    if target is not None:
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, each.type) for each in given], schema=given)
        rows = plain(topic, empty).schema
        widened(topic, target.schema(), picked(rows, own_columns(rows)), policy)


def altered(
    connection: psycopg.Connection[Any], topic: Topic, target: Target, rows: pa.Schema, policy: Policy
) -> dict[str, str]:
    """The columns that must be added to a table or get another type, so that it holds the rows; refused by some policies."""
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


def refuse_rounding(
    connection: psycopg.Connection[Any], topic: Topic, target: Target, rows: pa.Schema, kinds: Mapping[str, str]
) -> None:
    """Refuse to turn whole numbers into doubles that would be others; `kinds` is what `altered` gave."""
    for name in kinds:
        known = target.columns.get(name)
        is_double = known is not None and name in rows.names and becomes_double(known.arrow, rows.field(name).type)
        if is_double and holds_beyond(connection, target.name, name):
            raise no_exact_double(topic, name)


def holds_beyond(connection: psycopg.Connection[Any], name: Name, column: str) -> bool:
    """True if a value of the column lies beyond what doubles can count to."""
    question = f"SELECT EXISTS (SELECT FROM {name.sql} WHERE {quoted(column)} NOT BETWEEN {-EXACT} AND {EXACT})"
    return connection.execute(question).fetchone() == (True,)


def _is_shorter(column: Column) -> bool:
    """True for a column that is text in Arrow, and does not take every text."""
    return column.arrow == pa.string() and (column.length is not None or not column.is_text)


def _is_longer(column: Column, kind: str) -> bool:
    """True if `kind` takes every text that the column does, and more."""
    length = re.fullmatch(r"character(?: varying)?\((\d+)\)", kind)
    if length is None:
        return kind in ("text", "character varying")
    return column.length is not None and int(length.group(1)) > column.length


def _alterations(target: Target, kinds: Mapping[str, str]) -> list[str]:
    """The actions of ALTER TABLE for what `altered` gave."""
    return [
        f"ALTER COLUMN {quoted(name)} TYPE {kind} USING {quoted(name)}::{kind}"
        if name in target.columns
        else f"ADD COLUMN {quoted(name)} {kind}"
        for name, kind in kinds.items()
    ]


def _creation(
    connection: psycopg.Connection[Any], name: Name, columns: pa.Schema, key: Sequence[str], soft_delete: bool
) -> list[str]:
    """The statements that make a table, and its schema if that is missing."""
    kinds = known_types(connection, columns)
    parts = [f"{quoted(each)} {kind}" for each, kind in kinds.items()]
    if soft_delete:
        parts.append(f"{quoted(DELETED)} bool NOT NULL DEFAULT false")
    if key:
        parts.append(f"PRIMARY KEY ({', '.join(map(quoted, key))})")
    found = connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", [name.namespace]).fetchone()
    make = [] if found is not None or name == _TRIAL else [f"CREATE SCHEMA {quoted(name.namespace)}"]
    return [*make, f"CREATE TABLE {name.sql} ({', '.join(parts)})"]


_TYPES = """
    SELECT DISTINCT ON (n.field) n.field, format_type(to_regtype(n.kind)::oid, n.typmod)
      FROM unnest(%s::text[], %s::int[], %s::text[], %s::int[]) AS n(field, place, kind, typmod)
     WHERE to_regtype(n.kind) IS NOT NULL ORDER BY n.field, n.place"""
