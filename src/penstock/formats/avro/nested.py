"""Values that hold others: records, arrays and maps, unions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from penstock.formats.avro import scan as at_scan
from penstock.formats.avro.leaves import NOTHING, Float, Node
from penstock.formats.avro.scan import BadRow, Cursors, Mask, Reader, Scan
from penstock.formats.avro.schema import Type
from penstock.formats.pieces import Reason
from penstock.formats.varint import Ints


class Constant(Node):
    """A field that the writer does not have: its default."""

    def __init__(self, reader: Type, value: Any, path: str) -> None:
        super().__init__(reader, reader, path)
        self.value = value
        self.array = pa.array([value], self.arrow)

    def scan(self, scan: Scan, cursors: Cursors) -> str:
        return NOTHING

    def merge(self, parts: Sequence[Any], order: Ints) -> str:
        return NOTHING

    def build(self, scan: Scan, found: Any, count: int) -> pa.Array:
        return self.array.take(pa.array(np.zeros(count, np.int64)))

    def one(self, reader: Reader) -> Any:
        return self.value


class Record(Node):
    """The writer's fields in the order they are written; `places` says which the reader has where, None: nowhere."""

    def __init__(
        self, writer: Type, reader: Type, path: str, nodes: Sequence[Node], places: Sequence[int | None]
    ) -> None:
        super().__init__(writer, reader, path)
        self.nodes, self.places = nodes, places
        self.names = [each.name for each in reader.fields]

    def scan(self, scan: Scan, cursors: Cursors) -> list[Any]:
        return [node.scan(scan, cursors) for node in self.nodes]

    def merge(self, parts: Sequence[Any], order: Ints) -> list[Any]:
        return [node.merge([part[i] for part in parts], order) for i, node in enumerate(self.nodes)]

    def columns(self, scan: Scan, found: Sequence[Any], count: int) -> list[pa.Array]:
        columns: list[pa.Array] = [None] * len(self.names)
        for node, place, part in zip(self.nodes, self.places, found, strict=True):
            if place is not None:
                columns[place] = node.build(scan, part, count)
        return columns

    def build(self, scan: Scan, found: Sequence[Any], count: int) -> pa.Array:
        return pa.Array.from_buffers(self.arrow, count, [None], 0, children=self.columns(scan, found, count))

    def one(self, reader: Reader) -> dict[str, Any]:
        values = [node.one(reader) for node in self.nodes]
        return {self.names[p]: v for p, v in zip(self.places, values, strict=True) if p is not None}


class Pair(Node):
    """A map's entry."""

    def __init__(self, key: Node, value: Node) -> None:
        super().__init__(value.writer, value.reader, value.path)
        self.key, self.value = key, value

    def scan(self, scan: Scan, cursors: Cursors) -> tuple[Any, Any]:
        return self.key.scan(scan, cursors), self.value.scan(scan, cursors)

    def merge(self, parts: Sequence[Any], order: Ints) -> tuple[Any, Any]:
        return self.key.merge([p[0] for p in parts], order), self.value.merge([p[1] for p in parts], order)

    def one(self, reader: Reader) -> tuple[str, Any]:
        return self.key.one(reader), self.value.one(reader)


