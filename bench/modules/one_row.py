"""One row per epoch, for us and for Spark: in a module, since classes of a script travel by value and cost more each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from penstock.config import Config
from penstock.sink import SinkConnector, WriteResult
from penstock.source import Position, RangeSource, ReadLimit, SourceBatch


class NoOptions(Config):
    pass


class Count(Position):
    next: int = 0


class OneRow(RangeSource[NoOptions, Count]):
    """A new row whenever it is asked."""

    name = "one_row"

    def schema(self) -> dict[str, pa.Schema]:
        return {"rows": pa.schema([("id", pa.int64())])}

    def latest(self, start: Count, limit: ReadLimit) -> Count:
        return Count(next=start.next + 1)

    def split(self, start: Count, end: Count) -> Sequence[int]:
        return range(start.next, end.next)

    def read(self, split: int) -> Iterator[SourceBatch]:
        yield SourceBatch(pa.RecordBatch.from_pydict({"id": [split]}), stream="rows")


class Nowhere(SinkConnector[NoOptions, Any]):
    """Takes rows and forgets them."""

    name = "nowhere"

    def write_batch(self, topic: str, batch: pa.RecordBatch) -> WriteResult:
        return WriteResult(batch.num_rows, batch.nbytes)


class Reader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        return {"next": start["next"] + 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(n) for n in range(start["next"], end["next"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield pa.RecordBatch.from_pydict({"id": [partition.value]})


class OneRowSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "one_row"

    def schema(self) -> str:
        return "id bigint"

    def streamReader(self, schema: Any) -> Reader:
        return Reader()
