"""Both ways of reading records, in bulk and one by one: the same rows, whatever is in them."""

from __future__ import annotations

from ctypes import c_char_p, c_size_t, c_ssize_t, c_void_p
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Producer

from kafka_topics import batches, fresh, make_topic, send, transaction
from penstock.connectors.kafka import bulk
from penstock.connectors.kafka.library import library
from penstock.connectors.kafka.send import _handle
from penstock.connectors.kafka.source import Kafka, KafkaConfig
from penstock.errors import FatalError
from penstock.source import ReadLimit
from penstock.testing.kafka import KafkaServer
from penstock.testing.processes import wait_until
from penstock.testing.sources.steps import opened_source


def make_source(kafka: KafkaServer, *topics: str, **options: Any) -> Kafka:
    return Kafka(KafkaConfig(bootstrap_servers=kafka.bootstrap, topics=topics, **options))


def read_all(source: Kafka) -> pa.Table:
    start = source.initial()
    splits = source.split(start, source.latest(start, ReadLimit()))
    found = [batch.records for split in splits for batch in batches(source, split)]
    return pa.Table.from_batches(found) if found else pa.table({})


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_both_ways_of_reading_give_the_same_records(
    kafka: KafkaServer, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bulk.available(), "reading in bulk does not work with this client"
    topic = make_topic(kafka.bootstrap, fresh("routes"))
    texts = [None, b"", b"x", b"x" * 12, b"y" * 13, b"\0" * 200, bytes(range(256)) * 3000, None, b"z"]
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": codec, "linger.ms": 20})
    headers: list[Any] = [None, [("a", b"1"), ("\u00e4", None), ("a", b"2"), ("a", None), ("b", b"\xff"), ("", b"")]]
    for number, value in enumerate(texts * 3):
        key = texts[number % 7 - 3] if codec != "gzip" else None
        producer.produce(topic, value, key=key, headers=headers[number % 2], timestamp=-1 if number == 5 else 0)
    assert producer.flush(60) == 0
    with transaction(kafka.bootstrap, commit=False) as aborted:
        aborted.produce(topic, b"aborted")
    send(kafka.bootstrap, topic, [b"last"])
    found = []
    for way in ("bulk", "without headers", "one by one"):
        monkeypatch.setattr(bulk, "available", lambda way=way: way != "one by one")
        with opened_source(make_source(kafka, topic, headers=way != "without headers")) as source:
            wait_until(lambda: source.latest(source.initial(), ReadLimit()).topics[topic].next["0"] == 30, "the end")
            found.append(read_all(source))
    assert found[0].column("payload").to_pylist() == [*texts * 3, b"last"]
    assert found[0].column("attributes").to_pylist()[:3] == [[], [("a", "2"), ("b", "\\xff"), ("", "")], []]
    assert found[0].equals(found[2])
    assert found[0].drop_columns("attributes").equals(found[1].drop_columns("attributes"))
    assert found[1].column("attributes").null_count == 28
    for each in found:
        each.validate(full=True)


def test_a_header_whose_name_is_no_text_is_read(kafka: KafkaServer) -> None:
    """With the client's own objects it ends the process."""
    topic = make_topic(kafka.bootstrap, fresh("named"))
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    _produce_with_header(producer, topic, b"\xff\xfe", b"value")
    assert producer.flush(60) == 0
    with opened_source(make_source(kafka, topic)) as source:
        assert read_all(source).column("attributes").to_pylist() == [[("\\xff\\xfe", "value")]]


def test_a_header_whose_name_is_no_text_is_named_where_it_cannot_be_read(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(kafka.bootstrap, fresh("named"))
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(topic, b"first")
    _produce_with_header(producer, topic, b"\xff\xfe", b"value")
    assert producer.flush(60) == 0
    monkeypatch.setattr(bulk, "available", lambda: False)
    with opened_source(make_source(kafka, topic)) as source:
        with pytest.raises(FatalError, match=f"{topic}/0@1 has a header whose name is no text") as error:
            read_all(source)
        assert "headers = false" in error.value.hint
    with opened_source(make_source(kafka, topic, headers=False)) as source:
        assert read_all(source).column("payload").to_pylist() == [b"first", b"payload"]


def _produce_with_header(producer: Producer, topic: str, name: bytes, value: bytes) -> None:
    """By the C library: the client's own objects take text alone."""
    lib = library()
    lib.rd_kafka_headers_new.restype = c_void_p
    headers = c_void_p(lib.rd_kafka_headers_new(c_size_t(1)))
    lib.rd_kafka_header_add(headers, name, c_ssize_t(len(name)), value, c_ssize_t(len(value)))
    kinds = {"end": 0, "topic": 1, "value": 4, "headers": 10}
    code = lib.rd_kafka_producev(
        c_void_p(_handle(producer)),
        *(kinds["topic"], c_char_p(topic.encode())),
        *(kinds["value"], c_char_p(b"payload"), c_size_t(7)),
        *(kinds["headers"], headers),
        kinds["end"],
    )
    assert code == 0


def test_addresses_are_reached_that_processes_on_arm_have() -> None:
    """There the heap is in the upper half of 48 bits, and no record could be read in bulk."""
    most = max(
        bulk._FIRST_ADDRESS + bulk._memory(kind).nbytes for kind in (np.uint8, np.int32, np.int64)
    )  # never show one
    assert most == 1 << 48


def test_records_of_nothing_but_nulls_are_read_in_bulk(kafka: KafkaServer) -> None:
    topic = make_topic(kafka.bootstrap, fresh("nulls"), 3)
    for partition in range(3):
        send(kafka.bootstrap, topic, [None] * 100, partition)
    with opened_source(make_source(kafka, topic, headers=False)) as source:
        found = read_all(source)
    assert found.num_rows == found.column("key").null_count == found.column("payload").null_count == 300


def test_a_client_that_has_the_time_elsewhere_is_asked_for_it(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(kafka.bootstrap, fresh("elsewhere"))
    send(kafka.bootstrap, topic, [b"%d" % n for n in range(100)])
    found = []
    for place in (bulk._TIME, bulk._TIME + 8):
        monkeypatch.setattr(bulk, "_TIME", place)
        with opened_source(make_source(kafka, topic)) as source:
            found.append(read_all(source))
    assert found[0].num_rows == 100
    assert found[0].equals(found[1])
