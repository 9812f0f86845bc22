"""Spark's own readers over range sources: `format("penstock")`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit as SparkLimit
from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock.durable import canonical
from penstock.errors import (
    ConfigError,
)
from penstock.source import RangeSource, ReadLimit, SourceBatch
from penstock.spark.sql import spark_schema
from penstock.spark.tasks import conform
from penstock.tables import TableSource


class Ranges:
    """What the batch and the streaming reader share; opened where it is used, since a connection does not travel."""

    def __init__(self, source: RangeSource[Any, Any], stream: str, schema: pa.Schema) -> None:
        self._source, self._stream, self._schema = source, stream, schema

    def position(self, value: dict[str, Any]) -> Any:
        return self._source.position_type.model_validate(json.loads(value["position"]))

    def offset(self, position: Any) -> dict[str, Any]:
        return {"position": canonical(position.model_dump(mode="json"))}  # offsets of Spark hold no lists

    def splits(self, start: Any, end: Any) -> list[InputPartition]:
        return [InputPartition(split) for split in self._source.split(start, end)] if start != end else []

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with opened(self._source):
            for item in self._source.read(partition.value):
                if isinstance(item, SourceBatch) and item.stream == self._stream:
                    yield conform(item.records, self._schema, frozenset(self._schema.names), self._stream)


class BatchReader(Ranges, DataSourceReader):  # type: ignore[misc]
    def partitions(self) -> list[InputPartition]:
        with opened(self._source):
            start = self._source.initial()
            return self.splits(start, self._source.latest(start, ReadLimit(parallelism=os.cpu_count() or 1)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.rows(partition)


class StreamReader(Ranges, DataSourceStreamReader):  # type: ignore[misc]
    def initialOffset(self) -> dict[str, Any]:
        self._source.open()
        return self.offset(self._source.initial())

    def latestOffset(self, start: dict[str, Any], limit: SparkLimit) -> dict[str, Any]:
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        bound = ReadLimit(rows=rows, parallelism=os.cpu_count() or 1)
        return self.offset(self._source.latest(self.position(start), bound))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return self.splits(self.position(start), self.position(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.rows(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._source.ack(self.position(end))

    def stop(self) -> None:
        self._source.close()


class PenstockDataSource(DataSource):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "penstock"

    def _made(self) -> tuple[RangeSource[Any, Any], str, pa.Schema]:
        return range_source(dict(self.options))

    def schema(self) -> Any:
        _, stream, schema = self._made()
        return spark_schema(schema, stream)

    def reader(self, schema: Any) -> DataSourceReader:
        return BatchReader(*self._made())

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return StreamReader(*self._made())


@contextlib.contextmanager
def opened(source: RangeSource[Any, Any]) -> Iterator[None]:
    source.open()
    try:
        yield
    finally:
        source.close()


def range_source(options: dict[str, str]) -> tuple[RangeSource[Any, Any], str, pa.Schema]:
    from penstock.pipeline.registry import source_type

    connector = options.pop("connector", None)
    if connector is None:
        raise ConfigError('format("penstock") needs option("connector", …)', code="PEN-1004")
    kind = source_type(connector)
    if not issubclass(kind, RangeSource):
        raise ConfigError(f"{connector} is not a range source; run it in a pipeline", code="PEN-1009")
    if issubclass(kind, TableSource):
        raise ConfigError(
            f"{connector} takes notes while it copies tables, and Spark's own readers keep none",
            code="PEN-1009",
            hint="run it in a pipeline: Pipeline.from_toml(…).run(spark=spark)",
        )
    stream = options.pop("stream", None) if "stream" not in kind.config_type.model_fields else None
    by_lower = {name.lower(): name for name in kind.config_type.model_fields}  # Spark forgets the case of options
    settings = {by_lower.get(name.lower(), name): _option(value) for name, value in options.items()}
    source = kind(kind.config_type.model_validate(settings))
    with opened(source):
        schemas = source.schema()
    stream = stream or next(iter(schemas), "")
    if stream not in schemas:
        raise ConfigError(f"{connector} has no stream {stream!r}; there are {', '.join(schemas)}", code="PEN-1003")
    return source, stream, schemas[stream]


def _option(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
