"""JSON objects that a JSON Schema describes: every payload is validated, and columns have the schema's types."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import jsonschema_rs
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from penstock.config import Config
from penstock.errors import ConfigError, DataError, SchemaError, printable
from penstock.formats import Decoded, Failed, Format, Positions, Resolver, WireSchema, framing
from penstock.formats.inference import Misfit
from penstock.formats.inference import fields_of as kinds_of
from penstock.formats.json_parse import Bodies, Screened, explain, of_another_kind, read, spans, unbalanced
from penstock.formats.json_schema_bulk import certain, check_of
from penstock.formats.json_schema_types import ANY, Map, Node, Struct, fields_of, holds_any, is_plain, parsed, type_of
from penstock.formats.json_schema_values import FEW, Number, as_text, cast, plain, singly
from penstock.formats.json_text import entries, items_of, list_text, map_text, members, text_of, with_nulls_of

_NOT_EXACT = r"[0-9]{19}|[0-9][.eE]"
"""Bodies whose numbers the fast parser may not give back as they came: of more than 64 bits, or with a fraction."""
_AS_CAME = json.JSONDecoder(parse_float=Number)
_MANY_DIGITS = 100
"""Digits in a row that are looked for; a number beyond double has twice as many before its point, or an exponent of three."""


class JsonSchemaConfig(Config):
    framing: Literal["none", "confluent"] = "none"
    """What comes before each payload: nothing, or Confluent's prefix with the id of the writer's schema."""


class JsonSchema(Format[JsonSchemaConfig]):
    """
    One JSON object per payload, valid by the schema. Its properties are columns.

    Members that the schema allows and does not name are left out.
    """

    name = "json_schema"
    options_type = JsonSchemaConfig
    schema_use = "required"

    def __init__(
        self, options: JsonSchemaConfig, schema: WireSchema | None = None, resolve: Resolver | None = None
    ) -> None:
        super().__init__(options, schema, resolve)
        assert schema is not None
        self._schema = schema
        self._fields = _fields(schema)
        _validator(schema)  # an invalid schema is refused here

    @classmethod
    def record_name(cls, options: JsonSchemaConfig, schema: WireSchema) -> str:
        found = parsed(schema)
        return str(found.get("title", "")) if isinstance(found, dict) else ""

    def columns(self) -> pa.Schema:
        return pa.schema([(name, type_of(node)) for name, node in self._fields.items()])

    def decode(self, payloads: pa.Array, known: pa.Schema | None = None) -> Decoded:
        unframed: Failed = {}
        if self.options.framing == "confluent":
            is_null = payloads.is_null().to_numpy(zero_copy_only=False)
            ids, payloads = framing.strip(payloads)
            why = framing.NO_FRAME, "the payload does not begin with Confluent's prefix of 5 bytes"
            foreign = self._foreign(ids)
            unframed = dict.fromkeys(np.flatnonzero((ids < 0) & ~is_null).tolist(), why) | foreign
            if foreign:
                chosen = np.isin(np.arange(len(payloads)), list(foreign))
                payloads = pc.if_else(pa.array(chosen), pa.scalar(None, payloads.type), payloads)
        screened = Screened(payloads)
        screened.failures |= unframed
        screened.tombstones = np.setdiff1d(screened.tombstones, np.array(list(unframed), np.int64))
        rows = screened.exact(self._in_bulk(screened), "json_schema.exact")
        return Decoded.of(rows, screened.positions, screened.tombstones, screened.failures)

    def _foreign(self, ids: np.ndarray[Any, Any]) -> Failed:
        """Payloads whose frame names a schema that the registry does not have, or one of a subject that is not expected."""
        found: Failed = {}
        others = set(ids.tolist()) - {-1, self._schema.id} if self.resolve is not None else ()
        for id in others:
            try:
                assert self.resolve is not None
                self.resolve(id)
            except DataError as error:
                found |= dict.fromkeys(np.flatnonzero(ids == id).tolist(), (framing.rule_of(error), error.message))
        return found

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        unknown = [name for name in rows.schema.names if name not in self._fields]
        if unknown:
            raise SchemaError(
                f"the JSON Schema has no property {unknown[0]!r}, and the rows have a column of that name",
                code="PEN-4002",
                hint="leave the column out in the route's SQL, or add the property to the schema",
            )
        text = _members(rows.schema.names, rows.columns, rows.num_rows, self._fields)
        payloads = text.cast(pa.binary())
        doubtful = self._doubtful(rows)
        bad, _ = _invalid(_validator(self._schema), payloads.take(pa.array(doubtful)), keep=False)
        if bad:
            raise _refusal({int(doubtful[at]): why for at, why in bad.items()}, rows.num_rows)
        if self.options.framing == "none":
            return payloads
        if not self._schema.id:
            raise ConfigError(
                "Confluent's framing needs a schema that is in a registry: this one has no id",
                hint='register the schema, or set framing = "none"',
            )
        return framing.add(payloads, self._schema.id)

    def _in_bulk(self, screened: Bodies) -> pa.RecordBatch:
        """Rows whose columns show that they are valid are taken as they are read; the validator sees the others."""
        check, schema = check_of(self._schema), self.columns()
        if check is None:
            return self._validated(screened)
        asked = pa.schema([(field.name, as_text(field.type)) for field in schema])
        bodies = screened.bodies
        unexpected: Literal["error", "ignore"] = "error" if check.is_closed else "ignore"
        is_sure = np.ones(len(bodies), bool)
        is_sure[_with_constants(bodies)] = False
        is_sure[_with_huge_numbers(bodies)] = False
        for suspects in (_no_one, partial(of_another_kind, fields=kinds_of(asked)), unbalanced):
            is_sure[suspects(bodies)] = False
            try:
                found = read(bodies.filter(pa.array(is_sure)), asked, unexpected)
                is_valid = certain(found, check)
                sure = cast(found if is_valid.all() else found.filter(pa.array(is_valid)), schema)
                break
            except pa.ArrowInvalid:
                continue
        else:
            return self._validated(screened)
        is_sure[np.flatnonzero(is_sure)[~is_valid]] = False
        if is_sure.all():
            return sure
        doubtful = np.flatnonzero(~is_sure)
        others = Bodies(bodies.take(pa.array(doubtful)), doubtful)
        rest = self._validated(others)
        screened.drop(others.failures)
        if not rest.num_rows:
            return sure
        places = np.concatenate([np.flatnonzero(is_sure), others.positions])
        return pa.concat_batches([sure, rest]).take(pa.array(np.argsort(places, kind="stable")))

    def _validated(self, screened: Bodies) -> pa.RecordBatch:
        hard = [name for name, node in self._fields.items() if not is_plain(node)]
        kept = self._drop_invalid(
            screened, keep=bool(hard), as_came=any(holds_any(self._fields[name]) for name in hard)
        )
        return self._from_bodies(screened, self._from_values(screened, hard, kept))

    def _doubtful(self, rows: pa.RecordBatch) -> Positions:
        """The rows whose columns do not show that their payloads are valid."""
        check = check_of(self._schema)
        columns = self.columns()
        if check is None or any(field.type != columns.field(field.name).type for field in rows.schema):
            return np.arange(rows.num_rows)
        return np.flatnonzero(~certain(rows, check, is_written=True))

    def _drop_invalid(self, screened: Bodies, keep: bool, as_came: bool) -> list[Any]:
        """The values of the valid bodies, if asked for, `as_came` with the text of their numbers; the others become failures."""
        bad, kept = _invalid(_validator(self._schema), screened.bodies, keep)
        screened.drop(bad)
        if as_came:
            doubtful = pc.match_substring_regex(screened.bodies, _NOT_EXACT).to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(doubtful).tolist():
                kept[at] = _AS_CAME.decode(screened.bodies[at].as_py().decode())
        return kept

    def _from_values(self, screened: Bodies, names: list[str], kept: list[Any]) -> dict[str, list[Any]]:
        """The columns that pyarrow cannot read by itself: JSON text, maps, and what holds them."""
        node = Struct({name: self._fields[name] for name in names})
        if not names:
            return {}
        bad: Failed = {}
        rows: list[Any] = []
        for at, row in enumerate(kept):
            try:
                rows.append(plain(row, node, ""))
            except Misfit as misfit:
                bad[at] = misfit.rule, misfit.reason
        screened.drop(bad)
        return {name: [row[name] for row in rows] for name in names}

    def _from_bodies(self, screened: Bodies, columns: dict[str, list[Any]]) -> pa.RecordBatch:
        """All columns: those that pyarrow can read by itself are read from the bodies, at once if possible."""
        easy = pa.schema([field for field in self.columns() if field.name not in columns])
        asked = pa.schema([(field.name, as_text(field.type)) for field in easy])
        node = Struct({name: self._fields[name] for name in easy.names})
        good: list[pa.RecordBatch] = []
        bad: Failed = {}
        pieces = [(0, len(screened.bodies))]
        while pieces:
            lo, hi = pieces.pop()
            try:
                good.append(cast(read(screened.bodies.slice(lo, hi - lo), asked, "ignore"), easy))
            except pa.ArrowInvalid:  # 1.0 for an integer, a time in small letters, a key that is there twice
                if hi - lo > FEW:
                    pieces += [((lo + hi) // 2, hi), (lo, (lo + hi) // 2)]
                    continue
                found, wrong = singly(screened.bodies.slice(lo, hi - lo), node, asked, easy)
                good.append(found)
                bad |= {lo + at: why for at, why in wrong.items()}
        rows = (
            good[0] if len(good) == 1 else pa.concat_batches(good) if good else cast(read(_NONE, asked, "ignore"), easy)
        )
        keep = np.ones(len(screened.bodies), bool)
        keep[list(bad)] = False
        screened.drop(bad)
        arrays = [
            pa.array(columns[field.name], field.type).filter(pa.array(keep))
            if field.name in columns
            else rows.column(field.name)
            for field in self.columns()
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.columns())


_NONE = pa.array([], pa.binary())


def _with_constants(bodies: pa.Array) -> Positions:
    """The bodies that may hold NaN or Infinity, which pyarrow reads, also where it ignores them."""
    edges, data = spans(bodies)
    at = np.flatnonzero((data[:-2] == 0x4E) | (data[:-2] == 0x49))
    at = at[((data[at + 1] == 0x61) & (data[at + 2] == 0x4E)) | ((data[at + 1] == 0x6E) & (data[at + 2] == 0x66))]
    found: Positions = np.searchsorted(edges, at, side="right") - 1
    return found


def _with_huge_numbers(bodies: pa.Array) -> Positions:
    """The bodies that may hold a number beyond the range of double, which pyarrow passes over in what it ignores."""
    edges, data = spans(bodies)
    is_digit = (data - 0x30) < 10
    power = np.flatnonzero(is_digit[:-4] & ((data[1:-3] | 0x20) == 0x65) & is_digit[3:-1])
    follows = data[power + 2]
    power = power[((follows == 0x2B) & is_digit[power + 4]) | (is_digit[power + 2] & is_digit[power + 4])]
    marks = np.arange(0, len(data) - _MANY_DIGITS, _MANY_DIGITS)
    marks = marks[is_digit[marks] & is_digit[marks + _MANY_DIGITS]]
    marks = marks[is_digit[marks[:, None] + np.arange(_MANY_DIGITS)].all(axis=1)]
    found: Positions = np.unique(np.searchsorted(edges, np.concatenate([power, marks]), side="right") - 1)
    return found


def _no_one(bodies: pa.Array) -> Positions:
    return np.empty(0, np.int64)


def _fields(schema: WireSchema) -> Struct:
    """The columns; of a schema whose keywords hold what they may not hold, the validator says which."""
    try:
        return fields_of(schema)
    except (AttributeError, TypeError) as error:
        _validator(schema)
        raise SchemaError(
            "the JSON Schema cannot be used: something in it is of another kind than its keyword asks for",
            hint="correct the schema",
        ) from error


@lru_cache
def _validator(schema: WireSchema) -> Any:
    """What validates values by a schema; nothing is fetched from elsewhere."""
    try:
        registry = jsonschema_rs.Registry([(name, json.loads(each.text)) for name, each in _references(schema)])
        return jsonschema_rs.validator_for(
            json.loads(schema.text), validate_formats=True, registry=registry, offline=True
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise SchemaError(f"the JSON Schema cannot be used: {reason}", hint="correct the schema") from error


def _references(schema: WireSchema) -> list[tuple[str, WireSchema]]:
    return [pair for name, each in schema.references for pair in ((name, each), *_references(each))]


def _invalid(validator: Any, bodies: pa.Array, keep: bool) -> tuple[Failed, list[Any]]:
    """What is wrong with the bodies that are not JSON or not valid, and, if asked for, the values of the others."""
    bad: Failed = {}
    kept: list[Any] = []
    for at, body in enumerate(bodies.to_pylist()):
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            bad[at] = explain(body)
            continue
        if not validator.is_valid(found):
            bad[at] = _broken(validator, found)
        elif keep:
            kept.append(found)
    return bad, kept


def _broken(validator: Any, found: Any) -> tuple[str, str]:
    """The rule that a value breaks first, by its place, and where."""
    errors = validator.iter_errors(found)
    error = min(errors, key=lambda each: (list(map(str, each.instance_path)), list(map(str, each.schema_path))))
    where = "".join(f"/{_shown(each)}" for each in error.instance_path) or "the object"
    keyword = error.kind.name
    say = _REASONS.get(keyword)
    return f"json_schema.{keyword}", f"{where} " + (say(error) if say else f"breaks {keyword!r} of the schema")


def _limit(text: str) -> Callable[[Any], str]:
    return lambda error: text.format(error.kind.limit)


def _another_type(error: Any) -> str:
    """Which type came and which ones may come; a number is called whole only if the value is."""
    return (
        f"is {_ARTICLES[_TYPES[type(error.instance)]]}, not {' or '.join(_ARTICLES[each] for each in error.kind.types)}"
    )


def _unexpected(error: Any) -> str:
    names = error.kind.unexpected
    shown = ", ".join(f"'{_shown(each)}'" for each in names[:3])
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"has {shown}{more}, which the schema does not allow"


def _shown(name: object) -> str:
    """A name of the payload's as reasons say it: short, on one line."""
    text = str(name)
    return printable(text if len(text) <= 40 else f"{text[:39]}…")


