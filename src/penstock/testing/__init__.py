"""
The kit: conformance tests for any connector, the crash suite, and the parts that they are made of.

A source's test is a subclass of `SourceContract` with a fixture `source`, a table source's one of `TableSourceContract`
with `source`, `change` and `content`, a capture's one of `CaptureContract` with `source` and `more`,
a sink's one of `SinkContract` with `sink` and `visible`; an exactly-once sink adds a
`CrashContract`. Needs pytest.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"penstock.testing.{module}" for module in ("captures", "crash", "sinks", "sources", "tables"))
)

from penstock.testing.applying import MemoryApplySink  # noqa: E402
from penstock.testing.captures import CaptureContract  # noqa: E402 - asserts tell what they compared only if pytest sees them first
from penstock.testing.crash import CrashContract  # noqa: E402
from penstock.testing.database import MemoryDatabase, MemoryTables, MemoryTablesConfig  # noqa: E402
from penstock.testing.engine import ForkEngine  # noqa: E402
from penstock.testing.faults import Fault, FaultySink, FaultySource  # noqa: E402
from penstock.testing.memory import Crash, MemorySink, MemorySinkConfig, MemorySource, MemorySourceConfig, Pause  # noqa: E402
from penstock.testing.sinks import SinkContract  # noqa: E402
from penstock.testing.sources import SourceContract  # noqa: E402
from penstock.testing.sources.journaled import RecordingSender  # noqa: E402
from penstock.testing.tables import TableSourceContract  # noqa: E402

__all__ = [
    "CaptureContract",
    "Crash",
    "CrashContract",
    "Fault",
    "FaultySink",
    "FaultySource",
    "ForkEngine",
    "MemoryApplySink",
    "MemoryDatabase",
    "MemorySink",
    "MemorySinkConfig",
    "MemorySource",
    "MemorySourceConfig",
    "MemoryTables",
    "MemoryTablesConfig",
    "Pause",
    "RecordingSender",
    "SinkContract",
    "SourceContract",
    "TableSourceContract",
]
