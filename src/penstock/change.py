"""The columns that describe a change, defined once, and what the changes of an epoch come to."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.errors import DataError, SchemaError

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


class Op(StrEnum):
    """What happened to a row."""

    SEEDED = "r"
    INSERT = "c"
    UPDATE = "u"
    DELETE = "d"
    TRUNCATE = "t"


CHANGE_FIELDS: tuple[pa.Field, ...] = (
    pa.field("_op", pa.string(), nullable=False),
    pa.field("_position", pa.string(), nullable=False),
    pa.field("_txid", pa.int64()),
    pa.field("_committed_at", pa.timestamp("us", tz="UTC")),
    pa.field("_unchanged", pa.list_(pa.string())),
    pa.field("_old_key", pa.string()),
)
"""Every topic of changes carries these behind its own columns. `_position` sorts as text in the order of the changes."""

_NAMES = {each.name for each in CHANGE_FIELDS}

HELD_ROWS = 1 << 20
"""Changes of an epoch that are held as a whole."""


def is_changelog(schema: pa.Schema) -> bool:
    """True for rows that say what happened; other rows are as they are now, in their order."""
    return "_op" in schema.names and "_position" in schema.names


def own_columns(schema: pa.Schema) -> list[str]:
    """The columns of a topic without those that describe the change."""
    return [name for name in schema.names if name not in _NAMES] if is_changelog(schema) else schema.names


@dataclass(frozen=True)
class Collapsed:
    """
    What the changes of an epoch come to: for each key that they touch one row to write, or one delete.

    A sink empties the target if `truncated`, then removes the keys of `deletes` and of `upserts`, then adds `upserts`.
    """

    key: Sequence[str]
    truncated: bool
    upserts: pa.Table
    """Whole rows, without change columns; null where `kept` says that the stored value stays."""
    deletes: pa.Table
    """Keys, none of which is in `upserts`."""
    kept: Mapping[str, Mask] = field(default_factory=dict)
    """Per column that some row leaves as it is stored: which rows of `upserts` do."""
    origins: pa.Table | None = None
    """Keys under which the target may hold the kept values: `_row` of `upserts`, the best key of a row first."""
    picked: Callable[[], Iterator[pa.Table]] | None = None
    """Of changes too many to be held: gives the whole rows, of which `upserts` has the keys alone, some at a time."""

    def keys(self) -> pa.Table:
        """Every key that the epoch touches, once; those of `upserts` first."""
        return pa.concat_tables([self.upserts.select(self.key), self.deletes])

    def rows(self, stored: pa.Table | None) -> Iterator[pa.Table]:
        """Whole rows to write, some at a time; `stored` as for `filled`."""
        return self.picked() if self.picked is not None else iter([self.filled(stored)])

    def filled(self, stored: pa.Table | None) -> pa.Table:
        """`upserts` with the kept values from `stored`: the target's rows of the keys in `origins`, as it was before."""
        if not self.kept or self.origins is None or stored is None or not stored.num_rows:
            return self.upserts
        rows = self.origins.column("_row").to_numpy()
        found = Keys(self.origins.select(self.key)).first_in(stored.select(self.key))
        rows, found = rows[found >= 0], found[found >= 0]
        rows, best = np.unique(rows, return_index=True)
        source: Ints = np.full(self.upserts.num_rows, -1, np.int64)
        source[rows] = found[best]
        filled = self.upserts
        for name, mask in self.kept.items():
            if name not in stored.column_names:
                continue
            both = pa.chunked_array([*filled.column(name).chunks, *stored.column(name).chunks])
            index = np.where(mask & (source >= 0), source + filled.num_rows, np.arange(filled.num_rows))
            position = filled.column_names.index(name)
            filled = filled.set_column(position, filled.schema.field(position), both.take(pa.array(index)))
        return filled


