"""Sources that listen make room for as many connections as their options promise."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.webhooks import config
from penstock.connectors.sockets import OTHER_FILES, allow_connections
from penstock.connectors.tcp import Tcp, TcpConfig
from penstock.connectors.webhook import Webhook
from penstock.connectors.websocket import Websocket, WebsocketConfig
from penstock.testing.processes import wait_until
from penstock.testing.sources.journaled import RecordingSender

SOFT = 500


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit of open files; the soft one is low meanwhile."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def within(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


@pytest.mark.parametrize(
    "source",
    [
        Webhook(config(max_connections=700)),
        Websocket(WebsocketConfig(url="ws://127.0.0.1:0", mode="server", max_connections=700)),
        Tcp(TcpConfig(url="tcp://127.0.0.1:0", max_connections=700)),
    ],
    ids=["webhook", "websocket", "tcp"],
)
def test_a_server_may_open_as_many_files_as_it_takes_connections(source: Any, hard: int) -> None:
    source.open()
    with RecordingSender().streaming(source):
        wait_until(lambda: soft() == within(700 + OTHER_FILES, hard), "the limit to be raised")
    source.close()


def test_a_limit_that_is_high_enough_or_cannot_be_raised_stays(hard: int) -> None:
    allow_connections(10**9)
    most = soft()
    assert most in (SOFT, within(10**9 + OTHER_FILES, hard))
    allow_connections(1)
    assert soft() == most
