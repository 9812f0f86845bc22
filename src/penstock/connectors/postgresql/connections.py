"""Connections to PostgreSQL: for questions and orders, and for rows as Arrow."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
import pyarrow as pa
from adbc_driver_postgresql import dbapi as adbc
from psycopg.pq import TransactionStatus

from penstock.connectors.postgresql.config import PostgresConfig
from penstock.connectors.postgresql.failures import NO_ANSWER, errors
from penstock.connectors.postgresql.types import SESSION

HANDED_ON_SECS = 10.0
"""How long a task's connection waits for the next task; to make one takes longer than to read a small range."""

_handed_on: dict[tuple[int, bytes], tuple[psycopg.Connection[Any], float]] = {}
_arrows: dict[tuple[int, bytes], tuple[Any, int, float]] = {}
"""With the process that serves it."""


def connect(config: PostgresConfig) -> psycopg.Connection[Any]:
    """A connection for questions and orders, in autocommit; not for rows."""
    with errors("cannot connect to PostgreSQL"):
        connection = psycopg.connect(config.conninfo(), autocommit=True)
        with _closing_on_error(connection):
            connection.execute(_settings(config))
    return connection


def take(config: PostgresConfig) -> psycopg.Connection[Any]:
    """A connection that the last task of this process handed on, if it is still good; else a new one."""
    connection, since = _handed_on.pop(_whose(config), (None, 0.0))
    if connection is not None:
        with contextlib.suppress(psycopg.Error):
            if time.monotonic() - since < HANDED_ON_SECS:  # an older one may have been cut without a word
                connection.execute("SELECT 1")
                return connection
        connection.close()
    return connect(config)


def hand_on(config: PostgresConfig, connection: psycopg.Connection[Any], arrow: Any = None) -> None:
    """
    Leave connections to the next task of this process, unless something is still going on there.

    `arrow`: one for rows, without a transaction. The one of an earlier task goes when nothing was copied for a while.
    """
    old, _, since = _arrows.get(_whose(config), (None, 0, 0.0))
    if old is not None and (arrow is not None or time.monotonic() - since >= HANDED_ON_SECS):
        del _arrows[_whose(config)]
        old.close()
    if arrow is not None:
        with _closing_on_error(arrow), errors(NO_ANSWER):
            pid = run(arrow, "SELECT pg_backend_pid() AS pid")["pid"][0].as_py()
        _arrows[_whose(config)] = (arrow, pid, time.monotonic())
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        connection.close()
        return
    before, _ = _handed_on.pop(_whose(config), (None, 0.0))
    if before is not None:
        before.close()
    _handed_on[_whose(config)] = (connection, time.monotonic())


def take_arrow(config: PostgresConfig, connection: psycopg.Connection[Any], **settings: str) -> Any:
    """As `take`, for rows; who hands them on has always the same settings."""
    arrow, pid, since = _arrows.pop(_whose(config), (None, 0, 0.0))
    if arrow is not None:
        # Asked over the other connection: the driver takes the whole process with it when its own is broken.
        there = connection.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).fetchall()
        if there and time.monotonic() - since < HANDED_ON_SECS:
            return arrow
        arrow.close()
    return connect_arrow(config, **settings)


def _whose(config: PostgresConfig) -> tuple[int, bytes]:
    """Of this process, not of one that forked it; without the password in it."""
    return os.getpid(), hashlib.sha256(f"{config.conninfo()} {config.statement_timeout_secs}".encode()).digest()


def connect_arrow(config: PostgresConfig, **settings: str) -> Any:
    """A connection that answers in Arrow, in autocommit; for rows."""
    with errors("cannot connect to PostgreSQL"):
        connection = adbc.connect(config.conninfo(), autocommit=True)
        with _closing_on_error(connection):
            run(connection, _settings(config, settings))
    return connection


def run(connection: Any, query: str) -> pa.Table:
    """What a query answers over an Arrow connection."""
    with connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetch_arrow_table()


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
