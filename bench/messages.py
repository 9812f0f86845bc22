"""What it costs to keep bad messages: a task that decodes and stages a stream of which 1 % is bad, kept or left out."""

from __future__ import annotations

import json
import tempfile
import time
from itertools import count
from pathlib import Path

import pyarrow as pa
from measure import Bench

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.formats import load
from penstock.pipeline.options import SchemaEntry
from penstock.pipeline.routing import OnError, Router
from penstock.pipeline.schemas import TopicSchema, TopicSchemas
from penstock.runtime.job import Job, OnErrors, Part
from penstock.runtime.messages.decoding import Decoders
from penstock.runtime.messages.letters import SINK
from penstock.runtime.task import run_task
from penstock.sink import Epoch, Task
from penstock.source import ENVELOPE_SCHEMA, SourceBatch
from penstock.testing import MemorySource

ROWS, BATCH_ROWS, TURNS = 400_000, 20_000, 5


def messages(first: int, is_clean: bool) -> SourceBatch:
    numbers = range(first, first + BATCH_ROWS)
    payloads = [b'{"id": oops' if number % 100 == 50 and not is_clean else _payload(number) for number in numbers]
    columns = {
        "stream": ["orders"] * BATCH_ROWS,
        "key": [str(number).encode() for number in numbers],
        "payload": payloads,
        "attributes": [[("site", "north")]] * BATCH_ROWS,
        "timestamp": list(numbers),
        "offset": [{"partition": "0", "value": str(number)} for number in numbers],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in ENVELOPE_SCHEMA]
    return SourceBatch(pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE_SCHEMA), stream="orders")


def _payload(number: int) -> bytes:
    value = {"id": number, "name": f"customer {number % 997}", "amount": number / 100, "tags": ["new", "paid"]}
    return json.dumps(value).encode()


def seconds(home: Path, script: list[SourceBatch], policy: OnError, number: int) -> float:
    """CPU time of one task from its first row to its receipts."""
    (home / "source").mkdir(exist_ok=True)
    entry = TopicSchema(SchemaEntry(topic="/orders", schema_type="json"), load("json").options_type())
    known = load("json")(entry.options).decode(script[0].records.column("payload")).rows.schema
    job = Job(
        Epoch("bench", "incarnation", number, f"{number:08d}"),
        [Part(at, "memory", at) for at in range(len(script))],
        {"memory": MemorySource.of(home / "source", *script)},
        {name: Delta(DeltaConfig(path=str(home / name / "{topic}"))) for name in ("lake", SINK)},
        Router((), ("lake",)),
        on_error=OnErrors(policy),
        letters=SINK,
        decoders=Decoders(TopicSchemas((entry,)), columns={"/orders": known}),
    )
    began = time.process_time()
    result = run_task(job, job.parts, Task(0))
    took = time.process_time() - began
    bad = sum(sum(tally.letters.values()) + sum(tally.skipped.values()) for tally in result.tallies.values())
    assert result.written["lake", "/orders"].records_written + bad == ROWS
    assert (bad > 0) == (script is not CLEAN)
    assert sum(written.records_written for (name, _), written in result.written.items() if name == SINK) == (
        bad if policy == "dead_letter" else 0
    )
    return took


CLEAN = [messages(first, True) for first in range(0, ROWS, BATCH_ROWS)]
SPOILED = [messages(first, False) for first in range(0, ROWS, BATCH_ROWS)]


def main() -> None:
    pa.set_cpu_count(1)
    bench = Bench("messages", "Bad messages, one task")
    cases: dict[str, tuple[list[SourceBatch], OnError]] = {
        "all good": (CLEAN, "skip"),
        "1 % bad, left out": (SPOILED, "skip"),
        "1 % bad, kept as dead letters": (SPOILED, "dead_letter"),
    }
    best = dict.fromkeys(cases, float("inf"))
    numbers = count(1)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        for _ in range(TURNS):
            for what, (script, policy) in cases.items():
                best[what] = min(best[what], seconds(Path(name), script, policy, next(numbers)))
    for what, took in best.items():
        bench.row(what, f"{ROWS / took / 1e6:.2f} M/CPU s", "decoded and staged for Delta")
    good, dropped, kept = best.values()
    bench.claim("dead_letters_vs_dropped", kept / dropped, "<=", 1.3)
    bench.claim("1_percent_bad_vs_clean", dropped / good, "<=", 1.5)
    bench.finish()


if __name__ == "__main__":
    main()
