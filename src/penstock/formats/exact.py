"""
Values that a column would give back as others than were sent, or that hardly anybody could read there.

Whole numbers that a double does not hold, numbers beyond its range, dates and moments outside the years 1 to 9999.
"""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

EXACT = 2.0**53
"""Up to here a double holds every whole number, and a float up to 2**24."""

ROUNDED = "a whole number that a double cannot hold exactly"

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
FIRST_SECOND, LAST_SECOND = _FIRST_DAY * 86_400, (_LAST_DAY + 1) * 86_400 - 1
"""Of the years 1 and 9999: what Python, SQL and most stores can hold."""
_MOST_SECONDS = 315_576_000_000
"""Of a duration: ten thousand years."""

Mask = npt.NDArray[np.bool_]

_WHOLE = re.compile(r"\s*[-+]?[0-9]+\s*")
_LONGEST = 400
"""More digits than any double has: longer texts are beyond its range, which others refuse."""


def rounds(number: int) -> bool:
    """True if a double has no place for exactly this number."""
    try:
        return int(float(number)) != number
    except OverflowError:
        return False  # beyond the range of double, which is refused as such


def rounded(values: npt.NDArray[np.int64], kind: pa.DataType) -> npt.NDArray[np.bool_]:
    """Which whole numbers another one takes the place of in a column of doubles or floats."""
    limit = 1 << (53 if kind.bit_width == 64 else 24)
    found = (values > limit) | (values < -limit)
    if found.any():
        large = values[found]
        stored = large.astype(kind.to_pandas_dtype()).tolist()
        found[found] = [int(each) != whole for each, whole in zip(stored, large.tolist(), strict=True)]
    return found


def rounded_texts(texts: pa.Array, numbers: pa.Array) -> list[int]:
    """Where a text is a whole number and the number that was read of it is another one."""
    limit = EXACT if numbers.type.bit_width == 64 else 2.0**24
    large = pc.fill_null(pc.greater_equal(pc.abs(numbers.cast(pa.float64())), limit), False)
    found = []
    for at in np.flatnonzero(large.to_numpy(zero_copy_only=False)).tolist():
        text, number = texts[at].as_py(), numbers[at].as_py()
        is_whole = len(text) < _LONGEST and _WHOLE.fullmatch(text) is not None and math.isfinite(number)
        if is_whole and int(text) != int(number):
            found.append(at)
    return found


def infinite(texts: pa.Array, numbers: pa.Array) -> Mask:
    """Where a text is a number beyond the range, and what was read of it is an infinity."""
    found: Mask = pc.fill_null(pc.is_inf(numbers), False).to_numpy(zero_copy_only=False)
    if found.any():
        found = found & pc.match_substring_regex(texts, "[0-9]").to_numpy(zero_copy_only=False).astype(bool)
    return found


def has_times(kind: pa.DataType) -> bool:
    """True for dates, moments and durations, and for what holds some."""
    if types.is_nested(kind):
        return any(has_times(kind.field(at).type) for at in range(kind.num_fields))
    return bool(types.is_date32(kind) or types.is_timestamp(kind) or types.is_duration(kind))


def beyond_years(values: pa.Array) -> Mask:
    """Which rows hold a date or a moment outside the years 1 to 9999, or a duration of more than ten thousand years."""
    found = np.zeros(len(values), bool)
    kind = values.type
    if not has_times(kind):
        return found
    if types.is_struct(kind):
        for child in values.flatten():
            found |= beyond_years(child)
    elif types.is_nested(kind):
        lists = values if types.is_list(kind) else values.cast(pa.list_(kind.field(0)))
        valid = pc.is_valid(lists)
        places = np.flatnonzero(valid.to_numpy(zero_copy_only=False))
        shown = lists.filter(valid)  # a null list may hide elements, which only one of the two below would count
        inner = beyond_years(shown.flatten())
        found[places[pc.list_parent_indices(shown).to_numpy(zero_copy_only=False)[inner]]] = True
    elif values.null_count < len(values):
        low, high = _bounds(kind)
        numbers = values.cast(pa.int32() if types.is_date32(kind) else pa.int64())
        least, most = pc.min_max(numbers).values()
        if least.as_py() < low or most.as_py() > high:
            outside = pc.or_(pc.less(numbers, low), pc.greater(numbers, high))
            found = pc.fill_null(outside, False).to_numpy(zero_copy_only=False)
    return found


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    if types.is_date32(kind):
        return _FIRST_DAY, _LAST_DAY
    unit = _PER_SECOND[kind.unit]
    if types.is_duration(kind):
        return max(-_MOST_SECONDS * unit, -(1 << 63)), min(_MOST_SECONDS * unit, (1 << 63) - 1)
    return max(FIRST_SECOND * unit, -(1 << 63)), min((LAST_SECOND + 1) * unit - 1, (1 << 63) - 1)
