"""
What an upsert of 1,000 random keys costs in tables of different sizes, by deletion vectors, beside the client's `merge`.

All figures but the times until rows are visible are CPU seconds and written bytes of this process: they say something on a busy
machine too. `BENCH_ROWS` is the size of the larger table (10 million), `BENCH_EPOCHS` the length of the long run (500).
`BENCH_PARTS` names the parts to run, each with a result of its own: `sizes`, `long` (with scans), and `sustained` and
`iceberg`, which are not run otherwise: 1,000 updates a second for `BENCH_SECS` (600), into Delta and Iceberg. Those two are
meant for `BENCH_ROWS=30000000`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import polars
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, WriterProperties, write_deltalake
from measure import Bench
from pyiceberg.catalog.sql import SqlCatalog

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.connectors.delta.apply import DeltaWork
from penstock.connectors.iceberg import Iceberg, IcebergConfig
from penstock.sink import Epoch, Task

SMALL = 1_000_000
ROWS = int(os.environ.get("BENCH_ROWS", 10_000_000))
EPOCHS = int(os.environ.get("BENCH_EPOCHS", 500))
SECS = float(os.environ.get("BENCH_SECS", 600))
PARTS = [each for each in os.environ.get("BENCH_PARTS", "").split(",") if each]
KEYS = 1_000
FILE_ROWS = min(1_000_000, ROWS // 10)
TOPIC = "/bench/rows"
ZSTD = WriterProperties(compression="ZSTD", compression_level=1)


def rows(ids: np.ndarray, turn: int) -> pa.RecordBatch:
    """Ten columns whose values follow from the id and the turn."""
    numbers = {f"n{place}": pa.array(ids * (place + 7) % 1_000_003 + turn) for place in range(6)}
    texts = {f"t{place}": pa.array((ids * 31 + place + turn) % 9973).cast(pa.string()) for place in range(3)}
    return pa.record_batch({"id": pa.array(ids), **numbers, **texts})


@dataclass
class Cost:
    cpu: float
    written: int


def cost(work: Callable[[], object]) -> Cost:
    cpu, written = time.process_time(), _written()
    work()
    return Cost(time.process_time() - cpu, _written() - written)


def _written() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


class Upserts:
    """A table, and a sink that applies epochs to it."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.number = path, count, 0
        self.topic = f"/{path.parent.name}/{path.name}"
        self.random = np.random.default_rng(count)
        self.purges = 0
        self.sink = self.made()
        self.sink.open()

    def made(self) -> Delta | Iceberg:
        for part in self.parts():
            write_deltalake(str(self.path), part, mode="append", writer_properties=ZSTD)
        options = {"mode": "upsert", "key": ["id"], "apply": "vectors", "vacuum_every_secs": 0}
        return Delta(DeltaConfig(path=str(self.path.parents[1] / "{topic}"), **options))  # type: ignore[arg-type]

    def parts(self) -> Iterator[pa.Table]:
        for first in range(0, self.count, FILE_ROWS):
            yield pa.Table.from_batches([rows(np.arange(first, min(first + FILE_ROWS, self.count)), 0)])

    def epoch(self, keys: int = KEYS) -> Cost:
        self.number += 1
        epoch = Epoch("bench", "one", self.number)
        batch = rows(np.sort(self.random.choice(self.count, keys, replace=False)), self.number)
        return cost(lambda: self._commit(epoch, batch))

    def _commit(self, epoch: Epoch, batch: pa.RecordBatch) -> None:
        self.sink.begin_epoch(epoch, Task(0))
        self.sink.write_batch(self.topic, batch)
        receipts = [self.sink.pre_commit(epoch)]
        work = self.sink.plan_apply(epoch, self.topic, receipts)
        self.purges += sum(each.purges for each in work if isinstance(each, DeltaWork))
        applied = [self.sink.apply(epoch, each, Task(place)) for place, each in enumerate(work)]
        end = {"source": {"offset": self.number}}
        if work:
            self.sink.commit_applied(epoch, self.topic, receipts, end, applied)
        else:
            self.sink.commit_epoch(epoch, receipts, end)


