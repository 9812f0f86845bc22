"""A webhook pipeline that is killed under load: every 200 is in the target, once; what the senders noted is the oracle."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from connectors.pushed import Senders, free_port, running
from penstock.connectors.files.sink import read_published
from penstock.testing.processes import wait_until


def pipeline(directory: Path, port: int, dedupe: bool = True) -> Path:
    file = directory / "pipeline.toml"
    file.write_text(f"""
connector_name = "events"
delivery = "exactly-once"
[processing]
epoch_interval_ms = 50
[source]
connector = "webhook"
port = {port}
auth = {{ type = "none" }}
[[source.endpoints]]
path = "/events"
stream = "events"
{'dedupe = { header = "X-Delivery" }' if dedupe else ""}
[[schemas]]
topic = "/events"
schema_type = "json"
[sink]
connector = "files"
path = "lake/{{topic}}"
""")
    return file


def stored(directory: Path) -> Counter[int]:
    path = directory / "lake" / "events"
    rows = read_published(path) if path.exists() else None
    return Counter(rows["id"].to_pylist() if rows is not None and rows.num_rows else [])


def all_arrive(directory: Path, senders: Senders) -> None:
    wait_until(lambda: stored(directory).keys() >= senders.acknowledged, "all that was acknowledged")


KILLS = ("journal.data=kill@4", "journal.index=kill@3", "prepare.after=kill@2", "journal.told=kill@5")


def test_every_200_is_in_the_target_once_whatever_step_it_is_killed_at(tmp_path):
    port = free_port()
    with running(pipeline(tmp_path, port), port) as runner, Senders(port) as senders:
        for point in KILLS:
            runner.start(point)
            runner.wait_for_kill()
        runner.start()
        seen = len(senders.acknowledged)
        wait_until(lambda: len(senders.acknowledged) > seen + 50, "senders to go on")
        senders.finish()
        all_arrive(tmp_path, senders)
        runner.stop()
    found = stored(tmp_path)
    assert set(found.values()) == {1}, "an event is there twice"
    assert found.keys() == senders.acknowledged
    assert senders.unclear, "no request was cut off: the kills hit nothing"


@pytest.mark.soak
def test_random_kills_under_load_and_only_what_got_no_answer_can_be_there_twice(tmp_path):
    port, chance = free_port(), random.Random(7)
    with running(pipeline(tmp_path, port, dedupe=False), port) as runner, Senders(port, batch=5) as senders:
        for _ in range(3):
            runner.start()
            goal = len(senders.acknowledged) + chance.randrange(20, 200)
            wait_until(lambda: len(senders.acknowledged) > goal, "some to be acknowledged")  # noqa: B023
            runner.kill()
        runner.start()
        senders.finish()
        all_arrive(tmp_path, senders)
        runner.stop()
    found = stored(tmp_path)
    assert found.keys() >= senders.acknowledged
    assert {id for id, count in found.items() if count > 1} <= senders.unclear


def test_a_stop_under_load_answers_what_is_stored(tmp_path):
    port = free_port()
    with running(pipeline(tmp_path, port, dedupe=False), port) as runner, Senders(port, threads=4) as senders:
        runner.start()
        wait_until(lambda: len(senders.acknowledged) > 50, "some to be acknowledged")
        runner.stop()
        runner.start()
        senders.finish()
        all_arrive(tmp_path, senders)
        runner.stop()
    found = stored(tmp_path)
    assert found.keys() >= senders.acknowledged
    assert {id for id, count in found.items() if count > 1} <= senders.unclear
