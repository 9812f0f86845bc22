"""The Danube source, against a broker that speaks the protocol on a real socket."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from danube_source import FAST, TOPIC, Streaming, acked, source, subscribed
from penstock.connectors.danube import Danube, DanubeSink, room, session
from penstock.connectors.danube.message import envelope
from penstock.connectors.danube.sink import DanubeSinkConfig
from penstock.connectors.danube.source import DanubeSourceConfig
from penstock.errors import ConfigError, FatalError, RetryableError
from penstock.formats import WireSchema
from penstock.schema.registry.danube import DanubeRegistry, unpacked
from penstock.schema.registry.danube_client import DanubeConfig, api, grpc
from penstock.sink import Epoch, Task
from penstock.source import HealthState
from penstock.testing import RecordingSender, SourceContract
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
    """One that the test may kill."""
    with DanubeBroker(**FAST) as broker:
        yield broker


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no runtime calls again after the last try, which comes before a broker on a busy machine has started again."""
    monkeypatch.setattr(session, "TRIES", 1000)


@pytest.fixture
def topic(shared: DanubeBroker, request: pytest.FixtureRequest) -> str:
    name = f"/default/{request.node.name[:60].replace('[', '-').replace(']', '')}"
    shared.tell("create", topic=name)
    return name


class TestDanube(SourceContract):
    @pytest.fixture
    def source(self, shared: DanubeBroker, topic: str) -> Danube:
        return source(shared, topic)

    @pytest.fixture
    def expected(self, topic: str) -> dict[str, list[bytes]]:
        return {topic: [b"one", b"two", b"three"]}

    @pytest.fixture
    def more(self, shared: DanubeBroker, topic: str) -> Any:
        def send() -> None:
            subscribed(shared, topic)
            with PlainProducer(shared.url, topic) as producer:
                for payload in (b"one", b"two", b"three"):
                    producer.send(payload)

        return send

    @pytest.fixture
    def told(self, shared: DanubeBroker, topic: str) -> Any:
        return lambda: shared.subscription(topic, "penstock").get("acknowledged", 0)

    @pytest.fixture
    def wrong(self, shared: DanubeBroker) -> Danube:
        return source(shared, "/default/nowhere")


def test_a_message_keeps_what_it_carries(shared: DanubeBroker, topic: str) -> None:
    seen: list[Any] = []
    with Streaming(shared, source(shared, topic), topic) as run:
        keep = run.sender._keep
        run.sender._keep = lambda items, done: (seen.extend(items), keep(items, done))  # type: ignore[method-assign]
        with PlainProducer(shared.url, topic) as producer:
            producer.send(b"\x00\xff", key="k-1", attributes={"site": "north"})
        run.wait(1)
    record = seen[0].record
    assert (record.stream, record.payload, record.key) == (topic, b"\x00\xff", b"k-1")
    assert record.attributes["site"] == "north"
    assert record.attributes["danube.producer"] == "plain"
    assert seen[0].offset.partition == topic
    sent = shared.messages(topic)[0]
    assert record.timestamp_ms == sent.publish_time


def test_a_time_that_no_table_could_hold_stays_beside_the_message(shared: DanubeBroker, topic: str) -> None:
    """Some clients send nanoseconds: as milliseconds they would stop every epoch that the message is in."""
    wrong = time.time_ns()
    before = wrong // 1_000_000
    made = envelope(api.StreamMessage(msg_id=api.MsgID(topic_name=topic), publish_time=wrong, payload=b"x"))
    assert before <= made.record.timestamp_ms <= time.time_ns() // 1_000_000
    assert made.record.attributes["danube.publish_time"] == str(wrong)
    right = envelope(api.StreamMessage(msg_id=api.MsgID(topic_name=topic), publish_time=before, payload=b"x"))
    assert right.record.timestamp_ms == before
    assert "danube.publish_time" not in right.record.attributes


