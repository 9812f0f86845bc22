"""Wrappers that make a connector fail on purpose: refuse a call, lose its answer, or never come back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConnectorError, RetryableError
from penstock.sink import Receipt, SinkConnector, SinkConnectorCapabilities
from penstock.source import Position, RangeSource


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


class FaultySink(SinkConnector[Any, Any]):
    """A sink with one fault; everything else is the sink's own."""

    def __init__(self, sink: SinkConnector[Any, Any], fault: Fault) -> None:
        super().__init__(sink.config)
        self.sink = sink
        self.fault = fault

    @property
    def capabilities(self) -> SinkConnectorCapabilities:  # type: ignore[override]
        return self.sink.capabilities

    @property
    def receipt_type(self) -> type[Receipt]:  # type: ignore[override]
        return self.sink.receipt_type


class FaultySource(RangeSource[Any, Any]):
    """A source with one fault; everything else is the source's own."""

    def __init__(self, source: RangeSource[Any, Any], fault: Fault) -> None:
        super().__init__(source.config)
        self.source = source
        self.fault = fault

    @property
    def position_type(self) -> type[Position]:  # type: ignore[override]
        return self.source.position_type


def _passed_on(inner: str, method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        own = getattr(getattr(self, inner), method)
        return self.fault.around(own, args) if method == self.fault.method else own(*args)

    return call


_BOTH = ("open", "close", "check", "health_check", "metrics", "schema")
_SINK = ("begin_epoch", "write_batch", "flush", "pre_commit", "commit_epoch", "committed_epoch", "rollback_epoch")
_SOURCE = ("initial", "latest", "split", "read", "advance", "earlier", "ack", "lag", "data_ready_notify")

for _method in (*_BOTH, *_SINK, "sweep", "is_seeded", "mark_seeded"):
    setattr(FaultySink, _method, _passed_on("sink", _method))
for _method in (*_BOTH, *_SOURCE, "checkpoint_requested", "producer_configs"):
    setattr(FaultySource, _method, _passed_on("source", _method))
