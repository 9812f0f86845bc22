"""What the decoder does not expect: two fields of a oneof, a key that a map has twice, an entry of a map without its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.descriptor import Descriptor
from pyarrow import types

from penstock.formats.protobuf.columns import FREE_FORM
from penstock.formats.protobuf.groups import varint

Mask = npt.NDArray[np.bool_]
Found = tuple[str, Mask]
"""What occurs twice, and in which rows."""


def can_repeat(message: Descriptor, above: frozenset[str] = frozenset()) -> bool:
    """True if the message, or one within it, has a oneof or a map: most need no look at their values."""
    if message.full_name in above:
        return False
    inner = above | {message.full_name}
    return (
        message.GetOptions().map_entry
        or any(len(group.fields) > 1 for group in message.oneofs)
        or any(can_repeat(each.message_type, inner) for each in message.fields if each.message_type is not None)
    )


def repeats(columns: Mapping[str, pa.Array], message: Descriptor, count: int, path: str = "") -> Iterator[Found]:
    """At every depth; `columns` are those of the message's fields that there are."""
    for group in message.oneofs:
        filled = [columns[each.name].is_valid() for each in group.fields if each.name in columns]
        if len(filled) > 1:
            together = np.sum([each.to_numpy(zero_copy_only=False) for each in filled], axis=0)
            yield f"several fields of the oneof {path}{group.name}", together > 1
    for field in message.fields:
        if field.name in columns and field.message_type is not None and can_repeat(field.message_type):
            yield from _within(columns[field.name], field.message_type, f"{path}{field.name}")


def lacks_a_value(body: bytes, message: Descriptor) -> bool:
    """
    True if an entry of a map has no value, where the values are messages; False for what is not made of fields.

    Groups are messages by now; free-form fields and messages within themselves are columns of bytes.
    """
    pending: list[tuple[bytes, Descriptor, frozenset[str]]] = [(body, message, frozenset())]
    try:
        while pending:
            if _is_without_value(*pending.pop(), pending):
                return True
    except IndexError:  # it is cut off
        pass
    return False


def _is_without_value(
    data: bytes, kind: Descriptor, above: frozenset[str], within: list[tuple[bytes, Descriptor, frozenset[str]]]
) -> bool:
    inner = above | {kind.full_name}
    has_value = False
    for number, start, end in _fields_with_size(data):
        field = kind.fields_by_number.get(number)
        held = None if field is None else field.message_type
        if held is not None:
            has_value |= number == 2
            if held.full_name not in inner and held.full_name not in FREE_FORM:
                within.append((data[start:end], held, inner))
    if has_value or not kind.GetOptions().map_entry:
        return False
    value = kind.fields_by_name["value"].message_type
    return value is not None and value.full_name not in inner and value.full_name not in FREE_FORM


def _fields_with_size(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The numbers of the fields that say their own size, and where the content of each begins and ends."""
    at = 0
    depth = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        size = 0
        if kind in (0, 2):
            size, start = varint(data, at)
            at = start + (size if kind == 2 else 0)
            if kind == 2 and not depth:
                yield tag >> 3, start, at
        elif kind in (3, 4):
            depth += 1 if kind == 3 else -1
        else:
            at += 8 if kind == 1 else 4


def _within(array: pa.Array, message: Descriptor, path: str) -> Iterator[Found]:
    kind, count = array.type, len(array)
    if types.is_struct(kind):
        columns = dict(zip((each.name for each in kind), array.flatten(), strict=True))
        yield from repeats(columns, message, count, f"{path}.")
    elif types.is_map(kind) or types.is_list(kind):
        edges = array.offsets.to_numpy()
        parents = np.repeat(np.arange(count), np.diff(edges))
        first, size = int(edges[0]), int(edges[-1] - edges[0])
        inner, values = message, array.values
        if types.is_map(kind):
            yield (
                f"a key twice in the map {path}",
                _per_row(_again(array.keys.slice(first, size), parents), parents, count),
            )
            inner, values = message.fields_by_name["value"].message_type, array.items
        if inner is not None and can_repeat(inner):
            for what, mask in _within(values.slice(first, size), inner, path):
                yield what, _per_row(mask, parents, count)


def _again(keys: pa.Array, parents: npt.NDArray[np.int64]) -> Mask:
    """The entries whose key their map has before them."""
    is_again = np.zeros(len(keys), bool)
    if (parents[1:] == parents[:-1]).any():
        codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
        is_again[:] = True
        is_again[np.unique(parents * (codes.max() + 1) + codes, return_index=True)[1]] = False
    return is_again


def _per_row(mask: Mask, parents: npt.NDArray[np.int64], count: int) -> Mask:
    found = np.zeros(count, bool)
    found[parents[mask]] = True
    return found
