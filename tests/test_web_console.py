"""The console over HTTP: what it answers, who may do what, and what it does not let through."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pytest

from console_pipeline import TOKEN, Running, until
from penstock.config import Secret
from penstock.errors import CODES, ConfigError
from penstock.runtime.commands import TablesOf, chosen_tables, read_audit
from penstock.runtime.messages.replay import having, parse_where
from penstock.runtime.telemetry import Telemetry
from penstock.runtime.telemetry.ports import listening
from penstock.tables import Requests, TableState
from penstock.web import serve_all, server
from penstock.web.watched import Fleet, Watched, _letters, hidden

pytestmark = pytest.mark.processes

AUTH = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    os.environ["CONSOLE_TEST_TOKEN"] = TOKEN
    sys.path.insert(0, str(Path(__file__).parent))
    made = Running(tmp_path_factory.mktemp("console"))
    until(lambda: made.telemetry.status()["epochs"] > 2 and made.telemetry.status()["dead_letters"])
    yield made
    made.end()


def ask(
    url: str, path: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    given = body if isinstance(body, str | bytes | None) else json.dumps(body)
    connection.request(method, path, given, headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.headers.get_content_type() == "application/json" else text


@pytest.fixture
def one(running: Running) -> str:
    return str(ask(running.url, "/api/pipelines")[1]["pipelines"][0]["id"])


def test_the_page_is_small_and_loads_nothing_from_elsewhere(running: Running) -> None:
    parts = [ask(running.url, path)[1] for path in ("/", "/app.js", "/style.css", "/icon.svg")]
    assert sum(len(part.encode()) for part in parts) < 60_000
    for part in parts:
        assert "https://" not in part
        assert set(part.split("http://")[1:]) <= {
            each for each in part.split("http://")[1:] if each.startswith("www.w3.org")
        }


def test_everything_that_a_panel_needs_is_answered(running: Running, one: str) -> None:
    status = ask(running.url, f"/api/p/{one}/status")[1]
    assert status["pipeline"] == "shop"
    assert ["sensors", "/readings", "lake"] in status["flows"]
    assert status["sources"]["sensors"]["own"]["journal_limit_bytes"] > 0
    assert status["sources"]["database"]["position"]
    assert set(status["sources"]["database"]["tables"]["states"]) == {"public.customers", "public.orders"}
    assert {"penstock", "python", "pyarrow"} <= set(status["versions"])
    assert status["latency_secs"] is not None
    running.telemetry._history.take()
    history = ask(running.url, f"/api/p/{one}/history?since=0")[1]
    assert history["epochs"]
    assert history["fine"]
    detail = ask(running.url, f"/api/p/{one}/detail")[1]
    assert detail["letters"]["groups"][0]["code"] == "PEN-3001"
    assert '{"device": "broken' in {each["payload"] for each in detail["letters"]["samples"]}
    assert detail["schemas"]["topics"]["/readings"] == {"device": "string", "celsius": "int64"}
    assert {each["code"] for each in ask(running.url, "/api/codes")[1]["codes"]} == set(CODES)


def test_the_ports_of_the_run_are_listed(running: Running) -> None:
    port = int(running.url.rpartition(":")[2])
    listed = {(each["address"], each["port"]) for each in running.telemetry.status()["ports"]}
    assert ("127.0.0.1", port) in listed


def test_ports_are_those_that_another_program_finds(running: Running) -> None:
    mine = psutil.Process()

    def found() -> set[tuple[str, int]]:
        every = set()
        for process in (mine, *mine.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # a task that has ended meanwhile
                every |= {
                    (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)  # Java's, of a test before this one
                    for each in process.net_connections("tcp")
                    if each.status == psutil.CONN_LISTEN
                }
        return every

    mapped = socket.socket(socket.AF_INET6)
    mapped.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    mapped.bind(("::ffff:127.0.0.1", 0))
    mapped.listen()
    with mapped, socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6):
        until(lambda: {(each["address"], each["port"]) for each in listening()} == found())
        assert len(found()) >= 4


def test_the_file_is_shown_without_secrets(running: Running, one: str) -> None:
    text = ask(running.url, f"/api/p/{one}/detail")[1]["file"]
    assert 'connector_name = "shop"' in text
    assert "hunter2-in-the-file" not in text
    assert '{ env = "CONSOLE_TEST_TOKEN" }' in text


def test_what_may_be_secret_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN_HERE", "walrus-77")
    text = """
        dsn = "postgresql://me:geheim1@host/db?sig=geheim2&x=1"
        other = "host=h password=geheim3 dbname=d"
        api_key = 'geheim4'
        headers = { Authorization = "Bearer geheim5", "x-api-key" = "geheim6" }
        client_secret = \"\"\"geheim7
        geheim8\"\"\"
        key = { env = "HIDDEN_HERE" }
        note = "walrus-77"
        columns = ["id"]
    """
    shown = hidden(text)
    assert "geheim" not in shown
    assert "walrus-77" not in shown
    assert 'columns = ["id"]' in shown


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Type": "application/json"}, 401),
        ({**AUTH, "Authorization": "Bearer wrong"}, 401),
        ({**AUTH, "Authorization": "Bearer "}, 401),
        ({**AUTH, "Authorization": TOKEN}, 401),
        ({**AUTH, "Authorization": f"Basic {TOKEN}"}, 401),
        ({**AUTH, "Origin": "http://evil.example"}, 403),
        ({**AUTH, "Origin": "http://["}, 403),
        ({**AUTH, "Origin": "null"}, 403),
        ({**AUTH, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**AUTH, "Host": "evil.example"}, 403),
        ({**AUTH, "Content-Type": "text/plain"}, 415),
        ({**AUTH, "Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_who_may_not_act_does_not(running: Running, one: str, headers: dict[str, str], code: int) -> None:
    before = len(read_audit(running.directory / "state", 1000))
    body = {"action": "pause", "tables": ["public.orders"]}
    assert ask(running.url, f"/api/p/{one}/actions", "POST", body, headers)[0] == code
    assert len(read_audit(running.directory / "state", 1000)) == before
    assert Requests(running.directory / "state/sources/database").pending() == []


@pytest.mark.parametrize("body", ["", "[]",
     "{", "[" * 10_000, '{"action": "format"}', '{"action": "pause"}',
    '{"action": "pause", "tables": [1]}', '{"action": "pause", "tables": ["no.such"]}',
    '{"action": "replay", "where": {"x": "1"}}',
    '{"action": "drop", "where": []}'])  # fmt: skip
def test_a_body_that_makes_no_sense_is_refused(running: Running, one: str, body: str) -> None:
    assert ask(running.url, f"/api/p/{one}/actions", "POST", body, AUTH)[0] in (400, 409)


def test_a_body_that_is_too_large_is_refused(running: Running, one: str) -> None:
    body = json.dumps({"action": "pause", "tables": ["x" * 20_000]})
    assert ask(running.url, f"/api/p/{one}/actions", "POST", body, AUTH)[0] == 413


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/%2e%2e/%2e%2e/etc/passwd", "/static/app.js", "/app.js/../../__init__.py", "//etc/passwd",
     "/api/p/../../etc/status", "/api/p/000000000000/status", "/api/p/%2e%2e/detail", "/app.js%00.css"],
)  # fmt: skip
def test_no_path_leads_out(running: Running, path: str) -> None:
    assert ask(running.url, path)[0] == 404


def raw(url: str, data: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(data)
        found = b""
        while more := client.recv(65536):
            found += more
    return found


def test_nothing_of_a_request_becomes_a_header(running: Running) -> None:
    for path in (b"/%0d%0aX-Evil:%201", b"/api/p/x%0d%0aX-Evil:1/status", b"/healthz?a=%0d%0aX-Evil:1"):
        head = raw(running.url, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").partition(b"\r\n\r\n")[0]
        assert b"X-Evil" not in head
    odd = raw(running.url, b"BREW /<script>alert(1)</script> HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"<script" not in odd
    assert b"501" in odd.splitlines()[0]


@pytest.mark.parametrize(
    ("request_line", "headers", "code"),
    [
        (b"GET http://[ HTTP/1.1", b"Host: localhost\r\n", b"404"),
        (b"GET /api/me?" + b"a=1&" * 16_000 + b" HTTP/1.1", b"Host: localhost\r\n", b"200"),
        (b"GET /api/me?" + b"a=1&" * 20_000 + b" HTTP/1.1", b"Host: localhost\r\n", b"414"),
        (b"GET / HTTP/1.1", b"Host: localhost\r\n" + b"X: 1\r\n" * 500, b"431"),
        (b"GET / HTTP/1.1", b"Host: [\r\n", b"421"),
        (b"POST /api/p/x/actions HTTP/1.1", b"Host: localhost\r\nOrigin: http://evil.example\r\n", b"403"),
        (b"OPTIONS /api/p/x/actions HTTP/1.1", b"Host: localhost\r\nOrigin: http://evil.example\r\n", b"501"),
    ],
    ids=["address", "query", "longer query", "many headers", "name", "other site", "preflight"],
)
def test_odd_requests_have_an_answer(running: Running, request_line: bytes, headers: bytes, code: bytes) -> None:
    answer = raw(running.url, request_line + b"\r\n" + headers + b"\r\n")
    assert answer.split()[1] == code
    assert b"Access-Control" not in answer


@pytest.mark.parametrize("length", [b"9" * 5000, b"-1", b"1e3", b"\xb2", b""])
def test_a_length_that_is_none_is_refused(running: Running, one: str, length: bytes) -> None:
    head = b"POST /api/p/%s/actions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % one.encode()
    head += b"Authorization: Bearer %s\r\nContent-Length: %s\r\n\r\n" % (TOKEN.encode(), length)
    assert raw(running.url, head).split()[1] == b"413"


@pytest.mark.parametrize("token", ["größer", "…à", "令牌", "with spaces in it"])
def test_a_token_may_hold_any_letters(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSOLE_TEST_TOKEN", token)
    with serve_all([tmp_path], "127.0.0.1", 0, Secret(env="CONSOLE_TEST_TOKEN")) as server:
        for given, writable in ((token, b"true"), (token + "x", b"false"), (token[:-1], b"false")):
            head = b"GET /api/me HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n" % given.encode()
            assert b'"writable": %s' % writable in raw(server.url, head)


def test_the_page_cannot_be_framed_and_runs_no_foreign_code(running: Running) -> None:
    for path in ("/", "/api/pipelines", "/nothing"):
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=30)
        connection.request("GET", path)
        headers = connection.getresponse().headers
        policy = headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Access-Control-Allow-Origin"] is None
        connection.close()


def test_a_name_that_is_not_of_this_machine_is_refused(running: Running) -> None:
    assert ask(running.url, "/api/pipelines", headers={"Host": "evil.example:80"})[0] == 421
    assert ask(running.url, "/api/pipelines", headers={"Host": "localhost"})[0] == 200


def test_slow_clients_are_closed_and_others_are_served(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTION_SECS", 3.0)
    host, port = running.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=60) for _ in range(10)]
    ended = served = 0
    for each in slow:
        each.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
    give_up = time.monotonic() + 60
    while ended < len(slow):
        with contextlib.suppress(http.client.RemoteDisconnected):  # on a busy machine we are slow ourselves
            served += ask(running.url, "/healthz")[0] == 200
        assert time.monotonic() < give_up
        ended = 0
        for each in slow:
            try:
                each.sendall(b"X-Slow: 1\r\n")  # always a little more
            except OSError:
                ended += 1
        time.sleep(0.2)
    assert served
    for each in slow:
        each.close()


def test_too_many_connections_are_closed_at_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 5)
    host, port = running.url.removeprefix("http://").split(":")
    held = [socket.create_connection((host, int(port)), timeout=60) for _ in range(6)]
    try:
        ends = []
        for each in held:
            each.settimeout(3)
            try:
                ends.append(each.recv(1) == b"")
            except TimeoutError:
                ends.append(False)
            if ends[-1]:
                break
        assert any(ends)
    finally:
        for each in held:
            each.close()
    monkeypatch.undo()
    until(lambda: ask(running.url, "/healthz")[0] == 200)


def test_a_table_is_paused_as_the_command_line_does_it(running: Running, one: str) -> None:
    code, answer = ask(
        running.url, f"/api/p/{one}/actions", "POST", {"action": "pause", "tables": ["public.customers"]}, AUTH
    )
    assert (code, answer["said"]) == (200, ["pause public.customers: taken up with the next epoch"])
    states = lambda: running.telemetry.status()["sources"]["database"]["tables"]["states"]  # noqa: E731
    running.database.put("public.orders", 900, "more")
    until(lambda: states()["public.customers"] == "paused")
    entry = read_audit(running.directory / "state")[0]
    assert (entry["who"], entry["action"], entry["outcome"]) == ("console 127.0.0.1", "tables pause", "done")
    assert (
        ask(running.url, f"/api/p/{one}/actions", "POST", {"action": "resume", "tables": ["public.customers"]}, AUTH)[0]
        == 200
    )
    running.database.put("public.orders", 901, "more")
    until(lambda: states()["public.customers"] == "active")


def test_an_action_on_a_table_is_for_its_source_alone(running: Running, one: str) -> None:
    act = lambda source: ask(  # noqa: E731
        running.url,
        f"/api/p/{one}/actions",
        "POST",
        {"action": "resync", "tables": ["public.customers"], "source": source},
        AUTH,
    )
    code, answer = act("sensors")
    assert (code, answer["error"]) == (409, "PEN-1000 no source 'sensors' has tables")
    assert act(7)[0] == 409
    assert act("database")[0] == 200
    assert read_audit(running.directory / "state")[0]["detail"] == ["public.customers of database"]


def test_a_name_is_a_pattern_only_where_no_table_is_called_so(tmp_path: Path) -> None:
    def source(name: str, *streams: str) -> TablesOf:
        return TablesOf(name, tmp_path, {stream: TableState("active") for stream in streams})

    sources = [source("a", "log*", "logs"), source("b", "logs", "other")]
    assert chosen_tables(sources, ["log*"]) == {"a": ["log*"], "b": []}
    assert chosen_tables(sources, ["logs"]) == {"a": ["logs"], "b": ["logs"]}
    assert chosen_tables(sources, ["o*", "logs"]) == {"a": ["logs"], "b": ["logs", "other"]}
    with pytest.raises(ConfigError, match="no table is called 'x'"):
        chosen_tables(sources, ["x"])


def test_letters_are_dropped_as_the_command_line_does_it(running: Running, one: str) -> None:
    body = {"action": "drop", "where": {"code": "PEN-3001"}}
    code, answer = ask(running.url, f"/api/p/{one}/actions", "POST", body, AUTH)
    assert code == 200
    assert answer["said"][0].startswith("drop ")
    assert read_audit(running.directory / "state")[0]["action"] == "letters drop"


def test_a_group_of_letters_is_all_that_its_buttons_choose() -> None:
    rows = [
        ("/a", "PEN-3001", "json.syntax", None, 1),
        ("/a", "PEN-3001", "json.type", None, 1),
        ("/a", "PEN-3001", "json.type", "lake", 2),
        ("", "PEN-3001", "source", None, 1),
    ]
    names = ["topic", "code", "rule", "sink", "attempt"]
    letters = pa.table({name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)})
    store: Any = SimpleNamespace(chosen=lambda where: (letters, []), newest=lambda count, where: [])
    groups = _letters(store)["groups"]
    assert [(group["rule"], group["count"]) for group in groups] == [
        ("json.type", 2),
        ("source", 1),
        ("json.syntax", 1),
    ]
    assert (groups[0]["sinks"], groups[0]["attempt"]) == (["lake"], 2)
    for group in groups:
        where = parse_where([f"{name}={group[name]}" for name in ("topic", "code", "rule")])
        assert having(letters, where).sum() == group["count"]


def test_letters_of_a_named_sink_are_shown_as_well(tmp_path: Path) -> None:
    os.environ["CONSOLE_TEST_TOKEN"] = TOKEN
    sys.path.insert(0, str(Path(__file__).parent))
    sink = '[[sinks]]\nname = "letters"\nconnector = "files"\npath = "letters/{topic}"\n'
    sink += '[[routes]]\nto = "/{stream}"\nsinks = ["lake"]\n'
    made = Running(tmp_path, sink, processing='dead_letter_sink = "letters"')
    try:
        until(lambda: made.telemetry.status()["dead_letters"])
        id = ask(made.url, "/api/pipelines")[1]["pipelines"][0]["id"]
        found: dict[str, Any] = {}
        until(lambda: found.update(ask(made.url, f"/api/p/{id}/detail")[1]["letters"]) or found.get("open"))
        assert not (tmp_path / "state" / "dead_letters").exists()
        assert {group["rule"] for group in found["groups"]} == {"json.syntax"}
        assert '{"device": "broken' in {each["payload"] for each in found["samples"]}
    finally:
        made.end()


def test_a_store_of_letters_that_is_away_holds_nothing_up(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()

    def away(*_: object, **__: object) -> None:
        assert gone.wait(60)
        raise OSError("no route to host")

    monkeypatch.setattr("penstock.web.watched.Store", away)
    watched = Watched.of_run(running.telemetry, running.directory / "state", running.pipeline)
    detail = watched.detail()
    assert detail["letters"] == {"counting": True}
    assert detail["file"]
    gone.set()
    until(lambda: watched.detail()["letters"] == {"error": "OSError: no route to host", "hint": ""})


def test_another_address_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="without a token"):
        serve_all([tmp_path], "0.0.0.0", 0, None)
    for host in ("0.0.0.0", "127.0.0.1"):
        monkeypatch.setenv("CONSOLE_TEST_TOKEN", " ")
        with pytest.raises(ConfigError, match="PEN-1005 the token of the console is empty"):
            serve_all([tmp_path], host, 0, Secret(env="CONSOLE_TEST_TOKEN"))
    monkeypatch.setenv("CONSOLE_TEST_TOKEN", TOKEN)
    with serve_all([tmp_path], "0.0.0.0", 0, Secret(env="CONSOLE_TEST_TOKEN")) as open_server:
        url = f"http://127.0.0.1:{open_server.port}"
        assert ask(url, "/api/pipelines")[0] == 401
        assert ask(url, "/api/pipelines", headers=AUTH)[0] == 200
        assert ask(url, "/")[0] == 200, "the page itself holds no data"


def test_without_a_token_it_is_read_only(tmp_path: Path) -> None:
    with serve_all([tmp_path], "127.0.0.1", 0, None) as only_shows:
        assert ask(only_shows.url, "/api/me")[1] == {"writable": False, "token": False}
        assert (
            ask(only_shows.url, "/api/p/000000000000/actions", "POST", {}, {**AUTH, "Authorization": "Bearer "})[0]
            == 403
        )


def test_the_console_of_a_machine_says_where_the_addresses_of_a_run_are(running: Running, tmp_path: Path) -> None:
    assert "/metrics" in ask(running.url, "/metric")[1]["error"]
    with serve_all([tmp_path], "127.0.0.1", 0, None) as machine:
        code, answer = ask(machine.url, "/api/status")
        assert code == 404
        assert "are on the `metrics_port` of each pipeline" in answer["error"]


def test_the_console_of_a_machine_survives_a_pipeline_that_dies(running: Running, tmp_path: Path) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    code = f"""if True:
        import time
        from pathlib import Path
        from penstock.runtime.telemetry import Telemetry
        telemetry = Telemetry("short-lived", sources=["s"])
        telemetry.publish(Path({str(tmp_path / "deep" / "down")!r}))
        print("ready", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with serve_all([tmp_path, running.directory], "127.0.0.1", 0, None) as both:

        def states() -> dict[str, str]:
            return {each["pipeline"]: each["state"] for each in ask(both.url, "/api/pipelines")[1]["pipelines"]}

        assert states()["short-lived"] == "starting"
        assert states()["shop"] in ("running", "degraded")
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert states()["short-lived"] == "dead"
        (tmp_path / "deep" / "down" / "status.json").write_text("{")
        assert "short-lived" not in states()
        assert states()["shop"] in ("running", "degraded")


def test_a_large_tree_of_files_holds_no_page_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lake" / "orders" / "_delta_log").mkdir(parents=True)
    for name, directory in (("beside", tmp_path / "state"), ("within", tmp_path / "lake" / "orders" / "state")):
        directory.mkdir()
        Telemetry(name).publish(directory)
    fleet = Fleet([tmp_path])
    assert [each.summary()["pipeline"] for each in fleet.all()] == ["beside"], "a table is not looked into"

    asked, gone = threading.Event(), threading.Event()

    def slow(top: Path) -> Iterator[Path]:
        asked.set()
        assert gone.wait(60)
        yield top / "state"

    monkeypatch.setattr("penstock.web.watched._state_dirs", slow)
    fleet._due = 0.0
    assert [each.summary()["pipeline"] for each in fleet.all()] == ["beside"], "what was known, while it is looked for"
    assert asked.is_set()
    gone.set()
    until(lambda: fleet._looking is None)
    assert fleet._due > time.monotonic()


def test_odd_things_where_a_status_should_be_hold_up_nobody(running: Running, tmp_path: Path) -> None:
    whole = (running.directory / "state" / "status.json").read_text()
    odd = {
        "pipe": lambda path: os.mkfifo(path),
        "endless": lambda path: path.symlink_to("/dev/zero"),
        "directory": lambda path: path.mkdir(),
        "deep": lambda path: path.write_text("[" * 100_000),
        "list": lambda path: path.write_text("[]"),
        "older": lambda path: path.write_text(json.dumps({**json.loads(whole), "rows": None})),
        "other": lambda path: path.write_text(json.dumps({**json.loads(whole), "sources": [1]})),
        "whole": lambda path: path.write_text(whole),
    }
    for name, make in odd.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "status.json")
    with serve_all([tmp_path], "127.0.0.1", 0, None) as server:
        found = {each["pipeline"]: each["state"] for each in ask(server.url, "/api/pipelines")[1]["pipelines"]}
        assert set(found) == {"shop", "older", "other"}
        assert (found["older"], found["other"]) == ("unknown", "unknown")
        for each in ask(server.url, "/api/pipelines")[1]["pipelines"]:
            for part in ("status", "detail", "history"):
                assert ask(server.url, f"/api/p/{each['id']}/{part}")[0] in (200, 404, 500), "it answers"


