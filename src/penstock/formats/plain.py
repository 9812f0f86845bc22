"""Payloads of one value: text, a number, or bytes as they are. The column is `value`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.config import Config
from penstock.errors import SchemaError
from penstock.formats import Decoded, Failed, Format
from penstock.formats.exact import ROUNDED, rounded_texts
from penstock.formats.json_parse import invalid_text
from penstock.formats.json_text import float_text

_SPACE = " \t\r\n"
_PATTERNS = {
    "int64": r"^-?(0|[1-9][0-9]*)$",
    "double": r"^(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|NaN|-?Infinity)$",
}
_WORDS = {"int64": "a whole number", "double": "a number"}


class StringConfig(Config):
    pass


class BytesConfig(Config):
    pass


class NumberConfig(Config):
    type: Literal["double", "int64"] = "double"
    """Type of the column. With `int64` a payload with a fraction or an exponent is a failure."""


class String(Format[StringConfig]):
    """The payload is text in UTF-8. An empty payload is an empty text."""

    name = "string"
    options_type = StringConfig

    def columns(self) -> pa.Schema:
        return pa.schema([("value", pa.string())])

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        payloads = payloads.cast(pa.binary())
        bad: Failed = dict.fromkeys(invalid_text(payloads), ("string.encoding", "it is not UTF-8"))
        return _decoded(payloads, bad, lambda good: good.view(pa.string()))

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        return _only_column(self, rows).cast(pa.binary())


class Number(Format[NumberConfig]):
    """The payload is one number in text, as JSON writes it; white space around it does not count."""

    name = "number"
    options_type = NumberConfig

    def columns(self) -> pa.Schema:
        return pa.schema([("value", pa.type_for_alias(self.options.type))])

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        payloads = payloads.cast(pa.binary())
        kind = self.options.type
        if bad := invalid_text(payloads):
            payloads = pc.if_else(_mask(len(payloads), bad), b"", payloads)
        text = pc.ascii_trim(payloads.view(pa.string()), _SPACE)
        matched = _true(pc.match_substring_regex(text, _PATTERNS[kind])) | _true(text.is_null())
        failed: Failed = dict.fromkeys(
            np.flatnonzero(~matched).tolist(), ("number.syntax", f"it is not {_WORDS[kind]}")
        )
        failed |= dict.fromkeys(self._beyond(text, matched), ("number.range", f"it is beyond the range of {kind}"))
        if kind == "double":
            good = pc.if_else(_mask(len(text), list(failed)), None, text)
            failed |= dict.fromkeys(rounded_texts(good, good.cast(pa.float64())), ("number.exact", ROUNDED))
        return _decoded(text, failed, lambda good: good.cast(pa.type_for_alias(kind)))

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        values = _only_column(self, rows)
        text = values.cast(pa.string()) if self.options.type == "int64" else float_text(values)
        return pc.replace_substring(text, '"', "").cast(pa.binary())

    def _beyond(self, text: pa.Array, matched: npt.NDArray[np.bool_]) -> list[int]:
        """Numbers that are written well, and too large for the type."""
        if self.options.type == "int64":
            long = np.flatnonzero(matched & _true(pc.greater_equal(pc.binary_length(text), 19)))
            return [at for at in long.tolist() if not _is_int64(text[at].as_py())]
        numbers = pc.if_else(pa.array(matched), text, None).cast(pa.float64())
        endless = _true(pc.is_inf(numbers)) & ~_true(pc.match_substring(text, "Infinity"))
        found: list[int] = np.flatnonzero(endless).tolist()
        return found


class Bytes(Format[BytesConfig]):
    """The payload as it is."""

    name = "bytes"
    options_type = BytesConfig

    def columns(self) -> pa.Schema:
        return pa.schema([("value", pa.binary())])

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        return _decoded(payloads.cast(pa.binary()), {}, lambda good: good)

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        return _only_column(self, rows)


def _decoded(payloads: pa.Array, failed: Failed, convert: Callable[[pa.Array], pa.Array]) -> Decoded:
    positions = np.arange(len(payloads), dtype=np.int64)
    if failed:
        keep = np.ones(len(payloads), bool)
        keep[list(failed)] = False
        payloads, positions = payloads.filter(pa.array(keep)), positions[keep]
    return Decoded.of(pa.record_batch({"value": convert(payloads)}), positions, positions[:0], failed)


def _only_column(
    format: Format[StringConfig] | Format[NumberConfig] | Format[BytesConfig], rows: pa.RecordBatch
) -> pa.Array:
    """The one column that the payloads are made of, in the format's type."""
    columns = format.columns()
    assert columns is not None
    kind = columns.field("value").type
    if rows.schema.names != ["value"]:
        raise SchemaError(
            f"the format {format.name!r} has one column, value, and the rows have {', '.join(rows.schema.names) or 'none'}",
            code="PEN-4002",
            hint="select one column AS value in the route's SQL, or use another format",
        )
    try:
        return rows.column(0).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"the column 'value' is {rows.schema.field(0).type}, which the format {format.name!r} cannot hold as {kind}",
            code="PEN-4002",
            hint="cast it in the route's SQL, or use another format",
        ) from error


def _is_int64(text: str) -> bool:
    return len(text) <= 20 and -(1 << 63) <= int(text) < 1 << 63


def _mask(count: int, positions: list[int]) -> pa.Array:
    mask = np.zeros(count, bool)
    mask[positions] = True
    return pa.array(mask)


def _true(mask: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return found
