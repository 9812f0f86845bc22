"""The client's files in an object store, through the same store as everything else: one request for a small file."""

from __future__ import annotations

from typing import Any

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from penstock import store
from penstock.connectors.iceberg.vended import place_of
from penstock.store import ObjectPath, Place

_ROOT, _VENDED = "penstock.root", "penstock.vended"

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
        store.delete([self._place(location if isinstance(location, str) else location.location)])

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

    def __len__(self) -> int:
        found = store.head(self._place)
        if found is None:
            raise FileNotFoundError(self.location)
        return found.size

    def exists(self) -> bool:
        return store.head(self._place) is not None

    def open(self, seekable: bool = True) -> InputStream:
        return store.reader(self._place)

    def create(self, overwrite: bool = False) -> OutputStream:
        """Names of the client are unique, so that nothing is ever overwritten."""
        return _Output(self._place)

    def to_input_file(self) -> InputFile:
        return self


class _Output:
    """A file that appears when it is closed, and not if an error ended its block."""

    def __init__(self, place: Place) -> None:
        self._upload = store.writer(place)
        self._open = True

    def tell(self) -> int:
        return int(self._upload.file.tell())

    def write(self, b: bytes) -> int:
        return int(self._upload.file.write(b))

    def close(self) -> None:
        if self._open:
            self._upload.finish()
        self._open = False

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and self._open:
            self._upload.abandon()
            self._open = False
        self.close()
