"""Append topics to Iceberg tables in a SQL catalog, each epoch exactly once."""

from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.sink import Iceberg

__all__ = ["Iceberg", "IcebergConfig"]
