"""
What the engine costs: an epoch, a row, a task's memory, the start.

Each figure stands beside a peer that is measured in the same run, on the same data.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from measure import Bench
from modules import one_row

from penstock.connectors.files.sink import FilesSink, FilesSinkConfig
from penstock.connectors.generator import Generator, GeneratorConfig
from penstock.durable import fsync
from penstock.pipeline.routing import Route, Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.sink import Epoch
from penstock.spark import SparkEngine

ROWS = int(os.environ.get("BENCH_ROWS", 20_000_000))


class Weighed(FilesSink):
    """The files sink, and the most memory that its worker process has held."""

    def pre_commit(self, epoch: Epoch) -> Any:
        receipt = super().pre_commit(epoch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (Path(self.config.path.split("{")[0]) / f"peak-{os.getpid()}").write_text(str(peak))
        return receipt


def pump(
    engine: SparkEngine, source: Any, sink: Any, scratch: Path, epochs: int, rows: int, **route: Any
) -> list[float]:
    """Run epochs of `rows` rows and give back what each took, from plan to ack."""
    state = State(Path(tempfile.mkdtemp(dir=scratch)), "bench")
    state.open()
    router = Router((Route(**route),), ("sink",))
    loop = EpochLoop(state, {"source": source}, {"sink": sink}, router, engine, max_epoch_rows=rows)
    loop.contexts.open()
    loop.start([])
    took = []
    for _ in range(epochs):
        began = time.perf_counter()
        if loop.step() is None:
            break
        took.append(time.perf_counter() - began)
    state.close()
    return took


def epoch_cost(bench: Bench, engine: SparkEngine, scratch: Path) -> None:
    ours, with_files, theirs = [], [], []
    for round_ in range(3):  # in turns, so that a noisy moment of the machine does not fall on one of them
        files = FilesSink(FilesSinkConfig(path=str(scratch / f"one-{round_}" / "{topic}")))
        ours.append(
            statistics.median(
                pump(engine, one_row.OneRow(one_row.NoOptions()), one_row.Nowhere(one_row.NoOptions()), scratch, 50, 1)[
                    10:
                ]
            )
            * 1000
        )
        with_files.append(
            statistics.median(pump(engine, one_row.OneRow(one_row.NoOptions()), files, scratch, 40, 1)[10:]) * 1000
        )
        theirs.append(micro_batch(engine, scratch))
    note = "manifests planned, prepared, committed: fsynced; best median of 3"
    bench.row("an epoch with one row → nowhere", f"{min(ours):.0f} ms", note)
    bench.row("an epoch with one row → files", f"{min(with_files):.0f} ms", "the same, and a Parquet file, fsynced")
    bench.row(
        "Spark's micro-batch, one row → noop", f"{min(theirs):.0f} ms", "FileSystemBasedCheckpointFileManager, no fsync"
    )
    bench.claim("epoch_vs_micro_batch", min(ours) / min(theirs), "<=", 0.8)


def micro_batch(engine: SparkEngine, scratch: Path) -> float:
    spark = engine.session
    manager = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", manager)
    spark.dataSource.register(one_row.OneRowSource)
    checkpoint = tempfile.mkdtemp(dir=scratch)
    query = (
        spark.readStream.format("one_row")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .start()
    )
    while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < 40):
        time.sleep(0.2)
    took = [progress.durationMs["triggerExecution"] for progress in query.recentProgress if progress.batchId >= 10]
    query.stop()
    return statistics.median(took)


def _plain_writer(first: int, last: int, path: str, ready: Any, go: Any) -> None:
    source = Generator(GeneratorConfig(rows=ROWS))
    split = source.split(source.position_type(ids={"rows": first}), source.position_type(ids={"rows": last}))
    ready.release()
    go.wait()
    writer = None
    for part in split:
        for batch in source.read(part):
            writer = writer or pq.ParquetWriter(path, batch.records.schema, compression="zstd")
            writer.write_batch(batch.records)
    writer.close()
    fsync(path)


def throughput(bench: Bench, engine: SparkEngine, scratch: Path) -> None:
    turns = [(plain_rate(scratch), passthrough_rate(engine, scratch)) for _ in range(2)]
    plain, ours = (max(rates) for rates in zip(*turns, strict=True))
    bench.row(
        "generator → files, passthrough, 2 tasks", f"{ours / 1e6:.2f} M rows/s", f"{ROWS // 10**6} M rows, 2 epochs"
    )
    bench.row(
        "two plain processes with pyarrow", f"{plain / 1e6:.2f} M rows/s", "same batches, fsync; best of 2, in turns"
    )
    bench.claim("passthrough_vs_pyarrow", ours / plain, ">=", 0.7)


def plain_rate(scratch: Path) -> float:
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    half = ROWS // 2
    paths = [scratch / f"plain-{first}.parquet" for first in (0, half)]
    processes = [
        context.Process(target=_plain_writer, args=(first, first + half, str(path), ready, go))
        for first, path in zip((0, half), paths, strict=True)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    began = time.perf_counter()
    go.set()
    for process in processes:
        process.join()
    took = time.perf_counter() - began
    for path in paths:
        path.unlink()
    return ROWS / took


def passthrough_rate(engine: SparkEngine, scratch: Path) -> float:
    target = scratch / "ours"
    sink = FilesSink(FilesSinkConfig(path=str(target / "{topic}")))
    took = sum(pump(engine, Generator(GeneratorConfig(rows=ROWS)), sink, scratch, 9, ROWS // 2))
    rows = sum(pq.read_metadata(file).num_rows for file in target.rglob("*.parquet"))
    assert rows == ROWS, f"{rows} of {ROWS} rows arrived"
    shutil.rmtree(target)
    return ROWS / took


def memory(bench: Bench, scratch: Path) -> None:
    """Peak memory of a task, in workers that are not used again."""
    peaks = {}
    for rows in (1_000_000, 20_000_000):
        target = scratch / f"memory-{rows}"
        target.mkdir()
        subprocess.run([sys.executable, __file__, "--memory", str(rows), str(target)], check=True)
        peaks[rows] = max(int(file.read_text()) for file in target.glob("peak-*")) / 1024
        shutil.rmtree(target)
    small, large = peaks.values()
    bench.row("a task's peak memory, 1 M rows", f"{small:.0f} MiB", "generator → files, 2 tasks, one epoch")
    bench.row("a task's peak memory, 20 M rows", f"{large:.0f} MiB", "")
    bench.claim("task_memory_20m_vs_1m", large / small, "<=", 1.2)


def memory_run(rows: int, target: Path) -> None:
    engine = SparkEngine(master="local[2]", log=target / "spark.log")
    engine.start()
    sink = Weighed(FilesSinkConfig(path=str(target) + "/{topic}"))
    pump(engine, Generator(GeneratorConfig(rows=rows)), sink, target, 1, rows)
    engine.stop()


BARE = """
import os, sys, time
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
assert spark.sparkContext.parallelize([1], 1).map(lambda n: n + 1).collect() == [2]
print(time.time())
"""

PIPELINE = """
connector_name = "first-row"
delivery = "exactly-once"
[source]
connector = "generator"
rows = 1
[sink]
connector = "files"
path = "rows"
"""

FIRST = """
import sys, time
from penstock.pipeline import Pipeline
from penstock.runtime import supervisor
from penstock.spark import engine_for
from penstock.runtime.telemetry import Telemetry
class Timed(Telemetry):
    def epoch(self, report):
        print(time.time(), flush=True)
