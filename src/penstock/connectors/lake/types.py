"""Arrow's types as a lake format stores them: one walk over nested types, and a table of simple ones per format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import types

from penstock.errors import DataError, SchemaError, reason_of
from penstock.sink import Topic

Rule = tuple[Callable[[pa.DataType], bool], pa.DataType | None]
"""Which types it is about, and the type that holds all their values; None: the type itself."""

COMMON: tuple[Rule, ...] = (
    (types.is_boolean, None),
    (types.is_float16, pa.float32()),
    (types.is_floating, None),
    (types.is_date, pa.date32()),
    (types.is_string, None),
    (types.is_large_string, pa.string()),
    (types.is_string_view, pa.string()),
    (types.is_binary, None),
    (types.is_large_binary, pa.binary()),
    (types.is_binary_view, pa.binary()),
)
"""What every lake format has in common."""

MAX_DEPTH = 42
"""Levels of structs, lists and maps, the row included: Delta's readers give up on metadata that is nested deeper."""


@dataclass(frozen=True)
class LakeTypes:
    """The types of one lake format."""

    lake: str
    simple: tuple[Rule, ...]
    """The first rule that applies counts."""

    def schema(self, topic: Topic, schema: Iterable[pa.Field]) -> pa.Schema:
        """
        The columns in types of the lake that hold every value; refused if a type has none.

        Columns of type null are left out until a value shows their type.
        """
        kept = [each for each in schema if not types.is_null(each.type)]
        return pa.schema(
            [
                pa.field(each.name, self.type(topic, each.name, each.type, 1 + types.is_nested(each.type)))
                for each in kept
            ]
        )

    def batch(self, topic: Topic, batch: pa.RecordBatch, without: Collection[str] = ()) -> pa.RecordBatch:
        """The rows in types of the lake, without loss, and without some columns and those of type null."""
        kept = [
            (field, column)
            for field, column in zip(batch.schema, batch.columns, strict=True)
            if not types.is_null(field.type) and field.name not in without
        ]
        schema = self.schema(topic, [field for field, _ in kept])
        try:
            columns = [
                column if column.type == field.type else column.cast(field.type)
                for field, (_, column) in zip(schema, kept, strict=True)
            ]
        except pa.ArrowInvalid as error:
            raise DataError(f"a value of {topic} does not fit its column in {self.lake}: {reason_of(error)}") from error
        return pa.RecordBatch.from_arrays(columns, schema=schema)  # types are equal whatever their parts are called

    def type(self, topic: Topic, name: str, kind: pa.DataType, depth: int = 1) -> pa.DataType:
        """The type that holds every value of `kind`."""
        if depth > MAX_DEPTH:
            raise SchemaError(
                f"the column {name.partition('.')[0]!r} of {topic} is nested more than {MAX_DEPTH} levels deep",
                code="PEN-4002",
                hint="readers could not open such a table: keep the part that is nested so deep as text",
            )

        def inner(kind: pa.DataType, part: str = "") -> pa.DataType:
            return self.type(topic, f"{name}.{part}" if part else name, kind, depth + types.is_nested(kind))

        if isinstance(kind, pa.BaseExtensionType):
            return inner(kind.storage_type)
        if types.is_dictionary(kind):
            return inner(kind.value_type)
        if types.is_timestamp(kind) and kind.unit != "ns":
            return pa.timestamp("us", "UTC" if kind.tz else None)
        if types.is_decimal(kind) and kind.precision <= 38:
            return pa.decimal128(kind.precision, kind.scale)
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return pa.list_(pa.field("element", inner(kind.value_type)))
        if types.is_map(kind):
            return pa.map_(inner(kind.key_type), inner(kind.item_type))
        if types.is_struct(kind):
            fields = [kind.field(position) for position in range(kind.num_fields)]
            return pa.struct([pa.field(each.name, inner(each.type, each.name)) for each in fields])
        for is_kind, stored in self.simple:
            if is_kind(kind):
                return stored or kind
        raise SchemaError(
            f"the column {name!r} of {topic} is {kind}, which {self.lake} cannot hold without loss",
            code="PEN-4002",
            hint="cast it in the route's SQL",
        )


def has_all(old: pa.DataType, new: pa.DataType) -> bool:
    """True if a nested type has all that the old one has, of the same types, in the same order, and maybe more fields."""
    if types.is_struct(old) and types.is_struct(new):
        after = {each.name: each.type for each in new}
        common = [each.name for each in new if old.get_field_index(each.name) >= 0]
        same = common == [each.name for each in old]
        return same and all(has_all(each.type, after[each.name]) for each in old)
    if types.is_list(old) and types.is_list(new):
        return has_all(old.value_type, new.value_type)
    return bool(old == new)
