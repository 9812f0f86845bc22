"""What records of the sink `kafka` carry, how they are sent, and what becomes of a sink whose markers are gone."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from kafka_topics import QUIET, delete_topic, fresh, make_topic, records, truncate
from kafka_topics import send as send_records
from penstock.connectors.kafka import send
from penstock.connectors.kafka.rows import Records
from penstock.connectors.kafka.shards import CLAIM
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.staging import SHARDS, divided, shard_of
from penstock.errors import ConfigError, DataError, FatalError, SchemaError
from penstock.sink import CommittedEpoch, Task
from penstock.source import ENVELOPE_SCHEMA, HealthState
from penstock.testing.kafka import KafkaServer
from penstock.testing.processes import wait_until
from penstock.testing.sinks.steps import END, TOPIC, commit, epoch_of, opened_sink, rows, stage


def make_sink(kafka: KafkaServer, stem: str, **options: Any) -> KafkaSink:
    topic = f"{stem}.{{topic}}"
    return KafkaSink(KafkaSinkConfig(bootstrap_servers=kafka.bootstrap, topic=topic, **{"partitions": 3, **options}))


def write(sink: KafkaSink, batch: pa.RecordBatch, number: int = 1) -> None:
    epoch = epoch_of(number)
    commit(sink, epoch, [stage(sink, epoch, batch)])


def seen(kafka: KafkaServer, stem: str) -> list[Any]:
    return records(kafka.bootstrap, f"{stem}.lake.orders")


def envelopes(keys: list[bytes | None], payloads: list[bytes | None], **more: Any) -> pa.RecordBatch:
    count = len(keys)
    columns = {
        "stream": ["s"] * count,
        "key": keys,
        "payload": payloads,
        "attributes": [None] * count,
        "timestamp": [1_700_000_000_000 + n for n in range(count)],
        "offset": [None] * count,
        **more,
    }
    return pa.RecordBatch.from_pydict(columns, schema=ENVELOPE_SCHEMA)


# -- in bulk, and one by one -------------------------------------------------------------------------------------------


def test_both_ways_of_sending_write_the_same_records(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [None, b"", *(b"%d" % n for n in range(500))]
    payloads = [b"no key", b"", None, *(b"x" * n for n in range(499))]
    sent: dict[str, list[Any]] = {}
    for way in ("bulk", "rows"):
        stem = fresh(way)
        if way == "rows":
            monkeypatch.setattr(send, "library", lambda: None)
        calls: list[str] = []
        monkeypatch.setattr(send._Bulk, "send", _counted(send._Bulk.send, calls))
        write(make_sink(kafka, stem), envelopes(keys, payloads).slice(1))
        assert bool(calls) == (way == "bulk")
        sent[way] = [(m.partition(), m.key(), m.value()) for m in seen(kafka, stem)]
    assert len(sent["bulk"]) == 501
    assert sent["bulk"] == sent["rows"]
    assert (b"0", None) in {(key, value) for _, key, value in sent["bulk"]}, "a tombstone stays one"
    assert (b"", b"") in {(key, value) for _, key, value in sent["bulk"]}, "nothing is not the same as none"


def _counted(own: Any, calls: list[str]) -> Any:
    def counting(self: Any, topic: str, batch: pa.RecordBatch) -> None:
        calls.append(topic)
        own(self, topic, batch)

    return counting


def test_rows_that_the_client_has_no_room_for_wait_and_keep_their_order(kafka: KafkaServer) -> None:
    stem = fresh("full")
    sink = make_sink(kafka, stem, partitions=1, options={"queue.buffering.max.messages": 100})
    write(sink, envelopes([b"k"] * 5000, [b"%d" % n for n in range(5000)]))
    assert [int(each.value()) for each in seen(kafka, stem)] == list(range(5000))


def test_a_handle_that_is_none_is_not_believed() -> None:
    from confluent_kafka import Consumer, Producer

    address = {"bootstrap.servers": "127.0.0.1:1", **QUIET}
    assert send._handle(Producer(address)) is not None
    assert send._handle(Consumer({**address, "group.id": "g"})) is None
    assert send._handle(pa.array([1])) is None  # type: ignore[arg-type]


# -- what records carry ------------------------------------------------------------------------------------------------


def test_forwarded_records_keep_their_time_if_asked(kafka: KafkaServer) -> None:
    stem = fresh("times")
    kept = {"retention.ms": -1}  # they are of 2023: the broker would remove them when it looks next
    write(
        make_sink(kafka, stem, partitions=1, keep_timestamps=True, topic_config=kept),
        envelopes([b"a", b"b"], [b"1", b"2"]),
    )
    assert [each.timestamp()[1] for each in seen(kafka, stem)] == [1_700_000_000_000, 1_700_000_000_001]
    with opened_sink(make_sink(kafka, stem, keep_timestamps=True)) as sink:
        sink.begin_epoch(epoch_of(2), Task(0))
        with pytest.raises(SchemaError, match="_timestamp"):
            sink.write_batch(TOPIC, rows(0))


@pytest.mark.parametrize("codec", list(enumerate(("none", "gzip", "snappy", "lz4", "zstd"))), ids=lambda each: each[1])
def test_records_are_stored_as_they_were_compressed(kafka: KafkaServer, codec: tuple[int, str]) -> None:
    stem = fresh(codec[1])
    write(make_sink(kafka, stem, partitions=1, compression=codec[1]), rows(0, 500))
    assert len(seen(kafka, stem)) == 500
    (log,) = (kafka._place / "data" / f"{stem}.lake.orders-0").glob("*.log")
    attributes = int.from_bytes(log.read_bytes()[21:23], "big")  # of the first batch, by Kafka's format of records
    assert attributes & 7 == codec[0]


def test_messages_that_are_forwarded_are_upserts_under_their_own_keys(kafka: KafkaServer) -> None:
    stem = fresh("forwarded")
    sink = make_sink(kafka, stem, partitions=1, mode="upsert")
    write(sink, envelopes([b"a", b"b", b"a"], [b"1", b"2", None]))
    assert [(each.key(), each.value()) for each in seen(kafka, stem)] == [(b"a", b"1"), (b"b", b"2"), (b"a", None)]
    with opened_sink(sink) as opened:
        opened.begin_epoch(epoch_of(2), Task(0))
        with pytest.raises(DataError, match="no key") as refused:
            opened.write_batch(TOPIC, envelopes([b"a", None], [b"1", b"2"]))
        assert list(refused.value.rows) == [1]


def test_a_column_can_name_the_partition(kafka: KafkaServer) -> None:
    stem = fresh("chosen")
    sink = make_sink(kafka, stem, key=("id",), partition_column="part")
    write(sink, pa.record_batch({"id": ["a", "b", "c"], "part": [2, 0, 2]}))
    assert [(m.partition(), m.key()) for m in seen(kafka, stem)] == [(0, b"b"), (2, b"a"), (2, b"c")]
    with opened_sink(sink) as opened:
        opened.begin_epoch(epoch_of(2), Task(0))
        with pytest.raises(DataError, match="does not have") as refused:
            opened.write_batch(TOPIC, pa.record_batch({"id": ["a", "b", "c"], "part": [1, 3, None]}))
        assert list(refused.value.rows) == [1, 2]
        with pytest.raises(DataError, match="does not have") as refused:  # these ended the task
            opened.write_batch(TOPIC, pa.record_batch({"id": ["a", "b", "c"], "part": [1 << 31, 1, -(1 << 40)]}))
        assert list(refused.value.rows) == [0, 2]
        for column in (["1"], [1.5]):
            with pytest.raises(SchemaError, match="no whole numbers"):
                opened.write_batch(TOPIC, pa.record_batch({"id": ["a"], "part": column}))
        with pytest.raises(SchemaError, match="partition_column"):
            opened.write_batch(TOPIC, pa.record_batch({"id": ["a"]}))


@pytest.mark.parametrize("partitioner", ["murmur2", "crc32", "fnv1a"])
def test_keys_go_where_other_clients_send_them(kafka: KafkaServer, partitioner: str) -> None:
    """`murmur2`: where the real Java producer does, which Kafka's own console producer is."""
    stem, keys = fresh(partitioner), [f"key {n}" for n in range(60)]
    write(make_sink(kafka, stem, key=("id",), partitioner=partitioner, partitions=7), pa.record_batch({"id": keys}))
    other = make_topic(kafka.bootstrap, fresh("other"), 7)
    if partitioner == "murmur2":
        lines = "".join(f"{key}\tx\n" for key in keys)
        options = [part for each in ("parse.key=true", "key.separator=\t") for part in ("--reader-property", each)]
        main = "org.apache.kafka.tools.ConsoleProducer"
        kafka.tool(main, "--bootstrap-server", kafka.bootstrap, "--topic", other, *options, input=lines)
    else:
        with transaction_of(kafka, {"crc32": "consistent", "fnv1a": "fnv1a"}[partitioner]) as producer:
            for key in keys:
                producer.produce(other, b"x", key=key)
    found = {m.key(): m.partition() for m in seen(kafka, stem)}
    assert len(found) == 60
    assert {m.key(): m.partition() for m in records(kafka.bootstrap, other)} == found


