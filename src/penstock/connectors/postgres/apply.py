"""From staging tables to a target: rows that are added, and changes that are applied by key, by statements over whole sets."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pydantic import BaseModel, ConfigDict

from penstock.changes import Op, is_changelog, own_columns
from penstock.changes.collapse import collapse
from penstock.connectors.postgres.target import DELETED, Column, Target
from penstock.connectors.postgresql.types import quoted
from penstock.errors import SchemaError, StagingLost
from penstock.schema.codec import unpack_schema

_TASK_BITS = 40
"""A row's number in its epoch: that of its task, and behind it that in the task."""

# Names that no column can have, in the skeleton of the changes that is collapsed on the driver.
_KEY, _EVENT, _REST = "\0key", "\0event", "\0rest"


class StagedPart(BaseModel):
    """A staging table: rows of one topic and one schema, as one task has them; its columns are called c0, c1, …"""

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
    """Rows may have moved: beside each column of the key stands the old one, o0, o1, …"""


@dataclass(frozen=True)
class Part:
    """A part with its place among the epoch's: which task it is of."""

    task: int
    staged: StagedPart
    sql: str
    """The staging table."""
    gone: Sequence[str] = ()
    """Columns that the topic has no more: null in every row, not unknown."""

    @cached_property
    def schema(self) -> pa.Schema:
        return unpack_schema(self.staged.columns)

    @property
    def sent(self) -> list[str]:
        """The columns of the topic that the rows have."""
        return own_columns(self.schema)

    @property
    def own(self) -> list[str]:
        """The columns that the rows say something about."""
        return [*self.sent, *(name for name in self.gone if name not in self.sent)]

    def value(self, column: Column, name: str = "") -> str:
        """The SQL of a column's value, `NULL` if the part does not have it; `name`: of the old key's column."""
        if column.name not in self.schema.names:
            return f"NULL::{column.computed}"
        return f"{name or f'c{self.schema.names.index(column.name)}'}::{column.computed}"

    def described(self, name: str, otherwise: str) -> str:
        """The SQL of a column that describes the change."""
        if not is_changelog(self.schema) or name not in self.schema.names:
            return otherwise
        return f"c{self.schema.names.index(name)}"


def append(connection: psycopg.Connection[Any], target: Target, parts: Sequence[Part]) -> None:
    """Add the rows of all parts, which must be as many as were staged."""
    for part in parts:
        names = part.schema.names
        values = ", ".join(part.value(target.columns[name]) for name in names)
        added = connection.execute(
            f"INSERT INTO {target.name.sql} ({_list(names)}) SELECT {values} FROM {part.sql}"
        ).rowcount
        _refuse_loss(part, added)


def count(connection: psycopg.Connection[Any], parts: Sequence[Part]) -> None:
    """See that every row that was staged is there."""
    for part in parts:
        found = connection.execute(f"SELECT count(*) FROM {part.sql}").fetchone()
        _refuse_loss(part, found[0] if found else 0)


def _refuse_loss(part: Part, found: int) -> None:
    if found != part.staged.rows:
        raise StagingLost(f"the staging table {part.sql} holds {found} rows, and {part.staged.rows} were staged")


# -- changes by key --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What the changes of an epoch come to, in numbers of rows: which of them each row of the target takes its values from."""

    upserts: pa.Table
    """Per row: `u` its number, `event` its last change, per traced column `s0`… the change with its value, `h0`… stored."""
    origins: pa.Table
    """Keys under which a stored row may be, best first: `u`, and a change that has the key, or (`old`) moved from it."""
    traced: Sequence[str]
    truncated: bool