_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"
}  # fmt: skip
_ARTICLES = {each: f"{'an' if each[0] in 'aio' else 'a'} {each}" for each in _TYPES.values()} | {"null": "null"}

_REASONS: dict[str, Callable[[Any], str]] = {
    "type": _another_type,
    "required": lambda error: f"lacks the required property {error.kind.property!r}",
    "additionalProperties": _unexpected,
    "unevaluatedProperties": _unexpected,
    "minimum": _limit("is below the minimum {}"),
    "maximum": _limit("is above the maximum {}"),
    "exclusiveMinimum": _limit("is not above {}"),
    "exclusiveMaximum": _limit("is not below {}"),
    "multipleOf": lambda error: f"is no multiple of {error.kind.multiple_of}",
    "minLength": _limit("has fewer characters than {}"),
    "maxLength": _limit("has more characters than {}"),
    "minItems": _limit("has fewer items than {}"),
    "maxItems": _limit("has more items than {}"),
    "minProperties": _limit("has fewer members than {}"),
    "maxProperties": _limit("has more members than {}"),
    "uniqueItems": lambda error: "has two equal items",
    "pattern": lambda error: f"does not match the pattern '{_shown(error.kind.pattern)}'",
    "format": lambda error: f"is not of the format '{_shown(error.kind.format)}'",
    "enum": lambda error: f"is none of the {len(error.kind.options):,} values that the schema lists",
    "const": lambda error: "is not the value that the schema fixes",
    "anyOf": lambda error: "fits no part of 'anyOf' of the schema",
    "falseSchema": lambda error: "is not allowed by the schema",
}
"""What is said of a keyword that a value breaks: names and bounds, never the value."""


