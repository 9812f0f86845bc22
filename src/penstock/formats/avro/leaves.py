"""
Values that hold no others: numbers, text, bytes, enums.

Every node of a decoder has the same four methods. `scan` moves the cursors over one value each and says what it found;
`merge` puts several findings together, in another order; `build` makes Arrow of a finding; `one` reads a single value.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from penstock.formats import varint
from penstock.formats.avro.scan import BadRow, Cursors, Reader, Scan
from penstock.formats.avro.schema import Type
from penstock.formats.exact import rounded
from penstock.formats.pieces import Reason
from penstock.formats.varint import Bytes, Ints

_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""Of the years 1 and 9999: what Python, SQL and most stores can hold."""

_DAY = {"millis": 86_400_000, "micros": 86_400_000_000}
_BOUNDS = {"date": (_FIRST_DAY, _LAST_DAY)}
for _unit, _size in _DAY.items():
    _BOUNDS[f"time-{_unit}"] = (0, _size - 1)
    for _name in ("timestamp", "local-timestamp"):
        _BOUNDS[f"{_name}-{_unit}"] = (_FIRST_DAY * _size, (_LAST_DAY + 1) * _size - 1)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


NOTHING = "nothing"
"""What is found where no bytes are."""


class Node:
    """A part of a decoder: reads the writer's type and gives the reader's."""

    def __init__(self, writer: Type, reader: Type, path: str) -> None:
        self.writer, self.reader, self.path = writer, reader, path
        self.arrow: pa.DataType = reader.arrow

    def scan(self, scan: Scan, cursors: Cursors) -> Any:
        raise NotImplementedError

    def merge(self, parts: Sequence[Any], order: Ints) -> Any:
        return np.concatenate(parts)[order]

    def build(self, scan: Scan, found: Any, count: int) -> pa.Array:
        raise NotImplementedError

    def one(self, reader: Reader) -> Any:
        raise NotImplementedError


class Null(Node):
    def scan(self, scan: Scan, cursors: Cursors) -> str:
        return NOTHING

    def merge(self, parts: Sequence[Any], order: Ints) -> str:
        return NOTHING

    def build(self, scan: Scan, found: Any, count: int) -> pa.Array:
        return pa.nulls(count)

    def one(self, reader: Reader) -> None:
        return None


class Number(Node):
    """An int or a long, with or without a logical type; read as a wider number if the reader says so."""

    def __init__(self, writer: Type, reader: Type, path: str) -> None:
        super().__init__(writer, reader, path)
        whole = (-(1 << 31), (1 << 31) - 1) if writer.kind == "int" else (-(1 << 63), (1 << 63) - 1)
        self.low, self.high = _BOUNDS.get(reader.logical, whole)
        self.factor = 1000 if reader.logical.endswith("-millis") else 1
        what = reader.logical or writer.kind
        self.out_of_range = Reason("avro.range", f"a number that is no {what} in {path}")
        self.rounded = Reason("avro.exact", f"a whole number that a {reader.kind} cannot hold exactly in {path}")

    def scan(self, scan: Scan, cursors: Cursors) -> Ints:
        values = scan.long(cursors, self.path)
        if self.high < (1 << 63) - 1:
            scan.refuse(cursors, (values < self.low) | (values > self.high), self.out_of_range, values)
        if types.is_floating(self.arrow) and (lost := rounded(values, self.arrow)).any():
            scan.refuse(cursors, lost, self.rounded, values)
        return values

    def build(self, scan: Scan, found: Ints, count: int) -> pa.Array:
        kind = self.arrow
        values = found * self.factor if self.factor != 1 else found
        if types.is_floating(kind):
            return pa.array(values.astype(kind.to_pandas_dtype()))
        return pa.array(values if kind.bit_width == 64 else values.astype(np.int32)).view(kind)

    def one(self, reader: Reader) -> Any:
        value = reader.long(self.path)
        if not self.low <= value <= self.high:
            raise BadRow(*self.out_of_range)
        if types.is_floating(self.arrow) and rounded(np.array([value]), self.arrow).any():
            raise BadRow(*self.rounded)
        return float(value) if types.is_floating(self.arrow) else value * self.factor


