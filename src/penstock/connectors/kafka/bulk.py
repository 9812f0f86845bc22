"""
Read records in bulk: the client library's own structs, gathered by numpy, become Arrow without a Python object per record.

The library is the one inside `confluent_kafka`. What its header file promises is used as it is; the one field that it does not
promise (the time) is compared with the library's own answer for the first and last record of each batch, and if they differ
it is asked for the time of each. Where there is no such library, `available` is false and records are read one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_char, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError

from penstock.connectors.kafka.client import Place, failure
from penstock.connectors.kafka.library import library
from penstock.errors import ConfigError, ConnectorError

Ints = npt.NDArray[np.int64]

_CONSUMER = 1
_ERROR_TEXT = 512
_ERR, _TOPIC, _PARTITION, _PAYLOAD, _LENGTH, _KEY, _KEY_LENGTH, _OFFSET, _TIME = 0, 8, 16, 24, 32, 40, 48, 56, 96
"""Places of the fields in a message; all but the last are of the public struct."""
_FIRST_ADDRESS = 1 << 16
_LAST_ADDRESS = 1 << 48
"""Processes on ARM have their heap in the upper half of 48 bits, those on x86-64 use the lower half alone."""
_VIEW, _INLINE, _WINDOW = 16, 12, 30
"""Arrow's views: bytes of one, the longest value inside it, and the size of the buffers that others point into (as a power)."""


def available() -> bool:
    """Whether this process can read in bulk."""
    return library() is not None


@dataclass(frozen=True)
class Run:
    """Records of one partition that came one after the other, or what went wrong with it."""

    place: Place
    offsets: Ints
    keys: pa.Array
    payloads: pa.Array
    times: Ints
    attributes: pa.Array | None = None
    """Headers; None: they were not asked for."""
    error: KafkaError | None = None
    """At the first of `offsets`: the end of the partition, or a failure; then there are no records."""


