"""
Lists of begun files: a task writes a file's name down before it begins the file, so that a sweep finds what is left over.

A list belongs to one task and one topic; both are in its name. Commits of different topics never touch the same list, so
they may run at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from penstock import store
from penstock.connectors.lake.targets import HIDDEN
from penstock.sink import Epoch, Topic
from penstock.store import Place

OTHERS = "deletion_vector_"
"""Files whose names cannot begin with that of the try, since a format gives them theirs, begin so."""


@dataclass
class Begun:
    """A task's list of the files of one topic."""

    root: Place
    pipeline: str
    name: str
    """Under which the list is dropped."""
    topic: Topic
    _places: list[Place] = field(default_factory=list)

    def note(self, place: Place) -> None:
        """Write down that a file is about to be begun."""
        path = _directory(self.root, self.pipeline) / self.name
        if isinstance(path, Path):
            with open(path, "a") as file:
                file.write(f"{place}\n")
        else:  # objects cannot be appended to
            self._places.append(place)
            store.put(path, "".join(f"{each}\n" for each in (self.topic, *self._places)).encode())


def begin(root: Place, epoch: Epoch, stem: str, topic: Topic) -> Begun:
    """Begin a list of a topic's files."""
    begun = Begun(root, epoch.pipeline, f"{epoch.stem()}/{stem}-{_digest(topic)}", topic)
    path = _directory(root, epoch.pipeline) / begun.name
    while isinstance(path, Path):
        # Another topic's commit may just remove the empty directory: before the file is made, or while the directory is.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{topic}\n")
            break
    return begun


def drop(root: Place, pipeline: str, names: Iterable[str]) -> None:
    """Forget the lists of files that are committed: from here on no sweep touches the files."""
    places = [_directory(root, pipeline) / name for name in names]
    store.delete(places)
    for directory in {place.parent for place in places}:
        _remove_if_empty(directory)


def sweep(root: Place, epoch: Epoch, keep: Callable[[Topic, Place], bool], stem: str = "", only: Topic = "") -> None:
    """
    Remove every file that this try began, unless `keep` says otherwise.

    `stem` restricts it to the lists that begin so, `only` to those of one topic.
    """
    for listed in _lists(root, epoch, stem, only):
        with contextlib.suppress(FileNotFoundError):  # a twin of this process sweeps as well
            topic, *places = listed.read_text().splitlines() or [""]  # empty: its task died before it began a file
            found = [store.beside(root, each) for each in places]
            own = [each for each in found if each.name.startswith((epoch.stem(), OTHERS))]
            store.delete([each for each in own if not keep(topic, each)])
            listed.unlink()
    _remove_if_empty(_directory(root, epoch.pipeline) / epoch.stem())


def has(root: Place, epoch: Epoch, stem: str, topic: Topic) -> bool:
    """True if this try has begun files of the topic under names that begin so."""
    return bool(_lists(root, epoch, stem, topic))


def _lists(root: Place, epoch: Epoch, stem: str, only: Topic) -> list[Place]:
    directory, end = _directory(root, epoch.pipeline) / epoch.stem(), _digest(only) if only else ""
    found = store.names(directory)
    return [directory / name for name in found if name.startswith(stem) and name.endswith(end)]


def _directory(root: Place, pipeline: str) -> Place:
    return root / HIDDEN / ".begun" / quote(pipeline, safe="")


def _digest(topic: Topic) -> str:
    return hashlib.sha256(topic.encode()).hexdigest()[:16]


def _remove_if_empty(directory: Place) -> None:
    if isinstance(directory, Path):
        with contextlib.suppress(OSError):  # not there, or a failed task has left its list for the sweep
            directory.rmdir()
