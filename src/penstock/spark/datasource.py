"""`format("penstock")`: what Spark asks for a reader or a writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from penstock.errors import ConfigError
from penstock.source import RangeSource
from penstock.spark.reader import BatchReader, RememberingReader, StreamReader, range_source
from penstock.spark.sql import spark_schema
from penstock.spark.versions import has_read_limits
from penstock.spark.writer import BatchWriter, Output, StreamWriter


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

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(Output(dict(self.options), schema, overwrite))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(Output(dict(self.options), schema, overwrite))
