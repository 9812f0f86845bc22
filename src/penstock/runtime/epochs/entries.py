"""One entry of the log that keeps a state directory in a store, and which of them nothing is left of."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.durable import canonical
from penstock.errors import FatalError

FORMAT = 1
"""Version of an entry; a newer one is refused."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a file; from its beginning, they are all that it holds."""

    path: str
    at: int
    data: bytes


@dataclass
class Entry:
    """What one object of the log says."""

    token: str
    """Of the copy that wrote it."""
    holder: str
    begins: bool = False
    """A run took the log over with it."""
    pieces: list[Piece] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def packed(self) -> bytes:
        body = b"".join(piece.data for piece in self.pieces)
        head = {
            "format": FORMAT,
            "token": self.token,
            "holder": self.holder,
            "begins": self.begins,
            "pieces": [[piece.path, piece.at, len(piece.data)] for piece in self.pieces],
            "removed": self.removed,
            "crc32": zlib.crc32(body),
        }
        return canonical(head).encode() + b"\n" + body

    @classmethod
    def unpacked(cls, data: bytes, name: str) -> Entry:
        try:
            line, _, body = data.partition(b"\n")
            head = json.loads(line)
            if head["format"] > FORMAT:
                what = f"{name} has format {head['format']}, and this Penstock knows {FORMAT}"
                raise FatalError(what, code="PEN-5006", hint="run the newer version")
            if zlib.crc32(body) != head["crc32"]:
                raise ValueError("its checksum does not match")
            entry, at = cls(head["token"], head["holder"], head["begins"], removed=head["removed"]), 0
            for path, offset, size in head["pieces"]:
                entry.pieces.append(Piece(_inside(path), offset, body[at : at + size]))
                at += size
        except (ValueError, KeyError, TypeError) as error:
            raise FatalError(
                f"{name} is corrupt: {error}",
                code="PEN-5004",
                hint="restore it from a copy; or move the whole log away to be asked where to go on",
            ) from error
        for path in entry.removed:
            _inside(path)
        return entry


def _inside(path: str) -> str:
    """A path that leads out of the directory is nobody's state."""
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"it names {path}")
    return path


class Garbage:
    """
    Which entries nothing is left of: every file that they hold was written again since, or removed.

    An entry that removed a file must outlast all entries that hold it, or the file would be back for who reads the rest.
    """

    def __init__(self) -> None:
        self._live: dict[int, int] = {}  # of each entry, how many files still need it
        self._needed: dict[str, list[int]] = {}  # of each file, the entries that it is made of
        self._holding: dict[
            str, set[int]
        ] = {}  # of each file, the entries that are not deleted yet and hold some of it
        self._outlasts: dict[int, set[int]] = {}
        self._newest = -1

    def add(self, number: int, entry: Entry) -> None:
        self._live[number] = 1 if entry.begins else 0  # a run from before must meet it, however late
        self._newest = max(self._newest, number)
        for piece in entry.pieces:
            if not piece.at:
                self._drop(piece.path)
            needed = self._needed.setdefault(piece.path, [])
            if number not in needed:
                needed.append(number)
                self._live[number] += 1
            self._holding.setdefault(piece.path, set()).add(number)
        for path in entry.removed:
            self._drop(path)
            self._outlasts.setdefault(number, set()).update(self._holding.get(path, set()) - {number})

    def ready(self) -> list[int]:
        """Entries that may be deleted; never the newest, so that numbers only grow."""
        return [
            number
            for number, count in self._live.items()
            if not count and number != self._newest and not self._outlasts.get(number)
        ]

    def deleted(self, numbers: Sequence[int]) -> None:
        gone = set(numbers)
        for number in gone:
            del self._live[number]
            self._outlasts.pop(number, None)
        for waiting in self._outlasts.values():
            waiting -= gone
        for path, holding in list(self._holding.items()):
            holding -= gone
            if not holding:
                del self._holding[path]

    def _drop(self, path: str) -> None:
        for number in self._needed.pop(path, ()):
            self._live[number] -= 1
