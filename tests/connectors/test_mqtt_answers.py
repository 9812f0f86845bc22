"""What the sink makes of a broker's answers that are wrong, broken or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from penstock.connectors.mqtt.sink import MqttSink, MqttSinkConfig
from penstock.errors import DataError, FatalError, RetryableError
from penstock.testing.mosquitto import Mosquitto, Way, is_installed

PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7
ROWS = pa.record_batch({"id": [1, 2, 3]})


@pytest.fixture(scope="module")
def broker(need: Callable[[bool, str], None]) -> Iterator[Mosquitto]:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    with Mosquitto() as running:
        yield running


def _write(broker: Mosquitto, version: str, qos: int, answered: int, answer: bytes, timeout_secs: float = 60) -> None:
    """Write rows, where the first answer of a kind is another one; `ii` in it is the packet id."""
    swaps = [answer]

    def rule(to_broker: bool, packet: bytes) -> bool | bytes:
        if swaps and not to_broker and packet[0] >> 4 == answered:
            return swaps.pop().replace(b"ii", packet[2:4])
        return True

    with Way(broker.port, rule) as way:
        sink = MqttSink(
            MqttSinkConfig(url=way.url, topic="answers", qos=qos, version=version, timeout_secs=timeout_secs)
        )
        sink.open()
        try:
            sink.write_batch("/t", ROWS)
        finally:
            sink.close()


@pytest.mark.parametrize("version", ["3.1.1", "5"])
@pytest.mark.parametrize(
    ("qos", "answered", "answer"),
    [
        (1, PUBACK, b"\x40\x00"),
        (1, PUBACK, b"\x40\x01\x00"),
        (1, PUBACK, b"\x40\x02\xff\xfe"),
        (1, PUBACK, b"\x50\x02ii"),
        (1, PUBACK, b"\x70\x02ii"),
        (1, PUBACK, b"\xf0\x02ii"),
        (1, PUBACK, b"\x40\xff\xff\xff\xff\x7f"),
        (2, PUBREC, b"\x50\x01\x00"),
        (2, PUBREC, b"\x40\x02ii"),
        (2, PUBREC, b"\x70\x02ii"),
        (2, PUBCOMP, b"\x70\x00"),
        (2, PUBCOMP, b"\x40\x02ii"),
    ],
    ids=[
        "PUBACK of nothing",
        "PUBACK cut short",
        "PUBACK of another message",
        "PUBREC instead of PUBACK",
        "PUBCOMP instead of PUBACK",
        "packet of no kind",
        "length without end",
        "PUBREC cut short",
        "PUBACK instead of PUBREC",
        "PUBCOMP instead of PUBREC",
        "PUBCOMP of nothing",
        "PUBACK instead of PUBCOMP",
    ],
)
def test_an_answer_that_does_not_fit_is_never_taken_for_success(
    version: str, qos: int, answered: int, answer: bytes, broker: Mosquitto
) -> None:
    with pytest.raises(RetryableError):
        _write(broker, version, qos, answered, answer, timeout_secs=2)


@pytest.mark.parametrize("answer", [b"\x40\x04ii\x7f\x00", b"\x40\x04ii\x00\x7f"], ids=["reason", "properties"])
def test_a_reason_or_property_that_is_none_ends_the_connection(answer: bytes, broker: Mosquitto) -> None:
    with pytest.raises(RetryableError):
        _write(broker, "5", 1, PUBACK, answer)


@pytest.mark.parametrize(
    ("reason", "kind"), [(0x90, DataError), (0x97, RetryableError), (0x87, FatalError)], ids=["name", "quota", "access"]
)
@pytest.mark.parametrize("qos", [1, 2])
def test_a_refusal_says_what_is_to_be_done_under_both_qualities_of_service(
    qos: int, reason: int, kind: type[Exception], broker: Mosquitto
) -> None:
    first = PUBACK if qos == 1 else PUBREC
    with pytest.raises(kind) as caught:
        _write(broker, "5", qos, first, bytes([first << 4, 3]) + b"ii" + bytes([reason]))
    if isinstance(caught.value, DataError):
        assert (caught.value.rows, caught.value.others_written) == ([0], True)


def test_a_message_that_was_refused_is_not_released(broker: Mosquitto) -> None:
    sent: list[bytes] = []

    def rule(to_broker: bool, packet: bytes) -> bool | bytes:
        if to_broker:
            sent.append(packet)
        elif packet[0] >> 4 == PUBREC:
            return b"\x50\x03" + packet[2:4] + b"\x90"
        return True

    with Way(broker.port, rule) as way:
        sink = MqttSink(MqttSinkConfig(url=way.url, topic="answers", qos=2))
        sink.open()
        with pytest.raises(DataError):
            sink.write_batch("/t", ROWS)
        sink.close()
    assert not [packet for packet in sent if packet[0] >> 4 == PUBREL]
