"""Wrappers that make a connector fail on purpose: refuse a call, lose its answer, or never come back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConnectorError, RetryableError
from penstock.sink import SinkConnector
from penstock.source import RangeSource


@dataclass(frozen=True)
class Fault:
    """
    What goes wrong in `method`, and how often; counted in files, since the processes that it hits may die.

    `reject` raises instead of the call, `lose_answer` raises after it, `hang` never calls and never returns.
    """

    method: str
    kind: Literal["reject", "lose_answer", "hang"]
    path: Path
    """Directory for the count."""
    times: int = 1
    error: ConnectorError = field(default_factory=lambda: RetryableError("a fault that a test asked for"))

    def around(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not self._strikes():
            return call(*args)
        if self.kind == "hang":
            threading.Event().wait()
        if self.kind == "lose_answer":
            call(*args)
        raise self.error

    @property
    def struck(self) -> int:
        """How often it went wrong so far, in all processes."""
        return sum(self._claim(number).exists() for number in range(self.times))

    def _strikes(self) -> bool:
        for number in range(self.times):
            try:
                os.close(os.open(self._claim(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False

    def _claim(self, number: int) -> Path:
        return self.path / f"{self.method}-{self.kind}-{number}"


class Faulty:
    """
    A connector with one fault. Everything else is the connector's own, also what it is: `isinstance` sees no wrapper.
    """

    def __init__(self, inner: Any, fault: Fault) -> None:
        self.inner = inner
        self.fault = fault

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "fault"):  # not set yet: a copy is being made
            raise AttributeError(name)
        own = getattr(self.inner, name)
        return (lambda *args: self.fault.around(own, args)) if name == self.fault.method else own

    def __reduce__(self) -> tuple[Any, ...]:
        return Faulty, (self.inner, self.fault)


def FaultySink(sink: SinkConnector[Any, Any], fault: Fault) -> SinkConnector[Any, Any]:
    """A sink with one fault."""
    return Faulty(sink, fault)  # type: ignore[return-value]


def FaultySource(source: RangeSource[Any, Any], fault: Fault) -> RangeSource[Any, Any]:
    """A source with one fault."""
    return Faulty(source, fault)  # type: ignore[return-value]
