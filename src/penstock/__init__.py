"""Penstock feeds Apache Spark: connectors in, connectors out, and neither a lost nor a doubled row between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline as Pipeline
    from penstock.spark import register as register
    from penstock.spark.batches import BatchSink as BatchSink


def __getattr__(name: str) -> Any:
    """Import on first use: a task must not wait for what only the driver needs."""
    if name == "Pipeline":
        from penstock.pipeline import Pipeline

        return Pipeline
    if name == "register":
        from penstock.spark import register

        return register
    if name == "BatchSink":
        from penstock.spark.batches import BatchSink

        return BatchSink
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
