"""Posts to a collector from a thread of its own: one that is slow, full or down never holds up the pipeline."""

from __future__ import annotations

import http.client
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from penstock.durable import Json
from penstock.errors import ConnectorError, without_secrets

log = logging.getLogger("penstock")

T = TypeVar("T")

MOST = 1000
"""Items that wait for a collector; the oldest give way to newer ones."""

AT_ONCE = 100
"""Items of one request."""

LONGEST_PAUSE_SECS = 30.0
CLOSE_SECS = 3.0
"""How long the end of a run waits for a collector that answers."""

_LATER = (408, 425, 429, 500, 502, 503, 504)
"""Answers after which the same request may be taken."""


class Outbox(Generic[T]):
    """
    Takes items, and posts what `encode` makes of them.

    What a collector refuses is dropped. What it cannot take now is tried again with growing pauses, and dropped from the old
    end once too much waits. Each outage is one line of the log.
    """

    def __init__(
        self,
        name: str,
        url: str,
        encode: Callable[[Sequence[T]], bytes],
        *,
        content_type: str,
        headers: Callable[[], Mapping[str, str]] = dict,
        timeout_secs: float = 5.0,
        at_once: int = AT_ONCE,
    ) -> None:
        """`headers` are asked for with each request, since they may hold a secret; `encode` runs in the outbox's thread."""
        self.name = name
        self._url = urlsplit(url)
        self._encode = encode
        self._content_type = content_type
        self._headers = headers
        self._timeout = timeout_secs
        self._at_once = at_once
        self._waiting: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._sent = self._dropped = 0
        self._error = ""
        headers()  # a secret that is not there is a wrong setting, and is refused before anything starts
        self._thread = threading.Thread(target=self._run, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Take an item; never waits."""
        with self._changed:
            if len(self._waiting) >= MOST:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(item)
            self._changed.notify()

    def end(self) -> None:
        """Take nothing more, and post what waits, once."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self, secs: float) -> None:
        """Wait for that."""
        self._thread.join(max(0.0, secs))

    def status(self) -> dict[str, Json]:
        """For people: how much was sent and dropped, and why it is stuck, if it is."""
        with self._changed:
            about = {"sent": self._sent, "dropped": self._dropped, "waiting": len(self._waiting)}
            return {**about, "error": self._error}

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if pause and not self._closed:
                    self._changed.wait_for(lambda: self._closed, pause)
                some = [self._waiting[at] for at in range(min(self._at_once, len(self._waiting)))]
                last_try = self._closed
            if not some:
                return
            later = self._post(some)
            with self._changed:
                for item in some if not later else ():
                    if self._waiting and self._waiting[0] is item:  # else it gave way meanwhile, and is counted there
                        self._waiting.popleft()
            if later and last_try:
                return
            pause = min(max(0.5, pause * 2), LONGEST_PAUSE_SECS) if later else 0.0

    def _post(self, items: Sequence[T]) -> bool:
        """True if the same items are worth another try."""
        try:
            code = self._answer(self._encode(items))
        except (OSError, http.client.HTTPException) as error:
            self._failed(f"{type(error).__name__}: {error}")
            return True
        except ConnectorError as error:
            self._failed(error.message)  # a secret that cannot be read may be there later
            return True
        if code in _LATER:
            self._failed(f"it answers {code}")
            return True
        if code >= 300:
            with self._changed:
                self._dropped += len(items)
            self._failed(f"it refuses what it is sent: {code}")
            return False
        with self._changed:
            back, self._error = bool(self._error), ""
            self._sent += len(items)
        if back:
            log.info("%s: the collector takes what it is sent again", self.name)
        return False

    def _answer(self, body: bytes) -> int:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=self._timeout)
        try:
            path = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
            headers = {"Content-Type": self._content_type, "User-Agent": "penstock", **self._headers()}
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer.read(65536)
            return answer.status
        finally:
            connection.close()

    def _failed(self, why: str) -> None:
        with self._changed:
            first, self._error = not self._error, without_secrets(why)
        if first:
            log.warning(
                "%s: the collector at %s is not reached, and the pipeline goes on: %s",
                *(self.name, self._url.netloc.rpartition("@")[2], without_secrets(why)),
            )


class Every:
    """Calls something at intervals from a thread of its own, and once more at the end."""

    def __init__(self, name: str, secs: float, call: Callable[[], None]) -> None:
        self._secs = secs
        self._call = call
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closed.wait(self._secs):
            self._call()
        self._call()
