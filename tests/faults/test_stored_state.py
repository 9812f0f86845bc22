"""A pipeline whose state is in an object store: its driver is killed, its directory is gone, and it goes on elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.connectors.files.sink import read_published
from thorough import few

POLLED = '''
"""Numbers as messages, of a source that is polled, and told what is durable."""

from pathlib import Path

from penstock.config import Config
from penstock.source import PollingSource, SourceCheckpoint, SourceEnvelope, SourceRecord


class NumbersConfig(Config):
    count: int
    told: str


class Numbers(PollingSource[NumbersConfig]):
    name = "numbers"
    at = 0

    def schema(self):
        return {}

    def poll_batch(self, max_records):
        numbers = range(self.at, min(self.at + 50, self.config.count))
        self.at += len(numbers)
        return [SourceEnvelope(SourceRecord.from_json("n", {"id": n})) for n in numbers] or None

    def checkpoint(self):
        return SourceCheckpoint(offsets={"at": self.at})

    def restore(self, checkpoint):
        self.at = checkpoint.offsets["at"]

    def commit(self, offsets):
        told = Path(self.config.told)
        assert not told.exists() or int(told.read_text()) <= offsets["at"], "rows that were durable are gone"
        told.write_text(str(offsets["at"]))
'''

PIPELINE = """
connector_name = "stored"
delivery = "exactly-once"

[processing]
state_dir = "{where}"
state_options = {options}
max_epoch_rows = 100
epoch_interval_ms = 0
max_retries = 0

[[sources]]
name = "polled"
connector = "my_numbers:Numbers"
count = {rows}
told = "{told}"

[[sources]]
name = "made"
connector = "generator"
rows = {rows}
columns = ["id"]

[[schemas]]
topic = "/polled"
schema_type = "json"

[[routes]]
source = "polled"
to = "/polled"

[[routes]]
source = "made"
to = "/made"

[sink]
connector = "files"
path = "{lake}/{{topic}}"
"""


RUN = """
import sys
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.epochs import replica
from penstock.testing.engine import ForkEngine

replica.LEASE_SECS = 0.5
supervisor.run(Pipeline.from_toml("pipeline.toml"), ForkEngine(2), drain=True)
"""


def run(home: Path, text: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    """Start in a directory that is new, as on another machine."""
    home.mkdir()
    (home / "my_numbers.py").write_text(POLLED)
    (home / "pipeline.toml").write_text(text)
    own = {**os.environ, **({"PENSTOCK_FAILPOINT": failpoint} if failpoint else {})}
    return subprocess.run([sys.executable, "-c", RUN], env=own, capture_output=True, text=True, cwd=home)


STEPS = [
    "journal.told", "plan.after", "journal.index", "stage.after", "prepare.after", "commit.before", "commit.after",
    "committed.after",
]  # fmt: skip


@pytest.mark.timeout(240)
def test_a_driver_that_is_killed_at_any_step_is_followed_on_another_machine(s3: Any, tmp_path: Path) -> None:
    options = ", ".join(f"{name} = {toml(value)}" for name, value in s3.options().items())
    lake, told = tmp_path / "lake", tmp_path / "told"
    where, rows = f"{s3.bucket()}/state", 0

    def more() -> str:
        return PIPELINE.format(where=where, options=f"{{ {options} }}", lake=lake, told=told, rows=rows)

    for number, step in enumerate(few(STEPS)):
        rows += 150
        killed = run(tmp_path / f"machine-{number}", more(), f"{step}=kill@{1 if number else 2}")
        assert killed.returncode == -signal.SIGKILL, f"{step}: {killed.stderr[-3000:]}"
    done = run(tmp_path / "last", more())
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(read_published(lake / "polled")["id"].to_pylist()) == list(range(rows))
    assert sorted(read_published(lake / "made")["id"].to_pylist()) == list(range(rows))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'{name} = "{text}"' for name, text in value.items()) + " }"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
