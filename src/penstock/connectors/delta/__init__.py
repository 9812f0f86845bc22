"""Append topics to Delta tables, each epoch exactly once."""

from penstock.connectors.delta.sink import Delta, DeltaConfig

__all__ = ["Delta", "DeltaConfig"]
