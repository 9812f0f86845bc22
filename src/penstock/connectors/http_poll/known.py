"""What the target of a full refresh knows: the content of each record that was sent, in a log beside the journal."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.durable import canonical, disk_errors, make_directory, write_atomic
from penstock.errors import NOT_READY, FatalError, RetryableError

MOST_LINES = 1000
"""A log of more batches than this is written together."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Known:
    """
    The records that were sent, by key.

    A batch is written here, and synced, before it goes to the journal. After a restart the journal says which batches it has:
    those count, and what comes after them was never sent.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` of None: nothing is kept over a restart."""
        self.records: dict[str, str] = {}
        self._path = path
        self._lines = 0

    def load(self, batch: int) -> None:
        """Read what was sent up to a batch."""
        self.records = {}
        lines = self._path.read_bytes().split(b"\n") if self._path is not None and self._path.exists() else [b""]
        for line in lines[:-1]:  # after the last line break is what a crash has cut short
            try:
                entry = json.loads(line)
                if entry["batch"] <= batch:
                    self._apply(entry["set"], entry["gone"])
            except (ValueError, KeyError, TypeError) as error:
                raise FatalError(
                    f"{self._path} is damaged: {error}",
                    code="PEN-5011",
                    hint="restore it from a copy; without it all records are sent again",
                ) from error
        self._rewrite(batch)

    def clear(self) -> None:
        """Forget everything: nothing was sent yet."""
        self.records = {}
        self._rewrite(0)

    def add(self, batch: int, changed: Mapping[str, str], gone: Iterable[str]) -> None:
        """A batch is about to be sent. If the disk is full, nothing has happened, and it may be tried again."""
        left = sorted(gone)
        if self._path is not None:
            self._append(canonical({"batch": batch, "set": dict(changed), "gone": left}).encode() + b"\n")
            self._lines += 1
        self._apply(changed, left)

    def settle(self, batch: int) -> None:
        """All batches up to this one, the last, are in the journal: write the log together if it is long."""
        if self._lines > MOST_LINES:
            try:
                self._rewrite(batch)
            except FatalError as error:
                if not _is_full(error.__cause__):
                    raise
                # The log is as it was, and stays long until there is room.

    def _append(self, line: bytes) -> None:
        assert self._path is not None
        with disk_errors(self._path), open(self._path, "ab", buffering=0) as file:
            size, rest = file.seek(0, os.SEEK_END), line
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as error:
                file.truncate(size)  # half a line would spoil the next one
                if not _is_full(error):
                    raise
                raise RetryableError(
                    f"the source waits for room on the disk: {error.strerror}, {self._path}",
                    code=NOT_READY,
                    hint="free some space; it goes on by itself",
                ) from error
            os.fsync(file.fileno())

    def _apply(self, changed: Mapping[str, str], gone: Iterable[str]) -> None:
        self.records.update(changed)
        for key in gone:
            self.records.pop(key, None)

    def _rewrite(self, batch: int) -> None:
        if self._path is not None:
            make_directory(self._path.parent, private=True)
            whole = canonical({"batch": batch, "set": self.records, "gone": []}).encode() + b"\n"
            write_atomic(self._path, whole, private=True)
        self._lines = 0


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _FULL
