"""How much of Kafka's topics an epoch reads, when a source asks for one, and what a compacted topic holds later."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from kafka_topics import acknowledged, batches, fresh, make_topic, remake_topic, send, transaction, truncate
from penstock.connectors.kafka import read, undecided, watch
from penstock.connectors.kafka.client import Cluster
from penstock.connectors.kafka.position import Offsets
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig, StartAt
from penstock.errors import FatalError
from penstock.source import Note, ReadLimit
from penstock.testing.kafka import KafkaServer
from penstock.testing.processes import wait_until
from penstock.testing.sinks.steps import END, epoch_of, opened_sink, rows, stage
from penstock.testing.sources.steps import opened_source


def make_source(kafka: KafkaServer, *topics: str, **options: Any) -> Kafka:
    return Kafka(KafkaConfig(bootstrap_servers=kafka.bootstrap, topics=topics, **options))


def test_bytes_bound_an_epoch_as_well_as_rows(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("bytes"), 2)
    for partition in (0, 1):
        send(kafka.bootstrap, topic, [b"x" * 1000] * 500, partition)
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        end = source.latest(start, ReadLimit(bytes=100_000))
        assert 90 <= sum(offset for _, offset in end.places()) <= 100, "of a million bytes, a tenth"
        assert source.latest(start, ReadLimit(rows=50, bytes=100_000)) == source.latest(start, ReadLimit(rows=50))


def test_what_tasks_read_says_how_large_the_next_epoch_may_be(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("growing"))
    send(kafka.bootstrap, topic, [b"x" * 10] * 200)
    send(kafka.bootstrap, topic, [b"y" * 10_000] * 200)
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        first = source.latest(start, ReadLimit(rows=300, bytes=1 << 20))
        notes = [
            item.value for split in source.split(start, first) for item in source.read(split) if isinstance(item, Note)
        ]
        after = source.next_start(first, notes)
        assert after == first
        (_, begin), (_, end) = *after.places(), *source.latest(after, ReadLimit(bytes=100_000)).places()
        assert (begin, end - begin) == (300, 29), "about 3,340 bytes each were read"
    with opened_source(make_source(kafka, topic)) as restarted:  # the manifest has the notes
        (_, again), *_ = restarted.latest(restarted.next_start(first, notes), ReadLimit(bytes=100_000)).places()
        assert again == end


def test_a_look_at_large_records_does_not_hold_many_of_them(kafka: KafkaServer) -> None:
    """The driver held a hundred of each partition at once."""
    topic = make_topic(kafka.bootstrap, fresh("large"))
    send(kafka.bootstrap, topic, [b"x" * 900_000] * 20)
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        (held,) = source._topics.peek(dict(start.places()), {(topic, 0): 20}, 100).values()
        assert 0 < sum(map(len, held)) < read.PEEK_BYTES + 900_000
        assert [offset for _, offset in source.latest(start, ReadLimit(bytes=8_200_000)).places()] == [9]


def test_a_group_that_is_beyond_the_end_is_of_an_earlier_topic(kafka: KafkaServer) -> None:
    """With `on_lost = "earliest"`, which promises the first records, it began after the last ones, and counted nothing."""
    topic, group = make_topic(kafka.bootstrap, fresh("beyond"), 2), fresh("group")
    for partition in (0, 1):
        send(kafka.bootstrap, topic, [b"1", b"2"], partition)
    others = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    others.commit(offsets=[TopicPartition(topic, 0, 100), TopicPartition(topic, 1, 1)], asynchronous=False)
    others.close()
    with opened_source(make_source(kafka, topic, start={"group": group})) as source:
        with pytest.raises(
            FatalError, match=f"PEN-5011 .*ends at offset 2, and the group '{group}' is at 100"
        ) as stopped:
            source.initial()
        assert 'on_lost = "earliest"' in stopped.value.hint
    with opened_source(make_source(kafka, topic, start={"group": group}, on_lost="earliest")) as source:
        start = source.initial()
        assert dict(start.places()) == {(topic, 0): 0, (topic, 1): 1}
        assert _count(source, start, source.latest(start, ReadLimit())) == 3


def test_a_partition_that_lost_its_last_records_stops_the_source_or_goes_on_at_its_end(kafka: KafkaServer) -> None:
    """As when a replica that lagged becomes the leader; from the first record on, nearly all would be read twice."""
    topic = make_topic(kafka.bootstrap, fresh("shorter"))
    send(kafka.bootstrap, topic, [b"x"] * 3)
    with opened_source(make_source(kafka, topic)) as source:
        start = Offsets.of({topic: source.latest(source.initial(), ReadLimit()).topics[topic].id}, {(topic, 0): 9})
        with pytest.raises(FatalError, match=r"PEN-5011 .*ends at offset 3, and the position is 9") as stopped:
            source.latest(start, ReadLimit())
        assert 'on_lost = "earliest" to go on with those that come next' in stopped.value.hint
    with opened_source(make_source(kafka, topic, on_lost="earliest")) as source:
        end = source.latest(start, ReadLimit())
        assert (dict(end.places()), _count(source, start, end)) == ({(topic, 0): 3}, 0)
        send(kafka.bootstrap, topic, [b"next"])
        assert [row["payload"] for row in _records(source, end, source.latest(end, ReadLimit()))] == [b"next"]


def test_uncommitted_records_are_read_if_asked(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undecided, "UNDECIDED_SECS", 0.0)
    topic = make_topic(kafka.bootstrap, fresh("uncommitted"))
    with opened_source(make_source(kafka, topic, isolation_level="read_uncommitted")) as source:
        start = source.initial()
        with transaction(kafka.bootstrap, commit=False) as producer:
            producer.produce(topic, b"given up")
            assert producer.flush(60) == 0
            end = source.latest(start, ReadLimit())
            assert [row["payload"] for row in _records(source, start, end)] == [b"given up"]
            source.health_check()
            assert str(source.health_check()) == "healthy", "nothing is held back"
        send(kafka.bootstrap, topic, [b"plain"])
        later = wait_until(lambda: _of_all(source, end, 3), "the transaction to end")
        assert [row["payload"] for row in _records(source, end, later)] == [b"plain"]
        assert [row["payload"] for row in _records(source, start, later)] == [b"given up", b"plain"]


def test_lag_is_also_told_in_seconds(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("old"))
    hour_ago = int(time.time() * 1000) - 3_600_000
    send(kafka.bootstrap, topic, [b"first"], timestamp=hour_ago - 3_600_000)
    send(kafka.bootstrap, topic, [b"second"] * 10, timestamp=hour_ago)
    with opened_source(make_source(kafka, topic)) as source:
        end = source.latest(source.initial(), ReadLimit(rows=1))
        source.health_check()
        assert 3600 <= source.metrics().custom["lag_seconds"] < 3900, "the first record is planned, the second is not"
        assert source.metrics().lag == 10
        source.latest(end, ReadLimit())
        source.health_check()
        assert source.metrics().custom["lag_seconds"] == 0


def test_a_transaction_open_for_long_is_noticed_by_those_that_read_and_write_there(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undecided, "UNDECIDED_SECS", 0.0)
    stem = fresh("held")
    sink = KafkaSink(KafkaSinkConfig(bootstrap_servers=kafka.bootstrap, topic=f"{stem}.{{topic}}", partitions=1))
    epoch = epoch_of(1)
    receipt = stage(sink, epoch, rows(0))
    topic = f"{stem}.lake.orders"
    with opened_sink(sink) as writer, opened_source(make_source(kafka, topic)) as reader:
        writer.commit_epoch(epoch, [receipt], END)
        reader.latest(reader.initial(), ReadLimit())
        wait_until(
            lambda: {str(each.health_check()) for each in (writer, reader)} == {"healthy"}, "the epoch to be visible"
        )
        with transaction(kafka.bootstrap, commit=False) as producer:
            producer.produce(topic, b"x")
            assert producer.flush(60) == 0
            for each in (writer, reader):
                each.health_check()
                assert f"a transaction is open in {topic}/0" in each.health_check().reason
        wait_until(lambda: {str(each.health_check()) for each in (writer, reader)} == {"healthy"}, "it to be over")


def test_a_long_aborted_transaction_is_no_silence(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client says nothing while it passes over aborted records, as if nobody answered."""
    monkeypatch.setattr(read, "NO_PROGRESS_SECS", 0.001)
    topic = make_topic(kafka.bootstrap, fresh("aborted"))
    with transaction(kafka.bootstrap, commit=False) as producer:
        for _ in range(100_000):
            producer.produce(topic, b"x" * 10)
            producer.poll(0)
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        end = wait_until(lambda: _of_all(source, start, 100_001), "the transaction to end")
        assert _records(source, start, end) == []


