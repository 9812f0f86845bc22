"""
Send rows inside a transaction: in bulk from Arrow's own buffers, or one by one where they have headers, a time or a
partition (in bulk the library asks for partition -1 of a topic that it has not met yet, which ends the transaction).

In bulk the client library takes an array of its public message structs, so no Python object is made for a row. It needs the
library's handle inside the producer; whether it really is one is found out without touching it (see `_handle`).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.connectors.kafka.client import ANSWER_SECS
from penstock.connectors.kafka.library import library
from penstock.durable import canonical
from penstock.errors import RetryableError
from penstock.sink import Epoch

_MESSAGE = np.dtype(
    {
        "names": ["err", "topic", "partition", "payload", "length", "key", "key_length"],
        "formats": [np.int32, np.uint64, np.int32, np.uint64, np.uint64, np.uint64, np.uint64],
        "offsets": [0, 8, 16, 24, 32, 40, 48],
        "itemsize": 72,
    }
)
"""`rd_kafka_message_t`, as the library's header file promises it."""

_COPY = 0x2
_ANY_PARTITION = -1
_HANDLE_AT = 16  # after the head of a Python object
_HANDLE_BYTES = 1 << 13
_NOTHING = ctypes.create_string_buffer(8)  # an empty value is not the same as none: it points to something


class Sending:
    """Sends the rows of one part of an epoch and counts them."""

    def __init__(self, producer: Producer, config: Any, epoch: Epoch, part: str = "") -> None:
        self._producer = producer
        self._bulk = _Bulk.of(producer)
        self._epoch = epoch_header(epoch) if config.headers else b""
        self._part = part
        self._rows = 0
        self.topics: set[str] = set()
        """Where rows were sent."""

    def send(self, topic: str, batch: pa.RecordBatch) -> None:
        self.topics.add(topic)
        headers = batch.column("headers")
        is_bare = headers.null_count == len(headers) or not len(headers.keys)
        is_plain = is_bare and not self._epoch and not {"time", "partition"} & set(batch.schema.names)
        if is_plain and self._bulk is not None:
            self._bulk.send(topic, batch)
        else:
            self._one_by_one(topic, batch, is_bare)
        self._rows += batch.num_rows

    def close(self) -> None:
        if self._bulk is not None:
            self._bulk.close()

    def _one_by_one(self, topic: str, batch: pa.RecordBatch, is_bare: bool) -> None:
        count = batch.num_rows
        given: list[list[Any]] = [
            batch.column(name).to_pylist() if name in batch.schema.names else [None] * count
            for name in ("key", "value", "time", "partition")
        ]
        headers = [None] * count if is_bare else batch.column("headers").to_pylist()
        for row, (key, value, time, partition, own) in enumerate(zip(*given, headers, strict=True), self._rows):
            more: dict[str, Any] = {"headers": self._with_epoch(own or [], row)} if own or self._epoch else {}
            if time is not None:
                more["timestamp"] = time
            if partition is not None:
                more["partition"] = partition
            while True:
                try:
                    self._producer.produce(topic, value, key=key, **more)
                    break
                except BufferError:
                    self._producer.poll(0.1)

    def _with_epoch(self, own: list[tuple[str, str]], row: int) -> list[tuple[str, bytes]]:
        found = [(name, value.encode()) for name, value in own]
        if self._epoch:
            found += [("penstock.epoch", self._epoch), ("penstock.row", f"{self._part}{row}".encode())]
        return found


def epoch_header(epoch: Epoch) -> bytes:
    """What the header `penstock.epoch` says."""
    return canonical([epoch.pipeline, epoch.incarnation, epoch.number]).encode()


class _Bulk:
    """`rd_kafka_produce_batch` on the handle of a producer."""

    def __init__(self, producer: Producer, library: Any, handle: int) -> None:
        self._producer = producer
        self._lib = library
        self._handle = handle
        self._topics: dict[str, int] = {}

    @classmethod
    def of(cls, producer: Producer) -> _Bulk | None:
        """None: rows are sent one by one here."""
        found = library()
        handle = _handle(producer) if found is not None else None
        return cls(producer, found, handle) if handle else None

    def send(self, topic: str, batch: pa.RecordBatch) -> None:
        messages = np.zeros(batch.num_rows, _MESSAGE)
        held = [  # until the call returns: the library has copied the rows by then
            _point(messages, "payload", "length", batch.column("value")),
            _point(messages, "key", "key_length", batch.column("key")),
        ]
        messages["partition"] = _ANY_PARTITION
        left, waited = messages, 0
        while len(left):
            sent = self._lib.rd_kafka_produce_batch(
                self._topic(topic), _ANY_PARTITION, _COPY, left.ctypes.data, len(left)
            )
            failed = left["err"][left["err"] != 0]
            if not len(failed):
                break
            if (failed != KafkaError._QUEUE_FULL).any() or not (left["err"][sent:] != 0).all():
                wrong = failed[failed != KafkaError._QUEUE_FULL]
                raise KafkaException(KafkaError(int(wrong[0]) if len(wrong) else KafkaError._QUEUE_FULL))
            waited = 0 if sent else waited + 1
            if waited > 10 * ANSWER_SECS:
                raise RetryableError("the brokers take no rows", code="PEN-2003")
            self._producer.poll(0.1)
            left = left[sent:]
            left["err"] = 0
        del held

    def close(self) -> None:
        for topic in self._topics.values():
            self._lib.rd_kafka_topic_destroy(topic)
        self._topics = {}

    def _topic(self, name: str) -> int:
        if name not in self._topics:
            self._topics[name] = self._lib.rd_kafka_topic_new(self._handle, name.encode(), None)
        return self._topics[name]


def _point(messages: npt.NDArray[Any], pointer: str, length: str, column: pa.Array) -> Any:
    """Write where each value begins and how long it is; gives what must be kept until they are read."""
    column = column.cast(pa.binary()) if column.type != pa.binary() else column
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    base = data.address if data is not None and data.size else ctypes.addressof(_NOTHING)
    there = np.ones(len(column), bool)
    if column.null_count:
        there = column.is_valid().to_numpy(zero_copy_only=False)
    messages[pointer] = np.where(there, starts[:-1] + base, 0)
    messages[length] = np.where(there, np.diff(starts), 0)
    return column


def _handle(producer: Producer) -> int | None:
    """
    The library's handle of a producer, which is the first thing inside the Python object.

    The memory that it points to is read through the kernel, which never crashes: only if the client's own name is in it is
    it believed.
    """
    handle = ctypes.c_uint64.from_address(id(producer) + _HANDLE_AT).value
    try:
        file = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.pread(file, _HANDLE_BYTES, handle)
    except (OSError, OverflowError):
        return None
    finally:
        os.close(file)
    return handle if b"#producer-" in found else None
