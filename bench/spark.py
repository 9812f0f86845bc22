"""
Spark's own queries with our sinks, and our routes with Spark's queries, each beside the same in plain Spark.

Wall time decides; the CPU seconds of all processes are shown beside it. The JDBC driver comes from Maven at the first run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
from engine import pump
from measure import Bench

import penstock
from penstock.connectors.files import Files, FilesConfig
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig
from penstock.connectors.generator import Generator, GeneratorConfig
from penstock.spark import SparkEngine
from penstock.spark.streaming import SETTINGS
from penstock.testing.postgres import PostgresServer

ROWS = int(os.environ.get("BENCH_ROWS", 4_000_000))
BATCHES = 4
JDBC = "org.postgresql:postgresql:42.7.7"
QUERY = "SELECT id, upper(name) AS name, amount * 2 AS amount, ratio, at FROM input WHERE id % 3 <> 0"
COUNTS = "SELECT id % 1000 AS bucket, count(*) AS n, sum(amount) AS amount FROM input GROUP BY id % 1000"

Cost = tuple[float, float]
"""Seconds by the clock, and of CPU."""


def cpu() -> float:
    """CPU seconds of this process and all that it has started, those that ended among them."""
    total = 0.0
    root = psutil.Process()
    for process in (root, *root.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def cost(run: Callable[[], Any]) -> Cost:
    used, began = cpu(), time.perf_counter()
    run()
    return time.perf_counter() - began, cpu() - used


def compare(
    bench: Bench, name: str, target: float, rows: int, ways: Sequence[tuple[str, Callable[[], Any]]], turns: int = 3
) -> None:
    """Ours and theirs in turns, best of each after one that only warms up; claims how much quicker ours is."""
    for _, run in ways:
        run()
    costs = [[cost(run) for _, run in ways] for _ in range(turns)]
    best = [tuple(min(each[way][kind] for each in costs) for kind in (0, 1)) for way in range(len(ways))]
    for (what, _), (wall, used) in zip(ways, best, strict=True):
        bench.row(
            what, f"{rows / wall / 1e6:.2f} M rows/s", f"{wall:.1f} s, {used:.1f} CPU s; best of {turns}, in turns"
        )
    ours, theirs = best
    bench.claim(name, theirs[0] / ours[0], ">=", target)
    bench.row(f"{name}, by CPU", f"{theirs[1] / ours[1]:.2f}")


class Data:
    """The same rows as files, one for each batch, and queries over them."""

    def __init__(self, engine: SparkEngine, scratch: Path, rows: int) -> None:
        self.engine, self.scratch, self.rows = engine, scratch, rows
        self.path = scratch / f"data-{rows}"
        made = scratch / f"made-{rows}"
        pump(
            engine, Generator(GeneratorConfig(rows=rows)), FilesSink(FilesSinkConfig(path=str(made))), scratch, 1, rows
        )
        parts = engine.session.read.parquet(str(made)).repartition(BATCHES).write.option("compression", "zstd")
        parts.parquet(str(self.path))
        shutil.rmtree(made)

    def stream(self) -> Any:
        schema = self.engine.session.read.parquet(str(self.path)).schema
        return self.engine.session.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(self.path))

    def fresh(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=name, dir=self.scratch))


def finish(writer: Any, checkpoint: Path) -> None:
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    assert len(list((checkpoint / "commits").glob("[0-9]*"))) >= BATCHES, "one batch a file"


def lake(bench: Bench, data: Data) -> None:
    def theirs() -> None:
        out = data.fresh("parquet")
        writer = (
            data.stream().writeStream.format("parquet").option("compression", "zstd").option("path", str(out / "out"))
        )
        finish(writer, out / "checkpoint")
        shutil.rmtree(out)

    def ours() -> None:
        out = data.fresh("delta")
        writer = data.stream().writeStream.format("penstock").options(connector="delta", path=str(out / "out"))
        finish(writer, out / "checkpoint")
        shutil.rmtree(out)

    ways = [('writeStream.format("penstock") → Delta', ours), ("the same query → Spark's Parquet sink", theirs)]
    compare(bench, "delta_vs_parquet_sink", 1.0, data.rows, ways)


def postgres(bench: Bench, data: Data, server: PostgresServer) -> None:
    url = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres"
    user = psycopg.conninfo.conninfo_to_dict(server.dsn)["user"]
    properties = {"user": str(user), "driver": "org.postgresql.Driver"}

    def theirs() -> None:
        table, out = f"t{uuid4().hex}", data.fresh("jdbc")
        write = lambda batch, number: batch.write.mode("append").jdbc(url, table, properties=properties)  # noqa: E731
        finish(data.stream().writeStream.foreachBatch(write), out / "checkpoint")
        drop(table)

    def ours() -> None:
        table, out = f"t{uuid4().hex}", data.fresh("ours")
        writer = data.stream().writeStream.format("penstock")
        finish(writer.options(connector="postgres", dsn=server.dsn, table=f"public.{table}"), out / "checkpoint")
        drop(table)

    def drop(table: str) -> None:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # type: ignore[misc]
            assert count == data.rows, f"{count} of {data.rows} rows arrived"
            connection.execute(f"DROP TABLE {table}")

    ways = [('writeStream.format("penstock") → PostgreSQL', ours), ("foreachBatch with Spark's JDBC writer", theirs)]
    compare(bench, "postgres_vs_jdbc", 2.0, data.rows, ways, turns=1)


def sql(bench: Bench, data: Data) -> None:
    spark, scratch = data.engine.session, data.scratch

    def theirs() -> None:
        shutil.rmtree(scratch / "plain-sql", ignore_errors=True)
        spark.read.parquet(str(data.path)).createOrReplaceTempView("input")
        spark.sql(QUERY).write.option("compression", "zstd").parquet(str(scratch / "plain-sql"))

    def ours() -> None:
        shutil.rmtree(scratch / "sql", ignore_errors=True)
        source = Files(FilesConfig(path=str(data.path / "*.parquet"), settle_ms=0))
        pump(
            data.engine, source, FilesSink(FilesSinkConfig(path=str(scratch / "sql"))), scratch, 9, data.rows, sql=QUERY
        )

    ways = [("Parquet → SQL → Parquet, a route", ours), ("the same query in plain Spark", theirs)]
    compare(bench, "sql_vs_plain_spark", 0.9, data.rows, ways)
    digest = "SELECT count(*), sum(id), sum(hash(name)), sum(amount), max(at) FROM parquet.`{}`"
    first, second = (spark.sql(digest.format(scratch / name)).first() for name in ("sql", "plain-sql"))
    assert first == second, f"{first} is not {second}"


def stateful(bench: Bench, data: Data) -> None:
    spark = data.engine.session
    for option, value in SETTINGS.items():
        spark.conf.set(option, value)

    def theirs() -> None:
        out = data.fresh("by-hand")
        write = lambda batch, number: batch.write.mode("append").parquet(str(out / "out"))  # noqa: E731
        data.stream().createOrReplaceTempView("input")
        finish(spark.sql(COUNTS).writeStream.outputMode("update").foreachBatch(write), out / "checkpoint")

    def ours() -> None:
        out = data.fresh("route")
        source = Files(FilesConfig(path=str(data.path / "*.parquet"), settle_ms=0, max_files_per_epoch=1))
        sink = FilesSink(FilesSinkConfig(path=str(out / "out")))
        took = pump(
            data.engine, source, sink, data.scratch, 9, data.rows, sql=COUNTS, streaming=True, output_mode="update"
        )
        assert len(took) == BATCHES

    ways = [("a route with state, an epoch a file", ours), ("the same query by hand, a batch a file", theirs)]
    compare(bench, "stateful_vs_by_hand", 0.8, data.rows, ways)


ARCHIVED = """
import sys, time
from penstock.pipeline import Pipeline
from penstock.spark.pack import pack
began = time.perf_counter()
pack(sys.argv[2], Pipeline.from_toml(sys.argv[1]))
print(time.perf_counter() - began)
"""

PIPELINE = """
connector_name = "packed"
[source]
connector = "generator"
[sink]
connector = "delta"
path = "rows"
"""


def archive(bench: Bench, scratch: Path) -> None:
    """What an environment that travels costs: once to make, and once for each executor to unpack; an epoch costs the same."""
    (scratch / "pipeline.toml").write_text(PIPELINE)
    target = scratch / "environment.tar.gz"
    command = [sys.executable, "-c", ARCHIVED, scratch / "pipeline.toml", target]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, used = cost(lambda: shutil.unpack_archive(target, scratch / "unpacked", filter="data"))
    size = target.stat().st_size / 2**20
    note = f"{size:.0f} MiB; an executor unpacks it in {used:.1f} CPU s, once"
    bench.row("penstock pack, generator → delta", f"{float(done.stdout):.1f} s", note)


def main() -> None:
    bench = Bench("spark", "Spark's own queries into sinks, and queries in routes, beside plain Spark")
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", f"--packages {JDBC} pyspark-shell")
    scratch = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    engine = SparkEngine(master="local[2]", log=scratch / "log" / "spark.log")
    engine.start()
    penstock.register(engine.session)
    try:
        data = Data(engine, scratch, ROWS)
        sql(bench, data)
        lake(bench, data)
        stateful(bench, data)
        with PostgresServer(18, settings={"fsync": "off"}) as server:
            postgres(bench, Data(engine, scratch, ROWS // 10), server)
        archive(bench, scratch)
    finally:
        engine.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    bench.finish()


if __name__ == "__main__":
    main()