def _of_all(source: Any, start: Any, offset: int) -> Any:
    end = source.latest(start, ReadLimit())
    return end if [at for _, at in end.places()] == [offset] else None


def test_what_is_lost_is_counted_once(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("counted"))
    send(kafka.bootstrap, topic, [b"x"] * 100)
    with opened_source(make_source(kafka, topic, on_lost="earliest")) as source:

        def lost() -> float:
            return float(source.metrics().custom["records_lost"])

        start = source.initial()
        end = source.latest(start, ReadLimit(rows=50))
        truncate(kafka.bootstrap, topic, 10)  # after the plan
        for _ in range(2):
            assert len(_records(source, start, end)) == 40
            assert lost() == 10
        truncate(kafka.bootstrap, topic, 70)  # before the plan, which is asked for again
        for before in (70, 75):
            truncate(kafka.bootstrap, topic, before)
            assert len(_records(source, end, source.latest(end, ReadLimit()))) == 100 - before
            assert lost() == 10 + before - 50
        remake_topic(kafka.bootstrap, topic)  # its offsets begin anew, and so do its losses
        send(kafka.bootstrap, topic, [b"x"] * 20)
        end = source.latest(end, ReadLimit(rows=5))
        truncate(kafka.bootstrap, topic, 8)
        assert len(_records(source, end, source.latest(end, ReadLimit()))) == 12
        assert lost() == 10 + 25 + 3


