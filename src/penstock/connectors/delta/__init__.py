"""Write topics to Delta tables, appended or applied by key, each epoch exactly once."""

from penstock.connectors.delta.config import DeltaConfig
from penstock.connectors.delta.sink import Delta

__all__ = ["Delta", "DeltaConfig"]
