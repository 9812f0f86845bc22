"""`init`, `peek`, `logs`, `stop`, `check --json` and `run --log-format json`."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from rich.text import Text

from penstock.cli import main, running, show, states
from penstock.cli.terminal import Terminal, json_text, listing, show_rows
from penstock.cli.view import closing, panel
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.errors import FatalError, RetryableError
from penstock.runtime import supervisor
from penstock.runtime.epochs import EpochReport
from penstock.runtime.job import Bad
from penstock.runtime.messages.box import payload_of
from penstock.runtime.messages.letters import to_ipc
from penstock.runtime.telemetry import Telemetry
from penstock.sink import Epoch, Task, WriteResult
from penstock.source import HealthStatus
from penstock.tables import TableState
from test_cli import PIPELINE, report, text_of


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return int(exit.value.code or 0), out, err

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text(PIPELINE)
    return path


def test_what_init_writes_passes_check(cli: Any, tmp_path: Path) -> None:
    made = tmp_path / "new" / "pipeline.toml"
    options = ["--source", "generator", "--sink", "files", "--set", "sink.path=lake/{topic}", "--set", "source.rows=5"]
    code, out, err = cli("init", made, *options)
    assert code == 0, err
    assert "penstock check" in out
    text = made.read_text()
    assert "rows = 5" in text
    assert "# How many rows each stream has" in text
    made.write_text(text.replace("metrics_port = 8601", "metrics_port = 0"))
    code, out, _ = cli("check", made)
    assert (code, "ready to run" in out) == (0, True)
    assert cli("init", made, *options)[0] == 2, "a file that is there stays"


def test_init_asks_for_what_it_needs(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["generator", "files", "lake/{topic}"])
    monkeypatch.setattr("typer.prompt", lambda text: next(answers))
    code, _, err = cli("init", tmp_path / "asked.toml")
    assert code == 0, err
    assert 'path = "lake/{topic}"' in (tmp_path / "asked.toml").read_text()
    assert cli("init", tmp_path / "b.toml", "--source", "generator", "--sink", "console", "--set", "rows")[0] == 2
    assert cli("init", tmp_path / "b.toml", "--source", "generator", "--sink", "console", "--set", "x.rows=1")[0] == 2


def test_check_as_json_has_every_finding_with_its_fix(cli: Any, file: Path, tmp_path: Path) -> None:
    code, out, _ = cli("check", file, "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    assert {"part", "ok", "what", "fix"} <= set(found["findings"][0])
    assert found["streams"]
    (tmp_path / "state").write_text("in the way")
    code, out, _ = cli("check", file, "--json")
    wrong = [each for each in json.loads(out)["findings"] if not each["ok"]]
    assert code == 1
    assert "PEN-5009" in wrong[0]["what"]
    assert wrong[0]["fix"]


@pytest.mark.parametrize(("key", "named"), [("", "none is named"), ('key = ["ids"]', "ids"), ('key = ["id"]', None)])
def test_check_called_a_sink_ready_whose_rows_have_no_key_to_be_applied_by(
    cli: Any, file: Path, tmp_path: Path, key: str, named: str | None
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"id": 1}\n')
    file.write_text(
        f"""
        connector_name = "keys"
        [source]
        connector = "files"
        path = "in/*.jsonl"
        [sink]
        connector = "delta"
        path = "lake/{{topic}}"
        mode = "upsert"
        {key}
        """
    )
    code, out, _ = cli("check", file, "--json")
    wrong = [each for each in json.loads(out)["findings"] if not each["ok"]]
    assert [code, *(each["what"] for each in wrong)] == (
        [0] if named is None else [1, f"PEN-4002 /files has no key that every row has: {named}"]
    )
    assert all("`key`" in each["fix"] for each in wrong)


def test_a_log_of_json_has_an_object_per_line(cli: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "run", lambda *_, telemetry, **__: telemetry.epoch(report(7)))
    code, _, err = cli("run", file, "--log-format", "json")
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert code == 0
    assert next(line["fields"]["epoch"] for line in lines if "fields" in line) == "7"
    assert cli("run", file, "--log-format", "xml")[0] == 2


def test_verbose_shows_where_an_error_comes_from(file: Path) -> None:
    file.write_text("[[[")
    with pytest.raises(Exception, match="PEN-1001"):
        main(["check", str(file), "--verbose"])


def test_peek_shows_the_first_rows_of_files_and_of_delta_tables(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "lake" / "_penstock").mkdir(parents=True)
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "lake" / "a.parquet")
    code, out, _ = cli("peek", tmp_path / "lake", "--rows", "2", "--json")
    assert (code, [json.loads(line) for line in out.splitlines()]) == (0, [{"id": 1}, {"id": 2}])
    sink = Delta(DeltaConfig(path=str(tmp_path / "delta" / "{topic}")))
    sink.open()
    epoch = Epoch("p", "i", 1)
    sink.begin_epoch(epoch, Task(0))
    sink.write_batch("/orders", pa.record_batch({"id": [7]}))
    receipt = sink.pre_commit(epoch)
    sink.commit_epoch(epoch, [receipt], {})
    epoch = Epoch("p", "i", 2)
    sink.begin_epoch(epoch, Task(0))
    sink.write_batch("/orders", pa.record_batch({"id": [8, 9], "note": ["\x1b[31mred", None]}))
    sink.commit_epoch(epoch, [sink.pre_commit(epoch)], {})
    code, out, _ = cli("peek", tmp_path / "delta" / "orders")
    assert code == 0
    assert "3 rows shown, 2 columns" in out
    assert "\\x1b[31mred" in out
    out = cli("peek", tmp_path / "delta" / "orders", "--rows", "2", "--json")[1]
    assert [json.loads(line)["id"] for line in out.splitlines()] == [7, 8]
    text = (
        'connector_name = "x"\n[source]\nconnector = "generator"\n[sink]\nconnector = "delta"\npath = "delta/{topic}"\n'
    )
    (tmp_path / "p.toml").write_text(text)
    assert cli("peek", "/orders", tmp_path / "p.toml")[0] == 0
    code, _, err = cli("peek", "/nothing", tmp_path / "p.toml")
    assert code == 2
    assert "delta/nothing" in err
    code, _, err = cli("peek", tmp_path / "p.toml")
    assert code == 2
    assert "name a topic as well: penstock peek /orders" in err


def test_peek_prints_a_map_as_an_object_and_an_empty_one_too(cli: Any, tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.map_(pa.int64(), pa.string())))
    rows = pa.table({"m": pa.array([[], [("a", [[(1, "x")], []])], None], kind)})
    pq.write_table(rows, tmp_path / "m.parquet")
    out = cli("peek", tmp_path / "m.parquet", "--json")[1]
    assert [json.loads(line)["m"] for line in out.splitlines()] == [{}, {"a": [{"1": "x"}, {}]}, None]


def test_bytes_are_shown_as_text_or_base64_and_not_as_python_writes_them(cli: Any, tmp_path: Path) -> None:
    rows = pa.record_batch({"_key": [b"sensor-1", b"\xff", None], "s": [{"b": b"x"}, {"b": b""}, {"b": None}]})
    pq.write_table(pa.Table.from_batches([rows]), tmp_path / "b.parquet")
    out = cli("peek", tmp_path / "b.parquet", "--json")[1]
    shown = [json.loads(line) for line in out.splitlines()]
    assert [each["_key"] for each in shown] == ["sensor-1", {"base64": "/w=="}, None]
    assert shown == [payload_of({"kind": "row", "payload": to_ipc(rows.slice(at, 1))}) for at in range(3)]


def test_logs_show_the_last_errors_and_the_end_of_sparks_log(cli: Any, file: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    telemetry = Telemetry("x", sources=["s"])
    telemetry.publish(tmp_path / "state")
    telemetry.retry("source:s", RetryableError("away", code="PEN-2001", hint="start it"), 0.1)
    telemetry.close()
    (tmp_path / "state" / "spark.log").write_text("".join(f"line {n}\n" for n in range(100)))
    code, out, _ = cli("logs", file, "--lines", "3")
    assert code == 0
    assert "PEN-2001 away" in out
    assert "→ start it" in out
    assert out.splitlines()[-3:] == ["line 97", "line 98", "line 99"]


def test_stop_of_a_pipeline_that_does_not_run_says_so(cli: Any, file: Path) -> None:
    code, _, err = cli("stop", file)
    assert code == 1
    assert "does not run" in err


def test_a_plain_log_is_asked_for_by_name(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry("x")
    with running.shown(telemetry, "info", "text") as view:
        assert view is None


def test_the_view_shows_copies_with_their_end_and_letters_by_code() -> None:
    now = [100.0]
    telemetry = Telemetry("x", sources=["database"], sinks=["out"], clock=lambda: now[0])
    copying = {"public.orders": TableState("seeding", rows=0, estimate=1000, copy=1)}
    telemetry.tables("database", copying)
    now[0] += 10
    telemetry.tables("database", {"public.orders": replace(copying["public.orders"], rows=250)})
    telemetry.epoch(replace(report(1), letters={"/orders": 2}, codes={"PEN-3001": 2}))
    telemetry.lag("database", 12_345_678, "bytes")
    text = text_of(panel(telemetry.status(), 110), 110)
    assert "lag 12.3 MB" in text
    assert "copying" in text
    assert "25%" in text
    assert "██░░░░░░ 0:00:30 left" in text
    assert "PEN-3001 2" in text
    assert "/s · epoch 1" in text
    telemetry.lag("database", 1234, "rows")
    assert "lag 1,234 rows" in text_of(panel(telemetry.status(), 110), 110)


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 200])
def test_a_terminal_of_any_width_cuts_no_number_of_the_view(width: int) -> None:
    now = [100.0]
    telemetry = Telemetry("x", sources=["generator"], sinks=["out"], clock=lambda: now[0])
    seeding = TableState("seeding", rows=0, estimate=400_000_000, copy=1)
    name = "public.a_table_with_a_rather_long_name"
    telemetry.tables("generator", {name: seeding})
    now[0] += 10
    telemetry.tables("generator", {name: replace(seeding, rows=100_000_000)})
    letters = {"letters": {"/orders": 2}, "codes": {"PEN-3001": 1234}, "oldest": {"generator": time.time()}}
    telemetry.epoch(replace(report(1, rows=123_456_789), **letters))
    lines = text_of(panel(telemetry.status(), width), width).splitlines()
    assert max(map(len, lines)) <= width
    for label in ("in ", "out ", "source ", "sink "):
        assert any(line.startswith(f"│ {label}") and "123,456,789" in line for line in lines), label
    assert any("copying" in line and "100,000,000" in line for line in lines)
    assert any(line.startswith("│ dead letters") for line in lines)
    assert any(" s " in line for line in lines if line.startswith("│ visible"))
    assert width < 100 or any("0:00:30 left" in line for line in lines)


def test_the_view_of_what_has_ended_shows_what_it_did_on_average() -> None:
    now = [100.0]
    telemetry = Telemetry("x", sources=["database"], sinks=["out"], clock=lambda: now[0])
    telemetry.epoch(report(1))
    now[0] += 10
    telemetry.epoch(report(2))
    telemetry.close()
    status = telemetry.status()
    average = status["rows"]["in"] / status["working_secs"]
    assert f"{average:,.0f}/s  on average, while it had work" in text_of(panel(status, 110), 110)


STEERING = ("\x1b", "\x07", "\x9b", "\r", "\x08", "\u202e")
HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b31m\r\x08\u202eevil"


def hostile() -> Telemetry:
    """All that others can put into a status holds what would steer a terminal."""
    telemetry = Telemetry(f"p{HOSTILE}", sources=["s"], sinks=["k"])
    telemetry.state("source:s", HealthStatus.degraded(f"why{HOSTILE}"))
    failed = TableState("failed", code="PEN-4001", error=f"e{HOSTILE}", hint=f"h{HOSTILE}")
    telemetry.tables("s", {f"t{HOSTILE}": failed, f"u{HOSTILE}": TableState("seeding", rows=1, estimate=10)})
    written = {("k", f"/o{HOSTILE}"): WriteResult(1, 10)}
    bad = (Bad("s", "m", "/o", "PEN-3001", "rule", f"r{HOSTILE}"),)
    telemetry.epoch(replace(report(1), rows_out=written, bad=bad))
    telemetry.retry("sink:k", RetryableError(f"away{HOSTILE}"), 1.0)
    return telemetry


def test_names_and_messages_of_others_do_not_steer_the_terminal() -> None:
    telemetry = hostile()
    for end in (None, FatalError(f"the end{HOSTILE}")):
        if end:
            telemetry.close(end)
        for shown in (panel(telemetry.status(), 110), closing(telemetry.status())):
            terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=110)
            terminal.print(shown)
            text = terminal.file.getvalue()  # type: ignore[attr-defined]
            assert "evil" in text
            assert [each for each in STEERING if each in text] == []


def test_errors_logs_and_json_do_not_steer_the_terminal(cli: Any, tmp_path: Path, capfd: Any) -> None:
    show(FatalError(f"no entry{HOSTILE}\nmore{HOSTILE}", hint=f"try{HOSTILE}"))
    log = io.StringIO()
    for handler in (running.plain_handler(log), running.json_handler(log)):
        with running.logging_to(handler, "debug"):
            hostile().message("warning", f"said{HOSTILE}")
    state = tmp_path / "state"
    state.mkdir()
    telemetry = hostile()
    telemetry.publish(state)
    telemetry.close()
    (tmp_path / "p.toml").write_text(MINIMAL)
    for words in (("status",), ("status", "--json"), ("logs",)):
        with pytest.raises(SystemExit):
            main([*words, str(tmp_path / "p.toml")])
    out, err = capfd.readouterr()
    for text in (out, err, log.getvalue()):
        assert "evil" in text
        assert [each for each in STEERING if each in text] == []
    assert json_text({"a": HOSTILE}).isprintable()
    assert json.loads(json_text({"a": HOSTILE})) == {"a": HOSTILE}


MINIMAL = """
connector_name = "x"
[source]
connector = "generator"
[sink]
connector = "console"
"""

MESSAGES = """
connector_name = "messages"
[processing]
[[sources]]
name = "exchange"
connector = "sampled_exchange:Exchange"
[[sources]]
name = "polled"
connector = "sampled_exchange:Polled"
[[sources]]
name = "rows"
connector = "generator"
streams = ["orders"]
[[schemas]]
topic = "/readings"
schema_type = "json"
[[routes]]
from = "orders"
to = "/orders"
sql = "SELECT id FROM input"
[[routes]]
from = "readings"
[[routes]]
from = "polled"
[sink]
connector = "files"
path = "lake/{topic}"
"""

EXCHANGE = """
from penstock.config import Config
from penstock.source import PollingSource, SourceCheckpoint, SourceEnvelope, SourceRecord, StreamingSource

