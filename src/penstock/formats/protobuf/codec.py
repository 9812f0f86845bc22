"""One message type: payloads to rows and back in bulk, and which payloads of a batch are at fault."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import ptars
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from penstock.errors import DataError, SchemaError
from penstock.formats import varint
from penstock.formats.exact import beyond_years
from penstock.formats.pieces import record_batch
from penstock.formats.protobuf import columns
from penstock.formats.protobuf.files import message_names, pool_of
from penstock.formats.protobuf.groups import as_messages, grouped, groups_close, has_groups, ungrouped
from penstock.formats.protobuf.repeats import can_repeat, lacks_a_value, repeats
from penstock.formats.varint import Ints

WIRE = ("protobuf.wire", "the payload is no Protobuf message: it is cut off, or not made of fields")
GROUPS = ("protobuf.wire", "a group of the payload is closed by the end of another, or a field has too large a number")
CONTENT = ("protobuf.content", "a field of the payload is malformed, or its text is no UTF-8")
TIMES = ("protobuf.range", "a Timestamp outside the years 1 to 9999, or a Duration of more than ten thousand years")

_CONFIG = ptars.PtarsConfig(enum_repr="string", timestamp_unit="us", duration_unit="us")
_PROBE = "penstock_probe"


@dataclass(frozen=True)
class Codec:
    message: Descriptor
    """As the schema has it; the decoder knows free-form fields as bytes."""
    handler: Any
    nothing: Any
    """Decodes a message without fields: says whether something is wrong with the outermost layer."""
    shell: Any
    """Class of a message that repeats this one: a parser stops at the first that is wrong."""
    schema: pa.Schema
    merges: Any = None
    """Class of the message, where it can hold something twice that counts once; it has free-form fields as bytes."""
    has_groups: bool = False
    """The decoder passes groups over: it is given messages in their place."""

    def decode(self, bodies: pa.Array) -> tuple[pa.RecordBatch, dict[int, tuple[str, str]]]:
        """
        Rows of a binary array without nulls, and what is wrong with those that are missing.

        The decoder names no payload that it refuses, and takes some that are wrong. So the official parser, which only
        looks, goes over the batch first; what it refuses is judged one by one. Payloads that the decoder alone refuses
        are found by halves.
        """
        places = _suspects(self.shell, bodies)
        suspected = bodies.take(pa.array(places, pa.int64())).to_pylist()
        bad = {at: why for at, body in zip(places, suspected, strict=True) if (why := self._wrong(body))}
        left, good = _without(list(bad), np.arange(len(bodies)), bodies)
        if self.has_groups:
            good = pa.array([ungrouped(each, self.message) for each in good.to_pylist()], pa.binary())
        rows = self._attempt(good)
        if rows is None and self.merges is not None:
            good = self._mended(good)
            rows = self._attempt(good)
        if rows is None:
            refused = self._halves(good, 0)
            bad |= {int(left[at]): CONTENT for at in refused}
            left, good = _without(refused, left, good)
            rows = self._widened(self._read(good), len(good))
        odd = np.logical_or.reduce([np.zeros(len(left), bool), *map(beyond_years, rows.columns)])
        if odd.any():
            bad |= {int(at): TIMES for at in left[odd]}
            rows = rows.filter(pa.array(~odd))
        return rows, bad

    def _wrong(self, body: bytes) -> tuple[str, str] | None:
        """What is wrong with a payload that the official parser refuses; None: the decoder knows better."""
        if not _takes(self.nothing, body):
            return WIRE
        if not _takes(self.handler, body):
            return CONTENT
        if not groups_close(body, self.message):
            return GROUPS
        return CONTENT if self.has_groups else None

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        given = rows.schema.names
        native = self.handler.schema()
        columns.refuse_extra(given, native.names, "")
        self._refuse_repeats(rows)
        arrays = []
        for name in given:
            field = self.message.fields_by_name[name]
            column = columns.mapped(rows.column(name), field, name, columns.encodable)
            arrays.append(columns.narrowed(column, native.field(name).type, name))
        fields = [pa.field(name, array.type) for name, array in zip(given, arrays, strict=True)]
        if not arrays:
            return pa.array([b""] * rows.num_rows, pa.binary())
        bodies = self.handler.record_batch_to_array(pa.record_batch(arrays, pa.schema(fields))).cast(pa.binary())
        if self.has_groups:
            bodies = pa.array([grouped(each, self.message) for each in bodies.to_pylist()], pa.binary())
        return bodies

    def _attempt(self, bodies: pa.Array) -> pa.RecordBatch | None:
        try:
            return self._widened(self._read(bodies), len(bodies))
        except ValueError:
            return None

    def _mended(self, bodies: pa.Array) -> pa.Array:
        """The payloads that the decoder refuses as the official parser writes them, and all others as they came."""
        found = bodies.to_pylist()
        found = [_whole(self.merges, each) if lacks_a_value(each, self.message) else each for each in found]
        for at in self._halves(pa.array(found, pa.binary()), 0):
            found[at] = _whole(self.merges, found[at])
        return pa.array(found, pa.binary())

    def _read(self, bodies: pa.Array) -> pa.RecordBatch:
        """
        What the decoder makes of payloads; raises ValueError if it refuses one.

        The decoder keeps every field of a oneof and every entry of a map that a payload has, also if a later one replaces
        it. Such payloads are merged by the official parser first: they are rare, and it takes them one by one.
        """
        rows = _asked(self.handler.array_to_record_batch, bodies)
        if self.merges is None:
            return rows
        found = repeats(dict(zip(rows.schema.names, rows.columns, strict=True)), self.message, len(bodies))
        twice = np.flatnonzero(np.logical_or.reduce([mask for _, mask in found]))
        if not len(twice):
            return rows
        merged = [_merged(self.merges, each) for each in bodies.take(pa.array(twice)).to_pylist()]
        again = _asked(self.handler.array_to_record_batch, pa.array(merged, pa.binary()))
        index = np.arange(len(bodies))
        index[twice] = len(bodies) + np.arange(len(twice))
        both = zip(rows.columns, again.columns, strict=True)
        arrays = [pa.concat_arrays(pair).take(pa.array(index)) for pair in both]
        return record_batch(arrays, rows.schema, len(bodies))

    def _refuse_repeats(self, rows: pa.RecordBatch) -> None:
        """A message holds one field of a oneof, and one value of a key: a row with two would lose one."""
        given = dict(zip(rows.schema.names, rows.columns, strict=True))
        for what, mask in repeats(given, self.message, rows.num_rows):
            if mask.any():
                raise DataError(f"rows have {what}", hint="fill one of them per row")

    def _widened(self, rows: pa.RecordBatch, count: int) -> pa.RecordBatch:
        arrays = []
        for target in self.schema:
            column, field = rows.column(target.name), self.message.fields_by_name[target.name]
            if columns.has_free_form(field):
                column = columns.mapped(column, field, target.name, columns.to_json)
            arrays.append(columns.widened(column, target.type))
        return record_batch(arrays, self.schema, count)

    def _halves(self, bodies: pa.Array, first: int) -> list[int]:
        if self._attempt(bodies) is not None:
            return []
        if len(bodies) == 1:
            return [first]
        middle = len(bodies) // 2
        return self._halves(bodies.slice(0, middle), first) + self._halves(bodies.slice(middle), first + middle)


def _asked(decode: Any, bodies: Any) -> Any:
    """
    What the decoder says; a panic within it is a refusal like any other.

    It panics at an entry of a map that lacks its value, where the value is a message: some writers leave out what is empty.
    """
    try:
        return decode(bodies)
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise


def _merged(message_class: Any, body: bytes) -> bytes:
    message = message_class()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    message.DiscardUnknownFields()  # the parser sets entries of a map aside that it cannot use
    data: bytes = message.SerializePartialToString(deterministic=True)
    return data


def _whole(message_class: Any, body: bytes) -> bytes:
    """As the official parser writes it, with every entry of a map whole; a payload that it refuses as it is."""
    try:
        return _merged(message_class, body)
    except ValueError:
        return body


def _takes(handler: Any, body: bytes) -> bool:
    try:
        _asked(handler.list_to_record_batch, [body])
    except ValueError:
        return False
    return True


def _without(places: list[int], left: Ints, bodies: pa.Array) -> tuple[Ints, pa.Array]:
    if not places:
        return left, bodies
    is_good = np.ones(len(left), bool)
    is_good[places] = False
    return left[is_good], bodies.filter(pa.array(is_good))


def _suspects(shell: Any, bodies: pa.Array) -> list[int]:
    """Payloads that the parser refuses: as repeated fields of one message, which it reads up to the first bad one."""
    sizes = pc.binary_length(bodies).to_numpy(zero_copy_only=False).astype(np.int64)
    joined = pc.binary_join_element_wise(pa.scalar(b"\x0a"), varint.write(sizes), bodies, pa.scalar(b""))
    if not len(joined):
        return []
    edges = np.frombuffer(joined.buffers()[1], np.int32, len(joined) + 1)
    data = memoryview(joined.buffers()[2])
    found: list[int] = []
    at = 0
    while at < len(bodies):
        message = shell()
        try:
            message.MergeFromString(data[edges[at] : edges[-1]])
            break
        except DecodeError:
            place = at + len(message.rows) - 1
        if place < at:
            return list(range(len(bodies)))  # the parser does not say how far it came: look at each
        found.append(place)
        at = place + 1
    return found


@lru_cache(maxsize=64)
def codec_for(data: bytes, name: str) -> Codec:
    """Of the message `name` in a descriptor set; without a name, of its first message."""
    names = message_names(data)
    if not names:
        raise SchemaError("the Protobuf schema has no message", hint="add a message to the .proto file")
    full = name or names[(0,)]
    files = descriptor_pb2.FileDescriptorSet.FromString(data)
    edition = next((each.name for each in files.file if each.syntax == "editions"), None)
    if edition is not None:
        raise SchemaError(
            f"the Protobuf file {edition} is of an edition, which is not read yet",
            hint='write it with syntax = "proto3" or "proto2": the bytes on the wire are the same',
        )
    try:
        message = pool_of(files).FindMessageTypeByName(full)
    except KeyError:
        raise SchemaError(
            f"the Protobuf schema has no message {full}", hint=f"set message to one of {', '.join(names.values())}"
        ) from None
    columns.refuse_too_many_fields(message)
    swapped = columns.without_free_form(files)
    _add_probe(swapped, message)
    shell = message_factory.GetMessageClass(pool_of(swapped).FindMessageTypeByName(f"{_PROBE}.Rows"))
    is_grouped = has_groups(message)
    if is_grouped:
        swapped = as_messages(swapped)
    pool = pool_of(swapped)
    native = pool.FindMessageTypeByName(full)
    probe = pool.FindMessageTypeByName(f"{_PROBE}.Nothing")
    handlers = ptars.HandlerPool([native.file, probe.file], _CONFIG)
    handler = handlers.get_for_message(native)
    schema = pa.schema([columns.wide_field(each, message) for each in handler.schema()])
    merges = None
    if can_repeat(message):
        numbers = pool_of(columns.with_numbers_for_enums(swapped))
        merges = message_factory.GetMessageClass(numbers.FindMessageTypeByName(full))
    return Codec(message, handler, handlers.get_for_message(probe), shell, schema, merges, is_grouped)


def _add_probe(files: descriptor_pb2.FileDescriptorSet, message: Descriptor) -> None:
    """A file of our own with a message that has no fields, and one that repeats the given one."""
    proto = descriptor_pb2.FieldDescriptorProto
    file = files.file.add(name=f"{_PROBE}.proto", package=_PROBE, syntax="proto3", dependency=[message.file.name])
    file.message_type.add(name="Nothing")
    field = file.message_type.add(name="Rows").field.add(name="rows", number=1, type_name=f".{message.full_name}")
    field.label, field.type = proto.LABEL_REPEATED, proto.TYPE_MESSAGE
