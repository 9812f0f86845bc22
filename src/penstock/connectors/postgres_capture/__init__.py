"""Change capture from PostgreSQL through the journal."""

from penstock.connectors.postgres_capture.config import PostgresCaptureConfig
from penstock.connectors.postgres_capture.source import PostgresCapture

__all__ = ["PostgresCapture", "PostgresCaptureConfig"]
