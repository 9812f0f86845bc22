"""Kafka beside its peers: Spark's own source, kcat, a loop over the client, a plain producer; and how soon rows are visible."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from measure import Bench

from penstock.connectors.kafka.rows import as_messages
from penstock.connectors.kafka.send import Sending
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.sink import Epoch, SinkContext, Task, TopicContext
from penstock.source import ReadLimit, SourceBatch
from penstock.testing.kafka import KafkaServer, fetch, home

ROWS = int(os.environ.get("BENCH_ROWS", "1000000"))
PARTITIONS = 4
TURNS = int(os.environ.get("BENCH_TURNS", "2"))
SECONDS = int(os.environ.get("BENCH_SECONDS", "20"))
"""How long records are written to see how soon they are visible."""
RATE = 1000
VALUES = [os.urandom(200) for _ in range(1000)]
PARTS = ("one", "spark", "latency")
"""`BENCH_PARTS=one,latency` measures some of them; the figures of the others stay in the result file, if of the same commit."""

PEER = [  # 4.3.0 is not published yet; these run on PySpark 4.3.0
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1",
    "org.apache.kafka:kafka-clients:3.9.1",
    "org.apache.commons:commons-pool2:2.12.1",
]
TYPES = {"id": "integer", "name": "string", "amount": "number", "active": "boolean", "note": "string"}
DDL = "id bigint, name string, amount double, active boolean, note string"

SPARK = """
import json, sys, time
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json
jars, bootstrap, topic, out, ddl, turns = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.jars", jars).config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
def rows(first=None):
    options = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
    found = spark.read.format("kafka").options(**options).load()
    if ddl:
        return found.select(from_json(col("value").cast("string"), ddl).alias("r")).select("r.*")
    return found.select("key", "value", "partition", "offset", "timestamp")
rows().limit(1000).write.mode("overwrite").option("compression", "zstd").parquet(out)
best = 1e9
for _ in range(int(turns)):
    began = time.time()
    rows().write.mode("overwrite").option("compression", "zstd").parquet(out)
    best = min(best, time.time() - began)