def collapse(changes: pa.Table | Sequence[pa.Table], key: Sequence[str], columns: pa.Schema | None = None) -> Collapsed:
    """
    The last state of every key that an epoch's changes touch, in the order of `_position`, else as the rows come.

    A column that an event lists in `_unchanged`, or does not know (one of `columns`, or of another table's), keeps the
    value of the row's earlier image: of the epoch, else of the target. A moved row has the image of its old key.
    """
    table, unchanged = _union([changes] if isinstance(changes, pa.Table) else changes, columns)
    is_log = is_changelog(table.schema)
    order = _order(table)
    truncated = False
    if is_log:
        truncates = np.flatnonzero(_where(table.column("_op"), Op.TRUNCATE)[order])
        truncated = bool(len(truncates))
        order = order[truncates[-1] + 1 :] if truncated else order
    events = table.select(list(key)).take(pa.array(order))
    refuse_nulls(events, key)
    gone = _where(table.column("_op"), Op.DELETE)[order] if is_log else np.zeros(len(order), bool)
    moved, old = _moves(table, order, gone, events.schema)
    codes, count = _codes(pa.concat_tables([events, old]))
    real = codes[len(order) :] != codes[moved]
    moved, old, codes = moved[real], old.filter(pa.array(real)), codes[np.r_[np.ones(len(order), bool), real]]
    log = _Log(codes, count, gone, moved, pa.concat_tables([events, old]))

    last = log.last()
    final = np.sort(last[~log.gone[last]])
    deletes = log.keys.take(pa.array(np.sort(last[log.gone[last]])))
    names = own_columns(table.schema)
    unchanged = {name: mask[order] for name, mask in unchanged.items() if name in names and name not in key}
    unchanged = {name: mask for name, mask in unchanged.items() if mask[final].any()}
    upserts = table.select(names).take(pa.array(order[final]))
    if not unchanged:
        return Collapsed(tuple(key), truncated, upserts, deletes)
    sources, origins = log.trace(final, unchanged, truncated)
    for name, source in sources.items():
        index = pa.array(order[np.maximum(source, 0)], mask=source < 0)
        position = upserts.column_names.index(name)
        values = table.column(name).take(index)
        upserts = upserts.set_column(position, upserts.schema.field(position).with_nullable(True), values)
    owners = origins.column("_row").to_numpy()
    has_origin = np.zeros(len(final), bool)
    has_origin[owners] = True
    kept = {name: mask for name, source in sources.items() if (mask := (source < 0) & has_origin).any()}
    if not kept:
        return Collapsed(tuple(key), truncated, upserts, deletes)
    wanted = np.logical_or.reduce(list(kept.values()))
    return Collapsed(tuple(key), truncated, upserts, deletes, kept, origins.filter(pa.array(wanted[owners])))


class Part(Protocol):
    """Changes that stand somewhere and can be read more than once, always in the same pieces."""

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def num_rows(self) -> int: ...
    def read(self, columns: Sequence[str]) -> Iterator[pa.Table]: ...


def collapse_parts(parts: Sequence[Part], key: Sequence[str], columns: pa.Schema) -> Collapsed:
    """
    As `collapse`; of many changes only keys and positions are held, and the rows that are left are read once they are known.

    Changes that leave values as they are stored are held as a whole.
    """

    def whole() -> Collapsed:
        return collapse([pa.concat_tables(part.read(part.schema.names)) for part in parts], key, columns)

    says_all = all(is_changelog(part.schema) and set(columns.names) <= set(part.schema.names) for part in parts)
    if not says_all or "_row" in key or sum(part.num_rows for part in parts) <= HELD_ROWS:
        return whole()
    narrow, first = [], 0
    for part in parts:
        names = [name for name in part.schema.names if name in (*key, "_op", "_position", "_unchanged", "_old_key")]
        for piece in part.read(names):
            if "_unchanged" in names:
                if piece.column("_unchanged").null_count < piece.num_rows:
                    return whole()
                piece = piece.drop_columns("_unchanged")
            narrow.append(piece.append_column("_row", pa.array(np.arange(first, first + piece.num_rows))))
            first += piece.num_rows
    collapsed = collapse(narrow, key)
    picked = np.sort(collapsed.upserts.column("_row").to_numpy())
    rows = partial(_picked, parts, columns.names, picked)
    return replace(collapsed, upserts=collapsed.upserts.select(list(key)), picked=rows)


