"""
Fifty random kills of `generator → delta`, exactly-once; then every id must be there once.

The victim is the driver, its JVM or one of Spark's Python workers, at a random moment between start-up and a few epochs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from deltalake import DeltaTable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import PAGE, RESULTS, commit, machine, page

from penstock.runtime.epochs import State

KILLS = int(os.environ.get("SOAK_KILLS", 50))
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))

PIPELINE = """
connector_name = "soak-engine"
delivery = "exactly-once"

[processing]
state_dir = "state"
epoch_interval_ms = 50

[source]
connector = "generator"
rows_per_sec = 20000
columns = ["id", "name", "amount", "at"]

[sink]
connector = "delta"
path = "table"
"""


def start(home: Path) -> subprocess.Popen[bytes]:
    log = open(home / "run.log", "ab")  # noqa: SIM115 (the child keeps it)
    command = [sys.executable, "-m", "penstock", "run", str(home / "pipeline.toml"), "--master", "local[2]"]
    return subprocess.Popen(command, stdout=log, stderr=log)


def victim(kind: str, run: subprocess.Popen[bytes]) -> psutil.Process | None:
    """A process of that kind below the run, or None if it is not there yet."""
    driver = psutil.Process(run.pid)
    if kind == "driver":
        return driver
    below = driver.children(recursive=True)
    found = [p for p in below if (p.name() == "java") == (kind == "jvm") and p.pid != run.pid]
    return found[-1] if found else None


def newest_epoch(home: Path) -> int:
    files = sorted((home / "state" / "epochs").glob("[0-9]*.json"))
    return int(files[-1].stem) if files else 0


def main() -> None:
    choice = random.Random(SEED)
    kills: Counter[str] = Counter()
    restarts = 0
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        home = Path(name)
        (home / "pipeline.toml").write_text(PIPELINE)
        run = start(home)
        while kills.total() < KILLS:
            kind = choice.choices(["driver", "jvm", "worker"], [6, 2, 2])[0]
            # Most kills come while epochs run, some while Spark still starts.
            if choice.random() < 0.8:
                goal, limit = newest_epoch(home) + choice.randint(1, 20), time.time() + 60
                while newest_epoch(home) < goal and run.poll() is None and time.time() < limit:
                    time.sleep(0.02)
            time.sleep(choice.uniform(0, 2.0))
            try:
                chosen = victim(kind, run) if run.poll() is None else None
                if chosen is not None:
                    chosen.send_signal(signal.SIGKILL)
                    kills[kind] += 1
                    print(f"\rkills {kills.total()}/{KILLS} · epoch {newest_epoch(home)}", end="", flush=True)
            except psutil.NoSuchProcess:
                pass
            if kind == "driver" or run.poll() is not None:
                run.wait()
                restarts += 1
                run = start(home)
        goal = newest_epoch(home) + 5
        while newest_epoch(home) < goal:
            if run.poll() is not None:
                restarts += 1
                run = start(home)
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        ended = run.wait(timeout=120)
        state = State(home / "state", "soak-engine").peek()
        assert state.newest is not None
        expected = state.newest.ranges["generator"].end["ids"]["rows"]
        ids = DeltaTable(str(home / "table")).to_pyarrow_table(columns=["id"])["id"].to_numpy()
        seen, counts = np.unique(ids, return_counts=True)
        lost = expected - np.count_nonzero(seen < expected)
        doubled = int((counts - 1).sum()) + int(np.count_nonzero(seen >= expected))
        log = (home / "run.log").read_text(errors="replace")
    result = {
        "soak": "engine",
        "seed": SEED,
        "kills": dict(kills),
        "restarts": restarts,
        "epochs": state.newest.number,
        "rows": int(expected),
        "lost": int(lost),
        "doubled": doubled,
        "exit_code_after_sigterm": ended,
        "seconds": round(time.time() - began),
        "commit": commit(),
        "machine": machine(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak-engine.json").write_text(json.dumps(result, indent=2) + "\n")
    PAGE.write_text(page())
    print("\r" + json.dumps(result, indent=2))
    print(f"lost {lost} · doubled {doubled}")
    if lost or doubled or ended:
        print(log[-4000:], file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
