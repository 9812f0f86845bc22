"""Watch topics between epochs: say at once when there is something to read, or when the topics themselves have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from penstock.connectors.kafka.client import Place, consumer
from penstock.errors import ConnectorError

TICK_SECS = 1.0
"""Somebody may have missed something: so often the source is asked in any case."""

LOOK_SECS = 2.0
"""How often the topics are looked at."""


class Watch:
    """
    A reader in a thread of its own that waits after the last planned records. What it reads is only a sign.

    `has_changed` says whether topics or partitions have come or gone since the last plan.
    """

    def __init__(self, config: Any, has_changed: Callable[[], bool]) -> None:
        self.ready = threading.Event()
        self.requested = threading.Event()
        self._config = config
        self._has_changed = has_changed
        self._planned: Mapping[Place, int] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-kafka-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def planned(self, ends: Mapping[Place, int], is_more: bool) -> None:
        """An epoch was planned up to here; `is_more`: there are records after it already."""
        self._planned = ends
        if is_more:
            self.ready.set()

    def _run(self) -> None:
        # Little is fetched: one record is enough, and the tasks fetch it again.
        small = {"queued_min_messages": 1, "fetch_message_max_bytes": 1024, "fetch_wait_max_ms": 500}
        reader = consumer(self._config, self._config.isolation_level == "read_committed", **small)
        assigned: Mapping[Place, int] | None = None
        ticked = looked = time.monotonic()
        try:
            while not self._stopped.is_set():
                if (planned := self._planned) is not assigned:
                    assigned = planned
                    reader.assign([TopicPartition(*place, offset) for place, offset in (planned or {}).items()])
                if assigned:
                    self._poll(reader)
                else:
                    self._stopped.wait(0.1)
                now = time.monotonic()
                if now - ticked > TICK_SECS:
                    ticked = now
                    self.ready.set()
                if now - looked > LOOK_SECS:
                    looked = now
                    self._look()
        finally:
            reader.close()

    def _poll(self, reader: Any) -> None:
        try:
            message = reader.poll(0.1)
        except KafkaException:
            self._stopped.wait(0.1)
            return
        if message is not None and message.error() is None:
            self.ready.set()
            reader.unassign()  # until the next plan

    def _look(self) -> None:
        try:
            if self._has_changed():
                self.requested.set()
        except ConnectorError:
            return  # the next plan says so
