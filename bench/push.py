"""
What sources that are pushed to cost: the same server without its journal, the same JSON only parsed, the disk itself.

Each part is a function in `PARTS`; `BENCH_PARTS=webhook,idle` runs some of them. The journal is on the disk of this checkout,
since a file system in memory has no fsync to wait for. CPU is that of the server's process.
"""

from __future__ import annotations

import contextlib
import os
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
from measure import ROOT, Bench

from penstock.runtime.journal import Journal
from penstock.source import SourceBatch

MODULES = Path(__file__).parent / "modules"
REQUESTS = int(os.environ.get("BENCH_REQUESTS", 60_000))
CONNECTIONS = 64
TURNS = int(os.environ.get("BENCH_TURNS", 3))
LINES = 1000
"""Events in a request of NDJSON."""
APPEND_BYTES = int(os.environ.get("BENCH_BYTES", 512 << 20))
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
        load(port, max(connections, requests // 20), events, connections)
        before = process.cpu_times()
        seconds = load(port, requests, events, connections)
        after = process.cpu_times()
    return requests / seconds, (after.user + after.system - before.user - before.system) / requests


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
    requests = max(16, REQUESTS // 200)
    rate, cpu = max(measured("journal", requests, LINES, 8) for _ in range(TURNS))
    parsed, parse_cpu = max(_parse_rate() for _ in range(TURNS))
    bench.row(
        "NDJSON over a webhook, fsynced", f"{rate * LINES:,.0f} events/s", f"{cpu / LINES * 1e6:.1f} µs of CPU an event"
    )
    bench.row("the same JSON parsed by orjson", f"{parsed:,.0f} events/s", f"{parse_cpu * 1e6:.1f} µs of CPU an event")
    bench.claim("ndjson_vs_parsing", rate * LINES / parsed, ">=", 0.7)


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


IDLE = """
connector_name = "idle"
[processing]
state_dir = "state"
{sources}
[sink]
connector = "delta"
path = "lake/{{topic}}"
"""


def idle(bench: Bench) -> None:
    """A pipeline with five sources and no traffic, with all its processes."""
    with scratch() as directory, _quiet_api() as url:
        hooks = [
            f'[[sources]]\nname = "hook{n}"\nconnector = "webhook"\nport = 0\nauth = {{ type = "none" }}\n'
            f'[[sources.endpoints]]\npath = "/events"\nstream = "hook{n}"\n'
            for n in range(3)
        ]
        polls = [
            f'[[sources]]\nname = "poll{n}"\nconnector = "http_poll"\nurl = "{url}"\nstream = "poll{n}"\ninterval_secs = 5\n'
            for n in range(2)
        ]
        (directory / "pipeline.toml").write_text(IDLE.format(sources="\n".join([*hooks, *polls])))
        command = [sys.executable, "-m", "penstock", "run", str(directory / "pipeline.toml")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            tree = psutil.Process(process.pid)
            time.sleep(30)  # Spark warms up
            before = _cpu(tree)
            time.sleep(IDLE_SECS)
            share = (_cpu(tree) - before) / IDLE_SECS
            assert process.poll() is None, "the pipeline has ended"
        finally:
            process.terminate()
            process.wait(60)
    bench.row(
        "five idle sources", f"{share * 100:.1f} % of a core", "3 × webhook, 2 × http_poll; driver, JVM and workers"
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


PARTS: dict[str, Callable[[Bench], None]] = {"webhook": webhook, "append": append, "idle": idle}


def main() -> None:
    bench = Bench("push", "Sources that are pushed to")
    for name in os.environ.get("BENCH_PARTS", ",".join(PARTS)).split(","):
        PARTS[name](bench)
    bench.row(
        "load of the machine meanwhile", f"{os.getloadavg()[1]:.1f}", f"over five minutes, on {os.cpu_count()} cores"
    )
    bench.finish()


if __name__ == "__main__":
    main()