class Float(Node):
    """A float or a double; a float may be read as a double."""

    def scan(self, scan: Scan, cursors: Cursors) -> Ints:
        return scan.fixed(cursors, self.writer.least, self.path)

    def build(self, scan: Scan, found: Ints, count: int) -> pa.Array:
        if self.writer.kind == "float":
            values = scan.halves[found].view("<f4")
            return pa.array(values if self.reader.kind == "float" else values.astype(np.float64))
        return pa.array(scan.words[found].view("<f8"))

    def one(self, reader: Reader) -> float:
        size = self.writer.least
        return float(np.frombuffer(reader.take(size, self.path), f"<f{size}")[0])


class Boolean(Node):
    def scan(self, scan: Scan, cursors: Cursors) -> Bytes:
        values = scan.data[scan.fixed(cursors, 1, self.path)]
        scan.refuse(cursors, values > 1, self._wrong(), values)
        return values

    def build(self, scan: Scan, found: Bytes, count: int) -> pa.Array:
        return pa.array(found.view(np.bool_))

    def one(self, reader: Reader) -> bool:
        value = reader.take(1, self.path)[0]
        if value > 1:
            raise BadRow(*self._wrong())
        return value == 1

    def _wrong(self) -> Reason:
        return Reason("avro.boolean", f"a boolean that is neither 0 nor 1 in {self.path}")


class Enum(Node):
    """The symbol's text: the reader's, or its default for one that it does not have."""

    def __init__(self, writer: Type, reader: Type, path: str) -> None:
        super().__init__(writer, reader, path)
        self.symbols = [each if each in reader.symbols else reader.default for each in writer.symbols]
        self.names = pa.array(self.symbols or [""], pa.string())
        self.is_unknown = np.array([each is None for each in self.symbols] or [True])

    def scan(self, scan: Scan, cursors: Cursors) -> Ints:
        is_there = cursors.at < scan.pad  # the others are nulls, of which zeros are read
        values = scan.long(cursors, self.path)
        scan.refuse(cursors, is_there & ((values < 0) | (values >= len(self.symbols))), self._wrong(), values)
        if self.is_unknown.any():
            scan.refuse(cursors, is_there & self.is_unknown[values], self._unknown(), values)
        return values

    def build(self, scan: Scan, found: Ints, count: int) -> pa.Array:
        return self.names.take(pa.array(found))

    def one(self, reader: Reader) -> str:
        value = reader.long(self.path)
        if not 0 <= value < len(self.symbols):
            raise BadRow(*self._wrong())
        symbol = self.symbols[value]
        if symbol is None:
            raise BadRow(*self._unknown())
        return symbol

    def _wrong(self) -> Reason:
        return Reason("avro.enum", f"a symbol's number that {self.writer} does not have in {self.path}")

    def _unknown(self) -> Reason:
        return Reason("avro.enum", f"a symbol of the writer's that the reader's {self.reader} lacks in {self.path}")


class Text(Node):
    """Bytes or a string: text, bytes, or a decimal's digits."""

    def __init__(self, writer: Type, reader: Type, path: str) -> None:
        super().__init__(writer, reader, path)
        self.is_text = bool(types.is_string(self.arrow))

    def scan(self, scan: Scan, cursors: Cursors) -> tuple[Ints, Ints, Ints]:
        return (*scan.sized(cursors, self.path), cursors.row)

    def merge(self, parts: Sequence[Any], order: Ints) -> Any:
        return tuple(np.concatenate(each)[order] for each in zip(*parts, strict=True))

    def build(self, scan: Scan, found: tuple[Ints, Ints, Ints], count: int) -> pa.Array:
        starts, sizes, rows = found
        if self.reader.logical == "decimal":
            return decimals(self, scan, starts, sizes, rows)
        values = scan.gathered(starts, sizes)
        if not self.is_text:
            return values.cast(self.arrow)
        try:
            return values.cast(self.arrow)
        except pa.ArrowInvalid:
            return self._text(scan, values, rows)

    def _text(self, scan: Scan, values: pa.Array, rows: Ints) -> pa.Array:
        """As the cast, without the values that are no UTF-8."""
        is_bad = np.zeros(len(values), bool)
        kept: list[bytes] = []
        for index, value in enumerate(values.to_pylist()):
            if not value.isascii() and not _is_utf8(value):
                is_bad[index] = True
                value = b""
            kept.append(value)
        scan.fail(rows[is_bad], self._not_utf8())
        return pa.array(kept, pa.binary()).cast(self.arrow)

    def one(self, reader: Reader) -> Any:
        value = reader.take(reader.long(self.path), self.path)
        if self.reader.logical == "decimal":
            return _decimal_of(self, reader, value)
        if not self.is_text:
            return value
        try:
            return value.decode()
        except UnicodeDecodeError:
            reader.late = reader.late or self._not_utf8()
            return ""

    def _not_utf8(self) -> Reason:
        return Reason("avro.utf8", f"text that is no UTF-8 in {self.path}")


