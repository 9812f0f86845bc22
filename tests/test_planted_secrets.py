"""Every connector that takes a secret: neither `check` nor what it leaves shows it, also if the other side sends it back."""
# ruff: noqa: E501 (inline tables of TOML are one line)

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import paho.mqtt.client as paho
import psycopg
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from pydantic import BaseModel
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from console_pipeline import until
from penstock.cli import main
from penstock.config import Secret
from penstock.pipeline import registry
from penstock.runtime.telemetry import read_status
from penstock.testing.mosquitto import Mosquitto, free_port, is_installed
from penstock.testing.postgres import PostgresServer
from penstock.testing.s3 import S3Server

pytestmark = pytest.mark.processes

PLANTED = "planted-Narwhal-77"
REF = '{ env = "PLANTED_SECRET" }'

S3 = f"""path = "s3://bucket/{{topic}}"
storage_options = {{ endpoint = "http://HOST", allow_http = true, region = "x", access_key_id = {REF}, secret_access_key = {REF} }}
"""
KAFKA = f"""bootstrap_servers = "HOST"
options = {{ "security.protocol" = "SASL_PLAINTEXT", "sasl.mechanism" = "PLAIN", "sasl.username" = "me", "sasl.password" = {REF} }}
"""
POSTGRES = f'dsn = "postgresql://me@HOST/db"\npassword = {REF}\n'

OPTIONS = {
    ("source", "files"): S3.replace("{topic}", "*.jsonl"),
    ("source", "postgres_cdc"): POSTGRES + 'tables = ["*"]\n',
    ("source", "postgres_capture"): POSTGRES + 'tables = ["*"]\n',
    ("source", "kafka"): KAFKA + 'topics = ["orders"]\n',
    ("source", "sql_poll"): POSTGRES + 'tables = ["t"]\nkey = ["id"]\ncursor = "id"\n',
    ("source", "webhook"): f"""port = 0
endpoints = [{{ path = "/in", stream = "in" }}]
auth = {{ type = "api_key", keys = [{REF}] }}
""",
    (
        "source",
        "http_poll",
    ): f'url = "http://HOST/items"\nstream = "items"\nauth = {{ type = "bearer", token = {REF} }}\n',
    ("sink", "http"): f'url = "http://HOST/items"\nauth = {{ type = "bearer", token = {REF} }}\n',
    ("source", "mqtt"): f'url = "mqtt://HOST"\nusername = "me"\npassword = {REF}\ntopics = ["a/#"]\n',
    ("sink", "mqtt"): f'url = "mqtt://HOST"\nusername = "me"\npassword = {REF}\n',
    ("source", "danube"): f'url = "http://HOST"\ntoken = {REF}\ntopics = ["/default/x"]\nsubscription = "s"\n',
    ("sink", "danube"): f'url = "http://HOST"\ntoken = {REF}\n',
    ("source", "websocket"): f'url = "ws://HOST/"\ntoken = {REF}\n',
    ("sink", "files"): S3,
    ("sink", "postgres"): POSTGRES,
    ("sink", "kafka"): KAFKA,
    ("sink", "delta"): S3,
    ("sink", "iceberg"): S3,
}


def takes_a_secret(annotation: Any, seen: tuple[type, ...] = ()) -> bool:
    if not isinstance(annotation, type):
        return any(takes_a_secret(each, seen) for each in get_args(annotation))
    if issubclass(annotation, Secret):
        return True
    inside = issubclass(annotation, BaseModel) and annotation not in seen
    fields = annotation.model_fields.values() if inside else ()  # type: ignore[attr-defined]
    return any(takes_a_secret(each.annotation, (*seen, annotation)) for each in fields)


