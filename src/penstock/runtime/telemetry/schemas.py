"""What the columns of each topic have been: a small file in the state directory that is added to when they change."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.durable import Json
from penstock.runtime.telemetry.history import FOLDER

MOST_CHANGES = 300
"""Changes that are kept; the columns as they are now always are."""


class SchemaLog:
    """Remembers the columns of each topic, and what changed when."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._known: dict[str, dict[str, str]] = {}
        self._changes: list[Json] = []

    def begin(self, state_dir: Path) -> None:
        self._path = state_dir / FOLDER / "schemas.json"
        found = read_schemas(state_dir)
        self._known, self._changes = found["topics"], found["changes"]

    def look(self, schemas: Mapping[str, Mapping[str, str]], epoch: int | None) -> None:
        """The columns of these topics now."""
        new = {topic: columns for topic, columns in schemas.items() if self._known.get(topic) != columns}
        if self._path is None or not new:
            return
        for topic, columns in new.items():
            before = self._known.get(topic, {})
            change = {
                "added": {name: kind for name, kind in columns.items() if name not in before},
                "removed": {name: kind for name, kind in before.items() if name not in columns},
                "retyped": {
                    name: [before[name], kind] for name, kind in columns.items() if before.get(name, kind) != kind
                },
            }
            self._changes.append({"at": time.time(), "epoch": epoch, "topic": topic, "first": not before, **change})
            self._known[topic] = dict(columns)
        self._changes = self._changes[-MOST_CHANGES:]
        temporary = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # for people alone
            temporary.touch(0o600)
            temporary.write_text(json.dumps({"topics": self._known, "changes": self._changes}, ensure_ascii=False))
            os.replace(temporary, self._path)


def read_schemas(state_dir: Path) -> dict[str, Json]:
    """The columns of each topic, and the changes that led to them, the newest last."""
    try:
        found: dict[str, Json] = json.loads((state_dir / FOLDER / "schemas.json").read_text())
        return {"topics": found["topics"], "changes": found["changes"]}
    except (OSError, ValueError, KeyError):
        return {"topics": {}, "changes": []}
