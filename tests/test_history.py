"""The last hours of a pipeline: files of a fixed size that outlive the process and take a torn write."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.runtime.epochs import EpochReport
from penstock.runtime.telemetry import Telemetry
from penstock.runtime.telemetry.history import FIELDS, FINE_SECS, History, Ring, Rings, read_runs
from penstock.runtime.telemetry.parts import Looks
from penstock.runtime.telemetry.schemas import read_schemas


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_ring_keeps_the_newest_and_its_size(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "a.ring", fields=1, slots=10)
    for number in range(25):
        ring.put(number, 100.0 + number, [float(number)])
    assert [values[1] for values in ring.read()] == [float(number) for number in range(15, 25)]
    assert (tmp_path / "a.ring").stat().st_size == 16 + 10 * 24
    assert (tmp_path / "a.ring").stat().st_mode & 0o777 == 0o600


def test_how_earlier_runs_ended_is_kept_and_bounded(tmp_path: Path) -> None:
    for number in range(23):
        telemetry = Telemetry("shop", sources=["orders"], sinks=["lake"])
        telemetry.publish(tmp_path)
        telemetry.close(ValueError(f"run {number} broke") if number == 21 else None)
    runs = read_runs(tmp_path)
    assert (len(runs), runs[0]["state"], runs[0]["reason"], runs[1]["state"]) == (
        20,
        "failed",
        "run 21 broke",
        "stopped",
    )
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "history").iterdir()} == {0o600}
    (tmp_path / "history" / "runs.json").write_text("[{")
    assert read_runs(tmp_path) == []


@pytest.mark.parametrize("cut", [0, 7, 16, 30, 200])
def test_half_a_file_is_read_as_far_as_it_goes_and_written_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.ring"
    ring = Ring(path, fields=1, slots=10)
    for number in range(10):
        ring.put(number, 100.0 + number, [float(number)])
    os.truncate(path, cut)
    again = Ring(path, fields=1, slots=10)
    assert len(again.read()) == max(0, cut - 16) // 24
    again.put(3, 200.0, [7.0])
    assert (200.0, 7.0) in again.read()


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    ring = Ring(path, fields=1, slots=4)
    for number in range(4):
        ring.put(number, 100.0 + number, [float(number)])
    data = bytearray(path.read_bytes())
    data[16 + 24 + 20] ^= 0xFF
    path.write_bytes(data)
    assert [values[1] for values in ring.read()] == [0.0, 2.0, 3.0]


def test_samples_hold_what_came_since_the_one_before_and_minutes_add_them_up(tmp_path: Path) -> None:
    clock = Clock()
    total = dict.fromkeys(FIELDS, 0.0)
    history = History(lambda: dict(total), clock)
    history._rings = Rings(tmp_path)
    history._rings.directory.mkdir()
    for rows, lag in ((10, 5.0), (30, math.nan), (60, 3.0)):
        total |= {"rows_in": rows, "lag_rows": lag}
        history.take()
        clock.now += FINE_SECS
    fine, coarse = Rings(tmp_path).fine.read(), Rings(tmp_path).coarse.read()
    assert [values[1] for values in fine] == [10, 20, 30]
    assert [(values[1], values[7]) for values in coarse] == [(60, 5.0)]


def test_of_what_ended_the_hours_before_its_end_are_shown_and_no_earlier_ones(tmp_path: Path) -> None:
    rings, end = Rings(tmp_path), 1_000_000.0  # long ago
    rings.directory.mkdir()
    for place, ago in enumerate((3 * 86_400, 7_300, 7_100, 0)):
        rings.fine.put(place, end - ago, [float(ago)] * len(FIELDS))
        rings.coarse.put(place, end - ago, [float(ago)] * len(FIELDS))
    found = rings.read()
    assert [end - row[0] for row in found["fine"]] == [7_100, 0]
    assert [end - row[0] for row in found["coarse"]] == [7_300, 7_100, 0]


def test_history_and_schemas_survive_a_kill(tmp_path: Path) -> None:
    code = f"""
        import os, signal, time
        from pathlib import Path
        from penstock.runtime.telemetry import Telemetry
        from penstock.runtime.telemetry.parts import Looks
        from penstock.runtime.epochs import EpochReport
        telemetry = Telemetry("killed", sources=["s"], sinks=["t"])
        telemetry.looks = Looks(schemas=lambda: {{"/orders": {{"id": "int64"}}}})
        telemetry.publish(Path({str(tmp_path)!r}))
        telemetry.epoch(EpochReport(7, rows_in={{"s": 5}}, seconds={{"stage": 0.25}}))
        telemetry._history.take()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -signal.SIGKILL
    found = Rings(tmp_path).read()
    assert [row[1:5] for row in found["epochs"]] == [[7, 5, 0, 0]]
    assert found["fine"][-1][1] == 5
    assert read_schemas(tmp_path)["topics"] == {"/orders": {"id": "int64"}}
    after = Telemetry("killed", sources=["s"], sinks=["t"])
    after.looks = Looks(schemas=lambda: {"/orders": {"id": "int64", "note": "string"}})
    after.publish(tmp_path)
    after.epoch(EpochReport(8, rows_in={"s": 2}))
    after.close()
    assert [row[1] for row in Rings(tmp_path).read()["epochs"]] == [7, 8]
    assert [(c["first"], c["added"]) for c in read_schemas(tmp_path)["changes"]] == [
        (True, {"id": "int64"}),
        (False, {"note": "string"}),
    ]


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("in the way")
    telemetry = Telemetry("full", sources=["s"])
    telemetry.publish(tmp_path)
    telemetry.epoch(EpochReport(1))
    telemetry.close()
    assert Rings(tmp_path).read()["epochs"] == []
