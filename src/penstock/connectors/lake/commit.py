"""
One epoch of one topic into its target: the compare-and-set loop that all lakes share.

Say that a Delta table is at version 7, and epoch 3 is staged. The loop loads version 7 and reads the marker there: epoch 2.
It checks that the staged files exist, and attempts version 8. If another writer made version 8 first, the loop loads it and
looks at the marker again: if that says epoch 3, a twin of this process has committed it, and all is done. If not, the loop
attempts version 9.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa

from penstock import durable, store
from penstock.connectors.lake import lists
from penstock.connectors.lake.staging import StagedFile, StagedTopic
from penstock.errors import FatalError, RetryableError, StagingLost
from penstock.schema.codec import unpack_schema
from penstock.sink import CommittedEpoch, Epoch, Positions, Topic, is_committed
from penstock.store import Place

TRIES = 20
"""Commits of other writers that one commit gives way to before it fails for a while."""

T = TypeVar("T")


@dataclass(frozen=True)
class Commit:
    """One staged epoch of one topic."""

    epoch: Epoch
    parts: Sequence[StagedTopic]
    end: Positions = field(default_factory=dict)
    applied: Sequence[Any] = ()
    """What the second stage has done for it, if there was work."""

    @property
    def files(self) -> list[StagedFile]:
        return [file for part in self.parts for file in part.files]

    def schemas(self) -> list[pa.Schema]:
        """The columns that each task staged."""
        return self._schemas

    @cached_property
    def _schemas(self) -> list[pa.Schema]:
        return [unpack_schema(part.columns) for part in self.parts]

    def marker(self) -> CommittedEpoch:
        return CommittedEpoch(incarnation=self.epoch.incarnation, number=self.epoch.number, end=dict(self.end))


class LakeTarget(ABC, Generic[T]):
    """
    The target of one topic, on the driver. All that a commit changes belongs to its topic, so that the commits of different
    topics may run at the same time.
    """

    conflicts: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors that say: another writer was first, or the answer was lost. Look again."""

    def __init__(self, topic: Topic, path: Place, root: Place) -> None:
        self.topic = topic
        self.path = path
        self.root = root
        self._was_committed = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The target, in messages: `the Delta table /lake/orders`."""

    @abstractmethod
    def load(self) -> T | None:
        """The target as it is now; None if it does not exist."""

    @abstractmethod
    def marker(self, loaded: T, pipeline: str) -> CommittedEpoch | None:
        """The last epoch of the pipeline in the loaded version."""

    @abstractmethod
    def attempt(self, commit: Commit, loaded: T | None) -> bool:
        """
        Make the version after the loaded one.

        False if the target had to be created or altered first, or if another writer was first: the marker must be read
        again before the next attempt.
        """

    @abstractmethod
    def schema(self) -> pa.Schema | None:
        """The columns of the target as it is now."""

    @abstractmethod
    def is_seeded(self) -> bool:
        """True when the first copy is complete in the target."""

    @abstractmethod
    def mark_seeded(self, now: pa.Schema | None) -> None:
        """Record that the first copy is complete; a target that got no rows is created with the columns `now`."""

    @abstractmethod
    def live_files(self, pipeline: str) -> set[str]:
        """Names of files that no sweep may remove."""

    def place(self, commit: Commit, file: StagedFile) -> Place:
        """Where a staged file is."""
        return self.path / file.path

    def settle(self, loaded: T, epoch: Epoch) -> None:
        """Make the loaded version durable: the process that committed it may have died before its fsync."""

    def saw(self, loaded: T | None) -> None:
        """The target as it is at the start of a run: a chance to note something for tasks."""

    def look(self, commit: Commit) -> T | None:
        """The target as it is now, as far as this commit needs to know it."""
        return self.load()

    def forget(self) -> None:
        """Drop what is cached of the target, after a conflict."""

    def tidy(self, commit: Commit) -> None:
        """Remove what the committed epoch has left over."""

    def commit(self, commit: Commit) -> None:
        """Make the epoch visible exactly once, however often it is called."""
        conflict: Exception | None = None
        for _ in range(TRIES):
            try:
                loaded = self.look(commit)
                if self.is_done(commit.epoch, loaded) or self._was_faster_twin(commit):
                    break
                with durable.disk_errors():
                    if self.attempt(commit, loaded):
                        break
            except self.conflicts as error:
                conflict = error
                self.forget()
        else:
            raise RetryableError(
                f"{self.name} refused {TRIES} commits of {commit.epoch}: {conflict or 'other writers were first'}",
                code="PEN-2005",
            ) from conflict
        self._was_committed = True
        self.tidy(commit)
        lists.drop(self.root, commit.epoch.pipeline, [part.listed for part in commit.parts])

    def is_done(self, epoch: Epoch, loaded: T | None) -> bool:
        """True if the loaded version holds the epoch; it is durable then."""
        marker = self.marker(loaded, epoch.pipeline) if loaded is not None else None
        if marker is None and self._was_committed:
            raise FatalError(
                f"{self.name} was dropped or replaced while the pipeline ran",
                code="PEN-5010",
                hint="restore it; or stop, and start over with `penstock offsets reset FILE`",
            )
        if not is_committed(marker, epoch):
            return False
        assert loaded is not None
        self.settle(loaded, epoch)
        return True

    def committed(self, pipeline: str) -> CommittedEpoch | None:
        """The last epoch of the pipeline in the target as it is now."""
        loaded = self.load()
        self.saw(loaded)
        marker = self.marker(loaded, pipeline) if loaded is not None else None
        if marker is None:
            return None
        self._was_committed = True
        return CommittedEpoch(incarnation=marker.incarnation, number=marker.number, end=marker.end)

    def lost(self, commit: Commit) -> Place | None:
        """A staged file that is gone or has another size."""
        places = [self.place(commit, file) for file in commit.files]
        seen = zip(places, store.heads(places), commit.files, strict=True)
        return next((place for place, found, file in seen if found is None or found.size != file.bytes), None)

    def _was_faster_twin(self, commit: Commit) -> bool:
        """Staged files are there, or a twin of this process has committed and moved or dropped them; else they are lost."""
        lost = self.lost(commit)
        if lost is None:
            return False
        if self.is_done(commit.epoch, self.load()):
            return True
        raise StagingLost(f"{lost} of {commit.epoch} is gone or has another size")
