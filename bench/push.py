"""
What sources that are pushed to cost: the same server without its journal, the same JSON only parsed, the disk itself, a bare
subscriber that counts and drops.

Each part is a function in `PARTS`; `BENCH_PARTS=webhook,idle` runs some of them. The journal is on the disk of this checkout,
since a file system in memory has no fsync to wait for. CPU is that of the server's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from measure import ROOT, Bench

from penstock.runtime.journal import Journal
from penstock.source import SourceBatch
from penstock.testing.mosquitto import Mosquitto

MODULES = Path(__file__).parent / "modules"
REQUESTS = int(os.environ.get("BENCH_REQUESTS", 60_000))
CONNECTIONS = 64
TURNS = int(os.environ.get("BENCH_TURNS", 3))
LINES = 1000
"""Events in a request of NDJSON."""
APPEND_BYTES = int(os.environ.get("BENCH_BYTES", 512 << 20))
MESSAGES = int(os.environ.get("BENCH_MESSAGES", 150_000))
WINDOW = 1000
"""Messages that the broker may have under way to a subscriber, ours and the bare one."""
STEADY_SECS = int(os.environ.get("BENCH_STEADY_SECS", 20))
IDLE_SECS = float(os.environ.get("BENCH_IDLE_SECS", 30))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory on the disk of the checkout."""
    home = ROOT / "run"
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix="bench-push-") as directory:
        yield Path(directory)


