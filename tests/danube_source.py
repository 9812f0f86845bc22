"""A Danube source that runs in a test, and a broker as fast as tests want it."""

from __future__ import annotations

from typing import Any

from penstock.connectors.danube import Danube
from penstock.connectors.danube.source import DanubeSourceConfig
from penstock.source import SourceContext
from penstock.testing import RecordingSender
from penstock.testing.danube import DanubeBroker
from penstock.testing.processes import wait_until

FAST = {"heartbeat_ms": 20, "base_redelivery_delay_ms": 20, "max_redelivery_delay_ms": 200, "cursor_flush_ms": 50}
TOPIC = "/default/events"


def source(broker: DanubeBroker, topic: str = TOPIC, **options: Any) -> Danube:
    return Danube(DanubeSourceConfig(url=broker.url, topics=[topic], subscription="penstock", **options))


def subscribed(broker: DanubeBroker, topic: str, name: str = "penstock") -> None:
    """Wait until the source listens: what is sent before its subscription exists, it never sees."""
    wait_until(lambda: broker.subscription(topic, name).get("consumers"), "the subscription")


class Streaming:
    """A source that runs, and what it sent."""

    def __init__(
        self, broker: DanubeBroker, source: Danube, *topics: str, context: SourceContext = SourceContext()
    ) -> None:
        self.sender = RecordingSender()
        self.source = source
        self._broker = broker
        self._topics = topics
        self._opened_with = context

    def __enter__(self) -> Streaming:
        self.source.open(self._opened_with)
        self._context = self.sender.streaming(self.source)
        self._context.__enter__()
        for topic in self._topics:
            subscribed(self._broker, topic)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*(exception or (None, None, None)))
        self.source.close()

    def wait(self, count: int, durable: bool = False) -> list[bytes]:
        """The payloads once there are so many; with `durable` each is safe as it comes, so that the broker goes on."""

        def arrived() -> Any:
            if durable:
                self.sender.make_durable()
            return self.sender.count >= count or self.sender.failed

        wait_until(arrived, f"{count} messages")
        return [payload for rows in self.sender.rows.values() for payload in rows]


def acked(broker: DanubeBroker, topic: str) -> int:
    return int(broker.subscription(topic, "penstock").get("acknowledged", 0))
