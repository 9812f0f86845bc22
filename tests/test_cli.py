from __future__ import annotations

import importlib.util
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from rich.console import Console

from penstock import __version__
from penstock.cli import app, checking, main, running
from penstock.cli.view import closing, duration, panel, size, sparkline
from penstock.errors import FatalError, RetryableError
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.epochs import EpochReport, Manifest, Range, State
from penstock.runtime.telemetry import STATUS_FILE, Telemetry
from penstock.sink import WriteResult
from penstock.source import HealthStatus
from penstock.tables import TableState

PIPELINE = """
connector_name = "orders"

[processing]
state_dir = "state"

[source]
connector = "generator"
rows = 100
streams = ["orders", "clicks"]

[[sinks]]
name = "out"
connector = "files"
path = "out/{topic}"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture
def cli(capfd):
    """Runs a command; gives its exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return int(exit.value.code or 0), out, err

    return run


def report(number: int, rows: int = 100) -> EpochReport:
    return EpochReport(
        number=number,
        rows_in={"generator": rows},
        rows_out={("out", "/orders"): WriteResult(rows, rows * 10)},
        seconds={"plan": 0.0, "stage": 0.1},
    )


class TestErrors:
    def test_a_wrong_setting_exits_with_2_and_says_where_and_what(self, cli, file):
        file.write_text(PIPELINE.replace("rows = 100", "rowz = 100"))
        code, _, err = cli("check", file)
        assert code == 2
        assert "PEN-1002" in err
        assert "pipeline.toml:9" in err
        assert "did you mean 'rows'?" in err
        assert "Traceback" not in err

    def test_every_error_of_a_file_is_shown_at_once(self, cli, file):
        file.write_text(PIPELINE.replace("rows = 100", 'rows = "many"').replace("state_dir", "state_directory"))
        _, _, err = cli("run", file)
        assert "PEN-1002" in err
        assert "PEN-1003" in err

    def test_debug_shows_where_an_error_comes_from(self, file):
        file.write_text("[[[")
        with pytest.raises(Exception, match="PEN-1001"):
            main(["check", str(file), "--debug"])

    def test_a_file_that_is_not_there_is_named(self, cli, tmp_path):
        code, _, err = cli("run", tmp_path / "none.toml")
        assert code == 2
        assert "none.toml" in err

    def test_no_file_at_all_names_the_variable_that_could_hold_it(self, cli, monkeypatch):
        monkeypatch.delenv("CONNECTOR_CONFIG_PATH", raising=False)
        code, _, err = cli("run")
        assert code == 2
        assert "CONNECTOR_CONFIG_PATH" in err

    def test_the_environment_names_the_file(self, cli, file, monkeypatch):
        monkeypatch.setenv("CONNECTOR_CONFIG_PATH", str(file))
        assert cli("check")[0] == 0
        assert cli("offsets", "show")[0] == 0

    def test_a_failure_exits_with_1_and_its_way_out(self, cli, file, monkeypatch):
        def fail(*_, **__):
            raise FatalError("the target [lake] is gone", code="PEN-5010", hint="make it again")

        monkeypatch.setattr(supervisor, "run", fail)
        code, _, err = cli("run", file)
        assert code == 1
        assert "PEN-5010 the target [lake] is gone" in err
        assert "→ make it again" in err

    def test_an_unexpected_failure_is_no_traceback_either(self, cli, file, monkeypatch):
        monkeypatch.setattr(supervisor, "run", lambda *_, **__: 1 / 0)
        code, _, err = cli("run", file)
        assert code == 1
        assert "PEN-5012 ZeroDivisionError" in err
        assert "--verbose" in err
        assert "Traceback" not in err

    def test_without_java_nothing_is_started(self, cli, file, monkeypatch, tmp_path):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        code, _, err = cli("run", file)
        assert code == 2
        assert "PEN-1014" in err
        assert not (tmp_path / "state").exists()

    def test_a_shell_completes_commands_and_their_words(self):
        def complete(line: str) -> str:
            words = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
            command = [sys.executable, "-c", "from penstock.cli import main; main()"]
            return subprocess.run(
                command, env={**os.environ, **words}, capture_output=True, text=True, check=False
            ).stdout

        assert complete("penstock tab").split() == ["tables"]
        assert complete("penstock offsets re").split() == ["reset", "restage"]
        assert complete("penstock connectors gen").split() == ["generator"]

    def test_the_version_is_told(self, cli):
        assert cli("--version")[:2] == (0, f"penstock {__version__}\n")

    def test_help_waits_for_no_heavy_import(self):
        heavy = "{'pyspark', 'pyarrow', 'pandas', 'prometheus_client'}"
        code = (
            f"import sys, penstock.cli; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestRun:
    def test_each_epoch_is_one_line_and_the_end_is_told(self, cli, file, monkeypatch):
        def work(pipeline, engine, *, telemetry, stop, drain, **_):
            assert drain
            for number in (1, 2, 3):
                telemetry.epoch(report(number))

        monkeypatch.setattr(supervisor, "run", work)
        code, out, err = cli("run", file, "--drain")
        assert code == 0
        assert out == ""
        assert [line.split()[2] for line in err.splitlines() if "epoch=" in line] == ["epoch=1", "epoch=2", "epoch=3"]
        assert err.splitlines()[-1].startswith("stopped · 3 epochs · 300 rows in · 300 rows out")

    def test_the_log_level_of_the_file_holds(self, cli, file, monkeypatch):
        file.write_text(PIPELINE.replace("[processing]", '[processing]\nlog_level = "warning"'))
        monkeypatch.setattr(supervisor, "run", lambda *_, telemetry, **__: telemetry.epoch(report(1)))
        assert "epoch=1" not in cli("run", file)[2]

    def test_options_reach_the_supervisor(self, cli, file, monkeypatch):
        seen = {}
        monkeypatch.setattr(supervisor, "run", lambda pipeline, engine, **options: seen.update(options, engine=engine))
        cli("run", file, "--master", "local[1]", "--lost-state", "resume")
        assert (seen["engine"].master, seen["lost_state"], seen["drain"]) == ("local[1]", "resume", False)
        assert cli("run", file, "--lost-state", "guess")[0] == 2

    def test_the_telemetry_has_ended_when_the_run_has(self, file, monkeypatch):
        monkeypatch.setattr(supervisor, "run", lambda *_, **__: None)
        assert running.run(Pipeline.from_toml(file)).status()["state"] == "stopped"


# A pipeline that commits one epoch, says so, and then waits to be stopped; it lets itself be stopped or not.
WAITING = """
    import sys, threading
    from penstock import __version__
    from penstock.runtime import supervisor
    from penstock.cli import main
    from penstock.runtime.epochs import EpochReport
    from penstock.source import HealthStatus

    def run(pipeline, engine, *, telemetry, stop, **_):
        telemetry.engine("Fake 1.0")
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.epoch(EpochReport(1, {"generator": 4321}))
        print("something a sink prints", flush=True)
        stop.wait()
        if STUBBORN:
            telemetry.message("warning", "will not stop")
            threading.Event().wait()

    supervisor.run = run
    main(["run", sys.argv[1]])
"""


def waiting(file: Path, *, stubborn: bool = False, **options) -> subprocess.Popen[bytes]:
    code = textwrap.dedent(WAITING).replace("STUBBORN", str(stubborn))
    return subprocess.Popen([sys.executable, "-c", code, str(file)], **options)


def read_until(stream, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        line = stream.readline()
        assert line, seen
        seen += line
    return seen


@pytest.mark.processes
class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_the_first_one_finishes_and_exits_with_0(self, file, number):
        process = waiting(file, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        read_until(process.stderr, b"epoch=1")
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert b"finishing the epoch in hand" in err
        assert b"stopped" in err

    def test_a_second_one_aborts(self, file):
        process = waiting(file, stubborn=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        read_until(process.stderr, b"epoch=1")
        process.send_signal(signal.SIGTERM)
        read_until(process.stderr, b"will not stop")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert b"aborted" in err


class Terminal:
    """A process on a terminal of its own, and what it wrote there."""

    def __init__(self, file: Path, *, stubborn: bool = False, columns: int = 100) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "30"}
        self.process = waiting(
            file, stubborn=stubborn, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def read_until(self, text: str) -> None:
        while text not in self.seen:
            ready, _, _ = select.select([self.ours], [], [], 30)
            assert ready, self.seen
            try:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:  # the process has closed its end
                raise AssertionError(f"{text!r} was never written: {self.seen[-2000:]}") from None

    def end(self) -> int:
        try:
            while chunk := os.read(self.ours, 65536):
                self.seen += chunk.decode(errors="replace")
        except OSError:
            pass
        os.close(self.ours)
        return self.process.wait(30)


@pytest.mark.processes
class TestLiveView:
    def test_a_terminal_shows_the_pipeline_and_gets_its_cursor_back(self, file):
        terminal = Terminal(file)
        terminal.read_until("● running")
        terminal.read_until("4,321")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 0
        assert "something a sink prints" in terminal.seen
        assert "epoch=1" not in terminal.seen
        assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l")
        assert "1 epoch · 4,321 rows in" in terminal.seen

    def test_an_abort_gives_the_cursor_back_too(self, file):
        terminal = Terminal(file, stubborn=True)
        terminal.read_until("● running")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.read_until("once more to abort")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 130
        assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l")


def text_of(renderable, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the test)
    console.print(renderable)
    return console.export_text()


class TestView:
    @pytest.fixture
    def telemetry(self) -> Telemetry:
        telemetry = Telemetry("orders", sources=["generator"], sinks=["out"])
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.epoch(report(7, rows=123_456))
        return telemetry

    @pytest.mark.parametrize("width", [30, 46, 72, 100, 200])
    def test_no_line_is_wider_than_the_terminal(self, telemetry, width):
        telemetry.retry("source:generator", RetryableError("a very long story " * 20), 1)
        lines = text_of(panel(telemetry.status(), width), width).splitlines()
        assert max(map(len, lines)) <= width
        assert any("123,456" in line for line in lines)

    @pytest.mark.parametrize("width", [30, 46, 72, 100, 200])
    def test_a_long_reason_does_not_tear_the_figures_apart(self, telemetry, width):
        story = "a very long story " * 40 + "\n  → and what to do about it"
        for component in ("pipeline", "source:generator", "sink:out"):
            telemetry.state(component, HealthStatus.degraded(story))
        lines = text_of(panel(telemetry.status(), width), width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) < 35
        for name in ("source", "sink"):
            (figures,) = [line for line in lines if line.startswith(f"│ {name} ") and "123,456" in line]
            assert "story" not in figures

    def test_the_closing_line_names_tables_that_failed(self, telemetry):
        broken = TableState("failed", code="PEN-4001", error="x")
        telemetry.tables("generator", {f"public.t{number}": broken for number in range(5)})
        telemetry.close()
        assert closing(telemetry.status()).plain.endswith("5 tables failed: public.t0, public.t1, public.t2, …")

    def test_errors_are_shown_as_they_were_written(self, telemetry):
        telemetry.retry("sink:out", RetryableError("bucket [red]lake[/red] is away"), 1)
        assert "bucket [red]lake[/red] is away" in text_of(panel(telemetry.status(), 100))

    def test_many_topics_are_cut_to_the_busiest(self, telemetry):
        written = {("out", f"/topic/{number}"): WriteResult(number, 1) for number in range(100)}
        telemetry.epoch(EpochReport(8, {}, written))
        text = text_of(panel(telemetry.status(), 100))
        assert "/topic/99" in text
        assert "/topic/1 " not in text
        assert "and 93 more topics" in text
        assert len(text.splitlines()) < 25

    def test_the_phase_in_hand_is_named(self, telemetry):
        telemetry.phase(8, "stage")
        assert "epoch 8 staging" in text_of(panel(telemetry.status(), 100))

    def test_every_port_and_the_console_are_listed(self, telemetry):
        telemetry.url = "http://127.0.0.1:8601"
        telemetry.ports = [{"address": "127.0.0.1", "port": port, "program": "java"} for port in (8601, 40123)]
        shown = text_of(panel(telemetry.status(), 80))
        assert "console http://127.0.0.1:8601" in shown
        assert "listens on 127.0.0.1:8601 java, 127.0.0.1:40123 java" in shown

    def test_skipped_rows_and_retries_are_not_hidden(self, telemetry):
        telemetry.epoch(EpochReport(8, skipped=17))
        telemetry.retry("pipeline", RetryableError("x"), 1)
        assert "skipped" in text_of(panel(telemetry.status(), 100))
        assert "17 skipped · 1 retry" in closing(telemetry.status()).plain

    def test_dead_letters_are_told_from_other_rows(self, telemetry):
        before = closing(telemetry.status()).plain
        telemetry.epoch(EpochReport(8, {}, {("_dead_letters", "/_dead_letters"): WriteResult(3, 100)}))
        assert "dead" not in before
        assert "rows out · 3 dead letters among them (penstock dlq show)" in closing(telemetry.status()).plain

    def test_figures_read_as_people_write_them(self):
        assert [duration(s) for s in (0.4, 72, 3600, 90061)] == ["0:00:00", "0:01:12", "1:00:00", "1 d 1:01:01"]
        assert [size(b) for b in (12, 1500, 38_100_000, 5e15)] == ["12 B", "1.5 kB", "38.1 MB", "5,000.0 TB"]
        assert sparkline([0, 0, 1, 4, 8], 10) == "▁▄█"
        assert sparkline([0, 0], 10) == ""


def test_a_drain_exits_with_1_when_a_table_failed(file, monkeypatch):
    monkeypatch.setattr("penstock.spark.java.java_problem", lambda: None)
    for state, code in (("active", 0), ("failed", 1)):
        telemetry = Telemetry("orders", sources=["generator"])
        telemetry.tables("generator", {"public.orders": TableState(state, code="PEN-4001", error="x")})
        monkeypatch.setattr(running, "run", lambda *_, telemetry=telemetry, **__: telemetry)
        with pytest.raises(SystemExit) as ended:
            main(["run", str(file), "--drain"])
        assert ended.value.code == code


class TestCheck:
    def test_it_shows_where_rows_would_go(self, cli, file):
        code, out, _ = cli("check", file)
        assert code == 0
        assert "generator:orders (id int64, " in out
        assert "→ /orders → out" in out
        assert "→ /clicks → out" in out
        assert "ready to run" in out

    def test_a_connectors_finding_is_shown_with_its_fix(self, cli, file):
        (file.parent / "picky.py").write_text(
            "from penstock.source import Finding\n"
            "from penstock.connectors.generator import Generator\n"
            "class Picky(Generator):\n"
            "    def check(self):\n"
            "        return [Finding(True, 'the server is 18'), Finding(False, 'wal_level is replica', 'ALTER SYSTEM')]\n"
        )
        file.write_text(PIPELINE.replace('connector = "generator"', 'connector = "picky:Picky"\nname = "db"'))
        code, out, _ = cli("check", file)
        assert code == 1
        assert "✗ source db" in out
        assert "    ✓ the server is 18" in out
        assert "    ✗ wal_level is replica" in out
        assert "→ ALTER SYSTEM" in out
        assert "1 to fix" in out

    def test_a_connector_that_cannot_open_does_not_hide_the_others(self, cli, file):
        (file.parent / "shut.py").write_text(
            "from penstock.errors import FatalError\n"
            "from penstock.connectors.generator import Generator\n"
            "class Shut(Generator):\n"
            "    def open(self, context=None):\n"
            "        raise FatalError('no one answers', code='PEN-5001', hint='start the server')\n"
        )
        file.write_text(PIPELINE.replace('connector = "generator"', 'connector = "shut:Shut"'))
        code, out, _ = cli("check", file)
        assert code == 1
        assert "PEN-5001 no one answers" in out
        assert "✓ sink out" in out

    def test_a_taken_port_is_to_fix_for_check_and_run(self, cli, file):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            file.write_text(PIPELINE.replace("[processing]", f"[processing]\nmetrics_port = {port}"))
            code, out, _ = cli("check", file)
            assert code == 1
            assert f"✗ PEN-1000 cannot serve metrics on port {port}" in out
            assert f"cannot serve metrics on port {port}" in cli("run", file)[2]
        assert f"✓ port {port} of 127.0.0.1 is free" in cli("check", file)[1]

    @pytest.mark.parametrize(
        ("options", "part", "why"),
        [
            ('metrics_port = 0\nmetrics_host = "0.0.0.0"', "processing", "PEN-1000 the console is not served on 0.0.0.0"),
            ('metrics_port = 0\nconsole_token = { env = "NOT_THERE" }', "processing", "NOT_THERE is not set"),
            ('openlineage_url = "http://127.0.0.1:1/"\nopenlineage_token = { env = "NOT_THERE" }', "telemetry", "NOT_THERE"),
            ('otlp_endpoint = "http://127.0.0.1:1/"\notlp_headers = { key = { env = "NOT_THERE" } }', "telemetry", "NOT_THERE"),
        ],
    )  # fmt: skip
    def test_what_a_run_refuses_of_its_console_and_collectors_is_to_fix_for_check(self, cli, file, options, part, why):
        file.write_text(
            PIPELINE.replace("[processing]", f"[{part}]\n{options}\n" + "[processing]" * (part != "processing"))
        )
        code, out, _ = cli("check", file)
        assert code == 1
        assert "✗ PEN-" in out
        assert why in out
        code, _, err = cli("run", file)
        assert code == 2
        assert why in err
        assert not (file.parent / "state").exists(), "nothing was started"

    def test_dead_letters_that_could_not_be_kept_are_to_fix_for_check_and_run(self, cli, file, monkeypatch):
        there = importlib.util.find_spec
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deltalake" else there(name))
        file.write_text(PIPELINE.replace("[processing]", '[processing]\non_error = "dead_letter"'))
        code, out, _ = cli("check", file)
        assert code == 1
        assert "dead letters are kept in a Delta table" in out
        assert "name a sink of the file in `dead_letter_sink`" in out
        code, _, err = cli("run", file)
        assert (code, "pip install 'penstock[delta]'" in err) == (2, True)

    def test_a_state_directory_that_cannot_be_used_is_to_fix_for_check_and_run(self, cli, file):
        (file.parent / "state").write_text("a file")
        code, out, _ = cli("check", file)
        assert code == 1
        assert "✗ PEN-5009 the state directory" in out
        code, _, err = cli("run", file)
        assert code == 1
        assert "PEN-5009 the state directory" in err
        assert "choose another `state_dir`" in err

    def test_a_schema_for_rows_that_have_columns_is_said_to_change_nothing(self, cli, file):
        file.write_text(PIPELINE + '\n[[schemas]]\ntopic = "/orders"\nschema_type = "json"\n')
        assert "! [[schemas]] for /orders changes nothing: source 'generator' gives rows" in cli("check", file)[1]

    def test_a_schema_for_a_topic_that_is_not_there_is_named_with_the_nearest(self, cli, file):
        file.write_text(PIPELINE + '\n[[schemas]]\ntopic = "odrers"\nschema_type = "json"\n')
        said = "! [[schemas]] for /odrers fits no topic that is there now; did you mean '/orders'?"
        assert said in cli("check", file)[1]

    def test_a_source_that_listens_is_not_opened_beside_its_own_run(self, cli, file):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            source = f'connector = "tcp"\nurl = "tcp://127.0.0.1:{taken.getsockname()[1]}"'
            text = PIPELINE.replace('connector = "generator"\nrows = 100\nstreams = ["orders", "clicks"]', source)
            file.write_text(text)
            (file.parent / "state").mkdir()
            telemetry = Telemetry("orders")
            telemetry.state("pipeline", HealthStatus.healthy())
            telemetry.publish(file.parent / "state")
            assert "✓ not opened beside the pipeline that runs" in cli("check", file)[1]
            telemetry.close()
            assert "already in use" in cli("check", file)[1]

    def test_a_state_directory_is_tried_and_nothing_is_left_of_it(self, cli, file):
        file.write_text(PIPELINE.replace('"state"', '"/proc/penstock"'))
        assert "✗ PEN-5009 the state directory /proc/penstock cannot be written" in cli("check", file)[1]
        assert "PEN-5009 the state directory /proc/penstock cannot be written" in cli("run", file)[2]
        file.write_text(PIPELINE)
        before = sorted(file.parent.iterdir())
        cli("check", file)
        assert sorted(file.parent.iterdir()) == before

    def test_a_reason_for_which_two_looks_fail_is_said_once(self, cli, file):
        another = State(file.parent / "state", "another")
        another.open()
        another.close()
        assert cli("check", file)[1].partition(" to fix")[0].count("PEN-5003") == 1

    def test_a_state_that_the_connector_does_not_understand_is_to_fix(self, cli, file):
        state = State(file.parent / "state", "orders")
        state.open()
        ranges = {"generator": Range(start={}, end={"bytes": 7})}
        state.save(
            Manifest(pipeline="orders", incarnation=state.identity.incarnation, number=1, ranges=ranges, attempts=[])
        )
        state.close()
        code, out, _ = cli("check", file)
        assert code == 1
        assert "✗ PEN-5006 the position of source 'generator'" in out
        assert "PEN-5006" in cli("run", file)[2]

    def test_a_wrong_master_is_named_by_check_and_run(self, cli, file):
        code, out, _ = cli("check", file, "--master", "lokal[2]")
        assert code == 1
        assert "✗ PEN-1003 --master is 'lokal[2]'" in out
        code, _, err = cli("run", file, "--master", "lokal[2]")
        assert code == 2
        assert "'lokal[2]'" in err
        assert not (file.parent / "state").exists()

    @pytest.mark.parametrize(
        "master", ["local", "local[2]", "local[*]", "local[2, 3]", "yarn", "spark://a:7077,b:7077", "k8s://https://h:1"]
    )
    def test_a_master_that_spark_knows_is_fine(self, cli, file, monkeypatch, master):
        monkeypatch.setattr(checking, "on_cluster", lambda *given: ())  # there is none, and a JVM takes long to say so
        assert f"✓ Spark master {master}" in cli("check", file, "--master", master)[1]

    def test_without_java_it_is_not_ready(self, cli, file, monkeypatch, tmp_path):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        code, out, _ = cli("check", file)
        assert code == 1
        assert "✗ PEN-1014" in out

    def test_a_pattern_that_matches_nothing_is_said(self, cli, file):
        file.write_text(
            PIPELINE + '\n[[routes]]\nfrom = "*"\nexclude = ["tmp_*"]\n[[routes]]\nfrom = "ordrs"\nto = "/x"\n'
        )
        code, out, _ = cli("check", file)
        assert code == 0
        assert "! the route from 'ordrs' matches no stream that is there now; did you mean 'orders'?" in out
        assert "! exclude = 'tmp_*'" in out

    def test_a_name_with_a_line_break_cannot_pass_for_a_finding(self, cli, file):
        (file.parent / "odd.py").write_text(
            "import pyarrow as pa\n"
            "from penstock.connectors.generator import Generator\n"
            "class Odd(Generator):\n"
            "    def schema(self):\n"
            "        return {'orders': pa.schema([('id\\n✓ forged\\x1b[2J', pa.int64())])}\n"
        )
        file.write_text(PIPELINE.replace('connector = "generator"', 'connector = "odd:Odd"'))
        out = cli("check", file)[1]
        assert "id\\n✓ forged\\x1b[2J int64" in out
        assert not any(line.startswith("✓ forged") for line in out.splitlines())

    def test_no_hint_of_it_points_to_itself(self, cli, file):
        (file.parent / "refusing.py").write_text(
            "from penstock.errors import FatalError\n"
            "from penstock.connectors.generator import Generator\n"
            "class Shut(Generator):\n"
            "    def open(self, context=None):\n"
            "        raise FatalError('refused', code='PEN-5001', hint='see `penstock check` for what is needed')\n"
        )
        file.write_text(PIPELINE.replace('connector = "generator"', 'connector = "refusing:Shut"'))
        out = cli("check", file)[1]
        assert "PEN-5001 refused" in out
        assert "penstock check" not in out

    def test_to_check_changes_nothing(self, cli, file):
        kept = file.parent / "state" / "sources" / "generator"
        kept.mkdir(parents=True)
        (kept / "seen").write_text("1")
        (file.parent / "eager.py").write_text(
            "from penstock.connectors.generator import Generator\n"
            "class Eager(Generator):\n"
            "    def open(self, context=None):\n"
            "        assert (context.state_dir / 'seen').read_text() == '1'\n"
            "        (context.state_dir / 'seen').write_text('2')\n"
        )
        file.write_text(PIPELINE.replace('connector = "generator"', 'connector = "eager:Eager"\nname = "generator"'))
        assert cli("check", file)[0] == 0
        assert (kept / "seen").read_text() == "1"

    def test_a_change_that_a_run_would_refuse_is_to_fix(self, cli, file):
        state = State(file.parent / "state", "orders")
        state.open()
        state.save_identity(shape=Pipeline.from_toml(file).shape())
        state.close()
        assert "since the last run" not in cli("check", file)[1]
        file.write_text(PIPELINE.replace("out/{topic}", "elsewhere/{topic}"))
        code, out, _ = cli("check", file)
        assert code == 1
        assert "PEN-1013 since the last run `path` of sink 'out' changed" in out
        assert "→ undo the change" in out

    def test_it_says_that_only_spark_can_analyse_sql(self, cli, file):
        assert "Spark" not in cli("check", file)[1]
        file.write_text(PIPELINE + '\n[[routes]]\nsql = "SELECT nope FROM input"\n')
        assert "analysed by Spark when the run starts" in cli("check", file)[1]

    def test_a_stream_that_is_skipped_is_told(self, cli, file):
        file.write_text(
            PIPELINE.replace("[processing]", '[processing]\nunrouted = "skip"') + '\n[[routes]]\nfrom = "orders"\n'
        )
        code, out, _ = cli("check", file)
        assert code == 0
        assert "generator:clicks" in out
        assert "→ nowhere" in out

    def test_a_stream_without_a_route_is_to_fix(self, cli, file):
        file.write_text(PIPELINE + '\n[[routes]]\nfrom = "orders"\n')
        code, out, _ = cli("check", file)
        assert code == 1
        assert "clicks" in out


class TestStatus:
    def test_a_pipeline_that_never_ran_says_so(self, cli, file):
        code, _, err = cli("status", file)
        assert code == 1
        assert "it never ran" in err

    def test_a_pipeline_that_ended_well_is_well(self, cli, file):
        telemetry = Telemetry("orders")
        (file.parent / "state").mkdir()
        telemetry.publish(file.parent / "state")
        telemetry.epoch(report(1))
        telemetry.close()
        code, out, _ = cli("status", file)
        assert code == 0
        assert "● stopped" in out

    def test_a_pipeline_that_ended_with_failed_tables_is_not_well(self, cli, file):
        telemetry = Telemetry("orders", sources=["shop"])
        (file.parent / "state").mkdir()
        telemetry.publish(file.parent / "state")
        telemetry.tables("shop", {"public.t": TableState("failed", code="PEN-4002", error="no key")})
        telemetry.epoch(report(1))
        telemetry.close()
        code, out, _ = cli("status", file)
        assert code == 1
        assert "public.t failed: PEN-4002 no key" in out

    def test_a_run_that_failed_at_its_start_does_not_hide_earlier_epochs(self, cli, file):
        state = State(file.parent / "state", "orders")
        state.open()
        identity = state.identity
        state.save(
            Manifest(
                pipeline="orders",
                incarnation=identity.incarnation,
                number=812,
                state="committed",
                ranges={},
                attempts=[],
            )
        )
        state.close()
        telemetry = Telemetry("orders")
        telemetry.publish(file.parent / "state")
        telemetry.close(FatalError("the port is taken"))
        code, out, _ = cli("status", file)
        assert code == 1
        assert "no epoch was committed in this run" in out
        assert "earlier runs: epoch 812 is committed" in out

    def test_a_pipeline_that_was_killed_is_dead(self, cli, file):
        state = file.parent / "state"
        state.mkdir()
        telemetry = Telemetry("orders")
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.publish(state)
        written = json.loads((state / STATUS_FILE).read_text())
        (state / STATUS_FILE).write_text(json.dumps({**written, "process_started": "0"}))
        code, out, _ = cli("status", file)
        assert code == 1
        assert "● dead" in out

    def test_a_running_one_is_asked_itself(self, cli, file):
        from penstock import web

        state = file.parent / "state"
        state.mkdir()
        telemetry = Telemetry("orders")
        with web.serve(telemetry, 0):
            telemetry.state("pipeline", HealthStatus.healthy())
            telemetry.publish(state)
            (state / STATUS_FILE).write_text((state / STATUS_FILE).read_text().replace('"epochs": 0', '"epochs": 99'))
            code, out, _ = cli("status", file, "--json")
        assert code == 0
        assert json.loads(out)["epochs"] == 0
        assert json.loads(out)["ok"] is True

    def test_one_that_keeps_no_state_is_asked_on_its_port(self, cli, file):
        from penstock import web

        telemetry = Telemetry("orders")
        telemetry.state("pipeline", HealthStatus.healthy())
        with web.serve(telemetry, 0) as server:
            file.write_text(PIPELINE.replace("[processing]", f"[processing]\nmetrics_port = {server.port}"))
            code, out, _ = cli("status", file)
        assert code == 0
        assert "● running" in out

    def test_one_on_another_address_is_asked_with_its_token(self, cli, file, monkeypatch):
        from penstock import web

        monkeypatch.setenv("STATUS_TOKEN", "open-sésame")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for what runs here
        options = 'metrics_host = "0.0.0.0"\nconsole_token = { env = "STATUS_TOKEN" }\nmetrics_port ='
        file.write_text(PIPELINE.replace("[processing]", f"[processing]\n{options} 0"))
        telemetry = Telemetry("orders")
        telemetry.state("pipeline", HealthStatus.healthy())
        with web.serve(telemetry, 0, Pipeline.from_toml(file)) as server:
            file.write_text(PIPELINE.replace("[processing]", f"[processing]\n{options} {server.port}"))
            code, out, _ = cli("status", file)
            assert (code, "● running" in out) == (0, True)
            monkeypatch.delenv("STATUS_TOKEN")
            assert cli("status", file)[0] == 1, "without the token there is nothing to show, and no traceback"


class TestOffsets:
    @pytest.fixture
    def state(self, file):
        state = State(file.parent / "state", "orders")
        state.open()
        ranges = {"generator": Range(start={"ids": {}}, end={"ids": {"orders": 100}})}
        incarnation = state.identity.incarnation
        state.save(
            Manifest(pipeline="orders", incarnation=incarnation, number=4, state="prepared", ranges=ranges, attempts=[])
        )
        state.close()
        return state

    def test_show_prints_the_epoch_and_every_position(self, cli, file, state):
        code, out, _ = cli("offsets", file, "show")
        assert code == 0
        assert "epoch 4 prepared" in out
        assert state.identity.incarnation in out
        assert "orders to row 100" in out
        assert "the beginning" in out

    def test_show_prints_positions_as_they_are_recorded_on_request(self, cli, file, state):
        code, out, _ = cli("offsets", "show", file, "--json")
        assert code == 0
        assert json.loads(out)["ranges"]["generator"]["end"] == {"ids": {"orders": 100}}

    @pytest.mark.parametrize("group", ["offsets", "tables"])
    def test_every_word_has_a_help_of_its_own(self, cli, group):
        code, out, _ = cli(group, "--help")
        assert code == 0
        commands = typer.main.get_command(app).commands[group].commands
        for word in commands:
            assert word in out
            assert cli(group, word, "--help")[0] == 0

    def test_reset_begins_a_new_incarnation(self, cli, file, state):
        code, out, _ = cli("offsets", file, "reset", "--yes")
        assert code == 0
        assert "new incarnation" in out
        after = State(file.parent / "state", "orders").peek()
        assert after.newest is None
        assert after.identity.incarnation != state.identity.incarnation

    def test_reset_asks_first(self, cli, file, state, monkeypatch):
        monkeypatch.setattr("typer.confirm", lambda question: False)
        assert cli("offsets", file, "reset")[0] == 1
        assert State(file.parent / "state", "orders").peek().newest is not None

    def test_restage_marks_the_prepared_epoch(self, cli, file, state):
        code, out, _ = cli("offsets", file, "restage")
        assert code == 0
        assert "epoch 4" in out
        assert State(file.parent / "state", "orders").peek().newest.restage == []

    def test_restage_asks_before_it_leaves_rows_out(self, cli, file, state, monkeypatch):
        state.open()
        state.save(state.newest.model_copy(update={"rows_out": {"lake": {"/orders": (1200, 9)}}}))
        state.close()
        asked = []
        monkeypatch.setattr("typer.confirm", lambda question: asked.append(question))
        assert cli("offsets", file, "restage", "--without", "/orders")[0] == 1
        assert "without /orders (1,200 rows)" in asked[0]
        assert State(file.parent / "state", "orders").peek().newest.restage is None
        assert cli("offsets", file, "restage", "--without", "/orders", "--yes")[0] == 0
        assert State(file.parent / "state", "orders").peek().newest.restage == ["/orders"]

    def test_forget_asks_and_names_the_targets(self, cli, file, state, monkeypatch):
        state.open()
        state.save(state.newest.model_copy(update={"held": {"lake": {"/orders": ("", 3), "/items": ("", 4)}}}))
        state.close()
        asked = []
        monkeypatch.setattr("typer.confirm", lambda question: asked.append(question))
        assert cli("offsets", "forget", file, "orders")[0] == 1
        assert "Rows of /orders that were committed" in asked[0]
        assert "needs a topic" in cli("offsets", "forget", file)[2]
        code, _, err = cli("offsets", "forget", file, "/users", "--yes")
        assert (code, "/items, /orders" in err) == (2, True)
        assert "/orders in sink 'lake'" in cli("offsets", file, "forget", "orders", "--yes")[1]
        assert State(file.parent / "state", "orders").peek().newest.held == {"lake": {"/items": ("", 4)}}

    def test_restage_without_a_prepared_epoch_is_refused(self, cli, file):
        code, _, err = cli("offsets", file, "restage")
        assert code == 2
        assert "nothing to stage again" in err

    def test_a_word_that_is_no_command_is_named_and_not_the_file(self, cli, file):
        for words in (("shw", file), (file, "shw")):
            assert "'shw' is not a command; there are show, reset, restage, forget" in cli("offsets", *words)[2]

    def test_file_and_word_come_in_any_order(self, cli, file, state):
        assert cli("offsets", "show", file) == cli("offsets", file, "show")

    def test_another_word_is_refused(self, cli, file):
        code, _, err = cli("offsets", file, "rewind")
        assert code == 2
        assert "reset" in err


class TestConnectors:
    def test_the_list_says_what_can_be_used(self, cli):
        code, out, _ = cli("connectors")
        assert code == 0
        for name in ("generator", "files", "console", "delta"):
            assert name in out

    def test_one_shows_its_options_with_their_defaults(self, cli):
        code, out, _ = cli("connectors", "generator")
        assert code == 0
        assert "rows_per_sec" in out
        assert "65536" in out

    def test_options_are_shown_as_the_file_writes_them(self, cli):
        _, out, _ = cli("connectors", "files")
        shown = " ".join(out.split())
        assert '[".*", "_*", "*.tmp", "*.part"]' in shown
        assert 'at = "timestamp[us, UTC]"' in shown

    def test_the_list_and_the_page_describe_a_connector_alike(self, cli):
        _, out, _ = cli("connectors")
        assert "Read files as they land in a directory" in out

    def test_an_unknown_one_is_refused(self, cli):
        code, _, err = cli("connectors", "nope")
        assert code == 2
        assert "PEN-1006" in err


class TestDoctor:
    def test_it_looks_at_everything(self, cli, monkeypatch, tmp_path, java):
        monkeypatch.chdir(tmp_path)
        _, out, _ = cli("doctor")
        for what in (
            "Python 3.",
            "Java ",
            "pyspark 4.3.",
            "pyarrow",
            "GB free",
            "written and synced",
            "GB of memory",
            "open files",
        ):
            assert what in out
        assert not list(tmp_path.iterdir())

    def test_what_is_missing_comes_with_what_to_do(self, cli, monkeypatch, tmp_path):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        code, out, _ = cli("doctor")
        assert code == 1
        assert "✗ PEN-1014" in out
        assert "→" in out


@pytest.mark.processes
class TestNew:
    @pytest.mark.parametrize(
        "words",
        [("source",), ("source", "--kind", "polling"), ("source", "--kind", "streaming"), ("sink",)],
        ids=" ".join,
    )
    def test_what_it_writes_passes_the_kit(self, cli, tmp_path, words):
        code, out, _ = cli("new", words[0], "acme_crm", *words[1:], "--dir", tmp_path)
        assert code == 0
        assert 'connector = "acme_crm:AcmeCrm"' in out
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "not Crashes",
            "test_acme_crm.py",
        ]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-5000:]

    def test_what_is_there_stays_as_it_is(self, cli, tmp_path):
        (tmp_path / "mine.py").write_text("x = 1\n")
        code, _, err = cli("new", "sink", "mine", "--dir", tmp_path)
        assert code == 2
        assert "mine.py" in err
        assert (tmp_path / "mine.py").read_text() == "x = 1\n"
        assert not (tmp_path / "test_mine.py").exists()

    @pytest.mark.parametrize(
        "words",
        [
            ("pump", "acme"),
            ("source", "Acme CRM"),
            ("source", "Acme"),
            ("source", "acme", "--kind", "pull"),
            ("sink", "acme", "--kind", "polling"),
        ],
    )
    def test_a_wrong_kind_or_name_is_refused(self, cli, tmp_path, words):
        assert cli("new", *words, "--dir", tmp_path)[0] == 2
        assert not list(tmp_path.iterdir())
