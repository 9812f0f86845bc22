"""Sources that push, are polled or copy tables, as a stream of Spark's own: a journal beside the query makes ranges of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.capture import ChangeCapture
from penstock.config import Config
from penstock.durable import Json
from penstock.errors import FatalError, RangeGone, RetryableError
from penstock.pipeline.options import Processing
from penstock.runtime.ingest import Ingest
from penstock.runtime.journal import JournalConfig, JournalSource
from penstock.source import (
    Note,
    PollingSource,
    RangeSource,
    ReadLimit,
    Schemas,
    SourceBatch,
    SourceCheckpoint,
    SourceConnector,
    SourceContext,
    SourceEnvelope,
)
from penstock.spark.reader import StreamReader
from penstock.tables import TableSource


class JournaledReader(StreamReader):
    """
    The process of the reader, which lives as long as the query, also runs the source.

    The outside system hears of a row once it is in the journal; the journal lets go of it once Spark has committed its batch.
    """

    def __init__(self, origin: SourceConnector[Any], stream: str, schema: pa.Schema, state_dir: Path) -> None:
        self._origin = PolledTables(origin, stream) if isinstance(origin, TableSource) else origin
        self._state_dir = state_dir
        super().__init__(JournalSource(JournalConfig(directory=state_dir / "journal")), stream, schema)
        self._ingest: Ingest | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For tasks, which read the journal's files."""
        tasks = JournalSource(JournalConfig(directory=self._state_dir / "journal"))
        return {**self.__dict__, "_ingest": None, "_source": tasks, "_origin": None, "_is_open": False}

    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is what the source has handed over by the time that it has caught up."""
        super().prepareForTriggerAvailableNow()
        self._opened()
        began = time.monotonic()
        assert self._ingest is not None
        while not self._ingest.caught_up(began):
            self._opened()  # raises what has stopped the source
            time.sleep(0.05)

    def stop(self) -> None:
        if self._ingest is not None:
            self._ingest.close()
            self._ingest = None
        self._is_open = False

    def _opened(self) -> RangeSource[Any, Any]:
        if self._ingest is None:
            name, origin = type(self._origin).name, self._origin
            ingest = Ingest(
                name,
                origin,
                self._state_dir / "journal",
                Processing(),
                unseeded=lambda: (
                    [each for each in origin.tables() if each.stream not in _copied(ingest)]
                    if isinstance(origin, ChangeCapture)
                    else []
                ),
                lacking=lambda stream: () if stream in _copied(ingest) else ("query",),
            )
            ingest.open(context=SourceContext(self._state_dir / "source"))
            ingest.start()
            self._ingest, self._source = ingest, ingest.range_source
        if self._ingest.failure is not None:
            raise self._ingest.failure
        return self._source


def _copied(ingest: Ingest) -> Mapping[str, int]:
    """The tables whose copy is in the journal, or has been."""
    return ingest.feeder.seeded() if ingest.feeder is not None else {}


class PolledTables(PollingSource[Config]):
    """
    One table of a source of tables, read range by range in this process, as if it were polled.

    Where a range of such a source begins depends on what was noted while the one before was read, and a task of Spark's own
    reader has no way to hand notes to the driver. Here the rows of a range and where the next one begins are journaled as
    one record.
    """

    name = "tables"

    def __init__(self, source: TableSource[Any, Any], stream: str) -> None:
        super().__init__(source.config)
        self._source, self._stream = source, stream
        self._reader: TableSource[Any, Any] = type(source)(source.config)
        self._at: Any = None

    def open(self, context: SourceContext = SourceContext()) -> None:
        super().open(context)
        self._source.open(context)
        self._reader.open(SourceContext(in_task=True))

    def close(self) -> None:
        self._source.close()
        self._reader.close()

    def schema(self) -> Schemas:
        return self._source.schema()

    def lag(self) -> int | None:
        return self._source.lag()

    def poll_batch(self, max_records: int) -> SourceBatch | list[SourceEnvelope] | None:
        start = self._at if self._at is not None else self._source.initial()
        self._at = start
        end = self._source.latest(start, ReadLimit(rows=max_records))
        if end == start:
            return None
        rows: list[pa.Table] = []
        notes: list[Json] = []
        try:
            for split in self._source.split(start, end):
                for item in self._reader.read(split):
                    if isinstance(item, Note):
                        notes.append(item.value)
                    elif item.stream == self._stream:
                        rows.append(pa.Table.from_batches([item.records]))
        except RangeGone as error:
            raise RetryableError(f"a range is gone, and another is read: {error.message}") from error
        self._at = self._source.next_start(end, notes)
        self._require_read()
        found = pa.concat_tables(rows, promote_options="permissive").combine_chunks().to_batches() if rows else []
        return SourceBatch(found[0], stream=self._stream) if found else []

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(offsets={"position": self._at.model_dump(mode="json")})

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._at = self._position(checkpoint.offsets)

    def commit(self, offsets: Mapping[str, Json]) -> None:
        self._source.ack(self._position(offsets))

    def _position(self, offsets: Mapping[str, Json]) -> Any:
        return self._source.position_type.model_validate(offsets["position"])

    def _require_read(self) -> None:
        """In a pipeline the other tables go on without one that failed; here there is no other."""
        table = self._source.tables(self._at).get(self._stream)
        if table is not None and table.state == "failed":
            raise FatalError(f"{self._stream} failed: {table.error}", code=table.code or "PEN-5012", hint=table.hint)
