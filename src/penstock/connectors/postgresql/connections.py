"""Connections to PostgreSQL: for statements, and for rows as Arrow."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
from adbc_driver_manager import Error as ArrowError
from psycopg.pq import PGconn, Ping, TransactionStatus

from penstock.connectors.postgresql.config import PostgresConfig
from penstock.connectors.postgresql.failures import NO_ANSWER, errors, is_refusal
from penstock.connectors.postgresql.types import SESSION
from penstock.errors import NOT_READY, RetryableError

T = TypeVar("T")

PINGED_SECS = 1.0
"""A connection that failed within this time is followed by a ping, see `make`."""

IDLE_SECS = 10.0
"""How long a task's connection is kept for the next task; to make one takes longer than to read a small range."""

_idle: dict[tuple[int, bytes], tuple[psycopg.Connection[Any], float]] = {}
_idle_arrows: dict[tuple[int, bytes], tuple[Any, int, float]] = {}
"""Idle Arrow connections by (process, settings): connection, backend pid, time of return."""


def connect(config: PostgresConfig) -> psycopg.Connection[Any]:
    """A connection for statements, in autocommit; not for rows."""
    with errors("cannot connect to PostgreSQL"):
        connection = make(config.conninfo(), lambda conninfo: psycopg.connect(conninfo, autocommit=True))
        with _closing_on_error(connection):
            connection.execute(_settings(config))
    return connection


def take(config: PostgresConfig) -> psycopg.Connection[Any]:
    """A connection that the last task of this process returned, if it still works; else a new one."""
    connection, since = _idle.pop(_whose(config), (None, 0.0))
    if connection is not None:
        with contextlib.suppress(psycopg.Error):
            if time.monotonic() - since < IDLE_SECS:  # an older one may have been cut off unnoticed
                connection.execute("SELECT 1")
                return connection
        connection.close()
    return connect(config)


def return_connection(config: PostgresConfig, connection: psycopg.Connection[Any], arrow: Any = None) -> None:
    """
    Keep connections for the next task of this process, unless a transaction is still open there.

    `arrow`: one for rows, without a transaction. That of an earlier task is closed if nothing was copied for a while.
    """
    old, _, since = _idle_arrows.get(_whose(config), (None, 0, 0.0))
    if old is not None and (arrow is not None or time.monotonic() - since >= IDLE_SECS):
        del _idle_arrows[_whose(config)]
        old.close()
    if arrow is not None:
        with _closing_on_error(arrow), errors(NO_ANSWER):
            pid = run(arrow, "SELECT pg_backend_pid() AS pid")["pid"][0].as_py()
        _idle_arrows[_whose(config)] = (arrow, pid, time.monotonic())
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        connection.close()
        return
    before, _ = _idle.pop(_whose(config), (None, 0.0))
    if before is not None:
        before.close()
    _idle[_whose(config)] = (connection, time.monotonic())


def take_arrow(config: PostgresConfig, connection: psycopg.Connection[Any], **settings: str) -> Any:
    """As `take`, for rows; all of them have the same settings."""
    arrow, pid, since = _idle_arrows.pop(_whose(config), (None, 0, 0.0))
    if arrow is not None:
        # Asked over the other connection: the driver ends the whole process when its own connection is broken.
        there = connection.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).fetchall()
        if there and time.monotonic() - since < IDLE_SECS:
            return arrow
        arrow.close()
    return connect_arrow(config, **settings)


def _whose(config: PostgresConfig) -> tuple[int, bytes]:
    """Of this process, not of one that forked it; a digest, so without the password."""
    return os.getpid(), hashlib.sha256(f"{config.conninfo()} {config.statement_timeout_secs}".encode()).digest()


def connect_arrow(config: PostgresConfig, **settings: str) -> Any:
    """A connection that answers in Arrow, in autocommit; for rows."""
    from adbc_driver_postgresql import dbapi as adbc  # 0.3 s, which who only commits need not wait for

    with errors("cannot connect to PostgreSQL"):
        connection = make(config.conninfo(), lambda conninfo: adbc.connect(conninfo, autocommit=True))
        with _closing_on_error(connection):
            run(connection, _settings(config, settings))
    return connection


def run(connection: Any, query: str) -> pa.Table:
    """The answer of a query over an Arrow connection."""
    with connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetch_arrow_table()


def make(conninfo: str, connecting: Callable[[str], T]) -> T:
    """
    A new connection. A server that accepts none yet (SQLSTATE 57P03: starting up, recovering) is not one that is down.

    The drivers do not give the state of a failed connection, and the text depends on the server's language: so libpq asks
    again. That blocks the whole process, so not after a failure that took long.
    """
    for last in (False, True):
        began = time.monotonic()
        try:
            return connecting(conninfo)
        except (psycopg.OperationalError, ArrowError) as error:
            text = str(error).strip().partition("\n")[0]
            if is_refusal(text) or time.monotonic() - began > PINGED_SECS:
                raise
            answer = PGconn.ping(conninfo.encode())
            if answer == Ping.REJECT:
                raise RetryableError(
                    f"PostgreSQL does not accept connections yet: {text}",
                    code=NOT_READY,
                    hint="it is starting up, recovering or shutting down: wait until that is over",
                ) from error
            if last or answer != Ping.OK:  # it may have become ready in between
                raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _closing_on_error(connection: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _settings(config: PostgresConfig, more: Mapping[str, str] | None = None) -> str:
    settings = {
        **SESSION,
        **config.session(),
        "client_connection_check_interval": "1s",  # frees the slot soon after a reader was killed
        **(more or {}),
    }
    calls = ", ".join(f"set_config({literal(name)}, {literal(value)}, false)" for name, value in settings.items())
    return f"SELECT {calls}"


def literal(text: str) -> str:
    """An SQL string."""
    escaped = text.replace("'", "''")
    return f" E'{escaped}'".replace("\\", "\\\\") if "\\" in escaped else f"'{escaped}'"
