"""`format("penstock")`: what Spark asks for a reader or a writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from penstock.errors import ConfigError
from penstock.source import RangeSource
from penstock.spark.journaled import JournaledReader
from penstock.spark.reader import BatchReader, RememberingReader, StreamReader, source_of
from penstock.spark.sql import spark_schema
from penstock.spark.versions import has_read_limits
from penstock.spark.writer import BatchWriter, Output, StreamWriter


class PenstockDataSource(DataSource):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> Any:
        _, stream, schema, _ = source_of(dict(self.options))
        return spark_schema(schema, stream)

    def reader(self, schema: Any) -> DataSourceReader:
        source, stream, columns, _ = source_of(dict(self.options))
        if not isinstance(source, RangeSource):
            raise ConfigError(
                f"{type(source).name} has no end: it pushes or is polled", code="PEN-1009", hint="use spark.readStream"
            )
        return BatchReader(source, stream, columns)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        source, stream, columns, own = source_of(dict(self.options))
        state_dir = Path(own["state_dir"]) if "state_dir" in own else None
        limits = has_read_limits()
        made: StreamReader
        if isinstance(source, RangeSource) and limits:
            made = StreamReader(source, stream, columns)
        elif state_dir is None:
            raise ConfigError(
                f"{type(source).name} needs a directory for what it has read"
                if limits
                else "this version of Spark does not say where a batch begins, so the reader must remember it",
                code="PEN-1004" if limits else "PEN-1050",
                hint='name it with option("state_dir", …), one for each query',
            )
        elif isinstance(source, RangeSource):
            made = RememberingReader(source, stream, columns, state_dir=state_dir)
        elif limits:
            made = JournaledReader(source, stream, columns, state_dir)
        else:
            raise ConfigError(
                f"{type(source).name} pushes or is polled, and this version of Spark has no read limits",
                code="PEN-1050",
                hint="use a newer Spark 4, or run it in a pipeline",
            )
        made.max_rows = int(own["max_rows_per_batch"]) if "max_rows_per_batch" in own else None
        return made

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(Output(dict(self.options), schema, overwrite))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(Output(dict(self.options), schema, overwrite))
