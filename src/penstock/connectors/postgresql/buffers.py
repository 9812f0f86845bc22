"""Texts as buffers: offsets and bytes of an Arrow array, for parsing in bulk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def mask_at(positions: Ints, length: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(length, bool)
    mask[positions] = True
    return mask


def escaped_bytes(data: Bytes) -> npt.NDArray[np.bool_]:
    """Bytes after a backslash that is not itself escaped: at odd distances from the start of a run of backslashes."""
    backslash = data == ord("\\")
    if not backslash.any():
        return np.zeros(len(data), bool)
    places = np.arange(len(data))
    before = np.concatenate(([False], backslash[:-1]))
    run = np.maximum.accumulate(np.where(backslash & ~before, places, -1))
    escaped: npt.NDArray[np.bool_] = before & ((places - run) & 1 == 1)
    return escaped


def gathered(data: Bytes, starts: Ints, stops: Ints, missing: Any, target: pa.DataType) -> pa.Array:
    """
    The values `data[start:stop]` as a binary or string array; starts and stops must ascend.

    Values and the gaps between them are laid out as one array over the same bytes, of which Arrow takes every other.
    """
    rows = len(starts)
    if rows == 0:
        return pa.array([], target)
    offsets = np.empty(2 * rows + 1, np.int32)
    offsets[0:-1:2] = starts
    offsets[1::2] = stops
    offsets[-1] = offsets[-2]
    both = pa.Array.from_buffers(pa.binary(), 2 * rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    wanted = np.arange(0, 2 * rows, 2, dtype=np.int32)
    values = both.take(pa.array(wanted, mask=missing) if missing is not None and missing.any() else pa.array(wanted))
    return values if target == pa.binary() else values.cast(target)


def compact(text: pa.Array) -> pa.Array:
    """The same with 32-bit offsets that start at 0 and no bytes under its nulls."""
    return text.take(pa.array(np.arange(len(text), dtype=np.int32)))


def offsets_and_bytes(text: pa.Array) -> tuple[Ints, Bytes]:
    _, offsets, data = text.buffers()
    bounds = np.frombuffer(offsets, np.int32)[text.offset : text.offset + len(text) + 1].astype(np.int64)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return bounds, content[: bounds[-1]]


def missing_rows(values: pa.Array) -> npt.NDArray[np.bool_]:
    missing: npt.NDArray[np.bool_] = pc.is_null(values).to_numpy(zero_copy_only=False)
    return missing
