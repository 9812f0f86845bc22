"""A Danube message as an envelope: what of it is kept, and what identifies it over restarts of the broker."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from penstock.source import Offset, SourceEnvelope, SourceRecord

PIPELINE, INCARNATION, EPOCH, SEQUENCE = (
    "penstock.pipeline",
    "penstock.incarnation",
    "penstock.epoch",
    "penstock.sequence",
)
"""Attributes of every message that our sink sends: together they name it, also when it is sent again after a crash."""

OWN = (PIPELINE, INCARNATION, EPOCH, SEQUENCE)

PRODUCER, PARTITION, SCHEMA_ID, SCHEMA_VERSION, PUBLISHED = (
    "danube.producer",
    "danube.topic",
    "danube.schema_id",
    "danube.schema_version",
    "danube.publish_time",
)
"""What a message carries besides, as attributes of the envelope."""

BESIDE = frozenset((PRODUCER, PARTITION, SCHEMA_ID, SCHEMA_VERSION, PUBLISHED))
"""An attribute of a message that has such a name was said about another one, and is left out."""

LAST_MS = 253_402_300_799_999
"""The end of the year 9999: a later time is in another unit, which some clients send, and no table could hold it."""


def stream_of(partition: str) -> str:
    """The topic of a partition: a stream has the name of its topic."""
    stem, _, number = partition.rpartition("-part-")
    return stem if stem and number.isdigit() else partition


def envelope(message: Any, frame: bytes = b"", stream: str | None = None) -> SourceEnvelope:
    """The message as it is journaled; `stream` is the topic in the options, which may be one partition only."""
    place = message.msg_id
    attributes = {name: value for name, value in message.attributes.items() if name not in BESIDE}
    attributes[PRODUCER], attributes[PARTITION] = message.producer_name, place.topic_name
    if message.HasField("schema_id"):
        attributes[SCHEMA_ID] = str(message.schema_id)
        attributes[SCHEMA_VERSION] = str(message.schema_version)
    published = message.publish_time
    if published > LAST_MS:
        attributes[PUBLISHED], published = str(published), time.time_ns() // 1_000_000
    record = SourceRecord(
        stream or stream_of(place.topic_name),
        frame + message.payload,
        message.routing_key.encode() if message.HasField("routing_key") else None,
        attributes,
        published,
    )
    return SourceEnvelope(record, Offset(place.topic_name, place.topic_offset), identity(message))


def identity(message: Any) -> str:
    """
    The same for every delivery of a message, and for no other message.

    An offset alone is not: a broker that lost its log counts from 0 again. So all that the producer and the broker said
    about the message goes in, with its content. A message of our own sink is known by the epoch and the sequence that it
    carries, wherever the broker put it; its content goes in as well, since a repeat is better than a loss.
    """
    place, attributes = message.msg_id, message.attributes
    parts: list[Any]
    if all(name in attributes for name in OWN):
        parts = [stream_of(place.topic_name), *(attributes[name] for name in OWN)]
    else:
        parts = [
            place.topic_name,
            place.topic_offset,
            place.producer_id,
            message.producer_name,
            message.request_id,
            message.publish_time,
            *_sorted(attributes),
        ]
    parts.append(message.routing_key if message.HasField("routing_key") else None)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    digest.update(message.payload)
    return digest.hexdigest()


def _sorted(attributes: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(attributes.items())
