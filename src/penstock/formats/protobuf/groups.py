"""Groups, an old kind of field that is written between two tags: whether each is closed, and the same fields as messages."""

from __future__ import annotations

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor

MAX_NUMBER = 2**29 - 1

_PROTO = descriptor_pb2.FieldDescriptorProto


def has_groups(message: Descriptor, above: frozenset[str] = frozenset()) -> bool:
    """True if a field of the message, or of one within it, is a group."""
    if message.full_name in above:
        return False
    inner = above | {message.full_name}
    return any(
        each.type == FieldDescriptor.TYPE_GROUP
        or (each.message_type is not None and has_groups(each.message_type, inner))
        for each in message.fields
    )


def as_messages(files: descriptor_pb2.FileDescriptorSet) -> descriptor_pb2.FileDescriptorSet:
    """The files with every group as a message: the decoder passes groups over."""
    found = descriptor_pb2.FileDescriptorSet()
    found.CopyFrom(files)
    pending = [message for file in found.file for message in file.message_type]
    while pending:
        message = pending.pop()
        pending += message.nested_type
        for field in message.field:
            if field.type == _PROTO.TYPE_GROUP:
                field.type = _PROTO.TYPE_MESSAGE
    return found


def ungrouped(body: bytes, message: Descriptor) -> bytes:
    """A payload that the official parser takes, with its groups as messages: the length first, and no end."""
    return _ungrouped(body, 0, message, frozenset())[0]


def grouped(body: bytes, message: Descriptor) -> bytes:
    """The other way round."""
    out: list[bytes] = []
    at = 0
    while at < len(body):
        first = at
        tag, at = varint(body, at)
        size, start = varint(body, at) if tag & 7 in (0, 2) else (0, at)
        at = start + {1: 8, 2: size, 5: 4}.get(tag & 7, 0)
        field = message.fields_by_number[tag >> 3]
        if field.message_type is None or not _holds_groups(field):
            out.append(body[first:at])
            continue
        inner = grouped(body[start:at], field.message_type)
        if field.type == FieldDescriptor.TYPE_GROUP:
            out += [_written(field.number << 3 | 3), inner, _written(field.number << 3 | 4)]
        else:
            out += [_written(tag), _written(len(inner)), inner]
    return b"".join(out)


def _ungrouped(data: bytes, at: int, message: Descriptor | None, above: frozenset[str]) -> tuple[bytes, int]:
    """
    Up to the end of the group that `at` is in, or of the data; a group or message that is not known is passed over.

    `above` are the messages that this one is in: one of them again is a column of bytes, which stay as they came.
    """
    out: list[bytes] = []
    above = above if message is None else above | {message.full_name}
    while at < len(data):
        first = at
        tag, at = varint(data, at)
        field = message.fields_by_number.get(tag >> 3) if message is not None else None
        kind = tag & 7
        if kind == 4:
            break
        if kind == 3:
            is_ours = field is not None and field.type == FieldDescriptor.TYPE_GROUP
            inner, at = _ungrouped(data, at, field.message_type if field is not None and is_ours else None, above)
            if is_ours:
                out += [_written(tag >> 3 << 3 | 2), _written(len(inner)), inner]
            continue
        size, start = varint(data, at) if kind in (0, 2) else (0, at)
        at = start + {1: 8, 2: size, 5: 4}.get(kind, 0)
        if field is None or field.message_type is None or field.type == FieldDescriptor.TYPE_GROUP:
            if field is None or field.type != FieldDescriptor.TYPE_GROUP:
                out.append(data[first:at])
        elif kind == 2 and field.message_type.full_name not in above and _holds_groups(field):
            inner, _ = _ungrouped(data[start:at], 0, field.message_type, above)
            out += [_written(tag), _written(len(inner)), inner]
        else:
            out.append(data[first:at])
    return b"".join(out), at


def _holds_groups(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_GROUP or has_groups(field.message_type)


def _written(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def groups_close(body: bytes, message: Descriptor) -> bool:
    """False if the end of one group closes another, in a payload or in a message within; of one that is made of fields."""
    pending: list[tuple[bytes, Descriptor]] = [(body, message)]
    try:
        while pending:
            if not _close(*pending.pop(), pending):
                return False
    except IndexError:  # it is cut off, which the decoder says
        pass
    return True


def _close(data: bytes, message: Descriptor, within: list[tuple[bytes, Descriptor]]) -> bool:
    groups: list[int] = []
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number > MAX_NUMBER:
            return False
        if kind == 0:
            _, at = varint(data, at)
        elif kind == 1:
            at += 8
        elif kind == 2:
            size, at = varint(data, at)
            field = None if groups else message.fields_by_number.get(number)
            if field is not None and field.message_type is not None:
                within.append((data[at : at + size], field.message_type))
            at += size
        elif kind == 3:
            groups.append(number)
        elif kind == 4:
            if not groups or groups.pop() != number:
                return False
        elif kind == 5:
            at += 4
    return not groups


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
