"""
The first copy of a table: chunks in the order of its key, each read by one task.

An example. `orders` has the keys 1 to 9 and is copied in chunks of three rows. The frontier is the last copied key; the
position keeps it, and with it every chunk with the snapshot that it was read in.

    range 1   chunk (…, 3]   read in snapshot 700:700:   frontier 3   rows 1 2 3, `_op` r
    range 2   log            transaction 705 sets v = 'x' in rows 2 and 8
    range 3   chunk (3, 6]   read in snapshot 710:710:   frontier 6   rows 4 5 6
    range 4   chunk (6, …)   read in snapshot 710:710:   complete     rows 7 8 9, row 8 already with v = 'x'

In range 2 the change of row 2 is kept: its key is at most the frontier 3, and snapshot 700 does not show transaction 705. The
change of row 8 is dropped: its key is past the frontier, so that a later chunk brings the row as it is then. `merge.py`
decides this for every change.

All chunks of one epoch are read under one exported snapshot, however often: every sink gets the same rows. A table without
a usable key is copied by its pages, all of them in one epoch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from penstock.changes import CHANGE_FIELDS, Op
from penstock.connectors.postgres_cdc.catalog import Table
from penstock.connectors.postgres_cdc.log import snapshots
from penstock.connectors.postgres_cdc.log.lsn import position_text
from penstock.connectors.postgres_cdc.log.read import batches
from penstock.connectors.postgres_cdc.log.snapshots import ExportedSnapshot
from penstock.connectors.postgres_cdc.position import Copied
from penstock.connectors.postgres_cdc.table_errors import table_errors
from penstock.connectors.postgres_cdc.tables import Key
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import TypeCatalog, from_select, select_native, select_text
from penstock.source import Note, SourceBatch
from penstock.tables import CopyAgain, Refused

_INTEGERS = (20, 21, 23)
_FEW_ROWS = 100_000
_STATISTICS = """
SELECT histogram_bounds::text::int8[], reltuples, reltuples * (pages - relpages) / relpages
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_stats s ON (s.schemaname, s.tablename) = (n.nspname, c.relname)
    CROSS JOIN LATERAL (SELECT pg_relation_size(c.oid) / current_setting('block_size')::int AS pages) now
WHERE c.oid = %s AND attname = %s AND NOT inherited AND n_distinct = -1 AND histogram_bounds IS NOT NULL
    AND reltuples > 0 AND pages BETWEEN 0.8 * relpages AND 1.2 * relpages
"""
"""Keys at equal distances, the number of rows that ANALYZE found, and an estimate of the rows added since, by pages."""


@dataclass(frozen=True)
class Chunk:
    """The keys after `after` up to `upto`; None is open. A split carries the table as planning saw it."""

    table: Table
    catalog: TypeCatalog
    after: Key | None
    upto: Key | None
    snapshot: ExportedSnapshot
    lsn: int
    """How far the log was read before this copy."""
    copy: int = 1
    clears: bool = False
    """It is the first chunk of a second or later copy: it clears the target."""

    @property
    def stream(self) -> str:
        return self.table.stream


@dataclass(frozen=True)
class Pages:
    """A run of a table's pages, for a table without a usable key."""

    table: Table
    catalog: TypeCatalog
    first: int
    last: int | None
    snapshot: ExportedSnapshot
    lsn: int
    copy: int = 1
    clears: bool = False

    @property
    def stream(self) -> str:
        return self.table.stream


@dataclass(frozen=True)
class Clear:
    """No rows, only a clear: the table was set aside, and the targets hold part of its copy."""

    table: Table
    catalog: TypeCatalog
    lsn: int
    copy: int


@dataclass(frozen=True)
class Unreadable:
    """A part that cannot be planned: reading it gives only the note that sets its table aside."""

    refused: Refused


# -- planning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """The end of a chunk, and about how many rows are in it."""

    upto: Key | None
    rows: int


