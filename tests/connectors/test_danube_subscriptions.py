"""Who gets which messages of a Danube broker: names, partitions, kinds of subscriptions, refusals, odd contents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from danube_source import FAST, TOPIC, Streaming, acked, source, subscribed
from penstock.connectors.danube import DanubeSink, names, room, schemas, session
from penstock.connectors.danube.sink import DanubeSinkConfig
from penstock.connectors.danube.source import DanubeSourceConfig
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility
from penstock.schema.registry.danube import DanubeRegistry, unpacked
from penstock.schema.registry.danube_client import Calls, DanubeConfig, api, channel, services
from penstock.schema.registry.danube_client import schemas as schema_calls
from penstock.sink import Epoch, Task
from penstock.source import HealthState, SourceContext
from penstock.testing import RecordingSender
from penstock.testing.danube import DanubeBroker
from penstock.testing.danube.clients import PlainConsumer, PlainProducer
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.xdist_group("danube")


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These senders never make the last messages durable: there is nothing to wait for."""
    monkeypatch.setattr(session, "SETTLE_SECS", 0.1)
    monkeypatch.setattr(room, "HELD_SECS", 600.0)


@pytest.fixture(scope="module")
def shared() -> Iterator[DanubeBroker]:
    with DanubeBroker(**FAST) as broker:
        yield broker


@pytest.fixture
def own() -> Iterator[DanubeBroker]:
    """One whose settings the test may change."""
    with DanubeBroker(**FAST) as broker:
        broker.tell("create", topic=TOPIC)
        yield broker


@pytest.fixture
def topic(shared: DanubeBroker, request: pytest.FixtureRequest) -> str:
    name = f"/default/{request.node.name[:60].replace('[', '-').replace(']', '')}"
    shared.tell("create", topic=name)
    return name


def send(broker: DanubeBroker, rows: pa.RecordBatch, *, number: int = 1, **options: Any) -> None:
    sink = DanubeSink(DanubeSinkConfig(url=broker.url, **options))
    epoch = Epoch("orders", "incarnation", number)
    sink.open()
    sink.begin_epoch(epoch, Task(0))
    try:
        sink.write_batch("/shop/orders", rows)
        sink.pre_commit(epoch)
    finally:
        sink.close()


def consumers(broker: DanubeBroker, topic: str) -> dict[str, bool]:
    return dict(broker.subscription(topic, "penstock").get("consumers", {}))


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_topic_whose_name_begins_alike_is_another_topic(shared: DanubeBroker, topic: str) -> None:
    """A broker that has no such topic answers with all whose names begin so."""
    begun = topic[:-3]
    for part in range(2):
        shared.tell("create", topic=f"{begun}-part-{part}")
    with Streaming(shared, source(shared, begun), f"{begun}-part-0", f"{begun}-part-1"):
        assert not consumers(shared, topic)
    assert not shared.subscription(topic, "penstock")
    with pytest.raises(ConfigError, match="no topic"):
        source(shared, topic[:-4]).open()
    send(shared, pa.record_batch({"id": [1]}), topic=topic[:-5])
    assert [message.payload for message in shared.messages(topic[:-5])] == [b'{"id":1}']


def test_a_namespace_that_is_not_there_is_a_wrong_setting(own: DanubeBroker) -> None:
    """The broker answers that it is away for now."""
    own.tell("set", namespaces=["default"])
    for partitions in (0, 2):
        with pytest.raises(ConfigError, match="namespace nowhere") as caught:
            send(own, pa.record_batch({"id": [1]}), topic="/nowhere/orders", partitions=partitions)
        assert "namespaces create" in caught.value.hint
        with pytest.raises(ConfigError, match="namespace nowhere"):
            source(own, "/nowhere/orders", create_topics=True, partitions=partitions).open()


def test_a_topic_that_cannot_be_made_is_an_error(own: DanubeBroker) -> None:
    own.tell("fail", method="CreateProducer", code="UNAVAILABLE", times=100, what="there is no leader")
    with pytest.raises(FatalError, match="no leader"):
        source(own, "/default/new", create_topics=True).open()


