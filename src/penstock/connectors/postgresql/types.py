"""
PostgreSQL's types as Arrow types: one mapping for the WAL and for the seed.

Both sides start from the same text, that of the type's output function, so the same row gives the same Arrow value.

| PostgreSQL | Arrow |
|---|---|
| bool · int2 int4 int8 · oid | bool · int16 int32 int64 · int64 |
| float4 float8 | float32 float64, with NaN and the infinities |
| numeric(p, s) up to 38 digits | decimal128; NaN has no place there |
| numeric otherwise | string: the exact text, with NaN and the infinities |
| bytea | binary |
| date, timestamp, timestamptz | date32, timestamp[us], timestamp[us, UTC], BC too; the infinities are the far ends |
| arrays | list of the element's type; more dimensions, and subscripts that do not start at 1, have no place |
| domains | as the type below them |
| time, timetz, interval, uuid, json, enums, ranges, composites and all others | string: the exact text |
| any type, in a column of `text_columns` | string: the exact text |

A value without a place is an error that names `text_columns`: NaN in numeric(p, s), a second dimension, subscripts that do
not start at 1 (`[0:1]={7,8}`), a timestamp after the year 294246.

`infinity` and `-infinity` become the largest integer of the Arrow type and its negative. Every finite value lies between
them, so nothing is lost, comparisons stay true, and DuckDB shows them as infinities again.
`time` stays text because 24:00:00 is a valid one and few lakes have the type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.keys import EQUALITY
from penstock.connectors.postgresql.buffers import (
    Bytes,
    Ints,
    compact,
    escaped_bytes,
    gathered,
    mask_at,
    missing_rows,
    offsets_and_bytes,
)
from penstock.errors import DataError, reason_of
from penstock.schema import with_key

SESSION: Mapping[str, str] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
}
"""Settings of every connection that reads values, by WAL or by SELECT: text output depends on them."""

ORIGIN = b"penstock.postgres"
"""Under this name a field's metadata holds the PostgreSQL type that its values came from."""

UNIX_EPOCH_DAYS = 10957
"""Days from 1970 to 2000, where PostgreSQL counts from."""
UNIX_EPOCH_US = UNIX_EPOCH_DAYS * 86_400_000_000

BOOL, BYTEA, INT8, INT2, INT4, OID, FLOAT4, FLOAT8 = 16, 17, 20, 21, 23, 26, 700, 701
DATE, TIMESTAMP, TIMESTAMPTZ, NUMERIC = 1082, 1114, 1184, 1700
NAME, TEXT, JSON, BPCHAR, VARCHAR, JSONB = 19, 25, 114, 1042, 1043, 3802

_SCALARS: dict[int, pa.DataType] = {
    BOOL: pa.bool_(),
    BYTEA: pa.binary(),
    INT2: pa.int16(),
    INT4: pa.int32(),
    INT8: pa.int64(),
    OID: pa.int64(),
    FLOAT4: pa.float32(),
    FLOAT8: pa.float64(),
    DATE: pa.date32(),
    TIMESTAMP: pa.timestamp("us"),
    TIMESTAMPTZ: pa.timestamp("us", "UTC"),
}
_DECIMAL_DIGITS = 38
_NATIVE = frozenset({*_SCALARS, TEXT, VARCHAR, BPCHAR, NAME, JSON, JSONB} - {OID})
"""Types that a SELECT over ADBC brings as Arrow values that need no text."""


@dataclass(frozen=True)
class Column:
    """A column of a table; `is_key`: it belongs to the replica identity; `nullable`: as the catalog says, which WAL cannot."""

    name: str
    type_oid: int
    typmod: int = -1
    is_key: bool = False
    nullable: bool = True
    as_text: bool = False
    """Its values are captured as the server prints them, whatever their type."""

    @property
    def held(self) -> tuple[int, int]:
        """The type and modifier that its values are held as."""
        return (TEXT, -1) if self.as_text else (self.type_oid, self.typmod)


@dataclass(frozen=True)
class PgType:
    """A row of pg_type, as far as values depend on it; `element` is 0 but for arrays, `base` is 0 but for domains."""

    name: str
    output: str
    element: int = 0
    delimiter: str = ","
    base: int = 0
    typmod: int = -1


