"""The first copy of a table: chunks in the order of its key, and which changes of the log they already contain."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import dbapi as adbc_dbapi
from pydantic import BaseModel, ConfigDict

from penstock.changes import CHANGE_FIELDS, Op
from penstock.changes.old_key import unpack_keys
from penstock.connectors.postgres_cdc import wal
from penstock.connectors.postgres_cdc.decode import Rows, position_text
from penstock.connectors.postgres_cdc.setup import Table
from penstock.connectors.postgres_cdc.tree import Tree
from penstock.connectors.postgresql import connections, failures
from penstock.connectors.postgresql.types import (
    TypeCatalog,
    arrow_type,
    from_select,
    parse_text,
    quoted,
    select_native,
    select_text,
)
from penstock.durable import Json
from penstock.errors import ConnectorError, DataError, SchemaError
from penstock.source import Note, SourceBatch
from penstock.tables import Refused

RETRY_SECS = 10.0
"""How long a table that failed is left alone; twice as long after each failure in a row."""
MOST_RETRY_SECS = 600.0

LOCK_SECS = 30
"""How long the lock of another session on a table is waited for before the table is set aside."""

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
"""Keys at equal distances, the rows that ANALYZE has found, and how many came since, by the pages."""
_OF_TABLE = ("0A", "22", "42", "XX")
_LOCKED, _CANCELLED = "55P03", "57014"
Key = tuple[str, ...]
"""The values of a key as the server's text."""


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Failure(_Value):
    """Why a table is set aside."""

    code: str
    message: str
    hint: str = ""
    since: float
    """When it failed first, in seconds of the epoch."""
    tries: int = 1
    next_try: float | None = None
    """When it is copied again; None: only when it is asked for."""


class Progress(_Value):
    """What is done with one table, and how far its copy is; part of the position."""

    oid: int
    state: Literal["waiting", "seeding", "seeded", "paused", "skipped", "failed", "gone"]
    """`gone`: it is not captured any more; if it comes back, it is copied again. Changes count only in the first three."""
    shape: str = ""
    """What its columns looked like; see `Table.differs`."""
    key: tuple[str, ...] = ()
    """What told its rows apart; another key is another table."""
    published: str = ""
    """How it was published when it was copied, see `Publication.mark`; if that is another now, changes were lost."""
    copies: int = 1
    """The number of its copy, 0 without one; from the second on what the target holds goes together with the first rows."""
    refresh: bool = False
    """No change of it was missed: all of them count while and after it is copied again, and nothing is cleared."""
    rows: int = 0
    """Rows that were copied."""
    estimate: int | None = None
    """Rows that the server thought it had when the copy began."""
    failure: Failure | None = None
    """Why it failed last; kept until a copy is complete."""
    until_xid: int = 0
    """While waiting: transactions below it may have written before the table was published, and must end first."""
    from_lsn: int = 0
    """While waiting: the log must have been read up to here first, or changes of before would come behind the copy."""
    frontier: Key | None = None
    """While seeding: the last key that was copied; None: none yet."""
    tree: Tree | None = None
    """Of a partitioned one: the partitions that the target's rows are of, or the next copy's; None: not yet looked at."""

    @property
    def captured(self) -> bool:
        """True if its changes are followed, now or once it is copied."""
        return self.state in ("waiting", "seeding", "seeded")

    @property
    def clears(self) -> bool:
        """True if its next rows come with a clear of what the target holds."""
        return self.state == "waiting" and self.copies > 1 and not self.refresh

    def ended(self, state: Literal["paused", "skipped", "failed", "gone"], failure: Failure | None = None) -> Progress:
        """Set aside: nothing of its copy counts any more."""
        return self.model_copy(
            update={"state": state, "frontier": None, "until_xid": 0, "refresh": False, "failure": failure}
        )

    def failed(self, what: Mapping[str, Any], retried: bool = True) -> Progress:
        """Set aside for a failure that a note tells of; the pauses between two tries grow."""
        tries = self.failure.tries + 1 if self.failure else 1
        pause = min(MOST_RETRY_SECS, RETRY_SECS * 2.0 ** min(tries - 1, 20))
        failure = Failure(
            code=what["code"],
            message=what["message"],
            hint=what["hint"],
            since=self.failure.since if self.failure else what["at"],
            tries=tries,
            next_try=what["at"] + pause if retried else None,
        )
        return self.ended("failed", failure)


