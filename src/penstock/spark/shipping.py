"""
Brings Penstock, third-party connectors and rows of journals to executors.

Spark takes a file name once and never again, and an executor that starts late fetches every file that was ever added. So
what is shipped is named by its content, added once per SparkContext, and kept for as long as that context lives.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from penstock.runtime.job import Job, Part
from penstock.runtime.journal import JournalSplit

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


@contextlib.contextmanager
def carrying(context: Any, job: Job) -> Iterator[Job]:
    """The job with the rows of its journals: a broadcast for each split, which only the task that reads it fetches."""
    broadcasts: list[Any] = []

    def loaded(part: Part) -> Part:
        if not isinstance(part.split, JournalSplit):
            return part
        broadcasts.append(context.broadcast(part.split.rows()))
        return replace(part, split=replace(part.split, carried=broadcasts[-1]))

    try:
        yield replace(job, parts=[loaded(part) for part in job.parts])
    finally:
        for each in broadcasts:
            with contextlib.suppress(Exception):  # the JVM may be gone, and all of it with it
                each.destroy()


def bare(job: Job) -> Job:
    """The job without the rows that it carries: only the splits that a task is given bring theirs."""
    if not any(isinstance(part.split, JournalSplit) and part.split.carried for part in job.parts):
        return job
    return replace(job, parts=[replace(each, split=_without(each.split)) for each in job.parts])


def _without(split: Any) -> Any:
    return replace(split, carried=None) if isinstance(split, JournalSplit) else split


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
