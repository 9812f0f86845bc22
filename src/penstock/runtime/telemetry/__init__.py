"""What a running pipeline tells about itself, and how every front shows it."""

from penstock.runtime.telemetry.parts import Looks
from penstock.runtime.telemetry.status import (
    ENDED,
    STATUS_FILE,
    Verdict,
    assess,
    failed_tables,
    judge,
    read_status,
    ready,
)
from penstock.runtime.telemetry.telemetry import Telemetry

__all__ = [
    "ENDED",
    "STATUS_FILE",
    "Looks",
    "Telemetry",
    "Verdict",
    "assess",
    "failed_tables",
    "judge",
    "read_status",
    "ready",
]
