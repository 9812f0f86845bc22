"""Groups, an old kind of field that is written as two tags: whether each is closed by its own end."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor


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
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 1:
            at += 8
        elif kind == 2:
            size, at = _varint(data, at)
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


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
