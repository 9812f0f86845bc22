"""Arrow types by the names that files use for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa


def arrow_type(text: str) -> pa.DataType:
    """The Arrow type that a text names, as Arrow itself prints it."""
    text = text.strip()
    if match := re.fullmatch(r"list<(?:item: )?(.+)>", text):
        return pa.list_(arrow_type(match[1]))
    if match := re.fullmatch(r"struct<(.+)>", text):
        fields = (field.partition(":") for field in _top_level(match[1]))
        return pa.struct([(name.strip(), arrow_type(kind)) for name, _, kind in fields])
    if match := re.fullmatch(r"decimal(?:128)?\((\d+),\s*(\d+)\)", text):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"timestamp\[(s|ms|us|ns),\s*(?:tz=)?(.+)\]", text):
        return pa.timestamp(match[1], match[2])
    try:
        return pa.type_for_alias(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no Arrow type; examples: int64, float64, bool, string, date32, timestamp[us, UTC], "
            "decimal128(12, 2), list<string>, struct<x: int64, y: string>"
        ) from None


def _top_level(text: str) -> Iterable[str]:
    """The parts between commas that are in no brackets."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char in "<[(") - (char in ">])")
        if char == "," and not depth:
            yield text[start:at]
            start = at + 1
    yield text[start:]