def test_new_records_and_new_partitions_are_told_without_asking(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "TICK_SECS", 3600.0)
    monkeypatch.setattr(watch, "LOOK_SECS", 0.2)
    topic = make_topic(kafka.bootstrap, fresh("watched"))
    send(kafka.bootstrap, topic, [b"one"])
    with opened_source(make_source(kafka, topic)) as source:
        ready, requested = source.data_ready_notify(), source.checkpoint_requested()
        end = source.latest(source.initial(), ReadLimit())
        send(kafka.bootstrap, topic, [b"two"])
        assert ready.wait(60)
        ready.clear()
        later = source.latest(end, ReadLimit())
        assert [offset for _, offset in later.places()] == [2]
        assert not requested.is_set()
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(60)
        assert requested.wait(60)
        requested.clear()
        assert len(list(wait_until(lambda: _grown(source, later), "the partition to have a leader").places())) == 2
        ready.clear()
        with transaction(kafka.bootstrap) as producer:
            producer.produce(topic, b"three", partition=0)
            producer.flush(60)
            assert not ready.wait(0.5), "an open transaction is nothing to read"
        assert ready.wait(60)


def _grown(source: Any, start: Any) -> Any:
    end = source.latest(start, ReadLimit())
    return end if len(list(end.places())) == 2 else None


def test_a_source_that_is_bounded_wakes_itself_up(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("bounded"))
    send(kafka.bootstrap, topic, [b"x"] * 10)
    with opened_source(make_source(kafka, topic)) as source:
        ready = source.data_ready_notify()
        source.latest(source.initial(), ReadLimit(rows=3))
        assert ready.is_set()


def test_of_a_compacted_topic_the_last_record_of_each_key_is_always_read(kafka: KafkaServer) -> None:
    """A range that is read again after the cleaner came holds fewer records; the state that they make is the same."""
    name = fresh("compacted")
    settings = {"cleanup_policy": "compact", "segment_ms": 100, "min_cleanable_dirty_ratio": 0.001}
    topic = make_topic(kafka.bootstrap, name, 1, **settings)
    for turn in range(3):
        for key in range(20):
            gone = turn == 2 and key % 5 == 0
            send(kafka.bootstrap, topic, [None if gone else b"%d" % turn], key=b"%d" % key)
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        end = source.latest(start, ReadLimit())
        before = _last_of_each_key(source, start, end)

        def cleaned() -> bool:
            time.sleep(0.5)
            send(kafka.bootstrap, topic, [b"more"], key=b"other")  # the last segment is never cleaned
            return _count(source, start, end) < 60

        wait_until(cleaned, "the cleaner")
        assert _last_of_each_key(source, start, end) == before
        for cut in (7, 33, 59):  # also between records that are gone
            middle = Offsets.model_validate_json(end.model_dump_json().replace('"0":60', f'"0":{cut}'))
            assert _last_of_each_key(source, start, middle) | _last_of_each_key(source, middle, end) == before


def _records(source: Any, start: Any, end: Any) -> list[dict[str, Any]]:
    return [row for split in source.split(start, end) for b in batches(source, split) for row in b.records.to_pylist()]


def _count(source: Any, start: Any, end: Any) -> int:
    return len(_records(source, start, end))


def _last_of_each_key(source: Any, start: Any, end: Any) -> dict[bytes, bytes | None]:
    """The cleaner removes tombstones too, after a day."""
    return {row["key"]: row["payload"] for row in _records(source, start, end)}


def test_check_names_what_is_seldom_meant(kafka: KafkaServer) -> None:
    """A group whose name is misspelt, and records of transactions that were aborted."""
    topic, group = make_topic(kafka.bootstrap, fresh("meant")), fresh("group")
    config = KafkaConfig(
        bootstrap_servers=kafka.bootstrap,
        topics=(topic,),
        start=StartAt(group=group),
        isolation_level="read_uncommitted",
        group_id=group,
    )
    assert [(each.ok, each.what.partition(":")[0]) for each in Kafka(config).check()[1:]] == [
        (True, f"the group {group!r} has no offsets in these topics"),
        (True, "records of transactions that are open or were aborted are read too"),
    ]
    with opened_source(Kafka(config)) as source:
        acknowledged(source, source.latest(source.initial(), ReadLimit()))
    assert len(Kafka(config).check()) == 2


def test_check_says_when_brokers_give_topics_no_ids(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = make_topic(kafka.bootstrap, fresh("ids"))
    describe = Cluster.describe
    for id in ("A" * 22, ""):
        monkeypatch.setattr(
            Cluster, "describe", lambda *args, id=id: {n: replace(t, id=id) for n, t in describe(*args).items()}
        )
        assert "no ids" in make_source(kafka, topic).check()[-1].what
    monkeypatch.undo()
    assert len(make_source(kafka, topic).check()) == 1