@contextlib.contextmanager
def server(kind: str, directory: Path) -> Iterator[tuple[int, psutil.Process]]:
    """A webhook in a process of its own: its port, and the process."""
    command = [sys.executable, str(MODULES / "webhook_server.py"), kind, str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def load(port: int, requests: int, events: int, connections: int = CONNECTIONS) -> float:
    """The seconds that so many requests took."""
    command = [sys.executable, str(MODULES / "webhook_load.py"), *map(str, (port, requests, connections, events))]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def measured(kind: str, requests: int, events: int, connections: int = CONNECTIONS) -> tuple[float, float]:
    """Requests a second, and the server's CPU seconds for each."""
    with scratch() as directory, server(kind, directory) as (port, process):
        return loaded(port, process, requests, events, connections)


def loaded(port: int, process: psutil.Process, requests: int, events: int, connections: int) -> tuple[float, float]:
    load(port, max(connections, requests // 20), events, connections)
    before = _cpu(process)
    seconds = load(port, requests, events, connections)
    return requests / seconds, (_cpu(process) - before) / requests


def webhook(bench: Bench) -> None:
    """One event per request, and many; with the journal and without."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(TURNS):  # in turns, so that both meet the same machine
        for kind in ("bare", "journal"):
            found = measured(kind, REQUESTS, 1)
            best[kind] = max(best.get(kind, found), found)
    for kind, name in (("bare", "without a journal"), ("journal", "fsynced")):
        rate, cpu = best[kind]
        bench.row(
            f"webhook, {name}",
            f"{rate:,.0f} requests/s",
            f"{cpu * 1e6:.0f} µs of CPU a request, {CONNECTIONS} connections",
        )
    bench.claim("webhook_fsynced_vs_bare", best["journal"][0] / best["bare"][0], ">=", 0.7)
    bench.row(
        "webhook, fsynced against bare, by CPU",
        f"{best['bare'][1] / best['journal'][1]:.2f}",
        "of the server's process",
    )
    requests = max(16, REQUESTS // 200)
    rate, cpu = max(measured("journal", requests, LINES, 8) for _ in range(TURNS))
    parsed, parse_cpu = max(_parse_rate() for _ in range(TURNS))
    bench.row(
        "NDJSON over a webhook, fsynced", f"{rate * LINES:,.0f} events/s", f"{cpu / LINES * 1e6:.1f} µs of CPU an event"
    )
    bench.row("the same JSON parsed by orjson", f"{parsed:,.0f} events/s", f"{parse_cpu * 1e6:.1f} µs of CPU an event")
    bench.claim("ndjson_vs_parsing", rate * LINES / parsed, ">=", 0.7)
    bench.row("NDJSON against parsing, by CPU", f"{parse_cpu / (cpu / LINES):.2f}", "of the server's process")


def _parse_rate() -> tuple[float, float]:
    """Events a second, and CPU seconds for each."""
    sys.path.insert(0, str(MODULES))
    from webhook_load import request

    lines = request(LINES).partition(b"\r\n\r\n")[2]
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < 1:
        for line in lines.splitlines():
            orjson.loads(line)
        count += LINES
    return count / (time.perf_counter() - began), (time.process_time() - cpu) / count


def append(bench: Bench) -> None:
    """The journal against `dd` for the same bytes."""
    size = 4 << 20
    rows = pa.record_batch({"payload": pa.array([os.urandom(1024)] * (size // 1024), pa.binary())})
    best, raw = 0.0, 0.0
    for _ in range(TURNS):
        with scratch() as directory:
            journal = Journal(directory / "journal", max_bytes=4 * APPEND_BYTES, linger_ms=0)
            began = time.perf_counter()
            for _ in range(APPEND_BYTES // size):
                journal.append(SourceBatch(rows, stream="events"))
            journal.flush()
            best = max(best, APPEND_BYTES / (time.perf_counter() - began))
            journal.close()
        with scratch() as directory:
            command = [
                "dd",
                "if=/dev/zero",
                f"of={directory}/file",
                "bs=4M",
                f"count={APPEND_BYTES >> 22}",
                "conv=fsync",
            ]
            began = time.perf_counter()
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            raw = max(raw, APPEND_BYTES / (time.perf_counter() - began))
    bench.row("journal append", f"{best / 1e6:,.0f} MB/s", f"{APPEND_BYTES >> 20} MiB in batches of 4 MiB")
    bench.row("dd conv=fsync", f"{raw / 1e6:,.0f} MB/s", "the same bytes")
    bench.claim("journal_append_vs_dd", best / raw, ">=", 0.6)


PIPELINE = """
connector_name = "push"
delivery = "exactly-once"
[processing]
state_dir = "state"
{sources}
[[schemas]]
topic = "/#"
schema_type = "json"
[sink]
connector = "delta"
path = "lake/{{topic}}"
"""

MQTT = """
[[sources]]
name = "mqtt"
connector = "mqtt"
url = "{url}"
topics = ["events"]
max_inflight = {window}
"""

OTHERS = """
[[sources]]
name = "hook"
connector = "webhook"
port = 0
auth = {{ type = "none" }}
[[sources.endpoints]]
path = "/events"
stream = "hooks"
[[sources]]
name = "lines"
connector = "tcp"
url = "tcp://127.0.0.1:0"
[[sources]]
name = "frames"
connector = "websocket"
mode = "server"
url = "ws://127.0.0.1:0"
[[sources]]
name = "poll"
connector = "http_poll"
url = "{url}"
stream = "polled"
interval_secs = 5
"""


@contextlib.contextmanager
def pipeline(directory: Path, sources: str) -> Iterator[psutil.Process]:
    """`penstock run`, until the block ends; it must not end before."""
    (directory / "pipeline.toml").write_text(PIPELINE.format(sources=sources))
    command = [sys.executable, "-m", "penstock", "run", str(directory / "pipeline.toml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
        assert process.poll() is None, "the pipeline has ended"
    finally:
        process.terminate()
        process.wait(60)


class Visible:
    """Reads each version of a Delta table as soon as its entry is there: what a reader could see, and when."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = 0
        self.rows = 0
        self.latencies: list[float] = []

    def look(self) -> None:
        while (entry := self._path / "_delta_log" / f"{self._version:020d}.json").exists():
            seen = time.time()
            for line in entry.read_text().splitlines():
                added = json.loads(line).get("add")
                if added and added["dataChange"]:  # upkeep rewrites rows that were seen
                    sent = pq.read_table(self._path / added["path"], columns=["sent"])["sent"].to_pylist()
                    self.rows += len(sent)
                    self.latencies += [seen - each for each in sent]
            self._version += 1

    def wait(self, rows: int) -> None:
        until = time.monotonic() + 300
        while self.rows < rows:
            assert time.monotonic() < until, f"{self.rows} of {rows} rows are there"
            self.look()
            time.sleep(0.005)


def flood(port: int, count: int, rate: int = 0, first: int = 0) -> None:
    command = [sys.executable, str(MODULES / "mqtt_flood.py"), *map(str, (port, "events", count, rate, first))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def mqtt(bench: Bench) -> None:
    """Messages of QoS 1 into typed rows of Delta, against a bare subscriber; and how long one takes at a steady rate."""
    with Mosquitto(f"max_inflight_messages {WINDOW}", "log_type none") as broker:
        command = [sys.executable, str(MODULES / "paho_count.py"), *map(str, (broker.port, "events", MESSAGES, WINDOW))]
        bare = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert bare.stdout is not None
        assert bare.stdout.readline() == "ready\n"
        began = time.time()
        flood(broker.port, MESSAGES)
        ended, bare_cpu = map(float, bare.stdout.readline().split())
        bare.wait(60)
        paho_rate = MESSAGES / (ended - began)
        with scratch() as directory, pipeline(directory, MQTT.format(url=broker.url, window=WINDOW)) as tree:
            table = Visible(directory / "lake" / "events")
            warm = 2000
            _await_subscription(broker.port, table, warm)
            before, began = _cpu(tree), time.time()
            threading.Thread(target=flood, args=(broker.port, MESSAGES, 0, warm), daemon=True).start()
            goal = table.rows + MESSAGES
            table.wait(goal)
            rate, cpu = MESSAGES / (time.time() - began), (_cpu(tree) - before) / MESSAGES
            table.latencies = []
            first, rate_steady = goal + 10_000, 1000
            flood(broker.port, 3 * rate_steady, rate_steady, first)  # it settles
            table.wait(table.rows + 1)
            steady = threading.Thread(
                target=flood,
                args=(broker.port, STEADY_SECS * rate_steady, rate_steady, first + 3 * rate_steady),
                daemon=True,
            )
            table.wait(goal + 3 * rate_steady)
            table.latencies = []
            steady.start()
            table.wait(goal + (3 + STEADY_SECS) * rate_steady)
            ids = DeltaTable(directory / "lake" / "events").to_pyarrow_table(columns=["id"])["id"].to_pylist()
            assert len(ids) == len(set(ids)), "a message is there twice"
            wanted = {*range(warm, warm + MESSAGES), *range(first, first + (3 + STEADY_SECS) * rate_steady)}
            assert wanted <= set(ids), "a message is not there"
    cuts = statistics.quantiles(table.latencies, n=100)
    bench.row(
        "bare paho subscriber", f"{paho_rate:,.0f} messages/s", f"{bare_cpu / MESSAGES * 1e6:.0f} µs of CPU a message"
    )
    bench.row(
        "mqtt QoS 1 into typed Delta",
        f"{rate:,.0f} messages/s",
        f"{cpu * 1e6:.0f} µs of CPU a message with driver, JVM and workers; {WINDOW} messages under way, both",
    )
    bench.claim("mqtt_vs_paho", rate / paho_rate, ">=", 0.8)
    bench.row("sent → visible in Delta, p50", f"{cuts[49] * 1000:,.0f} ms", "at 1,000 messages/s")
    bench.row("sent → visible in Delta, p99", f"{cuts[98] * 1000:,.0f} ms", "at 1,000 messages/s")
    bench.claim("push_p50_vs_400ms", cuts[49] / 0.4, "<=", 1)
    bench.claim("push_p99_vs_1200ms", cuts[98] / 1.2, "<=", 1)


def _await_subscription(port: int, table: Visible, count: int) -> None:
    """Send until the pipeline has some: before it has subscribed, nobody keeps them. Then wait until all is quiet."""
    until, first = time.monotonic() + 300, 0
    while not table.rows:
        assert time.monotonic() < until, "the pipeline takes no messages"
        first -= count  # no id twice: several of these may arrive
        flood(port, count, 0, first)
        time.sleep(1)
        table.look()
    for _ in range(3):
        rows = -1
        while rows != table.rows:
            rows = table.rows
            time.sleep(2)
            table.look()


def idle(bench: Bench) -> None:
    """A pipeline with five different sources and no traffic, with all its processes."""
    with Mosquitto() as broker, scratch() as directory, _quiet_api() as url:
        sources = MQTT.format(url=broker.url, window=WINDOW) + OTHERS.format(url=url)
        with pipeline(directory, sources) as tree:
            time.sleep(30)  # Spark warms up
            before = _cpu(tree)
            time.sleep(IDLE_SECS)
            share = (_cpu(tree) - before) / IDLE_SECS
    bench.row(
        "five idle sources",
        f"{share * 100:.1f} % of a core",
        "mqtt, webhook, tcp, websocket, http_poll; driver, JVM and workers",
    )
    bench.claim("idle_vs_3_percent", share / 0.03, "<=", 1)


def _cpu(tree: psutil.Process) -> float:
    total = 0.0
    for process in [tree, *tree.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def _quiet_api() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None:
            pass

    api = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{api.server_address[1]}/"
    finally:
        api.shutdown()
        api.server_close()


PARTS: dict[str, Callable[[Bench], None]] = {
    "webhook": webhook,
    "append": append,
    "mqtt": mqtt,
    "idle": idle,
}


def main() -> None:
    bench = Bench("push", "Sources that are pushed to", part="BENCH_PARTS" in os.environ)
    for name in os.environ.get("BENCH_PARTS", ",".join(PARTS)).split(","):
        PARTS[name](bench)
    bench.row(
        "load of the machine meanwhile", f"{os.getloadavg()[1]:.1f}", f"over five minutes, on {os.cpu_count()} cores"
    )
    bench.finish()


if __name__ == "__main__":
    main()
