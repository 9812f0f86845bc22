"""`penstock offsets reset --to`: where the next run begins, and what is refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.epochs import State
from penstock.testing import ForkEngine

PIPELINE = """
connector_name = "moved"
delivery = "exactly-once"
[processing]
[[sources]]
name = "rows"
connector = "generator"
streams = ["orders"]
rows = 50
[[sources]]
name = "polled"
connector = "moving_source:Polled"
[sink]
connector = "files"
path = "lake/{topic}"
"""

SOURCE = '''
from penstock.config import Config
from penstock.source import PollingSource, SourceCheckpoint, SourceEnvelope, SourceRecord


class NoOptions(Config):
    pass


class Polled(PollingSource[NoOptions]):
    """Five messages, once."""

    name = "polled"
    sent = 0

    def schema(self):
        return {}

    def poll_batch(self, max_records):
        if self.sent:
            return None
        self.sent = 5
        return [SourceEnvelope(SourceRecord.from_json("messages", {"id": n})) for n in range(5)]

    def checkpoint(self):
        return SourceCheckpoint(offsets={"sent": self.sent})

    def restore(self, checkpoint):
        self.sent = checkpoint.offsets["sent"]
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None) -> Path:
    (tmp_path / "moving_source.py").write_text(SOURCE)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "pipeline.toml"


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return int(exit.value.code or 0), out, err

    return run


def drain(file: Path) -> supervisor.Summary:
    return supervisor.run(Pipeline.from_toml(file), ForkEngine(1), drain=True)


def newest(file: Path) -> Any:
    return State(file.parent / "state", "moved").peek().newest


def test_a_source_is_read_again_from_a_position_and_the_others_stay(cli: Any, file: Path) -> None:
    assert drain(file).rows_in == 55
    before = newest(file)
    code, out, _ = cli("offsets", "reset", file, "--to", '{"ids": {"orders": 40}}', "--source", "rows", "--dry-run")
    assert code == 0
    assert "orders to row 40" in out
    assert "nothing was changed" in out
    assert newest(file) == before
    assert cli("offsets", "reset", file, "--to", '{"ids": {"orders": 40}}', "--source", "rows", "--yes")[0] == 0
    after = newest(file)
    assert after.incarnation != before.incarnation
    assert after.ranges["polled"].end == before.ranges["polled"].end
    assert drain(file).rows_in == 10
    assert drain(file).rows_in == 0


def test_files_are_read_again_from_the_first_epoch(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "files.toml"
    file.write_text(
        'connector_name = "moved"\n[source]\nconnector = "files"\npath = "in/*.jsonl"\n'
        '[sink]\nconnector = "files"\npath = "lake"\n'
    )
    (tmp_path / "in").mkdir()
    for name, rows in (("a", 2), ("b", 3)):
        (tmp_path / "in" / f"{name}.jsonl").write_text('{"id": 1}\n' * rows)
        assert drain(file).rows_in == rows
    first = State(tmp_path / "state", "moved").peek().load(1)
    assert first is not None
    to = json.dumps(first.ranges["files"].end)
    assert cli("offsets", "reset", file, "--to", "2100-01-01T00:00:00Z", "--dry-run")[0] == 0
    assert cli("offsets", "reset", file, "--to", to, "--yes")[0] == 0
    assert drain(file).rows_in == 3


def test_a_time_is_the_last_epoch_before_it(cli: Any, file: Path) -> None:
    drain(file)
    first = newest(file).ranges["rows"].end
    then = time.time() - 3600
    for manifest in (file.parent / "state" / "epochs").glob("*.json"):
        os.utime(manifest, (then, then))
    file.write_text(PIPELINE.replace("rows = 50", "rows = 80"))
    assert drain(file).rows_in == 30
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(then + 60))
    code, _, err = cli("offsets", "reset", file, "--to", when, "--source", "rows", "--yes")
    assert code == 0, err
    assert newest(file).ranges["rows"].end == first
    assert drain(file).rows_in == 30


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "2026-05-01T00:00:00"], "has no time zone"),
        (["--to", "2026-05-01"], "2026-05-01T00:00:00Z is the time in UTC"),
        (["--to", "1999-05-01T00:00:00Z"], "no epoch of source 'rows' from before 1999"),
        (["--to", "yesterday"], "neither a time nor a position"),
        (["--to", "{}"], "a position is one source's"),
        (["--to", '{"row": 1, "no": 2}', "--source", "polled"], "is no position of this source: no:"),
        (["--to", '{"row": 7}', "--source", "polled"], "the journal holds rows"),
        (["--to", "beginning", "--source", "nobody"], "no source is called 'nobody'"),
        (["--source", "rows"], "--source needs --to"),
    ],
)
def test_what_makes_no_sense_is_refused(cli: Any, file: Path, words: list[str], says: str) -> None:
    drain(file)
    before = newest(file)
    code, _, err = cli("offsets", "reset", file, *words, "--yes")
    assert code != 0
    assert says in err
    assert newest(file) == before


def test_an_epoch_in_hand_is_finished_first(cli: Any, file: Path) -> None:
    code, _, err = cli("offsets", "reset", file, "--to", "beginning", "--yes")
    assert (code, "has committed no epoch yet" in err) == (2, True)
    drain(file)
    state = State(file.parent / "state", "moved")
    state.open()
    assert state.newest is not None
    state.save(state.newest.model_copy(update={"state": "planned"}))
    state.close()
    assert "finishes it first" in cli("offsets", "reset", file, "--to", "beginning", "--yes")[2]


def test_a_dry_run_of_a_whole_reset_changes_nothing(cli: Any, file: Path) -> None:
    drain(file)
    before = newest(file)
    code, out, _ = cli("offsets", "reset", file, "--dry-run")
    assert (code, newest(file)) == (0, before)
    assert "rows, polled from the beginning" in out


def test_what_show_prints_as_json_is_taken(cli: Any, file: Path) -> None:
    drain(file)
    shown = json.loads(cli("offsets", "show", file, "--json")[1])
    position = json.dumps(shown["ranges"]["rows"]["end"])
    assert cli("offsets", "reset", file, "--to", position, "--source", "rows", "--yes")[0] == 0
    assert drain(file).rows_in == 0
