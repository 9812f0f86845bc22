"""
A registry in files of the pipeline's own state directory.

    schemas/content/<sha256>.json         type, text and references: written once, named by what it holds
    schemas/ids/<id>.json                 which content has this id
    schemas/subjects/<name>/<n>.json      which id is version n
    schemas/subjects/<name>/compatibility.json

Files are only ever added, each whole, synced and by compare-and-set, in the order above: a crash in between leaves a file
that nothing points to, and the next call uses it. Two processes that claim the same number get one each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from penstock.config import Config
from penstock.durable import canonical, make_directory, publish_once, write_atomic
from penstock.errors import ConfigError, DataError, FatalError, SchemaError
from penstock.formats import WireSchema
from penstock.schema.compatibility import Compatibility, Incompatibility, content, incompatibilities
from penstock.schema.registry.versions import refusal


class EmbeddedConfig(Config):
    """`[registry]` with `type = "embedded"`."""

    path: Path | None = None
    """Directory of the schemas; by default `schemas` in the state directory."""

    compatibility: Compatibility = Compatibility.BACKWARD
    """What new versions must keep, for subjects that have no setting of their own."""


class Embedded:
    """Versions in files: no server, and nothing to lose that the state directory does not hold."""

    config_type: ClassVar[type[Config]] = EmbeddedConfig
    is_shared: ClassVar[bool] = False

    def __init__(self, config: EmbeddedConfig, state_dir: Path) -> None:
        self.config = config
        self.directory = config.path or Path(state_dir) / "schemas"
        self._ids: dict[int, WireSchema] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A task on another machine does not see these files, so a copy brings along what has an id.
        ids = {id: self.fetch_schema_by_id(id) for id in _numbers(self.directory / "ids")}
        return {**self.__dict__, "_ids": {**self._ids, **ids}}

    def subjects(self) -> list[str]:
        root = self.directory / "subjects"
        names = [each.name for each in root.iterdir()] if root.is_dir() else []
        return sorted(name for name in map(unquote, names) if self.versions(name))

    def versions(self, subject: str) -> list[int]:
        return _numbers(self._subject(subject))

    def fetch_schema(self, subject: str, version: int | None = None) -> WireSchema:
        known = self.versions(subject)
        if not known:
            raise ConfigError(
                f"the registry has no subject {subject!r}",
                code="PEN-1031",
                hint=f"it has {', '.join(self.subjects()) or 'none'}; `schema_file` with auto_register = true adds one",
            )
        if version is not None and version not in known:
            raise ConfigError(
                f"{subject!r} has no version {version}",
                code="PEN-1031",
                hint=f"it has {', '.join(map(str, known))}: choose one of them in version_strategy",
            )
        chosen = known[-1] if version is None else version
        id = _read(self._subject(subject) / f"{chosen}.json")["id"]
        return replace(self._by_id(id), subject=subject, version=chosen)

    def fetch_schema_by_id(self, id: int) -> WireSchema:
        if id in self._ids:
            return self._ids[id]
        if not self._id(id).exists():
            raise DataError(
                f"the registry has no schema with the id {id}",
                code="PEN-3030",
                hint="the message was written with another registry, or has no schema id in front: check the framing",
            )
        schema, places = self._by_id(id), self.places(id)
        if not places:  # the process that claimed the id died before its version, which may still come
            return schema
        self._ids[id] = replace(schema, subject=places[0][0], version=places[0][1])
        return self._ids[id]

    def places(self, id: int) -> list[tuple[str, int]]:
        return [
            (subject, version)
            for subject in self.subjects()
            for version in self.versions(subject)
            if _read(self._subject(subject) / f"{version}.json")["id"] == id
        ]

    def find_schema(self, subject: str, schema: WireSchema) -> WireSchema | None:
        return self._find(subject, schema, self.versions(subject))

    def check_compatibility(self, subject: str, schema: WireSchema) -> list[Incompatibility]:
        return self._check(subject, schema, self.versions(subject))

    def register_schema(self, subject: str, schema: WireSchema) -> WireSchema:
        self._check_references(schema)
        while True:
            # One look decides everything: what comes after it has the number that is claimed below.
            known = self.versions(subject)
            found = self._find(subject, schema, known)
            if found is not None:
                return found
            problems = self._check(subject, schema, known)
            if problems:
                raise refusal(subject, self.compatibility(subject), problems)
            id = self._claim_id(schema)
            number = known[-1] + 1 if known else 1
            if self._publish(self._subject(subject) / f"{number}.json", {"id": id}):
                return replace(schema, subject=subject, version=number, id=id)
            # Another process was first with this number: its version counts in the check, or is this very schema.

    def compatibility(self, subject: str) -> Compatibility:
        file = self._subject(subject) / "compatibility.json"
        return Compatibility(_read(file)["compatibility"]) if file.exists() else self.config.compatibility

    def set_compatibility(self, subject: str, mode: Compatibility) -> None:
        make_directory(self._subject(subject))
        write_atomic(self._subject(subject) / "compatibility.json", canonical({"compatibility": mode}).encode())

    def _find(self, subject: str, schema: WireSchema, known: Sequence[int]) -> WireSchema | None:
        wanted = _address(schema)
        for version in reversed(known):
            id = _read(self._subject(subject) / f"{version}.json")["id"]
            if _read(self._id(id))["content"] == wanted:
                return replace(self._by_id(id), subject=subject, version=version)
        return None

    def _check(self, subject: str, schema: WireSchema, known: Sequence[int]) -> list[Incompatibility]:
        earlier = [self.fetch_schema(subject, version) for version in known]
        return incompatibilities(self.compatibility(subject), earlier, replace(schema, subject=subject))

    def _check_references(self, schema: WireSchema) -> None:
        for name, each in schema.references:
            if not each.subject or each.version not in self.versions(each.subject):
                raise SchemaError(
                    f"the reference {name!r} is no version of a subject in the registry",
                    code="PEN-4031",
                    hint="register what a schema refers to first",
                )

    def _claim_id(self, schema: WireSchema) -> int:
        """The id of a content: the one it has, or the next free one."""
        address = _address(schema)
        references = [[name, each.subject, each.version] for name, each in schema.references]
        self._publish(
            self.directory / "content" / f"{address}.json",
            {"type": schema.type, "text": schema.text, "references": references},
        )
        while True:
            known = _numbers(self.directory / "ids")
            for id in known:
                if _read(self._id(id))["content"] == address:
                    return id
            number = known[-1] + 1 if known else 1
            if self._publish(self._id(number), {"content": address}):
                return number

    def _by_id(self, id: int) -> WireSchema:
        address = _read(self._id(id))["content"]
        stored = _read(self.directory / "content" / f"{address}.json")
        references = tuple((name, self.fetch_schema(subject, n)) for name, subject, n in stored["references"])
        schema = WireSchema(stored["type"], stored["text"], id=id, references=references)
        if _address(schema) != address:
            raise _damaged(self.directory / "content" / f"{address}.json", "its text is not what it is named by")
        return schema

    def _id(self, id: int) -> Path:
        return self.directory / "ids" / f"{id}.json"

    def _subject(self, subject: str) -> Path:
        if not subject:
            raise ConfigError("a subject needs a name", code="PEN-1031", hint="set `subject` in [[schemas]]")
        name = quote(subject, safe="")
        return self.directory / "subjects" / (f"%2E{name[1:]}" if name.startswith(".") else name)

    def _publish(self, path: Path, value: Any) -> bool:
        make_directory(path.parent)
        return publish_once(path, canonical(value).encode())


def _address(schema: WireSchema) -> str:
    return hashlib.sha256(content(schema).encode()).hexdigest()


def _numbers(directory: Path) -> list[int]:
    """The numbers that files are named by; what is half written has another name."""
    files = directory.glob("*.json") if directory.is_dir() else ()
    return sorted(int(each.stem) for each in files if each.stem.isdigit())


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> FatalError:
    return FatalError(
        f"the schema registry in {path.parent.parent} is damaged: {path.name}: {reason}",
        code="PEN-5040",
        hint="bring the directory back from a backup; schemas are never changed in place",
    )