def _picked(parts: Sequence[Part], columns: Sequence[str], numbers: Ints) -> Iterator[pa.Table]:
    first = 0
    for part in parts:
        for piece in part.read(columns):
            begin, end = np.searchsorted(numbers, (first, first + piece.num_rows))
            if end > begin:
                yield piece.take(pa.array(numbers[begin:end] - first))
            first += piece.num_rows


class Keys:
    """A set of keys in which others are looked up, many at a time."""

    def __init__(self, keys: pa.Table) -> None:
        self._names = keys.column_names
        self._values: list[pa.Array] = []
        self._pairs: list[pa.Array] = []
        codes: Ints = np.zeros(keys.num_rows, np.int64)
        for name in self._names:
            encoded = _encoded(keys.column(name))
            self._values.append(encoded.dictionary)
            both = pa.array(codes * max(len(encoded.dictionary), 1) + _ints(encoded.indices)).dictionary_encode()
            self._pairs.append(both.dictionary)
            codes = _ints(both.indices)
        self._codes = codes
        # One more than there are keys: the last element is what the code -1 of an unknown key finds.
        self._row_of: Ints = np.full(len(self._pairs[-1]) + 1, -1, np.int64)
        self._row_of[codes[::-1]] = np.arange(keys.num_rows)[::-1]

    def find(self, rows: pa.Table) -> Ints:
        """For each row the position of its key in the set; -1 if it is not in it."""
        return self._row_of[self._code(rows)]

    def first_in(self, rows: pa.Table) -> Ints:
        """For each key of the set the first of `rows` that has it; -1 if none has."""
        code = self._code(rows)
        place: Ints = np.full(len(self._row_of), -1, np.int64)
        known = np.flatnonzero(code >= 0)[::-1]
        place[code[known]] = known
        return place[self._codes]

    def _code(self, rows: pa.Table) -> Ints:
        code: Ints = np.zeros(rows.num_rows, np.int64)
        for name, values, pairs in zip(self._names, self._values, self._pairs, strict=True):
            index = _lookup(_whole(rows.column(name)), values)
            both = np.where((code >= 0) & (index >= 0), code * max(len(values), 1) + index, -1)
            code = _lookup(pa.array(both), pairs)
        return code


class _Log:
    """
    Events in their order, and behind them, for each that moved a row, its leaving of the old key.

    An entry is an index into both; `_by` sorts entries by key and then by order.
    """

    def __init__(self, codes: Ints, count: int, gone: Mask, moved: Ints, keys: pa.Table) -> None:
        self.keys = keys
        self.gone = np.concatenate([gone, np.ones(len(moved), bool)])
        self._codes = codes
        self._count = count
        self._moved = moved
        self._events = len(gone)

    def last(self) -> Ints:
        """The last entry of each key."""
        entries = self._in_order()
        last: Ints = np.full(self._count, -1, np.int64)
        last[self._codes[entries]] = entries  # of an index that repeats, numpy keeps the last
        return last[last >= 0]

    def trace(self, final: Ints, unchanged: Mapping[str, Mask], truncated: bool) -> tuple[dict[str, Ints], pa.Table]:
        """
        Follow the rows of `final` back through the epoch.

        Gives per column the event that holds each row's value, -1 for none; and the keys that rows had from the
        beginning of the epoch, under which a target may hold the rest.
        """
        entries = self._in_order()
        by = entries[np.argsort(self._codes[entries], kind="stable")]
        place = np.empty(len(by), np.int64)
        place[by] = np.arange(len(by))
        codes, gone = self._codes[by], self.gone[by]
        first = np.r_[True, codes[1:] != codes[:-1]]
        leaving = np.full(len(by), -1, np.int64)  # of an event that moved a row: where the row left its old key
        leaving[place[self._moved]] = place[self._events :]
        starts = first | np.r_[True, gone[:-1]] | (leaving >= 0)
        start = np.maximum.accumulate(np.where(starts, np.arange(len(by)), 0))
        known = {}
        for name, mask in unchanged.items():
            has_value = ~gone & ~np.r_[mask, np.ones(len(self._moved), bool)][by]
            known[name] = np.maximum.accumulate(np.where(has_value, np.arange(len(by)), -1))

        sources = {name: np.full(len(final), -1, np.int64) for name in unchanged}
        rows, at = np.arange(len(final)), place[final]
        origins: list[tuple[Ints, Ints]] = []
        while len(rows):
            begin = start[at]
            for name, source in sources.items():
                value = known[name][at]
                found = (value >= begin) & (source[rows] < 0)
                source[rows[found]] = by[value[found]]
            origins.append((rows[first[begin]], by[begin[first[begin]]]))
            left = leaving[begin]
            rows, left = rows[left >= 0], left[left >= 0]
            origins.append((rows[first[left]], by[left[first[left]]]))
            goes_on = ~first[left] & ~gone[left - 1]
            rows, at = rows[goes_on], left[goes_on] - 1
        owner = np.concatenate([each for each, _ in origins])
        entry = np.concatenate([each for _, each in origins])
        best = np.argsort(owner, kind="stable") if not truncated else np.empty(0, np.int64)
        found_keys = self.keys.take(pa.array(entry[best]))
        return sources, found_keys.append_column("_row", pa.array(owner[best], pa.int64()))

    def _in_order(self) -> Ints:
        if not len(self._moved):
            return np.arange(self._events)
        when = np.concatenate([2 * np.arange(self._events) + 1, 2 * self._moved])
        return np.argsort(when)


