"""The state directory: its lock, its identity, its manifests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from penstock.durable import InUse, Json, canonical, disk_errors, lock_file, make_directory, write_atomic
from penstock.errors import ConfigError, FatalError
from penstock.runtime.epochs.manifest import Identity, Manifest
from penstock.runtime.epochs.replica import Replica, refuse_copy
from penstock.sink import Epoch, Topic
from penstock.store import Place

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

FORMAT = 1
"""Version of everything in the state directory; a newer one is refused."""

KEPT = 100
"""Committed manifests that stay for people to look at."""

M = TypeVar("M", bound=BaseModel)


class State:
    """The state directory: one lock, one identity, one manifest per epoch. `open` it before use."""

    def __init__(self, directory: Path, pipeline: str, place: Place | None = None) -> None:
        """`place`: where in a store the state is kept, of which the directory is then a copy."""
        self.directory = directory
        self.pipeline = pipeline
        self.place = place
        self._replica = None if place is None else Replica(place, directory, _holder(pipeline))
        self.newest: Manifest | None = None
        self.fresh = False
        self.identity = Identity(pipeline=pipeline, incarnation=str(uuid4()))
        self._lock: int | None = None

    @classmethod
    def of(cls, pipeline: Pipeline) -> State:
        """The state of a pipeline, where its file says that it is."""
        return cls(pipeline.processing.state_dir, pipeline.name, pipeline.processing.state_place)

    def open(self) -> None:
        """Take the lock and read everything; refuses what is corrupt, newer, another pipeline's or in use."""
        make_directory(self.directory, private=True)
        refuse_foreign(self.directory)
        _close_to_others(self.directory)
        self._lock = _take_lock(self.directory / "lock", self.pipeline)
        try:
            if self._replica is not None:
                self._replica.open()
            else:
                refuse_copy(self.directory)
            make_directory(self._epochs, private=True)
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._replica is not None:
            self._replica.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def peek(self) -> State:
        """Read without the lock, for `status` and `offsets show`; of a state in a store, what is there now."""
        if self._replica is not None:
            make_directory(self.directory, private=True)
            with contextlib.suppress(InUse):  # by a run from here, whose directory is what it has recorded
                lock = lock_file(self.directory / "lock", "a command that looks at the state")
                try:
                    self._replica.fetch()
                finally:
                    os.close(lock)
        self._read()
        return self

    def record(self, *always: Path) -> None:
        """Make durable elsewhere what has changed in the directory, if that is where the state is kept."""
        if self._replica is not None and self._lock is not None:
            self._replica.record(*always)

    def save_identity(self, **changes: Json) -> None:
        self.identity = self.identity.model_copy(update=changes)
        _store(self.directory / "pipeline.json", self.identity)
        self.record(self.directory / "pipeline.json")

    def save(self, manifest: Manifest) -> Manifest:
        """Make the manifest durable; it replaces the one of the same epoch."""
        path = self._epochs / f"{manifest.number:012d}.json"
        _store(path, manifest)
        self.record(path)
        self.newest = manifest
        if manifest.state == "committed" and manifest.number % KEPT == 0:
            self._retire(manifest.number - KEPT, keep=manifest.unswept)
        return manifest

    def load(self, number: int) -> Manifest | None:
        path = self._epochs / f"{number:012d}.json"
        return _load(path, Manifest) if path.exists() else None

    def edges(self, source: str) -> dict[str, Json]:
        """Up to where a source is `committed`, and up to where it is `planned`; None where nothing is."""
        newest = self.newest
        span = newest.ranges.get(source) if newest else None
        if newest is None or span is None:
            return {"committed": None, "planned": None}
        return {"committed": span.end if newest.state == "committed" else span.start, "planned": span.end}

    def epoch(self, manifest: Manifest, attempt: str | None = None) -> Epoch:
        """The epoch of a manifest, as connectors see it: of one of its tries, by default the newest at staging."""
        adopts = frozenset((incarnation, number) for incarnation, number in self.identity.adopts)
        if manifest.only is not None:
            # Topics that missed the epoch which this one completes: if they have it by now, another run is alive.
            adopts -= {tuple(self.identity.replaces[-1])}
        return Epoch(
            manifest.pipeline,
            manifest.incarnation,
            manifest.number,
            attempt or manifest.attempts[-1],
            adopts=adopts,
            start={source: span.start for source, span in manifest.ranges.items()},
            end={source: span.end for source, span in manifest.ranges.items()},
        )

    def renew(self, begin: Callable[[str], Manifest] | None = None) -> None:
        """
        Begin a new incarnation; its first epoch is number 1. The old manifests are kept aside.

        `begin` gives a committed epoch of it, from whose ends it goes on; None: from the beginning.
        """
        old, last = self.identity.incarnation, self.newest.number if self.newest else 0
        new, replaces = str(uuid4()), [*self.identity.replaces, (old, last)]
        resumes = begin(new) if begin is not None else None
        shape = None if resumes is None else self.identity.shape
        # Identity first: after a crash in between, the manifests of another incarnation are set aside when read.
        self.save_identity(incarnation=new, replaces=replaces, adopts=[], resumes=resumes, shape=shape)
        self._set_aside(old)
        self.record()
        self.newest = resumes

    @property
    def _epochs(self) -> Path:
        return self.directory / "epochs"

    def _read(self) -> None:
        identity = self.directory / "pipeline.json"
        files = sorted(self._epochs.glob("[0-9]*.json")) if self._epochs.exists() else []
        if not identity.exists():
            if files:
                raise FatalError(
                    f"{identity} is missing, but there are manifests beside it",
                    code="PEN-5004",
                    hint=f"restore it from a copy; or move {self.directory} away to be asked where to go on",
                )
            self.fresh = True
            if self._lock is not None:
                self.save_identity()
            return
        self.identity = _load(identity, Identity)
        if self.identity.pipeline != self.pipeline:
            raise FatalError(
                f"{self.directory} belongs to the pipeline {self.identity.pipeline!r}, not to {self.pipeline!r}",
                code="PEN-5003",
                hint="give each pipeline a `state_dir` of its own",
            )
        if files:
            newest = _load(files[-1], Manifest)
            if newest.incarnation == self.identity.incarnation:
                self.newest = newest
            elif self._lock is not None:
                self._set_aside(newest.incarnation)
        if self.newest is None:
            self.newest = self.identity.resumes

    def _set_aside(self, incarnation: str) -> None:
        with disk_errors():
            if self._epochs.exists():
                os.replace(self._epochs, self.directory / f"epochs-{incarnation}")
        make_directory(self._epochs, private=True)

    def _retire(self, below: int, keep: Iterable[int]) -> None:
        kept = {f"{number:012d}.json" for number in keep}
        for file in self._epochs.glob("[0-9]*.json"):
            if file.name < f"{below:012d}.json" and file.name not in kept:
                file.unlink(missing_ok=True)


