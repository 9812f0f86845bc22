"""
Protobuf: fields are known by their numbers, and types by how they are written.

What is compatible is what Confluent's registry takes for it, and stricter where data would be lost without a word: a
field that got another number, and a repeated field that is read as a single one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Incompatibility, invalid

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

_GROUPS = (
    {"int32", "uint32", "int64", "uint64", "bool", "enum"},
    {"sint32", "sint64"},
    {"fixed32", "sfixed32"},
    {"fixed64", "sfixed64"},
    {"string", "bytes"},
)
"""Types of one group are written alike, and read as each other; a number that does not fit is cut off."""

_NUMERIC = frozenset().union(*_GROUPS[:4], {"float", "double"})


@dataclass(frozen=True)
class File:
    """The messages of a schema, by their names without the package: that may change."""

    messages: Mapping[str, DescriptorProto]
    package: str


def parse(schema: WireSchema) -> File:
    """The messages that the schema itself defines, and those of its references."""
    files = _files(schema)
    package = files[-1].package
    messages: dict[str, Any] = {}
    for file in files:
        prefix = f"{file.package}." if file.package and file.package != package else ""
        for message in file.message_type:
            messages |= _named(message, prefix)
    return File(messages, package)


def reads(reader: File, writer: File) -> list[Incompatibility]:
    """Why a reader cannot use a writer's data; empty: it can use all that it knows of."""
    found: list[Incompatibility] = []
    for name, message in writer.messages.items():
        if name in reader.messages:
            found += _message(name, reader, writer)
        elif not message.options.map_entry:
            found.append(Incompatibility(name, "protobuf.message_removed", "the message is missing"))
    return found


def reused(old: File, new: File) -> list[Incompatibility]:
    """Numbers and names that the old schema had set aside for ever, and the new one uses."""
    return [
        Incompatibility(f"{name}.{field.name}", "protobuf.reserved", f"the earlier version reserved {what}")
        for name, message in new.messages.items()
        if name in old.messages
        for field in message.field
        for what in _reserved(old.messages[name], field)
    ]


def _files(schema: WireSchema) -> Sequence[FileDescriptorProto]:
    """What the schema imports, and last itself."""
    try:
        from google.protobuf.descriptor_pb2 import FileDescriptorSet

        from penstock.formats.protobuf.files import compiled
    except ImportError as error:
        raise ConfigError(
            f"the schema type protobuf needs the package {error.name}, which is not installed",
            code="PEN-1007",
            hint="pip install 'penstock[protobuf]'",
        ) from error
    try:
        return list(FileDescriptorSet.FromString(compiled(schema)).file)
    except SchemaError as error:
        raise invalid(schema, error.message) from error


def _named(message: DescriptorProto, prefix: str) -> dict[str, DescriptorProto]:
    found = {f"{prefix}{message.name}": message}
    for each in message.nested_type:
        found |= _named(each, f"{prefix}{message.name}.")
    return found


def _message(name: str, reader: File, writer: File) -> Iterator[Incompatibility]:
    mine, theirs = reader.messages[name], writer.messages[name]
    before = {each.number: each for each in theirs.field}
    numbers = {each.name: each.number for each in theirs.field}
    for field in mine.field:
        path, written = f"{name}.{field.name}", before.get(field.number)
        if field.label == field.LABEL_REQUIRED and (written is None or written.label != field.LABEL_REQUIRED):
            yield Incompatibility(path, "protobuf.required", "the field is required, and the writer may leave it out")
        if numbers.get(field.name, field.number) != field.number:
            what = f"the field has the number {field.number}, and is written with {numbers[field.name]}"
            yield Incompatibility(path, "protobuf.number", what)
        if written is not None:
            yield from _field(path, field, written, reader, writer)
    yield from _one_ofs(name, mine, theirs)


def _field(
    path: str, mine: FieldDescriptorProto, theirs: FieldDescriptorProto, reader: File, writer: File
) -> Iterator[Incompatibility]:
    kind, written = _kind(mine), _kind(theirs)
    types = _type(mine, reader), _type(theirs, writer)
    if kind != written and not any({kind, written} <= group for group in _GROUPS):
        yield Incompatibility(path, "protobuf.type", f"{types[1]} cannot be read as {types[0]}")
    elif types[0] != types[1] and kind == written:
        yield Incompatibility(path, "protobuf.named_type", f"{types[1]} cannot be read as {types[0]}")
    is_list, was_list = (each.label == each.LABEL_REPEATED for each in (mine, theirs))
    if is_list != was_list and (kind in _NUMERIC or was_list):
        words = ("a repeated field", "a single one")
        what = f"{words[not was_list]} cannot be read as {words[not is_list]}"
        yield Incompatibility(path, "protobuf.label", what)


def _one_ofs(name: str, mine: DescriptorProto, theirs: DescriptorProto) -> Iterator[Incompatibility]:
    """Of the fields that share a oneof in the reader, the writer may set only one: the others would be lost."""
    written = {each.number: each for each in theirs.field}
    for place, one_of in enumerate(mine.oneof_decl):
        inside = [each for each in mine.field if _one_of(each) == place]
        known = [written[each.number] for each in inside if each.number in written]
        homes = {_one_of(each) for each in known}
        if len(known) > 1 and (len(homes) > 1 or None in homes):
            what = "fields that could be set together share the oneof now"
            yield Incompatibility(f"{name}.{one_of.name}", "protobuf.oneof_moved", what)
    numbers = {each.number for each in mine.field}
    names = {each.name for place, each in enumerate(mine.oneof_decl) if any(_one_of(f) == place for f in mine.field)}
    for each in theirs.field:
        home = _one_of(each)
        if home is not None and each.number not in numbers and theirs.oneof_decl[home].name in names:
            what = (
                f"the field is gone from the oneof {theirs.oneof_decl[home].name!r}: it would look as if none were set"
            )
            yield Incompatibility(f"{name}.{each.name}", "protobuf.oneof_field_removed", what)


def _one_of(field: FieldDescriptorProto) -> int | None:
    """Which oneof a field is in; the one that `optional` makes is none."""
    return field.oneof_index if field.HasField("oneof_index") and not field.proto3_optional else None


def _kind(field: FieldDescriptorProto) -> str:
    return str(field.Type.Name(field.type)).removeprefix("TYPE_").lower()


def _type(field: FieldDescriptorProto, file: File) -> str:
    """The type of a field as people know it: without the package, and a map by what it holds."""
    kind = _kind(field)
    if kind not in ("message", "enum", "group"):
        return kind
    return str(field.type_name).lstrip(".").removeprefix(f"{file.package}." if file.package else "")


def _reserved(old: DescriptorProto, field: FieldDescriptorProto) -> Iterator[str]:
    if any(each.start <= field.number < each.end for each in old.reserved_range):
        yield f"the number {field.number}"
    if field.name in old.reserved_name:
        yield f"the name {field.name!r}"
