"""What the benches on PostgreSQL share: a server, a table of ten columns, our own epochs, peers, and what each takes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from adbc_driver_postgresql import dbapi as adbc
from deltalake import DeltaTable

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.postgres_cdc import PostgresCdc, PostgresCdcConfig
from penstock.pipeline.routing import Route, Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.spark import SparkEngine
from penstock.testing.postgres import PostgresServer

PEERS = Path(__file__).resolve().parent / ".peers"
STUCK_SECONDS = 1800
"""After so long a process counts as stuck."""

SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "32GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",  # it would come at some peer's time and not at another's
    "wal_sender_timeout": "0",
}

COLUMNS = """
    id bigint PRIMARY KEY, customer integer NOT NULL, name text NOT NULL, email text, amount numeric(12,2) NOT NULL,
    quantity smallint, ratio double precision, active boolean, day date, at timestamptz
"""
ROW = """
    i, (i * 7919 % 1000003)::int, 'customer ' || i % 10007, CASE WHEN i % 7 > 0 THEN 'c' || i || '@example.org' END,
    (i % 1000000) / 100.0, (i % 100)::smallint, i / 8.0, i % 2 = 0, date '2020-01-01' + (i % 3650)::int,
    timestamptz '2024-01-01 00:00:00Z' + i * interval '1 millisecond'
"""
"""The row of the number `i`."""
CHUNK_ROWS = 500_000
"""Rows that are compared at a time."""


def server() -> PostgresServer:
    return PostgresServer(18, settings=SETTINGS)


def connect(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True)


# -- ours ------------------------------------------------------------------------------------------------------------


@contextmanager
def epochs(
    dsn: str, table: str, target: Path, engine: SparkEngine, compression: Any = "zstd", **options: Any
) -> Iterator[EpochLoop]:
    """The epochs of one table into a Delta table: `step` gives a report of each."""
    config = PostgresCdcConfig(dsn=dsn, tables=(f"public.{table}",), slot=table, publication=table, **options)
    into = DeltaConfig(path=str(target / "{topic}"), mode="changes", compression=compression)
    source, sink = PostgresCdc(config), Delta(into)
    state = State(target / f"state-{table}", table)
    state.open()
    loop = EpochLoop(state, {"source": source}, {"sink": sink}, Router((Route(),), ("sink",)), engine)
    loop.contexts.open()
    loop.start([])
    yield loop
    source.close()
    sink.close()
    state.close()


def is_seeded(loop: EpochLoop) -> bool:
    """True once every table is copied."""
    newest = loop.state.newest
    assert newest is not None
    return all(table["state"] == "seeded" for table in newest.ranges["source"].end["tables"].values())


def compare(dsn: str, table: str, target: Path, rows: int) -> None:
    """Compare every value of the Delta table with the one in PostgreSQL."""
    delta = DeltaTable(target / f"public.{table}")
    mirrored = ds.dataset([str(target / f"public.{table}" / file) for file in _files(delta)], format="parquet")
    seen = 0
    with closing(adbc.connect(dsn, autocommit=True)) as connection, connection.cursor() as cursor:
        for first in range(0, rows + 1, CHUNK_ROWS):
            cursor.execute(
                "SELECT id, customer, name, email, amount::text AS amount, quantity, ratio, active, day, at "
                f"FROM {table} WHERE id >= {first} AND id < {first + CHUNK_ROWS} ORDER BY id"
            )
            theirs = cursor.fetch_arrow_table()
            between = (pc.field("id") >= first) & (pc.field("id") < first + CHUNK_ROWS)
            ours = mirrored.to_table(columns=theirs.column_names, filter=between).sort_by("id").cast(theirs.schema)
            for name in theirs.column_names:
                assert ours.column(name).equals(theirs.column(name)), f"{name} differs behind id {first}"
            seen += ours.num_rows
    assert seen == mirrored.count_rows() == rows, f"{seen} of {mirrored.count_rows()} rows compared, {rows} written"


def _files(delta: DeltaTable) -> list[str]:
    return [str(path) for path in pa.table(delta.get_add_actions()).column("path").to_pylist()]


# -- peers -----------------------------------------------------------------------------------------------------------


class PeerMissing(Exception):
    """A peer cannot be installed here, so that nothing is claimed about it."""


def peer(name: str, *requirements: str) -> Path:
    """The Python of an environment with the peer in it; installed once, and anew when the requirements change."""
    home = PEERS / name
    stamp, wanted = home / "installed", "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        for command in (
            [sys.executable, "-m", "venv", str(home)],
            [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements],
        ):
            done = subprocess.run(command, capture_output=True, text=True, env=_without_constraints())
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines()
                raise PeerMissing(lines[-1] if lines else f"{command[0]} ended with {done.returncode}")
        stamp.write_text(wanted)
    return home / "bin" / "python"


def _without_constraints() -> dict[str, str]:
    """Peers come in the versions they ask for, not in ours."""
    return {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name and name != "PYTHONPATH"}


class Child:
    """A process that says `ready`, is told to go, and ends with a line of JSON; its tree is measured from then on."""

    def __init__(self, command: Sequence[Any], log: Path, cwd: Path, *, peer: bool = False) -> None:
        self._log = log
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=cwd,
                env=_without_constraints() if peer else None,
            )
        self._stuck = threading.Timer(STUCK_SECONDS, self._process.kill)
        self._stuck.daemon = True
        self._stuck.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stuck.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def until(self, word: str) -> str:
        """The next line that begins with the word."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError(f"a process ended before it said {word!r}:\n{self._log.read_text()[-3000:]}")

    def go(self, server: PostgresServer) -> tuple[dict[str, Any], Taken, str]:
        """What it answers, and what it and the server took from now on."""
        assert self._process.stdin is not None
        with Taken(server.pid, memory=False) as served, Taken(self._process.pid) as taken:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            answer = json.loads(self.until("{"))
        return answer, taken, f"{taken}, server {served.cpu_seconds:.1f} CPU s"