def reset(directory: Path, pipeline: str, place: Place | None = None) -> None:
    """`offsets reset`: the next run reads every source from its beginning, in a new incarnation."""
    state = State(directory, pipeline, place)
    state.open()
    try:
        state.renew()
    finally:
        state.close()


def restage(directory: Path, pipeline: str, without: Sequence[Topic] = (), place: Place | None = None) -> Manifest:
    """
    `offsets restage`: the next run stages again what the epoch in hand has not committed; gives that epoch.

    One that is only planned is bound to versions of schemas: it takes those that the file asks for then.
    """
    state = State(directory, pipeline, place)
    state.open()
    try:
        newest = state.newest
        if newest is not None and newest.state == "planned" and newest.versions and not without:
            return state.save(newest.model_copy(update={"versions": {}}))
        if newest is None or newest.state != "prepared":
            raise ConfigError(
                f"no epoch of {pipeline} is prepared, so there is nothing to stage again",
                hint="start the pipeline: it plans or stages its next epoch by the file as it is now",
            )
        unknown = sorted(set(without) - {topic for topics in newest.rows_out.values() for topic in topics})
        if unknown:
            raise ConfigError(
                f"epoch {newest.number} has no rows for {', '.join(unknown)}",
                hint="`penstock offsets show FILE` lists its topics",
            )
        return state.save(newest.model_copy(update={"restage": sorted(set(without))}))
    finally:
        state.close()


