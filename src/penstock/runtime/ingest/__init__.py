"""Run the sources that push, are polled or capture: one supervised thread each, into a journal."""

from penstock.runtime.ingest.feeder import Ingest

__all__ = ["Ingest"]
