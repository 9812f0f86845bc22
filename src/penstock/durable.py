"""What "durable" means here: bytes that survive a power cut, in files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.errors import FatalError

Json = Any
"""A value that JSON can hold."""


def canonical(value: Json) -> str:
    """The one way a position, receipt or manifest becomes text: sorted keys, no spaces."""
    return _CANONICAL.encode(value)


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fsync(*paths: str | os.PathLike[str]) -> None:
    """Sync each file and then each directory that names one, once: only then does a file survive a power cut."""
    whole = dict.fromkeys(map(os.path.abspath, paths))
    directories = {os.path.dirname(path) for path in whole}
    with disk_errors():
        for path in (*(path for path in whole if path not in directories), *sorted(directories, reverse=True)):
            _sync(path)


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Sync one file or directory and nothing else; `fsync` is what makes a file durable."""
    with disk_errors(path):
        _sync(path)


def make_directory(path: Path, *, private: bool = False) -> None:
    """Make a directory and its parents, each entry synced in the directory above it; `private`: for this user alone."""
    with disk_errors(path):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        try:
            # Between a private directory and this one nobody else has anything to look for.
            within = private and missing[1:] and not missing[-1].parent.stat().st_mode & 0o077
            for absent in reversed(missing[1:]):
                absent.mkdir(mode=0o700 if within else 0o777, exist_ok=True)
            path.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error
        except FileNotFoundError as error:  # such as in /proc, which looks like a directory that can be written
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), error.filename) from error
        for made in reversed(missing):
            _sync(made.parent)


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """
    Replace `path` by `data`: after a crash it holds the old bytes or the new ones, synced, never a mixture.

    `private`: for this user alone, as everything in a state directory is.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    with disk_errors(path):
        try:
            _write_synced(temporary, data, 0o600 if private else 0o666)
            os.replace(temporary, path)
            _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def publish_once(path: Path, data: bytes) -> bool:
    """
    Create `path` whole and synced if nobody has, the compare-and-set of local files; False if it was there.

    A link and not a rename: a rename would replace what another process published first.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    with disk_errors(path):
        try:
            _write_synced(temporary, data)
            os.link(temporary, path)
            _sync(path.parent)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """
    Turn the disk's refusals into a `FatalError` that says what to do. A failed fsync is never tried again.

    `path` is named when the error names none: a write knows only its descriptor.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError | FileExistsError):
            raise
        hints = {
            errno.ENOSPC: "free some space and start again; nothing that was committed is lost",
            errno.EDQUOT: "raise the quota and start again; nothing that was committed is lost",
            errno.EACCES: "give this user write permission there, or choose another directory",
            errno.EROFS: "choose a directory that can be written",
            errno.ENOTDIR: "a file is where a directory should be: move it away, or choose another path",
            errno.ENAMETOOLONG: "choose a shorter name",
        }
        where = error.filename or path
        raise FatalError(
            f"cannot write{f' {where}' if where else ''}: {os.strerror(error.errno) if error.errno else error}",
            code="PEN-5009",
            hint=hints.get(error.errno or 0, "check the disk"),
        ) from error


class InUse(Exception):
    """Another process holds the lock; `holder` is what it wrote about itself."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path, holder: str) -> int:
    """
    Lock a file for as long as its descriptor is open, here or in a forked child; raises `InUse`.

    The file stays when the lock is gone, so that nobody locks a dead name.
    """
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode(), 0)
    except BlockingIOError:
        found = os.read(descriptor, 4096).decode(errors="replace")
        os.close(descriptor)
        raise InUse(found or "another process") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
