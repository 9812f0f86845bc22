"""A batch in pieces: payloads a piece at a time, and the rows and failures of all of them in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from penstock.formats import Decoded, Failures
from penstock.formats.varint import Ints

PIECE_ROWS, PIECE_BYTES = 32_768, 64 << 20
"""Payloads that are decoded at once: what a pass works on stays in the processor's cache."""


class Reason(NamedTuple):
    rule: str
    text: str


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


def sliced(payloads: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """Pieces of a batch, and where each begins."""
    array = payloads.combine_chunks() if isinstance(payloads, pa.ChunkedArray) else payloads
    mean = array.nbytes // max(len(array), 1) + 1
    step = min(PIECE_ROWS, max(PIECE_BYTES // mean, 1))
    for first in range(0, len(array), step):
        yield first, array.slice(first, step)