def test_a_token_in_an_address_is_no_token(running: Running, one: str) -> None:
    headers = {"Content-Type": "application/json", "Cookie": f"token={TOKEN}"}
    body = {"action": "pause", "tables": ["public.orders"]}
    assert ask(running.url, f"/api/p/{one}/actions?token={TOKEN}", "POST", body, headers)[0] == 401
    assert (
        ask(running.url, f"/api/me?token={TOKEN}&authorization=Bearer+{TOKEN}", headers=headers)[1]["writable"] is False
    )


def test_a_directory_of_somebody_else_shows_no_file_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSOLE_TEST_TOKEN", TOKEN)
    planted, flag = tmp_path / "theirs", tmp_path / "ran"
    (planted / "dead_letters").mkdir(parents=True)
    (planted / "planted.py").write_text(f"open({str(flag)!r}, 'w')")
    file = planted / "pipeline.toml"
    file.write_text('connector_name = "x"\n[source]\nconnector = "planted:X"\n[sink]\nconnector = "console"\n')
    telemetry = Telemetry("theirs")
    telemetry.file = file
    telemetry.publish(planted)
    telemetry.close()
    secret = Secret(env="CONSOLE_TEST_TOKEN")
    for mode, shown in ((0o777, False), (0o700, True)):
        planted.chmod(mode)
        with serve_all([tmp_path], "127.0.0.1", 0, secret) as server:
            id = ask(server.url, "/api/pipelines")[1]["pipelines"][0]["id"]
            detail = ask(server.url, f"/api/p/{id}/detail")[1]
            acted = ask(server.url, f"/api/p/{id}/actions", "POST", {"action": "stop"}, AUTH)
        assert (detail["file"] is not None) is shown
        assert flag.exists() is shown, "where it is ours, the file is read and its connector loaded"
        if not shown:
            assert "belongs to another user" in detail["letters"]["error"]
            assert (acted[0], "belongs to another user" in acted[1]["error"]) == (409, True)


def test_stop_is_left_for_the_running_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSOLE_TEST_TOKEN", TOKEN)
    made = Running(tmp_path)
    try:
        until(lambda: made.telemetry.status()["epochs"] > 0)
        id = ask(made.url, "/api/pipelines")[1]["pipelines"][0]["id"]
        assert ask(made.url, f"/api/p/{id}/actions", "POST", {"action": "stop"}, AUTH)[0] == 200
        until(lambda: made.telemetry.status()["state"] == "stopped")
    finally:
        made.end()
    before = made.telemetry.status()["epochs"]
    made.database.put("public.orders", 1000, "of the next run")  # all others may be copied
    again = Running(tmp_path, prepared=False)
    try:
        until(lambda: again.telemetry.status()["epochs"] > 0)
        assert again.thread.is_alive(), f"the request was for the run before, of {before} epochs"
    finally:
        again.end()
