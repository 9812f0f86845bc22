"""Between what the decoder gives and the columns of a topic: signed numbers, JSON for free-form values, null where unset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pb2, json_format, struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from pyarrow import types

from penstock.errors import DataError, SchemaError

FREE_FORM: dict[str, Callable[[], Any]] = {
    "google.protobuf.Struct": struct_pb2.Struct,
    "google.protobuf.Value": struct_pb2.Value,
    "google.protobuf.ListValue": struct_pb2.ListValue,
}
"""Messages that hold any JSON: a column of JSON text."""

MAX_FIELDS = 20_000
"""Fields of a message with every message in it written out: a few lines can hold each other to billions."""

_PROTO = descriptor_pb2.FieldDescriptorProto


def refuse_too_many_fields(message: Descriptor) -> None:
    """Refuses a message that has too many fields; one within itself is a field of bytes there."""
    left = MAX_FIELDS
    pending: list[tuple[Descriptor, frozenset[str]]] = [(message, frozenset())]
    while pending:
        each, above = pending.pop()
        inner = above | {each.full_name}
        held = [field.message_type for field in each.fields if field.message_type is not None]
        pending += [(kind, inner) for kind in held if kind.full_name not in inner]
        left -= len(each.fields)
        if left < 0:
            raise SchemaError(
                f"the Protobuf message {message.full_name} has more than {MAX_FIELDS:,} fields "
                "with every message in it written out",
                hint="leave fields that you need no columns of out of your schema file: they are passed over in payloads",
            )


def without_free_form(files: descriptor_pb2.FileDescriptorSet) -> descriptor_pb2.FileDescriptorSet:
    """The files with every free-form field as bytes, which has the same encoding; it is still null where it is unset."""
    found = descriptor_pb2.FileDescriptorSet()
    found.CopyFrom(files)
    for file in found.file:
        if not file.name.startswith("google/protobuf/"):
            for message in file.message_type:
                _swap(message, file.syntax == "proto3")
    return found


def _swap(message: descriptor_pb2.DescriptorProto, is_proto3: bool) -> None:
    for field in message.field:
        if field.type_name.lstrip(".") not in FREE_FORM:
            continue
        field.type = _PROTO.TYPE_BYTES
        field.ClearField("type_name")
        is_plain = field.label == _PROTO.LABEL_OPTIONAL and not field.HasField("oneof_index")
        if is_proto3 and is_plain and not message.options.map_entry:
            field.proto3_optional = True
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")
    for inner in message.nested_type:
        _swap(inner, is_proto3)


def with_numbers_for_enums(files: descriptor_pb2.FileDescriptorSet) -> descriptor_pb2.FileDescriptorSet:
    """The files with every enum field as a number: the parser sets numbers without a name aside where proto2 has the enum."""
    found = descriptor_pb2.FileDescriptorSet()
    found.CopyFrom(files)
    pending = [message for file in found.file for message in file.message_type]
    while pending:
        message = pending.pop()
        pending += message.nested_type
        for field in message.field:
            if field.type == _PROTO.TYPE_ENUM:
                field.type = _PROTO.TYPE_INT32
                field.ClearField("type_name")
                field.ClearField("default_value")
    return found


def wide_type(kind: pa.DataType, field: FieldDescriptor | None, message: Descriptor | None) -> pa.DataType:
    """The column's type for the decoder's: `field` and `message` say what the bytes mean."""
    if types.is_struct(kind):
        assert message is not None
        return pa.struct([wide_field(each, message) for each in kind])
    if types.is_map(kind):
        assert message is not None
        value = message.fields_by_name["value"]
        key = wide_type(kind.key_type, None, None)
        return pa.map_(key, wide_type(kind.item_type, value, value.message_type))
    if types.is_list(kind):
        return pa.list_(wide_type(kind.value_type, field, message))
    if message is not None and message.full_name in FREE_FORM:
        return pa.string()
    return {pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0)}.get(kind, kind)


def wide_field(field: pa.Field, message: Descriptor) -> pa.Field:
    described = message.fields_by_name[field.name]
    return pa.field(field.name, wide_type(field.type, described, described.message_type))


def widened(array: pa.Array, target: pa.DataType) -> pa.Array:
    """A decoded column as the column's type has it; what is the same already is not copied."""
    kind = array.type
    if kind.equals(target):
        return array
    if types.is_struct(kind):
        children = [widened(array.field(i), target.field(i).type) for i in range(kind.num_fields)]
        return _rebuilt(array, target, 1, children)
    if types.is_map(kind):
        entry = pa.struct([target.key_field, target.item_field])
        parts = [widened(array.keys, target.key_type), widened(array.items, target.item_type)]
        pairs = pa.Array.from_buffers(entry, len(parts[0]), [None], 0, children=parts)
        return _rebuilt(array, target, 2, [pairs])
    if types.is_list(kind):
        return _rebuilt(array, target, 2, [widened(array.values, target.value_type)])
    if types.is_binary(kind) and types.is_string(target):
        raise AssertionError("free-form values are converted before")
    return array.cast(target)