def test_a_topic_that_is_not_reliable_drops_what_comes_too_fast(shared: DanubeBroker, topic: str) -> None:
    loose = f"{topic}-loose"
    shared.tell("create", topic=loose, reliable=False)
    request = api.ConsumerRequest(topic_name=loose, consumer_name="slow", subscription="slow")
    with (
        channel(DanubeConfig(url=shared.url), shared.url) as link,
        PlainProducer(shared.url, loose, reliable=False) as producer,
    ):
        stub = services.ConsumerServiceStub(link)
        consumer = stub.Subscribe(request, timeout=30).consumer_id
        for number in range(20):
            producer.send(str(number).encode())
        call = stub.ReceiveMessages(api.ReceiveRequest(consumer_id=consumer), timeout=60)
        assert [next(call).payload for _ in range(8)] == [str(number).encode() for number in range(8)]
        producer.send(b"end")
        assert next(call).payload == b"end"


def test_equal_messages_of_a_topic_that_is_not_reliable_are_several(shared: DanubeBroker, topic: str) -> None:
    """Its broker keeps no log: every offset is 0."""
    loose = f"{topic}-loose"
    shared.tell("create", topic=loose, reliable=False)
    with Streaming(shared, source(shared, loose), loose) as run:
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "its stream")
        with PlainProducer(shared.url, loose, reliable=False) as producer:
            for number in range(1, 6):
                producer.send(b"the same")
                assert run.wait(number) == [b"the same"] * number
    assert {message.msg_id.topic_offset for message in shared.messages(loose)} == {0}


def test_one_partition_is_read_by_itself_under_its_own_name(shared: DanubeBroker, topic: str) -> None:
    part = f"{topic}-part-1"
    shared.tell("create", topic=part)
    with Streaming(shared, source(shared, part), part) as run, PlainProducer(shared.url, part) as producer:
        producer.send(b"one")
        run.wait(1)
    assert run.sender.rows == {part: [b"one"]}, "the stream that `schema` promises"
    with pytest.raises(ValueError, match="is a partition of"):
        DanubeSourceConfig(url=shared.url, topics=[topic, part], subscription="s")