@dataclass(frozen=True)
class TypeCatalog:
    """The types of one database, and what to do about values that Arrow has no exact place for; picklable."""

    SQL: ClassVar[str] = """
        SELECT t.oid::int8 AS oid,
               quote_ident(n.nspname) || '.' || quote_ident(t.typname) AS name,
               quote_ident(pn.nspname) || '.' || quote_ident(p.proname) AS output,
               CASE WHEN p.oid = 'pg_catalog.array_out'::regproc THEN t.typelem::int8 ELSE 0 END AS element,
               coalesce(e.typdelim::text, ',') AS delimiter, t.typbasetype::int8 AS base, t.typtypmod AS typmod
        FROM pg_catalog.pg_type t
        JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
        JOIN pg_catalog.pg_proc p ON p.oid = t.typoutput
        JOIN pg_catalog.pg_namespace pn ON pn.oid = p.pronamespace
        LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem
        WHERE t.typtype NOT IN ('c', 'p') AND coalesce(e.typtype NOT IN ('c', 'p'), true)"""
    """Its rows go to `from_rows`. Composite types are left out, as there is one per table: unknown types are text."""

    types: Mapping[int, PgType] = field(default_factory=dict)

    infinity: Literal["extreme", "null", "error"] = "extreme"
    """What becomes of the infinities of date and timestamps."""

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any]], **options: Any) -> TypeCatalog:
        """The catalog from the rows of `SQL`; `options` are the other fields."""
        return cls({int(oid): PgType(*rest) for oid, *rest in rows}, **options)

    def needed_by(self, columns: Iterable[Column]) -> TypeCatalog:
        """The part of it that these columns need, for a split that travels to a task."""
        kept: dict[int, PgType] = {}
        wanted = [column.type_oid for column in columns]
        while wanted:
            oid = wanted.pop()
            known = self.types.get(oid)
            if known is not None and oid not in kept:
                kept[oid] = known
                wanted += [each for each in (known.base, known.element) if each]
        return TypeCatalog(kept, self.infinity)

    def base(self, oid: int, typmod: int) -> tuple[int, int]:
        """The type and modifier below a domain, however deep; for others what was given."""
        while (known := self.types.get(oid)) and known.base:
            oid, typmod = known.base, known.typmod if known.typmod != -1 else typmod
        return oid, typmod

    def element(self, oid: int) -> tuple[int, str] | None:
        """The type of an array's elements and their delimiter; None for other types."""
        known = self.types.get(oid)
        if known:
            return (known.element, known.delimiter) if known.element else None
        return (_ARRAYS[oid], ",") if oid in _ARRAYS else None


def arrow_type(oid: int, typmod: int, catalog: TypeCatalog) -> pa.DataType:
    """The Arrow type that holds every value of a PostgreSQL type, or its text."""
    oid, typmod = catalog.base(oid, typmod)
    if oid == NUMERIC:
        return _decimal(typmod)
    array = catalog.element(oid)
    if array:
        return pa.list_(arrow_type(array[0], typmod, catalog))
    return _SCALARS.get(oid, pa.string())


def table_schema(columns: Sequence[Column], catalog: TypeCatalog, key: Sequence[str] | None = None) -> pa.Schema:
    """The columns as an Arrow schema with its key; all are nullable, since a delete may know its key only."""
    fields = [
        pa.field(column.name, arrow_type(*column.held, catalog), metadata=type_metadata(column, catalog))
        for column in columns
    ]
    return with_key(
        pa.schema(fields), [column.name for column in columns if column.is_key] if key is None else list(key)
    )


def type_metadata(column: Column, catalog: TypeCatalog) -> dict[bytes, bytes] | None:
    """
    What a field keeps of its PostgreSQL type: its name and modifier as JSON, after a domain's those of the type below.

    And the equality of its values, where two texts may be one key.
    """
    oid, typmod = column.held
    found: list[tuple[str, int]] = []
    while known := catalog.types.get(oid):
        found.append((known.name, typmod if not known.base else -1))
        oid, typmod = known.base, known.typmod if known.typmod != -1 else typmod
    if not found:
        return None
    equality = _EQUALITIES.get(found[-1][0])
    return {ORIGIN: json.dumps(found).encode(), **({EQUALITY: equality} if equality else {})}


_EQUALITIES = {
    'pg_catalog."numeric"': b"number",
    "pg_catalog.bpchar": b"padded",
    'pg_catalog."interval"': b"interval",
    "pg_catalog.jsonb": b"json",
}
"""
Types of which two different texts may be one key, whatever the server's settings.

Ranges, composites and citext are not among them: their texts are compared as they are. That is enough for a log, which
names each row by the very text that it was stored with.
"""