def transaction_of(kafka: KafkaServer, partitioner: str) -> Any:
    import contextlib

    from confluent_kafka import Producer

    @contextlib.contextmanager
    def producing() -> Any:
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "partitioner": partitioner, **QUIET})
        yield producer
        assert producer.flush(60) == 0

    return producing()


# -- large epochs ------------------------------------------------------------------------------------------------------


def test_rows_of_very_different_sizes_are_staged_in_parts_of_one() -> None:
    """By their mean a part came to more than any broker takes, and the epoch could never be staged in a topic."""
    sizes = [*[10] * 5000, *[2_000_000] * 30, *[10] * 5000]
    values = pa.array([b"x" * size for size in sizes], pa.binary())
    batch = pa.record_batch(
        {"key": pa.nulls(len(sizes), pa.binary()), "value": values, "headers": pa.nulls(len(sizes))}
    )
    parts = list(Records(batch).pieces(900_000))
    assert max(part.nbytes for part in parts) < 3_000_000
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([batch]))
    assert list(Records(batch.slice(0, 0)).pieces(900_000)) == []


def test_every_row_has_one_shard_and_all_rows_of_a_key_the_same() -> None:
    keys = pa.array([None if n % 7 == 0 else b"k%d" % (n % 300) for n in range(3000)], pa.binary())
    values = pa.array([b"v%d" % n for n in range(3000)], pa.binary())
    batch = pa.record_batch({"key": keys, "value": values, "headers": pa.nulls(3000)})
    whole = shard_of(keys, values)
    assert (shard_of(keys.slice(100, 50), values.slice(100, 50)) == whole[100:150]).all(), "alone as among others"
    parts = dict(divided([batch.slice(0, 1234), batch.slice(1234)]))
    assert set(parts) == set(range(SHARDS)), "all of them have some"
    by_key: dict[bytes, set[int]] = {}
    for shard, part in parts.items():
        for key, value in zip(part["key"].to_pylist(), part["value"].to_pylist(), strict=True):
            by_key.setdefault(key or value, set()).add(shard)
    assert all(len(shards) == 1 for shards in by_key.values())
    assert sorted(v for part in parts.values() for v in part["value"].to_pylist()) == sorted(values.to_pylist())


