"""JSON objects without a schema: columns are inferred, and widen as the payloads do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pydantic import Field

from penstock.config import Config
from penstock.formats import Decoded, Failed, Format, Positions
from penstock.formats.inference import (
    Fields,
    Kind,
    Misfit,
    combine,
    depth_of,
    fields_of,
    fit,
    schema_of,
    size_of,
    widen,
    without,
)
from penstock.formats.json_parse import (
    Screened,
    Unexpected,
    has_whole_lists,
    of_another_kind,
    read,
    unbalanced,
    value,
)
from penstock.formats.json_text import objects

_PIECE_BYTES = 64 << 20
"""Payloads are read in pieces of about this size: the text of a piece must stay below 2 GB."""
_FEW_ROWS = 512
"""New columns, and bad payloads that cannot be found by their looks, are looked for among so many at a time."""


class JsonConfig(Config):
    max_depth: int = Field(default=42, ge=1, le=42)
    """A payload that is nested deeper is a failure; the object itself is the first level. No lake holds more than 42 levels."""

    max_columns: int = Field(default=10_000, ge=1)
    """Columns and fields of structs that payloads may bring along, in all; a payload with more is a failure."""


class Json(Format[JsonConfig]):
    """One JSON object per payload. Its members are columns, objects in it structs, arrays in it lists."""

    name = "json"
    options_type = JsonConfig

    def columns(self) -> None:
        return None

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        screened = Screened(payloads)
        reading = _Reading(self.options, known)
        bodies, start = screened.bodies, 0
        step = max(1, -(-len(bodies) // (bodies.nbytes // _PIECE_BYTES + 1)))
        bad: Failed = {}
        for start in range(0, len(bodies), step):
            bad |= {start + at: why for at, why in reading.take(bodies.slice(start, step)).items()}
        screened.drop(bad)
        rows = screened.exact(reading.rows(), "json.exact")
        return Decoded.of(rows, screened.positions, screened.tombstones, screened.failures)

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        return objects(rows.schema.names, rows.columns, rows.num_rows, end="}").cast(pa.binary())


class _Reading:
    """
    The columns so far, and the rows.

    Whatever is read at once, the answer is that of reading one body after the other: a body that has no place in the
    columns of those before it is a failure, and any other widens them.
    """

    def __init__(self, options: JsonConfig, known: pa.Schema | None) -> None:
        self._options = options
        self._known = known
        self._fields: Fields = fields_of(known) if known is not None else {}
        self._size = size_of(self._fields)
        self._batches: list[pa.RecordBatch] = []

    def rows(self) -> pa.RecordBatch:
        schema = schema_of(self._fields, self._known)
        if not self._batches:
            return read(pa.array([], pa.binary()), schema, "ignore")
        fitted = [fit(batch, schema) for batch in self._batches]
        return fitted[0] if len(fitted) == 1 else pa.concat_batches(fitted)

    def take(self, bodies: pa.Array) -> Failed:
        """Read bodies at once if all are good; else take out those that look bad, and then look closer."""
        if not self._fields and len(bodies) > _FEW_ROWS:
            bad = self.take(bodies.slice(0, _FEW_ROWS))
            return bad | {at + _FEW_ROWS: why for at, why in self.take(bodies.slice(_FEW_ROWS)).items()}
        if not self._at_once(bodies, self._fields):
            return {}
        bad, left = {}, np.arange(len(bodies))
        for is_cut in (False, True):
            suspects = unbalanced(bodies) if is_cut else of_another_kind(bodies, self._fields)
            found = self._confirmed(bodies, suspects)
            bad |= {int(left[at]): why for at, why in found.items()}
            keep = np.ones(len(left), bool)
            keep[list(found)] = False
            left, bodies = left[keep], bodies.filter(pa.array(keep))
            why = self._at_once(bodies, self._fields)
            if why.startswith("Failed to convert"):
                # The names and kinds are right: whole numbers are left to inference, which widens them if it must.
                why = self._at_once(bodies, without(self._fields, frozenset({"int64"})), "infer")
            if not why:
                return bad
        return bad | {int(left[at]): why for at, why in self._closely(bodies).items()}

    def _at_once(self, bodies: pa.Array, explicit: Fields, unexpected: Unexpected | None = None) -> str:
        """
        Take the row of every body, or say why not.

        New columns are found among few bodies only: many bodies with other names each would fill the memory with nulls.
        """
        if unexpected is None:
            unexpected = "error" if len(bodies) > _FEW_ROWS else "infer"
        try:
            batch, fields = self._read(bodies, explicit, unexpected)
        except (pa.ArrowInvalid, Misfit) as error:
            return str(error)
        if depth_of(fields) > self._options.max_depth or size_of(fields) > self._options.max_columns:
            return "too deep, or too many columns"
        if not all(_is_plain(column, self._fields.get(n)) for n, column in zip(batch.schema.names, batch, strict=True)):
            return "a number that is none"
        self._set(fields)
        self._batches.append(batch)
        return ""

    def _read(self, bodies: pa.Array, explicit: Fields, unexpected: Unexpected) -> tuple[pa.RecordBatch, Fields]:
        batch = read(bodies, _asked(explicit), unexpected)
        fields = combine(self._fields, fields_of(batch.schema))
        assert isinstance(fields, dict)
        if _has_times(batch.schema) or not all(map(has_whole_lists, batch.columns)):
            batch = read(bodies, schema_of(fields), "infer")
        return batch, fields

    def _confirmed(self, bodies: pa.Array, suspects: Positions) -> Failed:
        """Those of the suspects that have no place in the earlier columns: more columns would not help them."""
        found: Failed = {}
        for at, body in zip(suspects.tolist(), bodies.take(pa.array(suspects)).to_pylist(), strict=True):
            try:
                self._widened(body)
            except Misfit as misfit:
                if misfit.rule != "json.number":  # a wider number, which an earlier row may bring, would help this one
                    found[at] = misfit.rule, misfit.reason
        return found

    def _closely(self, bodies: pa.Array) -> Failed:
        """Read bodies in small pieces, and one by one where there is a bad one among them."""
        bad: Failed = {}
        for start in range(0, len(bodies), _FEW_ROWS):
            piece = bodies.slice(start, _FEW_ROWS)
            if not self._at_once(piece, self._fields):
                continue
            good: list[bytes] = []
            for at, body in enumerate(piece.to_pylist(), start):
                try:
                    self._set(self._widened(body))
                    good.append(body)
                except Misfit as misfit:
                    bad[at] = misfit.rule, misfit.reason
            self._batches.append(read(pa.array(good, pa.binary()), schema_of(self._fields), "infer"))
        return bad

    def _widened(self, body: bytes) -> Fields:
        row, before = value(body), self._fields
        fields = widen(before, row, max_depth=self._options.max_depth)
        assert isinstance(fields, dict)
        if fields is not before:
            added = sum(size_of(fields[name]) - size_of(before.get(name)) + (name not in before) for name in row)
            if self._size + added > self._options.max_columns:
                raise Misfit("json.columns", f"with it there would be more than {self._options.max_columns:,} columns")
        return fields

    def _set(self, fields: Fields) -> None:
        if fields is not self._fields:
            self._fields, self._size = fields, size_of(fields)


def _asked(fields: Fields) -> pa.Schema | None:
    """What pyarrow is asked for: it cannot read a value into a column of nulls."""
    known = without(fields, frozenset({None}))
    return schema_of(known) if known else None


def _has_times(schema: pa.Schema) -> bool:
    return any(types.is_timestamp(each) for field in schema for each in _types(field.type))


def _types(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for at in range(kind.num_fields):
        yield from _types(kind.field(at).type)


def _is_plain(values: pa.Array, kind: Kind) -> bool:
    """
    False when numbers need a closer look.

    pyarrow reads NaN and Infinity, which are no JSON, and takes whole numbers of more than 64 bits for doubles.
    """
    if types.is_float64(values.type):
        limit = np.inf if kind == "double" else 2.0**63
        return bool(pc.all(pc.less(pc.abs(values), limit)).as_py() is not False)
    if types.is_struct(values.type):
        known = kind if isinstance(kind, dict) else {}
        children = zip(values.type, values.flatten(), strict=True)
        return all(_is_plain(child, known.get(field.name)) for field, child in children)
    if types.is_list(values.type):
        return _is_plain(values.flatten(), kind[0] if isinstance(kind, list) else None)
    return True
