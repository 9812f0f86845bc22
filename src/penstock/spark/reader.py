"""Spark's own readers over range sources: `spark.read` and `spark.readStream`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from penstock import durable
from penstock.capture import ChangeCapture
from penstock.durable import canonical
from penstock.errors import (
    ConfigError,
)
from penstock.source import RangeSource, ReadLimit, SourceBatch, SourceConnector
from penstock.spark.given import connector_of
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
    """For versions that ask for an end by start and limit."""

    _is_open = False
    _until: Any = None
    max_rows: int | None = None
    """About how many rows a batch reads at most."""

    def getDefaultReadLimit(self) -> Any:
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        return ReadMaxRows(self.max_rows) if self.max_rows else ReadAllAvailable()

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
        bound = ReadLimit(rows=rows, parallelism=os.cpu_count() or 1, until=self._until)
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
        if not self._kept.exists():  # it is asked for the first end before it is asked for the beginning
            self._keep(self.offset(self._opened().initial()))
        return self._latest(self.position(json.loads(self._kept.read_text())), None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._keep(end)
        return super().partitions(start, end)

    def _keep(self, offset: dict[str, Any]) -> None:
        durable.make_directory(self._kept.parent)
        durable.write_atomic(self._kept, canonical(offset).encode())


@contextlib.contextmanager
def opened(source: SourceConnector[Any]) -> Iterator[None]:
    source.open()
    try:
        yield
    finally:
        source.close()


OWN = ("stream", "state_dir", "max_rows_per_batch")
"""Options of the reader itself; all others are the source's."""


def source_of(options: Mapping[str, str]) -> tuple[SourceConnector[Any], str, pa.Schema, dict[str, str]]:
    """The source that the options name, the stream that is read of it, its columns, and the options of the reader itself."""
    kind, config, own = connector_of("source", options, OWN)
    name = kind.name
    if issubclass(kind, TableSource | ChangeCapture):
        raise ConfigError(
            f"{name} takes notes while it copies tables, and Spark's own readers keep none",
            code="PEN-1009",
            hint="run it in a pipeline: Pipeline.from_toml(…).run(spark=spark)",
        )
    source = kind(config)
    assert isinstance(source, SourceConnector)
    with opened(source):
        schemas = source.schema()
    stream = own.get("stream") or next(iter(schemas), "")
    if stream not in schemas:
        raise ConfigError(f"{name} has no stream {stream!r}; there are {', '.join(schemas)}", code="PEN-1003")
    return source, stream, schemas[stream], own
