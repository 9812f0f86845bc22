"""Avro payloads to Arrow rows: grouped by the schema they were written with, each group in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import DataError, SchemaError
from penstock.formats import Decoded, WireSchema, framing
from penstock.formats.avro.leaves import Node
from penstock.formats.avro.nested import Record
from penstock.formats.avro.resolve import decoder
from penstock.formats.avro.scan import BadRow, Cursors, Reader, Scan
from penstock.formats.pieces import Pieces, Reason, sliced
from penstock.formats.varint import PAD, Ints

TRAILING = Reason("avro.trailing", "bytes after the end of the record")


def decode(
    payloads: pa.Array, reader: WireSchema, schema: pa.Schema, how: str, writer: Callable[[int], WireSchema]
) -> Decoded:
    """Rows with the columns of `schema`; `writer` gives the schema of the id in a frame, as `how` frames payloads."""
    result = Pieces(schema)
    for first, piece in sliced(payloads):
        found = framing.cells(piece, pad=PAD + 64)
        result.add(first + (nulls := np.flatnonzero(~found.is_valid)), [pa.nulls(len(nulls), f.type) for f in schema])
        for rows, skip, id in _groups(found, how, first, result):
            try:
                node = decoder(reader if id is None else writer(id), reader)
            except DataError as error:
                result.fail(rows + first, Reason(framing.rule_of(error), error.message))
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
            if wrong := TRAILING if reader.at < len(reader.data) else reader.late:
                raise BadRow(*wrong)
        except BadRow as error:
            result.fail(positions[row : row + 1], error.reason)
            continue
        values.append(value)
        kept.append(int(row))
    array = pa.array(values, node.arrow)
    result.add(positions[kept], array.flatten() if isinstance(node, Record) else [array])
