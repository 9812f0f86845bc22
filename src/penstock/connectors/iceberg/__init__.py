"""Append topics to Iceberg tables in a SQL catalog, each epoch exactly once."""

from penstock.connectors.iceberg.sink import Iceberg, IcebergConfig

__all__ = ["Iceberg", "IcebergConfig"]
