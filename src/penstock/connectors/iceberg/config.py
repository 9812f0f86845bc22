"""The options of the iceberg sink."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo

from penstock.config import Secret, base_of, beside
from penstock.connectors.lake.sink import LakeConfig


def _sqlite_beside_file(uri: str, info: ValidationInfo) -> str:
    kind, found, path = uri.partition("sqlite:///")
    return f"sqlite:///{beside(base_of(info), path)}" if found and not kind else uri


class IcebergConfig(LakeConfig):
    identity = LakeConfig.identity | {"catalog", "namespace", "key"}

    mode: Literal["append", "upsert", "changes"] = "append"
    """How rows are applied: `append` adds them; `upsert` keeps one row per key, as the changes leave it, by position deletes;
    `changes` adds every change with the columns that describe it."""

    key: tuple[str, ...] = ()
    """Columns that make the key of a row, for `upsert`; by default those that the topic's schema names."""

    soft_delete: bool = False
    """For `upsert`: keep deleted rows and mark them in the column `_deleted`. A row that comes again is unmarked. A
    truncate marks, and so rewrites, the whole table."""

    purge_percent: float = Field(default=10.0, gt=0, le=100)
    """For `upsert`: a data file is written again without its deleted rows once they are this share of it."""

    catalog_uri: Annotated[str, AfterValidator(_sqlite_beside_file)] = ""
    """The catalog's database: `sqlite:///lake/catalog.db` or `postgresql://user@host/database`, without a password;
    by default the SQLite file `catalog.db` in the directory above all tables."""

    catalog_password: Secret | None = None
    """The password of the catalog's database."""

    catalog: str = "default"
    """Name of the catalog in its database, which may hold several."""

    table: str = "{topic}"
    """Name of a topic's table, e.g. `lake.{topic}`. Slashes become dots; the part before the last dot is the namespace."""

    namespace: str = "default"
    """Namespace of tables whose name has none."""

    partition_by: tuple[str, ...] = ()
    """Partitions of tables that are created: columns, or the days of one: `["country", "day(ts)"]`. An existing table must
    have the same."""

    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    """Compression of the Parquet files."""

    keep_snapshots: PositiveInt = 20
    """How many snapshots of a table to keep for readers; each commit expires older ones."""

    @property
    def upserts(self) -> bool:
        return self.mode == "upsert"
