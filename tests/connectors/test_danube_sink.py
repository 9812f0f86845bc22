"""The Danube sink, against a broker that speaks the protocol on a real socket."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.connectors.danube import Danube, DanubeSink, session
from penstock.connectors.danube.message import envelope, identity
from penstock.connectors.danube.producers import Message, Producers
from penstock.connectors.danube.sink import DanubeSinkConfig
from penstock.connectors.danube.source import DanubeSourceConfig
from penstock.errors import ConfigError, ConnectorError, DataError, RetryableError
from penstock.formats import Format, WireSchema
from penstock.formats.json_schema import JsonSchema, JsonSchemaConfig
from penstock.pipeline.routing import Route, Router
from penstock.runtime.job import Job, Part
from penstock.schema.registry.danube import DanubeRegistry
from penstock.schema.registry.danube_client import DanubeConfig, fnv1a
from penstock.schema.registry.versions import Minimum, Pinned
from penstock.sink import Epoch, SinkContext, Task, TopicContext
from penstock.source import ENVELOPE_SCHEMA
from penstock.testing import MemorySink, MemorySinkConfig, RecordingSender, SinkContract
from penstock.testing.danube import DanubeBroker
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.xdist_group("danube")

TOPIC = "/shop/orders"
ROWS = pa.record_batch({"id": [1, 2, 3], "name": ["a", "b", "a"]})


@pytest.fixture(scope="module")
def running() -> Iterator[DanubeBroker]:
    with DanubeBroker() as broker:
        yield broker


@pytest.fixture
def broker(running: DanubeBroker) -> DanubeBroker:
    """With nothing in it."""
    running.tell("reset")
    return running


@pytest.fixture
def own() -> Iterator[DanubeBroker]:
    """One that the test may kill."""
    with DanubeBroker() as broker:
        yield broker


class TestContract(SinkContract):
    @pytest.fixture
    def sink(self, broker: DanubeBroker) -> DanubeSink:
        return DanubeSink(DanubeSinkConfig(url=broker.url, topic="/kit/rows"))

    @pytest.fixture
    def visible(self, broker: DanubeBroker) -> Any:
        return lambda: [json.loads(message.payload) for message in broker.messages("/kit/rows")]


def send(
    broker: DanubeBroker,
    *batches: pa.RecordBatch,
    number: int = 1,
    task: int = 0,
    topic: str = TOPIC,
    encoder: Format[Any] | None = None,
    template: str = "/{topic}",
    name: str = "",
    **options: Any,
) -> None:
    """What one task of an epoch sends."""
    sink = pickle.loads(pickle.dumps(DanubeSink(DanubeSinkConfig(url=broker.url, topic=template, **options))))
    epoch = Epoch("orders", "incarnation", number)
    sink.open(SinkContext({topic: TopicContext(encoder=encoder)}, name=name))
    try:
        sink.begin_epoch(epoch, Task(task))
        for batch in batches:
            sink.write_batch(topic, batch)
        sink.pre_commit(epoch)
    finally:
        sink.close()


def payloads(broker: DanubeBroker, topic: str = TOPIC) -> list[Any]:
    return [json.loads(message.payload) for message in broker.messages(topic)]


def test_a_message_carries_key_attributes_and_its_own_name(broker: DanubeBroker) -> None:
    send(broker, ROWS, key=["id"], attributes=["name"])
    messages = sorted(broker.messages(TOPIC), key=lambda message: message.routing_key)
    assert [json.loads(message.payload) for message in messages] == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert [message.routing_key for message in messages] == ["1", "2", "3"]
    assert [message.attributes["name"] for message in messages] == ["a", "b", "a"]
    named = messages[1].attributes
    assert (named["penstock.pipeline"], named["penstock.incarnation"]) == ("orders", "incarnation")
    assert named["penstock.epoch"] == "1"
    assert re.fullmatch(f"{TOPIC}@0.[0-9a-f]{{16}}.0", named["penstock.sequence"])
    assert len({message.attributes["penstock.sequence"] for message in messages}) == len(messages)


def test_a_repeated_epoch_has_the_same_identities_and_another_one_has_not(broker: DanubeBroker) -> None:
    send(broker, ROWS)
    send(broker, ROWS.slice(0, 1), ROWS.slice(1))  # read in other batches
    found = [identity(message) for message in broker.messages(TOPIC)]
    assert sorted(found[:3]) == sorted(found[3:])
    assert len(set(found)) == 3
    send(broker, ROWS, number=2)
    send(broker, ROWS, task=1)
    send(broker, ROWS, name="second")  # another sink of the pipeline, into the same topic
    assert len({identity(message) for message in broker.messages(TOPIC)}) == 12


def test_a_key_keeps_its_order_while_many_are_sent_at_once(broker: DanubeBroker) -> None:
    count = 400
    rows = pa.record_batch({"id": list(range(count)), "key": [f"k{number % 7}" for number in range(count)]})
    send(broker, rows, key=["key"], window=200)
    seen: dict[str, list[int]] = {}
    for row in payloads(broker):
        seen.setdefault(row["key"], []).append(row["id"])
    assert sum(map(len, seen.values())) == count
    assert all(ids == sorted(ids) for ids in seen.values())


def test_one_task_sends_an_epoch_unless_its_route_keeps_keys_apart() -> None:
    sinks = {
        "danube": DanubeSink(DanubeSinkConfig(url="http://127.0.0.1:1")),
        "memory": MemorySink(MemorySinkConfig(path=Path("unused"))),
    }
    parts = [Part(number, "source", number) for number in range(8)]

    def tasks(*routes: Route, among: tuple[str, ...] = ("danube", "memory")) -> int:
        return len(Job(Epoch("p", "i", 1), parts, {}, sinks, Router(routes, among)).groups(4))

    assert tasks() == 1
    assert tasks(Route(partitions=2)) == 4, "lanes keep the order of each key"
    assert tasks(Route("a", partitions=2), Route("b")) == 1
    assert tasks(Route(sinks=("memory",))) == tasks(among=("memory",)) == 4, "what only a lake gets needs no order"


def test_no_more_than_the_window_wait_for_an_answer(broker: DanubeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most, sent = 0, 0, Producers._send

    async def counted(self: Producers, message: Message) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await sent(self, message)
        finally:
            under_way -= 1

    monkeypatch.setattr(Producers, "_send", counted)
    send(broker, pa.record_batch({"id": list(range(100))}), window=7)
    assert most == 7
    assert len(payloads(broker)) == 100


def test_a_key_keeps_its_order_when_answers_fail(broker: DanubeBroker) -> None:
    broker.tell("fail", method="SendMessage", code="UNAVAILABLE", times=2, after=3, done=True)
    broker.tell("fail", method="SendMessage", code="UNAVAILABLE", times=2, after=5)
    rows = pa.record_batch({"id": list(range(30)), "key": ["one"] * 30})
    send(broker, rows, key=["key"])
    once = list(dict.fromkeys(row["id"] for row in payloads(broker)))
    assert once == list(range(30))
    assert len(payloads(broker)) == 32, "two answers were lost, and those messages sent again"
    assert len({identity(message) for message in broker.messages(TOPIC)}) == 30


def test_partitions_are_chosen_as_every_client_of_danube_does(broker: DanubeBroker) -> None:
    rows = pa.record_batch({"key": [f"key-{number}" for number in range(40)]})
    send(broker, rows, key=["key"], partitions=3)
    for number in range(3):
        found = [row["key"] for row in payloads(broker, f"{TOPIC}-part-{number}")]
        assert found
        assert all(fnv1a(key) % 3 == number for key in found)
    send(broker, ROWS, partitions=3, topic="/shop/turns")
    assert [len(payloads(broker, f"/shop/turns-part-{number}")) for number in range(3)] == [1, 1, 1]


def test_a_topic_may_be_made_of_columns(broker: DanubeBroker) -> None:
    send(broker, ROWS, reliable_dispatch=False)
    sink_topics = {"/by-name/a", "/by-name/b"}
    sink = DanubeSink(DanubeSinkConfig(url=broker.url, topic="/by-name/{name}"))
    sink.open()
    sink.begin_epoch(Epoch("orders", "incarnation", 1), Task(0))
    sink.write_batch(TOPIC, ROWS)
    sink.flush()
    sink.close()
    assert sink_topics <= set(broker.tell("report")["topics"])


@pytest.mark.parametrize(
    ("strategy", "version"), [("latest", 2), (Pinned(pinned=1), 1), (Minimum(minimum=1), 2)], ids=str
)
def test_messages_name_the_version_that_the_strategy_chooses(broker: DanubeBroker, strategy: Any, version: int) -> None:
    registry = DanubeRegistry(DanubeConfig(url=broker.url))
    for text in ('{"type": "object"}', '{"type": "object", "title": "Order"}'):
        registry.register_schema("orders", WireSchema("json_schema", text))
    registry.close()
    send(broker, ROWS, schema_subject="orders", version_strategy=strategy)
    assert {(each.schema_id, each.schema_version) for each in broker.messages(TOPIC)} == {(1, version)}


@pytest.mark.parametrize("kind", ["string", "number", "bytes"])
def test_a_subject_of_plain_values_is_registered_once_if_the_sink_knows_their_type(
    broker: DanubeBroker, kind: str
) -> None:
    with pytest.raises(ConfigError, match="no subject 'notes'"):
        send(broker, ROWS, schema_subject="notes")
    for number in (1, 2):
        send(broker, ROWS, number=number, schema_subject="notes", schema_type=kind)
    assert {(message.schema_id, message.schema_version) for message in broker.messages(TOPIC)} == {(1, 1)}
    registry = DanubeRegistry(DanubeConfig(url=broker.url))
    assert [registry.fetch_schema("notes").type, registry.versions("notes")] == [kind, [1]]
    registry.close()


def test_messages_name_the_schema_of_their_topic_if_it_is_of_the_same_broker(broker: DanubeBroker) -> None:
    registry = DanubeRegistry(DanubeConfig(url=broker.url))
    shape: dict[str, Any] = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string"}}}
    for text in (json.dumps(shape), json.dumps({**shape, "title": "Order"})):
        written = registry.register_schema("orders", WireSchema("json_schema", text))
    registry.close()
    send(broker, ROWS, encoder=JsonSchema(JsonSchemaConfig(), written))
    assert {(each.schema_id, each.schema_version) for each in broker.messages(TOPIC)} == {(1, 2)}
    assert broker.tell("report")["topics"][TOPIC]["subject"] == "orders"
    elsewhere = JsonSchema(JsonSchemaConfig(), replace(written, origin="http://another:6650"))
    send(broker, ROWS, encoder=elsewhere, topic="/shop/elsewhere")
    assert not any(each.HasField("schema_id") for each in broker.messages("/shop/elsewhere"))


def test_what_the_broker_will_never_take_is_a_wrong_setting(broker: DanubeBroker) -> None:
    registry = DanubeRegistry(DanubeConfig(url=broker.url))
    for subject in ("orders", "others"):
        registry.register_schema(subject, WireSchema("json_schema", '{"type": "object"}'))
    registry.close()
    send(broker, ROWS, schema_subject="orders")
    with pytest.raises(ConfigError, match="uses schema subject"):
        send(broker, ROWS, schema_subject="others")
    with pytest.raises(ConfigError, match="dispatch strategy"):
        send(broker, ROWS, reliable_dispatch=False)
    with pytest.raises(ConfigError, match="no version 7"):
        send(broker, ROWS, schema_subject="orders", version_strategy=Pinned(pinned=7))
    with pytest.raises(ConfigError, match="no topic of Danube's"):
        send(broker, ROWS, topic="/one")


def test_a_strategy_or_a_type_without_a_subject_is_refused() -> None:
    with pytest.raises(ValueError, match="schema_subject"):
        DanubeSinkConfig(url="http://localhost:6650", schema_type="string")
    with pytest.raises(ValueError, match="schema_subject"):
        DanubeSinkConfig(url="http://127.0.0.1:1", version_strategy=Pinned(pinned=3))


def test_a_row_over_the_brokers_limit_is_bad_and_the_others_are_sent(broker: DanubeBroker) -> None:
    rows = pa.record_batch({"id": [1, 2, 3], "x": ["a", "b" * 5_000_000, "c"]})
    with pytest.raises(DataError) as caught:
        send(broker, rows)
    assert list(caught.value.rows) == [1]
    assert caught.value.others_written
    with pytest.raises(DataError, match="max_message_bytes"):  # the broker's limit is lower than we were told
        send(broker, rows, topic="/shop/told", max_message_bytes=10_000_000)


def named(broker: DanubeBroker) -> dict[str, list[str]]:
    """What each message is called, by its payload."""
    found: dict[str, list[str]] = {}
    for message in broker.messages(TOPIC):
        found.setdefault(message.payload.decode(), []).append(message.attributes["penstock.sequence"])
    return {payload: sorted(names) for payload, names in found.items()}


def test_the_name_of_a_message_depends_on_no_other(broker: DanubeBroker) -> None:
    """An epoch that is sent again may come in another order, and with rows that were bad ones before."""
    rows = pa.record_batch({"id": [1, 2, 1, 3, 1]})
    send(broker, rows)
    first = named(broker)
    assert sorted(len(set(names)) for names in first.values()) == [1, 1, 3], "equal rows are told apart"
    broker.tell("reset")
    send(broker, pa.record_batch({"id": [9, 3]}), pa.record_batch({"id": [1, 1, 2, 1]}))
    again = named(broker)
    assert {payload: names for payload, names in again.items() if payload in first} == first
    broker.tell("reset")
    send(broker, rows, key=["id"])
    assert all(set(names).isdisjoint(first[payload]) for payload, names in named(broker).items())


def test_a_value_that_makes_no_topic_is_a_bad_row(broker: DanubeBroker) -> None:
    with pytest.raises(DataError) as caught:
        send(broker, pa.record_batch({"k": ["a", "b c", "d"]}), template="/by/{k}")
    assert list(caught.value.rows) == [1]


def test_attributes_without_a_value_and_of_an_earlier_hop_stay_behind(broker: DanubeBroker) -> None:
    came = [("a", None), ("b", "c"), ("danube.schema_id", "7"), ("danube.publish_time", "1")]
    row = {"stream": "s", "payload": b"{}", "attributes": came, "timestamp": 0}
    send(broker, pa.RecordBatch.from_pylist([row], schema=ENVELOPE_SCHEMA))
    (message,) = broker.messages(TOPIC)
    assert {name for name in message.attributes if not name.startswith("penstock.")} == {"b"}
    message.attributes["danube.schema_id"] = "7"  # of a producer that does not know better
    assert "danube.schema_id" not in envelope(message).record.attributes


def test_a_tombstone_is_refused_before_anything_is_sent(broker: DanubeBroker) -> None:
    rows = [{"stream": "s", "payload": payload, "timestamp": 0} for payload in (b"{}", None)]
    with pytest.raises(DataError) as caught:
        send(broker, pa.RecordBatch.from_pylist(rows, schema=ENVELOPE_SCHEMA))
    assert list(caught.value.rows) == [1]
    assert broker.messages(TOPIC) == []


def test_messages_as_they_came_go_on_with_their_key(broker: DanubeBroker) -> None:
    row = {"stream": "s", "payload": b"{}", "key": b"\xff\x00", "attributes": [("a", "b")], "timestamp": 0}
    send(broker, pa.RecordBatch.from_pylist([row], schema=ENVELOPE_SCHEMA))
    (message,) = broker.messages(TOPIC)
    assert message.attributes["a"] == "b"
    assert len(message.routing_key) == 32, "bytes that are no text are told apart by their digest"


def test_a_broker_that_restarts_is_found_again(own: DanubeBroker) -> None:
    sink = DanubeSink(DanubeSinkConfig(url=own.url))
    epoch = Epoch("orders", "incarnation", 1)
    sink.open()
    sink.begin_epoch(epoch, Task(0))
    sink.write_batch(TOPIC, ROWS)
    sink.flush()
    own.restart()
    sink.write_batch(TOPIC, ROWS)
    sink.pre_commit(epoch)
    sink.close()
    assert len(payloads(own)) == 3, "those after the restart; it lost the others"


def test_a_broker_that_stays_away_is_said(own: DanubeBroker) -> None:
    sink = DanubeSink(DanubeSinkConfig(url=own.url, timeout_ms=500))
    sink.open()
    own.kill()
    sink.begin_epoch(Epoch("orders", "incarnation", 1), Task(0))
    sink.write_batch(TOPIC, ROWS)
    with pytest.raises(ConnectorError, match="UNAVAILABLE"):
        sink.flush()
    sink.close()
    with pytest.raises(RetryableError, match="PEN-2001"):  # a task opens it as well, long after the start
        DanubeSink(DanubeSinkConfig(url=own.url)).open()


def test_a_sink_closes_beside_a_broker_that_answers_nothing(own: DanubeBroker) -> None:
    sink = DanubeSink(DanubeSinkConfig(url=own.url, timeout_ms=3_600_000))
    sink.open()
    sink.begin_epoch(Epoch("orders", "incarnation", 1), Task(0))
    sink.write_batch(TOPIC, ROWS)
    sink.flush()
    own.freeze()
    sink.write_batch(TOPIC, ROWS)
    sink.close()


def test_a_cluster_makes_the_topic_first(own: DanubeBroker) -> None:
    own.tell("set", is_cluster=True)
    send(own, ROWS)
    assert len(payloads(own)) == 3


def test_all_partitions_are_there_before_the_first_message(broker: DanubeBroker) -> None:
    one = pa.record_batch({"key": ["a"]})
    send(broker, one, key=["key"], partitions=4)
    assert set(broker.tell("report")["topics"]) == {f"{TOPIC}-part-{number}" for number in range(4)}
    broker.tell("create", topic="/shop/cut-part-3")  # its making was cut short after the first of them
    send(broker, one, key=["key"], partitions=4, topic="/shop/cut")
    assert {f"/shop/cut-part-{number}" for number in range(4)} <= set(broker.tell("report")["topics"])


@pytest.mark.parametrize(
    ("made", "asked", "says"), [(2, 4, "has 2"), (4, 2, "has 4"), (0, 2, "has no"), (2, 0, "has 2")]
)
def test_partitions_other_than_the_topics_own_are_refused(
    broker: DanubeBroker, made: int, asked: int, says: str
) -> None:
    send(broker, ROWS, key=["id"], partitions=made)
    with pytest.raises(ConfigError, match=f"{says} partitions, and `partitions` is {asked}"):
        send(broker, ROWS, key=["id"], partitions=asked)


def test_a_cluster_makes_every_partition_first(own: DanubeBroker) -> None:
    own.tell("set", is_cluster=True)
    send(own, ROWS, key=["id"], partitions=9)
    assert sum(len(own.messages(f"{TOPIC}-part-{number}")) for number in range(9)) == 3


def following(broker: DanubeBroker, **options: Any) -> Danube:
    return Danube(DanubeSourceConfig(url=broker.url, topics=[TOPIC], subscription="penstock", **options))


def test_a_source_makes_the_topic_with_the_partitions_of_what_sends_to_it(broker: DanubeBroker) -> None:
    following(broker, create_topics=True, partitions=3).open()
    assert set(broker.tell("report")["topics"]) == {f"{TOPIC}-part-{number}" for number in range(3)}
    send(broker, ROWS, key=["id"], partitions=3)
    with pytest.raises(ConfigError, match="has 3 partitions"):
        following(broker, create_topics=True, partitions=2).open()
    following(broker, create_topics=True).open()  # it is there


def test_partitions_that_are_being_made_are_looked_for_at_once(
    broker: DanubeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOOK_SECS", 3600)
    parts = [f"{TOPIC}-part-{number}" for number in (2, 1, 0)]
    broker.tell("create", topic=parts[0])
    source = following(broker)
    source.open()
    with RecordingSender().streaming(source):
        for part in parts:
            broker.tell("create", topic=part)
            wait_until(lambda: broker.subscription(part, "penstock").get("consumers"), part)  # noqa: B023
