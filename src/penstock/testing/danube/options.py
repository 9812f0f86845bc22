"""What a test broker is started with; the defaults are the real broker's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Options:
    """Times are shortened by tests; nothing else should differ from the real broker."""

    max_unacked: int = 10
    """Messages of a subscription that may wait for their acknowledgement."""
    ack_timeout_ms: int = 30_000
    ack_delay_ms: int = 0
    """How long an acknowledgement waits before it is carried out."""
    base_redelivery_delay_ms: int = 1_000
    max_redelivery_delay_ms: int = 60_000
    max_redelivery_count: int = 5
    poison_policy: str = "block"
    """`block`, `drop` or `dead_letter`."""
    dead_letter_topic: str = ""
    cursor_flush_ms: int = 10_000
    """A cursor is written down at most so often: after a crash it goes back by that much."""
    heartbeat_ms: int = 500
    live_messages: int = 256
    """So many unread messages are kept for a subscription that began since the broker started; nothing tells of the others."""
    keeps_log: bool = False
    """False: a restart loses the messages and offsets begin again, as seen on a real one. True: the log comes back."""
    stalls_by_key: bool = False
    """
    A subscription of KEY_SHARED that waits for an acknowledgement at a heartbeat does nothing until the next message is sent.

    A real one (0.15.1) does; its heartbeat comes after half a second, which tests shorten to less than an acknowledgement takes.
    """
    loose_messages: int = 8
    """Of a topic that is not reliable so many wait for a consumer; what comes then is dropped."""
    auto_create: bool = True
    namespaces: list[str] = field(default_factory=list)
    """Those in which topics can be made; none: all."""
    is_cluster: bool = False
    """A topic that is made is not served at once: the first answer asks to look it up again."""
    redirect: str = ""
    """Another broker that serves all topics: what lookups answer."""
    standalone: bool = False
    """A restart leaves topics that exist and that nobody serves, as seen on a real one in standalone mode (0.15.1)."""
    powerless: list[str] = field(default_factory=list)
    """Tokens that are known and have no rights."""
    tokens: list[str] = field(default_factory=list)
    """Tokens that are accepted; none: everybody is let in."""
    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    """Files for TLS; with `client_ca` clients must have a certificate of it."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Options:
        return cls(**json.loads(text))


class Metadata:
    """What survives a restart of the broker whatever happens to the log: topics, cursors, schemas."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.topics: dict[str, dict[str, Any]] = known.get("topics", {})
        self.cursors: dict[str, int] = known.get("cursors", {})
        self.subjects: dict[str, dict[str, Any]] = known.get("subjects", {})

    def save(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"topics": self.topics, "cursors": self.cursors, "subjects": self.subjects}))
        fresh.replace(self._path)