class BulkConsumer:
    """A reader of given partitions; made and used in one thread of one process."""

    def __init__(self, settings: Mapping[str, Any], headers: bool = False) -> None:
        self._headers = headers
        self._client: int | None = None
        self._queue: int | None = None
        found = library()
        assert found is not None
        self._lib = found
        text = ctypes.create_string_buffer(_ERROR_TEXT)
        conf = found.rd_kafka_conf_new()
        for name, value in settings.items():
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            if found.rd_kafka_conf_set(conf, name.encode(), shown.encode(), text, _ERROR_TEXT):
                raise _not_made(KafkaError._INVALID_ARG, text)
        self._client = found.rd_kafka_new(_CONSUMER, conf, text, _ERROR_TEXT)
        if not self._client:
            raise _not_made(found.rd_kafka_last_error(), text)
        found.rd_kafka_poll_set_consumer(self._client)
        self._queue = found.rd_kafka_queue_get_consumer(self._client)
        self._names: dict[int, str] = {}
        self._memory64, self._memory32, self._memory8 = (_memory(kind) for kind in (np.int64, np.int32, np.uint8))

    def assign(self, starts: Mapping[Place, int]) -> None:
        listed = self._listed(list(starts))
        for (topic, partition), offset in starts.items():
            self._lib.rd_kafka_topic_partition_list_set_offset(listed, topic.encode(), partition, offset)
        self._lib.rd_kafka_assign(self._client, listed)
        self._lib.rd_kafka_topic_partition_list_destroy(listed)

    def pause(self, places: Sequence[Place]) -> None:
        listed = self._listed(places)
        self._lib.rd_kafka_pause_partitions(self._client, listed)
        self._lib.rd_kafka_topic_partition_list_destroy(listed)

    def consume(self, count: int, timeout_secs: float) -> list[Run]:
        """Up to so many records, copied into Arrow, in the order in which they came."""
        pointers = np.zeros(count, np.int64)
        got = self._lib.rd_kafka_consume_batch_queue(self._queue, int(timeout_secs * 1000), pointers.ctypes.data, count)
        if got <= 0:  # nothing came, or the library could not ask
            return []
        pointers = pointers[:got]
        try:
            return list(self._runs(pointers))
        finally:
            destroy = self._lib.rd_kafka_message_destroy
            for each in pointers.tolist():
                destroy(each)

    def close(self) -> None:
        client, queue, self._client, self._queue = self._client, self._queue, None, None
        if queue:
            self._lib.rd_kafka_queue_destroy(queue)
        if client:
            self._lib.rd_kafka_consumer_close(client)
            self._lib.rd_kafka_destroy(client)

    def _listed(self, places: Sequence[Place]) -> int:
        listed = self._lib.rd_kafka_topic_partition_list_new(len(places))
        for topic, partition in places:
            self._lib.rd_kafka_topic_partition_list_add(listed, topic.encode(), partition)
        return int(listed)

    def _runs(self, messages: Ints) -> Iterator[Run]:
        fields = {each: self._field(messages, each) for each in (_TOPIC, _OFFSET)}
        errors, partitions = (self._small(messages, each) for each in (_ERR, _PARTITION))
        new = np.ones(len(messages), bool)
        new[1:] = (fields[_TOPIC][1:] != fields[_TOPIC][:-1]) | (partitions[1:] != partitions[:-1])
        new |= errors != 0
        new[1:] |= errors[:-1] != 0
        edges = [*np.flatnonzero(new).tolist(), len(messages)]
        for start, end in pairwise(edges):
            some = messages[start:end]
            place = self._name(int(fields[_TOPIC][start])), int(partitions[start])
            offsets = fields[_OFFSET][start:end]
            if errors[start]:
                none = pa.nulls(0, pa.binary())
                yield Run(place, offsets, none, none, offsets[:0], error=KafkaError(int(errors[start])))
            else:
                keys, payloads = self._bytes(some, _KEY, _KEY_LENGTH), self._bytes(some, _PAYLOAD, _LENGTH)
                attributes = self._attributes(some) if self._headers else None
                yield Run(place, offsets, keys, payloads, self._times(some), attributes)

    def _name(self, topic: int) -> str:
        if topic not in self._names:
            self._names[topic] = self._lib.rd_kafka_topic_name(topic).decode() if topic else ""
        return self._names[topic]

    def _times(self, messages: Ints) -> Ints:
        ask, kind = self._lib.rd_kafka_message_timestamp, ctypes.byref(c_int())
        times = self._field(messages, _TIME)
        if any(ask(int(messages[at]), kind) != times[at] for at in (0, -1)):
            times = np.array([ask(each, kind) for each in messages.tolist()], np.int64)
        return np.where(times < 0, 0, times)

    def _attributes(self, messages: Ints) -> pa.Array:
        """The headers of each message. Only those that have some cost Python objects."""
        head, name, value, size = c_void_p(), c_char_p(), c_void_p(), c_size_t()
        ask, get = self._lib.rd_kafka_message_headers, self._lib.rd_kafka_header_get_all
        first, *rest = (ctypes.byref(each) for each in (head, name, value, size))
        names: list[bytes] = []
        values: list[bytes] = []
        ends = [0]
        for each in messages.tolist():
            if not ask(each, first):
                begin, at = len(names), 0
                while not get(head, at, *rest):
                    at += 1
                    if value.value is not None:
                        names.append(name.value or b"")
                        values.append(ctypes.string_at(value.value, size.value))
                if len(names) - begin > 1:
                    last = dict(zip(names[begin:], values[begin:], strict=True))
                    names[begin:], values[begin:] = last.keys(), last.values()
            ends.append(len(names))
        return pa.MapArray.from_arrays(pa.array(ends, pa.int32()), *(_texts(each) for each in (names, values)))

    def _field(self, messages: Ints, place: int) -> Ints:
        return self._memory64[(messages + (place - _FIRST_ADDRESS)) >> 3]  # type: ignore[no-any-return]

    def _small(self, messages: Ints, place: int) -> npt.NDArray[np.int32]:
        return self._memory32[(messages + (place - _FIRST_ADDRESS)) >> 2]  # type: ignore[no-any-return]

    def _bytes(self, messages: Ints, pointer: int, length: int) -> pa.Array:
        """The bytes that each message points to, copied; null where it points to nothing."""
        starts = self._field(messages, pointer)
        there = starts != 0
        lengths = np.where(there, self._field(messages, length), 0)
        if int(lengths.sum()) > np.iinfo(np.int32).max:
            raise ConfigError(
                "the client had more than 2 GiB of records at once, which is more than a batch holds",
                code="PEN-1016",
                hint="lower `queued.max.messages.kbytes` in `options`",
            )
        views = np.zeros((len(messages), _VIEW), np.uint8)
        words = views.view(np.int32)
        words[:, 0] = lengths
        is_short = lengths <= _INLINE
        self._copy_short(views, starts, lengths, np.flatnonzero(is_short & (lengths > 0)))
        windows, which = np.unique(starts[~is_short] >> _WINDOW, return_inverse=True)
        words[~is_short, 2] = which
        words[~is_short, 3] = starts[~is_short] & ((1 << _WINDOW) - 1)
        reach = (1 << _WINDOW) + int(lengths.max(initial=0))
        memory = [pa.foreign_buffer(int(each) << _WINDOW, reach) for each in windows]
        bits = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little").tobytes())
        buffers = [bits, pa.py_buffer(views), *memory]
        return pa.Array.from_buffers(pa.binary_view(), len(messages), buffers).cast(pa.binary())

    def _copy_short(self, views: npt.NDArray[np.uint8], starts: Ints, lengths: Ints, rows: Ints) -> None:
        """Values of up to 12 bytes are in the view itself. No byte after the last one is looked at."""
        for at in range(int(lengths[rows].max(initial=0))):
            some = rows[lengths[rows] > at]
            views[some, 4 + at] = self._memory8[starts[some] + (at - _FIRST_ADDRESS)]


def _not_made(code: int, text: ctypes.Array[c_char]) -> ConnectorError:
    return failure(KafkaError(code, text.value.decode(errors="replace")), "the consumer cannot be made")


def _texts(values: Sequence[bytes]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except pa.ArrowInvalid:
        return pa.array([each.decode("utf-8", "backslashreplace") for each in values], pa.string())


def _memory(kind: Any) -> npt.NDArray[Any]:
    """All addresses of this process as one array. Only what the library points to is ever looked at."""
    size = np.dtype(kind).itemsize
    whole: Any = (ctypes.c_uint8 * (_LAST_ADDRESS - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS)
    return np.frombuffer(whole, np.dtype(kind), (_LAST_ADDRESS - _FIRST_ADDRESS) // size)
