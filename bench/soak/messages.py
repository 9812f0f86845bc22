"""
Fifty random kills of messages → delta, exactly-once, with bad messages, new fields, fixes and replays all the while.

The victim is the driver, its JVM or one of Spark's Python workers. Some restarts change the schema, so that messages which
were bad are good from then on, or the other way round; replays are asked for at random moments. At the end every message
must be a row, once, and no dead letter may be open.
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
from engine import newest_epoch, start, victim
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import PAGE, RESULTS, commit, machine, page

from penstock.cli import dlq
from penstock.errors import ConnectorError
from penstock.pipeline import Pipeline
from penstock.runtime.epochs import State

KILLS = int(os.environ.get("SOAK_KILLS", 50))
SEED = int(os.environ.get("SOAK_SEED", time.time_ns() % 1_000_000))

PIPELINE = """
connector_name = "soak-messages"
delivery = "exactly-once"

[processing]
state_dir = "state"
epoch_interval_ms = 50
on_error = "dead_letter"

[source]
connector = "exchange:Exchange"
path = "limit"

[[schemas]]
topic = "/messages"
schema_type = "json"
{strict}

[sink]
connector = "delta"
path = "table"
"""

STRICT = 'key = ["id"]'
"""With it a message without an id is bad."""

SOURCE = '''
"""A message per number; one in fifty has no id, and every 20,000 there is a new field."""

import json
import time
from pathlib import Path

from penstock.config import Config
from penstock.source import Offset, PollingSource, SourceCheckpoint, SourceEnvelope, SourceRecord


class ExchangeConfig(Config):
    path: Path
    """A file that says after which message to stop, once it is there."""


class Exchange(PollingSource[ExchangeConfig]):
    name = "exchange"

    def __init__(self, config):
        super().__init__(config)
        self._next, self._due = 0, 0.0

    def schema(self):
        return {}

    def poll_batch(self, max_records):
        limit = int(self.config.path.read_text()) if self.config.path.exists() else 1 << 60
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + 0.1
        numbers = range(self._next, min(limit, self._next + min(max_records, 300)))
        self._next = numbers.stop
        return [SourceEnvelope.with_offset(message(each), Offset("0", each)) for each in numbers] or None

    def checkpoint(self):
        return SourceCheckpoint(offsets={"next": self._next})

    def restore(self, checkpoint):
        self._next = checkpoint.offsets["next"]


def message(number):
    value = {"no" if number % 50 == 7 else "id": number, f"field_{number // 20_000}": number / 2}
    return SourceRecord("messages", json.dumps(value).encode())
'''


def replay(home: Path) -> bool:
    """Ask for all open letters, as a user would; False if there are none, or the state cannot be read just now."""
    try:
        pipeline = Pipeline.from_toml(home / "pipeline.toml")
        return bool(dlq.command(pipeline, "replay", {}, Console(quiet=True)))
    except (ConnectorError, OSError):
        return False


def numbers(home: Path) -> np.ndarray:
    """Of the messages that are rows."""
    table = DeltaTable(str(home / "table"))
    names = [field.name for field in table.schema().fields]
    columns = [table.to_pyarrow_table(columns=[name])[name].to_numpy() for name in ("id", "no") if name in names]
    return np.concatenate([each[~np.isnan(each)] if each.dtype.kind == "f" else each for each in columns]).astype(int)


def settle(home: Path) -> tuple[int, int]:
    """With all messages good: send what is left, replay what is dead, until nothing is; how the last run ended, and its end."""
    (home / "pipeline.toml").write_text(PIPELINE.format(strict=""))
    limit = int(numbers(home).max()) + 20_000
    (home / "limit").write_text(str(limit))
    log = open(home / "run.log", "ab")  # noqa: SIM115 (the child keeps it)
    command = [sys.executable, "-m", "penstock", "run", str(home / "pipeline.toml"), "--drain", "--master", "local[2]"]
    ended = 1
    for _ in range(20):
        replay(home)
        ended = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        pipeline = Pipeline.from_toml(home / "pipeline.toml")
        if not ended and not dlq.Store(pipeline).chosen({})[0].num_rows and numbers(home).max() + 1 == limit:
            break
    return ended, limit


def main() -> None:
    choice = random.Random(SEED)
    kills: Counter[str] = Counter()
    replays = fixes = 0
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        home = Path(name)
        (home / "exchange.py").write_text(SOURCE)
        (home / "pipeline.toml").write_text(PIPELINE.format(strict=STRICT))
        run = start(home)
        while kills.total() < KILLS:
            kind = choice.choices(["driver", "jvm", "worker"], [6, 2, 2])[0]
            # Most kills come while epochs run, some while Spark still starts.
            if choice.random() < 0.8:
                goal, limit = newest_epoch(home) + choice.randint(1, 10), time.time() + 60
                while newest_epoch(home) < goal and run.poll() is None and time.time() < limit:
                    time.sleep(0.02)
            if choice.random() < 0.5:
                replays += replay(home)
            time.sleep(choice.uniform(0, 1.0))
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
                if choice.random() < 0.3:
                    fixes += 1
                    (home / "pipeline.toml").write_text(PIPELINE.format(strict=choice.choice(["", STRICT])))
                run = start(home)
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=120)
        ended, expected = settle(home)
        state = State(home / "state", "soak-messages").peek()
        assert state.newest is not None
        letters = dlq.Store(Pipeline.from_toml(home / "pipeline.toml"))
        is_open = letters.chosen({})[0].num_rows
        seen, counts = np.unique(numbers(home), return_counts=True)
        lost = expected - np.count_nonzero(seen < expected)
        doubled = int((counts - 1).sum()) + int(np.count_nonzero(seen >= expected))
        log = (home / "run.log").read_text(errors="replace")
    result = {
        "soak": "messages",
        "seed": SEED,
        "kills": dict(kills),
        "replays": replays,
        "schema_changes": fixes,
        "epochs": state.newest.number,
        "messages": expected,
        "letters": letters.letters.num_rows,
        "open_letters": is_open,
        "lost": int(lost),
        "doubled": doubled,
        "seconds": round(time.time() - began),
        "commit": commit(),
        "machine": machine(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak-messages.json").write_text(json.dumps(result, indent=2) + "\n")
    PAGE.write_text(page())
    print("\r" + json.dumps(result, indent=2))
    print(f"lost {lost} · doubled {doubled}")
    if lost or doubled or is_open or ended:
        print(log[-4000:], file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
