"""Write topics to Iceberg tables of a catalog, appended or applied by key, each epoch exactly once."""

from penstock.connectors.iceberg.config import IcebergConfig
from penstock.connectors.iceberg.sink import Iceberg

__all__ = ["Iceberg", "IcebergConfig"]
