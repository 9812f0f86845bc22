"""The options of the delta sink."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from penstock.connectors.lake.sink import LakeConfig


class DeltaConfig(LakeConfig):
    identity = LakeConfig.identity | {"key"}

    mode: Literal["append", "upsert", "changes"] = "append"
    """How rows are applied: `append` adds them; `upsert` keeps one row per key, as the changes leave it; `changes` adds
    every change with the columns that describe it."""

    key: tuple[str, ...] = ()
    """Columns that make the key of a row, for `upsert`; by default those that the topic's schema names."""

    soft_delete: bool = False
    """For `upsert`: keep deleted rows and mark them in the column `_deleted`. A row that comes again is unmarked. A
    truncate marks, and so rewrites, the whole table."""

    apply: Literal["rewrite", "vectors", "auto"] = "rewrite"
    """For `upsert`, how old rows go. `rewrite` writes each file that holds one again, without it. `vectors` marks them as
    deleted in deletion vectors, which costs the same however large the table is; it puts the feature on the table, and readers
    must know it (Spark, DuckDB, polars and the client's `QueryBuilder` do; its `to_pyarrow_table` refuses, and its `count()`
    counts deleted rows). `auto` gives vectors to tables that it creates, and leaves other tables as they are."""

    purge_percent: float = Field(default=1.0, gt=0, le=100)
    """For deletion vectors: a file is written again without its deleted rows, a part at a time, once they are this share of
    it; and the worst file of a table is, once half this share of the whole table is deleted."""

    partition_by: tuple[str, ...] = ()
    """Partition columns of tables that are created; an existing table must have the same."""

    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    """Compression of the Parquet files."""

    optimize_every_epochs: NonNegativeInt = 50
    """Join small files of a topic's table after this many of its epochs, so that commits stay cheap; 0: never."""

    vacuum_every_secs: NonNegativeInt = 3600
    """How often to delete files that the table no longer uses, once they are older than its
    `delta.deletedFileRetentionDuration` (a week by default); 0: never."""

    @property
    def upserts(self) -> bool:
        return self.mode == "upsert"

    @property
    def makes_vectors(self) -> bool:
        """True if tables that the sink creates have deletion vectors."""
        return self.upserts and self.apply != "rewrite"