def check_changes(rows: pa.Table, key: Sequence[str]) -> None:
    """Refuse changes that could not be applied; in tasks, since what is staged can only go forward."""
    if not is_changelog(rows.schema):
        if "_op" in rows.column_names:
            raise SchemaError(
                "changes have no `_position`, and without one their order is unknown",
                code="PEN-4002",
                hint="keep `_op` and `_position` in the route's SQL",
            )
        refuse_nulls(rows, key)
        return
    ops = rows.column("_op")
    odd = pc.unique(ops.filter(pc.invert(pc.is_in(ops, value_set=pa.array([op.value for op in Op], ops.type)))))
    if len(odd):
        raise DataError(f"a change has the `_op` {odd[0]}", hint=f"one of {', '.join(op.value for op in Op)}")
    if rows.column("_position").null_count:
        raise DataError("a change has no `_position`, and without one its place among the others is unknown")
    refuse_nulls(rows.filter(pc.not_equal(ops, Op.TRUNCATE.value)), key)
    if "_old_key" in rows.column_names and rows.column("_old_key").null_count < rows.num_rows:
        unpack_keys(rows.column("_old_key").drop_null(), pa.schema([rows.schema.field(name) for name in key]))


def refuse_nulls(rows: pa.Table, key: Sequence[str]) -> None:
    for name in key:
        if rows.column(name).null_count:
            raise DataError(f"a row has no value in the key column {name!r}", hint="set a `key` that every row has")