@dataclass(frozen=True)
class Upsert:
    """The changes of one topic, to be applied to its table."""

    target: Target
    parts: Sequence[Part]
    key: Sequence[str]
    soft_delete: bool = False

    @cached_property
    def columns(self) -> list[Column]:
        """Those that the changes know, the key's first."""
        known = dict.fromkeys([*self.key, *(name for part in self.parts for name in part.own)])
        return [self.target.columns[name] for name in known]

    @property
    def is_simple(self) -> bool:
        """True when the last change of a key says all about its row."""
        whole = all(len(part.own) == len(self.columns) for part in self.parts)
        whole = whole and len({is_changelog(part.schema) for part in self.parts}) == 1  # else the plan refuses them
        return whole and not self._moves and not any(part.staged.unchanged for part in self.parts)

    @property
    def _moves(self) -> bool:
        return any(part.staged.old_key for part in self.parts)

    def plan(self, connection: psycopg.Connection[Any]) -> Plan:
        """
        Collapse the changes as all sinks do, over their keys and numbers alone.

        Only this much of an epoch stands in the driver's memory: some 100 bytes for a change, whatever its row holds.
        """
        if len({is_changelog(part.schema) for part in self.parts}) > 1:
            raise SchemaError(
                f"some rows for {self.target.name.sql} are changes and others are not: their order cannot be told",
                code="PEN-4002",
                hint="route them to topics of their own",
            )
        tables = [_read(connection, self._skeleton(part)) for part in self.parts]
        texts = pa.chunked_array([*(each.column("k") for each in tables), *(each.column("o") for each in tables)])
        encoded = texts.combine_chunks().dictionary_encode()
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        rows = sum(each.num_rows for each in tables)
        events = np.concatenate([each.column("row").to_numpy() for each in tables])
        first = np.zeros(len(encoded.dictionary), np.int64)
        known = np.flatnonzero(codes >= 0)[::-1]
        first[codes[known]] = known  # the first that has it, as the last one written stays

        traced = [name for name in self._traced() if name not in self.key]
        indices, at, skeletons = encoded.indices, 0, []
        for part, table in zip(self.parts, tables, strict=True):
            ids = table.column("row")
            columns: dict[str, Any] = {_KEY: indices.slice(at, table.num_rows).cast(pa.int64()), _EVENT: ids}
            columns |= {name: ids for name in traced if name in part.own}
            if not is_changelog(part.schema):  # rows of two schemas may take turns: their numbers tell the order
                columns["_op"] = pa.repeat(Op.INSERT.value, table.num_rows)
                columns["_position"] = pc.utf8_lpad(ids.cast(pa.string()), 20, "0")
            else:
                old = indices.slice(rows + at, table.num_rows).cast(pa.string())
                columns |= {"_op": table.column("op"), "_position": table.column("position")}
                columns["_unchanged"] = table.column("unchanged")
                columns["_old_key"] = pc.binary_join_element_wise('{"\\u0000key":', old, "}", "")
            skeletons.append(pa.table(columns))
            at += table.num_rows
        rest = pa.schema([(_REST, pa.int64())]) if self._moves and self._rest() else None
        result = collapse(skeletons, [_KEY], rest)

        count = result.upserts.num_rows
        stored = {name: pa.array(result.kept.get(name, np.zeros(count, bool))) for name in traced}
        upserts = {"u": pa.array(np.arange(count)), "event": result.upserts.column(_EVENT)}
        upserts |= {f"s{place}": result.upserts.column(name) for place, name in enumerate(traced)}
        upserts |= {f"h{place}": stored[name] for place, name in enumerate(traced)}
        keys = result.origins.column(_KEY).to_numpy() if result.origins is not None else np.empty(0, np.int64)
        owners = result.origins.column("_row").to_numpy() if result.origins is not None else keys
        place = first[keys]
        origins = pa.table(
            {
                "u": owners,
                "rank": np.arange(len(keys)),
                "event": events[place % rows] if rows else keys,
                "old": place >= rows,
            }
        )
        return Plan(pa.table(upserts), origins, traced, result.truncated)

    def _traced(self) -> list[str]:
        """Columns whose values may have to be looked for in earlier changes, or in the target."""
        unchanged = {name for part in self.parts for name in part.staged.unchanged}
        return [
            each.name
            for each in self.columns
            if each.name in unchanged or any(each.name not in part.own for part in self.parts)
        ]

    def _rest(self) -> list[str]:
        """Columns that only the table itself knows."""
        known = {DELETED, *(column.name for column in self.columns)}
        return [each.name for each in self.target.columns.values() if not each.generated and each.name not in known]

    def _skeleton(self, part: Part) -> str:
        key = ", ".join(part.value(self.target.columns[name]) for name in self.key)
        old = f"CASE WHEN o0 IS NOT NULL THEN ROW({self._old(part)})::text END" if part.staged.old_key else "NULL::text"
        return (
            f"SELECT ROW({key})::text AS k, {old} AS o, {part.described('_op', 'NULL::text')} AS op, "
            f"{part.described('_position', 'NULL::text')} AS position, "
            f"to_json({part.described('_unchanged', 'NULL::text[]')})::text AS unchanged, {_number(part)} AS row FROM {part.sql}"
        )

    def _old(self, part: Part) -> str:
        return ", ".join(part.value(self.target.columns[name], f"o{place}") for place, name in enumerate(self.key))

    def apply(self, connection: psycopg.Connection[Any], plan: Plan | None) -> None:
        """Make of the target what the changes say; `plan` is needed if they are not simple."""
        if plan is None:
            self._apply_simple(connection)
        else:
            self._apply_planned(connection, plan)
            connection.execute(
                "DROP TABLE IF EXISTS pg_temp.penstock_plan, pg_temp.penstock_origins, pg_temp.penstock_kept"
            )

    def _apply_simple(self, connection: psycopg.Connection[Any]) -> None:
        behind = ""
        if any(part.staged.truncates for part in self.parts):
            last = connection.execute(
                f"SELECT position, row FROM {self._events()} WHERE op = 't' ORDER BY position COLLATE \"C\" DESC, row DESC "
                "LIMIT 1"
            ).fetchone()
            assert last is not None
            self._empty(connection)
            behind = connection.execute(
                "SELECT format('AND (e.position COLLATE \"C\", e.row) > (%%L, %%L::int8)', %s::text, %s::int8)", last
            ).fetchone()[0]  # type: ignore[index]
        if any(part.staged.deletes for part in self.parts):
            self._remove(connection, f"{self._events()} WHERE e.op = 'd' {behind}", "k")
        keys = ", ".join(f"e.k{place}" for place in range(len(self.key)))
        self._insert(
            connection,
            [f"n{place}" for place in range(len(self.columns))],
            f"(SELECT DISTINCT ON ({keys}) * FROM {self._events()} WHERE e.op <> 't' {behind} "
            f"ORDER BY {keys}, e.position COLLATE \"C\" DESC, e.row DESC) e WHERE e.op <> 'd'",
        )

    def _apply_planned(self, connection: psycopg.Connection[Any], plan: Plan) -> None:
        rest = self._rest()
        by_name = {each.name: each for each in self.columns}
        sources = [f"s{place} int8, h{place} bool" for place in range(len(plan.traced))]
        _load(connection, "penstock_plan", ["u int8, event int8", *sources], plan.upserts)
        _load(connection, "penstock_origins", ["u int8, rank int8, event int8, old bool"], plan.origins)
        kept = [*plan.traced, *rest]
        if plan.origins.num_rows:
            found = "CASE WHEN o.old THEN e.o{0} ELSE e.k{0} END" if self._moves else "e.k{0}"
            same = " AND ".join(f"t.{quoted(name)} = {found.format(place)}" for place, name in enumerate(self.key))
            living = f" AND NOT t.{quoted(DELETED)}" if self.soft_delete else ""
            values = "".join(f", t.{quoted(name)} AS v{place}" for place, name in enumerate(kept))
            connection.execute(
                f"CREATE TEMP TABLE penstock_kept ON COMMIT DROP AS SELECT DISTINCT ON (o.u) o.u{values} "
                f"FROM pg_temp.penstock_origins o JOIN {self._events()} ON e.row = o.event "
                f"JOIN {self.target.name.sql} t ON {same}{living} ORDER BY o.u, o.rank"
            )
        if plan.truncated:
            self._empty(connection)
        elif any(part.staged.deletes for part in self.parts):
            self._remove(connection, f"{self._events()} WHERE e.op = 'd'", "k")
        if self._moves and not plan.truncated:
            old, new = (", ".join(f"e.{side}{place}" for place in range(len(self.key))) for side in "ok")
            self._remove(
                connection, f"{self._events()} WHERE e.o0 IS NOT NULL AND ROW({old}) IS DISTINCT FROM ROW({new})", "o"
            )
        place_of = {name: place for place, name in enumerate(plan.traced)}
        taken: list[str] = []
        joins: list[str] = []
        for number, column in enumerate(self.columns):
            at = place_of.get(column.name)
            if at is None:
                taken.append(f"e.n{number}")
                continue
            joins.append(f"LEFT JOIN {self._events(f'e{at}')} ON e{at}.row = p.s{at}")
            stored = f"v.v{at}::{by_name[column.name].computed}" if plan.origins.num_rows else "NULL"
            taken.append(f"CASE WHEN p.h{at} THEN {stored} ELSE e{at}.n{number} END")
        if plan.origins.num_rows:
            joins.append("LEFT JOIN pg_temp.penstock_kept v ON v.u = p.u")
        self._insert(
            connection, taken, f"pg_temp.penstock_plan p JOIN {self._events()} ON e.row = p.event {' '.join(joins)}"
        )
        if rest and plan.origins.num_rows:  # what only the table itself knows moves with its row
            same = " AND ".join(f"t.{quoted(name)} = e.k{place}" for place, name in enumerate(self.key))
            moved = ", ".join(f"{quoted(name)} = v.v{len(plan.traced) + place}" for place, name in enumerate(rest))
            connection.execute(
                f"UPDATE {self.target.name.sql} t SET {moved} FROM pg_temp.penstock_kept v "
                f"JOIN pg_temp.penstock_plan p ON p.u = v.u JOIN {self._events()} ON e.row = p.event WHERE {same}"
            )

    def _events(self, alias: str = "e") -> str:
        """All changes as one relation: `row`, `op`, `position`, the key k0…, the old one o0…, and the columns n0…"""
        keys = [self.target.columns[name] for name in self.key]
        selects = []
        for part in self.parts:
            values = [f"{_number(part)} AS row", f"{part.described('_op', repr(Op.INSERT.value) + '::text')} AS op"]
            values.append(f"{part.described('_position', repr('') + '::text')} AS position")
            values += [f"{part.value(each)} AS k{place}" for place, each in enumerate(keys)]
            if self._moves:
                values += [
                    f"{part.value(each, f'o{place}') if part.staged.old_key else f'NULL::{each.computed}'} AS o{place}"
                    for place, each in enumerate(keys)
                ]
            values += [f"{part.value(each)} AS n{place}" for place, each in enumerate(self.columns)]
            selects.append(f"SELECT {', '.join(values)} FROM {part.sql}")
        return f"({' UNION ALL '.join(selects)}) {alias}"

    def _empty(self, connection: psycopg.Connection[Any]) -> None:
        # Not TRUNCATE: older snapshots would see the table empty, and those beside it as they were.
        if self.soft_delete:
            connection.execute(
                f"UPDATE {self.target.name.sql} SET {quoted(DELETED)} = true WHERE NOT {quoted(DELETED)}"
            )
        else:
            connection.execute(f"DELETE FROM {self.target.name.sql}")

    def _remove(self, connection: psycopg.Connection[Any], events: str, side: str) -> None:
        keys = ", ".join(f"e.{side}{place} AS x{place}" for place in range(len(self.key)))
        same = " AND ".join(f"t.{quoted(name)} = d.x{place}" for place, name in enumerate(self.key))
        gone = f"(SELECT {keys} FROM {events}) d WHERE {same}"
        if self.soft_delete:
            connection.execute(f"UPDATE {self.target.name.sql} t SET {quoted(DELETED)} = true FROM {gone}")
        else:
            connection.execute(f"DELETE FROM {self.target.name.sql} t USING {gone}")

    def _insert(self, connection: psycopg.Connection[Any], values: Sequence[str], relation: str) -> None:
        names = [each.name for each in self.columns]
        if self.soft_delete:
            names, values = [*names, DELETED], [*values, "false"]
        update = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in names)
        connection.execute(
            f"INSERT INTO {self.target.name.sql} ({_list(names)}) SELECT {', '.join(values)} FROM {relation} "
            f"ON CONFLICT ({_list(self.key)}) DO UPDATE SET {update}"
        )


