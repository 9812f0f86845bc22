"""Serve a webhook: `webhook_server.py bare|journal DIRECTORY`; prints its port. Without a journal, all is durable at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.connectors.webhook import Webhook, WebhookConfig
from penstock.pipeline.options import Processing
from penstock.runtime.ingest import Ingest
from penstock.source import SourceEnvelope


class Instant:
    """A sender that is never full and keeps nothing."""

    stopped = full = False

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def send(self, item: object, on_durable: Callable[[], None] | None = None) -> None:
        self.offer((), on_durable)

    def send_batch(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> None:
        self.offer(envelopes, on_durable)

    def offer(self, envelopes: Sequence[SourceEnvelope], on_durable: Callable[[], None] | None = None) -> bool:
        if on_durable is not None:
            on_durable()
        return True


def main() -> None:
    endpoints = [{"path": "/events", "stream": "events"}]
    config = {"port": 0, "auth": {"type": "none"}, "endpoints": endpoints, "max_body_bytes": 64 << 20}
    source = Webhook(WebhookConfig.model_validate(config))
    if sys.argv[1] == "bare":
        source.open()
        print(source.port, flush=True)
        source.start_streaming(Instant())
        return
    # Requests gather while the disk is busy: waiting for more would only add to that.
    processing = Processing(linger_ms=0, journal_max_bytes=8 << 30)
    ingest = Ingest("webhook", source, Path(sys.argv[2]) / "journal", processing)
    ingest.open()
    print(source.port, flush=True)
    ingest.start()
    while ingest.failure is None:
        time.sleep(0.1)
    sys.exit(str(ingest.failure))


if __name__ == "__main__":
    main()