def test_all_partitions_of_several_topics_are_read(shared: DanubeBroker, topic: str) -> None:
    second = f"{topic}-b"
    with PlainProducer(shared.url, second, partitions=3) as producer:
        both = Danube(DanubeSourceConfig(url=shared.url, topics=[topic, second], subscription="penstock"))
        with Streaming(shared, both, topic, *(f"{second}-part-{n}" for n in range(3))) as run:
            for number in range(30):
                producer.send(str(number).encode(), key=f"key-{number}")
            with PlainProducer(shared.url, topic) as other:
                other.send(b"single")
            run.wait(31, durable=True)
    assert run.sender.rows[topic] == [b"single"]
    assert sorted(map(int, run.sender.rows[second])) == list(range(30))


def test_nothing_is_acknowledged_before_it_is_durable_and_the_window_holds_the_broker_back(
    shared: DanubeBroker, topic: str
) -> None:
    with Streaming(shared, source(shared, topic), topic) as run, PlainProducer(shared.url, topic) as producer:
        for number in range(25):
            producer.send(str(number).encode())
        run.wait(10)
        assert run.sender.count == 10, "the broker hands out ten, and then waits"
        assert shared.subscription(topic, "penstock")["acknowledged"] == 0
        wait_until(lambda: run.sender.make_durable() or run.sender.count >= 25, "all")
        wait_until(lambda: run.sender.make_durable() or acked(shared, topic) == 25, "their acknowledgement")
    assert run.sender.rows[topic] == [str(number).encode() for number in range(25)]


def test_a_late_acknowledgement_brings_the_message_again_with_the_same_identity(own: DanubeBroker) -> None:
    own.tell("set", ack_timeout_ms=100)
    own.tell("create", topic=TOPIC)
    keys: list[str] = []
    with Streaming(own, source(own), TOPIC) as run:
        keep = run.sender._keep
        run.sender._keep = lambda items, done: (keys.extend(e.dedupe_key for e in items), keep(items, done))  # type: ignore[method-assign]
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"slow")
        wait_until(lambda: len(keys) >= 2, "the redelivery")
        assert len(set(keys)) == 1
        wait_until(lambda: run.sender.make_durable() or acked(own, TOPIC) == 1, "the acknowledgement")


