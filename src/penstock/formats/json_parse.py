"""
From JSON payloads to Arrow by one call for many: the payloads become lines of one text, and pyarrow reads the text.

Each line must stay a row. A payload that begins with `{` and ends with `}` can neither vanish nor run into the next
one: where it ends, the parser is either at the top or fails. So payloads of any other shape are taken out first, and
when there are as many rows as payloads, every payload is one row.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types
from pydantic_core import from_json

from penstock.formats import Failed, Positions
from penstock.formats.exact import EXACT, ROUNDED, rounds
from penstock.formats.inference import Fields, Misfit, keys_of

Unexpected: TypeAlias = Literal["infer", "ignore", "error"]
"""What becomes of members that are not asked for."""

MAX_DEPTH = 200
"""Deeper payloads are refused by every JSON format: time and stack grow with the square of the depth."""

_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_OPENING, _CLOSING = 0x7B, 0x7D  # `{` and `[`, `}` and `]`, once bit 0x20 is set
_FIRST = {"bool": "tf", "int64": r"\-0-9", "double": r"\-0-9", "string": '"'}
"""The first characters of a value, by kind."""
_MOST_BYTES = (1 << 31) - 2
_DEEP_BYTES = 2 * MAX_DEPTH


class Bodies:
    """Payloads that are still good, and what is wrong with the others."""

    def __init__(self, bodies: pa.Array, positions: Positions) -> None:
        self.bodies = bodies
        self.positions = positions
        self.failures: Failed = {}

    def drop(self, found: Failed) -> None:
        """Turn bodies, by their place among the bodies, into failures."""
        if not found:
            return
        self.failures |= {int(self.positions[at]): why for at, why in found.items()}
        keep = np.ones(len(self.bodies), bool)
        keep[list(found)] = False
        self.positions = self.positions[keep]
        self.bodies = self.bodies.filter(pa.array(keep))

    def exact(self, rows: pa.RecordBatch, rule: str) -> pa.RecordBatch:
        """The rows of the bodies without those that would hold another number than was sent: they become failures."""
        found = inexact(self.bodies, rows)
        if not found:
            return rows
        keep = np.ones(rows.num_rows, bool)
        keep[found] = False
        self.drop(dict.fromkeys(found, (rule, ROUNDED)))
        return rows.filter(pa.array(keep))


class Screened(Bodies):
    """The payloads that may be one JSON object each, and the nulls among them."""

    def __init__(self, payloads: pa.Array) -> None:
        if payloads.type != pa.binary():
            payloads = payloads.cast(pa.binary())
        everyone = np.arange(len(payloads), dtype=np.int64)
        super().__init__(payloads, everyone)
        self.tombstones: Positions = everyone[:0]
        if payloads.null_count:
            is_valid = payloads.is_valid().to_numpy(zero_copy_only=False)
            self.tombstones, self.positions = everyone[~is_valid], everyone[is_valid]
            self.bodies = payloads.filter(pa.array(is_valid))
        self._trim()
        self._drop_invalid_text()
        self._drop_deep()

    def _trim(self) -> None:
        """White space and a byte order mark around an object do not count; anything else around it does."""
        edges, data = spans(self.bodies)
        if not len(data):
            odd = np.arange(len(self.bodies))
        else:
            first, last = data[np.minimum(edges[:-1], len(data) - 1)], data[np.maximum(edges[1:] - 1, 0)]
            odd = np.flatnonzero((np.diff(edges) < 2) | (first != 0x7B) | (last != 0x7D))
        if not len(odd):
            return
        found: Failed = {}
        trimmed = []
        for at, body in zip(odd.tolist(), self.bodies.take(pa.array(odd)).to_pylist(), strict=True):
            body = body.removeprefix(_BOM).strip(_SPACE)
            if len(body) < 2 or body[0] != 0x7B or body[-1] != 0x7D:
                found[at] = explain(body)
            trimmed.append(body)
        mask = np.zeros(len(self.bodies), bool)
        mask[odd] = True
        if len(found) < len(odd):
            self.bodies = pc.replace_with_mask(self.bodies, pa.array(mask), pa.array(trimmed, pa.binary()))
        self.drop(found)

    def _drop_invalid_text(self) -> None:
        self.drop(dict.fromkeys(invalid_text(self.bodies), ("json.encoding", "it is not UTF-8")))
        edges, data = spans(self.bodies)
        zeros = np.flatnonzero(data == 0)  # pyarrow takes one for the end of the text
        if len(zeros):
            rows = np.unique(np.searchsorted(edges, zeros, side="right") - 1)
            self.drop({int(at): ("json.syntax", "it holds a NUL byte") for at in rows})

    def _drop_deep(self) -> None:
        edges, data = spans(self.bodies)
        if not (np.diff(edges) >= _DEEP_BYTES).any():
            return
        openings = np.searchsorted(np.flatnonzero((data | 0x20) == _OPENING), edges)
        suspects = np.flatnonzero(np.diff(openings) > MAX_DEPTH)
        found: Failed = {}
        for at in suspects.tolist():
            body = self.bodies[at].as_py()
            try:
                from_json(body)  # refuses what is nested deeper
            except ValueError:
                found[at] = explain(body)
        self.drop(found)


def read(bodies: pa.Array, explicit: pa.Schema | None, unexpected: Unexpected) -> pa.RecordBatch:
    """One row per body, which are screened; `ArrowInvalid` if any of them is no object or does not fit the schema."""
    if not len(bodies):
        return pa.RecordBatch.from_pylist([], explicit or pa.schema([]))
    if bodies.nbytes + len(bodies) > _MOST_BYTES:
        raise pa.ArrowInvalid("more text than Arrow can hold in one value")
    lists = pa.ListArray.from_arrays(pa.array([0, len(bodies)], pa.int32()), bodies)
    text = pc.binary_join(lists, b"\n").buffers()[2]
    table = pyarrow.json.read_json(
        pa.BufferReader(text),
        pyarrow.json.ReadOptions(use_threads=False, block_size=text.size + 1),
        pyarrow.json.ParseOptions(explicit_schema=explicit, unexpected_field_behavior=unexpected),
    )
    if table.num_rows != len(bodies):
        raise pa.ArrowInvalid("a payload holds more than one JSON object")
    if not table.num_columns:
        return _nothing(table.num_rows)
    batch = table.combine_chunks().to_batches()[0]
    return pa.RecordBatch.from_arrays([_without_lost_nulls(column) for column in batch.columns], schema=batch.schema)


def has_whole_lists(values: pa.Array) -> bool:
    """False when pyarrow lost nulls at the beginning of a list, as it does in lists whose type it infers."""
    if types.is_struct(values.type):
        children = [values.field(at) for at in range(values.type.num_fields)]
        return all(len(child) == len(values) and has_whole_lists(child) for child in children)
    if types.is_list(values.type):
        items = values.values
        return len(items) == (values.offsets[-1].as_py() if len(values) else 0) and has_whole_lists(items)
    return True


def value(body: bytes) -> dict[str, Any]:
    """One body as Python has it, the slow and strict way; `Misfit` says what is wrong."""
    try:
        found = _DECODER.decode(body.decode())
        if b"\\u" in body:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise Misfit("json.encoding", "it is not UTF-8") from None
    except UnicodeEncodeError:
        raise Misfit("json.syntax", "it holds half of a surrogate pair") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        byte, what = len(error.doc[: error.pos].encode()), error.msg.removesuffix(" starting at").removesuffix(" at")
        raise Misfit("json.syntax", f"it is not JSON from byte {byte} on: {what}") from None
    except ValueError:  # Python refuses to read numbers of more than 4,300 digits
        raise Misfit("json.number", "it holds a whole number of thousands of digits") from None
    if not isinstance(found, dict):
        raise Misfit("json.not_object", f"it is a JSON {_NAMES[type(found)]}, not an object")
    return found


def _has_infinite(found: Any) -> bool:
    """True if a number in a value is beyond what a double holds."""
    if isinstance(found, dict | list):
        return any(map(_has_infinite, found.values() if isinstance(found, dict) else found))
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return is_number and abs(found) > sys.float_info.max


def explain(body: bytes) -> tuple[str, str]:
    """The rule and the reason for a body that is certainly bad."""
    if not body:
        return "json.empty", "it is empty"
    try:
        found = value(body)
        if _has_infinite(found):
            raise Misfit("json.number", "it holds a number beyond the range of double")
        raise _too_deep()
    except Misfit as misfit:
        return misfit.rule, misfit.reason


def spans(bodies: pa.Array) -> tuple[Positions, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Where each body begins and ends in the bytes of all of them, and those bytes; the array has no nulls."""
    if not len(bodies):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    _, offsets, data = bodies.buffers()
    edges = np.frombuffer(offsets, np.int32)[bodies.offset : bodies.offset + len(bodies) + 1].astype(np.int64)
    every = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return edges - edges[0], every[edges[0] : edges[-1]]


