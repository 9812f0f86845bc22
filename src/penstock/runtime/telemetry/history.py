"""The last hours of a pipeline, in small files of a fixed size that outlive the process."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.durable import Json
from penstock.runtime.telemetry.names import PHASES

log = logging.getLogger("penstock")

FOLDER = "history"

FIELDS = (
    "rows_in",
    "rows_out",
    "bytes_out",
    "dead_letters",
    "retries",
    "epochs",
    "lag_rows",
    "lag_bytes",
    "latency",
    "journal",
    "health",
)
"""What a sample holds, after its time."""

COUNTED = 6
"""The first so many fields count what happened since the sample before; the others are as they are at that time."""

EPOCH_FIELDS = ("number", "rows_in", "rows_out", *PHASES)
"""What is kept of an epoch, after the time of its commit."""

HEALTH = {"running": 0.0, "starting": 0.0, "degraded": 1.0, "unhealthy": 2.0, "failed": 2.0}
"""The state of a pipeline as a number."""

FINE_SECS, COARSE_SECS = 5, 60
_SLOTS = 1440
"""Two hours of fine samples, a day of coarse ones."""
_EPOCHS = 400
RUNS_FILE, _RUNS = "runs.json", 20
"""Runs before this one that are kept."""

_MAGIC = b"PENRING1"


class Ring:
    """A file that holds the newest records. One that is half written, or of another version, is not read."""

    def __init__(self, path: Path, fields: int, slots: int) -> None:
        self._path = path
        self._slots = slots
        self._record = struct.Struct(f"<II{fields + 1}d")
        self._head = _MAGIC + struct.pack("<II", self._record.size, slots)
        self._known = False

    def put(self, place: int, at: float, values: Sequence[float]) -> None:
        """Keep a record in a place, in which a later one of the same place (modulo the slots) replaces it."""
        body = self._record.pack(0, 0, at, *values)[8:]
        record = struct.pack("<II", zlib.crc32(body), 0) + body
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            if not self._known and file.read(len(self._head)) != self._head:
                file.truncate(0)
                file.seek(0)
                file.write(self._head)
            self._known = True
            file.seek(len(self._head) + place % self._slots * self._record.size)
            file.write(record)

    def read(self) -> list[tuple[float, ...]]:
        """The records, the oldest first."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return []
        if not data.startswith(self._head):
            return []
        found = []
        size = self._record.size
        for start in range(len(self._head), len(data) - size + 1, size):
            checksum, _, *values = self._record.unpack_from(data, start)
            if values[0] and zlib.crc32(data[start + 8 : start + size]) == checksum:
                found.append(tuple(values))
        return sorted(found)


class Rings:
    """The files of one state directory, for reading and writing."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / FOLDER
        self.fine = Ring(self.directory / "fine.ring", len(FIELDS), _SLOTS)
        self.coarse = Ring(self.directory / "coarse.ring", len(FIELDS), _SLOTS)
        self.epochs = Ring(self.directory / "epochs.ring", len(EPOCH_FIELDS), _EPOCHS)

    def read(self, since: float = 0.0) -> dict[str, Json]:
        """As JSON, from a time on; of what has ended, the hours before its end."""
        found = {"fine": self.fine.read(), "coarse": self.coarse.read()}
        newest = max((records[-1][0] for records in found.values() if records), default=0.0)
        spans = {"fine": FINE_SECS * _SLOTS, "coarse": COARSE_SECS * _SLOTS}
        return {
            "fields": ["at", *FIELDS],
            "epoch_fields": ["at", *EPOCH_FIELDS],
            "fine_secs": FINE_SECS,
            "coarse_secs": COARSE_SECS,
            **{name: _shown(found[name], max(since, newest - span)) for name, span in spans.items()},
            "epochs": _shown(self.epochs.read(), since),
        }


def _shown(records: Sequence[tuple[float, ...]], since: float) -> list[list[float | None]]:
    return [
        [None if math.isnan(value) else round(value, 4) for value in record] for record in records if record[0] > since
    ]


def add_run(state_dir: Path, status: Mapping[str, Json]) -> None:
    """Keep how a run ended, from the last status that it left."""
    kept = {name: status.get(name) for name in ("started_at", "state", "reason", "epochs", "retries")}
    run = {**kept, "ended_at": status["updated_at"], "rows_out": status["rows"]["out"]}
    path = state_dir / FOLDER / RUNS_FILE
    temporary = path.with_suffix(".new")
    with _not_worth_a_failure():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.touch(0o600)
        temporary.write_text(json.dumps([run, *read_runs(state_dir)][:_RUNS], ensure_ascii=False))
        os.replace(temporary, path)


def read_runs(state_dir: Path) -> list[Json]:
    """The runs before this one, the last one first."""
    try:
        found = json.loads((state_dir / FOLDER / RUNS_FILE).read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


class History:
    """Takes a sample every few seconds in a thread of its own, and keeps each epoch."""

    def __init__(self, sample: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.time) -> None:
        """`sample` gives a number for each of `FIELDS`: counters since the start, and the others as they are."""
        self._sample = sample
        self._clock = clock
        self._rings: Rings | None = None
        self._before: Sequence[float] = [0.0] * COUNTED
        self._minute: tuple[int, list[float]] | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def begin(self, state_dir: Path) -> None:
        rings = Rings(state_dir)
        with contextlib.suppress(OSError):
            rings.directory.mkdir(mode=0o700, exist_ok=True)
        self._rings = rings
        threading.Thread(target=self._keep_sampling, name="penstock-history", daemon=True).start()

    def close(self) -> None:
        """Take the last sample."""
        if self._rings is not None and not self._closed.is_set():
            self._closed.set()
            self.take()

    def epoch(self, values: Sequence[float]) -> None:
        """An epoch is committed; `values` are its `EPOCH_FIELDS`."""
        if self._rings is not None:
            with self._lock, _not_worth_a_failure():
                self._rings.epochs.put(int(values[0]), self._clock(), values)

    def take(self) -> None:
        """Take a sample now."""
        if self._rings is None:
            return
        with self._lock, _not_worth_a_failure():
            now, found = self._clock(), self._sample()
            values = [found[field] for field in FIELDS]
            gained = [after - before for after, before in zip(values, self._before, strict=False)]
            self._before = values[:COUNTED]
            shown = [*gained, *values[COUNTED:]]
            self._rings.fine.put(int(now // FINE_SECS), now, shown)
            minute = int(now // COARSE_SECS)
            if self._minute is None or self._minute[0] != minute:
                self._minute = (minute, shown)
            else:
                so_far = self._minute[1]
                added = [a + b for a, b in zip(so_far[:COUNTED], gained, strict=True)]
                worst = [_most(a, b) for a, b in zip(so_far[COUNTED:], values[COUNTED:], strict=True)]
                self._minute = (minute, [*added, *worst])
            self._rings.coarse.put(minute, now, self._minute[1])

    def _keep_sampling(self) -> None:
        while not self._closed.wait(FINE_SECS):
            self.take()


def _most(one: float, other: float) -> float:
    return other if math.isnan(one) else one if math.isnan(other) else max(one, other)


@contextlib.contextmanager
def _not_worth_a_failure():  # type: ignore[no-untyped-def]
    """History steers nothing: a full disk does not stop a pipeline here."""
    try:
        yield
    except OSError as error:
        log.debug("cannot keep the history: %s", error.strerror)
