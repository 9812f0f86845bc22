"""Object stores: S3, GCS and Azure, by obstore."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any, cast
from urllib.parse import urlparse
from uuid import uuid4

from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError
from penstock.store.options import Options, allows_http, kind_of, revealed
from penstock.store.places import Changed, Entry, Store

PART_BYTES = 5 << 20
"""The least that S3 takes as a part: 64 files at once should fit a task's memory."""

READ_BYTES = 256 << 10
"""The least that a reader asks for at once."""

KEY_BYTES = 1024
"""The longest key that stores take."""

_RETRIES = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=8),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
"""A server that is gone is noticed within 10 seconds; the runtime goes on trying, and says so."""

_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "token has expired")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_SLOW_DOWN = ("SlowDown", "429 Too Many", "Throttl", "ServerBusy", "RequestLimitExceeded")

_lock = threading.Lock()
_first_pid: list[int] = []


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
        self.options = dict(options)
        self._revealed: dict[str, str] | None = None
        self._made: Any = None

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    # -- the client ------------------------------------------------------------------------------------------------

    @property
    def _client(self) -> Any:
        with _lock:
            pid = os.getpid()
            if not _first_pid:
                _first_pid.append(pid)
            if _first_pid[0] != pid:
                raise FatalError(
                    "this process was forked from one that has used an object store, whose client would hang here",
                    code="PEN-5012",
                    hint="fork before the first request, or start a fresh process",
                )
            if self._made is None:
                self._revealed = revealed(self.url, self.options)
                self._made = _client(self.url, self._revealed)
            return self._made

    def _renewed(self) -> bool:
        """Reveal the secrets again; True if they have changed, and the next request uses them."""
        now = revealed(self.url, self.options)
        with _lock:
            is_new = now != self._revealed
            if is_new:
                self._made = None
        return is_new

    @contextlib.contextmanager
    def errors(self, place: object) -> Iterator[None]:
        """The client's errors as ours."""
        obstore = _obstore()
        exceptions = obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:
            if any(mark in str(error) for mark in _NO_BUCKET):
                raise FatalError(
                    f"there is no bucket or container {self.url}",
                    code="PEN-5050",
                    hint="make it, or correct `path`, `region` and `endpoint`",
                ) from error
            raise FileNotFoundError(errno.ENOENT, "no such object", str(place)) from None
        except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise self._refused(place, error) from error
        except exceptions.AlreadyExistsError:
            raise
        except exceptions.PreconditionError as error:
            raise Changed(f"{place} is not the object that it was") from error
        except (exceptions.BaseError, OSError) as error:
            raise self._failed(place, error) from error

    def _refused(self, place: object, error: Exception) -> ConnectorError:
        text = _first_line(error)
        if any(mark in str(error) for mark in _EXPIRED) or self._renewed():
            return RetryableError(
                f"the store refused expired credentials for {place}: {text}",
                code="PEN-2001",
                hint="they are read again for the next try; see that whatever renews them runs",
            )
        return FatalError(
            f"the store refused access to {place}: {text}",
            code="PEN-5050",
            hint="check the keys in `storage_options`, and that they may list, read, write and delete there",
        )

    def _failed(self, place: object, error: Exception) -> ConnectorError:
        text = str(error)
        if any(mark in text for mark in (*_EXPIRED, "403 Forbidden", "401 Unauthorized")):
            return self._refused(place, error)
        code = "PEN-2001"
        if any(mark in text for mark in _SLOW_DOWN):
            code = "PEN-2002"
        elif "timed out" in text or "timeout" in text.partition("max_retries")[0]:
            code = "PEN-2003"
        return RetryableError(f"the store failed at {place}: {_first_line(error)}", code=code)

    # -- objects ---------------------------------------------------------------------------------------------------

    def get(self, place: ObjectPath) -> bytes:
        with self.errors(place):
            return bytes(_obstore().get(self._client, place.key).bytes())

    def put(self, place: ObjectPath, data: bytes) -> None:
        with self.errors(place):
            _obstore().put(self._client, _short(place), data)

    def create(self, place: ObjectPath, data: bytes) -> bool:
        try:
            with self.errors(place):
                _obstore().put(self._client, _short(place), data, mode="create")
            return True
        except (_obstore().exceptions.AlreadyExistsError, Changed):
            # The client may have repeated a request whose first answer was lost. Our own bytes mean that we were first.
            with contextlib.suppress(FileNotFoundError):
                return self.get(place) == data
            return self.create(place, data)  # refused by a 409 that left nothing, or deleted meanwhile

    def head(self, place: ObjectPath) -> Entry | None:
        try:
            with self.errors(place):
                return self._entry(_obstore().head(self._client, place.key))
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
        with self.errors(where):
            for page in _obstore().list(self._client, prefix or None, offset=after or None):
                yield from map(self._entry, page)

    def names(self, directory: ObjectPath) -> list[str]:
        with self.errors(directory):
            found = _obstore().list_with_delimiter(self._client, directory.key or None)["objects"]
        return sorted(each["path"].rpartition("/")[2] for each in found)

    def delete(self, places: Sequence[ObjectPath]) -> None:
        with self.errors(places[0]), contextlib.suppress(FileNotFoundError):
            _obstore().delete(self._client, [place.key for place in places])

    def copy(self, source: ObjectPath, target: ObjectPath) -> None:
        with self.errors(source):
            _obstore().copy(self._client, source.key, _short(target))

    def writer(self, place: ObjectPath) -> ObjectUpload:
        with self.errors(place):
            return ObjectUpload(place, self._client)

    def reader(self, place: ObjectPath, expected: Entry | None) -> IO[bytes]:
        entry = expected or self.head(place)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(place))
        return cast("IO[bytes]", RangeReader(place, entry))

    def part(self, place: ObjectPath, entry: Entry, start: int, end: int) -> bytes:
        """Some bytes of an object; `Changed` if it is another one by now."""
        options = {"range": (start, end), **({"if_match": entry.etag} if entry.etag else {})}
        with self.errors(place):
            return bytes(_obstore().get(self._client, place.key, options=options).bytes())

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
        self._writer = _obstore().open_writer(client, _short(place), buffer_size=PART_BYTES, max_concurrency=2)
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


@functools.cache
def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            "object stores need the package obstore", code="PEN-1007", hint="pip install 'penstock[object-stores]'"
        ) from error
    return obstore


def _client(url: str, options: Mapping[str, str]) -> Any:
    stores, kind, address = _obstore().store, kind_of(url), urlparse(url)
    config = {name: value for name, value in options.items() if name != "allow_http"}
    client_options = {"allow_http": allows_http(options), "connect_timeout": "5s", "timeout": "30s"}
    if kind == "az":
        container, _, host = address.netloc.partition("@")
        config.update({"account_name": host.partition(".")[0]} if host and "account_name" not in config else {})
        return stores.AzureStore(container, config=config, client_options=client_options, retry_config=_RETRIES)
    make = stores.S3Store if kind == "s3" else stores.GCSStore
    return make(address.netloc, config=config, client_options=client_options, retry_config=_RETRIES)


def _short(place: ObjectPath) -> str:
    if len(place.key.encode()) > KEY_BYTES:
        raise FatalError(
            f"the key of {place} has over {KEY_BYTES} bytes, which stores refuse",
            code="PEN-5009",
            hint="choose a shorter path or topic, or partition by columns with shorter values",
        )
    return place.key


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:500]