def _number(part: Part) -> str:
    return f"{part.task << _TASK_BITS}::int8 + r"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))


def _load(connection: psycopg.Connection[Any], name: str, columns: Sequence[str], rows: pa.Table) -> None:
    """A table for the rest of the transaction."""
    connection.execute(f"CREATE TEMP TABLE {name} ({', '.join(columns)}) ON COMMIT DROP")
    names = ", ".join(rows.column_names)
    with connection.cursor() as cursor, cursor.copy(f"COPY pg_temp.{name} ({names}) FROM STDIN (FORMAT csv)") as copy:
        for batch in rows.to_batches(max_chunksize=1 << 17):
            text = io.BytesIO()
            pyarrow.csv.write_csv(batch, text, pyarrow.csv.WriteOptions(include_header=False))
            copy.write(text.getvalue())


def _read(connection: psycopg.Connection[Any], query: str) -> pa.Table:
    """The answer to a skeleton's query, whose columns are texts but for `row`; `unchanged` as lists."""
    text = io.BytesIO()
    with connection.cursor() as cursor, cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT csv, HEADER)") as copy:
        for data in copy:
            text.write(data)
    text.seek(0)
    kinds = {**dict.fromkeys(("k", "o", "op", "position", "unchanged"), pa.string()), "row": pa.int64()}
    options = pyarrow.csv.ConvertOptions(
        column_types=kinds, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    table = pyarrow.csv.read_csv(text, parse_options=parse, convert_options=options)
    lists = table.column("unchanged").combine_chunks().dictionary_encode()
    found = pa.array([json.loads(each) for each in lists.dictionary.to_pylist()], pa.list_(pa.string()))
    return table.set_column(table.column_names.index("unchanged"), "unchanged", found.take(lists.indices))


def by_topic(receipts: Sequence[Mapping[str, Sequence[StagedPart]]], schema: str) -> dict[str, list[Part]]:
    """The parts of every topic, with the task that each is of."""
    found: dict[str, list[Part]] = {}
    for task, staged in enumerate(receipts):
        for topic, parts in staged.items():
            found.setdefault(topic, []).extend(
                Part(task, part, f"{quoted(schema)}.{quoted(part.table)}") for part in parts
            )
    return found
