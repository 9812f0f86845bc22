"""Danube: topics in, topics out."""

from penstock.connectors.danube.sink import DanubeSink
from penstock.connectors.danube.source import Danube

__all__ = ["Danube", "DanubeSink"]
