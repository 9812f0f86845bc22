"""What leaves the process by itself: OpenTelemetry and OpenLineage, each if the pipeline file asks for it."""

from __future__ import annotations

import logging
import time

from penstock.durable import Json
from penstock.pipeline import Pipeline
from penstock.runtime.telemetry.export.openlineage import OpenLineage
from penstock.runtime.telemetry.export.otlp import Otlp, require_package
from penstock.runtime.telemetry.export.outbox import CLOSE_SECS
from penstock.runtime.telemetry.telemetry import Telemetry

log = logging.getLogger("penstock")


def refuse(pipeline: Pipeline) -> str:
    """Raise what `Exporters` would raise; connects to nothing. Says nothing if all is well."""
    options = pipeline.telemetry
    if options.otlp_endpoint is not None:
        require_package()
        for value in options.otlp_headers.values():
            value.reveal()
    if options.openlineage_url is not None and options.openlineage_token is not None:
        options.openlineage_token.reveal()
    return ""


class Exporters:
    """Those of one run."""

    def __init__(self, telemetry: Telemetry, pipeline: Pipeline) -> None:
        options = pipeline.telemetry
        self._all: list[Otlp | OpenLineage] = []
        if options.otlp_endpoint is not None:
            self._all.append(Otlp(telemetry, options))
        if options.openlineage_url is not None:
            self._all.append(OpenLineage(telemetry, pipeline))
        self._outboxes = [outbox for each in self._all for outbox in each.outboxes]
        telemetry.exports = self.status

    def status(self) -> dict[str, Json]:
        """What each collector got."""
        return {outbox.name: outbox.status() for outbox in self._outboxes}

    def close(self, error: BaseException | None = None) -> None:
        """Send the last word; collectors that do not take it within a moment go without."""
        for each in self._all:
            try:
                each.end(error)
            except Exception:  # exports steer nothing, and must not hide how the run ended
                log.exception("the end of the run could not be exported")
        for outbox in self._outboxes:
            outbox.end()
        give_up = time.monotonic() + CLOSE_SECS
        for outbox in self._outboxes:
            outbox.join(give_up - time.monotonic())
