"""What a Kafka topic takes. Tasks ask before they stage anything: at the commit it is too late to leave a row out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.connectors.kafka.client import Cluster
from penstock.connectors.kafka.rows import Records
from penstock.connectors.messages import refuse_rows

RECORD_OVERHEAD = 200
"""Bytes that a record takes besides key, value and headers, and the frame of a batch that holds only this one."""


@dataclass(frozen=True)
class Limits:
    """Partitions and settings of one topic."""

    topic: str
    partitions: int
    message_bytes: int
    age_ms: tuple[int, int] | None
    """How much older, and how much newer than now a record's time may be; None: the broker gives its own times."""
    is_compacted: bool

    @classmethod
    def of(cls, cluster: Cluster, topic: str) -> Limits:
        settings = cluster.settings(topic)
        is_compacted = "compact" in settings["cleanup.policy"]
        return cls(topic, cluster.partitions(topic), int(settings["max.message.bytes"]), _ages(settings), is_compacted)

    def refuse(self, records: Records, overhead: int) -> None:
        """Refuse rows that the brokers would refuse; `overhead`: bytes that are added to each later."""
        refuse_rows(
            records.sizes_over(self.message_bytes - RECORD_OVERHEAD - overhead),
            f"a record is larger than the {self.message_bytes} bytes that the topic {self.topic!r} takes",
            "raise `max.message.bytes` of the topic, or leave such rows out",
        )
        refuse_rows(
            records.partitions_over(self.partitions),
            f"a row names a partition that the topic {self.topic!r} does not have",
            f"it has {self.partitions} partitions; correct the values of `partition_column`",
        )
        if self.is_compacted:
            refuse_rows(
                records.batch.column("key").is_null(),
                f"a row has no key, and the topic {self.topic!r} is compacted",
                "set `key` to columns that every row has, or take `compact` out of the topic's `cleanup.policy`",
            )
        if "time" in records.batch.schema.names and self.age_ms is not None:
            now, (before, after) = int(time.time() * 1000), self.age_ms
            times = records.batch.column("time")
            refuse_rows(
                pc.or_(pc.less(times, _number(max(0, now - before))), pc.greater(times, _number(now + after))),
                f"a row has a time that the topic {self.topic!r} does not take: too old, or too far in the future",
                "correct it, leave `keep_timestamps` out, or raise `message.timestamp.before.max.ms` or "
                "`message.timestamp.after.max.ms` of the topic",
            )


def _ages(settings: Mapping[str, str]) -> tuple[int, int] | None:
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return None
    # Before Kafka 4 there was one setting for both, which from 3.6 on counts for a side that has none of its own.
    both = settings.get("message.timestamp.difference.max.ms", _ANY)
    before, after = (settings.get(f"message.timestamp.{side}.max.ms", _ANY) for side in ("before", "after"))
    return int(both if before == _ANY else before), int(both if after == _ANY else after)


_ANY = str((1 << 63) - 1)
"""As long ago as can be said: no limit."""


def _number(value: int) -> pa.Scalar:
    return pa.scalar(min(value, (1 << 63) - 1), pa.int64())
