"""What the server's refusals mean for the rows of a topic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg

from penstock.connectors.postgresql.failures import OF_FUNCTIONS, said
from penstock.errors import DataError, SchemaError, StagingLost
from penstock.sink import Epoch, Topic


@contextlib.contextmanager
def refusals(topic: Topic, column: str = "") -> Iterator[None]:
    """Say which topic's rows the server refused and why, but not which value: errors end up in logs and manifests."""
    try:
        yield
    except psycopg.Error as error:
        state = str(error.sqlstate or "")
        if state[:2] == "22":
            raise DataError(
                f"PostgreSQL refuses a value of {f'the column {column!r} of ' if column else ''}{topic}: {said(error)}",
                hint="the server's log shows the value, unless its log_min_error_statement hides it",
            ) from error
        if state[:2] == "23":
            raise SchemaError(
                f"the table of {topic} refuses rows: {said(error)}",
                code="PEN-4002",
                hint="nothing of the epoch is visible: drop the constraint or repair the table, and start again",
            ) from error
        if state[:2] in OF_FUNCTIONS:
            raise SchemaError(
                f"a trigger or function of the table of {topic} refuses rows: {said(error)}",
                code="PEN-4002",
                hint="the server's log holds its message; nothing of the epoch is visible: change the trigger or repair the "
                "table, and start again",
            ) from error
        raise


@contextlib.contextmanager
def losses(epoch: Epoch) -> Iterator[None]:
    """A staging table that is missing is lost."""
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        raise StagingLost(f"a table that was staged for {epoch} is missing: {said(error)}") from error