class Fixed(Node):
    """Bytes of one size: as they are, or a decimal, a UUID, a duration."""

    def scan(self, scan: Scan, cursors: Cursors) -> tuple[Ints, Ints]:
        return scan.fixed(cursors, self.writer.size, self.path), cursors.row

    def merge(self, parts: Sequence[Any], order: Ints) -> Any:
        return tuple(np.concatenate(each)[order] for each in zip(*parts, strict=True))

    def build(self, scan: Scan, found: tuple[Ints, Ints], count: int) -> pa.Array:
        starts, rows = found
        size = self.writer.size
        if self.reader.logical == "decimal":
            return decimals(self, scan, starts, np.full(count, size), rows)
        if not self.reader.logical:
            return scan.gathered(starts, np.where(starts < scan.pad, size, 0)).cast(self.arrow)
        table = scan.table(starts, size)
        if self.reader.logical == "uuid":
            return _uuids(table)
        columns = np.ascontiguousarray(table).view("<u4").astype(np.int64).reshape(count, 3)
        arrays = [pa.array(np.ascontiguousarray(columns[:, each])) for each in range(3)]
        return pa.StructArray.from_arrays(arrays, fields=list(self.arrow))

    def one(self, reader: Reader) -> Any:
        value = reader.take(self.writer.size, self.path)
        return _decimal_of(self, reader, value) if self.reader.logical == "decimal" else fixed_value(self, value)


def fixed_value(node: Node, value: bytes) -> Any:
    logical = node.reader.logical
    if logical == "decimal":
        return decimal(node, value)
    if logical == "uuid":
        return str(uuid.UUID(bytes=value))
    if logical == "duration":
        return dict(zip(("months", "days", "millis"), np.frombuffer(value, "<u4").tolist(), strict=True))
    return value


def decimal(node: Node, value: bytes) -> Decimal:
    """A decimal of the bytes of its digits: big-endian, two's complement."""
    number = int.from_bytes(value, "big", signed=True)
    if not value or abs(number) >= 10**node.reader.precision:
        raise BadRow(*_no_decimal(node))
    with localcontext(prec=80):
        return Decimal(number).scaleb(-node.reader.scale)


def _decimal_of(node: Node, reader: Reader, value: bytes) -> Decimal:
    try:
        return decimal(node, value)
    except BadRow as error:
        reader.late = reader.late or error.reason
        return Decimal(0)