pipeline = Pipeline.from_toml(sys.argv[1])
supervisor.run(pipeline, engine_for(pipeline, master="local[2]"), drain=True, telemetry=Timed.of(pipeline))
"""


def first_row(bench: Bench, scratch: Path) -> None:
    def timed(code: str, *arguments: str) -> float:
        began = time.time()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1]) - began

    bare, ours = [], []
    for round_ in range(3):
        bare.append(timed(BARE))
        home = scratch / f"first-{round_}"
        home.mkdir()
        (home / "pipeline.toml").write_text(PIPELINE)
        ours.append(timed(FIRST, str(home / "pipeline.toml")))
    bench.row("process start → first committed row", f"{min(ours):.1f} s", "best of 3, JVM included")
    bench.row("process start → bare session and one job", f"{min(bare):.1f} s", "best of 3")
    bench.claim("first_row_vs_bare_spark", min(ours) / min(bare), "<=", 1.3)


def main() -> None:
    bench = Bench("engine", "What the engine costs")
    # Workers import the connectors of this bench, ours and Spark's, as they would import anybody's.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        scratch = Path(name)
        first_row(bench, scratch)
        memory(bench, scratch)
        engine = SparkEngine(master="local[2]", log=scratch / "spark.log")
        engine.start()
        epoch_cost(bench, engine, scratch)
        throughput(bench, engine, scratch)
        engine.stop()
    bench.finish()


if __name__ == "__main__":
    if "--memory" in sys.argv:
        memory_run(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