@dataclass
class Fates:
    """
    What becomes of changes that a query looks at one by one, for sinks that apply them by key.

    A change that does not come out has left the query's result, and so must its row: it becomes a delete. Reader and
    writer of a task meet in a file: every change is noted there before the query sees it.
    """

    key: Sequence[str]
    sinks: tuple[str, ...]
    """Those that apply changes by key; a log just does not hold what was filtered out."""
    computed_on: frozenset[str] = frozenset()
    """Columns whose value the query looks at, or hands on without `_unchanged`."""

    @property
    def _noted(self) -> list[str]:
        return [*self.key, "_op", "_position"]

    def columns(self, known: frozenset[str]) -> frozenset[str]:
        """What has to be read for it, beside what the query uses."""
        return known.intersection([*self._noted, "_old_key", "_unchanged"])

    @contextlib.contextmanager
    def noting(self, path: Path) -> Iterator[Callable[[pa.RecordBatch], None]]:
        """Gives what takes note of a batch of changes; the file is whole once the context ends."""
        with contextlib.ExitStack() as stack:
            writers: list[tuple[pa.RecordBatchStreamWriter, pa.Schema]] = []

            def note(rows: pa.RecordBatch) -> None:
                self._refuse_unknown_values(rows)
                has_old = "_old_key" in rows.schema.names
                old = rows.column("_old_key") if has_old else pa.nulls(rows.num_rows, pa.string())
                noted = rows.select(self._noted).append_column("_old_key", old)
                if not writers:
                    file = stack.enter_context(open(path, "wb"))
                    schema = _nullable(noted.schema)
                    writers.append((stack.enter_context(pa.ipc.new_stream(file, schema)), schema))
                writer, schema = writers[0]
                writer.write_batch(noted.cast(schema))

            yield note

    def came_out(self, rows: pa.RecordBatch) -> pa.Table:
        """What tells a change apart in the query's result."""
        return pa.Table.from_batches([rows.select([*self.key, "_position"])])

    def gone(self, path: Path, came_out: Sequence[pa.Table], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Deletes, with the columns of the result: for changes that did not come out, and for keys that rows have left."""
        try:
            with open(path, "rb") as file:
                noted = pa.ipc.open_stream(file).read_all()
        except FileNotFoundError:
            return  # nothing was read
        path.unlink()
        cleared = _where(noted.column("_op"), Op.TRUNCATE)
        yield from _as_deletes(noted.filter(pa.array(cleared)), Op.TRUNCATE, schema)
        noted = noted.filter(pa.array(~cleared))
        identity = noted.select([*self.key, "_position"])
        found = [table.cast(identity.schema) for table in (*came_out, identity.slice(0, 0))]
        left = Keys(identity).first_in(pa.concat_tables(found)) < 0
        yield from _as_deletes(noted.filter(pa.array(left)), Op.DELETE, schema)
        moved = noted if "_old_key" not in schema.names else noted.filter(pa.array(left))
        moved = moved.filter(moved.column("_old_key").is_valid())
        if moved.num_rows:
            old = unpack_keys(moved.column("_old_key"), pa.schema([noted.schema.field(name) for name in self.key]))
            yield from _as_deletes(old.append_column("_position", moved.column("_position")), Op.DELETE, schema)

    def _refuse_unknown_values(self, rows: pa.RecordBatch) -> None:
        """A value that was not sent, since it did not change, cannot be computed on."""
        if not self.computed_on or "_unchanged" not in rows.schema.names:
            return
        named = pc.unique(pc.list_flatten(rows.column("_unchanged")))
        used = self.computed_on.intersection(named.to_pylist())
        if used:
            raise SchemaError(
                f"a change leaves {', '.join(sorted(used))} as it was and does not say how, and the route's SQL uses it",
                code="PEN-4003",
                hint="ALTER TABLE … REPLICA IDENTITY FULL at the source; or hand the column on as it is, and `_unchanged`",
            )


def _as_deletes(changes: pa.Table, op: Op, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The keys and positions of `changes` as changes of another kind; nothing is said of the other columns."""
    count = changes.num_rows
    ops = pa.chunked_array([pa.array([op.value], pa.string()).take(pa.array(np.zeros(count, np.int64)))])
    said = {
        "_op": ops,
        **{name: changes.column(name) for name in changes.column_names if name not in ("_op", "_old_key")},
    }
    arrays = [said[each.name].cast(each.type) if each.name in said else pa.nulls(count, each.type) for each in schema]
    yield from pa.Table.from_arrays(arrays, schema=_nullable(schema)).to_batches()


def unpack_keys(texts: pa.ChunkedArray | pa.Array, schema: pa.Schema) -> pa.Table:
    """
    The key columns of `_old_key` texts: JSON objects by column name.

    What JSON does not have stands as text there: decimals, dates and times as Arrow prints them, bytes as hex digits.
    """
    try:
        rows = [json.loads(text, parse_float=Decimal) for text in texts.to_pylist()]
        columns = [_typed([row[each.name] for row in rows], each.type) for each in schema]
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"an `_old_key` cannot be read: {error!r}", hint="a JSON object with every key column"
        ) from error
    table = pa.Table.from_arrays(columns, names=schema.names)
    refuse_nulls(table, schema.names)
    return table


