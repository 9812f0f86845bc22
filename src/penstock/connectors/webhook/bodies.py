"""Cut bodies into events."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from typing import Literal, TypeAlias
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa

from penstock.connectors.webhook.server import Refused

Events: TypeAlias = "Sequence[bytes] | pa.Array"
"""The events of a body: one by one, or as an array of binary where there are many."""

MANY_BYTES = 4096
"""A body of lines that is larger is cut by Arrow."""

MOST_ITEMS = 100_000
"""An array is cut item by item, while nobody else is served."""
MOST_MEMBERS = 10_000
"""Of a gzip body: an empty one takes twenty bytes and a new start."""
PIECE_BYTES = 1 << 14

Cut = Literal["json", "ndjson", "form", "raw"]

_BY_TYPE: dict[bytes, Cut] = {
    b"application/json": "json",
    b"application/x-ndjson": "ndjson",
    b"application/ndjson": "ndjson",
    b"application/jsonl": "ndjson",
    b"application/x-jsonlines": "ndjson",
    b"application/x-www-form-urlencoded": "form",
}

_SPACE = b" \t\r\n"


def cut_by(content_type: bytes) -> Cut:
    """How the bodies of a content type are cut."""
    plain = content_type.partition(b";")[0].strip().lower()
    found = _BY_TYPE.get(plain) or ("json" if plain.endswith(b"+json") else None)
    if found is None:
        raise Refused(
            415,
            "unsupported_media_type",
            f"the content type {plain.decode('latin-1') or '(none)'} is not taken here: send JSON, NDJSON or a form",
        )
    return found


def inflate(body: bytes, encoding: bytes, most: int) -> bytes:
    """The body without its content encoding; a bomb is not unpacked."""
    if not encoding or encoding == b"identity":
        return body
    parts, size, at, members = [], 0, 0, 0
    try:
        while at < len(body):  # a gzip file may have several members
            if (members := members + 1) > MOST_MEMBERS:
                raise Refused(413, "too_large", f"the body has over {MOST_MEMBERS:,} members of gzip")
            inflater = zlib.decompressobj(wbits=31)
            while at < len(body) and not inflater.eof:  # in pieces: what comes after a member is copied each time
                piece = body[at : at + PIECE_BYTES]
                parts.append(inflater.decompress(piece, most + 1 - size))
                size += len(parts[-1])
                if size > most:
                    raise Refused(413, "too_large", f"the body is over {most} bytes once it is unpacked")
                at += len(piece) - len(inflater.unused_data)
            if not inflater.eof:
                raise zlib.error("cut short")
    except zlib.error:
        raise Refused(400, "bad_request", "the body is not valid gzip") from None
    return b"".join(parts)


def cut(body: bytes, how: Cut) -> Events:
    """The events of a body, in order; what each holds is found out later, in bulk, or by `validate_on_receive`."""
    if how == "raw":
        return (body,)
    if how == "form":
        return (_form(body),)
    if how == "ndjson":
        if len(body) > MANY_BYTES:
            return _lines(body)
        return [line for line in body.split(b"\n") if line and not line.isspace()]
    first = body.lstrip(_SPACE)[:1]
    if first == b"[":
        return _items(body)
    if not first:
        raise Refused(400, "bad_request", "the body is empty")
    return (body,)


def _lines(body: bytes) -> pa.Array:
    """The lines of a body but for blank ones; no object is made for each."""
    data = body.replace(b"\n", b"")
    breaks = np.flatnonzero(np.frombuffer(body, np.uint8) == _NEWLINE)
    places = [_ZERO, breaks - np.arange(len(breaks))]  # of the breaks in `data`, where they are left out
    if not body.endswith(b"\n"):
        places.append(np.array([len(data)]))
    offsets = np.concatenate(places).astype(np.int32)
    starts, lengths = offsets[:-1], np.diff(offsets)
    lines = pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    first = np.frombuffer(data, np.uint8)[np.minimum(starts, len(data) - 1)] if data else lengths
    suspects = np.flatnonzero((lengths == 0) | (first <= _LAST_SPACE)).tolist()
    blank = [at for at in suspects if not lines[at].as_py().strip()]
    if not blank:
        return lines
    kept = np.ones(len(lines), bool)
    kept[blank] = False
    return lines.filter(pa.array(kept))


_NEWLINE, _LAST_SPACE = ord("\n"), ord(" ")
_ZERO = np.zeros(1, np.int64)


_decoder = json.JSONDecoder()


def _items(body: bytes) -> list[bytes]:
    """The items of an array as they were written: nothing is lost on the way through numbers that Python would round."""
    try:
        text = body.decode()
        found: list[bytes] = []
        at = _skip(text, text.index("[") + 1)
        while text[at] != "]" or found:
            if len(found) == MOST_ITEMS:
                raise Refused(
                    413, "too_large", f"the array has over {MOST_ITEMS:,} items: send lines (NDJSON), or less"
                )
            _, end = _decoder.raw_decode(text, at)
            found.append(text[at:end].encode())
            at = _skip(text, end)
            if text[at] == "]":
                break
            if text[at] != ",":
                raise ValueError
            at = _skip(text, at + 1)
        if text[at + 1 :].strip(" \t\r\n"):
            raise ValueError
    except (ValueError, IndexError, RecursionError):
        raise Refused(400, "bad_request", "the body is not a JSON array") from None
    return found


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _form(body: bytes) -> bytes:
    """The fields as a JSON object; one that comes twice is a list."""
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=10_000)
    except ValueError:
        raise Refused(400, "bad_request", "the body is not a form") from None
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    fields = {name: values if len(values) > 1 else values[0] for name, values in found.items()}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def member(event: bytes, path: Sequence[str]) -> str | None:
    """A member of an event as text; None: it has none."""
    try:
        found = json.loads(event)
        for name in path:
            found = found[int(name)] if isinstance(found, list) else found[name]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    if found is None:
        return None
    # Half a surrogate pair cannot be encoded, but as JSON wrote it.
    plain = isinstance(found, str) and not _HALF_A_PAIR.search(found)
    return str(found) if plain else json.dumps(found, sort_keys=True)


_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
