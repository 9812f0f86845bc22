"""Dead letters in a sink of the file: shown, replayed once and dropped, wherever they can be read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock import cli
from penstock.errors import ConfigError
from penstock.pipeline import Pipeline, checks
from penstock.runtime import supervisor
from penstock.runtime.commands import letters_asked
from penstock.runtime.messages import replay
from penstock.runtime.messages.letters import LETTERS
from penstock.runtime.messages.replay import Replay, ReplayConfig, Replayed, Step
from penstock.testing import ForkEngine

pytestmark = pytest.mark.processes

STORES = {
    "delta": 'connector = "delta"\npath = "letters/{topic}"\n',
    "iceberg": 'connector = "iceberg"\npath = "letters/{topic}"\n',
    "parquet": 'connector = "files"\npath = "letters/{topic}"\n',
    "jsonl": 'connector = "files"\npath = "letters/{topic}"\nformat = "jsonl"\n',
    "postgres": 'connector = "postgres"\ndsn = "DSN"\ntable = "TABLE"\n',
}
PIPELINE = """
connector_name = "named"
delivery = "exactly-once"

[processing]
on_error = "dead_letter"
max_error_rate = 1.0
dead_letter_sink = "letters"

[[schemas]]
topic = "/a"
schema_type = "number"
type = "TYPE"

[source]
connector = "test_messages:Listed"
path = "in.jsonl"

[[routes]]
to = "/a"
sinks = ["lake"]

[[sinks]]
name = "lake"
connector = "delta"
path = "lake/{topic}"

