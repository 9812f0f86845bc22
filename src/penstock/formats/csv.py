"""Delimited text, one record per payload."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pydantic import Field, field_validator, model_validator

from penstock.config import Config
from penstock.errors import SchemaError
from penstock.formats import Decoded, Failed, Format, Positions
from penstock.formats.exact import ROUNDED, beyond_years, has_times, infinite, rounded_texts
from penstock.formats.framing import gathered
from penstock.formats.json_parse import failing, invalid_text, spans
from penstock.formats.json_text import text_bytes
from penstock.schema.typenames import arrow_type

_MAX_VALUES = 10_000
_CHARACTER = r"^[\x01-\x09\x0b\x0c\x0e-\x7f]$"
_Character = Annotated[str, Field(json_schema_extra={"pattern": _CHARACTER})]


_USUAL: list[tuple[Callable[[pa.DataType], bool], str]] = [
    (types.is_integer, r"^-?[0-9]{1,18}$"),
    (types.is_floating, r"^-?[0-9]+(\.[0-9]+)?$"),
    (types.is_date, r"^[0-9]{4}-[01][0-9]-[0-3][0-9]$"),
    (types.is_timestamp, r"^[0-9]{4}-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-5][0-9]"),
]


class CsvConfig(Config):
    columns: list[str] | dict[str, str] | None = None
    """Names of the columns in their order, or a table of names and Arrow types, e.g. `{ id = "int64", note = "string" }`;
    without types they are text. None: `column_1`, `column_2` and so on, text, as many as the longest record has."""

    delimiter: _Character = ","
    """What separates the values: one ASCII character."""

    quote: _Character = '"'
    """What a value with a delimiter or a line break is put in; twice in such a value, it means itself."""

    null: str = ""
    """The text that means null, unless it is in quotes."""

    @field_validator("delimiter", "quote")
    @classmethod
    def _check_character(cls, text: str) -> str:
        if re.fullmatch(_CHARACTER, text) is None:
            raise ValueError("should be one ASCII character, and no line break")
        return text

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: list[str] | dict[str, str] | None) -> list[str] | dict[str, str] | None:
        if columns is not None and (not columns or len(set(columns)) < len(columns)):
            raise ValueError("name at least one column, and no two alike")
        for name, text in columns.items() if isinstance(columns, dict) else ():
            try:
                pa.array([], pa.string()).cast(arrow_type(text))
            except pa.ArrowNotImplementedError:
                raise ValueError(f"the column {name!r} cannot be {text}: CSV has no text for it") from None
        return columns

    @model_validator(mode="after")
    def _check_characters(self) -> CsvConfig:
        special = {self.delimiter, self.quote, "\r", "\n"}
        if len(special) < 4 or special & set(self.null):
            raise ValueError("`delimiter` and `quote` must differ, and `null` must hold neither of them")
        return self


class Csv(Format[CsvConfig]):
    """One record per payload, without a header; a line break at its end does not count."""

    name = "csv"
    options_type = CsvConfig

    def columns(self) -> pa.Schema | None:
        columns = self.options.columns
        if columns is None:
            return None
        typed = columns if isinstance(columns, dict) else dict.fromkeys(columns, "string")
        return pa.schema([(name, arrow_type(text)) for name, text in typed.items()])

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        payloads = payloads.cast(pa.binary())
        failed: Failed = dict.fromkeys(invalid_text(payloads), ("csv.encoding", "it is not UTF-8"))
        everyone = np.arange(len(payloads), dtype=np.int64)
        is_null = payloads.is_null().to_numpy(zero_copy_only=False)
        left = everyone[~is_null & ~np.isin(everyone, list(failed))]
        records, bad = self._records(payloads.take(pa.array(left)).view(pa.string()))
        schema = self.columns()
        sizes = pc.list_value_length(records).to_numpy(zero_copy_only=False)
        if schema is None:
            most = max(int(sizes.max(initial=0, where=sizes <= _MAX_VALUES)), _numbered(known))
            schema = pa.schema([(f"column_{number}", pa.string()) for number in range(1, most + 1)])
            wrong, wanted = sizes > _MAX_VALUES, f"at most {_MAX_VALUES:,}"
        else:
            wrong, wanted = sizes != len(schema), str(len(schema))
        for at in np.flatnonzero(wrong).tolist():
            bad.setdefault(at, ("csv.values", f"the number of its values is {sizes[at]:,} instead of {wanted}"))
        rows, bad = _typed(records, schema, bad)
        failed |= {int(left[at]): why for at, why in bad.items()}
        return Decoded.of(rows, left[_kept(len(left), bad)], everyone[is_null], failed)

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        declared = self.columns()
        if not rows.num_columns or (declared is not None and declared.names != rows.schema.names):
            raise SchemaError(
                f"the rows have the columns {', '.join(rows.schema.names) or 'none'}, and `columns` of the format csv "
                f"names {', '.join(declared.names if declared is not None else ['none'])}",
                code="PEN-4002",
                hint="select the columns in the route's SQL in that order, or name them in `columns`",
            )
        texts = [self._text(name, column) for name, column in zip(rows.schema.names, rows.columns, strict=True)]
        return pc.binary_join_element_wise(*texts, self.options.delimiter).cast(pa.binary())

    def _records(self, lines: pa.Array) -> tuple[pa.ListArray, Failed]:
        """The values of each line; empty for a bad one."""
        lines = pc.replace_substring_regex(lines, r"\r?\n\z", "")
        special = f"[{_code(self.options.quote)}\\r\\n]"
        is_hard = pc.match_substring_regex(lines, special).to_numpy(zero_copy_only=False)
        easy, hard = np.flatnonzero(~is_hard), np.flatnonzero(is_hard)
        split = pc.split_pattern(lines.take(pa.array(easy)), self.options.delimiter)
        split = _with_nulls(split, self.options.null)
        if not len(hard):
            return split, {}
        chosen, bad = lines.take(pa.array(hard)), {}
        is_whole = pc.match_substring_regex(chosen, self._whole()).to_numpy(zero_copy_only=False)
        for at in np.flatnonzero(~is_whole).tolist():
            bad[int(hard[at])] = self._why(chosen[at].as_py())
        quoted = self._quoted(chosen.filter(pa.array(is_whole)))
        nothing = pa.array([[]] * len(bad), quoted.type)
        order = np.concatenate([easy, hard[is_whole], hard[~is_whole]])
        return pa.concat_arrays([split, quoted, nothing]).take(pa.array(np.argsort(order, kind="stable"))), bad

    def _whole(self) -> str:
        """A record in which every quote has its partner, and is where one may be."""
        quote, delimiter = _code(self.options.quote), _code(self.options.delimiter)
        value = rf"(?:{quote}(?:[^{quote}]|{quote}{quote})*{quote}|[^{quote}{delimiter}\r\n]*)"
        return rf"\A{value}(?:{delimiter}{value})*\z"

    def _why(self, line: str) -> tuple[str, str]:
        """What is wrong with a record that is not whole."""
        quote, delimiter = map(_code, (self.options.quote, self.options.delimiter))
        value = re.compile(rf"{quote}(?:[^{quote}]|{quote}{quote})*{quote}|[^{quote}{delimiter}\r\n]*")
        at, number = 0, 1
        while True:
            match = value.match(line, at)
            assert match is not None  # an empty value matches everywhere
            at = match.end()
            if at < len(line) and line[at] in "\r\n":
                return "csv.records", "it holds more than one record"
            if at == len(line) or line[at] != self.options.delimiter:
                return "csv.quote", f"value {number} has a quote where none may be, or one is missing"
            at, number = at + 1, number + 1

    def _quoted(self, lines: pa.Array) -> pa.ListArray:
        """The values of whole records. A delimiter is one after an even number of quotes; each record has an even number."""
        edges, data = spans(lines.view(pa.binary()))
        quote, delimiter = (ord(each) for each in (self.options.quote, self.options.delimiter))
        is_inside = np.cumsum(data == quote) & 1
        places = np.flatnonzero((data == delimiter) & (is_inside == 0))
        counts = np.diff(np.searchsorted(places, edges)) + 1
        starts, ends = np.sort(np.concatenate([edges[:-1], places + 1])), np.sort(np.concatenate([places, edges[1:]]))
        opens = (starts < ends) & (data[np.minimum(starts, max(len(data) - 1, 0))] == quote)
        values = gathered(data, starts + opens, ends - opens).view(pa.string())
        values = pc.replace_substring(values, 2 * self.options.quote, self.options.quote)
        is_null = pc.and_(pc.equal(values, self.options.null), pa.array(~opens))
        values = pc.if_else(is_null, pa.scalar(None, pa.string()), values)
        return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32()), values)

    def _text(self, name: str, column: pa.Array) -> pa.Array:
        quote, null = self.options.quote, self.options.null
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        try:
            if types.is_nested(column.type):
                raise pa.ArrowNotImplementedError
            text = column.cast(pa.string())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            raise SchemaError(
                f"the column {name!r} is {column.type}, which CSV has no text for",
                code="PEN-4002",
                hint="cast it to text in the route's SQL, or use another format",
            ) from None
        must = pc.equal(text, null)
        special = quote + self.options.delimiter + "\r\n"
        if np.bincount(np.frombuffer(text_bytes(text), np.uint8), minlength=256)[[*map(ord, special)]].any():
            must = pc.or_(pc.match_substring_regex(text, f"[{''.join(map(_code, special))}]"), must)
        if pc.any(must).as_py():
            doubled = pc.binary_join_element_wise(quote, pc.replace_substring(text, quote, 2 * quote), quote, "")
            text = pc.if_else(must, doubled, text)
        return pc.fill_null(text, null)


def _code(character: str) -> str:
    """A character as both regular expression engines take it, anywhere."""
    return f"\\x{ord(character):02x}"


def _numbered(known: pa.Schema | None) -> int:
    """How many columns of the format's own are known; a topic that had another format has others."""
    names = () if known is None else known.names
    return next(number for number in range(len(names) + 1) if f"column_{number + 1}" not in names)


