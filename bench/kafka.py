"""Kafka, one process: a topic into Parquet beside a loop over the client, the exactly-once sink beside a plain producer."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from measure import Bench

from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.sink import Epoch, Task
from penstock.source import ReadLimit
from penstock.testing.kafka import KafkaServer

ROWS = int(os.environ.get("BENCH_ROWS", "1000000"))
PARTITIONS = 4
TURNS = 3
VALUES = [os.urandom(200) for _ in range(1000)]


def plain(address: str, topic: str) -> None:
    """A plain idempotent producer, fed row by row."""
    producer = Producer(
        {"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 5, "compression.type": "lz4"}
    )
    for number in range(ROWS):
        while True:
            try:
                producer.produce(topic, VALUES[number % 1000], key=str(number))
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(600) == 0


def exactly_once(address: str, number: int) -> None:
    """The same rows through a task and a commit of the sink."""
    sink = KafkaSink(KafkaSinkConfig(bootstrap_servers=address, topic="sink.{topic}", partitions=PARTITIONS))
    sink.open()
    epoch = Epoch("bench", "one", number)
    sink.begin_epoch(epoch, Task(0))
    for first in range(0, ROWS, 20_000):
        keys = [str(each).encode() for each in range(first, min(first + 20_000, ROWS))]
        envelopes = {
            "key": pa.array(keys, pa.binary()),
            "payload": pa.array([VALUES[each % 1000] for each in range(first, first + len(keys))], pa.binary()),
            "attributes": pa.nulls(len(keys), pa.map_(pa.string(), pa.string())),
            "timestamp": pa.array([0] * len(keys), pa.timestamp("ms", "UTC")),
        }
        sink.write_batch("/rows", pa.record_batch(envelopes))
    sink.commit_epoch(epoch, [sink.pre_commit(epoch)], {})
    sink.close()


def in_bulk(address: str, file: Path) -> None:
    """Our source, without headers, into a Parquet file."""
    source = Kafka(KafkaConfig(bootstrap_servers=address, topics=("rows",), headers=False))
    source.open()
    start = source.initial()
    batches = (b.records for s in source.split(start, source.latest(start, ReadLimit())) for b in source.read(s))
    first = next(batches)
    with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
    source.close()


def by_loop(address: str, file: Path) -> None:
    """The client's `consume`, into the same columns of a Parquet file."""
    settings = {"group.id": "bench", "enable.partition.eof": True, "fetch.queue.backoff.ms": 5, "fetch.wait.max.ms": 10}
    consumer = Consumer({"bootstrap.servers": address, **settings})
    consumer.assign([TopicPartition("rows", partition, 0) for partition in range(PARTITIONS)])
    schema = pa.schema([("key", pa.binary()), ("payload", pa.binary()), ("offset", pa.int64()), ("time", pa.int64())])
    left = set(range(PARTITIONS))
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while left:
            messages = consumer.consume(20_000, 0.02)
            left -= {m.partition() for m in messages if m.error() and m.error().code() == KafkaError._PARTITION_EOF}
            good = [m for m in messages if not m.error()]
            columns = [
                pa.array([m.key() for m in good], pa.binary()),
                pa.array([m.value() for m in good], pa.binary()),
                pa.array([m.offset() for m in good], pa.int64()),
                pa.array([m.timestamp()[1] for m in good], pa.int64()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    consumer.close()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of this process, and seconds by the clock."""
    cpu, wall = time.process_time(), time.monotonic()
    work()
    return time.process_time() - cpu, time.monotonic() - wall


def main() -> None:
    bench = Bench("kafka", f"Kafka, {ROWS:,} records of 200 bytes in {PARTITIONS} partitions, one process")
    best: dict[str, tuple[float, float]] = {}
    with KafkaServer() as server, tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        address, home = server.bootstrap, Path(name)
        admin = AdminClient({"bootstrap.servers": address})
        topics = ["rows", *(f"plain-{turn}" for turn in range(TURNS))]
        for future in admin.create_topics([NewTopic(each, PARTITIONS, 1) for each in topics]).values():
            future.result()
        plain(address, "rows")
        for turn in range(TURNS):
            cases: dict[str, Callable[[], None]] = {
                "source → Parquet": lambda: in_bulk(address, home / "bulk"),
                "consume() → Parquet": lambda: by_loop(address, home / "loop"),
                "plain idempotent producer": lambda turn=turn: plain(address, f"plain-{turn}"),
                "sink, exactly once": lambda turn=turn: exactly_once(address, turn + 1),
            }
            for what, work in cases.items():
                cpu, wall = timed(work)
                before = best.get(what, (cpu, wall))
                best[what] = min(cpu, before[0]), min(wall, before[1])
        one, two = (pq.read_table(home / each).column("payload").to_pylist() for each in ("bulk", "loop"))
        assert len(one) == ROWS
        assert sorted(one) == sorted(two), "the two ways read other records"
    for what, (cpu, wall) in best.items():
        bench.row(what, f"{ROWS / cpu / 1e6:.2f} M/CPU s", f"{ROWS / wall / 1e6:.2f} M/s by the clock")
    bench.claim("kafka_source_vs_consume", best["consume() → Parquet"][0] / best["source → Parquet"][0], ">=", 1.5)
    bench.claim(
        "kafka_sink_vs_idempotent", best["plain idempotent producer"][0] / best["sink, exactly once"][0], ">=", 0.9
    )
    bench.finish()


if __name__ == "__main__":
    sys.exit(main())
