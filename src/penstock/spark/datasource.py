"""`format("penstock")`: what Spark asks for a reader or a writer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.spark.reader import StreamReader

# Spark starts a process for each question, two of them with every batch that is written: each imports only what it needs.


class PenstockDataSource(DataSource):  # type: ignore[misc]
    """
    Spark asks for the schema first, then makes readers in several processes, some of them while the query runs.

    Only the question for the schema opens the source: a source that listens, or that logs in under a name, is there once.
    """

    _stream: str | None = None

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> Any:
        from penstock.spark.reader import described, source_of
        from penstock.spark.sql import spark_schema

        source, own = source_of(dict(self.options))
        self._stream, schema = described(source, own.get("stream", ""))
        return spark_schema(schema, self._stream)

    def reader(self, schema: Any) -> DataSourceReader:
        from penstock.source import RangeSource
        from penstock.spark.reader import BatchReader, source_of
        from penstock.spark.versions import arrow_schema
        from penstock.tables import TableSource

        source, _ = source_of(dict(self.options))
        if not isinstance(source, RangeSource) or isinstance(source, TableSource):
            raise ConfigError(
                f"{type(source).name} has no end: it pushes, is polled or follows changes",
                code="PEN-1009",
                hint="use spark.readStream",
            )
        return BatchReader(source, self._known_stream(), arrow_schema(schema))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        from penstock.source import RangeSource
        from penstock.spark.journaled import JournaledReader
        from penstock.spark.reader import RememberingReader, StreamReader, source_of
        from penstock.spark.versions import arrow_schema, has_read_limits
        from penstock.tables import TableSource

        source, own = source_of(dict(self.options))
        stream, columns = self._known_stream(), arrow_schema(schema)
        state_dir = Path(own["state_dir"]) if "state_dir" in own else None
        limits = has_read_limits()
        made: StreamReader
        ranges = isinstance(source, RangeSource) and not isinstance(source, TableSource)
        if isinstance(source, RangeSource) and ranges and limits:
            made = StreamReader(source, stream, columns)
        elif state_dir is None:
            raise ConfigError(
                f"{type(source).name} needs a directory for what it has read"
                if limits
                else "this version of Spark does not say where a batch begins, so the reader must remember it",
                code="PEN-1004" if limits else "PEN-1050",
                hint='name it with option("state_dir", …), one for each query',
            )
        elif isinstance(source, RangeSource) and ranges:
            made = RememberingReader(source, stream, columns, state_dir=state_dir)
        elif limits:
            made = JournaledReader(source, stream, columns, state_dir)
        else:
            raise ConfigError(
                f"{type(source).name} needs a journal, and this version of Spark has no read limits",
                code="PEN-1050",
                hint="use a newer Spark 4, or run it in a pipeline",
            )
        made.max_rows = int(own["max_rows_per_batch"]) if "max_rows_per_batch" in own else None
        return made

    def _known_stream(self) -> str:
        if self._stream is None:
            raise ConfigError(
                "the columns are the source's own",
                code="PEN-1009",
                hint="leave .schema(…) out, and select what you need",
            )
        return self._stream

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.writer import BatchWriter, Output

        return BatchWriter(Output(dict(self.options), schema, overwrite))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        from penstock.spark.writer import Output, StreamWriter

        return StreamWriter(Output(dict(self.options), schema, overwrite))
