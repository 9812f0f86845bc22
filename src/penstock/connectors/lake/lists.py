"""
Lists of begun files: a task writes a file's name down before it begins the file, so that a sweep finds what is left over.

A list belongs to one task and one topic; both are in its name. Commits of different topics never touch the same list, so
they may run at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

from penstock.connectors.lake.targets import HIDDEN
from penstock.sink import Epoch, Topic

OTHERS = "deletion_vector_"
"""Files whose names cannot begin with that of the try, since a format gives them theirs, begin so."""


def begin(root: Path, epoch: Epoch, stem: str, topic: Topic) -> str:
    """Begin a list of a topic's files; gives the name under which it is dropped."""
    name = f"{epoch.stem()}/{stem}-{_digest(topic)}"
    path = _directory(root, epoch.pipeline) / name
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another topic's commit has just removed the empty directory
            path.write_text(f"{topic}\n")
            return name


def note(root: Path, pipeline: str, name: str, place: Path) -> None:
    """Write down that a file is about to be begun."""
    with open(_directory(root, pipeline) / name, "a") as file:
        file.write(f"{place}\n")


def drop(root: Path, pipeline: str, names: Iterable[str]) -> None:
    """Forget the lists of files that are committed: from here on no sweep touches the files."""
    directories = set()
    for name in names:
        path = _directory(root, pipeline) / name
        path.unlink(missing_ok=True)
        directories.add(path.parent)
    for directory in directories:
        _remove_if_empty(directory)


def sweep(root: Path, epoch: Epoch, keep: Callable[[Topic, Path], bool], stem: str = "", only: Topic = "") -> None:
    """
    Remove every file that this try began, unless `keep` says otherwise.

    `stem` restricts it to the lists that begin so, `only` to those of one topic.
    """
    directory = _directory(root, epoch.pipeline) / epoch.stem()
    for listed in sorted(directory.glob(f"{stem}*{_digest(only) if only else ''}")):
        with contextlib.suppress(FileNotFoundError):  # a twin of this process sweeps as well
            topic, *places = listed.read_text().splitlines() or [""]  # empty: its task died before it began a file
            for place in map(Path, places):
                if place.name.startswith((epoch.stem(), OTHERS)) and not keep(topic, place):
                    place.unlink(missing_ok=True)
            listed.unlink()
    _remove_if_empty(directory)


def has(root: Path, epoch: Epoch, stem: str, topic: Topic) -> bool:
    """True if this try has begun files of the topic under names that begin so."""
    return any((_directory(root, epoch.pipeline) / epoch.stem()).glob(f"{stem}*{_digest(topic)}"))


def _directory(root: Path, pipeline: str) -> Path:
    return root / HIDDEN / ".begun" / quote(pipeline, safe="")


def _digest(topic: Topic) -> str:
    return hashlib.sha256(topic.encode()).hexdigest()[:16]


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not there, or a failed task has left its list for the sweep
        directory.rmdir()
