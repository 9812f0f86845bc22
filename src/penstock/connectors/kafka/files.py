"""
Staged rows in files: Arrow streams one after the other, in one file per task, synced once.

They are read back part by part, not mapped: a disk that fails under a mapped file would end the process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from penstock import durable, store
from penstock.errors import RetryableError, StagingLost
from penstock.sink import Epoch

CHUNK_BYTES = 8 << 20
"""Rows are written in parts of about this size, of which the receipt names each."""


class Part(Protocol):
    """Where some rows are."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...


P = TypeVar("P", bound=Part)


class StageFile:
    """The file of one task; made with its first rows."""

    def __init__(self, directory: store.Place, name: str) -> None:
        self.place = directory / name
        self._upload: store.Upload | None = None

    def write(self, batches: Sequence[pa.RecordBatch]) -> tuple[int, int]:
        """Gives where in the file the rows are, and how many bytes they take."""
        with durable.disk_errors(str(self.place)):
            if self._upload is None:
                store.make_directory(self.place.parent)
                self._upload = store.writer(self.place)
            file = self._upload.file
            begin = file.tell()
            with pa.ipc.new_stream(file, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            return begin, file.tell() - begin

    def finish(self) -> None:
        if self._upload is not None:
            with durable.disk_errors(str(self.place)):
                self._upload.finish()
                store.sync([self.place])


def read(config: Any, directory: str, parts: Iterable[P]) -> Iterator[tuple[P, pa.RecordBatch]]:
    """The rows of parts, in order."""
    opened: dict[str, Any] = {}
    try:
        for part in parts:
            if part.name not in opened:
                opened[part.name] = store.reader(_place(config, directory) / part.name)
            file = opened[part.name]
            file.seek(part.offset)
            data = pa.py_buffer(file.read_buffer(part.bytes) if hasattr(file, "read_buffer") else file.read(part.bytes))
            if data.size < part.bytes:
                raise StagingLost(f"the staged file {part.name} in {directory} is shorter than it was")
            for batch in pa.ipc.open_stream(data):
                yield part, batch
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise StagingLost(f"rows that were staged in {directory} are gone: {error}") from None
    finally:
        for file in opened.values():
            file.close()


def remove(config: Any, directory: str, names: Collection[str]) -> None:
    """Remove files that are published. A failure does no harm: it takes nothing but room."""
    place = _place(config, directory)
    try:
        store.delete([place / name for name in names])
    except (OSError, RetryableError):
        return


def sweep(directory: store.Place, epoch: Epoch, keep: Collection[str]) -> None:
    """Remove what this try staged, but for the files that are named."""
    own = [name for name in store.names(directory) if name.startswith(f"{epoch.stem()}-") and name not in keep]
    store.delete([directory / name for name in own])


def _place(config: Any, directory: str) -> store.Place:
    return store.at(directory, config.storage_options)
