"""A local or mounted disk as a store: what `durable` promises of files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast
from uuid import uuid4

import pyarrow as pa

from penstock import durable
from penstock.store.places import Changed, Entry, Store


class LocalStore(Store[Path]):
    def put(self, place: Path, data: bytes) -> None:
        durable.write_atomic(place, data)

    def create(self, place: Path, data: bytes) -> bool:
        return durable.publish_once(place, data)

    def head(self, place: Path) -> Entry | None:
        try:
            about = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Entry(place, about.st_size, f"{about.st_ino}-{about.st_mtime_ns}", about.st_mtime_ns)

    def heads(self, places: Sequence[Path]) -> list[Entry | None]:
        return [self.head(place) for place in places]

    def listed(self, below: Path, start_after: str) -> Iterator[Entry]:
        found = sorted(
            os.path.relpath(os.path.join(directory, name), below)
            for directory, _, files in os.walk(below)
            for name in files
        )
        for name in found:
            entry = self.head(below / name) if name > start_after else None
            if entry is not None:
                yield entry

    def names(self, directory: Path) -> list[str]:
        try:
            with os.scandir(directory) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return []

    def delete(self, places: Sequence[Path]) -> None:
        for place in places:
            place.unlink(missing_ok=True)

    def copy(self, source: Path, target: Path) -> None:
        with durable.disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except FileExistsError:
                pass
            except PermissionError:  # a mount without links
                temporary = target.with_name(f".{target.name}.{uuid4().hex[:8]}")
                shutil.copyfile(source, temporary)
                os.replace(temporary, target)

    def writer(self, place: Path) -> LocalUpload:
        return LocalUpload(place)

    def reader(self, place: Path, expected: Entry | None) -> IO[bytes]:
        file = pa.OSFile(str(place))
        about = os.fstat(file.fileno())
        if expected is not None and f"{about.st_ino}-{about.st_mtime_ns}" != expected.etag:
            file.close()
            raise Changed(f"{place} is not the file that it was")
        return cast("IO[bytes]", file)

    def make_directory(self, place: Path) -> None:
        durable.make_directory(place)

    def sync(self, places: Sequence[Path]) -> None:
        durable.fsync(*places)


class LocalUpload:
    """A file at its place from its first byte on."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.file = pa.OSFile(str(place), "wb")

    def finish(self) -> int:
        self.file.close()
        return self._place.stat().st_size

    def abandon(self) -> None:
        """Nothing: the file is at its place already, and a sweep removes it."""
