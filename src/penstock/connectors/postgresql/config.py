"""The options that all connectors of PostgreSQL share: where the database is, and how to log in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import NonNegativeInt, PositiveInt, field_validator

from penstock.config import Config, Secret

NOTICED = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
"""Keepalives, so that a peer that vanished is noticed within a minute and not after the system's two hours."""


class PostgresConfig(Config):
    dsn: str
    """Where the database is: `postgresql://user@host:port/database`, or libpq's `key=value` form; without a password."""

    password: Secret | None = None
    """The user's password."""

    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = None
    """How TLS is used; none: what the `dsn` says, else libpq's default."""

    sslrootcert: Path | None = None
    """The certificate authority that the server's certificate is checked against."""

    sslcert: Path | None = None
    """The client's certificate."""

    sslkey: Path | None = None
    """The key of the client's certificate."""

    connect_timeout_secs: PositiveInt = 10
    """How long to wait for a connection."""

    statement_timeout_secs: NonNegativeInt = 0
    """The server cancels a statement that runs for longer; 0: never."""

    @field_validator("dsn")
    @classmethod
    def _no_password(cls, dsn: str) -> str:
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError as error:
            raise ValueError(f"this is not a connection string: {str(error).strip()}") from None
        if parts.get("password"):
            raise ValueError("leave the password out of the dsn, and give it as `password = { env = … }`")
        return dsn

    def conninfo(self) -> str:
        """The connection string with everything that the options add; it holds the password, so it is never stored."""
        options: dict[str, Any] = {
            "application_name": "penstock",
            "connect_timeout": self.connect_timeout_secs,
            "password": self.password.reveal() if self.password else None,
            "sslmode": self.sslmode,
            "sslrootcert": self.sslrootcert,
            "sslcert": self.sslcert,
            "sslkey": self.sslkey,
        }
        given = conninfo_to_dict(self.dsn)
        options |= {name: value for name, value in NOTICED.items() if name not in given}
        return make_conninfo(self.dsn, **{name: value for name, value in options.items() if value is not None})

    def dataset(self, name: str) -> tuple[str, str]:
        """How lineage tools call a table: `postgres://host:port` and `database.schema.table`."""
        parts = conninfo_to_dict(self.dsn)
        host = str(parts.get("host") or "localhost").partition(",")[0]
        port = str(parts.get("port") or "5432").partition(",")[0]
        return f"postgres://{host}:{port}", f"{parts.get('dbname') or parts.get('user') or ''}.{name}"

    def session(self) -> dict[str, str]:
        """The session settings that the options ask for."""
        return {"statement_timeout": f"{self.statement_timeout_secs}s"}
