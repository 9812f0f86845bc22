"""What a pipeline costs while nothing happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PIPELINE = """
connector_name = "idle"
delivery = "exactly-once"

[source]
connector = "generator"
rows = 100

[sink]
connector = "files"
path = "lake"
"""


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_an_idle_pipeline_uses_less_than_a_twentieth_of_a_core_and_ends_well_when_told(tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    command = [sys.executable, "-m", "penstock", "run", str(tmp_path / "pipeline.toml"), "--master", "local[2]"]
    with open(tmp_path / "log", "wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        give_up = time.monotonic() + 90
        while not list((tmp_path / "lake").glob("*.parquet")):
            assert run.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < give_up
            time.sleep(0.05)
        time.sleep(5)  # the JVM compiles and collects for a while after its first job
        before, began = cpu_secs(run.pid), time.monotonic()
        time.sleep(60 if os.environ.get("CI") else 20)
        used = (cpu_secs(run.pid) - before) / (time.monotonic() - began)
        assert used < 0.05, f"{used:.1%} of a core"
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()


def cpu_secs(pid: int) -> float:
    """CPU time of a process and all below it."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)