def _with_nulls(lists: pa.ListArray, null: str) -> pa.ListArray:
    values = lists.flatten()
    is_null = pc.equal(values, null)
    if not pc.any(is_null).as_py():
        return lists
    return pa.ListArray.from_arrays(lists.offsets, pc.if_else(is_null, pa.scalar(None, pa.string()), values))


def _typed(records: pa.ListArray, schema: pa.Schema, bad: Failed) -> tuple[pa.RecordBatch, Failed]:
    """The good records in their columns' types, and the bad ones, with those that have a value of another type."""
    edges = records.offsets.to_numpy()
    values, sizes = records.values, np.diff(edges)
    for at, field in enumerate(schema):
        if types.is_string(field.type):
            continue
        places = pa.array(edges[:-1] + at, pa.int64(), mask=sizes <= at)
        texts = values.take(places)
        for row in _misfits(texts, field.type):
            bad.setdefault(row, ("csv.type", f"the column {field.name!r} is not {_described(field.type)}"))
        if types.is_floating(field.type) or has_times(field.type):
            kept = np.flatnonzero(_kept(len(texts), bad))
            chosen = texts.take(pa.array(kept))
            for row, why in _unlike(field, chosen, chosen.cast(field.type)).items():
                bad.setdefault(int(kept[row]), why)
    good = np.flatnonzero(_kept(len(records), bad))
    columns = [
        values.take(pa.array(edges[good] + at, pa.int64(), mask=sizes[good] <= at)).cast(field.type)
        for at, field in enumerate(schema)
    ]
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(good), pa.struct([]))), bad
    return pa.RecordBatch.from_arrays(columns, schema=schema), bad