def _rebuilt(array: pa.Array, target: pa.DataType, own: int, children: list[pa.Array]) -> pa.Array:
    if array.offset:
        array = pa.concat_arrays([array, array.slice(0, 0)])
    return pa.Array.from_buffers(target, len(array), array.buffers()[:own], array.null_count, 0, children)


Leaf = Callable[[pa.Array, FieldDescriptor, str], pa.Array]


def mapped(array: pa.Array, field: FieldDescriptor, path: str, leaf: Leaf) -> pa.Array:
    """The column with every value that is not itself nested given to `leaf`."""
    kind, message = array.type, field.message_type
    if types.is_map(kind) and message is not None:
        value = message.fields_by_name["value"]
        items = mapped(array.items, value, path, leaf)
        if items is array.items or items.equals(array.items):
            return array
        target = pa.map_(kind.key_type, items.type)
        entry = pa.struct([target.key_field, target.item_field])
        pairs = pa.Array.from_buffers(entry, len(items), [None], 0, children=[array.keys, items])
        return _rebuilt(array, target, 2, [pairs])
    if types.is_list(kind):
        values = mapped(array.values, field, path, leaf)
        return array if values is array.values else _rebuilt(array, pa.list_(values.type), 2, [values])
    if types.is_struct(kind) and message is not None and message.full_name not in FREE_FORM:
        names = [each.name for each in kind]
        refuse_extra(names, [each.name for each in message.fields], path)
        children = [
            mapped(array.field(i), message.fields_by_name[name], f"{path}.{name}", leaf) for i, name in enumerate(names)
        ]
        fields = [pa.field(name, child.type) for name, child in zip(names, children, strict=True)]
        return _rebuilt(array, pa.struct(fields), 1, children)
    return leaf(array, field, path)


def has_free_form(field: FieldDescriptor, above: frozenset[str] = frozenset()) -> bool:
    """True if a field, or one within it, is free-form: most columns need no look at their values."""
    message = field.message_type
    if message is None or message.full_name in above:
        return False
    inner = above | {message.full_name}
    return is_free_form(field) or any(has_free_form(each, inner) for each in message.fields)


