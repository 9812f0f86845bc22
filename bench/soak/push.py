"""
Sources that are pushed to, killed under load again and again; and many connections that say nothing.

Each part is a function in `PARTS` that gives its figures; `SOAK_PARTS=webhook` runs some of them, and the figures of the
others stay in the result file as they were, each with its commit.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import PAGE, RESULTS, commit, machine, page

from connectors.pushed import Senders, free_port, running
from connectors.webhooks import answer, request
from penstock.connectors.files.sink import read_published

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
[source]
connector = "webhook"
port = {port}
auth = {{ type = "none" }}
[[source.endpoints]]
path = "/events"
stream = "events"
dedupe = {{ header = "X-Delivery" }}
[[schemas]]
topic = "/events"
schema_type = "json"
[sink]
connector = "files"
path = "lake/{{topic}}"
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
        file.write_text(PIPELINE.format(port=port))
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


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"webhook": webhook, "idle_connections": idle_connections}


def main() -> None:
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    parts: dict[str, Any] = before.get("parts", {})
    for name in os.environ.get("SOAK_PARTS", ",".join(PARTS)).split(","):
        print(name, file=sys.stderr, flush=True)
        load = os.getloadavg()[0]
        parts[name] = {**PARTS[name](), "commit": commit(), "seed": SEED, "load": round(load, 1)}
        print(f"  {parts[name]}", file=sys.stderr, flush=True)
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
    print(f"lost {result['lost']} · doubled {result['doubled']}")
    sys.exit(1 if result["lost"] or result["doubled"] else 0)


if __name__ == "__main__":
    main()
