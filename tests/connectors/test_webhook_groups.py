"""Which requests to a webhook share an fsync, and how long one waits for others: with a clock and a disk that are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.webhooks import config
from penstock.connectors.webhook.auth import Open
from penstock.connectors.webhook.events import Route
from penstock.connectors.webhook.limits import Rates
from penstock.connectors.webhook.source import MOST_PATIENCE_SECS, PATIENCE, Serving


class Loop:
    """Runs nothing until it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._soon: list[Callable[[], None]] = []
        self.timers: list[SimpleNamespace] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self._soon.append(lambda: call(*args))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, call: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(delay=delay, call=call)
        timer.cancel = lambda: self.timers.remove(timer) if timer in self.timers else None
        self.timers.append(timer)
        return timer

    def turn(self) -> None:
        calls, self._soon = self._soon, []
        for call in calls:
            call()

    def ring(self) -> float:
        """Let the one timer go off; returns how long it was set for."""
        (timer,) = self.timers
        self.timers.clear()
        self.now += timer.delay
        timer.call()
        return float(timer.delay)


class Disk:
    """A sender whose fsync ends when it is told to."""

    stopped = full = False

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.groups: list[int] = []
        self._durable: Callable[[], None] = lambda: None

    def offer(self, items: Any, on_durable: Callable[[], None]) -> bool:
        self.groups.append(items.num_rows if hasattr(items, "num_rows") else len(items))
        self._durable = on_durable
        return True

    def sync(self, seconds: float) -> None:
        self._loop.now += seconds
        self._durable()
        self._loop.turn()


class Hook:
    def __init__(self) -> None:
        self.loop = Loop()
        self.disk = Disk(self.loop)
        self.answered = 0
        self._route = Route(config().endpoints[0], Open())
        loop: asyncio.AbstractEventLoop = self.loop  # type: ignore[assignment]
        sender: Any = self.disk
        self._serving = Serving(config(), {}, Rates(None, None), sender, loop, lambda stream, payloads: None)

    def _accept(self, reply: bytes) -> None:
        self.answered += 1

    def requests(self, count: int) -> None:
        """So many come in one turn of the loop."""
        for _ in range(count):
            exchange: Any = SimpleNamespace(
                endpoint=(self._route, "json"), body=b"{}", headers={}, chunks=[], accept=self._accept
            )
            self._serving.complete(exchange)
        self.loop.turn()


@pytest.fixture
def hook() -> Hook:
    return Hook()


def test_senders_that_were_answered_together_share_the_next_fsync(hook: Hook) -> None:
    hook.requests(3)
    hook.disk.sync(0.004)
    for _ in range(3):  # they come one by one
        assert hook.disk.groups == [3]
        hook.requests(1)
    assert hook.disk.groups == [3, 3]
    assert hook.answered == 3, "the second group is not on disk yet"
    assert not hook.loop.timers


@pytest.mark.parametrize("fsync_secs", [0.004, 5.0])
def test_a_request_waits_a_little_for_others_and_no_longer(hook: Hook, fsync_secs: float) -> None:
    hook.requests(3)
    hook.disk.sync(fsync_secs)
    hook.requests(1)
    assert hook.loop.ring() == pytest.approx(min(fsync_secs * PATIENCE, MOST_PATIENCE_SECS))
    assert hook.disk.groups == [3, 1]
    hook.disk.sync(fsync_secs)
    hook.requests(1)
    assert hook.disk.groups == [3, 1, 1], "one that was alone before does not wait"


def test_requests_that_came_while_the_disk_was_busy_count_as_the_usual(hook: Hook) -> None:
    hook.requests(2)
    hook.requests(2)
    assert hook.disk.groups == [2], "these gather while it writes"
    hook.disk.sync(0.004)
    assert hook.disk.groups == [2], "the first two will soon send again"
    hook.requests(2)
    assert hook.disk.groups == [2, 4]