def parse_text(values: pa.Array, oid: int, typmod: int, catalog: TypeCatalog, *, name: str = "") -> pa.Array:
    """Text of the type's output function (a string or binary array) as `arrow_type`; `name`: the column, for the error."""
    target = arrow_type(oid, typmod, catalog)
    try:
        text = _combined(values).cast(pa.string())
        if pa.types.is_string(target):
            return text
        if pa.types.is_list(target):
            return _lists(text, oid, typmod, catalog, name)
        special = _PARSERS.get(target)
        return special(text, target, catalog) if special else text.cast(target)
    except pa.ArrowInvalid as error:
        raise _unheld(name, target, str(error)) from error


def select_text(column: Column, catalog: TypeCatalog) -> str:
    """
    The SQL that gives the column's text exactly as the WAL does.

    `column::text` would not: it pads no char(n), prints `true` for `t`, and a mask after every inet.
    """
    oid, _ = catalog.base(column.type_oid, column.typmod)
    known = catalog.types.get(oid)
    name = quoted(column.name)
    if known is None or known.output == "pg_catalog.textout":  # which takes no refcursor
        return f"{name}::pg_catalog.text"
    # Through the base type, as functions of any enum, range or array do not all take domains.
    return f"{known.output}({name}::{known.name})::pg_catalog.text"


def select_native(column: Column, catalog: TypeCatalog) -> str:
    """The fastest SQL for the column over ADBC; `from_select` makes the values of the WAL from its result."""
    oid, typmod = catalog.base(column.type_oid, column.typmod)
    if column.as_text:
        return select_text(column, catalog)
    native = oid in _NATIVE or pa.types.is_decimal(arrow_type(oid, typmod, catalog))
    return quoted(column.name) if native else select_text(column, catalog)


def from_select(values: pa.Array, column: Column, catalog: TypeCatalog) -> pa.Array:
    """The column's values from what ADBC returned for `select_native` or `select_text`."""
    values = _combined(values)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    target = arrow_type(*column.held, catalog)
    if pa.types.is_date(values.type) or pa.types.is_timestamp(values.type):
        return _wrapped(values, target, catalog, column.name)
    if values.type == target:
        return values
    return parse_text(values, *column.held, catalog, name=column.name)


