"""Spark's own readers over range sources: `format("penstock")`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from penstock import durable
from penstock.durable import canonical
from penstock.errors import (
    ConfigError,
)
from penstock.source import RangeSource, ReadLimit, SourceBatch
from penstock.spark.sql import spark_schema
from penstock.spark.tasks import conform
from penstock.spark.versions import has_read_limits
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
    """For versions that ask for an end by start and limit."""

    _is_open = False

    def initialOffset(self) -> dict[str, Any]:
        return self.offset(self._opened().initial())

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return self._latest(self.position(start), getattr(limit, "max_rows", None))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._opened()
        return self.splits(self.position(start), self.position(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.rows(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._opened().ack(self.position(end))

    def stop(self) -> None:
        self._source.close()
        self._is_open = False

    def _opened(self) -> RangeSource[Any, Any]:
        """The source, which a query that goes on from its checkpoint uses without having asked for a beginning."""
        if not self._is_open:
            self._source.open()
            self._is_open = True
        return self._source

    def _latest(self, start: Any, rows: int | None) -> dict[str, Any]:
        bound = ReadLimit(rows=rows, parallelism=os.cpu_count() or 1)
        return self.offset(self._opened().latest(start, bound))


class RememberingReader(StreamReader):
    """
    For versions that ask for an end without saying from where: the last end that was read to is kept in a file.

    After a restart Spark reads the batch in hand again, if there was one, before it asks for the next end. So the file
    always holds the start of the next batch by then.
    """

    def __init__(self, *made: Any, state_dir: Path) -> None:
        super().__init__(*made)
        self._kept = state_dir / "position.json"

    def initialOffset(self) -> dict[str, Any]:
        initial = super().initialOffset()
        self._keep(initial)
        return initial

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return self._latest(self.position(json.loads(self._kept.read_text())), None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._keep(end)
        return super().partitions(start, end)

    def _keep(self, offset: dict[str, Any]) -> None:
        durable.make_directory(self._kept.parent)
        durable.write_atomic(self._kept, canonical(offset).encode())


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
        if has_read_limits():
            return StreamReader(*self._made())
        state_dir = self.options.get("state_dir")
        if state_dir is None:
            raise ConfigError(
                "this version of Spark does not say where a batch begins, so the reader must remember it",
                code="PEN-1050",
                hint='name a directory for it with option("state_dir", …), one for each query',
            )
        return RememberingReader(*self._made(), state_dir=Path(state_dir))


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
    if "state_dir" not in kind.config_type.model_fields:
        options.pop("state_dir", None)
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
