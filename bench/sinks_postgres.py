"""
How fast rows are appended to a PostgreSQL table, beside COPY from a prepared file by one `psql`.

Both write the same rows into an empty table without an index; ours with two tasks, a staging table and a commit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pyarrow as pa
from measure import Bench

from penstock.connectors.postgres import Postgres, PostgresSinkConfig
from penstock.sink import Epoch, Task
from penstock.testing.engine import Forked
from penstock.testing.postgres import PostgresServer

ROWS = int(os.environ.get("BENCH_ROWS", 2_000_000))
TURNS = 3
BATCH = 50_000
COLUMNS = (
    "id int8, customer int8, quantity int4, price numeric(10, 2), paid bool, weight float8, day date, at timestamptz, "
    "name text, note text"
)


def batches(first: int, rows: int) -> list[pa.RecordBatch]:
    """Orders, as they are each time."""
    found = []
    for start in range(first, first + rows, BATCH):
        ids = pa.array(range(start, min(start + BATCH, first + rows)), pa.int64())
        numbers = ids.to_numpy()
        found.append(
            pa.record_batch(
                {
                    "id": ids,
                    "customer": numbers * 7919 % 1_000_003,
                    "quantity": pa.array(numbers % 17, pa.int32()),
                    "price": pa.array(numbers % 100_000, pa.int64())
                    .cast(pa.decimal128(21, 2))
                    .cast(pa.decimal128(10, 2)),
                    "paid": numbers % 3 == 0,
                    "weight": numbers / 7,
                    "day": pa.array((numbers % 20_000).astype("int32")).view(pa.date32()),
                    "at": pa.array(numbers * 1_000_003).view(pa.timestamp("us", "UTC")),
                    "name": pa.array([f"customer {n % 5003}" for n in numbers]),
                    "note": pa.array([f"order {n} of many, to be sent at once" for n in numbers]),
                }
            )
        )
    return found


def ours(server: PostgresServer, number: int, parts: list[list[pa.RecordBatch]]) -> float:
    """Two tasks stage and the driver commits; the tasks' processes and rows are there before the clock starts."""
    sink = Postgres(PostgresSinkConfig(dsn=server.dsn, table="bench.ours"))
    sink.open()
    epoch = Epoch("bench", "one", number)

    def task(partition: int) -> object:
        worker = Postgres(sink.config)
        worker.open()
        worker.begin_epoch(epoch, Task(partition))
        for batch in parts[partition]:
            worker.write_batch("/ours", batch)
        receipt = worker.pre_commit(epoch)
        worker.close()
        return receipt

    began = time.perf_counter()
    tasks = [Forked(lambda part=part: task(part)) for part in range(len(parts))]
    receipts = [each.result() for each in tasks]
    staged = time.perf_counter()
    sink.commit_epoch(epoch, receipts, {})
    ended = time.perf_counter()
    sink.close()
    print(f"    staged in {staged - began:.2f} s, committed in {ended - staged:.2f} s", flush=True)
    return ended - began


def theirs(server: PostgresServer, file: Path) -> float:
    began = time.perf_counter()
    subprocess.run([server.bin / "psql", server.dsn, "-qc", f"\\copy bench.theirs FROM '{file}'"], check=True)
    return time.perf_counter() - began


def measured(server: PostgresServer, scratch: Path, parts: list[list[pa.RecordBatch]]) -> dict[str, list[float]]:
    """The seconds that each took, in turns; the tables must hold the same in the end."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        tables = "; ".join(f"CREATE TABLE bench.{who} ({COLUMNS})" for who in times)
        connection.execute(f"CREATE SCHEMA bench; {tables}")
        ours(server, 1, parts)
        file = scratch / "orders"
        with open(file, "wb") as out, connection.cursor().copy("COPY bench.ours TO STDOUT") as copy:
            for data in copy:
                out.write(data)
        for turn in range(TURNS):
            connection.execute("TRUNCATE bench.ours, bench.theirs")
            connection.execute("CHECKPOINT")
            times["theirs"].append(theirs(server, file))
            connection.execute("CHECKPOINT")
            times["ours"].append(ours(server, turn + 2, parts))
        same = connection.execute(
            "SELECT NOT EXISTS (TABLE bench.ours EXCEPT TABLE bench.theirs) AND (SELECT count(*) FROM bench.ours) = "
            "(SELECT count(*) FROM bench.theirs)"
        ).fetchone()
        assert same == (True,), "the tables differ"
    return times


def postgres_append(bench: Bench) -> None:
    """The claim about the PostgreSQL sink."""
    parts = [batches(first, ROWS // 2) for first in (0, ROWS // 2)]
    settings = {"shared_buffers": "512MB", "max_wal_size": "16GB"}
    with PostgresServer(18, settings=settings) as server, tempfile.TemporaryDirectory() as scratch:
        times = measured(server, Path(scratch), parts)
    rates = {who: ROWS / statistics.median(taken) for who, taken in times.items()}
    bench.row("postgres append, two tasks", f"{rates['ours']:,.0f} rows/s", "staged, committed in one transaction")
    bench.row("COPY from a file by one psql", f"{rates['theirs']:,.0f} rows/s", "text format")
    bench.claim("postgres_append_vs_copy", rates["ours"] / rates["theirs"], ">=", 0.7)


if __name__ == "__main__":
    bench = Bench("sinks_postgres", "Appending to PostgreSQL")
    postgres_append(bench)
    bench.finish()