def test_shards_that_tasks_have_published_are_not_published_again(kafka: KafkaServer) -> None:
    stem = fresh("shards")
    sink = make_sink(kafka, stem, publish_in_tasks_bytes=0, key=("id",), partitions=2)
    epoch = epoch_of(1)
    receipts = [stage(sink, epoch, rows(0, 100, f"task {n}"), task=n) for n in range(2)]
    with opened_sink(sink) as driver:
        work = driver.plan_epoch(epoch, receipts)
        assert len(work) == SHARDS
        for number in (0, 3, 3):  # one task runs twice
            with opened_sink(sink) as task:
                task.apply(epoch, work[number], Task(number))
        assert 0 < len(seen(kafka, stem)) < 200
        assert len(driver.plan_epoch(epoch, receipts)) == SHARDS - 2
        assert driver.committed_epoch("kit", TOPIC) is None
        driver.commit_epoch(epoch, receipts, END)
        assert driver.plan_epoch(epoch, receipts) == ()
    by_key: dict[bytes, list[str]] = {}
    for each in seen(kafka, stem):
        by_key.setdefault(each.key(), []).append(json.loads(each.value())["name"])
    assert len(by_key) == 100
    assert all(names == ["task 0", "task 1"] for names in by_key.values()), "in the order of the tasks"


# -- the markers -------------------------------------------------------------------------------------------------------


def test_a_compacted_marker_still_says_which_epoch_is_there(kafka: KafkaServer) -> None:
    stem = fresh("compact")
    sink = make_sink(kafka, stem, marker_topic=(name := f"_{stem}"))
    quick = {"cleanup_policy": "compact", "segment_ms": 100, "min_cleanable_dirty_ratio": 0.001}
    make_topic(kafka.bootstrap, name, 1, **quick)
    numbers = iter(range(1, 200))
    last = 0

    def cleaned() -> bool:
        nonlocal last
        last = next(numbers)
        write(sink, rows(last * 10, 1), last)
        return len(records(kafka.bootstrap, name)) < last

    wait_until(cleaned, "the cleaner")
    with opened_sink(sink) as driver:
        assert driver.committed_epoch("kit", TOPIC).number == last
        driver.commit_epoch(epoch_of(last), [], END)
    assert len(seen(kafka, stem)) == last


