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
Words: TypeAlias = npt.NDArray[np.uint64]


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

_A_DAY = {"D": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_YEAR_0, _YEAR_10000 = -719_528, 2_932_897
"""Their first days; Arrow reads what is between."""

_NAMES = {each.name for each in CHANGE_FIELDS}

HELD_ROWS = 1 << 18
"""Changes of an epoch that are held as whole rows; of more, some columns alone."""

BUCKET_ROWS = 1 << 19
"""About how many changes are collapsed at once if not all rows are held."""

MAX_BUCKETS = 64
"""Each of them looks at every change, if only for a few nanoseconds."""

_NUMBER = "\0number"
"""Column for the place of a change among all of an epoch: a name that no column can have."""


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
    picked: Callable[[int, int], Iterator[pa.Table]] | None = None
    """Of changes too many to be held, of which `upserts` has the keys alone: gives the rows from one place to another."""

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
        found = Keys(stored.select(self.key)).find(self.origins.select(self.key))
        owners, best = np.unique(owners[found >= 0], return_index=True)
        source: Ints = np.full(self.upserts.num_rows, -1, np.int64)
        source[owners] = found[found >= 0][best]

        def filled(begin: int, end: int) -> Iterator[pa.Table]:
            for rows in picked(begin, end):
                here = slice(begin, begin := begin + rows.num_rows)
                for name in set(self.kept).intersection(stored.column_names):
                    places = np.where(self.kept[name][here], source[here], -1)
                    rows = _replaced(rows, name, np.flatnonzero(places >= 0), stored.column(name), places[places >= 0])
                yield rows

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
    def sizes(self) -> Sequence[int]:
        """How many rows each piece has."""

    def read(self, columns: Sequence[str], pieces: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """The pieces with these numbers, or all."""


def collapse_parts(parts: Sequence[Part], key: Sequence[str], columns: pa.Schema) -> Collapsed:
    """
    As `collapse`; of many changes only keys, ops and numbers are held, and the rows that are left are read when wanted.

    Of values that a later change of the epoch leaves as they are, those that it needs are held as well.
    """
    says_all = all(set(columns.names) <= set(part.schema.names) for part in parts)
    logs = {is_changelog(part.schema) for part in parts}
    count = sum(sum(part.sizes) for part in parts)
    if not says_all or len(logs) > 1 or count <= HELD_ROWS:
        return collapse([pa.concat_tables(part.read(part.schema.names)) for part in parts], key, columns)
    unchanged, moves = _said(parts)
    traced = [name for name in columns.names if name in unchanged and name not in key]
    # Values of a row that has moved stand under another key.
    several = 1 if traced and moves else min(-(-count // BUCKET_ROWS), MAX_BUCKETS)
    buckets = _buckets(parts, key, several, bool(traced))
    found = []
    while buckets:
        bucket = pa.concat_tables(buckets.pop())
        if logs == {True} and "_position" not in bucket.column_names:
            bucket = bucket.append_column("_position", bucket.column(_NUMBER))
        for name in traced:  # instead of a value, which change has it
            bucket = bucket.append_column(name, bucket.column(_NUMBER))
        found.append(collapse(bucket, key))
    return _joined(found, parts, columns.names, traced)


def _said(parts: Sequence[Part]) -> tuple[set[str], bool]:
    """The columns that changes leave as they are, and whether rows move."""
    unchanged: set[str] = set()
    moves = False
    for part in parts if is_changelog(parts[0].schema) else ():
        said = [name for name in ("_unchanged", "_old_key") if name in part.schema.names]
        for piece in part.read(said) if said else ():
            if "_unchanged" in said and piece.column("_unchanged").null_count < piece.num_rows:
                unchanged.update(pc.unique(pc.list_flatten(piece.column("_unchanged"))).to_pylist())
            moves |= "_old_key" in said and piece.column("_old_key").null_count < piece.num_rows
    return unchanged, moves


def _joined(
    found: Sequence[Collapsed], parts: Sequence[Part], columns: Sequence[str], traced: Sequence[str]
) -> Collapsed:
    """Several that have no key in common, and numbers for values, as one; its rows are read in the order of the changes."""
    key = found[0].key
    upserts = pa.concat_tables(each.upserts.select(list(key)) for each in found)
    deletes = pa.concat_tables(each.deletes for each in found)
    numbers = np.concatenate([each.upserts.column(_NUMBER).to_numpy() for each in found]) >> 1
    result = Collapsed(key, any(each.truncated for each in found), upserts, deletes)
    if not traced:
        numbers.sort()
        return replace(result, picked=partial(_picked, parts, columns, numbers))
    order = np.argsort(numbers)
    place, numbers = np.argsort(order), numbers[order]
    edges = np.cumsum([0, *(each.upserts.num_rows for each in found)])
    kept, carried, origins = {}, {}, []
    for name in traced:
        source = [_ints(pc.fill_null(each.upserts.column(name), -1)) >> 1 for each in found]
        carried[name] = _carried(parts, name, numbers, np.concatenate(source)[order])
        masks = [each.kept.get(name, np.zeros(each.upserts.num_rows, bool)) for each in found]
        if any(mask.any() for mask in masks):
            kept[name] = np.concatenate(masks)[order]
    for each, first in zip(found, edges, strict=False):
        if each.origins is not None:
            rows = place[each.origins.column("_row").to_numpy() + first]
            origins.append(each.origins.select(list(key)).append_column("_row", pa.array(rows)))

    def picked(begin: int, end: int) -> Iterator[pa.Table]:
        for rows in _picked(parts, columns, numbers, begin, end):
            here = slice(begin, begin := begin + rows.num_rows)
            for each in carried.values():
                rows = each.put(rows, here)
            yield rows

    return replace(
        result,
        upserts=upserts.take(pa.array(order)),
        kept=kept,
        origins=pa.concat_tables(origins) if origins else None,
        picked=picked,
    )


@dataclass(frozen=True)
class _Carried:
    """The values of a column that later changes of the epoch leave as they are."""

    name: str
    source: Ints
    """For each row that is left the number of the change that has its value; -1 for none."""
    is_own: Mask
    numbers: Ints
    values: pa.ChunkedArray | None

    def put(self, rows: pa.Table, here: slice) -> pa.Table:
        source, is_own = self.source[here], self.is_own[here]
        if (source < 0).any():
            values = rows.column(self.name).take(pa.array(np.arange(rows.num_rows), mask=source < 0))
            position = rows.column_names.index(self.name)
            rows = rows.set_column(position, rows.schema.field(position).with_nullable(True), values)
        if self.values is None:
            return rows
        others = np.flatnonzero((source >= 0) & ~is_own)
        return _replaced(rows, self.name, others, self.values, np.searchsorted(self.numbers, source[others]))


def _carried(parts: Sequence[Part], name: str, numbers: Ints, source: Ints) -> _Carried:
    is_own = source == numbers
    others = np.unique(source[(source >= 0) & ~is_own])
    values = pa.concat_tables(_picked(parts, [name], others, 0, len(others))).column(name) if len(others) else None
    return _Carried(name, source, is_own, others, values)


def _replaced(rows: pa.Table, name: str, places: Ints, column: pa.ChunkedArray, indices: Ints) -> pa.Table:
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


def _are_in_order(parts: Sequence[Part]) -> bool:
    last = None
    for part in parts:
        for piece in part.read(["_position"]) if is_changelog(part.schema) else ():
            positions = piece.column("_position")
            if len(positions) and ((last is not None and positions[0].as_py() < last) or not _is_sorted(positions)):
                return False
            last = positions[-1].as_py() if len(positions) else last
    return True


def _buckets(parts: Sequence[Part], key: Sequence[str], count: int, traces: bool) -> list[list[pa.Table]]:
    """
    What tells the last change of every key, in lists of pieces: all of one key in one list, and in their order.

    A row that leaves its old key is deleted there, unless its values are to be traced; a truncate stands in every list.
    Numbers leave room for it: the change with the number n has 2n + 1. Positions are there only if rows have another order.
    """
    buckets: list[list[pa.Table]] = [[] for _ in range(count)]
    described = ["_op", "_old_key"]
    described += [] if _are_in_order(parts) else ["_position"]
    described += ["_unchanged"] if traces else []
    first = 0
    for part in parts:
        is_log = is_changelog(part.schema)
        said = [name for name in described if is_log and name in part.schema.names]
        for piece in part.read([*key, *said]):
            number = 2 * np.arange(first, first + piece.num_rows) + 1
            first += piece.num_rows
            events = piece.append_column(_NUMBER, pa.array(number))
            events = events.cast(_nullable(events.schema))
            events = _with_leavings(events, key) if "_old_key" in said and not traces else events
            bucket = _mixed(_hashes(events.select(list(key)))) % np.uint64(count)
            truncates = _where(events.column("_op"), Op.TRUNCATE) if is_log else np.zeros(len(bucket), bool)
            for place, pieces in enumerate(buckets):
                pieces.append(events.filter(pa.array((bucket == place) | truncates)))
    return buckets


def _with_leavings(events: pa.Table, key: Sequence[str]) -> pa.Table:
    """Instead of `_old_key`, deletes just before the events that moved a row."""
    gone = _where(events.column("_op"), Op.DELETE)
    moved, old = _moves(events, np.arange(events.num_rows), gone, events.select(list(key)).schema)
    events = events.drop_columns("_old_key")
    if not len(moved):
        return events
    left = events.take(pa.array(moved))
    said = {name: old.column(name) for name in key}
    said["_op"] = pa.repeat(Op.DELETE.value, len(moved))
    said[_NUMBER] = pa.array(left.column(_NUMBER).to_numpy() - 1)
    both = pa.concat_tables([events, pa.table({name: said.get(name, left.column(name)) for name in left.column_names})])
    return both.take(pa.array(np.argsort(both.column(_NUMBER).to_numpy())))


def _picked(parts: Sequence[Part], columns: Sequence[str], numbers: Ints, begin: int, end: int) -> Iterator[pa.Table]:
    """The rows with the numbers from `begin` to `end` of those given; pieces without one are not read."""
    wanted, first = numbers[begin:end], 0
    for part in parts:
        edges = first + np.concatenate([[0], np.cumsum(part.sizes, dtype=np.int64)])
        found = np.searchsorted(wanted, edges)
        pieces = np.flatnonzero(found[1:] > found[:-1])
        for place, rows in zip(pieces, part.read(columns, pieces.tolist()), strict=True):
            yield rows.take(pa.array(wanted[found[place] : found[place + 1]] - edges[place]))
        first = edges[-1]


class Keys:
    """A set of keys in which others are looked up, many at a time."""

    def __init__(self, keys: pa.Table) -> None:
        self._keys = keys
        hashes = _hashes(keys)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def find(self, rows: pa.Table) -> Ints:
        """For each row the first position of its key in the set; -1 if it is not in it."""
        rows = rows.select(self._keys.column_names)
        found: Ints = np.full(rows.num_rows, -1, np.int64)
        left = self._likely(rows)
        hashes = _hashes(rows.take(pa.array(left)) if len(left) < rows.num_rows else rows)
        at = np.searchsorted(self._hashes, hashes)
        while len(left):  # seldom more than once: other keys with the same hash stand side by side
            there = np.flatnonzero(at < len(self._hashes))
            there = there[self._hashes[at[there]] == hashes[there]]
            left, hashes, at = left[there], hashes[there], at[there]
            place = self._order[at]
            same = _same(self._keys.take(pa.array(place)), rows.take(pa.array(left)))
            found[left[same]] = place[same]
            left, hashes, at = left[~same], hashes[~same], at[~same] + 1
        return found

    def _likely(self, rows: pa.Table) -> Ints:
        """Rows that may be in the set; among few keys Arrow finds them sooner than they are hashed here."""
        if 8 * self._keys.num_rows > rows.num_rows:
            return np.arange(rows.num_rows)
        columns = zip(rows.columns, self._keys.columns, strict=True)
        masks = [_bools(pc.is_in(_whole(column), value_set=_whole(among))) for column, among in columns]
        return np.flatnonzero(np.logical_and.reduce(masks))


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
    for name in key:
        if types.is_nested(kind := rows.schema.field(name).type) or types.is_null(kind):
            raise SchemaError(
                f"the key column {name!r} is {kind}, by which rows cannot be told apart",
                code="PEN-4002",
                hint="set `key` in the sink to other columns; or bring it as text: `text_columns` in the source, or SQL",
            )
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
        left = Keys(pa.concat_tables(found)).find(identity) < 0
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

    What JSON does not have stands as text there: decimals, dates and times as Arrow prints them, bytes as hex digits;
    the largest date or timestamp of a type, and its negative, as `infinity` and `-infinity`, years below 0 (which is
    1 BC) with a sign, and those above 9999 with all of their digits.
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
    texts = pa.array([None if value is None else str(value) for value in values], pa.string())
    return parse_moments(texts, kind) if types.is_date(kind) or types.is_timestamp(kind) else pc.cast(texts, kind)


def moment_texts(values: pa.Array) -> pa.Array:
    """Dates or timestamps as they stand in `_old_key`; Arrow knows no infinities, and not every year that it can hold."""
    texts = values.cast(pa.string())
    unit, storage = _moment(values.type)
    raw = pc.fill_null(values.view(storage), 0).to_numpy(zero_copy_only=False)
    days = raw // _A_DAY[unit]
    odd = np.flatnonzero((days < _YEAR_0) | (days >= _YEAR_10000))
    if not len(odd):
        return texts
    known = texts.to_pylist()
    end = np.iinfo(raw.dtype).max
    for row, far in zip(odd.tolist(), raw[odd].astype(np.int64).view(f"M8[{unit}]"), strict=True):
        if abs(int(raw[row])) == end:
            known[row] = "infinity" if raw[row] > 0 else "-infinity"
            continue
        text = str(far).replace("T", " ")
        sign, text = text[: text[0] == "-"], text.removeprefix("-")
        zone = "Z" if types.is_timestamp(values.type) and values.type.tz else ""
        known[row] = f"{sign}{text.partition('-')[0]:0>4}-{text.partition('-')[2]}{zone}"
    return pa.array(known, pa.string())


def parse_moments(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """What `moment_texts` printed, of a type with or without a time zone."""
    try:
        return pc.cast(texts, kind)
    except pa.ArrowInvalid:
        pass
    unit, storage = _moment(kind)
    end = int(np.iinfo(storage.to_pandas_dtype()).max)
    ends = {"infinity": end, "-infinity": -end, None: None}
    known = texts.to_pylist()
    plain = np.array(["0000-01-01" if text in ends else text.removesuffix("Z") for text in known], f"M8[{unit}]")
    found = [ends.get(text, number) for text, number in zip(known, plain.view(np.int64).tolist(), strict=True)]
    return pa.array(found, storage).view(kind)


def _moment(kind: pa.DataType) -> tuple[str, pa.DataType]:
    """numpy's unit of a date or timestamp, and the type of the number behind it."""
    if types.is_timestamp(kind):
        return kind.unit, pa.int64()
    return ("D", pa.int32()) if types.is_date32(kind) else ("ms", pa.int64())


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
            parents, named = _ints(pc.list_parent_indices(lists)), pc.list_flatten(lists).dictionary_encode()
            for code, name in enumerate(named.dictionary.to_pylist()):
                mask = unchanged.setdefault(name, np.zeros(whole.num_rows, bool))
                mask[parents[_ints(named.indices) == code]] = True
    return whole, unchanged


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([each.with_nullable(True).remove_metadata() for each in schema])


def _order(table: pa.Table) -> Ints:
    if not is_changelog(table.schema) or table.num_rows < 2:
        return np.arange(table.num_rows)
    positions = table.column("_position")
    return np.arange(table.num_rows) if _is_sorted(positions) else _ints(pc.sort_indices(_whole(positions)))  # stable


def _is_sorted(values: pa.ChunkedArray) -> bool:
    return len(values) < 2 or bool(pc.all(pc.greater_equal(values[1:], values[:-1])).as_py())


def _moves(table: pa.Table, order: Ints, gone: Mask, key: pa.Schema) -> tuple[Ints, pa.Table]:
    """The events that name an old key, and those keys."""
    if "_old_key" not in table.column_names or "_op" not in table.column_names:
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
        new, count_of_new = _codes_of(_whole(keys.column(name)))
        codes, count = _distinct(codes * count_of_new + new) if position else (new, count_of_new)
    return codes, count


def _codes_of(values: pa.Array) -> tuple[Ints, int]:
    if _is_word(values.type):
        return _distinct(_words(values).view(np.int64))
    encoded = values.dictionary_encode()
    return _ints(encoded.indices), max(len(encoded.dictionary), 1)


def _distinct(values: Ints) -> tuple[Ints, int]:
    # Sorted, not hashed: numbers that follow one another have slots side by side in Arrow's table, and take it ten times as long.
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64, copy=False), max(len(distinct), 1)


def _hashes(keys: pa.Table) -> Words:
    """A number per key, and seldom that of another; of a single number itself, so that neighbours stay side by side."""
    hashes: Words = np.zeros(keys.num_rows, np.uint64)
    for position, column in enumerate(keys.columns):
        pieces = [_words(_whole(piece)) for piece in column.chunks]
        words = np.concatenate([*pieces, np.empty(0, np.uint64)])
        hashes = _mixed(hashes) ^ words if position else words
    return hashes


def _mixed(words: Words) -> Words:
    mixed = words * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32))


def _is_word(kind: pa.DataType) -> bool:
    return bool(types.is_primitive(kind)) and kind.bit_width <= 64


def _words(values: pa.Array) -> Words:
    """A number per value; of numbers, times and truths the value, of others a hash; of nulls anything."""
    kind = values.type
    if not len(values):
        return np.empty(0, np.uint64)
    if types.is_boolean(kind):
        values, kind = values.cast(pa.uint8()), pa.uint8()
    if _is_word(kind):
        width = kind.bit_width // 8
        data = np.frombuffer(values.buffers()[1], f"i{width}")
        return data[values.offset : values.offset + len(values)].astype(np.int64).view(np.uint64)
    if not (types.is_large_string(kind) or types.is_large_binary(kind)):
        values = values.cast(pa.string() if types.is_decimal(kind) else pa.binary())
    wide = types.is_large_binary(values.type) or types.is_large_string(values.type)
    edges = np.frombuffer(values.buffers()[1], np.int64 if wide else np.int32)
    edges = edges[values.offset : values.offset + len(values) + 1].astype(np.int64)
    text = bytes(memoryview(values.buffers()[2] or b"")[edges[0] : edges[-1]]) + bytes(8)
    eight: Words = np.ndarray(len(text) - 7, np.uint64, text, strides=(1,))  # those that begin at each byte
    begin, length, left = edges[:-1] - edges[0], np.diff(edges), np.arange(len(values))
    hashes = length.astype(np.uint64)
    while len(left):
        used = np.minimum(length, 8).astype(np.uint64) * np.uint64(8)
        word = np.where(used == 64, eight[begin], eight[begin] & ((np.uint64(1) << used) - np.uint64(1)))
        hashes[left] = _mixed(hashes[left] ^ word)
        more = length > 8
        begin, length, left = begin[more] + 8, length[more] - 8, left[more]
    return hashes


def _same(one: pa.Table, other: pa.Table) -> Mask:
    """Which rows are the same in both."""
    same = np.ones(one.num_rows, bool)
    for left, right in zip(one.columns, other.columns, strict=True):
        left, right = _whole(left), _whole(right)
        if types.is_floating(left.type):
            same &= _words(left) == _words(right)  # bit by bit, as NaN is a key as well
            same &= _bools(right.is_valid())
        else:
            same &= _bools(pc.fill_null(pc.equal(left, right), False))
    return same


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string_view(column.type) or types.is_binary_view(column.type):
        column = column.cast(pa.string() if types.is_string_view(column.type) else pa.binary())
    return column


def _where(ops: pa.ChunkedArray, op: Op) -> Mask:
    return _bools(pc.equal(ops, op.value))


def _ints(values: Any) -> Ints:
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def _bools(values: Any) -> Mask:
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(bool, copy=False)
