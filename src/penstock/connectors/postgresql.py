"""What the connectors of PostgreSQL have in common: the options that say where a database is and how to log in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import NonNegativeInt, PositiveInt, field_validator

from penstock.config import Config, Secret


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
    """The server ends a statement after so long; 0: never."""

    @field_validator("dsn")
    @classmethod
    def _no_password(cls, dsn: str) -> str:
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError as error:
            raise ValueError(f"this is no connection string: {str(error).strip()}") from None
        if parts.get("password"):
            raise ValueError("leave the password out of the dsn, and give it as `password = { env = … }`")
        return dsn
