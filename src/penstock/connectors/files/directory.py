"""Look for complete files under a path: a directory, a glob or one file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.connectors.files.inventory import Found
from penstock.connectors.files.splits import format_of
from penstock.errors import FatalError, RetryableError

_LONGEST_WAIT_SECS = 2.0
_SCAN_SHARE = 0.04
"""Part of the time that an idle source may spend looking."""


@dataclass
class Directory:
    """What a path means, found out once, and what the last look at it has shown."""

    base: Path
    pattern: tuple[str, ...]
    """What the names of a file below `base` must match, one by one; `**` is any number of them."""
    by_ending: bool
    """Take only files whose ending tells their format."""
    ignore: tuple[str, ...]
    settle_ms: int
    pause_ms: int
    unsettled: dict[str, tuple[Found, float]] = field(default_factory=dict)
    """Files that may still be written, and since when they have looked like this."""
    _waited: bool = False
    _idle: tuple[int, float] = (-1, 0.0)

    @classmethod
    def at(
        cls, path: Path, recursive: bool, format: str | None, ignore: tuple[str, ...], settle_ms: int, pause_ms: int
    ) -> Directory:
        path = Path(os.path.abspath(path))
        by_ending, pattern = False, tuple[str, ...]()
        if path.is_dir():
            base, pattern, by_ending = path, ("**", "*") if recursive else ("*",), format is None
        elif path.exists():
            base, pattern = path.parent, (re.sub(r"([*?[])", r"[\1]", path.name),)
        else:
            plain = next((at for at, part in enumerate(path.parts) if re.search(r"[*?[]", part)), len(path.parts))
            base, pattern = Path(*path.parts[:plain]), path.parts[plain:]
        return cls(base, pattern, by_ending, ignore, settle_ms, pause_ms)

    def exists(self) -> bool:
        return self.base.is_dir()

    def walk(self) -> Iterator[Found]:
        """Every file that matches, complete or not, in no order."""
        deep = "**" in self.pattern
        directories: list[tuple[str, ...]] = [()]
        while directories:
            above = directories.pop()
            for entry in self._entries(above):
                names = (*above, entry.name)
                if any(fnmatchcase(entry.name, ignored) for ignored in self.ignore):
                    continue
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if deep or len(names) < len(self.pattern):
                            directories.append(names)
                    elif self._is_wanted(names) and entry.is_file():
                        about = entry.stat()
                        yield Found(about.st_mtime_ns, "/".join(names), about.st_size)
                except FileNotFoundError:
                    continue  # it left while we looked

    def scan(self, known: Mapping[str, Found], now: bool) -> tuple[list[Found], list[Found]]:
        """Complete files that are not known, oldest first, and known ones that changed; `now` does not mind `pause_ms`."""
        began = time.monotonic()
        if not now and self._idle[0] == len(known) and began < self._idle[1]:
            return [], []
        settled, changed = self._settled(known)
        if self.unsettled and not self._waited and self.settle_ms / 1000 <= _LONGEST_WAIT_SECS:
            # A run that drains what is there must not miss a file that was finished a moment ago.
            time.sleep(self.settle_ms / 1000)
            settled, changed = self._settled(known)
        self._waited = True
        if not settled:
            ended = time.monotonic()
            self._idle = (len(known), ended + max(self.pause_ms / 1000, (ended - began) / _SCAN_SHARE))
        return sorted(settled), changed

    def is_still(self, file: Found) -> bool:
        """False if the file is gone or changed since it was found; the next scan shows it as it is then."""
        try:
            about = os.stat(self.base / file.file)
        except FileNotFoundError:
            return False
        return (about.st_size, about.st_mtime_ns) == (file.size, file.mtime_ns)

    def _settled(self, known: Mapping[str, Found]) -> tuple[list[Found], list[Found]]:
        now = time.monotonic()
        settled, changed, unsettled = [], [], {}
        for file in self.walk():
            if file.file in known:
                changed += [file] if known[file.file] != file else []
                continue
            seen, since = self.unsettled.get(file.file, (file, now))
            since = since if seen == file else now
            # Old by its own time, or unchanged for as long as we look: the clocks of file servers differ.
            if max((time.time_ns() - file.mtime_ns) / 1e6, (now - since) * 1000) >= self.settle_ms:
                settled.append(file)
            else:
                unsettled[file.file] = (file, since)
        self.unsettled = unsettled
        return settled, changed

    def _is_wanted(self, names: Sequence[str]) -> bool:
        return _matches(self.pattern, names) and not (self.by_ending and format_of(names[-1]) is None)

    def _entries(self, above: tuple[str, ...]) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self.base, *above)) as entries:
                return list(entries)
        except FileNotFoundError as error:
            if above:
                return []
            raise RetryableError(f"the directory {self.base} is gone", hint="put it back, or mount it again") from error
        except PermissionError as error:
            raise FatalError(
                f"cannot look into {error.filename}", code="PEN-5001", hint="give this user permission to read it"
            ) from error


def _matches(pattern: Sequence[str], names: Sequence[str]) -> bool:
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(pattern[1:], names) or _matches(pattern, names[1:])
    return fnmatchcase(names[0], pattern[0]) and _matches(pattern[1:], names[1:])
