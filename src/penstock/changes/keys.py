"""
Keys: when two of them are the same, and sets of them in which others are found.

Two keys are the same if their canonical forms are. Most values are their own canonical form: 7, a text, a date. Others:

| values | are the same | canonical |
|---|---|---|
| floats | 0.0 and -0.0; all NaN | 0.0; one NaN |
| texts of a field that names an `EQUALITY`: | | |
| `number` | 2.0 and 2.00 | without zeros at the end |
| `padded` | "a" and "a  " | without spaces at the end |
| `interval` | 30 days and 1 mon | days and microseconds |
| `json` | {"a": 1.0} and {"a": 1} | sorted, its numbers without zeros at the end |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.changes.hashing import Words, is_word, mix, words_of

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

EQUALITY = b"penstock.equality"
"""Under this name a field's metadata says which of its texts are the same key, if not those with the same characters."""


@dataclass(frozen=True)
class Equality:
    """When two keys are the same, as the fields of their columns say."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """Per column whose texts are not compared as they are written: the name of their equality."""

    @classmethod
    def of(cls, schemas: Iterable[pa.Schema], key: Sequence[str]) -> Equality:
        """The equality that the fields of a key name; an unknown name is that of a newer release, and no error."""
        fields = [schema.field(name) for schema in schemas for name in key if name in schema.names]
        named = {each.name: (each.metadata or {}).get(EQUALITY, b"").decode() for each in fields}
        return cls({name: equality for name, equality in named.items() if equality in _TEXTS})

    def canonical(self, keys: pa.Table) -> pa.Table:
        """The keys in a form that is the same for keys that are the same."""
        columns = []
        for name, column in zip(keys.column_names, keys.columns, strict=True):
            values = plain(column)
            if types.is_floating(values.type):
                values = canonical_floats(values)
            elif name in self.texts and types.is_string(values.type):
                values = _TEXTS[self.texts[name]](values)
            columns.append(values)
        return pa.Table.from_arrays(columns, names=keys.column_names)


def canonical_floats(values: pa.Array) -> pa.Array:
    """One zero and one NaN."""
    values = pc.add(values, pa.scalar(0.0, values.type))  # -0.0 + 0.0 is 0.0
    nan = pa.scalar(float("nan"), values.type)
    return pc.if_else(pc.is_nan(values), nan, values) if pc.any(pc.is_nan(values)).as_py() else values


def _numbers(texts: pa.Array) -> pa.Array:
    texts = pc.replace_substring_regex(texts, r"(\.\d*[1-9])0+$", r"\1")
    return pc.replace_substring_regex(texts, r"\.0*$", "")


def _intervals(texts: pa.Array) -> pa.Array:
    """`1 year 2 mons -3 days +04:05:06.7` as days and microseconds; a month has 30 days. Infinities stay as they are."""
    found = pc.extract_regex(texts, _INTERVAL)

    def number(part: str) -> Ints:
        digits = pc.struct_field(found, part)
        return ints(pc.if_else(pc.equal(pc.fill_null(digits, ""), ""), "0", digits).cast(pa.int64()))

    days = (number("years") * 12 + number("months")) * 30 + number("days")
    fraction = ints(pc.ascii_rpad(pc.fill_null(pc.struct_field(found, "fraction"), ""), 6, "0").cast(pa.int64()))
    within = ((number("hours") * 60 + number("minutes")) * 60 + number("seconds")) * 1_000_000 + fraction
    negative = bools(pc.fill_null(pc.equal(pc.struct_field(found, "sign"), "-"), False))
    more, within = np.divmod(np.where(negative, -within, within), 86_400_000_000)
    canonical = pc.binary_join_element_wise(
        pa.array(days + more).cast(pa.string()), pa.array(within).cast(pa.string()), " "
    )
    return pc.if_else(pc.is_valid(found), canonical, texts)


_INTERVAL = (
    r"^(?:\+?(?P<years>-?\d+) years? ?)?(?:\+?(?P<months>-?\d+) mons? ?)?(?:\+?(?P<days>-?\d+) days? ?)?"
    r"(?:(?P<sign>[+-])?(?P<hours>\d+):(?P<minutes>\d\d):(?P<seconds>\d\d)(?:\.(?P<fraction>\d{1,6}))?)?$"
)


def _documents(texts: pa.Array) -> pa.Array:
    encoded = texts.dictionary_encode()
    parsed = [json.loads(text, parse_float=_Number, parse_int=_Number) for text in encoded.dictionary.to_pylist()]
    return pa.array(map(_written, parsed), pa.string()).take(encoded.indices)


class _Number(str):
    """A number of a JSON document, as it is written there."""


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_written(value[name])}' for name in sorted(value))}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, _Number):
        return re.sub(r"\.0*$", "", re.sub(r"(\.\d*[1-9])0+$", r"\1", value))
    return json.dumps(value)


_TEXTS: Mapping[str, Callable[[pa.Array], pa.Array]] = {
    "number": _numbers,
    "padded": lambda texts: pc.utf8_rtrim(texts, " "),
    "interval": _intervals,
    "json": _documents,
}


class Keys:
    """A set of keys in which others are looked up, many at a time."""

    def __init__(self, keys: pa.Table, equality: Equality | None = None) -> None:
        self._equality = equality or Equality()
        self._keys = self._equality.canonical(keys)
        hashes = hashes_of(self._keys)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def find(self, rows: pa.Table) -> Ints:
        """For each row the first position of its key in the set; -1 if it is not in it."""
        rows = self._equality.canonical(rows.select(self._keys.column_names))
        found: Ints = np.full(rows.num_rows, -1, np.int64)
        left = self._likely(rows)
        hashes = hashes_of(rows.take(pa.array(left)) if len(left) < rows.num_rows else rows)
        at = np.searchsorted(self._hashes, hashes)
        while len(left):  # seldom more than once: other keys with the same hash are next to each other
            there = np.flatnonzero(at < len(self._hashes))
            there = there[self._hashes[at[there]] == hashes[there]]
            left, hashes, at = left[there], hashes[there], at[there]
            place = self._order[at]
            same = same_keys(self._keys.take(pa.array(place)), rows.take(pa.array(left)))
            found[left[same]] = place[same]
            left, hashes, at = left[~same], hashes[~same], at[~same] + 1
        return found

    def _likely(self, rows: pa.Table) -> Ints:
        """Rows that may be in the set; among few keys Arrow finds them sooner than they are hashed here."""
        if 8 * self._keys.num_rows > rows.num_rows:
            return np.arange(rows.num_rows)
        columns = zip(rows.columns, self._keys.columns, strict=True)
        masks = [bools(pc.is_in(plain(column), value_set=plain(among))) for column, among in columns]
        return np.flatnonzero(np.logical_and.reduce(masks))


def codes_of(keys: pa.Table) -> tuple[Ints, int]:
    """A number per distinct canonical key, and how many there are."""
    codes: Ints = np.zeros(keys.num_rows, np.int64)
    count = 1
    for position, name in enumerate(keys.column_names):
        new, count_of_new = _codes_in(plain(keys.column(name)))
        codes, count = _distinct(codes * count_of_new + new) if position else (new, count_of_new)
    return codes, count


def _codes_in(values: pa.Array) -> tuple[Ints, int]:
    if is_word(values.type):
        return _distinct(words_of(values).view(np.int64))
    encoded = values.dictionary_encode()
    return ints(encoded.indices), max(len(encoded.dictionary), 1)


def _distinct(values: Ints) -> tuple[Ints, int]:
    # Sorted, not hashed: Arrow's table has slots side by side for consecutive numbers, and takes ten times as long.
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64, copy=False), max(len(distinct), 1)


def hashes_of(keys: pa.Table) -> Words:
    """A number per canonical key; of a single number the number itself, so that neighbours stay side by side."""
    hashes: Words = np.zeros(keys.num_rows, np.uint64)
    for position, column in enumerate(keys.columns):
        pieces = [words_of(plain(piece)) for piece in column.chunks]
        words = np.concatenate([*pieces, np.empty(0, np.uint64)])
        hashes = mix(hashes) ^ words if position else words
    return hashes


def same_keys(one: pa.Table, other: pa.Table) -> Mask:
    """Which rows of canonical keys are the same in both."""
    same = np.ones(one.num_rows, bool)
    for left, right in zip(one.columns, other.columns, strict=True):
        left, right = plain(left), plain(right)
        if types.is_floating(left.type):
            same &= words_of(left) == words_of(right)  # bit by bit, as NaN is a key as well
            same &= bools(right.is_valid())
        else:
            same &= bools(pc.fill_null(pc.equal(left, right), False))
    return same


def plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one array, without a dictionary or views."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string_view(column.type) or types.is_binary_view(column.type):
        column = column.cast(pa.string() if types.is_string_view(column.type) else pa.binary())
    return column


def ints(values: Any) -> Ints:
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def bools(values: Any) -> Mask:
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(bool, copy=False)
