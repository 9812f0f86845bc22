"""`[[schemas]]` and `[registry]`, read and checked: which format and which schema the payloads of a topic have."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.formats import Format, WireSchema, load
from penstock.pipeline.options import SchemaEntry
from penstock.pipeline.routing import matches
from penstock.schema.registry import Registry, make
from penstock.sink import Topic


@dataclass(frozen=True)
class TopicSchema:
    """One `[[schemas]]` entry with its format's options and its file's text; a picklable value."""

    entry: SchemaEntry
    options: Config
    file: WireSchema | None = None

    @property
    def format_type(self) -> type[Format[Any]]:
        return load(self.entry.schema_type)

    def serves(self, direction: Literal["source", "sink"]) -> bool:
        return self.entry.direction in (None, direction)

    def takes(self, topic: Topic) -> bool:
        return matches(self.entry.topic, topic)

    @property
    def subject(self) -> str | None:
        """The subject in the registry; None: the format has no schema, or it has one of its own and no subject."""
        if self.format_type.schema_use == "refused":
            return None
        if self.entry.subject is not None or self.format_type.schema_use == "optional":
            return self.entry.subject
        return self.entry.topic.lstrip("/")


@dataclass(frozen=True)
class RegistryRef:
    """The `[registry]` section."""

    type: str = "embedded"
    config: Config | None = None

    def make(self, state_dir: Path) -> Registry:
        """The registry itself; connections are opened where it is used."""
        from penstock.schema.registry import registry_type

        return make(self.type, self.config or registry_type(self.type).config_type(), state_dir)


@dataclass(frozen=True)
class TopicSchemas:
    """All entries of a file, and the registry that they use."""

    entries: tuple[TopicSchema, ...] = ()
    registry: RegistryRef = field(default_factory=RegistryRef)

    def of(self, topic: Topic, direction: Literal["source", "sink"]) -> TopicSchema | None:
        """The entry of a topic: one for this direction alone wins over one for both, and the first over later ones."""
        found = [each for each in self.entries if each.serves(direction) and each.takes(topic)]
        return next((each for each in found if each.entry.direction), next(iter(found), None))

    def __bool__(self) -> bool:
        return bool(self.entries)


def read_schema(entry: SchemaEntry) -> WireSchema | None:
    """The schema in an entry's file."""
    if entry.schema_file is None:
        return None
    return read_schema_file(entry.schema_file, entry.schema_type, entry.subject or entry.topic.lstrip("/"))


def read_schema_file(path: Path, kind: str, subject: str) -> WireSchema:
    """The schema in a file: text, or for Protobuf also a descriptor set."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the schema file {path}: {error.strerror}",
            code="PEN-1015",
            hint="correct `schema_file`; a relative path is looked for beside the pipeline file",
        ) from error
    binary = kind == "protobuf" and path.suffix != ".proto"
    try:
        text = base64.b64encode(raw).decode() if binary else raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"the schema file {path} is not UTF-8 text", code="PEN-1015") from None
    return WireSchema(kind, text, subject)


def problems(schemas: Sequence[TopicSchema]) -> list[tuple[int, str, str]]:
    """What is wrong with entries that can each be read: (which, what, hint)."""
    found = []
    for place, each in enumerate(schemas):
        entry, use = each.entry, each.format_type.schema_use
        given = [name for name in ("schema_file", "subject") if getattr(entry, name) is not None]
        if use == "refused" and given:
            what = f"the format {entry.schema_type} has no schema, so {given[0]!r} has no meaning"
            found.append((place, what, f"leave out {given[0]}, or choose another schema_type"))
        if use == "required" and entry.subject is None and set("*+#") & set(entry.topic):
            what = f"the pattern {entry.topic!r} names no subject"
            found.append((place, what, "set `subject`: all topics of the pattern have the same schema"))
        twins = [o for o in schemas[:place] if (o.entry.topic, o.entry.direction) == (entry.topic, entry.direction)]
        if twins:
            what = f"two [[schemas]] entries are for the topic {entry.topic!r}"
            found.append((place, what, 'leave one out, or set for = "source" in one and for = "sink" in the other'))
    return found
