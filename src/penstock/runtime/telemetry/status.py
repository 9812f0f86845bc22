"""What the fronts ask of a status: is the pipeline well, does it do its work, and what did the last one leave on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from penstock.durable import Json
from penstock.runtime.telemetry.waits import in_words
from penstock.source import HealthState

log = logging.getLogger("penstock")

STATUS_FILE = "status.json"
_MOST_BYTES = 64_000_000
"""More than any status; one with 10,000 tables has about 5 MB."""

ENDED = ("stopped", "failed", "dead")
"""The states a pipeline does not leave by itself."""


@dataclass(frozen=True)
class Verdict:
    """What health checks answer, and why."""

    ok: bool
    reason: str


def assess(status: Mapping[str, Json]) -> tuple[str, list[str]]:
    """
    The state of a whole pipeline and what is wrong with it: the one judgement that every front shows.

    It is as well as the worst of its parts. A status that was read from disk is judged again: its clock went on.
    """
    own = status["own"]
    if own["state"] in ENDED:
        return own["state"], [own["reason"]] if own["reason"] else []
    parts = [(f"{kind[:-1]} {name}", part) for kind in ("sources", "sinks") for name, part in status[kind].items()]
    named = [(own["state"], own["reason"])]
    named += [(part["state"], f"{name} is {part['state']}: {part['reason']}") for name, part in parts]
    patience = patience_secs(status["health_timeout_secs"])
    for what, part in (("the pipeline", own), *parts):
        if part["failing_secs"] > patience:
            text = f"{what} has been failing for {part['failing_secs']:.0f} s: {part['reason']}"
            named.insert(0, (HealthState.UNHEALTHY, text))
    if stuck := _stuck(status):
        named.insert(0, (HealthState.UNHEALTHY, stuck))
    problems = {
        level: [reason for state, reason in named if state == level and reason]
        for level in (HealthState.UNHEALTHY, HealthState.DEGRADED)
    }
    if any(state == HealthState.UNHEALTHY for state, _ in named):
        return "unhealthy", [*problems[HealthState.UNHEALTHY], *problems[HealthState.DEGRADED]]
    if own["state"] == HealthState.UNKNOWN:
        return "starting", problems[HealthState.DEGRADED]
    if any(state == HealthState.DEGRADED for state, _ in named):
        return "degraded", problems[HealthState.DEGRADED]
    return "running", []


def patience_secs(timeout: float) -> float:
    """How long something may fail before it counts as unhealthy: the answer is there within the timeout of the file."""
    return max(timeout / 2, timeout - 10)


def _stuck(status: Mapping[str, Json]) -> str:
    quiet, epoch = status["quiet_secs"], status["epoch"]
    if quiet <= patience_secs(status["health_timeout_secs"]):
        return ""
    if epoch:
        return f"epoch {epoch['number']} made no progress for {quiet:.0f} s, in {epoch['phase']}"
    if status["own"]["state"] == HealthState.UNKNOWN:
        return f"starting for {quiet:.0f} s: {_start(status) or 'no engine yet'}"
    return ""


def sum_up(status: dict[str, Json]) -> None:
    """
    Put the state and the problems into a status.

    What has ended moves no rows and listens nowhere: its last rates, lags, ports and good health must not be taken for
    those of now.
    """
    status["state"], status["problems"] = assess(status)
    if status["state"] not in ENDED:
        return
    status["rows"] |= {"in_per_sec": 0.0, "out_per_sec": 0.0}
    status["ports"] = []
    for source in status["sources"].values():
        source |= {"rows_per_sec": 0.0, "lag": None, "unacked_secs": 0.0}
    for sink in status["sinks"].values():
        for topic in sink["topics"].values():
            topic |= {"rows_per_sec": 0.0, "bytes_per_sec": 0.0}
    for part in (*status["sources"].values(), *status["sinks"].values()):
        if part["state"] == HealthState.HEALTHY:
            part["state"] = str(HealthState.UNKNOWN)


def judge(status: Mapping[str, Json]) -> Verdict:
    """Whether a pipeline with this status is alive: not dead, not sick, and not stuck with work in hand."""
    state, problems = assess(status)
    reason = "; ".join(problems)
    if state == "unhealthy":
        return Verdict(False, reason or state)
    return Verdict(state not in ENDED, f"{state}: {reason}" if reason else state)


def ready(status: Mapping[str, Json]) -> Verdict:
    """Whether the pipeline does its work: an epoch was committed, or the sources are open and have nothing to read."""
    verdict = judge(status)
    if not verdict.ok or status["epochs"] or assess(status)[0] != "starting":
        return verdict
    return Verdict(False, f"starting: {_start(status)}".removesuffix(": "))


def _start(status: Mapping[str, Json]) -> str:
    """How far a start has come."""
    waits = in_words(status)
    return f"waits for {waits}" if waits else str(status["engine"])


def failed_tables(status: Mapping[str, Json]) -> dict[str, Json]:
    """The tables that are set aside, by name, each with what went wrong."""
    return {
        table: why
        for source in status["sources"].values()
        for table, why in source.get("tables", {}).get("failed", {}).items()
    }


def read_status(state_dir: Path) -> dict[str, Json] | None:
    """
    The status that a pipeline left in its state directory; None if it never ran.

    It tells the truth about a process that is gone: its state is then `dead`, unless it had ended.
    """
    try:
        status: dict[str, Json] = json.loads(_content(state_dir / STATUS_FILE))
        age = max(0.0, time.time() - datetime.fromisoformat(status["updated_at"]).timestamp())
        ended = status["own"]["state"] in ENDED
        here = status["host"] == socket.gethostname()
        alive = not here or process_started(status["pid"]) == status["process_started"] is not None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):  # not ours, or half a file of a machine that lost power
        return None
    if not ended and not alive:
        status |= {
            "own": {
                "state": "dead",
                "reason": f"process {status['pid']} ended without a final status (killed?)",
                "failing_secs": 0.0,
            },
            "epoch": None,
            "waits": [],
        }
    elif not ended:
        status["uptime_secs"] += age
        status["quiet_secs"] += age
        for each in status.get("waits", ()):
            each["secs"] += age
    sum_up(status)
    if not ended and not here:  # its process cannot be looked at from this machine
        status["problems"].append(f"last heard of {age:.0f} s ago, on {status['host']}")
    status["reason"] = "; ".join(status["problems"])
    return status


def _content(path: Path) -> bytes:
    """Of a plain file that is not absurdly large: what is found on a machine may be a pipe, or without an end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is no plain file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than any status")
    return data