def decimals(node: Node, scan: Scan, starts: Ints, sizes: Ints, rows: Ints) -> pa.Array:
    """As `decimal`, for all: the digits are turned round into Arrow's little-endian words."""
    width = node.arrow.bit_width // 8
    place = np.arange(width)
    ends = starts + sizes
    index = ends[:, None] - 1 - place
    is_used = place < sizes[:, None]
    first = scan.data[np.minimum(starts, len(scan.data) - 1)]
    sign = np.where((sizes > 0) & (first >= 0x80), 0xFF, 0).astype(np.uint8)
    table = np.where(is_used, scan.data[np.where(is_used, index, scan.pad)], sign[:, None])
    values = pa.Array.from_buffers(node.arrow, len(starts), [None, pa.py_buffer(np.ascontiguousarray(table))], 0)
    is_bad = (sizes == 0) & (starts < scan.pad)
    for each in np.flatnonzero(sizes > width):  # more bytes than any such number needs
        extra = scan.data[starts[each] : ends[each] - width]
        is_bad[each] = bool((extra != sign[each]).any() or (table[each, -1] ^ sign[each]) & 0x80)
    is_bad |= _too_big(np.ascontiguousarray(table), node.reader.precision)
    if is_bad.any():
        scan.fail(rows[is_bad], _no_decimal(node))
        zero = pa.scalar(Decimal(0), node.arrow)
        values = (
            pa.array([zero], node.arrow).take(pa.array(np.zeros(len(starts), np.int64)))
            if is_bad.all()
            else (pa.compute.if_else(pa.array(~is_bad), values, zero))
        )
    return values


def _too_big(table: Bytes, precision: int) -> Any:
    """Which little-endian numbers have more digits than that."""
    limbs = table.view("<u8")
    is_negative = table[:, -1] >= 0x80
    limbs = np.where(is_negative[:, None], ~limbs, limbs)  # -x - 1: as large as a negative may be
    limit = 10**precision - 1
    is_more = np.zeros(len(limbs), bool)
    is_same = np.ones(len(limbs), bool)
    for place in reversed(range(limbs.shape[1])):
        bound = np.uint64(limit >> 64 * place & (1 << 64) - 1)
        is_more |= is_same & (limbs[:, place] > bound)
        is_same &= limbs[:, place] == bound
    return is_more | (is_same & is_negative)


def _no_decimal(node: Node) -> Reason:
    return Reason("avro.decimal", f"no number of up to {node.reader.precision} digits in {node.path}")


def _uuids(table: Bytes) -> pa.Array:
    text = np.full((len(table), 36), ord("-"), np.uint8)
    places = np.array([i for i in range(36) if i not in (8, 13, 18, 23)])
    text[:, places[0::2]], text[:, places[1::2]] = _HEX[table >> 4], _HEX[table & 15]
    return varint.binary(text.reshape(-1), np.arange(len(table) + 1) * 36).cast(pa.string())


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def plain(value: Any, kind: Type) -> Any:
    """A default, which is JSON, as pyarrow takes it for the type. Raises ValueError or TypeError for one that does not fit."""
    if kind.kind == "union":
        return _plain_union(value, kind)
    if kind.kind == "record":
        return {each.name: plain(value.get(each.name, each.default), each.type) for each in kind.fields}
    if kind.kind == "array":
        assert kind.items is not None
        return [plain(each, kind.items) for each in value]
    if kind.kind == "map":
        assert kind.items is not None
        return [(key, plain(each, kind.items)) for key, each in value.items()]
    if kind.kind in ("bytes", "fixed"):
        data = value.encode("latin-1")
        if kind.kind == "fixed" and len(data) != kind.size:
            raise ValueError(f"{len(data)} bytes for a fixed of {kind.size}")
        return fixed_value(Node(kind, kind, "a default"), data)
    if kind.kind in ("float", "double"):
        return float(value)
    if kind.kind in ("int", "long"):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{value!r} for a {kind}")
        return value * 1000 if kind.logical.endswith("-millis") else value
    expected = {"null": type(None), "boolean": bool, "string": str, "enum": str}[kind.kind]
    if not isinstance(value, expected) or (kind.kind == "enum" and value not in kind.symbols):
        raise ValueError(f"{value!r} for {kind}")
    return value


def _plain_union(value: Any, kind: Type) -> Any:
    """The first branch that takes it; the specification means the first of all."""
    for branch in kind.branches:
        try:
            found = plain(value, branch)
        except (ValueError, TypeError, AttributeError):
            continue
        if not kind.is_choice or found is None:
            return found
        return {
            name: found if each is branch else None for name, each in zip(kind.branch_names, kind.others, strict=True)
        }
    raise ValueError(f"{value!r} fits no branch of {kind}")
