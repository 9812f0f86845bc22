"""`[[schemas]]` and `[registry]`, read and checked: which format and which schema the payloads of a topic have."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from penstock.config import Config
from penstock.errors import ConfigError, SchemaError
from penstock.formats import Format, WireSchema, load
from penstock.pipeline.options import SchemaEntry
from penstock.pipeline.routing import matches
from penstock.schema.compatibility import same
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
    def place(self) -> str:
        """What a manifest calls the entry; no two of a file have the same."""
        return f"{self.entry.topic} for {self.entry.direction}" if self.entry.direction else self.entry.topic

    @property
    def uses_file(self) -> bool:
        """True if the version that its file is counts, whatever else the registry has: there is no other word on it."""
        return self.file is not None and "version_strategy" not in self.entry.model_fields_set

    @property
    def subject(self) -> str | None:
        """The subject in the registry; None: the format has no schema, or it has one of its own and no subject."""
        use = self.format_type.schema_use
        if use == "refused" or (use == "optional" and self.entry.subject is None):
            return None
        return self.file.subject if self.file is not None else subject_of(self.entry)


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


def subject_of(entry: SchemaEntry, record: str = "") -> str:
    """An entry's subject; `{topic}` is its topic with dots for slashes, and `{record}` the name that its schema has."""
    if entry.subject is None:
        return entry.topic.lstrip("/")
    topic = entry.topic.lstrip("/").replace("/", ".")
    return entry.subject.replace("{record}", record).replace("{topic}", topic)


def read_schema(entry: SchemaEntry, options: Config) -> WireSchema | None:
    """The schema in an entry's file, under its subject."""
    if entry.schema_file is None:
        return None
    found = read_schema_file(entry.schema_file, entry.schema_type, "")
    if entry.subject is None or "{record}" not in entry.subject:
        return replace(found, subject=subject_of(entry))
    record = load(entry.schema_type).record_name(options, found)
    if not record:
        raise ConfigError(
            f"the schema in {entry.schema_file} has no name for the {{record}} of `subject`",
            code="PEN-1015",
            hint='name it there (Avro: a record, JSON Schema: "title"), or write the subject out',
        )
    return replace(found, subject=subject_of(entry, record))


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
        if use == "required" and "{topic}" in (entry.subject or "{topic}") and set("*+#") & set(entry.topic):
            what = f"the pattern {entry.topic!r} names no subject"
            found.append((place, what, "set `subject`: all topics of the pattern have the same schema"))
        if "{record}" in (entry.subject or "") and entry.schema_file is None:
            what = "`{record}` in `subject` is the name in the schema's file, and there is no `schema_file`"
            found.append((place, what, "set schema_file, or write the subject out"))
        if entry.expected_subject is not None and getattr(each.options, "framing", "none") == "none":
            what = "`expected_subject` looks at the frames of messages, and these have none"
            found.append((place, what, 'set framing = "confluent" if the messages have such frames, or leave it out'))
        twins = [o for o in schemas[:place] if (o.entry.topic, o.entry.direction) == (entry.topic, entry.direction)]
        if twins:
            what = f"two [[schemas]] entries are for the topic {entry.topic!r}"
            found.append((place, what, 'leave one out, or set for = "source" in one and for = "sink" in the other'))
        found += [(place, *_two_files(other, each)) for other in schemas[:place] if _differ(other, each)]
    return found


def _differ(one: TopicSchema, other: TopicSchema) -> bool:
    """True for two files that would be versions of one subject: each run would add the one that is not the latest."""
    if one.file is None or other.file is None or one.subject is None or one.subject != other.subject:
        return False
    try:
        return one.file.type != other.file.type or not same(one.file, other.file)
    except SchemaError:
        return one.file.text != other.file.text  # what is wrong with one is said when it is used


def _two_files(one: TopicSchema, other: TopicSchema) -> tuple[str, str]:
    files = f"{one.entry.schema_file} (of {one.place}) and {other.entry.schema_file} (of {other.place})"
    what = f"the subject {other.subject!r} has two schema files that differ: {files}"
    return what, "give each a `subject` of its own, or name the same file in both"
