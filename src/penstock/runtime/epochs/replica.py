"""
A state directory that outlives its machine: what changes in it is a log of objects in a store, and the directory is a copy.

Each entry of the log holds files that were written, grew or went since the entry before, under the next number. An entry is
created only where nothing is (If-None-Match), so two runs never both write the same number, and what a run has recorded is
exactly what its successor finds:

1. A run begins by reading the whole log into its directory and creating an entry that names it. That entry is never deleted.
   From here on the run before it, should it still be alive, meets that entry with its next one, and is fenced.
2. A manifest counts once it is recorded, together with all else that has changed by then; rows of a journal are recorded
   before anybody outside hears of them.
3. An answer that never comes, after a minute of tries, ends the run, as a failed fsync does: its successor reads what is true.

A lease beside the log only keeps people from starting a second run by mistake. Nothing relies on its clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from penstock import store
from penstock.durable import Json, canonical, disk_errors, make_directory, write_atomic
from penstock.errors import ConnectorError, FatalError, Fenced, RetryableError
from penstock.runtime.epochs.entries import Entry, Garbage, Piece

LEASE_SECS = 30.0
"""A run that has not renewed its lease for this long is taken for dead."""

PATIENCE_SECS = 60.0
"""How long an unreachable store is asked again before the run ends."""

ENTRY_BYTES = 64 << 20
"""About the most that one entry holds; what has changed beyond it goes into further ones."""

TRIES = 20
"""How often a log is read again that its writer tidies, or adds to, meanwhile."""

OWN = {
    *("lock", "lock.jvm", "copy"),
    *("status.json", "spark.log", "history", "audit.jsonl"),  # for people
    *("control", "requests"),  # commands that wait here for a run
    "sinks",  # staged rows, which can be staged again
}
"""Names at the top that belong to this machine."""

_WAITING = re.compile(r"sources/[^/]+/requests")
"""Where commands for one source wait."""

GROWS = (".arrow", ".index", ".jsonl")
"""Files of which only what was appended is recorded."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")
_SETTLED_NS = 50_000_000
"""A file that is younger may change once more without looking different."""
_TAIL = 4096

_log = logging.getLogger("penstock.message")


@dataclass
class _Known:
    """A file as it was last recorded."""

    seen: tuple[int, ...] | None
    """What `stat` said; None: look into it again."""
    inode: int
    size: int
    checksum: int
    last: bytes
    """Its last bytes, by which a file that only grew is known."""


