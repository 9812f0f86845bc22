"""Kafka topics as ranges: transactions, gaps, retention, topics that come, go and come again."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pydantic import ValidationError

from kafka_topics import (
    acknowledged,
    batches,
    delete_topic,
    fresh,
    make_topic,
    remake_topic,
    send,
    transaction,
    truncate,
    values,
)
from penstock.connectors.kafka import client, read
from penstock.connectors.kafka.client import Cluster, ClusterConfig
from penstock.connectors.kafka.position import Offsets, Piece, packed
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.source import ReadLimit, SourceContext
from penstock.testing import SourceContract
from penstock.testing.kafka import KafkaServer
from penstock.testing.processes import wait_until
from penstock.testing.sources.steps import opened_source


def make_source(kafka: KafkaServer, *topics: str, **options: Any) -> Kafka:
    return Kafka(KafkaConfig(bootstrap_servers=kafka.bootstrap, topics=topics, **options))


def payloads(source: Kafka, start: Offsets, end: Offsets) -> list[bytes | None]:
    """What the splits of a range hold, partition by partition."""
    found = []
    for split in source.split(start, end):
        for batch in batches(source, split):
            found += batch.records.to_pylist()
    found.sort(key=lambda row: (row["stream"], int(row["offset"]["partition"]), int(row["offset"]["value"])))
    return [row["payload"] for row in found]


def everything(source: Kafka) -> list[bytes | None]:
    start = source.initial()
    return payloads(source, start, source.latest(start, ReadLimit()))


def fill(address: str, topic: str, partitions: int) -> None:
    """Plain records, committed and aborted transactions, one after the other, in every partition."""
    for number in range(3):
        for partition in range(partitions):
            send(address, topic, [f"plain {number} {n}".encode() for n in range(3)], partition, key=b"k")
        for commit in (False, True):
            with transaction(address, commit) as producer:
                for partition in range(partitions):
                    for n in range(2):
                        text = f"{'yes' if commit else 'no'} {number} {n}".encode()
                        producer.produce(topic, text, key=str(n).encode(), partition=partition, headers={"h": b"1"})


@pytest.fixture(scope="module")
def filled(kafka: KafkaServer) -> str:
    """Three partitions with records of every kind; nobody writes there any more."""
    topic = make_topic(kafka.bootstrap, fresh("filled"), 3)
    fill(kafka.bootstrap, topic, 3)
    wait_until(lambda: len(values(kafka.bootstrap, topic)) == 45, "the last transaction to end")
    return topic


class TestKafkaSource(SourceContract):
    ordered = False  # rows of several partitions have an order only within each

    @pytest.fixture
    def source(self, kafka: KafkaServer, filled: str) -> Kafka:
        return make_source(kafka, filled)

    @pytest.fixture
    def wrong(self, kafka: KafkaServer) -> Kafka:
        return make_source(kafka, "no-such-topic")


class TestAGrowingTopic(SourceContract):
    @pytest.fixture
    def topic(self, kafka: KafkaServer) -> str:
        topic = make_topic(kafka.bootstrap, fresh("growing"))
        send(kafka.bootstrap, topic, [str(n).encode() for n in range(25)])
        return topic

    @pytest.fixture
    def source(self, kafka: KafkaServer, topic: str) -> Kafka:
        return make_source(kafka, topic, headers=False)

    @pytest.fixture
    def more(self, kafka: KafkaServer, topic: str) -> Callable[[], None]:
        def more() -> None:
            with transaction(kafka.bootstrap) as producer:
                producer.produce(topic, b"later")

        return more


def test_only_committed_records_are_read_and_their_order_is_kept(kafka: KafkaServer, filled: str) -> None:
    with opened_source(make_source(kafka, filled)) as source:
        found = everything(source)
    one = [
        text.encode()
        for number in range(3)
        for text in (*(f"plain {number} {n}" for n in range(3)), *(f"yes {number} {n}" for n in range(2)))
    ]
    assert found == one * 3
    assert found == values(kafka.bootstrap, filled)


def test_a_record_keeps_its_key_headers_time_partition_and_offset(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("whole"), 2, retention_ms=-1)
    headers = [("a", b"1"), ("b", b"\xff"), ("a", b"2"), ("n", None)]
    send(kafka.bootstrap, topic, [b"v", None, b""], 1, key=b"k", headers=headers, timestamp=1_700_000_000_123)
    send(kafka.bootstrap, topic, [b"bare"], 0, timestamp=1_700_000_000_000)
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        splits = source.split(start, source.latest(start, ReadLimit()))
        rows = [row for split in splits for batch in batches(source, split) for row in batch.records.to_pylist()]
    rows.sort(key=lambda row: (row["offset"]["partition"], row["offset"]["value"]))
    bare, whole, tombstone, empty = rows
    assert (bare["key"], bare["payload"], bare["attributes"]) == (None, b"bare", [])
    assert whole["key"] == b"k"
    assert whole["attributes"] == [("a", "2"), ("b", "\\xff")]
    assert whole["timestamp"] == datetime.fromtimestamp(1_700_000_000.123, UTC)
    assert whole["offset"] == {"partition": "1", "value": "0"}
    assert (tombstone["payload"], empty["payload"], empty["offset"]["value"]) == (None, b"", "2")


def test_any_cut_of_a_range_reads_each_record_once(kafka: KafkaServer, filled: str) -> None:
    """Cuts fall inside aborted transactions and on control records as well."""
    dice = random.Random(7)
    with opened_source(make_source(kafka, filled)) as source:
        start = source.initial()
        end = source.latest(start, ReadLimit())
        whole = payloads(source, start, end)
        ids = {name: each.id for name, each in end.topics.items()}
        for _ in range(6):
            edges = {place: sorted(dice.choices(range(offset + 1), k=2)) for place, offset in end.places()}
            cuts = [start, *(Offsets.of(ids, {place: each[i] for place, each in edges.items()}) for i in (0, 1)), end]
            pieces = [payloads(source, a, b) for a, b in pairwise(cuts)]
            assert sorted(chain.from_iterable(pieces)) == sorted(whole), edges


def test_a_range_of_nothing_but_aborted_records_is_empty_and_ends(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("aborted"))
    with transaction(kafka.bootstrap, commit=False) as producer:
        producer.produce(topic, b"no")
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        end = wait_until(lambda: _moved(source, start, 2), "the transaction to end")
        assert dict(end.places()) == {(topic, 0): 2}
        assert payloads(source, start, end) == []


def test_nothing_after_the_beginning_of_an_open_transaction_is_planned(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("open"))
    send(kafka.bootstrap, topic, [b"before"])
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        with transaction(kafka.bootstrap) as producer:
            producer.produce(topic, b"inside")
            assert producer.flush(60) == 0
            send(kafka.bootstrap, topic, [b"beside"])
            end = source.latest(start, ReadLimit())
            assert payloads(source, start, end) == [b"before"]
        later = wait_until(lambda: _moved(source, end, 4), "the transaction to end")
        assert payloads(source, end, later) == [b"inside", b"beside"]


def _moved(source: Kafka, start: Offsets, offset: int) -> Offsets | None:
    end = source.latest(start, ReadLimit())
    return end if next(end.places())[1] >= offset else None


# -- records that are gone ---------------------------------------------------------------------------------------------


def test_records_that_retention_removed_stop_the_source_or_are_counted(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("retention"))
    send(kafka.bootstrap, topic, [str(n).encode() for n in range(10)])
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        end = source.latest(start, ReadLimit())
        truncate(kafka.bootstrap, topic, 4)
        with pytest.raises(FatalError, match=r"PEN-5011.*begins at offset 4") as stopped:
            source.latest(start, ReadLimit())
        assert 'on_lost = "earliest"' in str(stopped.value)
        with pytest.raises(FatalError, match="PEN-5011"):
            payloads(source, start, end)
    with opened_source(make_source(kafka, topic, on_lost="earliest")) as source:
        end = source.latest(start, ReadLimit())
        assert payloads(source, start, end) == [str(n).encode() for n in range(4, 10)]
        assert source.metrics().custom["records_lost"] == 4
        source.latest(start, ReadLimit())
        assert source.metrics().custom["records_lost"] == 4


def test_a_topic_that_was_made_again_is_never_read_from_the_old_offset(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("again"))
    send(kafka.bootstrap, topic, [b"old"] * 3)
    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        end = source.latest(start, ReadLimit())
        assert payloads(source, start, end) == [b"old"] * 3
        remake_topic(kafka.bootstrap, topic)
        send(kafka.bootstrap, topic, [b"new"] * 5)
        with pytest.raises(FatalError, match=r"PEN-5011.*made again"):
            payloads(source, start, end)
        with pytest.raises(FatalError, match=r"PEN-5011.*made again"):
            source.latest(end, ReadLimit())
    with opened_source(make_source(kafka, topic, on_lost="earliest")) as source:
        assert payloads(source, end, source.latest(end, ReadLimit())) == [b"new"] * 5


def test_a_topic_that_is_deleted_is_named_instead_of_waited_for(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "NO_PROGRESS_SECS", 1.0)
    kept, topic = (make_topic(kafka.bootstrap, fresh(name)) for name in ("kept", "deleted"))
    send(kafka.bootstrap, topic, [b"old"] * 3)
    with opened_source(make_source(kafka, "^deleted-.*", kept)) as source:
        start = source.initial()
        end = source.latest(start, ReadLimit())
        delete_topic(kafka.bootstrap, topic)
        with pytest.raises((FatalError, RetryableError), match=topic):
            payloads(source, start, end)
        with pytest.raises(FatalError, match=f"PEN-5011.*{topic}.*is gone"):
            source.latest(end, ReadLimit())
    with opened_source(make_source(kafka, "^deleted-.*", kept, on_lost="earliest")) as source:
        assert topic not in source.latest(end, ReadLimit()).topics


@pytest.mark.parametrize("is_made_again", [True, False])
def test_an_epoch_of_a_topic_that_is_gone_can_still_be_read_if_losses_are_accepted(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch, is_made_again: bool
) -> None:
    """It stopped, at each start again, with the advice to set what was set."""
    monkeypatch.setattr(read, "NO_PROGRESS_SECS", 1.0)
    kept, topic = (make_topic(kafka.bootstrap, fresh(name)) for name in ("kept", "lost"))
    send(kafka.bootstrap, kept, [b"kept"])
    send(kafka.bootstrap, topic, [b"old"] * 3)
    with opened_source(make_source(kafka, f"^{topic}$", kept, on_lost="earliest")) as source:
        start = source.initial()
        end = source.latest(start, ReadLimit())
        splits = source.split(start, end)
        if is_made_again:
            remake_topic(kafka.bootstrap, topic)
            send(kafka.bootstrap, topic, [b"new"] * 3)
        else:
            delete_topic(kafka.bootstrap, topic)
        with pytest.raises(RetryableError, match=topic):
            [list(source.read(split)) for split in splits]
        assert payloads(source, start, end) == [b"kept"]
        assert payloads(source, end, source.latest(end, ReadLimit())) == [b"new"] * (3 * is_made_again)


# -- what comes while it runs ------------------------------------------------------------------------------------------


def test_partitions_and_topics_that_come_later_are_read_from_their_first_record(kafka: KafkaServer) -> None:
    stem = fresh("later")
    topic = make_topic(kafka.bootstrap, f"{stem}-a")
    send(kafka.bootstrap, topic, [b"skipped"])
    with opened_source(make_source(kafka, f"^{stem}-.*", start="latest")) as source:
        start = source.initial()
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(60)
        send(kafka.bootstrap, topic, [b"new partition"], 1)
        other = make_topic(kafka.bootstrap, f"{stem}-b")
        send(kafka.bootstrap, other, [b"new topic"])

        def whole() -> Offsets | None:
            end = source.latest(start, ReadLimit())
            return end if dict(end.places()) == {(topic, 0): 1, (topic, 1): 1, (other, 0): 1} else None

        end = wait_until(whole, "the new partition and topic")
        assert payloads(source, start, end) == [b"new partition", b"new topic"]
        assert set(source.schema()) == {topic, other}


@pytest.mark.parametrize("how", ["earliest", "latest", "timestamp", "group"])
def test_a_first_run_begins_where_it_is_told(kafka: KafkaServer, how: str) -> None:
    topic, group = make_topic(kafka.bootstrap, fresh("start"), 2, retention_ms=-1), fresh("group")
    for number in range(4):
        send(kafka.bootstrap, topic, [str(number).encode()], timestamp=1_700_000_000_000 + number * 1000)
    if how == "group":
        consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
        consumer.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
        consumer.close()
    start: Any = {
        "timestamp": {"timestamp": datetime.fromtimestamp(1_700_000_002, UTC).isoformat()},
        "group": {"group": group},
    }.get(how, how)
    with opened_source(make_source(kafka, topic, start=start)) as source:
        found = everything(source)
    assert found == {"earliest": [b"0", b"1", b"2", b"3"], "timestamp": [b"2", b"3"], "group": [b"3"]}.get(how, [])


def led(kafka: KafkaServer, topic: str, partitions: int) -> str:
    """A topic that was just made, once all its partitions have leaders."""
    cluster = Cluster(ClusterConfig(bootstrap_servers=kafka.bootstrap))
    places = [(topic, partition) for partition in range(partitions)]
    wait_until(lambda: len(cluster.edges(places)[0]) == partitions, f"leaders of {topic}")
    return topic


@pytest.mark.parametrize("how", ["latest", "timestamp", "group"])
def test_a_partition_without_a_leader_is_waited_for_before_a_first_run_begins(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What is not in the first position would be read from its first record, however old that is."""
    topic = led(kafka, make_topic(kafka.bootstrap, fresh("leaderless"), 2), 2)
    start: Any = {"timestamp": {"timestamp": datetime.now(UTC)}, "group": {"group": "somebody"}}.get(how, how)
    edges = Cluster.edges

    def without_one(self: Cluster, places: Any, committed: bool = True) -> Any:
        return edges(self, [place for place in places if place[1] != 1], committed)

    with opened_source(make_source(kafka, topic, start=start)) as source:
        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "edges", without_one)
            with pytest.raises(RetryableError, match=r"leaderless.*/1 has no leader"):
                source.initial()
        assert len(list(source.initial().places())) == 2


