"""What the server's and the drivers' errors mean for a pipeline."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import psycopg
from adbc_driver_manager import dbapi as adbc_dbapi

from penstock.errors import ConfigError, FatalError, RetryableError

NO_ANSWER = "PostgreSQL does not answer"

LOST = (
    "start over with `penstock offsets reset FILE` (empty the targets first), "
    'or set snapshot = "when_needed" to have everything copied again'
)

_TOO_LARGE = (
    "the server prints no value of 1 GB, which a bytea of 512 MB comes to. Put its column into `exclude_columns`, and take it "
    "out of the publication: ALTER PUBLICATION … DROP TABLE t; ALTER PUBLICATION … ADD TABLE t (the other columns). The log "
    'cannot be read behind it: drop the slot, and run with snapshot = "when_needed" to have everything copied again'
)


class SlotLost(FatalError):
    """The slot does not hold what comes next; nothing but a new copy brings it back."""

    default_code = "PEN-5011"


class PublicationLost(FatalError):
    """The log holds changes from while a publication was not there; servers before 18 do not decode them."""

    default_code = "PEN-5011"


_NO_ANSWERS = ("08", "53", "57", "58")
"""Classes of errors that say that the server cannot answer now."""


def said(error: BaseException) -> str:
    """What the server said, without row values: it quotes them in errors about data, which are named only."""
    state = str(getattr(error, "sqlstate", None) or "")
    if state.startswith("22"):
        return f"{re.sub('(?<=[a-z])(?=[A-Z])', ' ', type(error).__name__).lower()} ({state})"
    return str(error).strip().partition("\n")[0]


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """Turn a driver's errors into ours, by what should happen next."""
    try:
        yield
    except (psycopg.Error, adbc_dbapi.Error) as error:
        state = str(getattr(error, "sqlstate", None) or "")
        text = said(error)
        answered = state and state[:2] not in _NO_ANSWERS
        message = f"{'PostgreSQL refuses' if answered and what == NO_ANSWER else what}: {text}"
        if state == "55006":  # object in use
            raise RetryableError(message, hint="another session reads the slot; it is tried again") from error
        if state == "55000" and "can no longer" in text:
            raise SlotLost(message, hint=LOST) from error
        if state == "42704" and 'publication "' in text:
            raise PublicationLost(message, hint=LOST) from error
        if state == "57014":
            raise RetryableError(message, code="PEN-2003", hint="raise `statement_timeout_secs`") from error
        if state[:2] in ("28", "3D") or state in ("42501", "42704") or _is_refusal(text):
            hint = "see `penstock check` for the grants and settings that are needed"
            raise ConfigError(message, code="PEN-1016", hint=hint) from error
        if not state or state in ("42P01", "25P03") or state[:2] in ("08", "40", "53", "55", "57", "58"):
            raise RetryableError(message, code="PEN-2001") from error
        if "invalid memory alloc request size" in text:
            raise FatalError(f"{message} (a value is too large for the server to print)", hint=_TOO_LARGE) from error
        raise FatalError(message) from error


def _is_refusal(text: str) -> bool:
    """True for what libpq says, without a state, about settings that will not mend by themselves."""
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
