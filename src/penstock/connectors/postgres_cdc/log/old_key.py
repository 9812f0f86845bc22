"""`_old_key`: keys as JSON objects, written for all rows at once; `penstock.changes` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes import moment_texts
from penstock.connectors.postgres_cdc.log.lsn import HEX_PAIRS
from penstock.connectors.postgresql.buffers import gathered


def json_objects(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.Array:
    """
    Rows as JSON objects, all at once.

    Values that JSON has no type for are written as text, as `changes.unpack_keys` reads them.
    """
    parts: list[Any] = ["{"]
    for number, (name, values) in enumerate(zip(names, columns, strict=True)):
        label = _json_strings(pa.array([name]))[0].as_py()
        parts += [f"{', ' if number else ''}{label}: ", _json_values(values)]
    return pc.binary_join_element_wise(*parts, "}", "")


def _json_values(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        texts = values.cast(pa.string())
    elif pa.types.is_floating(kind):
        texts = values.cast(pa.string())
        texts = pc.if_else(pc.is_finite(values), texts, _json_strings(texts))
    elif pa.types.is_binary(kind):
        texts = _json_strings(_hex(values))
    elif pa.types.is_list(kind):
        texts = _json_lists(values)
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        texts = _json_strings(moment_texts(values))
    else:
        texts = _json_strings(values.cast(pa.string()))
    return pc.fill_null(texts, "null")


def _json_lists(values: pa.Array) -> pa.Array:
    inner = _json_values(values.flatten())
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, inner), ", ")
    texts = pc.binary_join_element_wise("[", joined, "]", "")
    return pc.if_else(pc.is_valid(values), texts, pa.scalar(None, pa.string()))


def _json_strings(texts: pa.Array) -> pa.Array:
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
        texts = pc.replace_substring(texts, plain, escaped)
    if pc.any(pc.match_substring_regex(texts, "[\\x00-\\x1f]")).as_py():
        for code in range(32):
            texts = pc.replace_substring(texts, chr(code), f"\\u{code:04x}")
    return pc.binary_join_element_wise('"', texts, '"', "")


def _hex(values: pa.Array) -> pa.Array:
    """Bytes as hex digits."""
    values = values.take(pa.array(np.arange(len(values), dtype=np.int32)))
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int32)[: len(values) + 1].astype(np.int64) * 2
    raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    digits = HEX_PAIRS[raw[: bounds[-1] // 2]].view(np.uint8)
    missing = pc.is_null(values).to_numpy(zero_copy_only=False)
    return gathered(digits, bounds[:-1], bounds[1:], missing, pa.string())