class Taken:
    """CPU seconds of a process with all below it, and the most memory they held at a time; shared pages count once."""

    def __init__(self, pid: int, *, memory: bool = True) -> None:
        self.cpu_seconds = 0.0
        self.peak_mib = 0.0
        self.jvm_mib = 0.0
        """How much of it was Java's."""
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self._memory = memory
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Taken:
        self._look()
        self._first = dict(self._last)
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._done.set()
        self._thread.join()
        self._look()
        self.cpu_seconds = sum(last - self._first.get(pid, 0.0) for pid, last in self._last.items())

    def __str__(self) -> str:
        return f"{self.cpu_seconds:.1f} CPU s, {self.peak_mib:,.0f} MiB"

    def _sample(self) -> None:
        for turn in itertools.count(1):
            if self._done.wait(0.5):
                break
            self._look(memory=turn % 2 == 0)  # it took a tenth of both cores at every turn, and most of it the server's

    def _look(self, memory: bool = True) -> None:
        held = of_java = 0
        with suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    times = process.cpu_times()
                    self._last[process.pid] = times.user + times.system
                    size = _own_bytes(process.pid) if memory and self._memory else 0
                    held += size
                    of_java += size if process.name() == "java" else 0
        if held / 2**20 > self.peak_mib:
            self.peak_mib, self.jvm_mib = held / 2**20, of_java / 2**20


def _own_bytes(pid: int) -> int:
    """Its memory, shared pages by its share."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    return 0


def measured(command: Sequence[Any], server: PostgresServer) -> tuple[float, str]:
    """How long a command runs, and what it and the server take."""
    began = time.perf_counter()
    with (
        subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process,
        Taken(server.pid, memory=False) as served,
        Taken(process.pid) as taken,
    ):
        _, errors = process.communicate(timeout=STUCK_SECONDS)
        seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {errors[-1000:]}")
    return seconds, f"{taken}, server {served.cpu_seconds:.1f} CPU s"
