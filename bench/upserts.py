"""
What an upsert of 1,000 random keys costs in tables of different sizes, by deletion vectors, beside the client's `merge`.

CPU is that of this process, and bytes are what it writes: they say something on a busy machine too. The times until rows are
visible are those of a pipeline of its own under Spark, to which updates come at a steady rate.

`BENCH_PARTS` names the parts to run, of `RUNS`. `BENCH_ROWS` is the size of the tables of `sizes` and `long` (10 million), three
times that of the others; `BENCH_EPOCHS` the length of the long run (500), `BENCH_SECS` that of the steady rates (600).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import polars
import psutil
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, WriterProperties, write_deltalake
from measure import ROOT, Bench
from pyiceberg.catalog.sql import SqlCatalog

sys.path.insert(0, str(Path(__file__).resolve().parent / "modules"))
import steady_updates
from steady_updates import rows

from penstock.config import Config
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.delta.apply import DeltaWork
from penstock.connectors.files.sink import FilesSink, FilesSinkConfig
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.sink import Epoch, SinkConnector, Task
from penstock.store import StorageOptions
from penstock.testing.s3 import S3Server
from penstock.testing.spoiler import Spoiler

ROWS = int(os.environ.get("BENCH_ROWS", 10_000_000))
SMALL, LARGE = ROWS // 10, ROWS * 3
EPOCHS = int(os.environ.get("BENCH_EPOCHS", 500))
SECS = float(os.environ.get("BENCH_SECS", 600))
KEYS = 1_000
"""Updates in an epoch, and in a second."""
SETTLED, MEASURED = LARGE // 200_000 + 50, 100
"""Epochs until half a percent of the larger table is deleted and purges have begun, and then those that are measured."""
FILE_ROWS = min(1_000_000, ROWS // 10)
TOPIC = "/rows"
ZSTD = WriterProperties(compression="ZSTD", compression_level=1)
NEW_BYTES = pa.Table.from_batches([rows(np.arange(KEYS), 1)]).nbytes / KEYS
"""Of a new row in memory."""

PIPELINE = """
connector_name = "steady"
delivery = "exactly-once"
[processing]
state_dir = "state"
[source]
connector = "steady_updates:Updates"
path = "began"
rows = {rows}
rate = {rate}
[[sinks]]
connector = "{kind}"
path = "lake/{{topic}}"
mode = "upsert"
key = ["id"]
{more}
"""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory on the disk of the checkout: a file system in memory has no fsync to wait for."""
    home = ROOT / "run"
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix="bench-upserts-") as directory:
        yield Path(directory)


def parts(count: int) -> Iterator[pa.Table]:
    for first in range(0, count, FILE_ROWS):
        yield pa.Table.from_batches([rows(np.arange(first, min(first + FILE_ROWS, count)), 0)])


def delta_table(path: Path, count: int) -> Path:
    """A table of others."""
    for part in parts(count):
        write_deltalake(str(path), part, mode="append", writer_properties=ZSTD)
    return path


def iceberg_table(path: Path, count: int) -> Path:
    """The same, in the catalog that the sink looks for by itself."""
    path.parent.mkdir(parents=True)
    catalog = SqlCatalog("default", uri=f"sqlite:///{path.parent}/catalog.db")
    catalog.create_namespace("default")
    found = None
    for part in parts(count):
        found = found or catalog.create_table(f"default.{path.name}", part.schema, location=str(path))
        found.append(part)
    return path


@dataclass
class Cost:
    cpu: float
    written: int

    def __str__(self) -> str:
        return f"{self.cpu * 1000:,.1f} ms, {self.written / 1000:,.0f} kB"


def cost(work: Callable[[], object]) -> Cost:
    cpu, written = time.process_time(), _written()
    work()
    return Cost(time.process_time() - cpu, _written() - written)


def _written() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(c.cpu for c in costs), round(statistics.median(c.written for c in costs)))


def mean(costs: list[Cost]) -> Cost:
    return Cost(statistics.mean(c.cpu for c in costs), round(statistics.mean(c.written for c in costs)))