class Items(Node):
    """
    An array or a map: blocks of a count and that many items, to a count of 0.

    The first items of all records are read together, then the second ones, and so on.
    """

    def __init__(self, writer: Type, reader: Type, path: str, item: Node) -> None:
        super().__init__(writer, reader, path)
        self.item = item
        assert writer.items is not None
        self.least = writer.items.least + (writer.kind == "map")
        self.too_many = Reason("avro.count", f"a count of items below zero or beyond the payload's size in {path}")

    def scan(self, scan: Scan, cursors: Cursors) -> tuple[Ints, Any]:
        totals: Ints = np.zeros(len(cursors), np.int64)
        parts: list[Any] = []
        owners: list[Ints] = []
        active: Ints = np.arange(len(cursors))
        steps = 0
        while len(active):
            block = cursors.take(active)
            counts = self._counts(scan, block)
            cursors.at[active] = block.at
            going = np.flatnonzero(counts)
            active, block, counts = active[going], block.take(going), counts[going]
            totals[active] += counts
            if isinstance(self.item, Float):
                edges = np.cumsum(counts)
                first = np.repeat(block.at - (edges - counts) * self.least, counts)
                parts.append(first + np.arange(len(first)) * self.least)
                owners.append(np.repeat(active, counts))
                cursors.at[active] = block.at + counts * self.least
                continue
            place = 0
            rows: Ints = np.arange(len(active))
            while len(rows):
                steps += 1
                here = block.take(rows)
                if steps > at_scan.SOME_ITEMS and len(rows) < at_scan.FEW_RECORDS:
                    self._leave(scan, here)
                    block.at[rows] = here.at
                    totals[active[rows]] += place - counts[rows]
                    break
                parts.append(self.item.scan(scan, here))
                owners.append(active[rows])
                block.at[rows] = here.at
                place += 1
                rows = rows[counts[rows] > place]
            cursors.at[active] = block.at
        if not parts:
            return totals, None
        return totals, self.item.merge(parts, np.argsort(np.concatenate(owners), kind="stable"))

    def _leave(self, scan: Scan, cursors: Cursors) -> None:
        """These records are read one by one at the end."""
        scan.fail(cursors.row, Scan.ALONE)
        cursors.at[:] = scan.pad

    def _counts(self, scan: Scan, block: Cursors) -> Ints:
        counts = scan.long(block, self.path)
        sized = np.flatnonzero(counts < 0)
        if len(sized):
            here = block.take(sized)
            sizes = scan.long(here, self.path)
            scan.refuse(here, (sizes < 0) | (sizes > here.end - here.at), self.too_many)
            block.at[sized] = here.at
            counts[sized] = np.where(here.at >= scan.pad, 0, -counts[sized])
        room = (block.end - block.at) // self.least if self.least else at_scan.MAX_EMPTY_ITEMS
        scan.refuse(block, (counts < 0) | (counts > room), self.too_many, counts)
        if not self.least:
            np.add.at(scan.empty_items, block.row, counts)
            is_over = scan.empty_items[block.row] > at_scan.MAX_EMPTY_ITEMS
            scan.refuse(block, is_over, self.too_many, counts)
        return counts

    def merge(self, parts: Sequence[Any], order: Ints) -> tuple[Ints, Any]:
        totals = np.concatenate([part[0] for part in parts])
        starts = np.cumsum(totals) - totals
        inner = [part[1] for part in parts if part[1] is not None]
        merged = totals[order]
        if not inner:
            return merged, None
        edges = np.cumsum(merged)
        places = np.repeat(starts[order] - edges + merged, merged) + np.arange(int(edges[-1]) if len(edges) else 0)
        return merged, self.item.merge(inner, places)

    def build(self, scan: Scan, found: tuple[Ints, Any], count: int) -> pa.Array:
        totals, items = found
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(totals, out=offsets[1:])
        size = int(offsets[-1]) if items is not None else 0
        edges = pa.py_buffer(offsets)
        if isinstance(self.item, Pair):
            names = ((self.item.key, 0), (self.item.value, 1))
            parts = [
                node.build(scan, items[i], size) if items is not None else pa.array([], node.arrow) for node, i in names
            ]
            entry = pa.struct([self.arrow.key_field, self.arrow.item_field])
            children = [pa.Array.from_buffers(entry, size, [None], 0, children=parts)]
        else:
            empty = pa.array([], self.item.arrow)
            children = [self.item.build(scan, items, size) if items is not None else empty]
        return pa.Array.from_buffers(self.arrow, count, [None, edges], 0, children=children)

    def one(self, reader: Reader) -> list[Any]:
        values: list[Any] = []
        while count := reader.long(self.path):
            if count < 0:
                count = -count
                size = reader.long(self.path)
                if not 0 <= size <= len(reader.data) - reader.at:
                    raise BadRow(*self.too_many)
            if self.least:
                is_over = count > (len(reader.data) - reader.at) // self.least
            else:
                reader.empty_items += count
                is_over = reader.empty_items > at_scan.MAX_EMPTY_ITEMS
            if is_over:
                raise BadRow(*self.too_many)
            values += [self.item.one(reader) for _ in range(count)]
        return values


