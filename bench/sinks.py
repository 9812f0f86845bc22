"""
What the sinks cost beside their own clients: appends, upserts, and commits after many epochs.

Rows are staged by two processes, as two tasks would, and committed by this one. `BENCH_ROWS`, `BENCH_TABLE_ROWS` and
`BENCH_EPOCHS` make a small run of it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import postgres
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, WriterProperties, write_deltalake
from measure import Bench
from pyiceberg.catalog.sql import SqlCatalog

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.sink import Epoch, SinkConnector, Task

ROWS = int(os.environ.get("BENCH_ROWS", 4_000_000))
TABLE_ROWS = int(os.environ.get("BENCH_TABLE_ROWS", 10_000_000))
EPOCHS = int(os.environ.get("BENCH_EPOCHS", 2_000))
KEYS = 10_000
BATCH_ROWS = 1 << 16
TURNS = 3
TOPIC = "/bench/rows"
ZSTD = WriterProperties(compression="ZSTD", compression_level=1)

Sink = SinkConnector[Any, Any]


def batches(first: int, count: int) -> list[pa.RecordBatch]:
    """Rows as a shop has them, whose values follow from their ids: numbers, few and many distinct texts, times."""
    made = []
    for start in range(first, first + count, BATCH_ROWS):
        ids = np.arange(start, min(start + BATCH_ROWS, first + count))
        text = pa.array(ids).cast(pa.string())
        made.append(
            pa.record_batch(
                {
                    "id": pa.array(ids),
                    "name": pc.binary_join_element_wise("name", pa.array(ids % 9973).cast(pa.string()), "-"),
                    "amount": pa.array(ids * 31 % 1_000_003, pa.int32()),
                    "ratio": pa.array(np.sqrt(ids)),
                    "paid": pa.array(ids % 3 == 0),
                    "day": pa.array((ids % 20_000).astype("int32")).view(pa.date32()),
                    "at": pa.array(1_700_000_000_000_000 + ids * 1000, pa.timestamp("us", "UTC")),
                    "note": pc.binary_join_element_wise("order", text, "of the day", " "),
                }
            )
        )
    return made


class Tasks:
    """Two processes that have made their half of the rows and wait for the word; they stage, and give their receipts."""

    def __init__(self, sink: Sink, rows: int) -> None:
        context = multiprocessing.get_context("spawn")  # the clients do not outlive a fork
        self._ends = []
        for number in range(2):
            here, there = context.Pipe()
            half = rows // 2
            context.Process(target=_task, args=(there, sink, number, number * half, half), daemon=True).start()
            self._ends.append(here)
        assert [end.recv() for end in self._ends] == ["ready"] * 2

    def stage(self, epoch: Epoch) -> list[Any]:
        for end in self._ends:
            end.send(epoch)
        return [end.recv() for end in self._ends]

    def close(self) -> None:
        for end in self._ends:
            end.close()


def _task(end: Any, sink: Sink, number: int, first: int, count: int) -> None:
    part = batches(first, count)
    sink.open()
    end.send("ready")
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


# -- appends ---------------------------------------------------------------------------------------------------------


def in_turns(
    sink: Sink, rows: int, theirs: Callable[[], Any], clean: Callable[[str], Any] = lambda _: None
) -> list[float]:
    """The rows per second of us and of a peer, each at its best; the machine's moods meet both."""
    tasks, spent = Tasks(sink, rows), {"ours": [], "theirs": []}

    def ours(number: int) -> None:
        epoch = Epoch("bench", "one", number)
        sink.commit_epoch(epoch, tasks.stage(epoch), {})

    for number in range(1, TURNS + 1):
        clean("ours")
        spent["ours"].append(timed(lambda number=number: ours(number)))
        clean("theirs")
        spent["theirs"].append(timed(theirs))
    tasks.close()
    return [rows / min(each) for each in spent.values()]


def told(
    bench: Bench, name: str, what: tuple[str, str], peer: tuple[str, str], rates: list[float], goal: float
) -> None:
    for (label, note), rate in zip((what, peer), rates, strict=True):
        bench.row(label, f"{rate / 1e6:.2f} M rows/s", note)
    bench.claim(name, rates[0] / rates[1], ">=", goal)


