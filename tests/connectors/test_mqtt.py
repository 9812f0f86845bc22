"""The mqtt source and sink against a real Mosquitto."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from paho.mqtt import client as paho
from pydantic import ValidationError

from brokers import Certificates, Peer, numbered, peer
from penstock.config import Secret
from penstock.connectors.mqtt import Mqtt, MqttSink
from penstock.connectors.mqtt.link import Arrived, Link, require_known
from penstock.connectors.mqtt.received import Received
from penstock.connectors.mqtt.sink import MqttSinkConfig
from penstock.connectors.mqtt.source import MqttConfig
from penstock.errors import ConfigError, DataError, FatalError, RetryableError
from penstock.sink import Task
from penstock.source import HealthState, SourceCheckpoint, SourceContext, SourceEnvelope
from penstock.testing import SinkContract, SourceContract
from penstock.testing.mosquitto import Mosquitto, Way, free_port, is_installed
from penstock.testing.processes import wait_until
from penstock.testing.sinks.steps import TOPIC, epoch_of, opened_sink

VERSIONS = ["3.1.1", "5"]


@pytest.fixture(scope="module")
def broker(need: Callable[[bool, str], None]) -> Iterator[Mosquitto]:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    with Mosquitto() as running:
        yield running


@pytest.fixture
def sender(broker: Mosquitto) -> Iterator[Peer]:
    with peer(broker) as found:
        yield found


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name of the test's own: the broker is the module's."""
    return f"t{abs(hash(request.node.nodeid))}"


def source_of(url: str, topic: str, version: str = "5", **options: Any) -> Mqtt:
    given = {"topics": (f"{topic}/#",), "client_id": f"c-{topic}", **options}
    return Mqtt(MqttConfig(url=url, version=version, **given))


class Running:
    """A source that is polled, journaled and committed by hand."""

    def __init__(self, source: Mqtt, checkpoint: SourceCheckpoint | None = None) -> None:
        self.source = source
        self.found: list[SourceEnvelope] = []
        source.open()
        self.checkpoint = checkpoint
        if checkpoint is not None:
            source.restore(checkpoint)

    def poll(self, commit: bool = True) -> list[SourceEnvelope] | None:
        try:
            batch = self.source.poll_batch(1000)
        except RetryableError:
            return None
        if batch is not None:
            self.found += batch
            self.checkpoint = SourceCheckpoint.model_validate_json(self.source.checkpoint().model_dump_json())
            if commit:
                self.source.commit(self.checkpoint.offsets)
        return batch

    def until(self, count: int, commit: bool = True) -> list[bytes | None]:
        def enough() -> bool:
            self.poll(commit)
            return len(self.found) >= count

        wait_until(enough, f"{count} messages")
        return self.payloads

    def rest(self) -> list[bytes | None]:
        """Poll until nothing comes any more."""
        wait_until(lambda: self.poll() is None, "the source to rest")
        return self.payloads

    @property
    def payloads(self) -> list[bytes | None]:
        return [each.record.payload for each in self.found]

    def die(self) -> SourceCheckpoint | None:
        """Go without a word to the broker; what was journaled is left."""
        link = self.source._link
        assert link is not None
        link.socket().close()  # type: ignore[union-attr]
        self.source.close()
        return self.checkpoint


@pytest.fixture
def subscribed(broker: Mosquitto, topic: str) -> Callable[..., Running]:
    """A source that has subscribed, with nothing to read yet."""

    def start(version: str, url: str | None = None, **options: Any) -> Running:
        running = Running(source_of(url or broker.url, topic, version, **options))
        running.rest()
        return running

    return start


# -- the kit ---------------------------------------------------------------------------------------------------------


class TestMqttSource(SourceContract):
    @pytest.fixture(params=VERSIONS)
    def source(self, broker: Mosquitto, sender: Peer, topic: str, request: pytest.FixtureRequest) -> Mqtt:
        running = Running(source_of(broker.url, topic, request.param))
        running.rest()
        running.source.close()
        sender.publish_all(f"{topic}/a", [b"%d" % number for number in range(10)])
        return source_of(broker.url, topic, request.param)

    @pytest.fixture
    def expected(self, topic: str) -> dict[str, list[bytes]]:
        return {f"{topic}/a": [b"%d" % number for number in range(10)]}

    @pytest.fixture
    def told(self, broker: Mosquitto, topic: str) -> Callable[[], int]:
        return lambda: broker.log().count(f"Received PUBACK from c-{topic} ")

    @pytest.fixture
    def wrong(self, topic: str) -> Mqtt:
        return source_of("mqtt://127.0.0.1:9", topic)


