"""Three brokers: a partition's leader is killed while it is read, and that of the markers while an epoch is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from kafka_topics import QUIET, batches, fresh, make_topic, records, send
from penstock import failpoints
from penstock.connectors.kafka.sink import KafkaSink, KafkaSinkConfig
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.errors import RetryableError
from penstock.source import ReadLimit
from penstock.testing.kafka import KafkaCluster, KafkaServer
from penstock.testing.processes import wait_until
from penstock.testing.sinks.steps import END, epoch_of, opened_sink, rows, stage
from penstock.testing.sources.steps import opened_source


def leader(cluster: KafkaCluster, topic: str) -> KafkaServer:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, **QUIET})

    def found() -> int | None:
        id = admin.list_topics(topic, timeout=10).topics[topic].partitions[0].leader
        return id if id > 0 else None

    return cluster.servers[wait_until(found, f"a leader of {topic}") - 1]


def settings(address: str, topic: str) -> dict[str, Any]:
    """What a topic was made with, in the words of the sink's options."""
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    partitions = admin.list_topics(topic, timeout=60).topics[topic].partitions
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    (asked,) = admin.describe_configs([resource]).values()
    kept = int(asked.result(60)["retention.ms"].value)
    (replicas,) = {len(each.replicas) for each in partitions.values()}
    return {"partitions": len(partitions), "replication": replicas, "topic_config": {"retention.ms": kept}}


def until_done(attempt: Callable[[], Any]) -> None:
    def tried() -> bool:
        try:
            attempt()
        except RetryableError:
            return False
        return True

    wait_until(tried, "the call to come through")


def test_leaders_that_change_lose_and_double_nothing(kafka_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with KafkaCluster() as cluster:
        address, topic, stem = cluster.bootstrap, fresh("led"), fresh("sink")
        make_topic(address, topic, 1, replication=3)
        send(address, topic, [b"%0200d" % n for n in range(30_000)])
        source = Kafka(KafkaConfig(bootstrap_servers=address, topics=(topic,), options={"queued.min.messages": 1000}))
        with opened_source(source) as opened:
            start = opened.initial()
            end = opened.latest(start, ReadLimit())
            found: list[int] = []
            down: list[KafkaServer] = []

            def read() -> None:
                found.clear()
                for split in opened.split(start, end):
                    for batch in batches(opened, split):
                        if not down:
                            down.append(leader(cluster, topic))
                            down[0].kill()
                        found.extend(int(each) for each in batch.records.column("payload").to_pylist())

            until_done(read)
        assert found == list(range(30_000))
        down.pop().start()
        cluster.wait_until_all()

        made = {"partitions": 2, "replication": 3, "topic_config": {"retention.ms": 3_600_000}}
        sink = KafkaSink(
            KafkaSinkConfig(bootstrap_servers=address, topic=f"{stem}.{{topic}}", marker_topic=f"_{stem}", **made)
        )
        with opened_sink(sink) as driver:
            until_done(lambda: driver.commit_epoch(epoch_of(1), [stage(sink, epoch_of(1), rows(0))], END))
            receipts: list[Any] = []
            until_done(lambda: receipts.append(stage(sink, epoch_of(2), rows(10))))

            def hit(name: str) -> None:
                if name == "commit.before" and not down:
                    down.append(leader(cluster, f"_{stem}"))
                    down[0].kill()

            monkeypatch.setattr(failpoints, "hit", hit)
            until_done(lambda: driver.commit_epoch(epoch_of(2), receipts, END))
        assert len(down) == 1
        assert settings(address, f"{stem}.lake.orders") == made
        seen = [json.loads(each.value())["id"] for each in records(address, f"{stem}.lake.orders")]
        assert sorted(seen) == list(range(20))
