"""Kill a run that reads from MQTT, restart its broker, take its session over, stall its network: nothing lost or doubled."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from brokers import numbered, peer
from penstock.testing.mosquitto import Mosquitto, Way, is_installed
from penstock.testing.processes import wait_until
from push_runs import Pushed, await_kill
from thorough import THOROUGH

STEPS = ["journal.data", "journal.index", "journal.told", "stage.task", "commit.after", "ack.after"]
CASES = [(version, qos, step) for version in ("3.1.1", "5") for qos in (1, 2) for step in STEPS]
FEW = [
    ("3.1.1", 2, "journal.index"),
    ("3.1.1", 2, "journal.told"),
    ("5", 2, "journal.data"),
    ("5", 1, "journal.index"),
    ("3.1.1", 1, "journal.told"),
    ("5", 1, "commit.after"),
]


@pytest.fixture(scope="module")
def broker(need: Callable[[bool, str], None]) -> Iterator[Mosquitto]:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    with Mosquitto() as running:
        yield running


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"t{abs(hash(request.node.nodeid))}"


def pipeline(path: Path, url: str, topic: str, version: str = "5", qos: int = 1, **options: Any) -> Pushed:
    more = "".join(f"{name} = {value!r}\n" for name, value in options.items())
    run = Pushed(
        path,
        f'connector = "mqtt"\nurl = "{url}"\ntopics = ["{topic}/#"]\nversion = "{version}"\nqos = {qos}\n'
        f'client_id = "c-{topic}"\n{more}',
    )
    run.drain()  # it has subscribed
    return run


@pytest.mark.parametrize(("version", "qos", "step"), CASES if THOROUGH else FEW)
def test_a_kill_under_load_loses_nothing_and_doubles_nothing(
    version: str, qos: int, step: str, broker: Mosquitto, topic: str, tmp_path: Path
) -> None:
    run = pipeline(tmp_path, broker.url, topic, version, qos)
    enough, sent = threading.Event(), 0

    def send() -> None:
        nonlocal sent
        while not enough.is_set():
            sender.publish_all(f"{topic}/x", numbered(20, sent), qos)  # returns once the broker has them
            sent += 20

    with peer(broker) as sender:
        sending = threading.Thread(target=send)
        sending.start()
        for count in (2, 3):
            await_kill(run.start(f"{step}=kill@{count}"))
        enough.set()
        sending.join()
    run.drain()
    assert run.ids() == Counter(range(sent))


def test_a_broker_that_is_restarted_is_joined_again(topic: str, tmp_path: Path, broker: Mosquitto) -> None:
    with Mosquitto() as own:
        run = pipeline(tmp_path, own.url, topic)
        running = run.start()
        for start in (0, 100, 200):
            with peer(own) as sender:
                sender.publish_all(f"{topic}/x", numbered(100, start))
            run.await_ids(start + 50)
            own.stop()
            own.start()
        run.await_ids(300)
        running.kill()
        run.drain()
        assert run.ids() == Counter(range(300))


def test_topics_that_share_a_table_do_not_keep_the_next_run_from_starting(
    topic: str, tmp_path: Path, broker: Mosquitto
) -> None:
    run = pipeline(tmp_path, broker.url, topic)
    for start in (0, 20):
        with peer(broker) as sender:
            sender.publish_all(f"{topic}/a", numbered(10, start))
            sender.publish_all(f"{topic}/b", numbered(10, start + 10))
        run.drain()
    assert run.ids() == Counter(range(40))


def test_a_session_that_another_client_takes_over_is_taken_back(topic: str, tmp_path: Path, broker: Mosquitto) -> None:
    run = pipeline(tmp_path, broker.url, topic)
    running = run.start()
    with peer(broker) as sender:
        for start in (0, 100, 200):
            sender.publish_all(f"{topic}/x", numbered(100, start))
            thief = paho.Client(
                CallbackAPIVersion.VERSION2, f"c-{topic}", protocol=MQTTProtocolVersion.MQTTv5, manual_ack=True
            )
            wishes = Properties(PacketTypes.CONNECT)
            wishes.SessionExpiryInterval = 3600
            taken = threading.Event()  # it may be taken back before anybody looks
            thief.on_connect = lambda *_: taken.set()  # noqa: B023
            thief.connect("127.0.0.1", broker.port, clean_start=False, properties=wishes)
            thief.loop_start()
            wait_until(taken.is_set, "the session to be taken over")
            thief.disconnect()
            thief.loop_stop()
    run.await_ids(300)
    running.kill()
    run.drain()
    assert run.ids() == Counter(range(300))


def test_a_network_that_stalls_is_given_up_and_joined_again(topic: str, tmp_path: Path, broker: Mosquitto) -> None:
    clear = threading.Event()
    clear.set()
    dropped: list[bytes] = []

    def rule(to_broker: bool, packet: bytes) -> bool:
        if not clear.is_set():
            dropped.append(packet)
        return clear.is_set()

    with Way(broker.port, rule) as way, peer(broker) as sender:
        run = pipeline(tmp_path, way.url, topic, keepalive_secs=1, timeout_secs=2)
        running = run.start()
        sender.publish_all(f"{topic}/x", numbered(100))
        run.await_ids(100)
        clear.clear()  # from here on packets vanish, and nobody hangs up
        sender.publish_all(f"{topic}/x", numbered(100, 100))
        wait_until(lambda: any(packet[0] >> 4 == 1 for packet in dropped), "the source to connect again")
        clear.set()
        run.await_ids(200)
        running.kill()
        run.drain()
    assert run.ids() == Counter(range(200))


def test_a_full_journal_withholds_acknowledgements_and_keeps_the_connection(
    topic: str, tmp_path: Path, broker: Mosquitto
) -> None:
    run = pipeline(tmp_path, broker.url, topic, keepalive_secs=1)
    text = run.file.read_text()
    run.file.write_text(text.replace("[processing]", "[processing]\njournal_max_bytes = 100_000"))
    client = f"c-{topic}"
    running = run.start("stage.begin=stop")  # no epoch makes room
    wait_until(lambda: broker.log().count(f"as {client} ") == 2, "the source to connect")
    sent = [json.dumps({"id": id, "pad": "x" * 1000}).encode() for id in range(300)]
    with peer(broker) as sender:
        sender.publish_all(f"{topic}/x", sent)
    heard = lambda what: broker.log().count(f"{what} {client}")  # noqa: E731

    def await_pings(count: int) -> int:
        goal = heard("Received PINGREQ from") + count
        wait_until(lambda: heard("Received PINGREQ from") >= goal, "the connection to be kept alive")
        return heard("Received PUBACK from")

    wait_until(lambda: heard("Sending PUBLISH to") > 100, "the broker to send more than there is room for")
    before = await_pings(3)
    assert await_pings(4) == before < 300, "what is not on disk is not acknowledged"
    assert heard("as") == 2, "a broker hangs up after one and a half times the keepalive, and has not"
    running.kill()
    run.file.write_text(text)
    run.drain()
    assert run.ids() == Counter(range(300))


@pytest.mark.soak
@pytest.mark.parametrize("keepalive_secs", [10, 60], ids=["given-up", "sat-out"])
def test_a_network_that_stands_still_for_half_a_minute_loses_nothing(
    keepalive_secs: int, topic: str, tmp_path: Path, broker: Mosquitto
) -> None:
    clear, connects = threading.Event(), 0
    clear.set()

    def rule(to_broker: bool, packet: bytes) -> bool:
        nonlocal connects
        connects += to_broker and packet[0] >> 4 == 1
        return clear.wait(120)  # packets come late, as over TCP, and none is lost

    with Way(broker.port, rule) as way, peer(broker) as sender:
        run = pipeline(tmp_path, way.url, topic, keepalive_secs=keepalive_secs)
        running = run.start()
        sender.publish_all(f"{topic}/x", numbered(100))
        run.await_ids(100)
        before = connects
        clear.clear()
        sender.publish_all(f"{topic}/x", numbered(400, 100))
        time.sleep(30)
        clear.set()
        run.await_ids(500)
        assert (connects > before) == (keepalive_secs < 30), "only a stall longer than the keepalive is given up"
        running.kill()
        run.drain()
    assert run.ids() == Counter(range(500))
