"""Places in the log: as numbers, as PostgreSQL writes them, and as the `_position` of a change."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.connectors.postgresql.buffers import Bytes, Ints

HEX_PAIRS = np.frombuffer(bytes(range(256)).hex().upper().encode(), np.uint16)
"""The two hex digits of every byte."""


def lsn_int(text: str) -> int:
    """`16/B374D848` as an integer."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def position_text(lsn: int, sequence: int) -> str:
    """`_position` of the change with that number in the transaction that commits at `lsn`; sorts as text."""
    return f"{lsn:016X}.{sequence:010X}"


def place_of(position: str) -> tuple[int, int]:
    """`_position` as numbers: where the transaction commits, and which of its changes this is."""
    lsn, _, number = position.partition(".")
    return int(lsn, 16), int(number, 16)


def _digits(numbers: Ints, width: int) -> Bytes:
    """Each number as a row of that many hex digits."""
    octets = numbers.astype(">i8").view(np.uint8).reshape(-1, 8)[:, 8 - width // 2 :]
    return HEX_PAIRS[octets].view(np.uint8)


def position_texts(lsns: Ints, sequence: Ints) -> pa.Array:
    rows = len(lsns)
    text = np.empty((rows, 27), np.uint8)
    # Few transactions, many rows: the digits of an LSN are made once.
    distinct, which = np.unique(lsns, return_inverse=True)
    text[:, :16] = _digits(distinct, 16)[which]
    text[:, 16] = ord(".")
    text[:, 17:] = _digits(sequence, 10)
    return fixed_texts(text.ravel(), rows, 27)


def fixed_texts(data: Bytes, rows: int, width: int) -> pa.Array:
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    )
