"""A small pipeline that never ends, with tables, messages and dead letters: what the console is tested with."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from penstock import web
from penstock.config import Config
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.telemetry import Telemetry
from penstock.source import Offset, PollingSource, SourceCheckpoint, SourceEnvelope, SourceRecord
from penstock.testing import ForkEngine
from penstock.testing.database import MemoryDatabase
from penstock.testing.engine import Zygote

TOKEN = "s3cret-console-token"

PIPELINE = """
connector_name = "shop"
delivery = "exactly-once"

[processing]
state_dir = "state"
metrics_port = 0
on_error = "dead_letter"
lag_interval_secs = 1
epoch_interval_ms = 250
console_token = {{ env = "CONSOLE_TEST_TOKEN" }}
{processing}

[[sources]]
name = "database"
connector = "penstock.testing.database:MemoryTables"
path = "database"

[[sources]]
name = "sensors"
connector = "console_pipeline:Sensors"
password = "hunter2-in-the-file"

[[schemas]]
topic = "/readings"
schema_type = "json"

[[sinks]]
name = "lake"
connector = "delta"
path = "lake/{{topic}}"
{more}
"""


HOSTILE_LETTER = b'{"<img src=x onerror=window.pwned=1>": "</pre><script>window.pwned=1</script>'
"""A message that is no JSON, and would be HTML."""


class SensorsConfig(Config):
    password: str = ""
    """Not used: the page must not show it."""


class Sensors(PollingSource[SensorsConfig]):
    """A few readings with each poll; one of forty is broken."""

    name = "sensors"

    def __init__(self, config: SensorsConfig) -> None:
        super().__init__(config)
        self.sent = 0

    def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
        time.sleep(0.05)
        found = []
        for _ in range(20):
            self.sent += 1
            body = b'{"device": "d%d", "celsius": 21}' % (self.sent % 7)
            if self.sent % 40 == 0:
                body = HOSTILE_LETTER if self.sent % 80 == 0 else b'{"device": "broken'
            at = int(time.time() * 1000)
            record = SourceRecord("readings", body, timestamp_ms=at)
            found.append(SourceEnvelope.with_offset(record, Offset("readings", self.sent)))
        return found

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"readings": self.sent})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self.sent = int(checkpoint.offsets["readings"])

    def lag(self) -> int | None:
        return 1000 - self.sent % 1000


_ZYGOTES: list[Zygote] = []


def _zygote() -> Zygote:
    """
    A process to fork tasks from, made before there are threads of pipelines and servers here.

    A task that is forked from among them may wait for ever for a lock that one of them held.
    """
    if not _ZYGOTES:
        _ZYGOTES.extend(Zygote() for _ in range(8))
    return _ZYGOTES.pop()


class Running:
    """The pipeline in a thread of this process, with its console."""

    def __init__(self, directory: Path, more: str = "", prepared: bool = True, processing: str = "") -> None:
        self.directory = directory
        self.file = directory / "pipeline.toml"
        if prepared:
            (directory / "database").mkdir(exist_ok=True)
            self.file.write_text(PIPELINE.format(more=more, processing=processing))
            database = MemoryDatabase(directory / "database")
            for table in ("public.customers", "public.orders"):
                for number in range(30):
                    database.put(table, number, f"row {number}")
        self.database = MemoryDatabase(directory / "database")
        self.pipeline = Pipeline.from_toml(self.file)
        self.telemetry = Telemetry.of(self.pipeline)
        self.stop = threading.Event()
        self.engine = ForkEngine(1, zygote=_zygote())
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            supervisor.run(self.pipeline, self.engine, telemetry=self.telemetry, stop=self.stop, serve=web.serve)
            self.telemetry.close()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            self.error = error
            self.telemetry.close(error)

    @property
    def url(self) -> str:
        until(lambda: self.telemetry.url is not None or self.error is not None)
        if self.error is not None:
            raise self.error
        return str(self.telemetry.url)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


def until(condition: object, seconds: float = 90.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.05)