class IcebergUpserts(Upserts):
    """The same with an Iceberg table in a catalog of its own."""

    def made(self) -> Iceberg:
        home = self.path.parents[1]
        catalog = SqlCatalog("default", uri=f"sqlite:///{home}/catalog.db")
        catalog.create_namespace(self.path.parent.name)
        parts = self.parts()
        first = next(parts)
        table = catalog.create_table(".".join(self.path.parts[-2:]), first.schema, location=str(self.path))
        for part in chain([first], parts):
            table.append(part)
        return Iceberg(IcebergConfig(path=str(home / "{topic}"), mode="upsert", key=("id",)))


def merge(path: Path, batch: pa.RecordBatch) -> None:
    table = DeltaTable(str(path))
    change = table.merge(pa.table(batch), "s.id = t.id", source_alias="s", target_alias="t", writer_properties=ZSTD)
    change.when_matched_update_all().when_not_matched_insert_all().execute()


def median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(c.cpu for c in costs), round(statistics.median(c.written for c in costs)))


def shown(each: Cost) -> str:
    return f"{each.cpu * 1000:,.1f} ms, {each.written / 1000:,.0f} kB"


def sizes(bench: Bench, home: Path) -> Upserts:
    small, large = Upserts(home / "small", SMALL), Upserts(home / "large", ROWS)
    found = {}
    for name, table in (("small", small), ("large", large)):
        first = table.epoch()
        found[name] = median([table.epoch() for _ in range(21)])
        bench.row(
            f"1,000 updates in {table.count:,} rows", shown(found[name]), f"first epoch, with the index: {shown(first)}"
        )
    shutil.copytree(large.path, home / "merged")
    DeltaTable(str(home / "merged")).optimize.compact()
    theirs = [
        cost(lambda: merge(home / "merged", rows(np.sort(large.random.choice(ROWS, KEYS, replace=False)), 1)))
        for _ in range(2)
    ]
    peer = median(theirs)
    bench.row(f"the same by `DeltaTable.merge`, {ROWS:,} rows", shown(peer))
    bench.claim("upserts_cpu_vs_merge", found["large"].cpu / peer.cpu, "<=", 0.02)
    bench.claim("upserts_bytes_vs_merge", found["large"].written / peer.written, "<=", 0.02)
    bench.claim("upserts_cpu_large_vs_small_table", found["large"].cpu / found["small"].cpu, "<=", 1.5)
    bench.claim("upserts_bytes_large_vs_small_table", found["large"].written / found["small"].written, "<=", 1.5)
    return large


def long_run(bench: Bench, home: Path) -> Upserts:
    """Many epochs with purges; what an epoch costs early and late, and in the mean."""
    table = Upserts(home / "long", ROWS)
    table.epoch()  # makes the index
    costs = [table.epoch() for _ in range(EPOCHS)]
    early, late = median(costs[:10]), median(costs[-40:])
    mean = Cost(statistics.mean(c.cpu for c in costs), round(statistics.mean(c.written for c in costs)))
    bench.row(f"epochs 1 to 10 of {EPOCHS}", shown(early), "the median")
    bench.row(f"the last 40 of {EPOCHS}", shown(late), "the median")
    new = pa.Table.from_batches([rows(np.arange(KEYS), 1)])
    bench.row(
        "the mean of all", shown(mean), f"{table.purges} files purged; {mean.written / new.nbytes:.0f} × the new rows"
    )
    bench.claim("upserts_cpu_late_vs_early", late.cpu / early.cpu, "<=", 2)
    bench.claim("upserts_bytes_late_vs_early", late.written / early.written, "<=", 2)
    return table


