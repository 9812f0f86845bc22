"""The staged rows of an epoch: parts, and all parts of a topic as one relation of changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psycopg
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from penstock.changes import Op, is_changelog, own_columns
from penstock.connectors.postgres.target import Column, Target
from penstock.connectors.postgresql.types import quoted
from penstock.connectors.upsert import DELETED
from penstock.errors import StagingLost
from penstock.schema.codec import unpack_schema

_TASK_BITS = 40
"""A row's number in its epoch: the number of its task in the bits above these, its number in the task in these."""


class StagedPart(BaseModel):
    """A staging table: rows of one topic and one schema, staged by one task. Its columns are c0, c1, …"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: str
    rows: int
    columns: str
    """The rows' schema, as `pack_schema` writes it."""
    deletes: bool = False
    truncates: bool = False
    unchanged: list[str] = []
    """Columns that some row leaves as they are stored."""
    old_key: bool = False
    """Rows may have moved: the table has columns o0, o1, … for the old key."""


@dataclass(frozen=True)
class Part:
    """A staging table as the driver sees it."""

    task: int
    """The place of its task among the epoch's."""
    staged: StagedPart
    sql: str
    """The name of the table."""
    gone: Sequence[str] = ()
    """Columns that the topic has no more: null in every row, not unknown."""

    @cached_property
    def schema(self) -> pa.Schema:
        return unpack_schema(self.staged.columns)

    @property
    def is_changelog(self) -> bool:
        return is_changelog(self.schema)

    @property
    def sent(self) -> list[str]:
        """The columns of the topic that the rows have."""
        return own_columns(self.schema)

    @property
    def own(self) -> list[str]:
        """The columns that the rows say something about."""
        return [*self.sent, *(name for name in self.gone if name not in self.sent)]

    @property
    def number(self) -> str:
        """The SQL of a row's number in its epoch."""
        return f"{self.task << _TASK_BITS}::int8 + r"

    def staged_column(self, name: str) -> str:
        """The SQL of a column as it is staged; `NULL` if the rows do not have it."""
        return f"c{self.schema.names.index(name)}" if name in self.schema.names else "NULL"

    def value(self, column: Column) -> str:
        """The SQL of a column's value, in the type that is assigned to the target."""
        return f"{self.staged_column(column.name)}::{column.computed}"

    def described(self, name: str, otherwise: str) -> str:
        """The SQL of a column that describes the change."""
        return self.staged_column(name) if self.is_changelog and name in self.schema.names else otherwise


def by_topic(receipts: Sequence[Mapping[str, Sequence[StagedPart]]], schema: str) -> dict[str, list[Part]]:
    """The parts of every topic, with the task that staged each."""
    found: dict[str, list[Part]] = {}
    for task, staged in enumerate(receipts):
        for topic, parts in staged.items():
            found.setdefault(topic, []).extend(
                Part(task, part, f"{quoted(schema)}.{quoted(part.table)}") for part in parts
            )
    return found


def count(connection: psycopg.Connection[Any], parts: Sequence[Part]) -> None:
    """Check that every staged row is still there."""
    for part in parts:
        found = connection.execute(f"SELECT count(*) FROM {part.sql}").fetchone()
        refuse_loss(part, found[0] if found else 0)


def refuse_loss(part: Part, found: int) -> None:
    if found != part.staged.rows:
        raise StagingLost(f"the staging table {part.sql} holds {found} rows, and {part.staged.rows} were staged")


@dataclass(frozen=True)
class Events:
    """The changes of one topic in an epoch, and the table that they are for."""

    target: Target
    parts: Sequence[Part]
    key: Sequence[str]

    @cached_property
    def columns(self) -> list[Column]:
        """The columns that the changes know, the key's first."""
        known = dict.fromkeys([*self.key, *(name for part in self.parts for name in part.own)])
        return [self.target.columns[name] for name in known]

    @property
    def moves(self) -> bool:
        """True if some row may have moved to another key."""
        return any(part.staged.old_key for part in self.parts)

    @property
    def is_simple(self) -> bool:
        """True when the last change of a key says all about its row."""
        whole = all(len(part.own) == len(self.columns) for part in self.parts)
        alike = len({part.is_changelog for part in self.parts}) == 1  # else the plan refuses them
        return whole and alike and not self.moves and not any(part.staged.unchanged for part in self.parts)

    @property
    def traced(self) -> list[str]:
        """Columns whose values may have to be looked up in earlier changes or in the target."""
        unchanged = {name for part in self.parts for name in part.staged.unchanged}
        return [
            each.name
            for each in self.columns
            if each.name not in self.key
            and (each.name in unchanged or any(each.name not in part.own for part in self.parts))
        ]

    @property
    def rest(self) -> list[str]:
        """Columns that only the table itself knows."""
        known = {DELETED, *(column.name for column in self.columns)}
        return [each.name for each in self.target.columns.values() if not each.generated and each.name not in known]

    def relation(self, alias: str = "e", *, values: bool = True) -> str:
        """
        All changes as one relation: `row`, `op`, `position`, the key k0…, the old key o0…, and the columns n0…

        Keys have the type that the target compares them in, so `=`, DISTINCT and ORDER BY tell them apart as it does.
        """
        keys = [self.target.columns[name] for name in self.key]
        selects = []
        for part in self.parts:
            found = [f"{part.number} AS row", f"{part.described('_op', repr(Op.INSERT.value) + '::text')} AS op"]
            found.append(f"{part.described('_position', repr('') + '::text')} AS position")
            found += [f"{each.compared(part.staged_column(each.name))} AS k{n}" for n, each in enumerate(keys)]
            if self.moves:
                olds = [f"o{n}" if part.staged.old_key else "NULL" for n in range(len(keys))]
                found += [f"{each.compared(olds[n])} AS o{n}" for n, each in enumerate(keys)]
            if values:
                found += [f"{part.value(each)} AS n{n}" for n, each in enumerate(self.columns)]
            selects.append(f"SELECT {', '.join(found)} FROM {part.sql}")
        return f"({' UNION ALL '.join(selects)}) {alias}"
