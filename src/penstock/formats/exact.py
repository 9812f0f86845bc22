"""Whole numbers that a double does not hold: a column of doubles would give back another number than was sent."""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

EXACT = 2.0**53
"""Up to here a double holds every whole number, and a float up to 2**24."""

ROUNDED = "a whole number that a double cannot hold exactly"

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