def inexact(bodies: pa.Array, rows: pa.RecordBatch) -> list[int]:
    """The bodies with a whole number that its column, a double, would round; `rows` are what was read of them."""
    suspects = np.zeros(rows.num_rows, bool)
    for column in rows.columns:
        suspects |= _is_large(column)
    found: list[int] = []
    for at in np.flatnonzero(suspects).tolist():
        members = json.loads(bodies[at].as_py().removeprefix(_BOM), parse_float=lambda text: None)
        if any(_is_rounded(members.get(field.name), field.type) for field in rows.schema):
            found.append(at)
    return found


def has_large(rows: pa.RecordBatch) -> bool:
    """True if a double lies beyond what doubles can count to."""
    return any(_is_large(column).any() for column in rows.columns)


def _is_large(values: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Where a double lies beyond what doubles can count to."""
    if types.is_floating(values.type):
        numbers = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)
        return np.asarray(np.abs(numbers) >= EXACT)
    found = np.zeros(len(values), bool)
    if types.is_struct(values.type):
        for child in values.flatten():
            found |= _is_large(child)
    elif types.is_list(values.type) or types.is_map(values.type):
        items = values.flatten() if types.is_list(values.type) else _map_items(values)
        large = _is_large(items)
        if large.any():
            sizes = pc.fill_null(_sizes(values), 0).to_numpy(zero_copy_only=False)
            found[np.repeat(np.arange(len(values)), sizes)[large]] = True
    return found


def _sizes(values: pa.Array) -> pa.Array:
    if types.is_list(values.type):
        return pc.list_value_length(values)
    return pa.array([None if each is None else len(each) for each in values.to_pylist()], pa.int64())


def _map_items(values: pa.Array) -> pa.Array:
    every = [item for each in values.to_pylist() for _, item in each or ()]
    return pa.array(every, values.type.item_type)


def _is_rounded(found: Any, kind: pa.DataType) -> bool:
    if types.is_floating(kind):
        return isinstance(found, int) and rounds(found)
    if types.is_struct(kind) and isinstance(found, dict):
        return any(_is_rounded(found.get(field.name), field.type) for field in kind)
    if types.is_map(kind) and isinstance(found, dict):
        return any(_is_rounded(each, kind.item_type) for each in found.values())
    return types.is_list(kind) and isinstance(found, list) and any(_is_rounded(each, kind.value_type) for each in found)


def invalid_text(bodies: pa.Array) -> list[int]:
    """Where bytes are not UTF-8, ascending."""
    texts = bodies.view(pa.string())
    return failing(texts, lambda some: some.validate(full=True), _with_foreign_bytes)


def _with_foreign_bytes(texts: pa.Array) -> Positions:
    """The texts with a byte that UTF-8 never has, as most bad ones have."""
    edges, data = spans(texts)
    at = np.flatnonzero((data >= 0xF5) | ((data & 0xFE) == 0xC0))
    found: Positions = np.unique(np.searchsorted(edges, at, side="right") - 1)
    return found


def failing(
    values: pa.Array, attempt: Callable[[pa.Array], object], suspects: Callable[[pa.Array], Positions] | None = None
) -> list[int]:
    """
    Which values Arrow refuses, ascending: halving finds each in few steps.

    `suspects` gives those that look bad, if there are any: tried by themselves they take fewer steps.
    """
    if suspects is not None and not _takes(values, attempt):
        places = suspects(values)
        found = places[failing(values.take(pa.array(places)), attempt)]
        left = np.setdiff1d(np.arange(len(values)), found)
        return sorted([*found.tolist(), *left[failing(values.take(pa.array(left)), attempt)].tolist()])
    pieces, found_so_far = [(0, len(values))], []
    while pieces:
        lo, hi = pieces.pop()
        if _takes(values.slice(lo, hi - lo), attempt):
            continue
        if hi - lo == 1:
            found_so_far.append(lo)
        else:
            pieces += [((lo + hi) // 2, hi), (lo, (lo + hi) // 2)]
    return found_so_far


def _takes(values: pa.Array, attempt: Callable[[pa.Array], object]) -> bool:
    try:
        attempt(values)
    except pa.ArrowInvalid:
        return False
    return True


def of_another_kind(bodies: pa.Array, fields: Fields) -> Positions:
    """The bodies in which the first character after a known name is none of its kind's: bad ones, most likely."""
    first: dict[str, str] = {}
    for name, kind in keys_of(fields):
        if kind is not None:
            one = _FIRST[kind] if isinstance(kind, str) else r"\[" if isinstance(kind, list) else "{"
            first[name] = first.get(name, "") + one
    groups: dict[str, list[str]] = {}
    for name, characters in first.items():
        groups.setdefault(characters, []).append(re.escape(json.dumps(name, ensure_ascii=False)[1:-1]))
    if not groups or len(first) > 1000:
        return np.empty(0, np.int64)
    pattern = "|".join(rf'"(?:{"|".join(names)})" ?: ?[^n {chars}]' for chars, names in groups.items())
    return np.flatnonzero(pc.match_substring_regex(bodies, pattern).to_numpy(zero_copy_only=False))


def unbalanced(bodies: pa.Array) -> Positions:
    """The bodies with unequal numbers of opening and closing brackets: cut short, most likely."""
    edges, data = spans(bodies)
    lower = data | 0x20
    counts = [np.diff(np.searchsorted(np.flatnonzero(lower == code), edges)) for code in (_OPENING, _CLOSING)]
    return np.flatnonzero(counts[0] != counts[1])


def _without_lost_nulls(values: pa.Array) -> pa.Array:
    """pyarrow also loses nulls in lists and structs that hold nothing else, whether it infers the type or is given it."""
    kind = values.type
    if not types.is_nested(kind) or ": null" not in str(kind):
        return values
    if types.is_struct(kind):
        inner, size, buffers = [values.field(at) for at in range(kind.num_fields)], len(values), values.buffers()[:1]
    else:
        inner, size, buffers = [values.values], values.offsets[-1].as_py() if len(values) else 0, values.buffers()[:2]
    children = [pa.nulls(size) if types.is_null(each.type) else _without_lost_nulls(each) for each in inner]
    return pa.Array.from_buffers(kind, len(values), buffers, values.null_count, 0, children)


def _nothing(rows: int) -> pa.RecordBatch:
    """Rows without columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _too_deep() -> Misfit:
    return Misfit("json.depth", "it is nested too deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Misfit("json.duplicate_key", "an object in it has two members of one name")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise Misfit("json.number", f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