def process_started(pid: int) -> str | None:
    """When a process began, so that another one with its number is not taken for it; None if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else after_name[19]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


class StatusFile:
    """Keeps `status.json` in a state directory, at most one write a second, from a thread of its own."""

    def __init__(self, status: Callable[[], Json]) -> None:
        self._status = status
        self._path: Path | None = None
        self._changed = threading.Event()
        self._closed = False
        self._writing = threading.Lock()

    def begin(self, state_dir: Path) -> None:
        """Write it now, and whenever something has changed."""
        self._path = state_dir / STATUS_FILE
        self._changed.clear()
        self._write(self._path)
        threading.Thread(target=self._keep_writing, args=[self._path], name="penstock-status", daemon=True).start()

    def changed(self) -> None:
        self._changed.set()

    def close(self) -> None:
        """Write it for the last time."""
        self._closed = True
        self._changed.set()
        if self._path is not None:
            self._write(self._path)

    def _keep_writing(self, path: Path) -> None:
        while not self._closed:
            self._changed.wait()
            self._changed.clear()
            if not self._closed:
                self._write(path)
                time.sleep(1)

    def _write(self, path: Path) -> None:
        temporary = path.with_name(f".{STATUS_FILE}.{uuid4().hex[:8]}")
        with self._writing:  # asking and replacing are one step: an older status never follows the last one
            try:  # it steers nothing, so it is not synced, and a full disk does not stop a pipeline here
                temporary.touch(0o600)
                temporary.write_text(json.dumps(self._status(), ensure_ascii=False, indent=1))
                os.replace(temporary, path)
            except OSError as error:
                log.debug("cannot write %s: %s", path, error.strerror)
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
