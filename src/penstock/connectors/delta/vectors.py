"""
Deletion vectors: which rows of a Parquet file are deleted, as Delta stores it.

A vector is a set of row positions, counted from 0. Several vectors are written into one file, `deletion_vector_<uuid>.bin`:

| bytes | what |
|---|---|
| 1 | version of the file: 1 |
| 4, big endian | length of the first vector |
| as many | the vector: magic number (4 bytes, little endian), then a 64-bit Roaring bitmap in its portable form |
| 4, big endian | CRC-32 of the vector |
| … | length, vector and CRC of the next one |

The log names a vector by the file, the place of its length in it, and its length.
"""

from __future__ import annotations

import base64
import binascii
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np
from pydantic import BaseModel, ConfigDict
from pyroaring import BitMap, BitMap64

from penstock.changes.keys import Ints
from penstock.errors import FatalError

MAGIC = 1681511377
VERSION = b"\x01"

Read: TypeAlias = Callable[[str], bytes]
"""Gives the bytes of a file below the table's root."""

_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_Z85, _FROM_Z85 = bytes.maketrans(_B85, _Z85), bytes.maketrans(_Z85, _B85)
"""Python knows the same code with other letters."""


class Vector(BaseModel):
    """The deleted rows of one file, as the log names them."""

    model_config = ConfigDict(frozen=True)

    storage: str
    """`u`: in a file whose name is made of a UUID; `p`: in a file with any path; `i`: in the log itself."""
    place: str
    offset: int | None = None
    size: int
    count: int
    """Deleted rows."""

    @classmethod
    def logged(cls, action: dict[str, Any] | None) -> Vector | None:
        """The vector of an `add` or `remove` in the log."""
        if not action:
            return None
        return cls(
            storage=action["storageType"],
            place=action["pathOrInlineDv"],
            offset=action.get("offset"),
            size=action["sizeInBytes"],
            count=action["cardinality"],
        )

    def as_logged(self) -> dict[str, Any]:
        offset = {} if self.offset is None else {"offset": self.offset}
        return {
            "storageType": self.storage,
            "pathOrInlineDv": self.place,
            **offset,
            "sizeInBytes": self.size,
            "cardinality": self.count,
        }

    @property
    def file(self) -> str | None:
        """The file that holds it, below the table's root; None if the log itself holds it."""
        if self.storage == "i":
            return None
        if self.storage == "u":
            prefix, code = self.place[:-20], self.place[-20:]
            name = f"deletion_vector_{UUID(bytes=from_z85(code))}.bin"
            return f"{prefix}/{name}" if prefix else name
        raise FatalError(
            f"a deletion vector of the Delta table is at {self.place}, outside of the table",
            code="PEN-5001",
            hint="rewrite the table with the engine that cloned it, or write to another table",
        )

    def rows(self, read: Read) -> BitMap64:
        """The deleted rows."""
        file = self.file
        if file is None:
            data = from_z85(self.place)[: self.size]
        else:
            begin = self.offset or 0
            framed = read(file)[begin : begin + self.size + 8]
            data = framed[4:-4]
            length, crc = struct.unpack(">I", framed[:4])[0], struct.unpack(">I", framed[-4:])[0]
            if len(data) != self.size or length != self.size or crc != binascii.crc32(data):
                raise _corrupt(file, "its length or checksum is wrong")
        return unpacked(data, file or "the log")


def rows_at(positions: Ints) -> BitMap64:
    """Positions as a set. Put together by parts that share their upper half: from single numbers it takes ten times as long."""
    high, low = positions >> 32, array("I", (positions & 0xFFFFFFFF).astype(np.uint32).tobytes())
    keys, first = np.unique(high, return_index=True)  # positions are sorted
    pieces = [struct.pack("<Q", len(keys))]
    for key, begin, end in zip(keys, first, [*first, len(low)][1:], strict=True):
        pieces += [struct.pack("<I", key), BitMap(low[begin:end]).serialize()]
    return BitMap64.deserialize(b"".join(pieces))


def positions_of(rows: BitMap64) -> Ints:
    """A set of rows as positions, in their order."""
    return np.asarray(rows.to_array()).astype(np.int64)


def packed(rows: BitMap64) -> bytes:
    """A set of rows as the bytes of a vector."""
    rows.run_optimize()
    return struct.pack("<I", MAGIC) + bytes(rows.serialize())


def unpacked(data: bytes, file: str = "a deletion vector") -> BitMap64:
    if len(data) < 12 or struct.unpack("<I", data[:4])[0] != MAGIC:
        raise _corrupt(file, "it does not begin as a vector does")
    try:
        return BitMap64.deserialize(data[4:])
    except ValueError as error:
        raise _corrupt(file, str(error)) from error


def file_of(name: UUID, vectors: Sequence[BitMap64]) -> tuple[bytes, list[Vector]]:
    """The bytes of the file with this name that holds the vectors, and how the log names each of them."""
    pieces, described, offset = [VERSION], [], len(VERSION)
    for rows in vectors:
        data = packed(rows)
        place = to_z85(name.bytes)
        described.append(Vector(storage="u", place=place, offset=offset, size=len(data), count=len(rows)))
        pieces += [struct.pack(">I", len(data)), data, struct.pack(">I", binascii.crc32(data))]
        offset += len(data) + 8
    return b"".join(pieces), described


def to_z85(data: bytes) -> str:
    """The letters that Delta writes bytes with; the number of bytes must be a multiple of four."""
    return base64.b85encode(data).translate(_TO_Z85).decode()


def from_z85(text: str) -> bytes:
    return base64.b85decode(text.encode().translate(_FROM_Z85))


def _corrupt(file: str, why: str) -> FatalError:
    return FatalError(
        f"the deletion vector in {file} of the Delta table cannot be read: {why}",
        code="PEN-5001",
        hint="restore the file from a backup; without it nobody can say which rows are deleted",
    )
