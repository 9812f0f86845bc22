"""What sources that listen share."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

BEGUN_BYTES = 256 << 20
"""What all connections together may have sent of lines or messages that are not whole yet."""
OTHER_FILES = 1024
"""What a process has open beside its connections."""


def allow_connections(count: int) -> None:
    """Raise this process's own limit of open files for so many connections, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class Begun(Generic[C]):
    """
    Bounds what connections have begun and not ended, in bytes over all of them.

    Who sends next is not to blame for what others hold: beyond the bound the connection that holds most has to end, and of
    equal ones the one that began first.
    """

    def __init__(self, largest: int) -> None:
        self.bytes = 0
        self._bound = max(BEGUN_BYTES, 2 * largest)
        self._held: dict[C, int] = {}  # in the order in which they began

    def count(self, connection: C, size: int) -> C | None:
        """So much of the connection's message has come, and its rest has not. Returns the connection that has to end, if any."""
        self.bytes += size - self._held.get(connection, 0)
        self._held[connection] = size
        if not size:
            del self._held[connection]
        if self.bytes <= self._bound:
            return None
        return max(self._held, key=self._held.__getitem__)