class TestMqttSink(SinkContract):
    @pytest.fixture
    def sink(self, broker: Mosquitto, topic: str, visible: Any) -> MqttSink:
        return MqttSink(MqttSinkConfig(url=broker.url, topic=f"{topic}/{{topic}}"))

    @pytest.fixture
    def visible(self, sender: Peer, topic: str) -> Callable[[], list[Any]]:
        sender.listen(f"{topic}/#")

        def seen() -> list[Any]:
            marks = sum(payload == b"mark" for payload in sender.payloads())
            sender.publish(f"{topic}/mark", b"mark").wait_for_publish(60)
            wait_until(lambda: sum(payload == b"mark" for payload in sender.payloads()) > marks, "the mark")
            return [json.loads(payload) for payload in sender.payloads() if payload != b"mark"]

        return seen


# -- what a message becomes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_message_comes_once_under_every_quality_of_service(
    version: str, qos: int, subscribed: Callable[..., Running], sender: Peer, topic: str
) -> None:
    running = subscribed(version, qos=qos)
    sender.publish_all(f"{topic}/x", numbered(250), qos)
    assert running.until(250) == numbered(250)
    assert {each.record.stream for each in running.found} == {f"{topic}/x"}
    running.rest()
    assert len(running.source._received) == 0, "the broker has heard of all of them"
    running.source.close()


def test_properties_and_the_retained_flag_become_attributes(
    broker: Mosquitto, sender: Peer, topic: str, subscribed: Callable[..., Running]
) -> None:
    sender.publish(f"{topic}/kept", b"old", retain=True).wait_for_publish(60)
    running = subscribed("5")
    given = {"site": "north", "unit": "C", "mqtt.retained": "true", "mqtt.content_type": "text/plain"}
    sender.publish(f"{topic}/new", b"new", **given).wait_for_publish(60)
    running.until(2)
    found = {each.record.payload: dict(each.record.attributes) for each in running.found}
    assert found == {b"old": {"mqtt.retained": "true"}, b"new": {"site": "north", "unit": "C"}}
    running.source.close()
    sender.publish(f"{topic}/kept", b"", retain=True).wait_for_publish(60)


@pytest.mark.parametrize("version", VERSIONS)
def test_retained_messages_come_with_a_new_subscription_and_not_with_each_start(
    version: str, broker: Mosquitto, sender: Peer, topic: str, subscribed: Callable[..., Running]
) -> None:
    sender.publish(f"{topic}/kept", b"old", retain=True).wait_for_publish(60)
    running = subscribed(version)
    assert running.until(1) == [b"old"]
    running.rest()
    running.source.close()
    again = Running(source_of(broker.url, topic, version), running.checkpoint)
    assert again.rest() == []
    again.source.close()
    sender.publish(f"{topic}/kept", b"", retain=True).wait_for_publish(60)


def test_each_filter_has_its_quality_of_service(broker: Mosquitto, topic: str) -> None:
    topics = (f"{topic}/a", {"filter": f"{topic}/b/#", "qos": 2}, {"filter": f"$share/group/{topic}/c", "qos": 0})
    running = Running(source_of(broker.url, topic, topics=topics))
    running.rest()
    log = broker.log()
    for line in (f"{topic}/a (QoS 1)", f"{topic}/b/# (QoS 2)", f"{topic}/c (QoS 0)"):
        assert line in log
    running.source.close()


@pytest.mark.parametrize("limit", ["QOS_0_MESSAGES", "QOS_0_BYTES"])
def test_what_nobody_acknowledges_is_bounded_by_number_and_size_and_goes_on_once_there_is_room(
    limit: str, monkeypatch: pytest.MonkeyPatch, subscribed: Callable[..., Running], sender: Peer, topic: str
) -> None:
    running = subscribed("5", topics=({"filter": f"{topic}/#", "qos": 0}, {"filter": f"kept/{topic}", "qos": 1}))
    monkeypatch.setattr(f"penstock.connectors.mqtt.source.{limit}", 10 if limit == "QOS_0_MESSAGES" else 10_000)
    source = running.source
    sender.publish_all(f"{topic}/x", [b"x" * 1000] * 50, qos=0)
    wait_until(lambda: source.metrics().custom["mqtt_qos_0_dropped_total"] == 40, "all but ten to be dropped")
    assert source.health_check().state is HealthState.DEGRADED
    sender.publish_all(f"kept/{topic}", [b"kept"])
    assert running.until(11) == [b"x" * 1000] * 10 + [b"kept"]
    assert source.health_check().state is HealthState.HEALTHY
    sender.publish_all(f"{topic}/x", [b"again"], qos=0)
    assert running.until(12)[-1] == b"again"
    source.close()


