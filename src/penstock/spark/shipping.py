"""
Brings Penstock and third-party connectors to executors.

Spark takes a file name once and never again, and an executor that starts late fetches every file that was ever added. So
what is shipped is named by its content, added once per SparkContext, and kept for as long as that context lives.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

_shipped: WeakKeyDictionary[Any, _Shipped] = WeakKeyDictionary()


class _Shipped:
    """What one SparkContext was given, and the directory that its executors fetch it from."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="penstock-")
        self.names: set[str] = set()


def ship(context: Any, paths: Iterable[Path]) -> None:
    """Give modules and packages to every executor of a SparkContext, those that start later among them."""
    for path in paths:
        if (shipped := _shipped.get(context)) is None:
            shipped = _shipped[context] = _Shipped()
        archive = _archive(path, Path(shipped.directory.name))
        if archive.name not in shipped.names:
            context.addPyFile(str(archive))
            shipped.names.add(archive.name)


def _archive(path: Path, directory: Path) -> Path:
    """A zip that Python can import a module or a package from, named by what is in it."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if _travels(each))
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.relative_to(path.parent)} {file.stat().st_size}\n".encode())
        content.update(file.read_bytes())
    archive = directory / f"{path.stem}-{content.hexdigest()[:16]}.zip"
    if not archive.exists():
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            for file in files:
                zipped.write(file, file.relative_to(path.parent))
    return archive


def _travels(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts
