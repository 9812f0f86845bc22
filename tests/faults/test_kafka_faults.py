"""A broker that is killed and restarted, transactions that time out or hang: nothing lost, nothing doubled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_topics import batches, fresh, make_topic, records, send, transaction
from penstock import failpoints
from penstock.connectors.kafka import publish
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.errors import FatalError, RetryableError
from penstock.sink import CommittedEpoch, Epoch, Task
from penstock.source import ReadLimit
from penstock.testing.kafka import SOON_BACK, KafkaServer
from penstock.testing.processes import wait_until
from penstock.testing.sinks.steps import END, TOPIC, epoch_of, opened_sink, rows, stage
from penstock.testing.sources.steps import opened_source


@pytest.fixture(scope="module")
def broker(kafka_installed: None) -> Iterator[KafkaServer]:
    """One that the tests kill; it looks for transactions that timed out every half second."""
    with KafkaServer(
        settings={**SOON_BACK, "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}
    ) as running:
        yield running


def make_sink(broker: KafkaServer, stem: str, **options: Any) -> KafkaSink:
    config = KafkaSinkConfig(
        bootstrap_servers=broker.bootstrap, topic=f"{stem}.{{topic}}", marker_topic=f"_{stem}", partitions=2, **options
    )
    return KafkaSink(config)


def ids(broker: KafkaServer, stem: str) -> list[int]:
    return sorted(json.loads(each.value())["id"] for each in records(broker.bootstrap, f"{stem}.lake.orders"))


def until_done(attempt: Callable[[], Any]) -> Any:
    """What the runtime does: a retryable error is tried again."""

    failures: list[str] = []

    def tried() -> Any:
        try:
            return attempt() or True
        except RetryableError as error:
            failures.append(str(error))
            return None

    try:
        return wait_until(tried, "the call to come through")
    except AssertionError as error:
        raise AssertionError(f"{error}: {failures[-1]}") from None


def once(what: Callable[[], None]) -> Callable[[str], None]:
    """A failpoint that does something at its first pass."""
    left = [what]

    def hit(name: str) -> None:
        if left and name == "commit.before":
            left.pop()()

    return hit


# -- the source --------------------------------------------------------------------------------------------------------


def test_a_broker_that_is_killed_while_a_range_is_read_delays_it_only(broker: KafkaServer) -> None:
    topic = make_topic(broker.bootstrap, fresh("read"))
    send(broker.bootstrap, topic, [f"{n:0200d}".encode() for n in range(60_000)])
    source = Kafka(
        KafkaConfig(bootstrap_servers=broker.bootstrap, topics=(topic,), options={"queued.min.messages": 1000})
    )
    with opened_source(source) as opened:
        start = opened.initial()
        end = opened.latest(start, ReadLimit())
        restart = threading.Thread(target=broker.restart, args=("kill",))
        found: list[int] = []
        for split in opened.split(start, end):
            for batch in batches(opened, split):
                if not found:
                    restart.start()
                found += [int(each) for each in batch.records.column("payload").to_pylist()]
        restart.join()
        assert found == list(range(60_000))
        assert until_done(lambda: opened.latest(end, ReadLimit())) == end


def test_a_group_whose_coordinator_is_away_holds_no_epoch_up(broker: KafkaServer) -> None:
    """A consumer's commit waited for it for most of a minute, and with it every epoch."""
    topic = make_topic(broker.bootstrap, fresh("acked"))
    send(broker.bootstrap, topic, [b"1"])
    source = Kafka(KafkaConfig(bootstrap_servers=broker.bootstrap, topics=(topic,), group_id=fresh("group")))
    with opened_source(source) as opened:
        end = opened.latest(opened.initial(), ReadLimit())
        until_done(lambda: opened.ack(end))
        broker.kill()
        try:
            began = time.monotonic()
            with pytest.raises(RetryableError, match="cannot commit offsets to the group"):
                opened.ack(end)
            assert time.monotonic() - began < 20
        finally:
            broker.start()
        until_done(lambda: opened.ack(end))


# -- the sink ----------------------------------------------------------------------------------------------------------


def test_a_broker_that_is_killed_while_rows_are_staged_loses_nothing(broker: KafkaServer) -> None:
    stem = fresh("staged")
    sink = make_sink(broker, stem)
    epoch = epoch_of(1)
    with opened_sink(sink) as driver:
        assert until_done(lambda: [driver.committed_epoch("kit", TOPIC)])
        receipt = stage(sink, epoch, rows(0))
        _settled(broker, f"_{stem}")
        broker.restart("kill")
        until_done(lambda: driver.commit_epoch(epoch, [receipt], END))
        assert ids(broker, stem) == list(range(10))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_broker_that_is_killed_while_an_epoch_is_published_doubles_nothing(
    broker: KafkaServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before the commit is asked for, or between the request and its answer."""
    stem = fresh("published")
    sink = make_sink(broker, stem)
    monkeypatch.setattr(publish, "UNDECIDED_SECS", 5.0)
    with opened_sink(sink) as driver:
        until_done(lambda: driver.commit_epoch(epoch_of(1), [stage(sink, epoch_of(1), rows(0))], END))
        _settled(broker, f"_{stem}")
        epoch = epoch_of(2)
        receipts = [stage(sink, epoch, rows(10))]
        restart = threading.Thread(target=broker.restart, args=("kill",))
        hit = once((lambda: (restart.start(), restart.join())) if when == "before" else restart.start)
        monkeypatch.setattr(failpoints, "hit", hit)
        try:
            until_done(lambda: driver.commit_epoch(epoch, receipts, END))
        except FatalError as error:  # the broker lost the end of the transaction, which its own tool repairs
            if error.code != "PEN-5020":
                raise
            restart.join()
            _abort_hanging(broker, [f"_{stem}", f"{stem}.lake.orders"])
            until_done(lambda: driver.commit_epoch(epoch, receipts, END))
        restart.join()
    wait_until(lambda: ids(broker, stem) == list(range(20)), "both epochs to be visible, once")


def _settled(broker: KafkaServer, topic: str) -> None:
    """A broker that is killed right after a commit was answered may lose its end (replication factor 1)."""
    wait_until(lambda: _edge(broker, topic, True) == _edge(broker, topic, False), "the transaction to end")
    time.sleep(0.2)


def _edge(broker: KafkaServer, topic: str, committed: bool) -> int:
    from penstock.connectors.kafka.client import Cluster

    config = KafkaConfig(bootstrap_servers=broker.bootstrap, topics=(topic,))
    return Cluster(config).edges([(topic, 0)], committed)[1].get((topic, 0), -1)


def _abort_hanging(broker: KafkaServer, topics: list[str]) -> None:
    main = "org.apache.kafka.tools.TransactionsCommand"
    for topic in topics:
        listed = broker.tool(
            main,
            "--bootstrap-server",
            broker.bootstrap,
            "find-hanging",
            "--topic",
            topic,
            "--max-transaction-timeout",
            "0",
        )
        for line in listed.splitlines()[1:]:
            name, partition, _, _, start, *_ = line.split()
            where = ["--topic", name, "--partition", partition, "--start-offset", start]
            broker.tool(main, "--bootstrap-server", broker.bootstrap, "abort", *where)


def test_publishing_that_takes_longer_than_its_transaction_may_says_so_and_comes_through(
    broker: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = fresh("timeout")
    sink = make_sink(broker, stem, transaction_timeout_ms=1000)
    epoch = epoch_of(1)
    with opened_sink(sink) as driver:
        receipts = [stage(sink, epoch, rows(0))]
        driver.committed_epoch("kit", TOPIC)
        aborted = once(
            lambda: wait_until(
                lambda: (
                    len(records(broker.bootstrap, f"{stem}.lake.orders", False)) == 10
                    and _edge(broker, f"_{stem}", True) == _edge(broker, f"_{stem}", False) > 0
                ),
                "the brokers to abort the transaction",
            )
        )
        monkeypatch.setattr(failpoints, "hit", aborted)
        with pytest.raises(RetryableError, match=r"transaction_timeout_ms") as slow:
            driver.commit_epoch(epoch, receipts, END)
        assert "max_epoch_rows" in slow.value.hint
        assert ids(broker, stem) == []
        driver.commit_epoch(epoch, receipts, END)
    assert ids(broker, stem) == list(range(10))


def test_a_transaction_that_hangs_in_the_markers_topic_stops_the_sink_until_it_is_ended(
    broker: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "UNDECIDED_SECS", 1.0)
    stem = fresh("hanging")
    sink = make_sink(broker, stem)
    with opened_sink(sink) as driver:
        assert driver.committed_epoch("kit", TOPIC) is None
        with transaction(broker.bootstrap, commit=False) as producer:
            producer.produce(f"_{stem}", b"{}", key=b'["kit","/lake/orders"]')
            assert producer.flush(60) == 0
            with pytest.raises(FatalError, match="PEN-5020") as hanging:
                driver.committed_epoch("kit", TOPIC)
            assert "kafka-transactions.sh" in hanging.value.hint
        assert until_done(lambda: [driver.committed_epoch("kit", TOPIC)]) == [None]
        until_done(lambda: driver.commit_epoch(epoch_of(1), [stage(sink, epoch_of(1), rows(0))], END))
    assert ids(broker, stem) == list(range(10))


def test_a_zombie_that_wakes_in_its_successors_transaction_adds_nothing(
    broker: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fence each other at most once, one publishes, and the other finds the marker."""
    stem = fresh("zombie")
    sink = make_sink(broker, stem)
    epoch = epoch_of(1)
    receipts = [stage(sink, epoch, rows(0)), stage(sink, epoch, rows(10), task=1)]

    def successor() -> None:
        with opened_sink(sink) as other:
            until_done(lambda: other.commit_epoch(epoch, receipts, END))

    monkeypatch.setattr(failpoints, "hit", once(successor))
    with opened_sink(sink) as zombie:
        with pytest.raises(RetryableError, match="PEN-2005"):
            zombie.commit_epoch(epoch, receipts, END)
        zombie.commit_epoch(epoch, receipts, END)
        assert zombie.committed_epoch("kit", TOPIC) == CommittedEpoch(incarnation="one", number=1, end=END)
    assert ids(broker, stem) == list(range(20))


def test_a_zombie_that_finds_its_staged_rows_removed_asks_first_whether_they_are_published(
    broker: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = fresh("removed")
    sink = make_sink(broker, stem)
    epoch = epoch_of(1)
    receipts = [stage(sink, epoch, rows(0)), stage(sink, epoch, rows(50), topic="/z", task=1)]

    def successor() -> None:
        with opened_sink(sink) as other:
            until_done(lambda: other.commit_epoch(epoch, receipts, END))

    monkeypatch.setattr(failpoints, "hit", once(successor))  # after the first topic, before the second
    with opened_sink(sink) as zombie:
        until_done(lambda: zombie.commit_epoch(epoch, receipts, END))
        assert zombie.committed_epoch("kit", "/z") is not None
    assert ids(broker, stem) == list(range(10))
    assert len(records(broker.bootstrap, f"{stem}.z")) == 10


def test_a_task_of_a_dead_driver_that_goes_on_writing_is_not_read(broker: KafkaServer) -> None:
    stem = fresh("orphan")
    sink = make_sink(broker, stem)
    first, second = Epoch("kit", "one", 1), Epoch("kit", "one", 1)
    with opened_sink(sink) as orphan, opened_sink(sink) as driver:
        orphan.begin_epoch(first, Task(0))
        orphan.write_batch(TOPIC, rows(0))
        receipt = stage(sink, second, rows(0))
        orphan.pre_commit(first)
        driver.commit_epoch(second, [receipt], END)
    assert ids(broker, stem) == list(range(10))


def test_a_transactional_id_that_the_brokers_forgot_is_taken_again(kafka_installed: None) -> None:
    """After a week without an epoch; here after half a second."""
    soon = {"transactional.id.expiration.ms": "500", "producer.id.expiration.ms": "500"}
    checks = ("transaction.remove.expired.transaction.cleanup", "producer.id.expiration.check")
    with KafkaServer(settings={**soon, **{f"{each}.interval.ms": "100" for each in checks}}) as running:
        stem, refused, count = fresh("expired"), [], 0
        with opened_sink(make_sink(running, stem)) as driver:

            def forgotten() -> bool:
                nonlocal count
                count += 1
                time.sleep(1)
                epoch = epoch_of(count)
                receipts = [stage(make_sink(running, stem), epoch, rows(count * 10))]
                try:
                    driver.commit_epoch(epoch, receipts, END)
                except RetryableError as error:
                    refused.append(str(error))
                    until_done(lambda: driver.commit_epoch(epoch, receipts, END))
                return any("INVALID_PRODUCER_ID_MAPPING" in each for each in refused)

            wait_until(forgotten, "the brokers to forget the sink")
        assert ids(running, stem) == list(range(10, count * 10 + 10))