def test_partitions_that_are_added_are_read(shared: DanubeBroker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_SECS", 0.05)
    growing = f"{topic}-growing"
    shared.tell("create", topic=f"{growing}-part-0")
    with Streaming(shared, source(shared, growing), f"{growing}-part-0") as run:
        shared.tell("create", topic=f"{growing}-part-1")
        subscribed(shared, f"{growing}-part-1")
        with PlainProducer(shared.url, f"{growing}-part-1") as producer:
            producer.send(b"new")
        run.wait(1)
    assert run.sender.rows == {growing: [b"new"]}


# -- kinds -----------------------------------------------------------------------------------------------------------


def test_an_exclusive_subscription_is_not_taken_by_another_pipeline(
    shared: DanubeBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "TRIES", 1)
    first, second = source(shared, topic), source(shared, topic)
    run = Streaming(shared, first, topic, context=SourceContext(pipeline="first"))
    with run, PlainProducer(shared.url, topic) as producer:
        sender = RecordingSender()
        second.open(SourceContext(pipeline="second"))
        with contextlib.suppress(RetryableError), sender.streaming(second):
            wait_until(lambda: sender.failed, "its refusal")
        assert isinstance(sender.failed, RetryableError)
        assert "consumer_name" in sender.failed.hint
        producer.send(b"mine")
        assert run.wait(1) == [b"mine"]
        assert consumers(shared, topic) == {"first": True}
        assert first.metrics().custom["reconnects_total"] == 0
    again = Streaming(shared, source(shared, topic), context=SourceContext(pipeline="first"))
    with (
        again,
        PlainProducer(shared.url, topic) as producer,
    ):  # it was not acknowledged, and comes to who takes its place
        assert again.wait(1) == [b"mine"]


def test_who_takes_a_consumers_place_gets_what_that_one_has_not_acknowledged(shared: DanubeBroker, topic: str) -> None:
    with PlainConsumer(shared.url, topic) as before, PlainProducer(shared.url, topic) as producer:
        producer.send(b"one")
        before.next(ack=False)
        with PlainConsumer(shared.url, topic) as after:
            assert after.next().payload == b"one"
        attempts = shared.subscription(topic, "plain")["attempts"]
        assert attempts == {"0": 2}, "the second delivery went to the stream that ended"


def test_consumers_that_share_a_subscription_take_turns(shared: DanubeBroker, topic: str) -> None:
    one = PlainConsumer(shared.url, topic, kind=1, name="one")
    other = PlainConsumer(shared.url, topic, kind=1, name="other")
    with one, other, PlainProducer(shared.url, topic) as producer:
        for number in range(6):
            producer.send(str(number).encode())
        found = [[int(each.next().payload) for _ in range(3)] for each in (one, other)]
    assert sorted(found) == [[0, 2, 4], [1, 3, 5]]


def test_a_consumer_of_another_program_is_followed_under_its_name(shared: DanubeBroker, topic: str) -> None:
    """As when a pipeline takes the place of a connector: an exclusive subscription stays with the name that had it first."""
    with (
        PlainConsumer(shared.url, topic, "penstock", name="connector") as before,
        PlainProducer(shared.url, topic) as one,
    ):
        one.send(b"done")
        one.send(b"left")
        before.next()
        before.next(ack=False)
    with Streaming(shared, source(shared, topic, consumer_name="connector")) as run:
        assert run.wait(1) == [b"left"]


def test_with_key_shared_a_source_that_was_away_gets_messages_again(shared: DanubeBroker, topic: str) -> None:
    """The broker forgets who is away for three seconds, and a later consumer of that name gets nothing."""
    with PlainProducer(shared.url, topic) as producer:
        for number, life in enumerate((b"one", b"two", b"three"), 1):
            with Streaming(shared, source(shared, topic, subscription_type="key_shared")) as run:
                wait_until(lambda: any(consumers(shared, topic).values()), "a consumer")
                producer.send(life, key="k")
                assert run.wait(1) == [life]
                wait_until(lambda: run.sender.make_durable() or acked(shared, topic) == number, "the acknowledgement")  # noqa: B023
            gone = shared.subscription(topic, "penstock")
            wait_until(lambda: len(shared.subscription(topic, "penstock")["evicted"]) == number, str(gone))  # noqa: B023


def test_with_key_shared_a_broken_stream_is_opened_under_the_same_name(
    shared: DanubeBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way to a name that does not come back counts as delivered."""
    monkeypatch.setattr(names, "KNOWN_SECS", 600.0)  # however long a busy machine takes to come back
    with Streaming(shared, source(shared, topic, subscription_type="key_shared"), topic) as run:
        name = list(consumers(shared, topic))
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "its stream")
        shared.tell("break")
        wait_until(lambda: run.source.metrics().custom["reconnects_total"], "the reconnect")
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health")
        assert list(consumers(shared, topic)) == name


def test_with_key_shared_an_acknowledgement_that_took_long_counts_with_the_next_message(own: DanubeBroker) -> None:
    own.tell("set", stalls_by_key=True)
    with (
        Streaming(own, source(own, subscription_type="key_shared"), TOPIC) as run,
        PlainProducer(own.url, TOPIC) as one,
    ):
        for payload in (b"one", b"two"):
            one.send(payload, key="k")
        assert run.wait(1) == [b"one"]
        wait_until(lambda: own.subscription(TOPIC, "penstock")["stalled"], "a heartbeat")
        run.sender.make_durable()
        wait_until(lambda: own.tell("report")["calls"].get("Ack"), "the acknowledgement")
        assert acked(own, TOPIC) == 0
        one.send(b"three", key="other")
        assert sorted(run.wait(3, durable=True)) == [b"one", b"three", b"two"]


def test_a_broker_that_waits_for_room_at_a_consumer_that_died_is_read_on_as_that_one(
    shared: DanubeBroker, topic: str, tmp_path: Path
) -> None:
    """Seen on a real broker: nobody can subscribe then, and producers wait as well."""
    context = SourceContext(tmp_path / "state", pipeline="orders")
    with PlainProducer(shared.url, topic) as producer:
        with Streaming(shared, source(shared, topic), topic, context=context) as run:
            producer.send(b"one")
            run.wait(1)
        shared.tell("stick", topic=topic)
        with Streaming(shared, source(shared, topic, timeout_ms=300), context=context) as run:
            assert run.wait(1) == [b"one"], "it was not acknowledged"
            wait_until(lambda: run.sender.make_durable() or acked(shared, topic) == 1, "the acknowledgement")
        with Streaming(shared, source(shared, topic), context=context) as run:
            producer.send(b"two")
            assert run.wait(1) == [b"two"]


def test_few_acknowledgements_wait_at_the_broker_at_one_time(own: DanubeBroker) -> None:
    """A real broker (0.15.1) with 32 of them stops the partition for good when the process dies then."""
    own.tell("set", max_unacked=200, ack_delay_ms=20)
    with Streaming(own, source(own, TOPIC), TOPIC) as run, PlainProducer(own.url, TOPIC) as producer:
        for number in range(100):
            producer.send(str(number).encode())
        run.wait(100)
        run.sender.make_durable()
        wait_until(lambda: acked(own, TOPIC) == 100, "the acknowledgements")
    assert 1 < own.tell("report")["most_acking"] <= 30


def test_the_newest_message_is_acknowledged_last(own: DanubeBroker) -> None:
    """A real broker (0.15.1) that gets it before an earlier one takes nothing more until the next message is sent."""
    with Streaming(own, source(own, TOPIC), TOPIC) as run, PlainProducer(own.url, TOPIC) as producer:
        for number in range(10):
            producer.send(str(number).encode())
        run.wait(10)
        own.tell("fail", method="Ack", code="UNAVAILABLE")  # and this one is tried again later than the others
        run.sender.make_durable()
        wait_until(lambda: acked(own, TOPIC) == 10, "the acknowledgements")
    assert own.subscription(TOPIC, "penstock")["cursor"] == 9


def test_a_refused_message_comes_again_with_the_next_one_if_a_later_one_was_taken(own: DanubeBroker) -> None:
    own.tell("set", max_redelivery_count=1_000_000)
    (right,) = registered(own, "orders")
    with Streaming(own, source(own, expected_schema_subject="orders"), TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"bad")
            producer.send(b"good", schema=right)
            run.wait(1)
            wait_until(
                lambda: run.sender.make_durable() or own.subscription(TOPIC, "penstock")["stalled"],
                "the acknowledgement",
            )
            before = own.subscription(TOPIC, "penstock")["attempts"]["0"]
            producer.send(b"later", schema=right)
            wait_until(lambda: own.subscription(TOPIC, "penstock")["attempts"]["0"] > before, "the next delivery")
        assert run.wait(2, durable=True) == [b"good", b"later"]


# -- refusals --------------------------------------------------------------------------------------------------------


def registered(broker: DanubeBroker, *subjects: str) -> list[tuple[int, int]]:
    registry = DanubeRegistry(DanubeConfig(url=broker.url))
    found = [registry.register_schema(each, WireSchema("json_schema", '{"type": "object"}')).id for each in subjects]
    registry.close()
    return [unpacked(id) for id in found]


def test_a_refused_message_that_blocks_its_partition_keeps_health_down(
    own: DanubeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "FORGOTTEN_SECS", 0.0)
    own.tell("set", max_redelivery_count=1)
    (right,) = registered(own, "orders")
    with Streaming(own, source(own, expected_schema_subject="orders"), TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"bad")
            wait_until(lambda: own.subscription(TOPIC, "penstock")["poisoned"], "the end of its deliveries")
            producer.send(b"good", schema=right)
        assert run.source.health_check().state is HealthState.DEGRADED
        assert "no schema" in run.source.health_check().reason
        own.tell("set", poison_policy="drop")
        assert run.wait(1) == [b"good"]
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health: the partition goes on")


def test_a_message_that_is_taken_after_all_is_no_refusal_any_more(own: DanubeBroker) -> None:
    with Streaming(own, source(own, expected_schema_subject="orders"), TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"early", schema=(1, 1))
        wait_until(lambda: run.source.health_check().state is HealthState.DEGRADED, "the refusal")
        registered(own, "orders")
        assert run.wait(1) == [b"early"]
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health")


# -- credentials -----------------------------------------------------------------------------------------------------


def test_a_token_that_expires_in_mid_stream_is_said_and_its_successor_taken(
    own: DanubeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream stays open, and only acknowledgements are refused: the source must not sit there until messages are given up."""
    monkeypatch.setattr(session, "LOOK_SECS", 0.1)
    monkeypatch.setattr(session, "TRIES", 1000)
    token = tmp_path / "token"
    token.write_text("first")
    own.tell("set", tokens=["first"])
    with Streaming(own, source(own, token={"file": token}), TOPIC) as run:
        own.tell("set", tokens=["first", "plain"])
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health")
        own.tell("set", tokens=[])
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"one")
        run.wait(1)
        own.tell("set", tokens=["second"])
        run.sender.make_durable()
        wait_until(lambda: "UNAUTHENTICATED" in (run.source.health_check().reason or ""), "the truth")
        assert acked(own, TOPIC) == 0
        token.write_text("second")
        wait_until(lambda: run.sender.make_durable() or acked(own, TOPIC) == 1, "the acknowledgement")
        assert run.source.health_check().state is HealthState.HEALTHY


# -- what a message may hold -----------------------------------------------------------------------------------------


def test_odd_messages_arrive_as_they_were_sent(shared: DanubeBroker, topic: str) -> None:
    odd = {"": "empty name", "ü ✓\n\t": "\x00\u2028", "a" * 5000: "b" * 20_000, "danube.topic": "a lie", "x": ""}
    sent: list[tuple[bytes, str | None]] = [(b"", None), (b"", ""), (b"\0" * (1 << 20), "k" * 2000), (b"x", "\n✓")]
    seen: list[Any] = []
    with Streaming(shared, source(shared, topic), topic) as run, PlainProducer(shared.url, topic) as producer:
        keep = run.sender._keep
        run.sender._keep = lambda items, done: (seen.extend(items), keep(items, done))  # type: ignore[method-assign]
        for payload, key in sent:
            producer.send(payload, key=key, attributes=odd)
        run.wait(len(sent))
    assert [(each.record.payload, each.record.key) for each in seen] == [
        (payload, key.encode() if key is not None else None) for payload, key in sent
    ]
    assert all({**odd, "danube.topic": topic}.items() <= each.record.attributes.items() for each in seen)
    assert len({each.dedupe_key for each in seen}) == len(sent)


# -- what the broker says of a message -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    ["Topic /shop/orders not found in registry", "the producer with id 7 is not attached to topic name: /shop/orders"],
)
def test_a_topic_that_moves_to_another_broker_is_looked_up_again(own: DanubeBroker, what: str) -> None:
    own.tell(
        "fail", method="SendMessage", code="PERMISSION_DENIED", what=f"Unable to publish the message: {what}", times=2
    )
    send(own, pa.record_batch({"id": [1, 2]}), window=1)
    assert [message.payload for message in own.messages("/shop/orders")] == [b'{"id":1}', b'{"id":2}']


