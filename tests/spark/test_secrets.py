"""Planted secrets are found nowhere: not in files, logs, process arguments, metrics, status, the console or Spark's own page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SECRET, TOKEN = "planted-Swordfish-91", "planted-Token-4711"

CONNECTOR = '''
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
import pyarrow as pa
from penstock.config import Config, Secret
from penstock.errors import RetryableError
from penstock.source import Position, RangeSource, ReadLimit, Schemas, SourceBatch, SourceContext


class LockedConfig(Config):
    password: Secret
    flag: Path


class Next(Position):
    row: int = 0


class Locked(RangeSource[LockedConfig, Next]):
    """Two good epochs. Then its client puts the password into all that it says, as a cause and by itself."""

    name = "locked"

    def open(self, context: SourceContext = SourceContext()) -> None:
        self._password = self.config.password.reveal()

    def schema(self) -> Schemas:
        return {"rows": pa.schema([("row", pa.int64())])}

    def latest(self, start: Next, limit: ReadLimit) -> Next:
        return Next(row=start.row + 1)

    def split(self, start: Next, end: Next) -> Sequence[int]:
        return [end.row]

    def read(self, split: int) -> Iterator[SourceBatch]:
        if split > 2:
            client = ValueError(f"FATAL: no access for user with password {self._password}")
            if self.config.flag.exists():
                raise client
            raise RetryableError("the server refuses it") from client
        yield SourceBatch(pa.record_batch([pa.array([split], pa.int64())], names=["row"]), stream="rows")
'''

PIPELINE = """
connector_name = "planted"
[processing]
metrics_port = 0
max_retries = 100000
retry_backoff_ms = 50
max_backoff_ms = 200
console_token = { env = "PLANTED_TOKEN" }
log_level = "debug"
[source]
connector = "locked:Locked"
password = { env = "PLANTED_PASSWORD" }
flag = "flag"
[sink]
connector = "files"
path = "lake"
"""


def until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.1)


def status(home: Path) -> dict[str, object]:
    try:
        return dict(json.loads((home / "state" / "status.json").read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def listed(home: Path) -> set[tuple[str, int]]:
    return {(each["address"], each["port"]) for each in status(home).get("ports", [])}  # type: ignore[attr-defined]


def sockets(pid: int) -> set[tuple[str, int]]:
    """Where the process and all that it has started listen, as another program finds it."""
    process = psutil.Process(pid)
    found = [each for one in (process, *process.children(recursive=True)) for each in one.net_connections("tcp")]
    return {
        (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN
    }


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


def arguments(pid: int) -> Iterator[bytes]:
    """Of the process and of all that it has started."""
    yield Path(f"/proc/{pid}/cmdline").read_bytes()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from arguments(int(child))


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("java")
def test_planted_secrets_are_found_nowhere(tmp_path: Path) -> None:
    (tmp_path / "locked.py").write_text(CONNECTOR)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "events").mkdir()
    conf = {
        "spark.ui.enabled": "true",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(tmp_path / "events"),
    }
    submit = " ".join(f"--conf {name}={value}" for name, value in conf.items())
    environment = {
        **os.environ,
        "PLANTED_PASSWORD": SECRET,
        "PLANTED_TOKEN": TOKEN,
        "PYSPARK_SUBMIT_ARGS": f"{submit} pyspark-shell",
        "CI": os.environ.get("CI", ""),
    }
    command = [sys.executable, "-m", "penstock", "run", str(tmp_path / "pipeline.toml"), "--master", "local[1]"]
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=tmp_path)
    seen: dict[str, bytes] = {}
    try:
        until(lambda: (status(tmp_path).get("retries") or {}).get("pipeline", 0) > 2, process)  # type: ignore[attr-defined]
        url = str(status(tmp_path)["url"])
        seen |= {path: fetch(url + path) for path in ("/metrics", "/api/status", "/api/pipelines")}
        id = json.loads(seen["/api/pipelines"])["pipelines"][0]["id"]
        seen |= {part: fetch(f"{url}/api/p/{id}/{part}") for part in ("status", "detail", "history")}
        seen["arguments"] = b"\n".join(arguments(process.pid))
        assert b"pipeline.toml" in seen["arguments"]
        until(lambda: status(tmp_path).get("ports"), process)
        until(lambda: listed(tmp_path) == sockets(process.pid), process)
        assert {address for address, _ in sockets(process.pid)} == {"127.0.0.1"}, "Spark's own page as well"
        ports = [each["port"] for each in status(tmp_path)["ports"] if each["program"] == "java"]  # type: ignore[attr-defined]
        seen |= spark_pages(ports)
        assert b"the server refuses it" in seen["stages"], "Spark's page shows the failure itself"
        (tmp_path / "flag").touch()
        assert process.wait(300) == 1
    finally:
        process.kill()
        process.wait()
    files = {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert any(name.startswith("events/") and b"the server refuses it" in text for name, text in files.items())
    assert b"PEN-5012" in files["out"]
    planted = (SECRET.encode(), TOKEN.encode())
    assert [name for name, text in {**files, **seen}.items() if any(each in text for each in planted)] == []
    everything = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o077 for path in everything}
    assert {name: oct(mode) for name, mode in modes.items() if mode} == {}


def spark_pages(ports: list[int]) -> dict[str, bytes]:
    """What Spark's own page says of applications, stages, jobs and the environment."""
    for port in ports:
        try:
            found = fetch(f"http://127.0.0.1:{port}/api/v1/applications")
            name = json.loads(found)[0]["id"]
        except (OSError, ValueError, KeyError, IndexError):
            continue
        base = f"http://127.0.0.1:{port}"
        api = {part: fetch(f"{base}/api/v1/applications/{name}/{part}") for part in ("stages", "jobs", "environment")}
        number = max(json.loads(api["stages"]), key=lambda each: each["stageId"])["stageId"]
        pages = {f"page {part}": fetch(f"{base}/{part}/") for part in ("jobs", "stages", "environment", "executors")}
        return {**api, **pages, "page stage": fetch(f"{base}/stages/stage/?id={number}&attempt=0")}
    raise AssertionError(f"Spark's page is on none of {ports}")