def delta_append(bench: Bench) -> None:
    rows = batches(0, ROWS)
    with scratch() as path:

        def append() -> None:
            stream = pa.RecordBatchReader.from_batches(rows[0].schema, rows)
            write_deltalake(path / "theirs", stream, mode="append", writer_properties=ZSTD)

        rates = in_turns(delta(path / "ours"), ROWS, append)
        written = [DeltaTable(each).to_pyarrow_dataset() for each in (path / "ours" / TOPIC[1:], path / "theirs")]
        sums = [pc.sum(each.to_table(columns=["id"]).column("id")).as_py() for each in written]
        assert sums == [TURNS * ROWS * (ROWS - 1) // 2] * 2, f"not the same rows: {sums}"
    ours = ("delta: append with two tasks", f"{ROWS:,} rows an epoch; files and log fsynced")
    peer = ("`write_deltalake` of the same batches", "one process, no fsync")
    told(bench, "delta_append_vs_write_deltalake", ours, peer, rates, 0.8)


def iceberg_append(bench: Bench) -> None:
    rows = pa.Table.from_batches(batches(0, ROWS))
    with scratch() as path:
        (path / "theirs").mkdir()
        catalog = SqlCatalog("default", uri=f"sqlite:///{path}/theirs/catalog.db", warehouse=str(path / "theirs"))
        catalog.create_namespace("bench")
        table = catalog.create_table("bench.rows", rows.schema)
        sink = Iceberg(IcebergConfig(path=f"{path}/ours/{{topic}}"))
        sink.open()
        rates = in_turns(sink, ROWS, lambda: table.append(rows))
        ours = SqlCatalog("default", uri=f"sqlite:///{path}/ours/catalog.db").load_table("bench.rows")
        sums = [pc.sum(each.scan(selected_fields=("id",)).to_arrow().column("id")).as_py() for each in (ours, table)]
        assert sums == [TURNS * ROWS * (ROWS - 1) // 2] * 2, f"not the same rows: {sums}"
    label = ("iceberg: append with two tasks", f"{ROWS:,} rows an epoch; files and metadata fsynced")
    peer = ("`pyiceberg` `append` of the same rows", "one process, no fsync")
    told(bench, "iceberg_append_vs_pyiceberg", label, peer, rates, 0.7)


def postgres_append(bench: Bench) -> None:
    rows = ROWS // 2
    with postgres.server() as server, scratch() as path, postgres.connect(server.dsn) as connection:
        columns = "id int8, name text, amount int4, ratio float8, paid bool, day date, at timestamptz, note text"
        connection.execute(f"CREATE TABLE ours ({columns}); CREATE TABLE theirs ({columns})")
        sink = Postgres(PostgresSinkConfig(dsn=server.dsn, table="public.ours"))
        sink.open()
        tasks, epoch = Tasks(sink, rows), Epoch("bench", "one", 0)
        sink.commit_epoch(epoch, tasks.stage(epoch), {})
        tasks.close()
        psql = [server.bin / "psql", server.dsn, "-qc"]
        subprocess.run([*psql, f"\\copy ours TO '{path}/rows'"], check=True)

        def clean(whose: str) -> None:
            connection.execute(f"TRUNCATE {whose}")
            connection.execute("CHECKPOINT")

        def copy() -> None:
            subprocess.run([*psql, f"\\copy theirs FROM '{path}/rows'"], check=True)

        rates = in_turns(sink, rows, copy, clean)
        same = connection.execute(
            "SELECT NOT EXISTS (TABLE ours EXCEPT ALL TABLE theirs), (SELECT count(*) FROM ours), "
            "(SELECT count(*) FROM theirs)"
        ).fetchone()
        assert same == (True, rows, rows), f"the tables differ: {same}"
        sink.close()
    ours = ("postgres: append with two tasks", f"{rows:,} rows an epoch; staged, then one transaction")
    told(bench, "postgres_append_vs_copy", ours, ("`COPY` from a file by one `psql`", "text"), rates, 0.7)


# -- upserts ---------------------------------------------------------------------------------------------------------


def delta_upsert(bench: Bench) -> None:
    seconds: dict[int, float] = {}
    for count in (TABLE_ROWS // 10, TABLE_ROWS):
        with scratch() as path:
            ours, theirs = path / "ours" / TOPIC[1:], path / "theirs"
            for first in range(0, count, TABLE_ROWS // 10):
                table = pa.Table.from_batches(batches(first, TABLE_ROWS // 10))
                write_deltalake(theirs, table, mode="append", writer_properties=ZSTD)
            shutil.copytree(theirs, ours)
            sink = delta(path / "ours", mode="upsert", key=["id"], optimize_every_epochs=0)
            seconds[count], by_hand = _upsert(sink, ours, theirs, count)
    bench.row(f"delta: upsert of {KEYS:,} clustered keys", f"{seconds[TABLE_ROWS]:.2f} s", f"into {TABLE_ROWS:,} rows")
    bench.row("the same into a tenth of the rows", f"{seconds[TABLE_ROWS // 10]:.2f} s", "one file instead of ten")
    bench.row("`DeltaTable.merge` of the same", f"{by_hand:.2f} s", "bounds of the keys in the predicate")
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


# -- commits ---------------------------------------------------------------------------------------------------------


def commits(sink: Sink) -> list[float]:
    """The milliseconds of every commit of a long run of small epochs, beyond the write itself."""
    (batch,) = batches(0, 10)
    spent = []
    for number in range(1, EPOCHS + 1):
        epoch = Epoch("bench", "one", number)
        sink.begin_epoch(epoch, Task(0))
        sink.write_batch(TOPIC, batch)
        receipt = sink.pre_commit(epoch)
        spent.append(1000 * timed(lambda e=epoch, r=receipt: sink.commit_epoch(e, [r], {"source": {"n": e.number}})))
    marker = sink.committed_epoch("bench", TOPIC)
    assert marker is not None
    assert marker.number == EPOCHS
    return spent


def commit_rows(bench: Bench, name: str, goal: int, spent: list[float], live: str) -> None:
    window = min(100, EPOCHS // 4)
    early, late = (statistics.median(each) for each in (spent[:window], spent[-window:]))
    mean = statistics.mean(spent[-EPOCHS // 4 :])
    bench.row(f"{name}: commit of an epoch, at first", f"{early:.0f} ms", "median, beyond the write; all fsynced")
    bench.row(f"the same after {EPOCHS:,} epochs", f"{late:.0f} ms", f"median; {live}")
    bench.row("the same with upkeep shared out", f"{mean:.0f} ms", f"mean of the last quarter, worst {max(spent):.0f}")
    bench.claim(f"{name}_commit_vs_{goal}ms", late / goal, "<=", 1)
    bench.claim(f"{name}_commit_with_upkeep_vs_{goal}ms", mean / goal, "<=", 1)


def delta_commits(bench: Bench) -> None:
    with scratch() as path:
        spent = commits(delta(path))
        table = DeltaTable(path / TOPIC[1:])
        assert table.to_pyarrow_dataset().count_rows() == 10 * EPOCHS
        commit_rows(bench, "delta", 60, spent, f"{len(table.file_uris())} files are live")


def iceberg_commits(bench: Bench) -> None:
    with scratch() as path:
        sink = Iceberg(IcebergConfig(path=f"{path}/{{topic}}"))
        sink.open()
        spent = commits(sink)
        table = SqlCatalog("default", uri=f"sqlite:///{path}/catalog.db").load_table("bench.rows")
        assert table.scan().count() == 10 * EPOCHS
        commit_rows(bench, "iceberg", 120, spent, f"{len(table.metadata.snapshots)} snapshots are kept")


def main() -> None:
    bench = Bench("sinks", "Sinks")
    for measure in (delta_append, iceberg_append, postgres_append, delta_upsert, delta_commits, iceberg_commits):
        measure(bench)
    bench.finish()


if __name__ == "__main__":
    main()
