"""
Run `messages.toml`, whose schema refuses some of the messages; correct the schema, replay them, and count what is there.

The source is here as well: an exchange that sends orders, of which some lack a field, and readings, which gain one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import proof
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pydantic import PositiveInt
from rich.console import Console

from penstock.cli import dlq, guarded, running
from penstock.config import Config
from penstock.pipeline import Pipeline
from penstock.source import Offset, PollingSource, Schemas, SourceCheckpoint, SourceEnvelope, SourceRecord

FILE = Path(__file__).with_name("messages.toml")


class ExchangeConfig(Config):
    rows: PositiveInt
    """Messages, half of them orders."""


class Exchange(PollingSource[ExchangeConfig]):
    """The same messages in every run; the number of the next one is the position."""

    name = "exchange"

    def __init__(self, config: ExchangeConfig) -> None:
        super().__init__(config)
        self._next = 0

    def schema(self) -> Schemas:
        return {}

    def poll_batch(self, max_records: int) -> list[SourceEnvelope] | None:
        numbers = range(self._next, min(self.config.rows, self._next + max_records))
        self._next = numbers.stop
        return [SourceEnvelope.with_offset(self._message(each), Offset("0", each)) for each in numbers] or None

    def _message(self, number: int) -> SourceRecord:
        if number % 2:
            value = {"id": number, "celsius": number % 40, "humidity": 0.5}
            if number < self.config.rows / 2:
                del value["humidity"]
            return SourceRecord("readings", json.dumps(value).encode()).with_key(f"sensor-{number % 7}")
        value = {"id": number, "amount": number / 100, "country": "NO"}
        if is_bad(number):
            del value["country"]
        return SourceRecord("orders", json.dumps(value).encode())

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"next": self._next})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._next = checkpoint.offsets["next"]


def is_bad(number: int) -> bool:
    """An order without a country."""
    return number % 40 == 0


def main() -> None:
    console = Console(highlight=False, soft_wrap=True)
    pipeline = Pipeline.from_toml(FILE)
    lake = proof.start_fresh(pipeline) / "lake"
    sent = pipeline.sources["exchange"].config.rows
    running.run(pipeline, drain=True, closing_line=False)
    dlq.show(pipeline, {}, console, sample=1, json=False, every=False)
    rows, dead = len(ids(lake)), open_letters(pipeline)
    print(f"\nbefore the fix    {sent:,} in = {rows:,} out + {dead:,} dead")

    fixed = corrected()
    dlq.command(fixed, "replay", {}, console)
    running.run(fixed, drain=True, closing_line=False)
    found, dead_after = ids(lake), open_letters(fixed)
    print(f"\nafter the replay  {sent:,} in = {len(found):,} out + {dead_after:,} dead")
    proof.summary({"replayed": f"{dead - dead_after:,}", "tables": proof.near(lake)}, lake / "orders")
    times = np.bincount(found, minlength=sent)
    closes = sent == rows + dead and dead > 0 and dead_after == 0
    proof.verdict(int((times == 0).sum()), int((times[times > 1] - 1).sum()))
    sys.exit(0 if closes else 1)


def corrected() -> Pipeline:
    """The same pipeline with a schema in which an order need not have a country."""
    pipeline = Pipeline.from_toml(FILE)
    orders, *others = pipeline.schemas.entries
    text = FILE.with_name("schemas").joinpath("order_fixed.json").read_text()
    assert orders.file is not None
    entries = (replace(orders, file=replace(orders.file, text=text)), *others)
    return replace(pipeline, schemas=replace(pipeline.schemas, entries=entries))


def ids(lake: Path) -> np.ndarray:
    """The ids in both tables."""
    tables = [DeltaTable(str(lake / topic)) for topic in ("orders", "readings")]
    # File by file: Arrow's scanner has threads that may outlive it, and then end the process with an abort.
    files = [pq.ParquetFile(file).read(columns=["id"]) for table in tables for file in table.file_uris()]
    return pa.concat_tables(files)["id"].to_numpy()


def open_letters(pipeline: Pipeline) -> int:
    """Dead letters that were neither replayed nor dropped."""
    return dlq.Store(pipeline).chosen({})[0].num_rows


if __name__ == "__main__":
    guarded(main, debug="--debug" in sys.argv)