def _refusal(bad: Failed, rows: int) -> DataError:
    first = min(bad)
    error = DataError(
        f"{len(bad):,} of {rows:,} rows break the JSON Schema; in the first of them, row {first}, {bad[first][1]}",
        code="PEN-3001",
        hint="change the values in the route's SQL, or the schema",
    )
    error.count = len(bad)
    return error


def _members(names: list[str], columns: list[pa.Array], rows: int, node: Struct) -> pa.Array:
    """One JSON object per row; nulls of members that are not required are left out: few schemas allow them."""
    texts = []
    for name, column in zip(names, columns, strict=True):
        text = _text(column, node.get(name, ANY), name)
        texts.append(pc.fill_null(text, "null") if name in node.required else text)
    return members(names, texts, rows, skip_nulls=True)


def _text(column: pa.Array, node: Node, name: str) -> pa.Array:
    """The JSON text of each value, null for nulls."""
    kind = column.type
    if node == ANY and types.is_string(kind):
        return column
    if isinstance(node, Struct) and types.is_struct(kind):
        return with_nulls_of(column, _members([field.name for field in kind], column.flatten(), len(column), node))
    if isinstance(node, list) and types.is_list(kind):
        items = pc.fill_null(_text(items_of(column), node[0], name), "null")
        return list_text(column, items)
    if isinstance(node, Map) and types.is_map(kind):
        keys, values = entries(column)
        return map_text(column, keys, pc.fill_null(_text(values, node.values, name), "null"))
    return with_nulls_of(column, text_of(column, name))
