"""Kill runs that poll an API or send messages: nothing is lost, and what comes twice is known by its key."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brokers import peer
from connectors.receiver import Asked, receiving
from penstock import failpoints
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine
from penstock.testing.engine import Forked
from penstock.testing.mosquitto import Mosquitto, is_installed
from penstock.testing.processes import wait_until
from push_runs import Pushed, await_kill
from thorough import THOROUGH


@pytest.mark.parametrize(
    "steps",
    [
        ("journal.data=kill@2", "journal.data=kill@3"),
        ("journal.index=kill@2", "journal.told=kill@3"),
        ("commit.after=kill", "journal.index=kill"),
    ],
    ids=["data", "index", "commit"],
)
def test_a_killed_poll_goes_on_where_the_journal_ends(steps: tuple[str, str], tmp_path: Path) -> None:
    records = [{"id": id, "at": id // 10} for id in range(300)]  # ten share a value

    def answer(asked: Asked) -> Any:
        since, at = int(asked.query.get("since", 0)), int(asked.query["offset"])
        return 200, [each for each in records if each["at"] >= since][at : at + 25]

    with receiving(answer) as api:
        run = Pushed(
            tmp_path,
            f'connector = "http_poll"\nurl = "{api.url}"\nstream = "records"\nkey = ["id"]\ninterval_secs = 0.05\n'
            'pagination = { type = "offset", size = 25 }\nincremental = { path = "at" }\n',
        )
        for step in steps:
            await_kill(run.start(step))
            records += [{"id": id, "at": id // 10} for id in range(len(records), len(records) + 50)]
        run.drain()
    assert run.ids() == Counter(range(400))


# -- message sinks ----------------------------------------------------------------------------------------------------------

ROWS = 60

OUT = """
connector_name = "out"
[processing]
state_dir = "{path}/state"
retry_backoff_ms = 50
[source]
connector = "generator"
rows = {rows}
columns = ["id", "code"]
[sink]
{sink}
"""

SINK_STEPS = ["stage.middle", "stage.task", "prepare.after"]


def killed_and_drained(path: Path, sink: str, steps: list[str]) -> None:
    """Run a pipeline of rows into a sink: killed at each step, and then to its end."""
    file = path / "pipeline.toml"
    file.write_text(OUT.format(path=path, rows=ROWS, sink=sink))

    def run(step: str | None) -> Forked[Any]:
        def go() -> None:
            failpoints.arm(step and f"{step}=kill")
            supervisor.run(Pipeline.from_toml(file), ForkEngine(1, die_with_task=True), drain=True)

        return Forked(go)

    for step in steps:
        await_kill(run(step))
    run(None).result()


def test_a_receiver_that_drops_known_keys_has_each_row_once_after_kills(tmp_path: Path) -> None:
    with receiving() as api:
        killed_and_drained(tmp_path, f'connector = "http"\nurl = "{api.url}/rows"', SINK_STEPS)
        bodies = [(asked.headers["idempotency-key"], asked.json["id"]) for asked in api.asked]
    assert len(bodies) > ROWS, "an epoch was sent again"
    assert len(dict(bodies)) == len(set(bodies)) == ROWS, "a key is that of one row, and a row has one key"
    assert {id for _, id in bodies} == set(range(ROWS))


@pytest.mark.parametrize("qos", [1, 2] if THOROUGH else [2])
def test_rows_reach_a_broker_at_least_once_after_kills(
    qos: int, tmp_path: Path, need: Callable[[bool, str], None]
) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    with Mosquitto() as broker, peer(broker) as listener:
        listener.listen("out/#")
        sink = f'connector = "mqtt"\nurl = "{broker.url}"\ntopic = "out/{{id}}"\nqos = {qos}'
        killed_and_drained(tmp_path, sink, SINK_STEPS)
        wait_until(lambda: len(set(listener.payloads())) >= ROWS, "all rows")
        found = Counter(json.loads(payload)["id"] for payload in listener.payloads())
    assert found.keys() == set(range(ROWS))
    assert max(found.values()) <= len(SINK_STEPS) + 1, "each try sends a row once"
