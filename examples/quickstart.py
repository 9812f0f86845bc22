"""Run `quickstart.toml` to its end, read its table back, and count what is there."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import proof
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from penstock.cli import guarded, running
from penstock.cli.view import size
from penstock.errors import FatalError
from penstock.pipeline import Pipeline

FILE = Path(__file__).with_name("quickstart.toml")


def main() -> None:
    pipeline = Pipeline.from_toml(FILE)
    table = proof.start_fresh(pipeline) / "lake" / "orders"
    status = running.run(pipeline, drain=True, closing_line=False).status()
    rows, working = status["rows"], status["working_secs"]
    expected = pipeline.sources["generator"].config.rows
    if rows["in"] < expected:  # stopped by a person: what was not read is not lost
        raise FatalError(f"stopped after {rows['in']:,} of {expected:,} rows", hint="the same command starts it again")
    lost, doubled, strange = count(table, expected)
    lines = {
        "rows in": f"{rows['in']:,}",
        "rows out": f"{rows['out']:,}",
        "epochs": f"{status['epochs']:,}",
        "rows per second": f"{rows['out'] / working:,.0f}, over {working:.1f} s of work",
        "table": f"{proof.near(table)} (Delta, {size(status['bytes']['out'])})",
    }
    proof.summary(lines, table)
    if strange:
        print(f"{strange:,} rows that nobody sent")
    proof.verdict(lost, doubled)
    sys.exit(1 if strange else 0)


def count(table: Path, expected: int) -> tuple[int, int, int]:
    """Ids of `0..expected-1` that are missing, rows beyond the first of an id, and ids that were never sent."""
    # File by file: Arrow's scanner has threads that may outlive it, and then end the process with an abort.
    files = [pq.ParquetFile(file).read(columns=["id"]) for file in DeltaTable(str(table)).file_uris()]
    ids = pa.concat_tables([*files, pa.table({"id": pa.array([], pa.int64())})])["id"].to_numpy()
    known = ids[(ids >= 0) & (ids < expected)]
    times = np.bincount(known, minlength=expected)
    return int((times == 0).sum()), int((times[times > 1] - 1).sum()), len(ids) - len(known)


if __name__ == "__main__":
    guarded(main, debug="--debug" in sys.argv)
