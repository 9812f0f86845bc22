"""Pipelines as the console sees them: one that runs in this process, or what any of them left in its state directory."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.durable import Json
from penstock.errors import ACTIONS, CODES, ConfigError, ConnectorError, FatalError, from_text, without_secrets
from penstock.pipeline import Pipeline
from penstock.remedies import REMEDIES
from penstock.runtime import commands
from penstock.runtime.messages.box import Store, plain
from penstock.runtime.messages.store import wants_letters
from penstock.runtime.telemetry import STATUS_FILE, Telemetry, read_status
from penstock.runtime.telemetry.history import Rings, read_runs
from penstock.runtime.telemetry.parts import most_behind
from penstock.runtime.telemetry.schemas import read_schemas

SAMPLES = 5
"""Dead letters that are shown whole."""

DEPTH = 5
"""How deep state directories are looked for."""

LOOK_SECS = 5.0
"""How often new state directories are looked for, and dead letters counted again."""

COUNT_SECS = 1.0
"""How long an answer waits for them; the next one has them otherwise."""

LOOK_SHARE = 20
"""Both are done again after so many times of what they took: letters may be many and far away, trees of files large."""

TABLE = "_delta_log"
"""What the directory of a table holds: there is no state directory in one, but many others may be."""

_TABLE_VERBS = ("pause", "resume", "skip", "resync")


class Watched:
    """One pipeline."""

    def __init__(
        self, state_dir: Path | None, telemetry: Telemetry | None = None, pipeline: Pipeline | None = None
    ) -> None:
        self.state_dir = state_dir
        self._telemetry = telemetry
        self._pipeline = pipeline
        self._loaded: tuple[tuple[str, int], Pipeline] | None = None
        self._letters: tuple[float, Json] | None = None
        """What was found of dead letters, and until when that is good enough."""
        self._counting: threading.Thread | None = None
        self._lock = threading.Lock()
        self.id = hashlib.sha256(str(state_dir).encode()).hexdigest()[:12]

    @classmethod
    def of_run(cls, telemetry: Telemetry, state_dir: Path | None, pipeline: Pipeline | None) -> Watched:
        return cls(state_dir, telemetry, pipeline)

    def status(self) -> dict[str, Json] | None:
        """What it does, or how it ended; None if it has left nothing."""
        if self._telemetry is not None:
            return self._telemetry.status()
        try:
            return read_status(self.state_dir) if self.state_dir is not None else None
        except OSError:  # not for this user
            return None

    def summary(self) -> dict[str, Json] | None:
        """A line of the table of all pipelines."""
        try:
            status = self.status()
            return None if status is None else _line(self.id, status)
        except (KeyError, TypeError, AttributeError):  # of another version, or not of Penstock at all
            name = str(self.state_dir.name if self.state_dir is not None else "?")
            what = {"pipeline": name, "state": "unknown", "reason": "its status cannot be read by this version"}
            return {**dict.fromkeys(_KEPT), "id": self.id, **what, **dict.fromkeys(_MORE)}

    def history(self, since: float) -> dict[str, Json]:
        """The last hours, from a time on."""
        return Rings(self._readable()).read(since)

    def detail(self) -> dict[str, Json]:
        """What changes seldom: columns, the file without its secrets, dead letters, the audit."""
        directory = self._readable()
        return {
            "schemas": read_schemas(directory),
            "file": self._file_text(),
            "letters": self._open_letters(),
            "audit": commands.read_audit(directory),
            "runs": read_runs(directory),
        }

    def act(self, body: Mapping[str, Json], who: str) -> list[str]:
        """Do what the command line would do; gives its answer."""
        action = body.get("action")
        pipeline = self.pipeline()
        if action in ("stop", "drain"):
            return commands.end_asked(pipeline, action, who)
        if action in _TABLE_VERBS:
            tables = body.get("tables")
            if not (isinstance(tables, list) and tables and all(isinstance(each, str) for each in tables)):
                raise ConfigError(f"{action} needs the names of tables")
            source = body.get("source", "")
            if not isinstance(source, str):
                raise ConfigError(f"{action} needs `source` to be the name of a source")
            return commands.tables_asked(pipeline, action, tables, who, source)
        if action in ("replay", "drop"):
            where = body.get("where", {})
            if not (isinstance(where, dict) and all(isinstance(each, str) for each in where.values())):
                raise ConfigError(f"{action} needs `where` to be a table of texts")
            from penstock.runtime.messages.replay import parse_where

            chosen = parse_where([f"{name}={value}" for name, value in where.items()])
            self._letters = None
            return commands.letters_asked(pipeline, action, chosen, who)[1]
        raise ConfigError(f"there is no action {action!r}")

    def pipeline(self) -> Pipeline:
        """The pipeline itself, read from its file again when that has changed."""
        if self._pipeline is not None:
            return self._pipeline
        if not self._is_trusted():
            raise FatalError(
                f"{self.state_dir} belongs to another user, or others can write in it: its pipeline file is not read here",
                hint="run the console as the user of the pipeline",
            )
        status = self.status()
        file = status and status["file"]
        if not file:
            raise FatalError("this pipeline was not started from a file", hint="use the console of its own run")
        with self._lock:
            try:
                key = (file, os.stat(file).st_mtime_ns)
            except OSError as error:
                raise FatalError(f"cannot read {file}: {error.strerror}") from error
            if self._loaded is None or self._loaded[0] != key:
                self._loaded = (key, Pipeline.from_toml(file))
            return self._loaded[1]

    def _readable(self) -> Path:
        """Where more than the status is read: of a directory of somebody else, nowhere."""
        return self.state_dir if self.state_dir is not None and self._is_trusted() else Path(os.devnull)

    def _is_trusted(self) -> bool:
        """What a status of somebody else names could be any file of this user, and its modules would run as this user."""
        if self._telemetry is not None or self.state_dir is None:
            return True
        try:
            found = os.stat(self.state_dir)
        except OSError:
            return False
        return found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022

    def _file_text(self) -> str | None:
        status = self.status() if self._is_trusted() else None
        try:
            return hidden(Path(status["file"]).read_text()) if status and status["file"] else None
        except (OSError, UnicodeDecodeError):
            return None

    def _open_letters(self) -> Json:
        """As of the last count. A new one is made aside: a store that is far away, or away, must not hold up the page."""
        with self._lock:
            if self._counting is None and (self._letters is None or time.monotonic() > self._letters[0]):
                self._counting = threading.Thread(target=self._count_letters, name="penstock-letters", daemon=True)
                self._counting.start()
            counting = self._counting
        if counting is not None:
            counting.join(COUNT_SECS)
        return self._letters[1] if self._letters is not None else {"counting": True}

    def _count_letters(self) -> None:
        began = time.monotonic()
        found: Json
        try:
            found = _letters(Store(self.pipeline())) if self._has_letters() else {"open": 0}
        except ConnectorError as error:
            found = {"error": f"{error.code} {error.message}", "hint": error.hint}
        except Exception as error:  # noqa: BLE001 (of a client library: the page shows it, and all else that it has)
            found = {"error": without_secrets(f"{type(error).__name__}: {error}"), "hint": ""}
        now = time.monotonic()
        self._letters = (now + max(LOOK_SECS, LOOK_SHARE * (now - began)), found)
        self._counting = None

    def _has_letters(self) -> bool:
        if self.state_dir is not None and (self.state_dir / "dead_letters").is_dir():
            return True
        status = self.status()
        if self._pipeline is None and not (status and status["file"]):
            return False
        pipeline = self.pipeline()
        return wants_letters(pipeline) and pipeline.processing.dead_letter_sink is not None


_KEPT = ("pipeline", "state", "reason", "latency_secs", "dead_letters", "epochs", "uptime_secs")
_MORE = ("in_per_sec", "out_per_sec", "lag_rows", "lag_bytes")


def _line(id: str, status: Mapping[str, Json]) -> dict[str, Json]:
    lags = {f"lag_{unit}": lag for unit, lag in most_behind(status).items()}
    rates = {name: status["rows"][name] for name in ("in_per_sec", "out_per_sec")}
    return {"id": id, **{name: status.get(name) for name in _KEPT}, **rates, **lags}


def _letters(store: Store) -> Json:
    """How many open letters there are of each kind, and the newest. A kind is what an action can choose, and no less."""
    letters, _ = store.chosen({})
    names = ("topic", "code", "rule")
    about = zip(*(letters.column(name).to_pylist() for name in (*names, "sink", "attempt")), strict=True)
    groups: dict[tuple[str, ...], list[tuple[str | None, int]]] = {}
    for *kind, sink, attempt in about:
        groups.setdefault(tuple(kind), []).append((sink, attempt))
    found = [
        {
            **dict(zip(names, kind, strict=True)),
            "sinks": sorted({sink for sink, _ in each if sink is not None}),
            "attempt": max(attempt for _, attempt in each),
            "count": len(each),
        }
        for kind, each in groups.items()
    ]
    return {
        "open": letters.num_rows,
        "groups": sorted(found, key=lambda each: (-each["count"], each["topic"], each["code"], each["rule"])),
        "samples": [plain(letter, state) for letter, state in store.newest(SAMPLES, {})],
    }


class Fleet:
    """The pipelines whose state directories are in or under some directories; they may come, die and go."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._due = 0.0
        """When state directories are looked for again."""
        self._has_looked = False
        self._looking: threading.Thread | None = None
        self._known: dict[str, Watched] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_run(cls, watched: Watched) -> Fleet:
        fleet = cls(())
        fleet._known = {watched.id: watched}
        return fleet

    def all(self) -> list[Watched]:
        """Those that the last look found. A new one is made aside: a large tree of files must not hold up the page."""
        with self._lock:
            if self._directories and self._looking is None and time.monotonic() >= self._due:
                self._looking = threading.Thread(target=self._look, name="penstock-fleet", daemon=True)
                self._looking.start()
            looking = self._looking
        if looking is not None:
            looking.join(COUNT_SECS if self._has_looked else None)
        return list(self._known.values())

    def _look(self) -> None:
        began = time.monotonic()
        try:
            found = [Watched(path) for top in self._directories for path in _state_dirs(Path(top))]
            self._known = {each.id: self._known.get(each.id, each) for each in found}
        finally:
            now = time.monotonic()
            self._due = now + max(LOOK_SECS, LOOK_SHARE * (now - began))
            self._has_looked, self._looking = True, None

    def get(self, id: str) -> Watched | None:
        return next((each for each in self.all() if each.id == id), None)


