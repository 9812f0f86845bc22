"""
Files where they really are: on a local disk or in an object store (S3, GCS, Azure), through one interface.

    root = store.at("s3://lake/shop", options)           # or "/data/shop": a plain `Path`
    store.put(root / "_penstock" / "note", b"{}")        # whole or not at all, durable when it returns
    store.create(root / "_ledger" / "000001.json", data) # True for exactly one of all who try: the compare-and-set
    with store.reader(root / "a.parquet") as file: ...   # what `pq.ParquetFile` takes

A *place* is a `Path`, or an `ObjectPath`, which has the same names for what both can do: `/`, `name`, `parent`, `parents`,
`read_bytes()`, `read_text()`, `exists()`, `unlink(missing_ok=)`, `str()`. So code that has a place joins, reads and removes
without asking where it is, and leaves all writing to the functions here, which find the place's `Store`:

| function | on a disk | in an object store |
|---|---|---|
| `put` | write, fsync, rename, fsync the directory | one PUT |
| `create` | the same with a link | one PUT with If-None-Match; after an unclear answer the object is read |
| `head` | stat | HEAD |
| `heads` | stat of each | one listing per directory |
| `listed`, `names` | the tree below; the files directly in a directory | LIST, by pages |
| `delete` | unlink | bulk delete |
| `copy` | link, or copy | server-side copy |
| `writer`, `reader` | a plain file | a multipart upload that appears when it is finished; range requests |
| `make_directory`, `sync` | make, fsync | nothing: there are no directories, and an answer means durable |

A missing object is a `FileNotFoundError` everywhere. Other refusals of a store are ours: `FatalError` for credentials and
buckets, `RetryableError` for throttling, timeouts and failures of the server. No client is made before the first request, and
a process that was forked from one with a client is refused instead of left hanging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from penstock.store.local import LocalStore
from penstock.store.objects import ObjectPath, ObjectStore
from penstock.store.options import SCHEMES, Options, StorageOptions, is_object_url
from penstock.store.places import Changed, Entry, Store, Upload

__all__ = [
    "SCHEMES",
    "Changed",
    "Entry",
    "ObjectPath",
    "Options",
    "Place",
    "StorageOptions",
    "Store",
    "Upload",
    "at",
    "beside",
    "copy",
    "create",
    "delete",
    "head",
    "heads",
    "is_local",
    "is_object_url",
    "listed",
    "make_directory",
    "names",
    "of",
    "put",
    "reader",
    "refuse_without_conditions",
    "source",
    "sync",
    "try_writing",
    "writer",
]

Place = Path | ObjectPath
"""Where a file is, in whichever store."""

_LOCAL = LocalStore()


def at(where: str, options: Options | None = None) -> Place:
    """The place that a path or an address names; nothing is asked yet."""
    if where.startswith("file:///"):
        return Path(where.removeprefix("file://"))
    return ObjectStore.at(where, options or {}) if is_object_url(where) else Path(where)


def beside(place: Place, text: str) -> Place:
    """The place in the same store that a text names, which `str` made of it."""
    return ObjectPath(place.store, place.store.key(text)) if isinstance(place, ObjectPath) else Path(text)


def of(place: Place) -> Store[Any]:
    """The store that a place is in."""
    return place.store if isinstance(place, ObjectPath) else _LOCAL


def is_local(place: Place) -> bool:
    return not isinstance(place, ObjectPath)


def put(place: Place, data: bytes) -> None:
    """Replace what is there; durable when it returns."""
    of(place).put(place, data)


def create(place: Place, data: bytes) -> bool:
    """
    Put it there if nothing is; False if there is something.

    If an answer is lost, the object is read again: the same bytes mean that it was us. So `data` should hold something
    that nobody else would write, such as the name of the try.
    """
    return of(place).create(place, data)


def head(place: Place) -> Entry | None:
    """Size and identity of a file; None if there is none."""
    return of(place).head(place)


def heads(places: Sequence[Place]) -> list[Entry | None]:
    """As `head` of each, with few requests."""
    return of(places[0]).heads(places) if places else []


def listed(below: Place, start_after: str = "") -> Iterator[Entry]:
    """Every file below a place, deep, in the order of names; `start_after` is relative to it."""
    return of(below).listed(below, start_after)


def names(directory: Place) -> list[str]:
    """The names of the files directly in a directory, in order; none if there is no such directory."""
    return of(directory).names(directory)


def delete(places: Iterable[Place]) -> None:
    """Remove files; one that is not there is no error."""
    every = list(places)
    if every:
        of(every[0]).delete(every)


def copy(source: Place, target: Place) -> None:
    """Make a file appear whole at another place of the same store; `FileNotFoundError` if there is none."""
    of(source).copy(source, target)


def writer(place: Place) -> Upload:
    """Begin a file. In an object store nobody sees it before `finish`."""
    return of(place).writer(place)


def reader(place: Place, expected: Entry | None = None) -> IO[bytes]:
    """A seekable file. With `expected`, it raises `Changed` instead of giving bytes of another version of the object."""
    return of(place).reader(place, expected)


def source(place: Place) -> Any:
    """What `pq.ParquetFile` takes: the path of a local file, which it opens and closes by itself, or a reader."""
    return place if isinstance(place, Path) else reader(place)


def make_directory(place: Place) -> None:
    of(place).make_directory(place)


def sync(places: Iterable[Place]) -> None:
    """Make files durable that are complete, and the directories that name them."""
    every = list(places)
    if every:
        of(every[0]).sync(every)


def refuse_without_conditions(below: Place) -> None:
    """
    A `ConfigError` if the store takes two creations of one object: two writers would overwrite each other unseen.

    Three requests; nothing on a disk, where links are exclusive.
    """
    of(below).refuse_without_conditions(below)


def try_writing(below: Place) -> None:
    """Write and delete a small file; raises what the store has against it."""
    probe = below / "_penstock" / f".probe-{uuid4().hex}"
    put(probe, b"")
    delete([probe])
