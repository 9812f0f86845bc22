"""The collapse of changes that are too many to be held: keys, ops and numbers in memory, rows only when they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.collapse import Collapsed, collapse, has_op, is_sorted, moves_in, replaced
from penstock.changes.columns import Op, is_changelog, nullable
from penstock.changes.hashing import mix
from penstock.changes.keys import Equality, Ints, Mask, hashes_of, ints

HELD_ROWS = 1 << 18
"""Changes of an epoch that are held as whole rows; of more, only some columns are."""

BUCKET_ROWS = 1 << 19
"""About how many changes are collapsed at once if not all rows are held."""

MAX_BUCKETS = 64
"""Every bucket scans all changes once, so more than 64 costs more than it saves."""

_NUMBER = "\0number"
"""Column for the place of a change among all of an epoch: a name that no column can have."""


class Part(Protocol):
    """Changes that are stored and can be read more than once, always in the same pieces."""

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def sizes(self) -> Sequence[int]:
        """How many rows each piece has."""

    def read(self, columns: Sequence[str], pieces: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """The pieces with these numbers, or all."""


def collapse_parts(
    parts: Sequence[Part], key: Sequence[str], columns: pa.Schema, share: tuple[int, int] = (0, 1)
) -> Collapsed:
    """
    As `collapse`; of many changes only keys, ops and numbers are held, and the rows that are left are read when wanted.

    Of values that a later change of the epoch leaves as they are, those that it needs are held as well. `share` (2, 5)
    is the third of five shares of the keys: only so many shares are possible as `shares` says.
    """
    logs = {is_changelog(part.schema) for part in parts}
    count = sum(sum(part.sizes) for part in parts)
    if share[1] == 1 and (not _say_all(parts, columns) or len(logs) > 1 or count <= HELD_ROWS):
        return collapse([pa.concat_tables(part.read(part.schema.names)) for part in parts], key, columns)
    unchanged, moves = _said(parts)
    traced = [name for name in columns.names if name in unchanged and name not in key]
    # Values of a row that has moved are under another key.
    several = 1 if traced and moves else min(-(-count // (BUCKET_ROWS * share[1])), MAX_BUCKETS)
    equality = Equality.of([part.schema for part in parts], key)
    buckets = _buckets(parts, key, several, bool(traced), equality, share)
    found = []
    while buckets:
        bucket = pa.concat_tables(buckets.pop())
        if logs == {True} and "_position" not in bucket.column_names:
            bucket = bucket.append_column("_position", bucket.column(_NUMBER))
        for name in traced:  # instead of a value, which change has it
            bucket = bucket.append_column(name, bucket.column(_NUMBER))
        found.append(collapse(bucket, key, equality=equality))
    return _joined(found, parts, columns.names, traced)


def shares(parts: Sequence[Part], key: Sequence[str], columns: pa.Schema, most: int) -> int:
    """How many processes can collapse a share of the keys each; 0 if changes leave values out, so that only one can."""
    if not _say_all(parts, columns) or len({is_changelog(part.schema) for part in parts}) > 1:
        return 0
    unchanged, _ = _said(parts)
    if unchanged.intersection(columns.names).difference(key):
        return 0
    return max(1, min(most, -(-sum(sum(part.sizes) for part in parts) // BUCKET_ROWS)))


def _say_all(parts: Sequence[Part], columns: pa.Schema) -> bool:
    return all(set(columns.names) <= set(part.schema.names) for part in parts)


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
    result = Collapsed(key, any(each.truncated for each in found), upserts, deletes, equality=found[0].equality)
    if not traced:
        numbers.sort()
        return replace(result, picked=partial(_picked, parts, columns, numbers))
    order = np.argsort(numbers)
    place, numbers = np.argsort(order), numbers[order]
    edges = np.cumsum([0, *(each.upserts.num_rows for each in found)])
    kept, carried, origins = {}, {}, []
    for name in traced:
        source = [ints(pc.fill_null(each.upserts.column(name), -1)) >> 1 for each in found]
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
        return replaced(rows, self.name, others, self.values, np.searchsorted(self.numbers, source[others]))


def _carried(parts: Sequence[Part], name: str, numbers: Ints, source: Ints) -> _Carried:
    is_own = source == numbers
    others = np.unique(source[(source >= 0) & ~is_own])
    values = pa.concat_tables(_picked(parts, [name], others, 0, len(others))).column(name) if len(others) else None
    return _Carried(name, source, is_own, others, values)


def _are_in_order(parts: Sequence[Part]) -> bool:
    last = None
    for part in parts:
        for piece in part.read(["_position"]) if is_changelog(part.schema) else ():
            positions = piece.column("_position")
            if len(positions) and ((last is not None and positions[0].as_py() < last) or not is_sorted(positions)):
                return False
            last = positions[-1].as_py() if len(positions) else last
    return True


def _buckets(
    parts: Sequence[Part], key: Sequence[str], count: int, traces: bool, equality: Equality, share: tuple[int, int]
) -> list[list[pa.Table]]:
    """
    What tells the last change of every key, in lists of pieces: all of one key in one list, and in their order.

    A row that leaves its old key is deleted there, unless its values are to be traced; a truncate is in every list.
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
            events = events.cast(nullable(events.schema))
            events = _with_leavings(events, key) if "_old_key" in said and not traces else events
            bucket = mix(hashes_of(equality.canonical(events.select(list(key))))) % np.uint64(count * share[1])
            truncates = has_op(events.column("_op"), Op.TRUNCATE) if is_log else np.zeros(len(bucket), bool)
            for place, pieces in enumerate(buckets):
                pieces.append(events.filter(pa.array((bucket == place * share[1] + share[0]) | truncates)))
    return buckets


def _with_leavings(events: pa.Table, key: Sequence[str]) -> pa.Table:
    """Instead of `_old_key`, deletes just before the events that moved a row."""
    gone = has_op(events.column("_op"), Op.DELETE)
    moved, old = moves_in(events, np.arange(events.num_rows), gone, events.select(list(key)).schema)
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
