"""The options of `postgres_capture`."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from penstock.connectors.postgres_cdc.config import PostgresLogConfig


class PostgresCaptureConfig(PostgresLogConfig):
    max_wal_bytes: PositiveInt = 32 << 20
    """Most log that is read at a time; a transaction is never cut, and its changes are put into order in memory."""

    truncate: Literal["stop", "skip"] = "stop"
    """What a TRUNCATE of a table does. It is not a change of a row, so the pipeline stops, or goes on without it."""

    poll_interval_ms: PositiveInt = 100
    """Time between two looks at the log while it holds no changes."""
