"""What a table asks of each row by itself, tried while the row is at hand: CHECKs, domains, partitions, texts of other types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from penstock.connectors.postgres import columns
from penstock.connectors.postgres.refusals import refusals
from penstock.connectors.postgres.stage import copy_rows
from penstock.connectors.postgres.target import Target
from penstock.connectors.postgresql import failures
from penstock.connectors.postgresql.types import quoted
from penstock.errors import DataError
from penstock.sink import Topic


@dataclass
class Rules:
    """
    The rules of a topic's table.

    Rows are copied into a temporary table first, where the server finds those that the table would refuse. That costs a
    second copy of them, so it is done only where such a row is kept as a dead letter.
    """

    connection: psycopg.Connection[Any]
    target: Target
    checks: dict[str, str] = field(default_factory=dict)
    """The condition of each constraint, by what is said of a row that breaks it."""
    domains: set[str] = field(default_factory=set)
    """Columns of a domain, or of a list of one."""
    required: set[str] = field(default_factory=set)
    """Columns that take no nulls, also those with a default: a row that has the column says null itself."""
    made: dict[str, str] = field(default_factory=dict)
    """How the table makes the columns that rows do not bring: defaults, and the expressions of generated columns."""
    is_off: bool = False
    """True: the server does not let us try; what the table refuses is found by the commit."""

    @classmethod
    def of(cls, connection: psycopg.Connection[Any], target: Target) -> Rules:
        rules, named = cls(connection, target), [target.name.sql]
        for name, expression, is_domain, is_required in connection.execute(_COLUMNS, named).fetchall():
            if is_domain:
                rules.domains.add(name)
            if is_required:
                rules.required.add(name)
            if expression and "nextval(" not in expression:
                rules.made[name] = expression
        rules.checks = {
            f"it breaks the constraint {name!r}": check for name, check in connection.execute(_CHECKS, named).fetchall()
        }
        places = [place for (place,) in connection.execute(_PARTITIONS, named).fetchall()]
        if places and None not in places:
            rules.checks["it has no partition"] = " OR ".join(f"({place})" for place in places)
        return rules

    def refuse(self, topic: Topic, rows: pa.RecordBatch, at: Sequence[int], kinds: Mapping[str, str]) -> None:
        """Refuse the rows that break a rule. `at`: the place of each in its batch; `kinds`: the types that columns will get."""
        checks = self._checks(rows.schema)
        tried = [name for name in rows.schema.names if self._is_tried(name, rows.schema.field(name), kinds)]
        if self.is_off or not rows.num_rows or not (tried or checks):
            return
        found = self._found(topic, rows, at, tried, kinds)
        broken = {what: places for what, places in zip(checks, found, strict=False) if places}
        if broken:
            error = DataError(
                f"the table {self.target.name.sql} of {topic} refuses a row: {next(iter(broken))}",
                hint="repair the row in the route's SQL, or change the table",
            )
            error.rows = sorted({place for places in broken.values() for place in places})
            raise error

    def _checks(self, schema: pa.Schema) -> dict[str, str]:
        nulls = [name for name in schema.names if name in self.required and not self.target.columns[name].generated]
        return self.checks | {f"its {name!r} is null": f"{quoted(name)} IS NOT NULL" for name in nulls}

    def _is_tried(self, name: str, given: pa.Field, kinds: Mapping[str, str]) -> bool:
        column = self.target.columns.get(name)
        is_text = given.type in (pa.string(), pa.list_(pa.string()))
        return column is not None and (
            name in self.domains or (is_text and kinds.get(name, column.computed) not in ("text", "text[]"))
        )

    def _found(
        self, topic: Topic, rows: pa.RecordBatch, at: Sequence[int], tried: Sequence[str], kinds: Mapping[str, str]
    ) -> Sequence[Any]:
        """For each check the rows that break it."""
        values = [*rows.columns, pa.array(np.asarray(at, np.int64))]
        with failures.errors(failures.NO_ANSWER), refusals(topic):
            try:
                with self.connection.transaction(force_rollback=True):
                    self.connection.execute(f"CREATE TEMP TABLE {_TRIED} ({_columns(rows.schema)}, r int8)")
                    copy_rows(self.connection, _TRIED, [values], topic)
                    return self.connection.execute(self._query(rows.schema, tried, kinds)).fetchone() or ()
            except psycopg.ProgrammingError:  # a condition that only the table itself can ask, as over its whole row
                if not self.checks:
                    self.is_off = True
                    return ()
        self.checks = {}
        self.refuse(topic, rows, at, kinds)
        return ()

    def _query(self, schema: pa.Schema, tried: Sequence[str], kinds: Mapping[str, str]) -> str:
        given = {name: f"c{place}" for place, name in enumerate(schema.names)}
        first, then = ["r"], []
        for each in self.target.columns.values():
            name, made = quoted(each.name), self.made.get(each.name)
            if each.generated and made:
                then.append(f"({made})::{each.type} AS {name}")
            elif each.generated or each.name not in given:
                first.append(f"({made or 'NULL'})::{each.computed} AS {name}")
            elif each.name in kinds:
                first.append(f"{given[each.name]}::{kinds[each.name]} AS {name}")
            elif each.name in self.domains:
                first.append(f"({given[each.name]}::{each.computed})::{each.type} AS {name}")
            else:
                first.append(f"{each.compared(given[each.name])} AS {name}")
        inner = f"(SELECT {', '.join(first)} FROM {_TRIED}) t"
        inner = f"(SELECT *, {', '.join(then)} FROM {inner}) t" if then else inner
        found = [
            f"array_agg(r ORDER BY r) FILTER (WHERE ({check}) IS FALSE)" for check in self._checks(schema).values()
        ]
        return f"SELECT {', '.join([*found, *(f'count({quoted(name)})' for name in tried)])} FROM {inner}"


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"c{place} {columns.staged_type(each.type)}" for place, each in enumerate(schema))


_TRIED = "pg_temp.penstock_tried"

_COLUMNS = """
    SELECT a.attname::text, pg_get_expr(d.adbin, d.adrelid), coalesce(e.typtype, t.typtype) = 'd', a.attnotnull
      FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
      LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
     WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped"""

_CHECKS = """
    SELECT conname::text, pg_get_expr(conbin, conrelid) FROM pg_constraint
     WHERE conrelid = to_regclass(%s) AND contype = 'c' AND pg_get_constraintdef(oid) NOT LIKE '%% NOT ENFORCED'
     ORDER BY conname"""

_PARTITIONS = """
    SELECT pg_get_partition_constraintdef(p.relid) FROM pg_class c, pg_partition_tree(c.oid) p
     WHERE c.oid = to_regclass(%s) AND c.relkind = 'p' AND p.isleaf AND p.level > 0"""
