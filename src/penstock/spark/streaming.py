"""
Routes with `streaming = true`: a Structured Streaming query that keeps its state from epoch to epoch.

Say that epoch 7 has rows for the route. Its splits become a small file that the query reads as its next batch, the tasks of
the batch read the splits, Spark runs the query with the state of epoch 6, and what comes out is staged in the sinks like the
rows of any other route. If the epoch has to be staged again, the batch is taken back first: without its entry in Spark's
log of commits, Spark runs it once more, from the state before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import durable
from penstock.errors import ConfigError
from penstock.pipeline.routing import Target
from penstock.runtime.job import TaskResult

SYNCS = 16
"""Files that are synced at once."""

SEEDS = pa.schema([("group", pa.int32()), ("job", pa.binary())])
SEEDS_DDL = "`group` INT, job BINARY"

SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.shuffle.partitions": "4",
}
"""Of a query's first run; Spark keeps them in the checkpoint. `transformWithState` needs this store."""


@dataclass(frozen=True)
class Kept:
    """The directory of one route's query: its checkpoint, its input, and what it was made of."""

    directory: Path

    @classmethod
    def of(cls, state_dir: Path, incarnation: str, target: Target) -> Kept:
        """Renewed with the incarnation: after a reset the state begins empty, as everything does."""
        name = target.topic.strip("/").replace("/", "-")
        return cls(state_dir / "streaming" / incarnation / f"{name}-{_digest(target.topic, target.route.stream)}")

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def seeds(self) -> Path:
        return self.directory / "seeds"

    def require_same(self, target: Target) -> None:
        """Refuse a query that is not the one whose state this is."""
        file = self.directory / "query.json"
        route = target.route
        made_of = {"sql": route.sql, "transform": route.transform, "output_mode": route.output_mode}
        if not file.exists():
            durable.make_directory(self.directory)
            durable.write_atomic(file, durable.canonical(made_of).encode())
        elif json.loads(file.read_text()) != made_of:
            raise ConfigError(
                f"the streaming query of {target.topic} changed, and its state is of another query",
                code="PEN-1052",
                hint=f"put the query back; or give the new one a topic of its own (`to`); or stop, remove {self.directory} "
                "and begin with an empty state, without the rows that were read so far",
            )

    def take_back(self, number: int) -> None:
        """Undo what an earlier try at this epoch has done, and note which batch comes first if none has."""
        file = self.directory / "epoch.json"
        noted = json.loads(file.read_text()) if file.exists() else {}
        if noted.get("number") != number:
            last = max(_numbers(self.checkpoint / "commits"), default=-1)
            durable.write_atomic(file, durable.canonical({"number": number, "batch": last + 1}).encode())
            return
        first = noted["batch"]
        for log, above in (("commits", first), ("offsets", first + 1)):
            for batch in _numbers(self.checkpoint / log):
                if batch >= above:
                    for name in (str(batch), f".{batch}.crc"):
                        (self.checkpoint / log / name).unlink(missing_ok=True)

    def hand_over(self, number: int, packed: bytes, groups: int) -> None:
        """The epoch's splits as the input of the next batch: one row for each task."""
        durable.make_directory(self.seeds)
        table = pa.table({"group": list(range(groups)), "job": [packed] * groups}, schema=SEEDS)
        made = self.directory / "next.parquet"
        pq.write_table(table, made)
        made.replace(self.seeds / f"{number:012d}.parquet")
        for old in sorted(self.seeds.glob("[0-9]*.parquet"))[:-2]:
            old.unlink()

    def sync(self, since: float) -> None:
        """
        Spark does not sync what it writes, and lets everybody read it. After a power cut the state must be there with the epoch
        that needs it.
        """
        files = [file for file in self.directory.rglob("*") if file.is_file() and file.stat().st_mtime >= since - 1]
        for file in files:
            with contextlib.suppress(PermissionError, FileNotFoundError):  # of an executor; of the past
                file.chmod(0o600)
        directories = sorted({file.parent for file in files}, reverse=True)
        with ThreadPoolExecutor(
            SYNCS, "penstock-sync"
        ) as pool:  # the disk makes those durable together that ask together
            list(pool.map(durable.fsync_file, files))
            list(pool.map(durable.fsync_file, directories))


@dataclass(frozen=True)
class Streamed:
    """One epoch of a streaming route."""

    kept: Kept
    target: Target
    number: int
    """Of the epoch."""
    query: Callable[[Any], Any]
    """From the seeds to what the query makes of their rows."""
    write: Callable[[Any], Sequence[TaskResult]]
    """Stages a batch of it."""

    def run(self, session: Any, packed: bytes, groups: int) -> list[TaskResult]:
        """Run the epoch through the query; gives what its tasks have staged."""
        began, kept = time.time(), self.kept
        kept.require_same(self.target)
        kept.take_back(self.number)
        kept.hand_over(self.number, packed, groups)
        for option, value in SETTINGS.items():
            session.conf.set(option, value)
        frame = self.query(session.readStream.schema(SEEDS_DDL).parquet(str(kept.seeds)).repartition(groups))
        results: list[TaskResult] = []
        failed: list[Exception] = []

        def stage(batch: Any, number: int) -> None:
            try:
                results.extend(self.write(batch))
            except Exception as error:
                failed.append(error)
                raise

        writer = frame.writeStream.outputMode(self.target.route.output_mode).foreachBatch(stage)
        query = writer.option("checkpointLocation", str(kept.checkpoint)).trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        except Exception:
            if failed:
                raise failed[0] from None
            raise
        kept.sync(began)
        return results


def _numbers(log: Path) -> list[int]:
    return sorted(int(file.name) for file in log.glob("[0-9]*") if file.name.isdigit())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
