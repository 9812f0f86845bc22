"""The errors of the server and the drivers, and what a pipeline does about each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import psycopg
from adbc_driver_manager import Error as ArrowError  # `dbapi`, where it comes from, takes 0.3 s to import

from penstock.errors import ConfigError, FatalError, RetryableError

NO_ANSWER = "PostgreSQL does not answer"

LOST = (
    "start over with `penstock offsets reset FILE` (empty the targets first), "
    'or set snapshot = "when_needed" to have everything copied again'
)

_TOO_LARGE = (
    "the server cannot print a value of 1 GB, and a bytea of 512 MB comes to that. Put its column into `exclude_columns`, and "
    "remove it from the publication: ALTER PUBLICATION … DROP TABLE t; ALTER PUBLICATION … ADD TABLE t (the other columns). "
    'The log cannot be read past it: drop the slot, and run with snapshot = "when_needed" to have everything copied again'
)


OF_FUNCTIONS = ("P0", "38", "39")
"""Classes of errors that functions of the database raise, such as those of triggers."""


class SlotLost(FatalError):
    """The slot does not hold the log that comes next; only a new copy of everything helps."""

    default_code = "PEN-5011"


class PublicationLost(FatalError):
    """The log holds changes from while a publication did not exist; servers before 18 do not decode them."""

    default_code = "PEN-5011"


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """Turn a driver's errors into ours, by what should happen next; `what` begins the sentence."""
    try:
        yield
    except (psycopg.Error, ArrowError) as error:
        state = str(getattr(error, "sqlstate", None) or "")
        text = said(error)
        message = f"{_answered(state) if what == NO_ANSWER else what}: {text}"
        if state == "55006":  # object in use
            raise RetryableError(message, hint="another session reads the slot; the read is tried again") from error
        if state == "55000" and "can no longer" in text:
            raise SlotLost(message, hint=LOST) from error
        if state == "42704" and 'publication "' in text:
            raise PublicationLost(message, hint=LOST) from error
        if state == "57014":
            raise RetryableError(message, code="PEN-2003", hint="raise `statement_timeout_secs`") from error
        if state[:2] in ("28", "3D") or state in ("42501", "42704") or is_refusal(text):
            hint = "see `penstock check` for the grants and settings that are needed"
            raise ConfigError(message, code="PEN-1016", hint=hint) from error
        if not state or state in ("42P01", "25P03") or state[:2] in ("08", "40", "53", "55", "57", "58"):
            raise RetryableError(message, code="PEN-2001") from error
        if "invalid memory alloc request size" in text:
            raise FatalError(f"{message} (a value is too large for the server to print)", hint=_TOO_LARGE) from error
        raise FatalError(message) from error


def _answered(state: str) -> str:
    """How a sentence about a failed question begins: a server that gives an SQLSTATE did answer."""
    if not state or state.startswith("08"):
        return NO_ANSWER
    return "PostgreSQL closed the connection" if state.startswith("57P") else "PostgreSQL refused"


def is_refusal(text: str) -> bool:
    """True for errors of libpq, which have no state, about settings that only a person can change."""
    return any(
        part in text
        for part in (
            "password authentication failed",
            "no password supplied",
            "certificate",
            "SSL",
            "sslmode",
            "pg_hba.conf",
            "could not translate host name",
        )
    ) or ("database" in text and "does not exist" in text)


def said(error: BaseException) -> str:
    """
    The first line that the server said, without row values, as errors end up in logs and manifests.

    The server quotes values in errors of class 22, which are about data, and functions may put any into the errors that they
    raise: of these only the name and the function are given.
    """
    state = str(getattr(error, "sqlstate", None) or "")
    context = getattr(getattr(error, "diag", None), "context", None) or ""
    raised = context.partition("\n")[0]
    if state[:2] not in ("22", *OF_FUNCTIONS) and not raised.endswith(" at RAISE"):
        return str(error).strip().partition("\n")[0]
    name = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    return f"{name} ({state})" + (f" in {raised}" if raised.endswith(" at RAISE") else "")
