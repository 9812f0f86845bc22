"""Mirror PostgreSQL tables: a first copy, then every change from the write-ahead log."""

from penstock.connectors.postgres_cdc.config import PostgresCdcConfig
from penstock.connectors.postgres_cdc.source import PostgresCdc

__all__ = ["PostgresCdc", "PostgresCdcConfig"]
