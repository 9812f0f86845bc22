"""Object stores: S3, GCS and Azure, by obstore."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast
from urllib.parse import urlparse
from uuid import uuid4

from penstock.errors import ConfigError, FatalError
from penstock.store.bucket import Bucket, library
from penstock.store.options import Options
from penstock.store.places import Changed, Entry, Store

PART_BYTES = 5 << 20
"""The least that S3 takes as a part: 64 files at once should fit a task's memory."""

READ_BYTES = 256 << 10
"""The least that a reader asks for at once."""

KEY_BYTES = 1024
"""The longest key that stores take."""


@dataclass(frozen=True)
class ObjectPath:
    """An object, or a prefix of objects; named as `Path` names what both can do."""

    store: ObjectStore
    key: str

    def __truediv__(self, more: object) -> ObjectPath:
        return ObjectPath(self.store, "/".join(filter(None, (self.key, str(more).strip("/")))))

    def joinpath(self, more: str) -> ObjectPath:
        return self / more

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}"

    def __lt__(self, other: ObjectPath) -> bool:
        return self.key < other.key

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.store, self.key.rpartition("/")[0])

    @property
    def parents(self) -> list[ObjectPath]:
        """Every prefix above, the nearest first; the last is the bucket."""
        parts = self.key.split("/")
        return [ObjectPath(self.store, "/".join(parts[:end])) for end in range(len(parts) - 1, -1, -1) if self.key]

    def read_bytes(self) -> bytes:
        return self.store.get(self)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def exists(self) -> bool:
        return self.store.head(self) is not None

    def unlink(self, missing_ok: bool = False) -> None:
        """Stores do not say whether there was something, so that a missing object is never an error."""
        self.store.delete([self])


class ObjectStore(Store[ObjectPath]):
    """One bucket or container. Threads may use it at the same time."""

    def __init__(self, url: str, options: Options) -> None:
        self.url = url
        self.options = options
        self._bucket = Bucket(url, options)
        self.errors = self._bucket.errors
        self.failed = self._bucket.failed
        self.keys_end = self._bucket.keys_end

    @classmethod
    def at(cls, where: str, options: Options) -> ObjectPath:
        address = urlparse(where)
        key = where.partition("://")[2].partition("/")[2].strip("/")
        if not address.netloc or any(part in ("", ".", "..") for part in key.split("/") if key):
            raise ConfigError(
                f"`path` is no address of a store: {where}",
                code="PEN-1003",
                hint="give scheme, bucket and path, such as s3://lake/shop, without empty parts",
            )
        return ObjectPath(cls(f"{address.scheme}://{address.netloc}", options), key)

    def key(self, text: str) -> str:
        """The key of an object of this store, by its address."""
        return text.removeprefix(f"{self.url}/")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    # -- objects ---------------------------------------------------------------------------------------------------

    def get(self, place: ObjectPath) -> bytes:
        with self._bucket.errors(place):
            return bytes(library().get(self._bucket.client, place.key).bytes())

    def put(self, place: ObjectPath, data: bytes) -> None:
        with self._bucket.errors(place):
            library().put(self._bucket.client, _short(place), data)

    def create(self, place: ObjectPath, data: bytes) -> bool:
        is_there = (
            library().exceptions.AlreadyExistsError
        )  # of a request without conditions it is a failure like others
        with contextlib.suppress(Changed), self._bucket.errors(place), contextlib.suppress(is_there):
            library().put(self._bucket.client, _short(place), data, mode="create")
            return True
        # The client may have repeated a request whose first answer was lost. Our own bytes mean that we were first.
        with contextlib.suppress(FileNotFoundError):
            return self.get(place) == data
        return self.create(place, data)  # refused by a 409 that left nothing, or deleted meanwhile

    def head(self, place: ObjectPath) -> Entry | None:
        try:
            with self._bucket.errors(place):
                return self._entry(library().head(self._bucket.client, place.key))
        except FileNotFoundError:
            return None

    def heads(self, places: Sequence[ObjectPath]) -> list[Entry | None]:
        found: dict[str, Entry] = {}
        for parent in {place.parent for place in places}:
            keys = sorted(place.key for place in places if place.parent == parent)
            first = self.head(ObjectPath(self, keys[0]))
            found.update({keys[0]: first} if first else {})
            for entry in self._listed(parent.key, keys[0]) if len(keys) > 1 else ():
                if entry.place.key > keys[-1]:
                    break
                found[entry.place.key] = entry
        return [found.get(place.key) for place in places]

    def listed(self, below: ObjectPath, start_after: str) -> Iterator[Entry]:
        return self._listed(below.key, (below / start_after).key if start_after else "")

    def _listed(self, prefix: str, after: str) -> Iterator[Entry]:
        where = ObjectPath(self, prefix)
        with self._bucket.errors(where):
            for page in library().list(self._bucket.client, prefix or None, offset=after or None):
                yield from map(self._entry, page)

    def names(self, directory: ObjectPath) -> list[str]:
        with self._bucket.errors(directory):
            found = library().list_with_delimiter(self._bucket.client, directory.key or None)["objects"]
        return sorted(each["path"].rpartition("/")[2] for each in found)

    def delete(self, places: Sequence[ObjectPath]) -> None:
        keys = [place.key for place in places]
        try:
            with self._bucket.errors(places[0]):
                library().delete(self._bucket.client, keys)
        except FileNotFoundError:
            # GCS says so, and the client stops there: the others go one by one.
            for place in places if len(keys) > 1 else ():
                self.delete([place])

    def copy(self, source: ObjectPath, target: ObjectPath) -> None:
        with self._bucket.errors(source):
            library().copy(self._bucket.client, source.key, _short(target))

    def writer(self, place: ObjectPath) -> ObjectUpload:
        with self._bucket.errors(place):
            return ObjectUpload(place, self._bucket.client)

    def reader(self, place: ObjectPath, expected: Entry | None) -> IO[bytes]:
        entry = expected or self.head(place)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(place))
        return cast("IO[bytes]", RangeReader(place, entry))

    def part(self, place: ObjectPath, entry: Entry, start: int, end: int) -> bytes:
        """Some bytes of an object; `Changed` if it is another one by now."""
        options = {"range": (start, end), **({"if_match": entry.etag} if entry.etag else {})}
        with self._bucket.errors(place):
            return bytes(library().get(self._bucket.client, place.key, options=options).bytes())

    def refuse_without_conditions(self, below: ObjectPath) -> None:
        probe = below / "_penstock" / f".probe-{uuid4().hex}"
        try:
            if self.create(probe, b"one") and self.create(probe, b"two"):
                raise ConfigError(
                    f"the store of {below} ignores conditional writes: two writers would overwrite each other unseen",
                    code="PEN-1040",
                    hint="use a store that honours If-None-Match: S3, GCS, Azure, MinIO and most others do",
                )
        finally:
            self.delete([probe])

    def _entry(self, about: Mapping[str, Any]) -> Entry:
        modified = int(about["last_modified"].timestamp() * 1_000_000_000)
        return Entry(ObjectPath(self, about["path"]), about["size"], about["e_tag"] or "", modified)


