"""A disk that is really full below a journal: sources wait, health says why, and they go on when there is room."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from brokers import peer
from connectors.pushed import PATIENCE_SECS, free_port
from connectors.receiver import receiving
from penstock.connectors.files.sink import read_published
from penstock.runtime.journal.disk import free_bytes
from penstock.testing.mosquitto import Mosquitto, answers, is_installed

PAD = "x" * 20_000
"""More than what is left of a page that a file has already."""

FULL = """
connector_name = "full"
delivery = "exactly-once"
[processing]
state_dir = "{disk}/state"
metrics_port = {metrics}
health_timeout_secs = 600
[[sources]]
name = "hook"
connector = "webhook"
port = {hook}
auth = {{ type = "none" }}
[[sources.endpoints]]
path = "/events"
stream = "events"
[[sources]]
name = "lines"
connector = "tcp"
url = "tcp://127.0.0.1:{lines}"
acknowledge = true
[[sources]]
name = "frames"
connector = "websocket"
mode = "server"
url = "ws://127.0.0.1:{frames}"
acknowledge = true
[[sources]]
name = "broker"
connector = "mqtt"
url = "{broker}"
client_id = "full"
topics = ["sent"]
keepalive_secs = 1
[[sources]]
name = "poll"
connector = "http_poll"
url = "{api}"
stream = "polled"
key = ["id", "pad"]
interval_secs = 0.1
[[schemas]]
topic = "/#"
schema_type = "json"
[sink]
connector = "files"
path = "{lake}/{{topic}}"
"""

ON_A_SMALL_DISK = """
import sys
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.runtime.journal import disk
from penstock.testing import ForkEngine
from penstock.web import serve
if sys.argv[2] == "refused":
    disk.RESERVE_BYTES = -(1 << 40)  # so that the write itself finds the disk full
supervisor.run(Pipeline.from_toml(sys.argv[1]), ForkEngine(1), serve=serve)
"""


@contextlib.contextmanager
def small_disk(directory: Path, *command: str) -> Iterator[Path]:
    """Run a command that has a file system of 64 MiB at `directory`; gives the way to it from here."""
    directory.mkdir()
    mounted = 'mount -t tmpfs -o size=64m none "$0" && exec "$@"'
    unshare = ["unshare", *([] if os.getuid() == 0 else ["-r"]), "-m", "sh", "-c", mounted, str(directory)]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let a test mount a file system of its own")
    process = subprocess.Popen([*unshare, *command])
    try:
        yield Path(f"/proc/{process.pid}/root{directory}")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["reserved", "refused"])
def test_a_full_disk_holds_sources_until_there_is_room_and_health_says_why(
    how: str, tmp_path: Path, need: Callable[[bool, str], None]
) -> None:
    need(is_installed(), "mosquitto is not installed: `make servers` installs it")
    ports = {name: free_port() for name in ("hook", "lines", "frames", "metrics")}
    hook, metrics = ports["hook"], ports["metrics"]
    file, disk = tmp_path / "pipeline.toml", tmp_path / "disk"
    records: list[Any] = []
    with Mosquitto() as broker, receiving(lambda asked: (200, records)) as api:
        file.write_text(FULL.format(disk=disk, lake=tmp_path / "lake", broker=broker.url, api=api.url, **ports))
        with small_disk(disk, sys.executable, "-c", ON_A_SMALL_DISK, str(file), how) as inside:
            patiently(lambda: all(map(answers, ports.values())), "the pipeline")
            patiently(lambda: "Sending SUBACK to full" in broker.log(), "the subscription")
            assert post(hook, 1)[0] == 200
            patiently(lambda: stored(tmp_path / "lake" / "events") == [1], "the first epoch")
            filler = inside / "filler"
            fill(filler, leave=8 << 20 if how == "reserved" else 0)
            with _senders(ports, broker, records) as heard:
                said: list[int] = []
                waiting = threading.Thread(target=lambda: said.append(post(hook, 2)[0]))
                waiting.start()
                patiently(lambda: len(without_room(metrics) or ()) == 5, "health to say why all sources wait")
                code, headers = post(hook, 3)
                assert (code, "Retry-After" in headers, said) == (503, True, [])
                pings = broker.log().count("PINGREQ from full")
                patiently(
                    lambda: broker.log().count("PINGREQ from full") > pings + 1, "the broker to hear of the client"
                )
                assert heard(0.2) == (None, None, 0), "nothing is acknowledged"
                filler.unlink()
                patiently(
                    lambda: heard(PATIENCE_SECS) == ("1\n", "1", 1), "each to be acknowledged once there was room"
                )
                waiting.join(PATIENCE_SECS)
                assert said == [200]
            assert post(hook, 4)[0] == 200
            patiently(lambda: without_room(metrics) == [], "health to say that it is over")
            patiently(lambda: stored(tmp_path / "lake" / "events") == [1, 2, 4], "all that was acknowledged, once")
            for stream in ("lines", "messages", "sent", "polled"):
                patiently(lambda: stored(tmp_path / "lake" / stream) == [1], f"the one of {stream}")  # noqa: B023


Heard = tuple[str | None, str | None, int]


@contextlib.contextmanager
def _senders(ports: dict[str, int], broker: Mosquitto, records: list[Any]) -> Iterator[Callable[[float], Heard]]:
    """Each sends one message in its way; says what a line server, a websocket server and a broker have acknowledged so far."""
    body = {"id": 1, "pad": PAD}
    with (
        socket.create_connection(("127.0.0.1", ports["lines"]), PATIENCE_SECS) as line,
        connect(f"ws://127.0.0.1:{ports['frames']}", ping_interval=None) as frames,
        peer(broker) as publisher,
    ):
        line.sendall(json.dumps(body).encode() + b"\n")
        frames.send(json.dumps(body))
        publisher.publish_all("sent", [json.dumps(body).encode()])
        records.append(body)
        found: list[str | None] = [None, None]

        def heard(patience: float) -> Heard:
            line.settimeout(patience)
            with contextlib.suppress(TimeoutError):
                found[0] = found[0] or line.recv(10).decode()
            with contextlib.suppress(TimeoutError):
                found[1] = found[1] or str(frames.recv(timeout=patience))
            return found[0], found[1], broker.log().count("Received PUBACK from full ")

        yield heard


def patiently(condition: Callable[[], Any], what: str) -> None:
    """A whole interpreter starts in between, which takes its time on a busy machine."""
    until = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.05)


def fill(filler: Path, leave: int) -> None:
    """Write until the disk has no more left than this."""
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while free_bytes(filler.parent) > leave:
            file.write(bytes(4096))


def post(port: int, id: int) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECS)
    connection.request("POST", "/events", json.dumps({"id": id, "pad": PAD}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.headers


def without_room(port: int) -> list[str] | None:
    """The sources that wait for room on the disk, as the pipeline says; None: it is too busy to answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECS)
    try:
        connection.request("GET", "/api/status")
        sources = json.loads(connection.getresponse().read())["sources"]
        return [name for name, each in sources.items() if "room on the disk" in each["reason"]]
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def stored(path: Path) -> list[int]:
    rows = read_published(path) if path.exists() else None
    return sorted(rows["id"].to_pylist()) if rows is not None and rows.num_rows else []