def edges(
    connection: psycopg.Connection[Any],
    table: Table,
    catalog: TypeCatalog,
    after: Key | None,
    upto: Key | None,
    rows: int,
    room: int,
    counted: bool = False,
) -> Iterator[Edge]:
    """
    Ends of chunks of about `rows` rows, until `room` rows are used up or `upto` is reached, which then is the last end.

    They come from the statistics of the key where these are good enough. With `counted` the rows are counted instead,
    which takes a tenth of the time of a copy.
    """
    for edge in () if counted else _from_statistics(connection, table, after, upto, rows, room):
        yield edge
        after, room = edge.upto, room - edge.rows
        if after == upto or room <= 0:
            return
    expressions = ", ".join(select_text(column, catalog) for column in table.key_columns)
    while room > 0:
        found = connection.execute(
            f"SELECT {expressions} FROM {_from(table)}{chunk_where(table, after, upto)} "
            f"ORDER BY {', '.join(table.order_by())} OFFSET {rows - 1} LIMIT 1"
        ).fetchone()
        if found is None or tuple(found) == upto:
            yield Edge(upto, _count(connection, table, after, upto, rows))
            return
        after, room = tuple(found), room - rows
        yield Edge(after, rows)


def _from_statistics(
    connection: psycopg.Connection[Any], table: Table, after: Key | None, upto: Key | None, rows: int, room: int
) -> Iterator[Edge]:
    """Ends of chunks from the statistics of a key that is one whole number; fewer where these are not enough."""
    if table.partitioned or [column.type_oid in _INTEGERS for column in table.key_columns] != [True]:
        return
    if any(edge and not (len(edge) == 1 and edge[0].lstrip("-").isdigit()) for edge in (after, upto)):
        return  # edges of an earlier key
    with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
        found = connection.execute(_STATISTICS, [table.oid, table.key_columns[0].name]).fetchone()
        bounds, count, grown = found or ((), 0, 0)
        lowest, highest = int(after[0]) if after else -math.inf, int(upto[0]) if upto else math.inf
        within = [bound for bound in bounds if lowest < bound < highest]
        each = count / (len(bounds) - 1) if len(bounds) > 1 else math.inf  # rows between two bounds
        step = int(1.1 * rows / each)
        if _FEW_ROWS < len(within) * each < room:  # the end of a table is shared by all tasks
            step = min(step, -(-len(within) * rows // room))
        if step < 1:
            return
        place = -1 if after else 0  # the lowest bound is the least key
        while place + 1.5 * step < len(within):
            place += step
            yield Edge((str(within[place]),), round(step * each))
        left = max(0, len(within) - 1 - place) * each + grown
        if left < 1.5 * rows:
            yield Edge(upto, round(left))


def _count(connection: psycopg.Connection[Any], table: Table, after: Key | None, upto: Key | None, most: int) -> int:
    row = connection.execute(
        f"SELECT count(*) FROM (SELECT FROM {_from(table)}{chunk_where(table, after, upto)} LIMIT {most}) AS rest"
    ).fetchone()
    return int(row[0]) if row else 0


def page_runs(connection: psycopg.Connection[Any], table: Table, whole: Pages, count: int) -> list[Pages]:
    """A table without a usable key, cut by its pages; pages that are added later hold no rows of the snapshot."""
    if table.partitioned:
        return [whole]
    row = connection.execute("SELECT pg_relation_size(%s::oid) / current_setting('block_size')::int", [table.oid])
    pages = int((row.fetchone() or (0,))[0] or 0)
    step = max(1024, -(-pages // count))
    edges = [*range(0, max(pages, 1), step)]
    return [replace(whole, first=each, last=None if each == edges[-1] else each + step) for each in edges]


def chunk_where(table: Table, after: Key | None, upto: Key | None) -> str:
    if any(edge is not None and len(edge) != len(table.index) for edge in (after, upto)):
        return " WHERE false"  # the key has other columns by now: the copy begins again
    key = ", ".join(table.order_by())
    parts = [
        f"({key}) {sign} ({', '.join(connections.literal(value) for value in edge)})"
        for sign, edge in ((">", after), ("<=", upto))
        if edge is not None
    ]
    return f" WHERE {' AND '.join(parts)}" if parts else ""


def _from(table: Table) -> str:
    return table.sql if table.partitioned else f"ONLY {table.sql}"


# -- reading ---------------------------------------------------------------------------------------------------------


def read_part(connection: Any, part: Chunk | Pages, *, apart: bool = False) -> Iterator[SourceBatch | Note]:
    """The rows of a part, then a note of the snapshot that they were read in; `apart`: its table can be set aside."""
    table, catalog, count = part.table, part.catalog, 0
    if isinstance(part, Pages):
        where = f" WHERE ctid >= '({part.first},0)'" + (f" AND ctid < '({part.last},0)'" if part.last else "")
        where = "" if table.partitioned else where
        edges: dict[str, Key | None] = {}
    else:
        where = chunk_where(table, part.after, part.upto)
        edges = {"after": part.after, "upto": part.upto}
    with failures.errors(f"cannot copy {part.stream}"), table_errors(table) if apart else contextlib.nullcontext():
        part.snapshot.take(connection)
        # A bitmap scan reads page by page, which costs the server 7 % less than an index scan row by row, and reads only
        # the pages of the chunk: a sequential scan would filter one third of a table out of all of its pages.
        connections.run(connection, "SET LOCAL enable_indexscan = off")
        connections.run(connection, "SET LOCAL enable_seqscan = off")
        columns = ", ".join(select_native(column, catalog) for column in table.columns) or "1"
        for batch in batches(connection, f"SELECT {columns} FROM {_from(table)}{where}"):
            if batch.num_rows:
                count += batch.num_rows
                yield SourceBatch(_seeded(batch, table, catalog, part), stream=table.stream)
        same = snapshots.files(connection, table.oid) == part.snapshot.files.get(table.oid)
        connections.run(connection, "COMMIT")
    if not same:  # emptied or rewritten after the snapshot was taken: the snapshot showed it empty
        yield Note(CopyAgain(streams=(part.stream,)).note())
        return
    if part.clears:  # after the rows: if they fail, the target keeps its own. `_position` sorts it before them
        yield clear(part)
    copied = Copied(stream=part.stream, snapshot=part.snapshot.snapshot, lsn=part.snapshot.lsn, **edges)
    yield Note({"copied": copied.model_dump(mode="json"), "rows": count})


def first_rows(connection: Any, table: Table, catalog: TypeCatalog, rows: int) -> Iterator[SourceBatch]:
    """So many rows of a table as its copy would bring them, without a snapshot or a slot; for `penstock check --sample`."""
    part = Pages(table, catalog, 0, None, ExportedSnapshot("", "", 0, {}), 1)
    with failures.errors(f"cannot read {table.stream}"), table_errors(table):
        columns = ", ".join(select_native(column, catalog) for column in table.columns) or "1"
        for batch in batches(connection, f"SELECT {columns} FROM {_from(table)} LIMIT {rows}"):
            if batch.num_rows:
                yield SourceBatch(_seeded(batch, table, catalog, part), stream=table.stream)


def clear(part: Chunk | Pages | Clear) -> SourceBatch:
    """One row that empties the target of a table."""
    table, catalog = part.table, part.catalog
    row = {"_op": str(Op.TRUNCATE), "_position": position_text(part.lsn - 1, 2 * part.copy)}
    return SourceBatch(pa.RecordBatch.from_pylist([row], schema=table.schema(catalog)), stream=table.stream)


def _seeded(batch: pa.RecordBatch, table: Table, catalog: TypeCatalog, part: Chunk | Pages) -> pa.RecordBatch:
    rows = batch.num_rows
    columns = [  # of a table without columns a number is read for each row
        from_select(values, column, catalog) for values, column in zip(batch.columns, table.columns, strict=False)
    ]
    # No commit record starts at an odd place, so this sorts after everything that was read and before everything to come.
    fixed = {"_op": str(Op.SEEDED), "_position": position_text(part.lsn - 1, 2 * part.copy + 1)}
    columns += [pa.repeat(pa.scalar(fixed.get(each.name), each.type), rows) for each in CHANGE_FIELDS]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema(catalog))
