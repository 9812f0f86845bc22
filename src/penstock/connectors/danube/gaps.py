"""What a broker left out: the offsets of a partition follow each other, as long as nobody else reads the subscription."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

SHOWN_SECS = 600.0
"""For this long health tells of messages that never came; the count stays."""


class Gaps:
    """
    The last offset that each partition delivered, and how many were passed over before the next one.

    A broker (0.15.1) drops what a new subscription did not read soon, and tells nobody. After a restart that lost its log it
    counts from 0 again: until it has passed the last offset, nothing is known. An orderly end writes the last offsets down for
    the next start; after a kill they would be older than what was read, so that file is taken away first.
    """

    def __init__(self, notes: Path | None, of: str) -> None:
        self.skipped = 0
        self._of = of  # the broker and the subscription: another one's offsets mean nothing here
        self._last: dict[str, int] = {}
        self._file = notes / "offsets.json" if notes is not None else None
        self._said: tuple[float, str] | None = None

    def begin(self) -> None:
        """Before anything is received."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it only helps
            if self._file is not None:
                known = json.loads(self._file.read_bytes())
                self._file.unlink()
                self._last = {**(known["offsets"] if known["of"] == self._of else {}), **self._last}

    def end(self) -> None:
        """When nothing is received any more."""
        with contextlib.suppress(OSError):
            if self._file is not None and self._last:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                fresh = self._file.with_suffix(".new")
                fresh.write_text(json.dumps({"of": self._of, "offsets": self._last}))
                fresh.replace(self._file)

    def look(self, place: Any) -> str | None:
        """A message that was delivered; what to say if some before it were not."""
        partition, offset = str(place.topic_name), int(place.topic_offset)
        last = self._last.get(partition, offset)
        self._last[partition] = max(last, offset)
        if offset <= last + 1:
            return None
        self.skipped += offset - last - 1
        said = f"{offset - last - 1:,} messages of {partition} never came: after {last} the broker sent {offset}"
        self._said = time.monotonic(), said
        return said

    @property
    def last(self) -> str:
        """What health tells of; empty: nothing."""
        return self._said[1] if self._said is not None and time.monotonic() - self._said[0] < SHOWN_SECS else ""
