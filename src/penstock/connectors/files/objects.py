"""Look for objects under an address: a prefix, a glob or one object. They appear whole, so that none has to settle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from penstock import store
from penstock.connectors.files.directory import Directory
from penstock.connectors.files.inventory import Found
from penstock.store import Entry, ObjectPath, Options, Place

PAUSE_MS = 10_000
"""Least time between two listings, if `scan_interval_ms` says nothing: each costs a request per thousand objects."""


@dataclass
class Objects(Directory):
    """As `Directory`, with `below` in place of its `base`."""

    below: ObjectPath | None = None

    @classmethod
    def under(
        cls, path: str, options: Options, recursive: bool, format: str | None, ignore: tuple[str, ...], pause_ms: int
    ) -> Objects:
        scheme, _, rest = path.partition("://")
        parts = rest.strip("/").split("/")
        plain = next((at for at, part in enumerate(parts) if re.search(r"[*?[]", part)), len(parts))
        below, pattern, by_ending = (
            store.at(f"{scheme}://{'/'.join(parts[:plain])}", options),
            tuple(parts[plain:]),
            False,
        )
        assert isinstance(below, ObjectPath)
        if not pattern and below.key and store.head(below) is not None:
            below, pattern = below.parent, (re.sub(r"([*?[])", r"[\1]", below.name),)
        elif not pattern:
            pattern, by_ending = ("**", "*") if recursive else ("*",), format is None
        return cls(Path("/"), pattern, by_ending, ignore, 0, pause_ms, below=below)

    @property
    def place(self) -> Place:
        assert self.below is not None
        return self.below

    def exists(self) -> bool:
        """A prefix needs no making; a bucket that cannot be listed raises."""
        next(iter(store.listed(self.place)), None)
        return True

    def walk(self) -> Iterator[Found]:
        above = len(str(self.place).rstrip("/")) + 1
        for entry in store.listed(self.place):
            name = str(entry.place)[above:]
            names = name.split("/")
            ignored = any(fnmatchcase(each, pattern) for each in names for pattern in self.ignore)
            if names[-1] and not ignored and self._is_wanted(names):
                yield found(name, entry)

    def is_still(self, file: Found) -> bool:
        entry = store.head(self.place / file.file)
        return entry is not None and (entry.size, entry.etag) == (file.size, file.etag)


def found(name: str, entry: Entry) -> Found:
    return Found(entry.modified_ns, name, entry.size, entry.etag)
