"""The schemas that messages name by id: is it the subject that is expected, and how does it go in front of a payload."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from penstock.errors import DataError
from penstock.formats.framing import index_bytes
from penstock.schema.registry.danube import DanubeRegistry, packed
from penstock.schema.registry.danube_client import DanubeConfig


class Refused(Exception):
    """A message that is not taken, and why."""


FORGOTTEN_SECS = 180.0
"""A broker tries a message again within a minute, and hands out nothing new beside one that blocks its partition."""


class Refusals:
    """What was handed back, for health: until it is taken after all, or its partition is seen to go on."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float, str]] = {}

    def add(self, place: Any, reason: str) -> str:
        """A message that is handed back, in words."""
        said = f"{place.topic_name}@{place.topic_offset}: {reason}"
        self._last[place.topic_name] = place.topic_offset, time.monotonic(), said
        return said

    def taken(self, place: Any) -> None:
        """A message that is not."""
        if known := self._last.get(place.topic_name):
            offset, at, _ = known
            if place.topic_offset == offset or time.monotonic() - at > FORGOTTEN_SECS:
                del self._last[place.topic_name]

    @property
    def last(self) -> str:
        """The one that health tells of; empty: there is none."""
        newest = max([*self._last.values()], key=lambda each: each[1], default=None)
        return newest[2] if newest else ""


class Schemas:
    """What the registry says about ids, each asked for once; ids never change their meaning."""

    def __init__(self, config: DanubeConfig, subject: str | None, frames: bool) -> None:
        self._registry = DanubeRegistry(config)
        self._subject = subject
        self._frames = frames
        self._known: dict[tuple[int, int], tuple[str, bytes]] = {}

    @property
    def needed(self) -> bool:
        """False where no message's schema matters."""
        return self._subject is not None or self._frames

    def close(self) -> None:
        self._registry.close()

    async def frame(self, message: Any) -> bytes:
        """What goes in front of the payload; `Refused` if the schema is of another subject than the one expected."""
        if not message.HasField("schema_id"):
            if self._subject is None:
                return b""  # the format finds that there is no frame
            raise Refused(f"it names no schema, and {self._subject!r} is expected")
        key = (int(message.schema_id), int(message.schema_version))
        if key not in self._known:
            found = await asyncio.to_thread(self._look_up, *key)
            if found is None:  # asked for again with the next one: it may be registered by then
                if self._subject is None:
                    return b""
                raise Refused(f"the registry does not know its schema {key[0]}, and {self._subject!r} is expected")
            self._known[key] = found
        subject, frame = self._known[key]
        if self._subject is not None and subject != self._subject:
            raise Refused(f"its schema is of the subject {subject!r}, and {self._subject!r} is expected")
        return frame if self._frames else b""

    def _look_up(self, id: int, version: int) -> tuple[str, bytes] | None:
        try:
            found = self._registry.by_version(id, version or None)
        except DataError:
            return None
        prefix = b"\0" + packed(id, found.version).to_bytes(4, "big")
        return found.subject, prefix + index_bytes((0,)) if found.type == "protobuf" else prefix