def test_a_drain_does_not_end_before_a_partition_that_has_no_leader_for_now(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended well, and the records of the partition were left for another run."""
    topic = led(kafka, make_topic(kafka.bootstrap, fresh("leaderless"), 2), 2)
    for partition in (0, 1):
        send(kafka.bootstrap, topic, [b"there"], partition)
    edges = Cluster.edges

    def without_one(self: Cluster, places: Any, committed: bool = True) -> Any:
        return edges(self, [place for place in places if place[1] != 1], committed)

    with opened_source(make_source(kafka, topic)) as source:
        start = source.initial()
        until = source.latest(start, ReadLimit(whole=True))
        monkeypatch.setattr(Cluster, "edges", without_one)
        with pytest.raises(RetryableError, match=r"leaderless.*/1 has no leader"):
            source.latest(start, ReadLimit(whole=True))
        part = source.latest(start, ReadLimit(until=until))
        assert dict(part.places())[topic, 0] == 1
        with pytest.raises(RetryableError, match=r"leaderless.*/1 has no leader"):
            source.latest(part, ReadLimit(until=until))
        monkeypatch.undo()
        assert source.latest(part, ReadLimit(until=until)) == until


def test_a_group_that_is_behind_an_open_transaction_is_waited_for(kafka: KafkaServer) -> None:
    """A consumer that reads uncommitted records may be past the place to which others can read."""
    topic, group = make_topic(kafka.bootstrap, fresh("ahead")), fresh("group")
    send(kafka.bootstrap, topic, [b"plain"])
    with transaction(kafka.bootstrap) as producer:
        producer.produce(topic, b"open")
        assert producer.flush(60) == 0
        others = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
        others.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False)
        others.close()
        with opened_source(make_source(kafka, topic, start={"group": group})) as source:
            start = source.initial()
            assert source.latest(start, ReadLimit()) == start
            assert dict(start.places()) == {(topic, 0): 2}


def test_offsets_are_committed_to_a_group_for_others_to_see(kafka: KafkaServer) -> None:
    topic, group = make_topic(kafka.bootstrap, fresh("acked"), 2), fresh("group")
    send(kafka.bootstrap, topic, [b"1", b"2"])
    with opened_source(make_source(kafka, topic, group_id=group)) as source:
        end = source.latest(source.initial(), ReadLimit())
        acknowledged(source, end)
        acknowledged(source, end)
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    found = consumer.committed([TopicPartition(topic, p) for p in range(2)], timeout=60)
    consumer.close()
    assert [each.offset for each in found] == [2, 0]


def test_a_group_that_has_consumers_of_its_own_holds_nothing_up(kafka: KafkaServer) -> None:
    """A drain waits for what can still be acknowledged; the broker takes no offsets from others while a group has members."""
    topic, group = make_topic(kafka.bootstrap, fresh("members")), fresh("group")
    send(kafka.bootstrap, topic, [b"1", b"2"])
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": group, "enable.auto.commit": False}
    member = Consumer(settings)
    member.subscribe([topic])
    with opened_source(make_source(kafka, topic, group_id=group)) as source:
        end = source.latest(source.initial(), ReadLimit())
        wait_until(lambda: member.poll(0.1) or member.assignment(), "the group to have a member")
        acknowledged(source, end)
        assert "consumers of its own" in source.health_check().reason
        member.close()
        acknowledged(source, end)
        assert str(source.health_check()) == "healthy"
        delete_topic(kafka.bootstrap, topic)
        acknowledged(source, end)
        assert source.config.on_lost == "stop"
        with pytest.raises(FatalError, match="is gone"):
            source.latest(end, ReadLimit())
        acknowledged(source, end)


def test_lag_counts_what_is_there_and_not_planned(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("lag"))
    send(kafka.bootstrap, topic, [b"x"] * 10)
    with opened_source(make_source(kafka, topic)) as source:
        source.latest(source.initial(), ReadLimit(rows=4))
        assert source.lag() == 6
        assert str(source.health_check()) == "healthy"
        assert source.check()[0].what == "1 topics with 1 partitions"


def test_a_pattern_that_no_topic_fits_yet_is_no_fault(kafka: KafkaServer) -> None:
    with opened_source(make_source(kafka, f"^{fresh('later')}.*")) as source:
        assert [(each.ok, each.what) for each in source.check()] == [(True, "no topic matches yet")]
        assert source.latest(source.initial(), ReadLimit()) == source.initial()


# -- in bulk, and one by one -------------------------------------------------------------------------------------------


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_that_the_guarantees_rest_on_are_refused() -> None:
    for name in ("isolation.level", "enable.auto.commit", "error_cb"):
        with pytest.raises(ValidationError, match="cannot be set"):
            KafkaConfig(bootstrap_servers="b", topics=("t",), options={name: "x"})
    with pytest.raises(ValidationError, match="is a secret"):
        KafkaConfig(bootstrap_servers="b", topics=("t",), options={"sasl.password": "plain"})
    with pytest.raises(ValidationError, match="time zone"):
        KafkaConfig(bootstrap_servers="b", topics=("t",), start={"timestamp": "2026-01-01T00:00:00"})


def test_an_unknown_setting_of_the_client_is_a_config_error(kafka: KafkaServer) -> None:
    with pytest.raises(ConfigError, match="PEN-1016"):
        make_source(kafka, "t", options={"no.such.setting": "1"}).open()


def test_a_setting_that_cannot_be_used_where_a_task_runs_is_a_config_error(kafka: KafkaServer, filled: str) -> None:
    """Such as a file that is on the driver's machine alone."""
    with opened_source(make_source(kafka, filled)) as source:
        splits = source.split(source.initial(), source.latest(source.initial(), ReadLimit()))
        task = make_source(kafka, filled, options={"fetch.min.bytes": 2, "fetch.wait.max.ms": "many"})
        task._opened = source._opened
        with pytest.raises(ConfigError, match=r"fetch\.wait\.max\.ms"):
            list(task.read(splits[0]))


def test_large_pieces_are_cut_and_small_ones_share_a_task() -> None:
    pieces = [Piece("t", "i", 0, 100, 300_100), *(Piece("t", "i", p, 0, 10) for p in range(1, 5))]
    splits = packed(pieces, 4)
    assert len(splits) == 4
    assert [(each.partition, each.start, each.end) for split in splits for each in split.pieces][:4] == [
        (0, 100, 75_110), (0, 75_110, 150_120), (0, 150_120, 225_130), (0, 225_130, 300_100),
    ]  # fmt: skip
    assert [len(split.pieces) for split in splits] == [1, 1, 1, 5]
    assert packed(pieces[1:], 4) == [packed(pieces[1:], 1)[0]]


def test_a_task_opens_without_asking_the_cluster_anything() -> None:
    source = Kafka(KafkaConfig(bootstrap_servers="127.0.0.1:1", topics=("t",)))
    source.open(SourceContext(in_task=True))
    source.close()


def test_an_offset_that_the_client_does_not_know_is_none() -> None:
    """A leader that goes while it is asked: the client answers -1001 without an error, and a position must not go back."""
    answers = {place: Future() for place in (("t", 0), ("t", 1), ("t", 2))}
    for future, offset in zip(answers.values(), (7, -1001, -1), strict=True):
        future.set_result(SimpleNamespace(offset=offset))
    assert client._answers(answers) == {("t", 0): 7, ("t", 2): -1}
