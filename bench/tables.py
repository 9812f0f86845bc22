"""
What many tables cost: the driver's CPU of an epoch with a row for each of them, and the commit of a few large ones.

No JVM: what is measured is the loop, the sink's commit and its markers, all of which run on the driver. Tasks are forked here,
which costs the driver some ms an epoch that Spark does not: they are shown apart.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure import ROOT, Bench
from modules.many_tables import ManyConfig, ManyTables

from penstock.connectors.delta import Delta, DeltaConfig
from penstock.pipeline.routing import Router
from penstock.runtime.epochs import EpochLoop, State
from penstock.runtime.job import Job, TaskResult
from penstock.testing import ForkEngine

EPOCHS = 7
GOAL_MS = 8.0

SLOWER_MS = (0, 2, 5, 10)
"""What each sync takes beyond what this disk does: many SSDs, network volumes and hard disks take some milliseconds."""


class Forking(ForkEngine):
    """Counts the CPU that the driver spends on making tasks."""

    cpu = 0.0

    def run(self, job: Job) -> Sequence[TaskResult]:
        began = time.process_time()
        try:
            return super().run(job)
        finally:
            self.cpu += time.process_time() - began


class Measured:
    """A pipeline of tables into Delta; `epochs` gives what each costs."""

    def __init__(self, scratch: Path, config: ManyConfig, mode: str, threads: int = 8) -> None:
        directory = Path(tempfile.mkdtemp(dir=scratch))
        self.state = State(directory / "state", "bench")
        self.state.open()
        sink = Delta(DeltaConfig(path=str(directory / "lake" / "{topic}"), mode=mode))
        sources, sinks, engine = {"source": ManyTables(config)}, {"sink": sink}, Forking(1)
        self.engine = engine
        self.loop = EpochLoop(self.state, sources, sinks, Router((), ("sink",)), engine, threads=threads)
        self.loop.contexts.open()
        self.loop.start([])

    def epochs(self, count: int) -> tuple[float, float, float]:
        """Median driver CPU (without forks) and wall time of an epoch, and of its commit, in ms; the first one apart."""
        self.loop.step()
        cpu, wall, commit = [], [], []
        for _ in range(count):
            began, used = time.perf_counter(), time.process_time() - self.engine.cpu
            report = self.loop.step()
            assert report is not None
            cpu.append((time.process_time() - self.engine.cpu - used) * 1000)
            wall.append((time.perf_counter() - began) * 1000)
            commit.append((report.seconds["apply"] + report.seconds["commit"]) * 1000)
        self.state.close()
        return statistics.median(cpu), statistics.median(wall), statistics.median(commit)


def many(bench: Bench, scratch: Path) -> None:
    per_table: dict[int, float] = {}
    for tables in (1, 10, 50, 200):
        cpu, wall, _ = Measured(scratch, ManyConfig(tables=tables, changed=tables), "append").epochs(EPOCHS)
        per_table[tables] = cpu / tables
        bench.row(
            f"{tables} tables, a row each",
            f"{cpu / tables:.1f} ms",
            f"driver CPU a table; {cpu:.0f} ms, {wall:.0f} ms wall",
        )
    fixed = (10 * per_table[10] - per_table[1]) / 9
    bench.row(
        "fixed cost of an epoch", f"{per_table[1] - fixed:.1f} ms", f"driver CPU; each changed table {fixed:.1f} ms"
    )
    for tables in (1, 50):
        cpu, wall, _ = Measured(scratch, ManyConfig(tables=tables, changed=tables), "upsert").epochs(EPOCHS)
        keyed = cpu / tables
        note = f"driver CPU a table; {cpu:.0f} ms, {wall:.0f} ms wall"
        bench.row(f"{tables} tables, a row each, by key", f"{keyed:.1f} ms", note)
    few, wall, _ = Measured(scratch, ManyConfig(tables=200, changed=10), "append").epochs(EPOCHS)
    bench.row(
        "200 tables, a row for 10 of them", f"{few / 10:.1f} ms", f"driver CPU a changed table; {wall:.0f} ms wall"
    )
    bench.claim("cpu_of_one_table_vs_8ms", per_table[1] / GOAL_MS, "<=", 1)
    bench.claim("cpu_per_table_of_200_vs_8ms", per_table[200] / GOAL_MS, "<=", 1)
    bench.claim("cpu_per_upsert_table_of_50_vs_8ms", keyed / GOAL_MS, "<=", 1)
    bench.claim("cpu_per_table_of_200_vs_of_10", per_table[200] / per_table[10], "<=", 1.3)
    bench.claim("cpu_per_changed_of_200_vs_of_10", few / 10 / per_table[10], "<=", 1.5)


def upserts(bench: Bench, scratch: Path) -> None:
    """
    Three tables with 3,000 changes in 300,000 rows each, committed one after the other, as this was once done, and at once.

    What threads can spare is waiting; the rest is CPU, of which Python lets one thread use a part at a time. So it depends on
    the disk. Slower ones are only modelled here, by a pause after each sync: they are shown, and nothing is claimed for them.
    """
    config = ManyConfig(tables=3, changed=3, first_rows=300_000, rows=3_000)
    for more in SLOWER_MS:
        disk = f"each sync {more} ms slower" if more else "this disk"
        took: dict[int, float] = {}
        with slower_syncs(more / 1000) as syncs:
            for threads in (1, 8, 1, 8):
                before = len(syncs)
                _, _, commit = Measured(scratch, config, "upsert", threads).epochs(EPOCHS)
                each = (len(syncs) - before) // (EPOCHS + 1)
                took[threads] = min(commit, took.get(threads, commit))
        about = f"commit of an epoch; {each} syncs of {statistics.median(syncs) * 1000:.1f} ms"
        bench.row(f"3 upsert tables, one after the other, {disk}", f"{took[1]:.0f} ms", about)
        bench.row(f"3 upsert tables, at once, {disk}", f"{took[8]:.0f} ms", f"{took[8] / took[1]:.2f} of that")
        if not more:
            bench.claim("commit_at_once_vs_in_turn", took[8] / took[1], "<=", 0.5)


@contextlib.contextmanager
def slower_syncs(secs: float) -> Iterator[list[float]]:
    """Make every sync of this process take so much longer, beside other threads; gives the seconds of each."""
    calls, sync = [], os.fsync

    def slow(descriptor: int) -> None:
        began = time.perf_counter()
        sync(descriptor)
        if secs:
            time.sleep(secs)
        calls.append(time.perf_counter() - began)

    os.fsync = slow  # type: ignore[assignment]
    try:
        yield calls
    finally:
        os.fsync = sync


PARTS = {"many": many, "upserts": upserts}


def main() -> None:
    """All parts; or those that are named, which are shown and not recorded."""
    bench, home = Bench("tables", "Many tables"), ROOT / "run"
    home.mkdir(exist_ok=True)
    if (load := os.getloadavg()[0]) > (os.cpu_count() or 1):
        bench.row("the machine", "busy", f"a load of {load:.0f}: times, and CPU too, are higher than on an idle one")
    with tempfile.TemporaryDirectory(dir=home, prefix="bench-tables-") as scratch:  # a disk: in memory, no fsync waits
        for name in sys.argv[1:] or PARTS:
            PARTS[name](bench, Path(scratch))
    if sys.argv[1:]:
        print(*bench.claims, sep="\n")
    else:
        bench.finish()


if __name__ == "__main__":
    main()