def _state_dirs(top: Path, depth: int = DEPTH) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(top), key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in entries}
    if STATUS_FILE in names:
        yield top.resolve()
    if names & {STATUS_FILE, TABLE}:
        return
    for entry in entries:
        if depth and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _state_dirs(Path(entry.path), depth - 1)


def codes() -> list[Json]:
    """Every error code: what it means, what the runtime does about it, and what a person does."""
    return [
        {"code": code, "meaning": meaning, "action": str(ACTIONS[_class_of(code)]), "fix": REMEDIES[code]}
        for code, meaning in CODES.items()
    ]


def _class_of(code: str) -> Any:
    error = from_text(code)
    assert error is not None
    return next(kind for kind in type(error).__mro__ if kind in ACTIONS)


_SENSITIVE = re.compile(
    r"""(?ix)
    ( [\w.-]* (?:password|passwd|secret|token|credential|authorization
      |api[_-]?key|access[_-]?key|private[_-]?key|cookie) [\w.-]* ["']?
      \s*=\s* )
    (?: \"{3}.*?\"{3} | '{3}.*?'{3} | "(?:[^"\\\n]|\\.)*" | '[^'\n]*' )""",
    re.DOTALL,
)
_IN_ADDRESS = re.compile(r"(://)[^/\s\"'@]*@")
_IN_QUERY = re.compile(r"([?&](?:sig|signature|token|key|password|secret)=)[^&\s\"']+", re.IGNORECASE)
_IN_DSN = re.compile(r"(\bpassword=)(?:'[^']*'|[^\s\"']+)", re.IGNORECASE)


def hidden(text: str) -> str:
    """A pipeline file without what may be secret: values by their names, parts of addresses, and what references name."""
    for name in re.findall(r"""\benv\s*=\s*["']([^"']+)["']""", text):
        if len(value := os.environ.get(name, "")) > 3:
            text = text.replace(value, "…")
    text = _SENSITIVE.sub(r'\1"…"', text)
    for pattern in (_IN_ADDRESS,):
        text = pattern.sub(r"\1…@", text)
    for pattern in (_IN_QUERY, _IN_DSN):
        text = pattern.sub(r"\1…", text)
    return without_secrets(text)
