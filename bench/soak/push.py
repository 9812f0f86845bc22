"""
Sources that are pushed to or polled, killed under load again and again; a backlog of a gibibyte in little memory; and many
connections that say nothing. What the senders noted is compared with the target.

Each part is a function in `PARTS` that gives its figures; `SOAK_PARTS=webhook` runs some of them, and the figures of the
others stay in the result file as they were, each with its commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import PAGE, RESULTS, commit, machine, page

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "modules"))
from push_senders import Frames, Lines, Published, Sending, records

from connectors.pushed import Senders, free_port, running
from connectors.webhooks import answer, request
from penstock import failpoints
from penstock.connectors.files.sink import read_published
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.testing import ForkEngine
from penstock.testing.mosquitto import Mosquitto
from push_runs import Pushed, await_kill

HERE = Path(__file__).resolve().parent
KILLS = int(os.environ.get("SOAK_KILLS", 20))
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))
IDLE = int(os.environ.get("SOAK_IDLE", 10_000))
RESULT = RESULTS / "soak-push.json"

PIPELINE = """
connector_name = "soak-push"
delivery = "exactly-once"
[processing]
epoch_interval_ms = 50
{processing}
[source]
{source}
[[routes]]
to = "/events"
[[schemas]]
topic = "/events"
schema_type = "json"
[sink]
connector = "{sink}"
path = "lake/{{topic}}"
"""

WEBHOOK = """connector = "webhook"
port = {port}
auth = {{ type = "none" }}
[[source.endpoints]]
path = "/events"
stream = "events"
dedupe = {{ header = "X-Delivery" }}
"""

POINTS = (
    "journal.data",
    "journal.index",
    "journal.told",
    "plan.after",
    "stage.after",
    "prepare.after",
    "commit.before",
)


def webhook() -> dict[str, Any]:
    """Kills at named steps and at random moments; what the senders noted is compared with the target."""
    chance = random.Random(SEED)
    port = free_port()
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        file = directory / "pipeline.toml"
        file.write_text(PIPELINE.format(source=WEBHOOK.format(port=port), processing="", sink="files"))
        with running(file, port) as runner, Senders(port, threads=16, batch=3) as senders:
            for number in range(KILLS):
                point = chance.choice(POINTS) if number % 2 else None
                runner.start(point and f"{point}=kill@{chance.randrange(1, 20)}")
                if point:
                    runner.wait_for_kill()
                else:
                    time.sleep(chance.uniform(0.1, 3))
                    runner.kill()
                kinds["at a step" if point else "at random"] += 1
                print(f"  kill {number + 1}: {len(senders.acknowledged):,} acknowledged", file=sys.stderr, flush=True)
            runner.start()
            senders.finish()
            until = time.monotonic() + 120
            while (found := stored(directory)).keys() != senders.acknowledged and time.monotonic() < until:
                time.sleep(0.5)
            runner.stop()
        found = stored(directory)
        return {
            "kills": dict(kinds),
            "messages": len(senders.acknowledged),
            "repeated by senders": len(senders.unclear),
            "lost": len(senders.acknowledged - found.keys()),
            "doubled": sum(count - 1 for count in found.values()),
        }


class Soaked(Pushed):
    """Into files, each commit synced as in earnest."""

    def __init__(self, path: Path, source: str) -> None:
        super().__init__(path, source)
        self.file.write_text(PIPELINE.format(source=source, processing="retry_backoff_ms = 50", sink="files"))

    def ids(self) -> Counter[int]:
        return stored(self.path)

    def _run(self, failpoint: str | None, drain: bool) -> None:
        failpoints.arm(failpoint)
        supervisor.run(Pipeline.from_toml(self.file), ForkEngine(1, die_with_task=True), drain=drain)


def killed(sending: Sending) -> dict[str, Any]:
    """Kill a pipeline at named steps and at random moments while something is sent to it."""
    chance = random.Random(SEED)
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        run = Soaked(Path(name), sending.source)
        for number in range(KILLS):
            point = chance.choice(POINTS) if number % 2 else None
            running = run.start(point and f"{point}=kill@{chance.randrange(1, 20)}")
            if point:
                await_kill(running)
            else:
                time.sleep(chance.uniform(0.3, 3))
                running.kill()
            kinds["at a step" if point else "at random"] += 1
            print(f"  kill {number + 1}: {len(sending.acknowledged):,} acknowledged", file=sys.stderr, flush=True)
        running = run.start()
        sending.finish()
        until = time.monotonic() + 120
        while not run.ids().keys() >= sending.acknowledged and time.monotonic() < until:
            time.sleep(0.5)
        running.kill()
        run.drain()
        found = run.ids()
        return {
            "kills": dict(kinds),
            "messages": len(sending.acknowledged),
            "sent again": len(sending.unclear),
            "lost": len(sending.acknowledged - found.keys()),
            "doubled": sum(count - 1 for id, count in found.items() if id not in sending.unclear),
        }


def mqtt() -> dict[str, Any]:
    with Mosquitto() as broker:
        sending = Published(broker)
        with tempfile.TemporaryDirectory() as name:  # so that the session is there before the first message is
            Soaked(Path(name), sending.source).drain()
        with sending:
            return killed(sending)


def tcp() -> dict[str, Any]:
    with Lines(free_port()) as sending:
        return killed(sending)


def websocket() -> dict[str, Any]:
    with Frames(free_port()) as sending:
        return killed(sending)


def http_poll() -> dict[str, Any]:
    with records() as sending:
        return killed(sending)


BACKLOG_BYTES = int(os.environ.get("SOAK_BACKLOG", 1 << 30))
CEILING_BYTES = 256 << 20
NOTE = "x" * 1000


def backlog() -> dict[str, Any]:
    """Take in a gibibyte while no epoch runs, then catch up: the largest process of both runs must stay below the ceiling."""
    lines = 1000
    port, requests = free_port(), -(-BACKLOG_BYTES // (lines * 1024))
    source = WEBHOOK.format(port=port).replace('dedupe = { header = "X-Delivery" }', 'format = "ndjson"')
    sizes = "journal_max_bytes = 4_000_000_000\nmax_epoch_bytes = 8_000_000\nmax_backoff_ms = 1000\n"
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=Path(__file__).resolve().parent.parent.parent) as name:
        file = Path(name) / "pipeline.toml"
        waiting = PIPELINE.replace("epoch_interval_ms = 50", "epoch_interval_ms = 100_000_000")
        file.write_text(waiting.format(source=source, processing=sizes, sink="delta"))
        with running(file, port) as runner:
            runner.start()
            peak = Peak(runner.pid)
            with socket.create_connection(("127.0.0.1", port), 60) as client:
                for number in range(requests):
                    ids = range(number * lines, (number + 1) * lines)
                    body = b"".join(b'{"id":%d,"note":"%s"}\n' % (id, NOTE.encode()) for id in ids)
                    client.sendall(request(body))
                    assert answer(client).status == 200
            peaks["taking it in"] = peak.stop()
            runner.kill()
            waits = sum(each.stat().st_size for each in (Path(name) / "state").rglob("*.arrow"))
            file.write_text(PIPELINE.format(source=source, processing=sizes, sink="delta"))
            runner.start()
            peak = Peak(runner.pid)
            until = time.monotonic() + 1200
            while (found := delta_ids(Path(name))).total() < requests * lines and time.monotonic() < until:
                time.sleep(2)
            peaks["catching up"] = peak.stop()
            runner.stop()
    return {
        "within_ceiling": max(peaks.values()) < CEILING_BYTES,
        "messages": requests * lines,
        "backlog_mib": waits >> 20,
        "ceiling_mib": CEILING_BYTES >> 20,
        "largest_process_mib": {what: size >> 20 for what, size in peaks.items()},
        "lost": requests * lines - len(found),
        "doubled": found.total() - len(found),
    }


def delta_ids(directory: Path) -> Counter[int]:
    from deltalake import DeltaTable

    path = directory / "lake" / "events"
    if not (path / "_delta_log").exists():
        return Counter()
    return Counter(DeltaTable(path).to_pyarrow_table(columns=["id"])["id"].to_pylist())


class Peak:
    """The largest resident size that any process of a tree had."""

    def __init__(self, pid: int) -> None:
        self._tree = psutil.Process(pid)
        self._most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                for process in [self._tree, *self._tree.children(recursive=True)]:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    found = status.partition("VmHWM:")[2].split()  # one that has just ended has none
                    self._most = max(self._most, int(found[0]) << 10 if found else 0)


def stored(directory: Path) -> Counter[int]:
    path = directory / "lake" / "events"
    rows = read_published(path) if path.exists() else None
    return Counter(rows["id"].to_pylist() if rows is not None and rows.num_rows else [])


def idle_connections() -> dict[str, Any]:
    """Connections that say nothing, and the answers that another client gets meanwhile."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, IDLE + 1000), hard))
    with tempfile.TemporaryDirectory() as name:
        server = HERE.parent / "modules" / "webhook_server.py"
        process = subprocess.Popen([sys.executable, str(server), "journal", name], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            idle = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(IDLE)]
            took = []
            with socket.create_connection(("127.0.0.1", port), 60) as client:
                for number in range(500):
                    began = time.perf_counter()
                    client.sendall(request(b'{"id": %d}' % number))
                    assert answer(client).status == 200
                    took.append((time.perf_counter() - began) * 1000)
            for each in idle[:: max(1, IDLE // 100)]:  # they are still there
                each.sendall(request(b'{"id": -1}'))
                assert answer(each).status == 200
            memory = int(Path(f"/proc/{process.pid}/status").read_text().partition("VmRSS:")[2].split()[0]) // 1024
            for each in idle:
                each.close()
        finally:
            process.kill()
            process.wait()
    cuts = statistics.quantiles(took, n=100)
    return {"connections": IDLE, "p50_ms": round(cuts[49], 1), "p99_ms": round(cuts[98], 1), "memory_mib": memory}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "webhook": webhook,
    "mqtt": mqtt,
    "tcp": tcp,
    "websocket": websocket,
    "http_poll": http_poll,
    "backlog": backlog,
    "idle_connections": idle_connections,
}


def record(parts: dict[str, Any]) -> dict[str, Any]:
    """Write the figures so far."""
    result = {
        "soak": "push",
        "commit": commit(),
        "machine": machine(),
        "kills": {name: sum(part["kills"].values()) for name, part in parts.items() if "kills" in part},
        **{each: sum(part.get(each, 0) for part in parts.values()) for each in ("messages", "lost", "doubled")},
        "parts": parts,
    }
    RESULT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    PAGE.write_text(page())
    return result


def main() -> None:
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    parts: dict[str, Any] = before.get("parts", {})
    for name in os.environ.get("SOAK_PARTS", ",".join(PARTS)).split(","):
        print(name, file=sys.stderr, flush=True)
        load = os.getloadavg()[0]
        parts[name] = {**PARTS[name](), "commit": commit(), "seed": SEED, "load": round(load, 1)}
        print(f"  {parts[name]}", file=sys.stderr, flush=True)
        result = record(parts)  # after each part: the next one takes long
    print(f"lost {result['lost']} · doubled {result['doubled']}")
    above = [name for name, part in parts.items() if not part.get("within_ceiling", True)]
    if above:
        print(f"above the memory ceiling: {', '.join(above)}")
    sys.exit(1 if result["lost"] or result["doubled"] or above else 0)


if __name__ == "__main__":
    main()
