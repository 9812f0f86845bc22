"""How often clients may send, and who the client is."""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from penstock.connectors.webhook.server import Refused

MOST_CLIENTS = 100_000
"""Clients whose rate is remembered; beyond that, those that sent longest ago are forgotten."""


class Bucket:
    """Lets `rate` requests a second through, and a second's worth at once."""

    __slots__ = ("at", "left")

    def __init__(self, most: float, now: float) -> None:
        self.left = most
        self.at = now

    def take(self, rate: float, now: float) -> float:
        """0.0 if there was a request left, else the seconds until there is one."""
        self.left = min(max(1.0, rate), self.left + (now - self.at) * rate)
        self.at = now
        if self.left < 1:
            return (1 - self.left) / rate
        self.left -= 1
        return 0.0


class Rates:
    """The rate of all clients together, and that of each: kept over connections."""

    def __init__(self, overall: float | None, each: float | None) -> None:
        self._overall = overall
        self._each = each
        self._all = Bucket(max(1.0, overall or 0), time.monotonic())
        self._clients: OrderedDict[str, Bucket] = OrderedDict()

    def take_of(self, client: str) -> None:
        """Count a request of this client, before it is known who sends; `Refused` if there are too many."""
        if self._each is None:
            return
        now, client = time.monotonic(), _counted(client)
        bucket = self._clients.pop(client, None) or Bucket(max(1.0, self._each), now)
        self._clients[client] = bucket  # at the end: it sent last
        if len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        if pause := bucket.take(self._each, now):
            raise _too_many("this client sends too many requests", pause)

    def take_of_all(self) -> None:
        """Count a request whose credentials are good: without them nobody uses up this rate."""
        if self._overall is not None and (pause := self._all.take(self._overall, time.monotonic())):
            raise _too_many("there are too many requests", pause)


@lru_cache(4096)
def _counted(client: str) -> str:
    """What counts as one client: of IPv6, whose clients have as many addresses as they like, the network (/64)."""
    if ":" not in client:
        return client
    try:
        address = ipaddress.IPv6Address(client.partition("%")[0])
    except ValueError:
        return client
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


def _too_many(reason: str, pause: float) -> Refused:
    return Refused(429, "rate_limited", reason, {"Retry-After": str(math.ceil(pause))})


class Networks:
    """A set of networks that addresses may be in."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(each) for each in networks]
        self._cached = lru_cache(4096)(self._find)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def __contains__(self, address: str) -> bool:
        return self._cached(address)

    def _find(self, address: str) -> bool:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self._networks if network.version == found.version)


_ADDRESS = re.compile(r"^(?:\[([0-9a-fA-F:.]+)\](?::\d+)?|(\d+\.\d+\.\d+\.\d+):\d+)$")
"""An address with brackets or a port, as some proxies write it."""


def client_of(peer: str, forwarded: bytes | None, trusted: Networks) -> str:
    """The address that a request comes from: the last one of `X-Forwarded-For` that no trusted proxy has."""
    if forwarded is None or not trusted or peer not in trusted:
        return peer
    client = peer
    for each in reversed(forwarded.decode("latin-1").split(",")):
        client = _ADDRESS.sub(r"\1\2", each.strip())
        if client not in trusted:
            return client
    return client
