"""A Mosquitto broker for tests, and a way between it and a client that can lose packets."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.testing.processes import wait_until

PROGRAM = shutil.which("mosquitto") or "/usr/sbin/mosquitto"


def is_installed() -> bool:
    return os.access(PROGRAM, os.X_OK)


class Mosquitto:
    """
    A broker on a port of its own, with a log of every packet.

    `settings` are lines of its configuration; `{home}` in them is its directory, which it keeps over restarts.
    """

    def __init__(self, *settings: str, anonymous: bool = True) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="penstock-mosquitto-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        lines = [
            "per_listener_settings false",
            f"allow_anonymous {str(anonymous).lower()}",
            "persistence true",
            f"persistence_location {self.home}/",
            "max_queued_messages 0",
            f"log_dest file {self.home}/log",
            "log_type all",
            f"listener {self.port} 127.0.0.1",
            *(line.replace("{home}", str(self.home)) for line in settings),
        ]
        if not any("max_inflight_messages" in line for line in settings):
            lines.append("max_inflight_messages 100")
        if os.getuid() == 0:
            lines.append("user root")
        (self.home / "conf").write_text("\n".join(lines) + "\n")

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        with open(self.home / "out", "ab") as out:
            self._process = subprocess.Popen(
                [PROGRAM, "-c", str(self.home / "conf")], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        wait_until(self._answers, f"Mosquitto to answer: {(self.home / 'out').read_text()}")

    def stop(self) -> None:
        """End it as a service is ended: it writes down its sessions."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def log(self) -> str:
        path = self.home / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Mosquitto:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.home / "out").read_text()
        return answers(self.port)


class Way:
    """
    Is between clients and a broker, packet by packet.

    `rule(to_broker, packet)` says what becomes of a packet: True passes it on, False loses it, bytes take its place, and None
    ends the connection.
    """

    def __init__(
        self, port: int, rule: Callable[[bool, bytes], bool | bytes | None] = lambda to_broker, packet: True
    ) -> None:
        self.rule = rule
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End every connection."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()
        self.cut()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                broker = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._pairs.append((client, broker))
            for one, other, to_broker in ((client, broker, True), (broker, client, False)):
                threading.Thread(target=self._pass, args=(one, other, to_broker), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, to_broker: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            for packet in _packets(one):
                fate = self.rule(to_broker, packet)
                if fate:
                    other.sendall(fate if isinstance(fate, bytes) else packet)
                elif fate is None:
                    break
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _packets(sock: socket.socket) -> Iterator[bytes]:
    with sock.makefile("rb") as file:
        while head := file.read(1):
            length = shift = 0
            while True:
                one = file.read(1)
                head += one
                length |= (one[0] & 127) << shift
                shift += 7
                if not one[0] & 128:
                    break
            yield head + file.read(length)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True