def is_free_form(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name in FREE_FORM


def to_json(array: pa.Array, field: FieldDescriptor, path: str) -> pa.Array:
    """Free-form values from bytes to JSON text; other values as they are. Raises ValueError for one that is no JSON."""
    if not is_free_form(field) or not types.is_binary(array.type):
        return array
    make = FREE_FORM[field.message_type.full_name]
    return _by_value(array, pa.string(), lambda data: _json_text(make, data))


def encodable(array: pa.Array, field: FieldDescriptor, path: str) -> pa.Array:
    """Free-form values from JSON text to bytes. Refuses what the encoder would write as something else."""
    if field.enum_type is not None and not types.is_integer(array.type):
        names = pa.array([each.name for each in field.enum_type.values], pa.string())
        unknown = pc.unique(array.drop_null().cast(pa.string()))
        if pc.index_in(unknown, names).null_count:
            raise DataError(
                f"values in {path} are no name of the enum {field.enum_type.full_name}",
                hint="map them in the route's SQL",
            )
        return array
    if not is_free_form(field):
        message = field.message_type
        is_own = message is not None and message.file.package != "google.protobuf"
        if is_own and types.is_binary(array.type) and array.null_count < len(array):
            raise SchemaError(
                f"{path} is a {message.full_name} within another, which can be read but not written",
                hint="leave the column out in the route's SQL",
            )
        return array
    make = FREE_FORM[field.message_type.full_name]

    def encoded(text: str) -> bytes:
        try:
            data: bytes = json_format.Parse(text, make()).SerializeToString(deterministic=True)
        except json_format.ParseError as error:
            raise DataError(
                f"text in {path} is no JSON for {field.message_type.full_name}", hint="write a JSON object there"
            ) from error
        return data

    return _by_value(array, pa.binary(), encoded)


def _json_text(make: Callable[[], Any], data: bytes) -> str:
    message = make()
    try:
        message.ParseFromString(data)
        return str(json_format.MessageToJson(message, indent=None, sort_keys=True, ensure_ascii=False))
    except (DecodeError, json_format.SerializeToJsonError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _by_value(array: pa.Array, target: pa.DataType, convert: Callable[[Any], Any]) -> pa.Array:
    """Each value is converted once."""
    coded = array.dictionary_encode()
    values = pa.array([convert(each) for each in coded.dictionary.to_pylist()], target)
    return values.take(coded.indices)


def narrowed(array: pa.Array, target: pa.DataType, path: str) -> pa.Array:
    """A column as the encoder takes it."""
    kind = array.type
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if kind.equals(target):
        return array
    if types.is_null(kind) or not len(array):
        return pa.nulls(len(array), target)
    try:
        if types.is_struct(kind) and types.is_struct(target):
            return _narrow_struct(array, target, path)
        if types.is_map(kind) and types.is_map(target):
            parts = [narrowed(array.keys, target.key_type, path), narrowed(array.items, target.item_type, path)]
            made = pa.map_(parts[0].type, parts[1].type)
            entry = pa.struct([made.key_field, made.item_field])
            return _rebuilt(array, made, 2, [pa.Array.from_buffers(entry, len(parts[0]), [None], 0, children=parts)])
        if types.is_list(kind) and types.is_list(target):
            values = narrowed(array.values, target.value_type, path)
            return _rebuilt(array, pa.list_(values.type), 2, [values])
        if _is_text(kind) != _is_text(target) or types.is_nested(kind) or types.is_nested(target):
            raise _unfit(kind, target, path)
        return array.cast(target, safe=not types.is_temporal(target))
    except pa.ArrowInvalid as error:
        raise DataError(f"values in {path} are no {target}", hint="cast the column in the route's SQL") from error
    except pa.ArrowNotImplementedError as error:
        raise _unfit(kind, target, path) from error


def _narrow_struct(array: pa.Array, target: pa.DataType, path: str) -> pa.Array:
    names = [each.name for each in array.type]
    refuse_extra(names, [each.name for each in target], path)
    children = [
        narrowed(array.field(names.index(each.name)), each.type, f"{path}.{each.name}")
        if each.name in names
        else pa.nulls(len(array), each.type)
        for each in target
    ]
    fields = [pa.field(each.name, child.type) for each, child in zip(target, children, strict=True)]
    return _rebuilt(array, pa.struct(fields), 1, children)


def refuse_extra(names: list[str], known: list[str], path: str) -> None:
    extra = [name for name in names if name not in known]
    if extra:
        where = f"{path}." if path else ""
        raise SchemaError(
            f"the Protobuf message has no field {', '.join(where + name for name in extra)}",
            hint="add the field to the schema, or leave the column out in the route's SQL",
        )


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _unfit(kind: pa.DataType, target: pa.DataType, path: str) -> SchemaError:
    return SchemaError(
        f"the column {path} is {kind}, where the Protobuf message holds {target}",
        hint="cast the column in the route's SQL, or change the schema",
    )
