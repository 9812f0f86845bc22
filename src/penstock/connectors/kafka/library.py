"""The C library inside `confluent_kafka`, for what its Python objects would make slow: rows in bulk."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from typing import Any

import numpy as np
from confluent_kafka import cimpl

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rd_kafka_version": (c_int, []),
    "rd_kafka_last_error": (c_int, []),
    "rd_kafka_conf_new": (c_void_p, []),
    "rd_kafka_conf_set": (c_int, [c_void_p, c_char_p, c_char_p, c_char_p, c_size_t]),
    "rd_kafka_new": (c_void_p, [c_int, c_void_p, c_char_p, c_size_t]),
    "rd_kafka_poll_set_consumer": (c_int, [c_void_p]),
    "rd_kafka_topic_partition_list_new": (c_void_p, [c_int]),
    "rd_kafka_topic_partition_list_add": (c_void_p, [c_void_p, c_char_p, c_int32]),
    "rd_kafka_topic_partition_list_set_offset": (c_int, [c_void_p, c_char_p, c_int32, c_int64]),
    "rd_kafka_topic_partition_list_destroy": (None, [c_void_p]),
    "rd_kafka_assign": (c_int, [c_void_p, c_void_p]),
    "rd_kafka_pause_partitions": (c_int, [c_void_p, c_void_p]),
    "rd_kafka_queue_get_consumer": (c_void_p, [c_void_p]),
    "rd_kafka_queue_destroy": (None, [c_void_p]),
    "rd_kafka_consume_batch_queue": (c_ssize_t, [c_void_p, c_int, c_void_p, c_size_t]),
    "rd_kafka_message_destroy": (None, [c_void_p]),
    "rd_kafka_message_timestamp": (c_int64, [c_void_p, POINTER(c_int)]),
    "rd_kafka_message_headers": (c_int, [c_void_p, POINTER(c_void_p)]),
    "rd_kafka_header_get_all": (
        c_int,
        [c_void_p, c_size_t, POINTER(c_char_p), POINTER(c_void_p), POINTER(c_size_t)],
    ),
    "rd_kafka_topic_name": (c_char_p, [c_void_p]),
    "rd_kafka_consumer_close": (c_int, [c_void_p]),
    "rd_kafka_destroy": (None, [c_void_p]),
    "rd_kafka_produce_batch": (c_int, [c_void_p, c_int32, c_int, c_void_p, c_int]),
    "rd_kafka_topic_new": (c_void_p, [c_void_p, c_char_p, c_void_p]),
    "rd_kafka_topic_destroy": (None, [c_void_p]),
}


_LAST_MAJOR = 2
"""The last line of versions whose public structs are known; within one they stay."""


@functools.cache
def library() -> Any:
    """The library with the signatures of what is called; None if something is missing, or it is a later one."""
    if ctypes.sizeof(c_void_p) != 8 or np.little_endian is False:
        return None
    try:
        found = ctypes.CDLL(cimpl.__file__)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (AttributeError, OSError):
        return None
    return found if found.rd_kafka_version() >> 24 <= _LAST_MAJOR else None
