"""Spark's own readers over range sources: `spark.read` and `spark.readStream`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from penstock import durable
from penstock.capture import ChangeCapture
from penstock.changes import CHANGE_FIELDS
from penstock.durable import canonical
from penstock.errors import ConfigError, ConnectorError, RetryableError
from penstock.source import ENVELOPE_SCHEMA, RangeSource, ReadLimit, SourceBatch, SourceConnector, SourceContext
from penstock.spark.given import connector_of
from penstock.spark.tasks import conform

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # of a version without read limits
    SupportsTriggerAvailableNow = object

_log = logging.getLogger("penstock.spark")

LAG_SECS = 5
"""How often a source is asked for its lag: Spark would ask with every look for new rows."""

ACK_AGAIN_SECS = 1
"""Between two tries at an ack that did not get through."""


class Ranges:
    """What the batch and the streaming reader share; opened where it is used, since a connection does not travel."""

    def __init__(self, source: RangeSource[Any, Any], stream: str, schema: pa.Schema) -> None:
        """
        `stream`: the one that is read; empty for all messages of a source that does not know their streams.

        `schema`: its columns, in the types that the JVM reads.
        """
        self._source, self._stream, self._schema = source, stream, schema

    def position(self, value: dict[str, Any]) -> Any:
        return self._source.position_type.model_validate(json.loads(value["position"]))

    def offset(self, position: Any) -> dict[str, Any]:
        return {"position": canonical(position.model_dump(mode="json"))}  # offsets of Spark hold no lists

    def splits(self, start: Any, end: Any) -> list[InputPartition]:
        return [InputPartition(split) for split in self._source.split(start, end)] if start != end else []

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with opened(self._source, SourceContext(in_task=True)):
            for item in self._source.read(partition.value):
                if isinstance(item, SourceBatch) and item.stream == (self._stream or item.stream):
                    yield conform(item.records, self._schema, frozenset(self._schema.names), self._stream)


class BatchReader(Ranges, DataSourceReader):  # type: ignore[misc]
    def partitions(self) -> list[InputPartition]:
        with opened(self._source):
            start = self._source.initial()
            return self.splits(
                start, self._source.latest(start, ReadLimit(parallelism=os.cpu_count() or 1, whole=True))
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.rows(partition)


class StreamReader(Ranges, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """
    For versions that ask for an end by start and limit.

    Spark asks for the next end once it has committed the batch before it, also while there is nothing to read. So what
    precedes the start of that question is acked then, and not with the next batch, which may not come for hours.
    """

    _is_open = False
    _ends = False
    _until: Any = None
    _acked: Any = None
    _next_ack = 0.0
    _planned: Any = None
    _lag: int | None = None
    _next_lag = 0.0
    max_rows: int | None = None
    """About how many rows a batch reads at most."""

    def getDefaultReadLimit(self) -> Any:
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        return ReadMaxRows(self.max_rows) if self.max_rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The query is to end with what is there when it first asks."""
        self._ends = True

    def initialOffset(self) -> dict[str, Any]:
        self._acked = self._opened().initial()
        return self.offset(self._acked)

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return self._latest(self.position(start), getattr(limit, "max_rows", None))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """For the query's progress, as `latestOffset`: how far it has planned, and `lag`, what is left in the source's unit."""
        if self._planned is None:
            return None
        if time.monotonic() >= self._next_lag:
            self._next_lag = time.monotonic() + LAG_SECS
            with contextlib.suppress(ConnectorError):  # it is only a report; the next batch says what is wrong
                self._lag = self._opened().lag()
        return {**self.offset(self._planned), **({} if self._lag is None else {"lag": self._lag})}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._opened()
        return self.splits(self.position(start), self.position(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.rows(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._ack(self.position(end))

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
        source = self._opened()
        self._ack(start)
        if self._ends and self._until is None:
            self._until = source.latest(start, self._limit(None))
        self._planned = source.latest(start, self._limit(rows))
        return self.offset(self._planned)

    def _limit(self, rows: int | None) -> ReadLimit:
        return ReadLimit(rows=rows, parallelism=os.cpu_count() or 1, until=self._until)

    def _ack(self, end: Any) -> None:
        """Tell the source what Spark has committed; one that cannot be reached hears of it later."""
        if end == self._acked or time.monotonic() < self._next_ack:
            return
        try:
            self._opened().ack(end)
            self._acked = end
        except RetryableError as error:
            _log.warning("could not acknowledge: %s", error)
            self._next_ack = time.monotonic() + ACK_AGAIN_SECS


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
def opened(source: SourceConnector[Any], context: SourceContext = SourceContext()) -> Iterator[None]:
    source.open(context)
    try:
        yield
    finally:
        source.close()


OWN = ("stream", "state_dir", "max_rows_per_batch")
"""Options of the reader itself; all others are the source's."""


def source_of(options: Mapping[str, str]) -> tuple[SourceConnector[Any], dict[str, str]]:
    """The source that the options name, not opened, and the options of the reader itself."""
    kind, config, own = connector_of("source", options, OWN)
    source = kind(config)
    assert isinstance(source, SourceConnector)
    return source, own


def described(source: SourceConnector[Any], wanted: str) -> tuple[str, pa.Schema]:
    """The stream that is read of a source, and its columns; opens the source, so it is asked only before the query runs."""
    with opened(source):
        schemas = source.schema()
    if not schemas and not isinstance(source, RangeSource):
        return wanted, ENVELOPE_SCHEMA  # messages, of streams that are known when they come
    stream = wanted or next(iter(schemas), "")
    if stream not in schemas:
        name = type(source).name
        raise ConfigError(f"{name} has no stream {stream!r}; there are {', '.join(schemas)}", code="PEN-1003")
    schema = schemas[stream]
    if isinstance(source, ChangeCapture):
        schema = pa.schema([*(each.with_nullable(True) for each in schema), *CHANGE_FIELDS])
    return stream, schema