def test_a_shared_subscription_deals_the_messages_out(broker: Mosquitto, sender: Peer, topic: str) -> None:
    pair = [
        Running(source_of(broker.url, topic, topics=(f"$share/g/{topic}/#",), client_id=f"{topic}-{each}"))
        for each in "ab"
    ]
    for each in pair:
        each.rest()
    sender.publish_all(f"{topic}/x", numbered(50))
    wait_until(
        lambda: [each.poll() for each in pair] and sum(len(each.found) for each in pair) >= 50, "all of the messages"
    )
    assert sorted(payload for each in pair for payload in each.payloads) == sorted(numbered(50))
    assert all(each.found for each in pair)
    for each in pair:
        each.source.close()


def test_a_filter_that_is_left_out_later_is_no_longer_subscribed_to(
    broker: Mosquitto, sender: Peer, topic: str
) -> None:
    first = Running(source_of(broker.url, topic, topics=(f"{topic}/a", f"{topic}/b")))
    first.rest()
    first.source.close()
    second = Running(source_of(broker.url, topic, topics=(f"{topic}/b", f"{topic}/c")), first.checkpoint)
    second.rest()
    for name in "abc":
        sender.publish(f"{topic}/{name}", name).wait_for_publish(60)
    assert second.until(2) == [b"b", b"c"]
    second.source.close()


