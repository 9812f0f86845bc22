"""The ports on which a run listens, its JVM and its workers among it: as the system lists them, so that none is left out."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.durable import Json

_LISTENS = "0A"


def listening(pid: int | None = None) -> list[dict[str, Json]]:
    """Address, port and program of every socket on which this process or one that it started listens; Linux only."""
    sockets = dict(_sockets())
    found = {
        (address, port): program
        for each in _family(pid or os.getpid())
        for inode in _inodes(each)
        if inode in sockets
        for (address, port), program in [(sockets[inode], _program(each))]
    }
    return [
        {"address": address, "port": port, "program": program} for (address, port), program in sorted(found.items())
    ]


def _family(pid: int) -> list[int]:
    family = [pid]
    for each in family:
        for thread in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                family += map(int, thread.read_text().split())
    return family


def _inodes(pid: int) -> Iterator[str]:
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(entry.path)
            except OSError:
                continue
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        return


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _sockets() -> Iterator[tuple[str, tuple[str, int]]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENS:
                address, _, port = words[1].partition(":")
                yield words[9], (_address(address), int(port, 16))


def _address(text: str) -> str:
    """As the kernel prints it: words of four bytes, each in the machine's order."""
    packed = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