print(json.dumps({"rows": spark.read.parquet(out).count(), "seconds": best}))
"""

PIPELINE = """
connector_name = "bench-kafka"
delivery = "exactly-once"
[processing]
max_epoch_rows = {epoch_rows}
max_epoch_bytes = 4_000_000_000
epoch_interval_ms = {interval}
[source]
connector = "kafka"
bootstrap_servers = "{bootstrap}"
topics = ["{topic}"]
headers = false
{schema}
[[sinks]]
{sink}
"""
KAFKA = """
connector = "kafka"
bootstrap_servers = "{bootstrap}"
topic = "copy{number}.{{topic}}"
partitions = 4
publish_in_tasks_bytes = {in_tasks}
"""
FILES, DELTA = (f'connector = "{each}"\npath = "out/{{topic}}"' for each in ("files", "delta"))
TYPED = """
[[schemas]]
topic = "/json"
schema_type = "json_schema"
schema_file = "rows.json"
"""
TIMED = """
[[schemas]]
topic = "/live"
schema_type = "json"
metadata = ["timestamp"]
"""


def settings(address: str, **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 5, "compression.type": "lz4", **more}


def fill(address: str, topic: str, values: Callable[[int], bytes] = lambda n: VALUES[n % 1000]) -> None:
    """So many records into a topic."""
    producer = Producer(settings(address))
    for number in range(ROWS):
        put(producer, topic, values(number), str(number))
    while producer.flush(60):
        pass


def put(producer: Producer, topic: str, value: bytes, key: str | bytes) -> None:
    while True:
        try:
            producer.produce(topic, value, key=key)
            break
        except BufferError:
            producer.poll(0.1)


def batches() -> list[pa.RecordBatch]:
    """What both producers are fed: Arrow batches, as a task of Spark has them."""
    found = []
    for first in range(0, ROWS, 20_000):
        keys = [str(each).encode() for each in range(first, min(first + 20_000, ROWS))]
        envelopes = {
            "stream": pa.repeat("rows", len(keys)),
            "key": pa.array(keys, pa.binary()),
            "payload": pa.array([VALUES[each % 1000] for each in range(first, first + len(keys))], pa.binary()),
            "attributes": pa.nulls(len(keys), pa.map_(pa.string(), pa.string())),
            "timestamp": pa.array([0] * len(keys), pa.timestamp("ms", "UTC")),
            "offset": pa.nulls(len(keys), pa.struct([("partition", pa.string()), ("value", pa.string())])),
        }
        found.append(pa.record_batch(envelopes))
    return found


def plain(address: str, topic: str, fed: Sequence[pa.RecordBatch]) -> None:
    """A plain idempotent producer."""
    producer = Producer(settings(address))
    for batch in fed:
        for key, value in zip(batch.column("key").to_pylist(), batch.column("payload").to_pylist(), strict=True):
            put(producer, topic, value, key)
    while producer.flush(60):
        pass


def plain_in_bulk(address: str, topic: str, fed: Sequence[pa.RecordBatch]) -> None:
    """An idempotent producer that is handed Arrow's buffers by the sink's own calls: what staging and a transaction cost."""
    config = KafkaSinkConfig(bootstrap_servers=address)
    room = {"queue.buffering.max.messages": 1_000_000, "queue.buffering.max.kbytes": 256 << 10, "batch.size": 900_000}
    producer = Producer(settings(address, **room, **{"delivery.report.only.error": True}))
    sending = Sending(producer, config, Epoch("bench", "one", 1))
    for batch in fed:
        sending.send(topic, as_messages(batch, TopicContext(), config).batch)
    while producer.flush(60):
        pass
    sending.close()


def exactly_once(address: str, number: int, scratch: Path, fed: Sequence[pa.RecordBatch]) -> None:
    """The same rows through a task and a commit of the sink, in one transaction."""
    whole = {"partitions": PARTITIONS, "publish_in_tasks_bytes": 1 << 40}
    sink = KafkaSink(KafkaSinkConfig(bootstrap_servers=address, topic="sink.{topic}", **whole))
    sink.open(SinkContext(state_dir=scratch / "sink"))  # as under a local master
    epoch = Epoch("bench", "one", number)
    sink.begin_epoch(epoch, Task(0))
    for batch in fed:
        sink.write_batch("/rows", batch)
    sink.commit_epoch(epoch, [sink.pre_commit(epoch)], {})
    sink.close()


def in_bulk(address: str) -> Iterator[pa.RecordBatch]:
    """Our source, without headers."""
    source = Kafka(KafkaConfig(bootstrap_servers=address, topics=("rows",), headers=False))
    source.open()
    start = source.initial()
    items = (item for s in source.split(start, source.latest(start, ReadLimit())) for item in source.read(s))
    yield from (item.records for item in items if isinstance(item, SourceBatch))
    source.close()


def by_loop(address: str) -> Iterator[pa.RecordBatch]:
    """The client's `consume`: key, payload, offset and time, which are fewer columns than ours."""
    own = {"group.id": "bench", "enable.partition.eof": True, "fetch.queue.backoff.ms": 5, "fetch.wait.max.ms": 10}
    consumer = Consumer({"bootstrap.servers": address, **own})
    consumer.assign([TopicPartition("rows", partition, 0) for partition in range(PARTITIONS)])
    schema = pa.schema([("key", pa.binary()), ("payload", pa.binary()), ("offset", pa.int64()), ("time", pa.int64())])
    left = set(range(PARTITIONS))
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
        yield pa.record_batch(columns, schema=schema)
    consumer.close()


def into_parquet(file: Path, batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches)
    with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def into_arrow(batches: Iterator[pa.RecordBatch]) -> None:
    assert sum(batch.num_rows for batch in batches) == ROWS


