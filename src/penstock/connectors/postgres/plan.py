"""
From changes to a plan: which of them each row of the target takes its values from.

Needed only if rows moved, or changes do not include all values. Other changes are applied without one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from penstock.changes import Op
from penstock.changes.collapse import Collapsed, collapse
from penstock.changes.keys import Ints, Mask
from penstock.connectors.postgres.events import Events, Part
from penstock.errors import SchemaError

# Names that no column can have, in the skeleton of the changes that is collapsed on the driver.
_KEY, _EVENT, _REST = "\0key", "\0event", "\0rest"


@dataclass(frozen=True)
class Plan:
    """What the changes of an epoch come to, in numbers of rows."""

    upserts: pa.Table
    """Per row to write: `u` its number, `event` its last change; per traced column `s0`… the change with its value, `h0`…
    whether the stored value stays."""
    origins: pa.Table
    """Keys under which a stored row may be, best first: `u`, and a change that has the key, or (`old`) moved from it."""
    traced: Sequence[str]
    truncated: bool


@dataclass(frozen=True)
class _Codes:
    """A number for every distinct key, as the server tells keys apart."""

    rows: Ints
    """Changes, in ascending order of their numbers; after them, in the same order, those with an old key."""
    old: Mask
    codes: Ints

    def of(self, rows: Ints, *, old: bool) -> pa.Array:
        """The codes of these changes' keys, or of their old keys; null where there is none."""
        mine = np.flatnonzero(self.old == old)
        place = np.searchsorted(self.rows[mine], rows)
        there = np.zeros(len(rows), bool)
        within = place < len(mine)
        there[within] = self.rows[mine[place[within]]] == rows[within]
        found: Ints = np.zeros(len(rows), np.int64)
        found[there] = self.codes[mine[place[there]]]
        return pa.array(found, mask=~there)

    def first(self, wanted: Ints) -> Ints:
        """For each code the first change that has it; the places are those of `rows`."""
        first: Ints = np.zeros(int(self.codes.max(initial=0)) + 1, np.int64)
        first[self.codes[::-1]] = np.arange(len(self.codes))[::-1]  # of a code that repeats, the last one written stays
        return first[wanted]


def plan(connection: psycopg.Connection[Any], events: Events) -> Plan:
    """
    Collapse the changes as all sinks do, over the numbers of their keys and rows alone.

    Only this much of an epoch is in the driver's memory: some 100 bytes for a change, whatever its row holds.
    """
    if len({part.is_changelog for part in events.parts}) > 1:
        raise SchemaError(
            f"some rows for {events.target.name.sql} are changes and others are not: their order is unknown",
            code="PEN-4002",
            hint="route them to topics of their own",
        )
    codes, traced = _codes(connection, events), events.traced
    skeletons = [_skeleton(_read(connection, _described(part)), part, codes, traced) for part in events.parts]
    rest = pa.schema([(_REST, pa.int64())]) if events.moves and events.rest else None
    found = collapse(skeletons, [_KEY], rest)
    return Plan(_upserts(found, traced), _origins(found, codes), traced, found.truncated)


def _codes(connection: psycopg.Connection[Any], events: Events) -> _Codes:
    """The server numbers the keys: it alone knows that 2.0 and 2.00 are one number, and 'a' and 'a ' one char(2)."""
    sides = [", ".join(f"{side}{place} AS x{place}" for place in range(len(events.key))) for side in "ko"]
    relation = events.relation(values=False)
    keys = f"SELECT row, false AS old, {sides[0]} FROM {relation}"
    if events.moves:
        keys += f" UNION ALL SELECT row, true AS old, {sides[1]} FROM {relation} WHERE o0 IS NOT NULL"
    columns = ", ".join(f"x{place}" for place in range(len(events.key)))
    query = f"SELECT row, old::int AS old, dense_rank() OVER (ORDER BY {columns}) AS code FROM ({keys}) k"
    found = _copied(connection, query, dict.fromkeys(("row", "old", "code"), pa.int64()))
    rows, old, codes = (found.column(name).to_numpy() for name in ("row", "old", "code"))
    order = np.lexsort((rows, old))
    return _Codes(rows[order], old[order].astype(bool), codes[order])


def _described(part: Part) -> str:
    """The query for what describes the changes of a part."""
    return (
        f"SELECT {part.described('_op', 'NULL::text')} AS op, {part.described('_position', 'NULL::text')} AS position, "
        f"to_json({part.described('_unchanged', 'NULL::text[]')})::text AS unchanged, {part.number} AS row FROM {part.sql}"
    )


def _skeleton(described: pa.Table, part: Part, codes: _Codes, traced: Sequence[str]) -> pa.Table:
    """The changes of a part with numbers for their keys and values."""
    numbers = described.column("row")
    rows = numbers.to_numpy()
    columns: dict[str, Any] = {_KEY: codes.of(rows, old=False), _EVENT: numbers}
    columns |= {name: numbers for name in traced if name in part.own}
    if not part.is_changelog:  # rows of two schemas may take turns: their numbers give the order
        columns["_op"] = pa.repeat(Op.INSERT.value, described.num_rows)
        columns["_position"] = pc.utf8_lpad(numbers.cast(pa.string()), 20, "0")
        return pa.table(columns)
    old = codes.of(rows, old=True).cast(pa.string())
    columns |= {"_op": described.column("op"), "_position": described.column("position")}
    columns["_unchanged"] = described.column("unchanged")
    columns["_old_key"] = pc.binary_join_element_wise('{"\\u0000key":', old, "}", "")
    return pa.table(columns)


def _upserts(found: Collapsed, traced: Sequence[str]) -> pa.Table:
    count = found.upserts.num_rows
    columns = {"u": pa.array(np.arange(count)), "event": found.upserts.column(_EVENT)}
    for place, name in enumerate(traced):
        columns[f"s{place}"] = found.upserts.column(name)
        columns[f"h{place}"] = pa.array(found.kept.get(name, np.zeros(count, bool)))
    return pa.table(columns)


def _origins(found: Collapsed, codes: _Codes) -> pa.Table:
    empty = pa.table({_KEY: pa.array([], pa.int64()), "_row": pa.array([], pa.int64())})
    origins = found.origins if found.origins is not None else empty
    place = codes.first(origins.column(_KEY).to_numpy())
    rank = np.arange(origins.num_rows)
    return pa.table(
        {"u": origins.column("_row"), "rank": rank, "event": codes.rows[place], "old": codes.old[place]},
    )


def _read(connection: psycopg.Connection[Any], query: str) -> pa.Table:
    """The answer to `_described`, `unchanged` as lists."""
    kinds = {**dict.fromkeys(("op", "position", "unchanged"), pa.string()), "row": pa.int64()}
    table = _copied(connection, query, kinds)
    lists = table.column("unchanged").combine_chunks().dictionary_encode()
    found = pa.array([json.loads(each) for each in lists.dictionary.to_pylist()], pa.list_(pa.string()))
    return table.set_column(table.column_names.index("unchanged"), "unchanged", found.take(lists.indices))


def _copied(connection: psycopg.Connection[Any], query: str, kinds: dict[str, pa.DataType]) -> pa.Table:
    text = io.BytesIO()
    with connection.cursor() as cursor, cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT csv, HEADER)") as copy:
        for data in copy:
            text.write(data)
    text.seek(0)
    options = pyarrow.csv.ConvertOptions(
        column_types=kinds, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    return pyarrow.csv.read_csv(text, parse_options=parse, convert_options=options)