def scans(bench: Bench, table: Upserts, home: Path) -> None:
    """A full scan of the table as it is, and of its compacted copy."""
    shutil.copytree(table.path, home / "compacted")
    DeltaTable(str(home / "compacted")).optimize.compact()

    def by_client(path: Path) -> None:
        query = "select sum(id), sum(n0), sum(n1), sum(n2), max(t0), max(t1) from t"
        QueryBuilder().register("t", DeltaTable(str(path))).execute(query).read_all()

    def by_polars(path: Path) -> None:
        frame = polars.scan_delta(str(path))
        frame.select(polars.col("id", "n0", "n1", "n2").sum(), polars.col("t0", "t1").max()).collect()

    for name, scan in (("deltalake", by_client), ("polars", by_polars)):
        taken: dict[Path, float] = {}
        for place in (home / "compacted", table.path, home / "compacted", table.path):
            spent = cost(lambda scan=scan, place=place: scan(place)).cpu  # type: ignore[misc]
            taken[place] = min(spent, taken.get(place, spent))
        bench.row(
            f"a full scan by {name}", f"{taken[table.path]:.2f} s", f"compacted: {taken[home / 'compacted']:.2f} s"
        )
        bench.claim(f"upserts_scan_by_{name}", taken[table.path] / taken[home / "compacted"], "<=", 1.3)


def sustained(bench: Bench, home: Path, made: type[Upserts] = Upserts, name: str = "sustained") -> None:
    """Updates that come at a steady rate: each epoch takes those that came during the one before."""
    table = made(home / "steady", ROWS)
    table.epoch()  # makes the index
    ages: list[np.ndarray] = []
    written = taken = epochs = 0
    began, cpu = time.monotonic(), time.process_time()
    while (now := time.monotonic() - began) < SECS:
        due = min(int(now * KEYS) - taken, ROWS // 2)
        if due < KEYS // 10:
            time.sleep(0.1)
            continue
        written += table.epoch(due).written
        came = (np.arange(taken, taken + due) + 1) / KEYS
        ages.append(time.monotonic() - began - came)
        taken, epochs = taken + due, epochs + 1
    every = np.concatenate(ages)
    p50, p99 = np.percentile(every, (50, 99))
    new = pa.Table.from_batches([rows(np.arange(KEYS), 1)]).nbytes / KEYS * taken
    spent = (time.process_time() - cpu) / SECS
    bench.row(
        f"{KEYS:,} updates/s into {ROWS:,} rows for {SECS:g} s",
        f"{taken:,} updates",
        f"{epochs:,} epochs, {table.purges} files purged",
    )
    bench.row("until visible", f"p50 {p50:.2f} s, p99 {p99:.2f} s", f"{spent:.2f} CPU s a second")
    bench.row("written", f"{written / 1e6:,.0f} MB", f"{written / new:.0f} × the new rows")
    bench.claim(f"upserts_{name}_p50_vs_1s", float(p50), "<=", 1)
    bench.claim(f"upserts_{name}_p99_vs_3s", float(p99) / 3, "<=", 1)


RUNS: dict[str, Callable[[Bench, Path], object]] = {
    "sizes": sizes,
    "long": lambda bench, home: scans(bench, long_run(bench, home), home),
    "sustained": sustained,
    "iceberg": lambda bench, home: sustained(bench, home, IcebergUpserts, "iceberg"),
}


def run(name: str, title: str, parts: Sequence[str]) -> None:
    bench = Bench(name, title)
    with tempfile.TemporaryDirectory(prefix="penstock-upserts-") as home:
        for each in parts:
            RUNS[each](bench, Path(home) / "bench")
    bench.finish()


def main() -> None:
    title = "Upserts by deletion vectors"
    for part in PARTS:
        run(f"upserts_{part}", f"{title}: {part}", [part])
    if not PARTS:
        run("upserts", title, ["sizes", "long"])


if __name__ == "__main__":
    main()
