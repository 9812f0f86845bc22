"""A pipeline from a source that pushes into the kit's sink, in a process that is killed at will."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from penstock import failpoints
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine
from penstock.testing.engine import Forked, Killed
from penstock.testing.memory import MemorySink, MemorySinkConfig
from penstock.testing.processes import wait_until

PIPELINE = """
connector_name = "pushed"
delivery = "exactly-once"

[processing]
retry_backoff_ms = 50
max_backoff_ms = 200
{processing}

[source]
{source}

[[routes]]
to = "/all"

[sink]
connector = "penstock.testing.memory:MemorySink"
path = "target"
"""


class Pushed:
    """`start` and `drain` run it, each in a process of its own; `ids` is what has arrived."""

    def __init__(self, path: Path, source: str, processing: str = "") -> None:
        self.path = path
        self.file = path / "pipeline.toml"
        self.file.write_text(PIPELINE.format(source=source, processing=processing))

    def start(self, failpoint: str | None = None) -> Forked[None]:
        """Begin a run that goes on until it is killed."""
        return Forked(lambda: self._run(failpoint, drain=False))

    def drain(self, failpoint: str | None = None) -> None:
        """Run until all that is there is committed."""
        Forked(lambda: self._run(failpoint, drain=True)).result()

    def rows(self) -> list[dict[str, Any]]:
        sink = MemorySink(MemorySinkConfig(path=self.path / "target"))
        return list(sink.visible("/all")) if (self.path / "target").exists() else []

    def payloads(self) -> list[bytes]:
        return [row["payload"] for row in self.rows()]

    def ids(self) -> Counter[int]:
        """How often each `{"id": …}` has arrived."""
        return Counter(json.loads(payload)["id"] for payload in self.payloads())

    def await_ids(self, count: int) -> None:
        wait_until(lambda: len(self.ids()) >= count, f"{count} messages to arrive")

    def _run(self, failpoint: str | None, drain: bool) -> None:
        os.fsync = lambda fd: None  # SIGKILL leaves the page cache
        failpoints.arm(failpoint)
        supervisor.run(Pipeline.from_toml(self.file), ForkEngine(1, die_with_task=True), drain=drain)


def await_kill(run: Forked[Any]) -> None:
    """Wait until the run's failpoint has killed it."""
    try:
        run.result()
    except Killed:
        return
    raise AssertionError("the run ended by itself")
