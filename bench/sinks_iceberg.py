"""The Iceberg sink beside the client's own append of the same batches; and what a commit costs after many epochs."""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from measure import Bench
from pyiceberg.catalog.sql import SqlCatalog

from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.connectors.staging import StagedFiles
from penstock.sink import Epoch, Task

TOPIC = "/bench/orders"
BATCH_ROWS = 100_000
BATCHES = 20
"""Of each of the epochs, shared out to the tasks."""
EPOCHS = 3
TASKS = 2
TURNS = 3


def batch(seed: int) -> pa.RecordBatch:
    """Rows as a shop has them: numbers, few and many distinct texts, times."""
    random = np.random.default_rng(seed)
    ids = np.arange(seed * BATCH_ROWS, (seed + 1) * BATCH_ROWS)
    return pa.record_batch(
        {
            "id": pa.array(ids),
            "customer": pa.array(random.integers(0, 100_000, BATCH_ROWS)),
            "price": pa.array(random.random(BATCH_ROWS).round(2)),
            "country": pa.array(np.array(["DE", "FR", "IT", "ES"])[random.integers(0, 4, BATCH_ROWS)]),
            "note": pa.array([f"order {id} of the day" for id in ids.tolist()]),
            "at": pa.array(ids * 1_000_000, pa.timestamp("us", "UTC")),
        }
    )


def batches_of(epoch: int, task: int | None = None) -> list[pa.RecordBatch]:
    seeds = range(epoch * BATCHES, (epoch + 1) * BATCHES)
    return [batch(seed) for seed in seeds if task is None or seed % TASKS == task]


_prepared: dict[int, list[pa.RecordBatch]] = {}


def prepare(task: int) -> int:
    """In a task's process, before the clock runs: its rows, and the client's imports."""
    for epoch in range(EPOCHS):
        _prepared[epoch] = batches_of(epoch, task)
    return task


def stage(sink: Iceberg, epoch: Epoch, task: int) -> StagedFiles:
    sink.open()
    sink.begin_epoch(epoch, Task(task))
    for each in _prepared[epoch.number]:
        sink.write_batch(TOPIC, each)
    receipt = sink.pre_commit(epoch)
    sink.close()
    return receipt


def ours(path: Path, pools: Sequence[ProcessPoolExecutor]) -> float:
    sink = Iceberg(IcebergConfig(path=f"{path}/{{topic}}"))
    sink.open()
    sink.committed_epoch("bench", TOPIC)
    began = time.perf_counter()
    for number in range(EPOCHS):
        epoch = Epoch("bench", "one", number)
        receipts = [pool.submit(stage, sink, epoch, task) for task, pool in enumerate(pools)]
        sink.commit_epoch(epoch, [each.result() for each in receipts], {})
    return time.perf_counter() - began


def theirs(path: Path, tables: Sequence[pa.Table]) -> float:
    path.mkdir()
    catalog = SqlCatalog("default", uri=f"sqlite:///{path}/catalog.db", warehouse=str(path))
    catalog.create_namespace("bench")
    table = catalog.create_table("bench.orders", tables[0].schema)
    began = time.perf_counter()
    for rows in tables:
        table.append(rows)
    return time.perf_counter() - began


def totals(path: Path) -> list[object]:
    """What tells two tables with the same rows from others."""
    rows = SqlCatalog("default", uri=f"sqlite:///{path}/catalog.db").load_table("bench.orders").scan().to_arrow()
    return [rows.num_rows, *(pc.sum(rows.column(name)).as_py() for name in ("id", "customer")), pc.max(rows["at"])]


def append(bench: Bench, home: Path) -> None:
    pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(TASKS)]
    for task, pool in enumerate(pools):
        pool.submit(prepare, task).result()
    tables = [pa.Table.from_batches(batches_of(epoch)) for epoch in range(EPOCHS)]
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(TURNS):  # in turns: what else the machine does meets both
        for name in seconds:
            path = home / f"{name}-{turn}"
            seconds[name].append(ours(path, pools) if name == "ours" else theirs(path, tables))
        assert totals(home / f"ours-{turn}") == totals(home / f"theirs-{turn}")
        for name in seconds:
            shutil.rmtree(home / f"{name}-{turn}")
    for pool in pools:
        pool.shutdown()
    rows = EPOCHS * BATCHES * BATCH_ROWS
    best = {name: rows / min(each) for name, each in seconds.items()}
    bench.row(
        "penstock, two tasks, synced", f"{best['ours']:,.0f} rows/s", f"{EPOCHS} epochs of {rows // EPOCHS:,} rows"
    )
    bench.row("pyiceberg `table.append`, one process, not synced", f"{best['theirs']:,.0f} rows/s", "the same batches")
    bench.claim("iceberg_append_vs_pyiceberg", best["ours"] / best["theirs"], ">=", 0.7)


def upkeep(bench: Bench, home: Path, epochs: int) -> None:
    sink = Iceberg(IcebergConfig(path=f"{home}/many/{{topic}}"))
    sink.open()
    rows, costs = batch(0).slice(0, 1000), []
    for number in range(epochs):
        epoch = Epoch("bench", "one", number)
        sink.begin_epoch(epoch, Task(0))
        sink.write_batch(TOPIC, rows)
        receipt = sink.pre_commit(epoch)
        began = time.perf_counter()
        sink.commit_epoch(epoch, [receipt], {"source": {"offset": number}})
        costs.append(1000 * (time.perf_counter() - began))
    last = costs[-100:]
    bench.row("commit, epochs 20 to 120", f"{statistics.mean(costs[20:120]):.0f} ms", "mean")
    note = f"mean; median {statistics.median(last):.0f}, worst {max(last):.0f}"
    bench.row(f"commit, the last 100 of {epochs:,}", f"{statistics.mean(last):.0f} ms", note)
    bench.row("files of metadata in the end", f"{len(list((home / 'many/bench/orders/metadata').iterdir())):,}")
    bench.claim(f"iceberg_commit_after_{epochs}_vs_120ms", statistics.mean(last) / 120, "<=", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2000, help="how many commits to look back on")
    options = parser.parse_args()
    bench = Bench("sinks_iceberg", "Iceberg sink")
    with tempfile.TemporaryDirectory() as home:
        append(bench, Path(home))
        upkeep(bench, Path(home), options.epochs)
    bench.finish()


if __name__ == "__main__":
    main()