def forget(
    directory: Path, pipeline: str, topics: Sequence[Topic], place: Place | None = None
) -> list[tuple[str, Topic]]:
    """`offsets forget`: the next run does not miss what was committed to these topics; gives their targets."""
    state = State(directory, pipeline, place)
    state.open()
    try:
        newest = state.newest
        held = newest.held if newest is not None else {}
        forgotten = [
            (sink, topic) for sink, known in sorted(held.items()) for topic in sorted(known) if topic in topics
        ]
        unknown = sorted(set(topics).difference(topic for _, topic in forgotten))
        if newest is None or unknown:
            every = sorted({topic for known in held.values() for topic in known})
            raise ConfigError(
                f"no epoch of {pipeline} was committed to {', '.join(unknown or topics)}",
                hint=f"topics that targets hold: {', '.join(every[:10]) or 'none'}{' …' if len(every) > 10 else ''}",
            )
        left = {
            sink: {topic: one for topic, one in known.items() if topic not in topics} for sink, known in held.items()
        }
        state.save(newest.model_copy(update={"held": left}))
        return forgotten
    finally:
        state.close()


def _store(path: Path, value: BaseModel) -> None:
    body = canonical(value.model_dump(mode="json"))
    write_atomic(
        path, canonical({"format": FORMAT, "crc32": zlib.crc32(body.encode()), "body": body}).encode(), private=True
    )


def _load(path: Path, kind: type[M]) -> M:
    try:
        stored = json.loads(path.read_bytes())
        version, checksum, body = stored["format"], stored["crc32"], stored["body"]
        if version <= FORMAT:
            if zlib.crc32(body.encode()) != checksum:
                raise ValueError("its checksum does not match")
            return kind.model_validate_json(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ValidationError is a ValueError
        reason = "it does not hold what it should" if isinstance(error, ValidationError | KeyError) else str(error)
        raise FatalError(
            f"{path} is corrupt: {reason}",
            code="PEN-5004",
            hint="restore it from a copy; or move the state directory away to be asked where to go on",
        ) from error
    raise FatalError(
        f"{path} has format {version}, and this Penstock knows {FORMAT}", code="PEN-5006", hint="run the newer version"
    )


def refuse_foreign(directory: Path) -> None:
    """Refuse a directory of another user in which everybody can write: its manifests may be anybody's."""
    found = os.stat(directory)
    if found.st_mode & stat.S_IWOTH and found.st_uid != os.geteuid():
        raise FatalError(
            f"everybody can write in {directory}, and it belongs to another user (uid {found.st_uid})",
            hint=f"chmod o-w {directory}, if what is in it is yours; or choose another `state_dir` under [processing]",
        )


def _close_to_others(directory: Path) -> None:
    """Let nobody else write in a directory that is ours and was made wider."""
    found = os.stat(directory)
    if found.st_mode & 0o022 and found.st_uid == os.geteuid():
        with disk_errors(directory):
            os.chmod(directory, stat.S_IMODE(found.st_mode) & ~0o022)


def _holder(pipeline: str) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} ({pipeline}, since {since})"


def _take_lock(path: Path, pipeline: str) -> int:
    try:
        return lock_file(path, _holder(pipeline))
    except InUse as other:
        raise FatalError(
            f"{path.parent} is in use by {other.holder}",
            code="PEN-5002",
            hint="wait until it has ended or stop it; two runs of one pipeline never share a state directory",
        ) from None
