"""
The client's files in an object store, through the same store as everything else: one request for a small file.

Metadata, manifests and their lists have names that never come again. What was read or written of them is kept for a while:
the commit of an epoch would read the same dozens of files as that of the one before.
"""

from __future__ import annotations

import io
import re
import threading
from collections import OrderedDict
from typing import Any

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from penstock import store
from penstock.connectors.iceberg.vended import place_of
from penstock.store import ObjectPath, Place

_ROOT, _VENDED = "penstock.root", "penstock.vended"

_UNIQUE = re.compile(r"/metadata/[^/]*[0-9a-f]{8}[^/]*\.(avro|metadata\.json)$")

HELD_BYTES, HELD_FILE_BYTES = 32 << 20, 2 << 20
"""Kept in all, and of one file at most."""


class _Held:
    """The contents of files that never change, those that were used last."""

    def __init__(self) -> None:
        self._files: OrderedDict[Place, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, place: Place) -> bytes | None:
        with self._lock:
            found = self._files.get(place)
            if found is not None:
                self._files.move_to_end(place)
            return found

    def keep(self, place: Place, data: bytes) -> None:
        with self._lock:
            self._drop(place)
            if len(data) > HELD_FILE_BYTES:
                return
            self._files[place] = data
            self._bytes += len(data)
            while self._bytes > HELD_BYTES:
                self._drop(next(iter(self._files)))

    def forget(self, place: Place) -> None:
        with self._lock:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        self._bytes -= len(self._files.pop(place, b""))


_held = _Held()

_roots: dict[str, ObjectPath] = {}
"""The places that catalogs of this process are about, by address and options: a property of the client can only be text."""


def properties_for(root: Place, vended: bool = False) -> dict[str, str]:
    """
    Properties of a catalog whose tables are read and written here; none for a disk. They hold no secret.

    `vended`: each table is reached with the keys that the catalog gives with it.
    """
    if not isinstance(root, ObjectPath):
        return {}
    name = f"{root} {sorted(root.store.options.items(), key=str)}"  # secrets are references here
    _roots[name] = root
    return {"py-io-impl": f"{__name__}.StoreIO", _ROOT: name, **({_VENDED: "true"} if vended else {})}


class StoreIO(FileIO):
    def __init__(self, properties: Any) -> None:
        super().__init__(properties)
        self._root = _roots[properties[_ROOT]]

    def new_input(self, location: str) -> StoreFile:
        return StoreFile(location, self._place(location))

    def new_output(self, location: str) -> StoreFile:
        return StoreFile(location, self._place(location))

    def delete(self, location: Any) -> None:
        place = self._place(location if isinstance(location, str) else location.location)
        _held.forget(place)
        store.delete([place])

    def _place(self, location: str) -> Place:
        """Another bucket is reached with the same options."""
        own = self._root.store
        if _VENDED in self.properties:
            return place_of(location, self.properties, own.options)
        is_own = location.startswith(f"{own.url}/")
        return store.beside(self._root, location) if is_own else store.at(location, own.options)


class StoreFile(InputFile, OutputFile):
    def __init__(self, location: str, place: Place) -> None:
        super().__init__(location)
        self._place = place
        self._is_unique = _UNIQUE.search(location) is not None

    def __len__(self) -> int:
        held = _held.get(self._place)
        if held is not None:
            return len(held)
        found = store.head(self._place)
        if found is None:
            raise FileNotFoundError(self.location)
        return found.size

    def exists(self) -> bool:
        return store.head(self._place) is not None

    def open(self, seekable: bool = True) -> InputStream:
        if not self._is_unique:
            return store.reader(self._place)
        data = _held.get(self._place)
        if data is None:
            data = self._place.read_bytes()
            _held.keep(self._place, data)
        return io.BytesIO(data)

    def create(self, overwrite: bool = False) -> OutputStream:
        """Names of the client are unique, so that nothing is ever overwritten."""
        return _Output(self._place, self._is_unique)

    def to_input_file(self) -> InputFile:
        return self


class _Output:
    """A file that appears when it is closed, and not if an error ended its block."""

    def __init__(self, place: Place, is_held: bool) -> None:
        self._place = place
        self._upload = store.writer(place)
        self._written: list[bytes] | None = [] if is_held else None
        self._open = True

    def tell(self) -> int:
        return int(self._upload.file.tell())

    def write(self, b: bytes) -> int:
        if self._written is not None:
            self._written.append(bytes(b))
        return int(self._upload.file.write(b))

    def close(self) -> None:
        if self._open:
            self._upload.finish()
            if self._written is not None:
                _held.keep(self._place, b"".join(self._written))
        self._open = False

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and self._open:
            self._upload.abandon()
            self._open = False
        self.close()