class Copied(_Value):
    """A chunk that was copied, and the snapshot it was read in; kept until the log has passed what that contains."""

    stream: str
    after: Key | None = None
    upto: Key | None = None
    snapshot: str
    lsn: int
    """Every transaction that the snapshot shows committed before it."""


@dataclass(frozen=True)
class Chunk:
    """The keys behind `after` up to `upto`; None is open. `lsn` is how far the log was read before."""

    stream: str
    after: Key | None
    upto: Key | None
    held: wal.Held
    """All parts of an epoch are read under it, however often: every sink gets the same rows."""
    lsn: int
    copy: int = 1
    clears: bool = False
    """The first of a copy that is not the first: what the target holds of the table goes with it."""


@dataclass(frozen=True)
class Pages:
    """A run of a table's pages, for want of a key."""

    stream: str
    first: int
    last: int | None
    held: wal.Held
    lsn: int
    copy: int = 1
    clears: bool = False


@dataclass(frozen=True)
class Unreadable:
    """A part that cannot be planned: all that it gives is the note that says so."""

    note: Json


class TableError(DataError):
    """What is wrong with one table and no other."""

    default_code = "PEN-3006"


@contextlib.contextmanager
def table_errors(table: Table, doing: Literal["copy", "publish"] = "copy") -> Iterator[None]:
    """Tell errors that belong to one table from those of the server or the connection, which pass through."""
    try:
        yield
    except (psycopg.Error, adbc_dbapi.Error) as error:
        state = str(getattr(error, "sqlstate", None) or "")
        if state[:2] not in _OF_TABLE and state not in (_LOCKED, _CANCELLED):
            raise
        text = str(error).strip().partition("\n")[0]
        hints = {
            "42501": _grant(table, text)
            if doing == "copy" or "for schema" in text
            else f"ALTER TABLE {table.sql} OWNER TO that user, or add it to the publication yourself",
            "42P01": "it was dropped or renamed",
            _CANCELLED: "raise `statement_timeout_secs`, or lower `seed_chunk_rows`",
            _LOCKED: "a session holds a lock on it: see pg_locks",
        }
        raise TableError(f"cannot {doing} {table.stream}: {text}", hint=hints.get(state, "")) from error


def _grant(table: Table, refusal: str) -> str:
    """What lets the rows of a table be read, after what the server said."""
    if "row-level security" in refusal:
        return "a policy hides rows: give BYPASSRLS to the user that reads (ALTER ROLE), or let it own the table"
    if "for schema" in refusal:
        return f"GRANT USAGE ON SCHEMA {quoted(table.namespace)} TO the user that reads"
    return f"GRANT SELECT ON {table.sql} TO the user that reads"


def failed(stream: str, error: ConnectorError) -> Json:
    """The note that sets a table aside."""
    return Refused.because(stream, error).note()