class Optional(Node):
    """A union of null and one type. Where it is null, the type is read from the zeros after the data."""

    def __init__(self, writer: Type, reader: Type, path: str, node: Node) -> None:
        super().__init__(writer, reader, path)
        self.node = node
        self.null = next(i for i, each in enumerate(writer.branches) if each.kind == "null")
        self.wrong = Reason("avro.union", f"a branch that the union does not have in {path}")

    def scan(self, scan: Scan, cursors: Cursors) -> tuple[Mask, Any]:
        branches = scan.long(cursors, self.path)
        scan.refuse(cursors, (branches < 0) | (branches > 1), self.wrong, branches)
        is_null: Mask = branches == self.null
        if not is_null.any():
            return is_null, self.node.scan(scan, cursors)
        at = cursors.at
        inner = Cursors(np.where(is_null, scan.pad, at), np.where(is_null, len(scan.data), cursors.end), cursors.row)
        found = self.node.scan(scan, inner)
        cursors.at = np.where(is_null, at, inner.at)
        return is_null, found

    def merge(self, parts: Sequence[Any], order: Ints) -> tuple[Mask, Any]:
        return np.concatenate([part[0] for part in parts])[order], self.node.merge([part[1] for part in parts], order)

    def build(self, scan: Scan, found: tuple[Mask, Any], count: int) -> pa.Array:
        is_null, inner = found
        return with_nulls(self.node.build(scan, inner, count), is_null)

    def one(self, reader: Reader) -> Any:
        branch = reader.long(self.path)
        if not 0 <= branch <= 1:
            raise BadRow(*self.wrong)
        return None if branch == self.null else self.node.one(reader)


class Wrapped(Node):
    """A value of one type where the reader has a union of several."""

    def __init__(self, writer: Type, reader: Type, path: str, node: Node, place: int) -> None:
        super().__init__(writer, reader, path)
        self.node, self.place = node, place

    def scan(self, scan: Scan, cursors: Cursors) -> Any:
        return self.node.scan(scan, cursors)

    def merge(self, parts: Sequence[Any], order: Ints) -> Any:
        return self.node.merge(parts, order)

    def build(self, scan: Scan, found: Any, count: int) -> pa.Array:
        children = [pa.nulls(count, field.type) for field in self.arrow]
        children[self.place] = self.node.build(scan, found, count)
        return pa.Array.from_buffers(self.arrow, count, [None], 0, children=children)

    def one(self, reader: Reader) -> dict[str, Any]:
        return {self.arrow.field(self.place).name: self.node.one(reader)}