def test_every_connector_that_takes_a_secret_is_tried() -> None:
    found = {
        (entry.kind, entry.name)
        for entry in registry.BUILT_IN.values()
        if takes_a_secret(registry.config_of(registry.load(entry.kind, entry.name)))
    }
    assert found == set(OPTIONS)


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """Refuses whatever it is asked, and sends it back."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(2)
                asked = client.recv(4096)
                body = asked + PLANTED.encode()
                client.sendall(b"HTTP/1.1 403 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()


@pytest.mark.parametrize(("kind", "name"), OPTIONS, ids=[f"{name} {kind}" for kind, name in OPTIONS])
def test_a_secret_is_shown_nowhere(
    kind: str,
    name: str,
    echo: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", PLANTED)
    monkeypatch.setattr("penstock.runtime.sampling.WAIT_SECS", 0.5)
    other = '[sink]\nconnector = "console"\n' if kind == "source" else '[source]\nconnector = "generator"\n'
    options = OPTIONS[kind, name].replace("HOST", echo)  # type: ignore[index]
    file = tmp_path / "pipeline.toml"
    file.write_text(f'connector_name = "planted"\n[{kind}]\nconnector = "{name}"\n{options}{other}')
    caplog.set_level(logging.DEBUG, "penstock")
    with pytest.raises(SystemExit) as ended:
        main(["check", str(file), "--sample", "1"])
    out, err = capfd.readouterr()
    assert "PEN-1003" not in err, err
    assert "PEN-1004" not in err, err
    assert ended.value.code in (0, 1), err
    left = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != file)
    shown = out + err + caplog.text + left.decode("utf-8", "replace")
    assert PLANTED not in shown
    assert PLANTED not in Path(f"/proc/{os.getpid()}/cmdline").read_text()


REGISTRY = f"""
connector_name = "planted"
[registry]
type = "confluent"
url = "URL"
username = "me"
password = {REF}
[[schemas]]
topic = "#"
schema_type = "avro"
subject = "orders"
[source]
connector = "generator"
[sink]
connector = "console"
"""


class Repeating(BaseHTTPRequestHandler):
    """A registry that says in its own form of an error what it was given."""

    def do_GET(self) -> None:
        body = json.dumps({"error_code": 40101, "message": f"no entry with {self.headers['Authorization']}"}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not of interest."""


def test_credentials_of_basic_authentication_are_not_shown_as_they_travel_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", PLANTED)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Repeating)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = tmp_path / "pipeline.toml"
    file.write_text(REGISTRY.replace("URL", f"http://127.0.0.1:{server.server_port}"))
    try:
        with pytest.raises(SystemExit):
            main(["check", str(file)])
    finally:
        server.shutdown()
        server.server_close()
    shown = "".join(capfd.readouterr())
    assert "no entry with Basic …" in shown
    assert b64encode(f"me:{PLANTED}".encode()).decode() not in shown


RUNNING = f"""
connector_name = "planted"
[processing]
metrics_port = 0
on_error = "dead_letter"
max_retries = 100000
retry_backoff_ms = 50
max_backoff_ms = 200
epoch_interval_ms = 100
log_level = "debug"
console_token = {REF}
[[sources]]
name = "hooks"
connector = "webhook"
port = PORT
endpoints = [{{ path = "/in", stream = "hooked" }}]
auth = {{ type = "api_key", keys = [{REF}] }}
[[sources]]
name = "items"
connector = "http_poll"
url = "http://HOST/items"
stream = "polled"
interval_secs = 0.2
auth = {{ type = "bearer", token = {REF} }}
[[sources]]
name = "database"
connector = "postgres_cdc"
dsn = "DATABASE"
password = {REF}
tables = ["public.planted"]
slot = "planted"
[[sources]]
name = "captured"
connector = "postgres_capture"
dsn = "DATABASE"
password = {REF}
tables = ["public.captured"]
slot = "planted_capture"
publication = "planted_capture"
[[sources]]
name = "asked"
connector = "sql_poll"
dsn = "DATABASE"
password = {REF}
tables = ["public.asked"]
key = ["id"]
cursor = "id"
settle_ms = 1
poll_interval_ms = 200
[[sources]]
name = "feed"
connector = "websocket"
url = "ws://FEED/"
token = {REF}
stream = "fed"
[[sources]]
name = "things"
connector = "mqtt"
url = "BROKER"
username = "me"
password = {REF}
topics = ["in/#"]
[[schemas]]
topic = "#"
schema_type = "json"
[[sinks]]
name = "api"
connector = "http"
url = "http://HOST/rows"
max_tries = 1
auth = {{ type = "bearer", token = {REF} }}
[[sinks]]
name = "lake"
connector = "delta"
path = "BUCKET/{{topic}}"
storage_options = OPTIONS
[[sinks]]
name = "tables"
connector = "iceberg"
path = "BUCKET/ice/{{topic}}"
catalog_uri = "CATALOG"
storage_options = OPTIONS
[[sinks]]
name = "mirror"
connector = "postgres"
dsn = "DATABASE"
password = {REF}
table = "copies.{{topic}}"
[[sinks]]
name = "told"
connector = "mqtt"
url = "BROKER"
username = "me"
password = {REF}
topic = "out"
"""