@pytest.mark.usefixtures("patient")
def test_an_acknowledgement_of_an_earlier_life_of_the_broker_is_never_sent(
    own: DanubeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets begin again after a restart: the old acknowledgement would take a message that nobody wrote down."""
    monkeypatch.setattr(session, "LOOK_SECS", 3600.0)  # however slow the machine is, it is not a third life that begins
    own.tell("create", topic=TOPIC)
    units: list[tuple[list[bytes], Any]] = []

    def durable(payload: bytes) -> None:
        for payloads, tell in units:
            if payloads == [payload]:
                tell()

    with Streaming(own, source(own, timeout_ms=60_000), TOPIC) as run:
        run.sender._keep = lambda items, done: units.append(([each.record.payload for each in items], done))  # type: ignore[method-assign]

        def send(payload: bytes) -> None:
            with PlainProducer(own.url, TOPIC) as producer:
                producer.send(payload)
            wait_until(lambda: [payload] in [payloads for payloads, _ in units], str(payload))

        send(b"before")
        own.restart(ack_timeout_ms=3_600_000)
        subscribed(own, TOPIC)
        send(b"after")
        send(b"later")
        durable(b"before")
        durable(b"later")
        wait_until(lambda: acked(own, TOPIC), "an acknowledgement")
        assert own.subscription(TOPIC, "penstock")["in_flight"] == [0], (
            "of all that is told, only `later` is acknowledged"
        )
        durable(b"after")
        send(b"last")  # a broker that got the newest one first waits for it
        wait_until(lambda: acked(own, TOPIC) == 2, "the acknowledgement of the second")
    assert [payloads for payloads, _ in units] == [[b"before"], [b"after"], [b"later"], [b"last"]]


@pytest.mark.usefixtures("patient")
def test_messages_with_equal_offsets_of_two_lives_are_two_messages(own: DanubeBroker) -> None:
    own.tell("create", topic=TOPIC)
    keys: list[str] = []
    with Streaming(own, source(own), TOPIC) as run:
        keep = run.sender._keep
        run.sender._keep = lambda items, done: (keys.extend(e.dedupe_key for e in items), keep(items, done))  # type: ignore[method-assign]
        for life in range(2):
            with PlainProducer(own.url, TOPIC) as producer:
                producer.send(b"same")
            run.wait(life + 1)
            assert own.messages(TOPIC)[0].msg_id.topic_offset == 0
            if not life:
                own.restart()
                subscribed(own, TOPIC)
    assert len(set(keys)) == 2


@pytest.mark.usefixtures("patient")
def test_a_cursor_that_outlived_its_log_holds_messages_back_at_the_broker(own: DanubeBroker) -> None:
    """Seen on a real broker: offsets begin again, the cursor stays, and the source cannot know."""
    own.tell("set", cursor_flush_ms=0)
    own.tell("create", topic=TOPIC)
    with Streaming(own, source(own), TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            for number in range(5):
                producer.send(str(number).encode())
        run.wait(5, durable=True)
        wait_until(lambda: run.sender.make_durable() or acked(own, TOPIC) == 5, "their acknowledgement")
        own.restart()
        subscribed(own, TOPIC)
        with PlainProducer(own.url, TOPIC) as producer:
            for number in range(5, 12):
                producer.send(str(number).encode())
        assert run.wait(7, durable=True)[5:] == [b"10", b"11"]
        assert run.source.health_check().state is HealthState.HEALTHY


def test_a_standalone_broker_that_no_longer_serves_its_topics_is_said_with_the_way_out(own: DanubeBroker) -> None:
    own.tell("create", topic=TOPIC)
    run = Streaming(own, source(own), TOPIC)
    run.__enter__()
    own.restart(standalone=True)
    wait_until(lambda: "another broker" in run.source.health_check().reason, "the truth")
    wait_until(lambda: run.sender.failed, "an end of the tries")
    with pytest.raises(RetryableError, match="make them again") as caught:
        run.__exit__()
    assert caught.value.code == "PEN-2001"


def test_a_broken_stream_is_opened_again_with_pauses(shared: DanubeBroker, topic: str) -> None:
    with Streaming(shared, source(shared, topic), topic) as run, PlainProducer(shared.url, topic) as producer:
        producer.send(b"one")
        run.wait(1)
        before = shared.tell("report")["calls"]["ReceiveMessages"]
        shared.tell("fail", method="ReceiveMessages", code="UNAVAILABLE", times=2)
        shared.tell("break")
        producer.send(b"two")
        wait_until(lambda: b"two" in run.sender.rows[topic], "the second message")
        opened = shared.tell("report")["calls"]["ReceiveMessages"] - before
        assert 3 <= opened <= 6, f"{opened} streams were opened: it must not spin"
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health")


def test_a_broker_that_stays_away_is_shown_and_then_handed_to_the_runtime(own: DanubeBroker) -> None:
    own.tell("create", topic=TOPIC)
    run = Streaming(own, source(own), TOPIC)
    run.__enter__()
    wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health")
    own.kill()
    wait_until(lambda: run.source.health_check().state is HealthState.DEGRADED, "the truth")
    wait_until(lambda: run.sender.failed, "an end of the tries")
    with pytest.raises(RetryableError, match="UNAVAILABLE"):
        run.__exit__()
    own.start()
    with RecordingSender().streaming(run.source):  # the runtime calls again, with the same source
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health")


def test_a_consumer_that_the_broker_no_longer_knows_subscribes_again(
    own: DanubeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOOK_SECS", 0.1)
    own.tell("create", topic=TOPIC)
    with Streaming(own, source(own), TOPIC) as run:
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "health")
        own.tell("forget", topic=TOPIC)
        subscribed(own, TOPIC)
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"heard")
        assert run.wait(1) == [b"heard"]


@pytest.mark.parametrize("kind", ["exclusive", "shared", "failover", "key_shared"])
def test_every_kind_of_subscription_reads(shared: DanubeBroker, topic: str, kind: str) -> None:
    with Streaming(shared, source(shared, topic, subscription_type=kind), topic) as run:
        with PlainProducer(shared.url, topic) as producer:
            for number in range(5):
                producer.send(str(number).encode(), key=f"k{number}")
        assert sorted(run.wait(5)) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_subscription_that_another_consumer_has_is_said(
    shared: DanubeBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "TRIES", 1)
    sender, taken = RecordingSender(), source(shared, topic)
    with PlainConsumer(shared.url, topic, "penstock", name="other"):
        taken.open()
        with contextlib.suppress(RetryableError), sender.streaming(taken):
            wait_until(lambda: sender.failed, "its refusal")
        taken.close()
    assert isinstance(sender.failed, RetryableError)
    assert "another consumer" in sender.failed.hint


def test_key_filters_choose_the_messages(shared: DanubeBroker, topic: str) -> None:
    chosen = source(shared, topic, subscription_type="key_shared", key_filters=["eu-*"])
    with Streaming(shared, chosen, topic) as run, PlainProducer(shared.url, topic) as producer:
        for key in ("eu-1", "us-1", "eu-2"):
            producer.send(key.encode(), key=key)
        assert sorted(run.wait(2)) == [b"eu-1", b"eu-2"]
        wait_until(lambda: run.sender.make_durable() or acked(shared, topic) == 2, "their acknowledgement")


def test_nobody_takes_the_place_of_a_failover_consumer_but_who_comes_under_its_name(
    shared: DanubeBroker, topic: str
) -> None:
    """As seen on a real broker, whatever the name of that type says."""
    second = source(shared, topic, subscription_type="failover", consumer_name="second")
    with PlainProducer(shared.url, topic) as producer:
        with (
            PlainConsumer(shared.url, topic, "penstock", kind=2, name="first") as first,
            Streaming(shared, second, topic) as run,
        ):
            wait_until(lambda: len(shared.subscription(topic, "penstock")["consumers"]) == 2, "both")
            producer.send(b"one")
            assert first.next(ack=False).payload == b"one"
            first.__exit__()
            wait_until(lambda: not shared.subscription(topic, "penstock")["consumers"]["first"], "its end")
            producer.send(b"two")
            threading.Event().wait(0.2)
            assert run.sender.count == 0
        with Streaming(
            shared, source(shared, topic, subscription_type="failover", consumer_name="first"), topic
        ) as again:
            assert again.wait(2) == [b"one", b"two"]


def test_a_message_of_another_subject_is_handed_back_with_a_reason(own: DanubeBroker) -> None:
    own.tell("set", poison_policy="dead_letter", dead_letter_topic="/default/dead", max_redelivery_count=1)
    own.tell("create", topic=TOPIC)
    registry = DanubeRegistry(DanubeConfig(url=own.url))
    right, wrong = (
        unpacked(registry.register_schema(subject, WireSchema("json_schema", '{"type": "object"}')).id)
        for subject in ("orders", "others")
    )
    registry.close()
    with Streaming(own, source(own, expected_schema_subject="orders"), TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"good", schema=right)
            producer.send(b"bad", schema=wrong)
            producer.send(b"none")
        assert run.wait(1) == [b"good"]
        wait_until(lambda: own.topic("/default/dead").get("messages") == 2, "the broker's own dead letters")
        assert "others" in run.source.health_check().reason or "no schema" in run.source.health_check().reason
    letters = own.messages("/default/dead")
    reasons = {letter.payload: letter.attributes["x-failure-reason"] for letter in letters}
    assert "'others'" in reasons[b"bad"]
    assert "no schema" in reasons[b"none"]


def test_a_frame_with_the_id_of_the_schema_goes_in_front_of_a_payload(own: DanubeBroker) -> None:
    own.tell("create", topic=TOPIC)
    registry = DanubeRegistry(DanubeConfig(url=own.url))
    written = registry.register_schema("orders", WireSchema("json_schema", '{"type": "object"}'))
    registry.close()
    with Streaming(own, source(own, schema_frame=True), TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"{}", schema=unpacked(written.id))
            producer.send(b"none")
            producer.send(b"unknown", schema=(999, 1))
        assert run.wait(3) == [b"\0" + written.id.to_bytes(4, "big") + b"{}", b"none", b"unknown"]


def test_a_schema_that_is_registered_later_is_known_then(own: DanubeBroker) -> None:
    own.tell("create", topic=TOPIC)
    with Streaming(own, source(own, expected_schema_subject="orders"), TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"early", schema=(1, 1))
        wait_until(lambda: own.subscription(TOPIC, "penstock")["nacks"], "the refusal")
        assert "does not know its schema 1" in own.subscription(TOPIC, "penstock")["nacks"][0]
        registry = DanubeRegistry(DanubeConfig(url=own.url))
        registry.register_schema("orders", WireSchema("json_schema", '{"type": "object"}'))
        registry.close()
        assert run.wait(1) == [b"early"], "delivered again, it is known"


def test_what_the_journal_has_no_room_for_is_offered_again(shared: DanubeBroker, topic: str) -> None:
    with Streaming(shared, source(shared, topic), topic) as run, PlainProducer(shared.url, topic) as producer:
        offers: list[int] = []
        take = run.sender.offer

        def offer(items: Any, on_durable: Any = None) -> bool:
            offers.append(len(items))
            return len(offers) > 3 and take(items, on_durable)

        run.sender.offer = offer  # type: ignore[method-assign]
        for number in range(5):
            producer.send(str(number).encode())
        assert run.wait(5) == [b"0", b"1", b"2", b"3", b"4"]
        assert offers[0] == offers[1] == offers[2] == offers[3], "the same messages each time"


def test_a_source_that_is_held_back_leaves_before_its_messages_are_given_up(
    own: DanubeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.tell("set", ack_timeout_ms=200, max_redelivery_count=2)
    own.tell("create", topic=TOPIC)
    monkeypatch.setattr(room, "HELD_SECS", 0.05)
    with Streaming(own, source(own), TOPIC) as run, PlainProducer(own.url, TOPIC) as producer:
        for number in range(20):
            producer.send(str(number).encode())
        wait_until(lambda: "left until the journal" in (run.source.health_check().reason or ""), "its leaving")
        tries = own.subscription(TOPIC, "penstock")["attempts"]
        threading.Event().wait(1.0)  # five times as long as the broker waits for an acknowledgement
        assert own.subscription(TOPIC, "penstock")["attempts"] == tries, "nothing goes to who is not there"
        own.tell("set", ack_timeout_ms=60_000)
        monkeypatch.setattr(room, "HELD_SECS", 600.0)
        wait_until(lambda: run.sender.make_durable() or acked(own, TOPIC) == 20, "all of them")
        assert run.source.health_check().state is HealthState.HEALTHY
    assert {int(payload) for payload in run.sender.rows[TOPIC]} == set(range(20))


def test_a_journal_that_is_full_for_long_counts_as_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HELD_SECS", 0.0)
    sender = RecordingSender()
    monkeypatch.setattr(RecordingSender, "full", True)
    found = room.Room(sender)
    wait_until(lambda: found.look() or found.held, "its being held")
    monkeypatch.setattr(RecordingSender, "full", False)
    found.look()
    assert not found.held


def test_an_acknowledgement_that_fails_is_tried_again(own: DanubeBroker) -> None:
    own.tell("set", ack_timeout_ms=3_600_000)
    own.tell("create", topic=TOPIC)
    own.tell("fail", method="Ack", code="INTERNAL", times=2)
    with Streaming(own, source(own), TOPIC) as run, PlainProducer(own.url, TOPIC) as producer:
        producer.send(b"one")
        run.wait(1)
        wait_until(lambda: run.sender.make_durable() or acked(own, TOPIC) == 1, "its acknowledgement")
        assert own.subscription(TOPIC, "penstock")["attempts"] == {"0": 1}, "it did not have to come again"


def test_an_acknowledgement_that_cannot_be_made_holds_up_no_later_one(
    own: DanubeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.tell("set", ack_timeout_ms=3_600_000)
    own.tell("create", topic=TOPIC)
    asked: list[Any] = []

    def ask(**fields: Any) -> Any:
        asked.append(fields)
        if len(asked) == 1:
            raise grpc.aio.UsageError("the channel is closed")
        return api.AckRequest(**fields)

    monkeypatch.setattr(session, "api", SimpleNamespace(**{**vars(api), "AckRequest": ask}))
    with Streaming(own, source(own), TOPIC) as run, PlainProducer(own.url, TOPIC) as producer:
        producer.send(b"one")
        wait_until(lambda: run.sender.make_durable() or asked, "the acknowledgement that fails")
        producer.send(b"two")
        wait_until(lambda: run.sender.make_durable() or run.source.metrics().custom["acknowledged_total"], "the next")


def test_a_source_ends_beside_a_broker_that_answers_nothing(own: DanubeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LOOK_SECS", 0.1)
    own.tell("create", topic=TOPIC)
    patient = source(own, timeout_ms=3_600_000)
    with Streaming(own, patient, TOPIC) as run:
        with PlainProducer(own.url, TOPIC) as producer:
            producer.send(b"one")
        run.wait(1)
        own.freeze()
        run.sender.make_durable()  # its acknowledgement, the next look for partitions and the health check hang
        threading.Event().wait(0.5)


def test_sources_that_come_and_go_beside_a_sink_leave_no_answer_without_a_loop(
    shared: DanubeBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC hands out the answers of all loops in one queue: one for a loop that was closed holds up the others."""
    sink = DanubeSink(DanubeSinkConfig(url=shared.url, topic=topic))
    sink.open()
    sink.begin_epoch(Epoch("orders", "incarnation", 1), Task(0))
    for number in range(10):
        with Streaming(shared, source(shared, topic), topic):
            sink.write_batch("/shop/orders", pa.record_batch({"id": [number] * 20}))
    sink.flush()
    sink.close()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_a_topic_that_is_not_there_is_an_error_or_made(shared: DanubeBroker, topic: str) -> None:
    missing = f"{topic}-missing"
    with pytest.raises(ConfigError, match="no topic"):
        source(shared, missing).open()
    made = source(shared, missing, create_topics=True)
    made.open()
    made.close()
    assert missing in shared.tell("report")["topics"]


def test_a_broker_that_cannot_be_reached_is_fatal_at_first(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match="PEN-5001"):
        Danube(DanubeSourceConfig(url="http://127.0.0.1:1", topics=[TOPIC], subscription="s")).open()


@pytest.mark.parametrize(
    "options",
    [
        {"topics": ["events"]},
        {"topics": ["/a/b", "/a/b"]},
        {"key_filters": ["x"]},
        {"url": "localhost:6650"},
        {"url": "http://user:secret@localhost:6650"},
        {"ca_file": "ca.pem"},
        {"certificate_file": "c.pem"},
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        DanubeSourceConfig.model_validate(
            {"url": "http://127.0.0.1:6650", "topics": [TOPIC], "subscription": "s", **options}
        )


@pytest.mark.parametrize(
    ("url", "exposed"),
    [("http://broker:6650", True), ("https://broker:6650", False), ("http://127.0.0.1:6650", False)],
)
def test_a_token_is_exposed_by_a_network_without_tls(url: str, exposed: bool) -> None:
    assert DanubeConfig.model_validate({"url": url, "token": {"env": "TOKEN"}}).exposes_token is exposed


def test_a_process_forked_beside_a_client_lives(shared: DanubeBroker, topic: str) -> None:
    with Streaming(shared, source(shared, topic), topic):
        child = os.fork()
        if not child:
            threading.Event().wait(0.05)
            os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