class Upserts:
    """A table, and a sink that applies epochs to it."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.number = delta_table(path, count), count, 0
        self.random = np.random.default_rng(count)
        self._purged = 0
        options = {"mode": "upsert", "key": ["id"], "apply": "vectors", "vacuum_every_secs": 0}
        self.sink = Delta(DeltaConfig(path=f"{path.parent}/{{topic}}", **options))  # type: ignore[arg-type]
        self.sink.open()

    def epoch(self) -> Cost:
        self.number += 1
        epoch = Epoch("bench", "one", self.number)
        batch = rows(np.sort(self.random.choice(self.count, KEYS, replace=False)), self.number)
        return cost(lambda: self._commit(epoch, batch))

    def purges(self) -> int:
        """Files that were written again: by work of an epoch, and a part at a time."""
        entries = (self.path / "_delta_log").glob("*.json")
        return self._purged + sum('"purged"' in entry.read_text().partition("\n")[0] for entry in entries)

    def _commit(self, epoch: Epoch, batch: pa.RecordBatch) -> None:
        topic = f"/{self.path.name}"
        self.sink.begin_epoch(epoch, Task(0))
        self.sink.write_batch(topic, batch)
        receipts = [self.sink.pre_commit(epoch)]
        work = self.sink.plan_apply(epoch, topic, receipts)
        self._purged += sum(len(each.files) for each in work if isinstance(each, DeltaWork) and each.purges)
        applied = [self.sink.apply(epoch, each, Task(place)) for place, each in enumerate(work)]
        end = {"source": {"offset": self.number}}
        if work:
            self.sink.commit_applied(epoch, topic, receipts, end, applied)
        else:
            self.sink.commit_topic(epoch, topic, receipts, end)


def sizes(bench: Bench, home: Path) -> None:
    """Tables of a million rows and of thirty, each with as many deleted rows as purges leave it."""
    tables = {name: Upserts(home / name, count) for name, count in (("small", SMALL), ("large", LARGE))}
    first = {name: table.epoch() for name, table in tables.items()}
    costs: dict[str, list[Cost]] = {name: [] for name in tables}
    for _ in range(SETTLED + MEASURED):  # in turns, so that both meet the same machine
        for name, table in tables.items():
            costs[name].append(table.epoch())
    every = {name: mean(found[SETTLED:]) for name, found in costs.items()}
    for name, table in tables.items():
        note = f"the mean of {MEASURED}, with purges, after {SETTLED}; the median of the first 10: {median(costs[name][:10])}"
        bench.row(f"1,000 updates in {table.count:,} rows", str(every[name]), f"{note}; the index: {first[name]}")
    small, large = every["small"], every["large"]
    bench.claim("upserts_cpu_large_vs_small_table", large.cpu / small.cpu, "<=", 1.5)
    bench.claim("upserts_bytes_large_vs_small_table", large.written / small.written, "<=", 1.5)


def long_run(bench: Bench, home: Path) -> None:
    """Many epochs with purges: what an epoch costs early and late and in the mean, beside `merge`; then full scans."""
    table = Upserts(home / "long", ROWS)
    table.epoch()  # makes the index
    costs = [table.epoch() for _ in range(EPOCHS)]
    early, late, every = median(costs[:10]), median(costs[-40:]), mean(costs)
    bench.row(f"epochs 1 to 10 of {EPOCHS}, {ROWS:,} rows", str(early), f"the median; the mean: {mean(costs[:10])}")
    bench.row(f"the last 40 of {EPOCHS}", str(late), f"the median; the mean, with purges: {mean(costs[-40:])}")
    note = f"{table.purges()} files purged; {every.written / NEW_BYTES / KEYS:.0f} × the new rows"
    bench.row("the mean of all", str(every), note)
    bench.claim("upserts_cpu_late_vs_early", late.cpu / early.cpu, "<=", 2)
    bench.claim("upserts_bytes_late_vs_early", late.written / early.written, "<=", 2)
    compacted = home / "compacted"
    shutil.copytree(table.path, compacted)
    DeltaTable(str(compacted)).optimize.compact()
    scans(bench, table.path, compacted)
    peer = median([cost(lambda: merge(compacted, table)) for _ in range(2)])
    bench.row(f"the same by `DeltaTable.merge`, {ROWS:,} rows", str(peer), "of two, into the compacted table")
    bench.claim("upserts_cpu_vs_merge", every.cpu / peer.cpu, "<=", 0.02)
    bench.claim("upserts_bytes_vs_merge", every.written / peer.written, "<=", 0.02)


def merge(path: Path, like: Upserts) -> None:
    table, batch = DeltaTable(str(path)), rows(np.sort(like.random.choice(ROWS, KEYS, replace=False)), 1)
    change = table.merge(pa.table(batch), "s.id = t.id", source_alias="s", target_alias="t", writer_properties=ZSTD)
    change.when_matched_update_all().when_not_matched_insert_all().execute()


def scans(bench: Bench, path: Path, compacted: Path) -> None:
    """A full scan of the table as it is, and of its compacted copy."""

    def by_client(path: Path) -> None:
        query = "select sum(id), sum(n0), sum(n1), sum(n2), max(t0), max(t1) from t"
        QueryBuilder().register("t", DeltaTable(str(path))).execute(query).read_all()

    def by_polars(path: Path) -> None:
        frame = polars.scan_delta(str(path))
        frame.select(polars.col("id", "n0", "n1", "n2").sum(), polars.col("t0", "t1").max()).collect()

    for name, scan in (("deltalake", by_client), ("polars", by_polars)):
        taken: dict[Path, float] = {}
        for place in (compacted, path) * 4:
            spent = cost(lambda scan=scan, place=place: scan(place)).cpu  # type: ignore[misc]
            taken[place] = min(spent, taken.get(place, spent))
        bench.row(f"a full scan by {name}", f"{taken[path]:.2f} s", f"compacted: {taken[compacted]:.2f} s; best of 4")
        bench.claim(f"upserts_scan_by_{name}", taken[path] / taken[compacted], "<=", 1.3)


# -- a steady rate -----------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """How many updates another program has seen, and when."""

    home: Path
    kind: str
    ends: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> None:
        count = self._delta() if self.kind == "delta" else self._iceberg()
        if count and (not self.ends or count > self.ends[-1][1]):
            self.ends.append((time.time(), count))

    def _delta(self) -> int:
        """By the newest sidecar whose version is in the log."""
        table = self.home / "lake/rows"
        for sidecar in sorted((table / "_penstock/steady").glob("[0-9]*.json"), reverse=True):
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                found = json.loads(sidecar.read_text())
                if (table / f"_delta_log/{found['version']:020d}.json").exists():
                    return _count(found["end"])
        return 0

    def _iceberg(self) -> int:
        with contextlib.closing(sqlite3.connect(f"file:{self.home}/lake/catalog.db?mode=ro", uri=True)) as catalog:
            ((location,),) = catalog.execute("select metadata_location from iceberg_tables").fetchall()
        with contextlib.suppress(FileNotFoundError):
            said = json.loads(Path(urlparse(location).path).read_text())["properties"].get("penstock.epoch.steady")
            return _count(json.loads(said)["end"]) if said else 0
        return 0

    def ages(self, began: float, until: float) -> np.ndarray:
        """For each update that came until then: how long it took to be visible."""
        ages, last = [], 1
        for at, count in self.ends:
            came = began + (np.arange(last, count) / KEYS)
            ages.append((at - came)[came < until])
            last = max(last, count)
        return np.concatenate(ages)


def _count(end: dict[str, Any]) -> int:
    found: int = end["updates"]["count"]
    return found


def sustained(bench: Bench, home: Path, kind: str) -> None:
    """Updates that come at a steady rate, to a pipeline under Spark in processes of its own."""
    home.mkdir(parents=True)
    (delta_table if kind == "delta" else iceberg_table)(home / "lake/rows", LARGE)
    shutil.copy(steady_updates.__file__, home)
    more = 'apply = "vectors"' if kind == "delta" else ""
    (home / "pipeline.toml").write_text(PIPELINE.format(rows=LARGE, rate=KEYS, kind=kind, more=more))
    command = [sys.executable, "-m", "penstock", "run", "pipeline.toml", "--master", "local[2]"]
    seen, log = Seen(home, kind), home / "log"
    with log.open("wb") as out, psutil.Popen(command, cwd=home, stdout=out, stderr=out) as process:
        try:
            wait(seen, process, log, time.time() + 300, lambda: bool(seen.ends))  # the index is made
            began = time.time()
            (home / "began.new").write_text(str(began))
            (home / "began.new").rename(home / "began")
            cpu, written = spent(process)
            until = began + SECS
            wait(seen, process, log, until, lambda: False)
            taken, after = spent(process)
            wait(seen, process, log, until + 300, lambda: seen.ends[-1][1] > SECS * KEYS)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    seen.look()
    count = seen.ends[-1][1]
    found = read(home, kind)
    wrong = steady_updates.wrong(found["id"].to_numpy(), found["n0"].to_numpy(), count, LARGE)
    assert not wrong, f"{wrong} rows are not what {count} updates leave"
    report(bench, kind, seen.ages(began, until), (taken - cpu) / SECS, after - written, len(seen.ends))


def report(bench: Bench, kind: str, ages: np.ndarray, cpu: float, written: int, epochs: int) -> None:
    title, name = ("Delta", "sustained") if kind == "delta" else ("Iceberg", "iceberg")
    p50, p99 = np.percentile(ages, (50, 99))
    bench.row(
        f"{title}: {KEYS:,} updates/s into {LARGE:,} rows for {SECS:g} s",
        f"p50 {p50:.2f} s, p99 {p99:.2f} s until visible",
        f"the longest {ages.max():.1f} s; {len(ages):,} updates in {epochs:,} epochs under Spark; every row compared",
    )
    bench.row(
        f"{title}: written to the disk by all processes",
        f"{written / 1e6:,.0f} MB",
        f"{written / NEW_BYTES / KEYS / SECS:.0f} × the new rows of {NEW_BYTES:.0f} bytes each; {cpu:.2f} CPU s a second",
    )
    bench.claim(f"upserts_{name}_p50_vs_1s", float(p50), "<=", 1)
    bench.claim(f"upserts_{name}_p99_vs_3s", float(p99) / 3, "<=", 1)


def wait(seen: Seen, process: psutil.Popen, log: Path, until: float, done: Callable[[], bool]) -> None:
    while time.time() < until and not done():
        seen.look()
        assert process.poll() is None, log.read_text()[-4000:]
        time.sleep(0.02)


def spent(process: psutil.Popen) -> tuple[float, int]:
    """CPU seconds, and bytes written to disks, of a process and all that it has started."""
    cpu, written = 0.0, 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu += sum(each.cpu_times()[:4])
            written += each.io_counters().write_bytes
    return cpu, written


def read(home: Path, kind: str) -> polars.DataFrame:
    """As another program reads it."""
    if kind == "delta":
        return polars.scan_delta(str(home / "lake/rows")).select("id", "n0").collect()
    table = SqlCatalog("default", uri=f"sqlite:///{home}/lake/catalog.db").load_table("default.rows")
    found = polars.from_arrow(table.scan(selected_fields=("id", "n0")).to_arrow())
    assert isinstance(found, polars.DataFrame)
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


class Options(Config):
    storage_options: StorageOptions


def requests(bench: Bench, home: Path) -> None:
    """What one epoch of one table asks of an object store."""
    home.mkdir(parents=True)
    upsert = {"mode": "upsert", "key": ["id"]}
    with S3Server() as server, Spoiler(server.port) as proxy:
        given = {"storage_options": {**server.options(), "endpoint": proxy.endpoint}}
        path = {"path": f"{server.bucket()}/{{topic}}", **given}
        sinks: dict[str, Callable[[str], SinkConnector]] = {
            "delta, append": lambda at: Delta(DeltaConfig(**at)),
            "delta, upsert by vectors": lambda at: Delta(DeltaConfig(**at, **upsert, apply="vectors")),
            "iceberg, append": lambda at: Iceberg(IcebergConfig(**at)),
            "iceberg, upsert": lambda at: Iceberg(IcebergConfig(**at, **upsert)),
            "files": lambda at: FilesSink(FilesSinkConfig(**at)),
        }
        for place, (name, make) in enumerate(sinks.items()):
            own = {"catalog_uri": f"sqlite:///{home}/catalog.db", "namespace": f"n{place}"} if name[0] == "i" else {}
            sink = make({**path, "path": f"{server.bucket()}/{{topic}}", **own})
            sink.open()
            by_task, by_driver = zip(*(counted(sink, number, proxy) for number in range(1, 25)), strict=True)
            most, usual = max(by_driver[4:]), statistics.median(by_driver[4:])
            note = f"{statistics.median(by_task):.0f} by the task, {usual:.0f} by the driver, which once took {most}"
            bench.row(f"requests of an epoch of a table: {name}", f"{statistics.median(by_task) + usual:.0f}", note)
            sink.close()


def counted(sink: SinkConnector, number: int, proxy: Spoiler) -> tuple[int, int]:
    epoch, before = Epoch("bench", "one", number), len(proxy.requests)
    sink.begin_epoch(epoch, Task(0))
    sink.write_batch(TOPIC, rows(np.arange(2_000) if number == 1 else np.arange(number, number + 50), number))
    receipts = [sink.pre_commit(epoch)]
    staged = len(proxy.requests)
    assert not sink.plan_apply(epoch, TOPIC, receipts)
    sink.commit_topic(epoch, TOPIC, receipts, {"source": {"offset": number}})
    return staged - before, len(proxy.requests) - staged


RUNS: dict[str, Callable[[Bench, Path], None]] = {
    "sizes": sizes,
    "long": long_run,
    "sustained": lambda bench, home: sustained(bench, home, "delta"),
    "iceberg": lambda bench, home: sustained(bench, home, "iceberg"),
    "requests": requests,
}


def main() -> None:
    chosen = os.environ.get("BENCH_PARTS", "")
    names = chosen.split(",") if chosen else list(RUNS)
    bench = Bench("upserts", "Upserts into large tables", part=bool(chosen))
    with scratch() as home:
        for name in names:
            RUNS[name](bench, home / name)
            shutil.rmtree(home / name)
    bench.finish()


if __name__ == "__main__":
    main()
