"""The options of the iceberg sink."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo

from penstock.config import Secret, base_of, beside
from penstock.connectors.lake.sink import LakeConfig


def _sqlite_beside_file(uri: str, info: ValidationInfo) -> str:
    kind, found, path = uri.partition("sqlite:///")
    return f"sqlite:///{beside(base_of(info), path)}" if found and not kind else uri


_SECRET = ("token", "credential", "secret", "password", "access-key")


def _by_reference(options: dict[str, str | int | Secret]) -> dict[str, str | int | Secret]:
    """Refuse a secret in plain text, and names that have an option of their own."""
    for name, value in options.items():
        if name in ("type", "uri", "token", "credential", "py-io-impl"):
            raise ValueError(f"{name!r} is not for `catalog_options`: use catalog_{name}, if there is one")
        if isinstance(value, str) and any(each in name for each in _SECRET) and not name.endswith("-uri"):
            raise ValueError(f'{name} is a secret: give a reference, {{ env = "NAME" }} or {{ file = "path" }}')
    return options


CatalogOptions = Annotated[dict[str, str | int | Secret], AfterValidator(_by_reference)]


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
    """For `upsert`: a data file is written again without its deleted rows once they are this share of it; and the worst file
    of a table is, once half this share of the whole table is deleted."""

    catalog_type: Literal["auto", "sql", "rest", "glue", "hive"] = "auto"
    """The kind of catalog. `auto` goes by `catalog_uri`: `http://` and `https://` are REST, `thrift://` is Hive, all else is
    SQL. Glue has to be named."""

    catalog_uri: Annotated[str, AfterValidator(_sqlite_beside_file)] = ""
    """The address of the catalog. For SQL its database, without a password: `sqlite:///lake/catalog.db` or
    `postgresql://user@host/database`; by default the SQLite file `catalog.db` in the directory above all tables. For Glue
    only if it is not the one of AWS."""

    catalog_password: Secret | None = None
    """The password of a SQL catalog's database."""

    catalog_token: Secret | None = None
    """A token that a REST catalog takes as it is."""

    catalog_credential: Secret | None = None
    """`id:secret`, for which a REST catalog gives tokens (OAuth2)."""

    catalog_options: CatalogOptions = Field(default_factory=dict)
    """More properties of the catalog by the names that pyiceberg gives them, e.g. `{ warehouse = "lake", scope = "catalog",
    "glue.region" = "eu-central-1" }`. What holds a secret must be a reference."""

    catalog: str = "default"
    """Name of the catalog. A SQL database may hold several."""

    table: str = "{topic}"
    """Name of a topic's table, e.g. `lake.{topic}`. Slashes become dots; the part before the last dot is the namespace."""

    namespace: str = "default"
    """Namespace of tables whose name has none."""

    branch: str = "main"
    """The branch of the table that is written. One that is not there yet begins at what `main` shows. Old snapshots of another
    branch than `main` are kept."""

    partition_by: tuple[str, ...] = ()
    """Partitions of tables that are created: columns, or transforms of them: `["country", "day(ts)", "bucket(16, id)"]`.
    There are `year`, `month`, `day`, `hour`, `bucket(n, column)` and `truncate(n, column)`. An existing table must have the
    same."""

    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    """Compression of the Parquet files."""

    keep_snapshots: PositiveInt = 20
    """How many snapshots of a table to keep for readers; each commit expires older ones."""

    @property
    def catalog_kind(self) -> str:
        if self.catalog_type != "auto":
            return self.catalog_type
        scheme = self.catalog_uri.partition("://")[0]
        return {"http": "rest", "https": "rest", "thrift": "hive"}.get(scheme, "sql")

    @property
    def upserts(self) -> bool:
        return self.mode == "upsert"