def _typed(values: list[Any], kind: pa.DataType) -> pa.Array:
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.array([bytes.fromhex(value.removeprefix("\\x")) for value in values], kind)
    if types.is_string(kind) or types.is_large_string(kind):
        return pa.array(values, kind)
    return pc.cast(pa.array([None if value is None else str(value) for value in values], pa.string()), kind)


def _union(tables: Sequence[pa.Table], columns: pa.Schema | None) -> tuple[pa.Table, dict[str, Mask]]:
    """All rows, and per column those that do not say anything about it."""
    logs = {is_changelog(table.schema) for table in tables}
    if len(logs) > 1:
        raise SchemaError(
            "some rows of an epoch are changes and others are not: their order cannot be told",
            code="PEN-4002",
            hint="route them to topics of their own",
        )
    empty = [] if columns is None else [columns.remove_metadata().empty_table()]
    schema = pa.unify_schemas([_nullable(table.schema) for table in (*tables, *empty)], promote_options="default")
    parts = [table.cast(_nullable(table.schema)) for table in tables]
    whole = pa.concat_tables([*parts, schema.empty_table()], promote_options="default").select(schema.names)
    unchanged: dict[str, Mask] = {}
    first = 0
    for table in tables:
        for name in schema.names:
            if name not in table.column_names:
                unchanged.setdefault(name, np.zeros(whole.num_rows, bool))[first : first + table.num_rows] = True
        first += table.num_rows
    if is_changelog(whole.schema) and "_unchanged" in whole.column_names:
        lists = _whole(whole.column("_unchanged"))
        if lists.null_count < len(lists):
            parents, named = _ints(pc.list_parent_indices(lists)), _encoded(pc.list_flatten(lists))
            for code, name in enumerate(named.dictionary.to_pylist()):
                mask = unchanged.setdefault(name, np.zeros(whole.num_rows, bool))
                mask[parents[_ints(named.indices) == code]] = True
    return whole, unchanged


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([each.with_nullable(True).remove_metadata() for each in schema])


def _order(table: pa.Table) -> Ints:
    if not is_changelog(table.schema) or table.num_rows < 2:
        return np.arange(table.num_rows)
    positions = _whole(table.column("_position"))
    if pc.all(pc.greater_equal(positions[1:], positions[:-1])).as_py():
        return np.arange(table.num_rows)
    return _ints(pc.sort_indices(positions))  # stable


def _moves(table: pa.Table, order: Ints, gone: Mask, key: pa.Schema) -> tuple[Ints, pa.Table]:
    """The events that name an old key, and those keys."""
    if "_old_key" not in table.column_names or not is_changelog(table.schema):
        return np.empty(0, np.int64), key.empty_table()
    texts = table.column("_old_key")
    if texts.null_count == len(texts):
        return np.empty(0, np.int64), key.empty_table()
    moved = np.flatnonzero(_bools(texts.is_valid())[order] & ~gone)
    old = unpack_keys(texts.take(pa.array(order[moved])), key)
    return moved, old.cast(key)


def _codes(keys: pa.Table) -> tuple[Ints, int]:
    """A number per distinct key, and how many there are."""
    codes: Ints = np.zeros(keys.num_rows, np.int64)
    count = 1
    for position, name in enumerate(keys.column_names):
        encoded = _encoded(keys.column(name))
        if position:
            both = codes * max(len(encoded.dictionary), 1) + _ints(encoded.indices)
            encoded = pa.array(both).dictionary_encode()
        codes, count = _ints(encoded.indices), len(encoded.dictionary)
    return codes, count


def _encoded(column: pa.ChunkedArray | pa.Array) -> Any:
    return _whole(column).dictionary_encode()


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string_view(column.type) or types.is_binary_view(column.type):
        column = column.cast(pa.string() if types.is_string_view(column.type) else pa.binary())
    return column


def _lookup(values: pa.Array, among: pa.Array) -> Ints:
    return _ints(pc.fill_null(pc.index_in(values, value_set=among), -1))


def _where(ops: pa.ChunkedArray, op: Op) -> Mask:
    return _bools(pc.equal(ops, op.value))


def _ints(values: Any) -> Ints:
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def _bools(values: Any) -> Mask:
    return np.asarray(values.to_numpy()).astype(bool, copy=False)