class Union(Node):
    """
    Any other union: each branch reads the records that have it.

    `nodes` has for each of the writer's branches what reads it, and its place among the reader's (0 if the reader has
    no union); None is null, text says why the reader cannot take it.
    """

    def __init__(self, writer: Type, reader: Type, path: str, nodes: Sequence[tuple[Node, int] | str | None]) -> None:
        super().__init__(writer, reader, path)
        self.nodes = nodes
        self.wrong = Reason("avro.union", f"a branch that the union does not have in {path}")

    def scan(self, scan: Scan, cursors: Cursors) -> tuple[Ints, list[tuple[Ints, Any]]]:
        branches = scan.long(cursors, self.path)
        is_bad = (branches < 0) | (branches >= len(self.nodes))
        if is_bad.any():
            scan.refuse(cursors, is_bad, self.wrong)
        branches[cursors.at >= scan.pad] = -1
        found: list[tuple[Ints, Any]] = []
        for number, each in enumerate(self.nodes):
            rows = np.flatnonzero(branches == number)
            if isinstance(each, str):
                scan.refuse(cursors, branches == number, Reason("avro.union", each), branches)
            if each is None or isinstance(each, str) or not len(rows):
                found.append((rows[:0], None))
                continue
            here = cursors.take(rows)
            found.append((rows, each[0].scan(scan, here)))
            cursors.at[rows] = here.at
        return branches, found

    def merge(self, parts: Sequence[Any], order: Ints) -> tuple[Ints, list[tuple[Ints, Any]]]:
        firsts = np.cumsum([0, *(len(part[0]) for part in parts)])
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        merged: list[tuple[Ints, Any]] = []
        for number, each in enumerate(self.nodes):
            pieces = [(part[1][number], first) for part, first in zip(parts, firsts, strict=False)]
            pieces = [(piece, first) for piece, first in pieces if len(piece[0])]
            if not pieces or each is None or isinstance(each, str):
                merged.append((position[:0], None))
                continue
            places = position[np.concatenate([piece[0] + first for piece, first in pieces])]
            inner = np.argsort(places)
            merged.append((places[inner], each[0].merge([piece[1] for piece, _ in pieces], inner)))
        return np.concatenate([part[0] for part in parts])[order], merged

    def build(self, scan: Scan, found: tuple[Ints, list[tuple[Ints, Any]]], count: int) -> pa.Array:
        branches, inner = found
        columns = list(self.arrow) if self.reader.is_choice else [pa.field("", self.arrow)]
        pieces: list[list[pa.Array]] = [[pa.array([], field.type)] for field in columns]
        rows: list[list[Ints]] = [[] for _ in columns]
        for each, (places, part) in zip(self.nodes, inner, strict=True):
            if each is not None and not isinstance(each, str) and len(places):
                pieces[each[1]].append(each[0].build(scan, part, len(places)))
                rows[each[1]].append(places)
        arrays = [_scattered(pa.concat_arrays(p), r, count) for p, r in zip(pieces, rows, strict=True)]
        if not self.reader.is_choice:
            return arrays[0]
        nulls = [number for number, each in enumerate(self.nodes) if each is None]
        array = pa.Array.from_buffers(self.arrow, count, [None], 0, children=arrays)
        return with_nulls(array, np.isin(branches, nulls))

    def one(self, reader: Reader) -> Any:
        branch = reader.long(self.path)
        if not 0 <= branch < len(self.nodes):
            raise BadRow(*self.wrong)
        each = self.nodes[branch]
        if isinstance(each, str):
            raise BadRow("avro.union", each)
        if each is None:
            return None
        value = each[0].one(reader)
        return {self.arrow.field(each[1]).name: value} if self.reader.is_choice else value


def _scattered(values: pa.Array, rows: list[Ints], count: int) -> pa.Array:
    """The values at their rows, null elsewhere."""
    places = np.concatenate(rows) if rows else np.empty(0, np.int64)
    index = np.full(count, -1, np.int64)
    index[places] = np.arange(len(places))
    return values.take(pa.array(index, mask=index < 0))


def with_nulls(array: pa.Array, is_null: Mask) -> pa.Array:
    """An array without nulls of its own, null where the mask says so; no copy of the values."""
    count = int(is_null.sum())
    if not count or types.is_null(array.type):
        return array
    bits = pa.py_buffer(np.packbits(~is_null, bitorder="little"))
    kind, buffers = array.type, array.buffers()
    assert array.offset == 0
    children: list[pa.Array] = []
    if types.is_struct(kind):
        buffers, children = buffers[:1], [array.field(i) for i in range(kind.num_fields)]
    elif types.is_map(kind):
        entry = pa.struct([kind.key_field, kind.item_field])
        pairs = pa.Array.from_buffers(entry, len(array.keys), [None], 0, children=[array.keys, array.items])
        buffers, children = buffers[:2], [pairs]
    elif types.is_list(kind):
        buffers, children = buffers[:2], [array.values]
    return pa.Array.from_buffers(kind, len(array), [bits, *buffers[1:]], count, children=children)
