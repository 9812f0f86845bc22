"""Options and receipts of the sink."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from penstock.connectors.postgres.events import StagedPart
from penstock.connectors.postgresql.config import PostgresConfig
from penstock.schema.evolution import EvolutionConfig
from penstock.sink import Receipt, Topic


class PostgresSinkConfig(PostgresConfig, EvolutionConfig):
    identity = PostgresConfig.identity | {"key", "soft_delete"}

    table: str = "{schema}.{table}"
    """
    The table of a topic, as `schema.table`. A topic's name has parts, which end at `/` and `.`: `{table}` is the last part,
    `{schema}` the part before it (`public` if there is none), and `{topic}` the whole name without its leading slash.
    """

    mode: Literal["append", "upsert", "changes"] = "append"
    """How rows are applied: `append` adds them; `upsert` keeps one row per key, as the changes leave it; `changes` adds
    every change with the columns that describe it."""

    key: tuple[str, ...] = ()
    """Columns that make the key of a row, for `upsert`; by default the key that the topic's schema names."""

    soft_delete: bool = False
    """Mark deleted rows in a column `_deleted` instead of removing them; for `upsert`."""

    staging_schema: str = "_penstock"
    """The schema of the sink's own tables: staged rows, and the last epoch of every table. It is created if it is missing."""

    def dataset(self, name: str) -> tuple[str, str]:
        """How lineage tools call the table of a topic."""
        parts = re.split(r"[/.]", name.strip("/"))
        schema = parts[-2] if len(parts) > 1 else "public"
        table = self.table.replace("{schema}", schema).replace("{table}", parts[-1]).replace("{topic}", name.strip("/"))
        return super().dataset(table)


class StagedTables(Receipt):
    staged: dict[Topic, list[StagedPart]] = Field(default_factory=dict)
    key: dict[Topic, list[str]] = Field(default_factory=dict)

    def topics(self) -> Iterable[Topic]:
        return self.staged
