"""
What the sinks cost beside their own clients: appends, upserts, and commits after many epochs.

Rows are staged by two processes, as two tasks would, and committed by this one. One function per sink and figure;
`BENCH_ROWS`, `BENCH_TABLE_ROWS` and `BENCH_EPOCHS` make a small run of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, WriterProperties, write_deltalake
from measure import Bench

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.sink import Epoch, SinkConnector, Task

ROWS = int(os.environ.get("BENCH_ROWS", 4_000_000))
TABLE_ROWS = int(os.environ.get("BENCH_TABLE_ROWS", 10_000_000))
EPOCHS = int(os.environ.get("BENCH_EPOCHS", 2_000))
KEYS = 10_000
BATCH_ROWS = 1 << 16
TURNS = 3
TOPIC = "/rows"
ZSTD = WriterProperties(compression="ZSTD", compression_level=1)


def batches(first: int, count: int) -> list[pa.RecordBatch]:
    """Rows of common types whose values follow from their ids."""
    made = []
    for start in range(first, first + count, BATCH_ROWS):
        ids = np.arange(start, min(start + BATCH_ROWS, first + count))
        made.append(
            pa.record_batch(
                {
                    "id": pa.array(ids),
                    "name": pc.binary_join_element_wise("name", pa.array(ids % 9973).cast(pa.string()), "-"),
                    "amount": pa.array(ids * 31 % 1_000_003, pa.int32()),
                    "ratio": pa.array(np.sqrt(ids)),
                    "at": pa.array(1_700_000_000_000_000 + ids * 1000, pa.timestamp("us", "UTC")),
                }
            )
        )
    return made


class Tasks:
    """Two processes that hold their rows already and wait for the word; they stage, and hand over their receipts."""

    def __init__(self, sink: SinkConnector[Any, Any], parts: list[list[pa.RecordBatch]]) -> None:
        context = multiprocessing.get_context("fork")  # before the Delta client has made threads here
        self._ends = []
        for number, part in enumerate(parts):
            here, there = context.Pipe()
            context.Process(target=_task, args=(there, sink, part, number), daemon=True).start()
            self._ends.append(here)

    def stage(self, epoch: Epoch) -> list[Any]:
        for end in self._ends:
            end.send(epoch)
        return [end.recv() for end in self._ends]


def _task(end: Any, sink: SinkConnector[Any, Any], part: list[pa.RecordBatch], number: int) -> None:
    sink.open()
    while True:
        try:
            epoch = end.recv()
        except EOFError:
            return
        sink.begin_epoch(epoch, Task(number))
        for batch in part:
            sink.write_batch(TOPIC, batch)
        end.send(sink.pre_commit(epoch))


@contextmanager
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bench-sinks-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def delta(path: Path, **options: Any) -> Delta:
    sink = Delta(DeltaConfig(path=f"{path}/{{topic}}", **options))
    sink.open()
    return sink


def delta_append(bench: Bench) -> None:
    rows = batches(0, ROWS)
    half = len(rows) // 2
    ours, theirs = [], []
    with scratch() as path:
        sink = delta(path / "ours")
        tasks = Tasks(sink, [rows[:half], rows[half:]])

        def append(number: int) -> None:
            epoch = Epoch("bench", "one", number)
            sink.commit_epoch(epoch, tasks.stage(epoch), {})

        reader = pa.RecordBatchReader
        for turn in range(1, TURNS + 1):
            ours.append(timed(lambda number=turn: append(number)))
            stream = reader.from_batches(rows[0].schema, rows)
            theirs.append(
                timed(lambda s=stream: write_deltalake(path / "theirs", s, mode="append", writer_properties=ZSTD))
            )
        written = [DeltaTable(each).to_pyarrow_dataset() for each in (path / "ours/rows", path / "theirs")]
        sums = [pc.sum(each.to_table(columns=["id"]).column("id")).as_py() for each in written]
        assert sums == [TURNS * ROWS * (ROWS - 1) // 2] * 2, f"not the same rows: {sums}"
    bench.row("delta: append with two tasks", f"{ROWS / min(ours) / 1e6:.2f} M rows/s", "files and log fsynced")
    bench.row(
        "write_deltalake of the same batches", f"{ROWS / min(theirs) / 1e6:.2f} M rows/s", "one process, no fsync"
    )
    bench.claim("delta_append_vs_write_deltalake", min(theirs) / min(ours), ">=", 0.8)


def delta_upsert(bench: Bench) -> None:
    seconds: dict[int, float] = {}
    for count in (TABLE_ROWS // 10, TABLE_ROWS):
        with scratch() as path:
            ours, theirs = path / "ours/rows", path / "theirs"
            for first in range(0, count, TABLE_ROWS // 10):
                table = pa.Table.from_batches(batches(first, TABLE_ROWS // 10))
                write_deltalake(theirs, table, mode="append", writer_properties=ZSTD)
            shutil.copytree(theirs, ours)
            sink = delta(path / "ours", mode="upsert", key=["id"], optimize_every_epochs=0)
            seconds[count], by_hand = _upsert(sink, ours, theirs, count)
    bench.row(f"delta: upsert of {KEYS:,} clustered keys", f"{seconds[TABLE_ROWS]:.2f} s", f"into {TABLE_ROWS:,} rows")
    bench.row("the same into a tenth of the rows", f"{seconds[TABLE_ROWS // 10]:.2f} s", "one file instead of ten")
    bench.row("DeltaTable.merge of the same", f"{by_hand:.2f} s", "bounds of the keys in the predicate")
    bench.claim("delta_upsert_vs_merge", seconds[TABLE_ROWS] / by_hand, "<=", 1.2)
    bench.claim("delta_upsert_10x_rows", seconds[TABLE_ROWS] / seconds[TABLE_ROWS // 10], "<=", 1.3)


def _upsert(sink: Delta, ours: Path, theirs: Path, count: int) -> tuple[float, float]:
    best = [float("inf"), float("inf")]
    for turn in range(1, TURNS + 1):
        first = turn * (count // (TURNS + 1)) - KEYS // 2
        (batch,) = batches(first, KEYS)
        batch = batch.set_column(2, "amount", pa.array([-turn] * KEYS, pa.int32()))
        epoch = Epoch("bench", "one", turn)

        def apply(epoch: Epoch = epoch, batch: pa.RecordBatch = batch) -> None:
            sink.begin_epoch(epoch, Task(0))
            sink.write_batch(TOPIC, batch)
            sink.commit_epoch(epoch, [sink.pre_commit(epoch)], {})

        predicate = f"t.id = s.id and t.id >= {first} and t.id < {first + KEYS}"
        merge = (
            DeltaTable(theirs)
            .merge(
                pa.Table.from_batches([batch]), predicate, source_alias="s", target_alias="t", writer_properties=ZSTD
            )
            .when_matched_update_all()
            .when_not_matched_insert_all()
        )
        best = [min(best[0], timed(apply)), min(best[1], timed(merge.execute))]
    sums = [
        pc.sum(DeltaTable(each).to_pyarrow_dataset().to_table(columns=["amount"]).column("amount")).as_py()
        for each in (ours, theirs)
    ]
    assert sums[0] == sums[1], f"not the same rows: {sums}"
    return best[0], best[1]


def delta_commits(bench: Bench) -> None:
    (batch,) = batches(0, 10)
    spent = []
    with scratch() as path:
        sink = delta(path)
        for number in range(1, EPOCHS + 1):
            epoch = Epoch("bench", "one", number)
            sink.begin_epoch(epoch, Task(0))
            sink.write_batch(TOPIC, batch)
            receipt = sink.pre_commit(epoch)
            spent.append(timed(lambda e=epoch, r=receipt: sink.commit_epoch(e, [r], {"source": {"n": e.number}})))
        table = DeltaTable(path / "rows")
        assert table.to_pyarrow_dataset().count_rows() == 10 * EPOCHS
        files = len(table.file_uris())
        markers = [json.dumps(each.get("penstock")) for each in table.history(5)]
        assert any(str(EPOCHS) in each for each in markers), markers
    window = min(100, EPOCHS // 4)
    early, late = (statistics.median(each) * 1000 for each in (spent[:window], spent[-window:]))
    mean = statistics.mean(spent[-EPOCHS // 4 :]) * 1000
    bench.row(
        "delta: commit of an epoch, at first", f"{early:.0f} ms", "beyond the write; log entry and sidecar fsynced"
    )
    bench.row(f"the same after {EPOCHS:,} epochs", f"{late:.0f} ms", f"median; {files} files are live")
    bench.row("the same with upkeep shared out", f"{mean:.0f} ms", "mean of the last quarter: checkpoints, joining")
    bench.claim("delta_commit_vs_60ms", late / 60, "<=", 1)
    bench.claim("delta_commit_with_upkeep_vs_60ms", mean / 60, "<=", 1)


def main() -> None:
    bench = Bench("sinks", "Sinks")
    delta_append(bench)  # first: its tasks are forked before the client has threads
    delta_upsert(bench)
    delta_commits(bench)
    bench.finish()


if __name__ == "__main__":
    main()
