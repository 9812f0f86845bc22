"""
The kit: conformance tests for any connector, the crash suite, and the parts that they are made of.

A source's test is a subclass of `SourceContract` with a fixture `source`, a sink's one of `SinkContract` with the
fixtures `sink` and `visible`; an exactly-once sink adds a `CrashContract`. Needs pytest.
"""

from penstock.testing.crash import CrashContract
from penstock.testing.engine import ForkEngine
from penstock.testing.faults import Fault, FaultySink, FaultySource
from penstock.testing.memory import Crash, MemorySink, MemorySinkConfig, MemorySource, MemorySourceConfig, Pause
from penstock.testing.sinks import SinkContract
from penstock.testing.sources import RecordingSender, SourceContract

__all__ = [
    "Crash",
    "CrashContract",
    "Fault",
    "FaultySink",
    "FaultySource",
    "ForkEngine",
    "MemorySink",
    "MemorySinkConfig",
    "MemorySource",
    "MemorySourceConfig",
    "Pause",
    "RecordingSender",
    "SinkContract",
    "SourceContract",
]
