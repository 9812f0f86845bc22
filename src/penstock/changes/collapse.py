"""What the changes of an epoch come to: one row or one delete for every key that they touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.columns import Op, is_changelog, nullable, own_columns, refuse_nulls
from penstock.changes.keys import Equality, Ints, Keys, Mask, bools, codes_of, ints, plain
from penstock.changes.old_key import unpack_keys
from penstock.errors import SchemaError


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
    picked: Callable[[int, int], Iterator[pa.Table]] | None = None
    """Of changes too many to be held, of which `upserts` has the keys alone: gives the rows from one place to another."""
    equality: Equality = field(default_factory=Equality)
    """When two keys are the same; for sets of keys that these are looked up in."""

    def keys(self) -> pa.Table:
        """Every key that the epoch touches, once; those of `upserts` first."""
        return pa.concat_tables([self.upserts.select(self.key), self.deletes])

    def rows(self, stored: pa.Table | None) -> Callable[[int, int], Iterator[pa.Table]]:
        """
        Gives the rows to write, from one place to another, some at a time.

        Kept values are taken from `stored`: the target's rows of the keys in `origins`, as it was before.
        """
        picked = self.picked or (lambda begin, end: iter([self.upserts.slice(begin, end - begin)]))
        if not self.kept or self.origins is None or stored is None or not stored.num_rows:
            return picked
        owners = self.origins.column("_row").to_numpy()
        found = Keys(stored.select(self.key), self.equality).find(self.origins.select(self.key))
        owners, best = np.unique(owners[found >= 0], return_index=True)
        source: Ints = np.full(self.upserts.num_rows, -1, np.int64)
        source[owners] = found[found >= 0][best]

        def filled(begin: int, end: int) -> Iterator[pa.Table]:
            for rows in picked(begin, end):
                here = slice(begin, begin := begin + rows.num_rows)
                for name in set(self.kept).intersection(stored.column_names):
                    places = np.where(self.kept[name][here], source[here], -1)
                    rows = replaced(rows, name, np.flatnonzero(places >= 0), stored.column(name), places[places >= 0])
                yield rows

        return filled


def collapse(
    changes: pa.Table | Sequence[pa.Table],
    key: Sequence[str],
    columns: pa.Schema | None = None,
    equality: Equality | None = None,
) -> Collapsed:
    """
    The last state of every key that an epoch's changes touch, in the order of `_position`, else as the rows come.

    A column that an event lists in `_unchanged`, or does not know (one of `columns`, or of another table's), keeps the
    value of the row's earlier image: of the epoch, else of the target. A moved row has the image of its old key.
    """
    tables = [changes] if isinstance(changes, pa.Table) else changes
    equality = equality or Equality.of([table.schema for table in tables], key)
    table, unchanged = _union(tables, columns)
    is_log = is_changelog(table.schema)
    order = _order(table)
    truncated = False
    if is_log:
        truncates = np.flatnonzero(has_op(table.column("_op"), Op.TRUNCATE)[order])
        truncated = bool(len(truncates))
        order = order[truncates[-1] + 1 :] if truncated else order
    events = table.select(list(key)).take(pa.array(order))
    refuse_nulls(events, key)
    gone = has_op(table.column("_op"), Op.DELETE)[order] if is_log else np.zeros(len(order), bool)
    moved, old = moves_in(table, order, gone, events.schema)
    codes, count = codes_of(equality.canonical(pa.concat_tables([events, old])))
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
        return Collapsed(tuple(key), truncated, upserts, deletes, equality=equality)
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
        return Collapsed(tuple(key), truncated, upserts, deletes, equality=equality)
    wanted = np.logical_or.reduce(list(kept.values()))
    origins = origins.filter(pa.array(wanted[owners]))
    return Collapsed(tuple(key), truncated, upserts, deletes, kept, origins, equality=equality)


def replaced(rows: pa.Table, name: str, places: Ints, column: pa.ChunkedArray, indices: Ints) -> pa.Table:
    """The rows with values of `column` in some places."""
    if not len(places):
        return rows
    index = np.arange(rows.num_rows)
    index[places] = rows.num_rows + np.arange(len(places))
    both = pa.chunked_array([*rows.column(name).chunks, *_gathered(column, indices).chunks])
    position = rows.column_names.index(name)
    return rows.set_column(
        position, rows.schema.field(position).with_nullable(True), both.combine_chunks().take(pa.array(index))
    )


def _gathered(column: pa.ChunkedArray, indices: Ints) -> pa.ChunkedArray:
    """As `take`, which would make one array of all chunks first."""
    order = np.argsort(indices, kind="stable")
    wanted = indices[order]
    edges = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    found = np.searchsorted(wanted, edges)
    pieces = [
        chunk.take(pa.array(wanted[begin:end] - first))
        for chunk, first, begin, end in zip(column.chunks, edges, found, found[1:], strict=False)
        if end > begin
    ]
    return pa.chunked_array([pa.concat_arrays(pieces).take(pa.array(np.argsort(order)))])


class _Log:
    """
    Events in their order, and after them, for each that moved a row, its leaving of the old key.

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


def _union(tables: Sequence[pa.Table], columns: pa.Schema | None) -> tuple[pa.Table, dict[str, Mask]]:
    """All rows, and per column those that do not say anything about it."""
    logs = {is_changelog(table.schema) for table in tables}
    if len(logs) > 1:
        raise SchemaError(
            "some rows of an epoch are changes and others are not: their order is unknown",
            code="PEN-4002",
            hint="route them to topics of their own",
        )
    empty = [] if columns is None else [columns.remove_metadata().empty_table()]
    schema = pa.unify_schemas([nullable(table.schema) for table in (*tables, *empty)], promote_options="default")
    parts = [table.cast(nullable(table.schema)) for table in tables]
    whole = pa.concat_tables([*parts, schema.empty_table()], promote_options="default").select(schema.names)
    unchanged: dict[str, Mask] = {}
    first = 0
    for table in tables:
        for name in schema.names:
            if name not in table.column_names:
                unchanged.setdefault(name, np.zeros(whole.num_rows, bool))[first : first + table.num_rows] = True
        first += table.num_rows
    if is_changelog(whole.schema) and "_unchanged" in whole.column_names:
        lists = plain(whole.column("_unchanged"))
        if lists.null_count < len(lists):
            parents, named = ints(pc.list_parent_indices(lists)), pc.list_flatten(lists).dictionary_encode()
            for code, name in enumerate(named.dictionary.to_pylist()):
                mask = unchanged.setdefault(name, np.zeros(whole.num_rows, bool))
                mask[parents[ints(named.indices) == code]] = True
    return whole, unchanged


def _order(table: pa.Table) -> Ints:
    if not is_changelog(table.schema) or table.num_rows < 2:
        return np.arange(table.num_rows)
    positions = table.column("_position")
    return np.arange(table.num_rows) if is_sorted(positions) else ints(pc.sort_indices(plain(positions)))  # stable


def is_sorted(values: pa.ChunkedArray) -> bool:
    return len(values) < 2 or bool(pc.all(pc.greater_equal(values[1:], values[:-1])).as_py())


def moves_in(table: pa.Table, order: Ints, gone: Mask, key: pa.Schema) -> tuple[Ints, pa.Table]:
    """The events that name an old key, and those keys."""
    if "_old_key" not in table.column_names or "_op" not in table.column_names:
        return np.empty(0, np.int64), key.empty_table()
    texts = table.column("_old_key")
    if texts.null_count == len(texts):
        return np.empty(0, np.int64), key.empty_table()
    moved = np.flatnonzero(bools(texts.is_valid())[order] & ~gone)
    old = unpack_keys(texts.take(pa.array(order[moved])), key)
    return moved, old.cast(key)


def has_op(ops: pa.ChunkedArray, op: Op) -> Mask:
    """Which changes are of this kind."""
    return bools(pc.equal(ops, op.value))
