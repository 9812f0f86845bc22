"""Pipelines from and to Danube, killed at every step, beside a broker that is killed as well."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_pipe import Pipe
from penstock.runtime.epochs.state import State
from penstock.runtime.messages.replay import ReplayRequests, Step
from penstock.schema.registry.danube_client import grpc
from penstock.testing.danube import DanubeBroker
from penstock.testing.danube.clients import PlainProducer
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.xdist_group("danube")

TOPIC = "/default/events"
FAST = {
    "heartbeat_ms": 20,
    "base_redelivery_delay_ms": 20,
    "max_redelivery_delay_ms": 200,
    "cursor_flush_ms": 300,
    "ack_timeout_ms": 500,
    "max_redelivery_count": 1000,
    "keeps_log": True,
    "live_messages": 1_000_000,  # what it drops are tests of their own: test_danube_gaps.py
}


@pytest.fixture
def broker() -> Iterator[DanubeBroker]:
    with DanubeBroker(**FAST) as running:
        running.tell("create", topic=TOPIC)
        yield running


def reading(path: Path, broker: DanubeBroker) -> Pipe:
    return Pipe(
        path,
        f"""
        connector_name = "reading"
        delivery = "exactly-once"
        [source]
        connector = "danube"
        url = "{broker.url}"
        topics = ["{TOPIC}"]
        subscription = "penstock"
        [sink]
        connector = "penstock.testing:MemorySink"
        path = "target"
        """,
    )


def relaying(path: Path, broker: DanubeBroker) -> Pipe:
    return Pipe(
        path,
        f"""
        connector_name = "relaying"
        [source]
        connector = "danube"
        url = "{broker.url}"
        topics = ["/default/first"]
        subscription = "relay"
        [sink]
        connector = "danube"
        url = "{broker.url}"
        topic = "{TOPIC}"
        """,
    )


SHAPE = '{"type": "object", "properties": {"n": {"type": %s}}}'


def choosing(path: Path, broker: DanubeBroker) -> Pipe:
    """As `relaying`; what is not of the schema becomes a dead letter."""
    pipe = Pipe(
        path,
        f"""
        connector_name = "relaying"
        [processing]
        state_dir = "state"
        on_error = "dead_letter"
        [source]
        connector = "danube"
        url = "{broker.url}"
        topics = ["/default/first"]
        subscription = "relay"
        [[schemas]]
        topic = "/default/first"
        schema_type = "json_schema"
        schema_file = "first.json"
        [sink]
        connector = "danube"
        url = "{broker.url}"
        topic = "{TOPIC}"
        """.replace("\n        ", "\n"),
    )
    (path / "first.json").write_text(SHAPE % '"integer"')
    return pipe


class Sending:
    """A plain producer that goes on until the block ends; `sent` are the payloads that the broker has."""

    def __init__(self, broker: DanubeBroker) -> None:
        self.broker = broker
        self.sent: list[bytes] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sending:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        producer = None
        while not self._stopped.wait(0.01):
            payload = str(len(self.sent)).encode()
            try:
                producer = producer or PlainProducer(self.broker.url, TOPIC)
                producer.send(payload)
            except grpc.RpcError:
                producer = None
                continue
            self.sent.append(payload)


def subscribe_first(pipe: Pipe, broker: DanubeBroker) -> None:
    """Without a subscription nothing is kept for it."""
    pipe.run_until(lambda: broker.subscription(TOPIC, "penstock").get("consumers"), "the subscription")


def payloads(pipe: Pipe) -> list[bytes]:
    """In the order of the numbers: what a broker delivers again after a kill may come after later messages."""
    return sorted((row["payload"] for row in pipe.rows(TOPIC)), key=lambda payload: (len(payload), payload))


@pytest.mark.parametrize("step", ["journal.data", "journal.index", "journal.told", "commit.before"])
def test_a_killed_reader_loses_and_doubles_nothing(broker: DanubeBroker, tmp_path: Path, step: str) -> None:
    pipe = reading(tmp_path, broker)
    subscribe_first(pipe, broker)
    with Sending(broker) as sending:
        for count in (2, 1):
            pipe.killed(f"{step}=kill@{count}")
    pipe.run_until(lambda: len(payloads(pipe)) >= len(sending.sent), "all messages")
    assert len(sending.sent) > 5
    assert payloads(pipe) == sending.sent


def test_a_killed_broker_whose_cursor_goes_back_doubles_nothing(broker: DanubeBroker, tmp_path: Path) -> None:
    broker.tell("set", cursor_flush_ms=3_600_000)
    broker.options.cursor_flush_ms = 3_600_000
    pipe = reading(tmp_path, broker)
    subscribe_first(pipe, broker)
    pipe.start()
    for _ in range(2):
        with Sending(broker) as sending:
            seen = len(payloads(pipe))
            wait_until(lambda: len(payloads(pipe)) >= seen + 8, "some messages")  # noqa: B023 - waited for at once
        broker.restart()
    wait_until(lambda: broker.subscription(TOPIC, "penstock").get("acknowledged", 0) > 5, "the repeats")
    pipe.stop()
    wanted = sorted((message.payload for message in broker.messages(TOPIC)), key=lambda each: (len(each), each))
    assert len(wanted) >= len(sending.sent) > 5
    pipe.run_until(lambda: len(payloads(pipe)) >= len(wanted), "all messages")
    assert payloads(pipe) == wanted


def test_after_a_broker_lost_its_log_new_messages_at_old_offsets_are_taken(tmp_path: Path) -> None:
    never = 3_600_000  # a cursor that was written down would hold new messages back: see the tests of the source
    with DanubeBroker(**{**FAST, "keeps_log": False, "cursor_flush_ms": never}) as broker:
        broker.tell("create", topic=TOPIC)
        pipe = reading(tmp_path, broker)
        pipe.start()
        for life in range(3):
            wait_until(lambda: broker.subscription(TOPIC, "penstock").get("consumers"), "the subscription")
            with PlainProducer(broker.url, TOPIC) as producer:
                for _ in range(5):
                    producer.send(b"the same")
            wait_until(lambda: len(payloads(pipe)) >= 5 * (life + 1), "them")  # noqa: B023 - waited for at once
            broker.restart()
        pipe.stop()
    assert payloads(pipe) == [b"the same"] * 15


def test_acknowledgements_that_are_lost_double_nothing(broker: DanubeBroker, tmp_path: Path) -> None:
    pipe = reading(tmp_path, broker)
    subscribe_first(pipe, broker)
    broker.tell("fail", method="Ack", code="UNAVAILABLE", times=15)
    with PlainProducer(broker.url, TOPIC) as producer:
        for number in range(30):
            producer.send(str(number).encode())
    pipe.run_until(lambda: broker.subscription(TOPIC, "penstock").get("acknowledged", 0) >= 30, "all to be known")
    if len(payloads(pipe)) < 30:  # they are in the journal, and it was stopped before the last epoch
        pipe.run_until(lambda: len(payloads(pipe)) >= 30, "the last epoch")
    attempts = broker.subscription(TOPIC, "penstock")["attempts"]
    assert sum(attempts.values()) > 30, "nothing was delivered twice"
    assert payloads(pipe) == [str(number).encode() for number in range(30)]


@pytest.mark.parametrize("step", ["stage.middle", "stage.task", "prepare.after", "commit.after"])
def test_from_danube_to_danube_a_row_arrives_once_between_two_penstocks(
    broker: DanubeBroker, tmp_path: Path, step: str
) -> None:
    broker.tell("create", topic="/default/first")
    first, second = relaying(tmp_path / "relay", broker), reading(tmp_path / "read", broker)
    first.run_until(lambda: broker.subscription("/default/first", "relay").get("consumers"), "the first subscription")
    subscribe_first(second, broker)
    second.start()
    sent = []
    for count in (1, 1 if step.startswith("stage") else 2):  # every task counts from the beginning
        with PlainProducer(broker.url, "/default/first") as producer:
            for _ in range(10):
                sent.append(str(len(sent)).encode())
                producer.send(sent[-1], key=f"key-{len(sent) % 3}")
        first.start(f"{step}=kill@{count}")
        with PlainProducer(broker.url, "/default/first") as producer:
            while first.process.is_alive():  # an epoch each, until the one that it dies in
                sent.append(str(len(sent)).encode())
                producer.send(sent[-1], key=f"key-{len(sent) % 3}")
                first.process.join(0.3)
        assert first.wait() == -9, first.log()
    first.start()
    wait_until(lambda: len(payloads(second)) >= len(sent), "all messages")
    first.stop()
    second.stop()
    assert sorted(payloads(second), key=int) == sent
    relayed = [message.payload for message in broker.messages(TOPIC)]
    assert sorted(set(relayed), key=int) == sent
    if step == "stage.task":
        assert len(relayed) > len(sent), "the kill made no repeats: the test shows nothing"


def test_rows_that_a_corrected_schema_takes_double_none_of_the_others(broker: DanubeBroker, tmp_path: Path) -> None:
    """An epoch that was sent, and not committed, takes the schema file of the next start: more of its rows are good then."""
    broker.tell("create", topic="/default/first")
    first, second = choosing(tmp_path / "relay", broker), reading(tmp_path / "read", broker)
    properties = '"properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}'
    (first.directory / "first.json").write_text(f'{{"type": "object", {properties}, "required": ["n", "ok"]}}')
    first.run_until(lambda: broker.subscription("/default/first", "relay").get("consumers"), "the first subscription")
    subscribe_first(second, broker)
    second.start()
    with PlainProducer(broker.url, "/default/first") as producer:
        for number in range(30):
            producer.send(json.dumps({"n": number, "ok": True} if number % 3 else {"n": number}).encode())
    first.killed("stage.task=kill@1")
    (first.directory / "first.json").write_text(f'{{"type": "object", {properties}, "required": ["n"]}}')
    first.start()
    wait_until(lambda: len(payloads(second)) >= 30 and committed(first), "all messages")
    first.stop()
    second.stop()
    assert len(broker.messages(TOPIC)) > 30, "the kill made no repeats: the test shows nothing"
    assert sorted(json.loads(payload)["n"] for payload in payloads(second)) == list(range(30))


def committed(pipe: Pipe) -> bool:
    """Nothing is in hand: what an epoch sent may be there before it is committed, and it takes the schemas of a later start."""
    newest = State(pipe.directory / "state", "relaying").peek().newest
    return newest is not None and newest.state == "committed"


@pytest.mark.parametrize("step", ["stage.middle", "stage.task", "commit.after"])
def test_letters_that_are_replayed_go_on_to_danube_and_arrive_once(
    broker: DanubeBroker, tmp_path: Path, step: str
) -> None:
    """The run that makes the letters is killed, the run that replays them too, each beside a broker that restarts."""
    broker.tell("create", topic="/default/first")
    first, second = choosing(tmp_path / "relay", broker), reading(tmp_path / "read", broker)
    first.run_until(lambda: broker.subscription("/default/first", "relay").get("consumers"), "the first subscription")
    subscribe_first(second, broker)
    second.start()
    sent = [json.dumps({"n": number if number % 3 else str(number)}).encode() for number in range(30)]
    good = [payload for number, payload in enumerate(sent) if number % 3]
    with PlainProducer(broker.url, "/default/first") as producer:
        for payload in sent:
            producer.send(payload)
    first.killed(f"{step}=kill@1")
    broker.restart()
    first.start()
    wait_until(lambda: len(payloads(second)) >= len(good) and committed(first), "the good ones")
    first.stop()
    state = State(first.directory / "state", "relaying").peek()
    assert state.newest is not None
    wanted = Step(verb="replay", incarnation=state.identity.incarnation, epoch=state.newest.number)
    ReplayRequests.of(first.directory / "state").add(wanted)
    (first.directory / "first.json").write_text(SHAPE % '["integer", "string"]')
    first.killed(f"{step}=kill@1")
    broker.restart()
    first.start()
    wait_until(lambda: len(payloads(second)) >= len(sent), "the others")
    first.stop()
    second.stop()
    numbers = sorted(int(json.loads(payload)["n"]) for payload in payloads(second))
    assert numbers == list(range(len(sent)))