@pytest.mark.parametrize("key", [None, b"text", b'{"id":1}', b'["kit","/lake/orders"]'])
def test_a_marker_topic_with_records_of_others_is_refused(kafka: KafkaServer, key: bytes | None) -> None:
    """Such as a topic of orders: what is in them ended the run with the name of a Python error."""
    topic = make_topic(kafka.bootstrap, fresh("others"))
    send_records(kafka.bootstrap, topic, [b"an order"], key=key)
    with (
        opened_sink(make_sink(kafka, fresh("sink"), marker_topic=topic)) as driver,
        pytest.raises(ConfigError, match="say nothing of epochs") as refused,
    ):
        driver.committed_epoch("kit", TOPIC)
    assert "marker_topic" in refused.value.hint


def test_markers_that_somebody_deleted_stop_the_sink(kafka: KafkaServer) -> None:
    stem = fresh("deleted")
    sink = make_sink(kafka, stem, marker_topic=(name := f"_{stem}"))
    make_topic(kafka.bootstrap, name, 1, cleanup_policy="compact,delete")  # of a compacted one nothing can be deleted
    write(sink, rows(0))
    with opened_sink(sink) as driver:
        truncate(kafka.bootstrap, name, 1)
        with pytest.raises(FatalError, match="PEN-5020"):
            driver.committed_epoch("kit", TOPIC)


def test_markers_of_shards_that_somebody_deleted_stop_the_sink(kafka: KafkaServer) -> None:
    """Without them a shard that is there would be published again."""
    stem = fresh("parts")
    sink = make_sink(kafka, stem, publish_in_tasks_bytes=0, key=("id",), marker_topic=(name := f"_{stem}"))
    epoch = epoch_of(1)
    receipts = [stage(sink, epoch, rows(0, 100))]
    with opened_sink(sink) as driver, opened_sink(sink) as task:
        task.apply(epoch, driver.plan_epoch(epoch, receipts)[0], Task(0))
    before = len(seen(kafka, stem))
    delete_topic(kafka.bootstrap, f"{name}.shards")
    with opened_sink(sink) as driver:
        for attempt in (driver.plan_epoch, lambda *args: driver.commit_epoch(*args, END)):
            with pytest.raises(FatalError, match=r"PEN-5020 .*\.shards"):
                attempt(epoch, receipts)
        assert 0 < before == len(seen(kafka, stem))
        again = epoch_of(1, "two")  # after `offsets reset`
        driver.commit_epoch(again, [stage(sink, again, rows(200))], END)


def test_without_markers_of_shards_the_claim_of_an_earlier_version_leaves_a_way_on(kafka: KafkaServer) -> None:
    """Such a claim does not say whose it is, so that `offsets reset` alone does not help."""
    stem = fresh("claims")
    sink = make_sink(kafka, stem, publish_in_tasks_bytes=0, key=("id",), marker_topic=(name := f"_{stem}"))
    before, after = epoch_of(1), epoch_of(1, "two")  # the second after `offsets reset`
    with opened_sink(sink) as driver:
        driver.plan_epoch(before, [stage(sink, before, rows(0, 100))])
        with driver._publisher.transaction(before):
            driver._publisher.mark("kit", CLAIM, CommittedEpoch(incarnation="a claim", number=0))
    delete_topic(kafka.bootstrap, f"{name}.shards")
    receipts = [stage(sink, after, rows(200, 100))]
    with opened_sink(sink) as driver:
        with pytest.raises(FatalError, match=r"PEN-5020 .*\.shards") as stopped:
            driver.plan_epoch(after, receipts)
        assert "then make it again all the same" in stopped.value.hint
    make_topic(kafka.bootstrap, f"{name}.shards", SHARDS, cleanup_policy="compact")
    with opened_sink(sink) as driver:
        driver.commit_epoch(after, receipts, END)
    assert len(seen(kafka, stem)) == 100


@pytest.mark.parametrize(("options", "said"), [({"replication": 3}, True), ({"replication": 1}, False), ({}, False)])
def test_check_says_when_there_are_fewer_brokers_than_replicas(
    kafka: KafkaServer, options: dict[str, Any], said: bool
) -> None:
    findings = make_sink(kafka, fresh("replicas"), **options).check()
    assert [each.ok for each in findings] == [True] * (1 + said)
    assert ("3 replicas: the cluster has 1 broker" in findings[-1].what) == said


def test_a_sink_says_how_its_cluster_is(kafka: KafkaServer) -> None:
    stem = fresh("health")
    with opened_sink(make_sink(kafka, stem, marker_topic=f"_{stem}")) as driver:
        assert driver.health_check().state is HealthState.UNKNOWN, "nothing was asked yet"
        driver.committed_epoch("kit", TOPIC)
        assert driver.health_check().state is HealthState.HEALTHY
        delete_topic(kafka.bootstrap, f"_{stem}")
        wait_until(lambda: driver.health_check().state is not HealthState.HEALTHY, "the sink to notice")
