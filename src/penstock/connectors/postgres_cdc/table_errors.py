"""Errors that concern one table and no other: that table is set aside, and the others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import psycopg
from adbc_driver_manager import dbapi as adbc_dbapi

from penstock.connectors.postgresql.types import quoted
from penstock.errors import DataError

if TYPE_CHECKING:
    from penstock.connectors.postgres_cdc.catalog import Table

LOCK_SECS = 30
"""How long a session waits for the lock of another one on a table before the table is set aside."""

_OF_TABLE = ("0A", "22", "42", "XX")
_LOCKED, _CANCELLED = "55P03", "57014"


class TableError(DataError):
    """Something is wrong with one table."""

    default_code = "PEN-3006"


@contextlib.contextmanager
def table_errors(table: Table, doing: Literal["copy", "publish"] = "copy") -> Iterator[None]:
    """Turn the server's errors about a table into `TableError`; errors of the server or the connection pass through."""
    try:
        yield
    except (psycopg.Error, adbc_dbapi.Error) as error:
        state = str(getattr(error, "sqlstate", None) or "")
        if state[:2] not in _OF_TABLE and state not in (_LOCKED, _CANCELLED):
            raise
        text = str(error).strip().partition("\n")[0]
        hints = {
            "42501": _grant(table, text) if doing == "copy" or "for schema" in text else _right_to_publish(table, text),
            "42P01": "it was dropped or renamed",
            _CANCELLED: "raise `statement_timeout_secs`, or lower `seed_chunk_rows`",
            _LOCKED: "a session holds a lock on it: see pg_locks",
        }
        raise TableError(f"cannot {doing} {table.stream}: {text}", hint=hints.get(state, "")) from error


def _grant(table: Table, refusal: str) -> str:
    """The SQL that lets the rows of a table be read, by the server's own words."""
    if "row-level security" in refusal:
        return "a policy hides rows: give BYPASSRLS to the user that reads (ALTER ROLE), or let it own the table"
    if "for schema" in refusal:
        return f"GRANT USAGE ON SCHEMA {quoted(table.namespace)} TO the user that reads"
    return f"GRANT SELECT ON {table.sql} TO the user that reads"


def _right_to_publish(table: Table, refusal: str) -> str:
    """What lets a table be published, by the server's own words."""
    if "for database" in refusal:
        return "GRANT CREATE ON DATABASE to that user, or make the publication yourself: `penstock check` shows its SQL"
    if "owner of publication" in refusal:
        return f"as the owner of the publication or a superuser: ALTER PUBLICATION … ADD TABLE {table.sql}"
    return f"ALTER TABLE {table.sql} OWNER TO that user, or add it to the publication yourself"
