"""Avro payloads to Arrow rows: grouped by the schema they were written with, each group in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import DataError, SchemaError
from penstock.formats import Decoded, Failures, WireSchema, framing
from penstock.formats.avro.leaves import Node
from penstock.formats.avro.nested import Record
from penstock.formats.avro.resolve import decoder
from penstock.formats.avro.scan import BadRow, Cursors, Reader, Reason, Scan
from penstock.formats.varint import PAD, Ints

PIECE_ROWS, PIECE_BYTES = 32_768, 64 << 20
"""Payloads that are decoded at once: what a pass works on stays in the processor's cache."""

TRAILING = Reason("avro.trailing", "bytes after the end of the record")


@dataclass
class Pieces:
    """Rows and failures as they are found, in any order."""

    schema: pa.Schema
    rows: list[tuple[Ints, list[pa.Array]]] = field(default_factory=list)
    failed: list[tuple[Ints, Reason]] = field(default_factory=list)

    def add(self, positions: Ints, columns: list[pa.Array]) -> None:
        if len(positions):
            self.rows.append((positions, columns))

    def fail(self, positions: Ints, reason: Reason) -> None:
        if len(positions):
            self.failed.append((positions, reason))

    def decoded(self) -> Decoded:
        """In the order of the payloads."""
        positions = np.concatenate([p for p, _ in self.rows]) if self.rows else np.empty(0, np.int64)
        columns = [
            pa.concat_arrays([arrays[i] for _, arrays in self.rows]) if self.rows else pa.array([], each.type)
            for i, each in enumerate(self.schema)
        ]
        rows = record_batch(columns, self.schema, len(positions))
        if (positions[1:] < positions[:-1]).any():
            order = np.argsort(positions)
            positions, rows = positions[order], rows.take(pa.array(order))
        failed = sorted((int(p), reason) for many, reason in self.failed for p in many)
        return Decoded(
            rows,
            positions,
            Failures(
                np.array([p for p, _ in failed], np.int64),
                tuple(reason.rule for _, reason in failed),
                tuple(reason.text for _, reason in failed),
            ),
        )


def record_batch(columns: Sequence[pa.Array], schema: pa.Schema, count: int) -> pa.RecordBatch:
    """Also of no columns, which still has its rows."""
    struct = pa.Array.from_buffers(pa.struct(list(schema)), count, [None], 0, children=list(columns))
    return pa.RecordBatch.from_struct_array(struct).replace_schema_metadata(schema.metadata)


def decode(
    payloads: pa.Array, reader: WireSchema, schema: pa.Schema, how: str, writer: Callable[[int], WireSchema]
) -> Decoded:
    """Rows with the columns of `schema`; `writer` gives the schema of the id in a frame, as `how` frames payloads."""
    result = Pieces(schema)
    for first, piece in _pieces(payloads):
        found = framing.cells(piece, pad=PAD + 64)
        result.add(first + (nulls := np.flatnonzero(~found.is_valid)), [pa.nulls(len(nulls), f.type) for f in schema])
        for rows, skip, id in _groups(found, how, first, result):
            try:
                node = decoder(reader if id is None else writer(id), reader)
            except DataError as error:
                result.fail(rows + first, Reason(framing.UNKNOWN_ID, error.message))
                continue
            except SchemaError as error:
                result.fail(rows + first, Reason("avro.incompatible", error.message))
                continue
            data = found.data
            pad = len(data) - PAD - 63  # one after the end, so that an empty value at the end is not taken for it
            if node.writer.zeros > 32:
                data = np.concatenate([data, np.zeros(node.writer.zeros, np.uint8)])
            cursors = Cursors(found.starts[rows] + skip, found.ends[rows], np.arange(len(rows)))
            _decode(node, Scan(data, pad, len(rows)), cursors, rows + first, result)
    return result.decoded()


def _pieces(payloads: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    mean = payloads.nbytes // max(len(payloads), 1) + 1
    step = min(PIECE_ROWS, max(PIECE_BYTES // mean, 1))
    for first in range(0, len(payloads), step):
        yield first, payloads.slice(first, step)


def _groups(found: framing.Cells, how: str, first: int, result: Pieces) -> Iterator[tuple[Ints, int, int | None]]:
    """The rows of each writer's schema, the size of their frame, and the id in it."""
    rows = np.flatnonzero(found.is_valid)
    if how == "none":
        if len(rows):
            yield rows, 0, None
        return
    if how == "confluent":
        ids: Any = framing.ids(found)
        is_framed, skip, what = ids >= 0, framing.PREFIX, "Confluent's prefix of 5 bytes"
    else:
        ids, is_framed = framing.fingerprints(found)
        skip, what = framing.SINGLE_OBJECT, "the single-object header of 10 bytes"
    result.fail(rows[~is_framed[rows]] + first, Reason(framing.NO_FRAME, f"the payload does not begin with {what}"))
    rows = rows[is_framed[rows]]
    for id in np.unique(ids[rows]):
        yield rows[ids[rows] == id], skip, int(id)


def _decode(node: Node, scan: Scan, cursors: Cursors, positions: Ints, result: Pieces) -> None:
    count = len(positions)
    starts = cursors.at.copy()
    found = node.scan(scan, cursors)
    scan.fail(np.flatnonzero(cursors.at < cursors.end), TRAILING)
    columns = node.columns(scan, found, count) if isinstance(node, Record) else [node.build(scan, found, count)]
    is_good = scan.why < 0
    if is_good.all():
        result.add(positions, columns)
        return
    mask = pa.array(is_good)
    result.add(positions[is_good], [each.filter(mask) for each in columns])
    for number, reason in enumerate(scan.reasons):
        rows = np.flatnonzero(scan.why == number)
        if reason is Scan.ALONE:
            _alone(node, scan, rows, starts, cursors.end, positions, result)
        else:
            result.fail(positions[rows], reason)


def _alone(node: Node, scan: Scan, rows: Ints, starts: Ints, ends: Ints, positions: Ints, result: Pieces) -> None:
    """Records with very many items, one by one."""
    values: list[Any] = []
    kept: list[int] = []
    for row in rows:
        reader = Reader(scan.data[starts[row] : ends[row]].tobytes())
        try:
            value = node.one(reader)
            if reader.at < len(reader.data):
                raise BadRow(*TRAILING)
        except BadRow as error:
            result.fail(positions[row : row + 1], error.reason)
            continue
        values.append(value)
        kept.append(int(row))
    array = pa.array(values, node.arrow)
    result.add(positions[kept], array.flatten() if isinstance(node, Record) else [array])