def _described(kind: pa.DataType) -> str:
    """The type, and for a time an example: what is missing is mostly the zone."""
    zone = "Z" if types.is_timestamp(kind) and kind.tz else ""
    return f"{kind}, such as 2026-01-02T03:04:05{zone}" if types.is_timestamp(kind) else str(kind)


def _misfits(texts: pa.Array, kind: pa.DataType) -> list[int]:
    """Where texts cannot be cast."""
    return failing(texts, lambda some: some.cast(kind), partial(_unusual, kind=kind))


def _unusual(texts: pa.Array, kind: pa.DataType) -> Positions:
    """The texts that are not written as values of their type mostly are."""
    usual = next((pattern for is_of, pattern in _USUAL if is_of(kind)), "")
    return np.flatnonzero(~pc.fill_null(pc.match_substring_regex(texts, usual), True).to_numpy(zero_copy_only=False))


def _unlike(field: pa.Field, texts: pa.Array, values: pa.Array) -> Failed:
    """Texts of which something else was read, or what hardly anybody could read again."""
    if not types.is_floating(field.type):
        reason = f"the column {field.name!r} holds a time outside the years 1 to 9999"
        return {int(at): ("csv.type", reason) for at in np.flatnonzero(beyond_years(values))}
    reason = f"the column {field.name!r} holds a number beyond the range of {field.type}"
    found: Failed = {int(at): ("csv.type", reason) for at in np.flatnonzero(infinite(texts, values))}
    for at in rounded_texts(texts, values):
        found.setdefault(at, ("csv.exact", f"the column {field.name!r} holds {ROUNDED}"))
    return found


def _kept(count: int, bad: Failed) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    keep = np.ones(count, bool)
    keep[list(bad)] = False
    return keep
