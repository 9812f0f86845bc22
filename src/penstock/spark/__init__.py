"""The one bridge to Spark: each epoch is a Spark job whose tasks read splits and stage them in the sinks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.engine import SparkEngine as SparkEngine
    from penstock.spark.engine import engine_for as engine_for


def __getattr__(name: str) -> Any:
    """Import on first use: who only looks for Java must not wait for the engine."""
    if name in ("SparkEngine", "engine_for"):
        from penstock.spark import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'penstock.spark' has no attribute {name!r}")


def register(spark: Any) -> None:
    """
    Make `format("penstock")` known: `spark.read` and `spark.readStream` read range sources, `df.write` and `df.writeStream`
    write to sinks.

    `option("connector", "files")` names the connector and every other option is one of its own; what is not text there is
    written as JSON. `option("stream", …)` chooses among several streams of a source.
    """
    from penstock.spark.datasource import PenstockDataSource  # here, since it imports pyspark
    from penstock.spark.session import is_local
    from penstock.spark.shipping import ship

    if hasattr(spark, "_jsparkSession") and not is_local(str(spark.sparkContext.master)):
        ship(spark.sparkContext, (Path(__file__).parent.parent,))
    spark.dataSource.register(PenstockDataSource)