[[sinks]]
name = "letters"
STORE
"""


class Named:
    """A pipeline whose letters go to a sink of its own."""

    def __init__(self, path: Path, store: str, dsn: str = "") -> None:
        self.path, self.file = path, path / "pipeline.toml"
        self.store = store.replace("DSN", dsn).replace("TABLE", f"l{uuid4().hex[:10]}")
        self.write("int64")

    def write(self, kind: str) -> None:
        self.file.write_text(PIPELINE.replace("STORE", self.store).replace("TYPE", kind))

    def put(self, *payloads: str) -> None:
        with open(self.path / "in.jsonl", "a") as file:
            file.writelines(json.dumps(["s", "k", payload]) + "\n" for payload in payloads)

    def run(self) -> None:
        supervisor.run(Pipeline.from_toml(self.file), ForkEngine(2), drain=True)

    def rows(self) -> list[Any]:
        return sorted(DeltaTable(self.path / "lake" / "a").to_pyarrow_table().column("value").to_pylist())

    def dlq(self, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["dlq", words[0], str(self.file), *words[1:]])
        assert ended.value.code == 0
        return capsys.readouterr().out

    def letters(self, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.dlq(capsys, "show", "--json"))
        return found


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Named:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    dsn = request.getfixturevalue("server").dsn if request.param == "postgres" else ""
    if request.param == "default":
        found = Named(tmp_path, STORES["delta"])
        found.file.write_text(found.file.read_text().replace('dead_letter_sink = "letters"\n', ""))
        return found
    return Named(tmp_path, STORES[request.param], dsn)


@pytest.mark.parametrize("named", STORES, indirect=True)
def test_letters_are_shown_replayed_once_and_dropped(named: Named, capsys: pytest.CaptureFixture[str]) -> None:
    named.put("1", "2.5", "x", "3")
    named.run()
    found = named.letters(capsys)
    assert sorted(each["payload"] for each in found) == ["2.5", "x"]
    assert {(each["key"], each["attributes"]["site"], each["offset"]["partition"]) for each in found} == {
        ("k", "north", "p0")
    }
    assert not (named.path / "state" / "dead_letters").exists()
    named.write("double")
    named.dlq(capsys, "replay")
    named.run()
    assert [(each["payload"], each["attempt"]) for each in named.letters(capsys)] == [("x", 2)]
    named.dlq(capsys, "replay")
    named.run()
    named.run()
    assert [(each["payload"], each["attempt"]) for each in named.letters(capsys)] == [("x", 3)]
    named.dlq(capsys, "drop")
    named.run()
    assert named.letters(capsys) == []
    named.put("4")
    named.run()
    assert named.rows() == [1.0, 2.5, 3.0, 4.0]


@pytest.mark.parametrize("named", [*STORES, "default"], indirect=True)
def test_letters_of_a_key_come_back_in_the_order_in_which_they_came(named: Named) -> None:
    schema = json.dumps({"type": "object", "properties": {"id": {"type": "integer"}, "v": {"type": "integer"}}})
    strict = schema.replace('"v": {"type": "integer"', '"v": {"type": "integer", "maximum": 0')
    text = named.file.read_text().replace('schema_type = "number"\ntype = "int64"', SCHEMA)
    named.file.write_text(text.replace('path = "lake/{topic}"', 'path = "lake/{topic}"\nmode = "upsert"'))
    (named.path / "s.json").write_text(strict)
    for first in range(1, 12, 5):
        named.put(*(json.dumps({"id": 1, "v": v}) for v in range(first, first + 5)))
        named.run()
    (named.path / "s.json").write_text(schema)
    pipeline = Pipeline.from_toml(named.file)
    letters_asked(pipeline, "replay", {}, "test")
    named.run()
    assert DeltaTable(named.path / "lake" / "a").to_pyarrow_table().to_pylist() == [{"id": 1, "v": 15}]


def letters_of(epochs: Sequence[int], reason: str) -> pa.Table:
    same = {
        "kind": "message",
        "source": "s",
        "stream": "s",
        "topic": "/a",
        "code": "PEN-3001",
        "rule": "r",
        "attempt": 1,
    }
    rows = [
        {**same, "reason": f"{reason}{at}", "incarnation": "x", "epoch": epoch, "failed_at": datetime.now(UTC)}
        for at, epoch in enumerate(epochs)
    ]
    return pa.Table.from_pylist(rows, schema=LETTERS)


def test_letters_come_back_in_the_order_of_their_epochs_after_upkeep_has_joined_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "WINDOW_ROWS", 10)
    for reason, epochs in (
        ("joined", [9, 9, 8, 8, 7, 5, 4, 3, 3, 1]),
        ("large", [6] * 25),
        ("after", [10, 10]),
        ("beside", [10]),
        ("last", [11]),
    ):
        write_deltalake(tmp_path, letters_of(epochs, reason), mode="append")
    source = Replay(ReplayConfig(path=tmp_path, incarnation="x"))
    step = Step(verb="replay", incarnation="x", epoch=99)
    splits = source.split(Replayed(), Replayed(steps=(step,)))
    assert [len(each.files) for each in splits] == [2, 1, 1, 1]
    batches = [batch.records for split in splits for batch in source.read(split)]
    found = pa.Table.from_batches(batches)
    assert found["epoch"].to_pylist() == [1, 3, 3, 4, 5, *[6] * 25, 7, 8, 8, 9, 9, 10, 10, 10, 11]
    of_nine = [each for each in found["reason"].to_pylist() if each in ("joined0", "joined1")]
    assert of_nine == ["joined0", "joined1"], "those of an epoch stay as they are"
    assert len(batches) > 5, "not all of them are in memory at once"


SCHEMA = 'schema_type = "json_schema"\nschema_file = "s.json"\nkey = ["id"]'


@pytest.mark.parametrize("named", ["delta"], indirect=True)
def test_letters_of_the_default_store_are_not_lost_when_a_sink_is_named(
    named: Named, capsys: pytest.CaptureFixture[str]
) -> None:
    text = named.file.read_text()
    named.file.write_text(
        text.replace('dead_letter_sink = "letters"', "").replace('sinks = ["lake"]', 'sinks = ["lake"]')
    )
    named.put("1", "2.5")
    named.run()
    named.write("int64")
    named.put("3.5")
    named.run()
    assert sorted(each["payload"] for each in named.letters(capsys)) == ["2.5", "3.5"]
    named.write("double")
    named.dlq(capsys, "replay")
    named.run()
    assert named.letters(capsys) == []
    assert named.rows() == [1.0, 2.5, 3.5]


def test_a_store_that_wants_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    named = Named(tmp_path, STORES["delta"] + 'mode = "upsert"\n')
    with pytest.raises(ConfigError, match="dead letters are rows without a key"):
        Pipeline.from_toml(named.file)


def test_of_a_store_that_cannot_be_read_check_and_dlq_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    named = Named(tmp_path, 'connector = "console"\n')
    named.file.write_text(named.file.read_text().replace("exactly-once", "at-least-once"))
    assert [each for each in checks.notices(Pipeline.from_toml(named.file)) if "cannot be shown or replayed" in each]
    with pytest.raises(SystemExit) as ended:
        cli.main(["dlq", "replay", str(named.file)])
    assert ended.value.code != 0
    assert "cannot be read from here" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["delta"], indirect=True)
def test_a_request_for_letters_of_a_named_sink_waits_for_a_run_that_reads_them(
    named: Named, capsys: pytest.CaptureFixture[str]
) -> None:
    named.put("1", "2.5")
    named.run()
    named.write("double")
    named.dlq(capsys, "replay")
    text = named.file.read_text()
    named.file.write_text(text.replace('dead_letter_sink = "letters"', ""))
    named.put("3")
    named.run()
    assert named.rows() == [1.0, 3.0]
    assert "waits for a run with dead_letter_sink = 'letters'" in named.dlq(capsys, "show")
    named.write("double")
    named.run()
    assert named.rows() == [1.0, 2.5, 3.0]
    assert named.letters(capsys) == []


@pytest.mark.parametrize("named", ["delta"], indirect=True)
def test_a_sink_for_letters_gets_rows_only_from_routes_that_name_it(named: Named) -> None:
    named.file.write_text(named.file.read_text().replace('sinks = ["lake"]', ""))
    named.put("1", "x")
    named.run()
    assert named.rows() == [1]
    assert not (named.path / "letters" / "a").exists()
