"""One file, or a part of one, as tasks get it: how to read it, and what counts as the file that was planned."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from penstock import store
from penstock.config import Secret
from penstock.errors import BadRecord, DataError, FatalError, RangeGone, RetryableError, reason_of
from penstock.store import Changed, Entry, Place

Format = Literal["jsonl", "csv", "parquet"]

BLOCK_BYTES = 4 << 20
_NAMED = 5
"""Bad rows of a split that are named; the others are counted."""
"""Arrow quotes the value at fault, which may be nobody's business."""
_ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class FileSplit:
    """A file, or the lines that start between two bytes, or the row groups between two numbers, with how to read them."""

    path: str
    size: int
    mtime_ns: int
    format: Format
    stream: str = ""
    schema: pa.Schema | None = None
    explicit: bool = False
    """The schema is the user's: fields that it does not name are ignored instead of added."""
    delimiter: str | None = None
    header: bool = True
    start: int = 0
    end: int | None = None
    etag: str = ""
    """Of an object: no bytes of another version are read."""
    options: tuple[tuple[str, str | bool | Secret], ...] = ()
    """`storage_options`: references to secrets, which are revealed where the object is read."""

    @property
    def object(self) -> Place | None:
        """The place of an object; None for a local file."""
        bucket, _, key = self.path.partition("://")[2].partition("/")
        return (
            _bucket(f"{self.path.partition('://')[0]}://{bucket}", self.options) / key if "://" in self.path else None
        )

    @property
    def compression(self) -> str | None:
        return _COMPRESSIONS.get(os.path.splitext(self.path)[1])

    @property
    def separator(self) -> str:
        return self.delimiter or ("\t" if ".tsv" in os.path.basename(self.path) else ",")


def format_of(name: str) -> Format | None:
    """The format that a file's ending tells; None when it tells nothing."""
    stem, ending = os.path.splitext(name)
    return _ENDINGS.get(os.path.splitext(stem)[1] if ending in _COMPRESSIONS else ending)


KEPT_BYTES = 64 << 20
"""Of bad records of one split, in memory; beyond, they are counted and cannot become dead letters."""


class BadRows:
    """The rows of a split that could not be used: how many, and where the first few are and what is wrong with them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.count = 0
        self._named: list[str] = []
        self._records: list[BadRecord] = []
        self._bytes = 0

    @property
    def names(self) -> bool:
        """True while rows are still named, and not only counted."""
        return len(self._named) < _NAMED

    def add(self, where: str, why: object, text: str | bytes = b"", count: int = 1) -> None:
        data, reason = text.encode() if isinstance(text, str) else text, reason_of(why)
        place = f"{self.path}, {where}" if where else self.path
        if self.names:
            self._named.append(f"{place}: {reason}")
        self.count += count
        self._bytes += len(data)
        if data and self._bytes <= KEPT_BYTES:
            self._records.append(BadRecord(data, place, reason))

    def clear(self) -> None:
        """The file is read again."""
        self.count = self._bytes = 0
        self._named.clear()
        self._records.clear()

    def error(self, stream: str) -> DataError:
        many = f" and {self.count - 1} more" if self.count > 1 else ""
        error = DataError(
            f"{self._named[0]}{many}",
            code="PEN-3001",
            hint="correct the file, where it is or under a new name; give the right types in `columns`; "
            'or leave such rows out with `on_error = "skip"`',
        )
        error.count, error.stream = self.count, stream
        error.records = self._records if len(self._records) == self.count else ()
        error.samples = tuple(self._named)
        return error


@functools.lru_cache(maxsize=8)
def _bucket(url: str, options: tuple[tuple[str, str | bool | Secret], ...]) -> Place:
    """One client for all objects of a bucket that this process reads."""
    return store.at(url, dict(options))


def require_planned(split: FileSplit) -> None:
    """`RangeGone` if the file is gone, or is no longer the one that was planned."""
    if split.object is not None:
        about = store.head(split.object)
        if about is None:
            raise RangeGone(f"{split.path} is gone, and it was planned", hint=_PREPARED)
        if (about.size, about.etag) != (split.size, split.etag):
            raise RangeGone(f"{split.path} changed after it was planned", hint=_PREPARED)
        return
    try:
        _require(split, os.stat(split.path))
    except FileNotFoundError as error:
        raise RangeGone(f"{split.path} is gone, and it was planned", hint=_PREPARED) from error
    except OSError:
        pass  # the task that reads the file says what is wrong with it


def salvage(
    count: int, convert: Callable[[int, int], pa.RecordBatch | None], report: Callable[[int, pa.ArrowInvalid], None]
) -> Iterator[pa.RecordBatch | None]:
    """Convert rows in the largest pieces that can be converted; halving finds a bad row in few steps."""
    pieces = [(0, count)] if count else []
    while pieces:
        lo, hi = pieces.pop()
        try:
            batch = convert(lo, hi)
        except pa.ArrowInvalid as error:
            if hi - lo == 1:
                report(lo, error)
            else:
                middle = (lo + hi) // 2
                pieces += [(middle, hi), (lo, middle)]
        else:
            yield batch


def cast(column: pa.Array, field: pa.Field) -> pa.Array:
    try:
        return column if column.type == field.type else column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise type(error)(f"column {field.name!r} is {column.type}, not {field.type}") from error


def stream_of(split: FileSplit, file: pa.NativeFile) -> pa.NativeFile:
    return pa.CompressedInputStream(file, split.compression) if split.compression else file


@contextlib.contextmanager
def opened(split: FileSplit) -> Iterator[pa.NativeFile]:
    """The planned file; one that is gone or was rewritten is a `RangeGone`, so that no range ever holds other rows."""
    if split.object is not None:
        try:
            with pa.PythonFile(store.reader(split.object, Entry(split.object, split.size, split.etag, 0))) as file:
                yield file
        except FileNotFoundError as error:
            raise RangeGone(f"{split.path} is gone, and it was planned", hint=_PREPARED) from error
        except Changed as error:
            raise RangeGone(f"{split.path} changed after it was planned", hint=_PREPARED) from error
        return
    try:
        with pa.OSFile(split.path) as file:
            _require(split, os.fstat(file.fileno()))
            yield file
    except FileNotFoundError as error:
        raise RangeGone(f"{split.path} is gone, and it was planned", hint=_PREPARED) from error
    except PermissionError as error:
        raise FatalError(
            f"cannot read {split.path}", code="PEN-5001", hint="give this user permission to read it"
        ) from error
    except OSError as error:
        if error.errno is None:  # Arrow's own: a stream that cannot be decompressed, a corrupt page
            raise DataError(
                f"{split.path} is damaged: {error}", code="PEN-3001", hint="replace it under a new name"
            ) from error
        raise RetryableError(f"cannot read {split.path}: {error.strerror}") from error


_PREPARED = "put the file back as it was: a sink has staged its rows, and has to stage them again"
"""What is left to do once an epoch is prepared; before that, the runtime plans the files again by itself."""


def _require(split: FileSplit, about: os.stat_result) -> None:
    if not is_planned(split, about):
        raise RangeGone(f"{split.path} changed after it was planned", hint=_PREPARED)


def is_planned(split: FileSplit, about: os.stat_result) -> bool:
    return (about.st_size, about.st_mtime_ns) == (split.size, split.mtime_ns)