def test_a_client_id_is_made_once_and_kept(broker: Mosquitto, topic: str, tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        source = source_of(broker.url, topic, client_id=None)
        source.open(SourceContext(state_dir=tmp_path / "sources" / "mqtt"))
        names.add(source._client_id)
        source.close()
    assert len(names) == 1


@pytest.mark.parametrize("change", ["gone", "other parameters"])
def test_a_paho_that_is_made_in_another_way_is_refused_by_its_name(change: str) -> None:
    class Changed(paho.Client):
        if change == "gone":
            _handle_publish = None
        else:

            def _packet_queue(self, packet: bytes) -> None:
                pass

    require_known()
    with pytest.raises(FatalError, match=r"PEN-5001 paho-mqtt 2\.\d.* has changed"):
        require_known(Changed)


@pytest.mark.parametrize("filter", ["", "a/#/b", "a+", "#a", "a/b#"])
def test_a_filter_that_is_none_is_refused(filter: str) -> None:
    with pytest.raises(ValidationError, match="is no filter"):
        MqttConfig(url="mqtt://h", topics=(filter,))


@pytest.mark.parametrize("url", ["h:1883", "http://h", "mqtt://u:p@h", "mqtt://h/path"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        MqttConfig(url=url, topics=("a",))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_that_another_client_takes_over_is_said_and_goes_on_there(
    version: str, broker: Mosquitto, sender: Peer, topic: str, subscribed: Callable[..., Running]
) -> None:
    first = subscribed(version)
    sender.publish_all(f"{topic}/x", [b"1"], 1)
    first.until(1)
    second = Running(source_of(broker.url, topic, version), first.checkpoint)
    link = first.source._link
    assert link is not None
    wait_until(lambda: link.failure, "the first one to notice")
    assert isinstance(link.failure, RetryableError)
    assert "client_id" in link.failure.message
    sender.publish_all(f"{topic}/x", [b"2", b"3"], 1)
    assert second.until(2) == [b"2", b"3"]
    first.source.close()
    second.source.close()


# -- packets that are lost -------------------------------------------------------------------------------------------

PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 3, 4, 5, 6, 7


class Losing:
    """Loses all that follows in one direction, as a line does that breaks: from the first packet of a kind until it is over."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.lost = 0
        self.over = False
        self._broken: bool | None = None

    def __call__(self, to_broker: bool, packet: bytes) -> bool | None:
        is_first = packet[0] >> 4 == self.kind
        if self.over or (self._broken != to_broker and not is_first):
            return True
        self._broken = to_broker
        self.lost += is_first
        return False


def _publish(body: bytes, head: int = 0x32) -> bytes:
    return bytes([head, len(body)]) + body


@pytest.mark.parametrize(
    "broken",
    [
        _publish(b"\0\1t\0\7\2\x7f\0"),
        _publish(b"\0\1t\0\7\x7f\x26\0"),
        _publish(b"\0\1t\0\7\7\x26\0\1\xff\0\1\xfe"),
        _publish(b"\0\1t\0\7\0x", 0x36),
        _publish(b"\0\1t\0\0\0x"),
        _publish(b"\0\0\0\7\0x"),
        _publish(b"\xff\xfft"),
        b"\x62\1\0",
        b"\x32\xff\xff\xff\xff\x7f",
    ],
    ids=[
        "property that is none",
        "properties cut short",
        "property of no text",
        "QoS 3",
        "no packet id",
        "no topic",
        "topic beyond the packet",
        "PUBREL cut short",
        "length without end",
    ],
)
def test_a_packet_that_cannot_be_read_ends_the_connection_and_the_message_comes_again(
    broken: bytes, broker: Mosquitto, sender: Peer, topic: str, subscribed: Callable[..., Running]
) -> None:
    swaps = [broken]

    def rule(to_broker: bool, packet: bytes) -> bool | bytes:
        return swaps.pop() if swaps and not to_broker and packet[0] >> 4 == PUBLISH else True

    with Way(broker.port, rule) as way:
        running = subscribed("5", way.url)
        first = running.source._link
        sender.publish_all(f"{topic}/x", [b"1", b"2"], 1)
        wait_until(lambda: (running.poll(), running.source._link is not first)[1], "another connection")
        assert first is not None
        assert first.failure is not None
        assert sorted(running.until(2)) == [b"1", b"2"]
        running.source.close()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("qos", "kind"), [(1, PUBLISH), (1, PUBACK), (2, PUBLISH), (2, PUBREC), (2, PUBREL), (2, PUBCOMP)]
)
@pytest.mark.parametrize("crash", [False, True], ids=["reconnect", "restart"])
def test_a_packet_that_is_lost_neither_loses_nor_doubles_a_message(
    version: str,
    qos: int,
    kind: int,
    crash: bool,
    broker: Mosquitto,
    sender: Peer,
    topic: str,
    subscribed: Callable[..., Running],
) -> None:
    losing = Losing(kind)
    losing.over = True
    with Way(broker.port, losing) as way:
        running = subscribed(version, way.url, qos=qos)
        losing.over = False
        # Equal content: only what is known of the packets tells them apart.
        sender.publish_all(f"{topic}/x", [b"same"] * 3, qos)
        wait_until(lambda: (running.poll(), losing.lost)[1] >= 3, "packets to be lost")
        losing.over = True
        if crash:
            found = running.found
            running = Running(source_of(way.url, topic, version, qos=qos), running.die())
            running.found = found
        else:
            way.cut()
            wait_until(lambda: running.source._link is None or running.source._link.failure, "the break to be noticed")
        running.until(3)
        sender.publish_all(f"{topic}/x", [b"same"] * 3, qos)
        running.until(6)
        running.rest()
        assert running.payloads == [b"same"] * 6
        assert len(running.source._received) == 0
        running.source.close()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [1, 2])
def test_what_was_not_journaled_comes_again_after_a_crash(
    version: str, qos: int, broker: Mosquitto, sender: Peer, topic: str, subscribed: Callable[..., Running]
) -> None:
    running = subscribed(version, qos=qos)
    journaled = running.checkpoint
    sender.publish_all(f"{topic}/x", numbered(5), qos)
    running.until(5, commit=False)
    running.die()
    again = Running(source_of(broker.url, topic, version, qos=qos), journaled)
    assert again.until(5) == numbered(5)
    again.source.close()


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_that_the_broker_has_lost_begins_anew_and_ids_mean_nothing_any_more(
    qos: int, broker: Mosquitto, sender: Peer, topic: str, subscribed: Callable[..., Running]
) -> None:
    running = subscribed("5", qos=qos)
    sender.publish_all(f"{topic}/x", [b"same"], qos)
    running.until(1, commit=False)
    journaled = running.die()
    Peer(broker.port, f"c-{topic}").close()  # takes the session over, and leaves none
    again = Running(source_of(broker.url, topic, qos=qos), journaled)
    again.rest()
    sender.publish_all(f"{topic}/x", [b"same"], qos)
    assert again.until(1) == [b"same"]
    again.source.close()


def test_a_repeat_is_known_by_id_and_content_and_a_first_try_never_is_one() -> None:
    def arrived(payload: bytes, is_repeat: bool, mid: int = 7, qos: int = 1) -> Arrived:
        return Arrived("t", payload, qos, mid, is_repeat, False, None)

    received = Received()
    assert received.take(arrived(b"a", is_repeat=True), 1)[0], "its first try was lost"
    received = Received(received.pack())
    assert not received.take(arrived(b"a", is_repeat=True), 1)[0]
    assert received.take(arrived(b"b", is_repeat=True), 1)[0], "the id was used again, and the first try was lost"
    assert received.take(arrived(b"b", is_repeat=False), 1)[0], "a broker marks what it repeats"
    received.release(7)
    assert received.take(arrived(b"b", is_repeat=True), 1)[0], "released: the id is free"


# -- security --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(certificates: Certificates, need: Callable[[bool, str], None]) -> Iterator[dict[str, str]]:
    """Addresses of listeners: with TLS, with a wrong name in the certificate, and one that asks clients for theirs."""
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    ports = {name: free_port() for name in ("tls", "misnamed", "mtls")}
    settings = []
    for name, port in ports.items():
        server = "misnamed" if name == "misnamed" else "server"
        settings += [
            f"listener {port} 127.0.0.1",
            f"cafile {certificates['ca.pem']}",
            f"certfile {certificates[f'{server}.pem']}",
            f"keyfile {certificates[f'{server}.key']}",
        ]
        settings += ["require_certificate true"] if name == "mtls" else []
    with Mosquitto(*settings):
        yield {name: f"mqtts://localhost:{port}" for name, port in ports.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_tls_and_client_certificates_are_used(
    version: str, secure: dict[str, str], certificates: Certificates, topic: str
) -> None:
    files = {"ca_file": certificates["ca.pem"]}
    own = {"cert_file": certificates["client.pem"], "key_file": certificates["client.key"]}
    for url, given in ((secure["tls"], files), (secure["mtls"], {**files, **own})):
        running = Running(source_of(url, topic, version, **given))
        running.rest()
        sink = MqttSink(MqttSinkConfig(url=url, topic=f"{topic}/x", version=version, **given))
        with opened_sink(sink) as opened:
            opened.begin_epoch(epoch_of(1), Task(0))
            opened.write_batch("/x", pa.record_batch({"id": list(range(300))}))
        assert running.until(300) == [f'{{"id":{number}}}'.encode() for number in range(300)]
        running.source.close()


@pytest.mark.parametrize(
    ("listener", "ca", "own"),
    [
        ("tls", "other.pem", None),
        ("tls", None, None),
        ("misnamed", "ca.pem", None),
        ("mtls", "ca.pem", None),
        ("mtls", "ca.pem", "stranger"),
    ],
    ids=["wrong authority", "authorities of the machine", "wrong host name", "no certificate", "wrong certificate"],
)
def test_a_connection_that_is_not_what_the_certificates_say_is_refused(
    listener: str, ca: str | None, own: str | None, secure: dict[str, str], certificates: Certificates, topic: str
) -> None:
    files: dict[str, Any] = {} if ca is None else {"ca_file": certificates[ca]}
    if own is not None:
        files |= {"cert_file": certificates[f"{own}.pem"], "key_file": certificates[f"{own}.key"]}
    source = source_of(secure[listener], topic, **files)
    with pytest.raises(FatalError):
        source.open()
    source.close()


def test_a_certificate_of_an_unknown_authority_says_which_option_names_it(secure: dict[str, str], topic: str) -> None:
    source = source_of(secure["tls"], topic)
    with pytest.raises(FatalError, match="certificate is not accepted") as refused:
        source.open()
    assert refused.value.hint == "`ca_file` names those that may have signed it"
    source.close()


def test_plain_text_to_a_listener_with_tls_says_so(secure: dict[str, str], topic: str) -> None:
    source = source_of(secure["tls"].replace("mqtts://", "mqtt://"), topic)
    with pytest.raises(FatalError, match=r"wants TLS \(mqtts://\)"):
        source.open()
    source.close()


def test_tls_options_that_do_nothing_are_refused(certificates: Certificates, broker: Mosquitto, topic: str) -> None:
    for given in ({"ca_file": certificates["ca.pem"]}, {"cert_file": certificates["client.pem"]}):
        with pytest.raises(ConfigError, match="PEN-1003"):
            source_of(broker.url, topic, **given).open()
    with pytest.raises(ConfigError, match="belong together"):
        source_of("mqtts://localhost:1", topic, cert_file=certificates["client.pem"]).open()
    with pytest.raises(ConfigError, match="cannot be used"):
        source_of("mqtts://localhost:1", topic, ca_file=certificates["ca.key"]).open()


def test_a_wrong_password_and_a_topic_that_may_not_be_written_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need: Callable[[bool, str], None]
) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    users, access = tmp_path / "users", tmp_path / "access"
    subprocess.run(["mosquitto_passwd", "-b", "-c", users, "ada", "right"], check=True, capture_output=True)
    access.write_text("user ada\ntopic readwrite allowed/#\n")
    users.chmod(0o644)
    monkeypatch.setenv("WRONG", "wrong")
    monkeypatch.setenv("RIGHT", "right")
    with Mosquitto(f"password_file {users}", f"acl_file {access}", anonymous=False) as broker:
        for version in VERSIONS:
            given = {"username": "ada", "password": Secret(env="WRONG")}
            with pytest.raises(ConfigError, match="PEN-1016"):
                source_of(broker.url, "allowed", version, **given).open()
            given["password"] = Secret(env="RIGHT")
            running = Running(source_of(broker.url, "allowed", version, **given))
            running.rest()
            running.source.close()
        sent(MqttSink(MqttSinkConfig(url=broker.url, topic="allowed/x", **given)), pa.record_batch({"id": [1]}))
        for qos in (1, 2):
            sink = MqttSink(MqttSinkConfig(url=broker.url, topic="other", qos=qos, **given))
            with pytest.raises(FatalError, match="Not authorized"):
                sent(sink, pa.record_batch({"id": [1]}))


# -- the sink --------------------------------------------------------------------------------------------------------


def sent(sink: MqttSink, batch: pa.RecordBatch, topic: str = TOPIC) -> None:
    with opened_sink(sink) as opened:
        opened.begin_epoch(epoch_of(1), Task(0))
        opened.write_batch(topic, batch)
        opened.flush()
        opened.pre_commit(epoch_of(1))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [1, 2])
def test_rows_go_to_the_topic_that_their_columns_name(
    version: str, qos: int, broker: Mosquitto, sender: Peer, topic: str
) -> None:
    sender.listen(f"{topic}/#")
    batch = pa.record_batch({"device": ["a", "b"], "v": [1, 2]})
    sent(MqttSink(MqttSinkConfig(url=broker.url, topic=f"{topic}/{{device}}", qos=qos, version=version)), batch)
    wait_until(lambda: len(sender.heard) >= 2, "two messages")
    assert {(name, payload) for name, payload, _, _ in sender.heard} == {
        (f"{topic}/a", b'{"device":"a","v":1}'),
        (f"{topic}/b", b'{"device":"b","v":2}'),
    }


def test_columns_travel_as_user_properties_and_messages_are_kept(broker: Mosquitto, sender: Peer, topic: str) -> None:
    config = MqttSinkConfig(url=broker.url, topic=topic, retain=True, attributes=("site",))
    sent(MqttSink(config), pa.record_batch({"site": ["north"], "v": [1]}))
    sender.listen(topic)
    wait_until(lambda: sender.heard, "the message that was kept")
    assert sender.heard == [(topic, b'{"v":1}', True, [("site", "north")])]
    sender.publish(topic, b"", retain=True).wait_for_publish(60)
    with pytest.raises(ConfigError, match="need MQTT 5"):
        MqttSink(config.model_copy(update={"version": "3.1.1"})).open()


def test_rows_that_have_no_topic_are_named_before_any_is_sent(broker: Mosquitto, sender: Peer, topic: str) -> None:
    sender.listen(f"{topic}/#")
    sink = MqttSink(MqttSinkConfig(url=broker.url, topic=f"{topic}/{{device}}"))
    with pytest.raises(DataError) as caught:
        sent(sink, pa.record_batch({"device": ["a", "+", "b", "x#y", None]}))
    assert caught.value.rows == [4], "first those without a value"
    with pytest.raises(DataError) as caught:
        sent(sink, pa.record_batch({"device": ["a", "+", "b", "x#y"]}))
    assert caught.value.rows == [1, 3]
    assert not sender.heard


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["a\0b", "a\x01b", "a\x85b", "a\ufdd0b", "a\U0001ffffb", "$SYS/x", "x" * 65_536])
def test_a_name_that_would_end_the_connection_is_a_fault_of_its_row(
    version: str, name: str, broker: Mosquitto, sender: Peer, topic: str
) -> None:
    sink = MqttSink(MqttSinkConfig(url=broker.url, topic="{t}", version=version))
    with pytest.raises(DataError) as caught:
        sent(sink, pa.record_batch({"t": [topic, name, topic]}))
    assert caught.value.rows == [1]
    sent(
        MqttSink(MqttSinkConfig(url=broker.url, topic=f"{topic}/{{t}}", version=version)),
        pa.record_batch({"t": ["ä😀"]}),
    )


@pytest.mark.parametrize("value", ["a\0b", "a\nb", "\ufffe", "x" * 65_536])
def test_an_attribute_that_no_property_can_hold_is_a_fault_of_its_row(
    value: str, broker: Mosquitto, topic: str
) -> None:
    sink = MqttSink(MqttSinkConfig(url=broker.url, topic=topic, attributes=("site",)))
    with pytest.raises(DataError) as caught:
        sent(sink, pa.record_batch({"site": ["north", value, "ä😀"], "v": [1, 2, 3]}))
    assert caught.value.rows == [1]
    assert "attributes" in caught.value.hint


def test_a_refusal_names_its_row_where_packet_ids_come_again(
    monkeypatch: pytest.MonkeyPatch, broker: Mosquitto, topic: str
) -> None:
    ids = itertools.cycle(range(1, 11))
    monkeypatch.setattr("penstock.connectors.mqtt.sink.IDS", 10)
    monkeypatch.setattr(Link, "_mid_generate", lambda link: next(ids))
    refusals = [b"\x40\x04\x00\x03\x90\x00"]  # the topic's name is invalid

    def rule(to_broker: bool, packet: bytes) -> bool | bytes:
        return refusals.pop() if packet[0] == 0x40 and packet[2:4] == b"\0\3" and refusals else True

    with Way(broker.port, rule) as way:
        sink = MqttSink(MqttSinkConfig(url=way.url, topic=topic, max_inflight=4))
        with pytest.raises(DataError) as caught:
            sent(sink, pa.record_batch({"id": list(range(25))}))
    assert (caught.value.rows, caught.value.others_written) == ([2], True)


def test_a_message_that_is_larger_than_the_broker_takes_is_a_fault_of_its_row(
    topic: str, need: Callable[[bool, str], None]
) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")

    def write(version: str, attributes: tuple[str, ...], *sizes: int, **options: Any) -> None:
        config = MqttSinkConfig(url=broker.url, topic=topic, version=version, attributes=attributes, **options)
        rows = pa.record_batch({"site": ["ä" * 100] * len(sizes), "v": ["x" * size for size in sizes]})
        sent(MqttSink(config), rows)

    def largest(version: str, attributes: tuple[str, ...], **options: Any) -> int:
        for size in range(1000, 0, -1):
            try:
                write(version, attributes, size, **options)
            except DataError:
                continue
            return size
        raise AssertionError("nothing was taken")

    with Mosquitto("max_packet_size 1000") as broker:
        for attributes in ((), ("site",)):
            most = largest("5", attributes)
            with pytest.raises(DataError) as caught:
                write("5", attributes, 1, most + 1, most)
            assert caught.value.rows == [1]
        assert largest("3.1.1", (), max_packet_bytes=1000) >= 700, "the broker has taken it"


def test_a_broker_that_goes_away_is_a_failure_that_passes(broker: Mosquitto, topic: str) -> None:
    with Way(broker.port) as way:
        sink = MqttSink(MqttSinkConfig(url=way.url, topic=topic, timeout_secs=60))
        sink.open()
        way.rule = lambda to_broker, packet: None if packet[0] >> 4 == PUBACK else True
        with pytest.raises(RetryableError):
            sink.write_batch("/t", pa.record_batch({"id": list(range(500))}))
        with pytest.raises(RetryableError):
            sink.write_batch("/t", pa.record_batch({"id": [1]}))
        sink.close()