TOLD = []


class NoOptions(Config):
    pass


def message(number, stream="readings"):
    return SourceEnvelope(SourceRecord.from_json(stream, {"id": number}))


class Exchange(StreamingSource[NoOptions]):
    name = "exchange"

    def schema(self):
        return {}

    def start_streaming(self, sender):
        sender.send(SourceEnvelope(SourceRecord("readings", b"{broken")), on_durable=lambda: TOLD.append(0))
        number = 0
        while not sender.stopped:
            number += 1
            sender.send(message(number), on_durable=lambda: TOLD.append(number))


class Polled(PollingSource[NoOptions]):
    name = "polled"

    def schema(self):
        return {}

    def poll_batch(self, max_records):
        return [message(number, "polled") for number in range(max_records)]

    def checkpoint(self):
        return SourceCheckpoint()

    def commit(self, offsets):
        TOLD.append(offsets)
"""


@pytest.fixture
def messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None) -> Path:
    (tmp_path / "sampled_exchange.py").write_text(EXCHANGE)
    (tmp_path / "pipeline.toml").write_text(MESSAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "pipeline.toml"


def test_a_sample_is_read_decoded_and_routed_and_commits_nothing(cli: Any, messages: Path) -> None:
    code, out, _ = cli("check", messages, "--sample", "3", "--json")
    taken = json.loads(out)["sample"]
    topics = {each["topic"]: each["rows"] for each in taken if "topic" in each}
    assert code == 0
    assert topics["/readings"] == [{"id": 1}, {"id": 2}]
    assert len(topics["/orders"]) == 3
    assert [row["payload"] for row in topics["/polled"]] == ["b'{\"id\":0}'", "b'{\"id\":1}'", "b'{\"id\":2}'"]
    assert next(each["bad"][0]["code"] for each in taken if "bad" in each) == "PEN-3001"
    assert sys.modules["sampled_exchange"].TOLD == []
    assert not (messages.parent / "state").exists()
    assert [path for path in messages.parent.glob("lake/**/*") if path.is_file()] == []


def test_a_sample_has_so_many_rows_of_each_of_many_streams(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(MINIMAL.replace('"generator"', '"generator"\nstreams = ["a", "b", "c"]\nrows = 100'))
    taken = json.loads(cli("check", file, "--sample", "2", "--json")[1])["sample"]
    assert [len(each["rows"]) for each in taken] == [2, 2, 2]


def test_a_schema_that_nothing_can_be_decoded_with_is_its_own_fault_and_no_sinks(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('{"type": "array"}')
    (tmp_path / "broken.avsc").write_text("{")
    file = tmp_path / "pipeline.toml"
    entries = "".join(
        f'[[schemas]]\ntopic = "/{kind}"\nschema_type = "{kind}"\nschema_file = "{name}"\n'
        for kind, name in (("json_schema", "list.json"), ("avro", "broken.avsc"))
    )
    source = 'connector = "tcp"\nurl = "tcp://127.0.0.1:0"'
    file.write_text(MINIMAL.replace('connector = "generator"', source) + entries)
    found = json.loads(cli("check", file, "--json")[1])["findings"]
    wrong = [(each["part"], each["what"][:40]) for each in found if not each["ok"]]
    assert wrong == [
        ("registry embedded", "avro: PEN-4031 the avro schema of avro i"),
        ("schemas", "[[schemas]] for /json_schema: PEN-4000 t"),
    ]


def test_a_sample_of_a_file_with_a_bad_line_shows_the_good_ones(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": broken\n{"id": 2}\n')
    file = tmp_path / "pipeline.toml"
    file.write_text(
        'connector_name = "x"\n[source]\nconnector = "files"\npath = "*.jsonl"\n[sink]\nconnector = "console"\n'
    )
    code, out, _ = cli("check", file, "--sample", "3", "--json")
    taken = json.loads(out)["sample"]
    assert code == 0
    assert [each["rows"] for each in taken if "rows" in each] == [[{"id": 1}, {"id": 2}]]
    assert next(each["bad"][0]["code"] for each in taken if "bad" in each) == "PEN-3001"


def test_a_sample_is_a_table_for_people(cli: Any, messages: Path) -> None:
    out = cli("check", messages, "--sample", "2")[1]
    assert "exchange:readings → /readings  1 row" in out
    assert "rows:orders → /orders  2 rows, before its SQL" in out
    assert "✗ readings: PEN-3001" in out
    assert "nothing was acknowledged or committed" in out


def test_no_sample_is_taken_from_the_messages_of_a_running_pipeline(
    cli: Any, messages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.readiness.runs", lambda pipeline: True)
    out = cli("check", messages, "--sample", "2")[1]
    assert "no sample while the pipeline runs" in out
    assert "rows:orders → /orders  2 rows" in out
    assert "/readings  " not in out


def test_columns_are_shown_beside_those_of_the_target(cli: Any, file: Path, messages: Path, tmp_path: Path) -> None:
    code, out, _ = cli("check", messages, "--show-schema", "--json")
    orders = json.loads(out)["topics"]["/orders"]
    assert (code, orders["columns"]["id"]) == (0, {"type": "int64", "files": None})
    out = cli("check", messages, "--show-schema")[1]
    assert "column" in out
    assert "new" in out


@pytest.mark.parametrize("sink", ["delta", "iceberg", "files"])
def test_a_sink_that_refuses_to_open_is_named_by_its_refusal_and_not_by_an_unexpected_failure(
    cli: Any, tmp_path: Path, sink: str
) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(
        'connector_name = "wrong"\n[processing]\nmetrics_port = 0\n[source]\nconnector = "generator"\nrows = 1\n'
        f'[sink]\nconnector = "{sink}"\npath = "elsewhere/{{table}}"\n'
    )
    code, out, err = cli("check", file)
    assert code in (1, 2)
    assert "PEN-5012" not in out + err
    assert "PEN-100" in out + err
    assert "{table}" in out + err


def test_everything_to_fix_is_in_one_table_with_a_fix_for_each(
    cli: Any, file: Path, tmp_path: Path, own_modules: None
) -> None:
    (tmp_path / "state").write_text("in the way")
    (tmp_path / "mute.py").write_text(
        "from penstock.source import Finding\nfrom penstock.connectors.generator import Generator\n"
        "class Mute(Generator):\n    def check(self):\n        return [Finding(False, 'PEN-5001 nobody answers')]\n"
    )
    file.write_text(PIPELINE.replace('connector = "generator"', 'connector = "mute:Mute"\nname = "db"'))
    code, out, _ = cli("check", file)
    table = out.partition("2 to fix")[2]
    assert code == 1
    assert "what to do" in table
    assert "source db" in table
    assert "check that it runs, its address" in table, "a finding without a fix of its own still has one"


def test_nothing_of_a_name_is_taken_for_markup() -> None:
    for width in (40, 100):
        out = io.StringIO()
        row = ("timestamp[us, tz=UTC]", "[red]a[/red]", ":warning:")
        listing(Terminal(file=out, width=width), ("price[eur]", ":smile:", "c"), [row])
        assert all(each in out.getvalue() for each in ("price[eur]", ":smile:", *row))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_rows_that_have_no_room_beside_each_other_stand_below_each_other(width: int) -> None:
    names = [f"column_{number}" for number in range(8)]
    rows = [[Text(f"value {row}.{number}") for number in range(8)] for row in range(3)]
    out = io.StringIO()
    show_rows(names, rows, Terminal(file=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert all(text.count(name) == (1 if width == 200 else 3) for name in names)
    assert all(text.count(f"value {row}.{number}") == 1 for row in range(3) for number in range(8))
    show_rows(names, [], Terminal(file=out, width=width))


def test_tables_in_a_narrow_terminal_keep_their_names_and_reasons_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = TableState(
        "failed", code="PEN-4001", error="a column changed, and the target cannot follow", hint="cast it"
    )
    known = SimpleNamespace(name="shop", requests=[], states={"public.customers": broken})
    monkeypatch.setattr(states, "table_sources", lambda _: [known])
    out = io.StringIO()
    states.show(None, [], Console(width=40, file=out), json=False)  # type: ignore[arg-type]
    assert "public.customers  failed" in out.getvalue()
    assert "…" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 40


@pytest.mark.parametrize("width", [30, 60, 100])
def test_lists_are_cut_in_no_terminal(width: int) -> None:
    name, reason = "incoming_orders_of_the_shop_in_the_north", "why it failed, in some more words than fit into a line"
    out = io.StringIO()
    listing(Console(width=width, file=out), ("source", "code", "reason"), [(name, "PEN-3001", reason), ("b", "", "")])
    shown = out.getvalue()
    assert "…" not in shown
    words = re.sub(r"\s+", "", shown)  # a column of a table may fold a name
    assert name in words
    assert "PEN-3001" in words
    assert all(word in shown for word in reason.split())


def test_the_reason_of_a_bad_record_is_whole_in_a_narrow_terminal() -> None:
    telemetry = Telemetry("orders", sources=["incoming"], sinks=["lake"])
    reason = "/data/of/the/shop/incoming/a.jsonl, line 7: column 'v' is a str, not int64"
    bad = [Bad("incoming", "files", "", "PEN-3001", "source", reason)]
    telemetry.epoch(EpochReport(3, skipped=1, bad=bad))
    out = io.StringIO()
    Console(width=40, file=out).print(panel(telemetry.status(), 40))
    assert reason.replace(" ", "") in re.sub(r"[\s│]+", "", out.getvalue())
    assert max(map(len, out.getvalue().splitlines())) <= 40
