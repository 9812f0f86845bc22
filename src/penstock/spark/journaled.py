"""Sources that push or are polled, as a stream of Spark's own: a journal beside the query makes ranges of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.pipeline.options import Processing
from penstock.runtime.ingest import Ingest
from penstock.runtime.journal import JournalConfig, JournalSource
from penstock.source import RangeSource, ReadLimit, SourceConnector, SourceContext
from penstock.spark.reader import StreamReader

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # of a version without read limits, for which there is no such reader
    SupportsTriggerAvailableNow = object


class JournaledReader(StreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """
    The process of the reader, which lives as long as the query, also runs the source.

    The outside system hears of a row once it is in the journal; the journal lets go of it once Spark has committed its batch.
    """

    def __init__(self, origin: SourceConnector[Any], stream: str, schema: pa.Schema, state_dir: Path) -> None:
        self._origin, self._state_dir = origin, state_dir
        super().__init__(JournalSource(JournalConfig(directory=state_dir / "journal")), stream, schema)
        self._ingest: Ingest | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For tasks, which read the journal's files."""
        tasks = JournalSource(JournalConfig(directory=self._state_dir / "journal"))
        return {**self.__dict__, "_ingest": None, "_source": tasks, "_origin": None, "_is_open": False}

    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is what the source has handed over by the time that it has caught up."""
        source, began = self._opened(), time.monotonic()
        assert self._ingest is not None
        while not self._ingest.caught_up(began):
            self._opened()  # raises what has stopped the source
            time.sleep(0.05)
        self._until = source.latest(source.initial(), ReadLimit())

    def stop(self) -> None:
        if self._ingest is not None:
            self._ingest.close()
            self._ingest = None
        self._is_open = False

    def _opened(self) -> RangeSource[Any, Any]:
        if self._ingest is None:
            name = type(self._origin).name
            ingest = Ingest(name, self._origin, self._state_dir / "journal", Processing())
            ingest.open(context=SourceContext(self._state_dir / "source"))
            ingest.start()
            self._ingest, self._source = ingest, ingest.range_source
        if self._ingest.failure is not None:
            raise self._ingest.failure
        return self._source
