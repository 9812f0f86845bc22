"""What a start waits for is shown wherever one looks: live view, status, health, log and console."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from console_pipeline import until
from penstock import web
from penstock.cli.view import panel
from penstock.errors import RetryableError
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.telemetry import Telemetry, judge, read_status, ready
from penstock.tables import TableState
from penstock.testing import ForkEngine
from test_cli import text_of

FILE = """
connector_name = "slow"
[processing]
state_dir = "state"
max_backoff_ms = 200
max_retries = 1000
[source]
connector = "generator"
rows = 3
[sink]
connector = "files"
path = "lake/{topic}"
"""


class SlowEngine(ForkEngine):
    """An engine that starts when it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.may_start = threading.Event()

    def start(self) -> None:
        assert self.may_start.wait(60)
        super().start()


def test_a_start_names_what_it_waits_for_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    (tmp_path / "p.toml").write_text(FILE)
    pipeline = Pipeline.from_toml(tmp_path / "p.toml")
    telemetry, engine = Telemetry.of(pipeline), SlowEngine()
    may_open, (sink,) = threading.Event(), pipeline.sinks.values()
    opening = type(sink).open

    def slowly(self: Any, *given: Any) -> None:
        if not may_open.is_set():
            raise RetryableError("the server is starting up", code="PEN-2007", hint="it is tried again")
        opening(self, *given)

    monkeypatch.setattr(type(sink), "open", slowly)
    thread = threading.Thread(
        target=supervisor.run, args=[pipeline, engine], kwargs={"drain": True, "telemetry": telemetry}
    )
    thread.start()
    waits = lambda: {each["for"] for each in telemetry.status()["waits"]}  # noqa: E731
    until(lambda: waits() == {"Spark to start", "sink files to open"} and telemetry.status()["retries"])
    shown = text_of(panel(telemetry.status(), 100))
    assert "starting; waits for" in shown
    assert "Spark to start" in shown
    assert "sink files to open" in shown
    assert "the server is starting up" in shown, "and why it takes so long"
    assert "waits for" in ready(telemetry.status()).reason
    until(lambda: {each["for"] for each in (read_status(tmp_path / "state") or {}).get("waits", ())} == waits())
    may_open.set()
    until(lambda: waits() == {"Spark to start"})
    engine.may_start.set()
    thread.join(60)
    assert not thread.is_alive()
    telemetry.close()
    status = telemetry.status()
    assert (status["waits"], status["rows"]["out"]) == ([], 3)
    assert "waiting for Spark to start" in caplog.text
    assert "waiting for sink files to open" in caplog.text


def test_a_start_that_hangs_says_for_what() -> None:
    now = [0.0]
    telemetry = Telemetry("p", health_timeout_secs=10, clock=lambda: now[0])
    with telemetry.waits.until("source db to open"):
        now[0] = 30.0
        verdict = judge(telemetry.status())
        assert not verdict.ok
        assert "starting for 30 s: waits for source db to open" in verdict.reason
    assert telemetry.status()["waits"] == []


def test_the_first_copy_is_named_before_there_is_an_epoch() -> None:
    telemetry = Telemetry("p", sources=["db"])
    telemetry.state("pipeline", supervisor.HealthStatus.healthy())
    telemetry.tables("db", {"public.a": TableState("seeding"), "public.b": TableState("seeding")})
    assert "waiting for the first copy of 2 tables" in text_of(panel(telemetry.status(), 100))


def test_the_console_can_be_asked_while_it_starts(tmp_path: Path) -> None:
    import json
    import urllib.request

    (tmp_path / "p.toml").write_text(FILE.replace("[source]", "metrics_port = 0\n[source]"))
    pipeline = Pipeline.from_toml(tmp_path / "p.toml")
    telemetry, engine = Telemetry.of(pipeline), SlowEngine()
    given = {"drain": True, "telemetry": telemetry, "serve": web.serve}
    thread = threading.Thread(target=supervisor.run, args=[pipeline, engine], kwargs=given)
    thread.start()
    until(lambda: telemetry.url and telemetry.status()["waits"])
    with urllib.request.urlopen(f"{telemetry.url}/api/status") as answer:
        assert [each["for"] for each in json.load(answer)["waits"]] == ["Spark to start"]
    engine.may_start.set()
    thread.join(60)
    telemetry.close()
