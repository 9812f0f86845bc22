"""Messages that a Danube broker drops on the way to a subscription: seen by their offsets, and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube_source import FAST, TOPIC, Streaming, acked, source
from penstock.connectors.danube import gaps, room
from penstock.connectors.danube.gaps import Gaps
from penstock.schema.registry.danube_client import api
from penstock.source import HealthState, SourceContext
from penstock.testing.danube import DanubeBroker
from penstock.testing.danube.clients import PlainProducer
from penstock.testing.processes import wait_until

pytestmark = pytest.mark.xdist_group("danube")


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HELD_SECS", 600.0)


@pytest.fixture
def broker() -> Any:
    with DanubeBroker(**FAST, live_messages=5) as running:
        running.tell("create", topic=TOPIC)
        yield running


def send(broker: DanubeBroker, *numbers: int) -> None:
    with PlainProducer(broker.url, TOPIC) as producer:
        for number in numbers:
            producer.send(str(number).encode())


def places(*offsets: int) -> list[Any]:
    return [api.MsgID(topic_name=TOPIC, topic_offset=offset) for offset in offsets]


def test_what_a_broker_drops_while_the_journal_is_full_is_counted_and_said(
    broker: DanubeBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Streaming(broker, source(broker), TOPIC) as run:
        send(broker, *range(40))  # ten are on their way, five are kept
        assert run.wait(10) == [str(number).encode() for number in range(10)]
        assert run.source.health_check().state is HealthState.HEALTHY
        assert run.wait(15, durable=True)[10:] == [str(number).encode() for number in range(35, 40)]
        assert run.source.metrics().custom["skipped_total"] == 25
        health = run.source.health_check()
        assert health.state is HealthState.DEGRADED
        assert "25 messages of /default/events never came: after 9 the broker sent 35" in health.reason
        assert "25 messages of /default/events never came" in caplog.text
        monkeypatch.setattr(gaps, "SHOWN_SECS", 0.0)
        assert run.source.health_check().state is HealthState.HEALTHY


def test_what_a_broker_drops_while_the_pipeline_is_away_is_said_at_its_return(
    broker: DanubeBroker, tmp_path: Path
) -> None:
    context = SourceContext(tmp_path / "state", pipeline="orders")
    with Streaming(broker, source(broker), TOPIC, context=context) as run:
        send(broker, *range(3))
        run.wait(3, durable=True)
        wait_until(lambda: run.sender.make_durable() or acked(broker, TOPIC) == 3, "the acknowledgements")
    send(broker, *range(3, 20))
    with Streaming(broker, source(broker), context=context) as run:
        assert run.wait(5, durable=True) == [str(number).encode() for number in range(15, 20)]
        assert run.source.metrics().custom["skipped_total"] == 12


def test_a_broker_that_was_restarted_meanwhile_is_noticed(
    broker: DanubeBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = SourceContext(tmp_path / "state", pipeline="orders")
    for restarted in (False, False, True):
        if restarted:
            broker.restart()
        with Streaming(broker, source(broker), TOPIC, context=context) as run:
            wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "its stream")
        assert ("/default/events: the broker has forgotten the consumer" in caplog.text) == restarted


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
def test_offsets_that_others_took_are_no_loss(broker: DanubeBroker, kind: str) -> None:
    with Streaming(broker, source(broker, subscription_type=kind), TOPIC) as run:
        wait_until(lambda: run.source.health_check().state is HealthState.HEALTHY, "its stream")
        send(broker, *range(40))
        run.wait(1, durable=True)
        wait_until(lambda: run.sender.make_durable() or run.sender.rows[TOPIC][-1] == b"39", "the last one")
        assert run.source.metrics().custom["skipped_total"] == 0


def test_redeliveries_and_offsets_that_begin_again_are_no_gaps(tmp_path: Path) -> None:
    found = Gaps(tmp_path / "notes", "broker penstock")
    found.begin()
    said = [found.look(place) for place in places(7, 8, 9, 7, 10, 8, 11, 0, 1, 4, 12)]
    assert (found.skipped, [each for each in said if each], found.last) == (0, [], "")
    assert "3 messages" in (found.look(places(16)[0]) or "")
    found.end()
    again = Gaps(tmp_path / "notes", "broker penstock")
    again.begin()
    assert [again.look(place) for place in places(15, 16, 17)] == [None] * 3
    assert (tmp_path / "notes" / "offsets.json").exists() is False, "after a kill it would be older than what was read"
    again.end()
    other = Gaps(tmp_path / "notes", "broker another")
    other.begin()
    assert other.look(places(500)[0]) is None


def test_notes_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    (tmp_path / "offsets.json").write_text("[")
    found = Gaps(tmp_path, "broker penstock")
    found.begin()
    assert found.look(places(3)[0]) is None