def test_a_message_that_its_topic_refuses_stops_the_epoch_with_the_reason(own: DanubeBroker) -> None:
    rows = pa.record_batch({"id": [1]})
    said = "Unable to publish the message: Message missing schema_id for topic /shop/orders (expected subject: orders)"
    own.tell("fail", method="SendMessage", code="PERMISSION_DENIED", what=said)
    with pytest.raises(ConfigError, match="missing schema_id") as caught:
        send(own, rows)
    assert "schema_subject" in caught.value.hint
    said = "Message size 9 exceeds maximum allowed 5 for topic /shop/orders"
    own.tell("fail", method="SendMessage", code="INVALID_ARGUMENT", what=said)
    with pytest.raises(DataError, match="exceeds maximum") as refused:
        send(own, rows)
    assert "max_message_bytes" in refused.value.hint
    large = pa.record_batch({"id": ["x" * (5 << 20)]})
    with pytest.raises(DataError, match="length too large"):  # of a call that the broker does not even read
        send(own, large, max_message_bytes=16 << 20)


def validated(broker: DanubeBroker, topic: str, policy: str) -> None:
    """The broker checks the payloads of a topic."""
    request = schema_calls.ConfigureTopicSchemaRequest(
        topic_name=topic, schema_subject="orders", validation_policy=policy, enable_payload_validation=True
    )
    with Calls(DanubeConfig(url=broker.url)) as calls:
        calls.registry("ConfigureTopicSchema", request, topic)


