"""Gives a worker's exception, which reaches the driver as text, its class back."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from penstock.errors import (
    ENGINE_GONE,
    ConnectorError,
    FatalError,
    RetryableError,
    from_text,
    without_secrets,
)

T = TypeVar("T")


def discreet(task: Callable[..., Iterator[T]]) -> Callable[..., Iterator[T]]:
    """
    The task, of whose failure no secret becomes known: Spark writes the whole trace of a worker into its log, its event log
    and its page, with the messages of every cause, and a client's own message may hold the password that it was given.
    """

    @functools.wraps(task)
    def guarded(*arguments: Any) -> Iterator[T]:
        try:
            yield from task(*arguments)
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            if without_secrets(trace) == trace:
                raise
            raise _without_secrets(error) from None

    return guarded


def _without_secrets(error: Exception) -> ConnectorError:
    if isinstance(error, ConnectorError):
        return type(error)(error.message, code=error.code, hint=error.hint)
    text = without_secrets(f"{type(error).__name__}: {error}")
    return FatalError(text, code="PEN-5012", hint="its cause is left out, since a secret is in it")


@contextlib.contextmanager
def driver_errors() -> Iterator[None]:
    """Give a worker's exception, which reaches the driver as text, its class back."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException, ConnectionError) as error:
        if _is_gone(error):
            raise FatalError(
                "the JVM that runs Spark is gone",
                code=ENGINE_GONE,
                hint="start again, nothing is lost; if it happens again: did memory run out, and what does Spark's log say?",
            ) from error
        text = str(error)
        known = from_text(text)
        if known is not None:
            if known.code == "PEN-1005" and "environment variable" in known.message:  # it was found here, at the start
                hint = "on a cluster the executors need it: set spark.executorEnv.NAME, or use { file = … }"
                known = type(known)(known.message, code=known.code, hint=hint)
            raise known from error
        if any(sign in text for sign in ("exited unexpectedly", "ExecutorLostFailure", "Connection reset", "crashed")):
            raise RetryableError(f"Spark lost a task: {last_line(text)}", code="PEN-2006") from error
        raise FatalError(last_line(text), code="PEN-5012", hint="the whole trace is in Spark's log") from error


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


_ENDING = ("SparkContext was shut down", "SparkContext has been shutdown", "on a stopped SparkContext")
"""What a JVM says that was asked to end, of a job that runs, that is handed in, and of what comes later."""


def _is_gone(error: Exception) -> bool:
    """Whether the JVM did not answer, which tells of other errors with a trace, or is about to end."""
    from py4j.protocol import Py4JError, Py4JNetworkError

    if isinstance(error, Py4JNetworkError | ConnectionError) or any(sign in str(error) for sign in _ENDING):
        return True
    return type(error) is Py4JError and "Trace:" not in str(error)


def last_line(text: str) -> str:
    """The line of a trace that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or [text])[-1][:500]