class Replica:
    """The log of one state directory. `open` reads it and takes it over; `fetch` only reads it."""

    def __init__(self, place: store.Place, directory: Path, holder: str) -> None:
        self.place = place
        self.directory = directory
        self._holder = holder
        self._log_place = place / "log"
        self._next = 0
        self._known: dict[str, _Known] = {}
        self._garbage = Garbage()
        self._lock = threading.Lock()
        self._failure: ConnectorError | None = None
        self._token = ""
        self._lease: _Lease | None = None

    # -- a run -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Wait for the lease, make the directory what the log says, and take the log over."""
        try:
            store.refuse_without_conditions(self.place)
            store.make_directory(self._log_place)
            self._token = self._own_token()
            lease = _Lease(self.place / "lease", self._token, self._holder)
            lease.wait()
            self._take_over()
            lease.hold()
        except RetryableError as error:
            raise FatalError(
                f"the state in {self.place} cannot be read: {error.message}",
                code="PEN-5001",
                hint="start again when the store answers",
            ) from error
        self._lease = lease

    def _take_over(self) -> None:
        begins = Entry(self._token, self._holder, begins=True)
        for _ in range(TRIES):
            self.fetch()
            if (
                not self._next
            ):  # what a directory has that had no store before is one entry, there as a whole or not at all
                for entry in self._entries((), most=1 << 62):
                    if store.create(self._at(0), entry.packed()):
                        self._garbage.add(0, entry)
                        self._next = 1
            if store.create(self._at(self._next), begins.packed()):
                self._garbage.add(self._next, begins)
                self._next += 1
                return
        what = f"{self.place} is written to by another run"
        raise FatalError(what, code="PEN-5002", hint="stop it, or wait until it has ended")

    def close(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def record(self, *always: Path) -> None:
        """Make durable what has changed in the directory; these files in any case, and last."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                for entry in self._entries(always):
                    self._append(entry)
            except ConnectorError as error:
                self._failure = error
                raise
            self._tidy()

    def fetch(self) -> None:
        """Make the directory what the log says. One without a log yet keeps what it has."""
        self._token = self._own_token()
        for _ in range(TRIES):
            with contextlib.suppress(FileNotFoundError):  # its writer has deleted what a later entry replaces
                return self._read()
        raise RetryableError(f"the state in {self.place} changes faster than it can be read", code="PEN-2001")

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        numbers = sorted(int(name) for name in store.names(self._log_place) if name.isdigit())
        self._garbage, self._known = Garbage(), {}
        self._next = numbers[-1] + 1 if numbers else 0
        if not numbers:
            return
        with disk_errors(self.directory):
            for path in list(_files(self.directory)):
                (self.directory / path).unlink(missing_ok=True)
            for number, entry in self._fetched(numbers):
                self._garbage.add(number, entry)
                self._apply(entry)
        for path in _files(self.directory):
            self._look(path)

    def _fetched(self, numbers: Sequence[int]) -> Iterator[tuple[int, Entry]]:
        def get(number: int) -> Entry:
            place = self._at(number)
            return Entry.unpacked(place.read_bytes(), str(place))

        with ThreadPoolExecutor(8, "penstock-state") as pool:
            for first in range(0, len(numbers), 32):
                some = numbers[first : first + 32]
                yield from zip(some, pool.map(get, some), strict=True)

    def _apply(self, entry: Entry) -> None:
        for name in entry.removed:
            (self.directory / name).unlink(missing_ok=True)
        for piece in entry.pieces:
            path = self.directory / piece.path
            _make_private(path.parent, self.directory)
            flags = os.O_WRONLY | os.O_CREAT | (0 if piece.at else os.O_TRUNC)
            descriptor = os.open(path, flags, 0o600)
            try:
                os.pwrite(descriptor, piece.data, piece.at)
            finally:
                os.close(descriptor)

    def _refuse_other_state(self) -> None:
        """A directory with a state that no store has must not be emptied."""
        copy = self.directory / "copy"
        is_ours = copy.exists() and json.loads(copy.read_text())["of"] == str(self.place)
        if (self.directory / "pipeline.json").exists() and not is_ours and store.names(self._log_place):
            raise FatalError(
                f"{self.directory} holds a state of its own, and {self.place} holds another",
                code="PEN-5003",
                hint=f"move {self.directory} away if the one in the store is right; else choose another `state_store`",
            )

    def _own_token(self) -> str:
        """Tells the copy in this directory from others: its lock is held, so an earlier run from here has ended."""
        self._refuse_other_state()
        make_directory(self.directory, private=True)
        copy = self.directory / "copy"
        if copy.exists():
            found = json.loads(copy.read_text())
            if found["of"] == str(self.place):
                return str(found["token"])
        token = uuid4().hex
        write_atomic(copy, canonical({"of": str(self.place), "token": token}).encode(), private=True)
        return token

    # -- writing ---------------------------------------------------------------------------------------------------

    def _entries(self, always: Sequence[Path], most: int = ENTRY_BYTES) -> Iterator[Entry]:
        """What has changed, as few entries as will hold it. Data of a journal comes first, then the index that names it."""
        last = [str(path.relative_to(self.directory)) for path in always]
        # An index is looked at before its data, which is written first: what it names is there.
        paths = sorted(_files(self.directory), key=lambda path: (not path.endswith(".index"), path))
        found = {path: piece for path in paths if (piece := self._look(path, path in last)) is not None}
        removed = [path for path in self._known if path not in set(paths)]
        for path in removed:
            del self._known[path]
        if not found and not removed:
            return
        entry, size = Entry(self._token, self._holder), 0
        for path in sorted(found, key=lambda path: (path in last, path.endswith(".index"), path)):
            if size and size + len(found[path].data) > most:
                yield entry
                entry, size = Entry(self._token, self._holder), 0
            entry.pieces.append(found[path])
            size += len(found[path].data)
        entry.removed.extend(removed)
        yield entry

    def _look(self, path: str, always: bool = False) -> Piece | None:
        """What is to be recorded of a file, which is known from then on."""
        known, file = self._known.get(path), self.directory / path
        try:
            if known is not None and known.seen == _seen(os.stat(file)) and not always:
                return None
            with open(file, "rb") as opened:
                about = os.fstat(opened.fileno())
                seen = _seen(about)
                grew = known is not None and path.endswith(GROWS) and known.inode == about.st_ino
                if known is not None and grew and known.size <= about.st_size:
                    opened.seek(known.size - len(known.last))
                    if opened.read(len(known.last)) == known.last:
                        return self._grown(path, known, opened.read(about.st_size - known.size), seen)
                    opened.seek(0)
                data = opened.read(about.st_size)
        except FileNotFoundError:
            return None
        is_settled = path.endswith(GROWS) or time.time_ns() - about.st_mtime_ns > _SETTLED_NS
        checksum = zlib.crc32(data)
        is_same = known is not None and (known.size, known.checksum) == (len(data), checksum)
        now = _Known(seen if is_settled else None, about.st_ino, len(data), checksum, data[-_TAIL:])
        self._known[path] = now
        return None if is_same and not always else Piece(path, 0, data)

    def _grown(self, path: str, known: _Known, data: bytes, seen: tuple[int, ...]) -> Piece | None:
        at = known.size
        last = (known.last + data)[-_TAIL:]
        self._known[path] = _Known(seen, known.inode, at + len(data), zlib.crc32(data, known.checksum), last)
        return Piece(path, at, data) if data else None

    def _append(self, entry: Entry) -> None:
        place, data, give_up, pause = self._at(self._next), entry.packed(), time.monotonic() + PATIENCE_SECS, 0.2
        while True:
            try:
                if store.create(place, data):
                    break
                raise Fenced(
                    f"{self._successor(place)} has taken over the state in {self.place}",
                    hint="stop one of the two runs; nothing is lost or doubled",
                )
            except RetryableError as error:
                if time.monotonic() > give_up:
                    raise FatalError(
                        f"the state in {self.place} cannot be written: {error.message}",
                        code="PEN-5009",
                        hint="start again when the store answers: nothing that was committed is lost",
                    ) from error
                _log.warning("%s; once more in %.1f s", error, pause)
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
        self._garbage.add(self._next, entry)
        self._next += 1

    def _successor(self, place: store.Place) -> str:
        try:
            return Entry.unpacked(place.read_bytes(), str(place)).holder
        except (ConnectorError, FileNotFoundError):
            return "another run"

    def _tidy(self) -> None:
        """Delete entries that nothing is left of."""
        numbers = self._garbage.ready()
        if len(numbers) < TIDY:
            return
        with contextlib.suppress(RetryableError):  # it costs room, and is tried again
            store.delete([self._at(number) for number in numbers])
            self._garbage.deleted(numbers)

    def _at(self, number: int) -> store.Place:
        return self._log_place / f"{number:012d}"


TIDY = 32
"""So many entries are deleted at once."""


class _Lease:
    """Says who runs, for people. Renewed by a thread; one that is not renewed is taken for that of a dead run."""

    def __init__(self, place: store.Place, token: str, holder: str) -> None:
        self._place, self._token, self._holder = place, token, holder
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._beats = 0

    def wait(self) -> None:
        """Return once nobody holds it; refuses if somebody renews it meanwhile."""
        seen = self._read()
        if seen is None or seen.get("token") in (None, self._token):
            return
        _log.warning("the state was left by %s: waiting %.0f s whether it still runs", seen["holder"], LEASE_SECS)
        give_up = time.monotonic() + LEASE_SECS
        while time.monotonic() < give_up:
            time.sleep(LEASE_SECS / 30)
            now = self._read()
            if now is None or now.get("token") is None:
                return
            if now != seen:
                raise FatalError(
                    f"{self._place.parent} is in use by {now['holder']}",
                    code="PEN-5002",
                    hint="wait until it has ended or stop it; two runs of one pipeline never share a state",
                )

    def hold(self) -> None:
        self._write()
        self._thread = threading.Thread(target=self._renew, name="penstock-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(ConnectorError):  # then the next run waits
            if self._is_ours():
                store.put(self._place, canonical({"token": None}).encode())

    def _renew(self) -> None:
        while not self._done.wait(LEASE_SECS / 3):
            with contextlib.suppress(ConnectorError):
                if not self._is_ours():
                    return  # the next entry of the log says so
                self._write()

    def _is_ours(self) -> bool:
        return (self._read() or {}).get("token") == self._token

    def _write(self) -> None:
        self._beats += 1
        lease = {"token": self._token, "holder": self._holder, "beat": self._beats}
        store.put(self._place, canonical(lease).encode())

    def _read(self) -> Json:
        try:
            return json.loads(self._place.read_bytes())
        except FileNotFoundError:
            return None


def refuse_copy(directory: Path) -> None:
    """A copy is nobody's state by itself: what is written there would be gone with the next run that has the store."""
    copy = directory / "copy"
    if copy.exists():
        where = json.loads(copy.read_text())["of"]
        raise FatalError(
            f"{directory} is a copy of the state in {where}",
            code="PEN-5003",
            hint=f'set `state_store = "{where}"` again; or remove {copy} to go on with the copy alone, if nothing else does',
        )


def _files(directory: Path) -> Iterator[str]:
    """The files that are recorded, by their paths in the directory."""
    for folder, names, files in os.walk(directory):
        within = os.path.relpath(folder, directory)
        is_top = within == "."
        names[:] = [
            name for name in names if not (is_top and name in OWN) and not _WAITING.fullmatch(f"{within}/{name}")
        ]
        for name in files:
            if (is_top and name in OWN) or name == "lock" or _TEMPORARY.fullmatch(name):
                continue
            path = name if is_top else os.path.join(within, name)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(os.lstat(directory / path).st_mode):
                    yield path


def _seen(about: os.stat_result) -> tuple[int, ...]:
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _make_private(directory: Path, top: Path) -> None:
    """Make a directory below `top` for this user alone. Nothing is synced: the log is what counts."""
    for each in reversed(
        [path for path in (directory, *directory.parents) if path != top and path.is_relative_to(top)]
    ):
        each.mkdir(mode=0o700, exist_ok=True)