def quoted(name: str) -> str:
    """A name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _decimal(typmod: int) -> pa.DataType:
    if typmod < 4:
        return pa.string()
    precision, scale = ((typmod - 4) >> 16) & 0xFFFF, (((typmod - 4) & 0x7FF) ^ 1024) - 1024
    digits = max(precision, scale, precision - scale)  # numeric(2, -3) holds 99000, numeric(2, 5) holds 0.00099
    return pa.decimal128(digits, max(scale, 0)) if digits <= _DECIMAL_DIGITS else pa.string()


def _combined(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(values, pa.ChunkedArray):
        return values
    return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()


def _unheld(name: str, target: pa.DataType, why: str) -> DataError:
    column = f"column {name!r}" if name else "a column"
    hint = "name the column in `text_columns` to have its values as the server prints them, or in `exclude_columns`"
    return DataError(f"a value of {column} does not fit {target}: {reason_of(why)}", code="PEN-3001", hint=hint)


def _bools(text: pa.Array, target: pa.DataType, catalog: TypeCatalog) -> pa.Array:
    true = pc.equal(text, "t")
    if not pc.all(pc.or_(true, pc.equal(text, "f"))).as_py():
        return text.cast(target)  # true and false in full, or an error that names the value
    return true


def _binaries(text: pa.Array, target: pa.DataType, catalog: TypeCatalog) -> pa.Array:
    """`\\x00ff` as two bytes: the whole buffer at once, without the byte that each `\\x` becomes."""
    text = compact(text)
    offsets, data = offsets_and_bytes(text)
    filled = np.diff(offsets) > 0
    prefix = np.zeros(len(data), bool)
    prefix[offsets[:-1][filled]] = True
    prefix[offsets[:-1][filled] + 1] = True
    if (offsets & 1).any() or not (data[offsets[:-1][filled]] == ord("\\")).all() or (_HEX[data[~prefix]] > 15).any():
        raise pa.ArrowInvalid("not the hex format of bytea; is bytea_output set to hex?")
    digits = _HEX[data]
    decoded: Bytes = (digits[0::2] << np.uint8(4)) | (digits[1::2] & np.uint8(15))
    starts = offsets[:-1] >> 1
    return gathered(decoded, starts + filled, offsets[1:] >> 1, missing_rows(text), target)


def _moments(text: pa.Array, target: pa.DataType, catalog: TypeCatalog) -> pa.Array:
    """Dates and timestamps; Arrow's own parser knows neither infinities nor BC nor years of five digits."""
    try:
        return text.cast(target)
    except pa.ArrowInvalid:
        pass
    missing = missing_rows(text)
    above, below = (
        pc.fill_null(pc.equal(text, word), False).to_numpy(zero_copy_only=False) for word in ("infinity", "-infinity")
    )
    parts = pc.extract_regex(text, _MOMENT)
    bad = pc.is_null(parts).to_numpy(zero_copy_only=False) & ~(above | below | missing)
    if bad.any():
        raise pa.ArrowInvalid("not an ISO date; is datestyle ISO and timezone UTC?")

    def number(part: str) -> Ints:
        digits = pc.fill_null(pc.struct_field(parts, part), "")
        digits = pc.ascii_rpad(digits, 6, "0") if part == "fraction" else pc.if_else(pc.equal(digits, ""), "0", digits)
        found: Ints = digits.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return found

    years = number("year")
    bc = pc.fill_null(pc.equal(pc.struct_field(parts, "era"), " BC"), False).to_numpy(zero_copy_only=False)
    found = _days(np.where(bc, 1 - years, years), number("month"), number("day"))
    finite = ~(above | below | missing)
    if pa.types.is_timestamp(target):
        if (np.abs(found[finite]) > _LAST_DAY).any():
            raise pa.ArrowInvalid("beyond the microseconds that 64 bits can count")
        within = (number("hour") * 60 + number("minute")) * 60 + number("second")
        found = np.where(finite, found, 0) * 86_400_000_000 + within * 1_000_000 + number("fraction")
    return _with_infinities(found, above, below, missing, target, catalog)


def _wrapped(values: pa.Array, target: pa.DataType, catalog: TypeCatalog, name: str) -> pa.Array:
    """ADBC shifts PostgreSQL's epoch without a look at overflow: find the infinities and what 64 bits cannot count."""
    wide = pa.types.is_timestamp(values.type)
    raw = pc.fill_null(values.view(pa.int64() if wide else pa.int32()), 0).to_numpy(zero_copy_only=False)
    shift = raw.dtype.type(UNIX_EPOCH_US if wide else UNIX_EPOCH_DAYS)
    limits = np.iinfo(raw.dtype)
    doubtful = raw <= limits.min + shift
    if not doubtful.any():
        return values.cast(target)
    with np.errstate(over="ignore"):
        ours = raw - shift
    above, below = ours == limits.max, ours == limits.min
    missing = missing_rows(values)
    if (doubtful & ~(above | below | missing)).any():
        raise _unheld(name, target, "beyond the microseconds that 64 bits can count")
    try:
        return _with_infinities(raw.astype(np.int64), above & ~missing, below & ~missing, missing, target, catalog)
    except pa.ArrowInvalid as error:
        raise _unheld(name, target, str(error)) from error


def _with_infinities(
    found: Ints, above: Any, below: Any, missing: Any, target: pa.DataType, catalog: TypeCatalog
) -> pa.Array:
    if catalog.infinity == "error" and (above | below).any():
        raise pa.ArrowInvalid('infinity, and infinity = "error"')
    if catalog.infinity == "null":
        missing = missing | above | below
    storage = np.int64 if pa.types.is_timestamp(target) else np.int32
    end = np.iinfo(storage).max
    found = np.where(above, end, np.where(below, -end, np.where(missing, 0, found)))
    return pa.array(found.astype(storage), mask=missing).view(target)


def _days(year: Ints, month: Ints, day: Ints) -> Ints:
    """Days since 1970 in the Gregorian calendar, for any year; March starts the year so that leap days end it."""
    year = year - (month <= 2)
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days: Ints = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
    return days


