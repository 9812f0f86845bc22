"""Which of two values of a record is the newer one: numbers by size, times by when they are, other texts by their order."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

MOST_DIGITS = 1000
"""A longer text is not taken for a number."""

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d+))?(Z|z|[+-]\d\d:?\d\d)?")


def is_after(one: Any, other: Any) -> bool:
    """True if `one` is the newer value."""
    if isinstance(one, str) and isinstance(other, str):
        first, second = _place(one), _place(other)
        return first > second if first is not None and second is not None else one > other
    if isinstance(one, str) or isinstance(other, str):
        return str(one) > str(other)
    return bool(one > other)


def is_same(one: Any, other: Any) -> bool:
    """True if neither value is newer, however it is written: `12:00:00Z` is `12:00:00.000Z`."""
    return not is_after(one, other) and not is_after(other, one)


def _place(text: str) -> tuple[int | Decimal, str] | None:
    """The place of a time, or of a number, among others; the digits of a second's fraction sort as text."""
    if len(text) < MOST_DIGITS and _NUMBER.fullmatch(text):
        return Decimal(text), ""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    day, clock, fraction, zone = found.groups()
    try:
        when = datetime.fromisoformat(f"{day}T{clock}{'' if zone in (None, 'Z', 'z') else zone}")
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    since = when - datetime(1970, 1, 1, tzinfo=UTC)
    return since.days * 86_400 + since.seconds, (fraction or "").rstrip("0")