# -- planning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """Where a chunk ends, and about how many rows are in it."""

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
    Ends of chunks of about so many rows, until `room` is used up or `upto` is reached, which then is the last one.

    They come from the statistics of the key where these are good enough, unless the rows are to be `counted`, which takes
    a tenth of the time of a copy.
    """
    for edge in () if counted else _from_statistics(connection, table, after, upto, rows, room):
        yield edge
        after, room = edge.upto, room - edge.rows
        if after == upto or room <= 0:
            return
    expressions = ", ".join(select_text(column, catalog) for column in table.key_columns)
    while room > 0:
        found = connection.execute(
            f"SELECT {expressions} FROM {_from(table)}{_where(table, after, upto)} "
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
    """Ends of chunks by what ANALYZE knows of a key that is one whole number; fewer where that is not enough."""
    if table.partitioned or [column.type_oid in _INTEGERS for column in table.key_columns] != [True]:
        return
    if any(edge and not (len(edge) == 1 and edge[0].lstrip("-").isdigit()) for edge in (after, upto)):
        return  # of another key, from before
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
        f"SELECT count(*) FROM (SELECT FROM {_from(table)}{_where(table, after, upto)} LIMIT {most}) AS rest"
    ).fetchone()
    return int(row[0]) if row else 0


def page_runs(connection: psycopg.Connection[Any], table: Table, whole: Pages, count: int) -> list[Pages]:
    """A table without a usable key, cut by its pages; pages that are added later hold nothing that the snapshot shows."""
    if table.partitioned:
        return [whole]
    row = connection.execute("SELECT pg_relation_size(%s::oid) / current_setting('block_size')::int", [table.oid])
    pages = int((row.fetchone() or (0,))[0] or 0)
    step = max(1024, -(-pages // count))
    edges = [*range(0, max(pages, 1), step)]
    return [replace(whole, first=each, last=None if each == edges[-1] else each + step) for each in edges]


def _where(table: Table, after: Key | None, upto: Key | None) -> str:
    if any(edge is not None and len(edge) != len(table.index) for edge in (after, upto)):
        return " WHERE false"  # the key has other columns by now: the copy is begun anew
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


def read_part(
    connection: Any, table: Table, catalog: TypeCatalog, part: Chunk | Pages, apart: bool = False
) -> Iterator[SourceBatch | Note]:
    """The rows of a part, and then under which snapshot they were read; `apart`: its table can be set aside."""
    count = 0
    if isinstance(part, Pages):
        where = f" WHERE ctid >= '({part.first},0)'" + (f" AND ctid < '({part.last},0)'" if part.last else "")
        where = "" if table.partitioned else where
        edges: dict[str, Key | None] = {}
    else:
        where = _where(table, part.after, part.upto)
        edges = {"after": part.after, "upto": part.upto}
    with failures.errors(f"cannot copy {part.stream}"), table_errors(table) if apart else contextlib.nullcontext():
        part.held.take(connection)
        # Page by page, for which the server takes 7 % less than for going through the index row by row; and only the pages
        # of the chunk: one that is a third of its table would be filtered out of all of them.
        connections.run(connection, "SET LOCAL enable_indexscan = off")
        connections.run(connection, "SET LOCAL enable_seqscan = off")
        columns = ", ".join(select_native(column, catalog) for column in table.columns) or "1"
        for batch in wal.batches(connection, f"SELECT {columns} FROM {_from(table)}{where}"):
            if batch.num_rows:
                count += batch.num_rows
                yield SourceBatch(_seeded(batch, table, catalog, part), stream=table.stream)
        same = wal.files(connection, table.oid) == part.held.files.get(table.oid)
        connections.run(connection, "COMMIT")
    if not same:  # emptied or rewritten after the snapshot was taken: what it shows was not there any more
        yield Note({"again": [part.stream]})
        return
    if part.clears:  # behind the rows: if they fail, the target keeps what it has. `_position` puts it before them
        yield _clear(table, catalog, part)
    copied = Copied(stream=part.stream, snapshot=part.held.snapshot, lsn=part.held.lsn, **edges)
    yield Note({"copied": copied.model_dump(mode="json"), "rows": count})


def _clear(table: Table, catalog: TypeCatalog, part: Chunk | Pages) -> SourceBatch:
    """One row that empties the target of a table."""
    row = {"_op": str(Op.TRUNCATE), "_position": position_text(part.lsn - 1, 2 * part.copy)}
    return SourceBatch(pa.RecordBatch.from_pylist([row], schema=table.schema(catalog)), stream=table.stream)


def _seeded(batch: pa.RecordBatch, table: Table, catalog: TypeCatalog, part: Chunk | Pages) -> pa.RecordBatch:
    rows = batch.num_rows
    columns = [  # of a table without columns a number is read for each row
        from_select(values, column, catalog) for values, column in zip(batch.columns, table.columns, strict=False)
    ]
    # No commit record starts at an odd place, so this sorts behind all that was read and before all that comes.
    fixed = {"_op": str(Op.SEEDED), "_position": position_text(part.lsn - 1, 2 * part.copy + 1)}
    columns += [pa.repeat(pa.scalar(fixed.get(each.name), each.type), rows) for each in CHANGE_FIELDS]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema(catalog))


# -- which changes count ---------------------------------------------------------------------------------------------


@dataclass
class Rule:
    """Which changes of one table belong behind its copy; the others are in the copy, or will be."""

    table: Table
    catalog: TypeCatalog
    progress: Progress
    copied: Sequence[Copied]
    reset: bool = False
    """Its copy begins anew behind this range."""
    again: bool = False
    """It is copied once more behind this range, from a clear on."""
    copies: bool = True
    """It may be: not with `snapshot = "never"`."""

    def rows(self, item: Rows) -> Iterator[pa.RecordBatch]:
        """The rows that count, in order."""
        batch = item.batch
        if self.again:
            return
        if self.table.insert_only:  # it may be in the other publication as well, from before
            batch = _only(batch, _numpy(pc.is_in(batch["_op"], value_set=pa.array([Op.INSERT, Op.TRUNCATE]))))
            if not batch.num_rows:
                return
        followed = self.progress.refresh or (self.progress.state == "seeded" and not self.copied)
        if followed and self.copies and self.progress.key and _has_other_key(item, self.table, self.progress.key):
            self.again = True  # where its rows went under that key, and under the target's, cannot be told
            return
        if self.progress.refresh:
            yield from self._over(batch)
            return
        if self.reset or (self.progress.state != "seeded" and self.progress.frontier is None and not self.copied):
            return
        if self.progress.state == "seeded" and not self.copied:
            yield batch
        elif self.progress.shape and self.table.differs(self.progress.shape):
            # The copy's keys are of another time and cannot be compared with these: it is begun anew, on empty ground.
            yield self._anew(batch)
        elif _has_other_key(item, self.table, self.table.key):
            if not self._precedes_copy(batch):  # the key went and came back behind the copy, which else contains them
                yield self._anew(batch)
        elif not self.table.chunked:
            yield _only(batch, ~self._contained(self.copied, _txids(batch)))
        else:
            yield from self._by_key(batch)

    def _over(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """
        All of them: the target still holds the rows from before the copy, and the log leads from those to the end.

        Only a row that moved without all of its values cannot follow a copy that contains the move: where the values
        should be taken from, another row may stand by now.
        """
        moved = _numpy(pc.and_(batch["_old_key"].is_valid(), batch["_unchanged"].is_valid()))
        found = np.flatnonzero(moved & self._contained(self.copied, _txids(batch)))
        self.again = len(found) > 0
        yield batch.slice(0, int(found[0])) if self.again else batch

    def _anew(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Begin the copy anew: what empties the target, in place of a batch."""
        self.reset = True
        return _changed(batch.slice(0, 1), {"_op": Op.TRUNCATE}, keep=("_position", "_txid", "_committed_at"))

    def _precedes_copy(self, batch: pa.RecordBatch) -> bool:
        """True if every part of the copy shows the changes; parts that the log has passed are gone, the first one first."""
        first = [each for each in self.copied if each.after is None]
        return bool(self._contained(first, _txids(batch)).all())

    def _by_key(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        truncated = np.flatnonzero(_numpy(pc.equal(batch["_op"], str(Op.TRUNCATE))))
        end = int(truncated[0]) if len(truncated) else batch.num_rows
        yield from self._keyed(batch.slice(0, end))
        if end < batch.num_rows and not self.reset:
            self.reset = True  # what the copy holds is gone, and what comes now is in the next copy
            yield batch.slice(end, 1)

    def _keyed(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        columns = self.table.key_columns
        names = [column.name for column in columns]
        kinds = {c.name: arrow_type(c.type_oid, c.typmod, self.catalog) for c in columns}
        if any(name not in batch.schema.names or batch.schema.field(name).type != kinds[name] for name in names):
            return  # from before the key was renamed or retyped, and the copy from behind it: it contains them
        live = self._live([batch[name] for name in names], _txids(batch))
        moved = np.flatnonzero(_numpy(batch["_old_key"].is_valid()))
        done = 0
        for index in map(int, moved):
            yield _only(batch.slice(done, index - done), live[done:index])
            done = index + 1
            row = batch.slice(index, 1)
            yield from self._moved(row, bool(live[index]))
            if self.reset:
                return
        yield _only(batch.slice(done), live[done:])

    def _moved(self, row: pa.RecordBatch, new_lives: bool) -> Iterator[pa.RecordBatch]:
        """A row whose key changed: it may leave the part that is copied, or enter it."""
        columns = self.table.key_columns
        kinds = pa.schema([(c.name, arrow_type(c.type_oid, c.typmod, self.catalog)) for c in columns])
        keys = [column.combine_chunks() for column in unpack_keys(row["_old_key"], kinds).columns]
        old_lives = bool(self._live(keys, _txids(row))[0])
        if old_lives and new_lives:
            yield row
        elif old_lives:
            values = {column.name: key for column, key in zip(columns, keys, strict=True)}
            yield _changed(row, {"_op": Op.DELETE}, keep=("_position", "_txid", "_committed_at"), values=values)
        elif new_lives and row["_unchanged"][0].as_py():
            # It enters without all of its values, and the target has never had them: copy the table again.
            self.reset = True
            yield _changed(row, {"_op": Op.TRUNCATE}, keep=("_position", "_txid", "_committed_at"))
        elif new_lives:
            names = tuple(name for name in row.schema.names if name not in ("_op", "_old_key"))
            yield _changed(row, {"_op": Op.INSERT}, keep=names)

    def _live(self, keys: Sequence[pa.Array], txids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        live = np.ones(len(txids), dtype=bool)
        if self.progress.state != "seeded":
            live &= self._at_most(keys, self.progress.frontier) if self.progress.frontier else False
        for chunk in self.copied:
            inside = wal.Snapshot.parse(chunk.snapshot).sees(txids)
            if chunk.upto is not None:
                inside &= self._at_most(keys, chunk.upto)
            if chunk.after is not None:
                inside &= ~self._at_most(keys, chunk.after)
            live &= ~inside
        return live

    def _contained(self, copied: Sequence[Copied], txids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        contained = np.zeros(len(txids), dtype=bool)
        for each in copied:
            contained |= wal.Snapshot.parse(each.snapshot).sees(txids)
        return contained

    def _at_most(self, keys: Sequence[pa.Array], edge: Key) -> npt.NDArray[np.bool_]:
        """Which keys are not behind the edge, compared column by column."""
        result = np.ones(len(keys[0]), dtype=bool)
        for values, text, column in reversed(list(zip(keys, edge, self.table.key_columns, strict=True))):
            bound = _plain(parse_text(pa.array([text]), column.type_oid, column.typmod, self.catalog))[0]
            less, same = _numpy(pc.less(_plain(values), bound)), _numpy(pc.equal(_plain(values), bound))
            result = less | (same & result)
        return result


@dataclass
class Rules:
    """The rules of all tables in one WAL range."""

    by_stream: Mapping[str, Rule] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """Tables that are followed and cannot be any more; if the range holds changes of them, these are missed."""
    bad: dict[str, Json] = field(default_factory=dict)
    """The tables that failed in this range, with the note that says so; nothing more of them counts."""

    def wants(self, stream: str) -> bool:
        if stream in self.missing:
            self.set_aside(stream, TableError(f"{stream} is gone, or has lost its replica identity"))
        return stream in self.by_stream and stream not in self.bad

    def set_aside(self, stream: str, error: ConnectorError) -> None:
        self.bad.setdefault(stream, failed(stream, error))

    def rows(self, item: Rows) -> Iterator[SourceBatch]:
        stream = item.relation.stream
        if not self.wants(stream) or item.relation.namespace != self.by_stream[stream].table.namespace:
            return
        try:
            for batch in self.by_stream[stream].rows(item):
                if batch.num_rows:
                    yield SourceBatch(batch, stream=stream)
        except (DataError, SchemaError) as error:
            self.set_aside(stream, error)

    def told(self) -> Json:
        """Which copies begin anew, and which are made once more, for the note of the range."""
        good = [(stream, rule) for stream, rule in sorted(self.by_stream.items()) if stream not in self.bad]
        told = {"reset": [s for s, rule in good if rule.reset], "again": [s for s, rule in good if rule.again]}
        return {what: streams for what, streams in told.items() if streams}


def _has_other_key(item: Rows, table: Table, key: Sequence[str]) -> bool:
    """True if changes tell rows apart by other columns than these: their table's key was another one then."""
    return set(item.relation.key(table.primary_key)) != set(key)


def _txids(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    return batch["_txid"].to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _only(batch: pa.RecordBatch, mask: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    return batch if mask.all() else batch.filter(pa.array(mask))


def _numpy(mask: pa.Array) -> npt.NDArray[np.bool_]:
    return pc.fill_null(mask, False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _plain(values: pa.Array) -> pa.Array:
    return values.storage if isinstance(values.type, pa.BaseExtensionType) else values


def _changed(
    row: pa.RecordBatch, new: Mapping[str, str], keep: Sequence[str], values: Mapping[str, pa.Array] | None = None
) -> pa.RecordBatch:
    """One row with some columns kept, some replaced, and null in the others."""
    columns = []
    for each, column in zip(row.schema, row.columns, strict=True):
        if values and each.name in values:
            columns.append(values[each.name])
        elif each.name in new:
            columns.append(pa.array([str(new[each.name])], each.type))
        else:
            columns.append(column if each.name in keep else pa.nulls(1, each.type))
    return pa.RecordBatch.from_arrays(columns, schema=row.schema)
