"""Values that a JSON Schema allows, as columns have them: in bulk by pyarrow, and one by one where it refuses them."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.formats import Failed
from penstock.formats.exact import FIRST_SECOND, LAST_SECOND, beyond_years
from penstock.formats.inference import Misfit
from penstock.formats.json_parse import read, value
from penstock.formats.json_schema_types import ANY, Map, Node, Struct, type_of

_INT64 = range(-(1 << 63), 1 << 63)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
FEW = 64
"""Bodies that pyarrow refuses together are read one by one once they are so few: by halves, each would cost many calls."""

_MINUS_ZERO = re.compile(rb"[\s:\[,]-0")


def singly(bodies: pa.Array, node: Struct, asked: pa.Schema, easy: pa.Schema) -> tuple[pa.RecordBatch, Failed]:
    """As pyarrow reads each by itself, and what it refuses as Python does; most of them by Python, which is faster there."""
    rows: list[Any] = []
    bad: Failed = {}
    for at, body in enumerate(bodies.to_pylist()):
        try:
            row = plain(value(body), node, "")
            if _MINUS_ZERO.search(body):  # where it is a double, Python's reader forgets its sign
                row = _alone(body, asked, easy) or row
            rows.append(row)
        except Misfit as misfit:  # perhaps in what pyarrow leaves out
            if (row := _alone(body, asked, easy)) is None:
                bad[at] = misfit.rule, misfit.reason
            else:
                rows.append(row)
    return pa.RecordBatch.from_pylist(rows, easy), bad


def _alone(body: bytes, asked: pa.Schema, easy: pa.Schema) -> Any:
    """The row as pyarrow reads it; None: it does not."""
    try:
        return cast(read(pa.array([body], pa.binary()), asked, "ignore"), easy).to_pylist()[0]
    except pa.ArrowInvalid:
        return None


def as_text(kind: pa.DataType) -> pa.DataType:
    """What pyarrow is asked for: it reads no dates, and few of the ways in which times are written."""
    if types.is_list(kind):
        return pa.list_(as_text(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([(field.name, as_text(field.type)) for field in kind])
    return pa.string() if types.is_temporal(kind) else kind


def cast(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if rows.schema == schema:
        return rows
    columns = [_cast_column(rows.column(field.name), field.type) for field in schema]
    if any(beyond_years(column).any() for column in columns):
        raise pa.ArrowInvalid("a time outside the years 1 to 9999")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast_column(values: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        if not types.is_timestamp(kind):
            raise
    return pc.replace_substring_regex(values, r"(\.[0-9]{6})[0-9]+", r"\1").cast(kind)  # nanoseconds, which are cut


class Number(float):
    """A number that knows its text."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Number:
        made = super().__new__(cls, text)
        made.text = text
        return made


def _json(found: Any) -> str:
    """The JSON text of a value, its numbers as they came."""
    if isinstance(found, Number):
        return found.text
    if isinstance(found, dict):
        return "{" + ",".join(f"{_json(name)}:{_json(each)}" for name, each in found.items()) + "}"
    if isinstance(found, list):
        return "[" + ",".join(map(_json, found)) + "]"
    return json.dumps(found, ensure_ascii=False)


def plain(found: Any, node: Node, path: str) -> Any:
    """A value as pyarrow takes it for a node; `Misfit` for one that is valid and has no place in the type."""
    if found is None or node is None:
        return None
    if node == ANY:
        return _json(found)
    if isinstance(node, Struct) and isinstance(found, dict):
        return {name: plain(found.get(name), each, f"{path}/{name}") for name, each in node.items()}
    if isinstance(node, Map) and isinstance(found, dict):
        return [(key, plain(each, node.values, f"{path}/{key}")) for key, each in found.items()]
    if isinstance(node, list) and isinstance(found, list):
        return [plain(each, node[0], f"{path}/[]") for each in found]
    if isinstance(node, pa.DataType):
        return _scalar(found, node, path)
    raise Misfit("json_schema.type", f"{path} has no place in a column of {type_of(node)}")


def _scalar(found: Any, kind: pa.DataType, path: str) -> Any:
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    try:
        if types.is_boolean(kind) and isinstance(found, bool):
            return found
        if types.is_floating(kind) and is_number:
            return float(found)
        if types.is_integer(kind) and is_number and int(found) == found and int(found) in _INT64:
            return int(found)
        if types.is_string(kind) and isinstance(found, str):
            return found
        if types.is_date(kind) and isinstance(found, str):
            return datetime.date.fromisoformat(found)
        if types.is_timestamp(kind) and isinstance(found, str):
            moment = datetime.datetime.fromisoformat(found.upper()) - _EPOCH
            if FIRST_SECOND <= moment // datetime.timedelta(seconds=1) <= LAST_SECOND:
                return moment // datetime.timedelta(microseconds=1)
    except (ValueError, OverflowError, TypeError):
        pass
    raise Misfit("json_schema.type", f"{path} has no place in a column of {kind}")
