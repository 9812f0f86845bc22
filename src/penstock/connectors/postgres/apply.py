"""From staging tables to a target: rows are added, and changes applied by key, by statements over whole sets."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.csv

from penstock.connectors.postgres.events import Events, Part, refuse_loss
from penstock.connectors.postgres.plan import Plan
from penstock.connectors.postgres.target import Target
from penstock.connectors.postgresql.types import quoted
from penstock.connectors.upsert import DELETED


def append(connection: psycopg.Connection[Any], target: Target, parts: Sequence[Part]) -> None:
    """Add the rows of all parts, which must be as many as were staged."""
    for part in parts:
        names = part.schema.names
        values = ", ".join(part.value(target.columns[name]) for name in names)
        added = connection.execute(
            f"INSERT INTO {target.name.sql} ({_list(names)}) SELECT {values} FROM {part.sql}"
        ).rowcount
        refuse_loss(part, added)


@dataclass(frozen=True)
class Upsert:
    """Applies the changes of one topic to its table."""

    connection: psycopg.Connection[Any]
    events: Events
    soft_delete: bool = False

    @property
    def _table(self) -> str:
        return self.events.target.name.sql

    def apply(self, plan: Plan | None) -> None:
        """Make of the target what the changes say; a plan is needed if they are not simple."""
        if plan is None:
            self._apply_simple()
        else:
            self._apply_planned(plan)
            self.connection.execute(
                "DROP TABLE IF EXISTS pg_temp.penstock_plan, pg_temp.penstock_origins, pg_temp.penstock_kept"
            )

    def _apply_simple(self) -> None:
        events, parts = self.events.relation(), self.events.parts
        after = ""
        if any(part.staged.truncates for part in parts):
            last = self.connection.execute(
                f"SELECT position, row FROM {events} WHERE op = 't' ORDER BY position COLLATE \"C\" DESC, row DESC LIMIT 1"
            ).fetchone()
            assert last is not None
            self._empty()
            after = self.connection.execute(
                "SELECT format('AND (e.position COLLATE \"C\", e.row) > (%%L, %%L::int8)', %s::text, %s::int8)", last
            ).fetchone()[0]  # type: ignore[index]
        if any(part.staged.deletes for part in parts):
            self._remove(f"{events} WHERE e.op = 'd' {after}", "k")
        keys = ", ".join(self._keys("e.k"))
        self._insert(
            [f"n{place}" for place in range(len(self.events.columns))],
            f"(SELECT DISTINCT ON ({keys}) * FROM {events} WHERE e.op <> 't' {after} "
            f"ORDER BY {keys}, e.position COLLATE \"C\" DESC, e.row DESC) e WHERE e.op <> 'd'",
        )

    def _apply_planned(self, plan: Plan) -> None:
        sources = [f"s{place} int8, h{place} bool" for place in range(len(plan.traced))]
        self._load("penstock_plan", ["u int8, event int8", *sources], plan.upserts)
        self._load("penstock_origins", ["u int8, rank int8, event int8, old bool"], plan.origins)
        if plan.origins.num_rows:
            self._keep(plan)
        self._remove_left(plan)
        values, joins = self._sources(plan)
        self._insert(
            values, f"pg_temp.penstock_plan p JOIN {self.events.relation()} ON e.row = p.event {' '.join(joins)}"
        )
        if self.events.rest and plan.origins.num_rows:
            self._move_rest(plan)

    def _keep(self, plan: Plan) -> None:
        """Set aside the stored values that rows keep: their own rows may be removed or overwritten."""
        found = "CASE WHEN o.old THEN e.o{0} ELSE e.k{0} END" if self.events.moves else "e.k{0}"
        same = self._same([found.format(place) for place in range(len(self.events.key))])
        living = f" AND NOT t.{quoted(DELETED)}" if self.soft_delete else ""
        kept = [*plan.traced, *self.events.rest]
        values = "".join(f", t.{quoted(name)} AS v{place}" for place, name in enumerate(kept))
        self.connection.execute(
            f"CREATE TEMP TABLE penstock_kept ON COMMIT DROP AS SELECT DISTINCT ON (o.u) o.u{values} "
            f"FROM pg_temp.penstock_origins o JOIN {self.events.relation(values=False)} ON e.row = o.event "
            f"JOIN {self._table} t ON {same}{living} ORDER BY o.u, o.rank"
        )

    def _remove_left(self, plan: Plan) -> None:
        """Remove rows that were deleted, and rows under keys that they have left."""
        events = self.events.relation(values=False)
        if plan.truncated:
            self._empty()
            return
        if any(part.staged.deletes for part in self.events.parts):
            self._remove(f"{events} WHERE e.op = 'd'", "k")
        if self.events.moves:
            old, new = (", ".join(self._keys(f"e.{side}")) for side in "ok")
            self._remove(f"{events} WHERE e.o0 IS NOT NULL AND ROW({old}) IS DISTINCT FROM ROW({new})", "o")

    def _sources(self, plan: Plan) -> tuple[list[str], list[str]]:
        """The SQL of every column's value, and the joins that it needs."""
        place_of = {name: place for place, name in enumerate(plan.traced)}
        values: list[str] = []
        joins: list[str] = []
        for number, column in enumerate(self.events.columns):
            at = place_of.get(column.name)
            if at is None:
                values.append(f"e.n{number}")
                continue
            joins.append(f"LEFT JOIN {self.events.relation(f'e{at}')} ON e{at}.row = p.s{at}")
            stored = f"v.v{at}::{column.computed}" if plan.origins.num_rows else "NULL"
            values.append(f"CASE WHEN p.h{at} THEN {stored} ELSE e{at}.n{number} END")
        if plan.origins.num_rows:
            joins.append("LEFT JOIN pg_temp.penstock_kept v ON v.u = p.u")
        return values, joins

    def _move_rest(self, plan: Plan) -> None:
        """Columns that only the table itself knows move with their row."""
        same = self._same(self._keys("e.k"))
        moved = ", ".join(
            f"{quoted(name)} = v.v{len(plan.traced) + place}" for place, name in enumerate(self.events.rest)
        )
        self.connection.execute(
            f"UPDATE {self._table} t SET {moved} FROM pg_temp.penstock_kept v JOIN pg_temp.penstock_plan p ON p.u = v.u "
            f"JOIN {self.events.relation(values=False)} ON e.row = p.event WHERE {same}"
        )

    def _keys(self, prefix: str) -> list[str]:
        return [f"{prefix}{place}" for place in range(len(self.events.key))]

    def _same(self, values: Sequence[str]) -> str:
        """The condition that a row of the target has this key."""
        return " AND ".join(f"t.{quoted(name)} = {value}" for name, value in zip(self.events.key, values, strict=True))

    def _empty(self) -> None:
        # Not TRUNCATE: older snapshots would see the table empty, and the other tables as they were.
        if self.soft_delete:
            self.connection.execute(f"UPDATE {self._table} SET {quoted(DELETED)} = true WHERE NOT {quoted(DELETED)}")
        else:
            self.connection.execute(f"DELETE FROM {self._table}")

    def _remove(self, events: str, side: str) -> None:
        keys = ", ".join(f"e.{side}{place} AS x{place}" for place in range(len(self.events.key)))
        gone = f"(SELECT {keys} FROM {events}) d WHERE {self._same(self._keys('d.x'))}"
        if self.soft_delete:
            self.connection.execute(f"UPDATE {self._table} t SET {quoted(DELETED)} = true FROM {gone}")
        else:
            self.connection.execute(f"DELETE FROM {self._table} t USING {gone}")

    def _insert(self, values: Sequence[str], relation: str) -> None:
        names = [each.name for each in self.events.columns]
        if self.soft_delete:
            names, values = [*names, DELETED], [*values, "false"]
        update = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in names)
        self.connection.execute(
            f"INSERT INTO {self._table} ({_list(names)}) SELECT {', '.join(values)} FROM {relation} "
            f"ON CONFLICT ({_list(self.events.key)}) DO UPDATE SET {update}"
        )

    def _load(self, name: str, columns: Sequence[str], rows: pa.Table) -> None:
        """Make a table of the rows for the rest of the transaction."""
        self.connection.execute(f"CREATE TEMP TABLE {name} ({', '.join(columns)}) ON COMMIT DROP")
        statement = f"COPY pg_temp.{name} ({', '.join(rows.column_names)}) FROM STDIN (FORMAT csv)"
        with self.connection.cursor() as cursor, cursor.copy(statement) as copy:
            for batch in rows.to_batches(max_chunksize=1 << 17):
                text = io.BytesIO()
                pyarrow.csv.write_csv(batch, text, pyarrow.csv.WriteOptions(include_header=False))
                copy.write(text.getvalue())


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))