class ObjectUpload:
    """An object that appears when it is finished: one PUT if it is small, parts if it is not."""

    def __init__(self, place: ObjectPath, client: Any) -> None:
        self._place = place
        self._writer = library().open_writer(client, _short(place), buffer_size=PART_BYTES, max_concurrency=2)
        self.file = _Sink(place, self._writer)

    def finish(self) -> int:
        self.file.is_open = False
        with self._place.store.errors(self._place):
            self._writer.close()
        return self.file.size

    def abandon(self) -> None:
        self.file.is_open = False
        self._writer = None  # never closed, it completes nothing


class _Sink:
    """What Arrow writes to; closing it completes nothing, since Arrow closes files that it gives up as well."""

    closed = False

    def __init__(self, place: ObjectPath, writer: Any) -> None:
        self._place = place
        self._writer = writer
        self.is_open = True
        self.size = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)
        if self.is_open:
            with self._place.store.errors(self._place):
                self._writer.write(piece)
            self.size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Parts are sent when they are full."""

    def close(self) -> None:
        """See `ObjectUpload`."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


class RangeReader(io.RawIOBase):
    """A seekable file over one version of an object."""

    def __init__(self, place: ObjectPath, entry: Entry) -> None:
        super().__init__()
        self._place, self._entry = place, entry
        self._at = self._start = 0
        self._held = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = self._entry.size - self._at
        count = left if size is None or size < 0 else min(size, left)
        if count <= 0:
            return b""
        first = self._at - self._start
        if not 0 <= first <= first + count <= len(self._held):
            end = min(self._entry.size, self._at + max(count, READ_BYTES))
            self._held = self._place.store.part(self._place, self._entry, self._at, end)
            self._start, first = self._at, 0
        self._at += count
        return self._held[first : first + count]

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _short(place: ObjectPath) -> str:
    if len(place.key.encode()) > KEY_BYTES:
        raise FatalError(
            f"the key of {place} has over {KEY_BYTES} bytes, which stores refuse",
            code="PEN-5009",
            hint="choose a shorter path or topic, or partition by columns with shorter values",
        )
    return place.key
