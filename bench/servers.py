"""
Why the server of webhooks is our own: the same requests to others, which do no more than read and answer. What is compared is
the CPU of their processes for a request.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from measure import Bench, environment
from push import CONNECTIONS, MODULES, REQUESTS, TURNS, loaded, measured

from penstock.testing.mosquitto import free_port

PEERS = ("granian==2.8.7", "starlette==0.50.0", "uvicorn[standard]==0.38.0")


@contextlib.contextmanager
def peer(kind: str, python: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Another server that takes the same requests, without a journal."""
    port = free_port()
    command = [str(python), "webhook_peer.py", kind, str(port)]
    process = psutil.Popen(command, cwd=MODULES)
    until = time.monotonic() + 60
    try:
        while not process.net_connections() and not any(c.net_connections() for c in process.children(recursive=True)):
            assert time.monotonic() < until, f"{kind} does not answer"
            time.sleep(0.05)
        yield port, process
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    bench = Bench("servers", "The server of webhooks beside others, without a journal")
    python = environment("push", *PEERS) / "bin" / "python"
    best: dict[str, tuple[float, float]] = {}
    for _ in range(TURNS):
        for kind in ("bare", "granian", "uvicorn"):
            if kind == "bare":
                found = measured(kind, REQUESTS // 3, 1)
            else:
                with peer(kind, python) as (port, process):
                    found = loaded(port, process, REQUESTS // 3, 1, CONNECTIONS)
            best[kind] = max(best.get(kind, found), found)
    names = {
        "bare": "ours, without its journal",
        "granian": "granian, bare ASGI",
        "uvicorn": "starlette on uvicorn, httptools and uvloop",
    }
    for kind, name in names.items():
        rate, cpu = best[kind]
        bench.row(f"the same requests to {name}", f"{rate:,.0f} requests/s", f"{cpu * 1e6:.0f} µs of CPU a request")
    for kind in ("granian", "uvicorn"):
        bench.claim(f"webhook_cpu_vs_{kind}", best["bare"][1] / best[kind][1], "<=", 1)
    bench.row(
        "load of the machine meanwhile", f"{os.getloadavg()[1]:.1f}", f"over five minutes, on {os.cpu_count()} cores"
    )
    bench.finish()


if __name__ == "__main__":
    main()