def kcat(address: str) -> None:
    """The fastest reader that there is: librdkafka, to nowhere."""
    own = ["-X", "queued.min.messages=1000000"]  # else its queue is full before a fetch is, and it waits
    command = ["kcat", "-C", "-b", address, "-t", "rows", "-o", "beginning", "-e", "-q", *own]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of this process and of what it has started and waited for, and seconds by the clock."""

    def cpu() -> float:
        return sum(
            u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    before, wall = cpu(), time.monotonic()
    work()
    return cpu() - before, time.monotonic() - wall


def one_process(bench: Bench, address: str, scratch: Path) -> None:
    best: dict[str, tuple[float, float]] = {}
    fed = batches()
    for turn in range(TURNS):
        cases: dict[str, Callable[[], None]] = {
            "source → Arrow, one process": lambda: into_arrow(in_bulk(address)),
            "consume() → Arrow, one process": lambda: into_arrow(by_loop(address)),
            "source → Parquet, one process": lambda: into_parquet(scratch / "bulk", in_bulk(address)),
            "consume() → Parquet, one process": lambda: into_parquet(scratch / "loop", by_loop(address)),
            "kcat → nowhere": lambda: kcat(address),
            "plain idempotent producer": lambda turn=turn: plain(address, f"plain-{turn}", fed),
            "plain idempotent producer, by the sink's calls": lambda turn=turn: plain_in_bulk(
                address, f"bulk-{turn}", fed
            ),
            "sink, exactly once": lambda turn=turn: exactly_once(address, turn + 1, scratch, fed),
        }
        for what, work in cases.items():
            cpu, wall = timed(work)
            before = best.get(what, (cpu, wall))
            best[what] = min(cpu, before[0]), min(wall, before[1])
    one, two = (pq.read_table(scratch / each).column("payload").to_pylist() for each in ("bulk", "loop"))
    assert len(one) == ROWS
    assert sorted(one) == sorted(two), "the two ways read other records"
    for what, (cpu, wall) in best.items():
        bench.row(what, f"{ROWS / wall / 1e6:.2f} M/s", f"{ROWS / cpu / 1e6:.2f} M/CPU s; best of {TURNS}")
    ours, peer, into = (
        best[each] for each in ("source → Parquet, one process", "kcat → nowhere", "source → Arrow, one process")
    )
    by_cpu = f"{peer[0] / ours[0]:.2f} ×, into Arrow {peer[0] / into[0]:.2f} ×"
    bench.row("kcat's CPU beside the source's", by_cpu, "kcat writes no files and keeps no record")
    # Beside Parquet's own work, which both ways share, there is less of a difference: 1.3 to 1.5 times.
    loop = best["consume() → Arrow, one process"]
    bench.claim("kafka_arrow_vs_consume_cpu", loop[0] / into[0], ">=", 1.5)
    bench.claim("kafka_source_vs_kcat", peer[1] / ours[1], ">=", 0.6)
    ours, peer = best["sink, exactly once"], best["plain idempotent producer"]
    bench.claim("kafka_sink_vs_idempotent", peer[1] / ours[1], ">=", 0.9)
    bench.claim("kafka_sink_vs_idempotent_cpu", peer[0] / ours[0], ">=", 0.9)


def by_pipeline(address: str, scratch: Path, topic: str, sink: str, schema: str = "") -> float:
    """Rows per second of a pipeline under Spark, all epochs but the first: it starts the workers."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    properties = {name: {"type": kind} for name, kind in TYPES.items()}
    (directory / "rows.json").write_text(json.dumps({"type": "object", "properties": properties}))
    text = PIPELINE.format(
        bootstrap=address, topic=topic, sink=sink, schema=schema, epoch_rows=ROWS // 3 + PARTITIONS, interval=0
    )
    (directory / "pipeline.toml").write_text(text)
    command = [sys.executable, __file__, "--run", str(directory / "pipeline.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sum(rows for rows, _ in (each["epoch"] for each in reports)) == ROWS, done.stderr[-2000:]
    later = [each["epoch"] for each in reports][1:]
    return float(sum(rows for rows, _ in later) / sum(seconds for _, seconds in later))


def run(file: str) -> None:
    """A pipeline as `penstock run` runs it, which prints its epochs; until it is drained, or stdin says so."""
    from penstock.pipeline import Pipeline
    from penstock.runtime import supervisor
    from penstock.runtime.epochs import EpochReport
    from penstock.runtime.telemetry import Telemetry
    from penstock.spark import engine_for

    class Told(Telemetry):
        def epoch(self, report: EpochReport) -> None:
            super().epoch(report)
            if rows := sum(report.rows_in.values()):
                print(json.dumps({"epoch": [rows, sum(report.seconds.values())]}), flush=True)

    stop = threading.Event()
    live = "--live" in sys.argv
    if live:
        threading.Thread(target=lambda: (sys.stdin.readline(), time.sleep(2), stop.set()), daemon=True).start()
    pipeline = Pipeline.from_toml(file)
    supervisor.run(
        pipeline, engine_for(pipeline, master="local[2]"), telemetry=Told.of(pipeline), stop=stop, drain=not live
    )


def beside_spark(bench: Bench, address: str, scratch: Path) -> None:
    lib = home().parent / "spark-kafka-4.2.0"
    if not lib.is_dir():
        with tempfile.TemporaryDirectory(dir=home().parent) as temporary:
            fetch(PEER, Path(temporary), Path(temporary, "lib"))
            Path(temporary, "lib").rename(lib)
    jars = ",".join(str(jar) for jar in sorted(lib.glob("*.jar")))

    def spark(topic: str, ddl: str) -> float:
        command = [sys.executable, "-c", SPARK, jars, address, topic, str(scratch / f"spark-{topic}"), ddl, str(TURNS)]
        done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        assert done["rows"] == ROWS
        return float(ROWS / done["seconds"])

    plain_, typed = spark("rows", ""), spark("json", DDL)
    ours, delta = (by_pipeline(address, scratch, *each) for each in (("rows", FILES), ("json", DELTA, TYPED)))
    parts = {"an epoch in one transaction": 1 << 40, "an epoch in eight, by tasks": 1}
    for number, (how, in_tasks) in enumerate(parts.items()):
        sink = KAFKA.format(bootstrap=address, number=number, in_tasks=in_tasks)
        again = by_pipeline(address, scratch, "rows", sink)
        bench.row(f"Kafka → Kafka, local[2], {how}", f"{again / 1e6:.2f} M/s", "exactly once; all epochs but the first")
    bench.row("Kafka → Parquet files, local[2]", f"{ours / 1e6:.2f} M/s", "exactly once; all epochs but the first")
    bench.row("Spark's own source → Parquet, local[2]", f"{plain_ / 1e6:.2f} M/s", f"warm, best of {TURNS}")
    bench.row("Kafka JSON → typed Delta, local[2]", f"{delta / 1e6:.2f} M/s", "checked by JSON Schema")
    bench.row("Spark's from_json → Parquet, local[2]", f"{typed / 1e6:.2f} M/s", f"warm, best of {TURNS}")
    bench.claim("kafka_source_vs_spark", ours / plain_, ">=", 2.5)
    bench.claim("kafka_json_vs_spark", delta / typed, ">=", 1.5)


def latency(bench: Bench, address: str, scratch: Path) -> None:
    """From a record's own time to the entry of Delta's log that shows it."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    text = PIPELINE.format(bootstrap=address, topic="live", sink=DELTA, schema=TIMED, epoch_rows=10**6, interval=200)
    (directory / "pipeline.toml").write_text(text)
    stop = threading.Event()

    def write() -> None:
        producer, number, due = Producer(settings(address, **{"linger.ms": 1})), 0, time.monotonic()
        while not stop.is_set():
            for _ in range(10):
                producer.produce("live", json.dumps({"id": number}).encode(), key=str(number))
                number += 1
            producer.poll(0)
            due += 10 / RATE
            time.sleep(max(0, due - time.monotonic()))
        producer.flush(60)

    command = [sys.executable, __file__, "--run", str(directory / "pipeline.toml"), "--live"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert child.stdout is not None
        for _ in range(10):
            child.stdout.readline()
        threading.Thread(target=child.stdout.read, daemon=True).start()
        since = time.time()
        time.sleep(SECONDS)
        until = time.time()
    finally:
        stop.set()
        writer.join()
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    child.wait(120)
    delays = []
    table = directory / "out" / "live"
    for entry in sorted((table / "_delta_log").glob("*.json")):
        shown = entry.stat().st_ctime
        for line in entry.read_text().splitlines():
            added = json.loads(line).get("add")
            if added and added["dataChange"]:
                times = pq.read_table(table / added["path"], columns=["_timestamp"]).column(0).to_numpy()
                made = times.astype("datetime64[us]").astype(np.int64) / 1e6
                delays.append((shown - made[(made >= since) & (made < until)]) * 1000)
    found = np.concatenate(delays)
    p50, p99 = (float(np.percentile(found, q)) for q in (50, 99))
    bench.row(
        f"record → visible in Delta, at {RATE:,}/s", f"p50 {p50:.0f} ms, p99 {p99:.0f} ms", f"{len(found):,} records"
    )
    bench.claim("kafka_p50_vs_400ms", p50 / 400, "<=", 1)


def main() -> None:
    if "--run" in sys.argv:
        run(sys.argv[sys.argv.index("--run") + 1])
        return
    parts = os.environ.get("BENCH_PARTS", ",".join(PARTS)).split(",")
    title = f"Kafka, {ROWS:,} records of 200 bytes in {PARTITIONS} partitions, broker on the same machine"
    if "one" in parts and shutil.which("kcat") is None:
        sys.exit("kcat is missing: apt-get install kcat")
    bench = Bench("kafka", title, part=set(parts) != set(PARTS))
    with KafkaServer() as server, tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        address, scratch = server.bootstrap, Path(name)
        admin = AdminClient({"bootstrap.servers": address})
        topics = ["rows", "json", "live", *(f"{way}-{turn}" for way in ("plain", "bulk") for turn in range(TURNS))]
        for future in admin.create_topics([NewTopic(each, PARTITIONS, 1) for each in topics]).values():
            future.result()
        note = "n" * 110

        def text(n: int) -> bytes:
            row = {"id": n, "name": f"name {n % 1000}", "amount": n / 7, "active": n % 3 == 0, "note": note}
            return json.dumps(row).encode()

        if "one" in parts or "spark" in parts:
            fill(address, "rows")
        if "one" in parts:
            one_process(bench, address, scratch)
        if "spark" in parts:
            fill(address, "json", text)
            beside_spark(bench, address, scratch)
        if "latency" in parts:
            latency(bench, address, scratch)
    bench.finish()


if __name__ == "__main__":
    main()