def test_a_policy_that_no_broker_knows_is_refused(own: DanubeBroker) -> None:
    DanubeRegistry(DanubeConfig(url=own.url)).register_schema("orders", WireSchema("json_schema", '{"type": "object"}'))
    with pytest.raises(ConfigError, match="Invalid validation policy"):
        validated(own, TOPIC, "odd")


@pytest.mark.parametrize("policy", ["warn", "enforce"])
def test_a_topic_that_checks_payloads_stops_the_epoch_with_the_reason(own: DanubeBroker, policy: str) -> None:
    registry = DanubeRegistry(DanubeConfig(url=own.url))
    shapes = [
        f'{{"type": "object", "properties": {{"id": {{"type": {kind}}}}}}}' for kind in ('"integer"', '["string"]')
    ]
    registry.register_schema("orders", WireSchema("json_schema", shapes[0]))
    bound = {"schema_subject": "orders", "topic": "/shop/orders"}
    send(own, pa.record_batch({"id": [1]}), **bound)
    validated(own, "/shop/orders", policy)
    send(own, pa.record_batch({"id": [2]}), number=2, **bound)
    with pytest.raises(ConfigError, match="Payload validation failed"):
        send(own, pa.record_batch({"id": ["x"]}), number=3, **bound)
    registry.set_compatibility("orders", Compatibility.NONE)
    registry.register_schema("orders", WireSchema("json_schema", shapes[1]))
    with pytest.raises(ConfigError, match="Payload validation failed"):  # the version that came first counts for all
        send(own, pa.record_batch({"id": ["x"]}), number=4, **bound)
    registry.close()
    if policy == "enforce":
        with pytest.raises(ConfigError, match="missing schema_id"):
            send(own, pa.record_batch({"id": [3]}), number=5, topic="/shop/orders")


def test_a_schema_that_changes_while_the_pipeline_runs_is_named_from_the_next_epoch_on(own: DanubeBroker) -> None:
    rows, strategy = pa.record_batch({"id": [1]}), {"schema_subject": "orders"}
    with pytest.raises(ConfigError, match="no subject 'orders'"):
        send(own, rows, **strategy)
    registry = DanubeRegistry(DanubeConfig(url=own.url))
    for number, text in enumerate(('{"type": "object"}', '{"type": "object", "title": "Order"}'), 1):
        registry.register_schema("orders", WireSchema("json_schema", text))
        send(own, rows, number=number, **strategy)
    registry.close()
    assert [message.schema_version for message in own.messages("/shop/orders")] == [1, 2]