def _lists(text: pa.Array, oid: int, typmod: int, catalog: TypeCatalog, name: str) -> pa.Array:
    """
    `{1,NULL,"a \\"b\\""}` as lists, all rows at once.

    Every byte is either structure or content; the content alone is the elements' text.
    """
    oid, typmod = catalog.base(oid, typmod)
    found = catalog.element(oid)
    assert found is not None
    element, delimiter = found
    text = compact(text)
    missing = missing_rows(text)
    offsets, data = offsets_and_bytes(text)
    filled = np.flatnonzero(np.diff(offsets))
    first, last = offsets[:-1][filled], offsets[1:][filled] - 1
    if len(filled) != len(text) - missing.sum():
        raise pa.ArrowInvalid("empty text is no array")

    escaped = escaped_bytes(data)
    quotes = (data == ord('"')) & ~escaped
    inside = np.cumsum(quotes, dtype=np.int64) & 1 == 1
    plain = ~(inside | escaped)
    opening, closing = plain & (data == ord("{")), plain & (data == ord("}"))
    opened = np.flatnonzero(opening)
    if len(opened) != len(first):
        raise pa.ArrowInvalid("an array of more than one dimension")
    if (odd := (opened > first) & (data[first] == ord("["))).any():  # [0:1]={7,8}
        bounds = str(text[int(filled[odd.argmax()])].as_py()).partition("=")[0]
        raise pa.ArrowInvalid(f"an array whose subscripts do not start at 1 but are {bounds}")
    if not closing[last].all() or closing.sum() != len(last) or (opened != first).any():
        raise pa.ArrowInvalid("not the text of an array")
    commas = plain & (data == ord(delimiter))
    structure = commas | opening | closing | quotes
    backslash = (data == ord("\\")) & ~escaped
    content = ~(structure | backslash)

    # Elements: one more than commas, but none in {}; each ends at the comma after it or at the closing brace.
    empty = last == opened + 1
    ends = np.flatnonzero(commas | (closing & ~mask_at(last[empty], len(data))))
    counts = np.zeros(len(text) + 1, np.int64)
    per_row = np.searchsorted(ends, last, side="right") - np.searchsorted(ends, opened, side="right")
    counts[filled + 1] = per_row
    begins = np.empty_like(ends)
    heads = np.cumsum(counts[filled + 1]) - counts[filled + 1]
    begins[1:] = ends[:-1] + 1
    has = ~empty
    begins[heads[has]] = opened[has] + 1
    kept = np.concatenate(([0], np.cumsum(content, dtype=np.int64)))
    texts = data[content]
    lengths = kept[ends] - kept[begins]
    is_null = (lengths == 4) & (ends - begins == 4)
    null_at = np.flatnonzero(is_null)
    if len(null_at):
        words = data[begins[null_at][:, None] + np.arange(4)]
        is_null[null_at] = (words == np.frombuffer(b"NULL", np.uint8)).all(axis=1)
    elements = gathered(texts, kept[begins], kept[ends], is_null, pa.binary())
    parsed = parse_text(elements, element, typmod, catalog, name=name)
    rows = pa.array(np.cumsum(counts).astype(np.int32), mask=np.append(missing, False) if missing.any() else None)
    return pa.ListArray.from_arrays(rows, parsed, type=arrow_type(oid, typmod, catalog))


_HEX = np.full(256, 255, np.uint8)
_HEX[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_LAST_DAY = 106_751_990
_MOMENT = (
    r"^(?P<year>\d{4,7})-(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12]\d|3[01])"
    r"(?: (?P<hour>[01]\d|2[0-3]):(?P<minute>[0-5]\d):(?P<second>[0-5]\d)(?:\.(?P<fraction>\d{1,6}))?(?:\+00)?)?(?P<era> BC)?$"
)
_PARSERS: dict[pa.DataType, Callable[[pa.Array, pa.DataType, TypeCatalog], pa.Array]] = {
    pa.bool_(): _bools,
    pa.binary(): _binaries,
    pa.date32(): _moments,
    pa.timestamp("us"): _moments,
    pa.timestamp("us", "UTC"): _moments,
}
_ARRAYS = {
    1000: BOOL, 1001: BYTEA, 1016: INT8, 1005: INT2, 1007: INT4, 1028: OID, 1021: FLOAT4, 1022: FLOAT8,
    1182: DATE, 1115: TIMESTAMP, 1185: TIMESTAMPTZ, 1231: NUMERIC, 1003: NAME, 1009: TEXT, 199: JSON, 1014: BPCHAR,
    1015: VARCHAR, 3807: JSONB, 2951: 2950,
}  # fmt: skip
"""Built-in arrays that are known without a catalog."""