RUN = f"""
import logging, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from console_pipeline import Running
logging.basicConfig()
logging.getLogger("penstock").setLevel(logging.DEBUG)
made = Running(Path(sys.argv[1]), prepared=False)
sys.stdin.read()
made.end()
"""
"""In an interpreter of its own: a task that is forked beside the clients of other tests may wait for ever."""


class Talkative(BaseHTTPRequestHandler):
    """Asks for the token, and says it in everything that it refuses."""

    is_away = False
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        rows = json.dumps([{"id": number} for number in range(self.asked)]).encode()
        self._answer(*((503, self._said()) if self.is_away else (200, rows)))

    def do_POST(self) -> None:
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_bad = row["id"] % 3 == 0
        self._answer(503 if self.is_away else 422 if is_bad else 200, self._said())

    def _said(self) -> bytes:
        return f"no entry with {self.headers['Authorization']}".encode()

    def _answer(self, code: int, body: bytes) -> None:
        assert self.headers["Authorization"] == f"Bearer {PLANTED}"
        self.send_response(code, "OK" if code == 200 else f"no entry {PLANTED}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not of interest."""


@pytest.fixture
def database(server: PostgresServer) -> Iterator[str]:
    """A database with a table, whose user has to give the planted password."""
    rules = server.data / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text("host all planted 127.0.0.1/32 scram-sha-256\n" + before)
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE planted SUPERUSER LOGIN PASSWORD '{PLANTED}'")
        admin.execute("CREATE DATABASE planted OWNER planted")
        admin.execute("SELECT pg_reload_conf()")
        dsn = server.dsn.replace("postgres@", "planted@").rpartition("/")[0] + "/planted"
        until(lambda: asks_for_a_password(dsn))
        with psycopg.connect(dsn, password=PLANTED) as own:
            for table in ("planted", "captured", "asked"):
                own.execute(f"CREATE TABLE {table} (id int PRIMARY KEY); INSERT INTO {table} VALUES (1), (3)")
            own.execute("CREATE SCHEMA copies")
        yield dsn
        rules.write_text(before)
        admin.execute("SELECT pg_reload_conf()")
        admin.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = 'planted'")
        admin.execute("DROP DATABASE planted WITH (FORCE)")
        admin.execute("DROP ROLE planted")


def asks_for_a_password(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError as error:
        return "no password supplied" in str(error)
    return False


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory, need: Callable[[object, str], None]) -> Iterator[Mosquitto]:
    """A broker that lets nobody in without the planted password."""
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    users = tmp_path_factory.mktemp("mosquitto") / "users"
    subprocess.run(["mosquitto_passwd", "-b", "-c", users, "me", PLANTED], check=True, capture_output=True)
    users.chmod(0o644)
    with Mosquitto(f"password_file {users}", anonymous=False) as running:
        yield running


def publish(broker: Mosquitto, number: int) -> None:
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.username_pw_set("me", PLANTED)
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    client.publish("in/things", json.dumps({"id": number}), 1).wait_for_publish(60)
    client.disconnect()
    client.loop_stop()


@pytest.fixture
def feed() -> Iterator[str]:
    """A server of a websocket that wants the token, sends a message and stays."""

    def serve_one(client: Any) -> None:
        assert client.request.headers["Authorization"] == f"Bearer {PLANTED}"
        client.send('{"id": 1}')
        with contextlib.suppress(ConnectionClosed):
            client.recv(120)

    with serve(serve_one, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def test_a_running_pipeline_shows_its_secrets_nowhere(
    tmp_path: Path,
    s3: S3Server,
    database: str,
    broker: Mosquitto,
    feed: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLANTED_SECRET", PLANTED)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Its", (Talkative,), {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = free_port()
    options = f'{{ endpoint = "{s3.endpoint}", allow_http = true, region = "us-east-1", access_key_id = {REF}, secret_access_key = {REF} }}'
    text = RUNNING.replace("PORT", str(port)).replace("HOST", f"127.0.0.1:{server.server_port}")
    text = text.replace("DATABASE", database).replace("BROKER", broker.url).replace("FEED", feed)
    text = text.replace("CATALOG", f"sqlite:///{tmp_path}/catalog.db")
    (tmp_path / "pipeline.toml").write_text(text.replace("BUCKET", s3.bucket()).replace("OPTIONS", options))
    made = subprocess.Popen([sys.executable, "-c", RUN, tmp_path], stdin=subprocess.PIPE)
    status = lambda: read_status(tmp_path / "state") or {}  # noqa: E731
    seen: dict[str, str] = {}
    try:
        until(lambda: is_open(port) and status().get("url"))
        url = status()["url"]
        send(port, 1)
        send(port, 3)
        until(lambda: status()["dead_letters"] > 3 and status()["sinks"]["lake"]["rows"] > 3)
        until(lambda: status()["sources"]["database"]["rows"] == 2 and status()["sinks"]["told"]["rows"] > 3)
        until(lambda: {status()["sources"][name]["rows"] for name in ("captured", "asked")} == {2})
        until(lambda: status()["sources"]["feed"]["rows"] == 1)
        until(lambda: all(status()["sinks"][name]["rows"] > 3 for name in ("tables", "mirror")))
        publish(broker, 1)
        until(lambda: status()["sources"]["things"]["rows"] == 1)
        assert refused(port) == 401
        server.RequestHandlerClass.is_away = True  # type: ignore[attr-defined]
        send(port, 4)
        until(lambda: {"source:items", "pipeline"} <= {n for n, c in status()["retries"].items() if c > 1})
        until((tmp_path / "state" / "history" / "fine.ring").exists)
        id = json.loads(fetch(url + "/api/pipelines"))["pipelines"][0]["id"]
        until(lambda: json.loads(fetch(f"{url}/api/p/{id}/detail"))["letters"].get("samples"))
        pages = (
            "/metrics",
            "/api/status",
            "/api/pipelines",
            "/healthz",
            *(f"/api/p/{id}/{p}" for p in ("status", "detail", "history")),
        )
        seen = {page: fetch(url + page) for page in pages}
        server.RequestHandlerClass.is_away = False  # type: ignore[attr-defined]
        made.communicate(b"end", timeout=90)
    finally:
        made.kill()
        made.wait()
        server.shutdown()
        server.server_close()
    for command in ("status", "dlq show", "logs", "offsets show", "peek"):
        with contextlib.suppress(SystemExit):
            main([*command.split(), str(tmp_path / "pipeline.toml")])
    seen["shown"] = "".join(capfd.readouterr())
    files = {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert any("journal" in name for name in files)
    assert any("history" in name for name in files)
    assert "was answered 503" in seen["shown"]
    seen |= {name: held.decode("utf-8", "replace") for name, held in files.items()}
    assert [name for name, held in seen.items() if PLANTED in held] == []
    everything = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
    open_to_others = {str(path.relative_to(tmp_path)) for path in everything if path.stat().st_mode & 0o077}
    assert open_to_others == set(), "the journal, dead letters and all else are for this user alone"


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60):
        return True
    return False


def send(port: int, number: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/in", json.dumps({"id": number}).encode())
    request.add_header("X-API-Key", PLANTED)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def refused(port: int) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/in", b"{}", {"X-API-Key": PLANTED + "x"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    assert PLANTED not in error.value.read().decode()
    return error.value.code


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:  # not healthy, and why
        return error.read().decode()
